"""Messages that are met now and then: of packages that lack, limits, numbers that do not fit."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import ckpt_core as ckpt
import ckpt_orbax as ocp
from ckpt_core import _adapters
from ckpt_core.convert import export_safetensors
from ckpt_orbax import v1
from tests.contract.advice.messages import all_texts
from tests.contract.advice.said import told
from tests.support.paths import ROOT

W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W}
FAST = ckpt.Options(durable=False)
Standard = ocp.args.StandardSave


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


def right(value: Any) -> bool:
    return np.array_equal(value["w"], W)


PACKAGES = {
    "cli/__init__.py: : pip install 'ckpt-core[cli]'": "typer",
    "cli/_bench.py: TensorBoard: not installed (pip install 'ckpt-core[tensorboard]')": "tensorboard",
    "_event_file.py: needs the package tensorboard: pip install 'ckpt-core[tensorboard]'": "tensorboard",
    "events.py: needs the package rich: pip install 'ckpt-core[cli]'": "rich",
    "flax_nnx/ckpt_flax_nnx/__init__.py: : pip install 'ckpt-core[flax]'": "flax",
    "grain/ckpt_grain/__init__.py: : pip install 'ckpt-core[grain]'": "grain",
    "keras/ckpt_keras/_backend.py: ckpt_keras needs Keras: pip install 'ckpt-core[keras]'": "keras",
    "torchax/ckpt_torchax/__init__.py: needs torch: pip install 'ckpt-core[torchax]'": "torch",
    "torchax/ckpt_torchax/_files.py: .pt files need torch: pip install 'ckpt-core[torchax]', or": "torch",
    "torchax/ckpt_torchax/_torchax.py: : pip install 'ckpt-core[torchax]'": "torchax",
}


@pytest.mark.parametrize("key", PACKAGES)
def test_an_extra_has_the_package(key: str):
    """Nothing is uninstalled in a test; what pip would install is in the project's file."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = re.search(r"ckpt-core\[(\w+)\]", key)
    assert found is not None
    names = [re.split(r"[^\w-]", one)[0] for one in extras[found[1]]]
    assert PACKAGES[key] in names


def test_no_message_names_an_extra_that_is_not_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    texts = ["".join(one.parts) for one in all_texts()]
    named = {name for text in texts for name in re.findall(r"ckpt-core\[(\w+)\]", text)}
    assert named and named <= set(extras)


# Limits


def test_a_header_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path / "a", {"a": W, "b": W, "c": W})
    monkeypatch.setattr("ckpt_core._format.safetensors.MOST_HEADER_BYTES", 160)
    with told("_format/safetensors.py: fewer tensors to a file"):
        export_safetensors(tmp_path / "a", tmp_path / "out.safetensors")
    files = export_safetensors(tmp_path / "a", tmp_path / "out", max_shard_bytes=20)
    names = [set(safetensors.numpy.load_file(one)) for one in files if one.endswith("tensors")]
    assert set.union(*names) == {"a", "b", "c"}


def test_a_dtype_of_safetensors_that_jax_lacks(tmp_path: Path):
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with told("_format/safetensors.py: which jax has no arrays of: convert the file"):
        ckpt.load(tmp_path / "a.safetensors")
    safetensors.numpy.save_file(STATE, tmp_path / "a.safetensors")
    assert right(ckpt.load(tmp_path / "a.safetensors"))


# Numbers and targets


def test_a_number_that_does_not_fit(tmp_path: Path):
    save(tmp_path / "a", {"x": 0.1})
    like = {"x": np.float32(0)}
    with told("_load/targets.py: cast=True rounds it, unless it is too large.") as said:
        ckpt.load(tmp_path / "a", like)
    how = eval(f"dict({said.text.rpartition('dtype. ')[2].split(' ')[0]})")
    assert ckpt.load(tmp_path / "a", like, **how)["x"] == np.float32(0.1)


