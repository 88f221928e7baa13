"""Checkpoints for the JAX stack: model, optimizer, random state and data, saved atomically.

::

    import ckpt_core as ckpt

    with ckpt.Checkpointer("runs/1", max_to_keep=3) as checkpointer:
        restored = checkpointer.restore_latest(model=model, optimizer=optimizer, data=batches)
        for step in range(restored.step + 1 if restored else 0, total_steps):
            ...
            checkpointer.save(step, model=model, optimizer=optimizer, data=batches)

Names are imported at first use (PEP 562), so ``import ckpt_core`` does not import jax.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

from ckpt_core import (
    _background as _background,  # early: its exit handler runs after users'
    _fork as _fork,  # records the process id before any fork
)

if TYPE_CHECKING:
    from ckpt_core import convert as convert, events as events
    from ckpt_core._adapters import Adapter as Adapter, Stateful as Stateful, register as register
    from ckpt_core._background import PendingLoad as PendingLoad, PendingSave as PendingSave
    from ckpt_core._errors import (
        BarrierTimeout as BarrierTimeout,
        CheckpointCorrupt as CheckpointCorrupt,
        CheckpointError as CheckpointError,
        CheckpointExists as CheckpointExists,
        CheckpointNotFound as CheckpointNotFound,
        ForkedProcess as ForkedProcess,
        GraceExceeded as GraceExceeded,
        Mismatch as Mismatch,
        RestoredValueIgnored as RestoredValueIgnored,
        StructureMismatch as StructureMismatch,
        UnsupportedLeaf as UnsupportedLeaf,
    )
    from ckpt_core._format.rules import Rule as Rule
    from ckpt_core._items import Files as Files, Json as Json, SavedFiles as SavedFiles
    from ckpt_core._load import load as load, load_async as load_async, restore as restore
    from ckpt_core._operation import Event as Event
    from ckpt_core._options import Options as Options
    from ckpt_core._publish import Follower as Follower, Publisher as Publisher
    from ckpt_core._replayed import Replayed as Replayed
    from ckpt_core._results import (
        CheckpointInfo as CheckpointInfo,
        ItemInfo as ItemInfo,
        LeafInfo as LeafInfo,
        Problem as Problem,
        Restored as Restored,
        RestoredStep as RestoredStep,
        RestoreReport as RestoreReport,
        VerifyReport as VerifyReport,
    )
    from ckpt_core._run.checkpointer import Checkpointer as Checkpointer
    from ckpt_core._run.policies import keep as keep, when as when
    from ckpt_core._save import save as save, save_async as save_async
    from ckpt_core._save.pieces import writer as writer
    from ckpt_core._verify import inspect as inspect, verify as verify

__version__ = "0.1.0"

_HOMES = {
    "_adapters": "Adapter Stateful register",
    "_background": "PendingLoad PendingSave",
    "_errors": "BarrierTimeout CheckpointCorrupt CheckpointError CheckpointExists CheckpointNotFound"
    " ForkedProcess GraceExceeded Mismatch RestoredValueIgnored StructureMismatch UnsupportedLeaf",
    "_format.rules": "Rule",
    "_items": "Files Json SavedFiles",
    "_load": "load load_async restore",
    "_operation": "Event",
    "_options": "Options",
    "_publish": "Follower Publisher",
    "_replayed": "Replayed",
    "_results": "CheckpointInfo ItemInfo LeafInfo Problem Restored RestoredStep RestoreReport VerifyReport",
    "_run.checkpointer": "Checkpointer",
    "_run.policies.keep": "keep",
    "_run.policies.when": "when",
    "_save": "save save_async",
    "_save.pieces": "writer",
    "_verify": "inspect verify",
    "convert": "convert",
    "events": "events",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def _imported(module: str) -> Any:
    """The module, imported without passes of the garbage collector: after jax's import one takes 50 ms, and would come with the first load."""
    collects = gc.isenabled()  # False while another thread is here, which enables it again
    try:
        if collects:
            gc.disable()
        return importlib.import_module(module)
    finally:
        if collects:
            gc.enable()


if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'ckpt_core' has no attribute {name!r}")
        module = _imported(f"ckpt_core.{_HOME_OF[name]}")
        is_module = _HOME_OF[name].rpartition(".")[2] == name
        globals()[name] = module if is_module else getattr(module, name)
        return globals()[name]


def __dir__() -> list[str]:
    return __all__
