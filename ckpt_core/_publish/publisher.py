"""``Publisher``: hands out the weights of a training run, version by version."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import crc32c
import numpy as np

from ckpt_core._background import PendingSave
from ckpt_core._directory import check_step
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointExists, UnsupportedLeaf
from ckpt_core._lazy import jax
from ckpt_core._load import Only, float_dtype, pruned, selection
from ckpt_core._operation import logger
from ckpt_core._options import Options
from ckpt_core._processes import NotTogether, Round
from ckpt_core._publish.chain import CHAIN_FILE, DELTA, Chain, Version, file_of
from ckpt_core._publish.delta import Change, cells, difference, pack
from ckpt_core._publish.side import PUBLISHED, Side
from ckpt_core._save import NOTHING, RecordFields, Save, SaveJob, collect_items, take_snapshot
from ckpt_core._saved import open_in, refuse_file_for_steps
from ckpt_core._tree import FlatTree, Path
from ckpt_core._tree.leaves import describe, dtype_from_name
from ckpt_core._tree.patterns import idle_patterns, read_again
from ckpt_core.arguments import whole_number

Place = tuple[str, int, Any]
"""Item, position of the leaf, and region, as in ``Change``."""


@dataclass(frozen=True)
class Snapshot:
    """What this process wrote of one version, on the host: the base of the next delta."""

    facts: Any = None  # what is equal in both versions of a delta
    pieces: Mapping[Place, np.ndarray[Any, Any]] = field(default_factory=dict[Any, Any])

    @classmethod
    def of(cls, save: Save) -> Snapshot:
        """That of a save whose arrays are on the host."""
        pieces = dict[Place, np.ndarray[Any, Any]]()
        for item in save.items:
            positions = {name: at for at, name in enumerate(item.names)}
            for array in item.arrays:
                for region, values in array.pieces:
                    pieces[item.name, positions[array.name], region] = cells(values)
        return cls([(item.name, item.record, item.texts) for item in save.items], pieces)

    def since(self, before: Snapshot) -> bytes | None:
        """The part of this process in the delta to this version; None if ``before`` has another structure."""
        if self.facts != before.facts or self.pieces.keys() != before.pieces.keys():
            return None
        changes, data = list[Change](), list[bytes]()
        for place, piece in self.pieces.items():
            if found := difference(before.pieces[place], piece):
                changes.append(Change(*place, len(found), crc32c.crc32c(piece.data)))
                data.append(found)
        return pack(changes, data)


@dataclass(frozen=True)
class AnchorGuard:
    """What ``SaveJob.guard`` asks."""

    claim: Callable[[], None]
    check: Callable[[], None]


class Publisher(Side):
    """A directory of published weights, which any number of ``Follower``s read.

    A version is a checkpoint (an *anchor*), or what changed since the version before it (a *delta*), whichever is smaller. Weights
    of bfloat16 that are one step of AdamW apart differ in few elements, so a delta may have two percent of the bytes.
    Anchors are ordinary checkpoints, ``directory/<version>``. To resume training, save with a ``Checkpointer`` elsewhere.

    With several processes, all must make the same calls in the same order. Each keeps a host copy of what it published last.

    Args:
        directory: of published versions alone; created if missing. A path or a URL.
        anchor_every: every so many versions have an anchor among them, for followers that join late or lost a delta.
        max_to_keep: how many of the newest anchors stay, at least two; None: all. Deltas stay since the second newest one.
        options: see ``Options``; a file that nobody needs any more stays for ``delete_grace_secs``.

    Raises:
        CheckpointExists: there are checkpoints that no Publisher wrote.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with ckpt.Publisher(directory) as publisher:
        ...     for step in range(3):
        ...         publisher.publish(step, {"w": jnp.full(1000, step / 2)}, cast=jnp.bfloat16)
        >>> ckpt.Follower(directory).load()["w"][:2].tolist()
        [1.0, 1.0]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        anchor_every: int = 50,
        max_to_keep: int | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(directory, options)
        self._every = whole_number("anchor_every", anchor_every)
        self._most = None if max_to_keep is None else whole_number("max_to_keep", max_to_keep)
        self._newest: int | None = None  # that this object published
        self._before: Snapshot | None = None
        self._chain = Chain()  # on process 0, like what is to be deleted: when, and what
        self._leaving: list[tuple[float, str]] = []
        self._pending: PendingSave | None = None
        self._closed = False
        self._round("open a Publisher").first(self._open)

    def _open(self) -> None:
        """On process 0: takes the directory over, and finds what an earlier Publisher left."""
        if self._local:
            refuse_file_for_steps(self.directory)
        self._backend.clean(self.directory)
        look, known = self._backend.look(self.directory), Chain()
        anchors = {name for name in look.children if look.is_checkpoint(name)}
        try:
            found = self._chain_of_directory()
            if found is None and (anchors or self._backend.is_checkpoint(self.directory)):
                raise CheckpointExists(
                    f"{self.directory} holds checkpoints that no Publisher wrote: publish into a directory of its own"
                )
            known = found or known
        except CheckpointCorrupt as error:
            logger.warning("%s", error)
        self._chain = replace(known, writer=secrets.token_hex(8))
        self._backend.put(self.directory, CHAIN_FILE, self._chain.dump())
        left = {name for name in look.hidden if name.startswith(DELTA)}
        newest = known.versions[-1].number if known.versions else None
        if newest is not None:  # else it is not known which anchors were published
            every = {name for name in anchors - known.names() if name.isdigit()}
            gone = {name for name in every if self._most is not None or int(name) > newest}
            if foreign := sorted(
                name for name in gone if not self._is_published(f"{self.directory}/{name}")
            ):
                raise CheckpointExists(
                    f"{self.directory} holds checkpoints that no Publisher wrote ({', '.join(foreign[:5])}): publish into a "
                    "directory of its own"
                )
            left |= gone
        self._delete(left - known.names())

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
        """Publishes a version of one state or of named items, in the background.

        Blocks until the version before is written, and then for the snapshot. Followers see a version when it is whole; then a
        delta is durable, and an anchor with ``Options.durable``. ``close`` waits for it. All processes must call it.

        The first version may have any number: those from that number on, of an earlier Publisher, are abandoned, and
        followers go back. It is an anchor, like the version after a failure.

        Args:
            version: a number beyond the last one that this Publisher published.
            state: one pytree or model; or name items instead.
            cast: a dtype of floats, such as ``jnp.bfloat16``, in which all arrays of floats are published.
            only: publish only these leaves, as in ``load``; followers keep the others as they are.
            **items: named items: models and pytrees.

        Raises:
            CheckpointExists: this Publisher has published this number, or a later one.
            UnsupportedLeaf: a value cannot be saved, or is no pytree of arrays, such as a data pipeline.
            ValueError: ``only`` matches no leaf.
            Exception: the error of the version before, with its own type.
        """
        with self._turn:
            self._publish(version, state, cast, only, items)

    def _publish(
        self, version: int, state: Any, cast: Any, only: Only, items: Mapping[str, Any]
    ) -> None:
        if self._closed:
            raise CheckpointError(f"{self.directory}: this Publisher is closed: open another one")
        number, dtype = check_step(version), None if cast is None else float_dtype(cast)
        self._settle()
        if self._newest is not None and number <= self._newest:
            raise CheckpointExists(
                f"{self.directory}: version {self._newest} is published, and {number} is not beyond it: publish a later number, or "
                "close this Publisher and go back with another one"
            )
        chosen = collect_items(NOTHING if state is None else state, None, items)
        fields = RecordFields(state is not None, {PUBLISHED: "all" if only is None else "part"})
        target, change = f"{self.directory}/{number}", _change(chosen, only, dtype)
        guard = AnchorGuard(functools.partial(self._claim, target), self._refuse_if_taken_over)
        job = SaveJob(
            *(target, self._local, self._backend, fields, self._options, self._processes),
            **dict[str, Any](overwrite=True, step=number, change=change, guard=guard),
        )
        together, save = self._round("publish"), Save(job, call="publish an anchor")
        take_snapshot(chosen, [save], np.copy)
        for item in save.items:
            if item.record.form != "tree":
                save.undo()
                raise UnsupportedLeaf(
                    f"item {item.name!r} is no pytree of arrays: publish weights, and save the rest with a Checkpointer"
                )
        work = functools.partial(self._write, number, save, together)
        low = self._options.background_priority == "low"
        self._pending = PendingSave(target, work, "ckpt-publish", low=low)
        self._pending.start()

    def _write(self, number: int, save: Save, together: Round) -> None:
        """In the background: writes a version, and makes it visible."""
        before, self._before = self._before, None  # after a failure the next version is an anchor
        failing = functools.partial(save.operation.failing, "save_failed")
        with failing("writing the delta"):
            now, row, error = Snapshot(), None, save.refusal
            try:
                if error is None:
                    save.land()
                    now = Snapshot.of(save)
                    row = self._put_part(number, now, before or Snapshot())
            except Exception as raised:
                error = raised
            values = json.dumps([item.values for item in save.items], sort_keys=True).encode()
            offer = json.dumps([[number, zlib.crc32(values)], save.token, row])
            anchor, token, parts = json.loads(together.decide(offer, self._judge, error=error))
        version = Version(number, token, anchor, parts)
        if row is not None and parts is None:
            self._backend.remove(self.directory, file_of(number, self._processes.index, row[1]))
        if anchor:
            save.run()
        with failing("making the version visible"):
            together.all(functools.partial(self._commit, version))
        self._before, self._newest = now, number
        if not anchor:
            save.operation.committed(sum(size for size, _ in parts or ()), save.blocking_secs)

    def _put_part(self, number: int, now: Snapshot, before: Snapshot) -> tuple[int, int] | None:
        """Writes this process's part of the delta if that is smaller than what it would write of an anchor; its size and CRC-32."""
        part = now.since(before)
        own_bytes = sum(piece.nbytes for piece in now.pieces.values())
        if part is None or (own_bytes and len(part) >= own_bytes):
            return None
        row = len(part), zlib.crc32(part)
        self._backend.put(self.directory, file_of(number, self._processes.index, row[1]), part)
        return row

    def _judge(self, offers: list[str]) -> str:
        """On process 0: whether the version has an anchor, its token and its parts. Raises if processes publish different things."""
        facts, tokens, parts = zip(*map(json.loads, offers), strict=True)
        for index, one in enumerate(facts):
            if one != facts[0]:
                raise NotTogether(
                    f"process 0 publishes version {facts[0][0]} and process {index} version {one[0]}, or other values of what no "
                    "sharding places: all processes must publish the same"
                )
        parts = None if None in parts else parts
        return json.dumps(
            [parts is None or self._chain.wants_anchor(self._every), tokens[0], parts]
        )

    def _commit(self, version: Version) -> None:
        """On process 0: makes the version visible, then deletes what no version needs any more."""
        if self._processes.index:
            return
        self._refuse_if_taken_over()
        before, self._chain = self._chain, self._chain.published(version, self._most)
        self._backend.put(self.directory, CHAIN_FILE, self._chain.dump())
        left = before.names() - self._chain.names()
        if self._most is None:  # anchors stay, but for those that were abandoned
            left = {one for one in left if not one.isdigit() or int(one) > version.number}
        self._delete(left)

    def _is_published(self, path: str) -> bool:
        """Whether a Publisher has written this checkpoint."""
        opened = open_in(self._backend, path, self._local, self._options)
        return PUBLISHED in (opened.metadata or ())

    def _claim(self, path: str) -> None:
        """On process 0, before an anchor replaces what is there: raises if no Publisher wrote that, or if another one took over."""
        self._refuse_if_taken_over()
        if self._backend.is_checkpoint(path) and not self._is_published(path):
            raise CheckpointExists(f"{path} was not published: publish into a directory of its own")

    def _refuse_if_taken_over(self) -> None:
        with contextlib.suppress(CheckpointCorrupt):  # it is written anew
            found = self._chain_of_directory()
            if found is not None and found.writer != self._chain.writer:
                raise CheckpointError(
                    f"{self.directory}: another Publisher was opened here, so this one publishes nothing more: end one "
                    "of the two programs"
                )

    def _delete(self, names: set[str]) -> None:
        """Deletes these files and anchors after ``Options.delete_grace_secs``, and what is due now."""
        now, kept = time.monotonic(), self._chain.names()
        self._leaving += [(now + self._options.delete_grace_secs, name) for name in sorted(names)]
        waiting, self._leaving = self._leaving, []
        for due, name in waiting:
            try:
                if due > now:
                    raise BlockingIOError
                if name.startswith(DELTA) and name not in kept:
                    self._backend.remove(self.directory, name)
                elif name not in kept:  # else it was published again
                    self._backend.delete(f"{self.directory}/{name}")
            except BlockingIOError:  # somebody reads it
                self._leaving.append((due, name))
            except OSError as error:
                logger.warning("%s/%s stays: %s", self.directory, name, error)

    def close(self) -> None:
        """Blocks until the last version is visible; raises its error if it failed. All processes must call it."""
        with self._turn:
            self._closed = True
            self._settle()
            self._before = None

    def _settle(self) -> None:
        """Blocks until the version before is visible; raises its error once."""
        if self._pending is not None:
            self._pending.wait()
            pending, self._pending = self._pending, None
            pending.result()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"ckpt: publishing failed too: {type(failure).__name__}: {failure}")


