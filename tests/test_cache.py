"""The cubin cache: found again, repaired, shared by processes and threads, never in the way. No GPU is needed."""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from jax_flash import _core, _registration

pytestmark = pytest.mark.skipif(
    not _registration.cuda_status()["nvrtc"], reason="no NVRTC here (the [test] extra installs it on Linux)"
)

KERNEL = {
    "arch": 80, "pass_": "forward", "dtype": "bfloat16", "head_dim": 16, "value_head_dim": 16, "options": {}
}  # fmt: skip

WHOLE = f"""
import jax_flash
from jax_flash import _core
print(_core.fetch_kernel(**{KERNEL!r}))
"""


def fetching(sources: pathlib.Path = _registration.SOURCES) -> str:
    """The same by the compiled library alone, told what the package tells it: without the import of JAX, which takes
    longer than the compiler."""
    return f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_core", {_core.__file__!r})
_core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_core)
_core.configure_cuda(source_dir={str(sources)!r}, prebuilt_dirs=[], nvrtc_paths={_registration.nvrtc_paths()!r})
print(_core.fetch_kernel(**{KERNEL!r}))
"""


FETCH = fetching()


def start(cache: pathlib.Path | str, code: str = FETCH, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_FLASH_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def fetch(cache: pathlib.Path | str, code: str = FETCH, **environment: str) -> str:
    return finish(start(cache, code, **environment))


def entries(cache: pathlib.Path) -> list[pathlib.Path]:
    return sorted(cache.iterdir())


def test_second_process_finds_it(tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "new" / "cache"
    assert fetch(cache, WHOLE) == "compiled"
    (entry,) = entries(cache)
    assert entry.name.startswith("sm80-forward-bf16-d16-sm_80-")
    assert entry.suffix == ".cubin"
    assert entry.read_bytes()[:4] == b"\x7fELF"
    assert fetch(cache, WHOLE) == fetch(cache) == "cached"


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "of another kernel"])
def test_damage_is_found_and_mended(tmp_path: pathlib.Path, damage: str) -> None:
    assert fetch(tmp_path) == "compiled"
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    if damage == "flipped":
        middle = len(whole) // 2
        entry.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    elif damage == "cut":
        entry.write_bytes(whole[:-100])
    elif damage == "empty":
        entry.write_bytes(b"")
    else:
        other = tmp_path / "other"
        fetch(other, FETCH.replace("'head_dim': 16", "'head_dim': 24"))
        entry.write_bytes(entries(other)[0].read_bytes())
    assert fetch(tmp_path) == "compiled"
    assert entry.read_bytes() == whole
    assert fetch(tmp_path) == "cached"


def test_concurrent_processes(tmp_path: pathlib.Path) -> None:
    processes = [start(tmp_path) for _ in range(4)]
    assert {finish(process) for process in processes} <= {"compiled", "cached"}
    assert len(entries(tmp_path)) == 1, "one entry, and no temporary file left"
    assert fetch(tmp_path) == "cached"


def test_concurrent_threads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    kernels = [{**KERNEL, "head_dim": head_dim} for head_dim in (8, 16, 24, 8, 16, 24)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda kernel: _core.fetch_kernel(**kernel), kernels)) <= {"compiled", "cached"}
    assert len(entries(tmp_path)) == 3


def test_folder_that_can_not_be_made(tmp_path: pathlib.Path) -> None:
    """A cache below a file can't exist, not even for root, whom permissions don't stop."""
    (tmp_path / "file").write_text("in the way")
    assert fetch(tmp_path / "file" / "cache") == "compiled"
    assert "cache_dir': ''" in fetch(
        tmp_path / "file" / "cache", "from jax_flash import _registration; print(_registration.cuda_status())"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions don't stop root")
def test_read_only_folder(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o500)
    assert fetch(tmp_path) == "compiled"
    assert entries(tmp_path) == []


def test_read_only_mount() -> None:
    """The kernel's own folder takes no file from anybody, root included."""
    assert fetch("/proc/self") == "compiled"


def test_full_disk(tmp_path: pathlib.Path) -> None:
    """A limit on the size of files stands for a disk that fills up while the entry is written."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    assert fetch(tmp_path, limit + FETCH, PYTHONDONTWRITEBYTECODE="1") == "compiled"
    assert entries(tmp_path) == [], "neither an entry nor a temporary file"
    assert fetch(tmp_path) == "compiled"


def test_cache_can_be_switched_off() -> None:
    assert fetch("") == "compiled"


def test_default_folder(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("JAX_FLASH_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", FETCH], env=environment, check=True, timeout=120)
    assert len(entries(tmp_path / "jax_flash")) == 1


def test_prebuilt_comes_first(tmp_path: pathlib.Path) -> None:
    prebuilt, cache = tmp_path / "prebuilt", tmp_path / "cache"
    few = {"dtypes": ["bfloat16"], "head_dims": [(16, 16)], "options": [{}], "passes": ["forward"]}
    _core.build_kernels(arch=80, out_dir=str(prebuilt), **few)
    assert fetch(cache, WHOLE, JAX_FLASH_PREBUILT_DIR=str(prebuilt)) == "prebuilt"
    assert not cache.exists()
    assert fetch(cache, WHOLE.replace("'arch': 80", "'arch': 90"), JAX_FLASH_PREBUILT_DIR=str(prebuilt)) == "compiled"


def test_changed_source_is_another_kernel(tmp_path: pathlib.Path) -> None:
    """And an error of the compiler comes with its log and the variant's name."""
    changed = tmp_path / "kernels"
    shutil.copytree(_registration.SOURCES, changed)
    elsewhere = fetching(changed)
    cache = tmp_path / "cache"
    assert fetch(cache) == "compiled"
    assert fetch(cache, elsewhere) == "cached", "the same sources elsewhere are the same kernel"
    kernel = changed / "cuda/sm80/forward.cu"
    kernel.write_text(kernel.read_text() + "// one more line\n")
    assert fetch(cache, elsewhere) == "compiled"
    kernel.write_text(kernel.read_text() + "this does not compile\n")
    broken = start(cache, elsewhere)
    _, error = broken.communicate(timeout=120)
    assert broken.returncode != 0
    assert "can't compile kernel sm80-forward-bf16-d16-sm_80" in error
    assert "forward.cu" in error
    assert "this does not compile" in error
