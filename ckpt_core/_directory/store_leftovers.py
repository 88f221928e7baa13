"""What dead writers left in an object store, and what of it may be deleted while others write there.

A listing is not of one moment: its pages come one after another, and other writers go on. So nothing that carries
the token of an attempt is deleted before its owner and the record were read after the listing (``strays``). Copies
have names that all attempts share; after deleting them, those of a checkpoint that was committed meanwhile are
put again (``settle``).
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Sequence

from ckpt_core._directory.owner import lives
from ckpt_core._directory.store_attempt import (
    DESCRIPTION,
    FOREIGN_ATTEMPT_SECS,
    OWNER,
    RECORD,
    Keys,
    attempts_in,
    committed_token,
    is_of,
    remove_attempt,
    roll_forward,
    settle,
    tidying,
    token_of,
)
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.packed import apart
from ckpt_core._format.record import load_record

DELETED = ".deleted"
"""Key that a deletion puts before it removes the record: what is left beside it belongs to nobody. It holds the folders
in the checkpoint that look like checkpoints, and are files that a user saved in it; mostly none."""
OF_ATTEMPT = re.compile(r"^\.attempt\.([^./]+)\.|/d/([0-9a-f]{32})\.[0-9a-f]{32}$")
"""Files of an attempt; without its owner, and without its record, they belong to nobody."""
_COPY = re.compile(
    r"_CHECKPOINT_METADATA|commit_success\.txt|[^/]+/(_METADATA|_sharding|_strings\.json|manifest\.ocdbt|metadata|"
    r"commit_success\.txt|data\.json|metrics|(exact/)?process_[^/]+|(checksums|array_metadatas)/process_[0-9]+|"
    r"(ocdbt\.(linked|process_[0-9]+)/)?d/[0-9a-f.]+)"
)
"""Names of the copies for Orbax, of a checkpoint whose items are one level below it; and of data that `ckpt cp` brought."""


def strays(
    keys: Keys, present: Iterable[str], deleted: str | None = None, own: Sequence[str] = ()
) -> list[str]:
    """Those of the keys, from an earlier listing, that belong to attempts which have ended, and not to the checkpoint
    that is there. An attempt puts its owner's key first and deletes it last, after its commit. So no owner, and after
    that a record of another attempt, mean that it ended without a commit, or that its checkpoint was replaced.
    ``deleted`` and ``own`` are as for ``delete_rest``.
    """
    found: dict[str, list[str]] = {}
    for key in outside_of_others(present, own):
        if writer := OF_ATTEMPT.search(key):
            found.setdefault(writer[1] or writer[2], []).append(key)
    ended = [token for token in found if token == deleted or keys.get(apart(token, OWNER)) is None]
    committed = token_of(keys.get(RECORD)) if ended else None
    return [key for token in ended if token != committed for key in found[token]]


def only_copies(keys: Keys, present: Iterable[str]) -> bool:
    """Whether an attempt died here, and all keys that belong to no attempt may be its copies. When it began, there
    was nothing else, but that may be long ago, and steps may be in here since.
    """
    present = list(present)
    known = {*written_by_attempts(present), DELETED}
    others = [key for key in present if key not in known and not OF_ATTEMPT.search(key)]
    here = [token for token, place in attempts_in(present).items() if not place]
    return all(map(_COPY.fullmatch, others)) and any(is_dead(keys, token) for token in here)


def delete_rest(
    keys: Keys, present: Iterable[str], deleted: str | None = None, own: Sequence[str] | None = None
) -> None:
    """Where there is no checkpoint: deletes the keys of an earlier listing but those of attempts that may be running;
    the mark of the deletion last. ``deleted`` is the token of the checkpoint, if the caller has deleted its record.
    ``own`` are the folders in it that look like checkpoints; None asks the mark.
    """
    present = list(present)
    if own is None:
        own = _marked_folders(keys) if DELETED in present else ()
    present = outside_of_others(present, own)
    kept = {*written_by_attempts(present), RECORD, DELETED}
    left = strays(keys, present, deleted, own)
    owner = apart(deleted or "", OWNER)
    if owner in left and not is_dead(keys, deleted or ""):
        left.remove(owner)  # it is still copying, and deletes this when it sees that it was deleted
    remove_attempt(keys, left)
    keys.delete(key for key in present if key not in kept and not OF_ATTEMPT.search(key))
    keys.delete([DELETED])
    settle(keys)


def outside_of_others(present: Iterable[str], own: Sequence[str] = ()) -> list[str]:
    """The keys that lie in no other checkpoint, below this one. ``own`` are folders that look like checkpoints, and
    are files of this one.
    """
    present = list(present)
    inside = tuple(folder for folder in _folders(present) if folder not in own)
    return [key for key in present if not (inside and key.startswith(inside))]


def _folders(present: Iterable[str]) -> list[str]:
    """The folders among these keys that look like checkpoints, ending with ``/``."""
    found = {
        key.rpartition("/")[0] + "/"
        for key in present
        if key.endswith((f"/{RECORD}", f"/{DESCRIPTION}"))
    }
    return sorted(found)


def own_folders(present: Iterable[str], record: bytes | None) -> list[str]:
    """Of the folders that look like checkpoints, those that a user saved in this one as files, by its ``record``."""
    folders = _folders(present)
    if not folders or record is None:
        return []
    with contextlib.suppress(CheckpointCorrupt):
        mine = {*_folders(load_record(record).files)}
        return [folder for folder in folders if folder in mine]
    return []


def _marked_folders(keys: Keys) -> list[str]:
    """The folders that the mark of a deletion names."""
    with contextlib.suppress(ValueError):
        said = json.loads(keys.get(DELETED) or b"[]")
        return [one for one in said if isinstance(one, str)] if isinstance(said, list) else []
    return []


def mark(own: Sequence[str]) -> bytes:
    """The content of ``DELETED``."""
    return json.dumps(own).encode() if own else b""


def written_by_attempts(present: Iterable[str], but: str | None = None) -> list[str]:
    """The keys that belong to attempts whose owners are among the keys, but for the one with a token."""
    attempts = {token: place for token, place in attempts_in(present).items() if token != but}
    return [
        key
        for key in present
        if any(
            key.startswith(place) and is_of(key[len(place) :], token)
            for token, place in attempts.items()
        )
    ]


def of_dead_attempts(keys: Keys, present: list[str]) -> list[str]:
    """What attempts of dead processes left, below all checkpoints."""
    return [key for token, place in _dead(keys, present) for key in _of(token, place, present)]


def remove_dead_attempts(keys: Keys, present: list[str]) -> list[str]:
    """Deletes what attempts of dead processes left; returns the keys, if that was allowed."""
    with tidying():
        ended = [
            (token, place) for token, place in _dead(keys, present) if _end(keys, token, place)
        ]
        removed = [key for token, place in ended for key in _of(token, place, present)]
        remove_attempt(keys, removed)
        return removed
    return []


def _dead(keys: Keys, present: list[str]) -> list[tuple[str, str]]:
    """Token and place of the attempts that died before they had committed."""
    return [
        (token, place)
        for token, place in attempts_in(present).items()
        if is_dead(keys, token, place) and token_of(keys.get(f"{place}{RECORD}")) != token
    ]


def _of(token: str, place: str, present: list[str]) -> list[str]:
    return [key for key in present if key.startswith(place) and is_of(key[len(place) :], token)]


def _end(keys: Keys, token: str, place: str) -> bool:
    """Empties the owner's key of an attempt that is taken for dead; returns whether its data may be deleted now. Its
    process may only have hung. From here on it commits nothing (``StoreAttempt.commit``), and if it just has, the
    record tells.
    """
    key = place + apart(token, OWNER)
    owner, version = keys.get_version(key)
    if owner is None or (owner and not keys.put_if_unchanged(key, b"", version)):
        return False
    return token_of(keys.get(f"{place}{RECORD}")) != token


def finish(keys: Keys, token: str) -> None:
    """Finishes what a process had committed: its copies, and the deletion of what it replaced."""
    present = keys.list()
    roll_forward(keys, token)
    if committed_token(keys) == token:
        keys.delete(strays(keys, present))
        keys.delete([apart(token, OWNER)])


def is_dead(keys: Keys, token: str, place: str = "") -> bool:
    """Whether the process that began an attempt is gone; a guess by age for one on another host. An empty key is that
    of an attempt which was taken for dead, with an interrupted removal (``_end``).
    """
    said = keys.get(place + apart(token, OWNER))
    if said == b"":
        return True
    process, _, rest = (said or b"").decode(errors="replace").partition(" ")
    living = lives(process)
    if living is not None:
        return not living
    began = rest.partition(" ")[0]
    return began.isdigit() and time.time() - int(began) > FOREIGN_ATTEMPT_SECS
