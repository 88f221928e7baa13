"""What every library can do, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

_FLAGS = {
    "broadcast": "cannot load on one replica and broadcast",
    "replica_separate_folder": "cannot write each replica to a folder of its own",
}


@dataclass(frozen=True)
class Storage:
    """How a library is to store; None leaves it to the library.

    Attributes:
        durable: whether an acknowledged save survives a power cut.
        background: whether the save goes on in the background.
    """

    durable: bool | None = None
    background: bool | None = None
    ocdbt: bool | None = None
    zarr3: bool | None = None
    compression: bool | None = None
    replica_parallel: bool | None = None
    replica_separate_folder: bool = False
    broadcast: bool = False
    chunk_bytes: int | None = None
    save_bytes: int | None = None
    load_bytes: int | None = None


class Library:
    """One way to save and load. Only ``save``, ``start_save``, its result and ``load`` are timed.

    Attributes:
        modules: that must be importable.
        loads_to: what ``load`` gives: ``jax``, ``numpy`` or ``torch`` arrays.
        default_durability: what a save with its defaults has made durable when it returns:
            ``yes``, ``data files`` (not the metadata or the directories), or ``no``.
        skips_fsync: whether it can be told to leave the fsync out.
        in_background: whether it can save in the background.
        sharded: whether it takes arrays that several devices or processes hold.
        tuned: names of settings (fields of Storage) that it has.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    loads_to: ClassVar[str] = "jax"
    default_durability: ClassVar[str] = "no"
    skips_fsync: ClassVar[bool] = False
    in_background: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    tuned: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @classmethod
    def refuses(cls, storage: Storage) -> str | None:
        """Why it cannot do this, as the rest of a sentence; None where it can."""
        if storage.background and not cls.in_background:
            return "saves in the foreground only"
        for name in ("ocdbt", "zarr3", "compression", "chunk_bytes", "save_bytes", "load_bytes"):
            if getattr(storage, name) is not None and name not in cls.tuned:
                return f"has no setting for {name}"
        for name, cannot in _FLAGS.items():
            if getattr(storage, name) and name not in cls.tuned:
                return cannot
        if storage.durable is False and cls.default_durability != "no" and not cls.skips_fsync:
            return "offers no save without fsync"
        return None

    @property
    def background(self) -> bool:
        """Whether this one saves in the background."""
        return self.in_background and self.storage.background is not False

    @property
    def durability(self) -> str:
        """What a save has made durable when it returns, for the tables."""
        if self.storage.durable is None:
            return self.default_durability
        if not self.storage.durable:
            return "no"
        return "yes (fsync added)" if self.adds_fsync else "yes"

    @property
    def adds_fsync(self) -> bool:
        """Whether the benchmark has to make the files durable, since the library does not."""
        return self.storage.durable is True and self.default_durability != "yes"

    def prepare(self, state: Any) -> Any:
        """The tree as the users of this library have it; not timed."""
        return state

    def save(self, path: Path, state: Any) -> None:
        """Saves to a path that does not exist; its parent does."""
        raise NotImplementedError

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        """Starts a save in the background and gives what waits for its end."""
        raise NotImplementedError

    def load(self, path: Path, like: Any) -> Any:
        """Loads; ``like`` is the abstract tree with its shardings."""
        raise NotImplementedError

    def finish(self, loaded: Any, like: Any) -> Any:
        """What was loaded as a tree of arrays in the order of the input; not timed."""
        del like
        return loaded
