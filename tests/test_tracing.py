"""The traced programs: one trace, our custom calls, programs that can be exported, residuals that remat keeps."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Target

import jax_flash
from jax_flash import EXPORT_SAFE_TARGETS, flex
from jax_flash._implementations import choice

FORWARD, BACKWARD = "jax_flash_forward", "jax_flash_backward"
CASE = Case("tracing", 9, 12, q_heads=4, kv_heads=2, head_dim=8, causal=True, q_offset=(3, -2))


def calls(text: str, name: str) -> int:
    """Custom calls of ``name`` in StableHLO or HLO text."""
    return len(re.findall(rf'custom_call @{name}\b|custom_call_target="{name}"', text))


def loss(attend: Any, query: Any, key: Any, value: Any) -> jax.Array:
    out, lse = attend(query, key, value)
    return jnp.square(out).sum().astype(lse.dtype) + jnp.where(lse > -jnp.inf, lse, 0).sum()


@pytest.mark.parametrize("target", cases.targets())
def test_jit_traces_once(target: Target) -> None:
    problem = cases.problem(CASE, target.dtypes[0])
    traces = 0

    @jax.jit
    def run(query: Any, key: Any, value: Any, offset: Any) -> Any:
        nonlocal traces
        traces += 1
        return cases.call(target, problem, q_offset=offset)(query, key, value)

    for offset in (0, 3, -7):
        for _ in range(2):
            run(*problem.inputs, np.full(2, offset, np.int32))
    assert traces == 1
    run(problem.query[:, :5], *problem.inputs[1:], np.zeros(2, np.int32))
    assert traces == 2, "another length is another program: the count works"


def test_eager_calls_compile_once(caplog: pytest.LogCaptureFixture) -> None:
    """Outside of jit, equal calls share a compiled program."""
    problem = cases.problem(CASE, "float32")
    inputs = [jnp.asarray(x) for x in problem.inputs]
    attend = functools.partial(jax_flash.attention, causal=True, scale=0.123, implementation="cpu")
    attend(*inputs)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        attend(*inputs)
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
        functools.partial(attend, scale=0.1234)(*inputs)
        assert [record for record in caplog.records if "Compiling" in record.getMessage()], "the log works"


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_without_jit(target: Target) -> None:
    problem = cases.problem(CASE, target.dtypes[0])
    with jax.disable_jit():
        results, pullback = jax.vjp(cases.call(target, problem), *map(jnp.asarray, problem.inputs))
        gradients = pullback((problem.dout, problem.dlse))
    names = ("out", "lse", "dq", "dk", "dv")
    problem.check(target.platform, dict(zip(names, map(np.asarray, (*results, *gradients)), strict=True)))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lowered_module_holds_our_calls(platform: str, dtype: str) -> None:
    """Without a GPU too: the lowering for CUDA needs none."""
    problem = cases.problem(CASE, dtype)
    attend = functools.partial(jax_flash.attention, causal=True, q_offset=problem.q_offset, return_lse=True)
    forward = jax.jit(attend).trace(*problem.inputs).lower(lowering_platforms=(platform,)).as_text()
    assert (calls(forward, FORWARD), calls(forward, BACKWARD)) == (1, 0)
    gradient = jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2))).trace(*problem.inputs)
    text = gradient.lower(lowering_platforms=(platform,)).as_text()
    assert (calls(text, FORWARD), calls(text, BACKWARD)) == (1, 1)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_plain_jax_holds_none(implementation: str) -> None:
    problem = cases.problem(CASE, "float32")
    attend = functools.partial(jax_flash.attention, return_lse=True, implementation=implementation)
    text = jax.jit(jax.grad(functools.partial(loss, attend))).lower(*problem.inputs).as_text()
    assert "jax_flash" not in re.sub(r"loc\(.*\)", "", text)


def test_what_cuda_does_not_serve_is_plain_jax_there() -> None:
    """float64 on CUDA: the chunked implementation, in the same program that has the kernel on CPUs."""
    problem = cases.problem(CASE, "float64")
    attend = functools.partial(jax_flash.attention, causal=True, return_lse=True)
    gradient = jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2))).trace(*problem.inputs)
    text = gradient.lower(lowering_platforms=("cuda",)).as_text()
    assert (calls(text, FORWARD), calls(text, BACKWARD)) == (0, 0)
    text = gradient.lower(lowering_platforms=("cpu",)).as_text()
    assert (calls(text, FORWARD), calls(text, BACKWARD)) == (1, 1)


@pytest.mark.parametrize("head_dim", [1, 59, 64, 250])
def test_head_dims_are_padded_to_eight_on_cuda(head_dim: int) -> None:
    shape = jax.ShapeDtypeStruct((1, 4, 2, head_dim), "bfloat16")
    attend = functools.partial(jax_flash.attention, return_lse=True)
    gradient = jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2))).trace(shape, shape, shape)
    text = gradient.lower(lowering_platforms=("cuda",)).as_text()
    for name in (FORWARD, BACKWARD):
        (line,) = [line for line in text.splitlines() if f"@{name}" in line]
        widths = {int(width) for width in re.findall(r"tensor<1x4x2x(\d+)xbf16>", line)}
        assert widths == {-(-head_dim // 8) * 8}


def test_export_needs_its_targets() -> None:
    problem = cases.problem(CASE, "float32")
    with pytest.raises(ValueError, match=FORWARD):
        jax.export.export(jax.jit(jax_flash.attention), platforms=("cpu",))(*problem.inputs)


def test_export_round_trip() -> None:
    """Serialised, read back and called: the same bits; and so is its gradient."""
    problem = cases.problem(CASE, "float32")
    attend = jax.jit(cases.call(cases.CPU, problem))
    exported = jax.export.export(attend, platforms=("cpu",), disabled_checks=EXPORT_SAFE_TARGETS)(*problem.inputs)
    restored = jax.export.deserialize(exported.serialize(vjp_order=1))
    got = cases.differentiate(restored.call, problem)
    problem.check("cpu", got)
    for name, want in cases.differentiate(attend, problem).items():
        np.testing.assert_array_equal(got[name], want)


def test_export_for_several_platforms() -> None:
    """One module for CPUs and GPUs; a CPU runs its own part of it."""
    problem = cases.problem(CASE, "bfloat16")
    attend = jax.jit(functools.partial(jax_flash.attention, return_lse=True, **problem.options))
    exported = jax.export.export(attend, platforms=("cpu", "cuda"), disabled_checks=EXPORT_SAFE_TARGETS)
    exported = exported(*problem.inputs)
    assert exported.platforms == ("cpu", "cuda")
    assert calls(exported.mlir_module(), FORWARD) == 2
    restored = jax.export.deserialize(exported.serialize(vjp_order=1))
    problem.check("cpu", cases.differentiate(restored.call, problem))


def symbolic(problem: cases.Problem) -> list[jax.ShapeDtypeStruct]:
    """The inputs with a symbolic first dimension."""
    (size,) = jax.export.symbolic_shape("b")
    return [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in problem.inputs]


RUN_EXPORTED = """
import pathlib, sys
import jax, jax.export, numpy as np
import jax_flash
exported = jax.export.deserialize(pathlib.Path(sys.argv[1]).read_bytes())
for batch in (1, 2, 5):
    inputs = [np.load(sys.argv[2])[name][:batch] for name in ("query", "key", "value")]
    results = jax.jit(exported.call)(*inputs)
    np.savez(sys.argv[3] + str(batch), *map(np.asarray, results))
