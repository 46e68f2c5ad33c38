"""levanter 1.2.dev1644: `over` makes a dot_product_attention of levanter's signature that jax_flash computes.

    import levanter.layers.attention as layers
    import levanter_attention

    layers.dot_product_attention = levanter_attention.over(layers.dot_product_attention)

Do so before levanter's models are imported: some of them import the function by name. `left_to_levanter` says what goes
to levanter's own function. Of haliax nothing is needed but the ``array`` and the ``axes`` of a NamedArray.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash


def over(original: Callable[..., Any]) -> Callable[..., Any]:
    """levanter's ``dot_product_attention``, with `attend` where that can."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def dot_product_attention(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords)
        given.apply_defaults()
        if left_to_levanter(given.arguments):
            return original(*arguments, **keywords)
        return attend(**given.arguments)

    return dot_product_attention


def left_to_levanter(given: Mapping[str, Any]) -> str | None:
    """Why levanter's own function has to serve a call; None if `attend` does."""
    if given["bias"] is not None and given["logits_soft_cap"] is not None:
        return "levanter caps the sum of score and bias, jax_flash the score"
    mask = given["mask"]
    if getattr(mask, "causal_offset", None) is not None and mask.sliding_window is not None:
        return "levanter's window does not move with the offset"
    names = [{axis.name for axis in given[x].axes} for x in ("query", "key", "value")]
    if any(isinstance(given[x], (tuple, list)) for x in ("QPos", "KPos", "Key")):
        return "several axes of positions"
    if names[1] - {_name(given["KPos"])} - names[0] or names[1] - {_name(given["Key"])} - names[2]:
        return "an axis of key that query or value lacks"
    return None


def attend(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    dropout: float = 0.0,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: jax.Array | None = None,
    attn_sink: Any = None,
    **of_backends: Any,  # use_flash, attn_backend, flash_block_size: which of levanter's kernels, and how
) -> Any:
    q_pos, k_pos, head_dim = _name(QPos), _name(KPos), _name(Key)
    # Axes of query alone are query heads that share a key head. The last one of those that key has too is that of key
    # heads, and what is before it is the batch.
    shared = [axis for axis in query.axes if axis.name not in (q_pos, head_dim) and axis in key.axes]
    groups = [axis for axis in query.axes if axis.name not in (q_pos, head_dim) and axis not in key.axes]
    batch, heads = shared[:-1], shared[-1:]
    ids = getattr(mask, "segment_ids", None)
    if ids is not None and heads and heads[0] in ids[0].axes:
        batch, heads = shared, []  # a batch without heads: ids differ along its last axis
    value_dim = [axis for axis in value.axes if axis not in shared and axis.name != k_pos]

    def rows(x: Any, position: str, heads: Sequence[Any], dims: Sequence[str]) -> jax.Array:
        """[..., length, heads, head_dim]"""
        array = _transposed(x, [*(a.name for a in batch), position, *(a.name for a in heads), *dims])
        sizes = [a.size for a in batch], math.prod(a.size for a in heads)
        return array.reshape(*sizes[0], array.shape[len(batch)], sizes[1], -1).astype(attention_dtype or query.dtype)

    def pairs(x: Any) -> jax.Array:
        """[..., heads, T, S], with 1 where it has no axis."""
        all_heads, names = [*heads, *groups], [axis.name for axis in x.axes]
        order = [*(a.name for a in (*batch, *all_heads)), q_pos, k_pos]
        array = _transposed(x, [name for name in order if name in names])
        array = array.reshape([x.axes[names.index(n)].size if n in names else 1 for n in order])
        own = array.shape[len(batch) : -2]
        if any(size != 1 for size in own):
            array = jnp.broadcast_to(
                array, (*array.shape[: len(batch)], *(a.size for a in all_heads), *array.shape[-2:])
            )
        return array.reshape(*array.shape[: len(batch)], -1, *array.shape[-2:])

    options: dict[str, Any] = {}
    explicit = mask if hasattr(mask, "axes") else getattr(mask, "explicit_mask", None)
    if mask is not None and mask is not explicit:
        options["causal"] = mask.is_causal
        if mask.causal_offset is not None:
            options["q_offset"] = _of_batch(mask.causal_offset, batch)
        if mask.sliding_window is not None:
            options["window"] = (mask.sliding_window - 1, 0)
        if ids is not None:
            of_rows, of_keys = ids
            of_keys = type(of_keys)(of_keys.array, tuple(_renamed(a, q_pos, k_pos) for a in of_keys.axes))
            options["q_segment_ids"] = _of_batch(of_rows, batch, q_pos)
            options["kv_segment_ids"] = _of_batch(of_keys, batch, k_pos)
    if attn_sink is not None:
        options["sinks"] = _transposed(attn_sink, [a.name for a in (*heads, *groups)]).reshape(-1)
    if dropout and not inference:
        options |= {"dropout_rate": dropout, "dropout_key": prng}
    out = jax_flash.attention(
        rows(query, q_pos, [*heads, *groups], [head_dim]),
        rows(key, k_pos, heads, [head_dim]),
        rows(value, k_pos, heads, [a.name for a in value_dim]),
        bias=None if bias is None else pairs(bias),
        mask=None if explicit is None else pairs(explicit),
        scale=scaling_factor,
        softcap=logits_soft_cap,
        precision="highest" if precision in (jax.lax.Precision.HIGHEST, "highest", "float32") else None,
        **options,
    )
    positions = [axis for axis in query.axes if axis.name == q_pos]
    axes = [*batch, *positions, *heads, *groups, *value_dim]
    named = type(query)(out.astype(query.dtype).reshape([a.size for a in axes]), tuple(axes))
    # The order of query's axes, as haliax.dot has it.
    wanted = [a for a in query.axes if a.name != head_dim] + value_dim
    return type(query)(_transposed(named, [a.name for a in wanted]), tuple(wanted))


def _name(axis: Any) -> str:
    return axis if isinstance(axis, str) else axis.name


def _transposed(x: Any, names: Sequence[str]) -> jax.Array:
    found = [axis.name for axis in x.axes]
    return jnp.transpose(x.array, [found.index(name) for name in names])


def _renamed(axis: Any, old: str, new: str) -> Any:
    return type(axis)(new, axis.size) if axis.name == old else axis


def _of_batch(x: Any, batch: Sequence[Any], *names: str) -> jax.Array:
    """[...] or [..., length] of an array that may lack axes of the batch."""
    found = [axis.name for axis in x.axes]
    array = _transposed(x, [*(a.name for a in batch if a.name in found), *names])
    sizes = [a.size if a.name in found else 1 for a in batch]
    lengths = array.shape[array.ndim - len(names) :]
    return jnp.broadcast_to(array.reshape(*sizes, *lengths), (*(a.size for a in batch), *lengths))
