"""Derivatives of every order and mode through the ordinary call, and the kernels that serve them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, SMALL_EVERYTHING, SMALL_PACKED, Case, PackedCase, Target
from jax.test_util import check_grads

import jax_flash

Attend = Callable[..., tuple[jax.Array, jax.Array]]


# By differences, in float64


def _finite_results(attend: Attend, padding: np.ndarray, inputs: Any, trainable: Any) -> Any:
    """out, and lse without the rows that keep no key, whose differences are NaN, and without padding's, its sinks."""
    out, lse = attend(*inputs, **trainable)
    return out, jnp.where((lse > -jnp.inf) & ~padding, lse, 0.0)


SMALL_OPTIONS = dataclasses.replace(SMALL_EVERYTHING, name="small_options", bias_holes=0.0)


@pytest.mark.parametrize(
    "case",
    [SMALL, *(pytest.param(case, marks=pytest.mark.slow(15)) for case in (SMALL_OPTIONS, SMALL_PACKED))],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize(
    "target", cases.targets(lambda target: "float64" in target.dtypes and target.platform == "cpu")
)
def test_check_grads(target: Target, case: Case | PackedCase) -> None:
    """Both modes, and each of them over each of them."""
    problem = cases.problem_of(case, "float64")
    # Finite differences would read padding, whose NaN must not matter.
    arguments = jax.tree.map(np.nan_to_num, (problem.inputs, problem.trainable))
    results = functools.partial(_finite_results, jax.jit(cases.call(target, problem)), np.isnan(problem.dlse))
    check_grads(results, arguments, order=2, modes=["fwd", "rev"], atol=1e-6, rtol=1e-6)


# In every dtype, compared with plain JAX


TILES = Case("derivatives_tiles", 70, 300, q_heads=4, kv_heads=2, head_dim=24, causal=True, q_offset=230)
OPTIONS = Case(
    *("derivatives_options", 40, 70, 4, 2, 16),
    value_head_dim=24,
    bias="nts",
    window=(50, 3),
    q_offset=30,
    softcap=3.0,
    alibi="n",
    sinks=True,
    dropout_rate=0.2,
    segments=2,
    kv_lengths=(70, 41),
)
PACKED = PackedCase("derivatives_packed", (40, 20, 70), (40, 30, 70), q_heads=4, kv_heads=2, alibi="dn", sinks=True)


def second_order(attend: Attend, problem: cases.Problem) -> dict[str, jax.Array]:
    """Tangents of out and lse, and of the gradients (Hessian-vector products), forward over reverse."""
    rng = np.random.default_rng(3)
    at = problem.inputs, problem.trainable
    along = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), at)
    cotangents = problem.dout, problem.dlse

    def results(inputs: Any, trainable: Any) -> Any:
        out, lse = attend(*inputs, **trainable)
        return out, jnp.where(lse > -jnp.inf, lse, 0.0)

    @jax.jit
    def run(at: Any, along: Any, cotangents: Any) -> Any:  # arguments, for XLA would fold constants, at great length
        def gradients(inputs: Any, trainable: Any) -> Any:
            return jax.vjp(results, inputs, trainable)[1](cotangents)

        return jax.jvp(results, at, along)[1], jax.jvp(gradients, at, along)[1]

    (out, lse), (inputs, trainable) = run(at, along, cotangents)
    return {"out": out, "lse": lse} | dict(zip("qkv", inputs, strict=True)) | trainable


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("target", "dtype", "case"),
    [
        cases.param(target, dtype, case, id=f"{case.name}-{dtype}")
        for target in cases.TARGETS
        if target.kernel
        for case, dtypes in (
            (TILES, cases.DTYPES),
            (OPTIONS, ("float32", "bfloat16")),
            (PACKED, ("float32", "float16")),
        )
        for dtype in dtypes
        if dtype in target.dtypes
    ],
)
def test_values(target: Target, dtype: str, case: Case | PackedCase) -> None:
    """The tolerance rule: three times the errors of plain JAX in this dtype, and a few epsilons."""
    problem = cases.problem_of(case, dtype)
    problem = dataclasses.replace(
        problem, **{name: np.nan_to_num(getattr(problem, name)) for name in ("query", "key", "value", "dout", "dlse")}
    )
    found = second_order(cases.call(target, problem), problem)
    wide = dataclasses.replace(
        problem,
        **{name: getattr(problem, name).astype(np.float64) for name in ("query", "key", "value", "dout", "dlse")},
        **{name: x.astype(np.float64) for name, x in problem.trainable.items()},
    )
    with jax.default_device(jax.devices("cpu")[0]):
        right = jax.tree.map(np.asarray, second_order(functools.partial(wide.plain, **wide.options), wide))
    plain = second_order(functools.partial(problem.plain, **problem.options), problem)
    for name, want in right.items():
        epsilon = cases.epsilon("lse" if name == "lse" else "out", problem.query.dtype)
        # In float64 plain JAX is no measure, only the exact result. Gradients of options are sums whose terms cancel.
        few = {"float64": 64, "float32": 32}.get(dtype, 8)
        epsilons = epsilon * (512 if dtype not in cases.NARROW and name in problem.trainable else few)
        size, norm = np.abs(want).max(), np.linalg.norm(want)

        def errors(x: Any, want: np.ndarray = want) -> tuple[float, float]:
            difference = np.asarray(x).astype(np.float64) - want
            return np.abs(difference).max(), np.linalg.norm(difference)

        assert size > 0
        (maximum, l2), (plain_maximum, plain_l2) = errors(found[name]), errors(plain[name])
        assert maximum <= 3 * plain_maximum + epsilons * size, name
        assert l2 <= 3 * plain_l2 + epsilons * norm, name


