"""What a first call costs and how not to pay it: the line about a compiled kernel, ``warmup``, and the calls that both
``warmup`` and ``explain`` read from flags or from a Hugging Face config."""

import argparse
import inspect
import json
import pathlib
import pydoc
import re
import subprocess
from typing import Any

import jax
import numpy as np
import pytest
from test_cache import FETCH, KERNEL, start

import jax_flash
from jax_flash.__main__ import main
from jax_flash._native import _core, registration
from jax_flash._tools import calls, kernels, warmup

needs_nvrtc = pytest.mark.skipif(
    not registration.cuda_status()["nvrtc"], reason="no NVRTC here (the [test] extra installs it on Linux)"
)
NOTICE = "JAX_FLASH_NOTICE_SECONDS"


# The line on stderr


def said(cache: pathlib.Path | str, **environment: str) -> list[str]:
    process: subprocess.Popen[str] = start(cache, FETCH, **environment)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return err.splitlines()


@needs_nvrtc
def test_a_compiled_kernel_is_told_once(tmp_path: pathlib.Path) -> None:
    (line,) = said(tmp_path, **{NOTICE: "0"})
    assert re.fullmatch(
        r"jax_flash: compiled sm80-forward-bf16-d16-sm_80 in \d+\.\d s; python -m jax_flash warmup compiles kernels "
        r"ahead of calls, and JAX_FLASH_NOTICE_SECONDS=off hides this line",
        line,
    )
    assert said(tmp_path, **{NOTICE: "0"}) == []  # from the cache


@needs_nvrtc
@pytest.mark.parametrize("value", ["off", "1000"])
def test_the_line_can_be_hidden(tmp_path: pathlib.Path, value: str) -> None:
    assert said(tmp_path, **{NOTICE: value}) == []
    assert len(list(tmp_path.iterdir())) == 1  # it was compiled


@needs_nvrtc
def test_the_line_names_a_cache_that_keeps_nothing(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o777)
    (line,) = said(tmp_path, **{NOTICE: "0"})
    assert f"which no cache keeps: {tmp_path} can be written by every user" in line
    (line,) = said("", **{NOTICE: "0"})
    assert " s, which no cache keeps; " in line


@needs_nvrtc
@pytest.mark.parametrize("value", ["soon", "-1", "1s", "nan"])
def test_seconds_that_are_none(tmp_path: pathlib.Path, value: str) -> None:
    (line,) = said(tmp_path, **{NOTICE: value})
    assert line.endswith(f"(it must be a number of at least 0, or off, got {value})")


# warmup


