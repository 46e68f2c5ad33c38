"""The "xla" implementation: attention in chunks, in plain JAX, with O(T + S) memory in every derivative.

A scan over chunks of queries, and inside it a scan over chunks of keys with an online softmax. Both bodies are
checkpointed: a backward pass keeps the inputs of one chunk of queries and one carry per chunk of keys, never a
[T, S] array. Being plain JAX it runs on any platform, in any dtype, and differentiates to any order in both modes.

`tangent` and `backward` are the derivatives of `attention` as functions of out and lse, which any implementation may
have computed: the primitives of the kernels differentiate through them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._call import dtypes
from jax_flash._call.options import CAPTURED, OPERANDS, Operands, Options
from jax_flash._implementations import scores as _scores
from jax_flash._implementations import varying

_CHUNK = 256

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""The partial softmax state: maximum and sum of exponentials, [B, K, G, rows], weighted sum of values, [..., V]."""

Tangent = Callable[..., tuple[jax.Array, jax.Array]]
"""The type of `tangent` and of its counterpart for packed sequences."""


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands, options: Options
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] and lse [B, N, T] of query [B, T, N, H], key [B, S, K, H] and value [B, S, K, V].

    Knows every option but packed sequences, which `varlen` unpacks.
    """
    out, maximum, total = _online_softmax(query, key, value, operands, options)
    # A row without any weight, of a key or of a sink: zeros and -inf, with zero gradients rather than NaN.
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, maximum + jnp.log(jnp.where(empty, 1.0, total)))
    return _scores.finish(out, lse, operands)


def _online_softmax(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out, and of each row the maximum of scores and the sum of exponentials of what scores exceed it by, [B, N, T]."""
    dtype, accumulate = query.dtype, dtypes.accumulation_dtype(query.dtype)
    q_length, q_heads = query.shape[1:3]
    kv_length, kv_heads, value_head_dim = value.shape[1:]
    q_chunk, kv_chunk = min(_CHUNK, q_length), min(_CHUNK, kv_length)
    precision = _scores.precision(options)
    query, key, value = _scores.without_padding(query, key, value, operands)

    queries = _rows(query, kv_heads, q_chunk)
    keys, values = _columns(key, kv_chunk), _columns(value, kv_chunk)
    q_starts, kv_starts = _starts(queries, q_chunk), _starts(keys, kv_chunk)
    groups = _grouped(_with_padding(operands, options, query, key, q_chunk, kv_chunk), accumulate)
    by_row = _split_operands(groups["t"] | groups["ts"], "t", q_chunk)
    by_column = _split_operands(groups["s"], "s", kv_chunk)

    def over_queries(
        _: None, inputs: tuple[jax.Array, jax.Array, Operands]
    ) -> tuple[None, tuple[jax.Array, jax.Array, jax.Array]]:
        chunk, q_start, by_row = inputs
        rows = q_start + jnp.arange(q_chunk, dtype=jnp.int32)
        of_rows = groups[""] | {name: by_row[name] for name in groups["t"]}
        by_pair = by_column | _split_operands({name: by_row[name] for name in groups["ts"]}, "s", kv_chunk)

        def over_keys(carry: Carry, inputs: tuple[jax.Array, jax.Array, jax.Array, Operands]) -> tuple[Carry, None]:
            keys, values, kv_start, of_pairs = inputs
            columns = kv_start + jnp.arange(kv_chunk, dtype=jnp.int32)
            block = {**of_rows, **of_pairs}

            def attend(carry: Carry) -> Carry:
                maximum, total, weighted = carry
                products = jnp.einsum(
                    "bkgth,bksh->bkgts",
                    chunk.astype(dtype),
                    keys.astype(dtype),
                    preferred_element_type=accumulate,
                    precision=precision,
                )
                scores = _scores.of_products(products, options, block, rows, columns)
                # The results do not depend on the maximum, so neither do their derivatives.
                new_maximum = jax.lax.stop_gradient(jnp.maximum(maximum, scores.max(axis=-1)))
                finite_maximum = jnp.where(jnp.isneginf(new_maximum), 0.0, new_maximum)
                decay = jnp.exp(maximum - finite_maximum)
                weights = jnp.exp(scores - finite_maximum[..., None])
                total = total * decay + weights.sum(axis=-1)
                products = jnp.einsum(
                    "bkgts,bksh->bkgth",
                    _scores.dropped(weights, options, block, q_start, kv_start).astype(dtype),
                    values.astype(dtype),
                    preferred_element_type=accumulate,
                    precision=precision,
                )
                return new_maximum, total, weighted * decay[..., None] + products

            may_keep = _scores.may_keep(options, block, rows, columns)
            if may_keep is None:
                return attend(carry), None
            return jax.lax.cond(may_keep, attend, lambda carry: carry, carry), None

        statistics = chunk.shape[:-1]
        if "sinks" in operands:
            sinks = jnp.broadcast_to(_scores.grouped(operands["sinks"], kv_heads)[..., None], statistics)
            maximum = jax.lax.stop_gradient(sinks)
            total = jnp.exp(sinks - jnp.where(jnp.isneginf(maximum), 0.0, maximum))
        else:
            maximum, total = jnp.full(statistics, -jnp.inf, accumulate), jnp.zeros(statistics, accumulate)
        start = maximum, total, jnp.zeros((*statistics, value_head_dim), accumulate)
        start = varying.vary_alike(start, chunk)
        (maximum, total, weighted), _ = jax.lax.scan(
            jax.checkpoint(over_keys), start, (keys, values, kv_starts, by_pair)
        )
        out = weighted / jnp.where(total == 0, 1.0, total)[..., None]
        return None, (_scores.dropout_factor(out, options).astype(dtype), maximum, total)

    _, (out, *statistics) = jax.lax.scan(jax.checkpoint(over_queries), None, (queries, q_starts, by_row))
    maximum, total = (_joined_statistic(x, q_length, q_heads) for x in statistics)
    return _joined(out, q_length, q_heads), maximum, total


