"""Which pairs of query and key are kept, for the implementations in plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax_flash._attention import Options


def keep(options: Options, operands: Mapping[str, jax.Array], rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Boolean [B or 1, rows, columns]; ``rows`` and ``columns`` are int32 indices into T and S."""
    if not options.causal:
        return jnp.ones((1, rows.size, columns.size), bool)
    offset = operands["q_offset"][:, None] if "q_offset" in operands else jnp.zeros((1, 1), jnp.int32)
    # Not rows + offset, which wraps around for offsets near the ends of int32.
    return (columns[None, :] - rows[:, None])[None] <= offset[:, :, None]
