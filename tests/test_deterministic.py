"""deterministic_backward=True: the same bits every time, and the same gradients as without."""

import dataclasses
import functools
import os
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Target

import jax_flash
from jax_flash import flex

REPEATS = int(os.environ.get("JAX_FLASH_TEST_REPEATS", "5"))
"""How often a backward pass is run again, to be compared bit by bit."""

CASE = Case("deterministic", 150, 290, q_heads=4, kv_heads=2, head_dim=64, causal=True, q_offset=140)


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
@pytest.mark.parametrize("head_dim", [64, 136])
def test_values(target: Target, dtype: str, head_dim: int) -> None:
    if target.max_head_dim and dtype == "float32" and head_dim > cases.highest_precision_head_dim():
        pytest.skip(f"no kernels of float32's accuracy for head_dim {head_dim} on this GPU")
    problem = cases.problem(dataclasses.replace(CASE, head_dim=head_dim), dtype)
    problem.check(
        target.platform, cases.differentiate(cases.call(target, problem, deterministic_backward=True), problem)
    )


def bits(x: jax.Array) -> jax.Array:
    return x.view({1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize])


def count_differences(target: Target, problem: cases.Problem) -> int:
    """How many of REPEATS runs of a backward pass have other bits than the first."""
    attend = cases.call(target, problem, deterministic_backward=True)

    @jax.jit
    def run(inputs: Any, trainable: Any, cotangents: Any) -> Any:
        _, pullback = jax.vjp(lambda inputs, trainable: attend(*inputs, **trainable), inputs, trainable)
        return pullback(cotangents)

    @jax.jit
    def differs(x: Any, y: Any) -> jax.Array:
        return jnp.stack([(bits(a) != bits(b)).any() for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True)]).any()

    arguments = jax.device_put((problem.inputs, problem.trainable, (problem.dout, problem.dlse)), target.device)
    first = run(*arguments)
    return sum(int(differs(first, run(*arguments))) for _ in range(REPEATS))


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
def test_the_same_bits_every_time(target: Target, dtype: str) -> None:
    """Many blocks add to the same rows of dquery, were it not for its own pass, or their order."""
    problem = cases.problem(dataclasses.replace(CASE, q_length=300, kv_length=1500), dtype)
    assert count_differences(target, problem) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_same_bits_of_many_blocks(head_dim: int, kv_heads: int, causal: bool, dtype: str) -> None:
    """More than a GPU runs at a time; of one key head, shares of its query heads that are added up."""
    case = Case("many_blocks", 1024, 1024, q_heads=16, kv_heads=kv_heads, head_dim=head_dim, causal=causal)
    assert count_differences(cases.CUDA, cases.problem(case, dtype)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"q_length": 3000, "kv_length": 500, "window": (300, 100), "q_offset": -2000},
        {"q_length": 500, "kv_length": 3000, "window": (400, None), "q_offset": 2300},
        {"q_length": 2000, "kv_length": 2000, "window": (511, None), "causal": True},
        {"q_length": 2000, "kv_length": 1900, "window": (None, 70)},
        {"q_length": 1500, "kv_length": 2000, "causal": True, "q_lengths": (900, 77), "kv_lengths": (50, 2000)},
        {"q_length": 2100, "kv_length": 2000, "causal": True},
    ],
    ids=["window", "left", "window-causal", "right", "lengths", "causal"],
)
@pytest.mark.parametrize("heads", [(4, 4), (14, 2)], ids=["4-heads", "14-heads-2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_of_bands(head_dim: int, heads: tuple[int, int], options: dict[str, Any]) -> None:
    """Hopper's blocks add dquery in order, of which each has to know how many come before it to a tile of rows. Seven
    query heads of a key head have blocks of their own, which add to three sums of dkey and dvalue by turns."""
    case = Case("bands", leading=(2,), q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, **options)
    problem = cases.problem(case, "bfloat16")
    attend = cases.call(cases.CUDA, problem, deterministic_backward=True)
    problem.check(cases.CUDA.platform, cases.differentiate(attend, problem))
    assert count_differences(cases.CUDA, problem) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["plain", "causal", "block_mask", "segments", "sequences"])
@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sums_of_many_blocks(head_dim: int, kv_heads: int, option: str) -> None:
    """Hopper's blocks zero sums of dquery for blocks to come: of calls in which there are such, by atomic additions and
    in one order, several times. Under causal those of shared key heads go by more than one group of heads."""
    batch, length = 8, 1100
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (16, kv_heads, kv_heads, 16)
    *inputs, dout = (draw(key, (batch, length, n, head_dim)) for key, n in zip(keys, heads, strict=True))
    options: dict[str, Any] = {}
    if option == "causal":
        options["causal"] = True
    elif option == "block_mask":
        kept = jnp.asarray(np.random.default_rng(0).random((4, length)) < 0.5)
        options["block_mask"] = flex.create_block_mask(
            lambda b, h, q, kv: kept[h % 4, q // 128 * 128] | (q // 128 == kv // 128), None, 16, length, length
        )
    elif option == "segments":
        options["q_segment_ids"] = options["kv_segment_ids"] = jnp.broadcast_to(
            jnp.arange(length) // 150, (batch, length)
        )

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, deterministic: bool) -> jax.Array:
        if option != "sequences":
            return jax_flash.attention(query, key, value, deterministic_backward=deterministic, **options)
        ends = jnp.arange(0, batch * length + 1, 550, dtype=jnp.int32)
        rows = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
        return jax_flash.attention_varlen(*rows, ends, ends, deterministic_backward=deterministic).reshape(query.shape)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(deterministic: bool, dout: jax.Array, *inputs: jax.Array) -> Any:
        _, pullback = jax.vjp(lambda *inputs: attend(*inputs, deterministic), *inputs)
        return pullback(dout)

    arguments = jax.device_put((dout, *inputs), jax.devices("cuda")[0])
    want = gradients(True, *arguments)
    for _ in range(REPEATS):
        for x, y in zip(gradients(False, *arguments), want, strict=True):
            error = jnp.linalg.norm((x - y).astype(jnp.float32)) / jnp.linalg.norm(y.astype(jnp.float32))
            assert error < 1e-3  # some of the last bits; a sum that was zeroed too late is wrong by far more


SHARED = (
    *(
        Case(f"shared_bias_{bias}", 150, 290, q_heads=4, kv_heads=2, head_dim=64, bias=bias, causal=True, q_offset=100)
        for bias in ("bts", "nts", "ts", "bs", "ns", "s", "bnt", "t", "n", "")
    ),
    Case("shared_slopes", 150, 290, q_heads=4, kv_heads=2, head_dim=64, alibi="n", q_offset=140),
    Case("shared_slopes_of_batches", 150, 290, q_heads=4, kv_heads=1, head_dim=128, alibi="bn", softcap=3.0),
    Case("shared_bias_128", 150, 291, q_heads=4, kv_heads=2, head_dim=128, bias="ts", softcap=3.0, window=(80, 30)),
    Case("shared_bias_256", 150, 290, q_heads=4, kv_heads=2, head_dim=256, bias="nts", dropout_rate=0.2, sinks=True),
    Case("shared_bias_of_sinks", 150, 290, q_heads=4, kv_heads=2, bias="nt", sinks=True, dropout_rate=0.2),
    Case("shared_bias_of_holes", 37, 53, bias="t", bias_holes=0.3, sinks=True),
    Case("shared_bias_192_128", 70, 90, 4, 2, 192, value_head_dim=128, bias="ts", alibi="bn", segments=3),
    Case("shared_bias_40_72", 70, 90, 4, 2, 40, value_head_dim=72, bias="ts", mask="bts", q_lengths=(70, 30)),
    Case("shared_bias_of_lengths", 70, 90, 4, 2, 32, bias="nt", q_lengths=(70, 30), kv_lengths=(0, 60)),
    Case("shared_bias_one_row", 1, 290, 4, 2, 64, bias="s"),
    Case("shared_everything", 150, 170, q_heads=4, kv_heads=2, head_dim=64, **cases.EVERYTHING),
)
"""Gradients that many blocks have a share in: of a bias that is broadcast, in every way, and of slopes."""


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("target", "dtype", "case"),
    [
        cases.param(target, dtype, case, id=f"{dtype}-{case.name}")
        for target in (cases.CPU, cases.CUDA)
        for dtype in ("float16", "float32")
        for case in SHARED
    ],
)
def test_gradients_that_are_shared(target: Target, dtype: str, case: Case) -> None:
    if target.max_head_dim and dtype == "float32" and case.head_dim > cases.highest_precision_head_dim():
        pytest.skip(f"no kernels of float32's accuracy for head_dim {case.head_dim} on this GPU")
    problem = cases.problem(case, dtype)
    attend = cases.call(target, problem, deterministic_backward=True)
    problem.check(target.platform, cases.differentiate(attend, problem))
    assert count_differences(target, problem) == 0


