"""Which implementation serves a call, and why not the others.

Used by the lowering of the primitives, which knows the platform, and by `explain`.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np

from jax_flash._call.options import Implementation, Options
from jax_flash._functions import cpu, cuda, exact
from jax_flash._functions.trace import MOST_CAPTURED, Functions, captured_name
from jax_flash._native import _core, origins, registration

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

KERNELS = {"cpu": "cpu", "cuda": "cuda"}
"""The implementations that are kernels, and the platform of each."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What the choice of an implementation depends on."""

    dtype: str
    head_dim: int
    value_head_dim: int
    highest_precision: bool = False
    functions: Functions | None = None
    gradients: tuple[int, ...] = ()
    """The captured arrays whose gradients are wanted."""
    deterministic: bool = False
    """Sums of gradients have one order."""
    row_bias: bool = False
    """The gradient of a bias is wanted that all keys of a row share, beside a score function: without one it is known
    from lse's."""

    @classmethod
    def of(
        cls,
        query: Any,
        value: Any,
        options: Options,
        gradients: Sequence[str] = (),
        dims: Mapping[str, str] | None = None,
    ) -> "Call":
        """``dims``: those of the operands, by name."""
        captured = {captured_name(i): i for i in range(MOST_CAPTURED)}
        return cls(
            np.dtype(query.dtype).name,
            query.shape[-1],
            value.shape[-1],
            options.highest_precision,
            options.functions,
            tuple(captured[name] for name in gradients if name in captured),
            options.separate_dq,
            "bias" in gradients and (dims or {}).get("bias", "")[-1:] == "1",
        )


def _unprintable(call: Call) -> str | None:
    """What is in the way of compiling the functions of a call into CUDA's kernels; None: nothing."""
    if call.functions is None:
        return None
    if call.gradients and call.deterministic:
        elements = sum(math.prod(shape) for i, shape in call.functions.shapes.items() if i in call.gradients)
        if elements > exact.MOST_ELEMENTS:
            return (
                f"deterministic_backward=True and gradients of captured arrays of {elements} elements, of which their "
                f"sums without an order have room for {exact.MOST_ELEMENTS}"
            )
    return cuda.unprintable(call.functions, call.gradients)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A kind of call that an implementation does not serve."""

    refuses: str
    """What is refused, in the words of docs/options.md."""
    applies: Callable[[Call], bool]
    reason: Callable[[Call], str]


CUDA_DTYPES = ("float16", "bfloat16", "float32")
CUDA_HEAD_DIM = 256


def _beyond_cpu(call: Call) -> str | None:
    """What of the functions of a call the CPU's kernels can't evaluate; None: nothing."""
    if call.functions is None:
        return None
    if call.dtype == "float64":
        return "float64"
    return cpu.unprintable(call.functions, call.gradients)


RULES: dict[str, tuple[Rule, ...]] = {
    "cpu": (
        Rule(
            "a score_mod or mask_mod with operations that it does not know, or in float64",
            lambda call: _beyond_cpu(call) is not None,
            lambda call: f"its kernels don't evaluate functions with {_beyond_cpu(call)}",
        ),
    ),
    "cuda": (
        Rule(
            "a score_mod or mask_mod with operations that it does not know",
            lambda call: _unprintable(call) is not None,
            lambda call: f"its kernels can't be compiled with {_unprintable(call)}",
        ),
        Rule(
            "float64",
            lambda call: call.dtype not in CUDA_DTYPES,
            lambda call: f"its kernels take {', '.join(CUDA_DTYPES)}, query has dtype {call.dtype}",
        ),
        Rule(
            f"a head_dim of query or value above {CUDA_HEAD_DIM}",
            lambda call: max(call.head_dim, call.value_head_dim) > CUDA_HEAD_DIM,
            lambda call: (
                f"its kernels take a head_dim of at most {CUDA_HEAD_DIM}, query has {call.head_dim} and value "
                f"{call.value_head_dim}"
            ),
        ),
    ),
}
"""For each implementation, what it does not serve on any machine. It serves everything else that `attention` takes."""


@functools.cache
def _cuda_devices() -> tuple[Any, ...]:
    try:
        return tuple(jax.local_devices(backend="cuda"))
    except RuntimeError:  # raised by JAX if there is no such backend
        return ()


def has_gpu() -> bool:
    return bool(_cuda_devices())


@functools.cache
def has_old_gpu() -> bool:
    """Whether a CUDA device here is served by a family that takes float16 only, to which other dtypes are converted."""
    return bool(_cuda_devices()) and any(
        device["family"] in _core.FLOAT16_FAMILIES for device in registration.cuda_status()["devices"]
    )


_DETERMINISTIC_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def deterministic_by_default() -> bool:
    """Whether gradients are summed in a fixed order by default: if XLA_FLAGS request determinism."""
    told: dict[str, bool] = {}  # the last occurrence of a flag counts
    for word in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = word.partition("=")
        if name in _DETERMINISTIC_FLAGS:
            told[name] = value.lower() in ("", "true", "1")
    return any(told.values())


@functools.cache
def separate_dq(largest_head_dim: int) -> bool:
    """Whether dquery has a pass of its own on every CUDA device here, even with ``deterministic_backward=False``."""
    return bool(_cuda_devices()) and all(
        _core.separate_dq(arch=device["compute_capability"], largest_head_dim=largest_head_dim)
        for device in registration.cuda_status()["devices"]
        if device["family"]
    )


def orders_dq(arch: int | None, sizes: Mapping[str, Any]) -> bool:
    """Whether the kernels of a backward should sum dquery in a fixed order without a pass of its own, because that was
    asked for or is faster, on the GPU it is lowered for or on every CUDA device here."""
    return not _in_passes.get() and all_serve(arch, lambda each: _core.orders_dq(arch=each, **sizes))


_in_passes: contextvars.ContextVar[bool] = contextvars.ContextVar("jax_flash_in_passes", default=False)


@contextlib.contextmanager
def in_passes() -> Iterator[None]:
    """Backwards lowered within sum dquery in a fixed order by a pass of its own alone: so it can be timed."""
    token = _in_passes.set(True)
    try:
        yield
    finally:
        _in_passes.reset(token)


def lists_keys(arch: int | None, sizes: Mapping[str, Any]) -> bool:
    """Whether the kernels of a call take lists of keys, on the GPU it is lowered for or on every CUDA device here."""
    return all_serve(arch, lambda each: _core.lists_keys(arch=each, **sizes))


def all_serve(arch: int | None, serves: Callable[[int], bool]) -> bool:
    """Whether kernels of this compute capability, or of every CUDA device here, do something."""
    found = [arch] if arch else [x["compute_capability"] for x in registration.cuda_status()["devices"] if x["family"]]
    return bool(found) and all(map(serves, found))


@functools.cache
def _cuda_unavailable() -> str | None:
    """Why this machine's CUDA devices can't run the kernels; None if they can, or if there are no devices."""
    if not _cuda_devices():
        return None
    status = registration.cuda_status()
    if status["driver_error"]:
        return f"no CUDA driver: {status['driver_error']}"
    for device in status["devices"]:
        arch = device["compute_capability"]
        if not device["family"]:
            return f"{device['name']} has compute capability {origins.name(arch)}, the kernels need 7.0 or newer"
        lack = origins.uncompiled(arch, status)
        if lack and not any(arch in x.usable for x in origins.prebuilt(registration.prebuilt_dirs(), [arch])):
            return lack
    return None


def _beyond_room(call: Call) -> str | None:
    """Why the shared memory of this machine's CUDA devices is too small for a call; None if it suffices."""
    head_dim = max(call.head_dim, call.value_head_dim)
    if not call.highest_precision or not _cuda_devices():
        return None
    for device in registration.cuda_status()["devices"]:
        arch = device["compute_capability"]
        limit = _core.largest_head_dim(arch=arch, highest_precision=True)
        if head_dim > limit:
            return (
                f'its kernels for float32 with precision="highest" take a head_dim of at most {limit} on '
                f"{device['name']}, compute capability {origins.name(arch)}, query has {call.head_dim} and value "
                f"{call.value_head_dim}"
            )
    return None


