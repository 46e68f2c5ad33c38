"""One sequence over many devices: every schedule and order gives what one device gives."""

import dataclasses
import functools
import importlib.util
import pathlib
import re
from typing import Any

import cases
import drawing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spread
from cases import CPU, CUDA, Case, PackedCase, Target
from jax.sharding import NamedSharding, PartitionSpec
from spread import Spread

import jax_flash
from jax_flash import checkpoint_policies, context, flex
from jax_flash._context import choice, orders
from jax_flash.context import ContextParallel

SCHEDULES = ("all_gather", "ring", "ulysses")
ORDERS = ("contiguous", "zigzag", "striped")
WAYS = [(schedule, order) for schedule in SCHEDULES for order in ORDERS]
KERNELS = {target.platform: target for target in (CPU, CUDA)}
# Some options become functions, which no kernel for CPUs takes.
ANY = {platform: dataclasses.replace(target, implementation=None) for platform, target in KERNELS.items()}

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


def target_of(case: Case | PackedCase, schedule: str, order: str, platform: str) -> Target:
    becomes_function = (schedule == "ring" and isinstance(case, PackedCase)) or order != "contiguous"
    return (ANY if case.alibi is not None and becomes_function else KERNELS)[platform]


def serves(case: Case | PackedCase, schedule: str) -> bool:
    return not (schedule == "ring" and case.dropout_rate)


def ways_of(values: Any, *, every: int = 6, served: Any = serves) -> list[Any]:
    """Each value with all schedules and orders that serve it; one in ``every`` in each run, the others are slow."""
    found = [(x, *way) for x in values for way in WAYS if served(x, way[0])]
    return [
        pytest.param(*each, marks=[] if i % every == values.index(each[0]) % every else pytest.mark.slow,
                     id="-".join(str(getattr(x, "name", x)) for x in each))
        for i, each in enumerate(found)
    ]  # fmt: skip


on_platforms = pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def check_case(problem: cases.Problem, case: Any, schedule: str, order: str, platform: str) -> None:
    # Both ways to call it, by turns.
    bound = (len(case.name) + WAYS.index((schedule, order))) % 2 == 0
    devices = 2 if schedule == "ulysses" else spread.many(platform)
    grid = spread.mesh({"seq": devices}, platform=platform)
    target = target_of(case, schedule, order, platform)
    got = Spread(target, problem, ContextParallel("seq", schedule, order), grid).run(bound)
    problem.check(platform, got)


@on_platforms
@pytest.mark.parametrize(("case", "schedule", "order"), ways_of(CASES))
def test_every_option(case: Case, schedule: str, order: str, platform: str) -> None:
    check_case(cases.problem(case, "float32"), case, schedule, order, platform)


@on_platforms
@pytest.mark.parametrize(("case", "schedule", "order"), ways_of(PACKED, every=8))
def test_packed_sequences(case: PackedCase, schedule: str, order: str, platform: str) -> None:
    check_case(cases.packed_problem(case, "float32"), case, schedule, order, platform)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "order"), WAYS)
@pytest.mark.parametrize("dtype", CUDA.dtypes)
def test_several_tiles_on_gpus(dtype: str, schedule: str, order: str) -> None:
    """A shard is several tiles of rows and of keys long."""
    case = Case("spread_tiles", 1024, 1024, 8, 4, 64, causal=True, leading=(1,))
    grid = spread.mesh({"seq": spread.many("cuda")}, platform="cuda")
    problem = cases.problem(case, dtype)
    problem.check("cuda", Spread(CUDA, problem, ContextParallel("seq", schedule, order), grid).run(bound=False))


