"""Every kernel family compiles through NVRTC for its architectures, and keeps within its gates. No GPU is needed."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

from jax_flash import _core, _kernels_cli, _registration

pytestmark = pytest.mark.skipif(
    not _registration.cuda_status()["nvrtc"], reason="no NVRTC here (the [test] extra installs it on Linux)"
)

SHARED_LIMIT = {70: 96 * 1024, 75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Dynamic shared memory a block may have (CUDA C++ Programming Guide, technical specifications)."""

REGISTERS_PER_BLOCK = 65536

SPILL_GATE = {"forward": 288, "backward": 128}
"""Bytes of spill stores plus loads a thread, with NVRTC 12.9, of the 16-bit kernels without options.

The forward at head_dim 128 holds 192 accumulators; with 64 keys it spills 200 bytes and makes 369 TFLOP/s on an H200,
with 32 keys it spills nothing and makes 350. The backward at head_dim 64 and 128 spills a few addresses, 16 to 80
bytes. All other forward kernels spill nothing.
"""

FLOAT32_GATE = {
    "default": {**SPILL_GATE, "backward_dq": 0},
    "highest": {"forward": 240, "backward": 160, "backward_dq": 160},
}
"""Of float32 on sm_80 and sm_86: "default" is float16 kernels with two factors more, "highest" holds two parts of every
operand. What spills is head_dim 256."""

OLD_GATE = {
    "sm_70": {"forward": (0, 0, 0), "backward": (0, 208, 364), "backward_dq": (0, 0, 200)},
    "sm_75": {"forward": (0, 0, 220), "backward": (48, 216, 2400), "backward_dq": (0, 0, 216)},
}
"""Of the families for old GPUs at head_dim 64, 128 and 256. Their backward kernels keep the rows that come next in
registers, and above head_dim 64 there is no room for all of them; at 256 Turing's 64 KB leave two warps to a block."""

OPTION_GATE = {"forward": 328, "backward": 300}
"""With one option, at head_dim 128. `window` takes most forward, the gradient of `bias` backward."""

