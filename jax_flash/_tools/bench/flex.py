"""``bench flex``: masks and scores as functions, against the built-in options that compute the same, XLA and PyTorch's
flex_attention."""

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import flex
from jax_flash._attention import attention
from jax_flash._call.options import Implementation
from jax_flash._native import _core, registration, tuned
from jax_flash._tools import doctor
from jax_flash._tools.bench import race
from jax_flash._tools.bench.flex_kinds import KINDS
from jax_flash._tools.bench.race import Cell, Entry
from jax_flash._tools.table import table

PASSES = ("forward", "backward")
CELLS = tuple(
    Cell("bfloat16", head_dim, length, False, batch, 2048 // head_dim)
    for head_dim, (batch, length) in itertools.product((64, 128), ((4, 4096), (1, 16384)))
)
CPU_CELLS = (Cell("float32", 64, 1024, False, 1, 4),)
JAX = types.SimpleNamespace(
    clip=jnp.clip, tanh=jnp.tanh, sigmoid=jax.nn.sigmoid, log=jnp.log, where=jnp.where,
    integer=lambda x: x.astype(jnp.int32),
)  # fmt: skip
"""The operations of an array library that the kinds are written with."""
CONTESTANTS = ("functions", "option", "xla", "torch")


def add_arguments(actions: Any) -> None:
    parser = actions.add_parser(
        "flex",
        help="masks and scores as functions, against options, XLA and PyTorch's flex_attention",
        description="Times the kinds of attention of examples/flex_gallery.py by score_mod and block_mask, forward and "
        "backward, in turn with the built-in options that compute the same, in tiles of the same size, and with "
        "PyTorch's flex_attention (on a GPU) or XLA (on a CPU). A ratio is their time over ours, in the medians of the "
        "rounds. Then what sparse block masks, partial tiles, a new function and create_block_mask cost.",
    )
    parser.add_argument("--only", action="append", choices=[*KINDS, *COSTS], help="may be given several times")
    parser.add_argument(
        "--rounds", type=_count, default=5, metavar="N", help="of all in turn (default: 5); 0: only compile them"
    )
    parser.add_argument("--family", metavar="F", help="run the kernels of this family, as JAX_FLASH_CUDA_FAMILY does")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write all that was measured as JSON")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return int(text)


# Contestants


def drawn(name: str, cell: Cell) -> dict[str, np.ndarray]:
    """The arrays that a kind's functions read; floats in float32."""
    found = KINDS[name].arrays(np.random.default_rng(0), cell)
    return {k: x.astype(np.float32) if x.dtype.kind == "f" else x for k, x in found.items()}


def by_training(arrays: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The arrays that are trained, those of floats, and the others."""
    trained = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return trained, {k: x for k, x in arrays.items() if k not in trained}


def ours(name: str, cell: Cell, pass_: str, implementation: Implementation) -> Entry:
    """By functions, with a block mask where there is a mask, made beforehand."""
    kind, arrays = KINDS[name], {k: jnp.asarray(x) for k, x in drawn(name, cell).items()}
    trained, others = by_training(arrays)
    of_batch = cell.batch if any(len(x) == cell.batch for x in others.values()) else None
    _, mask_mod = kind.mods(JAX, arrays, cell)
    lengths = cell.q_shape[1], cell.length
    block_mask = mask_mod and jax.jit(lambda: flex.create_block_mask(mask_mod, of_batch, None, *lengths))()

    def forward(fixed: Any, query: Any, key: Any, value: Any, *of_trained: Any) -> Any:
        others, block_mask = fixed
        score_mod, _ = kind.mods(JAX, {**others, **dict(zip(trained, of_trained, strict=True))}, cell)
        return attention(query, key, value, score_mod=score_mod, block_mask=block_mask, implementation=implementation)

    *inputs, dout = cell.draw()
    return race.of_function(forward, (others, block_mask), pass_)([*inputs, *trained.values(), dout])


def built_in(name: str, cell: Cell, pass_: str, implementation: Implementation) -> Entry:
    """By the options that compute the same, with the gradients of the same arrays."""
    option = KINDS[name].option
    assert option is not None
    options = option({k: jnp.asarray(x) for k, x in drawn(name, cell).items()})
    varying = {k: x for k, x in options.items() if isinstance(x, jax.Array)}
    static = {k: x for k, x in options.items() if k not in varying}
    trained, fixed = by_training(varying)

    def forward(fixed: Any, query: Any, key: Any, value: Any, *of_trained: Any) -> Any:
        found = {**static, **fixed, **dict(zip(trained, of_trained, strict=True))}
        return attention(query, key, value, **found, implementation=implementation)

    *inputs, dout = cell.draw()
    return race.of_function(forward, fixed, pass_)([*inputs, *trained.values(), dout])


def torch_flex(name: str, cell: Cell, pass_: str) -> Entry:
    """PyTorch's flex_attention, compiled, with its own block mask."""
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # which else stops compiling at the eighth function
    torch._functorch.config.donated_buffer = False  # for retain_graph
    xp = types.SimpleNamespace(
        clip=torch.clamp, tanh=torch.tanh, sigmoid=torch.sigmoid, log=torch.log, where=torch.where,
        integer=lambda x: x.to(torch.int32),
    )  # fmt: skip
    arrays = {k: torch.from_numpy(x).to("cuda") for k, x in drawn(name, cell).items()}
    trained = [x.requires_grad_() for x in arrays.values() if x.is_floating_point()] if pass_ == "backward" else []
    of_batch = any(not x.is_floating_point() and len(x) == cell.batch for x in arrays.values())
    score_mod, mask_mod = KINDS[name].mods(xp, arrays, cell)
    sizes = cell.batch if of_batch else None, None, cell.q_shape[1], cell.length
    block_mask = mask_mod and torch.compile(create_block_mask)(mask_mod, *sizes, device="cuda")
    torch.manual_seed(0)
    shape = cell.batch, cell.heads, cell.length, cell.head_dim
    query, key, value, dout = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    inputs = [x.requires_grad_(pass_ == "backward") for x in (query, key, value)]
    compiled = torch.compile(flex_attention, dynamic=False)

    def entry(**options: Any) -> Entry:
        def forward() -> Any:
            return compiled(*inputs, score_mod=score_mod, block_mask=block_mask, **options)

        run = forward
        if pass_ == "backward":
            out = forward()
            run = functools.partial(torch.autograd.grad, out, [*inputs, *trained], dout, retain_graph=True)
        run()  # compiles
        return Entry(run, lambda _: torch.cuda.synchronize())

    try:
        return entry()
    except Exception:  # its default tiles need more shared memory than there is
        return entry(kernel_options={"num_stages": 1})


def contestants(name: str, cell: Cell, pass_: str, platform: str) -> dict[str, Callable[[], Entry]]:
    of_cell = name, cell, pass_
    kernels: Implementation = "cuda" if platform == "gpu" else "cpu"
    found: dict[str, Callable[[], Entry]] = {"functions": functools.partial(ours, *of_cell, kernels)}
    if KINDS[name].option:
        found["option"] = functools.partial(built_in, *of_cell, kernels)
    if platform == "gpu":
        found["torch"] = functools.partial(torch_flex, *of_cell)
    else:
        found["xla"] = functools.partial(ours, *of_cell, "xla")
    return found


# Measurement


@dataclasses.dataclass
class Row:
    """Milliseconds of the rounds by contestant, and why a contestant has none."""

    kind: str
    cell: str
    pass_: str
    rounds: dict[str, list[float]]
    errors: dict[str, str]

    def milliseconds(self, name: str) -> float | None:
        return statistics.median(self.rounds[name]) if self.rounds.get(name) else None

    def ratio(self, name: str) -> float | None:
        """The time of a contestant over ours."""
        own, other = self.milliseconds("functions"), self.milliseconds(name)
        return other / own if own and other else None


def measured(kind: str, cell: Any, pass_: str, makers: Mapping[str, Callable[[], Entry]], rounds: int) -> Row:
    found = race.race(makers, rounds, seconds=0.03, pause=0.01)
    times = {name: [1e3 * x for x in seconds] for name, seconds in found.seconds.items() if name not in found.errors}
    return Row(kind, str(cell), pass_, times, {name: doctor.first_line(x) for name, x in found.errors.items()})


@contextlib.contextmanager
def rows_of_functions(head_dim: int) -> Iterator[None]:
    """Within, plain calls have the tile rows of calls with functions, where GPUs have others for them."""
    rows = []
    for device in registration.cuda_status()["devices"]:
        for pass_ in PASSES if device["family"] else ():
            arch = device["compute_capability"]
            found = _core.tile_row(arch=arch, pass_=pass_, head_dim=head_dim, functions=True)
            rows.append(tuned.TunedRow(device["name"], found["family"], pass_, head_dim, found["row"]))
    tuned.tell(rows)
    try:
        yield
    finally:
        tuned.use_stored()


def kinds(only: Sequence[str], rounds: int, platform: str) -> Iterator[Row]:
    cells = CELLS if platform == "gpu" else CPU_CELLS
    for name, kind in KINDS.items():
        if name in only:
            for cell, pass_ in itertools.product(cells if kind.every_shape else cells[:1], PASSES):
                with rows_of_functions(cell.head_dim):
                    row = measured(name, cell, pass_, contestants(name, cell, pass_, platform), rounds)
                yield row
                free()


def free() -> None:
    """Frees what the last row held, which programs and graphs of PyTorch refer to in cycles."""
    jax.clear_caches()
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


# What else a function costs


def _of_block_mask(block_mask: Any, cell: Cell, pass_: str, implementation: Implementation) -> Entry:
    def forward(block_mask: Any, query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value, block_mask=block_mask, implementation=implementation)

    return race.of_function(forward, block_mask, pass_)(cell.draw())


def sparse(cell: Cell, pass_: str, implementation: Implementation) -> dict[str, Callable[[], Entry]]:
    """A block mask that keeps a share of its blocks, drawn at random, all full: "functions" is the call without one."""
    blocks = cell.length // 128
    order = np.random.default_rng(0).permuted(np.tile(np.arange(blocks), (blocks, 1)), axis=1)[None, None]
    none = np.zeros((1, 1, blocks), np.int32)

    def of(share: int) -> Entry:
        counts = np.full((1, 1, blocks), blocks // share, np.int32)
        kept = np.sort(order[..., : blocks // share], axis=-1).astype(np.int32)
        block_mask = flex.BlockMask.from_lists(
            none, kept, counts, kept, lengths=(cell.length, cell.length), block_size=128
        )  # fmt: skip
        return _of_block_mask(block_mask, cell, pass_, implementation)

    plain = functools.partial(_of_block_mask, None, cell, pass_, implementation)
    return {"functions": plain, **{f"1/{share}": functools.partial(of, share) for share in (1, 2, 4, 8)}}


def partial(cell: Cell, pass_: str, implementation: Implementation) -> dict[str, Callable[[], Entry]]:
    """Neighbourhood attention, all of whose blocks are partial, and the same blocks by one comparison, as those on the
    diagonal of a causal mask have: "functions" is the latter."""
    _, mask_mod = KINDS["neighbourhood"].mods(JAX, {}, cell)
    assert mask_mod is not None
    made = jax.jit(lambda: flex.create_block_mask(mask_mod, None, None, cell.length, cell.length))()
    kinds = np.asarray(made.kinds)
    order = np.argsort(kinds == 0, axis=-1, kind="stable").astype(np.int32)
    simple = flex.BlockMask.from_lists(
        (kinds > 0).sum(-1).astype(np.int32), order, lengths=(cell.length, cell.length), block_size=128,
        mask_mod=lambda b, h, q, kv: q + 2048 >= kv,
    )  # fmt: skip
    return {
        "functions": functools.partial(_of_block_mask, simple, cell, pass_, implementation),
        "neighbourhood": functools.partial(_of_block_mask, made, cell, pass_, implementation),
    }


# Functions of a number that no call had before.
UNSEEN: Mapping[str, Callable[[float], Callable[..., Any]]] = {
    "slope": lambda unseen: lambda score, b, h, q, kv: score - unseen * jnp.abs(q - kv).astype(score.dtype),
    "cap": lambda unseen: lambda score, b, h, q, kv: unseen * jnp.tanh(score / unseen),
    "sine": lambda unseen: lambda score, b, h, q, kv: score + jnp.sin((q - kv).astype(score.dtype) * unseen),
}


def first_use(name: str, cell: Cell, implementation: Implementation) -> float:
    """Seconds of forward and backward of a function that was never seen before, less those of the second call."""
    score_mod = UNSEEN[name](1 + time.time() % 1e4)
    query, key, value, dout = cell.draw()

    @jax.jit
    def both(query: Any, key: Any, value: Any, dout: Any) -> Any:
        attend = functools.partial(attention, score_mod=score_mod, implementation=implementation)
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(dout)

    times = []
    for _ in range(2):
        began = time.perf_counter()
        jax.block_until_ready(both(query, key, value, dout))
        times.append(time.perf_counter() - began)
    return times[0] - times[1]


def create_block_mask(length: int = 131072) -> Entry:
    """That of a window."""
    window = lambda b, h, q, kv: (q >= kv) & (q - kv < 4096)  # noqa: E731
    make = jax.jit(lambda: flex.create_block_mask(window, None, None, length, length))
    return Entry(make, jax.block_until_ready)


COSTS = ("sparse", "partial", "first_use", "create_block_mask")


def costs(only: Sequence[str], rounds: int, platform: str) -> Iterator[Row]:
    implementation: Implementation = "cuda" if platform == "gpu" else "cpu"
    cell = CELLS[2] if platform == "gpu" else CPU_CELLS[0]
    for name, makers in (("sparse", sparse), ("partial", partial)):
        if name in only:
            for pass_ in PASSES:
                yield measured(name, cell, pass_, makers(cell, pass_, implementation), rounds)
                free()
    if "first_use" in only and rounds:
        for name in UNSEEN:
            seconds = [first_use(name, cell, implementation) for _ in range(3)]
            yield Row(f"first_use {name}", str(cell), "both", {"functions": [1e3 * x for x in seconds]}, {})
    if "create_block_mask" in only:
        yield measured("create_block_mask", "S 131072, window", "-", {"functions": create_block_mask}, rounds)


# Results


def show(row: Row) -> None:
    cells = []
    for name in row.rounds:
        milliseconds, ratio = row.milliseconds(name), row.ratio(name)
        text = "compiled" if milliseconds is None else f"{milliseconds:.3f} ms"
        cells.append(f"{name} {text}" + ("" if ratio is None or name == "functions" else f" ({ratio:.2f})"))
    cells += [f"{name}: {error}" for name, error in row.errors.items()]
    print(f"{row.kind:<18}{row.cell:<20}{row.pass_:<10}{', '.join(cells)}", flush=True)


def means(rows: Sequence[Row]) -> list[list[str]]:
    """By pass and contestant: the geometric mean and the least of the ratios of all kinds."""
    found = [["", "geometric mean", "least", "rows"]]
    for pass_, name in itertools.product(PASSES, CONTESTANTS[1:]):
        ratios = [r for row in rows if row.kind in KINDS and row.pass_ == pass_ and (r := row.ratio(name))]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            found.append([f"{pass_}: {name} / ours", f"{mean:.2f}", f"{min(ratios):.2f}", str(len(ratios))])
    return found


def run(args: argparse.Namespace) -> bool:
    """Times all, and prints a line for each. Returns whether ours ran everywhere."""
    platform = jax.default_backend()
    only = args.only or [*KINDS, *COSTS]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; time over ours in parentheses")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in itertools.chain(kinds(only, args.rounds, platform), costs(only, args.rounds, platform)):
        show(row)
        rows.append(row)
        if args.out:  # after every row, for all of them take minutes
            args.out.write_text(json.dumps([dataclasses.asdict(x) for x in rows], indent=1), encoding="utf-8")
    if args.rounds:
        print(table(means(rows), right=(1, 2, 3)))
    return not any("functions" in row.errors for row in rows)
