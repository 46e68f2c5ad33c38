"""dot_product_attention(): `attention` with the arguments of jax.nn.dot_product_attention."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_flash._attention import Window, attention
from jax_flash._call import checks, dtypes
from jax_flash._call.options import Implementation
from jax_flash._call.signature import readable

_IMPLEMENTATIONS = {"cudnn": "cuda"}
"""jax.nn's other names. Its "cudnn" means fused kernels on an NVIDIA GPU or an exception, and so does "cuda"."""


@overload
def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: Implementation | Literal["cudnn"] | None = None,
    return_residual: Literal[False] = ...,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: Implementation | Literal["cudnn"] | None = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@readable
def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: Implementation | Literal["cudnn"] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attention` with the arguments of ``jax.nn.dot_product_attention``: a drop-in replacement.

    Differences from ``jax.nn`` (its "xla" implementation, which it picks by default):

    - A row that keeps no key, also one from ``query_seq_lengths`` on, gives zeros with a residual of -inf. ``jax.nn``
      gives the mean of ``value`` (zeros from ``query_seq_lengths`` on) and a residual of about -2e38.
    - Memory grows with T + S, unless ``bias`` or ``mask`` is itself [T, S].
    - The contents of padding, NaN included, reach no result and no gradient.
    - A side of the window that is an int is not negative (one that is an array may be), and a wrong dtype raises
      TypeError rather than ValueError.

    Args:
      query: ``[B, T, N, H]`` or ``[T, N, H]``. float16, bfloat16, float32 or float64.
      key: ``[B, S, K, H]`` or ``[S, K, H]``, same dtype; N is a multiple of K.
      value: as ``key``; its head_dim may be another one, V.
      bias: added to the scores; up to 4 dimensions, broadcastable to ``[B, N, T, S]``; differentiable. Floats
        wider than the scores and integers are made float32 (float64 for float64 inputs).
      mask: pairs where it is True are kept; boolean, up to 4 dimensions, broadcastable to ``[B, N, T, S]``.
      scale: multiplies the scores; a number, or a scalar array, which may be traced and has a gradient; None means
        ``1 / sqrt(H)``.
      is_causal: keep keys s <= t only: the first query and the first key are aligned.
      query_seq_lengths: integers ``[B]`` as for `attention`; rows of ``query`` from these on are padding.
      key_value_seq_lengths: integers ``[B]``; rows of ``key`` and ``value`` from these on are padding.
      local_window_size: ``(left, right)``: keep keys t - left <= s <= t + right only; an int stands for both sides.
        Sides may be int32 scalar arrays, also traced ones.
      implementation: as for `attention`: None, "cpu", "cuda", "xla" or "reference". Code written for ``jax.nn`` keeps
        its meaning: "xla" is plain JAX, here in chunks, and "cudnn" means "cuda", fused kernels on an NVIDIA GPU or an
        exception; the kernels are this package's, never cuDNN's.
      return_residual: also return the residual, rounded to the dtype of ``key`` and without a gradient, as ``jax.nn``
        does. ``attention(return_lse=True)`` has the exact one, in float32 or wider and differentiable.

    Returns:
      out ``[B, T, N, V]`` or ``[T, N, V]`` in the dtype of ``query``; with ``return_residual`` also the residual
      ``[B, T, N]`` or ``[T, N]`` (`attention`'s lse is ``[B, N, T]``), the natural logarithm of the sum of exponentials
      of the scores.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong rank, shape or value, or ``implementation`` is unknown.
      NotImplementedError: the named ``implementation`` does not serve this call here.
    """
    query = jnp.asarray(query)
    shape = query.shape
    query, key, value = (_batched(name, array) for name, array in (("query", query), ("key", key), ("value", value)))
    is_causal, return_residual = (
        checks.boolean(name, value) for name, value in (("is_causal", is_causal), ("return_residual", return_residual))
    )
    batch = query.shape[0]
    out, lse = attention(
        query,
        key,
        value,
        None if bias is None else takeable_bias(_pairs("bias", bias), query.dtype),
        None if mask is None else _pairs("mask", mask),
        causal=is_causal,
        window=checks.window("local_window_size", local_window_size),
        scale=scale,
        q_lengths=_lengths("query_seq_lengths", query_seq_lengths, batch),
        kv_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        return_lse=True,
        implementation=_implementation(implementation),
    )
    out = out.reshape(*shape[:-1], value.shape[-1])
    if not return_residual:
        return out
    residual: jax.Array = jax.lax.stop_gradient(lse.swapaxes(-1, -2).astype(key.dtype))
    return out, residual.reshape(shape[:-1])


def _batched(name: str, array: jax.typing.ArrayLike) -> jax.Array:
    array = jnp.asarray(array)
    if array.ndim not in (3, 4):
        raise ValueError(
            f"{name} must have rank 4, [batch, length, heads, head_dim], or 3 without batch, got {array.shape}"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _pairs(name: str, array: jax.typing.ArrayLike) -> jax.Array:
    array = jnp.asarray(array)
    if array.ndim > 4:
        raise ValueError(f"{name} must have at most rank 4, [batch, heads, q_length, kv_length], got {array.shape}")
    return array


def takeable_bias(bias: jax.typing.ArrayLike, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``bias`` in a dtype that `attention` takes for inputs of ``dtype``: integers and wider floats are converted."""
    bias, wide = jnp.asarray(bias), dtypes.accumulation_dtype(dtype)
    is_wider = jnp.issubdtype(bias.dtype, jnp.floating) and bias.dtype.itemsize > wide.itemsize
    return bias.astype(wide) if is_wider or jnp.issubdtype(bias.dtype, jnp.integer) else bias


def _lengths(name: str, lengths: jax.typing.ArrayLike | None, batch: int) -> jax.typing.ArrayLike | None:
    if lengths is None:
        return None
    array = checks.int32(name, lengths)
    if array.shape != (batch,):
        raise ValueError(f"{name} must have the shape [batch], {(batch,)}, got {array.shape}")
    return array


def _implementation(implementation: Any) -> Any:
    return _IMPLEMENTATIONS.get(implementation, implementation) if isinstance(implementation, str) else implementation
