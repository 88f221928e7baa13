"""Copies of the parts of other processes, whose partner this process is; made in the background.

No step waits for a copy. The thread that saved a step asks for copies of it, unless copies of an
earlier step are still being made; see ``judge.judge_copies``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._exchange import Key
from ckpt_core._operation import logger
from ckpt_core._run.tiers.fetch import Target, bring
from ckpt_core._run.tiers.judge import CopyState
from ckpt_core._run.tiers.peers import Peers

_LOOK_SECS = 0.2
_STALLED_SECS = 10.0
"""``finish`` gives up if no byte moves, here or to a partner, for this time."""


class _Cancelled(CheckpointError):
    """The copy is not wanted any more."""


class Copier:
    """Fetches the parts of the processes that have this one as partner, one step at a time; others can fetch them here."""

    def __init__(
        self,
        peers: Peers,
        # of process, step, and what raises if it is not wanted any more
        target: Callable[[int, int, Callable[[], None]], Target],
    ) -> None:
        self.sources: Sequence[int] = peers.sources
        self.active = peers.copies
        self._peers = peers
        self._target = target
        self._state: CopyState = "idle" if self.active else "off"
        self._now: tuple[int, str] = (-1, "")
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        # since when its thread waits for another process; None while it waits for its own disk
        self._waits_since: float | None = None

    @property
    def report(self) -> list[Any]:
        """What ``judge_copies`` gets of this process."""
        state = self._state
        return [state, *self._now] if state in ("busy", "done") else [state, -1, ""]

    @property
    def busy(self) -> bool:
        """Whether copies are being made."""
        return self._state == "busy"

    def copy(self, step: int, token: str) -> None:
        """Begins to copy a step that all processes have committed; ends copying another one."""
        self._cancelled.set()
        self._now, self._state, self._waits_since = (step, token), "busy", time.monotonic()
        self._cancelled = cancelled = threading.Event()
        try:
            work, given = self._work, (step, token, cancelled)
            self._thread = threading.Thread(None, work, "ckpt-partner", given, daemon=True)
            self._thread.start()
        except RuntimeError:  # the interpreter is about to end
            self._thread, self._state = None, "idle"

    def _work(self, step: int, token: str, cancelled: threading.Event) -> None:
        done = True
        for source in self.sources:
            try:
                self._copy(Key(step, token, source), cancelled)
            except _Cancelled:
                done = False
            except Exception as error:
                done = False
                logger.warning(
                    "step %d: no copy of the part of process %d was made here: %s",
                    step,
                    source,
                    error,
                )
        if not cancelled.is_set():  # else another step may be copied already
            self._state = "done" if done else "idle"

    def _copy(self, key: Key, cancelled: threading.Event) -> None:
        def may_go_on() -> None:
            if cancelled.is_set():
                raise _Cancelled(f"the copy of step {key.step} is not wanted any more")

        connection = self._peers.connect(key.writer)

        def pieces(position: int) -> Iterator[bytes]:
            self._waits_since = time.monotonic()
            for piece in connection.pieces(key, position):
                may_go_on()
                self._waits_since = None
                yield piece
                self._waits_since = time.monotonic()
            self._waits_since = None

        try:
            target = self._target(key.writer, key.step, may_go_on)
            if self._peers.offers.path(key) != target.path:  # else copied before the last restart
                bring(key, pieces, target)
                self._peers.offers.put(key, target.path)
        finally:
            self._waits_since = time.monotonic()
            with contextlib.suppress(ConnectionError):
                connection.close()  # it may have stopped midway through a file
                connection.say_done(key)
            connection.close()

    def cancel(self) -> None:
        """Stops copying; returns when nothing more is committed, or after 20 s."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(2 * _STALLED_SECS)
        if self._state != "off":
            self._state = "idle"

    def finish(self, timeout_secs: float) -> None:
        """Blocks until the copies of the last step are made, here and of this process's part; gives up when nothing moves any
        more, or at the timeout. A part that is being written or verified here counts as moving, and so does one that a
        partner is connected for: it may write it meanwhile.
        """
        server, deadline = self._peers.server, time.monotonic() + timeout_secs
        while self._state in ("busy", "done") and (now := time.monotonic()) < deadline:
            # to write and verify a large part takes a while
            moved = now if self._waits_since is None else self._waits_since
            moved = max(moved, server.last_used if server is not None else 0.0)
            fetched = server is None or server.was_done(Key(*self._now, self._peers.index))
            if (fetched and not self.busy) or now - moved > _STALLED_SECS:
                return
            time.sleep(_LOOK_SECS)

    def close(self, steps: Mapping[int, str], timeout_secs: float) -> None:
        """Finishes; also copies the newest of ``steps`` (with their tokens), if copies of an earlier one were still being
        made then. The timeout is for all of it.
        """
        if not self.active:
            return
        try:
            deadline = time.monotonic() + timeout_secs
            self.finish(timeout_secs)
            newest = max(steps.items(), default=self._now)
            if self._state in ("busy", "done") and newest != self._now:
                self.copy(*newest)
                self.finish(deadline - time.monotonic())
        except BaseException:  # an interrupt: its thread must not go on
            self._cancelled.set()
            raise
        self.cancel()
