"""Signatures of public functions in a form to read."""

import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


class _Wrapped(inspect.Signature):
    """A signature whose text is broken into lines, which pydoc does by itself from Python 3.13 on."""

    def __str__(self) -> str:
        text = super().__str__()
        # Only between parameters: a default has no ", " in it.
        lines = textwrap.wrap(text, width=100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)


def readable(function: _Function) -> _Function:
    """Makes ``help(function)`` show names and defaults alone.

    ``jax.typing.ArrayLike`` is a union of eight types, which help() spells out for each of 26 parameters. The
    annotations stay where type checkers and ``typing.get_type_hints`` look for them.
    """
    return with_signature(inspect.signature(function).parameters.values())(function)


def with_signature(parameters: Iterable[inspect.Parameter]) -> Callable[[_Function], _Function]:
    """The same for a function that passes ``**options`` on: shows ``parameters``."""
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]

    def decorate(function: _Function) -> _Function:
        # inspect reads this attribute, which the type of functions lacks.
        function.__signature__ = _Wrapped(plain)  # type: ignore[attr-defined]
        return function

    return decorate
