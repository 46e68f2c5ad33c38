"""attention_fn() in Flax's own modules: same parameters, same results as with Flax's attention.

Every argument that the modules pass to their hook has a test here, by the name in ARGUMENTS.
"""

import functools
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_flash
import jax_flash.flax
from jax_flash.flax import attention_fn

LEADING, T, S, N, H, FEATURES = (2,), 9, 12, 4, 8, 32

ARGUMENTS = {
    "mask",
    "dropout_rng",
    "dropout_rate",
    "broadcast_dropout",
    "deterministic",
    "dtype",
    "precision",
    "module",
    "is_causal",  # of nnx alone, and not in every version
    "force_fp32_for_softmax",  # of linen alone, and so are those that follow
    "qk_attn_weights_einsum",
    "attn_weights_value_einsum",
}

NNX_IS_CAUSAL = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters
"""Whether nnx's module has the argument, which came with Flax 0.12.8; its function has it in every version."""


# Modules


class Nnx:
    """flax.nnx.MultiHeadAttention with one set of parameters, and a hook by choice."""

    def __init__(self, **options: Any) -> None:
        self.options = {"num_heads": N, "in_features": FEATURES, "decode": False, **options}

    def module(self, hook: Callable[..., Any] | None, **changes: Any) -> Any:
        hooked = {} if hook is None else {"attention_fn": hook}
        return nnx.MultiHeadAttention(**self.options, **hooked, **changes, rngs=nnx.Rngs(0))

    def parameters(self) -> Any:
        return nnx.state(self.module(None), nnx.Param)

    def apply(
        self, hook: Callable[..., Any] | None, parameters: Any, *inputs: Any, seed: Any = None, **call: Any
    ) -> tuple[Any, Any]:
        """Result and sown weights."""
        module = self.module(hook)
        nnx.update(module, parameters)
        out = module(*inputs, rngs=None if seed is None else nnx.Rngs(dropout=seed), **call)
        return out, nnx.state(module, nnx.Intermediate)


class Linen:
    """flax.linen.MultiHeadDotProductAttention, likewise."""

    def __init__(self, **options: Any) -> None:
        self.options = {"num_heads": N, **options}

    def module(self, hook: Callable[..., Any] | None) -> Any:
        hooked = {} if hook is None else {"attention_fn": hook}
        return linen.MultiHeadDotProductAttention(**self.options, **hooked)

    def parameters(self) -> Any:
        inputs = jnp.zeros((1, 2, FEATURES), jnp.float32)
        return self.module(None).init(dict.fromkeys(("params", "dropout"), jax.random.key(0)), inputs)

    def apply(
        self, hook: Callable[..., Any] | None, parameters: Any, *inputs: Any, seed: Any = None, **call: Any
    ) -> tuple[Any, Any]:
        rngs = {} if seed is None else {"dropout": seed}
        return self.module(hook).apply(parameters, *inputs, rngs=rngs, mutable=["intermediates"], **call)


MODULES = {"nnx": Nnx, "linen": Linen}
modules = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Flax relies on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Fewer optimisations compile in a third of the time; the kernels are compiled already."""


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs(leading: tuple[int, ...] = LEADING) -> tuple[np.ndarray, np.ndarray]:
    return normal(1, *leading, T, FEATURES), normal(2, *leading, S, FEATURES)


def run(
    flax_module: Nnx | Linen,
    hooks: Sequence[Callable[..., Any] | None],
    arrays: tuple[np.ndarray, ...],
    gradients: bool = False,
    **call: Any,
) -> list[dict[str, Any]]:
    """For each hook the result, sown weights, and the gradients of parameters and inputs, all in one program."""
    static = {name: value for name, value in call.items() if not isinstance(value, (np.ndarray, jax.Array))}
    traced = {name: value for name, value in call.items() if name not in static}

    def compute(hook: Any, parameters: Any, arrays: Any, traced: Any) -> Any:
        def loss(parameters: Any, arrays: Any) -> Any:
            out, sown = flax_module.apply(hook, parameters, *arrays, **static, **traced)
            return jnp.sum(jnp.sin(3 * out.astype(jnp.float32))), {"out": out, "sown": sown}

        if not gradients:
            return loss(parameters, arrays)[1]
        (_, results), of = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(parameters, arrays)
        return {**results, "gradients": of}

    together = jit(lambda *arguments: [compute(hook, *arguments) for hook in hooks])
    return together(flax_module.parameters(), arrays, traced)


def assert_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Compares every array of two trees, relative to the expected magnitude."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype, path
        g, w = np.asarray(g).astype(np.float64), np.asarray(w).astype(np.float64)
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * max(1.0, np.abs(w).max()), err_msg=str(path))


def compare(
    flax_module: Nnx | Linen, arrays: tuple[np.ndarray, ...], tolerance: float = 1e-5, **call: Any
) -> dict[str, Any]:
    """Asserts that the hook gives what Flax gives; returns the hook's results."""
    got, want = run(flax_module, (attention_fn, None), arrays, **call)
    assert_close(got, want, tolerance)
    return got


