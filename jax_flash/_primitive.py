"""The forward and backward primitives: shapes, lowering per platform, batching, sharding.

    forward:  (q, k, v, *operands) -> (out, lse)
    backward: (q, k, v, dout, lse, dlse, out, *operands) -> (dq, dk, dv, *gradients of operands)

q, dq are [B, T, N, H]; k, dk [B, S, K, H]; v, dv [B, S, K, V]; out, dout [B, T, N, V]; lse and dlse [B, N, T]. The
option record and the operands pass through without a look at what is in them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_flash import _chunked, _core, _dtypes, _explain, _half, _registration, _varlen
from jax_flash._options import OPERANDS, Options
from jax_flash._private import (
    Primitive,
    ShapedArray,
    ad,
    apply_primitive,
    batching,
    custom_partitioning,
    mlir,
    prim_requires_devices_during_lowering,
)

# Dimensions of every fixed argument and result: b batch, t and s lengths, n and k heads, h and v head dims. Operands
# have their letters in _options.py; a dimension of size 1 that is broadcast is written 1.
_DIMS = {"forward": (("btnh", "bskh", "bskv"), ("btnv", "bnt")),
         "backward": (("btnh", "bskh", "bskv", "btnv", "bnt", "bnt", "btnv"), ("btnh", "bskh", "bskv"))}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of both primitives."""

    options: Options
    operands: tuple[tuple[str, str], ...]  # (name, dims) of the operands that are there, in the library's order
    gradients: tuple[str, ...]  # the operands whose gradients are results, in the same order; backward only
    implementation: str | None
    limits: tuple[int, int] | None  # longest query and key document of a packed call

    def argument_dims(self, pass_: str) -> tuple[str, ...]:
        return _DIMS[pass_][0] + tuple(dims for _, dims in self.operands)

    def result_dims(self, pass_: str) -> tuple[str, ...]:
        return _DIMS[pass_][1] + tuple(dict(self.operands)[name] for name in self.gradients)


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Mapping[str, jax.Array],
    *,
    options: Options,
    implementation: str | None,
    limits: tuple[int, int] | None,
) -> tuple[jax.Array, jax.Array]:
    params, arrays = _params(options, operands, (), implementation, limits)
    out, lse = _forward_p.bind(query, key, value, *arrays, params=params)
    return out, lse


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    dlse: jax.Array,
    out: jax.Array,
    operands: Mapping[str, jax.Array],
    *,
    gradients: Collection[str],
    options: Options,
    implementation: str | None,
    limits: tuple[int, int] | None,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """dq, dk, dv, and the gradients of the operands named in ``gradients``, in the accumulation dtype."""
    params, arrays = _params(options, operands, gradients, implementation, limits)
    dquery, dkey, dvalue, *rest = _backward_p.bind(query, key, value, dout, lse, dlse, out, *arrays, params=params)
    return dquery, dkey, dvalue, dict(zip(params.gradients, rest, strict=True))


def delta(dout: jax.Array, lse: jax.Array, dlse: jax.Array, out: jax.Array) -> jax.Array:
    """[B, N, T]: ds = p * (dp - delta) with delta = rowsum(dout * out) - dlse.

    d lse / d score is the softmax itself, so its cotangent joins the row sum of FlashAttention-2 (equation 4).
    """

    def plain(dout: jax.Array, out: jax.Array) -> jax.Array:
        return jnp.swapaxes((dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(axis=-1), 1, 2)

    def by_halves(dout: jax.Array, out: jax.Array) -> jax.Array:
        # XLA makes vector instructions of these, but not of a sum over the last axis: 0.18 ms instead of 3.5 for
        # (1, 1024, 16, 64).
        x = dout.astype(lse.dtype) * out.astype(lse.dtype)
        while x.shape[-1] % 2 == 0 and x.shape[-1] > 4:
            x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
        return jnp.swapaxes(x.sum(axis=-1), 1, 2)

    sums: jax.Array = jax.lax.platform_dependent(dout, out, cpu=by_halves, default=plain)
    return sums - dlse


def _params(
    options: Options,
    operands: Mapping[str, jax.Array],
    gradients: Collection[str],
    implementation: str | None,
    limits: tuple[int, int] | None,
) -> tuple[Params, list[jax.Array]]:
    def dims(name: str) -> str:
        declared = OPERANDS[name]
        if not declared.broadcast:
            return declared.dims
        return "".join("1" if n == 1 else d for d, n in zip(declared.dims, operands[name].shape, strict=True))

    names = [name for name, _ in _core.OPERANDS if name in operands]
    params = Params(
        options,
        tuple((name, dims(name)) for name in names),
        tuple(name for name in names if name in gradients),
        implementation,
        limits,
    )
    return params, [operands[name] for name in names]


# Shapes


def _result_shapes(pass_: str, params: Params, avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    query, key, value = avals[:3]
    wide = _dtypes.accumulation_dtype(query.dtype)
    if pass_ == "backward":
        operands = dict(zip(_names(params), avals[len(_DIMS[pass_][0]) :], strict=True))
        return (
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)),
            *(jax.ShapeDtypeStruct(operands[name].shape, wide) for name in params.gradients),
        )
    batch, q_length, q_heads, _ = query.shape
    return (
        jax.ShapeDtypeStruct((batch, q_length, q_heads, value.shape[-1]), query.dtype),
        jax.ShapeDtypeStruct((batch, q_heads, q_length), wide),
    )


