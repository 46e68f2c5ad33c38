"""Kernels are recorded into XLA's CUDA graphs if requested and if the library knows the interface's version
(csrc/ffi/recording.h), and only then.

Tests without a GPU play XLA's part: they pass the library structs with the layout of jaxlib 0.11.2, declared here
independently of the library's own declarations. tests/test_cuda_graphs.py has the graphs themselves.
"""

import ctypes
import pathlib
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
import pytest

from jax_flash._native import _core, registration

# Which jaxlibs


def headers(folder: pathlib.Path, ffi: tuple[int, int], record: tuple[int, int] | str | None) -> pathlib.Path:
    """Writes headers as of a jaxlib with these versions."""
    path = folder / "xla/ffi/api"
    path.mkdir(parents=True)
    text = f"#define XLA_FFI_API_MAJOR {ffi[0]}\n#define XLA_FFI_API_MINOR {ffi[1]}\n"
    (path / "c_api.h").write_text(text, encoding="utf-8")
    if isinstance(record, tuple):
        names = ("MajorVersion", "MinorVersion")
        lines = [f"#define XLA_FFI_Extension_Record_{x} {v}\n" for x, v in zip(names, record, strict=True)]
        record = "#define XLA_FFI_Extension_Record 128\n" + "".join(lines)
    if record is not None:
        (path / "record_c_api.h").write_text(record, encoding="utf-8")
    return folder


def test_version_of_the_interface(tmp_path: pathlib.Path) -> None:
    assert registration.runtime_record_version(headers(tmp_path / "none", (0, 4), None)) is None
    assert registration.runtime_record_version(headers(tmp_path / "unsaid", (0, 4), "struct XLA;\n")) is None
    assert registration.runtime_record_version(headers(tmp_path / "said", (0, 4), (0, 17))) == (0, 17)


@pytest.mark.parametrize(
    ("ffi", "record", "records"),
    [
        ((0, 3), None, False),  # jaxlib 0.10.2, 0.11.0
        ((0, 4), None, False),  # 0.11.1
        ((0, 4), (0, 1), True),  # 0.11.2
        ((0, 5), (0, 2), True),  # 0.12.0
        ((0, 4), (0, 2), False),
        ((0, 5), (0, 1), False),
        ((0, 5), (0, 3), False),
        ((0, 5), (1, 2), False),
        ((0, 6), (0, 2), False),
        ((1, 5), (0, 2), False),
        ((0, 4), "struct XLA;\n", False),
    ],
)
def test_kernels_are_recorded_by_what_is_known(
    ffi: tuple[int, int], record: Any, records: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running jaxlib's versions decide, not the headers that the library was built with."""
    folder = headers(tmp_path, ffi, record)
    monkeypatch.delenv("JAX_FLASH_RECORD_GRAPHS", raising=False)
    assert not registration.records_kernels(folder), "nobody asked for it"
    monkeypatch.setenv("JAX_FLASH_RECORD_GRAPHS", "1")
    assert registration.records_kernels(folder) is records

    asked = []
    monkeypatch.setattr(_core, "handlers", lambda *, records: asked.append(records) or {})
    monkeypatch.setattr(_core, "FFI_API_VERSION", (ffi[0], 2))
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(folder))
    registration._register()
    assert asked == [records]


def test_handlers_of_either_way() -> None:
    """Forward calls have a target of their own, or one that registers it."""
    captured, recorded = (_core.handlers(records=x)["CUDA"] for x in (False, True))
    others = {"jax_flash_backward", "jax_flash_scale", "jax_flash_study"}
    assert set(captured) == {"jax_flash_forward", *others}
    assert set(recorded) == {"jax_flash_register_forward", *others}


# XLA's structs


class Version(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class Api(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("version", Version),
        ("internal", c_void_p),
        ("error_create", c_void_p),
        ("error_get_details", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("others", c_void_p * 13),
        ("device_ordinal_get", c_void_p),
        ("find_extension", c_void_p),
    )


class Operands(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("of", c_void_p),
    )


class Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("of", c_void_p),
    )


class CallFrame(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", Operands),
        ("results", Operands),
        ("attributes", Attributes),
        ("future", c_void_p),
    )


class Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32), ("state", c_int64))


class MetadataExtension(Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(Metadata)))


class Span(Structure):
    _fields_ = (("text", c_void_p), ("length", c_size_t))

    def __str__(self) -> str:
        return ctypes.string_at(self.text, self.length).decode()


class HandlerRegister(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("name", Span),
        ("platform", Span),
        ("instantiate", c_void_p),
        ("prepare", c_void_p),
        ("initialize", c_void_p),
        ("execute", c_void_p),
        ("record", c_void_p),
        ("traits", c_uint32),
    )


class ErrorCreate(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class DeviceOrdinal(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("device", c_int32))


class FindExtension(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("context", c_void_p),
        ("type", c_int64),
        ("found", c_void_p),
    )


class RecordExtension(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("type", c_int64),
        ("major", c_int32),
        ("minor", c_int32),
        ("next", c_void_p),
        ("frame", c_void_p),
    )


class RecordFrame(Structure):
    _fields_ = (
        ("context", c_void_p),
        ("functions", c_void_p),
        ("action", c_uint32),
        ("commands", c_void_p),
        ("count", c_void_p),
        ("capacity", c_int64),
    )


HANDLER = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))
METADATA, EXECUTE, RECORD = 1, 3, 4
OUR_ERROR, ITS_ERROR, CONTEXT = 0x1110, 0x2220, 0x3330


