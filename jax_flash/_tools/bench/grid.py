"""``bench``: this package against other implementations on this machine's GPU, and two builds against each other."""

import argparse
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._native import registration, tuned
from jax_flash._tools import doctor
from jax_flash._tools.bench import compare, flex, race, seed_rows, seeds, small
from jax_flash._tools.bench import ladder as _ladder
from jax_flash._tools.bench import peers as _peers
from jax_flash._tools.bench import tune as _tune
from jax_flash._tools.bench.compare import Task
from jax_flash._tools.bench.exact import both, exact_results, one_entry, relative_error
from jax_flash._tools.bench.race import Cell, Race
from jax_flash._tools.report import Notes
from jax_flash._tools.table import table

PASSES = {"forward": 1.0, "backward": 2.5}
"""What is timed, and its work as a multiple of forward's."""

HEAD_DIMS, LENGTHS = (64, 128, 256), (1024, 4096, 16384)
TOKENS, WIDTH = 16384, 2048
"""B * S and N * H of every cell."""

OURS = "jax_flash"
_DEFAULT_PEERS = {"sm80": ("fa2-jax", "fa2-torch")}
"""Default peers by family; for the others all but XLA, whose attention is the slowest and keeps all scores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of ``bench``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    grid_ = actions.add_parser(
        "grid",
        help="the speed of 36 cells, against every peer that is installed",
        description="Times forward and backward of bfloat16 attention with 16384 tokens of width 2048, at head_dim 64, "
        "128 and 256, length 1024, 4096 and 16384, full and causal, in turn with the peers in this process. TFLOP/s, "
        "the best of the rounds; the ratio is ours to the best peer's. Peers that are not installed are named.",
    )
    grid_.add_argument("--family", metavar="F", help="run the kernels of this family, as JAX_FLASH_CUDA_FAMILY does")
    grid_.add_argument("--pass", dest="passes", action="append", choices=list(PASSES), help="one pass alone")
    grid_.add_argument("--head-dim", dest="head_dims", action="append", type=int, choices=HEAD_DIMS, help="this alone")
    grid_.add_argument(
        "--length", dest="lengths", action="append", type=int, choices=(512, *LENGTHS), help="this alone"
    )
    grid_.add_argument(
        "--peers",
        type=_names,
        metavar="A,B",
        help=f"of {', '.join(_peers.PEERS)} (default: all but xla; with --family sm80 the fa2 ones)",
    )
    grid_.add_argument("--rounds", type=_positive, default=4, metavar="N", help="rounds of all in turn (default: 4)")
    grid_.add_argument("--deterministic", action="store_true", help="time deterministic_backward=True too, backward")
    grid_.add_argument(
        "--numerics",
        action="store_true",
        help="errors in place of speeds: relative L2 against float64 of some heads, ours and cuDNN's",
    )

    actions.add_parser(
        "small",
        help="small, short and odd shapes, against XLA and cuDNN",
        description="Times chains of calls inside one jit: single tiles, short queries with many keys, grouped heads "
        "and lengths that no tile divides, against XLA's and cuDNN's attention.",
    )
    actions.add_parser(
        "memory",
        help="the memory of forward + backward, against plain attention",
        description="Compiles forward + backward of float16 attention, ours and plain attention (XLA's, which keeps "
        "scores), and prints the peak of their memory by XLA's own analysis, inputs and results with it. It needs an "
        "NVIDIA GPU that JAX sees, since the analysis is that of its compiler, and hardly any of the GPU's memory, "
        "since nothing is run.",
    )

    compared = actions.add_parser(
        "compare",
        help="whether one build of this package is slower than another",
        description="Times two wheels in turn, each in processes of its own with the same Python and jax, and shows "
        "B / A and the spread of A against itself. What lies outside that spread is measured again in other "
        "processes, and is slower if it lies outside again. The exit code is 1 where B is slower by more than a limit.",
    )
    for name in compare.BUILDS:
        compared.add_argument(name.lower(), metavar=f"{name}.whl", type=pathlib.Path, help=f"the wheel of {name}")
    compared.add_argument(
        "--cells",
        choices=("grid", "small", "float32", "cpu"),
        help="the shapes of bench grid; single tiles and decoding in chains inside one jit; float32 of all sizes on a "
        "GPU; those for CPUs (default: grid if there is a GPU, else cpu)",
    )
    compared.add_argument("--family", metavar="F", help="run the kernels of this family, as JAX_FLASH_CUDA_FAMILY does")
    compared.add_argument(
        "--seconds", type=_seconds, default=240.0, metavar="S", help="about how long it takes at most (default: 240)"
    )
    compared.add_argument(
        "--processes", type=_positive, default=3, metavar="N", help="processes of each build (default: 3)"
    )
    for flag, what, default in (("--limit", "any cell", 2.0), ("--mean-limit", "the geometric mean", 0.5)):
        compared.add_argument(
            flag,
            type=_percent,
            default=default / 100,
            metavar="P",
            help=f"how many percent slower {what} may be (default: {default:g})",
        )
    compared.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write all that was measured as JSON")

    tune = actions.add_parser(
        "tune",
        help="search for the fastest tile rows on this GPU",
        description="Compiles the kernels with every tile row that makes sense, leaves out what spills, does not fit "
        "or is wrong, times the others and shows them beside the row of the table. With --store, rows that are at "
        "least 1% faster go to the folder of the kernel cache, and plain calls of that head_dim on such GPUs take "
        "them from then on. docs/ledger says how the table's own rows were found.",
    )
    tune.add_argument("--family", metavar="F", help="tune the kernels of this family, as JAX_FLASH_CUDA_FAMILY has it")
    tune.add_argument(
        "--head-dim", dest="head_dims", action="append", type=_head_dim, metavar="H", help="default: 64, 128 and 256"
    )
    tune.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=tuned.PASSES,
        help="default: forward and backward; backward_dq is the part for dquery, where it has one of its own",
    )
    tune.add_argument("--rounds", type=_positive, default=5, metavar="N", help="of the last heat (default: 5)")
    tune.add_argument("--store", action="store_true", help="keep what is faster than the table's, and use it")

    ladder = actions.add_parser(
        "ladder",
        help="the gain of each technique of the kernels",
        description="Builds the kernels of Ampere (--family sm80) or Hopper (sm90a) up from a plain version, one "
        "technique a step, and times every step: TFLOP/s at S 4096, full / causal. Every version is first shown to be "
        "right.",
    )
    ladder.add_argument("--family", choices=("sm80", "sm90a"), help="default: the one that serves this GPU")
    ladder.add_argument("--pass", dest="passes", action="append", choices=list(PASSES), help="one pass alone")
    ladder.add_argument("--head-dim", dest="head_dims", action="append", type=int, choices=HEAD_DIMS, help="this alone")
    ladder.add_argument("--rounds", type=_positive, default=3, metavar="N", help="rounds of all in turn (default: 3)")

    flex.add_arguments(actions)
    seeds.add_arguments(actions)


def run(args: argparse.Namespace) -> bool:
    """Runs an action. Returns whether all of it succeeded."""
    if getattr(args, "family", None):
        os.environ["JAX_FLASH_CUDA_FAMILY"] = args.family
    actions = {
        "grid": _grid,
        "memory": _memory,
        "tune": _search,
        "ladder": _climb,
        "small": _small,
        "compare": _compare_builds,
        "flex": flex.run,
        "seeds": seeds.run,
    }
    return actions[args.action](args)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in _peers.PEERS]:
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(_peers.PEERS)}, got {unknown[0]!r}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def _number(least: float, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least {least:g}, got {text!r}")
    return number


def _seconds(text: str) -> float:
    return _number(1, text)


def _percent(text: str) -> float:
    """Percent as a fraction."""
    return _number(0, text) / 100


def _head_dim(text: str) -> int:
    if not text.isdecimal() or int(text) not in range(8, 257, 8):
        raise argparse.ArgumentTypeError(f"must be a multiple of 8 up to 256, got {text!r}")
    return int(text)


def device() -> jax.Device:
    """The GPU that is measured. Raises RuntimeError if there is none."""
    found = doctor._devices("cuda")
    if not found:
        raise RuntimeError(
            "JAX has no CUDA device here, and what is measured are its kernels: it needs an NVIDIA GPU, and "
            "jax[cuda12] or jax[cuda13]"
        )
    return found[0]


def cells(head_dims: Iterable[int] | None = None, lengths: Iterable[int] | None = None) -> list[Cell]:
    """The shapes of the grid."""
    return [
        Cell("bfloat16", head_dim, length, causal, TOKENS // length, WIDTH // head_dim)
        for head_dim, causal, length in itertools.product(head_dims or HEAD_DIMS, (False, True), lengths or LENGTHS)
    ]


# The grid


def _grid(args: argparse.Namespace) -> bool:
    here = device()
    family = _family()
    print(f"{here.device_kind}, kernels of {family}, jax {jax.__version__}")
    shapes = cells(args.head_dims, args.lengths)
    with jax.default_device(here):
        if args.numerics:
            return _numerics(shapes)
        peers = _loaded(args.peers or _DEFAULT_PEERS.get(family, [name for name in _peers.PEERS if name != "xla"]))
        return _speeds(shapes, args.passes or PASSES, peers, args.rounds, args.deterministic)


def _family() -> str:
    """The family that serves the first GPU. Raises RuntimeError for a named family that it can't run."""
    devices = registration.cuda_status()["devices"]
    return devices[0]["family"] if devices else "none"


