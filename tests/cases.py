"""What the conformance tests share: implementations and what they declare, cases, the float64 oracle, tolerances.

The oracle is NumPy in float64 and knows nothing of the package. The yardstick of the tolerance rule is attention as
one writes it first in JAX, in the dtype under test and on the same platform.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

DTYPES = ("float32", "float64", "float16", "bfloat16")


# Implementations


@dataclasses.dataclass(frozen=True)
class Target:
    """An implementation on a platform, with what it declares there."""

    implementation: str
    platform: str  # "cpu" or "cuda"
    dtypes: tuple[str, ...]
    orders: int  # of differentiation; 2 stands for any
    kernel: bool  # lowers to this package's custom calls

    @property
    def id(self) -> str:
        return f"{self.implementation}-{self.platform}"

    @property
    def device(self) -> jax.Device:
        return jax.devices(self.platform)[0]


CPU = Target("cpu", "cpu", DTYPES, orders=1, kernel=True)
XLA = Target("xla", "cpu", DTYPES, orders=2, kernel=False)
REFERENCE = Target("reference", "cpu", DTYPES, orders=2, kernel=False)
CUDA = Target("cuda", "cuda", ("float16", "bfloat16"), orders=1, kernel=True)
XLA_ON_CUDA = dataclasses.replace(XLA, platform="cuda")
REFERENCE_ON_CUDA = dataclasses.replace(REFERENCE, platform="cuda")

TARGETS = (CPU, XLA, REFERENCE, CUDA, XLA_ON_CUDA, REFERENCE_ON_CUDA)


def param(target: Target, *values: Any, id: str | None = None) -> Any:
    """A pytest parameter set that begins with ``target`` and needs its platform."""
    marks = [pytest.mark.gpu] if target.platform == "cuda" else []
    return pytest.param(target, *values, id="-".join(filter(None, (target.id, id))), marks=marks)


def targets(condition: Callable[[Target], bool] = lambda _: True) -> list[Any]:
    return [param(target) for target in TARGETS if condition(target)]


def targets_and_dtypes(condition: Callable[[Target], bool] = lambda _: True) -> list[Any]:
    return [param(target, dtype, id=dtype) for target in TARGETS if condition(target) for dtype in target.dtypes]


# The oracle


def oracle(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    *,
    causal: bool,
    q_offset: int | np.ndarray,
    scale: float | None,
) -> dict[str, np.ndarray]:
    """out, lse and the gradients in float64, with the pairs that are kept; the shapes are those of attention()."""
    q, k, v, dout, dlse = (np.asarray(x).astype(np.float64) for x in (query, key, value, dout, dlse))
    leading, (q_length, q_heads, head_dim), (kv_length, kv_heads) = q.shape[:-3], q.shape[-3:], k.shape[-3:-1]
    group = q_heads // kv_heads
    scale = 1 / np.sqrt(head_dim) if scale is None else scale

    # Heads before lengths, and each key head once for every query head that attends to it.
    q, dout = np.moveaxis(q, -2, -3), np.moveaxis(dout, -2, -3)
    k, v = (np.repeat(np.moveaxis(x, -2, -3), group, axis=-3) for x in (k, v))

    keep = np.ones((*leading, 1, q_length, kv_length), bool)
    if causal:
        first = np.broadcast_to(np.asarray(q_offset, np.int64), leading)[..., None, None, None]
        keep &= np.arange(kv_length) <= first + np.arange(q_length)[:, None]
    alive = keep.any(axis=-1, keepdims=True)

    scores = np.where(keep, scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    maximum = np.where(alive, scores.max(axis=-1, keepdims=True), 0.0)
    weights = np.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    p = weights / np.where(alive, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (maximum + np.log(total))[..., 0]

    # The Jacobian of softmax, and of logsumexp, which is softmax.
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) + p * dlse[..., None]

    def of_keys(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x.reshape(*leading, kv_heads, group, kv_length, head_dim).sum(axis=-3), -3, -2)

    return {
        "out": np.moveaxis(p @ v, -3, -2),
        "lse": lse,
        "dq": np.moveaxis(scale * (ds @ k), -3, -2),
        "dk": of_keys(scale * (ds.swapaxes(-1, -2) @ q)),
        "dv": of_keys(p.swapaxes(-1, -2) @ dout),
        "keep": keep[..., 0, :, :],
    }


# The yardstick


def plain(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    q_offset: int | jax.Array,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """out and lse by plain JAX in the dtype of the inputs, with products accumulated in float32 or wider."""
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    leading, (q_length, q_heads, head_dim), (kv_length, kv_heads) = query.shape[:-3], query.shape[-3:], key.shape[-3:-1]
    einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
    scores = einsum("...tkgh,...skh->...kgts", query.reshape(*leading, q_length, kv_heads, -1, head_dim), key)
    scores = scores * jnp.asarray(1 / np.sqrt(head_dim) if scale is None else scale, wide)
    if causal:
        first = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int64), leading)[..., None, None, None, None]
        position = first + jnp.arange(q_length, dtype=jnp.int64)[:, None]
        scores = jnp.where(jnp.arange(kv_length, dtype=jnp.int64) <= position, scores, -jnp.inf)
    alive = (scores > -jnp.inf).any(axis=-1)
    lse = jax.nn.logsumexp(jnp.where(alive[..., None], scores, 0.0), axis=-1)
    weights = jnp.where(alive[..., None], jnp.exp(scores - lse[..., None]), 0.0)
    out = einsum("...kgts,...skh->...tkgh", weights.astype(value.dtype), value).astype(query.dtype)
    return out.reshape(query.shape), jnp.where(alive, lse, -jnp.inf).reshape(*leading, q_heads, q_length)


# The tolerance rule

FACTORS = {"out": 2, "lse": 2, "dq": 3, "dk": 3, "dv": 3}
"""A kernel's maximum and relative L2 error are at most this many times those of the yardstick, plus units() *
epsilon times the magnitude of what is right."""


def units(name: str, dtype: Any) -> int:
    """A few: one where sums are wider than what is returned, four where they are made in the dtype itself.

    Gradients in 16 bits have three: FlashAttention takes delta from out as it was returned, and rounds ds between two
    products, where plain JAX keeps both in float32. Where keys that hardly differ compete (the cases with twins), dq is
    a difference that blows this up to twice epsilon in relative L2, most of it by delta.
    """
    if jnp.dtype(dtype).itemsize >= 4:
        return 4
    return 3 if name in ("dq", "dk", "dv") else 1


def epsilon(name: str, dtype: Any) -> float:
    """Of the dtype in which a result is returned: lse is float32 or wider."""
    dtype = jnp.dtype(dtype)
    return float(jnp.finfo(jnp.float32 if name == "lse" and dtype.itemsize < 4 else dtype).eps)


@dataclasses.dataclass(frozen=True)
class Errors:
    maximum: float
    l2: float


def _errors(name: str, got: np.ndarray, want: np.ndarray) -> Errors:
    """Maximum error, and L2 error relative to the L2 norm of what is right."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    assert not np.isnan(got).any(), f"{name} holds {np.isnan(got).sum()} NaN of {got.size}"
    if name == "lse":
        empty = np.isneginf(want)
        assert (np.isneginf(got) == empty).all(), "lse is -inf exactly where a row keeps no key"
        got, want = np.where(empty, 0.0, got), np.where(empty, 0.0, want)
    assert np.isfinite(got).all(), f"{name} holds infinities"
    difference = got - want
    norm = np.linalg.norm(want)
    return Errors(float(np.abs(difference).max()), float(np.linalg.norm(difference) / norm) if norm else 0.0)


