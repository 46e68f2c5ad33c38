"""Every CPU instruction set that this processor has gives right results when it is forced."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

CHECK = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, oracle
import jax_flash
from jax_flash._native import _core

isa = _core.cpu_isa()
random = np.random.default_rng(0)
for q_length, kv_length, q_heads, kv_heads, head_dim, offset in (
    (67, 131, 4, 2, 59, 40), (1, 300, 8, 2, 64, 250), (130, 97, 2, 2, 136, -20), (3, 1, 1, 1, 1, 0)
):
    shapes = [(2, q_length, q_heads, head_dim), *[(2, kv_length, kv_heads, head_dim)] * 2]
    drawn = [random.standard_normal(shape) for shape in (*shapes, shapes[0])]

    @jax.jit
    def run(*inputs, dout, dlse):
        attend = lambda *x: jax_flash.attention(
            *x, causal=True, q_offset=offset, return_lse=True, implementation="cpu"
        )
        (out, lse), pullback = jax.vjp(attend, *inputs)
        return out, lse, *pullback((dout, dlse))

    for dtype in ("bfloat16",) if isa.endswith("_bf16") else ("float64", "float32", "bfloat16", "float16"):
        *inputs, dout = (x.astype(jnp.dtype(dtype)) for x in drawn)
        dlse = np.ones((2, q_heads, q_length), np.float64 if dtype == "float64" else np.float32)
        got = run(*inputs, dout=dout, dlse=dlse)
        right = oracle.attention(*inputs, dout, dlse, causal=True, q_offset=offset)
        for name, a in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
            a, b = np.asarray(a, np.float64), right[name]
            assert (np.isneginf(a) == np.isneginf(b)).all(), (isa, name, dtype)
            a, b = (np.where(np.isfinite(b), x, 0) for x in (a, b))
            error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
            assert error < 30 * float(jnp.finfo(dtype).eps), (isa, name, dtype, q_length, kv_length, head_dim, error)

# The gradient of slopes: distances magnify what delta = rowsum(dout * out) is off by, and out is rounded to 16 bits.
shapes = [(1, 300, 4, 40), *[(1, 330, 2, 40)] * 2]
drawn = [random.standard_normal(shape) for shape in (*shapes, shapes[0])]
slopes, sinks = np.float32([0.3, 0.05, 0.01, 0.002]), np.float32([0.5, -1, -np.inf, 2])
for dtype in ("bfloat16",) if isa.endswith("_bf16") else ("float64", "float32", "bfloat16", "float16"):
    *inputs, dout = (x.astype(jnp.dtype(dtype)) for x in drawn)
    wide = np.float64 if dtype == "float64" else np.float32
    dlse = random.standard_normal((1, 4, 300)).astype(wide)
    options = dict(causal=True, q_offset=30, sinks=sinks.astype(wide))
    attend = lambda slopes: jax_flash.attention(
        *inputs, alibi_slopes=slopes, return_lse=True, implementation="cpu", **options
    )
    (got,) = jax.jit(lambda slopes: jax.vjp(attend, slopes)[1]((dout, dlse)))(slopes.astype(wide))
    right = oracle.attention(*inputs, dout, dlse, alibi_slopes=slopes, **options)["dalibi_slopes"]
    error = np.abs(got - right).max() / np.abs(right).max()
    assert error < (1e-12 if dtype == "float64" else 2e-5), (isa, dtype, error, got, right)

# Score and mask functions with a block mask and the gradient of a captured array, in panels and in decoding.
from jax_flash.flex import create_block_mask
for t, s in ((150, 211), (3, 211)):
    shapes = [(2, t, 4, 40), *[(2, s, 2, 40)] * 2]
    drawn = [random.standard_normal(shape) for shape in (*shapes, shapes[0])]
    table, ids = random.standard_normal((4, t + s)).astype(np.float32), random.integers(0, 3, s).astype(np.int8)

    def attend(implementation, query, key, value, table):
        mask = lambda b, h, q, kv: (q + 90 >= kv) & (jnp.asarray(ids)[kv] != h % 3)
        score = lambda x, b, h, q, kv: 2 * jnp.tanh(x / 2) + table[h, q - kv + s] * jnp.exp(-jnp.abs(x))
        block_mask = create_block_mask(mask, None, 4, t, s, block_size=(32, 64))
        return jax_flash.attention(query, key, value, score_mod=score, block_mask=block_mask,
                                   return_lse=True, implementation=implementation)

    for dtype in ("bfloat16",) if isa.endswith("_bf16") else ("float32", "bfloat16", "float16"):
        *inputs, dout = (x.astype(jnp.dtype(dtype)) for x in drawn)
        dlse = random.standard_normal((2, 4, t)).astype(np.float32)
        results = []
        for implementation, cast in (("cpu", lambda x: x), ("reference", lambda x: x.astype(np.float64))):

            @jax.jit
            def gradients(args, cotangents, implementation=implementation):
                got, pullback = jax.vjp(lambda *xs: attend(implementation, *xs), *args)
                return *got, *pullback(cotangents)

            results.append(gradients((*map(cast, inputs), cast(table)), (cast(dout), cast(dlse))))
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dtable"), *results, strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b)
            assert (np.isneginf(a) == np.isneginf(b)).all(), (isa, name, dtype)
            a, b = (np.where(np.isfinite(b), x, 0) for x in (a, b))
            error = np.abs(a - b).max() / np.abs(b).max()
            assert error < 30 * float(jnp.finfo(dtype).eps), (isa, "functions", name, dtype, t, error)

# With one key the result is its value, also a float16 below 2^-14, of which no subnormal float may be made on the way:
# XLA's threads take these for 0.
value = jnp.asarray((np.arange(1, 1025) * 2.0**-24).astype(np.float16))[None, None, None]
key = jnp.zeros((1, 1, 1, 8), jnp.float16)
found = jax_flash.attention(key, key, value, implementation="cpu")
assert (np.asarray(found) == np.asarray(value)).all(), (isa, "subnormal float16")
print(isa)
"""


