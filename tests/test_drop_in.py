"""dot_product_attention() computes what jax.nn.dot_product_attention documents, by the same arguments.

The tests are of a signature, not of a function: each runs every function in FUNCTIONS, jax.nn's own among them, and
compares it with a float64 oracle in NumPy. To run another one through them, add it there.
"""

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CPU, CUDA, FACTORS, REFERENCE, XLA, Errors, _errors, epsilon, magnitude, units

import jax_flash

QUICK = {"xla_backend_optimization_level": 0}
"""Fewer optimisations compile in a third of the time; the kernels are compiled already."""

# Functions


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the signature, and what jax.nn's documentation leaves open."""

    call: Callable[..., Any]
    dtypes: tuple[str, ...]
    platform: str = "cpu"
    empty_rows_give_zeros: bool = True  # rows that keep no key, with a residual of -inf; else the mean of value
    promotion: str = "strict"  # what it needs of jax.numpy_dtype_promotion
    kernel: bool = False  # compiles fast, so it also runs the cases that are not core


FUNCTIONS = {
    **{
        target.id: Function(
            functools.partial(jax_flash.dot_product_attention, implementation=target.implementation),
            target.dtypes,
            target.platform,
            kernel=target.kernel,
        )
        for target in (CPU, XLA, REFERENCE, CUDA)
    },
    "jax.nn": Function(
        jax.nn.dot_product_attention,
        ("float32", "bfloat16"),  # under jit on a CPU not float16, and its softmax is float32 also for float64
        empty_rows_give_zeros=False,
        promotion="standard",
    ),
}


def functions(condition: Callable[[Function], bool] = lambda _: True) -> list[Any]:
    return [
        pytest.param(function, id=name, marks=[pytest.mark.gpu] if function.platform == "cuda" else [])
        for name, function in FUNCTIONS.items()
        if condition(function)
    ]


# The oracle


