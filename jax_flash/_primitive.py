"""The forward and backward primitives: shapes, lowering per platform, batching, sharding.

    forward:  (q, k, v, *operands) -> (out, lse)
    backward: (q, k, v, dout, lse, delta, *operands) -> (dq, dk, dv)

q, out, dout, dq are [B, T, N, H]; k, v, dk, dv are [B, S, K, H]; lse and delta are [B, N, T]. The option record and
the operands pass through without a look at what is in them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_flash import _chunked, _core, _dtypes, _explain, _registration

if TYPE_CHECKING:
    from jax_flash._attention import Options


@dataclasses.dataclass(frozen=True)
class Operand:
    """An option that is an array: its dimensions, by the letters of `_DIMS`, the first of them b, and its dtype."""

    dims: str
    dtype: str


# Dimensions of every fixed argument and result: b batch, t and s lengths, n and k heads, h head_dim.
_DIMS = {"forward": (("btnh", "bskh", "bskh"), ("btnh", "bnt")),
         "backward": (("btnh", "bskh", "bskh", "btnh", "bnt", "bnt"), ("btnh", "bskh", "bskh"))}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of both primitives."""

    options: Options
    operands: tuple[tuple[str, str], ...]  # (name, dims) of the operands that are there, in the library's order
    implementation: str | None


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Mapping[str, jax.Array],
    *,
    options: Options,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    params, arrays = _params(options, operands, implementation)
    out, lse = _forward_p.bind(query, key, value, *arrays, params=params)
    return out, lse


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    operands: Mapping[str, jax.Array],
    *,
    options: Options,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    params, arrays = _params(options, operands, implementation)
    dquery, dkey, dvalue = _backward_p.bind(query, key, value, dout, lse, delta, *arrays, params=params)
    return dquery, dkey, dvalue


def row_sums(dout: jax.Array, out: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """rowsum(dout * out) as [B, N, T], what delta is before dlse is taken from it (FlashAttention-2, equation 4)."""
    return jnp.swapaxes((dout.astype(dtype) * out.astype(dtype)).sum(axis=-1), 1, 2)


def _params(
    options: Options, operands: Mapping[str, jax.Array], implementation: str | None
) -> tuple[Params, list[jax.Array]]:
    from jax_flash._attention import OPERANDS  # the declarations stand with the public signature

    names = [name for name in _core.OPERANDS if name in operands]
    return (
        Params(options, tuple((name, OPERANDS[name].dims) for name in names), implementation),
        [operands[name] for name in names],
    )


# Shapes


def _result_shapes(pass_: str, avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    query, key, value = avals[:3]
    if pass_ == "backward":
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value))
    batch, q_length, q_heads, _ = query.shape
    lse_dtype = _dtypes.accumulation_dtype(query.dtype)
    return (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((batch, q_heads, q_length), lse_dtype),
    )


def _abstract_eval(pass_: str, *avals: Any, params: Params) -> tuple[Any, ...]:
    query, key = avals[:2]
    # Split over batch and heads as the arguments are, and inside shard_map varying as they are.
    axes = {"b": query.sharding.spec[0], "n": query.sharding.spec[2], "k": key.sharding.spec[2]}

    def result(x: jax.ShapeDtypeStruct, dims: str) -> Any:
        sharding = query.sharding.update(spec=PartitionSpec(*(axes.get(dim) for dim in dims)))
        return query.update(shape=x.shape, dtype=x.dtype, sharding=sharding, weak_type=False)

    return tuple(map(result, _result_shapes(pass_, avals), _DIMS[pass_][1]))


# Lowering


