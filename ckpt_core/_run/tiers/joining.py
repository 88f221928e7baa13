"""Puts steps together that another number of processes saved, or processes with other shardings, from the parts of those.

Parts are brought into a hidden folder, each verified as a whole. One is opened, and before arrays are
read, others are added to it until it has all chunks that this process wants: their databases become
children of its own, and no data is copied. The folder is deleted when it is not needed any more.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpt_core._directory import PosixBackend
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, Checksums, dump_checksums
from ckpt_core._format.record import FileRecord, Record
from ckpt_core._operation import logger
from ckpt_core._options import MIB
from ckpt_core._run.tiers.fetch import Target, TooLate, fetch_first
from ckpt_core._run.tiers.judge import Source, StepHere
from ckpt_core._run.tiers.peers import Peers
from ckpt_core._saved import NativeCheckpoint, SavedItem, open_checkpoint
from ckpt_core._storage import (
    INDEX_FILE,
    Location,
    NewDatabase,
    StoreContext,
    add,
    new_context,
    read_index,
)

_NODE_FILE_BYTES = 64 * MIB
_TRIES = 3
"""Number of the nearest places from which one tries to bring a part before all others."""
_BESIDE = 8
"""Of so many processes with the nearest indices it is asked whether they are on this machine."""
_SHARE_OF_TIME = 0.5
"""Of the time for which the others wait, the share in which all parts must be here."""


class Joining:
    """The steps of other numbers of processes or other shardings, read in a hidden folder of ``directory``; for several threads."""

    def __init__(
        self,
        peers: Peers,
        directory: str,
        backend: PosixBackend,
        timeout_secs: float,  # for how long the other processes wait in a load
    ) -> None:
        self.steps: dict[int, StepHere] = {}  # those that can be put together, as all agreed
        self._peers = peers
        self._directory = directory
        self._backend = backend
        self._timeout_secs = timeout_secs
        self._joined: list[_Joined] = []
        self._lock = threading.RLock()

    def note(self, steps: Mapping[int, StepHere]) -> None:
        """Takes over what all agreed on; deletes what was put together before."""
        self.steps = {step: whole for step, whole in steps.items() if whole.pieces}
        self.discard()

    def forget(self, step: int) -> None:
        """A step is not put together any more: each process has its part of it."""
        self.note({other: whole for other, whole in self.steps.items() if other != step})

    def open(self, step: int) -> NativeCheckpoint:
        """One part of a step, which gathers what a load needs of the others. Another step that another thread still reads
        meanwhile is deleted later.
        """
        with self._lock:
            joined = self._find(step)
            try:
                return joined.opened(time.monotonic() + _SHARE_OF_TIME * self._timeout_secs)
            except BaseException:
                self._discard([joined])
                raise

    def _find(self, step: int) -> _Joined:
        whole = self.steps[step]
        found = [one for one in self._joined if one.key == (step, whole.token)]
        others = [one for one in self._joined if one not in found]
        self._discard([one for one in others if one.key is None or not one.is_in_use])
        if not found:
            folder = self._backend.begin(
                f"{self._directory}/joined", overwrite=False, durable=False, token=whole.token
            )
            ours, all_ = self._peers.index, self._peers.processes.count
            # the processes share the parts out in the order in which their own parts are
            middle, count = (ours + 0.5) / all_, whole.pieces
            near = sorted(range(count), key=lambda n: (abs((n + 0.5) / count - middle), n))
            found = [
                _Joined(
                    (step, whole.token),
                    near,
                    whole.piece,
                    folder.path,
                    folder.abort,
                    self._bring,
                    self._lock,
                )
            ]
            self._joined += found
        return found[0]

    def discard(self) -> None:
        """Deletes what was put together."""
        with self._lock:
            self._discard(self._joined)

    def _discard(self, some: Sequence[_Joined]) -> None:
        gone, self._joined = list(some), [one for one in self._joined if one not in some]
        for joined in gone:
            joined.end()

    def _bring(
        self, key: tuple[int, str], sources: Sequence[Source], path: str, deadline: float
    ) -> Record:
        """Brings one part from the first of its sources that gives it, near ones first; raises TooLate after the deadline,
        else what ``fetch_first`` does.
        """

        def may_go_on() -> None:
            if time.monotonic() > deadline:
                raise TooLate(
                    f"step {key[0]}: not all parts were here within {_SHARE_OF_TIME:g} of Options.timeout_secs "
                    f"({self._timeout_secs:g} s), so it could not be put together: give it more. Nothing is damaged"
                )

        peers = self._peers
        count = peers.processes.count

        def ahead(source: Source) -> int:
            return (source.process - peers.index) % count

        beside = sorted(sources, key=lambda one: min(ahead(one), count - ahead(one)))[:_BESIDE]
        near = {one for one in beside if peers.is_on_this_machine(one.process)}

        def distance(source: Source) -> tuple[bool, int]:
            return source not in near, ahead(source)

        target = Target(path, self._backend, False, may_go_on)
        lacking = (
            f"a part of step {key[0]}, which is put together of all, could not be brought here"
        )
        nearest = sorted(sources, key=distance)[:_TRIES]
        return fetch_first(key, nearest, peers, target, lacking, may_go_on, lambda: sources).record


class _Joined:
    """One step in a hidden folder; ``near`` has the numbers of its parts, the one first that most likely holds what is wanted."""

    def __init__(
        self,
        key: tuple[int, str],
        near: Sequence[int],
        sources: Callable[[int], Sequence[Source]],
        folder: str,
        delete: Callable[[], None],
        bring: Callable[[tuple[int, str], Sequence[Source], str, float], Record],
        lock: threading.RLock,
    ) -> None:
        self.key: tuple[int, str] | None = key  # None while it is of no use
        self._save = key
        self._delete = delete
        self._near = near
        self._sources = sources
        self._folder = folder
        self._bring = bring
        self._lock = lock
        self._readers: list[weakref.ref[NativeCheckpoint]] = []
        self._here: list[Record] = []
        self._held: dict[str, set[str]] = {}
        self._opened: NativeCheckpoint | None = None
        self._deadline = 0.0

    def opened(self, deadline: float) -> NativeCheckpoint:
        """The part that is nearest; the parts must be here before the deadline."""
        self._deadline = deadline
        if self._opened is None:
            self._bring_next()
            opened = open_checkpoint(self._path(0))
            assert isinstance(opened, NativeCheckpoint)
            self._opened = opened
        reader = replace(self._opened, gather=self.gather)
        self._readers = [one for one in self._readers if one() is not None] + [weakref.ref(reader)]
        return reader

    @property
    def is_in_use(self) -> bool:
        """Whether anybody still has what ``opened`` gave."""
        return any(one() is not None for one in self._readers)

    def end(self) -> None:
        """Deletes the folder."""
        self._opened = None  # which refers to this object
        self._delete()

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number}"

    def _bring_next(self) -> None:
        number = len(self._here)
        self._here.append(
            self._bring(
                self._save, self._sources(self._near[number]), self._path(number), self._deadline
            )
        )

    def gather(self, needed: Mapping[str, set[str]]) -> None:
        """Adds parts until those that are here have the chunks of these keys, or all are here. A chunk that no part has is
        missing to the reader, as in any checkpoint.
        """
        with self._lock:
            assert self._opened is not None
            self.key = None  # of no use if this fails
            self._gather(self._opened, {name: keys for name, keys in needed.items() if keys})
            self.key = self._save

    def _gather(self, opened: NativeCheckpoint, needed: Mapping[str, set[str]]) -> None:
        context = new_context(durable=False)
        items = [opened.items[name] for name in needed]

        def look(number: int) -> None:
            for item in items:
                place = Location(f"{self._path(number)}/{item.directory}", True)
                self._held.setdefault(item.name, set()).update(read_index(place, context))

        def lacks() -> bool:
            return any(keys - self._held.get(name, set()) for name, keys in needed.items())

        look(0)
        before = len(self._here)
        while lacks() and len(self._here) < len(self._near):
            self._bring_next()
            look(len(self._here) - 1)
        added = range(before, len(self._here))
        if not added:
            return
        for item in opened.items.values():
            if item.form == "tree":
                self._add(opened, item, added, context)
        logger.info(
            "step %d is put together from %d of the %d different parts that other processes saved",
            self._save[0],
            len(self._here),
            len(self._near),
        )

    def _add(
        self, opened: NativeCheckpoint, item: SavedItem, added: Sequence[int], context: StoreContext
    ) -> None:
        """Makes the databases of an item's other parts children of the first one's."""
        inside = f"{opened.path}/{item.directory}"
        database = NewDatabase(Location(inside, True), "", _NODE_FILE_BYTES)
        files, children = opened.record.files, [f"ocdbt.process_{number}" for number in added]
        checksums = f"{item.directory}/{CHECKSUM_DIRECTORY}/process_0"
        crcs = _checksums(opened, checksums)
        for number, child in zip(added, children, strict=True):
            os.symlink(f"{self._path(number)}/{item.directory}", f"{inside}/{child}")
            other = open_checkpoint(self._path(number))
            assert isinstance(other, NativeCheckpoint)
            crcs |= _checksums(other, checksums)
            for name, entry in other.record.files.items():
                if name.startswith(item.file("")):
                    rest = name.removeprefix(item.file(""))
                    files[f"{item.directory}/{child}/{rest}"] = entry
        add(
            database,
            (replace(database, location=database.location / child) for child in children),
            context,
        )
        folder, _, name = f"{opened.path}/{checksums}".rpartition("/")
        data = dump_checksums(crcs)
        opened.backend.put(folder, name, data)
        files[checksums] = FileRecord.of(data)
        manifest = opened.backend.read(inside, INDEX_FILE)
        files[item.file(INDEX_FILE)] = FileRecord.of(manifest or b"")
        nodes = (
            os.listdir(f"{inside}/d") if os.path.isdir(f"{inside}/d") else []
        )  # of the joined index
        for name in nodes:
            size = os.stat(f"{inside}/d/{name}").st_size
            files.setdefault(f"{item.directory}/d/{name}", FileRecord(size, 0, True))


def _checksums(checkpoint: NativeCheckpoint, name: str) -> dict[str, list[int]]:
    found = Checksums(checkpoint.read_file(name), name)
    return {key: crcs for key in found.keys if (crcs := found.get(key)) is not None}
