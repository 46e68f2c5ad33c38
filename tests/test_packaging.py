"""What is shipped: workflows, the configuration of wheels, packs of kernels, and what ./run does to a machine."""

import concurrent.futures
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

import pytest
from test_cache import KERNEL

from jax_flash._native import _core, origins, registration
from jax_flash._tools import kernels

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.name for path in WORKFLOWS])
def test_workflows_are_valid(path: pathlib.Path) -> None:
    """By GitHub's own schema, which check-jsonschema carries."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_run_what_is_there() -> None:
    """Their commands of ./run, and the workflows that they call."""
    usage = subprocess.run([ROOT / "run", "help"], capture_output=True, text=True, check=True).stdout
    commands = set(re.findall(r"^  (\w+) +\S", usage, flags=re.MULTILINE))
    text = "".join(path.read_text() for path in WORKFLOWS)
    used = set(re.findall(r"\./run (\w+)", text))
    assert {"lint", "docs", "test"} <= used <= commands
    called = re.findall(r"uses: \./(\S+)", text)
    assert called
    assert all((ROOT / name).is_file() for name in called)


def test_wheels_of_every_platform() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    assert settings["build"] == ["cp311-*", "cp312-*"]
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"  # of the stable ABI from there on
    runners = (ROOT / ".github/workflows/wheels.yml").read_text()
    for runner in ("ubuntu-24.04", "ubuntu-24.04-arm", "macos-14"):
        assert f"- {runner}" in runners
    assert "JAX_FLASH_PREBUILT=/project/prebuilt" in runners
    # The oldest headers that are supported, and no jax too new.
    oldest = next(x for x in PROJECT["build-system"]["requires"] if x.startswith("jaxlib=="))
    assert oldest.removeprefix("jaxlib==").startswith("0.9.0")
    assert [x for x in PROJECT["project"]["dependencies"] if x.startswith("jax")] == ["jax>=0.9", "jaxlib>=0.9"]


def version_of(folder: pathlib.Path) -> str:
    """By the configuration of this project, for a folder with its pyproject.toml."""
    code = "import setuptools_scm; print(setuptools_scm.get_version(root='.', **{}))"
    settings = PROJECT["tool"]["setuptools_scm"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code.format(repr(settings))],
        cwd=folder,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def git(folder: pathlib.Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_versions_of_tags(tmp_path: pathlib.Path) -> None:
    """Also where there are none, in a shallow clone, and without git."""
    there = tmp_path / "there"
    there.mkdir()
    assert version_of(there) == "0.1.0.dev0"
    git(there, "init")
    git(there, "commit", "--allow-empty", "-m", "one")
    assert re.match(r"0\.1(\.0)?\.dev\d+\+g[0-9a-f]+", version_of(there))
    git(there, "tag", "v0.3.0")
    assert version_of(there) == "0.3.0"
    git(there, "commit", "--allow-empty", "-m", "two")
    assert re.match(r"0\.3\.1\.dev1\+g[0-9a-f]+", version_of(there))
    git(tmp_path, "clone", "--depth", "1", "--no-tags", f"file://{there}", "shallow")
    assert re.match(r"0\.1(\.0)?\.dev\d+\+g[0-9a-f]+", version_of(tmp_path / "shallow"))


# Packs


def test_packs_hold_what_was_built(tmp_path: pathlib.Path) -> None:
    names = ["sm80-forward-f16-d64-sm_80-0123456789abcdef.cubin", "sm80-backward-f16-d64-sm_80-0123456789abcdef.cubin"]
    other = "sm80-forward-f16-d64-sm_120-0123456789abcdef.cubin"
    for number, name in enumerate([*names, other]):
        (tmp_path / name).write_bytes(bytes([number]) * 5000)
    (tmp_path / "tuned.json").write_text("{}")
    assert [path.name for path in origins.pack(tmp_path)] == ["sm_80.tar.xz", "sm_120.tar.xz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sm_120.tar.xz", "sm_80.tar.xz", "tuned.json"]
    assert origins.unpack([str(tmp_path)], 80) == {name: bytes([n]) * 5000 for n, name in enumerate(names)}
    assert origins.unpack([str(tmp_path)], 90) == {}
    (found,) = origins.prebuilt([str(tmp_path)], [])
    assert found.counts == {80: 2, 120: 1}
    # Equal kernels make equal packs, whenever they were built.
    first = (tmp_path / "sm_120.tar.xz").read_bytes()
    (tmp_path / other).write_bytes(bytes([2]) * 5000)
    origins.pack(tmp_path)
    assert (tmp_path / "sm_120.tar.xz").read_bytes() == first


def test_the_first_folder_wins(tmp_path: pathlib.Path) -> None:
    name = "sm80-forward-f16-d64-sm_80-0123456789abcdef.cubin"
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(bytes([number]))
        origins.pack(tmp_path / folder)
    assert origins.unpack([str(tmp_path / "a"), str(tmp_path / "b")], 80) == {name: b"\0"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "no archive"])
def test_a_damaged_pack_is_no_pack(tmp_path: pathlib.Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        name = f"sm80-forward-f16-d{8 * number}-sm_80-0123456789abcdef.cubin"
        (tmp_path / name).write_bytes(os.urandom(20000))
    (path,) = origins.pack(tmp_path)
    whole = path.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :]
    path.write_bytes({"cut": whole[:half], "flipped": flipped, "no archive": b"text"}[damage])
    with caplog.at_level(logging.WARNING, "jax_flash"):
        assert len(origins.unpack([str(tmp_path)], 80)) < 3
    assert f"can't read the kernels in {path}" in caplog.text


@pytest.mark.skipif(not registration.cuda_status()["nvrtc"], reason="no NVRTC here (the [test] extra installs it)")
def test_calls_take_their_kernels_from_packs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked once, when a kernel is first asked for, from any thread; what a pack lacks is compiled."""
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "")
    monkeypatch.setenv("JAX_FLASH_NOTICE_SECONDS", "off")
    folder = str(tmp_path)
    variants = {"dtypes": ["bfloat16"], "head_dims": [(16, 16)], "options": [{}], "passes": ["forward"]}
    _core.build_kernels(arch=80, out_dir=folder, **variants)
    assert [path.name for path in origins.pack(tmp_path)] == ["sm_80.tar.xz"]
    asked: list[int] = []

    def packed(arch: int) -> dict[str, bytes]:
        asked.append(arch)
        return origins.unpack([folder], arch)

    settings = {"source_dir": str(registration.SOURCES), "nvrtc_paths": registration.nvrtc_paths()}
    fetch = functools.partial(_core.fetch_kernel, **KERNEL)
    try:
        _core.configure_cuda(prebuilt_dirs=[folder], packed=packed, **settings)
        assert asked == []
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert {future.result() for future in [pool.submit(fetch) for _ in range(8)]} == {"prebuilt"}
        assert asked == [80]
        assert fetch(head_dim=24, value_head_dim=24) == "compiled"
        _core.configure_cuda(prebuilt_dirs=[folder], **settings)
        assert fetch() == "compiled"

        def broken(arch: int) -> dict[str, bytes]:
            raise OSError(f"no disk for sm_{arch}")

        _core.configure_cuda(prebuilt_dirs=[folder], packed=broken, **settings)
        with pytest.raises(RuntimeError, match="no disk for sm_80"):
            fetch()
    finally:
        registration.configure(registration.SOURCES)


