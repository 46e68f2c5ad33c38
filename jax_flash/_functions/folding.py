"""Simplifications of a program's operations: constants, ranges of integers, and the forms of Python's // and %."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jax_flash._functions.program import Builder, Op

COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                "ge": np.greater_equal}  # fmt: skip
_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "max": max,
    "min": min,
    "div": lambda x, y: -1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1),
    "rem": lambda x, y: x if y == 0 else abs(x) % abs(y) * (-1 if x < 0 else 1),
    "square": lambda x: x * x,
}
_FLOATS: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "rem": np.fmod},
    **{"neg": np.negative, "abs": np.abs, "sign": np.sign, "max": np.maximum, "min": np.minimum, "sqrt": np.sqrt},
    **{"exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh},
    **{"sin": np.sin, "cos": np.cos, "floor": np.floor, "ceil": np.ceil, "pow": np.power, "square": np.square},
}
ELEMENTWISE = {
    *COMPARISONS, *_INTEGERS, *_FLOATS,
    *("and", "or", "xor", "not", "select_n", "clamp", "convert_element_type", "integer_pow", "logistic", "rsqrt"),
    *("cbrt", "round", "is_finite", "erf", "erfc", "atan2", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh"),
    *("one_minus_square", "log2"),  # jax 0.11 has them
    *("acosh", "atanh", "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz"),
}  # fmt: skip
"""Primitives that work element by element."""


def parameters(name: str, params: Any, lowering: Any) -> Any:
    """What of an elementwise primitive's parameters its operation depends on."""
    if name == "integer_pow":
        return int(params["y"])
    if name == "round":
        return int(params["rounding_method"])
    return None


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def is_float(dtype: str) -> bool:
    return "float" in dtype


def limits(dtype: str) -> tuple[int, int]:
    if dtype == "bool":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def range_of(builder: Builder, op: Op) -> tuple[int, int] | None:
    """The smallest and largest value of an integer; None for other dtypes."""
    if not is_integer(op.dtype):
        return None
    least, most = limits(op.dtype)
    if op.name == "constant":
        return int(op.params), int(op.params)
    if op.name == "input":
        return builder.least.get(op.params, least), builder.most.get(op.params, most)
    found = _range_of_args(op, [(0, 1) if builder.ops[i].dtype == "bool" else builder.ranges[i] for i in op.args])
    if found is None or found[0] < least or found[1] > most:  # it may wrap around
        return least, most
    return found


