"""One sequence over many devices: every schedule and order gives what one device gives."""

import dataclasses
import functools
import re
from typing import Any

import cases
import drawing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spread
from cases import Case, PackedCase, Target
from jax.sharding import NamedSharding, PartitionSpec
from spread import Spread

import jax_flash
from jax_flash import checkpoint_policies, context, flex
from jax_flash.context import ContextParallel

SCHEDULES = ("all_gather", "ring", "ulysses")
ORDERS = ("contiguous", "zigzag", "striped")
WAYS = [(schedule, order) for schedule in SCHEDULES for order in ORDERS]
CPU = next(target for target in cases.TARGETS if target.platform == "cpu" and target.kernel)
ANY = dataclasses.replace(CPU, implementation=None)  # some options become functions, which no kernel for CPUs takes

CASES = (
    Case("spread_plain", 16, 16, 4, 4, 8),
    Case("spread_causal", 16, 32, 4, 4, 8, causal=True, q_offset=(16, -3)),
    Case("spread_window", 32, 16, 4, 4, 8, window=(5, 2), sinks=True, q_offset=7, value_head_dim=16),
    Case("spread_grouped", 48, 48, 8, 2, 8, causal=True, window=(9, None), softcap=2.0),
    Case("spread_arrays", 16, 32, 4, 2, 8, arrays=True, window=(5, 2), scale=-0.3, q_offset=(3, 9), q_lengths=(16, 5)),
    Case("spread_lengths", 16, 32, 4, 2, 8, q_lengths=(16, 5), kv_lengths=(9, 24), sinks=True, bias="ts"),
    Case("spread_alibi", 16, 32, 4, 4, 8, alibi="bn", causal=True, q_offset=11, bias="n"),
    Case("spread_intervals", 80, 96, 4, 2, 8, intervals="kv_start:bnt kv_end:t q_start:s q_end:bns", bias="nt"),
    Case("spread_masks", 16, 32, 4, 2, 8, causal=True, q_offset=9, mask="bts", segments=3, bias="ns", bias_holes=0.3),
    Case("spread_dropout", 48, 64, 4, 4, 8, causal=True, dropout_rate=0.3, q_offset=3, bias="bnts"),
)
PACKED = (
    PackedCase("spread_packed", (5, 0, 14, 9), (7, 3, 20, 16), (4, 2), 4, 2, 8, causal=True, q_offset=(2, 0, 6, -1)),
    PackedCase("spread_packed_alibi", (5, 0, 14, 9), (7, 3, 20, 16), (4, 2), 4, 2, 8, alibi="dn", causal=True),
    PackedCase("spread_packed_intervals", (5, 0, 14, 9), (7, 3, 20, 16), (4, 2), 4, 2, 8, window=(3, 2), sinks=True,
               intervals="kv_start:nt q_end:s"),
    PackedCase("spread_packed_dropout", (9, 23), (31, 1), (0, 0), 4, 2, 8, dropout_rate=0.3),
)  # fmt: skip


def target_of(case: Case | PackedCase, schedule: str, order: str) -> Target:
    becomes_function = schedule == "ring" and isinstance(case, PackedCase) or order != "contiguous"
    return ANY if case.alibi is not None and becomes_function else CPU


def serves(case: Case | PackedCase, schedule: str) -> bool:
    return not (schedule == "ring" and case.dropout_rate)


@pytest.mark.parametrize(("schedule", "order"), WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_option(case: Case, schedule: str, order: str) -> None:
    if not serves(case, schedule):
        pytest.skip("the ring refuses dropout: test_refusals has its error")
    problem = cases.problem(case, "float32")
    # Both ways to call it, by turns.
    bound = (CASES.index(case) + WAYS.index((schedule, order))) % 2 == 0
    grid = spread.mesh({"seq": 2 if schedule == "ulysses" else 4})
    got = Spread(target_of(case, schedule, order), problem, ContextParallel("seq", schedule, order), grid).run(bound)
    problem.check("cpu", got)


@pytest.mark.parametrize(("schedule", "order"), WAYS)
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed_sequences(case: PackedCase, schedule: str, order: str) -> None:
    if not serves(case, schedule):
        pytest.skip("the ring refuses dropout: test_refusals has its error")
    problem = cases.packed_problem(case, "float32")
    bound = (PACKED.index(case) + WAYS.index((schedule, order))) % 2 == 0
    grid = spread.mesh({"seq": 2 if schedule == "ulysses" else 4})
    got = Spread(target_of(case, schedule, order), problem, ContextParallel("seq", schedule, order), grid).run(bound)
    problem.check("cpu", got)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str, schedule: str, order: str) -> None:
    """What is summed over devices and steps is summed in float32 at least."""
    problem = cases.problem(Case("spread_dtypes", 64, 64, 8, 8, 16, causal=True, sinks=True), dtype)
    grid = spread.mesh({"seq": 8})
    problem.check("cpu", Spread(CPU, problem, ContextParallel("seq", schedule, order), grid).run(bound=True))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_implementations(schedule: str, implementation: str) -> None:
    problem = cases.problem(Case("spread_others", 16, 16, 4, 2, 8, causal=True, sinks=True, bias="t"), "float32")
    target = dataclasses.replace(CPU, implementation=implementation)
    got = Spread(target, problem, ContextParallel("seq", schedule, "zigzag"), spread.mesh({"seq": 2})).run(bound=True)
    problem.check("cpu", got)


