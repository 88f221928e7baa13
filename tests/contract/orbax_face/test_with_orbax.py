"""Beside Orbax itself: the same names and arguments, and one run that goes back and forth."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_core as ckpt
from ckpt_orbax import v1 as ours
from tests.support.children import environment
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.trees import assert_same

theirs = pytest.importorskip("orbax.checkpoint.experimental.v1")

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

ROOMS = ["", "arrays", "errors", "handlers", "multihost", "options", "partial", "path", "path.step"]
ROOMS += ["training", "training.errors", "tree"]
ROOMS += ["training.save_decision_policies", "training.preservation_policies"]


def at(module, room):
    for part in filter(None, room.split(".")):
        module = getattr(module, part)
    return module


def names_in(module):
    """The names that a module of Orbax exports: those that are not modules or from typing."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "orbax").startswith(("orbax", "jax"))
        and name not in ("policy_checkpoint_info", "types")
    }


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_is_missing(room):
    missing = names_in(at(theirs, room)) - set(dir(at(ours, room)))
    assert missing <= {"PyTree", "NestedDict"}


FUNCTIONS = [
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "metadata",
    "checkpointables_metadata",
    "delete",
    "delete_async",
    "is_orbax_checkpoint",
    "partial.save",
    "partial.save_async",
    "partial.finalize",
    "arrays.to_shape_dtype_struct",
    "path.step.standard_name_format",
    "path.step.composite_name_format",
    "handlers.register_handler",
    "handlers.local_registry",
    "training.Checkpointer",
    *(
        f"training.Checkpointer.{name}"
        for name in (
            "save",
            "save_async",
            "save_checkpointables",
            "save_checkpointables_async",
            "load",
            "load_checkpointables",
            "load_checkpointables_async",
            "metadata",
            "checkpointables_metadata",
            "root_metadata",
            "should_save",
            "delete",
            "delete_async",
            "cancel",
            "reload",
            "wait",
            "close",
            "is_saving_in_progress",
        )
    ),
    *(
        f"training.{room}.{name}"
        for room, names in {
            "save_decision_policies": "FixedIntervalPolicy SpecificStepsPolicy AnySavePolicy "
            "ContinuousCheckpointingPolicy DecisionContext",
            "preservation_policies": "LatestN EveryNSeconds EveryNSteps EveryNStepsClosest CustomSteps "
            "BestN LatestDuration AnyPreservationPolicy",
        }.items()
        for name in names.split()
    ),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_and_defaults_are_the_same(name):
    def answers(module):
        return [
            (one.name, one.kind, one.default)
            for one in inspect.signature(at(module, name)).parameters.values()
        ]

    assert answers(ours) == answers(theirs)


def fields_of(options):
    """Field -> default, also of the options inside of it."""
    return {
        name: fields_of(value) if hasattr(value, "__dataclass_fields__") else value
        for name in options.__dataclass_fields__
        for value in [getattr(options, name)]
    }


@pytest.mark.parametrize(
    "name",
    [
        "pytree",
        "array",
        "asynchronous",
        "multiprocessing",
        "file",
        "pathways",
        "deletion",
        "memory",
        "safetensors",
        "atomicity",
    ],
)
def test_options_have_the_same_fields_and_defaults(name):
    def of(module):
        found = fields_of(getattr(module.Context(), name))
        if name == "array":
            found["saving"].pop("array_metadata_store")  # an object of Orbax
        if name == "atomicity":
            found["mode"] = found["mode"].name
        return found

    mine = of(ours)
    expected = of(theirs)
    assert set(expected) <= set(mine)
    assert {field: mine[field] for field in expected} == expected


def state_of(step, mesh):
    spread = NamedSharding(mesh, P(mesh.axis_names[0]))
    params = {"w": jax.device_put(jnp.arange(16.0) + step, spread), "b": np.full(3, step)}
    return {"params": params, "optimizer": optax.adam(0.1).init(params["w"]), "step": step}


def abstract(state):
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        state,
    )


