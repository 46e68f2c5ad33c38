"""Score and mask functions as users write them, with the arrays that they capture."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._functions import cuda, trace


def functions(batch: int = 2, heads: int = 4, length: int = 333) -> tuple[dict[str, Callable[..., Any]], ...]:
    """Mask functions, and score functions, by name; for positions below ``length``."""
    random = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(random.integers(0, 5, (batch, length))), jnp.int32)
    prefix = jnp.asarray(random.integers(1, length, batch), jnp.int32)
    shared = jnp.asarray(random.integers(0, 3, length), jnp.int8)
    ancestors = jnp.asarray(random.random((length, length)) < 0.3)
    slopes = jnp.asarray(2.0 ** -np.arange(1, heads + 1), jnp.float32)
    relative = jnp.asarray(random.standard_normal((heads, 2 * length)), jnp.float32)
    table = jnp.asarray(random.standard_normal((heads, 16)), jnp.bfloat16)
    distances = jnp.asarray(random.integers(0, 16, (length, length)), jnp.int8)
    caps = jnp.asarray(1 + random.random(heads), jnp.float32)
    of_rows, of_keys = (jnp.asarray(random.random(length), jnp.float32) for _ in range(2))
    factor = jnp.asarray(0.5, jnp.float16)
    # Last, so that what the others draw, and with it the errors that tests bound, stays as it was.
    drafts = jnp.asarray(random.random((length, 150)) < 0.3)  # of an even number of keys, fewer than there are
    steps = jnp.asarray(random.standard_normal((8, 150)), jnp.bfloat16)
    kinds = jnp.asarray(random.integers(0, 4, length), jnp.int32)  # one more than the table has
    relations = jnp.asarray(1 + random.random((3, 2, 5)), jnp.float32)
    buckets = jnp.asarray(random.standard_normal((32, heads)), jnp.float32)
    weights = jnp.asarray(random.standard_normal((heads, 11)), jnp.float32)
    width, radius = 16, 3

    def causal(b, h, q, kv):
        return q >= kv

    def prefix_lm(b, h, q, kv):
        return (q >= kv) | (kv < prefix[b])

    def block_diffusion(b, h, q, kv):
        half, size = length // 2, 16
        block_q, block_kv = (q % half) // size, (kv % half) // size
        noisy_q, noisy_kv = q < half, kv < half
        clean = jnp.where(noisy_q, block_q > block_kv, block_q >= block_kv)
        return jnp.where(noisy_kv, noisy_q & (block_q == block_kv), clean)

    def neighbourhood(b, h, q, kv):
        return (abs(q // width - kv // width) <= radius) & (abs(q % width - kv % width) <= radius)

    def sliding_tile(b, h, q, kv):
        tile_q, tile_kv = q // width // 4, kv // width // 4
        centre = jnp.clip(tile_q, 1, length // width // 4 - 1)
        return jnp.abs(centre - tile_kv) <= 1

    masks = {
        "causal": causal,
        "window": lambda b, h, q, kv: jnp.abs(q - kv) < 40,
        "dilated": lambda b, h, q, kv: ((q - kv) % 3 == 0) & (q >= kv),
        "global": lambda b, h, q, kv: (kv < 7) | ((q - kv < 50) & (kv <= q)),
        "prefix_lm": prefix_lm,
        "sequences": lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv),
        "shared_prefix": lambda b, h, q, kv: (q >= kv) & ((shared[kv] == 0) | (shared[q] == shared[kv])),
        "block_diffusion": block_diffusion,
        "tree": lambda b, h, q, kv: ancestors[q, kv] | (q == kv),
        "drafts": lambda b, h, q, kv: drafts[q, kv],
        "neighbourhood": neighbourhood,
        "sliding_tile": sliding_tile,
        "heads": lambda b, h, q, kv: (h % 2 == 0) | (q >= kv),
        "points": lambda b, h, q, kv: jnp.max(jnp.abs(POINTS[q] - POINTS[kv])) < 1.5,
    }

    def distance(score, q, kv):
        return jnp.abs(q - kv).astype(score.dtype)

    def bucket(q, kv):
        """T5's, of both directions."""
        apart = jnp.abs(q - kv)
        far = 8 + (jnp.log(jnp.maximum(apart, 1).astype(jnp.float32) / 8) / math.log(16) * 8).astype(jnp.int32)
        return jnp.where(kv > q, 16, 0) + jnp.where(apart < 8, apart, jnp.minimum(far, 15))

    scores = {
        "alibi": lambda score, b, h, q, kv: score - slopes[h].astype(score.dtype) * distance(score, q, kv),
        "softcap": lambda score, b, h, q, kv: 2 * jnp.tanh(score / 2),
        "relative": lambda score, b, h, q, kv: score + relative[h, q - kv + length].astype(score.dtype),
        "relative_chained": lambda score, b, h, q, kv: score + relative[h][q - kv + length].astype(score.dtype),
        "graphormer": lambda score, b, h, q, kv: score + table[h, distances[q, kv]].astype(score.dtype),
        "buckets": lambda score, b, h, q, kv: score + buckets[bucket(q, kv), h].astype(score.dtype),
        "weights": lambda score, b, h, q, kv: (
            score
            + sum(weights[h, i].astype(score.dtype) * ((q * i + kv) % 5).astype(score.dtype) for i in range(11)) / 8
        ),
        "relations": lambda score, b, h, q, kv: (
            score * relations.at[kinds[q], h % 2, kinds[kv]].get(mode="fill", fill_value=0.5).astype(score.dtype)
        ),
        "steps": lambda score, b, h, q, kv: score + steps[q % 8, kv].astype(score.dtype),
        "sigmoid_distance": lambda score, b, h, q, kv: score * jax.nn.sigmoid(2 - distance(score, q, kv) / 32),
        "masked": lambda score, b, h, q, kv: jnp.where(q >= kv, score, -jnp.inf),
        "nan_above": lambda score, b, h, q, kv: score + jnp.sqrt((q - kv).astype(score.dtype)) * jnp.sin(score),
        "filled": lambda score, b, h, q, kv: (
            score + slopes.at[kv % 5].get(mode="fill", fill_value=0.0).astype(score.dtype) * 3
        ),
        "capped": lambda score, b, h, q, kv: (
            jnp.tanh(score / caps[h].astype(score.dtype)) * caps[h].astype(score.dtype)
        ),
        "sides": lambda score, b, h, q, kv: (
            score * of_rows[q].astype(score.dtype)
            + jnp.square(score) * 0.1 * factor.astype(score.dtype)
            + of_keys[kv].astype(score.dtype)
        ),
        "exponents": lambda score, b, h, q, kv: (
            score + jnp.log1p(jnp.exp(score)) * 0.1 + ((q % 7) ** 2).astype(score.dtype) * 0.01
        ),
    }
    return masks, scores


