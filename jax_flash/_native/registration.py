"""Finds the compiled library, checks that it fits this jaxlib, and registers its handlers with XLA.

An FFI library that is newer than the running jaxlib makes the whole CPU backend fail to start, so the versions are
compared before anything is registered. If they can't be, nothing is registered, and plain JAX serves every call.
"""

import atexit
import functools
import importlib.util
import os
import pathlib
import re
from typing import Any

import jax
import jax.export
import jaxlib.version

try:
    from jax_flash._native import _core
except ImportError as error:
    if importlib.util.find_spec("jax_flash._native._core") is None:
        package = pathlib.Path(__file__).parent.parent
        raise ImportError(
            f"jax_flash in {package} has no compiled library for this Python: it is a source tree, or was built for "
            f"another Python. Install it by pip, and import it from outside of the source tree"
        ) from error
    raise

from jax_flash._native import origins, private, tuned, warn  # only if there is a library

FORWARD_TARGET = "jax_flash_forward"
BACKWARD_TARGET = "jax_flash_backward"
SCALE_TARGET = "jax_flash_scale"
STUDY_TARGET = "jax_flash_study"

EXPORT_SAFE_TARGETS: tuple[jax.export.DisabledSafetyCheck, ...] = tuple(
    map(jax.export.DisabledSafetyCheck.custom_call, (FORWARD_TARGET, BACKWARD_TARGET, SCALE_TARGET))
)
"""Makes ``jax.export`` accept this package's custom calls, which are stable across versions of JAX:

``jax.export.export(jax.jit(f), disabled_checks=jax_flash.EXPORT_SAFE_TARGETS)``

Import jax_flash before loading an exported program: that registers the calls with XLA.
"""


def _version(header: str, prefix: str, names: tuple[str, str], include_dir: pathlib.Path | None) -> tuple[int, int]:
    """Major and minor version that a header of the running jaxlib states."""
    path = (include_dir or pathlib.Path(jax.ffi.include_dir())) / "xla/ffi/api" / header
    text = path.read_text(encoding="utf-8")
    major, minor = (re.search(rf"#define {prefix}_{name}\s+(\d+)", text) for name in names)
    if not (major and minor):
        raise ValueError(f"{path} does not state the version of jaxlib {jaxlib.version.__version__}")
    return int(major[1]), int(minor[1])


def runtime_ffi_version(include_dir: pathlib.Path | None = None) -> tuple[int, int]:
    """The FFI API version of the running jaxlib, read from the headers that it ships.

    Raises OSError if the header can't be read, ValueError if it doesn't state the version.
    """
    return _version("c_api.h", "XLA_FFI_API", ("MAJOR", "MINOR"), include_dir)


def runtime_record_version(include_dir: pathlib.Path | None = None) -> tuple[int, int] | None:
    """The version of the running jaxlib's interface for recording kernels into CUDA graphs; None if it has none."""
    try:
        return _version("record_c_api.h", "XLA_FFI_Extension_Record", ("MajorVersion", "MinorVersion"), include_dir)
    except (OSError, ValueError):
        return None


def check_ffi_version(library: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raises ImportError if a library built for FFI API ``library`` cannot run on ``runtime``."""
    if library[0] != runtime[0] or library[1] > runtime[1]:
        raise ImportError(
            f"jax_flash was built for XLA FFI API {library[0]}.{library[1]}, but the running jaxlib "
            f"{jaxlib.version.__version__} has {runtime[0]}.{runtime[1]}: install a newer jaxlib, or rebuild jax_flash "
            f"against this one"
        )


def asked_to_record() -> bool:
    """Whether JAX_FLASH_RECORD_GRAPHS=1 requests recording kernels into CUDA graphs."""
    return os.environ.get("JAX_FLASH_RECORD_GRAPHS") == "1"


def records_kernels(include_dir: pathlib.Path | None = None) -> bool:
    """Whether kernels are recorded into XLA's CUDA graphs; otherwise XLA captures their launches.

    XLA calls that interface unstable, so it is only used with JAX_FLASH_RECORD_GRAPHS=1. The library declares it itself
    (csrc/ffi/recording.h), independent of the headers that it was built with, and uses it only with the versions that
    these declarations are known to match.
    """
    if not asked_to_record():
        return False
    recorded = runtime_record_version(include_dir)
    return recorded is not None and (runtime_ffi_version(include_dir), recorded) in _core.RECORD_API_VERSIONS


def nvrtc_paths() -> list[str]:
    """NVRTC libraries of NVIDIA's wheels on this Python's path, newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = {path for root in roots for path in root.glob("*/lib/libnvrtc.so.*") if ".alt." not in path.name}
    return [str(path) for path in sorted(found, key=lambda p: (p.name, str(p)), reverse=True)]


# Installed data is next to the compiled library; in an editable install that is not the folder of this file.
_INSTALLED = pathlib.Path(_core.__file__).parent.parent


SOURCES = _INSTALLED / "kernels"
"""The device sources."""


def configure(sources: pathlib.Path) -> None:
    """Tells the library its paths; kernels are compiled from the folder ``sources``."""
    folders = prebuilt_dirs()
    _core.configure_cuda(
        source_dir=str(sources),
        prebuilt_dirs=folders,
        nvrtc_paths=nvrtc_paths(),
        packed=functools.partial(origins.unpack, folders),
    )


def prebuilt_dirs() -> list[str]:
    """Folders of ahead-of-time compiled kernels: the user's own first, then the wheel's."""
    own = os.environ.get("JAX_FLASH_PREBUILT_DIR")
    shipped = _INSTALLED / "prebuilt"
    return ([own] if own else []) + ([str(shipped)] if shipped.is_dir() else [])


def cuda_status() -> dict[str, Any]:
    """The status of CUDA: driver, NVRTC, cache folder, devices with their kernel family."""
    status: dict[str, Any] = _core.cuda_status()
    return status


def _register() -> str | None:
    """Registers the handlers, or returns why they can't be called or can't be known to run."""
    if private.MISSING:
        return private.MISSING
    try:
        runtime = runtime_ffi_version()
    except (OSError, ValueError) as error:
        return f"the FFI API version of the running jaxlib is unknown: {error}"
    check_ffi_version(_core.FFI_API_VERSION, runtime)
    for platform, handlers in _core.handlers(records=records_kernels()).items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    return None


UNAVAILABLE = _register()
"""Why no kernel of this package can be called in this process; None if they can."""
if UNAVAILABLE:
    warn.warn(f'plain JAX (implementation "xla") serves every call, for the kernels can\'t be called: {UNAVAILABLE}')
configure(SOURCES)
atexit.register(_core.finish_loading)
tuned.use_stored()
