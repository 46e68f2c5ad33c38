"""``report``: versions and devices, a self-test and a benchmark, as one block of text to paste into an issue.

A failure becomes a note below its table and the report continues: reports are needed most from machines where something
is broken.
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

import jax_flash
from jax_flash._attention import attention
from jax_flash._call.options import Precision
from jax_flash._implementations import choice
from jax_flash._tools import accuracy, doctor
from jax_flash._tools.bench import race as _race
from jax_flash._tools.bench.race import Cell, Entry, Race, timed
from jax_flash._tools.table import table

_DTYPES: tuple[str, ...] = ("float16", "bfloat16", "float32")
_HEAD_DIMS = (64, 128, 256)

_PASSES = {"forward": 1.0, "forward + backward": 3.5}
"""The timed passes, and their work as a multiple of forward's."""


@dataclasses.dataclass
class Findings:
    """What the text is made of, for `html_report`.

    Attributes:
      device: what was measured.
      machine: rows on versions and devices.
      self_test: the rows of its table, titles first.
      verdict: whether the self-test passed, as a line.
      benchmark: the times of every shape, by pass.
    """

    device: jax.Device
    machine: list[list[str]] = dataclasses.field(default_factory=list)
    self_test: list[list[str]] = dataclasses.field(default_factory=list)
    verdict: str = ""
    benchmark: list[tuple[Cell, dict[str, Race]]] = dataclasses.field(default_factory=list)


def write(quick: bool, html: pathlib.Path | None = None) -> bool:
    """Prints the report, and progress to the standard error. Returns True if the self-test passed, and with ``html``,
    the file of a page that measures more, if the results there are right too."""
    began = time.perf_counter()
    here = doctor.machine()
    platform = "cuda" if "cuda" in here.devices else "cpu"
    device = here.devices[platform][0]
    found = Findings(device)
    print("```text")
    print(f"jax_flash {jax_flash.__version__} report{', quick' if quick else ''}")
    found.machine = _machine(here)

    notes = Notes()
    print(f"\nself-test on {platform}:{device.id}, forward and backward against the reference in float64 on the CPU;")
    print("out, lse, gradients: largest errors; ratio: that of the worst result as a fraction of what is allowed")
    problems = self_tests(platform, quick)
    with jax.default_device(device):
        failed, found.self_test = _self_test(problems, device, platform, notes)
    found.verdict = f"self-test: {'passed' if not failed else 'FAILED'}, {len(problems) - failed} of {len(problems)}"
    print(found.verdict)

    print(
        f"\nbenchmark on {platform}:{device.id}; /xla, /cudnn: times as fast as that of jax.nn.dot_product_attention,"
    )
    print(
        "side by side in this process, medians; work: forward 4·B·N·T·S·H, half of it when causal, backward 2.5 times"
    )
    with jax.default_device(device):
        if platform == "cuda":
            _clocks()
        shapes = benchmarks(platform, quick, _memory(device))
        found.benchmark = _benchmark(shapes, platform, notes, rounds=3 if quick else 5)
    print(f"\ntook {time.perf_counter() - began:.0f} s")
    print("```", flush=True)
    if html is None:
        return not failed
    from jax_flash._tools import html_report

    return html_report.write(html, found, quick, _say) and not failed


class Notes:
    """Numbered errors, each printed once."""

    def __init__(self) -> None:
        self._known: list[str] = []
        self._printed = 0

    def __call__(self, error: Exception) -> str:
        text = doctor.first_line(error)[:300]
        if text not in self._known:
            self._known.append(text)
        return f"[{self._known.index(text) + 1}]"

    def print(self) -> None:
        """Prints the errors that have not been printed yet."""
        for number, text in enumerate(self._known[self._printed :], self._printed + 1):
            print(f"  [{number}] {text}")
        self._printed = len(self._known)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Versions and devices


def _machine(here: doctor.Machine) -> list[list[str]]:
    """Prints and returns rows on versions and devices."""
    problems: list[str] = []
    rows = [*doctor.versions(problems), *doctor.gpu_versions(here)]
    settings = [f"{name}={x}" for name, x in sorted(os.environ.items()) if name.startswith(("JAX_FLASH_", "XLA_FLAGS"))]
    rows += [["environment", " ".join(settings)]] if settings else []
    print(table(rows, indent="  "))
    print("\ndevices")
    lines, _ = doctor.gpus(here)
    print("\n".join(f"  {line}" for line in lines))
    rows += [["device", " ".join(line.split())] for line in lines]
    if "cuda" in here.devices:
        figures = smi()
        print("\nnvidia-smi, at rest")
        print(table(figures, indent="  "))
        rows += [["nvidia-smi, at rest", ", ".join(line)] for line in figures]
    sys.stdout.flush()
    return rows


