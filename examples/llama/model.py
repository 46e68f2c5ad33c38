"""Llama in Flax: RMSNorm, rotary positions with scaling, grouped-query attention, SwiGLU, embeddings tied or not.

Modules are named as the tensors of a Hugging Face checkpoint are, so `checkpoint.py` derives one name from the other.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_flash

Remat = Literal["none", "full", "attention"]


# ---- The configuration, in the words of config.json


class RopeScaling(NamedTuple):
    """How rotary frequencies are stretched for contexts longer than those of pretraining.

    "linear" divides all of them by ``factor`` (Chen et al. 2023). "llama3" divides those whose wavelength is beyond
    original_max_position_embeddings / low_freq_factor, leaves those below original_max_position_embeddings /
    high_freq_factor, and interpolates between (Llama 3.1).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @staticmethod
    def from_json(values: dict[str, Any]) -> "RopeScaling | None":
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "default":
            return None
        if kind not in ("linear", "llama3"):
            raise ValueError(f"rope_type must be 'default', 'linear' or 'llama3', got {kind!r}")
        names = RopeScaling._fields[1:] if kind == "llama3" else ("factor",)
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"rope_type {kind!r} must come with {', '.join(names)}, got none of {', '.join(missing)}")
        for name in names:
            value = values[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} of rope scaling must be a number > 0, got {value!r}")
        scaling = RopeScaling(kind, **{name: values[name] for name in names})
        if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor {scaling.low_freq_factor}, "
                f"got {scaling.high_freq_factor}"
            )
        return scaling

    def to_json(self) -> dict[str, Any]:
        values = self._asdict()
        return values if self.rope_type == "llama3" else {name: values[name] for name in ("rope_type", "factor")}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The fields of config.json that decide what a Llama computes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        sizes = [field.name for field in dataclasses.fields(self) if field.type is int]
        for name in sizes:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number > 0, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads {self.num_key_value_heads}, "
                f"got {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        ids = self.eos_token_ids if self.bos_token_id is None else (self.bos_token_id, *self.eos_token_ids)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"bos_token_id and eos_token_id must be integers below vocab_size {self.vocab_size}, got {token!r}"
                )

    @staticmethod
    def from_json(values: dict[str, Any]) -> "LlamaConfig":
        """From what config.json holds; ValueError, naming the field, for what this model does not compute."""
        for name, expected in {
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }.items():
            if (value := values.get(name, expected if name != "model_type" else None)) != expected:
                raise ValueError(f"{name} must be {expected!r}, got {value!r}")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"the configuration must have {', '.join(missing)}, got none")

        # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        heads, eos = values["num_attention_heads"], values.get("eos_token_id")
        head_dim: int = values.get("head_dim") or 0
        if not head_dim and heads:  # no heads at all are refused below
            head_dim, rest = divmod(values["hidden_size"], heads)
            if rest:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads {heads} where head_dim is not given, "
                    f"got {values['hidden_size']}"
                )
        return LlamaConfig(
            **{name: values[name] for name in needed},
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_position_embeddings=values.get("max_position_embeddings", 2048),
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", values.get("rope_theta", 10_000.0)),
            rope_scaling=RopeScaling.from_json(rope),
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            initializer_range=values.get("initializer_range", 0.02),
        )

    def to_json(self) -> dict[str, Any]:
        """What config.json should hold: the older names of rope scaling, which every transformers reads."""
        values = dataclasses.asdict(self)
        eos = values.pop("eos_token_ids")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            **values,
            "rope_scaling": self.rope_scaling and self.rope_scaling.to_json(),
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        }


# ---- Attention and rotary positions


class Attention(NamedTuple):
    """Whose attention the model calls: "ours" is jax_flash's, "cudnn" and "xla" are jax.nn's."""

    kind: Literal["ours", "cudnn", "xla"] = "ours"
    implementation: jax_flash.Implementation | None = None  # of ours

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None) -> jax.Array:
        """Causal attention of query [B, T, N, H] to key and value [B, T, K, H], within segments [B, T] if given."""
        if self.kind == "ours":
            return jax_flash.attention(
                query,
                key,
                value,
                causal=True,
                q_segment_ids=segments,
                kv_segment_ids=segments,
                implementation=self.implementation,
            )
        mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation=self.kind)


