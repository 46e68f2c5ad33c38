"""The "xla" implementation: attention in chunks, in plain JAX, with O(T + S) memory in every derivative.

A scan over chunks of queries, and inside it a scan over chunks of keys with an online softmax. Both bodies are
checkpointed: a backward pass keeps the inputs of one chunk of queries and one carry per chunk of keys, never a
[T, S] array. Being plain JAX it runs on any platform, in any dtype, and differentiates to any order in both modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_flash import _dtypes, _mask, _varying

if TYPE_CHECKING:
    from jax_flash._attention import Options

_CHUNK = 256


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Mapping[str, jax.Array], options: Options
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T] of query [B, T, N, H] and key, value [B, S, K, H]."""
    accumulate = _dtypes.accumulation_dtype(query.dtype)
    batch, q_length, q_heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    group = q_heads // kv_heads
    q_chunk, kv_chunk = min(_CHUNK, q_length), min(_CHUNK, kv_length)
    scale = jnp.asarray(options.scale, accumulate)

    # [chunks, B, K, G, rows, H] and [chunks, B, K, columns, H]: the chunk axis is what the scans walk along.
    queries = _split(query, q_chunk).reshape(-1, batch, q_chunk, kv_heads, group, head_dim).transpose(0, 1, 3, 4, 2, 5)
    keys, values = (_split(x, kv_chunk).transpose(0, 1, 3, 2, 4) for x in (key, value))
    kv_starts = jnp.arange(keys.shape[0], dtype=jnp.int32) * kv_chunk

    def scores_of(rows: jax.Array, chunk: jax.Array, keys: jax.Array, kv_start: jax.Array) -> jax.Array:
        scores = jnp.einsum("bkgth,bksh->bkgts", chunk, keys, preferred_element_type=accumulate)
        columns = kv_start + jnp.arange(kv_chunk, dtype=jnp.int32)
        keep = _mask.keep(options, operands, rows, columns) & (columns < kv_length)
        return jnp.where(keep[:, None, None], scores * scale, -jnp.inf)

    def over_queries(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        chunk, q_start = inputs
        rows = q_start + jnp.arange(q_chunk, dtype=jnp.int32)

        def over_keys(
            carry: tuple[jax.Array, jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
            maximum, total, weighted = carry
            keys, values, kv_start = inputs
            scores = scores_of(rows, chunk, keys, kv_start)
            # The results do not depend on the maximum, so neither do their derivatives.
            new_maximum = jax.lax.stop_gradient(jnp.maximum(maximum, scores.max(axis=-1)))
            anchor = jnp.where(jnp.isneginf(new_maximum), 0.0, new_maximum)
            decay = jnp.exp(maximum - anchor)
            weights = jnp.exp(scores - anchor[..., None])
            total = total * decay + weights.sum(axis=-1)
            products = jnp.einsum(
                "bkgts,bksh->bkgth",
                weights.astype(values.dtype),
                values,
                preferred_element_type=accumulate,
            )
            return (new_maximum, total, weighted * decay[..., None] + products), None

        statistics = chunk.shape[:-1]
        start = (
            jnp.full(statistics, -jnp.inf, accumulate),
            jnp.zeros(statistics, accumulate),
            jnp.zeros(chunk.shape, accumulate),
        )
        start = _varying.vary_alike(start, chunk)
        (maximum, total, weighted), _ = jax.lax.scan(jax.checkpoint(over_keys), start, (keys, values, kv_starts))
        kept = total > 0
        total = jnp.where(kept, total, 1.0)
        out = (weighted / total[..., None]).astype(query.dtype)
        return None, (out, jnp.where(kept, maximum + jnp.log(total), -jnp.inf))

    q_starts = jnp.arange(queries.shape[0], dtype=jnp.int32) * q_chunk
    _, (out, lse) = jax.lax.scan(jax.checkpoint(over_queries), None, (queries, q_starts))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, q_heads, head_dim)[:, :q_length]
    lse = lse.transpose(1, 2, 3, 0, 4).reshape(batch, q_heads, -1)[:, :, :q_length]
    return out, lse


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[B, length, heads, H] -> [chunks, B, chunk, heads, H], padded with zeros."""
    batch, length, heads, head_dim = x.shape
    chunks = -(-length // chunk)
    padded = jnp.pad(x, ((0, 0), (0, chunks * chunk - length), (0, 0), (0, 0)))
    return jnp.moveaxis(padded.reshape(batch, chunks, chunk, heads, head_dim), 1, 0)
