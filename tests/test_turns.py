"""The turns of .ci/run: together they take every test, and none is much longer than another."""

import itertools
import types
from typing import Any

import pytest
import turns


class Item:
    """What turns.py asks of a test: its marks, and the values of its parameters."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator, **params: int) -> None:
        self.nodeid, self.marks = nodeid, [mark.mark for mark in marks]
        self.callspec = types.SimpleNamespace(params=params)

    def iter_markers(self, name: str) -> Any:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> Any:
        return next(self.iter_markers(name), None)


def test_a_turn_has_each_value_of_each_parameter() -> None:
    sizes = {"dtype": 3, "kind": 2, "name": 4}
    parametrized = [pytest.mark.parametrize(name, range(size)) for name, size in sizes.items()]
    grid = [
        Item(f"grid[{at}]", pytest.mark.by_turns(3), *parametrized, **dict(zip(sizes, at, strict=True)))
        for at in itertools.product(*map(range, sizes.values()))
    ]
    always = Item("always")
    shares = [turns.kept([*grid, always], turn, 16) for turn in range(16)]
    assert all(always in share for share in shares)
    assert {id(item) for share in shares[:3] for item in share} == set(map(id, [*grid, always]))
    for share in shares:
        assert len(share) == len(grid) / 3 + 1
        for name, size in sizes.items():
            assert {item.callspec.params[name] for item in share[:-1]} == set(range(size))


@pytest.mark.parametrize("names", ["a, b", ("a", "b")])
def test_names_of_one_parametrize_count_once(names: Any) -> None:
    marks = pytest.mark.by_turns(2), pytest.mark.parametrize(names, [(0, 0)] * 4)
    values = [Item(f"value[{i}]", *marks, a=i, b=i) for i in range(4)]
    assert turns.kept(values, 0, 16) == values[0::2]
    assert turns.kept(values, 1, 16) == values[1::2]


def test_slow_tests_are_dealt_by_their_seconds() -> None:
    """Each in one turn, in the order in which they came, and those that share kernels in the same."""
    seconds = [80, 60, 60, 30, 30, *[10] * 8, *[None] * 40]
    group = pytest.mark.xdist_group("group")
    items = [
        Item(f"slow{i}", pytest.mark.slow(x) if x else pytest.mark.slow, *[group] * (i in (3, 20, 40)))
        for i, x in enumerate(seconds)
    ]
    shares = [turns.kept(items, turn, 4) for turn in range(4)]
    assert sorted(item.nodeid for share in shares for item in share) == sorted(item.nodeid for item in items)
    assert all(share == [item for item in items if item in share] for share in shares)
    assert sum({items[3], items[20], items[40]} <= set(share) for share in shares) == 1
    totals = [sum(map(turns._seconds, share)) for share in shares]
    assert max(totals) - min(totals) <= turns.DEFAULT_SECONDS
