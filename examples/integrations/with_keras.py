"""Keras 3 on JAX, in two ways: Keras's own layers under a patch, and a layer of one's own.

    python examples/integrations/with_keras.py           # keras.layers.MultiHeadAttention, patched
    python examples/integrations/with_keras.py --layer   # the layer of this file

keras.layers.MultiHeadAttention calls jax.nn.dot_product_attention, so that `jax_flash.patch_jax_nn` serves it. The
layer of this file has what Keras's layers lack or compute otherwise: fewer key heads without copies, windows, and
dropout inside of the attention.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np

import jax_flash
from copy_task import DISTANCE, HEADS, LENGTH, VOCABULARY, WIDTH, batch, steps_of


@keras.saving.register_keras_serializable(package="jax_flash")
# Keras has no types, and mypy refuses to look at subclasses of what has none.
class FlashAttention(keras.layers.Layer):  # type: ignore[misc]
    """Self attention by `jax_flash.attention`: grouped query heads, causal, a window, dropout of the weights."""

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_heads, self.key_dim, self.num_kv_heads = num_heads, key_dim, num_kv_heads or num_heads
        self.causal, self.window, self.dropout = causal, window, dropout
        self.seed_generator = keras.random.SeedGenerator()

    def build(self, shape: tuple[int | None, ...]) -> None:
        def dense(equation: str, *sizes: int) -> Any:
            return keras.layers.EinsumDense(equation, (None, *sizes), dtype=self.dtype_policy)

        self.query = dense("btd,dnh->btnh", self.num_heads, self.key_dim)
        self.key = dense("btd,dkh->btkh", self.num_kv_heads, self.key_dim)
        self.value = dense("btd,dkh->btkh", self.num_kv_heads, self.key_dim)
        self.out = dense("btnh,nhd->btd", int(shape[-1] or 0))
        for layer in (self.query, self.key, self.value):
            layer.build(shape)
        self.out.build((*shape[:-1], self.num_heads, self.key_dim))

    def call(self, x: Any, training: bool = False) -> Any:
        rate = self.dropout if training else 0.0
        attended = jax_flash.attention(
            self.query(x),
            self.key(x),
            self.value(x),
            causal=self.causal,
            window=None if self.window is None else (self.window - 1, 0),
            dropout_rate=rate,
            dropout_key=jax.random.wrap_key_data(self.seed_generator.next()) if rate else None,
        )
        return self.out(attended)

    def get_config(self) -> dict[str, Any]:
        names = ("num_heads", "key_dim", "num_kv_heads", "causal", "window", "dropout")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class _Embedding(keras.layers.Layer):  # type: ignore[misc]
    """Tokens and their positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokens = keras.layers.Embedding(VOCABULARY, WIDTH, keras.initializers.RandomNormal(stddev=1.0))
        self.positions = keras.layers.Embedding(LENGTH, WIDTH, keras.initializers.RandomNormal(stddev=1.0))

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.tokens.build(shape)
        self.positions.build((LENGTH,))

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.positions(keras.ops.arange(LENGTH))


class _OfKeras(keras.layers.Layer):  # type: ignore[misc]
    """keras.layers.MultiHeadAttention as self attention, causal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return self.attention(x, x, use_causal_mask=True)


def model_of(attention: Any) -> Any:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = _Embedding()(tokens)
    x = keras.layers.Add()([x, attention(x)])
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))


def _train(model: Any, steps: int) -> float:
    batches = [jax.tree.map(np.asarray, batch(key)) for key in jax.random.split(jax.random.key(0), steps)]
    tokens, wanted = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    weights = np.broadcast_to(np.arange(LENGTH) >= DISTANCE, tokens.shape).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss)
    model.fit(tokens, wanted, sample_weight=weights, batch_size=len(tokens) // steps, shuffle=False, verbose=0)
    logits = model.predict(tokens[-64:], verbose=0)
    return float(loss(wanted[-64:, DISTANCE:], logits[:, DISTANCE:]))


def main(arguments: Sequence[str] | None = None) -> float:
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = "--layer" in given
    steps = steps_of([x for x in given if x != "--layer"], __doc__)
    keras.utils.set_random_seed(1)
    if own:
        loss = _train(model_of(FlashAttention(HEADS, WIDTH // HEADS, num_kv_heads=HEADS // 2)), steps)
    else:
        with jax_flash.patch_jax_nn() as patch:
            loss = _train(model_of(_OfKeras()), steps)
        print(patch)
    print(f"loss after {steps} steps: {loss:.3f}")
    return loss


if __name__ == "__main__":
    main()
    sys.exit(0)
