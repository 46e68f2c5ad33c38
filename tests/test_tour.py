"""examples/tour.ipynb runs from top to bottom, and is kept without outputs."""

import contextlib
import io
import json
import pathlib
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

PATH = pathlib.Path(__file__).parents[1] / "examples" / "tour.ipynb"
CELLS = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    assert CODE
    for cell in CODE:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    assert PATH.stat().st_size < 50_000


def test_its_links_lead_to_files() -> None:
    text = "".join(line for cell in CELLS if cell["cell_type"] == "markdown" for line in cell["source"])
    links = [link.split(")")[0] for link in text.split("](")[1:]]
    assert len(links) > 5
    assert [link for link in links if not (PATH.parent / link).exists()] == []


@pytest.mark.slow
@pytest.mark.usefixtures("as_an_example_runs")
def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, in one process as a kernel has it; its own assertions compare results."""
    matplotlib.use("agg")
    drawn: list[int] = []

    def show() -> None:
        figure = plt.gcf()
        figure.canvas.draw()
        drawn.append(len(figure.axes))
        plt.close(figure)

    monkeypatch.setattr(plt, "show", show)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(CODE):
            exec(compile("".join(cell["source"]), f"{PATH.name}, cell of code {number}", "exec"), names)
    assert drawn == [6, 1, 1, 2, 1, 4]
    assert "attention is served by" in printed.getvalue()
    memory = names["memory"]
    assert memory["plain"][-1] > 10 * memory["flash"][-1]
    # The length is 16 times as large from the first to the last.
    assert memory["flash"][-1] < 40 * memory["flash"][0]
