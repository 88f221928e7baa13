"""What another writer does in a store between two requests of a save, a deletion or a clean-up."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import object_store
from ckpt_core._directory.store_attempt import StoreAttempt
from ckpt_core._storage import KeyValues
from tests.support.stores import backend, keys_at, saved, tree, value_at

RECORD = "ckpt.json"
TOKEN = "2" * 32
DATA = f"state/d/{TOKEN}.{'3' * 32}"


def after_first(patch: Any, name: str, when: Callable[..., bool], then: Callable[[], Any]) -> None:
    """Calls ``then`` before the first call of a method of KeyValues for which ``when`` is true."""
    real, pending = getattr(KeyValues, name), [then]

    def method(keys: KeyValues, *arguments: Any) -> Any:
        if arguments and name == "delete":
            arguments = ([*arguments[0]],)
        if pending and when(*arguments):
            pending.pop()()
        return real(keys, *arguments)

    patch.setattr(KeyValues, name, method)


def test_a_listing_that_missed_the_owner_removes_no_running_attempt(store, monkeypatch):
    """Its pages are not of one moment: the owner may have come after the first, and data before the last."""
    running = backend().begin(store, overwrite=False, durable=True, token=TOKEN)
    keys_at(store).put(DATA, b"data")
    listed = KeyValues.list
    with monkeypatch.context() as patch:
        patch.setattr(
            KeyValues,
            "list",
            lambda *a: [key for key in listed(*a) if not key.endswith(f"{TOKEN}.owner")],
        )
        assert saved(store, 1)
    assert keys_at(store).get(DATA) == b"data"
    assert keys_at(store).get(f"{running.path.removeprefix(store + '/')}.owner")


def test_what_another_tool_is_uploading_is_left_alone(store):
    ckpt.save(f"{store}/a", tree(1))
    source, copy = keys_at(f"{store}/a"), keys_at(f"{store}/b")
    copy.put_all({key: source.get(key) or b"" for key in source.list() if "c" not in key[:1]})
    copy.put(f".attempt.{TOKEN}.state!0checksums!0process_1", b"{}")
    before = copy.list()
    assert backend().clean(store) == [] and copy.list() == before


def hung(url: str, monkeypatch: Any, *, overwrite: bool = False) -> StoreAttempt:
    """An attempt of another host, which began two days ago, has put its data and is about to commit."""
    began = time.time() - 2 * 24 * 3600
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: began)
        patch.setattr(object_store, "this_owner", lambda: "00000000-17-5")
        attempt = backend().begin(url, overwrite=overwrite, durable=True, token=TOKEN)
    keys_at(url).put(DATA, b"data")
    attempt.make_durable(RECORD, b'{"token":"%s"}' % TOKEN.encode())
    return attempt


@pytest.mark.parametrize("overwrite", [False, True])
def test_who_wakes_up_while_it_is_removed_commits_nothing(store, overwrite, monkeypatch):
    if overwrite:
        ckpt.save(f"{store}/1", tree(1))
    attempt = hung(f"{store}/1", monkeypatch, overwrite=overwrite)

    def wake_up() -> None:
        keys_at(f"{store}/1").delete([DATA])  # the first of what is about to be deleted
        with pytest.raises(ckpt.CheckpointError, match="nothing was committed"):
            attempt.commit()

    with monkeypatch.context() as patch:
        after_first(patch, "delete", lambda names: any(DATA in name for name in names), wake_up)
        backend().clean(store)
    assert value_at(f"{store}/1") == (1 if overwrite else None)
    assert not any(TOKEN in key for key in keys_at(store).list())


def test_who_commits_while_it_is_taken_for_dead_keeps_its_data(store, monkeypatch):
    """Its owner's key is emptied after it had looked there: then the record decides."""
    attempt = hung(f"{store}/1", monkeypatch)
    with monkeypatch.context() as patch:
        after_first(patch, "put", lambda key, *_: key.endswith(".owner"), attempt.commit)
        backend().clean(store)
    assert keys_at(f"{store}/1").get(DATA) == b"data"
    assert json.loads(keys_at(f"{store}/1").get(RECORD) or b"")["token"] == TOKEN
