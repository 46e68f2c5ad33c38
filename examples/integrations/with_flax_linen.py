"""Flax Linen: the attention of linen.MultiHeadDotProductAttention by its argument attention_fn.

python examples/integrations/with_flax_linen.py
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jax_flash.flax
from copy_task import HEADS, LENGTH, VOCABULARY, WIDTH, loss_of, steps_of, train


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        attended: jax.Array = nn.MultiHeadDotProductAttention(
            HEADS,
            # `causal` is bound here, for Flax's modules pass what they have names for in every call.
            attention_fn=functools.partial(jax_flash.flax.attention_fn, causal=True),
        )(x)
        logits: jax.Array = nn.Dense(VOCABULARY)(x + attended)
        return logits


def main(arguments: Sequence[str] | None = None) -> float:
    steps = steps_of(arguments, __doc__)
    model = Model()
    parameters = model.init(jax.random.key(1), jnp.zeros((1, LENGTH), jnp.int32))

    def loss(parameters: Any, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
        return loss_of(jnp.asarray(model.apply(parameters, tokens)), wanted)

    return train(loss, parameters, steps)[1]


if __name__ == "__main__":
    main()
    sys.exit(0)
