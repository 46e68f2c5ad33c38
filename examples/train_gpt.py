"""Trains a byte-level GPT in Flax whose attention is jax_flash, on text that every machine has.

    python examples/train_gpt.py                  # learns visibly on two CPU cores in about a minute
    python examples/train_gpt.py --preset small   # larger, in bfloat16 on a GPU
    python examples/train_gpt.py --resume         # goes on where the newest run stopped (Ctrl-C saves first)

The text is the source code of Python's own standard library, so nothing is downloaded. The folder of a run
(runs/PRESET-NUMBER, or --out) receives checkpoints, losses.csv, the loss curve loss.png, and sample.txt, which the
trained model wrote. Install what it needs with: pip install "jax_flash[examples]"
"""

import argparse
import csv
import dataclasses
import functools
import hashlib
import itertools
import math
import pathlib
import sys
import sysconfig
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import jax_flash
from command_line import at_least, interruptions, parser_of, real

BYTES = 256  # the vocabulary: every value of a byte is a token


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides the losses, but for the implementation of attention. Checkpoints carry it."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    length: int
    batch: int
    steps: int
    learning_rate: float
    seed: int = 0
    dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def check(self) -> None:
        """Raises ValueError, naming the flag, for sizes that don't fit together."""
        if self.width % self.heads:
            raise ValueError(f"--width must be a multiple of --heads {self.heads}, got {self.width}")
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads must be a multiple of --kv-heads {self.kv_heads}, got {self.heads}")
        if self.head_dim % 2 or self.head_dim > 256:
            raise ValueError(
                f"--width / --heads, the head_dim, must be even and at most 256, got {self.width} / {self.heads} = "
                f"{self.head_dim}"
            )


PRESETS = {
    "tiny": Config(layers=4, width=128, heads=4, kv_heads=2, length=256, batch=4, steps=600, learning_rate=2e-3),
    "small": Config(layers=6, width=384, heads=6, kv_heads=6, length=1024, batch=32, steps=2000, learning_rate=1e-3),
    "medium": Config(layers=12, width=768, heads=12, kv_heads=4, length=2048, batch=32, steps=4000, learning_rate=6e-4),
    "large": Config(layers=24, width=1024, heads=8, kv_heads=4, length=4096, batch=16, steps=8000, learning_rate=3e-4),
}


# ---- The text: source files of the standard library, split by file


class Text(NamedTuple):
    """Bytes to learn from, and bytes of other files to judge by; both uint8."""

    train: np.ndarray
    validation: np.ndarray

    def fingerprint(self) -> str:
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()


# Not the library's own code, or tables that a program wrote. Some systems package the tests apart, so leaving them
# out makes the text nearly the same everywhere.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}


def standard_library() -> Text:
    """Reads the source files of the running Python's standard library, in the order of their names."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    train: list[bytes] = []
    validation: list[bytes] = []
    for name in sorted(files):
        if LEFT_OUT.isdisjoint(name.split("/")) and not name.startswith("_sysconfigdata"):
            # By a checksum of the name, so that a file added to the library moves no other to the other side.
            part = validation if zlib.crc32(name.encode()) % 10 == 0 else train
            part.append(files[name].read_bytes())
    if not train or not validation:
        raise ValueError(f"the standard library of this Python has no source files in {root}")
    return Text(*(np.frombuffer(b"\n".join(part), np.uint8) for part in (train, validation)))


def random_windows(text: jax.Array, key: jax.Array, batch: int, length: int) -> jax.Array:
    """[batch, length + 1] bytes of ``text``: inputs and, shifted by one, what they should predict."""
    starts = jax.random.randint(key, (batch,), 0, text.size - length)
    return text[starts[:, None] + jnp.arange(length + 1)]


def spread_windows(text: np.ndarray, batch: int, length: int, count: int) -> np.ndarray:
    """[batches, batch, length + 1] bytes: at least ``count`` windows, spread evenly over ``text``."""
    batches = -(-count // batch)
    starts = np.linspace(0, text.size - length - 1, batches * batch).astype(int)
    return text[starts[:, None] + np.arange(length + 1)].reshape(batches, batch, length + 1)


# ---- The model: pre-norm blocks, rotary positions, grouped-query attention, tied embedding


class Cache(NamedTuple):
    """Keys and values of the positions seen so far, of one layer: [B, S, K, H] with room for S positions."""

    key: jax.Array
    value: jax.Array

    def write(self, key: jax.Array, value: jax.Array, position: jax.typing.ArrayLike) -> "Cache":
        at = (0, position, 0, 0)
        return Cache(
            jax.lax.dynamic_update_slice(self.key, key, at), jax.lax.dynamic_update_slice(self.value, value, at)
        )


def rotate(x: jax.Array, position: jax.typing.ArrayLike) -> jax.Array:
    """Rotary embedding of x [B, T, heads, H], whose first row stands at ``position`` (Su et al. 2021)."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = (position + jnp.arange(x.shape[1])).astype(jnp.float32)
    angles = (positions[:, None] * frequencies)[:, None]  # [T, 1, H / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1).astype(x.dtype)


