"""``kernels build`` and ``list``: the common variants of the CUDA kernels, or those of a function's calls, compiled
without a GPU; ``kernels clear`` empties the cache."""

import importlib
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_flash._native import _core
from jax_flash._primitive import ahead
from jax_flash._tools.table import table

ARCHES = {"sm_70": 70, "sm_75": 75, "sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90, "sm_90a": 90}
"""The values of --arch, and their compute capabilities."""

COMMON: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "head_dims": ((64, 64), (96, 96), (128, 128), (256, 256)),
    "options": ({"causal": False}, {"causal": True}),
}
"""The variants that are built ahead of time: every combination, forward and backward."""

COMMON_BELOW_80: dict[str, Any] = {
    "dtypes": ("float16",),
    "head_dims": COMMON["head_dims"],
    "options": tuple(
        {"causal": causal, "has_descale": scaled, "original_bfloat16": bfloat16, "separate_dq": True}
        for causal in (False, True)
        for scaled, bfloat16 in ((False, False), (True, False), (True, True))
    ),
}
"""The same for Volta and Turing: float16 arrays, with and without the descale of converted float32 and bfloat16, and
the default backward of these GPUs."""


def common(arch: int) -> dict[str, Any]:
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


def build(arches: Iterable[int], out_dir: pathlib.Path, calls: Sequence[str] = ()) -> None:
    """Compiles the common variants for each of ``arches`` into ``out_dir``, or where ``calls`` name functions, as
    ``MODULE:FUNCTION``, the kernels of these. Raises RuntimeError, ValueError and OSError."""
    if out_dir.exists() and not out_dir.is_dir():
        raise NotADirectoryError(f"--out must name a folder, got a file: {out_dir}")
    out_dir.mkdir(parents=True, exist_ok=True)
    named = [_named(call) for call in calls]
    kernels = _kernels_of(named, arches, out_dir) if named else _common_kernels(arches, out_dir)
    _show(kernels)
    size = sum(kernel["cubin_bytes"] for _, kernel in kernels)
    print(f"{len(kernels)} kernels, {size / 2**20:.1f} MiB of cubins, in {out_dir}")


def _named(name: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function that ``MODULE:FUNCTION`` returns, and its arguments."""
    module, _, function = name.partition(":")
    try:
        found, *arguments = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"--call must be MODULE:FUNCTION of a function that returns (function, *arguments), got {name}: {error}"
        ) from error
    return found, arguments


def _kernels_of(
    named: Sequence[tuple[Callable[..., Any], Sequence[Any]]], arches: Iterable[int], out_dir: pathlib.Path
) -> list[tuple[int, Mapping[str, Any]]]:
    found: dict[tuple[int, str], Mapping[str, Any]] = {}
    for arch in dict.fromkeys(arches):
        calls = [call for function, arguments in named for call in ahead.calls_of(function, arguments, arch)]
        if not calls:
            raise ValueError(f"--call must name a function whose attention is served by the CUDA kernels of sm_{arch}")
        for call in calls:

            def variants(_: int, call: ahead.Call = call) -> Mapping[str, Any]:
                # They take multiples of 8; what calls pad to is what they were lowered with.
                sizes = [(call.head_dim, call.value_head_dim)]
                on_call = {"dtypes": [call.dtype], "head_dims": sizes, "options": [call.options]}
                return on_call | {"passes": ahead.PASSES[call.pass_]}

            for _, kernels in compiled([arch], out_dir, variants):
                found |= {(arch, kernel["name"]): kernel for kernel in kernels}
    return [(arch, kernel) for (arch, _), kernel in found.items()]


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
    arches: Iterable[int], out_dir: pathlib.Path, variants: Callable[[int], Mapping[str, Any]] = common
) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """Compiles ``variants`` of every one of ``arches``. Raises RuntimeError and OSError."""
    for arch in dict.fromkeys(arches):
        print(f"compiling for sm_{arch} ...", file=sys.stderr, flush=True)
        try:
            yield arch, _core.build_kernels(arch=arch, out_dir=str(out_dir), **variants(arch))
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"sm_{arch}: {error}") from error


def _common_kernels(arches: Iterable[int], out_dir: pathlib.Path) -> list[tuple[int, Mapping[str, Any]]]:
    return [(arch, kernel) for arch, kernels in compiled(arches, out_dir) for kernel in kernels]


def _show(kernels: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    print("registers and local memory are a thread's, shared memory a block's; all but registers and threads in bytes")
    rows = [["arch", "variant", *_COLUMNS.values()]]
    rows += [[f"sm_{arch}", kernel["name"], *(str(kernel[key]) for key in _COLUMNS)] for arch, kernel in kernels]
    print(table(rows, right=range(2, len(rows[0]))))
