"""``report``: its self-test finds errors, its benchmark computes its figures right, and no failure stops it."""

import dataclasses
import html.parser
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cli import faked
from test_cli import remembered as remembered

from jax_flash.__main__ import main
from jax_flash._tools import accuracy, doctor, html_report, plots
from jax_flash._tools import report as _report
from jax_flash._tools.bench import peers, race, seeds


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems and one shape, which say as much as many."""
    problems = [
        accuracy.Problem("float16", 37, 45, 2, 1, 16, causal=True, q_offset=None),
        accuracy.Problem("float32", 37, 45, 2, 1, 16, everything=True),
    ]
    monkeypatch.setattr(_report, "self_tests", lambda *_: problems)
    monkeypatch.setattr(_report, "benchmarks", lambda *_: [_report.Cell("float32", 16, 64, True, 1, 2)])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # restores what main() sets


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["report", "--quick"])
    return code, capsys.readouterr().out


@pytest.fixture
def v100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 whose calls run on the CPU."""
    machine = faked("V100", [12], cudnn="9.10.2.21", prebuilt=32)
    gpu = machine.devices["cuda"][0]
    cpu = jax.local_devices(backend="cpu")[0]

    class Gpu:
        """The first CPU under the GPU's name."""

        def __getattr__(self, name: str) -> Any:
            return getattr(gpu, name, None) or getattr(cpu, name)

    monkeypatch.setattr(doctor, "machine", lambda: machine)
    monkeypatch.setitem(machine.devices, "cuda", [Gpu()])
    monkeypatch.setattr(jax, "default_device", lambda _: jax.enable_x64(False))
    measure = accuracy.measure
    monkeypatch.setattr(accuracy, "measure", lambda problem, device, judge: measure(problem, cpu, judge))
    monkeypatch.setattr(_report, "_clocks", lambda: None)


def test_one_block_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = report(capsys)
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == "```text"
    assert lines[-1] == "```"
    assert f"{jax.__version__}, jaxlib" in text
    assert "self-test: passed, 2 of 2" in lines
    (float16,) = (line.split() for line in lines if line.startswith("  float16"))
    assert float16[:8] == ["float16", "16", "causal,", "2", "heads", "a", "key", "head"]
    assert float16[-1] == "ok"
    for error in float16[9:12]:
        assert 0 <= float(error) < 0.01
    assert "  float32 highest        16  all of them" in text


def test_a_cpu_gets_ratios_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = report(capsys)
    title, row = text[text.index("  dtype", text.index("benchmark on")) :].splitlines()[:2]
    assert title.split() == ["dtype", "head_dim", "S", "B", "N", "forward:", "/xla", "both:", "/xla"]
    assert row.split()[:6] == ["float32", "16", "64", "causal", "1", "2"]
    assert all(float(cell) > 0 for cell in row.split()[6:])


