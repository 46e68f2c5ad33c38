"""Temporary memory grows linearly with the lengths, forward and backward, by XLA's own analysis."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import REFERENCE, Target

from jax_flash import _primitive, attention
from jax_flash._implementations import choice
from jax_flash._native import registration

LENGTHS = (2048, 8192)


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def of_length(length: int) -> dict[str, Any]:
    """All options at once whose arrays have at most one length."""
    return {
        "bias": shape(1, 2, 1, length),
        "mask": shape(1, 1, 1, length, dtype=bool),
        "window": (length // 2, None),
        "softcap": 3.0,
        "alibi_slopes": shape(2),
        "sinks": shape(2),
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
        "q_segment_ids": shape(1, length, dtype=jnp.int32),
        "kv_segment_ids": shape(1, length, dtype=jnp.int32),
        "q_lengths": shape(1, dtype=jnp.int32),
        "kv_lengths": shape(1, dtype=jnp.int32),
    }


def temporary_bytes(
    target: Target, length: int, backward: bool, options: dict[str, Any] | None = None, *, q_heads: int = 2
) -> int:
    """XLA's peak of temporary buffers of a call, with all results and scratch that it allocates itself."""
    dtype = target.dtypes[0]
    inputs = shape(1, length, q_heads, 16, dtype=dtype), *[shape(1, length, 2, 16, dtype=dtype)] * 2
    options = options or {}
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    fixed = {name: x for name, x in options.items() if name not in arrays}
    trainable = {name: x for name, x in arrays.items() if name in oracle.TRAINABLE}
    attend = cases.call(target, cases.Problem(*[None] * 5, causal=True), **fixed)

    def run(inputs: Any, arrays: Any) -> Any:
        if not backward:
            return attend(*inputs, **arrays)
        wanted = {name: arrays[name] for name in trainable}
        results, pullback = jax.vjp(lambda inputs, wanted: attend(*inputs, **{**arrays, **wanted}), inputs, wanted)
        return pullback(results)

    return jax.jit(run).lower(inputs, arrays).compile().memory_analysis().temp_size_in_bytes


def input_bytes(target: Target, length: int) -> int:
    return 3 * length * 2 * 16 * jnp.dtype(target.dtypes[0]).itemsize


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", [lambda length: {}, of_length], ids=["plain", "options"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_linear(target: Target, options: Callable[[int], dict[str, Any]], backward: bool) -> None:
    small, large = (temporary_bytes(target, length, backward, options(length)) for length in LENGTHS)
    # A [T, S] array of one head in one byte an element would already be more.
    assert large < LENGTHS[1] ** 2
    # Four times the length takes at most four times the memory, plus a constant.
    assert large <= 4.2 * small + 4096


def second_order_bytes(target: Target, length: int, options: dict[str, Any], order: str) -> int:
    """XLA's peak of temporary buffers of a Hessian-vector product by all inputs and trainable options."""
    dtype = target.dtypes[0]
    inputs = (shape(1, length, 2, 16, dtype=dtype),) * 3
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    fixed = {name: x for name, x in options.items() if name not in arrays}
    trainable = {name: x for name, x in arrays.items() if name in oracle.TRAINABLE}
    others = {name: x for name, x in arrays.items() if name not in trainable}
    attend = cases.call(target, cases.Problem(*[None] * 5, causal=True), **fixed)

    def run(inputs: Any, trainable: Any, others: Any) -> Any:
        def loss(at: Any) -> jax.Array:
            out, lse = attend(*at[0], **at[1], **others)
            return jnp.square(out).astype(lse.dtype).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        def directional(at: Any) -> jax.Array:
            return jax.jvp(loss, (at,), ((inputs, trainable),))[1]

        at = inputs, trainable
        if order == "forward_over_reverse":
            return jax.jvp(jax.grad(loss), (at,), (at,))[1]
        if order == "reverse_over_forward":
            return jax.grad(directional)(at)
        return jax.vjp(jax.grad(loss), at)[1](at)

    return jax.jit(run).lower(inputs, trainable, others).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("order", ["forward_over_reverse", "reverse_over_forward", "reverse_over_reverse"])