def _loaded(names: Iterable[str]) -> dict[str, _peers.Maker]:
    """The peers that can be imported; for the others it prints the reason."""
    found = {}
    for name in names:
        peer = _peers.PEERS[name]
        try:
            found[name] = peer.load()
            print(f"{name}: {peer.what}")
        except Exception as error:  # anything may go wrong in another package's import
            print(f"{name}: not here, {doctor.first_line(error)}")
    return found


def _speeds(
    shapes: Sequence[Cell],
    passes: Iterable[str],
    peers: Mapping[str, _peers.Maker],
    rounds: int,
    deterministic: bool,
) -> bool:
    print("TFLOP/s, best of the rounds; ratio: ours to that of the best peer\n", flush=True)
    extra = ["deterministic"] if deterministic else []
    rows = [["pass", "head_dim", "", "S", OURS, *extra, *peers, "ratio"]]
    notes, ratios = Notes(), dict[str, list[float]]()
    complete = True
    for pass_, cell in itertools.product(passes, shapes):
        entrants = {OURS: _peers.ours()}
        if deterministic and pass_ == "backward":
            entrants["deterministic"] = _peers.ours(deterministic_backward=True)
        arrays = cell.draw()
        makers = {name: functools.partial(make, cell, pass_, arrays) for name, make in {**entrants, **peers}.items()}
        found = race.race(makers, rounds, seconds=0.03, pause=0.03)
        rates = rates_of(found, PASSES[pass_] * cell.work)
        best = max((rates[name] for name in peers if name in rates), default=math.nan)
        ratio = rates.get(OURS, math.nan) / best
        complete = complete and OURS in rates
        if not math.isnan(ratio):
            ratios.setdefault(pass_, []).append(ratio)
        row = [pass_, str(cell.head_dim), "causal" if cell.causal else "full", str(cell.length)]
        row += [
            f"{rates[name]:.1f}" if name in rates else notes(found.errors[name]) if name in found.errors else ""
            for name in (OURS, *extra, *peers)
        ]
        row.append(f"{ratio:.3f}")
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    print(table(rows, right=[1, *range(3, len(rows[0]))]))
    notes.print()
    for pass_, some in ratios.items():
        least = f"least {min(some):.3f}, {sum(x >= 1 for x in some)} of {len(some)} at 1 or more"
        print(f"{pass_}: geometric mean of ratios {statistics.geometric_mean(some):.3f}, {least}")
    return complete


