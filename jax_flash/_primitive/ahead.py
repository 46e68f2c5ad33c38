"""Lowering for a GPU that need not be here, to learn which kernels a function's calls take."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_flash._native import _core

PASSES = {
    "forward": ("scale", "forward", "forward_split_kv", "forward_single_tile"),
    "backward": ("scale", "backward", "backward_dq", "backward_bias"),
}
"""The kernels that a pass may launch; which, depends on lengths and batch too."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A custom call for CUDA: what its kernels are compiled for."""

    pass_: str
    dtype: str
    head_dim: int
    value_head_dim: int
    options: Mapping[str, Any]


@dataclasses.dataclass
class Lowering:
    """Calls that are lowered, for a compute capability such as 80."""

    arch: int
    calls: list[Call]

    @property
    def float16_only(self) -> bool:
        """Whether its kernels take float16 alone, to which other dtypes are converted."""
        return _core.tile_row(arch=self.arch, pass_="forward", head_dim=64)["family"] in _core.FLOAT16_FAMILIES

    def separate_dq(self, largest_head_dim: int) -> bool:
        return _core.separate_dq(arch=self.arch, largest_head_dim=largest_head_dim)


_current: contextvars.ContextVar[Lowering | None] = contextvars.ContextVar("jax_flash_ahead", default=None)


def current() -> Lowering | None:
    """The lowering under way that only looks for calls; None: an ordinary one."""
    return _current.get()


@contextlib.contextmanager
def _looking(arch: int) -> Iterator[list[Call]]:
    lowering = Lowering(arch, [])
    token = _current.set(lowering)
    try:
        yield lowering.calls
    finally:
        _current.reset(token)


def calls_of(function: Callable[..., Any], arguments: Sequence[Any], arch: int) -> list[Call]:
    """The calls of ``function``, each kind once; arguments are arrays or their shapes."""
    with _looking(arch) as calls:
        # A new function, as JAX would not lower a known one again.
        jax.jit(lambda *xs: function(*xs)).trace(*arguments).lower(lowering_platforms=("cuda",))
    return [call for i, call in enumerate(calls) if call not in calls[:i]]
