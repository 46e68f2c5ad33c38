"""Hugging Face checkpoints: config.json, tokenizer.json, and safetensors in one file or in shards with an index.

A folder is written under another name first and renamed when it is complete, so that no half of one is ever read.
"""

import contextlib
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers
from flax import nnx

from llama.model import OURS, Attention, Llama, LlamaConfig, Remat

CONFIG, TOKENIZER, WEIGHTS, INDEX = (
    "config.json",
    "tokenizer.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
# Files beside the weights that an export takes over as they are.
COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
FLOATS = {"F32", "F16", "BF16"}  # safetensors' names


# ---- Reading


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def load_config(path: pathlib.Path) -> LlamaConfig:
    """Of a folder that holds config.json, or of such a file."""
    path = path / CONFIG if path.is_dir() else path
    values = read_json(path)
    try:
        return LlamaConfig.from_json(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def load_tokenizer(folder: pathlib.Path, config: LlamaConfig) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{folder} must hold {TOKENIZER}, got none")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"{path} must have at most the model's vocab_size {config.vocab_size} tokens, "
            f"got {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def weight_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Which file holds a tensor, by the tensor's name."""
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ValueError(f"{folder / INDEX} must have a weight_map from tensors to files, got {shards!r:.80}")
        if outside := [shard for shard in shards.values() if pathlib.Path(shard).name != shard]:
            raise ValueError(f"{folder / INDEX} must name files beside it, got {outside[0]!r}")
        if absent := sorted({shard for shard in shards.values() if not (folder / shard).is_file()}):
            raise ValueError(f"{folder / INDEX} names {', '.join(absent)}, which {folder} does not hold")
        return {name: folder / shard for name, shard in shards.items()}
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} must hold {WEIGHTS} or {INDEX}, got neither")
    with _open(folder / WEIGHTS) as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS)


def load_model(
    folder: pathlib.Path,
    config: LlamaConfig,
    *,
    dtype: Any,
    param_dtype: Any,
    attention: Attention = OURS,
    remat: Remat = "none",
) -> Llama:
    """The model of a folder. Tensors go to the device one by one, so that no second copy of the model is in memory."""
    graphdef, abstract = nnx.split(
        nnx.eval_shape(
            lambda: Llama(
                config, dtype=dtype, param_dtype=param_dtype, attention=attention, remat=remat, rngs=nnx.Rngs(0)
            )
        )
    )
    wanted = {hugging_face_name(path): (path, variable) for path, variable in nnx.to_flat_state(abstract)}
    files = weight_files(folder)
    if missing := sorted(wanted.keys() - files.keys()):
        raise ValueError(f"{folder} lacks {len(missing)} of the model's {len(wanted)} tensors: {_some(missing)}")
    if extra := sorted(name for name in files.keys() - wanted.keys() if not _may_be_ignored(name, config)):
        raise ValueError(f"{folder} has {len(extra)} tensors that {CONFIG} has no place for: {_some(extra)}")

    loaded = []
    for file_path in sorted({files[name] for name in wanted}):
        with _open(file_path) as file:
            present = set(file.keys())
            for name in sorted(name for name in wanted if files[name] == file_path):
                if name not in present:
                    raise ValueError(f"{file_path} lacks {name}, which {INDEX} says it holds")
                path, variable = wanted[name]
                transposed = path[-1] == "kernel"
                expected = variable.shape[::-1] if transposed else variable.shape
                header = file.get_slice(name)
                if (got := tuple(header.get_shape())) != expected:
                    raise ValueError(f"{file_path}: {name} must have shape {expected}, got {got}")
                if (stored := header.get_dtype()) not in FLOATS:
                    raise ValueError(f"{file_path}: {name} must be one of {', '.join(sorted(FLOATS))}, got {stored}")
                array = jnp.asarray(file.get_tensor(name))
                # The transposition is the device's work.
                array = (array.T if transposed else array).astype(param_dtype)
                loaded.append((path, variable.replace(array)))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def hugging_face_name(path: tuple[Any, ...]) -> str:
    """The tensor of a parameter: ("layers", 0, "mlp", "up_proj", "kernel") is model.layers.0.mlp.up_proj.weight."""
    *module, _ = path
    name = ".".join(map(str, module))
    return f"{name}.weight" if module[0] == "lm_head" else f"model.{name}.weight"


def fingerprint(folder: pathlib.Path) -> str:
    """A checksum that tells one checkpoint from another; of each file of weights the size and both ends."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    for path in sorted(set(weight_files(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()


def _may_be_ignored(name: str, config: LlamaConfig) -> bool:
    # Old checkpoints hold the rotary frequencies, which follow from config.json; some tied ones the embedding twice.
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    with file:
        yield file


# ---- Writing


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill, which gets its name when the block ends without an error."""
    check_new(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            folder.rmdir()  # it is empty
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_new(folder: pathlib.Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out must name a folder that is new or empty, got {folder}")


def save_model(folder: pathlib.Path, model: Llama, config: dict[str, Any], *, shard_bytes: int) -> None:
    """Writes config.json, and the weights in their own dtype in shards of at most ``shard_bytes`` (or one tensor)."""
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    paths = {hugging_face_name(path): path for path in state}
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in sorted(paths, key=_by_number):
        size = state[paths[name]][...].nbytes
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size

    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            array = np.asarray(state[paths[name]][...])
            tensors[name] = np.ascontiguousarray(array.T) if paths[name][-1] == "kernel" else array
            weight_map[name] = file
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(variable[...].nbytes for variable in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtype = str(jax.tree.leaves(state)[0].dtype)
    config = {**config, "dtype" if "dtype" in config else "torch_dtype": dtype}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: pathlib.Path, folder: pathlib.Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", name)]
