"""Hopper's and Ampere's kernels in the emulator (emulated.py): right values in every order of threads and of
asynchronous operations, and no redundant waits. Needs no GPU, but a C++ compiler.
"""

import ctypes
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import emulated
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(emulated.COMPILER is None or sys.platform != "linux", reason="needs g++ on Linux")

ORDERS = 8
"""Copies and MMAs as late as waiting for them allows, early copies, early MMAs, and a mix; then these once more with
stores that MMAs see before their fence."""

GROUPS = {"q_heads": 4, "kv_heads": 2}
ODD = {"q_length": 197, "kv_length": 333}
HALVES = {"q_length": 530, "kv_length": 333, **GROUPS, "kv_heads": 4}
IN_FLOAT32: dict[str, dict[str, Any]] = {
    name: {"q_length": 133, "kv_length": 190, "dtype": "float16", **GROUPS, **case}
    | {"options": ["descale", "in_float32", *case["options"]]}
    for name, case in {
        "float32-plain": {"options": ["separate_dq"]},
        "float32-options": {"batch": 2, "options": ["causal", "lengths", "bias", "dropout", "softcap", "segments"]},
        "float32-listed-keys": {"batch": 2, "options": ["listed_keys", "sinks"]},
        "float32-shared-bias": {"batch": 2, "options": ["window", "shared_bias", "mask", "sinks", "separate_dq"]},
        "float32-added-bias": {"batch": 2, "kv_heads": 1, "options": ["window", "shared_bias", "lengths"]},
        "float32-sequences": {"options": ["sequences", "alibi", "arrays", "q_offset"]},
        "float32-bfloat16": {
            "head_dim": 40,
            "value_head_dim": 80,
            "options": ["alibi", "bias_of_keys", "causal", "originals_in_bfloat16"],
        },
        "float32-256": {"head_dim": 256, "q_length": 70, "kv_length": 90, "options": ["causal", "segments"]},
        "float32-intervals": {"batch": 2, "options": ["intervals", "window", "shared_bias", "separate_dq"]},
        "float32-split": {"head_dim": 128, "kv_length": 60, "q_heads": 16, "options": ["lengths"]},
        "float32-one-row": {"q_length": 1, "kv_length": 90, "options": []},
    }.items()
}
"""Of which every other key head is computed in float32."""
CASES: dict[str, dict[str, Any]] = {
    "full-64": ODD,
    # Blocks of 192 rows: those of the others at head_dim 64 have 128.
    "many-heads": {"q_length": 140, "kv_length": 200, "q_heads": 67, "kv_heads": 67},
    "causal-64": {"q_length": 333, "kv_length": 197, "options": ["causal"], **GROUPS},
    "lengths-64": {"batch": 2, "dtype": "float16", "options": ["causal", "lengths"], **ODD},
    "sequences-64": {"options": ["sequences", "alibi"], **ODD},
    "full-128": {"head_dim": 128, "dtype": "float16", **ODD},
    "lengths-128": {"head_dim": 128, "batch": 2, "options": ["lengths", "causal"], **ODD},
    "descale-128": {"head_dim": 128, "dtype": "float16", "options": ["descale", "window"], **ODD},
    "narrow": {"head_dim": 40, "value_head_dim": 80, "options": ["q_offset", "causal"], **ODD},
    "one-row-128": {"head_dim": 128, "q_length": 1, "kv_length": 700},
    "causal-256": {"head_dim": 256, "options": ["causal"], **ODD},
    "mask-bias-sinks": {"options": ["mask", "bias", "sinks"], **ODD},
    "softcap-dropout-window": {"options": ["softcap", "dropout", "window"], **ODD, **GROUPS},
    "separate_dq-64": {"options": ["separate_dq", "lengths"], **ODD},
    "separate_dq-128": {"head_dim": 128, "options": ["separate_dq", "causal"], **ODD},
    "separate_dq-alibi": {
        "options": ["separate_dq", "alibi", "bias_of_keys", "causal"],
        "batch": 2,
        **ODD,
        **GROUPS,
    },
    # dQ is added in the order of the blocks. The emulator notices who adds out of turn.
    "ordered_dq-64": {"options": ["ordered_dq", "causal", "q_offset", "lengths"], "batch": 3, **ODD},
    # Of the last tile of 128 rows one warpgroup has no row.
    "ordered_dq-half-a-tile": {"options": ["ordered_dq"], "q_length": 300, "kv_length": 200},
    "ordered_dq-128": {"head_dim": 128, "options": ["ordered_dq", "mask", "sinks"], "dtype": "float16", **ODD},
    "ordered_dq-narrow": {"head_dim": 40, "value_head_dim": 80, "options": ["ordered_dq", "causal"], **ODD},
    "ordered_dq-96": {"head_dim": 96, "options": ["ordered_dq", "window"], **ODD},
    "full-96": {"head_dim": 96, **ODD},
    "ordered_dq-window": {
        "head_dim": 128,
        "options": ["ordered_dq", "window", "q_offset", "short_keys"],
        **ODD,
        **GROUPS,
    },
    "ordered_dq-arrays": {"options": ["ordered_dq", "arrays", "q_offset", "softcap"], "batch": 4, **ODD},
    "ordered_dq-left": {"options": ["ordered_dq", "window_left", "short_rows"], "q_length": 500, "kv_length": 400},
    "ordered_dq-sequences": {"options": ["ordered_dq", "sequences", "causal"], "q_length": 500, "kv_length": 700},
    "ordered_dq-listed-keys": {"options": ["ordered_dq", "listed_keys"], "batch": 2, "q_length": 197, "kv_length": 733},
    "ordered_dq-descale": {
        "head_dim": 128,
        "dtype": "float16",
        "options": ["ordered_dq", "descale", "in_float32", "causal"],
        "batch": 2,
        **ODD,
        **GROUPS,
    },
    "ordered_dq-split": {
        "head_dim": 128,
        "options": ["ordered_dq", "causal"],
        "q_length": 260,
        "kv_length": 170,
        "q_heads": 8,
        "kv_heads": 1,
    },
    # Seven shares of query heads that add to three sums of keys.
    "ordered_dq-shares-by-turns": {
        "head_dim": 128,
        "options": ["ordered_dq", "causal"],
        "q_length": 260,
        "kv_length": 300,
        "q_heads": 7,
        "kv_heads": 1,
    },
    "ordered_dq-more-blocks-than-stay": {
        "options": ["ordered_dq"],
        "q_length": 90,
        "kv_length": 250,
        "q_heads": 45,
        "kv_heads": 45,
        "batch": 4,
    },
    # Blocks of the last heads go the other way.
    "ordered_dq-downwards": {
        "head_dim": 128,
        "options": ["ordered_dq", "causal"],
        "q_length": 390,
        "kv_length": 420,
        "q_heads": 7,
        "kv_heads": 7,
        "batch": 3,
    },
    # Of shared key heads all do, with the heads of a tile one after the other.
    "ordered_dq-shared-keys": {
        "head_dim": 128,
        "options": ["ordered_dq", "causal", "q_offset", "lengths"],
        "q_length": 390,
        "kv_length": 420,
        "q_heads": 6,
        "kv_heads": 2,
        "batch": 3,
    },
    # Few blocks, of whose rows each takes half.
    "halves-64": {"options": ["causal", "lengths"], "batch": 2, **HALVES},
    "halves-128": {"head_dim": 128, "options": ["q_offset", "window", "softcap"], "dtype": "float16", **HALVES},
    "halves-narrow": {"head_dim": 40, "value_head_dim": 80, "options": ["mask"], **HALVES},
    "halves-ordered_dq": {"head_dim": 128, "options": ["ordered_dq", "causal"], **HALVES},
    "halves-zeroed-ahead": {"options": [], "q_length": 520, "kv_length": 40, "q_heads": 66, "kv_heads": 66},
    # Long calls without options, in tiles of 80 rows of which dQ is computed transposed.
    "tall-tiles": {"head_dim": 128, "q_length": 8210, "kv_length": 100},
    # Blocks take several items, of which the first ones wait for what others zero.
    "items-zeroed-ahead": {"head_dim": 128, "q_length": 70, "kv_length": 140, "q_heads": 35, "kv_heads": 35},
    # Stores of boxes of keys beside the ends of sequences, of which another one's keys follow.
    "items-sequences": {
        "head_dim": 128,
        "options": ["sequences", "causal"],
        "q_length": 333,
        "kv_length": 500,
        "dtype": "float16",
        **GROUPS,
    },
    # Of other kinds it has a pass of its own.
    "ordered_dq-segments": {"options": ["ordered_dq", "segments"], **ODD},
    "ordered_dq-alibi": {"head_dim": 128, "options": ["ordered_dq", "alibi"], **ODD},
    "slopes-256": {"head_dim": 256, "options": ["alibi", "bias_of_keys", "q_offset"], **ODD},
    "split-64": {"options": ["causal", "alibi"], "q_length": 260, "kv_length": 170, "q_heads": 8, "kv_heads": 1},
    "split-separate_dq": {
        "options": ["causal", "separate_dq"],
        "q_length": 133,
        "kv_length": 190,
        "q_heads": 8,
        "kv_heads": 1,
    },
    "split-128": {
        "head_dim": 128,
        "dtype": "float16",
        "options": ["descale", "lengths"],
        "q_length": 197,
        "kv_length": 60,
        "q_heads": 8,
        "kv_heads": 2,
        "batch": 2,
    },
    "split-256": {"head_dim": 256, "q_length": 133, "kv_length": 70, "q_heads": 8, "kv_heads": 1},
    "segments-alibi": {"options": ["segments", "alibi", "q_offset", "causal"], **ODD},
    "intervals-64": {"options": ["intervals", "bias_of_keys"], "batch": 2, **ODD},
    "intervals-128": {"head_dim": 128, "options": ["intervals", "separate_dq", "causal"], **ODD},
    "intervals-256": {"head_dim": 256, "dtype": "float16", "options": ["intervals", "descale", "lengths"], **ODD},
    "intervals-sequences": {"options": ["intervals", "sequences", "window"], **ODD},
    # Keys of which every row's pairs are decided at once.
    "hidden-keys-alone": {"options": ["hidden_keys"], "batch": 2, **ODD},
    "hidden-keys-64": {"options": ["hidden_keys", "window", "alibi"], "batch": 2, **ODD},
    "hidden-keys-options": {"options": ["hidden_keys", "segments", "bias"], "batch": 2, **ODD},
    "hidden-keys-128": {"head_dim": 128, "options": ["hidden_keys", "causal", "separate_dq"], "batch": 2, **ODD},
    "hidden-keys-256": {"head_dim": 256, "options": ["hidden_keys", "lengths"], "batch": 2, **ODD},
    # Keys that keep all rows of one warp of a warpgroup and none of another's.
    "parted-keys-64": {"options": ["parted_keys"], "batch": 2, **ODD},
    "parted-keys-256": {"head_dim": 256, "options": ["parted_keys", "causal"], **ODD},
    # Keys that are hidden from all rows are in no tile.
    "listed-keys-64": {"options": ["listed_keys"], "batch": 2, "q_length": 197, "kv_length": 733},
    "listed-keys-many-heads": {
        "options": ["listed_keys", "sinks"],
        "q_length": 140,
        "kv_length": 333,
        "q_heads": 67,
        "kv_heads": 67,
    },
    "listed-keys-128": {"head_dim": 128, "options": ["listed_keys", "softcap"], "batch": 2, **ODD, **GROUPS},
    "listed-keys-split": {"options": ["listed_keys"], "q_length": 260, "kv_length": 170, "q_heads": 8, "batch": 2},
    "listed-keys-separate_dq": {"options": ["listed_keys", "separate_dq"], "batch": 2, **ODD},
    "listed-keys-256": {"head_dim": 256, "options": ["listed_keys"], "batch": 2, "dtype": "float16", **ODD},
    "listed-keys-narrow": {"head_dim": 40, "value_head_dim": 104, "options": ["listed_keys"], "batch": 3, **ODD},
    "listed-keys-descale": {"dtype": "float16", "options": ["listed_keys", "descale"], "batch": 2, **ODD, **GROUPS},
    # Blocks of keys whose first row, or of rows whose first key, lies beyond the last one.
    "short-rows": {"value_head_dim": 192, "options": ["causal", "segments", "short_rows"], **ODD},
    "short-keys": {"q_length": 390, "kv_length": 200, "options": ["window", "segments", "short_keys"]},
    # More tiles than a walk knows of at a time.
    "many-tiles-of-keys": {"q_length": 40, "kv_length": 4300, "options": ["segments"]},
    "many-tiles-of-rows": {"q_length": 2300, "kv_length": 60, "options": ["intervals"]},
    # Long stretches of tiles without pairs, which a warp that only loads skips several groups of 32 at a time.
    "gap-of-keys": {"q_length": 40, "kv_length": 26000, "options": ["segments", "gap", "separate_dq"]},
    "gap-of-rows": {"q_length": 14000, "kv_length": 60, "options": ["segments", "gap"]},
    # So many blocks that one zeroes sums of dQ for another, and heads whose blocks are several.
    "zeroed-ahead": {"q_length": 40, "kv_length": 250, "q_heads": 16, "kv_heads": 16, "batch": 8},
    "zeroed-ahead-causal": {
        "q_length": 512,
        "kv_length": 520,
        "q_heads": 16,
        "kv_heads": 16,
        "batch": 2,
        "head_dim": 128,
        "options": ["causal"],
    },
    "zeroed-ahead-128": {
        "q_length": 40,
        "kv_length": 200,
        "q_heads": 16,
        "kv_heads": 8,
        "batch": 8,
        "head_dim": 128,
        "options": ["lengths"],
    },
    "arrays-64": {"options": ["arrays", "q_offset"], "batch": 4, **ODD},
    "arrays-separate_dq": {"head_dim": 128, "options": ["arrays", "separate_dq", "causal"], "batch": 3, **ODD},
    "arrays-256": {
        "head_dim": 256,
        "dtype": "float16",
        "options": ["arrays", "descale", "segments"],
        "batch": 2,
        **ODD,
    },
    "arrays-sequences": {"options": ["arrays", "sequences", "q_offset"], **ODD},
    **IN_FLOAT32,
}

