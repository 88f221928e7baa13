"""What a run must hold after any calls: dicts of numbers and values, and the rules of one history in plain words.

It knows nothing of how the library decides. A value stands for a save: every save has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Steps = dict[int, int]
"""Number of a step -> value that was saved in it."""


class Refused(Exception):
    """The save must raise CheckpointExists."""


class Absent(Exception):
    """The call must raise CheckpointNotFound."""


@dataclass
class Writer:
    """One Checkpointer that writes.

    Attributes:
        stood: the steps that it saved or restored, on the way of its training.
        beside: the steps that it saved beneath newer ones.
        at: the step that it stands on; None at the beginning.
        looked: it has restored, rolled back, or begun where nothing newer was.
        since: strangers beyond this number are of another history; None if it saved nothing from where it stands.
        begun: whether it has saved since it was placed.
        claimed: whether it has claimed the directory.
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

    def leave(self, last: int) -> None:
        self.stood = up_to(self.stood, last)
        self.beside = up_to(self.beside, last)
        self.at = max(self.stood, default=None)


def up_to(steps: Steps, last: int) -> Steps:
    return {step: value for step, value in steps.items() if step <= last}


@dataclass
class Model:
    """Steps of one run, and its writer.

    Attributes:
        disk, local: the steps of the persistent directory and of the local one.
        tiers: whether there is a local directory; even steps are then persistent, others if forced.
        local_keep: how many steps stay there.
        keep, period: ``max_to_keep`` and ``keep_period`` of the writer.
    """

    tiers: bool = False
    local_keep: int = 2
    keep: int | None = None
    period: int = 0
    disk: Steps = field(default_factory=dict[int, int])
    local: Steps = field(default_factory=dict[int, int])
    writer: Writer = field(default_factory=Writer)

    @property
    def steps(self) -> Steps:
        """What counts: of one number the newest save."""
        return {**self.disk, **self.local}

    def persists(self, step: int, force: bool) -> bool:
        return not self.tiers or force or step % 2 == 0

    # ---- calls of the writer -----------------------------------------------------------------

    def save(self, step: int, value: int, *, overwrite: bool, force: bool) -> bool:
        """What the call gives; the steps are then as they must be once it has ended."""
        writer = self.writer
        if (
            not overwrite
            and step in writer.own
            and not (writer.went_back and writer.is_ahead(step))
        ):
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
        if self.steps:
            return self.restore(max(self.steps))
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
        writer.leave(step)
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
        writer = self.writer
        if writer.at == step:
            writer.at = writer.below(step)
        if {*writer.stood} == {step}:  # it stands nowhere now
            writer.looked = False
        writer.stood.pop(step, None)
        writer.beside.pop(step, None)
        writer.since, writer.begun = None, False

    # ---- what others do ----------------------------------------------------------------------

    def restart(self, keep: int | None, period: int) -> None:
        self.keep, self.period = keep, period if keep is not None else 0
        self.writer = Writer()

    def tool_removes(self, step: int) -> None:
        del self.disk[step]

    def tool_copies(self, source: int, target: int) -> None:
        self.disk[target] = self.disk[source]