"""


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")], ids="-".join)
def test_export_of_any_batch(tmp_path: pathlib.Path, platforms: tuple[str, ...]) -> None:
    """Forward and backward of a symbolic batch, run by another process, which only imports jax_flash."""
    problem = cases.problem(dataclasses.replace(CASE, name="any_batch", leading=(5,), q_offset=3), "float32")

    def run(*inputs: Any) -> Any:
        results, pullback = jax.vjp(functools.partial(jax_flash.attention, causal=True, q_offset=3), *inputs)
        return results, *pullback(results)

    exported = jax.export.export(jax.jit(run), platforms=platforms, disabled_checks=EXPORT_SAFE_TARGETS)
    file, arrays = tmp_path / "exported", tmp_path / "inputs.npz"
    file.write_bytes(exported(*symbolic(problem)).serialize())
    np.savez(arrays, **dict(zip(("query", "key", "value"), problem.inputs, strict=True)))
    subprocess.run(
        [sys.executable, "-c", RUN_EXPORTED, file, arrays, tmp_path / "results"],
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    for batch in (1, 2, 5):
        with np.load(tmp_path / f"results{batch}.npz") as got:
            for name, want in zip(got.files, jax.jit(run)(*(x[:batch] for x in problem.inputs)), strict=True):
                np.testing.assert_allclose(got[name], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"bias": ("b", 4, 9, 12)}, {"alibi_slopes": (4,)}, {"mask": (1, 1, 9, 12)}),
        *({"kv_start": ("b", 1, 9)}, {"q_end": (4, 12), "kv_end": ("b", 4, 9)}),
    ],
    ids=str,
)
def test_export_of_any_batch_for_gpus(options: dict[str, Any], dtype: str) -> None:
    """Lowered without a GPU; the kernels use the scratch that the module allocates for the actual batch."""
    problem = cases.problem(CASE, dtype)
    query, key, value = symbolic(problem)
    arrays = {
        name: jax.ShapeDtypeStruct(
            tuple(query.shape[0] if n == "b" else n for n in shape),
            bool if name == "mask" else "int32" if name[:2] in ("kv", "q_") else "float32",
        )
        for name, shape in options.items()
    }

    def run(query: Any, key: Any, value: Any, arrays: Any) -> Any:
        return jax.vjp(lambda *inputs: jax_flash.attention(*inputs, **arrays), query, key, value)[1](query)

    exported = jax.export.export(jax.jit(run), platforms=("cuda",), disabled_checks=EXPORT_SAFE_TARGETS)
    text = exported(query, key, value, arrays).mlir_module()
    assert calls(text, BACKWARD) == 1


def by_functions(query: Any, key: Any, value: Any, table: Any, deterministic: bool | None = None) -> jax.Array:
    mask_mod = lambda b, h, q, kv: (q >= kv) | (kv < 3)  # noqa: E731
    block_mask = flex.create_block_mask(mask_mod, None, None, query.shape[1], key.shape[1], block_size=(4, 8))
    out: jax.Array = jax_flash.attention(
        *(query, key, value),
        block_mask=block_mask,
        score_mod=lambda s, b, h, q, kv: s * table[h] + table[q % 4],
        deterministic_backward=deterministic,
    )
    return out


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_of_functions_for_gpus(dtype: str, deterministic: bool) -> None:
    """Of any batch; the kernels are compiled with the functions where the module runs. Gradients in one order are
    digits, of which the module makes floats."""
    problem = cases.problem(CASE, dtype)
    table = jax.ShapeDtypeStruct((4,), "float32")

    def run(query: Any, key: Any, value: Any, table: Any) -> Any:
        attend = functools.partial(by_functions, deterministic=deterministic)
        return jax.vjp(attend, query, key, value, table)[1](query)

    exported = jax.export.export(jax.jit(run), platforms=("cuda",), disabled_checks=EXPORT_SAFE_TARGETS)
    text = exported(*symbolic(problem), table).mlir_module()
    assert calls(text, BACKWARD) == 1
    assert "add_to(problem.dcaptured[0]" in text
    assert ("tensor<4x13x2xui32>" in text) == deterministic
    assert f"exact_sums = {str(deterministic).lower()}" in text


@pytest.mark.slow
def test_export_of_functions_round_trip() -> None:
    problem = cases.problem(CASE, "float32")
    arguments = (*problem.inputs, np.linspace(0.5, 1, 4, dtype=np.float32))
    exported = jax.export.export(jax.jit(by_functions), platforms=("cpu",), disabled_checks=EXPORT_SAFE_TARGETS)
    restored = jax.export.deserialize(exported(*arguments).serialize(vjp_order=1))
    for f in (lambda f: f(*arguments), lambda f: jax.grad(lambda *x: f(*x).sum(), (0, 1, 2, 3))(*arguments)):
        jax.tree.map(np.testing.assert_array_equal, f(restored.call), f(jax.jit(by_functions)))


def test_export_depends_on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same module wherever it is made: with an H200, a V100 or no GPU."""
    problem = cases.problem(CASE, "bfloat16")

    def module() -> str:
        run = jax.jit(jax.grad(lambda *x: jax_flash.attention(*x).astype("float32").sum(), (0, 1, 2)))
        exported = jax.export.export(run, platforms=("cuda",), disabled_checks=EXPORT_SAFE_TARGETS)
        return re.sub(r" loc\(.*\)|#loc.*", "", exported(*problem.inputs).mlir_module())

    modules = {module()}
    monkeypatch.setattr(choice, "_cuda_devices", lambda: ("a GPU",))
    monkeypatch.setattr(choice, "_cuda_unavailable", lambda: None)
    for old, separate in ((True, False), (False, True)):
        monkeypatch.setattr(choice, "has_old_gpu", lambda old=old: old)
        monkeypatch.setattr(choice, "separate_dq", lambda _, separate=separate: separate)
        modules.add(module())
    assert len(modules) == 1