UNNOTICED = {
    "fence of products in start_dk": "that of dV or of the next scores comes before",
    "wait in skip": "the turns keep the warpgroups together",
    "numbered barrier in wait_for_keys": "each warpgroup zeroes for itself what lies beyond the end",
    "wait in end_additions (": "it is for a kernel that starts before this one ends, and here none does",
    "wait for bulk copies in operator() (csrc/cuda/sm90a/backward.cuh": "so is this, of blocks that stay",
    "wait in wait_until_wanted (": "an item may be taken before it is wanted",
    "fence of stores in jax_flash_backward (": "of zeros, and calls this short store none ahead",
    "numbered barrier in add_other_half (": "the second block begins when the first has ended",
    "wait for products in take_back": "the registers of operands are given away on a GPU alone",
}
"""Waits whose absence no order detects, and why."""


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulated.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def by_turns(names: Iterable[str], always: Collection[str], *others: str) -> list[Any]:
    """Cases for parametrize, with ``others`` beside the name: those of the names that every commit runs, and those that
    take turns (.ci/run)."""
    return [pytest.param(name, *others, marks=() if name in always else pytest.mark.slow) for name in names]


ALWAYS = (
    "causal-64",
    "descale-128",
    "separate_dq-alibi",
    "ordered_dq-64",
    "ordered_dq-half-a-tile",
    "segments-alibi",
    "intervals-128",
    "hidden-keys-128",
    "hidden-keys-alone",
    "listed-keys-64",
)
FORWARD_ONLY = ("many-heads",)  # whose blocks of 192 rows the backward does not have


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("name", "kernel_pass"),
    by_turns(CASES, ALWAYS, "forward") + by_turns((x for x in CASES if x not in FORWARD_ONLY), ALWAYS, "backward"),
)
def test_values(emulator: ctypes.CDLL, name: str, kernel_pass: str) -> None:
    problem = emulated.Problem(**CASES[name])
    call = emulated.Call(emulator, problem, kernel_pass)
    for order in range(ORDERS):
        wrong = [problem.wrong(of, got)[1] for of, got in call.run(order).items()]
        assert not any(wrong), (order, wrong)