def _call(pass_: str, platform: str, params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    """What one device runs: a custom call, or plain JAX where no kernel serves the call."""
    if 0 in args[0].shape:  # vmap over an axis of size 0; the kernels want one problem at least
        return tuple(jnp.zeros(x.shape, x.dtype) for x in _result_shapes(pass_, args))
    chosen = _explain.choose(params.implementation, platform, args[0].dtype)
    if chosen == "cuda":
        return _aligned(functools.partial(_custom_call, pass_, chosen, params), *args)
    if chosen == "cpu":
        return _custom_call(pass_, chosen, params, *args)
    return _plain(pass_, params, *args)


def _custom_call(pass_: str, platform: str, params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    results = _result_shapes(pass_, args)
    if pass_ == "backward" and (scratch := _scratch(platform, *args[:2])):
        results = (*results, jax.ShapeDtypeStruct((scratch,), args[4].dtype))
    names = [name for name, _ in params.operands]
    attributes: dict[str, Any] = dataclasses.asdict(params.options)
    attributes.update({f"has_{name}": name in names for name in _core.OPERANDS})
    target = _registration.FORWARD_TARGET if pass_ == "forward" else _registration.BACKWARD_TARGET
    called = jax.ffi.ffi_call(target, results)(*args, **attributes)
    return tuple(called[: 2 if pass_ == "forward" else 3])


def _scratch(platform: str, query: jax.Array, key: jax.Array) -> int:
    batch, q_length, q_heads, head_dim = query.shape
    elements: int = _core.backward_scratch(
        platform=platform,
        dtype=query.dtype.name,
        batch=batch,
        q_length=q_length,
        kv_length=key.shape[1],
        q_heads=q_heads,
        kv_heads=key.shape[2],
        head_dim=head_dim,
    )
    return elements


def _aligned(call: Callable[..., tuple[jax.Array, ...]], *args: jax.Array) -> tuple[jax.Array, ...]:
    """Calls with head_dim padded by zeros to the next multiple of 8, so that every row starts on 16 bytes."""
    head_dim = args[0].shape[-1]
    if head_dim % 8 == 0:
        return call(*args)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0),) * 3 + ((0, -head_dim % 8),)) if x.ndim == 4 and x.shape[-1] == head_dim else x

    # The arrays with a head_dim are the first three and, backward, dout.
    padded = call(*map(pad, args[:4]), *args[4:])
    return tuple(x[..., :head_dim] if x.ndim == 4 else x for x in padded)


def _plain(pass_: str, params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    """The primitive in plain JAX; the backward is JAX's own derivative of the forward."""
    names = [name for name, _ in params.operands]
    operands = dict(zip(names, args[len(_DIMS[pass_][0]) :], strict=True))
    query, key, value = args[:3]
    if pass_ == "forward":
        return _chunked.attention(query, key, value, operands, params.options)
    dout, lse, delta = args[3:6]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _chunked.attention(query, key, value, operands, params.options)

    (out, _), pullback = jax.vjp(attend, query, key, value)
    return pullback((dout, row_sums(dout, out, lse.dtype) - delta))


@functools.cache
def _partitioned(pass_: str, platform: str, params: Params) -> Callable[..., Any]:
    """The call, split over devices along batch and heads; lengths and head_dim are gathered."""
    argument_dims, result_dims = _DIMS[pass_]
    argument_dims += tuple(dims for _, dims in params.operands)

    @custom_partitioning
    def attend(*args: jax.Array) -> tuple[jax.Array, ...]:
        return _call(pass_, platform, params, *args)

    def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        call = functools.partial(_call, pass_, platform, params)
        if mesh.empty:  # no mesh to split over, though there are several devices: all of them do all of it
            return mesh, call, tuple(x.sharding for x in results), tuple(x.sharding for x in args)
        spec = _spec(args[0])
        batch, heads = spec[0], spec[2]
        # Devices that share a key head would each need all of it: heads are split only where key's divide evenly.
        if args[1].shape[2] % _devices(mesh, heads):
            heads = None
        axes = {"b": batch, "n": heads, "k": heads}

        def sharding(dims: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) for dim in dims)))

        return (
            mesh,
            call,
            tuple(map(sharding, result_dims)),
            tuple(map(sharding, argument_dims)),
        )

    def rule(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        q_heads, kv_heads = arguments[0].shape[2], arguments[1].shape[2]
        # Two factors, not a compound one: that could split a key head, which `partition` has no sharding for, and it
        # must not have a part of size 1, as a single key head would make it.
        factors = {"n": "k"} if q_heads == kv_heads else {}

        def dims(names: Sequence[str]) -> str:
            return ", ".join(" ".join(factors.get(dim, dim) for dim in name) for name in names)

        text = f"{dims(argument_dims)} -> {dims(result_dims)}"
        return text, {"need_replication_factors": tuple(sorted("tsh", key=text.index))}

    attend.def_partition(partition=partition, sharding_rule=rule)
    return attend


def _spec(arg: Any) -> tuple[Any, ...]:
    spec = tuple(arg.sharding.spec)
    return spec + (None,) * (len(arg.shape) - len(spec))


def _devices(mesh: Mesh, axes: Any) -> int:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    count = 1
    for name in names:
        count *= mesh.shape[name]
    return count


def _lowering(pass_: str, platform: str, ctx: Any, *args: Any, params: Params) -> Any:
    # Errors belong to the lowering of this call, not to a callback of the partitioner.
    _explain.choose(params.implementation, platform, ctx.avals_in[0].dtype)
    return mlir.lower_fun(_partitioned(pass_, platform, params), multiple_results=True)(ctx, *args)


# Differentiation


def _refuse_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, params: Params) -> Any:
    """The kernels have the one derivative that attention() gives them; nobody else differentiates the primitives."""
    raise NotImplementedError(
        f"implementation={params.implementation!r} has first derivatives in reverse mode only: use "
        f"implementation='xla' for second derivatives and for forward mode"
    )


