"""``bench tune``: which tile row is the fastest on this machine's GPU.

Every row that the kernels of a family can be built with is compiled; those that spill or need too much shared memory
are dropped. The others are compared with the reference before they are timed.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_flash._implementations.choice import in_passes
from jax_flash._native import _core, tuned
from jax_flash._native.tuned import TunedRow, row_name, tile_row
from jax_flash._tools import accuracy, doctor
from jax_flash._tools.bench import peers, race
from jax_flash._tools.bench.race import Cell
from jax_flash._tools.table import table

Row = dict[str, int]

LENGTH, TOKENS, WIDTH = 4096, 16384, 2048
"""The timed cells: full and causal, as for the figures of the table."""
KEPT = 4
"""How many rows of the first heat run the second, longer one."""
GAIN = 1.01
"""A row must be so much faster than the table's to be worth another kernel."""


def candidates(family: str, pass_: str, head_dim: int) -> Iterator[Row]:
    """The candidate rows of a family's kernels; not all of them compile."""
    if family == "sm90a":
        yield from itertools.starmap(tile_row, _of_hopper(pass_, head_dim))
        return
    rows = (16, 32, 64, 128)
    if pass_ == "backward":  # a warp, or several that share them, has 16 or 32 keys
        shares: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {})]
        if family == "sm80":
            shares += [(split, {"key_tiles": 2}) for split in (1, 2, 4)]
        for keys, block_q, stages, min_blocks in itertools.product((32, 64, 128), rows, (1, 2), (1, 2)):
            for split, others in shares:
                warps = keys // (16 * others.get("key_tiles", 1)) * split
                yield tile_row(block_q, keys, warps, stages, min_blocks, **others)
        return
    # Two buffers of K are for sm80's dQ.
    stages_of = (1, 2) if (family, pass_) == ("sm80", "backward_dq") else (1,)
    for warps, tiles, keys, min_blocks in itertools.product((4, 8), (1, 2), (*rows, 48, 80, 96), (1, 2)):
        for stages in stages_of:
            yield tile_row(16 * warps * tiles, keys, warps, stages, min_blocks)


def _of_hopper(pass_: str, head_dim: int) -> Iterator[tuple[int, int, int, int]]:
    """block_q, block_kv, warps, stages: a producer, and 64 rows or keys for each computing warpgroup."""
    stages = (2, 3)
    if pass_ == "forward":
        for groups, keys, count in itertools.product((2, 3), range(32, 257, 16), stages):
            # Accumulators of out and scores, and weights: a thread has 240 registers, or 160 of three warpgroups.
            if head_dim // 2 + keys // 2 + keys // 4 <= (230 if groups == 2 else 150):
                yield 64 * groups, keys, 4 * (groups + 1), count
    elif pass_ == "backward":
        for groups, times, count in itertools.product((1, 2, 3), (1, 2), (1, *stages)):
            rows, keys = (64 * times, 64 * groups) if head_dim <= 128 else (64, 64 * times)
            yield rows, keys, 4 * (groups + 1), count
    else:
        for groups, keys, count in itertools.product((1, 2, 3), range(32, 161, 32), stages):
            yield 64 * groups, keys, 4 * (groups + 1), count


@dataclasses.dataclass
class Candidate:
    """A row and its results so far."""

    row: Row
    fault: str = ""
    """Why it was dropped."""
    registers: int = 0
    shared_bytes: int = 0
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    """TFLOP/s, full and causal."""

    @property
    def rate(self) -> float:
        """The rate of both together; 0 if it was dropped."""
        return len(self.rates) / sum(1 / x for x in self.rates.values()) if self.rates else 0.0


