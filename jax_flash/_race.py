"""Timing: contestants in turn, in one process, so that what else the machine does meets them all."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape that is timed; T = S and every head has its own keys."""

    dtype: str
    head_dim: int
    length: int
    causal: bool
    batch: int
    heads: int

    @property
    def work(self) -> float:
        """Floating-point operations of forward."""
        full = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return full / 2 if self.causal else full

    def draw(self, seed: int = 0) -> list[jax.Array]:
        """query, key, value and dout."""
        shape = (self.batch, self.length, self.heads, self.head_dim)
        keys = jax.random.split(jax.random.key(seed), 4)
        return [jax.random.normal(key, shape, jnp.dtype(self.dtype)) for key in keys]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One contestant, its arrays with it."""

    start: Callable[[], Any]
    """Queues one call; the first compiles."""
    wait: Callable[[Any], object]
    """Returns when what ``start`` returned last is there."""


def timed(entry: Entry, times: int) -> float:
    """Seconds a call, of several in a row."""
    began = time.perf_counter()
    result = None
    for _ in range(times):
        result = entry.start()
    entry.wait(result)
    return (time.perf_counter() - began) / times


@dataclasses.dataclass
class Race:
    """Seconds a call, round by round; and the errors of those that fell out. By contestant."""

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, Exception] = dataclasses.field(default_factory=dict)


def race(makers: Mapping[str, Callable[[], Entry]], rounds: int, *, seconds: float = 0.02, pause: float = 0.0) -> Race:
    """The contestants in turn, ``rounds`` times, each round beginning with another one.

    Each runs for about ``seconds`` a round, at most a hundred calls, ``pause`` seconds after the one before: a GPU that
    is kept busy gets warm, and slower for who comes last.
    """
    found = Race()
    running: dict[str, tuple[Entry, int]] = {}
    for name, make in makers.items():
        try:
            entry = make()
            timed(entry, 1)  # compiles
            running[name] = entry, min(100, math.ceil(seconds / timed(entry, 1)))
            found.seconds[name] = []
        except Exception as error:  # cuDNN on a GPU that it does not serve, or memory that is not there
            found.errors[name] = error
    for number in range(rounds):
        names = list(running)
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            entry, times = running[name]
            try:
                time.sleep(pause)
                found.seconds[name].append(timed(entry, times))
            except Exception as error:
                found.errors[name] = error
                del running[name]
    return found
