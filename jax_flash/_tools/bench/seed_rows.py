"""Measures the rows of ``bench seeds``: errors, memory and times of every implementation on one shape.

What an implementation does not serve, and what does not fit or would take too long, is left out with the reason.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._tools import doctor
from jax_flash._tools.bench import exact, race
from jax_flash._tools.bench.race import Attend, Cell, Entry

BOTH = "forward + backward"
NAMES = ("out", "dquery", "dkey", "dvalue")

Compiled = Any
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A contestant: a function of JAX, one of PyTorch's, or one that is not here."""

    what: str
    attend: Attend | None = None
    torch: str = ""
    """Its name in `torch_peers`."""
    missing: str = ""
    """Why it is not here."""


@dataclasses.dataclass
class Conditions:
    """How rows are measured.

    Attributes:
      device: what runs them.
      passes: what is timed: "forward", "backward" (the pullback alone), "forward + backward".
      rounds: rounds of all in turn.
      slowest: seconds that a call may take. What would take longer, by the row before, is left out.
      heads: how many pairs of a batch entry and a head are compared with float64.
      pace: seconds of a call and its work, by implementation and pass, of the last row.
    """

    device: Any
    passes: Sequence[str]
    rounds: int = 5
    slowest: float = 60.0
    heads: int = 4
    pace: dict[tuple[str, str], tuple[float, float]] = dataclasses.field(default_factory=dict)

    def expected(self, name: str, pass_: str, cell: Cell) -> float:
        """Seconds of a call; 0 if the row before says nothing, because calls of few milliseconds do not scale."""
        seconds, work = self.pace.get((name, pass_), (0.0, 1.0))
        return seconds * cell.work / work if seconds > 0.02 else 0.0

    def too_slow(self, name: str, pass_: str, cell: Cell) -> str:
        """Why a pass is left out, or nothing."""
        expected = self.expected(name, pass_, cell)
        if expected <= self.slowest:
            return ""
        return f"would take about {expected:.0f} s a call, by the row before; the limit is {self.slowest:.0f} s"


def measure(
    cell: Cell, implementations: Mapping[str, Implementation], tolerance: float, conditions: Conditions
) -> dict[str, Result]:
    """What was found of each implementation that is here:

    - seconds: by pass, of a call in each round.
    - memory: bytes of forward and backward in one program, by XLA's analysis: inputs, results and temporaries.
    - errors: of out, dquery, dkey and dvalue against float64: "largest", and "ratio", the largest error as a fraction
      of what is allowed, ``tolerance * (1 + |exact|)``. None stands for NaN and infinity.
    - skipped: the reason, by what is missing: a pass or "errors".
    """
    here = {name: x for name, x in implementations.items() if not x.missing}
    found: dict[str, Result] = {name: {"seconds": {}, "memory": None, "errors": {}, "skipped": {}} for name in here}
    chosen = _chosen(cell, conditions.heads)
    try:
        arrays = cell.draw()
        right = exact.exact_results([_heads(x, chosen) for x in arrays], cell.causal)
    except Exception as error:  # too little memory even for the arrays
        for x in found.values():
            _skip(x, (*conditions.passes, "errors"), doctor.first_line(error))
        return found
    programs: dict[str, Compiled] = {}
    for name, implementation in here.items():
        try:
            if implementation.attend:
                programs[name] = _check(name, implementation.attend, cell, arrays, conditions, found[name])
            results = _results(name, implementation, programs, cell, arrays, conditions, found[name])
            if results is not None:
                picked = (np.asarray(_heads(jnp.asarray(x), chosen), np.float64) for x in results)
                pairs = zip(NAMES, picked, right, strict=True)
                found[name]["errors"] = {key: errors_of(got, wanted, tolerance) for key, got, wanted in pairs}
        except Exception as error:  # another implementation may raise anything for what it does not serve
            _skip(found[name], (*conditions.passes, "errors"), doctor.first_line(error))
    for pass_ in conditions.passes:
        makers = {
            name: functools.partial(_entry, implementation, programs.get(name), cell, pass_, arrays)
            for name, implementation in here.items()
            if pass_ not in found[name]["skipped"]
        }
        raced = race.race(makers, conditions.rounds, pause=0.02 if conditions.device.platform != "cpu" else 0.0)
        for name in makers:
            if name in raced.errors:
                _skip(found[name], [pass_], doctor.first_line(raced.errors[name]))
                continue
            found[name]["seconds"][pass_] = raced.seconds[name]
            conditions.pace[name, pass_] = min(raced.seconds[name]), cell.work
    return found


def _skip(found: Result, what: Sequence[str], reason: str) -> None:
    for each in what:
        found["skipped"].setdefault(each, reason)


def _check(
    name: str, attend: Attend, cell: Cell, arrays: Sequence[jax.Array], conditions: Conditions, found: Result
) -> Compiled:
    """Compiles forward and backward, notes their memory, and which passes are left out. Returns the program, or None if
    it may not run."""
    program = compile_both(attend, cell)
    found["memory"] = peak_of(program)
    gradients = [pass_ for pass_ in (*conditions.passes, "errors") if pass_ != "forward"]
    free = free_bytes(conditions.device)
    if reason := _too_large(found["memory"], free):
        _skip(found, gradients, reason)
        # Forward alone keeps less.
        forward = jax.jit(lambda q, k, v: attend(q, k, v, cell.causal)).lower(*shapes(cell)[:3]).compile()
        if reason := _too_large(peak_of(forward), free):
            _skip(found, ["forward"], reason)
    for pass_ in conditions.passes:
        if reason := conditions.too_slow(name, pass_, cell):
            _skip(found, [pass_], reason)
    times = [conditions.expected(name, pass_, cell) for pass_ in gradients]
    if max(times, default=0.0) > conditions.slowest:
        _skip(found, ["errors"], "its gradients would take too long")
    return None if "errors" in found["skipped"] else program


