"""What a user asks for, which schedule serves a call, and why the others don't."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, get_args

import jax

from jax_flash._call import checks
from jax_flash._call.options import UNLIMITED, Options
from jax_flash._context.orders import ORDERS, Order, multiple

Schedule = Literal["all_gather", "ring", "ulysses", "auto"]
"""How devices that share a sequence communicate."""

SCHEDULES: tuple[str, ...] = get_args(Schedule)
Axes = Hashable | tuple[Hashable, ...] | None

GATHERED_LIMIT = 4
"""The schedule "auto" gathers K and V while they take at most so many times the memory of a device's query and out."""


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Says that the rows of one sequence are spread over the devices along a mesh axis.

    Attributes:
      axis: the name of the mesh axis over which the rows of query and the keys are split.
      schedule: "all_gather", "ring" or "ulysses"; "auto" picks one that serves the call, by the rule of
        docs/scaling.md.
      order: which rows a device has: "contiguous", "zigzag" or "striped"; `reorder` puts arrays into it.
      batch_axis: mesh axes over which the batch is split as well; only read under jit, where ``axis`` is not bound,
        and not needed for explicit axes, of which arrays say it themselves.
      head_axis: the same for heads.

    Raises:
      TypeError, ValueError: a field has the wrong type or value.
    """

    axis: Hashable
    schedule: Schedule = "auto"
    order: Order = "contiguous"
    batch_axis: Axes = None
    head_axis: Axes = None

    def __post_init__(self) -> None:
        if self.axis is None or isinstance(self.axis, (tuple, list)):
            raise TypeError(f"axis of context must be the name of one mesh axis, got {self.axis!r}")
        for name, value, known in (("schedule", self.schedule, SCHEDULES), ("order", self.order, ORDERS)):
            if value not in known:
                raise ValueError(f"{name} of context must be one of {', '.join(known)}, got {value!r}")
        others = (*names(self.batch_axis), *names(self.head_axis))
        if self.axis in others or len(set(others)) < len(others):
            raise ValueError(
                f"batch_axis and head_axis of context must be mesh axes other than axis and each other's, got axis "
                f"{self.axis!r}, batch_axis {self.batch_axis!r} and head_axis {self.head_axis!r}"
            )


def names(axes: Any) -> tuple[Any, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


class Place(NamedTuple):
    """Where a call with ``context`` is made."""

    context: ContextParallel
    devices: int
    bound: bool  # inside a shard_map over the axis: arrays are those of one device

    @property
    def shards(self) -> int:
        """How many times as long as query the whole sequence is."""
        return self.devices if self.bound else 1


def place_of(context: object) -> Place | None:
    """Where a call is made; None without ``context``.

    Raises:
      TypeError: ``context`` is no ContextParallel.
      ValueError: its axis is neither bound nor one of the current mesh.
    """
    if context is None:
        return None
    if not isinstance(context, ContextParallel):
        raise TypeError(f"context must be a jax_flash.context.ContextParallel or None, got {checks.describe(context)}")
    try:
        return Place(context, jax.lax.axis_size(context.axis), bound=True)
    except NameError:
        pass
    mesh = jax.sharding.get_abstract_mesh()
    wanted = (context.axis, *names(context.batch_axis), *names(context.head_axis))
    for axis in wanted:
        if axis not in mesh.axis_names:
            there = f"the axes {mesh.axis_names}" if mesh.axis_names else "no axes"
            raise ValueError(
                f"context names the mesh axis {axis!r}, which must be bound by a jax.shard_map around the call, or be "
                f"an axis of the current mesh (jax.set_mesh), which has {there}"
            )
    return Place(context, mesh.shape[context.axis], bound=False)


def check_lengths(place: Place, q_length: int, kv_length: int) -> None:
    """Raises if the rows or keys can't be dealt to the devices in the order asked for."""
    order = place.context.order
    wanted = multiple(order, place.devices) // place.shards
    for name, length in (("query", q_length), ("key", kv_length)):
        if length % wanted:
            where = "on every device" if place.bound else f"over {place.devices} devices"
            raise ValueError(
                f"{name} must have a length that is a multiple of {wanted} {where} for context with order {order!r}, "
                f"got {length}: jax_flash.context.pad makes it one"
            )


class Sizes(NamedTuple):
    """The sizes of a call that the choice depends on; lengths are those of the whole sequence."""

    q_length: int
    kv_length: int
    q_heads: int
    kv_heads: int
    head_dims: int  # of query and value together


