"""attention_fn(): `attention` as the ``attention_fn`` of Flax's multi-head attention.

    nnx.MultiHeadAttention(..., attention_fn=jax_flash.flax.attention_fn)
    linen.MultiHeadDotProductAttention(..., attention_fn=jax_flash.flax.attention_fn)

Options that Flax lacks are bound beforehand:

    attention_fn=functools.partial(jax_flash.flax.attention_fn, causal=True, window=(255, 0))

Flax is imported only when its own function has to serve a call.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._attention import attention
from jax_flash._call import checks, dtypes
from jax_flash._dot_product import takeable_bias

_Function = TypeVar("_Function", bound=Callable[..., jax.Array])

_ACCURATE = {"F32_F32_F32", "F64_F64_F64", "TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"}
"""The presets of jax.lax.DotAlgorithmPreset that are more accurate than TF32."""

_PASSED_BY_NNX = (
    "mask",
    "dropout_rng",
    "dropout_rate",
    "broadcast_dropout",
    "deterministic",
    "dtype",
    "precision",
    "module",
)
"""What flax.nnx.MultiHeadAttention passes by name in every call, before is_causal."""


def _sees_what_was_bound(function: _Function) -> _Function:
    """Wraps ``function`` to raise if ``is_causal=True`` may have been bound and nnx's module passes False, its default.

    functools.partial lets the module's value replace the bound one, but keeps the bound one's place in the order of
    keywords: is_causal then precedes keywords that the module passes before it. Only a function that takes its keywords
    as a dictionary sees their order.
    """

    @functools.wraps(function)
    def watching(*arguments: Any, **keywords: Any) -> jax.Array:
        is_causal = keywords.get("is_causal")
        of_nnx = "force_fp32_for_softmax" not in keywords and all(name in keywords for name in _PASSED_BY_NNX)
        if of_nnx and isinstance(is_causal, (bool, np.bool_)) and not is_causal:
            order = list(keywords)
            if order.index("is_causal") < order.index("mask"):
                raise ValueError(
                    "is_causal must not be bound beforehand: the module passes its own instead, which is False here; "
                    "bind causal, which no module overrides"
                )
        return function(*arguments, **keywords)

    return watching  # type: ignore[return-value]


@_sees_what_was_bound
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
    force_fp32_for_softmax: bool | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    causal: bool = False,
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

    Complex numbers and other dtypes that `attention` doesn't take, a ``jax.lax.DotAlgorithm`` and einsums of one's own
    go to Flax's function: nnx's, or Linen's where a keyword is given that only Linen has.

    A module passes its own value for every keyword of Flax's, whatever was bound beforehand. An option that has to hold
    in every call is therefore bound by a name that Flax doesn't have: ``causal``, or one of ``options``.

    Args:
      query: ``[..., T, N, H]``, any number of leading batch dimensions, also none; any dtype that can be cast to
        ``dtype``.
      key: ``[..., S, K, H]``, same leading dimensions; N is a multiple of K.
      value: ``[..., S, K, V]``.
      bias: added to the scaled scores; broadcastable to ``[..., N, T, S]``.
      mask: pairs where it is True, or not 0, are kept; broadcastable to ``[..., N, T, S]``, of any dtype.
      broadcast_dropout: drop the same pairs of query and key in every batch entry and head.
      dropout_rng: a JAX key; required if dropout acts.
      dropout_rate: 0 <= rate < 1, the probability with which dropout sets a weight to zero; the others are divided by
        1 - rate.
      deterministic: no dropout. Unrelated to ``deterministic_backward``, which is an option of `attention`.
      dtype: ``query``, ``key`` and ``value`` are converted to it; None promotes them to a common float dtype.
      precision: accuracy of float32 products on GPUs, as for JAX's own products: a ``jax.lax.Precision``, a
        ``jax.lax.DotAlgorithmPreset``, the name of one, or a pair, of which the more accurate one counts. Never less
        accurate than asked for: TF32, or all of float32. See ``precision`` of `attention`.
      module: sow the attention weights ``[..., N, T, S]``, before dropout, into this module as "attention_weights"
        (``sow_weights=True`` in Flax). They are computed by "reference", in O(T * S) memory; the result is not.
      is_causal: keep keys s <= t only. nnx's module passes its own, False unless it is called with ``is_causal=True``;
        one that was bound beforehand raises there.
      force_fp32_for_softmax: the result is at least float32, and so are weights that are sown. The softmax is float32
        in any case.
      qk_attn_weights_einsum: see Linen's function, which serves such a call.
      attn_weights_value_einsum: likewise.
      causal: keep keys s <= t only, whatever ``is_causal`` is: bound beforehand, it makes a model causal.
      **options: the other options of `attention` that Flax lacks: ``window``, ``alibi_slopes``,
        ``deterministic_backward``, ``implementation``, ``context``, ...

    Returns:
      ``[..., T, N, V]``.

    Raises:
      TypeError: an argument has the wrong type or dtype, or is unknown.
      ValueError: an argument has the wrong shape or value, dropout acts and ``dropout_rng`` is None, or ``is_causal``
        was bound beforehand and a module of nnx passes False.
      NotImplementedError: Flax's own function would serve the call, but is not installed or lacks one of ``options``;
        or the named ``implementation`` does not serve this call here.
    """
    causal = checks.boolean("causal", causal) | checks.boolean("is_causal", is_causal)
    for name, instead in (("dropout_key", "dropout_rng"), ("return_lse", "jax_flash.attention for lse")):
        if name in options:
            raise TypeError(f"{name} must not be given to Flax's hook: use {instead}")
    query, key, value = _promoted(query, key, value, dtype=dtype)
    einsums = {
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    of_linen: dict[str, Any] = {name: x for name, x in einsums.items() if x is not None}
    if force_fp32_for_softmax is not None:
        of_linen["force_fp32_for_softmax"] = force_fp32_for_softmax
    if reason := _not_ours(query, precision, einsums):
        return _flax_function(bool(of_linen), reason, options)(
            query,
            key,
            value,
            bias,
            _and_causal(mask, query.shape[-3], key.shape[-3]) if causal else mask,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=query.dtype,
            precision=precision,
            module=module,
            **of_linen,
        )
    wide = dtypes.accumulation_dtype(query.dtype)
    given: dict[str, Any] = {
        "bias": None if bias is None else takeable_bias(bias, query.dtype),
        "mask": None if mask is None else jnp.asarray(mask).astype(bool),
        "causal": causal,
        "precision": _precision(precision),
        "return_lse": False,
    }
    if module is not None:
        if options.get("context") is not None:
            raise NotImplementedError("context must not be given where weights are sown: no device has all of them")
        weights = _weights(query, key, given, options)
        weights = weights.astype(wide) if force_fp32_for_softmax else weights
        module.sow("intermediates", "attention_weights", weights)  # also the collection of nnx.Intermediate
    if not deterministic and dropout_rate != 0:
        if dropout_rng is None:
            raise ValueError(f"dropout_rng must be a JAX key if dropout_rate is {dropout_rate}, got None")
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


def _not_ours(query: jax.Array, precision: Any, einsums: dict[str, Any]) -> str | None:
    """The reason why `attention` can't serve a call; None if it can."""
    if query.dtype.name not in dtypes.INPUTS:
        return f"query of dtype {query.dtype.name}"
    for name, einsum in einsums.items():
        if einsum is not None:
            return name
    return f"precision {precision}" if isinstance(precision, jax.lax.DotAlgorithm) else None


def _flax_function(linen: bool, reason: str, options: dict[str, Any]) -> Callable[..., jax.Array]:
    """Flax's own function; raises if it is not installed, or if ``options`` are given, which it lacks."""
    for name, x in options.items():
        if x is not None:
            raise NotImplementedError(f"{name} must not be given with {reason}, which Flax's own function serves")
    try:
        from flax import linen as flax_linen
        from flax import nnx
    except ImportError as error:
        raise NotImplementedError(f"Flax must be installed for {reason}, which its own function serves") from error
    function: Callable[..., jax.Array] = flax_linen.dot_product_attention if linen else nnx.dot_product_attention
    return function


def _and_causal(mask: jax.typing.ArrayLike | None, q_length: int, kv_length: int) -> jax.Array:
    """``mask`` and causal as one mask: Linen's function has no is_causal, nnx's takes no broadcast mask with it."""
    causal = jnp.tril(jnp.ones((q_length, kv_length), bool))
    return causal if mask is None else jnp.asarray(mask).astype(bool) & causal


def _precision(precision: Any) -> str | None:
    """The least accurate precision of `attention` that is at least as accurate as JAX's ``precision``."""
    if precision is None:
        return None
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
    # On GPUs JAX takes "high" as TF32.
    return "highest" if precision is jax.lax.Precision.HIGHEST else "default"


def _weights(query: jax.Array, key: jax.Array, given: dict[str, Any], options: dict[str, Any]) -> jax.Array:
    """The attention weights [..., N, T, S] without dropout: attention to the rows of the unit matrix as values."""
    *leading, kv_length, kv_heads, _ = key.shape
    unit = jnp.broadcast_to(jnp.eye(kv_length, dtype=query.dtype)[:, None], (*leading, kv_length, kv_heads, kv_length))
    weights: jax.Array = attention(query, key, unit, **given, **{**options, "implementation": "reference"})
    return weights.swapaxes(-2, -3)


def _of_all_heads(dropout_rng: jax.Array) -> jax.Array:
    """A key with which `attention` drops the same pairs in every batch entry and head."""
    is_typed = jnp.issubdtype(dropout_rng.dtype, jax.dtypes.prng_key)
    return (dropout_rng if is_typed else jax.random.wrap_key_data(dropout_rng))[None]
