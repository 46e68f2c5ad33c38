"""Exact attention for JAX as XLA custom calls: fast on GPUs and CPUs, differentiable through out and lse."""

from jax_flash._attention import attention
from jax_flash._explain import Explanation, explain
from jax_flash._registration import EXPORT_SAFE_TARGETS

__all__ = ["EXPORT_SAFE_TARGETS", "Explanation", "attention", "explain"]
__version__ = "0.1.0"
