"""vmap is right for every combination of mapped operands, forward and backward, nested, and along any axis."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Target

import jax_flash

SIZE = 3
ARGUMENTS = ("query", "key", "value", "q_offset")
COMBINATIONS = [mapped for n in range(1, 5) for mapped in itertools.combinations(ARGUMENTS, n)]
NAMES = ("out", "lse", "dq", "dk", "dv")


def stacked(case: Case, dtype: str, mapped: Sequence[str], sizes: tuple[int, ...] = (SIZE,)) -> cases.Problem:
    """A problem with ``sizes`` as further leading dimensions, along which only the ``mapped`` inputs vary."""
    rng = np.random.default_rng(len(mapped) + sum(map(len, mapped)))
    one = cases.problem(case, dtype)
    arrays = {}
    for name in ("query", "key", "value", "dout"):
        x = getattr(one, name)
        varies = name in mapped or name == "dout"
        arrays[name] = (
            cases.random(rng, (*sizes, *x.shape), dtype) if varies else np.broadcast_to(x, (*sizes, *x.shape))
        )
    shape = (*sizes, *case.leading)
    offset = rng.integers(-9, 12, shape if "q_offset" in mapped else case.leading)
    return cases.Problem(
        **arrays,
        dlse=cases.random(rng, (*sizes, *one.dlse.shape), one.dlse.dtype),
        causal=True,
        q_offset=np.broadcast_to(offset, shape).astype(np.int32),
    )


def differentiate_one(target: Target, query: Any, key: Any, value: Any, offset: Any, dout: Any, dlse: Any) -> Any:
    attend = functools.partial(
        jax_flash.attention, causal=True, q_offset=offset, return_lse=True, implementation=target.implementation
    )
    results, pullback = jax.vjp(attend, query, key, value)
    return (*results, *pullback((dout, dlse)))


def check(target: Target, problem: cases.Problem, results: Sequence[jax.Array], names: Sequence[str] = NAMES) -> None:
    problem.check(target.platform, dict(zip(names, map(np.asarray, results), strict=True)))


@pytest.mark.parametrize("mapped", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_every_combination(target: Target, mapped: tuple[str, ...]) -> None:
    case = Case("batching", 11, 14, q_heads=4, kv_heads=2, head_dim=8, causal=True)
    problem = stacked(case, target.dtypes[0], mapped)
    values = dict(zip(ARGUMENTS, (*problem.inputs, problem.q_offset), strict=True))
    axes = [0 if name in mapped else None for name in ARGUMENTS]
    arguments = [values[name] if name in mapped else values[name][0] for name in ARGUMENTS]

    def forward(query: Any, key: Any, value: Any, offset: Any) -> Any:
        return cases.call(target, problem, q_offset=offset)(query, key, value)

    check(target, problem, jax.jit(jax.vmap(forward, axes))(*arguments), ("out", "lse"))

    both = jax.vmap(functools.partial(differentiate_one, target), (*axes, 0, 0))
    check(target, problem, jax.jit(both)(*arguments, problem.dout, problem.dlse))


@pytest.mark.parametrize("cotangent", ["dout", "dlse"])
@pytest.mark.parametrize("target", cases.targets())
def test_only_a_cotangent_is_mapped(target: Target, cotangent: str) -> None:
    """As jax.jacrev does it."""
    case = Case("cotangents", 9, 12, q_heads=4, kv_heads=2, head_dim=8, causal=True)
    problem = stacked(case, target.dtypes[0], ())
    fixed = "dlse" if cotangent == "dout" else "dout"
    getattr(problem, fixed)[:] = getattr(problem, fixed)[0]
    axes = [None] * 4 + [0 if name == cotangent else None for name in ("dout", "dlse")]
    arguments = [x[0] for x in (*problem.inputs, problem.q_offset)]
    arguments += [getattr(problem, name)[() if name == cotangent else 0] for name in ("dout", "dlse")]
    run = jax.vmap(functools.partial(differentiate_one, target), axes, (None, None, 0, 0, 0))
    check(
        target,
        problem,
        [
            np.broadcast_to(x, y.shape)
            for x, y in zip(jax.jit(run)(*arguments), (problem.right[name] for name in NAMES), strict=True)
        ],
    )


@pytest.mark.parametrize("target", cases.targets())
def test_nested(target: Target) -> None:
    """vmap of vmap: the outer maps query and offset, the inner key and value."""
    case = Case("nested", 10, 13, q_heads=4, kv_heads=2, head_dim=8, leading=(), causal=True)
    problem = stacked(case, target.dtypes[0], ARGUMENTS, (2, 3))
    query, key, value = problem.query[:, 0], problem.key[0], problem.value[0]
    offset = problem.q_offset[:, 0]
    problem = cases.Problem(
        np.broadcast_to(query[:, None], problem.query.shape),
        np.broadcast_to(key, problem.key.shape),
        np.broadcast_to(value, problem.value.shape),
        problem.dout,
        problem.dlse,
        causal=True,
        q_offset=np.broadcast_to(offset[:, None], problem.q_offset.shape),
    )
    one = functools.partial(differentiate_one, target)
    inner = jax.vmap(one, (None, 0, 0, None, 0, 0))
    outer = jax.vmap(inner, (0, None, None, 0, 0, 0))
    check(target, problem, jax.jit(outer)(query, key, value, offset, problem.dout, problem.dlse))


@pytest.mark.parametrize("target", cases.targets())
def test_any_axis(target: Target) -> None:
    """Mapped axes other than the first, negative ones too, and results mapped along other axes."""
    case = Case("axes", 10, 13, q_heads=4, kv_heads=2, head_dim=8, causal=True)
    problem = stacked(case, target.dtypes[0], ARGUMENTS)
    in_axes, out_axes = (1, 3, -1, 1, 2, 3), (4, 1, 2, -1, 1)
    run = jax.vmap(functools.partial(differentiate_one, target), in_axes, out_axes)
    arguments = (*problem.inputs, problem.q_offset, problem.dout, problem.dlse)
    results = jax.jit(run)(*(np.moveaxis(x, 0, axis) for x, axis in zip(arguments, in_axes, strict=True)))
    check(target, problem, [np.moveaxis(x, axis, 0) for x, axis in zip(results, out_axes, strict=True)])


@pytest.mark.parametrize("target", cases.targets())
def test_gradient_of_vmap(target: Target) -> None:
    """Through an unmapped key and value, gradients add up over the mapped queries."""
    case = Case("of_vmap", 10, 13, q_heads=4, kv_heads=2, head_dim=8, leading=(), causal=True)
    problem = stacked(case, target.dtypes[0], ("query",))
    query, key, value = problem.query, problem.key[0], problem.value[0]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(cases.call(target, problem, q_offset=problem.q_offset[0]), (0, None, None))(query, key, value)

    @jax.jit
    def run(*inputs: jax.Array) -> Any:
        results, pullback = jax.vjp(attend, *inputs)
        return (*results, *pullback((problem.dout, problem.dlse)))

    results = run(query, key, value)
    check(target, problem, results[:3], NAMES[:3])
    for got, name in zip(results[3:], ("dk", "dv"), strict=True):
        want = problem.right[name].sum(axis=0)
        error = np.linalg.norm(np.asarray(got).astype(np.float64) - want) / np.linalg.norm(want)
        # One sum more, in the dtype of the inputs.
        assert error <= 4 * cases.epsilon(name, got.dtype)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_mapped_queries_copy_no_keys(target: Target) -> None:
    """Queries mapped over shared keys become more heads: key and value reach the primitive as they are."""
    query, key = jnp.ones((5, 2, 7, 4, 8), target.dtypes[0]), jnp.ones((2, 9, 2, 8), target.dtypes[0])
    attend = functools.partial(jax_flash.attention, implementation=target.implementation)
    jaxpr = jax.make_jaxpr(jax.vmap(attend, (0, None, None)))(query, key, key)
    (call,) = primitives(jaxpr.jaxpr, "jax_flash_forward")
    assert [x.aval.shape for x in call.invars] == [(2, 7, 20, 8), key.shape, key.shape]


def primitives(jaxpr: Any, name: str) -> list[Any]:
    """Equations of the primitive ``name`` in ``jaxpr`` and in the jaxprs inside it."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            found.append(equation)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += primitives(inner, name)
    return found


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_size_one_and_empty(target: Target) -> None:
    case = Case("thin", 6, 7, head_dim=8, causal=True)
    problem = stacked(case, target.dtypes[0], ARGUMENTS, (1,))
    run = jax.vmap(functools.partial(differentiate_one, target))
    arguments = (*problem.inputs, problem.q_offset, problem.dout, problem.dlse)
    check(target, problem, jax.jit(run)(*arguments))
    for result, argument in zip(run(*(x[:0] for x in arguments)), (*arguments[-2:], *arguments[:3]), strict=True):
        assert result.shape == (0, *argument.shape[1:])


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, 0), (0, 0, 0)], ids=["query", "keys", "all"])
def test_axis_of_size_zero(target: Target, mapped: tuple[int | None, ...]) -> None:
    problem = cases.problem(Case("nothing", 5, 7, q_heads=4, kv_heads=2, head_dim=8), target.dtypes[0])
    inputs = [
        x if axis is None else jnp.zeros((0, *x.shape), x.dtype) for x, axis in zip(problem.inputs, mapped, strict=True)
    ]

    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        results, pullback = jax.vjp(cases.call(target, problem), *inputs)
        return (*results, *pullback((problem.dout, problem.dlse)))

    shapes = [x.shape for x in jax.vmap(run, in_axes=mapped)(*inputs)]
    query, key, value = (x.shape for x in problem.inputs)
    assert shapes == [(0, *shape) for shape in (query, problem.dlse.shape, query, key, value)]
