"""The compiled library: csrc/ffi/module.cc."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

FFI_API_VERSION: tuple[int, int]
"""Version of the XLA FFI headers that the library was built with: (major, minor)."""

RECORD_API_VERSIONS: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
"""(FFI API, its interface for recording kernels into CUDA graphs) of the jaxlibs whose interface the library knows."""

OPERANDS: tuple[tuple[str, str], ...]
"""(name, dims) of the options that are arrays, in the order in which the handlers take them."""

FLOAT16_FAMILIES: tuple[str, ...]
"""Kernel families of GPUs whose tensor cores take float16 only, to which other dtypes are converted."""

CPU_OPERATIONS: list[str]
"""The names of the operations that programs of functions for CPU kernels are made of."""

class _Call(TypedDict):
    """What a call is described by. ``shapes`` are those of the operands that may be broadcast, by name."""

    pass_: str
    dtype: str
    options: Mapping[str, Any]
    batch: int
    q_length: int
    kv_length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    shapes: Mapping[str, Sequence[int]]

def handlers(*, records: bool) -> dict[str, dict[str, Any]]:
    """Platform -> custom call target -> handler, as ``jax.ffi.register_ffi_target`` takes it; with ``records`` those
    too by which XLA records kernels into CUDA graphs."""

def scratch(*, platform: str, dcaptured_elements: Sequence[int] = ..., **call: Unpack[_Call]) -> int:
    """Elements of float32 (float64 for float64 inputs) that a "forward" or "backward" call wants as an extra result.

    A function of its arguments and JAX_FLASH_SPLIT_KV alone. The handlers take more, and on GPUs also less or no such
    result: then they split keys and query heads less. The error "scratch must have at least" names the indispensable
    part: all of it on CPUs, and on GPUs the accumulator of dq, if that has no pass of its own, and the sums for the
    gradient of slopes.
    """

def begin_to_load(*, scratch: int, **call: Unpack[_Call]) -> None:
    """Begins to load the CUDA kernels of a call that has ``scratch`` elements of it, for every GPU here, on threads of
    their own. Errors are raised when the call runs."""

def finish_loading() -> None:
    """Waits for these threads, as a process must before it ends."""

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
    dcaptured_elements: Sequence[int] = ...,
) -> tuple[int, int]:
    """(each, more) with ``scratch(..., batch=B) <= each * B + more`` for every B >= 1: for a batch size that is not
    known when a call is lowered. In ``shapes``, any first size above 1 marks an operand that is not shared by the
    batch."""

def plan_split_kv(
    *, batch: int, q_length: int, kv_length: int, q_heads: int, kv_heads: int, options: Mapping[str, Any]
) -> tuple[int, int]:
    """How the split-KV forward serves a call on GPUs: rows of a block, 0 if it does not, and slices of the keys."""

def is_single_tile(*, batch: int, q_length: int, kv_length: int, q_heads: int, kv_heads: int) -> bool:
    """Whether the single-tile forward is best for a call's shape on GPUs, if it serves its options and head dims."""

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
    """The number of shares into which CUDA's backward kernels split the query heads of a key head."""

def cpu_isa() -> str:
    """The CPU's instruction set in use. Raises RuntimeError if JAX_FLASH_CPU_ISA names one that this CPU lacks."""

def configure_cuda(
    *,
    source_dir: str,
    prebuilt_dirs: Sequence[str],
    nvrtc_paths: Sequence[str],
    packed: Callable[[int], Mapping[str, bytes]] | None = None,
) -> None:
    """Sets the paths of the device sources, of the cubins built ahead of time and of NVIDIA's libraries.

    ``packed(arch)`` returns the files of the packs for a compute capability such as 90, by name. It is called once for
    each, from any thread.
    """

def largest_head_dim(*, arch: int, highest_precision: bool) -> int:
    """The largest head_dim with kernels for a compute capability such as 70."""

class _Question(Protocol):
    """What is asked of a call, which is described by its sizes, and of a compute capability such as 90."""

    def __call__(self, *, arch: int, **call: Unpack[_Call]) -> bool: ...

lists_keys: _Question
"""Whether the kernels of a main pass take keys as a list of rows, those that are kept first, in place of the mask that
this call has."""

orders_dq: _Question
"""Whether a backward should sum dquery in one order, without a pass of its own: see Options.ordered_dq."""

def separate_dq(*, arch: int, largest_head_dim: int) -> bool:
    """Whether dquery has a pass of its own on a compute capability such as 90 even if the option of this name is
    False."""

def cuda_launches() -> tuple[int, int, int]:
    """How many calls this process has launched on GPUs, how many of these went into a CUDA graph, and how many of those
    XLA recorded instead of captured."""

def cuda_status() -> dict[str, Any]:
    """driver, driver_error, nvrtc, nvrtc_error, cache_dir, cache_problem and devices (name, compute_capability,
    family).

    Creates the cache's folder if it is missing; cache_problem says why it can't be used, and is empty if it can, or is
    switched off.
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

def kernel_names(
    *,
    arch: int,
    dtypes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    options: Sequence[Mapping[str, Any]],
    passes: Sequence[str] = ...,
) -> list[str]:
    """The names of what `build_kernels` would compile."""

def fetch_kernels(
    *,
    arch: int,
    dtypes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    options: Sequence[Mapping[str, Any]],
    gpu: str = "",
    passes: Sequence[str] = ...,
) -> list[tuple[str, str, float]]:
    """As `build_kernels`, but through the cache, as calls fetch their kernels, on the GPU of that name.

    Returns for each its name, "prebuilt", "cached" or "compiled", and the seconds that this took.
    """

def study_shared_bytes(*, arch: int, file: str, entry: str, constants: str) -> int: ...
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

    ``gpu`` names a GPU whose tuned rows take precedence over the table's.
    """

TILE_FIELDS: tuple[str, ...]
"""The names of the fields of a tile row."""

def cache_path() -> str:
    """The folder of the cache on disk, whether it exists or not; empty if none can be determined."""

def cache_refusal() -> str:
    """Why the existing folder of the cache is not trusted, or its limit is invalid; empty if it is used."""

def make_cache() -> None:
    """Creates the cache's folder, for its owner only, if it is missing. Raises RuntimeError if it can't be used."""

def clear_cache() -> tuple[int, int]:
    """Removes the kernels from the cache; returns how many files and bytes. Raises RuntimeError if it can't."""

def sources_key() -> str:
    """A hash of the device sources and the table of tile rows, 32 hexadecimal digits."""

def tune(rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces the tile rows that take precedence over the table's: gpu, family, pass, head_dim, and TILE_FIELDS."""

def tile_row(*, arch: int, pass_: str, head_dim: int, gpu: str = "", functions: bool = False) -> dict[str, Any]:
    """family, row, tuned and most_shared_bytes of a plain call, or of one with functions. Raises ValueError if no row
    serves it."""

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
    """As `build_kernels`, for one kernel with the given tile row."""
