"""One GPU a process: what several processes of jax.distributed compute and how long they take, beside one GPU.

python research/context/processes.py --count 2

Each process compares what it has of out, dq, dk and dv with what its GPU alone computes of the whole sequence.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence

import jax
import measure  # sets XLA's flags, before a backend starts
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import jax_flash
from jax_flash._tools.bench import race
from jax_flash.context import Order, Schedule, positions

KINDS: tuple[tuple[Schedule, Order], ...] = (("ring", "zigzag"), ("all_gather", "zigzag"))
CHECKED = 8192
NAMES = ("out", "dq", "dk", "dv")


def start(count: int, lengths: Sequence[int], rounds: int) -> int:
    """Runs the processes; the worst of their exit codes."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    arguments = [f"--count={count}", f"--port={port}", f"--rounds={rounds}", *(f"--length={n}" for n in lengths)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, f"--rank={rank}", *arguments],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in range(count)
    ]
    return max(process.wait() for process in processes)


def work(rank: int, count: int, port: int, lengths: Sequence[int], rounds: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", count, rank)
    mesh = jax.make_mesh((count,), ("seq",), axis_types=(AxisType.Auto,))
    split, here = NamedSharding(mesh, PartitionSpec(None, "seq")), SingleDeviceSharding(jax.local_devices()[0])
    alone = functools.partial(jax_flash.attention, causal=True)

    whole = measure.draw(CHECKED, here)
    expected = measure.entry_of(alone, True, whole, here).start()
    for kind in KINDS:
        rows = positions(CHECKED, count, kind[1]).reshape(count, -1)[rank]
        own = [jax.make_array_from_process_local_data(split, np.asarray(x[:, rows]), x.shape) for x in whole]
        found = measure.entry_of(measure.attention_of(kind), True, own, split).start()
        for name, x, of_all in zip(NAMES, found, expected, strict=True):
            (shard,) = x.addressable_shards
            other = np.asarray(of_all[:, rows], np.float32)
            error, most = np.abs(np.asarray(shard.data, np.float32) - other).max(), np.abs(other).max()
            what = f"process {rank}, {' '.join(kind)}, S {CHECKED}, {name}"
            print(f"{what}: differs by {error:.3g} of {most:.3g} at most", flush=True)
            assert error <= 0.02 * most
    del whole, expected
    for length in lengths:
        one = median(measure.entry(alone, length, True, here), rounds)
        for kind in KINDS:
            time = median(measure.entry(measure.attention_of(kind), length, True, split), rounds)
            if rank == 0:
                what = f"S {length}, forward + backward, {' '.join(kind)}"
                print(f"{what}: {1e3 * time:.3f} ms, {one / time:.2f}x of one ({1e3 * one:.3f} ms)", flush=True)
    jax.distributed.shutdown()


def median(entry: race.Entry, rounds: int) -> float:
    """Seconds a call; the same number of calls in every process."""
    race.timed(entry, 1)
    return statistics.median(race.timed(entry, 2) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2, help="processes, and GPUs (default: 2)")
    parser.add_argument("--length", type=int, action="append", help="tokens (default: 16384 and 131072)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = args.length or [16384, 131072]
    if args.rank is None:
        sys.exit(start(args.count, lengths, args.rounds))
    work(args.rank, args.count, args.port, lengths, args.rounds)


if __name__ == "__main__":
    main()
