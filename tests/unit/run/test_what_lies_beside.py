"""A file, a name or a listing that is not the save's own does not stop it, and is not counted for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import when
from ckpt_core._directory import hardlinks
from ckpt_core._processes import Processes
from ckpt_core._run.decision import SaveDecision

_FAILING = """
def read(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))
"""
"""From no file: what is raised in a file of these tests counts as raised by a signal handler."""


def failing_read() -> Any:
    names: dict[str, Any] = {"errno": errno, "os": os}
    exec(compile(_FAILING, "<injected>", "exec"), names)
    return names["read"]


def test_a_bad_sector_of_the_last_step_is_no_reason_not_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_bytes(b"content")
    known = hardlinks.identify(str(tmp_path), ["old"])["old"]
    old, new = str(tmp_path / "old"), str(tmp_path / "new")

    class Bad:
        read = staticmethod(failing_read())

        def __enter__(self) -> Bad:
            return self

        def __exit__(self, *_: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(hardlinks, "open", lambda *_, **__: Bad(), raising=False)
        assert not hardlinks.link_same(old, new, known, [b"content"])
    assert not os.path.exists(new)
    source = (failing_read()() for _ in range(1))
    with pytest.raises(OSError, match="Input/output"):  # what is to be saved must be readable
        hardlinks.link_same(old, new, known, source)
    assert hardlinks.link_same(old, new, known, [b"content"])


class _Unasked:
    def wants(self, _step: int) -> bool:
        return False


def _decision(policy: when.Decision, index: int) -> SaveDecision:
    unasked: Any = _Unasked()
    return SaveDecision(policy, Processes(index, 2), unasked, failing_read(), 1.0)


def test_a_listing_that_fails_keeps_no_process_out_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    def broadcast(_self: Processes, _tag: str, value: str, **_: Any) -> str:
        said.append(value)
        return "3 True"

    monkeypatch.setattr(Processes, "broadcast", broadcast)
    for index in (0, 1):  # by the number alone: nobody looks
        assert _decision(when.every_steps(1), index).wants(3, False)
    assert said == []
    assert _decision(when.first(), 1).wants(3, False)  # the answer is that of process 0
    with pytest.raises(OSError, match="Input/output"):
        _decision(when.first(), 0).wants(3, False)
    assert said[-1].startswith("3 OSError"), said  # the others hear of it