def test_packs_are_named_for_what_wheels_carry() -> None:
    assert {origins.PACK.format(arch) for arch in kernels.ARCHES.values()} >= {"sm_70.tar.xz", "sm_120.tar.xz"}


# ./run


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """What ./run reads before it compiles."""
    for name in ("run", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc").mkdir()
    return tmp_path


def run(checkout: pathlib.Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_FLASH_")}
    return subprocess.run(
        [checkout / "run", *arguments],
        env={**inherited, "JAX_FLASH_CUDA": "none", "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def program(folder: pathlib.Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("command", [("train",), ("docs",), ("setup",)])
def test_an_environment_of_others_is_left_alone(checkout: pathlib.Path, command: tuple[str, ...]) -> None:
    folder = checkout / (".venv-docs" if command == ("docs",) else ".venv")
    folder.mkdir()
    (folder / "mine").write_text("")
    done = run(checkout, *command)
    assert done.returncode == 1
    assert f"{folder.name} is there but was not made by ./run: move it away" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_system_packages_are_installed_only_when_asked_for(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On a machine that lacks a compiler, by a false apt-get that notes how it was called."""
    programs, noted = tmp_path / "programs", tmp_path / "noted"
    program(programs, "apt-get", f'echo "$@" >>{noted}')
    absent = {"CXX": "no-such-compiler", "PATH": f"{programs}:{os.environ['PATH']}"}
    done = run(checkout, "train", **absent)
    assert done.returncode == 1
    assert "sudo apt-get install g++" in done.stderr
    assert "./run setup --system" in done.stderr
    assert not noted.exists()
    if os.geteuid() == 0:
        done = run(checkout, "setup", "--system", "train", **absent)
        assert noted.read_text().splitlines()[0] == "update -qq"
        assert noted.read_text().splitlines()[1] == "install -qq -y --no-install-recommends g++"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(("fly",), "no command fly"), (("setup", "fly"), "setup takes --system and one of train, ")],
)
def test_bad_commands(checkout: pathlib.Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = run(checkout, *arguments)
    assert done.returncode == 1
    assert complaint in done.stderr


def test_requirements_of_extras(checkout: pathlib.Path) -> None:
    """Those that extras name are among them, without the package itself."""
    script = (ROOT / "run").read_text()
    code = re.search(r"<<'PYTHON'\n(.*?)\nPYTHON", script, flags=re.DOTALL)
    assert code
    done = subprocess.run(
        [sys.executable, "-c", code[1], "dev,cuda13"], cwd=checkout, capture_output=True, text=True, check=True
    )
    lines = done.stdout.split("\n")
    extras = PROJECT["project"]["optional-dependencies"]
    for extra in ("dev", "test", "bench", "examples", "flax", "cuda13"):
        assert {x for x in extras[extra] if not x.startswith("jax_flash[")} <= set(lines)
    assert not any(line.startswith("jax_flash") for line in lines)


def test_no_archive_leads_out_of_a_folder(tmp_path: pathlib.Path) -> None:
    """A pack's files are read into memory and never written."""
    path = tmp_path / "sm_80.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        archive.addfile(tarfile.TarInfo("../evil.cubin"))
    assert json.dumps(list(origins.unpack([str(tmp_path)], 80))) == '["../evil.cubin"]'
    assert sorted(tmp_path.iterdir()) == [path]
    assert not (tmp_path.parent / "evil.cubin").exists()
