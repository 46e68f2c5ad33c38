"""The ladder: every step can be undone in the current kernels, and the versions without it compile."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import pytest

from jax_flash._native import _core, registration, tuned
from jax_flash._tools.bench import ladder

GPU = "NVIDIA H200"
ALL = list(ladder.LADDERS)
ARCH = {"sm80": 90, "sm90a": 90}  # both on the GPU that they are measured on


@pytest.fixture(autouse=True)
def restored(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    with ladder._restored():
        yield


@pytest.mark.parametrize(("family", "pass_"), ALL)
def test_from_everything_undone_to_nothing(family: str, pass_: str, tmp_path: pathlib.Path) -> None:
    rungs = ladder.rungs(family, pass_)
    assert len({rung.name for rung in rungs}) == len(rungs) >= 6
    assert not rungs[-1].undone
    assert not rungs[-1].rows
    for before, after in itertools.pairwise(rungs):
        assert set(after.undone) <= set(before.undone)
        assert after != dataclasses.replace(before, name=after.name), "a step changes something"
    for i, rung in enumerate(rungs):
        folder = ladder.sources_of(rung, tmp_path / str(i))
        assert (folder == registration.SOURCES) == (not rung.undone)


def test_a_kernel_that_has_changed_is_told(tmp_path: pathlib.Path) -> None:
    gone = ladder.Undo("sm90a/forward.cu", "what nobody wrote", "")
    with pytest.raises(RuntimeError, match=r"what sm90a/forward.cu has once, but has 0 times: 'what nobody wrote'"):
        ladder.sources_of(ladder.Rung("x", (gone,), {}), tmp_path / "0")
    many = ladder.Undo("sm90a/forward.cu", "barrier_wait", "")
    with pytest.raises(RuntimeError, match=r"has once, but has \d+ times"):
        ladder.sources_of(ladder.Rung("x", (many,), {}), tmp_path / "1")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", ladder.HEAD_DIMS)
@pytest.mark.parametrize(("family", "pass_"), ALL)
def test_the_plainest_version_compiles(
    family: str, pass_: str, head_dim: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all steps undone at once. Its row is the plain one, and its sources are others."""
    monkeypatch.setenv("JAX_FLASH_CUDA_FAMILY", family)
    rung, *_, last = ladder.rungs(family, pass_)
    folder = ladder.sources_of(rung, tmp_path / "sources")
    before = _core.sources_key()
    ladder._select(GPU, family, pass_, head_dim, folder, ladder.row_of(rung, head_dim))
    assert _core.sources_key() != before
    options = {"causal": True, "separate_dq": pass_ == "backward" and family == "sm90a" and head_dim > 128}
    origin = _core.fetch_kernel(
        arch=ARCH[family], pass_=pass_, dtype="bfloat16", head_dim=head_dim, value_head_dim=head_dim, options=options,
        gpu=GPU,
    )  # fmt: skip
    assert origin == "compiled"
    (cubin,) = (tmp_path / "cache").glob("*.cubin")
    block_q, block_kv, warps, stages = rung.rows[head_dim]
    assert f"-block_q{block_q}-block_kv{block_kv}-warps{warps}-stages{stages}-" in cubin.name
    assert ladder.row_of(last, head_dim) is None


def test_restored() -> None:
    key = _core.sources_key()
    with ladder._restored():
        tuned.tell(
            [tuned.TunedRow(GPU, "sm90a", "forward", 64, _core.tile_row(arch=90, pass_="forward", head_dim=64)["row"])]
        )
    assert not _core.tile_row(arch=90, pass_="forward", head_dim=64, gpu=GPU)["tuned"]
    assert _core.sources_key() == key
