"""How long a CUDA kernel takes, from its machine code: how busy its main loop keeps each unit, and a simulation of it.

docs/model.md has the method, the sources of the rates, and predictions compared with measurements.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from machine_code import sass


@dataclasses.dataclass(frozen=True)
class Chip:
    """A multiprocessor and the GPU around it. Rates are cycles, of one of four partitions where not said otherwise."""

    name: str
    multiprocessors: int
    clocks: Mapping[str, float]
    """GHz, by the kind of clock."""
    bandwidth: float
    """Memory bandwidth, GB/s."""
    registers: int = 65536
    shared_kb: int = 0
    """Shared memory of a multiprocessor, for all its blocks, KB."""
    reserved: int = 1024
    """Bytes of it that are reserved for each block in addition to its own."""
    warps: int = 64
    """Most resident warps."""

    hmma: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Cycles of the tensor cores for an instruction, by shape."""
    hmma_holds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Other units that a matrix instruction keeps busy, and for which part of its own time."""
    hmma_latency: float = 10
    """Cycles after these until a barrier that it holds is free."""
    fma: float = 2
    """Cycles of the unit for float32 products and sums, an instruction; integer products take 2 everywhere."""
    alu: float = 2
    """Integers, logic, comparisons, selections."""
    xu: float = 8
    """Exponentials, and conversions that the ALU doesn't do."""
    xu_latency: float = 9
    load_latency: float = 20
    """Latency of a load from shared memory, in addition to its wavefronts."""
    shuffle_latency: float = 21
    global_latency: float = 300
    """Latency of a load that hits L2."""
    l2_bytes: float = 64
    """Bytes from L2 per cycle and multiprocessor, when all of them load."""
    l2_port: float = 64
    """The same when one loads while the others compute, as within a round."""
    red: float = 9
    """Cycles of a multiprocessor for 128 bytes of atomic additions, which L2 does."""
    red_wavefronts: float = 2
    """Wavefronts of the memory pipe for the same."""
    barrier_latency: float = 20
    taken_branch: float = 10
    """Cycles that a warp loses."""
    queue: int = 8
    """Memory instructions of a partition that wait for the multiprocessor's pipe."""


# What has no figure here is as measured on the H200. docs/model.md has the sources.
CHIPS: Mapping[int, Chip] = {
    70: Chip(
        name="V100",
        multiprocessors=80,
        clocks={"1380 MHz": 1.380, "1530 MHz": 1.530},
        bandwidth=830,
        shared_kb=96,
        reserved=0,
        hmma={"884": 2.0},
        global_latency=211,
        l2_bytes=19.5,
    ),
    75: Chip(
        name="T4",
        multiprocessors=40,
        clocks={"1590 MHz": 1.590, "1000 MHz": 1.0},
        bandwidth=270,
        shared_kb=64,
        reserved=0,
        warps=32,
        hmma={"1688": 8.0},
        global_latency=188,
        l2_bytes=20,
    ),
    80: Chip(
        name="A100 SXM4",
        multiprocessors=108,
        clocks={"1410 MHz": 1.410},
        bandwidth=1500,
        shared_kb=164,
        hmma={"16816": 8.0, "1688": 4.0},
        l2_bytes=47,
    ),
    86: Chip(
        name="A10",
        multiprocessors=72,
        clocks={"1695 MHz": 1.695},
        bandwidth=550,
        shared_kb=100,
        warps=48,
        hmma={"16816": 16.0, "1688": 8.0},
        hmma_holds={"fma": 0.5, "alu": 0.125},
        fma=1,
        l2_bytes=32,
    ),
    89: Chip(
        name="L4",
        multiprocessors=58,
        clocks={"2040 MHz": 2.040},
        bandwidth=270,
        shared_kb=100,
        warps=48,
        hmma={"16816": 16.0, "1688": 8.0},
        hmma_holds={"fma": 0.5, "alu": 0.125},
        fma=1,
        l2_bytes=32,
    ),
    90: Chip(
        name="H200",
        multiprocessors=132,
        clocks={"1800 MHz": 1.800},
        bandwidth=4300,
        shared_kb=228,
        hmma={"16816": 6.04, "1688": 4.04},
        hmma_holds={"fma": 1.0, "alu": 0.33},
        fma=1,
    ),
}
"""By compute capability."""

