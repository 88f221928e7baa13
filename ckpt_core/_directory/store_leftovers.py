"""What writers left at a place in an object store, and what of it may be deleted while others write there.

A place holds the checkpoint of its record, and what attempts that may live have written. ``tidy`` deletes the rest. A
listing is not of one moment: nothing of an attempt is deleted before its owner and then the record were read. Copies
have names that all attempts share: after some were deleted, those of a checkpoint that was committed meanwhile are put
again (``settle``).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence

from ckpt_core._directory.owner import lives
from ckpt_core._directory.store_attempt import (
    DESCRIPTION,
    OWNER,
    RECORD,
    Keys,
    attempts_in,
    remove_all,
    settle,
    token_in,
    token_of,
)
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.packed import STAGING, apart
from ckpt_core._format.record import load_record

FOREIGN_ATTEMPT_SECS = 24 * 3600.0
"""Age after which an attempt of a process on another host counts as left over."""
_MARK = b'"requires":"ckpt.json"'
MARKED = b"{" + _MARK + b"}"
"""The description that a deletion puts where there is none of ckpt: what has one is nothing without a record."""
_COPY = re.compile(
    r"_CHECKPOINT_METADATA|commit_success\.txt|[^/]+/(_METADATA|_sharding|_strings\.json|manifest\.ocdbt|metadata|"
    r"commit_success\.txt|data\.json|metrics|(exact/)?process_[^/]+|(checksums|array_metadatas)/process_[0-9]+|"
    r"(ocdbt\.(linked|process_[0-9]+)/)?d/[0-9a-f.]+)"
)
"""Names of the copies for Orbax, of a checkpoint whose items are one level below it; and of data that `ckpt cp` brought."""


def tidy(keys: Keys, *, only_look: bool = False) -> list[str]:
    """Deletes what belongs neither to the checkpoint at a place nor to an attempt that may live, and finishes the
    copies of that checkpoint; returns what it deleted or, if it is to ``only_look``, would delete.
    """
    listed = keys.list()
    begun = attempts_in(listed)
    said = {one: keys.get(apart(one, OWNER)) for one, place in begun.items() if not place}
    own = [folder for owner in said.values() for folder in _own_folders(owner or b"")]
    below = {token for token, place in begun.items() if place}
    present = [key for key in outside_of_others(listed, own) if token_in(key) not in below]
    for one in filter(None, map(token_in, present)):
        if one not in said:
            said[one] = keys.get(apart(one, OWNER))
    died = [one for one, owner in said.items() if owner and owner[:1] != b"[" and _is_dead(owner)]
    if died and not only_look:
        for token in died:  # who may only have hung commits nothing from here on
            keys.put(apart(token, OWNER), b"")
        return tidy(keys)  # by a listing that has all that they wrote
    # an attempt puts its owner's key first, and deletes it last
    ended = {token for token, owner in said.items() if not owner or _is_dead(owner)}
    owners = [apart(token, OWNER) for token in ended if said[token] is not None]
    record = keys.get(RECORD)
    committed = token_of(record)
    if record is not None:
        kept = files_of(record)
        if kept is None:  # it is damaged, and may be repaired
            return []
        ended -= {committed}
        gone = [key for key in present if token_in(key) in ended and key not in kept]
    elif is_left(keys, present):
        gone = [key for key in present if token_in(key) in {None, *ended} and key != RECORD]
    else:
        here = {token_in(key) for key in present if key.startswith(STAGING)}
        gone = [key for key in present if token_in(key) in ended & here]
    if not only_look and (gone or said.get(committed or "") is not None):
        remove_all(keys, [key for key in gone if key not in owners])
        settle(keys)
        keys.delete(owners)  # at last: by them the next one finds what is unfinished here
    return gone


def _is_dead(said: bytes) -> bool:
    """Whether the owner who put this is gone; a guess by age for one on another host."""
    if said[:1] in (b"", b"["):  # what ``tidy`` puts, and a deletion
        return True
    process, _, rest = said.decode(errors="replace").partition(" ")
    living = lives(process)
    if living is not None:
        return not living
    began = rest.partition(" ")[0]
    return began.isdigit() and time.time() - int(began) > FOREIGN_ATTEMPT_SECS


def _own_folders(said: bytes) -> list[str]:
    """The ``own`` of ``outside_of_others``, from the owner's key of a deletion."""
    try:
        found = json.loads(said) if said[:1] == b"[" else []
    except ValueError:
        return []
    return [one for one in found if isinstance(one, str)]


def is_marked(keys: Keys, present: Iterable[str]) -> bool:
    """Whether these are files of ckpt that are nothing without a record."""
    return DESCRIPTION in present and _MARK in (keys.get(DESCRIPTION) or b"")


def is_left(keys: Keys, present: Sequence[str]) -> bool:
    """Whether the files at a place without a record are left of a deletion, or may be copies of attempts that died
    there: when those began there was nothing else, but somebody may have put more since.
    """
    if is_marked(keys, present):
        return True
    others = (key for key in present if token_in(key) is None and key != RECORD)
    owners = [token for token, place in attempts_in(present).items() if not place]
    return (
        bool(owners)
        and all(map(_COPY.fullmatch, others))
        and all(_is_dead(keys.get(apart(token, OWNER)) or b"") for token in owners)
    )


def files_of(record: bytes | None) -> Iterable[str] | None:
    """The names of the files of a checkpoint; None if its record is damaged."""
    try:
        return load_record(record).files if record else ()
    except CheckpointCorrupt:
        return None


def outside_of_others(present: Iterable[str], own: Sequence[str] = ()) -> list[str]:
    """The keys that lie in no other checkpoint, below this one. ``own`` are folders that look like checkpoints, and
    are files of this one.
    """
    present = list(present)
    inside = tuple(folder for folder in folders(present) if folder not in own)
    return [key for key in present if not (inside and key.startswith(inside))]


def folders(present: Iterable[str]) -> list[str]:
    """The folders among these keys that look like checkpoints, ending with ``/``."""
    signs = (f"/{RECORD}", f"/{DESCRIPTION}")
    return sorted({key.rpartition("/")[0] + "/" for key in present if key.endswith(signs)})
