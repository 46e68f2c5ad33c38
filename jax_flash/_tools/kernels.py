"""``kernels build`` and ``kernels list``: the common variants of the CUDA kernels, or those of a function's calls,
compiled without a GPU; ``kernels clear`` empties the cache."""

import importlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_flash._native import _core, origins
from jax_flash._primitive import ahead
from jax_flash._tools.table import table

ARCHES = {
    "sm_70": 70,
    "sm_75": 75,
    "sm_80": 80,
    "sm_86": 86,
    "sm_89": 89,
    "sm_90": 90,
    "sm_90a": 90,
    "sm_100": 100,
    "sm_120": 120,
}
"""The values of --arch, and their compute capabilities."""

_HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
_CAUSAL = (False, True)

COMMON: tuple[dict[str, Any], ...] = (
    {
        "dtypes": ("float16", "bfloat16"),
        "head_dims": _HEAD_DIMS,
        "options": tuple({"causal": causal} for causal in _CAUSAL),
    },
    {
        "dtypes": ("float16",),  # with descale, float32's
        "head_dims": _HEAD_DIMS,
        "options": tuple({"causal": causal, "has_descale": True} for causal in _CAUSAL),
    },
)
"""The variants that are built ahead of time, and that wheels carry: of every entry each combination, in all passes that
a forward or a backward of a plain or causal call may take."""

COMMON_BELOW_80: tuple[dict[str, Any], ...] = (
    {
        "dtypes": ("float16",),
        "head_dims": _HEAD_DIMS,
        "options": tuple(
            {"causal": causal, "has_descale": scaled, "original_bfloat16": bfloat16, "separate_dq": True}
            for causal in _CAUSAL
            for scaled, bfloat16 in ((False, False), (True, False), (True, True))
        ),
    },
)
"""The same for Volta and Turing: float16 arrays, with and without the descale of converted float32 and bfloat16, and
the default backward of these GPUs."""

_CORE_SECONDS = 1.2
"""About how long a core compiles one kernel."""


def common(arch: int) -> tuple[dict[str, Any], ...]:
    """The variants that are built ahead of time for a compute capability such as 80."""
    return COMMON if arch >= 80 else COMMON_BELOW_80


_COLUMNS = {
    "registers": "registers",
    "shared_bytes": "shared",
    "threads": "threads",
    "spill_bytes": "spills",
    "local_bytes": "local",
    "cubin_bytes": "cubin",
}


def build(
    arches: Iterable[int] | None, out_dir: pathlib.Path, calls: Sequence[str] = (), *, packs: bool = False
) -> None:
    """Compiles the common variants for each of ``arches``, None for all, into ``out_dir``, or where ``calls`` name
    functions, as ``MODULE:FUNCTION``, the kernels of these. With ``packs`` in packs, as wheels have them. Raises
    RuntimeError, ValueError and OSError."""
    if out_dir.exists() and not out_dir.is_dir():
        raise NotADirectoryError(f"--out must name a folder, got a file: {out_dir}")
    out_dir.mkdir(parents=True, exist_ok=True)
    arches = ARCHES.values() if arches is None else arches
    functions = [named(call) for call in calls]
    kernels = _kernels_of(functions, arches, out_dir) if functions else _common_kernels(arches, out_dir)
    _show(kernels)
    size = sum(kernel["cubin_bytes"] for _, kernel in kernels)
    print(f"{len(kernels)} kernels, {size / 2**20:.1f} MiB of cubins, in {out_dir}")
    if packs:
        made = origins.pack(out_dir)
        print(f"packed into {sum(path.stat().st_size for path in made) / 2**20:.1f} MiB: ", end="")
        print(", ".join(path.name for path in made))


