"""Steps in buckets, and the options with which they are reached."""

import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams
from tests.support.gcs_server import Request, Server
from tests.support.stores import BUCKET, saved, tree, value_at
from tests.support.units import MIB


def test_of_two_writers_the_first_to_commit_stays(server, monkeypatch):
    url, told, gate = f"{server.root}/1", list[bool](), seams.Gate()
    seams.at(monkeypatch, "commit", before=gate, nth=1)
    late = threading.Thread(target=lambda: told.append(saved(url, 1)))
    late.start()
    assert gate.entered.wait(60)
    assert saved(url, 2)
    gate.go.set()
    late.join()
    assert told == [False]
    assert value_at(url) == 2


def test_the_mark_of_a_whole_checkpoint_is_the_last_object_of_it(server):
    ckpt.save(f"{server.root}/1", tree(1))
    put = [request.name.removeprefix("1/") for request in server.requests if request.kind == "put"]
    record, mark = put.index("ckpt.json"), put.index("commit_success.txt")
    assert all("/d/" not in name for name in put[record:]), "data after the record"
    assert mark == len(put) - 1 > record


OPTIONS = ckpt.Options(trash_directory="trash")


def words(step: int) -> dict[str, Any]:
    return {"n": step, "w": np.full(1000, step, np.float32), "text": "words"}


def test_steps_go_to_the_trash_whole(store):
    with ckpt.Checkpointer(store, max_to_keep=2, asynchronous=False, options=OPTIONS) as run:
        for step in range(5):
            run.save(step, words(step), metrics={"loss": step})
        assert run.all_steps() == [3, 4]
    for step in range(3):
        path = f"{store}/trash/{step}"
        assert ckpt.verify(path).ok and ckpt.load(path)["n"] == step
        with pytest.raises(ckpt.CheckpointNotFound):
            ckpt.load(f"{store}/{step}")
    with ckpt.Checkpointer(store, options=OPTIONS) as run:
        assert run.restore_latest(state=words(9)).step == 4
        assert run.all_steps() == [3, 4]


def test_a_number_that_is_in_the_trash_already_keeps_both(store):
    for n in (1, 2):
        with ckpt.Checkpointer(store, asynchronous=False, options=OPTIONS) as run:
            run.save(7, words(n), force=True)
            run.delete(7)
    with ckpt.Checkpointer(f"{store}/trash", read_only=True) as trash:
        assert trash.all_steps() == [7]
    assert ckpt.load(f"{store}/trash/7")["n"] == 1


def test_a_step_stays_whole_until_its_copy_is(server):
    """The copy is refused at each of its objects: the step is there, and no half of it is a step in the trash."""
    url = f"{server.root}/run"
    with ckpt.Checkpointer(url, asynchronous=False, options=OPTIONS) as run:
        run.save(0, words(0))
        number = 0
        while True:
            number += 1
            puts = 0

            def fault(request: Request, at: int = number) -> int | None:
                nonlocal puts
                puts += request.kind == "put" and "/trash/" in request.name
                return 403 if puts == at and "/trash/" in request.name else None

            server.fault = fault
            try:
                run.delete(0)
                break
            except PermissionError:
                server.fault = lambda _: None
                assert ckpt.verify(f"{url}/0").ok
                if "run/trash/0/ckpt.json" not in server.objects:
                    with pytest.raises(ckpt.CheckpointNotFound):
                        ckpt.load(f"{url}/trash/0")
    server.fault = lambda _: None
    assert number > 5
    assert ckpt.verify(f"{url}/trash/0").ok


def requests(server: Server, work: Callable[[], Any]) -> int:
    before = len(server.requests)
    work()
    return len(server.requests) - before


def test_a_small_save_and_its_load(server):
    url = f"{server.root}/a"
    state = {"w": np.arange(20_000.0), "b": np.ones(30), "n": 1}
    # the first of a process in a bucket asks it whether it regards conditions
    assert requests(server, lambda: ckpt.save(f"{server.root}/first", state)) <= 24
    assert requests(server, lambda: ckpt.save(url, state)) <= 22
    assert requests(server, lambda: ckpt.load(url)) <= 5


