"""attention(): checks its arguments, makes the option record, and owns the derivative rule."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_flash import _chunked, _dtypes, _explain, _primitive, _reference, _varying

MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """What is known of a call when it is traced. One field an option; the names are those of csrc/options.h."""

    causal: bool
    scale: float


OPERANDS: dict[str, _primitive.Operand] = {
    "q_offset": _primitive.Operand(dims="b", dtype="int32"),
}
"""Options that are arrays, each optional; the names are those of csrc/options.h."""


@overload
def attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    causal: bool = False,
    q_offset: int | jax.typing.ArrayLike = 0,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    causal: bool = False,
    q_offset: int | jax.typing.ArrayLike = 0,
    scale: float | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    causal: bool = False,
    q_offset: int | jax.typing.ArrayLike = 0,
    scale: float | None = None,
    return_lse: bool,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    causal: bool = False,
    q_offset: int | jax.typing.ArrayLike = 0,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact attention, ``softmax(scale * query @ key.T) @ value``, in O(T + S) memory, forward and backward.

    Query row t stands at position t + ``q_offset``. The algorithm is FlashAttention-2 (Dao 2023,
    https://arxiv.org/abs/2307.08691, algorithms 1 and 2): tiles with an online softmax forward, recomputation from
    lse backward. Differentiable in query, key and value, through both results; for derivatives of higher order or in
    forward mode use ``implementation="xla"``.

    A row that keeps no key gives out = 0, lse = -inf and zero gradients.

    Args:
      query: ``[..., T, N, H]``, typically ``[B, T, N, H]``; any number of leading batch dimensions, also none.
        float16, bfloat16, float32 or float64.
      key: ``[..., S, K, H]``, same leading dimensions and dtype as ``query``; N is a multiple of K, and query head n
        attends to key head ``n // (N // K)`` (grouped-query attention; K = 1 is multi-query attention).
      value: ``[..., S, K, H]``, same dtype.
      causal: keep only keys with position s <= t + ``q_offset``.
      q_offset: position of query row 0; an int or an int32 array that broadcasts to the leading dimensions. 0 aligns
        the first query with the first key (as ``jax.nn.dot_product_attention``), S - T the last with the last (as
        FlashAttention). It may be traced, as decoding with a cache wants. Without ``causal`` no result depends on it.
      scale: multiplies the scores; None means ``1 / sqrt(H)``.
      return_lse: also return lse.
      implementation: None picks the best one that serves the call where it runs (``jax_flash.explain`` says which);
        or "cpu", "cuda" (the kernels of this package), "xla" (plain JAX in chunks, O(T + S) memory, any platform,
        differentiable to any order) or "reference" (plain quadratic attention).

    Returns:
      out ``[..., T, N, H]`` in the dtype of ``query``; with ``return_lse`` also lse ``[..., N, T]``, the natural
      logarithm of the sum of exponentials of the scaled and masked scores, in float32 (float64 for float64 inputs).

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong rank, shape or value, or ``implementation`` is unknown.
      NotImplementedError: the named ``implementation`` does not serve this call here.
    """
    query, key, value = _arrays(query=query, key=key, value=value)
    _check_shapes(query, key, value)
    causal = _bool("causal", causal)
    return_lse = _bool("return_lse", return_lse)
    leading = query.shape[:-3]
    offset = _q_offset(q_offset, leading)
    scale = _scale(scale, query.shape[-1])
    _explain.check_implementation(implementation, query.dtype)

    (q_length, q_heads, head_dim), (kv_length, kv_heads) = query.shape[-3:], key.shape[-3:-1]
    if 0 in query.shape or kv_length == 0:
        # Nothing to attend from or to: every row keeps no key.
        out, lse = (
            jnp.zeros_like(query),
            jnp.full((*leading, q_heads, q_length), -jnp.inf, _dtypes.accumulation_dtype(query.dtype)),
        )
        return (out, lse) if return_lse else out

    if scale <= 0:
        # The kernels take the maximum of the raw scores, which wants a scale > 0. The product has the right derivative.
        query, scale = query * jnp.asarray(np.sign(scale), query.dtype), abs(scale) or 1.0
    operands = {}
    if causal and offset is not None:
        operands["q_offset"] = jnp.broadcast_to(offset, leading).reshape(-1)
    options = Options(causal=causal, scale=scale)
    query, key, value, operands = _varying.vary_alike((query, key, value, operands))

    batch = math.prod(leading)
    out, lse = _attend(
        options,
        implementation,
        query.reshape(batch, q_length, q_heads, head_dim),
        key.reshape(batch, kv_length, kv_heads, head_dim),
        value.reshape(batch, kv_length, kv_heads, head_dim),
        operands,
    )
    out = out.reshape(query.shape)
    return (out, lse.reshape(*leading, q_heads, q_length)) if return_lse else out


