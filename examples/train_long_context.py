"""Trains the GPT of train_gpt.py with every sequence spread over several devices, and checks that nothing else changes.

    python examples/train_long_context.py                    # 2 virtual devices of this CPU, in a minute or two
    python examples/train_long_context.py --seq 4 --order striped --schedule ring
    python examples/train_long_context.py --data 2 --seq 4 --length 131072 --no-compare    # on 8 GPUs

The devices form a mesh ("data", "seq"): the batch is split over the first axis, the rows of each sequence over the
second. Tokens and labels are put into the order of the devices once (jax_flash.context.reorder), rotary embeddings read
the rows' positions, and attention is told by context=ContextParallel(...). All else is the single device's program,
which XLA splits as the tokens are split. At the end the same steps run on one device, and the losses are compared.
Install what it needs with: pip install "jax_flash[examples]"
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import re
import sys
import time
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_gpt
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train_gpt import Config, State

import jax_flash
from command_line import at_least, parser_of, real
from jax_flash.context import ContextParallel, Order, Schedule, padded_length, positions, reorder, set_overlap_flags

SMALL = Config(layers=2, width=64, heads=4, kv_heads=2, length=512, batch=2, steps=60, learning_rate=2e-3)
DATA, SEQ = "data", "seq"


class SpreadAttention(train_gpt.SelfAttention):
    """Self-attention of rows that stand at ``position`` [T], and are spread over devices as ``context`` says."""

    context: ContextParallel

    def __call__(
        self, x: jax.Array, position: jax.typing.ArrayLike, cache: train_gpt.Cache | None
    ) -> tuple[jax.Array, train_gpt.Cache | None]:
        assert cache is None
        # rotate() counts rows from a position on; the difference is where each row stands.
        apart = jnp.asarray(position) - jnp.arange(x.shape[1], dtype=jnp.int32)
        query, key = train_gpt.rotate(self.query(x), apart), train_gpt.rotate(self.key(x), apart)
        out = jax_flash.attention(query, key, self.value(x), causal=True, context=self.context)
        return self.out(out), None


class SpreadGPT(train_gpt.GPT):
    """The same parameters, by the same names."""

    def __init__(self, config: Config, context: ContextParallel, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        for block in self.blocks:
            block.attention = SpreadAttention(config, None, rngs=rngs)
            block.attention.context = context


def spread_structure(config: Config, context: ContextParallel) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: SpreadGPT(config, context, rngs=nnx.Rngs(0))))[0]


def make_spread_step(graphdef: nnx.GraphDef, config: Config, context: ContextParallel, devices: int) -> Any:
    """As train_gpt.make_train_step, with the tokens in the order of the devices."""
    optimizer = train_gpt.make_optimizer(config)
    rows = positions(config.length, devices, context.order)
    split = PartitionSpec(DATA, SEQ)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: State, text: jax.Array) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        windows = train_gpt.random_windows(text, key, config.batch, config.length)
        tokens, labels = (
            jax.lax.with_sharding_constraint(reorder(x, devices, context.order), split)
            for x in (windows[:, :-1], windows[:, 1:])
        )

        def loss_of(params: nnx.State) -> jax.Array:
            logits, _ = nnx.merge(graphdef, params)(tokens, jnp.asarray(rows))
            # A mean, so that the order does not matter.
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels.astype(jnp.int32)).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state), loss

    return train_step


# Where one is asynchronous, as on GPUs, its end has the result alone.
COLLECTIVE = re.compile(
    r"= (\([^()]*\)|\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-done)?\("
)
SIZES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u8": 1, "s8": 1, "pred": 1}


def communicated(program: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of the results of each kind of collective in a compiled step, on one device."""
    found: dict[str, int] = {}
    for shapes, kind in COLLECTIVE.findall(program.as_text() or ""):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = SIZES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
            found[kind] = found.get(kind, 0) + size
    return found


def peak_memory(program: jax.stages.Compiled) -> int:
    """Bytes of arguments, results and temporary arrays of a step on one device, as XLA has planned them."""
    plan = program.memory_analysis()
    assert plan is not None
    used = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return int(used - plan.alias_size_in_bytes)


@dataclasses.dataclass
class Run:
    losses: list[float]
    tokens_per_second: float
    memory: int
    communicated: dict[str, int]


