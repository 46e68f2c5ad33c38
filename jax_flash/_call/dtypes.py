"""The dtypes of inputs, and the dtype of sums and lse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INPUTS = ("float16", "bfloat16", "float32", "float64")


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> np.dtype[Any]:
    """float32, except for float64 inputs, whose gradients would lose half of their digits with a float32 lse."""
    return np.dtype(jnp.float64 if np.dtype(dtype) == np.float64 else jnp.float32)
