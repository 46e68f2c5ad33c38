"""``report --html``: speed, memory, errors and the rows of ``bench seeds`` as one page that needs nothing else.

Its figures are inline SVG whose colours are variables of the page, so that it follows light and dark. A section that
fails says why, and the others go on.
"""

import dataclasses
import datetime
import functools
import html
import itertools
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jax_flash
from jax_flash import study
from jax_flash._tools import doctor, plots
from jax_flash._tools.bench import exact, peers, seed_figures, seed_rows, seed_tables, seeds
from jax_flash._tools.bench.race import Cell, Entry, Race, race
from jax_flash._tools.bench.seed_rows import Implementation
from jax_flash._tools.bench.seed_tables import Table
from jax_flash._tools.report import Findings

Say = Callable[[str], None]


@dataclasses.dataclass
class Section:
    """A part of the page.

    Attributes:
      text: what is measured and how.
      figures: by caption.
      notes: what is not there, and why.
      wrong: results of this package that are wrong.
    """

    name: str
    text: str
    tables: list[Table] = dataclasses.field(default_factory=list)
    figures: dict[str, Figure] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


def write(file: pathlib.Path, found: Findings, quick: bool, say: Say) -> bool:
    """Measures what the text has not, and writes the page. Returns whether all results of this package are right."""
    began = time.perf_counter()
    platform = "cpu" if found.device.platform == "cpu" else "cuda"
    makers: list[tuple[str, Callable[[], Section]]] = [
        ("speed", lambda: speed(found, platform)),
        ("memory", lambda: memory(quick, platform)),
        ("accuracy", lambda: accuracy(platform)),
        *((f"seeds: {name}", functools.partial(preset, name, quick, say)) for name in seeds.PRESETS),
    ]
    sections = [_self_test(found)]
    with jax.default_device(found.device), plots.drawing():
        for name, make in makers:
            say(name)
            try:
                sections.append(make())
            except Exception as error:  # reports are needed most where something is broken
                sections.append(Section(name, "", notes=[f"failed: {doctor.first_line(error)}"], wrong=[name]))
        command = f"python -m jax_flash report --html {file}{' --quick' if quick else ''}"
        rows = [
            ["device measured", seeds.machine(found.device)["device"]],
            ["jax_flash", jax_flash.__version__],
            *found.machine,
            ["command", command],
            ["date", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")],
            ["took", f"{time.perf_counter() - began:.0f} s, besides the text"],
        ]
        file.write_text(page(rows, sections), encoding="utf-8")
    print(f"wrote {file}", file=sys.stderr)
    return not any(section.wrong for section in sections)


# Sections


def _self_test(found: Findings) -> Section:
    titles, *rows = found.self_test
    text = (
        "Forward and backward against the reference in float64 on the CPU. Figures are largest errors; the ratio is "
        "that of the worst result as a fraction of what is allowed."
    )
    return Section("self-test", f"{found.verdict}. {text}", [Table("", titles, rows)])


def speed(found: Findings, platform: str) -> Section:
    """The shapes of the text's benchmark, against jax.nn.dot_product_attention, and under the roofs of the machine."""
    section = Section(
        "speed",
        "The shapes of the text, in turn in one process with jax.nn.dot_product_attention (xla, cudnn). Work by one "
        "convention: forward 4·B·N·T·S·H floating-point operations, half of it when causal, backward 2.5 times. "
        "Points are medians of the rounds, bars the lowest and the highest.",
    )
    errors: dict[str, None] = {}
    for pass_ in dict.fromkeys(itertools.chain.from_iterable(races for _, races in found.benchmark)):
        labels = [f"{cell.dtype} {cell}" for cell, _ in found.benchmark]
        figure, axes = plots.new(f"{pass_}: speed-up over jax.nn's", 1.6 + 0.2 * len(labels))
        axes.axvline(1, color=plots.COLOURS["middle"], linewidth=1)
        for rival in ("xla", "cudnn"):
            points = [_speed_up(races.get(pass_), rival) for _, races in found.benchmark]
            plots.dots(axes, points, f"over {rival}", plots.style("ours" if rival == "xla" else rival))
        axes.set_xscale("log")
        plots.plain_numbers(axes.xaxis)
        plots.row_axis(axes, labels, "times as fast")
        section.figures[f"{pass_}: how many times as fast as jax.nn.dot_product_attention"] = figure
    roofs, section_notes = measure_roofs(sorted({cell.dtype for cell, _ in found.benchmark}), platform)
    for dtype in roofs:
        caption = (
            f"{dtype}: rate against arithmetic intensity, the operations per byte if each of query, key, value and "
            "out crosses memory once; the roof is made of the memory bandwidth and the fastest matrix product "
            f"measured here, {roofs[dtype][1]}"
        )
        if platform == "cpu":
            caption += "; kernels may be above it, because no library's product is the most that a processor can do"
        section.figures[caption] = _roofline(dtype, found.benchmark, roofs[dtype])
    section.notes += section_notes
    rows = []
    for cell, races in found.benchmark:
        for pass_, raced in races.items():
            errors |= dict.fromkeys(
                f"{cell.dtype} {cell}, {pass_}: {n}: {doctor.first_line(e)}" for n, e in raced.errors.items()
            )
            names = [name for name in raced.seconds if name not in raced.errors]
            spreads = {name: seed_figures.spread(raced.seconds[name]) for name in names}
            cells = [f"{1e3 * x[0]:.3g} ({1e3 * x[1]:.3g} to {1e3 * x[2]:.3g})" if (x := spreads.get(n)) else "-"
                     for n in ("jax_flash", "xla", "cudnn")]  # fmt: skip
            rows.append([f"{cell.dtype} {cell}", pass_, *cells])
    section.tables.append(Table("milliseconds a call: median (lowest to highest)",
                                ["", "pass", "jax_flash", "xla", "cudnn"], rows))  # fmt: skip
    section.notes += errors
    return section


def _speed_up(raced: Race | None, rival: str) -> seed_figures.Spread | None:
    if raced is None or {"jax_flash", rival} & set(raced.errors):
        return None
    pairs = zip(raced.seconds.get(rival, []), raced.seconds.get("jax_flash", []), strict=False)
    return seed_figures.spread(theirs / mine for theirs, mine in pairs)


Roof = tuple[float, str, float]
"""FLOP/s, of what, and bytes a second."""


def measure_roofs(dtypes: Sequence[str], platform: str) -> tuple[dict[str, Roof], list[str]]:
    """The fastest matrix product of each dtype, and the bandwidth of memory, by XLA here; on a CPU NumPy's float32
    product counts too, which is the faster one on most of them."""
    size, elements = (8192, 2**28) if platform == "cuda" else (2048, 2**26)
    notes: list[str] = []

    def best(start: Callable[[], Any], wait: Callable[[Any], object] = jax.block_until_ready) -> float:
        found = race({"it": lambda: Entry(start, wait)}, 5)
        if found.errors:
            raise found.errors["it"]
        return min(found.seconds["it"])

    # In place: a result of its own would be new pages each time, and their first use is what would be timed.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [jnp.ones(elements, jnp.float32)]

    def stream() -> jax.Array:
        held[0] = add(held[0])
        return held[0]

    bandwidth = 8.0 * elements / best(stream)
    held.clear()
    product = jax.jit(lambda a, b: a @ b)
    rates: dict[str, float] = {}
    for dtype in dict.fromkeys([*dtypes, *(["float32"] if platform == "cpu" else [])]):
        try:
            a = jnp.ones((size, size), dtype)
            rates[f"XLA's in {dtype}"] = 2.0 * size**3 / best(functools.partial(product, a, a))
        except Exception as error:  # a dtype that XLA does not multiply
            notes.append(f"no roof of {dtype}: {doctor.first_line(error)}")
    if platform == "cpu":
        wide = np.ones((size, size), np.float32)
        rates["NumPy's in float32"] = 2.0 * size**3 / best(lambda: wide @ wide, lambda _: None)
    roofs = {}
    for dtype in dtypes:
        own = {name: rate for name, rate in rates.items() if platform == "cpu" or name.endswith(dtype)}
        if own:
            name = max(own, key=lambda name: own[name])
            roofs[dtype] = own[name], name, bandwidth
    return roofs, notes


def intensity(cell: Cell, pass_: str) -> float:
    """Operations per byte, if each array crosses memory once: query, key, value and out, and in the backward also dout
    and the gradients."""
    arrays = sum(math.prod(shape) for shape in (cell.q_shape, cell.kv_shape, cell.kv_shape, cell.q_shape))
    times = 1.0 if pass_ == "forward" else 2.0
    return seed_figures.WORK[pass_] * cell.work / (times * arrays * jnp.dtype(cell.dtype).itemsize)


def _roofline(dtype: str, benchmark: Sequence[tuple[Cell, Mapping[str, Race]]], roof: Roof) -> Figure:
    peak, _, bandwidth = roof
    figure, axes = plots.new(f"roofline, {dtype}", 4.0)
    found: dict[tuple[str, str], list[tuple[float, seed_figures.Spread]]] = {}
    for cell, races in benchmark:
        for pass_, raced in races.items():
            for name, times in raced.seconds.items():
                if cell.dtype != dtype or name in raced.errors:
                    continue
                spread = seed_figures.spread(seed_figures.WORK[pass_] * cell.work / x for x in times)
                if spread:
                    found.setdefault((name, pass_), []).append((intensity(cell, pass_), spread))
    unit, scale = ("TFLOP/s", 1e12) if peak >= 1e12 else ("GFLOP/s", 1e9)
    xs = [x for points in found.values() for x, _ in points] or [peak / bandwidth]
    low, high = min(*xs, peak / bandwidth) / 4, max(*xs, peak / bandwidth) * 4
    along = np.geomspace(low, high, 200)
    axes.plot(along, np.minimum(peak, bandwidth * along) / scale, color=plots.COLOURS["ink"], linewidth=1.4,
              label=f"roof: {peak / scale:.3g} {unit}, {bandwidth / 1e9:.3g} GB/s")  # fmt: skip
    for (name, pass_), points in found.items():
        like = plots.style("ours" if name == "jax_flash" else name)
        like |= {} if pass_ == "forward" else {"markerfacecolor": "none"}
        bars = [[(y[0] - y[1]) / scale for _, y in points], [(y[2] - y[0]) / scale for _, y in points]]
        axes.errorbar([x for x, _ in points], [y[0] / scale for _, y in points], yerr=bars, linestyle="none",
                      elinewidth=1, label=f"{name}, {pass_}", **like)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    plots.plain_numbers(axes.xaxis)
    plots.plain_numbers(axes.yaxis)
    axes.set_xlabel("arithmetic intensity, FLOP/byte")
    axes.set_ylabel(unit)
    plots.legend_below(axes)
    return figure


def memory(quick: bool, platform: str) -> Section:
    """Peak memory by length; nothing runs."""
    lengths = (256, 1024, 4096, 16384) if quick else (256, 512, 1024, 2048, 4096, 8192, 16384)
    section = Section(
        "memory",
        "Forward and backward in one program of float16, B 1, N 8, head_dim 64: inputs, results and temporaries, by "
        "XLA's own analysis of the compiled program. Nothing runs, so a length that does not fit has a figure too.",
    )
    contestants: dict[str, Any] = {"ours": peers.attend, "plain": peers.plain}
    figure, axes = plots.new("peak memory of forward + backward", 4.0)
    options: dict[str, Any] | None = None if platform == "cpu" else {"xla_gpu_autotune_level": 0}
    sizes: dict[str, dict[int, int]] = {name: {} for name in contestants}
    for name, length in itertools.product(contestants, lengths):
        cell = Cell("float16", 64, length, False, 1, 8)
        try:
            sizes[name][length] = seed_rows.peak_of(seed_rows.compile_both(contestants[name], cell, options))
        except Exception as error:
            section.notes.append(f"{name}, S {length}: {doctor.first_line(error)}")
    for name, some in sizes.items():
        axes.plot(list(some), [x / 2**20 for x in some.values()], label=plots.LABELS[name], **plots.style(name))
    first = sizes["ours"].get(lengths[0])
    if first:
        for power, line in ((1, "--"), (2, ":")):
            guide = [first / 2**20 * (length / lengths[0]) ** power for length in lengths]
            axes.plot(lengths, guide, line, color=plots.COLOURS["middle"], linewidth=1, label=f"grows as S^{power}")
    axes.set_yscale("log")
    plots.plain_numbers(axes.yaxis)
    plots.length_axis(axes, lengths, "MiB")
    section.figures["Ours grows as S, plain attention as its square"] = figure
    rows = [
        [str(length), *(f"{sizes[name][length] / 2**20:.1f}" if length in sizes[name] else "-" for name in sizes)]
        for length in lengths
    ]
    section.tables.append(Table("MiB", ["S", *sizes], rows))
    return section


ACCURACY = tuple(Cell(dtype, 64, 512, True, 1, 4) for dtype in ("float16", "bfloat16", "float32"))


def entrants(platform: str) -> dict[str, Implementation]:
    """Every implementation and peer, with the reason for those that are not here."""
    kernels = "cpu" if platform == "cpu" else "cuda"
    found = {
        f"jax_flash, {name}": Implementation(name, functools.partial(peers.attend, implementation=name))
        for name in (kernels, "xla", "reference")
    }
    found["plain attention"] = Implementation("", peers.plain)
    for where, algorithms in (("loops", study.LOOPS), ("kernels", study.KERNELS)):
        for name, algorithm in algorithms.items():
            missing = "" if where == "loops" or platform != "cpu" else "needs a GPU"
            found[f"study, {name}, {where}"] = Implementation(
                "", functools.partial(seeds._study, algorithm), missing=missing
            )
    found["jax.nn, xla"] = Implementation("", functools.partial(peers.attend_nn, "xla"))
    found["jax.nn, cudnn"] = Implementation(
        "", functools.partial(peers.attend_nn, "cudnn"), missing="" if platform != "cpu" else "needs a GPU"
    )
    for name in ("fa2-jax", "torch-flash", "torch-plain"):
        found[name] = seeds._implementation(name, platform)
    for name, torch_name in (("cudnn-torch", "cudnn"), ("fa4", "fa4")):
        found[name] = _torch(torch_name, platform)
    found["tokamax"] = _tokamax(platform)
    return found


def _torch(name: str, platform: str) -> Implementation:
    if platform == "cpu":
        return Implementation(name, missing="needs a GPU")
    try:
        from jax_flash._tools.bench import torch_peers

        getattr(torch_peers, name)()
        return Implementation(name, torch=name)
    except Exception as error:  # anything may go wrong in another package's import
        return Implementation(name, missing=doctor.first_line(error))


def _tokamax(platform: str) -> Implementation:
    if platform == "cpu":
        return Implementation("tokamax", missing="needs a GPU")
    try:
        import tokamax
    except Exception as error:  # as above
        return Implementation("tokamax", missing=doctor.first_line(error))
    attend = functools.partial(tokamax.dot_product_attention, implementation="mosaic")
    return Implementation("tokamax", lambda q, k, v, causal: attend(q, k, v, is_causal=causal))


def accuracy(platform: str, cells: Sequence[Cell] = ACCURACY) -> Section:
    """Relative L2 errors against float64 of every implementation and peer."""
    section = Section(
        "accuracy",
        f"Errors against float64: {cells[0]}, inputs and dout of unit variance; relative in L2, "
        "|result - exact| / |exact|. A result rounded once has about a fourth of the dtype's epsilon, the line.",
    )
    contestants = entrants(platform)
    section.notes += [f"{name}: not here, {x.missing}" for name, x in contestants.items() if x.missing]
    for cell in cells:
        arrays = cell.draw()
        right = exact.exact_results([exact.one_entry(x) for x in arrays], cell.causal)
        errors: dict[str, list[float]] = {}
        for name, entrant in contestants.items():
            if entrant.missing:
                continue
            try:
                errors[name] = _relative_errors(entrant, cell, arrays, right)
            except Exception as error:
                section.notes.append(f"{cell.dtype}: {name}: {doctor.first_line(error)}")
        eps = float(jnp.finfo(cell.dtype).eps)
        own = [name for name in errors if name.startswith(("jax_flash", "study"))]
        for name in own:
            # In float32 the sums round too, and on GPUs products have TF32's accuracy by default.
            allowed = 4 * eps if cell.dtype != "float32" else 2.0**-8 if platform == "cuda" else 16 * eps
            if not max(errors[name]) < allowed:
                section.wrong.append(f"{cell.dtype}: {name}: a relative error of {max(errors[name]):.2g}")
        section.wrong += [
            f"{note}" for note in section.notes if note.startswith((f"{cell.dtype}: jax_flash", f"{cell.dtype}: study"))
        ]
        figure, axes = plots.new(f"errors of {cell.dtype}", 1.8 + 0.22 * len(errors))
        axes.axvline(eps / 4, color=plots.COLOURS["middle"], linewidth=1, label="epsilon / 4")
        for number, (result, like) in enumerate(zip(plots.RESULTS.values(), plots.STYLES, strict=False)):
            plots.dots(axes, [x[number] for x in errors.values()], result, plots.style(like))
        axes.set_xscale("log")
        plots.plain_numbers(axes.xaxis)
        plots.row_axis(axes, list(errors), "relative L2 error against float64")
        section.figures[f"{cell.dtype}: errors of out, dq, dk and dv"] = figure
        rows = [[name, *(f"{x:.2e}" for x in some)] for name, some in errors.items()]
        section.tables.append(Table(cell.dtype, ["", *plots.RESULTS.values()], rows))
    return section


def _relative_errors(
    entrant: Implementation, cell: Cell, arrays: Sequence[jax.Array], right: Sequence[np.ndarray]
) -> list[float]:
    if entrant.attend:
        results = jax.jit(functools.partial(exact.both, entrant.attend, cell.causal))(*arrays)
    else:
        from jax_flash._tools.bench import torch_peers

        results = torch_peers.results(entrant.torch, arrays, cell.causal)
    wide = [np.asarray(exact.one_entry(jnp.asarray(x)), np.float64) for x in results]
    return [exact.relative_error(x, y) for x, y in zip(wide, right, strict=True)]


def preset(name: str, quick: bool, say: Say) -> Section:
    """A preset of ``bench seeds``."""
    record, _ = seeds.measure(
        name, quick=quick, rounds=3 if quick else 5, say=lambda text, done, of: say(f"{name} {done}/{of}: {text}")
    )
    text = (
        f"{record['title']}. The document: {record['document']}. {len(record['rows'])} rows"
        f"{', some of them all (quick)' if quick else ''}. The same by itself: python -m jax_flash bench seeds {name}."
    )
    figures = {f"{name}: {key}": figure for key, figure in plots.seeds(record).items()}
    return Section(
        f"seeds: {name}", text, seed_tables.tables(record), figures, seed_tables.notes(record), record["wrong"]
    )


# The page


def page(machine: Sequence[Sequence[str]], sections: Sequence[Section]) -> str:
    """The page as text. Call it within `plots.drawing`."""
    names = [("machine", "machine"), *((_anchor(section.name), section.name) for section in sections)]
    links = "".join(f'<a href="#{anchor}">{html.escape(name)}</a>' for anchor, name in names)
    parts = [_section(section, number) for number, section in enumerate(sections)]
    wrong = [text for section in sections for text in section.wrong]
    verdict = "every result is right" if not wrong else f"{len(wrong)} wrong: {'; '.join(wrong)}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>jax_flash report</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>jax_flash report</h1>\n<p class="verdict">{html.escape(verdict)}</p>\n<nav>{links}</nav>\n'
        f'<section id="machine">\n<h2>machine</h2>\n{_table(Table("", (), machine))}</section>\n'
        + "".join(parts)
        + "</main>\n</body>\n</html>\n"
    )


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _section(section: Section, number: int) -> str:
    text = [f'<section id="{_anchor(section.name)}">\n<h2>{html.escape(section.name)}</h2>\n']
    text.append(f"<p>{html.escape(section.text)}</p>\n" if section.text else "")
    text += [f'<p class="wrong">wrong: {html.escape(x)}</p>\n' for x in section.wrong]
    text.append('<div class="figures">\n')
    for i, (caption, figure) in enumerate(section.figures.items()):
        drawn = inline(figure, f"f{number}-{i}-", caption)
        text.append(f"<figure>{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>\n")
    text.append("</div>\n")
    text += [_table(table) for table in section.tables]
    if section.notes:
        text.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in section.notes) + "</ul>\n")
    return "".join(text) + "</section>\n"