@on_platforms
@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("case", "schedule", "order"),
    [
        pytest.param(CASES[i], schedule, order, id=f"{CASES[i].name}-{schedule}", marks=marks)
        for i, schedule, order, marks in (
            (3, "ring", "zigzag", ()),
            (8, "all_gather", "striped", ()),
            (9, "all_gather", "zigzag", ()),
            (5, "ring", "striped", pytest.mark.slow),
            (9, "ulysses", "striped", pytest.mark.slow),
            (7, "ulysses", "zigzag", pytest.mark.slow),
            (4, "all_gather", "contiguous", pytest.mark.slow),
        )
    ],
)
def test_meshes_with_other_axes(case: Case, schedule: str, order: str, kind: str, platform: str) -> None:
    """Batch and heads are split, too: the same dropout, the same gradients of what devices share."""
    problem = cases.problem(case, "float32")
    of_context = ContextParallel("seq", schedule, order, "data", "heads")
    sizes = {"data": 2, "seq": 2, "heads": 2}
    if platform == "cuda":  # four GPUs: batch or heads
        sizes["data" if kind == "Auto" else "heads"] = 1
    grid = spread.mesh(sizes, kind, platform)
    problem.check(platform, Spread(KERNELS[platform], problem, of_context, grid).run(bound=False))


@pytest.mark.parametrize(
    ("dtype", "schedule", "order"),
    ways_of(("bfloat16", "float16", "float64"), every=4, served=lambda dtype, schedule: True),
)
def test_other_dtypes(dtype: str, schedule: str, order: str) -> None:
    """What is summed over devices and steps is summed in float32 at least."""
    problem = cases.problem(Case("spread_dtypes", 64, 64, 8, 8, 16, causal=True, sinks=True), dtype)
    grid = spread.mesh({"seq": 8})
    problem.check("cpu", Spread(CPU, problem, ContextParallel("seq", schedule, order), grid).run(bound=True))


@pytest.mark.parametrize("implementation", ["reference", pytest.param("xla", marks=pytest.mark.slow)])
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
        problem,
        **{name: getattr(problem, name).astype(np.float32) for name in ("query", "key", "value", "dout", "dlse")},
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


def check_functions(schedule: str, order: str, kind: str, platform: str) -> None:
    # Two heads on each device with "ulysses", whose offsets then matter
    alone = {"seq": 2 if schedule == "ulysses" else spread.many(platform)}
    meshed = {"data": 2, "seq": 2, "heads": 2 if platform == "cpu" else 1}
    sizes = alone if kind == "bound" else meshed
    of_context = ContextParallel("seq", schedule, order, *(("data", "heads") if kind == "Auto" else ()))
    grid = spread.mesh(sizes, "Auto" if kind == "bound" else kind, platform)
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
    [("ring", "zigzag", "Explicit"), ("ulysses", "striped", "bound")],
)
def test_functions_see_global_indices(schedule: str, order: str, kind: str) -> None:
    """Together with meshes that split batch and heads, too."""
    check_functions(schedule, order, kind, "cpu")


@on_platforms
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bound", "Auto", "Explicit"])
@pytest.mark.parametrize(("schedule", "order"), WAYS)
def test_functions_everywhere(schedule: str, order: str, kind: str, platform: str) -> None:
    check_functions(schedule, order, kind, platform)


@on_platforms
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_drawn_cases(seed: int, platform: str) -> None:
    """Any combination of options, by all schedules that serve it."""
    chooser = _Chooser(np.random.default_rng(seed))
    program = drawing.program(chooser, ("float32", "bfloat16"))
    shapes = [shape for shape in ((16, 16), (16, 48), (64, 32), (80, 80), (32, 304)) if program.fits(shape)]
    problem = drawing.problem_of(program, chooser.one(shapes), seed)
    schedule, order = chooser.one(WAYS)
    sizes = (2, 4, 8) if platform == "cpu" else (2, spread.many(platform))
    devices = chooser.one(sizes if schedule != "ulysses" else [n for n in sizes if not program.heads[0] % n] or [1])
    if schedule == "ring" and dict(program.options).get("dropout_rate"):
        schedule = "all_gather"
    grid = spread.mesh({"seq": devices}, platform=platform)
    of_context = ContextParallel("seq", schedule, order)
    got = Spread(ANY[platform], problem, of_context, grid).run(bound=bool(seed % 2))
    drawing.check(KERNELS[platform], problem, got)


