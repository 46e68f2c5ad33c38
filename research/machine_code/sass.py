"""Machine code of a cubin, by NVIDIA's disassembler: instructions with their control fields, and the main loop."""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence


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

    def successors(self, at: int) -> Iterator[int]:
        """What may be executed after an instruction."""
        instruction = self.instructions[at]
        always = instruction.guard in ("", "PT", "UPT")
        if at in self.targets and instruction.base == "BRA":
            yield self.targets[at]
        elif instruction.base not in _ENDS:
            always = False
        if not always and at + 1 < len(self.instructions):
            yield at + 1

    @functools.cached_property
    def joins(self) -> frozenset[int]:
        """Where branches go to."""
        return frozenset(self.targets.values())


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction of a loop's path; `active` when its guard lets it have an effect."""

    instruction: Instruction
    active: bool


Path = tuple[Executed, ...]

MATRIX = ("HMMA",)
GLOBAL_ACCESS = ("LDG", "LDGSTS", "STG", "RED", "REDG", "ATOMG")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "CALL")
SHARED_ACCESS = ("LDS", "LDSM", "STS", "STSM", "ATOMS")


class DisassemblerMissing(RuntimeError):
    """No available nvdisasm supports the architecture."""


def disassemblers() -> Iterator[pathlib.Path]:
    """Every available nvdisasm: on the PATH, then those in Python packages.

    NVIDIA's own package begins with CUDA 13, which does not support sm_70; Triton's has that of CUDA 12.
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
        "the model needs NVIDIA's nvdisasm, of CUDA 12 for sm_70 (install triton, or put it on the PATH): "
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


def main_loop(function: Function) -> Path | None:
    """What one warp executes in one round of the main loop, or None for a function without a loop of matrix products.

    The main loop is the innermost loop with the most matrix instructions. Of the ways through it, and of several such
    loops, the usual one is taken: the one that has all matrix instructions, all accesses to global memory (there is a
    next tile to bring) and all those to shared memory in the fewest instructions (nothing is masked or checked).
    """
    loops = [(head, latch, body) for head, latch, body in _loops(function) if _has_products(function, body)]
    best: _Way | None = None
    for head, latch, body in loops:
        if any(other in body and other != head for other, _, _ in loops):
            continue
        way = _usual_way(function, head, latch)
        if way and (best is None or way.rank > best.rank):
            best = way
    return best.path(function.instructions) if best else None


def _loops(function: Function) -> Iterator[tuple[int, int, frozenset[int]]]:
    """The first instruction, the branch back to it, and all instructions of each loop.

    A branch backwards makes a loop when there is no other way to it than through its target: code that was moved out of
    the way comes back by such branches, too.
    """
    count = len(function.instructions)
    successors = [tuple(function.successors(at)) for at in range(count)]
    predecessors: list[list[int]] = [[] for _ in range(count)]
    for at, following in enumerate(successors):
        for to in following:
            predecessors[to].append(at)
    for latch, head in sorted(function.targets.items()):
        if head <= latch and (head == 0 or latch not in _reachable(successors, 0, without=head)):
            yield head, latch, frozenset({head, *_reachable(predecessors, latch, without=head)})


def _reachable(edges: Sequence[Sequence[int]], start: int, *, without: int) -> set[int]:
    found, waiting = {start}, [start]
    while waiting:
        for to in edges[waiting.pop()]:
            if to != without and to not in found:
                found.add(to)
                waiting.append(to)
    return found


def access_bytes(instruction: Instruction) -> int:
    """Bytes that a lane moves by a load, a store or an atomic addition; a lane's share of ldmatrix's."""
    modifiers = instruction.opcode.split(".")
    if modifiers[0] == "LDSM":
        return 4 * int(modifiers[-1]) if modifiers[-1].isdigit() else 4
    widths = {"128": 16, "F32x4": 16, "64": 8, "F32x2": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1}
    for bits, size in widths.items():
        if bits in modifiers:
            return size
    return 4


def _has_products(function: Function, body: Iterable[int]) -> bool:
    return any(function.instructions[at].base in MATRIX for at in body)


# What a way through a loop is ranked by: matrix instructions, bytes to and from global and shared memory, and minus the
# instructions.
_Rank = tuple[int, int, int, int]


def _worth(instruction: Instruction) -> _Rank:
    return (
        int(instruction.base in MATRIX),
        access_bytes(instruction) if instruction.base in GLOBAL_ACCESS else 0,
        access_bytes(instruction) if instruction.base in SHARED_ACCESS else 0,
        0,
    )


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way from the head of a loop up to some instruction."""

    rank: _Rank
    """With everything whose guard isn't decided yet."""
    stretches: tuple[tuple[int, int], ...]
    """Of consecutive instructions, the ends excluded."""
    defined: dict[str, int]
    """Predicate -> the instruction that computed it last, on this way."""
    decided: dict[tuple[str, int], bool]
    """(predicate, where it was computed) -> what a branch on this way makes of it."""
    guarded: dict[tuple[str, int, bool], _Rank]
    """What hangs on a predicate that isn't decided, and on which value."""

    def state(self) -> frozenset[tuple[str, int, bool | None]]:
        """What the rest of the way depends on."""
        return frozenset((p, at, self.decided.get((p, at))) for p, at in self.defined.items())

    def path(self, code: Sequence[Instruction]) -> Path:
        """Only for a whole way."""
        out = []
        defined: dict[str, int] = {}
        for first, last in self.stretches:
            for at in range(first, last):
                guard = code[at].guard
                truth = _truth(guard, self.decided.get((name := guard.lstrip("!"), defined.get(name, -1))))
                out.append(Executed(code[at], truth is not False))
                defined.update(dict.fromkeys(_defines(code[at]), at))
        return tuple(out)