class Holder:
    def __init__(self) -> None:
        self.state: Any = {"w": W}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_entries_of_rename(tmp_path: Path):
    save(tmp_path / "a", {"layer": {"w": W}})
    like = {"dense": {"w": W * 0}}
    with told("_load/renames.py: No saved path begins with these entries of rename=:") as said:
        ckpt.load(tmp_path / "a", like, rename={"layr": "dense"})
    nearest = said.text.rpartition("nearest name: ")[2].partition(")")[0]
    assert right(ckpt.load(tmp_path / "a", like, rename={nearest: "dense"})["dense"])
    with told(
        "_load/renames.py: An entry of rename= must be a saved path, or the beginning of one"
    ):
        ckpt.load(tmp_path / "a", {"layer": {"w": W * 0}}, rename={"lay": "dense"})
    assert right(ckpt.load(tmp_path / "a", like, rename={"layer": "dense"})["dense"])
    assert right(ckpt.load(tmp_path / "a", like, rename={"layer/w": "dense/w"})["dense"])


def test_rules_for_an_object(tmp_path: Path):
    safetensors.numpy.save_file(STATE, tmp_path / "a.safetensors")
    rules = [ckpt.Rule("w", "weight")]
    with told(
        "_load/matching.py: rules= need a target with a structure of its own: pass a tree of"
    ):
        ckpt.restore(tmp_path / "a.safetensors", model=Holder(), rules=rules)
    back = ckpt.restore(tmp_path / "a.safetensors", model={"weight": W * 0}, rules=rules)
    assert np.array_equal(back["model"]["weight"], W)


def test_arrays_in_the_state_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Pipeline(Holder):
        pass

    class OfPipelines:
        per_process = True

        def accepts(self, cls: type) -> bool:
            return cls is Pipeline

        def get_state(self, obj: Pipeline) -> Any:
            return obj.state

        def set_state(self, obj: Pipeline, state: Any) -> None:
            obj.state = state

        def to_text(self, state: Any) -> str:
            return ""

        def from_text(self, text: str) -> Any:
            return {}

    monkeypatch.setattr(_adapters, "_registered", {"mine": OfPipelines()})
    _adapters._for_class.cache_clear()
    one = Pipeline()
    one.state = {"w": jnp.asarray(W)}
    try:
        with told(
            "_format/process_state.py: convert it in get_state (numpy.asarray, jax.random.key"
        ) as said:
            save(tmp_path / "a", data=one)
        one.state = {
            "w": eval(said.between("get_state (", ",").replace("numpy", "np"))(one.state["w"])
        }
        save(tmp_path / "a", data=one, w=jnp.asarray(W))
        again = Pipeline()
        again.state = {"w": W * 0}
        assert right(ckpt.restore(tmp_path / "a", data=again) and again.state)
    finally:
        _adapters._for_class.cache_clear()