class SelfAttention(nnx.Module):
    def __init__(self, config: Config, implementation: jax_flash.Implementation | None, *, rngs: nnx.Rngs):
        def project(heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                config.width, (heads, config.head_dim), use_bias=False, dtype=config.dtype, rngs=rngs
            )

        self.query = project(config.heads)
        self.key = project(config.kv_heads)
        self.value = project(config.kv_heads)
        self.out = nnx.LinearGeneral(
            (config.heads, config.head_dim),
            config.width,
            axis=(-2, -1),
            use_bias=False,
            dtype=config.dtype,
            kernel_init=residual_init(config),
            rngs=rngs,
        )
        self.implementation = implementation

    def __call__(
        self, x: jax.Array, position: jax.typing.ArrayLike, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        query = rotate(self.query(x), position)
        key = rotate(self.key(x), position)
        value = self.value(x)
        if cache is not None:
            key, value = cache = cache.write(key, value, position)
        # With q_offset the causal mask stands at the right place, and hides the part of the cache not yet written.
        out = jax_flash.attention(query, key, value, causal=True, q_offset=position, implementation=self.implementation)
        return self.out(out), cache


class Block(nnx.Module):
    def __init__(self, config: Config, implementation: jax_flash.Implementation | None, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.attention = SelfAttention(config, implementation, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.up = linear(config.width, 4 * config.width)
        self.down = linear(4 * config.width, config.width, kernel_init=residual_init(config))

    def __call__(
        self, x: jax.Array, position: jax.typing.ArrayLike, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        attended, cache = self.attention(self.attention_norm(x), position, cache)
        x = x + attended
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x)))), cache


class GPT(nnx.Module):
    """Predicts the next byte.

    Call it with tokens [B, T] for logits [B, T, 256] in float32. Call it with ``caches`` of `empty_caches` to
    generate: it takes the tokens to stand at ``position`` (an int, or a traced int32 scalar), after what the caches
    hold, and also returns the caches with the new tokens in them.
    """

    def __init__(self, config: Config, implementation: jax_flash.Implementation | None = None, *, rngs: nnx.Rngs):
        self.config = config
        # As it also reads out, at this size the first logits are about 1 (with GPT-2's 0.02 the tiny preset stood at
        # a validation loss of 2.32 after 200 steps, so at 2.17).
        init = nnx.initializers.normal(config.width**-0.5)
        self.embed = nnx.Embed(BYTES, config.width, dtype=config.dtype, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(config, implementation, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, position: jax.typing.ArrayLike = 0, caches: list[Cache] | None = None
    ) -> tuple[jax.Array, list[Cache | None]]:
        # A product with one-hot rows instead of a look-up, whose gradient scatters all tokens into 256 rows: on an H200
        # that took 112 ms of a step of 135 ms (preset small).
        one_hot = jax.nn.one_hot(tokens, BYTES, dtype=self.config.dtype)
        x = one_hot @ self.embed.embedding[...].astype(self.config.dtype)
        new_caches: list[Cache | None] = []
        old_caches: Sequence[Cache | None] = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks, old_caches, strict=True):
            x, cache = block(x, position, cache)
            new_caches.append(cache)
        # Weight tying: the embedding also reads out.
        return self.embed.attend(self.norm(x)).astype(jnp.float32), new_caches

    def empty_caches(self, batch: int, length: int) -> list[Cache]:
        shape = (batch, length, self.config.kv_heads, self.config.head_dim)
        return [Cache(jnp.zeros(shape, self.config.dtype), jnp.zeros(shape, self.config.dtype)) for _ in self.blocks]


