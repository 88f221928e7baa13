"""``Composite``: named objects, which can be read as keys and as attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Composite(Mapping[str, Any]):
    """Objects by name, as ``composite["state"]`` and as ``composite.state``; it cannot be changed.

    Raises:
        ValueError: a name begins with two underscores.

    Example:
        >>> import ckpt_orbax as ocp
        >>> composite = ocp.args.Composite(state=1, config=2)
        >>> composite.state, composite["config"], "other" in composite
        (1, 2, False)
    """

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise ValueError(f"{name!r}: an item's name must not begin with two underscores")
        self.__dict__["_items"] = items

    def __getitem__(self, key: str) -> Any:
        try:
            return self._items[key]
        except KeyError:
            held = ", ".join(self._items) or "nothing"
            raise KeyError(f"there is no {key!r}: there is {held}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        items: dict[str, Any] = self.__dict__.get("_items", {})
        if name in items:
            return items[name]
        raise AttributeError(f"there is no {name!r}: there is {', '.join(items) or 'nothing'}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"a {type(self).__name__} cannot be changed: make another one")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"