def magnitude(name: str, want: np.ndarray) -> float:
    size = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
    # lse near 0 is the difference of larger numbers.
    return max(size, 1.0) if name == "lse" else size


# Problems: inputs, cotangents and options, with what is right


@dataclasses.dataclass(eq=False)
class Problem:
    """Inputs and cotangents as NumPy arrays of one dtype (dlse: of lse's), and the options of a call."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    causal: bool = False
    q_offset: int | np.ndarray = 0
    scale: float | None = None

    def __post_init__(self) -> None:
        self._yardsticks: dict[str, dict[str, np.ndarray]] = {}

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.query, self.key, self.value

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "q_offset": self.q_offset, "scale": self.scale}

    @functools.cached_property
    def right(self) -> dict[str, np.ndarray]:
        return oracle(*self.inputs, self.dout, self.dlse, **self.options)

    def yardstick(self, platform: str) -> dict[str, np.ndarray]:
        if platform not in self._yardsticks:
            self._yardsticks[platform] = differentiate(functools.partial(plain, **self.options), self)
        return self._yardsticks[platform]

    def check(self, platform: str, got: Mapping[str, Any]) -> None:
        """Asserts the tolerance rule for every result in ``got``, and exact zeros where nothing is kept."""
        dtype = self.query.dtype
        keep = self.right["keep"]
        for name, result in got.items():
            expected_dtype = self.dlse.dtype if name == "lse" else dtype
            assert result.dtype == expected_dtype, f"{name} has dtype {result.dtype}, not {expected_dtype}"
            want = self.right[name]
            errors = _errors(name, result, want)
            slack = units(name, result.dtype) * epsilon(name, dtype)
            allowed = Errors(slack * magnitude(name, want), slack)
            if errors.maximum > allowed.maximum or errors.l2 > allowed.l2:
                # The yardstick takes its time to compile and can only widen the bound.
                base = _errors(name, self.yardstick(platform)[name], want)
                factor = FACTORS[name]
                allowed = Errors(allowed.maximum + factor * base.maximum, allowed.l2 + factor * base.l2)
            assert errors.maximum <= allowed.maximum, f"{name}: maximum error {errors.maximum} > {allowed.maximum}"
            assert errors.l2 <= allowed.l2, f"{name}: relative L2 error {errors.l2} > {allowed.l2}"
            dead = {"out": ~keep.any(axis=-1), "dk": ~keep.any(axis=-2)}
            dead |= {"dq": dead["out"], "dv": dead["dk"]}
            if name in dead:
                assert not np.asarray(result)[dead[name]].any(), f"{name} is not 0 where nothing is kept"


def call(target: Target, problem: Problem, **changes: Any) -> Callable[..., Any]:
    """attention() of (query, key, value) with the options of ``problem``, returning (out, lse)."""
    options = {**problem.options, "return_lse": True, "implementation": target.implementation, **changes}
    return functools.partial(jax_flash.attention, **options)


def evaluate(function: Callable[..., Any], problem: Problem) -> dict[str, np.ndarray]:
    """out and lse of ``function`` on the inputs of ``problem``, under jit."""
    out, lse = jax.jit(function)(*problem.inputs)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def differentiate(function: Callable[..., Any], problem: Problem) -> dict[str, np.ndarray]:
    """out, lse and the gradients of ``function`` by the cotangents of ``problem``, under jit."""

    @jax.jit
    def run(inputs: Any, cotangents: Any) -> Any:
        results, pullback = jax.vjp(function, *inputs)
        return (*results, *pullback(cotangents))

    results = run(problem.inputs, (problem.dout, problem.dlse))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), map(np.asarray, results), strict=True))


# Cases


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    q_length: int
    kv_length: int
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    leading: tuple[int, ...] = (2,)
    causal: bool = False
    q_offset: int | tuple[int, ...] = 0  # a tuple is an array of the leading dimensions, flattened
    scale: float | None = None
    spread: float = 1.0  # standard deviation of query and key
    twins: bool = False  # keys in pairs that hardly differ, so that large scores compete
    dtypes: tuple[str, ...] = DTYPES
    core: bool = False  # also for what is slow to compile: plain JAX and, on CPUs, the yardsticks of float64
    large: bool = False  # for GPUs only


def random(rng: np.random.Generator, shape: Sequence[int], dtype: Any, spread: float = 1.0) -> np.ndarray:
    return (spread * rng.standard_normal(shape)).astype(jnp.dtype(dtype))


@functools.cache
def problem(case: Case, dtype: str) -> Problem:
    """The inputs of ``case`` in ``dtype``, the same at every call."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    q_shape = (*case.leading, case.q_length, case.q_heads, case.head_dim)
    kv_shape = (*case.leading, case.kv_length, case.kv_heads, case.head_dim)
    lse_dtype = np.float64 if dtype == "float64" else np.float32
    key = random(rng, kv_shape, np.float64, case.spread)
    if case.twins:
        first, second = key[..., 0::2, :, :], key[..., 1::2, :, :]
        second[...] = first[..., : second.shape[-3], :, :]
        second *= 1 + 2.0**-10 * (rng.random(second.shape) < 0.125)
    offset = case.q_offset
    if isinstance(offset, tuple):
        offset = np.array(offset, np.int32).reshape(case.leading)
    return Problem(
        query=random(rng, q_shape, dtype, case.spread),
        key=key.astype(jnp.dtype(dtype)),
        value=random(rng, kv_shape, dtype),
        dout=random(rng, q_shape, dtype),
        dlse=random(rng, (*case.leading, case.q_heads, case.q_length), lse_dtype),
        causal=case.causal,
        q_offset=offset,
        scale=case.scale,
    )