def _names(params: Params) -> list[str]:
    return [name for name, _ in params.operands]


def _abstract_eval(pass_: str, *avals: Any, params: Params) -> tuple[Any, ...]:
    query, key = avals[:2]
    # Split over batch and heads as the arguments are, and inside shard_map varying as they are.
    axes = {"b": query.sharding.spec[0], "n": query.sharding.spec[2], "k": key.sharding.spec[2]}

    def result(x: jax.ShapeDtypeStruct, dims: str) -> Any:
        sharding = query.sharding.update(spec=PartitionSpec(*(axes.get(dim) for dim in dims)))
        return query.update(shape=x.shape, dtype=x.dtype, sharding=sharding, weak_type=False)

    return tuple(map(result, _result_shapes(pass_, params, avals), params.result_dims(pass_)))


# Lowering


def _call(pass_: str, platform: str, params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    """What one device runs: a custom call, or plain JAX where no kernel serves the call."""
    if 0 in args[0].shape:  # vmap over an axis of size 0; the kernels want one problem at least
        return tuple(jnp.zeros(x.shape, x.dtype) for x in _result_shapes(pass_, params, args))
    chosen = _explain.choose(params.implementation, platform, _explain.Call.of(args[0], args[2], params.options))
    results = _result_shapes(pass_, params, args)
    if chosen == "cuda":
        if pass_ == "backward":
            args = (*args[:5], delta(*args[3:7]), *args[6:])
        dtype = args[0].dtype
        if dtype == jnp.float32 or (dtype == jnp.bfloat16 and _explain.has_old_gpu()):
            wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in results]
            called = _aligned(pass_, params, wide, functools.partial(_half_precision, pass_, params), *args)
            return tuple(x.astype(result.dtype) for x, result in zip(called, results, strict=True))
        return _aligned(pass_, params, results, functools.partial(_custom_call, pass_, chosen, params), *args)
    if chosen == "cpu":
        return _custom_call(pass_, chosen, params, results, *args)
    return _plain(pass_, params, *args)


def _half_precision(
    pass_: str, params: Params, results: Sequence[jax.ShapeDtypeStruct], *args: jax.Array
) -> tuple[jax.Array, ...]:
    """The custom call for CUDA on float16 arrays, with delta for dlse; its results are float32."""
    fixed = len(_DIMS[pass_][0])
    operands = dict(zip(_names(params), args[fixed:], strict=True))
    gradients = (args[3], args[5]) if pass_ == "backward" else ()
    if "bias" in operands:
        operands["bias"] = operands["bias"].astype(jnp.float32)
    halves, operands["unscales"] = _half.scaled(params.options, operands, *args[:3], *gradients)
    dims = {**dict(params.operands), "unscales": OPERANDS["unscales"].dims}
    names = [name for name, _ in _core.OPERANDS if name in operands]
    params = dataclasses.replace(
        params,
        options=dataclasses.replace(params.options, wide_bias="bias" in operands),
        operands=tuple((name, dims[name]) for name in names),
    )
    args = (*halves, *args[len(halves) : fixed], *(operands[name] for name in names))
    return _custom_call(pass_, "cuda", params, results, *args)