# What is passed


class _Anything(inspect.Signature):
    """Linen passes what a hook's signature names: this one names everything."""

    class _Names(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            return True

    @property
    def parameters(self) -> Any:
        return self._Names()


def passed(module: type[Nnx] | type[Linen]) -> dict[str, None]:
    """The names, in their order."""
    names: dict[str, None] = {}

    def spy(query: Any, key: Any, value: Any, **arguments: Any) -> Any:
        names.update(dict.fromkeys(arguments))
        return jnp.zeros_like(query)

    spy.__signature__ = _Anything()  # type: ignore[attr-defined]
    flax_module = module()
    jax.eval_shape(lambda: flax_module.apply(spy, flax_module.parameters(), *inputs(), sow_weights=True)[0])
    return names


def test_every_argument_is_named_and_tested() -> None:
    names = {*passed(Nnx), *passed(Linen)}
    assert names <= set(inspect.signature(attention_fn).parameters)
    assert names | {"is_causal"} == ARGUMENTS


@pytest.mark.skipif(not NNX_IS_CAUSAL, reason=f"the module of flax {flax.__version__} has no is_causal")
def test_the_order_that_nnx_passes() -> None:
    """The hook detects a bound is_causal by this order: mask comes before it, and Linen passes no is_causal."""
    order = list(passed(Nnx))
    assert order.index("mask") < order.index("is_causal")
    assert set(order) == {*jax_flash.flax._PASSED_BY_NNX, "is_causal"}
    assert "is_causal" not in passed(Linen)
    assert "force_fp32_for_softmax" in passed(Linen)


def test_flax_is_not_imported() -> None:
    program = """if True:
        import sys, jax_flash, jax_flash.flax, jax.numpy as jnp
        x = jnp.ones((3, 1, 4))
        jax_flash.flax.attention_fn(x, x, x)
        assert 'flax' not in sys.modules
        sys.modules['flax'] = None  # not installed
        try:
            jax_flash.flax.attention_fn(x + 1j, x, x)
        except NotImplementedError as error:
            assert "Flax must be installed for query of dtype complex64" in str(error)
        else:
            raise AssertionError
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# mask, and bias, which Flax's modules never pass


def keep(*shape: int) -> np.ndarray:
    """Some pairs, and the first key for every query: Flax's rows without keys are not ours."""
    mask = np.random.default_rng(3).random(shape) < 0.5
    mask[..., 0] = True
    return mask


@modules
def test_mask(module: Any) -> None:
    compare(module(), inputs(), mask=keep(*LEADING, N, T, S), gradients=True)


@modules
def test_mask_of_floats_and_of_one_head(module: Any) -> None:
    """As flax.linen.make_attention_mask makes them: float32, with one head."""
    make = nnx.make_attention_mask if module is Nnx else linen.make_attention_mask
    lengths = np.array([5, 12], np.int32)
    mask = make(np.ones((*LEADING, T), np.float32), (np.arange(S) < lengths[:, None]).astype(np.float32))
    assert mask.dtype == jnp.float32
    assert mask.shape == (*LEADING, 1, T, S)
    compare(module(), inputs(), mask=mask)


@pytest.mark.parametrize(
    ("leading", "shape"),
    [
        ((), (N, T, S)),
        ((), (1, 1, S)),
        ((2,), (1, 1, T, S)),
        ((2,), (2, 1, 1, S)),
        ((2,), (T, S)),
        ((2, 3), (2, 3, 1, T, S)),
        ((2, 3), (1, 3, N, 1, S)),
        ((2, 1, 2), (1, 1, 1, 1, T, S)),
    ],
    ids=str,
)
def test_every_broadcast(leading: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Of a mask, a mask of floats, and bias; the hook itself against Flax's function."""
    arrays = tuple(normal(i, *leading, length, N, H) for i, length in enumerate((T, S, S)))
    kept = keep(*shape)
    for_each = [{"mask": kept}, {"mask": -0.5 * kept.astype(np.float32)}, {"bias": normal(4, *shape)}]

    @functools.partial(jit, static_argnums=0)
    def results(function: Any, arrays: Any, for_each: Any) -> Any:
        return [function(*arrays, **extra) for extra in for_each]

    assert_close(results(attention_fn, arrays, for_each), results(linen.dot_product_attention, arrays, for_each))


@modules
def test_bias_that_is_bound(module: Any) -> None:
    """With its gradient, and a mask."""
    flax_module, arrays = module(), inputs()
    parameters = flax_module.parameters()
    functions = {Nnx: nnx.dot_product_attention, Linen: linen.dot_product_attention}

    @functools.partial(jit, static_argnums=0)
    def gradient(function: Any, bias: Any, mask: Any) -> Any:
        def loss(bias: Any) -> Any:
            hook = functools.partial(function, bias=bias)
            return jnp.sum(jnp.sin(3 * flax_module.apply(hook, parameters, *arrays, mask=mask)[0]))

        return jax.grad(loss)(bias)

    arguments = normal(5, 1, N, 1, S), keep(*LEADING, 1, T, S)
    assert_close(gradient(attention_fn, *arguments), gradient(functions[module], *arguments))


@modules
def test_leading_dimensions(module: Any) -> None:
    compare(module(), inputs((2, 3)), mask=keep(2, 3, N, T, S))


@modules
def test_no_leading_dimension(module: Any) -> None:
    compare(module(), inputs(()))


def test_grouped_heads() -> None:
    """nnx alone has them."""
    if "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters:
        pytest.skip(f"flax {flax.__version__} has no num_kv_heads")
    compare(Nnx(num_kv_heads=2), inputs(), mask=keep(*LEADING, N, T, S))


def test_another_head_dim_of_value() -> None:
    """No module has one, but Flax's functions take it."""
    query, key, value = normal(0, *LEADING, T, N, H), normal(1, *LEADING, S, N, H), normal(2, *LEADING, S, N, 5)
    got = jit(attention_fn)(query, key, value)
    np.testing.assert_allclose(got, linen.dot_product_attention(query, key, value), rtol=0, atol=1e-5)


@modules
def test_rows_without_keys_are_zeros(module: Any) -> None:
    """With finite gradients; in Flax they attend to every key alike."""
    mask = keep(*LEADING, 1, T, S)
    mask[0, :, 4] = False
    (results,) = run(module(use_bias=False), [attention_fn], inputs(), mask=mask, gradients=True)
    assert not np.asarray(results["out"])[0, 4].any()
    assert np.asarray(results["out"])[0, 3].any()
    for gradient in jax.tree.leaves(results["gradients"]):
        assert np.isfinite(gradient).all()


# is_causal


@pytest.mark.skipif(not NNX_IS_CAUSAL, reason=f"the module of flax {flax.__version__} has no is_causal")
def test_is_causal() -> None:
    compare(Nnx(), inputs(), is_causal=True)


@pytest.mark.parametrize("masked", [False, True])
def test_is_causal_of_the_function(masked: bool) -> None:
    """Aligned at the first query and the first key, whatever the lengths."""
    query, key, value = (normal(i, *LEADING, length, N, H) for i, length in enumerate((T, S, S)))
    extra = {"mask": keep(*LEADING, N, T, S)} if masked else {}
    got, want = jit(
        lambda: [f(query, key, value, is_causal=True, **extra) for f in (attention_fn, nnx.dot_product_attention)]
    )()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


CAUSAL = np.tril(np.ones((T, S), bool))


@modules
def test_causal_that_is_bound(module: Any) -> None:
    """No module overrides it: not nnx's, which passes is_causal=False, nor one that passes a mask."""
    flax_module, arrays = module(), inputs()
    causal = functools.partial(attention_fn, causal=True)
    mask = keep(*LEADING, N, T, S)
    assert_close(run(flax_module, [causal], arrays), run(flax_module, [None], arrays, mask=CAUSAL))
    assert_close(
        run(flax_module, [causal], arrays, mask=mask, gradients=True),
        run(flax_module, [None], arrays, mask=mask & CAUSAL, gradients=True),
    )
    if module is Nnx and NNX_IS_CAUSAL:
        assert_close(run(flax_module, [causal], arrays, is_causal=True), run(flax_module, [None], arrays, mask=CAUSAL))


def test_causal_and_other_options_that_are_bound() -> None:
    arrays = inputs()
    hook = functools.partial(attention_fn, causal=True, window=(2, 5), deterministic_backward=True)
    mask = CAUSAL & (np.arange(T)[:, None] - np.arange(S) <= 2)
    for flax_module in (Nnx(), Linen()):
        assert_close(run(flax_module, [hook], arrays), run(flax_module, [None], arrays, mask=mask))


def test_is_causal_that_is_bound_in_linen() -> None:
    """Linen's modules have no such argument, and so override none."""
    hook = functools.partial(attention_fn, is_causal=True)
    assert_close(run(Linen(), [hook], inputs()), run(Linen(), [None], inputs(), mask=CAUSAL))
    full = functools.partial(attention_fn, is_causal=False)
    assert_close(run(Linen(), [full], inputs()), run(Linen(), [None], inputs()))


@pytest.mark.skipif(not NNX_IS_CAUSAL, reason=f"the module of flax {flax.__version__} has no is_causal")
@pytest.mark.parametrize(
    "bind",
    [
        lambda f: functools.partial(f, is_causal=True),
        lambda f: functools.partial(functools.partial(f, is_causal=True), window=(3, 3)),
        lambda f: functools.partial(f, softcap=5.0, is_causal=True),
        lambda f: functools.partial(functools.partial(f, scale=0.5), is_causal=True),
    ],
    ids=["alone", "twice", "behind", "outside"],
)
def test_is_causal_that_is_bound_in_nnx(bind: Any) -> None:
    """The module's False contradicts it, silently in Flax's own function; its True does not."""
    hook = bind(attention_fn)
    module = Nnx()
    for call in ({}, {"mask": keep(*LEADING, N, T, S)}, {"sow_weights": True}, {"is_causal": False}):
        with pytest.raises(ValueError, match=r"is_causal must not be bound beforehand: .*; bind causal"):
            module.apply(hook, module.parameters(), *inputs(), **call)
    module.apply(hook, module.parameters(), *inputs(), is_causal=True)


def test_is_causal_that_is_not_bound_is_taken() -> None:
    """Direct calls of the hook may pass it in any order."""
    x = normal(0, T, N, H)
    mask = keep(T, T)
    np.testing.assert_array_equal(attention_fn(x, x, x, is_causal=False, mask=mask), attention_fn(x, x, x, mask=mask))


# dtype, precision, force_fp32_for_softmax


@modules
def test_dtype(module: Any) -> None:
    """At most twice the error of Flax in that dtype, and a few units, where float32 is right."""
    dtype = "bfloat16"  # which nnx's own function has on CPUs under jit, unlike float16
    mask = keep(*LEADING, 1, T, S)
    narrow = run(module(dtype=jnp.dtype(dtype)), (attention_fn, None), inputs(), mask=mask)
    (exact,) = run(module(), [None], inputs(), mask=mask)
    got, flax_s, want = (results["out"] for results in (*narrow, exact))
    assert got.dtype == flax_s.dtype == dtype
    error, base = (np.abs(np.asarray(x, np.float64) - np.asarray(want, np.float64)).max() for x in (got, flax_s))
    assert error <= 2 * base + 4 * float(jnp.finfo(dtype).eps) * np.abs(want).max()


def test_dtype_of_mixed_inputs() -> None:
    """Promoted as Flax promotes them, integers to float32, and cast where dtype says so."""
    query, key, value = (normal(i, T, N, H) for i in range(3))
    integers = (4 * query).astype(np.int32)
    cases = (
        ((query.astype(jnp.bfloat16), key, value), None),
        ((query, key.astype(np.float64), value), None),
        ((query.astype(np.float64), key, value), jnp.bfloat16),
        ((integers, integers, integers), None),
    )
    compute = jit(lambda function: [function(*arrays, dtype=dtype) for arrays, dtype in cases], static_argnums=0)
    for got, want in zip(compute(attention_fn), compute(linen.dot_product_attention), strict=True):
        assert_close(got, want, 1e-5 if want.dtype.itemsize >= 4 else 0.03)


PRECISIONS = {
    "default": "default",
    "fastest": "default",
    "high": "default",
    "tensorfloat32": "default",
    "highest": "highest",
    "float32": "highest",
    jax.lax.Precision.DEFAULT: "default",
    jax.lax.Precision.HIGH: "default",
    jax.lax.Precision.HIGHEST: "highest",
    ("default", "highest"): "highest",
    (jax.lax.Precision.HIGH, jax.lax.Precision.DEFAULT): "default",
    jax.lax.DotAlgorithmPreset.TF32_TF32_F32: "default",
    jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3: "highest",
    "BF16_BF16_F32_X6": "highest",
    "F32_F32_F32": "highest",
}


@pytest.mark.parametrize(("precision", "ours"), PRECISIONS.items(), ids=map(str, PRECISIONS))
def test_precision_of_the_function(precision: Any, ours: str) -> None:
    """It reaches attention() as the least accurate precision that is at least as accurate."""

    def jaxpr(function: Any, precision: Any) -> str:
        x = jax.ShapeDtypeStruct((4, 2, 8), jnp.float32)
        call = functools.partial(function, precision=precision)
        return str(jax.make_jaxpr(call)(x, x, x))

    assert jaxpr(attention_fn, precision) == jaxpr(jax_flash.attention, ours)


@modules
def test_precision(module: Any) -> None:
    compare(module(precision=jax.lax.Precision.HIGHEST), inputs())


def test_precision_unknown() -> None:
    x = normal(0, T, N, H)
    with pytest.raises(ValueError, match=r"precision must be None, a jax.lax.Precision.*got 'exact'"):
        attention_fn(x, x, x, precision="exact")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_force_fp32_for_softmax(dtype: str) -> None:
    """The weights and the result that it promises are float32, as Flax's."""
    module = Linen(force_fp32_for_softmax=True, dtype=jnp.dtype(dtype))
    tolerance = 1e-5 if dtype == "float32" else 0.03
    results = compare(module, inputs(), tolerance, sow_weights=True)
    assert results["out"].dtype == dtype
    assert jax.tree.leaves(results["sown"])[0].dtype == jnp.float32
    query = normal(0, T, N, H).astype(jnp.dtype(dtype))
    assert attention_fn(query, query, query, force_fp32_for_softmax=True).dtype == jnp.float32


# module: sown weights


sows = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
"""nnx wants modules that sow to be inside of nnx.capture, which Flax 0.12.0 does not have."""


@sows
@modules
def test_module(module: Any) -> None:
    """The weights that are sown."""
    results = compare(module(), inputs(), mask=keep(*LEADING, 1, T, S), sow_weights=True)
    (weights,) = jax.tree.leaves(results["sown"])
    assert weights.shape == (*LEADING, N, T, S)
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-5)


@sows
@modules
def test_module_with_a_gradient_through_the_weights(module: Any) -> None:
    flax_module, arrays = module(), inputs()

    @functools.partial(jit, static_argnums=0)
    def gradient(hook: Any, parameters: Any) -> Any:
        def loss(parameters: Any) -> Any:
            _, sown = flax_module.apply(hook, parameters, *arrays, sow_weights=True)
            (weights,) = jax.tree.leaves(sown)
            return jnp.sum(weights**2)

        return jax.grad(loss)(parameters)

    parameters = flax_module.parameters()
    assert_close(gradient(attention_fn, parameters), gradient(None, parameters))


def test_module_with_options_and_dropout() -> None:
    """The weights are those before dropout, whatever shaped them; rows without keys are zeros."""
    query, key, value = (normal(i, *LEADING, length, N, H) for i, length in enumerate((T, S, S)))
    sown = {}

    class Recorder:
        def sow(self, collection: Any, name: str, weights: jax.Array) -> None:
            sown[collection, name] = weights

    options = {"window": (jnp.int32(2), 1), "softcap": 1.5, "scale": jnp.float32(0.5), "sinks": normal(7, N)}

    @jit
    def compute() -> Any:
        dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
        attention_fn(query, key, value, module=Recorder(), **dropout, **options)
        weights = sown["intermediates", "attention_weights"]
        want = jax_flash.attention(query, key, value, **options, implementation="reference")
        return weights, jnp.einsum("bnts,bsnh->btnh", weights, value), want

    weights, got, want = compute()
    assert_close(got, want, 1e-6)
    assert not weights[..., 4, :2].any()


# dropout_rng, dropout_rate, broadcast_dropout, deterministic


RATE = 0.3


def dropped(leading: tuple[int, ...] = (2, 3), seed: int = 0, rate: float = RATE, **options: Any) -> np.ndarray:
    """The weights [*leading, heads, rows, keys] of 256 keys with equal scores, times 256: the dropout's multipliers."""
    query, key = np.zeros((*leading, 96, N, 1), np.float32), np.zeros((*leading, 256, 2, 1), np.float32)
    value = np.broadcast_to(np.eye(256, dtype=np.float32)[:, None], (*leading, 256, 2, 256))
    attend = jit(functools.partial(attention_fn, dropout_rate=rate, **options))
    return 256 * np.asarray(attend(query, key, value, dropout_rng=jax.random.key(seed))).swapaxes(-2, -3)


def test_dropout_rate() -> None:
    """The part that is dropped, within five standard deviations, and what the others are divided by."""
    for rate in (0.1, 0.5, 0.9):
        multipliers = dropped(rate=rate, broadcast_dropout=False)
        kept = multipliers > 0
        np.testing.assert_allclose(multipliers[kept], 1 / (1 - rate), rtol=2e-4)
        assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size) + 2**-16


