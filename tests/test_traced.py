"""A scale and a window that are arrays: traced, mapped, scanned over, and of the scale every derivative.

Their values are tested by the conformance cases (cases.py, "array_..."); here is tracing, mapping and scanning.
"""

import functools
import re
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Target
from jax.test_util import check_grads

import jax_flash

UNLIMITED = 2**31 - 1
CASE = Case("traced", 23, 31, q_heads=4, kv_heads=2, head_dim=8, causal=True, q_offset=(9, -2))
WINDOWS = [(3, 0), (UNLIMITED, UNLIMITED), (12, -2), (-4, 9), (2, -5)]


def attend(target: Target, problem: cases.Problem, **options: Any) -> tuple[jax.Array, jax.Array]:
    results: tuple[jax.Array, jax.Array] = cases.call(target, problem, **options)(*problem.inputs)
    return results


@pytest.mark.parametrize("target", cases.targets())
def test_one_program_for_every_value(target: Target) -> None:
    problem = cases.problem(CASE, target.dtypes[0])
    traces = 0

    @jax.jit
    def run(scale: Any, window: Any) -> Any:
        nonlocal traces
        traces += 1
        return attend(target, problem, scale=scale, window=window)

    for scale, (left, right) in zip((0.3, -0.2, 0.0, 1.0, 0.5), WINDOWS, strict=True):
        out, lse = run(np.float32(scale), (np.int32(left), np.int32(right)))
        options = problem.options | {"scale": scale, "window": (np.array(left, np.int32), np.array(right, np.int32))}
        right_one = cases.Problem(*problem.inputs, problem.dout, problem.dlse, **options)
        right_one.check(target.platform, {"out": np.asarray(out), "lse": np.asarray(lse)})
    assert traces == 1
    run(np.float64(0.3), (np.int32(3), np.int32(0)))
    assert traces == 2, "another dtype is another program: the count works"


