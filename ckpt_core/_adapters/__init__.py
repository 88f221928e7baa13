"""Adapters convert live objects, of frameworks or of the user, to pytrees and back.

Adapters are found through the entry-point group ``ckpt_core.adapters``; an entry is named after the
root package of the objects that it accepts. Only the type of an object selects its adapter, so the
core imports no framework: if the object exists, its framework is already imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ckpt_core._errors import CheckpointError, StructureMismatch, UnsupportedLeaf
from ckpt_core._lazy import jax
from ckpt_core._tree import Below, Path, WithConstants, flatten, format_path
from ckpt_core.arguments import an, with_article

GROUP = "ckpt_core.adapters"


class Adapter(Protocol):
    """Converts the objects of a framework to pytrees and back.

    Optional methods:

    * ``copy(objects)``: a copy of each object, or None for one that cannot be copied, for ``load(path, like=obj)``.
      What the originals share the copies share.
    * ``align(obj, saved, *, ordered)``, of frameworks that number their names: the mapping saved path -> path in
      ``get_state(obj)``, and the set of paths, of either side, that are neither restored nor reported. Each leaf in
      ``saved`` has ``shape`` and ``dtype``; ``ordered`` if they are in the order of the saved tree.
    * ``renamed(rename, saved)``, where names occur inside paths or have other separators: saved path -> new path, of
      what ``rename=`` changes.
    * ``is_filter(only)``: whether ``only=`` is a filter of the framework; ``select(obj, only)``: the predicate of
      (path, leaf) for it, or for a class.
    * ``wanted(obj, saved)``, of objects that create their state lazily: the state to restore, instead of ``get_state``.
      Each leaf of the saved tree is a description with ``kind``, ``shape`` and ``dtype``; return it as a leaf to
      request that leaf as it was saved. A dict for which ``get_constants`` was recorded has that as ``constants``.
    * ``set_leaves(obj, leaves)``: sets some leaves of ``get_state(obj)``, by path, while others are read; returns the
      arrays that it now holds, which are deleted if the restore fails. At the end ``set_state`` gets the whole state.
    * ``get_stored(obj, below, seen)``: like ``get_state(obj, seen)``, with each value that Orbax's own trees have one
      key deeper as ``below(key, value)``. Paths stay those of ``get_state``; stored array names get the key.
    * ``check_state(obj, state)``: raises StructureMismatch, before anything is changed, if a saved state of a process
      does not fit.
    * ``get_position(obj)``: where it stands, by which two saves are compared; cheap.
    * ``get_constants(obj)``: numbers by path that are no state. They are saved, and a restore warns of those that differ.
    * ``meet(obj, others)``: called before anything is saved or restored, with all objects of the call by their paths,
      also ``obj``.
    * ``notice(obj)``: called if a restore found no step: training begins with this object as it is.

    Optional attributes:

    * ``per_process = True``: each process has its own state (a data pipeline). Such an adapter also has
      ``to_text(state) -> str`` and ``from_text(obj, text) -> state``, for the file ``process_{i}-of-{n}.json`` that
      other tools read.
    * ``shares = True``: ``get_state(obj, seen)`` is called with a dict, empty at the start of each tree. The adapter
      adds the ids of parts that it has stored, and omits those that are in it: another object of the tree shares them.
    * ``written_anew = True``, on the adapter or on a user's object: its state is generated for each save (the
      description of a model), so a resumed run may save it without having restored it.
    * ``reads_renames``, on a user's object: the keys of ``rename=`` that it handles itself.
    * ``arrays_are_writable = True``: jax arrays may share host memory that the user can write to, so an asynchronous
      save copies them.
    * ``accepts_any_structure = True``: the object accepts a state of any structure.

    Example:
        >>> class CounterAdapter:
        ...     def accepts(self, cls): return cls.__name__ == "Counter"
        ...     def get_state(self, obj): return {"count": obj.count}
        ...     def set_state(self, obj, state): obj.count = state["count"]
    """

    def accepts(self, cls: type, /) -> bool:
        """Whether the adapter handles objects of this class."""
        ...

    def get_state(self, obj: Any, /) -> Any:
        """The current state as a pytree of arrays and plain values; must not change the object."""
        ...

    def set_state(self, obj: Any, state: Any, /) -> None:
        """Sets the object in place from a state with the structure of ``get_state``."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A user's object that can be saved and restored without registration, by its two methods.

    With several processes, all must have the same state. An object whose state belongs to its process alone, such
    as a reader of data, has an attribute ``per_process = True``: then each process saves its own, and gets it back.
    If it also has ``check_state(state)``, that is called before anything is changed, and decides where another number
    of processes saved: process ``i`` gets the state of process ``i`` modulo that number, or ``check_state`` raises.

    Example:
        >>> class Counter:
        ...     count = 0
        ...     def get_state(self): return {"count": self.count}
        ...     def set_state(self, state): self.count = state["count"]
    """

    def get_state(self) -> Any:
        """The state as a pytree of arrays and plain values."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Sets the object from a state that ``get_state`` returned before."""
        ...


