"""Exactly the calls that choice.RULES names are refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash._implementations import choice

REFUSED: dict[tuple[str, str], dict[str, Any]] = {
    ("cuda", "float64"): {"dtype": "float64"},
    ("cuda", "a head_dim of query or value above 256"): {"head_dim": 257, "value_head_dim": 8},
    **{
        next((name, rule.refuses) for rule in choice.RULES[name] if "score_mod" in rule.refuses): {
            "score_mod": lambda score, b, h, q, kv: jnp.sort(jnp.stack([score, -score]))[0]
        }
        for name in ("cuda", "cpu")
    },
}
"""A call for each rule of choice.RULES."""

SERVED = [
    {"dtype": dtype, "head_dim": head_dim, "value_head_dim": value_head_dim}
    for dtype in ("float16", "bfloat16", "float32", "float64")
    for head_dim, value_head_dim in ((1, 1), (59, 111), (256, 256), (192, 128), (576, 512))
]


def arrays(dtype: str = "float32", head_dim: int = 8, value_head_dim: int | None = None) -> list[jax.ShapeDtypeStruct]:
    query, key = jax.ShapeDtypeStruct((2, 5, 4, head_dim), dtype), jax.ShapeDtypeStruct((2, 7, 2, head_dim), dtype)
    return [query, key, jax.ShapeDtypeStruct((2, 7, 2, value_head_dim or head_dim), dtype)]


def test_every_rule_has_a_call() -> None:
    assert {(name, rule.refuses) for name, rules in choice.RULES.items() for rule in rules} == set(REFUSED)


@pytest.mark.parametrize(("implementation", "what"), REFUSED)
def test_rules_apply(implementation: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named: NotImplementedError with the reason; by default: the next implementation, and explain() has the reason."""
    monkeypatch.setattr(choice, "_cuda_devices", lambda: ("a device",))
    monkeypatch.setattr(choice, "_cuda_unavailable", lambda: None)
    sizes = dict(REFUSED[implementation, what])
    options = {name: sizes.pop(name) for name in ("score_mod",) if name in sizes}
    shapes = arrays(**sizes)
    explanation = jax_flash.explain(*shapes, platform=implementation, **options)
    assert explanation.implementation == "xla"
    with pytest.raises(NotImplementedError, match=re.escape(explanation.obstacles[implementation])):
        jax_flash.explain(*shapes, platform=implementation, implementation=implementation, **options)


@pytest.mark.parametrize("call", SERVED, ids=lambda call: "-".join(map(str, call.values())))
def test_nothing_else_is_refused(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_cuda_unavailable", lambda: None)
    assert jax_flash.explain(*arrays(**call), platform="cpu").implementation == "cpu"
    refused = call["dtype"] == "float64" or max(call["head_dim"], call["value_head_dim"]) > 256
    assert jax_flash.explain(*arrays(**call), platform="cuda").implementation == ("xla" if refused else "cuda")


OPTIONS = {
    "q_segment_ids": np.zeros((2, 5), np.int32),
    "kv_segment_ids": np.zeros((2, 7), np.int32),
    "dropout_rate": 0.5,
    "dropout_key": np.zeros(2, np.uint32),
}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("q_segment_ids", "kv_segment_ids"),
        ("kv_segment_ids", "q_segment_ids"),
        ("dropout_rate", "dropout_key"),
    ],
)
def test_options_that_want_each_other(name: str, missing: str) -> None:
    inputs = [jnp.ones(x.shape, x.dtype) for x in arrays()]
    with pytest.raises(ValueError, match=f"{missing} must be given with {name}"):
        jax_flash.attention(*inputs, **{name: OPTIONS[name]})
    jax_flash.attention(*inputs, **{name: OPTIONS[name], missing: OPTIONS[missing]})