@pytest.mark.parametrize(("target", "dtype"), cases.targets_and_dtypes(lambda target: target.kernel))
def test_bias_of_rows_without_keys(target: Target, dtype: str) -> None:
    """The gradient of a bias that a row's keys share is made of lse, which may not be the sink to the last bit."""
    case = Case("sinks_alone", 5, 3, 64, 64, leading=(1,), bias="nt", sinks=True, causal=True, q_offset=-5)
    problem = cases.problem(case, dtype)
    assert not cases.differentiate(cases.call(target, problem), problem)["dbias"].any()


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_slopes_of_sequences(target: Target) -> None:
    lengths = (40, 0, 200, 37, 1), (33, 9, 170, 16, 5)
    case = cases.PackedCase("slopes", *lengths, tails=(5, 3), q_heads=4, kv_heads=2, head_dim=64, alibi="dn")
    problem = cases.packed_problem(case, "float16")
    problem.check(
        target.platform, cases.differentiate(cases.call(target, problem, deterministic_backward=True), problem)
    )
    assert count_differences(target, problem) == 0


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops --xla_gpu_autotune_level=0", True),
        ("--xla_dump_to=/nowhere --xla_gpu_exclude_nondeterministic_ops=1", True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_of_old=true", False),
    ],
)
def test_the_default_follows_xla(flags: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    query = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float16)

    def record(deterministic: bool | None) -> bool:
        def loss(x: jax.Array) -> jax.Array:
            return jax_flash.attention(x, x, x, deterministic_backward=deterministic).astype(jnp.float32).sum()

        calls = [x for x in jax.make_jaxpr(jax.grad(loss))(query).eqns if x.primitive.name == "jax_flash_backward"]
        (call,) = calls
        deterministic = call.params["params"].options.separate_dq
        assert isinstance(deterministic, bool)
        return deterministic

    assert record(None) == wanted
    assert record(True)
    assert not record(False)
