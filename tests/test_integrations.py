"""examples/integrations: each file trains, and its attention is the framework's own, computed by this package."""

import functools
import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainers
from trainers import AttentionMask, AttentionType, Axis, NamedArray

import jax_flash

pytestmark = pytest.mark.usefixtures("as_an_example_runs")
os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported


def module(name: str) -> Any:
    """A file of examples/integrations, or a skip with the reason if what it is for is not installed."""
    framework = {"with_equinox": "equinox", "with_keras": "keras"}.get(name)
    if framework is not None:
        pytest.importorskip(framework, reason=f'{framework} is not installed: pip install ".[test]"')
    return importlib.import_module(name)


TRAINED = {
    "with_plain_jax": [],
    "with_flax_nnx": [],
    "with_flax_linen": [],
    "with_equinox": [],
    "with_jax_nn": [],
    "with_keras": [],
    "with_keras by its layer": ["--layer"],
}


@pytest.mark.parametrize("name", TRAINED)
def test_it_learns(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The task is out of reach without attention to the right token: the loss would stay at 2.77."""
    file = module(name.split()[0])
    traced = []

    def watching(*arguments: Any, **options: Any) -> Any:
        traced.append(options.get("causal"))
        return original(*arguments, **options)

    # Wherever the file's attention ends up, it is in this package, and causal.
    where = {"with_flax_nnx": "flax", "with_flax_linen": "flax", "with_jax_nn": "_dot_product"}.get(name)
    where = "_dot_product" if name == "with_keras" else where
    holder = jax_flash if where is None else importlib.import_module(f"jax_flash.{where}")
    original = holder.attention
    monkeypatch.setattr(holder, "attention", watching)
    loss = file.main(["--steps", "120", *TRAINED[name]])
    assert loss < 0.3
    assert traced
    assert all(traced)
    assert jax.nn.dot_product_attention.__module__ == "jax._src.nn.functions"


# ---- Equinox


T, S, N, WIDTH = 7, 9, 4, 16


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def integers(values: Any) -> jax.Array:
    return jnp.array(values, jnp.int32)


@pytest.fixture
def equinox() -> Any:
    return module("with_equinox").eqx


def both(equinox: Any, **options: Any) -> tuple[Any, Any]:
    """A layer of Equinox, and the same by this package."""
    layer = equinox.nn.MultiheadAttention(N, WIDTH, key=jax.random.key(0), **options)
    return layer, module("with_equinox").with_flash(layer)


EQUINOX = {
    "no mask": None,
    "mask": jnp.arange(S) <= jnp.arange(T)[:, None] + 1,
    "mask of heads": jnp.arange(S) <= jnp.arange(T)[:, None] + jnp.arange(N)[:, None, None],
}


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox_computes_the_same(equinox: Any, name: str) -> None:
    theirs, ours = both(equinox, qk_size=6, vo_size=10, use_query_bias=True, use_output_bias=True)
    q, k, v = normal(1, T, WIDTH), normal(2, S, WIDTH), normal(3, S, WIDTH)
    mask = EQUINOX[name]

    def loss(layer: Any) -> Any:
        return jnp.sin(layer(q, k, v, mask)).sum()

    np.testing.assert_allclose(ours(q, k, v, mask), theirs(q, k, v, mask), atol=1e-5)
    expected, got = equinox.filter_grad(loss)(theirs), equinox.filter_grad(loss)(ours)
    leaves = jax.tree.leaves(expected)
    assert len(leaves) == 6
    for x, y in zip(jax.tree.leaves(got), leaves, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_equinox_heads_are_processed(equinox: Any) -> None:
    theirs, ours = both(equinox)
    rotary = equinox.nn.RotaryPositionalEmbedding(WIDTH // N)

    def process(q: Any, k: Any, v: Any) -> Any:
        return jax.vmap(rotary, in_axes=1, out_axes=1)(q), jax.vmap(rotary, in_axes=1, out_axes=1)(k), v

    x = normal(1, T, WIDTH)
    expected = theirs(x, x, x, process_heads=process)
    np.testing.assert_allclose(ours(x, x, x, process_heads=process), expected, atol=1e-5)
    assert np.abs(expected - theirs(x, x, x)).max() > 0.01


def test_equinox_dropout(equinox: Any) -> None:
    theirs, ours = both(equinox, dropout_p=0.25)
    x = normal(1, T, WIDTH)
    with pytest.raises(ValueError, match=r"key must be a JAX key if dropout is 0\.25 outside of inference, got None"):
        ours(x, x, x)
    plain = theirs(x, x, x, inference=True)
    np.testing.assert_allclose(ours(x, x, x, inference=True), plain, atol=1e-5)
    np.testing.assert_allclose(equinox.nn.inference_mode(ours)(x, x, x), plain, atol=1e-5)
    # In a batch by vmap every entry drops other pairs; their mean is what no dropout gives.
    keys = jax.random.split(jax.random.key(5), 4000)
    dropped = jax.jit(jax.vmap(lambda key: ours(x, x, x, key=key)))(keys)
    assert np.abs(dropped[0] - dropped[1]).max() > 0.01
    np.testing.assert_allclose(dropped.mean(0), plain, atol=6 * float(dropped.std(0).max()) / 4000**0.5)


def test_equinox_keeps_the_parameters_and_the_rest_of_a_model(equinox: Any) -> None:
    file = module("with_equinox")
    model = file.Model(jax.random.key(0))
    flash = file.with_flash(model, causal=True, window=(3, 0))
    for x, y in zip(jax.tree.leaves(flash), jax.tree.leaves(model), strict=True):
        assert x is y
    assert isinstance(flash.attention, file.FlashAttention)
    assert type(flash.tokens) is equinox.nn.Embedding
    tokens = jnp.arange(file.LENGTH) % 5
    row, column = jnp.arange(file.LENGTH)[:, None], jnp.arange(file.LENGTH)
    layer = model.attention
    masked = equinox.tree_at(lambda m: m.attention, model, lambda *x: layer(*x, (column <= row) & (column >= row - 3)))
    np.testing.assert_allclose(flash(tokens), masked(tokens), atol=1e-4)


# ---- Keras


@pytest.fixture
def keras() -> Any:
    return module("with_keras").keras


@pytest.mark.parametrize("layer", ["MultiHeadAttention", "GroupQueryAttention"])
def test_keras_layers_compute_the_same_under_the_patch(keras: Any, layer: str) -> None:
    sizes = (N, 8) if layer == "MultiHeadAttention" else (8, N, 2)
    attention = getattr(keras.layers, layer)(*sizes)
    x, mask = np.asarray(normal(0, 2, T, WIDTH)), np.tril(np.ones((2, T, T), bool))
    calls: dict[str, Any] = {
        "plain": {},
        "causal": {"use_causal_mask": True},
        "mask": {"attention_mask": mask},
    }
    expected = {name: np.asarray(attention(x, x, **options)) for name, options in calls.items()}
    assert np.abs(expected["plain"] - expected["causal"]).max() > 0.001
    for name, options in calls.items():
        with jax_flash.patch_jax_nn() as patch:
            got = np.asarray(attention(x, x, **options))
        assert (patch.served, patch.left) == (1, []), name
        np.testing.assert_allclose(got, expected[name], atol=1e-5)


def test_keras_computes_dropout_itself(keras: Any) -> None:
    """What docs/integrations/keras.md says of it: the patch isn't reached, and nothing fails."""
    attention, x = keras.layers.MultiHeadAttention(N, 8, dropout=0.5), np.asarray(normal(0, 2, T, WIDTH))
    with jax_flash.patch_jax_nn() as patch:
        attention(x, x, training=True)
        attention(x, x, return_attention_scores=True)
    assert (patch.served, patch.left) == (0, [])


def test_the_layer_for_keras(keras: Any) -> None:
    """Against Keras's own layer of grouped heads with the same weights; windows against a mask."""
    file = module("with_keras")
    x = np.asarray(normal(0, 2, T, WIDTH))
    theirs = keras.layers.GroupQueryAttention(8, N, 2, use_bias=False)
    theirs(x, x)
    for window in (None, 3):
        ours = file.FlashAttention(N, 8, num_kv_heads=2, window=window)
        ours(x)
        ours.set_weights([np.asarray(w.value) for w in theirs.weights])
        row, column = np.arange(T)[:, None], np.arange(T)
        mask = (column <= row) & (column > row - (window or T))
        expected = theirs(x, x, attention_mask=np.broadcast_to(mask, (2, T, T)))
        np.testing.assert_allclose(ours(x), expected, atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)  # Keras's saving
def test_the_layer_for_keras_drops_in_training_only_and_is_saved(keras: Any, tmp_path: Any) -> None:
    file = module("with_keras")
    x = np.asarray(normal(0, 2, T, WIDTH))
    layer = file.FlashAttention(N, 8, dropout=0.5, causal=False)
    model = keras.Sequential([keras.Input((T, WIDTH)), layer])
    np.testing.assert_array_equal(model(x), model(x))
    first, second = np.asarray(model(x, training=True)), np.asarray(model(x, training=True))
    assert np.abs(first - second).max() > 0.01
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(x), model(x), atol=1e-6)
    assert loaded.layers[-1].dropout == 0.5


