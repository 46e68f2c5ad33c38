"""Columns of text for the command line."""

from collections.abc import Container, Sequence


def table(rows: Sequence[Sequence[str]], *, indent: str = "", right: Container[int] = ()) -> str:
    """The rows as lines with aligned columns; those with numbers in ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)
