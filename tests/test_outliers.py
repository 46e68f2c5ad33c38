"""Rows of very different sizes: the error of a score is bounded by the norms of its own two rows, not by an outlier
elsewhere in the array; and what no pair keeps has no influence, however large it is."""

import os
import subprocess
import sys
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Target

import jax_flash
from jax_flash._native import registration

B, T, S, N, K, H, V = 2, 70, 90, 4, 2, 32, 24
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, V), "dout": (B, T, N, V)}
SPREADS = ("one", "powers")
TARGETS = cases.targets(lambda target: "float32" in target.dtypes)
LARGEST = {"cuda-cuda": 15}
"""Powers of ten for query and key, otherwise 4: beyond, elsewhere, the score of the only key that counts and lse, which
is this score, are rounded apart, and their difference is all that a weight is made of."""


def arrays_of(spread: str, name: str, largest: int = 15, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 arrays, of which the rows of one are of very different sizes, or one of its rows is huge."""
    rng = np.random.default_rng(seed)
    arrays = {x: rng.standard_normal(shape) for x, shape in SHAPES.items()}
    if spread == "powers":
        arrays[name] *= 10 ** rng.uniform(-15, largest, (*SHAPES[name][:3], 1))
    elif spread == "one":
        arrays[name][0, 37, 1] *= 10.0**largest
    return {x: array.astype(np.float32) for x, array in arrays.items()}


def gradients(target: Target, arrays: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """out, lse, dq, dk and dv."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        def attend(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax_flash.attention(*inputs, return_lse=True, implementation=target.implementation, **options)

        results, pullback = jax.vjp(attend, q, k, v)
        return (*results, *pullback((dout, jnp.zeros_like(results[1]))))

    with jax.default_device(target.device):
        found = jax.jit(run)(*(jnp.asarray(arrays[name]) for name in SHAPES))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), map(np.asarray, found), strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("target", TARGETS)
def test_values(target: Target, precision: str, spread: str, name: str, causal: bool) -> None:
    arrays = arrays_of(spread, name, LARGEST.get(target.id, 4) if name in ("query", "key") else 15)
    got = gradients(target, arrays, causal=causal, precision=precision)
    want = oracle.attention(*arrays.values(), np.zeros((B, N, T)), causal=causal)
    keep = oracle.keep_pairs((B,), T, S, causal=causal)
    narrow = target.platform == "cuda" and precision == "default"
    most = oracle.bounds(*arrays.values(), keep, 2.0**-11 if narrow else 2.0**-22, exact_lse=target.id == "cuda-cuda")
    for result, array in got.items():
        assert np.isfinite(array).all(), result
        wrong = np.abs(array - want[result]) > most[result]
        places = np.argwhere(wrong)
        assert not wrong.any(), (result, len(places), places[:3], array[wrong][:3], want[result][wrong][:3])
    if spread == "one" and not narrow:  # the bounds are tight in most places
        for result in ("out", "dq", "dk", "dv"):
            rows = np.abs(want[result]).max(axis=-1, keepdims=True)
            assert np.median(most[result] < 0.1 * rows) == 1, result


HIDDEN: dict[str, dict[str, Any]] = {
    "mask": {"mask": np.ones((B, 1, T, S), bool)},
    "bias": {"bias": np.zeros((B, N, T, S), np.float32)},
    "lengths": {"q_lengths": np.array([50, 70], np.int32), "kv_lengths": np.array([60, 90], np.int32)},
    "segments": {
        "q_segment_ids": np.where(np.arange(T) < 50, 0, 1) * np.ones((B, 1), np.int32),
        "kv_segment_ids": np.where(np.arange(S) < 60, 0, 2) * np.ones((B, 1), np.int32),
    },
    "window": {"window": (5, 5), "q_offset": np.array([30, 15], np.int32)},
    "causal": {"causal": True, "q_offset": np.array([-20, 5], np.int32)},
}
HIDDEN["mask"]["mask"][:, :, 50:] = HIDDEN["mask"]["mask"][..., 60:] = False
HIDDEN["bias"]["bias"][:, :, 50:] = HIDDEN["bias"]["bias"][..., 60:] = -np.inf


@pytest.mark.parametrize("visible", ["none", *SPREADS])
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("target", [x for x in TARGETS if "reference" not in x.id])
def test_hidden_rows_have_no_influence(target: Target, name: str, visible: str) -> None:
    """Whether the heads are computed as others are, or apart for the sake of rows that are visible."""
    masks = HIDDEN[name]
    pairs = oracle.keep_pairs((B,), T, S, **{key: x for key, x in masks.items() if key != "bias"})
    if name == "bias":
        pairs = pairs & (masks["bias"] > -np.inf)
    pairs = np.broadcast_to(pairs, (B, N, T, S))
    of_rows = np.moveaxis(pairs.any(axis=-1), 1, 2)
    of_keys = np.moveaxis(pairs.any(axis=2).reshape(B, K, N // K, S).any(axis=2), 1, 2)
    assert not of_rows.all() or not of_keys.all()
    arrays = arrays_of(visible, "key")
    spoiled = {
        x: np.where((of_keys if x in ("key", "value") else of_rows)[..., None], array, np.float32(size))
        for (x, array), size in zip(arrays.items(), (1e30, -1e28, 1e25, 1e32), strict=True)
    }
    options = {key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in masks.items()}
    want = gradients(target, arrays, **options)
    got = gradients(target, spoiled, **options)
    for result, array in want.items():
        np.testing.assert_array_equal(got[result], array, err_msg=result)


CAPABILITIES = {"sm70": 70, "sm75": 75, "sm80": 80, "sm90a": 90}


@pytest.mark.gpu
@pytest.mark.parametrize("family", CAPABILITIES)
def test_every_family(family: str) -> None:
    """In a process of its own, because the family is a process's."""
    capability = registration.cuda_status()["devices"][0]["compute_capability"]
    if capability < CAPABILITIES[family] or (family == "sm90a" and capability != 90):
        pytest.skip(f"compute capability {capability} does not run kernels of {family}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        __file__,
        "-k",
    ]
    done = subprocess.run(
        [*command, "cuda-cuda and (values or hidden)"],
        env=os.environ | {"JAX_FLASH_CUDA_FAMILY": family},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