class _StatefulAdapter:
    """Adapter of objects with get_state and set_state; these, or check_state if ``per_process``, validate the state."""

    def __init__(self, *, per_process: bool = False, checks: bool = False) -> None:
        self.per_process = per_process
        self.accepts_any_structure = not per_process
        check: Callable[[Any, Any], None] = lambda obj, state: obj.check_state(state)  # noqa: E731
        self.check_state = check if checks else None

    def accepts(self, cls: type, /) -> bool:
        return True

    def get_state(self, obj: Stateful, /) -> Any:
        return obj.get_state()

    def set_state(self, obj: Stateful, state: Any, /) -> None:
        obj.set_state(state)

    def to_text(self, state: Any, /) -> str:
        return json.dumps(state, default=repr)

    def from_text(self, obj: Stateful, text: str, /) -> Any:
        return json.loads(text)


_STATEFUL = _StatefulAdapter()
_STATEFUL_OF_PROCESS = _StatefulAdapter(per_process=True)
_CHECKED_OF_PROCESS = _StatefulAdapter(per_process=True, checks=True)
_LEAVES = (np.random.Generator, np.random.RandomState)
"""Types of leaves that also have get_state and set_state, and are not Stateful objects."""


@functools.cache
def _installed() -> dict[tuple[str, str], EntryPoint]:
    """The entry points by root package and object; an installation that is found twice counts once."""
    return {(entry.name, entry.value): entry for entry in entry_points(group=GROUP)}


_registered: dict[str, Adapter] = {}  # the adapters of the program itself, by class


def register(adapter: Adapter) -> None:
    """From now on ``adapter`` saves and restores the objects whose classes it accepts, in this process.

    For the classes of one program; a package names its adapter in the entry-point group ``ckpt_core.adapters``
    instead. It goes before installed ones. Registering one whose class has the same name replaces the earlier one,
    as a cell of a notebook does that runs again.

    Raises:
        TypeError: ``adapter`` is a class, or lacks ``accepts``, ``get_state`` or ``set_state``.

    Example:
        >>> import ckpt_core as ckpt, tempfile
        >>> class Counter:
        ...     def __init__(self, count): self.count = count
        >>> class CounterAdapter:
        ...     def accepts(self, cls): return issubclass(cls, Counter)
        ...     def get_state(self, obj): return {"count": obj.count}
        ...     def set_state(self, obj, state): obj.count = state["count"]
        >>> ckpt.register(CounterAdapter())
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ckpt.save(path, counter=Counter(3))
        >>> ckpt.restore(path, counter=Counter(0))["counter"].count
        3
    """
    name = getattr(adapter, "__qualname__", type(adapter).__qualname__)
    if isinstance(adapter, type):
        raise TypeError(f"register takes an object, not a class: write ckpt.register({name}())")
    verbs_of_all = ("accepts", "get_state", "set_state")
    lacking = [verb for verb in verbs_of_all if not callable(getattr(adapter, verb, None))]
    if lacking:
        raise TypeError(
            f"{with_article(name)} is no adapter, for it has no {' and no '.join(lacking)}: see ckpt.Adapter for what they do"
        )
    _registered[f"{type(adapter).__module__}.{name}"] = adapter
    _for_class.cache_clear()


