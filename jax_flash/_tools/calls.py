"""Calls of attention from the command line: sizes and options by flags, or those of a Hugging Face config.json."""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jax_flash import attention
from jax_flash._call import dtypes

LENGTH = 2048
"""T and S: a kernel is compiled for no length, so any number that is not small does."""

ARRAYS = ("q_offset", "q_lengths", "kv_lengths", "segment_ids", "alibi_slopes", "sinks")
"""What --with takes: arguments of attention that are arrays, whose values matter to no kernel."""


class Call(NamedTuple):
    """What `attention` is called with.

    Attributes:
      title: the call in words.
      inputs: query, key and value.
      options: the other arguments by name; arrays are shapes here, as query, key and value are.
    """

    title: str
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, Any]

    def forward(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The call as a function, and its arguments."""
        arrays = {name: x for name, x in self.options.items() if isinstance(x, jax.ShapeDtypeStruct)}
        others = {name: x for name, x in self.options.items() if name not in arrays}
        return lambda query, key, value, arrays: attention(query, key, value, **others, **arrays), (
            *self.inputs,
            arrays,
        )

    def with_gradients(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The call and its gradients by query, key and value."""
        function, arguments = self.forward()
        loss = lambda *args: function(*args).astype("float32").sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2)), arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which calls."""
    sizes = parser.add_argument_group("which calls: by sizes, or by a config")
    sizes.add_argument(
        "--config",
        type=pathlib.Path,
        metavar="FILE",
        help="a Hugging Face config.json, for the heads, dtype, windows, softcap, sinks and ALiBi of its model; flags "
        "take precedence",
    )
    sizes.add_argument("--heads", type=_at_least(1), metavar="N", help="query heads")
    sizes.add_argument("--kv-heads", type=_at_least(1), metavar="K", help="key heads (default: as query heads)")
    sizes.add_argument("--head-dim", type=_at_least(1), metavar="H")
    sizes.add_argument("--value-head-dim", type=_at_least(1), metavar="V", help="default: as --head-dim")
    sizes.add_argument("--dtype", choices=dtypes.INPUTS, help="default: the config's, else bfloat16")
    options = parser.add_argument_group("options of attention")
    causal = options.add_mutually_exclusive_group()
    causal.add_argument("--causal", dest="causal", action="store_true", default=None, help="the default")
    causal.add_argument("--full", dest="causal", action="store_false", help="attention that is not causal")
    options.add_argument("--window", type=_at_least(0), metavar="LEFT", help="keys that a row sees before its own")
    options.add_argument("--softcap", type=_positive, metavar="X")
    options.add_argument("--dropout-rate", type=_positive, metavar="RATE", help="below 1")
    options.add_argument("--precision", choices=("default", "high", "highest"), help="of float32")
    options.add_argument("--deterministic", action="store_true", help="deterministic_backward=True")
    options.add_argument(
        "--with",
        dest="arrays",
        action="append",
        default=[],
        choices=ARRAYS,
        help="calls have this argument, an array; may be given several times (a KV cache: q_offset and kv_lengths)",
    )


def of_arguments(args: argparse.Namespace) -> list[Call]:
    """The calls that the flags of `add_arguments` describe. Raises ValueError and OSError."""
    models = _of_config(args.config) if args.config else [_Model()]
    calls = []
    for model in models:
        given = {
            "heads": args.heads,
            "kv_heads": args.kv_heads,
            "head_dim": args.head_dim,
            "value_head_dim": args.value_head_dim,
            "dtype": args.dtype,
            "causal": args.causal,
            "window": args.window,
            "softcap": args.softcap,
        }
        model = model._replace(**{name: x for name, x in given.items() if x is not None})
        model = model._replace(arrays=tuple(dict.fromkeys((*model.arrays, *args.arrays))))
        options = {
            "dropout_rate": args.dropout_rate,
            "precision": args.precision,
            "deterministic_backward": args.deterministic or None,
        }
        call = _call_of(model, {name: x for name, x in options.items() if x is not None})
        calls += [call] if call not in calls else []
    return calls


class _Model(NamedTuple):
    """The attention of a model's layers."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    dtype: str = "bfloat16"
    causal: bool = True
    window: int | None = None  # keys before the row's own
    softcap: float | None = None
    arrays: tuple[str, ...] = ()


