"""Small calls of the CUDA kernels under each tool of compute-sanitizer, which is looked for on the path.

`python tests/test_sanitizers.py` makes the calls alone.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import attention
from jax_flash._native import registration

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# Of 260 keys and up to 700 rows: every tile is met whole and in part.
MANY: list[dict[str, Any]] = [
    *({"head_dim": head_dim, "causal": causal} for head_dim in (64, 128, 256) for causal in (False, True)),
    *({"head_dim": head_dim, "causal": True, "deterministic_backward": True} for head_dim in (64, 128, 256)),
    # More blocks of keys than Hopper has multiprocessors: those that stay take a second one. dQ in order or not.
    *(
        {"head_dim": head_dim, "lengths": (600, 140), "heads": (9, 9), "batch": 8, "deterministic_backward": ordered}
        for head_dim in (64, 128)
        for ordered in (False, True)
    ),
    {"head_dim": 64, "causal": True, "heads": (4, 4), "deterministic_backward": True},
    # Of enough heads that the blocks of some go the other way.
    *(
        {
            "head_dim": h,
            "lengths": (600, 300),
            "heads": (9, 9),
            "batch": 4,
            "causal": True,
            "deterministic_backward": True,
        }
        for h in (64, 128)
    ),
    {"head_dim": 40, "causal": True},
    {"head_dim": 128, "lengths": (700, 260), "heads": (8, 1), "batch": 1},  # query heads split over blocks
    {"head_dim": 128, "lengths": (700, 260), "heads": (8, 1), "batch": 1, "deterministic_backward": True},
    {"head_dim": 128, "lengths": (260, 700), "heads": (8, 1), "batch": 1, "deterministic_backward": True},  # by turns
    {"head_dim": 64, "dropout_rate": 0.1},
    {"head_dim": 128, "softcap": 20.0},
    {"head_dim": 64, "window": 64, "causal": True},
    # A window of a quarter of the keys, where Hopper adds dQ in order without being asked.
    *({"head_dim": head_dim, "window": 64, "causal": True, "heads": (4, 4)} for head_dim in (64, 128)),
    # Long ones, of which Hopper takes 80 rows at a time.
    {"head_dim": 128, "lengths": (8210, 260), "batch": 1},
    {"head_dim": 128, "lengths": (16400, 260), "heads": (2, 2), "batch": 1, "causal": True},
    # Tiles are skipped, and Hopper's producers tell which.
    *({"head_dim": head_dim, "kv_start": np.arange(190, dtype=np.int32)} for head_dim in (64, 128, 256)),
    {"head_dim": 128, "kv_start": np.arange(190, dtype=np.int32), "deterministic_backward": True},
    # Keys are hidden in every tile, which Hopper's warps decide for one another; or they are listed, and loaded row by
    # row.
    *(
        {"head_dim": head_dim, "mask": np.arange(260)[None, None, None] % 3 > 0, "causal": causal}
        for head_dim in (64, 128, 256)
        for causal in (True, False)
    ),
    # Listed keys of float32, which the kernel that makes float16 of it puts in order; and, on Turing and Volta, by
    # loads through registers.
    *(
        {"head_dim": head_dim, "mask": np.arange(260)[None, None, None] % 3 > 0, "dtype": dtype}
        for head_dim in (64, 256)
        for dtype in ("float32", "float16")
    ),
    {
        "head_dim": 128,
        "q_segment_ids": np.repeat(np.array(2 * [[0, 1]], np.int32), 95, axis=1),
        "kv_segment_ids": np.repeat(np.array(2 * [[0, 1]], np.int32), 130, axis=1),
    },
    # Values and sums of diagonals and of tables, which warps have in shared memory.
    *({"head_dim": head_dim, "causal": True, "scores": True} for head_dim in (64, 128, 256)),
]
SPLIT_KV: list[dict[str, Any]] = [
    *(
        {"head_dim": head_dim, "lengths": lengths, "heads": (8, kv_heads), "batch": 1}
        for head_dim in (64, 128, 256)
        for *lengths, kv_heads in ((1, 1024, 2), (1, 4096, 8), (16, 2048, 1))
    ),
    *({"head_dim": size, "lengths": (size, size), "heads": (1, 1), "batch": 1} for size in (16, 32, 64, 128, 256)),
]


def call(
    head_dim: int,
    lengths: tuple[int, int] = (190, 260),
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    dtype: str = "bfloat16",
    scores: bool = False,
    **options: Any,
) -> None:
    """Forward and backward, with ``scores`` through a score function with two trained tables; raises where a result is
    not finite."""
    rng = np.random.default_rng(0)
    q_shape, kv_shape = ((batch, length, count, head_dim) for length, count in zip(lengths, heads, strict=True))
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), dtype) for shape in (q_shape, kv_shape, kv_shape, q_shape))
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(1)

    kinds = jnp.asarray(rng.integers(0, 4, max(lengths)), jnp.int32)
    tables = jnp.ones((heads[0], sum(lengths)), jnp.float32), jnp.ones((heads[0], 4, 4), jnp.float32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, of_distances: jax.Array, of_kinds: jax.Array) -> jax.Array:
        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + of_distances[h, q - kv + lengths[1]] + of_kinds[h, kinds[q], kinds[kv]]

        functions = {"score_mod": score_mod} if scores else {}
        return attention(q, k, v, implementation="cuda", **functions, **options)

    @jax.jit
    def both(*arrays: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, *arrays[:3], *tables)
        return out, *pullback(arrays[3])

    for x in both(q, k, v, dout):
        assert bool(jnp.isfinite(x).all())


def main() -> None:
    if sources := os.environ.get("JAX_FLASH_SANITIZED_SOURCES"):
        registration.configure(pathlib.Path(sources))
    os.environ["JAX_FLASH_SPLIT_KV"] = "0"  # which would serve the forward of these, too
    for one in MANY:
        call(**one)
    del os.environ["JAX_FLASH_SPLIT_KV"]
    for one in SPLIT_KV:
        call(**one)
    print("all calls made")


FAMILIES = {"sm70": 70, "sm75": 75, "sm80": 80, "sm90a": 90}


@pytest.fixture(scope="module", params=FAMILIES)
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process whose programs and kernels are compiled already, so that the tool sees only their execution."""
    if not shutil.which("compute-sanitizer"):
        pytest.skip("there is no compute-sanitizer here")
    capability = registration.cuda_status()["devices"][0]["compute_capability"]
    if capability < FAMILIES[request.param] or (request.param == "sm90a" and capability != 90):
        pytest.skip(f"compute capability {capability} does not run kernels of {request.param}")
    folder = tmp_path_factory.mktemp(request.param)
    # Lane 0 arrives for its warp, behind a __syncwarp(), which racecheck does not follow: there every lane does.
    sources = folder / "sources"
    shutil.copytree(registration.SOURCES, sources)
    pipeline = sources / "cuda/sm90a/pipeline.cuh"
    text, count = re.subn(r"(arrivals_of_a_warp = )1;", r"\g<1>32;", pipeline.read_text(encoding="utf-8"))
    assert count == 1
    pipeline.write_text(text, encoding="utf-8")
    found = os.environ | {
        "JAX_FLASH_CUDA_FAMILY": request.param,
        "JAX_FLASH_CACHE_DIR": str(folder / "kernels"),
        "JAX_FLASH_SANITIZED_SOURCES": str(sources),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",  # every array an allocation of its own
    }
    subprocess.run([sys.executable, __file__], env=found, check=True, timeout=300)
    return found


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_nothing_is_reported(environment: dict[str, str], tool: str) -> None:
    # initcheck has to see who wrote what our kernels read. Not errors are racecheck's warnings of an mbarrier that a
    # thread makes and then arrives at.
    ours = [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=jax_flash"]
    options = ["--tool", tool, "--print-level", "error", "--print-limit", "0", *ours]
    command = ["compute-sanitizer", *options, sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    text = done.stdout
    assert "all calls made" in text, text + done.stderr
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors|hazards)", text)
    assert found, text[:10000]
    assert int(found[1]) == (of_counters(text) if tool == "initcheck" else 0), text[:10000]


def of_counters(text: str) -> int:
    """How many of initcheck's errors are about counters of XLA's loops: it copies their first value from a constant,
    whose initialisation initcheck does not see. No result of ours is a scalar that XLA copies."""
    copied = re.findall(r"error at host access to (\w+) of size 4 bytes", text)
    read = re.findall(r"read of size 4 bytes\n.*\n.*\n.*Address (\w+)", text)
    return len(copied) + sum(address in copied for address in read)


if __name__ == "__main__":
    main()
