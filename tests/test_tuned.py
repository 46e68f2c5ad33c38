"""Tile rows of `bench tune`: stored, used, and refused where they are not of these kernels."""

import json
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import jax_flash
from jax_flash.__main__ import main
from jax_flash._implementations import choice as _choice
from jax_flash._native import _core, registration
from jax_flash._native import tuned as _tuned
from jax_flash._tools import doctor
from jax_flash._tools.bench import grid, tune

GPU = "NVIDIA H200"
DEVICE = {"name": GPU, "compute_capability": 90, "family": "sm90a"}
ROW = _tuned.tile_row(block_q=128, block_kv=64, warps=12, stages=3)
TUNED = _tuned.TunedRow(GPU, "sm90a", "forward", 64, ROW)


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(folder))
    monkeypatch.delenv("JAX_FLASH_CUDA_FAMILY", raising=False)
    yield folder
    _tuned.tell([])


def choice(gpu: str = GPU, **changes: Any) -> dict[str, Any]:
    return _core.tile_row(**({"arch": 90, "pass_": "forward", "head_dim": 64, "gpu": gpu} | changes))


def test_stored_and_used(cache: pathlib.Path) -> None:
    assert not cache.exists()  # importing the package made no folder
    assert _tuned.store([TUNED]) == cache / "tuned.json"
    assert _tuned.load() == [TUNED]
    assert not choice()["tuned"]
    _tuned.use_stored()
    assert choice() == {"family": "sm90a", "row": ROW, "tuned": True, "most_shared_bytes": 227 * 1024}
    for other in ({"gpu": "NVIDIA H100"}, {"gpu": ""}, {"head_dim": 128}, {"pass_": "backward"}, {"arch": 80}):
        assert not choice(**other)["tuned"], other


def test_a_row_is_replaced_and_others_stay() -> None:
    other = _tuned.TunedRow(GPU, "sm80", "forward", 64, ROW)
    again = _tuned.TunedRow(GPU, "sm90a", "forward", 64, ROW | {"stages": 2})
    _tuned.store([TUNED, other])
    _tuned.store([again])
    assert set(map(str, _tuned.load())) == {str(other), str(again)}


@pytest.mark.slow
def test_what_is_compiled(cache: pathlib.Path) -> None:
    """A tuned row makes another kernel, for calls without options and on that GPU alone."""

    def compiled(gpu: str, **options: Any) -> set[str]:
        before = set(cache.glob("*.cubin"))
        _core.fetch_kernel(
            arch=90, pass_="forward", dtype="bfloat16", head_dim=64, value_head_dim=64, options=options, gpu=gpu
        )
        return {path.name for path in set(cache.glob("*.cubin")) - before}

    _tuned.tell([TUNED])
    (tuned,) = compiled(GPU)
    assert "-block_q128-block_kv64-warps12-stages3-min_blocks1-" in tuned
    (plain,) = compiled("NVIDIA H100")
    assert "block_q" not in plain
    (softcap,) = compiled(GPU, softcap=3.0)
    assert "block_q" not in softcap
    assert compiled(GPU) == set()  # and it is in the cache


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ("[]", "can't be read"),
        ({"sources": None}, "another version of the kernels"),
        ({"rows": [{"gpu": GPU}]}, "can't be read"),
        ({"row": {"stages": 0}}, "can't be read"),
        ({"row": {"warps": "12"}}, "can't be read"),
        ({"row": {"block_q": True}}, "can't be read"),
        ({"place": {"pass": "sideways"}}, "can't be read"),
        ({"place": {"head_dim": 65}}, "can't be read"),
        ({"place": {"gpu": 7}}, "can't be read"),
        ({"place": {"family": "\ud800"}}, "can't be read"),
        ("[" * 100_000, "can't be read"),
        ('{"rows": ' + "1" * 10_000 + "}", "can't be read"),
        (b"\xff", "can't be read"),
    ],
)
def test_refused(cache: pathlib.Path, content: Any, message: str) -> None:
    """A file that is invalid, or was tuned for other kernels, causes a warning and is not used."""
    file = _tuned.store([TUNED])
    if isinstance(content, (str, bytes)):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    else:
        stored = json.loads(file.read_text())
        stored["rows"][0]["row"] |= content.pop("row", {})
        stored["rows"][0] |= content.pop("place", {})
        file.write_text(json.dumps(stored | content))
    with pytest.raises(ValueError, match=message) as refused:
        _tuned.load()
    assert f"remove {file}" in str(refused.value)
    with pytest.warns(UserWarning, match="jax_flash: tuned tile rows are not used"):
        _tuned.use_stored()
    assert not choice()["tuned"]
    _tuned.store([TUNED])  # what is found anew takes its place
    assert _tuned.load() == [TUNED]


