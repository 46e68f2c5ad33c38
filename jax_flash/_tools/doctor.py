"""``doctor``: versions and devices, which implementation serves what, and whether forward and backward are right.

It never raises for missing components: a machine without a GPU, a driver or NVRTC is healthy, and other implementations
serve its attention. It is unhealthy if a result is wrong, if a call fails, or if there are no kernels for a GPU that
they should serve.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version

import jax_flash
from jax_flash._call import dtypes
from jax_flash._implementations import choice
from jax_flash._native import _core, origins, registration
from jax_flash._native import tuned as _tuned
from jax_flash._tools import accuracy
from jax_flash._tools.table import table

_PLATFORMS = ("cpu", "cuda")
_DTYPES = dtypes.INPUTS

_HEAD_DIM = 40


@dataclasses.dataclass(frozen=True)
class Machine:
    """Everything that decides which kernels a GPU gets; tests make up other machines.

    Attributes:
      status: as `registration.cuda_status` returns it.
      devices: JAX's devices by platform.
      prebuilt: the folders of kernels that were built ahead of time.
      cudnn: the version of the cuDNN package; None if it is not installed.
    """

    status: Mapping[str, Any]
    devices: Mapping[str, Sequence[Any]]
    prebuilt: Sequence[origins.Prebuilt] = ()
    cudnn: str | None = None

    @property
    def usable(self) -> dict[int, int]:
        """How many prebuilt kernels there are, by compute capability (70 for 7.0)."""
        counts: dict[int, int] = {}
        for folder in self.prebuilt:
            for arch, count in folder.usable.items():
                counts[arch] = counts.get(arch, 0) + count
        return counts

    def gpu(self, device: Any) -> Mapping[str, Any] | None:
        """The entry of the status record for one of JAX's CUDA devices."""
        # The driver and JAX number the devices of this process in the same order.
        return dict(enumerate(self.status["devices"])).get(device.local_hardware_id)


@dataclasses.dataclass(frozen=True)
class Check:
    """One forward and backward on one device in one dtype.

    Attributes:
      name: device and dtype.
      implementation: which one served it.
      worst: the largest error of a result, as a fraction of what is allowed.
      failure: what is wrong; None if nothing is.
    """

    name: str
    implementation: str
    worst: float
    failure: str | None


def examine() -> bool:
    """Prints the report, which ends in a line with the verdict. Returns True if all is well."""
    here = machine()
    problems: list[str] = []
    print(f"jax_flash {jax_flash.__version__}")
    print(table([*versions(problems), *gpu_versions(here)], indent="  "))
    lines, missing = gpus(here)
    print("\ndevices")
    print("\n".join(f"  {line}" for line in lines))
    problems += missing

    print("\nimplementation that serves a call")
    served = [[name, *(choice.choose(None, name, _call(dtype)) for dtype in _DTYPES)] for name in here.devices]
    print(table([["platform", *_DTYPES], *served], indent="  "))

    print("\nforward and backward against the reference in float64; the largest error as a fraction of what is allowed")
    checks = []
    for name, found in here.devices.items():
        for device in found:
            for dtype in _DTYPES:
                check = _check(device, name, dtype, here)
                checks.append(check)
                verdict = check.failure or f"ok, {check.worst:.2f}"
                print(f"  {check.name:<16}  {check.implementation:<5} {verdict}", flush=True)
    problems += [f"{check.name}: {check.failure}" for check in checks if check.failure]
    if not checks:
        problems.append("JAX has neither a CPU nor a CUDA device")

    passed = sum(check.failure is None for check in checks)
    print(f"\nverdict: {'unhealthy' if problems else 'healthy'}, {passed} of {len(checks)} checks passed", end="")
    print("".join(f"; {problem}" for problem in problems))
    return not problems


def machine() -> Machine:
    """The machine that this process runs on."""
    # Initialises JAX's devices first: that opens its CUDA libraries, among which the loader finds NVRTC.
    devices = {name: found for name in _PLATFORMS if (found := _devices(name))}
    status = registration.cuda_status()
    arches = {device["compute_capability"] for device in status["devices"]}
    return Machine(status, devices, origins.prebuilt(registration.prebuilt_dirs(), arches), _cudnn())