def test_a_gpu_gets_rates_and_cudnn(
    v100: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """cuDNN, which does not serve it, becomes one note."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("JAX_FLASH_CUDA_FAMILY", "sm70")
    code, text = report(capsys)
    assert code == 0
    assert "Tesla V100-SXM2-16GB, compute capability 7.0, kernels of sm70: 32 prebuilt, the others compiled by" in text
    assert "JAX_FLASH_CUDA_FAMILY=sm70" in text
    assert "nvidia-smi  nothing: FileNotFoundError" in text
    title, row, note = text[text.index("  dtype", text.index("benchmark on")) :].splitlines()[:3]
    figures = ["ms", "TFLOP/s", "/xla", "/cudnn"]
    assert title.split()[5:] == ["forward:", *figures, "both:", *figures]
    cells = row.split()[6:]
    assert cells[3] == cells[7] == "[1]"
    assert all(float(cell) >= 0 for cell in cells[:3] + cells[4:7])
    assert note.startswith("  [1] ")
    assert text.count("[1]") == 2 + 1


def test_work_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _report.Cell("float16", 64, 1024, False, 8, 32)
    assert cell.work == 4 * 8 * 32 * 1024 * 1024 * 64
    causal = _report.Cell("float16", 64, 1024, True, 8, 32)
    assert 2 * causal.work == cell.work
    assert [x.shape for x in jax.eval_shape(cell.draw)] == [(8, 1024, 32, 64)] * 4
    found = _report.Race(
        {"jax_flash": [0.002, 0.001, 0.004], "xla": [0.004, 0.004, 0.004]}, {"cudnn": ValueError("no such thing")}
    )
    notes = _report.Notes()
    assert _report._figures(found, ("xla", "cudnn"), 3e12 * 0.002, True, notes) == ["2.000", "3.0", "2.00", "[1]"]
    found.errors["jax_flash"] = RuntimeError("broken\nin two lines")
    assert _report._figures(found, ("xla",), 1.0, True, notes) == ["[2]", "", "[2]"]
    assert _report._figures(found, ("xla",), 1.0, False, notes) == ["[2]"]


def test_both_passes_are_what_they_say() -> None:
    cell = _report.Cell("float32", 16, 64, True, 1, 2)
    arrays = cell.draw()
    found = {}
    for name in ("jax_flash", "xla"):
        out = _report.contestant(name, cell, "forward")(*arrays)
        again, *gradients = _report.contestant(name, cell, "forward + backward")(*arrays)
        np.testing.assert_array_equal(out, again)
        found[name] = out, *gradients
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fault", ["wrong", "nan", "raises"])
def test_the_self_test_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    right = accuracy.results

    def results(problem: Any, arrays: Any, device: Any, implementation: Any) -> Any:
        found = right(problem, arrays, device, implementation)
        if implementation is None and problem.everything:
            if fault == "raises":
                raise RuntimeError("the kernel is on fire\nand more")
            found["dbias"] = found["dbias"].at[0, 0, 0, 0].add(0.05 if fault == "wrong" else jnp.nan)
        return found

    monkeypatch.setattr(accuracy, "results", results)
    code, text = report(capsys)
    assert code == 1
    assert "self-test: FAILED, 1 of 2" in text
    (line,) = (line for line in text.splitlines() if line.startswith("  float32 highest"))
    if fault == "raises":
        assert line.split()[-2:] == ["[1]", "FAILED"]
        assert "  [1] RuntimeError: the kernel is on fire\n" in text
    else:
        assert line.split()[-3] == "dbias"
        assert line.split()[-1] == "WRONG"
    assert "\nbenchmark on" in text  # it goes on
    assert text.endswith("```\n")


def test_a_cell_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours fails at once, the other one in the middle of its rounds."""
    made = _report.contestant

    def contestant(name: str, cell: Any, pass_: str) -> Any:
        if pass_ == "forward" and name == "jax_flash":
            raise MemoryError("not enough")
        run, calls = made(name, cell, pass_), []

        def fails_later(*arrays: Any) -> Any:
            calls.append(1)
            if name == "xla" and len(calls) > 2:
                raise RuntimeError("RESOURCE_EXHAUSTED")
            return run(*arrays)

        return fails_later

    monkeypatch.setattr(_report, "contestant", contestant)
    code, text = report(capsys)
    assert code == 0
    row = text[text.index("  dtype", text.index("benchmark on")) :].splitlines()[1]
    assert row.split()[6:] == ["[1]", "[2]"]
    assert "  [1] MemoryError: not enough\n  [2] RuntimeError: RESOURCE_EXHAUSTED\n" in text


class TestPlans:
    """What is tested and timed on a machine, in full and quickly."""

    @pytest.fixture(autouse=True)
    def small(self) -> None:
        """The real plans."""

    @pytest.mark.parametrize("quick", [False, True])
    @pytest.mark.parametrize("platform", ["cpu", "cuda"])
    def test_self_tests(self, platform: str, quick: bool) -> None:
        problems = _report.self_tests(platform, quick)
        assert len(set(problems)) == len(problems)
        assert {p.dtype for p in problems} == {"float16", "bfloat16", "float32"}
        assert {p.head_dim for p in problems} == {64, 128, 256}
        assert ("default" in {p.precision for p in problems}) == (platform == "cuda")
        assert {p.causal for p in problems} == {True, False}
        assert any(p.everything for p in problems)
        assert any(p.q_heads > p.kv_heads for p in problems)
        assert all(p.q_length % 2 and p.kv_length % 2 for p in problems)
        full, few = {"cpu": (21, 5), "cuda": (28, 6)}[platform]
        assert len(problems) == (few if quick else full)

    @pytest.mark.parametrize("gib", [16, 140])
    @pytest.mark.parametrize("quick", [False, True])
    def test_benchmarks(self, gib: int, quick: bool) -> None:
        memory = 0.75 * gib * 2**30
        cells = _report.benchmarks("cuda", quick, memory)
        assert len(set(cells)) == len(cells) == (12 if quick else 24)
        assert {c.dtype for c in cells} == {"float16", "bfloat16", "float32"}
        assert {c.head_dim for c in cells} == ({64, 128} if quick else {64, 128, 256})
        assert {c.length for c in cells} == ({1024} if quick else {1024, 4096})
        for cell in cells:
            assert 12 * cell.batch * cell.heads * cell.length**2 <= 0.6 * memory
            assert gib < 100 or cell.batch * cell.length == 8192
            assert gib < 100 or cell.heads * cell.head_dim == 2048

    def test_little_memory(self) -> None:
        assert {(c.batch, c.heads) for c in _report.benchmarks("cuda", False, 2**20)} == {(1, 1)}

    def test_benchmarks_of_a_cpu(self) -> None:
        """XLA refuses float16 there."""
        assert {c.dtype for c in _report.benchmarks("cpu", False, 2**33)} == {"bfloat16", "float32"}


def test_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "0, Tesla V100-SXM2-16GB, 535.1, 135 MHz, 1530 MHz, 877 MHz, 40.1 W, 300.00 W, 35\n1, odd\n\n"
    done = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    titles, first, second = _report.smi()
    assert len(titles) == len(first) == len(second) == 9
    assert dict(zip(titles, first, strict=True))["clocks.max.sm"] == "1530 MHz"
    assert second == ["1", "odd", *[""] * 7]

    def slow(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    monkeypatch.setattr(subprocess, "run", slow)
    assert _report.smi() == [["nvidia-smi", "nothing: TimeoutExpired: Command 'nvidia-smi' timed out after 30 seconds"]]


def test_clocks_are_read_while_it_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    events = []

    def smi() -> list[list[str]]:
        events.append("look")
        return [["gpu", "clocks.sm"], ["0", "1530 MHz"]]

    entry = race.Entry(lambda: events.append("start"), lambda _: events.append("wait"))
    monkeypatch.setattr(_report, "_entry", lambda *_: entry)
    monkeypatch.setattr(_report, "smi", smi)
    _report._clocks()
    # Calls that are queued are not waited for before.
    assert events[-3:] == ["start", "look", "wait"]
    assert "1530 MHz" in capsys.readouterr().out


def test_clocks_of_calls_that_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_report, "LOAD", _report.Cell("float32", 16, 64, False, 1, 1))

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(_report, "contestant", fail)
    _report._clocks()
    assert capsys.readouterr().out == "\nnvidia-smi, under load\n  nvidia-smi  nothing: RuntimeError: no memory\n"


def test_accuracy_rule() -> None:
    exact = {"out": np.array([1.0, -2.0]), "lse": np.array([-np.inf, 3.0])}
    plain = {"out": np.array([1.0, -2.001], np.float16), "lse": np.array([-np.inf, 3.0], np.float32)}
    found = accuracy.compare(plain, plain, exact)
    assert found["out"].right
    assert found["lse"].ratio == 0  # -inf is right where it should be
    for wrong in ([0.0, 3.0], [-np.inf, np.nan], [-np.inf, 3.01]):
        errors = accuracy.compare(plain | {"lse": np.array(wrong, np.float32)}, plain, exact)
        assert not errors["lse"].right
        assert accuracy.worst(errors).name == "lse"
    coarse = plain | {"lse": np.array([-np.inf, 3.003], np.float32)}
    assert accuracy.compare(coarse, plain, exact, tf32=True)["lse"].right
    assert not accuracy.compare(coarse, plain, exact)["lse"].right


@pytest.fixture
def small_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets of one small row, and one shape for the accuracy."""
    for name, preset in seeds.PRESETS.items():

        def rows(platform: str, whole: Any = preset.rows) -> list[seeds.Row]:
            row = whole(platform)[0]
            cell = dataclasses.replace(row.cell, batch=1, heads=2, length=64, head_dim=16)
            return [dataclasses.replace(row, cell=cell, quick=True)]

        monkeypatch.setitem(seeds.PRESETS, name, dataclasses.replace(preset, rows=rows))
    cells = (race.Cell("float16", 16, 64, True, 1, 2), race.Cell("float32", 16, 64, True, 1, 2))
    accuracy_of = html_report.accuracy
    monkeypatch.setattr(html_report, "accuracy", lambda platform: accuracy_of(platform, cells))
    monkeypatch.setattr(
        html_report, "measure_roofs", lambda dtypes, _: ({x: (1e11, "a product", 1e10) for x in dtypes}, [])
    )


SECTIONS = ("machine", "self-test", "speed", "memory", "accuracy", "seeds-v100", "seeds-from-scratch", "seeds-t4",
            "seeds-naive")  # fmt: skip


class Page(html.parser.HTMLParser):
    """What a page consists of; fails on an element that is not closed."""

    VOID = ("meta", "path", "use", "rect", "circle", "line", "image", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [value for name, value in attrs if name in ("href", "src", "srcset", "xlink:href")]
        for _, section in self._open:
            self.inside.setdefault(section, []).append(tag)
        if tag not in self.VOID:
            self._open.append((tag, found.get("id", "") if tag == "section" else ""))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop()[0] == tag


def test_a_page(small_page: None, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    """It needs nothing else, and has every section with its figures and tables."""
    file = tmp_path / "new" / "report.html"
    code = main(["report", "--quick", "--html", str(file)])
    text = file.read_text(encoding="utf-8")
    assert code == 0, re.findall(r'class="(?:wrong|verdict)">([^<]*)', text)
    assert "self-test: passed, 2 of 2" in capsys.readouterr().out  # the text is still there
    page = Page(text)
    assert not re.search(r"https?:|@import|<script|<link|<img", text)
    assert set(page.links) <= {f"#{x}" for x in page.ids}
    assert len(set(page.ids)) == len(page.ids)
    assert [x for x in page.ids if x in SECTIONS] == list(SECTIONS)
    for section in SECTIONS:
        assert "table" in page.inside[section], section
        figures = page.inside[section].count("figure")
        assert (figures == 0) == (section in ("machine", "self-test")), section
        assert page.inside[section].count("svg") == page.inside[section].count("figcaption") == figures
    assert "prefers-color-scheme: dark" in text
    for colour in plots.dark():
        assert text.count(colour) == 1 or colour not in text.split("</style>")[1], colour  # elsewhere a variable
    assert f"python -m jax_flash report --html {file} --quick" in text
    assert jax.__version__ in text
    assert "every result is right" in text


def test_a_section_that_fails_says_why(
    small_page: None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no <room> left\nat all")

    monkeypatch.setattr(seeds, "measure", fails)
    file = tmp_path / "report.html"
    assert main(["report", "--quick", "--html", str(file)]) == 1
    text = file.read_text(encoding="utf-8")
    assert text.count("failed: RuntimeError: no &lt;room&gt; left</li>") == len(seeds.PRESETS)
    assert "4 wrong: seeds: v100" in text
    Page(text)


def test_a_wrong_implementation_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = race.Cell("float16", 16, 64, True, 1, 2)
    right = peers.attend
    monkeypatch.setattr(peers, "attend", lambda *args, **options: right(*args, **options) * np.float16(1.02))
    section = html_report.accuracy("cpu", [cell])
    assert any(text.startswith("float16: jax_flash, cpu: a relative error of 0.02") for text in section.wrong)
    assert not any("study" in text for text in section.wrong)
    assert any(note.startswith("fa4: not here, needs a GPU") for note in section.notes)


def test_the_roof() -> None:
    cell = race.Cell("bfloat16", 64, 1024, False, 2, 4)
    assert html_report.intensity(cell, "forward") == 1024 / 2
    assert html_report.intensity(cell, "forward + backward") == 3.5 * 1024 / 4
    roofs, notes = html_report.measure_roofs(["float32"], "cpu")
    assert not notes
    rate, what, bandwidth = roofs["float32"]
    assert 1e9 < rate < 1e14
    assert what.endswith("in float32")
    assert 1e8 < bandwidth < 1e13


def test_a_page_that_cannot_be_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so before it measures."""
    assert main(["report", "--html", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "jax_flash report: " in said.err
    assert not said.out


@pytest.mark.slow
def test_report_as_a_command() -> None:
    """The real report, which must succeed, with the first and the last of its eight shapes."""
    code = """
from jax_flash import __main__
from jax_flash._tools import report as _report
benchmarks = _report.benchmarks
_report.benchmarks = lambda *told: benchmarks(*told)[:: len(benchmarks(*told)) - 1]
raise SystemExit(__main__.main(["report", "--quick"]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nself-test: passed, " in done.stdout
    assert len(re.findall(r"^benchmark: ", done.stderr, re.MULTILINE)) == 2
    assert done.stdout.endswith("```\n")


@pytest.mark.gpu
@pytest.mark.slow
def test_report_on_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever family serves it; one small shape, every column but cuDNN's a figure."""
    monkeypatch.setattr(_report, "benchmarks", lambda *_: [_report.Cell("float16", 64, 1024, True, 1, 8)])
    with jax.numpy_dtype_promotion("standard"):  # XLA's attention in float16 needs it
        code, text = report(capsys)
    assert code == 0, text
    row = text[text.index("  dtype", text.index("benchmark on")) :].splitlines()[1].split()[6:]
    assert all(cell[0].isdigit() and float(cell) > 0 for cell in (*row[:3], *row[4:7])), text
