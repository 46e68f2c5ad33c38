"""``bench seeds``: the published rows are complete, what was measured is right, and what is missing says why."""

import argparse
import builtins
import collections
import dataclasses
import json
import pathlib
import statistics
import types
from typing import Any

import jax
import numpy as np
import pytest

from jax_flash.__main__ import main
from jax_flash._tools import doctor, plots
from jax_flash._tools.bench import ladder, peers, seed_figures, seed_rows, seed_tables, seeds
from jax_flash._tools.bench import seed_documents as documents
from jax_flash._tools.bench.race import Cell

CELL = Cell("float16", 16, 64, False, 1, 2)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # restores what main() sets
    monkeypatch.setattr(doctor, "_devices", lambda name: jax.local_devices(backend="cpu")[:1] if name == "cpu" else [])


def small(monkeypatch: pytest.MonkeyPatch, preset: str, count: int = 2) -> None:
    """The first rows of a preset, so small that all take seconds."""
    whole = seeds.PRESETS[preset]

    def rows(platform: str) -> list[seeds.Row]:
        found = []
        for number, row in enumerate(whole.rows(platform)[:count]):
            cell = dataclasses.replace(row.cell, batch=1, heads=2, length=64 << number, head_dim=16)
            found.append(dataclasses.replace(row, cell=cell, quick=number == 0))
        return found

    monkeypatch.setitem(seeds.PRESETS, preset, dataclasses.replace(whole, rows=rows))


def run(preset: str, out: pathlib.Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "seeds", preset, *flags, "--out", str(out)])
    text = (out / f"{preset}.json").read_text()
    return code, json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# The documents


def test_the_rows_of_the_v100() -> None:
    rows = seeds.PRESETS["v100"].rows("cuda")
    assert len(rows) == 26
    assert len({row.name for row in rows}) == 26
    assert {row.cell.dtype for row in rows} == {"float16"}
    groups = collections.Counter(row.group for row in rows)
    assert groups == {"Small scale": 10, "Medium scale": 6, "Large scale": 4, "Very large D": 6}
    by_name = {row.name: row.published for row in rows}
    assert by_name["(1, 1, 16, 16, 16, False)"] == {"memory": "~0%", "forward": 5.55, "backward": 26.65, "total": 19.36}
    assert by_name["(1, 32, 4096, 4096, 256, True)"]["total"] == 1.14
    assert sum(row.quick for row in rows) == 8


def test_the_kernels_from_scratch() -> None:
    assert len(documents.FROM_SCRATCH_KERNELS) == 16
    assert documents.FROM_SCRATCH_KERNELS[-1][1] == (99.2, 100.4, 100.9, 100.7)
    assert documents.FROM_SCRATCH_REFERENCE["A100"] == (94.28, 88.01)
    for platform in ("cpu", "cuda"):
        cells = [row.cell for row in seeds.PRESETS["from-scratch"].rows(platform)]
        assert [cell.length for cell in cells] == [512, 1024, 2048, 4096, 8192, 16384]
        assert {cell.head_dim for cell in cells} == {128}
    assert {cell.batch * cell.length for cell in cells} == {16384}


def test_the_rows_of_the_t4() -> None:
    rows = seeds.PRESETS["t4"].rows("cuda")
    assert [row.cell.length for row in rows] == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert {row.cell.batch * row.cell.heads for row in rows} == {32}
    assert all(len(some) == 7 for table in documents.T4_MILLISECONDS.values() for some in table.values())
    assert rows[-1].published["forward"] == {
        "flash2": 95.750, "flash2_atomic": 96.884, "flash1": 108.312, "torch-flash": 186.714, "torch-plain": None,
        "plain": None,
    }  # fmt: skip
    assert rows[0].published["forward + backward"]["flash1"] == 0.316


def test_the_rows_of_the_naive_one() -> None:
    rows = seeds.PRESETS["naive"].rows("cpu")
    assert {(row.cell.dtype, row.cell.length) for row in rows} == {
        (dtype, length) for dtype in ("float32", "float16") for length in (64, 1024)
    }
    assert rows[0].published["flash2"]["dkey"] == 1.9073486e-06
    assert rows[0].published["flash1"]["plain_forward"] == 935441


