"""Every bad input raises, when the call is traced, an error that names the argument, the expectation and the value."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash._native import _core, registration

GOOD = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 8)}


def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


ARRAYS = {
    "rank_of_query": ({"query": array((5, 8))}, ValueError, r"query must have at least rank 3.*got \(5, 8\)"),
    "rank_of_key": ({"key": array((7, 2, 8))}, ValueError, r"key must have the rank of query, 4, got rank 3"),
    "rank_of_value": ({"value": array((1, 2, 7, 2, 8))}, ValueError, r"value must have the rank of query, 4, got rank"),
    "batch_of_key": ({"key": array((3, 7, 2, 8))}, ValueError, r"key must have the batch dim.*\(2,\), got \(3,\)"),
    "batch_of_value": (
        {"value": array((1, 7, 2, 8))},
        ValueError,
        r"value must have the batch dim.*\(2,\), got \(1,\)",
    ),
    "head_dim_of_key": ({"key": array((2, 7, 2, 9))}, ValueError, r"key must have the head_dim of query, 8, got 9"),
    "length_of_value": (
        {"value": array((2, 6, 2, 8))},
        ValueError,
        r"value must have the length and heads of key, \(7, 2\), got \(6, 2\)",
    ),
    "heads_of_value": (
        {"value": array((2, 7, 4, 8))},
        ValueError,
        r"value must have the length and heads of key, \(7, 2\), got \(7, 4\)",
    ),
    "heads_do_not_divide": (
        {"key": array((2, 7, 3, 8)), "value": array((2, 7, 3, 8))},
        ValueError,
        r"query must have a number of heads that is a multiple of key's, got 4 and 3",
    ),
    "more_key_heads": (
        {"key": array((2, 7, 8, 8)), "value": array((2, 7, 8, 8))},
        ValueError,
        r"query must have a number of heads that is a multiple of key's, got 4 and 8",
    ),
    "no_key_heads": (
        {"key": array((2, 7, 0, 8)), "value": array((2, 7, 0, 8))},
        ValueError,
        r"query must have a number of heads that is a multiple of key's, got 4 and 0",
    ),
    "head_dim_zero": (
        {name: array((*shape[:-1], 0)) for name, shape in GOOD.items()},
        ValueError,
        r"query must have a head_dim of at least 1, got 0",
    ),
    "value_head_dim_zero": (
        {"value": array((2, 7, 2, 0))},
        ValueError,
        r"value must have a head_dim of at least 1, got 0",
    ),
    "dtype_of_key": ({"key": array(GOOD["key"], jnp.bfloat16)}, TypeError, r"key must have the dtype of.*32, got bfl"),
    "dtype_of_value": ({"value": array(GOOD["key"], jnp.float16)}, TypeError, r"value must.*float32, got float16"),
    "integers": (
        {name: array(shape, jnp.int32) for name, shape in GOOD.items()},
        TypeError,
        r"query must have one of the dtypes float16, bfloat16, float32, float64, got int32",
    ),
    "integer_value": ({"value": array(GOOD["value"], jnp.int8)}, TypeError, r"value must have one of.*got int8"),
    "complex": ({"query": array(GOOD["query"], jnp.complex64)}, TypeError, r"query must.*float16.*got complex64"),
    "booleans": ({"key": array(GOOD["key"], bool)}, TypeError, r"key must have one of.*float16.*got bool"),
    "float8": ({"key": array(GOOD["key"], jnp.float8_e4m3fn)}, TypeError, r"key must.*float16.*got float8_e4m3fn"),
}

OPTIONS = {
    "causal_number": ({"causal": 1}, TypeError, r"causal must be a bool.*got 1 of type int"),
    "causal_text": ({"causal": "yes"}, TypeError, r"causal must be a bool.*got 'yes' of type str"),
    "causal_array": ({"causal": jnp.array(True)}, TypeError, r"causal must be a bool.*array of dtype bool"),
    "return_lse_number": ({"return_lse": 0}, TypeError, r"return_lse must be a bool.*got 0 of type int"),
    "scale_text": ({"scale": "0.5"}, TypeError, r"scale must be a real number.*got '0.5' of type str"),
    "scale_complex": ({"scale": 1j}, TypeError, r"scale must be a real number.*got 1j of type complex"),
    "scale_bool": ({"scale": True}, TypeError, r"scale must be a real number.*got True of type bool"),
    "scale_list": ({"scale": [0.5]}, TypeError, r"scale must be a real number.*got \[0.5\] of type list"),
    "scale_array": ({"scale": np.ones(2)}, ValueError, r"scale must be .*shape \(\), got .* float64 and shape \(2,\)"),
    "scale_integers": ({"scale": jnp.int32(1)}, TypeError, r"scale must be .*floating dtype.*, got .*dtype int32"),
    "scale_nan": ({"scale": float("nan")}, ValueError, r"scale must be finite, got nan"),
    "scale_infinite": ({"scale": float("-inf")}, ValueError, r"scale must be finite, got -inf"),
    "q_offset_float": (
        {"q_offset": 1.0},
        TypeError,
        r"q_offset must be an int32 array, or integers that are known.*, got 1.0 of type float",
    ),
    "q_offset_bool": (
        {"q_offset": True},
        TypeError,
        r"q_offset must be an int32 array, or integers that are known.*, got True of type bool",
    ),
    "q_offset_none": ({"q_offset": None}, TypeError, r"q_offset must be an int32 array.*got None"),
    "q_offset_bools": (
        {"q_offset": [True, False]},
        TypeError,
        r"q_offset must.*int32.*got \[True, False\] of type list",
    ),
    "q_offset_float_array": ({"q_offset": jnp.zeros(2, jnp.float32)}, TypeError, r"q_offset.*int32.*got dtype float32"),
    "q_offset_too_large": ({"q_offset": 2**31}, ValueError, r"q_offset must be in the range of int32, got 2147483648"),
    "q_offset_far_too_large": (
        {"q_offset": [0, 2**70]},
        ValueError,
        r"q_offset must be in the range of int32, got 1180",
    ),
    "q_offset_too_small": ({"q_offset": -(2**31) - 1}, ValueError, r"q_offset must.*of int32, got -2147483649"),
    "q_offset_shape": (
        {"q_offset": np.zeros(3, np.int32)},
        ValueError,
        r"q_offset must broadcast to shape \(2,\), got shape \(3,\)",
    ),
    "q_offset_rank": (
        {"q_offset": np.zeros((2, 2), np.int32)},
        ValueError,
        r"q_offset must broadcast to shape \(2,\), got shape \(2, 2\)",
    ),
    "bias_list": ({"bias": [0.0]}, TypeError, r"bias must be an array, got \[0.0\] of type list"),
    "bias_integers": ({"bias": array((5, 7), jnp.int32)}, TypeError, r"bias must have one of the dtypes.*got int32"),
    "bias_too_wide": ({"bias": np.ones((5, 7))}, TypeError, r"bias must have one of.*float32, got float64"),
    "bias_shape": (
        {"bias": array((4, 5, 6))},
        ValueError,
        r"bias must broadcast to shape \(2, 4, 5, 7\), got shape \(4, 5, 6\)",
    ),
    "bias_rank": ({"bias": array((1, 2, 4, 5, 7))}, ValueError, r"bias must broadcast to.*got shape \(1, 2, 4, 5, 7\)"),
    "bias_key_heads": (
        {"bias": array((2, 5, 7))},
        ValueError,
        r"bias must.*got shape \(2, 5, 7\): use bias\[:, None\]",
    ),
    "mask_floats": ({"mask": array((5, 7))}, TypeError, r"mask must have one of the dtypes bool, got float32"),
    "mask_shape": ({"mask": array((7, 5), bool)}, ValueError, r"mask must broadcast to.*got shape \(7, 5\)(?!: use)"),
    "mask_of_pairs": (
        {"mask": array((2, 5, 7), bool)},
        ValueError,
        r"got shape \(2, 5, 7\): use mask\[:, None\](?!\S)",
    ),
    "mask_of_keys": ({"mask": array((2, 7), bool)}, ValueError, r"\(2, 7\): use mask\[:, None, None, :\]"),
    "mask_of_rows": ({"mask": array((2, 5), bool)}, ValueError, r"\(2, 5\): use mask\[:, None, :, None\]"),
    "mask_bool": ({"mask": True}, TypeError, r"mask must be an array, got True of type bool"),
    "window_float": ({"window": 2.0}, TypeError, r"window must be None, an int, .* a pair.*got 2.0 of type float"),
    "window_three": ({"window": (1, 2, 3)}, TypeError, r"window must be None.*pair.*got \(1, 2, 3\) of type tuple"),
    "window_bools": ({"window": (True, None)}, TypeError, r"window must be None.*got \(True, None\)"),
    "window_negative": ({"window": (4, -1)}, ValueError, r"window must have sides of at least 0, .*got \(4, -1\)"),
    "window_minus_one": ({"window": -1}, ValueError, r"window must have sides .*None for no limit, got -1"),
    "window_of_floats": ({"window": (jnp.ones((), jnp.float32), 1)}, TypeError, r"window must .*got .*dtype float32"),
    "window_of_int64": ({"window": np.array(3)}, TypeError, r"window must .*int32.*got .*dtype int64 and shape \(\)"),
    "window_array": ({"window": (1, np.ones(2, np.int32))}, ValueError, r"window must .*got .*int32 and shape \(2,\)"),
    "softcap_text": ({"softcap": "1"}, TypeError, r"softcap must be a real number.*got '1' of type str"),
    "softcap_zero": ({"softcap": 0.0}, ValueError, r"softcap must be positive, or None for none, got 0.0"),
    "softcap_infinite": ({"softcap": float("inf")}, ValueError, r"softcap must be finite, got inf"),
    "alibi_list": ({"alibi_slopes": [1.0]}, TypeError, r"alibi_slopes must be an array, got \[1.0\] of type list"),
    "alibi_integers": ({"alibi_slopes": array((4,), jnp.int32)}, TypeError, r"alibi_slopes.*float32, got int32"),
    "alibi_key_heads": (
        {"alibi_slopes": array((2,))},
        ValueError,
        r"alibi_slopes must have shape \[\.\.\., 4\].*\(2,\)",
    ),
    "alibi_batch": (
        {"alibi_slopes": array((3, 4))},
        ValueError,
        r"alibi_slopes must broadcast to shape \(2, 4\).*\(3, 4",
    ),
    "sinks_too_wide": ({"sinks": np.ones(4)}, TypeError, r"sinks must have a floating.*at most float32, got float64"),
    "sinks_scalar": ({"sinks": jnp.float32(1)}, ValueError, r"sinks must have shape \[\.\.\., 4\].*got \(\)"),
    "dropout_one": (
        {"dropout_rate": 1.0, "dropout_key": np.zeros(2, np.uint32)},
        ValueError,
        r"dropout_rate must be in \[0, 1\), got 1.0",
    ),
    "dropout_negative": ({"dropout_rate": -0.1}, ValueError, r"dropout_rate must be in \[0, 1\), got -0.1"),
    "dropout_array": (
        {"dropout_rate": jnp.float32(0.1)},
        TypeError,
        r"dropout_rate must be a real number that is known",
    ),
    "dropout_without_key": ({"dropout_rate": 0.1}, ValueError, r"dropout_key must be given with dropout_rate = 0.1"),
    "dropout_key_int": (
        {"dropout_rate": 0.1, "dropout_key": 7},
        TypeError,
        r"dropout_key must be a key of jax.random, got 7 of type int",
    ),
    "dropout_key_shape": (
        {"dropout_rate": 0.1, "dropout_key": np.zeros((3, 2), np.uint32)},
        ValueError,
        r"dropout_key must be a single key if it is a raw one, got shape \(3, 2\)",
    ),
    "dropout_keys_shape": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.split(jax.random.key(0), 3)},
        ValueError,
        r"dropout_key must broadcast to shape \(2, 4\), got shape \(3,\)",
    ),
    "segments_alone": (
        {"q_segment_ids": array((2, 5), jnp.int32)},
        ValueError,
        r"kv_segment_ids must be given with q_segment_ids, got None",
    ),
    "kv_segments_alone": (
        {"kv_segment_ids": array((2, 7), jnp.int32)},
        ValueError,
        r"q_segment_ids must be given with kv_segment_ids, got None",
    ),
    "segments_beyond_int32": (
        {"q_segment_ids": np.full((2, 5), -(2**31) - 1), "kv_segment_ids": array((2, 7), jnp.int32)},
        ValueError,
        r"q_segment_ids must be in the range of int32, got -2147483649",
    ),
    "segments_shape": (
        {"q_segment_ids": array((2, 5), jnp.int32), "kv_segment_ids": array((2, 5), jnp.int32)},
        ValueError,
        r"kv_segment_ids must broadcast to shape \(2, 7\), got shape \(2, 5\)",
    ),
    "kv_start_dtype": (
        {"kv_start": array((5,), jnp.float32)},
        TypeError,
        r"kv_start must be an int32 array, or integers that are known when the call is traced, got dtype float32",
    ),
    "kv_end_shape": (
        {"kv_start": 0, "kv_end": array((7,), jnp.int32)},
        ValueError,
        r"kv_end must broadcast to shape \(2, 4, 5\), got shape \(7,\)",
    ),
    "q_start_without_heads": (
        {"q_start": array((2, 7), jnp.int32)},
        ValueError,
        r"q_start must broadcast to shape \(2, 4, 7\), got shape \(2, 7\): use q_start\[:, None, :\]",
    ),
    "q_end_rank": (
        {"q_end": array((1, 2, 4, 7), jnp.int32)},
        ValueError,
        r"q_end must broadcast to shape \(2, 4, 7\), got shape \(1, 2, 4, 7\)",
    ),
    "q_end_beyond_int32": (
        {"q_end": [2**31]},
        ValueError,
        r"q_end must be in the range of int32, got 2147483648",
    ),
    "q_lengths_ragged": (
        {"q_lengths": [[1], [2, 3]]},
        TypeError,
        r"q_lengths must be an int32 array, or integers that are known.*, got \[\[1\], \[2, 3\]\] of type list",
    ),
    "q_lengths_of_three": ({"q_lengths": [1, 2, 3]}, ValueError, r"q_lengths must broadcast to shape \(2,\), got.*3,"),
    "q_lengths_text": ({"q_lengths": "12"}, TypeError, r"q_lengths must be an int32 array.*got '12' of type str"),
    "q_lengths_beyond_int32": (
        {"q_lengths": np.array([1, 2**31], np.uint32)},
        ValueError,
        r"q_lengths must be in the range of int32, got 2147483648",
    ),
    "q_lengths_floats": ({"q_lengths": array((2,))}, TypeError, r"q_lengths must be an int32 array.*got dtype float32"),
    "kv_lengths_shape": (
        {"kv_lengths": array((3,), jnp.int32)},
        ValueError,
        r"kv_lengths must broadcast to shape \(2,\), got shape \(3,\)",
    ),
    "precision_unknown": (
        {"precision": "tf32"},
        ValueError,
        r"precision must be None or one of default, high, highest",
    ),
    "deterministic_number": (
        {"deterministic_backward": 1},
        TypeError,
        r"deterministic_backward must be a bool.*got 1 of type int",
    ),
    "precision_number": ({"precision": 1}, ValueError, r"precision must be None or one of.*got 1 of type int"),
    "implementation_unknown": (
        {"implementation": "triton"},
        ValueError,
        r"implementation must be None or one of cuda, cpu, xla, reference, got 'triton'",
    ),
    "implementation_case": ({"implementation": "CPU"}, ValueError, r"implementation must be None or.*got 'CPU'"),
    "implementation_type": ({"implementation": 1}, TypeError, r"implementation must be a string or None, got int"),
}


@pytest.mark.parametrize("tracing", ["eager", "jit", "eval_shape", "vmap", "grad"])
@pytest.mark.parametrize(("bad", "error", "text"), ARRAYS.values(), ids=ARRAYS)
def test_bad_arrays(bad: dict[str, jax.Array], error: type[Exception], text: str, tracing: str) -> None:
    arrays = {**{name: array(shape) for name, shape in GOOD.items()}, **bad}
    call(arrays, {}, error, text, tracing)


@pytest.mark.parametrize("tracing", ["eager", "jit", "eval_shape", "vmap", "grad"])
@pytest.mark.parametrize(("bad", "error", "text"), OPTIONS.values(), ids=OPTIONS)
def test_bad_options(bad: dict[str, Any], error: type[Exception], text: str, tracing: str) -> None:
    call({name: array(shape) for name, shape in GOOD.items()}, bad, error, text, tracing)


def call(arrays: dict[str, Any], options: dict[str, Any], error: type[Exception], text: str, tracing: str) -> None:
    attend = functools.partial(jax_flash.attention, **options)
    inputs = tuple(arrays.values())
    if tracing == "eager":
        run = attend
    elif tracing == "jit":
        run = jax.jit(attend).trace  # traced only: nothing is lowered
    elif tracing == "eval_shape":
        run = functools.partial(jax.eval_shape, attend)
    elif tracing == "vmap":
        run = jax.vmap(attend)
        inputs = tuple(x[None] for x in inputs)
    else:
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in inputs):
            pytest.skip("JAX differentiates floating-point arguments only")
        run = jax.grad(lambda *inputs: attend(*inputs).sum())
    with pytest.raises(error, match=text) as caught:
        run(*inputs)
    assert caught.type is error


PACKED = {
    "query": array((10, 4, 8)),
    "key": array((12, 2, 8)),
    "value": array((12, 2, 8)),
    "cu_q_lengths": np.array([0, 4, 10], np.int32),
    "cu_kv_lengths": np.array([0, 6, 12], np.int32),
    "max_q_length": 6,
    "max_kv_length": 6,
}

BAD_PACKED = {
    "rank": ({"query": array((1, 10, 4, 8))}, ValueError, r"query must have rank 3.*got \(1, 10, 4, 8\)"),
    "head_dim": ({"key": array((12, 2, 9))}, ValueError, r"key must have the head_dim of query, 8, got 9"),
    "floats": ({"cu_q_lengths": [0, 4.0, 10]}, TypeError, r"cu_q_lengths must be an int32 array.*got \[0, 4.0, 10\]"),
    "beyond_int32": (
        {"cu_q_lengths": np.array([0, 4, 2**40])},
        ValueError,
        r"cu_q_lengths must be in the range of int32, got 1099511627776",
    ),
    "no_sequence": (
        {"cu_q_lengths": np.zeros(1, np.int32)},
        ValueError,
        r"cu_q_lengths must have shape \[sequences \+ 1",
    ),
    "sequences": (
        {"cu_kv_lengths": np.array([0, 6, 12, 12], np.int32)},
        ValueError,
        r"cu_kv_lengths must have the shape of cu_q_lengths, \(3,\), got \(4,\)",
    ),
    "begin": (
        {"cu_q_lengths": np.array([1, 4, 10], np.int32)},
        ValueError,
        r"cu_q_lengths must ascend from 0 to at most the 10 tokens there are, got \[1, 4, 10\]",
    ),
    "descending": (
        {"cu_kv_lengths": np.array([0, 6, 5], np.int32)},
        ValueError,
        r"cu_kv_lengths must ascend.*\[0, 6, 5",
    ),
    "beyond": ({"cu_kv_lengths": np.array([0, 6, 13], np.int32)}, ValueError, r"cu_kv_lengths must ascend.*the 12 tok"),
    "too_long": (
        {"max_q_length": 5},
        ValueError,
        r"cu_q_lengths must have no sequence longer than the 5 that max_q_length says, got one of 6",
    ),
    "maximum": ({"max_kv_length": -1}, ValueError, r"max_kv_length must be.*not negative, got -1"),
    "maximum_float": ({"max_kv_length": 6.0}, TypeError, r"max_kv_length must be an int.*got 6.0 of type float"),
    "offset": (
        {"q_offset": np.zeros(3, np.int32)},
        ValueError,
        r"q_offset must broadcast to shape \(2,\), got shape \(3",
    ),
    "sinks": ({"sinks": array((2, 4))}, ValueError, r"sinks must have shape \[4\].*got \(2, 4\)"),
}


@pytest.mark.parametrize(("bad", "error", "text"), BAD_PACKED.values(), ids=BAD_PACKED)
def test_bad_packed_calls(bad: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        jax_flash.attention_varlen(**{**PACKED, **bad})
    assert caught.type is error


def test_packed_calls_take_what_is_good() -> None:
    assert jax_flash.attention_varlen(**PACKED).shape == (10, 4, 8)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 3, 7), (2, 3, 5)])
def test_the_hint_at_a_mask_works(shape: tuple[int, ...]) -> None:
    query, key = array((2, 3, 5, 4, 8)), array((2, 3, 7, 2, 8))
    mask = array(shape, bool)
    with pytest.raises(ValueError, match="use mask") as caught:
        jax_flash.attention(query, key, key, mask=mask)
    hinted = eval(str(caught.value).splitlines()[0].rpartition("use ")[2], {"mask": mask})
    jax_flash.attention(query, key, key, mask=hinted)


def test_where_rows_and_keys_are_as_many_the_hint_is_for_keys() -> None:
    query = array((2, 5, 4, 8))
    with pytest.raises(ValueError, match=r"use mask\[:, None, None, :\]"):
        jax_flash.attention(query, query, query, mask=array((2, 5), bool))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


INTEGERS = {
    "q_offset": [3, -1],
    "kv_lengths": [6, 3],
    "q_lengths": [2, 5],
    "kv_segment_ids": [[0] * 4 + [1] * 3, [1] * 7],
    "kv_start": [0, 1, 2, 3, 4],
    "q_start": [0, 1, 2, 3, 4, 4, 0],
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("make", [list, np.array, jnp.array, np.uint8, tuple], ids=lambda make: make.__name__)
def test_integers_that_are_known(name: str, make: Any) -> None:
    """Lists and other dtypes are what int32 arrays are, eager and inside jit."""
    values = INTEGERS[name]
    if make is np.uint8:
        values = np.abs(values)
    arrays = [drawn(*shape) for shape in GOOD.values()]
    others = {"q_segment_ids": [[0, 1] * 2 + [1]] * 2} if "segment" in name else {}
    attend = functools.partial(jax_flash.attention, *arrays, causal=name == "q_offset", **others)
    want = attend(**{name: np.array(values, np.int32)})
    assert not np.array_equal(want, attend(**{name: np.zeros_like(values, np.int32)}))
    known = make(values)
    np.testing.assert_array_equal(attend(**{name: known}), want)
    np.testing.assert_array_equal(jax.jit(lambda: attend(**{name: known}))(), want)


def test_one_length_for_all() -> None:
    arrays = [drawn(*shape) for shape in GOOD.values()]
    want = jax_flash.attention(*arrays, kv_lengths=np.full(2, 3, np.int32), q_lengths=np.full(2, 4, np.int32))
    got = jax_flash.attention(*arrays, kv_lengths=3, q_lengths=np.int64(4))
    np.testing.assert_array_equal(got, want)
    assert jax_flash.explain(*arrays, kv_lengths=[3, 4], platform="cpu").implementation == "cpu"


@pytest.mark.parametrize("make", [list, np.array, jnp.array], ids=lambda make: make.__name__)
def test_cumulative_lengths_that_are_known(make: Any) -> None:
    arrays = [drawn(*shape) for shape in ((10, 4, 8), (12, 2, 8), (12, 2, 8))]
    lengths = [[0, 4, 10], [0, 6, 12]]
    want = jax_flash.attention_varlen(*arrays, *(np.array(x, np.int32) for x in lengths), 6, 6)
    np.testing.assert_array_equal(jax_flash.attention_varlen(*arrays, *map(make, lengths), 6, 6), want)


@pytest.mark.parametrize("dtype", ["int64", "int16", "uint32"])
def test_traced_integers_are_int32(dtype: str) -> None:
    """Their values are not known."""
    arrays = [array(shape) for shape in GOOD.values()]
    text = f"must be an int32 array, or integers that are known when the call is traced, got dtype {dtype}"
    lengths = np.array([3, 4], dtype)
    with pytest.raises(TypeError, match=f"kv_lengths {text}"):
        jax.jit(lambda lengths: jax_flash.attention(*arrays, kv_lengths=lengths)).trace(lengths)
    with pytest.raises(TypeError, match=r"kv_lengths must be an int32 array.* of type list"):
        jax.jit(lambda length: jax_flash.attention(*arrays, kv_lengths=[3, length])).trace(lengths[0])
    flat = [array(shape) for shape in ((10, 4, 8), (12, 2, 8), (12, 2, 8))]
    with pytest.raises(TypeError, match=f"cu_q_lengths {text}"):
        jax.jit(lambda cu: jax_flash.attention_varlen(*flat, cu, [0, 12])).trace(np.array([0, 10], dtype))


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("bad", [None, 1.0, [[[[1.0]]]], "text"], ids=lambda bad: type(bad).__name__)
def test_not_an_array(name: str, bad: Any) -> None:
    arrays = {**{name: array(shape) for name, shape in GOOD.items()}, name: bad}
    with pytest.raises(TypeError, match=f"{name} must be an array, got {type(bad).__name__}"):
        jax_flash.attention(**arrays)


@pytest.mark.parametrize("option", ["causal", "softcap", "return_lse"])
def test_static_options_refuse_tracers(option: str) -> None:
    arrays = [array(shape) for shape in GOOD.values()]
    run = jax.jit(lambda value: jax_flash.attention(*arrays, **{option: value}))
    with pytest.raises(TypeError, match=f"{option} must be .* that is known when the call is traced"):
        run.trace(True if option != "softcap" else 0.5)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="dropped"):
        jax_flash.attention(*(array(shape) for shape in GOOD.values()), dropped=0.1)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        jax_flash.attention(*(array(shape) for shape in GOOD.values()), None, None, True)


def test_float64_without_x64() -> None:
    arrays = [np.ones(shape) for shape in GOOD.values()]
    with jax.enable_x64(False), pytest.raises(TypeError, match=r"query must have a dtype that.*float64"):
        jax_flash.attention(*arrays)


@pytest.mark.parametrize(
    ("shape", "value_head_dim", "dtype", "text"),
    [
        (8, 8, "float64", "its kernels take float16, bfloat16, float32, query has dtype float64"),
        (257, 64, "float32", "head_dim of at most 256, query has 257 and value 64"),
        (64, 512, "bfloat16", "head_dim of at most 256, query has 64 and value 512"),
    ],
)
def test_what_cuda_does_not_serve(
    shape: int, value_head_dim: int, dtype: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax_flash._implementations.choice._cuda_devices", lambda: ("a device",))
    arrays = [array((2, 5, 4, shape), dtype)] * 2 + [array((2, 5, 4, value_head_dim), dtype)]
    with pytest.raises(NotImplementedError, match=f"implementation='cuda'.*{text}"):
        jax.eval_shape(functools.partial(jax_flash.attention, implementation="cuda"), *arrays)


def test_cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax_flash._implementations.choice._cuda_devices", lambda: ())
    arrays = [array(shape, jnp.float16) for shape in GOOD.values()]
    with pytest.raises(NotImplementedError, match=r"implementation='cuda'.*no CUDA device"):
        jax.eval_shape(functools.partial(jax_flash.attention, implementation="cuda"), *arrays)


def test_kernel_of_another_platform() -> None:
    """Errors that only the lowering can detect are raised there, with the same exception."""
    arrays = [array(shape, jnp.float16) for shape in GOOD.values()]
    traced = jax.jit(functools.partial(jax_flash.attention, implementation="cpu")).trace(*arrays)
    with pytest.raises(NotImplementedError, match=r"implementation='cpu'.*'cpu'.*'cuda'"):
        traced.lower(lowering_platforms=("cuda",))


# The FFI version


@pytest.mark.parametrize(
    ("library", "runtime"), [((0, 4), (0, 3)), ((1, 0), (0, 9)), ((0, 9), (1, 9)), ((0, 3), (0, 2))]
)
def test_a_library_that_cannot_run_here(library: tuple[int, int], runtime: tuple[int, int]) -> None:
    text = rf"FFI API {library[0]}\.{library[1]}.*has {runtime[0]}\.{runtime[1]}"
    with pytest.raises(ImportError, match=text):
        registration.check_ffi_version(library, runtime)


@pytest.mark.parametrize(("library", "runtime"), [((0, 3), (0, 3)), ((0, 3), (0, 5)), ((1, 0), (1, 7))])
def test_a_library_that_can(library: tuple[int, int], runtime: tuple[int, int]) -> None:
    registration.check_ffi_version(library, runtime)


def header(folder: pathlib.Path, text: str, name: str = "c_api.h") -> pathlib.Path:
    path = folder / "xla/ffi/api" / name
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return folder


def test_version_of_the_running_jaxlib(tmp_path: pathlib.Path) -> None:
    folder = header(tmp_path, "#define XLA_FFI_API_MAJOR 2\n#define XLA_FFI_API_MINOR 17\n")
    assert registration.runtime_ffi_version(folder) == (2, 17)
    assert registration.runtime_ffi_version() >= _core.FFI_API_VERSION


def test_a_jaxlib_without_a_version(tmp_path: pathlib.Path) -> None:
    folder = header(tmp_path, "#define XLA_FFI_API_MAJOR 2\n")
    with pytest.raises(ValueError, match=r"c_api.h does not state the version of jaxlib"):
        registration.runtime_ffi_version(folder)


def test_nothing_is_registered_before_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))
    monkeypatch.setattr(registration, "runtime_ffi_version", lambda: (0, 0))
    with pytest.raises(ImportError, match="newer jaxlib"):
        registration._register()
    assert not registered


def test_source_tree_without_the_library(tmp_path: pathlib.Path) -> None:
    sources = pathlib.Path(jax_flash.__file__).parent
    shutil.copytree(sources, tmp_path / "jax_flash", ignore=shutil.ignore_patterns("_core*", "kernels", "__pycache__"))
    # -S leaves out site-packages, and with it an editable install's own way of finding the library.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(os.path.isdir, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import jax_flash"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert f"ImportError: jax_flash in {tmp_path / 'jax_flash'} has no compiled library for this Python" in done.stderr
