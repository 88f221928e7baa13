"""Orbax's second API on ckpt's engine: ``training.Checkpointer``, the names of the page, ``Context`` and handlers."""

import dataclasses
import datetime
import importlib
import json
import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_orbax
from ckpt_orbax import NotOffered, pathways, v1 as ocp
from tests.support.paths import ROOT
from tests.support.trees import assert_same

keeping = ocp.training.preservation_policies
saving = ocp.training.save_decision_policies
EVERY = saving.FixedIntervalPolicy(1)


def state_of(step):
    return {"w": jnp.full(3, step), "n": np.arange(step + 1), "step": step}


def open_run(directory, **named):
    return ocp.training.Checkpointer(directory, **{"save_decision_policy": EVERY, **named})


def steps_of(checkpointer):
    return [one.step for one in checkpointer.checkpoints]


def test_a_run(tmp_path):
    with open_run(tmp_path / "run") as checkpointer:
        assert (tmp_path / "run").is_dir()
        assert checkpointer.latest is None
        assert list(checkpointer.checkpoints) == []
        for step in range(3):
            assert checkpointer.save(step, state_of(step), metrics={"loss": 1.0 / (step + 1)})
        assert isinstance(checkpointer.latest, ocp.training.CheckpointMetadata)
        assert_same(checkpointer.load(), state_of(2))
        assert_same(checkpointer.load(checkpointer.checkpoints[0]), state_of(0))
        assert_same(checkpointer.load_async(1).result(), state_of(1))
    with ckpt.Checkpointer(tmp_path / "run", read_only=True) as native:
        assert native.all_steps() == [0, 1, 2]
        assert native.metrics(2) == {"loss": 1 / 3}


def test_a_policy_of_ones_own(tmp_path):
    asked = []

    class Mine:
        def should_save(self, step, previous_steps, *, context):
            asked.append((step.step, [one.step for one in previous_steps]))
            assert isinstance(step.time, datetime.datetime)
            assert context.multiprocessing_options.primary_host == 0
            assert not context.reached_preemption
            return step.step in (0, 3)

    class Last:
        def should_preserve(self, checkpoints, *, context):
            assert all(one.metrics == {"at": float(one.step)} for one in checkpoints)
            return [one is checkpoints[-1] for one in checkpoints]

    run = open_run(tmp_path, save_decision_policy=Mine(), preservation_policy=Last())
    with run as checkpointer:
        for step in range(4):
            checkpointer.save(step, state_of(step), metrics={"at": step})
        assert steps_of(checkpointer) == [3]
    assert asked == [(0, []), (1, [0]), (2, [0]), (3, [0])]


def test_orbaxs_default_skips_while_a_save_runs(tmp_path):
    release = threading.Event()
    context = ocp.Context()
    context.engine = ckpt.Options(
        on_event=lambda event: release.wait(60) if event.kind == "committed" else None
    )
    with ocp.training.Checkpointer(tmp_path, context=context) as checkpointer:
        first = checkpointer.save_async(0, state_of(0))
        assert checkpointer.is_saving_in_progress()
        assert not checkpointer.should_save(1)
        assert checkpointer.save_async(1, state_of(1)) is None
        with pytest.raises(TimeoutError, match="step 0 is not saved"):
            first.result(timeout=0.01)
        with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
            checkpointer.save(0, state_of(0))
        release.set()
        assert first.result()
        assert not checkpointer.is_saving_in_progress()
        assert checkpointer.save(2, state_of(2))
        assert steps_of(checkpointer) == [0, 2]


def test_a_step_exists(tmp_path):
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(0, state_of(0))
        with pytest.raises(
            ocp.training.errors.StepAlreadyExistsError, match="Step 0 already exists"
        ) as caught:
            checkpointer.save(0, state_of(1))
        assert isinstance(caught.value, FileExistsError)
        assert checkpointer.save(0, state_of(1), overwrite=True)
        assert_same(checkpointer.load(0), state_of(1))
    with open_run(tmp_path) as again, pytest.raises(ocp.training.errors.StepAlreadyExistsError):
        again.save(0, state_of(2))


