"""What a run must hold after any calls: the rules of one history in plain words, and a run that is driven beside them.

``Model`` knows nothing of how the library decides: dicts of numbers and values. A value stands for a save: every
save has its own. ``Run`` makes each call at a Checkpointer and at the model, and compares what they give, and what
a writer, readers and tools then see.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core.cli import main
from tests.support import seams
from tests.support.stores import delete_at


def tool(*arguments: str) -> None:
    """``ckpt`` with these arguments, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ckpt", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, arguments


Steps = dict[int, int]
"""Number of a step -> value that was saved in it."""


class Refused(Exception):
    """The save must raise CheckpointExists."""


class Absent(Exception):
    """The call must raise CheckpointNotFound."""


@dataclass
class Writer:
    """One Checkpointer that writes. ``stood`` are the steps that it saved or restored, on the way of its training, ``beside`` those
    that it saved beneath newer ones, ``at`` the one that it stands on (None at the beginning). It has ``looked`` if it has
    restored, rolled back, or begun where nothing newer was. Strangers beyond ``since`` are of another history (None: it saved
    nothing from where it stands). It has ``begun`` if it has saved since it was placed, and ``claimed`` the directory.
    """

    stood: Steps = field(default_factory=dict[int, int])
    beside: Steps = field(default_factory=dict[int, int])
    at: int | None = None
    looked: bool = False
    since: int | None = None
    begun: bool = False
    claimed: bool = False

    @property
    def own(self) -> set[int]:
        return {*self.stood, *self.beside}

    @property
    def end(self) -> int:
        return max(self.stood, default=-1)

    @property
    def went_back(self) -> bool:
        return (-1 if self.at is None else self.at) != self.end

    def below(self, step: int) -> int | None:
        return max((one for one in self.stood if one < step), default=None)

    def is_ahead(self, step: int) -> bool:
        """Whether the number is beyond the place to which it went back, or beyond everything."""
        return step > self.end or (self.went_back and step > (-1 if self.at is None else self.at))

    def repeats(self, step: int) -> bool:
        return step in self.own and not (self.went_back and self.is_ahead(step))

    def forget(self, step: int, there: Iterable[int]) -> None:
        """A step is gone; it stands on the one before, of those that are there."""
        gone = {step}
        if self.at == step:
            left = {*there} & up_to(self.stood, step).keys()
            self.at = max(left, default=None)
            gone = {*range(-1 if self.at is None else self.at, step + 1)} - left
        if {*self.stood} and {*self.stood} <= gone:  # it stands nowhere now
            self.looked = False
        self.stood = {one: value for one, value in self.stood.items() if one not in gone}
        self.beside.pop(step, None)
        self.since, self.begun = None, False

    def leave(self, last: int) -> None:
        self.stood = up_to(self.stood, last)
        self.beside = up_to(self.beside, last)
        self.at = max(self.stood, default=None)


def up_to(steps: Steps, last: int) -> Steps:
    return {step: value for step, value in steps.items() if step <= last}


