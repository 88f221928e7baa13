"""Orbax's second API beside Orbax itself: results, and one run that goes back and forth."""

import json
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint.experimental import v1 as theirs

import ckpt_core as ckpt
from ckpt_orbax import v1 as ours
from tests.contract.orbax_face.test_programs import BEGINNING
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.trees import abstract, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def state_of(step, mesh):
    spread = NamedSharding(mesh, P(mesh.axis_names[0]))
    params = {"w": jax.device_put(jnp.arange(16.0) + step, spread), "b": np.full(3, step)}
    return {"params": params, "optimizer": optax.adam(0.1).init(params["w"]), "step": step}


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


@pytest.mark.parametrize(
    ("writer", "reader"), [(ours, ours), (ours, theirs), (theirs, ours), (theirs, theirs)]
)
def test_metadata_and_metrics_of_any_json(tmp_path, writer, reader):
    state = {"w": np.ones(2)}
    metrics = {"eval": {"loss": 0.5, "by": "hand"}, "curve": [1, 2], "none": None}
    writer.save(tmp_path / "x", state)
    with writer.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, state, metrics=metrics)
    of_ckpt = {"ckpt"} if writer is ours and reader is theirs else set()
    assert set(reader.metadata(tmp_path / "x").custom_metadata) == of_ckpt
    with reader.training.Checkpointer(tmp_path / "run") as checkpointer:
        assert set(checkpointer.metadata(0).custom_metadata) == of_ckpt
        assert checkpointer.root_metadata().custom_metadata == {}
        assert checkpointer.latest.metrics == checkpointer.metadata(0).metrics == metrics


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
    import json
    import ckpt_orbax
    from ckpt_orbax import v1 as ocp
    import jax.numpy as jnp

    keep = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(directory, preservation_policy=keep) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"w": jnp.full(2, step)}, metrics={"loss": step})
        loaded = checkpointer.load(abstract_state={"w": jnp.zeros(2, jnp.int32)})
        told = [[one.step for one in checkpointer.checkpoints], loaded["w"].tolist()]
    ocp.save_checkpointables(directory + "/x", {"a": {"b": 1}})
    told += [ocp.load_checkpointables(directory + "/x"), ocp.metadata(directory + "/x").metadata]
    ckpt_orbax.PyTreeCheckpointer().save(directory + "/y", {"a": {"b": 1}})
    told.append(ckpt_orbax.PyTreeCheckpointer().restore(directory + "/y"))
    assert not any(name.partition(".")[0] == "orbax" for name in sys.modules)
    print(json.dumps(told))
"""


def test_orbax_need_not_be_there(tmp_path, run_python):
    told = run_python(textwrap.dedent(BEGINNING + PROGRAM), str(tmp_path), "-1")
    assert told == [[2, 3], [3, 3], {"a": {"b": 1}}, {"b": 0}, {"a": {"b": 1}}]
