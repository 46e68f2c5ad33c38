"""The flags of `finetune_llama.py`'s commands. Where a default is None, the settings of a run decide."""

import argparse
import pathlib
from typing import Any

from command_line import at_least, real
from llama import lora, pretraining
from llama.data import TEMPLATE

RUNS = pathlib.Path("runs", "llama")


def add_implementation(parser: Any) -> None:
    parser.add_argument(
        "--implementation",
        choices=["auto", "reference", "xla", "cpu", "cuda"],
        default="auto",
        help="of jax_flash's attention (default: auto, the fastest here)",
    )


def add_pretrain_flags(parser: argparse.ArgumentParser) -> None:
    positive = at_least(1)
    sizes = pretraining.Sizes
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the checkpoint")
    add_implementation(parser)
    for name, text in {
        "layers": "of the transformer",
        "width": "of the residual stream",
        "heads": "query heads",
        "kv-heads": "key and value heads; fewer than --heads is GQA",
        "vocabulary": "tokens of the tokenizer",
        "length": "tokens in a window, the model's context",
        "batch": "windows in a batch",
        "steps": "batches to train on",
    }.items():
        default = getattr(sizes, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--learning-rate", type=real(zero=False), metavar="X", help=f"at its peak (default: {sizes.learning_rate})"
    )
    parser.add_argument("--seed", type=at_least(0), metavar="N", help="of the model and of the batches (default: 0)")
    parser.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        help="whether the embedding also reads out (default: it does)",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="to compute in (default: float32)"
    )
    parser.add_argument(
        "--shard-megabytes", type=positive, default=2, metavar="N", help="of a file of weights (default: 2)"
    )


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    positive = at_least(1)
    run = parser.add_argument_group("the run")
    run.add_argument("--out", type=pathlib.Path, metavar="DIR", help=f"folder of the run (default: {RUNS}/NUMBER)")
    run.add_argument(
        "--resume",
        action="store_true",
        help=f"continue the run in --out, or else the newest in {RUNS}, exactly where its last checkpoint left it; of "
        "its settings it takes --steps, which stretches the learning rate's schedule to the new end",
    )
    run.add_argument(
        "--checkpoint-every", type=positive, default=10, metavar="N", help="steps between checkpoints (default: 10)"
    )
    run.add_argument(
        "--attention",
        choices=["ours", "cudnn", "xla"],
        default="ours",
        help="jax_flash's, or jax.nn.dot_product_attention by cuDNN or by XLA (default: ours)",
    )
    add_implementation(run)

    model = parser.add_argument_group("model and data")
    model.add_argument("--model", metavar="DIR", help="folder of a Llama checkpoint in Hugging Face's files")
    model.add_argument("--data", metavar="FILE", help='JSONL: a line is {"prompt": "...", "answer": "..."}')
    model.add_argument(
        "--random-weights",
        action="store_true",
        default=None,
        help="do not read weights or data, to measure speed: --model may then name a config.json alone",
    )
    model.add_argument("--length", type=positive, metavar="N", help="tokens in a row (default: 2048, or the context)")
    model.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        help="several examples in a row, told apart by segment ids (default: one in a row, padded)",
    )
    model.add_argument("--template", metavar="TEXT", help=f"around a prompt (default: {TEMPLATE!r})")
    model.add_argument("--rank", type=positive, metavar="N", help="of LoRA (default: 16)")
    model.add_argument("--alpha", type=real(zero=False), metavar="X", help="of LoRA (default: --rank)")
    model.add_argument(
        "--targets",
        type=lambda text: tuple(text.split(",")),
        metavar="NAMES",
        help=f"projections with adapters (default: {','.join(lora.TARGETS)})",
    )

    step = parser.add_argument_group("training")
    step.add_argument("--steps", type=positive, metavar="N", help="updates (default: 20)")
    step.add_argument("--batch", type=positive, metavar="N", help="rows in a micro-batch (default: 4)")
    step.add_argument("--accumulation", type=positive, metavar="N", help="micro-batches in a step (default: 4)")
    step.add_argument("--learning-rate", type=real(zero=False), metavar="X", help="at its peak (default: 2e-4)")
    step.add_argument("--warmup", type=at_least(0), metavar="N", help="steps up to the peak (default: 2)")
    step.add_argument("--clip", type=real(zero=False), metavar="X", help="largest gradient norm (default: 1)")
    step.add_argument("--weight-decay", type=real(zero=True), metavar="X", help="of AdamW (default: 0)")
    step.add_argument("--seed", type=at_least(0), metavar="N", help="of the adapters and of the order (default: 0)")
    step.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the base model and to compute in (default: bfloat16 on a GPU, else float32); adapters are float32 "
        "always, and float16 comes with dynamic loss scaling",
    )
    step.add_argument(
        "--loss-scale", type=real(zero=False), metavar="X", help="to begin with in float16 (default: 65536)"
    )
    step.add_argument(
        "--remat",
        choices=["none", "full", "attention"],
        help="what the backward pass recomputes: nothing, every layer, or (default) every layer but for its "
        "attention, which cudnn and xla recompute too",
    )

    sample = parser.add_argument_group("the sample before and after")
    sample.add_argument("--prompt", metavar="TEXT", help="what the model answers (default: the data's first prompt)")
    sample.add_argument(
        "--sample", type=at_least(0), metavar="N", help="tokens to write (default: what fits, at most 64)"
    )
    sample.add_argument("--temperature", type=real(zero=True), default=0.0, metavar="X", help="default: 0, greedy")


def add_merge_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=pathlib.Path, required=True, metavar="DIR", help="the base checkpoint")
    parser.add_argument("--adapter", type=pathlib.Path, required=True, metavar="DIR", help="in PEFT's files")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the new checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="(default: the checkpoint's)")
    parser.add_argument(
        "--shard-megabytes", type=at_least(1), default=5000, metavar="N", help="of a file of weights (default: 5000)"
    )
