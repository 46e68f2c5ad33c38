"""Machine code of a cubin, by NVIDIA's disassembler: instructions with their control fields, and the main loop."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, with the fields by which the compiler steers the issue (the same bits from sm_70 to sm_90)."""

    opcode: str
    """With its modifiers: "LDS.U.128"."""
    operands: str
    guard: str
    """"P0" or "!P0": the predicate under which it has an effect; "" for none."""
    stall: int
    """Cycles until the warp may issue the next instruction."""
    sets: int | None
    """The barrier that is held until the result is there."""
    reads: int | None
    """The barrier that is held until the operands have been read."""
    waits: frozenset[int]
    """The barriers that must be free before the issue."""

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]


@dataclasses.dataclass(frozen=True)
class Function:
    """A kernel's code."""

    name: str
    instructions: tuple[Instruction, ...]
    targets: dict[int, int]
    """Index of a branch -> index of the instruction that it goes to."""


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction of a loop's path; `active` when its guard lets it have an effect."""

    instruction: Instruction
    active: bool


Path = tuple[Executed, ...]

MATRIX = ("HMMA",)
GLOBAL_ACCESS = ("LDG", "LDGSTS", "STG", "RED", "REDG", "ATOMG")


class DisassemblerMissing(RuntimeError):
    """No nvdisasm here that knows the architecture."""


def disassemblers() -> Iterator[pathlib.Path]:
    """Every nvdisasm there is: on the PATH, then those that Python packages bring.

    NVIDIA's own package has begun with CUDA 13, which no longer knows sm_70; Triton's still brings that of CUDA 12.
    """
    found = shutil.which("nvdisasm")
    if found:
        yield pathlib.Path(found)
    for package, places in {"triton": ("backends/nvidia/bin",), "nvidia": ("cu13/bin",)}.items():
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for place in places:
                path = pathlib.Path(root) / place / "nvdisasm"
                if path.is_file():
                    yield path


def disassemble(cubin: pathlib.Path) -> dict[str, Function]:
    """The kernels of a cubin by name.

    Raises DisassemblerMissing when no nvdisasm is found that takes it, RuntimeError for output that isn't understood.
    """
    errors = []
    for tool in disassemblers():
        if not os.access(tool, os.X_OK):
            errors.append(f"{tool}: not executable")
            continue
        done = subprocess.run([tool, "-c", "-hex", cubin], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return dict(_functions(done.stdout))
        errors.append(f"{tool}: {done.stderr.strip()}")
    raise DisassemblerMissing(
        "the model needs NVIDIA's nvdisasm, of CUDA 12 for sm_70 (install jax_flash[model], or put it on the PATH): "
        + ("; ".join(errors) or "none found")
    )


_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"(\.L\w+):")
_FIRST = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_TARGET = re.compile(r"`\((\.L\w+)\)")


def _functions(text: str) -> Iterator[tuple[str, Function]]:
    for part in re.split(r"(?m)^(?=\s*\.section\s)", text):
        section = _SECTION.match(part)
        if not section:
            continue
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        branches: dict[int, str] = {}
        pending: re.Match[str] | None = None
        for line in part.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(instructions)
            elif first := _FIRST.match(line):
                pending = first
            elif (second := _SECOND.match(line)) and pending:
                if target := _TARGET.search(pending[3]):
                    branches[len(instructions)] = target[1]
                instructions.append(_instruction(pending, int(second[1], 16)))
                pending = None
        if pending or not instructions:
            raise RuntimeError(f"nvdisasm's listing of {section[1]} is not understood")
        targets = {at: labels[name] for at, name in branches.items() if name in labels}
        yield section[1], Function(section[1], tuple(instructions), targets)


def _instruction(text: re.Match[str], high: int) -> Instruction:
    """`high` is the upper half of the encoding: its bits 41 to 57 are the control fields."""
    sets, reads = high >> 46 & 7, high >> 49 & 7
    return Instruction(
        opcode=text[2],
        operands=text[3],
        guard=text[1] or "",
        stall=high >> 41 & 15,
        sets=None if sets == 7 else sets,
        reads=None if reads == 7 else reads,
        waits=frozenset(i for i in range(6) if high >> 52 + i & 1),
    )


