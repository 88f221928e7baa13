"""`Options(trash_directory=)` in a bucket: what retention deletes is copied there first, and no step piles up."""

from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.gcs_server import Request
from tests.support.stores import make_s3_url, make_server, make_store  # noqa: F401 (fixtures)

OPTIONS = ckpt.Options(trash_directory="trash")


def tree(step: int) -> dict[str, Any]:
    return {"n": step, "w": np.full(1000, step, np.float32), "text": "words"}


def test_steps_go_to_the_trash_whole(store):
    with ckpt.Checkpointer(store, max_to_keep=2, asynchronous=False, options=OPTIONS) as run:
        for step in range(5):
            run.save(step, tree(step), metrics={"loss": step})
        assert run.all_steps() == [3, 4]
    for step in range(3):
        path = f"{store}/trash/{step}"
        assert ckpt.verify(path).ok and ckpt.load(path)["n"] == step
        with pytest.raises(ckpt.CheckpointNotFound):
            ckpt.load(f"{store}/{step}")
    with ckpt.Checkpointer(store, options=OPTIONS) as run:
        assert run.restore_latest(state=tree(9)).step == 4
        assert run.all_steps() == [3, 4]


def test_a_number_that_is_in_the_trash_already_keeps_both(store):
    for n in (1, 2):
        with ckpt.Checkpointer(store, asynchronous=False, options=OPTIONS) as run:
            run.save(7, tree(n), force=True)
            run.delete(7)
    with ckpt.Checkpointer(f"{store}/trash", read_only=True) as trash:
        assert trash.all_steps() == [7]
    assert ckpt.load(f"{store}/trash/7")["n"] == 1


def test_a_step_stays_whole_until_its_copy_is(server):
    """The copy is refused at each of its objects: the step is there, and no half of it is a step in the trash."""
    url = f"{server.root}/run"
    with ckpt.Checkpointer(url, asynchronous=False, options=OPTIONS) as run:
        run.save(0, tree(0))
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
