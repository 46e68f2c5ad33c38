"""Masks and scores by functions of the user's: what `jax_flash.attention` takes as ``score_mod``, ``mask_mod`` and
``block_mask``.

The functions are of scalars, as PyTorch's FlexAttention has them (Dong et al. 2024, https://arxiv.org/abs/2412.05496):
``score_mod(score, b, h, q, kv)`` returns a score and ``mask_mod(b, h, q, kv)`` whether the pair is kept. b is the batch
entry, h the query head, q and kv are positions, int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import checks
from jax_flash._functions import plain, trace
from jax_flash._implementations.scores import EMPTY, FULL, PARTIAL
from jax_flash._native import private

MaskMod = Callable[..., Any]
ArrayLike = jax.typing.ArrayLike

__all__ = ["BlockMask", "and_masks", "create_block_mask", "or_masks"]


def and_masks(*masks: MaskMod) -> MaskMod:
    """The mask function that keeps a pair if all of ``masks`` do."""

    def all_of(b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept = jnp.asarray(True)
        for mask in masks:
            kept = kept & mask(b, h, q, kv)
        return kept

    return all_of


def or_masks(*masks: MaskMod) -> MaskMod:
    """The mask function that keeps a pair if any of ``masks`` does."""

    def any_of(b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept = jnp.asarray(False)
        for mask in masks:
            kept = kept | mask(b, h, q, kv)
        return kept

    return any_of


@jax.tree_util.register_pytree_node_class
class BlockMask:
    """Which blocks of pairs are empty, which are full, and the mask function that decides in the others.

    A pytree: its leaves are the kinds of blocks and the arrays that the mask function captured, so that it can be an
    argument of jit, be carried by scan and be sharded. Made by `create_block_mask` or `from_lists`.

    Attributes:
      kinds: int8 ``[B or 1, N or 1, rows of blocks, columns of blocks]``: 0 empty, 1 partial, 2 full.
      block_size: (rows of query, keys) of a block.
      lengths: (T, S) of the queries and keys that it is for.
      q_offset: the position of query row 0 that it was made for: an int, or where that is traced a scalar array; None
        if it holds for any.
      mask_mod: the mask function, or None.
    """

    def __init__(
        self,
        kinds: jax.Array,
        block_size: tuple[int, int],
        lengths: tuple[int, int],
        q_offset: int | jax.Array | None,
        function: trace.Function | None,
        captured: Sequence[jax.Array] = (),
    ) -> None:
        self.kinds, self.block_size, self.lengths, self.q_offset = kinds, block_size, lengths, q_offset
        self._function, self._captured = function, tuple(captured)

    @property
    def mask_mod(self) -> MaskMod | None:
        if self._function is None:
            return None
        call = private.jaxpr_as_fun(private.ClosedJaxpr(self._function.jaxpr, ()))
        return lambda *indices: call(*self._captured, *(jnp.asarray(x, jnp.int32) for x in indices))[0]

    @classmethod
    def from_lists(
        cls,
        kv_num_blocks: ArrayLike,
        kv_indices: ArrayLike,
        full_kv_num_blocks: ArrayLike | None = None,
        full_kv_indices: ArrayLike | None = None,
        *,
        lengths: tuple[int, int],
        block_size: int | tuple[int, int] = 128,
        q_offset: int | None = None,
        mask_mod: MaskMod | None = None,
    ) -> BlockMask:
        """A block mask of ready lists: for each row of blocks the columns of those that are partial, and of full ones.

        Without a ``mask_mod`` all pairs of partial blocks are kept, too.

        Args:
          kv_num_blocks: integers ``[B or 1, N or 1, rows of blocks]``: how many partial blocks a row has.
          kv_indices: integers ``[B or 1, N or 1, rows of blocks, any]``: their columns, ascending; what follows the
            last one of a row is not read.
          full_kv_num_blocks: the same for full blocks; or None, with ``full_kv_indices``.
          full_kv_indices: see ``full_kv_num_blocks``.
          lengths: (T, S).
          block_size: rows of query and keys of a block, an int for both or a pair.
          q_offset: the position of query row 0 that ``mask_mod`` is meant for; None: any.
          mask_mod: decides in partial blocks.

        Raises:
          TypeError, ValueError: an argument is not of this form. Lists that are traced can't be checked: a column that
            is out of range is ignored, and one that is both full and partial is full.
        """
        size = _block_size(block_size)
        rows, columns = (-(-length // n) for length, n in zip(lengths, size, strict=True))
        kinds: jax.Array | None = None
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise ValueError("full_kv_indices must be given with full_kv_num_blocks, got one of them alone")
        lists: list[tuple[str, ArrayLike, object, int]] = [("kv", kv_num_blocks, kv_indices, PARTIAL)]
        if full_kv_num_blocks is not None:
            lists.append(("full_kv", full_kv_num_blocks, full_kv_indices, FULL))
        for name, counts, indices, kind in lists:
            found = _listed(name, counts, indices, rows, columns, kind)
            kinds = found if kinds is None else jnp.maximum(kinds, found)
        assert kinds is not None
        captured = trace.Captured()
        function = None
        if mask_mod is not None:
            function = trace.trace("mask_mod", mask_mod, "mask", jnp.float32, captured)
        return cls(kinds, size, lengths, q_offset, function, captured.arrays)

    def rows(self, first_row: int | jax.Array, count: int) -> BlockMask:
        """The block mask of ``count`` query rows from ``first_row`` on, which may be traced: for decoding.

        Its ``q_offset`` is that of the first of these rows: hand the same object to attention() as its ``q_offset``.
        A traced ``first_row`` must lie in [0, T).
        """
        height, width = self.block_size
        blocks = -(-count // height)
        starts = first_row + jnp.arange(blocks, dtype=jnp.int32) * height
        ends = jnp.minimum(starts + height, first_row + count) - 1
        here, there = (jnp.take(self.kinds, x // height, axis=2, mode="clip") for x in (starts, ends))
        kinds = jnp.where(here == there, here, PARTIAL).astype(jnp.int8)
        offset = None if self.q_offset is None else self.q_offset + first_row
        return BlockMask(kinds, (height, width), (count, self.lengths[1]), offset, self._function, self._captured)

    def sparsity(self) -> float:
        """The share of blocks that are empty. Raises jax.errors.ConcretizationTypeError under a trace."""
        return float((np.asarray(self.kinds) == EMPTY).mean())

    def __repr__(self) -> str:
        shape = (*self.kinds.shape[:2], *self.lengths)
        known = isinstance(self.kinds, (jax.Array, np.ndarray)) and not isinstance(self.kinds, jax.core.Tracer)
        kinds = np.asarray(self.kinds) if known else None
        if kinds is None:
            what = "traced"
        else:
            counts = [(kinds == kind).mean() for kind in (EMPTY, PARTIAL, FULL)]
            what = "{:.1%} empty, {:.1%} partial, {:.1%} full".format(*counts)
        return f"BlockMask(shape={shape}, block_size={self.block_size}, q_offset={self.q_offset}, {what})"

    def plot(self, batch: int = 0, head: int = 0) -> Any:
        """Draws the blocks of a batch entry and a head; returns matplotlib's axes. Needs matplotlib."""
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure

        axes = Figure(figsize=(5, 5), layout="constrained").subplots()
        kinds = np.asarray(self.kinds)[batch % self.kinds.shape[0], head % self.kinds.shape[1]]
        extent = (0, kinds.shape[1] * self.block_size[1], kinds.shape[0] * self.block_size[0], 0)
        colors = ListedColormap(["#f2f2f2", "#9ecae1", "#2171b5"])
        axes.imshow(kinds, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
        axes.set(xlabel="key", ylabel="row of query", title="full (dark), partial (light) and empty blocks")
        return axes

    def tree_flatten(self) -> tuple[Any, Any]:
        traced = self.q_offset if isinstance(self.q_offset, jax.Array) else None
        static = None if traced is not None else self.q_offset
        return (self.kinds, traced, self._captured), (self.block_size, self.lengths, static, self._function)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> BlockMask:
        kinds, traced, captured = leaves
        block_size, lengths, q_offset, function = static
        return cls(kinds, block_size, lengths, q_offset if traced is None else traced, function, captured)


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    N: int | None,
    T: int,
    S: int,
    *,
    q_offset: int | jax.Array = 0,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Evaluates a mask function at every pair, and keeps which blocks are empty, partial and full.

    It takes the time of B * N * T * S evaluations, in O(T + S) memory and that of the blocks, and may run under jit:
    make it once, outside of the layers that use it.

    Args:
      mask_mod: the function (b, h, q, kv) -> bool of int32 scalars.
      B: batch entries; None if the mask is the same for all.
      N: query heads; None if it is the same for all.
      T: rows of query.
      S: keys.
      q_offset: the position of query row 0, as in attention(): one int32, which may be traced.
      block_size: rows of query and keys of a block, an int for both or a pair.

    Raises:
      TypeError, ValueError: an argument has the wrong type or value, or mask_mod does not return a boolean scalar.
    """
    height, width = _block_size(block_size)
    for name, size in (("B", 1 if B is None else B), ("N", 1 if N is None else N), ("T", T), ("S", S)):
        checks.length(name, size)
    captured = trace.Captured()
    function = trace.trace("mask_mod", mask_mod, "mask", jnp.float32, captured)
    offset = checks.int32("q_offset", q_offset)
    if offset.shape != ():
        raise ValueError(f"q_offset must be one integer for a block mask, got shape {offset.shape}")
    rows, columns = -(-T // height), -(-S // width)
    heads = jnp.arange(N or 1, dtype=jnp.int32)

    def of_row(entry: jax.Array, row: jax.Array) -> jax.Array:
        """The kinds [N, columns] of a row of blocks."""
        t, s = row * height + jnp.arange(height, dtype=jnp.int32), jnp.arange(columns * width, dtype=jnp.int32)
        pairs = plain.Pairs(entry[None], heads[:, None], (t + offset)[None], s, None)
        kept = plain.mask_of(function, captured.arrays, pairs)[0, :, 0].reshape(-1, height, columns, width)
        valid = (t[:, None] < T) & (s < S)
        valid = valid.reshape(height, columns, width)
        some, every = (kept & valid).any(axis=(1, 3)), (kept | ~valid).all(axis=(1, 3))
        return jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY)).astype(jnp.int8)

    def of_entry(entry: jax.Array) -> jax.Array:
        return jax.lax.map(lambda row: of_row(entry, row), jnp.arange(rows, dtype=jnp.int32))

    kinds = jnp.moveaxis(jax.lax.map(of_entry, jnp.arange(B or 1, dtype=jnp.int32)), 2, 1)
    made_for = q_offset if isinstance(q_offset, jax.core.Tracer) else int(offset)
    return BlockMask(kinds, (height, width), (T, S), made_for, function, captured.arrays)


def _block_size(size: object) -> tuple[int, int]:
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ValueError(f"block_size must be a positive int or a pair of them, got {size!r}")
    return pair


def _listed(name: str, counts: ArrayLike, indices: object, rows: int, columns: int, kind: int) -> jax.Array:
    """The kinds [b, n, rows, columns] of blocks that are listed."""
    of_counts, of_indices = f"{name}_num_blocks", f"{name}_indices"
    number, listed = checks.int32(of_counts, counts), checks.int32(of_indices, indices)
    if number.ndim != 3 or number.shape[2] != rows:
        raise ValueError(f"{of_counts} must have shape [B or 1, N or 1, {rows}], got {number.shape}")
    if listed.ndim != 4 or listed.shape[:3] != number.shape:
        raise ValueError(f"{of_indices} must have shape {[*number.shape, 'any']}, got {listed.shape}")
    if not isinstance(number, jax.core.Tracer) and not isinstance(listed, jax.core.Tracer):
        _check_lists(of_counts, of_indices, np.asarray(number), np.asarray(listed), columns)
    there = jnp.arange(listed.shape[3], dtype=jnp.int32) < number[..., None]
    shape = (*number.shape, columns)
    flat = jnp.where(there & (listed >= 0), listed, columns).reshape(-1, listed.shape[3])
    row = jnp.arange(math.prod(number.shape), dtype=jnp.int32)[:, None]
    kinds = jnp.zeros((math.prod(number.shape), columns), jnp.int8).at[row, flat].max(kind, mode="drop")
    return kinds.reshape(shape)


def _check_lists(of_counts: str, of_indices: str, number: Any, listed: Any, columns: int) -> None:
    most = min(columns, listed.shape[3])
    if ((number < 0) | (number > most)).any():
        raise ValueError(f"{of_counts} must lie in [0, {most}], got {number.min()} to {number.max()}")
    there = np.arange(listed.shape[3]) < number[..., None]
    if (there & ((listed < 0) | (listed >= columns))).any():
        values = listed[there]
        raise ValueError(f"{of_indices} must lie in [0, {columns}), got {values.min()} to {values.max()}")
    if (there[..., 1:] & (np.diff(listed, axis=-1) <= 0)).any():
        raise ValueError(f"{of_indices} must ascend in every row without duplicates")
