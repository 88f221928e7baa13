"""``Follower``: sets live models to the newest published weights."""

from __future__ import annotations

import functools
import json
import operator
import os
import time
import zlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

import crc32c
import numpy as np

from ckpt_core._adapters import adapter_for
from ckpt_core._background import run_each
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    StructureMismatch,
    UnsupportedLeaf,
)
from ckpt_core._layout.regions import region_slices, whole
from ckpt_core._load import (
    NOT_PASSED,
    collect_targets,
    load_checkpoint,
    make_request,
    restore_checkpoint,
)
from ckpt_core._operation import logger
from ckpt_core._options import Options
from ckpt_core._processes import Round
from ckpt_core._publish.chain import MOST_BYTES, Chain, Version, parse_chain, route
from ckpt_core._publish.delta import Change, apply, cells, unpack
from ckpt_core._publish.side import PUBLISHED, Side
from ckpt_core._read import Want, read_leaves
from ckpt_core._saved import Checkpoint, HeldItem, NativeCheckpoint, NativeItem, open_in
from ckpt_core._tree.leaves import TEXT_KINDS
from ckpt_core.arguments import an, seconds

_THREADS = 8
_UNFIT = (ValueError, TypeError, LookupError)
_LOOK_SECS = 0.05
"""Interval at which the file of the chain is read while somebody waits; ten times as long in a bucket."""


@dataclass(frozen=True)
class Held(Checkpoint):
    """A version in host memory, which loads and restores read like a checkpoint."""

    token: str = ""
    said: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])  # texts

    @property
    def attempt(self) -> str:
        return self.token

    def texts(self, item: Any) -> Callable[[int], str]:
        return lambda leaf: self.said[item.name, leaf]

    def apply(self, change: Change, data: np.ndarray[Any, Any]) -> None:
        """Applies a change and verifies the result; raises one of ``_UNFIT`` if it does not fit."""
        item = self.items[change.item]
        assert isinstance(item, HeldItem)
        part = item.arrays[change.leaf][(*region_slices(change.region), ...)]
        new = cells(part)
        apply(data, new)
        if crc32c.crc32c(new.data) != change.crc:
            raise ValueError(f"leaf {change.leaf} of {change.item!r} gets another digest")
        if not np.shares_memory(new, part):
            part[...] = new.view(part.dtype).reshape(part.shape)


def hold(opened: NativeCheckpoint, options: Options) -> Held:
    """An anchor, read into memory and verified."""
    items, said = dict[str, Any](), dict[tuple[str, int], str]()
    with opened.held():
        for name, item in opened.items.items():
            assert isinstance(item, NativeItem)
            arrays: list[Any] = [np.empty(0, np.uint8)] * len(item.specs)
            wants: list[Want] = []
            for at, spec in enumerate(item.specs):
                if spec.kind in TEXT_KINDS:
                    said[name, at] = opened.texts(item)(at)
                else:
                    wants.append(Want(at, [whole(spec.stored_shape)]))
            found = read_leaves(opened, item, wants, options) if wants else ()
            for want, parts in found:
                (arrays[want.leaf],) = parts.values()
            known = {one.name: getattr(item, one.name) for one in fields(NativeItem)}
            items[name] = HeldItem(**known, arrays=arrays)
    place = opened.path, opened.location, opened.backend
    return Held(*place, items, opened.single, opened.metadata, token=opened.attempt, said=said)