# Presets, end to end


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("preset", ["v100", "from-scratch", "t4", "naive"])
def test_a_preset(
    preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch, preset, 3 if preset == "naive" else 2)
    out = tmp_path / "deep" / "down"
    code, record = run(preset, out)
    assert code == 0, record["wrong"]
    assert (record["preset"], record["document"]) == (preset, seeds.PRESETS[preset].document)
    assert record["command"] == f"python -m jax_flash bench seeds {preset} --out {out}"
    assert record["machine"]["jax"] == jax.__version__
    for row in record["rows"]:
        for name in set(record["implementations"]) - set(record["missing"]):
            found = row["found"][name]
            assert found["skipped"] == {}
            assert {pass_: len(times) for pass_, times in found["seconds"].items()} == dict.fromkeys(
                record["passes"], record["rounds"]
            )
            assert found["memory"] > 0
            assert all(0 <= found["errors"][key]["ratio"] <= 2 for key in seed_rows.NAMES)
        assert row["memory_saved"]["plain"]["memory"] < 1
        for pass_ in record["passes"]:
            median, low, high = row["speed_up_over"]["plain"][pass_]
            assert 0 < low <= median <= high
    said = capsys.readouterr()
    assert seeds.PRESETS[preset].title in said.out
    assert "3/3" in said.err if preset == "naive" else "2/2" in said.err
    for table in seed_tables.tables(record):
        assert table.title in said.out
        assert all(len(cells) == len(table.columns) for cells in table.rows), table.title
    for name in record["missing"]:
        assert f"{name} (" in said.out
    drawn = sorted(path.name for path in out.glob("*.svg"))
    assert len(drawn) >= 3
    for name in drawn:
        assert len((out / name).read_text()) > 5000
        png = (out / name).with_suffix(".png").read_bytes()
        assert png.startswith(b"\x89PNG")
        assert len(png) > 5000


def test_published_figures_stand_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch, "v100", 1)
    run("v100", tmp_path)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "(1, 1, 16, 16, 16, False)" in line)
    assert line.split()[-5:] == ["5.55", "/", "26.65", "/", "19.36"]
    assert "~0%" in line
    assert line.count("yes, ") == 2


def test_quick_has_fewer_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    small(monkeypatch, "naive")
    code, record = run("naive", tmp_path, "--quick")
    assert code == 0
    assert [row["cell"]["length"] for row in record["rows"]] == [64]
    assert record["quick"]
    assert "--quick" in record["command"]
    for preset in seeds.PRESETS.values():
        assert 0 < sum(row.quick for row in preset.rows("cpu")) < len(preset.rows("cpu"))


@pytest.mark.parametrize("fault", ["wrong", "nan", "raises"])
def test_a_wrong_implementation_fails(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch, "v100", 1)
    right = peers.attend

    def attend(query: Any, key: Any, value: Any, causal: bool) -> Any:
        if fault == "raises":
            raise RuntimeError("the kernel is on fire\nand more")
        out = right(query, key, value, causal)
        return out * np.float16(1.01 if fault == "wrong" else np.nan)

    monkeypatch.setattr(peers, "attend", attend)
    code, record = run("v100", tmp_path)
    assert code == 1
    said = capsys.readouterr()
    assert "WRONG: (1, 1, 16, 16, 16, False): ours: " in said.err
    if fault == "raises":
        assert "ours: no forward, backward, errors: RuntimeError: the kernel is on fire" in said.out
    else:
        assert "NO, " in said.out
        assert record["rows"][0]["found"]["ours"]["errors"]["out"]["ratio"] is None or fault == "wrong"


