"""The schedule "all_gather": every device gathers K and V, in true order, and computes its own rows.

Llama 3 trains its long contexts this way (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import OPERANDS
from jax_flash._context import orders
from jax_flash._context.call import (
    Arrays,
    Call,
    axis_of,
    by_intervals,
    joined,
    of_keys_alone,
    of_run,
    sliced_rows,
    widened,
)
from jax_flash._native import private
from jax_flash.checkpoint_policies import GATHERED


def attention(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    operands = {name: _of_all_keys(call, name, x) for name, x in operands.items()}
    parts = 2 if call.rows.order == "zigzag" and call.devices > 1 and not _placed(call) else 1
    gather = functools.partial(_gathered_keys, call, axis=1)
    keys, values = widened(gather, key, parts), widened(gather, value, parts)
    if private.MISSING is None:
        keys, values = (tuple(private.checkpoint_name(x, GATHERED) for x in copies) for copies in (keys, values))
    if _placed(call):
        return _at_their_places(call, query, keys[0], values[0], operands)
    if call.rows.order == "striped" and call.devices > 1:
        whole = dataclasses.replace(call.keys, devices=1, length=call.keys.total, index=jnp.int32(0))
        options, operands = by_intervals(call, operands, whole, query)
        return call.attend(options, None, query, keys[0], values[0], operands)

    rows = call.rows.length // parts
    firsts = (call.rows.first, call.rows.first + np.int32(rows) + call.rows.jump)[:parts]
    results = []
    for i, (first, k, v) in enumerate(zip(firsts, keys, values, strict=True)):
        chunk = jax.lax.slice_in_dim(query, i * rows, (i + 1) * rows, axis=1)
        options, of_chunk = of_run(call, sliced_rows(operands, i * rows, rows), first, chunk, k.shape[1])
        results.append(call.attend(options, call.limits, chunk, k, v, of_chunk))
    return joined(results)


def _gathered_keys(call: Call, x: jax.Array, axis: int) -> jax.Array:
    """The keys of all devices, in true order; ``axis`` has the device's own."""
    gathered = jax.lax.all_gather(x, call.axis, axis=axis, tiled=True)
    return orders.restored(gathered, call.keys.order, call.devices, axis)


def _of_all_keys(call: Call, name: str, x: jax.Array) -> jax.Array:
    axis = axis_of(name, x, "s") if of_keys_alone(name) else None
    return x if axis is None else _gathered_keys(call, x, axis)


def _placed(call: Call) -> bool:
    """Whether the rows have to stand where they stand in the whole sequence.

    The bits of dropout count from the array's first row, which no operand shifts; and a mask function that decides the
    blocks of packed sequences would have to.
    """
    packed_blocks = call.limits is not None and call.options.functions is not None
    return call.devices > 1 and (call.options.dropout_rate > 0 or packed_blocks)


def _at_their_places(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    """As many rows as the whole sequence has, of which those of other devices keep no key: blocks of them are skipped.

    Memory for query and out is that of the whole sequence, as it is for the keys.
    """
    rows = call.rows

    def place(x: jax.Array, axis: int) -> jax.Array:
        shape = list(x.shape)
        shape[axis] = rows.total
        empty = jnp.zeros(shape, x.dtype)
        return jnp.moveaxis(jnp.moveaxis(empty, axis, 0).at[rows.positions].set(jnp.moveaxis(x, axis, 0)), 0, axis)

    found = {}
    for name, x in operands.items():
        if name == "kv_intervals" and axis_of(name, x, "t") is None:
            x = jnp.broadcast_to(x, (*x.shape[:2], rows.length, 2))
        axis = axis_of(name, x, "t")
        found[name] = x if axis is None else place(x, axis)
    if "kv_intervals" not in found:
        every = jnp.broadcast_to(jnp.array([0, call.keys.total], jnp.int32), (1, 1, rows.length, 2))
        found["kv_intervals"] = place(every, OPERANDS["kv_intervals"].dims.index("t"))
    out, lse = call.attend(call.options, call.limits, place(query, 1), key, value, found)
    return rows.of(out, 1), rows.of(lse, 2)