def _call_of(model: _Model, options: dict[str, Any]) -> Call:
    for flag, value in (("--heads", model.heads), ("--head-dim", model.head_dim)):
        if value is None:
            raise ValueError(f"{flag} must be given, or a --config that says it, got neither")
    assert model.heads is not None
    assert model.head_dim is not None
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    value_head_dim = model.head_dim if model.value_head_dim is None else model.value_head_dim
    if model.heads % kv_heads:
        raise ValueError(f"--kv-heads must divide --heads, {model.heads}, got {kv_heads}")
    batch = 1
    inputs = tuple(
        jax.ShapeDtypeStruct((batch, LENGTH, heads, size), model.dtype)
        for heads, size in ((model.heads, model.head_dim), (kv_heads, model.head_dim), (kv_heads, value_head_dim))
    )
    sizes = f"head_dim {model.head_dim}" + (
        f" and {value_head_dim} of values" if value_head_dim != model.head_dim else ""
    )
    words = [f"{model.dtype}, {model.heads} heads on {kv_heads}, {sizes}, {'causal' if model.causal else 'full'}"]
    options["causal"] = model.causal
    if model.window is not None:
        options["window"] = (model.window, None if model.causal else model.window)
        words.append(f"window {model.window}")
    if model.softcap is not None:
        options["softcap"] = model.softcap
        words.append(f"softcap {model.softcap:g}")
    words += [f"{name} {x}" for name, x in options.items() if name not in ("causal", "window", "softcap")]
    if "dropout_rate" in options:
        options["dropout_key"] = jax.eval_shape(lambda: jax.random.key(0))
    floats = "float64" if model.dtype == "float64" else "float32"
    shapes = {
        "q_offset": ((batch,), "int32"),
        "q_lengths": ((batch,), "int32"),
        "kv_lengths": ((batch,), "int32"),
        "alibi_slopes": ((model.heads,), floats),
        "sinks": ((model.heads,), floats),
    }
    for name in model.arrays:
        if name == "segment_ids":
            for side in ("q_segment_ids", "kv_segment_ids"):
                options[side] = jax.ShapeDtypeStruct((batch, LENGTH), "int32")
        else:
            options[name] = jax.ShapeDtypeStruct(*shapes[name])
        words.append(name)
    return Call(", ".join(words), inputs, options)


# Hugging Face's configs


def _of_config(path: pathlib.Path) -> list[_Model]:
    """The kinds of layers that a model has. Raises ValueError and OSError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--config must be a Hugging Face config.json, got {path}, which is no JSON: {error}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"--config must be a Hugging Face config.json, got {path}, which holds no object")
    if isinstance(config.get("text_config"), dict):  # of a model that takes pictures or sound too
        config = config | config["text_config"]

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    heads = first("num_attention_heads", "n_head", "n_heads", "num_heads")
    width = first("hidden_size", "n_embd", "d_model")
    head_dim, value_head_dim = first("head_dim"), None
    kv_heads = first("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    if rotary := first("qk_rope_head_dim"):  # multi-head latent attention: keys are made for every head
        head_dim, value_head_dim, kv_heads = first("qk_nope_head_dim") + rotary, first("v_head_dim"), heads
    if head_dim is None and heads and width:
        head_dim = width // heads
    if not (isinstance(heads, int) and isinstance(head_dim, int)):
        raise ValueError(
            f"--config must have num_attention_heads, and head_dim or hidden_size, got {path} with "
            f"{', '.join(sorted(config)) or 'nothing'}"
        )
    dtype = str(first("dtype", "torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in dtypes.INPUTS:
        raise ValueError(
            f"--config must have a dtype of {', '.join(dtypes.INPUTS)}, got {dtype} in {path}: use --dtype"
        )
    arrays = ["sinks"] if config.get("model_type") == "gpt_oss" else []
    if config.get("alibi") or config.get("model_type") == "bloom":
        arrays.append("alibi_slopes")
    encodes = any("MaskedLM" in str(name) for name in config.get("architectures") or [])
    model = _Model(
        heads,
        kv_heads,
        head_dim,
        value_head_dim,
        dtype,
        causal=not encodes,
        softcap=first("attn_logit_softcapping"),
        arrays=tuple(arrays),
    )
    window = first("sliding_window") if config.get("use_sliding_window", True) else None
    # A window of W keys has the row's own among them. Older configs do not say which layers have it.
    windowed = model if window is None else model._replace(window=window - 1)
    kinds = config.get("layer_types") or ("full_attention", "sliding_attention")
    found = [model] if "full_attention" in kinds or window is None else []
    return found + ([windowed] if window is not None and "sliding_attention" in kinds else [])


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(text)

    return number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number
