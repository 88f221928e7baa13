"""Optional methods of adapters beyond ``get_state`` and ``set_state``: one Protocol each.

``isinstance(adapter, verbs.Copies)`` tells whether an adapter has the method. Optional attributes
are listed at ``Adapter``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

from ckpt_core._tree import Below, Path


@runtime_checkable
class ChecksState(Protocol):
    """Checks, before anything is changed, whether a saved per-process state fits its object."""

    def check_state(self, obj: Any, state: Any, /) -> None:
        """Raises StructureMismatch if it does not fit."""
        ...


@runtime_checkable
class HasPosition(Protocol):
    """Can say cheaply where it stands, by which two saves are compared."""

    def get_position(self, obj: Any, /) -> Any:
        """The current position."""
        ...


@runtime_checkable
class HasConstants(Protocol):
    """Knows the numbers in its objects that are no state."""

    def get_constants(self, obj: Any, /) -> Mapping[str, Any]:
        """The numbers by path. They are saved, and a restore warns of those that differ, since it cannot set them."""
        ...


@runtime_checkable
class Meets(Protocol):
    """Reads or sets an object by what is passed beside it."""

    def meet(self, obj: Any, others: Mapping[str, Any], /) -> None:
        """Called before anything is saved or restored, with all objects of the call by their paths, also ``obj``."""
        ...


@runtime_checkable
class Notices(Protocol):
    """Gets the objects with which training begins."""

    def notice(self, obj: Any, /) -> None:
        """Called if a restore found no step: training begins with this object as it is."""
        ...


@runtime_checkable
class Filters(Protocol):
    """Supports filters of its framework for ``only=``."""

    def is_filter(self, only: Any, /) -> bool:
        """Whether ``only`` is such a filter, and not a path pattern or function."""
        ...


@runtime_checkable
class Selects(Protocol):
    """Selects leaves by a class or a filter of its framework."""

    def select(self, obj: Any, only: Any, /) -> Callable[[Path, object], bool]:
        """The predicate of (path, leaf) for ``only=``."""
        ...


@runtime_checkable
class Aligns(Protocol):
    """Matches saved paths to wanted ones itself, for frameworks that number their names."""

    def align(
        self, obj: Any, saved: Mapping[str, Any], /, *, ordered: bool
    ) -> tuple[Mapping[str, str], Set[str]]:
        """The mapping saved path -> path in ``get_state(obj)``, and paths to ignore: those, of either side, are neither
        restored nor reported. Each leaf in ``saved`` has ``shape`` and ``dtype``; ``ordered`` if they are in the order of the
        saved tree.
        """
        ...


@runtime_checkable
class Renames(Protocol):
    """Interprets ``rename=`` itself, if names occur inside its paths or have other separators."""

    def renamed(self, rename: Mapping[str, str], saved: Sequence[str], /) -> Mapping[str, str]:
        """Saved path -> new path, for the saved paths that ``rename`` changes."""
        ...


@runtime_checkable
class Wants(Protocol):
    """Creates its state lazily, so that the saved tree determines what to restore."""

    def wanted(self, obj: Any, saved: Any, /) -> Any:
        """The state to restore, instead of ``get_state``, if the object is the target of an item. Each leaf of the saved tree
        is a description with ``kind``, ``shape`` and ``dtype``; return it as a leaf to request that leaf as it was saved. A
        dict for which ``get_constants`` was recorded has that as ``constants``.
        """
        ...


@runtime_checkable
class SetsLeaves(Protocol):
    """Can be set in parts, so that old and new state are never in memory together."""

    def set_leaves(self, obj: Any, leaves: Mapping[Path, Any], /) -> list[Any]:
        """Sets some leaves of ``get_state(obj)``, by path; returns the arrays that it now holds. If the restore fails later,
        these arrays are deleted. At the end, ``set_state`` is called with the whole state.
        """
        ...


@runtime_checkable
class Copies(Protocol):
    """Can copy its objects, so that ``load(path, like=obj)`` does not change the original."""

    def copy(self, objects: Sequence[Any], /) -> Sequence[Any]:
        """A copy of each object, or None for one that cannot be copied; parts that the originals share are shared by the
        copies, too.
        """
        ...


@runtime_checkable
class StoresBelow(Protocol):
    """Knows which of its values Orbax's own trees have one key deeper."""

    def get_stored(self, obj: Any, below: type[Below], seen: dict[int, Any], /) -> Any:
        """Like ``get_state(obj, seen)``, with each value that Orbax has one key deeper wrapped as ``below(key, value)``. Paths
        stay those of ``get_state``. Stored array names get the key, so that Orbax can restore our checkpoints into its targets,
        and we can restore its checkpoints.
        """
        ...