def test_one_run_goes_back_and_forth(tmp_path, mesh):
    policy = "FixedIntervalPolicy"
    for step, library in enumerate([theirs, ours, theirs, ours, ours, theirs]):
        every = getattr(library.training.save_decision_policies, policy)(1)
        keep = library.training.preservation_policies.LatestN(3)
        with library.training.Checkpointer(
            tmp_path, save_decision_policy=every, preservation_policy=keep
        ) as checkpointer:
            if step:
                assert checkpointer.latest.step == step - 1
                assert checkpointer.latest.metrics == {"loss": 1.0 / step}
                before = state_of(step - 1, mesh)
                assert_same(checkpointer.load(None, abstract(before)), before, sharding=True)
                plain = checkpointer.load()
                assert_same(plain["params"], before["params"], sharding=True)
                assert plain["optimizer"][1] is None  # an empty state
                assert set(plain["optimizer"][0]) == {"count", "mu", "nu"}
                described = checkpointer.metadata().metadata["params"]["w"]
                assert described.sharding == before["params"]["w"].sharding
                assert checkpointer.metadata().custom_metadata["of"] == step - 1
            assert checkpointer.save(
                step,
                state_of(step, mesh),
                metrics={"loss": 1 / (step + 1)},
                custom_metadata={"of": step},
            )
            assert [one.step for one in checkpointer.checkpoints] == list(
                range(max(0, step - 2), step + 1)
            )


@pytest.mark.parametrize(("writer", "reader"), [(theirs, ours), (ours, theirs)])
def test_checkpointables_go_both_ways(tmp_path, writer, reader):
    saved = {"model": {"w": np.arange(4.0)}, "config": {"name": "text", "n": 3}}
    writer.save_checkpointables(tmp_path / "x", saved, custom_metadata={"a": [1]})
    assert_same(reader.load_checkpointables(tmp_path / "x"), saved)
    assert reader.checkpointables_metadata(tmp_path / "x").custom_metadata["a"] == [1]
    assert_same(reader.load(tmp_path / "x", checkpointable_name="model"), saved["model"])


def test_states_of_nnx_go_both_ways_and_into_a_module(tmp_path):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    model = Net(0)
    state = nnx.state(model)
    only_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=only_device), state
    )
    paths = {}
    for library in (theirs, ours):
        path = tmp_path / library.__name__
        library.save(path, state)
        described = json.loads((path / "state" / "_METADATA").read_text())
        paths[library] = set(described["tree_metadata"])
        for reader in (theirs, ours):
            loaded = reader.load(path, target)
            assert jax.tree.structure(loaded) == jax.tree.structure(state)
            assert_same(jax.tree.leaves(loaded), jax.tree.leaves(state))
    assert paths[ours] == paths[theirs]

    other = Net(1)
    ckpt.restore(tmp_path / theirs.__name__, other)  # ckpt's own call knows Orbax's `value`
    assert_same(jax.tree.leaves(nnx.state(other)), jax.tree.leaves(state))
    other = Net(2)
    without = {"rename": lambda path: path.removesuffix("/value")}
    ckpt.restore(tmp_path / ours.__name__, other, **without)
    assert_same(jax.tree.leaves(nnx.state(other)), jax.tree.leaves(state))


PROGRAM = """
    import sys, tempfile

    class Without:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "orbax":
                raise ModuleNotFoundError(f"no {name} here")

    sys.meta_path.insert(0, Without())
    from ckpt_orbax import v1 as ocp
    import jax.numpy as jnp

    directory = tempfile.mkdtemp()
    keep = ocp.training.preservation_policies.LatestN(2)
    context = ocp.Context()
    with context, ocp.training.Checkpointer(directory, preservation_policy=keep) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"w": jnp.full(2, step)}, metrics={"loss": step})
        loaded = checkpointer.load(abstract_state={"w": jnp.zeros(2, jnp.int32)})
        print([one.step for one in checkpointer.checkpoints], loaded["w"].tolist())
    ocp.save_checkpointables(directory + "/x", {"a": {"b": 1}})
    print(ocp.load_checkpointables(directory + "/x"), ocp.metadata(directory + "/x").metadata)
    assert not any(name.partition(".")[0] == "orbax" for name in sys.modules)
"""


def test_orbax_need_not_be_there():
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["[2, 3] [3, 3]", "{'a': {'b': 1}} {'b': 0}"]