@dataclasses.dataclass
class _Chooser:
    rng: np.random.Generator

    def one(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def some(self, values: Any) -> Any:
        return [x for x in values if self.rng.random() < 0.25]


# Derivatives, memory, compositions


ROWS = PartitionSpec(None, "seq")


def placed(grid: Any, order: str, *inputs: Any, spec: PartitionSpec = ROWS) -> list[jax.Array]:
    """[B, length, ...] arrays in ``order``, split over the axis."""
    return [jax.device_put(context.reorder(x, grid.shape["seq"], order), NamedSharding(grid, spec)) for x in inputs]


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        ("ring", "striped"),
        pytest.param("all_gather", "zigzag", marks=pytest.mark.slow),
        pytest.param("ulysses", "zigzag", marks=pytest.mark.slow),
    ],
)
def test_forward_mode_and_second_order(schedule: str, order: str) -> None:
    """Tangents, and derivatives of gradients, are those of one device."""
    case = Case("spread_twice", 8, 16, 2, 2, 4, causal=True, q_offset=5, sinks=True, bias="nt")
    problem = cases.problem(case, "float64")
    attend = cases.call(CPU, problem, q_offset=case.q_offset)
    sinks, bias = problem.trainable["sinks"], problem.trainable["bias"]

    def second(of_context: Any, *inputs: Any) -> Any:
        def loss(query: Any, key: Any, value: Any, sinks: Any, bias: Any) -> Any:
            out, lse = attend(query, key, value, sinks=sinks, bias=bias, context=of_context)
            return (out**3).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

        everything = (0, 1, 2, 3, 4)
        _, moved = jax.jvp(loss, inputs, inputs)
        gradients, moved_gradients = jax.jvp(jax.grad(loss, everything), inputs, inputs)
        return moved, gradients, moved_gradients

    want = jax.tree.map(np.asarray, jax.jit(functools.partial(second, None))(*problem.inputs, sinks, bias))
    grid = spread.mesh({"seq": 2})
    of_context = ContextParallel("seq", schedule, order)
    with jax.set_mesh(grid):
        inputs = placed(grid, order, *problem.inputs)
        rows = context.reorder(bias, 2, order, axis=-2)
        moved, *gradients = jax.jit(functools.partial(second, of_context))(*inputs, sinks, rows)
    np.testing.assert_allclose(np.asarray(moved), want[0], rtol=1e-10)
    for got, right in zip(gradients, want[1:], strict=True):
        restored = [context.restore(np.asarray(x), 2, order) for x in got[:3]]
        restored += [got[3], context.restore(np.asarray(got[4]), 2, order, axis=-2)]
        for x, y in zip(restored, right, strict=True):
            np.testing.assert_allclose(np.asarray(x), y, rtol=1e-9, atol=1e-9)


def gradient_program(
    schedule: str, devices: int, rows: int, order: str = "zigzag", wrap: Any = lambda f: f, *, compiled: bool = True
) -> Any:
    """A compiled loss and its gradient by query, key and value of [1, rows of each device, 2, 64] arrays."""
    grid = spread.mesh({"seq": devices})
    of_context = ContextParallel("seq", schedule, order)

    def loss(*inputs: Any) -> Any:
        attend = wrap(lambda *x: jnp.sin(jax_flash.attention(*x, causal=True, context=of_context)))
        return attend(*inputs).sum()

    shape = jax.ShapeDtypeStruct(
        (1, rows * devices, 8, 16), np.float32, sharding=NamedSharding(grid, PartitionSpec(None, "seq"))
    )
    with jax.set_mesh(grid):
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(shape, shape, shape)
        return lowered.compile() if compiled else lowered


