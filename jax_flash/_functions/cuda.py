"""Score and mask functions as text for the CUDA kernels, which NVRTC compiles into them.

The text defines what csrc/cuda/device/no_functions.cuh defines for calls without functions, by the operations of
csrc/cuda/device/function_operations.cuh.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_flash._functions import folding, program
from jax_flash._functions.program import Load, Op, Program, Unprintable
from jax_flash._functions.trace import Function, Functions

_TYPES = {
    "bool": "bool",
    **{f"int{bits}": "int" for bits in (8, 16, 32)},
    **{f"uint{bits}": "unsigned" for bits in (8, 16, 32)},
    "int64": "long long",
    "uint64": "unsigned long long",
    **{name: "float" for name in ("float16", "bfloat16", "float32")},
}
"""In which a value is computed."""

_STORED = {
    **{"bool": "unsigned char", "int8": "signed char", "uint8": "unsigned char", "int16": "short"},
    **{"uint16": "unsigned short", "float16": "Float16", "bfloat16": "BrainFloat16"},
}
"""In which it is in memory, or what it wraps around as, where that differs."""

_INFIX = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^"}
_INFIX_OF_BOOL = {**_INFIX, "and": "&&", "or": "||"}
"""With & and | the compiler makes integers of comparisons, and needs twice as many instructions."""
_CALLS = {
    **{name: name for name in ("add", "sub", "mul", "div", "rem", "neg", "sign", "floor", "ceil")},
    **{"abs": "absolute", "max": "maximum", "min": "minimum", "tanh": "hyperbolic_tangent", "logistic": "logistic"},
    **{name: f"{name}f" for name in ("exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt")},
    **{name: f"{name}f" for name in ("cbrt", "erf", "erfc", "sinh", "cosh", "asinh", "acosh", "atanh", "pow")},
    **{"sin": "sine", "cos": "cosine", "tan": "tangent"},
    **{"asin": "asinf", "acos": "acosf", "atan": "atanf", "atan2": "atan2f", "floor": "floorf", "ceil": "ceilf"},
    **{name: name for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic")},
    **{"population_count": "population_count", "clz": "leading_zeros", "is_finite": "is_finite"},
}
_LONG = {
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("pow", "log1p", "expm1", "cbrt", "erf", "erfc"),
}
"""Of floats, many instructions each."""
_SLOW = {*_LONG, *("exp", "exp2", "log", "sqrt", "rsqrt", "tanh", "logistic", "div", "rem", "load")}
"""Slower than a load from shared memory."""

_MOST_BEYOND = 512
"""More rows or keys than the last tile has beyond the end."""

_ARGUMENTS = "const Problem& problem, int call, {}int b, int h, Position q, Position kv, Position distance"
_OF_DISTANCE: dict[tuple[str, ...], str] = {
    ("sub", "q", "kv"): "distance",
    ("sub", "kv", "q"): "-distance",
    **{(x, "q", "kv"): f"distance.first {_INFIX[x]} -distance.more" for x in folding.COMPARISONS},
    **{(x, "kv", "q"): f"-distance.more {_INFIX[x]} distance.first" for x in folding.COMPARISONS},
}
"""What is known of the distance, q - kv, which does not overflow where positions are not negative."""


def source(functions: Functions, several: frozenset[int] = frozenset(), derives: bool = False,
           gradients: Sequence[int] = (), positions_from_0: bool = False,
           lengths: Mapping[str, int] = types.MappingProxyType({})) -> str:  # fmt: skip
    """The text of a call's functions.

    Args:
      functions: the call's.
      several: the captured arrays that have a first dimension of the calls that vmap has joined.
      derives: for the backward pass.
      gradients: the captured arrays whose gradients are wanted, in the order of the results.
      positions_from_0: q is never negative.
      lengths: how many rows "q" and keys "kv" there are, where positions count from 0 and that is known.

    Raises:
      Unprintable: a function can't be printed.
    """
    return _source(functions, several, derives, tuple(gradients), positions_from_0, tuple(sorted(lengths.items())))


@functools.lru_cache(maxsize=256)
def _source(
    functions: Functions, several: frozenset[int], derives: bool, gradients: tuple[int, ...], positions_from_0: bool,
    lengths: tuple[tuple[str, int], ...],
) -> str:  # fmt: skip
    sizes = functions.shapes
    text = ["namespace jax_flash {", f"constexpr int function_batch = {functions.batch or 0};"]
    height, width = functions.block_size
    text.append(f"constexpr int mask_block_rows = {height}, mask_block_keys = {width};")
    flags = {
        "has_functions": True,
        "captures_arrays": bool(sizes),
        "has_score_function": functions.score is not None,
        "has_mask_function": bool(functions.masks),
        "has_partial_mask": functions.partial_mask is not None,
    }
    scored = None
    if functions.score is not None:
        scored = program.score_program(functions.score, gradients, derives, positions_from_0)
    flags["derives_scores"] = scored is not None and derives and scored.keeps_derivative
    masks = {"mask_function": functions.masks, "partial_mask": (functions.partial_mask,)}
    decided = {
        name: [program.mask_program(mask, positions_from_0) for mask in of if mask is not None]
        for name, of in masks.items()
    }
    of_pairs = set() if scored is None else _names_of_pairs(scored.program)
    flags["has_long_score"] = not of_pairs.isdisjoint(_LONG)
    diagonal = None if scored is None or not positions_from_0 else _diagonal_value(scored.program)
    flags["has_diagonal_value"] = diagonal is not None
    if scored is not None and diagonal is not None:
        of_pairs = _names_of_pairs(scored.program, [diagonal])
    flags["loads_pairs"] = "load" in of_pairs.union(*map(_names_of_pairs, itertools.chain(*decided.values())))
    flags["adds_captured"] = scored is not None and bool(scored.loads)
    flags["captured_take_score"] = scored is not None and scored.takes_score
    # Where they do, the kernels evaluate the function again, for its derivative by the score too.
    flags["derives_scores"] |= flags["captured_take_score"]
    text += [f"constexpr bool {name} = {str(flag).lower()};" for name, flag in flags.items()]
    shared = _shared(scored, positions_from_0)
    text += [f"constexpr int captured_of_{name}s = {len(loads)};" for name, loads in shared.items()]
    tables = _tables(scored, shared, sizes)
    text.append(f"constexpr int captured_of_tables = {sum(table.elements for table in tables.values())};")

    def printer(of: Program) -> _Printer:
        return _Printer(of, sizes, several, positions_from_0, dict(lengths))

    text += _score(scored, diagonal, flags["derives_scores"], printer)
    for name, found in decided.items():
        text.append(f"JAX_FLASH_FUNCTION bool {name}({_ARGUMENTS.format('')}) {{")
        results = []
        for i, of in enumerate(found):
            lines, names = printer(of).lines(of.outputs, prefix=f"m{i}_")
            text += lines
            results.append(names[of.outputs[0]])
        text += [f"  return {' && '.join(results) or 'true'};", "}"]
    text += _additions(scored, shared, tables, printer, gradients)
    text += ["}  // namespace jax_flash", ""]
    return "\n".join(text)


def _names_of_pairs(of: Program, given: Sequence[int] = ()) -> set[str]:
    """Which operations a function's value takes for every pair, rather than for a row or a key."""
    return {
        of.ops[i].name
        for i in of.needed(of.outputs[:1], given)
        if "score" in of.dependencies[i] or {"q", "kv"} <= of.dependencies[i]
    }


