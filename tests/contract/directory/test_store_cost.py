"""What a save and a load cost in requests to a store."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import ckpt_core as ckpt
from tests.support.gcs_server import Server
from tests.support.units import MIB


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
    assert kinds.count("list") == 3  # of the empty place


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
