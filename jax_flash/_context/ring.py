"""The schedule "ring": K and V travel around the devices, and partial results join by their lse.

Ring Attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889), in striped order Striped Attention (Brandon et al.
2023, https://arxiv.org/abs/2311.09431).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import Options, positions_matter
from jax_flash._context.call import Arrays, Call, axis_of, by_intervals, of_keys_alone, wide
from jax_flash._context.orders import Shard


def attention(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    travelling = {name: x for name, x in operands.items() if of_keys_alone(name)}
    staying = {name: x for name, x in operands.items() if name not in travelling}
    visiting = (key, value, travelling)
    parts = []
    for step in range(call.devices):
        if step + 1 < call.devices:
            following = passed_on(call, visiting)  # sent before the kernel that hides it
        options, of_step = of_source(call, step, query, {**staying, **visiting[2]})
        parts.append(call.attend(options, None, query, visiting[0], visiting[1], of_step))
        if step + 1 < call.devices:
            visiting = following
    return merged(parts, query)


def passed_on(call: Call, visiting: tuple[jax.Array, jax.Array, Arrays]) -> tuple[jax.Array, jax.Array, Arrays]:
    """What the next device of the ring has been sent: after each step a device has the shard of the one before."""
    to_next = [(i, (i + 1) % call.devices) for i in range(call.devices)]
    sent: tuple[jax.Array, jax.Array, Arrays] = jax.tree.map(
        lambda x: jax.lax.ppermute(x, call.axis, to_next), visiting
    )
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


def merged(parts: Sequence[tuple[jax.Array, jax.Array]], query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out and lse of softmaxes over different keys, joined in the accumulation dtype."""
    lses = jnp.stack([lse for _, lse in parts])
    most = jax.lax.stop_gradient(lses.max(axis=0))
    finite = jnp.where(jnp.isfinite(most), most, 0)
    weights = jnp.exp(lses - finite)
    total = weights.sum(axis=0)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, finite + jnp.log(jnp.where(empty, 1, total)))
    shares = weights / jnp.where(empty, 1, total)
    out = sum(
        jnp.swapaxes(share, 1, 2)[..., None] * out.astype(wide(query))
        for share, (out, _) in zip(shares, parts, strict=True)
    )
    return jnp.asarray(out).astype(query.dtype), lse