def test_broadcast_dropout() -> None:
    """One mask for all batch entries and heads, or another one for each."""
    shared = dropped(broadcast_dropout=True) > 0
    assert (shared == shared[0, 0, 0]).all()
    assert abs(shared[0, 0, 0].mean() - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / shared[0, 0, 0].size)
    own = (dropped(broadcast_dropout=False) > 0).reshape(-1, 96 * 256)
    agree = (own[:, None] == own[None]).mean(axis=-1)[~np.eye(len(own), dtype=bool)]
    expected = RATE**2 + (1 - RATE) ** 2
    assert (np.abs(agree - expected) < 6 * np.sqrt(expected * (1 - expected) / own.shape[1])).all()


def test_broadcast_dropout_is_the_default_as_in_flax() -> None:
    for function in (nnx.dot_product_attention, linen.dot_product_attention, attention_fn):
        assert inspect.signature(function).parameters["broadcast_dropout"].default is True


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_rng(broadcast: bool) -> None:
    """The same key, the same mask; another key, another mask."""
    first, again, other = (dropped((2,), seed, broadcast_dropout=broadcast) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 0.3 < ((first > 0) != (other > 0)).mean() < 0.55


def test_dropout_rng_is_missing() -> None:
    x = normal(0, T, N, H)
    with pytest.raises(ValueError, match=r"dropout_rng must be a JAX key if dropout_rate is 0.5, got None"):
        attention_fn(x, x, x, dropout_rate=0.5)
    attention_fn(x, x, x, dropout_rate=0.5, deterministic=True)


def test_dropout_rate_out_of_range() -> None:
    x = normal(0, T, N, H)
    with pytest.raises(ValueError, match=r"dropout_rate must be .*got -0.5"):
        attention_fn(x, x, x, dropout_rate=-0.5, dropout_rng=jax.random.key(0))


def test_dropout_rng_of_the_old_kind() -> None:
    x = normal(0, T, N, H)
    attend = jit(lambda seed: attention_fn(x, x, x, dropout_rate=0.5, dropout_rng=seed))
    np.testing.assert_array_equal(attend(jax.random.PRNGKey(3)), attend(jax.random.key(3)))


@modules
def test_deterministic(module: Any) -> None:
    """No dropout, and no key needed."""
    got = run(module(dropout_rate=0.5, deterministic=True), [attention_fn], inputs())
    assert_close(got, run(module(), [attention_fn], inputs()))


@pytest.mark.parametrize(("module", "broadcast"), [(Nnx, True), (Linen, False)], ids=MODULES)
def test_dropout_of_modules(module: Any, broadcast: bool) -> None:
    """Over many keys, mean and standard deviation of the results are those of Flax's own dropout."""
    count = 256
    flax_module = module(dropout_rate=RATE, broadcast_dropout=broadcast, deterministic=False)
    arrays, parameters = inputs(), flax_module.parameters()

    @functools.partial(jit, static_argnums=0)
    def samples(hook: Any, parameters: Any) -> Any:
        seeds = jax.random.split(jax.random.key(11), count)
        return jax.vmap(lambda seed: flax_module.apply(hook, parameters, *arrays, seed=seed)[0])(seeds)

    ours = np.asarray(samples(attention_fn, parameters), np.float64)
    theirs = np.asarray(samples(None, parameters), np.float64)
    deviation = theirs.std(axis=0)
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 6 * deviation * np.sqrt(2 / count)).all()
    assert abs(ours.std(axis=0).mean() / deviation.mean() - 1) < 0.05


