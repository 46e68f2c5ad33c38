"""Packed documents for the implementations in plain JAX, which know only of one document per batch entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash._options import OPERANDS, Operands, Options

Attend = Callable[[jax.Array, jax.Array, jax.Array, Operands, Options], tuple[jax.Array, jax.Array]]


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    options: Options,
    max_q_length: int,
    max_kv_length: int,
    attend: Attend,
) -> tuple[jax.Array, jax.Array]:
    """out and lse of a packed call, by ``attend`` on a batch of documents that are padded to the maximum lengths.

    query [B, tokens, N, H], and likewise key and value; ``operands`` hold cu_q_lengths and cu_kv_lengths, [B, D + 1].
    Where a document of a batch entry is longer than a maximum, all results of that entry are NaN.
    """
    batch, documents = query.shape[0], options.documents
    max_q_length, max_kv_length = max(max_q_length, 1), max(max_kv_length, 1)
    cu_q_lengths, cu_kv_lengths = operands["cu_q_lengths"], operands["cu_kv_lengths"]
    q_lengths, kv_lengths = (jnp.diff(cu, axis=1) for cu in (cu_q_lengths, cu_kv_lengths))

    # One batch entry a document, and what is known of a batch entry known of each of its documents.
    of_documents = {}
    for name, x in operands.items():
        if "d" in OPERANDS[name].dims:
            of_documents[name] = x.reshape(batch * documents, 1, *x.shape[2:])
        elif "e" not in OPERANDS[name].dims:
            of_documents[name] = jnp.repeat(x, documents, axis=0)
    of_documents |= {"q_lengths": q_lengths.reshape(-1), "kv_lengths": kv_lengths.reshape(-1)}

    out, lse = attend(
        _unpack(query, cu_q_lengths, max_q_length),
        _unpack(key, cu_kv_lengths, max_kv_length),
        _unpack(value, cu_kv_lengths, max_kv_length),
        of_documents,
        dataclasses.replace(options, documents=1),
    )

    # A factor, so that gradients are NaN too.
    fits = ((q_lengths <= max_q_length) & (kv_lengths <= max_kv_length)).all(axis=1)
    factor = jnp.where(fits, 1.0, jnp.nan).astype(lse.dtype)
    within, out = _pack(out, cu_q_lengths, query.shape[1])
    _, lse = _pack(jnp.swapaxes(lse, 1, 2), cu_q_lengths, query.shape[1])
    if "sinks" in operands:
        empty = jax.lax.stop_gradient(operands["sinks"])[:, None]
    else:
        empty = jnp.full((batch, 1, 1), -jnp.inf, lse.dtype)
    factor = factor[:, None, None]
    out = jnp.where(within[:, :, None, None], out, 0) * factor[..., None].astype(out.dtype)
    lse = jnp.where(within[:, :, None], lse, empty) * factor
    return out, jnp.swapaxes(lse, 1, 2)


def _unpack(x: jax.Array, cu_lengths: jax.Array, length: int) -> jax.Array:
    """[B, tokens, ...] -> [B * D, length, ...], where rows beyond a document's length are those of another token."""
    batch = x.shape[0]
    index = cu_lengths[:, :-1, None] + jnp.arange(length, dtype=jnp.int32)
    return _take(x, index.reshape(batch, -1)).reshape(-1, length, *x.shape[2:])


def _pack(x: jax.Array, cu_lengths: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """[B * D, length, ...] -> which tokens are in a document, [B, tokens], and their rows [B, tokens, ...]."""
    batch, length = cu_lengths.shape[0], x.shape[1]
    token = jnp.arange(tokens, dtype=jnp.int32)
    # The last document that begins at the token or before it: empty ones before it end there too.
    document = jax.vmap(lambda cu: jnp.searchsorted(cu, token, side="right"))(cu_lengths).astype(jnp.int32) - 1
    within = document < cu_lengths.shape[1] - 1
    document = jnp.minimum(document, cu_lengths.shape[1] - 2)
    position = token - jnp.take_along_axis(cu_lengths, document, axis=1)
    index = document * length + jnp.minimum(position, length - 1)
    return within, _take(x.reshape(batch, -1, *x.shape[2:]), index)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of [B, rows, ...] by an index [B, any], the first or the last for an index that is out of range."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="clip"))(x, index)