SMALL = {"q_length": 133, "kv_length": 190}
AMPERE: dict[str, dict[str, Any]] = {
    "full-64": SMALL,
    "causal-64": {"options": ["causal"], **SMALL, **GROUPS},
    "sequences-64": {"options": ["sequences", "alibi"], **SMALL},
    "full-128": {"head_dim": 128, "dtype": "float16", **SMALL},
    "lengths-128": {"head_dim": 128, "batch": 2, "options": ["lengths", "causal"], **SMALL},
    "descale-128": {"head_dim": 128, "dtype": "float16", "options": ["descale", "window"], **SMALL},
    "narrow": {"head_dim": 40, "value_head_dim": 80, "options": ["q_offset", "causal"], **SMALL},
    "full-256": {"head_dim": 256, **SMALL},
    "causal-256": {"head_dim": 256, "options": ["causal"], **SMALL},
    "mask-bias-sinks": {"options": ["mask", "bias", "sinks"], **SMALL},
    "softcap-dropout-window": {"options": ["softcap", "dropout", "window"], **SMALL},
    "segments-128": {"head_dim": 128, "options": ["segments", "causal"], **SMALL},
    "intervals-64": {"options": ["intervals", "segments"], "batch": 2, "q_length": 260, "kv_length": 300},
    "intervals-128": {"head_dim": 128, "options": ["intervals", "separate_dq", "shared_bias"], "batch": 2, **SMALL},
    "intervals-sequences": {"options": ["intervals", "sequences", "alibi"], **SMALL},
    "hidden-keys": {"options": ["hidden_keys", "window", "separate_dq"], "batch": 2, **SMALL},
    "hidden-keys-options": {"options": ["hidden_keys", "segments", "bias", "separate_dq"], "batch": 2, **SMALL},
    "listed-keys-64": {"options": ["listed_keys"], "batch": 2, "q_length": 150, "kv_length": 290},
    "listed-keys-128": {
        "head_dim": 128,
        "value_head_dim": 104,
        "options": ["listed_keys", "separate_dq", "softcap"],
        "batch": 2,
        **SMALL,
    },
    "listed-keys-256": {"head_dim": 256, "options": ["listed_keys", "sinks"], "batch": 2, "dtype": "float16", **SMALL},
    "listed-keys-split": {"options": ["listed_keys"], "q_length": 260, "kv_length": 170, "q_heads": 8, "batch": 2},
    "listed-keys-descale": {"dtype": "float16", "options": ["listed_keys", "descale"], "batch": 2, **SMALL, **GROUPS},
    "short-rows": {"value_head_dim": 192, "options": ["causal", "segments", "short_rows"], **SMALL},
    "short-keys": {"q_length": 260, "kv_length": 200, "options": ["window", "segments", "short_keys"]},
    "separate_dq-64": {"options": ["separate_dq"], **SMALL},
    "separate_dq-128": {"head_dim": 128, "options": ["separate_dq", "causal"], **SMALL},
    "separate_dq-256": {"head_dim": 256, "options": ["separate_dq", "lengths"], **SMALL},
    "separate_dq-bias": {"options": ["separate_dq", "bias", "dropout", "lengths"], "batch": 2, **SMALL},
    "arrays-64": {"options": ["arrays", "q_offset"], "batch": 4, **SMALL},
    "arrays-128": {"head_dim": 128, "dtype": "float16", "options": ["arrays", "descale", "separate_dq"], **SMALL},
    "arrays-sequences": {"options": ["arrays", "sequences", "q_offset", "alibi"], **SMALL},
    "many-tiles-of-keys": {"q_length": 40, "kv_length": 2300, "options": ["segments"]},
    "many-tiles-of-rows": CASES["many-tiles-of-rows"],
    "split-64": CASES["split-64"],
    "split-separate_dq": CASES["split-separate_dq"],
    "split-128": CASES["split-128"],
    **IN_FLOAT32,
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kernel_pass", ["forward", "backward"])
@pytest.mark.parametrize(
    "name", by_turns(AMPERE, ("causal-64", "arrays-128", "softcap-dropout-window", "split-64", "listed-keys-64"))
)
def test_values_of_ampere(emulator: ctypes.CDLL, name: str, kernel_pass: str) -> None:
    """mma.sync and cp.async, whose copies are late, at once, or either."""
    problem = emulated.Problem(**AMPERE[name])
    call = emulated.Call(emulator, problem, kernel_pass, "sm80")
    for order in (0, 1, 3):
        wrong = [problem.wrong(of, got)[1] for of, got in call.run(order).items()]
        assert not any(wrong), (order, wrong)


SPLIT_KV: dict[str, dict[str, Any]] = {
    # A row of each of the heads that share keys, and their keys in slices.
    "decoding": {"q_length": 1, "kv_length": 1300, "q_heads": 8, "kv_heads": 2},
    "decoding-descale": {
        "head_dim": 128, "dtype": "float16", "q_length": 3, "kv_length": 1100, "options": ["descale", "lengths"],
        "batch": 2, **GROUPS,
    },
    "decoding-listed-keys": {
        "dtype": "float16", "q_length": 3, "kv_length": 1100, "batch": 2, "options": ["listed_keys", "descale"],
        **GROUPS,
    },
    "one-slice": {"q_length": 5, "kv_length": 300, "options": ["causal", "q_offset", "alibi"], **GROUPS},
    "rows-64": {"q_length": 50, "kv_length": 1200, "options": ["segments", "sinks"], "value_head_dim": 128},
    "intervals": {"q_length": 9, "kv_length": 1200, "options": ["intervals", "sinks"], **GROUPS},
    "intervals-sequences": {"q_length": 30, "kv_length": 200, "options": ["intervals", "sequences"], **GROUPS},
    "rows-64-options": {"q_length": 40, "kv_length": 270, "options": ["mask", "bias", "dropout", "softcap"], **GROUPS},
    "narrow": {"head_dim": 40, "value_head_dim": 24, "q_length": 17, "kv_length": 1200, "options": ["window"]},
    "256": {"head_dim": 256, "q_length": 20, "kv_length": 150, "options": ["arrays", "q_offset"], "batch": 2},
    "sequences": {"q_length": 30, "kv_length": 200, "options": ["sequences", "causal", "q_offset", "alibi"], **GROUPS},
    # The single-tile forward.
    "single-tile": {"q_length": 16, "kv_length": 64, "dtype": "float16"},
    "single-tile-causal": {"q_length": 21, "kv_length": 37, "value_head_dim": 32, "options": ["causal"], **GROUPS},
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(SPLIT_KV, ("decoding", "rows-64-options", "single-tile-causal")))
def test_values_of_split_kv(emulator: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teams of warps, slices in scratch and their merge, as an A100 has them; clusters are Hopper's, on a GPU alone."""
    monkeypatch.delenv("JAX_FLASH_SPLIT_KV")
    problem = emulated.Problem(**SPLIT_KV[name])
    call = emulated.Call(emulator, problem, "forward", "sm80")
    assert (call.wanted > 0) == (problem.k.shape[1] > 1024), "scratch is for slices"
    for order in (0, 1, 3):
        wrong = [problem.wrong(of, got)[1] for of, got in call.run(order).items()]
        assert not any(wrong), (order, wrong)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("family", ["sm80", "sm90a"])
@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
def test_rows_of_any_size(emulator: ctypes.CDLL, name: str, family: str) -> None:
    """From 1e-15 to 1e15 times as large: no row is less exact for the size of others."""
    case = IN_FLOAT32["float32-plain"]
    problem = emulated.Problem(**case | {"options": [*case["options"], "causal", f"huge_{name}"]})
    for kernel_pass in ("forward", "backward"):
        results = emulated.Call(emulator, problem, kernel_pass, family).run(0)
        wrong = [problem.wrong(of, got)[1] for of, got in results.items()]
        assert not any(wrong), wrong
        problem.take_lse(results)


def test_values_with_other_scratch(emulator: ctypes.CDLL) -> None:
    """Query heads are split as far as the scratch allows, and the results are right with any scratch."""
    problem = emulated.Problem(**CASES["split-separate_dq"])
    call = emulated.Call(emulator, problem, "backward", "sm80")
    assert call.wanted > 0, "else there is no other way"
    different = set()
    for elements in (call.wanted, call.wanted + 1000, call.wanted - 1, call.wanted // 3, 0):
        call.give_scratch(elements)
        results = call.run(0)
        assert not any(problem.wrong(of, got)[1] for of, got in results.items()), elements
        different.add(results["dk"].tobytes())
    assert len(different) > 1, "fewer shares are other sums"


@pytest.mark.parametrize("name", ["full-64", "causal-64", "lengths-128", "listed-keys-128"])
def test_items_from_a_counter(emulator: ctypes.CDLL, name: str) -> None:
    """Long calls have scratch for it, whose blocks take items rather than find theirs by number."""
    problem = emulated.Problem(**CASES[name] | {"q_heads": 4, "kv_heads": 2})
    call = emulated.Call(emulator, problem, "forward", "sm90a")
    call.give_scratch(1)
    for seed in range(ORDERS):
        results = call.run(seed)
        assert not any(problem.wrong(of, got)[1] for of, got in results.items()), seed
    items = problem.q.shape[0] * 4 * -(-problem.q.shape[1] // 128)
    # One each at a block's start, and at its end one that is none.
    assert call.scratch.array.view(np.int32)[0] == items


KERNELS: dict[str, list[dict[str, Any]]] = {
    "forward": [{}],
    "backward": [
        {},
        {"options": ["separate_dq"]},
        {"options": ["ordered_dq"]},
        # Blocks that take many items.
        {"options": ["segments"], "q_length": 140, "kv_length": 200, "q_heads": 6, "kv_heads": 6},
        {"head_dim": 256},
    ],
}
"""Problems that between them take all kernels of a pass."""


@pytest.mark.slow
@pytest.mark.parametrize("kernel_pass", KERNELS)
def test_no_wait_can_be_left_off(emulator: ctypes.CDLL, kernel_pass: str) -> None:
    """Every wait is necessary, and the emulator notices when one is left out."""
    noticed: set[str] = set()
    unnoticed: set[str] = set()
    for kernel in KERNELS[kernel_pass]:
        for option in ("lengths", "causal"):
            shape = {"q_length": 390, "kv_length": 460} | kernel
            problem = emulated.Problem(**shape | {"options": [option, *kernel.get("options", [])]})
            call = emulated.Call(emulator, problem, kernel_pass)
            call.prepare()
            tried = {wait for wait in unnoticed if wait.startswith(tuple(UNNOTICED))}
            for wait, error in emulated.omissions(call, 2 * ORDERS, but=noticed | tried).items():
                (noticed if error else unnoticed).add(wait)
    assert len(noticed) >= 15
    assert not [wait for wait in unnoticed - noticed if not wait.startswith(tuple(UNNOTICED))]
