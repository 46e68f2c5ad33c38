"""The tables of docs/scaling.md: time and bytes of attention over many devices, from first principles.

python research/context/scaling.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

RATE = 610e12
"""FLOP/s of a device's kernels, bfloat16, causal, forward and backward: what one H100 made of 16,384 to 131,072 tokens
(docs/scaling.md)."""
MEMORY = 3.0e12
"""Bytes per second of a device's own memory, of 3.35e12 that an H100's has."""
LINKS = {"NVLink": 240e9, "InfiniBand": 50e9}
"""Bytes per second and direction of a device: what collectives of two H100 reached, of 450e9 that NVLink 4 has; and one
NDR port of 400 Gbit/s for each device."""
START = 0.2e-3
"""Seconds that a program takes besides, to start all devices and to wait for them: the remainder at 8,192 tokens. Of a
layer among others, whose programs start ahead, it is no part."""
HOP = 0.1e-3
"""Seconds that each hop of a ring takes besides, hidden or not: what remains at 8,192 and 16,384 tokens on two and four
H100. A send holds multiprocessors, where the kernel beside it starts late, and devices wait for one another."""
HEADS, HEAD_DIM, ITEM, WIDE = 32, 128, 2, 4
LENGTHS = (8_192, 131_072, 1_048_576, 10_485_760)
DEVICES = (2, 8, 64, 512)
RATIOS = (1, 4, 8)


class Cost(NamedTuple):
    """Of one layer's attention, forward and backward, on each device."""

    compute: float  # seconds
    total: float  # seconds, with what is copied and summed, and the communication that nothing hides
    sent: float  # bytes
    memory: float  # bytes of K, V and what is like them, besides the device's own shards

    @property
    def efficiency(self) -> float:
        return self.compute / self.total


def cost(schedule: str, tokens: int, devices: int, kv_heads: int, bandwidth: float) -> Cost | None:
    """Causal attention of one sequence, balanced; None where the schedule does not serve it."""
    if schedule == "ulysses" and HEADS % devices:
        return None
    forward = 4 * tokens**2 / 2 * HEADS * HEAD_DIM / devices / RATE
    backward = 2.5 * forward
    compute = forward + backward
    share = (devices - 1) / devices
    keys = 2 * tokens * kv_heads * HEAD_DIM  # elements of K and V
    if schedule == "all_gather":
        sent = keys * share * (ITEM + WIDE)
        memory = keys * (ITEM + WIDE)
        # K and V are written and copied by chunks; each of two calls leaves dK and dV of all keys, which are summed.
        moved: float = keys * (4 * ITEM + 5 * WIDE)
        return Cost(compute, compute + sent / bandwidth + moved / MEMORY, sent, memory)
    if schedule == "ring":
        shard = keys / devices
        # What a step makes of out and dquery is added to sums: these are read and written, and it is read.
        rows = tokens * HEADS * HEAD_DIM / devices
        moved = (devices - 1) * (2 * rows + shard) * (ITEM + 2 * WIDE)
        # The squares of a step are copies: of query, and backward of query, out and dout.
        moved += (devices - 1) * 4 * rows * 2 * ITEM
        hops = shard * ITEM / bandwidth, shard * (ITEM + WIDE) / bandwidth
        total = sum(
            of_pass / devices + (devices - 1) * max(of_pass / devices, hop)
            for of_pass, hop in zip((forward, backward), hops, strict=True)
        )
        total += moved / MEMORY + 3 * (devices - 1) * HOP  # K and V in both passes, dK and dV in the backward
        return Cost(compute, total, keys * share * (2 * ITEM + WIDE), shard * (2 * ITEM + 2 * WIDE))
    exchanged = 2 * tokens * HEAD_DIM * (HEADS + math.lcm(kv_heads, devices)) / devices
    sent = 2 * exchanged * share * ITEM
    moved = 2 * exchanged * 4 * ITEM  # transposed before it is sent and behind that
    return Cost(compute, compute + sent / bandwidth + moved / MEMORY, sent, exchanged * ITEM)


MEASURED = {
    (2, "all_gather", "zigzag"): {8_192: 2.41, 16_384: 7.16, 32_768: 28.0, 131_072: 412},
    (2, "ulysses", "contiguous"): {8_192: 2.37, 16_384: 7.40, 32_768: 27.9, 131_072: 421},
    (2, "ring", "striped"): {8_192: 2.47, 16_384: 7.90, 32_768: 28.9, 131_072: 421},
    (2, "ring", "zigzag"): {8_192: 2.59, 16_384: 7.84, 32_768: 27.5, 131_072: 417},
    (4, "all_gather", "zigzag"): {8_192: 1.48, 16_384: 4.21, 32_768: 14.4, 131_072: 211, 1_048_576: 13_960},
    (4, "ulysses", "contiguous"): {8_192: 1.34, 16_384: 3.94, 32_768: 13.7, 131_072: 220, 1_048_576: 14_119},
    (4, "ring", "striped"): {8_192: 2.04, 16_384: 5.46, 32_768: 16.5, 131_072: 222, 1_048_576: 14_223},
    (4, "ring", "zigzag"): {8_192: 2.29, 16_384: 5.50, 32_768: 16.7, 131_072: 221, 1_048_576: 14_323},
}
"""Milliseconds on so many H100, forward and backward, 32 query heads and 8 key heads (docs/scaling.md)."""


def predicted(devices: int, schedule: str, tokens: int) -> float:
    """Milliseconds by the model where these were measured."""
    found = cost(schedule, tokens, devices, HEADS // 4, LINKS["NVLink"])
    assert found is not None
    return 1e3 * (found.total + START)


def check() -> str:
    """The model against the measurement."""
    lines = [
        "| Devices | Schedule | Tokens | Model, ms | Measured, ms | Model / measured |",
        "|---|---|---|---|---|---|",
    ]
    for (devices, schedule, order), times in MEASURED.items():
        for tokens, measured in times.items():
            model = predicted(devices, schedule, tokens)
            cells = (devices, f"{schedule} {order}", f"{tokens:,}", rounded(model), rounded(measured))
            lines.append(f"| {' | '.join(map(str, cells))} | {model / measured:.2f} |")
    return "\n".join(lines)


def rounded(milliseconds: float) -> str:
    """To three digits, or to a whole number."""
    return f"{milliseconds:,.0f}" if milliseconds > 1000 else f"{milliseconds:.3g}"


def table(link: str, ratio: int) -> str:
    """Efficiency in percent, and gigabytes sent, by tokens, devices and schedule."""
    lines = ["| Tokens | Devices | all_gather | ring | ulysses |", "|---|---|---|---|---|"]
    for tokens in LENGTHS:
        for devices in DEVICES:
            if tokens % (2 * devices):
                continue
            cells = []
            for schedule in ("all_gather", "ring", "ulysses"):
                found = cost(schedule, tokens, devices, HEADS // ratio, LINKS[link])
                cells.append("-" if found is None else f"{100 * found.efficiency:.0f}%, {found.sent / 1e9:.3g} GB, "
                             f"{found.memory / 1e9:.2g} GB")  # fmt: skip
            lines.append(f"| {tokens:,} | {devices} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    return {f"{link}, {ratio} query heads a key head": table(link, ratio) for link in LINKS for ratio in RATIOS}


if __name__ == "__main__":
    print(f"{check()}\n")
    for title, text in tables().items():
        print(f"### {title}\n\n{text}\n")
