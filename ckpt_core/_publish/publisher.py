"""``Publisher``: hands out the weights of a training run, version by version."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import crc32c
import numpy as np

from ckpt_core._background import PendingSave
from ckpt_core._directory import check_step, resolve
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointExists, UnsupportedLeaf
from ckpt_core._fork import HOME, forked
from ckpt_core._load import Only, float_dtype, pruned, selection
from ckpt_core._operation import logger
from ckpt_core._options import Options, checked_options
from ckpt_core._processes import Round, this_run
from ckpt_core._publish.chain import (
    CHAIN_FILE,
    DELTA,
    MOST_BYTES,
    Chain,
    DeltaFile,
    Version,
    parse_chain,
)
from ckpt_core._publish.delta import Array, Change, cells, difference, pack
from ckpt_core._save import NOTHING, RecordFields, Save, collect_items, make_job, take_snapshot
from ckpt_core._saved import open_in, refuse_file_for_steps
from ckpt_core._storage import backend_of
from ckpt_core._tree import FlatTree
from ckpt_core._tree.casts import family
from ckpt_core._tree.leaves import describe, dtype_from_name
from ckpt_core._tree.match import positions_of
from ckpt_core._tree.patterns import idle_patterns, read_again
from ckpt_core.arguments import whole_number

_ARRAYS = ("jax", "numpy", "numpy_scalar")
Place = tuple[str, int, Any]
"""Item, position of the leaf, and region, as in ``Change``."""
PUBLISHED = "published"
"""In the metadata of an anchor: "all", or "part" if ``only=`` left leaves out, which followers keep as they are."""


class Endpoint:
    """What a Publisher and a Follower have in common: the directory, and the processes of this run."""

    def __init__(self, directory: str | os.PathLike[str], options: Options | None) -> None:
        HOME.is_used = True
        if os.getpid() != HOME.pid:
            raise forked()
        self._options = checked_options(options)
        self.directory, self._local = resolve(directory)
        self._backend = backend_of(self._local, self._options)
        self._processes = this_run()
        self._turn = threading.RLock()  # what several threads call takes turns

    def _round(self, call: str, more_secs: float = 0.0) -> Round:
        limit_secs = self._options.timeout_secs + more_secs
        return self._processes.round(call, limit_secs, self.directory)

    def _read_chain(self) -> bytes | None:
        return self._backend.read(self.directory, CHAIN_FILE, MOST_BYTES)

    def _parse_chain(self, data: bytes | None) -> Chain:
        """The chain in what was read; an empty one if the file is missing or, with a warning, if it is damaged."""
        try:
            return parse_chain(data, self.directory) if data else Chain()
        except CheckpointCorrupt as error:
            logger.warning("%s", error)
            return Chain()


class Snapshot(NamedTuple):
    """What this process wrote of one version, on the host: the base of the next delta."""

    structure: Any = None  # equal in both versions of a delta
    pieces: Mapping[Place, Array] = {}

    @classmethod
    def of(cls, save: Save) -> Snapshot:
        """That of a save whose arrays are on the host."""
        pieces = dict[Place, Array]()
        for item in save.items:
            positions = {name: at for at, name in enumerate(item.names)}
            for array in item.arrays:
                for region, values in array.pieces:
                    pieces[item.name, positions[array.name], region] = cells(values)
        return cls([(item.name, item.record, item.texts) for item in save.items], pieces)

    def since(self, before: Snapshot) -> bytes | None:
        """The delta file of this process; None if ``before`` has another structure, or an anchor takes no more bytes."""
        pieces, size_bytes = self.pieces, sum(piece.nbytes for piece in self.pieces.values())
        if self.structure != before.structure or pieces.keys() != before.pieces.keys():
            return None
        found = {place: difference(before.pieces[place], piece) for place, piece in pieces.items()}
        changes = [
            Change(*place, len(data), crc32c.crc32c(pieces[place].data))
            for place, data in found.items()
            if data
        ]
        packed = pack(changes, found.values())
        return None if 0 < size_bytes <= len(packed) else packed


class Publisher(Endpoint):
    """A directory of published weights, which any number of ``Follower``s read.

    A version is an *anchor*, the ordinary checkpoint ``directory/<version>``, or a *delta*, what changed since the version before
    it, whichever is smaller. Weights of bfloat16 that are one step of AdamW apart differ in few elements, so a delta may have two
    percent of the bytes. To resume training, save with a ``Checkpointer`` elsewhere.

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
        ...     publisher.publish(0, {"w": jnp.ones(2)}, cast=jnp.bfloat16)
        >>> ckpt.Follower(directory).load()["w"].tolist()
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
        self._anchor_every = whole_number("anchor_every", anchor_every)
        most = None if max_to_keep is None else whole_number("max_to_keep", max_to_keep)
        self._max_to_keep = most
        self._newest: int | None = None  # that this object published
        self._before = Snapshot()  # of that
        self._pending: PendingSave | None = None
        self._closed = False
        self._chain = Chain()  # on process 0
        self._written: list[str] = []  # files of this process that may be in no version
        self._leaving: dict[str, float] = {}  # what this process deletes, and when
        self._round("open a Publisher").first(self._open)

    def _open(self) -> None:
        """On process 0: takes the directory over, and deletes what an earlier Publisher left."""
        if self._local:
            refuse_file_for_steps(self.directory)
        self._backend.clean(self.directory)
        data, look = self._read_chain(), self._backend.look(self.directory)
        chain, anchors = self._parse_chain(data), {*filter(look.is_checkpoint, look.children)}
        if data is None and (anchors or self._backend.is_checkpoint(self.directory)):
            raise self._foreign(anchors)
        unneeded = {name for name in look.hidden if name.startswith(DELTA)}
        if chain.versions:  # else it is not known which anchors were published
            all_stay, newest = self._max_to_keep is None, chain.versions[-1].number
            anchors = {name for name in anchors - chain.names() if name.isdigit()}
            anchors = {name for name in anchors if int(name) > newest or not all_stay}
            if foreign := [*filter(self._is_foreign, anchors)]:
                raise self._foreign(foreign)
            unneeded |= anchors
        self._chain = chain._replace(writer=secrets.token_hex(8))
        self._backend.put(self.directory, CHAIN_FILE, self._chain.dump())
        self._delete(unneeded)

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
            if self._closed:
                raise CheckpointError(
                    f"{self.directory}: this Publisher is closed: open another one"
                )
            number = check_step(version)
            self._settle()
            if self._newest is not None and number <= self._newest:
                raise CheckpointExists(
                    f"{self.directory}: version {self._newest} is published, and {number} is not beyond it: publish a later "
                    "number, or close this Publisher and go back with another one"
                )
            dtype, only = None if cast is None else float_dtype(cast), read_again(only)
            chosen = collect_items(NOTHING if state is None else state, None, items)
            self._start(number, chosen, state is not None, dtype, only)

    def _start(
        self, number: int, items: Mapping[str, Any], single: bool, dtype: str | None, only: Only
    ) -> None:
        """Takes the snapshot of a version, which is then written in the background."""
        target = f"{self.directory}/{number}"
        fields = RecordFields(single, {PUBLISHED: "all" if only is None else "part"})
        change = functools.partial(_selected_and_cast, items, only, dtype)
        refuse = self._refuse_if_taken_over
        job = make_job(
            *(target, self._local, self._backend, self._processes, fields, self._options),
            **{"overwrite": True, "step": number},
            guard=SimpleNamespace(claim=refuse, check=refuse),
            change=None if only is None and dtype is None else change,
        )
        together, save = (
            self._round(f"publish version {number}"),
            Save(job, call="publish an anchor"),
        )
        take_snapshot(items, [save], np.copy)
        trees = [(item.name, item.record.paths) for item in save.items]
        other = [item.name for item in save.items if item.record.form != "tree"]
        if other or (trees and idle_patterns(only, trees)):
            save.undo()
            if not other:
                raise ValueError(f"only={only!r}: a pattern of it matches no leaf")
            raise UnsupportedLeaf(
                f"item {other[0]!r} is no pytree of arrays: publish weights, and save the rest with a Checkpointer"
            )
        work = functools.partial(self._write, number, save, together)
        low = self._options.background_priority == "low"
        self._pending = PendingSave(target, work, "ckpt-publish", low=low)
        self._pending.start()

    def _write(self, number: int, save: Save, together: Round) -> None:
        """In the background: writes a version, and makes it visible."""
        before, self._before = self._before, Snapshot()  # after a failure the next one is an anchor
        now, file, error = Snapshot(), None, save.refusal
        failing = functools.partial(save.operation.failing, "save_failed")
        with failing("writing the delta"):
            try:
                if error is None:
                    save.land()
                    now = Snapshot.of(save)
                    if (data := now.since(before)) is not None:
                        crc = zlib.crc32(data)
                        name = f"{DELTA}{number}-{self._processes.index}-{crc:08x}"
                        file = DeltaFile(name, len(data), crc)
                        self._written.append(name)
                        self._backend.put(self.directory, name, data)
            except Exception as raised:
                error = raised
            values = json.dumps([item.values for item in save.items], sort_keys=True).encode()
            call = f"{together.call}, with values of CRC {zlib.crc32(values):08x} that no sharding places"
            together, offer = replace(together, call=call), json.dumps([save.token, file])
            combine = functools.partial(self._combine, number)
            anchor, token, delta = json.loads(together.decide(offer, combine, error=error))
        version = Version(number, token, anchor, tuple(DeltaFile(*one) for one in delta))
        if anchor:
            save.run()
        with failing("making the version visible"):
            replaced = together.all(functools.partial(self._commit, version))
        self._before, self._newest = now, number
        if not anchor:
            size_bytes = sum(file.size_bytes for file in version.delta)
            save.operation.committed(size_bytes, save.blocking_secs)
        self._delete({*replaced, *self._written} - {file.name for file in version.delta})
        self._written = []

    def _combine(self, number: int, offers: list[str]) -> str:
        """On process 0: whether the version has an anchor, its token and its delta."""
        tokens, files = zip(*map(json.loads, offers), strict=True)
        delta = () if None in files else files
        anchor = not delta or self._chain.wants_anchor(self._anchor_every)
        if anchor and self._is_foreign(str(number)):
            raise self._foreign([str(number)])
        return json.dumps([anchor, tokens[0], delta])

    def _commit(self, version: Version) -> set[str]:
        """On process 0: makes the version visible; what the chain named before."""
        if self._processes.index:
            return set()
        self._refuse_if_taken_over()
        before, chain = self._chain, self._chain.published(version, self._max_to_keep)
        self._backend.put(self.directory, CHAIN_FILE, chain.dump())
        self._chain = chain
        return before.names()

    def _is_foreign(self, name: str) -> bool:
        """Whether there is a checkpoint of this name that can be read, and that no Publisher wrote."""
        path = f"{self.directory}/{name}"
        with contextlib.suppress(CheckpointCorrupt):
            if self._backend.is_checkpoint(path):
                opened = open_in(self._backend, path, self._local, self._options)
                return PUBLISHED not in (opened.metadata or ())
        return False

    def _foreign(self, names: Iterable[str]) -> CheckpointExists:
        return CheckpointExists(
            f"{self.directory} holds checkpoints that no Publisher wrote ({', '.join(sorted(names)[:5])}): publish into a "
            "directory of its own"
        )

    def _refuse_if_taken_over(self) -> None:
        writer = self._parse_chain(self._read_chain()).writer
        if writer not in ("", self._chain.writer):  # without one it is written anew
            raise CheckpointError(
                f"{self.directory}: another Publisher was opened here, so this one publishes nothing more: end one "
                "of the two programs"
            )

    def _delete(self, names: set[str]) -> None:
        """Deletes these files and anchors after ``Options.delete_grace_secs``, and what is due now."""
        now, kept = time.monotonic(), self._chain.names()
        self._leaving |= dict.fromkeys(names, now + self._options.delete_grace_secs)
        # what was published again stays
        self._leaving = {name: due for name, due in self._leaving.items() if name not in kept}
        for name in [name for name, due in self._leaving.items() if due <= now]:
            try:
                if name.startswith(DELTA):
                    self._backend.remove(self.directory, name)
                else:
                    self._backend.delete(f"{self.directory}/{name}")
            except BlockingIOError:  # somebody reads it
                continue
            except OSError as error:
                logger.warning("%s/%s stays: %s", self.directory, name, error)
            del self._leaving[name]

    def close(self) -> None:
        """Blocks until the last version is visible; raises its error if it failed. All processes must call it."""
        with self._turn:
            self._closed = True
            self._settle()
            self._before = Snapshot()

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


def _selected_and_cast(
    items: Mapping[str, Any], only: Only, dtype: str | None, name: str, flat: FlatTree
) -> FlatTree:
    """What is published of an item: the leaves that ``only=`` selects, those of floats in ``dtype``."""
    paths, leaves, root = flat.paths, flat.leaves, flat.root
    specs = list(map(describe, leaves, paths))
    if only is not None:
        kept = positions_of(paths, specs, selection(only, name, items[name]))
        if not kept:
            raise ValueError(f"only={only!r} matches no leaf of {name!r}")
        root = pruned(root, {*kept}) or root
        paths, leaves = [paths[at] for at in kept], [leaves[at] for at in kept]
        specs = [specs[at] for at in kept]
    if dtype is not None:
        leaves = [
            leaf.astype(dtype_from_name(dtype))
            if spec.kind in _ARRAYS and family(spec.dtype) == "f" and spec.dtype != dtype
            else leaf
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
    return FlatTree(paths, leaves, root)
