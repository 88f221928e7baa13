"""What people write by mistake is answered with what to write instead, in tracebacks that are short and one error each."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import convert
from tests.support.paths import ROOT

STATE = {"w": np.ones(2)}


@pytest.fixture(name="restored")
def make_restored(tmp_path: Path) -> ckpt.Restored:
    ckpt.save(tmp_path / "a", params=STATE, opt=STATE)
    return ckpt.restore(tmp_path / "a", params=STATE, opt=STATE)


def test_names_are_not_unpacked_for_values(restored):
    with pytest.raises(TypeError, match=r"params = restored\['params'\]"):
        _params, _opt = restored
    with pytest.raises(TypeError, match=r"restored\.values\(\)"):
        (_params, *_rest) = restored
    with pytest.raises(TypeError, match="names of its items, params, opt"):
        [(_params, _opt), _other] = [restored, 1]

    def in_a_loop():
        for params, opt in [restored]:
            return params, opt

    with pytest.raises(TypeError, match="names of its items"):
        in_a_loop()


def test_all_else_gives_names_as_in_a_dict(restored):
    assert list(restored) == [*restored] == sorted(restored)[::-1] == ["params", "opt"]
    assert [name for name in restored] == list(restored.keys())
    assert {**restored}.keys() == dict(restored).keys() == set(restored)
    params, opt = restored.values()
    assert params is restored["params"] and opt is restored["opt"]
    (first, _), (second, _) = restored.items()
    assert (first, second) == ("params", "opt")


def test_an_item_that_was_not_restored(tmp_path):
    ckpt.save(tmp_path / "a", params=STATE, opt=STATE)
    restored: Any = ckpt.restore(tmp_path / "a", params=STATE, unexpected="ignore")
    for error, take in (
        (AttributeError, lambda n: getattr(restored, n)),
        (KeyError, restored.__getitem__),
    ):
        with pytest.raises(
            error, match=r"no item 'opt' was restored, but params: pass opt=\.\.\. to"
        ):
            take("opt")
        with pytest.raises(
            error, match="no item 'model' was restored, but params; opt, params were saved"
        ):
            take("model")
    assert ckpt.restore(tmp_path / "a", params=STATE, opt=STATE).opt.keys() == STATE.keys()
    assert not hasattr(restored, "model") and restored.get("model") is None


@pytest.mark.parametrize("scheme", ["gs", "s3", "memory", "file", "https"])
@pytest.mark.parametrize("make", [str, Path])
def test_a_url_that_lost_a_slash(tmp_path, monkeypatch, scheme, make):
    monkeypatch.chdir(tmp_path)
    path = make(f"{scheme}:/bucket/run")
    meant = "write /bucket/run" if scheme in ("file", "https") else f"write {scheme}://bucket/run"
    for call in (
        lambda: ckpt.save(path, STATE),
        lambda: ckpt.load(path),
        lambda: ckpt.Checkpointer(path),
        lambda: ckpt.inspect(path),
    ):
        with pytest.raises(ValueError, match=f"lost a slash.*{meant}"):
            call()
    assert list(tmp_path.iterdir()) == []
    ckpt.save(f"./{scheme}:/run", STATE)
    assert ckpt.load(tmp_path / f"{scheme}:" / "run").keys() == STATE.keys()


@pytest.mark.parametrize("url", ["gs://", "s3://", "memory://", "s3:///", "gs:///run/1"])
def test_a_url_without_a_bucket(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: ckpt.save(url, STATE),
        lambda: ckpt.load(url),
        lambda: ckpt.Checkpointer(url),
    ):
        with pytest.raises(ValueError, match=r"names no bucket: write .*://BUCKET/(PATH|run/1)"):
            call()
    assert list(tmp_path.iterdir()) == []


ITERATORS = {
    "generator": lambda data: (batch for batch in data),
    "enumerate": enumerate,
    "map": lambda data: map(str, data),
    "zip": lambda data: zip(data, data, strict=False),
    "iterator": iter,
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_around_a_data_iterator(tmp_path, kind):
    data = ITERATORS[kind]([1, 2, 3])
    for items in ({"data": data}, {"state": {"data": data}}):
        with pytest.raises(
            ckpt.UnsupportedLeaf, match="pass the data iterator that is inside of it"
        ):
            ckpt.save(tmp_path / "a", **items)
    assert next(iter(data)) is not None, "nothing was taken from it"


FILES = {"m.pt": lambda: b"PK", "m.npz": lambda: b"PK", "a b.msgpack": lambda: b"\x80"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_weights(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name]())
    with pytest.raises(
        ckpt.CheckpointNotFound, match=r"`ckpt import .*-imported'?`, or ckpt\.convert"
    ):
        ckpt.load(tmp_path / name)


@pytest.mark.parametrize("name", ["m.eqx", "m.npy"])
def test_a_file_without_names(tmp_path, name):
    np.save(tmp_path / "m.npy", np.ones(2))
    (tmp_path / "m.npy").rename(tmp_path / name)
    with pytest.raises(
        ckpt.CheckpointError, match=r"no names: take eqx\.tree_deserialise_leaves"
    ) as told:
        convert.import_weights(tmp_path / name, tmp_path / "a")
    assert "or numpy.load(path), and call ckpt.save" in str(told.value)
    with open(tmp_path / name, "rb") as file:
        ckpt.save(tmp_path / "a", np.load(file))
    assert ckpt.load(tmp_path / "a").tolist() == [1, 1]


def test_files_are_called_as_the_caller_calls_them(tmp_path):
    ckpt.save(tmp_path / "a", STATE)
    (file,) = convert.export_safetensors(tmp_path / "a", tmp_path / "w.safetensors")
    restored = ckpt.restore(file, model=STATE)
    assert restored.report.loaded == ("model/w",)
    with pytest.raises(ckpt.StructureMismatch) as told:
        ckpt.restore(file, model={"v": np.ones(2)})
    assert {one.item for one in told.value.mismatches} == {"model"}
    assert ckpt.restore(file, model=STATE, only="model/w").report.loaded == ("model/w",)


def test_a_pointer_of_git_lfs_is_no_damage(tmp_path):
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in range(2):
            checkpointer.save(step, {"w": np.ones(2)})
        (tmp_path / "1/ckpt.json").write_text("version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(ckpt.CheckpointError, match="git lfs pull"):
            checkpointer.restore_latest({"w": np.ones(2)})


TREE = {"w": jnp.ones(3), "b": np.ones(2)}
MISTAKES: dict[str, Callable[[], Any]] = {
    "exists": lambda: ckpt.save("state", TREE),
    "async": lambda: ckpt.save_async("state", TREE),
    "not_found": lambda: ckpt.load("nope"),
    "a_run": lambda: ckpt.load("run"),
    "shape": lambda: ckpt.load("state", {"w": jnp.ones(4), "b": np.ones(2)}),
    "dtype": lambda: ckpt.load("state", {"w": jnp.ones(3, "bfloat16"), "b": np.ones(2)}),
    "restore": lambda: ckpt.restore("items", model={"w": jnp.ones(4)}),
    "item": lambda: ckpt.load("items", item="modl"),
    "no_step": lambda: ckpt.Checkpointer("run").restore(9, model=TREE),
    "step": lambda: ckpt.Checkpointer("run").restore_latest(model={"w": jnp.ones(4)}),
    "forgotten_restore": lambda: ckpt.Checkpointer("run").save(0, model=TREE),
    "only": lambda: ckpt.load("state", only="parms/**"),
    "function": lambda: ckpt.save("new", {"f": test_it_is_short_and_one_error}),
    "function_in_item": lambda: ckpt.save("new", model={"f": test_it_is_short_and_one_error}),
    "argument": lambda: ckpt.save("new", TREE, overwite=True),
    "metadata": lambda: ckpt.save("new", TREE, metadata={"f": object()}),
    "url": lambda: ckpt.save("gs:/bucket/run", TREE),
}


@pytest.fixture
def _saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ckpt.save("state", TREE)
    ckpt.save("items", model=TREE)
    with ckpt.Checkpointer("run") as checkpointer:
        checkpointer.save(0, model=TREE)


def _frames(error: BaseException) -> list[str]:
    """Functions of ckpt in the traceback, from the call on."""
    stack = traceback.extract_tb(error.__traceback__)
    return [one.name for one in stack if one.filename.startswith(str(ROOT / "ckpt_core"))]


@pytest.mark.usefixtures("_saved")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_short_and_one_error(mistake):
    with pytest.raises(Exception) as raised:
        MISTAKES[mistake]()
    assert len(_frames(raised.value)) <= 5
    if isinstance(raised.value, ckpt.CheckpointError) and mistake != "url":
        assert len(_frames(raised.value)) == 1
    told = "".join(traceback.format_exception(raised.value))
    assert "During handling" not in told and "direct cause" not in told


@pytest.mark.usefixtures("_saved")
@pytest.mark.parametrize("path", ["nowhere", "state"])
def test_frames_of_the_users_own_code_stay(path):
    class Mine:
        def get_state(self) -> Any:
            raise ckpt.UnsupportedLeaf("no state yet", leaf=str(ckpt.load(path)), type_name="Mine")

        def set_state(self, state: Any) -> None: ...

    with pytest.raises((ckpt.UnsupportedLeaf, ckpt.CheckpointNotFound)) as raised:
        ckpt.save("new", model=Mine())
    assert "get_state" in [one.name for one in traceback.extract_tb(raised.value.__traceback__)]


@pytest.mark.usefixtures("_saved")
def test_frames_of_damage_stay():
    for data in Path("state").rglob("d/*"):
        data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ckpt.CheckpointCorrupt) as raised:
        ckpt.load("state")
    assert len(_frames(raised.value)) > 3
