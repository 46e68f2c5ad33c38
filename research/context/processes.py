"""One GPU a process: what several processes of jax.distributed compute and how long they take, beside one GPU.

python research/context/processes.py --count 2

Each process makes its own rows only, and compares what it has of out, dq, dk and dv with what its GPU alone computes.
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
from typing import Any

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
KINDS = (("ring", "zigzag"), ("all_gather", "zigzag"))
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
    from jax_flash.context import ContextParallel, positions, set_overlap_flags

    set_overlap_flags()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jax_flash
    from jax_flash._tools.bench import race

    jax.distributed.initialize(f"localhost:{port}", count, rank)
    mesh = jax.make_mesh((count,), ("seq",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "seq"))

    def arrays(length: int) -> list[Any]:
        shapes = [(1, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        return [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)]

    def differentiate(context: Any, query: Any, key: Any, value: Any, dout: Any) -> Any:
        attend = functools.partial(jax_flash.attention, causal=True, context=context)
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    def of_processes(kind: tuple[str, str], length: int, rows: Any) -> race.Entry:
        schedule, order = kind
        context = ContextParallel("seq", schedule, order)  # type: ignore[arg-type]
        own = [jax.make_array_from_process_local_data(split, np.asarray(x[:, rows]), x.shape) for x in arrays(length)]
        with jax.set_mesh(mesh):
            run = jax.jit(functools.partial(differentiate, context)).lower(*own).compile()
        return race.Entry(lambda: run(*own), jax.block_until_ready)

    alone = jax.jit(functools.partial(differentiate, None))
    expected = alone(*arrays(CHECKED))
    for kind in KINDS:
        rows = positions(CHECKED, count, kind[1]).reshape(count, -1)[rank]  # type: ignore[arg-type]
        found = of_processes(kind, CHECKED, rows).start()
        for name, x, whole in zip(NAMES, found, expected, strict=True):
            (own,) = x.addressable_shards
            other = np.asarray(whole[:, rows], np.float32)
            error = np.abs(np.asarray(own.data, np.float32) - other).max()
            print(f"process {rank}, {' '.join(kind)}, S {CHECKED}, {name}: differs by {error:.3g} of "
                  f"{np.abs(other).max():.3g} at most", flush=True)  # fmt: skip
            assert error <= 0.02 * np.abs(other).max()
    for length in lengths:
        whole = race.Entry(functools.partial(alone, *arrays(length)), jax.block_until_ready)
        race.timed(whole, 1)  # compiles
        one = statistics.median(race.timed(whole, 2) for _ in range(rounds))
        del whole
        for kind in KINDS:
            rows = positions(length, count, kind[1]).reshape(count, -1)[rank]  # type: ignore[arg-type]
            entry = of_processes(kind, length, rows)
            race.timed(entry, 1)
            time = statistics.median(race.timed(entry, 2) for _ in range(rounds))
            if rank == 0:
                what = f"S {length}, forward + backward, {' '.join(kind)}"
                print(f"{what}: {1e3 * time:.3f} ms, {one / time:.2f}x of one ({1e3 * one:.3f} ms)", flush=True)
            del entry
    jax.distributed.shutdown()


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