@pytest.mark.parametrize("options", [lambda length: {}, of_length], ids=["plain", "options"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_second_order_is_linear(target: Target, options: Callable[[int], dict[str, Any]], order: str) -> None:
    small, large = (second_order_bytes(target, length, options(length), order) for length in LENGTHS)
    assert large < LENGTHS[1] ** 2
    assert large <= 4.2 * small + 4096


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_kernels_need_little(target: Target, backward: bool) -> None:
    """Nothing but copies, lse and delta: a few times the inputs."""
    length = LENGTHS[0]
    assert temporary_bytes(target, length, backward) <= 4 * input_bytes(target, length)


def floats(*sizes: int) -> int:
    return 4 * math.prod(sizes)


CAPABILITIES = {"sm70": 70, "sm75": 75, "sm80": 80, "sm90a": 90}


@pytest.fixture(params=CAPABILITIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The GPUs here serve calls with this family's kernels."""
    name = request.param
    capability = min(device["compute_capability"] for device in registration.cuda_status()["devices"])
    if capability < CAPABILITIES[name] or (name == "sm90a" and capability != 90):
        pytest.skip(f"compute capability {capability} does not run kernels of {name}")
    monkeypatch.setenv("JAX_FLASH_CUDA_FAMILY", name)
    forget()
    yield name
    forget()


def forget() -> None:
    """What was traced and lowered for another family."""
    for known in (choice.separate_dq, choice.has_old_gpu, _primitive.partitioning.partitioned):
        known.cache_clear()
    jax.clear_caches()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_of_gpus(family: str, head_dim: int) -> None:
    """Forward: only lse, which the caller did not request. Backward: delta, and an accumulator if dq is accumulated."""
    batch, length, heads = 2, 4160, 4  # whole tiles of rows of every kernel
    x = shape(batch, length, heads, head_dim, dtype=jnp.float16)
    statistics = floats(batch, heads, length)

    def temporary(run: Callable[..., Any], *arrays: Any) -> int:
        return jax.jit(run).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporary(attention, x, x, x) <= statistics + 1024

    kept, tree = jax.tree.flatten(jax.eval_shape(lambda *inputs: jax.vjp(attention, *inputs)[1], x, x, x))
    added = family in ("sm80", "sm90a") and not (family == "sm90a" and head_dim > 128)
    accumulator = added * floats(batch, heads, length, head_dim)
    backward = temporary(lambda kept, dout: jax.tree.unflatten(tree, kept)(dout), kept, x)
    assert accumulator <= backward <= accumulator + statistics + 1024


IN_ORDER: dict[str, Any] = {"deterministic_backward": True}


@pytest.mark.parametrize(
    ("capability", "forced", "head_dim", "options", "separate", "ordered"),
    [
        (90, "", 256, {}, True, False),
        (90, "", 136, {}, True, False),
        (90, "", 128, {}, False, False),
        (90, "sm80", 256, {}, False, False),
        (80, "", 256, {}, False, False),
        (90, "", 64, {"window": 16}, True, True),
        (90, "", 128, {"window": 16, "causal": True}, True, True),
        (90, "", 64, {"window": 16, "kv_heads": 1}, False, False),
        (90, "", 64, {"window": 16, "softcap": 30.0}, False, False),
        (90, "", 64, {"window": 600, "length": 6000}, False, False),
        (90, "", 64, {"window": 500, "length": 6000}, True, True),
        (90, "", 64, {"window": 1500, "causal": True, "length": 6000}, True, True),
        (90, "", 64, {"window": 1501, "causal": True, "length": 6000}, False, False),
        (90, "", 64, {"window": 2049, "causal": True, "length": 9000}, False, False),
        (90, "sm80", 64, {"window": 16}, False, False),
        (90, "", 256, IN_ORDER, True, False),
        (90, "", 128, IN_ORDER, True, True),
        (90, "", 128, IN_ORDER | {"window": 16}, True, True),
        (90, "", 128, IN_ORDER | {"kv_heads": 1}, True, True),
        (90, "", 128, IN_ORDER | {"kv_heads": 1, "causal": True}, True, True),
        (90, "", 128, IN_ORDER | {"kv_heads": 1, "causal": True, "window": 16}, True, False),
        (90, "", 128, IN_ORDER | {"length": 512}, True, False),
        (90, "", 64, IN_ORDER | {"length": 512}, True, True),
        (90, "", 128, IN_ORDER | {"kv_start": np.zeros(600, np.int32)}, True, False),
        (90, "", 128, IN_ORDER | {"precision": "highest"}, True, False),
        (90, "sm80", 128, IN_ORDER, True, False),
        (80, "", 64, IN_ORDER, True, False),
    ],
)
def test_no_accumulator_for_a_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    forced: str,
    head_dim: int,
    options: dict[str, Any],
    separate: bool,
    ordered: bool,
) -> None:
    """A call that is lowered for this machine's GPU requests the memory that its kernels use."""
    if forced:
        monkeypatch.setenv("JAX_FLASH_CUDA_FAMILY", forced)
    gpu = {"name": "a GPU", "compute_capability": capability, "family": "sm80"}
    monkeypatch.setattr(choice, "_cuda_devices", lambda: ("a GPU",))
    monkeypatch.setattr(registration, "cuda_status", lambda: {"devices": [gpu]})
    monkeypatch.setattr(choice, "separate_dq", choice.separate_dq.__wrapped__)
    monkeypatch.setattr(choice, "_cuda_unavailable", lambda: None)
    monkeypatch.setattr(choice, "has_old_gpu", lambda: False)
    dtype = jnp.float32 if "precision" in options else jnp.float16
    options = dict(options)
    length, kv_heads = options.pop("length", 600), options.pop("kv_heads", 2)
    x, y = (shape(1, length, heads, head_dim, dtype=dtype) for heads in (2, kv_heads))

    def gradients(*inputs: Any) -> Any:
        return jax.vjp(lambda *inputs: attention(*inputs, **options), *inputs)[1](inputs[0])

    def lowered() -> str:
        text = jax.jit(gradients).trace(x, y, y).lower(lowering_platforms=("cuda",)).as_text()
        (call,) = (line for line in text.splitlines() if "@jax_flash_backward" in line)
        return call

    call = lowered()
    results = call.rsplit("->", 1)[1]
    assert results.count("tensor<") == (3 if separate and not ordered else 4), call
    assert f"separate_dq = {str(separate).lower()}" in call, call
    assert f"ordered_dq = {str(ordered).lower()}" in call, call
    jax.clear_caches()
    with choice.in_passes():
        assert "ordered_dq = false" in lowered()


@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_gradient_of_bias_is_as_large_as_bias(target: Target) -> None:
    """The gradient is summed in the kernel: there is no array [N, T, S] for a bias [1, T, S]."""
    length, q_heads = 1024, 16
    bias = {"bias": shape(1, 1, length, length)}
    with_bias = temporary_bytes(target, length, True, bias, q_heads=q_heads)
    assert with_bias - temporary_bytes(target, length, True, q_heads=q_heads) < 4 * 4 * length * length


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_bias_without_gradient(target: Target) -> None:
    """No array for a gradient that is not requested."""
    length, dtype = 2048, target.dtypes[0]
    x = shape(1, length, 2, 16, dtype=dtype)
    attend = cases.call(target, cases.Problem(*[None] * 5, causal=True), return_lse=False)

    def run(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return jax.vjp(lambda *inputs: attend(*inputs, bias=bias), query, key, value)[1](query)

    compiled = jax.jit(run).lower(x, x, x, shape(1, 1, length, length, dtype=dtype)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_measure_sees_quadratic_growth(backward: bool) -> None:
    """The reference keeps [T, S] arrays: without seeing them the tests above would prove nothing."""
    small, large = (temporary_bytes(REFERENCE, length, backward) for length in LENGTHS)
    assert large >= 14 * small
    assert small >= LENGTHS[0] ** 2
