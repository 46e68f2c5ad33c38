"""`explain`: which implementation serves a call, in a form to read."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_flash._attention import attention
from jax_flash._call import checks, dtypes
from jax_flash._call.options import Implementation, Precision
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
    """

    implementation: str
    platform: str
    obstacles: dict[str, str]
    tuned: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    source: str = ""
    gradients: str = ""

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
    return Explanation(
        chosen, platform, obstacles, tuned, split, printed, _of_gradients(chosen, platform, call, options)
    )


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


def _split(query: Any, key: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    sharding = getattr(query, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1 or query.ndim < 4:
        return ()
    from jax_flash._primitive import partitioning  # imported here, since jax may lack the names it needs

    return partitioning.described(sharding, query.shape, key.shape[-2], dropout=bool(options.get("dropout_rate")))
