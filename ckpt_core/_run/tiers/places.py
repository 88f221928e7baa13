"""The parts of local steps below a local directory: those of this process, and of others.

A process finds its own parts in ``process_<i>-of-<n>``. Beside it may be folders of other indices:
processes of this host, or hosts that have changed places; and of other numbers of processes, if the
run had as many before. In each may be folders ``partner-of_<j>-of-<n>`` with copies of the parts of
process j.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ckpt_core._directory import Backend, refuse_file, resolve
from ckpt_core._directory.step_names import StepNames
from ckpt_core._errors import CheckpointError, CheckpointNotFound, raised_by_a_handler
from ckpt_core._events import logger
from ckpt_core._exchange import Key, Offered
from ckpt_core._format.part import Part, contains
from ckpt_core._format.record import RECORD_FILE, load_record
from ckpt_core._load.checkpoint import NativeCheckpoint
from ckpt_core._load.opening import open_checkpoint
from ckpt_core._run.lineage import Lineage, Order
from ckpt_core._run.steps import Steps
from ckpt_core._run.tiers.parts import Seen

LINEAGE_FILE = ".ckpt-lineage"
"""File in a local directory with the lineage of the steps that versions up to 0.1 wrote there."""
_NO_ORDER: Order = (-1, -1, 0.0)
FOLDER = re.compile(r"process_(\d+)-of-(\d+)")
COPIES = re.compile(r"partner-of_(\d+)-of-(\d+)")
_MOST_FOLDERS = 64
"""Maximum number of folders of other processes in which a process looks."""


def local_root(directory: str | os.PathLike[str]) -> str:
    """The absolute path of a ``local_directory``.

    Raises:
        ValueError: it is a URL and not a path on this host.
        NotADirectoryError: it is a file.
    """
    root, local = resolve(directory)
    if not local:
        raise ValueError(f"local_directory must be on a file system of this host, got {root}")
    refuse_file(root)
    return root


def copies_folder(index: int, count: int) -> str:
    """The folder, in that of its partner, of copies of the parts of process ``index``."""
    return f"partner-of_{index}-of-{count}"


@dataclass(frozen=True)
class Place:
    """A part of a step, and where it is.

    Attributes:
        seen: what the others are told of it.
        path: its directory.
        opened: the part, with its ckpt.json read.
    """

    seen: Seen
    path: str
    opened: NativeCheckpoint

    @property
    def key(self) -> Key:
        """Identifies its content."""
        return Key(self.seen.step, self.seen.token, self.seen.writer)


def look_around(
    directory: str,
    index: int,
    count: int,
    names: StepNames,
    backend: Backend,
    run: Lineage,
) -> list[Place]:
    """The readable parts that count in a process's directory, first its own, and beside it.

    Args:
        directory: folder of process ``index``.
        index, count: of this process.
        names: names of step directories.
        backend: reads.
        run: parts of histories that it has left do not count.
    """
    root, _, mine = directory.rpartition("/")
    others = (name for name in backend.children(root) if FOLDER.fullmatch(name) and name != mine)
    folders = [mine, *sorted(others, key=lambda name: (count_of(name) != count, name))]
    found: list[Place] = []
    for folder in folders[: 1 + _MOST_FOLDERS]:
        path = f"{root}/{folder}"
        try:
            marked = (backend.read(path, LINEAGE_FILE) or b"").decode(errors="replace")
            for name in ("", *filter(COPIES.fullmatch, backend.children(path))):
                steps = Steps(f"{path}/{name}".rstrip("/"), backend, names)
                default = Part.own(*_numbers(name or folder))
                own = folder == mine and not name
                for place in _parts_in(steps, default, index, count, own):
                    step, token = place.seen.step, place.seen.token
                    created = place.opened.record.created_unix_secs
                    order = run.order(step, token, marked, created)
                    if order is not None:
                        found.append(replace(place, seen=place.seen._replace(order=order)))
        except OSError as error:
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("%s cannot be read: %s", path, error)
    return found


def _numbers(folder: str) -> tuple[int, int]:
    """Index and number of processes in the name of a folder."""
    _, writer, count = re.split(r"_|-of-(?=\d+$)", folder)
    return int(writer), int(count)


def count_of(folder: str) -> int:
    """Number of processes in the name of a folder."""
    return _numbers(folder)[1]


def _parts_in(steps: Steps, default: Part, index: int, count: int, mine: bool) -> Iterable[Place]:
    """The parts in one folder; logs the unreadable ones.

    Args:
        steps: the folder.
        default: what a record without a note of its part is taken for: versions before 0.2 wrote none.
        index, count: of this process.
        mine: whether the folder is that of this process's own parts.
    """
    listing = steps.look()
    for step, name in [(n, name) for n in listing.names for name in listing.directories(n)]:
        try:
            opened = open_checkpoint(f"{steps.directory}/{name}")
        except CheckpointNotFound:
            continue  # deleted meanwhile
        except (CheckpointError, OSError) as error:
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("%s: step %d cannot be read: %s", steps.directory, step, error)
            continue
        if not isinstance(opened, NativeCheckpoint):
            continue
        record = opened.record
        part = record.part or default
        if part.writer < part.count == default.count:
            own = mine and contains(part.serves, index)
            other = 0 if part.count == count else part.count
            seen = Seen(
                step, record.token, _NO_ORDER, part.writer, part.serves, own, other, part.alike
            )
            yield Place(seen, opened.path, opened)


def offered_of(places: Iterable[Place], index: int) -> dict[Key, str]:
    """The paths of parts by their keys; of equal parts the first.

    A process's own part, if another one wrote it, is also offered in the place of that which it lost.
    """
    found: dict[Key, str] = {}
    for place in places:
        found.setdefault(place.key, place.path)
        if place.seen.own:
            found.setdefault(place.key._replace(writer=index), place.path)
    return found


class Offers:
    """The parts that other processes may fetch from this one; may be used by any thread."""

    def __init__(self, read: Callable[[str, str], bytes | None]) -> None:
        self._read = read
        self._paths: dict[Key, str] = {}
        self._lock = threading.Lock()

    def put(self, key: Key, path: str) -> None:
        """Offers the part at a path."""
        with self._lock:
            self._paths[key] = path

    def replace(self, paths: dict[Key, str]) -> None:
        """Offers these parts and no other."""
        with self._lock:
            self._paths = dict(paths)

    def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Offers no longer those that are not wanted."""
        with self._lock:
            self._paths = {key: path for key, path in self._paths.items() if wanted(key)}

    def path(self, key: Key) -> str | None:
        """Where a part is."""
        with self._lock:
            return self._paths.get(key)

    def find(self, key: Key) -> Offered | None:
        """The files of a part, from its record; a ``Shelf``."""
        path = self.path(key)
        if path is None:
            return None
        try:
            data = self._read(path, RECORD_FILE)
            record = None if data is None else load_record(data)
        except (CheckpointError, OSError):
            return None
        if record is None or record.token != key.token:
            return None  # it was replaced in the meantime
        return Offered(path, (RECORD_FILE, *sorted(record.files)))