def _diagonal_value(of: Program) -> int | None:
    """The one value that a score takes of h and q - kv alone, if that repays a place in memory."""
    own = [{"distance"} <= inputs <= {"b", "h", "distance"} for inputs in of.dependencies_by_distance]
    score = of.outputs[0]
    taken = {i for user in of.needed([score]) if not own[user] for i in of.ops[user].args if own[i]}
    if len(taken) != 1:
        return None
    (value,) = taken
    slow = any(of.ops[i].name in _SLOW for i in of.needed([value]) if own[i])
    return value if slow and _type(of.ops[value].dtype) in ("float", "int", "unsigned") else None


def _score(
    scored: program.ScoreProgram | None, diagonal: int | None, derives: bool, printer: Callable[[Program], _Printer]
) -> list[str]:
    """The score function; and what it takes of a diagonal, with the function of that."""
    arguments = _ARGUMENTS.format("float score, ")
    own = None if scored is None else printer(scored.program)
    text = []

    def function(name: str, more: str, given: dict[int, str]) -> None:
        text.append(f"JAX_FLASH_FUNCTION float {name}({arguments}, {more}float& derivative) {{")
        if scored is None or own is None:
            text.extend(["  return score;", "}"])
            return
        value, derivative = scored.program.outputs[:2]
        lines, names = own.lines([value, derivative] if derives else [value], given=given)
        text.extend(lines)
        if derives:
            text.append(f"  derivative = {names[derivative]};")
        text.extend([f"  return {names[value]};", "}"])

    function("score_function", "", {})
    of_diagonal = "float"
    lines, returned = list[str](), "0.f"
    if own is not None and diagonal is not None:
        of_diagonal = _type(own.of.ops[diagonal].dtype)
        lines, names = own.lines([diagonal])
        returned = names[diagonal]
    text.append(f"using DiagonalValue = {of_diagonal};")
    text.append("JAX_FLASH_FUNCTION DiagonalValue diagonal_value(")
    text.append("    const Problem& problem, int call, int b, int h, Position distance) {")
    text += [*lines, f"  return {returned};", "}"]
    function("score_of_diagonal", "DiagonalValue value, ", {} if diagonal is None else {diagonal: "value"})
    return text