def _range_of_args(op: Op, args: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    if op.name == "select_n":
        args = args[1:]
        if all(args):
            return min(x[0] for x in args if x), max(x[1] for x in args if x)
        return None
    known = [x for x in args if x is not None]
    if len(known) != len(args):
        return None
    if op.name == "convert_element_type":
        return known[0]
    if op.name in ("add", "sub", "mul", "max", "min"):
        f = _INTEGERS[op.name]
        corners = [f(x, y) for x in known[0] for y in known[1]]
        return min(corners), max(corners)
    if op.name == "sign":
        return int(known[0][0] > 0) - int(known[0][0] < 0), int(known[0][1] > 0) - int(known[0][1] < 0)
    if op.name == "neg":
        return -known[0][1], -known[0][0]
    if op.name == "abs":
        low, high = known[0]
        return (low, high) if low >= 0 else (0, max(-low, high))
    if op.name in ("div", "rem") and known[1][0] == known[1][1] and known[1][0] > 0:
        (low, high), by = known[0], known[1][0]
        if op.name == "div":
            return _INTEGERS["div"](low, by), _INTEGERS["div"](high, by)
        return (0 if low >= 0 else max(low, 1 - by)), (0 if high <= 0 else min(high, by - 1))
    if op.name == "and" and max(known[0][0], known[1][0]) >= 0:
        return 0, min(most for least, most in known if least >= 0)
    if op.name == "shift_right_logical" and known[0][0] >= 0 and 0 <= known[1][0] == known[1][1] < 64:
        return known[0][0] >> known[1][0], known[0][1] >> known[1][0]
    return None


def simplified(builder: Builder, name: str, dtype: str, args: tuple[int, ...], params: Any) -> int | None:
    """The number of an operation that is already there, or a simpler one, of the same value; None if there is none."""
    of_args = builder.ops[args[-1]].dtype
    values = [builder.value(i) for i in args]
    if name == "add_any":
        name = "add"
        if is_float(dtype):
            for zero, other in ((0, 1), (1, 0)):
                if values[zero] is not None and values[zero] == 0:
                    return args[other]
        return builder.apply(name, dtype, args)
    if name == "select_n":
        return _selected(builder, dtype, args, values)
    if name == "clamp":
        low = builder.apply("max", dtype, (args[0], args[1]))
        return builder.apply("min", dtype, (low, args[2]))
    if name == "convert_element_type":
        of = builder.ops[args[0]]
        if of.dtype == dtype:
            return args[0]
        # With jax_enable_x64 Python's numbers are 64 bits wide until they meet others; CPU kernels have no such.
        if of.name == "select_n" and all(builder.value(case) is not None for case in of.args[1:]):
            cases = [builder.apply(name, dtype, (case,)) for case in of.args[1:]]
            return builder.apply("select_n", dtype, (of.args[0], *cases))
    if all(v is not None for v in values):
        found = _constant(name, dtype, of_args, values, params)
        if found is not None:
            return builder.constant(found, dtype)
    if name == "integer_pow":
        return _power(builder, dtype, args[0], params)
    if name == "square":
        return builder.apply("mul", dtype, (args[0], args[0]))
    if name == "one_minus_square":  # 1 - x^2, of tanh's derivative
        square = builder.apply("mul", dtype, (args[0], args[0]))
        return builder.apply("sub", dtype, (builder.constant(1, dtype), square))
    if name == "log2":
        return builder.apply("mul", dtype, (builder.apply("log", dtype, args), builder.constant(1 / np.log(2), dtype)))
    if name in COMPARISONS:
        return _compared(builder, name, args)
    if name == "not" and dtype == "bool" and builder.ops[args[0]].name == "not":
        return builder.ops[args[0]].args[0]
    if name in ("and", "or", "xor"):
        return _joined(builder, name, dtype, args, values)
    if is_integer(dtype):
        return _integer(builder, name, dtype, args, values)
    if is_float(dtype) and len(args) == 2:
        if values[1] is not None and values[1] == 1 and name in ("mul", "div"):
            return args[0]
        if values[0] is not None and values[0] == 1 and name == "mul":
            return args[1]
        if name == "max" or name == "min":
            return args[0] if args[0] == args[1] else None
        if name == "div" and dtype == "float32" and values[1] is not None:  # XLA multiplies as well
            with np.errstate(all="ignore"):
                inverse = np.float32(1) / np.float32(values[1])
            if np.isfinite(inverse) and abs(inverse) >= np.finfo(np.float32).tiny:
                return builder.apply("mul", dtype, (args[0], builder.constant(inverse, dtype)))
    return None


def _constant(name: str, dtype: str, of_args: str, values: Sequence[Any], params: Any) -> Any:
    with np.errstate(all="ignore"):
        if name == "convert_element_type":
            if is_float(of_args) and is_integer(dtype):
                x = float(values[0])
                low, high = limits(dtype)
                return 0 if np.isnan(x) else low if x <= low else high if x >= high else int(x)
            return np.asarray(values[0]).astype(dtype)
        if name in COMPARISONS:
            return COMPARISONS[name](*values)
        if name in ("and", "or", "xor", "not"):
            f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[name]
            return f(*values)
        if is_integer(dtype) and name in _INTEGERS:
            found = _INTEGERS[name](*(int(v) for v in values))
            bits = 8 * np.dtype(dtype).itemsize
            found &= (1 << bits) - 1
            return found - (1 << bits) if not dtype.startswith("u") and found >> (bits - 1) else found
        if dtype == "float32" and name in _FLOATS:
            return np.float32(_FLOATS[name](*values))
    return None


def _selected(builder: Builder, dtype: str, args: tuple[int, ...], values: Sequence[Any]) -> int | None:
    which, *cases = args
    if values[0] is not None:
        return cases[min(max(int(values[0]), 0), len(cases) - 1)]
    if all(case == cases[0] for case in cases):
        return cases[0]
    if builder.ops[which].dtype != "bool":
        found = cases[-1]  # a number beyond the last is the last
        for i in reversed(range(len(cases) - 1)):
            here = builder.apply("le", "bool", (which, builder.constant(i, builder.ops[which].dtype)))
            found = builder.apply("select_n", dtype, (here, found, cases[i]))
        return found
    if dtype == "bool" and values[1] is not None and values[2] is not None:
        return which if values[2] else builder.apply("not", "bool", (which,))
    if is_integer(dtype):
        return _floored_by_bits(builder, dtype, builder.ops[which], *cases)
    return None


def _floored_by_bits(builder: Builder, dtype: str, which: Op, quotient: int, moved: int) -> int | None:
    """x // n or x % n of an integer of any sign, n a power of two: what the division gives, or if its remainder is
    negative, 1 less or n more."""
    of_rest, of_moved, of_found = (builder.ops[i] for i in (which.args[0], moved, quotient))
    if which.name != "lt" or builder.value(which.args[1]) != 0 or of_rest.name != "rem":
        return None
    by, by_value = of_rest.args[1], builder.value(of_rest.args[1])
    if by_value is None or by_value <= 0 or by_value & (by_value - 1) or of_found.args != of_rest.args:
        return None
    x, by_value = of_rest.args[0], int(by_value)
    if of_found.name == "rem" and of_moved.name == "add" and of_moved.args in ((quotient, by), (by, quotient)):
        return builder.apply("and", dtype, (x, builder.constant(by_value - 1, dtype)))
    subtracts = of_moved.name == "sub" and of_moved.args[0] == quotient and builder.value(of_moved.args[1]) == 1
    if of_found.name == "div" and subtracts:
        bits = builder.constant(by_value.bit_length() - 1, dtype)
        return builder.apply("shift_right_arithmetic", dtype, (x, bits))
    return None


def _power(builder: Builder, dtype: str, x: int, n: int) -> int:
    if n < 0:
        one = builder.constant(1, dtype)
        return builder.apply("div", dtype, (one, _power(builder, dtype, x, -n)))
    result, base = builder.constant(1, dtype), x
    found: int | None = None
    while n:
        if n & 1:
            found = base if found is None else builder.apply("mul", dtype, (found, base))
        n >>= 1
        if n:
            base = builder.apply("mul", dtype, (base, base))
    return result if found is None else found


def _compared(builder: Builder, name: str, args: tuple[int, ...]) -> int | None:
    (x, y), dtype = args, builder.ops[args[0]].dtype
    if dtype == "bool" and name in ("eq", "ne"):
        for value, other in ((builder.value(y), x), (builder.value(x), y)):
            if value is not None:
                return other if bool(value) == (name == "eq") else builder.apply("not", "bool", (other,))
    of_x, of_y = builder.ranges[x], builder.ranges[y]
    if of_x is None or of_y is None:
        return None
    if x == y:
        return builder.constant(name in ("eq", "le", "ge"), "bool")
    below, above = of_x[1] < of_y[0], of_x[0] > of_y[1]  # always
    at_most, at_least = of_x[1] <= of_y[0], of_x[0] >= of_y[1]
    true, false = {
        "lt": (below, at_least),
        "le": (at_most, above),
        "gt": (above, at_most),
        "ge": (at_least, below),
        "eq": (False, below or above),
        "ne": (below or above, False),
    }[name]
    if true or false:
        return builder.constant(true, "bool")
    if name in ("lt", "le") and builder.ops[x].name == "abs" and dtype == "int32" and of_y[0] == of_y[1]:
        return _within(builder, builder.ops[x].args[0], of_y[0] - (name == "lt"))
    return None


def _within(builder: Builder, x: int, most: int) -> int | None:
    """|x| <= most of an int32 by one sum and one comparison: x + most, which may wrap around, as an unsigned number."""
    of_x = builder.ranges[x]
    assert of_x is not None
    if of_x[0] == limits("int32")[0]:  # whose absolute value is itself
        return None
    moved = builder.apply("add", "int32", (x, builder.constant(most, "int32")))
    unsigned = builder.apply("convert_element_type", "uint32", (moved,))
    return builder.apply("le", "bool", (unsigned, builder.constant(2 * most, "uint32")))


def _joined(builder: Builder, name: str, dtype: str, args: tuple[int, ...], values: Sequence[Any]) -> int | None:
    x, y = args
    if x == y and name != "xor":
        return x
    if dtype != "bool":
        return None
    for value, other in ((values[0], y), (values[1], x)):
        if value is None:
            continue
        if name == "xor":
            return builder.apply("not", "bool", (other,)) if value else other
        return other if bool(value) == (name == "and") else builder.constant(name == "or", "bool")
    if name == "and":
        for first, second in ((x, y), (y, x)):
            found = _rounds_down(builder, builder.ops[first], builder.ops[second])
            if found is not None:
                return found
    return None


def _rounds_down(builder: Builder, signs: Op, remainder: Op) -> int | None:
    """Whether a remainder by a positive constant is negative, for what // and % test: that it is not 0, and that the
    signs differ, of dividend and divisor or of remainder and divisor."""
    if remainder.name != "ne" or builder.value(remainder.args[1]) != 0:
        return None
    rest = remainder.args[0]
    of_rest = builder.ops[rest]
    zero = remainder.args[1]
    if signs.name == "lt" and signs.args == (rest, zero):
        return builder.numbers[("lt", "bool", (rest, zero), None)]
    if of_rest.name not in ("rem", "and") or signs.name != "ne":  # an "and" is one of _by_bits
        return None
    dividend, divisor = of_rest.args
    by, least = builder.value(divisor), builder.ranges[dividend]
    if by is None or by <= 0 or (of_rest.name == "and" and (least is None or least[0] < 0)):
        return None
    of_dividend = builder.ops[signs.args[0]]
    if of_dividend.name == "sign" and of_dividend.args == (dividend,) and builder.value(signs.args[1]) == 1:
        return builder.apply("lt", "bool", (rest, zero))
    return None


def _integer(builder: Builder, name: str, dtype: str, args: tuple[int, ...], values: Sequence[Any]) -> int | None:
    if name in ("add", "sub") and values[-1] is not None and values[-1] == 0:
        return args[0]
    if name == "add" and values[0] is not None and values[0] == 0:
        return args[1]
    if name in ("mul", "div") and values[-1] is not None and values[-1] == 1:
        return args[0]
    if name == "mul" and values[0] is not None and values[0] == 1:
        return args[1]
    if name in ("max", "min"):
        x, y = (builder.ranges[i] for i in args)
        assert x is not None
        assert y is not None
        if name == "min":
            x, y = (-x[1], -x[0]), (-y[1], -y[0])
        if x[0] >= y[1]:
            return args[0]
        if y[0] >= x[1]:
            return args[1]
    low = builder.ranges[args[0]]
    if low is not None and low[0] >= 0:
        if name == "abs":
            return args[0]
        if name in ("div", "rem") and values[1] is not None:
            return _by_bits(builder, name, dtype, args[0], int(values[1]))
    return None


def _by_bits(builder: Builder, name: str, dtype: str, x: int, by: int) -> int | None:
    """Quotient or remainder of an integer that is not negative, where the divisor is a power of two."""
    if by <= 0 or by & (by - 1):
        return None
    if name == "rem":
        return builder.apply("and", dtype, (x, builder.constant(by - 1, dtype)))
    return builder.apply("shift_right_logical", dtype, (x, builder.constant(by.bit_length() - 1, dtype)))
