"""Restores and loads the steps of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from ckpt_core import _adapters, _load
from ckpt_core._directory.step_names import check_step
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._results import Restored
from ckpt_core._run.parts import Parts
from ckpt_core._run.recovery import restore_newest


class Reading:
    """Restores and loads; the caller has waited for running saves."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def restore_newest(
        self, targets: Mapping[str, Any], request: _load.Request, strict_latest: bool
    ) -> Restored | None:
        """Restores the newest intact step; None if there is no step."""
        parts = self._parts
        parts.branch.begin_restore()
        restored = restore_newest(
            parts.run.path,
            lambda step: self._restore(step, targets, request),
            strict_latest,
            lambda: parts.branch.note_listed(parts.decision.steps_on_first(parts.tiers.all)),
            parts.run.damaged,
        )
        if restored is None:
            _adapters.notice(targets.values())
        else:
            self._note(restored, targets, request)
        return restored

    def restore(self, step: int, targets: Mapping[str, Any], request: _load.Request) -> Restored:
        """Restores one step."""
        step = check_step(step)
        self._parts.branch.begin_restore()
        restored = self._restore(step, targets, request)
        self._note(restored, targets, request)
        return restored

    def load(self, step: int, like: Any, item: str | None, arguments: dict[str, Any]) -> Any:
        """The saved tree of one step."""
        arguments.setdefault("options", self._parts.run.options)
        request = _load.request_from("load", like, arguments)
        with self._handing_no_damage_on():
            return _load.load_checkpoint(self._parts.tiers.opening(step), like, item, request, step)

    def _note(self, restored: Restored, targets: Mapping[str, Any], request: _load.Request) -> None:
        self._parts.unread.watch(restored, targets, request.rules.unexpected)
        self._parts.branch.restored(restored.step)

    def _restore(self, step: int, targets: Mapping[str, Any], request: Any) -> Restored:
        with self._handing_no_damage_on():
            return self._parts.tiers.restore(step, targets, request)

    @contextlib.contextmanager
    def _handing_no_damage_on(self) -> Generator[None]:
        """After damage, the next save hard-links no earlier files: they may be the damaged ones."""
        try:
            yield
        except CheckpointCorrupt:
            self._parts.saving.links.forget()
            raise
