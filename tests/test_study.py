"""The algorithms that are there to be read: their results and gradients against the oracle, and what they keep."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads

from jax_flash import study
from jax_flash.study import loops

SHAPES = {  # B, T, S, N, K, H, V
    "square": (2, 130, 130, 2, 2, 16, 16),
    "grouped": (1, 70, 200, 4, 2, 24, 8),
    "more-rows": (1, 200, 65, 2, 1, 8, 16),
    "one": (1, 1, 1, 1, 1, 8, 8),
    "one-row": (2, 1, 129, 2, 2, 16, 16),
}


def arrays(name: str, dtype: Any) -> list[np.ndarray]:
    """query, key, value and dout."""
    batch, rows, keys, heads, kv_heads, head_dim, value_head_dim = SHAPES[name]
    rng = np.random.default_rng(0)
    of_keys = (batch, keys, kv_heads)
    shapes = (batch, rows, heads, head_dim), (*of_keys, head_dim), (*of_keys, value_head_dim)
    return [rng.standard_normal(x).astype(dtype) for x in (*shapes, (batch, rows, heads, value_head_dim))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", study.LOOPS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float16", 2e-3)])
def test_values(algorithm: str, shape: str, causal: bool, dtype: str, tolerance: float) -> None:
    *inputs, dout = arrays(shape, dtype)

    @jax.jit
    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *x: study.LOOPS[algorithm](*x, causal=causal), *inputs)
        return out, *pullback(dout)

    found = dict(zip(("out", "dq", "dk", "dv"), run(*map(jnp.asarray, inputs)), strict=True))
    wide = [x.astype(np.float64) for x in (*inputs, dout)]
    want = oracle.attention(*wide, np.zeros((len(dout), dout.shape[2], dout.shape[1])), causal=causal)
    for name, got in found.items():
        assert got.dtype == dtype, name
        error = np.abs(np.asarray(got, np.float64) - want[name]).max() / max(1.0, np.abs(want[name]).max())
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("algorithm", study.LOOPS)
def test_gradients(algorithm: str) -> None:
    query, key, value, _ = arrays("grouped", "float64")
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x[:, :70]) for x in (query, key, value)]
        check_grads(lambda *x: study.LOOPS[algorithm](*x, causal=True), inputs, order=1, modes=["rev"])


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash2_atomic"])
def test_no_array_grows_with_the_product_of_the_lengths(algorithm: str) -> None:
    """Which plain attention has, the weights."""

    def largest(name: str, length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        gradients = jax.jit(jax.grad(lambda *x: study.LOOPS[name](*x).sum(), (0, 1, 2)))
        analysis = gradients.lower(x, x, x).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    assert largest(algorithm, 2048) < 3 * largest(algorithm, 1024)
    assert largest("plain", 2048) > 3 * largest("plain", 1024)


@pytest.mark.parametrize("algorithm", study.LOOPS)
def test_large_scores(algorithm: str) -> None:
    """Scores are beyond what exp can represent."""
    query, key, value, dout = arrays("square", "float32")
    out, pullback = jax.vjp(lambda *x: study.LOOPS[algorithm](*x, causal=True), 100 * query, key, value)
    assert all(np.isfinite(x).all() for x in (out, *pullback(jnp.asarray(dout))))
    np.testing.assert_allclose(out[:, 0], value[:, 0], rtol=1e-6)  # the only key of the first row


def test_a_name_for_each() -> None:
    for name, function in study.LOOPS.items():
        assert getattr(loops, name) is function
        assert function.__name__ == name  # type: ignore[attr-defined]
        assert function.__doc__


def test_errors() -> None:
    query, key, value, _ = (jnp.asarray(x) for x in arrays("grouped", "float32"))
    with pytest.raises(ValueError, match="must have rank 4"):
        study.LOOPS["flash1"](query[0], key[0], value[0])
    with pytest.raises(TypeError, match="key must have the dtype of query"):
        study.LOOPS["flash1"](query, key.astype("float16"), value)
    with pytest.raises(TypeError, match="causal must be a bool, got 1"):
        study.LOOPS["plain"](query, key, value, causal=1)  # type: ignore[arg-type]
