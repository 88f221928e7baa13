"""What each process has on its host, and no array holds: its random state, and what its dataset keeps.

One process stores it with the counters of ``fit``. Several have an item for it, of which each gets its own
back: the global generator of numpy has another seed in every process, unless the program seeds it.
"""

from __future__ import annotations

from typing import Any

HOST = "fit_of_process"
"""The name of the item."""


class OfProcess:
    """The state of one process of several.

    Args:
        state: what to save; empty to restore.
        count: how many processes run.
    """

    per_process = True

    def __init__(self, state: dict[str, Any], count: int) -> None:
        self.state = state
        self.count = count

    def get_state(self) -> dict[str, Any]:
        return {"state": self.state, "processes": self.count}

    def check_state(self, state: dict[str, Any], /) -> None:
        """Any number of processes may go on: whoever restores says so."""

    def set_state(self, state: dict[str, Any], /) -> None:
        self.state, self.count = state["state"], int(state["processes"])


def process_count() -> int:
    """The number of processes of this program."""
    import jax

    return jax.process_count()
