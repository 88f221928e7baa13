"""Host memory that XLA owns, uninitialised, which a load reads into.

On a CPU jax uses memory of numpy without a copy, but XLA cannot write its results into it: the first step that donates such
arrays takes fresh memory for all of them. XLA allocates the results of its programs itself, so a program of one custom call
that writes nothing gives memory as it is, untouched. ctypes makes the handler of that call, after the structures of
``xla/ffi/api/c_api.h``, which XLA keeps compatible for a year. Where any of this fails, there is no such memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import threading
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._lazy import jax

Array = np.ndarray[Any, Any]
Shapes = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]

_TARGET = "ckpt_uninitialized"
_METADATA = 1
"""``XLA_FFI_Extension_Metadata``: XLA asks a handler for its version."""
_API_VERSION = 0, 1


class _Extension(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _Version))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _CallFrame(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.POINTER(_MetadataExtension)))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _write_nothing(frame: Any) -> None:
    """The handler: leaves the results as they are; gives its version when it is asked."""
    extension = frame.contents.extension
    if extension and extension.contents.base.type == _METADATA:
        version = extension.contents.metadata.contents.version
        if version.size == ctypes.sizeof(_Version):  # else XLA refuses a handler that gives none
            version.major, version.minor = _API_VERSION


def can_own(device: Any, dtype: np.dtype[Any]) -> bool:
    """Whether ``allocate`` may have memory for an array of this dtype on this device.

    Not for small floats and integers, of which XLA packs some.
    """
    numeric = dtype.isbuiltin == 1 and dtype.kind in "biufc"
    return device.platform == "cpu" and (numeric or dtype.name == "bfloat16")


class Owned(NamedTuple):
    """Memory that XLA owns.

    Attributes:
        array: the array of jax whose memory it is.
        view: the memory, to be written to before anybody else has the array.
    """

    array: Any
    view: Array


def allocate(device: Any, shapes: Shapes) -> list[Owned]:
    """Uninitialised memory for arrays on a device; empty if XLA gives none.

    Takes 10 ms and 0.2 ms for each array the first time, for a program is compiled. Not on the main thread, where what a
    signal handler raises would be lost if it came while XLA calls ``_write_nothing``.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    program = None if on_main_thread else _program(device, shapes)
    made = [] if program is None else _results_of(program)
    if [(array.shape, array.dtype) for array in made] != [*shapes]:  # without 64-bit types
        return []
    blocks: list[Array] = []
    for array in made:
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
        memory.array = array  # which lives as long as any view of its memory
        blocks.append(np.frombuffer(memory, np.uint8))
    _ask_for_huge_pages(blocks)
    return [
        Owned(array, block.view(array.dtype).reshape(array.shape))
        for array, block in zip(made, blocks, strict=True)
    ]


@functools.lru_cache(64)
def _program(device: Any, shapes: Shapes) -> Any:
    """The compiled program whose results have these shapes; None if this version of jax makes none."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    where = jax.sharding.SingleDeviceSharding(device)

    def uninitialized() -> Any:
        return jax.ffi.ffi_call(_TARGET, results)()

    try:
        _register()
        return jax.jit(uninitialized, out_shardings=where).lower().compile()
    except Exception as error:
        logging.getLogger("ckpt_core").debug("XLA gives no uninitialised memory: %s", error)
        return None


def _results_of(program: Any) -> list[Any]:
    """What the program gives, whatever this process is set to; nothing if it fails."""
    try:
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            return jax.block_until_ready(program())
    except Exception as error:
        logging.getLogger("ckpt_core").debug("XLA gives no uninitialised memory: %s", error)
        return []


@functools.cache
def _register() -> None:
    # once there is a device: XLA could make no CPU client if it refused a handler that was registered before
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_write_nothing), platform="cpu")


def _ask_for_huge_pages(blocks: list[Array]) -> None:
    """As numpy does for its own large arrays: 512 times fewer first touches."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    madvise, page_bytes = ctypes.CDLL(None).madvise, mmap.PAGESIZE
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for block in blocks:
        start = -(-block.ctypes.data // page_bytes) * page_bytes
        end = (block.ctypes.data + block.nbytes) // page_bytes * page_bytes
        if end > start:
            madvise(start, end - start, mmap.MADV_HUGEPAGE)
