"""Score and mask functions in the CPU's kernels: every operation against JAX, on values where it is easily wrong."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash._functions import cpu, trace

ROWS = 200
random = np.random.default_rng(0)
INTEGERS = np.concatenate(
    [[0, 1, -1, 2, -2, 7, 31, 32, -32, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), -(2**31) + 1],
     random.integers(-(2**31), 2**31, 20), random.integers(-300, 300, 20)]
)  # fmt: skip
FLOATS = np.concatenate(
    [[0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-30, -1e-30, 3e38, -3e38, np.inf, -np.inf, np.nan, 2.0**31,
      -(2.0**31), 2.0**32, 88.7, 89.0, -87.0, -104.0, 1e-6, 65504.0, 70000.0], random.standard_normal(40) * 3]
)  # fmt: skip
X, Y = (random.choice(INTEGERS, ROWS).astype(np.int64) for _ in range(2))
F, G = (random.choice(FLOATS, ROWS).astype(np.float32) for _ in range(2))

BINARY: list[tuple[str, Callable[..., Any]]] = [
    *((f.__name__, f) for f in (jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum)),
    *((f.__name__, f) for f in (jax.lax.div, jax.lax.rem, jnp.floor_divide, jnp.remainder)),
    *((f.__name__, f) for f in (jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal)),
    ("where", lambda x, y: jnp.where(x > y, x, y + y)),
]
OF_INTEGERS: list[tuple[str, Callable[..., Any]]] = [
    *((f.__name__, f) for f in (jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor)),
    *((f.__name__, f) for f in (jax.lax.shift_left, jax.lax.shift_right_logical, jax.lax.shift_right_arithmetic)),
    *((f.__name__, lambda x, y, f=f: f(x)) for f in (jnp.bitwise_not, jnp.negative, jnp.abs, jnp.sign)),
    *((f.__name__, lambda x, y, f=f: f(x)) for f in (jax.lax.population_count, jax.lax.clz)),
]
OF_FLOATS: list[tuple[str, Callable[..., Any]]] = [
    *((f.__name__, f) for f in (jax.lax.pow, jax.lax.atan2)),
    *(
        (f.__name__, lambda x, y, f=f: f(x))
        for f in (
            *(jnp.negative, jnp.abs, jnp.sign, jnp.exp, jax.lax.exp2, jnp.log, jnp.log1p, jnp.expm1, jnp.sin, jnp.cos),
            *(jax.lax.tan, jnp.tanh, jax.nn.sigmoid, jnp.sqrt, jax.lax.rsqrt, jax.lax.cbrt, jax.lax.erf, jax.lax.erfc),
            *(jax.lax.sinh, jax.lax.cosh, jax.lax.asin, jax.lax.acos, jax.lax.atan, jax.lax.asinh, jax.lax.acosh),
            *(jax.lax.atanh, jnp.floor, jnp.ceil, jnp.isfinite, jnp.round),
        )
    ),
    ("round_away", lambda x, y: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO)),
    ("integer_pow", lambda x, y: x**3),
]
CASES = [
    *((name, f, dtype) for name, f in BINARY for dtype in ("int32", "uint32", "int8", "uint8", "int16", "uint16")),
    *((name, f, dtype) for name, f in OF_INTEGERS for dtype in ("int32", "uint32")),
    *((name, f, dtype) for name, f in OF_INTEGERS[:3] for dtype in ("int8", "bool")),
    *((name, f, dtype) for name, f in (*BINARY, *OF_FLOATS) for dtype in ("float32", "float16", "bfloat16")),
    *((f"to_{to}", lambda x, y, to=to: x.astype(to), "float32") for to in ("int32", "uint32", "bool", "float16")),
    *((f"to_{to}", lambda x, y, to=to: x.astype(to), "int32") for to in ("uint8", "int16", "bool", "bfloat16")),
    ("to_float32", lambda x, y: x.astype("float32"), "uint32"),
    ("not", lambda x, y: ~x | (x == y), "bool"),
]


def values_of(dtype: str) -> tuple[jax.Array, jax.Array]:
    if dtype == "bool":
        return jnp.asarray(X % 2 == 0), jnp.asarray(Y % 3 == 0)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        return jnp.asarray(X.astype(dtype)), jnp.asarray(Y.astype(dtype))
    return jnp.asarray(F).astype(dtype), jnp.asarray(G).astype(dtype)


def attended(of_pair: Callable[..., Any]) -> np.ndarray:
    """A score function's values in ROWS rows: with one key, whose product is 0, lse is the score."""
    query, key = jnp.zeros((1, ROWS, 1, 8), jnp.float32), jnp.zeros((1, 1, 1, 8), jnp.float32)
    _, lse = jax_flash.attention(query, key, key, score_mod=of_pair, return_lse=True, implementation="cpu")
    return np.asarray(lse[0, 0], np.float64)


def measured(x: jax.Array) -> tuple[jax.Array, ...]:
    """A value as floats of few digits, which lse keeps: the number, or two halves of its bits, and what is special."""
    if x.dtype == bool:
        return (x.astype(jnp.float32),)
    if jnp.issubdtype(x.dtype, jnp.integer):
        bits = x.astype(jnp.int32)
        return (bits & 0xFFFF).astype(jnp.float32), (jax.lax.shift_right_logical(bits, 16)).astype(jnp.float32)
    wide = x.astype(jnp.float32)
    tame = jnp.where(jnp.isfinite(wide), wide, 0.0)
    kind = jnp.where(wide != wide, 3.0, jnp.where(wide == jnp.inf, 2.0, jnp.where(wide == -jnp.inf, 1.0, 0.0)))
    return jnp.where(jnp.abs(tame) < 1e30, tame, jnp.sign(tame) * 4.0), kind


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("number", range(0, len(CASES), 9))
def test_operations(number: int) -> None:
    for name, function, dtype in CASES[number : number + 9]:
        x, y = values_of(dtype)
        with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
            results = measured(jax.jit(function)(x, y))
            for i, want in enumerate(results):
                got = attended(lambda score, b, h, q, kv, i=i, f=function, x=x, y=y: score + measured(f(x[q], y[q]))[i])
                want = np.asarray(want, np.float64)
                # Some units of the dtype, for lse is rounded too; of steep functions, and where XLA's are wrong, more.
                eps = float(jnp.finfo(dtype).eps) if "float" in dtype else 0.0
                bound = 4 * max(eps, 2.0**-23) * np.abs(want) + (1.2e-7 if dtype in ("float16", "float32") else 1e-30)
                if name in ("exp", "sinh", "cosh", "exp2", "expm1", "tan", "pow", "erfc", "cbrt"):
                    bound = 8 * bound
                worst = np.nanargmax(np.where(np.isnan(got - want), np.inf, np.abs(got - want) - bound))
                assert abs(got[worst] - want[worst]) <= bound[worst], (
                    name, dtype, i, x[worst], y[worst], got[worst], want[worst],
                )  # fmt: skip


def test_every_operation_has_a_case() -> None:
    used: set[str] = set()
    for _, function, dtype in CASES:
        x, y = values_of(dtype)
        with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
            traced = trace.trace(
                "score_mod", lambda s, b, h, q, kv, f=function, x=x, y=y: s + f(x[q], y[q]).astype(s.dtype), "score",
                jnp.float32, trace.Captured(),
            )  # fmt: skip
            text = cpu.source(trace.Functions(traced))
        used.update(line.split()[0] for line in text.splitlines())
    assert cpu.operations() - used <= {"b", "h", "kv", "copy"}
