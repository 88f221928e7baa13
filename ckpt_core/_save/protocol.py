"""One save: flatten, plan and snapshot on the caller's thread; then write and commit, perhaps in a background thread.

In ``Save`` all processes write into one directory, which process 0 commits; ``_run/tiers/save.py`` has a directory for each, and
all commit or none; in ``pieces`` one process writes bit by bit.

Before anything is written, all processes agree that they save the same. Each sends a digest of all that decides what is stored
where. The digest of a tree is computed once per plan and reused for later saves of the same pytree structure. If all digests are
equal, one agreement is enough. If not, the first process that differs from process 0 sends what it is about to save, and the
error names the first setting or leaf that differs.
"""

from __future__ import annotations

import json
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core._background.pending import PendingSave
from ckpt_core._devices.staging import Copy
from ckpt_core._directory import Attempt
from ckpt_core._errors import ANSWERS, CheckpointError, at_the_call
from ckpt_core._format.record import library_versions
from ckpt_core._options import Options, checked_options
from ckpt_core._processes import Round
from ckpt_core._save.job import (
    NOTHING,
    PreparedItem,
    RecordFields,
    SaveJob,
    collect_items,
    save_job,
)
from ckpt_core._save.plan_digest import (
    SETTING,
    Fact,
    difference,
    digest_of,
    dump_facts,
    layout_of,
    parse_facts,
)
from ckpt_core._save.prepare import landed, prepare_items
from ckpt_core._save.write import Write

Around = Callable[[Callable[[], None]], None]
"""Calls its argument, which writes and commits; may do more before and after, on that thread."""
_NAMED = 5
"""A message lists at most this many of the processes that differ."""
_KINDS = {
    "tree": "a tree",
    "process": "one state of each process",
    "files": "files",
    "json": "plain values",
}


