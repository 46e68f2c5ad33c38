"""The schedule "ring": K and V travel around the devices, and partial results join by their lse.

Ring Attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889), in striped order Striped Attention (Brandon et al.
2023, https://arxiv.org/abs/2311.09431).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call.options import Options, positions_matter, with_ranges
from jax_flash._context import choice, squares
from jax_flash._context.call import Arrays, Call, axis_of, by_intervals, of_keys_alone, wide
from jax_flash._context.orders import Shard
from jax_flash._implementations import varying
from jax_flash._native import private
from jax_flash.checkpoint_policies import LSE, OUT

Tree = TypeVar("Tree")
Others = TypeVar("Others")


def attention(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    """out and lse, with a derivative of its own: of the whole softmax, by out and lse of all keys.

    So a backward pass keeps out, lse and this device's shards, and K and V go around again, with dK and dV.
    """
    if call.named == "reference" or private.MISSING is not None:
        return _forward(call, query, key, value, operands)

    @jax.custom_jvp
    def attend(index: jax.Array, *inputs: Any) -> tuple[jax.Array, jax.Array]:
        return _forward(_at(call, index), *inputs)

    @functools.partial(attend.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> Any:
        out, lse = attend(*primals)
        # Named as those of one device are, so that remat policies can keep them.
        out, lse = private.checkpoint_name(out, OUT), private.checkpoint_name(lse, LSE)
        moved = dict(zip(_INPUTS, tangents[1:4], strict=True)) | tangents[4]
        moved = {name: x for name, x in moved.items() if not isinstance(x, jax.custom_derivatives.SymbolicZero)}
        if not moved:
            return (out, lse), (jnp.zeros_like(out), jnp.zeros_like(lse))
        fixed, moved = varying.vary_alike(((*primals, out, lse), moved))
        arrays, tree = jax.tree.flatten(fixed)
        static = _Static(call, tree, tuple(moved))
        return (out, lse), tuple(_tangent_p.bind(*arrays, *moved.values(), static=static))

    return attend(call.index, query, key, value, operands)


def _at(call: Call, index: jax.Array) -> Call:
    """The call with ``index`` for its device's, since rules may be traced where the first one is unknown."""
    rows, keys = (dataclasses.replace(x, index=index) for x in (call.rows, call.keys))
    return dataclasses.replace(call, rows=rows, keys=keys)


def _forward(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, operands: Arrays
) -> tuple[jax.Array, jax.Array]:
    visiting, staying = _visiting(key, value, operands)
    state = None
    steps = _shards_in_reach(call, operands)
    for step in range(steps):
        # Sent before the kernel that hides it, and after the one before that, so that only two shards are in memory.
        if state is not None:
            (visiting, index), state = _after((visiting, call.index), state)
            call = _at(call, index)  # so that no square of a later step is copied earlier
        following = _sent(call, visiting) if step + 1 < steps else visiting
        state = _with_step(call, step, state, query, visiting, staying)
        visiting = following
    assert state is not None
    return state.out.astype(query.dtype), state.lse


def _with_step(
    call: Call, step: int, state: State | None, query: jax.Array, visiting: Visiting, staying: Arrays
) -> State:
    """The softmax over the keys of ``state`` and over those that are here."""
    key, value, travelling = visiting
    operands = staying | travelling

    def attend(options: Options, arrays: Arrays) -> State:
        q, k, v = (arrays.pop(name) for name in _INPUTS)
        out, lse = call.attend(options, None, q, k, v, arrays)
        return State(out.astype(wide(query)), lse)

    inputs = {"query": query, "key": key, "value": value}
    if state is None or not squares.serve(call, operands):
        options, of_step = of_source(call, step, query, operands)
        found = attend(options, inputs | of_step)
        return found if state is None else state.merged(found)
    options, of_step = _of_squares(call, step, operands)
    for square in squares.of_step(call, source_of(call, step).index):
        whole = state._asdict()
        found = State(**square.of(whole)).merged(attend(options, square.of(inputs | of_step)))
        state = State(**square.put(found._asdict(), whole))
    return state


