"""attention() and attention_varlen(): they check their arguments and make the option record of the call."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import checks
from jax_flash._call import dtypes as _dtypes
from jax_flash._call.options import (
    OPERANDS,
    UNLIMITED,
    Implementation,
    Options,
    Precision,
    by_keys,
    positions_matter,
    with_ranges,
)
from jax_flash._call.signature import readable
from jax_flash._context import run
from jax_flash._context.choice import ContextParallel, Place, check_lengths, place_of
from jax_flash._functions import arguments as _functions
from jax_flash._functions.trace import Functions
from jax_flash._implementations import choice, chunked, dropout, reference, scores, varlen, varying
from jax_flash._native import private, registration
from jax_flash.flex import BlockMask

if private.MISSING is None:
    from jax_flash import _primitive

ArrayLike = jax.typing.ArrayLike
Integers = ArrayLike | Sequence[Any]
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]
Window = ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None


class Shared(TypedDict, total=False):
    """Keywords of both functions, for the overloads and `explain`."""

    causal: bool
    q_offset: Integers
    window: Window
    scale: ArrayLike | None
    softcap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    dropout_rate: float
    dropout_key: ArrayLike | None
    kv_start: Integers | None
    kv_end: Integers | None
    q_start: Integers | None
    q_end: Integers | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | None
    precision: Precision | None
    deterministic_backward: bool | None
    implementation: Implementation | None
    context: ContextParallel | None


class Padded(Shared, total=False):
    q_segment_ids: Integers | None
    kv_segment_ids: Integers | None
    q_lengths: Integers | None
    kv_lengths: Integers | None


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Padded],
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Padded],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_lse: bool,
    **options: Unpack[Padded],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@readable
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    causal: bool = False,
    q_offset: Integers = 0,
    window: Window = None,
    scale: ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    kv_start: Integers | None = None,
    kv_end: Integers | None = None,
    q_start: Integers | None = None,
    q_end: Integers | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    precision: Precision | None = None,
    deterministic_backward: bool | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    context: ContextParallel | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact attention, ``softmax(scale * query @ key.T) @ value``, in O(T + S) memory, forward and backward.

    Query row t is at position t + ``q_offset``, key s at position s. The order of operations on the scores is scale,
    softcap, bias and ALiBi, score_mod, masks, softmax, dropout; docs/options.md has every formula. The algorithm is
    FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, algorithms 1 and 2): tiles with an online softmax
    forward, recomputation from lse backward. Differentiable in query, key, value, bias, alibi_slopes, sinks and a scale
    that is an array, through both results, to any order and in both modes: the kernels serve the first derivative in
    reverse mode, plain JAX in O(T + S) memory the others.

    A row that keeps no key gives out = 0, lse = -inf (or its sink) and zero gradients.

    Integers are int32 arrays, or others and lists whose values are known when the call is traced and which int32 holds.

    Args:
      query: ``[..., T, N, H]``, typically ``[B, T, N, H]``; any number of leading batch dimensions, or none. float16,
        bfloat16, float32 or float64.
      key: ``[..., S, K, H]``, same leading dimensions and dtype as ``query``; N is a multiple of K, and query head n
        attends to key head ``n // (N // K)`` (grouped-query attention; K = 1 is multi-query attention).
      value: ``[..., S, K, V]``, same dtype; V may differ from H.
      bias: floats that broadcast to ``[..., N, T, S]``, added to the scaled scores. In the dtype of ``query`` or one
        that float32 (float64 for float64 inputs) holds.
      mask: booleans that broadcast to ``[..., N, T, S]``; keys are kept where it is True.
      causal: keep only keys with position s <= t + ``q_offset``.
      q_offset: position of query row 0; integers that broadcast to the leading dimensions. 0 aligns
        the first query with the first key (as ``jax.nn.dot_product_attention``), S - T the last with the last (as
        FlashAttention). It may be traced, for decoding with a cache. Only ``causal``, ``window`` and ``alibi_slopes``
        depend on it.
      window: (left, right): keep keys with p - left <= s <= p + right, p = t + ``q_offset``; None on a side is no
        limit, a single value is both sides. Work is proportional to the window. A side is an int of at least 0, or an
        int32 scalar array, which may be traced and negative: a window of (-1, r) begins after p, one of (l, -1) ends
        before it, and sides that cross keep no key. In an array 2^31 - 1 is no limit.
      scale: multiplies the scores; a number, or a floating scalar array, which may be traced and has a gradient; of
        either sign, or 0. None means ``1 / sqrt(H)``.
      softcap: positive; scores become ``softcap * tanh(scores / softcap)`` (Gemma 2, https://arxiv.org/abs/2408.00118).
      alibi_slopes: floats ``[N]`` or ``[..., N]``; subtracts ``slope * |t + q_offset - s|`` from the scores (Press et
        al. 2022, https://arxiv.org/abs/2108.12409).
      sinks: floats ``[N]`` or ``[..., N]``; ``exp(sink)`` joins the softmax's denominator, and so lse (Xiao et al.
        2023, https://arxiv.org/abs/2309.17453).
      dropout_rate: probability in [0, 1) of dropping a weight, to a resolution of 1/65536; weights that are kept are
        divided by 1 - rate. lse is that of the weights before dropout. `dropout_mask` returns the mask.
      dropout_key: a key of jax.random; needed when ``dropout_rate`` is not 0. Keys that broadcast to ``[..., N]`` are
        one for each head: with equal ones, as ``key[None]`` is, heads drop the same weights.
      q_segment_ids: integers ``[..., T]``; with ``kv_segment_ids``. A query attends to keys of its own segment only.
        Blocks that hold no such pair are skipped, which skips as many as possible if the ids ascend.
      kv_segment_ids: integers ``[..., S]``.
      q_lengths: integers that broadcast to the leading dimensions: rows from these on are padding, which is never read;
        their results are those of a row that keeps no key. Clipped to [0, T].
      kv_lengths: the same for keys, clipped to [0, S].
      kv_start: integers that broadcast to ``[..., N, T]``: row t keeps keys s >= kv_start[t]. Any int32 has its plain
        meaning; s and t are indices of keys and rows, which ``q_offset`` does not shift. Blocks of which the intervals
        keep no pair are skipped.
      kv_end: the same: row t keeps keys s < kv_end[t].
      q_start: integers that broadcast to ``[..., N, S]``: key s is kept by rows t >= q_start[s].
      q_end: the same: key s is kept by rows t < q_end[s].
      score_mod: ``score_mod(score, b, h, q, kv)`` returns the score that a pair has instead: a function of scalars, the
        score in the dtype of lse and int32 indices: b the batch entry (of leading dimensions as one), h the query
        head, q = t + ``q_offset`` and kv = s. It may capture up to 16 arrays, with gradients by those that are
        floating; their values, and whether the function is another object, change no compiled program. A pair that is
        not kept adds exactly 0 to every gradient, whatever the function gives there; indices out of range are clamped.
      mask_mod: ``mask_mod(b, h, q, kv)`` returns whether a pair is kept, a boolean scalar.
      block_mask: a `jax_flash.flex.BlockMask`: blocks that it says are empty are skipped, in full ones its mask
        function is not evaluated. It is enough by itself; with ``mask_mod`` a pair is kept if both keep it. One that
        was made for another ``q_offset`` raises; where that is traced its function decides every pair.
      precision: accuracy of float32 products on GPUs: "default" and "high" mean TF32's, "highest" float32's own; None
        follows ``jax.default_matmul_precision``. Other dtypes and CPUs always have their full accuracy.
      deterministic_backward: True: the backward pass on GPUs sums in a fixed order, and its results are bit for bit
        reproducible. False: it may use atomic additions, which is faster from compute capability 8.0 on. None takes the
        faster one, but means True if ``XLA_FLAGS`` has ``--xla_gpu_deterministic_ops`` or
        ``--xla_gpu_exclude_nondeterministic_ops``. Other implementations are always deterministic.
      return_lse: also return lse.
      implementation: None picks the best one that serves the call on its platform (``jax_flash.explain`` says which);
        or "cpu", "cuda" (the kernels of this package), "xla" (plain JAX in chunks, O(T + S) memory, any platform) or
        "reference" (plain quadratic attention).
      context: a `jax_flash.context.ContextParallel`: the sequence is spread over the devices along a mesh axis. Inside
        a ``jax.shard_map`` over that axis the arrays are those of one device, but numbers (``q_offset``, lengths,
        intervals, what functions and block masks are for) are those of the whole sequence; docs/context.md says what
        each argument then has. Without it rows of a sharded query stay where they are, and K and V are gathered.

    Returns:
      out ``[..., T, N, V]`` in the dtype of ``query``; with ``return_lse`` also lse ``[..., N, T]``, the natural
      logarithm of the sum of exponentials of the final scores, in float32 (float64 for float64 inputs).

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong rank, shape or value, or ``implementation`` is unknown.
      NotImplementedError: the named ``implementation``, or the schedule that ``context`` names, does not serve this
        call here.
    """
    query, key, value = checks.inputs(query=query, key=key, value=value)
    checks.shapes(query, key, value)
    place = place_of(context)
    if implementation != "reference":
        for name, array in (("query", query), ("key", key), ("value", value)):
            checks.known_sizes(name, array, -3)
    leading, (q_length, q_heads), kv_length = query.shape[:-3], query.shape[-3:-1], key.shape[-3]
    all_rows, all_keys = _whole_lengths(place, q_length, kv_length)
    arguments = _Arguments(
        causal,
        window,
        scale,
        softcap,
        q_offset,
        alibi_slopes,
        sinks,
        dropout_rate,
        dropout_key,
        precision,
        deterministic_backward,
    )
    functions, of_functions = _functions.functions_of(
        _functions.Arguments(score_mod, mask_mod, block_mask),
        _dtypes.accumulation_dtype(query.dtype),
        (math.prod(leading), q_heads, all_rows, all_keys),
        q_offset,
    )
    record = _record(arguments, query, leading, q_heads, functions)
    return_lse = checks.boolean("return_lse", return_lse)

    operands = record.operands | of_functions
    wide = _dtypes.accumulation_dtype(query.dtype)
    scores_shape = (*leading, q_heads, q_length, all_keys)
    if bias is not None:
        dtypes = [x for x in _dtypes.INPUTS if np.dtype(jnp.dtype(x)).itemsize <= wide.itemsize]
        bias = checks.scores("bias", bias, scores_shape, dtypes)
        operands["bias"] = bias if bias.dtype == query.dtype else bias.astype(wide)
    if mask is not None:
        operands["mask"] = checks.scores("mask", mask, scores_shape, ["bool"])
    for name, other, ids, length in (
        ("q_segment_ids", "kv_segment_ids", q_segment_ids, q_length),
        ("kv_segment_ids", "q_segment_ids", kv_segment_ids, kv_length),
    ):
        if ids is not None:
            operands[name] = checks.integers(name, ids, (*leading, length)).reshape(-1, length)
        elif (q_segment_ids is None) != (kv_segment_ids is None):
            raise ValueError(f"{name} must be given with {other}, got None")
    for name, lengths, limit in (("q_lengths", q_lengths, all_rows), ("kv_lengths", kv_lengths, all_keys)):
        if lengths is not None:
            operands[name] = checks.lengths(name, lengths, leading, limit).reshape(-1)
    heads, lengths = (*leading, q_heads), ((q_length, all_keys), (kv_length, all_rows))
    operands |= _intervals((kv_start, kv_end), (q_start, q_end), heads, *lengths)
    options = record.options
    choice.check_implementation(implementation, query, value, options)

    if 0 in query.shape or kv_length == 0:
        # There are no queries or no keys: every row keeps no key.
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
        lse = jnp.full((*leading, q_heads, q_length), -jnp.inf, wide)
        if sinks is not None:
            lse = jnp.broadcast_to(operands["sinks"].reshape(*leading, q_heads, 1), lse.shape)
        return (out, lse) if return_lse else out

    batch = math.prod(leading)
    query4, key4, value4 = (x.reshape(batch, *x.shape[-3:]) for x in (record.query, key, value))
    if record.scale is not None:
        rows = _rows_within(place, operands, q_length)
        query4, operands["traced_scale"] = _with_positive_scale(record.scale, query4, rows)
    out, lse = _run_anywhere(place, options, _Static(implementation, None), query4, key4, value4, operands)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    return (out, lse.reshape(*leading, q_heads, q_length)) if return_lse else out


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_q_lengths: Integers,
    cu_kv_lengths: Integers,
    max_q_length: int | None = None,
    max_kv_length: int | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Shared],
) -> jax.Array: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_q_lengths: Integers,
    cu_kv_lengths: Integers,
    max_q_length: int | None = None,
    max_kv_length: int | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Shared],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_q_lengths: Integers,
    cu_kv_lengths: Integers,
    max_q_length: int | None = None,
    max_kv_length: int | None = None,
    *,
    return_lse: bool,
    **options: Unpack[Shared],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@readable
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_q_lengths: Integers,
    cu_kv_lengths: Integers,
    max_q_length: int | None = None,
    max_kv_length: int | None = None,
    *,
    causal: bool = False,
    q_offset: Integers = 0,
    window: Window = None,
    scale: ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    kv_start: Integers | None = None,
    kv_end: Integers | None = None,
    q_start: Integers | None = None,
    q_end: Integers | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    precision: Precision | None = None,
    deterministic_backward: bool | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    context: ContextParallel | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention within each of D sequences that are packed one after another, without padding.

    Sequence d has the query rows ``[cu_q_lengths[d], cu_q_lengths[d + 1])`` and the keys likewise; positions,
    ``causal``, ``window``, ALiBi and dropout count from its first row and key. The work is that of the sequences alone.
    Rows after the last sequence are padding: never read, out = 0, lse = -inf (or their sink), zero gradients.

    Args:
      query: ``[tokens, N, H]``; float16, bfloat16, float32 or float64.
      key: ``[key tokens, K, H]``, same dtype.
      value: ``[key tokens, K, V]``, same dtype.
      cu_q_lengths: integers ``[D + 1]`` as for `attention`, from 0 ascending to at most ``tokens``; sequences may be
        empty. Values that are traced can't be checked: they are clipped and made to ascend.
      cu_kv_lengths: the same for keys.
      max_q_length: no sequence has more query rows; None means ``tokens``. It changes no result, and the kernels don't
        need it; plain JAX pads every sequence to it, and if that serves the call, a longer sequence makes all results
        NaN.
      max_kv_length: no sequence has more keys; None means ``key tokens``.
      causal: see `attention`, as the other keywords.
      q_offset: integers ``[]`` or ``[D]``.
      window: see `attention`.
      scale: see `attention`.
      softcap: see `attention`.
      alibi_slopes: ``[N]`` or ``[D, N]``.
      sinks: ``[N]``.
      dropout_rate: see `attention`.
      dropout_key: the mask is ``dropout_mask(dropout_key, dropout_rate, (D, N, max_q_length, max_kv_length))``, whose
        bits don't depend on the maxima.
      kv_start: integers that broadcast to ``[N, tokens]``; see `attention`. Keys count from the first of the sequence.
      kv_end: the same.
      q_start: integers that broadcast to ``[N, key tokens]``; rows count from the first of the sequence.
      q_end: the same.
      score_mod: see `attention`; b is the sequence, and q and kv count from its first row and key.
      mask_mod: likewise.
      block_mask: for one or D "batch entries", the sequences, of lengths (max_q_length, max_kv_length).
      precision: see `attention`.
      deterministic_backward: see `attention`.
      return_lse: also return lse.
      implementation: see `attention`.
      context: see `attention`; ``cu_q_lengths`` and ``cu_kv_lengths`` are those of the whole sequence of tokens.

    Returns:
      out ``[tokens, N, V]`` in the dtype of ``query``; with ``return_lse`` also lse ``[N, tokens]``.

    Raises:
      TypeError, ValueError, NotImplementedError: as `attention`.
    """
    query, key, value = checks.inputs(query=query, key=key, value=value)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 3:
            raise ValueError(f"{name} must have rank 3, [tokens, heads, head_dim], got {array.shape}")
        checks.known_sizes(name, array, 0)
    checks.heads(query, key, value)
    place = place_of(context)
    (tokens, q_heads), kv_tokens = query.shape[:2], key.shape[0]
    all_rows, all_keys = _whole_lengths(place, tokens, kv_tokens)
    limits = (
        all_rows if max_q_length is None else checks.length("max_q_length", max_q_length),
        all_keys if max_kv_length is None else checks.length("max_kv_length", max_kv_length),
    )
    cu_q = checks.cumulative("cu_q_lengths", cu_q_lengths, all_rows, limits[0])
    cu_kv = checks.cumulative("cu_kv_lengths", cu_kv_lengths, all_keys, limits[1])
    if cu_q.shape != cu_kv.shape:
        raise ValueError(f"cu_kv_lengths must have the shape of cu_q_lengths, {cu_q.shape}, got {cu_kv.shape}")
    sequences = cu_q.shape[0] - 1
    if sinks is not None and np.ndim(sinks) != 1:
        raise ValueError(f"sinks must have shape [{q_heads}], one value per query head, got {np.shape(sinks)}")
    arguments = _Arguments(
        causal,
        window,
        scale,
        softcap,
        q_offset,
        alibi_slopes,
        sinks,
        dropout_rate,
        dropout_key,
        precision,
        deterministic_backward,
    )
    functions, of_functions = _functions.functions_of(
        _functions.Arguments(score_mod, mask_mod, block_mask),
        _dtypes.accumulation_dtype(query.dtype),
        (sequences, q_heads, *limits),
        q_offset,
        packed=True,
    )
    record = _record(arguments, query, (sequences,), q_heads, functions)
    return_lse = checks.boolean("return_lse", return_lse)
    lengths = (tokens, all_keys), (kv_tokens, all_rows)
    intervals = _intervals((kv_start, kv_end), (q_start, q_end), (q_heads,), *lengths)
    options = dataclasses.replace(record.options, sequences=sequences)
    choice.check_implementation(implementation, query, value, options)

    if 0 in query.shape or kv_tokens == 0:
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
        lse = jnp.full((q_heads, tokens), -jnp.inf, _dtypes.accumulation_dtype(query.dtype))
        if sinks is not None:
            lse = jnp.broadcast_to(record.operands["sinks"][0][:, None], lse.shape)
        return (out, lse) if return_lse else out

    # The record has one batch entry for each sequence; here the sequences share one batch entry.
    operands = {name: _of_sequences(name, x) for name, x in record.operands.items()}
    operands |= {"cu_q_lengths": cu_q[None], "cu_kv_lengths": cu_kv[None]}
    operands |= intervals | of_functions
    packed_query = record.query[None]
    if record.scale is not None:
        rows = _rows_within(place, operands, tokens)
        packed_query, operands["traced_scale"] = _with_positive_scale(record.scale, packed_query, rows)
    static = _Static(implementation, limits)
    out, lse = _run_anywhere(place, options, static, packed_query, key[None], value[None], operands)
    return (out[0], lse[0]) if return_lse else out[0]


def _of_sequences(name: str, x: jax.Array) -> jax.Array:
    return x.reshape(1, x.shape[0], *x.shape[2:]) if "d" in OPERANDS[name].dims else x[:1]


def _intervals(
    kv: tuple[object, object],
    q: tuple[object, object],
    heads: tuple[int, ...],
    of_rows: tuple[int, int],
    of_keys: tuple[int, int],
) -> dict[str, jax.Array]:
    """The operands of (kv_start, kv_end) and of (q_start, q_end).

    ``heads`` are the leading dimensions and N; ``of_rows`` and ``of_keys`` are for each the length, and the limit of
    what they hold.
    """
    operands = {}
    if any(side is not None for side in kv):
        operands["kv_intervals"] = checks.intervals(("kv_start", "kv_end"), kv, (*heads, of_rows[0]), of_rows[1])
    if any(side is not None for side in q):
        operands["q_intervals"] = checks.intervals(("q_start", "q_end"), q, (*heads, of_keys[0]), of_keys[1])
    return operands


class _Arguments(NamedTuple):
    """The arguments that both functions take, unchecked."""

    causal: object
    window: object
    scale: object
    softcap: object
    q_offset: object
    alibi_slopes: object
    sinks: object
    dropout_rate: object
    dropout_key: object
    precision: object
    deterministic_backward: object


class _Record(NamedTuple):
    query: jax.Array  # multiplied by the sign of the scale, if that is a number
    scale: jax.Array | None  # the scale if it is a scalar array, else None
    options: Options
    operands: dict[str, jax.Array]  # of a batch, with one sequence each


def _record(
    arguments: _Arguments, query: jax.Array, leading: tuple[int, ...], q_heads: int, functions: Functions | None
) -> _Record:
    causal = checks.boolean("causal", arguments.causal)
    wide = _dtypes.accumulation_dtype(query.dtype)
    left, right = checks.window("window", arguments.window)
    offset = checks.q_offset(arguments.q_offset, leading)
    scale = checks.scale(arguments.scale, query.shape[-1], wide)
    deterministic = arguments.deterministic_backward
    if deterministic is not None:
        deterministic = checks.boolean("deterministic_backward", deterministic)
    rate, dropout_key = checks.dropout(arguments.dropout_rate, arguments.dropout_key, (*leading, q_heads))
    operands = {}
    if not (isinstance(left, int) and isinstance(right, int)):
        bounds = jnp.stack([jnp.asarray(left, jnp.int32), jnp.asarray(right, jnp.int32)])
        operands["window_bounds"] = jnp.broadcast_to(bounds, (math.prod(leading), 2))
        left = right = UNLIMITED
    options = Options(
        causal=causal,
        scale=1.0 if isinstance(scale, jax.Array) else abs(scale) or 1.0,  # the query takes the sign
        softcap=checks.positive_or_none("softcap", arguments.softcap),
        window_left=left,
        window_right=UNLIMITED if causal else right,  # causal is at least as narrow
        dropout_rate=rate,
        separate_dq=choice.deterministic_by_default() if deterministic is None else deterministic,
        highest_precision=checks.highest_precision(arguments.precision, query.dtype),
        functions=functions,
    )
    if arguments.alibi_slopes is not None:
        slopes = checks.per_head("alibi_slopes", arguments.alibi_slopes, (*leading, q_heads), wide)
        operands["alibi_slopes"] = slopes.reshape(-1, 1, q_heads)
    if offset is not None and positions_matter(options, operands):
        operands["q_offset"] = offset.reshape(-1, 1)
    if arguments.sinks is not None:
        operands["sinks"] = checks.per_head("sinks", arguments.sinks, (*leading, q_heads), wide).reshape(-1, q_heads)
    if dropout_key is not None:
        seeds = dropout.seeds(dropout_key, leading, q_heads)
        operands["dropout_seeds"] = seeds.reshape(-1, 1, q_heads, 2)
    if isinstance(scale, jax.Array):
        return _Record(query, scale, options, operands)
    if scale <= 0:
        # The kernels take the maximum of the raw scores, which is right only for scale > 0; so query gets the sign.
        query = query * jnp.asarray(np.sign(scale), query.dtype)
    return _Record(query, None, options, operands)


def _whole_lengths(place: Place | None, q_length: int, kv_length: int) -> tuple[int, int]:
    """The lengths of the whole sequence, of which query and key may be a device's part."""
    if place is None:
        return q_length, kv_length
    check_lengths(place, q_length, kv_length)
    return q_length * place.shards, kv_length * place.shards


