"""Every non-public name of JAX that is used, and whether all of them exist.

JAX has no public way to make a primitive with rules of its own. These names may move in any of its releases, so no
other module imports them from JAX.
"""

import jax

MISSING: str | None = None
"""Which name the running JAX lacks; None if it has all. If it lacks one, no name below may be used, and plain JAX
serves every call."""

try:
    from jax._src.dispatch import apply_primitive, prim_requires_devices_during_lowering
    from jax.ad_checkpoint import checkpoint_name
    from jax.core import ShapedArray
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun  # first: plain JAX evaluates functions by these
    from jax.interpreters import ad, batching, mlir

    for _module, _name in (
        (ad, "Zero"),
        (ad, "is_undefined_primal"),
        (ad, "primitive_jvps"),
        (ad, "primitive_transposes"),
        (batching, "primitive_batchers"),
        (mlir, "lower_fun"),
        (mlir, "register_lowering"),
    ):
        if not hasattr(_module, _name):
            raise ImportError(f"cannot import name {_name!r} from {_module.__name__!r}")
except (ImportError, AttributeError) as _error:
    MISSING = f"jax {jax.__version__} lacks a name that its kernels are called by: {_error}"

__all__ = [
    "MISSING",
    "ClosedJaxpr",
    "Primitive",
    "ShapedArray",
    "ad",
    "apply_primitive",
    "batching",
    "checkpoint_name",
    "custom_partitioning",
    "jaxpr_as_fun",
    "mlir",
    "prim_requires_devices_during_lowering",
]
