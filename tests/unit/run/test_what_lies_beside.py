"""A file, a name or a listing that is not the save's own does not stop it, and is not counted for it."""

import errno
import os
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core import when
from ckpt_core._directory import files
from ckpt_core._processes import Processes
from ckpt_core._run.preemption import SaveDecision
from tests.support.counted_service import Service, run_all


def failing_read(*_: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_bad_sector_of_the_last_step_is_no_reason_not_to_save(tmp_path, monkeypatch):
    (tmp_path / "old").write_bytes(b"content")
    known = files.identify(str(tmp_path), ["old"])["old"]
    old, new = str(tmp_path / "old"), str(tmp_path / "new")

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", failing_read)
        assert not files.link_same(old, new, known, [b"content"])
    assert not os.path.exists(new)
    source = (failing_read() for _ in range(1))
    with pytest.raises(OSError, match="Input/output"):  # what is to be saved must be readable
        files.link_same(old, new, known, source)
    assert files.link_same(old, new, known, [b"content"])


class _Unasked:
    def wants(self, _step: int) -> bool:
        return False


def _wanted(monkeypatch: pytest.MonkeyPatch, policy: when.Decision) -> list[Any]:
    """What each of two processes is told of step 3 where no directory can be listed."""
    unasked: Any = _Unasked()

    def ask(processes: Processes) -> Any:
        try:
            return SaveDecision(policy, failing_read, processes, unasked, 9.0).wants(3, False)
        except Exception as error:
            return type(error)

    return run_all(monkeypatch, Service(), 2, ask)


def test_a_listing_that_fails_keeps_no_process_out_of_a_call(monkeypatch):
    assert _wanted(monkeypatch, when.every_steps(1)) == [True, True]  # by the number: nobody looks
    assert _wanted(monkeypatch, when.first()) == [OSError, ckpt.CheckpointError]  # both hear of it
