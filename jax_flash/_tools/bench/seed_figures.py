"""What follows from a record of ``bench seeds``: speed-ups, rates, memory saved, harmonic means.

A figure with a spread is (median, lowest, highest) of its rounds.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from jax_flash._tools.bench.seed_rows import BOTH

Spread = tuple[float, float, float]

WORK = {"forward": 1.0, "backward": 2.5, BOTH: 3.5, "total": 3.5}
"""Floating-point operations of a pass, as a multiple of forward's; "total" is forward and backward, timed apart."""


def seconds(row: Mapping[str, Any], name: str, pass_: str) -> list[float]:
    """Of a call in each round; nothing where it was not timed."""
    found = row["found"].get(name, {}).get("seconds", {})
    if pass_ == "total":
        return [x + y for x, y in zip(found.get("forward", []), found.get("backward", []), strict=False)]
    times: list[float] = found.get(pass_, [])
    return times


def spread(values: Iterable[float]) -> Spread | None:
    some = list(values)
    return (statistics.median(some), min(some), max(some)) if some else None


def time(row: Mapping[str, Any], name: str, pass_: str) -> Spread | None:
    return spread(seconds(row, name, pass_))


def speed_up(row: Mapping[str, Any], name: str, other: str, pass_: str) -> Spread | None:
    """How many times as fast as ``other``: of the times of each round, so that a clock that changes cancels."""
    pairs = zip(seconds(row, other, pass_), seconds(row, name, pass_), strict=False)
    return spread(theirs / mine for theirs, mine in pairs)


def rate(row: Mapping[str, Any], name: str, pass_: str) -> Spread | None:
    """FLOP/s."""
    return spread(WORK[pass_] * row["cell"]["work"] / x for x in seconds(row, name, pass_))


def memory(row: Mapping[str, Any], name: str, key: str = "memory") -> int | None:
    size: int | None = row["found"].get(name, {}).get(key)
    return size


def saved(row: Mapping[str, Any], name: str, other: str, key: str = "memory") -> float | None:
    """The fraction of the memory of ``other`` that ``name`` does not need."""
    mine, theirs = memory(row, name, key), memory(row, other, key)
    return None if mine is None or not theirs else 1 - mine / theirs


def harmonic_mean(rates: Iterable[float | None]) -> float | None:
    """None if a length is missing: a mean of fewer would be of something else."""
    some = list(rates)
    known = [x for x in some if x is not None]
    return statistics.harmonic_mean(known) if known and len(known) == len(some) else None


def worst_errors(record: Mapping[str, Any], name: str) -> dict[str, float] | None:
    """The largest error of each result over all rows; None if there is none, infinite if one is not finite."""
    found: dict[str, float] = {}
    for row in record["rows"]:
        for key, error in row["found"].get(name, {}).get("errors", {}).items():
            largest = float("inf") if error["largest"] is None else error["largest"]
            found[key] = max(found.get(key, 0.0), largest)
    return found or None


def ladder_rate(rung: Mapping[str, Any], work: Mapping[str, float], length: str) -> float | None:
    """FLOP/s of a rung at a length, of the median round like those that it is compared with."""
    times = rung["seconds"].get(length)
    return work[length] / statistics.median(times) if times else None


def add(record: dict[str, Any]) -> None:
    """Puts the speed-ups and the memory saved into the rows, for readers of the JSON: ours over each other one."""
    passes = [*record["passes"], *(["total"] if "backward" in record["passes"] else [])]
    for row in record["rows"]:
        others = [name for name in row["found"] if name != "ours"]
        row["speed_up_over"] = {
            other: {pass_: speed_up(row, "ours", other, pass_) for pass_ in passes} for other in others
        }
        row["memory_saved"] = {
            other: {key: saved(row, "ours", other, key) for key in ("memory", "measured_memory")} for other in others
        }