# Every transformation


def _transformations(attend: Attend) -> dict[str, Callable[..., Any]]:
    """Functions of (query, key, value)."""

    def loss(*inputs: jax.Array) -> jax.Array:
        out, lse = attend(*inputs)
        return jnp.sin(out).sum() + (lse * jnp.cos(jnp.arange(lse.size, dtype=lse.dtype).reshape(lse.shape))).sum()

    gradient = jax.grad(loss, (0, 1, 2))

    def norm(*inputs: jax.Array) -> jax.Array:
        return sum(jnp.square(x).sum() for x in gradient(*inputs))

    def stacked(function: Callable[..., Any], *inputs: jax.Array) -> Any:
        return function(*(jnp.stack([x, x + x, -x]) for x in inputs))

    def repeated(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda q, _: (attend(q, key, value)[0], None), query, None, length=3)[0].sum()

    def laplacian(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def along(direction: jax.Array) -> jax.Array:
            def first(query: jax.Array) -> jax.Array:
                return jax.jvp(lambda query: loss(query, key, value), (query,), (direction,))[1]

            return jax.jvp(first, (query,), (direction,))[1]

        return jax.vmap(along)(jnp.eye(query.size, dtype=query.dtype).reshape(-1, *query.shape)[:5]).sum()

    return {
        "jvp": lambda *x: jax.jvp(loss, x, x)[1],
        "jvp_of_value_alone": lambda q, k, v: jax.jvp(lambda v: attend(q, k, v), (v,), (v,))[1],
        "linearize": lambda *x: jax.linearize(loss, *x)[1](*x),
        "jacfwd": lambda q, k, v: jax.jacfwd(lambda k: attend(q, k, v))(k),
        "jacrev": lambda q, k, v: jax.jacrev(lambda k: attend(q, k, v))(k),
        "hessian": lambda q, k, v: jax.hessian(lambda q: loss(q, k, v))(q),
        "hessian_vector": lambda *x: jax.jvp(gradient, x, x)[1],
        "vector_hessian": lambda *x: jax.grad(lambda *y: jax.jvp(loss, y, x)[1], (0, 1, 2))(*x),
        "grad_of_grad": jax.grad(norm, (0, 1, 2)),
        "third": lambda *x: jax.jvp(jax.grad(norm), x, x)[1],
        "laplacian": laplacian,
        "vmap_of_jvp": lambda *x: stacked(jax.vmap(lambda *y: jax.jvp(loss, y, y)[1]), *x),
        "vmap_of_hessian_vector": lambda *x: stacked(jax.vmap(lambda *y: jax.jvp(gradient, y, y)[1]), *x),
        "grad_of_vmap": jax.grad(lambda *x: stacked(jax.vmap(loss), *x).sum(), (0, 1, 2)),
        "grad_of_vmap_of_grad": jax.grad(lambda *x: stacked(jax.vmap(norm), *x).sum(), (0, 1, 2)),
        "checkpoint": jax.grad(jax.checkpoint(norm), (0, 1, 2)),
        "hessian_vector_of_checkpoint": lambda *x: jax.jvp(jax.grad(jax.checkpoint(loss)), x, x)[1],
        "scan": jax.grad(repeated, (0, 1, 2)),
        "hessian_vector_of_scan": lambda *x: jax.jvp(jax.grad(repeated), x, x)[1],
    }


TRANSFORMED = Case("transformed", 5, 7, q_heads=2, kv_heads=1, head_dim=3, leading=(1,), causal=True, q_offset=2)
NAMES = list(_transformations(jax_flash.attention))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_transformations(target: Target, name: str) -> None:
    """As in plain JAX, which is differentiated by JAX alone."""
    dtype = "float64" if "float64" in target.dtypes else "float32"
    inputs = cases.problem(TRANSFORMED, dtype).inputs

    def run(implementation: str) -> list[np.ndarray]:
        attend = functools.partial(
            jax_flash.attention, causal=True, q_offset=2, return_lse=True, implementation=implementation
        )
        return [
            np.asarray(x) for x in jax.tree.leaves(jax.jit(_transformations(attend)[name])(*map(jnp.asarray, inputs)))
        ]

    tolerance = 1e-12 if dtype == "float64" else 1e-4
    for got, want in zip(run(target.implementation), run("reference"), strict=True):
        assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max())


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
@pytest.mark.parametrize("order", ["forward_over_reverse", "reverse_over_reverse"])
def test_no_nan_in_second_derivatives(target: Target, order: str) -> None:
    """With rows that keep nothing, -inf in bias and NaN in padding."""
    problem = cases.problem(SMALL_EVERYTHING, target.dtypes[0])
    attend = cases.call(target, problem)

    def gradients(inputs: Any, trainable: Any) -> Any:
        _, pullback = jax.vjp(lambda inputs, trainable: attend(*inputs, **trainable), inputs, trainable)
        return pullback((problem.dout, problem.dlse))

    @jax.jit
    def second(inputs: Any, trainable: Any) -> Any:
        if order == "forward_over_reverse":
            # NaN where padding has it; -inf in bias has no direction.
            along = jax.tree.map(lambda x: jnp.where(jnp.isinf(x), 1, x), (inputs, trainable))
            return jax.jvp(gradients, (inputs, trainable), along)
        first, pullback = jax.vjp(gradients, inputs, trainable)
        return pullback(jax.tree.map(jnp.ones_like, first))

    for x in jax.tree.leaves(second(problem.inputs, problem.trainable)):
        assert np.isfinite(x).all()


