"""Which weights dropout keeps: a function of seed, row and column only, the same in every implementation.

Pair (t, s) of a head has 16 of the bits of Philox 4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"); it is kept if they are at least a threshold. One call of Philox has 128 bits and so serves 8 pairs,
of rows {t, t + 8} and columns {s, s + 8, s + 16, s + 24}, which is how the kernels' tensor cores hold them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import checks

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def threshold(rate: float) -> int:
    """How many of the 65536 values of a pair's bits drop it."""
    return min(math.floor(65536 * rate + 0.5), 65535)


def factor(rate: float) -> float:
    """The factor of kept weights: 1 over the fraction of the bits' values that keep a pair."""
    return 65536 / (65536 - threshold(rate))


def seeds(key: jax.Array, leading: Sequence[int], q_heads: int) -> jax.Array:
    """The seeds, uint32 [*leading, N, 2], of one key, or of keys that broadcast to [*leading, N], one for each head."""
    shape = (*leading, q_heads, 2)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim == 0:
        return jax.random.bits(key, shape, jnp.uint32)
    words = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(key.reshape(-1))
    return jnp.broadcast_to(words.reshape(*key.shape, 2), shape)


def keep(
    seeds: jax.Array, rate: float, row: jax.typing.ArrayLike, rows: int, column: jax.typing.ArrayLike, columns: int
) -> jax.Array:
    """Which pairs are kept, bool [..., rows, columns], for ``seeds`` uint32 [..., 2].

    The pairs begin at ``row`` and ``column``, multiples of 32.
    """
    i = _counters(row, 16, -(-rows // 16))[:, None]
    j = _counters(column, 32, -(-columns // 32))
    word0, word1 = seeds[..., 0, None, None], seeds[..., 1, None, None]
    shape = jnp.broadcast_shapes(i.shape, j.shape, word0.shape)
    i, j, zero = jnp.broadcast_to(i, shape), jnp.broadcast_to(j, shape), jnp.zeros(shape, jnp.uint32)
    words = jnp.stack(philox((i, j, zero, zero), (word0, word1)), axis=-1)

    # [..., rows / 16, 8, columns / 32, 8, word, half] -> [..., rows / 16, half, 8, columns / 32, word, 8]
    halves = jnp.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)
    halves = halves.reshape(*shape[:-2], shape[-2] // 8, 8, shape[-1] // 8, 8, 4, 2)
    n = len(shape) - 2
    bits = halves.transpose(*range(n), n, n + 5, n + 1, n + 2, n + 4, n + 3)
    bits = bits.reshape(*shape[:-2], 2 * shape[-2], 4 * shape[-1])
    return bits[..., :rows, :columns] >= np.uint32(threshold(rate))


def _counters(first: jax.typing.ArrayLike, rows: int, blocks: int) -> jax.Array:
    """The counters of ``blocks`` blocks of ``rows`` rows, 8 for each block."""
    start = jnp.asarray(first, jnp.uint32) // np.uint32(rows) * np.uint32(8)
    return start + jnp.arange(8 * blocks, dtype=jnp.uint32)


def philox(
    counter: tuple[jax.Array, jax.Array, jax.Array, jax.Array], key: tuple[jax.Array, jax.Array], rounds: int = _ROUNDS
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Philox 4x32: four words of ``counter`` and two of ``key``, all uint32, to four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(rounds):
        if number:
            k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _multiply(constant: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low word of the 64-bit product; by halves, since uint64 needs jax_enable_x64."""
    bits, low = np.uint32(16), np.uint32(0xFFFF)
    a, b = np.uint32(constant >> 16), np.uint32(constant & 0xFFFF)
    c, d = x >> bits, x & low
    middle = a * d + (b * d >> bits)  # at most (2^16 - 1)^2 + 2^16 - 2 < 2^32, and so is the next one
    other = b * c + (middle & low)
    return a * c + (middle >> bits) + (other >> bits), x * np.uint32(constant)


def dropout_mask(dropout_key: jax.Array, dropout_rate: float, shape: Sequence[int]) -> jax.Array:
    """The weights that ``attention(..., dropout_rate=dropout_rate, dropout_key=dropout_key)`` keeps.

    For tests and debugging: only "reference" ever materialises this array. Dropout multiplies the weights, after the
    softmax, by ``mask * 65536 / (65536 - round(65536 * dropout_rate))``. It does not depend on the lengths: the mask of
    longer sequences begins with that of shorter ones.

    Args:
      dropout_key: a JAX key, as made by ``jax.random.key`` (or a raw one by ``jax.random.PRNGKey``), or keys as
        `attention` takes them.
      dropout_rate: 0 <= rate < 1, rounded to a multiple of 1 / 65536 (at most 65535 / 65536).
      shape: ``(*leading, N, T, S)``, where ``query`` is ``[*leading, T, N, H]`` and ``key`` ``[*leading, S, K, H]``.

    Returns:
      A boolean array of ``shape``, True where the weight is kept.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: ``dropout_rate`` is out of range, ``dropout_key`` is not one key nor one for each head, or ``shape``
        has fewer than three dimensions or a negative one.
    """
    try:
        sizes = tuple(int(size) for size in shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of ints, (*leading, N, T, S), got {shape!r}") from None
    if len(sizes) < 3 or min(sizes) < 0:
        raise ValueError(f"shape must be (*leading, N, T, S), three or more sizes that are not negative, got {sizes}")
    rate, key = checks.dropout(dropout_rate, dropout_key, sizes[:-2])
    if key is None:
        return jnp.ones(sizes, bool)
    return _mask(key, rate, sizes)


@functools.partial(jax.jit, static_argnames=("rate", "sizes"))
def _mask(key: jax.Array, rate: float, sizes: tuple[int, ...]) -> jax.Array:
    *leading, q_heads, q_length, kv_length = sizes
    return keep(seeds(key, leading, q_heads), rate, 0, q_length, 0, kv_length)