@pytest.mark.parametrize("order", ORDERS)
def test_large_scores_in_the_ring(order: str) -> None:
    """lse is so large that a single device would state it again from its keys, which here are not all of them."""
    case = Case("spread_large", 16, 32, 2, 2, 8, spread=30.0)
    problem = cases.problem(case, "float64")
    # In float64 nothing is restated, so that these are the results for float32 inputs of the same values.
    small = dataclasses.replace(
        problem, **{name: getattr(problem, name).astype(np.float32) for name in ("query", "key", "value", "dout", "dlse")}
    )
    grid = spread.mesh({"seq": 4})
    got = Spread(CPU, small, ContextParallel("seq", "ring", order), grid).run(bound=True)
    assert np.abs(problem.right["lse"]).max() > 1024
    for name, x in got.items():
        scale = np.abs(problem.right[name]).max()
        np.testing.assert_allclose(x, problem.right[name], rtol=0, atol=2e-3 * scale, err_msg=name)


# Functions


B, T, S, N, K, H = 2, 32, 64, 4, 2, 8


@functools.cache
def arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (N, T + S + 8), (B, T, N, H))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def with_functions(table: Any, context: ContextParallel | None, *inputs: Any) -> Any:
    """attention with a score function of global indices and a trained table, mask functions, and blocks of one."""
    marked = jnp.asarray(np.arange(B * S).reshape(B, S) % 3, np.int32)
    block_mask = flex.create_block_mask(
        lambda b, h, q, kv: (q // 4 + h) % 3 != kv // 8 % 3, None, N, T, S, block_size=8, q_offset=3
    )
    return jax_flash.attention(
        *inputs,
        q_offset=3,
        causal=True,
        alibi_slopes=jnp.asarray([[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.5, 0.3]], np.float32),
        score_mod=lambda score, b, h, q, kv: score + table[h, q - kv + S] * (b + 1).astype(score.dtype),
        mask_mod=lambda b, h, q, kv: (q >= kv + 2) | (marked[b, kv] == 1),
        block_mask=block_mask,
        context=context,
    )


def loss_with_functions(context: ContextParallel | None, attend: Any, *inputs: Any) -> Any:
    *inputs, table, dout = inputs
    out = attend(table, *inputs)
    return (out * dout).sum(), out


@functools.cache
def expected_with_functions() -> Any:
    loss = functools.partial(loss_with_functions, None, lambda *x: with_functions(x[0], None, *x[1:]))
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays())
    return jax.tree.map(np.asarray, (out, *gradients))


def check_functions(schedule: str, order: str, kind: str) -> None:
    sizes = {"seq": 4} if kind == "bound" else {"data": 2, "seq": 2, "heads": 2}
    of_context = ContextParallel("seq", schedule, order, *(("data", "heads") if kind == "Auto" else ()))
    grid = spread.mesh(sizes, "Auto" if kind == "bound" else kind)
    devices, rows = sizes["seq"], PartitionSpec(None, "seq")
    split = NamedSharding(grid, rows if kind == "bound" else PartitionSpec("data", "seq", "heads"))

    def attend(table: Any, *inputs: Any) -> Any:
        return with_functions(table, of_context, *inputs)

    if kind == "bound":
        attend = jax.shard_map(attend, in_specs=(PartitionSpec(), rows, rows, rows), out_specs=rows)
    loss = functools.partial(loss_with_functions, of_context, attend)
    *inputs, table, dout = arrays()
    with jax.set_mesh(grid):
        placed = [jax.device_put(context.reorder(x, devices, order), split) for x in (*inputs, dout)]
        table = jax.device_put(table, NamedSharding(grid, PartitionSpec()))
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
        (_, out), gradients = compiled(*placed[:3], table, placed[3])
    got = [np.asarray(context.restore(np.asarray(x), devices, order)) for x in (out, *gradients[:3])]
    for name, x, want in zip(("out", "dq", "dk", "dv", "dtable"), [*got, gradients[3]], expected_with_functions(),
                             strict=True):  # fmt: skip
        np.testing.assert_allclose(np.asarray(x), want, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("schedule", "order", "kind"),
    [("all_gather", "zigzag", "Explicit"), ("ring", "striped", "Auto"), ("ulysses", "striped", "bound")],
)
def test_functions_see_global_indices(schedule: str, order: str, kind: str) -> None:
    """Together with meshes that split batch and heads, too."""
    check_functions(schedule, order, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bound", "Auto", "Explicit"])
@pytest.mark.parametrize(("schedule", "order"), WAYS)
def test_functions_everywhere(schedule: str, order: str, kind: str) -> None:
    check_functions(schedule, order, kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_drawn_cases(seed: int) -> None:
    """Any combination of options, by all schedules that serve it."""
    chooser = _Chooser(np.random.default_rng(seed))
    program = drawing.program(chooser, ("float32", "bfloat16"))
    shapes = [shape for shape in ((16, 16), (16, 48), (64, 32), (80, 80), (32, 304)) if program.fits(shape)]
    problem = drawing.problem_of(program, chooser.one(shapes), seed)
    schedule, order = chooser.one(WAYS)
    devices = chooser.one([2, 4, 8] if schedule != "ulysses" else [n for n in (2, 4, 8) if not program.heads[0] % n] or [1])
    if schedule == "ring" and dict(program.options).get("dropout_rate"):
        schedule = "all_gather"
    grid = spread.mesh({"seq": devices})
    got = Spread(ANY, problem, ContextParallel("seq", schedule, order), grid).run(bound=bool(seed % 2))
    drawing.check(CPU, problem, got)


@dataclasses.dataclass
class _Chooser:
    rng: np.random.Generator

    def one(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def some(self, values: Any) -> Any:
        return [x for x in values if self.rng.random() < 0.25]
