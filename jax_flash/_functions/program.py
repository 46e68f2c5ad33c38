"""From a function's jaxpr to a program: the scalar operations that kernels evaluate for each pair.

A program is in single-assignment form. Equal operations are one operation, constants are folded, and what no output
depends on is left out. Arrays that the function captured appear in it as loads of single elements, whose indices are
clamped as JAX clamps them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, use_abstract_mesh

from jax_flash._functions import folding
from jax_flash._functions.trace import Function
from jax_flash._native import private

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
"""Dtypes of a program's values."""

LARGEST = 64
"""Elements of the arrays that a function may compute with, one by one."""


class Unprintable(Exception):
    """A function can't be lowered to a program; the message names the primitive, or what else is in the way."""


def reason(check: Callable[[], object]) -> str | None:
    """Why ``check``, which prints something, fails; None if it does not."""
    try:
        check()
    except Unprintable as error:
        return str(error)
    return None


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation.

    ``name`` is that of the primitive, or "input" (params: its name), "constant" (params: its value) or "load" (params:
    number of the call's captured array; args: an index in range for each of its dimensions).
    """

    name: str
    dtype: str
    args: tuple[int, ...] = ()
    params: Any = None


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations, each of which uses earlier ones, and which of them are the results."""

    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    def constant(self, output: int) -> Any:
        """The value of an output that is constant; None for one that is not."""
        op = self.ops[self.outputs[output]]
        return op.params if op.name == "constant" else None

    def inputs(self, output: int) -> frozenset[str]:
        """The inputs that an output depends on."""
        return self.dependencies[self.outputs[output]]

    def needed(self, wanted: Iterable[int], given: Collection[int] = ()) -> list[int]:
        """The operations that these are and depend on, each behind those that it uses; without those that are
        ``given``, and what only they depend on."""
        used = set(wanted)
        for i in reversed(range(len(self.ops))):
            if i in used and i not in given:
                used.update(self.ops[i].args)
        return sorted(used.difference(given))

    @functools.cached_property
    def dependencies(self) -> tuple[frozenset[str], ...]:
        """For each operation, the inputs that it depends on."""
        return self._dependencies(distances=False)

    @functools.cached_property
    def dependencies_by_distance(self) -> tuple[frozenset[str], ...]:
        """The same with q - kv and kv - q, and comparisons of q with kv, as an input of their own, "distance"."""
        return self._dependencies(distances=True)

    def _dependencies(self, distances: bool) -> tuple[frozenset[str], ...]:
        found: list[frozenset[str]] = []
        for op in self.ops:
            own = frozenset([op.params]) if op.name == "input" else frozenset()
            of = {self.ops[i].params for i in op.args if self.ops[i].name == "input"}
            if distances and op.name in ("sub", *folding.COMPARISONS) and of == {"q", "kv"}:
                found.append(frozenset(["distance"]))
            else:
                found.append(own.union(*(found[i] for i in op.args)))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Load:
    """An element of a captured array that a score function reads: which array, the number of its output in the program
    for its derivative, and its flat index, int32 or int64; ``valid`` tells where it is read at all."""

    captured: int
    derivative: int
    index: tuple[int, ...]
    valid: int | None


@dataclasses.dataclass(frozen=True)
class ScoreProgram:
    """Outputs: the score, its derivative by the score before, then those of `loads`, indices and conditions."""

    program: Program
    loads: tuple[Load, ...]

    @property
    def keeps_derivative(self) -> bool:
        """Whether the derivative by the score differs from 1 anywhere."""
        return bool(self.program.constant(1) != 1)

    @property
    def takes_score(self) -> bool:
        """Whether derivatives by captured arrays depend on the score."""
        return any("score" in self.program.inputs(load.derivative) for load in self.loads)

    def readers(self, load: Load) -> str:
        """Which pairs read one element: those of a "head", a "key", a "row" or, with one q - kv, a "diagonal"; or
        "pair", only single ones."""
        outputs = (*load.index, *(() if load.valid is None else [load.valid]))
        of, dependencies = self.program.outputs, self.program.dependencies_by_distance
        depends = tuple(frozenset().union(*(dependencies[of[i]] for i in outputs)) - {"b", "h"})
        places: dict[tuple[str, ...], str] = {("kv",): "key", ("q",): "row", ("distance",): "diagonal"}
        return places.get(depends, "pair") if depends else "head"


class Builder:
    """Collects operations."""

    def __init__(self, least: dict[str, int], most: dict[str, int]) -> None:
        self.ops: list[Op] = []
        self.numbers: dict[Any, int] = {}
        self.ranges: list[tuple[int, int] | None] = []  # of integers
        self.least, self.most = least, most  # of inputs

    def op(self, name: str, dtype: str, args: Sequence[int] = (), params: Any = None) -> int:
        key = (name, dtype, tuple(args), params if name != "constant" else (params.tobytes(), dtype))
        if key not in self.numbers:
            self.ops.append(Op(name, dtype, tuple(args), params))
            self.ranges.append(folding.range_of(self, self.ops[-1]))
            self.numbers[key] = len(self.ops) - 1
        return self.numbers[key]

    def constant(self, value: Any, dtype: str) -> int:
        return self.op("constant", dtype, (), np.asarray(value).astype(dtype)[()])

    def value(self, i: int) -> Any:
        op = self.ops[i]
        return op.params if op.name == "constant" else None

    def apply(self, name: str, dtype: str, args: Sequence[int], params: Any = None) -> int:
        """An operation, simplified."""
        found = folding.simplified(self, name, dtype, tuple(args), params)
        return self.op(name, dtype, args, params) if found is None else found

    def finished(self, outputs: Sequence[int]) -> Program:
        used = set(outputs)
        for i in reversed(range(len(self.ops))):
            if i in used:
                used.update(self.ops[i].args)
        places = {i: place for place, i in enumerate(sorted(used))}
        ops = (dataclasses.replace(self.ops[i], args=tuple(places[j] for j in self.ops[i].args)) for i in places)
        return Program(tuple(ops), tuple(places[i] for i in outputs))


@dataclasses.dataclass(frozen=True)
class View:
    """Part of a captured array. For each of its dimensions: the index where the part begins, and which dimension of the
    part runs along it, or None."""

    captured: int
    shape: tuple[int, ...]  # of the part
    dtype: str
    sizes: tuple[int, ...]  # of the captured array
    starts: tuple[int, ...]
    along: tuple[int | None, ...]
    steps: tuple[int, ...]
    valid: int | None = None  # elsewhere the elements are `fill`
    fill: int | None = None


# An array of operations, or a View.
Value = Any

_INLINED = {
    **{name: "jaxpr" for name in ("jit", "pjit", "checkpoint", "remat", "remat2", "custom_lin")},
    **{name: "call_jaxpr" for name in ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")},
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
_SAME = (
    "stop_gradient",
    "copy",
    "copy_p",
    "pvary",
    "reshard",
    "sharding_constraint",
    "optimization_barrier",
    "reduce_precision",
    "real",
)


class Lowering:
    """Lowers jaxprs to operations of one builder."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.loads: list[tuple[View, int, int, int | None]] = []  # with their number, index and condition

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        known: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        known |= {x: self.literal(c) for x, c in zip(jaxpr.constvars, consts, strict=True)}

        def read(x: Any) -> Value:
            return self.literal(np.asarray(x.val, x.aval.dtype)) if hasattr(x, "val") else known[x]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(x) for x in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def literal(self, x: Any) -> np.ndarray:
        array = np.asarray(x)
        self.check(array.shape, array.dtype.name)
        found = np.empty(array.shape, object)
        for i in np.ndindex(array.shape):
            found[i] = self.builder.constant(array[i], array.dtype.name)
        return found

    @staticmethod
    def check(shape: Sequence[int], dtype: str) -> None:
        if int(np.prod(shape)) > LARGEST:
            raise Unprintable(f"an array of shape {tuple(shape)}")
        if dtype not in DTYPES:
            raise Unprintable(f"dtype {dtype}")

    def equation(self, equation: Any, args: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name in _INLINED:
            body = params[_INLINED[name]]
            consts = getattr(body, "consts", ())
            return self.jaxpr(getattr(body, "jaxpr", body), consts, args)
        if name in _SAME and len(args) == len(equation.outvars):
            if name == "reduce_precision":
                raise Unprintable(f"primitive {name}")
            return args
        out = equation.outvars[0].aval
        rule: Callable[..., Value] | None = getattr(self, f"lower_{name}", None)
        if rule is not None:
            found = rule(*args, aval=out, params=params)
            if not isinstance(found, View):
                self.check(out.shape, out.dtype.name)
            return [found]
        if name not in folding.ELEMENTWISE:
            raise Unprintable(f"primitive {name}")
        return [self.elementwise(name, out, args, params)]

    def elements(self, x: Value) -> np.ndarray:
        """The elements of a view, loaded; or of what already is an array of operations."""
        if not isinstance(x, View):
            return x
        self.check(x.shape, x.dtype)
        found = np.empty(x.shape, object)
        for place in np.ndindex(x.shape):
            found[place] = self.load(x, place)
        return found

    def load(self, view: View, place: tuple[int, ...]) -> int:
        builder, index = self.builder, []
        for start, along, step in zip(view.starts, view.along, view.steps, strict=True):
            distance = place[along] * step if along is not None else 0
            dtype = builder.ops[start].dtype
            index.append(builder.apply("add", dtype, (start, builder.constant(distance, dtype))))
        loaded = builder.op("load", view.dtype, index, view.captured)
        self.loads.append((view, loaded, loaded, view.valid))
        if view.valid is None or view.fill is None:
            return loaded
        return builder.apply("select_n", view.dtype, (view.valid, view.fill, loaded))

    def elementwise(self, name: str, aval: Any, args: Sequence[Value], params: Any) -> np.ndarray:
        dtype = aval.dtype.name
        self.check(aval.shape, dtype)
        arrays = np.broadcast_arrays(*map(self.elements, args))
        found = np.empty(aval.shape, object)
        for place in np.ndindex(aval.shape):
            found[place] = self.builder.apply(
                name, dtype, [int(x[place]) for x in arrays], folding.parameters(name, params, self)
            )
        return found

    # Parts of arrays

    def clamped(self, index: int, last: int) -> int:
        builder, dtype = self.builder, self.builder.ops[index].dtype
        low = builder.apply("max", dtype, (index, builder.constant(0, dtype)))
        return builder.apply("min", dtype, (low, builder.constant(last, dtype)))

    def lower_dynamic_slice(self, x: Value, *starts: Value, aval: Any, params: Any) -> Value:
        indices = [int(self.elements(s)[()]) for s in starts]
        if not isinstance(x, View):
            begins = self.constants(indices, x.shape, aval.shape)
            return x[tuple(slice(i, i + n) for i, n in zip(begins, aval.shape, strict=True))]
        found = [self.clamped(i, size - n) for i, size, n in zip(indices, x.shape, aval.shape, strict=True)]
        return self.moved(x, found, aval.shape)

    def constants(self, indices: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        values = [self.builder.value(i) for i in indices]
        if any(v is None for v in values):
            raise Unprintable("an index that is computed, into an array that is not captured")
        return [min(max(int(v), 0), n - size) for v, n, size in zip(values, shape, sizes, strict=True)]

    def moved(self, x: View, starts: Sequence[int], shape: Sequence[int]) -> View:
        """The part of ``x`` of this shape that begins at ``starts``."""
        builder, found = self.builder, list(x.starts)
        for place, along in enumerate(x.along):
            if along is None:
                continue
            dtype = builder.ops[starts[along]].dtype
            step = builder.constant(x.steps[place], dtype)
            more = builder.apply("mul", dtype, (starts[along], step))
            base = builder.apply("convert_element_type", dtype, (found[place],))
            found[place] = builder.apply("add", dtype, (base, more))
        return dataclasses.replace(x, starts=tuple(found), shape=tuple(shape))

    def lower_slice(self, x: Value, *, aval: Any, params: Any) -> Value:
        steps = params["strides"] or (1,) * len(aval.shape)
        if not isinstance(x, View):
            bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
            return x[tuple(slice(*b) for b in bounds)]
        found = self.moved(x, [self.builder.constant(i, "int32") for i in params["start_indices"]], aval.shape)
        of_dims = [step if along is None else step * steps[along] for step, along in zip(x.steps, x.along, strict=True)]
        return dataclasses.replace(found, steps=tuple(of_dims))

    def lower_squeeze(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reshaped(x, aval.shape)

    def lower_expand_dims(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reshaped(x, aval.shape)

    def lower_reshape(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reshaped(x, aval.shape)

    def reshaped(self, x: Value, shape: Sequence[int]) -> Value:
        if not isinstance(x, View):
            return x.reshape(shape)
        kept = [i for i, n in enumerate(x.shape) if n != 1]
        places = [i for i, n in enumerate(shape) if n != 1]
        if [x.shape[i] for i in kept] != [shape[i] for i in places]:
            return self.elements(x).reshape(shape)
        new = dict(zip(kept, places, strict=True))
        along = tuple(new.get(a) if a is not None else None for a in x.along)
        return dataclasses.replace(x, shape=tuple(shape), along=along)

    def lower_broadcast_in_dim(self, x: Value, *_: Value, aval: Any, params: Any) -> Value:
        dims = params["broadcast_dimensions"]
        if not isinstance(x, View):
            wide = [1] * len(aval.shape)
            for i, d in enumerate(dims):
                wide[d] = x.shape[i]
            return np.broadcast_to(x.reshape(wide), aval.shape)
        along = tuple(None if a is None or x.shape[a] == 1 else dims[a] for a in x.along)
        return dataclasses.replace(x, shape=tuple(aval.shape), along=along)

    def lower_transpose(self, x: Value, *, aval: Any, params: Any) -> Value:
        order = params["permutation"]
        if not isinstance(x, View):
            return x.transpose(order)
        along = tuple(None if a is None else order.index(a) for a in x.along)
        return dataclasses.replace(x, shape=tuple(aval.shape), along=along)

    def lower_gather(self, x: Value, indices: Value, *, aval: Any, params: Any) -> Value:
        numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], str(params["mode"])
        if numbers.operand_batching_dims or not isinstance(x, View):
            raise Unprintable("primitive gather, of this form")
        indices = self.elements(indices)
        if indices.ndim and indices.size != indices.shape[-1]:
            raise Unprintable("primitive gather, of several places")
        builder, valid = self.builder, x.valid
        found = [builder.constant(0, "int32")] * len(x.shape)
        for index, dim in zip(indices.reshape(-1), numbers.start_index_map, strict=True):
            last = x.shape[dim] - sizes[dim]
            found[dim] = self.clamped(index, last)
            if "FILL" in mode:
                inside = builder.apply("eq", "bool", (index, found[dim]))
                valid = inside if valid is None else builder.apply("and", "bool", (valid, inside))
        part = dataclasses.replace(self.moved(x, found, sizes), valid=valid)
        if valid is not None:
            if builder.value(valid):
                part = dataclasses.replace(part, valid=None)
            elif part.fill is None:
                fill = params["fill_value"]
                if fill is None:
                    kind = np.dtype(x.dtype).kind
                    fill = {"f": np.nan, "V": np.nan, "b": True, "u": -1}.get(kind)
                    fill = np.iinfo(x.dtype).min if fill is None else fill
                part = dataclasses.replace(part, fill=builder.constant(fill, x.dtype))
        collapsed = set(numbers.collapsed_slice_dims)
        if any(sizes[d] != 1 for d in collapsed):
            raise Unprintable("primitive gather, of this form")
        return self.reshaped(part, aval.shape)

    # Small arrays

    def lower_iota(self, *, aval: Any, params: Any) -> Value:
        self.check(aval.shape, aval.dtype.name)
        found = np.empty(aval.shape, object)
        for place in np.ndindex(aval.shape):
            found[place] = self.builder.constant(place[params["dimension"]], aval.dtype.name)
        return found

    def lower_concatenate(self, *xs: Value, aval: Any, params: Any) -> Value:
        self.check(aval.shape, aval.dtype.name)
        return np.concatenate([self.elements(x) for x in xs], axis=params["dimension"])

    def lower_stack(self, *xs: Value, aval: Any, params: Any) -> Value:
        self.check(aval.shape, aval.dtype.name)
        return np.stack([self.elements(x) for x in xs], axis=params.get("axis", 0))

    def lower_rev(self, x: Value, *, aval: Any, params: Any) -> Value:
        return np.flip(self.elements(x), params["dimensions"])

    def lower_pad(self, x: Value, fill: Value, *, aval: Any, params: Any) -> Value:
        self.check(aval.shape, aval.dtype.name)
        found = np.full(aval.shape, self.elements(fill)[()], object)
        x = self.elements(x)
        for place in np.ndindex(x.shape):
            to = [low + i * (1 + inner) for i, (low, _, inner) in zip(place, params["padding_config"], strict=True)]
            if all(0 <= i < n for i, n in zip(to, aval.shape, strict=True)):
                found[tuple(to)] = x[place]
        return found

    def reduced(self, name: str, x: Value, aval: Any, params: Any) -> Value:
        dtype, axes = aval.dtype.name, params["axes"]
        x = np.moveaxis(self.elements(x), axes, range(len(axes)))
        x = x.reshape(-1, *aval.shape)
        if not len(x):
            raise Unprintable(f"primitive reduce_{name}, of no elements")
        found = np.empty(aval.shape, object)
        for place in np.ndindex(aval.shape):
            first, *others = (int(x[(i, *place)]) for i in range(len(x)))
            for other in others:
                first = self.builder.apply(name, dtype, (first, other))
            found[place] = first
        return found

    def lower_reduce_sum(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reduced("add", x, aval, params)

    def lower_reduce_max(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reduced("max", x, aval, params)

    def lower_reduce_min(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reduced("min", x, aval, params)

    def lower_reduce_prod(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reduced("mul", x, aval, params)

    def lower_reduce_and(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reduced("and", x, aval, params)

    def lower_reduce_or(self, x: Value, *, aval: Any, params: Any) -> Value:
        return self.reduced("or", x, aval, params)


def _view(builder: Builder, number: int, aval: Any) -> Value:
    dtype = aval.dtype.name
    if dtype not in DTYPES:
        raise Unprintable(f"dtype {dtype} of a captured array")
    if 0 in aval.shape:
        raise Unprintable(f"a captured array of shape {aval.shape}, which has no elements")
    shape, zero = tuple(aval.shape), builder.constant(0, "int32")
    return View(number, shape, dtype, shape, (zero,) * len(shape), tuple(range(len(shape))), (1,) * len(shape))


Most = tuple[tuple[str, int], ...]
"""The largest values of inputs, where they are known."""


def _begun(function: Function, positions_from_0: bool, most: Most) -> tuple[Builder, list[Value]]:
    """A builder, and the function's arguments in it."""
    # Batch entries, heads and keys are counted from 0; so are rows of query, unless q_offset is negative.
    least = {"b": 0, "h": 0, "kv": 0}
    if positions_from_0:
        least["q"] = 0
    builder, count = Builder(least, dict(most)), len(function.captured)
    args: list[Value] = [
        _view(builder, number, x.aval)
        for number, x in zip(function.captured, function.jaxpr.invars[:count], strict=True)
    ]
    names = ("score", "b", "h", "q", "kv") if function.kind == "score" else ("b", "h", "q", "kv")
    for name, x in zip(names, function.jaxpr.invars[count:], strict=True):
        args.append(np.asarray(builder.op("input", x.aval.dtype.name, (), name), object))
    return builder, args


@functools.lru_cache(maxsize=256)
def mask_program(function: Function, positions_from_0: bool = False, most: Most = ()) -> Program:
    """A mask function's program, of one output.

    ``positions_from_0``: q is never negative. ``most``: the program is for inputs up to these.

    Raises:
      Unprintable: it has none.
    """
    builder, args = _begun(function, positions_from_0, most)
    lowering = Lowering(builder)
    (result,) = lowering.jaxpr(function.jaxpr, (), args)
    return builder.finished([int(lowering.elements(result)[()])])


@functools.lru_cache(maxsize=256)
def score_program(
    function: Function,
    gradients: tuple[int, ...] = (),
    derives: bool = True,
    positions_from_0: bool = False,
    most: Most = (),
) -> ScoreProgram:
    """A score function's program: value and, with ``derives``, its derivatives by the score and by each element that it
    reads of the captured arrays ``gradients``.

    Raises:
      Unprintable: it has none.
    """
    builder, args = _begun(function, positions_from_0, most)
    lowering = Lowering(builder)
    jaxpr, count = inlined(function.jaxpr), len(function.captured)
    if not derives:
        (result,) = lowering.jaxpr(jaxpr, (), args)
        one = builder.constant(1, "float32")
        return ScoreProgram(builder.finished([int(lowering.elements(result)[()]), one]), ())

    # The function as one of the score and of what it reads of captured arrays, for JAX to derive.
    parts = _views_of(jaxpr, count)
    read = [x for x in parts.read if np.issubdtype(x.aval.dtype, np.floating) or x.aval.dtype.name == "bfloat16"]
    others = [x for x in parts.read if x not in read]
    found = dict(zip(jaxpr.invars, args, strict=True))
    reading = jaxpr.replace(outvars=[*read, *others])
    loaded = lowering.jaxpr(reading, (), [found[x] for x in jaxpr.invars])
    views = dict(zip(read, loaded, strict=False))
    shapes = [x.aval for x in (*read, *others, *jaxpr.invars[count:])]
    score_at = len(read) + len(others)
    value = private.jaxpr_as_fun(
        private.ClosedJaxpr(jaxpr.replace(invars=[*read, *others, *jaxpr.invars[count:]], eqns=parts.rest), ())
    )

    def joint(*xs: Any) -> Any:
        floats = (xs[score_at], *xs[: len(read)])

        def of_floats(score: Any, *values: Any) -> Any:
            return value(*values, *xs[len(read) : score_at], score, *xs[score_at + 1 :])[0]

        result, pullback = jax.vjp(of_floats, *floats)
        return result, *pullback(jax.numpy.ones_like(result))

    with use_abstract_mesh(AbstractMesh((), ())):  # scalars have no place on the mesh of the call
        closed = jax.make_jaxpr(joint)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes))
    arrays = [lowering.elements(x) for x in loaded]
    results = lowering.jaxpr(closed.jaxpr, closed.consts, [*arrays, *args[count:]])
    outputs = [int(lowering.elements(x)[()]) for x in results[:2]]
    loads: list[Load] = []

    def output(i: int) -> int:
        if i not in outputs[2:]:
            outputs.append(i)
        return outputs.index(i, 2)

    for variable, derivative in zip(read, results[2:], strict=True):
        view = views[variable]
        if not isinstance(view, View) or view.captured not in gradients:
            if isinstance(view, View) or not gradients:
                continue
            raise Unprintable("a gradient of an array that is not read element by element")
        derivative = lowering.elements(derivative)
        for place in np.ndindex(view.shape):
            wanted = int(derivative[place])
            if builder.value(wanted) == 0:
                continue
            number = lowering.load(dataclasses.replace(view, fill=None), place)
            index = tuple(output(i) for i in builder.ops[number].args)
            valid = None if view.valid is None else output(view.valid)
            loads.append(Load(view.captured, output(wanted), index, valid))
    return ScoreProgram(builder.finished(outputs), tuple(loads))


# A function as what it reads of captured arrays and a function of that

_VIEWS = ("dynamic_slice", "slice", "squeeze", "reshape", "broadcast_in_dim", "transpose", "gather", "expand_dims")


@dataclasses.dataclass(frozen=True)
class _Parts:
    read: list[Any]  # variables: parts of captured arrays that the rest computes with
    rest: list[Any]  # equations


def _views_of(jaxpr: Any, count: int) -> _Parts:
    views = set(jaxpr.invars[:count])
    rest, read = [], []

    def use(x: Any) -> None:
        if not hasattr(x, "val") and x in views and x not in read:
            read.append(x)

    for equation in jaxpr.eqns:
        first = next(iter(equation.invars), None)  # iota has none
        if equation.primitive.name in _VIEWS and not hasattr(first, "val") and first in views:
            views.update(equation.outvars)
            for x in equation.invars[1:]:
                use(x)
            continue
        for x in equation.invars:
            use(x)
        rest.append(equation)
    for x in jaxpr.outvars:
        use(x)
    return _Parts(read, rest)


def inlined(jaxpr: Any) -> Any:
    """The jaxpr with the bodies of nested jits in place of their calls; rules of custom derivatives stay."""
    from jax_flash._functions import plain

    return plain.inlined(jaxpr)
