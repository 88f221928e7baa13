"""What a dataset holds that holds no samples: locks, files, models, what is opened by its name."""

from __future__ import annotations

import functools
import glob
import importlib
import io
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import numpy as np

_SHARED = tuple(f"multiprocessing.{one}" for one in ("sharedctypes", "shared_memory", "managers"))
_CLOSED_PACKAGES = frozenset(
    [
        "_thread",
        "threading",
        "concurrent",
        "multiprocessing",
        "asyncio",
        "logging",
        "weakref",
        "_weakref",
        "io",
        "_io",
        "socket",
        "_socket",
        "tempfile",
        "sqlite3",
        "h5py",
        "lmdb",
        "zarr",
        "tensorstore",
        "ckpt_core",
    ]
)


def is_closed(value: Any) -> bool:
    """Whether it is a lock, a file, a model or the like, which holds no samples and is known by its class alone."""
    if type(value) in (io.BytesIO, io.StringIO) or type(value).__module__ in _SHARED:
        return False
    # Asked first: a weak reference to what is gone answers no more.
    if package(type(value).__module__) in _CLOSED_PACKAGES:
        return True
    if isinstance(value, types.GeneratorType):
        # one of Keras' own; one of the user's may hold labels
        return f"{os.sep}keras{os.sep}src{os.sep}" in value.gi_code.co_filename
    if isinstance(value, np.memmap):
        return value.mode == "r"
    return isinstance(value, _of_keras())


def description(value: Any) -> str:
    where: Any = ""
    if isinstance(value, np.memmap):
        root: Any = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        # `offset` of a part is that of the whole.
        start = value.offset + value.ctypes.data - root.ctypes.data
        where = (
            os.path.basename(str(value.filename)),
            start,
            value.shape,
            value.strides,
            value.dtype.str,
        )
    return f"{type(value).__module__}.{type(value).__qualname__} {where}"


def package(module: str | None) -> str:
    return (module or "").partition(".")[0]  # a class may have no module


@functools.cache
def is_library(module: str) -> bool:
    """Whether it is a module of a library, and not of the program."""
    return any(map(_is_installed, {module, package(module)}))


def _is_installed(module: str) -> bool:
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None) or ""
    if not file:
        return getattr(getattr(found, "__spec__", None), "origin", "") in ("built-in", "frozen")
    parts = file.split(os.sep)
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or _is_unpacked(file, module)
        or file.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")))
    )


def _is_unpacked(file: str, module: str) -> bool:
    """Whether an installer has noted the package beside it: `pip install --target` into any directory."""
    path = Path(file)
    root = path.parents[path.name == "__init__.py"] if len(path.parents) > 1 else path.parent
    return "." not in module and any(root.glob(f"{glob.escape(module)}-*.dist-info"))


@functools.cache
def _of_keras() -> tuple[type, ...]:
    """Classes whose objects have an item of their own, or hold nothing of samples."""
    keras = keras_module()
    named = keras.Model, keras.Layer, keras.Optimizer, keras.Metric, keras.Loss
    others = keras.initializers.Initializer, keras.regularizers.Regularizer
    return *named, *others, keras.callbacks.Callback


@functools.cache
def keras_module() -> Any:
    """Imported when it is needed: the adapter is found without it."""
    return importlib.import_module("keras")
