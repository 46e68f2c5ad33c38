"""Temporary memory grows linearly with the lengths, forward and backward, by XLA's own analysis."""

import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import REFERENCE, Target

LENGTHS = (2048, 4096, 8192)


def temporary_bytes(target: Target, length: int, backward: bool) -> int:
    """XLA's peak of temporary buffers of a call, with all results and scratch that it allocates itself."""
    dtype = target.dtypes[0]
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), dtype)
    attend = cases.call(target, cases.Problem(*[None] * 5, causal=True))

    def run(query: Any, key: Any, value: Any) -> Any:
        if not backward:
            return attend(query, key, value)
        results, pullback = jax.vjp(attend, query, key, value)
        return pullback(results)

    return jax.jit(run).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


def input_bytes(target: Target, length: int) -> int:
    return 3 * length * 2 * 16 * jnp.dtype(target.dtypes[0]).itemsize


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_linear(target: Target, backward: bool) -> None:
    sizes = [temporary_bytes(target, length, backward) for length in LENGTHS]
    for length, size in zip(LENGTHS, sizes, strict=True):
        # A [T, S] array of one head in one byte an element would already be more.
        assert size < length * length, f"S = {length}: {size} bytes"
    for small, large in itertools.pairwise(sizes):
        # Twice the length, at most twice the memory, and some for what does not grow.
        assert large <= 2.1 * small + 4096, f"from {small} to {large} bytes"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_kernels_need_little(target: Target, backward: bool) -> None:
    """Nothing but copies, lse and delta: a few times the inputs."""
    length = LENGTHS[0]
    assert temporary_bytes(target, length, backward) <= 4 * input_bytes(target, length)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_measure_sees_quadratic_growth(backward: bool) -> None:
    """The reference keeps [T, S] arrays: without seeing them the tests above would prove nothing."""
    small, large = (temporary_bytes(REFERENCE, length, backward) for length in LENGTHS[:2])
    assert large >= 3.5 * small
    assert small >= LENGTHS[0] ** 2
