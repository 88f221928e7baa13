"""``training.Checkpointer``: the steps of one run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, Unpack

import ckpt_core as ckpt
from ckpt_orbax import _errors, checkpoint_managers
from ckpt_orbax._paths import as_path
from ckpt_orbax._refused import not_offered, refuse_logger
from ckpt_orbax._run import Run
from ckpt_orbax.checkpoint_managers import CheckpointMetadata as CheckpointMetadata
from ckpt_orbax.future import AsyncResponse
from ckpt_orbax.path.step import NameFormat
from ckpt_orbax.v1 import _single
from ckpt_orbax.v1._context import Context, engine_options, get_context
from ckpt_orbax.v1._single import STATE

errors = _errors
preservation_policies = save_decision_policies = checkpoint_managers


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """What was said of the whole run when its directory was made."""

    directory: Any
    custom_metadata: Any = None


class Saving(_single.Saving, total=False):
    """Further arguments of ``save`` and its forms."""

    force: bool
    metrics: Any


class Checkpointer:
    """Saves, keeps and loads the steps of one run, under Orbax's names.

    Args:
        directory: contains the steps; created if missing. A path, or a URL of a bucket.
        context: options of all calls, unless they are made inside of another ``with context:``.
        save_decision_policy: by default the first step, then whenever no save is running, and at a
            preemption.
        preservation_policy: by default all steps stay.
        step_name_format: see ``ocp.path.step``.
        custom_metadata: a dict of JSON about the whole run, written when its directory has none yet.
        cleanup_tmp_directories: of no effect: what dead writers left is always removed.
        lightweight_initialize: leave ``time`` and ``metrics`` out of ``checkpoints``.
        logger: refused, except None.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> import jax.numpy as jnp, tempfile
        >>> latest_two = ocp.training.preservation_policies.LatestN(2)
        >>> every_step = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
        >>> with ocp.training.Checkpointer(
        ...     tempfile.mkdtemp(), save_decision_policy=every_step, preservation_policy=latest_two
        ... ) as checkpointer:
        ...     saved = [checkpointer.save(step, {"w": jnp.full(2, step)}) for step in range(3)]
        ...     [one.step for one in checkpointer.checkpoints], checkpointer.load()["w"].tolist()
        ([1, 2], [2, 2])
    """

    def __init__(
        self,
        directory: Any,
        *,
        context: Context | None = None,
        save_decision_policy: save_decision_policies.SaveDecisionPolicy | None = None,
        preservation_policy: preservation_policies.PreservationPolicy | None = None,
        step_name_format: NameFormat[Any] | None = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        refuse_logger("Checkpointer", logger)
        self._context = Context(context or get_context())
        self._run = Run(
            directory,
            engine_options(self._context),
            save=save_decision_policy or save_decision_policies.default_policy(),
            keep=preservation_policy,
            multiprocessing=self._context.multiprocessing,
            names=step_name_format,
            light=lightweight_initialize,
            metadata=custom_metadata,
        )

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return as_path(self._run.engine.directory, self._context.file.path_class)

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """The steps, oldest first, as of the last save here or ``reload``; also one that is being saved."""
        return self._run.described()

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The newest step, or None; it may be one that is being saved, for which a load waits."""
        return max(self.checkpoints, key=lambda one: one.step, default=None)

    @property
    def newest_step(self) -> int | None:
        """Number of the newest step, also of one that the policy does not keep: it stays until the next save, for resuming."""
        return self._run.newest_step()

    def reload(self) -> None:
        """Lists the directory again, where others may have saved or deleted."""
        self._run.look()

    def root_metadata(self) -> RootMetadata:
        """What was said of the whole run."""
        found = self._run.engine.run_metadata
        found = {} if found is None else found
        return RootMetadata(directory=self.directory, custom_metadata=found)

    def metadata(self, step: Any = None) -> CheckpointMetadata[Any]:
        """The tree of a step, without its arrays; of the newest step for None.

        Raises:
            StepNotFoundError: there is no such step.
        """
        with self._at(step) as found:
            return dataclasses.replace(found, **vars(_single.metadata(found.path)))

    def checkpointables_metadata(self, step: Any = None) -> CheckpointMetadata[dict[str, Any]]:
        """As ``metadata``, for each checkpointable."""
        with self._at(step) as found:
            return dataclasses.replace(found, **vars(_single.checkpointables_metadata(found.path)))

    @contextlib.contextmanager
    def _at(self, step: Any) -> Generator[CheckpointMetadata[Any]]:
        """What is known of a step, for a block that reads it with this Checkpointer's Context."""
        self.wait()
        numbers = self._run.numbers()
        wanted = getattr(step, "step", step)
        if wanted is None and numbers:
            wanted = numbers[-1]
        if wanted not in numbers and wanted not in self._run.on_disk():
            held = ", ".join(map(str, numbers)) or "none"
            what = "no step" if wanted is None else f"no step {wanted}"
            raise errors.StepNotFoundError(f"{self.directory}: {what}; there are: {held}")
        try:
            with get_context(self._context):
                yield self._run.describe(wanted)
        except ckpt.CheckpointNotFound as error:  # deleted by another process
            raise errors.StepNotFoundError(f"{error}; reload() lists the steps again") from error

    def should_save(self, step: int) -> bool:
        """Whether ``save`` would save this step; with several processes, all must call it."""
        return self._run.should_save(getattr(step, "step", step))

    def save(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> bool:
        """Saves a pytree as a step, if the policy wants it; whether it did.

        When it returns True, a power cut cannot lose the step. All processes must call it.

        Args:
            step: its number; without ``force`` larger than those before.
            state, checkpointable_name, custom_metadata: see ``ocp.save``.
            force: save whatever the policy says.
            overwrite: replace a step of this number.
            metrics: JSON of this step, for the policies and ``checkpoints``.

        Raises:
            StepAlreadyExistsError: there is a step of this number.
        """
        more: Saving = {"force": force, "overwrite": overwrite, "metrics": metrics}
        more["custom_metadata"] = custom_metadata
        begun = self.save_async(step, state, checkpointable_name=checkpointable_name, **more)
        return begun is not None and begun.result()

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **more: Unpack[Saving]
    ) -> AsyncResponse[bool] | None:
        """As ``save``, in the background; None if the policy does not want the step."""
        _single.check_state(state)
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **more)

    def save_checkpointables(
        self, step: int, checkpointables: dict[str, Any], **more: Unpack[Saving]
    ) -> bool:
        """As ``save``, for several named objects."""
        begun = self.save_checkpointables_async(step, checkpointables, **more)
        return begun is not None and begun.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse[bool] | None:
        """As ``save_checkpointables``, in the background; None if the policy does not want the step."""
        context = _single.context_of_save(checkpointables, self._context)
        if not overwrite and step in self._run.begun():
            raise errors.StepAlreadyExistsError(
                f"{self.directory}: Step {step} already exists: overwrite=True replaces it"
            )
        wants = self._run.engine.should_save if overwrite else self.should_save
        if not force and not wants(step):
            return None
        items = _single.items_of(checkpointables, context)
        try:
            begun = self._run.save(step, items, metrics, custom_metadata, overwrite=overwrite)
        except ckpt.CheckpointExists as error:
            raise errors.StepAlreadyExistsError(str(error)) from error
        if begun is None:
            return None
        return AsyncResponse(
            lambda timeout: self._run.wait_for(step, begun, timeout),
            context.asynchronous.post_finalization_callback,
        )

    def is_saving_in_progress(self) -> bool:
        """Whether a save is being written."""
        return bool(self._run.running())

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> Any:
        """The pytree of a step, or of the newest one; see ``ocp.load``.

        Raises:
            StepNotFoundError: there is no such step.
        """
        name = checkpointable_name
        return self.load_checkpointables(step, {name: abstract_state})[name]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        """Checkpointables of a step by name; see ``ocp.load_checkpointables``."""
        with self._at(step) as found:
            return _single.load_checkpointables(found.path, abstract_checkpointables)

    def load_async(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> AsyncResponse[Any]:
        """As ``load``, in the background; Orbax does not have it yet."""
        name = checkpointable_name
        with self._at(step) as found:
            return _single.load_async(found.path, abstract_state, checkpointable_name=name)

    save_pytree, save_pytree_async = _single.deprecated(save), _single.deprecated(save_async)
    load_pytree, load_pytree_async = _single.deprecated(load), _single.deprecated(load_async)
    pytree_metadata = _single.deprecated(metadata)

    def delete(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Deletes a step; False if it does not exist and ``missing_ok``.

        Raises:
            StepNotFoundError: there is no such step.
            NotOffered: ``checkpointable_name`` is given.
        """
        if checkpointable_name is not None:
            raise not_offered(
                "Checkpointer.delete(checkpointable_name=)",
                "a step is never changed after its commit: its checksums are of the whole",
                "load_checkpointables() without it, and save the rest as another checkpoint",
            )
        try:
            self._run.delete(getattr(step, "step", step))
        except ckpt.CheckpointNotFound as error:
            if missing_ok:
                return False
            raise errors.StepNotFoundError(str(error)) from error
        return True

    def delete_async(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> AsyncResponse[bool]:
        """As ``delete``; it has ended when this returns."""
        deleted = self.delete(step, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
        return AsyncResponse(lambda _: deleted)

    def wait(self) -> None:
        """Blocks until no save is running; raises the error of a failed one."""
        self._run.engine.wait_until_finished()

    def close(self) -> None:
        """As ``wait``, and releases the directory."""
        self._run.engine.close()

    def __enter__(self) -> Checkpointer:
        self._run.engine.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._run.engine.__exit__(kind, error, trace)
