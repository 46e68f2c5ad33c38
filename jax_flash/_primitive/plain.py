"""The primitives in plain JAX: for calls that no kernel serves, and for derivatives without a kernel."""

from __future__ import annotations

import functools

import jax

from jax_flash._call import dtypes
from jax_flash._implementations import chunked, varlen
from jax_flash._primitive.params import INPUTS, Params


def evaluate(pass_: str, params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    return {"forward": forward, "tangent": tangent, "backward": backward}[pass_](params, *args)


def forward(params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    inputs, operands, _ = params.split("forward", args)
    if params.limits is None:
        return chunked.attention(inputs["query"], inputs["key"], inputs["value"], operands, params.options)
    return varlen.attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        operands,
        params.options,
        *params.limits,
        attend=chunked.attention,
    )


def tangent(params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    inputs, operands, tangents = params.split("tangent", args)
    return _tangent_of(params)(**inputs, operands=operands, tangents=tangents, options=params.options)


def backward(params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    inputs, operands, _ = params.split("backward", args)
    wanted = (*INPUTS, *params.gradients)
    gradients = chunked.backward(
        **inputs, operands=operands, options=params.options, wanted=wanted, tangent=_tangent_of(params)
    )
    wide = dtypes.accumulation_dtype(inputs["query"].dtype)
    return tuple(gradients[name] if name in INPUTS else gradients[name].astype(wide) for name in wanted)


def _tangent_of(params: Params) -> chunked.Tangent:
    if params.limits is None:
        return chunked.tangent
    max_q_length, max_kv_length = params.limits
    return functools.partial(varlen.tangent, max_q_length=max_q_length, max_kv_length=max_kv_length)
