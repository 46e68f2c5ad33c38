"""Sums whose order changes nothing: CUDA's kernels add to gradients of captured arrays as integers, of many digits.

csrc/layout.h says what the digits are and csrc/cuda/device/function_operations.cuh adds to them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

DIGITS = 12
"""kSumDigits of csrc/layout.h."""

SHAPE = (DIGITS + 1, 2)
"""uint32 words that an element of a gradient takes: low and high half of each digit and of the flags."""

MOST_ELEMENTS = 1 << 22
"""Of all gradients of a call, which these would take 436 MB for."""


def floats(x: jax.Array) -> jax.Array:
    """The float32 sums of uint32 [..., *SHAPE]."""
    half = 1 << 23
    carry_low = carry_high = jnp.zeros(x.shape[:-2], jnp.uint32)
    total = jnp.zeros(x.shape[:-2], jnp.float32)
    for i in range(DIGITS):
        # Digits become balanced, of [-2**23, 2**23): each is then larger than all below it together, and a sum from the
        # lowest on is rounded to a unit of its own.
        low = x[..., i, 0] + carry_low
        high = x[..., i, 1] + carry_high + (low < carry_low).astype(jnp.uint32)
        up = low + np.uint32(half)
        high = high + (up < np.uint32(half)).astype(jnp.uint32)
        digit = (up & np.uint32(0xFFFFFF)).astype(jnp.int32) - half
        total += digit.astype(jnp.float32) * np.float32(2.0 ** (24 * i - 149))
        carry_low = (up >> 24) | (high << 8)
        carry_high = (high.astype(jnp.int32) >> 24).astype(jnp.uint32)
    above = carry_low.astype(jnp.int32).astype(jnp.float32)
    total += jnp.where(above == 0, 0.0, above * np.float32(np.inf))
    flags = x[..., DIGITS, 0]
    for flag, value in ((1, np.inf), (2, -np.inf), (4, np.nan)):
        total += jnp.where((flags & np.uint32(flag)) == 0, 0.0, np.float32(value))
    return total
