"""Non-public names of JAX: which file uses them, and what serves a call if one of them is missing."""

import ast
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import jax_flash
from jax_flash._native import registration

PACKAGE = pathlib.Path(jax_flash.__file__).parent
NOT_PUBLIC = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters")


def named(path: pathlib.Path) -> set[str]:
    """The dotted names that a file imports or reads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def test_one_module_has_them_all() -> None:
    files = {path.name: named(path) for path in PACKAGE.rglob("*.py")}
    users = {name for name, names in files.items() if any(x.startswith(NOT_PUBLIC) for x in names)}
    assert users == {"private.py"}


MISSING = {
    "apply_primitive": "without(jax._src.dispatch, 'apply_primitive')",
    "jax._src.dispatch": "mock.patch.dict(sys.modules, {'jax._src.dispatch': None})",
    "custom_partitioning": "mock.patch.dict(sys.modules, {'jax.experimental.custom_partitioning': None})",
    "Primitive": "without(jax.extend.core, 'Primitive')",
    "primitive_jvps": "without(jax.interpreters.ad, 'primitive_jvps')",
    "lower_fun": "without(jax.interpreters.mlir, 'lower_fun')",
    "c_api.h": "mock.patch.object(jax.ffi, 'include_dir', lambda: '/nowhere')",
}
"""Name in the reason -> code that removes it while jax_flash is imported. JAX itself needs some of them later."""

IMPORT = """
import contextlib, json, sys
from unittest import mock
import jax, jax._src.dispatch, jax.extend.core, jax.interpreters.ad, jax.interpreters.mlir, jax.numpy as jnp
import jax.experimental.custom_partitioning

@contextlib.contextmanager
def without(module, name):
    kept = getattr(module, name)
    delattr(module, name)
    yield
    setattr(module, name, kept)

with {missing}:
    import jax_flash
    from jax_flash._tools import doctor as _doctor
    problems = []
    versions = _doctor.versions(problems)
x = jax.ShapeDtypeStruct((1, 6, 1, 4), "float32")
explanation = jax_flash.explain(x, x, x, platform="cpu")
found = {{"versions": versions, "problems": problems, "implementation": explanation.implementation}}
found["why"] = explanation.obstacles["cpu"]
"""

CALL = """
x = jnp.arange(24.0).reshape(1, 6, 1, 4) / 24
cu = jnp.array([0, 2, 6], jnp.int32)

def loss(x, **options):
    out, lse = jax_flash.attention(x, x, x, causal=True, return_lse=True, **options)
    packed = jax_flash.attention_varlen(x[0], x[0], x[0], cu, cu, 4, 4, **options)
    return out.sum() + lse.sum() + packed.sum()

got, want = jax.jit(lambda x: (jax.grad(loss)(x), jax.grad(lambda x: loss(x, implementation="reference"))(x)))(x)
found |= {"error": float(jnp.abs(got - want).max()), "size": float(jnp.abs(want).max())}
try:
    jax_flash.attention(x, x, x, implementation="cpu")
except NotImplementedError as error:
    found["refused"] = str(error)
"""


def run(name: str, *options: str, program: str = "") -> tuple[dict[str, Any], str]:
    program = IMPORT.format(missing=MISSING[name]) + program + "\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("name", MISSING)
def test_import_goes_on(name: str) -> None:
    """Also where warnings are errors; explain and doctor say why."""
    found, said = run(name, "-W", "error")
    assert name in found["why"]
    assert found["implementation"] == "xla"
    assert found["problems"] == [f"the kernels can't be called: {found['why']}"]
    assert ["CUDA graphs", "no kernels to capture"] in found["versions"]
    (versions,) = (text for title, text in found["versions"] if title == "FFI API")
    assert versions.endswith("none that is known in jaxlib") == (name == "c_api.h")
    assert said.count("serves every call") == 1
    assert found["why"] in said


@pytest.mark.parametrize("name", ["lower_fun", "c_api.h"])
def test_plain_jax_serves_every_call(name: str) -> None:
    """With one warning; kernels that are asked for by name say why they can't."""
    found, said = run(name, program=CALL)
    assert found["error"] <= 1e-5 * found["size"]
    assert found["refused"] == f"implementation='cpu' does not serve this call: {found['why']}"
    assert said.count('UserWarning: jax_flash: plain JAX (implementation "xla") serves every call') == 1


def test_the_warning_can_be_ignored() -> None:
    assert "serves every call" not in run("lower_fun", "-W", "ignore")[1]


def test_nothing_is_missing_here() -> None:
    assert registration.UNAVAILABLE is None