def save(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """Writes a checkpoint at ``path``; when it returns, a power cut cannot lose the checkpoint.

    Blocks until every file is written, fsynced and renamed into place. Where several processes run,
    all must call it, with the same structure, shardings, path and options; before anything is
    written, the processes compare all that decides what is stored where. Each process writes its
    shards; metadata is taken from process 0. Python numbers, text, numpy arrays and arrays that no
    sharding places must be equal on all, unless an object with ``per_process = True`` holds them.

    Args:
        path: directory of the checkpoint. It must not exist; missing parents are created.
        state: one pytree or object, saved as the only item, ``state``.
        overwrite: if a checkpoint exists at ``path``, replace it: after a crash, ``load`` finds
            either the old or the new one, complete.
        metadata: any JSON value, stored with the checkpoint.
        options: see ``Options``.
        items: more named items, for names that are no identifiers or are argument names.
        **named: named items: models, optimizers, data iterators, pytrees.

    Raises:
        CheckpointExists: there is something at ``path``, and ``overwrite`` is False.
        UnsupportedLeaf: a value cannot be saved; the message says its path and type.
        CheckpointError: processes save different things or values, or another process failed.
        BarrierTimeout: a process did not come within ``Options.timeout_secs``.
        OSError: the system refused (disk full, no permission). Partial files are removed.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
    """
    chosen_options = checked_options(options)
    chosen = collect_items(state, items, named)
    fields = RecordFields(state is not NOTHING, metadata)
    job = save_job(path, fields, chosen_options, overwrite=overwrite)
    try:
        prepared = prepare_save(job, chosen)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904
    try:
        prepared.run()
    except BaseException:
        prepared.undo()
        raise


def save_async(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> PendingSave:
    """A ``PendingSave``: a background thread writes the checkpoint that ``save`` would write.

    Blocks only until the snapshot is taken: then the caller may donate or delete arrays and write
    to numpy arrays. (Exception: a numpy array whose memory a ``jax.Array`` shares must not be
    written to; jax forbids that at any time.) Where several processes run, all must call it.

    Takes the arguments of ``save`` and raises its errors. An error in the background thread is
    raised by ``.result()``; if nobody calls that, it is printed when the interpreter exits, and the
    exit status is 1. The interpreter does not exit before the save has ended. If the system has no thread
    for it, ``RuntimeError`` is raised here, and nothing of it is left.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> pending = ckpt.save_async("/tmp/ckpt-docs/two", {"w": jnp.ones(3)}, overwrite=True)
        >>> pending.result()
    """
    chosen_options = checked_options(options)
    chosen = collect_items(state, items, named)
    fields = RecordFields(state is not NOTHING, metadata)
    job = save_job(path, fields, chosen_options, overwrite=overwrite)
    try:
        prepared = prepare_save(job, chosen, np.copy)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904
    pending = None
    try:
        low = job.options.background_priority == "low"
        pending = PendingSave(job.target, prepared.run, "ckpt-save", low=low)
        pending.start()
        return pending
    except BaseException:
        if pending is not None:  # interpreter exit would wait for a thread that never started
            pending.abandon()
        prepared.undo()  # does nothing if the background thread has begun to write
        raise


class Save(Write):
    """One save of all processes. After ``take`` it is either run once, perhaps by another thread, or undone; later calls do nothing. The
    processes agree that they save the same, that they see one attempt, after writing, and after the commit.
    """

    def __init__(self, job: SaveJob, around: Around | None = None, call: str = "save") -> None:
        super().__init__(job)
        self.refusal: Exception | None = None  # ``agree`` reports it to the others and raises it
        self._around = around
        self._round = job.processes.round(call, job.options.timeout_secs, job.target)
        self._refused = self._agreeing = False
        self._claim = threading.Lock()  # taken once, by ``run`` or ``undo``
        self._begun: Attempt | None = None  # by this process, which removes it if it fails

    def run(self) -> None:
        """Writes and commits the checkpoint; if that fails, its files are removed."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            write = self._write_and_commit
            write() if self._around is None else self._around(write)
        except BaseException:
            self._give_back()
            raise

    def undo(self) -> bool:
        """Removes the attempt's directory, unless ``run`` was called; whether it will never run."""
        undone = self._claim.acquire(blocking=False)
        if undone:
            self._give_back()
        return undone

    def _write_and_commit(self) -> None:
        with self.operation.failing("save_failed", "beginning"):
            self.start()
            self._on_all("written", self.write_part, report=str, judge=self.passed.extend)
            self._on_all("committed", self.commit)
        self._begun = None
        self.operation.committed(self.written_bytes, self.blocking_secs)

    def start(self) -> None:
        """Agreement 1: all processes save the same, into the attempt that process 0 began; CheckpointError
        if they do not, if one cannot save, or does not see the files of process 0.
        """
        job = self.job
        if job.processes.index == 0 and self._begun is None and self.refusal is None:
            try:
                self.begin()
            except Exception as error:
                if job.processes.count == 1:
                    raise
                self.refusal = error
        if job.processes.count == 1:
            return
        begun = self._begun

        def offer() -> Any:
            if begun is None:
                return None
            begun.write("ckpt.token", self.token.encode(), until_commit=True)
            return [begun.path, self.token]

        settings = {"the path": job.target, "overwrite=": job.overwrite}
        path, self.token = self.agree(settings, offer)
        if begun is None:
            self.attempt = job.backend.join(job.target, path, durable=job.options.durable)
        self._on_all("seen", self._refuse_unseen)

    def begin(self) -> None:
        """Claims the target, and begins the attempt."""
        job = self.job
        if job.guard is not None:
            job.guard.claim()
            # in an object store, an attempt begins by deleting the files of an unfinished one
            if not job.local:
                job.guard.check()
        self.attempt = self._begun = job.backend.begin(
            job.target, overwrite=job.overwrite, durable=job.options.durable, token=self.token
        )

    def refuse(self, error: BaseException) -> None:
        """Reports to the others, who wait in ``agree``, that this process does not take part; only the first time."""
        if not self._refused:
            self._refused = True
            self._round.refuse(error)

    def give_up(self, error: BaseException) -> None:
        """Tells the other processes and the listeners that this save does not begin."""
        self.refuse(error)
        self.operation.happened("save_failed", error=error)

    def agree(
        self,
        settings: Mapping[str, Any],
        offer: Callable[[], Any],
        combine: Callable[[list[Any]], Any] = operator.itemgetter(0),
    ) -> Any:
        """Agreement 1 of several processes, that all save the same (see ``agree_to_save``); the answer to what they offer. ``settings``
        must be equal on all, besides items and fields. ``offer`` is called when the arrays of this process are on the host.
        """
        job, offered = self.job, None
        self._agreeing = True
        try:
            if self.refusal is None:
                self.operation.phase = "waiting for arrays on their way to the host"
                self.items[:] = [landed(item) for item in self.items]  # their values are compared
                offered = offer()
        except Exception as error:
            self.refusal = error  # the other processes wait for this one: it reports the error to them, then raises
        self.operation.phase = "agreeing what is saved"
        common = {
            "Options(durable=)": job.options.durable,
            "whether one state or named items are saved": job.fields.single,
            "the version of ckpt": library_versions().get("ckpt-core"),
        }
        return agree_to_save(
            self._round, self.items, {**settings, **common}, offered, self.refusal, combine
        )

    def _on_all(self, moment: str, work: Callable[[], Any], **reporting: Any) -> None:
        """Calls ``work`` and waits until all processes have done theirs; if one fails, all raise. ``moment`` names what all have
        done then with their parts; ``reporting`` goes to ``Round.all``.
        """
        self._agreeing = True
        if self.job.processes.count == 1:
            work()
            return

        def noted() -> Any:
            found = work()
            self.operation.phase = f"waiting until all processes have {moment} their parts"
            return found

        self._round.all(noted, **reporting)

    def _refuse_unseen(self) -> None:
        """Raises CheckpointError if this process does not see the token file of process 0."""
        try:
            seen = self.attempt.read("ckpt.token")
        except FileNotFoundError:
            seen = b""
        if seen != self.token.encode():
            raise CheckpointError(
                f"{self.job.target} is not a directory that all processes share: process "
                f"{self.job.processes.index} does not see what process 0 wrote in it"
            )

    def _give_back(self) -> None:
        """Removes the attempt; reports that to the other processes, unless they know."""
        if not self._agreeing:
            self.refuse(CheckpointError("its save could not begin"))
        if self._begun is not None:
            self._begun.abort()
            self._begun = None


def take_snapshot(
    items: Mapping[str, Any],
    saves: Sequence[Save],
    copy: Copy | None = None,
    begins: Save | None = None,
) -> None:
    """Copies or references all values as they are now, once for all saves of one step. With several
    processes, an error is kept and raised in ``agree``, where the others wait for this one. ``begins``
    is the save that then begins on process 0, in a file system, where that takes no round trip.
    """
    jobs = [one.job for one in saves]
    for one in saves:
        one.operation.happened("save_started")
    try:
        with saves[0].operation.watched("taking the snapshot"):
            fields = jobs[0].fields.frozen()
            prepared, shared = prepare_items(items, jobs, copy)
            for one, its in zip(saves, prepared, strict=True):
                one.items, one.fields = its, replace(fields, shared=shared)
            if begins is not None and jobs[0].local and jobs[0].processes.index == 0:
                begins.begin()
        for one in saves:
            one.blocking_secs = one.operation.happened("snapshot_taken")
    except BaseException as error:
        if jobs[0].processes.count > 1 and isinstance(error, Exception):
            for one in saves:
                one.refusal = error
            return
        for one in saves:
            one.give_up(error)
        raise


def prepare_save(job: SaveJob, items: Mapping[str, Any], copy: Copy | None = None) -> Save:
    """The save with the snapshot of all items, ready to be written and committed; process 0 has also begun it in a file system."""
    save = Save(job)
    try:
        take_snapshot(items, [save], copy, save)
    except BaseException:
        save.undo()
        raise
    return save


def agree_to_save(
    together: Round,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    offer: Any,
    refusal: Exception | None,
    combine: Callable[[list[Any]], Any],
) -> Any:
    """The answer that ``combine`` makes of all offers on process 0, after all processes have agreed that they save the same,
    with the same ``settings``, by the names that a message uses. Each of several processes must call it, and it blocks until all
    have. A ``refusal``, which stopped preparation here, is raised after the others know of it, and they raise an error of its
    class. If another process saves something else, CheckpointError names the first leaf or setting that differs.
    """
    text = ""
    try:
        if refusal is None:
            layout = items_layout(items, settings)
            text = json.dumps([layout, offer], separators=(",", ":"))
    except Exception as error:
        refusal = error  # the other processes wait for a message from this one: raise after sending

    def judge(texts: list[str]) -> str:
        layouts, offers = zip(*map(json.loads, texts), strict=True)
        if differing := [n for n, layout in enumerate(layouts) if layout != layouts[0]]:
            return json.dumps({"differing": differing[:_NAMED]})
        return json.dumps({"offer": combine([*offers])}, separators=(",", ":"))

    answer = json.loads(together.decide(text, judge, error=refusal))
    if "differing" in answer:
        text = _how_they_differ(together, items, settings, answer["differing"])
        raise CheckpointError(f"{together.where}: {text}")
    return answer["offer"]


def _how_they_differ(
    together: Round,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    differing: Sequence[int],
) -> str:
    """The message about the first leaf that differs between process 0 and ``differing[0]``; every process calls it."""
    index, shows = together.processes.index, together.processes.index == differing[0]
    facts = list(items_facts(items, settings)) if shows or index == 0 else []

    def judge(texts: list[str]) -> str:
        found = difference(facts, parse_facts(texts[differing[0]]), differing[0])
        return (
            f"{found.what} on processes {list(differing)} differs from that on process 0: "
            f"{found.how}: all processes must {found.must}"
        )

    return together.decide(dump_facts(facts) if shows else "", judge)


def items_layout(items: Sequence[PreparedItem], settings: Mapping[str, Any]) -> str:
    """Digest of all items; equal on all processes that save the same."""
    ordered = sorted(items, key=lambda item: item.name)
    layouts = ["" if item.plan is None else item.plan.layout for item in ordered]
    heads = [
        _head(item)._replace(chunk=layout, value=digest_of(item.values))
        for item, layout in zip(ordered, layouts, strict=True)
    ]
    return layout_of([*_settings(settings), *heads])[:24]


def items_facts(items: Sequence[PreparedItem], settings: Mapping[str, Any]) -> Iterator[Fact]:
    """All facts that must be equal on all processes, the settings first, then item by item."""
    yield from _settings(settings)
    for item in sorted(items, key=lambda item: item.name):
        yield _head(item)
        for fact in () if item.plan is None else item.plan.facts(item.values):
            path = fact.path if len(items) == 1 else f"{item.name}/{fact.path}"
            yield fact._replace(path=path)


def _settings(settings: Mapping[str, Any]) -> Iterator[Fact]:
    return (Fact(name, SETTING, value=repr(value)) for name, value in settings.items())


def _head(item: PreparedItem) -> Fact:
    record = item.record
    kind = _KINDS[record.form]
    value = item.values.get("", "")
    return Fact(f"item {item.name}", f"{kind}, of {record.process_count} processes", value=value)
