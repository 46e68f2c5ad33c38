"""Drawn calls with any combination of options: test_fuzz.py and draw_gpu.py share how they are drawn, run and checked.

A *program* is what is compiled; lengths, segments, offsets and all arrays of a *problem* are drawn from a seed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import cases
import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, PackedCase, Target

from jax_flash import flex

T = TypeVar("T")

Shape = tuple[int, int]

SHAPES: tuple[Shape, ...] = ((1, 1), (1, 37), (19, 1), (17, 33), (40, 24), (64, 64), (33, 130), (130, 70))
LARGE_SHAPES: tuple[Shape, ...] = (
    *((200, 300), (585, 646), (130, 515), (700, 90), (97, 690), (257, 257), (320, 577), (449, 384)),
)
"""Several tiles of every kernel family, for GPUs: on CPUs they would take most of the time."""

HEADS = ((1, 1), (2, 1), (3, 3), (4, 2))
MANY_HEADS = (*HEADS, (8, 1), (6, 6))
HEAD_DIMS = ((8, 8), (16, 16), (1, 3), (24, 40), (59, 59), (64, 32), (64, 64))
LARGE_HEAD_DIMS = (
    *((64, 64), (64, 192), (40, 24), (96, 96), (128, 128), (128, 64), (72, 128), (192, 128), (256, 256), (64, 256)),
)
INTERVALS = ("kv_start:bt", "kv_start:bnt kv_end:bnt", "q_start:s q_end:bns", "kv_end:t q_start:ns")
LIMITS = (None, 0, 3, 20)
LARGE_LIMITS = (*LIMITS, 100, 300)
DIMS = ("bnts", "nts", "bts", "ts", "bs", "ns", "s", "bnt", "t", "n", "")

SHARED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale": (0.0, -0.3, 0.05),
    "softcap": (3.0, 30.0),
    "sinks": (True,),
    "dropout_rate": (0.1, 0.5, 0.9),
    "precision": ("default", "highest"),
    "offsets": (True,),
    "arrays": (True,),  # scale and window are arrays, drawn from the seed
    "deterministic": (True,),
    "untrained": (True,),  # no gradients of bias, slopes and sinks
}
OPTIONS_OF_BATCHES: dict[str, tuple[Any, ...]] = {
    **SHARED_OPTIONS,
    "bias": DIMS,
    "bias_dtype": ("float32", "bfloat16", "float16"),
    "mask": DIMS,
    "alibi": ("n", "bn"),
    "segments": (1, 2, 3, 4, 5, 9),
    "q_lengths": (True,),
    "kv_lengths": (True,),
    "intervals": INTERVALS,
}
FUNCTIONS = ("mask_mod", "block_mask", "score_mod", "score_mod, block_mask")
LARGE_FUNCTIONS = ("band_mod", "band_blocks", "slopes_mod", "slopes_mod, band_blocks")
"""What of the other options is said by functions: the masks, or what changes scores; or only what does not capture
arrays of rows and keys, of whose sizes programs of another shape would be compiled with others."""
OPTIONS_OF_SEQUENCES: dict[str, tuple[Any, ...]] = {**SHARED_OPTIONS, "alibi": ("n", "dn")}


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled once for each shape."""

    packed: bool
    dtype: str
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    batch: tuple[int, ...]  # leading dimensions, or the number of sequences
    causal: bool
    options: tuple[tuple[str, Any], ...]

    def fits(self, shape: Shape) -> bool:
        """Whether the oracle takes no more than a second or two for a problem."""
        return int(np.prod(self.batch)) * self.heads[0] * shape[0] * shape[1] <= 1 << 22


class Chooser(Protocol):
    """The source of random choices: Hypothesis, or a generator of random numbers."""

    def one(self, values: Sequence[T]) -> T: ...
    def some(self, values: Sequence[T]) -> list[T]: ...


def program(choose: Chooser, dtypes: Sequence[str], *, large: bool = False) -> Program:
    """Draws a program; ``large``: with many heads and large head dims."""
    packed = choose.one((False, False, False, True))
    values = {**(OPTIONS_OF_SEQUENCES if packed else OPTIONS_OF_BATCHES), "window": LARGE_LIMITS if large else LIMITS}
    if not packed:
        values["functions"] = LARGE_FUNCTIONS if large else FUNCTIONS
    names = choose.some(sorted(values))
    options = {name: choose.one(values[name]) for name in names}
    if "window" in options:
        options["window"] = (options["window"], choose.one(values["window"]))
    return Program(
        packed=packed,
        dtype=choose.one(dtypes),
        heads=choose.one(MANY_HEADS if large else HEADS),
        head_dims=choose.one((*HEAD_DIMS, *LARGE_HEAD_DIMS) if large else HEAD_DIMS),
        batch=choose.one(((1,), (4,)) if packed else ((), (1,), (2,), (2, 2))),
        causal=choose.one((False, True)),
        options=tuple(sorted(options.items())),
    )


