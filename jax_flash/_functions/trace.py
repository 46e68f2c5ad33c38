"""From a user's score or mask function to a record that is equal for equal functions.

A function is traced on scalars. The arrays that it captures become operands of the call, so that their values, and
which function object was passed, change no compiled program. What depends on captured arrays alone is computed outside,
once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._native import private

INDICES = ("b", "h", "q", "kv")
MOST_CAPTURED = 16
"""Arrays that the functions of a call may capture."""


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A traced function, without its captured arrays.

    Attributes:
      kind: "score", of (score, b, h, q, kv), or "mask", of (b, h, q, kv).
      name: the argument of attention() that it came by.
      jaxpr: of the captured arrays, then the scalars.
      captured: which of the call's captured arrays these are.
      key: what makes two functions the same.
    """

    kind: str
    name: str
    jaxpr: Any
    captured: tuple[int, ...]
    key: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclasses.dataclass(frozen=True)
class Functions:
    """The functions of a call.

    Attributes:
      score: changes the scores, after bias and ALiBi.
      masks: keep a pair if all of them do.
      partial_mask: decides in the blocks of a block mask that are neither full nor empty; True without one.
      block_size: rows of query and keys of a block of the operand mask_blocks.
      batch: batch entries of one call, where vmap has joined several in the batch; None: all are one call's.
    """

    score: Function | None = None
    masks: tuple[Function, ...] = ()
    partial_mask: Function | None = None
    block_size: tuple[int, int] = (1, 1)
    batch: int | None = None

    @property
    def all(self) -> tuple[Function, ...]:
        return tuple(x for x in (self.score, *self.masks, self.partial_mask) if x is not None)

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Of the captured arrays, by number."""
        return {
            number: tuple(variable.aval.shape)
            for function in self.all
            for number, variable in zip(function.captured, function.jaxpr.invars, strict=False)
        }


def captured_name(index: int) -> str:
    """The name of a captured array as an operand."""
    return f"captured_{index}"


class Captured:
    """Collects the arrays that the functions of a call capture, each once."""

    def __init__(self) -> None:
        self.arrays: list[jax.Array] = []

    def index(self, array: Any) -> int:
        for i, known in enumerate(self.arrays):
            if known is array:
                return i
        self.arrays.append(array)
        return len(self.arrays) - 1

    def operands(self) -> dict[str, jax.Array]:
        if len(self.arrays) > MOST_CAPTURED:
            raise ValueError(
                f"score_mod and mask_mod may capture at most {MOST_CAPTURED} arrays together, got {len(self.arrays)}"
            )
        return {captured_name(i): jnp.asarray(x) for i, x in enumerate(self.arrays)}


def trace(name: str, function: Callable[..., Any], kind: str, dtype: Any, captured: Captured) -> Function:
    """Traces a function that was passed as argument ``name``; ``dtype`` is that of scores.

    Raises:
      TypeError: it is no function of so many scalars, or its result has the wrong dtype.
      ValueError: its result is no scalar, or it has side effects.
    """
    _check_signature(name, function, kind)
    scalars = [jax.ShapeDtypeStruct((), np.int32)] * len(INDICES)
    if kind == "score":
        scalars = [jax.ShapeDtypeStruct((), dtype), *scalars]
    closed = jax.make_jaxpr(lambda *xs: _checked_result(name, function(*xs), kind, dtype))(*scalars)
    if closed.effects:
        raise ValueError(f"{name} must have no side effects, got {', '.join(map(str, closed.effects))}")
    jaxpr, arrays = _without_constants_alone(closed)
    indices = tuple(map(captured.index, arrays))
    # A jaxpr holds the mesh under which it was traced, and can't be evaluated under another.
    return Function(kind, name, jaxpr, indices, (kind, indices, key_of(jaxpr), jax.sharding.get_abstract_mesh()))


def _arguments(kind: str) -> tuple[str, ...]:
    return ("score", *INDICES) if kind == "score" else INDICES


def _check_signature(name: str, function: object, kind: str) -> None:
    wanted = _arguments(kind)
    text = f"{name} must be a function of {len(wanted)} scalars, ({', '.join(wanted)})"
    if not callable(function):
        raise TypeError(f"{text}, got {function!r} of type {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without one: calling it tells
        return
    try:
        signature.bind(*wanted)
    except TypeError:
        raise TypeError(f"{text}, got one with the signature {signature}") from None


def _checked_result(name: str, result: Any, kind: str, dtype: Any) -> jax.Array:
    if not isinstance(result, (jax.Array, np.ndarray, np.generic, bool, int, float)):
        raise TypeError(f"{name} must return a scalar, got {type(result).__name__}")
    array = jnp.asarray(result)
    if array.shape != ():
        raise ValueError(f"{name} must return a scalar, got an array of shape {array.shape}")
    if kind == "mask":
        if array.dtype != bool:
            raise TypeError(f"{name} must return a boolean, got {array.dtype.name}")
        return array
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must return a score of dtype {np.dtype(dtype).name}, got {array.dtype.name}")
    if array.dtype.itemsize > np.dtype(dtype).itemsize:
        raise TypeError(f"{name} must return a score of dtype {np.dtype(dtype).name}, got {array.dtype.name}")
    return array.astype(dtype)


def _without_constants_alone(closed: Any) -> tuple[Any, list[Any]]:
    """The jaxpr with (captured arrays, scalars) for arguments, less the equations that depend on captured arrays alone;
    the results of these join the captured arrays."""
    jaxpr = closed.jaxpr
    known, outside, rest = set(jaxpr.constvars), [], []
    for equation in jaxpr.eqns:
        inputs = [x for x in equation.invars if not _is_literal(x)]
        if inputs and known.issuperset(inputs):
            outside.append(equation)
            known.update(equation.outvars)
        else:
            rest.append(equation)
    used = {x for equation in rest for x in equation.invars if not _is_literal(x)}
    used |= {x for x in jaxpr.outvars if not _is_literal(x)}
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    if made := [x for equation in outside for x in equation.outvars if x in used]:
        constants = jaxpr.replace(invars=[], eqns=outside, outvars=made)
        values |= dict(zip(made, private.jaxpr_as_fun(private.ClosedJaxpr(constants, closed.consts))(), strict=True))
    captured = [x for x in values if x in used]
    scalar = jaxpr.replace(constvars=[], invars=[*captured, *jaxpr.invars], eqns=rest)
    return scalar, [values[x] for x in captured]


def _is_literal(x: Any) -> bool:
    return hasattr(x, "val")


_CUSTOM = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}
"""Calls of functions with a derivative of their own, and the parameter with the function's body."""

