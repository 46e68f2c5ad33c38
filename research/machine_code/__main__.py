"""The prediction at the command line: ``PYTHONPATH=research python -m machine_code``.

Disassembles the main loops of the float16 kernels, counts how long they keep each unit busy, simulates them, and shows
the bound and the predicted speed on a GPU of that architecture; docs/model.md has the method. It needs nvdisasm, which
Triton's wheel has, and no GPU.
"""

import argparse
import functools
import math
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_flash._tools.kernels import compiled
from jax_flash._tools.table import table
from machine_code import model


def modelled(arch: int) -> list[dict[str, Any]]:
    """The variants that are predicted: bfloat16 has the same instructions, and full attention no masks.

    The backward is the default of the compute capability: in two passes for Volta and Turing. The model does not cover
    Hopper's asynchronous MMAs and copies: for Hopper it predicts the kernels of sm80.
    """
    return [
        {
            "family": "sm80" if arch == 90 else "",
            "dtypes": ("float16",),
            "head_dims": ((64, 64), (128, 128), (256, 256)),
            "options": ({"causal": False, "separate_dq": arch < 80},),
            "passes": ("forward", "backward", "backward_dq"),
        }
    ]


def show(arches: Iterable[int] | None, conflicts: float) -> None:
    """Shows what the main loops of the kernels need, and how long they should take. Raises RuntimeError and OSError."""
    task = model.Task()
    with tempfile.TemporaryDirectory(prefix="jax_flash_") as folder:
        for arch, kernels in compiled(model.CHIPS if arches is None else arches, pathlib.Path(folder), modelled):
            chip = model.CHIPS[arch]
            predictions = []
            for kernel in kernels:
                try:
                    predictions.append(model.predict(kernel, chip, task=task, conflicts=conflicts))
                except ValueError as error:
                    print(f"sm_{arch}: {error}", file=sys.stderr)
            _show_model(arch, chip, predictions, task)


def _show_model(arch: int, chip: model.Chip, predictions: Sequence[model.Prediction], task: model.Task) -> None:
    print(f"\nsm_{arch}: {chip.name}, {chip.multiprocessors} multiprocessors; a round of the main loop, by warp:")
    classes = sorted({name for prediction in predictions for name in prediction.counts})
    rows = [["", *(_short(p) for p in predictions)]]
    rows += [["tile", *(f"{p.tile[0]}x{p.tile[1]}" for p in predictions)]]
    rows += [["warps x blocks", *(f"{p.warps} x {p.blocks}" for p in predictions)]]
    rows += [[name, *(str(p.counts.get(name, 0)) for p in predictions)] for name in classes]
    print(table(rows, right=range(1, len(rows[0]))))
    print("\ncycles that each unit is busy in a round of all resident blocks, and that the round takes:")
    rows = [["", *(_short(p) for p in predictions)]]
    rows += [[unit, *(f"{p.busy[unit]:.0f}" for p in predictions)] for unit in model.UNITS]
    rows += [["bound", *(p.bound for p in predictions)]]
    rows += [["simulated", *(f"{p.cycles:.0f}" for p in predictions)]]
    print(table(rows, right=range(1, len(rows[0]))))
    print(f"\nTFLOP/s, full, B{task.batch} S{task.length} N*H={task.width}:")
    rows = [["head_dim", "", *chip.clocks]]
    for head_dim in dict.fromkeys(p.head_dim for p in predictions):
        group = [p for p in predictions if p.head_dim == head_dim]
        rates = {name: model.rates(group, chip, clock, task) for name, clock in chip.clocks.items()}
        for direction in next(iter(rates.values())):
            rows.append([str(head_dim), direction, *(f"{rate[direction]:.1f}" for rate in rates.values())])
    print(table(rows, right=(0, *range(2, len(rows[0])))))


def _short(prediction: model.Prediction) -> str:
    return f"{prediction.pass_} {prediction.head_dim}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code is 0 when all is well, 1 when a kernel was not predicted, 2 for bad arguments."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m machine_code", description=__doc__.split("\n\n")[1])
    arches = {f"sm_{arch}": arch for arch in model.CHIPS}
    parser.add_argument(
        "--arch",
        action="append",
        type=functools.partial(_arch, arches),
        metavar="ARCH",
        help=f"{', '.join(arches)}; may be given several times (default: every one of them)",
    )
    parser.add_argument(
        "--conflicts",
        type=_factor,
        default=1.0,
        metavar="X",
        help="multiplies the wavefronts of loads from and stores to shared memory (default: 1, no bank conflicts)",
    )
    args = parser.parse_args(arguments)
    try:
        show(args.arch, args.conflicts)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"machine_code: {error}", file=sys.stderr)
        return 1
    return 0


def _arch(arches: Mapping[str, int], text: str) -> int:
    if text not in arches:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(arches)}, got {text!r}")
    return arches[text]


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1 <= factor < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return factor


if __name__ == "__main__":
    sys.exit(main())
