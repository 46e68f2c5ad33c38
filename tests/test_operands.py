"""Options that are arrays keep their meaning under vmap, when split over devices, and inside shard_map.

The expected results are a loop over the mapped calls, or the call on one device.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Target
from jax.sharding import NamedSharding, PartitionSpec

import jax_flash

BATCH, Q_LENGTH, KV_LENGTH, Q_HEADS, KV_HEADS, HEAD_DIM = 4, 9, 12, 4, 2, 8
SIZE = 3

# name -> (argument, its shape, the PartitionSpec that splits it over batch "x" and heads "y")
ARRAYS: dict[str, tuple[str, tuple[int, ...], PartitionSpec]] = {
    "bias": ("bias", (BATCH, Q_HEADS, Q_LENGTH, KV_LENGTH), PartitionSpec("x", "y")),
    "bias_of_heads": ("bias", (1, Q_HEADS, Q_LENGTH, KV_LENGTH), PartitionSpec(None, "y")),
    "bias_of_pairs": ("bias", (1, 1, Q_LENGTH, KV_LENGTH), PartitionSpec()),
    "bias_of_keys": ("bias", (BATCH, 1, 1, KV_LENGTH), PartitionSpec("x")),
    "bias_of_one": ("bias", (1, 1, 1, 1), PartitionSpec()),
    "mask": ("mask", (BATCH, 1, Q_LENGTH, KV_LENGTH), PartitionSpec("x")),
    "mask_of_heads": ("mask", (1, Q_HEADS, 1, KV_LENGTH), PartitionSpec(None, "y")),
    "alibi_slopes": ("alibi_slopes", (Q_HEADS,), PartitionSpec("y")),
    "alibi_slopes_of_batches": ("alibi_slopes", (BATCH, Q_HEADS), PartitionSpec("x", "y")),
    "sinks": ("sinks", (Q_HEADS,), PartitionSpec("y")),
    "q_lengths": ("q_lengths", (BATCH,), PartitionSpec("x")),
    "kv_lengths": ("kv_lengths", (BATCH,), PartitionSpec("x")),
    "q_segment_ids": ("q_segment_ids", (BATCH, Q_LENGTH), PartitionSpec("x")),
    "scale": ("scale", (), PartitionSpec()),
    "window": ("window", (), PartitionSpec()),
}
TRAINABLE = ("bias", "alibi_slopes", "sinks", "scale")


def values(rng: np.random.Generator, argument: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if argument in TRAINABLE:
        wide = "float32" if argument != "bias" and dtype != "float64" else dtype
        return cases.random(rng, shape, wide)
    if argument == "mask":
        return rng.random(shape) < 0.7
    if argument.endswith("_ids"):
        return np.sort(rng.integers(0, 3, shape), axis=-1).astype(np.int32)
    return rng.integers(0, 12, shape).astype(np.int32)


def inputs(rng: np.random.Generator, dtype: str, *sizes: int) -> list[np.ndarray]:
    """query, key, value, dout and dlse."""
    queries = (*sizes, BATCH, Q_LENGTH, Q_HEADS, HEAD_DIM)
    keys = (*sizes, BATCH, KV_LENGTH, KV_HEADS, HEAD_DIM)
    arrays = [cases.random(rng, shape, dtype) for shape in (queries, keys, keys, queries)]
    wide = "float64" if dtype == "float64" else "float32"
    return [*arrays, cases.random(rng, (*sizes, BATCH, Q_HEADS, Q_LENGTH), wide)]


def function(target: Target, argument: str, **options: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """(query, key, value, dout, dlse, option) -> out, lse, and the gradients, the option's among them."""
    if argument == "q_segment_ids":
        options["kv_segment_ids"] = np.sort(np.arange(BATCH * KV_LENGTH, dtype=np.int32).reshape(BATCH, -1) % 3, axis=1)
    attend = functools.partial(
        jax_flash.attention, causal=True, q_offset=2, return_lse=True, implementation=target.implementation, **options
    )

    def run(query: Any, key: Any, value: Any, dout: Any, dlse: Any, option: Any) -> tuple[jax.Array, ...]:
        if argument in TRAINABLE:
            results, pullback = jax.vjp(lambda q, k, v, x: attend(q, k, v, **{argument: x}), query, key, value, option)
        else:
            results, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, **{argument: option}), query, key, value)
        return (*results, *pullback((dout, dlse)))

    return run