NARROW = ("float16", "bfloat16")
"""Scores of thousands are for these: recomputing weights from a rounded lse costs float32 more than the rule allows
(test_gradients.py has a test of its own for it)."""

HEAD_DIMS = (1, 3, 8, 16, 32, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 224, 256)

CASES = (
    # Lengths
    Case("square", 32, 32, core=True),
    Case("odd", 37, 53, core=True),
    Case("more_rows", 70, 20, causal=True),
    Case("more_keys", 20, 70, causal=True, q_offset=50),
    Case("one_row", 1, 45, core=True),
    Case("one_row_at_the_end", 1, 45, causal=True, q_offset=44),
    Case("one_key", 19, 1, core=True),
    Case("one_key_causal", 19, 1, causal=True, q_offset=-5),
    Case("one_by_one", 1, 1, q_heads=4, leading=(5,)),
    Case("tile", 64, 128, head_dim=64),
    Case("tile_less_one", 63, 127, head_dim=64, causal=True, q_offset=64),
    Case("tile_and_one", 65, 129, head_dim=64, causal=True, q_offset=64),
    Case("tiles", 150, 290, q_heads=2, kv_heads=1, head_dim=64, leading=(1,), core=True),
    Case("tiles_causal", 290, 150, q_heads=2, kv_heads=1, head_dim=32, leading=(1,), causal=True, q_offset=-33),
    Case("tiles_causal_keys", 130, 515, q_heads=1, kv_heads=1, head_dim=16, leading=(1,), causal=True, q_offset=385),
    # Heads
    Case("grouped", 33, 47, q_heads=6, kv_heads=2, core=True),
    Case("grouped_causal", 47, 33, q_heads=6, kv_heads=2, causal=True),
    Case("multi_query", 26, 31, q_heads=8, kv_heads=1, causal=True, q_offset=5),
    Case("odd_heads", 26, 31, q_heads=5, kv_heads=5),
    # Leading dimensions
    Case("no_batch", 22, 35, leading=(), causal=True, q_offset=3, core=True),
    Case("batches", 22, 35, leading=(2, 3), causal=True, q_offset=(0, 1, 13, -4, -22, 35), core=True),
    Case("thin_batches", 9, 12, leading=(2, 1, 2)),
    # Causal
    Case("causal", 37, 37, causal=True, core=True),
    Case("causal_later", 24, 60, causal=True, q_offset=17),
    Case("causal_earlier", 40, 30, causal=True, q_offset=-11, core=True),
    Case("causal_nothing", 30, 20, causal=True, q_offset=-30),
    Case("causal_everything", 30, 20, causal=True, q_offset=19),
    Case("causal_first_limit", 12, 20, causal=True, q_offset=-(2**31)),
    Case("causal_last_limit", 12, 20, causal=True, q_offset=2**31 - 1),
    Case("causal_by_batch", 30, 45, q_heads=4, leading=(4,), causal=True, q_offset=(15, 0, -9, -31), core=True),
    Case("causal_by_batch_limits", 30, 45, leading=(2,), causal=True, q_offset=(-(2**31), 2**31 - 1)),
    # Scale
    Case("scale_zero", 30, 40, scale=0.0, core=True),
    Case("scale_negative", 30, 40, scale=-0.3, causal=True, core=True),
    Case("scale_large", 60, 80, q_heads=4, scale=16.0, twins=True, dtypes=NARROW),
    Case("scale_tiny", 30, 40, scale=1e-6),
    Case("scores_huge", 60, 80, q_heads=4, head_dim=64, spread=60.0, twins=True, dtypes=NARROW, core=True),
    Case(
        "scores_huge_causal", 80, 80, 4, head_dim=64, causal=True, q_offset=-3, spread=60.0, twins=True, dtypes=NARROW
    ),
    # Head dims
    *(
        Case(f"head_dim_{h}", 21, 34, q_heads=2, kv_heads=1, head_dim=h, causal=True, q_offset=13, core=h in (1, 59))
        for h in HEAD_DIMS
    ),
    # Several tiles in every direction, for every tile that a GPU has
    *(
        Case(f"large_{h}{'_causal' if causal else ''}", 1100, 1030, 4, 2, h, causal=causal, q_offset=-70, large=True)
        for h in (64, 128, 256)
        for causal in (False, True)
    ),
    Case("large_more_keys", 257, 1100, 2, 1, 128, causal=True, q_offset=843, large=True),
    Case("large_by_batch", 300, 513, 4, 4, 64, (3,), causal=True, q_offset=(213, 0, -150), large=True),
    Case("large_odd_head_dim", 300, 513, 2, 2, 111, causal=True, q_offset=100, large=True),
    Case("large_scores_huge", 512, 640, 4, 4, 128, spread=45.0, twins=True, large=True),
)


def serves(target: Target, case: Case, dtype: str, results: str) -> bool:
    """Whether the case is run: all of them through kernels, the core ones through what is slow to compile.

    The gradient tests look at out and lse too, which is enough for plain JAX.
    """
    if dtype not in target.dtypes or dtype not in case.dtypes or (case.large and target.platform != "cuda"):
        return False
    if target.kernel:
        return case.core or dtype != "float64"
    if results == "out":
        return case.name == "odd"
    return case.core if dtype in ("float32", case.dtypes[0]) else case.name == "causal_earlier"


def conformance(results: str) -> list[Any]:
    """Every (target, case, dtype) of the tests of "out" or of "gradients"."""
    return [
        param(target, case, dtype, id=f"{case.name}-{dtype}")
        for target in TARGETS
        for case in CASES
        for dtype in DTYPES
        if serves(target, case, dtype, results)
    ]


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
