"""``warmup``: the kernels of calls, compiled into the cache before a program makes these calls."""

import argparse
import collections
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax_flash._native import _core, registration
from jax_flash._tools import calls as _calls
from jax_flash._tools import kernels
from jax_flash._tools.table import table


def run(args: argparse.Namespace) -> None:
    """Fetches the kernels as the calls would, and shows where each came from.

    Raises:
      RuntimeError: there is no GPU to compile for, no cache to keep kernels in, or a kernel does not compile.
      ValueError, OSError: an argument is wrong, or a file can't be read.
    """
    targets = _targets(args.arch)
    named = [(name, *kernels.named(name)) for name in args.call]
    if not named:
        for call in _calls.of_arguments(args):
            named.append((call.title, *(call.forward() if args.forward_only else call.with_gradients())))
    status = registration.cuda_status()
    if not status["cache_dir"]:
        reason = status["cache_problem"] or "JAX_FLASH_CACHE_DIR is empty, or there is no home folder"
        raise RuntimeError(f"there is no cache to keep kernels in: {reason}")
    os.environ["JAX_FLASH_NOTICE_SECONDS"] = "off"  # the table says it
    began, found = time.monotonic(), dict[tuple[str, str], tuple[str, str]]()
    for arch, gpu in targets:
        for title, function, arguments in named:
            for name, origin, seconds in _fetched(arch, gpu, title, function, arguments):
                found.setdefault((f"sm_{arch}", name), (origin, f"{seconds:.1f}"))
    if not found:
        raise RuntimeError("no call is served by CUDA's kernels, so that there is nothing to compile")
    rows = [[*kernel, *how] for kernel, how in found.items()]
    print(table([["arch", "kernel", "from", "seconds"], *rows], right=[3]))
    counts = collections.Counter(origin for origin, _ in found.values())
    told = ", ".join(f"{count} {origin}" for origin, count in sorted(counts.items()))
    print(f"{len(found)} kernels are ready in {time.monotonic() - began:.1f} s, {told}; cache {status['cache_dir']}")


def _targets(arches: Sequence[int] | None) -> list[tuple[int, str]]:
    """Compute capabilities, each with the name of a GPU whose tuned rows apply; "" for none."""
    if arches:
        return [(arch, "") for arch in dict.fromkeys(arches)]
    devices = registration.cuda_status()["devices"]
    found = dict.fromkeys((device["compute_capability"], device["name"]) for device in devices if device["family"])
    if not found:
        raise RuntimeError("there is no GPU here that has kernels: name one by --arch, such as sm_90a")
    return list(found)


def _fetched(
    arch: int, gpu: str, title: str, function: Callable[..., Any], arguments: Sequence[Any]
) -> list[tuple[str, str, float]]:
    groups = kernels.variants_of(function, arguments, arch)
    count = len(kernels.names(arch, groups))
    what = f"{count} kernels" if count else "no kernel: plain JAX serves it"
    print(f"sm_{arch}: {title}: {what}", file=sys.stderr, flush=True)
    try:
        return [row for group in groups for row in _core.fetch_kernels(arch=arch, gpu=gpu, **group)]
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"sm_{arch}: {error}") from error
