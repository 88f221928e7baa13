"""Deletion of a checkpoint by its path: refused."""

from __future__ import annotations

from typing import Any, NoReturn

from ckpt_orbax._refused import not_offered


def delete(
    path: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> NoReturn:
    """Refused: ckpt deletes the steps of a run only, under its locks."""
    raise not_offered(
        "ocp.delete()",
        "ckpt deletes steps of a run, under locks that protect their readers",
        "training.Checkpointer(directory).delete(step), or shutil.rmtree(path) for a single checkpoint",
    )


def delete_async(
    path: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> NoReturn:
    """Refused, as ``delete``."""
    delete(path, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
