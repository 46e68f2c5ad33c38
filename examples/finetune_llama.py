"""Fine-tunes a Llama by LoRA with jax_flash as its attention, from Hugging Face's files to Hugging Face's files.

    python examples/finetune_llama.py pretrain --out models/tiny      # a small checkpoint, made here in a minute
    python examples/finetune_llama.py prompts --out prompts.jsonl     # prompts and answers about Python's library
    python examples/finetune_llama.py train --model models/tiny --data prompts.jsonl --learning-rate 1e-2
    python examples/finetune_llama.py train --resume                  # goes on where the newest run stopped
    python examples/finetune_llama.py merge --model models/tiny --adapter runs/llama/1/adapter --out models/tuned

train takes any folder of a Llama checkpoint (config.json, tokenizer.json, safetensors). The folder of a run
(runs/llama/NUMBER, or --out) receives checkpoints, metrics.jsonl, loss.png, sample.txt, and adapter/ in PEFT's files.
Install what it needs with: pip install "jax_flash[examples]"

To measure speed and memory with random weights and tokens, side by side (cudnn and xla are jax.nn's attention):

    python examples/finetune_llama.py train --model examples/llama/llama2-7b.json --random-weights --attention cudnn
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import resource
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tokenizers
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import jax_flash
from command_line import interruptions, parser_of
from llama import checkpoint, data, flags, lora, pretraining, training
from llama.data import TEMPLATE
from llama.model import Attention, Llama, LlamaConfig, count_parameters, generate


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the losses, but for the implementation of attention. Checkpoints carry it."""

    model: str
    data: str | None = None  # None: random tokens
    random_weights: bool = False
    steps: int = 20
    batch: int = 4
    accumulation: int = 4
    length: int = 2048
    packing: bool = False
    template: str = TEMPLATE
    learning_rate: float = 2e-4
    warmup: int = 2
    clip: float = 1.0
    weight_decay: float = 0.0
    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] = tuple(lora.TARGETS)
    seed: int = 0
    dtype: str = "float32"
    loss_scale: float = 65536.0
    remat: str = "attention"

    @property
    def adapter(self) -> lora.LoRA:
        return lora.LoRA(self.rank, self.alpha, tuple(self.targets))

    def check(self) -> None:
        """Raises ValueError, naming the flag, for settings that don't fit together."""
        if unknown := [name for name in self.targets if name not in lora.TARGETS]:
            raise ValueError(f"--targets must be among {', '.join(lora.TARGETS)}, got {', '.join(unknown)}")
        if self.warmup >= self.steps:
            raise ValueError(f"--warmup must be below --steps {self.steps}, got {self.warmup}")
        if self.data is None and not self.random_weights:
            raise ValueError("--data must name a file of prompts and answers, unless --random-weights is given")
        if self.data is not None and self.random_weights:
            raise ValueError("--random-weights takes random tokens, so --data can't go with it")
        data.check_template(self.template)


# ---- Model and data of a run


class Run(NamedTuple):
    """What does not change while it trains."""

    config: LlamaConfig
    settings: Settings
    rows: data.Rows[np.ndarray]
    summary: str
    tokenizer: tokenizers.Tokenizer | None
    prompt: str  # of the sample
    fingerprint: str  # of weights and rows

    def prompt_ids(self) -> list[int]:
        assert self.tokenizer
        return data.encode_prompt(self.tokenizer, self.settings.template, self.prompt, self.config.bos_token_id)


def prepare(settings: Settings, config: LlamaConfig, prompt: str | None) -> Run:
    """Reads what the settings name, but for the weights themselves."""
    if settings.length > config.max_position_embeddings and not settings.random_weights:
        raise ValueError(
            f"--length must be at most the model's max_position_embeddings {config.max_position_embeddings}, "
            f"got {settings.length}"
        )
    if settings.data is None:
        count = settings.batch * settings.accumulation
        rows = data.random_rows(count, settings.length, config.vocab_size, settings.seed, packing=settings.packing)
        return Run(config, settings, rows, "random tokens", None, "", "random")
    folder = pathlib.Path(settings.model)
    if not folder.is_dir():
        raise ValueError(f"--model must name a folder of a checkpoint, or have --random-weights, got {folder}")
    tokenizer = checkpoint.load_tokenizer(folder, config)
    examples = data.read_examples(pathlib.Path(settings.data))
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    sequences = data.encode(examples, tokenizer, settings.template, config.bos_token_id, eos)
    rows, summary = data.make_rows(sequences, settings.length, packing=settings.packing)
    prompt = examples[0].prompt if prompt is None else prompt
    fingerprint = f"{checkpoint.fingerprint(folder)} {data.fingerprint(rows)}"
    return Run(config, settings, rows, summary, tokenizer, prompt, fingerprint)


