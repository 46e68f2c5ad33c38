"""The command line: doctor says what is here and whether it works, kernels takes and refuses arguments."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_flash import _core, _doctor, _dtypes, _explain, _registration
from jax_flash.__main__ import main

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ARCHES = "sm_80, sm_86, sm_89, sm_90, sm_90a"
NO_CUDA = {
    "driver": "",
    "driver_error": "libcuda.so.1 is not here",
    "nvrtc": [],
    "nvrtc_error": "libnvrtc.so is not here",
    "cache_dir": "",
    "devices": [],
}
KERNEL = {
    "name": "forward_bf16_d128_causal",
    "registers": 168,
    "shared_bytes": 81920,
    "threads": 128,
    "spill_bytes": 0,
    "local_bytes": 8,
    "cubin_bytes": 31488,
}


def doctor(monkeypatch, capsys):
    """Exit code and lines of the doctor."""
    monkeypatch.setenv(PREALLOCATE, "false")  # restores what main() sets
    code = main(["doctor"])
    return code, capsys.readouterr().out.splitlines()


def without_cuda(monkeypatch, **changes):
    """One CPU device, two dtypes, and a CUDA side in the state of NO_CUDA, with changes."""
    monkeypatch.setattr(_doctor, "_DTYPES", ("bfloat16", "float64"))
    status = NO_CUDA | changes
    monkeypatch.setattr(_registration, "cuda_status", lambda: status)
    monkeypatch.setattr(_doctor, "_devices", lambda name: jax.local_devices(backend="cpu")[:1] if name == "cpu" else [])


def test_doctor_checks_every_device(monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "_DTYPES", ("bfloat16",))
    code, lines = doctor(monkeypatch, capsys)
    devices = [device for platform in ("cpu", "cuda") for device in _doctor._devices(platform)]
    assert len(devices) >= 4  # conftest.py makes four CPU devices
    assert lines[-1] == f"verdict: healthy, {len(devices)} of {len(devices)} checks passed"
    assert code == 0
    assert [line.split()[0] for line in lines if "bfloat16" in line and " ok, " in line] == [
        f"{'cpu' if device.platform == 'cpu' else 'cuda'}:{device.id}" for device in devices
    ]
    report = "\n".join(lines)
    for title in ("python", "jax", "FFI API", "CPU", "CUDA driver", "NVRTC", "kernel cache"):
        assert f"\n  {title}  " in report
    assert f"{jax.__version__}, jaxlib" in report
    assert f"CPU           {_core.cpu_isa()}, " in report


@pytest.mark.slow
def test_doctor_as_a_command():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jax_flash", "doctor"], capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("verdict: healthy, "), done.stdout + done.stderr
    assert done.returncode == 0
    served = next(line.split() for line in lines if line.startswith("  cpu  "))
    assert served[1:] == [_explain.choose(None, "cpu", dtype) for dtype in _dtypes.INPUTS]
    checked = [line.split()[1] for line in lines if line.startswith("  cpu:0") and " ok, " in line]
    assert checked == list(_dtypes.INPUTS)


def test_doctor_needs_neither_driver_nor_nvrtc(monkeypatch, capsys):
    without_cuda(monkeypatch)
    code, lines = doctor(monkeypatch, capsys)
    assert "  CUDA driver   none: libcuda.so.1 is not here" in lines
    assert "  NVRTC         none: libnvrtc.so is not here" in lines
    assert "  kernel cache  off, or no folder to keep it in" in lines
    assert code == 0


def test_doctor_counts_the_cache(monkeypatch, capsys, tmp_path):
    (tmp_path / "sm_80").mkdir()
    for name, size in (("sm_80/one.cubin", 2**20), ("two.cubin", 2**19)):
        (tmp_path / name).write_bytes(bytes(size))
    without_cuda(monkeypatch, cache_dir=str(tmp_path))
    _, lines = doctor(monkeypatch, capsys)
    assert f"  kernel cache  {tmp_path}, 2 files, 1.5 MiB" in lines


def test_doctor_tells_of_a_gpu_that_jax_does_not_see(monkeypatch, capsys):
    gpu = {"name": "NVIDIA H200", "compute_capability": 90, "family": "sm80"}
    without_cuda(monkeypatch, driver="13.0", devices=[gpu])
    code, lines = doctor(monkeypatch, capsys)
    assert any("install jax_flash[cuda12] or jax_flash[cuda13]" in line for line in lines)
    assert code == 0


@pytest.mark.parametrize("which", ["out", "lse", "dquery", "dkey", "dvalue"])
def test_doctor_finds_a_wrong_result(monkeypatch, capsys, which):
    without_cuda(monkeypatch)
    right = _doctor._results

    def wrong(device, arrays, implementation):
        results = right(device, arrays, implementation)
        if implementation is None and arrays[0].dtype == jnp.bfloat16:
            # One element off by a twentieth of the largest.
            results[which] = results[which].at[(0,) * results[which].ndim].add(jnp.abs(results[which]).max() / 20)
        return results

    monkeypatch.setattr(_doctor, "_results", wrong)
    code, lines = doctor(monkeypatch, capsys)
    assert lines[-1].startswith(
        f"verdict: unhealthy, 1 of 2 checks passed; cpu:0 bfloat16: wrong {which}: its error is "
    )
    assert code == 1


def test_doctor_finds_a_nan(monkeypatch, capsys):
    without_cuda(monkeypatch)
    right = _doctor._results

    def wrong(device, arrays, implementation):
        results = right(device, arrays, implementation)
        return results | ({"dkey": results["dkey"] * jnp.nan} if implementation is None else {})

    monkeypatch.setattr(_doctor, "_results", wrong)
    code, lines = doctor(monkeypatch, capsys)
    assert lines[-1].startswith(
        "verdict: unhealthy, 0 of 2 checks passed; cpu:0 bfloat16: wrong dkey: its error is nan"
    )
    assert code == 1


def test_doctor_survives_a_call_that_fails(monkeypatch, capsys):
    without_cuda(monkeypatch)

    def fail(*args, **kwargs):
        raise RuntimeError("the kernel is on fire\nand more")

    monkeypatch.setattr(_doctor, "attention", fail)
    code, lines = doctor(monkeypatch, capsys)
    assert lines[-1].startswith("verdict: unhealthy, 0 of 2 checks passed; ")
    assert "cpu:0 float64: RuntimeError: the kernel is on fire" in lines[-1]
    assert code == 1


def test_doctor_names_an_unusable_instruction_set(monkeypatch, capsys):
    without_cuda(monkeypatch)

    class Core:
        FFI_API_VERSION = _core.FFI_API_VERSION

        @staticmethod
        def cpu_isa():
            raise RuntimeError("JAX_FLASH_CPU_ISA must be one of avx2, got mmx")

    monkeypatch.setattr(_doctor, "_core", Core)
    code, lines = doctor(monkeypatch, capsys)
    assert lines[-1].endswith("CPU: JAX_FLASH_CPU_ISA must be one of avx2, got mmx")
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required: COMMAND"),
        (["bench"], "invalid choice: 'bench'"),
        (["doctor", "--loud"], "unrecognized arguments: --loud"),
        (["kernels"], "required: ACTION"),
        (["kernels", "build", "--arch", "sm_80"], "required: --out"),
        (["kernels", "build", "--out", "x"], "required: --arch"),
        (["kernels", "build", "--arch", "sm_70", "--out", "x"], f"must be one of {ARCHES}, got 'sm_70'"),
        (["kernels", "list", "--arch", "80"], f"must be one of {ARCHES}, got '80'"),
    ],
)
def test_bad_arguments(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.fixture
def built(monkeypatch):
    """What _core.build_kernels was asked for; it answers with one kernel each time."""
    asked = []

    def build_kernels(*, arch, out_dir, **variants):
        asked.append((arch, out_dir))
        return [KERNEL]

    monkeypatch.setattr(_core, "build_kernels", build_kernels)
    return asked


def test_kernels_build_compiles_each_architecture_once(built, tmp_path, capsys):
    out = tmp_path / "deep" / "down"
    arguments = ["--arch", "sm_80", "--arch", "sm_90a", "--arch", "sm_90", "--out", str(out)]
    assert main(["kernels", "build", *arguments]) == 0
    assert built == [(80, str(out)), (90, str(out))]
    assert out.is_dir()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["arch", "variant", "registers", "shared", "threads", "spills", "local", "cubin"]
    assert lines[2].split() == ["sm_80", "forward_bf16_d128_causal", "168", "81920", "128", "0", "8", "31488"]
    assert lines[3].split()[0] == "sm_90"
    assert lines[4] == f"2 kernels, 0.1 MiB of cubins, in {out}"


def test_kernels_list_shows_every_architecture(built, capsys):
    assert main(["kernels", "list"]) == 0
    assert [arch for arch, _ in built] == [80, 86, 89, 90]
    assert len({folder for _, folder in built}) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4


def test_kernels_list_of_one_architecture(built):
    assert main(["kernels", "list", "--arch", "sm_89"]) == 0
    assert [arch for arch, _ in built] == [89]


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_kernels_says_why_it_failed(monkeypatch, tmp_path, capsys, error):
    def build_kernels(*, arch, out_dir, **variants):
        raise error("no NVRTC: libnvrtc.so is not here")

    monkeypatch.setattr(_core, "build_kernels", build_kernels)
    assert main(["kernels", "build", "--arch", "sm_86", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("jax_flash kernels build: sm_86: no NVRTC: libnvrtc.so is not here\n")


def test_kernels_build_into_a_file(built, tmp_path, capsys):
    out = tmp_path / "file"
    out.write_text("")
    assert main(["kernels", "build", "--arch", "sm_80", "--out", str(out)]) == 1
    assert f"--out must name a folder, got a file: {out}" in capsys.readouterr().err
    assert not built
