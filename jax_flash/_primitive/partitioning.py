"""Splits a call over devices along batch, query heads and rows of query; each device gets the keys that it needs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_flash._call import dtypes
from jax_flash._call.options import OPERANDS, positions_matter
from jax_flash._implementations import scores
from jax_flash._native.private import Primitive, ShapedArray, custom_partitioning, mlir
from jax_flash._primitive import lowering
from jax_flash._primitive.params import Params

Axes = Any  # an entry of a PartitionSpec: None, the name of a mesh axis, or several
Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Split:
    """The mesh axes along which batch, rows of query and query heads are split.

    ``shares_keys``: every device has all key heads, and selects those of its query heads.
    """

    batch: Axes
    rows: Axes
    heads: Axes
    shares_keys: bool

    def axes(self) -> dict[str, Axes]:
        """The mesh axes by letter of dimension; dimensions without an entry are not split."""
        return {"b": self.batch, "t": self.rows, "n": self.heads, "k": None if self.shares_keys else self.heads}


def split_of(
    devices: Mapping[Any, int], spec: Sequence[Axes], query_shape: Sequence[int], kv_heads: int, *, rows_can_split: bool
) -> tuple[Split, list[str]]:
    """How to split a call whose query has the sharding ``spec``, and why parts of that sharding are not kept.

    ``devices`` are the sizes of the mesh axes.
    """
    obstacles = []

    def divided(dim: int, what: str) -> Axes:
        count = _count(devices, spec[dim])
        if query_shape[dim] % count == 0:
            return spec[dim]
        obstacles.append(f"{what} is gathered: {query_shape[dim]} do not divide evenly over {count} devices")
        return None

    batch, heads = divided(0, "the batch of query"), divided(2, "the heads of query")
    rows = None
    if rows_can_split:
        rows = divided(1, "the length of query")
    elif _count(devices, spec[1]) > 1:
        obstacles.append("the length of query is gathered: rows of packed sequences or with dropout are not split")
    if _count(devices, spec[3]) > 1:
        obstacles.append("head_dim is gathered: it is never split")
    return Split(batch, rows, heads, kv_heads % _count(devices, heads) != 0), obstacles


def described(sharding: NamedSharding, shape: Sequence[int], kv_heads: int, *, dropout: bool) -> tuple[str, ...]:
    """How attention() splits a query [..., T, N, H], as text."""
    leading = len(shape) - 3
    spec = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    # Leading dimensions become one, so a sharding of any but the first of them is gathered.
    of_query = (spec[0], *spec[leading:])
    sizes = (math.prod(shape[:leading]), *shape[leading:])
    split, obstacles = split_of(sharding.mesh.shape, of_query, sizes, kv_heads, rows_can_split=not dropout)
    kept = []
    for what, axes in (("batch", split.batch), ("rows of query", split.rows), ("query heads", split.heads)):
        if (count := _count(sharding.mesh.shape, axes)) > 1:
            with_keys = ", which share key heads" if what == "query heads" and split.shares_keys else ""
            with_keys = ", each with all keys" if what == "rows of query" else with_keys
            kept.append(f"{what} over {count} devices{with_keys}")
    return (*kept, *obstacles) or ("not at all: every device computes all of it",)


@functools.cache
def partitioned(pass_: str, target: lowering.Target, params: Params) -> Callable[..., Any]:
    """The call, partitioned over devices; the length of key and head dims are gathered."""
    argument_dims, result_dims = params.argument_dims(pass_), params.result_dims(pass_)
    # Dropout and packed sequences count rows from the first one of the array.
    can_split_rows = not params.options.dropout_rate and params.limits is None

    @custom_partitioning
    def attend(*args: jax.Array) -> tuple[jax.Array, ...]:
        return _apart(functools.partial(lowering.call, pass_, target, params), *args)

    def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        if mesh.empty:  # several devices but no mesh: each computes everything
            return (
                mesh,
                functools.partial(_apart, functools.partial(lowering.call, pass_, target, params)),
                tuple(x.sharding for x in results),
                tuple(x.sharding for x in args),
            )
        query, key = args[:2]
        split, _ = split_of(mesh.shape, _spec(query), query.shape, key.shape[2], rows_can_split=can_split_rows)
        axes = split.axes()

        def sharding(dims: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) for dim in dims)))

        local = functools.partial(_of_one_device, split, key.shape[2], pass_, target, params)
        return (
            mesh,
            functools.partial(_apart, local),
            tuple(map(sharding, result_dims)),
            tuple(map(sharding, argument_dims)),
        )

    def rule(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        q_heads, kv_heads = arguments[0].shape[2], arguments[1].shape[2]
        # The query heads are one factor of their own, not a compound of key heads and group: a compound factor could be
        # split within a key head, for which `partition` has no sharding, and must not have a component of size 1, which
        # a single key head would give.
        letters = {"2": "pair", "4": "record"} | ({"n": "k"} if q_heads == kv_heads else {})
        order: dict[str, None] = {}

        def factors(dims: str, name: str) -> str:
            own = "1.m"  # dimensions of this argument alone
            found = [f"{name}{i}" if dim in own else letters.get(dim, dim) for i, dim in enumerate(dims)]
            order.update(dict.fromkeys(found))
            return " ".join(found)

        left = ", ".join(factors(dims, f"x{i}_") for i, dims in enumerate(argument_dims))
        right = ", ".join(factors(dims, f"y{i}_") for i, dims in enumerate(result_dims))
        split = "btnk" if can_split_rows else "bnk"
        return f"{left} -> {right}", {"need_replication_factors": tuple(x for x in order if x not in split)}

    attend.def_partition(partition=partition, sharding_rule=rule)
    return attend


def _of_one_device(
    split: Split, kv_heads: int, pass_: str, target: lowering.Target, params: Params, *args: jax.Array
) -> tuple[jax.Array, ...]:
    """The results of one device, whose arguments are split by ``split``."""
    fixed, operands, tangents = params.split(pass_, args)
    query = fixed["query"]
    if split.rows is not None:
        first_row = jax.lax.axis_index(split.rows) * np.int32(query.shape[1])
        params, operands = _of_rows(first_row, query.shape[:2], params, operands)
    key_heads = None
    if split.shares_keys:
        key_heads = _key_heads(split.heads, query.shape[2], kv_heads)
        for arrays in (fixed, tangents):
            arrays.update({name: arrays[name][:, :, key_heads] for name in ("key", "value") if name in arrays})
    if params.options.functions is not None:
        params, operands = _with_index_offsets(split, params, operands, query.shape)
    results = list(lowering.call(pass_, target, params, *fixed.values(), *operands.values(), *tangents.values()))

    everything, axes = _mesh_axes(split.batch, split.rows, split.heads), split.axes()
    for i, dims in enumerate(params.result_dims(pass_)):
        x = results[i]
        shared = tuple(name for name in everything if name not in _mesh_axes(*(axes.get(dim) for dim in dims)))
        if not shared:
            continue
        # Gradients of what devices share (keys, operands without the split dimensions) are summed over them.
        x = x.astype(dtypes.accumulation_dtype(x.dtype))
        if key_heads is not None and "k" in dims:
            x = jnp.zeros((*x.shape[:2], kv_heads, *x.shape[3:]), x.dtype).at[:, :, key_heads].add(x)
        results[i] = jax.lax.psum(x, shared).astype(results[i].dtype)
    return tuple(results)


def _of_rows(first_row: jax.Array, shape: tuple[int, ...], params: Params, operands: Arrays) -> tuple[Params, Arrays]:
    """Parameters and operands of the rows from ``first_row`` on; ``shape`` is that of query, [B, rows]."""
    batch, rows = shape
    if positions_matter(params.options, operands):
        operands = {"q_offset": jnp.zeros((batch, 1), jnp.int32)} | operands
    params = params.with_operands(operands)
    of_rows = {name: OPERANDS[name].of_rows for name in params.names}
    found = {name: f(operands, first_row, rows) if f else operands[name] for name, f in of_rows.items()}
    if "mask_blocks" in found:
        functions = params.options.functions
        assert functions is not None
        height, width = functions.block_size
        if functions.partial_mask is None and rows % height:
            # No function decides in a block of rows that meets an empty and a full one, so blocks get lower.
            fitting = math.gcd(height, rows)
            found["mask_blocks"] = jnp.repeat(found["mask_blocks"], height // fitting, axis=3)
            functions = dataclasses.replace(functions, block_size=(fitting, width))
            params = dataclasses.replace(params, options=dataclasses.replace(params.options, functions=functions))
            height = fitting
        found["mask_blocks"] = _blocks_of_rows(found["mask_blocks"], first_row, rows, height)
    return params, found


def _blocks_of_rows(kinds: jax.Array, first_row: jax.Array, rows: int, height: int) -> jax.Array:
    """The blocks [b, d, n, blocks, y] of the rows from ``first_row`` on, which need not begin with a block: then each
    meets two, and is full or empty only if both are."""
    blocks = -(-rows // height)
    first = first_row // height + jnp.arange(blocks, dtype=jnp.int32)
    last = jnp.minimum(first_row + jnp.arange(1, blocks + 1, dtype=jnp.int32) * height, first_row + rows) - 1
    here = jnp.take(kinds, first, axis=3, mode="clip")
    there = jnp.take(kinds, last // height, axis=3, mode="clip")
    return jnp.where(here == there, here, jnp.asarray(scores.PARTIAL, kinds.dtype))


def _with_index_offsets(
    split: Split, params: Params, operands: Arrays, query_shape: tuple[int, ...]
) -> tuple[Params, Arrays]:
    """With what the device's batch entries and query heads count from, for score and mask functions."""
    if split.batch is None and split.heads is None:
        return params, operands
    offsets = [
        jnp.int32(0) if axes is None else jax.lax.axis_index(axes) * np.int32(size)
        for axes, size in ((split.batch, query_shape[0]), (split.heads, query_shape[2]))
    ]
    operands = {**operands, "index_offsets": jnp.stack(offsets)}
    params = params.with_operands(operands)
    return params, {name: operands[name] for name in params.names}


