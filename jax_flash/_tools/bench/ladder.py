"""``bench ladder``: the gain of each technique of the kernels, from a plain version up to the one that is used.

The kernels have no switches for this. A step that is not taken yet is undone in a copy of the device sources, by
replacing the one place that decides it, and by a tile row; so ordinary builds pay nothing. The result is the same
kernel otherwise, and has to be right.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jax_flash._native import _core, registration, tuned
from jax_flash._tools.bench import peers
from jax_flash._tools.bench import race as _race
from jax_flash._tools.bench.race import Cell
from jax_flash._tools.report import Notes
from jax_flash._tools.table import table

HEAD_DIMS, LENGTH, TOKENS, WIDTH = (64, 128, 256), 4096, 16384, 2048


@dataclasses.dataclass(frozen=True)
class Undo:
    """How a step is undone: in ``file``, below cuda/, the only occurrence of ``was`` becomes ``becomes``."""

    file: str
    was: str
    becomes: str


Rows = Mapping[int, tuple[int, int, int, int]]
"""By head_dim: block_q, block_kv, warps, stages."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One more technique.

    Attributes:
      name: its name in the table.
      undone: the replacements in the sources until the step is taken.
      rows: tile rows from this step on; None: those of the step before, and in the last step the table's.
    """

    name: str
    undone: tuple[Undo, ...] = ()
    rows: Rows | None = None


_SWIZZLE = Step(
    "tiles swizzled",
    (
        Undo("device/tile.cuh", "swizzled = chunks % 8 == 0;", "swizzled = false;"),
        Undo("device/tile.cuh", "16 * (swizzled ? chunks : chunks | 1);", "16 * chunks;"),
    ),
)
_LOADS = Step(
    "tiles prefetched during products",
    (
        Undo(
            "sm80/instructions.cuh",
            '"cp.async.commit_group;" :::',
            '"cp.async.commit_group;\\ncp.async.wait_group 0;" :::',
        ),
    ),
)
# exp(x) has one multiplication more than exp2(x); compilers would remove one by 1.
_BASE_2 = Step(
    "softmax in base 2",
    (Undo("device/arithmetic.cuh", '"=f"(y) : "f"(x));\n  return y;\n}\n\nstatic __device__ __forceinline__ float log2',
          '"=f"(y) : "f"(x * 1.0000001f));\n  return y;\n}\n\nstatic __device__ __forceinline__ float log2'),),
)  # fmt: skip
_FULL = Step(
    "no masking in full tiles",
    (
        Undo("device/mask.cuh", "const int full_begin = ceil_div(at_least(0, first_all), tile);",
             "const int full_begin = at_most(begin, end);"),
        Undo("device/mask.cuh", "const int full_end = at_least(0, at_most(length, last_all + 1)) / tile;",
             "const int full_end = at_most(begin, end);"),
        Undo("device/mask.cuh", "if (!bounded_left && !has_functions) range.full_end = range.end;", ""),
    ),
)  # fmt: skip
_ORDER = Step(
    "causal blocks longest first, by groups of heads",
    (
        Undo(
            "device/schedule.cuh",
            "if ((option_causal || has_mask_blocks || grid == Grid::ordered) && head >= grouped) {",
            "if (false) {",
        ),
    ),
)

LADDERS: dict[tuple[str, str], tuple[Step, ...]] = {
    ("sm80", "forward"): (
        Step("16 rows a warp, weights in registers", rows={
            64: (64, 64, 4, 1), 128: (64, 64, 4, 1), 256: (64, 32, 4, 1)}),
        _SWIZZLE,
        _LOADS,
        _BASE_2,
        _FULL,
        _ORDER,
        Step("out rescaled only when a maximum is outgrown", (
            Undo("device/softmax.cuh", "return (new_maximum - maximum) * scale_log2 > 8.f;", "return true;"),)),
        Step("pipelined step", (
            Undo("sm80/interleaved_steps.cuh", "interleaved = late_weights && limbs == 1;", "interleaved = false;"),)),
        Step("the table's rows", rows={}),
    ),
    ("sm80", "backward"): (
        Step("16 keys a warp, dQ by atomic additions", rows={
            64: (64, 64, 4, 1), 128: (64, 64, 4, 1), 256: (32, 32, 4, 1)}),
        _SWIZZLE,
        _BASE_2,
        _FULL,
        _ORDER,
        Step("two buffers of rows, 128 keys where they fit", rows={
            64: (64, 128, 8, 2), 128: (64, 128, 8, 2), 256: (64, 64, 8, 1)}),
        _LOADS,
        Step("the table's rows", rows={}),
    ),
    ("sm90a", "forward"): (
        Step("wgmma, tiles by TMA, one warpgroup", rows=dict.fromkeys(HEAD_DIMS, (64, 64, 8, 2))),
        Step("two warpgroups", rows={64: (128, 128, 12, 2), 128: (128, 128, 12, 2), 256: (128, 64, 12, 2)}),
        _BASE_2,
        _FULL,
        Step("softmax during the product of the tile before", (
            Undo("sm90a/forward.cu", "wgmma_wait<1>();\n    end_scores", "wgmma_wait<0>();\n    end_scores"),)),
        _ORDER,
        Step("persistent blocks", (
            Undo("sm90a/forward_producer.cuh", ".persistent = 1,", ".persistent = 0,"),
            Undo("sm90a/forward_producer.cuh", "place_of<order>", "place_of<Grid::block_an_item>"))),
        Step("products of the warpgroups in turn", (
            Undo("sm90a/forward_producer.cuh", "in_turns = consumers > 1;", "in_turns = false;"),)),
        Step("out rescaled only when a maximum grows (256)", (
            Undo("sm90a/forward_producer.cuh", "lazy = tile_value_head_dim > 128;", "lazy = false;"),)),
        Step("the table's rows", rows={}),
    ),
    ("sm90a", "backward"): (
        Step("wgmma, tiles by TMA", rows={
            64: (64, 64, 8, 1), 128: (64, 128, 12, 1), 256: (64, 64, 12, 1)}),
        Step("two warpgroups (64)", rows={64: (64, 128, 12, 1), 128: (64, 128, 12, 1), 256: (64, 64, 12, 1)}),
        Step("two buffers of rows", rows={64: (64, 128, 12, 2), 128: (64, 128, 12, 2), 256: (64, 64, 12, 2)}),
        _BASE_2,
        _FULL,
        _ORDER,
        Step("K and V in registers (64)", (
            Undo("sm90a/backward_loads.cuh", "keys_in_registers = adds_dq", "keys_in_registers = false && adds_dq"),)),
        Step("the table's rows", rows={}),
    ),
}  # fmt: skip
"""By family and pass, beginning with the plainest version. The last step is the kernel that serves calls."""


@dataclasses.dataclass(frozen=True)
class Rung:
    """A version of a kernel: all steps up to one."""

    name: str
    undone: tuple[Undo, ...]
    rows: Rows


def rungs(family: str, pass_: str) -> list[Rung]:
    steps = LADDERS[family, pass_]
    found: list[Rung] = []
    rows: Rows = {}
    for i, step in enumerate(steps):
        rows = step.rows if step.rows is not None else rows
        undone = tuple(undo for later in steps[i + 1 :] for undo in later.undone)
        found.append(Rung(("" if i == 0 else "+ ") + step.name, undone, rows))
    return found


def sources_of(rung: Rung, folder: pathlib.Path) -> pathlib.Path:
    """A copy of the device sources without the steps that the rung does not take.

    Raises RuntimeError if a text to replace does not occur exactly once: the kernel has changed, and its ladder has to.
    """
    if not rung.undone:
        return registration.SOURCES
    shutil.copytree(registration.SOURCES, folder)
    for undo in rung.undone:
        file = folder / "cuda" / undo.file
        text = file.read_text(encoding="utf-8")
        if (count := text.count(undo.was)) != 1:
            raise RuntimeError(f"the ladder undoes what {undo.file} has once, but has {count} times: {undo.was!r}")
        file.write_text(text.replace(undo.was, undo.becomes), encoding="utf-8")
    return folder


def row_of(rung: Rung, head_dim: int) -> dict[str, int] | None:
    """The tile row; None for the table's."""
    if head_dim not in rung.rows:
        return None
    return tuned.tile_row(*rung.rows[head_dim])


