"""``bench compare``: is one build slower than another?

Each build has several processes, started anew for every set of rounds; in a round every process times the same cell in
turn, while the others wait. Even processes with the same code differ (memory, clocks, other work), so the spread of A
against itself is the threshold. Each process has two figures, the best of its even and of its odd rounds; the figure of
a build is the median of its processes' figures. B is slower if B / A exceeds the largest ratio of two of A's figures,
and does so in a second set of rounds too.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_flash._tools.bench.race import Cell, chain_length
from jax_flash._tools.table import table

BUILDS = ("A", "B")
FIRST_PART = 0.6
"""The first set of rounds' share of the time. Cells that look slower are measured again in the rest."""
LEAST_ROUNDS, MOST_ROUNDS = 4, 40
_SECONDS, _PAUSE = 0.03, 0.005
"""Of a measurement, and before it."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What is timed: one pass of a cell; a chain of calls for shapes whose single call is dominated by dispatch."""

    cell: Cell
    pass_: str
    chained: bool = False

    @property
    def calls(self) -> int:
        return chain_length(self.cell, self.pass_) if self.chained else 1

    def __str__(self) -> str:
        return f"{self.cell.dtype} {self.cell}" + (", chained" if self.chained else "")


# The decision

Rounds = Sequence[Sequence[float]]
"""Seconds per call of one build: by process, by round."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """B against A in one set of rounds."""

    ratio: float
    """B / A: above 1 if B is slower."""
    spread: float
    """The largest ratio of two figures of A."""

    @property
    def outside(self) -> bool:
        return self.ratio > self.spread


def figures(rounds: Rounds) -> list[float]:
    """Two figures of every process: the best of its even and of its odd rounds."""
    return [min(some) for process in rounds for some in (process[0::2], process[1::2])]


def against(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """B / A and A / A of the figures of both builds."""
    return Ratio(statistics.median(b) / statistics.median(a), max(a) / min(a))


@dataclasses.dataclass
class Verdict:
    """The verdicts of all sets of rounds on a task, or on the geometric mean of all tasks."""

    sets: list[Ratio] = dataclasses.field(default_factory=list)

    @property
    def suspect(self) -> bool:
        return bool(self.sets) and self.sets[0].outside

    @property
    def slower(self) -> bool:
        return len(self.sets) > 1 and all(x.outside for x in self.sets)

    def beyond(self, limit: float) -> bool:
        """Whether B is slower by more than a limit, a fraction, in every set."""
        return self.slower and min(x.ratio for x in self.sets) > 1 + limit

    @property
    def text(self) -> str:
        return "slower" if self.slower else "once" if self.suspect else ""


# Processes


@dataclasses.dataclass(frozen=True)
class Build:
    """An unpacked wheel, with a kernel cache that all its processes share."""

    name: str
    wheel: pathlib.Path
    folder: pathlib.Path

    @classmethod
    def unpacked(cls, name: str, wheel: pathlib.Path, into: pathlib.Path) -> "Build":
        folder = (into / name).resolve()
        try:
            with zipfile.ZipFile(wheel) as archive:
                if "jax_flash/__init__.py" not in archive.namelist():
                    raise ValueError(
                        f"{name} must be a wheel of jax_flash, got {wheel}, which has no jax_flash/__init__.py"
                    )
                archive.extractall(folder / "site")
        except zipfile.BadZipFile as error:
            raise ValueError(f"{name} must be a wheel of jax_flash, got {wheel}, which is no zip archive") from error
        (folder / "cache").mkdir(mode=0o700)
        return cls(name, wheel, folder)


class Worker:
    """A process that has imported one of the builds and measures on request."""

    def __init__(self, build: Build, number: int, environment: Mapping[str, str]) -> None:
        self.build = build
        site = str(build.folder / "site")
        path = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._log = build.folder / f"{number}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                # -P: don't search the folder of the script, which is this package's, for modules.
                [sys.executable, "-P", str(pathlib.Path(__file__).with_name("compare_worker.py")), site],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    **environment,
                    "PYTHONPATH": os.pathsep.join(path),
                    "JAX_FLASH_CACHE_DIR": str(build.folder / "cache"),
                },
            )

    def hello(self) -> dict[str, Any]:
        """Receives what the process imported. Raises RuntimeError if that is not its build."""
        found = self._answer()
        if not str(found["file"]).startswith(str(self.build.folder / "site") + os.sep):
            raise RuntimeError(f"the process of {self.build.name} imported {found['file']} and not {self.build.wheel}")
        return found

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer will show that it has ended
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)  # it writes the reason after the pipe is closed
            said = self._log.read_text().split("\n")
            last = next((x.strip() for x in reversed(said) if x.strip()), "without a word")
            raise RuntimeError(f"a process of {self.build.name}, {self.build.wheel}, ended: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


@contextlib.contextmanager
def _started(builds: Sequence[Build], processes: int, environment: Mapping[str, str]) -> Iterator[list[Worker]]:
    """A, B, A, B, ..."""
    with contextlib.ExitStack() as stack:
        workers = []
        for number in range(processes):
            for build in builds:
                workers.append(Worker(build, number, environment))
                stack.callback(workers[-1].close)
        yield workers


@dataclasses.dataclass
class Measured:
    """The times of one task in one set of rounds, by build; if one of the builds failed, only its error."""

    seconds: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)


def measure(
    workers: Sequence[Worker], tasks: Sequence[Task], until: float, say: Callable[[str], None]
) -> dict[Task, Measured]:
    """Runs one set of rounds, until about the given time."""
    found = {}
    questions = {task: {"take": dataclasses.asdict(task)} for task in tasks}

    def prepare(number: int) -> None:
        # The processes of a build begin with different tasks, so that each compiles some of the kernels and finds the
        # others in the cache.
        first = number // len(BUILDS) * len(BUILDS) * len(tasks) // len(workers)
        for task in [*tasks[first:], *tasks[:first]]:
            workers[number].ask(questions[task])

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(prepare, range(len(workers))))
        for number, task in enumerate(tasks):
            say(f"{number + 1} of {len(tasks)}: {task.pass_}, {task}")
            end = time.perf_counter() + (until - time.perf_counter()) / (len(tasks) - number)
            question = questions[task]
            answers = pool.map(lambda worker, question=question: worker.ask(question), workers)
            errors = {x.build.name: answer["error"] for x, answer in zip(workers, answers, strict=True) if answer}
            found[task] = Measured(errors=errors) if errors else _rounds(workers, task, end)
    return found


def _rounds(workers: Sequence[Worker], task: Task, end: float) -> Measured:
    """All rounds of a task that every worker has prepared."""
    times, rounds = 0, list[list[float]]()
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() < end):
        seconds = [0.0] * len(workers)
        for i in range(len(workers)):
            i = (i + len(rounds)) % len(workers)  # each round begins with another worker
            time.sleep(_PAUSE)
            answer = workers[i].ask({"time": max(1, times)})
            if "error" in answer:
                return Measured(errors={workers[i].build.name: answer["error"]})
            seconds[i] = answer["seconds"] / task.calls
        if times:
            rounds.append(seconds)
        else:  # a round of single calls, which determines how many calls a measurement needs
            times = max(1, min(100, math.ceil(_SECONDS / max(1e-9, task.calls * min(seconds)))))
    by_worker = list(zip(workers, zip(*rounds, strict=True), strict=True))
    return Measured({name: [list(some) for x, some in by_worker if x.build.name == name] for name in BUILDS})


# The comparison


@dataclasses.dataclass
class Result:
    """The results of all sets of rounds."""

    machine: dict[str, Any]
    measured: dict[Task, list[Measured]]
    verdicts: dict[Task, Verdict]
    mean: Verdict


def compare(
    wheels: Sequence[pathlib.Path],
    choose: Callable[[str], Sequence[Task]],
    *,
    environment: Mapping[str, str],
    processes: int,
    seconds: float,
    say: Callable[[str], None],
) -> Result:
    """Measures both builds, and what seems slower again. ``choose`` returns the tasks for a platform of JAX."""
    began = time.perf_counter()

    def progress(text: str) -> None:
        say(f"{time.perf_counter() - began:4.0f} s: {text}")

    with tempfile.TemporaryDirectory() as folder:
        builds = [Build.unpacked(*pair, pathlib.Path(folder)) for pair in zip(BUILDS, wheels, strict=True)]
        progress(f"{processes} processes of each start and compile")
        with _started(builds, processes, environment) as workers:
            machine, *_ = (worker.hello() for worker in workers)
            tasks = choose(machine["platform"])
            first = measure(workers, tasks, began + FIRST_PART * seconds, progress)
        result = Result(machine, {task: [found] for task, found in first.items()}, {}, Verdict())
        _judge(result, first)
        again = tasks if result.mean.suspect else [task for task, verdict in result.verdicts.items() if verdict.suspect]
        if again:
            progress(f"{len(again)} once more, in other processes")
            with _started(builds, processes, environment) as workers:
                for worker in workers:
                    worker.hello()
                second = measure(workers, again, began + seconds, progress)
            for task, found in second.items():
                result.measured[task].append(found)
            _judge(result, second)
    return result


def _judge(result: Result, found: Mapping[Task, Measured]) -> None:
    """Adds the verdicts of one set of rounds."""
    by_task = {task: [figures(x.seconds[name]) for name in BUILDS] for task, x in found.items() if x.seconds}
    for task, (a, b) in by_task.items():
        result.verdicts.setdefault(task, Verdict()).sets.append(against(a, b))
    if by_task.keys() >= result.verdicts.keys() and by_task:  # a set of all
        a, b = (
            [statistics.geometric_mean(some) for some in zip(*(x[i] for x in by_task.values()), strict=True)]
            for i in range(len(BUILDS))
        )
        result.mean.sets.append(against(a, b))


# Output


def show(result: Result, limit: float, mean_limit: float) -> bool:
    """Prints the results. Returns whether B is slower by no more than the limits, and fails only where A does too."""
    print(
        f"{result.machine['device']}, jax {result.machine['jax']}; microseconds of a call in the first set of rounds;"
    )
    print("A / A: the largest ratio of two figures of A; again: what was outside of that, in other processes\n")
    titles = ["pass", "", "A, us", "B, us", "B / A", "A / A", "again B / A", "A / A", ""]
    rows, notes = [titles], []
    for task, sets in result.measured.items():
        row = [task.pass_, str(task)]
        errors = [f"{name}: {text}" for found in sets for name, text in found.errors.items()]
        notes += [f"{task.pass_}, {task}: {error}" for error in errors]
        if task not in result.verdicts:
            rows.append([*row, *[""] * 6, "failed"])
            continue
        verdict = result.verdicts[task]
        row += [f"{1e6 * statistics.median(figures(sets[0].seconds[name])):.1f}" for name in BUILDS]
        rows.append([*row, *_ratios(verdict), verdict.text])
    rows.append(["geometric mean", "", "", "", *_ratios(result.mean), result.mean.text])
    print(table(rows, right=range(2, 8)))
    print("\n".join(f"  {note}" for note in notes), end="\n" if notes else "")

    verdicts = result.verdicts.values()
    noisy = sum(x.sets[0].spread > 1 + limit for x in verdicts)
    if noisy:
        print(f"A differs from itself by more than {limit:.1%} in {noisy} of {len(verdicts)} cells: too much to tell")
    slower = [f"{task.pass_}, {task}" for task, verdict in result.verdicts.items() if verdict.beyond(limit)]
    broken = [task for task, sets in result.measured.items() if any(x.errors.keys() == {"B"} for x in sets)]
    faults = [f"slower by more than {limit:.1%}: {'; '.join(slower)}"] if slower else []
    if result.mean.beyond(mean_limit):
        faults.append(f"slower by more than {mean_limit:.1%} in the geometric mean")
    if broken:
        faults.append(f"failing where A does not, in {len(broken)} of {len(result.measured)} cells")
    if not verdicts:
        faults.append("not compared: no cell runs in both")
    print("\n".join(f"B is {fault}" for fault in faults or ["not slower"]))
    return not faults


def _ratios(verdict: Verdict) -> list[str]:
    cells = [text for x in verdict.sets for text in (f"{x.ratio:.4f}", f"{x.spread:.4f}")]
    return cells + [""] * (4 - len(cells))


def as_json(result: Result, wheels: Sequence[pathlib.Path], limit: float, mean_limit: float) -> dict[str, Any]:
    """All measurements, for JSON."""

    def verdict_of(verdict: Verdict, limit: float) -> dict[str, Any]:
        return {
            "sets": [dataclasses.asdict(x) for x in verdict.sets],
            "slower": verdict.slower,
            "beyond_limit": verdict.beyond(limit),
        }

    return {
        **dict(zip(BUILDS, map(str, wheels), strict=True)),
        **{name: result.machine[name] for name in ("platform", "device", "jax")},
        "limit": limit,
        "mean_limit": mean_limit,
        "geometric_mean": verdict_of(result.mean, mean_limit),
        "cells": [
            {
                **dataclasses.asdict(task),
                **verdict_of(result.verdicts.get(task, Verdict()), limit),
                "seconds": [found.seconds for found in sets],
                "errors": [found.errors for found in sets],
            }
            for task, sets in result.measured.items()
        ],
    }