def test_small_leaves_are_fetched_together(server):
    url = f"{server.root}/a"
    state = {f"w{number}": np.full(256, number) for number in range(2000)}
    assert requests(server, lambda: ckpt.save(url, state)) <= 24
    assert requests(server, lambda: ckpt.load(url)) <= 30
    assert requests(server, lambda: ckpt.load(url, only="w77")) <= 5


def test_a_large_leaf_is_fetched_in_few_large_pieces(server):
    url = f"{server.root}/a"
    ckpt.save(url, {"w": np.arange(2**22)})  # 32 MiB
    assert requests(server, lambda: ckpt.load(url)) <= 15


def test_the_number_of_steps_costs_nothing(server):
    def reader(run: str) -> int:
        with ckpt.Checkpointer(f"{server.root}/{run}", read_only=True) as checkpointer:
            return requests(server, lambda: checkpointer.restore_latest({"n": 0}))

    for run, count in [("few", 2), ("many", 20)]:
        with ckpt.Checkpointer(f"{server.root}/{run}") as checkpointer:
            for step in range(count):
                checkpointer.save(step, {"n": step})
    assert reader("many") == reader("few") <= 15


def test_nothing_is_read_back_or_listed_for_what_was_uploaded(server):
    state = {f"w{number}": np.full(2**20, float(number)) for number in range(24)}  # 192 MiB
    ckpt.save(f"{server.root}/a", state)
    kinds = [request.kind for request in server.requests]
    put = [request.name for request in server.requests if request.kind == "put"]
    data = [name for name in put if "/ocdbt.process_0/d/" in name]
    assert len(data) == len({*data}) >= 5  # each data file is put once
    assert max(len(server.objects[name][1]) for name in data) < 40 * MIB
    # TensorStore fills a file up with zeros to a whole page, and does not tell
    read = [r.name for r in server.requests if "/d/" in r.name and r.kind == "get"]
    assert len(read) == len({*read}) <= len(data)
    assert server.read_bytes < 2**18
    assert kinds.count("list") == 1  # of the empty place


def test_an_asynchronous_save_waits_for_no_answer_before_it_returns(server):
    returned = threading.Event()
    server.fault = lambda _: None if returned.wait(20) else 403
    pending = ckpt.save_async(f"{server.root}/a", {"w": np.arange(20_000.0)})
    returned.set()
    pending.result()
    assert ckpt.load(f"{server.root}/a")["w"][3] == 3


def test_a_later_save_of_a_run_waits_for_no_answer_before_it_returns(server):
    state = {"w": np.arange(20_000.0)}
    with ckpt.Checkpointer(f"{server.root}/run") as checkpointer:
        checkpointer.save(0, state)
        checkpointer.wait_until_finished()
        returned = threading.Event()
        server.fault = lambda _: None if returned.wait(20) else 403
        checkpointer.save(1, state)
        returned.set()
    assert ckpt.Checkpointer(f"{server.root}/run", read_only=True).all_steps() == [0, 1]


def test_a_save_of_a_run(server):
    with ckpt.Checkpointer(f"{server.root}/run", max_to_keep=3) as checkpointer:

        def save(step: int) -> None:
            checkpointer.save(step, {"w": np.arange(20_000.0)})
            checkpointer.wait_until_finished()

        assert requests(server, lambda: save(0)) <= 43
        assert requests(server, lambda: save(1)) <= 36
        assert requests(server, lambda: save(2)) <= 36


