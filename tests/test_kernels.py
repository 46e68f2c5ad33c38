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

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Dynamic shared memory a block may have (CUDA C++ Programming Guide, technical specifications)."""

REGISTERS_PER_BLOCK = 65536

SPILL_GATE = {"forward": 288, "backward": 128}
"""Bytes of spill stores plus loads a thread, with NVRTC 12.9.

The forward at head_dim 128 holds 192 accumulators; with 64 keys it spills 244 bytes and makes 369 TFLOP/s on an H200,
with 32 keys it spills nothing and makes 350. The backward at head_dim 64 and 128 spills a few addresses, 16 to 120
bytes. All other forward kernels spill nothing.
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def build(arch: int) -> list[Mapping[str, Any]]:
        # The two dtypes differ by one instruction's suffix, the architectures by their tile rows and by the assembler.
        dtypes = ["float16", "bfloat16"] if arch == 80 else ["bfloat16"]
        head_dims = [40, 64, 128, 256] if arch in (80, 90) else [64, 128, 256]
        folder: pathlib.Path = tmp_path_factory.mktemp(f"sm_{arch}")
        rows = _core.build_kernels(
            arch=arch,
            out_dir=str(folder),
            dtypes=dtypes,
            head_dims=[(h, h) for h in head_dims],
            options=_kernels_cli.COMMON["options"],
        )
        assert len(list(folder.iterdir())) == len(rows) == 4 * len(dtypes) * len(head_dims)
        return rows

    return build


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_gates(kernels: Any, arch: int) -> None:
    print("\nvariant, registers, shared bytes, threads, spill bytes, local bytes, cubin bytes")
    for kernel in kernels(arch):
        print(*kernel.values(), sep=", ")
        pass_ = "forward" if "-forward-" in kernel["name"] else "backward"
        assert kernel["name"].endswith(f"-sm_{arch}")
        assert 32 < kernel["registers"] <= 255
        assert kernel["registers"] * kernel["threads"] <= REGISTERS_PER_BLOCK
        assert 0 < kernel["shared_bytes"] <= SHARED_LIMIT[arch]
        gate = 0 if pass_ == "forward" and "-d128-" not in kernel["name"] else SPILL_GATE[pass_]
        assert kernel["spill_bytes"] <= gate, kernel["name"]
        assert kernel["local_bytes"] <= gate, kernel["name"]
        assert 0 < kernel["cubin_bytes"] < 1 << 18


def test_every_tile_row_is_compiled(kernels: Any) -> None:
    """The big rows serve 80 and 90, the rows for less shared memory 86 and 89: together, the whole table."""
    shared = {
        (k["name"].split("-")[1], k["name"].split("-")[3], k["shared_bytes"]) for a in (80, 86) for k in kernels(a)
    }
    assert len({s for s in shared if s[:2] == ("forward", "d256")}) == 2
    assert len({s for s in shared if s[:2] == ("backward", "d128")}) == 2
    assert len({s for s in shared if s[:2] == ("backward", "d256")}) == 2


def test_an_architecture_without_kernels_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"no kernels for compute capability 7\.5"):
        _core.build_kernels(arch=75, out_dir=str(tmp_path), **_kernels_cli.COMMON)
