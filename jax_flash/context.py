"""Context parallelism: attention to one sequence that is spread over many devices.

    context = ContextParallel(axis="seq", order="zigzag")
    attention(query, key, value, causal=True, context=context)

inside a ``jax.shard_map`` over the axis, or under ``jax.jit`` on the current mesh (``jax.set_mesh``). docs/context.md
says what travels and which arrays are in which order, docs/scaling.md which schedule is for which sizes.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import checks
from jax_flash._context import orders
from jax_flash._context.choice import ContextParallel, Schedule
from jax_flash._context.orders import Order
from jax_flash._implementations import varying

__all__ = [
    "OVERLAP",
    "ContextParallel",
    "Order",
    "Schedule",
    "pad",
    "padded_length",
    "positions",
    "reorder",
    "restore",
    "set_overlap_flags",
]


def reorder(x: jax.typing.ArrayLike, axis_size: int, order: Order, axis: int = 1) -> jax.Array:
    """``x`` with its ``axis``, which is in true order, put into ``order``.

    Split evenly over ``axis_size`` devices, each then has the rows that ``order`` gives it. For everything that has a
    row for each token: token ids or embeddings, query, key and value, segment ids, labels, rows of a bias or mask.

    Args:
      x: an array whose ``axis`` has a length that is a multiple of ``axis_size``; for "zigzag" of twice that.
      axis_size: the number of devices along the mesh axis of `ContextParallel`.
      order: "contiguous" (nothing moves), "zigzag" (device r has chunks r and 2n - 1 - r of 2n, Grattafiori et al.
        2024, https://arxiv.org/abs/2407.21783) or "striped" (rows r, r + n, r + 2n, ..., Brandon et al. 2023,
        https://arxiv.org/abs/2311.09431).
      axis: which axis.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: ``order`` is unknown, or the length is not such a multiple.
    """
    return _moved(orders.reordered, x, axis_size, order, axis)


def restore(x: jax.typing.ArrayLike, axis_size: int, order: Order, axis: int = 1) -> jax.Array:
    """The inverse of `reorder`: ``x`` with its ``axis`` in true order."""
    return _moved(orders.restored, x, axis_size, order, axis)


def positions(length: int, axis_size: int, order: Order) -> np.ndarray[Any, Any]:
    """int32 ``[length]``: the position of each row in ``order``, ``reorder(arange(length), ...)``.

    Inside a shard_map, a device's own are ``jnp.split(positions(...), axis_size)[jax.lax.axis_index(axis)]``, or what
    the shard_map passes of this array if its spec splits it. For rotary embeddings and masks.

    Raises:
      TypeError, ValueError: as `reorder`.
    """
    _checked(axis_size, order)
    return orders.permutation(order, axis_size, checks.length("length", length))


def padded_length(length: int, axis_size: int, order: Order) -> int:
    """The smallest length of at least ``length`` that ``order`` can deal to ``axis_size`` devices.

    Raises:
      TypeError, ValueError: as `reorder`.
    """
    _checked(axis_size, order)
    length = checks.length("length", length)
    return length + -length % orders.multiple(order, axis_size)


def pad(x: jax.typing.ArrayLike, axis_size: int, order: Order, axis: int = 1, value: Any = 0) -> jax.Array:
    """``x``, still in true order, with ``value`` appended along ``axis`` up to `padded_length`.

    Say by ``q_lengths`` and ``kv_lengths`` how many rows are not padding; with ``causal`` and equal lengths no row
    before the padding attends to it anyway.

    Raises:
      TypeError, ValueError: as `reorder`.
    """
    array = jnp.asarray(x)
    axis = _axis(axis, array.ndim)
    missing = padded_length(array.shape[axis], axis_size, order) - array.shape[axis]
    widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value) if missing else array


def _moved(move: Any, x: Any, axis_size: int, order: Order, axis: int) -> jax.Array:
    _checked(axis_size, order)
    array = jnp.asarray(x)
    axis = _axis(axis, array.ndim)
    orders.check_length(order, axis_size, array.shape[axis])
    (moved,) = varying.on_automatic_axes(lambda x: (move(x, order, axis_size, axis),), [array])(array)
    return moved


OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,  # K, V, dK and dV; else all but one are waited for
}
"""The options of XLA's compiler by which communication on GPUs runs while kernels do, for ``jax.jit(...,
compiler_options=jax_flash.context.OVERLAP)``; `set_overlap_flags` sets them for the whole process."""


def set_overlap_flags() -> str:
    """Adds the options of `OVERLAP` to ``XLA_FLAGS``, where it does not have them yet, and returns that.

    To be called before JAX has started a backend (its first array, ``jax.devices()``): XLA reads ``XLA_FLAGS`` then.
    Without them XLA may run a kernel and the communication that it could hide one after the other; results are the
    same.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={str(value).lower()}" for name, value in OVERLAP.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    return os.environ["XLA_FLAGS"]


def _checked(axis_size: object, order: object) -> None:
    if checks.length("axis_size", axis_size) < 1:
        raise ValueError(f"axis_size must be at least 1, got {axis_size}")
    if order not in orders.ORDERS:
        raise ValueError(f"order must be one of {', '.join(orders.ORDERS)}, got {order!r}")


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis must be one of the array's {rank}, got {axis}")
    return axis % rank
