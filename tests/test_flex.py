"""score_mod, mask_mod and block_mask: values and derivatives against dense attention in float64, and their promises."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flex_gallery as gallery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_flash
from jax_flash import flex
from jax_flash._call.options import Options
from jax_flash._functions import cuda, plain, trace
from jax_flash._implementations import choice
from jax_flash.flex import BlockMask, create_block_mask

B, N, K, H = 2, 4, 2, 16
IMPLEMENTATIONS = ("xla", "reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SLOW_XLA = ("reference", "cpu", pytest.param("xla", marks=pytest.mark.slow), IMPLEMENTATIONS[-1])
rng = np.random.default_rng(0)
TABLE = jnp.ones((N, 16), jnp.float32)


def inputs_of(t: int, s: int, dtype: Any = np.float64, batch: int = B, seed: int = 0) -> list[jax.Array]:
    """query, key, value and dout."""
    random = np.random.default_rng(seed)
    shapes = ((batch, t, N, H), (batch, s, K, H), (batch, s, K, H), (batch, t, N, H))
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_offset: int = 0,
    keep: Any = True,
) -> tuple[jax.Array, jax.Array]:
    """out and lse with all pairs in memory."""
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    b, h, q, kv = (jnp.arange(n, dtype=jnp.int32) for n in scores.shape)
    q = q + np.int32(q_offset)
    if score_mod is not None:
        scores = gallery._over_all(score_mod)(scores, b, h, q, kv)
    if mask_mod is not None:
        keep = keep & gallery._over_all(lambda _, *pair: mask_mod(*pair))(scores, b, h, q, kv)
    scores = jnp.where(keep, scores, -jnp.inf)
    some = jnp.isfinite(scores).any(axis=-1, keepdims=True)
    safe = jnp.where(some, scores, 0.0)
    weights = jnp.where(some, jax.nn.softmax(safe, axis=-1), 0.0)
    lse = jnp.where(some[..., 0], jax.nn.logsumexp(safe, axis=-1), -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", weights, value), lse


def kind_of(implementation: str) -> tuple[Any, float, float]:
    """The dtype in which an implementation is tested, and the tolerance of values and of gradients."""
    tolerances = {"cpu": (np.float32, 5e-6, 3e-5), "cuda": (np.float32, 2e-5, 1e-4)}
    return tolerances.get(implementation, (np.float64, 1e-11, 1e-10))


def exact(x: Any) -> Any:
    """With the floating arrays in float64."""
    return jax.tree.map(
        lambda a: a.astype(jnp.float64) if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.floating) else a, x
    )


def wanted_of(plainly: Callable[..., jax.Array], *args: Any) -> Any:
    """gradients_of() as one program: operation by operation, compiling them takes most of a test."""
    return jax.jit(functools.partial(gallery.gradients_of, plainly))(*args)


def close(found: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    """Whether numbers differ by at most ``tolerance`` of themselves, or of the largest of their array."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        y = np.asarray(y, np.float64)
        largest = np.abs(y[np.isfinite(y)]).max(initial=1.0)
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance * largest)


# Values


QUICK = ("cpu", "cuda", *(f"xla {name}" for name in ("causal", "packed_sequences", "relative_bias")), "reference alibi")
"""What a commit runs of the gallery; the rest is marked slow."""


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(
            name,
            x,
            marks=[
                *([pytest.mark.gpu] if x == "cuda" else []),
                *([] if {x, f"{x} {name}"} & {*QUICK} else [pytest.mark.slow]),
            ],
        )
        for name in gallery.GALLERY
        for x in ("xla", "reference", "cpu", "cuda")
    ],
)
def test_gallery(name: str, implementation: str) -> None:
    """Out and all gradients, against float64; several chunks long, which the length does not fill."""
    sizes = gallery.Sizes(B, N, 289)
    dtype, _, tolerance = kind_of(implementation)
    *inputs, dout = inputs_of(sizes.length, sizes.length, dtype)
    arrays = gallery.draw(name, sizes, dtype=dtype)
    found = gallery.gradients_of(
        lambda q, k, v, a: gallery.attend(name, sizes, q, k, v, a, implementation=implementation), dout, inputs, arrays
    )
    wanted = wanted_of(
        lambda q, k, v, a: gallery.dense(name, sizes, q, k, v, a), exact(dout), exact(inputs), exact(arrays)
    )
    close(found, wanted, tolerance)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("name", "dtype", "length"),
    [
        *(
            (name, dtype, 70)
            for name in ("relative_bias", "graphormer", "packed_sequences")
            for dtype in ("float16", "bfloat16", "float32")
        ),
        *(
            pytest.param(name, dtype, 333, marks=pytest.mark.gpu)
            for name in gallery.GALLERY
            for dtype in ("float16", "bfloat16")
        ),
    ],
)
def test_dtypes(name: str, dtype: str, length: int) -> None:
    """Out and all gradients, those of captured arrays in float32; on GPUs the whole gallery."""
    sizes = gallery.Sizes(B, N, length)
    served_by = {"implementation": "cuda"} if length > 70 else {}
    exact = inputs_of(sizes.length, sizes.length)
    *inputs, dout = (x.astype(dtype) for x in exact)
    arrays = gallery.draw(name, sizes, dtype=np.float32)
    found = gallery.gradients_of(
        lambda q, k, v, a: gallery.attend(name, sizes, q, k, v, a, **served_by), dout, inputs, arrays
    )
    wide = [x.astype(jnp.float64) for x in inputs]
    of_wide = {k: x.astype(jnp.float64) if x.dtype == jnp.float32 else x for k, x in arrays.items()}
    dout = dout.astype(jnp.float64)
    wanted = wanted_of(lambda q, k, v, a: gallery.dense(name, sizes, q, k, v, a), dout, wide, of_wide)
    epsilon = float(jnp.finfo(dtype).eps)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == (dtype if x.ndim == 4 else jnp.float32)
        scale = np.abs(np.asarray(y)).max()
        assert np.abs(np.asarray(x, np.float64) - np.asarray(y)).max() <= 8 * epsilon * scale + 1e-5 * scale


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("implementation", SLOW_XLA)
def test_captured_arrays_of_every_kind(implementation: str) -> None:
    """A scalar, float16 and bfloat16 tables, booleans, uint8, and one that is used in two functions."""
    t, s = 40, 300
    *inputs, dout = inputs_of(t, s, np.float32)
    arrays = {
        "scalar": jnp.float32(0.7),
        "half": jnp.asarray(rng.standard_normal((N, 5)), jnp.float16),
        "brain": jnp.asarray(rng.standard_normal(s), jnp.bfloat16),
        "flags": jnp.asarray(rng.random((B, s)) < 0.7),
        "bytes": jnp.asarray(rng.integers(0, 5, s), jnp.uint8),
    }

    def mods(a: dict[str, jax.Array]) -> tuple[Any, Any]:
        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            bias = a["half"][h, a["bytes"][kv].astype(jnp.int32)].astype(score.dtype)
            return score * a["scalar"].astype(score.dtype) + bias + a["brain"][kv].astype(score.dtype)

        return score_mod, lambda b, h, q, kv: a["flags"][b, kv] & (a["bytes"][kv] < 4)

    def ours(q: Any, k: Any, v: Any, a: Any) -> Any:
        score_mod, mask_mod = mods(a)
        return jax_flash.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, implementation=implementation)

    def plainly(q: Any, k: Any, v: Any, a: Any) -> Any:
        return dense(q, k, v, *mods(a))[0]

    found = gallery.gradients_of(ours, dout, inputs, arrays)
    wanted = wanted_of(plainly, dout, inputs, arrays)
    assert {k: x.dtype for k, x in found[2].items()} == {k: arrays[k].dtype for k in ("scalar", "half", "brain")}
    close(found[:2], wanted[:2], 1e-5)
    close(found[2], wanted[2], 2e-2)


