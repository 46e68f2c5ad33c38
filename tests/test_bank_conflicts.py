"""Bank conflicts of the kernels' accesses to shared memory, counted, and races. Needs no GPU, but a C++ compiler.

The device sources themselves are compiled for the host and run, thread by thread of one block; what takes an address
of shared memory writes it down, and bank_conflicts/count.cc counts wavefronts by the hardware's rule.
`python tests/test_bank_conflicts.py` writes docs/bank-conflicts.md anew.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parent.parent
HOST = ROOT / "tests" / "bank_conflicts"
PAGE = ROOT / "docs" / "bank-conflicts.md"
COMPILER = shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs g++ on Linux"),
    pytest.mark.xdist_group("bank_conflicts"),  # one process compiles for all of them
]

DEVICE = ["-std=c++20", "-O0", "-w", "-fno-exceptions", "-fsanitize=thread", "-include", HOST / "device.h"]
"""-fsanitize=thread for its calls before every plain access, which count.cc answers; warnings would be of #pragma
unroll and of results that inline PTX no longer sets."""

INCLUDES = ["-I", HOST, "-I", ROOT / "csrc"]
"""In this order: the host's cuda/device/shared_memory.cuh takes the place of the device's."""

FAMILIES = {"sm70": "Volta", "sm75": "Turing", "sm80": "from Ampere on"}

PADDED = {
    16: Fraction(2),
    32: Fraction(2),
    48: Fraction(2),
    80: Fraction(8, 5),
    96: Fraction(4, 3),
    112: Fraction(10, 7),
    160: Fraction(6, 5),
    224: Fraction(8, 7),
}
"""Wavefronts for one without conflicts, by the columns of a tile that device/tile.cuh pads, when eight lanes take eight
chunks one after the other: where these are of two or more rows the padding between makes the last meet the first."""


JUSTIFIED = {("ld (plain) 16", ""): "results on their way out, once a block"}
"""The only accesses that may conflict, as often as PADDED says and no more, and not in the main loop."""


def run(*command: Any) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command[0]}: {result.returncode}\n{result.stderr[-4000:]}"
    return result.stdout


def compiled(folder: pathlib.Path, sources: Iterable[pathlib.Path], *options: Any) -> list[pathlib.Path]:
    def one(source: pathlib.Path) -> pathlib.Path:
        made = folder / f"{source.name}.o"
        run(COMPILER, *options, *INCLUDES, "-c", "-o", made, source)
        return made

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, sources))


def counted(folder: pathlib.Path, objects: list[pathlib.Path]) -> list[dict[str, Any]]:
    program = folder / "count"
    run(COMPILER, "-o", program, *compiled(folder, [HOST / "count.cc"], "-std=c++20", "-O1"), *objects)
    return [json.loads(line) for line in run(program).splitlines()]


def count_kernels(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Every kernel that bank_conflicts/variants.cc lists."""
    sources = [
        HOST / "variants.cc",
        *(
            ROOT / "csrc" / "cuda" / "host" / name
            for name in ("jit.cc", "disk_cache.cc", "driver.cc", "family.cc", "tuned.cc", "plan.cc")
        ),
    ]
    run(COMPILER, "-o", folder / "variants", *compiled(folder, sources, "-std=c++20", "-O0"), "-ldl", "-pthread")
    (folder / "kernels").mkdir()
    run(folder / "variants", folder / "kernels")
    return counted(folder, compiled(folder, sorted((folder / "kernels").iterdir()), *DEVICE))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return count_kernels(tmp_path_factory.mktemp("kernels"))


class Kernel(NamedTuple):
    family: str
    kernel_pass: str
    head_dim: int
    limbs: int
    arch: int


def kernel_of(counts: Mapping[str, Any]) -> Kernel:
    name = counts["kernel"]
    family, kernel_pass, _, head_dim = name.split("-")[:4]
    return Kernel(family, kernel_pass, int(head_dim[1:]), 1 + ("highest_precision" in name), int(name.split("sm_")[1]))


def function(pattern: Mapping[str, Any]) -> str:
    return pattern["in"].split("<")[0]


