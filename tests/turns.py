"""Which tests a commit runs (.ci/run): shares of those marked ``slow`` and of the values of those marked ``by_turns``.

Nothing here depends on a process, so the workers of pytest-xdist agree.
"""

import zlib
from collections.abc import Sequence

import pytest

DEFAULT_SECONDS = 2
"""Of one core, what a test takes that is marked slow without a number: most of them are one of many of a grid."""


def kept(items: Sequence[pytest.Item], turn: int, turns: int) -> list[pytest.Item]:
    """What remains of ``items`` in one turn of many, in their order; every item is in some turn."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    out = set(map(id, slow)) - set(map(id, _dealt(slow, turn, turns)))
    places = _places([item for item in items if item.get_closest_marker("by_turns")])
    for item, place in places:
        many = item.get_closest_marker("by_turns").args[0]
        if not item.get_closest_marker("slow") and place % many != turn % many:
            out.add(id(item))
    return [item for item in items if id(item) not in out]


def _places(items: Sequence[pytest.Item]) -> list[tuple[pytest.Item, int]]:
    """Each item with the sum of its value's indices in each ``parametrize``: as in a Latin square, a turn has some of
    each row and column of a grid, not the same value of a parameter every time."""
    indices: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}  # by function and parameters, then by their objects
    places = []
    for item in items:
        place = 0
        for mark in item.iter_markers("parametrize"):
            argnames = mark.args[0]
            names = [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else argnames
            known = indices.setdefault((item.nodeid.split("[")[0], *names), {})
            value = tuple(id(item.callspec.params[name]) for name in names)
            place += known.setdefault(value, len(known))
        places.append((item, place))
    return places


def _seconds(item: pytest.Item) -> float:
    return (*item.get_closest_marker("slow").args, DEFAULT_SECONDS)[0]


def _dealt(items: Sequence[pytest.Item], turn: int, turns: int) -> list[pytest.Item]:
    """The share of one turn: the longest first, each for the turn that has the least until then.

    A test's seconds are those of its mark. Tests that share kernels (``xdist_group``) stay together.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        group = item.get_closest_marker("xdist_group")
        groups.setdefault(group.args[0] if group else item.nodeid, []).append(item)
    seconds = {name: sum(map(_seconds, group)) for name, group in groups.items()}
    loads, share = [0.0] * turns, []
    for name in sorted(groups, key=lambda name: (-seconds[name], zlib.crc32(name.encode()), name)):
        least = loads.index(min(loads))
        loads[least] += seconds[name]
        if least == turn:
            share += groups[name]
    return share