def test_gradients_of_captured_scalars_are_lowered_for_gpus() -> None:
    """Such an operand has no axes, and so no head dim that could be padded."""
    *inputs, dout = inputs_of(16, 16, np.float32)

    def loss(scalar: jax.Array) -> jax.Array:
        return (dout * jax_flash.attention(*inputs, score_mod=lambda s, b, h, q, kv: s * scalar)).sum()

    traced = jax.jit(jax.grad(loss)).trace(jnp.float32(2))
    assert "jax_flash" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("implementation", SLOW_XLA)
def test_with_every_other_option(implementation: str) -> None:
    """It comes after softcap, bias and ALiBi; masks are a conjunction; dropout drops the same; lse is of the result."""
    t, s, offset = 50, 290, 240
    dtype, tolerance, of_gradients = kind_of(implementation)
    query, key, value, dout = inputs_of(t, s, dtype)
    bias = jnp.asarray(rng.standard_normal((1, N, t, s)), dtype)
    slopes, table = jnp.asarray([0.1, 0.2, 0.3, 0.4], dtype), jnp.asarray(rng.standard_normal(s), dtype)
    q_ids = jnp.zeros((B, t), jnp.int32)
    kv_ids = jnp.asarray(rng.integers(0, 2, (B, s)), jnp.int32)
    dropout_key = jax.random.key(1)
    options = dict(causal=True, window=(200, None), q_offset=offset, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    options |= dict(kv_lengths=[250, 290], softcap=2.0, sinks=jnp.asarray([0.0, 1.0, -1.0, 2.0], dtype))

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
        return score * table[kv] + (q - kv).astype(score.dtype) * 0.01

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv + h) % 3 != 0

    def ours(q: Any, k: Any, v: Any, bias: Any, slopes: Any, table: Any) -> Any:
        return jax_flash.attention(
            q, k, v, bias=bias, alibi_slopes=slopes, score_mod=lambda *x: score_mod(*x, table), mask_mod=mask_mod,
            dropout_rate=0.3, dropout_key=dropout_key, return_lse=True, implementation=implementation, **options,
        )  # fmt: skip

    def plainly(q: Any, k: Any, v: Any, bias: Any, slopes: Any, table: Any) -> Any:
        # The same by a bias whose values the function gives: nothing but the order of the operations is repeated here.
        products = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, axis=2)) * H**-0.5
        rows, columns = jnp.arange(t)[:, None] + offset, jnp.arange(s)
        distance = (rows - columns).astype(jnp.float64)
        before = 2.0 * jnp.tanh(products / 2.0) + bias - slopes[:, None, None] * jnp.abs(distance)
        after = before * table + distance * 0.01
        keep = (jnp.arange(s) + jnp.arange(N)[:, None]) % 3 != 0
        zeros = jnp.zeros_like(q)
        plain_options = {name: exact(x) for name, x in options.items() if name != "softcap"}
        return jax_flash.attention(
            zeros, k, v, bias=after, mask=keep[None, :, None], dropout_rate=0.3, dropout_key=dropout_key,
            return_lse=True, implementation="reference", **plain_options,
        )  # fmt: skip

    args = (query, key, value, bias, slopes, table)
    (out, lse), pullback = jax.vjp(ours, *args)
    (want, want_lse), want_pullback = jax.vjp(plainly, *exact(args))
    close((out, lse), (want, want_lse), tolerance)
    dlse = jnp.asarray(rng.standard_normal(lse.shape), dtype)
    close(pullback((dout, dlse)), want_pullback(exact((dout, dlse))), of_gradients)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("implementation", SLOW_XLA)
