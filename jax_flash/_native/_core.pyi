"""The compiled library: csrc/ffi/module.cc."""

from collections.abc import Mapping, Sequence
from typing import Any

FFI_API_VERSION: tuple[int, int]
"""Of the headers that the library was built with."""

RECORD_API_VERSIONS: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
"""(FFI API, its interface for recording kernels into CUDA graphs) of the jaxlibs whose interface the library knows."""

OPERANDS: tuple[tuple[str, str], ...]
"""(name, dims) of the options that are arrays, in the order in which the handlers take them."""

FLOAT16_FAMILIES: tuple[str, ...]
"""Kernel families of GPUs whose tensor cores take float16 alone, to which other dtypes are brought."""

def handlers(*, records: bool) -> dict[str, dict[str, Any]]:
    """Platform -> custom call target -> handler, as ``jax.ffi.register_ffi_target`` takes it; with ``records`` those
    too by which XLA records kernels into CUDA graphs."""

def scratch(
    *,
    pass_: str,
    platform: str,
    dtype: str,
    options: Mapping[str, Any],
    batch: int,
    q_length: int,
    kv_length: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    shapes: Mapping[str, Sequence[int]],
) -> int:
    """Elements of float32 (float64 for float64 inputs) that a "forward" or "backward" call wants as an extra result.

    ``shapes`` are those of the operands that may be broadcast, by name.

    A function of its arguments alone, but for JAX_FLASH_SPLIT_KV. The handlers take more, and on GPUs less too, or
    no such result: then they split keys and query heads less. What the error "scratch must have at least" names is what
    a call can't do without: all of it on CPUs, and on GPUs the accumulator of dq, where it has no pass of its own, and
    the sums for the gradient of slopes.
    """

def scratch_of_any_batch(
    *,
    pass_: str,
    platform: str,
    dtype: str,
    options: Mapping[str, Any],
    q_length: int,
    kv_length: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    shapes: Mapping[str, Sequence[int]],
) -> tuple[int, int]:
    """(each, more) with ``scratch(..., batch=B) <= each * B + more`` for every B >= 1: for a batch size that is not
    known when a call is lowered. Of an operand that each batch entry has for itself, any first size above 1 says so."""

def plan_split_kv(
    *, batch: int, q_length: int, kv_length: int, q_heads: int, kv_heads: int, options: Mapping[str, Any]
) -> tuple[int, int]:
    """How the split-KV forward serves a call on GPUs: rows of a block, 0 if it does not, and slices of the keys."""

def is_single_tile(*, batch: int, q_length: int, kv_length: int, q_heads: int, kv_heads: int) -> bool:
    """Whether the single-tile forward serves a call's shape on GPUs, where it serves its options and head dims."""

def group_splits(
    *,
    batch: int,
    q_length: int,
    kv_length: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    options: Mapping[str, Any],
) -> int:
    """Into how many shares CUDA's backward kernels split the query heads of a key head; 1: not at all."""

def cpu_isa() -> str:
    """The CPU's instruction set in use. Raises RuntimeError when JAX_FLASH_CPU_ISA names one that is not there."""

def configure_cuda(*, source_dir: str, prebuilt_dirs: Sequence[str], nvrtc_paths: Sequence[str]) -> None:
    """Says where the device sources, the cubins built ahead of time and NVIDIA's libraries are."""

def largest_head_dim(*, arch: int, highest_precision: bool) -> int:
    """Up to which head_dim there are kernels for a compute capability such as 70."""

def separate_dq(*, arch: int, largest_head_dim: int) -> bool:
    """Whether dquery has a pass of its own on a compute capability such as 90, whatever the option of this name
    says."""

def cuda_launches() -> tuple[int, int, int]:
    """How many calls this process has launched on GPUs, how many of these went into a CUDA graph, and how many of those
    as nodes that XLA made itself."""

def cuda_status() -> dict[str, Any]:
    """driver, driver_error, nvrtc, nvrtc_error, cache_dir, cache_problem and devices (name, compute_capability,
    family).

    The cache's folder is made where it is not there; cache_problem says why it can't be used, and is empty where it
    can, or is switched off.
    """

def build_kernels(
    *,
    arch: int,
    out_dir: str,
    dtypes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    options: Sequence[Mapping[str, Any]],
    family: str = "",
    passes: Sequence[str] = ...,
) -> list[Mapping[str, Any]]:
    """Compiles ``passes`` (by default all) of every combination for ``arch``, such as 90 for 9.0, into ``out_dir``.

    ``head_dims`` are pairs of head_dim and value_head_dim; ``options`` are records by name, absent where not named;
    ``family`` is a kernel family that runs there, by default the one that serves it. Raises RuntimeError with the
    compiler's log or for a family that does not run there, ValueError for an architecture that no family serves.
    """

def fetch_kernel(
    *,
    arch: int,
    pass_: str,
    dtype: str,
    head_dim: int,
    value_head_dim: int,
    options: Mapping[str, Any],
    gpu: str = "",
) -> str:
    """Fetches a kernel through the cache, without a GPU. Returns "prebuilt", "cached" or "compiled".

    ``gpu`` is the name of one whose tuned rows come before the table's.
    """

TILE_FIELDS: tuple[str, ...]
"""Of a tile row."""

def cache_path() -> str:
    """The folder of the cache on disk, whether it is there or not; empty where there is no place for one."""

def cache_refusal() -> str:
    """Why the cache's folder, which is there, is not trusted (or its limit not understood); empty where it is used."""

def make_cache() -> None:
    """Makes the cache's folder, for its owner alone, where it is not there. Raises RuntimeError where it can't be
    used."""

def clear_cache() -> tuple[int, int]:
    """Removes the kernels from the cache; returns how many files and bytes. Raises RuntimeError where it can't."""

def sources_key() -> str:
    """What the device sources and the table of tile rows say, as 32 hexadecimal digits."""

def tune(rows: Sequence[Mapping[str, Any]]) -> None:
    """From now on these tile rows come before the table's: gpu, family, pass, head_dim, and TILE_FIELDS."""

def tile_row(*, arch: int, pass_: str, head_dim: int, gpu: str = "") -> dict[str, Any]:
    """family, row, tuned and most_shared_bytes of a plain call. Raises ValueError where no row serves it."""

def build_row(
    *,
    arch: int,
    pass_: str,
    dtype: str,
    head_dim: int,
    options: Mapping[str, Any],
    row: Mapping[str, int],
    out_dir: str,
) -> Mapping[str, Any]:
    """As `build_kernels`, one kernel with a tile row of its own."""
