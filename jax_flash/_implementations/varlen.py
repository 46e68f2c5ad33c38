"""Packed sequences for the implementations in plain JAX, which take one sequence per batch entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jax_flash._call.options import CAPTURED, OPERANDS, Operands, Options
from jax_flash._implementations import chunked

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
    """out and lse of a packed call: applies ``attend`` to a batch of sequences, padded to the maximum lengths.

    query [B, tokens, N, H], and likewise key and value; ``operands`` hold cu_q_lengths and cu_kv_lengths, [B, D + 1].
    If a sequence of a batch entry is longer than a maximum, all results of that entry are NaN.
    """
    packing = _Packing(operands, options, query.shape[1], max_q_length, max_kv_length)
    out, lse = attend(
        packing.unpacked("query", query),
        packing.unpacked("key", key),
        packing.unpacked("value", value),
        packing.operands(operands),
        packing.options,
    )
    if "sinks" in operands:
        empty = jax.lax.stop_gradient(operands["sinks"])[:, None]
    else:
        empty = jnp.full((query.shape[0], 1, 1), -jnp.inf, lse.dtype)
    return packing.packed(out, lse, empty)


def tangent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    operands: Operands,
    tangents: Mapping[str, jax.Array],
    options: Options,
    max_q_length: int,
    max_kv_length: int,
    *,
    centered: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """`chunked.tangent` of a packed call."""
    packing = _Packing(operands, options, query.shape[1], max_q_length, max_kv_length)
    arrays = {"query": query, "key": key, "value": value, "out": out}
    inputs = {name: packing.unpacked(name, x) for name, x in arrays.items()}
    moved_out, moved_lse = chunked.tangent(
        **inputs,
        lse=jnp.swapaxes(packing.unpacked("lse", jnp.swapaxes(lse, 1, 2)), 1, 2),
        operands=packing.operands(operands),
        tangents={name: packing.unpacked(name, x) for name, x in tangents.items() if name not in operands}
        | packing.of_sequences({name: x for name, x in tangents.items() if name in operands}),
        options=packing.options,
        centered=centered,
    )
    return packing.packed(moved_out, moved_lse, jnp.zeros((), lse.dtype))


class _Packing:
    """Converts between the rows of packed batch entries and a batch of padded sequences."""

    def __init__(
        self, operands: Operands, options: Options, tokens: int, max_q_length: int, max_kv_length: int
    ) -> None:
        functions = options.functions
        if functions is not None and functions.batch is not None:
            functions = dataclasses.replace(functions, batch=functions.batch * options.sequences)
        self.options = dataclasses.replace(options, sequences=1, functions=functions)
        self._sequences, self._tokens = options.sequences, tokens
        self._q_length, self._kv_length = max(max_q_length, 1), max(max_kv_length, 1)
        self._cu_q_lengths, self._cu_kv_lengths = operands["cu_q_lengths"], operands["cu_kv_lengths"]
        self._q_lengths, self._kv_lengths = (jnp.diff(cu, axis=1) for cu in (self._cu_q_lengths, self._cu_kv_lengths))

    def unpacked(self, name: str, x: jax.Array) -> jax.Array:
        """[B, tokens, ...] -> [B * D, maximum length, ...]"""
        if name in ("key", "value"):
            return _unpack(x, self._cu_kv_lengths, self._kv_length)
        return _unpack(x, self._cu_q_lengths, self._q_length)

    def operands(self, operands: Operands) -> Operands:
        lengths = {"q_lengths": self._q_lengths.reshape(-1), "kv_lengths": self._kv_lengths.reshape(-1)}
        return self.of_sequences(operands) | lengths

    def of_sequences(self, operands: Operands) -> dict[str, jax.Array]:
        """The operands with a batch entry for each sequence, to which those of its packed batch entry apply."""
        of_sequences = {}
        for name, x in operands.items():
            dims = OPERANDS[name].dims
            if OPERANDS[name] is CAPTURED:
                of_sequences[name] = x
            elif name == "mask_blocks":
                shared = x.shape[:2] == (1, 1)
                x = x if shared else jnp.broadcast_to(x, (len(self._q_lengths), self._sequences, *x.shape[2:]))
                of_sequences[name] = x.reshape(-1, 1, *x.shape[2:])
            elif "d" in dims:
                of_sequences[name] = x.reshape(-1, 1, *x.shape[2:])
            elif "t" in dims or "s" in dims:
                of_sequences[name] = self._unpacked_rows(x, "kv" if "s" in dims else "q")
            elif not set("eij") & set(dims):
                of_sequences[name] = jnp.repeat(x, self._sequences, axis=0)
        return of_sequences

    def _unpacked_rows(self, x: jax.Array, side: str) -> jax.Array:
        """[b, n, tokens or 1, ...] -> [B * D, n, maximum length or 1, ...]"""
        cu_lengths, length = {
            "q": (self._cu_q_lengths, self._q_length),
            "kv": (self._cu_kv_lengths, self._kv_length),
        }[side]
        x = jnp.broadcast_to(x, (cu_lengths.shape[0], *x.shape[1:]))
        if x.shape[2] == 1:
            return jnp.repeat(x, self._sequences, axis=0)
        return jnp.moveaxis(_unpack(jnp.moveaxis(x, 2, 1), cu_lengths, length), 1, 2)

    def packed(self, out: jax.Array, lse: jax.Array, empty: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The results for tokens, with zeros and ``empty`` for those in no sequence."""
        fits = ((self._q_lengths <= self._q_length) & (self._kv_lengths <= self._kv_length)).all(axis=1)
        factor = jnp.where(fits, 1.0, jnp.nan).astype(lse.dtype)[:, None, None]  # makes gradients NaN too
        within, out = _pack(out, self._cu_q_lengths, self._tokens)
        _, lse = _pack(jnp.swapaxes(lse, 1, 2), self._cu_q_lengths, self._tokens)
        out = jnp.where(within[:, :, None, None], out, 0) * factor[..., None].astype(out.dtype)
        lse = jnp.where(within[:, :, None], lse, empty) * factor
        return out, jnp.swapaxes(lse, 1, 2)


def _unpack(x: jax.Array, cu_lengths: jax.Array, length: int) -> jax.Array:
    """[B, tokens, ...] -> [B * D, length, ...]; rows beyond a sequence's length have the values of another token."""
    batch = x.shape[0]
    index = cu_lengths[:, :-1, None] + jnp.arange(length, dtype=jnp.int32)
    return _take(x, index.reshape(batch, -1)).reshape(-1, length, *x.shape[2:])


def _pack(x: jax.Array, cu_lengths: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """[B * D, length, ...] -> which tokens are in a sequence, bool [B, tokens], and the rows [B, tokens, ...]."""
    batch, length = cu_lengths.shape[0], x.shape[1]
    token = jnp.arange(tokens, dtype=jnp.int32)
    # The last sequence that begins at the token or before it: empty ones before it end there too.
    sequence = jax.vmap(lambda cu: jnp.searchsorted(cu, token, side="right"))(cu_lengths).astype(jnp.int32) - 1
    within = sequence < cu_lengths.shape[1] - 1
    sequence = jnp.minimum(sequence, cu_lengths.shape[1] - 2)
    position = token - jnp.take_along_axis(cu_lengths, sequence, axis=1)
    index = sequence * length + jnp.minimum(position, length - 1)
    return within, _take(x.reshape(batch, -1, *x.shape[2:]), index)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of [B, rows, ...] by an index [B, any], which is clipped to the range."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="clip"))(x, index)
