"""What the conformance tests share: implementations and their declared capabilities, cases, tolerances.

The expected results, and those of plain JAX, are in oracle.py.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_flash
from jax_flash._native import _core, registration

DTYPES = ("float32", "float64", "float16", "bfloat16")


# Implementations


@dataclasses.dataclass(frozen=True)
class Target:
    """An implementation on a platform, with its declared capabilities."""

    implementation: str
    platform: str  # "cpu" or "cuda"
    dtypes: tuple[str, ...]
    kernel: bool  # lowers to this package's custom calls
    max_head_dim: int | None = None

    @property
    def id(self) -> str:
        return f"{self.implementation}-{self.platform}"

    @property
    def device(self) -> jax.Device:
        return jax.devices(self.platform)[0]


CPU = Target("cpu", "cpu", DTYPES, kernel=True)
XLA = Target("xla", "cpu", DTYPES, kernel=False)
REFERENCE = Target("reference", "cpu", DTYPES, kernel=False)
CUDA = Target("cuda", "cuda", ("float16", "bfloat16", "float32"), kernel=True, max_head_dim=256)
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


# The tolerance rule

GRADIENTS = ("dq", "dk", "dv", *(f"d{name}" for name in oracle.TRAINABLE))

FACTORS = {"out": 2, "lse": 2, **dict.fromkeys(GRADIENTS, 3)}
"""A kernel's maximum and relative L2 error are at most this many times those of plain JAX, plus units() * epsilon times
the magnitude of the exact result."""


def units(name: str, dtype: Any) -> int:
    """How many epsilons are allowed: 1 if sums are wider than the result, 4 if they have its dtype, as lse does.

    Gradients in 16 bits have 3: FlashAttention computes delta from the rounded out, and rounds ds between two products,
    where plain JAX keeps both in float32. If keys that hardly differ compete (the cases with twins), dq is a difference
    that magnifies this to twice epsilon in relative L2, mostly by delta.
    """
    if name == "lse" or jnp.dtype(dtype).itemsize >= 4:
        return 4
    return 3 if name in GRADIENTS else 1


def epsilon(name: str, dtype: Any) -> float:
    """That of ``dtype``, the inputs', whose rounding affects every gradient; lse is float32 or wider."""
    dtype = jnp.dtype(dtype)
    return float(jnp.finfo(jnp.float32 if name == "lse" and dtype.itemsize < 4 else dtype).eps)


@dataclasses.dataclass(frozen=True)
class Errors:
    maximum: float
    l2: float


def _errors(name: str, got: np.ndarray, want: np.ndarray) -> Errors:
    """Maximum error, and L2 error relative to the L2 norm of the exact result."""
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


# Problems: inputs, cotangents and options, with the exact results


@dataclasses.dataclass(eq=False)
class Problem:
    """Inputs and cotangents as NumPy arrays of one dtype (dlse in lse's), and the options of attention()."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    causal: bool = False
    q_offset: int | np.ndarray = 0
    window: int | oracle.Window | None = None
    scale: float | np.ndarray | None = None
    softcap: float | None = None
    alibi_slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    q_segment_ids: np.ndarray | None = None
    kv_segment_ids: np.ndarray | None = None
    q_lengths: np.ndarray | None = None
    kv_lengths: np.ndarray | None = None
    kv_start: np.ndarray | None = None
    kv_end: np.ndarray | None = None
    q_start: np.ndarray | None = None
    q_end: np.ndarray | None = None
    precision: str | None = None

    solve = staticmethod(oracle.attention)
    plain = staticmethod(oracle.plain)
    attend = staticmethod(jax_flash.attention)

    def __post_init__(self) -> None:
        self._baselines: dict[str, dict[str, np.ndarray]] = {}

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.query, self.key, self.value

    @property
    def options(self) -> dict[str, Any]:
        """The options that are given, by their names in attention()."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self)[5:])
        return {name: value for name, value in values if value is not None}

    @property
    def trainable(self) -> dict[str, np.ndarray]:
        return {name: x for name, x in self.options.items() if name in oracle.TRAINABLE and isinstance(x, np.ndarray)}

    @functools.cached_property
    def right(self) -> dict[str, Any]:
        return self.solve(*self.inputs, self.dout, self.dlse, **self.options)

    def baseline(self, platform: str) -> dict[str, np.ndarray]:
        if platform not in self._baselines:
            self._baselines[platform] = differentiate(functools.partial(self.plain, **self.options), self)
        return self._baselines[platform]

    def slack(self, name: str, epsilons: float) -> Errors:
        """``epsilons`` times the magnitude of the exact result.

        An option's gradient is a sum of many terms that may cancel, so it is only known up to their rounding: its
        magnitude is the root of the sum of their squares.
        """
        want = self.right[name]
        size, ratio = magnitude(name, want), 1.0
        if name[1:] in oracle.TRAINABLE:
            terms, norm = np.sqrt(self.right["squares"][name]), np.linalg.norm(want)
            if name == "dsinks" and self.narrowest(name).itemsize >= 4:
                # A sink's weight is exp(sink - lse), and the stored lse has an error of up to |lse| / 2 epsilons:
                # 1.0e-7 in terms of 0.14 with the kernels of sm_70, where lse is 6.6.
                lse = self.right["lse"]
                terms = terms * (1 + np.abs(lse[np.isfinite(lse)]).max(initial=0.0) / 2)
            size = max(size, float(terms.max()))
            ratio = max(ratio, float(np.linalg.norm(terms) / norm)) if norm else ratio
        return Errors(epsilons * size, epsilons * ratio)

    def dtype_of(self, name: str) -> np.dtype[Any]:
        if name == "lse":
            return self.dlse.dtype
        x = getattr(self, name[1:], None) if name[1:] in oracle.TRAINABLE else self.query
        return x.dtype

    def narrowest(self, name: str) -> np.dtype[Any]:
        """The narrower dtype of the inputs and of a gradient, which differ for a bias with its own dtype."""
        return min((self.query.dtype, self.dtype_of(name)), key=lambda dtype: dtype.itemsize)

    def epsilon(self, name: str) -> float:
        return epsilon(name, self.query.dtype if name == "lse" else self.narrowest(name))

    def check(self, platform: str, got: Mapping[str, Any]) -> None:
        """Asserts the tolerance rule for every result in ``got``, and exact zeros where nothing is kept."""
        for name, result in got.items():
            expected_dtype = self.dtype_of(name)
            assert result.dtype == expected_dtype, f"{name} has dtype {result.dtype}, not {expected_dtype}"
            want = self.right[name]
            found = _errors(name, result, want)
            epsilons = units(name, self.narrowest(name)) * self.epsilon(name)
            if platform == "cuda" and self.precision == "default" and self.query.dtype == np.float32:
                # The products are TF32; for small ones XLA, and so plain JAX, uses float32 anyway.
                epsilons = max(epsilons, units(name, np.float16) * 2.0**-10)
            allowed = self.slack(name, epsilons)
            if found.maximum > allowed.maximum or found.l2 > allowed.l2:
                # Plain JAX is slow to compile and can only widen the bound.
                base = _errors(name, self.baseline(platform)[name], want)
                factor = FACTORS[name]
                allowed = Errors(allowed.maximum + factor * base.maximum, allowed.l2 + factor * base.l2)
            assert found.maximum <= allowed.maximum, f"{name}: maximum error {found.maximum} > {allowed.maximum}"
            assert found.l2 <= allowed.l2, f"{name}: relative L2 error {found.l2} > {allowed.l2}"
        self.check_zeros(got)

    def check_zeros(self, got: Mapping[str, Any]) -> None:
        for attended, names in (("attended_rows", ("out", "dq")), ("attended_keys", ("dk", "dv"))):
            for name in names:
                if name in got:
                    assert not np.asarray(got[name])[~self.right[attended]].any(), f"{name} is not 0 for nothing kept"


