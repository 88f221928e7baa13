"""`ckpt.Json`: plain values that Orbax's Json handlers read, and metrics that are nested or text."""

import json
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, strategies as st

import ckpt_core as ckpt
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.places import Place, make_place, open_at  # noqa: F401 (fixture)

MODEL = {"w": np.arange(3.0)}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_any_value(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "step"
    ckpt.save(path, ckpt.Json(value), options=ckpt.Options(durable=False))
    assert ckpt.load(path) == value


def test_beside_others(place):
    value = {"layers": [1, 2.5, None], "names": ("a", "ü\udc80"), "nan": float("nan")}
    path = (place / "step").url
    ckpt.save(path, model=MODEL, config=ckpt.Json(value))
    found = ckpt.load(path)["config"]
    assert repr(found) == repr({**value, "names": ["a", "ü\udc80"]})
    assert repr(ckpt.restore(path, config=ckpt.Json)["config"]) == repr(found)
    assert ckpt.inspect(path).items["config"].form == "json"
    assert ckpt.verify(path).ok
    with pytest.raises(ckpt.StructureMismatch, match="plain values"):
        ckpt.restore(path, config=ckpt.Files)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


def test_it_is_a_snapshot(tmp_path):
    value = {"a": [1]}
    options = ckpt.Options(on_event=lambda event: value["a"].append(2))
    ckpt.save_async(tmp_path / "step", ckpt.Json(dict(value)), options=options).result()
    assert ckpt.load(tmp_path / "step") in ({"a": [1]}, {"a": [1, 2]})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1: 2}, "the key 1 is int"),
        ([{"a": {None: 1}}], "the key None"),
        ({"a": np.float32(1)}, "float32"),
        ({"a": {1}}, "set"),
        (CIRCLE, "nested too deep"),
    ],
)
def test_what_json_does_not_have_is_refused(tmp_path, value, what):
    with pytest.raises(ckpt.UnsupportedLeaf, match=what):
        ckpt.save(tmp_path / "step", ckpt.Json(value))
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found(tmp_path):
    ckpt.save(tmp_path / "step", model=MODEL, config=ckpt.Json({"layers": 3}))
    file = tmp_path / "step" / "config" / "data.json"
    file.write_bytes(file.read_bytes().replace(b"3", b"4"))
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"config/data\.json"):
        ckpt.load(tmp_path / "step")
    assert not ckpt.verify(tmp_path / "step").ok


def test_what_was_loaded_may_be_saved_as_it_is(tmp_path):
    value = {"layers": [1, 2.5, None, {}], "big": 10**30, "on": True, "name": "ü"}
    ckpt.save(tmp_path / "a", config=ckpt.Json(value))
    restored = ckpt.restore(tmp_path / "a", config=ckpt.Json)
    ckpt.save(tmp_path / "b", config=restored["config"])  # without Json: a tree
    for target in (ckpt.Json, ckpt.Json({"other": 1})):
        again = ckpt.restore(tmp_path / "b", config=target)
        assert again["config"] == value and type(again["config"]["on"]) is bool
    ckpt.save(tmp_path / "c", config={"sizes": (1, (2,))})
    assert ckpt.restore(tmp_path / "c", config=ckpt.Json)["config"] == {"sizes": [1, [2]]}
    with ckpt.Checkpointer(tmp_path / "run") as run:
        run.save(0, config=ckpt.Json(value))
    for step in (1, 2):
        with ckpt.Checkpointer(tmp_path / "run") as run:
            restored = run.restore_latest(config=ckpt.Json)
            assert restored is not None and restored["config"] == value
            run.save(step, config=restored["config"])


@pytest.mark.parametrize(
    "tree", [{"w": np.ones(2)}, {1: 2}, {"a": b"x"}, {"a": 1j}, [np.float32(1)]]
)
def test_a_tree_that_json_cannot_hold_is_no_json(tmp_path, tree):
    ckpt.save(tmp_path / "a", config=tree)
    with pytest.raises(ckpt.StructureMismatch, match="plain values"):
        ckpt.restore(tmp_path / "a", config=ckpt.Json)


@pytest.mark.parametrize(
    "metadata", [{1: "a", "1": "b"}, {"a": [{None: 1}]}, {True: 1}, {(1, 2): 3}]
)
def test_keys_of_metadata_are_text(tmp_path, metadata):
    with pytest.raises(TypeError, match=r"metadata must be plain JSON values: the key .* is "):
        ckpt.save(tmp_path / "a", MODEL, metadata=metadata)
    with (
        ckpt.Checkpointer(tmp_path / "run") as run,
        pytest.raises(TypeError, match=r"metadata must be plain JSON values: the key .* is "),
    ):
        run.write_run_metadata(metadata)
    with (
        pytest.raises(TypeError, match=r"the key .* is "),
        ckpt.writer(tmp_path / "w", metadata=metadata),
    ):
        pass
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], None, 2**70, "x", {"a": None, "b": {}, "c": []}, {"": 1}),
        *({"a/b": 1, "a": {"b": 2}}, {"a": {"value": 1}}, {"a\nb": "\ud800"}),
        [[1], [{"a": [None, {}, -(2**63)]}]],
    ],
)
def test_whatever_json_holds_comes_back_after_a_save_without_it(tmp_path, value):
    ckpt.save(tmp_path / "a", config=ckpt.Json(value), model=MODEL)
    restored = ckpt.restore(tmp_path / "a", config=ckpt.Json)["config"]
    ckpt.save(tmp_path / "b", config=restored, model=MODEL)
    assert ckpt.restore(tmp_path / "b", config=ckpt.Json)["config"] == value


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
            checkpointer.save(3, model=1, metrics={"by": "hand"})
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
