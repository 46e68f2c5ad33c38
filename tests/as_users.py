"""Attention as users run it: x64 off, JAX's own promotion, all of XLA's optimisations, nothing configured.

conftest.py sets all of that for the other tests, once and for all: tests/test_as_users.py runs this file in processes
of its own. By hand: ``python -m pytest --noconftest tests/as_users.py``.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, PackedCase, Target

import jax_flash

targets = pytest.mark.parametrize("target", [cases.CPU, cases.XLA], ids=lambda target: target.implementation)


def test_nothing_is_configured() -> None:
    """The configuration is really that of users; otherwise this file would repeat the other tests."""
    assert not jax.config.jax_enable_x64
    assert jax.config.jax_numpy_dtype_promotion == "standard"
    assert not jax.config.read("jax_disable_most_optimizations")
    assert jax.config.jax_default_matmul_precision is None
    assert "XLA_FLAGS" not in os.environ


def attend(target: Target, *args: Any, **options: Any) -> Any:
    return jax_flash.attention(*args, implementation=target.implementation, **options)


def drawn(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(got: Any, want: Any, epsilons: int = 100, least: float = 0) -> None:
    """Compares two trees of arrays that were computed in float32, each relative to its expected magnitude."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        g, w = np.asarray(g).astype(np.float64), np.asarray(w).astype(np.float64)
        np.testing.assert_allclose(g, w, rtol=0, atol=epsilons * 2.0**-23 * max(least, np.abs(w).max()))


# Values and gradients, by the tolerance rule

CASES = (
    cases.by_name("odd"),
    cases.by_name("everything"),
    next(case for case in cases.PACKED_CASES if case.name == "packed_everything"),
    Case("several_tiles", 150, 290, 4, 2, 64, (1,), causal=True, q_offset=140),
)
OF_XLA = (("odd", "float32"), ("odd", "bfloat16"), ("odd", "float16"), ("everything", "float32"))
"""The cases that "xla" runs: XLA compiles options slowly."""


@pytest.mark.parametrize(
    ("target", "case", "dtype"),
    [
        pytest.param(target, case, dtype, id=f"{target.implementation}-{case.name}-{dtype}")
        for target in (cases.CPU, cases.XLA)
        for case in CASES
        for dtype in ("float32", "bfloat16", "float16")
        if target.kernel or (case.name, dtype) in OF_XLA
    ],
)
def test_values_and_gradients(target: Target, case: Case | PackedCase, dtype: str) -> None:
    problem = cases.problem_of(case, dtype)
    problem.check("cpu", cases.differentiate(cases.call(target, problem), problem))


@targets
def test_without_jit(target: Target) -> None:
    """jax.grad of a plain call, by NumPy inputs."""
    problem = cases.problem(cases.by_name("grouped"), "float32")
    function = functools.partial(cases.call(target, problem))
    (out, lse), pullback = jax.vjp(function, *problem.inputs)
    gradients = pullback((problem.dout, problem.dlse))
    names = ("out", "lse", "dq", "dk", "dv")
    problem.check("cpu", dict(zip(names, (out, lse, *gradients), strict=True)))


# Arguments as users pass them

Q = drawn(2, 20, 4, 8)
K, V = drawn(2, 20, 2, 8, seed=1), drawn(2, 20, 2, 8, seed=2)


@targets
def test_python_and_numpy_scalars(target: Target) -> None:
    want = attend(target, Q, K, V, scale=2.0, softcap=3.0, window=(5, 7), q_offset=2, causal=True)
    options: dict[str, Any] = {
        "scale": 2,
        "softcap": np.float64(3),
        "window": (np.int64(5), 7),
        "q_offset": np.int32(2),
        "causal": np.True_,
    }
    np.testing.assert_array_equal(attend(target, Q, K, V, **options), want)


@targets
def test_mixed_with_python_scalars(target: Target) -> None:
    """Python's numbers change no dtype around a call, nor the dtype of a gradient."""

    def loss(q: jax.Array, strength: float) -> jax.Array:
        out, lse = attend(target, 0.5 * q, K.astype(q.dtype), V.astype(q.dtype), return_lse=True, causal=True)
        return strength * (out * 2 + 1).sum() + 0.1 * lse.sum()

    for dtype in (jnp.float32, jnp.bfloat16):
        value, (by_q, by_strength) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(jnp.asarray(Q, dtype), 3.0)
        assert value.dtype == jnp.float32
        assert by_q.dtype == dtype
        assert by_strength.dtype == jnp.float32


