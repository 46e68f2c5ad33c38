"""Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685), saved and read in the files of PEFT."""

import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from llama.model import Layer, Llama

# Every projection of a layer, and the module of the layer that holds it.
TARGETS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class LoRA(NamedTuple):
    """A projection W becomes W + alpha / rank * A B, where only A [in, rank] and B [rank, out] are trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(TARGETS)

    def check(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"the rank of LoRA must be an integer of at least 1, got {self.rank!r}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha of LoRA must be a number > 0, got {self.alpha!r}")
        if not self.targets or not set(self.targets) <= TARGETS.keys():
            raise ValueError(f"the targets of LoRA must be among {', '.join(TARGETS)}, got {list(self.targets)}")


class LoRALinear(nnx.Module):
    def __init__(self, base: nnx.Linear, lora: LoRA, *, rngs: nnx.Rngs):
        # As PEFT draws them: torch's kaiming_uniform_ with a = sqrt(5) has this bound. B is 0, so that the adapted
        # model begins as the base model.
        bound = base.in_features**-0.5
        self.base = base
        self.lora_a = nnx.LoRAParam(
            jax.random.uniform(rngs.params(), (base.in_features, lora.rank), jnp.float32, -bound, bound)
        )
        self.lora_b = nnx.LoRAParam(jnp.zeros((lora.rank, base.out_features), jnp.float32))
        self.scale = lora.alpha / lora.rank

    def __call__(self, x: jax.Array) -> jax.Array:
        low = x @ self.lora_a[...].astype(x.dtype)
        return self.base(x) + low @ self.lora_b[...].astype(x.dtype) * self.scale

    def merged(self) -> nnx.Linear:
        """The base with the adapter added to its weights: in float32, then rounded to the weights' dtype once."""
        kernel = self.base.kernel[...]
        update = jnp.matmul(self.lora_a[...], self.lora_b[...], precision="highest") * self.scale
        self.base.kernel[...] = (kernel.astype(jnp.float32) + update).astype(kernel.dtype)
        return self.base


def add_lora(model: Llama, lora: LoRA, *, rngs: nnx.Rngs) -> None:
    """Puts adapters around the targets of every layer, in place."""
    lora.check()
    for layer in model.layers:
        for target in TARGETS:  # in this order, however the caller orders them: it decides the random numbers
            if target in lora.targets:
                base = getattr(_holder(layer, target), target)
                setattr(_holder(layer, target), target, LoRALinear(base, lora, rngs=rngs))


def merge_lora(model: Llama) -> None:
    """Adds the adapters to the weights and takes them away, in place."""
    for layer in model.layers:
        for target in TARGETS:
            module = getattr(_holder(layer, target), target)
            if isinstance(module, LoRALinear):
                setattr(_holder(layer, target), target, module.merged())


def save_adapter(folder: pathlib.Path, model: Llama, lora: LoRA, base: str) -> None:
    """Writes what PeftModel.from_pretrained reads; ``base`` is the name or path of the model that it adapts."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(np.asarray(variable[...]).T) for name, variable in _adapter_variables(model).items()
    }
    safetensors.numpy.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [target for target in TARGETS if target in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(folder: pathlib.Path, model: Llama) -> LoRA:
    """Puts the adapters of a folder around the model's projections, in place."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        lora = _lora_of(config)
        lora.check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    add_lora(model, lora, rngs=nnx.Rngs(0))
    variables = _adapter_variables(model)
    try:
        tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is no safetensors file: {error}") from error
    if tensors.keys() != variables.keys():
        missing, extra = sorted(variables.keys() - tensors.keys()), sorted(tensors.keys() - variables.keys())
        raise ValueError(
            f"{folder / WEIGHTS} must hold the {len(variables)} tensors of this model's adapters, "
            f"got {len(missing)} missing {missing[:2]} and {len(extra)} others {extra[:2]}"
        )
    for name, variable in variables.items():
        expected, got = variable[...].shape[::-1], tensors[name].shape
        if got != expected:
            raise ValueError(f"{folder / WEIGHTS}: {name} must have shape {expected}, got {got}")
        variable[...] = jnp.asarray(tensors[name]).T.astype(jnp.float32)
    return lora


def _lora_of(config: dict[str, Any]) -> LoRA:
    """From adapter_config.json; ValueError for variants that this module does not compute."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {kind!r}")
    for name, plain in {
        "use_dora": False,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }.items():
        if (value := config.get(name, plain)) != plain:
            raise ValueError(f"{name} must be {plain!r}, got {value!r}")
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        raise ValueError(f"target_modules must be a list of names, got {targets!r}")
    if missing := [name for name in ("r", "lora_alpha") if name not in config]:
        raise ValueError(f"it must have {' and '.join(missing)}, got none")
    return LoRA(config["r"], config["lora_alpha"], tuple(targets))


def _holder(layer: Layer, target: str) -> Any:
    return getattr(layer, TARGETS[target])


def _adapter_variables(model: Llama) -> dict[str, nnx.LoRAParam]:
    """By PEFT's names. Its tensors are [rank, in] and [out, rank]: the transposes of these."""
    variables = {}
    for number, layer in enumerate(model.layers):
        for target, holder in TARGETS.items():
            module = getattr(_holder(layer, target), target)
            if isinstance(module, LoRALinear):
                prefix = f"base_model.model.model.layers.{number}.{holder}.{target}"
                variables[f"{prefix}.lora_A.weight"] = module.lora_a
                variables[f"{prefix}.lora_B.weight"] = module.lora_b
    return variables
