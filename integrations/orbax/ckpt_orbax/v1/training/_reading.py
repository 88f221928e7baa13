"""What a ``training.Checkpointer`` knows of the steps, and how it loads them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import ckpt_core as ckpt
from ckpt_orbax._paths import as_path
from ckpt_orbax._response import AsyncResponse
from ckpt_orbax.v1 import describing, loading
from ckpt_orbax.v1._context import Context, get_context
from ckpt_orbax.v1._names import STATE
from ckpt_orbax.v1._step_metadata import CheckpointMetadata, RootMetadata
from ckpt_orbax.v1.training import errors
from ckpt_orbax.v1.training._steps import Steps


class Reading:
    """The half of a Checkpointer that changes nothing."""

    _context: Context
    _engine: ckpt.Checkpointer
    _steps: Steps

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return as_path(self._engine.directory, self._context.file.path_class)

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """The steps, oldest first, as of the last save here or ``reload``; also one that is being saved."""
        return self._steps.with_running()

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The newest step, or None; it may be one that is being saved, for which a load waits."""
        return max(self.checkpoints, key=lambda one: one.step, default=None)

    def reload(self) -> None:
        """Lists the directory again, where others may have saved or deleted."""
        self._steps.look()

    def root_metadata(self) -> RootMetadata:
        """What was said of the whole run."""
        found = self._engine.run_metadata
        return RootMetadata(
            directory=self.directory, custom_metadata={} if found is None else found
        )

    def metadata(self, step: Any = None) -> CheckpointMetadata[Any]:
        """The tree of a step, without its arrays; of the newest step for None.

        Raises:
            StepNotFoundError: there is no such step.
        """
        with self._at(step) as found:
            return _joined(found, describing.metadata(found.path))

    def checkpointables_metadata(self, step: Any = None) -> CheckpointMetadata[dict[str, Any]]:
        """As ``metadata``, for each checkpointable."""
        with self._at(step) as found:
            return _joined(found, describing.checkpointables_metadata(found.path))

    def _existing(self, step: Any) -> CheckpointMetadata[None]:
        """What is known of a step.

        Raises:
            StepNotFoundError: it does not exist.
        """
        self._engine.wait_until_finished()
        numbers = self._steps.numbers()
        wanted = getattr(step, "step", step)
        if wanted is None and numbers:
            wanted = numbers[-1]
        if wanted not in numbers:
            held = ", ".join(map(str, numbers)) or "none"
            what = "no step" if wanted is None else f"no step {wanted}"
            raise errors.StepNotFoundError(f"{self.directory}: {what}; there are: {held}")
        return self._steps.describe(wanted)

    @contextlib.contextmanager
    def _at(self, step: Any) -> Generator[CheckpointMetadata[None]]:
        """What is known of a step, for a block that reads it with this Checkpointer's Context."""
        try:
            found = self._existing(step)
            with get_context(self._context):
                yield found
        except errors.StepNotFoundError:
            raise
        except ckpt.CheckpointNotFound as error:  # deleted by another process
            raise errors.StepNotFoundError(f"{error}; reload() lists the steps again") from error

    # -------------------------------------------------------------------------------------- loads

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> Any:
        """The pytree of a step, or of the newest one; see ``ocp.load``.

        Raises:
            StepNotFoundError: there is no such step.
        """
        loading.check_abstract(abstract_state)
        return self.load_checkpointables(step, {checkpointable_name: abstract_state})[
            checkpointable_name
        ]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        """Checkpointables of a step by name; see ``ocp.load_checkpointables``."""
        with self._at(step) as found:
            return loading.load_checkpointables(found.path, abstract_checkpointables)

    def load_async(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> AsyncResponse[Any]:
        """As ``load``, in the background; Orbax does not have it yet."""
        with self._at(step) as found:
            return loading.load_async(
                found.path, abstract_state, checkpointable_name=checkpointable_name
            )

    def load_checkpointables_async(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> AsyncResponse[dict[str, Any]]:
        """As ``load_checkpointables``, in the background; Orbax does not have it yet."""
        with self._at(step) as found:
            return loading.load_checkpointables_async(found.path, abstract_checkpointables)


def _joined(step: CheckpointMetadata[None], found: Any) -> CheckpointMetadata[Any]:
    """What the run and the checkpoint itself say of a step."""
    return dataclasses.replace(
        step,
        path=found.path,
        metadata=found.metadata,
        init_timestamp_nsecs=found.init_timestamp_nsecs,
        commit_timestamp_nsecs=found.commit_timestamp_nsecs,
        custom_metadata=found.custom_metadata,
    )
