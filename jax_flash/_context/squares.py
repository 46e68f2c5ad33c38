"""The ring's steps under causal in zigzag order with another device's keys: two squares, all of whose pairs are kept.

Device r of n has chunks r and 2n - 1 - r. Its second chunk of rows keeps the first chunk of every other device's keys.
Besides, its first chunk of rows keeps the first chunk of an earlier device's keys, or its second chunk of rows the
second chunk of a later one's. So no pair is tested, and all devices have the same work in every step: they differ only
in where the second square begins. A `jax.lax.cond` between halves would do without the copies of rows, but XLA's host
thread waits for a branch's predicate, and launches nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import OPERANDS, UNLIMITED, Operands
from jax_flash._context.call import Arrays, Call, axis_of

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


def serve(call: Call, operands: Operands) -> bool:
    """Whether the steps with other devices' keys are squares."""
    zigzag = call.rows.order == "zigzag" and call.rows.total == call.keys.total
    return zigzag and "q_offset" not in operands and causal_alone(call, operands)


class Square(NamedTuple):
    """Of a step's rows and keys a chunk each."""

    size: int
    first_row: jax.Array
    first_key: jax.Array

    def of(self, arrays: Mapping[str, jax.Array]) -> Arrays:
        """What it has of inputs, results and operands (without ranges) of a step."""
        found = {}
        for name, x in arrays.items():
            for axis, start in self._axes(name, x):
                x = jax.lax.dynamic_slice_in_dim(x, start, self.size, axis)
            found[name] = x
        for name, first in (("q_lengths", self.first_row), ("kv_lengths", self.first_key)):
            if name in found:
                found[name] = jnp.clip(found[name] - first, 0, np.int32(self.size))
        return found

    def put(self, found: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array]) -> Arrays:
        """The arrays of a step, with ``found`` where the square is."""
        replaced = dict(arrays)
        for name, x in found.items():
            starts: list[jax.Array | np.int32] = [np.int32(0)] * x.ndim
            for axis, start in self._axes(name, arrays[name]):
                starts[axis] = start
            replaced[name] = jax.lax.dynamic_update_slice(arrays[name], x, starts)
        return replaced

    def _axes(self, name: str, x: jax.Array) -> list[tuple[int, jax.Array]]:
        """The axes of an array of the step that are shortened, and where they start."""
        found = []
        for dim, start in (("t", self.first_row), ("s", self.first_key)):
            axis = _DIMS[name].find(dim) if name in _DIMS else axis_of(name, x, dim)
            if axis is not None and axis >= 0:
                found.append((axis, start))
        return found


def of_step(call: Call, source: jax.Array) -> tuple[Square, Square]:
    """The squares of a step with the keys of device ``source``, another one than this."""
    size = call.rows.length // 2
    second = jnp.where(source < call.index, np.int32(0), np.int32(size))
    return Square(size, jnp.full_like(second, size), jnp.zeros_like(second)), Square(size, second, second)