def oracle(
    function: Function,
    arrays: Mapping[str, np.ndarray],
    dout: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: np.ndarray | None = None,
    key_value_seq_lengths: np.ndarray | None = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> dict[str, np.ndarray]:
    """out, lse and the gradients of query, key, value and bias in float64, by the documentation of jax.nn."""
    wide = {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}
    q, k, v, dout = (
        x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (wide["query"], wide["key"], wide["value"], dout)
    )
    (batch, q_length, q_heads, head_dim), (kv_length, kv_heads) = q.shape, k.shape[1:3]
    group = q_heads // kv_heads
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    q, dout = q.swapaxes(1, 2), dout.astype(np.float64).swapaxes(1, 2)
    k, v = (np.repeat(x.swapaxes(1, 2), group, axis=1) for x in (k, v))

    rows, columns = np.arange(q_length)[:, None], np.arange(kv_length)
    keep = np.ones((batch, q_heads, q_length, kv_length), bool)
    if mask is not None:
        keep &= mask
    if is_causal:
        keep &= columns <= rows
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        keep &= (columns >= rows - left) & (columns <= rows + right)
    if key_value_seq_lengths is not None:
        keep &= columns < key_value_seq_lengths[:, None, None, None]
    if query_seq_lengths is not None:
        padding = rows >= query_seq_lengths[:, None, None, None]
        keep &= ~padding
    alive = keep.any(axis=-1, keepdims=True)

    logits = scale * (q @ k.swapaxes(-1, -2))
    if "bias" in wide:
        logits = logits + wide["bias"]
    logits = np.where(keep, logits, -np.inf)
    maximum = np.where(alive, logits.max(axis=-1, keepdims=True), 0.0)
    weights = np.exp(logits - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    p = weights / np.where(alive, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (maximum + np.log(total))[..., 0]
    if not function.empty_rows_give_zeros:
        p = np.where(alive, p, 1 / kv_length)
    if query_seq_lengths is not None:
        p = np.where(padding, 0.0, p)

    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * alive  # and nothing by way of the residual

    def of_keys(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return x.reshape(batch, kv_heads, group, kv_length, -1).sum(axis=2).swapaxes(1, 2).reshape(shape)

    right = {
        "out": (p @ v).swapaxes(1, 2).reshape(arrays["query"].shape),
        "lse": lse.swapaxes(1, 2).reshape(arrays["query"].shape[:-1]),
        "dq": scale * (ds @ k).swapaxes(1, 2).reshape(arrays["query"].shape),
        "dk": of_keys(scale * (ds.swapaxes(-1, -2) @ q), arrays["key"].shape),
        "dv": of_keys(p.swapaxes(-1, -2) @ dout, arrays["value"].shape),
    }
    if "bias" in wide:
        shape = (1,) * (4 - wide["bias"].ndim) + wide["bias"].shape
        summed = tuple(axis for axis, size in enumerate(shape) if size == 1)
        right["dbias"] = ds.sum(axis=summed, keepdims=True).reshape(wide["bias"].shape)
    return right


# Cases

B, T, S, N, K, H = 2, 19, 23, 4, 2, 16


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (B, T, N, H)  # of query
    kv_shape: tuple[int, ...] = (B, S, K, H)
    bias: tuple[int, ...] | None = None  # its shape
    bias_dtype: str | None = None  # None: that of query
    mask: tuple[int, ...] | None = None  # its shape
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    empty_rows: bool = False  # some rows keep no key
    core: bool = False  # also run where compiling is slow


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


ALONE = {
    "plain": Case(),
    "unbatched": Case((T, N, H), (S, K, H)),
    "multi_head": Case(kv_shape=(B, S, N, H)),
    "multi_query": Case(kv_shape=(B, S, 1, H)),
    "bias": Case(bias=(B, N, T, S), core=True),
    "bias_of_heads": Case(bias=(1, N, T, S)),
    "bias_of_keys": Case(bias=(B, 1, 1, S)),
    "bias_of_rows": Case(bias=(1, N, T, 1)),
    "bias_of_rank_2": Case(bias=(T, S)),
    "bias_in_another_dtype": Case(bias=(B, N, T, S), bias_dtype="float16"),
    "mask": Case(mask=(B, N, T, S)),
    "mask_of_keys": Case(mask=(B, 1, 1, S)),
    "mask_of_heads": Case(mask=(1, N, T, S)),
    "mask_of_rows": Case(mask=(B, 1, T, 1), empty_rows=True),
    "mask_of_rank_2": Case(mask=(T, S)),
    "scale": Case(options={"scale": 0.7}),
    "scale_negative": Case(options={"scale": -0.4}, core=True),
    "causal": Case(options={"is_causal": True}),
    "causal_more_rows": Case((B, S, N, H), (B, T, K, H), options={"is_causal": True}),
    "query_lengths": Case(options={"query_seq_lengths": lengths(11, T)}, empty_rows=True),
    "key_value_lengths": Case(options={"key_value_seq_lengths": lengths(S, 8)}),
    "no_keys": Case(options={"key_value_seq_lengths": lengths(0, 8)}, empty_rows=True, core=True),
    "window": Case(options={"local_window_size": 4}),
    "window_of_two_sides": Case(options={"local_window_size": (3, 1)}, core=True),
    "window_to_the_left": Case(options={"local_window_size": (5, 0)}),
    "window_past_the_keys": Case((B, S, N, H), (B, 9, K, H), options={"local_window_size": 2}, empty_rows=True),
}

TOGETHER = {
    "padding": Case(
        options={"query_seq_lengths": lengths(11, T), "key_value_seq_lengths": lengths(S, 8)},
        empty_rows=True,
        core=True,
    ),
    "causal_window": Case(options={"is_causal": True, "local_window_size": (6, 3)}),
    "bias_and_mask": Case(bias=(1, N, 1, S), mask=(B, 1, T, S)),
    "everything": Case(
        bias=(1, N, T, S),
        mask=(B, 1, 1, S),
        options={
            "scale": 0.3,
            "is_causal": True,
            "query_seq_lengths": lengths(13, T),
            "key_value_seq_lengths": lengths(S, 17),
            "local_window_size": (9, 2),
        },
        empty_rows=True,
        core=True,
    ),
    "everything_unbatched": Case(
        (T, N, H),
        (S, K, H),
        bias=(N, 1, S),
        mask=(T, S),
        options={
            "scale": 0.3,
            "query_seq_lengths": lengths(13),
            "key_value_seq_lengths": lengths(20),
            "local_window_size": 7,
        },
        empty_rows=True,
        core=True,
    ),
}

CASES = ALONE | TOGETHER


def problem(name: str, dtype: str) -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray, np.ndarray]:
    """The differentiable arrays of a case, its other arguments, and cotangents of out and of the residual."""
    case = CASES[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))

    def normal(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    arrays = {
        "query": normal(case.shape, dtype),
        "key": normal(case.kv_shape, dtype),
        "value": normal(case.kv_shape, dtype),
    }
    if case.bias is not None:
        arrays["bias"] = normal(case.bias, case.bias_dtype or dtype)
    options = dict(case.options)
    if case.mask is not None:
        # The first key is kept, so that only cases that say so have rows without keys.
        mask = rng.random(case.mask) < 0.6
        mask[..., 0] |= not case.empty_rows
        options["mask"] = mask
    return arrays, options, normal(case.shape, dtype), rng.standard_normal(case.shape[:-1])


# The tests


def differentiate(
    function: Function, arrays: Mapping[str, np.ndarray], options: Mapping[str, Any], dout: np.ndarray, dlse: np.ndarray
) -> dict[str, np.ndarray]:
    """out, lse and the gradients of the arrays, under jit."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(arrays: Any, traced: Any, dout: Any, dlse: Any) -> Any:
        def call(arrays: Any) -> Any:
            return function.call(**arrays, **static, **traced, return_residual=True)

        (out, lse), pullback = jax.vjp(call, arrays)
        (gradients,) = pullback((dout, dlse.astype(lse.dtype)))
        return out, lse, gradients

    static = {name: value for name, value in options.items() if not isinstance(value, np.ndarray)}
    traced = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
    with jax.numpy_dtype_promotion(function.promotion):
        out, lse, gradients = run(dict(arrays), traced, dout, dlse)
    names = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias"}
    results = {"out": out, "lse": lse, **{names[name]: gradient for name, gradient in gradients.items()}}
    return {name: np.asarray(result) for name, result in results.items()}


def check(function: Function, name: str, dtype: str) -> None:
    """Asserts the tolerance rule, relative to jax.nn's own function in the same dtype."""
    arrays, options, dout, dlse = problem(name, dtype)
    got = differentiate(function, arrays, options, dout, dlse)
    right = oracle(function, arrays, dout, **options)
    baseline: dict[str, np.ndarray] = {}
    assert got["out"].dtype == got["dq"].dtype == got["lse"].dtype == dtype
    assert set(got) == set(right)
    for key, want in right.items():
        result = got[key].astype(np.float64)
        if key == "lse" and not function.empty_rows_give_zeros:
            empty = np.isneginf(want)
            assert (result[empty] < -1e4).all()
            result = np.where(empty, -np.inf, result)
        errors = _errors(key, result, want)
        slack = units(key, dtype) * epsilon("out" if key == "lse" else key, dtype)  # the residual is as narrow
        size = magnitude(key, want)
        allowed = Errors(slack * size, slack)
        if (errors.maximum > allowed.maximum or errors.l2 > allowed.l2) and dtype in ("float32", "bfloat16"):
            # jax.nn's function is slow to compile and can only widen the bound.
            if not baseline:
                baseline = differentiate(FUNCTIONS["jax.nn"], arrays, options, dout, dlse)
                exact = oracle(FUNCTIONS["jax.nn"], arrays, dout, **options)
            base = _errors(key, np.where(np.isneginf(want), want, baseline[key]), exact[key])
            factor = FACTORS[key]
            allowed = Errors(allowed.maximum + factor * base.maximum, allowed.l2 + factor * base.l2)
        assert errors.maximum <= allowed.maximum, f"{key}: maximum error {errors.maximum} > {allowed.maximum}"
        assert errors.l2 <= allowed.l2, f"{key}: relative L2 error {errors.l2} > {allowed.l2}"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        pytest.param(*param.values, name, id=f"{param.id}-{name}", marks=param.marks)
        for param in functions()
        for name, case in CASES.items()
        if case.core or param.values[0].kernel
    ],
)
def test_every_argument(function: Function, name: str) -> None:
    """Alone and together: out, the residual and the gradients."""
    check(function, name, next(dtype for dtype in ("float32", "bfloat16") if dtype in function.dtypes))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        pytest.param(*param.values, dtype, id=f"{param.id}-{dtype}", marks=param.marks)
        for param in functions()
        for dtype in ("float64", "float16", "bfloat16")
        if dtype in param.values[0].dtypes
    ],
)
def test_every_dtype(function: Function, dtype: str) -> None:
    check(function, "everything", dtype)


