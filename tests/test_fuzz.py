"""Any combination of options, on any shape, agrees with the oracle, forward and backward.

JAX_FLASH_FUZZ_CASES is how many cases are drawn, 500 unless it says otherwise: five problems of each program, since
compiling is what takes the time.
"""

import concurrent.futures
import dataclasses
import functools
import os
from typing import Any

import cases
import jax
import numpy as np
import pytest
from cases import Case, PackedCase, Target
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

PROBLEMS = 10  # of each program
EXAMPLES = int(os.environ.get("JAX_FLASH_FUZZ_CASES", "500")) // PROBLEMS

SHAPES = st.sampled_from([(1, 1), (1, 37), (19, 1), (17, 33), (40, 24), (64, 64), (33, 130), (130, 70)])
HEADS = st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)])
HEAD_DIMS = st.sampled_from([(8, 8), (16, 16), (1, 3), (24, 40), (59, 59), (64, 32), (64, 64)])
WINDOWS = st.tuples(*[st.sampled_from([None, 0, 3, 20])] * 2)
DIMS = st.sampled_from(["bnts", "nts", "bts", "ts", "bs", "ns", "s", "bnt", "t", "n", ""])

OPTIONS = {
    "scale": st.sampled_from([0.0, -0.3, 0.05]),
    "window": WINDOWS,
    "softcap": st.sampled_from([3.0, 30.0]),
    "sinks": st.just(True),
    "dropout_rate": st.sampled_from([0.1, 0.5, 0.9]),
    "precision": st.sampled_from(["default", "highest"]),
    "offsets": st.just(True),
    "arrays": st.just(True),
}
OPTIONS_OF_BATCHES = {
    **OPTIONS,
    "bias": DIMS,
    "bias_dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    "mask": DIMS,
    "alibi": st.sampled_from(["n", "bn"]),
    "segments": st.integers(1, 5),
    "q_lengths": st.just(True),
    "kv_lengths": st.just(True),
}
OPTIONS_OF_DOCUMENTS = {**OPTIONS, "alibi": st.sampled_from(["n", "dn"])}


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled; what varies from problem to problem is drawn from a seed."""

    packed: bool
    dtype: str
    shape: tuple[int, int]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    batch: tuple[int, ...]  # leading dimensions, or the number of documents
    causal: bool
    options: tuple[tuple[str, Any], ...]


@st.composite
def programs(draw: st.DrawFn, dtypes: tuple[str, ...]) -> Program:
    packed = draw(st.sampled_from([False, False, False, True]))
    strategies = OPTIONS_OF_DOCUMENTS if packed else OPTIONS_OF_BATCHES
    names = draw(st.sets(st.sampled_from(sorted(strategies))))
    return Program(
        packed=packed,
        dtype=draw(st.sampled_from(dtypes)),
        shape=draw(SHAPES),
        heads=draw(HEADS),
        head_dims=draw(HEAD_DIMS),
        batch=draw(st.sampled_from([(1,), (4,)] if packed else [(), (1,), (2,), (2, 2)])),
        causal=draw(st.booleans()),
        options=tuple((name, draw(strategies[name])) for name in sorted(names)),
    )


def problem_of(program: Program, seed: int) -> cases.Problem:
    """Arrays, offsets, lengths and segments by the seed."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = dict(program.options)
    q_length, kv_length = program.shape
    if "arrays" in options:
        left, right = rng.choice([*range(-20, 21), -(2**31), 2**31 - 1], 2)
        options |= {"scale": float(rng.choice([0.0, -0.3, 0.4])), "window": (int(left), int(right))}
    count = int(np.prod(program.batch))
    q_offset: Any = 0
    if options.pop("offsets", False):
        q_offset = tuple(int(x) for x in rng.integers(-q_length - 2, kv_length + 3, count))
    fields = {
        "name": f"fuzz_{seed}",
        "q_heads": program.heads[0],
        "kv_heads": program.heads[1],
        "head_dim": program.head_dims[0],
        "value_head_dim": program.head_dims[1],
        "causal": program.causal,
        "q_offset": q_offset,
    }
    if program.packed:
        lengths, tails = [], []
        for length in program.shape:
            cuts = np.sort(rng.integers(0, length + 1, count))
            lengths.append(tuple(int(x) for x in np.diff(cuts, prepend=0)))
            tails.append(length - int(cuts[-1]))
        problem = cases.packed_problem(PackedCase(**fields, **options, q_lengths=lengths[0], kv_lengths=lengths[1],
                                                  tails=tuple(tails)), program.dtype)  # fmt: skip
        return dataclasses.replace(problem, max_q_length=q_length, max_kv_length=kv_length)
    for name, length in (("q_lengths", q_length), ("kv_lengths", kv_length)):
        if name in options:
            options[name] = tuple(int(x) for x in rng.integers(0, length + 1, count))
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
    return cases.problem(case, program.dtype)


