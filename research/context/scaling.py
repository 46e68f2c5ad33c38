"""The tables of docs/scaling.md: time and bytes of attention over many devices, from first principles.

python research/context/scaling.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

RATE = 550e12
"""FLOP/s of a device's kernels, bfloat16, forward and backward: of the order of what an H100 reaches."""
LINKS = {"NVLink": 450e9, "InfiniBand": 50e9}
"""Bytes per second and direction of a device: H100's NVLink 4, and one NDR port of 400 Gbit/s for each device."""
HEADS, HEAD_DIM, ITEM, WIDE = 32, 128, 2, 4
LENGTHS = (8_192, 131_072, 1_048_576, 10_485_760)
DEVICES = (2, 8, 64, 512)
RATIOS = (1, 4, 8)


class Cost(NamedTuple):
    """Of one layer's attention, forward and backward, on each device."""

    compute: float  # seconds
    total: float  # seconds, with the communication that nothing hides
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
    share = (devices - 1) / devices
    keys = 2 * tokens * kv_heads * HEAD_DIM  # elements of K and V
    if schedule == "all_gather":
        sent = keys * share * (ITEM + WIDE)
        memory = keys * (ITEM + WIDE)
        return Cost(forward + backward, forward + backward + sent / bandwidth, sent, memory)
    if schedule == "ring":
        shard = keys / devices
        hops = shard * ITEM / bandwidth, shard * (ITEM + WIDE) / bandwidth
        total = sum(
            compute / devices + (devices - 1) * max(compute / devices, hop)
            for compute, hop in zip((forward, backward), hops, strict=True)
        )
        return Cost(forward + backward, total, keys * share * (2 * ITEM + WIDE), shard * (2 * ITEM + 2 * WIDE))
    exchanged = 2 * tokens * HEAD_DIM * (HEADS + math.lcm(kv_heads, devices)) / devices
    sent = 2 * exchanged * share * ITEM
    return Cost(forward + backward, forward + backward + sent / bandwidth, sent, exchanged * ITEM)


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
    for title, text in tables().items():
        print(f"### {title}\n\n{text}\n")
