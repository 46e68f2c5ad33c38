"""Hopper's and Ampere's kernels without a GPU: compiled for the host, run in tests/emulator below the real launch.cc.

As a script it runs any shape: see `python tests/emulated.py --help`.
"""

import argparse
import concurrent.futures
import ctypes
import faulthandler
import fcntl
import mmap
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import oracle

ROOT = pathlib.Path(__file__).parent.parent
HOST = ROOT / "tests" / "emulator"
COMPILER = shutil.which("g++")
KERNEL = ["-std=c++20", "-O1", "-w", "-Wno-psabi", "-fPIC", "-fno-exceptions", "-fsanitize=thread,alignment"]
"""-fsanitize for its calls, before every plain access and of those that are not aligned, which emulator.cc answers;
warnings would be of #pragma unroll and of results that inline PTX no longer sets."""

ENVIRONMENT = {"JAX_FLASH_SPLIT_KV": "0"}
"""Set for the process unless a test is of the split-KV forward, which would otherwise serve most of these problems."""


def build(folder: pathlib.Path, sources: pathlib.Path = ROOT / "csrc") -> pathlib.Path:
    """Compiles the emulator with the library's own host code, whose driver layer it replaces. Of several processes the
    first compiles, the others wait."""
    library = folder / "emulator.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library, sources)
    return library


def _compile(library: pathlib.Path, sources: pathlib.Path) -> None:
    folder, includes = library.parent, _includes(sources)
    parts = {
        HOST / "emulator.cc": ["-O3", "-U_FORTIFY_SOURCE"],  # which forbids jumps to other stacks
        HOST / "runtime.cc": ["-O0"],
        **{sources / f"cuda/host/{name}.cc": ["-O0"] for name in ("build", "disk_cache", "family", "launch", "plan")},
        sources / "cuda/host/jit.cc": ["-O0", "-Dkernels_of=device_kernels_of"],
        sources / "cuda/host/tuned.cc": ["-O0"],
        sources / "cuda/host/driver.cc": ["-O0", "-DDriver=DeviceDriver"],
    }

    def one(source: pathlib.Path) -> pathlib.Path:
        made = folder / f"{source.name}.o"
        run(COMPILER, "-std=c++20", "-fPIC", "-w", *parts[source], *includes, "-c", "-o", made, source)
        return made

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(one, parts))
    linked = library.with_suffix(".linked")
    run(COMPILER, "-shared", "-o", linked, *objects, "-ldl", "-pthread")
    linked.rename(library)


def _includes(sources: pathlib.Path) -> list[Any]:
    return ["-I", HOST, "-I", sources]  # in this order: the emulator's files shadow the device's


def load(library: pathlib.Path, folder: pathlib.Path, sources: pathlib.Path = ROOT / "csrc") -> ctypes.CDLL:
    """The emulator, which compiles kernels in ``folder``; one for each process."""
    script = folder / "compile"
    flags = " ".join(str(part) for part in [*KERNEL, "-include", HOST / "device.h", *_includes(sources)])
    script.write_text(f"#!/bin/sh\nset -e\n{COMPILER} {flags} -c -o $1.o $1\n{COMPILER} -shared -o $2 $1.o\n")
    script.chmod(0o755)
    emulator = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    emulator.call_new.restype = ctypes.c_void_p
    emulator.call_run.restype = emulator.call_prepare.restype = ctypes.c_char_p
    emulator.scale_run.restype = emulator.study_run.restype = ctypes.c_char_p
    emulator.emulator_waits.restype = ctypes.c_char_p
    emulator.call_scratch.restype = ctypes.c_longlong
    emulator.emulator_configure(str(script).encode(), str(folder).encode(), 2)
    return emulator


def run(*command: Any) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command[0]}: {result.returncode}\n{result.stderr[-4000:]}"


GUARD = 64
"""Elements of the guards around every array, which must stay untouched."""


