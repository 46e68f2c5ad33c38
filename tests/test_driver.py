"""The CPU kernels without JAX: any options on any shape, by every compiler, under sanitizers, on a processor that is
emulated; exp2.

tests/cpu/driver.cc draws problems and compares the kernels with a plain computation, and several threads with one.
JAX_FLASH_DRIVER_SECONDS is how long each build of it runs, 4 by default.
"""

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence

import pytest

SOURCE = pathlib.Path(__file__).parent / "cpu"
SECONDS = os.environ.get("JAX_FLASH_DRIVER_SECONDS", "4")
X86 = platform.machine() in ("x86_64", "AMD64")

# Checks of memory accesses are calls, and the stack is not checked: otherwise the kernels' hundreds of vectors make g++
# take minutes instead of seconds.
ADDRESS = (
    "-fsanitize=address",
    "--param=asan-instrumentation-with-call-threshold=0",
    "--param=asan-stack=0",
    "-fsanitize=signed-integer-overflow,shift,bounds,integer-divide-by-zero,float-cast-overflow,bool,enum",
    "-fno-sanitize-recover=all",
)
THREAD = ("-fsanitize=thread",)

EMULATED_TILES = f'-DJAX_FLASH_EMULATED_TILES="{SOURCE / "tiles.h"}"'
"""AMX's instructions as functions, for processors that have only the others of its instruction set."""

EMULATED_PAIRS = f"-DJAX_FLASH_EMULATED_PAIRS={SOURCE / 'pairs.h'}"
"""AVX512-BF16's instructions as functions, for processors that have AVX2."""


def tool(*names: str) -> str:
    """The first program that is next to this Python, where ``./run`` installs it, or on the path."""
    for name in names:
        found = shutil.which(name, path=str(pathlib.Path(sys.executable).parent)) or shutil.which(name)
        if found:
            return found
    pytest.skip(f"there is no {' or '.join(names)} here")