def test_memory_of_ring_and_ulysses_does_not_grow_with_the_devices() -> None:
    """A device's part of the sequence decides it; what "all_gather" holds grows with the whole sequence."""
    temporary = {
        (schedule, devices): gradient_program(schedule, devices, 256).memory_analysis().temp_size_in_bytes
        for schedule in SCHEDULES
        for devices in (4, 8)
    }
    shard = 256 * 8 * 16 * 4
    for schedule in ("ring", "ulysses"):
        assert temporary[schedule, 8] < temporary[schedule, 4] + 4 * shard, temporary
    # K and V of four more devices, and their gradients
    assert temporary["all_gather", 8] > temporary["all_gather", 4] + 16 * shard, temporary


def count(program: Any, operation: str) -> int:
    return len(re.findall(rf"= \S.* {operation}(?:-start)?\(", program.as_text()))


OLD_JAX = jax.__version_info__ < (0, 10)
NO_POLICY = "jax 0.9 fails an assertion where a policy for remat saves names inside a shard_map"


@pytest.mark.skipif(OLD_JAX, reason=NO_POLICY)
def test_what_remat_saves_is_not_gathered_again() -> None:
    save = jax.checkpoint_policies.save_only_these_names(*checkpoint_policies.NAMES, checkpoint_policies.GATHERED)

    def gathers(policy: Any) -> int:
        wrap = functools.partial(jax.checkpoint, policy=policy)
        # Before XLA, which for CPUs computes nothing again
        program = gradient_program("all_gather", 2, 16, "contiguous", wrap, compiled=False)
        return len(re.findall(r"stablehlo\.all_gather", program.as_text()))

    assert gathers(save) == 2
    assert gathers(jax.checkpoint_policies.nothing_saveable) == 4


def test_what_travels() -> None:
    """K and V and their gradients go around the ring; with "all_gather" the gradients are scattered."""
    ring = gradient_program("ring", 4, 16)
    # K and V three times in each pass, dK and dV three times.
    assert count(ring, "collective-permute") == 2 * (3 + 3 + 3)
    assert not count(ring, "all-gather")
    assert len(re.findall(r"jax_flash_forward", ring.as_text())) >= 4
    gathered = gradient_program("all_gather", 4, 16, "contiguous")
    assert count(gathered, "all-gather") == count(gathered, "reduce-scatter") == 2
    exchanged = gradient_program("ulysses", 4, 16)
    assert count(exchanged, "all-to-all")
    assert not count(exchanged, "all-gather")


def test_the_ring_tests_no_pair_off_the_diagonal() -> None:
    """Under causal in zigzag order: twice half of the rows and keys, of 32 each, and no mask, nor a branch. In striped
    order causal is that of indices."""
    zigzag = gradient_program("ring", 4, 32, compiled=False).as_text()
    steps = re.findall(r"@jax_flash_(forward|backward)\(.* : \((tensor<.*?>), (tensor<.*?>)", zigzag)
    sizes = [(kind, q.split("x")[1], k.split("x")[1]) for kind, q, k in steps]
    assert sorted(sizes) == sorted(
        (kind, size, size) for kind in ("forward", "backward") for size in ("32", *3 * ["16", "16"])
    )
    assert not count(gradient_program("ring", 4, 32), "conditional")
    striped = gradient_program("ring", 4, 32, "striped", compiled=False).as_text()
    assert "jax_flash_backward" in striped
    assert "intervals = true" not in zigzag + striped