def before_a_guard(array: np.ndarray) -> np.ndarray:
    """A copy, behind whose last byte nothing can be read: a process that does is ended."""
    pages = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages
    nothing = 0  # PROT_NONE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), nothing) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, pages - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


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
    """One pass of a problem, by the kernels of sm90a or sm80 in the emulator."""

    def __init__(self, emulator: ctypes.CDLL, problem: "Problem", kernel_pass: str, family: str = "sm90a") -> None:
        self.emulator, self.problem, self.kernel_pass = emulator, problem, kernel_pass
        device = {"sm90a": 0, "sm80": 1}[family]
        self.call = ctypes.c_void_p(emulator.call_new(int(problem.q.dtype == ml_dtypes.bfloat16), device))
        self.kept: list[np.ndarray] = []
        (batch, q_length, q_heads, head_dim), (_, kv_length, kv_heads, _) = problem.q.shape, problem.k.shape
        numbers = {
            "batch": batch, "q_length": q_length, "q_heads": q_heads, "head_dim": head_dim, "kv_length": kv_length,
            "kv_heads": kv_heads, "value_head_dim": problem.v.shape[3], "scale": head_dim**-0.5, **problem.numbers,
        }  # fmt: skip
        for name, number in numbers.items():
            assert emulator.call_number(self.call, name.encode(), ctypes.c_double(number)), name
        arrays = {name: getattr(problem, name) for name in "qkv"} | problem.arrays | problem.originals
        if kernel_pass == "forward":
            arrays.pop("original_dout", None)
        else:
            arrays |= {"dout": problem.dout, "lse": problem.lse, "delta": problem.delta}
        for name, array in arrays.items():
            self.put(name, before_a_guard(array) if name.startswith("captured_") else array)
        self.outputs = {}
        for name in problem.results(kernel_pass):
            self.outputs[name] = problem.output(name)
            self.put(name, self.outputs[name].array)
        self.wanted = emulator.call_scratch(self.call, int(kernel_pass == "backward"))
        self.give_scratch(self.wanted)

    def __del__(self) -> None:
        self.emulator.call_delete(self.call)

    def put(self, name: str, array: np.ndarray) -> None:
        strides = [
            0
            if size == 1 and (name in ("bias", "dbias", "mask", "mask_blocks") or "interval" in name)
            else stride // array.itemsize
            for stride, size in zip(array.strides, array.shape, strict=True)
        ]
        if name.startswith("dcaptured_"):
            strides = [array.size]
        self.kept.append(array)
        pointer = ctypes.c_void_p(array.ctypes.data)
        all_strides = (ctypes.c_longlong * 5)(*(strides + [0] * 5)[:5])
        assert self.emulator.call_array(self.call, name.encode(), pointer, all_strides), name

    def give_scratch(self, elements: int) -> None:
        """Allocates scratch of the size that the call wants, or of another one; 0: none."""
        self.emulator.call_scratch_elements(self.call, ctypes.c_longlong(elements))
        if elements:
            self.scratch = Guarded((elements,), np.float32)
            self.put("scratch", self.scratch.array)

    def prepare(self) -> None:
        """Compiles the kernels; may run concurrently."""
        error = self.emulator.call_prepare(self.call, int(self.kernel_pass == "backward")).decode()
        assert not error, error

    def run(self, seed: int) -> dict[str, np.ndarray]:
        """The results for the order of threads and of asynchronous operations that ``seed`` determines."""
        for output in self.outputs.values():
            output.all[:] = np.nan
        error = self.emulator.call_run(self.call, int(self.kernel_pass == "backward"), seed).decode()
        assert not error, error
        if hasattr(self, "scratch"):
            self.scratch.check("scratch")
        return {name: output.check(name) for name, output in self.outputs.items()}