# The tangent is a primitive, so that its transpose, the backward pass, can be written out: what of it may be in memory
# at the same time is decided there.


class _Static(NamedTuple):
    """The parameter of the primitive: its arguments are the leaves of a tree (index, query, key, value, operands, out,
    lse), and the tangents of ``names``."""

    call: Call  # without its index
    tree: Any
    names: tuple[str, ...]

    def split(self, args: Sequence[Any]) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
        count = self.tree.num_leaves
        index, *fixed = self.tree.unflatten(args[:count])
        return _at(self.call, index), tuple(fixed), dict(zip(self.names, args[count:], strict=True))


def _evaluated(*args: jax.Array, static: _Static) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse, linear in those of inputs and operands."""
    from jax_flash import _primitive  # imported here, since jax may lack the names it needs

    call, (query, key, value, operands, out, lse), moved = static.split(args)
    visiting, staying = _visiting(key, value, operands)
    travelling: Arrays = {name: moved[name] for name in _INPUTS[1:] if name in moved}
    totals = jnp.zeros_like(out, wide(query)), jnp.zeros_like(lse)
    steps = _shards_in_reach(call, operands)
    for step in range(steps):
        options, of_step = of_source(call, step, query, staying | visiting[2])
        tangents = {name: moved[name] for name in ("query",) if name in moved} | travelling
        tangents |= _moved_operands(call, step, operands, of_step, moved)
        if tangents:
            arrays = (query, *visiting[:2], out, lse, with_ranges(of_step), tangents)
            options = dataclasses.replace(options, partial_keys=True)
            terms = _primitive.tangent(*varying.vary_alike(arrays), options=options, implementation=call.named)
            totals = totals[0] + terms[0].astype(wide(query)), totals[1] + terms[1]
        if step + 1 < steps:
            visiting, travelling = _sent(call, (visiting, travelling))
    return totals[0].astype(out.dtype), totals[1]


def _gradients(
    call: Call, fixed: tuple[Any, ...], dout: jax.Array, dlse: jax.Array, wanted: Sequence[str]
) -> dict[str, jax.Array]:
    """The gradients of ``wanted`` inputs and operands, in the accumulation dtype.

    The first step is that of the device's own keys. Then K and V go around backwards, and dK and dV with them; the
    last hop brings these home. All others are hidden by a kernel, and begin when the kernel before that has ended: so
    two shards of K and V are in memory at most, the device's own apart. Where a window reaches only some devices, all
    go forwards, as far as it does.
    """
    query, key, value, operands, out, lse = fixed
    visiting, staying = _visiting(key, value, operands)
    sums: Arrays = {}
    functions = call.options.functions
    if "bias" in wanted and operands["bias"].shape[3] == 1 and (functions is None or functions.score is None):
        # It only shifts lse, so its gradient needs no kernel, nor the keys.
        from jax_flash._primitive import derivatives

        wanted = [name for name in wanted if name != "bias"]
        _, rows = of_source(call, 0, query, operands)
        row_sums = derivatives.delta(dout, lse, dlse, out)
        sums["bias"] = derivatives.rows_gradient(rows, lse, row_sums, dlse)
    home: Arrays = {}
    leaving: Arrays = {}  # dK and dV of the keys that were here, which travel while the next kernel runs
    in_reach = _shards_in_reach(call, operands)
    hop = 1 if in_reach < call.devices else -1
    steps = (0, *range(1, in_reach)[::hop])
    for step in steps:
        if step != 0:
            (visiting, index), (sums, home, leaving) = _after((visiting, call.index), (sums, home, leaving))
            call = _at(call, index)
        travelling = _sent(call, leaving, hop)
        following = _sent(call, visiting, hop) if step != steps[-1] else visiting
        arrays = (query, *visiting[:2], out, lse)
        found = _gradients_of_step(call, step, arrays, staying | visiting[2], dout, dlse, wanted, operands)
        of_keys: Arrays = {name: found.pop(name) for name in _INPUTS[1:] if name in found}
        sums |= {name: x + sums[name] if name in sums else x for name, x in found.items()}
        if step == 0:
            home = of_keys
        else:
            leaving = {name: x + travelling[name] if name in travelling else x for name, x in of_keys.items()}
        visiting = following
    arrived = _sent(call, leaving, -steps[-1])
    return sums | {name: x + arrived[name] if name in arrived else x for name, x in home.items()}


def _gradients_of_step(
    call: Call,
    step: int,
    arrays: tuple[jax.Array, ...],
    operands_here: Arrays,
    dout: jax.Array,
    dlse: jax.Array,
    wanted: Sequence[str],
    operands: Arrays,
) -> Arrays:
    from jax_flash import _primitive

    query, key, value, out, lse = arrays
    inputs = {"query": query, "key": key, "value": value, "dout": dout, "lse": lse, "dlse": dlse, "out": out}
    in_squares = step > 0 and squares.serve(call, operands_here)
    if in_squares:
        options, of_step = _of_squares(call, step, operands_here)
    else:
        options, of_step = of_source(call, step, query, operands_here)
    of_old = {old: _names_in_step(call, step, old, operands, of_step) for old in wanted if old not in _INPUTS}
    names = [*(name for name in wanted if name in _INPUTS), *(name for found in of_old.values() for name in found)]
    if not names:
        return {}
    options = dataclasses.replace(options, partial_keys=True)

    def gradients(inputs: Arrays, of_call: Arrays) -> Arrays:
        inputs, of_call = varying.vary_alike((inputs, with_ranges(of_call)))
        found = _primitive.backward(inputs, of_call, names, options=options, implementation=call.named)
        return {name: x.astype(wide(query)) for name, x in found.items()}

    if in_squares:
        whole = inputs | of_step
        found = {name: _zeros(jax.ShapeDtypeStruct(whole[name].shape, wide(query)), dout) for name in names}
        for square in squares.of_step(call, source_of(call, step).index):
            before = square.of(found)
            of_square = gradients(square.of(inputs), square.of(of_step))
            found = square.put({name: before[name] + x for name, x in of_square.items()}, found)
    else:
        found = gradients(inputs, of_step)
    for old, new in of_old.items():
        terms = [found.pop(name) for name in new]
        axis = axis_of(old, operands[old], "s")
        if terms and axis is not None:  # the columns of these keys
            keys = source_of(call, step)
            shape = jax.ShapeDtypeStruct(operands[old].shape, wide(query))
            (whole,) = jax.linear_transpose(lambda x, keys=keys, axis=axis: keys.of(x, axis), _zeros(shape, terms[0]))(
                terms[0]
            )
            terms = [whole]
        if terms:
            found[old] = functools.reduce(jnp.add, terms)
    return found


def _zeros(shape: jax.ShapeDtypeStruct, x: jax.Array) -> Any:
    """Zeros that vary over the mesh axes over which ``x`` does."""
    return varying.vary_alike(jnp.zeros(shape.shape, shape.dtype), x)


def _define() -> Any:
    primitive = private.Primitive("jax_flash_ring_tangent")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(private.apply_primitive, primitive))

    def abstract_eval(*avals: Any, static: _Static) -> list[Any]:
        *_, out, lse = avals[: static.tree.num_leaves]
        return [out, lse]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, static: _Static) -> Any:
        at = [i for i, t in enumerate(tangents) if type(t) is not private.ad.Zero]

        def moved(*args: jax.Array) -> Any:
            every = list(primals)
            for i, x in zip(at, args, strict=True):
                every[i] = x
            return list(_evaluated(*every, static=static))

        return jax.jvp(moved, [primals[i] for i in at], [tangents[i] for i in at])

    def transpose(cotangents: Sequence[Any], *args: Any, static: _Static) -> Any:
        count, zero = static.tree.num_leaves, private.ad.Zero
        call, fixed, linear = static.split(args)
        if all(type(x) is zero for x in cotangents):
            return [None] * count + [zero(x.aval) for x in linear.values()]
        dout, dlse = (
            varying.vary_alike(jnp.zeros_like(like) if type(x) is zero else x, like)
            for x, like in zip(cotangents, fixed[4:], strict=True)
        )
        found = _gradients(call, fixed, dout, dlse, static.names)
        return [None] * count + [
            found[name].astype(x.aval.dtype) if name in found else zero(x.aval) for name, x in linear.items()
        ]

    def batch(args: Sequence[Any], dims: Sequence[Any], *, static: _Static) -> Any:
        # Plain JAX transposes it; checkpointed, so that the shards of other devices are sent again rather than kept.
        evaluated = jax.checkpoint(functools.partial(_evaluated, static=static))
        return list(jax.vmap(evaluated, in_axes=tuple(dims))(*args)), [0, 0]

    primitive.def_abstract_eval(abstract_eval)
    private.ad.primitive_jvps[primitive] = jvp
    private.ad.primitive_transposes[primitive] = transpose
    private.batching.primitive_batchers[primitive] = batch
    private.mlir.register_lowering(primitive, private.mlir.lower_fun(_evaluated, multiple_results=True))
    # The primitives within are partitioned functions, whose lowering needs the devices.
    private.prim_requires_devices_during_lowering.add(primitive)
    return primitive


_tangent_p: Any = _define() if private.MISSING is None else None

_INPUTS = ("query", "key", "value")
Visiting = tuple[jax.Array, jax.Array, Arrays]


def _visiting(key: jax.Array, value: jax.Array, operands: Arrays) -> tuple[Visiting, Arrays]:
    """What travels, and the operands that don't."""
    travelling = {name: x for name, x in operands.items() if of_keys_alone(name)}
    return (key, value, travelling), {name: x for name, x in operands.items() if name not in travelling}


