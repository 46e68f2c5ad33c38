"""float32 arrays as float16 ones: rows of which no pair is kept do not influence the scale of the others."""

import ctypes
import dataclasses
from typing import Any, NamedTuple

import emulated
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 -- gives NumPy bfloat16
import numpy as np
import oracle
import pytest

from jax_flash._call.options import UNLIMITED, Options
from jax_flash._functions import trace
from jax_flash._implementations import scores

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
    "mask_of_keys_causal": {
        "mask": rng.random((1, 1, 1, S)) < 0.5,
        "causal": True,
        "q_offset": np.array([-2, 3], np.int32),
    },
    "mask_of_keys_in_window": {"mask": rng.random((B, N, 1, S)) < 0.3, "window": (1, 1), **LENGTHS},
    "mask_of_keys_far": {
        "mask": rng.random((B, K, 1, S)).repeat(N // K, axis=1) < 0.4,
        "window": (2, None),
        "q_offset": np.array([2**31 - 20, -(2**31) + 5], np.int32),
    },
    "mask_of_no_keys": {"mask": np.zeros((1, 1, 1, S), bool), "causal": True},
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


def test_which_rows_a_mask_of_keys_keeps_takes_no_operation_for_a_pair() -> None:
    mask = jax.ShapeDtypeStruct((B, 1, 1, 8192), jnp.bool_)
    options = dataclasses.replace(DEFAULT, causal=True)
    for side in ("q", "kv"):
        of = jax.jit(lambda mask, side=side: scores.kept(options, {"mask": mask}, side, 8192, 8192, K, (B, N)))
        cost = of.lower(mask).compile().cost_analysis()
        assert cost.get("flops", 0) + cost.get("bytes accessed", 0) < 1e3 * B * 8192


def test_intervals_of_all_heads_are_looked_at_once() -> None:
    intervals = np.stack([np.arange(S) % 3, np.arange(S)], axis=-1).astype(np.int32)[None, None]
    for operands, heads in (({}, 1), ({"mask": jnp.ones((1, N, 1, S), bool)}, N)):
        found = scores.kept(DEFAULT, {"q_intervals": jnp.asarray(intervals), **operands}, "q", T, S, K, (B, N))
        assert found is not None
        assert found.shape == (B, T, heads)


def test_a_bias_of_minus_infinity_hides_rows() -> None:
    bias = np.zeros((1, 1, T, S), np.float32)
    bias[..., 3] = bias[:, :, 2] = -np.inf
    found = [scores.kept(DEFAULT, {"bias": jnp.asarray(bias)}, side, T, S, K) for side in ("q", "kv")]
    assert [np.flatnonzero(~np.asarray(x).ravel()).tolist() for x in found] == [[2], [3]]


@pytest.mark.parametrize("lengths", [(T, S), (300, 513)])
def test_mask_functions_and_intervals_hide_rows(lengths: tuple[int, int]) -> None:
    """Pairs are looked at by blocks, of which the last meets the one before."""
    t, s = lengths
    random = np.random.default_rng(1)
    table = jnp.asarray(random.random((B, N, t)) < 0.7)
    columns = jnp.asarray(random.random(s) < 0.5)
    start = random.integers(0, s, (B, N, t)).astype(np.int32)
    intervals = np.stack([start, np.minimum(start + random.integers(0, 3, start.shape), s)], axis=-1).astype(np.int32)
    mask_mod = lambda b, h, q, kv: table[b, h, q] & columns[kv]  # noqa: E731
    captured = trace.Captured()
    functions = trace.Functions(masks=(trace.trace("mask_mod", mask_mod, "mask", jnp.float32, captured),))
    keys = np.arange(s)
    by_function = np.asarray(table)[..., None] & np.asarray(columns)
    by_interval = (intervals[..., :1] <= keys) & (keys < intervals[..., 1:])
    options = dataclasses.replace(DEFAULT, functions=functions)
    of_intervals = {"kv_intervals": jnp.asarray(intervals)}
    for of, operands, pairs in (
        (options, captured.operands(), by_function),
        (DEFAULT, of_intervals, by_interval),
        (options, captured.operands() | of_intervals, by_function & by_interval),
    ):
        of_rows = np.moveaxis(pairs.any(axis=-1), 1, 2)
        of_keys = np.moveaxis(pairs.any(axis=2).reshape(B, K, N // K, s).any(axis=2), 1, 2)
        for side, want in (("q", of_rows), ("kv", of_keys)):
            got = scores.kept(of, operands, side, t, s, K, (B, N))
            assert got is not None
            assert not want.all()
            np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


def test_which_rows_functions_keep_takes_no_array_of_pairs() -> None:
    functions = trace.Functions(
        masks=(trace.trace("mask_mod", lambda b, h, q, kv: q >= kv, "mask", jnp.float32, trace.Captured()),)
    )
    options = dataclasses.replace(DEFAULT, functions=functions)
    rows = jax.jit(lambda: scores.kept(options, {}, "kv", 8192, 8192, K, (B, N)))
    assert rows.lower().compile().memory_analysis().temp_size_in_bytes < 8192 * 8192 // 4


def test_without_masks_all_are_kept() -> None:
    assert scores.kept(DEFAULT, {}, "q", T, S, K) is scores.kept(DEFAULT, {}, "kv", T, S, K) is None


RECORD = ("query", "key", "value", "dout", "ds", "largest_value", "value_norm", "unused")


class Scaled(NamedTuple):
    """What the kernels make, by name: float16 arrays, and of the records each number, [B, K]."""

    arrays: dict[str, np.ndarray]
    records: dict[str, np.ndarray]


def scaled(
    emulator: ctypes.CDLL, arrays: dict[str, np.ndarray], kept: dict[str, np.ndarray] | None = None, **options: Any
) -> Scaled:
    """Of query, key, value, dout and delta, with the rows of the sides "q" and "kv" that are ``kept``."""
    kv_heads = arrays["key"].shape[2]
    inputs = [arrays[name] for name in ("query", "key", "value")]
    q, kv = ((kept or {}).get(side) for side in ("q", "kv"))
    factor, kv_rows = options.pop("dropout_factor", 1.0), options.pop("kv_rows", None)
    made, records = emulated.scale(emulator, kv_heads, inputs, [q, kv, kv], kv_rows=kv_rows, **options)
    gradients = {"records": records, "delta": arrays["delta"], "dropout_factor": factor}
    more, records = emulated.scale(emulator, kv_heads, [arrays["dout"]], [q], **gradients, **options)
    numbers = {name: records[..., i] for i, name in enumerate(RECORD)}
    return Scaled(dict(zip(("query", "key", "value", "dout"), [*made, *more], strict=True)), numbers)


def arrays_of(heads: int = K, lengths: tuple[int, int] = (T, S), columns: int = H) -> dict[str, np.ndarray]:
    q_length, kv_length = lengths
    of_rows, of_keys = (B, q_length, 2 * heads, columns), (B, kv_length, heads, columns)
    shapes = {"query": of_rows, "key": of_keys, "value": of_keys, "dout": of_rows}
    arrays = {name: rng.uniform(1, 2, shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"delta": rng.uniform(1, 2, (B, 2 * heads, q_length)).astype(np.float32)}


def grouped(x: np.ndarray, heads: int) -> np.ndarray:
    """[B, length, N, columns] -> [B, K, rows x columns]."""
    return np.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1).reshape(len(x), heads, -1)


@pytest.mark.parametrize("two_limbs", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("columns", "chunks"), [(8, 1), (40, 3), (64, 2), (136, 5), (256, 1)])
def test_values(emulator: ctypes.CDLL, columns: int, chunks: int, dtype: str, two_limbs: bool) -> None:
    """Every array times a power of two for each key head, rounded once, and with two limbs to 22 digits."""
    arrays = arrays_of(3, (37, 50), columns)
    for x in ("query", "key", "value", "dout"):
        of_heads = np.repeat(10 ** rng.uniform(-9, 9, (B, 1, 3, 1)), arrays[x].shape[2] // 3, axis=2)
        arrays[x] = (arrays[x] * rng.choice([-1, 1], arrays[x].shape) * of_heads).astype(dtype)
    arrays["query"][1, 3, 2, 1], arrays["key"][0, 0, 0, 0] = np.inf, np.nan
    found = scaled(emulator, arrays, two_limbs=two_limbs, chunks=chunks, dropout_factor=1.25)
    for name, made in found.arrays.items():
        x = arrays[name].astype(np.float64)
        largest = np.abs(np.where(np.isfinite(grouped(x, 3)), grouped(x, 3), 0)).max(axis=-1)
        power = 2.0 ** (15 - np.frexp(largest)[1])
        np.testing.assert_array_equal(found.records[name], 1 / power, name)
        want = x * np.repeat(power, x.shape[2] // 3, axis=1)[:, None, :, None]
        np.testing.assert_array_equal(made[..., :columns], want.astype(np.float16), name)
        if two_limbs:
            finite = np.where(np.isfinite(want), want, 0)
            low = finite - finite.astype(np.float16)
            np.testing.assert_array_equal(made[..., columns:], low.astype(np.float16), name)
    value, dout = (grouped(arrays[name].astype(np.float64), 3) for name in ("value", "dout"))
    largest_value = np.abs(value).max(axis=-1)
    if two_limbs:
        norm_v, norm_dout = (np.linalg.norm(x.reshape(B, 3, -1, columns), axis=-1).max(axis=-1) for x in (value, dout))
        np.testing.assert_allclose(found.records["value_norm"], norm_v, 1e-6)
        of_dp = norm_v * norm_dout
    else:
        of_dp = columns * largest_value * np.abs(dout).max(axis=-1)
    np.testing.assert_array_equal(found.records["largest_value"], largest_value)
    bound = 1.25 * of_dp + arrays["delta"].reshape(B, 3, -1).max(axis=-1)
    np.testing.assert_array_equal(found.records["ds"], 2.0 ** (15 - np.frexp(bound)[1]))


@pytest.mark.parametrize("two_limbs", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_listed_rows(emulator: ctypes.CDLL, chunks: int, two_limbs: bool) -> None:
    """Rows of key and value in the order of a list, the kept ones first; the others are zeros, whatever they hold."""
    arrays = arrays_of(3, (37, 50), 40)
    order = rng.permuted(np.tile(np.arange(50, dtype=np.int32), (B, 1)), axis=1)
    kept = np.arange(50) < np.linspace(17, 50, B, dtype=int)[:, None]
    in_order = dict(arrays)
    for name in ("key", "value"):
        in_order[name] = np.take_along_axis(arrays[name], order[:, :, None, None], axis=1)
        hidden = np.take_along_axis(~kept, order.argsort(axis=1), axis=1)
        arrays[name] = np.where(hidden[..., None, None], np.float32(np.nan), arrays[name])
    options = {"kept": {"kv": np.repeat(kept[..., None], 3, axis=2)}, "two_limbs": two_limbs, "chunks": chunks}
    found, want = scaled(emulator, arrays, kv_rows=order, **options), scaled(emulator, in_order, **options)
    for name, x in want.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], x, name)
    for name, x in want.records.items():
        np.testing.assert_array_equal(found.records[name], x, name)


@pytest.mark.parametrize("two_limbs", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "delta", "none"])
def test_which_heads_are_computed_in_float32(emulator: ctypes.CDLL, name: str, two_limbs: bool) -> None:
    """Those with a row that is too small against another, unless it is 0, or hidden, or nothing but its lse counts."""

    def flags(factor: float, kept: dict[str, np.ndarray] | None = None) -> list[list[bool]]:
        arrays = arrays_of()
        head = 1 if name in ("key", "value") else N - 1
        if name == "delta":
            arrays[name][0, head, 1] *= np.float32(factor)
        elif name != "none":
            arrays[name][0, 1, head] *= np.float32(factor)
        found = scaled(emulator, arrays, kept, two_limbs=two_limbs, chunks=2)
        of_arrays = np.stack([found.records[x] for x in ("query", "key", "value", "dout")])
        flagged = "dout" if name == "delta" else name
        assert all((of_arrays[i] > 0).all() for i, x in enumerate(arrays) if x not in (flagged, "delta"))
        return (of_arrays == 0).any(axis=0).tolist()

    nothing, one = [[False] * K] * B, [[False, name != "none"], [False] * K]
    gradient = name in ("dout", "delta") and not two_limbs
    small, large = (2.0**-28, 2.0**-32) if gradient else (2.0**-18, 2.0**-22)
    if name == "delta":  # adds to what dout makes of dS
        small, large = 1 / small, 2**10 / large
    assert flags(small) == flags(0.0) == nothing
    assert flags(large) == one
    kept = {"q": np.ones((B, T, N), bool), "kv": np.ones((B, S, K), bool)}
    for rows in kept.values():
        rows[:, 1] = False
    assert flags(large, kept) == nothing


@pytest.mark.parametrize("two_limbs", [False, True])
def test_hidden_rows_have_no_influence(emulator: ctypes.CDLL, two_limbs: bool) -> None:
    arrays = arrays_of()
    kept = {"q": rng.random((B, T, N)) < 0.5, "kv": rng.random((B, S, K)) < 0.5}
    clean = scaled(emulator, arrays, kept, two_limbs=two_limbs)
    sides = {"query": "q", "key": "kv", "value": "kv", "dout": "q"}
    for name, value in (("query", 1e30), ("key", np.nan), ("value", 3.4e38), ("dout", -1e35)):
        arrays[name][~kept[sides[name]]] = value
    arrays["delta"][~np.swapaxes(kept["q"], 1, 2)] = 1e30
    found = scaled(emulator, arrays, kept, two_limbs=two_limbs)
    for name, want in clean.records.items():
        np.testing.assert_array_equal(found.records[name], want, name)
    for name, want in clean.arrays.items():
        assert not want[~kept[sides[name]]].any()
        np.testing.assert_array_equal(found.arrays[name], want, name)
