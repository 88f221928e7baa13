"""Names of earlier releases of Orbax's second API, which warn."""

from __future__ import annotations

import warnings
from typing import Any


class EarlierNames:
    """The deprecated methods of a Checkpointer."""

    def _called(self, name: str) -> Any:
        _warn(name)
        return getattr(self, name)

    def save_pytree(self, *arguments: Any, **named: Any) -> Any:
        """Deprecated name of ``save``."""
        return self._called("save")(*arguments, **named)

    def save_pytree_async(self, *arguments: Any, **named: Any) -> Any:
        """Deprecated name of ``save_async``."""
        return self._called("save_async")(*arguments, **named)

    def load_pytree(self, *arguments: Any, **named: Any) -> Any:
        """Deprecated name of ``load``."""
        return self._called("load")(*arguments, **named)

    def load_pytree_async(self, *arguments: Any, **named: Any) -> Any:
        """Deprecated name of ``load_async``."""
        return self._called("load_async")(*arguments, **named)

    def pytree_metadata(self, *arguments: Any, **named: Any) -> Any:
        """Deprecated name of ``metadata``."""
        return self._called("metadata")(*arguments, **named)


def _warn(instead: str) -> None:
    warnings.warn(f"Use `{instead}` instead.", DeprecationWarning, stacklevel=4)
