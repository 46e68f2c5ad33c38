"""out and lse are right, for every shape, dtype and option, in every implementation."""

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, PackedCase, Target

import jax_flash


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("target", "case", "dtype"), cases.conformance("out"))
def test_values(target: Target, case: Case | PackedCase, dtype: str) -> None:
    problem = cases.problem_of(case, dtype)
    problem.check(target.platform, cases.evaluate(cases.call(target, problem), problem))


def test_huge_scores_are_huge() -> None:
    problem = cases.problem(cases.by_name("scores_huge"), "float16")
    assert np.abs(problem.right["lse"]).max() > 1e4


def test_oracle_agrees_with_jax_nn() -> None:
    """The conventions are those of jax.nn, where it has them: the layout, grouped heads, causal, scale."""
    problem = cases.problem(Case("jax_nn", 20, 31, q_heads=6, kv_heads=2, causal=True, scale=0.2), "float32")
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(*map(jnp.asarray, problem.inputs), is_causal=True, scale=0.2)
    np.testing.assert_allclose(out, problem.right["out"], atol=1e-6)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_q_offset_forms(target: Target) -> None:
    """An int, a NumPy int, a scalar array, an array [B] and traced ones are the same thing."""
    problem = cases.problem(Case("offsets", 18, 25, causal=True, q_offset=-4), target.dtypes[0])
    want = cases.evaluate(cases.call(target, problem), problem)
    problem.check(target.platform, want)
    forms = [np.int64(-4), np.array(-4, np.int32), jnp.full((2,), -4, jnp.int32), jnp.full((1,), -4, jnp.int32)]
    for form in forms:
        got = cases.evaluate(cases.call(target, problem, q_offset=form), problem)
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
    traced = jax.jit(lambda offset, *inputs: cases.call(target, problem, q_offset=offset)(*inputs))
    for form in forms[1:]:
        out, lse = traced(form, *problem.inputs)
        np.testing.assert_array_equal(out, want["out"])
        np.testing.assert_array_equal(lse, want["lse"])


@pytest.mark.parametrize("target", cases.targets())
def test_q_offset_broadcasts_to_every_leading_dimension(target: Target) -> None:
    offset = np.array([[0], [-6]], np.int32)
    problem = cases.problem(Case("offsets_2d", 11, 13, leading=(2, 3), causal=True), target.dtypes[0])
    problem = cases.Problem(*problem.inputs, problem.dout, problem.dlse, causal=True, q_offset=offset)
    problem.check(target.platform, cases.evaluate(cases.call(target, problem), problem))


@pytest.mark.parametrize("target", cases.targets())
def test_q_offset_means_nothing_without_causal(target: Target) -> None:
    problem = cases.problem(Case("no_offset", 18, 25), target.dtypes[0])
    want = cases.evaluate(cases.call(target, problem), problem)
    got = cases.evaluate(cases.call(target, problem, q_offset=jnp.array([-100, 7], jnp.int32)), problem)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("target", cases.targets())
