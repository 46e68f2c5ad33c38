"""Gradients flow through out and lse and are right, in every implementation."""

import dataclasses
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import SMALL, SMALL_EVERYTHING, SMALL_PACKED, Case, PackedCase, Target

import jax_flash


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("target", "case", "dtype"), cases.conformance("gradients"))
def test_values(target: Target, case: Case | PackedCase, dtype: str) -> None:
    problem = cases.problem_of(case, dtype)
    problem.check(target.platform, cases.differentiate(cases.call(target, problem), problem))


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("target", cases.targets(lambda target: "float32" in target.dtypes))
def test_float32_of_any_magnitude(target: Target, precision: str) -> None:
    """Kernels may take float32 apart, or bring it to the range of a narrower dtype."""
    case = Case("magnitudes", 70, 130, q_heads=4, kv_heads=2, head_dim=24, precision=precision, scale=2.0**-22)
    problem = cases.problem(case, "float32")
    magnitudes = {"query": 2.0**-60, "key": 2.0**80, "value": 2.0**40, "dout": 2.0**-35}
    # Of one key head unlike the other, and few values far from the rest.
    scaled = {name: getattr(problem, name) * np.float32(size) for name, size in magnitudes.items()}
    for x in scaled.values():
        x[..., : x.shape[-2] // 2, :] *= np.float32(2.0**-30)
        x[:, 3] *= np.float32(2.0**-9)
    problem = dataclasses.replace(problem, **scaled)
    problem.check(target.platform, cases.differentiate(cases.call(target, problem), problem))


@pytest.mark.gpu
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (8, 2)])
def test_long_causal_calls_without_options(q_heads: int, kv_heads: int) -> None:
    """Beside what is computed in one order, which takes the tiles of short calls."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, dout = (jax.random.normal(key, (1, 16500, q_heads, 128), jnp.bfloat16) for key in keys[:2])
    k, v = (jax.random.normal(key, (1, 16500, kv_heads, 128), jnp.bfloat16) for key in keys[2:])

    def gradients(ordered: bool) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax_flash.attention(q, k, v, causal=True, implementation="cuda", deterministic_backward=ordered)

        return jax.jit(lambda *inputs: jax.vjp(attend, *inputs)[1](dout))(q, k, v)

    for got, want in zip(gradients(False), gradients(True), strict=True):
        difference = jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32))
        assert float(difference.max()) <= 2.0**-7 * float(jnp.abs(want).max().astype(jnp.float32))


ARGUMENTS = ("query", "key", "value", *oracle.TRAINABLE)


@pytest.mark.parametrize("case", [SMALL, SMALL_EVERYTHING, SMALL_PACKED], ids=lambda case: case.name)
def test_oracle_against_differences(case: Case | PackedCase) -> None:
    """The oracle's gradients by central differences of its own out and lse."""
    problem = cases.problem_of(case, "float64")
    # The lse of padding is no result, though a sink shows in it.
    dout, dlse = np.nan_to_num(problem.dout), np.nan_to_num(problem.dlse)

    def total(argument: str, x: np.ndarray) -> float:
        changed = dataclasses.replace(problem, **{argument: x})
        right = changed.right
        alive = np.isfinite(right["lse"])
        return float((right["out"] * dout).sum() + (right["lse"] * dlse)[alive].sum())

    step = 1e-5
    for argument in ARGUMENTS:
        x = getattr(problem, argument)
        if not isinstance(x, np.ndarray):
            continue
        gradient = problem.right["d" + {"query": "q", "key": "k", "value": "v"}.get(argument, argument)]
        assert gradient.shape == x.shape
        assert gradient.any()
        for index in np.ndindex(x.shape):
            up, down = x.copy(), x.copy()
            up[index] += step
            down[index] -= step
            slope = (total(argument, up) - total(argument, down)) / (2 * step)
            assert slope == pytest.approx(gradient[index], abs=1e-8), (argument, index)


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


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
@pytest.mark.parametrize("argument", oracle.TRAINABLE)
def test_by_one_option(target: Target, argument: str) -> None:
    """The gradient by a trainable option alone, and by all the inputs but not by it."""
    problem = cases.problem(dataclasses.replace(SMALL_EVERYTHING, name="by_one_option"), target.dtypes[0])
    attend = cases.call(target, problem)
    cotangents = problem.dout, problem.dlse

    @jax.jit
    def by_option(x: jax.Array) -> Any:
        return jax.vjp(lambda x: attend(*problem.inputs, **{argument: x}), x)[1](cotangents)[0]

    @jax.jit
    def by_inputs(*inputs: jax.Array) -> Any:
        return jax.vjp(attend, *inputs)[1](cotangents)

    problem.check(target.platform, {f"d{argument}": by_option(getattr(problem, argument))})
    problem.check(target.platform, dict(zip(("dq", "dk", "dv"), by_inputs(*problem.inputs), strict=True)))


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
def test_summed_heads_and_batches(target: Target, dtype: str) -> None:
    """Every query head of a group adds to its key head: twelve of them, with one cotangent each."""
    problem = cases.problem(Case("many", 16, 24, q_heads=12, kv_heads=1, leading=(3,)), dtype)
    problem.check(target.platform, cases.differentiate(cases.call(target, problem), problem))


WIDE = [
    cases.param(target, dtype, id=dtype)
    for target in cases.TARGETS
    for dtype in ("float32", "float64")
    if dtype in target.dtypes
]


@pytest.mark.parametrize(("target", "dtype"), WIDE)
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


@pytest.mark.parametrize("target", cases.targets())
def test_nan_in_bias_that_is_masked(target: Target) -> None:
    """What is masked is selected away, not added up: neither results nor gradients see what stood there."""
    case = Case("nan_bias", 37, 53, bias="bnts", mask="bts", causal=True, q_offset=16, window=(20, None))
    problem = cases.problem(case, target.dtypes[0])
    want = cases.differentiate(cases.call(target, problem), problem)
    positions = {"leading": (2,), "q_length": 37, "kv_length": 53, "causal": True, "q_offset": 16, "window": (20, None)}
    keep = oracle.keep_pairs(**positions, mask=problem.mask)
    problem.bias = np.where(keep, problem.bias, np.nan).astype(problem.bias.dtype)
    got = cases.differentiate(cases.call(target, problem), problem)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
