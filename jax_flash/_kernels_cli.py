"""``kernels build``, ``list`` and ``model``: the common variants of the CUDA kernels, compiled without a GPU. And
``kernels clear``, for the cache of compiled ones."""

import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_flash import _core, _model
from jax_flash._table import table

ARCHES = {"sm_70": 70, "sm_75": 75, "sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90, "sm_90a": 90}
"""What --arch takes, and the compute capability that it stands for."""

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
        {"causal": causal, "has_unscales": scaled, "deterministic": True}
        for causal in (False, True)
        for scaled in (False, True)
    ),
}
"""The same for Volta and Turing: float16 arrays, also with the factors of those that stand for bfloat16 and float32,
and the backward that is the default there."""


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


def build(arches: Iterable[int], out_dir: pathlib.Path) -> None:
    """Compiles the common variants for each of ``arches`` into ``out_dir``. Raises RuntimeError and OSError."""
    if out_dir.exists() and not out_dir.is_dir():
        raise NotADirectoryError(f"--out must name a folder, got a file: {out_dir}")
    out_dir.mkdir(parents=True, exist_ok=True)
    kernels = _compiled(arches, out_dir)
    _show(kernels)
    size = sum(kernel["cubin_bytes"] for _, kernel in kernels)
    print(f"{len(kernels)} kernels, {size / 2**20:.1f} MiB of cubins, in {out_dir}")


def list_(arches: Iterable[int] | None) -> None:
    """Shows the common variants for each of ``arches``, or for all. Raises RuntimeError and OSError."""
    with tempfile.TemporaryDirectory(prefix="jax_flash_") as folder:
        _show(_compiled(ARCHES.values() if arches is None else arches, pathlib.Path(folder)))


def clear() -> None:
    """Removes the kernels from the cache, and nothing else that is there. Raises RuntimeError."""
    folder = _core.cache_path()
    files, size = _core.clear_cache()
    print(f"{files} kernels, {size / 2**20:.1f} MiB, removed from {folder}" if folder else "the kernel cache is off")


def modelled(arch: int) -> dict[str, Any]:
    """The variants that ``kernels model`` predicts: bfloat16 has the same instructions, and full attention no masks.

    The backward is the default of the compute capability: in two passes for Volta and Turing. Of the products and
    copies that Hopper makes behind a warp's back the model knows nothing: there it predicts the kernels of sm80.
    """
    return {
        "family": "sm80" if arch == 90 else "",
        "dtypes": ("float16",),
        "head_dims": tuple(pair for pair in COMMON["head_dims"] if pair[0] in (64, 128, 256)),
        "options": ({"causal": False, "deterministic": arch < 80},),
        "passes": ("forward", "backward", "backward_dq"),
    }


def model(arches: Iterable[int] | None, conflicts: float) -> None:
    """Shows what the main loops of the kernels need, and how long they should take. Raises RuntimeError and OSError."""
    task = _model.Task()
    with tempfile.TemporaryDirectory(prefix="jax_flash_") as folder:
        for arch, kernels in _compile(_model.CHIPS if arches is None else arches, pathlib.Path(folder), modelled):
            chip = _model.CHIPS[arch]
            predictions = []
            for kernel in kernels:
                try:
                    predictions.append(_model.predict(kernel, chip, task=task, conflicts=conflicts))
                except ValueError as error:
                    print(f"sm_{arch}: {error}", file=sys.stderr)
            _show_model(arch, chip, predictions, task)


def _show_model(arch: int, chip: _model.Chip, predictions: Sequence[_model.Prediction], task: _model.Task) -> None:
    print(f"\nsm_{arch}: {chip.name}, {chip.multiprocessors} multiprocessors; a round of the main loop, by warp:")
    classes = sorted({name for prediction in predictions for name in prediction.counts})
    rows = [["", *(_short(p) for p in predictions)]]
    rows += [["tile", *(f"{p.tile[0]}x{p.tile[1]}" for p in predictions)]]
    rows += [["warps x blocks", *(f"{p.warps} x {p.blocks}" for p in predictions)]]
    rows += [[name, *(str(p.counts.get(name, 0)) for p in predictions)] for name in classes]
    print(table(rows, right=range(1, len(rows[0]))))
    print("\ncycles that each unit is busy in a round of all resident blocks, and that the round takes:")
    rows = [["", *(_short(p) for p in predictions)]]
    rows += [[unit, *(f"{p.busy[unit]:.0f}" for p in predictions)] for unit in _model.UNITS]
    rows += [["bound", *(p.bound for p in predictions)]]
    rows += [["simulated", *(f"{p.cycles:.0f}" for p in predictions)]]
    print(table(rows, right=range(1, len(rows[0]))))
    print(f"\nTFLOP/s, full, B{task.batch} S{task.length} N*H={task.width}:")
    rows = [["head_dim", "", *chip.clocks]]
    for head_dim in dict.fromkeys(p.head_dim for p in predictions):
        group = [p for p in predictions if p.head_dim == head_dim]
        rates = {name: _model.rates(group, chip, clock, task) for name, clock in chip.clocks.items()}
        for direction in next(iter(rates.values())):
            rows.append([str(head_dim), direction, *(f"{rate[direction]:.1f}" for rate in rates.values())])
    print(table(rows, right=(0, *range(2, len(rows[0])))))


def _short(prediction: _model.Prediction) -> str:
    return f"{prediction.pass_} {prediction.head_dim}"


def _compile(
    arches: Iterable[int], out_dir: pathlib.Path, variants: Callable[[int], Mapping[str, Any]]
) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    for arch in dict.fromkeys(arches):
        print(f"compiling for sm_{arch} ...", file=sys.stderr, flush=True)
        try:
            yield arch, _core.build_kernels(arch=arch, out_dir=str(out_dir), **variants(arch))
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"sm_{arch}: {error}") from error


def _compiled(arches: Iterable[int], out_dir: pathlib.Path) -> list[tuple[int, Mapping[str, Any]]]:
    return [(arch, kernel) for arch, kernels in _compile(arches, out_dir, common) for kernel in kernels]


def _show(kernels: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    print("registers and local memory are a thread's, shared memory a block's; all but registers and threads in bytes")
    rows = [["arch", "variant", *_COLUMNS.values()]]
    rows += [[f"sm_{arch}", kernel["name"], *(str(kernel[key]) for key in _COLUMNS)] for arch, kernel in kernels]
    print(table(rows, right=range(2, len(rows[0]))))
