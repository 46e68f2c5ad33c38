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
SEVEN = random.integers(-(2**31), 2**31, 7).astype(np.int32)
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
    ("index", lambda x, y: jnp.asarray(SEVEN)[x], "int32"),
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


STORED = "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32"
KEYS = 83
PERMUTED = random.permutation(KEYS).astype(np.int32)
PLACES: dict[str, Callable[..., Any]] = {
    "row": lambda table, rows, q, kv: table[q, kv],
    "row backwards": lambda table, rows, q, kv: table[q, KEYS - 1 - kv],
    "column": lambda table, rows, q, kv: table[kv, q],
    "drawn rows": lambda table, rows, q, kv: table[rows[q], kv],
    "drawn keys": lambda table, rows, q, kv: table[q, jnp.asarray(PERMUTED)[kv]],
    "pairs of keys": lambda table, rows, q, kv: table[q, kv // 2],
    "one row": lambda table, rows, q, kv: table[0, q + 0 * kv],
    **{
        f"one of {n}": lambda table, rows, q, kv, n=n: table[1, 7 + (q * q + kv * 3) % n]
        for n in (1, 8, 16, 17, 32, 33)
    },
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [5, 150])
def test_elements_of_tables(place: str, rows: int) -> None:
    """Of every dtype, where neighbouring pairs read neighbouring elements, along rows or keys, and where they do not; a
    call of few rows has keys in its lanes."""
    of_pair = PLACES[place]
    size = max(rows, KEYS)
    drawn = jnp.asarray(random.integers(0, size, rows), jnp.int32)
    query, key = jnp.zeros((1, rows, 1, KEYS), jnp.float32), jnp.zeros((1, KEYS, 1, KEYS), jnp.float32)
    value = jnp.eye(KEYS, dtype=jnp.float32)[None, :, None]
    q, kv = np.indices((rows, KEYS))
    for dtype in STORED:
        numbers = random.standard_normal((size, size)) if "float" in dtype else random.integers(0, 4, (size, size))
        table = jnp.asarray(numbers).astype(dtype)

        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any, table: jax.Array = table) -> Any:
            return score + of_pair(table, drawn, q, kv).astype(jnp.float32)

        got = jax_flash.attention(query, key, value, score_mod=score_mod, implementation="cpu")[0, :, 0]
        want = jax.nn.softmax(of_pair(table, drawn, q, kv).astype(jnp.float32), axis=-1)
        np.testing.assert_allclose(got, want, rtol=2e-5, err_msg=dtype)


OF_ELEMENTS: dict[str, Callable[..., Any]] = {
    "itself": lambda score, x, i, places: score + x[i],
    "a function": lambda score, x, i, places: score * jax.nn.sigmoid(x[i]),
    "functions and constants": lambda score, x, i, places: score + jnp.where(x[i] > 0, x[i] * x[i], 2 - jnp.exp(x[i])),
    "where a condition holds": lambda score, x, i, places: jnp.where(
        i % 3 == 0, score, score * jnp.sqrt(jnp.abs(x[i]))
    ),
    "two of one": lambda score, x, i, places: score * x[i] + jnp.tanh(x[i]),
    "a function of two": lambda score, x, i, places: score + jnp.tanh(x[i] * x[x.size - 1 - i]),
    "at an element": lambda score, x, i, places: score + jnp.sin(x[places[i]]),
    "and of pairs": lambda score, x, i, places: score + jnp.sin(x[i] + 0.1 * i.astype(jnp.float32)),
}