@dataclasses.dataclass(eq=False)
class Packed(Problem):
    """The same of attention_varlen(); arrays are [tokens, heads, head_dim] and dlse [N, tokens]."""

    cu_q_lengths: np.ndarray | None = None
    cu_kv_lengths: np.ndarray | None = None
    max_q_length: int = 0
    max_kv_length: int = 0

    solve = staticmethod(oracle.attention_packed)
    plain = staticmethod(oracle.plain_packed)
    attend = staticmethod(jax_flash.attention_varlen)


def call(target: Target, problem: Problem, **changes: Any) -> Callable[..., Any]:
    """attention() of (query, key, value) with the options of ``problem``, returning (out, lse).

    Options can be passed by name too.
    """
    options = {**problem.options, "return_lse": True, "implementation": target.implementation, **changes}
    return functools.partial(problem.attend, **options)


def evaluate(function: Callable[..., Any], problem: Problem) -> dict[str, np.ndarray]:
    """out and lse of ``function`` on the inputs of ``problem``, under jit."""
    out, lse = jax.jit(function)(*problem.inputs)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def differentiate(function: Callable[..., Any], problem: Problem) -> dict[str, np.ndarray]:
    """out, lse and the gradients of ``function`` by the cotangents of ``problem``, under jit.

    Trainable options are passed to ``function`` by name.
    """

    @jax.jit
    def run(inputs: Any, trainable: Any, cotangents: Any) -> Any:
        results, pullback = jax.vjp(lambda inputs, trainable: function(*inputs, **trainable), inputs, trainable)
        return results, *pullback(cotangents)

    results = run(problem.inputs, problem.trainable, (problem.dout, problem.dlse))
    return named(*jax.tree.map(np.asarray, results))


def named(results: Sequence[Any], gradients: Sequence[Any], trainable: Mapping[str, Any]) -> dict[str, Any]:
    names = zip(("out", "lse", "dq", "dk", "dv"), (*results, *gradients), strict=True)
    return dict(names) | {f"d{name}": x for name, x in trainable.items()}


# Cases


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of a problem; its arrays are random.

    ``bias`` and ``mask`` are the dimensions of "bnts" that are not broadcast. With lengths, everything beyond them is
    NaN, in cotangents and bias too.
    """

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
    arrays: bool = False  # scale and the sides of the window are arrays, as traced ones are
    spread: float = 1.0  # standard deviation of query and key
    twins: bool = False  # keys in pairs that hardly differ, so that large scores compete
    value_head_dim: int | None = None  # None: head_dim
    bias: str | None = None
    bias_dtype: str | None = None  # None: that of query
    bias_spread: float = 1.0
    bias_holes: float = 0.0  # fraction of it that is -inf
    mask: str | None = None
    mask_density: float = 0.7
    window: int | oracle.Window | None = None
    softcap: float | None = None
    alibi: str | None = None  # "n" or "bn"
    sinks: bool = False
    dropout_rate: float = 0.0
    segments: int = 0  # how many; 0: none
    segments_sorted: bool = True
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    intervals: str = ""  # sides and their dimensions: "kv_start:bt q_end:s"
    precision: str | None = None
    dtypes: tuple[str, ...] = DTYPES
    core: bool = False  # also run where compiling is slow: plain JAX and, on CPUs, plain JAX's results in other dtypes
    large: bool = False  # for GPUs only

    @property
    def options(self) -> bool:
        """Whether the case has options other than causal, q_offset and a scale that is a number."""
        values = self.window, self.softcap, self.sinks, self.alibi, self.dropout_rate, self.segments, self.precision
        optional = self.bias, self.mask, self.q_lengths, self.kv_lengths
        return any(values) or bool(self.intervals) or self.arrays or any(x is not None for x in optional)


def random(rng: np.random.Generator, shape: Sequence[int], dtype: Any, spread: float = 1.0) -> np.ndarray:
    return (spread * rng.standard_normal(shape)).astype(jnp.dtype(dtype))


@functools.cache
def problem(case: Case, dtype: str) -> Problem:
    """The inputs of ``case`` in ``dtype``, the same at every call."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    value_head_dim = case.head_dim if case.value_head_dim is None else case.value_head_dim
    q_shape = (*case.leading, case.q_length, case.q_heads)
    kv_shape = (*case.leading, case.kv_length, case.kv_heads)
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    key = random(rng, (*kv_shape, case.head_dim), np.float64, case.spread)
    if case.twins:
        first, second = key[..., 0::2, :, :], key[..., 1::2, :, :]
        second[...] = first[..., : second.shape[-3], :, :]
        second *= 1 + 2.0**-10 * (rng.random(second.shape) < 0.125)
    offset = case.q_offset
    if isinstance(offset, tuple):
        offset = np.array(offset, np.int32).reshape(case.leading)
    arrays = {
        "query": random(rng, (*q_shape, case.head_dim), dtype, case.spread),
        "key": key.astype(jnp.dtype(dtype)),
        "value": random(rng, (*kv_shape, value_head_dim), dtype),
        "dout": random(rng, (*q_shape, value_head_dim), dtype),
        "dlse": random(rng, (*case.leading, case.q_heads, case.q_length), wide),
    }
    options = _drawn_options(rng, case, dtype, wide)
    _poison(case, arrays, options)
    return Problem(
        **arrays,
        **options,
        causal=case.causal,
        q_offset=offset,
        window=_window(case),
        scale=_scale(case, wide),
        softcap=case.softcap,
        precision=case.precision,
    )


def _window(case: "Case | PackedCase") -> int | oracle.Window | None:
    if not (case.arrays and isinstance(case.window, tuple)):
        return case.window
    left, right = (None if side is None else np.array(side, np.int32) for side in case.window)
    return left, right


def _scale(case: "Case | PackedCase", wide: np.dtype[Any]) -> float | np.ndarray | None:
    return np.array(case.scale, wide) if case.arrays and case.scale is not None else case.scale


