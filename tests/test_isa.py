"""Every CPU instruction set that this processor has gives right results when it is forced."""

import os
import subprocess
import sys

import pytest

CHECK = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np
import jax_flash
from jax_flash import _core

isa = _core.cpu_isa()
keys = jax.random.split(jax.random.key(0), 4)
for q_length, kv_length, q_heads, kv_heads, head_dim, offset in (
    (67, 131, 4, 2, 59, 40), (1, 300, 8, 2, 64, 250), (130, 97, 2, 2, 136, -20), (3, 1, 1, 1, 1, 0)
):
    shapes = [(2, q_length, q_heads, head_dim), *[(2, kv_length, kv_heads, head_dim)] * 2]
    weights = jax.random.normal(keys[3], shapes[0], jnp.float32)

    def loss(implementation, *arrays):
        out, lse = jax_flash.attention(
            *arrays, causal=True, q_offset=offset, return_lse=True, implementation=implementation
        )
        return (out * weights).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    grad = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    for dtype in ("bfloat16",) if isa.endswith("_bf16") else ("float64", "float32", "bfloat16", "float16"):
        arrays = [jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in zip(keys, shapes)]
        got = grad("cpu", *arrays)
        want = grad("reference", *(x.astype("float64") for x in arrays))
        for name, a, b in zip("qkv", got, want):
            a, b = np.asarray(a, np.float64), np.asarray(b)
            error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
            assert error < 30 * float(jnp.finfo(dtype).eps), (isa, name, dtype, q_length, kv_length, head_dim, error)
print(isa)
"""


def run(isa: str, code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_FLASH_CPU_ISA": isa, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("isa", ["amx_bf16", "avx512_bf16", "avx512", "avx2", "neon", "baseline"])
def test_forced(isa: str) -> None:
    probe = run(isa, "from jax_flash import _core; print(_core.cpu_isa())")
    if probe.returncode and "must name an instruction set that this processor has" in probe.stderr:
        pytest.skip(f"this processor does not have {isa}")
    assert probe.stdout.strip() == isa, probe.stderr
    done = run(isa, CHECK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == isa


def test_unknown_is_refused() -> None:
    done = run("mmx", "from jax_flash import _core; print(_core.cpu_isa())")
    assert done.returncode != 0
    assert "JAX_FLASH_CPU_ISA must name an instruction set that this processor has (" in done.stderr
    assert "got mmx" in done.stderr
    call = run("mmx", "import jax_flash, jax.numpy as jnp; q = jnp.ones((1, 2, 1, 8)); jax_flash.attention(q, q, q)")
    assert call.returncode != 0
    assert "got mmx" in call.stderr
