"""The ring's steps under causal in zigzag order with another device's keys: half the pairs, of which all are kept.

Device r of n has chunks r and 2n - 1 - r. Of the keys of an earlier device all its rows keep the first chunk, and none
of them the second; of those of a later one its second chunk of rows keeps all. Either way these are two squares of a
chunk of rows and a chunk of keys: that of the second rows with the first keys, and beside it that of the first rows
with the same keys, or that of the same rows with the second keys. A call takes both as batch entries, so all devices
run the same program, with the same work in every step, and test no pair.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import OPERANDS, UNLIMITED, Operands
from jax_flash._context.call import Arrays, Call, axis_of
from jax_flash._implementations import varying

_DIMS = {"query": "btnh", "key": "bskh", "value": "bskv", "out": "btnv", "dout": "btnv", "lse": "bnt", "dlse": "bnt"}


def causal_alone(call: Call, operands: Operands) -> bool:
    """Whether causal is all that depends on positions."""
    windows = (call.options.window_left, call.options.window_right)
    return (
        call.options.causal
        and windows == (UNLIMITED, UNLIMITED)
        and call.options.functions is None
        and call.limits is None
        and not any(OPERANDS[name].positional or "intervals" in name for name in operands)
    )


def serve(call: Call, query: jax.Array, operands: Operands) -> bool:
    """Whether the steps with other devices' keys are two squares."""
    zigzag = call.rows.order == "zigzag" and call.rows.total == call.keys.total
    # What all batch entries share would have to be copied for each.
    copied = any(x.shape[0] < query.shape[0] and _axes(name, x) for name, x in operands.items())
    return zigzag and "q_offset" not in operands and causal_alone(call, operands) and not copied


def _axes(name: str, x: jax.Array) -> dict[str, int]:
    """The axes of an input, result or operand that are those of rows (t) and keys (s)."""
    found = {dim: _DIMS[name].find(dim) if name in _DIMS else axis_of(name, x, dim) for dim in "ts"}
    return {dim: axis for dim, axis in found.items() if axis is not None and axis >= 0}


def squares(earlier: jax.Array, name: str, x: jax.Array) -> jax.Array:
    """The two squares' parts of a step's input, result or operand (but lengths and ranges), behind each other.

    ``earlier`` is whether the keys are those of an earlier device. Linear in ``x``.
    """
    axes = _axes(name, x)

    def part(t: int, s: int) -> jax.Array:
        found = x
        for dim, half in (("t", t), ("s", s)):
            if dim in axes:
                size = x.shape[axes[dim]] // 2
                found = jax.lax.slice_in_dim(found, half * size, (half + 1) * size, axis=axes[dim])
        return found

    if not axes:
        return x if x.shape[0] == 1 and OPERANDS[name].broadcast else jnp.concatenate([x, x])
    return jnp.concatenate([part(1, 0), jnp.where(earlier, part(0, 0), part(1, 1))])


def of_step(call: Call, earlier: jax.Array, arrays: Mapping[str, jax.Array]) -> Arrays:
    """The squares of a step's inputs, results and operands, without ranges."""
    found = {name: squares(earlier, name, x) for name, x in arrays.items() if "lengths" not in name}
    for name, shard, half in (("q_lengths", call.rows, 1), ("kv_lengths", call.keys, 0)):
        if name in arrays:
            chunk = np.int32(shard.length // 2)
            of_half = jnp.minimum(arrays[name], chunk), jnp.maximum(arrays[name] - chunk, 0)
            found[name] = jnp.concatenate([of_half[half], jnp.where(earlier, *of_half)])
    return found


def gradients(earlier: jax.Array, found: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array]) -> Arrays:
    """Gradients of a step's ``arrays`` by those of its squares."""
    whole = {}
    for name, x in found.items():
        like = varying.vary_alike(jnp.zeros(arrays[name].shape, x.dtype), x)
        (whole[name],) = jax.linear_transpose(lambda y, name=name: squares(earlier, name, y), like)(x)
    return whole