def make_model(run: Run, attention: Attention) -> Llama:
    """The base model in the dtype that it computes in, as it is never trained, and float32 adapters around it."""
    settings = run.settings
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "param_dtype": settings.dtype,
        "attention": attention,
        "remat": settings.remat,
    }
    if settings.random_weights:
        model = Llama(run.config, rngs=nnx.Rngs(settings.seed), **options)
    else:
        model = checkpoint.load_model(pathlib.Path(settings.model), run.config, **options)
    lora.add_lora(model, settings.adapter, rngs=nnx.Rngs(settings.seed + 1))
    return model


def check_attention(attention: Attention, run: Run) -> str:
    """A line about what serves the model's attention; ValueError when the one asked for can't."""
    config, settings = run.config, run.settings
    device = f"{jax.devices()[0].device_kind}"
    if attention.kind != "ours":
        if attention.kind == "cudnn" and jax.default_backend() != "gpu":
            raise ValueError(f"--attention cudnn needs an NVIDIA GPU, got {jax.default_backend()}")
        if attention.kind == "cudnn" and settings.dtype == "float32":
            raise ValueError("--attention cudnn needs --dtype bfloat16 or float16, got float32")
        if attention.implementation:
            raise ValueError(f"--implementation is of --attention ours, got --attention {attention.kind}")
        return f"jax.nn.dot_product_attention by {attention.kind} on {device}"
    query, key = (
        jax.ShapeDtypeStruct((settings.batch, settings.length, heads, config.head_dim), settings.dtype)
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    segments = jnp.ones(query.shape[:2], jnp.int32) if settings.packing else None
    try:
        explanation = jax_flash.explain(
            query,
            key,
            key,
            causal=True,
            q_segment_ids=segments,
            kv_segment_ids=segments,
            implementation=attention.implementation,
        )
    except NotImplementedError as error:
        raise ValueError(f"--implementation {attention.implementation}: {error}") from error
    return f"jax_flash by {explanation.implementation} on {device}"


# ---- Records: checkpoints, metrics, curve


@dataclasses.dataclass
class Record:
    """What a checkpoint holds beside the state."""

    settings: dict[str, Any]
    fingerprint: str
    prompt: str  # of the sample
    before: str  # what the base model wrote
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the lines of metrics.jsonl


def open_checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
    # Not in the background: the next step donates, and so overwrites, the very buffers that are being saved.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)


def save_checkpoint(checkpoints: ocp.CheckpointManager, state: training.State, record: Record) -> None:
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(dataclasses.asdict(record)))
    checkpoints.save(int(state.step), args=items)


def read_record(folder: pathlib.Path) -> Record:
    with open_checkpoints(folder) as checkpoints:
        items = ocp.args.Composite(record=ocp.args.JsonRestore())
        return Record(**checkpoints.restore(checkpoints.latest_step(), args=items).record)


def read_state(checkpoints: ocp.CheckpointManager, like: training.State) -> training.State:
    items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
    return checkpoints.restore(checkpoints.latest_step(), args=items).state