@pytest.mark.parametrize("broadcast", [True, False])
def test_gradients_with_dropout(broadcast: bool) -> None:
    """Against plain JAX that is given the multipliers."""
    query, key, value, dout = (normal(i, *LEADING, length, N, H) for i, length in enumerate((T, S, S, T)))
    seed = jax.random.key(5)
    attend = functools.partial(attention_fn, dropout_rate=RATE, dropout_rng=seed, broadcast_dropout=broadcast)
    unit = np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (*LEADING, S, N, S))
    multipliers = S * jit(attend)(0 * query, 0 * key, unit).swapaxes(-2, -3)

    def plain(query: Any, key: Any, value: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / np.float32(np.sqrt(H)))
        return jnp.einsum("bnts,bsnh->btnh", weights * multipliers, value)

    def both(function: Any) -> Any:
        out, pullback = jax.vjp(function, query, key, value)
        return out, pullback(jnp.asarray(dout))

    assert_close(jit(lambda: both(attend))(), jit(lambda: both(plain))(), 1e-5)


# What Flax's own function serves


def rounded(equation: str, *arrays: jax.Array) -> jax.Array:
    """A custom einsum."""
    return jnp.einsum(equation, *(x.astype(jnp.float16).astype(x.dtype) for x in arrays))


@modules
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers(module: Any, dtype: str) -> None:
    """Each module has those of its own function, for they differ."""
    flax_module = module(dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nnx's function, which drops imaginary parts
        got, want = run(flax_module, (attention_fn, None), inputs(), mask=keep(*LEADING, N, T, S))
        assert got["out"].dtype == dtype
        np.testing.assert_array_equal(got["out"], want["out"])
        causal = functools.partial(attention_fn, causal=True)
        got, want = (run(flax_module, [h], inputs(), mask=m)[0] for h, m in ((causal, None), (None, CAUSAL)))
        np.testing.assert_array_equal(got["out"], want["out"])


def test_einsums() -> None:
    """Linen's own, as quantized products are."""
    cls = {"qk_attn_weights_einsum_cls": lambda: rounded, "attn_weights_value_einsum_cls": lambda: rounded}
    got, want, plain = (
        run(module, [hook], inputs(), mask=keep(*LEADING, 1, T, S))[0]["out"]
        for module, hook in ((Linen(**cls), attention_fn), (Linen(**cls), None), (Linen(), None))
    )
    np.testing.assert_array_equal(got, want)
    assert (got != plain).any()
    sown = compare(Linen(**cls), inputs(), sow_weights=True)["sown"]
    assert jax.tree.leaves(sown)[0].shape == (*LEADING, N, T, S)
    x = normal(0, T, N, H)
    with pytest.raises(ValueError, match="must be specified together"):  # Linen's word
        attention_fn(x, x, x, attn_weights_value_einsum=rounded)


def test_an_algorithm() -> None:
    """force_fp32_for_softmax is Linen's, whose function hands precision on; nnx's does not without dropout."""
    x = normal(0, T, N, H)
    algorithm = jax.lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32)
    options = {"precision": algorithm, "force_fp32_for_softmax": True}
    ours, linen_s = (
        str(jax.make_jaxpr(functools.partial(function, **options))(x, x, x))
        for function in (attention_fn, linen.dot_product_attention)
    )
    assert ours == linen_s
    assert "DotAlgorithm" in ours


