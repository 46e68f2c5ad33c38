"""The primitives of attention: forward, tangent and backward, and their rules.

    forward:  (q, k, v, *operands) -> (out, lse)
    tangent:  (q, k, v, out, lse, *operands, *tangents of inputs and operands) -> (tangent of out, tangent of lse)
    backward: (q, k, v, dout, lse, dlse, out, *operands) -> (dq, dk, dv, *gradients of operands)

q, dq are [B, T, N, H]; k, dk [B, S, K, H]; v, dv [B, S, K, V]; out, dout [B, T, N, V]; lse and dlse [B, N, T]. The
option record and the operands pass through unread.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jax_flash._call.options import Options
from jax_flash._implementations import choice
from jax_flash._native.private import Primitive, apply_primitive, mlir, prim_requires_devices_during_lowering
from jax_flash._native.private import batching as jax_batching
from jax_flash._primitive import derivatives, lowering, params, partitioning
from jax_flash._primitive.batching import batch


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
    """out and lse, differentiable to any order in the inputs and the trainable operands."""
    of_call, arrays = params.params_of(options, operands, implementation, limits)
    out, lse = _forward_p.bind(query, key, value, *arrays, params=of_call)
    return out, lse


def tangent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    operands: Mapping[str, jax.Array],
    tangents: Mapping[str, jax.Array],
    *,
    options: Options,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse, linear in ``tangents`` of inputs and operands; its transpose is `backward`.

    With ``options.partial_keys`` out and lse are those of more keys than these, and the results add up to theirs.
    """
    of_call, arrays = params.params_of(options, operands, implementation, None)
    names = [name for name in (*params.INPUTS, *of_call.names) if name in tangents]
    of_call = dataclasses.replace(of_call, tangents=tuple(names))
    moved = [tangents[name] for name in names]
    out, lse = _tangent_p.bind(query, key, value, out, lse, *arrays, *moved, params=of_call)
    return out, lse


def backward(
    inputs: Mapping[str, jax.Array],
    operands: Mapping[str, jax.Array],
    wanted: Collection[str],
    *,
    options: Options,
    implementation: str | None,
) -> dict[str, jax.Array]:
    """The gradients of the inputs and operands in ``wanted``; ``inputs`` are those of the primitive by name."""
    of_call, arrays = params.params_of(options, operands, implementation, None)
    in_order = dict(zip(of_call.names, arrays, strict=True))
    found = derivatives.gradients(_backward_p, of_call, dict(inputs), in_order, wanted)
    return {name: found[name] for name in wanted}


def _lowering(pass_: str, platform: str, ctx: Any, *args: Any, params: params.Params) -> Any:
    # Choose here, so that errors come from the lowering of this call and not from a callback of the partitioner.
    query, value = ctx.avals_in[0], ctx.avals_in[2]
    choice.choose(params.implementation, platform, choice.Call.of(query, value, params.options))
    target = lowering.Target(platform, portable=ctx.module_context.lowering_parameters.for_export)
    return mlir.lower_fun(partitioning.partitioned(pass_, target, params), multiple_results=True)(ctx, *args)


def _define(pass_: str) -> Primitive:
    primitive = Primitive(f"jax_flash_{pass_}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    primitive.def_abstract_eval(functools.partial(params.abstract_eval, pass_))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(_lowering, pass_, platform), platform=platform)
    mlir.register_lowering(primitive, functools.partial(_lowering, pass_, "other"))
    # Its lowering is a partitioned function, which needs the devices; JAX has no public name to request them.
    prim_requires_devices_during_lowering.add(primitive)
    jax_batching.primitive_batchers[primitive] = functools.partial(batch, primitive, pass_)
    return primitive


_forward_p, _tangent_p, _backward_p = map(_define, ("forward", "tangent", "backward"))
derivatives.define(_forward_p, _tangent_p, _backward_p)