def test_what_is_known_is_found(tmp_path: pathlib.Path) -> None:
    [counts] = counted(tmp_path, compiled(tmp_path, [HOST / "known.cc"], *DEVICE))
    # Of one warp: instructions, wavefronts, and these without conflicts. The loop's in two steps.
    assert {(p["instruction"], p["in"]): p["all"] for p in counts["patterns"]} == {
        ("ld 4", "neighbours"): [1, 1, 1],
        ("ld 4", "one_word"): [1, 1, 1],
        ("ld 4", "two_apart"): [2, 4, 2],
        ("st 4", "one_bank"): [2, 64, 2],
        ("ld 8", "pairs"): [2, 4, 4],
        ("st 16", "chunks"): [2, 8, 8],
        ("st 16", "chunks_of_rows"): [2, 64, 8],
        ("cp.async 16", "chunks_of_padded_rows"): [2, 16, 8],
        ("ldmatrix.x4", "matrices"): [1, 4, 4],
        ("ldmatrix.trans.x4", "matrices_of_rows"): [1, 32, 4],
        ("ld 16", "some_lanes"): [2, 5, 5],
        ("ld (plain) 4", ""): [1, 1, 1],
        ("st (plain) 4", ""): [1, 2, 1],
    }
    in_loop = {"two_apart", "one_bank", "pairs", "chunks", "chunks_of_rows", "chunks_of_padded_rows"}
    for p in counts["patterns"]:
        assert p["a_step"] == [n // 2 if p["in"] in in_loop else 0 for n in p["all"]], p


def test_a_race_is_found(tmp_path: pathlib.Path) -> None:
    with pytest.raises(AssertionError, match="known, thread 32: race with another warp after barrier 1, put on tile"):
        counted(tmp_path, compiled(tmp_path, [HOST / "known_race.cc"], *DEVICE))


def test_nothing_goes_past_the_doors() -> None:
    """Accesses by inline PTX elsewhere would not be seen. What goes through a pointer is."""
    names = "device/shared_memory.cuh", "device/cluster.cuh", "sm90a/hopper.cuh"  # the second: what blocks exchange
    doors = [ROOT / "csrc" / "cuda" / name for name in names]
    for path in (ROOT / "csrc" / "cuda").rglob("*.cu*"):
        if path not in doors:
            assert not re.search(r'"[^"\n]*(\.shared|ldmatrix|stmatrix|cp\.async\.(bulk|c[ag]))', path.read_text()), (
                path
            )


@pytest.mark.slow(88)
def test_no_conflicts_but_the_justified(kernels: list[dict[str, Any]]) -> None:
    """Nor races: with one the program stops, and there are no counts."""
    by_family = collections.Counter(kernel_of(counts).family for counts in kernels)
    assert min(by_family[family] for family in FAMILIES) >= 40
    for counts in kernels:
        kernel = kernel_of(counts)
        columns = kernel.limbs * -(-kernel.head_dim // 16) * 16
        assert len(counts["patterns"]) >= (4 if kernel.kernel_pass == "backward_bias" else 6)
        for p in counts["patterns"]:
            allowed = Fraction(1)
            if (p["instruction"], function(p)) in JUSTIFIED:
                allowed = PADDED.get(columns, allowed)
                assert p["a_step"] == [0, 0, 0]
            for _, wavefronts, least in (p["all"], p["a_step"]):
                assert wavefronts == allowed * least, (counts["kernel"], p)


def rows(kernels: list[dict[str, Any]], family: str) -> Iterator[str]:
    """A line of the page for every kind of access in the main loop, by pass."""
    head_dims = (64, 128, 256)
    for kernel_pass in ("forward", "backward", "backward_dq", "backward_bias"):
        chosen = {}
        for counts in kernels:
            kernel = kernel_of(counts)
            if kernel[:2] == (family, kernel_pass) and kernel.limbs == 1 and kernel.arch != 86:
                chosen[kernel.head_dim] = counts
        tiles = [f"{c['block_q']}x{c['block_kv']}, {c['warps']} warps" for c in (chosen[h] for h in head_dims)]
        yield f"| **{kernel_pass}** | | {' | '.join(tiles)} |"
        total: dict[int, int] = collections.Counter()
        lines: dict[tuple[str, str], dict[int, int]] = {}
        parts: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        for head_dim in head_dims:
            for p in chosen[head_dim]["patterns"]:
                instructions, wavefronts, _ = p["a_step"]
                if instructions:
                    key = p["instruction"], function(p)
                    lines.setdefault(key, collections.Counter())[head_dim] += wavefronts
                    parts[key].add(p["of"])
                    total[head_dim] += wavefronts
        for key, wavefronts in sorted(lines.items()):
            where = f", `{key[1]}`" if key[1] else ""
            cells = " | ".join(str(wavefronts[h]) for h in head_dims)
            yield f"| {key[0]}{where} | {' '.join(sorted(parts[key]))} | {cells} |"
        yield f"| all | | {' | '.join(str(total[h]) for h in head_dims)} |"
        yield f"| shuffles (instructions) | | {' | '.join(str(chosen[h]['shuffles']) for h in head_dims)} |"


def page(kernels: list[dict[str, Any]]) -> str:
    lines = [
        "# Bank conflicts",
        "",
        "Shared memory has 32 banks of 4 bytes. A *wavefront* gives or takes one word of each, and takes a cycle; a",
        "warp's instruction costs as many as it needs. Without conflicts that is 1 for accesses of 4 bytes a lane, 2",
        "for 8, and 4 for 16 and for ldmatrix, which serve half a warp, a quarter, and a matrix at a time.",
        "",
        "`tests/test_bank_conflicts.py` compiles kernels for the host: every family, pass and tile row, head dims 16",
        "to 256, float16 and float32 of two limbs. It runs them for every thread of a block, writes down each address,",
        "and counts. It also writes this page, and fails when its tables are out of date.",
        "",
        "The same run finds races: no two warps access a word between two barriers when one of them writes it.",
        "",
        "## What conflicts",
        "",
        "Nothing in any main loop. After it, where results pass through shared memory, on sm75 and sm80, rows that are",
        "not whole lines of 128 bytes are read, once a block, by so many wavefronts for one without conflicts:",
        "",
        f"| head dim | {' | '.join(map(str, PADDED))} | others |",
        f"|---|{'---|' * len(PADDED)}---|",
        f"| factor | {' | '.join(map(str, PADDED.values()))} | 1 |",
        "",
        "## Wavefronts of the main loops",
        "",
        "Of all warps of a block, in one step of the main loop, by head dim; float16 without options.",
    ]
    for family, whose in FAMILIES.items():
        lines += [
            "",
            f"### {family}, {whose}",
            "",
            "| access, function | to | 64 | 128 | 256 |",
            "|---|---|---|---|---|",
            *rows(kernels, family),
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_the_tables_are_true(kernels: list[dict[str, Any]]) -> None:
    stored, counted = (
        [line for line in text.splitlines() if line.startswith("|")] for text in (PAGE.read_text(), page(kernels))
    )
    assert stored == counted, f"python {pathlib.Path(__file__).relative_to(ROOT)} writes the page anew"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(page(count_kernels(pathlib.Path(made))))