@targets
def test_weak_types(target: Target) -> None:
    """Arrays that JAX made of Python's numbers (weak types) have their own dtype."""
    q = jnp.broadcast_to(0.5, Q.shape)
    bias = jnp.broadcast_to(-1.0, (20, 20))
    assert q.weak_type
    assert bias.weak_type

    def total(q: Any, bias: Any) -> Any:
        return attend(target, q, K, V, bias=bias).sum()

    strong = np.full(Q.shape, 0.5, np.float32), np.full((20, 20), -1, np.float32)
    got, want = (jax.value_and_grad(total, argnums=(0, 1))(*arrays) for arrays in ((q, bias), strong))
    close(got, want)


@targets
def test_integers_of_the_default_dtype(target: Target) -> None:
    """Integers are int32 without x64: jnp arrays of lists are accepted as they are."""
    lengths = jnp.array([20, 13])
    segments = jnp.arange(20) // 7 + jnp.zeros((2, 1), int)
    assert lengths.dtype == segments.dtype == jnp.int32
    dout, dlse = drawn(2, 20, 4, 8, seed=3), np.zeros((2, 4, 20), np.float32)
    options = {"q_segment_ids": segments, "kv_segment_ids": segments, "kv_lengths": lengths}
    problem = cases.Problem(Q, K, V, dout, dlse, **{name: np.asarray(x) for name, x in options.items()})
    out, lse = jax.jit(lambda options: attend(target, Q, K, V, return_lse=True, **options))(options)
    problem.check("cpu", {"out": out, "lse": lse})

    @jax.jit
    def packed_and_apart() -> tuple[jax.Array, jax.Array]:
        cu = jnp.cumsum(jnp.array([0, 12, 8]))
        starts = {"cu_q_lengths": cu, "cu_kv_lengths": cu, "max_q_length": 12, "max_kv_length": 12}
        packed = jax_flash.attention_varlen(Q[0], K[0], V[0], **starts, implementation=target.implementation)
        apart = [attend(target, Q[0, at], K[0, at], V[0, at]) for at in (slice(12), slice(12, 20))]
        return packed, jnp.concatenate(apart)

    close(*packed_and_apart())


@targets
def test_integers_of_python_and_numpy(target: Target) -> None:
    """Lists, and int64, NumPy's default, are accepted like int32 arrays."""
    want = attend(target, Q, K, V, kv_lengths=np.array([20, 13], np.int32))
    for lengths in ([20, 13], np.array([20, 13])):
        np.testing.assert_array_equal(attend(target, Q, K, V, kv_lengths=lengths), want)
    packed = functools.partial(jax_flash.attention_varlen, Q[0], K[0], V[0], implementation=target.implementation)
    of_int32 = np.array([0, 12, 20], np.int32)
    np.testing.assert_array_equal(
        packed(np.cumsum([0, 12, 8]), [0, 12, 20], 12, 12), packed(of_int32, of_int32, 12, 12)
    )


@targets
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": Q.astype(np.float64)}, "query must have a dtype that JAX has enabled, got float64 without"),
        ({"key": K.astype(np.float64)}, "key must have a dtype that JAX has enabled, got float64 without"),
        ({"value": V.astype(jnp.bfloat16)}, "value must have the dtype of query, float32, got bfloat16"),
        ({"bias": np.zeros((20, 20))}, "bias must have one of the dtypes float16, bfloat16, float32, got float64"),
        ({"alibi_slopes": np.ones(4)}, "alibi_slopes must have a floating dtype of at most float32, got float64"),
    ],
    ids=["query", "key", "value", "bias", "alibi_slopes"],
)
def test_dtypes_that_are_refused(target: Target, arguments: dict[str, Any], message: str) -> None:
    """NumPy's float64, which JAX would round to float32 silently, and mixed dtypes."""
    with pytest.raises(TypeError, match=message):
        attend(target, **{"query": Q, "key": K, "value": V, **arguments})