def _moved_operands(call: Call, step: int, operands: Arrays, of_step: Arrays, moved: Arrays) -> Arrays:
    """The tangents of the operands of a step."""
    found: Arrays = {}
    for old, tangent in moved.items():
        if old in _INPUTS:
            continue
        axis = axis_of(old, operands[old], "s")
        here = tangent if axis is None else source_of(call, step).of(tangent, axis)
        found |= dict.fromkeys(_names_in_step(call, step, old, operands, of_step), here)
    return found


def _names_in_step(call: Call, step: int, old: str, operands: Arrays, of_step: Arrays) -> list[str]:
    """By which names an operand of the call is an operand of a step."""
    if axis_of(old, operands[old], "s") is not None:
        return [old]
    # Slopes may have become an array that a function captured.
    return [name for name, x in of_step.items() if x is operands[old]]


def _shards_in_reach(call: Call, operands: Arrays) -> int:
    shifted = call.limits is not None or "q_offset" in operands
    return choice.shards_in_reach(
        call.rows.order, call.devices, call.rows.total, call.keys.total, call.options, shifted
    )


def _sent(call: Call, tree: Tree, hop: int = 1) -> Tree:
    """What the device ``hop`` before has sent: by 1, after each step a device has the shard of the one before."""
    around = [(i, (i + hop) % call.devices) for i in range(call.devices)]
    sent: Tree = jax.tree.map(lambda x: jax.lax.ppermute(x, call.axis, around), tree)
    return sent