def warm(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    code = main(["warmup", *arguments])
    shown = capsys.readouterr()
    return code, shown.out.splitlines(), shown.err


SMALL = ("--heads", "2", "--head-dim", "16", "--arch", "sm_80")


@needs_nvrtc
def test_warmup_fills_the_cache_with_what_calls_take(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(NOTICE, "0")
    code, lines, err = warm(capsys, *SMALL, "--full")
    assert code == 0
    assert err.startswith("sm_80: bfloat16, 2 heads on 2, head_dim 16, full: ")
    assert "jax_flash: compiled" not in err
    rows = [line.split() for line in lines[1:-1]]
    names = [name for _, name, *_ in rows]
    assert {"sm80-forward-bf16-d16-sm_80", "sm80-backward-bf16-d16-sm_80"} <= set(names)
    assert all(origin == "compiled" for _, _, origin, _ in rows)
    assert lines[-1].startswith(f"{len(names)} kernels are ready in ")
    assert lines[-1].endswith(f", {len(names)} compiled; cache {tmp_path}")
    assert len(list(tmp_path.iterdir())) == len(names)
    # What the runtime asks for is there now.
    assert _core.fetch_kernel(**KERNEL) == "cached"
    _, lines, _ = warm(capsys, *SMALL, "--full", "--forward-only")
    assert {line.split()[2] for line in lines[1:-1]} == {"cached"}
    assert not any("backward" in line for line in lines)


@needs_nvrtc
def test_warmup_of_options(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    fetched: list[dict[str, Any]] = []
    monkeypatch.setattr(_core, "fetch_kernels", lambda **given: fetched.append(given) or [("k", "prebuilt", 0.0)])
    flags = [
        "--window",
        "7",
        "--softcap",
        "20",
        "--dropout-rate",
        "0.1",
        "--with",
        "segment_ids",
        "--with",
        "kv_lengths",
    ]
    code, lines, err = warm(capsys, *SMALL, *flags)
    assert code == 0, err
    options = fetched[0]["options"][0]
    assert options["causal"]
    assert (options["window_left"], options["softcap"], options["dropout_rate"]) == (7, 20.0, 0.1)
    assert options["has_q_segment_ids"]
    assert options["has_kv_lengths"]
    assert not options["has_sinks"]
    assert lines[-1].startswith("1 kernels are ready in ")


def test_warmup_needs_a_gpu_or_an_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = registration.cuda_status() | {"devices": []}
    monkeypatch.setattr(registration, "cuda_status", lambda: status)
    code, _, err = warm(capsys, "--heads", "2", "--head-dim", "16")
    assert code == 1
    assert err == "jax_flash warmup: there is no GPU here that has kernels: name one by --arch, such as sm_90a\n"
    gpu = {"name": "NVIDIA H200", "compute_capability": 90, "family": "sm90a"}
    old = {"name": "Tesla P100", "compute_capability": 60, "family": ""}
    status["devices"] = [gpu, gpu, old]
    assert warmup._targets(None) == [(90, "NVIDIA H200")]
    assert warmup._targets([80, 80]) == [(80, "")]


def test_warmup_needs_a_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "")
    code, _, err = warm(capsys, *SMALL)
    assert code == 1
    assert "there is no cache to keep kernels in: JAX_FLASH_CACHE_DIR is empty" in err


def test_warmup_of_what_no_kernel_serves(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    code, _, err = warm(capsys, *SMALL, "--dtype", "float64")
    assert code == 1
    assert "no kernel: plain JAX serves it" in err
    assert err.endswith("no call is served by CUDA's kernels, so that there is nothing to compile\n")


# Flags and configs


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--head-dim", "64"], "--heads must be given, or a --config that says it, got neither"),
        (["--heads", "4"], "--head-dim must be given, or a --config that says it, got neither"),
        (["--heads", "4", "--kv-heads", "3", "--head-dim", "64"], "--kv-heads must divide --heads, 4, got 3"),
        (["--config", "absent.json"], "absent.json"),
        (["--heads", "4", "--head-dim", "64", "--dropout-rate", "1.5"], "dropout_rate"),
    ],
)
def test_flags_that_do_not_fit(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments, "--platform", "cpu"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("jax_flash explain: ")
    assert complaint in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--heads", "0"], "must be a whole number of at least 1, got '0'"),
        (["--softcap", "-1"], "must be a number above 0, got '-1'"),
        (["--softcap", "x"], "must be a number above 0, got 'x'"),
        (["--causal", "--full"], "not allowed with argument"),
        (["--with", "bias"], "invalid choice: 'bias'"),
    ],
)
def test_bad_flags(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", *arguments])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def of_config(path: pathlib.Path, config: Any, *arguments: str) -> list[calls.Call]:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    parser = argparse.ArgumentParser()
    calls.add_arguments(parser)
    return calls.of_arguments(parser.parse_args(["--config", str(path), *arguments]))


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "titles"),
    [
        (LLAMA, ["bfloat16, 32 heads on 8, head_dim 128, causal"]),
        ({"n_head": 12, "n_embd": 768}, ["float32, 12 heads on 12, head_dim 64, causal"]),
        (LLAMA | {"architectures": ["BertForMaskedLM"]}, ["bfloat16, 32 heads on 8, head_dim 128, full"]),
        (
            LLAMA | {"sliding_window": 4096, "use_sliding_window": False},
            ["bfloat16, 32 heads on 8, head_dim 128, causal"],
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": LLAMA | {"head_dim": 256, "sliding_window": 512, "dtype": "float16"},
            },
            [
                "float16, 32 heads on 8, head_dim 256, causal",
                "float16, 32 heads on 8, head_dim 256, causal, window 511",
            ],
        ),
        (
            LLAMA | {"sliding_window": 128, "layer_types": ["sliding_attention"], "attn_logit_softcapping": 50.0},
            ["bfloat16, 32 heads on 8, head_dim 128, causal, window 127, softcap 50"],
        ),
        (
            LLAMA | {"model_type": "gpt_oss", "layer_types": ["full_attention"]},
            ["bfloat16, 32 heads on 8, head_dim 128, causal, sinks"],
        ),
        (
            LLAMA | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            ["bfloat16, 32 heads on 32, head_dim 192 and 128 of values, causal"],
        ),
        (
            {
                "model_type": "falcon",
                "num_attention_heads": 71,
                "hidden_size": 4544,
                "multi_query": True,
                "alibi": True,
            },
            ["float32, 71 heads on 1, head_dim 64, causal, alibi_slopes"],
        ),
    ],
)
def test_configs(tmp_path: pathlib.Path, config: dict[str, Any], titles: list[str]) -> None:
    found = of_config(tmp_path / "config.json", config)
    assert [call.title for call in found] == titles
    for call in found:  # they are calls that attention takes
        function, arguments = call.with_gradients()
        dquery, dkey, dvalue = jax.eval_shape(function, *arguments)
        assert (dquery.shape, dkey.shape, dvalue.shape) == tuple(x.shape for x in call.inputs)


