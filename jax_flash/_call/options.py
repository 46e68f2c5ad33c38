"""The option record of a call; the names are those of csrc/options.h."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._functions.trace import Functions

Implementation = Literal["cuda", "cpu", "xla", "reference"]
"""The names of the implementations; "reference" is only used if named."""

Precision = Literal["default", "high", "highest"] | jax.lax.Precision
"""Accuracy of float32 products on GPUs."""

UNLIMITED = 2**31 - 1
"""A side of the window that has no limit."""

_INT32 = np.iinfo(np.int32)

SEGMENT_BLOCK = 32
"""Rows or keys of a block, for each of which the segment ranges and the interval ranges have a record."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options whose values are known when a call is traced."""

    causal: bool
    scale: float  # finite and > 0; 1 with traced_scale
    highest_precision: bool = False  # of float32 products; False for other dtypes
    separate_dq: bool = False  # on GPUs dquery has a pass of its own, and gradients are summed in a fixed order
    ordered_dq: bool = False  # with separate_dq: dquery is summed in a fixed order instead; set where it is lowered
    original_bfloat16: bool = False  # the originals passed with descale are bfloat16, else float32
    exact_sums: bool = False  # gradients of captured arrays are sums in digits: set where they are lowered
    partial_keys: bool = False  # backward and tangent: out and lse are those of more keys than these
    sequences: int = 1  # of a batch entry; 1 unless it is packed
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    softcap: float = 0.0  # 0: none
    dropout_rate: float = 0.0  # 0: none, and no dropout_seeds
    functions: Functions | None = None  # score and mask functions; None: none


Operands = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Operand:
    """An option that is an array: what lowering, vmap and sharding need to know about it.

    ``dims`` has a letter for each dimension, as in csrc/options.h: b batch, d sequences, e sequences + 1, n query
    heads, k key heads, t and s lengths, i and j lengths in blocks of `SEGMENT_BLOCK`, x and y in blocks of a block
    mask, h head_dim, v value_head_dim, 2 a pair, 4 and 8 records of so many.

    ``dtype`` is a dtype's name, "wide" for the accumulation dtype, or "original" for float32, and bfloat16 where
    ``Options.original_bfloat16`` says so.

    ``of_rows(operands, first_row, rows)`` makes the operand for a device whose ``rows`` rows of query begin with
    ``first_row``: one that depends on the rows without a dimension t, which is split as they are. It is called with the
    operands as they were before.
    """

    dims: str
    dtype: str
    may_be_narrow: bool = False  # may have the dtype of query instead, which wide_<name> tells the kernels
    trainable: bool = False  # has a gradient, in the accumulation dtype
    broadcast: bool = False  # any dimension may have size 1
    positional: bool = False  # its effect on a score depends on the position of the row
    of_rows: Callable[[Operands, jax.Array, int], jax.Array] | None = None


