"""explain() says which implementation serves a call, and why not the others."""

import importlib.util
import io
import sys
import typing
import xml.etree.ElementTree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash


def shapes(dtype: str = "float32", head_dim: int = 64) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct((2, n, 4, head_dim), dtype) for n in (5, 7, 7))


@pytest.mark.parametrize(
    ("platform", "dtype", "server"),
    [
        ("cpu", "float16", "cpu"),
        ("cpu", "bfloat16", "cpu"),
        ("cpu", "float32", "cpu"),
        ("cpu", "float64", "cpu"),
        ("cuda", "float16", "cuda"),
        ("cuda", "bfloat16", "cuda"),
        ("cuda", "float32", "cuda"),
        ("cuda", "float64", "xla"),
        ("gpu", "bfloat16", "cuda"),
        ("gpu", "float64", "xla"),
        ("rocm", "bfloat16", "xla"),
        ("tpu", "bfloat16", "xla"),
    ],
)
def test_who_serves(platform: str, dtype: str, server: str) -> None:
    explanation = jax_flash.explain(*shapes(dtype), platform=platform)
    assert explanation.implementation == server
    assert explanation.platform == {"gpu": "cuda"}.get(platform, platform)
    assert server not in explanation.obstacles
    assert {"xla", "reference"}.isdisjoint(explanation.obstacles)


@pytest.mark.parametrize("platform", ["GPU", "nvidia", "", 1])
def test_unknown_platforms(platform: Any) -> None:
    with pytest.raises(
        ValueError, match=f"platform must be None or one of cpu, cuda, gpu, rocm, tpu, got {platform!r}"
    ):
        jax_flash.explain(*shapes(), platform=platform)


def test_a_named_implementation_on_the_platform_gpu() -> None:
    with pytest.raises(NotImplementedError, match=r"implementation='cpu'.*'cpu'.*'cuda'"):
        jax_flash.explain(*shapes(), platform="gpu", implementation="cpu")


def test_why_not() -> None:
    obstacles = jax_flash.explain(*shapes("float64"), platform="cuda").obstacles
    assert set(obstacles) == {"cuda", "cpu"}
    assert "float64" in obstacles["cuda"]
    assert "float16, bfloat16, float32" in obstacles["cuda"]
    assert "'cpu'" in obstacles["cpu"]
    assert "'cuda'" in obstacles["cpu"]


def test_text_names_every_implementation() -> None:
    text = str(jax_flash.explain(*shapes(), platform="cpu"))
    assert text.splitlines()[0] == "on cpu, attention is served by 'cpu'"
    for name in ("cuda", "cpu", "xla", "reference"):
        assert f"\n  {name}: " in text


def test_default_platform_is_that_of_the_default_device() -> None:
    assert jax_flash.explain(*shapes()).platform == "cpu"  # where conftest.py puts every test without a mark
    with jax.default_device(None):
        backend = jax.default_backend()
        assert jax_flash.explain(*shapes()).platform == {"gpu": "cuda"}.get(backend, backend)


def test_named_implementation() -> None:
    assert jax_flash.explain(*shapes(), platform="cpu", implementation="reference").implementation == "reference"
    with pytest.raises(NotImplementedError, match=r"implementation='cpu'.*'cpu'.*'cuda'"):
        jax_flash.explain(*shapes(), platform="cuda", implementation="cpu")


def test_takes_arrays_and_every_option() -> None:
    x = jnp.ones((1, 3, 2, 8), jnp.float32)
    explanation = jax_flash.explain(
        x, x, x, causal=True, q_offset=jnp.array([1], jnp.int32), scale=0.5, return_lse=True, platform="cpu"
    )
    assert explanation.implementation == "cpu"
    options = {"scale": jnp.float32(0.5), "window": (jnp.int32(2), None)}
    assert jax_flash.explain(x, x, x, **options, platform="cpu").implementation == "cpu"


