"""Score and mask functions as text for the CPU kernels, which evaluate it: see csrc/cpu/functions.h.

A text has a program for the score, for the masks, for the partial mask of a block mask and for what is added to the
gradients of captured arrays. Each line of a program is an operation, by its name in csrc/cpu/operations.h, of earlier
lines, by their numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_flash._functions import program
from jax_flash._functions.program import Op, Program, Unprintable
from jax_flash._functions.trace import Function, Functions

_KINDS = {
    "bool": "b",
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), "i"),
    "uint32": "u",
    **dict.fromkeys(("float16", "bfloat16", "float32"), "f"),
}
"""How a value is computed: as a boolean, int32, uint32 or float32."""

_NARROW = {
    **{name: f"wrap_{name}" for name in ("int8", "int16", "uint8", "uint16")},
    **{name: f"round_{name}" for name in ("float16", "bfloat16")},
}
"""What makes a value of the narrower dtype of one that was computed in the wider."""

_SAME_OF_INTEGERS = ("add", "sub", "mul", "neg", "eq", "ne")
"""Operations of int32 that are those of uint32, too."""

_OF_BITS = ("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic")


@functools.cache
def operations() -> frozenset[str]:
    """The names of the operations that a text may have."""
    from jax_flash._native import _core  # imported here, since registration says first why there is none

    return frozenset(_core.CPU_OPERATIONS)


def source(functions: Functions, several: frozenset[int] = frozenset(), derives: bool = False,
           gradients: Sequence[int] = (), positions_from_0: bool = False, most: program.Most = ()) -> str:  # fmt: skip
    """The text of a call's functions; the arguments are those of `jax_flash._functions.cuda.source`, and ``most`` the
    largest values of b, h, q and kv, where they are known: what they make needless is left out.

    Raises:
      Unprintable: a function has none.
    """
    return _source(functions, several, derives, tuple(gradients), positions_from_0, most)


@functools.lru_cache(maxsize=256)
def _source(
    functions: Functions,
    several: frozenset[int],
    derives: bool,
    gradients: tuple[int, ...],
    positions_from_0: bool,
    most: program.Most,
) -> str:
    sizes = functions.shapes
    text = [f"batch {functions.batch or 0}"]
    if functions.score is not None:
        scored = program.score_program(functions.score, gradients, derives, positions_from_0, most)
        score = _Writer("score", sizes, several)
        score.results(scored.program, scored.program.outputs[: 1 + (derives and scored.keeps_derivative)])
        text += score.lines
        if scored.loads:
            gradient = _Writer("gradient", sizes, several)
            gradient.additions(scored, gradients)
            text += gradient.lines
    if functions.masks:
        text += _mask(functions.masks, _Writer("mask", sizes, several), positions_from_0, most)
    if functions.partial_mask is not None:
        writer = _Writer("partial_mask", sizes, several)
        text += _mask((functions.partial_mask,), writer, positions_from_0, most)
    return "\n".join([*text, ""])


def _mask(masks: Sequence[Function], writer: _Writer, positions_from_0: bool, most: program.Most) -> list[str]:
    found: int | None = None
    for mask in masks:
        of = program.mask_program(mask, positions_from_0, most)
        (kept,) = writer.program(of, of.outputs)
        found = kept if found is None else writer.line("and", found, kept)
    writer.lines.append(f"results {found}")
    return writer.lines


class _Writer:
    """The lines of one program; equal ones are one line."""

    def __init__(self, name: str, sizes: dict[int, tuple[int, ...]], several: frozenset[int]) -> None:
        self.lines, self.sizes, self.several = [f"program {name}"], sizes, several
        self.numbers: dict[str, int] = {}

    def line(self, operation: str, *args: int) -> int:
        if operation not in operations():
            raise Unprintable(f"primitive {operation}")
        text = " ".join([operation, *map(str, args)])
        if text not in self.numbers:
            self.lines.append(text)
            self.numbers[text] = len(self.numbers)
        return self.numbers[text]

    def constant(self, value: object, dtype: str) -> int:
        kind = _kind(dtype)
        if kind == "b":
            bits = -1 if value else 0
        elif kind == "f":
            bits = int(np.asarray(value).astype(np.float32).view(np.int32))
        else:
            bits = int(np.asarray(value).astype(np.int64).astype(np.int32))
        return self.line("constant", bits)

    def results(self, of: Program, outputs: Sequence[int]) -> None:
        self.lines.append(" ".join(["results", *map(str, self.program(of, outputs))]))

    def additions(self, scored: program.ScoreProgram, gradients: Sequence[int]) -> None:
        outputs = scored.program.outputs
        for load in scored.loads:
            wanted = [outputs[i] for i in (load.derivative, *load.index)]
            if load.valid is not None:
                wanted.append(outputs[load.valid])
            derivative, *index = self.program(scored.program, wanted)
            valid = index.pop() if load.valid is not None else -1
            at = self.flat_index(load.captured, index)
            self.lines.append(
                f"add {gradients.index(load.captured)} {self.of_call(load.captured)} {derivative} {at} {valid}"
            )

    def program(self, of: Program, outputs: Sequence[int]) -> list[int]:
        """The numbers of these operations of a program, whose lines are added."""
        numbers: dict[int, int] = {}
        for i in of.needed(outputs):
            op = of.ops[i]
            numbers[i] = self.operation(op, of, numbers)
        return [numbers[i] for i in outputs]

    def operation(self, op: Op, of: Program, numbers: dict[int, int]) -> int:
        args = [numbers[i] for i in op.args]
        if op.name == "input":
            return self.line(op.params)
        if op.name == "constant":
            return self.constant(op.params, op.dtype)
        if op.name == "load":
            kind = _kind(op.dtype)
            at = self.flat_index(op.params, args)
            loaded = self.line(f"load_{op.dtype}", at, op.params, self.elements(op.params), self.of_call(op.params))
            return self.truth(loaded) if kind == "b" else loaded
        index = _index_of_count(of, op)
        if index is not None:
            x, count = index
            return self.line("index", numbers[x], self.constant(count, "int32"))
        before = of.ops[op.args[-1]].dtype
        if op.name == "select_n":
            return self.line("select", *args)
        if op.name == "convert_element_type":
            return self.converted(args[0], before, op.dtype)
        kind = _kind(before)
        if op.name in _OF_BITS:
            return self.narrowed(self.line(op.name, *args), op.dtype)
        if kind == "b":
            if op.name not in ("eq", "ne"):
                raise Unprintable(f"primitive {op.name} of bool")
            kind = "i"
        if op.name == "round":
            return self.narrowed(self.line("round_f" if op.params == 0 else "rint_f", *args), op.dtype)
        if op.name in ("is_finite", "population_count", "clz"):
            if op.name != "is_finite" and before not in ("int32", "uint32"):
                raise Unprintable(f"primitive {op.name} of {before}")
            return self.line(op.name, *args)
        if kind == "u" and op.name in ("abs", "sign"):
            return args[0] if op.name == "abs" else self.line("number_of_bool", self.truth(args[0]))
        if kind == "u" and op.name in _SAME_OF_INTEGERS:
            kind = "i"
        return self.narrowed(self.line(f"{op.name}_{kind}", *args), op.dtype)

    def narrowed(self, value: int, dtype: str) -> int:
        return self.line(_NARROW[dtype], value) if dtype in _NARROW else value

    def truth(self, number: int) -> int:
        return self.line("ne_i", number, self.constant(0, "int32"))

    def converted(self, x: int, before: str, after: str) -> int:
        kind, wanted = _kind(before), _kind(after)
        if wanted == "b":
            return self.line("ne_f", x, self.constant(0, "float32")) if kind == "f" else self.truth(x)
        if kind == "b":
            x, kind = self.line("number_of_bool", x), "i"
        if kind == "f" and wanted != "f" and after not in ("int32", "uint32"):
            raise Unprintable(f"a conversion of {before} to {after}")
        if (kind == "f") != (wanted == "f"):
            x = self.line(f"{wanted}_of_{kind}", x)
        return self.narrowed(x, after)

    def of_call(self, captured: int) -> int:
        """Elements of an array that each of the calls that vmap has joined has; 0: all share it."""
        return self.elements(captured) if captured in self.several else 0

    def elements(self, captured: int) -> int:
        """Those of an array that one call has."""
        return int(np.prod(self.sizes[captured], dtype=np.int64))

    def flat_index(self, captured: int, index: Sequence[int]) -> int:
        sizes = self.sizes[captured]
        if int(np.prod(sizes, dtype=np.int64)) > np.iinfo(np.int32).max:
            raise Unprintable(f"a captured array of shape {sizes}, which has more than 2^31 - 1 elements")
        found: int | None = None
        for i, n in zip(index, sizes, strict=True):
            if n == 1:
                continue
            found = i if found is None else self.line("add_i", self.line("mul_i", found, self.constant(n, "int32")), i)
        return self.constant(0, "int32") if found is None else found


def _index_of_count(of: Program, op: Op) -> tuple[int, int] | None:
    """x and n, where the operation is the place in n elements of an index x as Python has them: negative ones count
    from the end, and those outside are clamped."""

    def args(i: int, name: str) -> tuple[int, ...] | None:
        return of.ops[i].args if of.ops[i].name == name else None

    def value(i: int) -> Any:
        return of.ops[i].params if of.ops[i].name == "constant" else None

    if op.name != "min" or op.dtype != "int32" or value(op.args[1]) is None:
        return None
    raised = args(op.args[0], "max")
    chosen = args(raised[0], "select_n") if raised and value(raised[1]) == 0 else None
    if chosen is None or len(chosen) != 3:
        return None
    which, x, moved = chosen
    negative, summed, count = args(which, "lt"), args(moved, "add"), int(value(op.args[1])) + 1
    if negative is None or negative[0] != x or value(negative[1]) != 0 or summed is None or summed[0] != x:
        return None
    return (x, count) if value(summed[1]) == count else None


def _kind(dtype: str) -> str:
    if dtype not in _KINDS:
        raise Unprintable(f"dtype {dtype}")
    return _KINDS[dtype]


def unprintable(functions: Functions, gradients: Sequence[int] = (), derives: bool = True) -> str | None:
    """What is in the way of evaluating a call's functions; None: nothing."""
    return program.reason(lambda: source(functions, derives=derives, gradients=gradients))
