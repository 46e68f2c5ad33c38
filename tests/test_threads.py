"""Calls from several threads at once neither wait for each other for ever nor mix; a repeated call is bit-equal."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import textwrap

import cases
import jax
import numpy as np
import pytest
from cases import Case, Target

import jax_flash

CASE = Case("threads", 70, 90, q_heads=4, kv_heads=2, head_dim=32, causal=True, q_offset=11)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_repeated_and_concurrent_calls(target: Target) -> None:
    """Six threads; the forward is bit-equal everywhere, the backward on CPUs (GPUs may add in any order)."""
    problem = cases.problem(CASE, target.dtypes[0])
    attend = cases.call(target, problem)

    @jax.jit
    def run(inputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        results, pullback = jax.vjp(attend, *inputs)
        return (*results, *pullback(cotangents))

    inputs = jax.device_put(problem.inputs, target.device)
    cotangents = jax.device_put((problem.dout, problem.dlse), target.device)

    def results(_: int) -> dict[str, np.ndarray]:
        return dict(zip(("out", "lse", "dq", "dk", "dv"), map(np.asarray, run(inputs, cotangents)), strict=True))

    first = results(0)
    problem.check(target.platform, first)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for got in pool.map(results, range(24)):
            problem.check(target.platform, got)
            for name in first if target.platform == "cpu" else ("out", "lse"):
                np.testing.assert_array_equal(got[name], first[name])


def run(code: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, on CPUs."""
    root = pathlib.Path(jax_flash.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SIX_CALLS_ON_TWO_THREADS = """
    import concurrent.futures, os
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    import jax, jax.numpy as jnp, numpy as np
    import jax_flash

    x = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE), jnp.float32)
    attend = lambda *x: jax_flash.attention(*x, causal=True, implementation="cpu")
    six = jax.jit(lambda xs: [jax.grad(lambda x: attend(x, x, x).sum())(x) for x in xs])
    xs = [x + i for i in range(6)]
    want = [np.asarray(six([x] * 6)[0]) for x in xs]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for got in pool.map(lambda _: six(xs), range(12)):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a, b)
    print("finished")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the operating system pins no process to processors")
@pytest.mark.parametrize("shape", [(4, 64, 4, 16), (1, 1024, 4, 16)], ids=["chunks", "turns"])
def test_more_calls_than_threads(shape: tuple[int, ...]) -> None:
    """Six independent calls in one program, six programs at once, on XLA's pool of two threads.

    Long calls' blocks of keys wait for each other.
    """
    finished = run(SIX_CALLS_ON_TWO_THREADS.replace("SHAPE", str(shape)))
    assert finished.stdout.strip() == "finished", finished.stderr


LONG_BLOCKS = """
    import hashlib, os
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    import jax, jax.numpy as jnp, numpy as np
    import jax_flash

    def run(implementation, causal, q, k, v):
        attend = lambda *x: jax_flash.attention(*x, causal=causal, return_lse=True, implementation=implementation)
        (out, lse), pullback = jax.vjp(attend, q, k, v)
        return out, lse, *pullback((out, lse))

    random = np.random.default_rng(0)
    for q_length, kv_length in ((2100, 2050), (600, 960)):
        q, k, v = (
            jnp.asarray(random.standard_normal((1, length, 4, 16)), jnp.float32)
            for length in (q_length, kv_length, kv_length)
        )
        for causal in (False, True):
            got, want = (jax.jit(run, static_argnums=(0, 1))(x, causal, q, k, v) for x in ("cpu", "reference"))
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-5)
                print(hashlib.sha256(np.asarray(a)).hexdigest())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the operating system pins no process to processors")
def test_long_blocks() -> None:
    """Results are the same bit for bit.

    In the first problem blocks of queries are 704 rows long for one thread and 432 for two, in the second one blocks of
    keys 192 and 96, where the second-level cache has 512 KB.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two threads need two processors")
    printed = [run(LONG_BLOCKS.replace("THREADS", str(threads))) for threads in (1, 2)]
    assert len(printed[0].stdout.split()) == 20, printed[0].stderr
    assert printed[1].stdout == printed[0].stdout, printed[1].stderr
