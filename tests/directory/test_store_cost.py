"""What a save and a load cost in requests to a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ckpt_core as ckpt
from tests.support.gcs_server import Server
from tests.support.stores import make_server as make_server


def requests(server: Server, work: Callable[[], Any]) -> int:
    before = len(server.requests)
    work()
    return len(server.requests) - before


def test_a_small_save_and_its_load(server: Server) -> None:
    url = f"{server.root}/a"
    state = {"w": np.arange(20_000.0), "b": np.ones(30), "n": 1}
    assert requests(server, lambda: ckpt.save(url, state)) <= 49
    assert requests(server, lambda: ckpt.load(url)) <= 9


def test_small_leaves_are_fetched_together(server: Server) -> None:
    url = f"{server.root}/a"
    state = {f"w{number}": np.full(256, number) for number in range(2000)}
    assert requests(server, lambda: ckpt.save(url, state)) <= 49
    assert requests(server, lambda: ckpt.load(url)) <= 60
    assert requests(server, lambda: ckpt.load(url, only="w77")) <= 20


def test_a_large_leaf_is_fetched_in_few_large_pieces(server: Server) -> None:
    url = f"{server.root}/a"
    ckpt.save(url, {"w": np.arange(2**22)})  # 32 MiB
    assert requests(server, lambda: ckpt.load(url)) <= 15


def test_the_number_of_steps_costs_nothing(server: Server) -> None:
    def reader(run: str) -> int:
        with ckpt.Checkpointer(f"{server.root}/{run}", read_only=True) as checkpointer:
            return requests(server, lambda: checkpointer.restore_latest({"n": 0}))

    for run, count in [("few", 2), ("many", 20)]:
        with ckpt.Checkpointer(f"{server.root}/{run}") as checkpointer:
            for step in range(count):
                checkpointer.save(step, {"n": step})
    assert reader("many") == reader("few") <= 15
