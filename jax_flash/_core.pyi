"""The compiled library: csrc/ffi.cc."""

from collections.abc import Mapping, Sequence
from typing import Any

FFI_API_VERSION: tuple[int, int]
"""Of the headers that the library was built with."""

OPERANDS: tuple[str, ...]
"""Names of the options that are arrays, in the order in which the handlers take them."""

def handlers() -> dict[str, dict[str, Any]]:
    """Platform -> custom call target -> handler, as ``jax.ffi.register_ffi_target`` takes it."""

def backward_scratch(
    *, platform: str, dtype: str, batch: int, q_length: int, kv_length: int, q_heads: int, kv_heads: int, head_dim: int
) -> int:
    """Elements of float32 (float64 for float64 inputs) that the backward call wants as an extra result."""

def cpu_isa() -> str:
    """The CPU's instruction set in use. Raises RuntimeError when JAX_FLASH_CPU_ISA names one that is not there."""

def configure_cuda(*, source_dir: str, prebuilt_dirs: Sequence[str], nvrtc_paths: Sequence[str]) -> None:
    """Says where the device sources, the cubins built ahead of time and NVIDIA's libraries are."""

def cuda_status() -> dict[str, Any]:
    """driver, driver_error, nvrtc, nvrtc_error, cache_dir and devices (name, compute_capability, family)."""

def build_kernels(
    *, arch: int, out_dir: str, dtypes: Sequence[str] = ..., head_dims: Sequence[int] = ...
) -> list[Mapping[str, Any]]:
    """Compiles the common variants for ``arch``, a compute capability such as 90, into ``out_dir``.

    Raises RuntimeError with the compiler's log, ValueError for an architecture that no kernel family serves.
    """

def fetch_kernel(*, arch: int, pass_: str, dtype: str, head_dim: int, causal: bool) -> str:
    """Fetches a kernel through the cache, without a GPU. Returns "prebuilt", "cached" or "compiled"."""
