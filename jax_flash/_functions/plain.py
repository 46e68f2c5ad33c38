"""Functions of the user's in plain JAX, on blocks of pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_flash._functions.trace import Function
from jax_flash._implementations import varying
from jax_flash._native import private

Scalars = Callable[..., jax.Array]


class Pairs(NamedTuple):
    """The indices of a block of pairs: batch entries [B], heads [K, G], rows of query [B or 1, rows], keys [columns];
    and which call of those that vmap has joined a batch entry belongs to, [B], or None."""

    b: jax.Array
    h: jax.Array
    q: jax.Array
    kv: jax.Array
    call: jax.Array | None


def scores_of(
    function: Function, captured: Sequence[jax.Array], scores: jax.Array, keep: jax.Array | None, pairs: Pairs
) -> jax.Array:
    """Scores [B, K, G, rows, columns] changed by a score function; -inf where a pair is not kept.

    ``keep`` is broadcast to the scores. A pair that is not kept adds exactly 0 to every gradient, whatever the function
    and its derivatives are there.
    """
    parts = split_loads(function)
    keep = jnp.broadcast_to(jnp.asarray(True) if keep is None else keep, scores.shape)

    def pair(captured: Sequence[jax.Array], keep: jax.Array, score: jax.Array, *indices: jax.Array) -> jax.Array:
        if parts is None:
            return jnp.where(keep, evaluated(function, captured, score, *indices), -jnp.inf)
        loads = parts.loads(*captured, score, *indices)
        return _kept(parts.value, -jnp.inf, keep, (score, *loads), indices)

    return _over_pairs(pair, function, captured, (keep, scores), pairs)


def mask_of(function: Function, captured: Sequence[jax.Array], pairs: Pairs) -> jax.Array:
    """What a mask function keeps, bool [B, K, G, rows, columns]."""

    def pair(captured: Sequence[jax.Array], *indices: jax.Array) -> jax.Array:
        return evaluated(function, captured, *indices)

    return _over_pairs(pair, function, captured, (), pairs)


def evaluated(function: Function, captured: Sequence[jax.Array], *scalars: jax.Array) -> jax.Array:
    """The function's result for captured arrays and scalars."""
    return _run(inlined(function.jaxpr), (*captured, *scalars))[0]


