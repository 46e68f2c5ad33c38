"""vmap: the mapped axis joins the batch, or the query heads if only the queries are mapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._call.options import is_captured
from jax_flash._native.private import Primitive
from jax_flash._primitive import plain
from jax_flash._primitive.params import ARGUMENTS, Params, result_shapes


def batch(
    primitive: Primitive, pass_: str, args: Sequence[Any], axes: Sequence[int | None], *, params: Params
) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    results = result_shapes(pass_, params, [_unmapped(x, axis) for x, axis in zip(args, axes, strict=True)])
    mapped = [axis is not None for axis in axes]
    fixed, count = len(ARGUMENTS[pass_]), len(params.operands)
    per_head = any("n" in dims for _, dims in params.operands)

    functions = params.options.functions
    if pass_ == "forward" and axes[0] is not None and not any(mapped[1:]) and not per_head and functions is None:
        # Only the queries are mapped: they join the query heads of each key head, and no key is copied.
        query, key = jnp.moveaxis(args[0], axes[0], 0), args[1]
        batch, q_length, q_heads, head_dim = query.shape[1:]
        kv_heads, group = key.shape[2], q_heads // key.shape[2]
        query = query.reshape(size, batch, q_length, kv_heads, group, head_dim).transpose(1, 2, 3, 0, 4, 5)
        out, lse = primitive.bind(query.reshape(batch, q_length, size * q_heads, head_dim), *args[1:], params=params)
        out = out.reshape(batch, q_length, kv_heads, size, group, args[2].shape[3]).transpose(3, 0, 1, 2, 4, 5)
        lse = lse.reshape(batch, kv_heads, size, group, q_length).transpose(2, 0, 1, 3, 4)
        return (out.reshape(size, *results[0].shape), lse.reshape(size, *results[1].shape)), (0, 0)

    if pass_ == "tangent" and not any(mapped[: fixed + count]):
        # Many tangents at one point, as in jacfwd and hessian, share the weights.
        def of_one(*tangents: jax.Array) -> tuple[jax.Array, ...]:
            return plain.tangent(params, *args[: fixed + count], *tangents)

        return jax.vmap(of_one, in_axes=axes[fixed + count :])(*args[fixed + count :]), (0,) * len(results)

    # Otherwise the mapped axis joins the batch, the first dimension of every argument. An operand that the batch shares
    # stays shared, unless it is mapped, or has a gradient or a tangent, which differ for each of the mapped calls.
    batch = _unmapped(args[0], axes[0]).shape[0]
    of_their_own = (*params.gradients, *params.tangents)
    stays = {name for (name, dims), axis in zip(params.operands, axes[fixed : fixed + count], strict=True)
             if dims[0] == "1" and axis is None and name not in of_their_own}  # fmt: skip

    dims_before = dict(params.operands)
    calls = 1  # that earlier maps have joined in the batch
    if functions is not None:
        calls = batch // (functions.batch or batch)
        # A function's array that is not mapped is one of all calls, unless its gradients differ.
        stays |= {
            name
            for (name, dims), axis in zip(params.operands, axes[fixed : fixed + count], strict=True)
            if is_captured(name) and "m" not in dims and axis is None and name not in of_their_own
        }
        functions = dataclasses.replace(functions, batch=functions.batch or batch)

    def merge(x: Any, axis: int | None, name: str | None) -> Any:
        if name in stays:
            return x
        if name is not None and is_captured(name):
            x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            if "m" not in dims_before[name]:
                x = jnp.broadcast_to(x[:, None], (size, calls, *x.shape[1:]))
            return x.reshape(size * calls, *x.shape[2:])
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        if x.shape[1] != batch:
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    def merged_dims(name: str, dims: str) -> str:
        if name in stays:
            return dims
        if is_captured(name):
            return dims if "m" in dims else "m" + dims
        return "b" + dims[1:]

    merged_params = dataclasses.replace(
        params,
        options=dataclasses.replace(params.options, functions=functions),
        operands=tuple((name, merged_dims(name, dims)) for name, dims in params.operands),
    )
    names = [None] * fixed + params.names + list(params.tangents)
    merged = primitive.bind(*map(merge, args, axes, names), params=merged_params)
    split = []
    gradients = (None,) * (len(merged) - len(params.gradients)) + params.gradients
    for x, shape, name in zip(merged, results, gradients, strict=True):
        if name is not None and is_captured(name):
            x = x.reshape(size, calls, *x.shape[1:])
            split.append(x if "m" in dims_before[name] else x.sum(axis=1))
            continue
        x = x.reshape(size, batch, *x.shape[1:])
        # The gradient of an operand that the batch shared is the sum over the batch.
        split.append(x.sum(axis=1, keepdims=True) if shape.shape[0] != batch else x)
    return tuple(split), (0,) * len(split)


def _unmapped(x: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    if axis is not None:
        del shape[axis]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
