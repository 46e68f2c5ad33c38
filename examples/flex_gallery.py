"""Masks and scores as functions: seventeen kinds of attention by jax_flash's score_mod, mask_mod and block_mask.

    python examples/flex_gallery.py                  # all, on this machine's device
    python examples/flex_gallery.py --only relative_bias --length 512

Each is a function of the arrays that it captures, which are trained where that makes sense. The program compares out
and all gradients with dense attention in float64 and prints a line for each.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash import flex

Arrays = Mapping[str, jax.Array]
Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]  # score_mod, mask_mod


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    length: int


@dataclasses.dataclass(frozen=True)
class Example:
    """One kind of attention.

    ``arrays(random, sizes)`` are the arrays that its functions capture, of which the floating ones are trained;
    ``mods(arrays, sizes)`` are the functions.
    """

    mods: Callable[[Arrays, Sizes], Mods]
    arrays: Callable[[np.random.Generator, Sizes], dict[str, Any]] = lambda random, sizes: {}


GALLERY: dict[str, Example] = {}


def example(
    arrays: Callable[..., Any] = lambda random, sizes: {},
) -> Callable[[Callable[..., Mods]], Callable[..., Mods]]:
    def add(mods: Callable[..., Mods]) -> Callable[..., Mods]:
        GALLERY[mods.__name__] = Example(mods, arrays)
        return mods

    return add


# ---- Masks


@example()
def causal(arrays: Arrays, sizes: Sizes) -> Mods:
    return None, lambda b, h, q, kv: q >= kv


@example()
def sliding_window(arrays: Arrays, sizes: Sizes) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv < 32)


@example()
def dilated_window(arrays: Arrays, sizes: Sizes) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv < 64) & ((q - kv) % 3 == 0)


@example()
def global_and_window(arrays: Arrays, sizes: Sizes) -> Mods:
    """The first four keys are seen by all rows, as are attention sinks."""
    window = flex.and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < 16)
    return None, flex.or_masks(window, lambda b, h, q, kv: (kv < 4) & (q >= kv))


@example(lambda random, sizes: {"prefix": random.integers(1, sizes.length, sizes.batch).astype(np.int32)})
def prefix_lm(arrays: Arrays, sizes: Sizes) -> Mods:
    prefix = arrays["prefix"]
    return None, lambda b, h, q, kv: (q >= kv) | (kv < prefix[b])


@example(lambda random, sizes: {"ids": np.sort(random.integers(0, 4, (sizes.batch, sizes.length))).astype(np.int32)})
def packed_sequences(arrays: Arrays, sizes: Sizes) -> Mods:
    ids = arrays["ids"]
    return None, lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv)


@example(lambda random, sizes: {"answer": np.sort(random.integers(0, 4, (sizes.batch, sizes.length))).astype(np.int32)})
def shared_prefix(arrays: Arrays, sizes: Sizes) -> Mods:
    """Several answers to one question: rows of answer 0, the question, are seen by all."""
    answer = arrays["answer"]
    return None, lambda b, h, q, kv: (q >= kv) & ((answer[b, kv] == 0) | (answer[b, q] == answer[b, kv]))


@example()
def block_diffusion(arrays: Arrays, sizes: Sizes) -> Mods:
    """A sequence twice, noisy and clean: a noisy block sees itself and the clean blocks before it."""
    half, block = sizes.length // 2, 16

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_clean, kv_clean = q >= half, kv >= half
        q_block = jnp.where(q_clean, q - half, q) // block
        kv_block = jnp.where(kv_clean, kv - half, kv) // block
        own = (q_clean == kv_clean) & (q_block == kv_block)
        earlier = kv_clean & ~q_clean & (q_block > kv_block)
        among_clean = kv_clean & q_clean & (q_block >= kv_block)
        return own | earlier | among_clean

    return None, mask_mod


def _tree(random: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    ancestors = np.eye(sizes.length, dtype=bool)
    for node in range(1, sizes.length):
        parent = int(random.integers(max(0, node - 8), node))
        ancestors[node] |= ancestors[parent]
    return {"ancestors": ancestors}


@example(_tree)
def tree_of_drafts(arrays: Arrays, sizes: Sizes) -> Mods:
    """Speculative decoding: a token sees its ancestors in the tree of drafts."""
    ancestors = arrays["ancestors"]
    return None, lambda b, h, q, kv: ancestors[q, kv]


def _side(sizes: Sizes) -> int:
    return max(1, int(sizes.length**0.5))


@example()
def neighbourhood(arrays: Arrays, sizes: Sizes) -> Mods:
    """Neighbourhood attention of an image: a window of 5 x 5 around a pixel, moved inwards at the borders."""
    side, reach = _side(sizes), min(2, (_side(sizes) - 1) // 2)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept = (q < side * side) & (kv < side * side)
        for of_q, of_kv in ((q // side, kv // side), (q % side, kv % side)):
            kept = kept & (jnp.abs(jnp.clip(of_q, reach, side - 1 - reach) - of_kv) <= reach)
        return kept

    return None, mask_mod


@example()
def sliding_tile(arrays: Arrays, sizes: Sizes) -> Mods:
    """The same by whole tiles of 4 x 4 pixels."""
    side, tile = _side(sizes), 4

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        rows = jnp.abs(q // side // tile - kv // side // tile)
        columns = jnp.abs(q % side // tile - kv % side // tile)
        return (rows <= 1) & (columns <= 1)

    return None, mask_mod


# ---- Scores


@example(lambda random, sizes: {"slopes": (2.0 ** -np.arange(1, sizes.heads + 1))})
def alibi(arrays: Arrays, sizes: Sizes) -> Mods:
    slopes = arrays["slopes"]
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q).astype(score.dtype), lambda b, h, q, kv: q >= kv


@example()
def tanh_softcap(arrays: Arrays, sizes: Sizes) -> Mods:
    return lambda score, b, h, q, kv: 5.0 * jnp.tanh(score / 5.0), None


@example(lambda random, sizes: {"table": random.normal(size=(sizes.heads, 2 * sizes.length))})
def relative_bias(arrays: Arrays, sizes: Sizes) -> Mods:
    table, length = arrays["table"], sizes.length
    return lambda score, b, h, q, kv: score + table[h, q - kv + length], None


@example(lambda random, sizes: {"table": random.normal(size=(32, sizes.heads))})
def t5_buckets(arrays: Arrays, sizes: Sizes) -> Mods:
    """T5's relative bias: near distances have a bucket each, far ones share buckets whose widths grow, up to 128."""
    table = arrays["table"]

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        apart = jnp.abs(q - kv)
        # A little more, so that no bucket is a matter of rounding.
        far = jnp.log(jnp.maximum(apart, 1).astype(jnp.float32) / 8) * (8 / np.float32(np.log(16))) + np.float32(1e-3)
        bucket = jnp.where(apart < 8, apart, jnp.minimum(8 + far.astype(jnp.int32), 15))
        return score + table[bucket + 16 * (kv > q).astype(jnp.int32), h]

    return score_mod, None


