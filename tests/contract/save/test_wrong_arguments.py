"""What is refused: wrong arguments, and something in the way."""

import dataclasses
import errno
import inspect
import os

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.unchanged import assert_tree, make_steps, tree, unchanged  # noqa: F401 (fixture)

STATE = {"w": np.ones(2)}
FIELDS = [field.name for field in dataclasses.fields(ckpt.Options)]
ARGUMENTS = [name for name in inspect.signature(ckpt.Checkpointer).parameters if name != "options"]


@pytest.fixture
def calls(tmp_path):
    """Every call that takes items by keyword."""
    ckpt.save(tmp_path / "a", model=STATE)
    run = ckpt.Checkpointer(tmp_path / "run")
    with run, unchanged(tmp_path):
        yield {
            "save": lambda **more: ckpt.save(tmp_path / "b", model=STATE, **more),
            "save of a state": lambda **more: ckpt.save(tmp_path / "b", STATE, **more),
            "save_async": lambda **more: ckpt.save_async(tmp_path / "b", model=STATE, **more),
            "restore": lambda **more: ckpt.restore(tmp_path / "a", model=STATE, **more),
            "Checkpointer.save": lambda **more: run.save(0, model=STATE, **more),
            "Checkpointer.save of a state": lambda **more: run.save(0, STATE, **more),
            "restore_latest of nothing": lambda **more: run.restore_latest(model=STATE, **more),
        }


@pytest.mark.parametrize("name", [*FIELDS, *ARGUMENTS])
def test_settings_and_arguments_are_no_items(calls, name):
    setting = rf"{name}= is a setting.*options=ckpt\.Options\({name}="
    told = setting if name in FIELDS else rf"{name}= is an argument of ckpt\.Checkpointer"
    for call in calls.values():
        with pytest.raises(TypeError, match=told):
            call(**{name: 3})


