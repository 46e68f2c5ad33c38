"""``bench compare``: what counts as slower, with made-up timings and with real builds."""

import contextlib
import json
import math
import pathlib
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.__main__ import main
from jax_flash._native import _core
from jax_flash._tools.bench import compare, compare_worker
from jax_flash._tools.bench import grid as _grid
from jax_flash._tools.bench.compare import Measured, Ratio, Task, Verdict
from jax_flash._tools.bench.race import Cell

CELL = Cell("float32", 32, 256, True, 1, 4)
TASKS = [Task(CELL, "forward"), Task(CELL, "backward")]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment that main() sets."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("JAX_FLASH_CUDA_FAMILY", "")


# The decision


def test_figures() -> None:
    assert compare.figures([[5.0, 2.0, 4.0, 3.0, 9.0], [1.0, 8.0]]) == [4.0, 2.0, 1.0, 8.0]


def test_against() -> None:
    assert compare.against([2.0, 2.5, 2.0, 2.2], [4.2, 4.2, 1.0, 9.0]) == Ratio(ratio=2.0, spread=1.25)


@pytest.mark.parametrize(
    ("sets", "suspect", "slower", "beyond"),
    [
        ([(1.05, 1.01)], True, False, False),
        ([(1.05, 1.01), (1.05, 1.06)], True, False, False),
        ([(1.05, 1.06), (1.05, 1.01)], False, False, False),
        ([(1.05, 1.01), (1.03, 1.01)], True, True, True),
        ([(1.05, 1.01), (1.015, 1.01)], True, True, False),
        ([(0.9, 1.01)], False, False, False),
        ([], False, False, False),
    ],
)
def test_slower_is_outside_twice(sets: list[tuple[float, float]], suspect: bool, slower: bool, beyond: bool) -> None:
    verdict = Verdict([Ratio(*x) for x in sets])
    assert (verdict.suspect, verdict.slower, verdict.beyond(0.02)) == (suspect, slower, beyond)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., compare.Result]:
    """Runs the comparison on timings from a function of the set, the build, the cell's number, and a random generator.

    It returns the seconds by process and round.
    """

    @contextlib.contextmanager
    def started(builds: Any, *_: Any) -> Iterator[list[Any]]:
        class Fake:
            def hello(self) -> dict[str, str]:
                return {"platform": "gpu", "device": "NVIDIA X", "jax": "0"}

        yield [Fake()] * 2

    def run(timings: Callable[..., np.ndarray], tasks: Sequence[Task] = TASKS, seed: int = 0) -> compare.Result:
        draw, asked = np.random.default_rng(seed), []

        def measure(_: Any, some: Sequence[Task], *__: Any) -> dict[Task, Measured]:
            asked.append(list(some))
            return {
                task: Measured({x: timings(len(asked), x, tasks.index(task), draw).tolist() for x in compare.BUILDS})
                for task in some
            }

        monkeypatch.setattr(compare, "_started", started)
        monkeypatch.setattr(compare, "measure", measure)
        monkeypatch.setattr(compare.Build, "unpacked", lambda *_: None)
        wheels = [pathlib.Path("A.whl"), pathlib.Path("B.whl")]
        result = compare.compare(wheels, lambda _: tasks, environment={}, processes=3, seconds=1, say=lambda _: None)
        assert asked[0] == list(tasks)
        assert [len(result.measured[task]) for task in tasks] == [sum(task in x for x in asked) for task in tasks]
        return result

    return run


def noisy(draw: np.random.Generator, factor: float, process: float = 0.003, a_round: float = 0.01) -> np.ndarray:
    """Three processes, each with a random speed, and ten rounds that other load makes longer."""
    luck = 1 + process * np.abs(draw.standard_normal((3, 1)))
    return 1e-3 * factor * (luck + draw.exponential(a_round, (3, 10)))