def registers_of(cubin: bytes, kernel: str) -> int:
    """Registers of a thread, which an ELF section of code states in the upper byte of its sh_info."""
    for name, header in _sections(cubin):
        if name == f".text.{kernel}":
            return int.from_bytes(header[44:48], "little") >> 24
    raise ValueError(f"no kernel {kernel} in the cubin")


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    at, size, count, names = (
        int.from_bytes(cubin[i : i + n], "little") for i, n in ((40, 8), (58, 2), (60, 2), (62, 2))
    )
    headers = [cubin[at + i * size : at + (i + 1) * size] for i in range(count)]
    strings = int.from_bytes(headers[names][24:32], "little")
    for header in headers:
        start = strings + int.from_bytes(header[:4], "little")
        yield cubin[start : cubin.index(b"\0", start)].decode(), header


def main_loop(function: Function) -> Path | None:
    """What one warp executes in one round of the main loop, or None for a function without a loop of matrix products.

    The main loop is the innermost loop with the most matrix instructions. Of the ways through it, and of several such
    loops, the usual one is taken: the one that has all matrix instructions and all accesses to global memory (there is
    a next tile to bring) in the fewest instructions (nothing is masked, no row is checked).
    """
    loops = {}
    for branch, target in function.targets.items():
        if target <= branch:
            loops[target] = max(branch, loops.get(target, -1))
    best: tuple[tuple[int, int, int], Path] | None = None
    for head in loops:
        inner = any(head < other <= loops[head] and _products(function, other, loops[other]) for other in loops)
        if inner or not _products(function, head, loops[head]):
            continue
        for path in _ways(function, head):
            work = [e.instruction for e in path if e.active]
            products = sum(i.base in MATRIX for i in work)
            traffic = sum(access_bytes(i) for i in work if i.base in GLOBAL_ACCESS)
            rank = (products, traffic, -len(path))
            if best is None or rank > best[0]:
                best = rank, path
    return best[1] if best else None


def access_bytes(instruction: Instruction) -> int:
    """Bytes that a lane moves by a load, a store or an atomic addition."""
    modifiers = instruction.opcode.split(".")
    for bits, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("16", 2), ("U8", 1), ("S8", 1)):
        if bits in modifiers:
            return size
    return 4


def _products(function: Function, first: int, last: int) -> int:
    return sum(i.base in MATRIX for i in function.instructions[first : last + 1])


_MOST_WAYS = 4096


def _ways(function: Function, head: int) -> Iterator[Path]:
    """The ways from the head of a loop back to it, each a list of instructions without repetition.

    A predicate that decides a branch decides the instructions that it guards, too, from where it was computed.
    """
    code = function.instructions
    # (next instruction, taken so far as (index, the definition of its guard), decisions by definition, definitions)
    Step = tuple[int, tuple[tuple[int, int], ...], dict[tuple[str, int], bool], dict[str, int]]
    stack: list[Step] = [(head, (), {}, {})]
    ways = 0
    while stack:
        at, taken_so_far, decided, defined = stack.pop()
        taken = list(taken_so_far)
        seen = {index for index, _ in taken}
        while True:
            if at in seen or at >= len(code):
                break
            instruction = code[at]
            name = instruction.guard.lstrip("!")
            key = (name, defined.get(name, -1))
            taken.append((at, key[1]))
            seen.add(at)
            if instruction.base in ("EXIT", "RET", "BRX", "CALL") and not name:
                break
            if at in function.targets and instruction.base == "BRA":
                goes = _truth(instruction.guard, decided, key)
                if goes is None:  # either way: the other one later
                    wanted = not instruction.guard.startswith("!")
                    stack.append((at + 1, tuple(taken), {**decided, key: not wanted}, dict(defined)))
                    decided = {**decided, key: wanted}
                    goes = True
                if goes:
                    if function.targets[at] == head:
                        yield _executed(code, taken, decided)
                        ways += 1
                        if ways == _MOST_WAYS:
                            return
                        break
                    at = function.targets[at]
                    continue
            for predicate in _PREDICATE.findall(instruction.operands.split("R", 1)[0]):
                defined[predicate] = at
            at += 1


_PREDICATE = re.compile(r"\bU?P\d\b")


def _truth(guard: str, decided: dict[tuple[str, int], bool], key: tuple[str, int]) -> bool | None:
    name = key[0]
    if not name or name in ("PT", "UPT"):
        return not guard.startswith("!")
    value = decided.get(key)
    return None if value is None else value != guard.startswith("!")


def _executed(
    code: tuple[Instruction, ...], taken: list[tuple[int, int]], decided: dict[tuple[str, int], bool]
) -> Path:
    out = []
    for index, definition in taken:
        guard = code[index].guard
        truth = _truth(guard, decided, (guard.lstrip("!"), definition))
        out.append(Executed(code[index], truth is not False))
    return tuple(out)