def test_dropped_pairs_add_exactly_nothing(implementation: str) -> None:
    """Where a pair is dropped the function, its derivatives and what it captured may be NaN or infinite."""
    t = s = 280
    dtype, tolerance, of_gradients = kind_of(implementation)
    query, key, value, dout = inputs_of(t, s, dtype)
    table = jnp.asarray(rng.standard_normal(s), dtype).at[7].set(jnp.nan).at[260].set(jnp.inf)

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
        distance = (q - kv).astype(score.dtype)
        return score / jnp.sqrt(distance) + table[kv] * jnp.log(distance)  # NaN from the diagonal on

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q > kv) & (kv != 7) & (kv != 260)

    def ours(q: Any, k: Any, v: Any, table: Any, block_mask: Any = None) -> Any:
        return jax_flash.attention(
            q, k, v, score_mod=lambda *x: score_mod(*x, table), mask_mod=None if block_mask else mask_mod,
            block_mask=block_mask, implementation=implementation, return_lse=True,
        )  # fmt: skip

    def safely(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
        distance = jnp.maximum(q - kv, 1).astype(score.dtype)
        return score / jnp.sqrt(distance) + jnp.where(jnp.isfinite(table), table, 0.0)[kv] * jnp.log(distance)

    def plainly(q: Any, k: Any, v: Any, table: Any) -> Any:
        return dense(q, k, v, lambda *x: safely(*x, table), mask_mod)

    cotangents = dout, jnp.asarray(rng.standard_normal((B, N, t)), dtype)
    wanted, pullback = jax.vjp(jax.jit(plainly), *exact((query, key, value, table)))
    gradients = pullback(exact(cotangents))
    for block_mask in (None, create_block_mask(mask_mod, None, None, t, s, block_size=64)):
        found, pull = jax.vjp(functools.partial(ours, block_mask=block_mask), query, key, value, table)
        close(found, wanted, tolerance)
        dtable = pull(cotangents)[3]
        close(pull(cotangents), gradients, of_gradients)
        assert dtable[7] == dtable[260] == 0
    # The second derivative is finite, too.
    second = jax.jvp(lambda x: jax.vjp(functools.partial(ours, query, key, value), x)[1](cotangents)[0],
                     (table,), (jnp.ones_like(table).at[7].set(0.0).at[260].set(0.0),))[1]  # fmt: skip
    assert np.isfinite(second).all()


@pytest.mark.parametrize("t", [1, 3, 70])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_mask_drops_pairs_whatever_the_function_makes_of_them(implementation: str, t: int) -> None:
    """It comes before the function in memory, but a pair that it drops has no finite score."""
    s = 130
    dtype, tolerance, of_gradients = kind_of(implementation)
    query, key, value, dout = inputs_of(t, s, dtype)
    mask = jnp.asarray(rng.random((B, N, t, s)) < 0.4).at[:, :, t // 2].set(False)

    def score_mod(score: Any, *_: Any) -> Any:
        return 2 * jnp.tanh(score / 2)

    def ours(*inputs: Any) -> Any:
        return jax_flash.attention(*inputs, score_mod=score_mod, mask=mask, implementation=implementation)

    def plainly(*inputs: Any) -> Any:
        return dense(*inputs, score_mod, keep=mask)[0]

    found, pullback = jax.vjp(ours, query, key, value)
    wanted, plain_pullback = jax.vjp(plainly, *exact((query, key, value)))
    close(found, wanted, tolerance)
    close(pullback(dout), plain_pullback(exact(dout)), of_gradients)


def test_captured_gradients_where_lse_is_large() -> None:
    """CPU kernels state such rows again; beyond them a tile has ordinary rows."""
    query, key, value, dout = inputs_of(70, 130, np.float32)
    query = query.at[:, ::3].multiply(1000.0)
    table = jnp.asarray(rng.standard_normal(130), np.float32)

    def gradient(implementation: str, query: Any, key: Any, value: Any, table: Any, dout: Any) -> Any:
        def attend(table: Any) -> Any:
            return jax_flash.attention(
                query, key, value, score_mod=lambda s, b, h, q, kv: s + table[kv], implementation=implementation
            )

        return jax.vjp(attend, table)[1](dout)

    args = query, key, value, table, dout
    close(gradient("cpu", *args), gradient("reference", *exact(args)), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_a_score_function_may_return(implementation: str) -> None:
    """-inf drops a pair, +inf and NaN make the row NaN, and a row that keeps nothing gives zeros."""
    query, key, value, _ = inputs_of(6, 20, kind_of(implementation)[0])

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        score = jnp.where((q == 0) & (kv < 10), -jnp.inf, score)
        score = jnp.where((q == 1) & (kv == 3), jnp.inf, score)
        score = jnp.where((q == 2) & (kv == 3), jnp.nan, score)
        return jnp.where(q == 3, -jnp.inf, score)

    attend = functools.partial(jax_flash.attention, return_lse=True, implementation=implementation)
    out, lse = attend(query, key, value, score_mod=score_mod)
    plainly, plain_lse = attend(query, key, value)
    dropped, dropped_lse = attend(query[:, :1], key[:, 10:], value[:, 10:])
    close((out[:, :1], lse[..., :1]), (dropped, dropped_lse), kind_of(implementation)[1])
    assert np.isnan(out[:, 2]).all()
    assert not np.isfinite(out[:, 1]).any()
    assert not out[:, 3].any()
    assert np.isneginf(lse[..., 3]).all()
    close((out[:, 4:], lse[..., 4:]), (plainly[:, 4:], plain_lse[..., 4:]), kind_of(implementation)[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_positions(implementation: str) -> None:
    """q counts from q_offset, which may be negative, traced and different in every batch entry; it saturates."""
    query, key, value, _ = inputs_of(5, 30, kind_of(implementation)[0])
    seen = functools.partial(
        jax_flash.attention, query, key, value, mask_mod=lambda b, h, q, kv: kv <= q, implementation=implementation
    )
    alike = functools.partial(close, tolerance=kind_of(implementation)[1])
    alike(seen(q_offset=12), jax_flash.attention(query, key, value, causal=True, q_offset=12))
    alike(seen(q_offset=-3), jax_flash.attention(query, key, value, causal=True, q_offset=-3))
    offsets = jnp.asarray([4, 20], jnp.int32)
    wanted = jax_flash.attention(query, key, value, causal=True, q_offset=offsets)
    alike(jax.jit(lambda offsets: seen(q_offset=offsets))(offsets), wanted)
    largest = 2**31 - 2
    last = jax_flash.attention(
        query, key, value, q_offset=largest, implementation=implementation,
        mask_mod=lambda b, h, q, kv: (q == 2**31 - 1) == (kv < 10),
    )  # fmt: skip
    alike(last[:, 1:], jax_flash.attention(query[:, 1:], key[:, :10], value[:, :10]))


@pytest.mark.parametrize("offset", [0, 50, -20])
@pytest.mark.parametrize("lengths", [(1, 150), (70, 130), (150, 70), (33, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_the_distance_decides(implementation: str, lengths: tuple[int, int], offset: int) -> None:
    """Kernels compute it once for a diagonal, where the rows of a tile are those of one head."""
    dtype, tolerance, of_gradients = kind_of(implementation)
    query, key, value, dout = inputs_of(*lengths, dtype)
    tables = jnp.asarray(rng.standard_normal((N, 40)), dtype), jnp.asarray(rng.standard_normal(N), dtype)

    def attend(of: Callable[..., Any], *inputs: Any) -> Any:
        *arrays, table, slopes = inputs

        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            apart = jnp.abs(q - kv)
            far = (slopes[h] * jnp.log1p(apart.astype(score.dtype))).astype(score.dtype)
            return score * table[h, apart // 4] + jnp.where(kv > q, far, -far)

        def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (q - kv < 60) & ((kv - q) % 3 != 1)

        return of(*arrays, score_mod=score_mod, mask_mod=mask_mod, q_offset=offset)

    ours = functools.partial(jax_flash.attention, implementation=implementation)
    for group in (1, N // K):
        inputs = query, *(jnp.repeat(x, N // K // group, axis=2) for x in (key, value)), *tables
        found, pullback = jax.vjp(functools.partial(attend, ours), *inputs)
        plainly = functools.partial(attend, lambda *x, **options: dense(*x, **options)[0])
        wanted, plain_pullback = jax.vjp(plainly, *exact(inputs))
        close(found, wanted, tolerance)
        close(pullback(dout), plain_pullback(exact(dout)), of_gradients)


# Transformations


def relative(table: jax.Array, s: int) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: score + table[h, q - kv + s] * score


def test_no_program_is_compiled_again() -> None:
    """Neither for new values, nor for another function object that computes the same."""
    query, key, value, _ = inputs_of(8, 8, np.float32)
    traced = []

    @jax.jit
    def layer(query: Any, table: Any, ids: Any) -> Any:
        traced.append(1)
        for _ in range(3):
            block_mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 8, 8)
            query = jax_flash.attention(query, key, value, score_mod=relative(table, 8), block_mask=block_mask)
        return query

    first = layer(query, jnp.ones((N, 16), jnp.float32), jnp.zeros(8, jnp.int32))
    second = layer(query, jnp.zeros((N, 16), jnp.float32), jnp.arange(8, dtype=jnp.int32))
    assert len(traced) == 1
    assert not np.allclose(first, second)
    traced_once = functools.partial(trace.trace, "score_mod", kind="score", dtype=jnp.float32)
    records = [traced_once(relative(jnp.ones((N, 16), jnp.float32), 8), captured=trace.Captured()) for _ in range(2)]
    assert records[0] == records[1]
    assert hash(records[0]) == hash(records[1])
    other = trace.trace(
        "score_mod", relative(jnp.ones((N, 16), jnp.float32), 7), "score", jnp.float32, trace.Captured()
    )
    assert records[0] != other


def _own_derivative(factor: float) -> Callable[..., Any]:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct * factor,))
    return f


@pytest.mark.parametrize(
    "activation", [jax.nn.relu, jax.nn.silu, jax.nn.gelu, jax.nn.softplus, lambda x: _own_derivative(3.0)(x)]
)  # fmt: skip
def test_functions_with_derivatives_of_their_own_are_known_again(activation: Callable[..., Any]) -> None:
    """32 layers, each with its own function object: one function of one text."""

    def layer() -> Any:
        score_mod = lambda score, b, h, q, kv: activation(score) + TABLE[h, q]  # noqa: E731
        captured = trace.Captured()
        return trace.trace("score_mod", score_mod, "score", jnp.float32, captured)

    layers = [layer() for _ in range(32)]
    assert len(set(layers)) == 1
    assert len({cuda.source(trace.Functions(x), derives=True) for x in layers}) == 1


def test_functions_with_other_derivatives_are_others() -> None:
    def of(factor: float) -> trace.Function:
        f = _own_derivative(factor)
        return trace.trace("score_mod", lambda s, b, h, q, kv: f(s), "score", jnp.float32, trace.Captured())

    assert of(3.0) == of(3.0)
    assert of(3.0) != of(4.0)


def test_what_captured_arrays_alone_decide_is_computed_outside() -> None:
    table = jnp.arange(6.0, dtype=jnp.float32)
    captured = trace.Captured()
    found = trace.trace(
        "score_mod", lambda s, b, h, q, kv: s + jnp.cumsum(table * 2)[kv], "score", jnp.float32, captured
    )
    assert [x.primitive.name for x in plain.inlined(found.jaxpr).eqns if x.primitive.name.startswith("cum")] == []
    close(captured.arrays, [np.cumsum(2 * np.arange(6.0))], 1e-6)


@pytest.mark.parametrize("mapped", ["arrays", "query", "all", pytest.param("twice", marks=pytest.mark.slow)])
def test_vmap(mapped: str) -> None:
    """b stays the batch entry of one call, and a mapped captured array is that of its call, gradients too."""
    t = 20
    size = 3
    tables = jnp.asarray(rng.standard_normal((size, N, 2 * t)))
    ids = jnp.asarray(rng.integers(0, 2, (B, t)), jnp.int32)
    drawn = [jnp.stack(x) for x in zip(*(inputs_of(t, t, seed=i) for i in range(size)), strict=True)]

    def attend(query: Any, key: Any, value: Any, table: Any) -> Any:
        def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (ids[b, q] == ids[b, kv]) | (q == kv)

        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return relative(table, t)(score, b, h, q, kv) + b.astype(score.dtype) * (kv == 0).astype(score.dtype)

        block_mask = create_block_mask(mask_mod, B, None, t, t, block_size=8)
        return jax_flash.attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

    def gradients(query: Any, key: Any, value: Any, table: Any, dout: Any) -> Any:
        out, pullback = jax.vjp(attend, query, key, value, table)
        return out, pullback(dout)

    *qkv, dout = drawn
    axes = {"arrays": (None, None, None, 0, None), "query": (0, None, None, None, 0)}.get(mapped, (0,) * 5)
    args = [x if axis == 0 else x[0] for x, axis in zip((*qkv, tables, dout), axes, strict=True)]
    run = gradients
    if mapped == "twice":
        args = [jnp.stack([x, x[::-1]]) for x in args]
        args[3], axes = args[3][:, 0], (0,) * 5
        found = jax.vmap(jax.vmap(run, (0, 0, 0, None, 0)))(*args)
        each = [run(*(x[i, j] if n != 3 else x[i] for n, x in enumerate(args))) for i in range(2) for j in range(size)]
        close(found, jax.tree.map(lambda *xs: jnp.stack(xs).reshape(2, size, *xs[0].shape), *each))
        return
    found = jax.vmap(run, axes)(*args)
    each = [run(*(x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True))) for i in range(size)]
    close(found, jax.tree.map(lambda *xs: jnp.stack(xs), *each))


@pytest.mark.slow(9)
def test_forward_mode_and_second_derivatives() -> None:
    t = 12
    *inputs, dout = inputs_of(t, t)
    table = jnp.asarray(rng.standard_normal((N, 2 * t)))

    def loss(attend: Callable[..., Any], table: Any, query: Any) -> Any:
        return (attend(query, *inputs[1:], relative(table, t), lambda b, h, q, kv: q >= kv) * dout).sum()

    def ours(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
        return jax_flash.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)

    def plainly(*args: Any) -> Any:
        return dense(*args)[0]

    found, wanted = (functools.partial(loss, x) for x in (ours, plainly))
    args, moved = (table, inputs[0]), (jnp.ones_like(table), jnp.ones_like(inputs[0]))
    close(jax.jvp(found, args, moved), jax.jvp(wanted, args, moved))
    close(jax.jvp(jax.grad(found, (0, 1)), args, moved), jax.jvp(jax.grad(wanted, (0, 1)), args, moved), 1e-10)
    close(jax.grad(lambda x: (jax.grad(found)(x, inputs[0]) ** 2).sum())(table),
          jax.grad(lambda x: (jax.grad(wanted)(x, inputs[0]) ** 2).sum())(table), 1e-10)  # fmt: skip


def test_scan_over_layers_and_remat() -> None:
    """A block mask is carried as a pytree, and each layer has its own table."""
    t = 40
    query, key, value, dout = inputs_of(t, t)
    tables = jnp.asarray(rng.standard_normal((3, N, 2 * t)))
    ids = jnp.sort(jnp.asarray(rng.integers(0, 3, (B, t)), jnp.int32))
    block_mask = create_block_mask(lambda b, h, q, kv: ids[b, q] == ids[b, kv], B, None, t, t, block_size=16)

    def layer(query: Any, table: Any, block_mask: Any) -> Any:
        return jax_flash.attention(query, key, value, score_mod=relative(table, t), block_mask=block_mask)

    def scanned(query: Any, tables: Any, block_mask: Any) -> Any:
        step = jax.checkpoint(lambda x, table: (layer(x, table, block_mask), None))
        return jax.lax.scan(step, query, tables)[0]

    def unrolled(query: Any, tables: Any, block_mask: Any) -> Any:
        for table in tables:
            query = layer(query, table, block_mask)
        return query

    found, pullback = jax.vjp(jax.jit(scanned), query, tables, block_mask)
    wanted, plain_pullback = jax.vjp(unrolled, query, tables, block_mask)
    close(found, wanted)
    close(pullback(dout)[:2], plain_pullback(dout)[:2])


AXES = {"batch": (2, 1, 1), "rows": (1, 4, 1), "heads": (1, 1, 4), "batch and rows": (2, 2, 1), "key heads": (1, 1, 2)}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("axes", list(AXES))
def test_sharding(axes: str) -> None:
    """On a mesh functions see the indices of the whole call."""
    sizes = AXES[axes]
    mesh = jax.make_mesh(sizes, ("b", "t", "n"), devices=jax.devices("cpu")[: int(np.prod(sizes))],
                         axis_types=(jax.sharding.AxisType.Auto,) * 3)  # fmt: skip
    t, s = 72, 90
    *inputs, dout = inputs_of(t, s)
    table = jnp.asarray(rng.standard_normal((N, t + s)))
    ids = jnp.asarray(rng.integers(0, 3, (B, s)), jnp.int32)

    def attend(query: Any, key: Any, value: Any, table: Any) -> Any:
        def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (ids[b, kv] != h % 3) & (q + 20 >= kv)

        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + table[h, q - kv + s] * (b + 1).astype(score.dtype)

        block_mask = create_block_mask(mask_mod, B, N, t, s, q_offset=3, block_size=(16, 32))
        return jax_flash.attention(query, key, value, q_offset=3, score_mod=score_mod, block_mask=block_mask)

    def gradients(*args: Any) -> Any:
        out, pullback = jax.vjp(attend, *args)
        return out, pullback(dout)

    wanted = gradients(*inputs, table)
    of_query = NamedSharding(mesh, PartitionSpec("b", "t", "n"))
    of_key = NamedSharding(mesh, PartitionSpec("b", None, "n" if sizes[2] <= K else None))
    placed = [jax.device_put(x, of_query if i == 0 else of_key) for i, x in enumerate(inputs)]
    found = jax.jit(gradients)(*placed, table)
    close(found, wanted)


def test_rows_on_a_mesh_that_do_not_begin_with_a_block() -> None:
    """Without a function that decides in partial blocks, too."""
    mesh = jax.make_mesh((4,), ("t",), devices=jax.devices("cpu")[:4], axis_types=(jax.sharding.AxisType.Auto,))
    query, key, value, _ = inputs_of(40, 64)
    counts, kept = jnp.asarray([[[0, 2, 1]]]), jnp.asarray([[[[0, 1], [0, 1], [1, 0]]]])
    block_mask = BlockMask.from_lists(
        counts * 0, kept, full_kv_num_blocks=counts, full_kv_indices=kept, lengths=(40, 64), block_size=(16, 32)
    )
    attend = jax.jit(functools.partial(jax_flash.attention, block_mask=block_mask))
    placed = jax.device_put(query, NamedSharding(mesh, PartitionSpec(None, "t")))
    close(attend(placed, key, value), attend(query, key, value))


@pytest.mark.slow(9)
def test_packed_sequences_count_from_their_own_first_row() -> None:
    lengths_q, lengths_kv = [5, 0, 17, 10], [9, 4, 20, 10]
    cu_q, cu_kv = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths_q, lengths_kv))
    query, key, value, dout = (x[0] for x in inputs_of(34, 45, batch=1))
    table, weights = jnp.asarray(rng.standard_normal((N, 50))), jnp.asarray([1.0, 2.0, 3.0, 4.0])
    limits = 17, 20

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q + b >= kv) | (kv > 15)

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * weights[b] + table[h, q - kv + 25]

    block_mask = create_block_mask(mask_mod, 4, None, *limits, block_size=8)

    def packed(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return jax_flash.attention_varlen(query, key, value, cu_q, cu_kv, *limits, score_mod=score_mod, **options)

    def one_by_one(query: Any, key: Any, value: Any) -> Any:
        outs = []
        for i in range(4):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_kv[i], cu_kv[i + 1])
            if lengths_q[i]:
                outs.append(
                    dense(query[None, rows], key[None, keys], value[None, keys],
                          lambda s, b, *x, i=i: score_mod(s, jnp.int32(i), *x),
                          lambda b, *x, i=i: mask_mod(jnp.int32(i), *x))[0][0]
                )  # fmt: skip
        return jnp.concatenate([*outs, jnp.zeros((2, N, H))])

    wanted, pullback = jax.vjp(one_by_one, query, key, value)
    for options in ({"mask_mod": mask_mod}, {"block_mask": block_mask}):
        found, pull = jax.vjp(functools.partial(packed, **options), query, key, value)
        close(found, wanted)
        close(pull(dout), pullback(dout))


# Block masks


@pytest.mark.parametrize("block_size", [128, (16, 40)])
@pytest.mark.parametrize("lengths", [(100, 100), (70, 130), (1, 300), (33, 1)])
def test_create_block_mask(lengths: tuple[int, int], block_size: Any) -> None:
    t, s = lengths
    height, width = (block_size, block_size) if isinstance(block_size, int) else block_size

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - 5 >= kv) | ((kv > 60) & (h == 1)) | (b == 1)

    found = jax.jit(lambda: create_block_mask(mask_mod, 2, 3, t, s, q_offset=7, block_size=block_size))()
    pairs = np.arange(2)[:, None, None, None], np.arange(3)[:, None, None], np.arange(t)[:, None] + 7, np.arange(s)
    kept = np.broadcast_to(mask_mod(*pairs), (2, 3, t, s))
    assert found.kinds.dtype == jnp.int8
    assert found.kinds.shape == (2, 3, -(-t // height), -(-s // width))
    for i in range(found.kinds.shape[2]):
        for j in range(found.kinds.shape[3]):
            block = kept[:, :, i * height : (i + 1) * height, j * width : (j + 1) * width]
            wanted = np.where(block.all(axis=(2, 3)), 2, np.where(block.any(axis=(2, 3)), 1, 0))
            np.testing.assert_array_equal(found.kinds[:, :, i, j], wanted)
    assert found.q_offset == 7
    assert bool(found.mask_mod(1, 0, 0, 0)) is True


def test_a_long_block_mask_needs_no_array_of_pairs() -> None:
    length = 131072
    window = lambda b, h, q, kv: (q >= kv) & (q - kv < 4096)  # noqa: E731
    make = jax.jit(lambda: create_block_mask(window, None, None, length, length))
    memory = make.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes <= 2 * (length // 128) ** 2
    assert memory.temp_size_in_bytes < 2**26  # all pairs are 2^34


def test_and_or() -> None:
    causal, even = (lambda b, h, q, kv: q >= kv), (lambda b, h, q, kv: kv % 2 == 0)
    query, key, value, _ = inputs_of(9, 9)
    for join, pairs in ((flex.and_masks, np.logical_and), (flex.or_masks, np.logical_or)):
        mask = pairs(np.tri(9, dtype=bool), np.arange(9) % 2 == 0)
        found = jax_flash.attention(query, key, value, mask_mod=join(causal, even))
        close(found, jax_flash.attention(query, key, value, mask=mask[None, None]))


def test_lists() -> None:
    """Full blocks keep all their pairs, partial ones those of the function, or all without one."""
    t, s, size = 40, 50, 16
    counts, indices = np.array([[[1, 2, 0]]]), np.array([[[[3, -5], [0, 2], [9, 9]]]])
    full, full_indices = np.array([[[2, 0, 1]]]), np.array([[[[0, 1], [7, 7], [2, 0]]]])

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q + kv) % 2 == 0

    keep = np.zeros((t, s), bool)
    odd = np.add.outer(np.arange(t), np.arange(s)) % 2 == 0
    for of_function in (True, False):
        keep[:] = False
        for i, j, is_full in [(0, 3, 0), (1, 0, 0), (1, 2, 0), (0, 0, 1), (0, 1, 1), (2, 2, 1)]:
            block = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
            keep[block] = True if is_full or not of_function else odd[block]
        block_mask = BlockMask.from_lists(
            counts, indices, full, full_indices, lengths=(t, s), block_size=size,
            mask_mod=mask_mod if of_function else None,
        )  # fmt: skip
        query, key, value, _ = inputs_of(t, s)
        close(jax_flash.attention(query, key, value, block_mask=block_mask), dense(query, key, value, keep=keep)[0])
    assert "empty" in repr(block_mask)
    assert block_mask.sparsity() == pytest.approx(0.5)


def test_with_both_masks_a_pair_is_kept_if_both_keep_it() -> None:
    query, key, value, _ = inputs_of(40, 40)
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 40, 40, block_size=8)
    found = jax_flash.attention(query, key, value, block_mask=block_mask, mask_mod=lambda b, h, q, kv: kv % 3 != 1)
    keep = np.tri(40, dtype=bool) & (np.arange(40) % 3 != 1)
    close(found, dense(query, key, value, keep=keep)[0])


def test_blocks_that_are_empty_are_not_read() -> None:
    """A key in no kept pair may be NaN; xla skips whole chunks, where values may be, too."""
    t = s = 1024
    query, key, value, dout = inputs_of(t, s, np.float32, batch=1)
    block_mask = create_block_mask(lambda b, h, q, kv: kv >= 512, None, None, t, s)
    poisoned = [x.at[:, :512].set(jnp.nan) for x in (key, value)]
    attend = functools.partial(jax_flash.attention, block_mask=block_mask, implementation="xla")
    found, pullback = jax.vjp(attend, query, *poisoned)
    close(found, attend(query, key, value), 1e-6)
    assert all(np.isfinite(x).all() for x in pullback(dout))


def test_decoding_with_the_rows_of_a_block_mask() -> None:
    """One row after another, at a traced position."""
    t = 70
    query, key, value, _ = inputs_of(t, t)
    mask_mod = lambda b, h, q, kv: (q >= kv) & (q - kv < 20)  # noqa: E731
    block_mask = create_block_mask(mask_mod, None, None, t, t, block_size=16)
    whole = jax_flash.attention(query, key, value, block_mask=block_mask)

    @jax.jit
    def step(block_mask: BlockMask, row: jax.Array) -> jax.Array:
        own = block_mask.rows(row, 1)
        query_row = jax.lax.dynamic_slice_in_dim(query, row, 1, 1)
        return jax_flash.attention(query_row, key, value, block_mask=own, q_offset=own.q_offset)

    for row in (0, 15, 16, 69):
        close(step(block_mask, jnp.int32(row)), whole[:, row : row + 1])
    three = block_mask.rows(14, 3)
    assert three.q_offset == 14
    close(jax_flash.attention(query[:, 14:17], key, value, block_mask=three, q_offset=14), whole[:, 14:17])


def test_a_traced_offset_leaves_the_decision_to_the_function() -> None:
    query, key, value, _ = inputs_of(4, 40)
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 4, 40)
    attend = jax.jit(lambda offset: jax_flash.attention(query, key, value, block_mask=block_mask, q_offset=offset))
    close(attend(jnp.int32(17)), jax_flash.attention(query, key, value, causal=True, q_offset=17))


def test_a_block_mask_is_an_argument_of_jit() -> None:
    query, key, value, _ = inputs_of(20, 20)
    ids = [jnp.asarray(rng.integers(0, 2, 20), jnp.int32) for _ in range(2)]
    traced = []

    @jax.jit
    def attend(block_mask: BlockMask) -> Any:
        traced.append(1)
        assert "traced" in repr(block_mask)
        return jax_flash.attention(query, key, value, block_mask=block_mask)

    for of_rows in ids:
        mask_mod = lambda b, h, q, kv, x=of_rows: x[q] == x[kv]  # noqa: E731
        block_mask = create_block_mask(mask_mod, None, None, 20, 20, block_size=8)
        close(attend(block_mask), dense(query, key, value, keep=of_rows[:, None] == of_rows)[0])
    assert len(traced) == 1


def test_plot() -> None:
    pytest.importorskip("matplotlib")
    axes = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 500, 700).plot()
    assert axes.get_xlabel() == "key"
    (image,) = axes.get_images()
    assert image.get_array().shape == (4, 6)


# Errors and explanations


def call(**options: Any) -> Any:
    query, key, value, _ = inputs_of(20, 30, np.float32)
    return jax_flash.attention(query, key, value, **options)


MASK = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 20, 30)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"score_mod": lambda s, q, kv: s}, TypeError, r"score_mod must be a function of 5 scalars.*\(s, q, kv\)"),
        ({"mask_mod": lambda s, b, h, q, kv: True}, TypeError, "mask_mod must be a function of 4 scalars"),
        ({"score_mod": 3}, TypeError, "score_mod must be a function.*got 3 of type int"),
        ({"mask_mod": lambda b, h, q, kv: q - kv}, TypeError, "mask_mod must return a boolean, got int"),
        (
            {"score_mod": lambda s, b, h, q, kv: q},
            TypeError,
            "score_mod must return a score of dtype float32, got int32",
        ),
        ({"score_mod": lambda s, b, h, q, kv: s.astype(jnp.float64)}, TypeError, "float32, got float64"),
        ({"score_mod": lambda s, b, h, q, kv: s * jnp.ones(2, s.dtype)}, ValueError, r"a scalar, got.*shape \(2,\)"),
        ({"score_mod": lambda s, b, h, q, kv: (s, s)}, TypeError, "score_mod must return a scalar, got tuple"),
        (
            {"block_mask": np.ones((1, 1, 1, 1))},
            TypeError,
            "block_mask must be a jax_flash.flex.BlockMask, got ndarray",
        ),
        ({"block_mask": MASK, "q_offset": 1}, ValueError, "q_offset must be the one that block_mask was made for, 0"),
        (
            {"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 20, 31)},
            ValueError,
            r"block_mask must be for lengths \(T, S\) = \(20, 30\), got \(20, 31\)",
        ),
        (
            {"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, 3, None, 20, 30)},
            ValueError,
            "block_mask must be for 1 or 2 batch entries, got 3",
        ),
        (
            {"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, 2, 20, 30)},
            ValueError,
            "block_mask must be for 1 or 4 query heads, got 2",
        ),
        (
            {"score_mod": lambda s, b, h, q, kv: (jax.debug.print("x", ordered=True), s)[1]},
            ValueError,
            "score_mod must have no side effects",
        ),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(**options)


def test_at_most_so_many_arrays_are_captured() -> None:
    arrays = [jnp.ones(30, jnp.float32) for _ in range(17)]
    with pytest.raises(ValueError, match="may capture at most 16 arrays together, got 17"):
        call(score_mod=lambda s, b, h, q, kv: s + sum(x[kv] for x in arrays))


def test_kernels_refuse_by_name_and_leave_it_to_xla() -> None:
    query, key, value, _ = inputs_of(20, 30, np.float32)

    def sorts(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + jnp.sort(jnp.stack([q, kv]))[0].astype(score.dtype)

    served = jax_flash.explain(query, key, value, mask_mod=lambda b, h, q, kv: q >= kv)
    assert served.implementation == "cpu"
    shown = jax_flash.explain(query, key, value, mask_mod=lambda b, h, q, kv: q >= kv, source=True)
    assert shown.source.splitlines() == ["batch 0", "program mask", "q", "kv", "ge_i 0 1", "results 2"]
    explained = jax_flash.explain(query, key, value, score_mod=sorts)
    assert explained.implementation == "xla"
    assert "functions with primitive sort" in explained.obstacles["cpu"]
    assert explained.source == ""
    with pytest.raises(NotImplementedError, match="its kernels don't evaluate functions with primitive sort"):
        call(score_mod=sorts, implementation="cpu")
    wide = inputs_of(20, 30)
    with pytest.raises(NotImplementedError, match="its kernels don't evaluate functions with float64"):
        jax_flash.attention(*wide[:3], mask_mod=lambda b, h, q, kv: q >= kv, implementation="cpu")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kv_num_blocks": np.array([[[3, 0]]])}, ValueError, r"kv_num_blocks must lie in \[0, 2\]"),
        ({"kv_num_blocks": np.array([[3, 0]])}, ValueError, r"kv_num_blocks must have shape \[B or 1, N or 1, 2\]"),
        ({"kv_indices": np.array([[[[0, 3], [0, 1]]]])}, ValueError, r"kv_indices must lie in \[0, 2\)"),
        ({"kv_indices": np.array([[[[1, 0], [0, 1]]]])}, ValueError, "kv_indices must ascend"),
        ({"kv_indices": np.array([[[[1, 1], [0, 1]]]])}, ValueError, "kv_indices must ascend"),
        ({"kv_indices": np.array([[[0, 1]]])}, ValueError, "kv_indices must have shape"),
        ({"kv_indices": np.ones((1, 1, 2, 2))}, TypeError, "kv_indices must be an int32 array"),
        ({"full_kv_num_blocks": np.array([[[1, 0]]])}, ValueError, "full_kv_indices must be given with"),
        ({"block_size": 0}, ValueError, "block_size must be a positive int"),
    ],
)
def test_errors_of_lists(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    good: dict[str, Any] = {
        "kv_num_blocks": np.array([[[2, 1]]]),
        "kv_indices": np.array([[[[0, 1], [0, 1]]]]),
        "lengths": (20, 30),
        "block_size": 16,
    }
    assert BlockMask.from_lists(**good).kinds.tolist() == [[[[1, 1], [1, 0]]]]
    with pytest.raises(error, match=text):
        BlockMask.from_lists(**(good | changes))


@dataclasses.dataclass
class Leak:
    tracer: Any = None


def test_a_tracer_that_has_ended_is_refused() -> None:
    leak = Leak()

    @jax.jit
    def outside(x: jax.Array) -> jax.Array:
        leak.tracer = x
        return x

    outside(jnp.ones(30, jnp.float32))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        call(score_mod=lambda s, b, h, q, kv: s + leak.tracer[kv])


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q, kv: score + TABLE[h, q - kv + 8],
        lambda score, b, h, q, kv: score * TABLE[h, 0] + TABLE[h, 1] * score**2,
        lambda score, b, h, q, kv: jnp.tanh(score / TABLE[h, kv]) * TABLE[h, kv] + TABLE[h, q],
    ],
)  # fmt: skip
def test_kernels_serve_gradients_of_captured_arrays(score_mod: Callable[..., Any]) -> None:
    """Also in one order, as long as there is room for the sums."""
    functions = trace.Functions(trace.trace("score_mod", score_mod, "score", jnp.float32, trace.Captured()))
    call = choice.Call("float16", 64, 64, functions=functions, gradients=(0,))
    assert choice._unprintable(call) is None
    assert choice._unprintable(dataclasses.replace(call, deterministic=True)) is None
    wide = jnp.zeros((2048, 2049), jnp.float32)
    of_pairs = lambda score, b, h, q, kv: score + wide[q, kv]  # noqa: E731
    functions = trace.Functions(trace.trace("score_mod", of_pairs, "score", jnp.float32, trace.Captured()))
    call = dataclasses.replace(call, functions=functions)
    assert choice._unprintable(call) is None
    assert "4196352 elements" in str(choice._unprintable(dataclasses.replace(call, deterministic=True)))


def test_a_bias_of_rows_has_a_gradient_beside_a_score_function() -> None:
    """Without one it shifts the scores of a row alike, and has that of lse."""
    query, key, value, dout = inputs_of(7, 9)
    bias = jnp.asarray(rng.standard_normal((1, N, 7, 1)))
    score_mod = lambda score, b, h, q, kv: 2 * jnp.tanh(score / 2)  # noqa: E731

    def loss(bias: jax.Array) -> jax.Array:
        return (dout * jax_flash.attention(query, key, value, bias=bias, score_mod=score_mod)).sum()

    def wanted(bias: jax.Array) -> jax.Array:
        return (
            dout * dense(query, key, value, lambda s, b, h, q, kv: score_mod(s + bias[0, h, q, 0], b, h, q, kv))[0]
        ).sum()

    close(jax.grad(loss)(bias), jax.grad(wanted)(bias))
    options = Options(causal=False, scale=1.0)
    call = choice.Call.of(query, value, options, ["bias"], {"bias": "1nt1"})
    assert "bias of shape (..., 1)" in str(choice.obstacle("cuda", "cuda", call))
    assert (
        choice.obstacle(
            "cuda", "cuda", choice.Call.of(query.astype(np.float32), value, options, ["bias"], {"bias": "1nts"})
        )
        is None
    )


WIDE_TABLE = jnp.ones((N, 64), jnp.float64)


@pytest.mark.parametrize(
    ("name", "score_mod"),
    [
        ("primitive scan", lambda s, b, h, q, kv: jax.lax.fori_loop(0, 3, lambda _, x: x * 0.5, s)),
        ("primitive while", lambda s, b, h, q, kv: jax.lax.while_loop(lambda x: x > 3, lambda x: x / 2, s)),
        ("primitive cond", lambda s, b, h, q, kv: jax.lax.cond(q > kv, lambda x: x * 2, lambda x: x, s)),
        ("dtype float64", lambda s, b, h, q, kv: s + WIDE_TABLE[h, q - kv + 16].astype(s.dtype)),
        ("primitive reduce_add", lambda s, b, h, q, kv: s + jnp.zeros(0, s.dtype).sum()),
        (None, lambda s, b, h, q, kv: s * jnp.arange(3, dtype=s.dtype).sum()),
    ],
)
def test_what_cannot_be_printed_is_named_and_left_to_xla(name: str | None, score_mod: Callable[..., Any]) -> None:
    query, key, value, _ = inputs_of(16, 16, np.float32)
    explanation = jax_flash.explain(query, key, value, score_mod=score_mod, platform="cuda")
    if name is None or "cuda" not in explanation.obstacles:
        assert explanation.implementation == "cuda"
        assert name is None
        return
    assert name in explanation.obstacles["cuda"]
    assert explanation.implementation == "xla"
    want = dense(query, key, value, score_mod)[0]
    close(jax_flash.attention(query, key, value, score_mod=score_mod), want, 1e-4)
