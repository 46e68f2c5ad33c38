"""Which positions of a sequence each device has: the orders of context parallelism."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

Order = Literal["contiguous", "zigzag", "striped"]
"""How rows are dealt to devices: runs of consecutive rows; chunks r and 2n - 1 - r of 2n for device r of n, which
balances causal attention; or every n-th row."""

ORDERS: tuple[str, ...] = get_args(Order)


def multiple(order: str, devices: int) -> int:
    """What a length must be a multiple of."""
    return 2 * devices if order == "zigzag" else devices


def check_length(order: str, devices: int, length: int) -> None:
    if length % multiple(order, devices):
        raise ValueError(
            f"order {order!r} over {devices} devices needs a length that is a multiple of "
            f"{multiple(order, devices)}, got {length}: jax_flash.context.pad makes it one"
        )


def permutation(order: str, devices: int, length: int) -> np.ndarray[Any, Any]:
    """int32 [length]: the position of each row, where the rows of device 0 come first, then those of device 1, ..."""
    check_length(order, devices, length)
    rows = np.arange(length, dtype=np.int32)
    if order == "striped":
        return rows.reshape(-1, devices).T.reshape(-1)
    if order == "zigzag":
        chunks = rows.reshape(2, devices, -1)
        return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)
    return rows


def reordered(x: jax.Array, order: str, devices: int, axis: int) -> jax.Array:
    """``x``, whose ``axis`` is in true order, with the rows of device 0 first, then those of device 1, ..."""
    return _permuted(x, order, devices, axis, inverse=False)


def restored(x: jax.Array, order: str, devices: int, axis: int) -> jax.Array:
    """The inverse of `reordered`."""
    return _permuted(x, order, devices, axis, inverse=True)


def _permuted(x: jax.Array, order: str, devices: int, axis: int, *, inverse: bool) -> jax.Array:
    # By transposition and reversal rather than by indices, so that the transpose of this is no scatter.
    if order == "contiguous" or devices == 1:
        return x
    axis %= x.ndim
    before, after, length = x.shape[:axis], x.shape[axis + 1 :], x.shape[axis]
    if order == "striped":
        sizes = (devices, length // devices) if inverse else (length // devices, devices)
        return jnp.swapaxes(x.reshape(*before, *sizes, *after), axis, axis + 1).reshape(x.shape)
    chunk = length // (2 * devices)
    if inverse:
        pairs = x.reshape(*before, devices, 2, chunk, *after)
        first, last = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        return jnp.stack([first, jnp.flip(last, axis)], axis).reshape(x.shape)
    halves = x.reshape(*before, 2, devices, chunk, *after)
    first, last = (jax.lax.index_in_dim(halves, i, axis, keepdims=False) for i in (0, 1))
    return jnp.stack([first, jnp.flip(last, axis)], axis + 1).reshape(x.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The rows or keys of one device: ``length`` of ``devices * length``, ascending in position.

    ``index`` is the device's number along the axis, an int32 scalar, which may be traced.
    """

    order: str
    devices: int
    index: jax.Array
    length: int

    @property
    def total(self) -> int:
        return self.devices * self.length

    @property
    def consecutive(self) -> bool:
        return self.order == "contiguous" or self.devices == 1

    @property
    def first(self) -> jax.Array:
        """The position of the first one."""
        if self.order == "striped":
            return self.index
        return self.index * np.int32(self.length // 2 if self.order == "zigzag" else self.length)

    @property
    def jump(self) -> jax.Array:
        """zigzag: how much farther apart than two neighbours the last one of the first chunk and the next one are."""
        chunk = self.length // 2
        return (np.int32(2 * self.devices - 2) - np.int32(2) * self.index) * np.int32(chunk)

    def position(self, i: jax.Array) -> jax.Array:
        """The positions of those with the indices ``i``, int32 of any shape; a function of scalars too."""
        if self.order == "striped":
            return self.index + np.int32(self.devices) * i
        if self.order == "zigzag":
            return self.first + i + jnp.where(i < np.int32(self.length // 2), np.int32(0), self.jump)
        return self.first + i

    @property
    def positions(self) -> jax.Array:
        """int32 [length]."""
        return self.position(jnp.arange(self.length, dtype=jnp.int32))

    def count_before(self, position: jax.Array) -> jax.Array:
        """How many are at positions less than ``position``: [start, end) of positions becomes [start, end) of
        indices."""
        position = jnp.clip(position, 0, self.total)
        if self.order == "striped":
            return jnp.clip(
                (position - self.index + np.int32(self.devices - 1)) // np.int32(self.devices), 0, self.length
            )
        if self.order == "zigzag":
            chunk = self.length // 2
            second = self.first + np.int32(chunk) + self.jump
            return jnp.clip(position - self.first, 0, chunk) + jnp.clip(position - second, 0, chunk)
        return jnp.clip(position - self.first, 0, self.length)

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """This device's part of ``x``, whose ``axis`` has all positions in true order."""
        if self.order == "striped":
            axis %= x.ndim
            strided = x.reshape(*x.shape[:axis], self.length, self.devices, *x.shape[axis + 1 :])
            return jax.lax.dynamic_index_in_dim(strided, self.index, axis + 1, keepdims=False)
        if self.order == "zigzag":
            chunk = self.length // 2
            starts = (self.first, self.first + np.int32(chunk) + self.jump)
            return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, start, chunk, axis) for start in starts], axis)
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.length, axis)
