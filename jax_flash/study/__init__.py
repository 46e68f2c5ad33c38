"""The algorithms of attention, to read and to run: FlashAttention-1, FlashAttention-2 with either backward, and plain
attention.

Each is a function of query, key and value with its own gradient. `loops` has them in plain JAX, as their papers write
them down, and `kernels` as CUDA kernels. They are for students and for measurements, not for training:
`jax_flash.attention` is.
"""

from collections.abc import Mapping

from jax_flash.study import kernels, loops
from jax_flash.study.loops import Algorithm

__all__ = ["KERNELS", "LOOPS", "Algorithm", "kernels", "loops"]

LOOPS: Mapping[str, Algorithm] = {
    "plain": loops.plain,
    "flash1": loops.flash1,
    "flash2": loops.flash2,
    "flash2_atomic": loops.flash2_atomic,
}
"""By name."""

KERNELS: Mapping[str, Algorithm] = {
    "plain": kernels.plain,
    "flash1": kernels.flash1,
    "flash2": kernels.flash2,
    "flash2_atomic": kernels.flash2_atomic,
}
"""The same names; on GPUs."""