def _rows_within(place: Place | None, operands: dict[str, jax.Array], q_length: int) -> jax.Array | None:
    """Which rows of query are not padding, as `scores.rows_within`."""
    if place is None:
        return scores.rows_within(operands, "q", q_length)
    positions = run.row_positions(place, q_length)
    every = scores.rows_within(operands, "q", q_length * place.shards)
    return None if every is None else jnp.take(every, positions, axis=1)


def _with_positive_scale(scale: jax.Array, query: jax.Array, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """``query`` [B, T, N, H] times the sign of a scalar ``scale``, or 0, and the magnitude of the scale, [B].

    ``rows`` says which rows are not padding, [B or 1, T]; None: none are.

    Only the product of the two matters, (query * scale / rest) * rest, for any constant rest. So rest has no gradient,
    and derivatives by the scale, of any order and at 0 too, flow through the query.
    """
    # If the reciprocal would overflow rest is 1, and query is multiplied by the whole scale.
    tiny = jnp.finfo(scale.dtype).tiny
    rest = jax.lax.stop_gradient(jnp.where(jnp.abs(scale) < tiny, 1, jnp.abs(scale)))
    if rows is not None:  # padding must not reach the gradient of the scale
        query = jnp.where(rows[:, :, None, None], query, 0)
    # The factor is 1, -1 or 0, so nothing is rounded. In the dtype of the scale, in which its gradient is summed.
    signed = (query.astype(scale.dtype) * (scale / rest)).astype(query.dtype)
    return signed, jnp.broadcast_to(rest, query.shape[:1])


class _Static(NamedTuple):
    """What is known of a call when it is traced, in addition to the record."""

    implementation: Implementation | None
    limits: tuple[int, int] | None  # longest query and key sequence of a packed call


Operands = dict[str, jax.Array]


def _run_anywhere(
    place: Place | None,
    options: Options,
    static: _Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
) -> tuple[jax.Array, jax.Array]:
    """`_run`, on the devices of ``place`` if there is one; operands are without ranges."""

    def attend(options: Options, limits: tuple[int, int] | None, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        query, key, value, operands = arrays
        return _run(options, static._replace(limits=limits), query, key, value, with_ranges(operands))

    if place is None:
        return attend(options, static.limits, query, key, value, operands)
    of_context = run.Static(place, static.limits, attend, static.implementation)
    return run.attention(of_context, options, query, key, value, operands)


def _run(
    options: Options, static: _Static, query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    if jax.__version_info__ < (0, 10) and jax.sharding.AxisType.Explicit in jax.typeof(query).sharding.mesh.axis_types:
        # jax 0.9 cannot reduce a shared-bias gradient on explicit meshes: it puts shardings into the reduction that XLA
        # rejects. So broadcast the bias first.
        full = (query.shape[0], query.shape[2])
        shared = {name for name, x in OPERANDS.items() if x.trainable and x.broadcast}
        operands = {
            name: jnp.broadcast_to(x, (*full, *x.shape[2:])) if name in shared else x for name, x in operands.items()
        }
    query, key, value, operands = varying.vary_alike((query, key, value, operands))
    # Without kernels to call, bypass the primitives: they may not exist in this version of jax.
    implementation = static.implementation or ("xla" if registration.UNAVAILABLE else None)
    plain = {"reference": reference.attention, "xla": chunked.attention}.get(implementation or "")
    if implementation == "xla" and static.limits is None:
        operands = by_keys(operands, query.shape[1])
    if plain is None:
        return _primitive.forward(
            query, key, value, operands, options=options, implementation=static.implementation, limits=static.limits
        )
    if static.limits is not None:
        return varlen.attention(query, key, value, operands, options, *static.limits, plain)
    return plain(query, key, value, operands, options)
