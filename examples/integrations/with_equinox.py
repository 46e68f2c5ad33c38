"""Equinox: `with_flash` has the eqx.nn.MultiheadAttention layers of a model computed by jax_flash.

    python examples/integrations/with_equinox.py

Equinox's layer has no argument for its attention, so a layer is wrapped: the wrapper has its parameters and takes its
arguments.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import jax_flash
from copy_task import HEADS, LENGTH, VOCABULARY, WIDTH, loss_of, steps_of, train

Heads = tuple[jax.Array, jax.Array, jax.Array]


class FlashAttention(eqx.Module):
    """An eqx.nn.MultiheadAttention, its parameters and its arguments, whose attention is jax_flash's.

    ``causal`` and ``window`` are those of `jax_flash.attention`: they need no mask.
    """

    layer: eqx.nn.MultiheadAttention
    causal: bool = eqx.field(static=True, default=False)
    window: tuple[int, int] | None = eqx.field(static=True, default=None)

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        process_heads: Callable[[jax.Array, jax.Array, jax.Array], Heads] | None = None,
    ) -> jax.Array:
        projections = (self.layer.query_proj, query), (self.layer.key_proj, key_), (self.layer.value_proj, value)
        q, k, v = (jax.vmap(p)(x).reshape(x.shape[0], self.layer.num_heads, -1) for p, x in projections)
        if process_heads is not None:
            q, k, v = process_heads(q, k, v)
        drops = not (self.layer.dropout.inference if inference is None else inference)
        rate = float(self.layer.dropout.p) if drops else 0.0
        if rate and key is None:
            raise ValueError(f"key must be a JAX key if dropout is {rate} outside of inference, got None")
        out = jax_flash.attention(
            q,  # [T, N, H]
            k,
            v,
            mask=mask,  # [T, S] or [N, T, S], as Equinox has it
            causal=self.causal,
            window=self.window,
            dropout_rate=rate,
            dropout_key=key if rate else None,
        )
        projected: jax.Array = jax.vmap(self.layer.output_proj)(out.reshape(query.shape[0], -1))
        return projected


def with_flash(model: Any, **options: Any) -> Any:
    """``model`` with a `FlashAttention` around each of its eqx.nn.MultiheadAttention."""

    def is_layer(x: Any) -> bool:
        return isinstance(x, eqx.nn.MultiheadAttention)

    return jax.tree.map(lambda x: FlashAttention(x, **options) if is_layer(x) else x, model, is_leaf=is_layer)


class Model(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    attention: Any
    logits: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.positions = eqx.nn.Embedding(LENGTH, WIDTH, key=keys[1])
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[2])
        self.logits = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[3])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Of one sequence: Equinox's layers have no batch dimension, `jax.vmap` adds it."""
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(jnp.arange(LENGTH))
        return jax.vmap(self.logits)(x + self.attention(x, x, x))


def main(arguments: Sequence[str] | None = None) -> float:
    steps = steps_of(arguments, __doc__)
    model = with_flash(Model(jax.random.key(1)), causal=True)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters: Any, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
        return loss_of(jax.vmap(eqx.combine(parameters, rest))(tokens), wanted)

    return train(loss, parameters, steps)[1]


if __name__ == "__main__":
    main()
    sys.exit(0)
