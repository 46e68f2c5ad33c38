"""Draws the plots of docs/performance.md from the tables of that page: python docs/.site/plots.py

Run it in an environment with the extra `bench` when a table has changed. What a plot shows is also in its file, as the
description; tests/test_docs.py compares that with the tables. hooks.py makes the dark versions.
"""

import io
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
Data = dict[str, Any]


def _table(page: str, heading: str) -> list[dict[str, str]]:
    """The first table under a heading: for each row the cells by the names of the columns."""
    section = page.split(f"\n## {heading}\n", 1)[1]
    begin = re.search(r"^\|.*\n\|[-| ]+\|\n(\|.*\n)+", section, flags=re.MULTILINE)
    assert begin, f"no table under {heading}"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in begin[0].splitlines()]
    # Columns after a colon are of the group that it begins: "forward: ours | cuDNN".
    group, names = "", []
    for name in cells[0]:
        if ": " in name:
            group, name = name.split(": ")
        names.append(f"{group} {name}".strip())
    return [dict(zip(names, row, strict=True)) for row in cells[2:]]


def _hopper(page: str) -> Data:
    rows = [row for row in _table(page, "Hopper: bfloat16 on an H200") if row["S"] == "16384"]
    return {
        "labels": [row["head_dim"] + (" causal" if row["causal"] == "yes" else "") for row in rows],
        **{
            part: {name: [int(row[f"{part} {name}"]) for row in rows] for name in ("ours", "cuDNN", "flash-attn-4")}
            for part in ("forward", "backward")
        },
    }


def _decoding(page: str) -> Data:
    rows = [row for row in _table(page, "Decoding and small calls on an H200") if row["head_dim"] == "128"]
    return {
        "labels": [f"{row['B']} x {row['T x S']}, {row['heads']} heads" for row in rows],
        "values": {name: [float(row[name]) for row in rows] for name in ("ours", "XLA", "cuDNN")},
    }


def _options(page: str) -> Data:
    rows = _table(page, "What options cost on an H200")
    return {
        "labels": [row["Option"].replace("the same, with", "bias [1, N, T, S], with") for row in rows],
        "values": {f"head_dim {dim}": [float(row[f"{dim} forward"]) for row in rows] for dim in ("64", "128")},
    }


def _memory(page: str) -> Data:
    rows = _table(page, "Memory")
    return {
        "labels": [row["B, N, S, H"] for row in rows],
        "values": {name: [float(row[name]) for row in rows] for name in ("plain", "ours")},
    }


def _cpu(page: str) -> Data:
    rows = _table(page, "CPU")
    peers = {"XLA": "forward of XLA's", "PyTorch": "forward PyTorch's"}
    return {
        "labels": [f"{row['CPU'].split(',')[0]}, {row['dtype']}" for row in rows],
        "values": {
            name: [[float(x) for x in re.findall(r"[\d.]+", row[column])] for row in rows]
            for name, column in peers.items()
        },
    }


FIGURES: dict[str, Callable[[str], Data]] = {
    "performance-hopper": _hopper,
    "performance-decoding": _decoding,
    "performance-options": _options,
    "performance-memory": _memory,
    "performance-cpu": _cpu,
}


def figures() -> dict[str, Data]:
    """What each plot shows, read from the tables."""
    page = PAGE.read_text(encoding="utf-8")
    return {name: read(page) for name, read in FIGURES.items()}


def shown(svg: str) -> Data:
    """What a file of a plot says that it shows."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, flags=re.DOTALL)
    assert found
    return json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))


def main() -> None:
    import matplotlib
    from matplotlib.figure import Figure

    from jax_flash._tools import plots

    names = {"ours": "jax_flash", "plain": "plain attention", "flash-attn-4": "flash-attn-4"}
    styles = {"ours": "ours", "cuDNN": "cudnn", "flash-attn-4": "plain", "XLA": "xla", "PyTorch": "torch-flash"}
    styles |= {"plain": "plain", "head_dim 64": "ours", "head_dim 128": "cudnn"}

    def bars(axes: Any, data: Data, values: Data, horizontal: bool = False) -> None:
        """A group of bars for each label; pairs of numbers are ranges."""
        width = 0.8 / len(values)
        for number, (name, numbers) in enumerate(values.items()):
            places = [i + (number - (len(values) - 1) / 2) * width for i in range(len(numbers))]
            begins = [x[0] if isinstance(x, list) else 0 for x in numbers]
            sizes = [x[1] - x[0] if isinstance(x, list) else x for x in numbers]
            colour = plots.style(styles[name])["color"]
            options = {"color": colour, "label": names.get(name, name)}
            if horizontal and axes.get_xscale() == "log" and begins == [0] * len(sizes):
                # The length of a bar would say nothing on such a scale.
                axes.plot(sizes, range(len(sizes)), plots.style(styles[name])["marker"], **options)
            elif horizontal:
                axes.barh(places, sizes, width, left=begins, **options)
            else:
                axes.bar(places, sizes, width, bottom=begins, **options)
        if horizontal:
            axes.set_yticks(range(len(data["labels"])), data["labels"])
            axes.invert_yaxis()
            axes.grid(visible=axes.get_xscale() == "log", axis="y")
        else:
            axes.set_xticks(range(len(data["labels"])), data["labels"], rotation=30, ha="right")
            axes.grid(visible=False, axis="x")

    def save(name: str, figure: Figure, data: Data) -> None:
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Description": json.dumps(data)})
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        (ROOT / "docs" / "images" / f"{name}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")

    data = figures()
    text = {"svg.fonttype": "none", "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"]}
    with plots.drawing(), matplotlib.rc_context(text):
        figure = Figure(figsize=(7.4, 3.6), layout="constrained")
        hopper = data["performance-hopper"]
        for axes, part in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
            bars(axes, hopper, hopper[part])
            axes.set_title(f"{part}, by head_dim")
        figure.axes[0].set_ylabel("TFLOP/s")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        save("performance-hopper", figure, hopper)

        one: dict[str, tuple[str, str, float, str]] = {
            "performance-decoding": ("decoding: batch x queries x keys, heads", "microseconds a call", 3.8, "log"),
            "performance-options": ("forward with an option", "times the call without it", 4.0, "linear"),
            "performance-memory": ("forward and backward: B, N, S, H", "MiB", 2.4, "log"),
            "performance-cpu": (
                "CPU, forward: how many times as fast as others",
                "from the slowest to the fastest shape",
                2.6,
                "log",
            ),
        }
        for name, (title, label, height, scale) in one.items():
            figure, axes = plots.new(title, height)
            figure.set_figwidth(7.4)
            axes.set(xlabel=label, xscale=scale)
            bars(axes, data[name], data[name]["values"], horizontal=True)
            if name in ("performance-options", "performance-cpu"):
                axes.axvline(1, color=plots.COLOURS["middle"], linewidth=1)
            if scale == "log":
                axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
                axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            if name == "performance-cpu":
                axes.set_xticks([1, 2, 4, 8, 16])
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=3)
            save(name, figure, data[name])


if __name__ == "__main__":
    main()
