"""Measures attention over the GPUs of one host, beside one GPU and flash_attn_jax's ring: time and memory.

python research/context/measure.py --out scaling.json                            # causal, 8,192 to 131,072 tokens
python research/context/measure.py --length 1048576 --once                        # a minute of it on one GPU
python research/context/measure.py --call window --call packed --length 131072
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jax_flash.context import ContextParallel, Order, Schedule, set_overlap_flags

set_overlap_flags()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import jax_flash  # noqa: E402
from jax_flash._tools.bench import race, seed_rows  # noqa: E402
from jax_flash._tools.bench.race import Entry  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WINDOW = 4096
SEQUENCES = 8
"""Of equal length, in a packed call."""
KINDS: tuple[tuple[Schedule, Order], ...] = (
    ("ring", "zigzag"),
    ("all_gather", "zigzag"),
    ("ulysses", "contiguous"),
    ("ring", "striped"),
    ("ring", "contiguous"),
    ("all_gather", "striped"),
    ("all_gather", "contiguous"),
    ("ulysses", "zigzag"),
    ("ulysses", "striped"),
)
PEER = "flash_attn_jax ring"
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attention_of(kind: tuple[Schedule, Order] | None, call: str = "causal") -> Attend:
    """Causal attention to one sequence [1, T, N, H], to a window of it, or to SEQUENCES packed in it; None: on one
    GPU."""
    context = ContextParallel("seq", schedule=kind[0], order=kind[1]) if kind else None
    if call != "packed":
        window = (WINDOW - 1, None) if call == "window" else None
        return functools.partial(jax_flash.attention, causal=True, window=window, context=context)

    def packed(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        ends = jnp.arange(SEQUENCES + 1, dtype=jnp.int32) * (query.shape[1] // SEQUENCES)
        attend = functools.partial(jax_flash.attention_varlen, causal=True, context=context)
        return attend(query[0], key[0], value[0], ends, ends)[None]

    return packed


def draw(length: int, sharding: Any) -> list[jax.Array]:
    """query, key, value and dout of one sequence in bfloat16, the same numbers whatever the sharding."""
    shapes = [(1, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    drawn = jax.jit(
        lambda: [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)],
        out_shardings=sharding,
    )
    return list(drawn())


def compiled(
    attend: Attend, gradients: bool, arrays: Sequence[jax.Array], sharding: Any
) -> tuple[jax.stages.Compiled, Entry]:
    """Forward, or forward and backward, of what `draw` returns, on the mesh of the sharding."""
    mesh = getattr(sharding, "mesh", None)

    def both(query: Any, key: Any, value: Any, dout: Any) -> Any:
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    arguments = tuple(arrays if gradients else arrays[:3])
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        program = jax.jit(both if gradients else attend).lower(*arguments).compile()
    return program, Entry(lambda: program(*arguments), jax.block_until_ready)


def entry_of(attend: Attend, gradients: bool, arrays: Sequence[jax.Array], sharding: Any) -> Entry:
    return compiled(attend, gradients, arrays, sharding)[1]


def entry(attend: Attend, length: int, gradients: bool, sharding: Any) -> Entry:
    return entry_of(attend, gradients, draw(length, sharding), sharding)


def flash_attn_jax_ring(mesh: jax.sharding.Mesh) -> Attend:
    """The ring of flash_attn_jax over the mesh; its own rule for shardings refuses a sequence that is split."""
    from flash_attn_jax import flash_bwd, flash_fwd, ring_attention

    def kernel(lowering: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays: jax.Array, window_size: tuple[int, int], **options: Any) -> Any:
            left, right = window_size
            return lowering(*arrays, window_size_left=left, window_size_right=right, **options)

        return call

    fixed = {"softmax_scale": HEAD_DIM**-0.5, "is_causal": True, "axis_name": "seq", "axis_size": mesh.size}
    rows, statistic = PartitionSpec(None, "seq"), PartitionSpec(None, None, "seq")
    kernels = kernel(flash_fwd._flash_mha_fwd_lowering), kernel(flash_bwd._flash_mha_bwd_lowering)
    spread = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    forward = spread(
        functools.partial(ring_attention.ring_fwd, mha_fwd=kernels[0], **fixed),
        in_specs=(rows,) * 3,
        out_specs=(rows, statistic),
    )
    backward = spread(
        functools.partial(ring_attention.ring_bwd, mha_bwd=kernels[1], **fixed),
        in_specs=(*(rows,) * 5, statistic),
        out_specs=(rows,) * 3,
    )

    @jax.custom_vjp
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out: jax.Array = forward(query, key, value)[0]
        return out

    def kept(*inputs: jax.Array) -> Any:
        out, lse = forward(*inputs)
        return out, (*inputs, out, lse)

    attend.defvjp(kept, lambda residuals, dout: backward(dout, *residuals))
    return attend


def communication(schedule: str, length: int, gradients: bool, mesh: jax.sharding.Mesh) -> Entry:
    """What a schedule sends, and nothing else: K and V, then with gradients K and V again and float32 dK and dV."""
    spec = PartitionSpec(None, "seq")
    n = mesh.size
    around = [(i, (i + 1) % n) for i in range(n)]

    def send(keys: jax.Array, gradient: jax.Array) -> Any:
        if schedule == "all_gather":
            found: list[Any] = [jax.lax.all_gather(keys, "seq", axis=1, tiled=True).sum(1, keepdims=True)]
            if gradients:
                whole = jnp.tile(gradient, (1, n, 1, 1))
                found.append(jax.lax.psum_scatter(whole, "seq", scatter_dimension=1, tiled=True))
            return found
        for _ in range(n - 1):
            keys = jax.lax.ppermute(keys, "seq", around)
        if not gradients:
            return [keys]
        for _ in range(n - 1):
            keys, gradient = jax.lax.ppermute(keys, "seq", around), jax.lax.ppermute(gradient, "seq", around)
        return [keys, jax.lax.ppermute(gradient, "seq", around)]

    shape = (1, length, 2 * KV_HEADS, HEAD_DIM)  # K and V
    inputs = [
        jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec)) for dtype in (jnp.bfloat16, jnp.float32)
    ]
    outs = [spec] * (2 if gradients else 1)
    run = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(spec, spec), out_specs=outs, check_vma=False))
    return Entry(lambda: run(*inputs), jax.block_until_ready)


class Cell:
    """The contestants of one call, and the bytes of memory that each takes on a device."""

    def __init__(self, call: str, length: int, gradients: bool, mesh: jax.sharding.Mesh, only: Sequence[str]) -> None:
        self.call, self.length, self.gradients, self.mesh, self.only = call, length, gradients, mesh, only
        self.memory: dict[str, int] = {}
        # Drawn once for all of them: with 2**20 tokens these are 5 GB on each of four devices.
        self.drawn = functools.cache(functools.partial(draw, length, NamedSharding(mesh, PartitionSpec(None, "seq"))))

    def entry(self, name: str, attend: Attend, sharding: Any = None) -> Entry:
        arrays = draw(self.length, sharding) if sharding else self.drawn()
        program, entry = compiled(attend, self.gradients, arrays, sharding or arrays[0].sharding)
        self.memory[name] = seed_rows.peak_of(program)
        return entry

    def makers(self) -> dict[str, Callable[[], Entry]]:
        """The sends alone first, which start the communicators."""
        found: dict[str, Callable[[], Entry]] = {
            f"{schedule} alone": functools.partial(communication, schedule, self.length, self.gradients, self.mesh)
            for schedule in ("ring", "all_gather")
        }
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found["one"] = lambda: self.entry("one", attention_of(None, self.call), one)
        for kind in KINDS:
            name = " ".join(kind)
            found[name] = functools.partial(self.entry, name, attention_of(kind, self.call))
        if self.call == "causal":
            found[PEER] = lambda: self.entry(PEER, flash_attn_jax_ring(self.mesh))
        return {name: maker for name, maker in found.items() if not self.only or name in (*self.only, "one")}


def race_once(makers: dict[str, Callable[[], Entry]]) -> race.Race:
    """Each one's first call, with nothing of the one before in memory."""
    found = race.Race()
    for name, make in makers.items():
        try:
            found.seconds[name] = [race.timed(make(), 1)]
        except Exception as error:
            found.errors[name] = error
    return found


