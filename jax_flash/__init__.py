"""Exact attention for JAX as XLA custom calls: fast on GPUs and CPUs, differentiable through out and lse."""

import importlib.metadata as _metadata

from jax_flash import checkpoint_policies
from jax_flash._attention import attention, attention_varlen
from jax_flash._call.options import Implementation, Precision
from jax_flash._dot_product import dot_product_attention
from jax_flash._explain import Explanation, explain, explain_varlen
from jax_flash._implementations.dropout import dropout_mask
from jax_flash._native.registration import EXPORT_SAFE_TARGETS
from jax_flash._patch import Patch, patch_jax_nn

__all__ = [
    "EXPORT_SAFE_TARGETS",
    "Explanation",
    "Implementation",
    "Patch",
    "Precision",
    "attention",
    "attention_varlen",
    "checkpoint_policies",
    "dot_product_attention",
    "dropout_mask",
    "explain",
    "explain_varlen",
    "patch_jax_nn",
]
__version__ = _metadata.version("jax_flash")
