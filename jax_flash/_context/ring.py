"""The schedule "ring": K and V travel around the devices, and partial results join by their lse.

Ring Attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889), in striped order Striped Attention (Brandon et al.
2023, https://arxiv.org/abs/2311.09431).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import Options, positions_matter, with_ranges
from jax_flash._context.call import Arrays, Call, axis_of, by_intervals, of_keys_alone, wide
from jax_flash._context.orders import Shard
from jax_flash._implementations import varying
from jax_flash._native import private
from jax_flash.checkpoint_policies import LSE, OUT

Tree = TypeVar("Tree")


def attention(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    """out and lse, with a derivative of its own: of the whole softmax, by out and lse of all keys.

    So a backward pass keeps out, lse and this device's shards, and K and V go around again, with dK and dV.
    """
    if call.named == "reference" or private.MISSING is not None:
        return _forward(call, query, key, value, operands)

    def at(index: jax.Array) -> Call:  # an argument, since the rules may be traced where call.index is unknown
        rows, keys = (dataclasses.replace(x, index=index) for x in (call.rows, call.keys))
        return dataclasses.replace(call, rows=rows, keys=keys)

    @jax.custom_jvp
    def attend(index: jax.Array, *inputs: Any) -> tuple[jax.Array, jax.Array]:
        return _forward(at(index), *inputs)

    def tangent(index: jax.Array, *inputs: Any) -> tuple[jax.Array, jax.Array]:
        return _tangent(at(index), *inputs)

    @functools.partial(attend.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> Any:
        out, lse = attend(*primals)
        # Named as those of one device are, so that remat policies can keep them.
        out, lse = private.checkpoint_name(out, OUT), private.checkpoint_name(lse, LSE)
        moved = dict(zip(_INPUTS, tangents[1:4], strict=True)) | tangents[4]
        moved = {name: x for name, x in moved.items() if not isinstance(x, jax.custom_derivatives.SymbolicZero)}
        if not moved:
            return (out, lse), (jnp.zeros_like(out), jnp.zeros_like(lse))
        # Checkpointed, so that the shards of other devices are sent again rather than kept.
        return (out, lse), jax.checkpoint(tangent)(primals[0], primals[1:], out, lse, moved)

    return attend(call.index, query, key, value, operands)


def _forward(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    visiting, staying = _visiting(key, value, operands)
    state = None
    for step in range(call.devices):
        # Sent before the kernel that hides it.
        following = _sent(call, visiting) if step + 1 < call.devices else visiting
        options, of_step = of_source(call, step, query, staying | visiting[2])
        out, lse = call.attend(options, None, query, visiting[0], visiting[1], of_step)
        new = State(out.astype(wide(query)), lse)
        state = new if state is None else state.merged(new)
        visiting = following
    assert state is not None
    return state.out.astype(query.dtype), state.lse


def _tangent(
    call: Call, primals: tuple[Any, ...], out: jax.Array, lse: jax.Array, moved: Arrays
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse, linear in ``moved``; its transpose is the backward pass.

    That takes the steps from the last to the first. So K and V go around backwards here, from where they are needed
    last, and their tangents forwards, whose transposes, dK and dV, then travel with K and V. What is summed over steps
    is cast down at each of them, so that its transpose is summed, and travels, in the accumulation dtype.
    """
    from jax_flash import _primitive  # imported here, since jax may lack the names it needs

    query, key, value, operands = primals
    visiting, staying = _visiting(key, value, operands)
    shards = {0: visiting}
    for step in range(call.devices - 1, 0, -1):
        visiting = _sent(call, visiting, back=True)
        shards[step] = visiting
    dtypes = {name: x.dtype for name, x in moved.items()}
    wide_moved = {name: x.astype(wide(query)) if name in _INPUTS else x for name, x in moved.items()}
    travelling = {name: x for name, x in wide_moved.items() if name in ("key", "value")}
    totals = jnp.zeros_like(out, wide(query)), jnp.zeros_like(lse)
    for step in range(call.devices):
        here = shards[step]
        options, of_step = of_source(call, step, query, staying | here[2])
        of_inputs = {name: wide_moved[name] for name in ("query",) if name in moved} | travelling
        tangents = {name: x.astype(dtypes[name]) for name, x in of_inputs.items()}
        tangents |= _moved_operands(call, step, operands, of_step, moved)
        if tangents:
            arrays = (query, *here[:2], out, lse, with_ranges(of_step), tangents)
            options = dataclasses.replace(options, partial_keys=True)
            terms = _primitive.tangent(*varying.vary_alike(arrays), options=options, implementation=call.named)
            totals = totals[0] + terms[0].astype(wide(query)), totals[1] + terms[1]
        if step + 1 < call.devices:
            travelling = _sent(call, travelling)
    return totals[0].astype(out.dtype), totals[1]


