"""The option record of a call; the names are those of csrc/options.h."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax

Implementation = Literal["cuda", "cpu", "xla", "reference"]
"""What may serve a call, in the order in which they are tried; the reference is never picked unasked."""

Precision = Literal["default", "high", "highest"] | jax.lax.Precision
"""Of float32 products on GPUs."""

UNLIMITED = 2**31 - 1
"""A side of the window that has no limit."""

SEGMENT_BLOCK = 32
"""Rows of which q_segment_ranges and kv_segment_ranges keep the smallest and the largest segment."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is known of a call when it is traced. One field an option."""

    causal: bool
    scale: float  # finite and > 0; 1 with traced_scale
    highest_precision: bool = False  # of float32 products; False for other dtypes
    original_bfloat16: bool = False  # the originals beside descale are bfloat16, else float32
    deterministic: bool = False  # gradients are summed in one order
    wide_bias: bool = False  # bias has the accumulation dtype, else that of query
    sequences: int = 1  # of a batch entry; 1 unless it is packed
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    softcap: float = 0.0  # 0: none
    dropout_rate: float = 0.0  # 0: none, and no dropout_seeds


@dataclasses.dataclass(frozen=True)
class Operand:
    """An option that is an array.

    ``dims`` has a letter for each dimension, as in csrc/options.h: b batch, d sequences, e sequences + 1, n query
    heads, k key heads, t and s lengths, i and j lengths in blocks of `SEGMENT_BLOCK`, h head_dim, v value_head_dim, 2 a
    pair, 6 a record of six.
    """

    dims: str
    dtypes: tuple[str, ...]
    trainable: bool = False  # has a gradient, in the accumulation dtype
    broadcast: bool = False  # any dimension may have size 1


OPERANDS: dict[str, Operand] = {
    "traced_scale": Operand("b", ("float32", "float64")),
    "window_bounds": Operand("b2", ("int32",)),
    "q_offset": Operand("bd", ("int32",)),
    "q_lengths": Operand("b", ("int32",)),
    "kv_lengths": Operand("b", ("int32",)),
    "cu_q_lengths": Operand("be", ("int32",)),
    "cu_kv_lengths": Operand("be", ("int32",)),
    "q_segment_ids": Operand("bt", ("int32",)),
    "kv_segment_ids": Operand("bs", ("int32",)),
    "q_segment_ranges": Operand("bi2", ("int32",)),
    "kv_segment_ranges": Operand("bj2", ("int32",)),
    "mask": Operand("bnts", ("bool",), broadcast=True),
    "dropout_seeds": Operand("bdn2", ("uint32",)),
    "descale": Operand("bk6", ("float32",)),
    "original_query": Operand("btnh", ("float32", "bfloat16")),
    "original_key": Operand("bskh", ("float32", "bfloat16")),
    "original_value": Operand("bskv", ("float32", "bfloat16")),
    "original_dout": Operand("btnv", ("float32", "bfloat16")),
    "sinks": Operand("bn", ("float32", "float64")),
    "alibi_slopes": Operand("bdn", ("float32", "float64"), trainable=True),
    "bias": Operand("bnts", ("float16", "bfloat16", "float32", "float64"), trainable=True, broadcast=True),
}
"""Each optional; what each means stands in csrc/options.h. sinks has a gradient too, one that needs no kernel; descale
and the originals are no options of attention() but come with the float16 form of float32 arrays
(_primitive/limbs.py)."""

Operands = Mapping[str, jax.Array]