@pytest.mark.parametrize("option", [{"window": (2, 2)}, {"implementation": "xla"}, {"deterministic_backward": True}])
def test_options_that_flax_does_not_have(option: dict[str, Any]) -> None:
    x = normal(0, T, N, H).astype(np.complex64)
    (name,) = option
    with pytest.raises(NotImplementedError, match=f"{name} must not be given with query of dtype complex64"):
        attention_fn(x, x, x, **option)
    with pytest.raises(NotImplementedError, match=f"{name} must not be given with qk_attn_weights_einsum"):
        attention_fn(x.real, x.real, x.real, qk_attn_weights_einsum=rounded, **option)


def test_unknown_arguments_are_refused() -> None:
    x = normal(0, T, N, H)
    with pytest.raises(TypeError, match="einsum_dot_general"):
        attention_fn(x, x, x, einsum_dot_general=jax.lax.dot_general)


@pytest.mark.parametrize(("name", "instead"), [("return_lse", "jax_flash.attention"), ("dropout_key", "dropout_rng")])
def test_what_flax_calls_otherwise_is_refused(name: str, instead: str) -> None:
    """attention()'s own words for what Flax has a word for, or no use."""
    x = normal(0, T, N, H)
    with pytest.raises(TypeError, match=f"{name} must not be given to Flax's hook: use {instead}"):
        attention_fn(x, x, x, dropout_rate=0.5, dropout_rng=jax.random.key(0), **{name: True})


