"""Several processes of jax.distributed, each with its own shard of the data, compute what one does."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import jax_flash
import jax_flash.context

WORKER = """
    import sys
    import jax
    import numpy as np

    rank, count, port, schedule, order, folder = sys.argv[1:]
    rank, count = int(rank), int(count)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, rank)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    import jax_flash
    from jax_flash.context import ContextParallel, positions

    devices = 2 * count
    assert len(jax.devices()) == devices and len(jax.local_devices()) == 2
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "seq"))
    # Only the rows of this process are loaded.
    rows = positions(48, devices, order).reshape(count, -1)[rank]
    files = [np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("query", "key", "value", "dout")]
    query, key, value, dout = (
        jax.make_array_from_process_local_data(split, np.array(x[:, rows]), x.shape) for x in files
    )
    context = ContextParallel("seq", schedule, order)

    @jax.jit
    def differentiate(query, key, value, dout):
        attend = lambda *x: jax_flash.attention(*x, causal=True, context=context)
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    with jax.set_mesh(mesh):
        for name, x in zip(("out", "dq", "dk", "dv"), differentiate(query, key, value, dout)):
            own = sorted(x.addressable_shards, key=lambda shard: shard.index[1].start or 0)
            np.save(f"{folder}/{name}_{rank}.npy", np.concatenate([np.asarray(shard.data) for shard in own], 1))
    jax.distributed.shutdown()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("count", "schedule", "order"),
    [
        (2, "ring", "zigzag"),
        pytest.param(2, "all_gather", "zigzag", marks=pytest.mark.slow),
        pytest.param(2, "ulysses", "striped", marks=pytest.mark.slow),
        pytest.param(4, "ring", "striped", marks=pytest.mark.slow),
        pytest.param(4, "all_gather", "contiguous", marks=pytest.mark.slow),
    ],
)
def test_processes_agree_with_one(count: int, schedule: str, order: str, tmp_path: pathlib.Path) -> None:
    import jax

    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((1, 48, heads, 8)).astype(np.float32)
        for name, heads in (("query", 8), ("key", 4), ("value", 4), ("dout", 8))
    }
    for name, x in arrays.items():
        np.save(tmp_path / f"{name}.npy", x)
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER), encoding="utf-8")
    port = free_port()
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    workers = [
        subprocess.Popen(
            [sys.executable, tmp_path / "worker.py", *map(str, (rank, count, port, schedule, order, tmp_path))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        printed = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * count, "\n".join(printed)

    out, pullback = jax.vjp(lambda *x: jax_flash.attention(*x, causal=True), *list(arrays.values())[:3])
    want = dict(zip(("out", "dq", "dk", "dv"), (out, *pullback(arrays["dout"])), strict=True))
    for name, x in want.items():
        parts = [np.load(tmp_path / f"{name}_{rank}.npy") for rank in range(count)]
        got = jax_flash.context.restore(np.concatenate(parts, 1), 2 * count, order)
        np.testing.assert_allclose(np.asarray(got), np.asarray(x), rtol=1e-4, atol=1e-5, err_msg=name)
