"""The installed Orbax in a directory of our steps: metrics, names, items of Grain, of files and of values, side by side."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax import put
from tests.support.orbax_routes import (
    ROUTES,
    Moments,
    abstract,
    assert_same,
    named,
    v0_no_args,
    v1_load_checkpointables,
)


def best_options(**settings):
    return ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"], best_mode="min", **settings
    )


@pytest.fixture
def with_metrics(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step, loss in ((1, 0.5), (2, 0.125), (3, 0.25)):
            checkpointer.save(
                step, {"a": jnp.full(2, float(step))}, metrics={"loss": loss, "n": step}
            )
    return tmp_path


def test_v0_best_step(with_metrics):
    with ocp.CheckpointManager(with_metrics, options=best_options()) as manager:
        assert manager.best_step() == 2
        assert manager.metrics(3) == {"loss": 0.25, "n": 3}
        got = manager.restore(2)
        assert_same(got["state"], {"a": jnp.full(2, 2.0)}, numpy_as_jax=True)
        assert dict(got["metrics"]) == {"loss": 0.125, "n": 2}


def test_v1_metrics(with_metrics):
    checkpointer = ocp_v1.training.Checkpointer(with_metrics)
    assert checkpointer.latest.step == 3
    assert checkpointer.latest.metrics == {"loss": 0.25, "n": 3}
    assert [info.metrics["n"] for info in checkpointer.checkpoints] == [1, 2, 3]
    checkpointer.close()
    assert_same(ocp_v1.load(with_metrics / "3"), {"a": jnp.full(2, 3.0)})


@pytest.mark.parametrize(
    ("prefix", "length", "name"),
    [(None, None, "7"), ("ckpt", None, "ckpt_7"), (None, 4, "0007"), ("x_y", 3, "x_y_007"),
     ("step_", None, "step__7")],
)  # fmt: skip
def test_step_names(tmp_path, prefix, length, name):
    settings = {"step_prefix": prefix, "step_format_fixed_length": length}
    with ckpt.Checkpointer(tmp_path, **settings) as checkpointer:
        checkpointer.save(7, {"a": jnp.ones(2)})
    assert (tmp_path / name / "state" / "_METADATA").is_file()
    options = ocp.CheckpointManagerOptions(**settings)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.latest_step() == 7
        assert_same(manager.restore(7)["state"], {"a": jnp.ones(2)}, numpy_as_jax=True)


def test_orbax_continues_our_directory(tmp_path):
    """A manager of Orbax lists, restores, adds and deletes in our directory, and back."""
    tree = {"a": put(jnp.arange(8.0), "x")}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, state=jax.tree.map(lambda x, step=step: x + step, tree))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    args = ocp.args.Composite
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        latest = manager.latest_step()
        got = manager.restore(latest, args=args(state=ocp.args.StandardRestore(abstract(tree))))
        manager.save(
            2, args=args(state=ocp.args.StandardSave(jax.tree.map(lambda x: x + 1, got["state"])))
        )
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [1, 2]
    with ckpt.Checkpointer(tmp_path, max_to_keep=2) as checkpointer:
        assert list(checkpointer.all_steps()) == [1, 2]
        restored = checkpointer.restore_latest(state=tree)
        assert restored.step == 2
        assert_same(restored["state"], {"a": put(jnp.arange(8.0) + 2, "x")}, sharding=True)
        for step in (3, 4):  # retention deletes what Orbax wrote, too
            checkpointer.save(step, state=restored["state"])
    with ocp.CheckpointManager(tmp_path) as manager:
        assert sorted(manager.all_steps()) == [3, 4]
        assert_same(manager.restore(3)["state"], restored["state"], numpy_as_jax=True)


def test_orbax_ignores_unfinished_saves(tmp_path):
    """A directory that a killed save left behind is no step to Orbax, and Orbax leaves it alone."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"a": jnp.ones(2)})
    junk = tmp_path / ".ckpt-tmp.4.host-1-2.abcdefabcdefabcdefabcdef"
    shutil.copytree(tmp_path / "3", junk)
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.all_steps() == [3]
        assert manager.latest_step() == 3
        assert_same(manager.restore(3)["state"], {"a": jnp.ones(2)}, numpy_as_jax=True)
    checkpointer = ocp_v1.training.Checkpointer(tmp_path, cleanup_tmp_directories=True)
    assert [info.step for info in checkpointer.checkpoints] == [3]
    checkpointer.close()
    assert list(ocp.utils.checkpoint_steps(tmp_path)) == [3]
    assert junk.is_dir()


