"""Makes a small Llama checkpoint in Hugging Face's files out of Python's standard library, with nothing downloaded."""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from tqdm import tqdm

from llama import checkpoint, data, training
from llama.model import Attention, Llama, LlamaConfig, count_parameters

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and of its pretraining."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 1024
    length: int = 256
    batch: int = 8
    steps: int = 300
    learning_rate: float = 3e-3
    tied: bool = True
    seed: int = 0

    def check(self) -> None:
        """Raises ValueError, naming the flag, for sizes that don't fit together."""
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width must be a multiple of twice --heads {self.heads}, so that the head_dim is even, "
                f"got {self.width}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads must be a multiple of --kv-heads {self.kv_heads}, got {self.heads}")
        if self.vocabulary < (smallest := 256 + 2):
            raise ValueError(
                f"--vocabulary must be at least {smallest}, all bytes and two special tokens, got {self.vocabulary}"
            )


def train_tokenizer(texts: list[str], vocabulary: int) -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3 has, so that every text can be encoded."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pretrain(out: pathlib.Path, sizes: Sizes, attention: Attention, dtype: str, shard_bytes: int) -> float:
    """Trains and writes the checkpoint; returns the mean loss of the last 20 steps."""
    texts = [text for _, text in data.standard_library()]
    # Every eighth file has enough words for so small a vocabulary, and the training of the tokenizer is not the point.
    tokenizer = train_tokenizer(texts[::8], sizes.vocabulary)
    bos, eos = (tokenizer.encode(text).ids[0] for text in (BOS, EOS))
    # As many files as the steps can read, spread over the library; a token is about three bytes.
    wanted = 3 * sizes.steps * sizes.batch * sizes.length
    total = sum(map(len, texts))
    chosen = texts[:: max(1, total // max(wanted, 1))]
    stream = np.concatenate(
        [[bos, *encoding.ids, eos] for encoding in tokenizer.encode_batch(chosen, add_special_tokens=False)]
    ).astype(np.int32)
    if len(stream) <= sizes.length:
        raise ValueError(f"--length must be below {len(stream)}, the tokens of text, got {sizes.length}")

    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=sizes.width,
        intermediate_size=3 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.width // sizes.heads,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=sizes.tied,
        bos_token_id=bos,
        eos_token_ids=(eos,),
        # As a tied embedding also reads out, at this size the first logits are about 1.
        initializer_range=sizes.width**-0.5,
    )
    model = Llama(config, dtype=dtype, attention=attention, rngs=nnx.Rngs(sizes.seed))
    print(
        f"model      {count_parameters(model) / 1e6:.2f}M parameters: {config.num_hidden_layers} layers, "
        f"width {config.hidden_size}, {config.num_attention_heads} query heads on {config.num_key_value_heads} "
        f"key heads, {config.vocab_size} tokens"
    )
    print(f"text       {len(stream):,} tokens of Python's standard library")
    losses = _train(model, stream, sizes)

    with checkpoint.new_folder(out) as folder:
        checkpoint.save_model(folder, model, config.to_json(), shard_bytes=shard_bytes)
        tokenizer.save(str(folder / checkpoint.TOKENIZER))
        _write(folder / "tokenizer_config.json", _tokenizer_config(config))
        _write(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    return float(np.mean(losses[-20:]))


def _train(model: Llama, stream: np.ndarray, sizes: Sizes) -> list[float]:
    graphdef, *split = nnx.split(model, nnx.Param, ...)
    params, frozen = split
    learning_rate = training.schedule(sizes.learning_rate, sizes.steps, warmup=sizes.steps // 10)
    optimizer = training.make_optimizer(learning_rate, weight_decay=0.1)
    state = training.initial_state(params, optimizer, loss_scale=1.0)
    step_of = training.make_train_step(graphdef, optimizer, learning_rate, clip=1.0, segmented=False)
    random = np.random.default_rng(sizes.seed)
    losses: list[jax.Array] = []
    pace = 0.1 if sys.stderr.isatty() else 10
    with tqdm(total=sizes.steps, unit="step", dynamic_ncols=True, mininterval=pace) as bar:
        for _ in range(sizes.steps):
            starts = random.integers(0, len(stream) - sizes.length, (1, sizes.batch))
            rows = data.full_rows(stream[starts[..., None] + np.arange(sizes.length + 1)])
            state, metrics = step_of(state, frozen, jax.tree.map(jnp.asarray, rows))
            losses.append(metrics.loss)
            if len(losses) % 20 == 0:
                bar.set_postfix({"loss": f"{losses[-1]:.3f}"}, refresh=False)
            bar.update()
    nnx.update(model, state.params)
    values = [float(loss) for loss in losses]
    if not np.isfinite(values).all():
        raise SystemExit("the loss became infinite or NaN: try a lower --learning-rate")
    return values


def _tokenizer_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": config.max_position_embeddings,
    }


def _write(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
