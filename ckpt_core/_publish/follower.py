"""``Follower``: sets live models to the newest published weights."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np

from ckpt_core import _adapters
from ckpt_core._directory import resolve
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound, UnsupportedLeaf
from ckpt_core._fork import HOME, forked
from ckpt_core._layout.regions import region_slices, whole
from ckpt_core._load import (
    NOT_PASSED,
    collect_targets,
    load_checkpoint,
    make_request,
    restore_checkpoint,
)
from ckpt_core._operation import logger
from ckpt_core._options import Options, checked_options
from ckpt_core._processes import this_run
from ckpt_core._publish import chain as chains
from ckpt_core._publish.chain import Chain, Version
from ckpt_core._publish.delta import MASK, Change, apply, cells, digest, unpack
from ckpt_core._publish.publisher import PARTIAL
from ckpt_core._read import Want, read_leaves
from ckpt_core._run.in_flight import Turns, in_turn
from ckpt_core._saved import Checkpoint, HeldItem, NativeCheckpoint, NativeItem, open_in
from ckpt_core._storage import backend_of, new_context
from ckpt_core._tree.leaves import TEXT_KINDS
from ckpt_core.arguments import an, answering, seconds

_LOOK_SECS = 0.05
"""Interval at which the file of the chain is read while somebody waits."""
_LOOK_IN_BUCKET_SECS = 0.5


@dataclass(frozen=True)
class Held(Checkpoint):
    """A version in host memory, which loads and restores read like a checkpoint."""

    token: str = ""
    said: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])  # texts
    digests: dict[tuple[Any, ...], int] = field(default_factory=dict[Any, int])  # of regions

    @property
    def attempt(self) -> str:
        return self.token

    def texts(self, item: Any) -> Callable[[int], str]:
        return lambda leaf: self.said[item.name, leaf]

    def array(self, change: Change) -> np.ndarray[Any, Any]:
        """The leaf that a change is of; ValueError if there is none, or no such region of it."""
        item = self.items.get(change.item)
        if not isinstance(item, HeldItem) or not 0 <= change.leaf < len(item.arrays):
            raise ValueError(f"it has a leaf {change.leaf} of item {change.item!r}")
        array = item.arrays[change.leaf]
        bounds = itertools.zip_longest(change.region, array.shape)
        if not all(
            part and size is not None and 0 <= part[0] <= part[1] <= size for part, size in bounds
        ):
            raise ValueError(f"it has the region {change.region} of shape {array.shape}")
        return array

    def size_bytes(self) -> int:
        """Of all arrays."""
        return sum(
            array.nbytes for item in self.items.values() for array in cast("HeldItem", item).arrays
        )


def hold(opened: NativeCheckpoint, options: Options) -> Held:
    """An anchor, read into memory and verified."""
    items, said = dict[str, Any](), dict[tuple[str, int], str]()
    with opened.held():
        for name, item in opened.items.items():
            if not isinstance(item, NativeItem) or item.form != "tree":
                continue
            arrays: list[Any] = [np.empty(0, np.uint8)] * len(item.specs)
            wants: list[Want] = []
            for at, spec in enumerate(item.specs):
                if spec.kind in TEXT_KINDS:
                    said[name, at] = opened.texts(item)(at)
                else:
                    wants.append(Want(at, [whole(spec.stored_shape)]))
            for want, parts in read_leaves(opened, item, wants, options, new_context()):
                (arrays[want.leaf],) = parts.values()
            known = {one.name: getattr(item, one.name) for one in fields(NativeItem)}
            items[name] = HeldItem(**known, arrays=arrays)
    place = opened.path, opened.location, opened.backend
    return Held(*place, items, opened.single, opened.metadata, token=opened.attempt, said=said)


class Follower:
    """The newest version that a ``Publisher`` has published to a directory, for models that sample while it trains.

    A follower keeps the weights it stands at in host memory, besides the models that it sets. The first update reads the newest
    anchor, and later ones only what changed since the last one. It never blocks the Publisher, and any number of followers may
    read one directory.

    With several processes in one ``jax.distributed`` run, all must make the same calls in the same order, and all get the same
    version. Each reads all of it.

    Args:
        directory: that of the Publisher, which may come later. A path or a URL.
        options: see ``Options``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with ckpt.Publisher(directory) as publisher:
        ...     publisher.publish(7, params={"w": jnp.arange(3.0)})
        >>> params = {"w": jnp.zeros(3)}
        >>> follower = ckpt.Follower(directory)
        >>> follower.update(params=params), params["w"].tolist()
        (7, [0.0, 1.0, 2.0])
        >>> follower.update(params=params) is None
        True
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, options: Options | None = None
    ) -> None:
        HOME.is_used = True
        if os.getpid() != HOME.pid:
            raise forked()
        self._options = checked_options(options)
        self.directory, self._local = resolve(directory)
        self._backend = backend_of(self._local, self._options)
        self._processes = this_run()
        self._turns = Turns(self.directory, [], self._options.timeout_secs)
        self._held: Held | None = None
        self._version: Version | None = None  # of what is held
        self._lost: set[str] = set()  # see ``chain.route``
        self._given: tuple[str, list[Any]] = (
            "",
            [],
        )  # the last targets, and the token they were set to
        self._told = ""  # the last damage of the chain's file

    @in_turn
    def update(
        self, state: Any = None, /, *, timeout_secs: float | None = None, **items: Any
    ) -> int | None:
        """Sets live objects to the newest version; returns its number, or None if they stand at it, or nothing is published.

        Reads what changed since the version that this follower holds, and verifies it. Without that (the first time,
        or if a delta is missing or damaged) it reads an anchor. A version is set as a whole: before an object is
        changed, all bytes are verified and all leaves match. A damaged version is left out, with a warning.

        Models of NNX, Keras and torchax, dicts and lists are set in place, on their own shardings and in their own dtypes. Without
        a target only the copy in host memory moves, for ``load``.

        Args:
            state: what is set, if a state without a name was published.
            timeout_secs: wait so long for a newer version; None looks once.
            **items: for each wanted item, a live model, or a dict or list of arrays.

        Raises:
            StructureMismatch: the target does not match what was published.
            UnsupportedLeaf: a target cannot be set in place, such as a tuple: use ``load``.
            BarrierTimeout: a process did not come within ``Options.timeout_secs``.
        """
        wait_secs = 0.0 if timeout_secs is None else seconds("timeout_secs", timeout_secs)
        targets = collect_targets(NOT_PASSED if state is None else state, None, items)
        for name, target in targets.items():
            if (
                not isinstance(target, (MutableMapping, list))
                and _adapters.adapter_for(target) is None
            ):
                raise UnsupportedLeaf(
                    f"{name} is {an(target)}, which cannot be set in place: pass a model, a dict or a list, or take the new "
                    "tree from load(like)",
                    type_name=type(target).__name__,
                )
        return self._update(targets, wait_secs)

    def _update(self, targets: dict[str, Any], wait_secs: float) -> int | None:
        limit_secs = self._options.timeout_secs + wait_secs
        together = self._processes.round("follow", limit_secs, self.directory)
        text = together.first(functools.partial(self._wait, targets, wait_secs))
        chain = chains.parse_chain(text.encode() or None, self.directory) or Chain()
        together.all(functools.partial(self._advance, chain))
        mine = self._version.token if self._version else "", self._is_set(targets)
        token, done = json.loads(together.decide(json.dumps(mine), _judged))
        if not token or done:
            return None
        held, version = self._held, self._version
        assert held is not None
        assert version is not None
        if targets:
            partial = isinstance(held.metadata, dict) and PARTIAL in held.metadata
            missing = "keep" if partial else "error"
            request = make_request(cast=True, missing=missing, options=self._options)
            restored = restore_checkpoint(lambda: held, targets, request)
            for name, target in targets.items():
                _fill(target, restored[name])
        self._given = token, [*targets.values()]
        return version.number

    @in_turn
    def load(self, like: Any = None) -> Any:
        """A new tree of the version that this follower stands at; of the newest one if it stands at none.

        Args:
            like: as for ``ckpt.load``: the result has its containers, dtypes and shardings. Without it arrays go where they were
                published from, or to the default device.

        Raises:
            CheckpointNotFound: nothing is published.
            StructureMismatch: ``like`` does not match what was published.
        """
        if self._held is None:
            self._update({}, 0.0)
        held = self._held
        if held is None:
            raise CheckpointNotFound(
                f"{self.directory}: nothing is published there yet, or none of it can be read: wait for it with "
                "update(timeout_secs=...), or check the path"
            )
        request = make_request(cast=like is not None, options=self._options, like=like)
        return load_checkpoint(lambda: held, like, None, request)

    @property
    def version(self) -> int | None:
        """The number of the version that this follower holds; None if it holds none."""
        return None if self._version is None else self._version.number

    def _is_set(self, targets: dict[str, Any]) -> bool:
        """Whether these very objects were set to the version that is held."""
        token, given = self._given
        same = len(given) == len(targets) and all(map(_is, given, targets.values()))
        return self._version is not None and self._version.token == token and same

    def _wait(self, targets: dict[str, Any], wait_secs: float) -> str:
        """On process 0: the chain as text, once it leads to a newer version, or after the wait."""
        deadline = time.monotonic() + wait_secs
        while True:
            data = self._backend.read(self.directory, chains.CHAIN_FILE, chains.MOST_BYTES)
            try:
                chain = chains.parse_chain(data, self.directory) or Chain()
            except CheckpointCorrupt as error:
                data, chain = None, Chain()
                if str(error) != self._told:
                    self._told = str(error)
                    logger.warning("%s", error)
            held = None if self._version is None else self._version.token
            news = chains.route(chain, held, self._lost) is not None
            left_secs = deadline - time.monotonic()
            if news or left_secs <= 0 or (held is not None and not self._is_set(targets)):
                return (data or b"").decode()
            time.sleep(min(left_secs, _LOOK_SECS if self._local else _LOOK_IN_BUCKET_SECS))

    def _advance(self, chain: Chain) -> None:
        """Moves what is held to the newest version that can be reached."""
        self._lost &= {
            key for one in chain.versions for key in (chains.anchor_key(one), chains.delta_key(one))
        }
        while True:
            held = None if self._version is None else self._version.token
            way = chains.route(chain, held, self._lost)
            if way is None:
                return
            key = ""
            try:
                if way.anchor is not None:
                    key = chains.anchor_key(way.anchor)
                    self._held = self._anchor(way.anchor)
                    self._version = way.anchor
                for version in way.deltas:
                    key = chains.delta_key(version)
                    self._follow(version)
                    self._version = version
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                self._lost.add(key)
                self._version = self._version if self._held is not None else None
                logger.warning("%s: it is left out", error)

    def _anchor(self, version: Version) -> Held:
        path = f"{self.directory}/{version.number}"
        opened = open_in(self._backend, path, self._local, self._options)
        if not isinstance(opened, NativeCheckpoint) or opened.attempt != version.token:
            raise CheckpointNotFound(f"{path} is no longer the anchor that was published")
        return hold(opened, self._options)

    def _follow(self, version: Version) -> None:
        """Applies a delta to what is held. After a failure midway nothing is held."""
        held = self._held
        assert held is not None
        most, parts = held.size_bytes(), list[tuple[str, bytes]]()
        for name, (size, crc) in zip(version.files, version.parts or (), strict=True):
            data = self._backend.read(self.directory, name, min(size, 2 * most + chains.MOST_BYTES))
            if data is None or len(data) != size or zlib.crc32(data) != crc:
                what = "is missing" if data is None else "is damaged: its checksum differs"
                raise CheckpointCorrupt(f"{self.directory}/{name} {what}", file=name)
            parts.append((name, data))
        for name, data in parts:
            try:
                changes, rest = unpack(data, name, most)
                self._held = None
                for change in changes:
                    rest = _apply(held, change, rest)
                self._held = held
            except (ValueError, TypeError, IndexError, OverflowError) as error:
                raise CheckpointCorrupt(
                    f"{self.directory}/{name} does not fit the version before it: {error}",
                    file=name,
                ) from error


