"""The "xla" implementation: attention in chunks, in plain JAX, with O(T + S) memory in every derivative.

A scan over chunks of queries, and inside it a scan over chunks of keys with an online softmax. Both bodies are
checkpointed: a backward pass keeps the inputs of one chunk of queries and one carry per chunk of keys, never a
[T, S] array. Being plain JAX it runs on any platform, in any dtype, and differentiates to any order in both modes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash import _dtypes, _scores, _varying
from jax_flash._options import OPERANDS, Operands, Options

_CHUNK = 256

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum and sum of exponentials, [B, K, G, rows], and the weighted sum of values, [B, K, G, rows, V]."""


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands, options: Options
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, V] and lse [B, N, T] of query [B, T, N, H], key [B, S, K, H] and value [B, S, K, V].

    Knows every option but packed documents, which `_varlen` unpacks.
    """
    dtype, accumulate = query.dtype, _dtypes.accumulation_dtype(query.dtype)
    batch, q_length, q_heads, head_dim = query.shape
    kv_length, kv_heads, value_head_dim = value.shape[1:]
    group = q_heads // kv_heads
    q_chunk, kv_chunk = min(_CHUNK, q_length), min(_CHUNK, kv_length)
    precision = _scores.precision(options)
    query, key, value = _scores.without_padding(query, key, value, operands)

    # Wide outside of the scans and narrow again inside them: gradients are then summed over chunks in the wide dtype.
    # [chunks, B, K, G, rows, H] and [chunks, B, K, columns, H]: the chunk axis is what the scans walk along.
    query, key, value = (x.astype(accumulate) for x in (query, key, value))
    queries = _split(query, 1, q_chunk)
    queries = queries.reshape(-1, batch, q_chunk, kv_heads, group, head_dim).transpose(0, 1, 3, 4, 2, 5)
    keys, values = (_split(x, 1, kv_chunk).transpose(0, 1, 3, 2, 4) for x in (key, value))
    q_starts = jnp.arange(queries.shape[0], dtype=jnp.int32) * q_chunk
    kv_starts = jnp.arange(keys.shape[0], dtype=jnp.int32) * kv_chunk

    groups: dict[str, dict[str, jax.Array]] = {"": {}, "t": {}, "s": {}, "ts": {}}
    for name, x in _with_padded_keys(operands, key, kv_chunk).items():
        groups[_lengths(name, x)][name] = _wide(name, x, accumulate)
    by_row = _split_operands(groups["t"] | groups["ts"], "t", q_chunk)
    by_column = _split_operands(groups["s"], "s", kv_chunk)

    def over_queries(
        _: None, inputs: tuple[jax.Array, jax.Array, Operands]
    ) -> tuple[None, tuple[jax.Array, jax.Array]]:
        chunk, q_start, by_row = inputs
        rows = q_start + jnp.arange(q_chunk, dtype=jnp.int32)
        of_rows = groups[""] | {name: by_row[name] for name in groups["t"]}
        by_pair = by_column | _split_operands({name: by_row[name] for name in groups["ts"]}, "s", kv_chunk)

        def over_keys(carry: Carry, inputs: tuple[jax.Array, jax.Array, jax.Array, Operands]) -> tuple[Carry, None]:
            keys, values, kv_start, of_pairs = inputs
            columns = kv_start + jnp.arange(kv_chunk, dtype=jnp.int32)
            block = {**of_rows, **of_pairs}

            def attend(carry: Carry) -> Carry:
                maximum, total, weighted = carry
                products = jnp.einsum(
                    "bkgth,bksh->bkgts",
                    chunk.astype(dtype),
                    keys.astype(dtype),
                    preferred_element_type=accumulate,
                    precision=precision,
                )
                scores = _scores.of_products(products, options, block, rows, columns)
                # The results do not depend on the maximum, so neither do their derivatives.
                new_maximum = jax.lax.stop_gradient(jnp.maximum(maximum, scores.max(axis=-1)))
                anchor = jnp.where(jnp.isneginf(new_maximum), 0.0, new_maximum)
                decay = jnp.exp(maximum - anchor)
                weights = jnp.exp(scores - anchor[..., None])
                total = total * decay + weights.sum(axis=-1)
                products = jnp.einsum(
                    "bkgts,bksh->bkgth",
                    _scores.dropped(weights, options, block, q_start, kv_start).astype(dtype),
                    values.astype(dtype),
                    preferred_element_type=accumulate,
                    precision=precision,
                )
                return new_maximum, total, weighted * decay[..., None] + products

            may_keep = _scores.may_keep(options, block, rows, columns)
            if may_keep is None:
                return attend(carry), None
            return jax.lax.cond(may_keep, attend, lambda carry: carry, carry), None

        statistics = chunk.shape[:-1]
        if "sinks" in operands:
            sinks = jnp.broadcast_to(_scores.grouped(operands["sinks"], kv_heads)[..., None], statistics)
            maximum = jax.lax.stop_gradient(sinks)
            total = jnp.exp(sinks - jnp.where(jnp.isneginf(maximum), 0.0, maximum))
        else:
            maximum, total = jnp.full(statistics, -jnp.inf, accumulate), jnp.zeros(statistics, accumulate)
        start = maximum, total, jnp.zeros((*statistics, value_head_dim), accumulate)
        start = _varying.vary_alike(start, chunk)
        (maximum, total, weighted), _ = jax.lax.scan(
            jax.checkpoint(over_keys), start, (keys, values, kv_starts, by_pair)
        )
        # A row without any weight, of a key or of a sink: zeros and -inf, with zero gradients rather than NaN.
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        out = _scores.dropout_factor(weighted / total[..., None], options).astype(dtype)
        return None, (out, jnp.where(empty, -jnp.inf, maximum + jnp.log(total)))

    _, (out, lse) = jax.lax.scan(jax.checkpoint(over_queries), None, (queries, q_starts, by_row))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, q_heads, value_head_dim)[:, :q_length]
    lse = lse.transpose(1, 2, 3, 0, 4).reshape(batch, q_heads, -1)[:, :, :q_length]
    return _scores.finish(out, lse, operands)


def _with_padded_keys(operands: Operands, key: jax.Array, chunk: int) -> Operands:
    """The operands where the last chunk of keys ends in padding, which is like the padding of a batch entry."""
    batch, kv_length = key.shape[:2]
    if kv_length % chunk == 0:
        return operands
    lengths = _varying.vary_alike(jnp.full(batch, kv_length, jnp.int32), key)
    if "kv_lengths" in operands:
        lengths = jnp.minimum(lengths, operands["kv_lengths"])
    return {**operands, "kv_lengths": lengths}


def _lengths(name: str, x: jax.Array) -> str:
    """Which of "t" and "s" are dimensions of an operand; one of size 1 that is broadcast is not."""
    operand = OPERANDS[name]
    sizes = zip(operand.dims, x.shape, strict=True)
    return "".join(dim for dim, size in sizes if dim in "ts" and not (operand.broadcast and size == 1))


def _wide(name: str, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """An operand in the dtype in which its gradient is to be summed over chunks, if it is."""
    return x.astype(dtype) if OPERANDS[name].trainable and _lengths(name, x) != "ts" else x


def _split_operands(operands: Operands, dim: str, chunk: int) -> dict[str, jax.Array]:
    return {name: _split(x, OPERANDS[name].dims.index(dim), chunk) for name, x in operands.items()}


def _split(x: jax.Array, axis: int, chunk: int) -> jax.Array:
    """[..., length, ...] -> [chunks, ..., chunk, ...], padded with zeros or False, and segments with the last one."""
    length = x.shape[axis]
    chunks = -(-length // chunk)
    if padding := chunks * chunk - length:
        mode = "edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant"
        x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)], mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, chunk, *x.shape[axis + 1 :]), axis, 0)