def _change(
    items: Mapping[str, Any], only: Only, dtype: str | None
) -> Callable[[str, FlatTree], FlatTree] | None:
    """What is published of an item's tree: the leaves that ``only=`` selects, cast."""
    if only is None and dtype is None:
        return None
    only, seen = read_again(only), list[tuple[str, list[Path]]]()

    def change(name: str, flat: FlatTree) -> FlatTree:
        paths, leaves, root = flat.paths, flat.leaves, flat.root
        if only is not None:
            select: Any = selection(only, name, items[name])
            leaf_of = zip(paths, leaves, strict=True)
            kept = [n for n, (at, leaf) in enumerate(leaf_of) if select(at, describe(leaf, at))]
            seen.append((name, paths))
            if not kept or (len(seen) == len(items) and idle_patterns(only, seen)):
                raise ValueError(
                    f"only={only!r}: it, or a pattern of it, matches no leaf of {name!r}"
                )
            root = pruned(root, {*kept}) or root
            paths, leaves = [paths[at] for at in kept], [leaves[at] for at in kept]
        return FlatTree(
            paths, leaves if dtype is None else [_cast(one, dtype) for one in leaves], root
        )

    return change


def _cast(leaf: Any, dtype: str) -> Any:
    """The leaf in this dtype if it is an array of floats."""
    deleted = isinstance(leaf, jax.Array) and leaf.is_deleted()  # which the save says
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and not deleted
    if is_array and jax.dtypes.issubdtype(leaf.dtype, np.floating) and leaf.dtype != dtype:
        return leaf.astype(dtype_from_name(dtype))
    return leaf