def _run(jaxpr: Any, args: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of an `inlined` jaxpr.

    Inside a shard_map the arguments may vary over other mesh axes than those with which it was traced, so that each
    equation has to be told; the primitives take no mixture.
    """
    if not any(map(varying.varying_axes, args)):
        results: list[jax.Array] = private.jaxpr_as_fun(private.ClosedJaxpr(jaxpr, ()))(*args)
        return results
    known = dict(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> jax.Array:
        return jnp.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else known[x]

    variable = type(jaxpr.invars[0])
    for equation in jaxpr.eqns:
        inputs = varying.vary_alike([read(x) for x in equation.invars])
        invars, outvars = ([variable(x.aval) for x in xs] for xs in (equation.invars, equation.outvars))
        alone = equation.replace(invars=invars, outvars=outvars)
        one = jaxpr.replace(invars=invars, outvars=outvars, eqns=[alone])
        known.update(zip(equation.outvars, private.jaxpr_as_fun(private.ClosedJaxpr(one, ()))(*inputs), strict=True))
    return [read(x) for x in jaxpr.outvars]


def _over_pairs(
    pair: Scalars, function: Function, captured: Sequence[jax.Array], arrays: tuple[jax.Array, ...], pairs: Pairs
) -> jax.Array:
    """Maps ``pair(captured, *elements of arrays, b, h, q, kv)`` over all pairs."""
    # A captured array of several calls has one axis more than the function knows.
    of_calls = [x.ndim > variable.aval.ndim for x, variable in zip(captured, function.jaxpr.invars, strict=False)]
    captured = [x.astype(variable.aval.dtype) for x, variable in zip(captured, function.jaxpr.invars, strict=False)]
    mapped = (0,) * len(arrays)
    f = jax.vmap(pair, (None, *mapped, None, None, None, 0))  # keys
    f = jax.vmap(f, (None, *mapped, None, None, 0, None))  # rows
    for _ in range(2):  # query heads of a key head, and these
        f = jax.vmap(f, (None, *mapped, None, 0, None, None))
    q = jnp.broadcast_to(pairs.q, (pairs.b.shape[0], pairs.q.shape[1]))
    if not any(of_calls):
        f = jax.vmap(f, (None, *mapped, 0, None, 0, None))
        return f(captured, *arrays, pairs.b, pairs.h, q, pairs.kv)
    assert pairs.call is not None
    # An entry takes its call's arrays: so many as there are entries, each once.
    captured = [x[pairs.call] if several else x for x, several in zip(captured, of_calls, strict=True)]
    of_entry = [0 if several else None for several in of_calls]
    f = jax.vmap(f, (of_entry, *mapped, 0, None, 0, None))
    return f(captured, *arrays, pairs.b, pairs.h, q, pairs.kv)


# A function as loads of single elements and a function of these


class Parts(NamedTuple):
    """A score function in two: ``loads(*captured, score, b, h, q, kv)`` are the elements of captured arrays that it
    reads, and ``value((score, *loads), (b, h, q, kv))`` makes the score of them."""

    loads: Callable[..., Sequence[jax.Array]]
    value: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]


_LOADS = ("dynamic_slice", "gather", "slice")
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


@functools.cache
def split_loads(function: Function) -> Parts | None:
    """The two parts; None if the function uses its captured arrays in other ways than by single elements."""
    jaxpr = inlined(function.jaxpr)
    count = len(function.captured)
    captured, scalars = jaxpr.invars[:count], jaxpr.invars[count:]
    loads = [
        x for x in jaxpr.eqns if x.primitive.name in _LOADS and x.invars[0] in captured and _size(x.outvars[0]) == 1
    ]
    rest = [x for x in jaxpr.eqns if x not in loads]
    used = [*(x for equation in rest for x in equation.invars), *jaxpr.outvars]
    whole = [x for x in captured if x in used]
    if any(_size(x) != 1 for x in whole):
        return None
    found = [*(x.outvars[0] for x in loads), *whole]
    load = functools.partial(_run, jaxpr.replace(outvars=found))
    of_loads = jaxpr.replace(invars=[*found, *scalars], eqns=rest)
    value = functools.partial(_run, of_loads)
    shapes = [x.aval.shape for x in found]

    def read(*args: jax.Array) -> Sequence[jax.Array]:
        return [x.reshape(()) for x in load(args)]

    def of_values(floats: Sequence[jax.Array], indices: Sequence[jax.Array]) -> jax.Array:
        score, *values = floats
        shaped = [x.reshape(shape) for x, shape in zip(values, shapes, strict=True)]
        return value((*shaped, score, *indices))[0]

    return Parts(read, of_values)


def _size(variable: Any) -> int:
    size: int = variable.aval.size
    return size


def _without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an equation, those of nested jaxprs too, without the shardings that an explicit mesh gave them."""

    def without(x: Any) -> Any:
        if hasattr(x, "jaxpr") and hasattr(x, "consts"):
            return x.replace(jaxpr=without(x.jaxpr))
        if hasattr(x, "eqns"):
            return x.replace(eqns=[e.replace(params=_without_shardings(e.params)) for e in x.eqns])
        return x

    return {name: None if name in ("sharding", "out_sharding") else without(x) for name, x in params.items()}


def inlined(jaxpr: Any) -> Any:
    """The jaxpr with the bodies of nested jits in place of their calls; rules of custom derivatives stay.

    Without what the mesh added where it was traced, which moves no scalar: it is evaluated elsewhere."""
    equations: list[Any] = []

    def add(jaxpr: Any, names: dict[Any, Any]) -> list[Any]:
        def renamed(x: Any) -> Any:
            return x if hasattr(x, "val") else names.get(x, x)

        for equation in jaxpr.eqns:
            invars = [renamed(x) for x in equation.invars]
            if equation.primitive.name in ("pvary", "reshard", "sharding_constraint"):
                names |= dict(zip(equation.outvars, invars, strict=True))
                continue
            body = equation.params.get(_INLINED.get(equation.primitive.name, ""))
            body = getattr(body, "jaxpr", body) if not getattr(body, "consts", ()) else None
            if body is not None:
                results = add(body, dict(zip(body.invars, invars, strict=True)))
                names |= dict(zip(equation.outvars, results, strict=True))
                continue
            # New variables, as the body of one function may be called several times.
            outvars = [type(x)(x.aval) if type(x).__name__ == "Var" else x for x in equation.outvars]
            names |= dict(zip(equation.outvars, outvars, strict=True))
            params = _without_shardings(equation.params)
            equations.append(equation.replace(invars=invars, outvars=outvars, params=params))
        return [renamed(x) for x in jaxpr.outvars]

    outvars = add(jaxpr, {})
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _kept(
    value: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array],
    fill: float,
    keep: jax.Array,
    floats: Sequence[jax.Array],
    indices: Sequence[jax.Array],
) -> jax.Array:
    """``value(floats, indices)`` where ``keep``, else ``fill``; derivatives of any order are 0 there, never 0 * NaN."""

    @jax.custom_jvp
    def f(keep: jax.Array, floats: Any, indices: Any) -> jax.Array:
        x = value(floats, indices)
        return jnp.where(keep, x, jnp.asarray(fill, x.dtype))

    @functools.partial(f.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> Any:
        keep, floats, indices = primals
        result = f(keep, floats, indices)
        moved = jnp.zeros_like(result)
        for i, tangent in enumerate(tangents[1]):
            if isinstance(tangent, jax.custom_derivatives.SymbolicZero) or not _is_float(floats[i]):
                continue
            partial = functools.partial(_partial, value, i)
            moved += _kept(partial, 0.0, keep, floats, indices) * tangent.astype(result.dtype)
        return result, moved

    return f(keep, tuple(floats), tuple(indices))


def _is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _partial(
    value: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array],
    i: int,
    floats: Sequence[jax.Array],
    indices: Sequence[jax.Array],
) -> jax.Array:
    """The derivative of ``value`` by the i-th float."""

    def of_one(x: jax.Array) -> jax.Array:
        return value((*floats[:i], x, *floats[i + 1 :]), indices)

    return jax.jvp(of_one, (floats[i],), (jnp.ones_like(floats[i]),))[1]
