"""The Llama example computes what Hugging Face's does, reads and writes its files, and learns through interruptions."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

pytestmark = pytest.mark.usefixtures("as_an_example_runs")
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
needs_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="compares with the CPU kernel: JAX runs elsewhere"
)

# Every size differs from the others, so that none can stand for another.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "torch_dtype": "float32",
}
# With 16 positions of pretraining, of the four frequencies some are kept, some divided and some between.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "head_dim of the width": {"head_dim": None, "hidden_size": 32},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3 as transformers 5 writes it": {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 300.0}},
}


@pytest.fixture(scope="module")
def example():
    """The command, with the modules of its package as attributes."""
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("finetune_llama", EXAMPLES / "finetune_llama.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    from llama import model

    yield types.SimpleNamespace(
        command=module,
        main=module.main,
        model=model,
        checkpoint=module.checkpoint,
        data=module.data,
        lora=module.lora,
        training=module.training,
        pretraining=module.pretraining,
    )
    sys.path.remove(str(EXAMPLES))
    for name in [name for name in sys.modules if name in ("finetune_llama", "llama") or name.startswith("llama.")]:
        del sys.modules[name]


# ---- A checkpoint that the test makes, and the model in NumPy


def config_of(**changes):
    return {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}


def tensors_of(config, seed=0):
    """Random weights by the names and in the shapes of Hugging Face's Llama."""
    random = np.random.default_rng(seed)
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", width // heads)
    kv_width = config.get("num_key_value_heads", heads) * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.post_attention_layernorm.weight": (width,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head_dim, width),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, width),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, width),
            f"{prefix}.self_attn.o_proj.weight": (width, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": (inner, width),
            f"{prefix}.mlp.up_proj.weight": (inner, width),
            f"{prefix}.mlp.down_proj.weight": (width, inner),
        }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    # So large that attention and the gates are far from uniform.
    return {
        name: (random.standard_normal(shape) * 1.5 * shape[-1] ** -0.5 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder, config, tensors, shards=1):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]  # the parts of a layer lie in different files
        safetensors.numpy.save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(example, folder, **options):
    config = example.checkpoint.load_config(folder)
    return example.checkpoint.load_model(
        folder, config, **{"dtype": "float32", "param_dtype": "float32", "remat": "none", **options}
    )