def build(
    folder: pathlib.Path, isas: Sequence[str], flags: Sequence[str], targets: Sequence[str], *settings: str
) -> None:
    cmake, ninja = tool("cmake"), tool("ninja")
    configure = [
        *(cmake, "-S", SOURCE, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DJAX_FLASH_CPU_ISAS={';'.join(isas)}"),
        *(f"-DJAX_FLASH_CPU_FLAGS={';'.join(flags)}", *settings),
    ]
    for command in (configure, [cmake, "--build", folder, "--target", *targets]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def drive(command: Sequence[object], isa: str, *arguments: object) -> None:
    """Runs the driver; it must manage at least a case a second."""
    name, cases = run(*command, SECONDS, *arguments, JAX_FLASH_CPU_ISA=isa).split(": ")
    assert name == isa
    assert int(cases.split()[0]) >= float(SECONDS)


def has(isa: str) -> bool:
    code = "from jax_flash._native import _core; print(_core.cpu_isa())"
    probe = subprocess.run([sys.executable, "-c", code], env={**os.environ, "JAX_FLASH_CPU_ISA": isa}, check=False,
                           capture_output=True)  # fmt: skip
    return probe.returncode == 0


@pytest.mark.slow(70)
@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address_undefined", "thread"])
def test_sanitizers(tmp_path: pathlib.Path, flags: Sequence[str]) -> None:
    """The source is one for all instruction sets: the plainest, those whose products take pairs, or tiles of them.

    What threads share is written by what all of them have in common, so pairs are left out there. -g1 would put lines
    into reports, which have functions without it, for a fifth of the compiler's time. Without AVX512-BF16 its
    instructions are emulated, which AMX's are only beside them.
    """
    isas, settings = ["baseline"], []
    if X86 and has("avx512_bf16"):
        isas += ["amx_bf16"] if flags == THREAD else ["avx512_bf16", "amx_bf16"]
    elif X86 and has("avx2") and flags == ADDRESS:
        isas, settings = [*isas, "avx512_bf16"], [EMULATED_PAIRS]
    # Most problems are too short for copies of query and dout otherwise.
    copies = "-DJAX_FLASH_COPY_KEYS=60"
    build(tmp_path, isas, ["-O1", *flags, EMULATED_TILES, copies], ["driver"], *settings)
    for seed, isa in enumerate(isas):
        drive([tmp_path / "driver"], isa, 1000 * seed, 200)


AVX512 = "avx512,avx2,baseline"
PAIRS = f"avx512_bf16,{AVX512}"
TILES = f"amx_bf16,{PAIRS}"
CHOICES = {
    # By name: CPUID's vendor, family and model, what may be used, and the sets for bfloat16 and for other dtypes.
    "zen_3": ("AuthenticAMD", 0x19, 0x01, "avx2,baseline", "avx2", "avx2"),
    "zen_4_server": ("AuthenticAMD", 0x19, 0x11, PAIRS, "avx512_bf16", "avx512"),
    "zen_4_desktop": ("AuthenticAMD", 0x19, 0x61, PAIRS, "avx512_bf16", "avx512"),
    "zen_5_server": ("AuthenticAMD", 0x1A, 0x02, PAIRS, "avx512_bf16", "avx512"),
    "zen_5_desktop": ("AuthenticAMD", 0x1A, 0x44, PAIRS, "avx512_bf16", "avx512"),
    "skylake": ("GenuineIntel", 6, 0x55, AVX512, "avx512", "avx512"),
    "cooper_lake": ("GenuineIntel", 6, 0x55, PAIRS, "avx512", "avx512"),
    "alder_lake": ("GenuineIntel", 6, 0x97, "avx2,baseline", "avx2", "avx2"),
    "sapphire_rapids": ("GenuineIntel", 6, 0x8F, TILES, "amx_bf16", "avx512"),
    "emerald_rapids": ("GenuineIntel", 6, 0xCF, TILES, "amx_bf16", "avx512"),
    "emerald_rapids_without_tiles": ("GenuineIntel", 6, 0xCF, PAIRS, "avx512", "avx512"),
    "granite_rapids": ("GenuineIntel", 6, 0xAD, TILES, "amx_bf16", "avx512"),
    "a_later_intel": ("GenuineIntel", 6, 0xFE, TILES, "amx_bf16", "avx512"),
    "a_later_intel_without_tiles": ("GenuineIntel", 6, 0xFE, PAIRS, "avx512", "avx512"),
    "a_later_amd": ("AuthenticAMD", 0x1B, 0x02, PAIRS, "avx512", "avx512"),
    "another_vendor": ("HygonGenuine", 0x19, 0x11, PAIRS, "avx512", "avx512"),
    "arm": ("", 0, 0, "neon", "neon", "neon"),
    "sse": ("GenuineIntel", 6, 0x1A, "baseline", "baseline", "baseline"),
    # With a set that the user names at the end.
    "named_pairs": ("GenuineIntel", 6, 0xCF, TILES, "avx512_bf16", "avx512", "avx512_bf16"),
    "named_tiles": ("GenuineIntel", 6, 0xCF, TILES, "amx_bf16", "avx512", "amx_bf16"),
    "named_floats": ("AuthenticAMD", 0x19, 0x11, PAIRS, "avx512", "avx512", "avx512"),
    "named_avx2": ("AuthenticAMD", 0x19, 0x11, PAIRS, "avx2", "avx2", "avx2"),
    "named_but_not_there": ("AuthenticAMD", 0x19, 0x11, PAIRS, "-", "-", "amx_bf16"),
}


def test_choice(tmp_path: pathlib.Path) -> None:
    """Of an instruction set for a processor; and who this processor is, as Linux has it."""
    build(tmp_path, ["baseline"], [], ["choice"])
    for name, (vendor, family, model, usable, bf16, others, *wanted) in CHOICES.items():
        chosen = run(tmp_path / "choice", vendor, family, model, usable, *wanted).split()
        assert chosen == [bf16, others], name
    if X86 and sys.platform == "linux":
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
        here = [facts[name] for name in ("vendor_id", "cpu family", "model")]
        assert run(tmp_path / "choice").split() == here


COMPILERS = (
    *(f"g++-{version}" for version in range(11, 15)),
    *(f"clang++-{version}" for version in range(15, 20)),
    *(f"clang++-{version} -stdlib=libc++" for version in range(15, 20)),
    "aarch64-linux-gnu-g++ -static",
    *(f"clang++-{version} --target=aarch64-linux-gnu -static" for version in range(15, 20)),
)
"""Which build the CPU kernels, and with which C++ library; those for aarch64 make programs to emulate."""


def usable(command: str, folder: pathlib.Path) -> list[str]:
    """The compiler's path and its flags, if it is here with a C++ library that supports it, which warns if not."""
    name, *flags = command.split()
    compiler = tool(name)
    (folder / "probe.cc").write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    probe = [compiler, *flags, "-Werror", folder / "probe.cc", "-o", folder / "probe"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{command} has no standard library that supports it here")
    return [compiler, *flags]


@pytest.mark.slow(200)
@pytest.mark.parametrize("command", COMPILERS)
def test_compilers(tmp_path: pathlib.Path, command: str) -> None:
    """Each builds all instruction sets without a warning; those that this processor has are right."""
    compiler, *flags = usable(command, tmp_path)
    settings = [f"-DCMAKE_CXX_COMPILER={compiler}"]
    if "aarch64" in command:
        emulator = tool("qemu-aarch64", "qemu-aarch64-static")
        settings += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
        build(tmp_path, ["neon"], ["-Werror", *flags], ["driver"], *settings)
        drive([emulator, tmp_path / "driver"], "neon", 5000, 40)
        return
    isas = ["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"] if X86 else ["neon"]
    build(tmp_path, isas, ["-Werror", *flags], ["driver"], *settings)
    for seed, isa in enumerate(isas):
        if has(isa):
            drive([tmp_path / "driver"], isa, 1000 * seed, 200)


@pytest.mark.slow(40)
@pytest.mark.skipif(not X86, reason="instruction sets of x86-64")
def test_flags_of_the_environment_do_not_reach_the_kernels(tmp_path: pathlib.Path) -> None:
    """With CXXFLAGS=-march=native, on a processor with AVX512-BF16, every set took float32 for bfloat16."""
    isas = [isa for isa in ("baseline", "avx512") if has(isa)]
    build(tmp_path, isas, [], ["driver"], "-DCMAKE_CXX_FLAGS=-march=native")
    for isa in isas:
        drive([tmp_path / "driver"], isa, 4000, 200)


@pytest.mark.slow(60)
@pytest.mark.parametrize("command", [command for command in COMPILERS if "aarch64" not in command])
def test_compilers_of_the_extension(tmp_path: pathlib.Path, command: str) -> None:
    """What is not a kernel compiles without a warning too."""
    nanobind, jaxlib = pytest.importorskip("nanobind"), pytest.importorskip("jaxlib")
    compiler = usable(command, tmp_path)
    root = SOURCE.parent.parent / "csrc"
    headers = [nanobind.include_dir(), pathlib.Path(jaxlib.__file__).parent / "include", sysconfig.get_path("include")]
    flags = ["-std=gnu++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{root}"]
    for folder in ("ffi", "cuda/host"):
        for source in sorted((root / folder).glob("*.cc")):
            run(*compiler, *flags, *(part for path in headers for part in ("-isystem", path)), source)


MEASURING = """
#include "cpu/pack.h"
int main() {
  jax_flash::cpu::baseline::Arena arena(nullptr);
  const bool nulls = !arena.take<float>(17) && !arena.take<double>(1) && !arena.take<char>(3);
  return nulls && arena.used() == 4 * 64 ? 0 : 1;
}
"""


def test_what_only_counts_hands_out_nulls(tmp_path: pathlib.Path) -> None:
    """To add anything to a null pointer is undefined, which g++'s sanitizers don't see."""
    (tmp_path / "main.cc").write_text(MEASURING)
    flags = ["-std=gnu++20", "-Wno-psabi", "-DJAX_FLASH_ISA=baseline", "-I", SOURCE.parent.parent / "csrc"]
    run(tool("g++"), *flags, "-o", tmp_path / "main", tmp_path / "main.cc")
    run(tmp_path / "main")


@pytest.mark.slow(20)
@pytest.mark.skipif(not X86, reason="errors are stated for x86-64")
def test_exp2(tmp_path: pathlib.Path) -> None:
    """Over every float. Stated in csrc/cpu/simd.h; without fused multiply-adds more is rounded."""
    errors = {"baseline": ("1.132", "1.31"), "avx2": ("0.870", "1.04"), "avx512": ("0.988", "1.04")}
    isas = [isa for isa in errors if has(isa)]
    build(tmp_path, isas, [], [f"exp2_{isa}" for isa in isas])
    for isa in isas:
        run(tmp_path / f"exp2_{isa}", *errors[isa])
