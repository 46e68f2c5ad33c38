"""``bench seeds``: the measurements that five seed projects published, of our kernels and their peers on this machine.

A preset is a list of rows. What was measured is one record, which is written as JSON and from which tables
(`seed_tables`) and plots (`plots`) are made.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import os
import pathlib
import platform as _platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version

import jax_flash
from jax_flash import study
from jax_flash._native import registration
from jax_flash._tools import doctor
from jax_flash._tools.bench import ladder as _ladder
from jax_flash._tools.bench import peers, seed_figures, seed_rows
from jax_flash._tools.bench import seed_documents as documents
from jax_flash._tools.bench.race import Cell
from jax_flash._tools.bench.seed_rows import BOTH, Conditions, Implementation

Record = dict[str, Any]

STUDIES = {
    "flash1": "FlashAttention-1",
    "flash2": "FlashAttention-2, two passes backward",
    "flash2_atomic": "FlashAttention-2, atomic additions backward",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A shape, and what the document has for it."""

    name: str
    cell: Cell
    published: Mapping[str, Any]
    quick: bool
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is measured of one document.

    Attributes:
      title: what it measures, in one line.
      document: its name.
      rows: the rows for a platform, small ones first.
      names: the implementations, ours first.
      passes: what is timed.
      tolerances: by dtype; an error of at most ``tolerance * (1 + |exact|)`` is right.
      extra: what is measured besides the rows, as further entries of the record, from the device, the number of rounds
        and the lengths of the rows.
    """

    title: str
    document: str
    rows: Callable[[str], list[Row]]
    names: Sequence[str]
    passes: Sequence[str]
    tolerances: Mapping[str, float]
    extra: Callable[[Any, int, Sequence[int]], Record] | None = None


# Rows


def _v100(_: str) -> list[Row]:
    rows = []
    for x in documents.VOLTA:
        cell = Cell("float16", x.head_dim, x.kv_length, x.causal, x.batch, x.heads)
        name = f"({x.batch}, {x.heads}, {x.q_length}, {x.kv_length}, {x.head_dim}, {x.causal})"
        published = {"memory": x.memory, "forward": x.forward, "backward": x.backward, "total": x.total}
        quick = x.q_length in (16, 64, 256) or (x.heads, x.q_length, x.head_dim) == (16, 1024, 64)
        rows.append(Row(name, cell, published, quick, x.group))
    return rows


def _from_scratch(platform: str) -> list[Row]:
    """On a GPU those of ``bench grid`` and ``bench ladder``; the document names neither batch nor heads. On a CPU two
    heads of one batch entry, whose longest row takes seconds."""
    rows = []
    for length in documents.FROM_SCRATCH_LENGTHS:
        cell = _ladder.cell_of(documents.FROM_SCRATCH_HEAD_DIM, length, False)
        if platform == "cpu":
            cell = dataclasses.replace(cell, batch=1, heads=2)
        rows.append(Row(f"S {length}", cell, {}, length <= (2048 if platform == "cpu" else 4096)))
    return rows


T4_BATCH, T4_HEADS = 4, 8


def _t4(_: str) -> list[Row]:
    rows = []
    for number, length in enumerate(documents.T4_LENGTHS):
        cell = Cell("float16", documents.T4_HEAD_DIM, length, False, T4_BATCH, T4_HEADS)
        published = {
            pass_: {name: _finite(some[number]) for name, some in table.items()}
            for pass_, table in documents.T4_MILLISECONDS.items()
        }
        for table in published.values():
            table["plain"] = table["torch-plain"]  # plain attention, in JAX here
        rows.append(Row(f"S {length}", cell, published, length <= 512))
    return rows


def _naive(_: str) -> list[Row]:
    """The document has no shapes. The first ones are those of the small project that it grew from, flash-attention-
    minimal; the second ones have sixteen tiles of keys, so that what is carried from tile to tile counts."""
    rows = []
    for dtype, (batch, heads, length) in itertools.product(documents.NAIVE_FIGURES, ((16, 12, 64), (1, 12, 1024))):
        published = {name: dataclasses.asdict(x) for name, x in documents.NAIVE_FIGURES[dtype].items()}
        cell = Cell(dtype, 64, length, False, batch, heads)
        rows.append(Row(f"{dtype} {cell}", cell, published, length > 64, dtype))
    return rows


def _finite(x: float) -> float | None:
    return x if x < documents.INFINITE else None


def _ladders(device: Any, rounds: int, lengths: Sequence[int]) -> Record:
    """Milliseconds of every rung at every length, by pass."""
    if device.platform == "cpu":
        return {"ladder": {}, "ladder_missing": "the ladder is made of CUDA kernels, and JAX has no CUDA device here"}
    kernels = registration.cuda_status()["devices"]
    found: dict[str, Any] = {}
    cells = [_ladder.cell_of(documents.FROM_SCRATCH_HEAD_DIM, length, False) for length in lengths]
    try:
        for pass_ in ("forward", "backward"):
            raced = _ladder.measure(kernels[0], pass_, cells, rounds)
            found[pass_] = [
                {
                    "name": rung.name,
                    "seconds": {
                        str(cell.length): race.seconds[rung.name]
                        for cell, race in raced.items()
                        if rung.name not in race.errors
                    },
                    "errors": {
                        str(cell.length): doctor.first_line(race.errors[rung.name])
                        for cell, race in raced.items()
                        if rung.name in race.errors
                    },
                }
                for rung in _ladder.rungs(kernels[0]["family"], pass_)
            ]
    except Exception as error:  # a family without a ladder, no NVRTC, a kernel that fails
        return {"ladder": found, "ladder_missing": doctor.first_line(error)}
    return {"ladder": found}


PRESETS: dict[str, Preset] = {
    "v100": Preset(
        "kernels for Volta: correct at 1e-3, memory saved and speed-up against plain attention",
        documents.V100,
        _v100,
        ("ours", "plain", "torch-plain"),
        ("forward", "backward"),
        {"float16": documents.VOLTA_TOLERANCE},
    ),
    "from-scratch": Preset(
        "head_dim 128, full: per cent of FlashAttention-2, and the ladder of techniques",
        documents.FROM_SCRATCH,
        _from_scratch,
        ("ours", "fa2-jax", "torch-flash", "plain"),
        ("forward", "backward"),
        {"bfloat16": 2e-2},
        _ladders,
    ),
    "t4": Preset(
        "FlashAttention-1 and -2 by length: latency, memory, errors",
        documents.T4,
        _t4,
        ("ours", *STUDIES, "plain", "torch-flash", "torch-plain"),
        ("forward", BOTH),
        {"float16": 4e-3},
    ),
    "naive": Preset(
        "FlashAttention-1 and -2 in float32 and float16: errors and times",
        documents.NAIVE,
        _naive,
        ("ours", "flash1", "flash2", "plain"),
        ("forward", "backward"),
        {"float32": 2e-5, "float16": 4e-3},
    ),
}


# Implementations


def implementations(names: Sequence[str], platform: str) -> dict[str, Implementation]:
    """Those of a preset, with the reason for those that are not here."""
    return {name: _implementation(name, platform) for name in names}


def _implementation(name: str, platform: str) -> Implementation:
    if name == "ours":
        return Implementation("jax_flash.attention", peers.attend)
    if name == "plain":
        return Implementation("plain attention in JAX, which keeps all weights", peers.plain)
    if name in STUDIES:
        algorithms, how = (study.LOOPS, "loops in plain JAX") if platform == "cpu" else (study.KERNELS, "CUDA kernels")
        what = f"{STUDIES[name]}: {how} of jax_flash.study"
        return Implementation(what, functools.partial(_study, algorithms[name]))
    what = {
        "fa2-jax": "FlashAttention-2 by flash_attn_jax",
        "torch-flash": "FlashAttention-2 by PyTorch",
        "torch-plain": "plain attention in PyTorch",
    }[name]
    if platform == "cpu":
        return Implementation(what, missing="its kernels need a GPU" if "Flash" in what else "compared on GPUs only")
    try:
        if name == "fa2-jax":
            from flash_attn_jax import flash_mha

            return Implementation(what, lambda q, k, v, causal: flash_mha(q, k, v, is_causal=causal))
        from jax_flash._tools.bench import torch_peers

        torch_name = {"torch-flash": "fa2", "torch-plain": "plain"}[name]
        getattr(torch_peers, torch_name)()
        return Implementation(what, torch=torch_name)
    except Exception as error:  # anything may go wrong in another package's import
        return Implementation(what, missing=doctor.first_line(error))


def _study(algorithm: Any, query: Any, key: Any, value: Any, causal: bool) -> Any:
    return algorithm(query, key, value, causal=causal)


# Measuring


def measure(
    name: str, *, quick: bool, rounds: int = 5, say: Callable[[str, int, int], None] | None = None
) -> tuple[Record, bool]:
    """The record of a preset, and whether every result of ours and of `jax_flash.study` is right.

    ``say`` is told what is being measured, how many rows are done, and of how many.
    """
    began = time.perf_counter()
    preset = PRESETS[name]
    device = next(iter([*doctor._devices("cuda"), *doctor._devices("cpu")]))
    platform = "cpu" if device.platform == "cpu" else "cuda"
    rows = [row for row in preset.rows(platform) if row.quick or not quick]
    contestants = implementations(preset.names, platform)
    record: Record = {
        "preset": name,
        "title": preset.title,
        "document": preset.document,
        "quick": quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(device),
        "rounds": rounds,
        "passes": list(preset.passes),
        "implementations": {key: x.what for key, x in contestants.items()},
        "missing": {key: x.missing for key, x in contestants.items() if x.missing},
        "rows": [],
    }
    say = say or (lambda text, done, of: None)
    conditions = Conditions(device, preset.passes, rounds)
    with jax.default_device(device):
        say("memory", 0, len(rows))
        peaks = _measured_memory(rows, contestants, device) if name == "v100" else {}
        for number, row in enumerate(rows):
            say(row.name, number, len(rows))
            # float32 is float32 in the documents; on GPUs JAX's default is TF32's accuracy.
            with jax.default_matmul_precision("highest" if row.cell.dtype == "float32" else None):
                found = seed_rows.measure(row.cell, contestants, preset.tolerances[row.cell.dtype], conditions)
            for key, x in found.items():
                x["measured_memory"] = peaks.get((key, row.name))
            cell = dataclasses.asdict(row.cell) | {"work": row.cell.work}
            record["rows"].append(
                {
                    "name": row.name,
                    "group": row.group,
                    "cell": cell,
                    "tolerance": preset.tolerances[row.cell.dtype],
                    "published": row.published,
                    "found": found,
                }
            )
        say("the rest", len(rows), len(rows))
        record |= preset.extra(device, rounds, [row.cell.length for row in rows]) if preset.extra else {}
    seed_figures.add(record)
    record["wrong"] = wrong(record)
    record["took"] = round(time.perf_counter() - began, 1)
    return record, not record["wrong"]


def wrong(record: Record) -> list[str]:
    """What of ours is not right: results with too large errors, calls that failed though they fit, rungs that failed.

    Errors of other implementations are shown, and decide nothing.
    """
    found = []
    for row in record["rows"]:
        for name in ("ours", *STUDIES):
            x = row["found"].get(name)
            if x is None:
                continue
            if not seed_rows.is_right(x["errors"]):
                far = {key: error["ratio"] for key, error in x["errors"].items()}
                worst = max(far, key=lambda key: float("inf") if far[key] is None else far[key])
                ratio = "NaN or infinite" if far[worst] is None else f"{far[worst]:.3g} times what is allowed"
                found.append(f"{row['name']}: {name}: the error of {worst} is {ratio}")
            found += [
                f"{row['name']}: {name}: {what} failed: {reason}"
                for what, reason in x["skipped"].items()
                if not reason.startswith(("needs ", "would take ", "its gradients "))
            ]
    for pass_, rungs in record.get("ladder", {}).items():
        found += [f"ladder, {pass_}, {rung['name']}, S {s}: {e}" for rung in rungs for s, e in rung["errors"].items()]
    return found


def _measured_memory(
    rows: Sequence[Row], contestants: Mapping[str, Implementation], device: Any
) -> dict[tuple[str, str], int | None]:
    jobs = {
        (name, row.name): (x.attend, row.cell)
        for row in rows
        for name, x in contestants.items()
        if x.attend and not x.missing
    }
    return seed_rows.measured_peaks(jobs, device, lambda text: print(text, file=sys.stderr, flush=True))


def machine(device: Any) -> dict[str, str]:
    """The device and versions, to be read next to figures."""
    found = {
        "device": device.device_kind if device.platform != "cpu" else cpu_name(),
        "platform": "cpu" if device.platform == "cpu" else "cuda",
        "cores": str(os.cpu_count()),
        "python": _platform.python_version(),
        "jax_flash": jax_flash.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
    }
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].__version__
    if device.platform != "cpu":
        found["kernels of"] = next((x["family"] for x in registration.cuda_status()["devices"]), "none")
    return found


def cpu_name() -> str:
    """As Linux has it, with the instruction set that the kernels take."""
    names = []
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        pass
    rows = doctor.versions([])
    isa = next((text.split(",")[0] for title, text in rows if title == "CPU"), "")
    return f"{names[0] if names else _platform.machine()} ({isa})"


# The action


def add_arguments(actions: Any) -> None:
    parser: argparse.ArgumentParser = actions.add_parser(
        "seeds",
        help="the measurements that seed projects published, on this machine",
        description="Measures what a seed project published, on a GPU or a CPU, and prints it beside the published "
        "figures: " + "; ".join(f"{name}: {preset.title}" for name, preset in PRESETS.items()) + ". Writes "
        "PRESET.json and plots (PNG and SVG) to a folder. The exit code is 1 if a result of this package is wrong.",
    )
    parser.add_argument("preset", choices=list(PRESETS), metavar="PRESET", help=", ".join(PRESETS))
    parser.add_argument("--quick", action="store_true", help="some of the rows: under a minute on two cores")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("seeds"), metavar="DIR", help="the folder (default: seeds)"
    )


def needed(command: str) -> None:
    """Raises RuntimeError if a package of the extra ``bench`` is missing."""
    for package in ("rich", "matplotlib"):
        try:
            __import__(package)
        except ImportError as error:
            raise RuntimeError(f"{command} needs {package} ({error}): pip install 'jax_flash[bench]'") from error


def run(args: argparse.Namespace) -> bool:
    """Measures, prints the tables and writes the files. Returns whether all results are right.

    Raises RuntimeError if a package is missing, ValueError or OSError for a folder that can't be written.
    """
    needed("bench seeds")
    from jax_flash._tools import plots
    from jax_flash._tools.bench import seed_tables

    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out must name a folder, got a file: {args.out}")
    args.out.mkdir(parents=True, exist_ok=True)
    with seed_tables.progress() as say:
        record, right = measure(args.preset, quick=args.quick, rounds=3 if args.quick else 5, say=say)
    flags = " --quick" if args.quick else ""
    record["command"] = f"python -m jax_flash bench seeds {args.preset}{flags} --out {args.out}"
    seed_tables.show(record)
    file = args.out / f"{args.preset}.json"
    file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files = [file, *plots.save(record, args.out)]
    print(f"\nwrote {', '.join(map(str, files))}")
    for text in record["wrong"]:
        print(f"WRONG: {text}", file=sys.stderr)
    return right
