"""The arguments that all loads share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ckpt_core._format.rules import Rule, rules_from
from ckpt_core._options import (
    DEFAULTS,
    METRICS_ARE_NUMBERS,
    RESTORE_ARGUMENTS,
    Options,
    checked_options,
    refuse_args,
    refuse_arguments,
    unnamed,
)
from ckpt_core._processes import Round
from ckpt_core._tree.leaves import LeafSpec, dtype_from_name
from ckpt_core._tree.match import MatchRules, Renames
from ckpt_core._tree.patterns import read_again
from ckpt_core.arguments import NotPassed, an, check_flags, is_flag, meant

Only = str | Iterable[str] | Callable[[Any, LeafSpec], bool] | type | None
"""A function gets the path as text; a filter of a framework, what the framework gives it."""
Rename = Mapping[str, str] | Callable[[str], str] | None
Rules = Iterable[Rule | Mapping[str, Any]] | None
Select = Mapping[str, Any] | None


class How(TypedDict, total=False):
    """The arguments of ``load`` by name, for type checkers."""

    item: str | None
    only: Only
    rename: Rename
    rules: Rules
    select: Select
    sharding: Any
    as_numpy: bool
    cast: Any
    missing: str
    unexpected: str
    static: str
    options: Options | None


NOT_PASSED = NotPassed("(not passed)")


@dataclass(frozen=True)
class Request:
    """What a load or restore is asked for, but for the checkpoint."""

    matching: MatchRules
    only: Only  # not resolved yet: that is done for each item
    options: Options
    target: Any = NOT_PASSED  # of a load ``like``; of a restore the targets by item name
    item: str | None = None  # of a load, the only item that is wanted
    restores: bool = False  # sets live objects in place; a load sets copies of them
    sharding: Any = None
    as_numpy: bool = False  # arrays stay in host memory
    dtype: str = ""  # of all arrays of floats, for a load without a target; empty: as saved
    together: Round | None = None  # in which the processes agree; None: taken when the load starts
    abandoned: Callable[[], bool] | None = None  # of a background load: the interpreter is exiting
    rules: tuple[Rule, ...] | None = None
    select: Mapping[str, tuple[Any, ...]] | None = None  # by pattern, the entries of the index


def make_request(
    only: Only = None,
    rename: Rename = None,
    cast: Any = False,
    missing: str = "error",
    unexpected: str = "error",
    options: Options | None = None,
    sharding: Any = None,
    as_numpy: bool = False,
    rules: Rules = None,
    like: Any = NOT_PASSED,
    static: str = "error",
    select: Select = None,
) -> Request:
    """The request of a load or restore, from the caller's arguments; ValueError for an unknown word, TypeError for other misfits."""
    words = (
        (missing, "missing", "keep"),
        (unexpected, "unexpected", "ignore"),
        (static, "static", "target"),
    )
    for given, name, other in words:
        if given not in ("error", other):
            raise ValueError(f"{name} must be 'error' or {other!r}, got {given!r}")
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        raise TypeError(
            f"rename= is a dict of saved paths and wanted ones, or a function of a path, got {an(rename)}"
        )
    if not (only is None or callable(only) or isinstance(only, Iterable)):
        raise TypeError(f"only= is a pattern, several, or a function of a path, got {only!r}")
    if type(as_numpy) is not bool:
        check_flags(as_numpy=as_numpy)
    if "orbax" in type(like).__module__:
        refuse_args("like", like, "load(..., like)")
    if like is not None and type(cast) is not bool and not is_flag(cast):
        raise TypeError(
            f"cast= beside a target is True or False, got {cast!r}: the dtypes are those of the target"
        )
    if rules is not None and rename is not None:
        raise TypeError("rules= cannot be combined with rename=: a rule renames, too")
    if rules is not None and select is not None:
        raise TypeError(
            "rules= cannot be combined with select=: load the parts, and save them first"
        )
    if rules is not None and like is None:
        raise TypeError(
            "rules= needs a target: pass like, whose paths and shapes they are made for"
        )
    if like is None and static != "error":
        raise TypeError("static= is for a target: pass like, which keeps static values of its own")
    if as_numpy and (like is not None or sharding is not None):
        raise TypeError(
            "as_numpy=True cannot be combined with like or sharding=: both say where arrays go"
        )
    asks = cast is not False or (missing, unexpected) != ("error", "error")
    renamed = Renames(rename) if isinstance(rename, Mapping) else rename
    return Request(
        MatchRules(renamed, bool(cast) and like is not None, missing, unexpected, static),
        None if only is None else read_again(only),
        DEFAULTS if options is None else checked_options(options),
        sharding=sharding,
        as_numpy=as_numpy,
        dtype=_dtype_of_all(cast, missing, unexpected) if like is None and asks else "",
        rules=None if rules is None else rules_from(rules),
        select=None if select is None else _indices(select),
    )


