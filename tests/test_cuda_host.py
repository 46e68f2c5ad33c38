"""The host code of the CUDA kernels with a driver that launches nothing (fake_cuda/libcuda.cc): which kernels a call
takes, how it is planned within its scratch, and how a CUDA graph is updated. Kernels are compiled, so NVRTC is needed,
but no GPU.

Each test is a process of its own, for a process has one driver. There the handlers are called as XLA calls them, by the
structs of test_recording.py.
"""

import ctypes
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import pytest
import test_recording as recording

from jax_flash._call.options import OPERANDS, Options
from jax_flash._native import _core, registration

HERE = pathlib.Path(__file__).parent
COMPILER = shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs g++ on Linux"),
    pytest.mark.skipif(not registration.cuda_status()["nvrtc"], reason="no NVRTC here"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """With the driver, and the cache of all tests."""
    made = tmp_path_factory.mktemp("fake_cuda")
    command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", "-I", HERE.parent / "csrc"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", made / "libcuda.so.1", HERE / "fake_cuda" / "libcuda.cc"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return made


def in_a_process(test: Callable[[], None], folder: pathlib.Path, **environment: str) -> None:
    python_path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", f"import test_cuda_host; test_cuda_host.{test.__name__}()"],
        env={**os.environ, "PYTHONPATH": python_path, "JAX_PLATFORMS": "cpu", "FAKE_CUDA": str(folder / "libcuda.so.1"),
             "JAX_FLASH_CACHE_DIR": str(folder / "cache"), **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# XLA's structs


class Buffer(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", c_void_p))


class StreamGet(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class Dims(Structure):
    _fields_ = (("grid", c_int32 * 3), ("block", c_int32 * 3), ("cluster", c_int32 * 3))


class Argument(Structure):
    _fields_ = (("address", c_void_p), ("size", c_int64), ("kind", c_uint32))


class Arguments(Structure):
    _fields_ = (("values", POINTER(Argument)), ("count", c_int64))


CREATE = ctypes.CFUNCTYPE(
    c_void_p, c_void_p, c_char_p, c_void_p, c_int64, c_uint32, Dims, c_uint32, c_int32, POINTER(Arguments), c_void_p,
    c_uint32, POINTER(c_void_p),
)  # fmt: skip
UPDATE = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, POINTER(Arguments))

PRED, S32, F32, F64, BF16 = 1, 4, 11, 12, 16
BUFFER, SCALAR, STRING = 1, 3, 4
INITIALIZE = 2


@dataclasses.dataclass(frozen=True)
class Node:
    """A kernel node of a graph, as it was recorded."""

    name: str
    cubin: bytes
    dims: tuple[tuple[int, ...], ...]
    problem: Mapping[str, Any]
    boxes: tuple[int, ...]  # rows of those of query, key, value
    data: tuple[int, ...]  # where these are


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of [B, T, N, H] queries on [B, S, K, H] keys in bfloat16, with arrays of its own."""

    lengths: tuple[int, int]
    heads: tuple[int, int]
    head_dim: int = 64
    batch: int = 1
    scratch: int | None = None  # elements; None: there is no such result
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def described(self, pass_: str) -> dict[str, Any]:
        (t, s), (n, k) = self.lengths, self.heads
        sizes = {"q_length": t, "kv_length": s, "q_heads": n, "kv_heads": k, "head_dim": self.head_dim,
                 "value_head_dim": self.head_dim}  # fmt: skip
        return {"pass_": pass_, "dtype": "bfloat16", "options": self.options, "shapes": {}, **sizes}

    def wanted(self, pass_: str = "forward", *, any_batch: bool = False) -> Any:
        if any_batch:
            return _core.scratch_of_any_batch(platform="cuda", **self.described(pass_))
        return _core.scratch(platform="cuda", batch=self.batch, **self.described(pass_))

    def with_scratch(self, elements: int | None) -> "Call":
        return dataclasses.replace(self, scratch=elements)


class Xla(recording.Xla):
    """With a driver below the handlers, calls that have operands, and graphs."""

    def __init__(self) -> None:
        super().__init__((0, 4))
        # Before the library looks for one, which then finds this by its name.
        self.driver = ctypes.CDLL(os.environ["FAKE_CUDA"])
        self.driver.fake_launches.restype = self.driver.fake_plan.restype = c_char_p
        self.addresses = itertools.count(1 << 20, 1 << 20)
        self.nodes: dict[int, Node] = {}

        def stream(asked: StreamGet) -> None:
            asked.stream = None

        self.kept.append(ctypes.CFUNCTYPE(c_void_p, POINTER(StreamGet))(lambda x: stream(x[0])))
        self.api.others[0] = ctypes.cast(self.kept[-1], c_void_p).value
        made = [CREATE(self._create), UPDATE(self._update)]
        self.kept += made
        self.functions = (c_void_p * 2)(*(ctypes.cast(x, c_void_p).value for x in made))

    def is_gpu(self, capability: int, multiprocessors: int = 132, *, throws: bool = False) -> None:
        self.driver.fake_set(capability, multiprocessors, int(throws))

    def launches(self) -> list[dict[str, Any]]:
        """The launches since the last call of this."""
        return [json.loads(line) for line in self.driver.fake_launches().decode().splitlines()]

    def run(self, handler: int, pass_: str, call: Call, stage: int = recording.EXECUTE) -> int | None:
        """The handler's result."""
        (t, s), (n, k), b, h = call.lengths, call.heads, call.batch, call.head_dim
        query, key, statistic = (b, t, n, h), (b, s, k, h), (b, n, t)
        arguments, results = [(BF16, query), (BF16, key), (BF16, key)], [(BF16, query), (F32, statistic)]
        if call.options.get("has_q_segment_ids"):
            arguments += [(S32, (b, t)), (S32, (b, s)), (S32, (b, -(-t // 32), 2)), (S32, (b, -(-s // 32), 2))]
        if pass_ == "backward":
            arguments += [(BF16, query), (F32, statistic), (F32, statistic)]
            results = [(BF16, query), (BF16, key), (BF16, key)]
        if call.scratch is not None:
            results.append((F32, (call.scratch,)))
        frame = recording.CallFrame(recording.CallFrame.future.offset, None, ctypes.pointer(self.api))
        frame.context, frame.stage = recording.CONTEXT, stage
        alive: list[Any] = []
        frame.arguments = self._operands(arguments, alive)
        frame.results = self._operands(results, alive)
        frame.attributes = self._attributes(call.options, alive)
        return recording.HANDLER(handler)(byref(frame))

    def _operands(self, arrays: Sequence[tuple[int, tuple[int, ...]]], alive: list[Any]) -> recording.Operands:
        buffers = [
            Buffer(ctypes.sizeof(Buffer), None, dtype, next(self.addresses), len(shape), (c_int64 * len(shape))(*shape))
            for dtype, shape in arrays
        ]
        types = (c_int * len(buffers))(*[BUFFER] * len(buffers))
        of = (c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        alive += [buffers, types, of]
        return recording.Operands(
            ctypes.sizeof(recording.Operands), None, len(buffers), ctypes.addressof(types), ctypes.addressof(of)
        )

    def _attributes(self, options: Mapping[str, Any], alive: list[Any]) -> recording.Attributes:
        values: dict[str, Any] = dataclasses.asdict(Options(causal=False, scale=0.125))
        values |= {
            "functions": "",
            "captured": 0,
            "dcaptured": 0,
            "mask_block_rows": 1,
            "mask_block_keys": 1,
        }
        values |= {f"has_{name}": False for name in OPERANDS}
        values |= {f"has_d{name}": False for name, operand in OPERANDS.items() if operand.trainable}
        values |= {f"wide_{name}": False for name, operand in OPERANDS.items() if operand.may_be_narrow}
        assert set(options) <= set(values)
        values |= options
        kinds = {bool: (PRED, ctypes.c_bool), int: (S32, c_int32), float: (F64, ctypes.c_double)}
        names, scalars, attribute_types = [], [], []
        for name, value in sorted(values.items()):
            text = ctypes.create_string_buffer(name.encode())
            names.append(recording.Span(ctypes.addressof(text), len(name)))
            attribute_types.append(STRING if isinstance(value, str) else SCALAR)
            if isinstance(value, str):
                holder: Any = ctypes.create_string_buffer(value.encode())
                scalars.append(recording.Span(ctypes.addressof(holder), len(value)))
            else:
                dtype, kind = kinds[type(value)]
                holder = kind(value)
                scalars.append(Scalar(dtype, ctypes.addressof(holder)))
            alive += [text, holder]
        count = len(names)
        types = (c_int * count)(*attribute_types)
        all_names, all_scalars = ((c_void_p * count)(*map(ctypes.addressof, x)) for x in (names, scalars))
        alive += [names, scalars, types, all_names, all_scalars]
        return recording.Attributes(
            ctypes.sizeof(recording.Attributes), None, count, *map(ctypes.addressof, (types, all_names, all_scalars))
        )

    # Graphs

    def record(self, handler: int, call: Call, commands: Sequence[int] = ()) -> tuple[int | None, list[int]]:
        """The handler's answer, and the nodes; with ``commands`` these are to be updated."""
        places, count = (c_void_p * 4)(*commands), c_int64(len(commands))
        frame = recording.RecordFrame(
            recording.CONTEXT, ctypes.addressof(self.functions), int(bool(commands)), ctypes.addressof(places),
            ctypes.addressof(count), 4,
        )  # fmt: skip
        size = ctypes.sizeof(recording.RecordExtension)
        self.extension = recording.RecordExtension(size, 128, 0, 1, None, ctypes.addressof(frame))
        error = self.run(handler, "forward", call, recording.RECORD)
        return error, [x for x in places if x]

    def _node(self, arguments: Arguments, **said: Any) -> Node:
        values = [arguments.values[i] for i in range(arguments.count)]
        maps = []
        if len(values) > 1:
            words = ctypes.cast(values[1].address, POINTER(ctypes.c_uint64))
            maps = [(words[16 * i], words[16 * i + 1]) for i in range(3)]
        problem = json.loads(self.driver.fake_plan(c_void_p(values[0].address)))
        return Node(problem=problem, data=tuple(x for x, _ in maps), boxes=tuple(x for _, x in maps), **said)

    def _create(self, _: Any, name: bytes, image: int, size: int, __: int, dims: Dims, *rest: Any) -> None:
        *_, arguments, _, _, command = rest
        command[0] = next(self.addresses)
        said = {"name": name.decode(), "cubin": ctypes.string_at(image, size)}
        self.nodes[command[0]] = self._node(
            arguments[0], dims=tuple(tuple(x) for x in (dims.grid, dims.block, dims.cluster)), **said
        )

    def _update(self, _: Any, command: int, arguments: Any) -> None:
        known = self.nodes[command]
        self.nodes[command] = self._node(arguments[0], name=known.name, cubin=known.cubin, dims=known.dims)


def handler(target: str, stage: str = "execute", *, records: bool = False) -> int:
    capsule = _core.handlers(records=records)["CUDA"][target]
    capsule = capsule if records else capsule[stage]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = c_void_p, (ctypes.py_object, c_char_p)
    return address(capsule, None)


def good(xla: Xla, error: int | None) -> None:
    assert error is None, xla.message


# Compilation beside XLA's


def kernels_begun_at_lowering() -> None:
    xla = Xla()
    xla.is_gpu(90)
    cache = pathlib.Path(os.environ["JAX_FLASH_CACHE_DIR"])
    # A backward in one order has passes for dQ and for the gradient of a bias besides.
    biased = {"has_bias": True, "has_dbias": True, "separate_dq": True}
    calls = [("forward", SHORT), ("backward", Call(lengths=(64, 64), heads=(2, 2))),
             ("backward", Call(lengths=(64, 64), heads=(2, 2), batch=2, options=biased))]  # fmt: skip
    for pass_, call in calls:
        shapes = {"bias": [1, 1, 64, 64]} if call.options else {}
        described = call.described(pass_) | {"shapes": shapes}
        for _ in range(2):  # the second one finds all begun
            _core.begin_to_load(batch=call.batch, scratch=1 << 20, **described)
    assert not list(cache.rglob("*.cubin")), "it has waited"
    _core.finish_loading()
    kinds = sorted(path.name.split("-")[1] for path in cache.rglob("*.cubin"))
    assert kinds == ["backward", "backward", "backward_bias", "backward_dq", "forward_split_kv"]
    # XLA then finds them, in memory: no file is read or written any more.
    shutil.rmtree(cache)
    for pass_, call in calls[:2]:
        good(xla, xla.run(handler(f"jax_flash_{pass_}", "initialize"), pass_, call.with_scratch(1 << 20), INITIALIZE))
    assert not list(cache.rglob("*.cubin"))


def test_kernels_begun_at_lowering(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    in_a_process(kernels_begun_at_lowering, folder, JAX_FLASH_CACHE_DIR=str(tmp_path / "cache"))


def kernels_that_failed_to_compile() -> None:
    xla = Xla()
    xla.is_gpu(90)
    sources = pathlib.Path(os.environ["JAX_FLASH_CACHE_DIR"]).parent / "sources"
    sources.mkdir()
    registration.configure(sources)
    _core.begin_to_load(batch=1, scratch=1 << 20, **SHORT.described("forward"))
    _core.finish_loading()
    prepare, call = handler("jax_flash_forward", "initialize"), SHORT.with_scratch(1 << 20)
    assert xla.run(prepare, "forward", call, INITIALIZE) == recording.OUR_ERROR
    assert "no device sources in" in xla.message
    # The next call tries again.
    shutil.copytree(registration.SOURCES, sources, dirs_exist_ok=True)
    good(xla, xla.run(prepare, "forward", call, INITIALIZE))


def test_kernels_that_failed_to_compile(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    in_a_process(kernels_that_failed_to_compile, folder, JAX_FLASH_CACHE_DIR=str(tmp_path / "cache"))


# Plans within the available scratch

SHORT = Call(lengths=(1, 8192), heads=(8, 8))


def forwards_of_any_scratch() -> None:
    xla = Xla()
    forward, prepare = (handler("jax_flash_forward", stage) for stage in ("execute", "initialize"))

    def launched(call: Call) -> list[dict[str, Any]]:
        good(xla, xla.run(prepare, "forward", call, INITIALIZE))
        assert xla.launches() == []
        good(xla, xla.run(forward, "forward", call))
        return xla.launches()

    wanted = SHORT.wanted()
    slices = _core.plan_split_kv(batch=1, q_length=1, kv_length=8192, q_heads=8, kv_heads=8, options={})[1]
    assert slices == 16
    call, capability = SHORT, int(os.environ["CAPABILITY"])
    xla.is_gpu(capability)
    for elements, expected in (
        (wanted, 16), (wanted + 5, 16), (100 * wanted, 16), (wanted - 1, 15), (wanted // 2, 8), (wanted // 8, 2)
    ):  # fmt: skip
        main, combine = launched(call.with_scratch(elements))
        assert [main["kernel"], combine["kernel"]] == ["jax_flash_forward_split_kv", "jax_flash_combine"]
        assert main["kv_slices"] == combine["kv_slices"] == expected, (elements, main)
        assert main["blocks"] == 8 * expected
        assert main["scratch"] == combine["scratch"] != 0
    for elements in (wanted // 16, 1, 0, None):
        (alone,) = launched(call.with_scratch(elements))
        assert alone["kernel"] == "jax_flash_forward_split_kv"
        # Blocks of a cluster share what they have, and know it by a scratch that is null.
        assert alone["scratch"] == 0
        assert alone["kv_slices"] == alone["cluster"] == (8 if capability == 90 else 1), alone
    # What serves every batch size has room for every plan.
    each, more = call.wanted(any_batch=True)
    for batch in (1, 2, 3, 5, 16, 17, 64):
        sized = dataclasses.replace(call, batch=batch)
        assert sized.wanted() <= batch * each + more
        first, *_ = launched(sized.with_scratch(sized.wanted() or None))
        again, *_ = launched(sized.with_scratch(batch * each + more))
        assert first["kv_slices"] == again["kv_slices"]


@pytest.mark.parametrize("capability", ["90", "80"])
def test_forwards_of_any_scratch(folder: pathlib.Path, capability: str) -> None:
    """A call that was lowered for another GPU, another batch size or in another environment."""
    in_a_process(forwards_of_any_scratch, folder, CAPABILITY=capability)


def items_that_are_counted() -> None:
    xla = Xla()

    def launched(call: Call) -> list[dict[str, Any]]:
        good(xla, xla.run(handler("jax_flash_forward"), "forward", call))
        return xla.launches()

    segments = {f"has_{side}_segment_{what}": True for side in ("q", "kv") for what in ("ids", "ranges")}
    many = Call(lengths=(4096, 4096), heads=(8, 8), options=segments)  # 256 items
    few = dataclasses.replace(many, lengths=(1024, 1024))
    assert many.wanted() == few.wanted() == 1
    assert dataclasses.replace(many, options={}).wanted() == 0
    xla.is_gpu(90)
    zeroed, forward = launched(many.with_scratch(1))
    assert (zeroed["kernel"], zeroed["count"], forward["blocks"]) == ("memset", 1, 132)
    assert zeroed["to"] == forward["scratch"] != 0
    # A block an item; and as it was lowered before there was a counter.
    for call in (few.with_scratch(1), many, many.with_scratch(0)):
        (forward,) = launched(call)
        assert forward["scratch"] == 0
    # XLA's graphs have no node that zeroes.
    good(xla, xla.asks(handler("jax_flash_register_forward", records=True))[0])
    error, (node,) = xla.record(xla.registered[0].record, many.with_scratch(1))
    good(xla, error)
    assert xla.nodes[node].problem["scratch"] == 0


def test_items_that_are_counted(folder: pathlib.Path) -> None:
    in_a_process(items_that_are_counted, folder)


def forwards_where_keys_are_not_split() -> None:
    xla = Xla()
    good(xla, xla.run(handler("jax_flash_forward"), "forward", SHORT.with_scratch(1 << 20)))
    (alone,) = xla.launches()
    assert alone["kernel"] == "jax_flash_forward"


def test_forwards_where_keys_are_not_split(folder: pathlib.Path) -> None:
    """A call that was lowered where they are."""
    in_a_process(forwards_where_keys_are_not_split, folder, JAX_FLASH_SPLIT_KV="0")


def backwards_of_any_scratch() -> None:
    xla = Xla()
    backward = handler("jax_flash_backward")

    def launched(call: Call) -> dict[str, dict[str, Any]]:
        good(xla, xla.run(backward, "backward", call))
        return {x["kernel"]: x for x in xla.launches()}

    # In one order, with sums that have no room in dq.
    call = Call(lengths=(1024, 1024), heads=(8, 2), head_dim=128, options={"separate_dq": True})
    wanted = call.wanted("backward")
    xla.is_gpu(90)
    split = launched(call.with_scratch(wanted))
    splits = split["jax_flash_backward"]["group_splits"]
    assert splits > 1
    assert wanted > 0
    assert split["jax_flash_backward"]["group_sums"] == split["jax_flash_backward"]["scratch"] != 0
    assert "jax_flash_sum_splits" in split
    for elements in (wanted + 1, 3 * wanted):
        assert launched(call.with_scratch(elements))["jax_flash_backward"]["group_splits"] == splits
    for elements in (wanted - 1, 0, None):
        less = launched(call.with_scratch(elements))
        main = less["jax_flash_backward"]
        assert main["group_splits"] < splits
        assert main["group_splits"] == 1 or main["group_sums"] in (main["dq"], main["scratch"])
        assert ("jax_flash_sum_splits" in less) == (main["group_splits"] > 1)
        assert "jax_flash_backward_dq" in less

    # To an accumulator in one order, behind which the shares have as many sums as take no more memory than it, or as
    # there is scratch for, and add to these by turns. Other kernels have a pass for dQ.
    call = dataclasses.replace(call, options={"separate_dq": True, "ordered_dq": True})
    wanted = call.wanted("backward")
    ordered = launched(call.with_scratch(wanted))
    main = ordered["jax_flash_backward"]
    assert (main["group_splits"], main["sums_of_group"]) == (4, 2)
    sum_of_dk_and_dv = 1024 * 2 * 2 * 128
    assert main["group_sums"] == main["scratch"] + 4 * (wanted - 2 * sum_of_dk_and_dv)
    for less, of_shares in ((1, (4, 1)), (sum_of_dk_and_dv + 1, (1, 1))):
        main = launched(call.with_scratch(wanted - less))["jax_flash_backward"]
        assert (main["group_splits"], main["sums_of_group"]) == of_shares
    assert {"jax_flash_sum_splits", "jax_flash_convert_dq"} < ordered.keys()
    assert "jax_flash_backward_dq" not in ordered
    os.environ["JAX_FLASH_CUDA_FAMILY"] = "sm80"
    call = dataclasses.replace(call, head_dim=64)  # no kernels are found for it yet
    other = launched(call.with_scratch(call.wanted("backward")))
    assert "jax_flash_backward_dq" in other
    assert "jax_flash_convert_dq" not in other
    del os.environ["JAX_FLASH_CUDA_FAMILY"]

    # Of long calls without options dQ has an accumulator of whole tiles of 80 rows, whoever's kernels take them.
    tall = Call(lengths=(8200, 140), heads=(2, 2), head_dim=128)
    wanted = tall.wanted("backward")
    assert wanted == dataclasses.replace(tall, lengths=(8240, 140)).wanted("backward")
    assert wanted < dataclasses.replace(tall, lengths=(8241, 140)).wanted("backward")
    for family in ("sm80", "sm90a"):
        os.environ["JAX_FLASH_CUDA_FAMILY"] = family
        assert "jax_flash_convert_dq" in launched(tall.with_scratch(wanted))
        assert xla.run(backward, "backward", tall.with_scratch(2 * 8240 * 128)) is not None
        assert "scratch must have at least" in xla.message
    del os.environ["JAX_FLASH_CUDA_FAMILY"]

    # By additions to an accumulator, which a call can't do without, and behind which there is one sum of all shares.
    call = dataclasses.replace(call, options={})
    wanted, sums = call.wanted("backward"), 1024 * 2 * 2 * 64
    accumulator = wanted - sums
    good(xla, xla.run(backward, "backward", call.with_scratch(wanted + 1000)))
    zeros, of_shares, main, *last = xla.launches()
    assert [x["count"] for x in (zeros, of_shares)] == [accumulator, sums]
    assert main["group_splits"] > 1
    assert main["group_sums"] == main["scratch"] + 4 * accumulator
    assert [x["kernel"] for x in last] == ["jax_flash_convert_dq", "jax_flash_sum_splits"]
    good(xla, xla.run(backward, "backward", call.with_scratch(wanted - 1)))
    assert [x["kernel"] for x in xla.launches()] == ["memset", "jax_flash_backward", "jax_flash_convert_dq"]
    for elements in (accumulator - 1, None):
        assert xla.run(backward, "backward", call.with_scratch(elements)) == recording.OUR_ERROR
        assert xla.message == (
            f"jax_flash: scratch must have at least {accumulator} elements for sums of dq and of the gradient of "
            f"slopes, got {elements or 0}"
        )
        assert xla.launches() == []

    # Of few blocks each has half of the rows, if there is scratch where they can meet.
    call = dataclasses.replace(call, heads=(3, 3), head_dim=128)
    wanted, blocks = call.wanted("backward"), 3 * 1024 // 128
    main = launched(call.with_scratch(wanted))["jax_flash_backward"]
    assert (main["blocks"], main["halved"]) == (2 * blocks, 1)
    assert main["group_sums"] == main["scratch"] + 4 * (wanted - blocks * 128 * 2 * 128)
    main = launched(call.with_scratch(wanted - 1))["jax_flash_backward"]
    assert (main["blocks"], main["halved"], main["group_sums"]) == (blocks, 0, 0)

    # In order under causal the blocks of the last heads go the other way: at most eight, or as many as make the groups
    # before whole, and no more than half; but not of a window, nor where blocks share rows. Of shared key heads all do.
    ordered = {"causal": True, "separate_dq": True, "ordered_dq": True}
    for heads, options, first in (
        (40, ordered, 26),
        (10, ordered, 5),
        (3, ordered, 3),
        (40, ordered | {"window_left": 100}, 40),
        (40, {**ordered, "causal": False}, 40),
    ):
        call = Call((600, 1024), (heads, heads), 128, options=options)
        main = launched(call.with_scratch(call.wanted("backward")))["jax_flash_backward"]
        assert (main["downwards_from"], main["halved"]) == (first, heads == 3), (heads, options)
    call = Call((600, 1024), (40, 20), 128, options=ordered)
    main = launched(call.with_scratch(call.wanted("backward")))["jax_flash_backward"]
    assert (main["downwards_from"], main["group_splits"]) == (0, 1)

    # So many of these heads are interleaved as have some 2,048 tiles, or four, and all groups have as many.
    for length, heads, batch, interleaved in ((5120, (32, 8), 1, 4), (5120, (32, 8), 2, 6), (4096, (32, 8), 1, 8)):
        call = Call((length, length), heads, 128, batch=batch, options=ordered)
        main = launched(call.with_scratch(call.wanted("backward")))["jax_flash_backward"]
        assert (main["group_splits"], main["downwards_group"]) == (1, interleaved)


def test_backwards_of_any_scratch(folder: pathlib.Path) -> None:
    in_a_process(backwards_of_any_scratch, folder)


# Graphs


def updates_after_tuning() -> None:
    xla = Xla()
    xla.is_gpu(90)
    good(xla, xla.asks(handler("jax_flash_register_forward", records=True))[0])
    record = xla.registered[0].record
    call = Call(lengths=(4096, 4096), heads=(2, 2))

    error, commands = xla.record(record, call)
    good(xla, error)
    before = xla.nodes[commands[0]]
    assert before.name == "jax_flash_forward"
    assert before.data

    found = _core.tile_row(arch=90, pass_="forward", head_dim=64)
    row = {**found["row"], "block_q": 192, "block_kv": 96, "warps": 16}
    _core.tune([{"gpu": "Fake GPU", "family": "sm90a", "pass": "forward", "head_dim": 64, **row}])
    error, others = xla.record(record, call)
    good(xla, error)
    tuned = xla.nodes[others[0]]
    assert tuned.cubin != before.cubin
    assert tuned.boxes != before.boxes, "else this shows nothing"

    error, _ = xla.record(record, call, commands)
    good(xla, error)
    after = xla.nodes[commands[0]]
    assert after.data != before.data, "the arrays are others"
    assert after.problem["q"] == after.data[0]
    assert after.boxes == before.boxes, "they are brought as the kernel of the graph wants them"
    # And each graph keeps its own.
    good(xla, xla.record(record, call, others)[0])
    assert xla.nodes[others[0]].boxes == tuned.boxes

    # A plan is kept too: XLA's graph has two kernels then.
    short = SHORT.with_scratch(SHORT.wanted())
    error, commands = xla.record(record, short)
    good(xla, error)
    assert [xla.nodes[x].name for x in commands] == ["jax_flash_forward_split_kv", "jax_flash_combine"]
    os.environ["JAX_FLASH_SPLIT_KV"] = "0"
    error, others = xla.record(record, short)
    good(xla, error)
    assert [xla.nodes[x].name for x in others] == ["jax_flash_forward"]
    error, _ = xla.record(record, short, commands)
    good(xla, error)
    plans = [xla.nodes[x].problem for x in commands]
    assert [plan["kv_slices"] for plan in plans] == [16, 16]
    assert plans[0]["q"] == plans[1]["q"]

    assert xla.record(record, call, [12345])[0] == recording.OUR_ERROR
    assert "updates a node that was not recorded here" in xla.message


def test_updates_after_tuning(folder: pathlib.Path) -> None:
    """A graph has the kernels that it was made with, whatever later calls take."""
    in_a_process(updates_after_tuning, folder)


# Errors


def exceptions_of_any_type() -> None:
    xla = Xla()
    xla.is_gpu(90, throws=True)
    call = Call(lengths=(512, 512), heads=(2, 2))
    assert xla.run(handler("jax_flash_forward"), "forward", call) == recording.OUR_ERROR
    assert xla.message == "jax_flash: an exception of an unknown type"


def test_exceptions_of_any_type(folder: pathlib.Path) -> None:
    """No exception reaches XLA, which is compiled without them: not even one that is no std::exception."""
    in_a_process(exceptions_of_any_type, folder)


NVRTC = """
#define API extern "C" __attribute__((visibility("default")))
API const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_FAKE"; }
API int nvrtcVersion(int*, int*) { return FAILS == 0; }
API int nvrtcGetNumSupportedArchs(int* count) { *count = 1 << 30; return FAILS == 1; }
API int nvrtcGetSupportedArchs(int*) { return FAILS == 2; }
API int nvrtcCreateProgram() { return 1; }
API int nvrtcDestroyProgram() { return 1; }
API int nvrtcCompileProgram() { return 1; }
API int nvrtcGetProgramLogSize() { return 1; }
API int nvrtcGetProgramLog() { return 1; }
API int nvrtcGetCUBINSize() { return 1; }
API int nvrtcGetCUBIN() { return 1; }
"""


def nvrtcs_that_fail() -> None:
    broken = json.loads(os.environ["BROKEN"])

    def nvrtc(paths: Sequence[str]) -> tuple[list[str], str]:
        _core.configure_cuda(source_dir=str(registration.SOURCES), prebuilt_dirs=[], nvrtc_paths=paths)
        status = _core.cuda_status()
        return status["nvrtc"], status["nvrtc_error"]

    found, error = nvrtc(list(broken))
    assert not any(path in entry for path in broken for entry in found)
    if not found:  # nor by the loader's own search
        for path, function in broken.items():
            assert f"{path}: {function} failed: NVRTC_ERROR_FAKE" in error
    # Paths that come later are looked at as well.
    (good, *_) = registration.nvrtc_paths()
    found, error = nvrtc([*broken, good])
    assert any(good in entry for entry in found)
    assert error == ""


@pytest.mark.skipif(not registration.nvrtc_paths(), reason="needs NVRTC's wheel")
def test_nvrtcs_that_fail(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A library whose functions fail is ignored."""
    broken = {}
    functions = ("nvrtcVersion", "nvrtcGetNumSupportedArchs")
    for i, function in enumerate(functions):
        library = tmp_path / f"libnvrtc.so.{90 + i}"
        (tmp_path / "nvrtc.cc").write_text(NVRTC)
        command = [COMPILER, "-shared", "-fPIC", f"-DFAILS={i}", "-o", library, tmp_path / "nvrtc.cc"]
        subprocess.run(list(map(str, command)), check=True, timeout=120)
        broken[str(library)] = function
    in_a_process(nvrtcs_that_fail, folder, BROKEN=json.dumps(broken))
