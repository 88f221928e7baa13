"""``Publisher``: hands out the weights of a training run, version by version."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt_core._directory import check_step, resolve
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointExists, UnsupportedLeaf
from ckpt_core._fork import HOME, forked
from ckpt_core._lazy import jax
from ckpt_core._load import Only
from ckpt_core._load.matching import selection
from ckpt_core._load.plans import pruned
from ckpt_core._load.request import float_dtype
from ckpt_core._operation import logger
from ckpt_core._options import Options, checked_options
from ckpt_core._processes import NotTogether, Round, this_run
from ckpt_core._publish import chain as chains
from ckpt_core._publish.chain import Chain, Form, Version
from ckpt_core._publish.delta import MASK, Change, cells, digest, encode, pack
from ckpt_core._run.in_flight import SaveSlot, Turns, in_turn, settle_all
from ckpt_core._run.run_file import RUN_FILE
from ckpt_core._run.steps import refuse_one_checkpoint
from ckpt_core._save import NOTHING, RecordFields, Save, collect_items, make_job, take_snapshot
from ckpt_core._saved import refuse_file_for_steps
from ckpt_core._storage import backend_of
from ckpt_core._tree import FlatTree
from ckpt_core._tree.leaves import describe, dtype_from_name
from ckpt_core._tree.patterns import advice_on_pattern, idle_patterns, read_again
from ckpt_core.arguments import answering, whole_number

PARTIAL = "published_only"
"""In the metadata of an anchor: ``only=`` left leaves out, which a follower keeps as they are."""


@dataclass
class Snapshot:
    """What this process wrote of one version, on the host: the base of the next delta."""

    facts: list[Any]  # what must be equal for a delta: of each item its name, record and texts
    # By item, position of the leaf and region, as in ``Change``.
    pieces: dict[tuple[Any, ...], np.ndarray[Any, Any]] = field(default_factory=dict[Any, Any])
    digests: dict[tuple[Any, ...], int] = field(default_factory=dict[Any, int])

    @classmethod
    def of(cls, save: Save) -> Snapshot:
        """That of a save whose arrays are on the host."""
        found = cls([(item.name, item.record, item.texts) for item in save.items])
        for item in save.items:
            positions = {name: at for at, name in enumerate(item.names)}
            for array in item.arrays:
                for region, values in array.pieces:
                    found.pieces[item.name, positions[array.name], region] = cells(values)
        return found

    def since(self, before: Snapshot | None) -> bytes | None:
        """The part of this process in the delta to this version; None without a version of the same structure."""
        if (
            before is None
            or self.facts != before.facts
            or self.pieces.keys() != before.pieces.keys()
        ):
            self.digests = {key: digest(piece) for key, piece in self.pieces.items()}
            return None
        changes, data = list[Change](), list[bytes]()
        for key, piece in self.pieces.items():
            blocks, found, moved = encode(before.pieces[key], piece)
            self.digests[key] = (before.digests[key] + moved) & MASK
            if found:
                item, leaf, region = key
                changes.append(Change(item, leaf, region, blocks, self.digests[key]))
                data += found
        return pack(changes, data)


class Publisher:
    """A directory of published weights, which any number of ``Follower``s read.

    A version is a checkpoint (an *anchor*), or what changed since the version before it (a *delta*). Weights of bfloat16 that are
    one step of AdamW apart differ in few elements: such a delta has a few percent of the bytes. Anchors are
    ordinary checkpoints, ``directory/<version>``, for ``load``, Orbax and ``Checkpointer(read_only=True)``. Deltas are for published weights; resume
    from a ``Checkpointer``.

    With several processes, all must make the same calls in the same order. A Publisher keeps a host copy of what each process
    published last.

    Args:
        directory: of the published versions alone; created if missing. A path or a URL.
        anchor_every: after so many versions an anchor is written beside the delta, for followers that join late or lost a delta.
        max_to_keep: how many of the newest anchors stay, all by default. Deltas since the second newest one always stay.
        options: see ``Options``. ``delete_grace_secs`` is how long a file stays after nothing names it.

    Raises:
        CheckpointExists: a Checkpointer, or another program, keeps its checkpoints there.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with ckpt.Publisher(directory) as publisher:
        ...     for step in range(3):
        ...         publisher.publish(step, {"w": jnp.full(1000, step)}, cast=jnp.bfloat16)
        >>> follower = ckpt.Follower(directory)
        >>> follower.update()
        2
        >>> follower.load()["w"].dtype
        dtype('int32')
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        anchor_every: int = 50,
        max_to_keep: int | None = None,
        options: Options | None = None,
    ) -> None:
        HOME.is_used = True
        if os.getpid() != HOME.pid:
            raise forked()
        self._anchor_every = whole_number("anchor_every", anchor_every)
        self._max_to_keep = (
            None if max_to_keep is None else whole_number("max_to_keep", max_to_keep)
        )
        self._options = checked_options(options)
        self.directory, self._local = resolve(directory)
        self._backend = backend_of(self._local, self._options)
        self._processes = this_run()
        self._slot = SaveSlot(self.directory)
        self._turns = Turns(self.directory, [self._slot], self._options.timeout_secs)
        self._newest: int | None = None  # that this object published
        self._before: Snapshot | None = None
        self._chain = Chain()  # on process 0, like what is left to delete: when, and what
        self._leaving: list[tuple[float, str]] = []
        self._closed = False
        self._round("open a Publisher").first(self._open)

    def _round(self, call: str) -> Round:
        return self._processes.round(call, self._options.timeout_secs, self.directory)

    def _open(self) -> None:
        """On process 0: takes the directory over, and finds what an earlier Publisher left."""
        if self._local:
            refuse_file_for_steps(self.directory)
        refuse_one_checkpoint(self._backend, self.directory, self._local)
        known, look = Chain(), self._backend.look(self.directory)
        anchors = [name for name in look.children if name.isdigit() and look.is_checkpoint(name)]
        try:
            found = self._read()
            if found is None and (
                RUN_FILE in look.hidden or any(map(look.is_checkpoint, look.children))
            ):
                raise CheckpointExists(
                    f"{self.directory} holds checkpoints that no Publisher wrote, and retention would delete some: publish "
                    "into a directory of its own"
                )
            known = found or known
        except CheckpointCorrupt as error:
            logger.warning("%s", error)
        self._chain = replace(known, writer=secrets.token_hex(8))
        self._put_chain()
        named = _files_of(known)
        left = [name for name in look.hidden if name.startswith(chains.DELTA)]
        if known.newest is not None:  # else it is not known which anchors were published
            number = known.newest.number
            every = self._max_to_keep is not None
            left += [name for name in anchors if every or int(name) > number]
        self._leave({*left} - named)

    def _read(self) -> Chain | None:
        data = self._backend.read(self.directory, chains.CHAIN_FILE, chains.MOST_BYTES)
        return chains.parse_chain(data, self.directory)

    def _put_chain(self) -> None:
        self._backend.put(self.directory, chains.CHAIN_FILE, self._chain.dump())

    @in_turn
    def publish(
        self,
        version: int,
        state: Any = None,
        /,
        *,
        cast: Any = None,
        only: Only = None,
        **items: Any,
    ) -> None:
        """Publishes one version of a state or of named items, in the background.

        Blocks until the version before is written, and then for the snapshot. Followers see the version when it is whole; a delta
        is durable then in any case, an anchor with ``Options.durable``. ``close`` waits for it.

        The first version of a Publisher may have any number. The versions from that number on, of an earlier Publisher, are
        abandoned: their followers go back to it. It is always an anchor, and so is the version after a failure.

        Args:
            version: its number, beyond the last one that this Publisher published.
            state: one pytree or model; or name items instead.
            cast: a dtype of floats, such as ``jnp.bfloat16``: all arrays of floats are published in it.
            only: publish only these leaves, as in ``load``. A follower keeps the others as they are.
            **items: named items: models and pytrees.

        Raises:
            CheckpointExists: this Publisher has published this number, or a later one.
            UnsupportedLeaf: a value cannot be saved, or is no pytree of arrays, such as a data pipeline.
            ValueError: a pattern of ``only`` matches no leaf.
            Exception: the error of the version before, with its own type.
        """
        if self._closed:
            raise CheckpointError(f"{self.directory}: this Publisher is closed: open another one")
        number, dtype = (
            check_step(version),
            None if cast is None else dtype_from_name(float_dtype(cast)),
        )
        settle_all([self._slot])
        if self._newest is not None and number <= self._newest:
            raise CheckpointExists(
                f"{self.directory}: version {self._newest} is published already, and {number} is not beyond it: publish a "
                "later number, or, to go back, close this Publisher and open another one"
            )
        chosen = collect_items(NOTHING if state is None else state, None, items)
        single, metadata = state is not None, None if only is None else {PARTIAL: True}
        job = make_job(
            f"{self.directory}/{number}",
            self._local,
            self._backend,
            self._processes,
            RecordFields(single, metadata),
            self._options,
            overwrite=True,
            step=number,
            change=_change(chosen, only, dtype),
        )
        together, save = self._round("publish"), Save(job, call="publish an anchor")
        take_snapshot(chosen, [save], np.copy)
        for item in save.items:
            if item.record.form != "tree":
                save.undo()
                raise UnsupportedLeaf(
                    f"item {item.name!r} is no pytree of arrays: publish weights, and save the rest with a Checkpointer"
                )
        low = self._options.background_priority == "low"
        work = functools.partial(self._write, number, save, together)
        self._slot.start(number, self.directory, work, low=low)

    def _write(self, number: int, save: Save, together: Round) -> None:
        """In the background: writes a version, and makes it visible."""
        before, self._before = self._before, None  # after a failure the next version is an anchor
        failing = functools.partial(save.operation.failing, "save_failed")
        with failing("agreeing on the form of the version"):
            now, form, version = self._put_delta(number, save, together, before)
        if form.anchor:
            save.run()
        with failing("making the version visible"):
            together.all(functools.partial(self._commit, version))
        self._before, self._newest = now, number
        if not form.anchor:
            written = sum(size for size, _ in version.parts or ())
            save.operation.committed(written, save.blocking_secs)

    def _put_delta(
        self, number: int, save: Save, together: Round, before: Snapshot | None
    ) -> tuple[Snapshot, Form, Version]:
        """Agrees on the form of a version, and writes the delta if there is one; returns what the version holds, its form and description."""
        error, now, part = save.refusal, Snapshot([]), None
        try:
            if error is None:
                save.land()
                now = Snapshot.of(save)
                part = now.since(before)
        except Exception as raised:
            error = raised
        full = sum(piece.nbytes for piece in now.pieces.values())
        values = json.dumps([item.values for item in save.items], sort_keys=True)
        offer = _Offer(number, save.token, full, None if part is None else len(part), _crc(values))
        answer = together.decide(json.dumps(offer.__dict__), self._judge, error=error)
        (anchor, delta), token = json.loads(answer)
        rows = list[tuple[int, int]]()
        if delta:
            assert part is not None
            row = together.all(
                functools.partial(self._put_part, number, token, part),
                json.dumps,
                lambda found: rows.extend(map(tuple, map(json.loads, found))),
            )
            rows = rows or [row]  # of a single process, or of one that does not commit
        made = Version(number, token, anchor, tuple(rows) if delta else None)
        return now, Form(anchor, delta), made

    def _judge(self, offers: list[str]) -> str:
        """On process 0: the form of the version and its token; raises if the processes publish different things."""
        found = [_Offer(**json.loads(one)) for one in offers]
        for index, one in enumerate(found):
            if (one.number, one.values) != (found[0].number, found[0].values):
                raise NotTogether(
                    f"process 0 publishes version {found[0].number} and process {index} version {one.number}, or they hold "
                    "different values of what no sharding places: all must publish the same"
                )
        parts = [one.part_bytes for one in found]
        delta = None if None in parts else sum(part or 0 for part in parts)
        full = sum(one.full_bytes for one in found)
        form = chains.form_of(self._chain, delta, full, self._anchor_every)
        return json.dumps([form, found[0].token])

    def _put_part(self, number: int, token: str, part: bytes) -> tuple[int, int]:
        name = chains.name_of(number, token, self._processes.index)
        self._backend.put(self.directory, name, part)
        return len(part), zlib.crc32(part)

    def _commit(self, version: Version) -> None:
        """On process 0: makes the version visible, then deletes what no version needs any more."""
        if self._processes.index:
            return
        with contextlib.suppress(CheckpointCorrupt):  # it is written anew
            found = self._read()
            if found is not None and found.writer != self._chain.writer:
                raise CheckpointError(
                    f"{self.directory}: another Publisher was opened here, and version {version.number} is not published: "
                    "end one of the two programs"
                )
        before = self._chain
        self._chain = before.published(version, self._max_to_keep)
        self._put_chain()
        left = _files_of(before) - _files_of(self._chain)
        if self._max_to_keep is None:  # anchors stay, but for those that were abandoned
            left = {one for one in left if not one.isdigit() or int(one) > version.number}
        self._leave(left)

    def _leave(self, names: set[str]) -> None:
        """Deletes these files and anchors after ``Options.delete_grace_secs``, and what is due now."""
        now = time.monotonic()
        self._leaving += [(now + self._options.delete_grace_secs, name) for name in sorted(names)]
        waiting, self._leaving = self._leaving, []
        for due, name in waiting:
            try:
                if due > now:
                    self._leaving.append((due, name))
                elif name.startswith(chains.DELTA):
                    self._backend.remove(self.directory, name)
                elif name not in _files_of(self._chain):  # else it was published again
                    self._backend.delete(f"{self.directory}/{name}")
            except BlockingIOError:  # somebody reads it
                self._leaving.append((due, name))
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("%s/%s stays: %s", self.directory, name, error)

    @in_turn
    def close(self) -> None:
        """Blocks until the last version is visible; raises the error of a failed one. More calls do nothing."""
        self._closed, self._before = True, None
        settle_all([self._slot])
        self._before = None

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if os.getpid() != HOME.pid:  # a forked child must not close what its parent still uses
            return
        try:
            self.close()
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"ckpt: publishing failed too: {type(failure).__name__}: {failure}")

    def __repr__(self) -> str:
        return f"<Publisher {self.directory}: {'closed' if self._closed else 'open'}>"