def test_the_signature_is_that_of_jax_nn() -> None:
    ours, theirs = map(inspect.signature, (jax_flash.dot_product_attention, jax.nn.dot_product_attention))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("function", functions())
def test_without_the_residual(function: Function) -> None:
    """out alone; and bias and mask by position, numbers of NumPy, and lists, as jax.nn takes them."""
    arrays, options, *_ = problem("bias_and_mask", function.dtypes[0])
    mask = options["mask"]
    call = functools.partial(function.call, scale=np.float32(0.25))
    with jax.numpy_dtype_promotion(function.promotion):
        results = jax.jit(
            lambda *arrays: (call(*arrays, mask.tolist()), call(*arrays, mask, return_residual=True)[0]),
            compiler_options=QUICK,
        )(*arrays.values())
    np.testing.assert_array_equal(*results)


def jaxpr(**options: Any) -> str:
    arrays = {name: jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32) for name in ("query", "key", "value")}
    return str(jax.make_jaxpr(lambda arrays: jax_flash.dot_product_attention(**arrays, **options))(arrays))


def test_what_jax_nn_calls_xla_is_plain_jax() -> None:
    assert jaxpr() == jaxpr(implementation=None)
    assert "scan" in jaxpr(implementation="xla")
    assert "scan" not in jaxpr()