@pytest.mark.parametrize("name", ["causal", "is_causal"])
def test_what_is_no_bool(name: str) -> None:
    x = normal(0, T, N, H)
    with pytest.raises(TypeError, match=f"^{name} must be a bool.*got 1 of type int"):
        attention_fn(x, x, x, **{name: 1})


# Decoding


def test_decoding_with_nnx() -> None:
    """Token by token with a cache, as Flax does, and as all tokens at once with is_causal."""
    tokens = normal(1, *LEADING, T, FEATURES)

    def decode(hook: Any) -> np.ndarray:
        module = Nnx().module(hook)
        module.init_cache(tokens.shape)
        graph, state = nnx.split(module)

        @jit
        def step(state: Any, token: Any) -> Any:
            module = nnx.merge(graph, state)
            out = module(token, decode=True)
            return nnx.state(module), out

        outs = []
        for t in range(T):
            state, out = step(state, tokens[..., t : t + 1, :])
            outs.append(np.asarray(out))
        return np.concatenate(outs, axis=-2)

    got = decode(attention_fn)
    assert_close(got, decode(None))
    module = Nnx()
    hook = functools.partial(nnx.dot_product_attention, is_causal=True)
    if NNX_IS_CAUSAL:
        whole, _ = module.apply(None, module.parameters(), tokens, is_causal=True)
    else:
        whole, _ = module.apply(hook, module.parameters(), tokens)
    assert_close(got, np.asarray(whole))