def test_branches_of_platforms_have_the_same_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX traces the branches of all platforms that it has: of two where there are GPUs, and here of CPUs alone."""
    compared = []

    def platform_dependent(*args: Any, cpu: Any, default: Any) -> Any:
        found = cpu(*args)
        compared.append(jax.tree.map(jax.typeof, found))
        assert compared[-1] == jax.tree.map(jax.typeof, default(*args))
        return found

    monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)
    grid = spread.mesh({"data": 2, "seq": 2, "heads": 2})
    of_context = ContextParallel("seq", "ring", "zigzag", "data", "heads")

    def loss(*inputs: Any) -> Any:
        return jax_flash.attention(*inputs, causal=True, context=of_context).sum()

    x = jax.ShapeDtypeStruct((2, 16, 2, 8), np.float32)
    with jax.set_mesh(grid):
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x)
    assert len(compared) >= 2


@pytest.mark.parametrize("left", [0, 5, 16, 20, 50])
def test_a_window_ends_the_ring(left: int) -> None:
    """In contiguous order K and V go no farther than it reaches, and dK and dV come home at once."""
    hops = min(3, -(-left // 16))
    case = Case(f"spread_reach_{left}", 64, 64, 4, 2, 8, window=(left, 0), sinks=True, bias="nts")
    grid = spread.mesh({"seq": 4})
    problem = cases.problem(case, "float32")
    problem.check("cpu", Spread(CPU, problem, ContextParallel("seq", "ring"), grid).run(bound=bool(left % 2)))

    x = jax.ShapeDtypeStruct((2, 64, 4, 8), np.float32, sharding=NamedSharding(grid, ROWS))

    def loss(*inputs: Any) -> Any:
        of_context = ContextParallel("seq", "ring")
        return jnp.sin(jax_flash.attention(*inputs, causal=True, window=left, context=of_context)).sum()

    with jax.set_mesh(grid):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
        found = jax_flash.explain(x, x, x, causal=True, window=left, context=ContextParallel("seq", "ring"))
    # K and V in each pass; dK and dV. XLA makes one of the first hops of both passes, if they have the same direction.
    assert count(program, "collective-permute") == 2 * (3 * hops - (0 < hops < 3))
    assert not hops or f"{2 * 2 * 16 * 4 * 8 * 4 * hops / 1e3:.3g} kB sent by each device in the forward" in str(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_in_a_scan(schedule: str) -> None:
    """With remat, and arguments that are donated."""
    if schedule == "ring" and OLD_JAX:
        pytest.skip(NO_POLICY)
    grid = spread.mesh({"data": 2, "seq": 2})
    of_context = ContextParallel("seq", schedule, "zigzag", batch_axis="data")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 16, 2, 8)).astype(np.float32)
    scales = rng.standard_normal((3, 8)).astype(np.float32)

    def loss(of_context: Any, scales: Any, x: Any) -> Any:
        @functools.partial(jax.checkpoint, policy=checkpoint_policies.save_attention)
        def layer(x: Any, scale: Any) -> Any:
            return x + jax_flash.attention(x * scale, x, x, causal=True, context=of_context), None

        return (jax.lax.scan(layer, x, scales)[0] ** 2).sum()

    def train_step(of_context: Any, scales: Any, x: Any) -> Any:
        return scales - 0.01 * jax.grad(functools.partial(loss, of_context))(scales, x)

    want = np.asarray(jax.jit(functools.partial(train_step, None))(scales, x))
    with jax.set_mesh(grid):
        (spread_x,) = placed(grid, "zigzag", x, spec=PartitionSpec("data", "seq"))
        given = jax.device_put(scales, NamedSharding(grid, PartitionSpec()))
        got = jax.jit(functools.partial(train_step, of_context), donate_argnums=0)(given, spread_x)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)


def test_vmap_of_a_spread_call() -> None:
    grid = spread.mesh({"seq": 4})
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((3, 2, 16, 2, 8)).astype(np.float32)
    want = jax.vmap(lambda x: jax_flash.attention(x, x, x, causal=True))(inputs)
    with jax.set_mesh(grid):
        for schedule in ("all_gather", "ring"):
            of_context = ContextParallel("seq", schedule)
            rows = PartitionSpec(None, None, "seq")
            attend = functools.partial(jax_flash.attention, causal=True, context=of_context)
            mapped = jax.vmap(lambda x, attend=attend: attend(x, x, x))
            attend = jax.shard_map(mapped, in_specs=rows, out_specs=rows)
            got = jax.jit(attend)(jax.device_put(inputs, NamedSharding(grid, rows)))
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


def test_without_context_keys_are_gathered_and_rows_stay() -> None:
    grid = spread.mesh({"seq": 4})
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), np.float32, sharding=NamedSharding(grid, PartitionSpec(None, "seq")))
    program = jax.jit(functools.partial(jax_flash.attention, causal=True)).lower(x, x, x).compile()
    assert count(program, "all-gather")
    assert program.output_shardings.spec[1] == "seq"


# Orders


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    for devices, length in ((1, 6), (2, 8), (3, 12), (4, 24)):
        rows = context.positions(length, devices, order)
        assert sorted(rows) == list(range(length))
        assert all((np.diff(rows.reshape(devices, -1)) > 0).all(axis=1))
        x = np.arange(2 * length * 3).reshape(2, length, 3)
        moved = context.reorder(x, devices, order)
        np.testing.assert_array_equal(np.asarray(moved), x[:, rows])
        np.testing.assert_array_equal(np.asarray(context.restore(moved, devices, order)), x)
        last = context.reorder(x.swapaxes(1, 2), devices, order, axis=-1)
        np.testing.assert_array_equal(np.asarray(last), x.swapaxes(1, 2)[..., rows])


def test_zigzag_and_striped_orders_are_balanced() -> None:
    """Pairs that causal keeps, by device: equal with zigzag, and up to one row's with stripes."""
    length, devices = 64, 4
    pairs = {order: (context.positions(length, devices, order) + 1).reshape(devices, -1).sum(1) for order in ORDERS}
    assert len(set(pairs["zigzag"])) == 1
    assert pairs["striped"].max() - pairs["striped"].min() < length
    assert pairs["contiguous"].max() > 6 * pairs["contiguous"].min()


