"""The task that the other files of this folder train: every token is the one `DISTANCE` before it.

Only attention can look there, so a model that learns it has working attention, gradients too.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

VOCABULARY, LENGTH, BATCH, WIDTH, HEADS, DISTANCE = 16, 32, 32, 64, 4, 3


def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [BATCH, LENGTH] and what a model should say at each position."""
    tokens = jax.random.randint(key, (BATCH, LENGTH), 0, VOCABULARY)
    return tokens, jnp.roll(tokens, DISTANCE, axis=1)


def loss_of(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    """Nats a token, where there is a token `DISTANCE` before; log(VOCABULARY) = 2.77 is knowing nothing."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), wanted)
    return losses[:, DISTANCE:].mean()


def train(loss: Callable[[Any, jax.Array, jax.Array], jax.Array], parameters: Any, steps: int) -> tuple[Any, float]:
    """Adam over a pytree of parameters. Returns these and the last loss, which it prints now and then."""
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(parameters: Any, state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch(key))
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    state = optimizer.init(parameters)
    value = jnp.inf
    for number, key in enumerate(jax.random.split(jax.random.key(0), steps)):
        parameters, state, value = step(parameters, state, key)
        if number % 50 == 0 or number == steps - 1:
            print(f"step {number:4d}: loss {value:.3f}")
    return parameters, float(value)


def steps_of(arguments: Sequence[str] | None, text: str | None) -> int:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of training (default 200)")
    return int(parser.parse_args(arguments).steps)
