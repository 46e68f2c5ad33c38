"""float32 arrays as float16 ones, for products at TF32's accuracy at twice its rate, and bfloat16 where there is only
float16.

float16 keeps as many digits as TF32, 11, and more than bfloat16, but of a smaller range. So every array is multiplied
by a power of two, one for each key head and the query heads that attend to it, by which the largest of its values comes
near float16's own. Values down to 2^-29 of the largest then have all their digits, and values below 2^-40 of it, which
no sum with it would notice in float32, become 0.

For all of float32's accuracy an array comes as two limbs, its float16 rounding and what that leaves: 22 digits.

A row that is much larger than the others of its head would leave these few digits or none. The kernels compute such a
head in float32, from the arrays as they were (csrc/cuda/device/float32.cuh).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_flash._call.options import Operands, Options
from jax_flash._implementations import dropout, scores

_BITS = 15  # the largest value lies in [2^14, 2^15)

_SPREAD = 20
"""Bits by which the largest values of a head's rows may differ. A row that is smaller by as much than the largest one
keeps what is not below 2^-20 of its own largest value, and all digits of what is not below 2^-9."""

_GRADIENT_SPREAD = 30
"""The same for the rows of gradients, with one limb: rows with small gradients are usual in training. A row that is
smaller by as much keeps 10 digits of its largest value, and what these lose concerns its own dQ."""


def scaled(
    options: Options, operands: Operands, query: jax.Array, key: jax.Array, value: jax.Array, *gradients: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """query, key, value in float16, with ``gradients`` = (dout, delta) also dout, and ``descale`` [B, K, 6].

    With ``highest_precision`` arrays have twice the columns: of the high limb and of the low one. Rows that no pair
    keeps are zeros: they do not count among the largest, by whose scale they might overflow, and 0 * inf is NaN.
    """
    kv_heads = key.shape[2]
    rows, keys = (scores.kept(options, operands, side, query.shape[1], key.shape[1], kv_heads) for side in ("q", "kv"))
    arrays = [(query, rows), (key, keys), (value, keys)]
    if gradients:
        arrays.append((gradients[0], rows))
    arrays = [(x.astype(jnp.float32), valid) for x, valid in arrays]
    sizes = [_row_sizes(x, valid) for x, valid in arrays]
    largest = [_largest(x, kv_heads) for x in sizes]
    gradient_spread = _SPREAD if options.highest_precision else _GRADIENT_SPREAD
    spreads = (*[_SPREAD] * 3, gradient_spread)
    small = [_small(*x) for x in zip(sizes, largest, spreads, strict=False)]
    scales = [_power(x) for x in largest]
    # Rows that count for nothing are left out here, and of the sizes: an array without them would be written and read.
    near = [
        _without(x * jnp.repeat(scale, x.shape[2] // kv_heads, axis=1)[:, None, :, None], valid)
        for (x, valid), scale in zip(arrays, scales, strict=True)
    ]
    limbs = [_two_limbs(x) if options.highest_precision else x.astype(jnp.float16) for x in near]
    descale = [1 / scale for scale in scales]
    if gradients:
        # |dS| = P |dP - delta|, and |dP| is at most that of a row of ones.
        delta = jnp.swapaxes(gradients[1], 1, 2)[..., None]
        if options.highest_precision:
            # Nearer: low limbs of dS have fewer digits the smaller dS is against its bound.
            norms = (_largest_norm(near[i], kv_heads) * descale[i] for i in (2, 3))
            dp = functools.reduce(jnp.multiply, norms)
        else:
            dp = value.shape[-1] * largest[3] * largest[2]
        if options.dropout_rate:
            dp = dp * dropout.factor(options.dropout_rate)
        of_delta = _row_sizes(delta, rows)
        descale.append(_power(dp + _largest(of_delta, kv_heads)))
        # Rows of dS have one scale too, and in delta is the cotangent of lse, of which one may be large.
        of_values = jnp.repeat(value.shape[-1] * largest[2], query.shape[2] // kv_heads, axis=1)[:, None]
        of_ds = sizes[3] * of_values + of_delta
        small.append(_small(of_ds, _largest(of_ds, kv_heads), gradient_spread))
    else:
        descale += [jnp.ones_like(descale[0])] * 2
    in_float32 = jnp.concatenate(small, axis=1).any(axis=1)  # of all arrays at once: a kernel the fewer
    return limbs, jnp.stack([*descale, in_float32.astype(jnp.float32)], axis=-1)


def _without(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    return x if valid is None else jnp.where(valid[..., None], x, 0)


def _row_sizes(x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """The largest finite magnitude of every row of [B, length, heads, columns]; 0 of rows that are not valid."""
    sizes = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(axis=-1)
    return sizes if valid is None else jnp.where(valid, sizes, 0)


def _largest(sizes: jax.Array, kv_heads: int) -> jax.Array:
    """The largest of the sizes [B, length, heads] of rows for each key head, [B, K]."""
    return sizes.reshape(*sizes.shape[:2], kv_heads, -1).max(axis=(1, 3))


def _small(sizes: jax.Array, largest: jax.Array, bits: int) -> jax.Array:
    """Whether rows of ``sizes`` [B, length, heads] are not 0, but smaller than 2^-bits of the ``largest`` [B, K] of
    their key head: [B, length x heads / K, K]."""
    batch, length, _ = sizes.shape
    grouped = sizes.reshape(batch, length, largest.shape[1], -1)
    small = (grouped > 0) & (grouped < largest[:, None, :, None] * 2.0**-bits)
    return jnp.swapaxes(small, 2, 3).reshape(batch, -1, largest.shape[1])


def _two_limbs(x: jax.Array) -> jax.Array:
    """[..., 2 columns]: what float16 has of ``x``, and beside it what that leaves, in float16."""
    # Not by a conversion there and back: XLA takes that for nothing to do (xla_allow_excess_precision).
    high = jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    low = jnp.where(jnp.isfinite(x), x - high, 0)  # of what is not finite there is nothing left
    return jnp.concatenate([high, low], axis=-1).astype(jnp.float16)


def _largest_norm(x: jax.Array, kv_heads: int) -> jax.Array:
    """The largest Euclidean norm of a row for each key head, [B, K], of arrays that are scaled."""
    squares = jnp.square(jnp.where(jnp.isfinite(x), x, 0)).sum(axis=-1)
    return jnp.sqrt(_largest(squares, kv_heads))


def _power(largest: jax.Array) -> jax.Array:
    """The power of two that brings ``largest`` below 2^15."""
    _, exponent = jnp.frexp(jnp.minimum(largest, jnp.finfo(jnp.float32).max))
    return jnp.ldexp(jnp.ones_like(largest), jnp.clip(_BITS - exponent, -125, 125))
