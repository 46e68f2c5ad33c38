"""Temporary memory grows linearly with the lengths, forward and backward, by XLA's own analysis."""

from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import oracle
import pytest
from cases import REFERENCE, Target

LENGTHS = (2048, 8192)


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def of_length(length: int) -> dict[str, Any]:
    """All options at once that have no more than a length."""
    return {
        "bias": shape(1, 2, 1, length),
        "mask": shape(1, 1, 1, length, dtype=bool),
        "window": (length // 2, None),
        "softcap": 3.0,
        "alibi_slopes": shape(2),
        "sinks": shape(2),
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
        "q_segment_ids": shape(1, length, dtype=jnp.int32),
        "kv_segment_ids": shape(1, length, dtype=jnp.int32),
        "q_lengths": shape(1, dtype=jnp.int32),
        "kv_lengths": shape(1, dtype=jnp.int32),
    }


def temporary_bytes(
    target: Target, length: int, backward: bool, options: dict[str, Any] | None = None, *, q_heads: int = 2
) -> int:
    """XLA's peak of temporary buffers of a call, with all results and scratch that it allocates itself."""
    dtype = target.dtypes[0]
    inputs = shape(1, length, q_heads, 16, dtype=dtype), *[shape(1, length, 2, 16, dtype=dtype)] * 2
    options = options or {}
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    fixed = {name: x for name, x in options.items() if name not in arrays}
    trainable = {name: x for name, x in arrays.items() if name in oracle.TRAINABLE}
    attend = cases.call(target, cases.Problem(*[None] * 5, causal=True), **fixed)

    def run(inputs: Any, arrays: Any) -> Any:
        if not backward:
            return attend(*inputs, **arrays)
        wanted = {name: arrays[name] for name in trainable}
        results, pullback = jax.vjp(lambda inputs, wanted: attend(*inputs, **{**arrays, **wanted}), inputs, wanted)
        return pullback(results)

    return jax.jit(run).lower(inputs, arrays).compile().memory_analysis().temp_size_in_bytes


def input_bytes(target: Target, length: int) -> int:
    return 3 * length * 2 * 16 * jnp.dtype(target.dtypes[0]).itemsize


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", [lambda length: {}, of_length], ids=["plain", "options"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_linear(target: Target, options: Callable[[int], dict[str, Any]], backward: bool) -> None:
    small, large = (temporary_bytes(target, length, backward, options(length)) for length in LENGTHS)
    # A [T, S] array of one head in one byte an element would already be more.
    assert large < LENGTHS[1] ** 2
    # Four times the length, at most four times the memory, and some for what does not grow.
    assert large <= 4.2 * small + 4096


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_kernels_need_little(target: Target, backward: bool) -> None:
    """Nothing but copies, lse and delta: a few times the inputs."""
    length = LENGTHS[0]
    assert temporary_bytes(target, length, backward) <= 4 * input_bytes(target, length)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_gradient_of_bias_is_as_large_as_bias(target: Target) -> None:
    """Summed where it is made: there is no array [N, T, S] for a bias [1, T, S]."""
    length, q_heads = 1024, 16
    bias = {"bias": shape(1, 1, length, length)}
    with_bias = temporary_bytes(target, length, True, bias, q_heads=q_heads)
    assert with_bias - temporary_bytes(target, length, True, q_heads=q_heads) < 4 * 4 * length * length


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_bias_without_gradient(target: Target) -> None:
    """No array for a gradient that nobody asks for."""
    length, dtype = 2048, target.dtypes[0]
    x = shape(1, length, 2, 16, dtype=dtype)
    attend = cases.call(target, cases.Problem(*[None] * 5, causal=True), return_lse=False)

    def run(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return jax.vjp(lambda *inputs: attend(*inputs, bias=bias), query, key, value)[1](query)

    compiled = jax.jit(run).lower(x, x, x, shape(1, 1, length, length, dtype=dtype)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_measure_sees_quadratic_growth(backward: bool) -> None:
    """The reference keeps [T, S] arrays: without seeing them the tests above would prove nothing."""
    small, large = (temporary_bytes(REFERENCE, length, backward) for length in LENGTHS)
    assert large >= 14 * small
    assert small >= LENGTHS[0] ** 2
