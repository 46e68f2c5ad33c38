"""Policies for ``jax.checkpoint`` (remat) that keep what attention's backward pass needs, so that forward runs once.

    jax.checkpoint(block, policy=jax_flash.checkpoint_policies.save_attention)
    jax.checkpoint(block, policy=jax.checkpoint_policies.save_from_both_policies(
        jax_flash.checkpoint_policies.save_attention, jax.checkpoint_policies.dots_with_no_batch_dims_saveable))

The backward pass needs out and lse as the call made them, [B, T, N, V] and [B, N, T]. A name that a model gives to its
own attention output (``jax.ad_checkpoint.checkpoint_name``) keeps an array that the backward pass does not use.
"""

import jax

OUT = "jax_flash_out"
LSE = "jax_flash_lse"
GATHERED = "jax_flash_gathered"
"""The name of K and V that the schedule "all_gather" of `jax_flash.context` has gathered."""
NAMES = (OUT, LSE)
"""The names of out and lse, for ``jax.checkpoint_policies.save_only_these_names`` and similar; both are needed."""

save_attention = jax.checkpoint_policies.save_only_these_names(*NAMES)
"""Keeps out and lse of every `jax_flash.attention`, and nothing else."""
