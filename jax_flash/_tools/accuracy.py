"""Whether attention() is right: one problem, forward and backward, against the reference in float64.

The rule is the project's: a result's largest error is at most a factor times that of plain attention in the same
dtype, plus a few units of the dtype's epsilon times the magnitude of the result.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._attention import attention
from jax_flash._call import dtypes
from jax_flash._call.options import Implementation, Precision

Arrays = Mapping[str, np.ndarray[Any, Any]]

FACTORS = {"out": 2.0, "lse": 2.0, "dquery": 3.0, "dkey": 3.0, "dvalue": 3.0, "dbias": 3.0}

# In float64 the plain error counts as zero, so the units of epsilon must cover the rounding errors of both.
_UNITS = {"float16": 2, "bfloat16": 2, "float32": 8, "float64": 64}

_TF32_EPSILON = 2.0**-10

_INPUTS = ("query", "key", "value", "bias")  # the arguments with gradients


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and options of a problem; its arrays are random.

    Attributes:
      q_offset: position of the first query; None aligns the last query with the last key.
      precision: accuracy of float32 on GPUs, as for attention().
      everything: every option of attention() at once, in addition to ``causal``.
      deterministic_backward: as for attention().
    """

    dtype: str
    q_length: int
    kv_length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int = 2
    causal: bool = False
    q_offset: int | None = 0
    precision: Precision | None = "highest"
    everything: bool = False
    deterministic_backward: bool = False


@dataclasses.dataclass(frozen=True)
class Error:
    """The error of a result.

    Attributes:
      name: the result's name, such as "out" or "dkey".
      ratio: its largest error as a fraction of what is allowed; right if at most 1, which NaN is not.
      largest: the largest error itself.
    """

    name: str
    ratio: float
    largest: float

    @property
    def right(self) -> bool:
        return self.ratio <= 1  # not ratio > 1, which a NaN would pass

    def __str__(self) -> str:
        return f"wrong {self.name}: its error is {self.ratio:.3g} times what is allowed"


def measure(problem: Problem, device: jax.Device, judge: jax.Device) -> dict[str, Error]:
    """The error of each result of attention() on ``device``, by name.

    ``judge`` computes plain attention and the reference in float64.

    Raises whatever the call on ``device`` raises.
    """
    # float64 is off in JAX by default; the reference needs it, and so do the calls in float64.
    with jax.enable_x64(True):
        arrays, plain, exact = oracle(problem, judge)
        got = results(problem, arrays, device, None)
        tf32 = problem.dtype == "float32" and problem.precision != "highest" and device.platform != "cpu"
        return compare(got, plain, exact, tf32=tf32)


def oracle(problem: Problem, judge: jax.Device) -> tuple[Arrays, dict[str, jax.Array], dict[str, jax.Array]]:
    """The arrays, and the results of plain attention and of the reference in float64 on ``judge``."""
    with jax.enable_x64(True):
        arrays = draw(problem)
        plain = results(problem, arrays, judge, "reference")
        wide = {name: x.astype(np.float64) if name in (*_INPUTS, "dout", "dlse") else x for name, x in arrays.items()}
        return arrays, plain, results(problem, wide, judge, "reference")


def compare(
    got: Mapping[str, Any], plain: Mapping[str, Any], exact: Mapping[str, Any], *, tf32: bool = False
) -> dict[str, Error]:
    """Applies the rule to every result in ``got``; ``tf32``: float32 products may have TF32's accuracy."""
    errors = {}
    for name, result in got.items():
        right = np.asarray(exact[name])
        dtype = result.dtype  # lse of float16 is float32
        allowance = _UNITS[dtype.name] * float(jnp.finfo(dtype).eps)
        if tf32:
            allowance = max(allowance, _UNITS["float16"] * _TF32_EPSILON)
        size = float(np.abs(right[np.isfinite(right)]).max(initial=0.0))
        allowed = FACTORS[name] * _distance(plain[name], right) + allowance * size
        largest = _distance(result, right)
        exactly = 0.0 if largest == 0 else np.inf  # no error is allowed, because every value is 0
        errors[name] = Error(name, largest / allowed if allowed else exactly, largest)
    return errors


