"""Which process keeps a copy of whose parts, and what the processes agree on about the copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Partners = Literal["host"] | Callable[[int, int], int] | None
"""``Options.partners``."""


def choose_partner(partners: Partners, machines: Sequence[str], index: int) -> int | None:
    """The process that keeps copies of the parts of process ``index``; None for no copies.

    Raises:
        ValueError: the caller's function gives no other process of the run.
    """
    count = len(machines)
    if partners is None or count == 1:
        return None
    if partners == "host":
        return _on_next_machine(machines, index)
    chosen = partners(index, count)
    if type(chosen) is not int or not 0 <= chosen < count or chosen == index:
        raise ValueError(
            f"Options.partners({index}, {count}) gave {chosen!r}: it must give the index of another "
            f"process, from 0 to {count - 1}"
        )
    return chosen


def _on_next_machine(machines: Sequence[str], index: int) -> int:
    """A process on the next machine, of the same place in it; with one machine, the next process."""
    ordered = list(dict.fromkeys(machines))
    if len(ordered) == 1:
        return (index + 1) % len(machines)
    at = ordered.index(machines[index])
    place = [i for i, machine in enumerate(machines) if machine == machines[index]].index(index)
    following = ordered[(at + 1) % len(ordered)]
    theirs = [i for i, machine in enumerate(machines) if machine == following]
    return theirs[place % len(theirs)]


CopyState = Literal["off", "idle", "busy", "done"]
"""Of the copies that one process makes: of which step, see ``judge_copies``."""


def judge_copies(told: Sequence[Any]) -> dict[str, Any]:
    """On process 0, before a save: what is to be copied, and what all have.

    All copy the same steps, so that there is one of which every part has a copy. While any process
    still copies, none begins with another step.

    Args:
        told: for each process ``[state, step, token]``: "busy" copying that step, "done" with it,
            "idle" since it has copied none or could not, "off" without partners.

    Returns:
        ``copies``: whether the step that is about to be saved is copied; ``protected``: step and
        token of which all have a copy, or None.
    """
    states = [state for state, _, _ in told]
    same = all(one == told[0] for one in told)
    return {
        "copies": not {"off", "busy"} & set(states),
        "protected": told[0][1:] if same and states[0] == "done" else None,
    }