def test_equal_builds_are_not_slower(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of twenty times 36 cells none fails, though some lie outside once."""
    tasks = [Task(cell, pass_) for pass_ in _grid.PASSES for cell in _grid.cells()]
    once = 0
    for seed in range(20):
        result = made_up(lambda _, __, ___, draw: noisy(draw, 1), tasks, seed)
        assert compare.show(result, 0.02, 0.005)
        assert capsys.readouterr().out.endswith("\nB is not slower\n")
        once += sum(x.suspect for x in result.verdicts.values())
    assert 0 < once < 40


def test_a_slower_cell_is_found(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def timings(_: int, build: str, number: int, draw: np.random.Generator) -> np.ndarray:
        return noisy(draw, 1.05 if (build, number) == ("B", 1) else 1)

    result = made_up(timings)
    assert not compare.show(result, 0.02, math.inf)
    text = capsys.readouterr().out
    assert text.endswith(f"B is slower by more than 2.0%: backward, {TASKS[1]}\n")
    row = next(line for line in text.splitlines() if line.startswith("backward"))
    *_, a, b, ratio, spread, again, spread_again, verdict = row.split()
    assert verdict == "slower"
    assert 0.99 < float(a) / 1000 < 1.02 < float(b) / 1000 < 1.07
    assert min(float(ratio), float(again)) > 1.04 > 1.02 > max(float(spread), float(spread_again))
    assert compare.show(result, 0.06, math.inf)  # a higher limit lets it pass
    # The other way round B is the faster one.
    assert compare.show(made_up(lambda n, x, i, draw: timings(n, "AB"[x == "A"], i, draw)), 0.02, 0.005)


def test_slower_once_is_not_slower(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def timings(which: int, build: str, number: int, draw: np.random.Generator) -> np.ndarray:
        return noisy(draw, 1.05 if (which, build, number) == (1, "B", 0) else 1)

    result = made_up(timings)
    assert result.verdicts[TASKS[0]].text == "once"
    assert compare.show(result, 0.02, 0.005)


def test_what_a_loud_machine_hides(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """If A differs from itself by more than the limit there is no verdict, and the output says so."""
    result = made_up(lambda _, x, __, draw: noisy(draw, 1.05 if x == "B" else 1, process=0.2))
    assert compare.show(result, 0.02, 0.005)
    assert "A differs from itself by more than 2.0% in 2 of 2 cells: too much to tell" in capsys.readouterr().out


def test_the_geometric_mean(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One percent in every cell, which is less than the spread of each."""
    tasks = [Task(cell, pass_) for pass_ in _grid.PASSES for cell in _grid.cells()]
    result = made_up(lambda _, x, __, draw: noisy(draw, 1.01 if x == "B" else 1, process=0.01), tasks)
    assert result.mean.slower
    assert all(len(sets) == 2 for sets in result.measured.values())  # all once more
    assert not compare.show(result, 0.02, 0.005)
    assert capsys.readouterr().out.endswith("B is slower by more than 0.5% in the geometric mean\n")
    assert compare.show(result, 0.02, 0.02)


# The rounds


class FakeWorker:
    """Answers with seconds of a chain of calls, and records the requests."""

    def __init__(self, name: str, seconds: float, asked: list[tuple[str, int]]) -> None:
        self.build = compare.Build(name, pathlib.Path(), pathlib.Path())
        self._seconds, self._asked = seconds, asked

    def ask(self, question: dict[str, int]) -> dict[str, Any]:
        self._asked.append((self.build.name, question["time"]))
        return {"seconds": self._seconds} if self._seconds > 0 else {"error": "out of memory"}


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of single calls, then as many calls as 30 ms of the fastest have; each round begins with another."""
    monkeypatch.setattr(compare, "_PAUSE", 0)
    asked: list[tuple[str, int]] = []
    workers: Any = [FakeWorker("A", 0.012, asked), FakeWorker("B", 0.06, asked), FakeWorker("A", 0.012, asked)]
    found = compare._rounds(workers, Task(CELL, "forward", chained=True), end=-math.inf)
    assert asked[:3] == [("A", 1), ("B", 1), ("A", 1)]
    assert asked[3:] == [(name, 3) for name in "ABABAAAABABA"]
    calls = 64
    assert found == Measured({"A": [[0.012 / calls] * 4] * 2, "B": [[0.06 / calls] * 4]})

    del asked[:]
    compare._rounds(workers, TASKS[0], end=math.inf)
    assert len(asked) == 3 * (1 + compare.MOST_ROUNDS)

    workers[1] = FakeWorker("B", 0.0, asked)
    assert compare._rounds(workers, TASKS[0], end=math.inf) == Measured(errors={"B": "out of memory"})


# The tasks


def test_tasks() -> None:
    grid, small, float32, cpu = (_grid.compared_tasks(name) for name in ("grid", "small", "float32", "cpu"))
    assert len(set(grid)) == 36
    assert {task.cell for task in small if not task.cell.q_length} == set(_grid.small.SMALL)
    assert all(task.chained for task in small)
    assert any(task.cell.q_length == 1 and task.cell.length == 32768 for task in small)
    assert {(task.cell.dtype, task.cell.causal, task.pass_) for task in cpu if not task.chained} == {
        (dtype, causal, pass_)
        for dtype in ("float32", "bfloat16")
        for causal in (False, True)
        for pass_ in ("forward", "backward")
    }
    assert {task.cell.dtype for task in float32} == {"float32"}
    assert {task.chained for task in float32} == {False, True}
    for tasks in (grid, small, float32, cpu):
        assert len({(task.pass_, str(task)) for task in tasks}) == len(tasks)


# The process that measures


def test_worker() -> None:
    """A chain counts as its calls; errors are answers, and the next task is served."""
    shapes = []

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
        shapes.append((query.shape, key.shape, causal))
        if not causal:
            raise NotImplementedError("full attention\nis not served")
        return query * jnp.sum(key * value)

    worker = compare_worker.Worker(attention)
    chained = {"cell": {**vars(CELL), "q_length": 8, "kv_heads": 2}, "pass_": "forward", "chained": True}
    assert worker.answer({"take": chained}) == {}
    assert shapes == [((1, 8, 4, 32), (1, 256, 2, 32), True)] * 64
    assert worker.answer({"time": 3})["seconds"] > 0
    full = {"cell": {**vars(CELL), "causal": False}, "pass_": "backward", "chained": False}
    assert worker.answer({"take": full}) == {"error": "NotImplementedError: full attention"}
    assert worker.answer({"take": {**full, "cell": vars(CELL)}}) == {}
    assert worker.answer({"time": 1})["seconds"] > 0
    del shapes[:]
    assert worker.answer({"take": chained}) == {}
    assert not shapes  # its program is still there


def wheel(file: pathlib.Path, more: str = "") -> str:
    """The package as it is installed here, with more at the end of its ``__init__.py``."""
    package = pathlib.Path(jax_flash.__file__).parent
    with zipfile.ZipFile(file, "w") as archive:
        for path in package.rglob("*.py"):
            text = path.read_text()
            changed = text + more if path == package / "__init__.py" else text
            archive.writestr(f"jax_flash/{path.relative_to(package)}", changed)
        archive.write(_core.__file__, f"jax_flash/_native/{pathlib.Path(_core.__file__).name}")
    return str(file)


SLOWER = """
_attention = attention
def attention(query, key, value, **options):
    for _ in range(8):
        query = query + 0 * _attention(query, key, value, **options)
    return _attention(query, key, value, **options)
"""

BROKEN = """
_attention = attention
def attention(query, key, value, *, causal):
    raise NotImplementedError("nothing is served")
"""


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Compares the package with one that has more in it; limits are what no other work on the machine exceeds."""
    monkeypatch.setattr(_grid, "compared_tasks", lambda _: TASKS)

    def run(more: str, *options: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "out.json"
        wheels = [wheel(tmp_path / "a.whl"), wheel(tmp_path / "b.whl", more)]
        limits = ["--limit", "60", "--mean-limit", "60", "--seconds", "1"]
        code = main(["bench", "compare", *wheels, "--cells", "cpu", *limits, "--out", str(out), *options])
        return code, json.loads(out.read_text())

    return run


@pytest.mark.slow
def test_equal_wheels(compared: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compared("", "--processes", "2")
    assert code == 0
    assert capsys.readouterr().out.endswith("B is not slower\n")
    assert found["platform"] == "cpu"
    for cell, task in zip(found["cells"], TASKS, strict=True):
        assert Task(Cell(**cell["cell"]), cell["pass_"], cell["chained"]) == task
        assert not cell["beyond_limit"]
        for build in "AB":
            assert [len(rounds) >= compare.LEAST_ROUNDS for rounds in cell["seconds"][0][build]] == [True] * 2


@pytest.mark.slow(9)
def test_a_slower_wheel(compared: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compared(SLOWER, "--processes", "1")
    assert code == 1
    assert "B is slower by more than 60.0%: forward," in capsys.readouterr().out
    for cell in found["cells"]:
        assert len(cell["sets"]) == 2
        assert cell["beyond_limit"]
    assert found["geometric_mean"]["beyond_limit"]


@pytest.mark.slow
def test_a_wheel_that_fails(compared: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compared(BROKEN, "--processes", "1")
    assert code == 1
    text = capsys.readouterr().out
    assert f"forward, {TASKS[0]}: B: NotImplementedError: nothing is served" in text
    assert "B is failing where A does not, in 2 of 2 cells" in text
    assert [cell["errors"] for cell in found["cells"]] == [[{"B": "NotImplementedError: nothing is served"}]] * 2


# Errors


def test_no_wheels(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.whl"
    text.write_text("no archive")
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/__init__.py", "")
    dies = tmp_path / "dies.whl"
    with zipfile.ZipFile(dies, "w") as archive:
        archive.writestr("jax_flash/__init__.py", "raise ImportError('made for another Python')")
    for file, message in (
        (text, f"A must be a wheel of jax_flash, got {text}, which is no zip archive"),
        (other, f"A must be a wheel of jax_flash, got {other}, which has no jax_flash/__init__.py"),
        (dies, f"a process of A, {dies}, ended: ImportError: made for another Python"),
        (tmp_path / "none.whl", "No such file or directory"),
    ):
        assert main(["bench", "compare", str(file), str(dies), "--processes", "1"]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "must be a number of at least 1, got '0'"),
        (["--limit", "-1"], "must be a number of at least 0, got '-1'"),
        (["--mean-limit", "nan"], "must be a number of at least 0, got 'nan'"),
        (["--cells", "all"], "invalid choice"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "compare", "A.whl", "B.whl", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_an_editable_installation_does_not_come_first(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finder of an editable install, which has another jax_flash, is bypassed; other finders stay."""

    class Finder:
        def __init__(self, name: str) -> None:
            self.name = name

        def find_spec(self, name: str, *_: Any) -> Any:
            return type("Spec", (), {"origin": "/elsewhere/jax_flash/__init__.py"}) if name == self.name else None

    (tmp_path / "jax_flash").mkdir()
    (tmp_path / "jax_flash/__init__.py").write_text("here = True")
    editable, other = Finder("jax_flash"), Finder("something_else")
    monkeypatch.setattr(sys, "meta_path", [editable, other, *sys.meta_path])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "jax_flash"]:
        monkeypatch.delitem(sys.modules, name)
    assert compare_worker.imported(str(tmp_path)).here
    assert editable not in sys.meta_path
    assert other in sys.meta_path