# ---- MaxText


def of_maxtext(op: Any, **options: Any) -> jax.Array:
    q, k, v = 0.3 * normal(1, 2, T, N, 8), normal(2, 2, S, 2, 8), normal(3, 2, S, 2, 8)
    given = {"decoder_segment_ids": None, "inputs_positions": None, "model_mode": "train", **options}
    if given.pop("self_attention", True):
        k, v = k[:, :T], v[:, :T]
    return op(q, k, v, **given)


PACKED = integers([[1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 3, 3, -1, -1]])
MAXTEXT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "prefill": ({}, {"model_mode": "prefill"}),
    "full": ({"attention_type": AttentionType.FULL}, {"self_attention": False}),
    "packed": ({}, {"decoder_segment_ids": PACKED, "inputs_positions": integers([[0, 1, 2, 0, 1, 2, 0]] * 2)}),
    "packed, full": ({"attention_type": AttentionType.FULL}, {"decoder_segment_ids": PACKED}),
    "window": (
        {"attention_type": AttentionType.LOCAL_SLIDING, "sliding_window_size": 3},
        {"decoder_segment_ids": PACKED},
    ),
    "soft cap": ({"attn_logits_soft_cap": 0.5}, {}),
    "sinks": ({}, {"sinks": jnp.array([0.5, -0.5, 1.0, 2.0], jnp.float32)}),
    "ids of keys": (
        {"attention_type": AttentionType.FULL},
        {
            "self_attention": False,
            "decoder_segment_ids": PACKED[:, :T],
            "decoder_segment_ids_kv": integers([[1, 1, 2, 2, 2, 0, 0, 0, 0], [1, 2, 2, 3, 3, 3, -1, -1, -1]]),
        },
    ),
    "chunks": (
        {},
        {"self_attention": False, "model_mode": "prefill", "previous_chunk": jnp.zeros((2, S - T, 2, 8), jnp.float32)},
    ),
    "packed chunks": (
        {},
        {
            "self_attention": False,
            "model_mode": "prefill",
            "previous_chunk": jnp.zeros((2, S - T, 2, 8), jnp.float32),
            "decoder_segment_ids": integers([[1] * 4 + [2] * 5, [1] * 9]),
        },
    ),
}


