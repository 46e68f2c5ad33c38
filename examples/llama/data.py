"""Prompts and answers as rows of tokens, padded or packed; and texts and prompts made of Python's standard library."""

import ast
import hashlib
import json
import pathlib
import string
import sysconfig
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
import tokenizers

TEMPLATE = "### Instruction:\n{prompt}\n\n### Response:\n"  # Alpaca's

# ---- JSONL


class Example(NamedTuple):
    prompt: str
    answer: str


def read_examples(path: pathlib.Path) -> list[Example]:
    """Of a file with a JSON object a line, which has strings "prompt" and "answer"; other keys are left alone."""
    examples = []
    # Not splitlines(), which also cuts at characters that may stand in a JSON string, as U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number}: must be a JSON object, got {type(values).__name__}")
        for name in Example._fields:
            if not isinstance(values.get(name), str):
                raise ValueError(f"{path}, line {number}: {name!r} must be a string, got {values.get(name)!r}")
        if not values["answer"]:
            raise ValueError(f"{path}, line {number}: 'answer' must not be empty")
        examples.append(Example(values["prompt"], values["answer"]))
    if not examples:
        raise ValueError(f"{path} must hold at least one prompt and answer, got none")
    return examples


def check_template(template: str) -> None:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"--template must be a format with {{prompt}}, got {template!r}: {error}") from error
    if fields != ["prompt"]:
        raise ValueError(f"--template must have {{prompt}} once and no other field, got {template!r}")


class Sequence(NamedTuple):
    """Tokens of a prompt and its answer, and how many of them are the prompt's, which are not learned."""

    tokens: list[int]
    prompt_length: int


def encode_prompt(tokenizer: tokenizers.Tokenizer, template: str, prompt: str, bos: int | None) -> list[int]:
    ids = tokenizer.encode(template.format(prompt=prompt), add_special_tokens=False).ids
    return ids if bos is None else [bos, *ids]


def encode(
    examples: list[Example], tokenizer: tokenizers.Tokenizer, template: str, bos: int | None, eos: int | None
) -> list[Sequence]:
    """Prompt and answer are encoded apart, so that the first token of an answer is what generation has to write."""
    sequences = []
    for example in examples:
        prompt = encode_prompt(tokenizer, template, example.prompt, bos)
        answer = tokenizer.encode(example.answer, add_special_tokens=False).ids
        if eos is not None:
            answer.append(eos)
        sequences.append(Sequence(prompt + answer, len(prompt)))
    return sequences


# ---- Rows


Array = TypeVar("Array", np.ndarray, jax.Array)


class Rows(NamedTuple, Generic[Array]):
    """What the model reads, what it should predict, and where that counts; all [..., T].

    A sequence of n tokens takes n - 1 places of a row. ``segments`` counts a row's sequences from 1, 0 is padding, and
    ``positions`` begin at 0 in each, so that packed sequences are computed as they are alone.
    """

    tokens: Array  # int32
    targets: Array  # int32
    weights: Array  # float32: 1 where the target belongs to an answer
    segments: Array  # int32
    positions: Array  # int32


def make_rows(sequences: list[Sequence], length: int, *, packing: bool) -> tuple[Rows[np.ndarray], str]:
    """Rows of ``length`` places, one sequence in each or as many as fit; and a line about what became of the data.

    A sequence that is too long loses its end, and is left out if that leaves nothing of the answer.
    """
    kept, cut = [], 0
    for sequence in sequences:
        short = sequence._replace(tokens=sequence.tokens[: length + 1])
        cut += len(short.tokens) < len(sequence.tokens)
        # Without a token to begin from, the first of the answer can't be predicted.
        if len(short.tokens) > max(sequence.prompt_length, 1):
            kept.append(short)
    if not kept:
        raise ValueError(f"--length {length} leaves no token of any answer: it must be above the prompts' lengths")
    bins = _pack(kept, length) if packing else [[sequence] for sequence in kept]

    shape = (len(bins), length)
    rows = Rows(*(np.zeros(shape, np.float32 if name == "weights" else np.int32) for name in Rows._fields))
    for row, members in enumerate(bins):
        start = 0
        for number, (tokens, prompt_length) in enumerate(members, start=1):
            stop = start + len(tokens) - 1
            rows.tokens[row, start:stop] = tokens[:-1]
            rows.targets[row, start:stop] = tokens[1:]
            rows.weights[row, start + max(prompt_length - 1, 0) : stop] = 1
            rows.segments[row, start:stop] = number
            rows.positions[row, start:stop] = range(len(tokens) - 1)
            start = stop
    used = np.count_nonzero(rows.segments) / rows.segments.size
    summary = f"{len(kept):,} examples in {len(bins):,} rows of {length} tokens, {used:.0%} of them used"
    if cut:
        summary += f"; {cut:,} were longer and lost their end"
    if len(kept) < len(sequences):
        summary += f"; {len(sequences) - len(kept):,} whose prompt fills a row are left out"
    return rows, summary