def _after(tree: Tree, others: Others) -> tuple[Tree, Others]:
    """Both, of which nothing that uses ``tree`` is computed before all of ``others``.

    A barrier, which XLA for CPUs drops before it schedules: it would send all shards at once, and keep them. There the
    arrays are made to depend on a number that is 0.
    """
    # Where JAX has several platforms it traces both branches, whose results must have the same types: on_cpu makes all
    # of the tree vary over the axes that any of the others varies over.
    tree, others = jax.lax.optimization_barrier((varying.vary_alike(tree, others), others))

    def on_cpu(tree: Tree, others: Others) -> Tree:
        zero = jnp.int32(0)
        for x in jax.tree.leaves(others):
            bits = jax.lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.int32)
            zero = zero + jax.lax.shift_right_logical(bits & 1, np.int32(1))
        return jax.tree.map(lambda x: jnp.where(zero == 0, x, jnp.zeros_like(x)), tree)

    tied: Tree = jax.lax.platform_dependent(tree, others, cpu=on_cpu, default=lambda tree, others: tree)
    return tied, others


def source_of(call: Call, step: int) -> Shard:
    """The shard of keys that is here in a step."""
    index = (call.index - np.int32(step)) % np.int32(call.devices)
    return dataclasses.replace(call.keys, index=index)