def save_curve(path: pathlib.Path, history: list[dict[str, Any]]) -> None:
    steps = [line["step"] for line in history]
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    upper.plot(steps, [line["loss"] for line in history], marker=".")
    upper.set(title="Llama by LoRA", ylabel="loss (nats per token of the answers)", ylim=(0, None))
    lower.plot(steps, [line["learning_rate"] for line in history], color="C1")
    lower.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def peak_memory() -> str:
    """Of the accelerator, or where it does not say so (CPUs), of this process."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return f"{stats['peak_bytes_in_use'] / 2**30:.2f} GiB on the device"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of this process"


# ---- train


def train(
    run: Run,
    graphdef: nnx.GraphDef,
    state: training.State,
    frozen: nnx.State,
    record: Record,
    checkpoints: ocp.CheckpointManager,
    metrics_path: pathlib.Path,
    checkpoint_every: int,
) -> training.State:
    """Trains to the last step, or until Ctrl-C."""
    settings = run.settings

    def rows_of(step: int) -> data.Rows[jax.Array]:
        rows = data.rows_of_step(run.rows, step, settings.accumulation, settings.batch, settings.seed)
        return jax.tree.map(jnp.asarray, rows)

    learning_rate, optimizer = optimizer_of(settings)
    began = time.perf_counter()
    step_of = (
        training.make_train_step(graphdef, optimizer, learning_rate, clip=settings.clip, segmented=settings.packing)
        .lower(state, frozen, rows_of(0))
        .compile()
    )
    print(f"compiled   in {time.perf_counter() - began:.1f} s", flush=True)

    start = int(state.step)
    pace = 0.1 if sys.stderr.isatty() else 10  # seconds between two pictures of the bar: a log file wants few
    with (
        interruptions() as interrupted,
        metrics_path.open("w", encoding="utf-8") as file,
        tqdm(total=settings.steps, initial=start, unit="step", dynamic_ncols=True, mininterval=pace) as bar,
    ):
        # After a kill the file may be ahead of the checkpoint.
        file.writelines(json.dumps(line) + "\n" for line in record.history)
        for step in range(start + 1, settings.steps + 1):
            mark = time.perf_counter()
            rows = rows_of(step - 1)
            state, metrics = step_of(state, frozen, rows)
            values = training.Metrics(*(x.item() for x in jax.device_get(metrics)))
            seconds = time.perf_counter() - mark
            line: dict[str, Any] = {
                "step": step,
                "loss": values.loss,
                "grad_norm": values.grad_norm,
                "learning_rate": values.learning_rate,
                "tokens_per_s": int(jnp.count_nonzero(rows.segments)) / seconds,
                "seconds": seconds,
            }
            if settings.dtype == "float16":
                line |= {"loss_scale": values.loss_scale, "skipped": not values.finite}
            check_finite(values, step, settings)
            # JSON has no word for these; they only come with a skipped step.
            line |= {name: None for name in ("loss", "grad_norm") if not math.isfinite(line[name])}
            record.history.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            bar.set_postfix({"loss": f"{values.loss:.3f}", "tokens/s": f"{line['tokens_per_s']:,.0f}"}, refresh=False)
            bar.update(step - bar.n)
            stop = interrupted()
            if stop or step == settings.steps or step % checkpoint_every == 0:
                save_checkpoint(checkpoints, state, record)
            if stop:
                break
    return state


def check_finite(values: training.Metrics, step: int, settings: Settings) -> None:
    """A step of float16 may overflow, and is skipped; another dtype's, or one that no scale helps, is the end."""
    if values.finite or (settings.dtype == "float16" and values.loss_scale > 1):
        return
    raise SystemExit(
        f"the loss became {values.loss} and the gradient norm {values.grad_norm} at step {step}: "
        "try a lower --learning-rate"
    )


def optimizer_of(settings: Settings) -> tuple[Any, Any]:
    learning_rate = training.schedule(settings.learning_rate, settings.steps, settings.warmup)
    return learning_rate, training.make_optimizer(learning_rate, settings.weight_decay)


def write_sample(
    run: Run, graphdef: nnx.GraphDef, params: tuple[nnx.State, nnx.State], count: int, temperature: float
) -> str:
    """What the model answers to the prompt, up to the end that it sets."""
    prompt = jnp.asarray(run.prompt_ids(), jnp.int32)[None]
    key = jax.random.key(run.settings.seed)
    ids = generate(graphdef, params, prompt, key, count=count, temperature=temperature)[0].tolist()
    ids = list(itertools.takewhile(lambda token: token not in run.config.eos_token_ids, ids))
    assert run.tokenizer
    return run.tokenizer.decode(ids)


def choose_sample(run: Run, wanted: int | None) -> int:
    """How many tokens to write; ValueError when the context can't hold them after the prompt."""
    if run.tokenizer is None:
        return 0
    size = len(run.prompt_ids())
    room = max(0, run.config.max_position_embeddings - size)
    count = min(64, room) if wanted is None else wanted
    if count and not size:
        raise ValueError("--prompt must not be empty, or the sample has nothing to begin from (or give --sample 0)")
    if count > room:
        raise ValueError(
            f"--prompt and --sample must fit the context of {run.config.max_position_embeddings} tokens, "
            f"got {size} + {count}"
        )
    return count


