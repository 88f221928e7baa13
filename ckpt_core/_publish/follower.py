"""``Follower``: sets live models to the newest published weights."""

from __future__ import annotations

import functools
import json
import operator
import os
import time
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import crc32c

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
from ckpt_core._publish.chain import MOST_BYTES, Chain, Version, route
from ckpt_core._publish.delta import Array, Change, apply, cells, unpack
from ckpt_core._publish.publisher import PUBLISHED, Endpoint
from ckpt_core._read import Want, read_leaves
from ckpt_core._saved import Checkpoint, SavedItem, open_in
from ckpt_core._tree.leaves import TEXT_KINDS
from ckpt_core.arguments import an, seconds

_THREADS = 8
_UNFIT = (ValueError, TypeError, LookupError)
_LOOK_SECS = 0.05
"""Interval at which the file of the chain is read while somebody waits; ten times as long in a bucket."""


@dataclass(frozen=True)
class HostCopy(Checkpoint):
    """A version in host memory, which loads and restores read like a checkpoint."""

    version: Version = field(kw_only=True)

    @property
    def save_token(self) -> str:
        return self.version.token

    def change(self, change: Change, data: Array) -> None:
        """Applies a change and verifies the result; raises one of ``_UNFIT`` if it does not fit."""
        part = self.items[change.item].in_memory[change.leaf][(*region_slices(change.region), ...)]
        new = cells(part)
        apply(data, new)
        if crc32c.crc32c(new.data) != change.crc:
            raise ValueError(f"leaf {change.leaf} of {change.item!r} gets another digest")
        if not part.flags.c_contiguous:
            part[...] = new.view(part.dtype).reshape(part.shape)