def assert_close(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), finite)
        scale = np.abs(y[finite]).max(initial=1.0)
        eps = float(jnp.finfo(jnp.asarray(want[0]).dtype).eps)
        # Sums in another order, and for a broadcast option over more of them.
        np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=16 * eps * scale)


@pytest.mark.parametrize("mapped", ["option", "inputs", "both"])
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_vmap(target: Target, name: str, mapped: str) -> None:
    argument, shape, _ = ARRAYS[name]
    dtype = target.dtypes[0]
    rng = np.random.default_rng(len(name))
    many = () if mapped == "option" else (SIZE,)
    arguments = inputs(rng, dtype, *many)
    option = values(rng, argument, shape if mapped == "inputs" else (SIZE, *shape), dtype)
    axes = (*(None if mapped == "option" else 0,) * 5, None if mapped == "inputs" else 0)
    run = function(target, argument)
    one = jax.jit(run)
    loop = [
        one(*(x if axis is None else x[i] for x, axis in zip((*arguments, option), axes, strict=True)))
        for i in range(SIZE)
    ]
    assert_close(jax.jit(jax.vmap(run, axes))(*arguments, option), [np.stack(x) for x in zip(*loop, strict=True)])


@pytest.mark.parametrize("shape", [(1,), (Q_HEADS,), (BATCH, 1), (BATCH, Q_HEADS)], ids=str)
def test_dropout_keys_of_heads(shape: tuple[int, ...]) -> None:
    """Heads with one key drop the same weights, and dropout_mask says which."""
    keys = jax.random.split(jax.random.key(2), shape)
    mask = np.asarray(jax_flash.dropout_mask(keys, 0.5, (BATCH, Q_HEADS, Q_LENGTH, KV_LENGTH)))
    of_heads = np.broadcast_to(np.arange(np.prod(shape)).reshape(shape), (BATCH, Q_HEADS))
    for a, b in itertools.combinations(np.ndindex(BATCH, Q_HEADS), 2):
        assert (mask[a] == mask[b]).all() == (of_heads[a] == of_heads[b])
    query, key, _, _, _ = inputs(np.random.default_rng(0), "float32")
    value = np.broadcast_to(np.eye(KV_LENGTH, dtype=np.float32)[:, None], (BATCH, KV_LENGTH, KV_HEADS, KV_LENGTH))
    options = {"dropout_rate": 0.5, "dropout_key": keys, "implementation": "cpu"}
    weights = np.asarray(jax_flash.attention(query, key, value, **options))  # [B, T, N, S]
    np.testing.assert_array_equal(weights != 0, mask.swapaxes(1, 2))


