"""patch_jax_nn(): models written with jax.nn.dot_product_attention call this package."""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import jax

from jax_flash._dot_product import dot_product_attention

_IMPLEMENTATIONS = {None: None, "xla": None, "cudnn": "cuda"}
"""What a caller asks jax.nn for -> what serves it. Callers such as Keras name "xla" where nothing else is wanted;
"cudnn" stays what it is, fused kernels on an NVIDIA GPU or an exception."""

_lock = threading.Lock()
_active: "list[Patch]" = []
_jax_function: Callable[..., Any] = jax.nn.dot_product_attention
_replaced: Callable[..., Any] = _jax_function
"""What stood in its place when a patch was applied, and is put back: JAX's own function, or somebody else's."""
_context: Any = None
"""A part of the keys of jit's caches, made with the first patch: making one has every function traced again."""


class Patch:
    """What `patch_jax_nn` returns: it is in force until `restore`, or until its ``with`` block is left.

    Attributes:
      served: how many calls of jax.nn.dot_product_attention have been served by this package so far, counted when they
        are traced.
      left: for every call that was left to JAX's own function, the reason.
    """

    def __init__(self) -> None:
        self.served = 0
        self.left: list[str] = []

    def restore(self) -> None:
        """Ends this patch. JAX's own function is back when no patch is in force. A second call does nothing."""
        with _lock:
            if self not in _active:
                return
            if len(_active) == 1:
                _take_traces_of(False)  # first, likewise
                if jax.nn.dot_product_attention is _patched:  # else somebody else's stands there by now
                    jax.nn.dot_product_attention = _replaced
            _active.remove(self)

    def __enter__(self) -> Self:
        if self not in _active:
            raise RuntimeError("this patch was restored: call jax_flash.patch_jax_nn() for another one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "in force" if self in _active else "restored"
        return f"<jax_flash.patch_jax_nn(): {state}, served {self.served} calls, left {len(self.left)} to JAX>"


def patch_jax_nn() -> Patch:
    """Has ``jax.nn.dot_product_attention`` served by this package, in models that call it by that name.

    As a call it holds until ``restore()``; as a context manager until the block is left, also by an exception:

        jax_flash.patch_jax_nn()

        with jax_flash.patch_jax_nn() as patch:
            loss, gradients = step(weights, batch)
        print(patch)

    **What is served.** Calls with ``implementation`` None or "xla", and with "cudnn" where there is an NVIDIA GPU whose
    kernels serve the call, as by `dot_product_attention`, which says where results differ: mainly a row that keeps no
    key gives zeros.

    **What is left to JAX's own function**, which serves it or raises its own error: every call that this package does
    not take, such as one with complex numbers or integers, "cudnn" where there is no GPU, or arguments that are
    wrong. ``left`` of the result has the reasons.

    **What is not reached.** Code that holds JAX's function itself, by ``from jax.nn import dot_product_attention``
    before the patch: change that import to ``from jax_flash import dot_product_attention``.

    **jit.** Functions that were traced before are traced again inside, and again as before after ``restore()``: JAX
    keeps both. With a jax whose user contexts can't be set for all threads (0.9), its caches are cleared instead.

    **Threads and nesting.** A patch is one of the process: calls of all threads are served while any patch is in force.
    Applying and restoring are safe in any thread and any order; JAX's function is back after the last one. A function
    that another thread traces at that moment may have either, and keeps it, so patch where no other thread traces.

    Returns:
      The patch, with ``restore()``, ``served`` and ``left``.
    """
    global _replaced
    patch = Patch()
    with _lock:
        _active.append(patch)
        if len(_active) == 1:
            if jax.nn.dot_product_attention is not _patched:
                _replaced, jax.nn.dot_product_attention = jax.nn.dot_product_attention, _patched
            _take_traces_of(True)  # last: what is traced by this key is to be served
    return patch


@functools.wraps(jax.nn.dot_product_attention)
def _patched(*arguments: Any, **keywords: Any) -> Any:
    """Stands in the place of JAX's function."""
    patches = tuple(_active)
    if not patches:  # a caller kept this function beyond the patch
        return _jax_function(*arguments, **keywords)
    try:
        out = _served(*arguments, **keywords)
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = str(error)
    else:
        for patch in patches:
            patch.served += 1
        return out
    for patch in patches:
        patch.left.append(reason)
    return _jax_function(*arguments, **keywords)


def _served(*arguments: Any, implementation: Any = None, **keywords: Any) -> Any:
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None, 'xla' or 'cudnn' to be served, got {implementation!r}")
    # Type checkers can't choose an overload for arguments that are passed on.
    return dot_product_attention(*arguments, implementation=_IMPLEMENTATIONS[implementation], **keywords)  # type: ignore


def _take_traces_of(patched: bool) -> None:
    """jit takes what it traced when this was so, or traces anew: the patch is no argument of a function."""
    global _context
    if _context is None:
        _context = jax.make_user_context(False)
    if hasattr(_context, "set_global"):
        _context.set_global(patched)
    else:
        jax.clear_caches()