def _graph(random: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    distances = random.integers(0, 8, (sizes.batch, sizes.length, sizes.length)).astype(np.int32)
    return {"distances": distances, "bias": random.normal(size=(sizes.heads, 8)), "centrality": random.normal(size=8)}


@example(_graph)
def graphormer(arrays: Arrays, sizes: Sizes) -> Mods:
    """A bias for the distance of two nodes, and a factor for it."""
    distances, bias, centrality = (arrays[name] for name in ("distances", "bias", "centrality"))

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = distances[b, q, kv]
        return score * jax.nn.sigmoid(centrality[distance]) + bias[h, distance]

    return score_mod, None


@example(lambda random, sizes: {"reach": 16.0 + random.normal(size=sizes.heads)})
def sigmoid_distance(arrays: Arrays, sizes: Sizes) -> Mods:
    """Scores that a sigmoid of the distance weighs down."""
    reach = arrays["reach"]

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = jnp.abs(q - kv).astype(score.dtype)
        return score - 4.0 * jax.nn.sigmoid(distance - reach[h])

    return score_mod, None


# ---- Comparison


def draw(name: str, sizes: Sizes, seed: int = 0, dtype: Any = np.float32) -> dict[str, jax.Array]:
    """The captured arrays of an example; floats in ``dtype``."""
    found = GALLERY[name].arrays(np.random.default_rng(seed), sizes)
    return {k: jnp.asarray(x.astype(dtype) if x.dtype.kind == "f" else x) for k, x in found.items()}


def attend(
    name: str, sizes: Sizes, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays, **options: Any
) -> jax.Array:
    """An example by jax_flash, with a block mask where it has a mask."""
    score_mod, mask_mod = GALLERY[name].mods(arrays, sizes)
    block_mask = None
    if mask_mod is not None:
        of_batch = sizes.batch if any(x.ndim and x.shape[0] == sizes.batch for x in arrays.values()) else None
        block_mask = flex.create_block_mask(mask_mod, of_batch, None, sizes.length, sizes.length, block_size=32)
    out: jax.Array = jax_flash.attention(query, key, value, score_mod=score_mod, block_mask=block_mask, **options)
    return out


def dense(name: str, sizes: Sizes, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays) -> jax.Array:
    """The same with arrays of all pairs, and nothing of jax_flash."""
    score_mod, mask_mod = GALLERY[name].mods(arrays, sizes)
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * query.shape[-1] ** -0.5
    indices = [jnp.arange(n, dtype=jnp.int32) for n in scores.shape]
    if score_mod is not None:
        scores = _over_all(score_mod)(scores, *indices)
    if mask_mod is not None:
        kept = _over_all(lambda _, *of_pair: mask_mod(*of_pair))(scores, *indices)
        scores = jnp.where(kept, scores, -jnp.inf)
    # A row that keeps no key gives zeros.
    some = jnp.isfinite(scores).any(axis=-1, keepdims=True)
    weights = jnp.where(some, jax.nn.softmax(jnp.where(some, scores, 0.0), axis=-1), 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")


def _over_all(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    for axis in range(4):  # from keys to batch entries
        in_axes: list[int | None] = [0, *(0 if axis == 3 - i else None for i in range(4))]
        f = jax.vmap(f, in_axes)
    return f


def gradients_of(attend: Callable[..., jax.Array], dout: jax.Array, inputs: Any, arrays: dict[str, Any]) -> Any:
    """out, and the gradients of inputs and floating arrays."""
    trained = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    fixed = {k: x for k, x in arrays.items() if k not in trained}
    out, pullback = jax.vjp(lambda inputs, trained: attend(*inputs, fixed | trained), inputs, trained)
    return out, *pullback(dout)


def run(name: str, length: int) -> str:
    """A line on an example: what serves it, its largest errors, and how long out and all gradients take."""
    sizes = Sizes(batch=2, heads=4, length=length)
    random = np.random.default_rng(0)
    *exact, exact_dout = (jnp.asarray(random.standard_normal((2, length, n, 32))) for n in (4, 2, 2, 4))
    arrays = draw(name, sizes, dtype=np.float64)
    narrow = {k: x.astype(jnp.float32) if x.dtype == jnp.float64 else x for k, x in arrays.items()}
    inputs = [x.astype(jnp.float32) for x in exact]
    ours = jax.jit(functools.partial(gradients_of, functools.partial(attend, name, sizes)))
    args = exact_dout.astype(jnp.float32), inputs, narrow
    found = jax.block_until_ready(ours(*args))
    began = time.perf_counter()
    jax.block_until_ready(ours(*args))
    took = 1e3 * (time.perf_counter() - began)
    wanted = gradients_of(functools.partial(dense, name, sizes), exact_dout, exact, arrays)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    errors = [float(np.abs(np.asarray(x, np.float64) - np.asarray(y)).max()) for x, y in pairs]
    score_mod, mask_mod = GALLERY[name].mods(narrow, sizes)
    served = jax_flash.explain(*inputs, score_mod=score_mod, mask_mod=mask_mod).implementation
    return f"{name:<20}{served:<12}{errors[0]:>14.1e}{max(errors[1:]):>14.1e}{took:>8.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(GALLERY), action="append", help="an example (default: all)")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="rows and keys (default: 256)")
    args = parser.parse_args(arguments)
    if args.length < 16:
        parser.error(f"--length must be at least 16, got {args.length}")
    print(f"{'example':<20}{'served by':<12}{'error of out':>14}{'of gradients':>14}{'ms':>8}")
    with jax.enable_x64(True):
        for name in args.only or GALLERY:
            print(run(name, args.length))


if __name__ == "__main__":
    main()