@functools.lru_cache(maxsize=4096)
def _for_class(cls: type) -> Any:
    if issubclass(cls, _LEAVES):
        return None
    accepting = {name: adapter for name, adapter in _registered.items() if adapter.accepts(cls)}
    if accepting:
        return _only(accepting, cls, "registered")
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        loaded = {value: one.load() for (name, value), one in _installed().items() if name == root}
        found = {value: adapter for value, adapter in loaded.items() if adapter.accepts(cls)}
        if found:
            return _only(found, cls, "installed")
    has_state = all(callable(getattr(cls, verb, None)) for verb in ("get_state", "set_state"))
    return _STATEFUL if has_state else None


def _only(found: Mapping[str, Any], cls: type, how: str) -> Any:
    """The only adapter of a class; raises CheckpointError if there are several: which of two saves an object must not be chance."""
    if len(found) > 1:
        advice = "Register one of them, or let their accepts() distinguish the classes"
        if how == "installed":
            advice = "Uninstall the package of all but one, or ckpt.register the one that you want"
        what = f"{len(found)} adapters are {how} for {cls.__module__}.{cls.__qualname__}"
        raise CheckpointError(f"{what}: {', '.join(sorted(found))}. {advice}")
    return next(iter(found.values()))


def adapter_for(obj: Any) -> Adapter | None:
    """The adapter of an object; None for pytrees and leaves."""
    if isinstance(obj, type):
        return None
    found = _for_class(type(obj))
    if found is _STATEFUL and getattr(obj, "per_process", False) is True:
        return _CHECKED_OF_PROCESS if hasattr(obj, "check_state") else _STATEFUL_OF_PROCESS
    return found


def notice(objects: Iterable[Any]) -> None:
    """Calls ``notice`` for objects with which training begins because nothing was restored."""
    for obj in objects:
        if call := getattr(adapter_for(obj), "notice", None):
            call(obj)


def introduce(items: Mapping[str, Any]) -> dict[str, Adapter | None]:
    """The adapter of each item; calls ``meet`` for objects that are saved or restored in one call, as items or in containers."""
    found, parts, seen = dict[str, Any](), [*items.items()], dict[int, Any]()
    while parts:
        path, value = parts.pop()
        if adapter_for(value) is not None:
            found[path] = value
        elif id(value) not in seen:
            seen[id(value)] = value  # alive, so that no other gets its id
            inside: dict[Any, Any] = value if isinstance(value, dict) else {}
            if isinstance(value, (list, tuple)):
                inside = dict(enumerate(value))
            elif dataclasses.is_dataclass(value):
                fields = [one.name for one in dataclasses.fields(value)]
                inside = {name: getattr(value, name, None) for name in fields}
            elif not isinstance(value, dict) and not hasattr(value, "__next__"):
                is_child = functools.partial(operator.is_not, value)
                with contextlib.suppress(AttributeError, TypeError, ValueError):  # said by the save
                    inside = dict(enumerate(jax.tree.leaves(value, is_leaf=is_child)))
            for kind in {*map(type, inside.values())}:  # not each leaf: there may be thousands
                if _for_class(kind) is not None or not issubclass(kind, _plain_types()):
                    here = ((key, part) for key, part in inside.items() if type(part) is kind)
                    parts += [(f"{path}/{key}", part) for key, part in here]
    for obj in found.values():
        if meet := getattr(adapter_for(obj), "meet", None):
            meet(obj, found)
    return {name: adapter_for(value) for name, value in items.items()}


@functools.cache
def _plain_types() -> tuple[type, ...]:
    arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    return (*arrays, str, bytes, int, float, complex, type(None))


