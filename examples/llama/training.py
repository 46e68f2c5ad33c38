"""The step of training: accumulated gradients, clipping, a schedule with warm-up, and scaled losses for float16."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from llama.data import Rows
from llama.model import Llama

# Dynamic loss scaling (Micikevicius et al. 2018): the scale halves when a gradient overflows, and doubles after so many
# steps without. The numbers are those of torch.amp.GradScaler.
GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24


class LossScale(NamedTuple):
    """By what the loss is multiplied, so that the gradients of float16 do not underflow; 1 for other dtypes."""

    value: jax.Array
    good_steps: jax.Array  # since it last changed

    @staticmethod
    def initial(value: float) -> "LossScale":
        return LossScale(jnp.asarray(value, jnp.float32), jnp.zeros((), jnp.int32))

    def adjusted(self, finite: jax.Array) -> "LossScale":
        grows = finite & (self.good_steps + 1 >= GROWTH_INTERVAL)
        value = jnp.where(grows, jnp.minimum(self.value * 2, LARGEST_SCALE), self.value)
        value = jnp.where(finite, value, self.value / 2)
        return LossScale(value, jnp.where(finite & ~grows, self.good_steps + 1, 0))


class State(NamedTuple):
    """What a step changes; a checkpoint holds all of it. The batch follows from step and seed."""

    step: jax.Array
    updates: jax.Array  # steps whose gradients were finite: the schedule counts these
    params: nnx.State  # those that are trained
    optimizer: optax.OptState
    loss_scale: LossScale


class Metrics(NamedTuple):
    loss: jax.Array  # nats per token of the answers
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    finite: jax.Array  # whether the step changed anything
    loss_scale: jax.Array  # that of this step


def schedule(peak: float, steps: int, warmup: int) -> optax.Schedule:
    """Linear warm-up whose first step already learns, then a cosine down to a tenth of ``peak``."""
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=peak / 10,
    )


def make_optimizer(learning_rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """AdamW; weight decay on matrices only, not on the norms' scales. The step itself clips."""
    return optax.adamw(
        learning_rate,
        b2=0.95,
        weight_decay=weight_decay,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )


def initial_state(params: nnx.State, optimizer: optax.GradientTransformation, loss_scale: float) -> State:
    # Two arrays, as a buffer can be donated only once.
    step, updates = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return State(step, updates, params, optimizer.init(params), LossScale.initial(loss_scale))


def summed_loss(model: Llama, rows: Rows[jax.Array], *, segmented: bool) -> jax.Array:
    """Cross entropy in nats, summed over the targets that count, of rows [B, T].

    The logits are made, and in the backward pass made once more, a row at a time: of 4 x 2048 tokens and 128,000
    words all of them would take 4 GB, and their gradient as much.
    """
    # Attention skips most blocks where segment ids ascend, so those of the padding at the end come last.
    segments = jnp.where(rows.segments == 0, jnp.iinfo(jnp.int32).max, rows.segments) if segmented else None
    hidden = model.hidden(rows.tokens, rows.positions, segments)

    @jax.checkpoint
    def of_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, targets, weights = row
        losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)
        return (losses * weights).sum()

    return jax.lax.map(of_row, (hidden, rows.targets, rows.weights)).sum()


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    *,
    clip: float,
    segmented: bool,
) -> jax.stages.Wrapped:
    """One step: (state, frozen parameters, rows [accumulation, B, T]) to (state, metrics), as one compiled function.

    Gradients of the micro-batches add up in float32. The loss is the mean over all answers' tokens of the step, not a
    mean of the micro-batches' means, so that it does not depend on how the step is cut.
    """

    # Donated, the old state's memory becomes the new state's.
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: State, frozen: nnx.State, rows: Rows[jax.Array]) -> tuple[State, Metrics]:
        factor = state.loss_scale.value / jnp.maximum(rows.weights.sum(), 1)

        def scaled_loss(params: nnx.State, micro: Rows[jax.Array]) -> jax.Array:
            return summed_loss(nnx.merge(graphdef, params, frozen), micro, segmented=segmented) * factor

        def accumulate(carry: tuple[jax.Array, nnx.State], micro: Rows) -> tuple[tuple[jax.Array, nnx.State], None]:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(scaled_loss)(state.params, micro)), None

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        (loss, gradients), _ = jax.lax.scan(accumulate, (jnp.zeros(()), zeros), rows)
        loss, gradients = jax.tree.map(lambda x: x / state.loss_scale.value, (loss, gradients))
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)

        clipped = jax.tree.map(lambda g: g * jnp.minimum(1, clip / jnp.maximum(norm, 1e-12)), gradients)
        updates, optimizer_state = optimizer.update(clipped, state.optimizer, state.params)
        changed = state._replace(
            updates=state.updates + 1,
            params=optax.apply_updates(state.params, updates),
            optimizer=optimizer_state,
        )
        changed = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, state)
        metrics = Metrics(loss, norm, learning_rate(state.updates), finite, state.loss_scale.value)
        return changed._replace(step=state.step + 1, loss_scale=state.loss_scale.adjusted(finite)), metrics

    return train_step