def compiled(arch: int, pass_: str, head_dim: int, rows: Sequence[Row], most_shared_bytes: int) -> list[Candidate]:
    """Compiles each row for its registers, spills and shared memory. No GPU is needed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        look = functools.partial(_compiled, arch, pass_, head_dim, most_shared_bytes, folder)
        return list(pool.map(look, rows))


def _compiled(arch: int, pass_: str, head_dim: int, most_shared_bytes: int, folder: str, row: Row) -> Candidate:
    candidate = Candidate(row)
    for causal in (False, True):
        options = {"causal": causal, "separate_dq": pass_ == "backward_dq"}
        try:
            kernel = _core.build_row(
                arch=arch,
                pass_=pass_,
                dtype="bfloat16" if arch >= 80 else "float16",
                head_dim=head_dim,
                options=options,
                row=row,
                out_dir=folder,
            )
        except (RuntimeError, ValueError):  # a static_assert of the kernel, or too few registers for so many threads
            candidate.fault = "does not compile"
            return candidate
        candidate.registers = max(candidate.registers, kernel["registers"])
        candidate.shared_bytes = max(candidate.shared_bytes, kernel["shared_bytes"])
        candidate.fault = fault_of(kernel, most_shared_bytes)
        if candidate.fault:
            return candidate
    return candidate


def fault_of(kernel: Mapping[str, Any], most_shared_bytes: int) -> str:
    """Why a kernel is not worth running; empty if it is."""
    if kernel["shared_bytes"] > most_shared_bytes:
        return f"{kernel['shared_bytes'] / 1024:.0f} KB of shared memory"
    if kernel["spill_bytes"] or kernel["local_bytes"]:
        return f"spills {kernel['spill_bytes']} bytes" if kernel["spill_bytes"] else "local memory"
    return "the assembler complains" if kernel["compiler_warnings"] else ""


def tune(
    gpu: jax.Device,
    device: Mapping[str, Any],
    head_dims: Iterable[int],
    passes: Iterable[str],
    rounds: int,
    store: bool,
) -> bool:
    """Searches, prints and optionally stores. Returns whether the rows of the table are right themselves."""
    found: list[TunedRow] = []
    right = True
    for head_dim, pass_ in itertools.product(head_dims, passes):
        best = _search(gpu, device, pass_, head_dim, rounds)
        right = right and best is not None
        if best is not None and best.row:
            found.append(best)
    tuned.use_stored()
    if store and found:
        file = tuned.store(found)
        tuned.use_stored()
        print(f"stored {len(found)} rows in {file}: calls take them from now on")
    elif store:
        print("nothing to store: the table's rows are the fastest here")
    return right


def _search(gpu: jax.Device, device: Mapping[str, Any], pass_: str, head_dim: int, rounds: int) -> TunedRow | None:
    """The fastest row, an empty one if that is the table's; None if the table's row does not work."""
    arch, name = device["compute_capability"], device["name"]
    tuned.tell([])
    choice = _core.tile_row(arch=arch, pass_=pass_, head_dim=head_dim)
    family, own = choice["family"], choice["row"]
    rows = [own, *(row for row in candidates(family, pass_, head_dim) if row != own)]
    known = compiled(arch, pass_, head_dim, rows, choice["most_shared_bytes"])
    known[0].fault = ""  # the table's row is timed even if it spills
    place = functools.partial(TunedRow, name, family, pass_, head_dim)
    for candidate in known:
        if not candidate.fault:
            candidate.fault = wrong(place(candidate.row), gpu)
    racing = [x for x in known if not x.fault]
    with in_passes():
        _time(racing, place, pass_, head_dim, 2)
        racing = [x for x in sorted(racing, key=lambda x: x.rate, reverse=True)[:KEPT] if not x.fault]
        racing += [known[0]] if known[0] not in racing and not known[0].fault else []
        _time(racing, place, pass_, head_dim, rounds)
    _print(family, pass_, head_dim, known)
    if known[0].fault:
        return None
    best = max(racing, key=lambda x: x.rate)
    return place(best.row if best.rate > GAIN * known[0].rate else {})


def wrong(row: TunedRow, gpu: jax.Device) -> str:
    """Why the kernel must not be used: its errors in a small problem, full and causal, against the reference."""
    tuned.tell([row])
    for causal in (False, True):
        problem = accuracy.Problem(
            "float16",
            q_length=333,
            kv_length=389,
            q_heads=4,
            kv_heads=2,
            head_dim=row.head_dim,
            batch=5,  # with fewer, split-KV would serve the call
            causal=causal,
            q_offset=None if causal else 0,
            deterministic_backward=row.pass_ == "backward_dq",
        )
        arrays, plain, exact = _oracle(problem)
        try:
            with in_passes():
                results = _program(problem)({name: jax.device_put(x, gpu) for name, x in arrays.items()})
            worst = accuracy.worst(accuracy.compare(results, plain, exact))
        except Exception as error:  # e.g. a kernel that can't be launched
            return doctor.first_line(error)[:60]
        if not worst.right:
            return f"wrong {worst.name}"
    return ""


@functools.cache
def _program(problem: accuracy.Problem) -> Any:
    """One program for all rows: kernels are looked up when they are launched."""
    return jax.jit(accuracy.program(problem, None), compiler_options=peers.WITHOUT_GRAPHS)


@functools.cache
def _oracle(problem: accuracy.Problem) -> tuple[Any, Any, Any]:
    """The arrays, and the results of plain attention and of the reference in float64."""
    judge = next(iter(doctor._devices("cpu")), jax.devices()[0])
    return accuracy.oracle(problem, judge)


def _time(kept: Sequence[Candidate], place: Any, pass_: str, head_dim: int, rounds: int) -> None:
    """TFLOP/s of each row, best of the rounds."""
    deterministic = pass_ == "backward_dq"
    timed_pass = "forward" if pass_ == "forward" else "backward"
    for causal in (False, True):
        cell = Cell("float16", head_dim, LENGTH, causal, TOKENS // LENGTH, max(1, WIDTH // head_dim))
        own = peers.ours(peers.WITHOUT_GRAPHS, **({"deterministic_backward": True} if deterministic else {}))
        made = own(cell, timed_pass, cell.draw())  # one for all rows, as in _program

        def entry(row: TunedRow, made: race.Entry) -> race.Entry:
            def start() -> Any:
                tuned.tell([row])
                return made.start()

            return dataclasses.replace(made, start=start)

        makers = {row_name(x.row): functools.partial(entry, place(x.row), made) for x in kept}
        found = race.race(makers, rounds, seconds=0.01, pause=0.01)
        work = cell.work * (1.0 if timed_pass == "forward" else 2.5)
        for candidate in kept:
            name = row_name(candidate.row)
            if name in found.errors:
                candidate.fault, candidate.rates = doctor.first_line(found.errors[name])[:60], {}
            elif not candidate.fault:
                candidate.rates["causal" if causal else "full"] = work / min(found.seconds[name]) / 1e12


def _print(family: str, pass_: str, head_dim: int, known: Sequence[Candidate]) -> None:
    faults: dict[str, int] = {}
    for candidate in known:
        if candidate.fault:
            kind = candidate.fault.split(" ")[0] if candidate.fault.startswith("spills") else candidate.fault
            kind = "too much shared memory" if kind.endswith("of shared memory") else kind
            faults[kind] = faults.get(kind, 0) + 1
    print(f"\n{family}, {pass_}, head_dim {head_dim}: {len(known)} rows, out: {faults or 'none'}")
    rows = [["", *_core.TILE_FIELDS, "registers", "shared KB", "full", "causal"]]
    for candidate in sorted(known, key=lambda x: x.rate, reverse=True):
        if candidate is not known[0] and not candidate.rates:
            continue
        cells = [str(candidate.row[field]) for field in _core.TILE_FIELDS]
        cells += [str(candidate.registers), f"{candidate.shared_bytes / 1024:.0f}"]
        cells += [f"{candidate.rates.get(kind, math.nan):.1f}" for kind in ("full", "causal")]
        rows.append(["table" if candidate is known[0] else "", *cells])
    print(table(rows, right=range(1, len(rows[0]))), flush=True)