def _drawn_options(rng: np.random.Generator, case: Case, dtype: str, wide: np.dtype[Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}

    def shape(dims: str) -> tuple[int, ...]:
        leading = case.leading if "b" in dims else (1,) * len(case.leading)
        sizes = {"n": case.q_heads, "t": case.q_length, "s": case.kv_length}
        return (*leading, *(size if dim in dims else 1 for dim, size in sizes.items()))

    if case.bias is not None:
        bias = random(rng, shape(case.bias), case.bias_dtype or dtype, case.bias_spread)
        options["bias"] = np.where(rng.random(bias.shape) < case.bias_holes, -np.inf, bias).astype(bias.dtype)
    if case.mask is not None:
        options["mask"] = rng.random(shape(case.mask)) < case.mask_density
    if case.alibi is not None:
        leading = case.leading if "b" in case.alibi else ()
        slopes = random(rng, (*leading, case.q_heads), wide, 0.2)
        # Of either sign, but not if keys are far: scores of hundreds are tested by NARROW.
        options["alibi_slopes"] = slopes if case.kv_length < 100 else np.abs(slopes) * wide.type(200 / case.kv_length)
    if case.sinks:
        options["sinks"] = random(rng, (case.q_heads,), wide)
    if case.dropout_rate:
        options |= {"dropout_rate": case.dropout_rate, "dropout_key": jax.random.key(int(rng.integers(2**31)))}
    if case.segments:
        for name, length in (("q_segment_ids", case.q_length), ("kv_segment_ids", case.kv_length)):
            ids = rng.integers(0, case.segments, (*case.leading, length)).astype(np.int32)
            options[name] = np.sort(ids, axis=-1) if case.segments_sorted else ids
    for name in ("q_lengths", "kv_lengths"):
        if (lengths := getattr(case, name)) is not None:
            options[name] = np.array(lengths, np.int32).reshape(case.leading)
    return options | drawn_intervals(rng, case.intervals, case.leading, case.q_heads, case.q_length, case.kv_length)


def drawn_intervals(
    rng: np.random.Generator, sides: str, leading: tuple[int, ...], heads: int, q_length: int, kv_length: int
) -> dict[str, np.ndarray]:
    """Sides of intervals, "kv_start:bt q_end:s" say, along the diagonal; some are empty, some beyond all bounds."""
    drawn = {}
    for side in sides.split():
        name, dims = side.split(":")
        own, other = (q_length, kv_length) if name.startswith("kv") else (kv_length, q_length)
        shape = (*leading, heads, own)
        letters = "b" * len(leading) + "n" + ("t" if name.startswith("kv") else "s")
        shape = tuple(size if letter in dims else 1 for letter, size in zip(letters, shape, strict=True))
        middle = np.arange(shape[-1]) * other // own if shape[-1] > 1 else np.array([other // 2])
        far = rng.integers(-other // 8 - 1, other // 2 + 1, shape)
        x = middle - far if name.endswith("start") else middle + far + 1
        huge = rng.random(shape)
        x = np.where(huge < 0.02, -(2**31), np.where(huge > 0.98, 2**31 - 1, x))
        drawn[name] = x.astype(np.int32)
    return drawn


def _poison(case: Case, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> None:
    rows = ~oracle.within(case.q_length, options.get("q_lengths"), case.leading)
    keys = ~oracle.within(case.kv_length, options.get("kv_lengths"), case.leading)
    for name in ("query", "dout"):
        arrays[name][rows] = np.nan
    for name in ("key", "value"):
        arrays[name][keys] = np.nan
    np.swapaxes(arrays["dlse"], -1, -2)[rows] = np.nan
    if case.bias == "bnts":
        padding = rows[..., None, :, None] | keys[..., None, None, :]
        options["bias"][np.broadcast_to(padding, options["bias"].shape)] = np.nan


@dataclasses.dataclass(frozen=True)
class PackedCase:
    """Packed sequences with their lengths, and tails that are in no sequence and contain NaN."""

    name: str
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    tails: tuple[int, int] = (0, 0)
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_head_dim: int | None = None
    causal: bool = False
    q_offset: int | tuple[int, ...] = 0  # a tuple is an array, one of each sequence
    window: int | oracle.Window | None = None
    scale: float | None = None
    arrays: bool = False  # see Case
    softcap: float | None = None
    alibi: str | None = None  # "n" or "dn"
    sinks: bool = False
    dropout_rate: float = 0.0
    intervals: str = ""  # as of a batch entry without leading dimensions
    precision: str | None = None
    dtypes: tuple[str, ...] = DTYPES
    core: bool = False  # see Case
    large: bool = False

    options = True


@functools.cache
def packed_problem(case: PackedCase, dtype: str) -> Packed:
    """The inputs of ``case`` in ``dtype``, the same at every call."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    value_head_dim = case.head_dim if case.value_head_dim is None else case.value_head_dim
    cu_q, cu_kv = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (case.q_lengths, case.kv_lengths))
    tokens, kv_tokens = (int(cu[-1]) + tail for cu, tail in zip((cu_q, cu_kv), case.tails, strict=True))
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    options: dict[str, Any] = {}
    if case.alibi is not None:
        sequences = (len(case.q_lengths),) if "d" in case.alibi else ()
        options["alibi_slopes"] = random(rng, (*sequences, case.q_heads), wide, 0.2)
    if case.sinks:
        options["sinks"] = random(rng, (case.q_heads,), wide)
    if case.dropout_rate:
        options |= {"dropout_rate": case.dropout_rate, "dropout_key": jax.random.key(int(rng.integers(2**31)))}
    # They count within the sequences, and so they follow the diagonal of the longest.
    longest = max(case.q_lengths), max(case.kv_lengths)
    options |= {
        name: np.resize(x, (*x.shape[:-1], tokens if name.startswith("kv") else kv_tokens)) if x.shape[-1] > 1 else x
        for name, x in drawn_intervals(rng, case.intervals, (), case.q_heads, *longest).items()
    }
    problem = Packed(
        query=random(rng, (tokens, case.q_heads, case.head_dim), dtype),
        key=random(rng, (kv_tokens, case.kv_heads, case.head_dim), dtype),
        value=random(rng, (kv_tokens, case.kv_heads, value_head_dim), dtype),
        dout=random(rng, (tokens, case.q_heads, value_head_dim), dtype),
        dlse=random(rng, (case.q_heads, tokens), wide),
        **options,
        causal=case.causal,
        q_offset=np.array(case.q_offset, np.int32) if isinstance(case.q_offset, tuple) else case.q_offset,
        window=_window(case),
        scale=_scale(case, wide),
        softcap=case.softcap,
        precision=case.precision,
        cu_q_lengths=cu_q,
        cu_kv_lengths=cu_kv,
        max_q_length=max(case.q_lengths),
        max_kv_length=max(case.kv_lengths),
    )
    for x, end in ((problem.query, cu_q), (problem.dout, cu_q), (problem.key, cu_kv), (problem.value, cu_kv)):
        x[end[-1] :] = np.nan
    problem.dlse[:, cu_q[-1] :] = np.nan
    return problem


def problem_of(case: Case | PackedCase, dtype: str) -> Problem:
    return problem(case, dtype) if isinstance(case, Case) else packed_problem(case, dtype)


NARROW = ("float16", "bfloat16")
"""Only these dtypes are tested with scores of thousands: recomputing weights from a rounded lse costs float32 more than
the rule allows (test_gradients.py has a separate test for it)."""

HEAD_DIMS = (1, 3, 8, 16, 32, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 224, 256)

VALUE_HEAD_DIMS = ((40, 24), (24, 40), (64, 128), (128, 64), (192, 128), (256, 8), (576, 512), (1, 300))

EVERYTHING: dict[str, Any] = {
    "bias": "nts",
    "mask": "bs",
    "mask_density": 0.9,
    "causal": True,
    "q_offset": (20, -6),
    "window": (40, None),
    "softcap": 4.0,
    "alibi": "bn",
    "sinks": True,
    "dropout_rate": 0.1,
    "segments": 2,
    "q_lengths": (70, 61),
    "kv_lengths": (77, 90),
}
LARGE_EVERYTHING: dict[str, Any] = {"window": (200, None), "q_lengths": (513, 450), "kv_lengths": (600, 700)}
SPLIT_KV_EVERYTHING: dict[str, Any] = {
    "q_offset": (2480, 1500),
    "window": (2000, None),
    "q_lengths": (17, 9),
    "kv_lengths": (2500, 1601),
}
SHORT_ROWS: dict[str, Any] = {"causal": True, "segments": 4, "q_lengths": (100,)}
SHORT_KEYS: dict[str, Any] = {"window": (150, 20), "segments": 4, "kv_lengths": (100,)}
SPLIT_EVERYTHING: dict[str, Any] = {"window": (60, None), "q_lengths": (190, 150), "kv_lengths": (100, 150)}
PACKED_EVERYTHING: dict[str, Any] = {
    "tails": (5, 9),
    "q_heads": 4,
    "kv_heads": 2,
    "causal": True,
    "q_offset": 3,
    "window": (25, None),
    "softcap": 4.0,
    "alibi": "n",
    "sinks": True,
    "dropout_rate": 0.1,
}

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
    *(
        Case(f"head_dims_{h}_{v}", 21, 34, 2, 1, h, value_head_dim=v, causal=True, q_offset=13, core=(h, v) == (40, 24))
        for h, v in VALUE_HEAD_DIMS
    ),
    # Bias
    Case("bias", 37, 53, bias="bnts", core=True),
    Case("bias_of_heads", 33, 47, q_heads=6, bias="nts", causal=True, q_offset=9),
    Case("bias_of_pairs", 33, 47, q_heads=4, bias="ts", core=True),
    Case("bias_of_batches", 22, 35, leading=(2, 3), bias="bts"),
    Case("bias_of_keys", 33, 47, bias="bs"),
    Case("bias_of_rows", 33, 47, bias="nt"),
    Case("bias_of_heads_alone", 33, 47, bias="n"),
    Case("bias_of_nothing", 33, 47, bias=""),
    Case("bias_tiles", 150, 290, q_heads=2, kv_heads=1, head_dim=64, leading=(1,), bias="nts"),
    Case("bias_tiles_of_keys", 150, 290, q_heads=2, kv_heads=1, head_dim=64, leading=(1,), bias="ns", causal=True),
    Case("bias_one_row", 1, 45, bias="bnts"),
    Case("bias_one_key", 19, 1, bias="bnts"),
    Case("bias_wide", 37, 53, q_heads=4, bias="nts", bias_dtype="float32", dtypes=NARROW),
    Case("bias_narrow", 37, 53, q_heads=4, bias="nts", bias_dtype="bfloat16", dtypes=("float32",)),
    Case("bias_with_holes", 37, 53, bias="bnts", bias_holes=0.5, causal=True, core=True),
    Case("bias_of_holes", 17, 23, bias="bs", bias_holes=1.0),
    Case("bias_huge", 37, 54, bias="nts", bias_spread=1e4, twins=True, dtypes=NARROW),
    # Mask
    Case("mask", 37, 53, mask="bnts", core=True),
    Case("mask_of_heads", 33, 47, q_heads=6, mask="nts", causal=True, q_offset=9),
    Case("mask_of_pairs", 33, 47, mask="ts"),
    Case("mask_of_keys", 33, 47, mask="bs", mask_density=0.5, causal=True, q_offset=-2),
    Case("hidden_keys", 290, 515, 4, 2, 64, mask="bs", mask_density=0.5),
    Case(
        "hidden_keys_of_heads",
        130,
        515,
        4,
        2,
        40,
        mask="ns",
        mask_density=0.5,
        q_lengths=(130, 9),
        kv_lengths=(515, 333),
    ),
    Case("hidden_keys_but_few", 60, 900, 4, 1, mask="bs", mask_density=0.004, sinks=True),
    Case("mask_of_rows", 33, 47, leading=(2, 3), mask="bnt"),
    Case("mask_sparse", 70, 90, mask="nts", mask_density=0.02),
    Case("mask_of_everything", 17, 23, mask="", mask_density=0.0),
    Case("mask_tiles", 150, 290, q_heads=2, kv_heads=1, head_dim=64, leading=(1,), mask="nts"),
    # Window
    Case("window", 37, 53, window=(5, 3), core=True),
    Case("window_both_sides", 53, 37, window=8),
    Case("window_left", 37, 53, window=(7, None), q_offset=12),
    Case("window_right", 37, 53, window=(None, 4), q_offset=-9),
    Case("window_of_one", 37, 53, window=(0, 0), q_offset=(-20, 30)),
    Case("window_causal", 53, 70, q_heads=4, window=(16, 2), causal=True, q_offset=17),
    Case("window_past_the_keys", 30, 20, window=(3, 3), q_offset=40),
    Case("window_before_the_keys", 30, 20, window=(3, 3), q_offset=(-40, -25)),
    Case("window_first_limit", 12, 20, window=(2**31 - 2, 2**31 - 2), q_offset=-(2**31)),
    Case("window_last_limit", 12, 20, window=(2**31 - 2, 2**31 - 2), q_offset=2**31 - 1),
    Case("window_tiles", 290, 400, q_heads=2, kv_heads=1, head_dim=32, leading=(1,), window=(40, 20), q_offset=60),
    Case("window_tiles_causal", 290, 290, 1, 1, 64, leading=(1,), window=(100, None), causal=True),
    # Scale and window as arrays
    Case("array_scale", 37, 53, scale=0.4, arrays=True, core=True),
    Case("array_scale_negative", 37, 53, q_heads=4, scale=-0.3, arrays=True, causal=True, core=True),
    Case("array_scale_zero", 30, 40, scale=0.0, arrays=True, core=True),
    Case("array_scale_lengths", 37, 53, scale=-0.5, arrays=True, q_lengths=(37, 20), kv_lengths=(11, 53)),
    Case("array_scale_softcap", 33, 47, scale=-0.5, arrays=True, softcap=1.0, sinks=True),
    Case("array_scale_one_row", 1, 45, q_heads=4, scale=0.2, arrays=True),
    Case("array_window", 37, 53, window=(5, 3), arrays=True, core=True),
    Case("array_window_left", 37, 53, window=(7, None), arrays=True, q_offset=12),
    Case("array_window_right", 37, 53, window=(None, 4), arrays=True, q_offset=-9),
    Case("array_window_causal", 53, 70, q_heads=4, window=(16, 2), arrays=True, causal=True, q_offset=17),
    Case("array_window_causal_later", 53, 70, window=(16, -3), arrays=True, causal=True, q_offset=17),
    Case("array_window_behind", 53, 70, window=(20, -6), arrays=True, q_offset=(9, 0), core=True),
    Case("array_window_ahead", 53, 70, window=(-6, 20), arrays=True, q_offset=(-9, 0)),
    Case("array_window_empty", 37, 53, window=(3, -4), arrays=True, sinks=True),
    Case("array_window_limits", 30, 45, window=(2**31 - 1, 2**31 - 1), arrays=True, q_offset=(-(2**31), 2**31 - 1)),
    Case("array_window_lowest", 30, 45, window=(-(2**31),) * 2, arrays=True, q_offset=(-(2**31), 2**31 - 1)),
    Case("array_window_meets_offset", 30, 45, window=(2**31 - 9, 7 - 2**31), arrays=True, q_offset=2**31 - 9),
    Case("array_window_tiles", 290, 400, 2, 1, 32, leading=(1,), window=(40, 20), arrays=True, q_offset=60),
    Case("array_window_tiles_behind", 290, 290, 1, 1, 64, leading=(1,), window=(100, -40), arrays=True, causal=True),
    Case("array_window_tiles_ahead", 290, 290, 1, 1, 64, leading=(1,), window=(-40, 100), arrays=True, bias="ts"),
    Case("array_window_all", 150, 290, 2, 1, 64, leading=(1,), window=(2**31 - 1, 2**31 - 1), arrays=True, causal=True),
    # Softcap
    Case("softcap", 37, 53, softcap=1.5, spread=2.0, core=True),
    Case("softcap_loose", 33, 47, q_heads=6, kv_heads=2, softcap=50.0, causal=True),
    Case("softcap_of_huge_scores", 60, 80, head_dim=64, softcap=30.0, spread=60.0, twins=True, dtypes=NARROW),
    Case("softcap_negative_scale", 33, 47, softcap=1.0, scale=-0.5),
    # ALiBi
    Case("alibi", 37, 53, q_heads=4, alibi="n", core=True),
    Case("alibi_of_batches", 33, 47, q_heads=6, kv_heads=2, leading=(2, 3), alibi="bn", q_offset=14),
    Case("alibi_causal", 53, 37, q_heads=4, alibi="bn", causal=True, q_offset=(3, -8)),
    Case("alibi_tiles", 150, 290, q_heads=2, kv_heads=1, head_dim=64, leading=(1,), alibi="n", q_offset=140),
    # Sinks
    Case("sinks", 37, 53, q_heads=4, sinks=True, core=True),
    Case("sinks_alone", 40, 30, q_heads=4, kv_heads=2, sinks=True, causal=True, q_offset=-11, core=True),
    Case("sinks_one_key", 19, 1, sinks=True, leading=(2, 2)),
    Case("sinks_tiles", 150, 290, q_heads=2, kv_heads=1, head_dim=64, leading=(1,), sinks=True),
    # Dropout
    Case("dropout", 37, 53, dropout_rate=0.1, core=True),
    Case("dropout_half", 33, 47, q_heads=6, kv_heads=2, leading=(2, 3), dropout_rate=0.5, causal=True, q_offset=14),
    Case("dropout_most", 70, 90, dropout_rate=0.97),
    Case("dropout_tiles", 150, 290, q_heads=2, kv_heads=1, head_dim=64, leading=(1,), dropout_rate=0.25, core=True),
    Case("dropout_one_row", 1, 45, q_heads=4, dropout_rate=0.3),
    # Segments
    Case("segments", 37, 53, segments=3, core=True),
    Case("segments_unsorted", 33, 47, q_heads=6, kv_heads=2, segments=4, segments_sorted=False, causal=True),
    Case("segments_many", 70, 90, segments=60),
    Case("segments_tiles", 290, 350, q_heads=2, kv_heads=1, head_dim=32, leading=(2,), segments=7, causal=True),
    # Lengths
    Case("lengths", 37, 53, q_lengths=(37, 20), kv_lengths=(11, 53)),
    Case("lengths_of_queries", 37, 53, q_heads=4, kv_heads=2, q_lengths=(0, 33), causal=True, q_offset=20),
    Case("lengths_of_keys", 37, 53, leading=(3,), kv_lengths=(53, 0, 1), causal=True, q_offset=(16, 3, 16)),
    Case("lengths_tiles", 150, 290, 2, 1, 64, q_lengths=(150, 65), kv_lengths=(129, 290)),
    Case("lengths_bias", 37, 53, bias="bnts", q_lengths=(37, 20), kv_lengths=(11, 53), core=True),
    Case("lengths_sinks", 37, 53, sinks=True, q_lengths=(30, 5), kv_lengths=(0, 50)),
    Case("lengths_short", 290, 350, 2, 1, 32, causal=True, segments=4, q_lengths=(40, 3), kv_lengths=(350, 60)),
    Case("lengths_short_window", 290, 350, 2, 1, 32, (1,), window=(60, 9), segments=4, kv_lengths=(50,)),
    # Several at once
    Case("bias_alibi_softcap", 37, 53, q_heads=4, bias="nts", alibi="n", softcap=2.0, core=True),
    Case("mask_window_causal", 70, 90, q_heads=4, mask="bts", window=(20, 0), causal=True, q_offset=20, sinks=True),
    Case("dropout_bias_sinks", 37, 53, q_heads=4, dropout_rate=0.2, bias="ts", sinks=True),
    Case("segments_window_alibi", 70, 90, segments=3, window=(30, 9), alibi="bn", q_offset=7, softcap=5.0),
    Case("lengths_dropout_mask", 70, 90, q_lengths=(70, 40), kv_lengths=(60, 90), dropout_rate=0.3, mask="ns"),
    Case("everything", 70, 90, q_heads=4, kv_heads=2, **EVERYTHING, core=True),
    Case("array_everything", 70, 90, q_heads=4, kv_heads=2, **EVERYTHING, scale=-0.4, arrays=True, core=True),
    Case("everything_flat", 70, 90, q_heads=4, kv_heads=1, leading=(2, 1), value_head_dim=24, **EVERYTHING),
    Case("everything_64", 150, 170, q_heads=2, head_dim=64, **EVERYTHING),
    Case("everything_128", 70, 90, q_heads=2, head_dim=128, **EVERYTHING),
    Case("everything_256", 70, 90, q_heads=2, head_dim=256, **EVERYTHING),
    Case("everything_192_128", 70, 90, q_heads=2, head_dim=192, value_head_dim=128, **EVERYTHING),
    # Intervals
    Case("kv_start", 70, 90, intervals="kv_start:bt", core=True),
    Case("kv_end", 70, 90, 4, 2, intervals="kv_end:bnt"),
    Case("kv_end_of_batches", 70, 90, leading=(2, 3), intervals="kv_end:b"),
    Case("q_start", 70, 90, 4, 2, intervals="q_start:ns"),
    Case("q_end", 70, 90, intervals="q_end:s"),
    Case("intervals", 290, 515, 4, 2, leading=(1,), intervals="kv_start:nt kv_end:t q_start:s q_end:bns", core=True),
    Case("intervals_of_rows", 515, 290, 4, 1, 32, intervals="kv_start:bnt kv_end:bnt", sinks=True),
    Case("intervals_of_keys", 515, 290, 6, 2, 40, intervals="q_start:bns q_end:bns", causal=True, q_offset=-9),
    Case("intervals_no_batch", 40, 70, leading=(), intervals="kv_start:t q_end:ns"),
    Case("intervals_one_row", 1, 600, 8, 2, intervals="kv_start:bn q_end:bns kv_end:bt"),
    Case("intervals_few_rows", 5, 600, 4, 2, intervals="kv_start:bnt q_start:s kv_end:t"),
    Case("intervals_more_rows_of_heads", 20, 300, 4, 2, intervals="kv_end:bnt q_end:s"),
    Case("intervals_window", 150, 290, 2, 1, 64, intervals="kv_start:t q_start:bs", window=(60, 40), q_offset=70),
    Case("intervals_segments", 150, 290, intervals="kv_end:bt q_end:ns", segments=3, segments_sorted=False),
    Case("intervals_bias", 150, 190, 4, 2, intervals="kv_start:t q_end:s", bias="nts", mask="bts", alibi="n"),
    Case("intervals_dropout", 150, 190, 4, 2, intervals="kv_start:bt q_end:s", dropout_rate=0.3, softcap=3.0),
    Case("intervals_lengths", 150, 190, intervals="kv_start:t q_end:s", q_lengths=(140, 9), kv_lengths=(100, 190)),
    Case("intervals_everything", 150, 190, 4, 2, **EVERYTHING, intervals="kv_start:bt kv_end:nt q_start:s q_end:bns"),
    # float32 products at the accuracy of TF32, on platforms that have it
    Case("tf32", 37, 53, q_heads=4, kv_heads=2, precision="default", dtypes=("float32",)),
    Case("tf32_causal", 150, 290, 2, 1, 64, (1,), causal=True, q_offset=140, precision="default", dtypes=("float32",)),
    Case("tf32_everything", 70, 90, q_heads=4, kv_heads=2, **EVERYTHING, precision="default", dtypes=("float32",)),
    Case("tf32_large", 1100, 1030, 4, 2, 128, precision="default", dtypes=("float32",), large=True),
    # Split-KV: short queries, whose keys GPUs split over blocks; shared by query heads, and with every option
    *(
        Case(f"split_kv_{t}", t, 4099, 8, 2, 64, (1,), causal=True, q_offset=4099 - t, core=t == 2, large=t != 2)
        for t in (1, 2, 5, 17, 64)
    ),
    *(Case(f"split_kv_head_dim_{h}", 5, 2500, 4, 1, h, large=True) for h in (40, 96, 128, 192, 256)),
    Case("split_kv_heads_alone", 40, 1999, 4, 4, 128, large=True),
    Case("split_kv_head_dims", 5, 2500, 4, 2, 64, value_head_dim=128, causal=True, q_offset=2490, large=True),
    Case("split_kv_rows_of_heads", 1, 2500, 32, 1, 128, large=True),
    # Enough heads for Hopper's blocks of 192 rows; all other cases of head_dim 64 have blocks of 128.
    *(
        Case(f"many_heads{'_causal' if causal else ''}", 190, 300, 67, 67, 64, (1,), causal=causal, large=True)
        for causal in (False, True)
    ),
    Case("split_kv_square", 200, 200, 1, 1, 64, (1,), large=True),
    Case("split_kv_scores_huge", 5, 2500, 8, 2, 64, spread=45.0, twins=True, dtypes=NARROW, large=True),
    Case("split_kv_bias", 5, 2500, 8, 2, 64, bias="bnts", large=True),
    Case("split_kv_bias_of_heads", 17, 2501, 4, 2, 128, bias="ns", large=True),
    Case("split_kv_mask", 5, 2501, 8, 2, 64, mask="bts", mask_density=0.02, large=True),
    Case("split_kv_window", 5, 2500, 8, 2, 64, window=(300, 20), q_offset=(1200, 40), large=True),
    Case("split_kv_array_window", 5, 2500, 8, 2, 64, window=(300, -20), arrays=True, q_offset=(1200, 40), large=True),
    Case("split_kv_array_scale", 5, 2500, 8, 2, 64, scale=-0.2, arrays=True, large=True),
    Case("split_kv_softcap", 5, 2500, 8, 2, 64, softcap=2.0, large=True),
    Case("split_kv_alibi", 17, 2500, 8, 2, 64, alibi="bn", q_offset=2400, large=True),
    Case("split_kv_sinks", 5, 2500, 8, 2, 64, sinks=True, large=True),
    Case("split_kv_sinks_alone", 5, 2500, 8, 2, 64, sinks=True, causal=True, q_offset=-3, large=True),
    Case("split_kv_dropout", 17, 2500, 8, 2, 64, dropout_rate=0.3, large=True),
    Case("split_kv_segments", 17, 2500, 8, 2, 64, segments=5, large=True),
    Case("split_kv_segments_unsorted", 17, 2500, 8, 2, 64, segments=5, segments_sorted=False, large=True),
    Case("split_kv_lengths", 17, 2500, 8, 2, 64, (3,), q_lengths=(0, 9, 17), kv_lengths=(2000, 40, 0), large=True),
    # Up to 1024 keys, which the blocks of a cluster share on GPUs with clusters
    *(Case(f"split_kv_cluster_{h}", 5, 1021, 4, 1, h, causal=True, q_offset=900, large=True) for h in (64, 128, 256)),
    Case("split_kv_cluster_lengths", 17, 1024, 8, 2, 64, (2,), q_lengths=(0, 9), kv_lengths=(1000, 40), large=True),
    Case("split_kv_cluster_of_two", 5, 300, 8, 2, 64, sinks=True, dropout_rate=0.3, large=True),
    Case("split_kv_cluster_of_eight", 3, 1024, 8, 2, 128, (2,), sinks=True, kv_lengths=(1024, 200), large=True),
    # Up to 64 keys and columns, without options, by the single-tile forward.
    *(Case(f"single_tile_{h}", h, h, 1, 1, h, (1,), large=True) for h in (16, 32, 48, 64)),
    Case("single_tile_grouped", 33, 50, 6, 3, 32, causal=True, large=True),
    Case("single_tile_head_dims", 5, 64, 4, 2, 48, value_head_dim=16, scale=0.3, large=True),
    # With one key dq consists of dlse's part and the rounding of delta, and nothing else in float32.
    Case("single_tile_one_key", 17, 1, 2, 1, 64, (3,), dtypes=NARROW, large=True),
    Case("single_tile_scores_huge", 40, 63, 2, 2, 64, spread=45.0, twins=True, dtypes=NARROW, large=True),
    # One tile of keys, which is one warp's
    *(Case(f"split_kv_tile_{h}", 30, 16, 2, 2, h, (1,), causal=True, large=True) for h in (24, 40, 256)),
    Case(
        "split_kv_tile_lengths", 30, 60, 4, 4, 64, (2,), sinks=True, q_lengths=(30, 9), kv_lengths=(60, 0), large=True
    ),
    *(
        Case(f"split_kv_everything_{h}", 17, 2500, 4, 2, h, **{**EVERYTHING, **SPLIT_KV_EVERYTHING}, large=True)
        for h in (64, 128, 256)
    ),
    # Few key heads, whose query heads GPUs split over blocks: the sums of these lie in dq, or in scratch if dq is too
    # small and there is no accumulator
    *(
        Case(f"split_{h}{'_causal' if causal else ''}", 400, 100, 8, 1, h, causal=causal, q_offset=-70, large=True)
        for h in (64, 128, 256)
        for causal in (False, True)
    ),
    *(Case(f"split_scratch_{h}", 200, 150, 8, 1, h, causal=True, large=True) for h in (40, 64, 128, 192, 256)),
    Case("split_odd_group", 390, 150, 18, 2, 64, causal=True, large=True),
    Case("split_head_dims", 200, 150, 8, 1, 64, value_head_dim=128, causal=True, q_offset=20, large=True),
    Case("split_head_dims_wide", 200, 150, 8, 1, 192, value_head_dim=128, large=True),
    Case("split_bias", 200, 150, 8, 1, 64, bias="nts", large=True),
    Case("split_bias_of_batches", 200, 150, 8, 1, 128, bias="bts", large=True),
    Case("split_bias_of_keys", 200, 150, 8, 1, 64, bias="bs", causal=True, large=True),
    Case("split_mask", 200, 150, 8, 1, 64, mask="nts", large=True),
    Case("split_window", 390, 300, 16, 2, 64, window=(30, 9), q_offset=7, large=True),
    Case("split_array_window", 390, 300, 16, 2, 64, window=(30, -9), arrays=True, scale=0.2, q_offset=7, large=True),
    Case("split_softcap", 200, 150, 8, 1, 128, softcap=2.0, large=True),
    Case("split_alibi", 200, 150, 8, 1, 64, alibi="bn", q_offset=50, large=True),
    Case("split_sinks", 200, 150, 8, 1, 64, sinks=True, causal=True, q_offset=-20, large=True),
    Case("split_dropout", 200, 150, 8, 1, 128, dropout_rate=0.3, large=True),
    Case("split_segments", 390, 300, 8, 1, 64, segments=5, causal=True, large=True),
    Case("split_lengths", 390, 300, 16, 2, 64, (3,), q_lengths=(0, 90, 390), kv_lengths=(270, 40, 0), large=True),
    *(
        Case(f"split_everything_{h}", 200, 150, 16, 2, h, **{**EVERYTHING, **SPLIT_EVERYTHING}, large=True)
        for h in (64, 128, 256)
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
    Case("large_scores_huge", 512, 640, 4, 4, 128, spread=45.0, twins=True, dtypes=NARROW, large=True),
    Case("large_bias", 300, 513, 4, 2, 64, bias="bnts", large=True),
    Case("large_bias_of_heads", 513, 300, 4, 2, 128, bias="nts", causal=True, large=True),
    Case("large_bias_of_keys", 300, 513, 4, 2, 64, bias="bs", large=True),
    Case("large_mask", 300, 513, 4, 2, 128, mask="ts", large=True),
    Case("large_hidden_keys_64", 700, 900, 8, 2, 64, mask="bs", mask_density=0.5, large=True),
    Case(
        "large_hidden_keys_128",
        700,
        900,
        8,
        4,
        128,
        mask="s",
        mask_density=0.9,
        softcap=3.0,
        sinks=True,
        q_lengths=(700, 130),
        kv_lengths=(900, 333),
        large=True,
    ),
    Case(
        "large_hidden_keys_256", 700, 900, 8, 8, 256, mask="bs", mask_density=0.01, arrays=True, scale=0.1, large=True
    ),
    Case("large_hidden_keys_narrow", 700, 900, 8, 2, 40, value_head_dim=104, mask="bs", mask_density=0.3, large=True),
    Case("large_window", 1100, 1030, 4, 2, 64, window=(100, 50), q_offset=30, large=True),
    Case("large_window_causal", 1100, 1100, 4, 2, 128, window=(200, None), causal=True, large=True),
    *(
        Case(f"large_array_scale_{h}", 300, 513, 4, 2, h, scale=-0.1, arrays=True, causal=True, large=True)
        for h in (64, 128, 256)
    ),
    *(
        Case(f"large_array_window_{h}", 1100, 1030, 4, 2, h, window=window, arrays=True, q_offset=30, large=True)
        for h, window in ((64, (100, 50)), (128, (100, -50)), (256, (-50, 100)))
    ),
    Case("large_array_window_all", 600, 1030, 4, 2, 64, window=(2**31 - 1, 0), arrays=True, q_offset=430, large=True),
    Case("large_dropout", 1100, 1030, 4, 2, 64, dropout_rate=0.1, large=True),
    Case("large_segments", 1100, 1100, 4, 2, 128, segments=9, causal=True, large=True),
    *(
        Case(f"large_intervals_{h}", 1100, 1030, 4, 2, h, intervals=sides, large=True)
        for h, sides in ((64, "kv_start:t kv_end:bnt"), (128, "q_start:s q_end:ns"), (256, "kv_start:nt q_end:bs"))
    ),
    Case("large_intervals_causal", 1100, 1100, 4, 2, 128, intervals="kv_start:t q_end:s", causal=True, large=True),
    Case("split_kv_intervals", 17, 2500, 8, 2, 64, intervals="kv_start:bnt q_end:ns kv_end:t", large=True),
    Case("split_kv_interval_of_rows", 2, 2500, 8, 2, 64, intervals="kv_start:b kv_end:bn", large=True),
    Case("split_intervals", 390, 300, 8, 1, 64, intervals="kv_start:nt q_end:ns", causal=True, large=True),
    Case("large_lengths", 513, 700, 4, 2, 64, q_lengths=(500, 130), kv_lengths=(260, 700), large=True),
    # Blocks of keys whose first row, and blocks of rows whose first key, would be tiles after the last one
    Case("large_short_rows", 585, 646, 4, 4, 64, (1,), value_head_dim=192, **SHORT_ROWS, large=True),
    *(Case(f"large_short_rows_{h}", 585, 646, 4, 2, h, (1,), **SHORT_ROWS, large=True) for h in (64, 128, 256)),
    Case("large_short_keys", 646, 585, 4, 2, 64, (1,), **SHORT_KEYS, large=True),
    # Long ones without options, of which Hopper's backward takes tiles of other rows.
    Case("large_long", 8200, 390, 2, 2, 128, (2,), large=True),
    Case("large_long_shared", 9500, 700, 4, 1, 128, (1,), large=True),
    Case("large_long_wide", 8321, 130, 3, 3, 72, (1,), value_head_dim=104, large=True),
    Case("large_long_narrow", 8200, 257, 2, 1, 128, (1,), value_head_dim=32, large=True),
    Case("large_long_many", 4096, 260, 48, 48, 96, (1,), large=True),  # more blocks than multiprocessors
    Case("large_short_keys_wide", 646, 585, 4, 4, 192, (1,), value_head_dim=64, **SHORT_KEYS, large=True),
    Case(
        "split_kv_short_keys",
        60,
        2500,
        4,
        2,
        64,
        q_offset=(2000, 200),
        **{**SHORT_KEYS, "kv_lengths": (90, 99)},
        large=True,
    ),
    Case("large_head_dims", 300, 513, 4, 2, 192, value_head_dim=128, causal=True, q_offset=200, large=True),
    *(
        Case(f"large_everything_{h}", 513, 700, 4, 2, h, **{**EVERYTHING, **LARGE_EVERYTHING}, large=True)
        for h in (64, 128)
    ),
)

PACKED_CASES = (
    PackedCase("packed", (5, 33, 17), (5, 33, 17), core=True),
    PackedCase("packed_causal", (5, 33, 1, 17), (5, 33, 1, 17), causal=True, q_heads=4),
    PackedCase("packed_lengths_differ", (5, 33, 17), (21, 9, 40), tails=(3, 11), causal=True, q_offset=(16, 0, 23)),
    PackedCase("packed_empty_ones", (0, 5, 0, 0, 17, 9), (3, 8, 0, 0, 0, 9), tails=(7, 2), sinks=True, core=True),
    PackedCase("packed_one", (29,), (37,), q_heads=4, kv_heads=1),
    PackedCase("packed_many", (1, 2, 3) * 3, (3, 2, 1) * 3, tails=(1, 1), causal=True, q_offset=2),
    PackedCase("packed_tiles", (130, 70, 200), (150, 64, 190), tails=(20, 1), head_dim=64, causal=True, q_offset=5),
    PackedCase("packed_window", (40, 20, 70), (40, 30, 70), window=(9, 3), alibi="dn", q_heads=4, kv_heads=2),
    PackedCase("packed_arrays", (40, 20, 0, 70), (40, 30, 9, 70), (3, 5), scale=-0.3, window=(9, 3), arrays=True),
    PackedCase("packed_arrays_behind", (40, 20, 70), (40, 30, 70), window=(30, -5), arrays=True, sinks=True),
    PackedCase("packed_dropout", (40, 20, 37), (40, 30, 53), dropout_rate=0.25, q_heads=4, kv_heads=2),
    PackedCase("packed_head_dims", (20, 30), (25, 31), head_dim=40, value_head_dim=24, softcap=3.0),
    PackedCase("packed_everything", (40, 0, 37), (40, 7, 53), **PACKED_EVERYTHING, core=True),
    PackedCase("packed_intervals", (40, 0, 137), (60, 7, 153), (3, 5), 4, 2, intervals="kv_start:nt q_end:s kv_end:t"),
    PackedCase("packed_intervals_causal", (90, 70), (90, 70), causal=True, intervals="q_start:ns q_end:s", core=True),
    PackedCase("packed_split_kv", (3, 0, 1, 16, 13), (900, 40, 1, 1500, 100), (7, 60), 8, 2, 64, large=True),
    PackedCase("packed_split_kv_all", (3, 0, 1, 16), (900, 40, 1, 1500), head_dim=128, **PACKED_EVERYTHING, large=True),
    PackedCase("packed_large", (513, 128, 700, 3), (513, 200, 600, 9), (40, 0), 4, 2, 64, large=True, causal=True),
    PackedCase("packed_split", (150, 3, 250), (100, 9, 70), (20, 3), 8, 1, 64, large=True, causal=True),
    PackedCase("packed_split_wide", (450, 3, 250), (70, 9, 60), (0, 3), 8, 1, 128, large=True),
    PackedCase("packed_large_equal", (256,) * 4, (256,) * 4, (0, 0), 4, 2, 128, large=True, causal=True),
    PackedCase("packed_large_all", (513, 0, 700), (400, 200, 600), head_dim=128, **PACKED_EVERYTHING, large=True),
)


REFERENCE_CASES = (
    *("odd", "one_key", "grouped", "no_batch", "batches", "causal_earlier", "scale_zero", "scores_huge"),
    *("head_dims_40_24", "bias_with_holes", "mask", "window", "softcap", "alibi", "sinks_alone", "dropout"),
    *("array_scale_zero", "array_window_behind"),
    *("segments", "lengths_bias", "everything", "packed_empty_ones", "packed_everything"),
    *("intervals", "kv_end_of_batches", "packed_intervals"),
)


EVERY_DTYPE = (
    *("everything", "packed_everything", "bias", "dropout", "lengths_bias", "sinks_alone", "segments"),
    *("array_everything", "array_scale", "hidden_keys"),
)
"""Cases with options that CPUs run in every dtype."""


@functools.cache
def highest_precision_head_dim() -> int:
    """The largest head_dim of kernels with float32's accuracy on this machine's GPUs, limited by shared memory."""
    arches = [device["compute_capability"] for device in registration.cuda_status()["devices"]]
    return min((_core.largest_head_dim(arch=arch, highest_precision=True) for arch in arches), default=256)


def serves(target: Target, case: Case | PackedCase, dtype: str, results: str) -> bool:
    """Whether a case is run: all cases through kernels, the core ones through what is slow to compile.

    The gradient tests check out and lse too, which suffices for plain JAX and, on CPUs, for options, for which plain
    JAX takes most of the time.
    """
    if dtype not in target.dtypes or dtype not in case.dtypes or (case.large and target.platform != "cuda"):
        return False
    limit = target.max_head_dim
    if limit and dtype == "float32" and case.precision != "default":
        limit = min(limit, highest_precision_head_dim())
    if limit and max(case.head_dim, case.value_head_dim or 0) > limit:
        return False
    if target.kernel:
        if target.platform == "cpu" and case.options:
            return results == "gradients" and (dtype in ("float32", case.dtypes[0]) or case.name in EVERY_DTYPE)
        return case.core or dtype != "float64"
    if results == "out":
        return case.name == "odd"
    if target.implementation == "reference":  # differs from "xla" mostly by its chunks
        return case.name in REFERENCE_CASES and dtype == case.dtypes[0]
    return case.core if dtype in ("float32", case.dtypes[0]) else case.name in ("causal_earlier", "everything")


def conformance(results: str) -> list[Any]:
    """Every (target, case, dtype) of the tests of "out" or of "gradients"."""
    return [
        param(target, case, dtype, id=f"{case.name}-{dtype}")
        for target in TARGETS
        for case in (*CASES, *PACKED_CASES)
        for dtype in DTYPES
        if serves(target, case, dtype, results)
    ]


# For derivatives by differences, and to see NaN

SMALL = Case("small", 5, 7, q_heads=4, kv_heads=2, head_dim=3, causal=True, q_offset=(-2, 1), scale=-0.7)


SMALL_EVERYTHING = dataclasses.replace(
    SMALL,
    name="small_everything",
    value_head_dim=2,
    bias="nts",
    bias_holes=0.1,
    mask="bts",
    window=(4, None),
    arrays=True,
    softcap=1.5,
    alibi="bn",
    sinks=True,
    dropout_rate=0.2,
    segments=2,
    intervals="kv_start:t q_end:ns",
    q_lengths=(5, 4),
    kv_lengths=(6, 7),
)
SMALL_PACKED = PackedCase(
    *("small_packed", (3, 0, 4), (5, 2, 3), (1, 2), 4, 2, 3),
    causal=True,
    q_offset=(1, 0, -1),
    scale=-0.6,
    window=(3, -1),
    arrays=True,
    softcap=2.0,
    alibi="dn",
    sinks=True,
    dropout_rate=0.2,
)


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