@pytest.mark.slow
def test_at_import() -> None:
    """A process uses the stored rows; a stale file only causes a warning."""
    code = "from jax_flash._native import _core as c"
    code += f"; print(c.tile_row(arch=90, pass_='forward', head_dim=64, gpu={GPU!r})['tuned'])"

    def run(*options: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, *options, "-c", f"import jax_flash; {code}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout.strip(), done.stderr

    assert run() == ("False", "")
    file = _tuned.store([TUNED])
    assert run() == ("True", "")
    file.write_text(file.read_text().replace(_core.sources_key(), "0" * 32))
    for options in ((), ("-W", "error")):  # the import goes on, whatever becomes of warnings
        used, said = run(*options)
        assert used == "False"
        assert said.count("another version of the kernels") == 1
    assert run("-W", "ignore") == ("False", "")
    file.unlink()
    file.mkdir()
    assert run("-W", "error") == ("False", "")


def test_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_FLASH_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert _tuned.load() == []
    with pytest.raises(OSError, match="set JAX_FLASH_CACHE_DIR"):
        _tuned.store([TUNED])


def test_explain_and_doctor_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _tuned.store([TUNED, _tuned.TunedRow("another", "sm80", "forward", 64, ROW)])
    monkeypatch.setattr(_choice, "_cuda_devices", lambda: ("a GPU",))
    monkeypatch.setattr(_choice, "_cuda_unavailable", lambda: None)
    monkeypatch.setattr(registration, "cuda_status", lambda: {"devices": [DEVICE]})
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "float16")
    wide = jax.ShapeDtypeStruct((1, 64, 2, 128), "float16")
    text = str(jax_flash.explain(x, x, x, platform="cuda"))
    assert text.splitlines()[-1] == f"  tuned: {TUNED}"
    assert jax_flash.explain(wide, wide, wide, platform="cuda").tuned == ()
    assert jax_flash.explain(x, x, x, platform="cpu").tuned == ()

    here = doctor.Machine(
        {"driver": "13.0", "nvrtc": ["13.0 (x)"], "cache_dir": "", "cache_problem": "", "devices": [DEVICE]},
        {},
        [],
        None,
    )
    said = [text for title, text in doctor.gpu_versions(here) if title == "tuned tile row"]
    assert said[0] == str(TUNED)
    assert said[1].endswith("(not used: no such GPU here, or served by another family)")


# The search