def residual_init(config: Config) -> nnx.Initializer:
    """Smaller for the layers that write to the residual stream, as their outputs add up (GPT-2)."""
    return nnx.initializers.variance_scaling(1 / (2 * config.layers), "fan_in", "truncated_normal")


def next_byte_loss(model: GPT, windows: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per byte, of windows [B, T + 1]."""
    logits, _ = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:].astype(jnp.int32)).mean()


# ---- Training


class State(NamedTuple):
    """What a step changes; a checkpoint holds all of it. The batch follows from step and seed."""

    step: jax.Array
    params: nnx.State
    optimizer: optax.OptState


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with warmup, cosine decay and clipping; weight decay on matrices only, not on the norms' scales."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.steps // 10, 500),
        decay_steps=config.steps,
        end_value=config.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        ),
    )


def initial_state(config: Config, implementation: jax_flash.Implementation | None) -> tuple[nnx.GraphDef, State]:
    """The model taken apart: its structure, which stays, and the arrays, which go through the steps."""
    graphdef, params = nnx.split(GPT(config, implementation, rngs=nnx.Rngs(config.seed)))
    return graphdef, State(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params))


def make_train_step(graphdef: nnx.GraphDef, config: Config) -> jax.stages.Wrapped:
    """One step of training, from the choice of the batch to the new parameters, as one compiled function."""
    optimizer = make_optimizer(config)

    # Donated, the old state's memory becomes the new state's.
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: State, text: jax.Array) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        windows = random_windows(text, key, config.batch, config.length)

        def loss_of(params: nnx.State) -> jax.Array:
            return next_byte_loss(nnx.merge(graphdef, params), windows)

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state), loss

    return train_step


def make_validation(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The mean loss over windows [batches, B, T + 1]."""

    @jax.jit
    def validation_loss(params: nnx.State, windows: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return jax.lax.map(functools.partial(next_byte_loss, model), windows).mean()

    return validation_loss


# ---- Generation


@functools.partial(jax.jit, static_argnames=("graphdef", "count", "temperature"))
def generate(
    graphdef: nnx.GraphDef, params: nnx.State, prompt: jax.Array, key: jax.Array, *, count: int, temperature: float
) -> jax.Array:
    """Continues prompt [B, T] by ``count`` bytes [B, count]; temperature 0 takes the likeliest byte every time.

    The prompt goes through the model once. After it every byte goes through alone and meets the earlier ones in the
    caches, so a byte costs the same work wherever it stands, but for the attention itself.
    """
    model = nnx.merge(graphdef, params)
    batch, prompt_length = prompt.shape

    def pick(logits: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0:
            return logits.argmax(axis=-1).astype(jnp.uint8)
        return jax.random.categorical(key, logits / temperature).astype(jnp.uint8)

    logits, caches = model(prompt, 0, model.empty_caches(batch, prompt_length + count))
    keys = jax.random.split(key, count)
    first = pick(logits[:, -1], keys[0])

    def next_byte(carry: tuple[jax.Array, list[Cache]], inputs: tuple[jax.Array, jax.Array]) -> Any:
        byte, caches = carry
        position, key = inputs
        logits, caches = model(byte[:, None], position, caches)
        byte = pick(logits[:, -1], key)
        return (byte, caches), byte

    positions = jnp.arange(prompt_length, prompt_length + count - 1)
    _, rest = jax.lax.scan(next_byte, (first, caches), (positions, keys[1:]))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


# ---- Records: checkpoints, curve


@dataclasses.dataclass
class History:
    """Losses so far: of every training step, and of (step, validation loss) pairs."""

    train: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def save(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """Writes losses.csv and loss.png."""
        table, curve = folder / "losses.csv", folder / "loss.png"
        validation = dict(self.validation)
        with table.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "train", "validation"])
            for step, loss in enumerate(self.train, start=1):
                writer.writerow([step, loss, validation.get(step, "")])

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot(
            title="byte-level GPT on the Python standard library", xlabel="step", ylabel="loss (nats per byte)"
        )
        axes.plot(range(1, len(self.train) + 1), self.train, linewidth=0.8, alpha=0.6, label="train, each batch")
        if self.validation:
            axes.plot(*zip(*self.validation, strict=True), marker="o", color="C1", label="validation")
            step, loss = self.validation[-1]
            axes.annotate(f"{loss:.3f}", (step, loss), xytext=(0, -16), textcoords="offset points", ha="right")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(curve, dpi=120)
        return [table, curve]


def open_checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
    # Not in the background: the next step donates, and so overwrites, the very buffers that are being saved.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)


def save_checkpoint(
    checkpoints: ocp.CheckpointManager, state: State, config: Config, history: History, text: Text
) -> None:
    record = {"config": dataclasses.asdict(config), "history": dataclasses.asdict(history), "text": text.fingerprint()}
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
    checkpoints.save(int(state.step), args=items)


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    with open_checkpoints(folder) as checkpoints:
        items = ocp.args.Composite(record=ocp.args.JsonRestore())
        return checkpoints.restore(checkpoints.latest_step(), args=items).record


def read_state(checkpoints: ocp.CheckpointManager, like: State) -> State:
    items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
    return checkpoints.restore(checkpoints.latest_step(), args=items).state


# ---- The command


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = parser_of(__doc__, usage="%(prog)s [options]")
    positive = at_least(1)

    run = parser.add_argument_group("the run")
    run.add_argument("--out", type=pathlib.Path, metavar="DIR", help="folder of the run (default: runs/PRESET-NUMBER)")
    run.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out, or else the newest in runs/, exactly where its last checkpoint left it; "
        "of the flags below it takes --steps, which stretches the learning rate's schedule to the new end",
    )
    run.add_argument(
        "--implementation",
        choices=["auto", "reference", "xla", "cpu", "cuda"],
        default="auto",
        help="of attention; from the same seed all train the same model (default: auto, the fastest here)",
    )
    run.add_argument(
        "--log-every",
        type=positive,
        default=10,
        metavar="N",
        help="steps between updates of the progress bar's loss (default: 10)",
    )
    run.add_argument(
        "--eval-every", type=positive, default=100, metavar="N", help="steps between validations (default: 100)"
    )
    run.add_argument(
        "--checkpoint-every", type=positive, default=250, metavar="N", help="steps between checkpoints (default: 250)"
    )

    training = parser.add_argument_group("training", "defaults are the preset's")
    presets = ", ".join(f"{name} ({config.layers} layers of width {config.width})" for name, config in PRESETS.items())
    training.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"{presets}; default: tiny")
    training.add_argument("--steps", type=positive, metavar="N", help="batches to train on")
    training.add_argument("--batch", type=positive, metavar="N", help="windows of text in a batch")
    training.add_argument("--length", type=positive, metavar="N", help="bytes in a window, the model's context")
    training.add_argument("--learning-rate", type=real(zero=False), metavar="X", help="at its peak")
    training.add_argument("--seed", type=at_least(0), metavar="N", help="of the initial model and of the batches")
    training.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="to compute in (default: bfloat16 on a GPU, else float32); parameters are float32 always",
    )

    model = parser.add_argument_group("model", "defaults are the preset's")
    model.add_argument("--layers", type=positive, metavar="N", help="transformer blocks")
    model.add_argument("--width", type=positive, metavar="N", help="of the residual stream")
    model.add_argument("--heads", type=positive, metavar="N", help="query heads")
    model.add_argument("--kv-heads", type=positive, metavar="N", help="key and value heads; fewer than --heads is GQA")

    sample = parser.add_argument_group("the sample at the end")
    sample.add_argument("--prompt", default="def ", metavar="TEXT", help="what it continues (default: %(default)r)")
    sample.add_argument(
        "--sample", type=at_least(0), metavar="N", help="bytes to write (default: what the context holds, at most 512)"
    )
    sample.add_argument("--temperature", type=real(zero=True), default=0.7, metavar="X", help="default: 0.7; 0: greedy")
    return parser, parser.parse_args(arguments)


