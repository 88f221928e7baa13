"""Reads and writes ``.safetensors`` and ``.pt`` files as dictionaries of numpy arrays.

The core reads safetensors, which refuses damaged ones. Written they are here: eight bytes of length, a JSON header,
and raw bytes, so that no dtype is converted, no array is copied, and torch is not needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

import ckpt_core as ckpt
from ckpt_core import CheckpointCorrupt, CheckpointNotFound, UnsupportedLeaf

Array = np.ndarray[Any, Any]

_NAMES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16"},
    **{"uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
    **{"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64"},
}
"""Dtype -> its name in safetensors."""

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a weights file rather than of a checkpoint."""
    return str(path).endswith((*_TORCH_SUFFIXES, ".safetensors", ".safetensors.index.json"))


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a file which ``torch.save`` writes."""
    return str(path).endswith(_TORCH_SUFFIXES)


def refuse_other_names(file: Any, advice: str) -> None:
    """Raises TypeError if ``file`` is no path, and ValueError if it has the suffix of no weights file."""
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(
            f"the path of a weights file must be a str or an os.PathLike object, got a {type(file).__name__}: {advice}"
        )
    if not is_file(file):
        raise _unknown(Path(file), f": {advice}")


def read(path: str | os.PathLike[str]) -> Any:
    """The content of a weights file: a dictionary of arrays, or the tree in a ``.pt`` file. Only tensors and plain
    containers are unpickled.
    """
    file = Path(path).expanduser()
    if not is_file(file):
        raise _unknown(file)
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise CheckpointNotFound(f"no weights file at {file}: it {what}")
    return _read_pt(file) if is_torch_file(file) else ckpt.load(file, as_numpy=True)


def write(
    path: str | os.PathLike[str],
    tree: Callable[[], Any],
    named: Callable[[], Mapping[str, Array]],
) -> None:
    """Writes a weights file, which appears under its name only when it is complete. ``tree`` returns a tree of tensors,
    for torch's own format; ``named`` the arrays by name, for safetensors.
    """
    file = Path(path).expanduser()
    if file.suffix == ".safetensors":
        arrays = named()
        _replace(file, lambda stream: _write_safetensors(stream, arrays))
    elif file.suffix in _TORCH_SUFFIXES:
        tensors = tree()
        torch, _bits = _torch()
        with _bits.plain_torch():
            _replace(file, lambda stream: torch.save(tensors, stream))
    else:
        raise _unknown(file)


def _unknown(file: Path, advice: str = "") -> ValueError:
    return ValueError(f"{file}: a weights file ends in .safetensors, .pt, .pth or .bin{advice}")


def _replace(file: Path, write_to: Callable[[IO[bytes]], None]) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            write_to(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _torch() -> tuple[Any, Any]:
    """torch, and the module ``_bits``, which needs it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        message = ".pt files need torch: pip install 'ckpt-core[torchax]', or use .safetensors"
        raise ModuleNotFoundError(message, name="torch") from error
    from ckpt_torchax import _bits

    return torch, _bits


def _read_pt(file: Path) -> Any:
    torch, _bits = _torch()
    with file.open("rb") as stream:  # files from before torch 1.6 are not zips and cannot be mapped
        is_zip = stream.read(2) == b"PK"
    try:
        with _bits.plain_torch():
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch may raise anything here
        found = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
    # Without torch's own text, which advises to run the code in the file.
    if found is None:
        raise CheckpointCorrupt(
            f"{file}: not what torch.save writes, or damaged, or it holds more than tensors and plain containers",
            file=str(file),
        )
    raise UnsupportedLeaf(
        f"{file} holds an object of {found[1]}, and to make it would run code that the file names: ckpt reads with "
        "weights_only=True, that is tensors and plain containers. In a program that has the class and trusts "
        "the file, save model.state_dict() instead, or save the model itself with ckpt_core.save",
        type_name=found[1],
    )


def _write_safetensors(stream: IO[bytes], arrays: Mapping[str, Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise UnsupportedLeaf(f"{name}: safetensors has no {array.dtype.name}", leaf=name)
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        if array.nbytes:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
