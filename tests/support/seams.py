"""The moments at which tests make a save fail, wait, or look: the only module that knows what they are called.

========== ==============================================================================================
write      one process writes its arrays, states and checksums; on process 0 also the metadata
record     process 0 (in local directories each) writes ``ckpt.json`` as the last file, and syncs all
commit     the checkpoint becomes visible
agreement  one process sends its value to process 0 and waits for the answer; never with one process alone
begin      process 0 makes the place where an attempt is written
note       a small file of the run, such as ``.ckpt-run``, is written; gets its directory and name
delete     a checkpoint is deleted; gets its path
========== ==============================================================================================

Code of a subprocess may import it, too: it imports no pytest.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_core._directory import ObjectStoreBackend
from ckpt_core._directory.posix import LocalAttempt, PosixBackend
from ckpt_core._directory.store_attempt import StoreAttempt
from ckpt_core._processes import Round
from ckpt_core._save import Save

if TYPE_CHECKING:
    import pytest

Act = Callable[..., object]
"""Called with the arguments of the product's method, the object first: an attempt, of ``write`` a ``Save``, of
``agreement`` a ``Round``, the value and the judge."""
Point = Literal["write", "record", "commit", "agreement", "begin", "note", "delete"]
POINTS: dict[Point, list[tuple[type, str]]] = {
    "write": [(Save, "write_own")],
    "record": [(LocalAttempt, "make_durable"), (StoreAttempt, "make_durable")],
    "commit": [(LocalAttempt, "commit"), (StoreAttempt, "commit")],
    "agreement": [(Round, "decide")],
    "begin": [(PosixBackend, "begin"), (ObjectStoreBackend, "begin")],
    "note": [(PosixBackend, "put"), (ObjectStoreBackend, "put")],
    "delete": [(PosixBackend, "delete"), (ObjectStoreBackend, "delete")],
}
LIMIT_SECS = 60


def _nothing(*_: Any, **__: Any) -> None:
    pass


def at(
    patch: pytest.MonkeyPatch | None,
    point: Point | tuple[Any, str],
    *,
    before: Act = _nothing,
    after: Act = _nothing,
    where: Callable[..., bool] = lambda *_, **__: True,
    nth: int | None = None,
) -> None:
    """Acts at a moment of every save, or where a function of an owner, both given, is called: ``before`` it, or ``after`` it has
    gone well; what an act raises is raised there. ``fail`` and ``Gate`` make acts. ``patch`` takes it back when it ends; None
    leaves it until the process ends. Only calls count that ``where``, given the same arguments, is true of (``below`` makes
    some), and of these only the ``nth``, from 1; all by default.
    """
    calls = itertools.count(1)
    for owner, name in POINTS[point] if isinstance(point, str) else [point]:
        plain = getattr(owner, name)

        def seam(*arguments: Any, plain: Any = plain, **named: Any) -> Any:
            acts = where(*arguments, **named) and (nth is None or next(calls) == nth)
            if acts:
                before(*arguments, **named)
            result = plain(*arguments, **named)
            if acts:
                after(*arguments, **named)
            return result

        (setattr if patch is None else patch.setattr)(owner, name, seam)


def below(place: str | Path) -> Callable[..., bool]:
    """Whether an attempt writes below this directory or URL: for ``write``, ``record`` and ``commit``."""
    start = f"{place}/"
    return lambda one, *_: getattr(one, "attempt", one).path.startswith(start)


def names(file: str) -> Callable[..., bool]:
    """Whether a call is about a file of this name: for those of a backend, which get a path and a name."""
    return lambda _, path, name, *__: name == file


AGREEMENTS = {
    "save": ("begun", "seen", "written", "committed"),
    "save locally": ("begun", "written", "committed"),
}


def agreed(together: Round) -> str:
    """What the processes of a save are about to agree on, that all have done; empty in other calls."""
    number = int(repr(together._numbers)[len("count(") : -1])
    return dict(enumerate(AGREEMENTS.get(together.call, ()))).get(number, "")


def fail(error: type[BaseException] = OSError, *values: Any, **named: Any) -> Act:
    """An act that raises an error of this class, made anew each time; by default a full disk."""
    if error is OSError and not values:
        values = errno.ENOSPC, os.strerror(errno.ENOSPC)

    def failing(*_: Any, **__: Any) -> None:
        raise error(*values, **named)

    return failing


class Gate:
    """An act that sets ``entered`` and waits, at most a minute, until ``go`` is set, which lets all through, later ones too; then
    it raises ``error`` if there is one, which may be set while somebody waits.
    """

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def __call__(self, *_: Any, **__: Any) -> None:
        self.entered.set()
        assert self.go.wait(LIMIT_SECS), "nobody opened the gate"
        if self.error is not None:
            raise self.error