def obstacle(schedule: str, devices: int, sizes: Sizes, options: Options) -> str | None:
    """Why a schedule can't serve a call; None if it can."""
    if schedule == "ulysses" and sizes.q_heads % devices:
        return f"its {devices} devices must divide the query heads, of which there are {sizes.q_heads}"
    if schedule == "ring" and options.dropout_rate:
        return (
            "dropout_rate counts the bits of dropout from the first key of an array, and a device of the ring has no "
            "array with all keys"
        )
    return None


def obstacles(place: Place, sizes: Sizes, options: Options) -> dict[str, str]:
    """Why schedules can't serve a call, by the names of those that can't."""
    found = {name: obstacle(name, place.devices, sizes, options) for name in SCHEDULES if name != "auto"}
    return {name: reason for name, reason in found.items() if reason}


def chosen(place: Place, sizes: Sizes, options: Options) -> tuple[str, dict[str, str]]:
    """The schedule that serves a call, and why others can't.

    Raises:
      NotImplementedError: the one that ``context`` names can't.
    """
    wanted, against = place.context.schedule, obstacles(place, sizes, options)
    if wanted != "auto":
        if wanted in against:
            raise NotImplementedError(f"context with schedule {wanted!r} does not serve this call: {against[wanted]}")
        return wanted, against
    devices, gathered = place.devices, sizes.kv_length * sizes.kv_heads
    if "ulysses" not in against:
        repeated = math.lcm(sizes.kv_heads, devices)
        exchanged = (sizes.q_length * sizes.q_heads + sizes.kv_length * repeated) / devices
        if exchanged <= gathered or "ring" in against:
            return "ulysses", against
    own = sizes.q_length * sizes.q_heads / devices
    return ("all_gather" if gathered <= GATHERED_LIMIT * own or "ring" in against else "ring"), against


def relocates(schedule: str, order: str) -> bool:
    """Whether rows or keys have positions that no offset tells: what depends on these becomes intervals, functions."""
    return (schedule == "all_gather" and order == "striped") or (schedule == "ring" and order != "contiguous")


def shards_in_reach(order: str, devices: int, q_length: int, kv_length: int, options: Options, shifted: bool) -> int:
    """Of how many devices a device of a ring needs the keys: its own and the nearest before it.

    Of all; but in contiguous order, if no row keeps a later key, of those that the window reaches. ``shifted``: rows
    and keys are not compared by their places in the arrays, as with q_offset and in packed sequences.
    """
    left = options.window_left
    backwards = options.causal or options.window_right == 0
    if order != "contiguous" or not backwards or left == UNLIMITED or q_length != kv_length or shifted:
        return devices
    return min(devices, 1 + math.ceil(left * devices / kv_length))


def travels(
    schedule: str, devices: int, sizes: Sizes, itemsize: int, batch: int, in_reach: int | None = None
) -> dict[str, float]:
    """Bytes that each device sends in the forward and the backward pass of a call on whose mesh nothing else is split.

    docs/scaling.md derives them. ``in_reach``: see `shards_in_reach`.
    """
    share = (devices - 1) / devices
    keys = batch * sizes.kv_length * sizes.kv_heads * sizes.head_dims
    if schedule == "all_gather":  # gathered K and V; their gradients are scattered in float32
        return {"forward": keys * share * itemsize, "backward": keys * share * max(itemsize, 4)}
    if schedule == "ring":  # a shard to all others, or to those in reach; then again, with dK and dV in float32
        share = ((in_reach or devices) - 1) / devices
        return {"forward": keys * share * itemsize, "backward": keys * share * (itemsize + max(itemsize, 4))}
    repeated = keys / sizes.kv_heads * math.lcm(sizes.kv_heads, devices)
    rows = batch * sizes.q_length * sizes.q_heads * sizes.head_dims
    exchanged = (rows + repeated) / devices * share * itemsize  # q and out; K and V; in both directions
    return {"forward": exchanged, "backward": exchanged}


TRAVELLING = {
    "all_gather": "K and V are gathered; dK and dV are scattered",
    "ring": "K and V go around; so do they with dK and dV",
    "ulysses": "query, K, V and out are exchanged for heads; so are their gradients",
}
"""What each schedule sends, in words."""

_OVERLAP_FLAG = "xla_gpu_enable_latency_hiding_scheduler"


def overlap_is_off() -> str | None:
    """The option of XLA without which communication does not overlap with kernels, if nothing has set it."""
    level = getattr(jax.config, "jax_optimization_level", None)
    on = f"--{_OVERLAP_FLAG}=true" in os.environ.get("XLA_FLAGS", "") or str(level) in ("O1", "O2", "O3", "1", "2", "3")
    return None if on else _OVERLAP_FLAG