def _custom_call(
    pass_: str, platform: str, params: Params, results: Sequence[jax.ShapeDtypeStruct], *args: jax.Array
) -> tuple[jax.Array, ...]:
    shapes = tuple(x.shape for x in results)
    if pass_ == "backward" and platform == "cuda" and not params.gradients:
        # Kernels that add nothing to dq want no accumulator. Said here, where arrays are made, and by an option that
        # every GPU serves: what is exported runs on those that would rather add.
        separate = _explain.separate_dq(max(args[0].shape[-1], args[2].shape[-1]))
        options = dataclasses.replace(params.options, deterministic=params.options.deterministic or separate)
        params = dataclasses.replace(params, options=options)
    attributes = _attributes(params)
    if platform == "cuda" and "bias" in params.gradients and dict(params.operands)["bias"][2] == "1":
        # Of a bias that all rows share, the kernels leave a sum for every batch entry and head.
        batch, _, q_heads, _ = args[0].shape
        at = len(_DIMS[pass_][1]) + params.gradients.index("bias")
        results = list(results)
        results[at] = jax.ShapeDtypeStruct((batch, q_heads, *shapes[at][2:]), results[at].dtype)
    if scratch := _scratch(pass_, platform, params, attributes, *args):
        results = (
            *results,
            jax.ShapeDtypeStruct((scratch,), results[1].dtype if pass_ == "forward" else args[4].dtype),
        )
    if pass_ == "backward" and platform == "cuda":
        args = (*args[:6], *args[7:])  # these kernels take delta, which stands in dlse's place, for dlse and out
    target = _registration.FORWARD_TARGET if pass_ == "forward" else _registration.BACKWARD_TARGET
    called = jax.ffi.ffi_call(target, results)(*args, **attributes)
    return tuple(_summed_to(shape, x) for shape, x in zip(shapes, called, strict=False))


def _summed_to(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    axes = tuple(i for i, (wanted, n) in enumerate(zip(shape, x.shape, strict=True)) if wanted != n)
    return x.sum(axis=axes, keepdims=True) if axes else x


def _attributes(params: Params) -> dict[str, Any]:
    """The record by name, as the handlers decode it: int32 for ints."""
    attributes: dict[str, Any] = {
        name: np.int32(x) if type(x) is int else x for name, x in dataclasses.asdict(params.options).items()
    }
    attributes.update({f"has_{name}": name in _names(params) for name in OPERANDS})
    attributes.update({f"has_d{name}": name in params.gradients for name, x in OPERANDS.items() if x.trainable})
    return attributes


def _scratch(pass_: str, platform: str, params: Params, attributes: Mapping[str, Any], *args: jax.Array) -> int:
    query, key, value = args[:3]
    batch, q_length, q_heads, head_dim = query.shape
    operands = dict(zip(_names(params), args[len(_DIMS[pass_][0]) :], strict=True))
    elements: int = _core.scratch(
        pass_=pass_,
        platform=platform,
        dtype=query.dtype.name,
        options={name: int(x) if isinstance(x, np.int32) else x for name, x in attributes.items()},
        batch=batch,
        q_length=q_length,
        kv_length=key.shape[1],
        q_heads=q_heads,
        kv_heads=key.shape[2],
        head_dim=head_dim,
        value_head_dim=value.shape[3],
        bias_shape=operands["bias"].shape if "bias" in operands else (),
    )
    return elements


def _aligned(
    pass_: str,
    params: Params,
    results: Sequence[jax.ShapeDtypeStruct],
    call: Callable[..., tuple[jax.Array, ...]],
    *args: jax.Array,
) -> tuple[jax.Array, ...]:
    """Calls with head dims padded by zeros to the next multiple of 8, so that every row starts on 16 bytes."""
    sizes = {"h": args[0].shape[-1], "v": args[2].shape[-1]}

    def missing(dims: str) -> int:
        return -sizes.get(dims[-1], 0) % 8

    def pad(x: jax.Array, dims: str) -> jax.Array:
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing(dims)),)) if missing(dims) else x

    dims = params.result_dims(pass_)
    padded = [
        jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + missing(d)), x.dtype)
        for x, d in zip(results, dims, strict=True)
    ]
    called = call(padded, *map(pad, args, params.argument_dims(pass_)))
    return tuple(x[..., : sizes[d[-1]]] if d[-1] in sizes else x for x, d in zip(called, dims, strict=True))