def run(step: Any, state: State, text: jax.Array, config: Config, name: str) -> Run:
    """Takes config.steps steps."""
    program = step.lower(state, text).compile()
    losses, began = [], time.perf_counter()
    for number in range(1, config.steps + 1):
        state, loss = program(state, text)
        losses.append(loss)
        if number % max(1, config.steps // 4) == 0:
            print(f"{name:<10} step {number:>5}  loss {float(loss):.4f}", flush=True)
    found = [float(loss) for loss in losses]
    seconds = time.perf_counter() - began
    tokens = config.steps * config.batch * config.length
    return Run(found, tokens / seconds, peak_memory(program), communicated(program))


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = parser_of(__doc__, usage="%(prog)s [options]")
    positive = at_least(1)
    parser.add_argument(
        "--data", type=positive, default=1, metavar="N", help="devices that share the batch (default 1)"
    )
    parser.add_argument(
        "--seq", type=positive, default=2, metavar="N", help="devices that share a sequence (default 2)"
    )
    parser.add_argument("--schedule", choices=get_args(Schedule), default="auto", help="default: auto")
    parser.add_argument("--order", choices=get_args(Order), default="zigzag", help="default: zigzag, which is balanced")
    parser.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=True, help="also train on one device (default)"
    )
    for name in ("layers", "width", "heads", "kv_heads", "length", "batch", "steps"):
        default = getattr(SMALL, name)
        parser.add_argument(
            train_gpt.flag(name), type=positive, default=default, metavar="N", help=f"default {default}"
        )
    parser.add_argument("--learning-rate", type=real(zero=False), default=SMALL.learning_rate, metavar="X")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: float32")
    return parser, parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    parser, args = parse(arguments)
    set_overlap_flags()
    count = args.data * args.seq
    with contextlib.suppress(RuntimeError):  # JAX has started already, and has the devices that it has
        jax.config.update("jax_num_cpu_devices", count)
    try:
        config = Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})
        config.check()
        if len(jax.devices()) < count:
            raise ValueError(f"--data and --seq need {count} devices, JAX has {len(jax.devices())}")
        if config.batch % args.data:
            raise ValueError(f"--batch must be a multiple of --data {args.data}, got {config.batch}")
        if (wanted := padded_length(config.length, args.seq, args.order)) != config.length:
            raise ValueError(f"--length must suit --seq {args.seq} and --order {args.order}: take {wanted}")
        context = ContextParallel(SEQ, args.schedule, args.order, batch_axis=DATA)
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:count]).reshape(args.data, args.seq), (DATA, SEQ), axis_types=(AxisType.Auto,) * 2
        )
        query, key = (
            jax.ShapeDtypeStruct((config.batch, config.length, heads, config.head_dim), config.dtype)
            for heads in (config.heads, config.kv_heads)
        )
        with jax.set_mesh(mesh):
            print(jax_flash.explain(query, key, key, causal=True, context=context))
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))

    text = train_gpt.standard_library().train
    graphdef, state = train_gpt.initial_state(config, None)
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        step = make_spread_step(spread_structure(config, context), config, context, args.seq)
        # Copied, since the step donates them.
        placed = jax.device_put(jax.tree.map(jnp.copy, state), whole)
        spread = run(step, placed, jax.device_put(text, whole), config, f"{count} devices")
    runs = {f"{count} devices": spread}
    if args.compare:
        device = jax.devices()[0]
        step = train_gpt.make_train_step(graphdef, config)
        runs["one device"] = run(
            step, jax.device_put(state, device), jax.device_put(text, device), config, "one device"
        )
    for name, found in runs.items():
        moved = ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in sorted(found.communicated.items()))
        print(
            f"{name:<10} {found.tokens_per_second:,.0f} tokens/s, {found.memory / 1e6:.1f} MB of memory per device, "
            f"communicated per step and device: {moved or 'nothing'}"
        )
    if args.compare:
        difference = float(np.abs(np.subtract(runs["one device"].losses, spread.losses)).max())
        print(f"largest difference of the losses of {config.steps} steps: {difference:.1e}")
        # Sums of other order, rounded to bfloat16: 0.05 within 20 steps of 131,072 tokens.
        allowed = 1e-3 if config.dtype == "float32" else 0.1
        if not difference < allowed:
            print(f"the losses differ by more than {allowed}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