def _table(table: Table) -> str:
    text = [f"<h3>{html.escape(table.title)}</h3>\n" if table.title else "", '<div class="wide"><table>\n']
    if table.columns:
        text.append("<tr>" + "".join(f"<th>{html.escape(x)}</th>" for x in table.columns) + "</tr>\n")
    text += ["<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>\n" for row in table.rows]
    text.append("</table></div>\n")
    text.append(f'<p class="note">{html.escape(table.note)}</p>\n' if table.note else "")
    return "".join(text)


def inline(figure: Figure, prefix: str, label: str) -> str:
    """A figure as an element of the page: colours are its variables, and ids do not clash with another figure's."""
    text = plots.svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", text)
    for number, colour in enumerate(plots.dark()):
        text = text.replace(colour, f"var(--c{number})")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _style() -> str:
    light, dark = (
        "".join(f"--c{number}: {x}; " for number, x in enumerate(colours))
        for colours in (plots.dark(), plots.dark().values())
    )
    names = list(plots.COLOURS)
    ground, ink, faint, middle = (f"var(--c{names.index(name)})" for name in ("ground", "ink", "faint", "middle"))
    return f"""\
:root {{ color-scheme: light dark; {light}}}
@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: {ground}; color: {ink}; font: 16px/1.5 system-ui, sans-serif; }}
main {{ max-width: 76rem; margin: 0 auto; padding: 1rem clamp(0.8rem, 3vw, 2rem) 4rem; }}
h1 {{ font-size: 1.6rem; margin: 0.5rem 0; }}
h2 {{ font-size: 1.25rem; margin: 2.5rem 0 0.5rem; padding-top: 0.5rem; border-top: 1px solid {faint}; }}
h3 {{ font-size: 1rem; margin: 1.2rem 0 0.3rem; }}
p, ul {{ max-width: 46rem; overflow-wrap: anywhere; }}
nav {{ display: flex; flex-wrap: wrap; gap: 0.3rem 1rem; }}
nav a {{ color: inherit; }}
.figures {{ display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); }}
figure {{ margin: 0; max-width: 33rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figcaption, .note, li {{ font-size: 0.85rem; color: {middle}; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.2rem 0.7rem 0.2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid {faint}; }}
th:first-child, td:first-child, #machine td {{ text-align: left; }}
#machine td {{ white-space: normal; overflow-wrap: anywhere; vertical-align: top; }}
#machine td:first-child {{ white-space: nowrap; color: {middle}; }}
.wrong {{ font-weight: 600; }}
"""