def _indices(select: Any) -> dict[str, tuple[Any, ...]]:
    """The index of each pattern in ``select=``, as a tuple; TypeError if it is none, ValueError for a slice with a step."""
    if not isinstance(select, Mapping) or not all(isinstance(one, str) for one in select):
        raise TypeError(
            f"select= is a dict from patterns to indices, such as {{'embed/**': np.s_[:1000]}}, got {select!r}"
        )
    found = {name: one if isinstance(one, tuple) else (one,) for name, one in select.items()}
    for pattern, entries in found.items():
        where = f"select={{{pattern!r}: {select[pattern]!r}}}"
        slices = [one for one in entries if isinstance(one, slice)]
        numbers = [one for one in entries if not isinstance(one, slice) and one is not ...]
        numbers += [n for one in slices for n in (one.start, one.stop) if n is not None]
        odd = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int | np.integer)]
        if odd or sum(one is ... for one in entries) > 1:
            raise TypeError(f"{where}: an index is of whole numbers, slices and at most one ...")
        if any(one.step not in (None, 1) for one in slices):
            raise ValueError(f"{where}: select= takes no steps: load without, and index the result")
    return found


def _dtype_of_all(cast: Any, missing: str, unexpected: str) -> str:
    """The dtype that ``cast=`` of a load without a target names; TypeError for arguments that need a target."""
    flag = is_flag(cast)
    if (flag and cast) or (missing, unexpected) != ("error", "error"):
        raise TypeError(
            "missing=, unexpected= and cast=True need a target: pass like, a tree of what is wanted. Without one "
            "cast=jnp.bfloat16 gives all floats in that dtype"
        )
    return "" if flag else float_dtype(cast)


def float_dtype(cast: Any) -> str:
    """The name of the dtype of floats that ``cast=`` gives; TypeError if it is none."""
    with contextlib.suppress(TypeError, ValueError):
        name = "" if cast is None or is_flag(cast) else dtype_from_name(np.dtype(cast).name).name
        if name.startswith(("float", "bfloat")):
            return name
    raise TypeError(f"cast= is a dtype of floats, such as jnp.bfloat16, got {cast!r}")


def collect_targets(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The targets of a restore by item name. TypeError for a state beside named items, a name passed twice, and ``metrics``."""
    if not (items is None or isinstance(items, Mapping)):
        raise unnamed(items)
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"targets {', '.join(twice)} were passed twice: by name and in items=")
    if "metrics" in named:
        raise TypeError(
            "metrics= cannot be a target: a save takes metrics= as numbers, not as an item; "
            f"{METRICS_ARE_NUMBERS}"
        )
    for name, target in {"state": state, **(items or {}), **named}.items():
        if "orbax" in type(target).__module__:
            refuse_args(name, target, "restore(..., state) or restore(..., model=model)")
    refuse_arguments(named, RESTORE_ARGUMENTS, 0.85)
    chosen = {**(items or {}), **named}
    if state is NOT_PASSED:
        return chosen
    if chosen:
        raise TypeError(
            f"pass one state, or targets by name ({', '.join(chosen)}), not both: if the checkpoint was saved "
            "as one state, pass only that; if it has named items, pass each target by the name of its item"
        )
    return {"state": state}


def refuse_no_targets(targets: Mapping[str, Any]) -> None:
    """Raises TypeError, also where nothing was saved yet: else a program would fail at its first restart."""
    if not targets:
        raise TypeError(
            "restore needs at least one target, such as model=model; to get what was saved without one, use load"
        )


def request_from(function: str, like: Any, arguments: Mapping[str, Any]) -> Request:
    """The request of ``function``, which takes its keywords as ``**arguments``; TypeError for one that ``load`` does not have."""
    if "like" in arguments:
        raise TypeError(f"like comes without a name: write {function}(..., like)")
    unknown = sorted(set(arguments) - set(How.__annotations__))
    if unknown:
        name = unknown[0]
        known = meant(name, {*How.__annotations__})
        if not known.startswith(":"):
            known += (
                f". A target comes without a name: write {function}(..., {name}), or if it is the target of an item of that "
                f"name {function}(..., {{{name!r}: {name}}})"
            )
        raise TypeError(f"{function} has no argument {name!r}{known}")
    return make_request(**arguments, like=like)
