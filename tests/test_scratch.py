"""The size of scratch is fixed when a call is lowered: by dtype, shape and options, for one batch size or all, for any
machine. How handlers on GPUs use it is tested in test_cuda_host.py.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import attention
from jax_flash._native import _core

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "separate_dq": {"separate_dq": True},
    "separate_dq-causal": {"separate_dq": True, "causal": True},
    "slopes": {"has_alibi_slopes": True, "has_dalibi_slopes": True},
    "separate_dq-slopes": {"separate_dq": True, "has_alibi_slopes": True, "has_dalibi_slopes": True},
    "bias": {"has_bias": True, "has_dbias": True},
    "sequences": {"sequences": 5, "has_cu_q_lengths": True, "has_cu_kv_lengths": True, "has_dalibi_slopes": True},
    "window": {"window_left": 100, "window_right": 0},
    "segments": {"has_q_segment_ids": True, "has_kv_segment_ids": True},
    "limbs": {"has_descale": True, "highest_precision": True},
}
LENGTHS = (1, 5, 63, 64, 65, 200, 480, 512, 1024, 1500, 4096, 33333)
HEADS = ((1, 1), (2, 1), (8, 8), (8, 1), (32, 8), (32, 1), (12, 4), (133, 133))
BATCHES = (*range(1, 34), 63, 64, 65, 100, 131, 132, 133, 263, 264, 265, 500, 1023, 1024, 1025, 1026, 3000, 100_000)


def calls() -> Iterator[dict[str, Any]]:
    """Random shapes for every platform, pass and set of options."""
    drawer = random.Random(7)
    platforms = (("cpu", ("float32", "bfloat16", "float64")), ("cuda", ("bfloat16", "float16")))
    for (platform, dtypes), pass_, name in itertools.product(platforms, ("forward", "backward"), OPTIONS):
        for dtype in dtypes:
            for _ in range(6):
                q_heads, kv_heads = drawer.choice(HEADS)
                q_length, kv_length = drawer.choice(LENGTHS), drawer.choice(LENGTHS)
                batch, heads = drawer.choice(((1, 1), (2, 1), (1, q_heads), (2, q_heads)))
                rows, columns = drawer.choice(((q_length, kv_length), (1, kv_length), (q_length, 1)))
                yield {
                    "pass_": pass_, "platform": platform, "dtype": dtype, "options": OPTIONS[name],
                    "q_length": q_length, "kv_length": kv_length, "q_heads": q_heads, "kv_heads": kv_heads,
                    "head_dim": drawer.choice((16, 40, 64, 128, 256)),
                    "value_head_dim": drawer.choice((16, 64, 72, 128, 256)),
                    "shapes": {"bias": (batch, heads, rows, columns)} if name == "bias" else {},
                }  # fmt: skip


CALLS = list(calls())


def test_a_bound_for_every_batch_size() -> None:
    for call in CALLS:
        each, more = _core.scratch_of_any_batch(**call)
        wanted = {batch: _core.scratch(batch=batch, **call) for batch in BATCHES}
        too_much = {batch: (x, each, more) for batch, x in wanted.items() if x > each * batch + more}
        assert not too_much, call
        # No more than it must be: it grows as scratch does, and some batch size takes all of it.
        assert each * 100_000 + more <= wanted[100_000] + more
        assert each >= 0
        assert more >= 0


def test_bounds_are_near() -> None:
    call = next(x for x in CALLS if (x["platform"], x["pass_"], x["options"]) == ("cuda", "backward", {}))
    assert _core.scratch_of_any_batch(**call) == (_core.scratch(batch=1, **call), 0), "an accumulator for each entry"
    call = {**call, "pass_": "forward", "q_length": 1, "kv_length": 32768, "q_heads": 32, "kv_heads": 8}
    each, more = _core.scratch_of_any_batch(**call)
    # Keys of many entries are not split, so that those of few need no more than there are multiprocessors.
    assert each == 0
    assert more == max(_core.scratch(batch=batch, **call) for batch in range(1, 133)) > 0
    assert _core.scratch_of_any_batch(**{**call, "kv_length": 512}) == (0, 0)
    assert _core.scratch_of_any_batch(**{**call, "platform": "cpu"}) == (0, 0)


def test_sequences_without_number() -> None:
    """Of 64 rows each they are more rows than an int counts."""
    sizes = {"batch": 1, "q_length": 4096, "kv_length": 4096, "q_heads": 32, "kv_heads": 1}
    for sequences in (1 << 25, 1 << 26, (1 << 31) - 1):
        options = {"sequences": sequences, "has_cu_q_lengths": True, "has_cu_kv_lengths": True}
        assert _core.group_splits(**sizes, head_dim=64, value_head_dim=64, options=options) == 1


@pytest.mark.slow
def test_the_machine_does_not_matter() -> None:
    """What is lowered on one instruction set runs on another, which copies rows of bfloat16 in its own way."""
    wanted = [_core.scratch(batch=3, **call) for call in CALLS]
    code = "import json, test_scratch as t; print(json.dumps([t._core.scratch(batch=3, **call) for call in t.CALLS]))"
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    looked_at = 0
    for isa in ("amx_bf16", "avx512_bf16", "avx512", "avx2", "neon", "baseline"):
        environment = {**os.environ, "JAX_FLASH_CPU_ISA": isa, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode and "must name an instruction set that this processor has" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == wanted, isa
        looked_at += 1
    assert looked_at


def gradients(dtype: Any, **options: Any) -> list[np.ndarray]:
    jax.clear_caches()  # the scratch is part of no cache's key
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 70, 4, 24), (2, 600, 2, 24), (2, 600, 2, 40), (2, 70, 4, 40)]
    *inputs, dout = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    out, pullback = jax.vjp(lambda *x: attention(*x, implementation="cpu", **options), *inputs)
    return [np.asarray(x, np.float64) for x in (out, *pullback(dout))]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_more_scratch_than_wanted_on_cpus(dtype: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As what is lowered for any batch size has it. The forward, which wants none, takes some too."""
    want = gradients(dtype, **options)
    scratch, asked = _core.scratch, []

    def more(**call: Any) -> int:
        asked.append(call["pass_"])
        return int(scratch(**call)) + 1000

    monkeypatch.setattr(_core, "scratch", more)
    for got, right in zip(gradients(dtype, **options), want, strict=True):
        np.testing.assert_array_equal(got, right)
    assert {"forward", "backward"} <= set(asked)


def test_less_scratch_than_wanted_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = _core.scratch
    monkeypatch.setattr(_core, "scratch", lambda **call: max(0, scratch(**call) - 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scratch must have at least \d+ elements, got \d+"):
        gradients(jnp.float32)
