"""How the split-KV forward is planned on GPUs: by which rows of a block, and on how many slices of the keys."""

from typing import Any

import cases
import jax
import pytest
from cases import Target

from jax_flash._native import _core


def plan(q_length: int, kv_length: int, q_heads: int = 8, kv_heads: int = 8, batch: int = 1, **options: Any) -> Any:
    return _core.plan_split_kv(
        batch=batch, q_length=q_length, kv_length=kv_length, q_heads=q_heads, kv_heads=kv_heads, options=options
    )


def scratch(platform: str, q_length: int, kv_length: int, **options: Any) -> int:
    return _core.scratch(
        pass_="forward",
        platform=platform,
        dtype="float32",
        options=options,
        batch=3,
        q_length=q_length,
        kv_length=kv_length,
        q_heads=8,
        kv_heads=2,
        head_dim=64,
        value_head_dim=128,
        shapes={},
    )


def test_many_queries_are_left_to_others() -> None:
    assert plan(4096, 4096) == (0, 1)
    assert plan(1024, 32768, batch=4) == (0, 1)


def test_the_rows_of_a_key_head_share_a_block() -> None:
    assert plan(1, 8192)[0] == plan(16, 8192)[0] == plan(4, 8192, 32, 8)[0] == 16
    assert plan(8, 8192, 32, 8)[0] == plan(1, 8192, 32, 1)[0] == 16  # two blocks of 16 rather than one of 64
    assert plan(33, 8192)[0] == plan(64, 8192)[0] == plan(9, 8192, 32, 8)[0] == plan(2, 8192, 32, 1)[0] == 64
    # Those of packed sequences do not.
    assert plan(16, 8192, 32, 1, has_cu_q_lengths=True, has_cu_kv_lengths=True)[0] == 16


def test_keys_are_split_where_there_are_many_and_blocks_few() -> None:
    assert plan(1, 512)[1] == 1
    assert plan(1, 32768, batch=17)[1] == 1
    slices = [plan(1, kv_length)[1] for kv_length in (1024, 2048, 4096, 8192, 16384, 32768)]
    assert slices == sorted(slices)
    assert slices[0] == 1
    assert slices[-1] == 16  # of 8 heads each, on about as many multiprocessors as there are
    assert plan(1, 32768, 32, 1)[1] == 64
    assert plan(1, 2**30, 1, 1)[1] == 64
    assert plan(1, 32768, 64, 8) == plan(1, 32768, 8, 8)


def test_a_switch_leaves_them_to_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_FLASH_SPLIT_KV", "0")
    assert plan(1, 32768) == (0, 1)
    assert scratch("cuda", 1, 32768) == 0


def test_single_tile_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single-tile calls: few blocks, each of which has all keys at once."""

    def single_tile(q_length: int, kv_length: int, heads: int = 1, batch: int = 1) -> bool:
        answer: bool = _core.is_single_tile(
            batch=batch, q_length=q_length, kv_length=kv_length, q_heads=heads, kv_heads=heads
        )
        return answer

    assert single_tile(1, 1)
    assert single_tile(64, 64)
    assert not single_tile(64, 65)
    assert single_tile(32, 64, 33, 2)
    assert not single_tile(33, 64, 33, 2)
    monkeypatch.setenv("JAX_FLASH_SPLIT_KV", "0")
    assert not single_tile(64, 64)


def test_scratch_holds_what_every_slice_has() -> None:
    """Of every row a sum of values, what exponentials are related to and their sum."""
    _, slices = plan(5, 32768, 8, 2, batch=3)
    assert slices > 1
    assert scratch("cuda", 5, 32768) == slices * 3 * 8 * 5 * (128 + 2)
    assert scratch("cuda", 5, 512) == scratch("cpu", 5, 32768) == 0
    # A row of float32 as two limbs has the columns of both.
    limbs = scratch("cuda", 5, 32768, has_descale=True, highest_precision=True)
    assert limbs == slices * 3 * 8 * 5 * (64 + 2)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.platform == "cuda" and target.kernel))
@pytest.mark.parametrize("name", ["split_kv_5", "split_kv_everything_128", "split_kv_rows_of_heads", "single_tile_64"])
def test_results_are_the_same_in_every_run(target: Target, name: str) -> None:
    problem = cases.problem(cases.by_name(name), "bfloat16")
    call = cases.call(target, problem)
    want = cases.evaluate(call, problem)
    for _ in range(50):
        for key, got in cases.evaluate(call, problem).items():
            assert (got == want[key]).all(), key


@pytest.mark.parametrize("target", cases.targets(lambda target: target.platform == "cuda" and target.kernel))
@pytest.mark.parametrize("name", ["odd", "grouped", "split_kv_5", "split_kv_everything_64"])
def test_the_other_kernels_have_the_same_values(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Most conformance cases are short queries, which split-KV serves: here the other kernels serve them."""
    monkeypatch.setenv("JAX_FLASH_SPLIT_KV", "0")
    request.addfinalizer(jax.clear_caches)
    jax.clear_caches()  # a call that was traced with the other plan has scratch that this one does not take
    problem = cases.problem(cases.by_name(name), "bfloat16")
    problem.check(target.platform, cases.evaluate(cases.call(target, problem), problem))
