"""Derivatives of the primitives, to any order: forward --jvp--> tangent --transpose--> backward --transpose--> tangent.

`tangent` is linear in the tangents and `backward` in the cotangents, so each is the other's transpose, and first-order
reverse mode consists of the two kernels, without evaluating `tangent`. The dependence of the two on their other
arguments is differentiated in plain JAX, in O(T + S) memory (_implementations/chunked.py). out and lse are arguments of
both, so that second-order derivatives reach the inputs through them, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._call.options import OPERANDS
from jax_flash._implementations import scores, varying
from jax_flash._native.private import Primitive, ad, checkpoint_name
from jax_flash._primitive import plain
from jax_flash._primitive.params import ARGUMENTS, INPUTS, Params, in_order
from jax_flash.checkpoint_policies import LSE, OUT

Arrays = dict[str, jax.Array]


def define(forward_p: Primitive, tangent_p: Primitive, backward_p: Primitive) -> None:
    """Gives the primitives their rules."""

    def forward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, params: Params) -> Any:
        out, lse = forward_p.bind(*primals, params=params)
        # Named, so that remat policies can keep them.
        out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
        moved = _nonzero((*INPUTS, *params.names), tangents)
        if not moved:
            return [out, lse], [_zero(x) for x in (out, lse)]
        return [out, lse], _tangent(tangent_p, params, (*primals[:3], out, lse, *primals[3:]), moved)

    def tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, params: Params) -> Any:
        count = len(primals) - len(params.tangents)
        fixed, linear = primals[:count], primals[count:]
        terms = []
        if moved := _nonzero(params.tangents, tangents[count:]):
            terms.append(_tangent(tangent_p, params, fixed, moved))
        results = tangent_p.bind(*primals, params=params)
        others = (*tangents[:count], *map(_zero, linear))
        terms += _plain_jvp(functools.partial(plain.tangent, params), primals, others, results)
        return results, _added(results, terms)

    def backward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, params: Params) -> Any:
        names = list(ARGUMENTS["backward"])
        at = {name: names.index(name) for name in ("dout", "dlse")}
        terms: list[Sequence[Any]] = []
        if _nonzero(at, [tangents[i] for i in at.values()]):
            cotangents = list(primals)
            for i in at.values():
                cotangents[i] = _instantiated(tangents[i], primals[i])
            terms.append(backward_p.bind(*cotangents, params=params))
        others = [_zero(p) if i in at.values() else t
                  for i, (p, t) in enumerate(zip(primals, tangents, strict=True))]  # fmt: skip
        results = backward_p.bind(*primals, params=params)
        terms += _plain_jvp(functools.partial(plain.backward, params), primals, others, results)
        return results, _added(results, terms)

    def tangent_transpose(cotangents: Sequence[Any], *args: Any, params: Params) -> Any:
        count = len(args) - len(params.tangents)
        inputs, operands, linear = params.split("tangent", args)
        unknown = {name for name, x in linear.items() if ad.is_undefined_primal(x)}
        if all(type(x) is ad.Zero for x in cotangents):
            return [None] * count + [ad.Zero(x.aval) if name in unknown else None for name, x in linear.items()]
        results = (inputs["out"], inputs["lse"])
        dout, dlse = (_instantiated(x, result) for x, result in zip(cotangents, results, strict=True))
        found = gradients(backward_p, params, inputs | {"dout": dout, "dlse": dlse}, operands, unknown)
        return [None] * count + [
            _split_alike(found[name].astype(x.aval.dtype), x.aval) if name in unknown else None
            for name, x in linear.items()
        ]

    def backward_transpose(cotangents: Sequence[Any], *args: Any, params: Params) -> Any:
        inputs, operands, _ = params.split("backward", args)
        wanted = [ad.is_undefined_primal(inputs[name]) for name in ("dout", "dlse")]
        moved = {
            name: ct.astype(operands[name].dtype if name in operands else ct.dtype)
            for name, ct in _nonzero((*INPUTS, *params.gradients), cotangents).items()
        }
        names = [*inputs, *operands]
        result: dict[str, Any] = dict.fromkeys(names)
        if moved:
            fixed = [inputs[name] for name in ARGUMENTS["tangent"]]
            terms = _tangent(tangent_p, params, (*fixed, *operands.values()), moved)
        else:
            terms = [ad.Zero(inputs[name].aval) if is_wanted else None
                     for name, is_wanted in zip(("dout", "dlse"), wanted, strict=True)]  # fmt: skip
        for name, term, is_wanted in zip(("dout", "dlse"), terms, wanted, strict=True):
            result[name] = term if is_wanted else None
        return [result[name] for name in names]

    ad.primitive_jvps[forward_p] = forward_jvp
    ad.primitive_jvps[tangent_p] = tangent_jvp
    ad.primitive_jvps[backward_p] = backward_jvp
    ad.primitive_transposes[tangent_p] = tangent_transpose
    ad.primitive_transposes[backward_p] = backward_transpose


def _tangent(tangent_p: Primitive, params: Params, fixed: Sequence[Any], moved: Arrays) -> Any:
    params = dataclasses.replace(params, gradients=(), tangents=tuple(moved))
    return tangent_p.bind(*fixed, *moved.values(), params=params)


def _nonzero(names: Collection[str], tangents: Sequence[Any]) -> Arrays:
    """The nonzero tangents, by name."""
    return {name: t for name, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero}


def _zero(primal: Any) -> Any:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _instantiated(tangent: Any, like: jax.Array) -> jax.Array:
    if type(tangent) is not ad.Zero:
        return tangent
    zeros: jax.Array = varying.vary_alike(jnp.zeros_like(like), like)
    return zeros


def _plain_jvp(
    function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any]
) -> list[Sequence[Any]]:
    """The tangents of ``function``'s ``results`` in a list of one, or no entry if all ``tangents`` are zero."""
    moved = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not moved:
        return []
    function = varying.on_automatic_axes(function, results)

    def of_moved(*xs: Any) -> Any:
        everything = list(primals)
        for i, x in zip(moved, xs, strict=True):
            everything[i] = x
        return function(*everything)

    return [jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])[1]]