def test_what_jax_nn_calls_cudnn_is_fused_kernels_on_a_gpu() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        assert jaxpr(implementation="cudnn") == jaxpr(implementation="cuda")
    else:
        with pytest.raises(NotImplementedError, match=r"implementation='cuda' does not serve this call: .*no CUDA"):
            jaxpr(implementation="cudnn")


@pytest.mark.parametrize("function", functions())
@pytest.mark.parametrize("name", ["plain", "unbatched"])
def test_the_residual(function: Function, name: str) -> None:
    """It has the shape of query without head_dim, the dtype of key, and no gradient, by any argument."""
    arrays, *_ = problem(name, "bfloat16" if "bfloat16" in function.dtypes else "float32")
    bias = jnp.zeros((N, T, 1), jnp.float32)

    def residual(arrays: Any, bias: jax.Array) -> jax.Array:
        return function.call(**arrays, bias=bias, return_residual=True)[1]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def gradients(arrays: Any, bias: jax.Array) -> Any:
        found, pullback = jax.vjp(residual, arrays, bias)
        return found, pullback(jnp.ones_like(found))

    with jax.numpy_dtype_promotion(function.promotion):
        found, of = gradients(arrays, bias)
    assert found.shape == arrays["query"].shape[:-1]
    assert found.dtype == arrays["key"].dtype
    assert np.isfinite(found).all()
    assert found.any()
    for gradient in jax.tree.leaves(of):
        assert not gradient.any()


GOOD = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 8)}

