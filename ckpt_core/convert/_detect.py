"""Which format a file or folder has: by what is in it, whatever its name."""

from __future__ import annotations

import contextlib
import os
import zipfile

from ckpt_core._errors import CheckpointError, CheckpointNotFound
from ckpt_core._format.safetensors import INDEX_SUFFIX, SUFFIX

FORMATS = ("safetensors", "npz", "torch", "orbax")


def format_of(path: str) -> str:
    """One of ``FORMATS``; ``ckpt`` for anything that ``load`` takes as it is.

    Raises:
        CheckpointNotFound: there is nothing.
        CheckpointError: it is none of them.
    """
    if "://" in path or path.endswith((SUFFIX, INDEX_SUFFIX)):
        return "ckpt"
    if os.path.isdir(path):
        return "ckpt"
    if not os.path.exists(path):
        raise CheckpointNotFound(f"{path}: there is no such file or folder")
    with open(path, "rb") as stream:
        head = stream.read(16)
    found = _by_head(path, head)
    if found not in FORMATS:
        raise CheckpointError(
            f"{path}: it begins with {head[:8]!r}, as no file of {', '.join(FORMATS)} does: say which it is with "
            "format=, if it is one, or load it with the program that wrote it, and call ckpt.save"
        )
    return found


def _by_head(path: str, head: bytes) -> str | None:
    if head.startswith(b"PK"):
        return _by_members(path)
    if head.startswith((b"\x80\x02\x8a", b"\x80\x02c", b"\x80\x04\x95")):
        raise CheckpointError(
            f"{path} is a pickle, as torch wrote before 1.6: load it in a program that trusts it, with "
            "weights_only=True, and save it anew with torch.save"
        )
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return "safetensors"
    return None


def _by_members(path: str) -> str | None:
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if any(f"/{name}".endswith("/data.pkl") for name in names):
            return "torch"
        if not names or any(name.endswith(".npy") for name in names):
            return "npz"
        return None
    return "npz" if path.endswith(".npz") else "torch"