@dataclass(frozen=True)
class _Offer:
    """What one process tells process 0 about a version."""

    number: int
    token: str
    full_bytes: int
    part_bytes: int | None
    values: int  # CRC-32 of those that each process has one of


def _crc(text: str) -> int:
    return zlib.crc32(text.encode(errors="surrogatepass"))


def _files_of(chain: Chain) -> set[str]:
    """The names in the directory that a chain needs."""
    anchors = {str(one.number) for one in chain.versions if one.anchor}
    return anchors.union(*(one.files for one in chain.versions))


def _change(
    items: Mapping[str, Any], only: Only, dtype: Any
) -> Callable[[str, FlatTree], FlatTree] | None:
    """What is published of an item's tree: the leaves that ``only=`` selects, cast."""
    if only is None and dtype is None:
        return None
    only = read_again(only)
    selects = (
        {}
        if only is None
        else {name: selection(only, name, value) for name, value in items.items()}
    )
    seen: list[tuple[str, Sequence[Any]]] = []

    def change(name: str, flat: FlatTree) -> FlatTree:
        paths, leaves, root = flat.paths, flat.leaves, flat.root
        select: Any = selects.get(name)
        if select is not None:
            kept = [
                at
                for at, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
                if select(path, describe(leaf, path))
            ]
            seen.append((name, paths))
            idle = idle_patterns(only, seen) if len(seen) == len(items) else []
            if not kept or idle:
                advice = advice_on_pattern(idle[0], [str(path) for path in paths]) if idle else ""
                raise ValueError(
                    f"only={only!r} matches no leaf of item {name!r}. {advice}".rstrip()
                )
            root = pruned(root, {*kept}) or root
            paths, leaves = [paths[at] for at in kept], [leaves[at] for at in kept]
        return FlatTree(
            paths, leaves if dtype is None else [_cast(leaf, dtype) for leaf in leaves], root
        )

    return change


def _cast(leaf: Any, dtype: Any) -> Any:
    """The leaf in this dtype if it is an array of floats."""
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    if is_array and jax.dtypes.issubdtype(leaf.dtype, np.floating) and leaf.dtype != dtype:
        return leaf.astype(dtype)
    return leaf


setattr(Publisher, "__init__", answering(Publisher.__init__))  # noqa: B010
