"""Plots of what ``bench seeds`` and ``report --html`` measured: one question a figure, as PNG and SVG.

A figure shows the median and, as a bar or a band, the lowest and the highest round. Filled markers are measured here,
hollow ones are published by a document. The figures are small, so that they can be read in a column of text.
"""

import contextlib
import io
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_flash._tools.bench import seed_documents as documents
from jax_flash._tools.bench import seed_figures as figures
from jax_flash._tools.bench import seed_tables
from jax_flash._tools.bench.seed_rows import NAMES

Record = Mapping[str, Any]

COLOURS = {"ground": "#ffffff", "ink": "#1b1f24", "faint": "#d5d9de", "middle": "#6a737d"}
DARK_COLOURS = {"ground": "#15181c", "ink": "#e6e9ec", "faint": "#363c44", "middle": "#9aa3ad"}

# Colours that people with any colour vision tell apart (Okabe and Ito), lighter on dark ground; the marker differs too.
STYLES: dict[str, tuple[str, str, str]] = {
    "ours": ("#0072b2", "#56b4e9", "o"),
    "plain": ("#d55e00", "#ff9248", "s"),
    "flash1": ("#007d5c", "#3fd0a4", "^"),
    "flash2": ("#b0508a", "#e59cc8", "v"),
    "flash2_atomic": ("#b07a00", "#f0bd4a", "D"),
    "fa2-jax": ("#6b4fc0", "#b3a1f5", "P"),
    "torch-flash": ("#4a5560", "#b7c0c9", "X"),
    "torch-plain": ("#8a6d3b", "#d8bf8c", "*"),
    "reference": ("#8a6d3b", "#d8bf8c", "h"),
    "xla": ("#6b4fc0", "#b3a1f5", "p"),
    "cudnn": ("#007d5c", "#3fd0a4", "<"),
    "published": ("#5c6670", "#a9b3bd", "D"),
}
LABELS = {
    "ours": "jax_flash",
    "plain": "plain attention",
    "flash1": "v1",
    "flash2": "v2, two passes",
    "flash2_atomic": "v2, atomic",
    "fa2-jax": "FlashAttention-2 (JAX)",
    "torch-flash": "PyTorch's flash",
    "torch-plain": "PyTorch's plain",
}
RESULTS = dict(zip(NAMES, ("out", "dq", "dk", "dv"), strict=True))


def style(name: str) -> dict[str, Any]:
    """Colour and marker of an implementation."""
    colour, _, marker = STYLES.get(name, STYLES["published"])
    return {"color": colour, "marker": marker}


def dark() -> dict[str, str]:
    """The colour on dark ground, by the colour on light ground."""
    return {COLOURS[name]: DARK_COLOURS[name] for name in COLOURS} | {x: y for x, y, _ in STYLES.values()}


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Makes and saves figures in one manner; text as outlines, so that no font is needed to see it."""
    colours = COLOURS
    settings: Any = {
        "figure.facecolor": colours["ground"],
        "axes.facecolor": colours["ground"],
        "savefig.facecolor": colours["ground"],
        "text.color": colours["ink"],
        "axes.labelcolor": colours["ink"],
        "axes.edgecolor": colours["middle"],
        "xtick.color": colours["ink"],
        "ytick.color": colours["ink"],
        "grid.color": colours["faint"],
        "grid.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "svg.fonttype": "path",
        "svg.hashsalt": "jax_flash",
    }
    with matplotlib.rc_context(settings):
        yield


def new(title: str, height: float = 3.5) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.9, height), layout="constrained")
    axes = figure.add_subplot()
    # The figure has the title, since axes with long labels are too narrow for one.
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize="large")
    return figure, axes


def save(record: Record, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the plots of a record as PRESET-NAME.png and .svg."""
    written = []
    with drawing():
        for name, figure in seeds(record).items():
            for ending in ("png", "svg"):
                written.append(folder / f"{record['preset']}-{name}.{ending}")
                # Without a date the same figures are the same file.
                metadata = {"Date": None} if ending == "svg" else None
                figure.savefig(written[-1], dpi=120, metadata=metadata)
    return written


def svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def seeds(record: Record) -> dict[str, Figure]:
    """The figures of a record of ``bench seeds``, by name; call it and save them within `drawing`."""
    make = {"v100": _v100, "from-scratch": _from_scratch, "t4": _t4, "naive": _naive}[record["preset"]]
    return make(record)


# Presets


def _v100(record: Record) -> dict[str, Figure]:
    rows = record["rows"]
    labels = [row["name"] for row in rows]
    height = 1.6 + 0.2 * len(rows)
    found = {}
    others = [name for name in ("plain", "torch-plain") if name not in record["missing"]]
    for pass_ in ("forward", "backward", "total"):
        figure, axes = new(f"{pass_}: speed-up over plain attention", height)
        axes.axvline(1, color=COLOURS["middle"], linewidth=1)
        for other in others:
            points = [figures.speed_up(row, "ours", other, pass_) for row in rows]
            label = "measured here" if other == "plain" else "over PyTorch's, here"
            dots(axes, points, label, style("ours" if other == "plain" else other))
        dots(axes, [row["published"][pass_] for row in rows], "published, V100", _hollow("published"))
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        row_axis(axes, labels, "times as fast as plain attention")
        found[pass_] = figure
    figure, axes = new("memory saved, forward + backward", height)
    dots(axes, [_hundred(figures.saved(row, "ours", "plain")) for row in rows], "XLA's analysis", style("ours"))
    measured = [_hundred(figures.saved(row, "ours", "plain", "measured_memory")) for row in rows]
    if any(x is not None for x in measured):
        dots(axes, measured, "measured on this GPU", style("flash1"))
    published = [float(row["published"]["memory"].strip("~%")) for row in rows]
    dots(axes, published, "published, V100", _hollow("published"))
    axes.set_xlim(-4, 104)
    row_axis(axes, labels, "% of plain attention's memory that is not needed")
    return found | {"memory": figure}


def _from_scratch(record: Record) -> dict[str, Figure]:
    names = [name for name in record["implementations"] if name not in record["missing"]]
    scale, unit = (1e9, "GFLOP/s") if record["machine"]["platform"] == "cpu" else (1e12, "TFLOP/s")
    found = {}
    for pass_ in record["passes"]:
        figure, axes = new(f"{pass_}, head_dim 128, full")
        for name in names:
            _lengths(axes, record, name, [figures.rate(row, name, pass_) for row in record["rows"]], scale)
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        _length_axis(axes, record, f"{unit}")
        found[pass_] = figure
        rivals = [name for name in ("fa2-jax", "torch-flash") if name in names]
        if not rivals:
            continue
        figure, axes = new(f"{pass_}: per cent of FlashAttention-2")
        axes.axhline(100, color=COLOURS["middle"], linewidth=1)
        for name in rivals:
            points = [figures.speed_up(row, "ours", name, pass_) for row in record["rows"]]
            _lengths(axes, record, name, points, 0.01)
        _length_axis(axes, record, "% of FlashAttention-2's rate")
        found[f"share-{pass_}"] = figure
    for pass_ in record.get("ladder", {}):
        rates = seed_tables.ladder_rates(record, pass_)
        if not rates:
            continue
        figure, axes = new(f"the ladder, {pass_}", 1.6 + 0.24 * len(rates))
        means = [figures.harmonic_mean(some.values()) for some in rates.values()]
        dots(axes, [x and x / 1e12 for x in means], "harmonic mean of the lengths", style("ours"))
        if rival := seed_tables.rival_rates(record, pass_):
            mean = figures.harmonic_mean(rival[1].values()) or math.nan
            axes.axvline(mean / 1e12, color=style(rival[0])["color"], linestyle="--", label=LABELS[rival[0]])
        axes.set_xlim(left=0)
        row_axis(axes, list(rates), "TFLOP/s")
        found[f"ladder-{pass_}"] = figure
    names = [name for name, _ in documents.FROM_SCRATCH_KERNELS]
    figure, axes = new("published: forward, its 16 kernels", 5.0)
    axes.axvline(100, color=COLOURS["middle"], linewidth=1)
    for number, (gpu, like) in enumerate(zip(documents.FROM_SCRATCH_GPUS, ("torch-flash", "torch-plain"), strict=True)):
        dots(axes, [x[2 * number + 1] for _, x in documents.FROM_SCRATCH_KERNELS], gpu, _hollow(like))
    short = [name if len(name) < 34 else name[:32] + "…" for name in names]
    row_axis(axes, short, "% of FlashAttention-2, harmonic mean")
    return found | {"published": figure}