@dataclass
class Model:
    """Steps of one run, and its writer. ``disk`` and ``local`` are the steps of the persistent and of the local directory.
    Multiples of ``every`` go to the persistent one if there is a local one, and others if forced; None: there is none.
    ``local_keep`` steps stay local; ``keep`` and ``period`` are ``max_to_keep`` and ``keep_period`` of the writer. ``parents``:
    of a value, number and value of the step that its save continued. Of ``ancestors`` a restore knows whether they hang together.
    """

    every: int | None = None
    local_keep: int = 2
    keep: int | None = None
    period: int = 0
    disk: Steps = field(default_factory=dict[int, int])
    local: Steps = field(default_factory=dict[int, int])
    writer: Writer = field(default_factory=Writer)
    parents: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    ancestors: int = 64

    @property
    def tiers(self) -> bool:
        return self.every is not None

    @property
    def steps(self) -> Steps:
        """What counts: of one number the newest save."""
        return {**self.disk, **self.local}

    @property
    def newest(self) -> int | None:
        """The newest step of the history that hangs together."""
        return next(filter(self._hangs_together, sorted(self.steps, reverse=True)), None)

    def _hangs_together(self, step: int) -> bool:
        """Whether no later save went on between a step, or one of its ancestors, and its parent; local steps are not asked."""
        steps, at = self.steps, step
        for _ in range(0 if step in self.local else self.ancestors):
            if at not in steps or (parent := self.parents.get(steps[at])) is None:
                break
            between = (v for n, v in steps.items() if parent[0] <= n < at and v in self.parents)
            if any(value > steps[step] for value in between):
                return False
            at = parent[0]
        return True

    def persists(self, step: int, force: bool) -> bool:
        return self.every is None or force or step % self.every == 0

    # ---- calls of the writer -----------------------------------------------------------------

    def save(self, step: int, value: int, *, overwrite: bool, force: bool) -> bool:
        """What the call gives; the steps are then as they must be once it has ended."""
        writer = self.writer
        beyond = {one for one in writer.own if one >= step}
        if not overwrite and writer.repeats(step) and beyond.isdisjoint(self.steps):
            for one in sorted(beyond, reverse=True):  # somebody has removed them all
                writer.forget(one, self.steps)
        if not overwrite and writer.repeats(step):
            local_only = self.tiers and step == writer.at and step not in self.disk
            if not (force and local_only):
                return False
            overwrite = True
        writer.claimed = True
        # An overwrite goes to each tier that has the step, where the writer looks, or the old value came back.
        looks = not writer.begun or step <= writer.end or step in writer.own
        everywhere = force or (overwrite and looks and step in self.disk)
        if writer.is_ahead(step):
            self._go_on(step, value, overwrite, force)
            self._write(step, value, everywhere)
            return True
        there = self.steps
        if step in writer.own:
            which = writer.beside if step in writer.beside else writer.stood
            base = writer.below(step)
            if base is not None and not any(other > step for other in there):
                self.parents[value] = base, writer.stood[base]
            which[step] = value
            writer.looked = writer.looked or which is writer.stood
            writer.begun = writer.begun and which is writer.stood  # it looks again after one beside
        elif step in there and not overwrite:
            raise Refused
        elif any(other > step for other in there):
            if step not in there and not force:
                raise Refused
            writer.beside[step] = value
            writer.begun = False
        else:  # what was newer is gone
            base = writer.below(step)
            self._train_on(step, value, step - 1 if base is None else base)
        self._write(step, value, everywhere)
        return True

    def _go_on(self, step: int, value: int, overwrite: bool, force: bool) -> None:
        writer = self.writer
        base = writer.below(step)
        if writer.went_back and step <= writer.end:
            base = writer.at
        after = step - 1 if base is None else base
        since = after if writer.since is None else writer.since
        strangers = {
            other
            for other in self.steps
            if other > after or (other > since and other not in writer.own)
        }
        if strangers and not writer.looked and not (overwrite and step in strangers):
            if step in strangers or not force:
                raise Refused
            writer.beside[step] = value
            writer.begun = False
        else:
            if self.persists(step, force) or not writer.begun:  # else nobody looks there
                self.disk = {n: v for n, v in self.disk.items() if n not in strangers or n == step}
                if not overwrite and step in strangers:
                    self.disk.pop(step, None)
            if self.tiers and not writer.begun:
                self.local = up_to(self.local, after)
            self._train_on(step, value, after)

    def _train_on(self, step: int, value: int, after: int) -> None:
        writer = self.writer
        writer.leave(after)
        if writer.stood:
            self.parents[value] = max(writer.stood.items())
        writer.stood[step] = value
        writer.at = step
        writer.since = after if writer.since is None else min(writer.since, after)
        writer.looked = writer.begun = True

    def _write(self, step: int, value: int, everywhere: bool) -> None:
        if self.tiers:
            self.local[step] = value
            newest = sorted(self.local)[-self.local_keep :]
            self.local = {n: v for n, v in self.local.items() if n == step or n in newest}
        if self.persists(step, everywhere):
            self.disk[step] = value
            if self.keep is not None:
                newest = sorted(self.disk)[-self.keep :]
                self.disk = {
                    n: v
                    for n, v in self.disk.items()
                    if n in newest or (self.period and n % self.period == 0)
                }

    def restore_latest(self) -> tuple[int, int] | None:
        if (newest := self.newest) is not None:
            return self.restore(newest)
        self.writer = Writer(looked=True, since=-1, claimed=True)
        return None

    def restore(self, step: int) -> tuple[int, int]:
        writer = self.writer
        writer.claimed = True
        if step not in self.steps:
            raise Absent
        writer.stood[step] = self.steps[step]
        writer.beside.pop(step, None)
        writer.at, writer.looked, writer.since, writer.begun = step, True, None, False
        return step, self.steps[step]

    def rollback(self, step: int) -> list[int]:
        gone = sorted(other for other in self.steps if other > step)
        self.disk, self.local = up_to(self.disk, step), up_to(self.local, step)
        writer = self.writer
        writer.leave(max(self.steps, default=-1))
        writer.claimed = True
        if self.steps:
            newest = max(self.steps)
            writer.stood[newest] = self.steps[newest]
            writer.beside.pop(newest, None)
        writer.at = max(writer.stood, default=None)
        writer.looked, writer.since, writer.begun = True, None, False
        return gone

    def delete(self, step: int) -> None:
        if step not in self.steps:
            raise Absent
        self.disk.pop(step, None)
        self.local.pop(step, None)
        self.writer.forget(step, self.steps)

    # ---- what others do ----------------------------------------------------------------------

    def restart(self, keep: int | None, period: int) -> None:
        self.keep, self.period = keep, period if keep is not None else 0
        self.writer = Writer()

    def host_is_lost(self) -> None:
        self.local = {}

    def tool_removes(self, step: int) -> None:
        del self.disk[step]

    def tool_copies(self, source: int, target: int) -> None:
        self.disk[target] = self.disk[source]


