"""The schedule "ulysses": all-to-all exchanges give every device all rows of its share of the heads, and back.

DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import OPERANDS
from jax_flash._context import orders
from jax_flash._context.call import Arrays, Call, axis_of, widened


def attention(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    devices, q_heads = call.devices, query.shape[2]
    to_heads = functools.partial(_to_heads, call, rows=1, heads=2)
    repeats = math.lcm(key.shape[2], devices) // key.shape[2]
    if repeats > 1:
        key, value = (widened(lambda x: jnp.repeat(x, repeats, axis=2), x)[0] for x in (key, value))
    found = {name: _of_heads(call, name, x, q_heads) for name, x in operands.items()}
    if call.options.functions is not None:
        first = jnp.stack([jnp.zeros_like(call.index), call.index * np.int32(q_heads // devices)])
        found["index_offsets"] = first + operands.get("index_offsets", jnp.zeros_like(first))
    out, lse = call.attend(call.options, call.limits, to_heads(query), to_heads(key), to_heads(value), found)
    return _to_rows(call, out, 1, 2), _to_rows(call, lse, 2, 1)


def bytes_sent(devices: int, q_heads: int, kv_heads: int, head_dims: int) -> float:
    """Elements that a device sends for each of its rows, forward; ``head_dims`` of query and value together."""
    repeated = math.lcm(kv_heads, devices)
    return (q_heads + repeated) * head_dims * (devices - 1) / devices


def _to_heads(call: Call, x: jax.Array, rows: int, heads: int) -> jax.Array:
    """All rows in true order, of this device's heads; ``rows`` and ``heads`` are axes."""
    exchanged = jax.lax.all_to_all(x, call.axis, heads, rows, tiled=True)
    return orders.restored(exchanged, call.rows.order, call.devices, rows)


def _to_rows(call: Call, x: jax.Array, rows: int, heads: int) -> jax.Array:
    """The inverse of `_to_heads`."""
    exchanged = orders.reordered(x, call.rows.order, call.devices, rows)
    return jax.lax.all_to_all(exchanged, call.axis, rows, heads, tiled=True)


def _of_heads(call: Call, name: str, x: jax.Array, q_heads: int) -> jax.Array:
    """An operand of this device's heads, and all rows or keys in true order."""
    heads = axis_of(name, x, "n")
    rows = axis_of(name, x, "t" if "t" in OPERANDS[name].dims else "s")
    if rows is not None and heads is not None:
        return _to_heads(call, x, rows, heads)
    if rows is not None:
        gathered = jax.lax.all_gather(x, call.axis, axis=rows, tiled=True)
        return orders.restored(gathered, call.rows.order, call.devices, rows)
    if heads is not None:
        count = q_heads // call.devices
        return jax.lax.dynamic_slice_in_dim(x, call.index * np.int32(count), count, heads)
    return x
