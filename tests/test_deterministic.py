"""deterministic=True: the same bits every time, and the same gradients as without."""

import dataclasses
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Target

import jax_flash

CASE = Case("deterministic", 150, 290, q_heads=4, kv_heads=2, head_dim=64, causal=True, q_offset=140)


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
@pytest.mark.parametrize("head_dim", [64, 136])
def test_values(target: Target, dtype: str, head_dim: int) -> None:
    if target.max_head_dim and dtype == "float32" and head_dim > cases.highest_precision_head_dim():
        pytest.skip(f"no kernels of float32's accuracy for head_dim {head_dim} on this GPU")
    problem = cases.problem(dataclasses.replace(CASE, head_dim=head_dim), dtype)
    problem.check(target.platform, cases.differentiate(cases.call(target, problem, deterministic=True), problem))


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
def test_the_same_bits_every_time(target: Target, dtype: str) -> None:
    """Many blocks add to the same rows of dquery, were it not for its own pass."""
    problem = cases.problem(dataclasses.replace(CASE, q_length=300, kv_length=1500), dtype)
    attend = cases.call(target, problem, deterministic=True)
    first = cases.differentiate(attend, problem)
    for _ in range(5):
        for name, x in cases.differentiate(attend, problem).items():
            np.testing.assert_array_equal(x, first[name])


@pytest.mark.gpu
@pytest.mark.parametrize("operand", ["alibi_slopes", "bias"])
def test_gradients_by_atomic_additions(operand: str) -> None:
    """The kernels don't serve them in one order; plain JAX does, where it may."""
    query = jax.random.normal(jax.random.key(0), (2, 16, 2, 8), jnp.float16)
    shared = {"alibi_slopes": jnp.ones(2, jnp.float32), "bias": jnp.ones((1, 2, 16, 16), jnp.float16)}[operand]

    def loss(x: jax.Array, **options: Any) -> jax.Array:
        out = jax_flash.attention(query, query, query, **{operand: x}, **options)
        return out.astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=f"deterministic=True with a gradient of {operand}"):
        jax.grad(lambda x: loss(x, deterministic=True, implementation="cuda"))(shared)
    gradient = jax.grad(lambda x: loss(x, deterministic=True))(shared)
    np.testing.assert_allclose(gradient, jax.grad(loss)(shared), rtol=1e-2, atol=1e-3)
    # Without a gradient they are served.
    loss(shared, deterministic=True, implementation="cuda")
