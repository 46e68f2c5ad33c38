"""float32 arrays as float16 ones, by kernels of their own: csrc/cuda/device/scale.cuh says how and why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import Operands, Options
from jax_flash._implementations import dropout, scores
from jax_flash._native import registration

_SIZES = 6  # floats of a RowSizes, csrc/scaling.h

_CHUNK_BYTES, _BLOCKS, _MOST_CHUNKS = 1 << 14, 2048, 128
"""The rows of a key head are divided into chunks, a block each, of so many bytes at least, and of more where there
would be more blocks than that. On an H200 about 500 run at a time."""

_SINGLE_BYTES = 1 << 15
"""Up to so many bytes of a key head in each array they are not divided: one kernel does for two."""


def scaled(
    options: Options, operands: Operands, query: jax.Array, key: jax.Array, value: jax.Array, *gradients: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """query, key, value in float16, with ``gradients`` = (dout, delta) also dout, and ``descale`` [B, K, 8].

    With ``highest_precision`` arrays have twice the columns: of the high limb and of the low one. Rows that no pair
    keeps are zeros: they do not count among the largest, by whose scale they might overflow, and 0 * inf is NaN.

    Forward and backward have the call for query, key and value in common, so that XLA computes it once in a jit that
    has both. Where keys are listed, those of key and value stand in the order of the list.
    """
    batch, q_length, q_heads, _ = query.shape
    _, kv_length, kv_heads, _ = key.shape
    kept = {}
    for side, length, heads in (("q", q_length, q_heads), ("kv", kv_length, kv_heads)):
        rows = scores.kept(options, operands, side, q_length, kv_length, kv_heads, (batch, q_heads))
        if rows is not None:
            kept[side] = jnp.broadcast_to(rows, (batch, length, heads))

    def call(arrays: list[jax.Array], *more: jax.Array, factor: float = 1.0) -> list[jax.Array]:
        masks = {side: x for side, x in kept.items() if side == "q" or not more}
        results = [
            *(jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] * limbs), jnp.float16) for x in arrays),
            jax.ShapeDtypeStruct((batch, kv_heads, 8), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, len(arrays), _chunks(arrays, kv_heads), _SIZES), jnp.float32),
        ]
        lists = [operands["kv_rows"]] if "kv_rows" in operands and not more else []
        attributes = {f"has_{side}_kept": side in masks for side in ("q", "kv")}
        called = jax.ffi.ffi_call(registration.SCALE_TARGET, results)(
            *arrays,
            *more,
            *masks.values(),
            *lists,
            gradients=bool(more),
            highest_precision=options.highest_precision,
            has_kv_rows=bool(lists),
            dropout_factor=np.float32(factor),
            **attributes,
        )
        return list(called[:-1])

    limbs = 2 if options.highest_precision else 1
    *inputs, records = call([query, key, value])
    if not gradients:
        return inputs, records
    dout, delta = gradients
    factor = dropout.factor(options.dropout_rate) if options.dropout_rate else 1.0
    *of_dout, records = call([dout], delta, records, factor=factor)
    return [*inputs, *of_dout], records


def _chunks(arrays: list[jax.Array], kv_heads: int) -> int:
    """Into how many chunks the rows of a key head are divided."""
    of_head = [x.shape[1] * (x.shape[2] // kv_heads) * x.shape[3] * x.dtype.itemsize for x in arrays]
    if max(of_head) <= _SINGLE_BYTES:
        return 1
    batch = arrays[0].shape[0]
    heads = (batch if isinstance(batch, int) else 1) * kv_heads * len(arrays)
    return max(2, min(-(-max(of_head) // _CHUNK_BYTES), _BLOCKS // heads, _MOST_CHUNKS))