def _too_large(size: int, free: float) -> str:
    if size <= free:
        return ""
    return f"needs {size / 2**30:.1f} GiB by XLA's analysis, and {free / 2**30:.1f} GiB are free"


def _results(
    name: str,
    implementation: Implementation,
    programs: Mapping[str, Compiled],
    cell: Cell,
    arrays: Sequence[jax.Array],
    conditions: Conditions,
    found: Result,
) -> Sequence[Any] | None:
    if implementation.attend:
        program = programs[name]
        return None if program is None else program(*arrays)
    from jax_flash._tools.bench import torch_peers

    if BOTH in conditions.passes and (reason := conditions.too_slow(name, BOTH, cell)):
        _skip(found, ["errors"], reason)
        return None
    return torch_peers.results(implementation.torch, arrays, cell.causal)


def _entry(
    implementation: Implementation, program: Compiled, cell: Cell, pass_: str, arrays: Sequence[jax.Array]
) -> Entry:
    if implementation.torch:
        from jax_flash._tools.bench import torch_peers

        made: Entry = getattr(torch_peers, implementation.torch)()(cell, pass_, arrays)
        return made
    assert implementation.attend
    if pass_ == BOTH:
        return Entry(lambda: program(*arrays), jax.block_until_ready)
    return race.of_jax(implementation.attend, cell, pass_)(arrays)


def _chosen(cell: Cell, count: int) -> np.ndarray[Any, Any]:
    """Indices of the compared pairs of a batch entry and a head, spread over all."""
    pairs = cell.batch * cell.heads
    return np.unique(np.linspace(0, pairs - 1, min(count, pairs)).astype(int))


def _heads(x: jax.Array, chosen: np.ndarray[Any, Any]) -> jax.Array:
    return exact.one_entry(x)[:, :, chosen]


def errors_of(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], tolerance: float) -> dict[str, float | None]:
    """The largest error, and as a fraction of what is allowed; None for what is not finite, which is wrong."""
    difference = np.abs(got - wanted)
    values = {"largest": difference.max(), "ratio": (difference / (tolerance * (1 + np.abs(wanted)))).max()}
    return {key: float(x) if np.isfinite(x) else None for key, x in values.items()}


def is_right(errors: Mapping[str, Mapping[str, float | None]]) -> bool:
    """Whether every error is within what is allowed."""
    return all(error["ratio"] is not None and error["ratio"] <= 1 for error in errors.values())


# Memory


def shapes(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(cell.draw)]


def compile_both(attend: Attend, cell: Cell, compiler_options: dict[str, Any] | None = None) -> Compiled:
    """Forward and backward in one program."""
    run = jax.jit(functools.partial(exact.both, attend, cell.causal), compiler_options=compiler_options)
    return run.lower(*shapes(cell)).compile()


def peak_of(program: Compiled) -> int:
    """Bytes of inputs, results and temporaries, by XLA's analysis."""
    found = program.memory_analysis()
    return int(found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes)


def free_bytes(device: Any) -> float:
    """How much memory a program may take."""
    stats: Mapping[str, Any] = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return 0.95 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return 0.8 * _host_memory()


def _host_memory() -> float:
    """Bytes that this process can have on a host: what Linux says is available, within the limit of a container."""
    free = float("inf")
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        group = pathlib.Path("/sys/fs/cgroup")
        used, limit = ((group / name).read_text().strip() for name in ("memory.current", "memory.max"))
        free = min(free, float("inf") if limit == "max" else float(limit) - float(used))
    except (OSError, StopIteration, ValueError):  # not Linux, or no such control group
        pass
    return free if free < float("inf") else 8 * 2.0**30


def measured_peaks(
    jobs: Mapping[Any, tuple[Attend, Cell]], device: Any, say: Callable[[str], None]
) -> dict[Any, int | None]:
    """Bytes in use at the peak of forward and backward, by the allocator of a GPU; None where it can't tell.

    Call it before anything large has run. The allocator's peak never falls, so programs run in the order of their
    size, and next to a ballast which makes each one's peak higher than those before. Autotuning, which allocates too,
    is off.
    """
    if not {"bytes_in_use", "peak_bytes_in_use"} <= set(device.memory_stats() or {}):
        return {}
    programs = {}
    for name, (attend, cell) in jobs.items():
        try:
            programs[name] = compile_both(attend, cell, {"xla_gpu_autotune_level": 0}), cell
        except Exception as error:  # the row itself says why
            say(f"{cell}: {doctor.first_line(error)}")
    found: dict[Any, int | None] = {}
    for name, (program, cell) in sorted(programs.items(), key=lambda item: peak_of(item[1][0])):
        try:
            found[name] = None if _too_large(peak_of(program), free_bytes(device)) else _peak(program, cell, device)
        except Exception as error:  # too little memory after all
            found[name] = None
            say(f"{cell}: {doctor.first_line(error)}")
    return found


def _peak(program: Compiled, cell: Cell, device: Any) -> int | None:
    arrays = [jax.device_put(np.zeros(x.shape, x.dtype), device) for x in shapes(cell)]
    jax.block_until_ready(arrays)
    size = sum(x.nbytes for x in arrays)
    stats = device.memory_stats()
    room = stats["peak_bytes_in_use"] - stats["bytes_in_use"] - (peak_of(program) - size) // 2
    ballast = jax.block_until_ready(jnp.zeros(max(1, room // 4), jnp.float32))
    before = device.memory_stats()
    jax.block_until_ready(program(*arrays))
    after = device.memory_stats()
    del ballast
    if after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None
    return int(after["peak_bytes_in_use"] - before["bytes_in_use"] + size)
