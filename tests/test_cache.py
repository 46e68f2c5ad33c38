"""The cubin cache: found again, repaired, shared by processes and threads, never in the way. No GPU is needed."""

import concurrent.futures
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest

from jax_flash import __main__
from jax_flash._native import _core, origins, registration, tuned
from jax_flash._tools import doctor

pytestmark = pytest.mark.skipif(
    not registration.cuda_status()["nvrtc"], reason="no NVRTC here (the [test] extra installs it on Linux)"
)

KERNEL = {
    "arch": 80, "pass_": "forward", "dtype": "bfloat16", "head_dim": 16, "value_head_dim": 16, "options": {}
}  # fmt: skip

WHOLE = f"""
import jax_flash
from jax_flash._native import _core
print(_core.fetch_kernel(**{KERNEL!r}))
"""


def fetching(
    sources: pathlib.Path = registration.SOURCES, kernel: dict[str, Any] = KERNEL, prebuilt: tuple[str, ...] = ()
) -> str:
    """The same with the compiled library alone, configured as by the package: importing JAX takes longer than
    compiling."""
    settings = {"prebuilt_dirs": list(prebuilt), "nvrtc_paths": registration.nvrtc_paths()}
    return f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_core", {_core.__file__!r})
_core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_core)
_core.configure_cuda(source_dir={str(sources)!r}, **{settings!r})
print(_core.fetch_kernel(**{kernel!r}))
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
        tmp_path / "file" / "cache", "from jax_flash._native import registration; print(registration.cuda_status())"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions don't stop root")
def test_read_only_folder(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o500)
    assert fetch(tmp_path) == "compiled"
    assert entries(tmp_path) == []


def test_read_only_mount() -> None:
    """No user can create a file in the kernel's own folder (/proc), not even root."""
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
    """An error of the compiler includes its log and the variant's name."""
    changed = tmp_path / "kernels"
    shutil.copytree(registration.SOURCES, changed)
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


# Names

EVERYTHING = {
    name: True
    for name in ("causal", "wide_bias", "has_q_offset", "has_q_lengths", "has_kv_lengths", "has_cu_q_lengths",
                 "has_cu_kv_lengths", "has_q_segment_ids", "has_kv_segment_ids", "has_q_segment_ranges",
                 "has_kv_segment_ranges", "has_mask", "has_dropout_seeds", "has_sinks", "has_alibi_slopes", "has_bias")
} | {"window_left": 5, "window_right": 7, "softcap": 2.0, "dropout_rate": 0.5}  # fmt: skip


@pytest.mark.slow
def test_names_of_many_options_are_short_enough(tmp_path: pathlib.Path) -> None:
    """Of 255 bytes, which file systems take; encrypted ones take 143, and a temporary name is up to 26 longer."""
    kernels = [{**KERNEL, "options": options} for options in (EVERYTHING, {**EVERYTHING, "has_sinks": False})]
    for kernel in kernels:
        assert fetch(tmp_path, fetching(kernel=kernel)) == "compiled"
    names = [entry.name for entry in entries(tmp_path)]
    assert len(set(names)) == 2
    for name in names:
        assert name.startswith("sm80-forward-bf16-d16-causal-")
        assert len(name) <= 143 - 26
    assert [fetch(tmp_path, fetching(kernel=kernel)) for kernel in kernels] == ["cached", "cached"]


