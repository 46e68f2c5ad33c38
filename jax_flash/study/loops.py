"""Attention as loops over blocks, in plain JAX.

The functions here take ``query`` [B, T, N, H], ``key`` [B, S, K, H] and ``value`` [B, S, K, V] of one floating-point
dtype, where N is a multiple of K: query head n attends to key head n // (N // K). They return out [B, T, N, V] of that
dtype. Scores are multiplied by 1 / sqrt(H). With ``causal`` a row attends to the keys up to its own position. Sums are
in float32, or in float64 for float64 arrays. They raise TypeError for other dtypes, ValueError for other shapes.

Inside, an algorithm is a forward and a backward of one head: q [T, H], k [S, H], v [S, V], padded to whole blocks. A
forward returns out and what it keeps for the backward. A loop over blocks is a ``fori_loop``, whose body reads blocks
of its arrays and writes blocks of its results, as a kernel reads and writes global memory.

S_ij, P_ij and dS_ij are the scores of rows i and keys j, their weights, and the gradient of scores:

    S = q k^T / sqrt(H),  P = softmax(S),  out = P v
    dv = P^T dout,  dP = dout v^T,  dS = P (dP - D),  D = rowsum(dout out),  dq = dS k / sqrt(H),  dk = dS^T q / sqrt(H)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_flash._call import checks, dtypes

BLOCK = 64
"""Rows of a block, and keys."""


class Algorithm(Protocol):
    """A function of query, key and value: see the module."""

    __name__: str

    def __call__(self, query: Any, key: Any, value: Any, *, causal: bool = False) -> jax.Array: ...


class Problem(NamedTuple):
    """What the blocks of one head have in common."""

    causal: bool
    rows: int  # without padding
    keys: int
    scale: float

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // BLOCK)

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // BLOCK)

    def first_rows(self, j: jax.Array) -> Any:
        """The first block of rows that attend to keys of block j."""
        return jnp.minimum(j, self.row_blocks) if self.causal else 0

    def end_of_keys(self, i: jax.Array) -> Any:
        """The end of the blocks of keys that rows of block i attend to."""
        return jnp.minimum(i + 1, self.key_blocks) if self.causal else self.key_blocks

    def scores(self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """S_ij of blocks q_i and k_j; -inf where a row does not attend to a key."""
        row, key = i * BLOCK + jnp.arange(BLOCK)[:, None], j * BLOCK + jnp.arange(BLOCK)
        keep = (row < self.rows) & (key < self.keys)
        if self.causal:
            keep &= key <= row
        return jnp.where(keep, q @ k.T * self.scale, -jnp.inf)


def block(x: jax.Array, i: jax.Array) -> jax.Array:
    """Rows of block i."""
    return jax.lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK)


def put(x: jax.Array, i: jax.Array, rows: jax.Array) -> jax.Array:
    """``x`` with other rows in block i."""
    return jax.lax.dynamic_update_slice_in_dim(x, rows, i * BLOCK, 0)


def lowest(x: jax.Array) -> Any:
    """Where a maximum begins. Not -inf, whose difference with itself is NaN."""
    return jnp.finfo(x.dtype).min


def inverse(x: jax.Array) -> jax.Array:
    """1 / x, and 0 for 0, the sum of a row that attends to no key."""
    return jnp.where(x == 0, 0.0, 1 / jnp.where(x == 0, 1.0, x))


# Plain attention: all of P in memory


def _plain_forward(p: Problem, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    row, key = jnp.arange(len(q))[:, None], jnp.arange(len(k))
    keep = (row < p.rows) & (key < p.keys) & (key <= row if p.causal else True)
    scores = jnp.where(keep, q @ k.T * p.scale, -jnp.inf)
    maximum = jnp.maximum(scores.max(axis=1, keepdims=True), lowest(scores))
    weights = jnp.exp(scores - maximum)
    weights *= inverse(weights.sum(axis=1, keepdims=True))
    return weights @ v, (q, k, v, weights)


def _plain_backward(p: Problem, kept: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, weights = kept
    dweights = dout @ v.T
    dscores = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))
    return dscores @ k * p.scale, dscores.T @ q * p.scale, weights.T @ dout


# FlashAttention-1 (Dao, Fu, Ermon, Rudra and Re 2022, https://arxiv.org/abs/2205.14135)


def _flash1_forward(p: Problem, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    """Algorithm 1. Keys are outermost, so that out, maxima and sums of all rows lie in memory between blocks of keys,
    and out is divided by the sum so far every time."""

    def of_keys(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        k_j, v_j = block(k, j), block(v, j)

        def of_rows(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out, maximum, total = state
            scores = p.scores(block(q, i), k_j, i, j)
            maximum_ij = jnp.maximum(scores.max(axis=1), lowest(scores))
            weights = jnp.exp(scores - maximum_ij[:, None])
            before, total_before = block(maximum, i), block(total, i)
            after = jnp.maximum(before, maximum_ij)
            old, new = jnp.exp(before - after) * total_before, jnp.exp(maximum_ij - after)
            total_after = old + new * weights.sum(axis=1)
            numerator = old[:, None] * block(out, i) + new[:, None] * (weights @ v_j)
            return (
                put(out, i, numerator * inverse(total_after)[:, None]),
                put(maximum, i, after),
                put(total, i, total_after),
            )

        return jax.lax.fori_loop(p.first_rows(j), p.row_blocks, of_rows, state)

    rows = len(q)
    start = jnp.zeros((rows, v.shape[1]), q.dtype), jnp.full(rows, lowest(q)), jnp.zeros(rows, q.dtype)
    out, maximum, total = jax.lax.fori_loop(0, p.key_blocks, of_keys, start)
    return out, (q, k, v, out, maximum, total)


def _flash1_backward(p: Problem, kept: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
    """Algorithm 4, without dropout: keys outermost again, dq in memory between blocks of keys."""
    q, k, v, out, maximum, total = kept

    def weights(i: jax.Array, j: jax.Array, q_i: jax.Array, k_j: jax.Array) -> jax.Array:
        exponentials = jnp.exp(p.scores(q_i, k_j, i, j) - block(maximum, i)[:, None])
        return exponentials * inverse(block(total, i))[:, None]

    return _keys_outermost(p, weights, (dout * out).sum(axis=1), q, k, v, dout)


def _keys_outermost(
    p: Problem, weights: Callable[..., jax.Array], d: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
    dout: jax.Array, *, adds_dq: bool = True,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dq, dk and dv: a block of keys sums its dk and dv, and adds to dq in memory, if at all. In a kernel whose blocks
    of keys run at the same time these additions are atomic."""

    def of_keys(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dq, dk, dv = state
        k_j, v_j = block(k, j), block(v, j)

        def of_rows(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk_j, dv_j = state
            q_i, dout_i = block(q, i), block(dout, i)
            p_ij = weights(i, j, q_i, k_j)
            ds_ij = p_ij * (dout_i @ v_j.T - block(d, i)[:, None])
            if adds_dq:
                dq = put(dq, i, block(dq, i) + ds_ij @ k_j * p.scale)
            return dq, dk_j + ds_ij.T @ q_i * p.scale, dv_j + p_ij.T @ dout_i

        start = dq, jnp.zeros_like(k_j), jnp.zeros_like(v_j)
        dq, dk_j, dv_j = jax.lax.fori_loop(p.first_rows(j), p.row_blocks, of_rows, start)
        return dq, put(dk, j, dk_j), put(dv, j, dv_j)

    start = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    return jax.lax.fori_loop(0, p.key_blocks, of_keys, start)


# FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691)


def _flash2_forward(p: Problem, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    """Algorithm 1. Rows are outermost and independent of each other; their sum of values stays where it is added up,
    and is divided once. Of maximum and sum only lse is kept."""

    def of_rows(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, lse = state
        q_i = block(q, i)

        def of_keys(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out_i, before, total = state
            scores = p.scores(q_i, block(k, j), i, j)
            after = jnp.maximum(before, scores.max(axis=1))
            weights, shrink = jnp.exp(scores - after[:, None]), jnp.exp(before - after)
            total = shrink * total + weights.sum(axis=1)
            return shrink[:, None] * out_i + weights @ block(v, j), after, total

        start = jnp.zeros((BLOCK, v.shape[1]), q.dtype), jnp.full(BLOCK, lowest(q)), jnp.zeros(BLOCK, q.dtype)
        out_i, maximum, total = jax.lax.fori_loop(0, p.end_of_keys(i), of_keys, start)
        return put(out, i, out_i * inverse(total)[:, None]), put(lse, i, maximum + jnp.log(total))

    start = jnp.zeros((len(q), v.shape[1]), q.dtype), jnp.zeros(len(q), q.dtype)
    out, lse = jax.lax.fori_loop(0, p.row_blocks, of_rows, start)
    return out, (q, k, v, out, lse)


def _weights_of_lse(p: Problem, lse: jax.Array) -> Callable[..., jax.Array]:
    def weights(i: jax.Array, j: jax.Array, q_i: jax.Array, k_j: jax.Array) -> jax.Array:
        scores = p.scores(q_i, k_j, i, j)
        return jnp.where(jnp.isneginf(scores), 0.0, jnp.exp(scores - block(lse, i)[:, None]))

    return weights


def _flash2_backward(p: Problem, kept: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
    """Two passes, as the authors' Triton kernel has them: one for dq with rows outermost, one for dk and dv with keys
    outermost. The weights are computed twice, and nothing is added to in memory."""
    q, k, v, out, lse = kept
    d = (dout * out).sum(axis=1)
    weights = _weights_of_lse(p, lse)

    def of_rows(i: jax.Array, dq: jax.Array) -> jax.Array:
        q_i, dout_i = block(q, i), block(dout, i)

        def of_keys(j: jax.Array, dq_i: jax.Array) -> jax.Array:
            k_j = block(k, j)
            ds_ij = weights(i, j, q_i, k_j) * (dout_i @ block(v, j).T - block(d, i)[:, None])
            return dq_i + ds_ij @ k_j * p.scale

        return put(dq, i, jax.lax.fori_loop(0, p.end_of_keys(i), of_keys, jnp.zeros_like(q_i)))

    dq = jax.lax.fori_loop(0, p.row_blocks, of_rows, jnp.zeros_like(q))
    _, dk, dv = _keys_outermost(p, weights, d, q, k, v, dout, adds_dq=False)
    return dq, dk, dv


def _flash2_atomic_backward(p: Problem, kept: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
    """Algorithm 2: one pass with keys outermost."""
    q, k, v, out, lse = kept
    return _keys_outermost(p, _weights_of_lse(p, lse), (dout * out).sum(axis=1), q, k, v, dout)


# From one head to arrays


Forward = Callable[[Problem, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Backward = Callable[[Problem, Any, jax.Array], tuple[jax.Array, ...]]


def checked(query: Any, key: Any, value: Any, causal: bool) -> tuple[jax.Array, jax.Array, jax.Array, bool]:
    """The arguments, or an error that says which of them is wrong."""
    query, key, value = checks.inputs(query=query, key=key, value=value)
    checks.shapes(query, key, value)
    if query.ndim != 4:
        raise ValueError(f"query, key and value must have rank 4, [B, length, heads, head_dim], got {query.shape}")
    if 0 in (*query.shape, *key.shape, *value.shape):
        raise ValueError(f"query, key and value must not be empty, got {query.shape}, {key.shape}, {value.shape}")
    return query, key, value, checks.boolean("causal", causal)


def _algorithm(name: str, summary: str, forward: Forward, backward: Backward) -> Algorithm:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def of_head(p: Problem, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(p, q, k, v)[0]

    of_head.defvjp(forward, backward)

    def attention(query: Any, key: Any, value: Any, *, causal: bool = False) -> jax.Array:
        query, key, value, causal = checked(query, key, value, causal)
        (_, rows, heads, head_dim), (_, keys, kv_heads, _) = query.shape, key.shape
        p = Problem(causal, rows, keys, head_dim**-0.5)
        group = heads // kv_heads
        wide = (
            x.astype(dtypes.accumulation_dtype(x.dtype))
            for x in (query, jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2))
        )
        padded = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, 0))) for x in wide)
        over_heads = jax.vmap(functools.partial(of_head, p), in_axes=1, out_axes=1)
        return jax.vmap(over_heads)(*padded)[:, :rows].astype(query.dtype)

    attention.__name__ = attention.__qualname__ = name
    attention.__doc__ = f"{summary} The arguments are those of all functions here (jax_flash.study.loops)."
    return attention


plain = _algorithm("plain", "Plain attention, with P in memory.", _plain_forward, _plain_backward)
flash1 = _algorithm("flash1", "FlashAttention-1.", _flash1_forward, _flash1_backward)
flash2 = _algorithm("flash2", "FlashAttention-2, backward in two passes.", _flash2_forward, _flash2_backward)
flash2_atomic = _algorithm(
    "flash2_atomic", "FlashAttention-2, backward in one pass.", _flash2_forward, _flash2_atomic_backward
)