# Ways that meet and go on alike are merged into the best of them; those that differ in what they know about predicates
# are kept apart, up to so many.
_MOST_STATES = 64


def _usual_way(function: Function, head: int, latch: int) -> _Way | None:
    """The best way from the head of a loop back to it, by the branch `latch`.

    A predicate that decides a branch decides the instructions that it guards, too, from where it was computed.
    """
    best: _Way | None = None
    waiting: dict[int, dict[frozenset[tuple[str, int, bool | None]], _Way]] = {}

    def arrive(at: int, way: _Way) -> None:
        nonlocal best
        if at == head:
            if way.stretches[-1][1] == latch + 1 and (best is None or way.rank > best.rank):
                best = way
            return
        if any(first <= at < last for first, last in way.stretches):
            return  # another loop
        here = waiting.setdefault(at, {})
        state = way.state()
        if state not in here or way.rank > here[state].rank:
            here[state] = way

    for at, way in _stretch(function, head, _Way((0, 0, 0, 0), (), {}, {}, {})):
        arrive(at, way)
    while waiting:
        at = min(waiting)
        ways = sorted(waiting.pop(at).values(), key=lambda way: way.rank, reverse=True)
        for way in ways[:_MOST_STATES]:
            for following, longer in _stretch(function, at, way):
                arrive(following, longer)
    return best


def _stretch(function: Function, first: int, way: _Way) -> Iterator[tuple[int, _Way]]:
    """Goes on to the next branch, or the next target of one; yields where the way then leads."""
    code, joins = function.instructions, function.joins
    rank, defined, guarded = way.rank, dict(way.defined), dict(way.guarded)
    at = first
    while True:
        instruction = code[at]
        name = instruction.guard.lstrip("!")
        key = (name, defined.get(name, -1))
        truth = _truth(instruction.guard, way.decided.get(key))
        if truth is not False:
            worth = _worth(instruction)
            rank = _sum(rank, worth)
            if truth is None:
                hangs_on = (*key, not instruction.guard.startswith("!"))
                guarded[hangs_on] = _sum(guarded.get(hangs_on, (0, 0, 0, 0)), worth)
        rank = _sum(rank, (0, 0, 0, -1))
        at += 1
        branch = instruction.base == "BRA" and at - 1 in function.targets
        if instruction.base in _ENDS and truth is True:
            return
        defined.update(dict.fromkeys(_defines(instruction), at - 1))
        if branch or at in joins or at == len(code):
            break
    done = dataclasses.replace(
        way, rank=rank, stretches=(*way.stretches, (first, at)), defined=defined, guarded=guarded
    )
    if not branch:
        if at < len(code):
            yield at, done
        return
    for goes in (True, False) if truth is None else (truth,):
        onward = done if truth is not None else _decide(done, key, goes != instruction.guard.startswith("!"))
        if goes or at < len(code):
            yield (function.targets[at - 1] if goes else at), onward


def _decide(way: _Way, key: tuple[str, int], value: bool) -> _Way:
    lost = way.guarded.get((*key, not value), (0, 0, 0, 0))
    return dataclasses.replace(
        way,
        rank=_sum(way.rank, (-lost[0], -lost[1], -lost[2], 0)),
        decided={**way.decided, key: value},
        guarded={hangs_on: rank for hangs_on, rank in way.guarded.items() if hangs_on[:2] != key},
    )


def _truth(guard: str, value: bool | None) -> bool | None:
    if guard.lstrip("!") in ("", "PT", "UPT"):
        value = True
    return None if value is None else value != guard.startswith("!")


def _sum(a: _Rank, b: _Rank) -> _Rank:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


_PREDICATE = re.compile(r"U?P[0-6]")


def _defines(instruction: Instruction) -> Iterator[str]:
    """The predicates that an instruction computes: up to two, first of all or after the register."""
    operands = [operand.strip() for operand in instruction.operands.split(",")]
    if operands[0].startswith(("R", "UR")):
        del operands[0]
    for operand in operands[:2]:
        if not _PREDICATE.fullmatch(operand) and operand not in ("PT", "UPT"):
            return
        if operand[-1] != "T":
            yield operand
