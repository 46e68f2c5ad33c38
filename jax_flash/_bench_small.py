"""``bench small``: small, short and odd shapes on a GPU, beside XLA's own attention and cuDNN's.

A single call of a small shape is all dispatch, in whatever implementation. So what is timed is a chain of calls inside
one jit, in which each call's query is the result of the one before. All runs of a chain have their arrays at the same
addresses: where one has moved, XLA updates its CUDA graphs, and the host's time for that would be what is measured.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._attention import attention
from jax_flash._table import table

IMPLEMENTATIONS = ("jax_flash", "xla", "cudnn")
_SECONDS = 0.02  # of a measurement, at least


@dataclasses.dataclass(frozen=True)
class Cell:
    """A call to be timed: [B, T, N, H] queries on [B, S, K, H] keys and values."""

    batch: int
    q_length: int
    kv_length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False

    def __str__(self) -> str:
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        length = str(self.q_length) if self.q_length == self.kv_length else f"{self.q_length}x{self.kv_length}"
        return f"B{self.batch} {length} N{heads} D{self.head_dim}" + (" causal" if self.causal else "")

    @property
    def operations(self) -> float:
        """Floating-point operations of a forward call by the ledger's convention."""
        full = 4.0 * self.batch * self.q_heads * self.q_length * self.kv_length * self.head_dim
        return full / 2 if self.causal else full

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_shape = (self.batch, self.q_length, self.q_heads, self.head_dim)
        kv_shape = (self.batch, self.kv_length, self.kv_heads, self.head_dim)
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = (q_shape, kv_shape, kv_shape)
        q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
        return q, k, v


TINY = tuple(Cell(1, size, size, 1, 1, size) for size in (16, 32, 64, 128, 256))
SMALL = (*TINY, Cell(1, 1024, 1024, 16, 16, 64), Cell(1, 1024, 1024, 16, 16, 128))
SHORT = (
    *(
        Cell(1, q_length, kv_length, 32, kv_heads, 128)
        for kv_heads, q_length, kv_length in itertools.product((32, 8, 1), (1, 4, 16, 64), (1024, 8192, 32768))
    ),
    *(Cell(1, q_length, 8192, 32, 8, head_dim) for head_dim, q_length in itertools.product((64, 256), (1, 16))),
    *(Cell(16, q_length, 4096, 32, 8, 128) for q_length in (1, 16)),
)
ODD: Mapping[Cell, Sequence[Cell]] = {
    Cell(1, 4096, 4096, 32, 32, 128): (
        Cell(1, 4096, 4096, 32, 8, 128),
        Cell(1, 4096, 4096, 32, 1, 128),
        Cell(1, 1024, 4096, 32, 32, 128),
        Cell(1, 4096, 1024, 32, 32, 128),
        Cell(1, 4095, 4095, 32, 32, 128),
        Cell(1, 4001, 4001, 32, 32, 128),
        Cell(1, 3000, 5000, 32, 8, 128),
    ),
    Cell(1, 4096, 4096, 32, 32, 128, True): (
        Cell(1, 4096, 4096, 32, 8, 128, True),
        Cell(1, 4096, 4096, 32, 1, 128, True),
        Cell(1, 4095, 4095, 32, 32, 128, True),
        Cell(1, 4001, 4001, 32, 32, 128, True),
    ),
    # A row of 1024 keys has a quarter of the work for its beginning and its end.
    Cell(4, 1024, 1024, 32, 32, 128): (Cell(1, 4096, 1024, 32, 32, 128),),
    Cell(4, 1024, 1024, 32, 32, 64): (
        Cell(4, 1024, 1024, 32, 8, 64),
        Cell(4, 1023, 1023, 32, 32, 64),
        Cell(4, 1000, 1000, 32, 32, 64),
    ),
}
"""Shapes whose rate is held against that of an aligned one with as many key heads as query heads; cross attention with
fewer keys against that with as many queries and that with as many keys."""


def attend(implementation: str, cell: Cell) -> Callable[..., jax.Array]:
    if implementation == "jax_flash":
        return functools.partial(attention, causal=cell.causal, implementation="cuda")
    return functools.partial(jax.nn.dot_product_attention, is_causal=cell.causal, implementation=implementation)


def chain(implementation: str, cell: Cell, calls: int, gradients: bool) -> Callable[..., Any]:
    """A function of query, key and value: `calls` calls, each on what the one before returned."""
    call = attend(implementation, cell)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(calls):
            q = call(q, k, v)
        return q

    def with_gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        for _ in range(calls):
            out, pullback = jax.vjp(call, q, k, v)
            q, k, v = pullback(out)
        return q, k, v

    return with_gradients if gradients else forward