_MOST_SHARED = {"head": 8, "key": 2, "row": 4, "diagonal": 2}
"""Sums that a thread keeps in registers, two of each for keys, four for diagonals. Elements beyond these are added to
pair by pair."""


def _shared(scored: program.ScoreProgram | None, positions_from_0: bool) -> dict[str, list[Load]]:
    """The elements with gradients that all pairs of a head, a key, a row or a diagonal read. With an offset positions
    may saturate, and then the pairs of a diagonal differ in q - kv."""
    found: dict[str, list[Load]] = {name: [] for name in _MOST_SHARED}
    if scored is not None:
        for load in scored.loads:
            place = scored.readers(load)
            if place == "diagonal" and not positions_from_0:
                continue
            if place in found and len(found[place]) < _MOST_SHARED[place]:
                found[place].append(load)
    return found


_MOST_OF_TABLES = 32
"""Sums that a thread keeps in memory of its own."""


@dataclasses.dataclass(frozen=True)
class _Table:
    """A small table that the pairs of a head choose an element from: a thread's sums of these are from ``first`` on.
    ``sizes`` has, for each dimension, None where all pairs of a head have one index."""

    first: int
    sizes: tuple[int | None, ...]

    @property
    def elements(self) -> int:
        return math.prod(size for size in self.sizes if size is not None)

    def place(self, index: Sequence[str]) -> str:
        """Which of the thread's sums belongs to an element."""
        text = ""
        for size, name in zip(self.sizes, index, strict=True):
            if size is not None:
                text = f"({text}) * {size} + static_cast<int>({name})" if text else f"static_cast<int>({name})"
        return f"{self.first} + {text or '0'}"

    def of_head(self, index: Sequence[int]) -> list[int]:
        """The indices that all pairs of a head have in common."""
        return [i for i, size in zip(index, self.sizes, strict=True) if size is None]

    def index(self, place: str, of_head: Sequence[str]) -> list[str]:
        """The element whose sum has this place; ``of_head`` are the other indices."""
        others, found, stride = iter(of_head), list[str](), self.elements
        for size in self.sizes:
            if size is None:
                found.append(next(others))
            else:
                stride //= size
                found.append(f"({place} - {self.first}) / {stride} % {size}")
        return found


