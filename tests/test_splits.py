"""Query heads that share a key head, split over blocks of the backward pass where key heads are few."""

from typing import Any

import cases
import pytest
from cases import Case, PackedCase

from jax_flash._native import _core

SPLIT = [case for case in (*cases.CASES, *cases.PACKED_CASES) if "split" in case.name and "split_kv" not in case.name]


def shape(
    q_length: int, kv_length: int, q_heads: int, kv_heads: int, head_dim: int, *, batch: int = 1, **options: Any
) -> dict[str, Any]:
    sizes = {"batch": batch, "q_length": q_length, "kv_length": kv_length, "q_heads": q_heads, "kv_heads": kv_heads}
    return {**sizes, "head_dim": head_dim, "value_head_dim": head_dim, "options": options}


def scratch(call: dict[str, Any]) -> int:
    return _core.scratch(pass_="backward", platform="cuda", dtype="bfloat16", shapes={}, **call)


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_cases_are_split(case: Case | PackedCase) -> None:
    """The cases really are split; otherwise they would test nothing."""
    heads = case.q_heads, case.kv_heads, max(case.head_dim, case.value_head_dim or 0)
    if isinstance(case, PackedCase):
        lengths = sum(case.q_lengths) + case.tails[0], sum(case.kv_lengths) + case.tails[1]
        options = {"sequences": len(case.q_lengths), "has_cu_q_lengths": True, "has_cu_kv_lengths": True}
        assert _core.group_splits(**shape(*lengths, *heads, causal=case.causal, **options)) > 1
    else:
        call = shape(case.q_length, case.kv_length, *heads, batch=case.leading[0], causal=case.causal)
        assert _core.group_splits(**call) > 1


@pytest.mark.parametrize(
    ("lengths", "heads", "causal", "splits"),
    [
        ((4096, 4096), (32, 1), False, 4),  # 32 blocks of 128 keys
        ((4096, 4096), (32, 1), True, 16),
        ((1024, 1024), (32, 8), False, 2),
        ((1024, 1024), (32, 16), False, 1),  # two rounds of halves take as long as one
        ((1024, 1024), (32, 1), False, 16),
        ((4096, 4096), (32, 8), False, 1),  # there are blocks enough
        ((4096, 4096), (32, 32), False, 1),  # a head each
        ((256, 256), (8, 8), False, 1),
        ((1, 8192), (32, 8), False, 1),
        ((16, 1024), (4, 1), False, 1),  # too little to do
        ((1024, 1024), (24, 2), False, 6),  # only what shares the heads evenly
    ],
)
def test_as_many_as_there_are_multiprocessors(
    lengths: tuple[int, int], heads: tuple[int, int], causal: bool, splits: int
) -> None:
    assert _core.group_splits(**shape(*lengths, *heads, 128, causal=causal)) == splits


@pytest.mark.parametrize(
    ("batch", "length", "kv_heads", "head_dim", "splits"),
    [
        (8, 1024, 4, 128, 4),
        (8, 1024, 1, 64, 16),
        (2, 4096, 8, 128, 1),
        (1, 3072, 8, 128, 2),  # all blocks at once
        (1, 4096, 8, 128, 1),
        (2, 8192, 8, 128, 2),
        (2, 16384, 8, 128, 4),
        (2, 8192, 8, 64, 1),  # a block has twice the keys
        (2, 16384, 8, 64, 1),
        (2, 32768, 8, 64, 2),
        (16, 256, 1, 128, 8),  # sums would take longer than products
    ],
)
def test_heads_that_drift_apart(batch: int, length: int, kv_heads: int, head_dim: int, splits: int) -> None:
    """Under causal, two query heads a share, unless L2 has room for the rows of all heads of a group."""
    call = shape(length, length, 32, kv_heads, head_dim, batch=batch)
    call["options"] = {"causal": True}
    assert _core.group_splits(**call) == splits
    for options in (
        {"window_left": 512},
        {"separate_dq": True},
        {"has_q_segment_ids": True, "has_kv_segment_ids": True},
    ):
        other = {**call, "options": call["options"] | options}
        assert _core.group_splits(**other) <= splits
        assert length < 1024 or kv_heads == 8 or _core.group_splits(**other) < splits


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
def test_scratch(kv_heads: int, head_dim: int, causal: bool) -> None:
    """One sum of all shares lies behind an accumulator of dQ, which has two counters for each head, or where few blocks
    share their rows, what they leave to each other; without one the shares' sums may take as much instead."""
    for length in (128, 256, 512, 1024, 2048, 4096, 8192):
        # Long calls without options have whole tiles of 80 rows at head_dim 128, those of few blocks only longer ones.
        many = -(-length // 128) * kv_heads > 132
        tall = head_dim == 128 and length >= (16384 if causal else 4096 if many else 8192)
        elements = (-(-length // 80) * 80 if tall else length) * 32 * head_dim
        call = shape(length, length, 32, kv_heads, head_dim, causal=causal)
        sums, splits = length * kv_heads * 2 * head_dim, _core.group_splits(**call)
        keys = {64: 256, 128: 128, 256: 64}[head_dim]
        blocks = kv_heads * -(-length // keys)
        halves = splits == 1 and blocks <= 66 and length * 32 // kv_heads >= 512
        more = sums if splits > 1 else -(-blocks // 4) * 4 + blocks * keys * 2 * head_dim if halves else 0
        assert scratch(call) == elements + 64 + more <= 2 * elements + 64 + max(sums, 68)
        call = shape(length, length, 32, kv_heads, head_dim, causal=causal, separate_dq=True)
        sums = _core.group_splits(**call) * length * kv_heads * 2 * head_dim
        in_scratch = _core.group_splits(**call) > 1 and 4 * sums > 2 * elements
        assert scratch(call) == (sums if in_scratch else 0) <= elements
