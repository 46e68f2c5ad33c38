"""Plain quadratic attention, which tests compare with: readable first, O(T * S) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash._call import dtypes
from jax_flash._call.options import Operands, Options
from jax_flash._implementations import scores as _scores


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands, options: Options
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] and lse [B, N, T] of query [B, T, N, H], key [B, S, K, H] and value [B, S, K, V].

    Knows every option but packed sequences, which `varlen` unpacks.
    """
    accumulate = dtypes.accumulation_dtype(query.dtype)
    batch, q_length, q_heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    query, key, value = _scores.without_padding(query, key, value, operands)
    grouped = query.reshape(batch, q_length, kv_heads, q_heads // kv_heads, head_dim)
    products = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=accumulate, precision="highest")
    rows, columns = jnp.arange(q_length, dtype=jnp.int32), jnp.arange(kv_length, dtype=jnp.int32)
    scores = _scores.of_products(products, options, operands, rows, columns)

    # The results do not depend on the maximum, so neither do their derivatives.
    maximum = jax.lax.stop_gradient(scores).max(axis=-1, keepdims=True)
    if "sinks" in operands:
        sinks = _scores.grouped(operands["sinks"], kv_heads)[..., None, None]
        maximum = jnp.maximum(maximum, jax.lax.stop_gradient(sinks))
    # A row without any weight, of a key or of a sink: zeros and -inf, with zero gradients rather than NaN.
    empty = jnp.isneginf(maximum)
    maximum = jnp.where(empty, 0.0, maximum)
    weights = jnp.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    if "sinks" in operands:
        total = total + jnp.exp(sinks - maximum)
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, maximum + jnp.log(total))
    out = jnp.einsum(
        "bkgts,bskh->btkgh",
        _scores.dropped(weights / total, options, operands, 0, 0).astype(value.dtype),
        value,
        preferred_element_type=accumulate,
        precision="highest",
    )
    out = _scores.dropout_factor(out, options).astype(query.dtype).reshape(*query.shape[:3], value.shape[3])
    return _scores.finish(out, lse.reshape(batch, q_heads, q_length), operands)
