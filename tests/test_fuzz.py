"""Any combination of options, on any shape, agrees with the oracle, forward and backward.

JAX_FLASH_FUZZ_CASES is how many cases are drawn, 500 unless it says otherwise: ten problems of each program, since
compiling is what takes the time. draw_gpu.py draws from more on GPUs, with kernels that are compiled before.
"""

import concurrent.futures
import os
from collections.abc import Sequence

import cases
import drawing
import numpy as np
import pytest
from cases import Target
from drawing import T
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

PROBLEMS = 10  # of each program
EXAMPLES = int(os.environ.get("JAX_FLASH_FUZZ_CASES", "500")) // PROBLEMS


class Drawn:
    """Choices of Hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def one(self, values: Sequence[T]) -> T:
        return self.draw(st.sampled_from(values))

    def some(self, values: Sequence[T]) -> list[T]:
        return sorted(self.draw(st.sets(st.sampled_from(values))))  # type: ignore[type-var]


@st.composite
def programs(draw: st.DrawFn, dtypes: tuple[str, ...], large: bool) -> tuple[drawing.Program, drawing.Shape]:
    choose = Drawn(draw)
    program = drawing.program(choose, dtypes, large=large)
    shapes = (*drawing.SHAPES, *drawing.LARGE_SHAPES) if large else drawing.SHAPES
    return program, choose.one([shape for shape in shapes if program.fits(shape)])


Results = list[dict[str, np.ndarray]]


def run(target: Target, program: drawing.Program, problems: list[cases.Problem]) -> Results | NotImplementedError:
    """Results and gradients of problems of one program and shape, or why the target refuses them."""
    compiled = drawing.Compiled(target, program, problems[0])
    try:
        return [compiled(problem) for problem in problems]
    except NotImplementedError as error:
        return error


def fuzz(targets: tuple[Target, ...], *, large: bool) -> None:
    dtypes = tuple(dtype for dtype in cases.DTYPES if all(dtype in target.dtypes for target in targets))

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        programs(dtypes, large),
        st.lists(st.integers(0, 2**32 - 1), min_size=PROBLEMS, max_size=PROBLEMS, unique=True),
    )
    def agree(drawn: tuple[drawing.Program, drawing.Shape], seeds: list[int]) -> None:
        program, shape = drawn
        problems = [drawing.problem_of(program, shape, seed) for seed in seeds]
        with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
            found = list(pool.map(lambda target: run(target, program, problems), targets))
        for target, results in zip(targets, found, strict=True):
            if isinstance(results, NotImplementedError):
                event(f"{target.id} refuses")
                assert f"implementation={target.implementation!r} does not serve this call" in str(results)
                continue
            for problem, result in zip(problems, results, strict=True):
                drawing.check(target, problem, result)

    agree()


@pytest.mark.slow(35)
def test_cpu_and_xla() -> None:
    fuzz((cases.CPU, cases.XLA), large=False)


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda() -> None:
    fuzz((cases.CUDA,), large=True)