UNITS = ("issue", "tensor", "fma", "alu", "xu", "shared", "l2", "red")
"""The units that may be the bound; the last three are a multiprocessor's, the others a partition's."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The resources that an instruction occupies."""

    unit: str
    """"" for those that only take their issue slot."""
    busy: float
    """Cycles of the unit."""
    latency: float
    """Cycles from the end of `busy`, for memory instructions in the pipe, until its barriers are free."""
    l2: float = 0
    """Cycles of the way to L2."""


_FMA = ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HMUL2", "HADD2")
_XU = ("MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV")
_ALU_CONVERSIONS = ("F2FP", "I2FP", "F2IP")
_FLOAT_COMPARE = ("FMNMX", "FMNMX3", "FSEL", "FSETP")
_SHARED = (*sass.SHARED_ACCESS, "SHFL", "LDL", "STL")
_CONTROL = (
    *("BRA", "BAR", "BSSY", "BSYNC", "BREAK", "BMOV", "CALL", "RET", "EXIT", "NOP", "WARPSYNC", "YIELD", "NANOSLEEP"),
    *("DEPBAR", "LDGDEPBAR", "MEMBAR", "ERRBAR", "LDC", "S2R", "CS2R", "R2UR", "S2UR"),
)
_GLOBAL = sass.GLOBAL_ACCESS


def cost_of(instruction: sass.Instruction, chip: Chip, conflicts: float = 1.0) -> Cost:
    """`conflicts` multiplies the wavefronts of accesses to shared memory.

    Raises ValueError for a matrix instruction that the chip doesn't have.
    """
    base = instruction.base
    if base in sass.MATRIX:
        shape = instruction.opcode.split(".")[1]
        if shape not in chip.hmma:
            raise ValueError(f"{instruction.opcode} is not known on {chip.name}")
        return Cost("tensor", chip.hmma[shape], chip.hmma_latency)
    if base in _FMA:
        return Cost("fma", max(chip.fma, 2.0) if base == "IMAD" else chip.fma, 4)
    if base in _XU:
        return Cost("xu", chip.xu, chip.xu_latency)
    if base in _SHARED:
        # All lanes' words of 32 bits are a wavefront: a load of 16 bytes a lane takes four.
        words = sass.access_bytes(instruction) / 4
        wavefronts = max(1.0, words) * (conflicts if base in ("LDS", "LDSM", "STS") else 1.0)
        latency = chip.shuffle_latency if base == "SHFL" else chip.load_latency
        return Cost("shared", wavefronts, latency)
    if base in _GLOBAL:
        size = sass.access_bytes(instruction)
        if base.startswith(("RED", "ATOM")):
            return Cost("shared", chip.red_wavefronts * size / 4, chip.global_latency, chip.red * size / 4)
        return Cost("shared", max(1.0, size / 4), chip.global_latency, 32 * size / chip.l2_bytes)
    if base in _CONTROL or base.startswith("U"):
        return Cost("", 0, 20)
    return Cost("alu", chip.alu, 6)


Counts = Mapping[str, int]


def counts_of(path: sass.Path) -> Counts:
    """Instructions of a path by class, those that a guard switches off in "off" alone; loads and stores by width."""
    counts: collections.Counter[str] = collections.Counter()
    for executed in path:
        instruction = executed.instruction
        base = instruction.base
        if not executed.active:
            name = "off"
        elif base in sass.MATRIX:
            name = f"HMMA.{instruction.opcode.split('.')[1]}"
        elif base in ("SHFL", "STSM"):
            name = base
        elif base in _SHARED or base in _GLOBAL:
            name = f"{'RED' if base.startswith(('RED', 'ATOMG')) else base}.{8 * sass.access_bytes(instruction)}"
        elif base in ("MUFU", "BAR", "BRA"):
            name = base
        elif base in _XU:
            name = "conversion (XU)"
        elif base in _ALU_CONVERSIONS:
            name = "conversion (ALU)"
        elif base in _FMA and base != "IMAD":
            name = "float"
        elif base in _FLOAT_COMPARE:
            name = "float compare"
        elif base.startswith("U") or base in ("R2UR", "S2UR"):
            name = "uniform"
        else:
            name = "other" if base in _CONTROL else "integer"
        counts[name] += 1
    return dict(counts)


def blocks_per_multiprocessor(chip: Chip, *, registers: int, threads: int, shared_bytes: int) -> int:
    """The number of resident blocks; 0 if not even one fits."""
    warps = threads // 32
    return min(
        chip.registers // (-(-registers // 8) * 8 * 32 * warps),
        chip.warps // warps,
        chip.shared_kb * 1024 // (shared_bytes + chip.reserved),
    )