class ScaledArray(ctypes.Structure):
    """As csrc/scaling.h has it, like `Scaling`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("original", "scaled", "kept", "list")] + [
        (name, ctypes.c_int) for name in ("length", "heads", "columns")
    ]


class Scaling(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("batch", "kv_heads", "count")),
        ("arrays", 3 * ScaledArray),
        ("chunks", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("sizes", "records", "of_inputs", "delta")),
        ("value_head_dim", ctypes.c_int),
        ("dropout_factor", ctypes.c_float),
    ]


def scale(
    emulator: ctypes.CDLL, kv_heads: int, arrays: Sequence[np.ndarray], kept: Sequence[np.ndarray | None], *,
    two_limbs: bool = False, records: np.ndarray | None = None, delta: np.ndarray | None = None, chunks: int = 1,
    dropout_factor: float = 1.0, seed: int = 0, kv_rows: np.ndarray | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:  # fmt: skip
    """The float16 arrays of query, key and value, or with their ``records`` and ``delta`` that of dout; and records.

    ``kv_rows``, [B, S]: the rows of key and value in the order that is wanted.
    """
    batch, count = len(arrays[0]), len(arrays)
    made = [Guarded((*x.shape[:3], x.shape[3] * (2 if two_limbs else 1)), np.float16) for x in arrays]
    found, sizes = (Guarded((batch, kv_heads, n), np.float32) for n in (8, count * chunks * 6))
    scaling = Scaling(
        batch=batch, kv_heads=kv_heads, count=count, chunks=chunks, sizes=sizes.array.ctypes.data,
        records=found.array.ctypes.data, of_inputs=None if records is None else records.ctypes.data,
        delta=None if delta is None else delta.ctypes.data, value_head_dim=arrays[0].shape[3],
        dropout_factor=dropout_factor,
    )  # fmt: skip
    for i, (x, rows) in enumerate(zip(arrays, kept, strict=True)):
        assert rows is None or (rows.dtype == bool and rows.shape == x.shape[:3])
        of_rows = (None if of is None else of.ctypes.data for of in (rows, kv_rows if i > 0 else None))
        pointers = (x.ctypes.data, made[i].array.ctypes.data, *of_rows)
        scaling.arrays[i] = ScaledArray(*pointers, *x.shape[1:])
    call = ctypes.c_void_p(emulator.call_new(0, 1))
    bfloat16 = arrays[0].dtype == ml_dtypes.bfloat16
    error = emulator.scale_run(call, two_limbs, bfloat16, ctypes.byref(scaling), seed).decode()
    emulator.call_delete(call)
    assert not error, error
    sizes.check("sizes")
    return [x.check("a scaled array") for x in made], found.check("records")


class Study(ctypes.Structure):
    """As csrc/study.h has it."""

    _fields_ = [
        ("arrays", 12 * ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("batch", "rows", "keys", "heads", "kv_heads")),
        ("scale", ctypes.c_float),
    ]


def study(
    emulator: ctypes.CDLL, arrays: Sequence[np.ndarray], results: Sequence[Guarded], attributes: dict[str, Any],
    seed: int = 0,
) -> None:  # fmt: skip
    """Runs the kernel of a call of jax_flash.study.kernels, which has these attributes."""
    found = Study(**{name: attributes[name] for name, _ in Study._fields_[1:]})
    for i, x in enumerate([*arrays, *(x.array for x in results)]):
        assert x.flags.c_contiguous
        found.arrays[i] = x.ctypes.data
    call = ctypes.c_void_p(emulator.call_new(0, 1))
    names = (attributes[name].encode() for name in ("file", "entry", "constants"))
    error = emulator.study_run(call, *names, int(attributes["blocks"]), ctypes.byref(found), seed).decode()
    emulator.call_delete(call)
    assert not error, error


# Problems and their exact results

TOLERANCE = {
    **{f"dcaptured_{i}": 1.5 for i in range(4)},
    "out": 1.5,
    "lse": 0.02,
    "dq": 3.0,
    "dk": 3.0,
    "dv": 2.0,
    "dbias": 1.5,
    "dalibi_slopes": 1.5,
}
"""In units of the inputs' epsilon, of the largest and of the L2 error."""

FLOAT32_TOLERANCE = 1e-5
"""Of the heads that are computed in float32."""

OPTIONS = (
    "causal", "window", "window_left", "arrays", "q_offset", "lengths", "short_rows", "short_keys", "segments",
    "gap", "intervals", "hidden_keys", "parted_keys", "listed_keys", "sequences", "mask", "bias", "bias_of_keys",
    "shared_bias", "alibi", "softcap", "sinks", "dropout", "descale", "in_float32", "originals_in_bfloat16",
    "huge_query", "huge_key", "huge_value", "huge_dout", "separate_dq", "ordered_dq",
)  # fmt: skip


