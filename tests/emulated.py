"""Kernels of Hopper without one: compiled for the host and run in tests/emulator, below the real launch.cc.

`python tests/emulated.py --help` runs shapes of one's own; see there.
"""

import argparse
import concurrent.futures
import ctypes
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import oracle

ROOT = pathlib.Path(__file__).parent.parent
HOST = ROOT / "tests" / "emulator"
COMPILER = shutil.which("g++")
KERNEL = ["-std=c++20", "-O1", "-w", "-Wno-psabi", "-fPIC", "-fno-exceptions", "-fsanitize=thread", "-fvisibility=default"]
"""-fsanitize=thread for its calls before every plain access, which emulator.cc answers; warnings would be of #pragma
unroll and of results that inline PTX no longer sets."""


def build(folder: pathlib.Path, sources: pathlib.Path = ROOT / "csrc") -> ctypes.CDLL:
    """The emulator, with the runtime's own launch.cc and jit.cc, whose way to the device it takes the place of."""
    includes = ["-I", HOST, "-I", sources]  # in this order: the host's files take the place of the device's
    parts = {
        HOST / "emulator.cc": ["-O3"],
        HOST / "runtime.cc": ["-O0"],
        sources / "cuda/launch.cc": ["-O0"],
        sources / "cuda/jit.cc": ["-O0", "-Dkernels_of=device_kernels_of"],
        sources / "cuda/driver.cc": ["-O0", "-DDriver=DeviceDriver"],
    }

    def one(source: pathlib.Path) -> pathlib.Path:
        made = folder / f"{source.name}.o"
        run(COMPILER, "-std=c++20", "-fPIC", "-w", *parts[source], *includes, "-c", "-o", made, source)
        return made

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(one, parts))
    library = folder / "emulator.so"
    run(COMPILER, "-shared", "-o", library, *objects, "-ldl", "-pthread")
    script = folder / "compile"
    flags = " ".join(str(part) for part in [*KERNEL, "-include", HOST / "device.h", *includes])
    script.write_text(f"#!/bin/sh\nset -e\n{COMPILER} {flags} -c -o $1.o $1\n{COMPILER} -shared -o $2 $1.o\n")
    script.chmod(0o755)
    emulator = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    emulator.call_new.restype = ctypes.c_void_p
    emulator.call_run.restype = ctypes.c_char_p
    emulator.call_scratch.restype = ctypes.c_longlong
    emulator.emulator_configure(str(script).encode(), str(folder).encode(), 2)
    return emulator


def run(*command: Any) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command[0]}: {result.returncode}\n{result.stderr[-4000:]}"


GUARD = 64
"""Elements around every array, which nobody may touch."""