class SavedDict(dict[Any, Any]):
    """The description of a saved tree that is a dict, with what ``get_constants`` gave when it was saved."""

    constants: Mapping[str, Any] = {}


def is_written_anew(obj: Any) -> bool:
    """Whether an item is generated for each save, so that it need not be restored."""
    adapter = adapter_for(obj)
    owner = obj if isinstance(adapter, _StatefulAdapter) else adapter
    return bool(getattr(owner, "written_anew", False))


def expander(
    saved: Callable[[Path], Any] = lambda path: None,
    *,
    stand_in: Callable[[Any], Any] | None = None,
    live: list[tuple[Any, bool]] | None = None,
    stored: bool = False,
    sets: bool = True,
) -> Callable[[Any, Path], tuple[Any, Callable[[Any], Any]] | None]:
    """The ``expand=`` function for ``flatten``, which replaces live objects by their states; a new one for each tree, as it
    remembers shared parts. ``saved`` describes what was saved at a path, for ``wanted``. ``stand_in`` gives the copy to use for
    an object. ``live`` gets each object, with True if a tree may hold it twice: its adapter has ``shares``, or its state is one
    array, like a tied weight. ``stored`` wraps values that Orbax has one key deeper. Without ``sets`` no object is set.
    """
    seen: dict[int, Any] = {}

    def expand(obj: Any, path: Path) -> tuple[Any, Callable[[Any], Any]] | None:
        adapter: Any = adapter_for(obj)
        if adapter is None:
            return None
        if getattr(adapter, "per_process", False):
            raise UnsupportedLeaf(
                f"{an(obj)} lies inside a container: its state belongs to each process alone, so pass it as an item "
                "of its own, such as data=iterator",
                type_name=type(obj).__name__,
            )
        used = obj if stand_in is None else stand_in(obj)

        def finish(state: Any) -> Any:
            if not sets:
                return state
            adapter.set_state(used, state)
            return used

        shares = bool(getattr(adapter, "shares", False))
        wanted = getattr(adapter, "wanted", None)
        if wanted and (before := saved(path)) is not None:
            try:
                state = wanted(used, before)
            except StructureMismatch as error:
                error.add_note(f"ckpt: this is {format_path(path)} of the item")
                raise
        elif stored and (get_stored := getattr(adapter, "get_stored", None)):
            state = get_stored(used, Below, seen)
        else:
            state = adapter.get_state(used, seen) if shares else adapter.get_state(used)
        if live is not None:
            live.append((obj, shares or not isinstance(state, (Mapping, list, tuple))))
        get_constants = getattr(adapter, "get_constants", None)
        if get_constants and (constants := get_constants(used)):
            state = WithConstants(state, constants)
        return state, finish

    return expand


def live_objects(tree: Any) -> Sequence[tuple[Path, Any]]:
    """Path and object of every live object with an adapter in a pytree; none of them is called."""
    found: list[tuple[Path, Any]] = []

    def note(obj: Any, path: Path) -> Any:
        if adapter_for(obj) is None:
            return None
        found.append((path, obj))
        return (), list

    flatten(tree, expand=note)
    return found


def refuse_twice(
    items: Mapping[str, Any], lives: Iterable[Sequence[tuple[Any, bool]]], advice: str
) -> None:
    """UnsupportedLeaf for one live object at two places, unless ``lives`` says that it may repeat: the last value would win."""
    first_of: dict[int, str] = {}
    for name, live in zip(items, lives, strict=True):
        here = set[int]()
        for obj, may_repeat in live:
            if first_of.setdefault(id(obj), name) != name or (id(obj) in here and not may_repeat):
                places = [
                    "/".join([item, *([format_path(path)] if path else [])])
                    for item, tree in items.items()
                    for path, found in live_objects(tree)
                    if found is obj
                ]
                kind = type(obj).__name__
                raise UnsupportedLeaf(
                    f"{' and '.join(places)} are one and the same live {kind}: it cannot hold what was saved under each. {advice}",
                    leaf=places[-1] if places else None,
                    type_name=kind,
                )
            here.add(id(obj))