def test_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of each result are its own."""

    @jax.custom_vjp
    def attend(query: Any, key: Any, value: Any) -> Any:
        return peers.plain(query, key, value, False)

    def forward(*inputs: Any) -> Any:
        return jax.vjp(lambda *x: peers.plain(*x, False), *inputs)

    def backward(pullback: Any, dout: Any) -> Any:
        dquery, dkey, dvalue = pullback(dout)
        return dquery, dkey.at[0, 3, 1, 2].add(0.1), dvalue

    attend.defvjp(forward, backward)
    wrong = seed_rows.Implementation("", lambda q, k, v, _: attend(q, k, v))
    conditions = seed_rows.Conditions(jax.local_devices(backend="cpu")[0], ("forward",), rounds=1)
    errors = seed_rows.measure(CELL, {"wrong": wrong}, 1e-3, conditions)["wrong"]["errors"]
    assert {key: error["ratio"] > 1 for key, error in errors.items()} == {
        "out": False, "dquery": False, "dkey": True, "dvalue": False,
    }  # fmt: skip
    assert errors["dkey"]["largest"] == pytest.approx(0.1, rel=0.05)


# What is left out


@pytest.fixture
def conditions() -> seed_rows.Conditions:
    return seed_rows.Conditions(jax.local_devices(backend="cpu")[0], ("forward", "backward"), rounds=1)


PLAIN = seed_rows.Implementation("", peers.plain)


def test_what_does_not_fit_is_left_out(conditions: seed_rows.Conditions, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = seed_rows.peak_of(seed_rows.compile_both(peers.plain, CELL))
    for free, skipped in ((whole - 1, {"backward", "errors"}), (1, {"forward", "backward", "errors"})):
        monkeypatch.setattr(seed_rows, "free_bytes", lambda _, free=free: free)
        found = seed_rows.measure(CELL, {"plain": PLAIN}, 1e-3, conditions)["plain"]
        assert set(found["skipped"]) == skipped
        assert all(
            reason.startswith("needs 0.0 GiB by XLA's analysis, and 0.0 GiB") for reason in found["skipped"].values()
        )
        assert set(found["seconds"]) == {"forward", "backward"} - skipped
        assert found["memory"] == whole
        assert found["errors"] == {}


def test_arrays_that_do_not_fit(conditions: seed_rows.Conditions, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory\nand much more")

    monkeypatch.setattr(seed_rows.exact, "exact_results", fails)
    found = seed_rows.measure(CELL, {"plain": PLAIN}, 1e-3, conditions)["plain"]
    reason = "MemoryError: RESOURCE_EXHAUSTED: out of memory"
    assert found["skipped"] == dict.fromkeys(("forward", "backward", "errors"), reason)


def test_what_takes_too_long_is_left_out(conditions: seed_rows.Conditions) -> None:
    conditions.slowest = 1.0
    conditions.pace["plain", "backward"] = 0.5, CELL.work / 4
    found = seed_rows.measure(CELL, {"plain": PLAIN}, 1e-3, conditions)["plain"]
    assert set(found["skipped"]) == {"backward", "errors"}
    assert found["skipped"]["backward"] == "would take about 2 s a call, by the row before; the limit is 1 s"
    assert conditions.pace["plain", "forward"][1] == CELL.work
    conditions.pace["plain", "backward"] = 0.01, CELL.work / 1e6  # calls of few milliseconds do not scale
    assert not conditions.too_slow("plain", "backward", CELL)


def test_free_memory() -> None:
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 20})
    assert seed_rows.free_bytes(device) == 0.95 * 80
    assert 2**20 < seed_rows.free_bytes(types.SimpleNamespace(memory_stats=lambda: None)) < 2**50


def test_memory_is_measured_where_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an allocator whose peak never falls, as that of a GPU: each program still gets its own peak."""
    base, peak, waiting = 1000, 5_000_000, [0]  # something large has run before

    def in_use() -> int:
        return base + waiting[0]

    def stats() -> dict[str, int]:
        return {"bytes_in_use": in_use(), "peak_bytes_in_use": max(peak, in_use())}

    device = types.SimpleNamespace(memory_stats=stats, platform="cuda")
    sizes = {"large": 700_000, "small": 30_000, "like small": 30_000}

    def compile_both(name: str, cell: Cell, options: Any) -> Any:
        assert options == {"xla_gpu_autotune_level": 0}
        inputs = sum(x.size * x.dtype.itemsize for x in seed_rows.shapes(cell))

        def program(*_: Any) -> int:
            nonlocal peak
            peak = max(peak, in_use() + sizes[name])
            return 0

        program.memory_analysis = lambda: types.SimpleNamespace(  # type: ignore[attr-defined]  # as a compiled program has
            argument_size_in_bytes=inputs, output_size_in_bytes=inputs, temp_size_in_bytes=sizes[name] - inputs
        )
        return program

    def put(x: Any, _: Any) -> Any:
        waiting[0] += x.nbytes
        return x

    def ballast(size: int, _: Any) -> Any:
        waiting[0] += 4 * size
        return 0

    monkeypatch.setattr(seed_rows, "compile_both", compile_both)
    monkeypatch.setattr(seed_rows, "free_bytes", lambda _: 1e9)
    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(seed_rows.jnp, "zeros", ballast)
    measured = seed_rows._peak

    def one(*args: Any) -> Any:
        waiting[0] = 0  # what the program before held is free
        return measured(*args)

    monkeypatch.setattr(seed_rows, "_peak", one)
    found = seed_rows.measured_peaks({name: (name, CELL) for name in sizes}, device, print)  # type: ignore[misc]  # names stand for functions
    inputs = sum(x.size * x.dtype.itemsize for x in seed_rows.shapes(CELL))
    assert found == {name: size + inputs for name, size in sizes.items()}
    assert seed_rows.measured_peaks({}, types.SimpleNamespace(memory_stats=lambda: None), print) == {}