def problem_of(program: Program, shape: Shape, seed: int) -> cases.Problem:
    """A problem whose arrays, offsets, lengths and segments are determined by the seed."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = dict(program.options)
    for name in ("deterministic", "untrained", "functions"):  # the program's alone
        options.pop(name, None)
    q_length, kv_length = shape
    if "arrays" in options:
        left, right = rng.choice([*range(-20, 21), -(2**31), 2**31 - 1], 2)
        options |= {"scale": float(rng.choice([0.0, -0.3, 0.4])), "window": (int(left), int(right))}
    count = int(np.prod(program.batch))
    q_offset: Any = 0
    if options.pop("offsets", False):
        q_offset = tuple(int(x) for x in rng.integers(-q_length - 2, kv_length + 3, count))
    fields = {
        "name": f"drawn_{seed}",
        "q_heads": program.heads[0],
        "kv_heads": program.heads[1],
        "head_dim": program.head_dims[0],
        "value_head_dim": program.head_dims[1],
        "causal": program.causal,
        "q_offset": q_offset,
    }
    # Not through the caches of `cases`: no problem is used twice, and thousands of them would fill memory.
    if program.packed:
        lengths, tails = [], []
        for length in shape:
            cuts = np.sort(rng.integers(0, length + 1, count))
            lengths.append(tuple(int(x) for x in np.diff(cuts, prepend=0)))
            tails.append(length - int(cuts[-1]))
        problem = cases.packed_problem.__wrapped__(
            PackedCase(**fields, **options, q_lengths=lengths[0], kv_lengths=lengths[1], tails=tuple(tails)),
            program.dtype,
        )
        return dataclasses.replace(problem, max_q_length=q_length, max_kv_length=kv_length)
    for name, length in (("q_lengths", q_length), ("kv_lengths", kv_length)):
        if name in options:
            # Half of them much shorter than T or S: then whole tiles of the other side keep nothing.
            most = length // 6 if rng.integers(2) else length
            options[name] = tuple(int(x) for x in rng.integers(0, most + 1, count))
    case = Case(
        **fields,
        **options,
        q_length=q_length,
        kv_length=kv_length,
        leading=program.batch,
        spread=float(rng.choice([0.3, 1.0, 1.5])),
        bias_holes=float(rng.choice([0.0, 0.3])),
        mask_density=float(rng.choice([0.1, 0.7])),
        segments_sorted=bool(rng.integers(2)),
    )
    return cases.problem.__wrapped__(case, program.dtype)


def by_functions(kinds: str, problem: cases.Problem) -> Callable[..., Any]:
    """attention() with some of its options as functions, which compute the same."""
    batch, (q_heads, q_length), kv_length = problem.query.shape[:-3], problem.dlse.shape[-2:], problem.key.shape[-3]
    leading = int(np.prod(batch))

    def attend(*inputs: jax.Array, **options: Any) -> Any:
        q_offset = options.get("q_offset", 0)
        offsets = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), batch).reshape(leading)

        def read(name: str) -> Callable[..., jax.Array]:
            """Elements of an array that is broadcast to [*batch, N, T, S]."""
            x = jnp.asarray(options.pop(name))
            x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
            if x.shape[: len(batch)] != batch:
                x = jnp.broadcast_to(x, (*batch, *x.shape[-3:])) if any(n > 1 for n in x.shape[:-3]) else x
            x = x.reshape(-1, *x.shape[-3:])

            def of_pair(b: Any, h: Any, q: Any, kv: Any) -> jax.Array:
                place = (b, h, q - offsets[b], kv)
                return x[tuple(i if n > 1 else 0 for i, n in zip(place, x.shape, strict=True))]

            return of_pair

        masks: list[Callable[..., Any]] = []
        if "mask_mod" in kinds or "block" in kinds or "band" in kinds:
            if options.pop("causal", False):
                masks.append(lambda b, h, q, kv: q >= kv)
            window = options.get("window")
            if isinstance(window, tuple) and all(side is None or isinstance(side, int) for side in window):
                left, right = (2**20 if side is None else side for side in options.pop("window"))
                masks.append(lambda b, h, q, kv: (kv >= q - left) & (kv <= q + right))
            if "mask" in options and "band" not in kinds:
                masks.append(read("mask"))
        if masks:
            keeps = flex.and_masks(*masks)
            if "block" in kinds:
                size = None if isinstance(q_offset, jax.Array) else (leading, q_heads, q_length, kv_length)
                if size is not None and isinstance(q_offset, int):
                    options["block_mask"] = flex.create_block_mask(keeps, *size, q_offset=q_offset, block_size=(64, 32))
                    masks.clear()
            if masks:
                options["mask_mod"] = keeps
        steps: list[Callable[..., Any]] = []
        if "score_mod" in kinds or "slopes" in kinds:
            if "bias" not in options or "slopes" not in kinds:
                if cap := options.pop("softcap", None):
                    steps.append(lambda s, *_: jnp.asarray(cap, s.dtype) * jnp.tanh(s / jnp.asarray(cap, s.dtype)))
                if "bias" in options:
                    bias = read("bias")
                    steps.append(lambda s, *pair: s + bias(*pair).astype(s.dtype))
            if "alibi_slopes" in options:
                slopes = jnp.asarray(options.pop("alibi_slopes")).reshape(-1, q_heads)

                def alibi(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
                    slope = slopes[b if slopes.shape[0] > 1 else 0, h]
                    return s - slope.astype(s.dtype) * jnp.abs((q - kv).astype(s.dtype))

                steps.append(alibi)
        if steps:

            def score_mod(score: Any, *pair: Any) -> Any:
                for step in steps:
                    score = step(score, *pair)
                return score

            options["score_mod"] = score_mod
        return problem.attend(*inputs, **options)

    return attend


ARRAY = (np.ndarray, jax.Array)


class Compiled:
    """Out, lse and gradients of the problems of one program and shape, by one compiled function."""

    def __init__(self, target: Target, program: Program, problem: cases.Problem) -> None:
        options = problem.options
        self.target = target
        self.varying = [name for name, x in options.items() if any(isinstance(y, ARRAY) for y in jax.tree.leaves(x))]
        fixed = {name: x for name, x in options.items() if name not in self.varying}
        given = dict(program.options)
        self.trained = () if given.get("untrained") else tuple(problem.trainable)
        attend = functools.partial(
            by_functions(given["functions"], problem) if "functions" in given else problem.attend,
            **fixed,
            deterministic_backward=given.get("deterministic"),
            return_lse=True,
            implementation=target.implementation,
        )

        def differentiate(inputs: Any, trained: Any, others: Any, cotangents: Any) -> Any:
            results, pullback = jax.vjp(lambda inputs, trained: attend(*inputs, **trained, **others), inputs, trained)
            return results, *pullback(cotangents)

        # Compiled without LLVM's optimisations, in half of the time.
        compiler_options = {"xla_backend_optimization_level": 0} if target.platform == "cpu" else {}
        self.jitted = jax.jit(differentiate, compiler_options=compiler_options)

    def arguments(self, problem: cases.Problem) -> tuple[Any, ...]:
        trained = {name: problem.trainable[name] for name in self.trained}
        others = {name: problem.options[name] for name in self.varying if name not in trained}
        return problem.inputs, trained, others, (problem.dout, problem.dlse)

    def __call__(self, problem: cases.Problem) -> dict[str, np.ndarray]:
        # Contexts are thread-local.
        with jax.default_device(self.target.device), jax.default_matmul_precision("highest"):
            return cases.named(*jax.tree.map(np.asarray, self.jitted(*self.arguments(problem))))


def check(target: Target, problem: cases.Problem, results: dict[str, np.ndarray]) -> None:
    """Checks errors against fixed bounds, which mistakes in a mask, sum or factor exceed by far."""
    single = np.finfo(np.float64 if problem.query.dtype == np.float64 else np.float32).eps
    tf32 = 2.0**-10 if target.platform == "cuda" and problem.precision == "default" else 0.0
    for name, result in results.items():
        assert result.dtype == problem.dtype_of(name), name
        exponent = (single + tf32) * (1 + problem.right["largest_score"])  # weights inherit the error of scores
        epsilon = exponent + problem.epsilon(name)
        # Few keys, and their terms may cancel in every row.
        terms = np.sqrt(problem.right["squares"].get(name, np.zeros(1)))
        allowed = max(problem.slack(name, 16 * epsilon).maximum, 16 * epsilon * terms.max(initial=0.0))
        found = cases._errors(name, result, problem.right[name])
        assert found.maximum <= allowed, f"{target.id}: {name}: maximum error {found.maximum} > {allowed}"
        want = problem.right[name]
        norm = np.linalg.norm(want[np.isfinite(want)])
        # The CPU kernels have 0.9 epsilons at most.
        allowed = 8 * epsilon * max(1.0, np.linalg.norm(terms) / norm) if norm else 0.0
        assert found.l2 <= allowed, f"{target.id}: {name}: relative L2 error {found.l2} > {allowed}"
    problem.check_zeros(results)
