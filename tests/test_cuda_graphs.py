"""XLA captures our calls into CUDA graphs, and what it replays is right."""

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import attention
from jax_flash._native import _core, registration

STEPS, ARRAYS = 24, 3


def replays(head_dim: int, options: dict[str, Any]) -> dict[str, Any]:
    """Calls of forward and backward with other arrays each time, and the same ones again: how many were launched by us,
    how many of these into a graph, and the largest difference from the same calls without graphs, relative."""

    def step(implementation: str | None, *arrays: jax.Array) -> Any:
        *inputs, dout = arrays
        out, pullback = jax.vjp(lambda *x: attention(*x, implementation=implementation, **options), *inputs)
        return out, *pullback(dout)

    q_shape, kv_shape = (2, 333, 4, head_dim), (2, 389, 2, head_dim)
    # One call is enough for a graph; XLA's own threshold is five.
    graph = jax.jit(lambda *x: step(None, *x), compiler_options={"xla_gpu_graph_min_graph_size": 1})
    plain = jax.jit(lambda *x: step("xla", *(y.astype(jnp.float32) for y in x)))
    # All are kept, so that each has addresses of its own; a graph is recorded anew for addresses that it has not seen.
    kept = [
        [
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(
                jax.random.split(jax.random.key(i), 4), (q_shape, kv_shape, kv_shape, q_shape), strict=True
            )
        ]
        for i in range(ARRAYS)
    ]
    wanted = [[np.asarray(x, np.float64) for x in plain(*arrays)] for arrays in kept]
    launches, worst = [_core.cuda_launches()], 0.0
    for i in range(STEPS):
        # Nothing of a step is left in the next, so that its results come to lie where those of another step lay.
        results = [np.asarray(x, np.float64) for x in graph(*kept[i % ARRAYS])]
        launches.append(_core.cuda_launches())
        for got, want in zip(results, wanted[i % ARRAYS], strict=True):
            worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    return {"launches": launches, "worst": worst}


def in_a_process(call: str, **variables: str) -> dict[str, Any]:
    """The result of a function of this file in a process of its own, with recording switched on."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, test_cuda_graphs as t; print(json.dumps(t.{call}))"],
        cwd=os.path.dirname(__file__),
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_FLASH_RECORD_GRAPHS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm80", "sm90a"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "deterministic_backward": True}], ids=["plain", "deterministic"]
)
def test_captured_and_replayed(
    family: str, head_dim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, because the family is a process's."""
    capability = registration.cuda_status()["devices"][0]["compute_capability"]
    if (family == "sm90a" and capability != 90) or capability < 80:
        pytest.skip(f"compute capability {capability} does not run kernels of {family}")
    found = in_a_process(f"replays({head_dim}, {options!r})", JAX_FLASH_CUDA_FAMILY=family)
    launches = np.diff(found["launches"], axis=0)
    all_, captured, recorded = launches.sum(axis=0)
    assert captured > 0, f"launched {all_} calls, none into a graph: {launches.tolist()}"
    # Forward and backward are two calls; a graph that is replayed launches none of them.
    assert all_ < 2 * STEPS, f"launched {all_} calls in {STEPS} steps of two: {launches.tolist()}"
    # Forward calls are recorded if the library knows the version of jaxlib's interface.
    monkeypatch.setenv("JAX_FLASH_RECORD_GRAPHS", "1")
    known = registration.records_kernels()
    assert (recorded > 0) == known, f"{recorded} of {captured} calls were recorded: {launches.tolist()}"
    assert found["worst"] < 0.01


def chains() -> dict[str, Any]:
    """Chains of calls in one graph, some of which leave sums of slices for a second kernel: each against the same calls
    one by one, and how many calls XLA made nodes of."""
    before, worst = _core.cuda_launches()[2], {}
    for name, (q_length, kv_length, q_heads, kv_heads, head_dim) in {
        "single_tile": (40, 64, 2, 2, 64),
        "cluster": (3, 1024, 8, 2, 128),
        "slices": (1, 8192, 8, 2, 128),
        "many": (333, 389, 4, 2, 64),
    }.items():
        keys = jax.random.split(jax.random.key(q_length), 3)
        q = jax.random.normal(keys[0], (2, q_length, q_heads, head_dim), jnp.bfloat16)
        k, v = (jax.random.normal(key, (2, kv_length, kv_heads, head_dim), jnp.bfloat16) for key in keys[1:])

        def links(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
            results = [q]
            for i in range(6):
                # Of several predecessors, one of which is none of our kernels.
                results.append(attention(results[-1], k + i if i % 2 else k, v, implementation="cuda"))
            return results

        graph = jax.jit(links, compiler_options={"xla_gpu_graph_min_graph_size": 1})
        for _ in range(10):
            inputs = [x * jnp.bfloat16(0.5) for x in (q, k, v)]
            q, k, v = (x.at[:, 0].multiply(-1) for x in (q, k, v))
            results = graph(*inputs)
            for i, (start, got) in enumerate(itertools.pairwise(results)):
                want = attention(start, inputs[1] + i if i % 2 else inputs[1], inputs[2], implementation="cuda")
                difference = float(jnp.max(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32))))
                worst[name] = max(worst.get(name, 0.0), difference)
    return {"recorded": _core.cuda_launches()[2] - before, "worst": worst}


@pytest.mark.gpu
def test_chains_of_recorded_calls() -> None:
    """A kernel that begins before those that it follows have ended waits for all of them: the same bits as alone."""
    if (capability := registration.cuda_status()["devices"][0]["compute_capability"]) < 80:
        pytest.skip(f"compute capability {capability} has no bfloat16, which the chains are of")
    found = in_a_process("chains()")
    assert found["worst"] == dict.fromkeys(("single_tile", "cluster", "slices", "many"), 0.0)
