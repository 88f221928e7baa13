"""The Checkpointer against a model of itself: saves, failures, crashes, readers, in any order.

The model is a dict of steps and the numbers that were saved in them, and knows three rules: what was
acknowledged stays until a policy or the user lets it go, a failed or killed save changes nothing,
and a step that is being read is not deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ckpt_core as ckpt
from ckpt_core import keep
from ckpt_core._directory import PosixBackend
from ckpt_core._directory.posix import LocalAttempt
from ckpt_core._saved.opening import open_checkpoint
from tests.support import seams

OPTIONS = ckpt.Options(durable=False)
_DEAD = "00000000-1-1"


class Killed(Exception):
    """Stands for the end of the process: nothing of ours runs after it."""


class Directory(RuleBasedStateMachine):
    """Steps on disk against the steps of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="ckpt-machine-")
        self.steps: dict[int, int] = {}
        self.held: dict[int, Any] = {}
        self.value = 0
        self.pending: tuple[int, int] | None = None
        self.open_(None, 0, True)

    # ---- opening and closing ---------------------------------------------------------------

    def open_(self, keep: int | None, period: int, asynchronous: bool) -> None:
        self.keep = keep
        self.period = period if keep is not None else 0
        self.asynchronous = asynchronous
        self.mine: set[int] = set()
        self.checkpointer = ckpt.Checkpointer(
            self.path,
            max_to_keep=keep,
            keep_period=self.period or None,
            asynchronous=asynchronous,
            options=OPTIONS,
        )

    arguments = (st.none() | st.integers(1, 3), st.integers(0, 4), st.booleans())

    @rule(keep=arguments[0], period=arguments[1], asynchronous=arguments[2])
    def reopen(self, keep: int | None, period: int, asynchronous: bool) -> None:
        """Closed in peace, opened with other settings."""
        self.settle()
        self.checkpointer.close()
        assert not [name for name in os.listdir(self.path) if name.startswith(".ckpt-tmp")]
        self.open_(keep, period, asynchronous)

    @rule(
        keep=arguments[0],
        period=arguments[1],
        asynchronous=arguments[2],
        point=st.sampled_from([None, "record", "commit"]),
    )
    def crash(
        self, keep: int | None, period: int, asynchronous: bool, point: seams.Point | None
    ) -> None:
        """Killed in the middle of a save; what it leaves has a dead owner."""
        self.settle()
        step = self.last + 1
        with (
            pytest.MonkeyPatch.context() as patch,
            mock.patch.object(LocalAttempt, "abort"),
            mock.patch("ckpt_core._directory.hidden_names.this_owner", return_value=_DEAD),
            mock.patch("ckpt_core._directory.leftovers.is_dead", lambda owner, _: owner == _DEAD),
        ):
            if point is None:  # at its first small file, while arrays are being written
                patch.setattr(LocalAttempt, "write", seams.fail(Killed))
            else:
                seams.at(patch, point, before=seams.fail(Killed))
            with contextlib.suppress(Killed):
                self.checkpointer.save(step, self.state(self.value), force=True)
                self.checkpointer.wait_until_finished()
            assert [name for name in os.listdir(self.path) if name.startswith(".ckpt-tmp")]
            self.release_all()  # readers of that process are gone too
            self.open_(keep, period, asynchronous)
        assert not [name for name in os.listdir(self.path) if name.startswith(".ckpt-tmp")]

    # ---- saving ----------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        return max(self.steps, default=-1)

    @property
    def last(self) -> int:
        """The last number that this Checkpointer stands on, or that is there: retention may have removed it."""
        return max({*self.steps, *self.mine}, default=-1)

    def state(self, value: int) -> dict[str, Any]:
        return {"w": np.full(3, value), "n": value}

    @rule(ahead=st.integers(1, 3))
    def save(self, ahead: int) -> None:
        self.settle()
        self.value += 1
        step = self.last + ahead
        assert self.checkpointer.save(step, self.state(self.value))
        self.pending = (step, self.value)
        if not self.asynchronous:
            self.settle()

    @rule(ahead=st.integers(1, 2))
    def save_without_room(self, ahead: int) -> None:
        self.settle()
        step = self.last + ahead
        with pytest.MonkeyPatch.context() as patch:
            seams.at(patch, "commit", before=seams.fail())
            with pytest.raises(OSError, match="No space left"):
                self.save_and_wait(step)

    def save_and_wait(self, step: int) -> None:
        self.checkpointer.save(step, self.state(-1))
        self.checkpointer.wait_until_finished()

    @precondition(lambda self: self.steps)
    @rule()
    def save_the_same_step_again(self) -> None:
        self.settle()
        if self.newest in self.mine:
            assert not self.checkpointer.save(self.newest, self.state(-1))
        else:
            with pytest.raises(ckpt.CheckpointExists):
                self.checkpointer.save(self.newest, self.state(-1))

    @precondition(lambda self: self.steps and not self.held)
    @rule()
    def overwrite(self) -> None:
        self.settle()
        if not self.steps:
            return
        self.value += 1
        step = self.newest
        assert self.checkpointer.save(step, self.state(self.value), overwrite=True)
        self.pending = (step, self.value)
        self.settle()

    @rule(ahead=st.integers(1, 3))
    def save_without_being_able_to_delete(self, ahead: int) -> None:
        self.settle()
        self.value += 1
        step = self.last + ahead
        with mock.patch.object(PosixBackend, "delete", seams.fail()):
            assert self.checkpointer.save(step, self.state(self.value))
            self.checkpointer.wait_until_finished()
        self.steps[step] = self.value
        self.mine.add(step)

    def settle(self) -> None:
        """Waits for the save in flight; the model then takes it over, and deletes as it should."""
        self.checkpointer.wait_until_finished()
        if self.pending is None:
            return
        step, value = self.pending
        self.pending = None
        self.steps[step] = value
        self.mine.add(step)
        if self.keep is None:
            return
        newest = sorted(self.steps)[-self.keep :]
        for other in list(self.steps):
            periodic = self.period and other % self.period == 0
            if other not in newest and not periodic and other not in self.held:
                del self.steps[other]
        # what this Checkpointer wrote stays "mine" even when it is deleted again

    # ---- deleting --------------------------------------------------------------------------

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.settle()
        step = data.draw(st.sampled_from(sorted(self.steps)))
        if step in self.held:
            with pytest.raises(ckpt.CheckpointError, match="being read"):
                self.checkpointer.delete(step)
            return
        self.checkpointer.delete(step)
        del self.steps[step]
        self.mine.discard(step)

    @precondition(lambda self: self.steps and not self.held)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        self.settle()
        step = data.draw(st.sampled_from(sorted(self.steps)))
        retired = [other for other in sorted(self.steps) if other > step]
        assert self.checkpointer.rollback_to(step) == retired
        for other in retired:
            del self.steps[other]
        self.mine = {other for other in self.mine if other < step} | {step}  # it stands there

    # ---- reading ---------------------------------------------------------------------------

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def begin_to_read(self, data: st.DataObject) -> None:
        self.settle()
        step = data.draw(st.sampled_from(sorted(self.steps)))
        if step in self.held:
            return
        path = f"{self.path}/{step}"
        held = PosixBackend().reading(path, open_checkpoint(path).head)
        held.__enter__()
        self.held[step] = held

    @precondition(lambda self: self.held)
    @rule()
    def end_reading(self) -> None:
        self.settle()
        self.release_all()

    def release_all(self) -> None:
        for held in self.held.values():
            held.__exit__(None, None, None)
        self.held = {}

    @rule()
    def restore_latest(self) -> None:
        self.settle()
        restored = self.checkpointer.restore_latest(state=self.state(0))
        if not self.steps:
            assert restored is None
            return
        self.mine.add(self.newest)  # it stands there
        assert restored is not None
        assert restored.step == self.newest
        assert restored["state"]["n"] == self.steps[self.newest]
        assert np.array_equal(restored["state"]["w"], np.full(3, self.steps[self.newest]))

    @invariant()
    def disk_and_model_agree(self) -> None:
        if self.pending is None:
            assert self.checkpointer.all_steps() == sorted(self.steps)
        for step in self.held:
            assert self.checkpointer.load(step)["n"] == self.steps[step]

    def teardown(self) -> None:
        try:
            self.settle()
            self.release_all()
            self.checkpointer.close()
            for step, value in self.steps.items():
                assert ckpt.verify(f"{self.path}/{step}").ok
                assert ckpt.load(f"{self.path}/{step}")["n"] == value
        finally:
            shutil.rmtree(self.path)


def _run(examples: int, steps: int, **settings: Any) -> None:
    chosen = hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, **settings
    )
    run_state_machine_as_test(Directory, settings=chosen)


def test_the_model_and_the_disk_agree() -> None:
    _run(12, 20)


@pytest.mark.slow
def test_the_model_and_the_disk_agree_for_long() -> None:
    _run(400, 60)


def test_the_model_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retention that deletes one step too many is found, and so is one that deletes too few."""
    real = keep.latest
    for wrong in (-1, 1):
        machine = Directory()
        monkeypatch.setattr(keep, "latest", lambda n, wrong=wrong: real(n + wrong))
        machine.reopen(2, 0, False)
        machine.save(1)
        machine.save(1)
        if wrong > 0:
            machine.save(1)
        with pytest.raises(AssertionError):
            machine.disk_and_model_agree()
        shutil.rmtree(machine.path)
        monkeypatch.setattr(keep, "latest", real)
