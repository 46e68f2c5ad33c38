"""The harness of draw_gpu.py, without a GPU: what it draws, which kernels it compiles, and that no failure is lost."""

import argparse
import pathlib
import subprocess
import sys
from typing import Any

import draw_gpu
import pytest
from draw_gpu import Drawing, Family, KernelCall, Worker
from drawing import Program

from jax_flash._native import _core, registration


def test_ranges_of_seeds_add_up() -> None:
    """A seed always means the same case; consecutive seeds share program and shape."""
    drawn = [draw_gpu.drawn_case("sm80", seed) for seed in range(60)]
    assert drawn == [draw_gpu.drawn_case("sm80", seed) for seed in range(60)]
    for first in range(0, 60, draw_gpu.CASES_OF_SHAPE):
        assert all(x == drawn[first] for x in drawn[first : first + draw_gpu.CASES_OF_SHAPE])
    assert len({number for number, _, _ in drawn}) > 6
    assert all(min(shape) >= 1 and max(shape) <= (1500 if d.split_kv else 700) for _, d, shape in drawn)


def test_every_option_is_drawn() -> None:
    for family in draw_gpu.FAMILIES:
        programs = [draw_gpu.draw(family, number).program for number in range(draw_gpu.PROGRAMS)]
        names = {name for program in programs for name, _ in program.options}
        assert names >= {"window", "softcap", "dropout_rate", "bias", "mask", "alibi", "sinks", "segments"}
        assert names >= {"q_lengths", "kv_lengths", "offsets", "precision", "deterministic", "untrained"}
        assert {program.dtype for program in programs} == {"float16", "bfloat16", "float32"}
        assert {program.packed for program in programs} == {program.causal for program in programs} == {False, True}
        assert sum(program.head_dims[0] != program.head_dims[1] for program in programs) > 5


SHARED_BIAS = (("bias", "nts"), ("deterministic", True), ("precision", "highest"), ("q_lengths", True))
PROGRAM = Program(False, "float32", (4, 2), (40, 24), (2,), True, SHARED_BIAS)


@pytest.mark.skipif(not registration.cuda_status()["nvrtc"], reason="no NVRTC here, which a GPU's kernels want")
def test_calls_are_those_that_are_lowered() -> None:
    with draw_gpu.pretended_gpu("sm80"):
        forward, backward = draw_gpu.calls_of(Drawing(PROGRAM, split_kv=False), (70, 90))
    for call in (forward, backward):
        assert (call.dtype, call.head_dims) == ("float16", (40, 24))
        present = {name for name, value in call.options.items() if name.startswith("has_") and value}
        present -= {"has_dbias"}
        arrays = ("query", "key", "value") if call is forward else ("query", "key", "value", "dout")
        originals = {f"has_original_{name}" for name in arrays}
        assert present == {"has_descale", "has_bias", "has_q_lengths"} | originals
        assert call.options["causal"]
        assert call.options["highest_precision"]
    assert forward.forward
    assert not backward.forward
    assert backward.options["has_dbias"]
    assert backward.shares_bias


@pytest.mark.parametrize(
    ("split_kv", "shares", "passes"),
    [
        (False, False, [["forward"], ["backward", "backward_dq"]]),
        (False, True, [["forward"], ["backward", "backward_dq"], ["backward_bias"]]),
        (True, False, [["forward_split_kv"], ["forward_single_tile"], ["forward"], ["backward", "backward_dq"]]),
    ],
)
def test_kernels_of_a_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, split_kv: bool, shares: bool, passes: list[list[str]]
) -> None:
    options = {"separate_dq": True, "has_dbias": True}
    calls = [KernelCall(forward, "float16", (64, 64), options, shares) for forward in (True, False)]
    asked: list[list[str]] = []

    def build_kernels(**what: Any) -> list[dict[str, str]]:
        asked.append(what["passes"])
        without = shares and "backward" in what["passes"]
        assert what["options"] == [options | {"has_dbias": not without}]
        return [{"path": f"{tmp_path}/{what['passes'][0]}.cubin"}]

    monkeypatch.setattr(draw_gpu, "calls_of", lambda *_: calls)
    monkeypatch.setattr(_core, "build_kernels", build_kernels)
    made = draw_gpu.build(Drawing(PROGRAM, split_kv), "sm80", tmp_path)
    assert asked == passes
    assert made == [f"{of[0]}.cubin" for of in passes]


ANSWERS = """
import json, os, sys, time
for line in sys.stdin:
    for seed in json.loads(line):
        if seed == 3:
            print("what it had to say", file=sys.stderr, flush=True)
            os._exit(7)
        if seed == 8:
            time.sleep(60)
        error = {1: "a wrong value", 6: "no GPU any more"}.get(seed)
        print("some library's chatter")
        print("draw_gpu: " + json.dumps({"seed": seed, "error": error, "fatal": seed == 6}), flush=True)
        if seed == 6:
            os._exit(1)
"""


def test_no_failure_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """A worker that says so, ends, loses its GPU or never answers fails one case; the others are run."""
    monkeypatch.setattr(Worker, "script", ("-c", ANSWERS))
    monkeypatch.setattr(draw_gpu, "SECONDS", 5)
    a = argparse.Namespace(folder=None, seeds=range(12), platform="cpu", memcheck=False)
    family = Family("sm80", a, tmp_path)
    Worker(family).run()
    said = capsys.readouterr().out
    assert (family.cases, family.failed) == (12, 4)
    assert [line.split()[3] for line in said.splitlines() if line.startswith("FAILED")] == ["1:", "3:", "6:", "8:"]
    for text in ("a wrong value", "ended with 7\nwhat it had to say", "no GPU any more", "no result after 5 s"):
        assert text in said
    assert "tests/draw_gpu.py run  --family sm80 --seeds 3 --platform cpu" in said
    assert "12 cases" in family.summary()
    assert "4 failed" in family.summary()


def test_memory_errors(tmp_path: pathlib.Path) -> None:
    (tmp_path / "good.memcheck").write_text("========= ERROR SUMMARY: 0 errors\n")
    assert not draw_gpu.memory_errors(tmp_path)
    (tmp_path / "bad.memcheck").write_text("Invalid __shared__ write\n========= ERROR SUMMARY: 2 errors\n")
    (tmp_path / "killed.memcheck").write_text("========= COMPUTE-SANITIZER\n")
    assert len(draw_gpu.memory_errors(tmp_path)) == 2


@pytest.mark.slow
def test_on_cpus() -> None:
    command = [sys.executable, draw_gpu.__file__, "run", "--platform", "cpu", "--family", "sm75", "--workers", "1"]
    done = subprocess.run([*command, "--seeds", "0:10:5"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sm75: 2 cases" in done.stdout
    assert "0 failed" in done.stdout