def test_a_step_does_not_exist(tmp_path):
    with open_run(tmp_path) as checkpointer:
        for call in (
            checkpointer.load,
            checkpointer.metadata,
            checkpointer.checkpointables_metadata,
        ):
            with pytest.raises(
                ocp.training.errors.StepNotFoundError, match="no step; there are: none"
            ):
                call()
        checkpointer.save(3, state_of(3))
        with pytest.raises(FileNotFoundError, match="no step 4; there are: 3"):
            checkpointer.load(4)
        with pytest.raises(ocp.training.errors.StepNotFoundError):
            checkpointer.delete(4)
        assert not checkpointer.delete(4, missing_ok=True)
        assert checkpointer.delete(checkpointer.latest)
        assert checkpointer.latest is None
        assert checkpointer.delete_async(3, missing_ok=True).result() is False


def test_what_is_known_of_a_step(tmp_path):
    before = datetime.datetime.now(datetime.UTC)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(0, state_of(0), metrics={"loss": 0.5}, custom_metadata={"note": "x"})
        found = checkpointer.metadata(0)
        assert (found.step, found.metrics, found.custom_metadata) == (
            0,
            {"loss": 0.5},
            {"note": "x"},
        )
        assert set(found.metadata) == {"w", "n", "step"}
        assert before <= found.commit_timestamp == found.time
        assert found.init_timestamp <= found.commit_timestamp
        assert checkpointer.latest.time == found.time
        assert found.path == checkpointer.latest.path
        assert str(found.path) == str(tmp_path / "0")
    light = open_run(tmp_path, lightweight_initialize=True)
    assert (light.latest.metrics, light.latest.commit_timestamp) == (None, None)


def test_a_failed_save_is_loud_and_the_next_one_works(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "in the way").touch()
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(0, state_of(0))
        for _ in range(2):
            with pytest.raises(ckpt.CheckpointError):  # by the call or by result(): never silent
                checkpointer.save(1, state_of(1))
        assert steps_of(checkpointer) == [0]
        assert checkpointer.save(2, state_of(2))
        assert steps_of(checkpointer) == [0, 2]


