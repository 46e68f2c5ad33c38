"""score_mod, mask_mod and block_mask of attention(), checked and traced."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_flash._functions import trace
from jax_flash.flex import BlockMask


class Arguments(NamedTuple):
    """The arguments, unchecked."""

    score_mod: Any = None
    mask_mod: Any = None
    block_mask: Any = None


def functions_of(
    arguments: Arguments, dtype: Any, shape: tuple[int, int, int, int], q_offset: object, *, packed: bool = False
) -> tuple[trace.Functions | None, dict[str, jax.Array]]:
    """The functions of a call, None if it has none, and the operands that they need.

    ``dtype`` is that of scores, ``shape`` is (batch entries or sequences, query heads, T, S).

    Raises:
      TypeError, ValueError: an argument has the wrong type, or does not fit the call.
    """
    if arguments == Arguments():
        return None, {}
    captured = trace.Captured()
    score, masks, partial_mask = None, [], None
    operands: dict[str, jax.Array] = {}
    block_size = (1, 1)
    if arguments.score_mod is not None:
        score = trace.trace("score_mod", arguments.score_mod, "score", dtype, captured)
    if arguments.mask_mod is not None:
        masks.append(trace.trace("mask_mod", arguments.mask_mod, "mask", dtype, captured))
    if arguments.block_mask is not None:
        block_mask = _checked(arguments.block_mask, shape, packed=packed)
        if block_mask.mask_mod is not None:
            partial_mask = trace.trace("block_mask", block_mask.mask_mod, "mask", dtype, captured)
        if _stands_at(block_mask.q_offset, q_offset):
            kinds = block_mask.kinds
            operands["mask_blocks"] = kinds[None] if packed else kinds[:, None]
            block_size = block_mask.block_size
            if partial_mask in masks:  # it decides in full blocks, too
                partial_mask = None
        else:
            # Whose blocks these are is not known before the call runs: so all pairs are decided by the function.
            if partial_mask is None:
                raise ValueError(
                    "block_mask without a mask_mod must have q_offset=None where attention's q_offset is traced"
                )
            if partial_mask not in masks:
                masks.append(partial_mask)
            partial_mask = None
    functions = trace.Functions(score, tuple(masks), partial_mask, block_size)
    return functions, operands | captured.operands()


def _checked(block_mask: Any, shape: tuple[int, int, int, int], *, packed: bool) -> BlockMask:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a jax_flash.flex.BlockMask, got {type(block_mask).__name__}")
    batch, heads, *lengths = shape
    names = ("max_q_length", "max_kv_length") if packed else ("T", "S")
    if block_mask.lengths != tuple(lengths):
        raise ValueError(
            f"block_mask must be for lengths ({names[0]}, {names[1]}) = {tuple(lengths)}, got {block_mask.lengths}"
        )
    for size, wanted, what in (
        (block_mask.kinds.shape[0], batch, "sequences" if packed else "batch entries"),
        (block_mask.kinds.shape[1], heads, "query heads"),
    ):
        if size not in (1, wanted):
            raise ValueError(f"block_mask must be for 1 or {wanted} {what}, got {size}")
    return block_mask


def _stands_at(made_for: Any, q_offset: object) -> bool:
    """Whether a block mask that was made for one offset holds at another; False where that can't be known.

    Raises:
      ValueError: it was made for another offset.
    """
    if made_for is None or made_for is q_offset:
        return True
    if isinstance(made_for, jax.core.Tracer) or isinstance(q_offset, jax.core.Tracer):
        return False
    offsets = np.unique(np.asarray(q_offset))
    if offsets.size != 1 or int(offsets[0]) != int(made_for):
        raise ValueError(f"q_offset must be the one that block_mask was made for, {int(made_for)}, got {q_offset}")
    return True