_INPUTS = ("query", "key", "value")
Visiting = tuple[jax.Array, jax.Array, Arrays]


def _visiting(key: jax.Array, value: jax.Array, operands: Arrays) -> tuple[Visiting, Arrays]:
    """What travels, and the operands that don't."""
    travelling = {name: x for name, x in operands.items() if of_keys_alone(name)}
    return (key, value, travelling), {name: x for name, x in operands.items() if name not in travelling}


def _moved_operands(call: Call, step: int, operands: Arrays, of_step: Arrays, moved: Arrays) -> Arrays:
    """The tangents of the operands of a step."""
    found = {}
    for old, tangent in moved.items():
        if old in _INPUTS:
            continue
        axis = axis_of(old, operands[old], "s")
        if axis is not None:
            found[old] = source_of(call, step).of(tangent, axis)
        for name, x in of_step.items():  # slopes may have become an array that a function captured
            if x is operands[old]:
                found[name] = tangent
    return found


def _sent(call: Call, tree: Tree, *, back: bool = False) -> Tree:
    """What the device before has sent: after each step a device has the shard of the one before; or of the next."""
    around = [(i, (i + (-1 if back else 1)) % call.devices) for i in range(call.devices)]
    sent: Tree = jax.tree.map(lambda x: jax.lax.ppermute(x, call.axis, around), tree)
    return sent


def source_of(call: Call, step: int) -> Shard:
    """The shard of keys that is here in a step."""
    index = (call.index - np.int32(step)) % np.int32(call.devices)
    return dataclasses.replace(call.keys, index=index)


def of_source(call: Call, step: int, query: jax.Array, operands: Arrays) -> tuple[Options, Arrays]:
    """Options and operands for the keys that are here in a step."""
    keys = source_of(call, step)
    found = {}
    for name, x in operands.items():
        axis = axis_of(name, x, "s")
        found[name] = x if axis is None or of_keys_alone(name) else keys.of(x, axis)
    if step:
        found.pop("sinks", None)  # counted once, in the first step
    if keys.consecutive and call.limits is None and call.options.functions is None:
        return call.options, _of_consecutive(call, keys, query, found)
    return by_intervals(call, found, keys, query)


def _of_consecutive(call: Call, keys: Shard, query: jax.Array, operands: Arrays) -> Arrays:
    """Operands by which rows and keys, both consecutive, count from their first ones."""
    found = dict(operands)
    if positions_matter(call.options, found):
        # Beyond all keys nothing depends on how far.
        offset = found.get("q_offset", jnp.zeros((query.shape[0], 1), jnp.int32))
        limit = np.int32(np.iinfo(np.int32).max // 2)
        if "alibi_slopes" not in found:
            offset = jnp.clip(offset, -limit, limit)
        found["q_offset"] = offset + call.rows.first - keys.first
    for name, shard in (("q_lengths", call.rows), ("q_intervals", call.rows), ("kv_lengths", keys),
                        ("kv_intervals", keys)):  # fmt: skip
        if name in found:
            found[name] = shard.count_before(found[name])
    return found


class State(NamedTuple):
    """The softmax over the keys of some steps, in the accumulation dtype: out [B, T, N, V] and lse [B, N, T]."""

    out: jax.Array
    lse: jax.Array

    def merged(self, other: State) -> State:
        """The softmax over the keys of both."""
        most = jax.lax.stop_gradient(jnp.maximum(self.lse, other.lse))
        finite = jnp.where(jnp.isfinite(most), most, 0)
        weights = jnp.exp(self.lse - finite), jnp.exp(other.lse - finite)
        total = weights[0] + weights[1]
        empty = total == 0
        divisor = jnp.where(empty, 1, total)
        lse = jnp.where(empty, -jnp.inf, finite + jnp.log(divisor))
        shares = (jnp.swapaxes(x / divisor, 1, 2)[..., None] for x in weights)
        return State(next(shares) * self.out + next(shares) * other.out, lse)
