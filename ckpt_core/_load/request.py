"""The arguments that all loads share, and the count of the bytes that a load has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._events import Progress
from ckpt_core._load.planned import NO_STATE
from ckpt_core._options import METRICS_ARE_NUMBERS, Options, checked_options
from ckpt_core._tree.match import MatchRules, Select, renamer

Only = str | Iterable[str] | Select | type | None
Rename = Mapping[str, str] | Callable[[str], str] | None


@dataclass
class Tally:
    """The bytes that a load has read so far, and who is told of them."""

    bytes: int = 0
    progress: Progress | None = None

    def count(self, read_bytes: int) -> None:
        """So many bytes more were read."""
        self.bytes += read_bytes
        if self.progress is not None:
            self.progress.reached(self.bytes)


@dataclass(frozen=True)
class Request:
    """The arguments that all loads share.

    Attributes:
        round: names the agreement of several processes.
        copying: live objects of a target are copied, not set.
        abandoned: whether nobody wants the result any more.
        renames: the dict of ``rename=``, for adapters that read it in a way of their own.
    """

    rules: MatchRules
    only: Only
    options: Options
    sharding: Any = None
    as_numpy: bool = False
    round: str = ""
    copying: bool = False
    abandoned: Callable[[], bool] | None = None
    renames: Mapping[str, str] | None = None

    def refuse_if_abandoned(self) -> None:
        """Raises CheckpointError where nobody can ask for the result any more."""
        if self.abandoned is not None and self.abandoned():
            raise CheckpointError(
                "the interpreter ends, and nobody waits for what was being loaded"
            )


def make_request(
    only: Only = None,
    rename: Rename = None,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    options: Options | None = None,
    sharding: Any = None,
    as_numpy: bool = False,
) -> Request:
    if missing not in ("error", "keep"):
        raise ValueError(f"missing must be 'error' or 'keep', got {missing!r}")
    if unexpected not in ("error", "ignore"):
        raise ValueError(f"unexpected must be 'error' or 'ignore', got {unexpected!r}")
    if isinstance(only, list):
        only = list(only)  # what the caller does to it later changes no load
    rules = MatchRules(renamer(rename), cast, missing, unexpected)
    renames = None if rename is None or callable(rename) else dict(rename)
    return Request(rules, only, checked_options(options), sharding, as_numpy, renames=renames)


def collect_targets(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The targets by item that a call's arguments ask for; ``state`` is ``NO_STATE`` where none was passed.

    Raises:
        TypeError: a state together with items, a name twice, or the name that at a save is that of the
            numbers of a step.
    """
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"targets {', '.join(twice)} were passed twice: by name and in items=")
    if "metrics" in named:
        raise TypeError(f"metrics= is no target, as it is no item at a save: {METRICS_ARE_NUMBERS}")
    chosen = {**(items or {}), **named}
    if state is NO_STATE:
        return chosen
    if chosen:
        raise TypeError(
            f"pass one state, or targets by name ({', '.join(chosen)}), not both: a checkpoint that was "
            "saved as one state has one item, and in another each target needs its item's name"
        )
    return {"state": state}


_NAMES = frozenset(
    ("only", "rename", "cast", "missing", "unexpected", "options", "sharding", "as_numpy")
)


def request_from(function: str, like: Any, arguments: Mapping[str, Any]) -> Request:
    """The request of a call whose keywords were collected.

    Raises:
        TypeError: a keyword that loads do not have, or that does not go with ``like``.
    """
    unknown = sorted(set(arguments) - _NAMES)
    if unknown:
        raise TypeError(
            f"{function}() has no argument {', '.join(unknown)}; it has item, {', '.join(sorted(_NAMES))}"
        )
    request = make_request(**arguments)
    check_target(request, like)
    return request


def check_target(request: Request, like: Any) -> None:
    """Refuses two answers to where arrays go."""
    if request.as_numpy and (like is not None or request.sharding is not None):
        raise TypeError(
            "as_numpy=True goes with neither like nor sharding=: both say where arrays go"
        )
