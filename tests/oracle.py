"""The expected results, and those of plain JAX; both are independent of this package.

`attention` is the oracle, NumPy in float64. `plain` is what the tolerance rule compares with: the obvious attention in
JAX, in the dtype under test and on the same platform. Both take the options of `jax_flash.attention`, and both have a
variant for packed sequences, made by a loop over them.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TRAINABLE = ("bias", "alibi_slopes", "sinks", "scale")
"""Options that have a gradient; the scale only if it is an array."""

INTERVALS = ("kv_start", "kv_end", "q_start", "q_end")
"""The sides of interval masks: of keys, by row, and of rows, by key."""

WindowSide = int | np.ndarray | None
Window = tuple[WindowSide, WindowSide]

UNLIMITED = 2**31 - 1
"""A side of the window without a limit."""


# Dropout


def philox(counter: Sequence[Any], key: Sequence[Any], rounds: int = 7) -> list[np.ndarray]:
    """Philox 4x32 of Salmon et al. 2011, in arithmetic of 64 bits."""
    c = [np.asarray(x, np.uint64) for x in counter]
    k = [np.asarray(x, np.uint64) for x in key]
    low, bits = np.uint64(2**32 - 1), np.uint64(32)
    for _ in range(rounds):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(second >> bits) ^ c[1] ^ k[0], second & low, (first >> bits) ^ c[3] ^ k[1], first & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def dropout_keep(seeds: np.ndarray, rate: float, q_length: int, kv_length: int) -> np.ndarray:
    """Boolean [..., T, S] of seeds [..., 2]: pair by pair, with nothing shared between pairs."""
    t, s = np.arange(q_length)[:, None], np.arange(kv_length)
    counter = (t // 16 * 8 + t % 8, s // 32 * 8 + s % 8, 0, 0)
    seeds = np.asarray(seeds)[..., None, None, :]
    words = np.stack(np.broadcast_arrays(*philox(counter, (seeds[..., 0], seeds[..., 1]))))
    word = np.take_along_axis(words, np.broadcast_to(s // 8 % 4, words.shape[1:])[None], axis=0)[0]
    bits = np.where(t // 8 % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16))
    return bits >= threshold(rate)


def threshold(rate: float) -> int:
    return min(int(np.floor(65536 * rate + 0.5)), 65535)


def factors_of_key(key: jax.Array, rate: float, shape: Sequence[int]) -> np.ndarray:
    """The factors by which dropout multiplies the weights, float64 of shape (*leading, N, T, S)."""
    *heads, q_length, kv_length = shape
    with jax.ensure_compile_time_eval():  # `plain` calls this while it is traced
        seeds = np.asarray(jax.random.bits(key, (*heads, 2), jnp.uint32))
    return dropout_keep(seeds, rate, q_length, kv_length) * (65536 / (65536 - threshold(rate)))


# Which pairs are kept


def keep_pairs(
    leading: Sequence[int],
    q_length: int,
    kv_length: int,
    *,
    causal: bool = False,
    q_offset: Any = 0,
    window: int | Window | None = None,
    mask: np.ndarray | None = None,
    q_segment_ids: np.ndarray | None = None,
    kv_segment_ids: np.ndarray | None = None,
    q_lengths: np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    kv_start: np.ndarray | None = None,
    kv_end: np.ndarray | None = None,
    q_start: np.ndarray | None = None,
    q_end: np.ndarray | None = None,
) -> np.ndarray:
    """Boolean [*leading, N or 1, T, S]."""

    def batched(x: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(x, np.int64), leading)[..., None, None, None]

    t, s = np.arange(q_length)[:, None], np.arange(kv_length)
    position = batched(q_offset) + t
    keep = np.ones((*leading, 1, q_length, kv_length), bool)
    if causal:
        keep &= s <= position
    sides = window if isinstance(window, tuple) else (window, window)
    left, right = (batched(UNLIMITED if side is None else side) for side in sides)
    keep &= (left == UNLIMITED) | (s >= position - left)
    keep &= (right == UNLIMITED) | (s <= position + right)
    if q_segment_ids is not None:
        keep &= (np.asarray(q_segment_ids)[..., :, None] == np.asarray(kv_segment_ids)[..., None, :])[..., None, :, :]
    if q_lengths is not None:
        keep &= t < batched(q_lengths)
    if kv_lengths is not None:
        keep &= s < batched(kv_lengths)
    for start, end, index, axis in ((kv_start, kv_end, s, -1), (q_start, q_end, t, -2)):
        if start is not None:
            keep = keep & (index >= np.expand_dims(np.asarray(start), axis))
        if end is not None:
            keep = keep & (index < np.expand_dims(np.asarray(end), axis))
    return keep if mask is None else keep & np.asarray(mask)


def distances(leading: Sequence[int], q_length: int, kv_length: int, q_offset: Any) -> np.ndarray:
    """|query position - key position|, int64 [*leading, 1, T, S]."""
    first = np.broadcast_to(np.asarray(q_offset, np.int64), leading)[..., None, None, None]
    return np.abs(first + np.arange(q_length)[:, None] - np.arange(kv_length))


def within(length: int, lengths: Any, leading: Sequence[int]) -> np.ndarray:
    """Which rows are not padding: boolean [*leading, length]."""
    limit = length if lengths is None else np.asarray(lengths)
    return np.arange(length) < np.broadcast_to(limit, leading)[..., None]


# The oracle


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    causal: bool = False,
    q_offset: Any = 0,
    window: int | Window | None = None,
    scale: Any = None,
    softcap: float | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    q_segment_ids: np.ndarray | None = None,
    kv_segment_ids: np.ndarray | None = None,
    q_lengths: np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    kv_start: np.ndarray | None = None,
    kv_end: np.ndarray | None = None,
    q_start: np.ndarray | None = None,
    q_end: np.ndarray | None = None,
    precision: str | None = None,
    dropout_factors: np.ndarray | None = None,
) -> dict[str, Any]:
    """out, lse and all gradients in float64, and figures for how accurately they can be known.

    ``scale`` and the sides of ``window`` may be arrays that broadcast to the leading dimensions.

    "attended_rows" [..., T, N] and "attended_keys" [..., S, K] are those with a weight, "largest_score" is that, and
    "squares" of a gradient are sums of the squares of the terms that it is the sum of. The shapes are
    those of attention(); ``dropout_factors`` [..., N, T, S] replace the ones made of ``dropout_key``.
    """
    q, k, v, dout, dlse = (np.asarray(x).astype(np.float64) for x in (query, key, value, dout, dlse))
    leading, (q_length, q_heads, head_dim), (kv_length, kv_heads) = q.shape[:-3], q.shape[-3:], k.shape[-3:-1]
    group = q_heads // kv_heads
    of_scale = np.shape(scale) if isinstance(scale, np.ndarray) else None
    scale = np.asarray(1 / np.sqrt(head_dim) if scale is None else scale, np.float64)[..., None, None, None]

    # Padding has no influence, with any contents.
    rows, keys = within(q_length, q_lengths, leading), within(kv_length, kv_lengths, leading)
    q, dout = (np.where(rows[..., None, None], x, 0) for x in (q, dout))
    k, v = (np.where(keys[..., None, None], x, 0) for x in (k, v))
    dlse = np.where(rows[..., None, :], dlse, 0)

    # Heads before lengths, and each key head once for every query head that attends to it.
    q, dout = np.moveaxis(q, -2, -3), np.moveaxis(dout, -2, -3)
    k, v = (np.repeat(np.moveaxis(x, -2, -3), group, axis=-3) for x in (k, v))

    products = q @ k.swapaxes(-1, -2)
    scores = scale * products
    slope_of_cap = 1.0
    if softcap is not None:
        capped = np.tanh(scores / softcap)
        scores, slope_of_cap = softcap * capped, 1 - capped**2
    if bias is not None:
        scores = scores + np.asarray(bias).astype(np.float64)
    if alibi_slopes is not None:
        distance = distances(leading, q_length, kv_length, q_offset)
        scores = scores - np.asarray(alibi_slopes).astype(np.float64)[..., None, None] * distance
    keep = keep_pairs(
        leading,
        q_length,
        kv_length,
        causal=causal,
        q_offset=q_offset,
        window=window,
        mask=mask,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        kv_start=kv_start,
        kv_end=kv_end,
        q_start=q_start,
        q_end=q_end,
    )
    scores = np.where(keep, scores, -np.inf)
    attended = scores > -np.inf

    sink = np.full((*leading, q_heads, 1, 1), -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks).astype(np.float64)[:, None, None], sink.shape)
    maximum = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    alive = maximum > -np.inf
    maximum = np.where(alive, maximum, 0.0)
    weights, weight_of_sink = np.exp(scores - maximum), np.exp(sink - maximum)
    total = weights.sum(axis=-1, keepdims=True) + weight_of_sink
    total = np.where(alive, total, 1.0)
    p, p_of_sink = weights / total, weight_of_sink / total
    lse = np.where(alive, maximum + np.log(total), -np.inf)[..., 0]

    z = 1.0
    if dropout_factors is not None:
        z = dropout_factors
    elif dropout_rate:
        z = factors_of_key(dropout_key, dropout_rate, p.shape)

    # The Jacobian of softmax, and of logsumexp, which is softmax.
    dp = z * (dout @ v.swapaxes(-1, -2))
    delta = (p * dp).sum(axis=-1, keepdims=True) - dlse[..., None]
    ds = p * (dp - delta)
    dx = scale * slope_of_cap * ds

    def of_keys(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x.reshape(*leading, kv_heads, group, *x.shape[-2:]).sum(axis=-3), -3, -2)

    results = {
        "out": np.moveaxis((z * p) @ v, -3, -2),
        "lse": lse,
        "dq": np.moveaxis(dx @ k, -3, -2),
        "dk": of_keys(dx.swapaxes(-1, -2) @ q),
        "dv": of_keys((z * p).swapaxes(-1, -2) @ dout),
        "attended_rows": np.moveaxis(attended.any(axis=-1), -2, -1),
        "attended_keys": np.moveaxis(
            attended.any(axis=-2).reshape(*leading, kv_heads, group, kv_length).any(axis=-2), -2, -1
        ),
        "largest_score": np.abs(scores[attended]).max(initial=0.0),
    }
    # Each with the size of its terms before they cancel: p * (dp - delta) if one key has all the weight.
    rounding = p * (np.abs(dp) + np.abs(delta))
    squares = (scale * slope_of_cap * rounding) ** 2
    results["squares"] = {
        "dq": np.moveaxis(squares @ k**2, -3, -2),
        "dk": of_keys(squares.swapaxes(-1, -2) @ q**2),
    }
    terms = {}
    if bias is not None:
        terms["dbias"] = ds, rounding, np.shape(bias), 0
    if alibi_slopes is not None:
        terms["dalibi_slopes"] = -ds * distance, rounding * distance, np.shape(alibi_slopes), 2
    if of_scale is not None:
        derivative = slope_of_cap * products
        terms["dscale"] = ds * derivative, rounding * np.abs(derivative), of_scale, 3
    if sinks is not None:
        # The lse of padding is its sink, but does not count as a result.
        dsink = np.where(rows[..., None, :, None], -p_of_sink * delta, 0)
        rounding = np.where(
            rows[..., None, :, None], p_of_sink * (np.abs(delta + dlse[..., None]) + np.abs(dlse[..., None])), 0
        )
        terms["dsinks"] = dsink, rounding, np.shape(sinks), 2
    for name, (x, rounding, shape, more) in terms.items():
        wide = (*shape, *(1,) * more)
        results[name] = reduced(x, wide).reshape(shape)
        results["squares"][name] = reduced(rounding**2, wide).reshape(shape)
    if alibi_slopes is not None:
        # delta's rounding is the same for all keys of a row.
        of_rows = (np.abs(delta) * (p * distance).sum(axis=-1, keepdims=True)) ** 2
        shape = (*np.shape(alibi_slopes), 1, 1)
        results["squares"]["dalibi_slopes"] += reduced(of_rows, shape).reshape(shape[:-2])
    if of_scale is not None:
        # A scale reaches the kernels as a factor of q, so that its gradient is summed from dq, an element at a time.
        of_elements = (q * ((slope_of_cap * ds) @ k)) ** 2
        results["squares"]["dscale"] += reduced(of_elements, (*of_scale, 1, 1, 1)).reshape(of_scale)
    return results


def bounds(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    dout: np.ndarray,
    keep: np.ndarray,
    eps: float,
    scale: float | None = None,
    rounded_lse: float = 0.0,
    added: np.ndarray | float = 0.0,
    factors: np.ndarray | float = 1.0,
    sinks: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """How far results may be from those of `attention`, element by element, so that no row may suffer from others.

    The score of rows q and k may be wrong by a few eps |q| |k|, and every other product and sum by a few eps times the
    size of its terms. lse has no cotangent. It is the score of the only key that counts, where there is one; up to
    ``rounded_lse`` it may be rounded apart from scores. Options are given by what they add to scores, and by the
    factors of dropout, [B, N, T, S].
    """
    (batch, _, q_heads, head_dim), kv_heads = query.shape, key.shape[2]
    group = q_heads // kv_heads
    q, k, v, dout = (np.moveaxis(x.astype(np.float64), 2, 1) for x in (query, key, value, dout))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = head_dim**-0.5 if scale is None else scale
    eps *= 4

    def pairs(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.linalg.norm(x, axis=-1)[..., None] * np.linalg.norm(y, axis=-1)[..., None, :]

    def times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x @ np.abs(y)

    scores = np.where(keep, scale * q @ k.swapaxes(-1, -2) + added, -np.inf)
    sink = np.full((q_heads, 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None, None]
    lse = np.logaddexp(np.logaddexp.reduce(scores, axis=-1, keepdims=True), sink)
    alive = np.isfinite(lse)
    log_p, log_sink = (np.where(alive, x - np.where(alive, lse, 0), -np.inf) for x in (scores, sink))
    p = np.exp(log_p)
    wrong = scale * eps * pairs(q, k) + eps * (1 + np.abs(added))
    rounded = alive & (p.max(axis=-1, keepdims=True) < 1 - 1e-9)
    wrong = wrong + 2.0**-22 * np.where(rounded, np.abs(lse), 0)
    # What weights may become, and what the others lose by it.
    grown = np.exp(np.minimum(log_p + wrong + (p * wrong).sum(axis=-1, keepdims=True), 0)) - p
    grown += p * 2.0**-22 * np.minimum(np.where(alive, np.abs(lse), 0), rounded_lse)
    # Weights below float32 are 0.
    wrong_p = grown + np.minimum(p, grown.sum(axis=-1, keepdims=True)) + eps * p + 1e-37
    dp, wrong_dp = factors * (dout @ v.swapaxes(-1, -2)), factors * eps * pairs(dout, v)
    difference = dp - (p * dp).sum(axis=-1, keepdims=True)
    wrong_out = times(factors * wrong_p, v)
    wrong_delta = (np.abs(dout) * (wrong_out + eps * times(factors * p, v))).sum(axis=-1, keepdims=True)
    wrong_ds = (wrong_p + eps * p) * np.abs(difference) + (wrong_p + p) * (wrong_dp + wrong_delta)

    wrong_lse = np.logaddexp(np.logaddexp.reduce(log_p + wrong, axis=-1), log_sink[..., 0])

    def of_keys(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x.reshape(batch, kv_heads, group, *x.shape[2:]).sum(axis=2), 1, 2)

    return {
        "out": np.moveaxis(wrong_out, 1, 2),
        "lse": np.where(alive[..., 0], wrong_lse + 2.0**-22 * np.abs(np.where(alive, lse, 0)[..., 0]), 0),
        "dq": np.moveaxis(scale * times(wrong_ds, k), 1, 2),
        "dk": of_keys(scale * times(wrong_ds.swapaxes(-1, -2), q)),
        "dv": of_keys(times((factors * wrong_p).swapaxes(-1, -2), dout)),
    }


def reduced(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """``x`` summed over the dimensions in which ``shape`` was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(i for i, size in enumerate(shape) if size != x.shape[i]), keepdims=True)


