"""Other implementations of attention on GPUs, which ``bench`` compares with. Nothing else needs them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._attention import attention
from jax_flash._tools.bench import race
from jax_flash._tools.bench.race import Attend, Cell, Entry

Maker = Callable[[Cell, str, Sequence[jax.Array]], Entry]
"""A cell, the pass and what `Cell.draw` returns -> the contestant."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """An implementation to compare with."""

    what: str
    load: Callable[[], Maker]
    """Imports it. Raises any exception of the import if it is not installed or does not work."""


WITHOUT_GRAPHS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 2**30}
"""Compiler options that keep kernels looked up at every call: a CUDA graph would keep those of its creation."""


def of_jax(attend: Attend, compiler_options: dict[str, Any] | None = None) -> Maker:
    """A maker of contestants for a function of JAX."""
    return lambda cell, pass_, arrays: race.of_jax(attend, cell, pass_, compiler_options)(arrays)


def attend(query: Any, key: Any, value: Any, causal: bool, **options: Any) -> Any:
    """This package's attention."""
    return attention(query, key, value, causal=causal, **options)


def plain(query: Any, key: Any, value: Any, causal: bool) -> Any:
    """Plain attention as one writes it in JAX: products in the dtype of the arrays, softmax in float32. JAX
    differentiates it, which keeps the weights."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def ours(compiler_options: dict[str, Any] | None = None, **options: Any) -> Maker:
    """A maker of contestants for this package."""
    return of_jax(functools.partial(attend, **options), compiler_options)


def attend_nn(implementation: Any, query: Any, key: Any, value: Any, causal: bool) -> Any:
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation=implementation)


def _tokamax() -> Maker:
    import tokamax

    return of_jax(
        lambda q, k, v, causal: tokamax.dot_product_attention(q, k, v, is_causal=causal, implementation="mosaic")
    )


def _fa2_jax() -> Maker:
    from flash_attn_jax import flash_mha

    return of_jax(lambda query, key, value, causal: flash_mha(query, key, value, is_causal=causal))


def _torch(name: str) -> Maker:
    from jax_flash._tools.bench import torch_peers

    maker: Maker = getattr(torch_peers, name)()
    return maker


PEERS = {
    "cudnn": Peer("cuDNN by jax.nn.dot_product_attention", lambda: of_jax(functools.partial(attend_nn, "cudnn"))),
    "cudnn-torch": Peer("cuDNN by PyTorch", functools.partial(_torch, "cudnn")),
    "fa4": Peer("the flash-attn-4 package", functools.partial(_torch, "fa4")),
    "tokamax": Peer("tokamax's kernels for Mosaic GPU", _tokamax),
    "fa2-jax": Peer("FlashAttention-2 by flash_attn_jax", _fa2_jax),
    "fa2-torch": Peer("FlashAttention-2 by PyTorch", functools.partial(_torch, "fa2")),
    "xla": Peer("XLA by jax.nn.dot_product_attention", lambda: of_jax(functools.partial(attend_nn, "xla"))),
}