BAD = {
    "rank_of_query": ({"query": np.ones((5, 8), np.float32)}, ValueError, r"query must have rank 4.*got \(5, 8\)"),
    "rank_of_value": (
        {"value": np.ones((1, 1, 5, 1, 8))},
        ValueError,
        r"value must have rank 4.*got \(1, 1, 5, 1, 8\)",
    ),
    "batch_of_key": ({"key": np.ones((3, 7, 2, 8), np.float32)}, ValueError, r"key must have the batch.*got \(3,\)"),
    "dtype_of_key": ({"key": np.ones(GOOD["key"], np.float16)}, TypeError, r"key must have the dtype.*got float16"),
    "integers": ({"query": np.ones(GOOD["query"], np.int32)}, TypeError, r"query must have one of.*got int32"),
    "heads": (
        {name: np.ones((2, 7, 3, 8), np.float32) for name in ("key", "value")},
        ValueError,
        r"query must have a number of heads that is a multiple of key's, got 4 and 3",
    ),
    "rank_of_bias": ({"bias": np.ones((1, 1, 1, 5, 7))}, ValueError, r"bias must have at most rank 4.*1, 5, 7\)"),
    "shape_of_bias": ({"bias": np.ones((1, 4, 5, 6), np.float32)}, ValueError, r"bias must .*got .*\(1, 4, 5, 6\)"),
    "dtype_of_bias": ({"bias": np.ones((1, 4, 5, 7), np.complex64)}, TypeError, r"bias must .*got .*complex64"),
    "rank_of_mask": ({"mask": np.ones((1, 1, 1, 5, 7), bool)}, ValueError, r"mask must have at most rank 4"),
    "shape_of_mask": ({"mask": np.ones((3, 1, 5, 7), bool)}, ValueError, r"mask must .*got .*\(3, 1, 5, 7\)"),
    "mask_of_keys": (
        {"mask": np.ones((2, 7), bool)},
        ValueError,
        r"mask must .*got shape \(2, 7\): use mask\[:, None, None, :\]",
    ),
    "dtype_of_mask": ({"mask": np.ones((5, 7), np.float32)}, TypeError, r"mask must .*bool.*got .*float32"),
    "scale_text": ({"scale": "1"}, TypeError, r"scale must be a real number.*got '1' of type str"),
    "scale_infinite": ({"scale": np.inf}, ValueError, r"scale must be finite, got inf"),
    "causal_number": ({"is_causal": 1}, TypeError, r"is_causal must be a bool.*got 1 of type int"),
    "residual_text": ({"return_residual": "yes"}, TypeError, r"return_residual must be a bool.*got 'yes'"),
    "values_of_query_lengths": (
        {"query_seq_lengths": np.array([1, 2**31])},
        ValueError,
        r"query_seq_lengths must be in the range of int32, got 2147483648",
    ),
    "shape_of_query_lengths": (
        {"query_seq_lengths": np.ones((2, 1), np.int32)},
        ValueError,
        r"query_seq_lengths must have the shape \[batch\], \(2,\), got \(2, 1\)",
    ),
    "dtype_of_key_value_lengths": (
        {"key_value_seq_lengths": np.ones(2, np.float32)},
        TypeError,
        r"key_value_seq_lengths must be an int32 array, or integers.*, got dtype float32",
    ),
    "shape_of_key_value_lengths": (
        {"key_value_seq_lengths": np.ones(3, np.int32)},
        ValueError,
        r"key_value_seq_lengths must have the shape \[batch\], \(2,\), got \(3,\)",
    ),
    "window_text": ({"local_window_size": "4"}, TypeError, r"local_window_size must be .*got '4' of type str"),
    "window_float": ({"local_window_size": (1.5, 2)}, TypeError, r"local_window_size must be .*got \(1.5, 2\)"),
    "window_of_three": ({"local_window_size": (1, 2, 3)}, TypeError, r"local_window_size must be .*got \(1, 2, 3\)"),
    "window_negative": ({"local_window_size": (3, -1)}, ValueError, r"local_window_size .*at least 0, .*got \(3, -1\)"),
    "implementation": ({"implementation": "triton"}, ValueError, r"implementation must be None or .*got 'triton'"),
    "implementation_type": ({"implementation": 1}, TypeError, r"implementation must be a string or None, got int"),
}


@pytest.mark.parametrize(("bad", "error", "text"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(bad: dict[str, Any], error: type[Exception], text: str) -> None:
    arrays = {name: np.ones(shape, np.float32) for name, shape in GOOD.items()}
    with pytest.raises(error, match=text):
        jax_flash.dot_product_attention(**(arrays | bad))


def test_traced_scale_and_window() -> None:
    """As jax.nn has them, with the gradient by the scale and negative sides."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((2, 9, 3, 8)), jnp.float32) for _ in range(3))

    def differentiated(attend: Any) -> Any:
        def loss(scale: Any, left: Any, right: Any) -> Any:
            return jnp.square(attend(query, key, value, scale=scale, local_window_size=(left, right))[:, 4:]).sum()

        return jax.jit(jax.value_and_grad(loss))

    ours, theirs = map(differentiated, (jax_flash.dot_product_attention, jax.nn.dot_product_attention))
    for scale, left, right in ((0.4, 3, 2), (-0.7, 4, -1), (0.0, 2, 9)):
        arguments = np.float32(scale), np.int32(left), np.int32(right)
        with jax.numpy_dtype_promotion("standard"):
            want = theirs(*arguments)
        np.testing.assert_allclose(ours(*arguments), want, rtol=1e-4)
    assert ours._cache_size() == 1
