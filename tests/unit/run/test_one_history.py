"""One history: every order of calls, by writers, readers and tools, beside a plain model of what a run must hold.

After each call: what it returned or raised, the steps and the value of each one, as the writer sees them, a reader
that starts now, one with other names of steps, and one that has been open for long.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from typing import Any, ClassVar

import hypothesis
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
from ckpt_core._copy import copy_checkpoint
from ckpt_core._directory import resolve
from ckpt_core._storage import backend_of
from tests.support.histories import Absent, Model, Refused
from tests.support.stores import url_of_kind

NUMBERS = st.integers(0, 8)
POLICIES = st.sampled_from([(None, 0), (1, 0), (2, 0), (2, 3), (3, 4)])
PREFIXES = st.sampled_from([None, "run"])
_directories = itertools.count()


class History(RuleBasedStateMachine):
    """A run and its model; subclasses say where it lies."""

    tiers: ClassVar[bool] = False
    root: ClassVar[str | None] = None
    """URL under which directories are made; None for a disk."""
    operations: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.mkdtemp(prefix="ckpt-history-", dir=_fast_disk())
        self.url = f"{self.scratch}/steps"
        if self.root is not None:
            self.url = f"{self.root}/{next(_directories)}/steps"
        self.model = Model(self.tiers)
        self.value = 0
        self.asks = 0
        self.settled = True
        self.writer = self.open()
        self.reader = self.open(read_only=True)

    def open(self, **arguments: Any) -> ckpt.Checkpointer:
        options = ckpt.Options(durable=False)
        if self.tiers:
            persists = ckpt.when.every_steps(2)
            options = ckpt.Options(durable=False, persist_policy=persists, local_max_to_keep=2)
            arguments["local_directory"] = f"{self.scratch}/local"
        return ckpt.Checkpointer(self.url, options=options, **arguments)

    def begin(self, settle: bool = True) -> None:
        type(self).operations += 1
        if settle:
            self.settle()

    def settle(self) -> None:
        self.writer.wait_until_finished()
        self.settled = True

    # ---- the writer --------------------------------------------------------------------------

    @rule(
        step=NUMBERS,
        overwrite=st.booleans(),
        force=st.booleans(),
        waits=st.booleans(),
    )
    def save(self, step: int, overwrite: bool, force: bool, waits: bool) -> None:
        self._save(step, overwrite, force, waits)

    @rule(ahead=st.integers(1, 3), waits=st.booleans())
    def go_on(self, ahead: int, waits: bool) -> None:
        """What training does: from where it stands."""
        at = self.model.writer.at
        self._save((-1 if at is None else at) + ahead, False, False, waits)

    def _save(self, step: int, overwrite: bool, force: bool, waits: bool) -> None:
        self.begin(settle=waits)
        self.value += 1
        state, more = {"value": self.value}, {"metadata": {"value": self.value}}
        try:
            wanted = self.model.save(step, self.value, overwrite=overwrite, force=force)
        except Refused:
            with pytest.raises(ckpt.CheckpointExists):
                self.writer.save(step, state, overwrite=overwrite, force=force, **more)
            return
        found = self.writer.save(step, state, overwrite=overwrite, force=force, **more)
        assert found == wanted
        self.settled = False
        if waits:
            self.settle()

    @rule()
    def restore_latest(self) -> None:
        self.begin(settle=False)
        self.check_restored(self.writer.restore_latest({"value": 0}), self.model.restore_latest())

    @rule(step=NUMBERS)
    def restore(self, step: int) -> None:
        self.begin(settle=False)
        try:
            wanted = self.model.restore(step)
        except Absent:
            with pytest.raises(ckpt.CheckpointNotFound):
                self.writer.restore(step, {"value": 0})
            return
        self.check_restored(self.writer.restore(step, {"value": 0}), wanted)

    def check_restored(self, found: Any, wanted: tuple[int, int] | None) -> None:
        if found is not None:
            found = found.step, found.state["value"]
        assert found == wanted

    @rule(step=NUMBERS)
    def rollback_to(self, step: int) -> None:
        self.begin(settle=False)
        wanted = self.model.rollback(step)
        assert self.writer.rollback_to(step) == wanted

    @rule(step=NUMBERS)
    def delete(self, step: int) -> None:
        self.begin(settle=False)
        try:
            self.model.delete(step)
        except Absent:
            with pytest.raises(ckpt.CheckpointNotFound):
                self.writer.delete(step)
            return
        self.writer.delete(step)

    # ---- others ------------------------------------------------------------------------------

    @rule(policy=POLICIES, prefix=PREFIXES, asynchronous=st.booleans(), closes=st.booleans())
    def restart(
        self, policy: tuple[int | None, int], prefix: str | None, asynchronous: bool, closes: bool
    ) -> None:
        """The writer closes, or its process is gone, and the next one starts."""
        self.begin()
        if closes:
            self.writer.close()
        self.writer = self._start(policy, prefix, asynchronous)

    @rule(policy=POLICIES, prefix=PREFIXES, asynchronous=st.booleans(), step=st.integers(9, 12))
    def take_over(
        self, policy: tuple[int | None, int], prefix: str | None, asynchronous: bool, step: int
    ) -> None:
        """Another writer claims the directory: the one before changes nothing any more."""
        self.begin()
        before, had_claimed = self.writer, self.model.writer.claimed
        self.writer = self._start(policy, prefix, asynchronous)
        self.restore_latest()
        if had_claimed:
            with pytest.raises(ckpt.CheckpointError, match="took this directory over"):
                self.save_and_wait(before, step)
            with pytest.raises(ckpt.CheckpointError, match="took this directory over"):
                before.rollback_to(0)
        before.close()

    def save_and_wait(self, writer: ckpt.Checkpointer, step: int) -> None:
        writer.save(step, {"value": -1}, force=True, overwrite=True)
        writer.wait_until_finished()

    def _start(
        self, policy: tuple[int | None, int], prefix: str | None, asynchronous: bool
    ) -> ckpt.Checkpointer:
        keep, period = policy
        self.model.restart(keep, period)
        return self.open(
            max_to_keep=keep,
            keep_period=period or None,
            step_prefix=prefix,
            asynchronous=asynchronous,
        )

    @precondition(lambda self: self.model.disk)
    @rule(data=st.data())
    def a_tool_removes(self, data: st.DataObject) -> None:
        self.begin()
        step = data.draw(st.sampled_from(sorted(self.model.disk)))
        backend_of(resolve(self.url)[1]).delete(self.path(step))
        self.model.tool_removes(step)

    @precondition(lambda self: self.model.disk)
    @rule(data=st.data(), copy=NUMBERS)
    def a_tool_copies(self, data: st.DataObject, copy: int) -> None:
        self.begin()
        source = data.draw(st.sampled_from(sorted(self.model.disk)))
        if copy not in self.model.steps:
            copy_checkpoint(self.path(source), f"{self.url}/{copy}")
            self.model.tool_copies(source, copy)

    def path(self, step: int) -> str:
        with ckpt.Checkpointer(self.url, read_only=True) as persistent:
            return persistent.restore(step, {"value": 0}).path

    @rule()
    def a_reader_looks(self) -> None:
        self.begin()
        wanted = max(self.model.steps.items(), default=None)
        self.check_restored(self.reader.restore_latest({"value": 0}), wanted)
        assert self.reader.all_steps() == sorted(self.model.steps)
        if wanted is not None and wanted[0] in self.model.disk:
            newest = max(self.model.disk)
            assert self.reader.wait_for_new_step(timeout_secs=0) == newest
            self.reader.wait_for_new_step(newest, timeout_secs=0)  # it wants that one no more

    # ---- one number, one value ---------------------------------------------------------------

    @invariant()
    def all_agree(self) -> None:
        if not self.settled:
            return
        steps = self.model.steps
        if self.root is None and os.path.isdir(self.url):
            names = [name for name in os.listdir(self.url) if name[-1].isdigit()]
            numbers = [int(name.rpartition("_")[2]) for name in names]
            assert sorted(numbers) == sorted(self.model.disk), names  # each under one name
        self.asks += 1
        asked = {*sorted(steps)[-1:], *[sorted(steps)[self.asks % len(steps)] for _ in steps][:1]}
        prefix = (None, "other", "run")[self.asks % 3]
        with self.open(read_only=True, step_prefix=prefix) as starting:
            found = starting.restore_latest({"value": 0})
            self.check_restored(found, max(steps.items(), default=None))
            for one in (self.writer, starting):
                assert one.all_steps() == sorted(steps)
                assert one.latest_step() == max(steps, default=None)
                for step in asked:
                    assert one.load(step)["value"] == steps[step]
                    assert one.inspect(step).metadata == {"value": steps[step]}
            with pytest.raises(ckpt.CheckpointNotFound):
                starting.load(next(n for n in range(99) if n not in steps))
        if self.tiers:
            with ckpt.Checkpointer(self.url, read_only=True) as persistent:
                assert persistent.all_steps() == sorted(self.model.disk)
                for step in asked & self.model.disk.keys():
                    assert persistent.load(step)["value"] == self.model.disk[step]

    def teardown(self) -> None:
        try:
            self.writer.wait_until_finished()
            self.writer.close()
            self.reader.close()
        finally:
            shutil.rmtree(self.scratch)


class OnDisk(History):
    pass


class InMemory(History):
    root = "memory://test-one-history"


class WithTiers(History):
    tiers = True


def _fast_disk() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run(machine: type[History], operations: int) -> None:
    """Runs at least so many operations, in examples of 50, and says how many they were."""
    machine.operations = 0
    settings = hypothesis.settings(
        max_examples=max(operations // 50, 1),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    run_state_machine_as_test(machine, settings=settings)
    print(f"{machine.__name__}: {machine.operations:,} operations")


@pytest.mark.parametrize("machine", [OnDisk, InMemory, WithTiers])
def test_any_order_of_calls(machine: type[History]) -> None:
    _run(machine, 250)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [OnDisk, InMemory, WithTiers])
def test_any_order_of_calls_for_long(machine: type[History]) -> None:
    _run(machine, 5_000)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [OnDisk, InMemory, WithTiers])
def test_a_hundred_thousand_calls(machine: type[History]) -> None:
    while machine.operations < 100_000 // 3:
        done = machine.operations
        _run(machine, 10_000)
        machine.operations += done


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_any_order_of_calls_in_a_store(kind: str, request: pytest.FixtureRequest) -> None:
    class InStore(History):
        root = url_of_kind(request, kind)

    _run(InStore, 300)