def compile_rung(
    family: str, arch: int, gpu: str, pass_: str, sources: pathlib.Path, rows: Rows, head_dim: int, causal: bool
) -> None:
    """Compiles the kernels of a rung into the cache, in a process of its own, so that rungs compile in parallel."""
    os.environ["JAX_FLASH_CUDA_FAMILY"] = family
    _select(gpu, family, pass_, head_dim, sources, row_of(Rung("", (), rows), head_dim))
    separate = pass_ == "backward" and _core.separate_dq(arch=arch, largest_head_dim=head_dim)
    for one in ("backward", "backward_dq") if separate else (pass_,):
        try:
            _core.fetch_kernel(
                arch=arch, pass_=one, dtype="bfloat16", head_dim=head_dim, value_head_dim=head_dim,
                options={"causal": causal, "separate_dq": separate}, gpu=gpu,
            )  # fmt: skip
        except (RuntimeError, ValueError):  # reported when the call that needs it is made
            continue


_selected: tuple[Any, ...] = ()


def _select(gpu: str, family: str, pass_: str, head_dim: int, sources: pathlib.Path, row: Any) -> None:
    """Makes subsequent calls take kernels of ``sources`` with this row."""
    global _selected
    wanted = (gpu, family, pass_, head_dim, sources, tuple(row.items()) if row else None)
    if wanted == _selected:
        return
    registration.configure(sources)
    tuned.tell([tuned.TunedRow(gpu, family, pass_, head_dim, row)] if row else [])
    tuned.look_again()
    _selected = wanted