def numpy_logits(config, tensors, tokens):
    """Llama in float64 after its papers, of tokens [T]: one head at a time, rotary as complex numbers."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    kv_heads = config.get("num_key_value_heads", heads)
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    length = len(tokens)

    turns = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "linear":
            frequency /= rope["factor"]
        elif kind == "llama3":
            wavelength, context = 2 * np.pi / frequency, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > context / low:
                frequency /= rope["factor"]
            elif wavelength > context / high:
                smooth = (context / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        turns.append(np.exp(1j * frequency * np.arange(length)))
    turns = np.stack(turns, axis=1)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[name + ".weight"]

    def rotate(x):
        pairs = (x[:, : head_dim // 2] + 1j * x[:, head_dim // 2 :]) * turns
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"

        def linear(x, name, prefix=prefix):
            return x @ weights[f"{prefix}.{name}.weight"].T

        y = norm(x, f"{prefix}.input_layernorm")
        query, key, value = (
            np.split(linear(y, f"self_attn.{name}_proj"), count, axis=1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        outs = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = rotate(query[head]) @ rotate(key[shared]).T / np.sqrt(head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            outs.append(scores / scores.sum(axis=1, keepdims=True) @ value[shared])
        x = x + linear(np.concatenate(outs, axis=1), "self_attn.o_proj")
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate = linear(y, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    read_out = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return norm(x, "model.norm") @ weights[read_out].T


def random_tokens(shape, seed=0):
    return np.random.default_rng(seed).integers(3, CONFIG["vocab_size"], shape).astype(np.int32)


# ---- The model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_numpy(example, tmp_path, variant):
    config = config_of(**VARIANTS[variant])
    tensors = tensors_of(config)
    model = load(example, write_checkpoint(tmp_path, config, tensors, shards=3))
    tokens = random_tokens((2, 48))
    logits = jax.jit(lambda tokens: model(tokens))(tokens)
    expected = np.stack([numpy_logits(config, tensors, row) for row in tokens])
    assert logits.dtype == jnp.float32
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)


def test_variants_of_rotary_positions_differ(example, tmp_path):
    """Or else the tests above could not tell them apart."""
    tokens, results = random_tokens(48), []
    for name in ("gqa", "linear", "llama3"):
        config = config_of(**VARIANTS[name])
        results.append(numpy_logits(config, tensors_of(config), tokens))
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(results[left] - results[right]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(example, tmp_path, variant):
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install '.[transformers]'")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    config = config_of(**VARIANTS[variant])
    write_checkpoint(tmp_path, config, tensors_of(config), shards=3)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = random_tokens((2, 48))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(load(example, tmp_path)(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", ["ours", "xla"])
def test_packed_sequences_are_computed_as_alone(example, tmp_path, kind):
    config = config_of()
    attention = example.model.Attention(kind)
    model = load(example, write_checkpoint(tmp_path, config, tensors_of(config)), attention=attention)
    lengths = [5, 1, 17, 9]
    alone = [random_tokens((1, length), seed=length) for length in lengths]
    tokens = np.concatenate(alone, axis=1)
    segments = np.repeat(np.arange(1, 5), lengths)[None].astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths])[None].astype(np.int32)
    packed = model(tokens, positions, segments)
    np.testing.assert_allclose(packed, np.concatenate([model(t) for t in alone], axis=1), rtol=0, atol=1e-4)
    # Sequences that saw each other would differ.
    assert np.abs(packed - model(tokens, positions)).max() > 0.1


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_compute_nearly_the_same(example, tmp_path, dtype):
    config = config_of()
    folder = write_checkpoint(tmp_path, config, tensors_of(config))
    tokens = random_tokens((2, 32))
    exact, narrow = load(example, folder)(tokens), load(example, folder, dtype=dtype, param_dtype=dtype)(tokens)
    assert narrow.dtype == jnp.float32
    error = np.sqrt(np.mean((narrow - exact) ** 2)) / exact.std()
    assert 0.5 * jnp.finfo(dtype).eps < error < 8 * jnp.finfo(dtype).eps


def test_decoding_gives_the_logits_of_a_whole_pass(example, tmp_path):
    config = config_of(**VARIANTS["llama3"])
    model = load(example, write_checkpoint(tmp_path, config, tensors_of(config)))
    tokens = random_tokens((2, 12))
    whole = model(tokens)
    caches, parts = model.empty_caches(2, 16), []  # with room to spare, which the mask must hide
    for start, stop in [(0, 5), (5, 6), (6, 11), (11, 12)]:
        logits, caches = model.decode(tokens[:, start:stop], start, caches)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=0, atol=1e-4)

    generated = example.model.generate(*split(model), tokens, jax.random.key(0), count=6, temperature=0.0)
    everything = jnp.concatenate([tokens, generated], axis=1)
    np.testing.assert_array_equal(generated, model(everything[:, :-1])[:, 11:].argmax(axis=-1))


def split(model, *filters):
    graphdef, *states = nnx.split(model, *filters)
    return graphdef, tuple(states)


@needs_cpu
def test_remat_says_how_often_attention_runs_and_not_what_it_gives(example, tmp_path):
    config = config_of()
    folder = write_checkpoint(tmp_path, config, tensors_of(config))
    rows = jax.tree.map(jnp.asarray, example.data.full_rows(random_tokens((2, 17))))
    calls, gradients = {}, {}
    for remat in ("none", "attention", "full"):
        graphdef, (params,) = split(load(example, folder, remat=remat))

        @jax.jit
        def gradient(params, graphdef=graphdef):
            return jax.grad(
                lambda params: example.training.summed_loss(nnx.merge(graphdef, params), rows, segmented=True)
            )(params)

        calls[remat] = gradient.lower(params).as_text().count("@jax_flash_forward")
        gradients[remat] = gradient(params)
    layers = config["num_hidden_layers"]
    assert calls == {"none": layers, "attention": layers, "full": 2 * layers}
    for remat in ("attention", "full"):
        for got, expected in zip(*map(jax.tree.leaves, (gradients[remat], gradients["none"])), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type must be 'llama', got 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"hidden_size": None}, "the configuration must have hidden_size, got none"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"vocab_size": "96"}, "vocab_size must be an integer of at least 1, got '96'"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads 3, got 4"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads must be an integer of at least 1, got 0"),
        (
            {"hidden_size": 26, "head_dim": None},
            "hidden_size must be a multiple of num_attention_heads 4 where head_dim is not given, got 26",
        ),
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0, got 0"),
        ({"eos_token_id": 96}, "must be integers below vocab_size 96, got 96"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type must be 'default', 'linear' or 'llama3', got 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' must come with factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor of rope scaling must be a number > 0, got -1"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be above low_freq_factor 1.0"),
    ],
)
def test_configurations_that_it_does_not_compute_are_named(example, tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(config_of(**changes)))
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        example.checkpoint.load_config(tmp_path)
    assert message in str(error.value)


# ---- Checkpoints


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_survive_loading_and_saving(example, tmp_path, shards, dtype):
    config = config_of()
    tensors = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors_of(config).items()}
    folder = write_checkpoint(tmp_path / "in", config, tensors, shards)
    model = load(example, folder, dtype=dtype, param_dtype=dtype)
    size = sum(tensor.nbytes for tensor in tensors.values())
    limit = size if shards == 1 else size // 3
    (tmp_path / "out").mkdir()
    example.checkpoint.save_model(tmp_path / "out", model, {**config, "mine": 1}, shard_bytes=limit)

    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (shards == 1)
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (shards > 1)
    found = {}
    for file in files:
        content = safetensors.numpy.load_file(file)
        assert file.stat().st_size < limit + 10_000
        assert shards == 1 or {json.loads(index.read_text())["weight_map"][name] for name in content} == {file.name}
        found |= content
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)
    if shards > 1:
        assert json.loads(index.read_text())["metadata"]["total_size"] == size
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "mine": 1, "torch_dtype": dtype}


def test_configurations_survive_saving(example):
    for changes in VARIANTS.values():
        config = example.model.LlamaConfig.from_json(config_of(**changes))
        assert example.model.LlamaConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def without(name):
    return lambda tensors: tensors.pop(name)


def replaced(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(UP), f"lacks 1 of the model's 21 tensors: {UP}"),
        (without("lm_head.weight"), "lacks 1 of the model's 21 tensors: lm_head.weight"),
        (replaced(UP, np.zeros((24, 40), np.float32)), f"{UP} must have shape (40, 24), got (24, 40)"),
        (replaced(NORM, np.zeros((25,), np.float32)), f"{NORM} must have shape (24,), got (25,)"),
        (replaced(NORM, np.zeros((24,), np.int8)), f"{NORM} must be one of BF16, F16, F32, got I8"),
        (
            replaced("model.layers.2.mlp.up_proj.weight", np.zeros((40, 24), np.float32)),
            "has 1 tensors that config.json has no place for: model.layers.2.mlp.up_proj.weight",
        ),
    ],
)
def test_wrong_tensors_are_named(example, tmp_path, change, message):
    config = config_of()
    tensors = tensors_of(config)
    change(tensors)
    write_checkpoint(tmp_path, config, tensors, shards=2)
    with pytest.raises(ValueError, match=r".") as error:
        load(example, tmp_path)
    assert message in str(error.value)


def test_tensors_without_a_part_in_the_model_are_ignored(example, tmp_path):
    config = config_of(tie_word_embeddings=True)
    tensors = tensors_of(config)
    tokens = random_tokens((1, 8))
    expected = load(example, write_checkpoint(tmp_path / "a", config, tensors))(tokens)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    np.testing.assert_array_equal(load(example, write_checkpoint(tmp_path / "b", config, tensors))(tokens), expected)


def test_broken_files_are_named(example, tmp_path):
    config = config_of()
    folder = write_checkpoint(tmp_path, config, tensors_of(config), shards=2)
    second, index = folder / "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
    whole, listing = second.read_bytes(), index.read_text()

    def message():
        with pytest.raises(ValueError, match=r".") as error:
            load(example, folder)
        return str(error.value)

    second.write_bytes(whole[:100])  # as an interrupted download leaves it
    assert f"{second} is no safetensors file" in message()
    second.unlink()
    assert f"names {second.name}, which {folder} does not hold" in message()
    second.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    assert f"which {index.name} says it holds" in message()
    index.write_text(listing.replace(second.name, f"../{second.name}"))
    assert f"must name files beside it, got '../{second.name}'" in message()
    index.write_text("{}")
    assert "must have a weight_map from tensors to files, got None" in message()
    index.write_text("no")
    assert f"{index} is no JSON" in message()
    index.unlink()
    assert "must hold model.safetensors or model.safetensors.index.json, got neither" in message()


def test_a_folder_gets_its_name_when_it_is_complete(example, tmp_path):
    out = tmp_path / "deep" / "out"

    def write_half():
        with example.checkpoint.new_folder(out) as folder:
            (folder / "half").write_text("")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert list(out.parent.iterdir()) == []
    with example.checkpoint.new_folder(out) as folder:
        (folder / "whole").write_text("")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["whole"]
    with pytest.raises(ValueError, match="--out must name a folder that is new or empty"):
        example.checkpoint.check_new(out)


# ---- LoRA


def adapted(example, folder, lora=None, trained=True, **options):
    """A model with adapters whose B is not 0 if ``trained``."""
    model = load(example, folder, **options)
    lora = lora or example.lora.LoRA(3, 6.0)
    example.lora.add_lora(model, lora, rngs=nnx.Rngs(5))
    if trained:
        params = nnx.state(model, nnx.LoRAParam)
        random = np.random.default_rng(1)
        nnx.update(model, jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape) * 0.3, p.dtype), params))
    return model, lora


def test_lora_begins_as_the_base_model_and_ends_in_its_weights(example, tmp_path):
    config = config_of()
    folder = write_checkpoint(tmp_path, config, tensors_of(config))
    tokens = random_tokens((2, 20))
    base = load(example, folder)(tokens)
    fresh, _ = adapted(example, folder, trained=False)
    np.testing.assert_array_equal(fresh(tokens), base)
    a, b = fresh.layers[0].mlp.down_proj.lora_a[...], fresh.layers[0].mlp.down_proj.lora_b[...]
    assert a.shape == (40, 3)
    assert 0.5 * 40**-0.5 < jnp.abs(a).max() <= 40**-0.5
    assert b.shape == (3, 24)
    assert not b.any()

    trained, _ = adapted(example, folder)
    logits = trained(tokens)
    assert jnp.abs(logits - base).max() > 0.5
    example.lora.merge_lora(trained)
    assert example.model.count_parameters(trained, nnx.LoRAParam) == 0
    np.testing.assert_allclose(trained(tokens), logits, rtol=0, atol=1e-4)


def test_adapters_have_the_files_and_names_of_peft(example, tmp_path):
    config = config_of()
    folder = write_checkpoint(tmp_path / "base", config, tensors_of(config))
    model, lora = adapted(example, folder, example.lora.LoRA(3, 6.0, ("v_proj", "q_proj", "down_proj")))
    example.lora.save_adapter(tmp_path / "adapter", model, lora, str(folder))

    tensors = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    sizes = {"self_attn.q_proj": (24, 32), "self_attn.v_proj": (24, 16), "mlp.down_proj": (40, 24)}
    expected = {}
    for layer in range(2):
        for name, (inputs, outputs) in sizes.items():
            expected[f"{prefix}.{layer}.{name}.lora_A.weight"] = (3, inputs)
            expected[f"{prefix}.{layer}.{name}.lora_B.weight"] = (outputs, 3)
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}

    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["peft_type"] == "LORA"
    assert (written["r"], written["lora_alpha"]) == (3, 6.0)
    assert written["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert written["base_model_name_or_path"] == str(folder)

    # W + alpha / r * B A, in NumPy, by the names in the file.
    merged = tensors_of(config)
    for name in expected:
        if name.endswith("lora_A.weight"):
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            merged[target] = merged[target] + 2 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    tokens = random_tokens((1, 20))
    np.testing.assert_allclose(model(tokens)[0], numpy_logits(config, merged, tokens[0]), rtol=0, atol=2e-4)

    again = load(example, folder)
    assert example.lora.load_adapter(tmp_path / "adapter", again) == lora._replace(
        targets=("q_proj", "v_proj", "down_proj")
    )
    np.testing.assert_array_equal(again(tokens), model(tokens))


# The newest PEFT uses what the newest transformers deprecates.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_peft_reads_the_adapters(example, tmp_path):
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install '.[transformers]'")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[transformers]'")
    config = config_of()
    folder = write_checkpoint(tmp_path / "base", config, tensors_of(config))
    model, lora = adapted(example, folder)
    example.lora.save_adapter(tmp_path / "adapter", model, lora, str(folder))
    theirs = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(folder), str(tmp_path / "adapter")
    )
    tokens = random_tokens((2, 20))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(model(tokens), expected, rtol=0, atol=1e-4)

    # And the other way round: what PEFT writes is read here.
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = load(example, folder)
    example.lora.load_adapter(tmp_path / "theirs", again)
    np.testing.assert_array_equal(again(tokens), model(tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora must be False, got True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be None, got ['lm_head']"),
        ({"target_modules": "all-linear"}, "target_modules must be a list of names, got 'all-linear'"),
        ({"target_modules": ["lm_head"]}, "the targets of LoRA must be among q_proj"),
        ({"target_modules": ["q_proj"]}, "must hold the 4 tensors of this model's adapters, got 0 missing [] and 24"),
        ({"r": 0}, "the rank of LoRA must be an integer of at least 1, got 0"),
        ({"r": 4}, "must have shape (4, 24), got (3, 24)"),
        ({"lora_alpha": -1}, "alpha of LoRA must be a number > 0, got -1"),
        ({"r": None}, "it must have r, got none"),
    ],
)
def test_adapters_that_do_not_fit_are_named(example, tmp_path, changes, message):
    config = config_of()
    folder = write_checkpoint(tmp_path, config, tensors_of(config))
    model, lora = adapted(example, folder)
    example.lora.save_adapter(tmp_path, model, lora, "")
    path = tmp_path / "adapter_config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if name != "r" or value is not None}))
    with pytest.raises(ValueError, match=r".") as error:
        example.lora.load_adapter(tmp_path, load(example, folder))
    assert message in str(error.value)


def test_sizes_of_7b_are_those_of_the_document(example):
    """Llama 2 7B; and rank 16 trains the 39,976,960 parameters of the run that this example follows."""
    config = example.checkpoint.load_config(EXAMPLES / "llama" / "llama2-7b.json")

    def make():
        model = example.model.Llama(config, dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(0))
        example.lora.add_lora(model, example.lora.LoRA(16, 16.0), rngs=nnx.Rngs(1))
        return model

    model = nnx.eval_shape(make)
    lora = example.model.count_parameters(model, nnx.LoRAParam)
    assert lora == 39_976_960
    assert example.model.count_parameters(model) - lora == 6_738_415_616


# ---- Data


def sequences_of(example, *sizes):
    """Sequences of (prompt, answer) tokens, each token another number."""
    numbers = iter(range(3, 10_000))
    return [example.data.Sequence([next(numbers) for _ in range(prompt + answer)], prompt) for prompt, answer in sizes]


@pytest.mark.parametrize("packing", [False, True])
def test_rows_hold_every_sequence_and_only_answers_count(example, packing):
    sequences = sequences_of(example, (3, 2), (1, 4), (4, 4), (2, 1), (0, 3))
    rows, summary = example.data.make_rows(sequences, 8, packing=packing)
    assert rows.tokens.shape == ((3 if packing else 5), 8)
    assert "5 examples" in summary
    assert "longer" not in summary
    found = []
    for tokens, targets, weights, segments, positions in zip(*rows, strict=True):
        for number in range(1, segments.max() + 1):
            (places,) = np.nonzero(segments == number)
            np.testing.assert_array_equal(np.diff(places), 1)
            np.testing.assert_array_equal(positions[places], np.arange(len(places)))
            whole = [tokens[places[0]], *targets[places]]
            np.testing.assert_array_equal(tokens[places], whole[:-1])
            # Tokens are numbered through, so the targets that count are known by their number.
            found.append((whole, targets[places][weights[places] == 1].tolist()))
        assert not weights[segments == 0].any()
    expected = [(s.tokens, s.tokens[max(s.prompt_length, 1) :]) for s in sequences]
    assert sorted(found) == sorted(expected)


def test_long_examples_lose_their_end_or_are_left_out(example):
    rows, summary = example.data.make_rows(sequences_of(example, (3, 20), (9, 5), (8, 5)), 8, packing=False)
    assert rows.weights.sum(axis=1).tolist() == [6, 1]
    assert "2 examples in 2 rows of 8 tokens, 100% of them used" in summary
    assert "3 were longer and lost their end" in summary
    assert "1 whose prompt fills a row are left out" in summary
    with pytest.raises(ValueError, match="--length 8 leaves no token of any answer"):
        example.data.make_rows(sequences_of(example, (9, 5)), 8, packing=False)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(example):
    rows = example.data.full_rows(np.arange(7)[:, None] + np.zeros((1, 3), np.int32))
    steps = [example.data.rows_of_step(rows, step, 2, 3, seed=1).tokens[..., 0] for step in range(7)]
    assert {step.shape for step in steps} == {(2, 3)}
    epochs = np.concatenate(steps).reshape(6, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    again = example.data.rows_of_step(rows, 4, 2, 3, seed=1).tokens[..., 0]
    np.testing.assert_array_equal(again, steps[4])  # whatever came before


def test_the_order_does_not_depend_on_how_a_step_is_cut(example):
    rows = example.data.full_rows(np.arange(7)[:, None] + np.zeros((1, 3), np.int32))
    one, other = (example.data.rows_of_step(rows, 3, *cut, seed=0).tokens.ravel() for cut in ((4, 1), (1, 4)))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "line 2: must be a JSON object, got list"),
        ('{"prompt": "a"}', "line 2: 'answer' must be a string, got None"),
        ('{"prompt": 1, "answer": "b"}', "line 2: 'prompt' must be a string, got 1"),
        ('{"prompt": "a\u2028", "answer": ""}', "line 2: 'answer' must not be empty"),
    ],
)
def test_lines_that_are_no_examples_are_named(example, tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "b", "more": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r".") as error:
        example.data.read_examples(path)
    assert message in str(error.value)
    path.write_text("\n")
    with pytest.raises(ValueError, match="must hold at least one prompt and answer, got none"):
        example.data.read_examples(path)


# ---- The step


def training_setup(example, tmp_path, *, dtype="float32", loss_scale=1.0, clip=1.0, optimizer=None):
    """A step over four rows, of which two answers are long and two short; and a state to begin from."""
    config = config_of(vocab_size=9999)
    folder = write_checkpoint(tmp_path, config, tensors_of(config))
    model, _ = adapted(example, folder, dtype=dtype, param_dtype=dtype)
    graphdef, (params, frozen) = split(model, nnx.LoRAParam, ...)
    learning_rate = example.training.schedule(1e-2, steps=10, warmup=2)
    optimizer = optimizer or example.training.make_optimizer(learning_rate, weight_decay=0.1)
    step = example.training.make_train_step(graphdef, optimizer, learning_rate, clip=clip, segmented=False)
    rows, _ = example.data.make_rows(sequences_of(example, (3, 9), (9, 2), (1, 12), (7, 1)), 12, packing=False)
    state = example.training.initial_state(params, optimizer, loss_scale)
    return step, state, frozen, rows, graphdef


def cut(rows, accumulation):
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(accumulation, -1, x.shape[-1]), rows)


def copy(tree):
    return jax.tree.map(jnp.array, tree)  # the step donates its state


def test_the_loss_is_that_of_the_answers_by_numpy(example, tmp_path):
    config = config_of(vocab_size=9999)
    tensors = tensors_of(config)
    model = load(example, write_checkpoint(tmp_path, config, tensors))
    sequences = sequences_of(example, (3, 2), (4, 4), (2, 6))
    expected = 0.0
    for tokens, prompt_length in sequences:
        logits = numpy_logits(config, tensors, np.array(tokens[:-1]))
        log_sum = np.log(np.exp(logits).sum(axis=1))
        losses = log_sum - logits[np.arange(len(tokens) - 1), tokens[1:]]
        expected += losses[prompt_length - 1 :].sum()
    for packing in (False, True):
        rows, _ = example.data.make_rows(sequences, 12, packing=packing)
        rows = jax.tree.map(jnp.asarray, rows)
        assert len(rows.tokens) == (2 if packing else 3)
        loss = example.training.summed_loss(model, rows, segmented=packing)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_accumulation_is_one_large_batch(example, tmp_path):
    step, state, frozen, rows, _ = training_setup(example, tmp_path)
    results = [step(copy(state), frozen, cut(rows, accumulation)) for accumulation in (1, 2, 4)]
    (whole, whole_metrics), *others = results
    for cut_up, metrics in others:
        np.testing.assert_allclose(metrics.loss, whole_metrics.loss, rtol=1e-6)
        np.testing.assert_allclose(metrics.grad_norm, whole_metrics.grad_norm, rtol=1e-5)
        # Adam's first moment is the gradient, but for a factor.
        for got, expected in zip(*map(jax.tree.leaves, (cut_up.optimizer, whole.optimizer)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)
    moved = jax.tree.map(lambda new, old: jnp.abs(new - old).max(), whole.params, state.params)
    assert min(jax.tree.leaves(moved)) > 1e-4


def test_gradients_are_clipped_and_their_norm_is_reported_before(example, tmp_path):
    norms = {}
    for clip in (1e9, 0.01):
        step, state, frozen, rows, _ = training_setup(example, tmp_path, clip=clip, optimizer=optax.sgd(1.0))
        new, metrics = step(copy(state), frozen, cut(rows, 1))
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, new.params, state.params))
        norms[clip] = float(metrics.grad_norm), float(moved)
    assert norms[1e9][0] == norms[0.01][0] > 0.1
    np.testing.assert_allclose(norms[1e9][1], norms[1e9][0], rtol=1e-4)
    np.testing.assert_allclose(norms[0.01][1], 0.01, rtol=1e-3)


def test_float16_skips_a_step_that_overflows_and_halves_the_scale(example, tmp_path):
    step, state, frozen, rows, _ = training_setup(example, tmp_path, dtype="float16", loss_scale=2.0**30)
    new, metrics = step(copy(state), frozen, cut(rows, 2))
    assert not metrics.finite
    assert metrics.loss_scale == 2.0**30
    assert (int(new.step), int(new.updates), float(new.loss_scale.value)) == (1, 0, 2.0**29)
    for got, expected in zip(
        *map(jax.tree.leaves, ((new.params, new.optimizer), (state.params, state.optimizer))), strict=True
    ):
        np.testing.assert_array_equal(got, expected)

    while not metrics.finite:
        assert int(new.updates) == 0
        new, metrics = step(new, frozen, cut(rows, 2))
    assert 1 < metrics.loss_scale < 2.0**29
    assert int(new.updates) == 1
    np.testing.assert_allclose(metrics.learning_rate, 1e-2 / 3, rtol=1e-5)  # the schedule has not moved meanwhile
    exact, exact_state, exact_frozen, *_ = training_setup(example, tmp_path)
    _, expected = exact(exact_state, exact_frozen, cut(rows, 2))
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=0.01)
    np.testing.assert_allclose(metrics.grad_norm, expected.grad_norm, rtol=0.05)


def test_the_scale_grows_after_many_good_steps(example):
    scale = example.training.LossScale.initial(1024.0)
    for _ in range(example.training.GROWTH_INTERVAL - 1):
        scale = scale._replace(good_steps=scale.good_steps + 1)
    assert scale.adjusted(jnp.array(True)).value == 2048
    assert scale.adjusted(jnp.array(True)).good_steps == 0
    assert scale.adjusted(jnp.array(False)) == (512, 0)
    assert scale._replace(good_steps=jnp.array(5)).adjusted(jnp.array(True)) == (1024, 6)


def test_the_schedule_warms_up_and_ends_at_a_tenth(example):
    rates = np.array([example.training.schedule(3e-4, steps=20, warmup=2)(step) for step in range(21)])
    np.testing.assert_allclose(rates[[0, 1, 2, 20]], [1e-4, 2e-4, 3e-4, 3e-5], rtol=1e-4)
    assert (np.diff(rates[2:]) < 0).all()


# ---- The commands


WORDS = [name for name in dir(dict) + dir(list) if not name.startswith("_")]


def small_library():
    random = np.random.default_rng(0)
    for number in range(16):
        lines = [f"def {random.choice(WORDS)}({random.choice(WORDS)}): pass" for _ in range(40)]
        yield f"m{number}.py", "\n".join(lines)


@pytest.fixture(scope="module")
def small(example, tmp_path_factory):
    """A checkpoint by the pretrain command, of a small text, and prompts for it."""
    folder = tmp_path_factory.mktemp("small")
    sizes = "--layers 2 --width 32 --heads 4 --kv-heads 2 --vocabulary 300 --length 64 --batch 4 --steps 30"
    with pytest.MonkeyPatch.context() as patch, jax.default_device(jax.devices("cpu")[0]):
        patch.setattr(example.data, "standard_library", small_library)
        arguments = ["pretrain", "--out", str(folder / "model"), *sizes.split(), "--learning-rate", "0.01"]
        assert example.main(arguments) == 0
    lines = [{"prompt": f"{word}?", "answer": f"It is {word}. It is a word."} for word in WORDS]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def flags(small, out, **changes):
    values = {
        "model": small / "model",
        "data": small / "data.jsonl",
        "out": out,
        "batch": 2,
        "accumulation": 2,
        "steps": 8,
        "rank": 4,
        "learning-rate": 0.02,
        "template": "{prompt} ",
        "dtype": "float32",  # the default of a GPU is another
        "sample": 0,
        **changes,
    }
    given = [f"--{name}={value}" for name, value in values.items() if value is not None and value is not True]
    return ["train", *given, *(f"--{name}" for name, value in values.items() if value is True)]


def metrics_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return lines


def curve_of(folder):
    """All that does not depend on the clock."""
    return [
        {name: value for name, value in line.items() if name not in ("tokens_per_s", "seconds")}
        for line in metrics_of(folder)
    ]


def test_pretraining_writes_what_fine_tuning_reads(example, small):
    model = small / "model"
    assert len(list(model.glob("model-*-of-*.safetensors"))) == 1 or (model / "model.safetensors").exists()
    config = example.checkpoint.load_config(model)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings) == (2, 2, 64)
    tokenizer = example.checkpoint.load_tokenizer(model, config)
    text = "def naïve(): return '\N{SNOWMAN}'"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert tokenizer.id_to_token(config.bos_token_id) == "<|begin_of_text|>"
    assert [tokenizer.id_to_token(token) for token in config.eos_token_ids] == ["<|end_of_text|>"]


def test_a_run_leaves_metrics_curve_adapter_and_samples(example, small, tmp_path, capsys):
    changes = {"packing": True, "sample": 10, "prompt": "open?", "targets": "v_proj,q_proj", "alpha": 8}
    assert example.main(flags(small, tmp_path, **changes)) == 0
    out = capsys.readouterr().out
    for expected in ("data ", "LoRA ", "attention  jax_flash by", "speed ", "peak memory ", "---- after ----"):
        assert expected in out
    lines = metrics_of(tmp_path)
    assert len(lines) == 8
    assert lines[0].keys() == {"step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "seconds"}
    assert all(line["tokens_per_s"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert max(line["learning_rate"] for line in lines) == pytest.approx(0.02)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (tmp_path / "sample.txt").read_text()
    before, after = sample.split("---- before ----")[1].split("---- after ----")
    assert sample.startswith("---- prompt ----\nopen?\n")
    assert before != after
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["target_modules"]) == (4, 8, ["q_proj", "v_proj"])


def test_merged_checkpoints_compute_what_base_and_adapter_do(example, small, tmp_path):
    run, merged = tmp_path / "run", tmp_path / "merged"
    assert example.main(flags(small, run, steps=4)) == 0
    arguments = ["--model", str(small / "model"), "--adapter", str(run / "adapter"), "--out", str(merged)]
    assert example.main(["merge", *arguments]) == 0
    base = load(example, small / "model")
    tokens = random_tokens((2, 20))
    before = base(tokens)
    example.lora.load_adapter(run / "adapter", base)
    after = base(tokens)
    assert jnp.abs(after - before).max() > 0.05
    np.testing.assert_allclose(load(example, merged)(tokens), after, rtol=0, atol=1e-4)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (merged / name).read_bytes() == (small / "model" / name).read_bytes()
    # What was merged can be the base of another run.
    assert example.main(flags(small, tmp_path / "again", model=merged, steps=1)) == 0


@pytest.mark.slow
def test_transformers_reads_what_is_written(example, small, tmp_path):
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install '.[transformers]'")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    assert example.main(flags(small, tmp_path / "run", steps=2)) == 0
    merged = tmp_path / "merged"
    arguments = ["--model", str(small / "model"), "--adapter", str(tmp_path / "run" / "adapter"), "--out", str(merged)]
    assert example.main(["merge", *arguments, "--shard-megabytes", "1", "--dtype", "bfloat16"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    tokens = random_tokens((2, 20))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(load(example, merged)(tokens), expected, rtol=0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    ours = example.checkpoint.load_tokenizer(merged, example.checkpoint.load_config(merged))
    text = "def open(name): return [name]\n"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ours.encode(text).ids


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("packing", [None, True])
def test_ours_and_plain_attention_learn_the_same(example, small, tmp_path, packing):
    curves = {}
    for kind in ("ours", "xla"):
        assert example.main(flags(small, tmp_path / kind, attention=kind, steps=20, packing=packing)) == 0
        curves[kind] = np.array([line["loss"] for line in metrics_of(tmp_path / kind)])
    np.testing.assert_allclose(curves["ours"], curves["xla"], rtol=0, atol=1e-3)
    assert curves["ours"][-1] < 0.5 * curves["ours"][0]


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [None, True])
def test_on_a_gpu_all_three_attentions_learn_the_same(example, small, tmp_path, packing):
    curves = {}
    for kind in ("ours", "cudnn", "xla"):
        changes = {"attention": kind, "packing": packing, "dtype": "bfloat16", "steps": 20}
        assert example.main(flags(small, tmp_path / kind, **changes)) == 0
        curves[kind] = np.array([line["loss"] for line in metrics_of(tmp_path / kind)])
    assert curves["ours"][-1] < 0.5 * curves["ours"][0]
    for kind in ("cudnn", "xla"):
        np.testing.assert_allclose(curves[kind], curves["ours"], rtol=0, atol=0.1)  # bfloat16 rounds to 1/256


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", ["ours", "xla"])
def test_packing_changes_no_loss(example, small, tmp_path, capsys, kind):
    """A step over all examples has the same loss and gradients, in fewer rows."""
    data = tmp_path / "data.jsonl"
    lines = (small / "data.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:7]))
    metrics, rows = {}, 7
    for packing in (None, True):
        run = tmp_path / str(packing)
        if packing:
            tokenizer = example.checkpoint.load_tokenizer(
                small / "model", example.checkpoint.load_config(small / "model")
            )
            sequences = example.data.encode(example.data.read_examples(data), tokenizer, "{prompt} ", 0, 1)
            rows = len(example.data.make_rows(sequences, 64, packing=True)[0].tokens)
            assert 1 < rows < 7
        changes = {"data": data, "batch": rows, "accumulation": 1, "attention": kind, "packing": packing}
        assert example.main(flags(small, run, steps=1, **changes)) == 0
        assert f"7 examples in {rows} rows of 64 tokens" in capsys.readouterr().out
        (metrics[packing],) = metrics_of(run)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[True][name], metrics[None][name], rtol=1e-4)


@pytest.mark.by_turns(2)
@needs_cpu
@pytest.mark.parametrize(("kind", "calls"), [("ours", True), ("xla", False)])
def test_the_step_calls_the_attention_that_was_asked_for(example, small, tmp_path, monkeypatch, kind, calls):
    texts = []
    make = example.training.make_train_step

    def spy(*args, **kwargs):
        step = make(*args, **kwargs)

        class Lowers:
            def lower(self, *args):
                lowered = step.lower(*args)
                texts.append(lowered.as_text())
                return lowered

        return Lowers()

    monkeypatch.setattr(example.training, "make_train_step", spy)
    assert example.main(flags(small, tmp_path, attention=kind, steps=1)) == 0
    assert ("jax_flash_forward" in texts[0]) == ("jax_flash_backward" in texts[0]) == calls


@pytest.mark.slow
def test_bfloat16_and_float16_learn(example, small, tmp_path):
    for dtype in ("bfloat16", "float16"):
        assert example.main(flags(small, tmp_path / dtype, dtype=dtype, steps=20)) == 0
        lines = metrics_of(tmp_path / dtype)
        assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert {line["loss_scale"] for line in lines} == {65536.0}
    assert not any(line["skipped"] for line in lines)


def test_float16_goes_on_after_overflows(example, small, tmp_path, capsys):
    """And a checkpoint keeps the scale that it found."""
    arguments = flags(small, tmp_path, dtype="float16", **{"loss-scale": 2.0**40, "checkpoint-every": 3, "steps": 30})
    assert example.main(arguments) == 0
    lines = metrics_of(tmp_path)
    skipped = [line["skipped"] for line in lines]
    assert skipped[:5] == [True] * 5
    assert not skipped[-1]
    assert lines[1]["loss_scale"] == 2.0**39
    assert all(line["grad_norm"] is None for line in lines if line["skipped"])
    assert f"skipped          {sum(skipped)} steps" in capsys.readouterr().out
    first = skipped.index(False)
    assert lines[first]["learning_rate"] == lines[0]["learning_rate"]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("packing", [False, True])
def test_random_weights_need_a_configuration_alone(example, tmp_path, capsys, packing):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of()))
    arguments = ["train", "--model", str(path), "--random-weights", "--out", str(tmp_path / "run"), "--steps", "2"]
    sizes = ["--batch", "2", "--accumulation", "1", "--length", "16", "--dtype", "float32"]
    assert example.main([*arguments, *sizes, *(["--packing"] if packing else [])]) == 0
    assert "random tokens" in capsys.readouterr().out
    loss = metrics_of(tmp_path / "run")[0]["loss"]
    assert loss == pytest.approx(np.log(CONFIG["vocab_size"]), abs=0.3)


def test_random_rows_are_full_or_hold_several_sequences(example):
    full = example.data.random_rows(3, 64, 50, 0, packing=False)
    assert (full.segments == 1).all()
    packed = example.data.random_rows(3, 64, 50, 0, packing=True)
    assert packed.tokens.shape == (3, 64)
    assert (packed.segments.max(axis=1) >= 2).all()
    assert np.mean(packed.segments > 0) > 0.8
    np.testing.assert_array_equal(packed.weights, packed.segments > 0)


@pytest.mark.slow(7)
def test_resumed_after_ctrl_c_it_learns_as_if_never_stopped(example, small, tmp_path, monkeypatch, capsys):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert example.main(flags(small, straight, dtype="float16", sample=8)) == 0

    class Interrupted(example.command.tqdm):
        def update(self, n=1):
            super().update(n)
            if self.n == 5:
                signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(example.command, "tqdm", Interrupted)
        assert example.main(flags(small, stopped, dtype="float16", sample=8)) == 130
    assert f"train --resume --out {stopped}" in capsys.readouterr().out
    assert len(metrics_of(stopped)) == 5
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "half a')  # as a killed process may leave it

    # From here the checkpoint speaks for everything but the sample.
    assert example.main(["train", "--resume", "--out", str(stopped), "--sample", "8"]) == 0
    assert "at step 5" in capsys.readouterr().out
    assert curve_of(stopped) == curve_of(straight)
    for name in ("sample.txt", "adapter/adapter_model.safetensors"):
        assert (stopped / name).read_bytes() == (straight / name).read_bytes()

    for changes, message in [
        ({"seed": 6}, "--seed 6 contradicts the run to resume, which has 0"),
        ({"prompt": "else?"}, "--prompt 'else?' contradicts the run to resume, which has "),
        ({"packing": True}, "--packing True contradicts the run to resume, which has False"),
        ({"steps": 7}, "--steps must be at least the 8 steps of the run to resume, got 7"),
    ]:
        given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in changes.items()]
        assert message in error_of(example, capsys, ["train", "--resume", "--out", str(stopped), *given])
    assert "already holds a run" in error_of(example, capsys, flags(small, stopped))
    with (small / "data.jsonl").open("a+") as file:
        end = file.tell()
        file.write('{"prompt": "a", "answer": "b"}\n')
    message = error_of(example, capsys, ["train", "--resume", "--out", str(stopped)])
    os.truncate(small / "data.jsonl", end)
    assert "--resume needs the checkpoint and the data that began the run: these differ" in message


KILLED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import finetune_llama
import orbax.checkpoint as ocp

async_save = ocp.JsonCheckpointHandler.async_save
calls = 0

async def killed(self, directory, *args, **kwargs):
    global calls
    calls += 1
    if calls == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return await async_save(self, directory, *args, **kwargs)

ocp.JsonCheckpointHandler.async_save = killed
finetune_llama.main({arguments!r})
"""