@pytest.mark.parametrize("order", ORDERS)
def test_shards(order: str) -> None:
    """A shard's formulas for positions and counts agree with the order."""
    for devices in (1, 2, 4):
        all_rows = context.positions(16, devices, order).reshape(devices, -1)
        for index in range(devices):
            shard = orders.Shard(order, devices, jnp.int32(index), 16 // devices)
            np.testing.assert_array_equal(shard.positions, all_rows[index])
            limits = np.array([-(2**31), -1, *range(18), 2**31 - 1])
            want = (all_rows[index] < limits[:, None]).sum(1)
            np.testing.assert_array_equal(shard.count_before(jnp.asarray(limits, jnp.int32)), want)
            np.testing.assert_array_equal(shard.of(jnp.arange(16), 0), all_rows[index])


@pytest.mark.parametrize("order", ORDERS)
def test_lengths_that_do_not_divide(order: str) -> None:
    problem = cases.problem(Case("spread_padded", 13, 13, 2, 2, 8, causal=True), "float32")
    grid = spread.mesh({"seq": 4})
    lengths = np.full(2, 13, np.int32)
    with jax.set_mesh(grid):
        padded = [context.pad(x, 4, order, value=np.nan) for x in problem.inputs]
        assert padded[0].shape[1] == context.padded_length(13, 4, order) == 16
        attend = functools.partial(jax_flash.attention, causal=True, q_lengths=lengths, kv_lengths=lengths)
        out, lse = jax.jit(functools.partial(attend, return_lse=True, context=ContextParallel("seq", "ring", order)))(
            *placed(grid, order, *padded)
        )
    got = {"out": context.restore(np.asarray(out), 4, order), "lse": context.restore(np.asarray(lse), 4, order, -1)}
    problem.check("cpu", {"out": np.asarray(got["out"])[:, :13], "lse": np.asarray(got["lse"])[..., :13]})


def test_reorder_where_axes_are_explicit() -> None:
    grid = spread.mesh({"seq": 2}, "Explicit")
    with jax.set_mesh(grid):
        x = jax.device_put(np.arange(16).reshape(2, 8), NamedSharding(grid, PartitionSpec(None, "seq")))
        back = jax.jit(lambda x: context.restore(context.reorder(x, 2, "zigzag"), 2, "zigzag"))(x)
        assert jax.typeof(back).sharding.spec == PartitionSpec(None, "seq")
        np.testing.assert_array_equal(np.asarray(back), np.asarray(x))


# What is refused, chosen and explained


X = jax.ShapeDtypeStruct((2, 16, 4, 8), np.float32)


def shaped(rows: int = 16, heads: int = 4) -> Any:
    return jnp.zeros((2, rows, heads, 8), np.float32)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "context must be a jax_flash.context.ContextParallel or None, got 'seq'",
         lambda: jax_flash.attention(shaped(), shaped(), shaped(), context="seq")),
        (ValueError, "context names the mesh axis 'rows', which must be bound by a jax.shard_map",
         lambda: jax_flash.attention(shaped(), shaped(), shaped(), context=ContextParallel("rows"))),
        (ValueError, "query must have a length that is a multiple of 8 over 4 devices for context with order 'zigzag'",
         lambda: jax_flash.attention(shaped(12), shaped(), shaped(), context=ContextParallel("seq", order="zigzag"))),
        (ValueError, "key must have a length that is a multiple of 4 over 4 devices",
         lambda: jax_flash.attention(shaped(), shaped(18), shaped(18), context=ContextParallel("seq"))),
        (NotImplementedError, "context with schedule 'ulysses' does not serve this call: its 4 devices must divide",
         lambda: jax_flash.attention(shaped(16, 6), shaped(16, 6), shaped(16, 6),
                                     context=ContextParallel("seq", "ulysses"))),
        (NotImplementedError, "context with schedule 'ring' does not serve this call: dropout_rate",
         lambda: jax_flash.attention(shaped(), shaped(), shaped(), dropout_rate=0.1, dropout_key=jax.random.key(0),
                                     context=ContextParallel("seq", "ring"))),
        (ValueError, "schedule of context must be one of", lambda: ContextParallel("seq", "rings")),
        (ValueError, "order of context must be one of", lambda: ContextParallel("seq", order="zig")),
        (TypeError, "axis of context must be the name of one mesh axis", lambda: ContextParallel(("a", "b"))),
        (ValueError, "batch_axis and head_axis of context must be mesh axes other than axis",
         lambda: ContextParallel("seq", batch_axis="seq")),
        (ValueError, "order must be one of", lambda: context.reorder(shaped(), 2, "zig")),
        (ValueError, "a multiple of 8, got 12", lambda: context.reorder(shaped(12), 4, "zigzag")),
        (ValueError, "axis must be one of the array's 4", lambda: context.reorder(shaped(), 4, "zigzag", axis=4)),
        (TypeError, "axis_size must be an int", lambda: context.positions(8, 2.0, "zigzag")),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], message: str, call: Any) -> None:
    with jax.set_mesh(spread.mesh({"seq": 4})), pytest.raises(error, match=re.escape(message)):
        jax.jit(call)()


