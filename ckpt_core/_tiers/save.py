"""Saving into local directories: every process writes what it holds, and all commit or none."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core._directory import Form
from ckpt_core._errors import CheckpointError
from ckpt_core._fence import Fence
from ckpt_core._format.record import library_versions
from ckpt_core._options import Options
from ckpt_core._processes import Processes, next_round
from ckpt_core._save import Story, frozen_metadata, prepare_items
from ckpt_core._save.agreement import agree_to_save
from ckpt_core._save.prepare import PreparedItem
from ckpt_core._save.write import Notes, Write
from ckpt_core._staging import Copy

_CALL = "save into local directories"
_ALONE = Processes(0, 1)
"""Each writes a checkpoint of its own: nothing to merge, nobody to wait for meanwhile."""


@dataclass(frozen=True)
class StepToSave:
    """What is saved, and what is noted of it; see ``Checkpointer.save``."""

    step: int
    items: Mapping[str, Any]
    single: bool
    metadata: Any
    metrics: Mapping[str, float]


def prepare_local(
    form: Form,
    path: str,
    what: StepToSave,
    processes: Processes,
    options: Options,
    fence: Fence,
    copy: Copy | None,
    tidy: Callable[[], None],
) -> Callable[[], str]:
    """Takes the snapshot now, and gives the function that writes it on all processes.

    That function returns the token of the attempt when all processes have committed. Where one of
    them fails before, it raises on all, and nothing is left of the step.

    Args:
        path: of the step in this process's own directory; what is there is replaced.
        fence: says whether this run may still write there.
        copy: copies host memory that the caller could change; None where nothing is copied.
        tidy: called when this process has committed and none has gone on: all hold their fences.
    """
    story = Story(path, what.step, options)
    tag = next_round()
    items: list[PreparedItem] = []
    said, numbers = None, dict(what.metrics)
    refusal: Exception | None = None
    story.happened("save_started")
    try:
        said = frozen_metadata(what.metadata)
        items = prepare_items(what.items, processes, options, copy, what.single, own=True)
    except Exception as error:
        if processes.count == 1:
            story.happened("save_failed", error=error)
            raise
        refusal = error  # the others wait for this process: it is told to them, and raised then
    except BaseException as error:  # told as well, but nothing of it waits
        processes.refuse(tag, _CALL, error)
        raise
    blocking_secs = story.happened("snapshot_taken")

    def write_and_commit() -> str:
        agreement = _Agreement(processes, tag, options.timeout_secs, path, fence)
        try:
            token = agreement.start(what, items, options, refusal)
            notes = Notes(
                what.single,
                True,
                said,
                numbers,
                guard=agreement,
                step=what.step,
                snapshot_secs=blocking_secs,
            )
            write = Write(form, path, True, items, notes, _ALONE, options, token, tag)

            def write_alone() -> int:
                fence.take()
                attempt = form.begin(path, overwrite=True, durable=options.durable, token=token)
                try:
                    written = write.run(attempt)
                except BaseException:
                    attempt.abort()
                    raise
                tidy()
                return written

            written = agreement.committed(write_alone)
        except BaseException as error:
            story.happened("save_failed", error=error)
            raise
        story.committed(written, blocking_secs)
        return token

    return write_and_commit


class _Agreement:
    """The three agreements of one local save; the second is asked for by ``Write``, as its guard."""

    def __init__(
        self, processes: Processes, tag: str, timeout_secs: float, path: str, fence: Fence
    ) -> None:
        self._processes = processes
        self._tag = tag
        self._timeout_secs = timeout_secs
        self._path = path
        self._fence = fence
        self._all_wrote = False

    def start(
        self,
        what: StepToSave,
        items: list[PreparedItem],
        options: Options,
        refusal: Exception | None,
    ) -> str:
        """All are about to save the same; gives the token of process 0."""
        return agree_to_save(
            self._processes,
            self._tag,
            _CALL,
            self._path,
            items,
            {
                "the step": what.step,
                "Options(durable=)": options.durable,
                "Options(local_max_to_keep=)": options.local_max_to_keep,
                "whether one state or named items are saved": what.single,
                "the version of ckpt": library_versions().get("ckpt-core"),
            },
            secrets.token_hex(16),
            refusal,
            self._timeout_secs,
        )

    def committed(self, work: Callable[[], int]) -> int:
        """Does the work, of which ``check`` is a part, and agrees that all did it."""

        def tell_before_the_commit() -> int:
            try:
                return work()
            except BaseException as error:
                if not self._all_wrote:
                    self._tell(error)
                raise

        return self._together("committed", tell_before_the_commit)

    def take(self) -> None:
        """Before the try begins; see ``Guard``."""
        self._fence.take()

    def check(self) -> None:
        """Last before the commit: what all have made durable may become visible."""
        self._all_wrote = True
        self._together("written", self._fence.check)

    def _tell(self, error: BaseException) -> None:
        """The others wait to hear that this process has written."""

        def failed() -> None:
            raise error

        with contextlib.suppress(BaseException):  # it is raised by whoever calls this
            self._together("written", failed)

    def _together(self, what: str, work: Callable[[], Any]) -> Any:
        return self._processes.together(
            f"{self._tag}/{what}",
            work,
            self._timeout_secs,
            lambda index, text: CheckpointError(
                f"{self._path}: process {index} failed to save into its local directory: {text}"
            ),
        )
