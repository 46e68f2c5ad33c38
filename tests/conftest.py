"""Strict JAX for every test: x64 on, implicit promotion forbidden; warnings are fatal by pyproject.toml."""

import ctypes
import gc
import os
import re
import zlib
from collections.abc import Iterator

import pytest
import turns as _turns

# Set before NumPy and XLA read them; subprocesses inherit them.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
# XLA's own code is not under test, so it should compile fast. On GPUs autotuning is off. On CPUs the older emitters of
# fusions, and a program in one part, take a third of the time, which is most of that of the tests: 34 of
# test_gradients.py take 5 s of CPU instead of 15. XLA ignores extra options that it does not know.
_xla_flags = [
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if "PYTEST_XDIST_WORKER" in os.environ:
    # pytest-xdist already has a process for each core. OpenBLAS spins while it waits for its threads: 32 of them on two
    # cores took the oracle from 14 s to 49 s. XLA would split a program, compile its parts and link them.
    for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")
    _xla_flags.append("--xla_gpu_force_compilation_parallelism=1")
os.environ["XLA_FLAGS"] = " ".join([*_xla_flags, os.environ.get("XLA_FLAGS", "")]).strip()  # the caller's count

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)  # for the tests of sharding and context parallelism


# JAX's traces and programs are many small objects, and each collection looks at those of all tests before.
gc.set_threshold(100_000, 20, 100)


def _no_gpu() -> str | None:
    try:
        jax.devices("cuda")
    except RuntimeError as error:  # raised by JAX if there is no such backend
        return f"JAX has no CUDA device here: {str(error).splitlines()[0]}"
    return None


def _keep_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With JAX_FLASH_TEST_TURN=I/N what turns.py keeps for the I-th of N turns; with JAX_FLASH_TEST_SHARE=I/N the I-th
    of N shares of all tests."""
    for variable in ("JAX_FLASH_TEST_TURN", "JAX_FLASH_TEST_SHARE"):
        if not (value := os.environ.get(variable)):
            continue
        numbers = re.fullmatch(r"(\d+)/(\d+)", value)
        if not numbers or not 0 <= int(numbers[1]) < int(numbers[2]):
            raise pytest.UsageError(f"{variable} must be I/N with 0 <= I < N, got {value!r}")
        turn, turns = int(numbers[1]), int(numbers[2])
        if variable == "JAX_FLASH_TEST_TURN":
            kept = _turns.kept(items, turn, turns)
        else:
            kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % turns == turn]
        remain = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in remain])
        items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_turn(config, items)
    # The long tests first, so that no process is left with one at the end while the others are idle.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if reason := _no_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked gpu run on the first CUDA device, or on a mesh of several; all others on the CPU, even if there is a
    GPU.

    Plain JAX on a GPU uses TF32 for float32 products unless configured otherwise.
    """
    platform = "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    # The tests mostly compile, which takes two thirds of the time with fewer optimisations. GPUs are tested as users
    # run them.
    jax.config.update("jax_disable_most_optimizations", platform == "cpu")
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(platform == "cpu"))
    with jax.default_device(jax.devices(platform)[0]), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Runs CUDA kernels on the CPU (docs/emulator.md)."""
    import emulated

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers of this run
    shared = shared / "emulator_library"
    shared.mkdir(exist_ok=True)
    return emulated.load(emulated.build(shared), tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def as_an_example_runs() -> Iterator[None]:
    """An example is a program of its own: without x64, and with the implicit promotion that optax and flax use."""
    settings = {"jax_enable_x64": False, "jax_numpy_dtype_promotion": "standard"}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
