"""What lies where a checkpoint was looked for, and what may have been meant."""

from __future__ import annotations

import difflib
import os

from ckpt_core._directory import Form
from ckpt_core._errors import CheckpointNotFound
from ckpt_core._format.record import RECORD_FILE


def not_found(path: str, form: Form) -> CheckpointNotFound:
    """The error for a path without a checkpoint, with what may have been meant."""
    if not form.exists(path):
        parent, _, name = path.rpartition("/")
        near = (
            difflib.get_close_matches(name, form.children(parent), n=3, cutoff=0.3)
            if parent
            else []
        )
        others = near or sorted(form.children(parent))[-5:] if parent else []
        hint = f"; beside it are {', '.join(others)}" if others else ""
        return CheckpointNotFound(f"no checkpoint at {path}: it does not exist{hint}")
    inside = sorted(form.children(path), key=lambda text: (len(text), text))
    steps = [
        name
        for name in inside
        if form.read(f"{path}/{name}", RECORD_FILE) is not None or name.isdigit()
    ]
    if steps:
        return CheckpointNotFound(
            f"{path} is a directory of checkpoints, not one: load one of {', '.join(steps[-5:])}, or "
            "use Checkpointer(directory)"
        )
    return CheckpointNotFound(f"no checkpoint at {path}: {_what_is(path, form)}")


def _what_is(path: str, form: Form) -> str:
    """What lies where a checkpoint was looked for."""
    if os.path.isfile(path):
        suffix = os.path.splitext(path)[1].lower()
        known = _FILES.get(suffix)
        told = f"it is a file{f' of {known[0]}' if known else ''}, and a checkpoint is a directory"
        return f"{told}: {known[1]}" if known else told
    inside = sorted({name.partition("/")[0] for name in form.files(path)})
    if not inside:
        return "it is empty, or its save never finished"
    shown = ", ".join(inside[:5]) + (f" and {len(inside) - 5} more" if len(inside) > 5 else "")
    return f"it holds {shown}, and nothing that ckpt or Orbax writes"


_NUMPY = ("numpy", "load it with numpy.load, and save what it holds with ckpt.save")
_TORCH = ("PyTorch", "load it with torch.load, and save what it holds with ckpt.save")
_FILES = {".npz": _NUMPY, ".npy": _NUMPY, ".pt": _TORCH, ".pth": _TORCH, ".ckpt": _TORCH}
"""Files of others that are taken for checkpoints: by suffix, whose they are and what reads them."""