def _attend(
    options: Options,
    implementation: str | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    if implementation == "reference":
        return _reference.attention(query, key, value, operands, options)
    if implementation == "xla":
        return _chunked.attention(query, key, value, operands, options)
    return _kernel_attention(options, implementation, query, key, value, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel_attention(
    options: Options,
    implementation: str | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    return _primitive.forward(query, key, value, operands, options=options, implementation=implementation)


def _forward_rule(
    options: Options,
    implementation: str | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: dict[str, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    out, lse = _primitive.forward(query, key, value, operands, options=options, implementation=implementation)
    # Named, so that remat policies can keep them (jax.checkpoint_policies.save_only_these_names).
    out, lse = checkpoint_name(out, "jax_flash_out"), checkpoint_name(lse, "jax_flash_lse")
    return (out, lse), (query, key, value, out, lse, operands)


def _backward_rule(
    options: Options, implementation: str | None, residuals: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Any, ...]:
    query, key, value, out, lse, operands = residuals
    dout, dlse = cotangents
    # d lse / d score is the softmax itself, so its cotangent joins the row sum of FlashAttention-2 (equation 4):
    # ds = p * (dp - delta) with delta = rowsum(dout * out) - dlse.
    delta = _primitive.row_sums(dout, out, lse.dtype) - dlse
    dquery, dkey, dvalue = _primitive.backward(
        query, key, value, dout, lse, delta, operands, options=options, implementation=implementation
    )
    return dquery, dkey, dvalue, dict.fromkeys(operands)


# Without optimize_remat, which hides the names from remat policies: the forward kernel would run twice.
_kernel_attention.defvjp(_forward_rule, _backward_rule)


def _arrays(**arguments: jax.typing.ArrayLike) -> list[jax.Array]:
    arrays = []
    for name, argument in arguments.items():
        if not isinstance(argument, (jax.Array, np.ndarray)):
            raise TypeError(f"{name} must be an array, got {type(argument).__name__}")
        if argument.dtype.name not in _dtypes.INPUTS:
            raise TypeError(
                f"{name} must have one of the dtypes {', '.join(_dtypes.INPUTS)}, got {argument.dtype.name}"
            )
        if jax.dtypes.canonicalize_dtype(argument.dtype) != argument.dtype:
            raise TypeError(
                f"{name} must have a dtype that JAX has enabled, got {argument.dtype.name} without jax_enable_x64"
            )
        arrays.append(jnp.asarray(argument))
    first = next(iter(arguments))
    for name, array in zip(arguments, arrays, strict=True):
        if array.dtype != arrays[0].dtype:
            raise TypeError(f"{name} must have the dtype of {first}, {arrays[0].dtype.name}, got {array.dtype.name}")
    return arrays


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 3:
            raise ValueError(f"{name} must have at least rank 3, [..., length, heads, head_dim], got {array.shape}")
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim:
            raise ValueError(f"{name} must have the rank of query, {query.ndim}, got rank {array.ndim}: {array.shape}")
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have the batch dimensions of query, {query.shape[:-3]}, got {array.shape[:-3]}"
            )
        if array.shape[-1] != query.shape[-1]:
            raise ValueError(f"{name} must have the head_dim of query, {query.shape[-1]}, got {array.shape[-1]}")
    if value.shape != key.shape:
        raise ValueError(f"value must have the shape of key, {key.shape}, got {value.shape}")
    q_heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"query must have a number of heads that is a multiple of key's, got {q_heads} and {kv_heads} heads"
        )
    if not 1 <= query.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"query must have a head_dim of 1 to {MAX_HEAD_DIM}, got {query.shape[-1]}")


def _bool(name: str, value: bool) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool that is known when the call is traced, got {_describe(value)}")
    return bool(value)


def _scale(scale: object, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, (numbers.Real, np.number)):
        raise TypeError(f"scale must be a real number that is known when the call is traced, got {_describe(scale)}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _q_offset(q_offset: int | jax.typing.ArrayLike, leading: tuple[int, ...]) -> jax.Array | None:
    """The offset as an int32 array that broadcasts to the leading dimensions, or None for a plain 0."""
    if isinstance(q_offset, (bool, np.bool_)):
        raise TypeError(f"q_offset must be an int or an int32 array, got {_describe(q_offset)}")
    if isinstance(q_offset, (int, np.integer)):
        limit = np.iinfo(np.int32)
        if not limit.min <= q_offset <= limit.max:
            raise ValueError(f"q_offset must be in the range of int32, got {q_offset}")
        return jnp.asarray(q_offset, jnp.int32) if q_offset else None
    if not isinstance(q_offset, (jax.Array, np.ndarray)):
        raise TypeError(f"q_offset must be an int or an int32 array, got {_describe(q_offset)}")
    if q_offset.dtype != jnp.int32:
        raise TypeError(f"q_offset must be an int or an int32 array, got dtype {q_offset.dtype.name}")
    try:
        fits = np.broadcast_shapes(q_offset.shape, leading) == leading
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"q_offset must broadcast to the batch dimensions {leading}, got shape {q_offset.shape}")
    return jnp.asarray(q_offset)


def _describe(value: object) -> str:
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of dtype {value.dtype.name} and shape {value.shape}"
    return f"{value!r} of type {type(value).__name__}"