def _restated(
    query: jax.Array, key: jax.Array, lse: jax.Array, operands: Operands, options: Options
) -> tuple[jax.Array, jax.Array]:
    """lse [B, N, T] as the sum of two arrays, so that weights are right however large it is.

    The rounding of a large lse would be an error of every exponent score - lse. Rows where that changes weights by more
    than 2^-14 of them get the maximum of their scores as they are here, and the logarithm of the sum apart.
    """
    finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
    large = jnp.abs(finite) > 2.0**-13 / jnp.finfo(lse.dtype).eps
    # As a function of inputs, the second array is lse; the statistics are constants.
    query, key, operands = jax.lax.stop_gradient((query, key, dict(operands)))
    constant = jax.lax.stop_gradient(finite)

    def restate() -> tuple[jax.Array, jax.Array]:
        no_value = jnp.zeros_like(key[..., :1])
        _, maximum, total = _online_softmax(query, key, no_value, operands, options)
        empty = ~large | (total == 0)
        return jnp.where(empty, constant, maximum), jnp.where(empty, 0.0, jnp.log(jnp.where(empty, 1.0, total)))

    as_it_is = varying.vary_alike((constant, jnp.zeros_like(lse)), query, key, operands)
    maximum, rest = jax.lax.cond(large.any(), restate, lambda: as_it_is)
    return jnp.where(large, maximum, lse), jnp.where(large, rest + (finite - constant), 0.0)