def source(
    score: str | None = None,
    mask: str | None = None,
    partial: str | None = None,
    *,
    derives: bool = False,
    lengths: Mapping[str, int] = types.MappingProxyType({}),
) -> str:
    """What CUDA's kernels are compiled with for functions of these names, with all gradients where they are derived;
    ``partial`` decides in partial blocks of 128 x 128. Arrays are of 333 rows or keys."""
    masks, scores = functions()
    captured = trace.Captured()

    def of(kind: str, f: Callable[..., Any] | None) -> trace.Function | None:
        return None if f is None else trace.trace(kind, f, kind, jnp.float32, captured)

    own, of_all = of("score", scores.get(score or "")), of("mask", masks.get(mask or ""))
    of_partial = of("mask", masks.get(partial or ""))
    size = (128, 128) if partial else (1, 1)
    found = trace.Functions(own, () if of_all is None else (of_all,), of_partial, block_size=size)
    read = own.captured if own is not None and derives else ()
    gradients = [i for i in read if jnp.issubdtype(captured.arrays[i].dtype, jnp.floating)]
    return cuda.source(found, derives=derives, gradients=gradients, positions_from_0=True, lengths=lengths)


POINTS = jnp.asarray(np.random.default_rng(1).standard_normal((333, 2)), jnp.float32)
