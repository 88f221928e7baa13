"""Wrong arguments: one clear exception each, nothing else changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.unchanged import assert_tree, tree, unchanged

# ---------------------------------------------------------------------------------- wrong arguments


def test_state_and_items_together(tmp_path):
    with unchanged(tmp_path):
        for call in (
            lambda: ckpt.save(tmp_path / "c", tree(), model=tree()),
            lambda: ckpt.save(tmp_path / "c", tree(), items={"model": tree()}),
            lambda: ckpt.save(tmp_path / "c"),
            lambda: ckpt.save(tmp_path / "c", items={}),
        ):
            with pytest.raises(TypeError):
                call()


@pytest.mark.parametrize("name", ["overwite", "metdata", "option", "overwrites"])
def test_an_item_named_almost_like_an_argument(tmp_path, name):
    """Or `overwite=True` would be saved as an item, and the typo found years later."""
    with unchanged(tmp_path), pytest.raises(TypeError, match=name):
        ckpt.save(tmp_path / "c", model=tree(), **{name: True})
    ckpt.save(tmp_path / "c", items={"model": tree(), name: {"x": 1}})
    assert ckpt.load(tmp_path / "c", item=name) == {"x": 1}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", ".hidden", "metrics.tree", "ckpt.json",
                                  "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt",
                                  "a\x00b", "x.orbax-checkpoint-tmp"])  # fmt: skip
def test_impossible_item_names(tmp_path, name):
    with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, ValueError, TypeError)):
        ckpt.save(tmp_path / "c", items={name: tree()})


@pytest.mark.parametrize(
    "metrics", [{"loss": "0.5"}, {"loss": None}, {"loss": [1]}, {1: 0.5}, "loss", 0.5]
)
def test_metrics_are_numbers(tmp_path, metrics):
    with (
        ckpt.Checkpointer(tmp_path / "run") as checkpointer,
        unchanged(tmp_path / "run"),
        pytest.raises(TypeError, match=r"items|number"),
    ):
        checkpointer.save(1, tree(), metrics=metrics)


def test_metrics_may_be_arrays_of_one_number(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree(), metrics={"a": jnp.float32(0.5), "b": np.float64(1), "c": 2})
        checkpointer.wait_until_finished()
        assert checkpointer.metrics(1) == {"a": 0.5, "b": 1.0, "c": 2}


@pytest.mark.parametrize("step", [-1, 1.5, "1", None, True])
def test_impossible_steps(tmp_path, step):
    with (
        ckpt.Checkpointer(tmp_path / "run") as checkpointer,
        unchanged(tmp_path / "run"),
        pytest.raises((TypeError, ValueError)),
    ):
        checkpointer.save(step, tree())


def test_a_step_may_be_an_integer_of_numpy_or_jax(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(np.int64(1), tree(1))
        checkpointer.save(jnp.int32(2), tree(2))
        assert_tree(checkpointer.load(np.int32(1)), 1)
    assert_tree(ckpt.load(tmp_path / "2"), 2)


@pytest.mark.parametrize("path", ["", None, 5, b"bytes"])
def test_impossible_paths(path):
    for call in (lambda: ckpt.load(path), lambda: ckpt.save(path, tree())):
        with pytest.raises((TypeError, ValueError, ckpt.CheckpointError)):
            call()


def test_metadata_must_be_json(tmp_path):
    for metadata in ({"x": object()}, {"x": np.ones(2)}, {"x": {1, 2}}):
        with unchanged(tmp_path), pytest.raises((TypeError, ValueError)):
            ckpt.save(tmp_path / "c", tree(), metadata=metadata)


@pytest.mark.parametrize(
    "settings",
    [
        {"best_metric": "loss"},
        {"best_metric": "loss", "best_mode": "least"},
        {"best_mode": "min"},
        {"max_to_keep": 2, "keep_policy": ckpt.keep.latest(3)},
        {"save_interval_steps": 2, "save_policy": ckpt.when.every_steps(3)},
        {"max_to_keep": 0},
        {"max_to_keep": -1},
        {"save_interval_steps": 0},
        {"keep_period": 0},
        {"step_format_fixed_length": 0},
        {"max_to_kep": 3},
    ],
    ids=str,
)
def test_impossible_settings(tmp_path, settings):
    with unchanged(tmp_path), pytest.raises((TypeError, ValueError)):
        ckpt.Checkpointer(tmp_path / "run", **settings)


def test_a_number_as_save_policy(tmp_path):
    with pytest.raises(TypeError, match=r"save_policy=ckpt\.when\.every_steps\(100\)"):
        ckpt.Checkpointer(tmp_path / "run", save_policy=100)


@pytest.mark.parametrize(
    "settings",
    [{"persist_policy": ckpt.when.every_steps(2)}, {"partners": "host"}, {"local_max_to_keep": 3}],
    ids=str,
)
def test_settings_of_local_steps_without_a_local_directory(tmp_path, caplog, settings):
    (name,) = settings
    options = ckpt.Options(**settings)
    for more, said in (
        ({}, True),
        ({"read_only": True}, False),
        ({"local_directory": tmp_path / "l"}, False),
    ):
        caplog.clear()
        ckpt.Checkpointer(tmp_path / "run", options=options, **more).close()
        assert (f"Options.{name} has no effect" in caplog.text) == said


@pytest.mark.parametrize("options", [{"durable": False}, False, "fast"])
def test_options_of_the_wrong_type(tmp_path, options):
    ckpt.save(tmp_path / "c", tree())
    for call in (
        lambda: ckpt.save(tmp_path / "d", tree(), options=options),
        lambda: ckpt.load(tmp_path / "c", options=options),
        lambda: ckpt.Checkpointer(tmp_path / "run", options=options),
    ):
        with unchanged(tmp_path), pytest.raises(TypeError, match=r"[Oo]ptions"):
            call()


def test_relative_and_home_paths_are_resolved_at_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    pending = ckpt.save_async("relative/c", tree(1))
    checkpointer = ckpt.Checkpointer("relative/run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    pending.result()
    checkpointer.save(1, tree(1))
    checkpointer.close()
    assert_tree(ckpt.load(tmp_path / "relative" / "c"), 1)
    assert_tree(ckpt.load(tmp_path / "relative" / "run" / "1"), 1)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ckpt.save("~/c", tree(2))
    assert_tree(ckpt.load("~/c"), 2)
    assert (tmp_path / "home" / "c").is_dir()


def test_a_path_may_be_text_or_pathlike(tmp_path):
    ckpt.save(str(tmp_path / "c"), tree(1))
    assert_tree(ckpt.load(str(tmp_path / "c") + "/"), 1)
    assert_tree(ckpt.load(tmp_path / "." / "c"), 1)


@pytest.mark.parametrize(
    "name", ["with space", "ünï", "percent%20", "quote'\"", "hash#", "q?x", "*"]
)
def test_odd_directory_names(tmp_path, name):
    ckpt.save(tmp_path / name, tree(1))
    assert_tree(ckpt.load(tmp_path / name), 1)
    assert_tree(ckpt.load(tmp_path / name, jax.tree.map(lambda x: x, tree(0))), 1)
    assert ckpt.verify(tmp_path / name).ok


def test_a_symbolic_link_to_a_checkpoint(tmp_path):
    ckpt.save(tmp_path / "real" / "3", tree(3))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "best").symlink_to(tmp_path / "real" / "3")
    assert_tree(ckpt.load(tmp_path / "best"), 3)
    with ckpt.Checkpointer(tmp_path / "link") as checkpointer:
        assert list(checkpointer.all_steps()) == [3]
        checkpointer.save(4, tree(4))
    assert_tree(ckpt.load(tmp_path / "real" / "4"), 4)


# ---- names that something else reads in another way --------------------------------------------


BACKSLASH = [
    lambda root: ckpt.save(f"{root}/a\\b", {"w": np.arange(3)}),
    lambda root: ckpt.save(f"{root}/a\\b/c", {"w": np.arange(3)}),
    lambda root: ckpt.save_async(f"{root}/a\\", {"w": np.arange(3)}),
    lambda root: ckpt.Checkpointer(f"{root}/a\\b"),
    lambda root: ckpt.Checkpointer(root, step_prefix="a\\b"),
    lambda root: ckpt.Checkpointer(root, local_directory=f"{root}/a\\b"),
    lambda root: ckpt.save(f"{root}/c", items={"a\\b": {"w": np.arange(3)}}),
]


@pytest.mark.parametrize("call", BACKSLASH)
def test_backslashes_are_refused_before_anything_is_written(tmp_path, call):
    """TensorStore takes them for slashes: arrays were written into other directories, and never found."""
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(ValueError, match=r"backslash|step_prefix|name of an item"):
        call(str(root))
    assert not [path for path in root.rglob("*") if "ckpt-owner" not in path.name]


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "é" * 128, "x" * 201, "a\tb"])
def test_item_names_that_no_file_can_have(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name of an item"):
        ckpt.save(tmp_path / "one", items={name: {"w": np.arange(3)}})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("prefix", ["a\nb", "a/b", ".a", "é" * 128])
def test_step_prefixes_that_would_hide_steps(tmp_path, prefix):
    """With a line break in it, acknowledged steps were not listed, and training began anew."""
    with pytest.raises(ValueError, match="step_prefix"):
        ckpt.Checkpointer(tmp_path / "run", step_prefix=prefix)


def test_a_directory_called_as_the_record_is_none(tmp_path):
    ckpt.save(tmp_path / "ckpt.json", {"w": np.arange(3)})
    ckpt.save(tmp_path / "ckpt.json", {"w": np.arange(3)}, overwrite=True)
    ckpt.save(tmp_path / "other", {"w": np.arange(3)})
    assert ckpt.verify(tmp_path / "ckpt.json").ok


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/a\ud800b", "memory://a\0b"])
def test_paths_that_no_file_can_have(path: str) -> None:
    for call in (lambda: ckpt.save(path, {"w": 1}), lambda: ckpt.load(path)):
        with pytest.raises(ckpt.CheckpointError, match="no path can hold"):
            call()
