"""Gets the parts that this process lacks or that are damaged here, from wherever they are whole.

Each process does so by itself, when it opens the step: all have agreed on the sources before, in
``parts.judge``, and the others only serve files meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    raised_by_a_handler,
)
from ckpt_core._events import logger
from ckpt_core._exchange import Key
from ckpt_core._run.tiers.fetch import Target, bring_from
from ckpt_core._run.tiers.parts import Source, WholeStep
from ckpt_core._run.tiers.peers import Peers
from ckpt_core._run.tiers.places import Offers, Place
from ckpt_core._verify import verify_part


class Mender:
    """Mends the steps of one process.

    Args:
        index: of this process.
        peers: the processes of the run.
        offers: the parts that this process sees.
        target: for a step, where its own part goes; makes the directory ready for it.
    """

    def __init__(
        self, index: int, peers: Peers, offers: Offers, target: Callable[[int], Target]
    ) -> None:
        self._index = index
        self._peers = peers
        self._offers = offers
        self._target = target
        self._missing: dict[int, tuple[str, list[Source]]] = {}
        self._damaged: dict[tuple[int, str], str] = {}
        self._lock = threading.Lock()

    def note(self, steps: Mapping[int, WholeStep]) -> None:
        """Takes over what all agreed on."""
        mine = self._index
        self._missing = {
            step: (whole.token, whole.sources[mine])
            for step, whole in steps.items()
            if mine in whole.sources
        }

    def is_whole(self, step: int, token: str | None, path: str, max_host_bytes: int) -> bool:
        """Whether every byte of this process's own part is as it was saved; else it is ignored and replaced."""
        report = verify_part(path, max_host_bytes)
        if not report.ok and token is not None:
            self._damaged[step, token] = str(report.problems[0])
        return report.ok

    def whole(self, places: Sequence[Place]) -> list[Place]:
        """The places, without this process's own part where it was found damaged."""
        return [
            place
            for place in places
            if not place.seen.own or (place.seen.step, place.seen.token) not in self._damaged
        ]

    def mend(self, step: int) -> None:
        """Gets this process's part of a whole step, if it lacks it; blocks meanwhile.

        Raises:
            CheckpointCorrupt: no source gave it; the message says what each answered.
        """
        if step not in self._missing:
            return
        with self._lock:
            if step not in self._missing:
                return
            token, sources = self._missing[step]
            failures: list[str] = []
            for source in sources:
                try:
                    path = self._get(Key(step, token, source.writer), source)
                except CheckpointNotFound:
                    raise
                except (CheckpointError, OSError) as error:
                    if (interrupt := raised_by_a_handler(error)) is not None:
                        raise interrupt from None
                    failures.append(f"from process {source.process}: {error}")
                    continue
                self._log(step, token, source, path, failures)
                del self._missing[step]
                return
        raise CheckpointCorrupt(
            f"the part of process {self._index} of step {step} is lost or damaged in its local directory, and could "
            f"not be fetched: {'; '.join(failures)}"
        )

    def _get(self, key: Key, source: Source) -> str:
        target = self._target(key.step)
        bring_from(source, key, self._peers, self._offers, target)
        for writer in (key.writer, self._index):  # its partner asks for the part of this process
            self._offers.put(key._replace(writer=writer), target.path)
        return target.path

    def _log(
        self, step: int, token: str, source: Source, path: str, failures: Sequence[str]
    ) -> None:
        damage = self._damaged.pop((step, token), None)
        lost = "was missing" if damage is None else f"was damaged ({damage})"
        where = "another folder of this host"
        if source.process != self._index:
            where = f"process {source.process}"
        logger.warning(
            "%s: this process's part of the step %s; it was fetched from %s and verified%s",
            path,
            lost,
            where,
            f", after failures {'; '.join(failures)}" if failures else "",
        )
