"""``training.Checkpointer``: the steps of one run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import ckpt_core as ckpt
from ckpt_orbax._paths import as_text, has_metadata_file, refuse_another_series
from ckpt_orbax._refused import not_offered
from ckpt_orbax._response import AsyncResponse, Waiting
from ckpt_orbax.v1 import _engine, _items
from ckpt_orbax.v1._context import Context, get_context
from ckpt_orbax.v1._names import STATE, check_checkpointables
from ckpt_orbax.v1.path.step import NameFormat, prefix_and_length, standard_name_format
from ckpt_orbax.v1.training import errors, save_decision_policies
from ckpt_orbax.v1.training._decisions import as_saved, keep_policy, save_policy
from ckpt_orbax.v1.training._earlier_names import EarlierNames
from ckpt_orbax.v1.training._reading import Reading
from ckpt_orbax.v1.training._steps import Steps


class Checkpointer(Reading, EarlierNames):
    """Saves, keeps and loads the steps of one run, under Orbax's names.

    Args:
        directory: contains the steps; created if missing. A path, or a URL of a bucket.
        context: options of all calls, unless they are made inside of another ``with context:``.
        save_decision_policy: by default the first step, then whenever no save is running, and at a
            preemption.
        preservation_policy: by default all steps stay. The newest always stays.
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
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: NameFormat[Any] | None = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        if logger is not None:
            raise not_offered(
                "Checkpointer(logger=)",
                "Orbax's loggers get Orbax's statistics",
                "context.engine = ckpt_core.Options(on_event=...), or ckpt_core.events",
            )
        self._context = Context(context or get_context())
        options = _engine.engine_options(self._context)
        prefix, length = prefix_and_length(step_name_format)
        refuse_another_series(as_text(directory), prefix, step_name_format)
        self._steps = steps = Steps(
            step_name_format or standard_name_format(), lightweight_initialize
        )
        # The caller's listener first: a save whose listener has not returned goes on.
        heard = [steps.noticed] if options.on_event is None else [options.on_event, steps.noticed]
        self._engine = ckpt.Checkpointer(
            as_text(directory),
            save_policy=save_policy(
                save_decision_policy or save_decision_policies.default_policy(),
                steps.with_running,
                self._context.multiprocessing,
            ),
            keep_policy=keep_policy(preservation_policy),
            step_prefix=prefix,
            step_format_fixed_length=length,
            options=dataclasses.replace(options, on_event=ckpt.events.each(*heard)),
        )
        if "://" not in self._engine.directory:
            os.makedirs(self._engine.directory, exist_ok=True)  # callers look for it at once
        steps.use(self._engine)
        steps.numbers()
        if custom_metadata is not None and not has_metadata_file(self._engine):
            self._engine.write_run_metadata(custom_metadata)

    # -------------------------------------------------------------------------------------- saves

    def should_save(self, step: int) -> bool:
        """Whether ``save`` would save this step; with several processes, all must call it."""
        step = getattr(step, "step", step)
        newest = self._steps.newest()
        return (newest is None or step > newest) and self._engine.should_save(step)

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
            state: pytree of arrays, numbers and text.
            checkpointable_name: name of the pytree in the checkpoint.
            force: save whatever the policy says.
            overwrite: replace a step of this number.
            metrics: JSON of this step, for the policies and ``checkpoints``.
            custom_metadata: a JSON value of your own.

        Raises:
            StepAlreadyExistsError: there is a step of this number.
        """
        response = self.save_async(
            step,
            state,
            checkpointable_name=checkpointable_name,
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )
        return response is not None and response.result()

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse[bool] | None:
        """As ``save``, in the background; None if the policy does not want the step."""
        _items.check_state(state)
        return self.save_checkpointables_async(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    def save_checkpointables(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> bool:
        """As ``save``, for several named objects."""
        response = self.save_checkpointables_async(
            step,
            checkpointables,
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )
        return response is not None and response.result()

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
        context = get_context(self._context)
        if not checkpointables:
            raise ValueError(
                f"checkpointables must name what is to be saved, got {checkpointables!r}"
            )
        check_checkpointables(checkpointables, "checkpointables")
        _engine.refuse_unsupported(context)
        if not overwrite and step in self._steps.begun():
            raise errors.StepAlreadyExistsError(
                f"{self.directory}: Step {step} already exists: overwrite=True replaces it"
            )
        if not force and not (
            self._engine.should_save(step) if overwrite else self.should_save(step)
        ):
            return None
        metrics, told = as_saved(metrics)
        items = {**_items.items_of(checkpointables, context), **told}
        ended = self._steps.begin(step)
        try:
            begun = self._engine.save(
                step,
                items=items,
                metrics=metrics,
                metadata=custom_metadata,
                force=True,
                overwrite=overwrite,
            )
        except BaseException as error:
            self._steps.abandon(step)
            if isinstance(error, ckpt.CheckpointExists):
                raise errors.StepAlreadyExistsError(str(error)) from error
            raise
        if not begun:
            self._steps.abandon(step)
            return None
        return self._response(step, ended, context.asynchronous.post_finalization_callback)

    def _response(self, step: int, ended: Any, finished: Any) -> Waiting:
        def wait(timeout: float | None) -> bool:
            if timeout is not None and not ended.wait(timeout):
                raise TimeoutError(
                    f"{self.directory}: step {step} is not saved after {timeout:g} s"
                )
            self._engine.wait_until_finished()
            error = self._steps.failure(step)  # another call may have been told of it already
            if error is not None:
                raise error
            if finished is not None:
                finished()
            return True

        response = Waiting(wait)
        if finished is not None:
            response.on_complete(
                lambda _: None
            )  # the callback does not depend on anyone's result()
        return response

    def is_saving_in_progress(self) -> bool:
        """Whether a save is being written."""
        return bool(self._steps.running)

    # -------------------------------------------------------------------------- deletions, the end

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
        self._engine.wait_until_finished()
        number = getattr(step, "step", step)
        try:
            self._engine.delete(number)
        except ckpt.CheckpointNotFound as error:
            if missing_ok:
                return False
            raise errors.StepNotFoundError(str(error)) from error
        finally:
            self._steps.look()
        return True

    def delete_async(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> AsyncResponse[bool]:
        """As ``delete``; it has ended when this returns."""
        deleted = self.delete(step, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
        return Waiting(lambda _: deleted)

    def cancel(self, step: Any = None) -> None:
        """Refused: a save that has begun is finished."""
        raise not_offered(
            "Checkpointer.cancel()",
            "a save that has begun is finished, so that processes cannot disagree on it",
            "wait(), and delete(step) if the step is not wanted",
        )

    def wait(self) -> None:
        """Blocks until no save is running; raises the error of a failed one."""
        self._engine.wait_until_finished()

    def close(self) -> None:
        """As ``wait``, and releases the directory."""
        self._engine.close()

    def __enter__(self) -> Checkpointer:
        self._engine.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._engine.__exit__(kind, error, trace)