def test_eager_calls_compile_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without jit, arrays of other values take the same programs, where numbers would be compiled in."""
    problem = cases.problem(CASE, "float32")
    inputs = [jnp.asarray(x) for x in problem.inputs]

    def run(scale: float, left: int) -> None:
        jax_flash.attention(*inputs, scale=jnp.float32(scale), window=(jnp.int32(left), 1), implementation="cpu")

    run(0.3, 5)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run(-0.2, 7)
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_forms(target: Target) -> None:
    """NumPy's and JAX's arrays, with a side that is a number or none, and one array for both sides."""
    problem = cases.problem(CASE, target.dtypes[0])
    want = attend(target, problem, scale=0.4, window=(6, 6))
    for window in (np.array(6, np.int32), jnp.int32(6), (jnp.int32(6), 6), [6, np.array(6, np.int32)]):
        for scale in (0.4, np.array(0.4), jnp.float32(0.4), jnp.asarray(0.4)):
            for got, x in zip(attend(target, problem, scale=scale, window=window), want, strict=True):
                np.testing.assert_array_equal(got, x)
    want = attend(target, problem, window=(6, None))
    for got, x in zip(attend(target, problem, window=(jnp.int32(6), None)), want, strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_gradient_has_the_dtype_of_the_scale(dtype: str) -> None:
    problem = cases.problem(CASE, "bfloat16")
    gradient = jax.grad(lambda scale: attend(cases.CPU, problem, scale=scale)[0].astype(jnp.float32).sum())
    want = gradient(jnp.float32(0.5))
    got = gradient(jnp.asarray(0.5, dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(np.float64(got), want, rtol=2 * float(jnp.finfo(dtype).eps) + 1e-6)


@pytest.mark.parametrize("mapped", ["scale", "window", "both", "all"])
@pytest.mark.parametrize("target", cases.targets())
def test_vmap(target: Target, mapped: str) -> None:
    """Each of the mapped calls has its own; compared with calls one by one that have them as numbers."""
    size = len(WINDOWS)
    rng = np.random.default_rng(1)
    dtype = target.dtypes[0]
    one = cases.problem(CASE, dtype)
    inputs = [cases.random(rng, (size, *x.shape), dtype) for x in one.inputs] if mapped == "all" else one.inputs
    scales = np.array([0.3, -0.2, 0.0, 1.0, 0.5], np.float32)
    windows = np.array(WINDOWS, np.int32)
    axes = {"scale": (None, 0, None), "window": (None, None, 0), "both": (None, 0, 0), "all": (0, 0, 0)}[mapped]

    def run(inputs: Any, scale: Any, window: Any) -> Any:
        def function(query: Any, key: Any, value: Any, scale: Any) -> Any:
            return cases.call(target, one, window=(window[0], window[1]))(query, key, value, scale=scale)

        results, pullback = jax.vjp(function, *inputs, scale)
        return (*results, *pullback((one.dout, one.dlse)))

    arguments = (inputs, scales if axes[1] == 0 else scales[0], windows if axes[2] == 0 else windows[2])
    results = jax.jit(jax.vmap(run, axes))(*arguments)

    def entry(i: int) -> list[Any]:
        pairs = zip(arguments, axes, strict=True)
        return [x if axis is None else jax.tree.map(lambda x: x[i], x) for x, axis in pairs]

    for i in range(size):
        of_inputs, scale, (left, right) = entry(i)
        options = one.options | {"scale": np.array(scale), "window": (np.array(left), np.array(right))}
        problem = cases.Problem(*of_inputs, one.dout, one.dlse, **options)
        names = ("out", "lse", "dq", "dk", "dv", "dscale")
        problem.check(target.platform, dict(zip(names, (np.asarray(x[i]) for x in results), strict=True)))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("target", cases.targets())
def test_layers_that_alternate(target: Target, packed: bool) -> None:
    """Layers under lax.scan, local and global ones, are the same as one after the other with numbers; one kernel."""
    rng = np.random.default_rng(2)
    dtype = target.dtypes[0]
    shape, sizes = ((50, 2, 16), (20, 30)) if packed else ((2, 50, 2, 16), None)
    x, dout = (jnp.asarray(cases.random(rng, shape, dtype, 0.5)) for _ in range(2))
    weights = jnp.asarray(cases.random(rng, (4, 16, 16), dtype, 0.25))
    scales = np.array([0.3, 0.2, 0.25, 0.4], np.float32)
    lefts = np.array([4, UNLIMITED, 9, UNLIMITED], np.int32)
    function: Any = functools.partial(jax_flash.attention, causal=True, implementation=target.implementation)
    if sizes:
        cu = np.cumsum([0, *sizes]).astype(np.int32)
        function = functools.partial(
            functools.partial(jax_flash.attention_varlen, causal=True, implementation=target.implementation),
            cu_q_lengths=cu,
            cu_kv_lengths=cu,
            max_q_length=30,
            max_kv_length=30,
        )

    def layer(x: Any, weight: Any, scale: Any, left: Any) -> Any:
        return x + function(x @ weight, x, x, scale=scale, window=(left, None))

    def scanned(x: Any, weights: Any, scales: Any) -> Any:
        return jax.lax.scan(lambda x, of: (layer(x, *of), None), x, (weights, scales, lefts))[0]

    def unrolled(x: Any, weights: Any, scales: Any) -> Any:
        for i, left in enumerate(lefts):
            x = layer(x, weights[i], scales[i], None if left == UNLIMITED else int(left))
        return x

    def differentiated(model: Any) -> Any:
        out, pullback = jax.vjp(model, x, weights, jnp.asarray(scales))
        return (out, *pullback(dout))

    got = jax.jit(functools.partial(differentiated, scanned))
    if target.kernel:
        assert got.lower().as_text().count("custom_call @jax_flash_forward") == 1
    for y, want in zip(got(), jax.jit(functools.partial(differentiated, unrolled))(), strict=True):
        y, want = (np.asarray(x).astype(np.float64) for x in (y, want))
        np.testing.assert_allclose(y, want, rtol=0, atol=64 * float(jnp.finfo(dtype).eps) * np.abs(want).max())


@pytest.mark.slow(5)
@pytest.mark.parametrize("scale", [0.7, -0.4, 0.0])
@pytest.mark.parametrize("target", cases.targets(lambda target: "float64" in target.dtypes))
def test_every_order_by_the_scale(target: Target, scale: float) -> None:
    """Also at 0, where neither the sign of a scale nor its magnitude has a derivative."""
    problem = cases.problem(Case("orders", 5, 7, q_heads=4, kv_heads=2, head_dim=3, softcap=2.0), "float64")
    window = (np.array(4, np.int32), np.array(-1, np.int32))

    def function(query: Any, scale: Any) -> Any:
        out, lse = cases.call(target, problem, window=window)(query, *problem.inputs[1:], scale=scale)
        return out, jnp.where(lse > -jnp.inf, lse, 0.0)

    check_grads(jax.jit(function), (problem.query, scale), order=2, modes=["fwd", "rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, -1e-40])
def test_tiny_scales(scale: float) -> None:
    """The gradient is that at 0, though the reciprocal of a subnormal scale overflows."""
    problem = cases.problem(CASE, "float32")
    gradient = jax.grad(lambda scale: attend(cases.CPU, problem, scale=scale)[0].sum())
    np.testing.assert_allclose(gradient(jnp.float32(scale)), gradient(jnp.float32(0)), rtol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_numbers_take_no_operand(platform: str) -> None:
    """A kernel reads arrays only if the call has some: calls with numbers have the kernels without."""
    query, key, value = cases.problem(CASE, "float32").inputs

    def gradients(scale: Any, left: Any) -> Any:
        def loss(query: Any) -> jax.Array:
            return jax_flash.attention(query, key, value, scale=scale, window=(left, 2)).sum()

        return jax.grad(loss)(query)

    numbers = jax.jit(functools.partial(gradients, -0.4, 6)).trace()
    arrays = jax.jit(gradients).trace(jnp.float32(-0.4), jnp.int32(6))
    for there, traced in (("false", numbers), ("true", arrays)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        calls = [line for line in text.splitlines() if re.search("@jax_flash_(forward|backward)", line)]
        assert len(calls) == 2
        for line in calls:
            assert f"has_traced_scale = {there}" in line
            assert f"has_window_bounds = {there}" in line
