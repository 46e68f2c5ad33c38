"""The tables of ``bench seeds``: what was measured with what the document has beside it, as text for rich and HTML."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_flash._tools.bench import seed_documents as documents
from jax_flash._tools.bench import seed_figures as figures
from jax_flash._tools.bench import seed_rows
from jax_flash._tools.bench.seed_rows import NAMES

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def tables(record: Record) -> list[Table]:
    """The tables of a record."""
    make = {"v100": _v100, "from-scratch": _from_scratch, "t4": _t4, "naive": _naive}[record["preset"]]
    return make(record)


def notes(record: Record) -> list[str]:
    """What is not in the tables, and why; equal reasons once."""
    found = [f"{name} ({record['implementations'][name]}): not here, {why}" for name, why in record["missing"].items()]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in record["rows"]:
        for name, x in row["found"].items():
            for what, why in x["skipped"].items():
                reasons.setdefault((row["name"], name, why), []).append(what)
    found += [f"{row}: {name}: no {', '.join(what)}: {why}" for (row, name, why), what in reasons.items()]
    if record.get("ladder_missing"):
        found.append(f"ladder: not here, {record['ladder_missing']}")
    return found


def _v100(record: Record) -> list[Table]:
    others = [name for name in ("plain", "torch-plain") if name not in record["missing"]]
    measured = any(figures.memory(row, "ours", "measured_memory") for row in record["rows"])
    columns = ["(B, H, M, N, D, causal)", "forward right", "backward right", "memory saved", "published"]
    columns += ["measured"] if measured else []
    for other in others:
        columns += [f"{pass_} / {other}" for pass_ in ("forward", "backward", "total")]
        columns += ["published"] if other == others[-1] else []
    rows = []
    for row in record["rows"]:
        errors, published = row["found"]["ours"]["errors"], row["published"]
        cells = [row["name"], *(_verdict(errors, names) for names in (("out",), NAMES[1:]))]
        cells += [_percent(figures.saved(row, "ours", "plain")), published["memory"]]
        cells += [_percent(figures.saved(row, "ours", "plain", "measured_memory"))] if measured else []
        for other in others:
            cells += [_times(figures.speed_up(row, "ours", other, pass_)) for pass_ in ("forward", "backward", "total")]
        cells.append(" / ".join(f"{published[pass_]:.2f}" for pass_ in ("forward", "backward", "total")))
        rows.append(cells)
    note = (
        f"float16; right: every |error| at most {documents.VOLTA_TOLERANCE:g} (1 + |exact|), exact in float64; memory "
        "of forward + backward by XLA's own analysis; ours is so many times as fast as plain attention in JAX, the "
        "median of the rounds; published: on a V100 against PyTorch, forward / backward / total"
    )
    return [Table("errors, memory and speed-up", columns, rows, note)]


def _verdict(errors: Mapping[str, Any], names: Sequence[str]) -> str:
    if not set(names) <= set(errors):
        return "-"
    some = {name: errors[name] for name in names}
    ratios = [error["ratio"] for error in some.values()]
    worst = "not finite" if None in ratios else f"{max(ratios):.2f}"
    return f"{'yes' if seed_rows.is_right(some) else 'NO'}, {worst}"


def _from_scratch(record: Record) -> list[Table]:
    names = [name for name in record["implementations"] if name not in record["missing"]]
    rivals = [name for name in ("fa2-jax", "torch-flash") if name in names]
    cpu = record["machine"]["platform"] == "cpu"
    unit, scale = ("GFLOP/s", 1e9) if cpu else ("TFLOP/s", 1e12)
    columns = ["pass", "S", *(f"{name}, {unit}" for name in names), *(f"% of {name}" for name in rivals)]
    rows = []
    for pass_ in record["passes"]:
        rates = {name: [figures.rate(row, name, pass_) for row in record["rows"]] for name in names}
        medians = {name: [x[0] if x else None for x in some] for name, some in rates.items()}
        for number, row in enumerate(record["rows"]):
            cells = [pass_, str(row["cell"]["length"]), *(_rate(medians[name][number], scale) for name in names)]
            rows.append([*cells, *(_of(medians["ours"][number], medians[name][number]) for name in rivals)])
        means = {name: figures.harmonic_mean(medians[name]) for name in names}
        cells = [pass_, "harmonic mean", *(_rate(means[name], scale) for name in names)]
        rows.append([*cells, *(_of(means["ours"], means[name]) for name in rivals)])
    note = f"{record['rows'][0]['cell']['dtype']}; medians of the rounds; per cents of rates"
    found = [Table("head_dim 128, full", columns, rows, note), *_ladder(record, rivals)]
    published = [[name, *(f"{x:.1f}%" for x in cells)] for name, cells in documents.FROM_SCRATCH_KERNELS]
    reference = [x for gpu in documents.FROM_SCRATCH_GPUS for x in documents.FROM_SCRATCH_REFERENCE[gpu]]
    published.append(["FlashAttention-2, TFLOP/s", *(f"{x:.2f}" for x in reference)])
    columns = ["", *(f"{gpu}, {of}" for gpu in documents.FROM_SCRATCH_GPUS for of in ("S 4096", "harmonic mean"))]
    return [*found, Table("published: forward, per cent of FlashAttention-2", columns, published)]


def ladder_rates(record: Record, pass_: str) -> dict[str, dict[str, float | None]]:
    """FLOP/s of every rung, by length, of one pass."""
    work = {str(row["cell"]["length"]): figures.WORK[pass_] * row["cell"]["work"] for row in record["rows"]}
    return {
        rung["name"]: {length: figures.ladder_rate(rung, work, length) for length in work}
        for rung in record.get("ladder", {}).get(pass_, [])
    }


def rival_rates(record: Record, pass_: str) -> tuple[str, dict[str, float]] | None:
    """The faster FlashAttention-2 by harmonic mean, and its FLOP/s by length; None if there is none."""
    best: tuple[float, str, dict[str, float]] | None = None
    for name in ("fa2-jax", "torch-flash"):
        rates = {str(row["cell"]["length"]): figures.rate(row, name, pass_) for row in record["rows"]}
        known = {length: x[0] for length, x in rates.items() if x}
        mean = figures.harmonic_mean(x and x[0] for x in rates.values())
        if mean is not None and (best is None or mean > best[0]):
            best = mean, name, known
    return None if best is None else best[1:]


def _ladder(record: Record, rivals: Sequence[str]) -> list[Table]:
    found = []
    for pass_ in record.get("ladder", {}):
        rival = rival_rates(record, pass_)
        columns = ["", "TFLOP/s at S 4096", "harmonic mean"]
        columns += [f"% of {rival[0]} at S 4096", "% of its harmonic mean"] if rival else []
        rows = []
        for name, rates in ladder_rates(record, pass_).items():
            at, mean = rates.get("4096"), figures.harmonic_mean(rates.values())
            cells = [name, _rate(at, 1e12), _rate(mean, 1e12)]
            if rival:
                cells += [_of(at, rival[1].get("4096")), _of(mean, figures.harmonic_mean(rival[1].values()))]
            rows.append(cells)
        if rows:
            found.append(Table(f"the ladder, {pass_}", columns, rows))
    return found


def _t4(record: Record) -> list[Table]:
    names = [name for name in record["implementations"] if name not in record["missing"]]
    absent = [name for name in ("torch-flash",) if name not in names]  # the other one's figures are those of plain
    found = []
    for pass_ in record["passes"]:
        rows = []
        for row in record["rows"]:
            published = row["published"][pass_]
            cells = [str(row["cell"]["length"]), *(_milliseconds(row, name, pass_, published) for name in names)]
            rows.append([*cells, *(_published(published[name]) for name in absent)])
        columns = ["S", *names, *(f"{name}, published alone" for name in absent)]
        found.append(Table(f"{pass_}, ms (published, on a T4)", columns, rows, "medians of the rounds"))
    rows = [
        [str(row["cell"]["length"]), *(_mebibytes(figures.memory(row, name)) for name in names)]
        for row in record["rows"]
    ]
    found.append(Table("memory of forward + backward by XLA's analysis, MiB", ["S", *names], rows))
    rows = []
    for name in names:
        errors, published = figures.worst_errors(record, name), documents.T4_ERRORS.get(name)
        cells = ["-"] * 4 if errors is None else [f"{errors[key]:.2e}" for key in NAMES]
        rows.append([name, *cells, " / ".join(f"{x:.2e}" for x in published) if published else ""])
    columns = ["", "out", "dq", "dk", "dv", "published: out / dq / dk / dv"]
    found.append(Table("largest errors over all lengths, against float64", columns, rows))
    return found


def _naive(record: Record) -> list[Table]:
    columns = ["", "", "error of out", "dq", "dk", "dv", "published", "forward, us", "backward, us", "published"]
    rows = []
    for row in record["rows"]:
        for name, x in row["found"].items():
            cells = [row["name"], name, *(_error(x["errors"].get(key)) for key in NAMES)]
            published = row["published"].get("flash1" if name == "plain" else name)
            if published is None or name == "plain":
                cells.append("")
            else:
                cells.append(" / ".join(str(published[key]) for key in NAMES))
            times = [figures.time(row, name, pass_) for pass_ in ("forward", "backward")]
            cells += ["-" if t is None else f"{1e6 * t[0]:.0f}" for t in times]
            if published is None:
                cells.append("")
            else:
                before = "plain_" if name == "plain" else ""
                cells.append(" / ".join(str(published[before + pass_]) for pass_ in ("forward", "backward")))
            rows.append(cells)
    note = "errors are the largest against float64; times are medians; the document names neither shape nor GPU"
    return [Table("errors and times", columns, rows, note)]


# Cells


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"


def _times(spread: figures.Spread | None) -> str:
    return "-" if spread is None else f"{spread[0]:.2f}"


def _rate(rate: float | None, scale: float) -> str:
    if rate is None:
        return "-"
    return f"{rate / scale:.1f}" if rate < 100 * scale else f"{rate / scale:.0f}"


def _of(mine: float | None, theirs: float | None) -> str:
    return "-" if mine is None or theirs is None else f"{mine / theirs:.1%}"


def _milliseconds(row: Mapping[str, Any], name: str, pass_: str, published: Mapping[str, Any]) -> str:
    found = figures.time(row, name, pass_)
    text = "-" if found is None else f"{1e3 * found[0]:.3g}" if found[0] < 1 else f"{1e3 * found[0]:.0f}"
    if name not in published:
        return text
    return f"{text} ({_published(published[name])})"


def _published(milliseconds: float | None) -> str:
    return "inf" if milliseconds is None else f"{milliseconds:.3f}"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def _error(error: Mapping[str, Any] | None) -> str:
    if error is None:
        return "-"
    return "not finite" if error["largest"] is None else f"{error['largest']:.2e}"


# The terminal


def show(record: Record) -> None:
    """Prints the tables."""
    import rich.box
    import rich.console
    import rich.markup
    import rich.table

    # Piped, rich would take 80 columns and break every cell.
    console = rich.console.Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    machine = record["machine"]
    console.print(f"{record['title']}", style="bold", markup=False)
    console.print(
        f"{machine['device']}, jax {machine['jax']}; the document: {record['document']}; {len(record['rows'])} rows"
        f"{', quick' if record['quick'] else ''}, {record['rounds']} rounds of all in turn, {record['took']} s",
        markup=False,
    )
    for table in tables(record):
        grid = rich.table.Table(title=table.title, title_justify="left", caption=table.note, caption_justify="left",
                                box=rich.box.SIMPLE)  # fmt: skip
        for number, column in enumerate(table.columns):
            grid.add_column(column, justify="right" if number else "left")
        for cells in table.rows:
            grid.add_row(*(rich.markup.escape(cell) for cell in cells))
        console.print(grid)
    for text in notes(record):
        console.print(text, markup=False)
    sys.stdout.flush()


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on the standard error; yields what `seeds.measure` calls with its progress."""
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    columns = [
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    ]
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def say(text: str, done: int, of: int) -> None:
            bar.update(task, description=text, completed=done, total=of)

        yield say