@contextmanager
def _restored() -> Iterator[None]:
    global _selected
    try:
        yield
    finally:
        registration.configure(registration.SOURCES)
        tuned.use_stored()
        tuned.look_again()
        _selected = ()


def climb(device: Mapping[str, Any], passes: Sequence[str], head_dims: Sequence[int], rounds: int) -> bool:
    """Prints a table for each pass. Returns whether every rung is right."""
    right = True
    for pass_ in passes:
        cells = [cell_of(head_dim, LENGTH, causal) for head_dim in head_dims for causal in (False, True)]
        notes = Notes()
        found = measure(device, pass_, cells, rounds)
        right = right and not any(race.errors for race in found.values())
        work = 1.0 if pass_ == "forward" else 2.5
        print(f"\n{device['family']}, {pass_}, S {LENGTH}, TFLOP/s: full / causal")
        rows = [["", *map(str, head_dims)]]
        for rung in rungs(device["family"], pass_):
            rates = [
                notes(race.errors[rung.name])
                if rung.name in race.errors
                else f"{work * cell.work / min(race.seconds[rung.name]) / 1e12:.0f}"
                for cell, race in found.items()
            ]
            rows.append([rung.name, *(" / ".join(pair) for pair in zip(rates[::2], rates[1::2], strict=True))])
        print(table(rows, right=range(1, len(rows[0]))))
        notes.print()
    return right


def cell_of(head_dim: int, length: int, causal: bool) -> Cell:
    return Cell("bfloat16", head_dim, length, causal, TOKENS // length, WIDTH // head_dim)


def measure(device: Mapping[str, Any], pass_: str, cells: Sequence[Cell], rounds: int) -> dict[Cell, _race.Race]:
    """Times every rung in every cell, after a check of its results; a rung that fails is in the errors of a race.

    Raises ValueError if the family of this GPU has no ladder.
    """
    if (device["family"], pass_) not in LADDERS:
        have = ", ".join(sorted({family for family, _ in LADDERS}))
        raise ValueError(f"there is no ladder of {device['family']}'s {pass_}: {have} have")
    with tempfile.TemporaryDirectory() as folder, _restored():
        return _measure(device, pass_, cells, rounds, pathlib.Path(folder))


def _measure(
    device: Mapping[str, Any], pass_: str, cells: Sequence[Cell], rounds: int, folder: pathlib.Path
) -> dict[Cell, _race.Race]:
    family, arch, gpu = device["family"], device["compute_capability"], device["name"]
    steps = [(rung, sources_of(rung, folder / str(i))) for i, rung in enumerate(rungs(family, pass_))]
    kinds = sorted({(cell.head_dim, cell.causal) for cell in cells})
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        compiling = [
            pool.submit(compile_rung, family, arch, gpu, pass_, sources, rung.rows, *kind)
            for (rung, sources), kind in itertools.product(steps, kinds)
        ]
        for done in compiling:
            done.result()
    found = {}
    for cell in cells:
        arrays = cell.draw()
        # One program serves all rungs: kernels are looked up when they are launched.
        select = functools.partial(_select, gpu, family, pass_, cell.head_dim)
        select(registration.SOURCES, None)
        made = peers.ours(peers.WITHOUT_GRAPHS)(cell, pass_, arrays)
        exact = _leaves(made.start())
        makers = {
            rung.name: functools.partial(
                _entry, made, exact, functools.partial(select, sources, row_of(rung, cell.head_dim))
            )
            for rung, sources in steps
        }
        found[cell] = _race.race(makers, rounds, seconds=0.02, pause=0.02)
        best = {name: min(some) for name, some in found[cell].seconds.items() if name not in found[cell].errors}
        print(
            f"ladder: {pass_}, {cell}", {k: f"{1e3 * x:.3f} ms" for k, x in best.items()}, file=sys.stderr, flush=True
        )
    return found


def _entry(made: _race.Entry, exact: Sequence[np.ndarray], select: Callable[[], None]) -> _race.Entry:
    """A contestant for a rung, after a check of its results. Raises RuntimeError if they are wrong."""
    select()
    for got, want in zip(_leaves(made.start()), exact, strict=True):
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if not error < 0.01:
            raise RuntimeError(f"wrong: a relative error of {error:.2g} against the kernel that is used")

    def start() -> Any:
        select()
        return made.start()

    return dataclasses.replace(made, start=start)


def _leaves(results: Any) -> list[np.ndarray]:
    return [np.asarray(x[:1, :, :1], np.float32) for x in jax.tree.leaves(results)]