def _apply(held: Held, change: Change, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Applies one change and verifies the digest; returns the data of the next ones."""
    array = held.array(change)
    flat, key = cells(array), change[:3]
    known = held.digests.get(key)
    if known is None:
        known = digest(cells(array[region_slices(change.region)]))
    size = change.size_bytes(flat.itemsize)
    moved = apply(change, data[:size], flat, array.shape)
    if (known + moved) & MASK != change.digest:
        raise ValueError(f"the digest of leaf {change.leaf} of item {change.item!r} differs")
    held.digests[key] = change.digest
    return data[size:]


def _judged(found: list[str]) -> str:
    """On process 0: the token to which all have come, empty if not to one; and whether no process has anything to set."""
    all_of = [json.loads(one) for one in found]
    tokens = {token for token, _ in all_of}
    return json.dumps([tokens.pop() if len(tokens) == 1 else "", all(done for _, done in all_of)])


def _is(one: object, other: object) -> bool:
    return one is other


def _fill(target: Any, new: Any) -> None:
    """Puts the leaves of a new tree into the dicts and lists of the target; a live object in it is set already."""
    if target is new or not isinstance(target, (MutableMapping, list)):
        return
    keys = range(len(target)) if isinstance(target, list) else [*target]
    for key in keys:
        if isinstance(target[key], (MutableMapping, list)):
            _fill(target[key], new[key])
        else:
            target[key] = new[key]


setattr(Follower, "__init__", answering(Follower.__init__))  # noqa: B010