def test_decoding_with_linen() -> None:
    tokens = normal(1, *LEADING, T, FEATURES)
    parameters = Linen().parameters()

    def decode(hook: Any) -> np.ndarray:
        module = Linen(decode=True).module(hook)
        cache = module.init(jax.random.key(0), tokens)["cache"]

        @jit
        def step(cache: Any, token: Any) -> Any:
            return module.apply({**parameters, "cache": cache}, token, mutable=["cache"])

        outs = []
        for t in range(T):
            out, variables = step(cache, tokens[..., t : t + 1, :])
            cache = variables["cache"]
            outs.append(np.asarray(out))
        return np.concatenate(outs, axis=-2)

    assert_close(decode(attention_fn), decode(None))


# What Flax has no word for


@modules
def test_options_that_are_bound(module: Any) -> None:
    """By functools.partial, which Linen looks through for the names of parameters."""
    flax_module, arrays = module(), inputs()
    mask = np.broadcast_to(np.abs(np.arange(T)[:, None] - np.arange(S)) <= 2, (*LEADING, 1, T, S))
    windowed = functools.partial(attention_fn, window=(2, 2), implementation="xla")
    assert_close(run(flax_module, [windowed], arrays), run(flax_module, [None], arrays, mask=mask))


def test_an_implementation_that_is_bound() -> None:
    x = normal(0, T, N, H)
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        attention_fn(x, x, x, implementation="triton")