def _tables(
    scored: program.ScoreProgram | None, shared: dict[str, list[Load]], sizes: dict[int, tuple[int, ...]]
) -> dict[Load, _Table]:
    """The tables of which a thread sums up its pairs, or its sums of rows and of diagonals, of which many may be of one
    element. Those of a key or a head are few."""
    found: dict[Load, _Table] = {}
    if scored is None:
        return found
    of, dependencies = scored.program.outputs, scored.program.dependencies
    first = 0
    for load in scored.loads:
        if load in shared["head"] or load in shared["key"]:
            continue
        own = [
            None if dependencies[of[i]] <= {"b", "h"} else size
            for i, size in zip(load.index, sizes[load.captured], strict=True)
        ]
        table = _Table(first, tuple(own))
        if first + table.elements <= _MOST_OF_TABLES:
            found[load] = table
            first += table.elements
    return found


def _additions(
    scored: program.ScoreProgram | None,
    shared: dict[str, list[Load]],
    tables: dict[Load, _Table],
    printer: Callable[[Program], _Printer],
    gradients: Sequence[int],
) -> list[str]:
    """The functions that add to gradients of captured arrays: those of a pair, and sums of a head, a key, a row, a
    diagonal or an element of a table."""
    sums = {load: f"of_{name}[{i}]" for name, loads in shared.items() for i, load in enumerate(loads)}
    arguments = _ARGUMENTS.format("float score, ") + ", float ds"
    arguments += "".join(f", float* of_{name}" for name in (*shared, "tables")) + ", int table_stride"
    text = [f"JAX_FLASH_FUNCTION void add_to_captured({arguments}) {{"]

    def added(load: Load, names: Callable[[int], str], own: _Printer, addend: str) -> str:
        index = own.offset(load.captured, [names(i) for i in load.index])
        return f"add_to(problem.dcaptured[{gradients.index(load.captured)}], {index}, {addend});"

    def of_table(load: Load, names: Callable[[int], str]) -> str:
        return f"of_tables[({tables[load].place([names(i) for i in load.index])}) * table_stride]"

    def defined(loads: Sequence[Load], outputs: Callable[[Load], Sequence[int]]) -> tuple[Callable[[int], str], Any]:
        """Definitions of these outputs; what gives the name of one, and the printer."""
        assert scored is not None
        of, own = scored.program.outputs, printer(scored.program)
        lines, names = own.lines([of[i] for load in loads for i in outputs(load)])
        text.extend(lines)
        return lambda i: names[of[i]], own

    if scored is not None and scored.loads:
        names, own = defined(
            scored.loads,
            lambda load: (
                load.derivative,
                *(() if load in sums else load.index),
                *(() if load.valid is None else [load.valid]),
            ),
        )
        for load in scored.loads:
            # Where ds is 0, as where the pair is dropped, the derivative may be anything. Sums have no branch for that,
            # so that what they read of a row or a key alone is read once for its pairs.
            valid = None if load.valid is None else names(load.valid)
            there = " && ".join(x for x in ("ds != 0.f", valid) if x)
            addend = f"ds * {names(load.derivative)}"
            if load in tables and load not in sums:
                sums[load] = of_table(load, names)
            if load not in sums:
                text.append(f"  if ({there}) {added(load, names, own, addend)}")
            elif _most(own.of, own.of.outputs[load.derivative]) < math.inf:
                text.append(f"  {sums[load]} += {addend if valid is None else f'{valid} ? {addend} : 0.f'};")
            else:
                text.append(f"  {sums[load]} += {there} ? {addend} : 0.f;")
    text.append("}")
    for name, loads in shared.items():
        text.append(f"JAX_FLASH_FUNCTION void add_sums_of_{name}({_ARGUMENTS.format('')}, const float* sums,")
        text.append("    float* of_tables, int table_stride) {")
        if loads:
            names, own = defined(loads, lambda load: load.index)
        for i, load in enumerate(loads):
            if load in tables:
                text.append(f"  {of_table(load, names)} += sums[{i}];")
            else:
                text.append(f"  if (sums[{i}] != 0.f) {added(load, names, own, f'sums[{i}]')}")
        text.append("}")
    text.append(f"JAX_FLASH_FUNCTION void add_sum_of_table({_ARGUMENTS.format('')}, int place, float sum) {{")
    if tables:
        names, own = defined(list(tables), lambda load: tables[load].of_head(load.index))
    for load, table in tables.items():
        index = table.index("place", [names(i) for i in table.of_head(load.index)])
        there = f"place >= {table.first} && place < {table.first + table.elements}"
        gradient = gradients.index(load.captured)
        text.append(f"  if ({there}) add_to(problem.dcaptured[{gradient}], {own.offset(load.captured, index)}, sum);")
    text.append("}")
    return text


