"""`explain`: which implementation serves a call, in a form to read."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_flash._attention import attention
from jax_flash._call import checks, dtypes
from jax_flash._call.options import Implementation, Options, Precision
from jax_flash._context import choice as _context
from jax_flash._context.choice import place_of
from jax_flash._context.run import sizes_of
from jax_flash._functions import arguments as _functions
from jax_flash._functions import cpu, cuda
from jax_flash._implementations import choice
from jax_flash._native import registration
from jax_flash._native import tuned as _tuned

PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
"""The values of explain()'s ``platform``. Plugins add other platforms to JAX, which its default device may be on."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation serves a call.

    Attributes:
      implementation: the name of the one that serves it.
      platform: the platform that the answer is for.
      obstacles: for every implementation that can't serve it, the reason.
      tuned: tile rows of ``bench tune --store`` for this GPU and head_dim: calls with no option but ``causal`` and
        ``deterministic_backward`` use them instead of the table's.
      split: if the query is sharded over devices, which of its shardings the kernels keep and what is gathered.
      source: with ``source=True``, what the platform's kernels have of ``score_mod``, ``mask_mod`` and ``block_mask``:
        what CUDA's are compiled with, or what a CPU's evaluate; "" if there are none, or if they can't be printed, for
        which ``obstacles`` has the reason.
      gradients: why the backward pass is served by "xla" although the forward is not, where it is: that of gradients of
        arrays that ``score_mod`` captured; "" if both are served alike.
      context: with ``context``, which schedule serves the call and why others can't, what travels and how many bytes
        each device sends, and which options of XLA's compiler would hide that behind the kernels but are off.
    """

    implementation: str
    platform: str
    obstacles: dict[str, str]
    tuned: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    source: str = ""
    gradients: str = ""
    context: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"on {self.platform}, attention is served by {self.implementation!r}"]
        for name in choice.IMPLEMENTATIONS:
            if name in self.obstacles:
                lines.append(f"  {name}: no, {self.obstacles[name]}")
            elif name == self.implementation:
                lines.append(f"  {name}: yes")
            else:
                lines.append(f"  {name}: could, when asked for by name")
        lines += [f"  tuned: {row}" for row in self.tuned]
        lines += [f"  split: {part}" for part in self.split]
        lines += [f"  gradients of captured arrays: by 'xla', {self.gradients}"] if self.gradients else []
        lines += [f"  context: {part}" for part in self.context]
        lines += [self.source] if self.source else []
        return "\n".join(lines)


def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    platform: str | None = None,
    implementation: Implementation | None = None,
    precision: Precision | None = None,
    source: bool = False,
    **options: Any,
) -> Explanation:
    """Says which implementation serves ``attention(query, key, value, ...)``, and why not the others.

    Takes the arguments of `attention`, checks them the same way and computes nothing; the arrays may be
    ``jax.ShapeDtypeStruct``.

    Args:
      query: as for `attention`, also a ``jax.ShapeDtypeStruct``; likewise ``key`` and ``value``. Its sharding, if it
        has one, says over which devices the call is to be split.
      key: see ``query``.
      value: see ``query``.
      platform: "cpu", "cuda" (or "gpu", which means it), "rocm" or "tpu"; None means that of JAX's default device.
      implementation: as for `attention`.
      precision: as for `attention`.
      source: also say what kernels are compiled with, or evaluate, of ``score_mod``, ``mask_mod`` and ``block_mask``.
      **options: the other keyword arguments of `attention`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `attention`.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    precise = checks.highest_precision(precision, shapes[0].dtype)
    attend = functools.partial(attention, implementation=implementation, precision=precision, **options)
    jax.eval_shape(attend, *shapes)
    if platform is None:
        # A device, the name of a platform, or None; JAX defines this setting at run time, so type checkers don't know
        # it.
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        platform = getattr(device, "platform", device) or jax.default_backend()
    elif platform not in PLATFORMS:
        raise ValueError(f"platform must be None or one of {', '.join(PLATFORMS)}, got {checks.describe(platform)}")
    platform = "cuda" if platform == "gpu" else platform
    functions, _ = _functions.functions_of(
        _functions.Arguments(*(options.get(name) for name in _functions.Arguments._fields)),
        dtypes.accumulation_dtype(shapes[0].dtype),
        (math.prod(query.shape[:-3]), query.shape[-2], query.shape[-3], key.shape[-3]),
        options.get("q_offset", 0),
    )
    place = place_of(options.get("context"))
    schedule = "" if place is None else _schedule(place, shapes, options)
    alibi = options.get("alibi_slopes") is not None and functions is None
    if place is not None and alibi and _context.relocates(schedule, place.context.order):
        functions, _ = _functions.functions_of(  # such a score function ALiBi becomes
            _functions.Arguments(lambda score, b, h, q, kv: score - abs(q - kv).astype(score.dtype)),
            dtypes.accumulation_dtype(shapes[0].dtype),
            (1, 1, 1, 1),
            0,
        )
    call = choice.Call(np.dtype(shapes[0].dtype).name, shapes[0].shape[-1], shapes[2].shape[-1], precise, functions)
    obstacles: dict[str, str] = {
        name: reason for name in choice.IMPLEMENTATIONS if (reason := choice.obstacle(name, platform, call))
    }
    tuned: tuple[str, ...] = ()
    chosen = choice.choose(implementation, platform, call)
    if chosen == "cuda" and choice.has_gpu() and call.head_dim == call.value_head_dim:
        tuned = tuple(map(str, _tuned.in_use(registration.cuda_status()["devices"], call.head_dim)))
    split = _split(query, key, options) if chosen in choice.KERNELS else ()
    printed = ""
    printer: Any = cpu if platform == "cpu" else cuda
    if checks.boolean("source", source) and functions is not None and printer.unprintable(functions) is None:
        printed = printer.source(functions, derives=True)
    context: tuple[str, ...] = ()
    if place is not None:
        context, split = _of_context(place, schedule, shapes, options, platform), ()
    gradients = _of_gradients(chosen, platform, call, options)
    return Explanation(chosen, platform, obstacles, tuned, split, printed, gradients, context)


