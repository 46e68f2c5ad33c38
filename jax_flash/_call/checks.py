"""Checks of attention()'s arguments: each returns its argument in the form that the implementations take, or raises."""

import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import dtypes as _dtypes
from jax_flash._call.options import UNLIMITED, Precision

_LIMIT = np.iinfo(np.int32)
_PRECISIONS: tuple[str, ...] = get_args(get_args(Precision)[0])


def describe(value: object) -> str:
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of dtype {value.dtype.name} and shape {value.shape}"
    return f"{value!r} of type {type(value).__name__}"


def inputs(**arguments: jax.typing.ArrayLike) -> list[jax.Array]:
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


def shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Checks the shapes of [..., length, heads, head_dim] arrays with the same batch dimensions."""
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
    heads(query, key, value)


def known_sizes(name: str, array: jax.Array, first: int) -> None:
    """Raises if a dimension from ``first`` on is symbolic (jax.export); those before it may be."""
    if any(not isinstance(size, int) for size in array.shape[first:]):
        raise NotImplementedError(
            f"{name} may have symbolic sizes in its batch dimensions alone (implementation='reference' takes any in "
            f"attention()), got shape {array.shape}"
        )


def heads(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the head_dim of query, {query.shape[-1]}, got {key.shape[-1]}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value must have the length and heads of key, {key.shape[-3:-1]}, got {value.shape[-3:-1]}")
    q_heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"query must have a number of heads that is a multiple of key's, got {q_heads} and {kv_heads} heads"
        )
    for name, array in (("query", query), ("value", value)):
        if array.shape[-1] < 1:
            raise ValueError(f"{name} must have a head_dim of at least 1, got {array.shape[-1]}")


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool that is known when the call is traced, got {describe(value)}")
    return bool(value)


def real(name: str, value: object, expected: str = "a real number that is known when the call is traced") -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.number)):
        raise TypeError(f"{name} must be {expected}, got {describe(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def scale(value: object, head_dim: int, dtype: Any) -> float | jax.Array:
    """A float if the scale is known when the call is traced, else, for an array, a scalar array of ``dtype``."""
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    expected = "a real number or an array of a floating dtype and shape ()"
    if not isinstance(value, (jax.Array, np.ndarray)):
        return real("scale", value, expected)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"scale must be {expected}, got {describe(value)}")
    if value.ndim != 0:
        raise ValueError(f"scale must be {expected}, got {describe(value)}")
    return jnp.asarray(value).astype(dtype)


def positive_or_none(name: str, value: object) -> float:
    """``value`` as a positive float, or 0 for None."""
    if value is None:
        return 0.0
    number = real(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, or None for none, got {number}")
    return number


def window(name: str, value: Any) -> tuple[int | jax.Array, int | jax.Array]:
    """(left, right), each an int (`UNLIMITED` for no limit), or an int32 scalar if it was given as an array."""
    if value is None:
        return UNLIMITED, UNLIMITED
    sides = value if isinstance(value, (tuple, list)) else (value, value)
    expected = f"{name} must be None, an int, an int32 array of shape (), or a pair (left, right) of these"

    def limit(side: object) -> int | jax.Array:
        if side is None:
            return UNLIMITED
        if isinstance(side, (jax.Array, np.ndarray)):
            if side.dtype != jnp.int32 or side.ndim != 0:
                raise (TypeError if side.dtype != jnp.int32 else ValueError)(f"{expected}, got {describe(side)}")
            return jnp.asarray(side)
        if not _is_int(side):
            raise TypeError(f"{expected}, got {describe(value)}")
        if side < 0:
            raise ValueError(f"{name} must have sides of at least 0, or None for no limit, got {value!r}")
        return min(int(side), UNLIMITED)

    if len(sides) != 2:
        raise TypeError(f"{expected}, got {describe(value)}")
    left, right = map(limit, sides)
    return left, right


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def length(name: str, value: object) -> int:
    if not _is_int(value):
        raise TypeError(f"{name} must be an int that is known when the call is traced, got {describe(value)}")
    if not 0 <= value <= _LIMIT.max:
        raise ValueError(f"{name} must be in the range of int32 and not negative, got {value}")
    return int(value)


def q_offset(value: object, leading: tuple[int, ...]) -> jax.Array | None:
    """``value`` as an int32 array of the leading dimensions, or None for a plain 0."""
    if _is_int(value):
        if not _LIMIT.min <= value <= _LIMIT.max:
            raise ValueError(f"q_offset must be in the range of int32, got {value}")
        return jnp.full(leading, int(value), jnp.int32) if value else None
    return integers("q_offset", value, leading)


def integers(name: str, value: object, shape: tuple[int, ...]) -> jax.Array:
    """``value`` as by `int32`, broadcast to ``shape``."""
    return jnp.broadcast_to(_fitting(name, int32(name, value), shape), shape)


def int32(name: str, value: object) -> jax.Array | np.ndarray[Any, Any]:
    """``value`` as int32: an int32 array, or other integers (also lists) whose values are known and in range."""
    if isinstance(value, (jax.Array, np.ndarray)) and value.dtype == jnp.int32:
        return value
    expected = "an int32 array, or integers that are known when the call is traced"
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be {expected}, got dtype {value.dtype.name}")
    try:
        known = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a tracer, a ragged list, an array on other hosts
        raise TypeError(f"{name} must be {expected}, got {describe(value)}") from None
    if known.size == 0 and isinstance(value, (tuple, list)):
        known = known.astype(np.int32)  # NumPy makes an empty list floats
    # NumPy keeps integers beyond 64 bits as objects.
    if known.dtype.kind not in "iu" and not (known.dtype.kind == "O" and all(map(_is_int, known.flat))):
        got = f"dtype {known.dtype.name}" if isinstance(value, (jax.Array, np.ndarray)) else describe(value)
        raise TypeError(f"{name} must be {expected}, got {got}")
    beyond = (known < _LIMIT.min) | (known > _LIMIT.max)
    if beyond.any():
        raise ValueError(f"{name} must be in the range of int32, got {known[beyond][0]}")
    return known.astype(np.int32)


def lengths(name: str, value: object, leading: tuple[int, ...], limit: int) -> jax.Array:
    """``value`` clipped to [0, limit], which the kernels rely on to stay inside the arrays."""
    return jnp.clip(integers(name, value, leading), 0, limit)


def cumulative(name: str, value: object, tokens: int, longest: int) -> jax.Array:
    """[sequences + 1] int32 from 0 to at most ``tokens``, ascending.

    Known values are checked; traced values are clipped and made to ascend, because the kernels rely on it.
    """
    value = int32(name, value)
    if value.ndim != 1 or value.shape[0] < 2:
        raise ValueError(f"{name} must have shape [sequences + 1] with at least one sequence, got {value.shape}")
    if not isinstance(value, jax.core.Tracer):
        known = np.asarray(value).astype(np.int64)
        if known[0] != 0 or (np.diff(known) < 0).any() or known[-1] > tokens:
            raise ValueError(
                f"{name} must ascend from 0 to at most the {tokens} tokens there are, got {known.tolist()}"
            )
        if (np.diff(known) > longest).any():
            raise ValueError(f"{name} must have no sequence longer than the {longest} that max_{name[3:-1]} says, "
                             f"got one of {np.diff(known).max()}")  # fmt: skip
    ascending = jax.lax.cummax(jnp.clip(jnp.asarray(value), 0, tokens))
    return ascending.at[0].set(0)


def scores(name: str, value: object, shape: tuple[int, ...], dtypes: Sequence[str]) -> jax.Array:
    """An array that broadcasts to ``[..., N, T, S]`` as [B or 1, N or 1, T or 1, S or 1]."""
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array, got {describe(value)}")
    if value.dtype.name not in dtypes:
        raise TypeError(f"{name} must have one of the dtypes {', '.join(dtypes)}, got {value.dtype.name}")
    array = _fitting(name, value, shape, _hint(name, value.shape, shape))
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    leading = shape[:-3]
    if any(size != 1 for size in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*leading, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])


def intervals(names: tuple[str, str], values: tuple[object, object], shape: tuple[int, ...], limit: int) -> jax.Array:
    """[start, end) of integers that broadcast to ``shape``, [..., N, length], as [B or 1, N or 1, length or 1, 2].

    Clipped to [0, ``limit``]; a side that is None is that end of it.
    """
    leading = shape[:-2]

    def side(name: str, value: object, absent: int) -> jax.Array:
        if value is None:
            return jnp.full((1, 1), absent, jnp.int32)
        integers = int32(name, value)
        hint = f": use {name}[{':, ' * len(leading)}None, :]" if integers.shape == (*leading, shape[-1]) else ""
        return _fitting(name, integers, shape, hint)

    start, end = (side(*x) for x in zip(names, values, (0, _LIMIT.max), strict=True))
    sides = jnp.stack(jnp.broadcast_arrays(start, end), axis=-1)
    array = jnp.clip(sides, 0, limit)
    array = array.reshape((1,) * (len(shape) + 1 - array.ndim) + array.shape)
    if any(size != 1 for size in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*leading, *array.shape[-3:]))
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def per_head(name: str, value: object, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Floats that broadcast to ``[..., N]``, such as [N], broadcast to ``shape`` in the accumulation dtype."""
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array, got {describe(value)}")
    if value.dtype.name not in _dtypes.INPUTS or np.dtype(value.dtype).itemsize > np.dtype(dtype).itemsize:
        raise TypeError(f"{name} must have a floating dtype of at most {np.dtype(dtype).name}, got {value.dtype.name}")
    if value.ndim == 0 or value.shape[-1] != shape[-1]:
        raise ValueError(f"{name} must have shape [..., {shape[-1]}], one value per query head, got {value.shape}")
    return jnp.broadcast_to(_fitting(name, value, shape), shape).astype(dtype)