def _plain(pass_: str, params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    """The primitive in plain JAX; the backward is JAX's own derivative of the forward."""
    operands = dict(zip(_names(params), args[len(_DIMS[pass_][0]) :], strict=True))
    trained = {name: operands[name] for name in params.gradients}

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, trained: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        everything = {**operands, **trained}
        if params.limits is None:
            return _chunked.attention(query, key, value, everything, params.options)
        return _varlen.attention(query, key, value, everything, params.options, *params.limits, _chunked.attention)

    query, key, value = args[:3]
    if pass_ == "forward":
        return attend(query, key, value, trained)
    dout, lse, dlse = args[3:6]
    _, pullback = jax.vjp(attend, query, key, value, trained)
    *gradients, dtrained = pullback((dout, dlse))
    return (*gradients, *(dtrained[name].astype(lse.dtype) for name in params.gradients))


@functools.cache
def _partitioned(pass_: str, platform: str, params: Params) -> Callable[..., Any]:
    """The call, split over devices along batch and heads; lengths and head dims are gathered."""
    argument_dims, result_dims = params.argument_dims(pass_), params.result_dims(pass_)

    @custom_partitioning
    def attend(*args: jax.Array) -> tuple[jax.Array, ...]:
        return _call(pass_, platform, params, *args)

    def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        call = functools.partial(_call, pass_, platform, params)
        if mesh.empty:  # no mesh to split over, though there are several devices: all of them do all of it
            return (
                mesh,
                functools.partial(_apart, call),
                tuple(x.sharding for x in results),
                tuple(x.sharding for x in args),
            )
        spec = _spec(args[0])
        batch, heads = spec[0], spec[2]
        # Devices that share a key head would each need all of it: heads are split only where key's divide evenly.
        if args[1].shape[2] % _devices(mesh, heads):
            heads = None
        axes = {"b": batch, "n": heads, "k": heads}

        def sharding(dims: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) for dim in dims)))

        def summed(*args: jax.Array) -> tuple[jax.Array, ...]:
            """The gradient of an operand that several devices share is the sum over them."""
            results = list(call(*args))
            for i, dims in enumerate(result_dims[len(_DIMS[pass_][1]) :], len(_DIMS[pass_][1])):
                shared = _mesh_axes(*(axes[dim] for dim in "bn" if dim not in dims))
                results[i] = jax.lax.psum(results[i], shared) if shared else results[i]
            return tuple(results)

        return (
            mesh,
            functools.partial(_apart, summed),
            tuple(map(sharding, result_dims)),
            tuple(map(sharding, argument_dims)),
        )

    def rule(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        q_heads, kv_heads = arguments[0].shape[2], arguments[1].shape[2]
        # Two factors, not a compound one: that could split a key head, which `partition` has no sharding for, and it
        # must not have a part of size 1, as a single key head would make it.
        letters = {"2": "pair"} | ({"n": "k"} if q_heads == kv_heads else {})
        order: dict[str, None] = {}

        def factors(dims: str, name: str) -> str:
            found = [f"{name}{i}" if dim == "1" else letters.get(dim, dim) for i, dim in enumerate(dims)]
            order.update(dict.fromkeys(found))
            return " ".join(found)

        fixed_arguments, fixed_results = _DIMS[pass_]
        names = ["x"] * len(fixed_arguments) + [f"{name}_" for name in _names(params)]
        left = ", ".join(map(factors, argument_dims, names))
        names = ["x"] * len(fixed_results) + [f"{name}_" for name in params.gradients]
        right = ", ".join(map(factors, result_dims, names))
        return f"{left} -> {right}", {"need_replication_factors": tuple(x for x in order if x not in "bnk")}

    attend.def_partition(partition=partition, sharding_rule=rule)
    return attend


# What one device runs knows nothing of the mesh that the surrounding program is traced with: where its axes are
# explicit, jax 0.11 would put a sharding behind every operation, a sum or the addition within a psum, and XLA's
# partitioner, by then, leaves it there for somebody to run. Traced and lowered both, hence by a primitive.

_NO_MESH = AbstractMesh((), ())


def _apart(run: Callable[..., tuple[jax.Array, ...]], *args: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_part_p.bind(*args, run=run))


def _part_shapes(*avals: Any, run: Callable[..., Any]) -> list[Any]:
    with use_abstract_mesh(_NO_MESH):
        return [ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(run, *avals)]


def _part_lowering(ctx: Any, *args: Any, run: Callable[..., Any]) -> Any:
    with use_abstract_mesh(_NO_MESH):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


_part_p = Primitive("jax_flash_part")
_part_p.multiple_results = True
_part_p.def_abstract_eval(_part_shapes)
mlir.register_lowering(_part_p, _part_lowering)


def _spec(arg: Any) -> tuple[Any, ...]:
    spec = tuple(arg.sharding.spec)
    return spec + (None,) * (len(arg.shape) - len(spec))


def _mesh_axes(*specs: Any) -> tuple[Any, ...]:
    """The names in entries of a PartitionSpec."""
    return tuple(name for spec in specs if spec is not None for name in (spec if isinstance(spec, tuple) else (spec,)))


def _devices(mesh: Mesh, spec: Any) -> int:
    count = 1
    for name in _mesh_axes(spec):
        count *= mesh.shape[name]
    return count


def _lowering(pass_: str, platform: str, ctx: Any, *args: Any, params: Params) -> Any:
    # Errors belong to the lowering of this call, not to a callback of the partitioner.
    _explain.choose(params.implementation, platform, _explain.Call.of(ctx.avals_in[0], ctx.avals_in[2], params.options))
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
    results = _result_shapes(pass_, params, [_unmapped(x, axis) for x, axis in zip(args, axes, strict=True)])
    mapped = [axis is not None for axis in axes]
    per_head = any("n" in dims for _, dims in params.operands)

    if pass_ == "forward" and axes[0] is not None and not any(mapped[1:]) and not per_head:
        # Only the queries are mapped: they join the query heads of each key head, and no key is copied.
        query, key = jnp.moveaxis(args[0], axes[0], 0), args[1]
        batch, q_length, q_heads, head_dim = query.shape[1:]
        kv_heads, group = key.shape[2], q_heads // key.shape[2]
        query = query.reshape(size, batch, q_length, kv_heads, group, head_dim).transpose(1, 2, 3, 0, 4, 5)
        out, lse = primitive.bind(query.reshape(batch, q_length, size * q_heads, head_dim), *args[1:], params=params)
        out = out.reshape(batch, q_length, kv_heads, size, group, args[2].shape[3]).transpose(3, 0, 1, 2, 4, 5)
        lse = lse.reshape(batch, kv_heads, size, group, q_length).transpose(2, 0, 1, 3, 4)
        return (out.reshape(size, *results[0].shape), lse.reshape(size, *results[1].shape)), (0, 0)

    # Otherwise the mapped axis joins the batch, the first dimension of every argument. An operand that the batch
    # shares stays so, unless it is mapped or has a gradient, which each of the mapped calls has for itself.
    batch = _unmapped(args[0], axes[0]).shape[0]
    stays = {name for (name, dims), axis in zip(params.operands, axes[len(_DIMS[pass_][0]) :], strict=True)
             if dims[0] == "1" and axis is None and name not in params.gradients}  # fmt: skip

    def merge(x: Any, axis: int | None, name: str | None) -> Any:
        if name in stays:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        if x.shape[1] != batch:
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    merged_params = dataclasses.replace(
        params, operands=tuple((name, dims if name in stays else "b" + dims[1:]) for name, dims in params.operands)
    )
    names = [None] * len(_DIMS[pass_][0]) + _names(params)
    merged = primitive.bind(*map(merge, args, axes, names), params=merged_params)
    split = []
    for x, shape in zip(merged, results, strict=True):
        x = x.reshape(size, batch, *x.shape[1:])
        # The gradient of what the batch shared is the sum over it.
        split.append(x.sum(axis=1, keepdims=True) if shape.shape[0] != batch else x)
    return tuple(split), (0,) * len(split)


def _unmapped(x: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    if axis is not None:
        del shape[axis]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _define(pass_: str) -> Primitive:
    primitive = Primitive(f"jax_flash_{pass_}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(apply_primitive, primitive))
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
