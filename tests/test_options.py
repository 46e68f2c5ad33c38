"""One option record from top to bottom: the names in Python are those of csrc/options.h."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _attention, _core, _primitive

HEADER = pathlib.Path(__file__).parent.parent / "csrc" / "options.h"


def entries() -> list[tuple[str, str, str]]:
    """(kind, type, name) of the field list, in its order."""
    text = HEADER.read_text(encoding="utf-8")
    body = text[text.index("#define JAX_FLASH_OPTIONS(") :].split("\n\n")[0].split("\n", 1)[1]
    return re.findall(r"\b(CONSTANT|VALUE|OPERAND)\((\w+), (\w+)\)", body)


def test_the_header_is_read() -> None:
    assert ("CONSTANT", "bool", "causal") in entries()
    assert ("VALUE", "double", "scale") in entries()
    assert ("OPERAND", "int", "q_offset") in entries()


def test_fields_agree() -> None:
    types = {bool: "bool", float: "double", int: "int"}
    fields = {field.name: types[field.type] for field in dataclasses.fields(_attention.Options)}
    assert fields == {name: type_ for kind, type_, name in entries() if kind != "OPERAND"}


def test_operands_agree() -> None:
    operands = [(name, type_) for kind, type_, name in entries() if kind == "OPERAND"]
    assert tuple(name for name, _ in operands) == _core.OPERANDS
    assert set(_attention.OPERANDS) == set(_core.OPERANDS)
    dtypes = {"int": "int32", "float": "float32"}
    for name, type_ in operands:
        assert _attention.OPERANDS[name].dtype == dtypes[type_]


def test_options_are_hashable_and_frozen() -> None:
    """They are static parameters of jit-compiled calls."""
    options = _attention.Options(causal=True, scale=0.5)
    assert hash(options) == hash(dataclasses.replace(options))
    assert _attention.Options.__dataclass_params__.frozen


def test_every_field_reaches_the_call() -> None:
    """By its name, as an attribute of the custom call; and the presence of every operand."""
    x = jnp.ones((2, 3, 1, 8), jnp.float32)
    options = _attention.Options(causal=True, scale=0.375)

    def run(x: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _primitive.forward(x, x, x, {"q_offset": offset}, options=options, implementation="cpu")

    text = jax.jit(run).lower(x, np.zeros(2, np.int32)).as_text()
    (line,) = [line for line in text.splitlines() if "@jax_flash_forward" in line]
    for fragment in ("causal = true", "scale = 3.750000e-01", "has_q_offset = true"):
        assert fragment in line
    for field in dataclasses.fields(_attention.Options):
        assert f"{field.name} = " in line
