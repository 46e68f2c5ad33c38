"""From the products of queries and keys to masked scores, for the implementations in plain JAX.

Everything here works on a block of pairs, given by the indices of its rows and columns (int32, consecutive) and by
operands of which t and s dimensions have been cut to the block. Heads are grouped: [B, K, G, rows, columns], where
query head n is member n % G of key head n // G.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import OPERANDS, UNLIMITED, Operands, Options, hides_keys
from jax_flash._functions import plain
from jax_flash._functions.trace import Function, captured_name
from jax_flash._implementations import dropout

_INT32 = np.iinfo(np.int32)

EMPTY, PARTIAL, FULL = 0, 1, 2
"""The kinds of blocks in the operand mask_blocks: no pair is kept, the block mask's function decides, all are."""


def precision(options: Options) -> jax.lax.Precision:
    """The precision of einsums; the options have taken ``jax.default_matmul_precision`` into account."""
    return jax.lax.Precision.HIGHEST if options.highest_precision else jax.lax.Precision.DEFAULT


def without_padding(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The inputs with zeros beyond their lengths: NaN there would survive a weight of zero."""
    return (
        zero_padding(query, "q", operands),
        zero_padding(key, "kv", operands),
        zero_padding(value, "kv", operands),
    )


def zero_padding(x: jax.Array, side: str, operands: Operands) -> jax.Array:
    """[B, length, ...] of the "q" or "kv" side with zeros from its lengths on."""
    if f"{side}_lengths" not in operands:
        return x
    within = _within(x.shape[1], operands[f"{side}_lengths"])
    return jnp.where(within.reshape(*within.shape, *[1] * (x.ndim - 2)), x, 0)


def rows_within(operands: Operands, side: str, length: int) -> jax.Array | None:
    """Which rows are not padding, bool [B or 1, length]; None if there is no padding. Padding may hold anything.

    ``side`` is "q" or "kv"; packed sequences have padding too.
    """
    if f"{side}_lengths" in operands:
        return _within(length, operands[f"{side}_lengths"])
    if f"cu_{side}_lengths" in operands:
        return _within(length, operands[f"cu_{side}_lengths"][:, -1])
    return None


def finish(out: jax.Array, lse: jax.Array, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] and lse [B, N, T] with the results of padded rows put in, and no gradients from these."""
    if "q_lengths" not in operands:
        return out, lse
    within = _within(out.shape[1], operands["q_lengths"])
    if "sinks" in operands:
        empty = jnp.broadcast_to(jax.lax.stop_gradient(operands["sinks"])[:, :, None], lse.shape)
    else:
        empty = jnp.full_like(lse, -jnp.inf)
    return jnp.where(within[:, :, None, None], out, 0), jnp.where(within[:, None], lse, empty)


def _within(length: int, lengths: jax.Array) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32) < lengths[:, None]


