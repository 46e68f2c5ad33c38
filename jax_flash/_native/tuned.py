"""Tile rows that ``bench tune`` found for GPUs: stored in the folder of the kernel cache, and given to the library."""

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from jax_flash._native import _core, warn

FILE = "tuned.json"
PASSES = ("forward", "backward", "backward_dq")
"""The passes with a tile row; the last one is the pass for dquery of a backward that has it separate."""


@dataclasses.dataclass(frozen=True)
class TunedRow:
    """A row for plain calls of one head dim on one kind of GPU."""

    gpu: str
    """The driver's name, "NVIDIA H200"."""
    family: str
    pass_: str
    head_dim: int
    row: dict[str, int]
    """The values of the fields of the table."""

    def __str__(self) -> str:
        return f"{self.gpu}, {self.family}, {self.pass_}, head_dim {self.head_dim}: {row_name(self.row)}"

    @property
    def place(self) -> tuple[str, str, str, int]:
        """The key: there is one row for each."""
        return self.gpu, self.family, self.pass_, self.head_dim


def tile_row(
    block_q: int, block_kv: int, warps: int, stages: int = 1, min_blocks: int = 1, **others: int
) -> dict[str, int]:
    """A row with all fields of the table; optional ones are 1 by default."""
    named = {"block_q": block_q, "block_kv": block_kv, "warps": warps, "stages": stages, "min_blocks": min_blocks}
    return dict.fromkeys(_core.TILE_FIELDS, 1) | named | others


def row_name(row: dict[str, int]) -> str:
    return ", ".join(f"{field} {row[field]}" for field in _core.TILE_FIELDS)


def path() -> pathlib.Path | None:
    """The path of the file, which need not exist; None if there is no folder for it."""
    folder = _core.cache_path()
    return pathlib.Path(folder) / FILE if folder else None


def load() -> list[TunedRow]:
    """The stored rows. Raises ValueError, with the remedy, if the folder is not trusted, or the file is not one of
    `store`, or it was tuned for kernels of other sources."""
    if refusal := _core.cache_refusal():
        raise ValueError(f"kernels and tuned tile rows on disk are not used: {refusal}")
    file = path()
    if file is None:
        return []
    remedy = f"run `python -m jax_flash bench tune --store` again, or remove {file}"
    try:
        if not file.is_file():
            return []
        stored = json.loads(file.read_text(encoding="utf-8"))
        current = stored["sources"] == _core.sources_key()
        rows = [_row(x) for x in stored["rows"]] if current else []
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"tuned tile rows are not used: {file} can't be read ({type(error).__name__}: {error}); {remedy}"
        ) from error
    if not current:
        raise ValueError(f"tuned tile rows are not used: they are of another version of the kernels; {remedy}")
    return rows


def _row(stored: Any) -> TunedRow:
    row = {field: stored["row"][field] for field in _core.TILE_FIELDS}
    found = TunedRow(stored["gpu"], stored["family"], stored["pass"], stored["head_dim"], row)
    numbers, texts = [found.head_dim, *row.values()], [found.gpu, found.family]
    if (
        found.pass_ not in PASSES
        or not all(type(x) is str and x.isprintable() for x in texts)
        or not all(type(x) is int and 0 < x <= 1024 for x in numbers)
        or found.head_dim % 8
    ):
        raise TypeError(f"no row of a table is {stored!r}")
    return found


def store(rows: Iterable[TunedRow]) -> pathlib.Path:
    """Adds rows to the file and drops those for kernels of other sources. Raises OSError if it can't be written."""
    file = path()
    if file is None:
        raise OSError("there is no folder for tuned tile rows: set JAX_FLASH_CACHE_DIR")
    try:
        _core.make_cache()
    except RuntimeError as error:
        raise OSError(f"tuned tile rows can't be stored: {error}") from error
    try:
        known = load()
    except ValueError:  # stale or broken: replaced by the new rows
        known = []
    merged = {row.place: row for row in (*known, *rows)}
    content = {
        "sources": _core.sources_key(),
        "rows": [
            {"gpu": x.gpu, "family": x.family, "pass": x.pass_, "head_dim": x.head_dim, "row": x.row}
            for x in merged.values()
        ],
    }
    # Renamed into place, so that a process that starts meanwhile reads a complete file, old or new.
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False) as temporary:
        json.dump(content, temporary, indent=1)
    os.replace(temporary.name, file)
    return file


_told: list[TunedRow] = []  # the rows given to the library last


def tell(rows: Sequence[TunedRow]) -> None:
    """Makes subsequent calls take these rows."""
    global _told
    if list(rows) == _told:
        return
    _told = list(rows)
    look_again()


def look_again() -> None:
    """Makes every call look up its kernels anew, after a change of the sources but not of the rows."""
    _core.tune([{"gpu": x.gpu, "family": x.family, "pass": x.pass_, "head_dim": x.head_dim, **x.row} for x in _told])


def use_stored() -> None:
    """Gives the stored rows to the library; warns of what can't be used."""
    try:
        tell(load())
    except ValueError as error:
        warn.warn(str(error))


def in_use(devices: Iterable[dict[str, Any]], head_dim: int | None = None) -> list[TunedRow]:
    """The stored rows that plain calls on ``devices`` take, for one head dim or for all."""
    try:
        rows = load()
    except ValueError:
        return []
    served = {(device["name"], device["family"]) for device in devices}
    return [row for row in rows if (row.gpu, row.family) in served and head_dim in (None, row.head_dim)]