# What is computed


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_first_order_is_two_kernels(target: Target) -> None:
    """Reverse mode evaluates no tangent, and lowers no chunk of plain JAX."""
    problem = cases.problem(TRANSFORMED, target.dtypes[0])
    attend = cases.call(target, problem)

    def loss(*inputs: jax.Array) -> jax.Array:
        out, lse = attend(*inputs)
        return out.astype(lse.dtype).sum() + lse.sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*problem.inputs).as_text()
    assert text.count("@jax_flash_forward(") == text.count("@jax_flash_backward(") == 1
    assert "while" not in text
    hessian_vector = jax.jit(lambda *x: jax.jvp(jax.grad(loss), x, x)).lower(*problem.inputs).as_text()
    assert "while" in hessian_vector, "the measure sees chunks"


def test_what_has_no_tangent_is_not_computed() -> None:
    problem = cases.problem(OPTIONS, "float32")
    attend = cases.call(cases.CPU, problem)

    def products(*moved: str) -> int:
        arguments = {"query": problem.query, "key": problem.key, "value": problem.value} | problem.trainable

        def of_moved(*xs: Any) -> Any:
            return attend(**{**arguments, **dict(zip(moved, xs, strict=True))})

        xs = tuple(arguments[name] for name in moved)
        return jax.jit(lambda *xs: jax.jvp(of_moved, xs, xs)[1]).lower(*xs).as_text().count("dot_general")

    assert products("value") < products("query", "value") < products("query", "key", "value")
    assert products() == 0