def calls_of(cell: Cell, gradients: bool) -> int:
    """Calls of a chain. XLA makes CUDA graphs of five launches and more; that of a long chain costs little a call, but
    one of gradients takes XLA long to compile."""
    return 64 if cell.operations < 1e8 and not gradients else 16 if cell.operations < 3e10 else 5


@dataclasses.dataclass
class Measured:
    """Microseconds of a call by implementation; None where an implementation does not serve the cell."""

    cell: Cell
    gradients: bool
    microseconds: dict[str, float | None]


def measure(
    cells: Iterable[Cell], *, gradients: bool, implementations: Sequence[str] = IMPLEMENTATIONS, rounds: int = 4
) -> list[Measured]:
    """Times every cell: the best of some rounds, in each of which the implementations take turns."""
    cells = tuple(cells)

    def compiled(cell: Cell, implementation: str) -> Any:
        run = chain(implementation, cell, calls_of(cell, gradients), gradients)
        try:
            shapes = jax.eval_shape(cell.arrays)
            return jax.jit(run).lower(*shapes).compile()
        except Exception as error:  # whatever another's implementation raises for what it does not serve
            if implementation == "jax_flash":
                raise
            print(f"{cell}: {implementation}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
            return None

    wanted = [(cell, implementation) for cell in cells for implementation in implementations]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = dict(zip(wanted, pool.map(lambda x: compiled(*x), wanted), strict=True))
    results = []
    for cell in cells:
        arrays = cell.arrays()
        best: dict[str, float | None] = dict.fromkeys(implementations)
        here = {name: programs[cell, name] for name in implementations if programs[cell, name] is not None}
        repeats = {}
        for name, program in here.items():
            jax.block_until_ready(program(*arrays))
            jax.block_until_ready(program(*arrays))
            once = _seconds(program, arrays, 2) / 2
            repeats[name] = max(2, min(200, int(_SECONDS / once)))
        for _, (name, program) in itertools.product(range(rounds), here.items()):
            time.sleep(0.002)
            seconds = _seconds(program, arrays, repeats[name]) / repeats[name] / calls_of(cell, gradients)
            best[name] = min(best[name] or 1e9, 1e6 * seconds)
        results.append(Measured(cell, gradients, best))
    return results


def _seconds(program: Callable[..., Any], arrays: Sequence[jax.Array], repeats: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(repeats):
        del result  # or two would be alive at a time, and results lie at two addresses by turns
        result = program(*arrays)  # dispatched while the one before runs
    jax.block_until_ready(result)
    return time.perf_counter() - start


def show(title: str, measured: Sequence[Measured]) -> None:
    """Prints microseconds, and how many times as long the others take."""
    names = list(measured[0].microseconds)
    others = names[1:]
    rows = [["", *(f"{name}, us" for name in names), *(f"{name} / ours" for name in others)]]
    for x in measured:
        ours = x.microseconds[names[0]]
        assert ours
        times = [x.microseconds[name] for name in names]
        ratios = [x.microseconds[name] for name in others]
        rows.append(
            [
                str(x.cell) + (", with gradients" if x.gradients else ""),
                *("-" if t is None else f"{t:.1f}" for t in times),
                *("-" if t is None else f"{t / ours:.2f}" for t in ratios),
            ]
        )
    print(f"\n{title}")
    print(table(rows, right=range(1, len(rows[0]))), flush=True)


def show_odd(gradients: bool) -> None:
    """Prints rates, and what part of the aligned shape's they are."""
    cells = dict.fromkeys(itertools.chain.from_iterable((aligned, *odd) for aligned, odd in ODD.items()))
    measured = {x.cell: x for x in measure(cells, gradients=gradients, implementations=IMPLEMENTATIONS[:1])}
    rows = [["", "TFLOP/s", "of the aligned"]]
    for aligned, odd in ODD.items():
        for cell in (aligned, *odd):
            rates = [
                (3.5 if gradients else 1) * x.operations / (measured[x].microseconds["jax_flash"] or 1e9) / 1e6
                for x in (cell, aligned)
            ]
            rows.append([str(cell), f"{rates[0]:.0f}", "" if cell == aligned else f"{rates[0] / rates[1]:.2f}"])
    print(f"\nodd shapes{', with gradients' if gradients else ''}")
    print(table(rows, right=(1, 2)), flush=True)


def run() -> None:
    """Times all tables and prints them."""
    show("small", measure(SMALL, gradients=False))
    show("short queries", measure(SHORT, gradients=False))
    show_odd(False)
    show("small", measure(SMALL, gradients=True))
    short = [cell for cell in SHORT if cell.kv_heads == 8 and cell.kv_length == 8192 and cell.head_dim == 128]
    show("short queries", measure(short, gradients=True))
    show_odd(True)
