"""A model written with jax.nn.dot_product_attention, which stays as it is: `jax_flash.patch_jax_nn` serves its calls.

python examples/integrations/with_jax_nn.py
"""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import jax_flash
from copy_task import loss_of, steps_of, train
from with_plain_jax import Parameters, init


def model(parameters: Parameters, tokens: jax.Array) -> jax.Array:
    x = parameters["embedding"][tokens] + parameters["positions"]
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, parameters["qkv"])
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("btnh,nhd->btd", attended, parameters["out"])
    return x @ parameters["logits"]


def main(arguments: Sequence[str] | None = None) -> float:
    steps = steps_of(arguments, __doc__)
    with jax_flash.patch_jax_nn() as patch:
        parameters = init(jax.random.key(1))
        _, loss = train(lambda p, tokens, wanted: loss_of(model(p, tokens), wanted), parameters, steps)
    print(patch)
    return loss


if __name__ == "__main__":
    main()
    sys.exit(0)