def choose_folder(out: pathlib.Path | None, resume: bool) -> pathlib.Path:
    """The folder of the run; ValueError when there is nothing to resume, or a run would be overwritten."""

    def finished(folder: pathlib.Path) -> list[pathlib.Path]:
        return [path for path in folder.glob("checkpoints/*") if path.name.isdigit()]

    if resume:
        runs = [out] if out else list(flags.RUNS.glob("*"))
        newest = max((step for run in runs for step in finished(run)), key=lambda p: p.stat().st_mtime, default=None)
        if newest is None:
            raise ValueError(f"--resume found no checkpoint in {out or flags.RUNS}")
        return newest.parent.parent
    if out:
        if finished(out):
            raise ValueError(f"--out {out} already holds a run: add --resume to continue it, or name another")
        return out
    return next(folder for number in itertools.count(1) if not (folder := flags.RUNS / str(number)).exists())


def choose_settings(args: argparse.Namespace, record: Record | None) -> tuple[Settings, LlamaConfig]:
    """From flags, or from the record of a checkpoint, which flags may not contradict."""
    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in ("model", "data"):  # absolute, so that --resume finds them from any folder
        if name in given:
            given[name] = str(pathlib.Path(given[name]).resolve())
    if record is None:
        if "model" not in given:
            raise ValueError("--model must name the folder of a checkpoint")
        config = checkpoint.load_config(pathlib.Path(given["model"]))
        defaults = {
            "dtype": "bfloat16" if jax.default_backend() == "gpu" else "float32",
            "length": min(Settings.length, config.max_position_embeddings),
            "alpha": float(given.get("rank", Settings.rank)),
            "warmup": min(Settings.warmup, given.get("steps", Settings.steps) - 1),
        }
        settings = Settings(**{**defaults, **given})
    else:
        saved = Settings(**{**record.settings, "targets": tuple(record.settings["targets"])})
        for name, value in given.items():
            if name != "steps" and value != getattr(saved, name):
                raise ValueError(
                    f"{flag(name)} {value} contradicts the run to resume, which has {getattr(saved, name)}"
                )
        settings = dataclasses.replace(saved, **given)
        if settings.steps < len(record.history):
            raise ValueError(
                f"--steps must be at least the {len(record.history)} steps of the run to resume, got {settings.steps}"
            )
        config = checkpoint.load_config(pathlib.Path(settings.model))
    settings.check()
    return settings, config


def train_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    attention = Attention(args.attention, None if args.implementation == "auto" else args.implementation)
    try:
        folder = choose_folder(args.out, args.resume)
        record = read_record(folder) if args.resume else None
        settings, config = choose_settings(args, record)
        if record and args.prompt not in (None, record.prompt):
            raise ValueError(f"--prompt {args.prompt!r} contradicts the run to resume, which has {record.prompt!r}")
        run = prepare(settings, config, record.prompt if record else args.prompt)
        if record and record.fingerprint != run.fingerprint:
            raise ValueError("--resume needs the checkpoint and the data that began the run: these differ")
        count = choose_sample(run, args.sample)
        served = check_attention(attention, run)
        model = make_model(run, attention)
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    trained = count_parameters(model, nnx.LoRAParam)
    print(f"data       {run.summary}")
    print(
        f"model      {(count_parameters(model) - trained) / 1e6:,.2f}M parameters: {config.num_hidden_layers} layers, "
        f"width {config.hidden_size}, {config.num_attention_heads} query heads on {config.num_key_value_heads} key "
        f"heads, head_dim {config.head_dim}, {settings.dtype}"
    )
    print(f"LoRA       {trained:,} parameters: rank {settings.rank}, alpha {settings.alpha:g}")
    print(f"attention  {served}")
    graphdef, *split = nnx.split(model, nnx.LoRAParam, ...)
    params, frozen = split
    del model, split
    scale = settings.loss_scale if settings.dtype == "float16" else 1.0
    state = training.initial_state(params, optimizer_of(settings)[1], scale)
    del params
    if record is None:
        before = write_sample(run, graphdef, (state.params, frozen), count, args.temperature) if count else ""
        record = Record(dataclasses.asdict(settings), run.fingerprint, run.prompt, before)
    record.settings = dataclasses.asdict(settings)
    with open_checkpoints(folder) as checkpoints:
        if args.resume:
            state = read_state(checkpoints, state)
            print(f"resumed    {folder} at step {int(state.step)}")
        state = train(
            run, graphdef, state, frozen, record, checkpoints, folder / "metrics.jsonl", args.checkpoint_every
        )
    steps = int(state.step)
    save_curve(folder / "loss.png", record.history)
    if steps < settings.steps:
        print(f"stopped at step {steps} of {settings.steps}, checkpoint saved; to continue:")
        print(f"  python {sys.argv[0]} train --resume --out {folder}")
        return 130

    written = [folder / "metrics.jsonl", folder / "loss.png", folder / "checkpoints"]
    lora.save_adapter(folder / "adapter", nnx.merge(graphdef, state.params, frozen), settings.adapter, settings.model)
    written.append(folder / "adapter")
    if count:
        after = write_sample(run, graphdef, (state.params, frozen), count, args.temperature)
        sample = f"---- prompt ----\n{run.prompt}\n---- before ----\n{record.before}\n---- after ----\n{after}\n----\n"
        print(f"\n{sample}")
        written.append(folder / "sample.txt")
        written[-1].write_text(sample, encoding="utf-8")
    report(record.history)
    print(f"attention        {served}")
    print("written          " + "\n                 ".join(map(str, written)))
    return 0