def _devices(name: str) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=name)
    except RuntimeError:  # raised by JAX if there is no such backend
        return []


def _cudnn() -> str | None:
    for package in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions(problems: list[str]) -> list[list[str]]:
    """Rows on Python, JAX and the CPU; adds what is wrong with them to ``problems``."""
    if registration.UNAVAILABLE:
        problems.append(f"the kernels can't be called: {registration.UNAVAILABLE}")
    library = ".".join(map(str, _core.FFI_API_VERSION))
    try:
        version = registration.runtime_ffi_version()
        runtime = ".".join(map(str, version))
        # An import has compared them: a runtime takes libraries of its major version that are not newer.
        fits = ", compatible" if version != _core.FFI_API_VERSION else ""
    except (OSError, ValueError):
        runtime, fits = "none that is known", ""
    try:
        isa = _core.cpu_isa()
    except RuntimeError as error:
        isa = f"unusable: {error}"
        problems.append(f"CPU: {error}")
    return [
        ["python", f"{platform.python_version()}, {sys.platform} {platform.machine()}"],
        ["jax", f"{jax.__version__}, jaxlib {jaxlib.version.__version__}{_jax_fits()}"],
        ["FFI API", f"{library} in jax_flash, {runtime} in jaxlib{fits}"],
        ["CUDA graphs", _graphs()],
        ["CPU", f"{isa}, {os.cpu_count()} cores"],
    ]


def _jax_fits() -> str:
    """jax refuses to be imported with a jaxlib that it can't use, so others that differ do no harm."""
    return ", compatible" if jax.__version__ != jaxlib.version.__version__ else ""


def _graphs() -> str:
    if registration.UNAVAILABLE:
        return "no kernels to capture"
    if registration.records_kernels():
        return "forward kernels recorded as XLA's own nodes"
    version = registration.runtime_record_version()
    if not registration.asked_to_record():
        return "calls captured"
    if version is None:
        return "calls captured: this jaxlib can't record kernels (0.11.2 can)"
    return f"calls captured: how this jaxlib records kernels ({'.'.join(map(str, version))}) is not known to jax_flash"


def gpu_versions(here: Machine) -> list[list[str]]:
    """Rows on driver, NVRTC, cache and prebuilt kernels, which the CUDA kernels need."""
    status = here.status
    rows = [
        ["CUDA driver", _driver(status)],
        ["NVRTC", ", ".join(status["nvrtc"]) or f"none: {status['nvrtc_error'] or 'no reason given'}"],
    ]
    rows += [["cuDNN", here.cudnn]] if here.cudnn else []
    rows += [["kernel cache", _cache(status["cache_dir"], status["cache_problem"])]]
    rows += [["prebuilt kernels", str(folder)] for folder in here.prebuilt]
    try:
        tuned = _tuned.load()
        rows += [["tuned tile row", f"{row}{_where(row, status['devices'])}"] for row in tuned]
    except ValueError as error:
        rows.append(["tuned tile rows", str(error)])
    return rows


def _driver(status: Mapping[str, Any]) -> str:
    """Its CUDA version, and which NVRTC of another version compiles for it: any of its major version or an older one
    does, by CUDA's rules of compatibility."""
    if not status["driver"]:
        return f"none: {status['driver_error'] or 'no reason given'}"
    versions = [entry.split(" ", 1)[0] for entry in status["nvrtc"]]
    fitting = [v for v in versions if v != status["driver"] and _version(v)[:1] <= _version(status["driver"])[:1]]
    return status["driver"] + (f", compatible with NVRTC {' and '.join(fitting)}" if fitting else "")


def _where(row: _tuned.TunedRow, devices: Iterable[Mapping[str, Any]]) -> str:
    served = any((device["name"], device["family"]) == (row.gpu, row.family) for device in devices)
    return "" if served else " (not used: no such GPU here, or served by another family)"


def _cache(folder: str, problem: str) -> str:
    if problem:
        return f"not used, so that every process compiles its kernels: {problem}"
    if not folder:
        return "off, or no folder to keep it in"
    sizes = []
    for path in pathlib.Path(folder).rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except OSError:  # another process may remove or replace entries at any time
            continue
    return f"{folder}, {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"


