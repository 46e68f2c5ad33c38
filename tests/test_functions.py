"""Score and mask functions: their programs against JAX, and CUDA's kernels with them in the emulator and by NVRTC."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import emulated
import gallery
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash._functions import cuda, program, trace
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
        valid = True if load.valid is None else got[load.valid]
        np.add.at(ours[load.captured], index, np.where(valid, values, 0))
    for i in floats(captured):

        def total(x: jax.Array, i: int = i) -> jax.Array:
            arrays = [*captured[:i], x, *captured[i + 1 :]]
            return jax.vmap(lambda *scalars: call(*arrays, *scalars)[0])(*args).sum()

        want = jax.grad(total)(captured[i])
        eps = float(jnp.finfo(captured[i].dtype).eps)
        np.testing.assert_allclose(ours[i], np.asarray(want, np.float64), rtol=30 * eps, atol=100 * eps)


def test_equal_operations_are_one_and_constants_are_folded() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // 4 == kv // 4) & (q // 4 + 0 == kv // 4 * 1) & (kv >= 0) & (jnp.int32(3) > 2)

    function = trace.trace("mask_mod", mask, "mask", jnp.float32, trace.Captured())
    of = program.mask_program(function, True)
    assert [op.name for op in of.ops] == ["input", "input", "constant", "div", "div", "eq"]
    assert of.inputs(0) == {"q", "kv"}


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


# In the emulator


class FunctionProblem(emulated.Problem):
    """A problem with functions, and its results in float64."""

    def __init__(self, score: str | None, mask: str | None, blocks: tuple[int, int] | None, **sizes: Any) -> None:
        options = list(sizes.pop("options", ()))
        super().__init__(options=options, **sizes)
        functions, captured = traced(score, None if blocks else mask, mask if blocks else None, blocks or (1, 1))
        self.functions, self.captured = functions, captured
        self.numbers |= {"captured": len(captured), "mask_block_rows": functions.block_size[0]}
        self.numbers |= {"mask_block_keys": functions.block_size[1]}
        batch, q_length, q_heads, _ = self.q.shape
        kv_length, kv_heads = self.k.shape[1:3]
        group = q_heads // kv_heads
        indices = [np.arange(n, dtype=np.int32) for n in (batch, q_heads, q_length, kv_length)]
        b, h, q, kv = jnp.meshgrid(*map(jnp.asarray, indices), indexing="ij")

        def over(f: Callable[..., Any], *args: Any) -> Any:
            for _ in range(4):
                f = jax.vmap(f)
            return f(*args)

        keep = jnp.ones(b.shape, bool) if mask is None else over(MASKS[mask], b, h, q, kv)
        if "causal" in options:
            keep &= q >= kv
        keep = np.asarray(keep)
        if blocks:
            kinds = block_kinds(keep, blocks)
            self.arrays["mask_blocks"] = kinds[:, None]
        for i, x in enumerate(captured):
            self.arrays[f"captured_{i}"] = np.ascontiguousarray(x)
        self.gradients = floats(captured) if score else []
        if score:
            self.gradients = [i for i in self.gradients if i in functions.score.captured]  # type: ignore[union-attr]

        true = [jnp.asarray(np.nan_to_num(x.astype(np.float64))) for x in (self.q, self.k, self.v)]
        if "descale" in self.arrays:
            raise NotImplementedError

        def attention(query: Any, key: Any, value: Any, changed: Any) -> Any:
            key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
            products = jnp.einsum("btnh,bsnh->bnts", query, key) * self.numbers.get("scale", query.shape[-1] ** -0.5)
            if score is not None:
                of = functions.score
                assert of is not None
                safe = jnp.where(keep, products, 0.0)

                def one(kept: Any, s: Any, *scalars: Any) -> Any:
                    # The indices of dropped pairs may give NaN, whose derivative would be NaN as well.
                    scalars = tuple(jnp.where(kept, x, 0) for x in scalars)
                    return gallery_with(changed, score)(s, *scalars)

                products = over(one, jnp.asarray(keep), safe, b, h, q, kv)
            products = jnp.where(keep, products, -jnp.inf)
            alive = (products > -jnp.inf).any(-1)
            lse = jax.nn.logsumexp(jnp.where(alive[..., None], products, 0.0), axis=-1)
            weights = jnp.where(alive[..., None], jnp.exp(products - lse[..., None]), 0.0)
            return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.where(alive, lse, -jnp.inf)

        def gallery_with(changed: Any, name: str) -> Callable[..., Any]:
            """The function with other captured arrays."""
            if not changed:
                return SCORES[name]
            wide = trace.trace("score_mod", SCORES[name], "score", jnp.float64, again := trace.Captured())
            arrays = list(again.arrays)
            for i, x in zip(self.gradients, changed, strict=True):
                # A bfloat16 gradient would be summed in bfloat16.
                arrays[i] = x if arrays[i].dtype == jnp.bfloat16 else x.astype(arrays[i].dtype)
            call = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(wide.jaxpr, ()))
            return lambda *scalars: call(*arrays, *scalars)[0]

        changed = [captured[i].astype(jnp.float64) for i in self.gradients]
        (out, lse), pullback = jax.vjp(attention, *true, changed)
        dlse = np.random.default_rng(5).standard_normal(lse.shape)
        alive = np.isfinite(np.asarray(lse))
        dq, dk, dv, dcaptured = pullback((jnp.asarray(self.dout.astype(np.float64)), jnp.where(alive, dlse, 0.0)))
        right = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        self.right = {name: np.asarray(x) for name, x in right.items()}
        self.right |= {f"dcaptured_{j}": np.asarray(x) for j, x in enumerate(dcaptured)}
        delta = np.moveaxis((self.dout.astype(np.float64) * self.right["out"]).sum(-1), 1, 2) - np.where(alive, dlse, 0)
        self.delta, self.lse = (np.ascontiguousarray(x, np.float32) for x in (delta, self.right["lse"]))

    def results(self, kernel_pass: str) -> list[str]:
        more = [f"dcaptured_{j}" for j in range(len(self.gradients))] if kernel_pass == "backward" else []
        return super().results(kernel_pass) + more

    def output(self, name: str) -> emulated.Guarded:
        if name.startswith("dcaptured_"):
            return emulated.Guarded(self.right[name].shape, np.float32)
        return super().output(name)

    def text(self, kernel_pass: str) -> str:
        gradients = self.gradients if kernel_pass == "backward" else ()
        return cuda.source(self.functions, derives=kernel_pass == "backward", gradients=gradients)


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


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated.build(tmp_path_factory.mktemp("emulator"))


GROUPS = {"q_heads": 4, "kv_heads": 2}
EMULATED: dict[str, dict[str, Any]] = {
    "mask": {"mask": "sequences"},
    "blocks": {"mask": "window", "blocks": (32, 64)},
    "odd-blocks": {"mask": "neighbourhood", "blocks": (48, 40), "head_dim": 128},
    "blocks-of-heads": {"mask": "heads", "blocks": (64, 128)},
    "score": {"score": "relative"},
    "derived": {"score": "softcap", "mask": "causal"},
    "dropped": {"score": "nan_above", "mask": "causal", "blocks": (64, 64)},
    "table": {"score": "graphormer", "options": ["causal", "separate_dq"]},
    "filled": {"score": "filled", "mask": "tree", "head_dim": 256},
}


@needs_compiler
@pytest.mark.parametrize("family", ["sm90a", "sm80"])
@pytest.mark.parametrize("kernel_pass", ["forward", "backward"])
@pytest.mark.parametrize("name", EMULATED)
def test_values(
    emulator: ctypes.CDLL, name: str, kernel_pass: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_FLASH_SPLIT_KV", "0")
    check_values(emulator, name, kernel_pass, family, 4)


@needs_compiler
@pytest.mark.parametrize("name", ["blocks", "score", "dropped"])
def test_split_kv(emulator: ctypes.CDLL, name: str) -> None:
    check_values(emulator, name, "forward", "sm80", 2, q_length=17, kv_length=300)


def check_values(emulator: ctypes.CDLL, name: str, kernel_pass: str, family: str, orders: int, **sizes: Any) -> None:
    case = {"score": None, "mask": None, "blocks": None, "q_length": 133, "kv_length": 190, "batch": 2, **GROUPS}
    problem = FunctionProblem(**case | EMULATED[name] | sizes)
    call = emulated.Call(emulator, problem, kernel_pass, family)
    emulator.call_functions(call.call, problem.text(kernel_pass).encode())
    for order in range(orders):
        wrong = [problem.wrong(of, got)[1] for of, got in call.run(order).items()]
        assert not any(wrong), (order, wrong)


# By NVRTC


@pytest.mark.skipif(not registration.cuda_status()["nvrtc"], reason="no NVRTC here")
@pytest.mark.parametrize("arch", [70, 75, 80, 90])
@pytest.mark.parametrize("name", ["softcap", "graphormer", "nan_above"])
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
