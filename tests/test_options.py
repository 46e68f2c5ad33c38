"""One option record from top to bottom: the names in Python are those of csrc/options.h."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _primitive
from jax_flash._call.options import OPERANDS, SEGMENT_BLOCK, Options
from jax_flash._native import _core

HEADER = pathlib.Path(__file__).parent.parent / "csrc" / "options.h"


def entries() -> list[tuple[str, str, str, str]]:
    """(kind, type, name, third argument or nothing) of the field list, in its order."""
    text = HEADER.read_text(encoding="utf-8")
    body = text[text.index("#define JAX_FLASH_FIELDS(") :].split("\n\n")[0].split("\n", 1)[1]
    kinds = "CONSTANT|VALUE|FEATURE|OPERAND|PLAIN|TRAINABLE"
    return re.findall(rf'\b({kinds})\((\w+), (\w+)(?:, "?(\w+)"?)?\)', body)


def test_the_header_is_read() -> None:
    assert ("CONSTANT", "bool", "causal", "") in entries()
    assert ("VALUE", "double", "scale", "") in entries()
    assert ("FEATURE", "int", "window_left", "2147483647") in entries()
    assert ("OPERAND", "int", "cu_q_lengths", "be") in entries()
    assert ("PLAIN", "int", "q_offset", "bd") in entries()
    assert ("TRAINABLE", "void", "bias", "bnts") in entries()


def test_fields_agree() -> None:
    types = {bool: "bool", float: "double", int: "int"}
    fields = {field.name: types[field.type] for field in dataclasses.fields(Options) if field.name != "functions"}
    # What functions have beside their source.
    fields |= dict.fromkeys(("mask_block_rows", "mask_block_keys", "captured", "dcaptured"), "int")
    fields |= {f"wide_{name}": "bool" for name, operand in OPERANDS.items() if operand.may_be_narrow}
    assert fields == {name: type_ for kind, type_, name, _ in entries() if kind in ("CONSTANT", "VALUE", "FEATURE")}


def test_absent_features_agree() -> None:
    """The values that kernels take as absent are the defaults of the record."""
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    features = {name: float(absent) for kind, _, name, absent in entries() if kind == "FEATURE"}
    assert features == {name: defaults[name] for name in features}


def test_operands_agree() -> None:
    operands = {
        name: (kind, type_, dims) for kind, type_, name, dims in entries() if kind in ("OPERAND", "PLAIN", "TRAINABLE")
    }
    assert tuple((name, dims) for name, (_, _, dims) in operands.items()) == _core.OPERANDS
    assert tuple(OPERANDS) == tuple(operands), "in one order"
    dtypes = {
        "int": "int32",
        "unsigned": "uint32",
        "bool": "bool",
        "float": "float32",
        "void": "wide",
        "Original": "original",
        "Int8": "int8",
    }
    problem = (HEADER.parent / "problem.h").read_text(encoding="utf-8")
    for name, (kind, type_, dims) in operands.items():
        assert OPERANDS[name].dims == dims
        assert OPERANDS[name].trainable == (kind == "TRAINABLE")
        assert OPERANDS[name].dtype == dtypes[type_]
        assert OPERANDS[name].broadcast == (f"trides {name}_strides;" in problem)


def test_segment_blocks_agree() -> None:
    assert f"kSegmentBlock = {SEGMENT_BLOCK};" in HEADER.read_text(encoding="utf-8")


def test_options_are_hashable_and_frozen() -> None:
    """They are static parameters of jit-compiled calls."""
    options = Options(causal=True, scale=0.5)
    assert hash(options) == hash(dataclasses.replace(options))
    assert Options.__dataclass_params__.frozen


def test_every_field_reaches_the_call() -> None:
    """By its name, as an attribute of the custom call; and the presence of every operand."""
    x = jnp.ones((2, 3, 1, 8), jnp.float32)
    options = Options(causal=True, scale=0.375)

    def run(x: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _primitive.forward(x, x, x, {"q_offset": offset}, options=options, implementation="cpu", limits=None)

    text = jax.jit(run).lower(x, np.zeros((2, 1), np.int32)).as_text()
    (line,) = [line for line in text.splitlines() if "@jax_flash_forward" in line]
    for fragment in ("causal = true", "scale = 3.750000e-01", "has_q_offset = true", "has_bias = false"):
        assert fragment in line
    for field in dataclasses.fields(Options):
        assert f"{field.name} = " in line
    for name, operand in OPERANDS.items():
        assert f"has_{name} = " in line
        assert (f"wide_{name} = " in line) == operand.may_be_narrow