# ---- a run beside its model ----------------------------------------------------------------------

_urls = itertools.count()


def outcome(call: Any) -> str:
    """What a call gave, or how it was refused."""
    try:
        return str(call())
    except (Refused, ckpt.CheckpointExists):
        return "refused"
    except (Absent, ckpt.CheckpointNotFound):
        return "absent"


class Run:
    """A run and its model: every call goes to both, and must give the same. It lies under the URL ``root``, or on a disk; writers
    name their steps with ``prefix``, readers look under others, too; ``every`` and ``local_keep`` are those of ``Model``.
    """

    def __init__(
        self,
        root: str | None = None,
        every: int | None = None,
        local_keep: int = 2,
        prefix: str | None = None,
    ) -> None:
        fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.scratch = tempfile.mkdtemp(prefix="ckpt-history-", dir=fast)
        self.on_disk = root is None
        self.url = f"{self.scratch}/steps" if root is None else f"{root}/{next(_urls)}/steps"
        self.model = Model(every, local_keep, ancestors=64 if root is None else 1)
        self.value = self.asks = 0
        self.settled = True
        self.prefix = prefix
        self.writer = self.open(step_prefix=prefix)
        self.reader = self.open(read_only=True)

    def open(self, **arguments: Any) -> ckpt.Checkpointer:
        options = ckpt.Options(durable=False)
        if self.model.every is not None:
            options = ckpt.Options(
                durable=False,
                persist_policy=ckpt.when.every_steps(self.model.every),
                local_max_to_keep=self.model.local_keep,
            )
            arguments["local_directory"] = f"{self.scratch}/local"
        return ckpt.Checkpointer(self.url, options=options, **arguments)

    def settle(self) -> None:
        self.writer.wait_until_finished()
        self.settled = True

    def close(self) -> None:
        try:
            self.settle()
            self.writer.close()
            self.reader.close()
        finally:
            shutil.rmtree(self.scratch)

    # ---- the writer --------------------------------------------------------------------------

    def save(
        self, step: int, overwrite: bool = False, force: bool = False, waits: bool = True
    ) -> str:
        if waits:
            self.settle()
        self.value += 1
        value, how = self.value, {"overwrite": overwrite, "force": force}
        wanted = outcome(lambda: self.model.save(step, value, **how))
        state, more = {"value": value}, {"metadata": {"value": value}}
        assert outcome(lambda: self.writer.save(step, state, **how, **more)) == wanted
        self.settled = self.settled and wanted != "True"
        if waits:
            self.settle()
        return wanted

    def restore(self, step: int | None = None) -> str:
        """The newest step by default."""

        def ours() -> Any:
            if step is None:
                return _found(self.writer.restore_latest({"value": 0}))
            return _found(self.writer.restore(step, {"value": 0}))

        wanted = outcome(
            self.model.restore_latest if step is None else lambda: self.model.restore(step)
        )
        assert outcome(ours) == wanted
        return wanted

    def rollback(self, step: int) -> str:
        wanted = str(self.model.rollback(step))
        assert str(self.writer.rollback_to(step)) == wanted
        return wanted

    def delete(self, step: int) -> str:
        wanted = outcome(lambda: self.model.delete(step))
        assert outcome(lambda: self.writer.delete(step)) == wanted
        return wanted

    def restart(
        self, keep: int | None = None, period: int = 0, closes: bool = True, **more: Any
    ) -> None:
        """The writer closes, or its process is gone, and the next one starts."""
        self.settle()
        if closes:
            self.writer.close()
        self.model.restart(keep, period)
        more |= {"max_to_keep": keep, "keep_period": period or None}
        self.writer = self.open(step_prefix=self.prefix, **more)

    def take_over(self, **more: Any) -> None:
        """Another writer claims the directory: the one before changes nothing any more."""
        before, had_claimed = self.writer, self.model.writer.claimed
        self.restart(closes=False, **more)
        self.restore()
        if had_claimed:
            for call in (
                lambda: before.save(9, {"value": -1}, force=True, overwrite=True),
                lambda: before.rollback_to(0),
            ):
                with pytest.raises(ckpt.CheckpointError, match="took this directory over"):  # noqa: PT012
                    call()
                    before.wait_until_finished()
        before.close()

    def lose_the_host(self, **more: Any) -> None:
        """Its local directory is gone, and another process starts."""
        self.settle()
        self.writer.close()
        shutil.rmtree(f"{self.scratch}/local")
        self.model.host_is_lost()
        self.restart(**more)

    def fail(self, ahead: int, point: seams.Point) -> None:
        """The disk fails while the writer goes on beyond all that is there, and was."""
        writer = self.model.writer
        others = {*self.model.steps} - {*writer.own}  # a save retires those between its own
        if (
            writer.went_back
            or not writer.looked
            or (writer.at or 0) < max(self.model.steps, default=0)
            or max(others, default=-1) > min(writer.own, default=-1)
        ):
            return
        self.settle()
        step = max({*self.model.steps, *writer.own}, default=-1) + ahead
        with pytest.MonkeyPatch.context() as patch:
            seams.at(patch, point, before=seams.fail())
            if point == "delete":
                keep, self.model.keep = self.model.keep, None
                self.save(step)
                self.model.keep = keep
                return
            with pytest.raises(OSError, match="No space left"):  # noqa: PT012  # of one or the other
                self.writer.save(step, {"value": -1})
                self.writer.wait_until_finished()

    # ---- others ------------------------------------------------------------------------------

    def remove(self, step: int) -> None:
        """A tool that knows nothing of runs removes a step of the persistent directory."""
        self.settle()
        delete_at(self._path(step))
        self.model.tool_removes(step)

    def copy(self, source: int, target: int) -> None:
        """A tool copies a step of the persistent directory to a number that is free."""
        self.settle()
        if target not in self.model.steps:
            name = f"{target}" if self.prefix is None else f"{self.prefix}_{target}"
            tool("cp", self._path(source), f"{self.url}/{name}")
            self.model.tool_copies(source, target)

    def _path(self, step: int) -> str:
        with ckpt.Checkpointer(self.url, read_only=True) as persistent:
            return persistent.restore(step, {"value": 0}).path

    def read(self) -> None:
        """A reader that has been open for long looks."""
        self.settle()
        newest = self.model.newest
        wanted = None if newest is None else (newest, self.model.steps[newest])
        assert _found(self.reader.restore_latest({"value": 0})) == wanted
        assert self.reader.all_steps() == sorted(self.model.steps)
        if wanted is not None and wanted[0] in self.model.disk:
            newest = max(self.model.disk)  # whatever it continues
            assert self.reader.wait_for_new_step(timeout_secs=0) == newest
            self.reader.wait_for_new_step(newest, timeout_secs=0)  # it wants that one no more

    def check(self) -> None:
        """One number, one value: whoever asks, under whatever names of steps."""
        if not self.settled:
            return
        steps = self.model.steps
        if self.on_disk and os.path.isdir(self.url):
            names = [name for name in os.listdir(self.url) if name[-1].isdigit()]
            numbers = [int(name.rpartition("_")[2]) for name in names]
            assert sorted(numbers) == sorted(self.model.disk), names  # each under one name
        self.asks += 1
        asked = {*sorted(steps)[-1:], *[sorted(steps)[self.asks % len(steps)] for _ in steps][:1]}
        prefix = (None, "other", "run")[self.asks % 3]
        with self.open(read_only=True, step_prefix=prefix) as starting:
            newest = _found(starting.restore_latest({"value": 0}))
            hanging = self.model.newest
            assert newest == (None if hanging is None else (hanging, steps[hanging]))
            for one in (self.writer, starting):
                assert one.all_steps() == sorted(steps)
                assert one.latest_step() == max(steps, default=None)
                for step in asked:
                    assert one.load(step)["value"] == steps[step]
                    assert one.inspect(step).metadata == {"value": steps[step]}
            with pytest.raises(ckpt.CheckpointNotFound):
                starting.load(next(n for n in range(99) if n not in steps))
        if self.model.tiers:
            with ckpt.Checkpointer(self.url, read_only=True) as persistent:
                assert persistent.all_steps() == sorted(self.model.disk)
                for step in asked & self.model.disk.keys():
                    assert persistent.load(step)["value"] == self.model.disk[step]


def _found(restored: ckpt.Restored | None) -> tuple[int | None, int] | None:
    return None if restored is None else (restored.step, restored.state["value"])