def parameters(config: Config) -> int:
    """The number of parameters, counted without making any."""
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def choose_folder(args: argparse.Namespace) -> pathlib.Path:
    """The folder of the run; ValueError when there is nothing to resume, or a run would be overwritten."""

    def finished(folder: pathlib.Path) -> list[pathlib.Path]:
        return [path for path in folder.glob("checkpoints/*") if path.name.isdigit()]

    if args.resume:
        runs = [args.out] if args.out else list(pathlib.Path("runs").glob("*"))
        newest = max((step for run in runs for step in finished(run)), key=lambda p: p.stat().st_mtime, default=None)
        if newest is None:
            raise ValueError(f"--resume found no checkpoint in {args.out or 'runs'}")
        return newest.parent.parent
    if args.out:
        if finished(args.out):
            raise ValueError(f"--out {args.out} already holds a run: add --resume to continue it, or name another")
        return args.out
    names = (pathlib.Path("runs", f"{args.preset or 'tiny'}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def choose_config(args: argparse.Namespace, record: dict[str, Any] | None) -> Config:
    """From preset and flags, or from the record of a checkpoint, which flags may not contradict."""
    names = [field.name for field in dataclasses.fields(Config)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if record is None:
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        config = dataclasses.replace(PRESETS[args.preset or "tiny"], **{"dtype": dtype, **given})
    else:
        if args.preset:
            raise ValueError("--preset can't go with --resume: the checkpoint knows the model")
        saved = Config(**record["config"])
        for name, value in given.items():
            if name != "steps" and value != getattr(saved, name):
                raise ValueError(
                    f"{flag(name)} {value} contradicts the run to resume, which has {getattr(saved, name)}"
                )
        config = dataclasses.replace(saved, **given)
        if config.steps < len(record["history"]["train"]):
            raise ValueError(
                f"--steps must be at least the {len(record['history']['train'])} steps of the run to resume, "
                f"got {config.steps}"
            )
    config.check()
    return config


def explain(config: Config, implementation: jax_flash.Implementation | None) -> jax_flash.Explanation:
    """Which implementation serves the model's attention; ValueError when the one asked for can't."""
    query, key = (
        jax.ShapeDtypeStruct((config.batch, config.length, heads, config.head_dim), config.dtype)
        for heads in (config.heads, config.kv_heads)
    )
    try:
        return jax_flash.explain(query, key, key, causal=True, implementation=implementation)
    except NotImplementedError as error:
        hint = " (JAX_PLATFORMS=cpu makes JAX run on the CPU)" if implementation == "cpu" else ""
        raise ValueError(f"--implementation {implementation}: {error}{hint}") from error


def choose_sample(args: argparse.Namespace, config: Config) -> tuple[np.ndarray, int]:
    """The prompt's bytes, and how many bytes to write after it; ValueError when the context can't hold both."""
    prompt = np.frombuffer(args.prompt.encode(), np.uint8)
    room = max(0, config.length - prompt.size)
    count = min(512, room) if args.sample is None else args.sample
    if count and not prompt.size:
        raise ValueError("--prompt must not be empty, or the sample has nothing to begin from (or give --sample 0)")
    if count > room:
        raise ValueError(
            f"--prompt and --sample must fit the context of --length {config.length} bytes, got {prompt.size} + {count}"
        )
    return prompt, count


def train(
    args: argparse.Namespace,
    config: Config,
    text: Text,
    graphdef: nnx.GraphDef,
    state: State,
    history: History,
    checkpoints: ocp.CheckpointManager,
) -> tuple[State, float]:
    """Trains to the last step, or until Ctrl-C; returns the state and the seconds that the steps alone took."""
    train_text = jnp.asarray(text.train)
    windows = jnp.asarray(spread_windows(text.validation, config.batch, config.length, count=128))
    began = time.perf_counter()
    train_step = make_train_step(graphdef, config).lower(state, train_text).compile()
    validation_loss = make_validation(graphdef).lower(state.params, windows).compile()
    print(f"compiled   in {time.perf_counter() - began:.1f} s", flush=True)

    start, seconds, pending = int(state.step), 0.0, []
    pace = 0.1 if sys.stderr.isatty() else 10  # seconds between two pictures of the bar: a log file wants few
    with (
        interruptions() as interrupted,
        tqdm(total=config.steps, initial=start, unit="step", dynamic_ncols=True, mininterval=pace) as bar,
    ):
        mark = time.perf_counter()
        for step in range(start + 1, config.steps + 1):
            state, loss = train_step(state, train_text)
            pending.append(loss)
            stop, last = interrupted(), step == config.steps
            evaluate = last or (step % args.eval_every == 0 and not stop)
            save = last or stop or step % args.checkpoint_every == 0
            if not (evaluate or save or step % args.log_every == 0):
                continue

            # Only here does Python wait for the device; between, it runs ahead of it.
            history.train += [float(loss) for loss in jax.device_get(pending)]
            elapsed = time.perf_counter() - mark
            speed = len(pending) * config.batch * config.length / elapsed
            seconds += elapsed
            pending.clear()
            if not math.isfinite(history.train[-1]):
                raise SystemExit(f"the loss became {history.train[-1]} by step {step}: try a lower --learning-rate")
            bar.set_postfix({"loss": f"{history.train[-1]:.3f}", "tokens/s": f"{speed:,.0f}"}, refresh=False)
            bar.update(step - bar.n)
            if evaluate:
                history.validation.append((step, float(validation_loss(state.params, windows))))
                bar.write(
                    f"step {step:>6}  train {mean_of_last(history.train):.3f}  "
                    f"validation {history.validation[-1][1]:.3f}  {speed:,.0f} tokens/s"
                )
            if save:
                save_checkpoint(checkpoints, state, config, history, text)
            if stop:
                break
            mark = time.perf_counter()
    return state, seconds


def main(arguments: list[str] | None = None) -> int:
    parser, args = parse(arguments)
    implementation = None if args.implementation == "auto" else args.implementation
    try:
        text = standard_library()
        folder = choose_folder(args)
        record = read_record(folder) if args.resume else None
        config = choose_config(args, record)
        if record and record["text"] != text.fingerprint():
            raise ValueError("--resume needs the Python that began the run: this one's standard library differs")
        if config.length >= (shortest := min(text.train.size, text.validation.size)):
            raise ValueError(f"--length must be below {shortest}, the bytes of text, got {config.length}")
        prompt, count = choose_sample(args, config)
        explanation = explain(config, implementation)
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    print(f"text       {text.train.size:,} bytes to train on, {text.validation.size:,} of other files to validate on")
    print(
        f"model      {parameters(config) / 1e6:.2f}M parameters: {config.layers} layers, width {config.width}, "
        f"{config.heads} query heads on {config.kv_heads} key heads, head_dim {config.head_dim}, {config.dtype}"
    )
    print(f"attention  {explanation.implementation} on {jax.devices()[0].device_kind}")
    graphdef, state = initial_state(config, implementation)
    history = History()
    with open_checkpoints(folder) as checkpoints:
        if record:
            state = read_state(checkpoints, state)
            history = History(
                record["history"]["train"], [(step, loss) for step, loss in record["history"]["validation"]]
            )
            print(f"resumed    {folder} at step {int(state.step)}")
        start = int(state.step)
        state, seconds = train(args, config, text, graphdef, state, history, checkpoints)
    steps = int(state.step)
    written = [*history.save(folder), folder / "checkpoints"]
    if steps < config.steps:
        print(f"stopped at step {steps} of {config.steps}, checkpoint saved; to continue:")
        print(f"  python {sys.argv[0]} --resume --out {folder}")
        return 130

    if count:
        key = jax.random.fold_in(jax.random.key(config.seed), steps)
        began = time.perf_counter()
        sampled = generate(
            graphdef, state.params, jnp.asarray(prompt)[None], key, count=count, temperature=args.temperature
        )
        sample = (prompt.tobytes() + np.asarray(sampled[0]).tobytes()).decode(errors="backslashreplace")
        took = time.perf_counter() - began
        print(f"\n---- {count} bytes after {args.prompt!r}, in {took:.1f} s with compilation ----\n{sample}\n----\n")
        written.append(folder / "sample.txt")
        written[-1].write_text(sample, encoding="utf-8")

    print(f"train loss       {mean_of_last(history.train):.3f} nats per byte, mean of the last 50 steps")
    print(f"validation loss  {history.validation[-1][1]:.3f} nats per byte")
    if steps > start:
        tokens = (steps - start) * config.batch * config.length
        print(f"speed            {tokens / seconds:,.0f} tokens/s, {seconds:.1f} s for {steps - start} steps")
    print(f"attention        {explanation}")
    print("written          " + "\n                 ".join(map(str, written)))
    return 0


def mean_of_last(losses: list[float]) -> float:
    """Of the last 50: a single batch says little."""
    return float(np.mean(losses[-50:]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