class Follower(Endpoint):
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
        self._copy: HostCopy | None = None
        self._unreadable: set[tuple[str, bool]] = set()  # see ``route``
        self._last_set: tuple[str, list[Any]] = "", []  # the targets, and the token they got

    @property
    def _token(self) -> str:
        return self._copy.version.token if self._copy else ""

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
        together, deadline = self._round("follow", wait_secs), time.monotonic() + wait_secs
        waits = self._copy is None or self._is_set(targets)
        while True:
            text, is_last = together.first(functools.partial(self._wait, deadline, waits))
            with self._turn:  # a load in another thread does not wait for a newer version
                together.all(functools.partial(self._advance, text))
                mine = self._token, self._is_set(targets)
                if together.decide(json.dumps(mine), _common_token):
                    return self._set(targets)
            if is_last:
                return None
            waits = True

    def _set(self, targets: dict[str, Any]) -> int:
        """Sets the targets to the version of the copy; its number."""
        copy = self._opened()
        if targets:
            is_part = (copy.metadata or {}).get(PUBLISHED) == "part"
            missing = "keep" if is_part else "error"
            request = make_request(cast=True, missing=missing, options=self._options)
            try:
                restored = restore_checkpoint(self._opened, targets, request)
            except StructureMismatch as error:
                error.add_note("ckpt: update has no missing= and unexpected=: publish with only=")
                raise
            for name, target in targets.items():
                _fill(target, restored[name])
        self._last_set = self._token, [*targets.values()]
        return copy.version.number

    def load(self, like: Any = None) -> Any:
        """A new tree of the version that this follower stands at; of the newest one if it stands at none.

        Args:
            like: as for ``ckpt.load``: the result has its containers, dtypes and shardings.

        Raises:
            CheckpointNotFound: nothing is published.
            StructureMismatch: ``like`` does not match what was published.
        """
        if self._copy is None:
            self.update()
        request = make_request(cast=like is not None, options=self._options, like=like)
        with self._turn:
            return load_checkpoint(self._opened, like, None, request)

    def _opened(self) -> HostCopy:
        if self._copy is None:
            raise CheckpointNotFound(
                f"{self.directory}: nothing is published there that can be read: wait with update(timeout_secs=...)"
            )
        return self._copy

    def _is_set(self, targets: dict[str, Any]) -> bool:
        """Whether these very objects were set to the version of the copy."""
        token, last = self._last_set
        same = len(last) == len(targets) and all(map(operator.is_, last, targets.values()))
        return self._token == token and (same or not targets)

    def _wait(self, deadline: float, waits: bool) -> tuple[str, bool]:
        """On process 0: the content of the chain file, if it ``waits`` once that leads to a newer version; whether time is up."""
        seen, chain = None, Chain()
        while True:
            if (data := self._read_chain()) != seen:
                seen, chain = data, self._parse_chain(data)
            left_secs = deadline - time.monotonic()
            if not waits or left_secs <= 0 or route(chain, self._token, self._unreadable):
                return data.decode() if data and chain.versions else "", left_secs <= 0
            time.sleep(min(left_secs, _LOOK_SECS * (1 if self._local else 10)))

    def _advance(self, text: str) -> None:
        """Moves the copy to the newest version within reach."""
        chain = self._parse_chain(text.encode())
        tokens = {one.token for one in chain.versions}
        self._unreadable = {one for one in self._unreadable if one[0] in tokens}
        while steps := route(chain, self._token, self._unreadable):
            for version, is_anchor in steps:
                try:
                    self._copy = self._read_anchor(version) if is_anchor else self._follow(version)
                except (CheckpointCorrupt, CheckpointNotFound) as error:
                    self._unreadable.add((version.token, is_anchor))
                    logger.warning("%s: version %d is left out", error, version.number)
                    break

    def _read_anchor(self, version: Version) -> HostCopy:
        """An anchor, read into memory and verified."""
        path, items = f"{self.directory}/{version.number}", dict[str, SavedItem]()
        anchor = open_in(self._backend, path, self._local, self._options)
        if anchor.save_token != version.token:
            raise CheckpointNotFound(f"{path} is not the anchor that was published")
        with anchor.reading():
            for name, item in anchor.items.items():
                leaves, wants, text = dict[int, Any](), list[Want](), anchor.texts(item)
                for leaf, spec in enumerate(item.specs):
                    if spec.kind in TEXT_KINDS:
                        leaves[leaf] = text(leaf)
                    else:
                        wants.append(Want(leaf, [whole(spec.stored_shape)]))
                given = anchor, item, wants, self._options
                found = read_leaves(*given) if wants else ()
                leaves |= {want.leaf: array for want, parts in found for array in parts.values()}
                items[name] = replace(item, in_memory=leaves)
        place = path, anchor.location, anchor.backend
        return HostCopy(*place, items, anchor.single, anchor.metadata, version=version)

    def _follow(self, version: Version) -> HostCopy:
        """Applies a delta to the copy. After a failure midway there is none."""
        copy, contents = self._opened(), dict[str, bytes]()
        state_bytes = sum(spec.stored_bytes for item in copy.items.values() for spec in item.specs)
        most_bytes = 2 * state_bytes + MOST_BYTES
        for name, size_bytes, crc in version.delta:
            data = self._backend.read(self.directory, name, min(size_bytes, most_bytes))
            if data is None or (len(data), zlib.crc32(data)) != (size_bytes, crc):
                what = "is missing" if data is None else "is damaged: its checksum differs"
                raise CheckpointCorrupt(f"{self.directory}/{name} {what}", file=name)
            contents[name] = data
        self._copy = None
        try:
            changes = [one for file in contents.items() for one in unpack(*file, most_bytes)]
            run_each(lambda one: copy.change(*one), changes, _THREADS, "ckpt-follow")
        except _UNFIT as error:
            raise CheckpointCorrupt(
                f"{self.directory}: {', '.join(contents)}: no change of the version before: {error}"
            ) from error
        return replace(copy, version=version)


def _common_token(found: list[str]) -> str:
    """On process 0: the token that all hold, if one of them has anything to set; else empty."""
    tokens, are_set = zip(*map(json.loads, found), strict=True)
    return tokens[0] if len({*tokens}) == 1 and not all(are_set) else ""


def _fill(target: Any, new: Any) -> None:
    """Puts the leaves of a new tree into the dicts and lists of the target; a live object in it is set already."""
    if target is new:
        return
    for key in range(len(target)) if isinstance(target, list) else [*target]:
        if isinstance(target[key], (MutableMapping, list)):
            _fill(target[key], new[key])
        else:
            target[key] = new[key]
