"""``bench``: the grid computes its figures right, missing peers are named, and errors are errors."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from jax_flash.__main__ import main
from jax_flash._call.options import Options
from jax_flash._implementations import reference
from jax_flash._tools.bench import flex, grid, race
from jax_flash._tools.bench import peers as _peers
from jax_flash._tools.bench import small as _bench_small
from jax_flash._tools.bench.flex_kinds import KINDS

CELL = race.Cell("float32", 16, 64, True, 1, 2)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment that main() sets."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("JAX_FLASH_CUDA_FAMILY", "")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small cell on a CPU, and peers that say as much as real ones."""

    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'another'")

    def refuses(*_: Any) -> Any:
        raise NotImplementedError("not this head_dim")

    peers = {
        "plain": _peers.Peer("plain JAX", lambda: _peers.ours(implementation="reference")),
        "another": _peers.Peer("somebody else's", missing),
        "narrow": _peers.Peer("serves nothing", lambda: refuses),
    }
    monkeypatch.setattr(_peers, "PEERS", peers)
    monkeypatch.setattr(grid, "device", lambda: jax.local_devices(backend="cpu")[0])
    monkeypatch.setattr(grid, "_family", lambda: "sm90a")
    monkeypatch.setattr(grid, "cells", lambda *_: [CELL])


def test_the_grid() -> None:
    cells = grid.cells()
    assert len(set(cells)) == 18
    assert {cell.batch * cell.length for cell in cells} == {16384}
    assert {cell.heads * cell.head_dim for cell in cells} == {2048}
    assert {(c.head_dim, c.length) for c in grid.cells([128], [4096])} == {(128, 4096)}


def test_grid(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "grid", "--rounds", "2", "--deterministic"]) == 0
    text = capsys.readouterr().out
    assert "kernels of sm90a" in text
    assert "plain: plain JAX" in text
    assert "another: not here, ModuleNotFoundError: No module named 'another'" in text
    titles, forward, backward, note, *means = text[text.index("pass  ") :].splitlines()
    assert titles.split() == ["pass", "head_dim", "S", "jax_flash", "deterministic", "plain", "narrow", "ratio"]
    assert forward.split()[:4] == ["forward", "16", "causal", "64"]
    assert len(forward.split()) == len(backward.split()) - 1  # forward is not timed twice
    for row in (forward, backward):
        *_, ours, _, plain, narrow, ratio = row.split() if row is backward else [*row.split()[:5], "", *row.split()[5:]]
        assert float(ours) >= 0
        assert float(plain) >= 0
        assert narrow == "[1]"
        assert float(ratio) > 0
    assert note == "  [1] NotImplementedError: not this head_dim"
    assert [line.split(":")[0] for line in means] == ["forward", "backward"]


def test_ours_that_fails_is_a_failure(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_peers, "ours", lambda **_: _peers.PEERS["narrow"].load())
    monkeypatch.setitem(_peers.PEERS, "plain", _peers.Peer("plain", lambda: _peers.of_jax(lambda q, k, v, _: q)))
    assert main(["bench", "grid", "--pass", "forward", "--rounds", "1"]) == 1
    *_, ours, plain, narrow, ratio = capsys.readouterr().out.splitlines()[-2].split()
    assert (ours, narrow, ratio) == ("[1]", "[1]", "nan")
    assert float(plain) >= 0


def test_the_best_round_counts() -> None:
    found = race.Race({"a": [2.0, 1.0, 4.0], "b": [1.0]}, {"b": RuntimeError("fell out")})
    assert grid.rates_of(found, 3e12) == {"a": 3.0}


def test_rounds_begin_with_another_one() -> None:
    order: list[str] = []

    def maker(name: str) -> Any:
        return lambda: race.Entry(lambda: order.append(name), lambda _: None)

    found = race.race({"a": maker("a"), "b": maker("b")}, rounds=2, seconds=1e-9)
    assert {name: len(some) for name, some in found.seconds.items()} == {"a": 2, "b": 2}
    assert order == ["a", "a", "b", "b", *"ab", *"ba"]