@pytest.mark.parametrize("name", MAXTEXT)
def test_maxtext_computes_the_same(name: str) -> None:
    settings, options = MAXTEXT[name]
    attention_op = trainers.attention_op()
    op = attention_op(**settings)
    expected = of_maxtext(op, **options)
    module("maxtext_attention").install(attention_op)
    got = of_maxtext(op, **options)
    assert op.calls == 1
    ids = options.get("decoder_segment_ids_kv", options.get("decoder_segment_ids"))
    if ids is not None and (ids < 0).any():  # rows of padding: 0 here, the mean of value in MaxText
        padding = np.asarray(options["decoder_segment_ids"]) < 0
        np.testing.assert_array_equal(np.asarray(got)[padding], 0)
        got, expected = np.asarray(got)[~padding], np.asarray(expected)[~padding]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_maxtext_gradients() -> None:
    attention_op = trainers.attention_op()
    op = attention_op(attn_logits_soft_cap=0.7)
    q, k, v = 0.3 * normal(1, 2, T, N, 8), normal(2, 2, T, 2, 8), normal(3, 2, T, 2, 8)

    def loss(*given: Any) -> Any:
        out = op(*given, PACKED.clip(0), None, "train")
        return jnp.sin(out).sum()

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    module("maxtext_attention").install(attention_op)
    jax.clear_caches()
    for x, y in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert op.calls == 1


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({}, {"model_mode": "autoregressive"}, "decoding"),
        ({"attention_type": AttentionType.CHUNK}, {}, "attention_type chunk"),
        ({"dropout_rate": 0.1}, {}, "dropout_rate"),
        ({"devices": 2}, {}, "devices"),
        ({"config": type("Config", (), {"moba": True})}, {}, "moba"),
        ({}, {"record_max_logits": True}, "record_max_logits"),
        ({}, {"bidirectional_mask": jnp.zeros((2, T), bool)}, "bidirectional_mask"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_left_to_maxtext(settings: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    attention_op = trainers.attention_op()
    op, file = attention_op(**settings), module("maxtext_attention")
    expected = of_maxtext(op, **options)
    given = {"key": jnp.zeros(1), "value": jnp.zeros(1), "model_mode": "train", **options}
    assert reason in file.left_to_maxtext(op, given)
    file.install(attention_op)
    file.install(attention_op)  # once is enough
    np.testing.assert_array_equal(of_maxtext(op, **options), expected)
    assert op.calls == 2


# ---- levanter


BATCH, HEADS, GROUP = Axis("batch", 2), Axis("kv_head", 2), Axis("group", 3)
POSITION, KEY_POSITION, DIM = Axis("position", T), Axis("key_position", S), Axis("head_size", 8)


def named(seed: int, *axes: Axis) -> NamedArray:
    return NamedArray(normal(seed, *(axis.size for axis in axes)), axes)


def ids(*rows: list[int], axis: Axis = POSITION) -> NamedArray:
    return NamedArray(integers(rows), (BATCH, axis))


SEGMENTS = (
    ids([1, 1, 1, 2, 2, 2, 3], [1, 2, 2, 2, 2, 3, 3]),
    ids([1, 1, 2, 2, 2, 3, 3, 3, 3], [1, 1, 2, 2, 2, 2, 2, 3, 3], axis=KEY_POSITION),
)
OF_KEYS_UNDER_THE_NAME_OF_ROWS = NamedArray(SEGMENTS[1].array, (BATCH, Axis("position", S)))
KEPT = NamedArray(jnp.arange(T)[:, None] + 3 > jnp.arange(S), (POSITION, KEY_POSITION))
LEVANTER: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": AttentionMask(is_causal=True)},
    "offset": {"mask": AttentionMask(is_causal=True, causal_offset=NamedArray(integers(2), ()))},
    "offsets": {"mask": AttentionMask(is_causal=True, causal_offset=NamedArray(integers([2, 0]), (BATCH,)))},
    "window": {"mask": AttentionMask(is_causal=True, sliding_window=3)},
    "window alone": {"mask": AttentionMask(sliding_window=3)},
    "explicit": {"mask": AttentionMask(is_causal=True, explicit_mask=KEPT)},
    "array": {"mask": KEPT},
    "array of heads": {"mask": NamedArray(normal(7, 2, T, S) > -1.0, (HEADS, POSITION, KEY_POSITION))},
    "segments": {"mask": AttentionMask(segment_ids=SEGMENTS)},
    "segments, keys named as rows": {
        "mask": AttentionMask(segment_ids=(SEGMENTS[0], OF_KEYS_UNDER_THE_NAME_OF_ROWS)),
    },
    "bias": {"bias": named(4, GROUP, POSITION, KEY_POSITION)},
    "bias of batches": {"bias": named(4, BATCH, KEY_POSITION)},
    "soft cap": {"logits_soft_cap": 0.5, "mask": AttentionMask(is_causal=True)},
    "scale": {"scaling_factor": 0.7},
    "sinks": {"attn_sink": named(5, HEADS, GROUP)},
    "axes by name": {"names": True},
}
ORDERS = {
    "heads before positions": (
        (BATCH, HEADS, GROUP, POSITION, DIM),
        (BATCH, HEADS, KEY_POSITION, DIM),
        (BATCH, HEADS, KEY_POSITION, Axis("value_size", 5)),
    ),
    "positions before heads": (
        (BATCH, POSITION, HEADS, GROUP, DIM),
        (BATCH, KEY_POSITION, HEADS, DIM),
        (BATCH, KEY_POSITION, HEADS, DIM),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LEVANTER)
def test_levanter_computes_the_same(name: str, order: str) -> None:
    options = dict(LEVANTER[name])
    axes = (POSITION, KEY_POSITION, DIM)
    axes = tuple(axis.name for axis in axes) if options.pop("names", False) else axes
    arrays = tuple(named(seed, *axes) for seed, axes in enumerate(ORDERS[order]))
    levanter = trainers.Levanter()
    expected = levanter.dot_product_attention(*axes, *arrays, **options)
    got = module("levanter_attention").over(levanter.dot_product_attention)(*axes, *arrays, **options)
    assert levanter.calls == 1
    assert got.axes == expected.axes
    if "segments" in name:  # a row may keep no key there: 0 here, the mean of value in levanter
        assert (np.asarray(got.array) != 0).any(-1).all()
    np.testing.assert_allclose(got.array, expected.array, atol=1e-5)


def check_of_levanter(*given: Any) -> None:
    """That ours serves the call, with the result and the axes of levanter's own function."""
    levanter = trainers.Levanter()
    expected = levanter.dot_product_attention(*given)
    got = module("levanter_attention").over(levanter.dot_product_attention)(*given)
    assert (levanter.calls, got.axes) == (1, expected.axes)
    np.testing.assert_allclose(got.array, expected.array, atol=1e-5)


def test_levanter_without_a_batch() -> None:
    arrays = (
        named(0, HEADS, GROUP, POSITION, DIM),
        named(1, HEADS, KEY_POSITION, DIM),
        named(2, HEADS, KEY_POSITION, DIM),
    )
    check_of_levanter(POSITION, KEY_POSITION, DIM, *arrays, AttentionMask(is_causal=True))


def test_levanter_with_a_batch_alone() -> None:
    """No axis of heads: the last shared axis has segment ids, so it is one of the batch."""
    arrays = named(0, BATCH, POSITION, DIM), named(1, BATCH, KEY_POSITION, DIM), named(2, BATCH, KEY_POSITION, DIM)
    check_of_levanter(POSITION, KEY_POSITION, DIM, *arrays, AttentionMask(segment_ids=SEGMENTS))


def test_levanter_drops_in_training_only() -> None:
    attend = module("levanter_attention").over(trainers.Levanter().dot_product_attention)
    arrays = tuple(named(seed, *axes) for seed, axes in enumerate(ORDERS["heads before positions"]))
    call = functools.partial(attend, POSITION, KEY_POSITION, DIM, *arrays, dropout=0.5, prng=jax.random.key(0))
    assert np.abs(call(inference=False).array - call().array).max() > 0.01
    np.testing.assert_array_equal(call().array, attend(POSITION, KEY_POSITION, DIM, *arrays).array)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logits_soft_cap": 1.0, "bias": named(4, POSITION, KEY_POSITION)}, "levanter caps the sum"),
        (
            {"mask": AttentionMask(is_causal=True, causal_offset=NamedArray(integers(1), ()), sliding_window=4)},
            "levanter's window does not move",
        ),
    ],
    ids=["soft cap of a sum", "window and offset"],
)
def test_what_is_left_to_levanter(options: dict[str, Any], reason: str) -> None:
    levanter, file = trainers.Levanter(), module("levanter_attention")
    arrays = tuple(named(seed, *axes) for seed, axes in enumerate(ORDERS["positions before heads"]))
    expected = levanter.dot_product_attention(POSITION, KEY_POSITION, DIM, *arrays, **options)
    given = {"mask": None, "bias": None, "logits_soft_cap": None, **options}
    given |= dict(
        zip(("QPos", "KPos", "Key", "query", "key", "value"), (POSITION, KEY_POSITION, DIM, *arrays), strict=True)
    )
    assert file.left_to_levanter(given).startswith(reason)
    got = file.over(levanter.dot_product_attention)(POSITION, KEY_POSITION, DIM, *arrays, **options)
    assert levanter.calls == 2
    np.testing.assert_array_equal(got.array, expected.array)
