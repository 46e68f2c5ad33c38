"""Interval masks beside what expresses the same; the cases of cases.py compare them with the oracle."""

import pathlib
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Target

import jax_flash
from jax_flash._call.options import Options, interval_ranges, kept_first
from jax_flash._implementations import scores
from jax_flash._native import _core
from jax_flash._primitive import ahead

B, T, S, N, K, H = 2, 300, 410, 4, 2, 16
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((B, T, N, H), *[(B, S, K, H)] * 2))
ROWS, KEYS = np.arange(T), np.arange(S)
PREFIX, GLOBAL, SECTION = np.array([70, 130]), KEYS % 200 < 3, KEYS // 90

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window_of_rows": ({"kv_start": ROWS - 40, "kv_end": ROWS + 8}, {"window": (40, 7)}),
    "window_of_keys": ({"q_start": KEYS - 7, "q_end": KEYS + 41}, {"window": (40, 7)}),
    "causal": ({"kv_end": ROWS + 1}, {"causal": True}),
    "causal_by_keys": ({"q_start": KEYS}, {"causal": True}),
    "lengths": ({"kv_end": PREFIX[:, None, None]}, {"kv_lengths": PREFIX}),
    "mask_of_keys": ({"mask": PREFIX[:, None, None, None] > KEYS}, {"kv_lengths": PREFIX}),
    "prefix": (
        {"kv_end": np.maximum(PREFIX[:, None, None], ROWS + 1)},
        {"mask": (PREFIX[:, None, None, None] > KEYS) | (ROWS[:, None] >= KEYS)},
    ),
    "global_keys": (
        {"q_end": np.where(GLOBAL, T, KEYS + 31), "causal": True},
        {"mask": GLOBAL | (ROWS[:, None] - 31 < KEYS), "causal": True},
    ),
    "shared_prefix": (
        {"q_end": np.where(SECTION == 0, T, 90 * (SECTION + 1)), "causal": True},
        {"mask": (SECTION == 0) | (ROWS[:, None] // 90 == SECTION), "causal": True},
    ),
}
"""Options, and others that keep the same pairs."""


def of(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    return x[(None,) * (4 - x.ndim)] if x.dtype == bool else x.astype(np.int32)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("target", cases.targets())
def test_other_masks_as_intervals(target: Target, name: str) -> None:
    def results(options: dict[str, Any]) -> Any:
        def attend(*inputs: jax.Array) -> Any:
            options_ = {key: of(x) for key, x in options.items()}
            return jax_flash.attention(*inputs, **options_, return_lse=True, implementation=target.implementation)

        @jax.jit
        def run(inputs: Any, cotangents: Any) -> Any:
            outputs, pullback = jax.vjp(attend, *inputs)
            return *outputs, *pullback(cotangents)

        with jax.default_device(target.device):
            return run((QUERY, KEY, VALUE), (QUERY, np.ones((B, N, T), np.float32)))

    got, want = (results(options) for options in SAME[name])
    tolerance = 2e-2 if target.implementation == "cuda" else 1e-5
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation != "reference"))
def test_blocks_without_pairs_are_not_visited(target: Target) -> None:
    """NaN in values, which any visit would spread: weights of 0 times NaN are NaN. A block of keys has 512 at most."""
    rows, keys = np.arange(1024), np.arange(2048)
    query, key, value = (RANDOM.standard_normal((1, length, 1, H)).astype(np.float32) for length in (1024, 2048, 2048))
    for options in (
        {"kv_start": np.full(1024, 1536) + rows // 8},
        {"kv_end": np.full(1024, 256) - rows // 8},
        {"q_end": np.where((keys < 256) | (keys >= 1536), 1024, 0)},
        {"q_start": np.where((keys < 256) | (keys >= 1536), keys // 4, 1024)},
        {"mask": ((keys < 256) | (keys >= 1536))[None, None, None]},
        {"mask": (keys < 768)[None, None, None], "q_end": np.where((keys < 256) | (keys >= 1536), 1024, 0)},
    ):
        options = {name: x if x.dtype == bool else x.astype(np.int32) for name, x in options.items()}
        spoiled = value.copy()
        spoiled[:, 0 if "kv_start" in options else 768 : 2048 if "kv_end" in options else 1536] = np.nan
        attend = jax.jit(lambda v, o: jax_flash.attention(query, key, v, **o, implementation=target.implementation))
        with jax.default_device(target.device):
            want, got = (np.asarray(attend(jnp.asarray(v), options)) for v in (value, spoiled))
        np.testing.assert_array_equal(got, want)


def test_chunks_are_judged_by_their_edges() -> None:
    options = Options(causal=False, scale=1.0)
    starts = np.where(np.arange(256) < 128, 300, 600)
    intervals = jnp.asarray(np.stack([starts, starts + 100], axis=-1)[None, None], jnp.int32)
    rows = jnp.arange(256, dtype=jnp.int32)

    def may_keep(first: int, last: int) -> bool:
        columns = jnp.arange(first, last, dtype=jnp.int32)
        return bool(scores.may_keep(options, {"kv_intervals": intervals}, rows, columns))

    assert [may_keep(*x) for x in ((0, 300), (0, 301), (399, 500), (400, 600), (650, 660), (700, 900))] == [
        False, True, True, False, True, False,
    ]  # fmt: skip


def test_interval_ranges() -> None:
    intervals = np.array([[4, 9], [7, 7], [2, 5], [30, 3]])[None, None]
    np.testing.assert_array_equal(interval_ranges(jnp.asarray(intervals, jnp.int32))[0, 0], [[2, 9, 30, 3]])
    longer = np.tile([[[[1, 5]]]], (1, 2, 33, 1))
    longer[:, 1, 32] = [3, 8]
    ranges = interval_ranges(jnp.asarray(longer, jnp.int32))
    np.testing.assert_array_equal(ranges[0], [[[1, 5, 1, 5]] * 2, [[1, 5, 1, 5], [3, 8, 3, 8]]])


def test_vmap_over_intervals() -> None:
    ends = np.stack([ROWS + 1, ROWS // 2 + 3]).astype(np.int32)
    attend = jax.vmap(lambda end: jax_flash.attention(QUERY, KEY, VALUE, kv_end=end))
    for got, end in zip(attend(ends), ends, strict=True):
        np.testing.assert_allclose(got, jax_flash.attention(QUERY, KEY, VALUE, kv_end=end), rtol=1e-5, atol=1e-5)


def test_kept_keys_come_first() -> None:
    kept = np.array([[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    found = kept_first({"mask": jnp.asarray(kept[:, None, None]), "q_lengths": jnp.zeros(3, jnp.int32)}, 3, 5)
    assert sorted(found) == ["kv_lengths", "kv_rows", "q_lengths"]
    np.testing.assert_array_equal(found["kv_lengths"], [3, 0, 5])
    np.testing.assert_array_equal(found["kv_rows"], [[0, 3, 4, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
    shared = {"mask": jnp.asarray(kept[:1, None, None]), "kv_lengths": jnp.array([4, 9, 0], jnp.int32)}
    found = kept_first(shared, 3, 5)
    np.testing.assert_array_equal(found["kv_lengths"], [2, 3, 0])
    np.testing.assert_array_equal(found["kv_rows"], [[0, 3, 1, 2, 4], [0, 3, 4, 1, 2], [0, 1, 2, 3, 4]])


MASK_OF_KEYS = jax.ShapeDtypeStruct((2, 1, 1, 900), jnp.bool_)
LISTED: dict[str, tuple[int, dict[str, Any], dict[str, Any], tuple[bool, bool]]] = {
    # The capability, shapes, options, and whether the forward and the backward list the keys.
    "alone": (90, {}, {}, (True, True)),
    "with_other_options": (90, {}, {"sinks": np.zeros(8, np.float32), "softcap": 3.0, "scale": 0.1}, (True, True)),
    "of_all": (90, {}, {"mask": jax.ShapeDtypeStruct((1, 1, 1, 900), jnp.bool_)}, (True, True)),
    "dq_by_itself": (90, {}, {"deterministic_backward": True}, (True, True)),
    "head_dim_256": (90, {"head_dim": 256}, {}, (True, True)),
    "few_rows": (90, {"rows": 30}, {}, (False, True)),
    "float32": (90, {"dtype": jnp.float32}, {}, (True, True)),
    "float32_few_rows": (90, {"dtype": jnp.float32, "rows": 30}, {}, (True, True)),
    "float32_highest": (80, {"dtype": jnp.float32}, {"precision": "highest"}, (True, True)),
    "float32_causal": (90, {"dtype": jnp.float32}, {"causal": True}, (False, False)),
    "causal": (90, {}, {"causal": True}, (False, False)),
    "bias": (90, {}, {"bias": np.zeros((1, 1, 1, 900), np.float32)}, (False, False)),
    "dropout": (90, {}, {"dropout_rate": 0.1, "dropout_key": np.zeros(2, np.uint32)}, (False, False)),
    "of_heads": (90, {}, {"mask": jax.ShapeDtypeStruct((2, 8, 1, 900), jnp.bool_)}, (False, False)),
    "ampere": (80, {}, {}, (True, True)),
    "ada_head_dim_256": (89, {"head_dim": 256}, {"deterministic_backward": True}, (True, True)),
    "turing": (75, {"dtype": jnp.float16}, {}, (True, True)),
    "turing_bfloat16": (75, {}, {}, (True, True)),
    "volta": (70, {"dtype": jnp.float16}, {}, (True, True)),
}


@pytest.mark.parametrize("name", LISTED)
def test_where_keys_are_listed(name: str) -> None:
    arch, sizes, options, want = LISTED[name]
    rows, head_dim, dtype = sizes.get("rows", 700), sizes.get("head_dim", 64), sizes.get("dtype", jnp.bfloat16)
    query, key = (jax.ShapeDtypeStruct((2, n, 8, head_dim), dtype) for n in (rows, 900))
    options = {"mask": MASK_OF_KEYS} | options
    arrays = {name: x for name, x in options.items() if hasattr(x, "shape")}

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, arrays: Any) -> Any:
        out, pullback = jax.vjp(lambda *x: jax_flash.attention(*x, **{**options, **arrays}), query, key, value)
        return pullback(out)

    calls = ahead.calls_of(gradients, (query, key, key, arrays), arch)
    assert [call.pass_ for call in calls] == ["forward", "backward"]
    assert tuple(call.options["has_kv_rows"] for call in calls) == want
    for call in calls:
        masked = ("has_kv_rows", "has_q_intervals", "has_mask")
        assert sum(call.options[of] for of in masked) == 1, "the mask is told in one way"


def test_kernels_without_lists_say_so(tmp_path: pathlib.Path) -> None:
    listed = {"has_kv_lengths": True, "has_kv_rows": True}
    with pytest.raises(ValueError, match="forward_split_kv takes no kv_rows"):
        _core.build_kernels(
            arch=90, out_dir=str(tmp_path), dtypes=["float16"], head_dims=[(64, 64)], options=[listed],
            passes=["forward_split_kv"], family="",
        )  # fmt: skip
