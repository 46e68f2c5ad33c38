"""Gradients flow through out and lse and are right, in every implementation, to every order that it declares."""

import functools
from collections.abc import Callable

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Target
from jax.test_util import check_grads


@pytest.mark.parametrize(("target", "case", "dtype"), cases.conformance("gradients"))
def test_values(target: Target, case: Case, dtype: str) -> None:
    problem = cases.problem(case, dtype)
    problem.check(target.platform, cases.differentiate(cases.call(target, problem), problem))


SMALL = Case("small", 5, 7, q_heads=4, kv_heads=2, head_dim=3, causal=True, q_offset=(-2, 1), scale=-0.7)


def test_oracle_against_differences() -> None:
    """The oracle's gradients by central differences of its own out and lse."""
    problem = cases.problem(SMALL, "float64")

    def total(**inputs: np.ndarray) -> float:
        arrays = {"query": problem.query, "key": problem.key, "value": problem.value, **inputs}
        right = cases.oracle(*arrays.values(), problem.dout, problem.dlse, **problem.options)
        alive = np.isfinite(right["lse"])
        return float((right["out"] * problem.dout).sum() + (right["lse"] * problem.dlse)[alive].sum())

    step = 1e-5
    for argument, name in (("query", "dq"), ("key", "dk"), ("value", "dv")):
        x = getattr(problem, argument)
        for index in np.ndindex(x.shape):
            up, down = x.copy(), x.copy()
            up[index] += step
            down[index] -= step
            slope = (total(**{argument: up}) - total(**{argument: down})) / (2 * step)
            assert slope == pytest.approx(problem.right[name][index], abs=1e-8)


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes())
@pytest.mark.parametrize("through", ["out", "lse"])
def test_through_one_result(target: Target, dtype: str, through: str) -> None:
    """The other result has no cotangent at all."""
    problem = cases.problem(Case("one_result", 23, 31, q_heads=4, kv_heads=2, causal=True, q_offset=8), dtype)
    attend = cases.call(target, problem)
    if through == "out":
        alone = cases.Problem(*problem.inputs, problem.dout, np.zeros_like(problem.dlse), **problem.options)
    else:
        alone = cases.Problem(*problem.inputs, np.zeros_like(problem.dout), problem.dlse, **problem.options)

    @jax.jit
    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        _, pullback = jax.vjp(lambda *inputs: attend(*inputs)[0 if through == "out" else 1], *inputs)
        return pullback(problem.dout if through == "out" else problem.dlse)

    gradients = dict(zip(("dq", "dk", "dv"), map(np.asarray, run(*problem.inputs)), strict=True))
    if through == "lse":
        assert not gradients.pop("dv").any()
    alone.check(target.platform, gradients)


@pytest.mark.parametrize("target", cases.targets())
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_by_one_argument(target: Target, argument: int) -> None:
    """The gradient by one argument, with the others and q_offset not differentiated."""
    problem = cases.problem(SMALL, target.dtypes[0])
    attend = cases.call(target, problem)

    def loss(x: jax.Array, offset: jax.Array) -> jax.Array:
        inputs = list(problem.inputs)
        inputs[argument] = x
        out, lse = attend(*inputs, q_offset=offset)
        cotangents = jnp.asarray(problem.dout).astype(lse.dtype), jnp.asarray(problem.dlse)
        return (out.astype(lse.dtype) * cotangents[0]).sum() + jnp.where(lse > -jnp.inf, lse * cotangents[1], 0).sum()

    gradient = jax.jit(jax.grad(loss))(problem.inputs[argument], problem.q_offset)
    problem.check(target.platform, {("dq", "dk", "dv")[argument]: np.asarray(gradient)})


def _finite_results(attend: Callable[..., tuple[jax.Array, jax.Array]], *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """out, and lse without the rows that keep no key, whose differences are NaN."""
    out, lse = attend(*inputs)
    return out, jnp.where(lse > -jnp.inf, lse, 0.0)


@pytest.mark.parametrize("target", cases.targets(lambda target: "float64" in target.dtypes))
def test_check_grads(target: Target) -> None:
    problem = cases.problem(SMALL, "float64")
    attend = functools.partial(_finite_results, jax.jit(cases.call(target, problem)))
    check_grads(attend, problem.inputs, order=target.orders, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.orders > 1))
def test_forward_mode(target: Target) -> None:
    problem = cases.problem(SMALL, "float64")
    attend = functools.partial(_finite_results, jax.jit(cases.call(target, problem)))
    check_grads(attend, problem.inputs, order=1, modes=["fwd"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.orders == 1))
def test_undeclared_orders_are_refused(target: Target) -> None:
    """No wrong number: forward mode and second derivatives through a kernel raise."""
    problem = cases.problem(SMALL, target.dtypes[0])

    def loss(query: jax.Array) -> jax.Array:
        return cases.call(target, problem)(query, *problem.inputs[1:])[0].sum()

    query = jnp.asarray(problem.query)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (query,), (query,))
    with pytest.raises(NotImplementedError, match=f"implementation='{target.implementation}'.*'xla'"):
        jax.grad(lambda query: jax.grad(loss)(query).sum())(query)


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
def test_summed_heads_and_batches(target: Target, dtype: str) -> None:
    """Every query head of a group adds to its key head: twelve of them, with one cotangent each."""
    problem = cases.problem(Case("many", 16, 24, q_heads=12, kv_heads=1, leading=(3,)), dtype)
    problem.check(target.platform, cases.differentiate(cases.call(target, problem), problem))


@pytest.mark.parametrize("target", cases.targets(lambda target: "float32" in target.dtypes))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_scores_in_wide_dtypes(target: Target, dtype: str) -> None:
    """A backward that recomputes weights from lse inherits what rounding took from scores and lse."""
    problem = cases.problem(Case("large_scores", 60, 80, q_heads=4, head_dim=64, spread=20.0, twins=True), dtype)
    results = cases.differentiate(cases.call(target, problem), problem)
    size = np.abs(problem.right["lse"]).max()
    assert size > 1e3
    for name in ("out", "dq", "dk", "dv"):
        error = np.abs(results[name] - problem.right[name]).max() / np.abs(problem.right[name]).max()
        assert error <= 4 * size * cases.epsilon(name, dtype), name


@pytest.mark.parametrize("target", cases.targets())
def test_masked_rows_do_not_poison_the_rest(target: Target) -> None:
    """Rows that keep no key have lse = -inf; cotangents of any size there change nothing."""
    problem = cases.problem(Case("masked", 12, 9, causal=True, q_offset=-5), target.dtypes[0])
    wild = cases.Problem(*problem.inputs, problem.dout.copy(), problem.dlse.copy(), **problem.options)
    wild.dout[:, :5] = 1e3
    wild.dlse[:, :, :5] = -1e6
    tame = cases.differentiate(cases.call(target, problem), problem)
    got = cases.differentiate(cases.call(target, wild), wild)
    problem.check(target.platform, got)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(got[name], tame[name])
