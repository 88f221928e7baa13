"""Host memory that XLA owns, uninitialised, which a load reads into.

On a CPU jax uses memory of numpy without a copy, but XLA cannot write its results into it: the first step that donates such
arrays takes fresh memory for all of them. XLA allocates the results of its programs itself, so a program of one custom call
that writes nothing gives memory as it is, untouched. ctypes makes the handler of that call, after the structures of
``xla/ffi/api/c_api.h``, which XLA keeps compatible for a year. Where any of this fails, there is no such memory.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import functools
import logging
import math
import mmap
import os
import queue
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._background.threads import Flag
from ckpt_core._lazy import jax
from ckpt_core._options import KIB, MIB

Array = np.ndarray[Any, Any]
Shape = tuple[tuple[int, ...], np.dtype[Any]]
Shapes = tuple[Shape, ...]

_TARGET = "ckpt_uninitialized"
_METADATA = 1
"""``XLA_FFI_Extension_Metadata``: XLA asks a handler for its version."""
_API_VERSION = 0, 1
_LEAST_BYTES = 64 * MIB
_LEAST_BYTES_A_RESULT = 512 * KIB
"""With less, to compile a result (0.2 ms) takes longer than the first step saves by it (0.5 s a GiB)."""
_LOOK_SECS, _START_SECS = 1.0, 5.0
"""Intervals of a wait; and after how long a thread that has not begun was lost: without memory it ends before its first line."""


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
    """Whether ``allocate`` may have memory for an array of this dtype on this device; not for small floats and integers, since
    XLA packs some.
    """
    numeric = dtype.isbuiltin == 1 and dtype.kind in "biufc"
    return device.platform == "cpu" and (numeric or dtype.name == "bfloat16")


def is_worth_it(shapes: Shapes) -> bool:
    """Whether memory for arrays of these shapes saves the first step more time than it takes to get."""
    size_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    if size_bytes < _LEAST_BYTES:
        return False
    return size_bytes >= _LEAST_BYTES_A_RESULT * sum(len(one) for one, _ in _split(shapes))


class Owned(NamedTuple):
    """Memory that XLA owns."""

    array: Any  # the array of jax that has it
    view: Array  # to be written to before anybody else has the array


class Allocation:
    """Uninitialised memory for arrays, which a thread of its own gets from XLA; ``result`` waits for it."""

    def __init__(self, device: Any, shapes: Shapes) -> None:
        self._asked = device, shapes
        self._found: list[Owned] = []
        self._begun = False
        self._ended = Flag()

    def run(self) -> None:
        """Gets the memory."""
        self._begun = True
        try:
            self._found = _allocated(*self._asked)
        except Exception as error:
            logging.getLogger("ckpt_core").debug("XLA gives no uninitialised memory: %s", error)
        finally:
            self.end()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended.set()

    def result(self) -> list[Owned]:
        """Blocks; empty if XLA gives none, or if the thread was lost while it was started."""
        until = time.monotonic() + _START_SECS
        while not self._ended.wait(_LOOK_SECS):
            if not self._begun and time.monotonic() > until:
                _allocator.forget_thread()
                break
        found, self._found = self._found, []
        return found


class _Allocator:
    """The thread that makes all allocations of this process. It is not the main thread: what a signal handler raises would be
    lost if it came while XLA calls ``_write_nothing``. It is one for all, since glibc keeps memory that was freed for the
    thread that had allocated it, up to 64 MiB for each.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Allocation] = queue.SimpleQueue()
        self._process = 0  # a forked child has no thread of its parent
        self._last: Callable[[], Allocation | None] = lambda: None
        self._ends = False

    def begin(self, allocation: Allocation) -> None:
        """Has the thread run it; raises RuntimeError if none can start."""
        if self._ends:
            raise RuntimeError("the interpreter is about to end")
        self._last = weakref.ref(allocation)
        if self._process != os.getpid():
            self._queue = queue.SimpleQueue()
            _thread.start_new_thread(_work, (self._queue,))
            self._process = os.getpid()
        self._queue.put(allocation)

    def forget_thread(self) -> None:
        """The thread was lost while it was started: the next allocation starts another one."""
        self._process = 0

    def end(self) -> None:
        """At exit: waits for what runs. Python would end the thread inside XLA, which aborts the process."""
        self._ends = True
        last = self._last()
        if last is not None and self._process == os.getpid():
            last.result()


_allocator = _Allocator()
atexit.register(_allocator.end)


def _work(waiting: queue.SimpleQueue[Allocation]) -> None:
    while True:
        waiting.get().run()  # this thread keeps nothing of it


def allocate(device: Any, shapes: Shapes) -> Allocation:
    """Begins to get uninitialised memory for arrays on a device. The first time takes 10 ms and 0.2 ms for each array, for a
    program is compiled.
    """
    allocation = Allocation(device, shapes)
    try:
        _allocator.begin(allocation)
    except RuntimeError:
        allocation.end()
    return allocation


def _allocated(device: Any, shapes: Shapes) -> list[Owned]:
    by_shape: dict[Shape, list[Any]] = {shape: [] for shape in shapes}
    for results, times in _split(shapes):
        program = _program(device, results)
        for array in () if program is None else _results_of(program, times):
            by_shape.setdefault((array.shape, array.dtype), []).append(array)
    try:
        made = [by_shape[shape].pop() for shape in shapes]
    except IndexError:  # without 64-bit types
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


_MOST_TIMES = 64


def _split(shapes: Shapes) -> list[tuple[Shapes, int]]:
    """Programs that together give arrays of these shapes: the results of each, and how many times it runs. A program takes 10
    ms and 0.2 ms a result to compile, and a few us a result to run. So leaves that are alike are cut into equal parts, and one
    program runs once for each part.
    """
    counts = Counter(shapes)

    def results(times: int) -> int:
        return sum(count // times + count % times for count in counts.values())

    times = min((1 << power for power in range(_MOST_TIMES.bit_length())), key=results)
    parts = {shape: divmod(count, times) for shape, count in counts.items()}
    part = tuple(shape for shape, (count, _) in parts.items() for _ in range(count))
    rest = tuple(shape for shape, (_, count) in parts.items() for _ in range(count))
    return [(one, runs) for one, runs in ((part, times), (rest, 1)) if one]


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


def _results_of(program: Any, times: int) -> list[Any]:
    """What the program gives in so many runs, whatever this process is set to."""
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        return jax.block_until_ready([array for _ in range(times) for array in program()])


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