PAGE = (ROOT / "docs" / "api" / "orbax.md").read_text()
NAMES = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `ckpt_orbax\.?([\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_clients_use(module):
    found = ckpt_orbax
    for part in filter(None, module.split(".")):
        found = getattr(found, part)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
    assert NAMES[module] and len(NAMES) >= 11
    if module != "v1.training":
        assert importlib.import_module(f"ckpt_orbax.{module}".rstrip(".")) is found


@pytest.mark.parametrize("module", ["ckpt_orbax", "ckpt_orbax.args", "ckpt_orbax.v1"])
def test_any_other_name_is_refused(module):
    with pytest.raises(AttributeError, match="docs/api/orbax"):
        getattr(importlib.import_module(module), "NoSuchName")  # noqa: B009
    with pytest.raises(ImportError, match="docs/api/orbax"):
        exec(f"from {module} import NoSuchName")
    with pytest.raises(ImportError, match=r"Instead: ckpt_core\.writer"):
        exec("from ckpt_orbax.v1 import partial")


def test_the_version_is_one_of_orbax():
    theirs = pytest.importorskip("orbax.checkpoint")
    assert ckpt_orbax.__version__.split(".")[:2] == theirs.__version__.split(".")[:2]


def at(context, name):
    """The options that hold the last part of a dotted name, and that part."""
    *parts, last = name.split(".")
    for part in parts:
        context = getattr(context, part)
    return context, last


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("array.saving.use_ocdbt", False),
        ("array.saving.use_zarr3", False),
        ("array.loading.enable_padding_and_truncation", True),
        ("array.loading.raise_array_data_missing_error", False),
        ("multiprocessing.primary_host", None),
        ("pathways.checkpointing_impl", pathways.CheckpointingImpl.PERSISTENCE),
        ("checkpoint_layout", "safetensors"),
    ],
)
def test_options_that_would_change_the_meaning_are_refused(tmp_path, name, value):
    context = ocp.Context()
    setattr(*at(context, name), value)
    for call in (
        lambda: ocp.save(tmp_path / "x", {"w": 1}),
        lambda: ocp.load(tmp_path / "x"),
        lambda: ocp.training.Checkpointer(tmp_path / "run"),
    ):
        with context, pytest.raises(NotOffered, match="Instead: "):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("array.saving.ocdbt_target_data_file_size", 2**20),
        ("array.saving.storage_options.chunk_byte_size", 8),
        ("array.saving.use_compression", False),
        ("array.loading.use_load_and_broadcast", True),
        ("asynchronous.timeout_secs", 30),
        ("asynchronous.create_directories_asynchronously", False),
        ("multiprocessing.active_processes", {0}),
        ("checkpoint_layout", "auto"),
    ],
)
def test_options_that_are_taken(tmp_path, name, value):
    context = ocp.Context()
    context.engine = ckpt.Options(compression="zstd")
    setattr(*at(context, name), value)
    with context:
        ocp.save(tmp_path / "x", {"w": np.arange(3000.0)})
        assert ocp.load(tmp_path / "x")["w"][-1] == 2999
    assert ckpt.verify(tmp_path / "x").ok


@pytest.mark.parametrize("size_bytes", [0, 2**20])
def test_bytes_of_a_data_file(tmp_path, size_bytes):
    context = ocp.Context()
    context.array.saving.ocdbt_target_data_file_size = size_bytes
    with context:
        ocp.save(tmp_path / "x", {f"w{n}": np.full(2**18, n, "f4") for n in range(8)})
    large = [file for file in tmp_path.rglob("d/*") if file.stat().st_size > 2**18]
    assert (len(large) > 1) == (size_bytes > 0)


def test_another_thread_has_the_defaults(tmp_path):
    ocp.save(tmp_path / "x", {"a": 1, "b": 2})
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    errors = []

    def load():
        try:
            ocp.load(tmp_path / "x", {"a": 0})
        except ocp.errors.TreeMismatchError as error:
            errors.append(error)

    with context:
        assert ocp.load(tmp_path / "x", {"a": 0}) == {"a": 1}
        assert ocp.load_async(tmp_path / "x", {"a": 0}).result() == {"a": 1}
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_of_a_checkpointer(tmp_path):
    context = ocp.Context()
    context.array.saving.storage_options.dtype = np.float16
    partial = ocp.Context()
    partial.pytree.loading.partial_load = True
    with ocp.training.Checkpointer(tmp_path, context=context) as checkpointer:
        checkpointer.save(0, {"a": np.ones(2), "b": 2})
        with partial:  # in its place
            checkpointer.save(1, {"a": np.ones(2), "b": 2})
            assert checkpointer.load(0, {"b": 0}) == {"b": 2}
        assert checkpointer.load(0)["a"].dtype == np.float16
        assert checkpointer.load(1)["a"].dtype == np.float64
        with pytest.raises(ocp.errors.TreeMismatchError):
            checkpointer.load(0, {"b": 0})


@dataclasses.dataclass
class Vocabulary:
    words: list[str]


class AbstractVocabulary:
    pass


class VocabularyHandler(ocp.CheckpointableHandler[Vocabulary, AbstractVocabulary]):
    """Writes in the background, as most handlers do."""

    async def save(self, directory, checkpointable):
        words = list(checkpointable.words)

        async def write():
            path = await directory.await_creation()
            assert path.name == directory.name
            (path / "inner").mkdir()
            (path / "inner" / "words.json").write_text(json.dumps(words))

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            return Vocabulary(json.loads((directory / "inner" / "words.json").read_text()))

        return read()

    async def metadata(self, directory):
        assert (directory / "inner" / "words.json").exists()
        return AbstractVocabulary()

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Vocabulary)

    def is_abstract_handleable(self, abstract_checkpointable):
        return isinstance(abstract_checkpointable, AbstractVocabulary)


class Position:
    def __init__(self, at):
        self.at = at

    async def save(self, directory):
        at = self.at

        async def write():
            ((await directory.await_creation()) / "at.txt").write_text(str(at))

        return write()

    async def load(self, directory):
        async def read():
            self.at = int((directory / "at.txt").read_text())

        return read()


@pytest.fixture
def with_handlers():
    registry = ocp.handlers.local_registry()
    registry.add(VocabularyHandler)
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context:
        yield registry


WORDS = Vocabulary(["cat", "dog"])


def test_a_handler_saves_and_loads(tmp_path, with_handlers):
    path = tmp_path / "x"
    ocp.save_checkpointables(path, {"state": {"w": np.ones(2)}, "words": WORDS})
    assert (path / "words" / "inner" / "words.json").read_text() == '["cat", "dog"]'
    assert ckpt.verify(path).ok
    for target in (None, {"words": None}, {"words": AbstractVocabulary()}):
        assert ocp.load_checkpointables(path, target)["words"] == WORDS
    described = ocp.checkpointables_metadata(path)
    assert isinstance(described.metadata["words"], AbstractVocabulary)
    assert_same(ocp.load(path), {"w": np.ones(2)})
    assert ocp.load_checkpointables(path, described)["words"] == WORDS


def test_damage_is_found_before_the_handler_sees_it(tmp_path, with_handlers):
    path = tmp_path / "x"
    ocp.save_checkpointables(path, {"words": WORDS})
    file = path / "words" / "inner" / "words.json"
    file.write_text(file.read_text().replace("cat", "cow"))
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"words\.json"):
        ocp.load_checkpointables(path)


def test_without_the_handler_the_files_are_there(tmp_path, with_handlers):
    path = tmp_path / "x"
    ocp.save_checkpointables(path, {"words": WORDS})
    with ocp.Context():
        with pytest.raises(KeyError, match="register one with"):
            ocp.load_checkpointables(path)
        with pytest.raises(ocp.handlers.NoEntryError, match="into a AbstractVocabulary"):
            ocp.load_checkpointables(path, {"words": AbstractVocabulary()})
        assert ocp.checkpointables_metadata(path).metadata == {"words": None}
        with pytest.raises(ocp.handlers.NoEntryError, match='checkpointable: "words"'):
            ocp.save_checkpointables(tmp_path / "y", {"words": WORDS})
    assert json.loads(ckpt.load(path)["words"].read("inner/words.json")) == ["cat", "dog"]


def test_objects_that_save_themselves(tmp_path):
    ocp.save_checkpointables(tmp_path / "x", {"at": Position(7), "n": 3})
    assert (tmp_path / "x" / "at" / "at.txt").read_text() == "7"
    mine = Position(0)
    loaded = ocp.load_checkpointables(tmp_path / "x", {"at": mine, "n": None})
    assert loaded["at"] is mine
    assert mine.at == 7
    with pytest.raises(ValueError, match="To restore a `StatefulCheckpointable`, you must pass"):
        ocp.load_checkpointables(tmp_path / "x")


def test_an_error_of_a_handler_leaves_nothing(tmp_path):
    class Failing(Position):
        async def save(self, directory):
            await directory.await_creation()
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ocp.save_checkpointables_async(tmp_path / "x", {"at": Failing(1), "n": 3}).result()
    assert list(tmp_path.iterdir()) == []


def test_a_data_pipeline(tmp_path):
    grain = pytest.importorskip("grain")

    def pipeline():
        return iter(grain.MapDataset.range(20).seed(1).shuffle().to_iter_dataset())

    iterator = pipeline()
    for _ in range(3):
        next(iterator)
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(0, {"state": {"w": np.ones(1)}, "data": iterator})
        expected = [next(iterator) for _ in range(5)]
        again = pipeline()
        loaded = checkpointer.load_checkpointables(0, {"data": again})
        assert loaded == {"data": again}
        assert [next(again) for _ in range(5)] == expected
        with pytest.raises(ValueError, match="To restore a `StatefulCheckpointable`"):
            checkpointer.load_checkpointables(0)