class Xla:
    """XLA's functions as handlers get them, with a record of their calls."""

    def __init__(self, version: tuple[int, int], extension: RecordExtension | None = None, failure: int | None = None):
        self.extension, self.failure = extension, failure
        self.registered: list[HandlerRegister] = []
        self.sought: list[tuple[int, int]] = []
        self.message = ""
        self.kept = []  # ctypes frees a function that nobody refers to

        def function(body: Any, argument: type[Structure]) -> int:
            self.kept.append(ctypes.CFUNCTYPE(c_void_p, POINTER(argument))(lambda x: body(x[0])))
            return ctypes.cast(self.kept[-1], c_void_p).value

        self.api = Api(ctypes.sizeof(Api), None, Version(ctypes.sizeof(Version), None, *version))
        self.api.error_create = function(self._error, ErrorCreate)
        self.api.handler_register = function(self._register, HandlerRegister)
        self.api.device_ordinal_get = function(self._device, DeviceOrdinal)
        self.api.find_extension = function(self._find, FindExtension)

    def _error(self, asked: ErrorCreate) -> int:
        self.message = asked.message.decode()
        return OUR_ERROR

    def _register(self, asked: HandlerRegister) -> int | None:
        self.registered.append(HandlerRegister.from_buffer_copy(asked))
        return self.failure

    def _device(self, asked: DeviceOrdinal) -> None:
        assert asked.context == CONTEXT
        asked.device = 0

    def _find(self, asked: FindExtension) -> int | None:
        self.sought.append((asked.context, asked.type))
        if self.extension is not None:
            asked.found = ctypes.addressof(self.extension)
        return self.failure

    def call(self, handler: int, stage: int, extension: MetadataExtension | None = None) -> int | None:
        """The handler's result for a call without operands and attributes."""
        operands = Operands(ctypes.sizeof(Operands))
        attributes = Attributes(ctypes.sizeof(Attributes))
        frame = CallFrame(
            CallFrame.future.offset, None, ctypes.pointer(self.api), CONTEXT, stage, operands, operands, attributes
        )
        if extension is not None:
            frame.extension = ctypes.addressof(extension)
        return HANDLER(handler)(byref(frame))

    def asks(self, handler: int) -> tuple[int | None, Metadata]:
        """The handler's answer to a query of its metadata."""
        metadata = Metadata(ctypes.sizeof(Metadata))
        extension = MetadataExtension(ctypes.sizeof(MetadataExtension), METADATA, None, ctypes.pointer(metadata))
        return self.call(handler, EXECUTE, extension), metadata


@pytest.fixture
def registering() -> int:
    """The handler that registers the others."""
    capsule = _core.handlers(records=True)["CUDA"]["jax_flash_register_forward"]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = c_void_p, (ctypes.py_object, c_char_p)
    return address(capsule, None)


@pytest.mark.parametrize("version", [(0, 4), (0, 5)])
def test_what_is_registered(registering: int, version: tuple[int, int]) -> None:
    xla = Xla(version)
    error, metadata = xla.asks(registering)
    assert error is None, xla.message
    assert (metadata.version.major, metadata.version.minor) == _core.FFI_API_VERSION
    assert metadata.traits == 1, "its launches can be captured"
    (asked,) = xla.registered
    assert asked.struct_size == HandlerRegister.traits.offset + 4
    assert (str(asked.name), str(asked.platform), asked.traits) == (registration.FORWARD_TARGET, "CUDA", 0)
    assert asked.execute
    assert asked.record
    assert [asked.instantiate, asked.prepare, asked.initialize] == [None] * 3
    for handler in (asked.execute, asked.record):
        error, metadata = xla.asks(handler)
        assert error is None, xla.message
        assert metadata.traits == 1
    assert len(xla.registered) == 1


def test_an_xla_that_refuses(registering: int) -> None:
    assert Xla((0, 4), failure=ITS_ERROR).asks(registering)[0] == ITS_ERROR


@pytest.mark.parametrize("version", [(0, 3), (0, 6), (1, 4)])
def test_a_plugin_that_is_not_the_jaxlibs(registering: int, version: tuple[int, int]) -> None:
    """With unknown versions the struct of a target's handlers may differ."""
    xla = Xla(version)
    assert xla.asks(registering)[0] == OUR_ERROR
    assert f"plugin for CUDA has XLA FFI API {version[0]}.{version[1]}" in xla.message
    assert not xla.registered


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ((0, 1), "attributes are not those of jax_flash's options"),
        ((0, 2), "attributes are not those of jax_flash's options"),
        ((0, 3), "a version that jax_flash does not know"),
        ((1, 1), "a version that jax_flash does not know"),
        (None, "a version that jax_flash does not know"),
    ],
)
def test_what_a_call_is_recorded_with(registering: int, versions: tuple[int, int] | None, message: str) -> None:
    """The frame is found by its number, and read only if its version is known; then the call is decoded."""
    extension = None
    if versions is not None:
        frame = RecordFrame(capacity=8)
        size = ctypes.sizeof(RecordExtension)
        extension = RecordExtension(size, 128, *versions, None, ctypes.addressof(frame))
    xla = Xla((0, 4), extension)
    xla.asks(registering)
    assert xla.call(xla.registered[0].record, RECORD) == OUR_ERROR
    assert xla.sought == [(CONTEXT, 128)]
    assert xla.message.startswith("jax_flash: ")
    assert message in xla.message


def test_an_xla_that_does_not_find_it(registering: int) -> None:
    xla = Xla((0, 4))
    xla.asks(registering)
    xla.failure = ITS_ERROR
    assert xla.call(xla.registered[0].record, RECORD) == ITS_ERROR
