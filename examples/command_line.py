"""What the commands here share: parsers, converters of flags for argparse, and interruptions."""

import argparse
import contextlib
import math
import signal
from collections.abc import Callable, Iterator


def parser_of(documentation: str | None, usage: str | None = None) -> argparse.ArgumentParser:
    """A parser that says what a module's docstring does: its first paragraph, and the rest after the options."""
    description, _, rest = (documentation or "").partition("\n\n")
    return argparse.ArgumentParser(
        usage=usage, description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def at_least(minimum: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < minimum:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {minimum}, got {text!r}")
        return number

    return convert


def real(zero: bool) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
            raise argparse.ArgumentTypeError(f"must be a number {'>=' if zero else '>'} 0, got {text!r}")
        return number

    return convert


@contextlib.contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Says whether Ctrl-C (or SIGTERM) came, so that a step is never cut in two. A second one stops at once."""
    came = False

    def note(number: int, frame: object) -> None:
        nonlocal came
        came = True
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        restore()
