"""``doctor``: what is here, which implementation serves what, and whether forward and backward are right.

Nothing that is missing makes it raise: a machine without a GPU, a driver or NVRTC is a healthy machine whose
attention runs elsewhere. It is unhealthy when a result is wrong, when a call fails, or when a GPU that the kernels
serve can't be given any.
"""

import dataclasses
import os
import pathlib
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

import jax_flash
from jax_flash import _core, _dtypes, _explain, _registration
from jax_flash._attention import attention
from jax_flash._table import table

_PLATFORMS = ("cpu", "cuda")
_DTYPES = _dtypes.INPUTS

# Small, but no length is a multiple of a tile, heads are grouped and the mask cuts through a tile.
_BATCH, _Q_LENGTH, _KV_LENGTH, _Q_HEADS, _KV_HEADS, _HEAD_DIM = 2, 133, 147, 4, 2, 40

# The project's tolerance rule: at most these times the error of plain attention in the same dtype, plus a few units
# of the result dtype's epsilon times the magnitude of the result. Against float64 itself the plain error is zero, so
# that the units must leave room for both roundings.
_FACTORS = {"out": 2.0, "lse": 2.0, "dquery": 3.0, "dkey": 3.0, "dvalue": 3.0}
_UNITS = {"float16": 2, "bfloat16": 2, "float32": 8, "float64": 64}


@dataclasses.dataclass(frozen=True)
class Check:
    """One forward and backward on one device in one dtype.

    Attributes:
      name: device and dtype.
      implementation: which one served it.
      worst: the largest error of a result, as a fraction of what is allowed.
      failure: what is wrong; None when nothing is.
    """

    name: str
    implementation: str
    worst: float
    failure: str | None


def examine() -> bool:
    """Prints the report, ending in one line of verdict. True when all is well."""
    problems: list[str] = []
    status = _registration.cuda_status()
    devices = {name: found for name in _PLATFORMS if (found := _devices(name))}

    print(f"jax_flash {jax_flash.__version__}")
    print(table(_versions(status, problems), indent="  "))
    print("\ndevices")
    print(table([_describe(device, status) for found in devices.values() for device in found], indent="  "))
    if status["devices"] and "cuda" not in devices:
        print("  a GPU is here that JAX doesn't see: install jax_flash[cuda12] or jax_flash[cuda13]")
    if "cuda" in devices and (reason := _kernels_missing(status)):
        print(f"  the CUDA kernels can't be used: {reason}")
        problems.append(f"the CUDA kernels can't be used: {reason}")

    print("\nimplementation that serves a call")
    served = [[name, *(_explain.choose(None, name, _call(dtype)) for dtype in _DTYPES)] for name in devices]
    print(table([["platform", *_DTYPES], *served], indent="  "))

    print("\nforward and backward against the reference in float64; the largest error as a fraction of what is allowed")
    checks = []
    for name, found in devices.items():
        for device in found:
            for dtype in _DTYPES:
                check = _check(device, name, dtype)
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


def _devices(name: str) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=name)
    except RuntimeError:  # JAX's word for a backend that is not there
        return []


def _versions(status: dict[str, Any], problems: list[str]) -> list[list[str]]:
    library, runtime = (".".join(map(str, v)) for v in (_core.FFI_API_VERSION, _registration.runtime_ffi_version()))
    try:
        isa = _core.cpu_isa()
    except RuntimeError as error:
        isa = f"unusable: {error}"
        problems.append(f"CPU: {error}")
    rows = [
        ["python", f"{platform.python_version()}, {sys.platform} {platform.machine()}"],
        ["jax", f"{jax.__version__}, jaxlib {jaxlib.version.__version__}"],
        ["FFI API", f"{library} in jax_flash, {runtime} in jaxlib"],
        ["CPU", f"{isa}, {os.cpu_count()} cores"],
        ["CUDA driver", status["driver"] or f"none: {status['driver_error'] or 'no reason given'}"],
        ["NVRTC", ", ".join(status["nvrtc"]) or f"none: {status['nvrtc_error'] or 'no reason given'}"],
        ["kernel cache", _cache(status["cache_dir"])],
    ]
    rows += [["prebuilt kernels", folder] for folder in _registration.prebuilt_dirs()]
    return rows