def of_products(
    products: jax.Array, options: Options, operands: Operands, rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """Scores [B, K, G, rows, columns], -inf where a pair is not kept. ``products`` have the accumulation dtype."""
    dtype, kv_heads = products.dtype, products.shape[1]
    if "traced_scale" in operands:
        scores = products * operands["traced_scale"][:, None, None, None, None]
    else:
        scores = products * jnp.asarray(options.scale, dtype)
    scores = _rounded(scores)
    if options.softcap:
        cap = jnp.asarray(options.softcap, dtype)
        scores = _rounded(cap * jnp.tanh(scores / cap))
    if "bias" in operands:
        scores = scores + grouped(operands["bias"], kv_heads).astype(dtype)
    if "alibi_slopes" in operands:
        # Floating point from here on: t + q_offset may exceed int32.
        distance = (rows[:, None] - columns).astype(dtype)[None]
        if "q_offset" in operands:
            distance = distance + operands["q_offset"].astype(dtype)[:, :, None]
        slopes = grouped(operands["alibi_slopes"][:, 0], kv_heads)
        scores = scores - slopes[..., None, None] * jnp.abs(distance)[:, None, None]
    pairs = _pairs(options, operands, scores.shape, rows, columns)
    keep = _keep(options, operands, rows, columns, kv_heads, pairs)
    if options.functions is not None and options.functions.score is not None:
        assert pairs is not None
        score = options.functions.score
        return plain.scores_of(score, _captured(score, operands), scores, keep, pairs)
    return scores if keep is None else jnp.where(keep, scores, -jnp.inf)


def _pairs(
    options: Options, operands: Operands, shape: tuple[int, ...], rows: jax.Array, columns: jax.Array
) -> plain.Pairs | None:
    """The indices of a block of scores [B, K, G, rows, columns] for the functions of a call; None if it has none."""
    if options.functions is None:
        return None
    batch, kv_heads, group = shape[:3]
    b, h = jnp.arange(batch, dtype=jnp.int32), jnp.arange(kv_heads * group, dtype=jnp.int32).reshape(kv_heads, group)
    if "index_offsets" in operands:
        b, h = b + operands["index_offsets"][0], h + operands["index_offsets"][1]
    call = None
    if options.functions.batch is not None:
        call, b = b // options.functions.batch, b % options.functions.batch
    q = rows[None]
    if "q_offset" in operands:
        offset = operands["q_offset"][:, :1]
        q = jnp.where(offset > _INT32.max - q, _INT32.max, offset + q)  # positions beyond int32 have the largest one
    return plain.Pairs(b, h, q, columns, call)


def _captured(function: Function, operands: Operands) -> list[jax.Array]:
    return [operands[captured_name(i)] for i in function.captured]


@jax.custom_jvp
def _rounded(x: jax.Array) -> jax.Array:
    """``x``, a product, which no compiler may fuse with an addition that follows.

    Fused, score - maximum is what rounding took from the maximum: anything, where scores are large. Only a select
    prevents that on CPUs: XLA drops a barrier, and LLVM looks through reduce_precision. This one changes -inf alone.
    """
    lowest = jnp.finfo(x.dtype).min
    return jnp.where(x < lowest, lowest, x)


@_rounded.defjvp
def _rounded_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _rounded(*primals), tangents[0]


def dropped(
    weights: jax.Array, options: Options, operands: Operands, row: jax.typing.ArrayLike, column: jax.typing.ArrayLike
) -> jax.Array:
    """``weights`` [B, K, G, rows, columns] with zeros where dropout drops them; ``row`` and ``column`` are the first.

    The caller multiplies by `dropout_factor` after the product with values, so that no 16-bit weight overflows.
    """
    if not options.dropout_rate:
        return weights
    keep = dropout.keep(
        operands["dropout_seeds"][:, 0], options.dropout_rate, row, weights.shape[-2], column, weights.shape[-1]
    )
    return jnp.where(grouped(keep, weights.shape[1]), weights, 0)


def dropout_factor(out: jax.Array, options: Options) -> jax.Array:
    """``out`` times the factor of kept weights, `dropout.factor`."""
    return out * jnp.asarray(dropout.factor(options.dropout_rate), out.dtype) if options.dropout_rate else out


def sink_weights(operands: Operands, lse: jax.Array) -> jax.Array:
    """[B, N, T]: the sinks' share of the softmax of each row, exp(sink - lse)."""
    sinks = operands["sinks"][:, :, None]
    finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
    # A row whose lse equals its sink up to rounding keeps no key; its gradients are 0, not rounding errors.
    alone = jnp.abs(sinks - finite) <= 4 * jnp.finfo(lse.dtype).eps * jnp.maximum(1.0, jnp.abs(finite))
    return jnp.where(jnp.isneginf(sinks), 0.0, jnp.where(alone, 1.0, jnp.exp(sinks - finite)))


def grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """[b, n, ...] -> [b, K, G, ...], or [b, 1, 1, ...] if n is 1."""
    return x.reshape(x.shape[0], min(kv_heads, x.shape[1]), -1, *x.shape[2:])


def _keep(
    options: Options,
    operands: Operands,
    rows: jax.Array,
    columns: jax.Array,
    kv_heads: int,
    pairs: plain.Pairs | None = None,
) -> jax.Array | None:
    """Which pairs are kept, to be broadcast to [B, K, G, rows, columns]; None for all of them.

    Mask functions and block masks count where ``pairs`` are given.
    """
    conditions = []
    lower, upper = band(options, operands)
    difference = (columns - rows[:, None])[None]
    if upper is not None:
        conditions.append(difference <= upper[:, None, None])
    if lower is not None:
        conditions.append(difference >= lower[:, None, None])
    if "q_segment_ids" in operands:
        conditions.append(operands["q_segment_ids"][:, :, None] == operands["kv_segment_ids"][:, None, :])
    if "q_lengths" in operands:
        conditions.append((rows < operands["q_lengths"][:, None])[:, :, None])
    if "kv_lengths" in operands:
        conditions.append((columns < operands["kv_lengths"][:, None])[:, None, :])
    conditions = [condition[:, None, None] for condition in conditions]
    if "kv_intervals" in operands:
        start, end = jnp.moveaxis(grouped(operands["kv_intervals"], kv_heads), -1, 0)[..., None]
        conditions.append((start <= columns) & (columns < end))
    if "q_intervals" in operands:
        start, end = jnp.moveaxis(grouped(operands["q_intervals"], kv_heads), -1, 0)[..., None, :]
        conditions.append((start <= rows[:, None]) & (rows[:, None] < end))
    if "mask" in operands:
        conditions.append(grouped(operands["mask"], kv_heads))
    if "bias" in operands:  # what -inf hides may be so large that its score is infinite
        conditions.append(~jnp.isneginf(grouped(operands["bias"], kv_heads)))
    if pairs is not None and options.functions is not None:
        functions = options.functions
        conditions += [plain.mask_of(mask, _captured(mask, operands), pairs) for mask in functions.masks]
        if "mask_blocks" in operands:
            kinds = operands["mask_blocks"][:, 0]
            height, width = functions.block_size
            kinds = jnp.take(kinds, rows // height, axis=2, mode="clip")
            kinds = grouped(jnp.take(kinds, columns // width, axis=3, mode="clip"), kv_heads)
            kept = kinds != EMPTY
            if (mask := functions.partial_mask) is not None:
                kept = (kinds == FULL) | (kept & plain.mask_of(mask, _captured(mask, operands), pairs))
            conditions.append(kept)
    if not conditions:
        return None
    keep = conditions[0]
    for condition in conditions[1:]:
        keep = keep & condition
    return keep


_KEPT_CHUNK = 256
"""Rows and keys of the blocks of pairs in which `kept` looks."""


def kept(
    options: Options, operands: Operands, side: str, q_length: int, kv_length: int, kv_heads: int,
    shape: tuple[int, int] = (1, 1),
) -> jax.Array | None:  # fmt: skip
    """Which rows of the "q" or "kv" side are in a pair that is kept, [B or 1, length, heads or 1]; None for all.

    Packed sequences count as one sequence, without the rows that are in none. In O(T + S) memory: XLA fuses the
    conditions on pairs into the reduction, or with functions and intervals pairs are looked at by blocks. Lengths, the
    band and a mask that all rows share take O(T + S) operations too.

    ``shape``: batch entries and query heads, for functions.
    """
    if f"cu_{side}_lengths" in operands:
        within = rows_within(operands, side, q_length if side == "q" else kv_length)
        return None if within is None else within[:, :, None]
    rows, columns = jnp.arange(q_length, dtype=jnp.int32), jnp.arange(kv_length, dtype=jnp.int32)
    functions = options.functions
    decided = functions is not None and (functions.masks or "mask_blocks" in operands)
    if decided or "kv_intervals" in operands or "q_intervals" in operands:
        sizes = [x.shape[:2] for name, x in operands.items() if name in ("kv_intervals", "q_intervals", "mask", "bias")]
        batch, heads = shape
        if isinstance(batch, int):
            # Where no function asks which head one is, of as many as have masks of their own.
            batch, heads = np.max([shape if decided else (batch, 1), *sizes], axis=0)
        return _kept_by_blocks(
            options,
            operands,
            side,
            (q_length, kv_length),
            (batch, min(kv_heads, heads), max(heads // kv_heads, 1)),
        )
    if not any(name in operands for name in ("q_segment_ids", "kv_intervals", "q_intervals", "mask", "bias")):
        found = _in_band(options, operands, side, rows, columns)
        return None if found is None else found[:, :, None]
    if hides_keys(operands, q_length) and "q_segment_ids" not in operands and "bias" not in operands:
        return _kept_by_keys(options, operands, side, rows, columns, kv_heads)
    pairs = _keep(options, operands, rows, columns, kv_heads)
    assert pairs is not None
    if side == "q":
        of_rows = pairs.any(axis=-1)
        return jnp.moveaxis(of_rows.reshape(of_rows.shape[0], -1, of_rows.shape[-1]), 1, 2)
    return jnp.moveaxis(pairs.any(axis=(2, 3)), 1, 2)


def _kept_by_blocks(
    options: Options, operands: Operands, side: str, lengths: tuple[int, int], heads: tuple[int, int, int]
) -> jax.Array:
    """As `kept`, [B, length, heads]; ``heads`` are batch entries, key heads and query heads of each."""
    sizes = [min(_KEPT_CHUNK, length) for length in lengths]
    # The last block begins earlier than a multiple of their size, and meets the one before.
    counts = [-(-length // size) for length, size in zip(lengths, sizes, strict=True)]
    own, other = (0, 1) if side == "q" else (1, 0)

    def begin(axis: int, i: jax.Array) -> jax.Array:
        return jnp.minimum(i * sizes[axis], lengths[axis] - sizes[axis])

    def of_block(i: jax.Array) -> jax.Array:
        def add(j: jax.Array, found: jax.Array) -> jax.Array:
            starts = [begin(axis, i if axis == own else j) for axis in range(2)]
            rows, columns = (s + jnp.arange(size, dtype=jnp.int32) for s, size in zip(starts, sizes, strict=True))
            block = dict(operands)
            for name, x in operands.items():
                for axis, letter in enumerate("ts"):
                    at = OPERANDS[name].dims.find(letter)
                    if at >= 0 and x.shape[at] > 1:
                        block[name] = jax.lax.dynamic_slice_in_dim(block[name], starts[axis], sizes[axis], at)

            def look() -> jax.Array:
                pairs = _keep(options, block, rows, columns, heads[1], _pairs(options, block, heads, rows, columns))
                assert pairs is not None
                pairs = jnp.broadcast_to(pairs, (*heads, sizes[0], sizes[1]))
                return found | (pairs.any(axis=4) if side == "q" else pairs.any(axis=(2, 3)))

            may = may_keep(options, block, rows, columns)
            return look() if may is None else jax.lax.cond(may, look, lambda: found)

        of_heads = heads if side == "q" else heads[:2]
        return jax.lax.fori_loop(0, counts[other], add, jnp.zeros((*of_heads, sizes[own]), bool))

    blocks = jax.lax.map(of_block, jnp.arange(counts[own], dtype=jnp.int32))
    blocks = blocks.reshape(counts[own], heads[0], -1, sizes[own])
    rest = lengths[own] - (counts[own] - 1) * sizes[own]
    found = jnp.moveaxis(blocks[:-1], 0, 2).reshape(heads[0], blocks.shape[2], -1)
    return jnp.swapaxes(jnp.concatenate([found, blocks[-1, ..., sizes[own] - rest :]], axis=-1), 1, 2)


def _kept_by_keys(
    options: Options, operands: Operands, side: str, rows: jax.Array, columns: jax.Array, kv_heads: int
) -> jax.Array:
    """As `kept`, for calls whose band beside a mask that all rows share hides pairs: in O(T + S) operations."""
    of_mask = operands["mask"][:, :, 0]  # [B or 1, N or 1, S]
    if side == "kv":
        heads = of_mask.shape[1]
        found = of_mask.reshape(-1, min(heads, kv_heads), max(heads // kv_heads, 1), columns.size).any(axis=2)
        in_band = _in_band(options, operands, side, rows, columns)
        return jnp.moveaxis(found if in_band is None else found & in_band[:, None], 1, 2)
    first, end, within = (x[:, None] for x in _keys_of_rows(options, operands, rows, columns))
    so_far = jnp.pad(of_mask.cumsum(axis=2, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    shape = jnp.broadcast_shapes(so_far.shape[:2], end.shape[:2])
    before, up_to = (
        jnp.take_along_axis(
            jnp.broadcast_to(so_far, (*shape, so_far.shape[2])), jnp.broadcast_to(x, (*shape, rows.size)), axis=2
        )
        for x in (first, end)
    )
    return jnp.moveaxis(within & (before < up_to), 1, 2)


def _in_band(options: Options, operands: Operands, side: str, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
    """As `kept`, [B or 1, length], for calls that only lengths, causal and a window mask."""
    q_length, kv_length = rows.size, columns.size
    if not {"q_offset", "window_bounds", "q_lengths", "kv_lengths"} & operands.keys():
        # Known when the call is traced: mostly all are kept, and the caller needs no mask.
        left, right = options.window_left, 0 if options.causal else options.window_right
        before, behind, own, others = (
            (left, right, q_length, kv_length) if side == "q" else (right, left, kv_length, q_length)
        )
        found = np.maximum(np.arange(own) - before, 0) <= np.minimum(np.arange(own) + behind, others - 1)
        return None if found.all() else jnp.asarray(found)[None]
    if side == "q":
        first, end, within = _keys_of_rows(options, operands, rows, columns)
        return within & (first < end)
    lower, upper, of_q, of_kv = _edges(options, operands, rows, columns)
    return (columns < of_kv) & (jnp.maximum(columns - upper, 0) <= jnp.minimum(columns - lower, of_q - 1))


def _keys_of_rows(
    options: Options, operands: Operands, rows: jax.Array, columns: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first key that lengths and the band keep of each row and the one behind the last, in [0, S], and which rows
    are no padding: [B or 1, T] each."""
    lower, upper, of_q, of_kv = _edges(options, operands, rows, columns)
    first = jnp.maximum(rows + lower, 0)
    end = jnp.maximum(jnp.minimum(rows + upper, of_kv - 1) + 1, 0)
    return jnp.minimum(first, columns.size), end, rows < of_q


def _edges(options: Options, operands: Operands, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
    """The edges of `band`, clipped, and the lengths of both sides: int32 [B or 1, 1] each."""
    lower, upper = band(options, operands)
    q_length, kv_length = rows.size, columns.size
    # No difference of positions exceeds these, and sums with them do not wrap around.
    least, most = -q_length, kv_length
    lower = jnp.full(1, least) if lower is None else jnp.clip(lower, least, most)
    upper = jnp.full(1, most) if upper is None else jnp.clip(upper, least, most)
    of_q = operands["q_lengths"] if "q_lengths" in operands else jnp.full(1, q_length)
    of_kv = operands["kv_lengths"] if "kv_lengths" in operands else jnp.full(1, kv_length)
    return tuple(x.astype(jnp.int32)[:, None] for x in (lower, upper, of_q, of_kv))


def may_keep(options: Options, operands: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
    """False only if no pair of the block is kept, judged by its edges; None if every block may have such pairs."""
    conditions = []
    lower, upper = band(options, operands)
    if upper is not None:
        conditions.append(columns[0] - rows[-1] <= upper)
    if lower is not None:
        conditions.append(columns[-1] - rows[0] >= lower)
    if "q_segment_ids" in operands:
        of_rows, of_columns = operands["q_segment_ids"], operands["kv_segment_ids"]
        conditions.append(
            (of_rows.min(axis=1) <= of_columns.max(axis=1)) & (of_columns.min(axis=1) <= of_rows.max(axis=1))
        )
    if "q_lengths" in operands:
        conditions.append(rows[0] < operands["q_lengths"])
    if "kv_lengths" in operands:
        conditions.append(columns[0] < operands["kv_lengths"])
    for name, others in (("kv_intervals", columns), ("q_intervals", rows)):
        if name in operands:
            start, end = jnp.moveaxis(operands[name], -1, 0)
            meets = jnp.maximum(start, others[0]) < jnp.minimum(end, others[-1] + 1)
            conditions.append(meets.any(axis=(1, 2)))
    if "mask_blocks" in operands:
        assert options.functions is not None
        kinds = operands["mask_blocks"]
        for axis, (indices, size) in enumerate(zip((rows, columns), options.functions.block_size, strict=True), 3):
            # So many blocks the indices may meet, wherever they begin; fewer if they begin with one.
            met = min((indices.size + size - 2) // size + 1, kinds.shape[axis])
            first = jnp.minimum(indices[0] // size, kinds.shape[axis] - met)
            kinds = jax.lax.dynamic_slice_in_dim(kinds, first, met, axis)
            blocks = first + jnp.arange(met, dtype=jnp.int32)
            meets = (indices[0] // size <= blocks) & (blocks <= indices[-1] // size)
            kinds = jnp.where(jnp.expand_dims(meets, tuple(range(1, kinds.ndim - axis))), kinds, EMPTY)
        conditions.append((kinds != EMPTY).any()[None])
    if not conditions:
        return None
    may = conditions[0]
    for condition in conditions[1:]:
        may = may & condition
    return may.any()


def band(options: Options, operands: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """The smallest and largest kept column - row, each int32 [B] or [1]; None without a limit."""
    offset = operands["q_offset"][:, 0] if "q_offset" in operands else jnp.zeros(1, jnp.int32)
    if "window_bounds" in operands:
        return _traced_band(options, operands["window_bounds"], offset)
    left, right = options.window_left, 0 if options.causal else options.window_right
    # offset - left and offset + right saturate instead of wrapping around, which row + offset could not.
    lower = upper = None
    if left != UNLIMITED:
        lower = jnp.where(offset < _INT32.min + left, _INT32.min, offset - left)
    if right != UNLIMITED:
        upper = jnp.where(offset > _INT32.max - right, _INT32.max, offset + right)
    return lower, upper


def _traced_band(options: Options, bounds: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`band` of window_bounds [B, 2], whose sides may be negative, so that they could wrap around at either end."""
    left, right = bounds[:, 0], bounds[:, 1]
    if options.causal:
        right = jnp.minimum(right, 0)
    lower = jnp.where((left > 0) & (offset < _INT32.min + left), _INT32.min, offset - left)
    lower = jnp.where((left < 0) & (offset > _INT32.max + left), _INT32.max, lower)
    upper = jnp.where((right > 0) & (offset > _INT32.max - right), _INT32.max, offset + right)
    upper = jnp.where((right < 0) & (offset < _INT32.min - right), _INT32.min, upper)
    return jnp.where(left == UNLIMITED, _INT32.min, lower), jnp.where(right == UNLIMITED, _INT32.max, upper)
