"""Flax nnx: the attention of nnx.MultiHeadAttention by its argument attention_fn.

python examples/integrations/with_flax_nnx.py
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash.flax
from copy_task import HEADS, LENGTH, VOCABULARY, WIDTH, loss_of, steps_of, train


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            decode=False,
            # `causal` is bound here, for Flax's modules pass what they have names for in every call.
            attention_fn=functools.partial(jax_flash.flax.attention_fn, causal=True),
            rngs=rngs,
        )
        self.logits = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))
        return self.logits(x + self.attention(x))


def main(arguments: Sequence[str] | None = None) -> float:
    steps = steps_of(arguments, __doc__)
    graph, parameters = nnx.split(Model(nnx.Rngs(1)))

    def loss(parameters: Any, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
        return loss_of(nnx.merge(graph, parameters)(tokens), wanted)

    return train(loss, parameters, steps)[1]


if __name__ == "__main__":
    main()
    sys.exit(0)
