"""The interface of a measured library; ``options`` are those of ``SaveLoad``, in which None leaves a setting to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax

from ckpt_core.bench._core import Skipped
from ckpt_core.bench._data import names_of

GIB = 2**30
_UNTUNED = {
    "use_ocdbt": None,
    "use_zarr3": None,
    "use_compression": None,
    "chunk_byte_size": None,
    "save_concurrent_gb": None,
    "restore_concurrent_gb": None,
    "use_load_and_broadcast": False,
    "enable_replica_parallel_separate_folder": False,
}
"""Option for the storage -> the value that leaves it to the library."""


class Library:
    """One way to save and load. Only ``save``, ``start_save``, its result and ``load`` are timed.

    Attributes:
        modules: the modules that must be importable.
        default_durability: what is durable when a save with default settings returns:
            ``yes``, ``data files`` (not the metadata or the directories), or ``no``.
        skips_fsync: whether it has a setting to leave the fsync out.
        in_background: whether it can save in the background.
        sharded: whether it can save arrays that several devices or processes hold.
        tuned: the options for its storage that it supports.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    default_durability: ClassVar[str] = "no"
    skips_fsync: ClassVar[bool] = False
    in_background: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    tuned: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, options: Any) -> None:
        self.options = options

    @classmethod
    def refuses(cls, options: Any) -> str | None:
        """Why it does not support the options, as the rest of a sentence; None if it does."""
        if options.async_enabled and not cls.in_background:
            return "saves in the foreground only"
        for name, untuned in _UNTUNED.items():
            if getattr(options, name) is not untuned and name not in cls.tuned:
                return f"has no setting {name}"
        if options.durable is False and cls.default_durability != "no" and not cls.skips_fsync:
            return "offers no save without fsync"
        return None

    @property
    def background(self) -> bool:
        """Whether it saves in the background with these settings."""
        return self.in_background and self.options.async_enabled is not False

    @property
    def durability(self) -> str:
        """What is durable when a save returns, as text for the tables."""
        if self.options.durable is None:
            return self.default_durability
        if not self.options.durable:
            return "no"
        return "yes (fsync added)" if self.adds_fsync else "yes"

    @property
    def adds_fsync(self) -> bool:
        """Whether the benchmark must fsync the files, because the library does not."""
        return self.options.durable is True and self.default_durability != "yes"

    def prepare(self, state: Any) -> Any:
        """The tree in the form that users of this library save; not timed."""
        return state

    def save(self, path: Path, state: Any) -> None:
        """Saves to a path that does not exist in an existing directory."""
        raise NotImplementedError

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        """Starts a save in the background and returns a function that waits for its end."""
        raise NotImplementedError

    def load(self, path: Path, like: Any) -> Any:
        """Loads the tree; ``like`` is the abstract tree with its shardings."""
        raise NotImplementedError

    def finish(self, loaded: Any, like: Any) -> Any:
        """The loaded values as a tree like the one that was saved; not timed."""
        del like
        return loaded


class FlatLibrary(Library):
    """One that saves a mapping of names to arrays of its own kind."""

    def of_leaf(self, leaf: Any) -> Any:
        """A leaf as this library saves it; not timed."""
        raise NotImplementedError

    def to_leaf(self, found: Any, like: Any) -> Any:
        """A loaded array as one that can be compared; not timed."""
        del like
        return found

    def prepare(self, state: Any) -> Any:
        check_arrays(state)
        leaves = map(self.of_leaf, jax.tree.leaves(state))
        return dict(zip(names_of(state), leaves, strict=True))

    def finish(self, loaded: Any, like: Any) -> Any:
        pairs = zip(names_of(like), jax.tree.leaves(like), strict=True)
        leaves = [self.to_leaf(loaded[name], leaf) for name, leaf in pairs]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def check_arrays(tree: Any) -> None:
    """Raises ``Skipped`` if a leaf is not an array."""
    for leaf in jax.tree.leaves(tree):
        if not hasattr(leaf, "dtype"):
            raise Skipped(f"saves arrays only, not a {type(leaf).__name__}")
