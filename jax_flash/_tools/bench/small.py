"""``bench small``: small, short and odd shapes on a GPU, against XLA's own attention and cuDNN's.

Dispatch dominates a single call of a small shape in every implementation. So a chain of calls inside one jit is timed,
in which each call's query is the result of the one before. All runs of a chain have their arrays at the same addresses:
if one moves, XLA updates its CUDA graphs, and the host's time for that would be measured.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jax_flash._tools.bench import peers, race
from jax_flash._tools.bench.race import Cell, Entry
from jax_flash._tools.table import table

IMPLEMENTATIONS: dict[str, race.Attend] = {
    "jax_flash": functools.partial(peers.attend, implementation="cuda"),
    "xla": functools.partial(peers.attend_nn, "xla"),
    "cudnn": functools.partial(peers.attend_nn, "cudnn"),
}


def _cell(
    batch: int, q_length: int, kv_length: int, heads: int, kv_heads: int, head_dim: int, causal: bool = False
) -> Cell:
    """Small shapes, in bfloat16."""
    return Cell(
        "bfloat16",
        head_dim,
        kv_length,
        causal,
        batch,
        heads,
        q_length=0 if q_length == kv_length else q_length,
        kv_heads=0 if kv_heads == heads else kv_heads,
    )


TINY = tuple(_cell(1, size, size, 1, 1, size) for size in (16, 32, 64, 128, 256))
SMALL = (*TINY, _cell(1, 1024, 1024, 16, 16, 64), _cell(1, 1024, 1024, 16, 16, 128))
SHORT = (
    *(
        _cell(1, q_length, kv_length, 32, kv_heads, 128)
        for kv_heads, q_length, kv_length in itertools.product((32, 8, 1), (1, 4, 16, 64), (1024, 8192, 32768))
    ),
    *(_cell(1, q_length, 8192, 32, 8, head_dim) for head_dim, q_length in itertools.product((64, 256), (1, 16))),
    *(_cell(16, q_length, 4096, 32, 8, 128) for q_length in (1, 16)),
)
SHORT_WITH_GRADIENTS = tuple(x for x in SHORT if (x.kv_heads, x.length, x.head_dim) == (8, 8192, 128))
ODD: Mapping[Cell, Sequence[Cell]] = {
    _cell(1, 4096, 4096, 32, 32, 128): (
        _cell(1, 4096, 4096, 32, 8, 128),
        _cell(1, 4096, 4096, 32, 1, 128),
        _cell(1, 1024, 4096, 32, 32, 128),
        _cell(1, 4096, 1024, 32, 32, 128),
        _cell(1, 4095, 4095, 32, 32, 128),
        _cell(1, 4001, 4001, 32, 32, 128),
        _cell(1, 3000, 5000, 32, 8, 128),
    ),
    _cell(1, 4096, 4096, 32, 32, 128, True): (
        _cell(1, 4096, 4096, 32, 8, 128, True),
        _cell(1, 4096, 4096, 32, 1, 128, True),
        _cell(1, 4095, 4095, 32, 32, 128, True),
        _cell(1, 4001, 4001, 32, 32, 128, True),
    ),
    # With 1024 keys a row has a quarter of the work to amortise its start and its end.
    _cell(4, 1024, 1024, 32, 32, 128): (_cell(1, 4096, 1024, 32, 32, 128),),
    _cell(4, 1024, 1024, 32, 32, 64): (
        _cell(4, 1024, 1024, 32, 8, 64),
        _cell(4, 1023, 1023, 32, 32, 64),
        _cell(4, 1000, 1000, 32, 32, 64),
    ),
}
"""Shapes whose rate is compared with that of an aligned one with as many key heads as query heads; cross attention with
fewer keys is compared with the one of as many queries and the one of as many keys."""


@dataclasses.dataclass
class Measured:
    """Microseconds of a call by implementation; None if an implementation does not serve the cell."""

    cell: Cell
    gradients: bool
    microseconds: dict[str, float | None]


def measure(
    cells: Iterable[Cell], *, gradients: bool, implementations: Sequence[str] | None = None, rounds: int = 4
) -> list[Measured]:
    """Times every cell: the best of several rounds, in each of which the implementations take turns."""
    cells = tuple(cells)
    names = tuple(implementations or IMPLEMENTATIONS)
    pass_ = "forward + backward" if gradients else "forward"

    def compiled(cell: Cell, name: str) -> Any:
        run = race.chain(IMPLEMENTATIONS[name], cell, pass_)
        try:
            return jax.jit(run).lower(*jax.eval_shape(cell.draw)[:3]).compile()
        except Exception as error:  # other implementations raise anything for what they do not serve
            if name == "jax_flash":
                raise
            print(f"{cell}: {name}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
            return None

    wanted = [(cell, name) for cell in cells for name in names]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = dict(zip(wanted, pool.map(lambda x: compiled(*x), wanted), strict=True))
    results = []
    for cell in cells:
        inputs = cell.draw()[:3]
        makers = {
            name: functools.partial(Entry, functools.partial(programs[cell, name], *inputs), jax.block_until_ready)
            for name in names
            if programs[cell, name] is not None
        }
        found = race.race(makers, rounds, pause=0.002)
        if "jax_flash" in found.errors:
            raise found.errors["jax_flash"]
        calls = race.chain_length(cell, pass_)
        best = {name: 1e6 * min(found.seconds[name]) / calls for name in found.seconds if name not in found.errors}
        results.append(Measured(cell, gradients, {name: best.get(name) for name in names}))
    return results


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
    """Prints rates, and their ratios to the aligned shape's."""
    cells = dict.fromkeys(itertools.chain.from_iterable((aligned, *odd) for aligned, odd in ODD.items()))
    measured = {x.cell: x for x in measure(cells, gradients=gradients, implementations=["jax_flash"])}
    rows = [["", "TFLOP/s", "of the aligned"]]
    for aligned, odd in ODD.items():
        for cell in (aligned, *odd):
            rates = [
                (3.5 if gradients else 1) * x.work / (measured[x].microseconds["jax_flash"] or 1e9) / 1e6
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
    show("short queries", measure(SHORT_WITH_GRADIENTS, gradients=True))
    show_odd(True)
