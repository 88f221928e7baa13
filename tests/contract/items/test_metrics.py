"""Metrics that are nested or text: kept as an item, and their numbers are used by policies."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt_core as ckpt
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.places import Place, make_place, open_at  # noqa: F401 (fixture)


def metrics(step: int, loss: float) -> dict[str, object]:
    return {"eval": {"loss": loss, "by": "hand"}, "n": step, "curve": [1, 2], "good": True}


def test_they_are_kept_and_used(place):
    best = ckpt.keep.best("eval/loss", mode="min")
    with open_at(place, keep_policy=best) as checkpointer:
        for step, loss in enumerate([0.5, 0.1, 0.3]):
            told = ckpt.Json(metrics(step, loss))
            checkpointer.save(step, model={"w": np.ones(2)}, items={"metrics": told})
            checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 2]
        assert checkpointer.metrics(1) == {"eval/loss": 0.1, "n": 1.0}
        assert checkpointer.load(1, item="metrics") == metrics(1, 0.1)
        with pytest.raises(TypeError, match="not both"):
            checkpointer.save(
                3, model=1, metrics={"loss": 1}, items={"metrics": ckpt.Json({"loss": 1})}
            )
        with pytest.raises(TypeError, match=r"ckpt\.Json"):
            checkpointer.save(3, model=1, metrics={"by": "hand"})  # pyright: ignore[reportArgumentType]
    assert ckpt.verify(place.url + "/1").ok


def test_orbax_finds_them(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step, loss in enumerate([0.5, 0.1, 0.3]):
            told = ckpt.Json(metrics(step, loss))
            checkpointer.save(step, state={"w": np.ones(2)}, items={"metrics": told})
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda found: found["eval"]["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.best_step() == 1
        assert manager.metrics(1) == metrics(1, 0.1)
        assert np.array_equal(manager.restore(1)["state"]["w"], np.ones(2))


def test_those_of_orbax_may_be_anything(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"w": np.ones(2)}, metrics={"loss": 2})
    step = tmp_path / "0"
    told = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    (step / "ckpt.json").unlink()
    for file in (step / "_CHECKPOINT_METADATA", step / "state" / "_METADATA"):
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, "custom_metadata": {}}))
    (step / "metrics" / "metrics").write_text(json.dumps(metrics(0, 0.5)))
    policy = ckpt.keep.best("eval", mode="min") | ckpt.keep.best("eval/loss", mode="min")
    with ckpt.Checkpointer(tmp_path, keep_policy=policy) as checkpointer:
        assert checkpointer.metrics(0) == {"eval/loss": 0.5, "n": 0}
        checkpointer.save(1, {"w": np.ones(2)}, metrics={"eval/loss": 0.7})
        checkpointer.save(2, {"w": np.ones(2)}, metrics={"eval/loss": 0.9})
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [0, 2]