@pytest.mark.slow(7)
def test_resumed_after_a_kill_in_the_middle_of_a_save(example, small, tmp_path, capsys):
    """The save that was cut is as if it had never begun: the run goes on from the one before."""
    straight, out = tmp_path / "straight", tmp_path / "killed"
    every = {"checkpoint-every": 3}
    assert example.main(flags(small, straight, **every)) == 0
    program = KILLED.format(examples=str(EXAMPLES), arguments=flags(small, out, **every))
    # As this process computes.
    environment = {**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_NUM_CPU_DEVICES": "4"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left[0] == "3"
    assert any(name.startswith("6.") for name in left), left  # half of a checkpoint
    assert len(metrics_of(out)) == 6  # ahead of the checkpoint

    assert example.main(["train", "--resume", "--out", str(out), "--sample", "0", "--checkpoint-every", "3"]) == 0
    assert "at step 3" in capsys.readouterr().out
    assert curve_of(out) == curve_of(straight)
    name = "adapter/adapter_model.safetensors"
    assert (out / name).read_bytes() == (straight / name).read_bytes()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["6", "8"]


@pytest.mark.slow(90)
def test_the_documented_commands_halve_the_loss_in_twenty_steps(example, tmp_path, capsys):
    """With the standard library as it is; the curve is that of plain attention."""
    model, prompts = str(tmp_path / "tiny"), str(tmp_path / "prompts.jsonl")
    assert example.main(["pretrain", "--out", model, "--steps", "60", "--batch", "4"]) == 0
    assert example.main(["prompts", "--out", prompts]) == 0
    assert "prompts and answers" in capsys.readouterr().out
    curves, seconds = {}, {}
    for kind in ("ours", "xla"):
        arguments = ["--model", model, "--data", prompts, "--learning-rate", "1e-2", "--attention", kind]
        assert example.main(["train", *arguments, "--dtype", "float32", "--out", str(tmp_path / kind)]) == 0
        lines = metrics_of(tmp_path / kind)
        curves[kind], seconds[kind] = np.array([line["loss"] for line in lines]), sum(line["seconds"] for line in lines)
    assert curves["ours"].shape == (20,)
    assert curves["ours"][-1] < 0.5 * curves["ours"][0]
    np.testing.assert_allclose(curves["ours"], curves["xla"], rtol=0, atol=1e-3)
    assert seconds["ours"] < 120


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_loss_that_is_not_finite_stops_the_run(example, small, tmp_path, dtype):
    """In float16 when no smaller scale is left to try."""
    changes = {"learning-rate": 1e30, "dtype": dtype, "steps": 40}
    with pytest.raises(SystemExit, match=r"at step .*try a lower --learning-rate"):
        example.main(flags(small, tmp_path, **changes))
    assert 1 <= len(metrics_of(tmp_path)) < 3 if dtype == "float32" else len(metrics_of(tmp_path)) > 15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps: must be an integer of at least 1, got '0'"),
        ({"learning-rate": "nan"}, "--learning-rate: must be a number > 0, got 'nan'"),
        ({"attention": "fast"}, "--attention: invalid choice: 'fast'"),
        ({"attention": "xla", "implementation": "cpu"}, "--implementation is of --attention ours, got --attention xla"),
        ({"warmup": 8}, "--warmup must be below --steps 8, got 8"),
        ({"targets": "q_proj,head"}, "--targets must be among q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj"),
        ({"template": "no"}, "--template must have {prompt} once and no other field, got 'no'"),
        ({"template": "{prompt} {"}, "--template must be a format with {prompt}, got '{prompt} {'"),
        ({"length": 65}, "--length must be at most the model's max_position_embeddings 64, got 65"),
        ({"length": 1}, "--length 1 leaves no token of any answer"),
        ({"prompt": "open", "sample": 64}, "--prompt and --sample must fit the context of 64 tokens, got "),
        ({"data": None}, "--data must name a file of prompts and answers, unless --random-weights is given"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"model": None}, "--model must name the folder of a checkpoint"),
        ({"model": "nowhere"}, "nowhere"),
        ({"random-weights": True}, "--random-weights takes random tokens, so --data can't go with it"),
        ({"resume": True, "out": "nowhere"}, "--resume found no checkpoint in nowhere"),
        ({"resume": True, "out": None}, "--resume found no checkpoint in runs/llama"),
        ({"out": "file"}, "file"),
    ],
)
def test_bad_flags_are_named(example, small, tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    assert message in error_of(example, capsys, flags(small, **{"out": "new", **changes}))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing left behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["pretrain"], "the following arguments are required: --out"),
        (["pretrain", "--out", "new", "--width", "36", "--heads", "4"], "--width must be a multiple of twice --heads"),
        (["pretrain", "--out", "new", "--kv-heads", "3"], "--heads must be a multiple of --kv-heads 3, got 4"),
        (["pretrain", "--out", "new", "--vocabulary", "257"], "--vocabulary must be at least 258"),
        (["pretrain", "--out", "full"], "--out must name a folder that is new or empty, got full"),
        (["prompts", "--out", "full/file"], "--out must name a new file, got full/file"),
        (["merge", "--model", "nowhere", "--adapter", "full", "--out", "new"], "nowhere"),
        (["merge", "--model", "MODEL", "--adapter", "full", "--out", "new"], "adapter_config.json"),
    ],
)
def test_bad_flags_of_the_other_commands_are_named(example, small, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    given = [str(small / "model") if argument == "MODEL" else argument for argument in arguments]
    assert message in error_of(example, capsys, given)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@needs_cpu
def test_attention_that_is_not_there_is_an_error_with_its_reason(example, small, tmp_path, capsys):
    message = error_of(example, capsys, flags(small, tmp_path, attention="cudnn"))
    assert "--attention cudnn needs an NVIDIA GPU, got cpu" in message
    message = error_of(example, capsys, flags(small, tmp_path, implementation="cuda"))
    assert "--implementation cuda: implementation='cuda' does not serve this call" in message


def test_a_tokenizer_that_does_not_fit_is_named(example, small, tmp_path):
    config = config_of(vocab_size=99)
    write_checkpoint(tmp_path, config, tensors_of(config))
    loaded = example.checkpoint.load_config(tmp_path)
    with pytest.raises(ValueError, match=r"must hold tokenizer\.json, got none"):
        example.checkpoint.load_tokenizer(tmp_path, loaded)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        example.checkpoint.load_tokenizer(tmp_path, loaded)
    (tmp_path / "tokenizer.json").write_bytes((small / "model" / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="must have at most the model's vocab_size 99 tokens, got 300"):
        example.checkpoint.load_tokenizer(tmp_path, loaded)


def test_prompts_about_the_standard_library(example):
    examples = list(example.data.standard_library_examples())
    assert len(examples) > 1000
    (found,) = [answer for prompt, answer in examples if prompt == "What is textwrap.dedent?"]
    assert "The module that defines it is textwrap. It takes 1 arguments" in found


@pytest.mark.parametrize("command", ["pretrain", "prompts", "train", "merge"])
def test_help(example, capsys, command):
    for arguments in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as stop:
            example.main(arguments)
        assert stop.value.code == 0
        assert command in capsys.readouterr().out


def error_of(example, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        example.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err
