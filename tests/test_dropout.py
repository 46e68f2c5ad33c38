"""Dropout's mask: the bits that were published for its generator, their statistics, and where it acts."""

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, Target

import jax_flash
from jax_flash._implementations import dropout

# Philox 4x32 by number of rounds, of a counter and a key of zeros, of ones, and of the digits of pi: from the known
# answers that come with Random123, the authors' own implementation.
ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN = [
    (7, ((0,) * 4, (0,) * 2), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ((ONES,) * 4, (ONES,) * 2), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, ((0,) * 4, (0,) * 2), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ((ONES,) * 4, (ONES,) * 2), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "inputs", "want"), KNOWN)
def test_known_answers(rounds: int, inputs: tuple[tuple[int, ...], ...], want: tuple[int, ...]) -> None:
    counter, key = inputs
    got = dropout.philox(tuple(map(jnp.uint32, counter)), tuple(map(jnp.uint32, key)), rounds)
    assert tuple(map(int, got)) == want
    assert tuple(map(int, oracle.philox(counter, key, rounds))) == want


SHAPE = (2, 3, 500, 700)  # batch, heads, T, S


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_mask_is_the_oracles(rate: float) -> None:
    """Made by blocks here, pair by pair there."""
    key = jax.random.key(7)
    want = oracle.factors_of_key(key, rate, SHAPE) > 0
    np.testing.assert_array_equal(jax_flash.dropout_mask(key, rate, SHAPE), want)
    # Without 64-bit integers, too.
    with jax.enable_x64(False):
        np.testing.assert_array_equal(jax_flash.dropout_mask(key, rate, SHAPE), want)


def test_mask_does_not_depend_on_lengths() -> None:
    key = jax.random.key(0)
    whole = np.asarray(jax_flash.dropout_mask(key, 0.3, (2, 3, 70, 90)))
    for q_length, kv_length in ((1, 1), (8, 90), (17, 31), (70, 33)):
        part = jax_flash.dropout_mask(key, 0.3, (2, 3, q_length, kv_length))
        np.testing.assert_array_equal(part, whole[:, :, :q_length, :kv_length])


def _deviations(counts: np.ndarray, trials: int, probability: float) -> np.ndarray:
    """The deviation of binomial counts from their mean, in standard deviations."""
    return np.abs(counts - trials * probability) / np.sqrt(trials * probability * (1 - probability))


@pytest.mark.parametrize("rate", [0.05, 0.25, 0.5, 0.9])
def test_fraction_that_is_kept(rate: float) -> None:
    """Overall, in every head, row and column: within the deviations that so many counts have."""
    kept = np.asarray(jax_flash.dropout_mask(jax.random.key(1), rate, SHAPE))
    probability = 1 - round(65536 * rate) / 65536
    _, _, q_length, kv_length = SHAPE
    assert _deviations(kept.sum(), kept.size, probability) < 4
    assert _deviations(kept.sum((2, 3)), q_length * kv_length, probability).max() < 4.5
    # 3000 rows and 4200 columns.
    assert _deviations(kept.sum(3), kv_length, probability).max() < 6
    assert _deviations(kept.sum(2), q_length, probability).max() < 6


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_pairs_are_independent(rate: float) -> None:
    """Of neighbours and of those that share a call of the generator, both are kept as often as chance has it."""
    kept = np.asarray(jax_flash.dropout_mask(jax.random.key(2), rate, SHAPE))
    probability = 1 - round(65536 * rate) / 65536
    offsets = [(0, 1), (1, 0), (1, 1), (8, 0), (0, 8), (0, 16), (0, 24), (8, 8), (16, 0), (0, 32), (16, 32)]
    for rows, columns in offsets:
        both = kept[:, :, rows:, columns:] & kept[:, :, : kept.shape[2] - rows, : kept.shape[3] - columns]
        assert _deviations(both.sum(), both.size, probability**2) < 6, (rows, columns)
    heads = kept.reshape(-1, *kept.shape[2:])
    for one, other in itertools.combinations(heads, 2):
        assert _deviations((one & other).sum(), one.size, probability**2) < 5
    other_key = np.asarray(jax_flash.dropout_mask(jax.random.key(3), rate, SHAPE))
    assert _deviations((kept & other_key).sum(), kept.size, probability**2) < 5


def test_rates_at_the_limits() -> None:
    key, shape = jax.random.key(4), (4, 600, 600)
    assert jax_flash.dropout_mask(key, 0.0, shape).all()
    assert jax_flash.dropout_mask(key, 2.0**-18, shape).all(), "rounds to 0"
    few = np.asarray(jax_flash.dropout_mask(key, 1 - 2.0**-18, shape))
    assert 0 < few.sum() < 100, "65535 of 65536 is the most that is dropped: 22 of these pairs remain"


def test_raw_keys() -> None:
    shape = (2, 20, 40)
    typed = jax_flash.dropout_mask(jax.random.key(5), 0.5, shape)
    np.testing.assert_array_equal(jax_flash.dropout_mask(jax.random.PRNGKey(5), 0.5, shape), typed)


@pytest.mark.parametrize("shape", [(20, 40), (2, -1, 40)])
def test_shape_that_is_wrong(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape must be \(\*leading, N, T, S\)"):
        jax_flash.dropout_mask(jax.random.key(0), 0.5, shape)


@pytest.mark.parametrize("target", cases.targets(lambda target: "float32" in target.dtypes))
def test_attention_drops_what_the_mask_says(target: Target) -> None:
    """With values that are unit vectors, out is the weights themselves."""
    problem = cases.problem(Case("dropout_seen", 40, 64, q_heads=2, dropout_rate=0.3, head_dim=64), "float32")
    problem.value[:] = np.eye(64, dtype=np.float32)[:, None]
    out, _ = jax.jit(cases.call(target, problem))(*problem.inputs)
    mask = jax_flash.dropout_mask(problem.dropout_key, 0.3, (2, 2, 40, 64))
    np.testing.assert_array_equal(np.swapaxes(out, 1, 2) != 0, mask)


@pytest.mark.parametrize("target", cases.targets())
def test_mean_over_keys_is_attention_without_dropout(target: Target) -> None:
    problem = cases.problem(Case("dropout_mean", 20, 30, q_heads=2, leading=(1,)), target.dtypes[0])
    attend = cases.call(target, problem, dropout_rate=0.5)
    keys = jax.random.split(jax.random.key(6), 400)
    outs = jax.jit(jax.vmap(lambda key: attend(*problem.inputs, dropout_key=key)[0]))(keys)
    mean = np.asarray(outs).astype(np.float64).mean(axis=0)
    spread = np.asarray(outs).astype(np.float64).std(axis=0) / np.sqrt(len(keys))
    assert (np.abs(mean - problem.right["out"]) / (spread + 1e-3)).max() < 5


@pytest.mark.parametrize("target", cases.targets())
def test_rate_zero_compiles_to_nothing(target: Target) -> None:
    problem = cases.problem(Case("dropout_nothing", 20, 30, causal=True), target.dtypes[0])
    programs = [
        jax.jit(cases.call(target, problem, **options)).lower(*problem.inputs).as_text()
        for options in ({}, {"dropout_rate": 0.0, "dropout_key": jax.random.key(0)})
    ]
    assert programs[0] == programs[1]
