"""The static parameters of the primitives, and the shapes, dtypes and shardings of their arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_flash._call import dtypes
from jax_flash._call.options import CAPTURED, OPERANDS, Options
from jax_flash._native import _core

# Dimensions of every fixed argument and result: b batch, t and s lengths, n and k heads, h and v head dims. Operands
# have their letters in _call/options.py; a dimension of size 1 that is broadcast is written 1.
INPUTS = {"query": "btnh", "key": "bskh", "value": "bskv"}
RESULTS = {"out": "btnv", "lse": "bnt"}
ARGUMENTS = {
    "forward": INPUTS,
    "tangent": INPUTS | RESULTS,
    "backward": INPUTS | {"dout": "btnv", "lse": "bnt", "dlse": "bnt", "out": "btnv"},
}


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of the primitives."""

    options: Options
    operands: tuple[tuple[str, str], ...]  # (name, dims) of the operands that are present, in the library's order
    implementation: str | None
    limits: tuple[int, int] | None  # maximum query and key lengths of a packed call; None if not packed
    gradients: tuple[str, ...] = ()  # backward: the operands whose gradients are results, in the same order
    tangents: tuple[str, ...] = ()  # tangent: the inputs and operands that have one, in the order of the arguments

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.operands]

    def with_operands(self, operands: Mapping[str, Any]) -> Params:
        """These parameters with other operands, in the library's order."""
        dims = dict(self.operands)
        described = tuple((name, dims.get(name) or dims_of(name, operands[name])) for name in in_order(operands))
        return dataclasses.replace(self, operands=described)

    def argument_dims(self, pass_: str) -> tuple[str, ...]:
        dims = INPUTS | dict(self.operands)
        tangents = (dims[name] for name in self.tangents)
        return (*ARGUMENTS[pass_].values(), *(dims for _, dims in self.operands), *tangents)

    def result_dims(self, pass_: str) -> tuple[str, ...]:
        if pass_ == "backward":
            return (*INPUTS.values(), *(dict(self.operands)[name] for name in self.gradients))
        return tuple(RESULTS.values())

    def split(self, pass_: str, args: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The arguments by name: the fixed ones, the operands, and for ``tangent`` the tangents."""
        fixed, count = len(ARGUMENTS[pass_]), len(self.operands)
        return (
            dict(zip(ARGUMENTS[pass_], args[:fixed], strict=True)),
            dict(zip(self.names, args[fixed : fixed + count], strict=True)),
            dict(zip(self.tangents, args[fixed + count :], strict=True)),
        )


def params_of(
    options: Options, operands: Mapping[str, Any], implementation: str | None, limits: tuple[int, int] | None
) -> tuple[Params, list[Any]]:
    """The parameters of a call, and its operands in the library's order."""
    names = in_order(operands)
    described = tuple((name, dims_of(name, operands[name])) for name in names)
    return Params(options, described, implementation, limits), [operands[name] for name in names]


def in_order(names: Collection[str]) -> tuple[str, ...]:
    known = [name for name, _ in _core.OPERANDS if name in names]
    return (*known, *sorted(set(names) - set(known), key=lambda name: (len(name), name)))


def dims_of(name: str, operand: Any) -> str:
    declared = OPERANDS[name]
    if declared is CAPTURED:
        return "." * operand.ndim
    if not declared.broadcast:
        return declared.dims
    # Comparing a symbolic size with 1 is decidable too.
    return "".join("1" if n == 1 else d for d, n in zip(declared.dims, operand.shape, strict=True))


def result_shapes(pass_: str, params: Params, avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    query, key, value = avals[:3]
    wide = dtypes.accumulation_dtype(query.dtype)
    if pass_ == "backward":
        _, operands, _ = params.split(pass_, avals)
        return (
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)),
            *(jax.ShapeDtypeStruct(operands[name].shape, wide) for name in params.gradients),
        )
    batch, q_length, q_heads, _ = query.shape
    return (
        jax.ShapeDtypeStruct((batch, q_length, q_heads, value.shape[-1]), query.dtype),
        jax.ShapeDtypeStruct((batch, q_heads, q_length), wide),
    )


def abstract_eval(pass_: str, *avals: Any, params: Params) -> tuple[Any, ...]:
    query, key, value = avals[:3]
    # The results are split as the arguments are, and inside shard_map vary over the same axes.
    by_name = {"query": query, "key": key, "value": value}
    of_query = dict(zip("btn", query.sharding.spec, strict=False))
    of_batch = {dim: of_query[dim] for dim in "bn"}
    fixed = RESULTS if pass_ != "backward" else INPUTS

    def result(i: int, x: jax.ShapeDtypeStruct, dims: str) -> Any:
        if pass_ == "backward" and i < len(INPUTS):
            spec = by_name[list(INPUTS)[i]].sharding.spec
        else:
            axes = of_query | {"v": value.sharding.spec[3]} if i < len(fixed) else of_batch
            spec = PartitionSpec(*(axes.get(dim) for dim in dims))
        sharding = query.sharding.update(spec=spec)
        return query.update(shape=x.shape, dtype=x.dtype, sharding=sharding, weak_type=False)

    shapes, dims = result_shapes(pass_, params, avals), params.result_dims(pass_)
    return tuple(result(i, x, d) for i, (x, d) in enumerate(zip(shapes, dims, strict=True)))