class Follower(Side):
    """The newest version that a ``Publisher`` has published, for models that sample while it trains.

    The first update reads an anchor, and later ones what changed since. A follower keeps all weights in host memory, besides the
    models that it sets. It never blocks the Publisher, and any number of followers may read one directory.

    With several processes, all must make the same calls in the same order, and all get one version.

    Args:
        directory: that of the Publisher, which may be made later. A path or a URL.
        options: see ``Options``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> directory, params = tempfile.mkdtemp(), {"w": jnp.zeros(3)}
        >>> with ckpt.Publisher(directory) as publisher:
        ...     publisher.publish(7, params={"w": jnp.arange(3.0)})
        >>> follower = ckpt.Follower(directory)
        >>> follower.update(params=params), params["w"].tolist()
        (7, [0.0, 1.0, 2.0])
        >>> follower.update(params=params) is None
        True
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, options: Options | None = None
    ) -> None:
        super().__init__(directory, options)
        self._held: Held | None = None
        self._version = Version(-1, "", False)  # of what is held
        self._lost: set[tuple[str, bool]] = set()  # see ``route``
        self._given: tuple[str, list[Any]] = "", []  # the last targets, and the token they got

    def update(
        self, state: Any = None, /, *, timeout_secs: float | None = None, **items: Any
    ) -> int | None:
        """Sets live objects to the newest version; returns its number, or None if they stand at it or nothing is published.

        Before an object is changed, all that was read is verified, and all leaves match. What is damaged or missing is left out,
        with a warning: the version before it stays until the next anchor. All processes must call it.

        Models of NNX, Keras and torchax, dicts and lists are set in place, on their own shardings and in their own dtypes. Without
        a target only the copy in host memory moves, for ``load``.

        Args:
            state: what is set, if a state without a name was published.
            timeout_secs: wait so long for a newer version; None looks once.
            **items: for each wanted item, a live model, or a dict or list of arrays.

        Raises:
            StructureMismatch: a target does not match what was published.
            UnsupportedLeaf: a target cannot be set in place, such as a tuple.
            BarrierTimeout: a process did not come within ``Options.timeout_secs``.
        """
        wait_secs = 0.0 if timeout_secs is None else seconds("timeout_secs", timeout_secs)
        targets = collect_targets(NOT_PASSED if state is None else state, None, items)
        for name, target in targets.items():
            if not isinstance(target, (MutableMapping, list)) and adapter_for(target) is None:
                raise UnsupportedLeaf(
                    f"{name} is {an(target)}, which cannot be set in place: pass a model, a dict or a list, or take a new tree "
                    "from load(like)",
                    type_name=type(target).__name__,
                )
        return self._update(targets, wait_secs)

    def _update(self, targets: dict[str, Any], wait_secs: float) -> int | None:
        together = self._round("follow", wait_secs)
        text = together.first(functools.partial(self._wait, targets, wait_secs))
        with self._turn:  # a load in another thread does not wait for a newer version
            return self._advance_and_set(targets, together, text)

    def _advance_and_set(self, targets: dict[str, Any], together: Round, text: str) -> int | None:
        chain = parse_chain(text.encode(), self.directory) or Chain()
        together.all(functools.partial(self._advance, chain))
        mine = self._version.token, self._is_set(targets)
        token, done = json.loads(together.decide(json.dumps(mine), _judged))
        if self._held is None or not token or done:
            return None
        if targets:
            is_part = (self._held.metadata or {}).get(PUBLISHED) == "part"
            missing = "keep" if is_part else "error"
            request = make_request(cast=True, missing=missing, options=self._options)
            try:
                restored = restore_checkpoint(self._opened, targets, request)
            except StructureMismatch as error:
                error.add_note("ckpt: update has no missing= and unexpected=: publish with only=")
                raise
            for name, target in targets.items():
                _fill(target, restored[name])
        self._given = token, [*targets.values()]
        return self._version.number

    def load(self, like: Any = None) -> Any:
        """A new tree of the version that this follower stands at; of the newest one if it stands at none.

        Args:
            like: as for ``ckpt.load``: the result has its containers, dtypes and shardings.

        Raises:
            CheckpointNotFound: nothing is published.
            StructureMismatch: ``like`` does not match what was published.
        """
        if self._held is None:
            self._update({}, 0.0)
        request = make_request(cast=like is not None, options=self._options, like=like)
        with self._turn:
            return load_checkpoint(self._opened, like, None, request)

    def _opened(self) -> Held:
        if self._held is None:
            raise CheckpointNotFound(
                f"{self.directory}: nothing is published there that can be read: wait with update(timeout_secs=...)"
            )
        return self._held

    def _is_set(self, targets: dict[str, Any]) -> bool:
        """Whether these very objects were set to the version that is held."""
        token, given = self._given
        same = len(given) == len(targets) and all(map(operator.is_, given, targets.values()))
        return self._version.token == token and (same or not targets)

    def _wait(self, targets: dict[str, Any], wait_secs: float) -> str:
        """On process 0: the chain as text, once it leads to a newer version, or after the wait."""
        deadline, chain, parsed = time.monotonic() + wait_secs, Chain(), None
        while True:
            if (data := self._chain_data()) != parsed:
                parsed = data
                try:
                    chain = parse_chain(data, self.directory) or Chain()
                except CheckpointCorrupt as error:
                    chain = Chain()
                    logger.warning("%s", error)
            news = route(chain, self._version.token, self._lost) is not None
            left_secs = deadline - time.monotonic()
            if news or left_secs <= 0 or not (self._held is None or self._is_set(targets)):
                return chain.dump().decode()
            time.sleep(min(left_secs, _LOOK_SECS * (1 if self._local else 10)))

    def _advance(self, chain: Chain) -> None:
        """Moves what is held to the newest version within reach."""
        self._lost = {one for one in self._lost if one[0] in {one.token for one in chain.versions}}
        while (way := route(chain, self._version.token, self._lost)) is not None:
            step = way.anchor is not None
            version = way.anchor or self._version
            try:
                if way.anchor is not None:
                    self._held, self._version = self._anchor(version), version
                for version in way.deltas:
                    step = False
                    self._follow(version)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                self._lost.add((version.token, step))
                logger.warning("%s: version %d is left out", error, version.number)

    def _anchor(self, version: Version) -> Held:
        path = f"{self.directory}/{version.number}"
        opened = open_in(self._backend, path, self._local, self._options)
        if not isinstance(opened, NativeCheckpoint) or opened.attempt != version.token:
            raise CheckpointNotFound(f"{path} is not the anchor that was published")
        return hold(opened, self._options)

    def _follow(self, version: Version) -> None:
        """Applies a delta to what is held. After a failure midway nothing is held."""
        held, parts = self._opened(), list[bytes]()
        arrays = [array for item in held.items.values() for array in getattr(item, "arrays", ())]
        most = sum(array.nbytes for array in arrays)
        for name, (size, crc) in zip(version.files, version.parts or (), strict=True):
            data = self._backend.read(self.directory, name, min(size, 2 * most + MOST_BYTES))
            if data is None or len(data) != size or zlib.crc32(data) != crc:
                what = "is missing" if data is None else "is damaged: its checksum differs"
                raise CheckpointCorrupt(f"{self.directory}/{name} {what}", file=name)
            parts.append(data)
        self._held, self._version = None, Version(-1, "", False)
        for name, data in zip(version.files, parts, strict=True):
            try:
                changes = unpack(data, name, most)
                run_each(lambda one: held.apply(*one), changes, _THREADS, "ckpt-follow")
            except _UNFIT as error:
                raise CheckpointCorrupt(
                    f"{self.directory}/{name} is no change of the version before it: {error}",
                    file=name,
                ) from error
        self._held, self._version = held, version


def _judged(found: list[str]) -> str:
    """On process 0: the token that all have come to, empty if they differ; and whether no process has anything to set."""
    tokens, done = zip(*map(json.loads, found), strict=True)
    return json.dumps([tokens[0] if len({*tokens}) == 1 else "", all(done)])


def _fill(target: Any, new: Any) -> None:
    """Puts the leaves of a new tree into the dicts and lists of the target; a live object in it is set already."""
    if target is new:
        return
    for key in range(len(target)) if isinstance(target, list) else [*target]:
        if isinstance(target[key], (MutableMapping, list)):
            _fill(target[key], new[key])
        else:
            target[key] = new[key]