def gpus(here: Machine) -> tuple[list[str], list[str]]:
    """Lines on JAX's devices and the origin of their kernels, and the problems that were found."""
    rows, problems = [], []
    for device in (device for found in here.devices.values() for device in found):
        text, problem = _describe(device, here)
        rows.append([f"{'cpu' if device.platform == 'cpu' else 'cuda'}:{device.id}", text])
        problems += [problem] if problem else []
    lines = table(rows).splitlines() if rows else []

    if "cuda" in here.devices and here.status["driver_error"]:
        problems.append(f"the CUDA kernels can't be used: {here.status['driver_error']}")
    known = {device["compute_capability"] for device in here.status["devices"]}
    if known and "cuda" not in here.devices:
        extras = " or ".join(f"jax_flash[cuda{cuda}]" for cuda in origins.cuda_versions(min(known)))
        lines.append(f"a GPU is here that JAX doesn't see: install {extras}")
    if here.cudnn and min(known, default=75) < 75 and _version(here.cudnn) >= _CUDNN_WITHOUT_VOLTA:
        lines.append(
            f"cuDNN {here.cudnn} no longer knows compute capability {origins.name(min(known))}, which JAX may need it "
            f"for: install jax_flash[volta], or nvidia-cudnn-cu12<9.11"
        )
    lines += problems
    return lines, problems


_CUDNN_WITHOUT_VOLTA = (9, 11)
"""The first cuDNN whose release notes drop GPUs older than Turing."""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _describe(device: Any, here: Machine) -> tuple[str, str | None]:
    """A device as text, and the problem with its kernels; none for a GPU without a family, which xla serves."""
    if device.platform == "cpu":
        return device.device_kind, None
    gpu = here.gpu(device)
    capability = getattr(device, "compute_capability", "unknown")
    text = f"{device.device_kind}, compute capability {capability}"
    if not gpu or not gpu["family"]:
        return f"{text}, no kernels of this package", None
    arch = gpu["compute_capability"]
    lack, count = origins.uncompiled(arch, here.status), here.usable.get(arch, 0)
    prebuilt, compiled = f"{count} prebuilt", f"compiled by NVRTC {origins.nvrtc_for(arch, here.status['nvrtc'])}"
    text = f"{text}, kernels of {gpu['family']}"
    if not lack:
        return f"{text}: {f'{prebuilt}, the others {compiled}' if count else compiled}", None
    name = f"cuda:{device.id}"
    if count:
        return f"{text}: {prebuilt}, no others", f"{name}: calls that the prebuilt kernels don't serve fail: {lack}"
    return f"{text}: none", f"{name}: the CUDA kernels can't be used: {lack}"


def _call(dtype: str) -> choice.Call:
    return choice.Call(dtype, _HEAD_DIM, _HEAD_DIM)


def _problem(dtype: str, prebuilt_only: bool) -> accuracy.Problem:
    """A small problem: lengths that are no multiples of a tile, grouped heads, a mask that cuts through tiles."""
    if prebuilt_only:  # a problem for which `kernels build` has a kernel
        return accuracy.Problem(dtype, 133, 147, 4, 2, head_dim=64, causal=True, precision="default")
    return accuracy.Problem(dtype, 133, 147, 4, 2, _HEAD_DIM, causal=True, q_offset=None)


def _check(device: jax.Device, platform_name: str, dtype: str, here: Machine) -> Check:
    name = f"{platform_name}:{device.id} {dtype}"
    implementation = choice.choose(None, platform_name, _call(dtype))
    gpu = here.gpu(device) if platform_name == "cuda" else None
    prebuilt_only = bool(gpu and gpu["family"] and origins.uncompiled(gpu["compute_capability"], here.status))
    try:
        worst = accuracy.worst(accuracy.measure(_problem(dtype, prebuilt_only), device, judge=device))
    except Exception as error:  # for any error the report continues, and the verdict names it
        return Check(name, implementation, float("nan"), first_line(error))
    return Check(name, implementation, worst.ratio, None if worst.right else str(worst))


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    message = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {message[0]}"