def obstacle(implementation: str, platform: str, call: Call) -> str | None:
    """Why ``implementation`` can't serve a call that is lowered for ``platform``; None if it can."""
    wanted = KERNELS.get(implementation)
    if wanted is not None and platform != wanted:
        return f"it runs on platform {wanted!r}, the call on {platform!r}"
    if wanted is not None and registration.UNAVAILABLE:
        return registration.UNAVAILABLE
    if implementation == "cuda" and call.row_bias:
        return "its kernels have no gradient of a bias of shape (..., 1) beside score_mod"
    for rule in RULES.get(implementation, ()):
        if rule.applies(call):
            return rule.reason(call)
    return (_cuda_unavailable() or _beyond_room(call)) if implementation == "cuda" else None


def choose(implementation: str | None, platform: str, call: Call) -> str:
    """The implementation that serves a call lowered for ``platform``.

    Raises:
      NotImplementedError: ``implementation`` is named and does not serve the call.
    """
    if implementation is None:
        return next(name for name in IMPLEMENTATIONS if obstacle(name, platform, call) is None)
    if reason := obstacle(implementation, platform, call):
        raise NotImplementedError(f"implementation={implementation!r} does not serve this call: {reason}")
    return implementation


def check_implementation(implementation: object, query: Any, value: Any, options: Options) -> None:
    """Raises, when a call is traced, if the named implementation can't serve it on any platform of this process."""
    if implementation is None:
        return
    if not isinstance(implementation, str):
        raise TypeError(f"implementation must be a string or None, got {type(implementation).__name__}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation == "cuda" and not _cuda_devices():
        raise NotImplementedError(
            "implementation='cuda' does not serve this call: JAX has no CUDA device here "
            "(implementation=None can be lowered for CUDA anywhere)"
        )
    choose(implementation, KERNELS.get(implementation, "any"), Call.of(query, value, options))