ON = {
    "window": {"window_left": 5, "window_right": 7},
    "softcap": {"softcap": 2.0},
    "bias": {"has_bias": True, "has_dbias": True},
    "alibi_slopes": {"has_alibi_slopes": True, "has_dalibi_slopes": True},
    "sinks": {"has_sinks": True},
    "dropout": {"dropout_rate": 0.1, "has_dropout_seeds": True},
    "mask": {"has_mask": True},
    "segments": {f"has_{side}_segment_{what}": True for side in ("q", "kv") for what in ("ids", "ranges")},
    "lengths": {"has_q_lengths": True, "has_kv_lengths": True},
    "documents": {"has_cu_q_lengths": True, "has_cu_kv_lengths": True},
}
"""Every option alone, as the kernels know it."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def build(arch: int) -> list[Mapping[str, Any]]:
        # The two dtypes differ by one instruction's suffix, the architectures by their tile rows and by the assembler.
        dtypes = ["float16", "bfloat16"] if arch == 80 else ["bfloat16"]
        head_dims = {80: [40, 64, 128, 256], 86: [64, 128, 256], 89: [128], 90: [40, 64, 128, 256]}[arch]
        folder: pathlib.Path = tmp_path_factory.mktemp(f"sm_{arch}")
        options = _kernels_cli.COMMON["options"]
        rows = compiled(arch, folder, dtypes=dtypes, head_dims=head_dims, options=options)
        assert len(list(folder.iterdir())) == len(rows) == 4 * len(dtypes) * len(head_dims)
        return rows

    return build


def compiled(arch: int, folder: pathlib.Path, *, dtypes: Any, head_dims: Any, options: Any) -> list[Mapping[str, Any]]:
    print("\nvariant, registers, shared bytes, threads, spill bytes, local bytes, cubin bytes")
    head_dims = [(h, h) for h in head_dims]
    rows = _core.build_kernels(arch=arch, out_dir=str(folder), dtypes=dtypes, head_dims=head_dims, options=options)
    for kernel in rows:
        print(*kernel.values(), sep=", ")
        assert kernel["name"].endswith(f"-sm_{arch}")
        assert 32 < kernel["registers"] <= 255
        assert kernel["registers"] * kernel["threads"] <= REGISTERS_PER_BLOCK
        assert 0 < kernel["shared_bytes"] <= SHARED_LIMIT[arch]
        assert 0 < kernel["cubin_bytes"] < 1 << 18
    return rows


def pass_of(kernel: Mapping[str, Any]) -> str:
    return str(kernel["name"]).split("-")[1]


@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_gates(kernels: Any, arch: int) -> None:
    for kernel in kernels(arch):
        gate = 0 if pass_of(kernel) == "forward" and "-d128-" not in kernel["name"] else SPILL_GATE[pass_of(kernel)]
        assert kernel["spill_bytes"] <= gate, kernel["name"]
        assert kernel["local_bytes"] <= gate, kernel["name"]


@pytest.mark.parametrize("precision", FLOAT32_GATE)
@pytest.mark.parametrize("arch", [80, 86])
def test_gates_of_float32(arch: int, precision: str, tmp_path: pathlib.Path) -> None:
    options = [{"has_unscales": True, "highest_precision": precision == "highest"}]
    head_dims = {("default", 80): [64, 128, 256], ("highest", 80): [64, 128, 256], ("default", 86): [128, 256]}
    rows = compiled(
        arch, tmp_path, dtypes=["float16"], head_dims=head_dims.get((precision, arch), [128]), options=options
    )
    for kernel in rows:
        assert kernel["spill_bytes"] <= FLOAT32_GATE[precision][pass_of(kernel)], kernel["name"]


@pytest.mark.parametrize("arch", OLD_GATE)
def test_gates_of_old_gpus(arch: str, tmp_path: pathlib.Path) -> None:
    head_dims = (64, 128, 256)
    options = [{"deterministic": True}, {"deterministic": True, "has_unscales": True}]
    number = _kernels_cli.ARCHES[arch]
    rows = compiled(number, tmp_path, dtypes=["float16"], head_dims=head_dims, options=options)
    assert len(rows) == 3 * len(head_dims) * len(options)
    for kernel in rows:
        gate = OLD_GATE[arch][pass_of(kernel)][head_dims.index(kernel["head_dim"])]
        assert kernel["spill_bytes"] <= gate, kernel["name"]
        assert kernel["shared_bytes"] <= SHARED_LIMIT[number], kernel["name"]


def test_what_kernels_are_not_for_is_refused(tmp_path: pathlib.Path) -> None:
    def build(arch: int, dtype: str, **options: bool) -> None:
        _core.build_kernels(arch=arch, out_dir=str(tmp_path), dtypes=[dtype], head_dims=[(64, 64)], options=[options])

    with pytest.raises(ValueError, match="float32 comes as float16 with unscales"):
        build(80, "float32")
    with pytest.raises(ValueError, match="kernels of sm75 are for float16"):
        build(75, "bfloat16")
    with pytest.raises(ValueError, match="two parts, which come with unscales"):
        build(80, "float16", highest_precision=True)


def test_gates_of_options(tmp_path: pathlib.Path) -> None:
    rows = compiled(80, tmp_path, dtypes=["bfloat16"], head_dims=[128], options=list(ON.values()))
    assert len(rows) == 2 * len(ON)
    for kernel in rows:
        assert kernel["spill_bytes"] <= OPTION_GATE[pass_of(kernel)], kernel["name"]


def test_every_tile_row_is_compiled(kernels: Any) -> None:
    """The big rows serve 80 and 90, the rows for less shared memory 86 and 89: together, the whole table."""
    shared = {
        (k["name"].split("-")[1], k["name"].split("-")[3], k["shared_bytes"]) for a in (80, 86) for k in kernels(a)
    }
    assert len({s for s in shared if s[:2] == ("forward", "d256")}) == 2
    assert len({s for s in shared if s[:2] == ("backward", "d128")}) == 2
    assert len({s for s in shared if s[:2] == ("backward", "d256")}) == 2


def test_an_architecture_without_kernels_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"no kernels for compute capability 6\.0"):
        _core.build_kernels(arch=60, out_dir=str(tmp_path), **_kernels_cli.COMMON)