def test_long_names_of_prebuilt_kernels(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "prebuilt"
    few = {"dtypes": ["bfloat16"], "head_dims": [(16, 16)], "options": [EVERYTHING], "passes": ["forward"]}
    (built,) = _core.build_kernels(arch=80, out_dir=str(folder), **few)
    assert len(built["name"]) + len("-0123456789abcdef.cubin") > 255, "else this shows nothing"
    assert entries(folder) == [pathlib.Path(built["path"])]
    (found,) = origins.prebuilt([str(folder)], [80])
    assert found.counts == found.usable == {80: 1}
    kernel = {**KERNEL, "options": EVERYTHING}
    assert fetch(tmp_path / "cache", fetching(kernel=kernel, prebuilt=(str(folder),))) == "prebuilt"


# Who may write

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
STRANGER = 12345


def mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_that_are_made_are_their_owners(tmp_path: pathlib.Path) -> None:
    open_to_all = "import os; os.umask(0)\n"
    assert fetch(tmp_path / "new" / "cache", open_to_all + FETCH) == "compiled"
    assert mode(tmp_path / "new") == mode(tmp_path / "new" / "cache") == 0o700
    (entry,) = entries(tmp_path / "new" / "cache")
    assert mode(entry) == 0o644


def test_stored_rows_make_the_same_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    tuned.store([])
    assert mode(tmp_path / "cache") == 0o700


def refused(folder: pathlib.Path, reason: str) -> None:
    """The folder is not used, one warning and doctor say so; unless the environment allows it."""
    before = entries(folder), mode(folder)
    (folder / tuned.FILE).write_text("{}")
    said = start(folder, WHOLE.replace("import jax_flash", "import warnings; warnings.simplefilter('always')\n"
                                       "import jax_flash, jax_flash._native.tuned\n"
                                       "jax_flash._native.tuned.in_use([])"))  # fmt: skip
    out, err = said.communicate(timeout=120)
    assert out.strip() == "compiled", err
    assert err.count("UserWarning") == 1, err
    for part in (str(folder), reason, "JAX_FLASH_CACHE_SHARED=1"):
        assert part in err
    (folder / tuned.FILE).unlink()
    assert (entries(folder), mode(folder)) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_FLASH_CACHE_DIR", str(folder))
        (row,) = (text for name, text in doctor.gpu_versions(doctor.machine()) if name == "kernel cache")
        assert row.startswith("not used")
        assert reason in row
        with pytest.raises(ValueError, match="not used"):
            tuned.load()
        with pytest.raises(OSError, match="can't be stored"):
            tuned.store([])
        assert __main__.main(["kernels", "clear"]) == 1
    assert (entries(folder), mode(folder)) == before


def test_a_folder_that_all_can_write_is_not_used(tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    assert fetch(cache) == "compiled"
    cache.chmod(0o770)
    assert fetch(cache) == "cached", "a group is trusted"
    for bits in (0o777, 0o1777, 0o702):
        cache.chmod(bits)
        refused(cache, "can be written by every user")
    assert fetch(cache, JAX_FLASH_CACHE_SHARED="0") == "compiled"
    assert fetch(cache, JAX_FLASH_CACHE_SHARED="1") == "cached"
    assert mode(cache) == 0o702, "nobody changes the mode of a folder that the user has named"


@needs_root
def test_a_folder_of_another_user_is_not_used(tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    assert fetch(cache) == "compiled"
    os.chown(cache, STRANGER, STRANGER)
    refused(cache, f"belongs to user {STRANGER}")
    assert fetch(cache, JAX_FLASH_CACHE_SHARED="1") == "cached"


@needs_root
def test_files_of_others_are_not_read(tmp_path: pathlib.Path) -> None:
    """Files of this user, root or the folder's owner are read; refused ones are compiled again."""
    assert fetch(tmp_path) == "compiled"
    (entry,) = entries(tmp_path)
    os.chown(entry, STRANGER, STRANGER)
    assert fetch(tmp_path, JAX_FLASH_CACHE_SHARED="1") == "cached"
    assert fetch(tmp_path) == "compiled"
    assert entry.stat().st_uid == os.geteuid()
    assert fetch(tmp_path) == "cached"


@needs_root
def test_a_user_takes_what_root_has_made() -> None:
    """By a process that gives up being root, in a folder of root's and then in one of its own."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for root alone
        os.chmod(folder, 0o755)
        cache = pathlib.Path(folder) / "cache"
        assert fetch(cache) == "compiled"
        cache.chmod(0o755)
        as_stranger = FETCH.replace("print(", f"import os; os.setgid({STRANGER}); os.setuid({STRANGER}); print(")
        assert fetch(cache, as_stranger) == "cached"
        os.chown(cache, STRANGER, STRANGER)
        assert fetch(cache, as_stranger) == "cached"


def test_files_that_all_can_write_are_not_read(tmp_path: pathlib.Path) -> None:
    assert fetch(tmp_path) == "compiled"
    (entry,) = entries(tmp_path)
    entry.chmod(0o666)
    assert fetch(tmp_path, JAX_FLASH_CACHE_SHARED="1") == "cached"
    assert fetch(tmp_path) == "compiled"
    assert mode(entry) & stat.S_IWOTH == 0


def test_links_and_pipes_are_not_read(tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    assert fetch(cache) == "compiled"
    (entry,) = entries(cache)
    elsewhere = tmp_path / "elsewhere"
    content = entry.read_bytes()
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    assert fetch(cache) == "compiled"
    assert entry.is_file()
    assert not entry.is_symlink()
    assert elsewhere.read_bytes() == content
    entry.unlink()
    os.mkfifo(entry)
    assert fetch(cache) == "compiled", "nor does it wait for somebody to write"
    assert fetch(cache) == "cached"


def test_prebuilt_kernels_may_be_links(tmp_path: pathlib.Path) -> None:
    """A package may be installed as a forest of them; its folder is trusted whoever may write there."""
    folder, store = tmp_path / "prebuilt", tmp_path / "store"
    few = {"dtypes": ["bfloat16"], "head_dims": [(16, 16)], "options": [{}], "passes": ["forward"]}
    (built,) = _core.build_kernels(arch=80, out_dir=str(folder), **few)
    entry = pathlib.Path(built["path"])
    entry.rename(store)
    entry.symlink_to(store)
    folder.chmod(0o777)
    assert fetch("", fetching(prebuilt=(str(folder),))) == "prebuilt"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = pathlib.Path(__file__).parent / "faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=120)
    return str(library)


def test_what_lies_where_a_file_is_to_be_is_not_written_to(tmp_path: pathlib.Path, faults: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    environment = {"LD_PRELOAD": faults, "FAULT_LINK": str(victim), "PYTHONDONTWRITEBYTECODE": "1"}
    cache = tmp_path / "cache"
    assert fetch(cache, **environment) == "compiled"
    assert victim.read_text() == "mine"
    assert not [entry for entry in entries(cache) if entry.suffix == ".cubin"]
    assert fetch(cache) == "compiled"
    assert fetch(cache) == "cached"


def test_a_listing_that_breaks_off_is_an_error(tmp_path: pathlib.Path, faults: str) -> None:
    """A part of the device sources would be other kernels."""
    listing = start(tmp_path, LD_PRELOAD=faults, FAULT_LISTING=str(registration.SOURCES))
    _, error = listing.communicate(timeout=120)
    assert listing.returncode != 0
    assert f"can't list the device sources in {registration.SOURCES}" in error
    assert entries(tmp_path) == []


# How large it may grow

DAY = 86400


def old_entry(cache: pathlib.Path, key: str, kibibytes: int, days: float) -> pathlib.Path:
    path = cache / f"sm80-forward-bf16-d64-sm_80-{key:0>16}.cubin"
    path.write_bytes(bytes(1024 * kibibytes))
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def test_what_was_not_used_for_longest_goes(tmp_path: pathlib.Path) -> None:
    older, old, recent = (old_entry(tmp_path, key, 400, days) for key, days in (("a", 9), ("b", 5), ("c", 1)))
    others = [tmp_path / name for name in (tuned.FILE, "notes.cubin", "sm80-forward-sm_80-xyz.cubin")]
    for other in others:
        other.write_bytes(bytes(1 << 20))
        os.utime(other, (0, 0))
    left, writing = (tmp_path / f"{old.name}.{pid}.7.tmp" for pid in (1, 2))
    left.write_bytes(b"x")
    writing.write_bytes(b"x")
    os.utime(left, (time.time() - 2 * 3600,) * 2)
    assert fetch(tmp_path, JAX_FLASH_CACHE_LIMIT="0") == "compiled", "0 is no limit"
    assert not left.exists(), "nobody is writing that any more"
    (new,) = tmp_path.glob("sm80-forward-bf16-d16-*")
    new.unlink()
    assert fetch(tmp_path, JAX_FLASH_CACHE_LIMIT="1") == "compiled"
    assert not older.exists()
    assert all(path.exists() for path in (old, recent, writing, *others))
    (new,) = tmp_path.glob("sm80-forward-bf16-d16-*")
    os.utime(new, (0, 0))
    assert fetch(tmp_path, JAX_FLASH_CACHE_LIMIT="1") == "cached"
    assert time.time() - new.stat().st_mtime < 3600, "it was used now"
    kernel = {**KERNEL, "head_dim": 24, "value_head_dim": 24}
    old_entry(tmp_path, "d", 1000, 0)
    assert fetch(tmp_path, fetching(kernel=kernel), JAX_FLASH_CACHE_LIMIT="1") == "compiled"
    assert not old.exists()
    assert not recent.exists()
    assert fetch(tmp_path, fetching(kernel=kernel)) == "cached", "what was made last stays"


def test_a_recent_use_is_not_written_down_again(tmp_path: pathlib.Path) -> None:
    assert fetch(tmp_path) == "compiled"
    (entry,) = entries(tmp_path)
    used = time.time() - 600
    os.utime(entry, (used, used))
    assert fetch(tmp_path) == "cached"
    assert entry.stat().st_mtime == pytest.approx(used, abs=1)


def test_processes_that_shrink_it_at_the_same_time(tmp_path: pathlib.Path) -> None:
    for i in range(256):
        old_entry(tmp_path, f"{i:x}", 20, 1 + i)
    kernels = [{**KERNEL, "head_dim": 8 * i} for i in (1, 2, 3, 4)]
    processes = [start(tmp_path, fetching(kernel=k), JAX_FLASH_CACHE_LIMIT="1") for k in kernels]
    assert {finish(process) for process in processes} == {"compiled"}
    assert sum(entry.stat().st_size for entry in entries(tmp_path)) <= 1 << 20
    assert len(list(tmp_path.glob("sm80-forward-bf16-d64-*"))) > 30, "no more goes than has to"
    assert [fetch(tmp_path, fetching(kernel=k)) for k in kernels] == ["cached"] * 4


@pytest.mark.parametrize("limit", ["lots", "-1", "1.5", "1 MiB", "99999999999999999999"])
def test_a_limit_that_is_none(tmp_path: pathlib.Path, limit: str) -> None:
    assert fetch(tmp_path, JAX_FLASH_CACHE_LIMIT=limit) == "compiled"
    assert entries(tmp_path) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
        patch.setenv("JAX_FLASH_CACHE_LIMIT", limit)
        assert _core.cache_refusal() == (
            f"JAX_FLASH_CACHE_LIMIT must be a number of MiB, or 0 for no limit, got {limit}"
        )


def test_clear(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(cache))
    assert __main__.main(["kernels", "clear"]) == 0
    assert capsys.readouterr().out == f"0 kernels, 0.0 MiB, removed from {cache}\n"
    assert not cache.exists()
    assert fetch(cache) == "compiled"
    old = old_entry(cache, "a", 1024, 3)
    kept = [cache / name for name in (tuned.FILE, "notes.cubin", "notes.tmp")]
    for path in kept:
        path.write_text("mine")
    old.with_name(f"{old.name}.1.7.tmp").write_text("unfinished")
    assert __main__.main(["kernels", "clear"]) == 0
    assert capsys.readouterr().out.startswith("2 kernels, 1.")
    assert entries(cache) == sorted(kept)
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "")
    assert __main__.main(["kernels", "clear"]) == 0
    assert capsys.readouterr().out == "the kernel cache is off\n"