def test_implementations_of_a_machine_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = seeds.implementations(seeds.PRESETS["t4"].names, "cpu")
    assert {name: x.missing for name, x in on_cpu.items() if x.missing} == {
        "torch-flash": "its kernels need a GPU", "torch-plain": "compared on GPUs only",
    }  # fmt: skip
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("torch", "flash_attn_jax"):
            raise ModuleNotFoundError(f"No module named '{name}'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(__import__("sys").modules, "jax_flash._tools.bench.torch_peers", raising=False)
    on_gpu = seeds.implementations(["ours", "flash1", "fa2-jax", "torch-flash"], "cuda")
    assert on_gpu["fa2-jax"].missing == "ModuleNotFoundError: No module named 'flash_attn_jax'"
    assert "No module named 'torch'" in on_gpu["torch-flash"].missing
    assert "CUDA kernels" in on_gpu["flash1"].what


# Figures


def record_of(rates: dict[str, list[list[float]]], ladders: Any = None) -> dict[str, Any]:
    """A record of from-scratch on a GPU: the seconds of rounds by implementation and row; 1e12 operations a call."""
    return {
        "preset": "from-scratch", "passes": ["forward"], "missing": {}, "machine": {"platform": "cuda"},
        "implementations": dict.fromkeys(rates, ""), "ladder": ladders or {},
        "rows": [
            {"name": f"S {length}", "cell": {"length": length, "work": 1e12, "dtype": "bfloat16"},
             "found": {name: {"seconds": {"forward": some[i]}, "skipped": {}, "errors": {}} for name, some in
                       rates.items()}}
            for i, length in enumerate((2048, 4096))
        ],
    }  # fmt: skip


def test_per_cent_of_flash_attention_2() -> None:
    rungs = [{"name": "plain", "seconds": {"2048": [0.1], "4096": [0.2]}, "errors": {}},
             {"name": "broken", "seconds": {"2048": [0.1]}, "errors": {"4096": "spills"}}]  # fmt: skip
    record = record_of(
        {"ours": [[0.02, 0.01, 0.03], [0.01]], "fa2-jax": [[0.01], [0.02]], "torch-flash": [[0.02], [0.02]]},
        {"forward": rungs},
    )
    speed, ladders, published = seed_tables.tables(record)
    assert speed.rows[0] == ["forward", "2048", "50.0", "100", "50.0", "50.0%", "100.0%"]
    assert speed.rows[-1][:3] == ["forward", "harmonic mean", f"{statistics.harmonic_mean([50, 100]):.1f}"]
    assert speed.rows[-1][-2:] == ["100.0%", "133.3%"]
    assert ladders.columns[-1] == "% of its harmonic mean"
    assert ladders.rows[0] == ["plain", "5.0", "6.7", "10.0%", "10.0%"]
    assert ladders.rows[1] == ["broken", "-", "-", "-", "-"]
    assert len(published.rows) == 17
    with plots.drawing():
        assert set(plots.seeds(record)) == {"forward", "share-forward", "ladder-forward", "published"}
    assert seeds.wrong(record | {"rows": []}) == ["ladder, forward, broken, S 4096: spills"]


def test_figures() -> None:
    row = {"found": {"a": {"seconds": {"forward": [1.0, 2.0], "backward": [3.0, 4.0]}, "memory": 25},
                     "b": {"seconds": {"forward": [2.0, 8.0], "backward": [6.0, 4.0]}, "memory": 100}}}  # fmt: skip
    assert seed_figures.speed_up(row, "a", "b", "forward") == (3.0, 2.0, 4.0)
    assert seed_figures.speed_up(row, "a", "b", "total") == (2.0, 2.0, 2.0)
    assert seed_figures.speed_up(row, "a", "c", "total") is None
    assert seed_figures.saved(row, "a", "b") == 0.75
    assert seed_figures.saved(row, "a", "c") is None
    assert seed_figures.harmonic_mean([1.0, None]) is None


def test_the_ladder_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = seeds._ladders(jax.local_devices(backend="cpu")[0], 1, (512,))
    assert "CUDA kernels" in missing["ladder_missing"]
    gpu = types.SimpleNamespace(platform="gpu")
    status = {"devices": [{"family": "sm75", "compute_capability": 75, "name": "Tesla T4"}]}
    monkeypatch.setattr(seeds.registration, "cuda_status", lambda: status)
    assert "there is no ladder of sm75's forward" in seeds._ladders(gpu, 1, (512,))["ladder_missing"]

    status["devices"][0] |= {"family": "sm80"}
    rungs = ladder.rungs("sm80", "forward")

    def measure(device: Any, pass_: str, cells: Any, rounds: int) -> Any:
        slow = seeds._ladder._race.Race({rung.name: [0.1] for rung in ladder.rungs("sm80", pass_)})
        slow.errors = {rungs[0].name: RuntimeError("wrong")} if pass_ == "forward" else {}
        return dict.fromkeys(cells, slow)

    monkeypatch.setattr(ladder, "measure", measure)
    found = seeds._ladders(gpu, 1, (512, 1024))["ladder"]
    assert [rung["name"] for rung in found["forward"]] == [rung.name for rung in rungs]
    assert found["forward"][0]["errors"] == {"512": "RuntimeError: wrong", "1024": "RuntimeError: wrong"}
    assert found["backward"][0]["seconds"] == {"512": [0.1], "1024": [0.1]}


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "required: PRESET"), (["a100"], "invalid choice: 'a100'"), (["v100", "--slow"], "unrecognized arguments")],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "seeds", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_out_that_is_a_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["bench", "seeds", "naive", "--out", str(file)]) == 1
    assert f"--out must name a folder, got a file: {file}" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_package_that_is_missing(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    for arguments in (["bench", "seeds", "naive"], ["report", "--html", str(tmp_path / "x.html")]):
        assert main(arguments) == 1
        said = capsys.readouterr()
        assert f"needs {package} " in said.err
        assert "pip install 'jax_flash[bench]'" in said.err
        assert not said.out
    assert not list(tmp_path.iterdir())


def test_help_names_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    actions = argparse.ArgumentParser().add_subparsers()
    seeds.add_arguments(actions)
    text = actions.choices["seeds"].format_help()
    assert all(name in text for name in seeds.PRESETS)