OURS = Attention()


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """[head_dim / 2] radians per position, in float64."""
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    scaled = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return scaled
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)  # over the context of pretraining
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return kept * frequencies + (1 - kept) * scaled


class Rotary(NamedTuple):
    """Cosine and sine of every position's angles: [B, T, 1, head_dim / 2], float32."""

    cos: jax.Array
    sin: jax.Array

    @staticmethod
    def at(positions: jax.Array, config: LlamaConfig) -> "Rotary":
        """For positions [B, T]."""
        frequencies = jnp.asarray(rotary_frequencies(config), jnp.float32)
        angles = (positions.astype(jnp.float32)[..., None] * frequencies)[:, :, None]
        return Rotary(jnp.cos(angles), jnp.sin(angles))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotates x [B, T, heads, H]: pairs are (i, i + H / 2), as Hugging Face permutes the weights for."""
        left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated = [left * self.cos - right * self.sin, left * self.sin + right * self.cos]
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Cache(NamedTuple):
    """Keys and values of the positions seen so far, of one layer: [B, S, K, H] with room for S positions."""

    key: jax.Array
    value: jax.Array

    def write(self, key: jax.Array, value: jax.Array, offset: jax.typing.ArrayLike) -> "Cache":
        at = (0, offset, 0, 0)
        return Cache(
            jax.lax.dynamic_update_slice(self.key, key, at), jax.lax.dynamic_update_slice(self.value, value, at)
        )


# ---- The model


class SelfAttention(nnx.Module):
    def __init__(self, config: LlamaConfig, attention: Attention, linear: Any):
        self.config = config
        self.attention = attention
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, width)
        self.k_proj = linear(config.hidden_size, kv_width)
        self.v_proj = linear(config.hidden_size, kv_width)
        self.o_proj = linear(width, config.hidden_size)

    def _project(self, x: jax.Array, rotary: Rotary) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads = (*x.shape[:2], -1, self.config.head_dim)
        return (
            rotary(self.q_proj(x).reshape(heads)),
            rotary(self.k_proj(x).reshape(heads)),
            self.v_proj(x).reshape(heads),
        )

    def __call__(self, x: jax.Array, rotary: Rotary, segments: jax.Array | None) -> jax.Array:
        out = self.attention(*self._project(x, rotary), segments)
        return self.o_proj(out.reshape(*x.shape[:2], -1))

    def decode(
        self, x: jax.Array, rotary: Rotary, offset: jax.typing.ArrayLike, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        query, key, value = self._project(x, rotary)
        cache = cache.write(key, value, offset)
        # Always ours: jax.nn.dot_product_attention has no offset for its causal mask.
        out = jax_flash.attention(
            query, *cache, causal=True, q_offset=offset, implementation=self.attention.implementation
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, linear: Any):
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, attention: Attention, linear: Any, norm: Any):
        self.input_layernorm = norm()
        self.self_attn = SelfAttention(config, attention, linear)
        self.post_attention_layernorm = norm()
        self.mlp = MLP(config, linear)

    def __call__(self, x: jax.Array, rotary: Rotary, segments: jax.Array | None) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), rotary, segments)
        return x + self.mlp(self.post_attention_layernorm(x))

    def decode(
        self, x: jax.Array, rotary: Rotary, offset: jax.typing.ArrayLike, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        attended, cache = self.self_attn.decode(self.input_layernorm(x), rotary, offset, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Llama(nnx.Module):
    """Predicts the next token. Computes in ``dtype``; the parameters are stored in ``param_dtype``.

    ``remat`` says what the backward pass of a layer recomputes: "none", "full" all of it, "attention" all but the
    attention itself, whose output and lse are kept (where the attention is jax_flash's).
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        attention: Attention = OURS,
        remat: Remat = "none",
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(config.initializer_range)
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=init, rngs=rngs
        )
        norm = functools.partial(
            nnx.RMSNorm,
            config.hidden_size,
            epsilon=config.rms_norm_eps,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.remat = remat
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=init,
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, attention, linear, norm) for _ in range(config.num_hidden_layers)])
        self.norm = norm()
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size)

    def hidden(
        self, tokens: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """States [B, T, hidden_size] that `logits` reads, of tokens [B, T].

        With ``segments`` [B, T] a row holds several sequences, which do not see each other; ``positions`` [B, T] then
        begin at 0 in each.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        rotary = Rotary.at(positions, self.config)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            if self.remat == "none":
                x = layer(x, rotary, segments)
            else:
                x = _rematerialised(layer, self.remat, x, rotary, segments)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., vocab_size] in float32, which a narrower product would round."""
        tied = self.config.tie_word_embeddings
        weight = self.embed_tokens.embedding[...].T if tied else self.lm_head.kernel[...]
        return jnp.matmul(hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        return self.logits(self.hidden(tokens, positions, segments))

    def decode(
        self, tokens: jax.Array, offset: jax.typing.ArrayLike, caches: list[Cache]
    ) -> tuple[jax.Array, list[Cache]]:
        """Logits of tokens [B, T] that stand at ``offset``, after what the caches hold; and the caches with them."""
        positions = jnp.broadcast_to(offset + jnp.arange(tokens.shape[1]), tokens.shape)
        rotary = Rotary.at(positions, self.config)
        x = self.embed_tokens(tokens)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer.decode(x, rotary, offset, cache)
            new_caches.append(cache)
        return self.logits(self.norm(x)), new_caches

    def empty_caches(self, batch: int, length: int) -> list[Cache]:
        shape = (batch, length, self.config.num_key_value_heads, self.config.head_dim)
        return [Cache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in self.layers]


def _rematerialised(layer: Layer, remat: Remat, x: jax.Array, rotary: Rotary, segments: jax.Array | None) -> jax.Array:
    graphdef, params = nnx.split(layer)
    policy = jax_flash.checkpoint_policies.save_attention if remat == "attention" else None

    @functools.partial(jax.checkpoint, policy=policy)
    def run(params: nnx.State, x: jax.Array, rotary: Rotary, segments: jax.Array | None) -> jax.Array:
        return nnx.merge(graphdef, params)(x, rotary, segments)

    return run(params, x, rotary, segments)


def count_parameters(model: nnx.Module, kind: Any = nnx.Param) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, kind)))


# ---- Generation


@functools.partial(jax.jit, static_argnames=("graphdef", "count", "temperature"))
def generate(
    graphdef: nnx.GraphDef,
    params: tuple[nnx.State, ...],
    prompt: jax.Array,
    key: jax.Array,
    *,
    count: int,
    temperature: float,
) -> jax.Array:
    """Continues prompt [B, T] by ``count`` tokens [B, count]; temperature 0 takes the likeliest token every time."""
    model = nnx.merge(graphdef, *params)
    batch, prompt_length = prompt.shape

    def pick(logits: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0:
            return logits.argmax(axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    logits, caches = model.decode(prompt, 0, model.empty_caches(batch, prompt_length + count))
    keys = jax.random.split(key, count)
    first = pick(logits[:, -1], keys[0])

    def next_token(carry: tuple[jax.Array, list[Cache]], inputs: tuple[jax.Array, jax.Array]) -> Any:
        token, caches = carry
        offset, key = inputs
        logits, caches = model.decode(token[:, None], offset, caches)
        token = pick(logits[:, -1], key)
        return (token, caches), token

    offsets = jnp.arange(prompt_length, prompt_length + count - 1)
    _, rest = jax.lax.scan(next_token, (first, caches), (offsets, keys[1:]))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