def report(history: list[dict[str, Any]]) -> None:
    losses = [line["loss"] for line in history if line["loss"] is not None]
    if losses:
        print(f"loss             {losses[0]:.3f} at first, {losses[-1]:.3f} at last, nats per token of the answers")
    skipped = sum(line.get("skipped", False) for line in history)
    if skipped:
        print(f"skipped          {skipped} steps whose gradients overflowed")
    # The median, as the first step also waits for the device to warm up.
    speed = np.median([line["tokens_per_s"] for line in history])
    print(f"speed            {speed:,.0f} tokens/s, {np.median([line['seconds'] for line in history]):.3f} s a step")
    print(f"peak memory      {peak_memory()}")


# ---- The other commands


def pretrain_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    fields = [field.name for field in dataclasses.fields(pretraining.Sizes)]
    sizes = pretraining.Sizes(**{name: getattr(args, name) for name in fields if getattr(args, name) is not None})
    implementation = None if args.implementation == "auto" else args.implementation
    try:
        sizes.check()
        checkpoint.check_new(args.out)
        loss = pretraining.pretrain(
            args.out, sizes, Attention("ours", implementation), args.dtype, args.shard_megabytes * 10**6
        )
    except (ValueError, OSError, NotImplementedError) as error:
        parser.error(str(error))
    print(f"loss       {loss:.3f} nats per token, mean of the last 20 steps")
    print(f"written    {args.out}")
    return 0


def prompts_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        if args.out.exists():
            raise ValueError(f"--out must name a new file, got {args.out}")
        lines = [json.dumps(example._asdict()) + "\n" for example in data.standard_library_examples()]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(lines), encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"written    {args.out}: {len(lines):,} prompts and answers")
    return 0


def merge_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        checkpoint.check_new(args.out)
        config = checkpoint.load_config(args.model)
        original = checkpoint.read_json(args.model / checkpoint.CONFIG)
        dtype = args.dtype or original.get("dtype") or original.get("torch_dtype") or "float32"
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"--dtype must be given, as {args.model} is in {dtype}")
        model = checkpoint.load_model(args.model, config, dtype=dtype, param_dtype=dtype)
        lora.load_adapter(args.adapter, model)
        lora.merge_lora(model)
        with checkpoint.new_folder(args.out) as folder:
            checkpoint.copy_companions(args.model, folder)
            checkpoint.save_model(folder, model, original, shard_bytes=args.shard_megabytes * 10**6)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"written    {args.out}")
    return 0


# ---- The command line


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    subparsers = {
        name: commands.add_parser(name, help=text, description=text)
        for name, text in {
            "pretrain": "make a small Llama checkpoint out of Python's standard library",
            "prompts": "write prompts and answers about Python's standard library as JSONL",
            "train": "fine-tune a checkpoint by LoRA",
            "merge": "add an adapter to the weights of its checkpoint, and write that as a checkpoint",
        }.items()
    }
    flags.add_pretrain_flags(subparsers["pretrain"])
    subparsers["prompts"].add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="to write")
    flags.add_train_flags(subparsers["train"])
    flags.add_merge_flags(subparsers["merge"])
    args = parser.parse_args(arguments)
    return subparsers[args.command], args


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


COMMANDS = {
    "pretrain": pretrain_command,
    "prompts": prompts_command,
    "train": train_command,
    "merge": merge_command,
}


def main(arguments: list[str] | None = None) -> int:
    parser, args = parse(arguments)
    return COMMANDS[args.command](parser, args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
