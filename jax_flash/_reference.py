"""Plain quadratic attention, the yardstick of the tests: readable first, O(T * S) memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_flash import _dtypes, _mask

if TYPE_CHECKING:
    from jax_flash._attention import Options


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Mapping[str, jax.Array], options: Options
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T] of query [B, T, N, H] and key, value [B, S, K, H]."""
    accumulate = _dtypes.accumulation_dtype(query.dtype)
    batch, q_length, q_heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, q_length, kv_heads, q_heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=accumulate, precision="highest")
    keep = _mask.keep(options, operands, jnp.arange(q_length, dtype=jnp.int32), jnp.arange(kv_length, dtype=jnp.int32))[
        :, None, None
    ]
    scores = jnp.where(keep, scores * jnp.asarray(options.scale, accumulate), -jnp.inf)

    any_kept = keep.any(axis=-1, keepdims=True)
    maximum = jax.lax.stop_gradient(jnp.where(any_kept, scores.max(axis=-1, keepdims=True), 0.0))
    weights = jnp.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    # A row that keeps no key: zeros and -inf, with zero gradients rather than NaN.
    safe_total = jnp.where(any_kept, total, 1.0)
    lse = jnp.where(any_kept, maximum + jnp.log(safe_total), -jnp.inf)
    out = jnp.einsum(
        "bkgts,bskh->btkgh",
        (weights / safe_total).astype(value.dtype),
        value,
        preferred_element_type=accumulate,
        precision="highest",
    )
    return out.astype(query.dtype).reshape(query.shape), lse.reshape(batch, q_heads, q_length)