def _hint(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """How to index an array of ``shape``, some of the dimensions of ``scores`` [..., N, T, S], to add the others."""
    leading, q_length, kv_length = scores[:-3], *scores[-2:]
    inserted = {
        (*leading, q_length, kv_length): "None",
        (*leading, q_length): "None, :, None",
        (*leading, kv_length): "None, None, :",  # where T = S, too: masks of padding are of keys
    }
    if shape not in inserted:
        return ""
    return f": use {name}[{':, ' * len(leading)}{inserted[shape]}]"


def _fitting(name: str, value: Any, shape: tuple[int, ...], hint: str = "") -> jax.Array:
    try:
        fits = jnp.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must broadcast to shape {shape}, got shape {value.shape}{hint}")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def dropout(rate: object, key: object, shape: tuple[int, ...]) -> tuple[float, jax.Array | None]:
    """The rate, and None for rate 0, else a key or keys that broadcast to ``shape``, [..., N]."""
    rate = real("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate}")
    if rate == 0:
        return 0.0, None
    if key is None:
        raise ValueError(f"dropout_key must be given with dropout_rate = {rate}, got None")
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return rate, key if key.ndim == 0 else _fitting("dropout_key", key, shape)
    if not isinstance(key, (jax.Array, np.ndarray)) or key.dtype != jnp.uint32:
        raise TypeError(f"dropout_key must be a key of jax.random, got {describe(key)}")
    if key.shape != (2,):
        raise ValueError(f"dropout_key must be a single key if it is a raw one, got shape {key.shape}")
    return rate, jnp.asarray(key)


def highest_precision(precision: object, dtype: Any) -> bool:
    """Whether float32 products are to have float32's accuracy; None follows jax.default_matmul_precision."""
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    if precision is not None and precision not in _PRECISIONS:
        raise ValueError(f"precision must be None or one of {', '.join(_PRECISIONS)}, got {describe(precision)}")
    if np.dtype(dtype) != np.float32:
        return False
    if precision is None:
        return jax.config.jax_default_matmul_precision in ("highest", "float32")  # type: ignore[attr-defined]
    return precision == "highest"