def named(name: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function that ``MODULE:FUNCTION`` returns, and its arguments."""
    module, _, function = name.partition(":")
    try:
        found, *arguments = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"--call must be MODULE:FUNCTION of a function that returns (function, *arguments), got {name}: {error}"
        ) from error
    return found, arguments


def variants_of(function: Callable[..., Any], arguments: Sequence[Any], arch: int) -> list[Mapping[str, Any]]:
    """The variants that a function's calls may take: for each call arguments of `_core.build_kernels`."""
    return [
        {
            "dtypes": [call.dtype],
            # They take multiples of 8; what calls pad to is what they were lowered with.
            "head_dims": [(call.head_dim, call.value_head_dim)],
            "options": [call.options],
            "passes": ahead.PASSES[call.pass_],
        }
        for call in ahead.calls_of(function, arguments, arch)
    ]


def _kernels_of(
    functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]], arches: Iterable[int], out_dir: pathlib.Path
) -> list[tuple[int, Mapping[str, Any]]]:
    def variants(arch: int) -> list[Mapping[str, Any]]:
        found = [one for function, arguments in functions for one in variants_of(function, arguments, arch)]
        if not found:
            raise ValueError(f"--call must name a function whose attention is served by the CUDA kernels of sm_{arch}")
        return found

    kernels = {(arch, row["name"]): row for arch, rows in compiled(arches, out_dir, variants) for row in rows}
    return [(arch, kernel) for (arch, _), kernel in kernels.items()]


def list_(arches: Iterable[int] | None) -> None:
    """Shows the common variants for each of ``arches``, or for all. Raises RuntimeError and OSError."""
    with tempfile.TemporaryDirectory(prefix="jax_flash_") as folder:
        _show(_common_kernels(ARCHES.values() if arches is None else arches, pathlib.Path(folder)))


def clear() -> None:
    """Removes the kernels from the cache and leaves its other files. Raises RuntimeError."""
    folder = _core.cache_path()
    files, size = _core.clear_cache()
    print(f"{files} kernels, {size / 2**20:.1f} MiB, removed from {folder}" if folder else "the kernel cache is off")


def compiled(
    arches: Iterable[int],
    out_dir: pathlib.Path,
    variants: Callable[[int], Sequence[Mapping[str, Any]]] = common,
) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """Compiles ``variants`` of every one of ``arches``, and says before how many these are. Raises RuntimeError,
    ValueError and OSError."""
    wanted = {arch: variants(arch) for arch in dict.fromkeys(arches)}
    counts = {arch: len(names(arch, groups)) for arch, groups in wanted.items()}
    cores = os.cpu_count() or 1
    print(
        f"compiling {sum(counts.values())} kernels on {cores} cores, {_duration(sum(counts.values()) / cores)}: "
        + ", ".join(f"{count} for sm_{arch}" for arch, count in counts.items()),
        file=sys.stderr,
        flush=True,
    )
    for arch, groups in wanted.items():
        print(f"compiling for sm_{arch} ...", file=sys.stderr, flush=True)
        try:
            built = [_core.build_kernels(arch=arch, out_dir=str(out_dir), **group) for group in groups]
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"sm_{arch}: {error}") from error
        yield arch, [row for rows in built for row in rows]


def names(arch: int, groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """The names of the kernels of variants."""
    return {
        name
        for group in groups
        for name in _core.kernel_names(arch=arch, **{key: x for key, x in group.items() if key != "family"})
    }


def _duration(kernels_each: float) -> str:
    seconds = kernels_each * _CORE_SECONDS
    return f"about {seconds / 60:.0f} minutes" if seconds > 90 else f"about {max(1, round(seconds))} s"


def _common_kernels(arches: Iterable[int], out_dir: pathlib.Path) -> list[tuple[int, Mapping[str, Any]]]:
    return [(arch, kernel) for arch, kernels in compiled(arches, out_dir) for kernel in kernels]


def _show(kernels: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    print("registers and local memory are a thread's, shared memory a block's; all but registers and threads in bytes")
    rows = [["arch", "variant", *_COLUMNS.values()]]
    rows += [[f"sm_{arch}", kernel["name"], *(str(kernel[key]) for key in _COLUMNS)] for arch, kernel in kernels]
    print(table(rows, right=range(2, len(rows[0]))))
