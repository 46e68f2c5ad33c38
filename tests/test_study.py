"""The algorithms that are there to be read: their results and gradients against the oracle, and what they keep.

The kernels run in the emulator where there is no GPU.
"""

import ctypes
import pathlib
from collections.abc import Sequence
from typing import Any

import cases
import emulated
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads

from jax_flash import study
from jax_flash._native import _core, origins, registration
from jax_flash.study import kernels, loops

SHAPES = {  # B, T, S, N, K, H, V
    "square": (2, 130, 130, 2, 2, 16, 16),
    "grouped": (1, 70, 200, 4, 2, 24, 8),
    "more-rows": (1, 200, 65, 2, 1, 8, 16),
    "one": (1, 1, 1, 1, 1, 8, 8),
    "one-row": (2, 1, 129, 2, 2, 16, 16),
}


def arrays(name: str, dtype: Any) -> list[np.ndarray]:
    """query, key, value and dout."""
    batch, rows, keys, heads, kv_heads, head_dim, value_head_dim = SHAPES[name]
    rng = np.random.default_rng(0)
    of_keys = (batch, keys, kv_heads)
    shapes = (batch, rows, heads, head_dim), (*of_keys, head_dim), (*of_keys, value_head_dim)
    return [rng.standard_normal(x).astype(dtype) for x in (*shapes, (batch, rows, heads, value_head_dim))]


def check_values(algorithm: study.Algorithm, shape: str, causal: bool, dtype: str, tolerance: float) -> None:
    *inputs, dout = arrays(shape, dtype)

    @jax.jit
    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *x: algorithm(*x, causal=causal), *inputs)
        return out, *pullback(dout)

    found = dict(zip(("out", "dq", "dk", "dv"), run(*map(jnp.asarray, inputs)), strict=True))
    wide = [x.astype(np.float64) for x in (*inputs, dout)]
    want = oracle.attention(*wide, np.zeros((len(dout), dout.shape[2], dout.shape[1])), causal=causal)
    for name, got in found.items():
        assert got.dtype == dtype, name
        error = np.abs(np.asarray(got, np.float64) - want[name]).max() / max(1.0, np.abs(want[name]).max())
        assert error < tolerance, (name, error)


TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", study.LOOPS)
def test_values_of_loops(algorithm: str, shape: str, causal: bool) -> None:
    check_values(study.LOOPS[algorithm], shape, causal, "float32", TOLERANCES["float32"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", study.LOOPS)
def test_dtypes_of_loops(algorithm: str, dtype: str) -> None:
    check_values(study.LOOPS[algorithm], "grouped", True, dtype, TOLERANCES[dtype])


@pytest.fixture
def in_emulator(emulator: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Study kernels run there, in an order that depends on how many have run before."""
    seeds = iter(range(10**6))

    def launch(
        p: kernels.Problem, file: str, entry: str, blocks: int, arrays: Sequence[jax.Array], results: Any,
        aliases: dict[int, int] | None = None,
    ) -> Any:  # fmt: skip
        attributes = {**p._asdict(), "file": file, "entry": entry, "blocks": blocks, "constants": p.constants}
        attributes["scale"] = p.head_dim**-0.5

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            read = [np.array(x, order="C") for x in arrays]
            made = [emulated.Guarded(x.shape, x.dtype) for x in results]
            for argument, result in (aliases or {}).items():
                made[result].array[...] = read[argument]
            emulated.study(emulator, read, made, attributes, next(seeds))
            return [x.check(f"{file}, {entry}") for x in made]

        return jax.pure_callback(run, list(results), *arrays)

    monkeypatch.setattr(kernels.Problem, "launch", launch)


EMULATED = {
    "square": (1, 40, 40, 1, 1, 16, 16), "grouped": (1, 35, 70, 4, 2, 24, 8), "more-rows": (2, 70, 33, 1, 1, 8, 80),
    "one": SHAPES["one"],
}  # fmt: skip
SHAPES |= {f"small-{name}": shape for name, shape in EMULATED.items()}


@pytest.mark.by_turns(2)
@pytest.mark.usefixtures("in_emulator")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", EMULATED)
@pytest.mark.parametrize("algorithm", study.KERNELS)
def test_values_of_kernels(algorithm: str, shape: str, causal: bool) -> None:
    check_values(study.KERNELS[algorithm], f"small-{shape}", causal, "float32", TOLERANCES["float32"])


@pytest.mark.usefixtures("in_emulator")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", study.KERNELS)
def test_dtypes_of_kernels(algorithm: str, dtype: str) -> None:
    check_values(study.KERNELS[algorithm], "small-square", True, dtype, TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", study.KERNELS)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.implementation == "cuda"))
def test_values_on_a_gpu(target: cases.Target, algorithm: str, shape: str, causal: bool) -> None:
    with jax.default_device(target.device):
        for dtype, tolerance in TOLERANCES.items():
            check_values(study.KERNELS[algorithm], shape, causal, dtype, tolerance)


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dims"),
    [(70, "float32", (64, 64)), (75, "float16", (128, 24)), (80, "bfloat16", (40, 80)), (90, "float16", (128, 128))],
)
def test_kernels_compile(arch: int, dtype: str, head_dims: tuple[int, int]) -> None:
    """In the shared memory of every GPU: Turing's blocks have 64 KB."""
    if not origins.nvrtc_for(arch, registration.cuda_status()["nvrtc"]):
        pytest.skip(f"no NVRTC here compiles for compute capability {arch}")
    for file in study.KERNELS:
        p = kernels.Problem(True, dtype, 1, 1, 1, 1, 1, *head_dims)
        found = _core.study_shared_bytes(arch=arch, file=file, entry="forward", constants=p.constants)
        assert 1024 <= found <= 64 * 1024, file


def test_kernels_are_short() -> None:
    """No file has more than 150 lines."""
    files = sorted((pathlib.Path(__file__).parent.parent / "csrc/cuda/study").iterdir())
    assert {x.stem for x in files} > set(study.KERNELS)
    assert all(len(x.read_text(encoding="utf-8").splitlines()) <= 150 for x in files)


@pytest.mark.parametrize("algorithm", study.LOOPS)
def test_gradients(algorithm: str) -> None:
    query, key, value, _ = arrays("grouped", "float64")
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x[:, :70]) for x in (query, key, value)]
        check_grads(lambda *x: study.LOOPS[algorithm](*x, causal=True), inputs, order=1, modes=["rev"])


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash2_atomic"])
def test_no_array_grows_with_the_product_of_the_lengths(algorithm: str) -> None:
    """Which plain attention has, the weights."""

    def largest(name: str, length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        gradients = jax.jit(jax.grad(lambda *x: study.LOOPS[name](*x).sum(), (0, 1, 2)))
        analysis = gradients.lower(x, x, x).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    assert largest(algorithm, 2048) < 3 * largest(algorithm, 1024)
    assert largest("plain", 2048) > 3 * largest("plain", 1024)


@pytest.mark.parametrize("algorithm", study.LOOPS)
def test_large_scores(algorithm: str) -> None:
    """Scores are beyond what exp can represent."""
    query, key, value, dout = arrays("square", "float32")
    out, pullback = jax.vjp(lambda *x: study.LOOPS[algorithm](*x, causal=True), 100 * query, key, value)
    assert all(np.isfinite(x).all() for x in (out, *pullback(jnp.asarray(dout))))
    np.testing.assert_allclose(out[:, 0], value[:, 0], rtol=1e-6)  # the only key of the first row


def test_a_name_for_each() -> None:
    assert study.LOOPS.keys() == study.KERNELS.keys()
    for module, functions in ((loops, study.LOOPS), (kernels, study.KERNELS)):
        for name, function in functions.items():
            assert getattr(module, name) is function
            assert function.__name__ == name
            assert function.__doc__


def test_errors() -> None:
    query, key, value, _ = (jnp.asarray(x) for x in arrays("grouped", "float32"))
    with pytest.raises(TypeError, match="query must have one of the dtypes float16, bfloat16, float32, got float64"):
        study.KERNELS["flash1"](*(np.zeros((1, 2, 1, 8)) for _ in range(3)))
    with pytest.raises(ValueError, match="value must have a head_dim of at most 128, got 136"):
        study.KERNELS["flash2"](query, key, jnp.zeros((*value.shape[:3], 136), jnp.float32))
    with pytest.raises(ValueError, match="must not be empty"):
        study.LOOPS["flash2"](query[:, :0], key, value)
    with pytest.raises(ValueError, match="must have rank 4"):
        study.LOOPS["flash1"](query[0], key[0], value[0])
    with pytest.raises(TypeError, match="key must have the dtype of query"):
        study.LOOPS["flash1"](query, key.astype("float16"), value)
    with pytest.raises(TypeError, match="causal must be a bool that is known when the call is traced, got 1"):
        study.LOOPS["plain"](query, key, value, causal=1)  # type: ignore[arg-type]  # wrong on purpose
