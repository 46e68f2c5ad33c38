"""Score and mask functions of rows and keys that are not where their indices say: the functions are wrapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, use_abstract_mesh

from jax_flash._call.options import Options, is_captured
from jax_flash._functions import plain, trace
from jax_flash._functions.trace import Function, Functions, captured_name
from jax_flash._implementations.scores import FULL, PARTIAL

Arrays = dict[str, jax.Array]


class Pair(NamedTuple):
    """A pair of a row and a key, as int32 scalars."""

    batch: Any  # batch entry or sequence, as the user's functions count them
    row: Any  # the row counts from the first one of the batch entry or sequence, without q_offset
    position: Any  # with q_offset
    key: Any


Locate = Callable[[Arrays, Any, Any, Any], Pair]
"""``locate(arrays, batch entry, row, key)`` says which pair a kernel's indices mean."""


def relocated(
    options: Options,
    operands: Arrays,
    locate: Locate,
    arrays: Arrays,
    *,
    dtype: Any,
    alibi: bool = False,
    blocks: bool = False,
) -> tuple[Options, Arrays]:
    """The options and operands of a call whose functions see the pairs that ``locate`` tells.

    ``arrays`` are those that ``locate`` reads. With ``alibi`` the slopes become a score function, with ``blocks`` the
    blocks of a block mask become a mask function: then the operand is gone. ``dtype`` is that of scores.
    """
    functions = options.functions or Functions()
    if blocks:
        operands = {**operands, "mask_blocks": operands["mask_blocks"].astype(jnp.int32)}
    builder = _Builder(operands, locate, arrays, dtype)
    score, masks, partial = functions.score, functions.masks, functions.partial_mask
    given = {name for name in operands if not is_captured(name)}

    def scored(call: _Scalars, score_: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        pair = call.pair(b, q, kv)
        if alibi:
            slope = call.element("alibi_slopes", *call.of_head(pair, b, h))
            score_ = score_ - slope * jnp.abs(pair.position - pair.key).astype(dtype)
        return score_ if score is None else call.user(score, score_, pair.batch, h, pair.position, pair.key)

    def masked(mask: Function) -> Callable[..., Any]:
        return lambda call, b, h, q, kv: _of_pair(call, mask, call.pair(b, q, kv), h)

    def in_blocks(call: _Scalars, b: Any, h: Any, q: Any, kv: Any) -> Any:
        pair = call.pair(b, q, kv)
        height, width = functions.block_size
        at = (*call.of_head(pair, b, h), pair.row // np.int32(height), pair.key // np.int32(width))
        kind = call.element("mask_blocks", *at)
        kept = kind == np.int32(PARTIAL)
        if partial is not None:
            kept = kept & _of_pair(call, partial, pair, h)
        return kept | (kind == np.int32(FULL))

    new_score = builder.build("score", scored, score, ["alibi_slopes"] if alibi else []) if alibi or score else None
    new_masks = [builder.build("mask", masked(mask), mask, []) for mask in masks]
    new_partial = partial
    if blocks:
        new_masks.append(builder.build("mask", in_blocks, partial, ["mask_blocks"]))
        new_partial = None
    elif partial is not None:
        new_partial = builder.build("mask", masked(partial), partial, [])
    left_out = {name for name, moved in (("alibi_slopes", alibi), ("mask_blocks", blocks)) if moved}
    block_size = (1, 1) if blocks else functions.block_size
    new = Functions(new_score, tuple(new_masks), new_partial, block_size)
    kept = {name: operands[name] for name in given - left_out}
    options = dataclasses.replace(options, functions=new if new.all or (not blocks and "mask_blocks" in kept) else None)
    builder.captured.operands()  # raises if they are too many
    # The same objects as before, by which their tangents are found.
    return options, kept | {captured_name(i): x for i, x in enumerate(builder.captured.arrays)}


def _of_pair(call: _Scalars, mask: Function, pair: Pair, h: Any) -> Any:
    return call.user(mask, pair.batch, h, pair.position, pair.key)


class _Builder:
    """Makes functions that read arrays by name."""

    def __init__(self, operands: Arrays, locate: Locate, arrays: Arrays, dtype: Any) -> None:
        self.captured = trace.Captured()
        self._locate, self._dtype = locate, dtype
        self._operands, self._places = operands, arrays

    def build(self, kind: str, body: Callable[..., Any], of_user: Function | None, names: Sequence[str]) -> Function:
        read = [captured_name(i) for i in of_user.captured] if of_user is not None else []
        arrays = {**{name: self._operands[name] for name in (*names, *read)}, **self._places}
        if "index_offsets" in self._operands:
            arrays["index_offsets"] = self._operands["index_offsets"]
        order = list(arrays)
        scalars = [jax.ShapeDtypeStruct((), np.int32)] * len(trace.INDICES)
        if kind == "score":
            scalars = [jax.ShapeDtypeStruct((), self._dtype), *scalars]
        shapes = [jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in order]

        def function(*args: Any) -> Any:
            found = dict(zip(order, args, strict=False))
            return body(_Scalars(found, self._locate), *args[len(order) :])

        # Scalars vary over no mesh axis, whatever the arrays do: the record must not depend on where the call is made.
        with use_abstract_mesh(AbstractMesh((), ())):
            jaxpr = jax.make_jaxpr(function)(*shapes, *scalars).jaxpr
        used = {x for equation in jaxpr.eqns for x in equation.invars if not hasattr(x, "val")} | set(
            x for x in jaxpr.outvars if not hasattr(x, "val")
        )
        held = [i for i in range(len(order)) if jaxpr.invars[i] in used]
        jaxpr = jaxpr.replace(invars=[*(jaxpr.invars[i] for i in held), *jaxpr.invars[len(order) :]])
        indices = tuple(self.captured.index(arrays[order[i]]) for i in held)
        name = of_user.name if of_user is not None else "context"
        key = (kind, indices, trace.key_of(jaxpr), jax.sharding.get_abstract_mesh())
        return Function(kind, name, jaxpr, indices, key)


class _Scalars:
    """What the body of a wrapped function reads."""

    def __init__(self, arrays: Arrays, locate: Locate) -> None:
        self._arrays, self._locate = arrays, locate

    def pair(self, b: Any, q: Any, kv: Any) -> Pair:
        return self._locate(self._arrays, b, q, kv)

    def of_head(self, pair: Pair, b: Any, h: Any) -> tuple[Any, Any, Any]:
        """The indices (batch entry, sequence, head) in operands [b, d, n, ...]."""
        if "cu_q_lengths" in self._arrays:
            return np.int32(0), pair.batch, h
        if "index_offsets" in self._arrays:
            b, h = b - self._arrays["index_offsets"][0], h - self._arrays["index_offsets"][1]
        return b, np.int32(0), h

    def element(self, name: str, *at: Any) -> Any:
        array = self._arrays[name]
        at = tuple(np.int32(0) if size == 1 else i for i, size in zip(at, array.shape, strict=True))
        return array[at]

    def user(self, function: Function, *scalars: Any) -> Any:
        captured = [self._arrays[captured_name(i)] for i in function.captured]
        return plain.evaluated(function, captured, *scalars)