@pytest.mark.parametrize("mapped", ["key", "inputs"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_vmap_of_dropout(target: Target, mapped: str) -> None:
    """A mapped key is another mask; a shared key is the same mask for each of the mapped calls."""
    dtype = target.dtypes[0]
    rng = np.random.default_rng(3)
    arguments = inputs(rng, dtype, *(() if mapped == "key" else (SIZE,)))
    key = jax.random.split(jax.random.key(5), SIZE) if mapped == "key" else jax.random.key(5)

    def run(key: Any, *arguments: Any) -> Any:
        slopes = np.full(Q_HEADS, 0.1, np.float32)
        return function(target, "alibi_slopes", dropout_rate=0.4, dropout_key=key)(*arguments, slopes)

    axes = (0, *(None,) * 5) if mapped == "key" else (None, *(0,) * 5)
    one = jax.jit(run)
    loop = [
        one(*(x if axis is None else x[i] for x, axis in zip((key, *arguments), axes, strict=True)))
        for i in range(SIZE)
    ]
    assert_close(jax.jit(jax.vmap(run, axes))(key, *arguments), [np.stack(x) for x in zip(*loop, strict=True)])


def mesh(target: Target, **options: Any) -> jax.sharding.Mesh:
    devices = jax.devices(target.platform)
    shape = (2, 2) if len(devices) >= 4 else (2, 1)
    if len(devices) < np.prod(shape):
        pytest.skip(f"needs 2 devices of platform {target.platform}, JAX has {len(devices)}")
    return jax.sharding.Mesh(np.array(devices[: np.prod(shape)]).reshape(shape), ("x", "y"), **options)


SPECS = (*(PartitionSpec("x", None, "y"),) * 4, PartitionSpec("x", "y"))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_split_over_devices(target: Target, name: str) -> None:
    """Over batch and heads; the gradient of what devices share is summed over them."""
    argument, shape, spec = ARRAYS[name]
    dtype = target.dtypes[0]
    grid = mesh(target)
    rng = np.random.default_rng(len(name))
    arguments = (*inputs(rng, dtype), values(rng, argument, shape, dtype))
    run = jax.jit(function(target, argument))
    placed = [jax.device_put(x, NamedSharding(grid, s)) for x, s in zip(arguments, (*SPECS, spec), strict=True)]
    assert "jax_flash_backward" in run.lower(*placed).compile().as_text()
    assert_close(run(*placed), run(*arguments))


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_dropout_split_over_devices(target: Target) -> None:
    """The mask does not depend on how the call is split."""
    arguments = inputs(np.random.default_rng(0), target.dtypes[0])
    grid = mesh(target)

    @jax.jit
    def run(*arguments: Any) -> Any:
        slopes = np.full(Q_HEADS, 0.1, np.float32)
        options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(8)}
        return function(target, "alibi_slopes", **options)(*arguments, slopes)

    placed = [jax.device_put(x, NamedSharding(grid, spec)) for x, spec in zip(arguments, SPECS, strict=True)]
    assert_close(run(*placed), run(*arguments))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("name", ["bias", "bias_of_pairs", "alibi_slopes", "sinks", "q_segment_ids", "scale", "window"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_shard_map(target: Target, name: str, check_vma: bool) -> None:
    """Each device has its part of the batch; what all share has the sum of their gradients."""
    argument, shape, spec = ARRAYS[name]
    dtype = target.dtypes[0]
    grid = mesh(target)
    rng = np.random.default_rng(len(name))
    *arrays, dout, dlse = inputs(rng, dtype)
    option = values(rng, argument, shape, dtype)
    batch = PartitionSpec("x")
    option_spec = batch if spec and spec[0] == "x" else PartitionSpec()
    kv_segments = np.sort(np.arange(BATCH * KV_LENGTH, dtype=np.int32).reshape(BATCH, -1) % 3, axis=1)

    def attend(query: Any, key: Any, value: Any, option: Any, kv_segments: Any) -> Any:
        options = {argument: option}
        if argument == "q_segment_ids":
            options["kv_segment_ids"] = kv_segments
        return jax_flash.attention(
            query, key, value, causal=True, return_lse=True, implementation=target.implementation, **options
        )

    split = jax.shard_map(
        attend, mesh=grid, in_specs=(batch, batch, batch, option_spec, batch), out_specs=batch, check_vma=check_vma
    )

    def run(attend: Any) -> Any:
        if argument in TRAINABLE:
            results, pullback = jax.vjp(lambda *x: attend(*x, kv_segments), *arrays, option)
        else:
            results, pullback = jax.vjp(lambda *x: attend(*x, option, kv_segments), *arrays)
        return (*results, *pullback((dout, dlse)))

    assert_close(jax.jit(functools.partial(run, split))(), jax.jit(functools.partial(run, attend))())


@pytest.mark.parametrize("name", ["bias", "bias_of_heads", "bias_of_pairs", "alibi_slopes", "sinks", "scale", "window"])
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_explicit_sharding(target: Target, name: str) -> None:
    argument, shape, spec = ARRAYS[name]
    dtype = target.dtypes[0]
    rng = np.random.default_rng(len(name))
    arguments = (*inputs(rng, dtype), values(rng, argument, shape, dtype))
    run = jax.jit(function(target, argument))
    want = run(*arguments)
    grid = mesh(target, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(grid):
        placed = [jax.device_put(x, NamedSharding(grid, s)) for x, s in zip(arguments, (*SPECS, spec), strict=True)]
        assert_close(run(*placed), want)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("argument", ["bias", "alibi_slopes"])
def test_gradients_that_nobody_asks_for(argument: str, wanted: bool) -> None:
    """Unused gradients cost nothing: the backward call does not compute them."""
    arrays = [jnp.asarray(x) for x in inputs(np.random.default_rng(0), "float32")[:3]]
    option = values(np.random.default_rng(1), argument, ARRAYS[argument][1], "float32")

    def loss(query: Any, option: Any) -> Any:
        return jax_flash.attention(query, *arrays[1:], implementation="cpu", **{argument: option}).sum()

    text = jax.jit(jax.grad(loss, (0, 1) if wanted else 0)).lower(arrays[0], option).as_text()
    (line,) = [line for line in text.splitlines() if "@jax_flash_backward" in line]
    assert f"has_d{argument} = {str(wanted).lower()}" in line
