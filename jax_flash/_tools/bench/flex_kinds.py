"""The masks and scores that ``bench flex`` measures, as functions that both JAX and PyTorch can trace.

They are those of examples/flex_gallery.py, at the sizes that models have.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_flash._tools.bench.race import Cell

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]  # score_mod, mask_mod


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of attention."""

    mods: Callable[[types.SimpleNamespace, Mapping[str, Any], Cell], Mods]
    """The functions, by an array library's operations, the arrays that they read, and the cell."""
    arrays: Callable[[np.random.Generator, Cell], dict[str, np.ndarray]] = lambda random, cell: {}
    """What they read; arrays of floats are trained."""
    option: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Built-in options that compute the same, if there are any."""
    every_shape: bool = False
    """Whether it is measured at every shape, or at the first alone."""


KINDS: dict[str, Kind] = {}


def kind(**fields: Any) -> Callable[[Callable[..., Mods]], Callable[..., Mods]]:
    def add(mods: Callable[..., Mods]) -> Callable[..., Mods]:
        KINDS[mods.__name__] = Kind(mods, **fields)
        return mods

    return add


# Masks


@kind(option=lambda arrays: {"causal": True}, every_shape=True)
def causal(xp: Any, arrays: Any, cell: Cell) -> Mods:
    return None, lambda b, h, q, kv: q >= kv


@kind(option=lambda arrays: {"causal": True, "window": (1023, 0)}, every_shape=True)
def window(xp: Any, arrays: Any, cell: Cell) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv < 1024)


def _ids(random: np.random.Generator, cell: Cell) -> np.ndarray:
    """Eight sequences in every batch entry, with ends anywhere."""
    return np.sort(random.integers(0, 8, (cell.batch, cell.length))).astype(np.int32)


@kind(
    arrays=lambda random, cell: {"ids": _ids(random, cell)},
    option=lambda arrays: {"causal": True, "q_segment_ids": arrays["ids"], "kv_segment_ids": arrays["ids"]},
    every_shape=True,
)
def packed(xp: Any, arrays: Any, cell: Cell) -> Mods:
    ids = arrays["ids"]
    return None, lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv)


@kind(every_shape=True)
def neighbourhood(xp: Any, arrays: Any, cell: Cell) -> Mods:
    """A window of 13 x 13 around a pixel of a square image, moved inwards at the borders."""
    side, reach = math.isqrt(cell.length), 6

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        rows = abs(xp.clip(q // side, reach, side - 1 - reach) - kv // side) <= reach
        return rows & (abs(xp.clip(q % side, reach, side - 1 - reach) - kv % side) <= reach)

    return None, mask_mod


@kind()
def dilated_window(xp: Any, arrays: Any, cell: Cell) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv < 2048) & ((q - kv) % 2 == 0)


@kind()
def global_and_window(xp: Any, arrays: Any, cell: Cell) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) & ((kv < 64) | (q - kv < 1024))


@kind(arrays=lambda random, cell: {"prefix": random.integers(1, cell.length, cell.batch).astype(np.int32)})
def prefix_lm(xp: Any, arrays: Any, cell: Cell) -> Mods:
    prefix = arrays["prefix"]
    return None, lambda b, h, q, kv: (q >= kv) | (kv < prefix[b])


@kind(arrays=lambda random, cell: {"answer": _ids(random, cell)})
def shared_prefix(xp: Any, arrays: Any, cell: Cell) -> Mods:
    answer = arrays["answer"]
    return None, lambda b, h, q, kv: (q >= kv) & ((answer[b, kv] == 0) | (answer[b, q] == answer[b, kv]))


@kind()
def block_diffusion(xp: Any, arrays: Any, cell: Cell) -> Mods:
    half, size = cell.length // 2, 64

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_clean, kv_clean = q >= half, kv >= half
        q_block, kv_block = (q % half) // size, (kv % half) // size
        own = (q_clean == kv_clean) & (q_block == kv_block)
        return own | (kv_clean & (q_block > kv_block))

    return None, mask_mod


def _ancestors(random: np.random.Generator, cell: Cell) -> dict[str, np.ndarray]:
    found = np.eye(cell.length, dtype=bool)
    for node in range(1, cell.length):
        found[node] |= found[random.integers(max(0, node - 8), node)]
    return {"ancestors": found}


@kind(arrays=_ancestors)
def tree_of_drafts(xp: Any, arrays: Any, cell: Cell) -> Mods:
    ancestors = arrays["ancestors"]
    return None, lambda b, h, q, kv: ancestors[q, kv]


@kind()
def sliding_tile(xp: Any, arrays: Any, cell: Cell) -> Mods:
    """Tiles of 8 x 8 pixels, whose pixels are neighbours in memory, see the tiles around them."""
    side = math.isqrt(cell.length) // 8

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_tile, kv_tile = q // 64, kv // 64
        return (abs(q_tile // side - kv_tile // side) <= 1) & (abs(q_tile % side - kv_tile % side) <= 1)

    return None, mask_mod


# Scores


@kind(
    arrays=lambda random, cell: {"slopes": 2.0 ** (-8 * np.arange(1, cell.heads + 1) / cell.heads)},
    option=lambda arrays: {"causal": True, "alibi_slopes": arrays["slopes"]},
    every_shape=True,
)
def alibi(xp: Any, arrays: Any, cell: Cell) -> Mods:
    slopes = arrays["slopes"]
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q), lambda b, h, q, kv: q >= kv


@kind(option=lambda arrays: {"softcap": 20.0}, every_shape=True)
def softcap(xp: Any, arrays: Any, cell: Cell) -> Mods:
    return lambda score, b, h, q, kv: 20.0 * xp.tanh(score / 20.0), None


@kind(arrays=lambda random, cell: {"table": random.normal(size=(cell.heads, 2 * cell.length))}, every_shape=True)
def relative_bias(xp: Any, arrays: Any, cell: Cell) -> Mods:
    table, length = arrays["table"], cell.length
    return lambda score, b, h, q, kv: score + table[h, q - kv + length], None


@kind(arrays=lambda random, cell: {"table": random.normal(size=(32, cell.heads))})
def t5_buckets(xp: Any, arrays: Any, cell: Cell) -> Mods:
    table = arrays["table"]

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        apart = abs(q - kv)
        far = xp.integer(xp.log(xp.clip(apart, 1, None) / 8.0) * (8.0 / math.log(16.0)) + 1e-3)
        return score + table[xp.where(apart < 8, apart, xp.clip(8 + far, 0, 15)) + 16 * xp.integer(kv > q), h]

    return score_mod, None


def _graph(random: np.random.Generator, cell: Cell) -> dict[str, np.ndarray]:
    distances = random.integers(0, 8, (cell.batch, cell.length, cell.length)).astype(np.int32)
    return {"distances": distances, "bias": random.normal(size=(cell.heads, 8)), "centrality": random.normal(size=8)}


@kind(arrays=_graph)
def graphormer(xp: Any, arrays: Any, cell: Cell) -> Mods:
    distances, bias, centrality = (arrays[name] for name in ("distances", "bias", "centrality"))

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = distances[b, q, kv]
        return score * xp.sigmoid(centrality[distance]) + bias[h, distance]

    return score_mod, None


@kind(arrays=lambda random, cell: {"reach": 128 + random.normal(size=cell.heads)})
def sigmoid_distance(xp: Any, arrays: Any, cell: Cell) -> Mods:
    reach = arrays["reach"]
    return lambda score, b, h, q, kv: score - 4.0 * xp.sigmoid(abs(q - kv) - reach[h]), None