def test_symbolic_lengths_are_refused_by_name() -> None:
    (length,) = jax.export.symbolic_shape("t")
    query = jax.ShapeDtypeStruct((2, length, 4, 8), "float32")
    key = jax.ShapeDtypeStruct((2, 12, 2, 8), "float32")
    for implementation in (None, "cpu", "xla"):
        run = jax.jit(functools.partial(jax_flash.attention, implementation=implementation))
        with pytest.raises(NotImplementedError, match="query may have symbolic sizes in its batch"):
            jax.export.export(run, platforms=("cpu",), disabled_checks=EXPORT_SAFE_TARGETS)(query, key, key)
    run = jax.jit(functools.partial(jax_flash.attention, implementation="reference"))
    assert jax.export.export(run, platforms=("cpu",))(query, key, key).out_avals[0].shape == query.shape


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (jax_flash.checkpoint_policies.save_attention, 1),
        (jax.checkpoint_policies.save_only_these_names(*jax_flash.checkpoint_policies.NAMES), 1),
        (
            jax.checkpoint_policies.save_from_both_policies(
                jax_flash.checkpoint_policies.save_attention, jax.checkpoint_policies.dots_saveable
            ),
            1,
        ),
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
    ids=["save_attention", "names", "both", "everything", "nothing"],
)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_remat_keeps_what_it_is_told(target: Target, policy: Any, forwards: int) -> None:
    """With out and lse kept the forward kernel runs once; with nothing kept, once more in the backward pass."""
    problem = cases.problem(CASE, target.dtypes[0])
    attend = cases.call(target, problem)

    def block(query: Any, key: Any, value: Any) -> Any:
        return attend(jnp.sin(query), jnp.cos(key), value)

    block = jax.checkpoint(block, policy=policy)
    gradient = jax.jit(jax.grad(functools.partial(loss, block), (0, 1, 2))).lower(*problem.inputs)
    assert (calls(gradient.as_text(), FORWARD), calls(gradient.as_text(), BACKWARD)) == (forwards, 1)
    # XLA for CPUs merges equal calls, so that its program may have fewer; it must not have more.
    optimized = gradient.compile().as_text()
    assert 1 <= calls(optimized, FORWARD) <= forwards
    assert calls(optimized, BACKWARD) == 1


def test_remat_changes_no_gradient() -> None:
    problem = cases.problem(CASE, "float32")
    attend = cases.call(cases.CPU, problem)
    problem.check("cpu", cases.differentiate(jax.checkpoint(attend), problem))


def test_results_have_one_shape_everywhere() -> None:
    """Abstract evaluation promises what every implementation returns."""
    problem = cases.problem(CASE, "float16")
    shapes = {
        implementation: jax.eval_shape(
            functools.partial(jax_flash.attention, return_lse=True, implementation=implementation), *problem.inputs
        )
        for implementation in ("cpu", "xla", "reference", None)
    }
    out = jax.ShapeDtypeStruct(problem.query.shape, jnp.float16)
    lse = jax.ShapeDtypeStruct((2, 4, 9), jnp.float32)
    for got in shapes.values():
        assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in (out, lse)]