def rates_of(found: Race, work: float) -> dict[str, float]:
    """TFLOP/s of the best round, for contestants that ran all rounds."""
    return {name: work / min(some) / 1e12 for name, some in found.seconds.items() if name not in found.errors and some}


# Errors


def _numerics(shapes: Sequence[Cell]) -> bool:
    """Prints the table. Returns whether no error of ours is larger than cuDNN's, where cuDNN serves."""
    print("relative L2 errors against float64 of eight heads of every batch entry: ours / cuDNN's\n", flush=True)
    contestants: dict[str, race.Attend] = {
        OURS: _peers.attend,
        "cudnn": functools.partial(_peers.attend_nn, "cudnn"),
    }
    names = ("out", "dquery", "dkey", "dvalue")
    rows, notes, good = [["head_dim", "", "S", *names, "worst"]], Notes(), True
    for cell in shapes:
        heads = np.arange(0, cell.heads, max(1, cell.heads // 8))
        squares: dict[str, list[float]] = {}
        row = [str(cell.head_dim), "causal" if cell.causal else "full", str(cell.length)]
        # Under causal the first rows dominate the error: that of one entry varies by 1% from draw to draw.
        draws = max(1, 4 // cell.batch)
        for seed in range(draws):
            arrays = cell.draw(seed)
            exact = exact_results([one_entry(x[:, :, heads]) for x in arrays], cell.causal)
            for name in [*contestants] if not seed else [*squares]:
                try:
                    results = jax.jit(functools.partial(both, contestants[name], cell.causal))(*arrays)
                    found = [
                        relative_error(np.asarray(one_entry(x[:, :, heads]), np.float64), y) ** 2
                        for x, y in zip(results, exact, strict=True)
                    ]
                    squares[name] = [x + y for x, y in zip(squares.get(name, [0.0] * 4), found, strict=True)]
                except Exception as error:
                    row.append(notes(error))
        errors = {name: [math.sqrt(x / draws) for x in found] for name, found in squares.items()}
        if OURS not in errors:
            good = False
        if "cudnn" in errors and OURS in errors:
            pairs = list(zip(errors[OURS], errors["cudnn"], strict=True))
            row += [f"{mine:.3e} / {theirs:.3e}" for mine, theirs in pairs]
            worst = max(mine / theirs for mine, theirs in pairs)
            # Two right kernels round differently: an error that is equal up to the noise of one draw is no worse.
            good = good and worst <= 1.02
            row.append(f"{worst:.3f}")
        elif OURS in errors:
            row += [f"{mine:.3e}" for mine in errors[OURS]]
        row = row[: len(rows[0])] + [""] * (len(rows[0]) - len(row))
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    print(table(rows, right=(0, 2, 7)))
    notes.print()
    return good


# Tile rows


def _search(args: argparse.Namespace) -> bool:
    here = device()
    kernels = registration.cuda_status()["devices"][0]
    print(f"{here.device_kind}, kernels of {kernels['family']}, jax {jax.__version__}")
    with jax.default_device(here):
        passes = args.passes or ("forward", "backward")
        return _tune.tune(here, kernels, args.head_dims or HEAD_DIMS, passes, args.rounds, args.store)


# The ladder


def _climb(args: argparse.Namespace) -> bool:
    here = device()
    kernels = registration.cuda_status()["devices"][0]
    print(f"{here.device_kind}, jax {jax.__version__}")
    with jax.default_device(here):
        return _ladder.climb(kernels, args.passes or list(PASSES), args.head_dims or HEAD_DIMS, args.rounds)


# Small shapes


def _small(_: argparse.Namespace) -> bool:
    with jax.default_device(device()):
        small.run()
    return True


# Two builds


def compared_tasks(name: str) -> list[Task]:
    """The tasks of ``bench compare --cells``."""
    if name == "grid":
        return [Task(cell, pass_) for pass_ in PASSES for cell in cells()]
    if name == "small":
        forward = (*small.SMALL, *(cell for cell in small.SHORT if cell.kv_heads == 8))
        return [
            *(Task(cell, "forward", chained=True) for cell in forward),
            *(Task(cell, "forward + backward", chained=True) for cell in small.SMALL),
        ]
    if name == "float32":
        chained = [Task(cell, pass_, chained=True) for cell in FLOAT32_SMALL for pass_ in CHAINED_PASSES]
        short = Cell("float32", 128, 2048, False, 2, 32, q_length=1, kv_heads=8)
        return [
            *chained,
            Task(short, "forward", chained=True),
            *(Task(cell, pass_) for cell in FLOAT32_LARGE for pass_ in PASSES),
        ]
    tasks = []
    for dtype in ("float32", "bfloat16"):
        for pass_, causal, (length, heads, head_dim) in itertools.product(PASSES, (False, True), CPU_SHAPES):
            tasks.append(Task(Cell(dtype, head_dim, length, causal, 1, heads), pass_))
        tasks.append(Task(Cell(dtype, 128, 8192, False, 1, 32, q_length=1, kv_heads=8), "forward"))
        tiny = Cell(dtype, 32, 64, True, 1, 4)
        tasks += [Task(tiny, pass_, chained=True) for pass_ in CHAINED_PASSES]
    return tasks


CHAINED_PASSES = ("forward", "forward + backward")
FLOAT32_SMALL = (
    Cell("float32", 64, 128, False, 1, 1),
    Cell("float32", 64, 128, True, 4, 16),
    Cell("float32", 64, 256, True, 1, 8),
    Cell("float32", 64, 512, True, 8, 12),
    Cell("float32", 64, 1024, True, 1, 16),
)
FLOAT32_LARGE = (
    Cell("float32", 64, 1024, True, 4, 16),
    Cell("float32", 128, 2048, True, 4, 16),
    Cell("float32", 128, 2048, False, 4, 16, kv_heads=4),
    Cell("float32", 256, 4096, True, 1, 8),
)


CPU_SHAPES = ((512, 8, 64), (1024, 8, 64), (1024, 4, 128))
"""S, N and H of one batch entry: a few milliseconds to tens of them."""


def _compare_builds(args: argparse.Namespace) -> bool:
    def choose(platform: str) -> list[Task]:
        name = args.cells or ("cpu" if platform == "cpu" else "grid")
        if name != "cpu" and platform == "cpu":
            raise RuntimeError(f"JAX has no CUDA device here, which --cells {name} needs")
        return compared_tasks(name)

    wheels = args.a, args.b
    result = compare.compare(
        wheels,
        choose,
        environment={"JAX_PLATFORMS": "cpu"} if args.cells == "cpu" else {},
        processes=args.processes,
        seconds=args.seconds,
        say=functools.partial(print, file=sys.stderr, flush=True),
    )
    good = compare.show(result, args.limit, args.mean_limit)
    if args.out:
        args.out.write_text(json.dumps(compare.as_json(result, wheels, args.limit, args.mean_limit), indent=1) + "\n")
    return good


# Memory

MEMORY = (
    *((1, 1, size, size) for size in (16, 32, 64, 128, 256)),
    (1, 16, 1024, 64),
    (1, 32, 1024, 64),
    (1, 16, 1024, 128),
    (1, 32, 2048, 128),
    (1, 32, 4096, 128),
    (1, 16, 1024, 256),
    (1, 32, 2048, 256),
    (1, 32, 4096, 256),
)
"""B, N, T = S and H: the shapes of the table of the seed project flash-attention-v100, kernels for Volta."""


def _memory(_: argparse.Namespace) -> bool:
    here = device()
    print(f"{here.device_kind}, kernels of {_family()}, jax {jax.__version__}")
    print(f"compiling four programs for each of {len(MEMORY)} shapes, and running none of them", file=sys.stderr)
    print("peak memory of forward + backward in MiB, float16, with inputs, results and all that is kept between them;")
    print("temporary: what ours takes of it besides inputs, results and what forward keeps\n")
    rows = [["B", "N", "S", "H", "plain", "ours", "saved", "temporary: forward", "backward"]]
    with jax.default_device(here):
        for batch, heads, length, head_dim in MEMORY:  # causal or not makes no difference
            cell = Cell("float16", head_dim, length, True, batch, heads)
            plain, own = (
                peak_bytes(attend, cell) for attend in (functools.partial(_peers.attend_nn, "xla"), _peers.attend)
            )
            row = [*map(str, (batch, heads, length, head_dim))]
            row += [f"{size / 2**20:.2f}" for size in (plain, own)] + [f"{1 - own / plain:.0%}"]
            rows.append([*row, *(f"{temporary_bytes(cell, pass_) / 2**20:.2f}" for pass_ in PASSES)])
    print(table(rows, right=range(len(rows[0]))))
    return True


def peak_bytes(attend: race.Attend, cell: Cell) -> int:
    """Peak bytes of forward and backward in one program, by XLA's analysis."""
    return seed_rows.peak_of(seed_rows.compile_both(attend, cell))


def temporary_bytes(cell: Cell, pass_: str) -> int:
    """Temporary bytes of our kernels, for one pass as a program of its own."""
    *inputs, dout = _shapes(cell)

    def forward(*inputs: jax.Array) -> Any:
        query, key, value = inputs
        return _peers.attend(query, key, value, cell.causal)

    if pass_ == "forward":
        lowered = jax.jit(forward).lower(*inputs)
    else:
        kept, tree = jax.tree.flatten(jax.eval_shape(lambda *inputs: jax.vjp(forward, *inputs)[1], *inputs))
        lowered = jax.jit(lambda kept, dout: jax.tree.unflatten(tree, kept)(dout)).lower(kept, dout)
    found = lowered.compile().memory_analysis()
    assert found is not None
    size: int = found.temp_size_in_bytes
    return size


def _shapes(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(cell.dtype))] * 4
