"""Stubs of what two trainers hand to their attention, and dense attention as they compute it.

MaxText 0.2.5, `maxtext.layers.attention_op.AttentionOp`, and levanter 1.2.dev1644,
`levanter.layers.attention.dot_product_attention` with haliax's NamedArray: the signatures are theirs, word by word.
"""

import dataclasses
import enum
import types
from typing import Any

import jax
import jax.numpy as jnp

HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


# ---- MaxText


class AttentionType(enum.Enum):
    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"
    MLA = "mla"
    COMPRESSED = "compressed"
    FULL = "full"
    BLOCK_DIFFUSION = "block_diffusion"


def attention_op() -> type:
    """A class of its own for every test, for it is changed."""

    class AttentionOp:
        def __init__(self, attention_type: AttentionType = AttentionType.GLOBAL, **settings: Any) -> None:
            self.config = types.SimpleNamespace(moba=False)
            self.attention_type = attention_type
            self.attn_logits_soft_cap: float | None = None
            self.sliding_window_size: int | None = None
            self.dropout_rate = 0.0
            self.devices = 1
            self.calls = 0  # of the method below
            vars(self).update(settings)

        def _context_parallel_size(self) -> int:
            return self.devices

        def apply_attention(
            self,
            query,
            key,
            value,
            decoder_segment_ids,
            segment_positions,
            lengths,
            model_mode,
            use_ragged_attention=False,
            previous_chunk=None,
            bidirectional_mask=None,
            sinks=None,
            indexer_mask=None,
            compressed_mask=None,
            record_max_logits=False,
            decoder_segment_ids_kv=None,
            pad_kv_total=0,
            compress_ratio=0,
            *,
            qk_product_einsum,
            wv_product_einsum,
        ):
            """As apply_attention_dot: out that is not normalised, the maxima and the sums."""
            self.calls += 1
            batch, rows, heads, _ = query.shape
            keys, kv_heads = key.shape[1:3]
            grouped = query.reshape(batch, rows, kv_heads, heads // kv_heads, -1)
            scores = qk_product_einsum("btkgd,bskd->bkgts", grouped, key)
            if self.attn_logits_soft_cap:
                scores = self.attn_logits_soft_cap * jnp.tanh(scores / self.attn_logits_soft_cap)
            begin = 0 if previous_chunk is None else previous_chunk.shape[1]
            row, column = begin + jnp.arange(rows)[:, None], jnp.arange(keys)
            kept = jnp.ones((1, 1, 1, rows, keys), bool)
            if decoder_segment_ids is not None:
                kv_ids = decoder_segment_ids if decoder_segment_ids_kv is None else decoder_segment_ids_kv
                same = (decoder_segment_ids[:, :, None] == kv_ids[:, None]) & (kv_ids[:, None] >= 0)
                kept = kept & same[:, None, None, begin : begin + rows]
            if self.attention_type is not AttentionType.FULL:
                kept = kept & (column <= row)
            if self.attention_type is AttentionType.LOCAL_SLIDING:
                kept = kept & (column > row - self.sliding_window_size)
            scores = jnp.where(kept, scores, HIDDEN)
            if sinks is not None:
                sink = jnp.broadcast_to(sinks.reshape(kv_heads, heads // kv_heads, 1, 1), (*scores.shape[:-1], 1))
                scores = jnp.concatenate([scores, sink], -1)
            largest = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - largest)
            total = weights.sum(-1, keepdims=True)
            out = wv_product_einsum("bkgts,bskd->btkgd", weights[..., :keys], value)

            def of_rows(x):
                return jnp.moveaxis(x, 3, 1).reshape(batch, rows, heads, 1)

            return out.reshape(batch, rows, heads, -1), of_rows(largest), of_rows(total)

        def __call__(self, query, key, value, decoder_segment_ids, inputs_positions, model_mode, **options):
            out, _, total = self.apply_attention(
                query=query,
                key=key,
                value=value,
                decoder_segment_ids=decoder_segment_ids,
                segment_positions=inputs_positions,
                lengths=None,
                model_mode=model_mode,
                qk_product_einsum=jnp.einsum,
                wv_product_einsum=jnp.einsum,
                **options,
            )
            return out if total is None else out / total

    return AttentionOp


# ---- levanter


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class NamedArray:
    array: jax.Array
    axes: tuple[Axis, ...]

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def to(self, *axes: Axis) -> jax.Array:
        """The array with these axes, of size 1 where it lacks one."""
        names = [axis.name for axis in self.axes]
        own = [axis.name for axis in axes if axis.name in names]
        assert len(own) == len(names)
        array = jnp.transpose(self.array, [names.index(name) for name in own])
        return array.reshape([axis.size if axis.name in names else 1 for axis in axes])


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    is_causal: bool = False
    causal_offset: NamedArray | None = None
    explicit_mask: NamedArray | None = None
    segment_ids: tuple[NamedArray, NamedArray] | None = None
    sliding_window: int | None = None


class Levanter:
    """levanter's function, which counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def dot_product_attention(
        self,
        QPos,
        KPos,
        Key,
        query,
        key,
        value,
        mask=None,
        bias=None,
        attention_dtype=None,
        precision=None,
        use_flash=None,
        attn_backend=None,
        flash_block_size=None,
        dropout=0.0,
        *,
        logits_soft_cap=None,
        scaling_factor=None,
        inference=True,
        prng=None,
        attn_sink=None,
    ):
        self.calls += 1
        q_pos = next(a for a in query.axes if a.name == getattr(QPos, "name", QPos))
        k_pos = next(a for a in key.axes if a.name == getattr(KPos, "name", KPos))
        dim = next(a for a in query.axes if a.name == getattr(Key, "name", Key))
        rest = [a for a in query.axes if a not in (q_pos, dim)]
        of_value = [a for a in value.axes if a not in rest and a != k_pos]
        scale = dim.size**-0.5 if scaling_factor is None else scaling_factor
        scores = scale * query.to(*rest, q_pos, dim) @ key.to(*rest, k_pos, dim).swapaxes(-1, -2)
        if bias is not None:
            scores = scores + bias.to(*rest, q_pos, k_pos)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        kept = jnp.ones((), bool)
        row, column = jnp.arange(q_pos.size)[:, None], jnp.arange(k_pos.size)
        if isinstance(mask, NamedArray):
            kept = mask.to(*rest, q_pos, k_pos)
        elif mask is not None:
            if mask.is_causal:
                offset = 0 if mask.causal_offset is None else mask.causal_offset.to(*rest)[..., None, None]
                kept = kept & (column <= row + offset)
            if mask.explicit_mask is not None:
                kept = kept & mask.explicit_mask.to(*rest, q_pos, k_pos)
            if mask.sliding_window is not None:
                kept = kept & (row - column >= 0) & (row - column < mask.sliding_window)
            if mask.segment_ids is not None:
                of_rows, of_keys = mask.segment_ids
                renamed = tuple(k_pos if a.name == q_pos.name else a for a in of_keys.axes)
                of_keys = NamedArray(of_keys.array, renamed)
                kept = kept & (of_rows.to(*rest, q_pos)[..., None] == of_keys.to(*rest, k_pos)[..., None, :])
        scores = jnp.where(kept, scores, -1e9)
        if attn_sink is not None:
            sink = jnp.broadcast_to(attn_sink.to(*rest)[..., None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sink], -1)
        weights = jax.nn.softmax(scores)[..., : k_pos.size]
        out = weights @ jnp.broadcast_to(
            value.to(*rest, k_pos, *of_value), (*(a.size for a in rest), k_pos.size, *(a.size for a in of_value))
        )
        axes = (*rest, q_pos, *of_value)
        wanted = (*(a for a in query.axes if a != dim), *of_value)
        return NamedArray(NamedArray(out, axes).to(*wanted), wanted)