def _pack(sequences: list[Sequence], length: int) -> list[list[Sequence]]:
    """First fit, into the last 64 rows that were begun: to look at all of them would take quadratic time."""
    bins: list[list[Sequence]] = []
    room: list[int] = []
    for sequence in sequences:
        size = len(sequence.tokens) - 1
        for number in range(max(0, len(bins) - 64), len(bins)):
            if size <= room[number]:
                bins[number].append(sequence)
                room[number] -= size
                break
        else:
            bins.append([sequence])
            room.append(length - size)
    return bins


def random_rows(count: int, length: int, vocabulary: int, seed: int, *, packing: bool) -> Rows[np.ndarray]:
    """Rows of random tokens, all of which count, to measure speed without data: full ones, or sequences of a sixteenth
    to a half of a row that are packed."""
    random = np.random.default_rng(seed)
    if not packing:
        return full_rows(random.integers(0, vocabulary, (count, length + 1), dtype=np.int32))
    sizes = random.integers(max(1, length // 16), max(1, length // 2), 16 * count, endpoint=True)
    sequences = [Sequence(random.integers(0, vocabulary, size + 1).tolist(), 1) for size in sizes]
    rows, _ = make_rows(sequences, length, packing=True)
    return Rows(*(array[:count] for array in rows))


def full_rows(tokens: np.ndarray) -> Rows[np.ndarray]:
    """Of windows [..., T + 1] of a text."""
    shape = tokens[..., 1:].shape
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    ones = np.ones(shape, np.int32)
    return Rows(tokens[..., :-1], tokens[..., 1:], ones.astype(np.float32), ones, positions)


def rows_of_step(rows: Rows[np.ndarray], step: int, accumulation: int, batch: int, seed: int) -> Rows[np.ndarray]:
    """[accumulation, batch, T]: every epoch has all rows in an order of its own, which follows from ``seed``."""
    count, size = len(rows.tokens), accumulation * batch
    chosen: list[int] = []
    index = step * size
    while len(chosen) < size:
        epoch, start = divmod(index, count)
        order = np.random.default_rng([seed, epoch]).permutation(count)
        taken = order[start : start + size - len(chosen)]
        chosen.extend(taken.tolist())
        index += len(taken)
    return Rows(*(array[chosen].reshape(accumulation, batch, -1) for array in rows))


def fingerprint(rows: Rows[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in rows:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# ---- The standard library: text to pretrain on, prompts to fine-tune on

# Not the library's own code, or tables that a program wrote. Some systems package the tests apart.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}


def standard_library() -> Iterator[tuple[str, str]]:
    """Names and texts of the source files of the running Python's standard library, in the order of their names."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    found = False
    for name in sorted(files):
        if LEFT_OUT.isdisjoint(name.split("/")) and not name.startswith("_sysconfigdata"):
            found = True
            yield name, files[name].read_text(encoding="utf-8", errors="replace")
    if not found:
        raise ValueError(f"the standard library of this Python has no source files in {root}")


def standard_library_examples() -> Iterator[Example]:
    """A prompt about each public function of the standard library, with an answer that always has the same form."""
    for file, source in standard_library():
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if any(name.startswith("_") for name in module.split(".")):
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                count = len(node.args.posonlyargs) + len(node.args.args)
                yield Example(
                    f"What is {module}.{node.name}?",
                    f"It is a public function of the standard library of Python. The module that defines it is "
                    f"{module}. It takes {count} arguments, not counting those that are given by keyword only.",
                )