def grain_iterators(grain):
    dataset = grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset()
    loader = grain.DataLoader(
        data_source=range(50),
        sampler=grain.samplers.IndexSampler(num_records=50, shuffle=True, seed=0),
    )
    return iter(dataset), iter(loader)


def ahead(iterator, count=3):
    return [np.asarray(next(iterator)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def with_grain(tmp_path_factory):
    """A step with a Dataset iterator and a DataLoader iterator beside the state."""
    grain = pytest.importorskip("grain")
    pytest.importorskip("ckpt_grain")
    root = tmp_path_factory.mktemp("grain")
    data, loader = grain_iterators(grain)
    ahead(data), ahead(loader)
    with ckpt.Checkpointer(root) as checkpointer:
        tree = {"a": put(jnp.arange(8.0), "x")}
        checkpointer.save(0, state=tree, data=data, loader=loader)
    return root, tree, (ahead(data), ahead(loader))


def test_grain_restores_from_ours(with_grain):
    grain = pytest.importorskip("grain")
    root, tree, want = with_grain
    data, loader = grain_iterators(grain)
    args = ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract(tree)),
        data=grain.checkpoint.CheckpointRestore(data),
        loader=grain.checkpoint.CheckpointRestore(loader),
    )
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(0, args=args)
    assert_same(got["state"], tree, sharding=True)
    assert (ahead(got["data"]), ahead(got["loader"])) == want

    data, loader = grain_iterators(grain)
    like = {"state": abstract(tree), "data": data, "loader": loader}
    got = ocp_v1.load_checkpointables(root / "0", like)
    assert_same(got["state"], tree, sharding=True)
    assert (ahead(data), ahead(loader)) == want


def test_same_description_of_the_tree_as_orbax(tmp_path):
    tree = {
        "nested": {"list": [jnp.ones(2), {"x": np.ones(3)}], "tuple": (1, 2.0)},
        "moments": Moments(jnp.ones(2), None),
        "empty": {"d": {}, "l": [], "t": ()},
        "ints": {1: jnp.ones(1)},
        "k": jax.random.key(0),
        "s": "text",
    }
    ckpt.save(tmp_path / "ours", tree)
    ocp_v1.save(tmp_path / "theirs", tree)
    ours, theirs = (
        json.loads((tmp_path / side / "state" / "_METADATA").read_text())["tree_metadata"]
        for side in ("ours", "theirs")
    )
    for entry in (*ours.values(), *theirs.values()):
        entry["value_metadata"].pop("write_shape", None)
    assert ours == theirs


TREE = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((2, 2))}}
CONFIG = {"layers": [1, None, "ü"], "rate": 0.5}


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "vocabulary.txt").write_text("a b c")
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        files = ckpt.Files(tmp_path / "source")
        checkpointer.save(7, state=TREE, assets=files, config=ckpt.Json(CONFIG))
    return tmp_path / "run"


@pytest.mark.parametrize("route", named(ROUTES))
def test_the_tree_beside_them(route, root):
    if route not in (v0_no_args, v1_load_checkpointables):
        assert_same(route(root, 7, "state", abstract(TREE)), TREE, sharding=True)
    got = route(root, 7, "state", None)
    assert_same(got, TREE, numpy_as_jax=route.__name__.startswith("v0"))


def test_orbax_reads_the_values(root):
    with ocp.CheckpointManager(root) as manager:
        everything = manager.restore(7)
        assert everything["config"] == CONFIG
        assert everything["assets"]["files"] == {"vocabulary.txt": 5}
        args = ocp.args.Composite(config=ocp.args.JsonRestore())
        assert manager.restore(7, args=args)["config"] == CONFIG
    for target in (None, {"config": None}):
        assert ocp_v1.load_checkpointables(root / "7", target)["config"] == CONFIG


def test_a_directory_that_a_handler_of_someone_wrote_is_files(tmp_path):
    """Orbax's step with an item of an unknown handler, which wrote files of its own."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(TREE)))
    step = tmp_path / "run" / "0"
    (step / "assets" / "deep").mkdir(parents=True)
    (step / "assets" / "deep" / "stats").write_bytes(b"1 2")
    described = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    described["item_handlers"]["assets"] = "somebody.CallbackHandler"
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(described))
    found = ckpt.load(step)
    assert found["assets"].names() == ["deep/stats"]
    assert found["assets"].read("deep/stats") == b"1 2"
    assert ckpt.inspect(step).items["assets"].files == {"deep/stats": 3}
    copied = found["assets"].copy_to(tmp_path / "out")
    assert (copied / "deep" / "stats").read_bytes() == b"1 2"
