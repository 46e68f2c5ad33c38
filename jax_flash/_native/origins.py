"""Where the kernels of a GPU come from: built ahead of time, or compiled by an NVRTC that knows the GPU.

All but `prebuilt` are functions of a record such as `registration.cuda_status()` returns, so that they also work for a
machine other than this one.
"""

import collections
import dataclasses
import logging
import lzma
import pathlib
import re
import tarfile
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_OLDEST = {13: 75}
"""The lowest compute capability that an NVRTC compiles for, by its major version, if that excludes a kernel family:
CUDA 13 dropped Maxwell, Pascal and Volta."""

PACK = "sm_{}.tar.xz"
"""The name of a pack, by compute capability such as 90: the cubins for it in one compressed archive. Kernels resemble
each other, so that together they take 0.06 of their size, and each by itself, as in a wheel without packs, 0.24."""

_NAME = re.compile(
    r"\w+-(?P<pass_>forward|backward)-(?P<dtype>f16|bf16)-d(?P<head_dim>\d+)(?P<causal>-causal)?-sm_\d+-[0-9a-f]+"
)
"""The name of a common variant's file."""


@dataclasses.dataclass(frozen=True)
class Prebuilt:
    """A folder of kernels that were built ahead of time.

    Attributes:
      folder: where it is.
      counts: how many kernels it holds, by compute capability (70 for 7.0).
      stale: the compute capabilities whose kernels were built from other sources, and so are not used.
    """

    folder: str
    counts: Mapping[int, int]
    stale: frozenset[int]

    @property
    def usable(self) -> dict[int, int]:
        return {arch: count for arch, count in self.counts.items() if arch not in self.stale}

    def __str__(self) -> str:
        kernels = [
            f"{count} for sm_{arch}"
            + (" of another version of jax_flash, which are not used" if arch in self.stale else "")
            for arch, count in sorted(self.counts.items())
        ]
        return f"{', '.join(kernels) or 'none'} in {self.folder}"


def pack(folder: pathlib.Path) -> list[pathlib.Path]:
    """Makes packs of the cubins in a folder, and removes these; returns the packs. Raises OSError."""
    packs = []
    for arch, files in sorted(_by_arch(folder.glob("*-sm_*-*.cubin")).items()):
        path = folder / PACK.format(arch)
        with tarfile.open(path, "w:xz", preset=9) as archive:
            for file in sorted(files):
                entry = tarfile.TarInfo(file.name)  # without times and owners: equal kernels make an equal pack
                entry.size = file.stat().st_size
                with file.open("rb") as content:
                    archive.addfile(entry, content)
        for file in files:
            file.unlink()
        packs.append(path)
    return packs


def unpack(folders: Iterable[str], arch: int) -> dict[str, bytes]:
    """The files of the packs for a compute capability such as 90, by name; of a damaged pack those before the damage.

    The first folder that has a file wins.
    """
    found: dict[str, bytes] = {}
    for folder in folders:
        path = pathlib.Path(folder) / PACK.format(arch)
        try:
            with tarfile.open(path, "r:xz") as archive:
                for member in archive:
                    if (file := archive.extractfile(member)) is not None:
                        found.setdefault(member.name, file.read())
        except FileNotFoundError:
            continue
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
            # What it lacks is compiled. A warning may not leave the thread that XLA calls kernels on.
            logging.getLogger("jax_flash").warning("jax_flash: can't read the kernels in %s: %s", path, error)
    return found


def _by_arch(paths: Iterable[pathlib.Path]) -> dict[int, list[pathlib.Path]]:
    found = collections.defaultdict(list)
    for path in paths:
        found[int(path.stem.rsplit("-sm_", 1)[1].split("-")[0])].append(path)
    return dict(found)


def prebuilt(folders: Iterable[str], arches: Collection[int]) -> list[Prebuilt]:
    """The kernels in the folders, and for the compute capabilities in ``arches`` whether they are of these sources."""
    found = []
    for folder in folders:
        files = {
            arch: [path.stem for path in sorted(paths)]
            for arch, paths in _by_arch(pathlib.Path(folder).glob("*-sm_*-*.cubin")).items()
        }
        for path in pathlib.Path(folder).glob(PACK.format("*")):
            arch = int(path.name.removeprefix("sm_").split(".")[0])
            names = sorted(name.removesuffix(".cubin") for name in unpack([folder], arch))
            files[arch] = files.get(arch, []) + names
        stale = frozenset(arch for arch in arches if arch in files and not _fits(arch, files[arch]))
        found.append(Prebuilt(folder, {arch: len(names) for arch, names in files.items()}, stale))
    return found


def _fits(arch: int, names: Iterable[str]) -> bool:
    """Whether the kernels with these names are used; True if none of them is of a kind that can be checked."""
    from jax_flash._native import _core  # imported here, since it is registration that explains a missing library

    match = next(filter(None, map(_NAME.fullmatch, names)), None)
    if match is None:
        return True
    head_dim = int(match["head_dim"])
    try:
        origin = _core.fetch_kernel(
            arch=arch,
            pass_=match["pass_"],
            dtype={"f16": "float16", "bf16": "bfloat16"}[match["dtype"]],
            head_dim=head_dim,
            value_head_dim=head_dim,
            options={"causal": bool(match["causal"])},
        )
    except (RuntimeError, ValueError):  # no NVRTC to compile it with instead, or no family for this GPU
        return False
    return origin == "prebuilt"


def name(compute_capability: int) -> str:
    """7.0 for 70."""
    return f"{compute_capability // 10}.{compute_capability % 10}"


def nvrtc_for(compute_capability: int, nvrtc: Iterable[str]) -> str | None:
    """The version, as "12.9", of the NVRTC among ``nvrtc`` that compiles for a GPU; None if none does.

    Args:
      compute_capability: 70 for 7.0.
      nvrtc: as in the status record, "12.9 (path)" each.
    """
    for entry in nvrtc:
        version = entry.split(" ", 1)[0]
        if compute_capability >= _OLDEST.get(int(version.split(".")[0]), 0):
            return version
    return None


def uncompiled(compute_capability: int, status: Mapping[str, Any]) -> str | None:
    """Why no kernel can be compiled for a GPU, and what to install; None if an NVRTC compiles for it."""
    if nvrtc_for(compute_capability, status["nvrtc"]):
        return None
    if not status["nvrtc"]:
        extras = " or ".join(f"jax[cuda{cuda}]" for cuda in cuda_versions(compute_capability))
        return f"no NVRTC to compile kernels with, install {extras} ({status['nvrtc_error'] or 'no reason given'})"
    versions = " and ".join(f"NVRTC {entry.split(' ', 1)[0]}" for entry in status["nvrtc"])
    return (
        f"{versions} {'does' if len(status['nvrtc']) == 1 else 'do'} not compile for compute capability "
        f"{name(compute_capability)}: install jax[cuda12], whose NVRTC 12 does"
    )


def cuda_versions(compute_capability: int) -> tuple[int, ...]:
    """The major versions of CUDA, as in jax[cuda12], that support a GPU."""
    return tuple(cuda for cuda in (12, 13) if compute_capability >= _OLDEST.get(cuda, 0))