@pytest.mark.parametrize("causal", [False, True])
def test_exact_results(causal: bool) -> None:
    """The reference in chunks equals the one in one piece."""
    cell = dataclasses.replace(CELL, causal=causal, dtype="float64")
    arrays = cell.draw()

    def attend(*inputs: Any) -> Any:
        return reference.attention(*inputs, {}, Options(causal=causal, scale=cell.head_dim**-0.5))[0]

    out, pullback = jax.vjp(attend, *arrays[:3])
    for found, wanted in zip(grid.exact_results(arrays, causal, rows=16), (out, *pullback(arrays[3])), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_relative_error() -> None:
    assert grid.relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_numerics(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], noise: float
) -> None:
    """Our errors may not exceed cuDNN's, as which our own kernels stand in here."""
    ours = _peers.attend
    monkeypatch.setattr(_peers, "attend_nn", lambda _, *args: ours(*args))
    monkeypatch.setattr(_peers, "attend", lambda *args: ours(*args) * (1 + noise))
    monkeypatch.setattr(grid, "cells", lambda *_: [dataclasses.replace(CELL, dtype="bfloat16")])
    assert main(["bench", "grid", "--numerics"]) == (1 if noise else 0)
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:3] == ["16", "causal", "64"]
    assert (float(row[-1]) > 1.02) == bool(noise)


