"""Score and mask functions: their programs against JAX, and CUDA's kernels with them in the emulator and by NVRTC."""

import ctypes
import dataclasses
import itertools
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import emulated
import gallery
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash._functions import cuda, exact, program, trace
from jax_flash._native import _core, registration

MASKS, SCORES = gallery.functions()
BATCH, HEADS, LENGTH = 2, 4, 333


def traced(
    score: str | None = None, mask: str | None = None, partial: str | None = None, block_size: tuple[int, int] = (1, 1)
) -> tuple[trace.Functions, list[jax.Array]]:
    captured = trace.Captured()

    def of(name: str, f: Callable[..., Any] | None, kind: str) -> trace.Function | None:
        return None if f is None else trace.trace(name, f, kind, jnp.float32, captured)

    own = of("score_mod", SCORES.get(score or ""), "score")
    masks = of("mask_mod", MASKS.get(mask or ""), "mask")
    partial_mask = of("mask_mod", MASKS.get(partial or ""), "mask")
    functions = trace.Functions(own, () if masks is None else (masks,), partial_mask, block_size=block_size)
    return functions, captured.arrays


def floats(arrays: Sequence[jax.Array]) -> list[int]:
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]


# Programs

NUMPY: dict[str, Callable[..., Any]] = {
    "sqrt": np.sqrt, "exp": np.exp, "log1p": np.log1p, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "not": np.logical_not, "and": np.bitwise_and, "or": np.bitwise_or,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "abs": np.abs,
    "neg": np.negative, "sign": np.sign, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "log": np.log, "is_finite": np.isfinite,
    "shift_right_logical": np.right_shift,  # of numbers that are not negative, the only ones in these programs
    "shift_right_arithmetic": np.right_shift,
}  # fmt: skip


def evaluated(of: program.Program, inputs: dict[str, Any], captured: Sequence[Any]) -> list[Any]:
    """The outputs for arrays of inputs, by NumPy."""
    values: list[Any] = []
    for op in of.ops:
        args = [values[i] for i in op.args]
        dtype = jnp.dtype(op.dtype)
        if op.name == "input":
            values.append(inputs[op.params])
        elif op.name == "constant":
            values.append(op.params)
        elif op.name == "load":
            values.append(np.asarray(captured[op.params])[tuple(args)])
        elif op.name == "select_n":
            values.append(np.where(args[0], args[2], args[1]))
        elif op.name == "convert_element_type":
            values.append(np.asarray(args[0]).astype(dtype))
        elif op.name == "div":
            values.append(np.trunc(args[0] / args[1]) if dtype.kind == "i" else args[0] / args[1])
        elif op.name == "rem":
            values.append(np.fmod(*args))
        else:
            values.append(NUMPY[op.name](*args))
        values[-1] = np.asarray(values[-1]).astype(dtype)
    return [values[i] for i in of.outputs]