def test_every_call_takes_them(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody there
    options = ckpt.Options(
        storage_options={"endpoint_url": s3_url, "region": "us-east-1"}, compression="zstd"
    )
    url = f"s3://{BUCKET}/storage-options"
    ckpt.save(f"{url}/a", tree(1), options=options)
    ckpt.save_async(f"{url}/b", tree(2), options=options).result()
    assert ckpt.load(f"{url}/a", options=options)["n"] == 1
    assert ckpt.load_async(f"{url}/b", options=options).result()["n"] == 2
    assert ckpt.restore(f"{url}/b", tree(0), options=options)["state"]["n"] == 2
    assert ckpt.inspect(f"{url}/a", options=options).items["state"].leaves
    assert ckpt.verify(f"{url}/b", options=options).ok
    with ckpt.Checkpointer(f"{url}/run", max_to_keep=1, options=options) as checkpointer:
        for step in range(3):
            checkpointer.save(step, tree(step))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [2]
        assert checkpointer.restore_latest(tree(9)).state["n"] == 2
        assert np.array_equal(checkpointer.load(2)["w"], tree(2)["w"])


def test_the_project_that_pays_is_named_in_every_request(server):
    options = ckpt.Options(storage_options={"requester_pays": "project-7"})
    ckpt.save(f"{server.root}/a", tree(1), options=options)
    assert ckpt.load(f"{server.root}/a", options=options)["n"] == 1
    assert server.projects == {"project-7"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpont_url": "http://x"}, "takes endpoint_url, region"),
        ({"region": 7}, "region=7"),
        ({"anon": "yes"}, "anon='yes'"),
        ({"secret": "x"}, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile"),
        ({"secret": "x"}, "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_what_is_not_known_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ckpt.Options(storage_options=given)


CREDENTIALS = """
[default]
aws_access_key_id = of-default
aws_secret_access_key = secret

[lab]
aws_access_key_id = of-lab
aws_secret_access_key = secret
"""


@pytest.fixture(name="keys_seen")
def make_keys_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The access keys of the requests to a server where there is nothing; the home directory is an empty one."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            found = re.search("Credential=([^/]+)/", self.headers.get("Authorization", ""))
            seen.append(found[1] if found else "")
            self.send_error(404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "PROFILE", "DEFAULT_PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    yield seen
    server.shutdown()
    thread.join(10)
    server.server_close()


def write_files(tmp_path: Path, credentials: str, config: str = "") -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(credentials)
    (tmp_path / ".aws" / "config").write_text(config)


def asked_with(seen: list[str], options: ckpt.Options | None = None) -> str:
    seen.clear()
    with pytest.raises((ckpt.CheckpointNotFound, OSError)):
        ckpt.load("s3://bucket/x", options=options)
    (found,) = {*seen}
    return found


def test_those_of_a_profile(keys_seen, tmp_path, monkeypatch):
    write_files(tmp_path, CREDENTIALS)
    assert asked_with(keys_seen) == "of-default"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert asked_with(keys_seen) == "of-lab"
    monkeypatch.delenv("AWS_PROFILE")
    options = ckpt.Options(storage_options={"profile": "lab"})
    assert asked_with(keys_seen, options) == "of-lab"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert asked_with(keys_seen) == "of-environment"
    assert asked_with(keys_seen, options) == "of-lab"


def test_files_in_another_place(keys_seen, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").write_text(CREDENTIALS)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "elsewhere"))
    assert asked_with(keys_seen) == "of-default"


@pytest.mark.parametrize(
    "credentials",
    ["", "[lab]\naws_access_key_id = x\n", "no ini", "[default]\nregion = x\n", "\xff"],
)
def test_a_file_without_default_credentials_is_no_source(keys_seen, tmp_path, credentials):
    """The machine may have a role; asked is without any here."""
    write_files(tmp_path, credentials, "[default]\nregion = eu-west-1\n")
    assert asked_with(keys_seen) == ""


def test_a_profile_that_is_not_there_is_told(keys_seen, tmp_path, monkeypatch):
    write_files(tmp_path, CREDENTIALS)
    monkeypatch.setenv("AWS_PROFILE", "labb")
    with pytest.raises(PermissionError, match=r"s3://bucket/x.*credentials"):
        ckpt.save("s3://bucket/x", {"n": 1})
    assert keys_seen == []
