"""In a bucket, one conditional put decides who has saved a checkpoint; Orbax's mark comes last."""

import threading

import ckpt_core as ckpt
from tests.support import seams
from tests.support.stores import make_server, saved, tree, value_at  # noqa: F401 (fixture)


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