def test_a_step_that_this_run_saved_already(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"), ckpt.Checkpointer(tmp_path, options=FAST) as run:
        assert run.save(1, {"w": W * 0})
        assert not run.save(1, STATE)
        key = "_run/run.py: (overwrite=True does that), and save() gives False. This is said once"
        assert key.partition(".py: ")[2] in caplog.text
        assert run.save(1, STATE, overwrite=True)
    with ckpt.Checkpointer(tmp_path, options=FAST) as run:
        restored = run.restore_latest({"w": W * 0})
        assert restored is not None and right(restored["state"])


# Orbax's names


def test_a_destination_that_is_taken(tmp_path: Path):
    ocp.PyTreeCheckpointer().save(tmp_path / "a", {"w": W * 0})
    with told("orbax/ckpt_orbax/v0/checkpointers.py: (overwrite=True is force=True here)") as said:
        ocp.PyTreeCheckpointer().save(tmp_path / "a", STATE)
    how = eval(f"dict({said.after('overwrite=True is ').partition(' here')[0]})")
    ocp.PyTreeCheckpointer().save(tmp_path / "a", STATE, **how)
    assert right(ocp.PyTreeCheckpointer().restore(tmp_path / "a"))


def test_metadata_of_an_item(tmp_path: Path):
    with ocp.CheckpointManager(tmp_path) as manager:
        with told("orbax/ckpt_orbax/v0/_saving.py: save(custom_metadata={...}), or one more item"):
            manager.save(0, args=ocp.args.PyTreeSave(STATE, custom_metadata={"a": 1}))
        assert manager.save(0, args=ocp.args.PyTreeSave(STATE), custom_metadata={"a": 1})
    with ocp.CheckpointManager(tmp_path) as manager:
        assert right(manager.restore(0))
        assert manager.metadata(0).custom_metadata == {"a": 1}


def test_targets_of_orbax_that_are_none(tmp_path: Path):
    v1.save(tmp_path / "a", STATE)
    with told(
        "orbax/ckpt_orbax/v1/loading.py: : give a jax.ShapeDtypeStruct, an array, a number, a text"
    ):
        v1.load(tmp_path / "a", {"w": object()})
    assert right(v1.load(tmp_path / "a", {"w": W * 0}))
    with told(
        "orbax/ckpt_orbax/v0/checkpoint_utils.py: : give arrays, numbers, texts or jax.ShapeDtype"
    ):
        ocp.checkpoint_utils.construct_restore_args({"w": object()})
    args = ocp.checkpoint_utils.construct_restore_args(STATE)
    assert right(ocp.PyTreeCheckpointer().restore(tmp_path / "a", restore_args=args))


def test_a_step_of_the_second_that_is_there(tmp_path: Path):
    with v1.training.Checkpointer(tmp_path) as run:
        run.save(0, {"w": W * 0})
        with told(
            "orbax/ckpt_orbax/v1/training/_checkpointer.py: already exists: overwrite=True"
        ) as said:
            run.save(0, STATE)
        run.save(0, STATE, **eval(f"dict({said.between('exists: ', ' replaces')})"))
    with v1.training.Checkpointer(tmp_path) as run:
        assert right(run.load(0))


@pytest.mark.parametrize("action", ["first", "second"])
def test_two_managers_arguments_that_say_one_thing(tmp_path: Path, action: str):
    """Of the trees of two checkpoints, too."""
    one, other = {"w": W}, {"w": W * 0}
    with told("orbax/ckpt_orbax/v1/tree.py: : two trees have a value here; overwrite=True") as said:
        v1.tree.merge(one, other)
    how = eval(f"dict({said.between('here; ', ' takes')})")
    merged = (
        v1.tree.merge(other, one, **how) if action == "first" else v1.tree.merge(one, other, **how)
    )
    assert right(merged) == (action == "first")


def test_an_operation_of_ones_own(tmp_path: Path):
    """Of a grain.DataLoader, whose state does not cover what such an operation keeps."""
    grain = pytest.importorskip("grain")

    class Doubled:
        def __call__(self, records: Any) -> Any:
            for record in records:
                yield grain.experimental.Record(record.metadata, record.data * 2)

    class Map(grain.transforms.Map):
        def map(self, element: Any) -> Any:
            return element * 2

    def loader(operation: Any) -> Any:
        sampler = grain.samplers.IndexSampler(
            9, grain.sharding.NoSharding(), shuffle=False, num_epochs=1
        )
        return iter(grain.DataLoader(data_source=range(9), sampler=sampler, operations=[operation]))

    key = "grain/ckpt_grain/_pipeline.py: numbers, training will not resume exactly. Use grain.transforms instead."
    assert key
    with pytest.warns(
        UserWarning, match=r"will not resume exactly\. Use grain\.transforms instead"
    ):
        save(tmp_path / "a", data=loader(Doubled()))
    iterator = loader(Map())
    next(iterator)
    save(tmp_path / "b", data=iterator)
    again = loader(Map())
    ckpt.restore(tmp_path / "b", data=again)
    assert next(again) == 2


def test_a_generator_and_steps_by_hand(tmp_path: Path):
    km = pytest.importorskip("tests.support.keras_models")
    import ckpt_keras

    def batches() -> Any:
        x, y = km.data(16)
        while True:
            yield x[:8], y[:8]

    def train(**more: Any) -> Any:
        model = km.small(1, metrics=())
        callback = ckpt_keras.OrbaxCheckpointCallback(tmp_path, "loss", save_freq=2, options=FAST)
        return model.fit(
            batches(), epochs=3, verbose=0, shuffle=False, callbacks=[callback], **more
        )

    ckpt_keras.save(tmp_path, km.small(metrics=()), step=4)
    key = "keras/ckpt_keras/_session.py: and how many an epoch has is not known: pass steps_per_epoch to fit"
    with told(key):
        train()
    assert train(steps_per_epoch=2).epoch == [2]