def busy_cycles(path: sass.Path, chip: Chip, warps: int, conflicts: float = 1.0) -> dict[str, float]:
    """Cycles that each unit is busy with one round of the loop by `warps` warps, which share four partitions."""
    busy = dict.fromkeys(UNITS, 0.0)
    share = warps / 4
    for executed in path:
        busy["issue"] += share
        if not executed.active:
            continue
        cost = cost_of(executed.instruction, chip, conflicts)
        if cost.unit == "shared":
            busy["shared"] += cost.busy * warps
            busy["red" if executed.instruction.base.startswith("RED") else "l2"] += cost.l2 * warps
        elif cost.unit:
            busy[cost.unit] += cost.busy * share
    return busy


@dataclasses.dataclass(frozen=True)
class Task:
    """Full attention, without causal: batch entries, lengths of queries and keys, and query heads times head dim."""

    batch: int = 4
    length: int = 4096
    width: int = 2048

    def work(self, scores: float) -> float:
        """Floating-point operations by the convention of docs/performance.md, `scores` products of [T, S, H]."""
        return 2 * scores * self.batch * self.length**2 * self.width


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for one kernel on one chip."""

    name: str
    pass_: str
    head_dim: int
    tile: tuple[int, int]
    warps: int
    blocks: int
    """Resident blocks."""
    counts: Counts
    """Instructions of a warp in a round of the loop, by class."""
    busy: Mapping[str, float]
    """Cycles that each unit is busy in a round of all resident blocks."""
    cycles: float
    """Cycles that a round of all resident blocks takes."""
    rounds: float
    """Rounds of the multiprocessor with the most work."""
    moved: float
    """Bytes that passes around the kernel read and write: zeros under dQ, and its conversion."""

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        return max(UNITS, key=lambda unit: self.busy[unit])

    def seconds(self, chip: Chip, clock: float) -> float:
        """Seconds at `clock` GHz."""
        return self.rounds * self.cycles / clock / 1e9 + self.moved / chip.bandwidth / 1e9


def predict(kernel: Mapping[str, Any], chip: Chip, *, task: Task | None = None, conflicts: float = 1.0) -> Prediction:
    """Predicts a kernel that `_core.build_kernels` made.

    `conflicts` multiplies the wavefronts of loads from and stores to shared memory. Raises ValueError for a kernel that
    has no room on the chip or no main loop, RuntimeError (DisassemblerMissing) without a disassembler that takes it.
    """
    task = task or Task()
    entry = f"jax_flash_{kernel['pass']}"
    path = sass.main_loop(sass.disassemble(pathlib.Path(kernel["path"]))[entry])
    if path is None:
        raise ValueError(f"{kernel['name']}: no loop with matrix instructions in {entry}")
    block_q, block_kv, head_dim = kernel["block_q"], kernel["block_kv"], kernel["head_dim"]
    warps = kernel["threads"] // 32
    blocks = blocks_per_multiprocessor(
        chip, registers=kernel["registers"], threads=kernel["threads"], shared_bytes=kernel["shared_bytes"]
    )
    if not blocks:
        raise ValueError(
            f"{kernel['name']}: a block of {kernel['threads']} threads with {kernel['registers']} registers and "
            f"{kernel['shared_bytes']} bytes of shared memory has no room on {chip.name}"
        )
    # A block owns rows and walks over the keys, or the other way round.
    owned, walked = (block_kv, block_q) if kernel["pass"] == "backward" else (block_q, block_kv)
    all_blocks = -(-task.length // owned) * task.batch * (task.width / head_dim)
    # The multiprocessor that gets the most blocks decides; a block takes about a round more than it has, to get under
    # way and to store its result.
    waves = math.ceil(all_blocks / chip.multiprocessors) / blocks
    rounds = waves * (-(-task.length // walked) + 1)
    counts = counts_of(path)
    atomics = any(name.startswith("RED") for name in counts)
    return Prediction(
        name=kernel["name"],
        pass_=kernel["pass"],
        head_dim=head_dim,
        tile=(block_q, block_kv),
        warps=warps,
        blocks=blocks,
        counts=counts,
        busy=busy_cycles(path, chip, warps * blocks, conflicts),
        cycles=simulate(path, chip, warps=warps, blocks=blocks, conflicts=conflicts),
        rounds=rounds,
        # Four bytes zeroed, four read and two written for each element of dQ.
        moved=10.0 * task.batch * task.length * task.width if atomics else 0.0,
    )


SCORES = {"forward": 2.0, "backward": 5.0}
"""Products of [T, S, H] that the convention counts for a direction, whatever its kernels compute."""


def rates(predictions: Sequence[Prediction], chip: Chip, clock: float, task: Task | None = None) -> dict[str, float]:
    """TFLOP/s of forward and backward at `clock` GHz, of predictions for one head dim; the passes of a backward add."""
    task = task or Task()
    seconds: dict[str, float] = {}
    for prediction in predictions:
        direction = "forward" if prediction.pass_ == "forward" else "backward"
        seconds[direction] = seconds.get(direction, 0.0) + prediction.seconds(chip, clock)
    return {direction: task.work(SCORES[direction]) / time / 1e12 for direction, time in seconds.items()}


def simulate(path: sass.Path, chip: Chip, *, warps: int, blocks: int, conflicts: float = 1.0, rounds: int = 6) -> float:
    """Cycles of a multiprocessor for one round of the loop by all its `blocks` of `warps` warps each.

    Every partition issues one instruction a cycle at most, of a warp that may: the stall of its last instruction is
    over, the barriers it waits for are free, the unit isn't busy, the queue of the memory pipe has room. Stalls and
    barriers are those in the machine code, so dependencies need no analysis. The first two rounds don't count. The
    phase between resident blocks is arbitrary, so with several of them the result is the mean over some initial
    distances.
    """
    starts = (0.3, 0.5, 0.7) if blocks > 1 else (0.0,)
    runs = [_Multiprocessor(path, chip, warps, blocks, conflicts, rounds + 2, start).run(2) for start in starts]
    return max(sum(runs) / len(runs), busy_cycles(path, chip, warps * blocks)["l2"])


@dataclasses.dataclass(slots=True)
class _Step:
    """An instruction as the simulation needs it."""

    stall: int
    waits: tuple[int, ...]
    sets: int  # -1 for none
    reads: int
    unit: int  # index in _Multiprocessor.free; -1 for none
    busy: float
    latency: float
    l2: float
    kind: int
    groups: int  # that DEPBAR lets pass


_PLAIN, _MEMORY, _BAR, _COPY, _COPY_END, _COPY_WAIT, _JUMP = range(7)
_PARTITION_UNITS = ("tensor", "fma", "alu", "xu")


class _Warp:
    __slots__ = ("at", "barriers", "block", "copies", "ends", "groups", "ready")

    def __init__(self, block: int, ready: float) -> None:
        self.block = block
        self.ready = ready
        self.at = 0
        self.barriers = [0.0] * 6  # when each is free
        self.copies = 0.0  # when all copies so far have arrived
        self.groups: list[float] = []  # and those of each group
        self.ends: list[float] = []


class _Multiprocessor:
    def __init__(
        self, path: sass.Path, chip: Chip, warps: int, blocks: int, conflicts: float, rounds: int, start: float
    ) -> None:
        self.chip = chip
        self.rounds = rounds
        self.warps_of_block = warps
        self.steps = [self.step(executed, conflicts) for executed in path]
        apart = start * len(path) * warps / 4
        self.partitions: list[list[_Warp]] = [[] for _ in range(4)]
        self.arrived = [0] * blocks
        self.waiting: list[list[_Warp]] = [[] for _ in range(blocks)]
        for block in range(blocks):
            for warp in range(warps):
                self.partitions[(block * warps + warp) % 4].append(_Warp(block, block * apart))
        self.free = [[0.0] * len(_PARTITION_UNITS) for _ in range(4)]
        self.queued: list[collections.deque[float]] = [collections.deque() for _ in range(4)]
        self.pipe = self.to_l2 = 0.0
        self.held = [(_PARTITION_UNITS.index(unit), part) for unit, part in chip.hmma_holds.items()]
        self.tries = [0.0] * 4  # when each partition may issue next

    def step(self, executed: sass.Executed, conflicts: float) -> _Step:
        instruction = executed.instruction
        base = instruction.base
        cost = cost_of(instruction, self.chip, conflicts) if executed.active else Cost("", 0, 0)
        kind = _MEMORY if cost.unit == "shared" else _PLAIN
        groups = 0
        if executed.active:
            if base == "BAR":
                kind = _BAR
            elif base == "LDGSTS":
                kind = _COPY
            elif base == "LDGDEPBAR":
                kind = _COPY_END
            elif base == "DEPBAR":
                kind = _COPY_WAIT
                groups = int(instruction.operands.split(",")[1].strip(), 16)
            elif base == "BRA":
                kind = _JUMP
        return _Step(
            stall=max(1, instruction.stall),
            waits=tuple(instruction.waits),
            sets=-1 if instruction.sets is None else instruction.sets,
            reads=-1 if instruction.reads is None else instruction.reads,
            unit=_PARTITION_UNITS.index(cost.unit) if cost.unit in _PARTITION_UNITS else -1,
            busy=cost.busy,
            latency=cost.latency,
            l2=cost.l2 * (1 if base.startswith("RED") else self.chip.l2_bytes / self.chip.l2_port),
            kind=kind,
            groups=groups,
        )

    def run(self, skip: int) -> float:
        now = 0.0
        left = sum(map(len, self.partitions))
        total = len(self.steps)
        while left:
            for p in range(4):
                if self.tries[p] > now:
                    continue
                soonest = math.inf
                for position, warp in enumerate(self.partitions[p]):
                    if warp.ready > now:
                        soonest = min(soonest, warp.ready)
                        continue
                    step = self.steps[warp.at]
                    when = self.earliest(step, warp, p)
                    if when > now:
                        warp.ready = when
                        soonest = min(soonest, when)
                        continue
                    self.issue(step, warp, p, now)
                    warp.at += 1
                    if warp.at == total:
                        warp.at = 0
                        warp.ends.append(now)
                        left -= len(warp.ends) == self.rounds  # and goes on, as the others have to share
                    # The others come first next time.
                    self.partitions[p].append(self.partitions[p].pop(position))
                    soonest = now + 1
                    break
                self.tries[p] = soonest
            following = min(self.tries)
            if math.isinf(following) and left:
                raise RuntimeError("the simulated warps wait for each other")
            now = max(now + 1, math.ceil(following)) if left else now
        spans = [
            (warp.ends[self.rounds - 1] - warp.ends[skip - 1]) / (self.rounds - skip)
            for partition in self.partitions
            for warp in partition
        ]
        return sum(spans) / len(spans)

    def earliest(self, step: _Step, warp: _Warp, p: int) -> float:
        when = 0.0
        for barrier in step.waits:
            when = max(when, warp.barriers[barrier])
        if step.unit >= 0:
            when = max(when, self.free[p][step.unit])
        elif step.kind in (_MEMORY, _COPY):
            queue = self.queued[p]
            if len(queue) >= self.chip.queue:
                when = max(when, queue[-self.chip.queue])
        elif step.kind == _COPY_WAIT and len(warp.groups) > step.groups:
            when = max(when, warp.groups[-1 - step.groups])
        return when

    def issue(self, step: _Step, warp: _Warp, p: int, now: float) -> None:
        warp.ready = now + step.stall
        done = read = now
        if step.unit >= 0:
            free = self.free[p]
            # A unit that takes 6.4 cycles keeps its pace over several instructions.
            free[step.unit] = max(free[step.unit], now - 1) + step.busy
            if step.unit == 0:
                for unit, part in self.held:
                    free[unit] = max(free[unit], now) + part * step.busy
            done = now + step.busy + step.latency
            read = now + step.busy
        elif step.kind in (_MEMORY, _COPY):
            queue = self.queued[p]
            while queue and queue[0] <= now:
                queue.popleft()
            start = max(now + 2, self.pipe)
            self.pipe = start + step.busy
            queue.append(start)
            read = start + step.busy + 4
            done = start + step.busy + step.latency
            if step.l2:
                self.to_l2 = max(self.to_l2, start) + step.l2
                done = max(done, self.to_l2 + step.latency)
            if step.kind == _COPY:
                warp.copies = max(warp.copies, done)
        elif step.kind == _COPY_END:
            warp.groups.append(warp.copies)
            done = warp.copies
        elif step.kind == _BAR:
            self.arrive(warp, now)
        elif step.kind == _JUMP:
            warp.ready = now + max(step.stall, self.chip.taken_branch)
        else:
            done = now + step.latency
        if step.sets >= 0 and step.kind != _COPY_END:
            warp.barriers[step.sets] = max(warp.barriers[step.sets], done)
        if step.reads >= 0:
            warp.barriers[step.reads] = max(warp.barriers[step.reads], read)

    def arrive(self, warp: _Warp, now: float) -> None:
        block = warp.block
        waiting = self.waiting[block]
        waiting.append(warp)
        if len(waiting) < self.warps_of_block:
            warp.ready = math.inf
            return
        for other in waiting:
            other.ready = now + self.chip.barrier_latency
        for p in range(4):
            self.tries[p] = min(self.tries[p], now + self.chip.barrier_latency)
        waiting.clear()