_MOST_RULES = 3
"""Derivatives up to this order tell functions apart: a rule may call its own function, so there is no end to them."""


def key_of(jaxpr: Any, rules: int = 0) -> Any:
    """What is equal for jaxprs that compute the same way: equations by the numbers of their variables.

    ``rules``: within so many rules of derivatives.
    """
    numbers: dict[Any, int] = {}

    def of_variable(x: Any) -> Any:
        if _is_literal(x):
            return "literal", str(x.aval), np.asarray(x.val).tobytes()
        return numbers.setdefault(x, len(numbers)), str(x.aval)

    def of_param(x: Any) -> Any:
        if hasattr(x, "jaxpr") and hasattr(x, "consts"):  # a closed jaxpr
            return (
                "jaxpr",
                key_of(x.jaxpr, rules),
                tuple(id(c) if np.ndim(c) else np.asarray(c).tobytes() for c in x.consts),
            )
        if hasattr(x, "eqns"):
            return "jaxpr", key_of(x, rules)
        if isinstance(x, (tuple, list)):
            return type(x).__name__, tuple(map(of_param, x))
        if isinstance(x, dict):
            return "dict", tuple((k, of_param(v)) for k, v in sorted(x.items()))
        try:
            hash(x)
        except TypeError:
            return "object", id(x)
        return x

    inputs = tuple(map(of_variable, [*jaxpr.constvars, *jaxpr.invars]))
    equations = []
    for equation in jaxpr.eqns:
        params = equation.params
        if (body := _CUSTOM.get(equation.primitive.name)) is not None:
            # The rule is a new object in every trace, so it counts as what it computes.
            rule = key_of(_derivative(jaxpr, equation), rules + 1) if rules < _MOST_RULES else None
            found: Any = (body, of_param(params[body])), ("rule", rule)
        else:
            found = tuple((k, of_param(v)) for k, v in sorted(params.items()))
        ins, outs = (tuple(map(of_variable, xs)) for xs in (equation.invars, equation.outvars))
        equations.append((equation.primitive.name, found, ins, outs))
    return inputs, tuple(equations), tuple(map(of_variable, jaxpr.outvars))


def _derivative(jaxpr: Any, equation: Any) -> Any:
    """The jaxpr of the derivative of one equation, by its own rule."""
    inputs = [x for x in equation.invars if not _is_literal(x)]
    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation])
    function = private.jaxpr_as_fun(private.ClosedJaxpr(alone, ()))
    moved = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.aval.dtype, jnp.floating)]

    def of_moved(xs: Any, floats: Any) -> Any:
        xs = list(xs)
        for i, x in zip(moved, floats, strict=True):
            xs[i] = x
        return function(*xs)

    def derivative(xs: Any) -> Any:
        own, floats = functools.partial(of_moved, xs), [xs[i] for i in moved]
        if equation.primitive.name == "custom_jvp_call":
            return jax.jvp(lambda *x: own(x), floats, [jnp.ones_like(x) for x in floats])
        results, pullback = jax.vjp(lambda *x: own(x), *floats)
        return results, pullback([jnp.ones_like(x) for x in results])

    return jax.make_jaxpr(derivative)([jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]).jaxpr
