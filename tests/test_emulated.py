"""Kernels of Hopper and Ampere, run without one (emulated.py): right values, in whatever order threads run and the
hardware does what it does behind their backs, and no wait that could be left off. Needs no GPU, but a C++ compiler.
"""

import concurrent.futures
import ctypes
import os
import sys
from collections.abc import Iterator

import emulated
import pytest

pytestmark = pytest.mark.skipif(emulated.COMPILER is None or sys.platform != "linux", reason="needs g++ on Linux")

ORDERS = 8
"""Copies and products as late as waiting for them allows, early copies, early products, and a mix; then these once more
with stores that products see before their fence."""

GROUPS = {"q_heads": 4, "kv_heads": 2}
ODD = {"q_length": 197, "kv_length": 333}
IN_FLOAT32 = {
    name: {"q_length": 133, "kv_length": 190, "dtype": "float16", **GROUPS, **case}
    | {"options": ["descale", "in_float32", *case["options"]]}
    for name, case in {
        "float32-plain": {"options": ["deterministic"]},
        "float32-options": {"batch": 2, "options": ["causal", "lengths", "bias", "dropout", "softcap", "segments"]},
        "float32-shared-bias": {"batch": 2, "options": ["window", "shared_bias", "mask", "sinks", "deterministic"]},
        "float32-added-bias": {"batch": 2, "kv_heads": 1, "options": ["window", "shared_bias", "lengths"]},
        "float32-sequences": {"options": ["sequences", "alibi", "arrays", "q_offset"]},
        "float32-bfloat16": {
            "head_dim": 40,
            "value_head_dim": 80,
            "options": ["alibi", "bias_of_keys", "causal", "originals_in_bfloat16"],
        },
        "float32-256": {"head_dim": 256, "q_length": 70, "kv_length": 90, "options": ["causal", "segments"]},
        "float32-split": {"head_dim": 128, "kv_length": 60, "q_heads": 16, "options": ["lengths"]},
        "float32-one-row": {"q_length": 1, "kv_length": 90, "options": []},
    }.items()
}
"""Of which every other key head is computed in float32."""
CASES = {
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
    "deterministic-64": {"options": ["deterministic", "lengths"], **ODD},
    "deterministic-128": {"head_dim": 128, "options": ["deterministic", "causal"], **ODD},
    "deterministic-alibi": {
        "options": ["deterministic", "alibi", "bias_of_keys", "causal"],
        "batch": 2,
        **ODD,
        **GROUPS,
    },
    "slopes-256": {"head_dim": 256, "options": ["alibi", "bias_of_keys", "q_offset"], **ODD},
    "split-64": {"options": ["causal", "alibi"], "q_length": 260, "kv_length": 170, "q_heads": 8, "kv_heads": 1},
    "split-deterministic": {
        "options": ["causal", "deterministic"],
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
    # Blocks of keys whose first row, or of rows whose first key, lies beyond the last one.
    "short-rows": {"value_head_dim": 192, "options": ["causal", "segments", "short_rows"], **ODD},
    "short-keys": {"q_length": 390, "kv_length": 200, "options": ["window", "segments", "short_keys"]},
    "arrays-64": {"options": ["arrays", "q_offset"], "batch": 4, **ODD},
    "arrays-deterministic": {"head_dim": 128, "options": ["arrays", "deterministic", "causal"], "batch": 3, **ODD},
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

CALLS = [
    (name, kernel_pass)
    for name in CASES
    for kernel_pass in ("forward", "backward")
    if (name, kernel_pass) != ("many-heads", "backward")
]

UNNOTICED = {
    "fence of products in start_dk": "that of dV or of the next scores comes before",
    "wait in skip": "the turns keep the warpgroups together",
    "numbered barrier in wait_for_keys": "each warpgroup zeroes for itself what lies beyond the end",
    "wait for products in take_back": "the registers of operands are given away on a GPU alone",
}
"""What a kernel can do without as it stands, or so much that no order goes wrong, and why."""


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulated.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated.build(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def calls(emulator: ctypes.CDLL) -> dict[tuple[str, str], emulated.Call]:
    """Every call of CALLS with its kernels compiled."""
    problems = {name: emulated.Problem(**case) for name, case in CASES.items()}  # type: ignore[arg-type]
    made = {(name, of): emulated.Call(emulator, problems[name], of) for name, of in CALLS}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(emulated.Call.prepare, made.values()))
    return made


@pytest.mark.parametrize(("name", "kernel_pass"), CALLS)
def test_values(calls: dict[tuple[str, str], emulated.Call], name: str, kernel_pass: str) -> None:
    call = calls[name, kernel_pass]
    for order in range(ORDERS):
        wrong = [call.problem.wrong(of, got)[1] for of, got in call.run(order).items()]
        assert not any(wrong), (order, wrong)


SMALL = {"q_length": 133, "kv_length": 190}
AMPERE = {
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
    "short-rows": {"value_head_dim": 192, "options": ["causal", "segments", "short_rows"], **SMALL},
    "short-keys": {"q_length": 260, "kv_length": 200, "options": ["window", "segments", "short_keys"]},
    "deterministic-64": {"options": ["deterministic"], **SMALL},
    "deterministic-128": {"head_dim": 128, "options": ["deterministic", "causal"], **SMALL},
    "deterministic-256": {"head_dim": 256, "options": ["deterministic", "lengths"], **SMALL},
    "arrays-64": {"options": ["arrays", "q_offset"], "batch": 4, **SMALL},
    "arrays-128": {"head_dim": 128, "dtype": "float16", "options": ["arrays", "descale", "deterministic"], **SMALL},
    "arrays-sequences": {"options": ["arrays", "sequences", "q_offset", "alibi"], **SMALL},
    "split-64": CASES["split-64"],
    "split-deterministic": CASES["split-deterministic"],
    "split-128": CASES["split-128"],
    **IN_FLOAT32,
}


@pytest.mark.parametrize("kernel_pass", ["forward", "backward"])
@pytest.mark.parametrize("name", AMPERE)
def test_values_of_ampere(emulator: ctypes.CDLL, name: str, kernel_pass: str) -> None:
    """mma.sync and cp.async, whose copies are late, at once, or either."""
    problem = emulated.Problem(**AMPERE[name])  # type: ignore[arg-type]
    call = emulated.Call(emulator, problem, kernel_pass, "sm80")
    for order in (0, 1, 3):
        wrong = [problem.wrong(of, got)[1] for of, got in call.run(order).items()]
        assert not any(wrong), (order, wrong)


@pytest.mark.parametrize("family", ["sm80", "sm90a"])
@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
def test_rows_of_any_size(emulator: ctypes.CDLL, name: str, family: str) -> None:
    """From 1e-15 to 1e15 times as large: no row is less exact for the size of others."""
    case = IN_FLOAT32["float32-plain"]
    problem = emulated.Problem(**case | {"options": [*case["options"], "causal", f"huge_{name}"]})  # type: ignore[arg-type]
    for kernel_pass in ("forward", "backward"):
        results = emulated.Call(emulator, problem, kernel_pass, family).run(0)
        wrong = [problem.wrong(of, got)[1] for of, got in results.items()]
        assert not any(wrong), wrong
        problem.take_lse(results)


def test_values_with_other_scratch(emulator: ctypes.CDLL) -> None:
    """Query heads are split as far as sums of their shares find room, and the results are right whatever there is."""
    problem = emulated.Problem(**CASES["split-deterministic"])  # type: ignore[arg-type]
    call = emulated.Call(emulator, problem, "backward", "sm80")
    assert call.wanted > 0, "else there is no other way"
    different = set()
    for elements in (call.wanted, call.wanted + 1000, call.wanted - 1, call.wanted // 3, 0):
        call.give_scratch(elements)
        results = call.run(0)
        assert not any(problem.wrong(of, got)[1] for of, got in results.items()), elements
        different.add(results["dk"].tobytes())
    assert len(different) > 1, "fewer shares are other sums"


KERNELS: dict[str, list[tuple[int, list[str]]]] = {
    "forward": [(64, [])],
    "backward": [(64, []), (64, ["deterministic"]), (256, [])],
}
"""Head dims and options that between them take all kernels of a pass."""


@pytest.mark.slow
@pytest.mark.parametrize("kernel_pass", KERNELS)
def test_no_wait_can_be_left_off(emulator: ctypes.CDLL, kernel_pass: str) -> None:
    """Neither do kernels wait in vain, nor does the emulator overlook that one does not wait."""
    noticed: set[str] = set()
    unnoticed: set[str] = set()
    for head_dim, options in KERNELS[kernel_pass]:
        for option in ("lengths", "causal"):
            problem = emulated.Problem(head_dim=head_dim, q_length=390, kv_length=460, options=[option, *options])
            call = emulated.Call(emulator, problem, kernel_pass)
            call.prepare()
            for wait, error in emulated.omissions(call, 2 * ORDERS, but=noticed).items():
                (noticed if error else unnoticed).add(wait)
    assert len(noticed) >= 15
    assert not [wait for wait in unnoticed - noticed if not wait.startswith(tuple(UNNOTICED))]
