"""How items are called, on disk and to Orbax: the one state, and names that Orbax uses for itself."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def tree(start=0):
    return {"a": jnp.arange(3.0) + start, "b": {"c": jnp.ones((2, 2)) + start}}


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture
def run(tmp_path):
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, tree(), metrics={"loss": 0.5})
    return tmp_path / "run"


def test_we_read_the_one_state_by_every_name(run):
    same(ckpt.load(run / "3"), tree())
    same(ckpt.load(run / "3" / "state"), tree())
    for name in ("state", "default"):
        same(ckpt.load(run / "3", item=name), tree())
        same(ckpt.restore(run / "3", items={name: tree(9)})[name], tree())
    assert list(ckpt.inspect(run / "3").items) == ["state"]
    with pytest.raises(ckpt.CheckpointNotFound, match="state"):
        ckpt.load(run / "3", item="other")


@pytest.mark.parametrize("how", ["restore_latest", "restore", "function"])
def test_a_state_and_items_together_are_refused(run, how):
    with ckpt.Checkpointer(run) as checkpointer:
        call = {
            "restore_latest": checkpointer.restore_latest,
            "restore": lambda *args, **named: checkpointer.restore(3, *args, **named),
            "function": lambda *args, **named: ckpt.restore(run / "3", *args, **named),
        }[how]
        for more in ({"state": tree()}, {"items": {"model": tree()}}):
            with pytest.raises(TypeError, match="one state, or"):
                call(tree(), **more)
        with pytest.raises(TypeError, match="passed twice"):
            call(items={"state": tree()}, state=tree())


def test_items_called_metadata_and_metrics(tmp_path):
    metric, fresh = nnx.metrics.Average("loss"), nnx.metrics.Average("loss")
    metric.update(loss=jnp.arange(4.0))
    items = {"metadata": tree(), "metrics": metric, "model": tree(1)}
    with ckpt.Checkpointer(tmp_path / "run", best_metric="loss", best_mode="min") as checkpointer:
        checkpointer.save(3, items=items, metrics={"loss": 0.5}, metadata={"mine": 1})
        checkpointer.save(4, items=items, metrics={"loss": 0.7})
        assert checkpointer.best_step() == 3
        restored = checkpointer.restore(
            3, items={"metadata": tree(9), "metrics": fresh, "model": tree(9)}
        )
        assert restored.metadata == {"mine": 1} and checkpointer.metrics(3) == {"loss": 0.5}
        same(restored["metadata"], tree())
        same(restored["model"], tree(1))
    assert fresh.compute() == metric.compute()
    path = tmp_path / "run" / "3"
    assert list(ckpt.inspect(path).items) == ["metadata", "metrics", "model"]
    assert ckpt.verify(path).ok
    same(ckpt.load(path)["metadata"], tree())
    # Orbax finds its own metrics under that name, and the item beside them
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        assert manager.best_step() == 3
        args = ocp.args.Composite(
            **{
                "metadata": ocp.args.StandardRestore(tree(9)),
                "metrics.tree": ocp.args.StandardRestore(nnx.state(fresh)),
            }
        )
        got = manager.restore(3, args=args)
        same(got["metadata"], tree())
        np.testing.assert_array_equal(got["metrics.tree"]["total"].get_value(), metric.total[...])
    assert ocp_v1.load(path, tree(9), checkpointable_name="metadata")["a"].shape == (3,)
    with pytest.raises(ValueError, match=r"metrics\.tree"):
        ckpt.save(tmp_path / "c", items={"metrics.tree": tree()})


def test_metrics_that_are_objects_are_items(tmp_path):
    metric = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for wrong in (metric, nnx.state(metric), {"loss": metric}):
            with pytest.raises(TypeError, match=r'items=\{"metrics": \.\.\.\}'):
                checkpointer.save(1, metrics=wrong, model=tree())
        checkpointer.save(1, items={"metrics": metric})
        for call in (
            lambda: checkpointer.restore_latest(metrics=metric),
            lambda: checkpointer.restore(1, metrics=metric),
            lambda: ckpt.restore(tmp_path / "run" / "1", metrics=metric),
            lambda: ckpt.save(tmp_path / "c", metrics=metric),
        ):
            with pytest.raises(TypeError, match=r"items=\{['\"]metrics['\"]: \.\.\.\}"):
                call()
        checkpointer.restore_latest(items={"metrics": metric})


def test_items_of_orbax_that_are_json_come_back_as_their_values(tmp_path):
    values = {"a": {"a": [1, 2.5, None]}, "b": [1, 2], "c": "text", "d": 3, "e": {}, "f": None}
    with ocp.CheckpointManager(tmp_path / "v0") as manager:
        notes = {name: ocp.args.JsonSave(value) for name, value in values.items()}
        metadata = ocp.args.JsonSave({"m": values})
        model = ocp.args.StandardSave(tree())
        manager.save(1, args=ocp.args.Composite(metadata=metadata, model=model, **notes))
    want = values | {"metadata": {"m": values}}
    loaded = ckpt.load(tmp_path / "v0" / "1")
    same(loaded.pop("model"), tree())
    assert loaded == want
    targets = dict.fromkeys(want) | {"metadata": {}, "model": tree(9)}
    restored = ckpt.restore(tmp_path / "v0" / "1", items=targets)
    assert {name: restored[name] for name in want} == want
    assert ckpt.load(tmp_path / "v0" / "1", item="a") == values["a"]