def test_memory(small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain attention keeps scores, ours does not; XLA's own attention refuses float16 on CPUs."""
    monkeypatch.setattr(grid, "MEMORY", ((1, 2, 16, 16), (1, 2, 512, 16)))
    monkeypatch.setattr(
        _peers, "attend_nn", lambda _, q, k, v, causal: _peers.attend(q, k, v, causal, implementation="reference")
    )
    assert main(["bench", "memory"]) == 0
    titles, *rows = (line.split() for line in capsys.readouterr().out.splitlines()[4:])
    assert titles[-2:] == ["forward", "backward"]
    assert [row[:4] for row in rows] == [["1", "2", s, "16"] for s in ("16", "512")]
    plain, own = map(float, rows[1][4:6])
    assert plain - own > 2 * 512 * 512 / 2**20
    # Of the sizes in bytes, which the table rounds.
    assert abs(float(rows[1][6].removesuffix("%")) - 100 * (1 - own / plain)) < 1
    assert 0 < float(rows[1][8]) < own


def test_small(small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All tables of shapes that a CPU takes, where the peers are plain attention and one that serves nothing."""

    def refuses(*_: Any) -> Any:
        raise NotImplementedError("not this shape")

    entrants = {
        "jax_flash": _peers.attend,
        "plain": functools.partial(_peers.attend, implementation="reference"),
        "another": refuses,
    }
    cell, short = race.Cell("float32", 16, 32, True, 1, 2), race.Cell("float32", 16, 64, False, 1, 4, 1, 2)
    monkeypatch.setattr(_bench_small, "IMPLEMENTATIONS", entrants)
    monkeypatch.setattr(race, "chain_length", lambda *_: 2)
    monkeypatch.setattr(_bench_small, "SMALL", (cell,))
    monkeypatch.setattr(_bench_small, "SHORT", (short,))
    monkeypatch.setattr(_bench_small, "SHORT_WITH_GRADIENTS", (short,))
    monkeypatch.setattr(_bench_small, "ODD", {cell: (short,)})
    assert main(["bench", "small"]) == 0
    said = capsys.readouterr()
    assert "B1 1x64 N4/2 D16: another: not this shape" in said.err
    tables = said.out.strip().split("\n\n")
    titles = ["small", "short queries", "odd shapes", "small", "short queries", "odd shapes, with gradients"]
    assert [text.splitlines()[0] for text in tables] == titles
    for text in (tables[0], tables[3]):
        ours, plain, another, ratio, none = text.splitlines()[2].split()[-5:]
        assert (another, none) == ("-", "-")
        assert float(ratio) == pytest.approx(float(plain) / float(ours), rel=0.2, abs=0.02)
    assert "B1 32 N2 D16 causal, with gradients" in tables[3]
    assert len(tables[5].splitlines()) == 4


def test_chains() -> None:
    """Each call takes what the one before returned; where gradients of float32 are computed, inputs move along them."""
    cell = dataclasses.replace(CELL, causal=False, length=8, q_length=4, kv_heads=1, heads=2)
    assert [x.shape for x in cell.draw()] == [(1, 4, 2, 16), (1, 8, 1, 16), (1, 8, 1, 16), (1, 4, 2, 16)]
    assert str(cell) == "B1 4x8 N2/1 D16"
    *drawn, _ = (np.asarray(x, np.float64) for x in cell.draw())

    def attend(query: Any, key: Any, value: Any, causal: bool) -> Any:
        assert not causal
        return query / 2 + key.sum() * value.sum() * 0.01

    for dtype in ("bfloat16", "float32"):
        of_dtype = dataclasses.replace(cell, dtype=dtype)
        expected, key, value = drawn
        for _ in range(race.chain_length(of_dtype, "forward")):
            expected = attend(expected, key, value, False)
        np.testing.assert_allclose(race.chain(attend, of_dtype, "forward")(*drawn), expected, rtol=1e-12)

        inputs = tuple(drawn)
        for _ in range(race.chain_length(of_dtype, "forward + backward")):
            out, pullback = jax.vjp(lambda *x: attend(*x, False), *inputs)
            gradients = pullback(out)
            moved = tuple(x - 2.0**-10 * dx for x, dx in zip(inputs, gradients, strict=True))
            inputs = moved if dtype == "float32" else gradients
        for got, want in zip(race.chain(attend, of_dtype, "forward + backward")(*drawn), inputs, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "cudnn,nobody"], "got 'nobody'"),
        (["--rounds", "0"], "must be a number of at least 1, got '0'"),
        (["--pass", "sideways"], "invalid choice"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "grid", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(bool(grid.doctor._devices("cuda")), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "grid"]) == 1
    assert "jax_flash bench grid: JAX has no CUDA device here" in capsys.readouterr().err


def test_flex(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kind with an option that computes the same, on a CPU; every kind is right in tests/test_flex.py."""
    file = tmp_path / "folder" / "flex.json"
    assert main(["bench", "flex", "--only", "window", "--only", "first_use", "--rounds", "1", "--out", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["kind"], row["pass_"]) for row in rows] == [
        ("window", "forward"), ("window", "backward"), *((f"first_use {x}", "both") for x in flex.UNSEEN),
    ]  # fmt: skip
    assert all(set(row["rounds"]) == {"functions", "option", "xla"} and not row["errors"] for row in rows[:2])
    text = capsys.readouterr().out
    assert "forward: xla / ours" in text
    ratio = rows[0]["rounds"]["xla"][0] / rows[0]["rounds"]["functions"][0]
    assert f"({ratio:.2f})" in text


@pytest.mark.parametrize("cell", [flex.CPU_CELLS[0]])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.option])
def test_the_options_of_flex_compute_the_same(name: str, cell: race.Cell) -> None:
    cell = dataclasses.replace(cell, length=256, heads=2)
    with jax.numpy_dtype_promotion("standard"):  # as PyTorch, which traces the same functions
        by_functions, by_option = (make(name, cell, "forward", "xla") for make in (flex.ours, flex.built_in))
        np.testing.assert_allclose(by_functions.start(), by_option.start(), rtol=1e-5, atol=1e-5)


def test_flex_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "flex", "--rounds", "-1"])
    assert "must be a number of at least 0" in capsys.readouterr().err
