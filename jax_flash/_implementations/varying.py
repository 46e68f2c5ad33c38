"""The types of arrays on meshes: over which axes of a jax.shard_map values vary, and along which explicit ones they are
split."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def varying_axes(x: jax.typing.ArrayLike) -> frozenset[Any]:
    """The mesh axes of the surrounding shard_map over which ``x`` varies; none outside of one."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # since jax 0.10; earlier versions have the set itself
    axes: frozenset[Any] = kind.varying if kind is not None else getattr(aval, "vma", frozenset())
    return axes


def vary_alike(tree: Tree, *others: Any) -> Tree:
    """``tree`` with every array varying over all axes over which any array of ``tree`` and ``others`` varies.

    JAX does this for the operands of its own operations; the derivative sums over the added axes.
    """
    union = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves((tree, others))))

    def vary(x: jax.Array) -> jax.Array:
        missing = union - varying_axes(x)
        varied: jax.Array = jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
        return varied

    return jax.tree.map(vary, tree)


def on_automatic_axes(function: Callable[..., Any], results: Sequence[Any]) -> Callable[..., Any]:
    """``function`` for a mesh of explicit axes, its results split as ``results`` are.

    Code for automatic axes, such as scans over chunks with branches, would have to state how every array is split. The
    function must take all its arrays as arguments: closed-over arrays would keep their explicit types.
    """
    mesh = jax.typeof(results[0]).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == jax.sharding.AxisType.Explicit)
    if not explicit:
        return function
    shardings = tuple(jax.typeof(x).sharding for x in results)
    automatic: Callable[..., Any] = jax.sharding.auto_axes(
        lambda *args: tuple(function(*args)), axes=explicit, out_sharding=shardings
    )
    return automatic