@targets
def test_the_dtype_of_numpy_inputs_stays(target: Target) -> None:
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        out, lse = attend(target, *(x.astype(dtype) for x in (Q, K, V)), return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == np.float32


# Transformations


def by_default(target: Target, *arrays: jax.Array) -> jax.Array:
    return attend(target, *arrays, causal=True)


def by_plain(_: Target, *arrays: jax.Array) -> jax.Array:
    return oracle.plain(*arrays, causal=True)[0]


Layer = Callable[..., jax.Array]


def block(layer: Layer, target: Target, x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """A residual layer [B, T, D] of four heads."""
    heads = (jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in "qkv")
    return x + jnp.einsum("btnh,nhd->btd", layer(target, *heads), weights["o"])


def parameters(layers: int, features: int = 16, heads: int = 4) -> dict[str, np.ndarray]:
    shape = (layers, features, heads, features // heads)
    weights = {name: 0.3 * drawn(*shape, seed=i) for i, name in enumerate("qkv")}
    return weights | {"o": 0.3 * drawn(layers, heads, features // heads, features, seed=3)}


@targets
@pytest.mark.parametrize("remat", [False, True], ids=["scan", "scan_of_remat"])
def test_layers_by_scan(target: Target, remat: bool) -> None:
    x, weights = drawn(2, 33, 16, seed=4), parameters(3)

    def loss(layer: Layer, weights: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return block(layer, target, x, weights), None

        return jnp.square(jax.lax.scan(jax.checkpoint(step) if remat else step, x, weights)[0]).mean()

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, layer), argnums=(0, 1)))(weights, x)
        for layer in (by_default, by_plain)
    )
    close(got, want, epsilons=1000)


@targets
def test_vmap(target: Target) -> None:
    """vmap over an ensemble of models, whose members have queries and offsets of their own and share keys."""
    q, offsets = drawn(3, 2, 20, 4, 8, seed=5), jnp.array([0, -4, 7])

    def value_and_gradients(q: jax.Array, k: jax.Array, offset: jax.Array) -> Any:
        def total(q: jax.Array, k: jax.Array) -> jax.Array:
            return jnp.sin(attend(target, q, k, V, causal=True, q_offset=jnp.full(2, offset))).sum()

        return jax.value_and_grad(total, argnums=(0, 1))(q, k)

    together = jax.jit(jax.vmap(value_and_gradients, in_axes=(0, None, 0)))(q, K, offsets)
    alone = [jax.jit(value_and_gradients)(q[i], K, offsets[i]) for i in range(3)]
    close(together, jax.tree.map(lambda *x: jnp.stack(x), *alone))


@targets
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_training(target: Target, dtype: Any) -> None:
    """Five steps of a model that learns to repeat what came before: as with plain attention, and its loss falls."""
    tokens = np.tile(np.random.default_rng(0).integers(0, 11, (4, 8)), 3)
    initial = {
        "embedding": drawn(11, 16, seed=6),
        "position": drawn(24, 16, seed=7),
        "layer": jax.tree.map(lambda x: x[0], parameters(1)),
    }

    def loss(layer: Layer, weights: Any) -> jax.Array:
        cast = jax.tree.map(lambda x: jnp.asarray(x, dtype), weights)
        x = block(layer, target, cast["embedding"][tokens[:, :-1]] + cast["position"][:-1], cast["layer"])
        logits = (x @ cast["embedding"].T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    def train(layer: Layer) -> tuple[Any, list[float]]:
        @functools.partial(jax.jit, donate_argnums=0)
        def step(weights: Any) -> Any:
            value, gradients = jax.value_and_grad(functools.partial(loss, layer))(weights)
            return jax.tree.map(lambda x, g: x - 0.1 * g, weights, gradients), value

        trained, losses = jax.tree.map(jnp.array, initial), []
        for _ in range(5):
            trained, value = step(trained)
            losses.append(float(value))
        return trained, losses

    trained, losses = train(by_default)
    _, want = train(by_plain)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(trained))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, want, rtol=1e-5 if dtype == jnp.float32 else 2e-2)


# Flax


@targets
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax(target: Target, library: str) -> None:
    """A module with the hook, and one without it: results and gradients by the parameters."""
    pytest.importorskip("flax")
    from flax import linen, nnx

    import jax_flash.flax

    hook = functools.partial(jax_flash.flax.attention_fn, implementation=target.implementation)
    x, mask = drawn(2, 12, 16, seed=8), np.tri(12, dtype=bool)[None, None]

    def of_linen(**options: Any) -> Any:
        module = linen.MultiHeadDotProductAttention(num_heads=4, **options)
        weights = module.init(jax.random.key(0), x)
        return jax.jit(jax.value_and_grad(lambda weights: jnp.sin(module.apply(weights, x, mask=mask)).sum()))(weights)

    def of_nnx(**options: Any) -> Any:
        module = nnx.MultiHeadAttention(4, 16, decode=False, **options, rngs=nnx.Rngs(0))
        value, gradients = nnx.jit(nnx.value_and_grad(lambda module: jnp.sin(module(x, mask=mask)).sum()))(module)
        return value, nnx.to_pure_dict(gradients)

    train = {"linen": of_linen, "nnx": of_nnx}[library]
    # The gradient by the bias of keys is 0, made of terms of about 1.
    close(train(attention_fn=hook), train(), epsilons=300, least=1)
