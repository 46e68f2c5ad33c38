"""Strict JAX for every test: x64 on, implicit promotion forbidden; warnings are fatal by pyproject.toml."""

import os
from collections.abc import Iterator

import jax
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 4)  # for the sharding tests


def _no_gpu() -> str | None:
    try:
        jax.devices("cuda")
    except RuntimeError as error:  # JAX's word for a backend that is not there
        return f"JAX has no CUDA device here: {str(error).splitlines()[0]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First, lest at the end one process is left with them while the others have nothing to do.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if reason := _no_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked gpu run on the first CUDA device; all others on the CPU, also where there is a GPU.

    Plain JAX on a GPU takes TF32 for float32 products unless it is told otherwise.
    """
    platform = "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    # The tests mostly compile, which takes two thirds of the time this way. GPUs are tested as users run them.
    jax.config.update("jax_disable_most_optimizations", platform == "cpu")
    with jax.default_device(jax.devices(platform)[0]), jax.default_matmul_precision("highest"):
        yield
