"""attention with ``context``: inside a shard_map over its axis, or by one that is made here."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jax_flash._call.options import OPERANDS, Options, is_captured
from jax_flash._context import all_gather, choice, ring, ulysses
from jax_flash._context.call import Arrays, Attend, Call, Limits, axis_of, of_keys_alone, widened
from jax_flash._context.choice import Place, names
from jax_flash._context.orders import Shard, permutation

_SCHEDULES = {"all_gather": all_gather.attention, "ring": ring.attention, "ulysses": ulysses.attention}


class Static(NamedTuple):
    """What is known of a call when it is traced, in addition to its options."""

    place: Place
    limits: Limits
    attend: Attend
    named: str | None  # the implementation that was asked for


def sizes_of(place: Place, query: Any, key: Any, value: Any) -> choice.Sizes:
    """The sizes of [B, length, heads, head_dim] arrays."""
    return choice.Sizes(
        query.shape[1] * place.shards,
        key.shape[1] * place.shards,
        query.shape[2],
        key.shape[2],
        query.shape[3] + value.shape[3],
    )


def row_positions(place: Place, q_length: int) -> jax.Array:
    """int32 [q_length]: the position of each row of query."""
    order, devices = place.context.order, place.devices
    if not place.bound:
        return jnp.asarray(permutation(order, devices, q_length))
    return Shard(order, devices, jax.lax.axis_index(place.context.axis), q_length).positions


def attention(
    static: Static, options: Options, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    """out and lse of [B, T, N, H] arrays; operands have the dims of OPERANDS, and no ranges.

    Raises:
      NotImplementedError: the schedule that was named does not serve the call.
      ValueError: heads or the batch don't divide evenly over mesh axes.
    """
    place = static.place
    if place.devices == 1 and (place.bound or not _other_axes(place)):
        return static.attend(options, static.limits, query, key, value, operands)
    if place.bound:
        return _of_device(static, options, query, key, value, operands)
    return _split(static, options, query, key, value, operands)


def _of_device(
    static: Static, options: Options, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    context, devices = static.place.context, static.place.devices
    place = static.place._replace(bound=True)
    schedule, _ = choice.chosen(place, sizes_of(place, query, key, value), options)
    index = jax.lax.axis_index(context.axis)
    rows = Shard(context.order, devices, index, query.shape[1])
    keys = Shard(context.order, devices, index, key.shape[1])
    call = Call(context.axis, rows, keys, options, static.limits, static.attend, static.named)
    return _SCHEDULES[schedule](call, query, key, value, operands)


def _other_axes(place: Place) -> bool:
    return bool(names(place.context.batch_axis) or names(place.context.head_axis))


def _split(
    static: Static, options: Options, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    """The call by a shard_map over the axis of ``context``, those of batch and heads, and all explicit ones."""
    context = static.place.context
    mesh = jax.sharding.get_abstract_mesh()
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    of_query = (*jax.typeof(query).sharding.spec, None, None, None)
    others = {
        "b": context.batch_axis if context.batch_axis is not None else _without(of_query[0], context.axis),
        "n": context.head_axis if context.head_axis is not None else _without(of_query[2], context.axis),
    }
    for dim, what, size in (("b", "batch entries", query.shape[0]), ("n", "query heads", query.shape[2])):
        count = math.prod(mesh.shape[name] for name in names(others[dim]))
        if size % count:
            raise ValueError(f"context must split {size} {what} evenly, got {count} devices along {others[dim]!r}")
    head_devices = math.prod(mesh.shape[name] for name in names(others["n"]))
    repeats = math.lcm(key.shape[2], head_devices) // key.shape[2]
    if repeats > 1:  # devices share key heads
        key, value = (widened(lambda x: jnp.repeat(x, repeats, axis=2), x)[0] for x in (key, value))
    letters = others | {"t": context.axis, "s": context.axis, "k": others["n"]}

    def spec(dims: str, name: str | None = None, x: Any = None) -> PartitionSpec:
        def axes(dim: str) -> Any:
            if name is not None and axis_of(name, x, dim) is None:
                return None
            whole = name is not None and dim == "s" and not of_keys_alone(name)
            return None if whole else letters.get(dim)

        return PartitionSpec(*map(axes, dims))

    in_specs = tuple(spec(dims) for dims in ("btnh", "bskh", "bskv"))
    of_operands = {
        name: PartitionSpec() if is_captured(name) or name == "index_offsets" else spec(OPERANDS[name].dims, name, x)
        for name, x in operands.items()
    }

    def of_device(query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays) -> Any:
        if options.functions is not None and (others["b"] is not None or others["n"] is not None):
            firsts = [
                jax.lax.axis_index(names(axes)) * np.int32(size) if axes is not None else jnp.int32(0)
                for axes, size in ((others["b"], query.shape[0]), (others["n"], query.shape[2]))
            ]
            operands = {**operands, "index_offsets": jnp.stack(firsts)}
        return _of_device(static, options, query, key, value, operands)

    arguments = (query, key, value, operands)
    specs = (*in_specs, of_operands)
    if explicit:
        arguments = jax.tree.map(functools.partial(_resharded, explicit), arguments, specs)
    used = {context.axis, *names(others["b"]), *names(others["n"]), *explicit}
    return jax.shard_map(
        of_device,
        in_specs=specs,
        out_specs=(spec("btnv"), spec("bnt")),
        axis_names=used,
    )(*arguments)


def _without(axes: Any, axis: Any) -> Any:
    """The axes of a PartitionSpec's entry without that of the sequence."""
    left = tuple(name for name in names(axes) if name != axis)
    return left or None


def _resharded(explicit: set[Any], x: jax.Array, spec: PartitionSpec) -> jax.Array:
    kept = PartitionSpec(*(tuple(name for name in names(axes) if name in explicit) or None for axes in spec))
    resharded: jax.Array = jax.sharding.reshard(x, kept)
    return resharded