@pytest.mark.parametrize(
    "function", ["attention", "attention_varlen", "dot_product_attention", "explain", "explain_varlen"]
)
def test_names_are_typed(function: str) -> None:
    """A type checker knows which implementations and precisions there are, in every overload too."""
    public = getattr(jax_flash, function)
    overloads = typing.get_overloads(public)
    assert len(overloads) == {"explain": 0, "explain_varlen": 0, "dot_product_attention": 2}.get(function, 3)
    for signature in (public, *overloads):
        hints = typing.get_type_hints(signature)
        if "implementation" not in hints:  # an overload that takes its options by a TypedDict
            (hints,) = (typing.get_type_hints(typing.get_args(x)[0]) for x in (hints["options"],))
        names = {"cuda", "cpu", "xla", "reference"} | ({"cudnn"} if function == "dot_product_attention" else set())
        assert values(hints["implementation"]) == {None, *names}
        if function != "dot_product_attention":
            assert values(hints["precision"]) == {None, "default", "high", "highest", jax.lax.Precision}


def values(hint: Any) -> set[Any]:
    """Of a union of literals and types, None for its type."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    members = typing.get_args(hint)
    return set().union(*map(values, members)) if members else {None if hint is type(None) else hint}


def test_checks_as_attention_does() -> None:
    query, key, value = shapes()
    with pytest.raises(ValueError, match=r"key must have the head_dim of query, 64, got 8"):
        jax_flash.explain(query, jax.ShapeDtypeStruct((2, 7, 4, 8), "float32"), value)
    with pytest.raises(TypeError, match="scale"):
        jax_flash.explain(query, key, value, scale="large")
    with pytest.raises(ValueError, match="implementation"):
        jax_flash.explain(query, key, value, implementation="gpu")
    with pytest.raises(TypeError, match="dropped"):
        jax_flash.explain(query, key, value, dropped=0.1)


def test_computes_nothing() -> None:
    """Shapes far beyond any memory are fine."""
    huge = jax.ShapeDtypeStruct((64, 1 << 24, 128, 128), "bfloat16")
    assert jax_flash.explain(huge, huge, huge, platform="cpu").implementation == "cpu"


@pytest.mark.parametrize(
    ("spec", "options", "told"),
    [
        (("x",), {}, ("batch over 2 devices",)),
        ((None, "y"), {}, ("rows of query over 2 devices, each with all keys",)),
        ((None, None, ("x", "y")), {}, ("query heads over 4 devices, which share key heads",)),
        (("x", "y"), {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, ("batch over 2 devices", "gathered")),
        ((None, None, None, "x"), {}, ("head_dim is gathered",)),
        ((("x", "y"),), {}, ("gathered: 2 do not divide evenly over 4",)),
        ((), {}, ("every device computes all",)),
    ],
)
def test_how_a_call_is_split(spec: tuple[Any, ...], options: dict[str, Any], told: tuple[str, ...]) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    query = jax.ShapeDtypeStruct((2, 16, 8, 16), "float32", sharding=sharding)
    key = jax.ShapeDtypeStruct((2, 16, 2, 16), "float32")
    found = jax_flash.explain(query, key, key, platform="cpu", **options)
    assert len(found.split) == len(told)
    for part, words in zip(found.split, told, strict=True):
        assert words in part
        assert part in str(found)
    assert jax_flash.explain(key, key, key, platform="cpu").split == ()


def test_gradients_of_captured_arrays() -> None:
    """In one order up to a size, which the explanation names; without one of any size."""
    table = jnp.zeros((2048, 2049), jnp.float32)
    wide = {"score_mod": lambda s, b, h, q, kv: s + table[q, kv], "platform": "cuda"}
    explanation = jax_flash.explain(*shapes(), **wide, deterministic_backward=True)
    assert explanation.implementation == "cuda"
    assert "deterministic_backward=True and gradients of captured arrays of 4196352 elements" in explanation.gradients
    assert "gradients of captured arrays: by 'xla'" in str(explanation)
    assert not jax_flash.explain(*shapes(), **wide).gradients
    table = table[:3]
    assert not jax_flash.explain(*shapes(), **wide, deterministic_backward=True).gradients


def test_every_array_may_be_a_shape() -> None:
    """Also of options; those whose values matter to no answer."""
    ints = jax.ShapeDtypeStruct((2,), "int32")
    options: dict[str, Any] = {
        "bias": jax.ShapeDtypeStruct((2, 4, 5, 7), "float32"),
        "mask": jax.ShapeDtypeStruct((1, 1, 5, 7), "bool"),
        "kv_lengths": ints,
        "q_offset": ints,
        "sinks": jax.ShapeDtypeStruct((4,), "float32"),
        "window": (jax.ShapeDtypeStruct((), "int32"), None),
        "score_mod": lambda score, b, h, q, kv: score * 2,
    }
    assert jax_flash.explain(*shapes(), **options, platform="cpu", source=True).source
    wrong = options | {"bias": jax.ShapeDtypeStruct((2, 4, 5, 8), "float32")}
    with pytest.raises(ValueError, match="bias must broadcast"):
        jax_flash.explain(*shapes(), **wrong)


def test_bias_and_mask_by_position() -> None:
    """As attention takes them."""
    bias, mask = jnp.zeros((2, 4, 5, 7), jnp.float32), jnp.ones((1, 1, 5, 7), bool)
    assert jax_flash.explain(*shapes(), bias, mask, platform="cpu").implementation == "cpu"
    with pytest.raises(TypeError, match="mask"):
        jax_flash.explain(*shapes(), bias, bias)


def test_packed_sequences() -> None:
    query, key, value = (jax.ShapeDtypeStruct((n, 4, 64), "bfloat16") for n in (5, 7, 7))
    lengths = [0, 2, 5], [0, 3, 7]
    for platform in ("cpu", "cuda"):
        found = jax_flash.explain_varlen(query, key, value, *lengths, causal=True, platform=platform)
        assert found.implementation == platform
    found = jax_flash.explain_varlen(query, key, value, *lengths, 3, 4, score_mod=lambda s, *_: s, source=True)
    assert found.source
    traced = jax.ShapeDtypeStruct((3,), "int32")
    assert jax_flash.explain_varlen(query, key, value, traced, traced, platform="tpu").implementation == "xla"
    with pytest.raises(ValueError, match="cu_q_lengths"):
        jax_flash.explain_varlen(query, key, value, [0, 2, 9], [0, 3, 7])
    with pytest.raises(ValueError, match="query must have rank 3"):
        jax_flash.explain_varlen(*shapes(), *lengths)
    with pytest.raises(TypeError, match="q_lengths"):
        jax_flash.explain_varlen(query, key, value, *lengths, q_lengths=[1, 2])


# Forms to read


def markup() -> jax_flash.Explanation:
    """With text in which rich and HTML would find markup."""
    return jax_flash.Explanation(
        "cpu",
        "cpu",
        {"cuda": "no [bold]GPU[/bold] & <none>"},
        split=("batch",),
        source="a < b[0]",
        gradients="by a < b",
    )


def test_a_table_where_rich_shows_it() -> None:
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(width=100, file=io.StringIO(), color_system=None)
    console.print(markup())
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert lines[0] == "on cpu, attention is served by 'cpu'"
    assert "cuda" in next(line for line in lines if "no, no [bold]GPU[/bold] & <none>" in line)
    for text in ("batch", "by 'xla', by a < b", "a < b[0]", "could, when asked for by name"):
        assert any(text in line for line in lines)


def test_an_interactive_terminal_shows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    text = str(markup())
    assert repr(markup()) == text  # as in a file, where there is no terminal
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in repr(markup())  # bold, colours
    assert str(markup()) == text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert repr(markup()) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_html_in_a_notebook() -> None:
    page = markup()._repr_html_()
    root = xml.etree.ElementTree.fromstring(f"<div>{page}</div>")
    assert root.findtext("table/caption") == "on cpu, attention is served by 'cpu'"
    rows = {row[0].findtext("b"): row[1].text for row in root.iter("tr")}
    assert rows["cuda"] == "no, no [bold]GPU[/bold] & <none>"
    assert rows["cpu"] == "yes"
    assert rows["split"] == "batch"
    assert root.findtext("pre") == "a < b[0]"
