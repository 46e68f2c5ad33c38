"""Every kernel family compiles through NVRTC for its architectures, and keeps within its gates. No GPU is needed."""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import gallery
import pytest
from machine_code import sass

from jax_flash._native import _core, origins, registration
from jax_flash._tools import kernels as _kernels

pytestmark = pytest.mark.skipif(
    not registration.cuda_status()["nvrtc"], reason="no NVRTC here (the [test] extra installs it on Linux)"
)

one_process = pytest.mark.xdist_group("kernels")
one_process_of_hopper = pytest.mark.xdist_group("hopper")
"""Of the tests that look at the same kernels."""

SHARED_LIMIT = {70: 96 * 1024, 75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Dynamic shared memory a block may have (CUDA C++ Programming Guide, technical specifications)."""

REGISTERS_PER_BLOCK = 65536

SPILL_GATE = {"forward": 288, "backward": 128}
"""Bytes of spill stores plus loads a thread, with NVRTC 12.9, of the 16-bit kernels without options.

The rows that an H200 takes spill nothing. Of those for less shared memory the forward at head_dim 128 and the backward
at 64 and 128 spill a few addresses.
"""

FLOAT32_GATE = {
    "default": {**SPILL_GATE, "backward": 152, "backward_dq": 40},
    "highest": {"forward": 240, "backward": 184, "backward_dq": 208},
}
"""Of float32 on sm_80 and sm_86: "default" is float16 kernels with two factors more, "highest" holds two limbs of every
operand. What spills is head_dim 256."""

OLD_WARPS = {
    70: {("backward", 256): 4, ("backward_dq", 160): 6, ("backward_dq", 192): 6, ("backward_dq", 256): 4},
    75: {
        ("forward", 256): 4,
        ("backward", 96): 6,
        ("backward", 160): 4,
        ("backward", 192): 4,
        ("backward", 256): 4,
        ("backward_dq", 96): 4,
        ("backward_dq", 128): 4,
        ("backward_dq", 160): 4,
        ("backward_dq", 192): 4,
        ("backward_dq", 256): 3,
    },
}
"""Warps that a multiprocessor has at a time, where shared memory has no room for 8: two for each of its partitions."""

OPTION_GATE = {80: {"forward": 328, "backward": 352}, 90: {"forward": 200, "backward": 216}}
"""With one option, at head_dim 128. Of sm_80, `window` takes most forward, `segments` backward; of sm_90,
`segments` forward, and backward these and the gradient of `alibi_slopes`, where most options spill nothing."""

ON = {
    "window": {"window_left": 5, "window_right": 7},
    "arrays": {"has_traced_scale": True, "has_window_bounds": True},
    "softcap": {"softcap": 2.0},
    "bias": {"has_bias": True, "has_dbias": True},
    "alibi_slopes": {"has_alibi_slopes": True, "has_dalibi_slopes": True},
    "sinks": {"has_sinks": True},
    "dropout": {"dropout_rate": 0.1, "has_dropout_seeds": True},
    "mask": {"has_mask": True},
    "segments": {f"has_{side}_segment_{what}": True for side in ("q", "kv") for what in ("ids", "ranges")},
    "lengths": {"has_q_lengths": True, "has_kv_lengths": True},
    "sequences": {"has_cu_q_lengths": True, "has_cu_kv_lengths": True},
}
"""Every option alone, as the kernels know it."""

LIGHT = (("window", "softcap", "sinks"), ("alibi_slopes", "sequences", "arrays"), ("segments", "lengths"))
GROUPED = {
    **{" ".join(names): {key: x for name in names for key, x in ON[name].items()} for names in LIGHT},
    **{name: ON[name] for name in ("bias", "dropout", "mask")},
}
"""Every option, for kernels that spill nothing: those that take few registers together, in 6 kernels instead of 11."""


WITH_FLOAT32 = ("forward", "forward_split_kv", "backward", "backward_bias")
"""The passes that have kernels for heads that are computed in float32 beside their own."""

LONG = ("forward", "backward", "backward_dq")
"""The passes but for split-KV and single-tile, which have gates of their own."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def build(arch: int) -> list[Mapping[str, Any]]:
        # The dtypes differ by one instruction's suffix, the architectures by their tile rows and by the assembler.
        head_dims = {80: [40, 64, 128, 256], 86: [64, 128, 256], 89: [128], 90: [40, 64, 128, 256]}[arch]
        folder: pathlib.Path = tmp_path_factory.mktemp(f"sm_{arch}")
        options = _kernels.COMMON[0]["options"]
        family = "sm80" if arch == 90 else ""
        rows = compiled(arch, folder, dtypes=["bfloat16"], head_dims=head_dims, options=options, family=family)
        assert len(list(folder.iterdir())) == len(rows) == 4 * len(head_dims)
        return rows

    return build


def compiled(
    arch: int,
    folder: pathlib.Path,
    *,
    dtypes: Any,
    head_dims: Any,
    options: Any,
    family: str = "",
    passes: Any = LONG,
) -> list[Mapping[str, Any]]:
    print("\nvariant, registers, shared bytes, threads, spill bytes, local bytes, cubin bytes")
    head_dims = [(h, h) for h in head_dims]
    rows = _core.build_kernels(
        arch=arch,
        out_dir=str(folder),
        dtypes=dtypes,
        head_dims=head_dims,
        options=options,
        family=family,
        passes=passes,
    )
    for kernel in rows:
        print(*kernel.values(), sep=", ")
        assert kernel["name"].endswith(f"-sm_{arch}")
        assert 32 < kernel["registers"] <= 255
        assert kernel["registers"] * kernel["threads"] <= REGISTERS_PER_BLOCK
        assert 0 < kernel["shared_bytes"] <= SHARED_LIMIT[arch]
        assert 0 < kernel["cubin_bytes"] < 1 << (19 if "-functions-" in kernel["name"] else 18)
        # The kernels for heads that are computed in float32 are one code for all families, and never the hot one.
        assert (kernel["float32_registers"] > 0) == ("-descale" in kernel["name"] and kernel["pass"] in WITH_FLOAT32)
        assert kernel["float32_local_bytes"] == 0, kernel["name"]
    return rows


def pass_of(kernel: Mapping[str, Any]) -> str:
    return str(kernel["name"]).split("-")[1]


@pytest.mark.by_turns(2)
@one_process
@pytest.mark.parametrize("arch", [80, *(pytest.param(x, marks=pytest.mark.slow(9)) for x in (86, 89)), 90])
def test_gates(kernels: Any, arch: int) -> None:
    for kernel in kernels(arch):
        gate = 0 if pass_of(kernel) == "forward" and "-d128-" not in kernel["name"] else SPILL_GATE[pass_of(kernel)]
        assert kernel["spill_bytes"] <= gate, kernel["name"]
        assert kernel["local_bytes"] <= gate, kernel["name"]


HOPPER_GATE = {
    ("forward", 64): {"ordered_dq-window": 8},
    ("forward", 128): {"ordered_dq-window": 8},
    ("forward", 256): {"mask": 16, "segments": 28},
    ("backward_dq", 256): {"segments": 44},
}
"""Bytes of spill stores plus loads of sm90a's kernels by pass, head_dim and option, with NVRTC 12.9. All others spill
nothing."""

HOPPER_OPTIONS = [
    (64, ["plain", "causal", "descale", "scale", *GROUPED]),
    (128, ["plain", "causal", "descale"]),
    (256, ["plain", "causal", "descale", "bias", "mask", "dropout", "segments"]),
    (64, ["separate_dq"]),
    (128, ["separate_dq"]),
    *(
        (head_dim, ["ordered_dq", "ordered_dq-causal", "ordered_dq-window", "ordered_dq-packed", "ordered_dq-dropout"])
        for head_dim in (64, 128)
    ),
    *((head_dim, ["plain"]) for head_dim in (40, 96, 192)),
]
"""By head_dim; the options at 128 are those of OPTION_GATE. Beyond 128 dQ always has a pass of its own."""


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Mapping[str, Any]]]:
    """Kernels of sm90a, each with the name of its option."""
    flags = {"plain": {}, "causal": {"causal": True}, "descale": {"has_descale": True}}
    flags["scale"] = {"has_traced_scale": True, "causal": True}
    ordered = {"separate_dq": True, "ordered_dq": True}
    flags["separate_dq"] = {"separate_dq": True}
    flags["ordered_dq"], flags["ordered_dq-causal"] = ordered, ordered | {"causal": True}
    packed = {"has_cu_q_lengths": True, "has_cu_kv_lengths": True, "causal": True}
    window = {"causal": True, "window_left": 512}
    on = flags | {"ordered_dq-packed": ordered | packed, "ordered_dq-window": ordered | window} | ON | GROUPED
    on["ordered_dq-dropout"] = ordered | ON["dropout"]
    folder = tmp_path_factory.mktemp("hopper")
    found = []
    for head_dim, names in HOPPER_OPTIONS:
        rows = compiled(90, folder, dtypes=["float16"], head_dims=[head_dim], options=[on[name] for name in names])
        split = head_dim > 128 or names == ["separate_dq"]
        # Blocks of two sizes, of the forward and of the backward.
        short = flags if head_dim <= 64 else ()
        tall = ("plain", "causal") if 64 < head_dim <= 128 else ()
        of_rows = [name for sizes in (short, tall) for name in names for _ in range(1 + (name in sizes))]
        found += zip([*of_rows, *(names if split else ())], rows, strict=True)
    return found