class Guarded:
    """A result, full of NaN, between guards."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.all = np.full(int(np.prod(shape)) + 2 * GUARD, np.nan, dtype)
        self.array = self.all[GUARD:-GUARD].reshape(shape)

    def check(self, name: str) -> np.ndarray:
        guards = np.concatenate([self.all[:GUARD], self.all[-GUARD:]]).astype(np.float64)
        assert np.isnan(guards).all(), f"{name} is written beyond its ends"
        return self.array


class Call:
    """attention() of [B, T, N, H] arrays, by the kernels of sm90a in the emulator.

    ``numbers`` are options by the names of csrc/options.h, ``arrays`` the operands, NumPy arrays as the FFI has them.
    """

    def __init__(
        self, emulator: ctypes.CDLL, q: np.ndarray, k: np.ndarray, v: np.ndarray, numbers: Mapping[str, float] = {},
        arrays: Mapping[str, np.ndarray] = {},
    ) -> None:  # fmt: skip
        self.emulator = emulator
        self.call = ctypes.c_void_p(emulator.call_new(int(q.dtype == ml_dtypes.bfloat16)))
        self.kept: list[np.ndarray] = []
        self.q, self.k, self.v = q, k, v
        self.results = np.dtype(np.float32) if "unscales" in arrays else q.dtype
        batch, q_length, q_heads, head_dim = q.shape
        sizes = {
            "batch": batch, "q_length": q_length, "q_heads": q_heads, "head_dim": head_dim,
            "kv_length": k.shape[1], "kv_heads": k.shape[2], "value_head_dim": v.shape[3],
        }  # fmt: skip
        for name, value in {**sizes, "scale": head_dim**-0.5, **numbers}.items():
            assert emulator.call_number(self.call, name.encode(), ctypes.c_double(value)), name
        for name, array in {"q": q, "k": k, "v": v, **arrays}.items():
            self.put(name, array)

    def put(self, name: str, array: np.ndarray) -> np.ndarray:
        strides = [s // array.itemsize if n > 1 or name in "qkv" else 0 for s, n in zip(array.strides, array.shape)]
        strides = (ctypes.c_longlong * 4)(*(strides + [0] * 4)[:4])
        self.kept.append(array)
        pointer = ctypes.c_void_p(array.ctypes.data)
        assert self.emulator.call_array(self.call, name.encode(), pointer, strides), name
        return array

    def results_of(self, backward: bool, seed: int, outputs: dict[str, Guarded]) -> dict[str, np.ndarray]:
        for name, output in outputs.items():
            self.put(name, output.array)
        error = self.emulator.call_run(self.call, int(backward), seed).decode()
        assert not error, error
        return {name: output.check(name) for name, output in outputs.items() if name != "scratch"}

    def forward(self, seed: int = 0) -> dict[str, np.ndarray]:
        batch, q_length, q_heads, _ = self.q.shape
        shape = batch, q_length, q_heads, self.v.shape[3]
        outputs = {"out": Guarded(shape, self.results), "lse": Guarded((batch, q_heads, q_length), np.float32)}
        return self.results_of(False, seed, outputs)

    def backward(self, dout: np.ndarray, lse: np.ndarray, delta: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
        for name, array in {"dout": dout, "lse": lse, "delta": delta}.items():
            self.put(name, array)
        outputs = {f"d{x}": Guarded(getattr(self, x).shape, self.results) for x in "qkv"}
        if scratch := self.emulator.call_scratch(self.call):
            outputs["scratch"] = Guarded((scratch,), np.float32)
        return self.results_of(True, seed, outputs)


# Right and wrong


def errors(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Largest error relative to the largest value, and L2 error relative to the L2 norm."""
    assert got.shape == want.shape
    got = got.astype(np.float64)
    if not np.isfinite(want).all():
        assert (np.isneginf(got) == np.isneginf(want)).all()
        got, want = np.where(np.isfinite(want), got, 0), np.where(np.isfinite(want), want, 0)
    bad = ~np.isfinite(got)
    if bad.any():
        return np.inf, np.inf
    difference = got - want
    # Values near 0 are the difference of larger ones.
    size, norm = max(np.abs(want).max(initial=0.0), 0.01), max(np.linalg.norm(want), 0.01 * want.size**0.5)
    return float(np.abs(difference).max() / size), float(np.linalg.norm(difference) / norm)


def where_wrong(got: np.ndarray, want: np.ndarray, limit: float) -> str:
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(got.astype(np.float64) - want) <= limit * np.abs(want[np.isfinite(want)]).max(initial=0.0))
    wrong &= ~(np.isneginf(got.astype(np.float64)) & np.isneginf(want))
    if not wrong.any():
        return ""
    text = f"{wrong.sum()} of {wrong.size} elements are wrong, {np.isnan(got.astype(np.float64)).sum()} NaN;"
    for axis, indices in enumerate(np.nonzero(wrong)):
        of_axis = np.unique(indices)
        text += f" axis {axis}: {len(of_axis)} of {got.shape[axis]} ({of_axis[0]}..{of_axis[-1]})"
    return text


TOLERANCE = {"out": 1.5, "lse": 0.02, "dq": 3.0, "dk": 3.0, "dv": 2.0}
"""In units of the inputs' epsilon, of the largest and of the L2 error."""


