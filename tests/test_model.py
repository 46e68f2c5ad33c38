"""The machine-code model: machine code is read right, the simulation does known sums, predictions meet measurements.

No GPU is needed; what needs NVRTC or nvdisasm is skipped where they are missing.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
from machine_code import model, sass
from machine_code.__main__ import main, modelled

from jax_flash._native import _core, registration

H200 = model.CHIPS[90]


def instruction(text: str, *, stall: int = 1, sets: Any = None, reads: Any = None, waits: Any = ()) -> Any:
    """`text` is as nvdisasm writes it: "@!P0 LDS.128 R4, [R2]"."""
    guard = ""
    if text.startswith("@"):
        guard, text = text[1:].split(" ", 1)
    opcode, _, operands = text.partition(" ")
    return sass.Instruction(opcode, operands, guard, stall, sets, reads, frozenset(waits))


def function(*lines: str) -> sass.Function:
    """Instructions and labels ("name:"); a branch names its label: "@P0 BRA name"."""
    labels: dict[str, int] = {}
    code: list[Any] = []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        else:
            code.append(instruction(line))
    targets = {i: labels[x.operands] for i, x in enumerate(code) if x.base == "BRA" and x.operands in labels}
    return sass.Function("f", tuple(code), targets)


def path(*instructions: Any) -> sass.Path:
    return tuple(sass.Executed(x if isinstance(x, sass.Instruction) else instruction(x), True) for x in instructions)


def texts(way: sass.Path | None) -> list[str]:
    assert way is not None
    return [("" if e.active else "off: ") + f"{e.instruction.opcode} {e.instruction.operands}".strip() for e in way]


COPY = "LDGSTS.E.BYPASS.128 [R1], [R2.64]"
MMA = "HMMA.16816.F32 R4, R8, R12, R4"


# Reading


LISTING = """\
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                    /* 0x00000a00ff017b82 */
                                                                             /* 0x000e700000000800 */