@one_process_of_hopper
@pytest.mark.slow(70)
def test_gates_of_hopper(hopper: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Nor may products wait for each other, or registers stay where they are, of which the assembler complains."""
    failed = []
    for name, kernel in hopper:
        assert kernel["name"].startswith("sm90a-")
        gate = HOPPER_GATE.get((kernel["pass"], kernel["head_dim"]), {}).get(name, 0)
        if kernel["spill_bytes"] > gate or kernel["local_bytes"] > gate or kernel["compiler_warnings"]:
            spilled = f"{kernel['spill_bytes']} bytes spilled, {kernel['local_bytes']} local"
            failed.append(f"{kernel['name']}: {spilled} {kernel['compiler_warnings']}")
    assert not failed, "\n".join(failed)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("pass_", LONG)
@pytest.mark.parametrize("arch", [70, 75, 80, 86, 90])
def test_every_tile_row_has_room(arch: int, pass_: str, tmp_path: pathlib.Path) -> None:
    """Of plain calls, in shared memory: Turing's backward at head_dim 96 once had not, beside additions to dQ."""
    largest: dict[tuple[int, ...], int] = {}
    for head_dim in range(8, 257, 8):
        row = _core.tile_row(arch=arch, pass_=pass_, head_dim=head_dim)["row"]
        largest[tuple(row[name] for name in _core.TILE_FIELDS)] = head_dim
    options = {"separate_dq": pass_ == "backward_dq"}
    dtypes = ["float16" if arch < 80 else "bfloat16"]
    rows = compiled(arch, tmp_path, dtypes=dtypes, head_dims=largest.values(), options=[options], passes=[pass_])
    assert {kernel["head_dim"] for kernel in rows} == set(largest.values())


@pytest.mark.slow(20)
@pytest.mark.parametrize("pass_", LONG)
@pytest.mark.parametrize("arch", [70, 75, 80, 90])
def test_gates_of_listed_keys(arch: int, pass_: str, tmp_path: pathlib.Path) -> None:
    """Hopper's warps that load have few registers, and copy rows in few instructions; all of the others' load."""
    options = {"has_kv_lengths": True, "has_kv_rows": True}
    on = [options, options | {"separate_dq": True}] if pass_ != "forward" else [options]
    head_dims = [40, 64, 96, 128, 192, 256]
    dtypes = ["float16" if arch < 80 else "bfloat16"]
    rows = compiled(arch, tmp_path, dtypes=dtypes, head_dims=head_dims, options=on, passes=[pass_])
    assert len(rows) >= len(head_dims)
    gate = {75: 32, 80: 64}.get(arch, 0)
    for kernel in rows:
        assert not kernel["compiler_warnings"]
        assert max(kernel["spill_bytes"], kernel["local_bytes"]) <= gate, kernel["name"]


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [
        pytest.param(arch, head_dim, marks=() if (arch, head_dim) == (75, 64) else pytest.mark.slow(15))
        for arch in (75, 70, 80, 90)
        for head_dim in (64, 256)
    ],
)
def test_gates_of_heads_in_float32(arch: int, head_dim: int, tmp_path: pathlib.Path) -> None:
    """They spill nothing, but with all options at head_dim 256 a few addresses."""
    names = ("bias", "alibi_slopes", "softcap", "dropout", "mask", "segments", "lengths", "arrays")
    most = {name: x for option in names for name, x in ON[option].items()}
    packed = {**ON["sequences"], **ON["alibi_slopes"], "original_bfloat16": True}
    for kernel in _core.build_kernels(
        arch=arch,
        out_dir=str(tmp_path),
        dtypes=["float16"],
        head_dims=[(head_dim, head_dim)],
        options=[{"causal": True, "has_descale": True, "separate_dq": True, **on} for on in ({}, most, packed)],
        family="",
        passes=("forward", "backward", "backward_bias"),
    ):
        print(kernel["name"], kernel["float32_registers"], kernel["float32_local_bytes"])
        assert 0 < kernel["float32_registers"] <= 255
        gate = 96 if head_dim == 256 and "-mask-" in kernel["name"] else 0
        assert kernel["float32_local_bytes"] <= gate, kernel["name"]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("arch", [70, 75, 80, 90])