def _added(results: Sequence[Any], terms: Sequence[Sequence[Any]]) -> list[Any]:
    if not terms:
        return [_zero(x) for x in results]
    return [sum(xs[1:], start=xs[0]) for xs in zip(*terms, strict=True)]


# The backward pass around the kernels


def gradients(
    backward_p: Primitive, params: Params, inputs: Arrays, operands: Arrays, wanted: Collection[str]
) -> Arrays:
    """The gradients of the ``wanted`` inputs and operands, and maybe of others."""
    # A bias that all keys of a row share only shifts the row's lse, so its gradient needs no kernel, unless a score
    # function comes behind it, or these are not all keys.
    scored = params.options.functions is not None and params.options.functions.score is not None
    of_rows = "bias" in wanted and operands["bias"].shape[3] == 1 and not (scored or params.options.partial_keys)
    by_kernel = {name for name in wanted if name in operands and OPERANDS[name].trainable}
    params = dataclasses.replace(
        params, tangents=(), gradients=in_order(by_kernel - {"bias"} if of_rows else by_kernel)
    )
    results = backward_p.bind(*(inputs[name] for name in ARGUMENTS["backward"]), *operands.values(), params=params)
    found: Arrays = dict(zip((*INPUTS, *params.gradients), results, strict=True))
    if of_rows or "sinks" in wanted:
        row_sums = delta(inputs["dout"], inputs["lse"], inputs["dlse"], inputs["out"])
    if of_rows:
        found["bias"] = rows_gradient(operands, inputs["lse"], row_sums, inputs["dlse"])
    if "sinks" in wanted:
        found["sinks"] = _sinks_gradient(operands, inputs["lse"], row_sums)
    return found


def delta(dout: jax.Array, lse: jax.Array, dlse: jax.Array, out: jax.Array) -> jax.Array:
    """[B, N, T]: ds = p * (dp - delta) with delta = rowsum(dout * out) - dlse.

    d lse / d score is the softmax itself, so its cotangent joins the row sum of FlashAttention-2 (equation 4).
    """

    def row_sums(dout: jax.Array, out: jax.Array) -> jax.Array:
        return jnp.swapaxes((dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(axis=-1), 1, 2)

    def by_halves(dout: jax.Array, out: jax.Array) -> jax.Array:
        # XLA vectorises these additions, but not a sum over the last axis: 0.18 ms instead of 3.5 for (1, 1024, 16,
        # 64).
        x = dout.astype(lse.dtype) * out.astype(lse.dtype)
        while x.shape[-1] % 2 == 0 and x.shape[-1] > 4:
            x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
        return jnp.swapaxes(x.sum(axis=-1), 1, 2)

    sums: jax.Array = jax.lax.platform_dependent(dout, out, cpu=by_halves, default=row_sums)
    return sums - dlse


def _sinks_gradient(operands: Mapping[str, jax.Array], lse: jax.Array, delta: jax.Array) -> jax.Array:
    """[B, N]: a sink is a score without a value, so its ds is p * (0 - delta)."""
    return -_without_padding(operands, scores.sink_weights(operands, lse) * delta).sum(axis=-1)


def rows_gradient(operands: Mapping[str, jax.Array], lse: jax.Array, delta: jax.Array, dlse: jax.Array) -> jax.Array:
    """The gradient of a bias [b, n, t, 1]: sum of ds over the keys of a row, whose p sum to 1 less the sink's weight.

    It is rowsum(p * dp) - delta * rowsum(p), where rowsum(p * dp) = delta + dlse (FlashAttention-2, equation 4).
    """
    rows = dlse + scores.sink_weights(operands, lse) * delta if "sinks" in operands else dlse
    rows = _without_padding(operands, jnp.where(jnp.isneginf(lse), 0.0, rows))[..., None]
    shared = tuple(i for i, n in enumerate(operands["bias"].shape) if n == 1)
    return rows.sum(axis=shared, keepdims=True)


def _without_padding(operands: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """[B, N, T] with 0 in padding rows, where cotangents may be anything."""
    within = scores.rows_within(operands, "q", x.shape[-1])
    return x if within is None else jnp.where(within[:, None], x, 0.0)


def _split_alike(gradient: jax.Array, aval: Any) -> jax.Array:
    """On a mesh of explicit axes a gradient must be split as its operand is, perhaps along fewer axes than query."""
    wanted = aval.sharding
    if wanted.mesh.empty or tuple(wanted.spec) == tuple(jax.typeof(gradient).sharding.spec):
        return gradient
    resharded: jax.Array = jax.sharding.reshard(gradient, wanted)
    return resharded
