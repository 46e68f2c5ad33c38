"""Batch and heads are split over devices without communication; with any other sharding results stay right."""

import re
from collections.abc import Callable
from typing import Any

import cases
import jax
import numpy as np
import pytest
import spread
from cases import Case, Target
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash._primitive import lowering

COLLECTIVES = re.compile(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
NAMES = ("out", "lse", "dq", "dk", "dv")


def mesh(target: Target, shape: tuple[int, ...], names: tuple[str, ...], kind: str = "Auto") -> jax.sharding.Mesh:
    return spread.mesh(dict(zip(names, shape, strict=True)), kind, target.platform)


LAYOUTS: dict[str, tuple[Callable[[int], tuple[int, int]], PartitionSpec]] = {
    "batch": (lambda many: (many, 1), PartitionSpec("x")),
    "heads": (lambda many: (1, many), PartitionSpec(None, None, "y")),
    "both": (lambda many: (many // 2, 2), PartitionSpec("x", None, "y")),
    "batch_by_two_axes": (lambda many: (many // 2, 2), PartitionSpec(("x", "y"))),
}


def compiled(target: Target, problem: cases.Problem, grid: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
    """A compiled forward and backward with everything split by ``spec`` [B, length, heads, H], and its arguments."""
    axes = tuple(spec) + (None,) * (4 - len(spec))
    wide = NamedSharding(grid, spec)
    statistic = NamedSharding(grid, PartitionSpec(axes[0], axes[2], axes[1]))
    by_batch = NamedSharding(grid, PartitionSpec(axes[0]))

    def run(query: Any, key: Any, value: Any, offset: Any, dout: Any, dlse: Any) -> Any:
        results, pullback = jax.vjp(cases.call(target, problem, q_offset=offset), query, key, value)
        return (*results, *pullback((dout, dlse)))

    shardings = (wide, wide, wide, by_batch, wide, statistic)
    arguments = (*problem.inputs, problem.q_offset, problem.dout, problem.dlse)
    placed = [jax.device_put(x, sharding) for x, sharding in zip(arguments, shardings, strict=True)]
    program = jax.jit(run).lower(*placed).compile()
    return program, placed, (wide, statistic, wide, wide, wide)


GROUPED = Case("sharded", 9, 12, q_heads=8, kv_heads=4, head_dim=8, leading=(4,), causal=True, q_offset=(3, 0, -2, 12))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_batch_and_heads_need_no_communication(target: Target, layout: str) -> None:
    shape_of, spec = LAYOUTS[layout]
    problem = cases.problem(GROUPED, target.dtypes[0])
    grid = mesh(target, shape_of(spread.many(target.platform)), ("x", "y"))
    program, arguments, shardings = compiled(target, problem, grid, spec)
    assert not COLLECTIVES.findall(program.as_text())
    assert program.as_text().count("jax_flash_forward") >= 1
    results = program(*arguments)
    problem.check(target.platform, dict(zip(NAMES, map(np.asarray, results), strict=True)))
    for name, result, sharding in zip(NAMES, results, shardings, strict=True):
        assert result.sharding.is_equivalent_to(sharding, result.ndim), f"{name} is no longer split: {result.sharding}"


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_the_measure_sees_communication(target: Target) -> None:
    """Split lengths have to be gathered: without seeing it the test above would prove nothing."""
    case = Case("split_lengths", 8, 12, q_heads=4, kv_heads=2, head_dim=8, leading=(2,), causal=True, q_offset=(4, 1))
    problem = cases.problem(case, target.dtypes[0])
    grid = mesh(target, (2, 1), ("x", "y"))
    program, arguments, _ = compiled(target, problem, grid, PartitionSpec(None, "x"))
    assert COLLECTIVES.findall(program.as_text())
    problem.check(target.platform, dict(zip(NAMES, map(np.asarray, program(*arguments)), strict=True)))


def kernel_shapes(text: str, name: str) -> list[tuple[int, ...]]:
    """The shape of the first result of every custom call of ``name`` in compiled HLO."""
    calls = [line for line in text.splitlines() if f'custom_call_target="{name}"' in line]
    return [tuple(map(int, re.search(r"= \(\w+\[([\d,]+)\]", line)[1].split(","))) for line in calls]


def split_call(target: Target, problem: cases.Problem, grid: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
    """A compiled forward and backward with query split by ``spec`` and keys whole, and its arguments."""
    axes = tuple(spec) + (None,) * (4 - len(spec))
    split, whole = NamedSharding(grid, spec), NamedSharding(grid, PartitionSpec(axes[0]))
    statistic = NamedSharding(grid, PartitionSpec(axes[0], axes[2], axes[1]))
    trainable = jax.device_put(problem.trainable, NamedSharding(grid, PartitionSpec()))

    @jax.jit
    def run(query: Any, key: Any, value: Any, trainable: Any, dout: Any, dlse: Any) -> Any:
        results, pullback = jax.vjp(
            lambda query, key, value, trainable: cases.call(target, problem)(query, key, value, **trainable),
            *(query, key, value, trainable),
        )
        *gradients, by_options = pullback((dout, dlse))
        return cases.named(results, gradients, by_options)

    shardings = (split, whole, whole, split, statistic)
    arrays = (*problem.inputs, problem.dout, problem.dlse)
    query, key, value, dout, dlse = map(jax.device_put, arrays, shardings)
    arguments = (query, key, value, trainable, dout, dlse)
    return run.lower(*arguments).compile(), arguments


@pytest.mark.parametrize("heads", [(8, 2), (4, 1), (8, 1), (12, 6), (12, 3)], ids=str)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_more_devices_than_key_heads(target: Target, heads: tuple[int, int]) -> None:
    """Query heads are split over devices that share key heads: each computes its own, and none is gathered."""
    case = Case("shared", 9, 12, *heads, head_dim=8, leading=(2,), causal=True, q_offset=(3, -2), alibi="n")
    problem = cases.problem(case, target.dtypes[0])
    many = spread.many(target.platform)
    if heads[1] % many == 0:  # each device has key heads of its own then, and their gradients are gathered
        pytest.skip(f"needs 4 devices of platform {target.platform}, JAX has {len(jax.devices(target.platform))}")
    grid = mesh(target, (1, many), ("x", "y"))
    program, arguments = split_call(target, problem, grid, PartitionSpec(None, None, "y"))
    for name in ("jax_flash_forward", "jax_flash_backward"):
        assert set(kernel_shapes(program.as_text(), name)) == {(2, 9, heads[0] // many, 8)}
    assert "all-gather" not in program.as_text()
    problem.check(target.platform, jax.tree.map(np.asarray, program(*arguments)))


ROWS = (
    Case("rows_plain", 16, 12, 4, 2, 8),
    Case("rows_causal", 16, 12, 4, 2, 8, causal=True, q_offset=(4, -3)),
    Case("rows_no_offset", 16, 24, 4, 4, 8, window=(5, 2), sinks=True),
    Case("rows_lengths", 16, 24, 4, 2, 8, q_lengths=(16, 5), kv_lengths=(9, 24), alibi="n", bias="ts"),
    Case("rows_intervals", 80, 96, 4, 2, 8, intervals="kv_start:bnt kv_end:t q_start:s q_end:bns", bias="nt"),
    Case("rows_masks", 16, 24, 4, 2, 8, causal=True, q_offset=9, mask="bts", segments=3, bias="nt", softcap=2.0),
)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_rows_of_query(target: Target, case: Case, kind: str) -> None:
    """Each device computes its rows, with all keys."""
    problem = cases.problem(case, target.dtypes[0])
    many = spread.many(target.platform)
    grid = mesh(target, (many,), ("x",), kind)
    with jax.set_mesh(grid):
        program, arguments = split_call(target, problem, grid, PartitionSpec(None, "x"))
        for name in ("jax_flash_forward", "jax_flash_backward"):
            assert set(kernel_shapes(program.as_text(), name)) == {(2, case.q_length // many, 4, 8)}
        results = program(*arguments)
    assert results["out"].sharding.spec[1] == results["dq"].sharding.spec[1] == "x"
    problem.check(target.platform, jax.tree.map(np.asarray, results))


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_rows_and_keys_of_one_axis(target: Target) -> None:
    """Sequence parallelism without annotations: K and V are gathered, the query is not."""
    problem = cases.problem(Case("rows_and_keys", 16, 24, 4, 2, 8, causal=True, q_offset=8), target.dtypes[0])
    many = spread.many(target.platform)
    grid = mesh(target, (many,), ("x",))
    placed = [jax.device_put(x, NamedSharding(grid, PartitionSpec(None, "x"))) for x in problem.inputs]
    program = jax.jit(cases.call(target, problem)).lower(*placed).compile()
    gathered = [line for line in program.as_text().splitlines() if re.search(r"= .*all-gather(-start)?\(", line)]
    assert gathered
    assert not any("[2,16,4,8]" in line for line in gathered)
    assert kernel_shapes(program.as_text(), "jax_flash_forward") == [(2, 16 // many, 4, 8)]
    out, lse = program(*placed)
    problem.check(target.platform, {"out": np.asarray(out), "lse": np.asarray(lse)})


@pytest.mark.parametrize(
    "case",
    [
        Case("rows_dropout", 16, 12, 4, 2, 8, dropout_rate=0.3),
        Case("rows_uneven", 18, 12, 4, 2, 8, causal=True),
        Case("batch_uneven", 16, 12, 4, 2, 8, leading=(2,), causal=True),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_what_is_not_split_is_right(target: Target, case: Case) -> None:
    problem = cases.problem(case, target.dtypes[0])
    grid = mesh(target, (spread.many(target.platform),), ("x",))
    whole = NamedSharding(grid, PartitionSpec())
    spec = PartitionSpec("x") if case.name == "batch_uneven" else PartitionSpec(None, "x")

    @jax.jit
    def run(query: Any, key: Any, value: Any) -> Any:
        query = jax.lax.with_sharding_constraint(query, NamedSharding(grid, spec))
        results, pullback = jax.vjp(cases.call(target, problem), query, key, value)
        return (*results, *pullback((problem.dout, problem.dlse)))

    results = run(*(jax.device_put(x, whole) for x in problem.inputs))
    problem.check(target.platform, dict(zip(NAMES, map(np.asarray, results), strict=True)))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "spec", [PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec(None, None, "x")], ids=str
)
@pytest.mark.parametrize("target", cases.targets(lambda target: target.platform == "cpu" and target.kernel))
def test_second_order_where_split(target: Target, spec: PartitionSpec, kind: str) -> None:
    """Tangents and Hessian-vector products of what is split over devices are those of one device."""
    problem = cases.problem(Case("split_twice", 8, 12, 4, 2, 8, causal=True, q_offset=4), "float64")
    grid = mesh(target, (2,), ("x",), kind)

    def loss(*inputs: Any) -> Any:
        out, lse = cases.call(target, problem)(*inputs)
        return (out**2).sum() + (lse**2).sum()

    def second(*inputs: Any) -> Any:
        return jax.jvp(loss, inputs, inputs)[1], jax.jvp(jax.grad(loss, (0, 1, 2)), inputs, inputs)[1]

    want = jax.jit(second)(*problem.inputs)
    with jax.set_mesh(grid):
        whole = NamedSharding(grid, PartitionSpec(*tuple(spec)[:1]))
        placed = [jax.device_put(problem.query, NamedSharding(grid, spec))]
        placed += [jax.device_put(x, whole) for x in problem.inputs[1:]]
        got = jax.jit(second)(*placed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_mapped_over_a_split_axis(target: Target) -> None:
    """vmap over an axis that is split over devices."""
    case = Case("vmap_split", 9, 12, q_heads=4, kv_heads=2, head_dim=8, leading=(4, 1), causal=True)
    problem = cases.problem(case, target.dtypes[0])
    grid = mesh(target, (spread.many(target.platform),), ("x",))
    placed = [jax.device_put(x, NamedSharding(grid, PartitionSpec("x"))) for x in problem.inputs]
    program = jax.jit(jax.vmap(cases.call(target, problem))).lower(*placed).compile()
    assert not COLLECTIVES.findall(program.as_text())
    out, lse = program(*placed)
    problem.check(target.platform, {"out": np.asarray(out), "lse": np.asarray(lse)})


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("target", cases.targets())
@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map(target: Target, check_vma: bool, jitted: bool, kind: str) -> None:
    """Inside shard_map a call sees one device's part."""
    if not jitted and target.implementation == "xla" and jax.__version_info__ < (0, 10):
        pytest.skip("jax 0.9 evaluates no checkpoint inside a shard_map without jit")
    problem = cases.problem(GROUPED, target.dtypes[0])
    grid = mesh(target, (2, 1), ("x", "y"), kind)

    def part(query: Any, key: Any, value: Any, offset: Any, dout: Any, dlse: Any) -> Any:
        results, pullback = jax.vjp(cases.call(target, problem, q_offset=offset), query, key, value)
        return (*results, *pullback((dout, dlse)))

    spec = PartitionSpec("x")
    run = jax.shard_map(part, mesh=grid, in_specs=spec, out_specs=spec, check_vma=check_vma)
    arguments = (*problem.inputs, problem.q_offset, problem.dout, problem.dlse)
    placed = [jax.device_put(x, NamedSharding(grid, spec)) for x in arguments]
    results = (jax.jit(run) if jitted else run)(*placed)
    problem.check(target.platform, dict(zip(NAMES, map(np.asarray, results), strict=True)))


@pytest.mark.parametrize("target", cases.targets())
def test_shard_map_over_rows(target: Target) -> None:
    """Each device has its rows of query and all keys; the gradients of the keys are summed over the devices."""
    case = Case("split_rows", 12, 9, q_heads=4, kv_heads=2, head_dim=8, leading=(2,), causal=True, q_offset=-1)
    problem = cases.problem(case, target.dtypes[0])
    grid = mesh(target, (2,), ("x",))

    def part(query: Any, key: Any, value: Any) -> Any:
        offset = jax.lax.axis_index("x") * np.int32(query.shape[1]) + np.int32(case.q_offset)
        return cases.call(target, problem, q_offset=offset)(query, key, value)

    rows, keys = PartitionSpec(None, "x"), PartitionSpec()
    attend = jax.shard_map(
        part, mesh=grid, in_specs=(rows, keys, keys), out_specs=(rows, PartitionSpec(None, None, "x"))
    )

    @jax.jit
    def run(query: Any, key: Any, value: Any) -> Any:
        results, pullback = jax.vjp(attend, query, key, value)
        return (*results, *pullback((problem.dout, problem.dlse)))

    problem.check(target.platform, dict(zip(NAMES, map(np.asarray, run(*problem.inputs)), strict=True)))


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
def test_explicit_sharding(target: Target) -> None:
    """On a mesh of explicit axes the results' types say how they are split, and nothing is gathered."""
    problem = cases.problem(GROUPED, target.dtypes[0])
    grid = mesh(target, (2, 1), ("x", "y"), "Explicit")
    with jax.set_mesh(grid):
        placed = [jax.device_put(x, NamedSharding(grid, PartitionSpec("x", None, "y"))) for x in problem.inputs]
        program = jax.jit(cases.call(target, problem, q_offset=2)).lower(*placed).compile()
        assert not COLLECTIVES.findall(program.as_text())
        out, lse = program(*placed)
        assert jax.typeof(out).sharding.spec == PartitionSpec("x", None, "y", None)
        assert jax.typeof(lse).sharding.spec == PartitionSpec("x", "y", None)


@pytest.mark.parametrize("target", cases.targets(lambda target: target.kernel))
@pytest.mark.parametrize("bias", ["ts", "bs", "nt", "n", "s"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_gradients_of_what_devices_share(target: Target, bias: str, kind: str) -> None:
    """The gradient is the sum over the batch entries and heads of all devices."""
    case = Case(f"shared_{bias}", 19, 24, 4, 4, 8, bias=bias, alibi="n", sinks=True, q_lengths=(19, 7))
    problem = cases.problem(case, target.dtypes[0])
    grid = mesh(target, (2, 1), ("x", "y"), kind)
    split = NamedSharding(grid, PartitionSpec("x", None, "y"))
    whole = NamedSharding(grid, PartitionSpec())

    def run(inputs: Any, trainable: Any, dout: Any, dlse: Any) -> Any:
        attend = cases.call(target, problem, deterministic_backward=True)
        results, pullback = jax.vjp(lambda inputs, trainable: attend(*inputs, **trainable), inputs, trainable)
        return results, *pullback((dout, dlse))

    with jax.set_mesh(grid):
        placed = jax.device_put((problem.inputs, problem.trainable, problem.dout), (split, whole, split))
        dlse = jax.device_put(problem.dlse, NamedSharding(grid, PartitionSpec("x", "y")))
        got = cases.named(*jax.tree.map(np.asarray, jax.jit(run)(*placed, dlse)))
    problem.check(target.platform, got)


def test_the_part_of_a_device_knows_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """From jax 0.11 on, explicit axes would annotate its operations with shardings that nothing lowers any more."""
    target = next(target for target in cases.TARGETS if target.platform == "cpu" and target.kernel)
    problem = cases.problem(Case("mesh", 9, 12, 4, 4, 8, bias="ts"), "float32")
    grid = mesh(target, (2, 1), ("x", "y"), "Explicit")
    call, empty = lowering.call, []

    def watched(*args: Any) -> Any:
        empty.append(jax.sharding.get_abstract_mesh().empty)
        return call(*args)

    def loss(inputs: Any, trainable: Any) -> Any:
        return cases.call(target, problem)(*inputs, **trainable)[0].sum()

    monkeypatch.setattr(lowering, "call", watched)
    with jax.set_mesh(grid):
        inputs = jax.device_put(problem.inputs, NamedSharding(grid, PartitionSpec("x", None, "y")))
        trainable = jax.device_put(problem.trainable, NamedSharding(grid, PartitionSpec()))
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(inputs, trainable)
        empty.clear()
        lowered.compile()
    assert len(empty) >= 2  # forward and backward
    assert all(empty)
