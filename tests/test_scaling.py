"""float32 arrays as float16 ones: rows of which no pair is kept do not influence the scale of the others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_flash._call.options import UNLIMITED, Options
from jax_flash._implementations import scores
from jax_flash._primitive import limbs

B, T, S, N, K, H = 2, 7, 9, 4, 2, 8

rng = np.random.default_rng(0)
SEGMENTS = {
    "q_segment_ids": np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32),
    "kv_segment_ids": np.sort(rng.integers(0, 6, (B, S)), axis=1).astype(np.int32),
}
LENGTHS = {"q_lengths": np.array([7, 2], np.int32), "kv_lengths": np.array([4, 9], np.int32)}
MASK = {"mask": rng.random((B, N, T, S)) < 0.2}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "q_offset": np.array([-2, 3], np.int32)},
    "window": {"window": (1, 1), "q_offset": np.array([5, -3], np.int32)},
    "far_window": {"window": (2, None), "q_offset": np.array([2**31 - 20, -(2**31) + 5], np.int32)},
    "lengths": LENGTHS,
    "lengths_and_band": {**LENGTHS, "causal": True, "window": (3, None), "q_offset": np.array([1, 6], np.int32)},
    "segments": {**SEGMENTS, "causal": True},
    "mask": MASK,
    "shared_mask": {"mask": rng.random((1, 1, T, S)) < 0.15, "causal": True},
    "mask_of_keys": {"mask": rng.random((B, 1, 1, S)) < 0.5},
    "everything": {**SEGMENTS, **LENGTHS, **MASK, "causal": True, "window": (6, None)},
}


DEFAULT = Options(causal=False, scale=1.0)


def call_of(masks: dict[str, Any]) -> tuple[Options, dict[str, jax.Array]]:
    left, right = (UNLIMITED if side is None else side for side in masks.get("window", (None, None)))
    options = dataclasses.replace(DEFAULT, causal=masks.get("causal", False), window_left=left, window_right=right)
    operands = {name: jnp.asarray(x) for name, x in masks.items() if name not in ("causal", "window")}
    if "q_offset" in operands:
        operands["q_offset"] = operands["q_offset"][:, None]
    return options, operands


@pytest.mark.parametrize("name", MASKS)
def test_which_rows_are_kept(name: str) -> None:
    options, operands = call_of(MASKS[name])
    pairs = np.broadcast_to(oracle.keep_pairs((B,), T, S, **MASKS[name]), (B, N, T, S))
    of_rows = np.moveaxis(pairs.any(axis=-1), 1, 2)
    of_keys = np.moveaxis(pairs.any(axis=2).reshape(B, K, N // K, S).any(axis=2), 1, 2)
    for side, want in (("q", of_rows), ("kv", of_keys)):
        got = scores.kept(options, operands, side, T, S, K)
        assert got is not None
        np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


def test_a_bias_of_minus_infinity_hides_rows() -> None:
    bias = np.zeros((1, 1, T, S), np.float32)
    bias[..., 3] = bias[:, :, 2] = -np.inf
    found = [scores.kept(DEFAULT, {"bias": jnp.asarray(bias)}, side, T, S, K) for side in ("q", "kv")]
    assert [np.flatnonzero(~np.asarray(x).ravel()).tolist() for x in found] == [[2], [3]]


def test_without_masks_all_are_kept() -> None:
    assert scores.kept(DEFAULT, {}, "q", T, S, K) is scores.kept(DEFAULT, {}, "kv", T, S, K) is None


@pytest.mark.parametrize("highest", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "delta", "none"])
def test_which_heads_are_computed_in_float32(name: str, highest: bool) -> None:
    """Those with a row that is too small against another, unless it is 0, or hidden, or nothing but its lse counts."""
    options = dataclasses.replace(DEFAULT, highest_precision=highest)
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H), "dout": (B, T, N, H)}

    def flags(factor: float, operands: dict[str, jax.Array]) -> list[list[bool]]:
        arrays = {x: rng.uniform(1, 2, shape).astype(np.float32) for x, shape in shapes.items()}
        arrays["delta"] = rng.uniform(1, 2, (B, N, T)).astype(np.float32)
        head = 1 if name in ("key", "value") else N - 1
        if name == "delta":
            arrays[name][0, head, 1] *= factor
        elif name != "none":
            arrays[name][0, 1, head] *= factor
        descale = limbs.scaled(options, operands, *map(jnp.asarray, arrays.values()))[1]
        assert descale.shape == (B, K, 6)
        return (np.asarray(descale[..., 5]) == 1).tolist()

    nothing, one = [[False] * K] * B, [[False, name != "none"], [False] * K]
    gradient = name in ("dout", "delta") and not highest
    small, large = (2.0**-28, 2.0**-32) if gradient else (2.0**-18, 2.0**-22)
    if name == "delta":  # adds to what dout makes of dS
        small, large = 1 / small, 2**10 / large
    assert flags(small, {}) == flags(0.0, {}) == nothing
    assert flags(large, {}) == one
    hidden = np.ones((B, 1, T, S), bool)
    hidden[:, :, 1] = hidden[..., 1] = False
    assert flags(large, {"mask": jnp.asarray(hidden)}) == nothing


@pytest.mark.parametrize("highest", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_hidden_rows_have_no_influence(name: str, highest: bool) -> None:
    options, operands = call_of(MASKS[name])
    options = dataclasses.replace(options, highest_precision=highest)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    delta = rng.standard_normal((B, N, T)).astype(np.float32)
    of_rows, of_keys = (
        np.broadcast_to(scores.kept(options, operands, side, T, S, K), (B, length, heads))[..., None]
        for side, length, heads in (("q", T, N), ("kv", S, K))
    )
    clean = limbs.scaled(options, operands, *map(jnp.asarray, (q, k, v, dout, delta)))
    spoiled = [
        jnp.where(kept, x, jnp.float32(value))
        for x, kept, value in ((q, of_rows, 1e30), (k, of_keys, np.nan), (v, of_keys, 3.4e38), (dout, of_rows, -1e35))
    ]
    found = limbs.scaled(options, operands, *spoiled, jnp.asarray(delta))
    assert not (of_rows.all() and of_keys.all())
    np.testing.assert_array_equal(found[1], clean[1])
    for got, want in zip(found[0], clean[0], strict=True):
        assert np.isfinite(np.asarray(got, np.float32)).all()
        np.testing.assert_array_equal(got, want)