def _t4(record: Record) -> dict[str, Figure]:
    names = [name for name in record["implementations"] if name not in record["missing"]]
    found = {}
    for pass_ in record["passes"]:
        figure, axes = new(f"{pass_}, B·N 32, head_dim 64", 4.2)
        for name in names:
            _lengths(axes, record, name, [figures.time(row, name, pass_) for row in record["rows"]], 1e-3)
        for name in documents.T4_IMPLEMENTATIONS:
            points = [(row["cell"]["length"], row["published"][pass_].get(name)) for row in record["rows"]]
            known = [(x, y) for x, y in points if y is not None]
            label = "published, T4 (hollow)" if name == "flash2" else None
            label = label if name in names else f"published: {LABELS[name]}"
            axes.plot(*zip(*known, strict=True), linestyle=":", linewidth=1, label=label, **_hollow(name))
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        _length_axis(axes, record, "ms a call")
        found[pass_.replace(" + ", "-")] = figure
    figure, axes = new("memory, forward + backward")
    for name in names:
        sizes = [figures.memory(row, name) for row in record["rows"]]
        _lengths(axes, record, name, [None if x is None else (x, x, x) for x in sizes], 2.0**20)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    _length_axis(axes, record, "MiB at the peak, by XLA's analysis")
    found["memory"] = figure
    found["errors"] = _errors("largest errors, float16", {
        name: errors for name in names if (errors := figures.worst_errors(record, name))
    }, {name: dict(zip(NAMES, some, strict=True)) for name, some in documents.T4_ERRORS.items()})  # fmt: skip
    return found


def _naive(record: Record) -> dict[str, Figure]:
    found = {}
    for dtype in documents.NAIVE_FIGURES:
        part = {**record, "rows": [row for row in record["rows"] if row["group"] == dtype]}
        if not part["rows"]:
            continue
        errors = {name: x for name in record["implementations"] if (x := figures.worst_errors(part, name))}
        published = {
            name: {key: x[key] for key in NAMES} for name, x in part["rows"][0]["published"].items()
        }  # fmt: skip
        found[f"errors-{dtype}"] = _errors(f"largest errors, {dtype}", errors, published)
        names = list(record["implementations"])
        labels = [f"{LABELS[name]}: {pass_}" for name in names for pass_ in ("forward", "backward")]
        figure, axes = new(f"times, {dtype}", 1.8 + 0.26 * len(labels))
        for row, like in zip(part["rows"], ("ours", "flash2"), strict=False):
            points = [figures.time(row, name, pass_) for name in names for pass_ in ("forward", "backward")]
            cell = row["cell"]
            label = f"B {cell['batch']}, N {cell['heads']}, S {cell['length']}"
            dots(axes, [x and tuple(1e6 * y for y in x) for x in points], label, style(like))
        figures_of = part["rows"][0]["published"]
        times = [figures_of.get(name, {}).get(pass_) for name in names for pass_ in ("forward", "backward")]
        dots(axes, times, "published", _hollow("published"))
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        row_axis(axes, labels, "µs a call")
        found[f"times-{dtype}"] = figure
    return found


