"""Every figure of the CPU kernels in docs/ledger/cpu*.md, with XLA's, PyTorch's and the machine's own limits.

``python tests/cpu/bench.py --threads 1`` (or 2, ...) prints its tables as Markdown. Each implementation runs in a
process of its own, which waits while another one is measured; rounds go in turn. The best round counts; comparisons of
two implementations also have the median in parentheses. With one thread times are those of the process on the CPU, so
that a machine with other work to do gives usable ratios; with more they are wall clock, and the machine has to be
quiet. PyTorch's figures need one: ``--torch PYTHON`` names the Python of an environment that has it, if it is not this
one.

Page faults are the median over our calls: in some processes malloc returns the memory of results to the system, and
then each page of the next call's results takes a microsecond or more. MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=100000000000 in the environment prevent that.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured.

    Names: matmul, copy, forward, backward, both (forward and backward), chain and chain_both (tiny shapes).
    """

    name: str
    dtype: str = "float32"
    batch: int = 1
    q_length: int = 1
    kv_length: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    causal: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations by the convention of docs/performance.md."""
        if self.name == "matmul":
            return 2.0 * self.q_length**3
        forward = 4.0 * self.batch * self.q_heads * self.q_length * self.kv_length * self.head_dim
        passes = {"forward": 1, "backward": 2.5, "both": 3.5, "chain": 1, "chain_both": 3.5}[self.name]
        return forward * (0.5 if self.causal else 1) * passes

    @property
    def bytes(self) -> float:
        """Bytes that a copy reads and writes; bytes of key and value that decoding reads."""
        if self.name == "copy":
            return 2.0 * self.q_length
        return (
            2.0
            * self.batch
            * self.kv_length
            * self.kv_heads
            * self.head_dim
            * {"float32": 4, "bfloat16": 2}[self.dtype]
        )


KEPT = 8
"""Cases that a worker keeps ready, so that all cases of a shape run in turn: a machine may be half as fast for 20 s."""

CHAIN = 50
"""Calls in one program for small shapes: dispatch takes tens of microseconds and would dominate."""


# Implementations, each in a process of its own


def jax_runner(implementation: str) -> Callable[[Case], Callable[[], None]]:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    if implementation == "jax_flash":
        import jax_flash

        attend = functools.partial(jax_flash.attention, implementation="cpu")
    else:

        def attend(query: Any, key: Any, value: Any, causal: bool) -> Any:
            return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="xla")

    def runner(case: Case) -> Callable[[], None]:
        def draw(seed: int, *shape: int) -> Any:
            return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(case.dtype)

        if case.name == "matmul":
            matrices = [draw(i, case.q_length, case.q_length) for i in range(2)]
            product = jax.jit(jnp.matmul)
            return lambda: jax.block_until_ready(product(*matrices))
        if case.name == "copy":
            import numpy as np

            source = np.ones(case.q_length, np.uint8)
            target = np.zeros_like(source)
            return lambda: np.copyto(target, source)
        shape = (case.batch, case.q_length, case.q_heads, case.head_dim)
        kv_shape = (case.batch, case.kv_length, case.kv_heads, case.head_dim)
        arrays = [draw(0, *shape), draw(1, *kv_shape), draw(2, *kv_shape)]
        dout = draw(3, *shape)
        f = functools.partial(attend, causal=case.causal)

        def both(*arrays: Any) -> Any:
            # Returns the output too, as a loss would use it: for gradients alone XLA drops the forward's product with
            # value, 139 ms instead of 176 at (1, 1024, 8, 128).
            out, pullback = jax.vjp(f, *arrays)
            return out, pullback(dout)

        if case.name == "backward":
            _, pullback = jax.jit(lambda *arrays: jax.vjp(f, *arrays))(*arrays)
            run = jax.jit(lambda pullback, dout: pullback(dout))
            return lambda: jax.block_until_ready(run(pullback, dout))
        if case.name == "chain":
            run = jax.jit(lambda q, k, v: jax.lax.fori_loop(0, CHAIN, lambda _, q: f(q, k, v), q))
        elif case.name == "chain_both":
            run = jax.jit(lambda *arrays: jax.lax.fori_loop(0, CHAIN, lambda _, x: both(*x[1]), (dout, arrays)))
        else:
            run = jax.jit(f if case.name == "forward" else both)
        return lambda: jax.block_until_ready(run(*arrays))

    return runner


def torch_runner() -> Callable[[Case], Callable[[], None]]:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def runner(case: Case) -> Callable[[], None]:
        def draw(length: int, heads: int) -> Any:
            # [B, N, T, H] in the memory order of [B, T, N, H], as it is in a model.
            x = torch.randn(case.batch, length, heads, case.head_dim).to(getattr(torch, case.dtype)).transpose(1, 2)
            return x.requires_grad_(case.name == "both")

        arrays = draw(case.q_length, case.q_heads), *(draw(case.kv_length, case.kv_heads) for _ in range(2))
        dout = torch.randn_like(arrays[0])

        def forward() -> Any:
            # Not scaled_dot_product_attention, which may choose another kernel.
            return torch._scaled_dot_product_flash_attention_for_cpu(*arrays, is_causal=case.causal)[0]

        def both() -> None:
            torch.autograd.grad(forward(), arrays, dout)

        if case.name == "forward":
            return torch.no_grad()(forward)
        return both

    return runner


def worker(implementation: str, cpus: set[int]) -> None:
    """Answers lines of [number of repeats, case] with seconds and page faults a call."""
    os.sched_setaffinity(0, cpus)
    runner = torch_runner() if implementation == "torch" else jax_runner(implementation)
    clock = time.process_time if len(cpus) == 1 else time.perf_counter
    ready: dict[Case, Callable[[], None]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        repeats, fields = json.loads(line)
        case = Case(**fields)
        if case not in ready:
            if len(ready) == KEPT:
                del ready[next(iter(ready))]
            ready[case] = runner(case)
        # One call to warm up: the caches hold the data of other processes, with which a backward of 26 ms takes 30.
        ready[case]()
        faults, begin = page_faults(), clock()
        for _ in range(repeats):
            ready[case]()
        calls = repeats * (CHAIN if case.name.startswith("chain") else 1)
        print((clock() - begin) / calls, (page_faults() - faults) / calls, flush=True)


def page_faults() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Workers:
    """The processes of the available implementations."""

    def __init__(self, threads: int, torch_python: str | None) -> None:
        cpus = sorted(os.sched_getaffinity(0))[-threads:]
        pythons = {"jax_flash": sys.executable, "xla": sys.executable}
        if torch_python:
            pythons["torch"] = torch_python
        self._processes = {
            name: subprocess.Popen(
                [python, __file__, "--worker", name, "--cpus", ",".join(map(str, cpus))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
            for name, python in pythons.items()
        }
        self.names = tuple(pythons)
        self.faults: collections.defaultdict[tuple[str, Case], list[float]] = collections.defaultdict(list)
        """Page faults a call in every round."""
        for name in self.names:
            if self._answer(name) != "ready":
                raise RuntimeError(f"the process of {name} did not start")

    def _answer(self, name: str) -> str:
        stdout = self._processes[name].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def time(self, name: str, case: Case, repeats: int) -> float:
        """Seconds per call."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        print(json.dumps([repeats, dataclasses.asdict(case)]), file=stdin, flush=True)
        seconds, faults = map(float, self._answer(name).split())
        self.faults[name, case].append(faults)
        return seconds

    def best(self, cases: list[tuple[str, Case]], rounds: int) -> list[float]:
        """Best seconds a call of each (implementation, case), all of them in turn in every round."""
        return [min(seconds) for seconds in self.rounds(cases, rounds)]

    def rounds(self, cases: list[tuple[str, Case]], rounds: int) -> list[list[float]]:
        """Seconds a call of each (implementation, case) in every round, in which all of them go in turn."""
        # Each takes about 50 ms.
        repeats = [max(1, min(1000, int(0.05 / max(self.time(*c, 1), self.time(*c, 1), 1e-6)))) for c in cases]
        seconds: list[list[float]] = [[] for _ in cases]
        for _ in range(rounds):
            for i, case in enumerate(cases):
                seconds[i].append(self.time(*case, repeats[i]))
        return seconds

    def close(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


# Tables


def row(*cells: Any) -> None:
    print(
        "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |", flush=True
    )


def head(title: str, *cells: str) -> None:
    print(f"\n### {title}\n")
    row(*cells)
    row(*["---"] * len(cells))


MATMUL = Case("matmul", q_length=2048)

Shape = tuple[int, ...]
Part = Callable[[tuple[Shape, ...]], tuple[Shape, ...]]
"""The shapes of a table that this run is for."""

GRID = (
    (1, 16, 1, 16), (1, 16, 4, 32), (1, 64, 1, 16), (1, 64, 4, 64), (2, 128, 4, 32), (1, 128, 12, 64),
    (8, 64, 8, 64), (1, 256, 4, 64), (1, 512, 8, 64), (4, 512, 8, 128),
)  # fmt: skip

DECODING = ((1, 1024, 16, 16, 64), (1, 8192, 16, 16, 64), (1, 8192, 8, 8, 128), (1, 8192, 32, 8, 128),
            (8, 2048, 32, 8, 128))  # fmt: skip

SHAPES = ((1024, 16, 64), (2048, 8, 64), (4096, 4, 64), (1024, 8, 128), (2048, 8, 128), (4096, 4, 128))


def times(ours: list[float], theirs: list[float]) -> str:
    """Our speedup over another implementation: of the best rounds and of the medians."""
    return f"{min(theirs) / min(ours):.2f} ({statistics.median(theirs) / statistics.median(ours):.2f})"


def rates(workers: Workers, rounds: int, part: Part, dtypes: list[str]) -> None:
    """Demands of rate: parts of XLA's float32 matrix product, and times XLA's and PyTorch's attention."""
    for dtype in dtypes:
        head(
            f"{dtype}, B = 1: GFLOP/s, % of XLA's 2048-cubed float32 product; times XLA's and PyTorch's attention",
            *("S", "N", "H", "causal", "product", "forward", "%", "of full's", "backward", "%", "of full's"),
            *("page faults, fwd", "fwd+bwd"),
            *("fwd / XLA", "fwd+bwd / XLA", "fwd / PyTorch", "fwd+bwd / PyTorch"),
        )
        for length, heads, head_dim in part(SHAPES):
            rates_of(workers, rounds, dtype, length, heads, head_dim)


def rates_of(workers: Workers, rounds: int, dtype: str, length: int, heads: int, head_dim: int) -> None:
    """The rows of one shape, full and causal."""

    def case(name: str, causal: bool) -> Case:
        return Case(name, dtype, 1, length, length, heads, heads, head_dim, causal)

    runs = [("xla", MATMUL)]
    for causal in (False, True):
        runs += [(name, case("forward", causal)) for name in workers.names]
        runs += [(name, case("both", causal)) for name in workers.names]
        runs.append(("jax_flash", case("backward", causal)))
    seconds = dict(zip(runs, workers.rounds(runs, rounds), strict=True))
    peak = MATMUL.flops / min(seconds["xla", MATMUL]) / 1e9

    def rate(name: str, causal: bool) -> float:
        return case(name, causal).flops / min(seconds["jax_flash", case(name, causal)]) / 1e9

    for causal in (False, True):
        cells: list[Any] = [length, heads, head_dim, "yes" if causal else "no", round(peak)]
        for name in ("forward", "backward"):
            ours = rate(name, causal)
            cells += [round(ours), round(100 * ours / peak), ours / rate(name, False) if causal else ""]
        for name in ("forward", "both"):
            cells.append(round(statistics.median(workers.faults["jax_flash", case(name, causal)])))
        for other in workers.names[1:]:
            for name in ("forward", "both"):
                cells.append(times(*(seconds[who, case(name, causal)] for who in ("jax_flash", other))))
        row(*cells, *[""] * (17 - len(cells)))


def grid(workers: Workers, rounds: int, part: Part) -> None:
    """Tiny to small shapes, many calls in one program: times as fast as XLA."""
    head(
        "Times XLA, float32: calls in a program, and by a call of jit",
        *("B", "T = S", "N", "H", "causal", "forward, us", "in a program", "by jit"),
        *("fwd+bwd, us", "in a program", "by jit"),
    )
    for batch, length, heads, head_dim in part(GRID):
        for causal in (False, True):
            ratios = []
            for name in ("chain", "forward", "chain_both", "both"):
                case = Case(name, "float32", batch, length, length, heads, heads, head_dim, causal)
                ours, xla = workers.best([("jax_flash", case), ("xla", case)], rounds)
                if name.startswith("chain"):
                    ratios.append(1e6 * ours)
                ratios.append(xla / ours)
            row(batch, length, heads, head_dim, "yes" if causal else "no", *ratios)


def decoding(workers: Workers, rounds: int, part: Part) -> None:
    """One query: bandwidth of reading key and value, beside that of a copy of as many bytes (read and written)."""
    head(
        "Decoding: T = 1, H = 64 and 128",
        *("dtype", "B", "S", "N", "K", "H", "GB/s", "copy, GB/s", "%", "times XLA"),
    )
    for dtype in ("float32", "bfloat16"):
        for batch, length, q_heads, kv_heads, head_dim in part(DECODING):
            case = Case("forward", dtype, batch, 1, length, q_heads, kv_heads, head_dim)
            copy = Case("copy", q_length=int(case.bytes))
            _, xla = workers.best([("jax_flash", case), ("xla", case)], rounds)
            ours, moved = workers.best([("jax_flash", case), ("xla", copy)], rounds)
            bandwidth, copied = case.bytes / ours / 1e9, copy.bytes / moved / 1e9
            row(dtype, batch, length, q_heads, kv_heads, head_dim, bandwidth, copied, round(100 * bandwidth / copied),
                xla / ours)  # fmt: skip


LADDER = (1, 1024, 1024, 16, 16, 64, 0)
"""Arguments of tests/cpu/ladder.cc: B, T, S, N, K, H, causal."""


def ladder(threads: int) -> None:
    """The steps from a plain program to the kernel: builds tests/cpu/ladder.cc with tiles of registers of each size."""
    from jax_flash._native import _core

    tools = {name: shutil.which(name, path=os.path.dirname(sys.executable)) or name for name in ("cmake", "ninja")}
    isa = _core.cpu_isa()
    isa = "avx512" if isa.endswith("_bf16") else isa

    def build(folder: str, tile: tuple[int, int] | None, *targets: str) -> None:
        flags = f"-DJAX_FLASH_TILE_ROWS={tile[0]};-DJAX_FLASH_TILE_VECTORS={tile[1]}" if tile else ""
        source = os.path.dirname(__file__)
        for command in (
            [tools["cmake"], "-S", source, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}",
             "-DCMAKE_BUILD_TYPE=Release", f"-DJAX_FLASH_CPU_ISAS={isa}", f"-DJAX_FLASH_CPU_FLAGS={flags}"],
            [tools["cmake"], "--build", folder, "--target", *targets],
        ):  # fmt: skip
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def output(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        builds: dict[str, tuple[int, int] | None] = {"1x1": (1, 1), "8x1": (8, 1), "whole": None}
        for name, tile in builds.items():
            build(f"{folder}/{name}", tile, "ladder", *([f"micro_{isa}"] if name == "whole" else []))
        head(f"The CPU ladder, float32, {isa}, B, T, S, N, K, H = {LADDER[:6]}, GFLOP/s", "step", "forward", "backward")
        for text, name, steps, count in (
            ("a row at a time", "whole", ("naive", ""), 1),
            ("tiled", "whole", ("tiled", ""), 1),
            ("packed, a vector of sums", "1x1", ("forward", "backward"), 1),
            ("8 vectors of sums", "8x1", ("forward", "backward"), 1),
            ("all registers", "whole", ("forward", "backward"), 1),
            (f"{threads} threads", "whole", ("forward", "backward"), threads),
        ):
            cells = [
                float(output(f"{folder}/{name}/ladder", step, "float32", *map(str, LADDER), str(count)).split()[1])
                if step
                else ""
                for step in steps
            ]
            row(text, *cells)
        print("\nThe micro-kernel alone, one thread: " + ", ".join(output(f"{folder}/whole/micro_{isa}").splitlines()))


def find_torch(python: str | None) -> Iterator[str]:
    if python:
        yield python
    elif importlib.util.find_spec("torch"):
        yield sys.executable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16,float64")
    parser.add_argument("--tables", default="rates,grid,decoding,ladder")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th shape of a table, from the I-th on")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--cpus", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, {int(cpu) for cpu in args.cpus.split(",")})
    workers = Workers(args.threads, next(find_torch(args.torch), None))
    print(f"{args.threads} thread(s), best of {args.rounds} rounds, " + ", ".join(workers.names))
    first, parts = map(int, args.part.split("/"))

    def part(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        return shapes[first - 1 :: parts]

    tables = {"rates": lambda: rates(workers, args.rounds, part, args.dtypes.split(",")),
              "grid": lambda: grid(workers, args.rounds, part),
              "decoding": lambda: decoding(workers, args.rounds, part),
              "ladder": lambda: ladder(args.threads)}  # fmt: skip
    for name in args.tables.split(","):
        tables[name]()
    workers.close()


if __name__ == "__main__":
    main()
