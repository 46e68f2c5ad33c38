"""Runs a problem of cases.py with its sequence spread over the devices of a mesh."""

from collections.abc import Mapping
from typing import Any

import cases
import jax
import numpy as np
import pytest
from cases import Target
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_flash import context as jf
from jax_flash.context import ContextParallel

AXIS = "seq"

ROWS = {"bias": -2, "mask": -2, "q_segment_ids": -1, "kv_start": -1, "kv_end": -1}
"""The axis of an option that is along the rows of query, unless it is broadcast."""
KEYS = {"kv_segment_ids": -1, "q_start": -1, "q_end": -1}


def mesh(sizes: Mapping[str, int], kind: str = "Auto", platform: str = "cpu") -> Mesh:
    count = int(np.prod(list(sizes.values())))
    devices = jax.devices(platform)
    if len(devices) < count and platform != "cpu":  # of CPUs conftest.py makes enough
        pytest.skip(f"needs {count} devices of platform {platform}, JAX has {len(devices)}")
    grid = np.array(devices[:count]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(getattr(AxisType, kind),) * len(sizes))


def many(platform: str) -> int:
    """Of how many devices the tests make a mesh: four, or two on a host with two or three GPUs."""
    return 4 if len(jax.devices(platform)) >= 4 else 2


def split_axis(name: str, x: Any) -> int | None:
    """Which axis of an option is split over devices; None: every device has all of it."""
    axis = {**ROWS, **KEYS}.get(name)
    return None if axis is None or np.ndim(x) == 0 or np.shape(x)[axis] == 1 else np.ndim(x) + axis


class Spread:
    """Forward and backward of a problem: compiled by `program`, run by calling it with the arrays in order."""

    def __init__(self, target: Target, problem: cases.Problem, context: ContextParallel, grid: Mesh) -> None:
        self.target, self.problem, self.context, self.grid = target, problem, context, grid
        self.devices = grid.shape[context.axis]
        options = {**problem.options, **problem.trainable}
        self.arrays = {name: x for name, x in options.items() if isinstance(x, (np.ndarray, jax.Array))}
        self.fixed = {name: x for name, x in options.items() if name not in self.arrays}
        self.packed = problem.query.ndim == 3
        self.length_axis = 0 if self.packed else len(problem.query.shape) - 3

    def spec(self, ndim: int, axis: int | None) -> PartitionSpec:
        entries: list[Any] = [None] * ndim
        if axis is not None:
            entries[axis] = self.context.axis
        return PartitionSpec(*entries)

    def specs(self) -> tuple[Any, ...]:
        batch, heads = self.context.batch_axis, self.context.head_axis
        length, rank = self.length_axis, self.problem.query.ndim
        wide, statistic = self.spec(rank, length), self.spec(rank - 1, rank - 2)
        if batch is not None:  # [B, length, heads, head_dim] and [B, heads, length]
            wide = PartitionSpec(batch, self.context.axis, heads)
            statistic = PartitionSpec(batch, heads, self.context.axis)
        options = {name: self.spec(np.ndim(x), split_axis(name, x)) for name, x in self.arrays.items()}
        return (wide, wide, wide), options, (wide, statistic)

    def moved(self, tree: Any, specs: Any, move: Any) -> Any:
        """Arrays with what is split by ``specs`` in another order."""

        def one(x: Any, spec: PartitionSpec) -> Any:
            if self.context.axis not in spec:
                return x
            return np.asarray(move(x, self.devices, self.context.order, tuple(spec).index(self.context.axis)))

        return jax.tree.map(one, tree, specs)

    def arguments(self) -> tuple[Any, ...]:
        problem = self.problem
        inputs, options, results = self.specs()
        return (
            self.moved(problem.inputs, inputs, jf.reorder),
            self.moved(self.arrays, options, jf.reorder),
            self.moved((problem.dout, problem.dlse), results, jf.reorder),
        )

    def attend(self, inputs: Any, options: Any) -> Any:
        return self.problem.attend(
            *inputs,
            **self.fixed,
            **options,
            return_lse=True,
            implementation=self.target.implementation,
            context=self.context,
        )

    def run(self, bound: bool) -> dict[str, np.ndarray]:
        """out, lse and gradients; ``bound``: inside a shard_map over the axis, else under jit on the current mesh."""
        inputs, options, results = self.specs()
        attend = self.attend
        if bound:
            attend = jax.shard_map(
                attend, in_specs=(inputs, options), out_specs=results, axis_names={self.context.axis}
            )

        def differentiate(inputs: Any, options: Any, cotangents: Any) -> Any:
            trained = {name: options[name] for name in self.problem.trainable}
            found, pullback = jax.vjp(lambda inputs, trained: attend(inputs, {**options, **trained}), inputs, trained)
            return found, *pullback(cotangents)

        with jax.set_mesh(self.grid):
            placed = jax.tree.map(
                lambda x, spec: jax.device_put(x, NamedSharding(self.grid, spec)),
                self.arguments(),
                (inputs, options, results),
            )
            found, gradients, trained = jax.jit(differentiate)(*placed)
        found = self.moved(found, results, jf.restore)
        gradients = self.moved(gradients, inputs, jf.restore)
        of_trained = {name: options[name] for name in trained}
        trained = self.moved(trained, of_trained, jf.restore)
        return cases.named(*jax.tree.map(np.asarray, (found, gradients, trained)))
