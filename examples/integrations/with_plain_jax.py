"""Attention in plain JAX: a function of arrays, called where the scores would be.

python examples/integrations/with_plain_jax.py
"""

import sys
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

import jax_flash
from copy_task import HEADS, LENGTH, VOCABULARY, WIDTH, loss_of, steps_of, train

Parameters = Mapping[str, jax.Array]


def init(key: jax.Array) -> Parameters:
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "positions": (LENGTH, WIDTH),
        "qkv": (3, WIDTH, HEADS, WIDTH // HEADS),
        "out": (HEADS, WIDTH // HEADS, WIDTH),
        "logits": (WIDTH, VOCABULARY),
    }
    keys = jax.random.split(key, len(shapes))
    scales = {"embedding": 1.0, "positions": 1.0}
    return {
        name: scales.get(name, WIDTH**-0.5) * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def model(parameters: Parameters, tokens: jax.Array) -> jax.Array:
    x = parameters["embedding"][tokens] + parameters["positions"]
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, parameters["qkv"])  # [B, T, N, H] each
    attended = jax_flash.attention(q, k, v, causal=True)
    x = x + jnp.einsum("btnh,nhd->btd", attended, parameters["out"])
    return x @ parameters["logits"]


def main(arguments: Sequence[str] | None = None) -> float:
    steps = steps_of(arguments, __doc__)
    _, loss = train(lambda p, tokens, wanted: loss_of(model(p, tokens), wanted), init(jax.random.key(1)), steps)
    return loss


if __name__ == "__main__":
    main()
    sys.exit(0)