@pytest.mark.parametrize("name", OF_ELEMENTS)
@pytest.mark.parametrize("rows", [5, 150])
def test_functions_of_elements_of_small_tables(name: str, rows: int) -> None:
    """Tables around the sizes that registers hold, of which the functions of elements may be computed beforehand, for
    each of the calls that vmap joins; a pair that is dropped may read NaN, and adds nothing to its element's
    gradient."""
    of_pair, random = OF_ELEMENTS[name], np.random.default_rng(rows)
    query, key, value = (
        jnp.asarray(random.standard_normal((1, length, 2, 8)), jnp.float32) for length in (rows, KEYS, KEYS)
    )
    for size in (1, 7, 16, 17, 32, 33, 64, 65):
        tables = random.standard_normal((2, size))
        if size > 1 and name != "a function of two":
            tables[:, size - 1] = np.nan
        places = jnp.asarray(random.integers(0, max(1, size - 1), size), jnp.int8)

        def loss(table: jax.Array, implementation: str, size: int = size, places: jax.Array = places) -> jax.Array:
            def index(h: Any, q: Any, kv: Any) -> Any:
                return (q * q + 3 * kv + h) % size

            out = jax_flash.attention(
                query, key, value, implementation=implementation,
                score_mod=lambda score, b, h, q, kv: of_pair(score, table, index(h, q, kv), places),
                mask_mod=lambda b, h, q, kv: (index(h, q, kv) < size - 1) | (size == 1),
            )  # fmt: skip
            return (out * jnp.cos(jnp.arange(8.0))).sum(), out

        of_all = jax.vmap(jax.grad(loss, has_aux=True), (0, None))
        with jax.numpy_dtype_promotion("standard"):
            found, wanted = (
                of_all(jnp.asarray(tables, jnp.float32), implementation) for implementation in ("cpu", "xla")
            )
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert np.isfinite(want).all()
            np.testing.assert_allclose(got, want, atol=2e-4, err_msg=str(size))


INDICES: dict[str, Callable[..., Any]] = {
    "nothing": lambda h, q, kv: 3,
    "head": lambda h, q, kv: h,
    "row": lambda h, q, kv: q,
    "key": lambda h, q, kv: kv,
    "key backwards": lambda h, q, kv: KEYS - 1 - kv,
    "head and key": lambda h, q, kv: h * KEYS + kv,
    "distance": lambda h, q, kv: q - kv + KEYS,
    "of no form": lambda h, q, kv: (q * kv + h) % KEYS,
    "drawn": lambda h, q, kv: jnp.asarray(PERMUTED)[kv] + q,
}


@pytest.mark.parametrize("implementation", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("index", INDICES)
def test_gradients_of_tables(index: str, implementation: str) -> None:
    """Of a scalar, of elements that all pairs of a row, key or diagonal have in common, that neighbours have, and of
    others; pairs that the mask drops have a derivative of NaN, and add nothing."""
    rows, heads, of_pair, random = 100, 2, INDICES[index], np.random.default_rng(0)
    shapes = (1, rows, heads, 8), (1, KEYS, heads, 8), (1, KEYS, heads, 8), (1, rows, heads, 8)
    # Sums of up to 10,000 numbers of either sign, of which on GPUs each row's depend on a rounded row of out.
    dtype, tolerance = (jnp.float32, 3e-5) if implementation == "cpu" else (jnp.float16, 2e-2)
    inputs = [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]
    table, scale = jnp.asarray(random.standard_normal(300)), jnp.asarray(0.5)

    def gradients(implementation: str, dtype: Any, wide: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        query, key, value, dout = (x.astype(dtype) for x in inputs)

        def loss(table: jax.Array, scale: jax.Array) -> jax.Array:
            def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
                factor = jnp.where((q + kv) % 3 == 0, jnp.nan, 1.0 + 0.1 * (kv % 5).astype(wide))
                return score + (table[of_pair(h, q, kv)] + scale) * factor

            out = jax_flash.attention(
                query, key, value, score_mod=score_mod, mask_mod=lambda b, h, q, kv: (q + kv) % 3 != 0,
                implementation=implementation, **options,
            )  # fmt: skip
            return (out.astype(wide) * dout.astype(wide)).sum()

        return jax.grad(loss, (0, 1))(table.astype(wide), scale.astype(wide))

    wanted = gradients("reference", jnp.float64, jnp.float64)
    for deterministic in (False, True):
        found = gradients(implementation, dtype, jnp.float32, deterministic_backward=deterministic)
        for of_array, want in zip(found, wanted, strict=True):
            assert np.abs(want).max() > 0.01
            np.testing.assert_allclose(of_array, want, atol=tolerance)