class _Printer:
    def __init__(
        self,
        of: Program,
        sizes: dict[int, tuple[int, ...]],
        several: frozenset[int],
        positions_from_0: bool,
        lengths: Mapping[str, int],
    ) -> None:
        self.of, self.sizes, self.several, self.lengths = of, sizes, several, lengths
        self.of_distance: dict[tuple[str, ...], str] = _OF_DISTANCE if positions_from_0 else {}

    def lines(
        self, wanted: Sequence[int], prefix: str = "v", given: Mapping[int, str] = types.MappingProxyType({})
    ) -> tuple[list[str], dict[int, str]]:
        """Definitions of values and what these depend on, beyond those that are given by name; and for each operation
        its name or literal."""
        names = dict(given)
        found = []
        for i in self.of.needed(wanted, given):
            op = self.of.ops[i]
            if op.name == "constant":
                names[i] = literal(op.params, op.dtype)
            elif op.name == "input":
                names[i] = op.params
            else:
                names[i] = f"{prefix}{i}"
                found.append(f"  const {_type(op.dtype)} {names[i]} = {self.expression(op, names)};")
        return found, names

    def offset(self, captured: int, index: Sequence[str]) -> str:
        sizes = self.sizes[captured]
        size = int(np.prod(sizes, dtype=np.int64))
        wide = size > np.iinfo(np.int32).max
        text = ""
        for name, n in zip(index, sizes, strict=True):
            own = f"static_cast<long long>({name})" if wide else f"static_cast<int>({name})"
            text = own if not text else f"({text}) * {n} + {own}"
        text = text or "0"
        return f"static_cast<long long>(call) * {size} + {text}" if captured in self.several else text

    def last_position(self, load: Op) -> str | None:
        """The position, "q" or "kv", that the last index of a load is, kept below the array's size; None: another."""
        if not load.args:
            return None
        size, last = self.sizes[load.params][-1], self.of.ops[load.args[-1]]
        if last.name != "min":
            return None
        position, most = (self.of.ops[i] for i in last.args)
        if (position.name, most.name, most.params) != ("input", "constant", size - 1):
            return None
        return str(position.params) if position.params in ("q", "kv") else None

    def expression(self, op: Op, names: dict[int, str]) -> str:
        args = [names[i] for i in op.args]
        if (op.name, *args) in self.of_distance:
            return self.of_distance[op.name, *args]
        if op.name == "load":
            types = f"{_type(op.dtype)}, {_STORED.get(op.dtype, _type(op.dtype))}"
            array = f"problem.captured[{op.params}]"
            position = self.last_position(op)
            if position is not None:
                row, size = self.offset(op.params, [*args[:-1], "0"]), self.sizes[op.params][-1]
                length = self.lengths.get(position, size + 1)
                if length <= size:  # One text for all lengths of which no tile ends beyond the array.
                    length = max(length, size - _MOST_BEYOND)
                tile = {"q": "block_q", "kv": "block_kv"}[position]
                # Elements of keys 2 i and 2 i + 1 that lie side by side, from an even one on: two of four bytes take a
                # pair of registers, and spill.
                by_two = position == "kv" and size % 2 == 0 and np.dtype(op.dtype).itemsize <= 2
                name = "load_of_key" if by_two else "load_of_position"
                return f"{name}<{types}, {size}, visited<{length}, {tile}>>({array}, {row}, {position})"
            return f"load<{types}>({array}, {self.offset(op.params, args)})"
        of = self.of.ops[op.args[-1]].dtype
        if op.name == "select_n":
            no, yes = (f"static_cast<int>({x})" if x in ("q", "kv") else x for x in args[1:])
            return f"{args[0]} ? {yes} : {no}"
        if op.name in _INFIX:
            return f"{args[0]} {(_INFIX_OF_BOOL if of == 'bool' else _INFIX)[op.name]} {args[1]}"
        if op.name == "not":
            return f"!{args[0]}" if op.dtype == "bool" else _wrapped(f"~{args[0]}", op.dtype)
        if op.name == "convert_element_type":
            return _converted(args[0], of, op.dtype)
        if op.name == "round":
            return _wrapped(f"{'roundf' if op.params == 0 else 'rintf'}({args[0]})", op.dtype)
        if op.name not in _CALLS:
            raise Unprintable(f"primitive {op.name}")
        if op.name in ("population_count", "clz") and of not in ("int32", "uint32"):
            raise Unprintable(f"primitive {op.name} of {of}")
        return _wrapped(f"{_CALLS[op.name]}({', '.join(args)})", op.dtype)


