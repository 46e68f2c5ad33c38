"""What one device runs: a custom call, or plain JAX where no kernel serves the call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import dtypes
from jax_flash._call.options import CAPTURED, OPERANDS, by_keys, hides_keys, kept_first, positions_matter
from jax_flash._functions import cpu, cuda, exact
from jax_flash._functions.trace import MOST_CAPTURED, Functions, captured_name
from jax_flash._implementations import choice
from jax_flash._native import _core, registration
from jax_flash._primitive import ahead, limbs, plain
from jax_flash._primitive.derivatives import delta
from jax_flash._primitive.params import ARGUMENTS, INPUTS, Params, result_shapes


class Target(NamedTuple):
    """For what a call is lowered."""

    platform: str  # "cpu", "cuda" or "other"
    portable: bool  # for devices that need not be those of this process (jax.export)


def call(pass_: str, target: Target, params: Params, *args: jax.Array) -> tuple[jax.Array, ...]:
    results = result_shapes(pass_, params, args)
    if 0 in args[0].shape:  # vmap over an axis of size 0; the kernels want one problem at least
        return tuple(jnp.zeros(x.shape, x.dtype) for x in results)
    if pass_ == "tangent":
        return plain.evaluate(pass_, params, *args)
    platform = target.platform
    gradients = params.gradients if pass_ == "backward" else ()
    described = choice.Call.of(args[0], args[2], params.options, gradients, dict(params.operands))
    chosen = choice.choose(params.implementation, platform, described)
    if chosen == "cuda":
        if pass_ == "backward":
            args = (*args[:5], delta(*args[3:7]), *args[6:])
            exactly = params.options.separate_dq and bool(described.gradients)
            params = dataclasses.replace(params, options=dataclasses.replace(params.options, exact_sums=exactly))
        if not target.portable:
            params = _for_gpus(pass_, params, max(args[0].shape[-1], args[2].shape[-1]))
        dtype = args[0].dtype
        scaled = dtype == jnp.float32 or (dtype == jnp.bfloat16 and not target.portable and _is_old())
        params, args = _with_keys_listed(pass_, target, scaled, params, args)
        if scaled:
            wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in results]
            called = _aligned(pass_, params, wide, functools.partial(_half_precision, pass_, target, params), *args)
            return tuple(x.astype(result.dtype) for x, result in zip(called, results, strict=True))
        params, args = _with_keys_decided(pass_, params, args)
        return _aligned(pass_, params, results, functools.partial(_custom_call, pass_, target, params), *args)
    if chosen != "reference":  # which computes every pair
        params, args = _with_keys_decided(pass_, params, args)
    if chosen == "cpu":
        return _custom_call(pass_, target, params, results, *args)
    return plain.evaluate(pass_, params, *args)


BESIDE_LISTS = {"mask", "traced_scale", "q_offset", "q_lengths", "kv_lengths", "sinks"}
"""The operands of calls whose keys may be listed: no other one asks which key it is that a row attends to."""


def _with_keys_listed(
    pass_: str, target: Target, scaled: bool, params: Params, args: tuple[jax.Array, ...]
) -> tuple[Params, tuple[jax.Array, ...]]:
    """Parameters and arguments with lists of keys for a mask that all rows and heads share, where kernels take them.

    ``scaled``: float16 arrays will be made of these, in the order of the lists.
    """
    _, operands, _ = params.split(pass_, args)
    query, key = args[:2]
    may_list = (
        not target.portable
        and params.limits is None
        and hides_keys(operands, query.shape[1])
        and operands["mask"].shape[1] == 1
        and set(operands) <= BESIDE_LISTS
        and not positions_matter(params.options, operands)
        and params.options.dropout_rate == 0
    )
    if not may_list:
        return params, args
    if not scaled:
        attributes = _attributes(pass_, target.platform, params, *args)
        if not choice.lists_keys(_arch(), _sizes(pass_, params, attributes, *args)):
            return params, args
    return _having(kept_first(operands, query.shape[0], key.shape[1]), pass_, params, args)


def _with_keys_decided(pass_: str, params: Params, args: tuple[jax.Array, ...]) -> tuple[Params, tuple[jax.Array, ...]]:
    """Parameters and arguments without a mask that all rows share, but with what it says of keys."""
    _, operands, _ = params.split(pass_, args)
    if params.limits is not None or not hides_keys(operands, args[0].shape[1]):
        return params, args
    return _having(by_keys(operands, args[0].shape[1]), pass_, params, args)


def _having(
    operands: Mapping[str, jax.Array], pass_: str, params: Params, args: tuple[jax.Array, ...]
) -> tuple[Params, tuple[jax.Array, ...]]:
    params = params.with_operands(operands)
    return params, (*args[: len(ARGUMENTS[pass_])], *(operands[name] for name in params.names))


def _arch() -> int | None:
    """The compute capability that calls are lowered ahead for; None: those of this process."""
    found = ahead.current()
    return None if found is None else found.arch


def _is_old() -> bool:
    found = ahead.current()
    return choice.has_old_gpu() if found is None else found.float16_only


def _for_gpus(pass_: str, params: Params, largest_head_dim: int) -> Params:
    """The parameters where dquery has a pass of its own whatever is asked for, on the GPUs of this process or on the
    one that calls are lowered ahead for.

    That is asked for then, by an option that every GPU serves: kernels that add nothing to dq want no accumulator.
    """
    if pass_ != "backward":
        return params
    separates = (ahead.current() or choice).separate_dq
    separate = _is_old() or (not params.gradients and separates(largest_head_dim))
    options = dataclasses.replace(params.options, separate_dq=params.options.separate_dq or separate)
    return dataclasses.replace(params, options=options)


def _half_precision(
    pass_: str, target: Target, params: Params, results: Sequence[jax.ShapeDtypeStruct], *args: jax.Array
) -> tuple[jax.Array, ...]:
    """The custom call for CUDA on float16 arrays, and on those for which they stand, with delta for dlse; its results
    are float32."""
    _, operands, _ = params.split(pass_, args)
    gradients = (args[3], args[5]) if pass_ == "backward" else ()
    operands = {name: x.astype(jnp.float32) if OPERANDS[name].may_be_narrow else x for name, x in operands.items()}
    arrays, operands["descale"] = limbs.scaled(params.options, operands, *args[:3], *gradients)
    operands |= {"original_query": args[0], "original_key": args[1], "original_value": args[2]}
    if gradients:
        operands["original_dout"] = gradients[0]
    options = dataclasses.replace(params.options, original_bfloat16=args[0].dtype == jnp.bfloat16)
    params = dataclasses.replace(params, options=options)
    params, args = _having(operands, pass_, params, (*arrays, *args[len(arrays) :]))
    params, args = _with_keys_decided(pass_, params, args)
    return _custom_call(pass_, target, params, results, *args)


def _custom_call(
    pass_: str, target: Target, params: Params, results: Sequence[jax.ShapeDtypeStruct], *args: jax.Array
) -> tuple[jax.Array, ...]:
    platform = target.platform
    shapes = tuple(x.shape for x in results)
    attributes = _attributes(pass_, platform, params, *args)
    if platform == "cuda" and pass_ == "backward" and not target.portable:
        ordered = choice.orders_dq(_arch(), _sizes(pass_, params, attributes, *args))
        # A GPU whose kernels can't, where the program may run too, has a pass of its own instead: never other sums.
        attributes |= {"ordered_dq": ordered, "separate_dq": attributes["separate_dq"] or ordered}
    if platform == "cuda" and (found := ahead.current()) is not None:
        found.calls.append(_described(pass_, attributes, *args))
    if platform == "cuda" and pass_ == "backward":
        dims, gradients = dict(params.operands), zip(params.gradients, results[len(INPUTS) :], strict=True)
        exactly = attributes["exact_sums"]
        results = [*results[: len(INPUTS)], *(_of_cuda(name, dims[name], x, args[0], exactly) for name, x in gradients)]
    elements = [
        x.size for name, x in zip(params.gradients, results[len(INPUTS) :], strict=False) if OPERANDS[name] is CAPTURED
    ]
    sizes = _sizes(pass_, params, attributes, *args)
    scratch = _scratch(platform, sizes, elements)
    if platform == "cuda" and not target.portable and ahead.current() is None and choice.has_gpu():
        # Kernels are compiled side by side, and beside XLA's own work, rather than one by one when XLA asks.
        _core.begin_to_load(scratch=scratch, **sizes)
    if type(scratch) is not int or scratch:
        wide = dtypes.accumulation_dtype(args[0].dtype)
        results = (*results, jax.ShapeDtypeStruct((scratch,), wide))
    if pass_ == "backward" and platform == "cuda":
        args = (*args[:6], *args[7:])  # these kernels take delta, which stands in dlse's place, for dlse and out
    name = registration.FORWARD_TARGET if pass_ == "forward" else registration.BACKWARD_TARGET
    called = jax.ffi.ffi_call(name, results)(*args, **attributes)
    return tuple(
        exact.floats(x) if x.dtype == jnp.uint32 else _summed_to(shape, x)
        for shape, x in zip(shapes, called, strict=False)
    )


def _described(pass_: str, attributes: Mapping[str, Any], *args: jax.Array) -> ahead.Call:
    limbs = 2 if attributes["highest_precision"] else 1
    options = {name: int(x) if isinstance(x, np.int32) else x for name, x in attributes.items()}
    sizes = (args[0].shape[-1] // limbs, args[2].shape[-1] // limbs)
    return ahead.Call(pass_, args[0].dtype.name, *sizes, options)


def _of_cuda(
    name: str, dims: str, gradient: jax.ShapeDtypeStruct, query: jax.Array, exactly: bool
) -> jax.ShapeDtypeStruct:
    """What CUDA's kernels leave of a gradient: where all rows share it, a sum for every batch entry and head; of a
    captured array digits, with ``exactly``."""
    if OPERANDS[name] is CAPTURED:
        return jax.ShapeDtypeStruct((*gradient.shape, *exact.SHAPE), jnp.uint32) if exactly else gradient
    declared = OPERANDS[name].dims
    if "t" not in declared or "t" in dims:
        return gradient
    sizes = {"b": query.shape[0], "n": query.shape[2]}
    shape = [sizes.get(dim, n) for dim, n in zip(declared, gradient.shape, strict=True)]
    return jax.ShapeDtypeStruct(shape, gradient.dtype)


def _summed_to(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    axes = tuple(i for i, (wanted, n) in enumerate(zip(shape, x.shape, strict=True)) if wanted != n)
    return x.sum(axis=axes, keepdims=True) if axes else x


def _attributes(pass_: str, platform: str, params: Params, *args: jax.Array) -> dict[str, Any]:
    """The record by name, as the handlers decode it: int32 for ints."""
    attributes: dict[str, Any] = {
        name: np.int32(x) if type(x) is int else x
        for name, x in (
            (field.name, getattr(params.options, field.name)) for field in dataclasses.fields(params.options)
        )
        if name != "functions"
    }
    _, operands, _ = params.split(pass_, args)
    for name, _ in _core.OPERANDS:
        described = OPERANDS[name]
        attributes[f"has_{name}"] = name in operands
        if described.trainable:
            attributes[f"has_d{name}"] = name in params.gradients
        if described.may_be_narrow:
            attributes[f"wide_{name}"] = name in operands and operands[name].dtype != args[0].dtype
    return attributes | _of_functions(pass_, platform, params, *args)


def _of_functions(pass_: str, platform: str, params: Params, *args: jax.Array) -> dict[str, Any]:
    """The attributes of score and mask functions, and of what they captured."""
    functions = params.options.functions
    captured = {name: dims for name, dims in params.operands if OPERANDS[name] is CAPTURED}
    numbers = {captured_name(i): i for i in range(MOST_CAPTURED)}
    gradients = [numbers[name] for name in params.gradients if name in captured]
    height, width = (1, 1) if functions is None else functions.block_size
    text = ""
    if functions is not None:
        several = frozenset(numbers[name] for name, dims in captured.items() if "m" in dims)
        from_0 = "q_offset" not in params.names
        arguments = functions, several, pass_ == "backward", gradients, from_0
        most = _most(params, functions, args)
        if platform == "cuda":
            # Of rows in the backward alone, since the split-KV kernels' are of several heads.
            bounded = ("kv", "q") if pass_ == "backward" else ("kv",)
            text = cuda.source(*arguments, {name: n + 1 for name, n in most if name in bounded})
        else:
            text = cpu.source(*arguments, most)
    return {
        "functions": text,
        "captured": np.int32(len(captured)),
        "dcaptured": np.int32(len(gradients)),
        "mask_block_rows": np.int32(height),
        "mask_block_keys": np.int32(width),
    }


def _most(params: Params, functions: Functions, args: Sequence[jax.Array]) -> tuple[tuple[str, int], ...]:
    """The largest arguments of the functions of a call, where they are known."""
    sizes = {"kv": args[1].shape[1]}
    if "q_offset" not in params.names:
        sizes["q"] = args[0].shape[1]
    if "index_offsets" not in params.names:
        sizes["h"] = args[0].shape[2]
        sizes["b"] = functions.batch or args[0].shape[0]
        sizes["b"] *= params.options.sequences
    return tuple((name, n - 1) for name, n in sorted(sizes.items()) if isinstance(n, int))


def _sizes(pass_: str, params: Params, attributes: Mapping[str, Any], *args: jax.Array) -> dict[str, Any]:
    """A call as the library plans it."""
    query, key, value = args[:3]
    batch, q_length, q_heads, head_dim = query.shape
    _, operands, _ = params.split(pass_, args)
    return {
        "pass_": pass_,
        "dtype": query.dtype.name,
        "options": {name: int(x) if isinstance(x, np.int32) else x for name, x in attributes.items()},
        "batch": batch,
        "q_length": q_length,
        "kv_length": key.shape[1],
        "q_heads": q_heads,
        "kv_heads": key.shape[2],
        "head_dim": head_dim,
        "value_head_dim": value.shape[3],
        # For a symbolic size 2, as any other above 1.
        "shapes": {
            name: [n if isinstance(n, int) else 2 for n in x.shape]
            for name, x in operands.items()
            if OPERANDS[name].broadcast
        },
    }


def _scratch(platform: str, sizes: Mapping[str, Any], dcaptured_elements: Sequence[int]) -> Any:
    """Elements of scratch: an int, or where the batch is a symbolic size an expression of it.

    ``dcaptured_elements``: of each gradient of a captured array.
    """
    of_batch = {**sizes, "platform": platform, "dcaptured_elements": dcaptured_elements}
    if isinstance(sizes["batch"], int):
        return _core.scratch(**of_batch)
    batch = of_batch.pop("batch")
    each, more = _core.scratch_of_any_batch(**of_batch)
    return each * batch + more if each else more


def _aligned(
    pass_: str,
    params: Params,
    results: Sequence[jax.ShapeDtypeStruct],
    call: Callable[..., tuple[jax.Array, ...]],
    *args: jax.Array,
) -> tuple[jax.Array, ...]:
    """Calls with head dims padded by zeros to the next multiple of 8, so that every row starts on 16 bytes."""
    sizes = {"h": args[0].shape[-1], "v": args[2].shape[-1]}

    def missing(dims: str) -> int:
        return -sizes.get(dims[-1:], 0) % 8  # captured scalars have no axes

    def pad(x: jax.Array, dims: str) -> jax.Array:
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing(dims)),)) if missing(dims) else x

    dims = params.result_dims(pass_)
    padded = [
        jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + missing(d)) if missing(d) else x.shape, x.dtype)
        for x, d in zip(results, dims, strict=True)
    ]
    called = call(padded, *map(pad, args, params.argument_dims(pass_)))
    return tuple(x[..., : sizes[d[-1]]] if missing(d) else x for x, d in zip(called, dims, strict=True))
