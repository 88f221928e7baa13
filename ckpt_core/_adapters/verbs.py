"""What an adapter may do beyond ``get_state`` and ``set_state``, each for itself.

``isinstance(adapter, verbs.Copies)`` says whether it does. Flags, which are plain attributes, are listed at
``Adapter``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

from ckpt_core._tree import Below, Path


@runtime_checkable
class ChecksState(Protocol):
    """Judges, before anything is changed, whether the state of a process fits its object."""

    def check_state(self, obj: Any, state: Any, /) -> None:
        """Raises StructureMismatch where it does not."""
        ...


@runtime_checkable
class HasPosition(Protocol):
    """Has a state that is cheap to take, for a restore that fails to go back to."""

    def get_position(self, obj: Any, /) -> Any:
        """What ``set_state`` takes to go back to where the object stands now."""
        ...


@runtime_checkable
class Notices(Protocol):
    """Wants to know with which objects training begins."""

    def notice(self, obj: Any, /) -> None:
        """A restore found nothing to restore into this object: training begins with it as it is."""
        ...


@runtime_checkable
class Filters(Protocol):
    """Has filters of its framework's for ``only=``."""

    def is_filter(self, only: Any, /) -> bool:
        """Whether this is one of them, rather than a pattern or function of ours."""
        ...


@runtime_checkable
class Selects(Protocol):
    """Selects leaves by a class, or by a filter of its framework's."""

    def select(self, obj: Any, only: Any, /) -> Callable[[Path, object], bool]:
        """The function of (path, leaf) that ``only=`` stands for."""
        ...


@runtime_checkable
class Aligns(Protocol):
    """Matches names itself, for frameworks that number them."""

    def align(
        self, obj: Any, saved: Mapping[str, Any], /, *, ordered: bool
    ) -> tuple[Mapping[str, str], Set[str]]:
        """Saved paths with the ones that ``get_state(obj)`` has for the same thing; and paths of either side
        that are neither restored nor missed.

        Args:
            saved: path -> leaf (``shape``, ``dtype``) of what was saved.
            ordered: whether in the order of the saved tree.
        """
        ...


@runtime_checkable
class Renames(Protocol):
    """Reads ``rename=`` its own way: names stand in several places of its paths, or are divided by other signs."""

    def renamed(self, rename: Mapping[str, str], saved: Sequence[str], /) -> Mapping[str, str]:
        """The saved paths that ``rename`` changes, with the new ones."""
        ...


@runtime_checkable
class Wants(Protocol):
    """Makes its state as it goes, so that what is saved decides what is wanted."""

    def wanted(self, obj: Any, saved: Any, /) -> Any:
        """The state to ask for in place of ``get_state`` when the object is the target of an item.

        Args:
            saved: the saved tree, each leaf described by ``kind``, ``shape`` and ``dtype``; such a leaf in
                what is returned asks for it as it was saved.
        """
        ...


@runtime_checkable
class SetsLeaves(Protocol):
    """Can be set in parts, so that the old state and the new one are never both in memory."""

    def set_leaves(self, obj: Any, leaves: Mapping[Path, Any], /) -> list[Any]:
        """Sets some leaves of ``get_state(obj)``, by path; gives the arrays that the object holds in their place.

        These are deleted if the restore fails. At the end ``set_state`` gets all of it as ever.
        """
        ...


@runtime_checkable
class Copies(Protocol):
    """Can copy its objects, so that ``load(path, like=obj)`` leaves the original as it is."""

    def copy(self, objects: Sequence[Any], /) -> Sequence[Any]:
        """A copy of each, None for one that cannot be copied; the copies share what the originals share."""
        ...


@runtime_checkable
class StoresBelow(Protocol):
    """Knows which of its values Orbax's own trees hold one key deeper."""

    def get_stored(self, obj: Any, below: type[Below], seen: dict[int, Any], /) -> Any:
        """As ``get_state(obj, seen)``, with ``below(key, value)`` in place of each such value.

        Paths stay those of ``get_state``; Orbax reads what is saved into its own targets, and its
        checkpoints are read into ours.
        """
        ...