def of_source(call: Call, step: int, query: jax.Array, operands: Arrays) -> tuple[Options, Arrays]:
    """Options and operands for the keys that are here in a step."""
    keys = source_of(call, step)
    by_position = _of_source(call, step, operands)
    found = _of_shards(call, step, by_position)
    if keys.consecutive and call.limits is None and call.options.functions is None:
        if positions_matter(call.options, found):
            found["q_offset"] = _offset(found, query, far="alibi_slopes" in found) + call.rows.first - keys.first
        return call.options, found
    striped = keys.order == "striped" and squares.causal_alone(call, found)
    if striped or (step == 0 and squares.serve(call, found)):
        # Row i keeps the keys j with keys.index + devices * j <= rows.index + devices * i + q_offset; and of its own
        # keys a device keeps by index what it keeps by position. There q_offset is 0, but XLA does not know it: a
        # kernel that waits for nothing took all multiprocessors before the sends had theirs, and each device's sends
        # waited for the other's kernel (two H100, 131072 tokens, forward: 145 ms rather than 116).
        offset = _offset(found, query) + call.rows.index - keys.index
        return call.options, {**found, "q_offset": offset // np.int32(call.devices)}
    return by_intervals(call, by_position, keys, query)


def _of_squares(call: Call, step: int, operands: Arrays) -> tuple[Options, Arrays]:
    """Options and operands for all pairs with the keys that are here, of which a step of `squares` has two squares."""
    return dataclasses.replace(call.options, causal=False), _of_shards(call, step, _of_source(call, step, operands))


def _of_source(call: Call, step: int, operands: Arrays) -> Arrays:
    """Operands for the keys that are here in a step, by positions of the whole sequence."""
    keys = source_of(call, step)
    found = {}
    for name, x in operands.items():
        axis = axis_of(name, x, "s")
        found[name] = x if axis is None or of_keys_alone(name) else keys.of(x, axis)
    if step:
        found.pop("sinks", None)  # counted once, in the first step
    return found


def _of_shards(call: Call, step: int, operands: Arrays) -> Arrays:
    """Those of `_of_source`, whose lengths and intervals then count the rows and keys of the shards."""
    keys = source_of(call, step)
    found = dict(operands)
    for name, shard in (("q_lengths", call.rows), ("q_intervals", call.rows), ("kv_lengths", keys),
                        ("kv_intervals", keys)):  # fmt: skip
        if name in found:
            found[name] = shard.count_before(found[name])
    return found


def _offset(operands: Arrays, query: jax.Array, *, far: bool = False) -> jax.Array:
    """q_offset, [B or 1, 1]. Beyond all keys nothing depends on how ``far``, but for ALiBi."""
    offset = operands.get("q_offset", jnp.zeros((query.shape[0], 1), jnp.int32))
    limit = np.int32(np.iinfo(np.int32).max // 2)
    return offset if far else jnp.clip(offset, -limit, limit)


class State(NamedTuple):
    """The softmax over the keys of some steps, in the accumulation dtype: out [B, T, N, V] and lse [B, N, T]."""

    out: jax.Array
    lse: jax.Array

    def merged(self, other: State) -> State:
        """The softmax over the keys of both."""
        most = jax.lax.stop_gradient(jnp.maximum(self.lse, other.lse))
        finite = jnp.where(jnp.isfinite(most), most, 0)
        weights = jnp.exp(self.lse - finite), jnp.exp(other.lse - finite)
        total = weights[0] + weights[1]
        empty = total == 0
        divisor = jnp.where(empty, 1, total)
        lse = jnp.where(empty, -jnp.inf, finite + jnp.log(divisor))
        shares = (jnp.swapaxes(x / divisor, 1, 2)[..., None] for x in weights)
        return State(next(shares) * self.out + next(shares) * other.out, lse)