def report(cell: Cell, found: race.Race) -> dict[str, Any]:
    """Prints a cell's times; they and the memory as JSON."""
    times = {name: statistics.median(x) for name, x in found.seconds.items() if x}
    what = f"{cell.call}, S {cell.length}, {'forward + backward' if cell.gradients else 'forward'}"
    print(f"\n{what}", flush=True)
    for name, error in found.errors.items():
        print(f"  {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}", flush=True)
    one = times.get("one", math.nan)
    for name, time in times.items():
        line = f"  {name:<24}{1e3 * time:10.3f} ms"
        if name in cell.memory:
            line += f"  {one / time:5.2f}x of one  {cell.memory[name] / 1e9:6.2f} GB"
        alone = times.get(f"{name.split()[0]} alone")
        if alone and not name.endswith("alone"):
            line += f"  {1e3 * (time - one / cell.mesh.size):.3f} ms above one / {cell.mesh.size}"
        print(line, flush=True)
    own = {"call": cell.call, "length": cell.length, "gradients": cell.gradients, "devices": cell.mesh.size}
    return own | {"seconds": found.seconds, "memory": cell.memory}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", choices=("causal", "window", "packed"), action="append", help="default: causal")
    parser.add_argument("--length", type=int, action="append", help="tokens (default: 8192 to 131072)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help='such as "ring zigzag"')
    parser.add_argument("--forward", action="store_true", help="without the backward")
    parser.add_argument("--rounds", type=int, default=5, help="of all in turn (default: 5)")
    parser.add_argument(
        "--once", action="store_true", help="time each one's first call alone, as calls of seconds need"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write all times as JSON")
    args = parser.parse_args(arguments)
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    print(f"{mesh.size} x {devices[0].device_kind}, N {HEADS}/{KV_HEADS}, D {HEAD_DIM}, bfloat16, B 1; medians")
    rows = []
    for call in args.call or ["causal"]:
        for length in args.length or (131072, 16384, 32768, 8192):
            for gradients in (False,) if args.forward else (True, False):
                cell = Cell(call, length, gradients, mesh, args.only)
                if args.once:
                    found = race_once(cell.makers())
                else:
                    # With rests: the contestant behind "one" would find one of the GPUs warm, and slow.
                    found = race.race(cell.makers(), args.rounds, seconds=0.05, pause=0.5)
                rows.append(report(cell, found))
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
