"""Peers whose arrays are PyTorch's: its own cuDNN, FlashAttention-2 and plain attention, and the flash-attn-4 package.

Imports PyTorch, so only `peers` imports this. `cudnn`, `fa2`, `fa4` and `plain` return a `peers.Maker`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from jax_flash._tools.bench.race import Cell, Entry

Attend = Callable[[Any, Any, Any, bool], Any]


def cudnn() -> Callable[..., Entry]:
    return _maker(_ATTENDS["cudnn"]())


def fa2() -> Callable[..., Entry]:
    return _maker(_ATTENDS["fa2"]())


def fa4() -> Callable[..., Entry]:
    return _maker(_ATTENDS["fa4"]())


def plain() -> Callable[..., Entry]:
    return _maker(_ATTENDS["plain"]())


def results(name: str, arrays: Sequence[jax.Array], causal: bool) -> tuple[jax.Array, ...]:
    """out, dquery, dkey and dvalue of "cudnn", "fa2", "fa4" or "plain", from and to arrays of JAX."""
    attend = _ATTENDS[name]()
    query, key, value, dout = (torch.from_dlpack(x) for x in arrays)
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    out = attend(inputs[0], inputs[1], inputs[2], causal)
    gradients = torch.autograd.grad(out, inputs, dout)
    torch.cuda.synchronize()
    return tuple(jax.dlpack.from_dlpack(x.detach().contiguous()) for x in (out, *gradients))


def _fa4() -> Attend:
    from flash_attn.cute import flash_attn_func

    def attend(query: Any, key: Any, value: Any, causal: bool) -> Any:
        found = flash_attn_func(query, key, value, causal=causal)
        return found[0] if isinstance(found, tuple) else found

    return attend


def _plain(query: Any, key: Any, value: Any, causal: bool) -> Any:
    """Plain attention as one writes it in PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = (q @ k.transpose(-2, -1)) * query.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(query: Any, key: Any, value: Any, causal: bool) -> Any:
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    return attend


_ATTENDS: dict[str, Callable[[], Attend]] = {
    "cudnn": lambda: _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
    "fa4": _fa4,
    "plain": lambda: _plain,
}


def _maker(attend: Attend) -> Callable[..., Entry]:
    def make(cell: Cell, pass_: str, arrays: Sequence[jax.Array]) -> Entry:
        del arrays  # frees JAX's; PyTorch draws its own
        torch.manual_seed(0)
        shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
        drawn = [torch.randn(shape, dtype=getattr(torch, cell.dtype), device="cuda") for _ in range(4)]
        query, key, value, dout = drawn
        if pass_ == "forward":
            return Entry(lambda: attend(query, key, value, cell.causal), _wait)
        inputs = [x.requires_grad_() for x in (query, key, value)]
        if pass_ == "forward + backward":
            return Entry(lambda: torch.autograd.grad(attend(query, key, value, cell.causal), inputs, dout), _wait)
        out = attend(query, key, value, cell.causal)
        return Entry(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), _wait)

    return make


def _wait(_: Any) -> None:
    torch.cuda.synchronize()
