"""``import ckpt_core`` costs little beside jax: it imports eight modules of its own, and nothing that jax does not."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

import ckpt_core as ckpt

LOADED = """
import json, sys
import jax
before = set(sys.modules)
import ckpt_core
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_the_modules_that_the_import_adds(run_python: Any) -> None:
    """Counted, not timed: it is 2 to 4 ms on a quiet machine."""
    added = run_python(LOADED)
    ours = [name for name in added if name.startswith("ckpt_core")]
    assert len(ours) <= 9, ours
    assert {name.partition(".")[0] for name in added} <= {"ckpt_core", "queue", "_queue"}, added


PASSES = """
import gc, json
import jax
import ckpt_core as ckpt

gc.set_threshold(1)
gc.collect()
before = [of["collections"] for of in gc.get_stats()]
ckpt.load
print(json.dumps([of["collections"] - at for of, at in zip(gc.get_stats(), before)]))
"""


def test_the_modules_of_a_load_come_without_a_pass_over_all_objects(run_python: Any) -> None:
    """Else there are 16,000 with this threshold."""
    assert sum(run_python(PASSES)) < 10


@pytest.fixture
def first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt.inspect`` as if nobody had used it."""
    monkeypatch.delitem(vars(ckpt), "inspect", raising=False)


@pytest.mark.usefixtures("first_use")
@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_as_it_was(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        assert callable(ckpt.inspect)
        assert gc.isenabled() is collects
    finally:
        gc.enable()


@pytest.mark.usefixtures("first_use")
def test_the_garbage_collector_is_on_again_after_an_import_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ckpt_core._verify", None)
    with pytest.raises(ImportError):
        _ = ckpt.inspect
    assert gc.isenabled()


AT_ONCE = """
import gc, json, threading
import jax
import ckpt_core as ckpt

failed = []
def use(name):
    try:
        getattr(ckpt, name)
    except BaseException as error:
        failed.append(repr(error))

names = ["Checkpointer", "convert", "events", "load", "save", "verify", "writer"]
threads = [threading.Thread(target=use, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps([gc.isenabled(), failed]))
"""


def test_threads_that_import_at_once_leave_the_garbage_collector_on(run_python: Any) -> None:
    assert run_python(AT_ONCE) == [True, []]
