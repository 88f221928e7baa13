"""Bases of managers and checkpointers, for annotations and for ``isinstance``."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class AbstractCheckpointManager(Protocol):
    """What every manager of steps has."""

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        ...

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """The steps, ascending."""
        ...

    def latest_step(self) -> int | None:
        """The newest step, or None."""
        ...

    def best_step(self) -> int | None:
        """The best step, or None."""
        ...

    def reload(self) -> None:
        """Lists the directory again."""
        ...

    def reached_preemption(self, step: int) -> bool:
        """Whether this step has to be saved because the job will be stopped."""
        ...

    def should_save(self, step: int) -> bool:
        """Whether ``save`` would save this step."""
        ...

    def delete(self, step: int) -> None:
        """Deletes a step."""
        ...

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Saves a step."""
        ...

    def restore(self, step: int | None, *args: Any, **kwargs: Any) -> Any:
        """Restores a step."""
        ...

    def item_metadata(self, step: int | None) -> Any:
        """What a step holds."""
        ...

    def metadata(self, step: int | None = None) -> Any:
        """What a step or the run says of itself."""
        ...

    def metrics(self, step: int) -> Any:
        """The metrics of a step."""
        ...

    def wait_until_finished(self) -> None:
        """Blocks until no save is running."""
        ...

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended."""
        ...

    def close(self) -> None:
        """Ends the manager."""
        ...


class AbstractCheckpointer(abc.ABC):
    """What every checkpointer has."""

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a checkpoint."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """What a checkpoint holds."""

    def metadata(self, directory: Any) -> Any:
        """What a checkpoint says of itself."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  (a checkpointer need not have it)
        """Ends the checkpointer."""
