"""The call of one device, and what its operands become for a part of the rows and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import dtypes
from jax_flash._call.options import OPERANDS, UNLIMITED, Operands, Options, positions_matter
from jax_flash._context.functions import Locate, Pair, relocated
from jax_flash._context.orders import Shard
from jax_flash._implementations import scores, varying

Arrays = dict[str, jax.Array]
Limits = tuple[int, int] | None
Attend = Callable[[Options, Limits, jax.Array, jax.Array, jax.Array, Arrays], tuple[jax.Array, jax.Array]]
"""attention without context parallelism: out and lse of a call's options, limits, inputs and operands (without the
ranges of segment ids and intervals)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of one device, whose ``query`` [B, T, N, H], ``key`` and ``value`` [B, S, K, H] are its shards.

    Operands with a dimension t have the rows of the shard. Of those with a dimension s, the ones that have no t have
    the keys of the shard; bias and mask have all keys, in true order. All numbers (lengths, offsets, intervals,
    cu_q_lengths) are those of the whole sequence.
    """

    axis: Any  # of the mesh
    rows: Shard
    keys: Shard
    options: Options
    limits: Limits
    attend: Attend
    named: str | None  # the implementation that was asked for

    @property
    def devices(self) -> int:
        return self.rows.devices

    @property
    def index(self) -> jax.Array:
        return self.rows.index


def axis_of(name: str, x: jax.Array, dim: str) -> int | None:
    """Which axis of an operand is ``dim``; None if it has none, or one of size 1 that is broadcast."""
    operand = OPERANDS[name]
    axis = operand.dims.find(dim)
    return None if axis < 0 or (operand.broadcast and x.shape[axis] == 1) else axis


def of_keys_alone(name: str) -> bool:
    """Whether an operand has a value for each key, and so travels with K and V."""
    return "s" in OPERANDS[name].dims and "t" not in OPERANDS[name].dims


def sliced_rows(operands: Operands, start: int, rows: int) -> Arrays:
    """The operands of the shard's rows from ``start`` on."""
    found = {}
    for name, x in operands.items():
        axis = axis_of(name, x, "t")
        found[name] = x if axis is None else jax.lax.slice_in_dim(x, start, start + rows, axis=axis)
    return found


def wide(query: jax.Array) -> Any:
    return dtypes.accumulation_dtype(query.dtype)