def pairs(offset: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    inputs = {"b": BATCH, "h": HEADS, "q": LENGTH, "kv": LENGTH}
    found: dict[str, np.ndarray] = {x: random.integers(0, n, 4000).astype(np.int32) for x, n in inputs.items()}
    found["q"] += np.int32(offset)
    found["score"] = random.standard_normal(4000).astype(np.float32)
    return found


@pytest.mark.parametrize("offset", [0, -70])
@pytest.mark.parametrize("name", MASKS)
def test_programs_of_masks(name: str, offset: int) -> None:
    functions, captured = traced(mask=name)
    inputs = pairs(offset)
    of = program.mask_program(functions.masks[0], offset == 0)
    want = jax.vmap(MASKS[name])(*(inputs[x] for x in trace.INDICES))
    with np.errstate(all="ignore"):
        (got,) = evaluated(of, inputs, captured)
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


# Forms that are simplified where ranges of positions allow it.
BY_RANGES: dict[str, Callable[..., Any]] = {
    "quotient": lambda b, h, q, kv: q // 64 == kv // 64,
    "remainder": lambda b, h, q, kv: q % 8 < kv % 32,
    "quotient_of_c": lambda b, h, q, kv: jax.lax.div(q, jnp.int32(16)) <= jax.lax.rem(kv, jnp.int32(16)),
    "of_another_number": lambda b, h, q, kv: q // 48 == kv % 24,
    "distance": lambda b, h, q, kv: jnp.abs(q - kv) <= 5,
    "smaller": lambda b, h, q, kv: jnp.abs(q - kv) < 1,
    "never": lambda b, h, q, kv: jnp.abs(q - kv) < 0,
    "largest": lambda b, h, q, kv: jnp.abs(q // 2 - kv) <= 2**31 - 1,
    "of_rows": lambda b, h, q, kv: jnp.abs(q) <= 5,
    "remainder_of_any_sign": lambda b, h, q, kv: (q - kv) % 8 == 3,
    "quotient_of_any_sign": lambda b, h, q, kv: (q - kv) // 16 <= -2,
    "both": lambda b, h, q, kv: (jnp.abs(q // 64 - kv // 64) <= 1) & (jnp.abs(q % 64 - kv % 64) < 8),
}


@pytest.mark.parametrize("from_0", [True, False])
@pytest.mark.parametrize("name", BY_RANGES)
def test_what_ranges_simplify(name: str, from_0: bool) -> None:
    """At the ends of int32 too, whose smallest number has itself as its absolute value."""
    ends = [0, 1, 5, 6, 63, 64, 65, 127, 2**30, 2**31 - 65, 2**31 - 2, 2**31 - 1]
    rows = ends if from_0 else [*ends, *(-x for x in ends), -(2**31)]
    q, kv = (x.ravel().astype(np.int32) for x in np.meshgrid(rows, ends))
    inputs = {"b": np.zeros_like(q), "h": np.zeros_like(q), "q": q, "kv": kv}
    function = trace.trace("mask_mod", BY_RANGES[name], "mask", jnp.float32, trace.Captured())
    of = program.mask_program(function, from_0)
    names = {op.name for op in of.ops}
    if from_0 and name != "of_another_number":
        assert not names & {"div", "rem", "abs"}
    with np.errstate(all="ignore"):
        (got,) = evaluated(of, inputs, [])
    want = jax.vmap(BY_RANGES[name])(*(inputs[x] for x in trace.INDICES))
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


@pytest.mark.parametrize("name", SCORES)
def test_programs_of_scores(name: str) -> None:
    functions, captured = traced(score=name)
    inputs = pairs()
    assert functions.score is not None
    of = program.score_program(functions.score, tuple(floats(captured)))
    with np.errstate(all="ignore"):
        got = evaluated(of.program, inputs, captured)
    args = [inputs["score"], *(inputs[x] for x in trace.INDICES)]
    want = jax.vmap(SCORES[name])(*args)
    derivative = jax.vmap(jax.grad(SCORES[name]))(*args)
    np.testing.assert_allclose(got[0], want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(np.broadcast_to(got[1], want.shape), derivative, rtol=2e-5, atol=2e-6)
    # The gradient of the sum of scores, from single loads.
    call = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(functions.score.jaxpr, ()))
    ours = [np.zeros(x.shape, np.float64) for x in captured]
    for load in of.loads:
        index = tuple(np.broadcast_to(got[i], want.shape) for i in load.index)
        values = np.broadcast_to(got[load.derivative], want.shape).astype(np.float64)
        values = np.where(True if load.valid is None else got[load.valid], values, 0)
        if index:
            np.add.at(ours[load.captured], index, values)
        else:
            ours[load.captured] += values.sum()
    for i in floats(captured):

        def total(x: jax.Array, i: int = i) -> jax.Array:
            arrays = [*captured[:i], x, *captured[i + 1 :]]
            return jax.vmap(lambda *scalars: call(*arrays, *scalars)[0])(*args).sum()

        want = jax.grad(total)(captured[i])
        eps = float(jnp.finfo(captured[i].dtype).eps)
        np.testing.assert_allclose(ours[i], np.asarray(want, np.float64), rtol=30 * eps, atol=100 * eps)


def test_which_pairs_read_an_element() -> None:
    table = jnp.ones((HEADS, 2 * LENGTH), jnp.float32)
    found = {}
    for place, index in {
        "head": lambda h, q, kv: (h, 3),
        "row": lambda h, q, kv: (h, q),
        "key": lambda h, q, kv: (0, kv // 2),
        "diagonal": lambda h, q, kv: (h, (kv - q) // 2 + jnp.abs(q - kv) + LENGTH),
        "pair": lambda h, q, kv: (h, q - kv + q),
    }.items():

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any, index: Any = index) -> Any:
            return s + table[index(h, q, kv)]

        function = trace.trace("score_mod", score, "score", jnp.float32, trace.Captured())
        of = program.score_program(function, (0,))
        found[place] = [of.readers(load) for load in of.loads]
    assert found == {place: [place] for place in found}


@pytest.mark.parametrize(
    ("name", "selects"), [("distance", False), ("sum", False), ("overflow", True), ("score", True), ("infinite", True)]
)
def test_a_sum_selects_by_ds_where_its_derivative_may_not_be_finite(name: str, selects: bool) -> None:
    slopes = jnp.ones(HEADS, jnp.float32)
    factors: dict[str, Callable[..., Any]] = {
        "distance": lambda score, x: -x,
        "sum": lambda score, x: 2 * x + 1e30,
        "overflow": lambda score, x: x * 1e30 * 1e30 * 1e-30,
        "score": lambda score, x: score,
        "infinite": lambda score, x: x * np.float32(np.inf),
    }

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + slopes[h] * factors[name](score, (q - kv).astype(jnp.float32))

    function = trace.trace("score_mod", score_mod, "score", jnp.float32, trace.Captured())
    text = cuda.source(trace.Functions(function), derives=True, gradients=[0])
    (line,) = (line for line in text.splitlines() if line.startswith("  of_head[0] += "))
    assert ("ds != 0.f ?" in line) == selects


@pytest.mark.parametrize("name", ["relative", "buckets"])
@pytest.mark.parametrize("positions_from_0", [True, False])
def test_diagonals_are_summed_where_positions_do_not_saturate(name: str, positions_from_0: bool) -> None:
    functions, captured = traced(name)
    text = cuda.source(functions, derives=True, gradients=floats(captured), positions_from_0=positions_from_0)
    assert f"constexpr int captured_of_diagonals = {int(positions_from_0)};" in text


@pytest.mark.parametrize(
    ("name", "elements"),
    [("graphormer", 16), ("relations", 15), ("buckets", 32), ("weights", 3), ("steps", 0), ("relative", 0)],
)
def test_small_tables_are_summed_by_each_thread(name: str, elements: int) -> None:
    """The dimensions that a head decides don't count; ``weights`` are three more elements than registers hold for a
    head, ``steps`` is too large, ``relative`` is read by diagonals."""
    functions, captured = traced(name)
    text = cuda.source(functions, derives=True, gradients=floats(captured), positions_from_0=True)
    assert f"constexpr int captured_of_tables = {elements};" in text
    assert ("  of_tables[" in text) == (elements > 0)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("relative", True),
        ("buckets", True),
        ("sigmoid_distance", True),
        ("alibi", False),
        ("graphormer", False),
        ("softcap", False),
    ],
)
@pytest.mark.parametrize("positions_from_0", [True, False])
def test_what_is_slow_and_of_a_diagonal_is_kept_for_its_pairs(name: str, kept: bool, positions_from_0: bool) -> None:
    functions, _ = traced(name)
    text = cuda.source(functions, positions_from_0=positions_from_0)
    kept &= positions_from_0
    assert f"constexpr bool has_diagonal_value = {str(kept).lower()};" in text
    of_pair = text[text.index("float score_of_diagonal(") : text.index("bool mask_function(")]
    assert ("load<" in of_pair or "logistic(" in of_pair) == (not kept and name != "softcap")


@pytest.mark.parametrize("positions_from_0", [True, False])
def test_distances_are_told_where_they_do_not_overflow(positions_from_0: bool) -> None:
    """q - kv and comparisons of q with kv; a position below 0 less a key may wrap around."""
    functions, _ = traced(mask="dilated")
    text = cuda.source(functions, positions_from_0=positions_from_0)
    assert ("distance.first >= -distance.more" in text) == ("sub(q, kv)" not in text) == positions_from_0


@pytest.mark.parametrize(("dtype", "known"), [("float32", False), ("bool", True)])
def test_a_range_is_known_of_what_was_bool_and_not_of_what_was_a_float(dtype: str, known: bool) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = (q - kv).astype(dtype).astype(jnp.int32)
        return (jnp.minimum(x, 1) >= q) & (x < 2)

    function = trace.trace("mask_mod", mask, "mask", jnp.float32, trace.Captured())
    names = {op.name for op in program.mask_program(function, True).ops}
    assert ("min" in names) == ("lt" in names) == (not known)


def test_numbers_of_python_are_as_wide_as_what_they_meet() -> None:
    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + (jnp.abs(q - kv) + jnp.where(kv > q, 16, -1)).astype(score.dtype)

    function = trace.trace("score_mod", score_mod, "score", jnp.float32, trace.Captured())
    of = program.score_program(function, (), False, True).program
    assert {op.dtype for op in of.ops} <= {"bool", "int32", "float32"}


def test_equal_operations_are_one_and_constants_are_folded() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // 4 == kv // 4) & (q // 4 + 0 == kv // 4 * 1) & (kv >= 0) & (jnp.int32(3) > 2)

    function = trace.trace("mask_mod", mask, "mask", jnp.float32, trace.Captured())
    of = program.mask_program(function, True)
    assert [op.name for op in of.ops] == ["input", "input", "constant", *2 * ["shift_right_logical"], "eq"]
    assert of.inputs(0) == {"q", "kv"}


@pytest.mark.parametrize(("name", "f"), [("one_minus_square", lambda x: 1 - x * x), ("log2", np.log2)])
def test_primitives_that_jax_has_since_0_11(name: str, f: Callable[..., Any]) -> None:
    """They are made of others."""
    builder = program.Builder({}, {})
    of = builder.finished([builder.apply(name, "float32", (builder.op("input", "float32", (), "score"),))])
    x = np.float32([0.25, 0.5, 3.0])
    np.testing.assert_allclose(evaluated(of, {"score": x}, [])[0], f(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("primitive sort", lambda s, b, h, q, kv: s + jnp.sort(jnp.stack([q, kv]))[0].astype(s.dtype)),
        ("primitive while", lambda s, b, h, q, kv: jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, s)),
        ("an array of shape (333,)", lambda s, b, h, q, kv: s + (gallery.POINTS[:, 1] * s).sum()),
    ],
)  # fmt: skip
def test_what_has_no_program_is_named(name: str, function: Callable[..., Any]) -> None:
    traced_ = trace.trace("score_mod", function, "score", jnp.float32, trace.Captured())
    with pytest.raises(program.Unprintable) as raised:
        program.score_program(traced_, (), False)
    assert name in str(raised.value)
    assert name in (cuda.unprintable(trace.Functions(traced_)) or "")


def test_sums_without_an_order() -> None:
    """Against math.fsum, of addends of all sizes that mostly cancel."""
    random = np.random.default_rng(0)
    addends = (random.standard_normal((200, 40)) * 2.0 ** random.integers(-100, 100, (200, 40))).astype(np.float32)
    addends[:, 20:39] = -addends[:, :19]
    digits = np.zeros((200, exact.DIGITS + 1), np.int64)
    for row, xs in zip(digits, addends, strict=True):
        for x in xs:
            bits = int(x.view(np.uint32))
            exponent, mantissa = bits >> 23 & 255, bits & 0x7FFFFF
            shift = max(exponent - 1, 0)
            whole = (mantissa | (0x800000 if exponent else 0)) << shift % 24
            sign = -1 if x < 0 else 1
            row[shift // 24] += sign * (whole & 0xFFFFFF)
            row[shift // 24 + 1] += sign * (whole >> 24)
    words = digits.view(np.uint32).reshape(200, *exact.SHAPE)
    got = np.asarray(exact.floats(jnp.asarray(words)))
    np.testing.assert_allclose(got, [math.fsum(xs) for xs in addends.astype(np.float64)], rtol=3e-7)
    for flags, want in ((1, np.inf), (2, -np.inf), (3, np.nan), (4, np.nan)):
        words[0, exact.DIGITS, 0] = flags
        np.testing.assert_equal(float(exact.floats(jnp.asarray(words))[0]), want)


# In the emulator


class FunctionProblem(emulated.Problem):
    """A problem with functions, and its results in float64."""

    def __init__(
        self, score: str | None, mask: str | None, blocks: tuple[int, int] | None, calls: int = 1, exact: bool = False,
        offsets: tuple[int, int] | None = None, **sizes: Any,
    ) -> None:  # fmt: skip
        options = list(sizes.pop("options", ()))
        super().__init__(options=options, **sizes)
        functions, captured = traced(score, None if blocks else mask, mask if blocks else None, blocks or (1, 1))
        batch, _, q_heads, _ = self.q.shape
        self.gradients = floats(captured) if score else []
        if functions.score is not None:
            self.gradients = [i for i in self.gradients if i in functions.score.captured]
        # Several calls that vmap has joined differ in the arrays that have gradients.
        self.calls, self.several = calls, frozenset(self.gradients if calls > 1 else ())
        if calls > 1:
            functions = dataclasses.replace(functions, batch=batch // calls)
            captured = [
                jnp.stack([x * (1 - i / 4) for i in range(calls)]).astype(x.dtype) if i in self.several else x
                for i, x in enumerate(captured)
            ]
        self.functions, self.exact = functions, exact
        self.numbers |= {"captured": len(captured), "mask_block_rows": functions.block_size[0]}
        self.numbers |= {"mask_block_keys": functions.block_size[1], "exact_sums": exact}
        if offsets:
            self.arrays["index_offsets"] = np.array(offsets, np.int32)
        indices, keep = self.indices(offsets or (0, 0))
        if mask is not None:
            keep &= np.asarray(over_pairs(MASKS[mask], *indices))
        if blocks:
            self.arrays["mask_blocks"] = block_kinds(keep, blocks)[:, None]
        for i, x in enumerate(captured):
            self.arrays[f"captured_{i}"] = np.ascontiguousarray(x)

        wide = {name: jnp.asarray(self.arrays[name], jnp.float64) for name in self.trainable}
        group = q_heads // self.k.shape[2]
        call = np.arange(batch) // (batch // calls)

        def attention(query: Any, key: Any, value: Any, operands: Any, changed: Any) -> Any:
            key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
            scores = jnp.einsum("btnh,bsnh->bnts", query, key) * self.numbers.get("scale", query.shape[-1] ** -0.5)
            if "softcap" in self.of:
                scores = self.of["softcap"] * jnp.tanh(scores / self.of["softcap"])
            if "bias" in operands:
                scores += operands["bias"]
            if "alibi_slopes" in operands:
                slopes = operands["alibi_slopes"][:, 0, :, None, None]
                scores -= slopes * jnp.abs(indices[2] - indices[3]).astype(slopes.dtype)
            if score is not None:
                safe = jnp.where(keep, scores, 0.0)
                # The indices of dropped pairs may give NaN, whose derivative would be NaN as well.
                known = [jnp.where(keep, x, 0) for x in indices]
                results = []
                for i in range(calls):
                    own = [x[i] if n in self.several else x for n, x in zip(self.gradients, changed, strict=True)]
                    here = call == i
                    f = self.with_captured(score, own)
                    results.append(over_pairs(f, safe[here], *(x[here] for x in known)))
                scores = jnp.concatenate(results)
            scores = jnp.where(keep, scores, -jnp.inf)
            alive = (scores > -jnp.inf).any(-1)
            lse = jax.nn.logsumexp(jnp.where(alive[..., None], scores, 0.0), axis=-1)
            weights = jnp.where(alive[..., None], jnp.exp(scores - lse[..., None]), 0.0)
            return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.where(alive, lse, -jnp.inf)

        *true, dout = (jnp.asarray(x) for x in self.true)
        changed = [captured[i].astype(jnp.float64) for i in self.gradients]
        (out, lse), pullback = jax.vjp(attention, *true, wide, changed)
        alive = np.isfinite(np.asarray(lse))
        dlse = np.where(alive, self.dlse, 0.0)
        dq, dk, dv, doperands, dcaptured = pullback((dout, jnp.asarray(dlse)))
        right = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        right |= {f"d{name}": x for name, x in doperands.items()}
        right |= {f"dcaptured_{j}": x for j, x in enumerate(dcaptured)}
        self.right = {name: np.asarray(x) for name, x in right.items()}
        delta = np.moveaxis((self.true[3] * self.right["out"]).sum(-1), 1, 2) - dlse
        rows = self.rows[:, None]
        self.delta, self.lse = (
            np.ascontiguousarray(np.where(rows, x, np.nan), np.float32) for x in (delta, self.right["lse"])
        )

    def indices(self, offsets: tuple[int, int]) -> tuple[list[jax.Array], np.ndarray]:
        """What functions get of every pair, [B, N, T, S] each; and which pairs the other options keep."""
        (batch, q_length, q_heads, _), kv_length = self.q.shape, self.k.shape[1]
        entry = [np.broadcast_to(np.arange(batch)[:, None], (batch, n)) for n in (q_length, kv_length)]
        position = [np.broadcast_to(np.arange(n), (batch, n)) for n in (q_length, kv_length)]
        keep = np.ones((batch, q_heads, q_length, kv_length), bool)
        if "cu_q_lengths" in self.of:
            for side, name in enumerate(("cu_q_lengths", "cu_kv_lengths")):
                cu = self.of[name]
                entry[side] = np.searchsorted(cu, position[side], "right") - 1
                position[side] = position[side] - cu[np.minimum(entry[side], len(cu) - 1)]
            keep &= (entry[0][:, None, :, None] == entry[1][:, None, None, :]) & self.rows[:, None, :, None]
        if "q_offset" in self.of:
            position[0] = position[0] + np.take(self.of["q_offset"], np.minimum(entry[0], len(self.of["q_offset"]) - 1))
        if "causal" in self.of:
            keep &= position[0][:, None, :, None] >= position[1][:, None, None, :]
        b = (entry[0] % (batch // self.calls) if self.calls > 1 else entry[0]) + offsets[0]
        h = np.arange(q_heads)[:, None, None] + offsets[1]
        found = (b[:, None, :, None], h, position[0][:, None, :, None], position[1][:, None, None, :])
        return [jnp.asarray(np.broadcast_to(x, keep.shape), jnp.int32) for x in found], keep

    def with_captured(self, name: str, changed: Sequence[Any]) -> Callable[..., Any]:
        """The score function with other captured arrays, those that have gradients."""
        wide = trace.trace("score_mod", SCORES[name], "score", jnp.float64, again := trace.Captured())
        arrays = list(again.arrays)
        for i, x in zip(self.gradients, changed, strict=True):
            # A narrow gradient would be summed in its dtype.
            arrays[i] = x if arrays[i].dtype.itemsize == 2 else x.astype(arrays[i].dtype)
        call = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(wide.jaxpr, ()))
        return lambda *scalars: call(*arrays, *scalars)[0]

    def results(self, kernel_pass: str) -> list[str]:
        more = [f"dcaptured_{j}" for j in range(len(self.gradients))] if kernel_pass == "backward" else []
        return super().results(kernel_pass) + more

    def output(self, name: str) -> emulated.Guarded:
        if name.startswith("dcaptured_"):
            words = exact.SHAPE if self.exact else ()
            return emulated.Guarded((*self.right[name].shape, *words), np.float32)
        return super().output(name)

    def wrong(self, name: str, got: np.ndarray) -> tuple[float, str]:
        if name.startswith("dcaptured_") and self.exact:
            got = np.asarray(exact.floats(jnp.asarray(got.view(np.uint32))))
        return super().wrong(name, got)

    def text(self, kernel_pass: str) -> str:
        gradients = self.gradients if kernel_pass == "backward" else ()
        from_0 = "q_offset" not in self.of
        lengths = {"kv": self.k.shape[1], **({"q": self.q.shape[1]} if kernel_pass == "backward" and from_0 else {})}
        return cuda.source(self.functions, self.several, kernel_pass == "backward", gradients, from_0, lengths)


def over_pairs(f: Callable[..., Any], *args: Any) -> Any:
    for _ in range(4):
        f = jax.vmap(f)
    return f(*args)


def block_kinds(keep: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[B, N, blocks, blocks] of 0, 1 and 2."""
    batch, heads, *lengths = keep.shape
    blocks = [-(-n // m) for n, m in zip(lengths, size, strict=True)]
    kinds = np.zeros((batch, heads, *blocks), np.int8)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            part = keep[:, :, i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
            kinds[:, :, i, j] = np.where(part.all((2, 3)), 2, part.any((2, 3)))
    return kinds


needs_compiler = pytest.mark.skipif(emulated.COMPILER is None or sys.platform != "linux", reason="needs g++ on Linux")


GROUPS = {"q_heads": 4, "kv_heads": 2}
EMULATED: dict[str, dict[str, Any]] = {
    "mask": {"mask": "sequences"},
    "blocks": {"mask": "window", "blocks": (32, 64)},
    "odd-blocks": {"mask": "neighbourhood", "blocks": (48, 40), "head_dim": 128},
    "blocks-of-heads": {"mask": "heads", "blocks": (64, 128)},
    "no-rows": {"mask": "causal", "blocks": (32, 64), "q_length": 60},  # for the last keys
    "no-keys": {  # for the last rows
        **{"mask": "window", "blocks": (64, 32), "q_length": 300, "kv_length": 60, "head_dim": 128},
        "options": ["separate_dq"],
    },
    "no-rows-wide": {"mask": "causal", "blocks": (32, 64), "q_length": 60, "head_dim": 256},
    "score": {"score": "relative"},
    "heads-128": {"score": "alibi", "mask": "window", "blocks": (128, 128), "head_dim": 128, "q_length": 200},
    "derived": {"score": "softcap", "mask": "causal"},
    "dropped": {"score": "nan_above", "mask": "causal", "blocks": (128, 128)},
    "pairs-of-keys": {"score": "steps", "mask": "drafts"},
    "table": {"score": "graphormer", "options": ["causal", "separate_dq"]},
    "filled": {"score": "filled", "mask": "tree", "head_dim": 256},
    "relations": {"score": "relations", "mask": "causal"},
    "weights": {"score": "weights", "mask": "causal"},
    "diagonals": {"score": "sigmoid_distance", "mask": "causal"},
    "buckets": {"score": "buckets", "options": ["causal"], "head_dim": 128},
    "buckets-offset": {"score": "buckets", "mask": "causal", "options": ["q_offset"]},
    "buckets-wide": {"score": "buckets", "head_dim": 256},
    "diagonals-128": {"score": "sigmoid_distance", "mask": "window", "blocks": (64, 128), "head_dim": 128},
}


MORE: dict[str, dict[str, Any]] = {
    "capped": {"score": "capped", "mask": "causal"},
    "sides": {"score": "sides", "options": ["causal"]},
    "capped-wide": {
        "score": "capped",
        "options": ["softcap", "bias"],
        "head_dim": 256,
        "q_length": 70,
        "kv_length": 80,
    },
    "exact": {"score": "sides", "mask": "window", "exact": True, "options": ["separate_dq"]},
    "exact-table": {"score": "relative", "exact": True, "options": ["causal", "separate_dq"]},
    "bias": {"score": "softcap", "options": ["bias", "alibi"]},
    "bias-softcap": {"score": "exponents", "options": ["bias_of_keys", "alibi", "softcap"]},
    "shared-bias": {"score": "softcap", "options": ["shared_bias", "softcap", "separate_dq"]},
    "packed": {"score": "relative", "mask": "causal", "options": ["sequences"], "batch": 1},
    "offsets": {"score": "alibi", "mask": "sequences", "offsets": (1, 2), "batch": 1, "q_heads": 2, "kv_heads": 1},
    "calls": {"score": "alibi", "mask": "causal", "calls": 2},
    "q-offset": {"score": "relative", "mask": "global", "options": ["q_offset"]},
    "descale": {"score": "sides", "mask": "causal", "dtype": "float16", "options": ["descale"]},
    "float32": {
        **{"score": "capped", "mask": "causal", "dtype": "float16", "blocks": (32, 32)},
        "options": ["descale", "in_float32", "bias", "alibi", "separate_dq"],
    },
    "float32-exact": {
        **{"score": "sides", "dtype": "float16", "exact": True},
        "options": ["causal", "descale", "in_float32", "separate_dq"],
    },
}
"""Derivatives that depend on the score, sums without an order, and functions beside other options."""

QUICK = (("capped", "backward", "sm80"), ("bias", "backward", "sm80"), ("exact", "backward", "sm90a"))


def is_quick(name: str, kernel_pass: str, family: str) -> bool:
    """Whether a case is not marked slow: sm80's kernels take three times as long in the emulator as sm90a's."""
    if (name, kernel_pass, family) in QUICK:
        return True
    return name in EMULATED and name != "filled" and (family == "sm90a" or name in ("score", "blocks"))


@pytest.mark.by_turns(3)
@needs_compiler
@pytest.mark.parametrize(
    ("name", "kernel_pass", "family"),
    [
        pytest.param(*x, marks=() if is_quick(*x) else pytest.mark.slow)
        for x in itertools.product([*EMULATED, *MORE], ("forward", "backward"), ("sm90a", "sm80"))
    ],
)
def test_values(
    emulator: ctypes.CDLL, name: str, kernel_pass: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_FLASH_SPLIT_KV", "0")
    check_values(emulator, name, kernel_pass, family, 4 if name in EMULATED else 2)


@needs_compiler
@pytest.mark.parametrize("name", ["blocks", "score", "dropped"])
def test_split_kv(emulator: ctypes.CDLL, name: str) -> None:
    check_values(emulator, name, "forward", "sm80", 2, q_length=17, kv_length=300)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "kernel_pass", "family"),
    [
        pytest.param(*x, marks=() if x[2] == "sm90a" or x[0] == "mask" else pytest.mark.slow)
        for x in itertools.product(
            ("mask", "pairs-of-keys", "sides", "float32"), ("forward", "backward"), ("sm90a", "sm80")
        )
    ],
)
def test_nothing_is_read_beyond_captured_arrays(
    emulator: ctypes.CDLL, name: str, kernel_pass: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays have 333 elements, 13 more than there are rows and keys: they are read without a test of their ends by the
    kernels whose tiles end at 320, and one tile more would be read from the page behind, which ends the process."""
    monkeypatch.setenv("JAX_FLASH_SPLIT_KV", "0")
    check_values(emulator, name, kernel_pass, family, 1, q_length=320, kv_length=320, batch=1)


def check_values(emulator: ctypes.CDLL, name: str, kernel_pass: str, family: str, orders: int, **sizes: Any) -> None:
    case = {"score": None, "mask": None, "blocks": None, "q_length": 133, "kv_length": 190, "batch": 2, **GROUPS}
    problem = FunctionProblem(**case | (EMULATED | MORE)[name] | sizes)
    call = emulated.Call(emulator, problem, kernel_pass, family)
    emulator.call_functions(call.call, problem.text(kernel_pass).encode())
    found: dict[str, set[bytes]] = {}
    for order in range(orders):
        results = call.run(order)
        wrong = [problem.wrong(of, got)[1] for of, got in results.items()]
        assert not any(wrong), (order, wrong)
        for of, got in results.items():
            found.setdefault(of, set()).add(got.tobytes())
    if problem.exact and kernel_pass == "backward":
        assert all(len(bits) == 1 for of, bits in found.items()), "bits that depend on the order of threads"


TRIGONOMETRY = """
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#include <cmath>
#include <cstring>
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
#include "cuda/device/trigonometry.cuh"
extern "C" void evaluate(const float* x, int n, float* sines, float* cosines, float* tangents) {
  for (int i = 0; i < n; ++i) {
    sines[i] = jax_flash::sine(x[i]);
    cosines[i] = jax_flash::cosine(x[i]);
    tangents[i] = jax_flash::tangent(x[i]);
  }
}
"""


@needs_compiler
def test_trigonometry(tmp_path: pathlib.Path) -> None:
    """Of floats of all exponents, on the host."""
    (tmp_path / "cuda/device").mkdir(parents=True)
    (tmp_path / "cuda/device/arithmetic.cuh").write_text("#pragma once")
    source, library = tmp_path / "evaluate.cc", tmp_path / "evaluate.so"
    source.write_text(TRIGONOMETRY)
    assert emulated.COMPILER is not None
    includes = [f"-I{tmp_path}", f"-I{emulated.ROOT / 'csrc'}"]
    command = [emulated.COMPILER, "-O2", "-std=c++20", "-shared", "-fPIC", *includes, "-o", library, source]
    subprocess.run(command, check=True)

    random = np.random.default_rng(0)
    x = np.concatenate([
        random.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32),
        (random.standard_normal(1_000_000) * 10.0 ** random.uniform(-3, 6, 1_000_000)).astype(np.float32),
        np.arange(100_000, dtype=np.float32),
        np.float32([0, -0.0, 0.5, -0.5, np.finfo(np.float32).max, np.inf, -np.inf, np.nan]),
    ])  # fmt: skip
    got = [np.empty_like(x) for _ in range(3)]
    pointers = [ctypes.c_void_p(of.ctypes.data) for of in (x, *got)]
    ctypes.CDLL(str(library)).evaluate(pointers[0], len(x), *pointers[1:])
    with np.errstate(invalid="ignore"):
        sines, cosines = np.sin(x.astype(np.float64)), np.cos(x.astype(np.float64))
    np.testing.assert_allclose(got[0], sines, atol=1.5e-7, rtol=0)
    np.testing.assert_allclose(got[1], cosines, atol=1.5e-7, rtol=0)
    apart = np.abs(cosines) > 1e-3  # beside a pole the rounding of x decides
    np.testing.assert_allclose(got[2][apart], (sines / cosines)[apart], rtol=1e-6, atol=1.5e-7)
    np.testing.assert_array_equal(np.isfinite(got[2]), np.isfinite(x))


# By NVRTC


@pytest.mark.skipif(not registration.cuda_status()["nvrtc"], reason="no NVRTC here")
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(
            name, arch, marks=() if (name, arch) in (("graphormer", 80), ("softcap", 70)) else pytest.mark.slow
        )
        for name in ("graphormer", "softcap", "nan_above", "sides")
        for arch in (70, 75, 80, 90)
    ],
)
def test_kernels_compile(name: str, arch: int, tmp_path: Any) -> None:
    functions, captured = traced(score=name, mask="sequences", partial="neighbourhood", block_size=(128, 128))
    score = functions.score
    assert score is not None
    gradients = [i for i in floats(captured) if i in score.captured]
    forward = cuda.source(functions)
    backward = cuda.source(functions, derives=True, gradients=gradients)
    options = {"has_mask_blocks": True, "has_descale": arch < 80, "separate_dq": True}
    for text, passes in ((forward, ["forward", "forward_split_kv"]), (backward, ["backward", "backward_dq"])):
        _core.build_kernels(
            arch=arch, out_dir=str(tmp_path), dtypes=["float16"], head_dims=[(64, 64)],
            options=[{**options, "functions": text}], passes=passes,
        )  # fmt: skip