def test_gates_of_scale(arch: int, tmp_path: pathlib.Path) -> None:
    """Two blocks of a multiprocessor, at few spills; three sizes serve all head dims, and there is one of each."""
    options = [{"has_descale": True, "highest_precision": x, "causal": y} for x in (False, True) for y in (False, True)]
    options += [x | {"original_bfloat16": True} for x in options[:2] if arch < 80]
    head_dims = [(40, 64), (96, 128), (128, 24), (256, 256)]
    on = {"dtypes": ["float16"], "head_dims": head_dims, "options": options, "passes": ["scale"]}
    rows = _core.build_kernels(arch=arch, out_dir=str(tmp_path), family="", **on)
    assert len(rows) == len({kernel["name"] for kernel in rows}) == 3 * (3 if arch < 80 else 2)
    for kernel in rows:
        print(kernel["name"], kernel["registers"], kernel["spill_bytes"], kernel["local_bytes"])
        assert 2 * kernel["registers"] * kernel["threads"] <= REGISTERS_PER_BLOCK
        # On 7.0 the list of kept rows takes 28 bytes more, of kernels that wait for memory.
        assert kernel["spill_bytes"] <= (136 if arch == 70 else 108), kernel["name"]


@pytest.mark.slow(10)
@pytest.mark.parametrize("precision", FLOAT32_GATE)
@pytest.mark.parametrize("arch", [80, 86])
def test_gates_of_float32(arch: int, precision: str, tmp_path: pathlib.Path) -> None:
    options = [{"has_descale": True, "highest_precision": precision == "highest"}]
    head_dims = {("default", 80): [64, 128, 256], ("highest", 80): [64, 128, 256], ("default", 86): [128, 256]}
    rows = compiled(
        arch, tmp_path, dtypes=["float16"], head_dims=head_dims.get((precision, arch), [128]), options=options
    )
    for kernel in rows:
        assert kernel["spill_bytes"] <= FLOAT32_GATE[precision][pass_of(kernel)], kernel["name"]