def of_run(
    call: Call, operands: Operands, first_row: jax.Array, query: jax.Array, kv_length: int
) -> tuple[Options, Arrays]:
    """Options and operands for consecutive rows from position ``first_row`` on, with all keys in true order."""
    options, batch, rows = call.options, query.shape[0], query.shape[1]
    found = dict(operands)
    if call.limits is not None:
        return _of_packed_run(call, found, first_row, rows)
    if positions_matter(options, found) and "q_offset" not in found:
        found["q_offset"] = jnp.zeros((batch, 1), jnp.int32)
    before = dict(found)
    for name, x in before.items():
        if of_rows := OPERANDS[name].of_rows:
            found[name] = of_rows(before, first_row, rows)
        else:
            found[name] = x
    if "mask_blocks" not in found:
        return options, found
    assert options.functions is not None
    height = options.functions.block_size[0]
    if rows % height == 0 or call.devices == 1:
        if found["mask_blocks"].shape[3] * height >= call.rows.total:
            blocks = -(-rows // height)
            found["mask_blocks"] = jax.lax.dynamic_slice_in_dim(
                found["mask_blocks"], first_row // np.int32(height), blocks, 3
            )
        return options, found
    # A block of the mask is that of rows of several devices or chunks: so a function decides every pair.
    arrays = {"first_row": first_row} | {name: operands[name] for name in ("q_offset",) if name in operands}

    def locate(arrays: Arrays, b: Any, q: Any, kv: Any) -> Pair:
        return Pair(b, q - _offset(arrays, b), q, kv)

    return relocated(options, found, locate, arrays, dtype=wide(query), blocks=True)


def _offset(arrays: Arrays, b: Any) -> Any:
    """The user's q_offset of a batch entry."""
    if "q_offset" not in arrays:
        return np.int32(0)
    if "index_offsets" in arrays:
        b = b - arrays["index_offsets"][0]
    return arrays["q_offset"][b if arrays["q_offset"].shape[0] > 1 else np.int32(0), np.int32(0)]


def _of_packed_run(call: Call, operands: Arrays, first_row: jax.Array, rows: int) -> tuple[Options, Arrays]:
    cu = operands["cu_q_lengths"]
    # So many rows of a sequence come before these.
    earlier = jnp.maximum(first_row - cu[:, :-1], 0)
    found = {**operands, "cu_q_lengths": jnp.clip(cu - first_row, 0, rows)}
    if positions_matter(call.options, operands):
        found["q_offset"] = earlier + operands.get("q_offset", jnp.zeros_like(earlier))
    if "q_intervals" in operands:
        x = operands["q_intervals"]
        sequence = sequence_of(operands["cu_kv_lengths"], jnp.arange(call.keys.total, dtype=jnp.int32))
        of_key = jnp.take_along_axis(earlier, sequence, axis=1)[:, None, :, None]
        found["q_intervals"] = jnp.clip(x - of_key, 0, rows)
    return call.options, found


def sequence_of(cu_lengths: jax.Array, positions: jax.Array) -> jax.Array:
    """[B, len(positions)]: the sequence of each position; the last one for those that are in none."""
    found = jax.vmap(lambda cu: jnp.searchsorted(cu, positions, side="right"))(cu_lengths).astype(jnp.int32) - 1
    return jnp.clip(found, 0, cu_lengths.shape[1] - 2)


def by_intervals(call: Call, operands: Operands, keys: Shard, query: jax.Array) -> tuple[Options, Arrays]:
    """Options and operands for the call's rows with the keys of ``keys``, whatever positions these have.

    What depends on positions becomes intervals of keys for each row. Positions ascend in both, so that what a row keeps
    of consecutive positions are consecutive keys of the shard. ALiBi becomes a score function, and functions are told
    positions.
    """
    rows, options, found = call.rows, call.options, dict(operands)
    positions = rows.positions
    packed = call.limits is not None
    sequence = None
    if packed:
        sequence = sequence_of(found["cu_q_lengths"], positions)  # [1, T]
    start, end = _band(options, found, positions, sequence, rows.total, keys.total)
    if packed:
        assert sequence is not None
        cu_q, cu_kv = found["cu_q_lengths"], found["cu_kv_lengths"]
        first, last = jnp.take(cu_kv[0], sequence), jnp.take(cu_kv[0], sequence + 1)
        own = first + start, first + end
        start, end = jnp.maximum(own[0], first), jnp.minimum(own[1], last)
        end = jnp.where(positions < cu_q[:, -1:], end, 0)
    intervals = jnp.stack(jnp.broadcast_arrays(start, end), -1)[:, None]  # [b, 1, T, 2]
    if "kv_intervals" in found:
        given = found["kv_intervals"]
        if packed:
            given = given + first[:, None, :, None]
        intervals = jnp.stack(
            [jnp.maximum(intervals[..., 0], given[..., 0]), jnp.minimum(intervals[..., 1], given[..., 1])], -1
        )
    needs_intervals = packed or "kv_intervals" in found or _has_band(options, found)
    if "q_intervals" in found:
        given = found["q_intervals"]
        if packed:
            of_keys = sequence_of(cu_kv, keys.positions)
            first_row, last_row = jnp.take(cu_q[0], of_keys), jnp.take(cu_q[0], of_keys + 1)
            given = jnp.clip(given + first_row[:, None, :, None], 0, last_row[:, None, :, None])
        found["q_intervals"] = rows.count_before(given)
    if needs_intervals:
        found["kv_intervals"] = keys.count_before(intervals)
    if packed:
        found["q_lengths"], found["kv_lengths"] = cu_q[:, -1], cu_kv[:, -1]
    for name, shard in (("q_lengths", rows), ("kv_lengths", keys)):
        if name in found:
            found[name] = shard.count_before(found[name])
    arrays = _places(rows, "row") | _places(keys, "key")
    arrays |= {name: found[name] for name in ("q_offset", "cu_q_lengths", "cu_kv_lengths") if name in found}
    for name in ("q_offset", "window_bounds", "cu_q_lengths", "cu_kv_lengths"):
        found.pop(name, None)
    options = dataclasses.replace(options, causal=False, window_left=UNLIMITED, window_right=UNLIMITED, sequences=1)
    if options.functions is not None or "alibi_slopes" in found:
        options, found = relocated(
            options,
            found,
            _locate_in_shards(rows, keys),
            arrays,
            dtype=wide(query),
            alibi="alibi_slopes" in found,
            blocks="mask_blocks" in found,
        )
    return options, found


def _has_band(options: Options, operands: Operands) -> bool:
    window = (options.window_left, options.window_right)
    return options.causal or window != (UNLIMITED, UNLIMITED) or "window_bounds" in operands


def _band(
    options: Options, operands: Operands, positions: jax.Array, sequence: jax.Array | None, rows: int, keys: int
) -> tuple[jax.Array, jax.Array]:
    """[start, end) of the keys that causal and window keep for rows at ``positions``, each [b, T]; in packed calls of
    the row's ``sequence`` [1, T], counted from its first key."""
    if sequence is not None:
        # One sequence for each entry of a batch, as _band has it.
        operands = {name: x.reshape(-1, 1) if name == "q_offset" else x for name, x in operands.items()}
        positions = positions - jnp.take(operands["cu_q_lengths"][0], sequence[0])
    lower, upper = scores.band(options, operands)
    # No difference of positions exceeds these, and sums with positions do not wrap around.
    least, most = np.int32(-rows - 1), np.int32(keys)
    start, end = jnp.zeros_like(positions)[None], jnp.full_like(positions, keys)[None]
    if lower is not None:
        start = positions + _of_rows(jnp.clip(lower, least, most), sequence)
    if upper is not None:
        end = positions + _of_rows(jnp.clip(upper, least, most), sequence) + 1
    return start, end


def _of_rows(x: jax.Array, sequence: jax.Array | None) -> jax.Array:
    """[b, 1] of [b], or [1, T] of what each sequence has."""
    return x[:, None] if sequence is None or x.shape[0] == 1 else jnp.take(x, sequence[0])[None]


def _places(shard: Shard, side: str) -> Arrays:
    """What `_locate_in_shards` reads."""
    if shard.devices == 1:
        return {}
    return {f"{side}_index": shard.index}


def _locate_in_shards(rows: Shard, keys: Shard) -> Locate:
    def placed(shard: Shard, side: str, arrays: Arrays, i: Any) -> Any:
        if shard.devices == 1:
            return i
        return dataclasses.replace(shard, index=arrays[f"{side}_index"]).position(i)

    def locate(arrays: Arrays, b: Any, q: Any, kv: Any) -> Pair:
        row, key = placed(rows, "row", arrays, q), placed(keys, "key", arrays, kv)
        if "cu_q_lengths" not in arrays:
            return Pair(b, row, row + _offset(arrays, b), key)
        cu_q, cu_kv = arrays["cu_q_lengths"][0], arrays["cu_kv_lengths"][0]
        sequence = np.int32(0)
        for i in range(1, cu_q.shape[0] - 1):  # few operations each, where searchsorted would be a loop
            sequence = sequence + (row >= cu_q[i]).astype(jnp.int32)
        row, key = row - cu_q[sequence], key - cu_kv[sequence]
        offset = arrays["q_offset"][0, sequence] if "q_offset" in arrays else np.int32(0)
        return Pair(sequence, row, row + offset, key)

    return locate


def joined(parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """out and lse of rows, of those of consecutive ones."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


def widened(f: Callable[[jax.Array], jax.Array], x: jax.Array, copies: int = 1) -> tuple[jax.Array, ...]:
    """``copies`` of ``f(x)``, whose cotangents are added, and go through f's transpose, in the accumulation dtype.

    ``f`` is linear, and may communicate.
    """
    dtype, accumulate = x.dtype, dtypes.accumulation_dtype(x.dtype)
    if dtype == accumulate:
        return (f(x),) * copies

    @jax.custom_jvp
    def apply(x: jax.Array) -> tuple[jax.Array, ...]:
        return (f(x),) * copies

    @apply.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        moved = f(tangents[0].astype(accumulate))
        return apply(*primals), tuple(moved.astype(dtype) for _ in range(copies))

    return apply(x)


def vary(call: Call, *arrays: Any) -> Any:
    """Arrays that vary over the axis, so that gradients of those that devices share are summed up."""
    return varying.vary_alike(arrays, call.index)