.L_x_1:
        /*0010*/              @!P0 LDS.U.128 R4, [R2+0x10] ;                 /* 0x000010000204a984 */
                                                                             /* 0x0002a20000000c00 */
        /*0020*/                   HMMA.884.F32.F32.STEP0 R8, R4.ROW, R6.COL, R8 ;  /* 0x0000000604087236 */
                                                                             /* 0x004fe40000000008 */
        /*0030*/               @P0 BRA `(.L_x_1) ;                           /* 0xffffffe000000947 */
                                                                             /* 0x000fea000383ffff */
        /*0040*/                   EXIT ;                                    /* 0x000000000000794d */
                                                                             /* 0x000fea0003800000 */
.L_x_2:
	.section	.nv.info,"",@"SHT_CUDA_INFO"
"""


def test_a_listing_is_read_with_its_control_fields():
    [(name, read)] = sass._functions(LISTING)
    assert name == "kernel"
    assert read.targets == {3: 1}
    constant, load, product, jump, leave = read.instructions
    assert (constant.stall, constant.sets, constant.reads, constant.waits) == (8, 1, None, frozenset())
    assert (load.guard, load.opcode, load.operands) == ("!P0", "LDS.U.128", "R4, [R2+0x10]")
    assert (load.stall, load.sets, load.reads, load.waits) == (1, 2, 1, frozenset())
    assert (product.base, product.stall, product.sets, product.waits) == ("HMMA", 2, None, frozenset({2}))
    assert (jump.guard, jump.base, leave.base) == ("P0", "BRA", "EXIT")


def test_a_listing_that_is_cut_off_is_refused():
    with pytest.raises(RuntimeError, match="listing of kernel is not understood"):
        list(sass._functions(LISTING.rsplit("/* 0x000fea0003800000 */", 1)[0]))


def test_the_bare_copy_of_a_loop_is_taken():
    masked = ["masked:", "ISETP P1, PT, R0, R1, PT", MMA, "FSEL R4, R4, R5, P1", "@P0 BRA masked"]
    bare = ["bare:", MMA, "@P0 BRA bare"]
    for loops in (masked + bare, bare + masked):
        way = sass.main_loop(function("MOV R1, R2", *loops, "EXIT"))
        assert texts(way) == [MMA, "BRA bare"]


def test_the_innermost_loop_with_the_most_products_is_taken():
    small = ["small:", MMA, "@P0 BRA small"]
    large = ["large:", MMA, MMA, "@P0 BRA large"]
    way = sass.main_loop(function("outer:", *small, *large, "@P1 BRA outer", "EXIT"))
    assert texts(way) == [MMA, MMA, "BRA large"]


def test_a_loop_without_products_and_no_loop():
    assert sass.main_loop(function("a:", "FADD R1, R1, R2", "@P0 BRA a", MMA, "EXIT")) is None
    assert sass.main_loop(function(MMA, "EXIT")) is None


def test_the_usual_way_brings_the_next_tile_and_checks_no_rows():
    # The tile is whole (P1 false) or not, with as many bytes either way; and there is a next one (P2 false) or not.
    way = sass.main_loop(
        function(
            "head:",
            "ISETP P1, PT, R0, R1, PT",
            "@!P1 LDGSTS.E.128 [R1], [R2.64]",
            "@!P1 BRA whole",
            "ISETP P3, PT, R0, R1, PT",
            "LDGSTS.E.128 [R1], [R2.64], !P3",
            "whole:",
            MMA,
            "@P2 BRA last",
            "LDGSTS.E.128 [R3], [R4.64]",
            "last:",
            "@P0 BRA head",
            "EXIT",
        )
    )
    assert texts(way) == [
        "ISETP P1, PT, R0, R1, PT",
        "LDGSTS.E.128 [R1], [R2.64]",
        "BRA whole",
        MMA,
        "off: BRA last",
        "LDGSTS.E.128 [R3], [R4.64]",
        "BRA head",
    ]


def test_a_predicate_that_is_computed_again_is_another():
    way = sass.main_loop(
        function(
            "head:",
            "@P1 BRA skip",
            "LDG.E.128 R8, [R2.64]",
            "skip:",
            "@P1 FADD R1, R1, R2",
            "IADD3 R5, P1, R5, R6, RZ",
            "@P1 FADD R1, R1, R2",
            MMA,
            "@P0 BRA head",
            "EXIT",
        )
    )
    assert texts(way)[:5] == [
        "off: BRA skip",
        "LDG.E.128 R8, [R2.64]",
        "off: FADD R1, R1, R2",
        "IADD3 R5, P1, R5, R6, RZ",
        "FADD R1, R1, R2",
    ]


def test_code_that_was_moved_out_of_the_loop():
    """The branch back into the loop is none of its own, whether its block is on the usual way or not."""
    lines = ["head:", "@P1 BRA aside", "{}", "back:", MMA, "@P0 BRA head", "EXIT", "aside:", "{}", "BRA back"]
    store, nothing = "STG.E [R1.64], R2", "FADD R1, R1, R2"

    def way(first: str, second: str) -> sass.Path | None:
        return sass.main_loop(function(*(x.format(first) for x in lines[:5]), *(x.format(second) for x in lines[5:])))

    assert texts(way(nothing, store)) == ["BRA aside", store, "BRA back", MMA, "BRA head"]
    assert texts(way(store, nothing)) == ["off: BRA aside", store, MMA, "BRA head"]


def test_hundreds_of_branches_take_no_time():
    lines = [f"@P{i % 6} BRA l{i};FADD R1, R1, R2;l{i}:" for i in range(300)]
    way = sass.main_loop(function("head:", *";".join(lines).split(";"), MMA, "@P6 BRA head", "EXIT"))
    assert len(texts(way)) == 302


# Counting


def test_counts_by_class():
    counts = model.counts_of(
        (
            *path(MMA, "LDSM.16.MT88.4 R4, [R2]", "LDS.U.128 R4, [R2]", "LDS R4, [R2]", COPY),
            *path("MUFU.EX2 R1, R1", "F2F.F16.F32 R1, R2", "F2FP.BF16.F32.PACK_AB R1, R2, R3", "FFMA R1, R1, R2, R3"),
            *path("FMNMX R1, R2, R3, !PT", "IMAD.SHL.U32 R1, R2, 0x2, RZ", "LOP3.LUT R1, R2, R3, RZ, 0xc0, !PT"),
            *path("REDG.E.ADD.F32 [R2.64], R1", "SHFL.BFLY PT, R1, R1, 0x1, 0x1f", "UIADD3 UR4, UR4, 0x1, URZ", "NOP"),
            *path("BAR.SYNC 0x0", "STS.64 [R1], R2"),
            sass.Executed(instruction("@!PT LDS RZ, [RZ]"), False),
        )
    )
    assert counts == {
        "HMMA.16816": 1,
        "LDSM.128": 1,
        "LDS.128": 1,
        "LDS.32": 1,
        "LDGSTS.128": 1,
        "MUFU": 1,
        "conversion (XU)": 1,
        "conversion (ALU)": 1,
        "float": 1,
        "float compare": 1,
        "integer": 2,
        "RED.32": 1,
        "SHFL": 1,
        "uniform": 1,
        "BAR": 1,
        "STS.64": 1,
        "off": 1,
        "other": 1,
    }


def test_busy_cycles_of_units():
    chip = dataclasses.replace(H200, hmma={"16816": 6.0}, fma=1, alu=2, xu=8, l2_bytes=64, red=4)
    way = path(MMA, "LDSM.16.M88.4 R4, [R2]", "STS.64 [R1], R2", COPY, "RED.E.ADD.F32 [R2.64], R1")
    way += path("FFMA R1, R1, R2, R3", "IMAD R1, R1, R2, R3", "IADD3 R1, R1, R2, R3", "MUFU.EX2 R1, R1")
    assert model.busy_cycles(way, chip, warps=8) == {
        "issue": 18,  # 9 instructions of the 2 warps of a partition
        "tensor": 12,
        "fma": 2 * (1 + 2),
        "alu": 4,
        "xu": 16,
        "shared": 8 * (4 + 2 + 4 + 2),  # wavefronts of all 8 warps
        "l2": 8 * 8,  # 512 bytes a warp
        "red": 8 * 4,
    }
    assert model.busy_cycles(way, chip, warps=8, conflicts=2)["shared"] == 8 * (8 + 4 + 4 + 2)


def test_a_matrix_instruction_of_another_architecture_is_refused():
    with pytest.raises(ValueError, match=r"HMMA\.16816\.F32 is not known on V100"):
        model.busy_cycles(path(MMA), model.CHIPS[70], warps=4)


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared_bytes", "blocks"),
    [
        (90, 255, 128, 48 * 1024, 2),  # registers
        (90, 128, 128, 48 * 1024, 4),
        (90, 64, 128, 100 * 1024, 2),  # shared memory, 1 KB more a block
        (90, 64, 128, 114 * 1024, 1),
        (70, 64, 128, 48 * 1024, 2),  # nothing more a block
        (75, 32, 512, 1024, 2),  # warps
        (75, 64, 128, 65 * 1024, 0),
    ],
)
def test_blocks_that_are_resident_together(arch, registers, threads, shared_bytes, blocks):
    chip = model.CHIPS[arch]
    found = model.blocks_per_multiprocessor(chip, registers=registers, threads=threads, shared_bytes=shared_bytes)
    assert found == blocks


# Simulating


def cycles(way: sass.Path, *, warps: int = 4, blocks: int = 1, conflicts: float = 1.0, **chip: Any) -> float:
    rates: dict[str, Any] = {
        "hmma": {"16816": 8.0},
        "hmma_holds": {},
        "fma": 1,
        "alu": 2,
        "xu": 8,
        "taken_branch": 1,
        **chip,
    }
    return model.simulate(way, dataclasses.replace(H200, **rates), warps=warps, blocks=blocks, conflicts=conflicts)


@pytest.mark.parametrize(
    ("text", "warps", "expected"),
    [
        ("FFMA R1, R1, R2, R3", 4, 100),  # one a cycle and partition
        ("FFMA R1, R1, R2, R3", 16, 400),
        ("IADD3 R1, R1, R2, R3", 4, 200),
        ("MUFU.EX2 R1, R2", 8, 1600),
        (MMA, 4, 800),
        (MMA, 8, 1600),
        ("LDS.128 R4, [R2]", 4, 1600),  # four wavefronts of each of four warps, in one pipe
        ("LDSM.16.M88.4 R4, [R2]", 8, 3200),
        ("STS [R2], R4", 8, 800),
    ],
)
def test_one_unit_is_the_bound(text, warps, expected):
    assert cycles(path(*[text] * 100), warps=warps) == pytest.approx(expected, rel=0.01)


def test_a_fraction_of_a_cycle_is_kept():
    assert cycles(path(*[MMA] * 100), warps=8, hmma={"16816": 6.4}) == pytest.approx(1280, rel=0.01)


def test_units_work_at_the_same_time():
    """16 cycles of matrix products, 8 of the XU and 8 issue slots fit into 16 cycles, for any one warp too."""
    way = path(*[MMA, "MUFU.EX2 R1, R2", MMA, *["FFMA R1, R1, R2, R3"] * 5] * 50)
    assert cycles(way) == pytest.approx(16 * 50, rel=0.02)


def test_a_matrix_instruction_may_hold_another_unit():
    way = path(*[MMA, *["FFMA R1, R1, R2, R3"] * 4] * 50)
    assert cycles(way, warps=16) == pytest.approx(50 * 4 * 8, rel=0.02)
    assert cycles(way, warps=16, hmma_holds={"fma": 1.0}) == pytest.approx(50 * 4 * 12, rel=0.02)


def test_a_stall_holds_one_warp_and_another_fills_it():
    way = path(*[instruction("FADD R1, R1, R2", stall=4)] * 100)
    assert cycles(way, warps=4) == 400
    assert cycles(way, warps=16) == pytest.approx(400, rel=0.01)
    assert cycles(way, warps=32) == pytest.approx(800, rel=0.01)


def test_a_barrier_waits_for_the_result():
    way = path(instruction("LDS R1, [R2]", sets=0), instruction("FADD R1, R1, R2", waits={0}))
    one = cycles(way, load_latency=20)
    assert 20 < one < 32
    assert cycles(way, load_latency=70) == one + 50
    # and a barrier of operands only until they have been read
    way = path(instruction("STS [R2], R1", reads=0), instruction("FADD R1, R1, R2", waits={0}))
    assert cycles(way, load_latency=70) == cycles(way, load_latency=20) < 15


def test_copies_to_shared_memory_are_waited_for_by_group():
    def way(groups: int) -> sass.Path:
        return path("LDGSTS.E.128 [R1], [R2.64]", instruction("LDGDEPBAR", sets=0), f"DEPBAR.LE SB0, {groups:#x}")

    assert cycles(way(0), global_latency=500) > 500
    assert 250 < cycles(way(1), global_latency=500) < 300


def test_l2_is_fast_for_one_and_slow_for_all():
    """16 KB a round: 256 cycles through the port, of which nothing shows behind 2000 cycles of other work."""
    copies = path(*[COPY] * 8, "LDGDEPBAR", "DEPBAR.LE SB0, 0x0")
    assert cycles(copies, l2_bytes=16, l2_port=64, global_latency=300) == 1024
    assert 300 < cycles(copies, l2_bytes=64, l2_port=64, global_latency=300) < 400
    work = path(*[COPY] * 8, *["MUFU.EX2 R1, R2"] * 250)
    assert cycles(work, l2_bytes=16, l2_port=64) == pytest.approx(2000, rel=0.01)


def test_a_block_waits_for_its_slowest_warp_and_for_no_other_block():
    """Two warps share a partition, the third has one of its own, and still takes as long."""
    way = path(*[MMA] * 10, "BAR.SYNC 0x0")
    assert cycles(way, warps=5, barrier_latency=20) == pytest.approx(160 + 20, abs=10)
    assert cycles(way, warps=4, blocks=2, barrier_latency=20) == pytest.approx(160, abs=10)


def test_conflicts_cost_wavefronts():
    way = path(*["LDS.128 R4, [R2]"] * 50, *["SHFL.BFLY PT, R1, R1, 0x1, 0x1f"] * 50)
    assert cycles(way, conflicts=2) - cycles(way) == pytest.approx(50 * 4 * 4, rel=0.02)


# Predicting


_no_nvrtc = pytest.mark.skipif(
    not registration.cuda_status()["nvrtc"], reason="no NVRTC here (the [test] extra installs it on Linux)"
)


def needs_tools(test: Any) -> Any:
    """Marks a test that compiles and disassembles; one process does that for all of them."""
    return pytest.mark.slow(8)(pytest.mark.xdist_group("model")(_no_nvrtc(test)))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """arch -> the kernels that the command shows; skips without a compiler or a disassembler for it."""

    @functools.cache
    def build(arch: int) -> list[tuple[Mapping[str, Any], sass.Path]]:
        folder: pathlib.Path = tmp_path_factory.mktemp(f"sm_{arch}")
        try:
            variants = {
                **modelled(arch)[0],
                "head_dims": [(64, 64), (128, 128), *([(256, 256)] if arch == 90 else ())],
            }
            kernels = _core.build_kernels(arch=arch, out_dir=str(folder), **variants)
        except RuntimeError as error:
            if "no NVRTC here" in str(error):
                pytest.skip(str(error))
            raise
        paths = []
        for kernel in kernels:
            try:
                code = sass.disassemble(pathlib.Path(kernel["path"]))
            except sass.DisassemblerMissing as error:
                pytest.skip(str(error))
            way = sass.main_loop(code[f"jax_flash_{kernel['pass']}"])
            assert way is not None, kernel["name"]
            paths.append((kernel, way))
        return paths

    return build


def products_of(kernel: Mapping[str, Any]) -> int:
    """Products of a [block_q, block_kv] tile and head_dim that a step computes."""
    split = "separate_dq" in kernel["name"]
    return {"forward": 2, "backward": 4 if split else 5, "backward_dq": 3}[kernel["pass"]]


def has_loops_in_its_loop(kernel):
    """Where the score products are loops of their own (backward.cuh), which the model does not look into."""
    return kernel["name"].startswith("sm80-backward-") and kernel["head_dim"] == 128


MULTIPLY_ADDS = {"HMMA.884": 8 * 8 * 4, "HMMA.1688": 16 * 8 * 8, "HMMA.16816": 16 * 8 * 16}
"""Of a warp's instruction: four of Volta's steps make the products of four quads of 8x8x4 each."""


@needs_tools
@pytest.mark.parametrize("arch", [70, 75, 90])
def test_the_main_loop_has_what_a_step_needs(compiled, arch):
    for kernel, way in compiled(arch):
        if has_loops_in_its_loop(kernel):
            continue
        counts = model.counts_of(way)
        print(kernel["name"], counts)
        scores = kernel["block_q"] * kernel["block_kv"]
        done = sum(counts.get(shape, 0) * n for shape, n in MULTIPLY_ADDS.items())
        assert done * kernel["threads"] / 32 == products_of(kernel) * scores * kernel["head_dim"], kernel["name"]
        # One exponential for each score; forward may have those that shrink what a row has summed up, too.
        own = counts["MUFU"] - scores / kernel["threads"]
        assert own == 0 if kernel["pass"] != "forward" else 0 <= own <= 8, kernel["name"]
        # The next tile of both arrays that it walks over.
        walked = kernel["block_q" if kernel["pass"] == "backward" else "block_kv"]
        loads = sum(n * int(name.split(".")[1]) // 8 for name, n in counts.items() if name.startswith("LDG"))
        statistics = 8 if kernel["pass"] == "backward" else 0  # lse and delta
        assert loads * kernel["threads"] >= walked * (4 * kernel["head_dim"] + statistics), kernel["name"]
        assert loads - statistics <= 4 * walked * kernel["head_dim"] / kernel["threads"], kernel["name"]
        width = 128 if arch >= 90 else 32  # of an addition to dQ
        atomics = counts.get(f"RED.{width}", 0) * width // 32 * kernel["threads"]
        wanted = kernel["pass"] == "backward" and "separate_dq" not in kernel["name"]
        assert atomics == (kernel["block_q"] * kernel["head_dim"] if wanted else 0), kernel["name"]
        assert counts["BAR"] >= 2


MEASURED = {
    ("forward", 64): 371.0,
    ("forward", 128): 436.0,
    ("forward", 256): 366.0,
    ("backward", 64): 321.0,
    ("backward", 128): 321.0,
    ("backward", 256): 260.0,
}
"""TFLOP/s on an H200 of the kernels alone, bf16, full, B4 S4096 N*H=2048: docs/ledger/sm80.md."""


@needs_tools
def test_predictions_are_within_a_quarter_of_measurements(compiled):
    predictions = [model.predict(kernel, H200) for kernel, _ in compiled(90)]
    [clock] = H200.clocks.values()
    for head_dim in (64, 128, 256):
        rates = model.rates([p for p in predictions if p.head_dim == head_dim], H200, clock)
        for direction, rate in rates.items():
            if (direction, head_dim) == ("backward", 128):
                continue  # see has_loops_in_its_loop
            measured = MEASURED[direction, head_dim]
            print(f"{direction} {head_dim}: predicted {rate:.0f}, measured {measured:.0f}, {rate / measured:.2f}")
            assert 0.75 < rate / measured < 1.25


@needs_tools
def test_a_higher_clock_is_as_much_faster(compiled):
    chip = model.CHIPS[70]
    [forward] = [model.predict(k, chip) for k, _ in compiled(70) if k["pass"] == "forward" and k["head_dim"] == 64]
    assert forward.moved == 0
    slow, fast = (model.rates([forward], chip, clock)["forward"] for clock in (1.38, 1.53))
    assert fast / slow == pytest.approx(1.53 / 1.38)
    assert slow == pytest.approx(4 * 4 * 4096**2 * 2048 / forward.seconds(chip, 1.38) / 1e12)
    # No unit is busier than the time there is, and the bound can't be beaten.
    assert max(forward.busy.values()) == forward.busy[forward.bound] <= forward.cycles
    conflicts = model.predict(compiled(70)[0][0], chip, conflicts=2.0)
    assert conflicts.busy["shared"] > forward.busy["shared"]
    assert conflicts.cycles > forward.cycles


@needs_tools
def test_a_kernel_without_room_on_the_chip(compiled):
    kernel, _ = compiled(90)[0]
    with pytest.raises(ValueError, match=f"{kernel['name']}: a block of .* has no room on T4"):
        model.predict({**kernel, "shared_bytes": 65 * 1024}, model.CHIPS[75])


def test_no_disassembler(monkeypatch, tmp_path):
    monkeypatch.setattr(sass, "disassemblers", lambda: iter([tmp_path / "nvdisasm"]))
    with pytest.raises(sass.DisassemblerMissing, match=r"triton.*nvdisasm: not executable"):
        sass.disassemble(tmp_path / "x.cubin")


def test_a_cubin_that_no_disassembler_takes(tmp_path):
    if not any(sass.disassemblers()):
        pytest.skip("no nvdisasm here (the test extra brings one)")
    (tmp_path / "x.cubin").write_bytes(b"not a cubin")
    with pytest.raises(sass.DisassemblerMissing, match="nvdisasm"):
        sass.disassemble(tmp_path / "x.cubin")


# The command


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--arch", "sm_60"], "must be one of sm_70, sm_75, sm_80, sm_86, sm_89, sm_90, got 'sm_60'"),
        (["--conflicts", "0.5"], "must be a number of at least 1, got '0.5'"),
        (["--conflicts", "x"], "must be a number of at least 1, got 'x'"),
    ],
)
def test_bad_arguments(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_command_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(sass, "disassemblers", lambda: iter(()))
    monkeypatch.setattr(_core, "build_kernels", lambda **_: [dict(KERNEL)])
    assert main(["--arch", "sm_70"]) == 1
    assert capsys.readouterr().err.endswith("(install triton, or put it on the PATH): none found\n")


KERNEL = {
    "name": "sm70-forward-f16-d64-sm_70",
    "path": "x.cubin",
    "pass": "forward",
    "head_dim": 64,
    "value_head_dim": 64,
    "block_q": 128,
    "block_kv": 64,
    "registers": 255,
    "shared_bytes": 32768,
    "threads": 128,
}


def test_the_command_shows_counts_cycles_and_rates(monkeypatch, capsys):
    """A loop of one matrix product a step, which is the bound: 8 warps of 2 cycles in 4 partitions."""
    loop = function("head:", *["HMMA.884.F32.F32.STEP0 R8, R4.ROW, R6.COL, R8"] * 1024, "@P0 BRA head", "EXIT")
    monkeypatch.setattr(sass, "disassemble", lambda path: {"jax_flash_forward": loop})
    large = {**KERNEL, "name": "large", "head_dim": 256, "value_head_dim": 256, "shared_bytes": 97 * 1024}
    monkeypatch.setattr(_core, "build_kernels", lambda **_: [dict(KERNEL), large])
    assert main(["--arch", "sm_70"]) == 0
    shown = capsys.readouterr()
    assert "sm_70: large: a block of 128 threads with 255 registers and 99328 bytes" in shown.err
    lines = [line.split() for line in shown.out.splitlines()]
    for line in (
        ["HMMA.884", "1024"],
        ["warps", "x", "blocks", "4", "x", "2"],
        ["tensor", "4096"],
        ["bound", "tensor"],
    ):
        assert line in lines
    [simulated] = [float(line[1]) for line in lines if line[:1] == ["simulated"]]
    assert 4096 <= simulated < 4150
    # 4 * 32 heads of 32 blocks on 80 multiprocessors, two at a time, 64 rounds and one more
    seconds = -(-4 * 32 * 32 // 80) / 2 * 65 * simulated / 1.38e9
    assert ["64", "forward", f"{4 * 4 * 4096**2 * 2048 / seconds / 1e12:.1f}"] == lines[-1][:3]
