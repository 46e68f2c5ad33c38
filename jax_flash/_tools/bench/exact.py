"""Results of attention in float64, row by row, and errors against them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._tools.bench.race import Attend


def one_entry(x: jax.Array) -> jax.Array:
    """[1, T, B * N, H] of [B, T, N, H]: entries as more heads."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])


def both(attend: Attend, causal: bool, query: Any, key: Any, value: Any, dout: Any) -> tuple[Any, ...]:
    """out, dquery, dkey, dvalue."""
    out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, causal), query, key, value)
    return out, *pullback(dout)


def exact_results(arrays: Sequence[jax.Array], causal: bool, rows: int = 1024) -> list[np.ndarray]:
    """out, dquery, dkey, dvalue in float64 of query, key, value and dout ``[1, T, heads, H]``, ``rows`` rows at a time.

    T has to be a multiple of ``rows`` if it is larger.
    """
    with jax.enable_x64(True):
        wide = [jnp.asarray(x[0], jnp.float64).swapaxes(0, 1) for x in arrays]
        one = functools.partial(_exact_head, causal=causal, rows=min(rows, wide[0].shape[1]))
        found = jax.jit(functools.partial(jax.lax.map, lambda head: one(*head)))(tuple(wide))
        return [np.asarray(x.swapaxes(0, 1)[None]) for x in found]


def _exact_head(
    query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array, *, causal: bool, rows: int
) -> tuple[jax.Array, ...]:
    """The same for arrays [T, H] of one head."""
    length, head_dim = query.shape
    scale = head_dim**-0.5

    def chunk(sums: tuple[jax.Array, jax.Array], args: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        start, q, do = args
        scores = scale * (q @ key.T)
        if causal:
            scores = jnp.where(jnp.arange(length) <= start + jnp.arange(rows)[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = weights @ value
        ds = scale * weights * (do @ value.T - (do * out).sum(axis=-1, keepdims=True))
        return (sums[0] + ds.T @ q, sums[1] + weights.T @ do), (out, ds @ key)

    starts = jnp.arange(0, length, rows)
    split = [x.reshape(-1, rows, head_dim) for x in (query, dout)]
    (dkey, dvalue), (out, dquery) = jax.lax.scan(chunk, (jnp.zeros_like(key), jnp.zeros_like(value)), (starts, *split))
    return out.reshape(query.shape), dquery.reshape(query.shape), dkey, dvalue


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
