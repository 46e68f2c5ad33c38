"""Arrays inside jax.shard_map: over which mesh axes their values vary."""

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def varying_axes(x: jax.typing.ArrayLike) -> frozenset[Any]:
    """The mesh axes of the surrounding shard_map over which ``x`` varies; none outside of one."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # jax >= 0.10; before, the set itself
    axes: frozenset[Any] = kind.varying if kind is not None else getattr(aval, "vma", frozenset())
    return axes


def vary_alike(tree: Tree, *others: Any) -> Tree:
    """``tree`` with every array varying over all axes over which any array of ``tree`` and ``others`` varies.

    JAX does this for the operands of its own operations; its derivative sums over the axes that were added.
    """
    union = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves((tree, others))))

    def vary(x: jax.Array) -> jax.Array:
        missing = union - varying_axes(x)
        varied: jax.Array = jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
        return varied

    return jax.tree.map(vary, tree)