def nvrtcs(arch: int) -> list[str]:
    """The installed NVRTC libraries that compile for an architecture, as the status record has them."""
    return [entry for entry in registration.cuda_status()["nvrtc"] if origins.nvrtc_for(arch, [entry])]


COMPILE = """
import json, pathlib, sys
from jax_flash._native import _core
nvrtc, arch, folder, variants, passes = json.loads(sys.argv[1])
source_dir = pathlib.Path(_core.__file__).parent.parent / "kernels"
_core.configure_cuda(source_dir=str(source_dir), prebuilt_dirs=[], nvrtc_paths=[nvrtc])
rows = []
for head_dim, options in variants:
    head_dims = [(head_dim, head_dim)]
    kernels = _core.build_kernels(
        arch=arch, out_dir=folder, dtypes=["float16"], head_dims=head_dims, options=options, passes=passes
    )
    rows += kernels
print(json.dumps([_core.cuda_status()["nvrtc"][0], rows]))
"""
"""One of several NVRTC libraries needs a process of its own: a process uses the first it finds."""


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("arch", "nvrtc"),
    [(arch, nvrtc) for arch in OLD_WARPS for nvrtc in nvrtcs(arch)],
    ids=lambda x: str(x).split(" ", maxsplit=1)[0],
)
@pytest.mark.parametrize(
    "widths", [(128,), *(pytest.param(x, marks=pytest.mark.slow(22)) for x in ((40, 64, 96), (160, 192, 256)))]
)
def test_gates_of_old_gpus(arch: int, nvrtc: str, widths: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    """Nothing is spilled, whatever the option: what would spill with options has another row for calls without
    (`plain` in tiles.h). With the backward that is the default there, the one without atomic additions."""
    plain = {"plain": {}, "scaled": {"causal": True, "has_descale": True}}
    heavy = {name: ON[name] for name in ("bias", "mask", "dropout")}
    of_head_dim: dict[int, dict[str, dict[str, Any]]] = {
        **{head_dim: {"plain": {}} for head_dim in (96, 160, 192)},
        40: plain,
        64: plain | heavy,
        128: plain | GROUPED,
        256: plain | heavy,
    }
    of_head_dim = {head_dim: of_head_dim[head_dim] for head_dim in widths}
    path = nvrtc[nvrtc.index("(") + 1 : -1]
    variants = [(h, [{"separate_dq": True, **on} for on in named.values()]) for h, named in of_head_dim.items()]
    argument = json.dumps([path, arch, str(tmp_path), variants, LONG])
    done = subprocess.run([sys.executable, "-c", COMPILE, argument], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used, rows = json.loads(done.stdout)
    assert used == nvrtc
    assert len(rows) == 3 * sum(map(len, of_head_dim.values()))
    print(f"\n{nvrtc}: variant, registers, shared bytes, threads, spill bytes, local bytes, warps")
    failed = []
    for kernel in rows:
        key = kernel["pass"], kernel["head_dim"]
        registers, threads, spilled = kernel["registers"], kernel["threads"], kernel["spill_bytes"]
        blocks = min(
            REGISTERS_PER_BLOCK // (-(-registers // 8) * 8 * threads), SHARED_LIMIT[arch] // kernel["shared_bytes"]
        )
        warps = blocks * threads // 32
        print(
            *(kernel[x] for x in ("name", "registers", "shared_bytes", "threads", "spill_bytes", "local_bytes")), warps
        )
        spilled += kernel["float32_local_bytes"]
        if spilled or kernel["local_bytes"] or warps < OLD_WARPS[arch].get(key, 8):
            failed.append(f"{kernel['name']}: {spilled} bytes spilled, {kernel['local_bytes']} local, {warps} warps")
        assert kernel["cubin_bytes"] < 1 << 18
    assert not failed, "\n".join(failed)


@pytest.mark.slow(14)
@pytest.mark.parametrize(("arch", "dtype"), [(70, "float16"), (75, "float16"), (80, "bfloat16"), (86, "float16")])
def test_gates_of_split_kv(arch: int, dtype: str, tmp_path: pathlib.Path) -> None:
    """Nothing is spilled, whatever the option, and each number of rows has its kernel."""
    causal = {"causal": True, "has_descale": arch < 80}
    heavy = [causal, ON["bias"], ON["dropout"], ON["segments"]]
    tried: dict[int, dict[int, list[Any]]] = {
        80: {64: [causal], 128: [causal, *GROUPED.values()], 256: heavy},
        86: {256: [causal, ON["bias"]]},  # below as on 80
        75: {64: heavy, 128: heavy},  # beyond by the forward for many queries
        70: {64: heavy, 128: heavy},
    }
    for head_dim, options in tried[arch].items():
        rows = compiled(
            arch,
            tmp_path,
            dtypes=[dtype],
            head_dims=[head_dim],
            options=options,
            passes=["forward_split_kv"],
        )
        assert {(kernel["pass"], kernel["block_q"]) for kernel in rows} == {
            ("forward_split_kv", 16),
            ("forward_split_kv", 64),
        }
        assert len(rows) == 2 * len(options)
        for kernel in rows:
            assert kernel["spill_bytes"] == kernel["local_bytes"] == 0, kernel["name"]


def test_gates_of_single_tile(tmp_path: pathlib.Path) -> None:
    """Nothing is spilled, and calls with options or other head dims have no kernel of theirs."""
    for arch in (80, 90):
        rows = compiled(
            arch,
            tmp_path,
            dtypes=["bfloat16"],
            head_dims=[16, 64, 72, 80],
            options=[{}, {"causal": True}, ON["sinks"], ON["lengths"]],
            passes=["forward_single_tile"],
        )
        assert {(kernel["pass"], kernel["head_dim"]) for kernel in rows} == {
            ("forward_single_tile", 16),
            ("forward_single_tile", 64),
        }
        assert len(rows) == 4
        for kernel in rows:
            assert kernel["spill_bytes"] == kernel["local_bytes"] == 0, kernel["name"]
    assert not compiled(75, tmp_path, dtypes=["float16"], head_dims=[64], options=[{}], passes=["forward_single_tile"])


SHARED_BIAS_GATE = {(80, 128): 16, (80, 256): 24}
"""Bytes of spill stores plus loads of the pass for a bias that is shared, by compute capability and head_dim, for
float32 of two limbs. All others spill nothing."""


@pytest.mark.slow(15)
@pytest.mark.parametrize(("arch", "dtype"), [(70, "float16"), (75, "float16"), (80, "bfloat16"), (86, "float16")])
def test_gates_of_shared_bias(arch: int, dtype: str, tmp_path: pathlib.Path) -> None:
    bias = {"separate_dq": True, **ON["bias"]}
    heavy = {name: ON[name] for name in ("window", "softcap", "dropout", "mask", "segments", "alibi_slopes")}
    variants = {
        64: [bias | on for on in ({}, *heavy.values())],
        128: [bias | on for on in ({}, *heavy.values())],
        256: [bias | on for on in ({}, heavy["window"], heavy["dropout"])],
    }
    for head_dim, options in variants.items():
        two_limbs = [bias | {"has_descale": True, "highest_precision": True}] * (arch != 86)
        if head_dim == 256 and arch < 80:
            two_limbs = []
        on = {"dtypes": [dtype], "head_dims": [head_dim], "passes": ["backward_bias"]}
        rows = compiled(arch, tmp_path, options=options, **on)
        rows += compiled(arch, tmp_path, options=two_limbs, **(on | {"dtypes": ["float16"]}))
        assert len(rows) == len(options) + len(two_limbs)
        for kernel in rows:
            assert kernel["pass"] == "backward_bias"
            gate = SHARED_BIAS_GATE.get((arch, head_dim), 0) if "highest_precision" in kernel["name"] else 0
            assert kernel["spill_bytes"] <= gate, kernel["name"]
            assert kernel["local_bytes"] <= gate, kernel["name"]


def test_what_kernels_are_not_for_is_refused(tmp_path: pathlib.Path) -> None:
    def build(arch: int, dtype: str, **options: bool) -> None:
        _core.build_kernels(arch=arch, out_dir=str(tmp_path), dtypes=[dtype], head_dims=[(64, 64)], options=[options])

    with pytest.raises(ValueError, match="float32 is passed as float16 with descale"):
        build(80, "float32")
    with pytest.raises(ValueError, match="kernels of sm75 take float16 only"):
        build(75, "bfloat16")
    with pytest.raises(ValueError, match="needs float16 arrays of two limbs"):
        build(80, "float16", highest_precision=True)


@pytest.mark.slow(20)
@pytest.mark.parametrize("arch", OPTION_GATE)
def test_gates_of_options(arch: int, tmp_path: pathlib.Path) -> None:
    rows = compiled(arch, tmp_path, dtypes=["bfloat16"], head_dims=[128], options=list(ON.values()))
    assert len(rows) == 2 * len(ON)
    for kernel in rows:
        assert kernel["spill_bytes"] <= OPTION_GATE[arch][pass_of(kernel)], kernel["name"]


def test_lanes_further_on_are_asked_by_the_family() -> None:
    """sm_70 numbers them otherwise, and no test without such a GPU notices."""
    by_distance = re.compile(r"__shfl_(?:down|up)_sync")
    sources = pathlib.Path(__file__).parent.parent / "csrc" / "cuda"
    asked = [x.name for x in sources.rglob("*.cu*") if by_distance.search(x.read_text(encoding="utf-8"))]
    assert asked == ["hardware_lanes.cuh"]


INTERVALS = {f"has_{side}_interval{what}": True for side in ("kv", "q") for what in ("s", "_ranges")}
BLOCKS = {"partial": "sequences"}
FUNCTION_GATE: dict[str, tuple[int, int, dict[str, Any], dict[str, int]]] = {
    "blocks-80-64": (80, 64, BLOCKS, {"forward": 0, "backward": 0}),
    "blocks-80-128": (80, 128, BLOCKS, {"forward": 436, "backward": 288, "forward_split_kv": 0}),
    "blocks-90-128": (90, 128, BLOCKS, {"forward": 0, "backward": 0}),
    "blocks-alibi-90-64": (90, 64, {"mask": "window", "has_alibi_slopes": True, **BLOCKS}, {"forward": 0}),
    "blocks-alibi-90-128": (90, 128, {"mask": "window", "has_alibi_slopes": True, **BLOCKS}, {"forward": 0}),
    "intervals-80-64": (80, 64, INTERVALS, {"forward": 0, "backward": 0}),
    "intervals-80-128": (80, 128, INTERVALS, {"forward": 136, "backward": 272, "forward_split_kv": 0}),
    "intervals-90-128": (90, 128, INTERVALS, {"forward": 8, "backward": 48}),
    "graphormer-80-64": (80, 64, {"score": "graphormer"}, {"forward": 48, "backward": 104}),
    "graphormer-90-64": (90, 64, {"score": "graphormer"}, {"forward": 0, "backward": 0}),
    "relative-80-64": (80, 64, {"score": "relative"}, {"forward": 0, "backward": 240}),
    "relative-90-128": (90, 128, {"score": "relative"}, {"forward": 0, "backward": 0}),
    "buckets-80-128": (80, 128, {"score": "buckets"}, {"forward": 16, "backward": 120}),
    "buckets-90-128": (90, 128, {"score": "buckets"}, {"forward": 0, "backward": 0}),
    "alibi-80-64": (80, 64, {"score": "alibi"}, {"backward": 0}),
    "alibi-90-128": (90, 128, {"score": "alibi"}, {"backward": 0}),
    "sides-80-64": (80, 64, {"score": "sides"}, {"backward": 20}),
    "sides-90-64": (90, 64, {"score": "sides"}, {"backward": 0}),
    "capped-90-128": (90, 128, {"score": "capped"}, {"backward": 784}),
}
"""Bytes of spill stores plus loads with functions and intervals, by compute capability, head_dim and pass, with NVRTC
12.9. What spills at head_dim 128 on sm_80 does so beside the pairs of a partial tile; what intervals spill on sm_90 is
in the warp that loads, which has few registers, but for 16 bytes where the next query head begins."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in ("blocks-alibi-90-64", "relative-80-64") else pytest.mark.slow)
        for x in FUNCTION_GATE
    ],
)
def test_gates_of_functions(name: str, tmp_path: pathlib.Path) -> None:
    arch, head_dim, on, gates = FUNCTION_GATE[name]
    functions = {key: on[key] for key in ("score", "mask", "partial") if key in on}
    for kernel_pass, gate in gates.items():
        options = {key: x for key, x in on.items() if key not in functions}
        if functions:
            options["functions"] = gallery.source(**functions, derives=kernel_pass == "backward")
        if "partial" in functions:
            options["has_mask_blocks"] = True
        on_pass = {"dtypes": ["bfloat16"], "head_dims": [head_dim], "options": [options], "passes": [kernel_pass]}
        for kernel in compiled(arch, tmp_path, **on_pass):
            assert kernel["spill_bytes"] <= gate, kernel["name"]
            assert not kernel["compiler_warnings"], kernel["name"]


def machine_code_of(kernel: Mapping[str, Any]) -> sass.Function:
    try:
        return sass.disassemble(pathlib.Path(kernel["path"]))[f"jax_flash_{kernel['pass']}"]
    except sass.DisassemblerMissing as error:
        pytest.skip(f"no disassembler of NVIDIA's, which reads machine code: {error}")


def test_what_a_row_or_a_key_decides_is_read_once_for_its_pairs(tmp_path: pathlib.Path) -> None:
    """A lane has 4 rows and 16 keys of a tile, 64 pairs: ids[q] == ids[kv] adds 20 loads to a mask without any."""
    loads = []
    for mask in ("causal", "sequences"):
        options = {"functions": gallery.source(partial=mask), "has_mask_blocks": True}
        on = {"dtypes": ["bfloat16"], "head_dims": [(64, 64)], "options": [options], "passes": ["forward"]}
        (kernel,) = _core.build_kernels(arch=80, out_dir=str(tmp_path), **on)
        function = machine_code_of(kernel)
        loads.append(sum(instruction.base == "LDG" for instruction in function.instructions))
    assert 0 < loads[1] - loads[0] <= 20


@pytest.mark.parametrize("kernel_pass", ["forward", "backward"])
def test_keys_are_read_at_constant_distances(kernel_pass: str, tmp_path: pathlib.Path) -> None:
    """A lane of Hopper's forward has 64 pairs of 32 keys, of its backward 32 of 16 rows; both are in the code twice.
    Where no tile ends beyond the array, ids[q] == ids[kv] takes a load for each key (or row) and a comparison for each
    pair beside what causal takes, and no address for each: 224 and 216 instructions; with addresses 472 and 328."""
    counts = []
    for mask in ("causal", "sequences"):
        text = gallery.source(partial=mask, derives=kernel_pass == "backward", lengths={"q": 256, "kv": 256})
        options = {"functions": text, "has_mask_blocks": True}
        (kernel,) = compiled(90, tmp_path, dtypes=["bfloat16"], options=[options], head_dims=[64], passes=[kernel_pass])
        counts.append(len(machine_code_of(kernel).instructions))
    assert 0 < counts[1] - counts[0] <= 240


def test_two_keys_of_a_table_of_bytes_are_one_load(tmp_path: pathlib.Path) -> None:
    """A lane of Hopper's forward has 64 pairs of a tile, which stand in its code twice. Where a row of the table has an
    odd number of elements each takes a load."""
    loads = []
    for mask in ("causal", "drafts", "tree"):
        options = {"functions": gallery.source(partial=mask), "has_mask_blocks": True}
        (kernel,) = compiled(90, tmp_path, dtypes=["bfloat16"], options=[options], head_dims=[64], passes=["forward"])
        loads.append(sum(x.base == "LDG" for x in machine_code_of(kernel).instructions))
    assert loads[1] - loads[0] == 2 * 32
    assert loads[2] - loads[0] == 2 * 64


@pytest.mark.parametrize(
    ("name", "kernel_pass"),
    [
        pytest.param(*x, marks=() if x == ("segments", "backward") else pytest.mark.slow)
        for x in itertools.product(("segments", "intervals", "blocks"), ("forward", "backward", "backward_dq"))
    ],
)
def test_where_tiles_are_skipped_products_have_their_operands_at_hand(
    name: str, kernel_pass: str, tmp_path: pathlib.Path
) -> None:
    """What a warp finds by shuffles is not the same in all lanes to ptxas: where addresses depended on it, each product
    of Hopper's kernels waited for two R2UR."""
    options: dict[str, Any] = {"segments": ON["segments"], "intervals": INTERVALS, "blocks": {}}[name]
    if name == "blocks":
        text = gallery.source(partial="sequences", derives=kernel_pass != "forward")
        options = {"functions": text, "has_mask_blocks": True}
    on = {"dtypes": ["bfloat16"], "options": [options | {"separate_dq": kernel_pass == "backward_dq"}]}
    for head_dim in (64, 128):
        (kernel,) = compiled(90, tmp_path, head_dims=[head_dim], passes=[kernel_pass], **on)
        function = machine_code_of(kernel)
        bases = [instruction.base for instruction in function.instructions]
        before = {i for at, base in enumerate(bases) if base == "HGMMA" for i in range(at - 12, at)}
        assert bases.count("HGMMA") >= 12
        assert sum(bases[i] == "R2UR" for i in before) <= 6, kernel["name"]


def test_functions_come_behind_the_products_of_a_tile(tmp_path: pathlib.Path) -> None:
    """Hopper's forward at head_dim 64: what a function computes stands behind the products, which other warpgroups wait
    for. A first tile has 4, any other 12, the last product with V 8."""
    options = {"functions": gallery.source(partial="neighbourhood"), "has_mask_blocks": True}
    (kernel,) = compiled(90, tmp_path, dtypes=["bfloat16"], options=[options], head_dims=[64], passes=["forward"])
    at = [i for i, x in enumerate(machine_code_of(kernel).instructions) if x.base == "HGMMA"]
    begins = [0, *(i for i in range(1, len(at)) if at[i] - at[i - 1] > 30), len(at)]
    assert [after - before for before, after in itertools.pairwise(begins)] == [4, 4, 12, 12, 8]


def test_a_long_score_function_is_compiled_once(tmp_path: pathlib.Path) -> None:
    """Not for full tiles and others apart."""
    counts = []
    for score in ("capped", "exponents"):
        options = {"functions": gallery.source(score=score)}
        (kernel,) = compiled(90, tmp_path, dtypes=["bfloat16"], options=[options], head_dims=[64], passes=["forward"])
        counts.append(sum(x.base == "HGMMA" for x in machine_code_of(kernel).instructions))
    assert counts == [40, 24]


def written(instruction: sass.Instruction) -> range:
    """The registers that an instruction gives a value to, as far as operands of products come from such."""
    first = re.match(r"R(\d+)\b", instruction.operands)
    if not first or instruction.base in ("STG", "STS", "STL", "STSM", "RED", "REDG", "R2UR"):
        return range(0)
    product = re.match(r"HGMMA\.64x(\d+)x16\.F32", instruction.opcode)
    width = 2 if re.search(r"\.64\b|\.WIDE|^CS2R$", instruction.opcode) else 4 if ".128" in instruction.opcode else 1
    if instruction.base == "LDSM":
        width = 4 if instruction.opcode.endswith(".4") else 1
    return range(int(first[1]), int(first[1]) + (int(product[1]) // 2 if product else width))


OPERAND = re.compile(r"R\d+, R(\d+), gdesc")
"""Of a product of a warpgroup, the first of four registers that hold its operand."""


def lost_operands(function: sass.Function) -> tuple[int, list[str]]:
    """How many products have an operand in registers, and those whose operand may come from two kinds of instructions.

    ptxas (12.9 and 13) has been seen to take an operand that a loop does not write for dead behind its last use in it,
    and to give its registers to others: the next round multiplied what these had left there.
    """
    products = {
        at: range(int(found[1]), int(found[1]) + 4)
        for at, instruction in enumerate(function.instructions)
        if instruction.base == "HGMMA" and (found := OPERAND.match(instruction.operands))
    }
    wanted = {r for registers in products.values() for r in registers}
    sources: dict[int, dict[int, frozenset[str]]] = {0: {}}  # where what is in a register comes from
    pending = [0]
    while pending:
        at = pending.pop()
        here, instruction = sources[at], function.instructions[at]
        if changed := wanted.intersection(written(instruction)):
            kind = frozenset({instruction.base})
            conditional = instruction.guard not in ("", "PT")
            here = here | {r: kind | here.get(r, frozenset()) if conditional else kind for r in changed}
        for to in function.successors(at):
            there = sources.get(to)
            merged = {r: kinds | there.get(r, frozenset()) for r, kinds in here.items()} if there else here
            if there is None or any(there.get(r) != kinds for r, kinds in merged.items()):
                sources[to] = (there or {}) | merged
                pending.append(to)
    lost = []
    for at, registers in products.items():
        kinds = [sources[at].get(r, frozenset()) for r in registers] if at in sources else []
        if any(len(kind) != 1 for kind in kinds):
            lost.append(f"{function.instructions[at].opcode} {function.instructions[at].operands}: {kinds}")
    return len(products), lost


@one_process_of_hopper
@pytest.mark.slow(40)
def test_operands_of_products_stay_in_their_registers(hopper: list[tuple[str, Mapping[str, Any]]]) -> None:
    """At head_dim 64 operands of the backward pass stay there from one tile to the next, in the others for a tile.

    Descriptors of operands in shared memory are the same in all lanes: what ptxas takes for different in each it moves
    to uniform registers in front of every product.
    """
    for name, kernel in hopper:
        function = machine_code_of(kernel)
        products, lost = lost_operands(function)
        assert products, kernel["name"]
        assert not lost, kernel["name"]
        bases = [instruction.base for instruction in function.instructions]
        at = [i for i, base in enumerate(bases) if base == "HGMMA"]
        moved = sum(bases[i:j].count("R2UR") for i, j in itertools.pairwise(at) if j - i < 80)
        assert moved <= 4, (kernel["name"], name)


@one_process
@pytest.mark.slow(30)
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
        _core.build_kernels(arch=60, out_dir=str(tmp_path), **_kernels.COMMON[0])
