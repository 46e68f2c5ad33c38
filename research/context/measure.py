"""Measures attention over the GPUs of one host, beside one GPU and flash_attn_jax's ring.

python research/context/measure.py --out scaling.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jax_flash.context import ContextParallel, Order, Schedule, set_overlap_flags

set_overlap_flags()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import jax_flash  # noqa: E402
from jax_flash._tools.bench import race  # noqa: E402
from jax_flash._tools.bench.race import Entry  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
KINDS: tuple[tuple[Schedule, Order], ...] = (
    ("ring", "zigzag"),
    ("all_gather", "zigzag"),
    ("ulysses", "contiguous"),
    ("ring", "striped"),
    ("ring", "contiguous"),
)
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attention_of(kind: tuple[Schedule, Order]) -> Attend:
    schedule, order = kind
    context = ContextParallel("seq", schedule=schedule, order=order)
    return functools.partial(jax_flash.attention, causal=True, context=context)


def draw(length: int, sharding: Any) -> list[jax.Array]:
    """query, key, value and dout of one sequence in bfloat16, the same numbers whatever the sharding."""
    shapes = [(1, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    drawn = jax.jit(
        lambda: [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)],
        out_shardings=sharding,
    )
    return list(drawn())


def entry_of(attend: Attend, gradients: bool, arrays: Sequence[jax.Array], sharding: Any) -> Entry:
    """Forward, or forward and backward, of what `draw` returns, on the mesh of the sharding."""
    mesh = getattr(sharding, "mesh", None)

    def both(query: Any, key: Any, value: Any, dout: Any) -> Any:
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    arguments = tuple(arrays if gradients else arrays[:3])
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        run = jax.jit(both if gradients else attend).lower(*arguments).compile()
    return Entry(lambda: run(*arguments), jax.block_until_ready)


def entry(attend: Attend, length: int, gradients: bool, sharding: Any) -> Entry:
    return entry_of(attend, gradients, draw(length, sharding), sharding)


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


def contestants(length: int, gradients: bool, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], Entry]]:
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    split = NamedSharding(mesh, PartitionSpec(None, "seq"))
    of_cell = length, gradients
    found = {"one": lambda: entry(functools.partial(jax_flash.attention, causal=True), *of_cell, whole)}
    for kind in KINDS:
        found[" ".join(kind)] = functools.partial(entry, attention_of(kind), *of_cell, split)
    for schedule in ("ring", "all_gather"):
        found[f"{schedule} alone"] = functools.partial(communication, schedule, *of_cell, mesh)
    try:
        from flash_attn_jax import flash_mha
    except ImportError as error:
        print(f"flash_attn_jax: not here, {error}", file=sys.stderr)
    else:
        found["flash_attn_jax"] = lambda: entry(functools.partial(flash_mha, is_causal=True), *of_cell, split)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, action="append", help="tokens (default: 8192 to 131072)")
    parser.add_argument("--rounds", type=int, default=5, help="of all in turn (default: 5)")
    parser.add_argument("--out", type=pathlib.Path, help="write all times as JSON")
    args = parser.parse_args(arguments)
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    n = mesh.size
    print(f"{n} x {devices[0].device_kind}, N {HEADS}/{KV_HEADS}, D {HEAD_DIM}, bfloat16, causal, B 1; medians")
    rows = []
    for length in args.length or (131072, 16384, 32768, 8192):
        for gradients in (True, False):
            # With rests: the contestant behind "one" would find one of the GPUs warm, and slow.
            found = race.race(contestants(length, gradients, mesh), args.rounds, seconds=0.05, pause=0.5)
            times = {name: statistics.median(x) for name, x in found.seconds.items() if x}
            for name, error in found.errors.items():
                print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}", flush=True)
            one = times["one"]
            print(f"\nS {length}, {'forward + backward' if gradients else 'forward'}: one {1e3 * one:.3f} ms")
            for name, time in times.items():
                if name in ("one", "ring alone", "all_gather alone"):
                    continue
                line = f"  {name:<24}{1e3 * time:9.3f} ms  {one / time:5.2f}x of one"
                alone = times.get(f"{name.split()[0]} alone")
                if alone:
                    above = time - one / n
                    line += f"  {1e3 * above:.3f} ms above one / {n}, sends alone {1e3 * alone:.3f} ms"
                print(line, flush=True)
            rows.append({"length": length, "gradients": gradients, "seconds": found.seconds})
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