def test_no_mesh() -> None:
    with pytest.raises(ValueError, match=r"context names the mesh axis 'seq'.*which has no axes"):
        jax_flash.attention(shaped(), shaped(), shaped(), context=ContextParallel("seq"))


def test_the_batch_must_divide() -> None:
    of_context = ContextParallel("seq", batch_axis="data")
    grid = spread.mesh({"data": 4, "seq": 2})
    with jax.set_mesh(grid), pytest.raises(ValueError, match="context must split 2 batch entries evenly, got 4"):
        jax_flash.attention(shaped(), shaped(), shaped(), context=of_context)


@pytest.mark.parametrize(
    ("heads", "lengths", "options", "schedule"),
    [
        ((8, 8), (64, 64), {}, "ulysses"),
        ((8, 2), (64, 64), {}, "all_gather"),
        ((8, 2), (64, 640), {}, "ulysses"),
        ((8, 8), (16, 16), {}, "ulysses"),
        ((6, 6), (64, 64), {}, "all_gather"),
        ((6, 6), (64, 128), {}, "ring"),
        ((6, 6), (64, 128), {"dropout_rate": 0.1, "dropout_key": jax.random.PRNGKey(0)}, "all_gather"),
        ((8, 2), (64, 640), {"dropout_rate": 0.1, "dropout_key": jax.random.PRNGKey(0)}, "ulysses"),
    ],
)
def test_auto_picks_a_schedule_that_serves(
    heads: tuple[int, int], lengths: tuple[int, int], options: dict[str, Any], schedule: str
) -> None:
    query, key = (jax.ShapeDtypeStruct((1, t, n, 8), np.float32) for t, n in zip(lengths, heads, strict=True))
    with jax.set_mesh(spread.mesh({"seq": 4})):
        found = jax_flash.explain(query, key, key, context=ContextParallel("seq"), **options)
        jax.eval_shape(
            functools.partial(jax_flash.attention, context=ContextParallel("seq"), **options), query, key, key
        )
    assert f"schedule {schedule!r} over 4 devices" in found.context[0]


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    of_context = ContextParallel("seq", "ring", "striped")
    with jax.set_mesh(spread.mesh({"seq": 4})):
        found = jax_flash.explain(X, X, X, platform="cuda", alibi_slopes=np.ones(4, np.float32), context=of_context)
        # 3 times a shard of K and V of 2 * 4 * 4 * 16 elements; then again, with their gradients
        assert "6.14 kB sent by each device in the forward pass, 12.3 kB in the backward pass" in str(found)
        assert "alibi_slopes become a score_mod" in str(found)
        assert "xla_gpu_enable_latency_hiding_scheduler is off" in str(found)
        context.set_overlap_flags()
        assert "is off" not in str(jax_flash.explain(X, X, X, platform="cuda", context=of_context))
        slopes = np.ones(4, np.float32)
        served = jax_flash.explain(X, X, X, platform="cuda", alibi_slopes=slopes, context=of_context, source=True)
        assert "score" in served.source