def _most(of: Program, i: int) -> float:
    """What an operation's value does not exceed in size, whatever the inputs are; infinite where nothing is known, or
    what it is made of may overflow or be NaN."""
    op = of.ops[i]
    most = math.inf
    if op.name == "constant" and "float" in op.dtype and np.isfinite(op.params):
        most = abs(float(op.params))
    elif op.dtype == "float32":
        args = [_most(of, arg) for arg in op.args]
        if op.name == "convert_element_type" and of.ops[op.args[0]].dtype in ("bool", "int32", "uint32"):
            most = 2.0**32
        elif op.name in ("neg", "abs"):
            most = args[0]
        elif op.name in ("add", "sub"):
            most = sum(args)
        elif op.name == "mul" and math.inf not in args:
            most = args[0] * args[1]
    return most if most < 2.0**127 else math.inf


def _type(dtype: str) -> str:
    if dtype not in _TYPES:
        raise Unprintable(f"dtype {dtype}")
    return _TYPES[dtype]


def _wrapped(text: str, dtype: str) -> str:
    """``text``, a value, as one of the narrower dtype for which it is computed in a wider type."""
    if dtype in ("float16", "bfloat16"):
        return f"rounded<{_STORED[dtype]}>({text})"
    if dtype in ("int8", "int16", "uint8", "uint16"):
        return f"static_cast<{_STORED[dtype]}>({text})"
    return text


def _converted(x: str, before: str, after: str) -> str:
    if after == "bool":
        return f"{x} != 0"
    if "float" in before and "int" in after:
        if after not in ("int32", "uint32"):
            raise Unprintable(f"a conversion of {before} to {after}")
        return f"to_{_type(after)}({x})"
    return _wrapped(f"static_cast<{_type(after)}>({x})", after)


def literal(x: object, dtype: str) -> str:
    if dtype == "bool":
        return "true" if x else "false"
    if "float" in dtype:
        value = float(x)  # type: ignore[arg-type]
        if np.isnan(value):
            return "__int_as_float(0x7fffffff)"
        if np.isinf(value):
            return f"__int_as_float({'0x7f800000' if value > 0 else '0xff800000'})"
        text = f"{value.hex()}f"
    else:
        number = int(x)  # type: ignore[call-overload]
        suffix = {"int64": "ll", "uint64": "ull"}.get(dtype, "u" if dtype.startswith("u") else "")
        if number == np.iinfo(np.int32).min or number == np.iinfo(np.int64).min:
            return f"({number + 1}{suffix} - 1)"
        text = f"{number}{suffix}"
    return f"({text})" if text.startswith("-") else text


def unprintable(functions: Functions, gradients: Sequence[int] = (), derives: bool = True) -> str | None:
    """What is in the way of printing a call's functions; None: nothing."""
    return program.reason(lambda: source(functions, derives=derives, gradients=gradients))


__all__ = ["Function", "literal", "source", "unprintable"]
