"""The command line: doctor's report and verdict, and the arguments that kernels accepts and refuses."""

import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _primitive
from jax_flash.__main__ import main
from jax_flash._call import dtypes
from jax_flash._implementations import choice
from jax_flash._native import _core, origins, registration
from jax_flash._primitive import lowering
from jax_flash._tools import accuracy
from jax_flash._tools import doctor as _doctor
from jax_flash._tools import kernels as _kernels

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ARCHES = "sm_70, sm_75, sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100, sm_120"
NO_CUDA = {
    "driver": "",
    "driver_error": "libcuda.so.1 is not here",
    "nvrtc": [],
    "nvrtc_error": "libnvrtc.so is not here",
    "cache_dir": "",
    "cache_problem": "",
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


RESULTS = {}


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    """A problem is compiled and run once for all tests, for each attention(): that is nearly all of their time."""
    right = accuracy.results

    def results(problem, arrays, device, implementation):
        key = accuracy.attention, problem, arrays["query"].dtype, device, implementation
        if key not in RESULTS:
            RESULTS[key] = right(problem, arrays, device, implementation)
        return dict(RESULTS[key])

    monkeypatch.setattr(accuracy, "results", results)


def doctor(monkeypatch, capsys):
    """Exit code and lines of the doctor."""
    monkeypatch.setenv(PREALLOCATE, "false")  # restores what main() sets
    code = main(["doctor"])
    return code, capsys.readouterr().out.splitlines()


def without_cuda(monkeypatch, **changes):
    """One CPU device, two dtypes, and a CUDA side in the state of NO_CUDA, with changes."""
    monkeypatch.setattr(_doctor, "_DTYPES", ("bfloat16", "float64"))
    status = NO_CUDA | changes
    monkeypatch.setattr(registration, "cuda_status", lambda: status)
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
    assert served[1:] == ["cpu"] * len(dtypes.INPUTS)
    checked = [line.split()[1] for line in lines if line.startswith("  cpu:0") and " ok, " in line]
    assert checked == list(dtypes.INPUTS)


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
    right = accuracy.results

    def wrong(problem, arrays, device, implementation):
        results = right(problem, arrays, device, implementation)
        if implementation is None and problem.dtype == "bfloat16":
            # One element off by a twentieth of the largest.
            results[which] = results[which].at[(0,) * results[which].ndim].add(jnp.abs(results[which]).max() / 20)
        return results

    monkeypatch.setattr(accuracy, "results", wrong)
    code, lines = doctor(monkeypatch, capsys)
    assert lines[-1].startswith(
        f"verdict: unhealthy, 1 of 2 checks passed; cpu:0 bfloat16: wrong {which}: its error is "
    )
    assert code == 1


def test_doctor_finds_a_nan(monkeypatch, capsys):
    without_cuda(monkeypatch)
    right = accuracy.results

    def wrong(problem, arrays, device, implementation):
        results = right(problem, arrays, device, implementation)
        return results | ({"dkey": results["dkey"] * jnp.nan} if implementation is None else {})

    monkeypatch.setattr(accuracy, "results", wrong)
    code, lines = doctor(monkeypatch, capsys)
    assert lines[-1].startswith(
        "verdict: unhealthy, 0 of 2 checks passed; cpu:0 bfloat16: wrong dkey: its error is nan"
    )
    assert code == 1


def test_doctor_survives_a_call_that_fails(monkeypatch, capsys):
    without_cuda(monkeypatch)

    def fail(*args, **kwargs):
        raise RuntimeError("the kernel is on fire\nand more")

    monkeypatch.setattr(accuracy, "attention", fail)
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
    ("ffi", "record", "said"),
    [
        ((0, 4), (0, 1), "forward kernels recorded as XLA's own nodes"),
        ((0, 3), None, "calls captured: this jaxlib can't record kernels (0.11.2 can)"),
        ((0, 9), (0, 7), "calls captured: how this jaxlib records kernels (0.7) is not known to jax_flash"),
    ],
)
def test_doctor_says_how_calls_get_into_graphs(ffi, record, said, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_RECORD_GRAPHS", "1")
    monkeypatch.setattr(registration, "runtime_ffi_version", lambda *_: ffi)
    monkeypatch.setattr(registration, "runtime_record_version", lambda *_: record)
    assert ["CUDA graphs", said] in _doctor.versions([])
    monkeypatch.delenv("JAX_FLASH_RECORD_GRAPHS")
    assert ["CUDA graphs", "calls captured"] in _doctor.versions([])


# Simulated GPUs


VENV = "/home/me/venv/lib/python3.12/site-packages"
NVRTC = {
    12: f"12.9 ({VENV}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)",
    13: f"13.0 ({VENV}/nvidia/cu13/lib/libnvrtc.so.13)",
}
GPUS = {
    "V100": {"name": "Tesla V100-SXM2-16GB", "compute_capability": 70, "family": "sm70"},
    "T4": {"name": "Tesla T4", "compute_capability": 75, "family": "sm75"},
    "A100": {"name": "NVIDIA A100-SXM4-40GB", "compute_capability": 80, "family": "sm80"},
    "H200": {"name": "NVIDIA H200", "compute_capability": 90, "family": "sm90a"},
    "P100": {"name": "Tesla P100-PCIE-16GB", "compute_capability": 60, "family": ""},
}


def faked(gpu, nvrtc=(), *, prebuilt=0, cudnn=None, seen=True, stale=False, **changes):
    """A machine with one GPU, one CPU, some versions of NVRTC, and as many prebuilt kernels."""
    gpu = GPUS[gpu]
    arch = gpu["compute_capability"]
    status = {
        "driver": "12.9",
        "driver_error": "",
        "nvrtc": [NVRTC[major] for major in nvrtc],
        "nvrtc_error": "" if nvrtc else "libnvrtc.so.12: cannot open shared object file: No such file or directory",
        "cache_dir": "/home/me/.cache/jax_flash",
        "cache_problem": "",
        "devices": [gpu],
    } | changes
    devices = {"cpu": [types.SimpleNamespace(platform="cpu", id=0, device_kind="cpu")]}
    if seen:
        devices["cuda"] = [
            types.SimpleNamespace(
                platform="gpu",
                id=0,
                local_hardware_id=0,
                device_kind=gpu["name"],
                compute_capability=origins.name(arch),
            )
        ]
    folder = origins.Prebuilt(f"{VENV}/jax_flash/prebuilt", {arch: prebuilt}, frozenset([arch] if stale else []))
    return _doctor.Machine(status, devices, [folder] if prebuilt else [], cudnn)


V100_WITH_CUDA_13 = (
    "the CUDA kernels can't be used: NVRTC 13.0 does not compile for compute capability 7.0: install jax[cuda12], "
    "whose NVRTC 12 does"
)


@pytest.mark.parametrize(
    ("machine", "kernels", "problem"),
    [
        (faked("V100", [12]), "kernels of sm70: compiled by NVRTC 12.9", None),
        (faked("V100", [13, 12]), "kernels of sm70: compiled by NVRTC 12.9", None),
        (faked("V100", [12], prebuilt=32), "kernels of sm70: 32 prebuilt, the others compiled by NVRTC 12.9", None),
        (faked("V100", [13]), "kernels of sm70: none", V100_WITH_CUDA_13),
        (
            faked("V100", [13], prebuilt=32),
            "kernels of sm70: 32 prebuilt, no others",
            "calls that the prebuilt kernels don't serve fail: NVRTC 13.0 does not compile for compute capability 7.0: "
            "install jax[cuda12], whose NVRTC 12 does",
        ),
        (faked("V100", [13], prebuilt=32, stale=True), "kernels of sm70: none", V100_WITH_CUDA_13),
        (
            faked("V100"),
            "kernels of sm70: none",
            "the CUDA kernels can't be used: no NVRTC to compile kernels with, install jax[cuda12] (libnvrtc.so.12: "
            "cannot open shared object file: No such file or directory)",
        ),
        (faked("T4", [12]), "kernels of sm75: compiled by NVRTC 12.9", None),
        (faked("T4", [13]), "kernels of sm75: compiled by NVRTC 13.0", None),
        (faked("T4", [13], prebuilt=32), "kernels of sm75: 32 prebuilt, the others compiled by NVRTC 13.0", None),
        (
            faked("T4"),
            "kernels of sm75: none",
            "the CUDA kernels can't be used: no NVRTC to compile kernels with, install jax[cuda12] or jax[cuda13] ("
            "libnvrtc.so.12: cannot open shared object file: No such file or directory)",
        ),
        (faked("A100", [13]), "kernels of sm80: compiled by NVRTC 13.0", None),
        (faked("P100", [12]), "no kernels of this package", None),
        (faked("P100"), "no kernels of this package", None),
    ],
)
def test_where_the_kernels_of_a_gpu_come_from(machine, kernels, problem):
    lines, problems = _doctor.gpus(machine)
    assert lines[1].endswith(f", {kernels}")
    assert problems == ([] if problem is None else [f"cuda:0: {problem}"])
    assert lines[2:] == problems


@pytest.mark.parametrize(
    ("gpu", "extras"), [("V100", "jax_flash[cuda12]"), ("T4", "jax_flash[cuda12] or jax_flash[cuda13]")]
)
def test_doctor_names_the_cuda_that_knows_an_unseen_gpu(gpu, extras):
    lines, problems = _doctor.gpus(faked(gpu, [13], seen=False))
    assert lines == ["cpu:0  cpu", f"a GPU is here that JAX doesn't see: install {extras}"]
    assert not problems


@pytest.mark.parametrize(
    ("gpu", "cudnn", "warned"),
    [
        ("V100", "9.28.0.42", True),
        ("V100", "9.11.0.98", True),
        ("V100", "9.10.2.21", False),
        ("V100", "9.8.0.87", False),
        ("V100", None, False),
        ("T4", "9.28.0.42", False),
    ],
)
def test_doctor_knows_which_cudnn_dropped_volta(gpu, cudnn, warned):
    lines, problems = _doctor.gpus(faked(gpu, [12], cudnn=cudnn))
    warning = f"cuDNN {cudnn} no longer knows compute capability 7.0, which JAX may need it for: install "
    assert lines[2:] == [f"{warning}jax_flash[volta], or nvidia-cudnn-cu12<9.11"] * warned
    assert not problems


def test_a_driver_that_is_too_old_is_a_problem():
    error = "the CUDA driver is older than 12.0: it lacks cuLibraryLoadData"
    lines, problems = _doctor.gpus(faked("V100", [12], driver="", driver_error=error, devices=[]))
    assert problems == [f"the CUDA kernels can't be used: {error}"]
    assert lines[-1] == problems[0]


@pytest.mark.parametrize(
    ("nvrtc", "prebuilt", "verdict"),
    [
        ([12], 0, "healthy, 4 of 4 checks passed"),
        ([13], 0, f"unhealthy, 4 of 4 checks passed; cuda:0: {V100_WITH_CUDA_13}"),
        ([13], 32, "unhealthy, 4 of 4 checks passed; cuda:0: calls that the prebuilt kernels don't serve fail: NVRTC"),
    ],
)
def test_the_verdict_on_a_v100(monkeypatch, capsys, nvrtc, prebuilt, verdict):
    """The whole report; what would run on the GPU runs on the CPU."""
    machine = faked("V100", nvrtc, prebuilt=prebuilt)
    cpu = jax.local_devices(backend="cpu")[0]
    monkeypatch.setattr(_doctor, "machine", lambda: machine)
    monkeypatch.setattr(_doctor, "_DTYPES", ("float16", "float64"))
    measure, asked = accuracy.measure, []

    def on_the_cpu(problem, device, judge):
        asked.append((device.platform, problem.head_dim, problem.q_offset))
        return measure(problem, cpu, cpu)

    monkeypatch.setattr(accuracy, "measure", on_the_cpu)
    code, lines = doctor(monkeypatch, capsys)
    assert lines[-1].startswith(f"verdict: {verdict}")
    assert code == (0 if verdict.startswith("healthy") else 1)
    kind = (64, 0) if nvrtc == [13] else (40, None)  # where nothing can be compiled, one that may be prebuilt
    assert asked == [("cpu", 40, None)] * 2 + [("gpu", *kind)] * 2


@pytest.mark.parametrize(
    ("gpu", "nvrtc", "arches", "reason"),
    [
        ("V100", [12], [], None),
        ("V100", [13], [], "NVRTC 13.0 does not compile for compute capability 7.0: install jax[cuda12]"),
        ("V100", [], [], "no NVRTC to compile kernels with, install jax[cuda12] (libnvrtc"),
        ("V100", [13], [70], None),
        ("V100", [13], [75], "NVRTC 13.0 does not compile for compute capability 7.0: install jax[cuda12]"),
        ("T4", [13], [], None),
        ("P100", [12], [60], "Tesla P100-PCIE-16GB has compute capability 6.0, the kernels need"),
    ],
)
def test_calls_are_served_by_xla_where_no_kernel_can_be_had(monkeypatch, gpu, nvrtc, arches, reason):
    choice._cuda_unavailable.cache_clear()
    machine = faked(gpu, nvrtc)
    monkeypatch.setattr(choice, "_cuda_devices", lambda: machine.devices["cuda"])
    monkeypatch.setattr(registration, "cuda_status", lambda: machine.status)
    folders = [origins.Prebuilt("folder", dict.fromkeys(arches, 32), frozenset())]
    monkeypatch.setattr(origins, "prebuilt", lambda *_: folders)
    try:
        found = choice._cuda_unavailable()
    finally:
        choice._cuda_unavailable.cache_clear()
    assert (found is None) if reason is None else found.startswith(reason)


@pytest.mark.parametrize(("nvrtc", "cudnn", "prebuilt"), [([12], "9.10.2.21", 72), ([12, 13], None, 0), ([], None, 72)])
def test_doctor_shows_what_kernels_come_from(nvrtc, cudnn, prebuilt):
    """Rows of what is here alone: of two versions of NVRTC both, in their order."""
    machine = faked("V100", nvrtc, cudnn=cudnn, prebuilt=prebuilt, driver="13.0")
    shown = dict(_doctor.gpu_versions(machine))
    # NVRTC 12 compiles for a driver of CUDA 13, which needs no remark about its own version.
    assert shown["CUDA driver"] == "13.0" + (", compatible with NVRTC 12.9" if 12 in nvrtc else "")
    if nvrtc:
        assert shown["NVRTC"].split(", ") == [NVRTC[major] for major in nvrtc]
    else:
        assert shown["NVRTC"] == f"none: {machine.status['nvrtc_error']}"
    assert shown.get("cuDNN") == cudnn
    folder = f"{VENV}/jax_flash/prebuilt"
    assert shown.get("prebuilt kernels") == (f"{prebuilt} for sm_70 in {folder}" if prebuilt else None)
    assert machine.status["cache_dir"] in shown["kernel cache"]


# Prebuilt kernels


def needs(arch):
    """Skips where no family serves an architecture, or no NVRTC compiles for it."""
    if f"sm_{arch}" not in _kernels.ARCHES:
        pytest.skip(f"no kernels for sm_{arch}")
    if reason := origins.uncompiled(arch, registration.cuda_status()):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def build_few(tmp_path_factory):
    """Puts forward and backward of one kind of call into a folder, and says how many kernels these are."""

    @functools.cache
    def built(arch):
        folder = tmp_path_factory.mktemp(f"sm_{arch}")
        _core.build_kernels(
            arch=arch,
            out_dir=str(folder),
            dtypes=["float16"],
            head_dims=[(64, 64)],
            options=[{"causal": True, "separate_dq": arch < 80}],
            passes=["forward", "backward"],
        )
        return folder

    return lambda folder, arch: len(list(shutil.copytree(built(arch), folder).iterdir()))


@pytest.mark.xdist_group("prebuilt")
@pytest.mark.parametrize("arch", [70, 75, 80])
def test_prebuilt_kernels_are_counted_and_stale_ones_known(monkeypatch, tmp_path, build_few, arch):
    needs(arch)
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "prebuilt"
    count = build_few(folder, arch)
    assert count >= 2
    (folder / "sm60-forward-f16-d64-sm_60-0123456789abcdef.cubin").write_bytes(b"of a family that is gone")
    configured = {"source_dir": str(registration._INSTALLED / "kernels"), "nvrtc_paths": registration.nvrtc_paths()}
    _core.configure_cuda(prebuilt_dirs=[str(folder)], **configured)
    try:
        (found,) = origins.prebuilt([str(folder)], [arch])
        assert found.usable == {60: 1, arch: count}
        assert str(found) == f"1 for sm_60, {count} for sm_{arch} in {folder}"
        for path in folder.glob(f"*-sm_{arch}-*"):
            content = bytearray(path.read_bytes())
            content[100] ^= 1
            path.write_bytes(content)
        (found,) = origins.prebuilt([str(folder)], [arch, 60])
        assert found.usable == {}
        assert f"{count} for sm_{arch} of another version of jax_flash, which are not used in {folder}" in str(found)
    finally:
        _core.configure_cuda(prebuilt_dirs=registration.prebuilt_dirs(), **configured)
    assert str(origins.Prebuilt("folder", {}, frozenset())) == "none in folder"


@pytest.mark.parametrize("gpu", ["V100", "T4", "A100", "H200"])
def test_the_default_calls_of_a_gpu_are_prebuilt(monkeypatch, gpu):
    """Forward and backward of every dtype, as they are lowered where such a GPU is."""
    arch, head_dim = GPUS[gpu]["compute_capability"], 64
    needs(arch)
    machine = faked(gpu, [12])
    monkeypatch.setattr(choice, "_cuda_devices", lambda: machine.devices["cuda"])
    monkeypatch.setattr(registration, "cuda_status", lambda: machine.status)
    asked = []
    custom_call = lowering._custom_call

    def note(pass_, target, params, results, *args):
        attributes = lowering._attributes(pass_, "cuda", params, *args)
        record = {name: x.item() if isinstance(x, np.generic) else x for name, x in attributes.items()}
        asked.append((pass_, args[0].dtype.name, args[0].shape[-1], record))
        return custom_call(pass_, target, params, results, *args)

    monkeypatch.setattr(lowering, "_custom_call", note)
    caches = (choice._cuda_unavailable, choice.has_old_gpu, _primitive.partitioning.partitioned)
    for cache in caches:
        cache.cache_clear()
    try:
        for dtype, causal in itertools.product(("float16", "bfloat16", "float32"), (False, True)):
            x = jax.ShapeDtypeStruct((1, 64, 2, head_dim), dtype)
            with jax.default_matmul_precision("default"):
                loss = jax.grad(
                    lambda *a, c=causal: jax_flash.attention(*a, causal=c).astype("float32").sum(), (0, 1, 2)
                )
                jax.jit(loss).trace(x, x, x).lower(lowering_platforms=("cuda",))
    finally:
        for cache in caches:
            cache.cache_clear()
    # Traced for its shapes, and for what one device runs.
    asked = [call for call, _ in itertools.groupby(asked)]
    assert [pass_ for pass_, *_ in asked] == ["forward", "backward"] * 6

    def variant(pass_, dtype, record):
        """What is compiled in: a forward has no dQ, and originals come with descale."""
        told = {name for name, x in record.items() if x is True and (pass_ == "backward" or name != "separate_dq")}
        told = {name for name in told if not name.startswith("has_original")}
        return pass_, dtype, frozenset(told)

    common = _kernels.common(arch)
    built = {
        variant(p, d, o)
        for p in ("forward", "backward")
        for group in common
        for d in group["dtypes"]
        for o in group["options"]
    }
    assert {variant(pass_, dtype, record) for pass_, dtype, _, record in asked} == built
    for _, _, columns, record in asked:
        assert all((columns, columns) in group["head_dims"] for group in common)
        assert (record["window_left"], record["window_right"]) == (2**31 - 1, 2**31 - 1)
        assert record["softcap"] == record["dropout_rate"] == 0


@pytest.mark.xdist_group("prebuilt")
@pytest.mark.parametrize("arch", [70, 75, 80])
def test_an_installed_wheel_serves_prebuilt_kernels_before_nvrtc_is_needed(tmp_path, build_few, arch):
    """As ./run wheel packs them: below the package, beside the compiled library."""
    needs(arch)
    package = tmp_path / "site-packages" / "jax_flash"
    sources = pathlib.Path(jax_flash.__file__).parent
    shutil.copytree(sources, package, ignore=shutil.ignore_patterns("_core*", "kernels", "__pycache__"))
    shutil.copy(_core.__file__, package / "_native")
    shutil.copytree(registration._INSTALLED / "kernels", package / "kernels")
    build_few(package / "prebuilt", arch)
    code = f"""
import sys
sys.meta_path = [x for x in sys.meta_path if isinstance(x, type)]  # without the finder of an editable install
from jax_flash._native import _core, registration
_core.configure_cuda(
    source_dir=str(registration._INSTALLED / "kernels"), prebuilt_dirs=registration.prebuilt_dirs(), nvrtc_paths=[]
)
print(registration.prebuilt_dirs())
for pass_ in ("forward", "backward"):
    print(_core.fetch_kernel(arch={arch}, pass_=pass_, dtype="float16", head_dim=64, value_head_dim=64,
                             options={{"causal": True, "separate_dq": {arch < 80}}}))
"""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_FLASH_")}
    environment |= {"PYTHONPATH": str(package.parent), "JAX_FLASH_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [str([str(package / "prebuilt")]), "prebuilt", "prebuilt"], done.stderr
    assert not (tmp_path / "cache").exists()


# Arguments


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required: COMMAND"),
        (["benchmark"], "invalid choice: 'benchmark'"),
        (["doctor", "--loud"], "unrecognized arguments: --loud"),
        (["kernels"], "required: ACTION"),
        (["kernels", "build", "--arch", "sm_80"], "required: --out"),
        (["kernels", "build", "--out", "x"], "required: --arch"),
        (["kernels", "build", "--arch", "sm_60", "--out", "x"], f"must be one of {ARCHES}, got 'sm_60'"),
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
    assert built == [(80, str(out))] * 2 + [(90, str(out))] * 2
    assert out.is_dir()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["arch", "variant", "registers", "shared", "threads", "spills", "local", "cubin"]
    assert lines[2].split() == ["sm_80", "forward_bf16_d128_causal", "168", "81920", "128", "0", "8", "31488"]
    assert [line.split()[0] for line in lines[2:6]] == ["sm_80", "sm_80", "sm_90", "sm_90"]
    assert lines[6] == f"4 kernels, 0.1 MiB of cubins, in {out}"


def test_kernels_list_shows_every_architecture(built, capsys):
    assert main(["kernels", "list"]) == 0
    assert [arch for arch, _ in built] == [70, 75, 80, 80, 86, 86, 89, 89, 90, 90, 100, 100, 120, 120]
    assert len({folder for _, folder in built}) == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2 + 2 + 6 * 2  # from sm_80 on there are two groups of variants
    counts = [int(count) for count in re.findall(r"(\d+) for sm_\d+", shown.err)]
    assert len(counts) == 8
    assert re.match(rf"compiling {sum(counts)} kernels on {os.cpu_count()} cores, about \d+ (minutes|s): ", shown.err)


def test_kernels_list_of_one_architecture(built):
    assert main(["kernels", "list", "--arch", "sm_89"]) == 0
    assert [arch for arch, _ in built] == [89, 89]


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


def test_kernels_of_a_call_are_built(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its function: what a process that is lowered for this GPU asks for."""
    (tmp_path / "a_step.py").write_text(
        """
import jax
import jax.numpy as jnp
import jax_flash

def loss(query, table):
    for _ in range(2):
        query = jax_flash.attention(query, query, query, score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 64])
    return query.astype(jnp.float32).sum()

def step():
    return jax.grad(loss, (0, 1)), jax.ShapeDtypeStruct((2, 64, 2, 60), "bfloat16"), jnp.ones((2, 128), jnp.float32)
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(_core, "build_kernels", lambda **arguments: built.append(arguments) or [])
    for arch, dtype in ((90, "bfloat16"), (75, "float16")):
        built.clear()
        _kernels.build([arch], tmp_path / "out", ["a_step:step"])
        forward, backward = built
        assert forward["passes"][1:3] == ("forward", "forward_split_kv")
        assert backward["passes"][1] == "backward"
        for call in built:
            assert call["dtypes"] == [dtype]
            assert call["head_dims"] == [(64, 64)]
            assert call["options"][0]["has_descale"] == (arch == 75)
            assert "problem.captured[0]" in call["options"][0]["functions"]
        assert "add_to(problem.dcaptured[0]" in backward["options"][0]["functions"]
        assert not backward["options"][0]["exact_sums"]
    for name in ("a_step", "a_step:loss", "no_step:step"):
        with pytest.raises(ValueError, match="--call must be MODULE:FUNCTION"):
            _kernels.build([90], tmp_path / "out", [name])
