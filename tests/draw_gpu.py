"""Thousands of drawn calls on a GPU, forward and backward, against the float64 oracle; needs neither pytest nor
Hypothesis.

    python tests/draw_gpu.py compile --out DIR                  without a GPU: kernels of drawn programs, by NVRTC
    python tests/draw_gpu.py run DIR --seeds 0:1000             on a GPU, in all cores; exits with 1 if any case fails
    python tests/draw_gpu.py run DIR --family sm80 --seeds 17   one case again
    python tests/draw_gpu.py run DIR --seeds 0:300:5 --memcheck under compute-sanitizer
    python tests/draw_gpu.py run DIR --seeds 0:20 --platform cpu

Each kernel family has PROGRAMS programs, the same every time. A seed gives the program, the shape and the data of a
case, so that ranges of seeds add up over runs; CASES_OF_SHAPE seeds in a row share program and shape, which are
compiled once. The folder of kernels has to be of the same sources: kernels that are not in it are compiled when they
are needed, and counted. It compresses to a seventh (`tar cJf kernels.tar.xz DIR`).
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

if __name__ == "__main__":  # before NumPy and XLA read them
    for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")  # there are as many processes as cores
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _xla_flags = [
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_gpu_force_compilation_parallelism=1",
    ]
    os.environ["XLA_FLAGS"] = " ".join([*_xla_flags, os.environ.get("XLA_FLAGS", "")]).strip()

import cases
import drawing
import jax
import numpy as np
from drawing import Program, Shape, T
from jaxlib.mlir import ir

from jax_flash._implementations import choice
from jax_flash._native import _core, registration

FAMILIES = ("sm90a", "sm80", "sm75", "sm70")
ARCH = 90  # of the GPU, which runs the kernels of all families
PROGRAMS = 46  # of a family
MOST_KERNELS = 170  # that serve these
CASES_OF_SHAPE = 5
MARK = "draw_gpu: "  # of the lines of workers
SECONDS = 300
"""Timeout of a case, compilation included, since a kernel may hang."""


# Drawing


class Drawn:
    """Choices of a generator of random numbers."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, values: Sequence[T]) -> T:
        return values[int(self.rng.integers(len(values)))]

    def some(self, values: Sequence[T]) -> list[T]:
        count = int(self.rng.integers(min(len(values), 7)))
        return [values[i] for i in sorted(self.rng.choice(len(values), count, replace=False))]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A program, and whether its forward is split-KV, as calls of this size mostly would."""

    program: Program
    split_kv: bool


def draw(family: str, number: int) -> Drawing:
    """The program with this number."""
    choose = Drawn(FAMILIES.index(family), number)
    split_kv = choose.one((False, False, True))
    program = drawing.program(choose, ("float16", "bfloat16", "bfloat16", "float32"), large=True)
    options = dict(program.options)
    if program.dtype != "float32":
        options.pop("precision", None)  # has no effect there
    elif "precision" not in options:
        options["precision"] = choose.one(("default", "highest"))
    program = dataclasses.replace(program, options=tuple(sorted(options.items())))
    if options.get("precision") == "highest":
        split_kv = False  # there is no such kernel for arrays of two limbs
        if max(program.head_dims) > (128 if family in _core.FLOAT16_FAMILIES else 256):
            program = dataclasses.replace(program, head_dims=(64, 64))
    return Drawing(program, split_kv)


def draw_shape(drawn: Drawing, choose: Drawn) -> Shape:
    """Up to 700 rows and keys, or with split-KV 1500 keys: ends of tiles, and what lies between."""
    program = drawn.program

    def length(most: int) -> int:
        kind = choose.one(("any", "any", "tiles", "short"))
        if kind == "tiles":
            return min(most, 64 * choose.one(range(1, most // 64 + 1)) + choose.one((-1, 0, 1)))
        return choose.one(range(1, (most if kind == "any" else 80) + 1))

    while True:
        shape = length(200 if drawn.split_kv else 700), length(1500 if drawn.split_kv else 700)
        if program.fits(shape) and (not drawn.split_kv or served_by_split_kv(program, shape)):
            return shape


def served_by_split_kv(program: Program, shape: Shape) -> bool:
    rows, _ = _core.plan_split_kv(
        batch=1 if program.packed else int(np.prod(program.batch)),
        q_length=shape[0],
        kv_length=shape[1],
        q_heads=program.heads[0],
        kv_heads=program.heads[1],
        options={"has_cu_q_lengths": program.packed},
    )
    return rows > 0


def drawn_case(family: str, seed: int) -> tuple[int, Drawing, Shape]:
    """The program, by its number and itself, and the shape."""
    choose = Drawn(FAMILIES.index(family), PROGRAMS, seed // CASES_OF_SHAPE)
    number = choose.one(range(PROGRAMS))
    drawn = draw(family, number)
    return number, drawn, draw_shape(drawn, choose)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def queries(*, split_kv: bool) -> contextlib.AbstractContextManager[None]:
    """A context in which short queries are served by the split-KV kernels, or by the others."""
    return environment(JAX_FLASH_SPLIT_KV=str(int(split_kv)))


# Kernels, compiled without a GPU


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A custom call as it is lowered for CUDA."""

    forward: bool
    dtype: str
    head_dims: tuple[int, int]
    options: dict[str, Any]
    shares_bias: bool  # whether batch entries or heads add to the same elements of dbias

    @classmethod
    def of(cls, op: ir.Operation) -> "KernelCall":
        options = {x.name: x.attr.value for x in ir.DictAttr(op.attributes["mhlo.backend_config"])}
        shapes = [tuple(ir.RankedTensorType(x.type).shape) for x in op.operands]
        limbs = 2 if options["highest_precision"] else 1
        shares = False
        if options["has_dbias"]:
            results = [tuple(ir.RankedTensorType(x.type).shape) for x in op.results]
            (dbias,) = (shape for shape in results[3:] if len(shape) == 4)  # after dq, dk and dv
            batch, _, heads, _ = shapes[0]
            shares = dbias[2] > 1 and dbias[3] > 1 and (dbias[0] < batch or dbias[1] < heads)
        element = str(ir.RankedTensorType(op.operands[0].type).element_type)
        return cls(
            forward=ir.StringAttr(op.attributes["call_target_name"]).value == registration.FORWARD_TARGET,
            dtype={"f16": "float16", "bf16": "bfloat16"}[element],
            head_dims=(shapes[0][3] // limbs, shapes[2][3] // limbs),
            options=options,
            shares_bias=shares,
        )


@contextlib.contextmanager
def pretended_gpu(family: str) -> Iterator[None]:
    """Within, calls are lowered as for a GPU that runs the kernels of ``family``. Of one family in a process: what JAX
    has traced it keeps."""
    gpu = {"name": "", "compute_capability": ARCH, "family": family}
    status = {**registration.cuda_status(), "driver_error": "", "devices": [gpu]}
    cached = [x for x in vars(choice).values() if hasattr(x, "cache_clear")]
    with (
        mock.patch.object(choice, "_cuda_devices", return_value=(gpu,)),
        mock.patch.object(registration, "cuda_status", return_value=status),
        environment(JAX_FLASH_CUDA_FAMILY=family),
    ):
        for function in cached:
            function.cache_clear()
        yield
    for function in cached:
        function.cache_clear()


def calls_of(drawn: Drawing, shape: Shape) -> list[KernelCall]:
    problem = drawing.problem_of(drawn.program, shape, 0)
    compiled = drawing.Compiled(cases.CUDA, drawn.program, problem)
    with queries(split_kv=drawn.split_kv), jax.default_matmul_precision("highest"):
        lowered = compiled.jitted.trace(*compiled.arguments(problem)).lower(lowering_platforms=("cuda",))
    found: list[KernelCall] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call":
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            if target in (registration.FORWARD_TARGET, registration.BACKWARD_TARGET):
                found.append(KernelCall.of(op))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def build(drawn: Drawing, family: str, folder: pathlib.Path) -> list[str]:
    """Compiles the kernels that the program needs for any shape; returns their files."""
    made: list[str] = []

    def kernels(call: KernelCall, passes: Sequence[str], **changes: bool) -> int:
        built = _core.build_kernels(
            arch=ARCH,
            out_dir=str(folder),
            dtypes=[call.dtype],
            head_dims=[call.head_dims],
            options=[call.options | changes],
            family=family,
            passes=passes,
        )
        made.extend(pathlib.Path(kernel["path"]).name for kernel in built)
        return len(built)

    for call in calls_of(drawn, (7, 200)):
        if call.options.get("has_descale"):  # of a backward dout alone is scaled
            widths = call.head_dims if call.forward else (call.head_dims[1],) * 2
            kernels(dataclasses.replace(call, head_dims=widths), ["scale"])
        if call.forward and drawn.split_kv:
            # Blocks of 16 rows and of 64. If one has no row, the ordinary forward serves.
            count = kernels(call, ["forward_split_kv"])
            kernels(call, ["forward_single_tile"])
            if count < 2:
                kernels(call, ["forward"])
        elif call.forward:
            kernels(call, ["forward"])
        elif call.options["separate_dq"] and call.shares_bias:
            # Their sums have a separate pass, which does not affect the others.
            kernels(call, ["backward", "backward_dq"], has_dbias=False)
            kernels(call, ["backward_bias"])
        else:
            kernels(call, ["backward", "backward_dq"])
    return made


def compile_family(family: str, folder: pathlib.Path) -> None:
    programs: list[list[str]] = []
    with pretended_gpu(family):
        for number in range(PROGRAMS):
            programs.append(build(draw(family, number), family, folder))
            print(f"{family}: {number + 1} of {PROGRAMS} programs: {', '.join(programs[-1])}", flush=True)
    kernels = {name for made in programs for name in made}
    assert len(kernels) <= MOST_KERNELS, f"{len(kernels)} kernels of {family}: make PROGRAMS smaller"
    (folder / f"{family}.json").write_text(json.dumps(programs, indent=1), encoding="utf-8")


def compile_(families: Sequence[str], folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if len(families) == 1:
        return compile_family(families[0], folder)
    for family in families:
        command = [sys.executable, __file__, "compile", "--out", str(folder), "--family", family]
        subprocess.run(command, check=True)
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
    print(f"{len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB, in {folder}")


# A worker: a process that runs cases, since a failing kernel makes the GPU unusable for its process


def work(family: str, platform: str) -> None:
    """Reads seeds, a line for those of one shape, runs their cases and reports the result of each."""
    target = {"cuda": cases.CUDA, "cpu": cases.CPU}[platform]
    for line in sys.stdin:
        seeds = json.loads(line)
        _, drawn, shape = drawn_case(family, seeds[0])
        compiled = None
        with queries(split_kv=drawn.split_kv):
            for seed in seeds:
                with jax.default_device(jax.devices("cpu")[0]):  # compiles the drawing of keys quickly
                    problem = drawing.problem_of(drawn.program, shape, seed)
                error, fatal = None, False
                try:
                    compiled = compiled or drawing.Compiled(target, drawn.program, problem)
                    results = compiled(problem)
                except Exception as raised:  # after any error this process may have lost its GPU
                    error, fatal = f"{type(raised).__name__}: {raised}", True
                else:
                    try:
                        with jax.default_device(jax.devices("cpu")[0]):
                            drawing.check(target, problem, results)
                    except AssertionError as wrong:
                        error = str(wrong)
                print(MARK + json.dumps({"seed": seed, "error": error, "fatal": fatal}), flush=True)
                if fatal:
                    os._exit(1)  # without waiting for a GPU that may never answer


# The process that starts the workers


class Family:
    """The cases of a family, and their results."""

    def __init__(self, name: str, a: argparse.Namespace, scratch: pathlib.Path) -> None:
        self.name, self.a, self.scratch = name, a, scratch
        self.kernels: list[list[str]] | None = None  # of each program
        if a.folder:
            self.kernels = json.loads((a.folder / f"{name}.json").read_text(encoding="utf-8"))
        groups: dict[int, list[int]] = {}
        for seed in a.seeds:
            groups.setdefault(seed // CASES_OF_SHAPE, []).append(seed)
        self.groups = list(groups.values())
        self.numbers = {drawn_case(name, seeds[0])[0] for seeds in self.groups}
        self.lock = threading.Lock()
        self.cases = self.failed = 0

    @property
    def cache(self) -> pathlib.Path:
        return self.scratch / f"cache-{self.name}"

    def next(self) -> list[int] | None:
        with self.lock:
            return self.groups.pop(0) if self.groups else None

    def note(self, seed: int, error: str | None) -> None:
        with self.lock:
            self.cases += 1
            if error is None:
                return
            self.failed += 1
            _, drawn, shape = drawn_case(self.name, seed)
            again = f"run {self.a.folder or ''} --family {self.name} --seeds {seed} --platform {self.a.platform}"
            print(f"FAILED {self.name} seed {seed}: {error}")
            print(f"  {drawn.program}, T and S {shape}{', split-KV' if drawn.split_kv else ''}")
            print(f"  again: python tests/draw_gpu.py {again}", flush=True)

    def summary(self) -> str:
        compiled = len(list(self.cache.rglob("*.cubin")))
        carried = "none"
        if self.kernels is not None:
            carried = str(len({name for number in self.numbers for name in self.kernels[number]}))
        return (
            f"{self.name}: {self.cases} cases of {len(self.numbers)} programs, kernels: {carried} carried, {compiled} "
            f"compiled here; {self.failed} failed"
        )


class Worker:
    """A process for cases of one family, started again when it ends too early."""

    script = (__file__,)

    def __init__(self, family: Family) -> None:
        self.family = family
        self.process: subprocess.Popen[str] | None = None
        self.started = 0

    def run(self) -> None:
        while seeds := self.family.next():
            while seeds:
                if self.process is None:
                    self.process = self.start()
                assert self.process.stdin
                with contextlib.suppress(BrokenPipeError):  # it has ended, which the reader will notice
                    self.process.stdin.write(json.dumps(seeds) + "\n")
                    self.process.stdin.flush()
                seeds = self.listen(self.process, seeds)
        if self.process:
            self.process.communicate()

    def start(self) -> subprocess.Popen[str]:
        family, a = self.family, self.family.a
        self.started += 1
        name = f"{family.name}-{threading.get_ident()}-{self.started}"
        self.errors = family.scratch / f"{name}.stderr"
        command = [sys.executable, *self.script, "work", family.name, a.platform]
        environment = os.environ | {"JAX_FLASH_CUDA_FAMILY": family.name, "JAX_FLASH_CACHE_DIR": str(family.cache)}
        if a.folder:
            environment["JAX_FLASH_PREBUILT_DIR"] = str(a.folder)
        if a.memcheck:
            log = family.scratch / f"{name}.memcheck"
            ours = ["--kernel-name", "kernel_substring=jax_flash", "--print-level", "error"]
            command = ["compute-sanitizer", "--tool", "memcheck", "--log-file", str(log), *ours, *command]
            environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"  # every array an allocation of its own
        with open(self.errors, "w", encoding="utf-8") as errors:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def listen(self, process: subprocess.Popen[str], seeds: list[int]) -> list[int]:
        """Records the results of ``seeds``, and returns those without one when the process has ended."""
        assert process.stdout
        left, late = list(seeds), threading.Event()

        def too_late() -> None:
            late.set()
            process.kill()

        while left:
            timer = threading.Timer(SECONDS, too_late)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if line.startswith(MARK):
                what = json.loads(line.removeprefix(MARK))
                left.remove(what["seed"])
                self.family.note(what["seed"], what["error"])
                if not what["fatal"]:
                    continue
            elif line:
                continue
            else:
                how = f"no result after {SECONDS} s" if late.is_set() else f"its process ended with {process.wait()}"
                said = self.errors.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
                self.family.note(left.pop(0), f"{how}\n{said}")
            process.communicate()
            self.process = None
            break
        return left


def memory_errors(scratch: pathlib.Path) -> list[str]:
    """The errors that compute-sanitizer has reported, and unfinished reports."""
    found = []
    for log in scratch.glob("*.memcheck"):
        text = log.read_text(encoding="utf-8", errors="replace")
        if "ERROR SUMMARY: 0 errors" not in text:
            found.append(f"{log.name}:\n{text[:3000]}")
    return found


def run(a: argparse.Namespace) -> int:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="draw_gpu_") as folder:
        scratch = pathlib.Path(folder)
        families = [Family(name, a, scratch) for name in a.family or FAMILIES]
        each = max(1, a.workers // len(families))
        with concurrent.futures.ThreadPoolExecutor(each * len(families)) as pool:
            workers = [Worker(family) for family in families for _ in range(min(each, len(family.groups)))]
            for future in [pool.submit(worker.run) for worker in workers]:
                future.result()
        for family in families:
            print(family.summary())
        errors = memory_errors(scratch) if a.memcheck else []
        print(*errors, sep="\n")
        if a.memcheck:
            print(f"memcheck: {len(errors)} processes with errors")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return int(bool(errors) or any(family.failed or not family.cases for family in families))


def seeds_of(text: str) -> range:
    """17, or A:B, or A:B:STEP."""
    numbers = [int(x) for x in text.split(":")]
    return range(numbers[0], numbers[0] + 1) if len(numbers) == 1 else range(*numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compile", "run"):
        command = commands.add_parser(name)
        command.add_argument("--family", action="append", choices=FAMILIES, help="default: all")
        if name == "compile":
            command.add_argument("--out", type=pathlib.Path, required=True)
            continue
        command.add_argument("folder", type=pathlib.Path, nargs="?", help="default: kernels are compiled here")
        command.add_argument("--seeds", type=seeds_of, required=True, help="A:B, A:B:STEP or one")
        command.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
        command.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; default: one a core")
        command.add_argument("--memcheck", action="store_true", help="under compute-sanitizer")
    worker = commands.add_parser("work")  # for run
    worker.add_argument("family", choices=FAMILIES)
    worker.add_argument("platform")
    a = parser.parse_args()
    os.environ.pop("JAX_FLASH_SPLIT_KV", None)  # every program has its own
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if a.command == "compile":
        compile_(a.family or FAMILIES, a.out)
    elif a.command == "work":
        work(a.family, a.platform)
    else:
        return run(a)
    return 0


if __name__ == "__main__":
    sys.exit(main())