def _of_gradients(chosen: str, platform: str, call: choice.Call, options: Mapping[str, Any]) -> str:
    """Why gradients of captured arrays are not served as the call is; "" if they are."""
    if chosen not in choice.KERNELS or call.functions is None or call.functions.score is None:
        return ""
    score, deterministic = call.functions.score, options.get("deterministic_backward")
    floats = [
        i
        for i, x in zip(score.captured, score.jaxpr.invars, strict=False)
        if jax.numpy.issubdtype(x.aval.dtype, np.floating)
    ]
    call = dataclasses.replace(
        call,
        gradients=tuple(floats),
        deterministic=choice.deterministic_by_default() if deterministic is None else deterministic,
    )
    return choice.obstacle(chosen, platform, call) or ""


def _schedule(place: _context.Place, shapes: Sequence[jax.ShapeDtypeStruct], options: Mapping[str, Any]) -> str:
    return _context.chosen(place, _sizes(place, shapes), _record(options))[0]


def _record(options: Mapping[str, Any]) -> Options:
    """What a schedule depends on of the options of a call."""
    return Options(causal=False, scale=1.0, dropout_rate=float(options.get("dropout_rate", 0.0)))


def _sizes(place: _context.Place, shapes: Sequence[jax.ShapeDtypeStruct]) -> _context.Sizes:
    return sizes_of(place, *(jax.ShapeDtypeStruct((1, *x.shape[-3:]), x.dtype) for x in shapes))


def _of_context(
    place: _context.Place,
    schedule: str,
    shapes: Sequence[jax.ShapeDtypeStruct],
    options: Mapping[str, Any],
    platform: str,
) -> tuple[str, ...]:
    sizes, batch = _sizes(place, shapes), math.prod(shapes[0].shape[:-3])
    found = _context.travels(schedule, place.devices, sizes, shapes[0].dtype.itemsize, batch)
    order = place.context.order
    lines = [
        f"schedule {schedule!r} over {place.devices} devices along {place.context.axis!r}, order {order!r}",
        f"{_context.TRAVELLING[schedule]}: {_bytes(found['forward'])} sent by each device in the forward pass, "
        f"{_bytes(found['backward'])} in the backward pass, if no other mesh axis splits the call",
        *(f"{name}: no, {reason}" for name, reason in _context.obstacles(place, sizes, _record(options)).items()),
    ]
    if options.get("alibi_slopes") is not None and _context.relocates(schedule, order):
        lines.append(f"alibi_slopes become a score_mod with schedule {schedule!r} and order {order!r}")
    if platform == "cuda" and (missing := _context.overlap_is_off()):
        lines.append(
            f"communication may not overlap with the kernels: {missing} is off "
            "(jax_flash.context.set_overlap_flags sets it)"
        )
    return tuple(lines)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _split(query: Any, key: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    sharding = getattr(query, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1 or query.ndim < 4:
        return ()
    from jax_flash._primitive import partitioning  # imported here, since jax may lack the names it needs

    return partitioning.described(sharding, query.shape, key.shape[-2], dropout=bool(options.get("dropout_rate")))