# Batching


def _batch(
    primitive: Primitive, pass_: str, args: Sequence[Any], axes: Sequence[int | None], *, params: Params
) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    results = _result_shapes(pass_, [_unmapped(x, axis) for x, axis in zip(args, axes, strict=True)])
    mapped = [axis is not None for axis in axes]

    if pass_ == "forward" and axes[0] is not None and not any(mapped[1:]):
        # Only the queries are mapped: they join the query heads of each key head, and no key is copied.
        query, key = jnp.moveaxis(args[0], axes[0], 0), args[1]
        batch, q_length, q_heads, head_dim = query.shape[1:]
        kv_heads, group = key.shape[2], q_heads // key.shape[2]
        query = query.reshape(size, batch, q_length, kv_heads, group, head_dim).transpose(1, 2, 3, 0, 4, 5)
        out, lse = primitive.bind(query.reshape(batch, q_length, size * q_heads, head_dim), *args[1:], params=params)
        out = out.reshape(batch, q_length, kv_heads, size, group, head_dim).transpose(3, 0, 1, 2, 4, 5)
        lse = lse.reshape(batch, kv_heads, size, group, q_length).transpose(2, 0, 1, 3, 4)
        return (out.reshape(size, *results[0].shape), lse.reshape(size, *results[1].shape)), (0, 0)

    # Otherwise the mapped axis joins the batch, the first dimension of every argument that has one.
    def merge(x: Any, axis: int | None) -> Any:
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        return x.reshape(size * x.shape[1], *x.shape[2:])

    merged = primitive.bind(*map(merge, args, axes), params=params)
    split = tuple(x.reshape(size, *shape.shape) for x, shape in zip(merged, results, strict=True))
    return split, (0,) * len(split)


def _unmapped(x: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    if axis is not None:
        del shape[axis]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _define(pass_: str) -> Primitive:
    primitive = Primitive(f"jax_flash_{pass_}")
    primitive.multiple_results = True
    primitive.def_impl(jax.jit(primitive.bind, static_argnames="params"))
    primitive.def_abstract_eval(functools.partial(_abstract_eval, pass_))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(_lowering, pass_, platform), platform=platform)
    mlir.register_lowering(primitive, functools.partial(_lowering, pass_, "other"))
    # Lowered to a partitioned function, it needs to see the devices; JAX has no public name for saying so.
    prim_requires_devices_during_lowering.add(primitive)
    ad.primitive_jvps[primitive] = _refuse_jvp
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive, pass_)
    return primitive


_forward_p = _define("forward")
_backward_p = _define("backward")
