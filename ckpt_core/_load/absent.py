"""The error for a path without a checkpoint: says what is there, and suggests similar names."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex

from ckpt_core._directory import Backend, refuse_file
from ckpt_core._errors import CheckpointNotFound
from ckpt_core._format.record import RECORD_FILE


def not_found(path: str, backend: Backend) -> CheckpointNotFound:
    """The error for a path without a checkpoint; suggests similar names or the steps inside."""
    if not backend.exists(path):
        parent, _, name = path.rpartition("/")
        beside = list[str]()
        with contextlib.suppress(PermissionError):  # who may read here may not look around
            beside = _suggestions(parent, backend) if parent else []
        others = difflib.get_close_matches(name, beside, n=3, cutoff=0.3) or beside[-5:]
        hint = f"; beside it are {', '.join(others)}" if others else ""
        return CheckpointNotFound(f"no checkpoint at {path}: it does not exist{hint}")
    inside = sorted(backend.children(path), key=lambda text: (len(text), text))
    steps = [
        name
        for name in inside
        if backend.read(f"{path}/{name}", RECORD_FILE) is not None or name.isdigit()
    ]
    if steps:
        return CheckpointNotFound(
            f"{path} is a directory of checkpoints ({', '.join(steps[-5:])}), not one: load one of them by its path, "
            f"such as {path.rstrip('/')}/{steps[-1]}, or use Checkpointer(directory)"
        )
    return CheckpointNotFound(f"no checkpoint at {path}: {_what_is(path, backend)}")


def _suggestions(parent: str, backend: Backend) -> list[str]:
    """Names to suggest: the checkpoints in a directory; if it has none, all entries but numbers."""
    inside = sorted(backend.children(parent), key=lambda text: (len(text), text))
    found = [name for name in inside if backend.is_checkpoint(f"{parent}/{name}")]
    return found or [name for name in inside if not name.isdigit()]


def refuse_file_for_steps(path: str) -> None:
    """Raises NotADirectoryError if a file is where a Checkpointer's directory should be."""
    try:
        refuse_file(path)
    except NotADirectoryError as error:
        kind, advice = _file(path)
        told = f"a {kind} is where the directory of steps should be" + (
            f": {advice}" * bool(advice)
        )
        raise NotADirectoryError(error.errno, told, path) from None


def _file(path: str) -> tuple[str, str]:
    """What kind of file this is, by its suffix, and how to load it."""
    whose = _LIBRARIES.get(os.path.splitext(path)[1].lower())
    if whose is None:
        return "file", ""
    imported = f"{os.path.splitext(os.path.basename(path))[0]}-imported"
    return f"file of {whose}", (
        f"make a checkpoint of it with `ckpt import {shlex.quote(path)} {shlex.quote(imported)}`, or "
        "ckpt.convert.import_weights, and load that"
    )


def _what_is(path: str, backend: Backend) -> str:
    """What is at the path of a checkpoint that was not found, for the message."""
    if os.path.isfile(path):
        kind, advice = _file(path)
        told = f"it is a {kind}, and a checkpoint is a directory"
        return f"{told}: {advice}" if advice else told
    inside = sorted({name.partition("/")[0] for name in backend.files(path)})
    if not inside:
        return "it is empty, or its save never finished"
    shown = ", ".join(inside[:5]) + (f" and {len(inside) - 5} more" if len(inside) > 5 else "")
    return f"it holds {shown}, and nothing that ckpt or Orbax writes"


_LIBRARIES = {
    **{".npz": "numpy", ".npy": "numpy", ".pt": "PyTorch", ".pth": "PyTorch", ".bin": "PyTorch"},
    **{
        ".ckpt": "PyTorch",
        ".msgpack": "Flax",
        ".eqx": "Equinox",
        ".h5": "Keras",
        ".keras": "Keras",
    },
}
"""Suffixes of files that users mistake for checkpoints, and the library that writes such."""
