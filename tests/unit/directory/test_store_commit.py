"""In a store, one conditional put decides, whatever another writer does between two requests; one that refuses is no damage."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import object_store
from ckpt_core._directory.store_attempt import StoreAttempt
from ckpt_core._errors import is_visible
from ckpt_core._storage import KeyValues, location
from tests.support.gcs_server import Request
from tests.support.stores import backend, keys_at, saved, tree, value_at

RECORD, COMMIT = "ckpt.json", "commit_success.txt"


def test_a_checkpoint_is_not_saved_into_another_one(store):
    ckpt.save(store, tree(1))
    with pytest.raises(ckpt.CheckpointExists, match="lies inside"):
        ckpt.save(f"{store}/best/one", tree(2))


def test_a_directory_of_steps_is_not_overwritten(store):
    """Flat steps of Orbax, each with its _METADATA."""
    for step in (1, 2):
        keys_at(f"{store}/{step}").put("_METADATA", b"{}")
    with pytest.raises(ckpt.CheckpointExists, match="something else"):
        ckpt.save(store, tree(1), overwrite=True)
    assert len(keys_at(store).list()) == 2


def test_what_an_interrupted_clean_up_left_blocks_no_step(store):
    token, data = "0" * 32, "1" * 32
    keys = keys_at(store)
    keys.put(f"state/d/{token}.{data}", b"data")
    keys.put(f".attempt.{token}.state!0_METADATA", b"{}")
    assert saved(store, 1) and value_at(store) == 1
    assert not any(token in key for key in keys.list())


def test_a_leftover_under_another_name_hides_no_step(store):
    with ckpt.Checkpointer(store, step_prefix="step") as checkpointer:
        checkpointer.save(5, tree(5))
    keys_at(f"{store}/5").put(".attempt.abc.owner", b"")
    with ckpt.Checkpointer(store) as checkpointer:
        assert checkpointer.load(5)["n"] == 5
        checkpointer.delete(5)
        assert checkpointer.all_steps() == []


def test_an_attempt_that_another_writer_removed_is_not_committed(store):
    attempt = backend().begin(store, overwrite=False, durable=True, token="abc")
    attempt.write("state/_METADATA", b"{}")
    keys_at(store).delete(keys_at(store).list())
    attempt.make_durable(RECORD, b'{"token":"abc"}')
    with pytest.raises(ckpt.CheckpointError, match="nothing was committed"):
        attempt.commit()
    assert value_at(store) is None


def test_what_passed_between_processes_is_not_taken_for_an_item_of_that_name(store):
    attempt = backend().begin(store, overwrite=False, durable=True, token="abc")
    attempt.write("ckpt.token", b"x", until_commit=True)
    other = backend().join(store, attempt.path, durable=True)
    assert other.read("ckpt.token") == b"x"
    other.write("passing/checksums/process_1", b"1")
    attempt.make_durable(RECORD, b'{"token":"abc"}')
    attempt.commit()
    copy, apart = "passing/checksums/process_1", ".attempt.abc.passing!0checksums!0process_1"
    assert sorted(keys_at(store).list()) == [apart, RECORD, copy]


@pytest.mark.parametrize("what", ["values", RECORD, "index"])
def test_after_going_back_past_damage_training_goes_on(store, what):
    with ckpt.Checkpointer(store) as checkpointer:
        for step in range(3):
            checkpointer.save(step, tree(step))
    damage(f"{store}/2", what)
    with ckpt.Checkpointer(store) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
            assert checkpointer.restore_latest(tree(9)).state["n"] == 1
        for step in (2, 3):
            assert checkpointer.save(step, tree(step))
    assert [value_at(f"{store}/{step}") for step in range(4)] == [0, 1, 2, 3]


def damage(url: str, what: str) -> None:
    keys = keys_at(url)
    values = tree(2)["w"].tobytes()
    damaged = 0
    for key in keys.list():
        data = keys.get(key) or b""
        found = {"values": values in data, "index": key.startswith("state/d/")}
        if found.get(what, key.endswith(what)):
            place = data.find(values) if what == "values" else len(data) // 2
            keys.put(key, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            damaged += 1
    assert damaged == 1


def test_a_damaged_copy_for_orbax_is_reported_and_harms_no_load(store):
    ckpt.save(store, tree(2))
    damage(store, "manifest.ocdbt")
    assert value_at(store) == 2
    (problem,) = ckpt.verify(store).problems
    assert problem.file == "state/manifest.ocdbt" and "Orbax" in problem.what
    keys_at(store).delete(["state/manifest.ocdbt"])
    (problem,) = ckpt.verify(store).problems
    assert "missing for Orbax" in problem.what
    assert value_at(store) == 2


@pytest.mark.parametrize(
    "name", ["a\\b", "a//b", "a/../b", "./a", "a\x01", "a\nb", ".."], ids=ascii
)
def test_names_that_stores_do_not_list_are_refused(store, name):
    """Some servers keep them under another name: a run would be saved, and found by nobody."""
    with pytest.raises(ckpt.CheckpointError, match="choose another path"):
        ckpt.save(f"{store}/{name}", tree(1))
    with (
        pytest.raises(ckpt.CheckpointError, match="choose another path"),
        ckpt.Checkpointer(f"{store}/{name}") as checkpointer,
    ):
        checkpointer.save(1, tree(1))
    assert keys_at(store).list() == []


@pytest.mark.parametrize("commit_time", [None, 1234])
def test_a_step_of_orbax_is_there_when_orbax_has_finished_it(store, commit_time):
    """Of one that is being written there is no commit_success.txt; nor is there of one copied from a disk."""
    keys = keys_at(f"{store}/5")
    description = {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": commit_time}
    keys.put("_CHECKPOINT_METADATA", json.dumps(description).encode())
    keys.put("state/_METADATA", b"{}")
    steps = [5] if commit_time else []
    assert ckpt.Checkpointer(store, read_only=True).all_steps() == steps
    keys.put(COMMIT, b"")
    assert ckpt.Checkpointer(store, read_only=True).all_steps() == [5]


def test_what_dead_writers_left_is_removed_and_what_living_ones_write_is_not(store):
    ckpt.save(f"{store}/1", tree(1))
    form = backend()
    for place, owner in [("dead", "0"), ("old", "1"), ("new", "2")]:
        token = owner * 32
        attempt = form.begin(f"{store}/{place}", overwrite=False, durable=True, token=token)
        attempt.write("state/_METADATA", b"{}")
        keys_at(f"{store}/{place}").put(f"state/d/{token}.{'a' * 32}", b"data")
        if owner == "0":  # this host, and no such process
            process = object_store.this_owner().rsplit("-", 2)[0] + "-4194304-1"
        else:
            process = "00000000-17-5"
        day = 24 * 3600 + 10 if owner == "1" else 10
        said = f"{process} {int(time.time()) - day} somebody"
        keys_at(f"{store}/{place}").put(f".attempt.{token}.owner", said.encode())
    mine = form.begin(f"{store}/mine", overwrite=False, durable=True, token="mine")
    mine.write("x", b"")
    removed = form.clean(store)
    left = {key.split("/")[0] for key in keys_at(store).list()}
    assert left == {"1", "new", "mine"}
    assert {key.split("/")[0] for key in removed} == {"dead", "old"}
    assert value_at(f"{store}/1") == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_something_else_is_never_written_into(store, overwrite):
    keys_at(store).put("notes.txt", b"mine")
    with pytest.raises(ckpt.CheckpointExists, match=r"something else \(notes\.txt\)"):
        ckpt.save(store, tree(1), overwrite=overwrite)
    assert keys_at(store).list() == ["notes.txt"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_an_answer_that_never_came_destroys_nothing(store, overwrite, error, monkeypatch):
    """The put of the record was carried out, and the process does not know it; all goes well afterwards."""
    if overwrite:
        ckpt.save(store, tree(1))
    put = KeyValues.put_if_unchanged

    def unanswered(keys: KeyValues, key: str, value: bytes, version: Any) -> bool:
        written = put(keys, key, value, version)
        if key == RECORD:
            raise error
        return written

    with monkeypatch.context() as patch:
        patch.setattr(KeyValues, "put_if_unchanged", unanswered)
        with pytest.raises(error) as caught:
            ckpt.save(store, tree(2), overwrite=overwrite)
    assert is_visible(caught.value)
    assert value_at(store) == 2


def test_a_refused_deletion_after_the_commit_fails_no_save(server, caplog):
    server.fault = lambda request: 403 if request.kind == "delete" else None
    url = f"{server.root}/1"
    ckpt.save(url, tree(1))
    ckpt.save(url, tree(2), overwrite=True)
    server.fault = lambda _: None
    assert value_at(url) == 2 and ckpt.verify(url).ok
    assert "cannot be deleted" in caplog.text


def test_orbax_sees_the_commit_last_and_its_end_first(server):
    with ckpt.Checkpointer(f"{server.root}/run") as checkpointer:
        checkpointer.save(1, items={"model": tree(1), "other": tree(1)})
        checkpointer.wait_until_finished()
        puts = [request.name for request in server.requests if request.kind == "put"]
        assert puts[-1] == f"run/1/{COMMIT}"
        assert puts.index(f"run/1/{RECORD}") < min(
            puts.index(f"run/1/{name}/{COMMIT}") for name in ("model", "other")
        )
        server.requests.clear()
        checkpointer.delete(1)
    deleted = [request.name for request in server.requests if request.kind == "delete"]
    assert deleted[:2] == [f"run/1/{COMMIT}", f"run/1/{RECORD}"]
    assert [name for name in server.names() if name.startswith("run/1/")] == []


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


ZSTD = ckpt.Options(compression="zstd")


def tree_of_three(step: int) -> dict[str, Any]:
    values = np.arange(20_000.0) + step
    return {"large": values, "small": np.full(3, step), "text": f"step {step}"}


def at_request(number: int, status: int) -> Callable[[Request], int | None]:
    """Answers one request with a status, counted from 1."""
    seen: list[Request] = []

    def fault(request: Request) -> int | None:
        seen.append(request)
        return status if len(seen) == number else None

    return fault


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("options", [None, ZSTD], ids=["plain", "zstd"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_while_reading_is_no_damage(server, status, options):
    """One expired token does not make a restore go back a step, at whichever request it is refused."""
    with ckpt.Checkpointer(f"{server.root}/run", options=options) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, tree_of_three(step))
    reader = ckpt.Checkpointer(f"{server.root}/run", read_only=True)
    server.requests.clear()
    assert reader.restore_latest(state=tree_of_three(9)).step == 1
    kinds = [request.kind for request in server.requests]
    assert kinds.count("get") > 3
    refused = 0
    for number in range(1, len(kinds) + 1):
        server.fault = at_request(number, status)
        try:
            restored = reader.restore_latest(state=tree_of_three(9))
        except PermissionError as error:
            refused += server.root in str(error) and "credentials" in str(error)
            continue
        assert restored is not None and restored.step == 1, number
        assert same(restored["state"], tree_of_three(1))
    assert refused == kinds.count("get") - 1  # a listing is repeated, and step 0 is not needed
    server.fault = lambda _: None
    assert same(ckpt.load(f"{server.root}/run/1"), tree_of_three(1))


def test_a_refusal_while_saving_is_told_and_nothing_is_acknowledged(server):
    ckpt.save(f"{server.root}/count", tree_of_three(0))
    count = len(server.requests)
    saved, refused = 0, 0
    for number in range(1, count + 1):
        url = f"{server.root}/at/{number}"
        server.fault = at_request(number, 403)
        try:
            ckpt.save(url, tree_of_three(number))
            saved += 1
        except PermissionError as error:
            where = url.rpartition("/")[0]  # it is looked at whether that is a checkpoint
            refused += where in str(error) or "writing arrays" in str(error)
        server.fault = lambda _: None
        try:
            assert same(ckpt.load(url), tree_of_three(number))
        except ckpt.CheckpointNotFound:
            ckpt.save(url, tree_of_three(number))  # the way is free for another try
            assert same(ckpt.load(url), tree_of_three(number))
    assert refused > 10 and saved + refused == count


def test_a_store_that_never_answers_as_it_should_is_told_after_so_many_tries(server, monkeypatch):
    tries = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "2ms"}
    monkeypatch.setattr(location, "_RETRIES", tries)
    server.fault = lambda _: 503
    with pytest.raises(ConnectionError, match=f"{server.root}/a.*try again"):
        ckpt.load(f"{server.root}/a")
    assert 1 < len(server.requests) <= 5
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(ConnectionError, match=r"s3://bucket/a.*try again"):
        ckpt.save("s3://bucket/a", tree_of_three(0))


def test_a_store_that_ignores_conditions_is_told_once(server):
    server.ignores_conditions = True
    with pytest.warns(RuntimeWarning, match="ignores conditional puts"):
        ckpt.save(f"{server.root}/a", tree_of_three(0))
    ckpt.save(f"{server.root}/b", tree_of_three(1))  # a second warning would fail
    assert ckpt.load(f"{server.root}/a")["text"] == "step 0"


@pytest.mark.parametrize("kind", ["get", "list", "put"])
def test_a_store_that_does_not_answer_ends_a_save_in_time(server, kind):
    ended = threading.Event()
    server.fault = lambda request: ended.wait(30) and None if request.kind == kind else None
    try:
        pending = ckpt.save_async(
            f"{server.root}/a", tree_of_three(0), options=ckpt.Options(timeout_secs=0.5)
        )
        with pytest.raises(TimeoutError, match=r"within 0\.5 s, which is Options.timeout_secs"):
            pending.result(timeout_secs=20)
    finally:
        ended.set()
    server.fault = lambda _: None
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(f"{server.root}/a")


def test_a_bucket_that_is_not_there(server):
    with pytest.raises(FileNotFoundError, match=r"gs://elsewhere/a.*no such bucket"):
        ckpt.save("gs://elsewhere/a", tree_of_three(0))
    with pytest.raises((FileNotFoundError, ckpt.CheckpointNotFound), match="gs://elsewhere/a"):
        ckpt.load("gs://elsewhere/a")


def test_a_name_that_no_bucket_can_have(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for call in (lambda: ckpt.save("s3://a/x", tree_of_three(0)), lambda: ckpt.load("s3://a/x")):
        with pytest.raises((ckpt.CheckpointError, ValueError), match=r"(?i)bucket|s3://"):
            call()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_is_on_its_way_when_an_upload_is_refused_is_removed_too(server, compression):
    first = threading.Lock()

    def refused(request: Request) -> int | None:
        if "/ocdbt.process_0/d/" not in request.name or request.kind != "put":
            return None
        if first.acquire(blocking=False):
            return 403
        time.sleep(0.5)  # while the save finds that it failed
        return None

    server.fault = refused
    state = {f"w{number}": np.random.default_rng(number).random(2**17) for number in range(8)}
    options = ckpt.Options(target_data_file_bytes=2**20, compression=compression)
    with pytest.raises(PermissionError):
        ckpt.save(f"{server.root}/a", state, options=options)
    sent = [request for request in server.requests if "/d/" in request.name]
    assert len({request.name for request in sent}) >= 4
    time.sleep(1)  # for those that came after the save had cleaned up
    assert not server.names()
