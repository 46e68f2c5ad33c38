"""`explain`: which implementation serves a call, in a form to read."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._attention import attention
from jax_flash._call import checks
from jax_flash._call.options import Implementation, Precision
from jax_flash._functions import trace
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
    """

    implementation: str
    platform: str
    obstacles: dict[str, str]
    tuned: tuple[str, ...] = ()
    split: tuple[str, ...] = ()

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
        return "\n".join(lines)


def _functions(options: Mapping[str, Any]) -> trace.Functions | None:
    """The functions among the options of a call that has been checked, without the arrays that they capture."""
    found = {name: options.get(name) for name in ("score_mod", "mask_mod", "block_mask")}
    if all(x is None for x in found.values()):
        return None
    captured = trace.Captured()

    def of(name: str, function: Any, kind: str) -> trace.Function | None:
        return None if function is None else trace.trace(name, function, kind, jnp.float32, captured)

    block_mask = found["block_mask"]
    masks = (
        of("mask_mod", found["mask_mod"], "mask"),
        None if block_mask is None else of("block_mask", block_mask.mask_mod, "mask"),
    )
    return trace.Functions(
        of("score_mod", found["score_mod"], "score"), tuple(mask for mask in masks if mask is not None)
    )


def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    platform: str | None = None,
    implementation: Implementation | None = None,
    precision: Precision | None = None,
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
    call = choice.Call(
        np.dtype(shapes[0].dtype).name, shapes[0].shape[-1], shapes[2].shape[-1], precise, _functions(options)
    )
    obstacles: dict[str, str] = {
        name: reason for name in choice.IMPLEMENTATIONS if (reason := choice.obstacle(name, platform, call))
    }
    tuned: tuple[str, ...] = ()
    chosen = choice.choose(implementation, platform, call)
    if chosen == "cuda" and choice.has_gpu() and call.head_dim == call.value_head_dim:
        tuned = tuple(map(str, _tuned.in_use(registration.cuda_status()["devices"], call.head_dim)))
    split = _split(query, key, options) if chosen in choice.KERNELS else ()
    return Explanation(chosen, platform, obstacles, tuned, split)


def _split(query: Any, key: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    sharding = getattr(query, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1 or query.ndim < 4:
        return ()
    from jax_flash._primitive import partitioning  # imported here, since jax may lack the names it needs

    return partitioning.described(sharding, query.shape, key.shape[-2], dropout=bool(options.get("dropout_rate")))