@pytest.mark.parametrize(("arch", "family"), [(90, "sm90a"), (80, "sm80"), (75, "sm75"), (70, "sm70")])
@pytest.mark.parametrize("pass_", _tuned.PASSES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_tables_rows_are_among_the_candidates(arch: int, family: str, pass_: str, head_dim: int) -> None:
    """Of the families that tune has candidates for in full; Turing's smallest rows at 256 are the table's alone."""
    row = _core.tile_row(arch=arch, pass_=pass_, head_dim=head_dim)
    assert row["family"] == family
    candidates = list(tune.candidates(family, pass_, head_dim))
    assert len({_tuned.row_name(x) for x in candidates}) == len(candidates)
    assert row["row"] in candidates or family in ("sm70", "sm75")


@pytest.mark.slow
def test_what_the_compiler_refuses() -> None:
    """No GPU is needed to see what does not compile, does not fit or spills."""
    small = _tuned.tile_row(block_q=64, block_kv=64, warps=4)
    rows = [small, small | {"block_q": 63}, _tuned.tile_row(block_q=128, block_kv=128, warps=4)]
    good, impossible, spills = tune.compiled(80, "forward", 256, rows, 227 * 1024)
    assert good.fault == ""
    assert good.shared_bytes > 0
    assert good.registers > 0
    assert impossible.fault == "does not compile"
    assert spills.fault.startswith("spills ")
    (large,) = tune.compiled(80, "forward", 256, [small], 10 * 1024)
    assert large.fault == f"{good.shared_bytes / 1024:.0f} KB of shared memory"


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rows by block_kv: the given TFLOP/s; one is wrong. Nothing is compiled."""
    rates = {16: 100.0, 64: 200.0, 128: 300.0}
    table = _core.tile_row(arch=90, pass_="forward", head_dim=64)["row"]

    def timed(kept: Any, place: Any, pass_: str, head_dim: int, rounds: int) -> None:
        for candidate in kept:
            candidate.rates = {"full": rates[candidate.row["block_kv"]]}

    monkeypatch.setattr(grid, "device", lambda: jax.local_devices(backend="cpu")[0])
    monkeypatch.setattr(registration, "cuda_status", lambda: {"devices": [DEVICE]})
    monkeypatch.setattr(tune, "candidates", lambda *_: iter([table | {"block_kv": kv} for kv in (16, 64, 256)]))
    monkeypatch.setattr(tune, "compiled", lambda _a, _p, _h, rows, _s: [tune.Candidate(row) for row in rows])
    monkeypatch.setattr(tune, "wrong", lambda row, _: "wrong out" if row.row["block_kv"] == 256 else "")
    monkeypatch.setattr(tune, "_time", timed)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return rates


def test_tune_stores_what_is_faster(
    fake_gpu: dict[int, float], cache: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "tune", "--head-dim", "64", "--pass", "forward", "--store"]
    assert main(arguments) == 0
    assert "nothing to store" in capsys.readouterr().out
    assert not cache.exists()

    fake_gpu[64] = 310.0
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "4 rows, out: {'wrong out': 1}" in text
    assert f"stored 1 rows in {cache / 'tuned.json'}" in text
    (row,) = _tuned.load()
    assert row.place == (GPU, "sm90a", "forward", 64)
    assert row.row["block_kv"] == 64
    assert choice()["row"] == row.row  # at once

    fake_gpu[16] = 311.0  # not 1% more
    assert main(arguments[:-1]) == 0
    assert _tuned.load() == [row]
    assert choice()["tuned"]


def test_the_oracle_asks_the_pass_that_is_tuned() -> None:
    """And not split-KV."""
    assert _core.plan_split_kv(batch=5, q_length=333, kv_length=389, q_heads=4, kv_heads=2, options={})[0] == 0


def test_a_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the oracle; on a CPU that has no rows, so that right is right."""
    cpu = jax.local_devices(backend="cpu")[0]
    assert tune.wrong(TUNED, cpu) == ""
    right = tune._program

    def off(problem: Any) -> Any:
        def run(arrays: Any) -> Any:
            found = right(problem)(arrays)
            return found | ({"dkey": found["dkey"].at[0, 5].add(0.1)} if problem.causal else {})

        return run

    monkeypatch.setattr(tune, "_program", off)
    assert tune.wrong(TUNED, cpu) == "wrong dkey"

    def fails(*_: Any) -> Any:
        raise RuntimeError("cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(tune, "_program", lambda _: fails)
    assert tune.wrong(TUNED, cpu).startswith("RuntimeError: cuLaunchKernel failed")


@pytest.mark.parametrize(("text", "code"), [("65", 2), ("512", 2), ("x", 2)])
def test_bad_head_dim(text: str, code: int) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "tune", "--head-dim", text])
    assert stopped.value.code == code


@pytest.mark.gpu
@pytest.mark.slow
def test_tune_on_a_gpu(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real search, of one pass; calls are right with the row that it finds."""
    with warnings.catch_warnings():
        assert main(["bench", "tune", "--head-dim", "64", "--pass", "forward", "--rounds", "2", "--store"]) == 0
    text = capsys.readouterr().out
    assert "\ntable " in text or "\n       " in text
    device = registration.cuda_status()["devices"][0]
    for row in _tuned.load():
        assert tune.wrong(row, jax.devices("cuda")[0]) == ""
        found = _core.tile_row(arch=device["compute_capability"], pass_="forward", head_dim=64, gpu=device["name"])
        assert found["tuned"]
        assert found["row"] == row.row
