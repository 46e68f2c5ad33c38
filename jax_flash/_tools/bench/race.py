"""Timing: cells, the programs that are timed, and contestants in turn in one process, so that other load on the machine
affects all of them alike.

This module imports nothing of jax_flash: ``bench compare`` uses it with each build that it measures.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape that is timed: ``[B, T, N, H]`` queries on ``[B, S, K, H]`` keys and values."""

    dtype: str
    head_dim: int
    length: int
    """S."""
    causal: bool
    batch: int
    heads: int
    """N."""
    q_length: int = 0
    """T; 0: equal to S."""
    kv_heads: int = 0
    """K; 0: every head has its own keys."""

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.q_length or self.length, self.heads, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.kv_heads or self.heads, self.head_dim

    @property
    def work(self) -> float:
        """Floating-point operations of forward."""
        full = 4.0 * self.batch * self.heads * self.q_shape[1] * self.length * self.head_dim
        return full / 2 if self.causal else full

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads else str(self.heads)
        length = f"{self.q_length}x{self.length}" if self.q_length else str(self.length)
        return f"B{self.batch} {length} N{heads} D{self.head_dim}" + (" causal" if self.causal else "")

    def draw(self, seed: int = 0) -> list[jax.Array]:
        """query, key, value and dout."""
        shapes = (self.q_shape, self.kv_shape, self.kv_shape, self.q_shape)
        keys = jax.random.split(jax.random.key(seed), 4)
        return [jax.random.normal(key, shape, jnp.dtype(self.dtype)) for key, shape in zip(keys, shapes, strict=True)]


Attend = Callable[[Any, Any, Any, bool], Any]
"""query, key, value and whether it is causal -> out."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One contestant, with its arrays."""

    start: Callable[[], Any]
    """Queues one call; the first compiles."""
    wait: Callable[[Any], object]
    """Waits for the last result of ``start``."""


def of_jax(
    attend: Attend, cell: Cell, pass_: str, compiler_options: dict[str, Any] | None = None
) -> Callable[[Sequence[jax.Array]], Entry]:
    """The contestant of a function of JAX, as a function of what `Cell.draw` returns: its programs compile once."""

    def forward(_: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return attend(query, key, value, cell.causal)

    return of_function(forward, None, pass_, compiler_options)


def of_function(
    forward: Callable[..., Any], fixed: Any, pass_: str, compiler_options: dict[str, Any] | None = None
) -> Callable[[Sequence[jax.Array]], Entry]:
    """The contestant of ``forward(fixed, *inputs)``, as a function of inputs and dout.

    The backward is the pullback alone, to the inputs: the residuals of forward are its argument.
    """
    run = jax.jit(forward, compiler_options=compiler_options)
    keep = jax.jit(lambda fixed, *inputs: jax.vjp(functools.partial(forward, fixed), *inputs)[1])

    @functools.cache
    def pull_of(tree: Any) -> Callable[[Any, Any], Any]:
        # A flat list, because calls with nested pytrees take longer to dispatch.
        return jax.jit(
            lambda kept, dout: jax.tree.unflatten(tree, kept)(dout),
            compiler_options=compiler_options,
        )

    def entry(arrays: Sequence[jax.Array]) -> Entry:
        *inputs, dout = arrays
        if pass_ == "forward":
            return Entry(lambda: run(fixed, *inputs), jax.block_until_ready)
        kept, tree = jax.tree.flatten(keep(fixed, *inputs))
        pull = pull_of(tree)
        return Entry(lambda: pull(kept, dout), jax.block_until_ready)

    return entry


def chain(attend: Attend, cell: Cell, pass_: str) -> Callable[..., Any]:
    """A function of query, key and value for shapes whose single call is dominated by dispatch: a chain of calls, each
    on the result of the one before. ``pass_`` is "forward" or "forward + backward".

    In float32 the inputs of all calls differ, and a barrier stands between: what a build makes of its inputs alone, as
    of float32 on GPUs, XLA can neither compute once for several calls nor fuse with what computes the inputs. Nor are
    gradients inputs there: a row of them that is 0 but for rounding is 2^20 times smaller than others, and such heads
    are computed another way.
    """
    wide = cell.dtype == "float32"

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return attend(query, key, value, cell.causal)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        for _ in range(chain_length(cell, pass_)):
            out = call(query, key, value)
            query, key, value = jax.lax.optimization_barrier((out, key, value)) if wide else (out, key, value)
        return query

    def with_gradients(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[Any, ...]:
        inputs = query, key, value
        for _ in range(chain_length(cell, pass_)):
            out, pullback = jax.vjp(call, *inputs)
            gradients = pullback(out)
            if wide:
                moved = tuple(x - 2.0**-10 * dx for x, dx in zip(inputs, gradients, strict=True))
                inputs = jax.lax.optimization_barrier(moved)
            else:
                inputs = gradients
        return inputs

    return forward if pass_ == "forward" else with_gradients


def chain_length(cell: Cell, pass_: str) -> int:
    """Calls of a chain. XLA makes CUDA graphs of five launches and more; that of a long chain costs little a call, but
    one of gradients takes XLA long to compile."""
    return 64 if cell.work < 1e8 and pass_ == "forward" else 16 if cell.work < 3e10 else 5


def timed(entry: Entry, times: int) -> float:
    """Seconds a call, of several in a row."""
    began = time.perf_counter()
    result = None
    for _ in range(times):
        # Freed before the next call allocates: with two results alive they would alternate between two addresses, and
        # XLA would update its CUDA graphs each time.
        del result
        result = entry.start()
    entry.wait(result)
    return (time.perf_counter() - began) / times


@dataclasses.dataclass
class Race:
    """Seconds per call, round by round, and the errors of those that failed, by contestant."""

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, Exception] = dataclasses.field(default_factory=dict)


def race(makers: Mapping[str, Callable[[], Entry]], rounds: int, *, seconds: float = 0.02, pause: float = 0.0) -> Race:
    """Times the contestants in turn, ``rounds`` times, each round beginning with another one.

    Each runs for about ``seconds`` a round, at most a hundred calls, ``pause`` seconds after the one before: a GPU that
    is kept busy gets warm, and slower for the last contestant.
    """
    found = Race()
    running: dict[str, tuple[Entry, int]] = {}
    for name, make in makers.items():
        try:
            entry = make()
            timed(entry, 1)  # compiles
            running[name] = entry, min(100, math.ceil(seconds / timed(entry, 1)))
            found.seconds[name] = []
        except Exception as error:  # e.g. cuDNN on a GPU that it does not serve, or too little memory
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