TYPOS = {
    "overwite": ("overwrite", "save"),
    "metric": ("metrics", "save"),
    "forse": ("force", "save"),
    "metdata": ("metadata", "save"),
    "item": ("items", ""),
    "option": ("options", ""),
    "mising": ("missing", "restore"),
    "ony": ("only", "restore"),
    "unexpectd": ("unexpected", "restore"),
    "compresion": ("compression", ""),
    "timeout_sec": ("timeout_secs", ""),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_an_item_named_almost_like_an_argument(calls, typo):
    """Or `overwite=True` would be saved as an item, and the typo found years later."""
    meant, of = TYPOS[typo]
    for name, call in calls.items():
        if of in name:
            with pytest.raises(TypeError, match="items=") as caught:
                call(**{typo: 3})
            assert caught.match(f"'{typo}' looks like the (argument|setting) '{meant}'")


def test_by_items_any_name_is_one(tmp_path):
    items = {name: STATE for name in (*FIELDS, *ARGUMENTS, *TYPOS)}
    ckpt.save(tmp_path / "a", items=items)
    assert ckpt.restore(tmp_path / "a", items=items).keys() == items.keys()
    ordinary = ["name", "model", "step", "rng", "data", "config", "params", "ema", "tag", "loss"]
    ckpt.save(tmp_path / "b", **{name: STATE for name in ordinary})
    assert [*ckpt.restore(tmp_path / "b", **{name: STATE for name in ordinary})] == ordinary


def settings(**arguments):
    return lambda root, run: ckpt.Checkpointer(root / "other", **arguments)


def saves(*arguments, **named):
    return lambda root, run: ckpt.save(root / "c", *arguments, **named)


def a_step(step, **named):
    return lambda root, run: run.save(step, tree(), **named)


IMPOSSIBLE_NAMES = ["", ".", "..", "a/b", "/etc", ".hidden", "metrics.tree", "ckpt.json", "_METADATA",
                    "_CHECKPOINT_METADATA", "commit_success.txt", "a\x00b", "x.orbax-checkpoint-tmp",
                    "\ud800", "a\nb", "é" * 128, "x" * 201, "a\tb", "a\\b"]  # fmt: skip
NO_METRICS = [{"loss": "0.5"}, {"loss": None}, {"loss": [1]}, {"loss": np.ones(2)}, {1: 0.5}]
NO_METRICS += ["loss", 0.5, [1.0], {"loss": 1j}]
NO_SETTINGS = [
    ({"best_metric": "loss"}, TypeError, "best_mode"),
    ({"best_metric": "loss", "best_mode": "least"}, ValueError, "'min' or 'max'"),
    ({"best_mode": "min"}, (TypeError, ValueError), None),
    ({"max_to_keep": 2, "keep_policy": ckpt.keep.latest(3)}, TypeError, "not both"),
    ({"save_interval_steps": 2, "save_policy": ckpt.when.every_steps(3)}, TypeError, "not both"),
    ({"keep_period": 2}, TypeError, "keep_period"),
    *[({"max_to_keep": one}, (TypeError, ValueError), None) for one in (0, -1)],
    ({"save_interval_steps": 0}, (TypeError, ValueError), None),
    ({"keep_period": 0}, (TypeError, ValueError), None),
    ({"step_format_fixed_length": 0}, (TypeError, ValueError), None),
    ({"max_to_kep": 3}, (TypeError, ValueError), None),
]
EVERY_100 = r"save_policy=ckpt\.when\.every_steps\(100\)"
# What is called with the directory and a Checkpointer, its error, what that says.
REFUSED = [
    *[(call, TypeError, "nothing to save") for call in (saves(), lambda root, run: run.save(0))],
    (saves(items={}), TypeError, None),
    *[
        (call, TypeError, "not both")
        for more in ({"model": tree()}, {"items": {"model": tree()}})
        for call in (saves(tree(), **more), a_step(0, **more))
    ],
    (lambda root, run: run.best_step(), ckpt.CheckpointError, "best_metric"),
    *[(saves(items={name: tree()}), ValueError, "name of an item") for name in IMPOSSIBLE_NAMES],
    *[(a_step(1, metrics=one), TypeError, "items|number|metrics") for one in NO_METRICS],
    *[
        (saves(tree(), metadata={"x": one}), (TypeError, ValueError), None)
        for one in (object(), np.ones(2), {1, 2})
    ],
    *[(settings(**one), error, told) for one, error, told in NO_SETTINGS],
    (settings(save_policy=100), TypeError, EVERY_100),
    # with a line break in it, acknowledged steps were not listed, and training began anew
    *[
        (settings(step_prefix=one), ValueError, "step_prefix")
        for one in ("a\nb", "a/b", ".a", "é" * 128, "a\\b")
    ],
    *[
        (call, TypeError, "[Oo]ptions")
        for one in ({"durable": False}, False, "fast")
        for call in (saves(tree(), options=one), settings(options=one))
    ],
    (lambda root, run: ckpt.Options(snapshot="disk"), ValueError, "'host', 'device' or 'pinned_"),
    (lambda root, run: ckpt.Options(background_priority="high"), ValueError, "'low' or 'normal'"),
    (lambda root, run: ckpt.Options(partners="rack"), ValueError, "partners must be None, 'host'"),
    (lambda root, run: ckpt.Options(local_max_to_keep=0), ValueError, "local_max_to_keep"),
    (
        lambda root, run: ckpt.Options(local_max_bytes=2**30),
        TypeError,
        "local_max_bytes: `ckpt rm --local DIRECTORY` removes",
    ),
    *[(lambda root, run, n=n: ckpt.Options(report_secs=n), ValueError, "report") for n in (0, -1)],
    # TensorStore takes them for slashes: arrays were written into other directories, and never found
    (lambda root, run: ckpt.save(root / "a\\b" / "c", tree()), ValueError, "backslash"),
    (lambda root, run: ckpt.save_async(root / "a\\", tree()), ValueError, "backslash"),
    (lambda root, run: ckpt.Checkpointer(root / "a\\b"), ValueError, "backslash"),
    (
        lambda root, run: ckpt.Checkpointer(root, local_directory=root / "a\\b"),
        ValueError,
        "backslash",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(tmp_path, number):
    call, error, told = REFUSED[number]
    with (
        ckpt.Checkpointer(tmp_path / "run") as run,
        unchanged(tmp_path),
        pytest.raises(error, match=told),
    ):
        call(tmp_path, run)


@pytest.mark.parametrize(
    "path", ["", None, 5, b"bytes", "/tmp/a\0b", "/tmp/a\ud800b", "memory://a\0b"]
)
def test_paths_that_no_file_can_have(path):
    for call in (lambda: ckpt.save(path, {"w": 1}), lambda: ckpt.load(path)):
        with pytest.raises((TypeError, ValueError, ckpt.CheckpointError)) as caught:
            call()
        if isinstance(path, str) and path:
            assert caught.match("no path can hold")


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


@pytest.mark.parametrize(
    "name", ["with space", "ünï", "percent%20", "quote'\"", "hash#", "q?x", "*"]
)
def test_odd_directory_names(tmp_path, name):
    ckpt.save(str(tmp_path / name), tree(1))
    assert_tree(ckpt.load(f"{tmp_path / name}/"), 1)
    assert_tree(ckpt.load(tmp_path / name, tree(0)), 1)
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


@pytest.mark.parametrize("save", [ckpt.save, lambda *a, **kw: ckpt.save_async(*a, **kw).result()],
                         ids=["save", "save_async"])  # fmt: skip
def test_existing_checkpoint(tmp_path, save):
    save(tmp_path / "c", tree(1))
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists) as caught:
        save(tmp_path / "c", tree(2))
    assert isinstance(caught.value, FileExistsError)
    assert "overwrite" in str(caught.value)
    save(tmp_path / "c", tree(3), overwrite=True)
    assert_tree(ckpt.load(tmp_path / "c"), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_something_else(tmp_path, overwrite):
    """Overwriting is for checkpoints: somebody's home directory is not deleted."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("years of work")
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists):
        ckpt.save(tmp_path / "c", tree(), overwrite=overwrite)


@pytest.mark.parametrize("inside", ["other", "state/inner", "state"])
def test_saving_inside_a_checkpoint(tmp_path, inside):
    """It would not be the checkpoint any more that it was when it was sealed."""
    ckpt.save(tmp_path / "c", tree(1))
    for overwrite in (False, True):
        with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, ValueError)):
            ckpt.save(tmp_path / "c" / inside, tree(2), overwrite=overwrite)
    assert ckpt.verify(tmp_path / "c").ok


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_file_in_the_way(tmp_path, inside):
    (tmp_path / "c").write_text("text")
    path, error = tmp_path / "c" / inside, (ckpt.CheckpointError, NotADirectoryError)
    for call, expected in (
        (lambda: ckpt.save(path, tree()), error if inside else ckpt.CheckpointExists),
        (lambda: ckpt.save(path, tree(), overwrite=True), error),
        (lambda: ckpt.Checkpointer(path).save(0, tree()), error),
        (lambda: ckpt.load(path), ckpt.CheckpointNotFound),
        (lambda: ckpt.inspect(path), ckpt.CheckpointNotFound),
        (lambda: ckpt.verify(path), ckpt.CheckpointNotFound),
    ):
        with unchanged(tmp_path), pytest.raises(expected) as caught:
            call()
        assert str(tmp_path / "c") in str(caught.value)


def test_a_file_among_the_steps(steps):
    (steps / "5").write_text("not a step")
    with ckpt.Checkpointer(steps, asynchronous=False) as checkpointer:
        assert list(checkpointer.all_steps()) == [3, 4]
        assert checkpointer.latest_step() == 4
        with unchanged(steps), pytest.raises(ckpt.CheckpointExists):
            checkpointer.save(5, tree(5))


def test_a_mount_that_does_not_rename_asks_for_its_url(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError) as caught:
        ckpt.save(tmp_path / "a", {"w": 1})
    assert "s3://" in caught.value.__notes__[0]