def test_flags_take_precedence(tmp_path: pathlib.Path) -> None:
    (call,) = of_config(tmp_path / "config.json", LLAMA, "--dtype", "float16", "--kv-heads", "4", "--full")
    assert call.title == "float16, 32 heads on 4, head_dim 128, full"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("{", "which is no JSON"),
        ("[]", "which holds no object"),
        (
            {"hidden_size": 64},
            r"--config must have num_attention_heads, and head_dim or hidden_size, got .* with hidden_size",
        ),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "got float8_e4m3fn in .*: use --dtype"),
    ],
)
def test_configs_that_are_none(tmp_path: pathlib.Path, config: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        of_config(tmp_path / "config.json", config)


def test_explain_at_the_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    flags = ["--with", "segment_ids", "--dropout-rate", "0.1", "--deterministic", "--precision", "highest"]
    assert main(["explain", "--config", str(path), "--platform", "cuda", *flags]) == 0
    title, verdict, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("bfloat16, 32 heads on 8, head_dim 128, causal, dropout_rate 0.1, ")
    assert verdict == "on cuda, attention is served by 'cuda'"


# help()


@pytest.mark.parametrize(
    "name", ["attention", "attention_varlen", "dot_product_attention", "explain", "explain_varlen"]
)
def test_help_has_a_readable_signature(name: str) -> None:
    """Names and defaults, in lines that a terminal shows whole."""
    function = getattr(jax_flash, name)
    lines = pydoc.render_doc(function, renderer=pydoc.plaintext).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{name}("))
    last = next(number for number in range(first, len(lines)) if lines[number].endswith(")"))
    assert all(len(line) <= 120 for line in lines[first : last + 1])
    shown = " ".join(line.strip() for line in lines[first : last + 1])
    assert "Union" not in shown
    assert "ArrayLike" not in shown
    parameters = inspect.signature(function).parameters
    assert all(re.search(rf"\b{parameter}\b", shown) for parameter in parameters)
    if name == "attention":
        assert "softcap=None" in shown
        assert parameters.keys() == function.__annotations__.keys() - {"return"}  # those stay for type checkers


def test_explain_has_the_parameters_of_what_it_explains() -> None:
    own = {"platform", "source"}
    for name, function in (("explain", jax_flash.attention), ("explain_varlen", jax_flash.attention_varlen)):
        found = inspect.signature(getattr(jax_flash, name)).parameters
        assert {key: x.default for key, x in found.items() if key not in own} == {
            key: x.default for key, x in inspect.signature(function).parameters.items()
        }
        assert own <= found.keys()


def test_the_version_is_that_of_the_package() -> None:
    assert re.match(r"\d+\.\d+", jax_flash.__version__)


def test_common_variants_are_in_one_place() -> None:
    """What the wheels carry: float16, bfloat16 and float32 by float16 with descale, at three head dims."""
    for arch in kernels.ARCHES.values():
        names = [
            name
            for group in kernels.common(arch)
            for name in _core.kernel_names(arch=arch, **group)
            if re.search("-(forward|backward)-", name)
        ]
        for head_dim, causal, pass_ in np.ndindex(3, 2, 2):
            part = f"-{('forward', 'backward')[pass_]}-{{}}-d{(64, 128, 256)[head_dim]}{('', '-causal')[causal]}"
            wanted = [part.format("f16")]
            wanted += [part.format("bf16")] if arch >= 80 else []
            for text in wanted:
                assert any(text in name for name in names), text