def worst(errors: Mapping[str, Error]) -> Error:
    """The error with the largest ratio; NaN counts as the largest."""
    return max(errors.values(), key=lambda error: np.nan_to_num(error.ratio, nan=np.inf))


def _distance(result: Any, right: np.ndarray[Any, Any]) -> float:
    got = np.asarray(result).astype(np.float64)
    # A row that keeps no key has lse = -inf on both sides: the difference counts as 0.
    with np.errstate(invalid="ignore"):
        return float(np.where(got == right, 0.0, np.abs(got - right)).max(initial=0.0))


def draw(problem: Problem) -> dict[str, np.ndarray[Any, Any]]:
    """Operands and cotangents by name, floating ones in ``problem.dtype`` unless they have a dtype of their own."""
    p = problem
    rng = np.random.default_rng(0)
    queries, keys = (p.batch, p.q_length, p.q_heads, p.head_dim), (p.batch, p.kv_length, p.kv_heads, p.head_dim)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(jnp.dtype(p.dtype))

    arrays = {name: normal(*shape) for name, shape in (("query", queries), ("key", keys), ("value", keys))}
    arrays["dout"] = normal(*queries)
    arrays["dlse"] = normal(p.batch, p.q_heads, p.q_length).astype(dtypes.accumulation_dtype(p.dtype))
    if p.everything:
        arrays["bias"] = normal(1, p.q_heads, p.q_length, p.kv_length)
        arrays["mask"] = rng.random((p.batch, 1, p.q_length, p.kv_length)) < 0.9
        arrays["alibi_slopes"] = (0.5 ** np.arange(1, p.q_heads + 1)).astype(np.float32)
        arrays["sinks"] = rng.standard_normal(p.q_heads).astype(np.float32)
        for side, length in (("q", p.q_length), ("kv", p.kv_length)):
            arrays[f"{side}_segment_ids"] = np.sort(rng.integers(0, 2, (p.batch, length), np.int32), axis=-1)
            arrays[f"{side}_lengths"] = (length - np.arange(p.batch) * (length // 8)).astype(np.int32)
    return arrays


def results(
    problem: Problem, arrays: Arrays, device: jax.Device, implementation: Implementation | None
) -> dict[str, jax.Array]:
    """out, lse and the gradients of the operands in ``arrays`` on ``device``, through out and lse."""
    found: dict[str, jax.Array] = jax.jit(program(problem, implementation))(
        {name: jax.device_put(x, device) for name, x in arrays.items()}
    )
    return found


def program(
    problem: Problem, implementation: Implementation | None
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """The function that `results` compiles."""
    p = problem
    options: dict[str, Any] = {"causal": p.causal, "precision": p.precision}
    options["q_offset"] = p.kv_length - p.q_length if p.q_offset is None else p.q_offset
    if p.deterministic_backward:
        options["deterministic_backward"] = True
    if p.everything:
        options |= {"window": (p.kv_length // 2, None), "softcap": 20.0, "dropout_rate": 0.1}

    def run(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        names = [name for name in _INPUTS if name in arrays]
        fixed = {name: x for name, x in arrays.items() if name not in (*names, "dout", "dlse")}
        if p.everything:
            fixed["dropout_key"] = jax.random.key(0)
        call = functools.partial(attention, return_lse=True, implementation=implementation, **options, **fixed)
        outputs, pullback = jax.vjp(lambda inputs: call(**inputs), {name: arrays[name] for name in names})
        (gradients,) = pullback((arrays["dout"], arrays["dlse"]))
        return dict(zip(("out", "lse"), outputs, strict=True)) | {f"d{name}": gradients[name] for name in names}

    return run
