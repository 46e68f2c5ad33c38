"""The command line: ``python -m jax_flash doctor``, ``explain``, ``warmup``, ``report``, ``bench`` and
``kernels build|list|clear``."""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from jax_flash import __version__, explain
from jax_flash._explain import PLATFORMS
from jax_flash._tools import calls, doctor, warmup
from jax_flash._tools import kernels as _kernels
from jax_flash._tools import report as _report
from jax_flash._tools.bench import grid, seeds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 0 when all is well, 1 when the command failed, 2 for bad arguments."""
    args = _parser().parse_args(arguments)
    if args.command != "kernels":
        # By default JAX preallocates most of a GPU's memory, which fails if another job uses the GPU.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.command == "doctor":
        return 0 if doctor.examine() else 1
    try:
        if args.command == "report":
            if args.html:
                seeds.needed("report --html")
                _writable(args.html)
            return 0 if _report.write(args.quick, args.html) else 1
        if args.command == "bench":
            return 0 if grid.run(args) else 1
        if args.command == "explain":
            _explain(args)
        elif args.command == "warmup":
            warmup.run(args)
        elif args.action == "build":
            arches = None if None in args.arch else args.arch
            _kernels.build(arches, args.out, args.call, packs=args.packs)
        elif args.action == "clear":
            _kernels.clear()
        else:
            _kernels.list_(args.arch)
    except (RuntimeError, ValueError, NotImplementedError, OSError) as error:
        action = f" {args.action}" if "action" in args else ""
        print(f"jax_flash {args.command}{action}: {error}", file=sys.stderr)
        return 1
    return 0


def _explain(args: argparse.Namespace) -> None:
    """Explains every call of the arguments, in tables if rich is installed."""
    for call in calls.of_arguments(args):
        explanation = explain(*call.inputs, platform=args.platform, **call.options)
        print(f"{call.title}\n{explanation!r}")


def _writable(file: pathlib.Path) -> None:
    """Raises OSError if a file can't be written: better before minutes of measuring than after."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8"):
        pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_flash", description="Looks after an installed jax_flash.")
    parser.add_argument("--version", action="version", version=f"jax_flash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "doctor",
        help="show versions and devices, and whether the kernels work",
        description="Shows versions, devices and which implementation serves each dtype, then runs a small forward "
        "and backward on every device and compares them with the reference. The last line is the verdict; the exit "
        "code is 0 when all is well, else 1.",
    )
    explaining = commands.add_parser(
        "explain",
        help="say which implementation serves a call, and why not the others",
        description="Says which implementation serves a call of attention, by its sizes or by the config.json of a "
        "model, and why the others do not. Computes nothing.",
    )
    calls.add_arguments(explaining)
    explaining.add_argument("--platform", choices=PLATFORMS, help="default: that of JAX's default device")

    warming = commands.add_parser(
        "warmup",
        help="compile the CUDA kernels of calls into the cache, before a program makes these calls",
        description="Compiles the kernels of calls, forward and backward, into the cache (JAX_FLASH_CACHE_DIR), so "
        "that the first call does not wait for them. Which kernel of a pass a call takes depends on its lengths and "
        "batch too: all of them are compiled.",
        epilog="Example: python -m jax_flash warmup --heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16",
    )
    calls.add_arguments(warming)
    warming.add_argument("--forward-only", action="store_true", help="no kernels of the backward pass")

    report = commands.add_parser(
        "report",
        help="a self-test and a benchmark, to paste into an issue",
        description="Prints versions and devices, a self-test (forward and backward against the reference) and a "
        "benchmark (against jax.nn.dot_product_attention) as one block of text. The exit code is 0 when the self-test "
        "passed, else 1.",
    )
    report.add_argument("--quick", action="store_true", help="fewer cases: about a minute, and four with --html")
    report.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help="write a page too, with speed, memory, errors of every implementation and the rows of bench seeds",
    )

    grid.add_arguments(commands.add_parser("bench", help="measure the kernels against other implementations"))

    kernels = commands.add_parser("kernels", help="compile CUDA kernels ahead of time, or show what they use")
    actions = kernels.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build",
        help="compile the common variants, or those of a function's calls, into a folder",
        description="Compiles the common variants ahead of time; no GPU is needed. A process that has "
        "JAX_FLASH_PREBUILT_DIR set to that folder takes its kernels from there and compiles only the others.",
    )
    build.add_argument("--out", required=True, type=pathlib.Path, metavar="DIR", help="where the cubins go")
    build.add_argument(
        "--packs",
        action="store_true",
        help="one compressed archive for each architecture, as wheels have them, in place of files",
    )
    for parser_, instead in ((build, "instead of the common variants"), (warming, "instead of sizes")):
        parser_.add_argument(
            "--call",
            action="append",
            default=[],
            metavar="MODULE:FUNCTION",
            help=f"{instead} those of a training step or a call: FUNCTION() returns (function, *arguments), of arrays "
            "or jax.ShapeDtypeStruct; may be given several times",
        )
    listing = actions.add_parser(
        "list",
        help="show what the common variants use",
        description="Compiles the common variants into a temporary folder and shows what each of them uses: registers, "
        "shared memory, spills, bytes. It says first how many these are and about how long they take: about 90 kernels "
        "an architecture, and a second of one core each. It needs NVRTC and no GPU.",
    )
    actions.add_parser(
        "clear",
        help="empty the cache of compiled kernels",
        description="Removes the kernels that were compiled on first use from the cache (JAX_FLASH_CACHE_DIR). Kernels "
        "that were built ahead of time stay, and so does tuned.json.",
    )
    every = ", ".join(_kernels.ARCHES)
    for action, choice, default in (
        (build, _arch_or_all, "or all"),
        (listing, _arch, "default: every one of them"),
        (warming, _arch, "default: those of the GPUs here"),
    ):
        action.add_argument(
            "--arch",
            action="append",
            required=action is build,
            type=choice,
            metavar="ARCH",
            help=f"{every}; may be given several times ({default})",
        )
    return parser


def _arch_or_all(text: str) -> int | None:
    return None if text == "all" else _arch(text)


def _arch(text: str) -> int:
    if text not in _kernels.ARCHES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(_kernels.ARCHES)}, got {text!r}")
    return _kernels.ARCHES[text]


if __name__ == "__main__":
    sys.exit(main())