def test_without_jit_and_without_lse(target: Target) -> None:
    problem = cases.problem(Case("eager", 10, 12, causal=True), target.dtypes[0])
    out, lse = cases.call(target, problem)(*map(jnp.asarray, problem.inputs))
    problem.check(target.platform, {"out": np.asarray(out), "lse": np.asarray(lse)})
    alone = cases.call(target, problem, return_lse=False)(*problem.inputs)
    assert isinstance(alone, jax.Array)
    np.testing.assert_array_equal(alone, out)


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
def test_unasked_is_what_explain_says(target: Target, dtype: str) -> None:
    problem = cases.problem(cases.by_name("grouped_causal"), dtype)
    inputs = jax.device_put(problem.inputs, target.device)
    chosen = jax_flash.explain(*inputs, causal=True, platform=target.platform).implementation
    assert chosen == target.implementation
    want = cases.evaluate(cases.call(target, problem), problem)
    got = cases.evaluate(cases.call(target, problem, implementation=None), problem)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def _poisoned(x: np.ndarray) -> np.ndarray:
    """``x`` in the middle of a larger array of NaN."""
    margins = [(1, 1)] + [(3, 5)] * (x.ndim - 1)
    return np.pad(x.astype(np.float64), margins, constant_values=np.nan).astype(x.dtype)


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
@pytest.mark.parametrize(
    "case",
    [
        Case("poison", 37, 53, q_heads=4, head_dim=24, causal=True, q_offset=16),
        Case("poison_narrow", 66, 67, q_heads=2, head_dim=3),
        Case("poison_wide", 17, 130, q_heads=2, kv_heads=1, head_dim=111),
    ],
    ids=lambda case: case.name,
)
def test_nothing_outside_is_read(target: Target, case: Case, dtype: str) -> None:
    """Inputs and cotangents cut out of arrays of NaN, in the call's own program."""
    problem = cases.problem(case, dtype)
    attend = cases.call(target, problem)
    arrays = (*problem.inputs, problem.dout, problem.dlse)

    @jax.jit
    def run(*poisoned: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, dout, dlse = (
            p[tuple(slice(1 if i == 0 else 3, (1 if i == 0 else 3) + n) for i, n in enumerate(x.shape))]
            for p, x in zip(poisoned, arrays, strict=True)
        )
        results, pullback = jax.vjp(attend, query, key, value)
        return (*results, *pullback((dout, dlse)))

    results = run(*map(_poisoned, arrays))
    names = ("out", "lse", "dq", "dk", "dv")
    problem.check(target.platform, dict(zip(names, map(np.asarray, results), strict=True)))


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_leading_slices_of_poison(target: Target) -> None:
    """A slice along the batch is contiguous: XLA may hand the kernel a pointer into the array of NaN."""
    problem = cases.problem(Case("poison_batch", 35, 67, q_heads=2, head_dim=40, leading=(1,)), target.dtypes[-1])
    arrays = (*problem.inputs, problem.dout, problem.dlse)

    @jax.jit
    def run(*poisoned: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, dout, dlse = (x[1:2] for x in poisoned)
        results, pullback = jax.vjp(cases.call(target, problem), query, key, value)
        return (*results, *pullback((dout, dlse)))

    results = run(*(np.concatenate([np.full_like(x, np.nan), x, np.full_like(x, np.nan)]) for x in arrays))
    names = ("out", "lse", "dq", "dk", "dv")
    problem.check(target.platform, dict(zip(names, map(np.asarray, results), strict=True)))


@pytest.mark.parametrize("target", cases.targets())
def test_transposed_and_strided_inputs(target: Target) -> None:
    problem = cases.problem(Case("strided", 19, 27, q_heads=4, kv_heads=2, head_dim=24), target.dtypes[0])
    query, key, value = problem.inputs
    attend = cases.call(target, problem)

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attend(query.transpose(0, 2, 1, 3), key[:, ::-1], value[..., ::2])

    doubled = np.repeat(value, 2, axis=-1)
    doubled[..., 1::2] = np.nan
    out, lse = jax.jit(run)(query.transpose(0, 2, 1, 3), key[:, ::-1], doubled)
    problem.check(target.platform, {"out": np.asarray(out), "lse": np.asarray(lse)})


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu", None])
@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((0, 5, 4, 8), (0, 6, 2, 8)),
        ((2, 0, 4, 8), (2, 6, 2, 8)),
        ((2, 5, 4, 8), (2, 0, 2, 8)),
        ((2, 0, 4, 8), (2, 0, 2, 8)),
        ((0, 0, 4, 8), (0, 0, 2, 8)),
        ((3, 0, 5, 4, 8), (3, 0, 6, 2, 8)),
        ((2, 5, 0, 8), (2, 6, 2, 8)),
    ],
)
def test_zero_sizes(query: tuple[int, ...], key: tuple[int, ...], implementation: str | None) -> None:
    """Empty batch, T, S or heads: rows that keep no key, and gradients that are zero or empty."""
    q, k, v = jnp.ones(query, jnp.float32), jnp.ones(key, jnp.float32), jnp.ones(key, jnp.float32)
    attend = functools.partial(jax_flash.attention, causal=True, return_lse=True, implementation=implementation)
    (out, lse), pullback = jax.vjp(attend, q, k, v)
    assert out.shape == query
    assert out.dtype == jnp.float32
    assert lse.shape == (*query[:-3], query[-2], query[-3])
    assert lse.dtype == jnp.float32
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    for gradient, x in zip(pullback((jnp.ones_like(out), jnp.ones_like(lse))), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("target", cases.targets())
def test_padding_is_never_read(target: Target) -> None:
    """Results and gradients are the same bits whatever lies in it."""
    case = Case("padding", 70, 90, q_heads=4, kv_heads=2, bias="bnts", q_lengths=(70, 33), kv_lengths=(41, 90))
    problem = cases.problem(case, target.dtypes[0])
    assert all(np.isnan(x).any() for x in (*problem.inputs, problem.bias, problem.dout, problem.dlse))
    want = cases.differentiate(cases.call(target, problem), problem)
    zeros = {name: np.nan_to_num(getattr(problem, name)) for name in ("query", "key", "value", "dout", "dlse", "bias")}
    got = cases.differentiate(cases.call(target, problem, bias=zeros["bias"]), dataclasses.replace(problem, **zeros))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("target", cases.targets())
def test_maxima_that_are_not_said(target: Target) -> None:
    """The same results as with the longest sequences, gradients and dropout among them, also for traced lengths."""
    case = PackedCase("no_maxima", (5, 0, 9), (6, 3, 8), (2, 1), causal=True, dropout_rate=0.3)
    problem = cases.packed_problem(case, target.dtypes[0])
    attend = cases.call(target, problem, max_q_length=None, max_kv_length=None)
    problem.check(target.platform, cases.differentiate(attend, problem))
    lengths = {"cu_q_lengths": problem.cu_q_lengths, "cu_kv_lengths": problem.cu_kv_lengths}
    out, lse = jax.jit(lambda lengths: attend(*problem.inputs, **lengths))(lengths)
    problem.check(target.platform, {"out": out, "lse": lse})


@pytest.mark.parametrize("target", cases.targets(lambda target: not target.kernel))
def test_sequences_longer_than_said(target: Target) -> None:
    """Where it can't be known when the call is traced, it shows: plain JAX pads sequences to the longest."""
    problem = cases.packed_problem(PackedCase("too_long", (5, 9, 3), (6, 4, 8), (2, 1)), target.dtypes[0])
    attend = cases.call(target, problem)

    @functools.partial(jax.jit, static_argnames=("longest", "kv_longest"))
    def run(cu_q: jax.Array, cu_kv: jax.Array, longest: int, kv_longest: int) -> Any:
        inputs = (np.nan_to_num(x) for x in problem.inputs)
        lengths = {"cu_q_lengths": cu_q, "cu_kv_lengths": cu_kv}
        function = functools.partial(attend, **lengths, max_q_length=longest, max_kv_length=kv_longest)
        results, pullback = jax.vjp(function, *inputs)
        return *results, *pullback(jax.tree.map(jnp.ones_like, results))

    lengths = problem.cu_q_lengths, problem.cu_kv_lengths
    for x in run(*lengths, 9, 8):
        assert not np.isnan(x).any()
    for longest in ((8, 8), (9, 7)):
        out, lse, *gradients = run(*lengths, *longest)
        assert np.isnan(out).all()
        assert np.isnan(lse).all()
        for x in gradients:
            assert np.isnan(x).any()