def test_flax_hook() -> None:
    """Bound beforehand, as other options that Flax lacks."""
    from flax import nnx

    from jax_flash.flax import attention_fn

    grid, order = spread.mesh({"seq": 2}), "zigzag"
    x = np.random.default_rng(0).standard_normal((2, 16, 8)).astype(np.float32)

    def module(**bound: Any) -> Any:
        attend = functools.partial(attention_fn, causal=True, **bound)
        return nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))

    want = module()(x)
    with jax.set_mesh(grid):
        spread_module = module(context=ContextParallel("seq", order=order))
        got = jax.jit(lambda x: spread_module(x))(*placed(grid, order, x))
        with pytest.raises(NotImplementedError, match="context must not be given where weights are sown"):
            spread_module(x, sow_weights=True)
    np.testing.assert_allclose(np.asarray(context.restore(np.asarray(got), 2, order)), want, rtol=1e-4, atol=1e-5)


def test_tables_of_the_model_of_scale() -> None:
    """docs/scaling.md has what research/context/scaling.py prints."""
    folder = pathlib.Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("scaling", folder / "research" / "context" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scaling)
    text = (folder / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert scaling.check() in text
    for (devices, schedule, _), times in scaling.MEASURED.items():
        for tokens, measured in times.items():
            assert abs(scaling.predicted(devices, schedule, tokens) / measured - 1) < 0.15
    for title, table in scaling.tables().items():
        assert f"### {title}\n\n{table}\n" in text
    # The library counts the same bytes: 64 tokens on 8 devices, 8 key heads, head_dim 128, bfloat16.
    sizes = choice.Sizes(64, 64, scaling.HEADS, 8, 2 * scaling.HEAD_DIM)
    for schedule in SCHEDULES:
        sent = sum(choice.travels(schedule, 8, sizes, scaling.ITEM, 1).values())
        assert sent == pytest.approx(scaling.cost(schedule, 64, 8, 8, 1.0).sent)
