"""MaxText 0.2.5: `install` has the attention of its AttentionOp computed by jax_flash.

    from maxtext.layers.attention_op import AttentionOp
    import maxtext_attention

    maxtext_attention.install(AttentionOp)  # before the model is traced

`AttentionOp.apply_attention` is the one function to replace: every model reaches its kernels through it. Training and
prefill are served here; `left_to_maxtext` says what goes to MaxText's own method.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash

CAUSAL = ("global", "mla", "local_sliding")
"""The values of AttentionType that hide later keys. "full" hides none; MaxText's own method serves the others."""


def install(attention_op: type) -> None:
    """Replaces ``attention_op.apply_attention``, MaxText's AttentionOp's. Installing twice changes nothing."""
    # MaxText is not imported here, so its module has no type, nor has a function an attribute of ours.
    original: Any = attention_op.apply_attention  # type: ignore[attr-defined]
    if hasattr(original, "of_maxtext"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply_attention(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(self, *arguments, **keywords)
        given.apply_defaults()
        if left_to_maxtext(self, given.arguments):
            return original(self, *arguments, **keywords)
        # out alone is a result that MaxText does not normalise again.
        return attend(self, given.arguments), None, None

    apply_attention.of_maxtext = original  # type: ignore[attr-defined]
    attention_op.apply_attention = apply_attention  # type: ignore[attr-defined]


def left_to_maxtext(self: Any, given: Mapping[str, Any]) -> str | None:
    """Why MaxText's own method has to serve a call; None if `attend` does."""
    if given["model_mode"] == "autoregressive":
        return "decoding: MaxText merges its two caches by maxima and sums"
    kind = self.attention_type.value
    if kind not in (*CAUSAL, "full"):
        return f"attention_type {kind}"
    if self.config.moba:
        return "moba"
    if self.dropout_rate:
        return "dropout_rate"
    for name in ("use_ragged_attention", "record_max_logits"):
        if given.get(name):
            return name
    for name in ("bidirectional_mask", "indexer_mask", "compressed_mask"):
        if given.get(name) is not None:
            return name
    if not all(hasattr(given[name], "dtype") for name in ("key", "value")):
        return "a quantised cache"
    if self._context_parallel_size() > 1:
        return "a sequence that MaxText spreads over devices itself"
    return None


def attend(self: Any, given: Mapping[str, Any]) -> jax.Array:
    query, key, value = (given[name] for name in ("query", "key", "value"))  # [B, T, N, H] and [B, S, K, H]
    # The position of the first row among the keys: prefill in chunks hands over the keys before this chunk.
    begin = 0 if given.get("previous_chunk") is None else given["previous_chunk"].shape[1]
    q_ids, kv_ids = given["decoder_segment_ids"], given.get("decoder_segment_ids_kv")
    if q_ids is not None:
        kv_ids = q_ids if kv_ids is None else kv_ids
        # MaxText hides keys of negative ids from all rows: here rows and keys of padding never have the same id.
        kv_ids = jnp.where(kv_ids >= 0, kv_ids, -1)
        q_ids = jnp.where(q_ids >= 0, q_ids, -2)[:, begin : begin + query.shape[1]]
    kind = self.attention_type.value
    out: jax.Array = jax_flash.attention(
        query,
        key.astype(query.dtype),
        value.astype(query.dtype),
        # Packed sequences need no positions here: inside of a sequence the order of tokens is that of the row.
        # MaxText's inputs_positions are for its rotary embeddings, which it has applied to query and key.
        causal=kind in CAUSAL,
        q_offset=begin,
        window=(self.sliding_window_size - 1, 0) if kind == "local_sliding" else None,
        scale=1.0,  # MaxText scales the query where it projects it
        softcap=self.attn_logits_soft_cap or None,
        sinks=given.get("sinks"),
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids if q_ids is not None else None,
    )
    return out