@dataclasses.dataclass
class Problem:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    oracle_options: dict[str, Any]
    numbers: dict[str, float]
    arrays: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        dlse = np.zeros((self.q.shape[0], self.q.shape[2], self.q.shape[1]))
        self.right = oracle.attention(self.q, self.k, self.v, self.dout, dlse, **self.oracle_options)

    def run(self, emulator: ctypes.CDLL, kernel_pass: str, seed: int) -> dict[str, tuple[str, bool]]:
        """Of every result what to say of it, and whether it is right."""
        call = Call(emulator, self.q, self.k, self.v, self.numbers, self.arrays)
        if kernel_pass == "forward":
            found = call.forward(seed)
        else:
            lse = self.right["lse"].astype(np.float32)
            rows = oracle.within(self.q.shape[1], self.oracle_options.get("q_lengths"), self.q.shape[:1])
            dout = np.where(rows[..., None, None], self.dout.astype(np.float64), 0)
            delta = np.moveaxis((dout * self.right["out"]).sum(-1), 1, 2).astype(np.float32)
            if "q_lengths" in self.arrays:
                delta = np.where(rows[:, None], delta, np.nan).astype(np.float32)
                lse = np.where(rows[:, None], lse, np.nan).astype(np.float32)
            found = call.backward(self.dout, lse, np.ascontiguousarray(delta), seed)
        epsilon = float(ml_dtypes.finfo(self.q.dtype).eps)
        verdicts = {}
        for name, got in found.items():
            largest, l2 = (x / epsilon for x in errors(got, self.right[name]))
            limit = TOLERANCE[name]
            text = f"{largest:.2f} epsilons at most, {l2:.2f} in L2 ({limit})"
            right = max(largest, l2) <= limit
            if not right:
                text += "; " + where_wrong(got, self.right[name], limit * epsilon)
            verdicts[name] = text, right
        return verdicts


def problem(
    dtype: str, batch: int, q_length: int, kv_length: int, q_heads: int, kv_heads: int, head_dim: int,
    value_head_dim: int, causal: bool = False, lengths: bool = False, seed: int = 0,
) -> Problem:  # fmt: skip
    random = np.random.default_rng(seed)
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16

    def array(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(narrow)

    q, dout = array(batch, q_length, q_heads, head_dim), array(batch, q_length, q_heads, value_head_dim)
    k, v = array(batch, kv_length, kv_heads, head_dim), array(batch, kv_length, kv_heads, value_head_dim)
    options: dict[str, Any] = {"causal": causal}
    arrays: dict[str, np.ndarray] = {}
    if lengths:
        for name, length, of_them in (("q_lengths", q_length, (q, dout)), ("kv_lengths", kv_length, (k, v))):
            limits = random.integers(length // 3, length, batch, dtype=np.int32, endpoint=True)
            limits[-1] = max(1, length // 2)
            options[name] = arrays[name] = limits
            for x in of_them:
                x[np.arange(length) >= limits[:, None]] = np.nan
    return Problem(q, k, v, dout, options, {"causal": float(causal)}, arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passes", choices=["forward", "backward", "both"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    for name, default in {"batch": 1, "t": 200, "s": 200, "heads": 2, "kv_heads": 1, "head_dim": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--value_head_dim", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--lengths", action="store_true", help="q_lengths and kv_lengths, NaN behind them")
    parser.add_argument("--number", action="append", default=[], metavar="NAME=VALUE", help="options.h's VALUEs")
    parser.add_argument("--seeds", type=int, default=4, help="orders to run in; see emulator.cc")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--sources", type=pathlib.Path, default=ROOT / "csrc", help="the folder csrc to take")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for sources and objects")
    a = parser.parse_args()
    folder = a.keep or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    emulator = build(folder, a.sources)
    p = problem(
        a.dtype, a.batch, a.t, a.s, a.heads, a.kv_heads, a.head_dim, a.value_head_dim or a.head_dim,
        causal=a.causal, lengths=a.lengths,
    )  # fmt: skip
    p.numbers.update({name: float(value) for name, value in (n.split("=") for n in a.number)})
    wrong = False
    for kernel_pass in ["forward", "backward"] if a.passes == "both" else [a.passes]:
        for seed in range(a.first_seed, a.first_seed + a.seeds):
            began = time.perf_counter()
            try:
                found = p.run(emulator, kernel_pass, seed)
            except AssertionError as error:
                print(f"{kernel_pass}, seed {seed}: {error}")
                wrong = True
                continue
            for name, (line, right) in found.items():
                wrong = wrong or not right
                print(f"{kernel_pass}, seed {seed}, {name}: {line}{'' if right else ' WRONG'}")
            print(f"  {time.perf_counter() - began:.1f} s", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