# What several figures have


def _hollow(name: str) -> dict[str, Any]:
    return style(name) | {"markerfacecolor": "none"}


def _hundred(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def dots(axes: Axes, points: Sequence[Any], label: str, like: Mapping[str, Any]) -> None:
    """A marker in each row, with a bar from the lowest to the highest; a point is a figure, a spread or None."""
    known = [(y, x if isinstance(x, tuple | list) else (x, x, x)) for y, x in enumerate(points) if x is not None]
    if not known:
        return
    middles = [x[0] for _, x in known]
    bars = [[x[0] - x[1] for _, x in known], [x[2] - x[0] for _, x in known]]
    axes.errorbar(middles, [y for y, _ in known], xerr=bars, linestyle="none", elinewidth=1.2, label=label, **like)


def row_axis(axes: Axes, labels: Sequence[str], what: str) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(what)
    legend_below(axes)


def legend_below(axes: Axes, columns: int = 2) -> None:
    """Where it covers no point."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns)


def _lengths(axes: Axes, record: Record, name: str, points: Sequence[figures.Spread | None], scale: float) -> None:
    """A line of medians over the lengths of the rows, in a band from the lowest to the highest."""
    known = [(row["cell"]["length"], x) for row, x in zip(record["rows"], points, strict=True) if x is not None]
    band(axes, known, scale, LABELS.get(name, name), style(name))


def band(
    axes: Axes, points: Sequence[tuple[float, figures.Spread]], scale: float, label: str, like: Mapping[str, Any]
) -> None:
    if not points:
        return
    along = [x for x, _ in points]
    low, high = ([y[i] / scale for _, y in points] for i in (1, 2))
    axes.fill_between(along, low, high, color=like["color"], alpha=0.25, linewidth=0)
    axes.errorbar(
        along, [y[0] / scale for _, y in points], label=label, capsize=2, elinewidth=1,
        yerr=[[(y[0] - y[1]) / scale for _, y in points], [(y[2] - y[0]) / scale for _, y in points]], **like,
    )  # fmt: skip


def _length_axis(axes: Axes, record: Record, what: str) -> None:
    length_axis(axes, [row["cell"]["length"] for row in record["rows"]], what)


def length_axis(axes: Axes, lengths: Sequence[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(x) for x in lengths], rotation=30 if len(lengths) > 5 else 0)
    axes.minorticks_off()
    axes.set_xlabel("S, keys and queries")
    axes.set_ylabel(what)
    legend_below(axes)


def plain_numbers(axis: Any) -> None:
    """1, 10, 100 on a logarithmic axis in place of powers, and what lies between where there is room."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=12))
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:.3g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def _errors(
    title: str, measured: Mapping[str, Mapping[str, float]], published: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Errors of the four results, implementations side by side."""
    figure, axes = new(title, 3.8)
    names = [*measured, *(name for name in published if name not in measured)]
    first = True
    for number, name in enumerate(names):
        along = [i + 0.7 * ((number + 0.5) / len(names) - 0.5) for i in range(len(NAMES))]
        if name in measured:
            axes.plot(along, [measured[name][key] for key in NAMES], linestyle="none", label=LABELS.get(name, name),
                      **style(name))  # fmt: skip
        if name in published:
            label = "published (hollow)" if first else None
            label = label if name in measured else f"published: {LABELS.get(name, name)}"
            axes.plot(along, [published[name][key] for key in NAMES], linestyle="none", label=label,
                      **_hollow(name))  # fmt: skip
            first = False
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.set_xticks(range(len(NAMES)), [RESULTS[key] for key in NAMES])
    axes.set_xlim(-0.5, len(NAMES) - 0.5)
    axes.set_ylabel("largest error against float64")
    legend_below(axes)
    return figure
