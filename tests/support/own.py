"""An object of a user's own, which takes part in saves by its own methods."""

from typing import Any


class Own:
    """Its attributes are its state; a restore sets them in place."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)

    def get_state(self) -> dict[str, Any]:
        return dict(vars(self))

    def set_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