# Plain JAX


def plain(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: Any = None,
    causal: bool = False,
    q_offset: Any = 0,
    window: int | Window | None = None,
    scale: Any = None,
    softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    kv_start: Any = None,
    kv_end: Any = None,
    q_start: Any = None,
    q_end: Any = None,
    precision: str | None = None,
    dropout_factors: np.ndarray | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out and lse by plain JAX in the dtype of the inputs, with products accumulated in float32 or wider.

    Everything but the inputs and the trainable options is known when it is traced.
    """
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    leading, (q_length, q_heads, head_dim), (kv_length, kv_heads) = query.shape[:-3], query.shape[-3:], key.shape[-3:-1]
    einsum = functools.partial(jnp.einsum, preferred_element_type=wide, precision=precision)
    rows, keys = within(q_length, q_lengths, leading), within(kv_length, kv_lengths, leading)
    if q_lengths is not None:
        query = jnp.where(rows[..., None, None], query, 0)
    if kv_lengths is not None:
        key, value = (jnp.where(keys[..., None, None], x, 0) for x in (key, value))

    scores = einsum("...tkgh,...skh->...kgts", query.reshape(*leading, q_length, kv_heads, -1, head_dim), key)
    scores = scores.reshape(*leading, q_heads, q_length, kv_length)
    scores = scores * jnp.asarray(1 / np.sqrt(head_dim) if scale is None else scale, wide)
    if softcap is not None:
        scores = jnp.asarray(softcap, wide) * jnp.tanh(scores / jnp.asarray(softcap, wide))
    if bias is not None:
        scores = scores + bias.astype(wide).reshape((1,) * (scores.ndim - bias.ndim) + bias.shape)
    if alibi_slopes is not None:
        distance = jnp.asarray(distances(leading, q_length, kv_length, q_offset), wide)
        slopes = alibi_slopes.astype(wide)[..., None, None]
        scores = scores - slopes.reshape((1,) * (scores.ndim - slopes.ndim) + slopes.shape) * distance
    keep = keep_pairs(
        leading,
        q_length,
        kv_length,
        causal=causal,
        q_offset=q_offset,
        window=window,
        mask=mask,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        kv_start=kv_start,
        kv_end=kv_end,
        q_start=q_start,
        q_end=q_end,
    )
    scores = jnp.where(keep, scores, -jnp.inf)
    competing = scores
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(wide)[:, None, None], (*leading, q_heads, q_length, 1))
        competing = jnp.concatenate([scores, column], axis=-1)
    alive = (competing > -jnp.inf).any(axis=-1)
    lse = jax.nn.logsumexp(jnp.where(alive[..., None], competing, 0.0), axis=-1)
    weights = jnp.where(alive[..., None], jnp.exp(scores - lse[..., None]), 0.0)
    lse = jnp.where(alive, lse, -jnp.inf)
    if dropout_rate and dropout_factors is None:
        dropout_factors = factors_of_key(dropout_key, dropout_rate, weights.shape)
    if dropout_factors is not None:
        weights = weights * jnp.asarray(dropout_factors, wide)
    weights = weights.astype(value.dtype).reshape(*leading, kv_heads, -1, q_length, kv_length)
    out = einsum("...kgts,...skh->...tkgh", weights, value).astype(query.dtype)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    if q_lengths is None:
        return out, lse
    lse = jnp.where(rows[..., None, :], lse, jax.lax.stop_gradient(lse))
    return jnp.where(rows[..., None, None], out, 0), lse


# Packed sequences


def sequences(
    cu_q_lengths: np.ndarray, cu_kv_lengths: np.ndarray, options: dict[str, Any], shape: Sequence[int]
) -> Iterator[tuple[int, slice, slice, dict[str, Any]]]:
    """(number, rows, keys, options) of every sequence; ``shape`` is (N, tokens_q, tokens_kv)."""
    options = dict(options)
    number = len(cu_q_lengths) - 1
    offsets = np.broadcast_to(options.pop("q_offset", 0), number)
    slopes = options.pop("alibi_slopes", None)
    intervals = {name: options.pop(name) for name in INTERVALS if options.get(name) is not None}
    factors = None
    key, rate = options.pop("dropout_key", None), options.pop("dropout_rate", 0.0)
    if rate:
        factors = factors_of_key(key, rate, (number, *shape))
    for d in range(number):
        rows, keys = (slice(int(cu[d]), int(cu[d + 1])) for cu in (cu_q_lengths, cu_kv_lengths))
        of_sequence = {**options, "q_offset": offsets[d]}
        if slopes is not None:
            of_sequence["alibi_slopes"] = slopes if slopes.ndim == 1 else slopes[d]
        for name, x in intervals.items():
            x = np.broadcast_to(x, (*x.shape[:-1], shape[1] if name in INTERVALS[:2] else shape[2]))
            of_sequence[name] = x[..., rows if name in INTERVALS[:2] else keys]
        if factors is not None:
            size = slice(rows.stop - rows.start), slice(keys.stop - keys.start)
            of_sequence["dropout_factors"] = factors[(d, slice(None), *size)]
        yield d, rows, keys, of_sequence


def attention_packed(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    *,
    cu_q_lengths: np.ndarray,
    cu_kv_lengths: np.ndarray,
    max_q_length: int,
    max_kv_length: int,
    **options: Any,
) -> dict[str, Any]:
    """`attention` of every sequence, for the arguments of attention_varlen()."""
    tokens, q_heads = query.shape[:2]
    results = {
        "out": np.zeros(dout.shape),
        "lse": np.full((q_heads, tokens), -np.inf),
        "dq": np.zeros(query.shape),
        "dk": np.zeros(key.shape),
        "dv": np.zeros(value.shape),
        "attended_rows": np.zeros(query.shape[:2], bool),
        "attended_keys": np.zeros(key.shape[:2], bool),
        "largest_score": 0.0,
        "squares": {"dq": np.zeros(query.shape), "dk": np.zeros(key.shape)},
    }
    if options.get("sinks") is not None:
        results["lse"][:] = np.asarray(options["sinks"], np.float64)[:, None]
    for name in TRAINABLE:
        if isinstance(options.get(name), np.ndarray):
            for of in (results, results["squares"]):
                of[f"d{name}"] = np.zeros(options[name].shape)
    shape = q_heads, tokens, key.shape[0]
    for d, rows, keys, of_sequence in sequences(cu_q_lengths, cu_kv_lengths, options, shape):
        part = attention(query[rows], key[keys], value[keys], dout[rows], dlse[:, rows], **of_sequence)
        for name in ("out", "dq", "attended_rows"):
            results[name][rows] = part[name]
        for name in ("dk", "dv", "attended_keys"):
            results[name][keys] = part[name]
        results["lse"][:, rows] = part["lse"]
        results["largest_score"] = max(results["largest_score"], part["largest_score"])
        results["squares"]["dq"][rows], results["squares"]["dk"][keys] = part["squares"]["dq"], part["squares"]["dk"]
        for name in part["squares"].keys() - {"dq", "dk"}:
            for total, x in ((results[name], part[name]), (results["squares"][name], part["squares"][name])):
                (total[d] if total.ndim == 2 else total)[...] += x
    return results


def plain_packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    cu_q_lengths: np.ndarray,
    cu_kv_lengths: np.ndarray,
    max_q_length: int,
    max_kv_length: int,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """`plain` of every sequence, for the arguments of attention_varlen()."""
    tokens, q_heads = query.shape[:2]
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    out = jnp.zeros((tokens, q_heads, value.shape[-1]), query.dtype)
    sinks = options.get("sinks")
    lse = jnp.full((q_heads, tokens), -jnp.inf, wide) if sinks is None else jnp.repeat(sinks[:, None], tokens, axis=1)
    lse = lse.at[:, int(cu_q_lengths[-1]) :].set(jax.lax.stop_gradient(lse[:, int(cu_q_lengths[-1]) :]))
    for _, rows, keys, of_sequence in sequences(cu_q_lengths, cu_kv_lengths, options, (q_heads, tokens, key.shape[0])):
        if rows.start < rows.stop and keys.start < keys.stop:
            of_rows, lse_of_rows = plain(query[rows], key[keys], value[keys], **of_sequence)
            out, lse = out.at[rows].set(of_rows), lse.at[:, rows].set(lse_of_rows)
    return out, lse