def run(isa: str, code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_FLASH_CPU_ISA": isa, "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parent,  # where it finds the oracle
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("isa", ["amx_bf16", "avx512_bf16", "avx512", "avx2", "neon", "baseline"])
def test_forced(isa: str) -> None:
    probe = run(isa, "from jax_flash._native import _core; print(_core.cpu_isa())")
    if probe.returncode and "must name an instruction set that this processor has" in probe.stderr:
        pytest.skip(f"this processor does not have {isa}")
    assert probe.stdout.strip() == isa, probe.stderr
    done = run(isa, CHECK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == isa


def test_unknown_is_refused() -> None:
    done = run("mmx", "from jax_flash._native import _core; print(_core.cpu_isa())")
    assert done.returncode != 0
    assert "JAX_FLASH_CPU_ISA must name an instruction set that this processor has (" in done.stderr
    assert "got mmx" in done.stderr
    call = run("mmx", "import jax_flash, jax.numpy as jnp; q = jnp.ones((1, 2, 1, 8)); jax_flash.attention(q, q, q)")
    assert call.returncode != 0
    assert "got mmx" in call.stderr


def test_a_build_for_this_machine_has_its_best_sets(tmp_path: pathlib.Path) -> None:
    """JAX_FLASH_CPU_ISAS=native asks this program, which ./run train builds by."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    source = pathlib.Path(__file__).parents[1] / "csrc/cpu/native.cc"
    subprocess.run([compiler, "-std=c++20", str(source), "-o", str(tmp_path / "native")], check=True, timeout=120)
    found = subprocess.run([tmp_path / "native"], check=True, capture_output=True, text=True).stdout.split(";")
    probe = run("", "from jax_flash._native import _core; print(_core.cpu_isa())")
    assert len(found) == 2
    # The system may refuse tiles to a process, which the program does not ask for.
    assert probe.stdout.strip() == found[0] or found[0] == "amx_bf16"
    assert not found[1].endswith("_bf16")
