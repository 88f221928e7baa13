"""What another writer does in a store between two requests of a save, a deletion or a clean-up."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import object_store, store_attempt, store_leftovers
from ckpt_core._directory.store_attempt import StoreAttempt
from ckpt_core._errors import is_visible
from ckpt_core._storage import KeyValues
from tests.support import seams
from tests.support.stores import backend, keys_at, saved, tree, value_at

RECORD = "ckpt.json"


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


@pytest.mark.parametrize("again", [False, True])
def test_who_commits_while_another_one_begins_keeps_the_checkpoint(store, again, monkeypatch):
    """The other one has seen no record, and lists what must look to it like leftovers."""
    with monkeypatch.context() as patch:
        after_first(patch, "list", lambda *_: True, lambda: ckpt.save(store, tree(1)))
        assert not saved(store, 2, overwrite=again)
    assert value_at(store) == 1 and ckpt.verify(store).ok


def test_who_saves_while_the_step_is_deleted_keeps_what_is_acknowledged(store, monkeypatch):
    ckpt.save(store, tree(1))
    with monkeypatch.context() as patch:
        # the record is deleted, and the rest is about to be
        after_first(
            patch,
            "delete",
            lambda names: len({*names}) > 1,
            lambda: ckpt.save(store, tree(2)),
        )
        backend().delete(store)
    assert value_at(store) == 2


def test_who_overwrites_while_another_one_cleans_up_keeps_the_checkpoint(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(store_attempt, "roll_forward", seams.fail(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(f"{store}/1", tree(1))

    def overwrite(*_: Any) -> None:
        ckpt.save(f"{store}/1", tree(2), overwrite=True)

    with monkeypatch.context() as patch:
        seams.at(patch, (store_leftovers, "roll_forward"), after=overwrite, nth=1)
        backend().clean(store)
    assert value_at(f"{store}/1") == 2 and ckpt.verify(f"{store}/1").ok


def test_a_listing_that_missed_the_owner_removes_no_running_attempt(store, monkeypatch):
    """Its pages are not of one moment: the owner may have come after the first, and data before the last."""
    token = "2" * 32
    running = backend().begin(store, overwrite=False, durable=True, token=token)
    data = f"state/d/{token}.{'3' * 32}"
    keys_at(store).put(data, b"data")
    listed = KeyValues.list
    with monkeypatch.context() as patch:
        patch.setattr(
            KeyValues,
            "list",
            lambda *a: [key for key in listed(*a) if not key.endswith(f"{token}.owner")],
        )
        assert saved(store, 1)
    assert keys_at(store).get(data) == b"data"
    assert keys_at(store).get(f"{running.path.removeprefix(store + '/')}.owner")


def test_an_interrupt_while_what_is_replaced_is_deleted_is_reported_as_committed(
    store, monkeypatch
):
    ckpt.save(store, tree(1))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_first(patch, "delete", lambda names: len({*names}) > 1, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            ckpt.save(store, tree(2), overwrite=True)
    assert is_visible(caught.value) and value_at(store) == 2
    backend().clean(store)
    ckpt.save(f"{store}-fresh", tree(2))
    assert len(keys_at(store).list()) == len(keys_at(f"{store}-fresh").list())


def test_who_deletes_copies_while_another_one_commits_puts_them_again(store, monkeypatch):
    """The copies that Orbax reads have names that all share."""
    ckpt.save(store, tree(1))
    ckpt.save(f"{store}-fresh", tree(2))
    whole = {key for key in keys_at(f"{store}-fresh").list() if not key.startswith(".")}
    with monkeypatch.context() as patch:
        after_first(
            patch,
            "delete",
            lambda names: "state/_METADATA" in names,
            lambda: ckpt.save(store, tree(2)),
        )
        backend().delete(store)
    assert value_at(store) == 2
    found = {key for key in keys_at(store).list() if not key.startswith(".")}
    assert {key for key in found if "/d/" not in key} == {key for key in whole if "/d/" not in key}
    assert len(found) == len(whole)


def test_a_deletion_that_died_is_finished_by_the_next_clean_up(store):
    ckpt.save(f"{store}/1", tree(1))
    keys = keys_at(f"{store}/1")
    keys.put(".deleted", b"")
    backend().clean(store)
    assert value_at(f"{store}/1") == 1
    keys.delete([RECORD])
    backend().clean(store)
    assert keys.list() == []


TOKEN = "2" * 32
DATA = f"state/d/{TOKEN}.{'3' * 32}"


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


@pytest.mark.parametrize("overwrite", [False, True])
def test_who_is_removed_just_before_its_put_takes_the_record_back(store, overwrite, monkeypatch):
    if overwrite:
        ckpt.save(f"{store}/1", tree(1))
    attempt = hung(f"{store}/1", monkeypatch, overwrite=overwrite)
    with monkeypatch.context() as patch:
        after_first(
            patch, "put_if_unchanged", lambda key, *_: key == RECORD, lambda: backend().clean(store)
        )
        with pytest.raises(ckpt.CheckpointError, match="nothing was committed"):
            attempt.commit()
    attempt.abort()
    assert value_at(f"{store}/1") == (1 if overwrite else None)
    assert not any(TOKEN in key for key in keys_at(store).list())
    assert not overwrite or ckpt.verify(f"{store}/1").ok


def test_who_commits_while_it_is_taken_for_dead_keeps_its_data(store, monkeypatch):
    """Its owner's key is emptied after it had looked there: then the record decides."""
    attempt = hung(f"{store}/1", monkeypatch)
    # as of a process whose clock is right, beside one whose clock is not
    monkeypatch.setattr(attempt, "_began", time.time())
    with monkeypatch.context() as patch:
        after_first(
            patch, "put_if_unchanged", lambda key, *_: key.endswith(".owner"), attempt.commit
        )
        backend().clean(store)
    assert keys_at(f"{store}/1").get(DATA) == b"data"
    assert json.loads(keys_at(f"{store}/1").get(RECORD) or b"")["token"] == TOKEN


def test_an_interrupted_removal_is_finished_by_the_next_clean_up(store, monkeypatch):
    hung(f"{store}/1", monkeypatch)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_first(patch, "delete", lambda names: any(DATA in key for key in names), interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend().clean(store)
    assert keys_at(f"{store}/1").get(f".attempt.{TOKEN}.owner") == b""
    backend().clean(store)
    assert keys_at(store).list() == []
