"""The ring's steps under causal in zigzag order with another device's keys: half the pairs, of which all are kept.

Device r of n has chunks r and 2n - 1 - r. Of the keys of an earlier device all its rows keep the first chunk, and none
of them the second; of those of a later one its second chunk of rows keeps all. So no pair is tested, and all devices
have the same work in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Whether the steps with other devices' keys are halves."""
    zigzag = call.rows.order == "zigzag" and call.rows.total == call.keys.total
    return zigzag and "q_offset" not in operands and causal_alone(call, operands)


class Half(NamedTuple):
    """Of a step's ``rows`` those from ``first_row`` on, and of its ``keys`` those before ``end_key``."""

    rows: int
    first_row: int
    keys: int
    end_key: int

    def of(self, arrays: Mapping[str, jax.Array]) -> Arrays:
        """What it has of inputs, results and operands (without ranges) of a step."""
        found = {}
        for name, x in arrays.items():
            for axis, start, end, _ in self._axes(name, x):
                x = jax.lax.slice_in_dim(x, start, end, axis=axis)
            found[name] = x
        if "q_lengths" in found:
            found["q_lengths"] = jnp.maximum(found["q_lengths"] - np.int32(self.first_row), 0)
        if "kv_lengths" in found:
            found["kv_lengths"] = jnp.minimum(found["kv_lengths"], np.int32(self.end_key))
        return found

    def whole(self, found: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array]) -> Arrays:
        """The results and gradients of a step with these arrays, by the half's: 0 elsewhere, and an lse of -inf."""
        padded = {}
        for name, x in found.items():
            padding = [(0, 0)] * x.ndim
            for axis, start, end, length in self._axes(name, arrays.get(name, x)):
                padding[axis] = start, length - end
            padded[name] = jnp.pad(x, padding, constant_values=-np.inf if name == "lse" else 0)
        return padded

    def _axes(self, name: str, x: jax.Array) -> list[tuple[int, int, int, int]]:
        """The axes of an array that are shortened: to [start, end) of a length."""
        found = []
        for dim, start, end, length in (("t", self.first_row, self.rows, self.rows), ("s", 0, self.end_key, self.keys)):
            axis = _DIMS[name].find(dim) if name in _DIMS else axis_of(name, x, dim)
            if axis is not None and axis >= 0:
                found.append((axis, start, end, length))
        return found


def of_step(call: Call, source: jax.Array, compute: Callable[[Half], Arrays]) -> Arrays:
    """What ``compute`` finds with the keys of device ``source``, another one than this."""
    rows, keys = call.rows.length, call.keys.length
    of_earlier, of_later = Half(rows, 0, keys, keys // 2), Half(rows, rows // 2, keys, keys)
    return jax.lax.cond(source < call.index, lambda: compute(of_earlier), lambda: compute(of_later))