def segment_ranges(ids: jax.Array) -> jax.Array:
    """[B, blocks, 2]: the smallest and the largest id of each block of ``ids``, [B, length]."""
    batch, length = ids.shape
    blocks = -(-length // SEGMENT_BLOCK)
    padded = jnp.pad(ids, ((0, 0), (0, blocks * SEGMENT_BLOCK - length)), mode="edge")
    grouped = padded.reshape(batch, blocks, SEGMENT_BLOCK)
    return jnp.stack([grouped.min(axis=-1), grouped.max(axis=-1)], axis=-1)


def interval_ranges(intervals: jax.Array) -> jax.Array:
    """[b, n, blocks, 4]: of each block of ``intervals``, [b, n, length, 2], what some of them hold and what all hold.

    The smallest start and the largest end of those that are not empty; the largest start and the smallest end of all.
    """
    *heads, length, _ = intervals.shape
    blocks = -(-length // SEGMENT_BLOCK)
    padded = jnp.pad(intervals, ((0, 0), (0, 0), (0, blocks * SEGMENT_BLOCK - length), (0, 0)), mode="edge")
    start, end = jnp.moveaxis(padded.reshape(*heads, blocks, SEGMENT_BLOCK, 2), -1, 0)
    empty = start >= end
    some = jnp.where(empty, _INT32.max, start).min(axis=-1), jnp.where(empty, _INT32.min, end).max(axis=-1)
    return jnp.stack([*some, start.max(axis=-1), end.min(axis=-1)], axis=-1)


def hides_keys(operands: Operands, rows: int) -> bool:
    """Whether there is a mask that all of several rows share."""
    # Lengths may be symbolic: they compare by == alone.
    return rows != 1 and "mask" in operands and operands["mask"].shape[2] == 1 and operands["mask"].shape[3] != 1


def by_keys(operands: Operands, rows: int) -> dict[str, jax.Array]:
    """The operands, with a mask that all of several rows share as intervals of rows for each key: all rows or none.

    So kernels leave out the blocks of keys that it hides, and read nothing for a single pair.
    """
    found = dict(operands)
    if hides_keys(operands, rows):
        kept = found.pop("mask")[:, :, 0, :, None]
        every = jnp.clip(jnp.array([0, _INT32.max], jnp.int32), 0, rows)  # the kernels round an end up to whole tiles
        found["q_intervals"] = jnp.where(kept, found.get("q_intervals", every), jnp.int32(0))
        found["q_interval_ranges"] = interval_ranges(found["q_intervals"])
    return found


def kept_first(operands: Operands, batch: int, keys: int) -> dict[str, jax.Array]:
    """The operands, with a mask that all rows and heads share as lists of keys, of which the first ones are kept.

    So keys that it hides take no part in the tiles of kernels, wherever they stand.
    """
    found = dict(operands)
    kept = jnp.broadcast_to(found.pop("mask")[:, 0, 0], (batch, keys))
    rows = jnp.arange(keys, dtype=jnp.int32)
    if "kv_lengths" in found:
        kept &= rows < found["kv_lengths"][:, None]
    so_far = kept.cumsum(axis=1, dtype=jnp.int32)
    count = so_far[:, -1]
    place = jnp.where(kept, so_far - 1, count[:, None] + rows - so_far)
    found["kv_rows"] = jax.vmap(lambda x: jnp.zeros_like(rows).at[x].set(rows, unique_indices=True))(place)
    found["kv_lengths"] = count
    return found


def with_ranges(operands: Operands) -> dict[str, jax.Array]:
    """The operands with the ranges of their segment ids and intervals."""
    made = {name.replace("_ids", "_ranges"): segment_ranges(x) for name, x in operands.items() if "segment_ids" in name}
    made |= {
        name.replace("intervals", "interval_ranges"): interval_ranges(x)
        for name, x in operands.items()
        if name in ("kv_intervals", "q_intervals")
    }
    return {**operands, **made}


def _offset_of_rows(operands: Operands, first_row: jax.Array, rows: int) -> jax.Array:
    offset = operands["q_offset"]  # saturate: positions beyond int32 have the largest one
    return jnp.where(offset > _INT32.max - first_row, _INT32.max, offset + first_row)


def _lengths_of_rows(operands: Operands, first_row: jax.Array, rows: int) -> jax.Array:
    return jnp.clip(operands["q_lengths"] - first_row, 0, rows)


def _ranges_of_rows(operands: Operands, first_row: jax.Array, rows: int) -> jax.Array:
    return segment_ranges(operands["q_segment_ids"])  # in blocks that begin with the device's first row


def _kv_interval_ranges_of_rows(operands: Operands, first_row: jax.Array, rows: int) -> jax.Array:
    return interval_ranges(operands["kv_intervals"])


def _q_intervals_of_rows(operands: Operands, first_row: jax.Array, rows: int) -> jax.Array:
    return jnp.clip(operands["q_intervals"] - first_row, 0, rows)


def _q_interval_ranges_of_rows(operands: Operands, first_row: jax.Array, rows: int) -> jax.Array:
    return interval_ranges(_q_intervals_of_rows(operands, first_row, rows))


class _Operands(dict[str, Operand]):
    """The built-in operands by name; every other name is that of an array that a function has captured."""

    def __missing__(self, name: str) -> Operand:
        return CAPTURED


CAPTURED = Operand("", "any", trainable=True)
"""An array that a score or mask function captured. Its dims are written "." each, and "m" for a first one of the calls
that vmap has joined in the batch."""


def is_captured(name: str) -> bool:
    """Whether a name, of an operand or of another argument, is that of an array that a function has captured."""
    return name.startswith("captured_")


OPERANDS: dict[str, Operand] = _Operands(
    {
        "traced_scale": Operand("b", "wide"),
        "window_bounds": Operand("b2", "int32", positional=True),
        "q_offset": Operand("bd", "int32", of_rows=_offset_of_rows),
        "q_lengths": Operand("b", "int32", of_rows=_lengths_of_rows),
        "kv_lengths": Operand("b", "int32"),
        "kv_rows": Operand("bs", "int32"),
        "cu_q_lengths": Operand("be", "int32"),
        "cu_kv_lengths": Operand("be", "int32"),
        "q_segment_ids": Operand("bt", "int32"),
        "kv_segment_ids": Operand("bs", "int32"),
        "q_segment_ranges": Operand("bi2", "int32", of_rows=_ranges_of_rows),
        "kv_segment_ranges": Operand("bj2", "int32"),
        "mask_blocks": Operand("bdnxy", "int8", broadcast=True),
        "index_offsets": Operand("2", "int32"),
        "kv_intervals": Operand("bnt2", "int32", broadcast=True),
        "q_intervals": Operand("bns2", "int32", broadcast=True, of_rows=_q_intervals_of_rows),
        "kv_interval_ranges": Operand("bni4", "int32", broadcast=True, of_rows=_kv_interval_ranges_of_rows),
        "q_interval_ranges": Operand("bnj4", "int32", broadcast=True, of_rows=_q_interval_ranges_of_rows),
        "mask": Operand("bnts", "bool", broadcast=True),
        "dropout_seeds": Operand("bdn2", "uint32"),
        "descale": Operand("bk8", "float32"),
        "original_query": Operand("btnh", "original"),
        "original_key": Operand("bskh", "original"),
        "original_value": Operand("bskv", "original"),
        "original_dout": Operand("btnv", "original"),
        "sinks": Operand("bn", "wide"),
        "alibi_slopes": Operand("bdn", "wide", trainable=True, positional=True),
        "bias": Operand("bnts", "wide", may_be_narrow=True, trainable=True, broadcast=True),
    }
)
"""Each is optional; csrc/options.h defines their meaning. sinks has a gradient too, one that needs no kernel; descale
and the originals are no options of attention() but belong to the float16 form of float32 arrays
(csrc/cuda/device/scale.cuh)."""


def positions_matter(options: Options, operands: Collection[str]) -> bool:
    """Whether a result depends on the positions of the rows of query, which q_offset shifts."""
    window = (options.window_left, options.window_right)
    in_window = window != (UNLIMITED, UNLIMITED)
    return (
        options.causal
        or in_window
        or options.functions is not None
        or any(OPERANDS[name].positional for name in operands)
    )
