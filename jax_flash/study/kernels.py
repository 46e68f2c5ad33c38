"""The algorithms as CUDA kernels: csrc/cuda/study has them, each in a file that can be read in one go.

The functions are those of `jax_flash.study.loops`, for float16, bfloat16 and float32 and head dims up to 128, on GPUs.
They are compiled on first use. They share nothing with the kernels of `jax_flash.attention` but the way from JAX to a
GPU.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._native import registration
from jax_flash.study.loops import Algorithm, checked

LARGEST_HEAD_DIM = 128

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


class Problem(NamedTuple):
    """Of a call: csrc/study.h, and the constants of csrc/cuda/study/study.cuh."""

    causal: bool
    dtype: str
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def tile(self) -> int:
        """Rows of a tile, and keys."""
        return 16 if max(self.head_dim, self.value_head_dim) > 64 else 32

    def blocks(self, length: int) -> int:
        """Of a grid that has a block for each tile of ``length`` rows of every head."""
        return self.batch * self.heads * -(-length // self.tile)

    @property
    def constants(self) -> str:
        return (
            f"constexpr DType dtype = DType::{_ELEMENTS[self.dtype]};\n"
            f"constexpr int head_dim = {self.head_dim}, value_head_dim = {self.value_head_dim};\n"
            f"constexpr bool causal = {str(self.causal).lower()};\n"
        )

    def of_rows(self, *columns: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """[B, T, N, columns], or without columns [B, N, T]."""
        shape = (self.batch, self.rows, self.heads, *columns) if columns else (self.batch, self.heads, self.rows)
        return jax.ShapeDtypeStruct(shape, dtype)

    def of_keys(self, columns: int) -> jax.ShapeDtypeStruct:
        """[B, S, N, columns]: gradients of keys, for each query head."""
        return jax.ShapeDtypeStruct((self.batch, self.keys, self.heads, columns), jnp.float32)

    @property
    def gradients(self) -> list[jax.ShapeDtypeStruct]:
        """dq, dk and dv."""
        return [self.of_rows(self.head_dim), self.of_keys(self.head_dim), self.of_keys(self.value_head_dim)]

    def launch(
        self,
        file: str,
        entry: str,
        blocks: int,
        arrays: Sequence[jax.Array],
        results: Sequence[jax.ShapeDtypeStruct],
        aliases: dict[int, int] | None = None,
    ) -> list[jax.Array]:
        """One kernel."""
        call = jax.ffi.ffi_call(
            registration.STUDY_TARGET, list(results), vmap_method="sequential", input_output_aliases=aliases
        )
        sizes = {name: np.int32(getattr(self, name)) for name in ("batch", "rows", "keys", "heads", "kv_heads")}
        return list(
            call(
                *arrays, file=file, entry=entry, constants=self.constants, blocks=np.int32(blocks),
                scale=np.float32(self.head_dim**-0.5), **sizes,
            )
        )  # fmt: skip


def _d(out: jax.Array, dout: jax.Array) -> jax.Array:
    """rowsum(dout out), [B, N, T]."""
    return jnp.swapaxes((dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1), 1, 2)


def _plain_forward(p: Problem, *inputs: jax.Array) -> tuple[jax.Array, Any]:
    of_pairs = jax.ShapeDtypeStruct((p.batch, p.heads, p.rows, p.keys), jnp.float32)
    results = [p.of_rows(p.value_head_dim, dtype=p.dtype), of_pairs]
    out, weights = p.launch("plain", "forward", p.batch * p.heads * p.rows, inputs, results)
    return out, (*inputs, weights)


def _plain_backward(p: Problem, kept: Any, dout: jax.Array) -> list[jax.Array]:
    query, key, value, weights = kept
    dquery, *others = p.gradients
    arrays = (query, key, value, dout, weights)
    scores = jax.ShapeDtypeStruct(weights.shape, jnp.float32)
    dq, dscores = p.launch("plain", "backward_dq", p.batch * p.heads * p.rows, arrays, [dquery, scores])
    blocks = p.batch * p.heads * p.keys
    return [dq, *p.launch("plain", "backward_dkv", blocks, (query, dout, weights, dscores), others)]


def _flash1_forward(p: Problem, *inputs: jax.Array) -> tuple[jax.Array, Any]:
    results = [p.of_rows(p.value_head_dim), p.of_rows(), p.of_rows()]
    out, maximum, total = p.launch("flash1", "forward", p.batch * p.heads, inputs, results)
    return out.astype(p.dtype), (*inputs, out, maximum, total)


def _flash1_backward(p: Problem, kept: Any, dout: jax.Array) -> list[jax.Array]:
    *inputs, out, maximum, total = kept
    arrays = (*inputs, dout, maximum, total, _d(out, dout))
    return p.launch("flash1", "backward", p.batch * p.heads, arrays, p.gradients)


def _flash2_forward(p: Problem, *inputs: jax.Array) -> tuple[jax.Array, Any]:
    results = [p.of_rows(p.value_head_dim, dtype=p.dtype), p.of_rows()]
    out, lse = p.launch("flash2", "forward", p.blocks(p.rows), inputs, results)
    return out, (*inputs, out, lse)


def _flash2_backward(p: Problem, kept: Any, dout: jax.Array) -> list[jax.Array]:
    *inputs, out, lse = kept
    arrays = (*inputs, dout, lse, _d(out, dout))
    dquery, *others = p.gradients
    return [
        *p.launch("flash2", "backward_dq", p.blocks(p.rows), arrays, [dquery]),
        *p.launch("flash2", "backward_dkv", p.blocks(p.keys), arrays, others),
    ]


def _flash2_atomic_backward(p: Problem, kept: Any, dout: jax.Array) -> list[jax.Array]:
    *inputs, out, lse = kept
    dq = jnp.zeros(p.gradients[0].shape, jnp.float32)  # blocks add to it
    arrays = (*inputs, dout, lse, _d(out, dout), dq)
    return p.launch("flash2_atomic", "backward", p.blocks(p.keys), arrays, p.gradients, {len(arrays) - 1: 0})


def _algorithm(name: str, forward: Any, backward: Any) -> Algorithm:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(p: Problem, *inputs: jax.Array) -> jax.Array:
        out: jax.Array = forward(p, *inputs)[0]
        return out

    def pull(p: Problem, kept: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
        dq, dk, dv = backward(p, kept, dout)
        dk, dv = (x.reshape(*x.shape[:2], p.kv_heads, -1, x.shape[-1]).sum(axis=3) for x in (dk, dv))
        dq, dk, dv = (x.astype(p.dtype) for x in (dq, dk, dv))
        return dq, dk, dv

    run.defvjp(forward, pull)

    def attention(query: Any, key: Any, value: Any, *, causal: bool = False) -> jax.Array:
        query, key, value, causal = checked(query, key, value, causal)
        if query.dtype.name not in _ELEMENTS:
            raise TypeError(f"query must have one of the dtypes {', '.join(_ELEMENTS)}, got {query.dtype.name}")
        for what, x in (("query", query), ("value", value)):
            if x.shape[3] > LARGEST_HEAD_DIM:
                raise ValueError(f"{what} must have a head_dim of at most {LARGEST_HEAD_DIM}, got {x.shape[3]}")
        batch, rows, heads, head_dim = query.shape
        sizes = (batch, rows, key.shape[1], heads, key.shape[2], head_dim, value.shape[3])
        return run(Problem(causal, query.dtype.name, *sizes), query, key, value)

    attention.__name__ = attention.__qualname__ = name
    attention.__doc__ = f"jax_flash.study.loops.{name} as CUDA kernels; see jax_flash.study.kernels."
    return attention


plain = _algorithm("plain", _plain_forward, _plain_backward)
flash1 = _algorithm("flash1", _flash1_forward, _flash1_backward)
flash2 = _algorithm("flash2", _flash2_forward, _flash2_backward)
flash2_atomic = _algorithm("flash2_atomic", _flash2_forward, _flash2_atomic_backward)
