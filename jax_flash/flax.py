"""attention_fn(): `attention` as the hook of Flax's multi-head attention, by one argument.

    nnx.MultiHeadAttention(..., attention_fn=jax_flash.flax.attention_fn)
    linen.MultiHeadDotProductAttention(..., attention_fn=jax_flash.flax.attention_fn)

What Flax has no word for is bound beforehand, also for these modules:

    attention_fn=functools.partial(jax_flash.flax.attention_fn, window=(255, 0), softcap=30.0)

Nothing here imports Flax.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _dtypes
from jax_flash._attention import attention
from jax_flash._drop_in import takeable_bias

_ACCURATE = {"F32_F32_F32", "F64_F64_F64", "TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"}
"""The presets of jax.lax.DotAlgorithmPreset that are more accurate than TF32."""


def attention_fn(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    **options: Any,
) -> jax.Array:
    """`attention` by the arguments that Flax's attention modules pass to their ``attention_fn``.

    It takes every argument that ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention`` pass,
    and those of their ``dot_product_attention`` that a model may bind beforehand, with Flax's meaning. A module has the
    same parameters and, within rounding, the same results as with Flax's own function, except that

    - a row that keeps no key gives zeros, and zeros as weights that are sown; in Flax such a row attends to every key
      alike;
    - dropout has Flax's distribution, but other bits; the rate is rounded to a multiple of 1 / 65536;
    - scores, softmax and sums are float32 whatever ``dtype`` is (float64 for float64).

    Args:
      query: ``[..., T, N, H]``, any number of leading batch dimensions, also none; any dtype that can be cast to
        ``dtype``.
      key: ``[..., S, K, H]``, same leading dimensions; N is a multiple of K.
      value: ``[..., S, K, V]``.
      bias: added to the scaled scores; broadcastable to ``[..., N, T, S]``.
      mask: pairs where it is True, or not 0, are kept; broadcastable to ``[..., N, T, S]``, of any dtype.
      broadcast_dropout: drop the same pairs of query and key in every batch entry and head.
      dropout_rng: a JAX key; wanted where dropout acts.
      dropout_rate: 0 <= rate < 1, the part of the weights that dropout sets to zero; the others are divided by
        1 - rate.
      deterministic: no dropout.
      dtype: what ``query``, ``key`` and ``value`` are made; None promotes them to a common float dtype.
      precision: of float32 products on GPUs, as for JAX's own products: a ``jax.lax.Precision``, a
        ``jax.lax.DotAlgorithmPreset``, the name of one, or a pair, of which the more accurate one counts. Never less
        accurate than asked for: TF32, or all of float32. See ``precision`` of `attention`.
      module: sow the attention weights ``[..., N, T, S]``, before dropout, into this module as "attention_weights"
        (``sow_weights=True`` in Flax). They are made by the "reference", in O(T * S) memory; the result is not.
      is_causal: keep keys s <= t only.
      force_fp32_for_softmax: the result is float32 where it would have fewer bits, and so are weights that are sown.
        The softmax is float32 in any case.
      qk_attn_weights_einsum: refused; products are made inside of the kernels.
      attn_weights_value_einsum: refused, likewise.
      **options: the options of `attention` that Flax has no word for: ``window``, ``softcap``, ``implementation``, ...

    Returns:
      ``[..., T, N, V]``.

    Raises:
      TypeError: an argument has the wrong type or dtype, or is unknown.
      ValueError: an argument has the wrong shape or value, or dropout acts and ``dropout_rng`` is None.
      NotImplementedError: an einsum is given, ``precision`` is a ``jax.lax.DotAlgorithm``, or the named
        ``implementation`` does not serve this call here.
    """
    for name, einsum in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise NotImplementedError(f"{name} must be None: jax_flash makes the products inside of its kernels")
    query, key, value = _promoted(query, key, value, dtype=dtype)
    wide = _dtypes.accumulation_dtype(query.dtype)
    given: dict[str, Any] = {
        "bias": None if bias is None else takeable_bias(bias, query.dtype),
        "mask": None if mask is None else jnp.asarray(mask).astype(bool),
        "causal": is_causal,
        "precision": _precision(precision),
        "return_lse": False,
    }
    # Two sets of keywords: Python refuses what stands in both.
    if module is not None:
        weights = _weights(query, key, given, options)
        weights = weights.astype(wide) if force_fp32_for_softmax else weights
        module.sow("intermediates", "attention_weights", weights)  # the name of nnx.Intermediate, too
    if not deterministic and dropout_rate != 0:
        if dropout_rng is None:
            raise ValueError(f"dropout_rng must be a JAX key where dropout_rate is {dropout_rate}, got None")
        given["dropout_rate"] = dropout_rate
        given["dropout_key"] = _of_all_heads(dropout_rng) if broadcast_dropout else dropout_rng
    out: jax.Array = attention(query, key, value, **given, **options)
    return out.astype(wide) if force_fp32_for_softmax else out


def _promoted(*arrays: jax.typing.ArrayLike, dtype: jax.typing.DTypeLike | None) -> tuple[jax.Array, ...]:
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(dtype, jnp.float32)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def _precision(precision: Any) -> str | None:
    """The least accurate of `attention`'s that is not less accurate than ``precision``, which is one of JAX's."""
    if precision is None:
        return None
    if isinstance(precision, jax.lax.DotAlgorithm):  # which is a tuple
        raise NotImplementedError(f"precision must not be a jax.lax.DotAlgorithm, got {precision}")
    if isinstance(precision, (tuple, list)):
        return max(map(_precision, precision), key=(None, "default", "highest").index)
    if isinstance(precision, str) and precision in jax.lax.DotAlgorithmPreset.__members__:
        precision = jax.lax.DotAlgorithmPreset[precision]
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return "highest" if precision.name in _ACCURATE else "default"
    try:
        precision = jax.lax.Precision(precision)
    except ValueError:
        raise ValueError(
            "precision must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, the name of one, or a pair, "
            f"got {precision!r}"
        ) from None
    # On GPUs, "high" is TF32 to JAX.
    return "highest" if precision is jax.lax.Precision.HIGHEST else "default"


def _weights(query: jax.Array, key: jax.Array, given: dict[str, Any], options: dict[str, Any]) -> jax.Array:
    """The attention weights [..., N, T, S] without dropout, as what attends to the rows of the unit matrix."""
    *leading, kv_length, kv_heads, _ = key.shape
    unit = jnp.broadcast_to(jnp.eye(kv_length, dtype=query.dtype)[:, None], (*leading, kv_length, kv_heads, kv_length))
    weights: jax.Array = attention(query, key, unit, **given, **{**options, "implementation": "reference"})
    return weights.swapaxes(-2, -3)


def _of_all_heads(dropout_rng: jax.Array) -> jax.Array:
    """The key by which `attention` drops the same pairs in every batch entry and head."""
    is_typed = jnp.issubdtype(dropout_rng.dtype, jax.dtypes.prng_key)
    return (dropout_rng if is_typed else jax.random.wrap_key_data(dropout_rng))[None]