def tangent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    operands: Operands,
    tangents: Mapping[str, jax.Array],
    options: Options,
    *,
    centered: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The tangents [B, T, N, V] of out and [B, N, T] of lse, linear in ``tangents``.

    With weights p = exp(score - lse) and the tangents ts of scores and tv of values,

        tlse = sum_s p * ts,    tout = sum_s p * (ts - tlse) * v + p * tv.

    ``tangents`` hold those of "query", "key", "value" and of trainable operands, each in the dtype of its primal; one
    that is missing is zero. With ``centered``, tlse is summed in a pass of its own, so that what all ts of a row have
    in common cancels before anything is rounded. Without it there is one pass, and tout is ``(sum_s p * ts * v + p *
    tv) - tlse * out``: its transpose is the backward pass of FlashAttention-2, delta and all.

    Knows every option but packed sequences, which `varlen` unpacks.
    """
    dtype, accumulate = query.dtype, dtypes.accumulation_dtype(query.dtype)
    q_length, q_heads = query.shape[1:3]
    kv_length, kv_heads, value_head_dim = value.shape[1:]
    q_chunk, kv_chunk = min(_CHUNK, q_length), min(_CHUNK, kv_length)
    product = functools.partial(jnp.einsum, preferred_element_type=accumulate, precision=_scores.precision(options))
    query, key, value = _scores.without_padding(query, key, value, operands)

    def chunks(x: jax.Array, name: str) -> jax.Array:
        return _rows(x, kv_heads, q_chunk) if name == "query" else _columns(x, kv_chunk)

    inputs = {name: chunks(x, name) for name, x in (("query", query), ("key", key), ("value", value))}
    moved = {
        name: chunks(_scores.zero_padding(x, "q" if name == "query" else "kv", operands), name)
        for name, x in tangents.items()
        if name in inputs
    }
    q_starts, kv_starts = _starts(inputs["query"], q_chunk), _starts(inputs["key"], kv_chunk)
    padded = _with_padding(operands, options, query, key, q_chunk, kv_chunk)
    groups = _grouped(padded, accumulate)
    moved_groups = _grouped(
        {name: x for name, x in tangents.items() if name in operands and name != "sinks"}, accumulate
    )
    by_row, moved_by_row = (_split_operands(x["t"] | x["ts"], "t", q_chunk) for x in (groups, moved_groups))
    by_column, moved_by_column = (_split_operands(x["s"], "s", kv_chunk) for x in (groups, moved_groups))

    # Restated would be what these keys alone sum up to.
    partial = options.partial_keys
    centered = centered and not partial
    maximum, rest = (lse, jnp.zeros_like(lse)) if partial else _restated(query, key, lse, operands, options)
    of_rows: dict[str, Any] = {
        "query": inputs["query"],
        "moved": {name: moved[name] for name in ("query",) if name in moved},
        # Rows that pad the last chunk get lse = inf, hence zero weights.
        "maximum": _row_statistic(_padded(maximum, q_chunk, jnp.inf), kv_heads, q_chunk),
        "rest": _row_statistic(_padded(rest, q_chunk, 0.0), kv_heads, q_chunk),
        "start": q_starts,
        "operands": by_row,
        "moved_operands": moved_by_row,
    }
    if not centered:
        of_rows["out"] = _rows(_scores.zero_padding(out, "q", operands), kv_heads, q_chunk)
    if "sinks" in tangents:
        sinks = _scores.sink_weights(operands, lse) * tangents["sinks"][:, :, None]
        of_rows["sinks"] = _row_statistic(sinks, kv_heads, q_chunk)

    def over_queries(_: None, rows: dict[str, Any]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        def of_keys(
            primal: Operands, group: Mapping[str, dict[str, jax.Array]], column: dict[str, jax.Array]
        ) -> tuple[Operands, Operands]:
            """The operands that all keys share, and in chunks those that they don't."""
            shared = group[""] | {name: primal[name] for name in group["t"]}
            return shared, column | _split_operands({name: primal[name] for name in group["ts"]}, "s", kv_chunk)

        shared, by_pair = of_keys(rows["operands"], groups, by_column)
        moved_shared, moved_by_pair = of_keys(rows["moved_operands"], moved_groups, moved_by_column)
        of_columns = {
            "key": inputs["key"],
            "value": inputs["value"],
            "moved": {name: moved[name] for name in ("key", "value") if name in moved},
            "start": kv_starts,
            "operands": by_pair,
            "moved_operands": moved_by_pair,
        }
        row_indices = rows["start"] + jnp.arange(q_chunk, dtype=jnp.int32)
        maximum = jnp.where(jnp.isneginf(rows["maximum"]), 0.0, rows["maximum"])[..., None]
        rest = rows["rest"][..., None]

        def over_keys(
            shift: jax.Array | None, with_values: bool, carry: tuple[jax.Array, ...], columns: dict[str, Any]
        ) -> tuple[tuple[jax.Array, ...], None]:
            column_indices = columns["start"] + jnp.arange(kv_chunk, dtype=jnp.int32)
            block = {**shared, **columns["operands"]}
            moved_block = {**moved_shared, **columns["moved_operands"]}

            def scores_of(products: jax.Array, trainable: Operands) -> jax.Array:
                return _scores.of_products(products, options, {**block, **trainable}, row_indices, column_indices)

            def attend(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                queries, keys, values = (x.astype(dtype) for x in (rows["query"], columns["key"], columns["value"]))
                products = product("bkgth,bksh->bkgts", queries, keys)
                moved_products = jnp.zeros_like(products)
                if "query" in rows["moved"]:
                    moved_products += product("bkgth,bksh->bkgts", rows["moved"]["query"].astype(dtype), keys)
                if "key" in columns["moved"]:
                    moved_products += product("bkgth,bksh->bkgts", queries, columns["moved"]["key"].astype(dtype))
                scores, moved_scores = jax.jvp(
                    scores_of,
                    (products, {name: block[name] for name in moved_block}),
                    (moved_products, moved_block),
                )
                above = scores - maximum
                # What rounding lifts above lse must not make weights infinite; their derivative stays.
                weights = jnp.exp(above - jax.lax.stop_gradient(jnp.maximum(above, 0.0)) - rest)
                if not with_values:
                    return (carry[0] + (weights * moved_scores).sum(axis=-1),)
                moved_weights = weights * (moved_scores if shift is None else moved_scores - shift[..., None])
                dropped = functools.partial(
                    _scores.dropped, options=options, operands=block, row=rows["start"], column=columns["start"]
                )
                weighted = product("bkgts,bksh->bkgth", dropped(moved_weights).astype(dtype), values)
                if "value" in columns["moved"]:
                    moved_values = columns["moved"]["value"].astype(dtype)
                    weighted += product("bkgts,bksh->bkgth", dropped(weights).astype(dtype), moved_values)
                return carry[0] + moved_weights.sum(axis=-1), carry[1] + weighted

            may_keep = _scores.may_keep(options, block, row_indices, column_indices)
            if may_keep is None:
                return attend(carry), None
            return jax.lax.cond(may_keep, attend, lambda carry: carry, carry), None

        def sums(shift: jax.Array | None, with_values: bool) -> tuple[jax.Array, ...]:
            statistics = rows["rest"].shape
            start: tuple[jax.Array, ...] = (jnp.zeros(statistics, accumulate),)
            if with_values:
                start += (jnp.zeros((*statistics, value_head_dim), accumulate),)
            start = varying.vary_alike(start, (rows, of_columns))
            step = jax.checkpoint(functools.partial(over_keys, shift, with_values))
            return jax.lax.scan(step, start, of_columns)[0]

        if centered:
            (moved_lse,) = sums(None, with_values=False)
            if "sinks" in rows:
                moved_lse = moved_lse + rows["sinks"]
            weighted = sums(moved_lse, with_values=True)[1]
            return None, (_scores.dropout_factor(weighted, options).astype(dtype), moved_lse)
        moved_lse, weighted = sums(None, with_values=True)
        if "sinks" in rows:
            moved_lse = moved_lse + rows["sinks"]
        weighted = _scores.dropout_factor(weighted, options) - moved_lse[..., None] * rows["out"]
        return None, (weighted.astype(dtype), moved_lse)

    _, (moved_out, moved_lse) = jax.lax.scan(jax.checkpoint(over_queries), None, of_rows)
    moved_out, moved_lse = _joined(moved_out, q_length, q_heads), _joined_statistic(moved_lse, q_length, q_heads)
    return (
        _scores.zero_padding(moved_out, "q", operands),
        jnp.swapaxes(_scores.zero_padding(jnp.swapaxes(moved_lse, 1, 2), "q", operands), 1, 2),
    )


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    dlse: jax.Array,
    out: jax.Array,
    operands: Operands,
    options: Options,
    wanted: Sequence[str],
    tangent: Tangent = tangent,
) -> dict[str, jax.Array]:
    """The gradients of the inputs and trainable operands in ``wanted``, each in the dtype of its primal."""
    everything = {"query": query, "key": key, "value": value, **operands}

    def linear(tangents: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return tangent(
            query, key, value, out, lse, operands=operands, tangents=tangents, options=options, centered=False
        )

    # Not by jax.linear_transpose: jax 0.9 treats all of a scan as constant there.
    zeros = varying.vary_alike({name: jnp.zeros_like(everything[name]) for name in wanted}, everything)
    gradients: dict[str, jax.Array]
    (gradients,) = jax.vjp(linear, zeros)[1]((dout, dlse))
    return gradients


def _rows(x: jax.Array, kv_heads: int, chunk: int) -> jax.Array:
    """[B, T, N, H] -> [chunks, B, K, G, rows, H], the chunk axis being what scans walk along.

    Wide outside of the scans and cast back inside them, so that gradients are summed over chunks in the wide dtype.
    """
    chunks = _split(x.astype(dtypes.accumulation_dtype(x.dtype)), 1, chunk)
    *shape, q_heads, head_dim = chunks.shape
    return chunks.reshape(*shape, kv_heads, q_heads // kv_heads, head_dim).transpose(0, 1, 3, 4, 2, 5)


def _columns(x: jax.Array, chunk: int) -> jax.Array:
    """[B, S, K, H] -> [chunks, B, K, columns, H], in the wide dtype as `_rows`."""
    return _split(x.astype(dtypes.accumulation_dtype(x.dtype)), 1, chunk).transpose(0, 1, 3, 2, 4)


def _row_statistic(x: jax.Array, kv_heads: int, chunk: int) -> jax.Array:
    """[B, N, T] -> [chunks, B, K, G, rows]."""
    batch, q_heads, q_length = x.shape
    return _split(x.reshape(batch, kv_heads, q_heads // kv_heads, q_length), 3, chunk)


def _padded(x: jax.Array, chunk: int, fill: float) -> jax.Array:
    """[..., length], padded to the next multiple of ``chunk``."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % chunk)], constant_values=fill)


def _joined(x: jax.Array, length: int, q_heads: int) -> jax.Array:
    """The inverse of `_rows`."""
    x = x.transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(x.shape[0], -1, q_heads, x.shape[-1])[:, :length]


def _joined_statistic(x: jax.Array, length: int, q_heads: int) -> jax.Array:
    """The inverse of `_row_statistic`."""
    x = x.transpose(1, 2, 3, 0, 4)
    return x.reshape(x.shape[0], q_heads, -1)[:, :, :length]


def _starts(chunks: jax.Array, chunk: int) -> jax.Array:
    return jnp.arange(chunks.shape[0], dtype=jnp.int32) * chunk


def _grouped(operands: Operands, accumulate: jax.typing.DTypeLike) -> dict[str, dict[str, jax.Array]]:
    """The operands, grouped by which of the lengths t and s they have."""
    groups: dict[str, dict[str, jax.Array]] = {"": {}, "t": {}, "s": {}, "ts": {}}
    for name, x in operands.items():
        groups[_lengths(name, x)][name] = _wide(name, x, accumulate)
    return groups


def _with_padding(
    operands: Operands, options: Options, query: jax.Array, key: jax.Array, q_chunk: int, kv_chunk: int
) -> Operands:
    """The operands, with lengths that mark the padding of the last chunks: of keys, and where functions of scores would
    see them, of rows."""
    operands = _with_padded_keys(operands, key, kv_chunk)
    batch, q_length = query.shape[:2]
    if q_length % q_chunk == 0 or options.functions is None:
        return operands
    lengths = varying.vary_alike(jnp.full(batch, q_length, jnp.int32), query)
    if "q_lengths" in operands:
        lengths = jnp.minimum(lengths, operands["q_lengths"])
    return {**operands, "q_lengths": lengths}


def _with_padded_keys(operands: Operands, key: jax.Array, chunk: int) -> Operands:
    """The operands, with kv_lengths that mark the padding of the last chunk of keys."""
    batch, kv_length = key.shape[:2]
    if kv_length % chunk == 0:
        return operands
    lengths = varying.vary_alike(jnp.full(batch, kv_length, jnp.int32), key)
    if "kv_lengths" in operands:
        lengths = jnp.minimum(lengths, operands["kv_lengths"])
    return {**operands, "kv_lengths": lengths}


def _lengths(name: str, x: jax.Array) -> str:
    """Which of "t" and "s" are dimensions of an operand; one of size 1 that is broadcast is not."""
    operand = OPERANDS[name]
    sizes = zip(operand.dims, x.shape, strict=operand is not CAPTURED)
    return "".join(dim for dim, size in sizes if dim in "ts" and not (operand.broadcast and size == 1))


def _wide(name: str, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """An operand; in the wide dtype if its gradient is summed over chunks."""
    summed = OPERANDS[name].trainable and _lengths(name, x) != "ts" and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if summed else x


def _split_operands(operands: Operands, dim: str, chunk: int) -> dict[str, jax.Array]:
    return {name: _split(x, OPERANDS[name].dims.index(dim), chunk) for name, x in operands.items()}


def _split(x: jax.Array, axis: int, chunk: int) -> jax.Array:
    """[..., length, ...] -> [chunks, ..., chunk, ...], padded with zeros or False; integers with their last value."""
    length = x.shape[axis]
    chunks = -(-length // chunk)
    if padding := chunks * chunk - length:
        mode = "edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant"
        x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)], mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, chunk, *x.shape[axis + 1 :]), axis, 0)