def _key_heads(heads: Axes, q_heads: int, kv_heads: int) -> jax.Array:
    """The key heads of this device's ``q_heads`` query heads, one for each run that shares one, int32 [runs]."""
    group = jax.lax.axis_size(heads) * q_heads // kv_heads
    common = math.gcd(group, q_heads)  # length of runs that neither cross a device's boundary nor a key head's
    first = jax.lax.axis_index(heads) * np.int32(q_heads)
    indices: jax.Array = (first + jnp.arange(0, q_heads, common, dtype=jnp.int32)) // np.int32(group)
    return indices


# The computation of one device is traced and lowered without the mesh of the surrounding program, hence as a primitive.
# With explicit axes jax 0.11 would annotate every operation, even the addition within a psum, with a sharding; after
# XLA's partitioner has run, these annotations remain as operations that nothing implements.

_NO_MESH = AbstractMesh((), ())


def _apart(run: Callable[..., tuple[jax.Array, ...]], *args: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_part_p.bind(*args, run=run))


def _part_shapes(*avals: Any, run: Callable[..., Any]) -> list[Any]:
    with use_abstract_mesh(_NO_MESH):
        return [ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(run, *map(_without_mesh, avals))]


def _part_lowering(ctx: Any, *args: Any, run: Callable[..., Any]) -> Any:
    ctx = ctx.replace(avals_in=tuple(map(_without_mesh, ctx.avals_in)))
    with use_abstract_mesh(_NO_MESH):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _without_mesh(x: Any) -> Any:
    """The shape and dtype alone: inside a shard_map, arrays vary over axes of the mesh."""
    return ShapedArray(x.shape, x.dtype)


_part_p = Primitive("jax_flash_part")
_part_p.multiple_results = True
_part_p.def_abstract_eval(_part_shapes)
mlir.register_lowering(_part_p, _part_lowering)


def _spec(arg: Any) -> tuple[Axes, ...]:
    spec = tuple(arg.sharding.spec)
    return spec + (None,) * (len(arg.shape) - len(spec))


def _mesh_axes(*specs: Axes) -> tuple[Any, ...]:
    """The names of the mesh axes in entries of a PartitionSpec."""
    return tuple(name for spec in specs if spec is not None for name in (spec if isinstance(spec, tuple) else (spec,)))


def _count(devices: Mapping[Any, int], spec: Axes) -> int:
    return math.prod(devices[name] for name in _mesh_axes(spec))
