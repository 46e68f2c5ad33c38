"""Runs tests/as_users.py in processes without conftest.py's configuration."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).with_name("as_users.py")


@pytest.mark.parametrize(
    "others", [pytest.param("xla", marks=pytest.mark.slow(25)), pytest.param("cpu", marks=pytest.mark.slow(75))]
)
def test_as_users_run(others: str) -> None:
    """In two halves, for two workers: the tests of each implementation, and those of none twice."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTEST_"))}
    # By default JAX would use a GPU if there is one.
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, "-k", f"not {others}", TESTS],
        env=clean | {"JAX_PLATFORMS": "cpu"},
        cwd=TESTS.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