_SMI = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def smi() -> list[list[str]]:
    """Rows of nvidia-smi's figures for every GPU, titles first; or one row with the reason why there are none."""
    command = ["nvidia-smi", f"--query-gpu=index,{','.join(_SMI)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [["nvidia-smi", f"nothing: {doctor.first_line(error)}"]]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    width = 1 + len(_SMI)
    return [["gpu", *_SMI], *(row[:width] + [""] * (width - len(row)) for row in rows)]


def _clocks() -> None:
    """Prints nvidia-smi's figures while the GPU works: rates mean little without the clock."""
    try:
        entry = _entry("jax_flash", LOAD, "forward", LOAD.draw())
        seconds = max(timed(entry, 1), timed(entry, 5))
        last = None
        for _ in range(min(2000, math.ceil(1.5 / seconds))):  # queued, so that the GPU works while nvidia-smi runs
            last = entry.start()
        rows = smi()
        entry.wait(last)
    except Exception as error:
        rows = [["nvidia-smi", f"nothing: {doctor.first_line(error)}"]]
    print("\nnvidia-smi, under load")
    print(table(rows, indent="  "))


# The self-test


def self_tests(platform: str, quick: bool) -> list[accuracy.Problem]:
    """Lengths that are no multiple of any tile, grouped heads with causal, and every option at once."""
    # On CPUs float32 products always have float32's accuracy.
    kinds: list[tuple[str, Precision | None]] = [("float16", None), ("bfloat16", None), ("float32", "highest")]
    kinds += [("float32", "default")] if platform == "cuda" else []
    make = functools.partial(accuracy.Problem, q_length=333, kv_length=389, q_heads=4)
    full = [make(dtype, kv_heads=4, head_dim=h, precision=p) for (dtype, p), h in itertools.product(kinds, _HEAD_DIMS)]
    causal = [
        make(dtype, kv_heads=2, head_dim=h, precision=p, causal=True, q_offset=None)
        for (dtype, p), h in itertools.product(kinds, _HEAD_DIMS)
    ]
    everything = [
        make(dtype, kv_heads=2, head_dim=64, precision=p, causal=True, q_offset=None, everything=True)
        for dtype, p in kinds
    ]
    if quick:  # every kind, every head_dim and every option once
        some = [causal[len(_HEAD_DIMS) * i + i % len(_HEAD_DIMS)] for i in range(len(kinds))]
        return [*some, full[len(_HEAD_DIMS) - 1], everything[0]]
    return [*causal, *full, *everything]


def _self_test(
    problems: Iterable[accuracy.Problem], device: jax.Device, platform: str, notes: Notes
) -> tuple[int, list[list[str]]]:
    """Prints the table; returns how many problems failed, and the table."""
    judge = next(iter(doctor._devices("cpu")), device)
    rows, failed = [["dtype", "head_dim", "options", "served by", "out", "lse", "gradients", "worst", "ratio", ""]], 0
    for problem in problems:
        row = [_dtype_name(problem), str(problem.head_dim), _options_name(problem)]
        _say(f"self-test: {' '.join(row)}")
        highest = problem.dtype == "float32" and problem.precision == "highest"
        served = choice.choose(None, platform, choice.Call(problem.dtype, problem.head_dim, problem.head_dim, highest))
        try:
            errors = accuracy.measure(problem, device, judge)
            largest = {name: error.largest for name, error in errors.items()}
            out, lse = largest.pop("out"), largest.pop("lse")
            worst = accuracy.worst(errors)
            verdict = "ok" if worst.right else "WRONG"
            row += [served, *(f"{x:.1e}" for x in (out, lse, max(largest.values()))), worst.name, f"{worst.ratio:.2f}"]
        except Exception as error:  # a kernel that does not compile, or too little memory
            verdict = "FAILED"
            row += [served, "", "", "", "", notes(error)]
        row.append(verdict)
        failed += verdict != "ok"
        rows.append(row)
    print(table(rows, indent="  ", right=(1, 4, 5, 6, 8)))
    notes.print()
    return failed, rows


def _dtype_name(problem: accuracy.Problem) -> str:
    return problem.dtype + (f" {problem.precision}" if problem.dtype == "float32" and problem.precision else "")


def _options_name(problem: accuracy.Problem) -> str:
    if problem.everything:
        return "all of them"
    return "causal, 2 heads a key head" if problem.causal else "none"


# The benchmark


LOAD = Cell("float16", 128, 4096, causal=False, batch=1, heads=8)
"""The cell that a GPU computes while its clock is read."""


def benchmarks(platform: str, quick: bool, memory: float) -> list[Cell]:
    """The shapes; XLA's attention keeps all scores, so ``memory``, in bytes, decides batch and heads."""
    dtypes, lengths, tokens, width = _DTYPES, (1024, 4096), 8192, 2048
    if platform == "cpu":
        lengths, tokens, width = (512, 2048), 2048, 256
        dtypes = ("bfloat16", "float32")  # jax.nn.dot_product_attention refuses float16 on CPUs
    cells = []
    for dtype, head_dim, length, causal in itertools.product(
        dtypes, _HEAD_DIMS[:2] if quick else _HEAD_DIMS, lengths[:1] if quick else lengths, (False, True)
    ):
        if not quick and dtype != dtypes[0] and length != lengths[-1]:
            continue  # one length suffices to compare the other dtypes
        batch, heads = max(1, tokens // length), max(1, width // head_dim)
        while 12.0 * batch * heads * length**2 > 0.6 * memory and batch * heads > 1:
            batch, heads = (batch // 2, heads) if batch > 1 else (batch, heads // 2)
        cells.append(Cell(dtype, head_dim, length, causal, batch, heads))
    return cells


def _memory(device: jax.Device) -> float:
    """How much of the device's memory JAX may use, in bytes."""
    stats: Mapping[str, Any] = device.memory_stats() or {}
    return float(stats.get("bytes_limit", 8 * 2**30))


def contestant(name: str, cell: Cell, pass_: str) -> Callable[..., Any]:
    """A compiled function of what `Cell.draw` returns."""

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if name == "jax_flash":
            return attention(query, key, value, causal=cell.causal)
        rival: Any = name
        return jax.nn.dot_product_attention(query, key, value, is_causal=cell.causal, implementation=rival)

    def both(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
        out, pullback = jax.vjp(forward, query, key, value)
        return out, *pullback(dout)

    return jax.jit(both if pass_ == "forward + backward" else lambda *arrays: forward(*arrays[:3]))


def _entry(name: str, cell: Cell, pass_: str, arrays: Iterable[jax.Array]) -> Entry:
    run = contestant(name, cell, pass_)
    return Entry(lambda: run(*arrays), jax.block_until_ready)


def race(cell: Cell, pass_: str, names: Iterable[str], rounds: int) -> Race:
    """Times the contestants in turn, ``rounds`` times."""
    arrays = cell.draw()
    return _race.race({name: functools.partial(_entry, name, cell, pass_, arrays) for name in names}, rounds)


def _benchmark(cells: Iterable[Cell], platform: str, notes: Notes, rounds: int) -> list[tuple[Cell, dict[str, Race]]]:
    """Prints the table; returns the times by pass."""
    rivals = ("xla", "cudnn") if platform == "cuda" else ("xla",)
    # Rates mean something on a GPU, whose clock is in the report; on a CPU with other load only ratios do.
    rates = ("ms", "TFLOP/s") if platform == "cuda" else ()
    titles = [title for pass_ in ("forward", "both") for title in (*rates, *(f"/{name}" for name in rivals))]
    titles[0], titles[len(titles) // 2] = f"forward: {titles[0]}", f"both: {titles[len(titles) // 2]}"
    rows = [["dtype", "head_dim", "S", "", "B", "N", *titles]]
    measured: list[tuple[Cell, dict[str, Race]]] = []
    for cell in cells:
        measured.append((cell, {}))
        kind = "causal" if cell.causal else "full"
        row = [cell.dtype, *map(str, (cell.head_dim, cell.length)), kind, str(cell.batch), str(cell.heads)]
        _say(f"benchmark: {' '.join(row)}")
        for pass_, work in _PASSES.items():
            try:
                found = race(cell, pass_, ("jax_flash", *rivals), rounds)
            except Exception as error:  # too little memory for the arrays
                found = Race(errors={"jax_flash": error})
            measured[-1][1][pass_] = found
            row += _figures(found, rivals, work * cell.work, bool(rates), notes)
        rows.append(row)
    print()
    print(table(rows, indent="  ", right=[i for i in range(len(rows[0])) if i not in (0, 3)]))
    notes.print()
    return measured


def _figures(found: Race, rivals: Iterable[str], work: float, rates: bool, notes: Notes) -> list[str]:
    """Our milliseconds and rate, and the speedup over each peer; references to notes where something failed."""
    failure, ours = found.errors.get("jax_flash"), found.seconds.get("jax_flash", [])
    cells = []
    if rates:
        seconds = statistics.median(ours) if failure is None else math.nan
        rate = work / seconds / 1e12
        cells = (
            [notes(failure), ""] if failure else [f"{1e3 * seconds:.3f}", f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"]
        )
    for name in rivals:
        if failed := failure or found.errors.get(name):
            cells.append(notes(failed))
        else:
            # Ratios within each round, so that a clock that changes between rounds cancels.
            ratios = [theirs / mine for theirs, mine in zip(found.seconds[name], ours, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
    return cells