ARRAY = (np.ndarray, jax.Array)
Results = list[dict[str, np.ndarray]]


def run(target: Target, problems: list[cases.Problem]) -> Results | NotImplementedError:
    """Results and gradients of problems of one program, or why it is refused."""
    options = [problem.options for problem in problems]
    varying = [name for name, x in options[0].items() if any(isinstance(y, ARRAY) for y in jax.tree.leaves(x))]
    fixed = {name: x for name, x in options[0].items() if name not in varying}
    attend = functools.partial(problems[0].attend, **fixed, return_lse=True, implementation=target.implementation)

    def differentiate(inputs: Any, trainable: Any, others: Any, cotangents: Any) -> Any:
        results, pullback = jax.vjp(lambda inputs, trainable: attend(*inputs, **trainable, **others), inputs, trainable)
        return results, *pullback(cotangents)

    # Compiled without LLVM's optimisations, in half of the time.
    compiler_options = {"xla_backend_optimization_level": 0} if target.platform == "cpu" else {}
    compiled = jax.jit(differentiate, compiler_options=compiler_options)
    found = []
    # Contexts belong to threads.
    with jax.default_device(target.device), jax.default_matmul_precision("highest"):
        for problem, of_problem in zip(problems, options, strict=True):
            others = {name: of_problem[name] for name in varying if name not in problem.trainable}
            try:
                results = compiled(problem.inputs, problem.trainable, others, (problem.dout, problem.dlse))
            except NotImplementedError as error:
                return error
            found.append(cases.named(*jax.tree.map(np.asarray, results)))
    return found


def check(program: Program, target: Target, problem: cases.Problem, results: dict[str, np.ndarray]) -> None:
    """A wrong mask, sum or factor is wrong by much more than this, and no yardstick has to be compiled."""
    single = np.finfo(np.float64 if program.dtype == "float64" else np.float32).eps
    tf32 = 2.0**-10 if target.platform == "cuda" and problem.precision == "default" else 0.0
    for name, result in results.items():
        assert result.dtype == problem.dtype_of(name), name
        exponent = (single + tf32) * (1 + problem.right["largest_score"])  # weights inherit the error of scores
        epsilons = 16 * (exponent + problem.epsilon(name))
        # Few keys, and their terms may cancel in every row.
        terms = np.sqrt(problem.right["squares"].get(name, np.zeros(1))).max(initial=0.0)
        allowed = max(problem.slack(name, epsilons).maximum, epsilons * terms)
        error = cases._errors(name, result, problem.right[name]).maximum
        assert error <= allowed, f"{target.id}: {name}: maximum error {error} > {allowed}"
    problem.check_zeros(results)


def fuzz(targets: tuple[Target, ...]) -> None:
    dtypes = tuple(dtype for dtype in cases.DTYPES if all(dtype in target.dtypes for target in targets))

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(programs(dtypes), st.lists(st.integers(0, 2**32 - 1), min_size=PROBLEMS, max_size=PROBLEMS, unique=True))
    def agree(program: Program, seeds: list[int]) -> None:
        problems = [problem_of(program, seed) for seed in seeds]
        with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
            found = list(pool.map(lambda target: run(target, problems), targets))
        for target, results in zip(targets, found, strict=True):
            if isinstance(results, NotImplementedError):
                event(f"{target.id} refuses")
                assert f"implementation={target.implementation!r} does not serve this call" in str(results)
                continue
            for problem, result in zip(problems, results, strict=True):
                check(program, target, problem, result)

    agree()


@pytest.mark.slow
def test_cpu_and_xla() -> None:
    fuzz((cases.CPU, cases.XLA))


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda() -> None:
    fuzz((cases.CUDA,))