class Problem:
    """Inputs of a shape with some of OPTIONS, as the kernels take them, and the oracle's results."""

    def __init__(
        self, dtype: str = "bfloat16", batch: int = 1, q_length: int = 200, kv_length: int = 200, q_heads: int = 2,
        kv_heads: int = 1, head_dim: int = 64, value_head_dim: int | None = None, options: Sequence[str] = (),
        seed: int = 0,
    ) -> None:  # fmt: skip
        assert set(options) <= set(OPTIONS)
        random = np.random.default_rng(seed)
        self.dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
        value_head_dim = value_head_dim or head_dim

        def normal(*shape: int) -> np.ndarray:
            x = random.standard_normal(shape).astype(self.dtype)
            return x.astype(ml_dtypes.bfloat16).astype(self.dtype) if "originals_in_bfloat16" in options else x

        self.q, self.dout = (normal(batch, q_length, q_heads, width) for width in (head_dim, value_head_dim))
        self.k, self.v = (normal(batch, kv_length, kv_heads, width) for width in (head_dim, value_head_dim))
        dlse = random.standard_normal((batch, q_heads, q_length))
        true_q, true_k, true_v, true_dout = (x.astype(np.float64) for x in (self.q, self.k, self.v, self.dout))
        self.numbers: dict[str, float] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.originals: dict[str, np.ndarray] = {}
        self.in_float32 = np.zeros((batch, kv_heads), bool)  # which heads are
        self.bounds: dict[str, np.ndarray] = {}  # of the errors of their elements, where rows differ in size
        of: dict[str, Any] = {}  # the oracle's options
        self.trainable: list[str] = []
        sequences = 1
        rows = np.ones((batch, q_length), bool)  # rows that are not padding

        if "descale" in options:
            assert self.dtype == np.float16
            factors = 2.0 ** random.integers(-3, 4, (batch, kv_heads, 4))
            # Every other key head is computed in float32, the first not.
            if "in_float32" in options:
                self.in_float32 = np.add.outer(np.arange(batch), np.arange(kv_heads)) % 2 == 1
            ds = np.full((batch, kv_heads, 1), 64)
            flagged = self.in_float32[..., None] & (np.arange(4) == np.arange(kv_heads)[:, None] % 3)
            records = [np.where(flagged, 0, factors), ds, np.full((batch, kv_heads, 3), np.nan)]
            self.arrays["descale"] = np.concatenate(records, -1, dtype=np.float32)
            true_k, true_v = (x * factors[:, None, :, i, None] for i, x in ((1, true_k), (2, true_v)))
            by_query = np.repeat(factors, q_heads // kv_heads, axis=1)
            true_q, true_dout = (x * by_query[:, None, :, i, None] for i, x in ((0, true_q), (3, true_dout)))
            self.numbers["scale"] = of["scale"] = head_dim**-0.5 / 4
        # Rows that no float16 could stand for, of heads that are computed in float32.
        true = {"query": true_q, "key": true_k, "value": true_v, "dout": true_dout}
        for name, x in true.items():
            if f"huge_{name}" in options:
                heads = np.repeat(self.in_float32, x.shape[2] // kv_heads, axis=1)
                powers = 10 ** random.uniform(-15, 15, x.shape[:2])[..., None, None]
                x[:] = np.float32(np.where(heads[:, None, :, None], x * powers, x))
        if any(option.startswith("huge") for option in options):
            keep = oracle.keep_pairs((batch,), q_length, kv_length, causal="causal" in options)
            self.bounds = oracle.bounds(*true.values(), keep, 2.0**-22, self.numbers["scale"])
            dlse[:] = 0
        if "sequences" in options:
            sequences = 4
            assert batch == 1
            for name, length in (("cu_q_lengths", q_length), ("cu_kv_lengths", kv_length)):
                middle = np.sort(random.integers(0, length, sequences))
                self.arrays[name] = np.concatenate([[0], middle]).astype(np.int32)[None]
                of[name] = self.arrays[name][0]
            rows &= np.arange(q_length) < of["cu_q_lengths"][-1]
            self.numbers["sequences"] = sequences
        if "separate_dq" in options or "ordered_dq" in options:
            self.numbers["separate_dq"] = True
            self.numbers["ordered_dq"] = "ordered_dq" in options
        if "causal" in options:
            self.numbers["causal"] = of["causal"] = True
        if "window" in options:
            of["window"] = (kv_length // 3, None if "causal" in options else 17)
            self.numbers["window_left"] = of["window"][0]
            if of["window"][1] is not None:
                self.numbers["window_right"] = of["window"][1]
        if "window_left" in options:
            of["window"] = (kv_length // 3, None)
            self.numbers["window_left"] = of["window"][0]
        if "arrays" in options:
            # Only keys before the row, sides that cross, no limits, and keys after the row.
            far, near = kv_length // 3, -(kv_length // 16)
            bounds = np.array([(far, near), (5, -6), (oracle.UNLIMITED,) * 2, (near, far)][:batch], np.int32)
            self.arrays["window_bounds"] = bounds
            of["window"] = tuple(bounds.T) if sequences == 1 else tuple(bounds[0])
            self.arrays["traced_scale"] = ((random.random(batch) + 0.5) * head_dim**-0.5).astype(np.float32)
            of["scale"] = self.arrays["traced_scale"] if sequences == 1 else float(self.arrays["traced_scale"][0])
        if "q_offset" in options:
            offsets = random.integers(-q_length // 4, kv_length // 2, (batch, sequences))
            self.arrays["q_offset"] = offsets.astype(np.int32)
            of["q_offset"] = offsets[0] if sequences > 1 else offsets[:, 0]
        if "lengths" in options:
            for name, length in (("q_lengths", q_length), ("kv_lengths", kv_length)):
                limits = random.integers(length // 3, length, batch, endpoint=True)
                limits[-1] = max(1, length // 2 + 1)
                self.arrays[name] = of[name] = limits.astype(np.int32)
        # Much less than T and S: with causal or a window whole tiles of the other side keep nothing.
        for option, name, length in (
            ("short_rows", "q_lengths", q_length),
            ("short_keys", "kv_lengths", kv_length),
        ):
            if option in options:
                self.arrays[name] = of[name] = np.full(batch, length // 6, np.int32)
        if "q_lengths" in of:
            rows &= np.arange(q_length) < of["q_lengths"][:, None]
        if "segments" in options:
            for name, length in (("q_segment_ids", q_length), ("kv_segment_ids", kv_length)):
                ids = np.sort(random.integers(0, 3, (batch, length)), axis=1).astype(np.int32)
                if "gap" in options:  # rows and keys of a segment of its own but for 40 at both ends
                    ids[:] = 1
                    ids[:, 40:-40] = 2 if name.startswith("q") else 3
                self.arrays[name] = of[name] = ids
                padded = np.pad(ids, ((0, 0), (0, -length % 32)), mode="edge").reshape(batch, -1, 32)
                self.arrays[name.replace("ids", "ranges")] = np.stack([padded.min(-1), padded.max(-1)], -1)
        if "intervals" in options:
            self.add_intervals(random, of, batch, q_heads, q_length, kv_length)
        if "hidden_keys" in options:
            hidden = random.random((batch, 1, kv_length)) < 0.4
            hidden[..., -80:] = False  # a tile that is masked for the end of the keys alone
            self.put_intervals(of, "q", np.stack([0 * hidden, np.where(hidden, 0, q_length)], axis=-1).astype(np.int32))
        if "parted_keys" in options:  # between two warps' rows, but within those of a warpgroup
            early = random.random((batch, 1, kv_length)) < 0.4
            ends = np.where(early, 0, 48), np.where(early, 48, q_length)
            self.put_intervals(of, "q", np.stack(ends, axis=-1).astype(np.int32))
        if "listed_keys" in options:  # tiles of neighbours and others
            kept = random.random((batch, kv_length)) < 0.6
            kept[:, kv_length // 4 : kv_length * 3 // 4] = True
            kept[-1] = np.arange(kv_length) >= 5  # of the last entry neighbours alone
            of["mask"] = kept[:, None, None]
            self.arrays["kv_rows"] = np.argsort(~kept, axis=1, kind="stable").astype(np.int32)
            self.arrays["kv_lengths"] = kept.sum(axis=1).astype(np.int32)
        if "mask" in options:
            self.arrays["mask"] = of["mask"] = random.random((batch, 1, q_length, kv_length)) < 0.8
        if "bias" in options:
            self.arrays["bias"] = of["bias"] = normal(1, q_heads, q_length, kv_length)
            self.trainable.append("bias")
        if "shared_bias" in options:
            self.arrays["bias"] = of["bias"] = normal(1, 1, q_length, kv_length)
            self.trainable.append("bias")
        if "bias_of_keys" in options:
            self.arrays["bias"] = of["bias"] = normal(batch, q_heads, 1, kv_length)
            self.trainable.append("bias")
        if "alibi" in options:
            slopes = (random.random((batch, sequences, q_heads)) / 8).astype(np.float32)
            self.arrays["alibi_slopes"] = slopes
            of["alibi_slopes"] = slopes[0] if sequences > 1 else slopes[:, 0]
            self.trainable.append("alibi_slopes")
        if "softcap" in options:
            self.numbers["softcap"] = of["softcap"] = 2.5
        if "sinks" in options:
            of["sinks"] = random.standard_normal(q_heads).astype(np.float32)
            self.arrays["sinks"] = np.tile(of["sinks"], (batch, 1))
        if "dropout" in options:
            seeds = random.integers(0, 2**32, (batch, sequences, q_heads, 2), dtype=np.uint32)
            self.arrays["dropout_seeds"] = seeds
            rate = self.numbers["dropout_rate"] = 0.25
            assert sequences == 1
            keep = oracle.dropout_keep(seeds[:, 0], rate, q_length, kv_length)
            of["dropout_factors"] = keep * (65536 / (65536 - oracle.threshold(rate)))

        if "sequences" in options:
            of |= {"max_q_length": q_length, "max_kv_length": kv_length}
            inputs = (x[0] for x in (true_q, true_k, true_v, true_dout, dlse))
            right = oracle.attention_packed(*inputs, **of)
            self.right = {name: x[None] for name, x in right.items() if isinstance(x, np.ndarray)}
        else:
            self.right = oracle.attention(true_q, true_k, true_v, true_dout, dlse, **of)
        # For oracles of what the kernels' options do not say.
        self.true, self.of, self.rows, self.dlse = (true_q, true_k, true_v, true_dout), of, rows, dlse
        if "descale" in options:
            self.put_originals("originals_in_bfloat16" in options, (true_q, true_k, true_v, true_dout))
        # Elements that must not be read are NaN.
        keys = np.ones((batch, kv_length), bool)
        if "kv_lengths" in of:
            keys &= np.arange(kv_length) < of["kv_lengths"][:, None]
        if "sequences" in options:
            keys &= np.arange(kv_length) < of["cu_kv_lengths"][-1]
        if "listed_keys" in options:
            keys = of["mask"][:, 0, 0]
        sides = {"query": (self.q, rows), "key": (self.k, keys), "value": (self.v, keys), "dout": (self.dout, rows)}
        for name, (x, there) in sides.items():
            x[~there] = np.nan
            if "descale" in options:
                self.originals[f"original_{name}"][~there] = np.nan
            if "listed_keys" in options and "descale" in options and name in ("key", "value"):  # as they are scaled
                x[:] = np.take_along_axis(x, self.arrays["kv_rows"][:, :, None, None], axis=1)
        delta = np.moveaxis((true_dout * self.right["out"]).sum(-1), 1, 2) - dlse
        self.delta, self.lse = (
            np.ascontiguousarray(np.where(rows[:, None], x, np.nan), np.float32) for x in (delta, self.right["lse"])
        )

    def add_intervals(
        self, random: np.random.Generator, of: dict[str, Any], batch: int, q_heads: int, q_length: int, kv_length: int
    ) -> None:
        """Of rows and head by head, and of keys and batch entry by entry; in sequences both are of all heads."""
        for side, length, other, dims in (
            ("kv", q_length, kv_length, (1, q_heads)),
            ("q", kv_length, q_length, (batch, 1)),
        ):
            middle = np.arange(length) * other // length
            near, far = (random.integers(-other // 16, other // 3, (*dims, length)) for _ in range(2))
            intervals = np.clip(np.stack([middle - near, middle + far], axis=-1), 0, other).astype(np.int32)
            self.put_intervals(of, side, intervals)

    def put_intervals(self, of: dict[str, Any], side: str, intervals: np.ndarray) -> None:
        batch, heads, length, _ = intervals.shape
        self.arrays[f"{side}_intervals"] = intervals
        of[f"{side}_start"], of[f"{side}_end"] = np.moveaxis(intervals, -1, 0)
        if "cu_q_lengths" in self.arrays:
            of[f"{side}_start"], of[f"{side}_end"] = intervals[0, ..., 0], intervals[0, ..., 1]
        padded = np.pad(intervals, ((0, 0), (0, 0), (0, -length % 32), (0, 0)), mode="edge")
        start, end = np.moveaxis(padded.reshape(batch, heads, -1, 32, 2), -1, 0)
        first = np.where(start < end, start, 2**31 - 1).min(-1), np.where(start < end, end, -(2**31)).max(-1)
        ranges = np.stack([*first, start.max(-1), end.min(-1)], -1).astype(np.int32)
        self.arrays[f"{side}_interval_ranges"] = ranges

    def put_originals(self, in_bfloat16: bool, arrays: Sequence[np.ndarray]) -> None:
        """Every head is there once: as it was where it is computed in float32, else as it has been scaled."""
        self.numbers["original_bfloat16"] = in_bfloat16
        scaled = {"query": self.q, "key": self.k, "value": self.v, "dout": self.dout}
        for (name, x), true in zip(scaled.items(), arrays, strict=True):
            original = true.astype(ml_dtypes.bfloat16 if in_bfloat16 else np.float32)
            of_heads = np.repeat(self.in_float32, x.shape[2] // self.in_float32.shape[1], axis=1)[:, None, :, None]
            original[np.broadcast_to(~of_heads, x.shape)] = np.nan
            x[np.broadcast_to(of_heads, x.shape)] = np.nan
            self.originals[f"original_{name}"] = original

    def take_lse(self, results: dict[str, np.ndarray]) -> None:
        """From a forward, for the backward: a huge score is rounded, and lse as it is."""
        if self.bounds and "lse" in results:
            self.lse = results["lse"].copy()

    def beyond_bounds(self, name: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> tuple[float, str]:
        """The largest error in units of its bound, and whether it is too large."""
        alive = np.isfinite(want)
        assert (np.isneginf(got) == ~alive).all(), name
        with np.errstate(invalid="ignore"):
            errors = np.abs(got[alive] - want[alive]) / np.maximum(bound[alive], np.finfo(np.float32).tiny)
        worst = float(errors.max())
        return (
            worst,
            "" if worst <= 1 else f"{name}: {(~(errors <= 1)).mean():.4f} of the elements up to {worst} bounds off",
        )

    def results(self, kernel_pass: str) -> list[str]:
        if kernel_pass == "forward":
            return ["out", "lse"]
        return ["dq", "dk", "dv", *(f"d{name}" for name in self.trainable)]

    def output(self, name: str) -> Guarded:
        narrow = np.dtype(np.float32) if "descale" in self.arrays else self.dtype
        if name == "out":
            return Guarded(self.dout.shape, narrow)
        if name == "lse":
            return Guarded(self.lse.shape, np.float32)
        if name[1:] in "qkv":
            return Guarded(getattr(self, name[1:]).shape, narrow)
        return Guarded(self.arrays[name[1:]].shape, np.float32)

    def wrong(self, name: str, got: np.ndarray) -> tuple[float, str]:
        """The error in units of epsilon, and if it is too large a description of where, else an empty string."""
        want = self.right[name].reshape(got.shape)
        if self.in_float32.any():
            axis = 1 if name == "lse" else 2 if name in ("out", "dq", "dk", "dv") else None
            if axis is not None:
                heads = np.repeat(self.in_float32, got.shape[axis] // self.in_float32.shape[1], axis=1)
                own = [np.moveaxis(x, axis, 1)[heads] for x in (got, want)]
                if self.bounds:
                    return self.beyond_bounds(name, *own, np.moveaxis(self.bounds[name], axis, 1)[heads])
                error = max(errors(*own))
                if not error < FLOAT32_TOLERANCE:
                    return error, f"{name}: {error:.1e} of heads that are computed in float32"
        epsilon = float(ml_dtypes.finfo(self.dtype).eps)
        error = max(errors(got, want)) / epsilon
        limit = TOLERANCE[name]
        if error <= limit:
            return error, ""
        return error, f"{name}: {error:.2f} epsilons of {limit}; {where_wrong(got, want, limit * epsilon)}"


def in_double(x: np.ndarray) -> np.ndarray:
    """Without a warning of signalling NaNs, which what a kernel has not written may hold."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def errors(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Largest error relative to the largest value, and L2 error relative to the L2 norm."""
    got = in_double(got)
    if not np.isfinite(want).all():
        assert (np.isneginf(got) == np.isneginf(want)).all(), "lse is -inf exactly where a row keeps no key"
        got, want = (np.where(np.isfinite(want), x, 0) for x in (got, want))
    if not np.isfinite(got).all():
        return np.inf, np.inf
    difference = got - want
    # Values near 0 are the difference of larger ones.
    size, norm = max(np.abs(want).max(initial=0.0), 0.01), max(np.linalg.norm(want), 0.01 * want.size**0.5)
    return float(np.abs(difference).max() / size), float(np.linalg.norm(difference) / norm)


def where_wrong(got: np.ndarray, want: np.ndarray, limit: float) -> str:
    got = in_double(got)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(got - want) <= limit * np.abs(want[np.isfinite(want)]).max(initial=0.0))
    wrong &= ~(np.isneginf(got) & np.isneginf(want))
    text = f"{wrong.sum()} of {wrong.size} elements, {np.isnan(got).sum()} of them NaN"
    for axis, indices in enumerate(np.nonzero(wrong)):
        if indices.size:
            of_axis = np.unique(indices)
            text += f"; axis {axis}: {len(of_axis)} of {got.shape[axis]}, {of_axis[0]} to {of_axis[-1]}"
    return text


def omissions(call: Call, seeds: int, but: Collection[str] = ()) -> dict[str, str]:
    """For each wait except ``but``: what goes wrong without it in the first of so many orders that shows it."""
    emulator, problem = call.emulator, call.problem
    emulator.emulator_forget()
    for seed in range(4):
        assert not any(problem.wrong(name, got)[1] for name, got in call.run(seed).items())
    waits = emulator.emulator_waits().decode().splitlines()
    found = dict.fromkeys((wait for wait in waits if wait not in but), "")

    def first_error(wait: str) -> str:
        emulator.emulator_omit(wait.encode())
        for seed in range(seeds):
            try:
                wrong = " ".join(problem.wrong(name, got)[1] for name, got in call.run(seed).items()).strip()
            except AssertionError as error:
                return str(error).splitlines()[0]
            if wrong:
                return wrong
        return ""

    for wait in found:
        found[wait] = in_a_child(lambda wait=wait: first_error(wait))
    return found


def in_a_child(run: Callable[[], str]) -> str:
    """The result of ``run`` in a process of its own, or how that ended: without a wait a kernel may crash.

    Raises:
      RuntimeError: ``run`` has raised an exception, which the process printed.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other threads, which the child does not need
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            os.write(write, run().encode()[:4096])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise RuntimeError("a process of the emulator has raised an exception, see above")
    return f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passes", choices=["forward", "backward", "both"])
    parser.add_argument("--family", choices=["sm90a", "sm80"], default="sm90a")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    sizes = {"batch": 1, "q_length": 200, "kv_length": 200, "q_heads": 2, "kv_heads": 1, "head_dim": 64}
    short = {"q_length": "-t", "kv_length": "-s", "q_heads": "-n", "kv_heads": "-k", "head_dim": "-d", "batch": "-b"}
    for name, default in sizes.items():
        parser.add_argument(short[name], f"--{name}", type=int, default=default)
    parser.add_argument("--value_head_dim", type=int)
    parser.add_argument("-o", "--options", default="", help=f"some of {','.join(OPTIONS)}")
    parser.add_argument("--seeds", type=int, default=4, help="how many orders to run in; see emulator.cc")
    parser.add_argument("--split_kv", action="store_true", help="let the split-KV forward serve small problems (sm80)")
    parser.add_argument("--omit", action="store_true", help="leave each wait off in turn: some order must go wrong")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--sources", type=pathlib.Path, default=ROOT / "csrc", help="the folder csrc to take")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for sources and objects")
    a = parser.parse_args()
    if not a.split_kv:
        os.environ.update(ENVIRONMENT)
    folder = a.keep or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    emulator = load(build(folder, a.sources), folder, a.sources)
    options = [name for name in a.options.split(",") if name]
    problem = Problem(a.dtype, *(getattr(a, name) for name in sizes), a.value_head_dim, options)
    failed = False
    for kernel_pass in ["forward", "backward"] if a.passes == "both" else [a.passes]:
        call = Call(emulator, problem, kernel_pass, a.family)
        call.prepare()
        if a.omit:
            for wait, found in omissions(call, a.seeds).items():
                print(f"{'' if found else 'NOT NOTICED: '}without {wait}: {found}", flush=True)
            continue
        for seed in range(a.first_seed, a.first_seed + a.seeds):
            began = time.perf_counter()
            try:
                made = call.run(seed)
                results = {name: problem.wrong(name, got) for name, got in made.items()}
                problem.take_lse(made)
            except AssertionError as error:
                print(f"{kernel_pass}, seed {seed}: WRONG {error}")
                failed = True
                continue
            text = ", ".join(f"{name} {error:.2f}" for name, (error, _) in results.items())
            print(f"{kernel_pass}, seed {seed}: {text} epsilons; {time.perf_counter() - began:.1f} s", flush=True)
            for _, wrong in results.values():
                if wrong:
                    print(f"  WRONG {wrong}")
                    failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