def _cache(folder: str) -> str:
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


def _describe(device: jax.Device, status: dict[str, Any]) -> list[str]:
    if device.platform == "cpu":
        return [f"cpu:{device.id}", device.device_kind]
    capability = getattr(device, "compute_capability", "unknown")
    # The driver and JAX count the devices of this process alike.
    known = dict(enumerate(status["devices"])).get(device.local_hardware_id, {})
    family = f"kernels of {known['family']}" if known.get("family") else "no kernels of this package"
    return [f"cuda:{device.id}", f"{device.device_kind}, compute capability {capability}, {family}"]


def _kernels_missing(status: dict[str, Any]) -> str | None:
    """Why GPUs that have a family of kernels can't be given any; None for GPUs without one, which xla serves."""
    if not all(device["family"] for device in status["devices"]):
        return None
    return _explain.obstacle("cuda", "cuda", _call("bfloat16"))


def _call(dtype: str) -> _explain.Call:
    return _explain.Call(dtype, _HEAD_DIM, _HEAD_DIM)


def _check(device: jax.Device, platform_name: str, dtype: str) -> Check:
    name = f"{platform_name}:{device.id} {dtype}"
    implementation = _explain.choose(None, platform_name, _call(dtype))
    try:
        # float64 is off in JAX by default; the reference needs it, and so do the calls in float64. And by default JAX
        # multiplies float32 as TF32 on a GPU, which is no fault of the implementation that is checked here.
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            worst, which = _worst_error(device, dtype)
    except Exception as error:  # whatever it is, the report goes on and the verdict names it
        message = str(error).strip().splitlines() or [""]
        return Check(name, implementation, float("nan"), f"{type(error).__name__}: {message[0]}")
    # Not worst > 1, which a NaN would pass.
    failure = None if worst <= 1 else f"wrong {which}: its error is {worst:.3g} times what is allowed"
    return Check(name, implementation, worst, failure)


def _worst_error(device: jax.Device, dtype: str) -> tuple[float, str]:
    rng = np.random.default_rng(0)
    queries = (_BATCH, _Q_LENGTH, _Q_HEADS, _HEAD_DIM)
    keys = (_BATCH, _KV_LENGTH, _KV_HEADS, _HEAD_DIM)
    arrays = [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in (queries, keys, keys, queries)]
    arrays.append(rng.standard_normal((_BATCH, _Q_HEADS, _Q_LENGTH)).astype(_dtypes.accumulation_dtype(dtype)))

    got = _results(device, arrays, None)
    plain = _results(device, arrays, "reference")
    exact = _results(device, [x.astype(np.float64) for x in arrays], "reference")
    errors = {}
    for name, factor in _FACTORS.items():
        exact_result = np.asarray(exact[name])
        result_dtype = got[name].dtype  # lse of float16 is float32
        allowed = factor * _distance(plain[name], exact_result)
        allowed += _UNITS[result_dtype.name] * float(jnp.finfo(result_dtype).eps) * float(np.abs(exact_result).max())
        errors[name] = _distance(got[name], exact_result) / allowed
    # A NaN is the worst of all.
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return errors[worst], worst


def _distance(result: jax.Array, exact: np.ndarray[Any, Any]) -> float:
    return float(np.abs(np.asarray(result).astype(np.float64) - exact).max())


def _results(device: jax.Device, arrays: list[Any], implementation: str | None) -> dict[str, jax.Array]:
    """Forward and backward on ``device``, through out and lse."""

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array, dlse: jax.Array) -> tuple[Any, ...]:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
            return attention(
                query,
                key,
                value,
                causal=True,
                q_offset=_KV_LENGTH - _Q_LENGTH,
                return_lse=True,
                implementation=implementation,
            )

        results, pullback = jax.vjp(attend, query, key, value)
        return (*results, *pullback((dout, dlse)))

    results = run(*(jax.device_put(x, device) for x in arrays))
    return dict(zip(_FACTORS, results, strict=True))
