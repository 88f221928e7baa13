"""Between ckpt and Orbax, in both directions: checkpoints that two processes wrote; and steps on gs://."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support import orbax_routes as routes
from tests.support.launch import launch, reports
from tests.support.orbax_buckets import OrbaxBucket, make_bucket  # noqa: F401 (fixture)
from tests.support.trees import abstract, assert_same

STATE = """
import logging
logging.getLogger("absl").setLevel(logging.ERROR)
import orbax.checkpoint as ocp
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
specs = {"rows": P("a"), "blocks": P("a", "b"), "all": P(), "crossed": P("b", "a")}
values = {name: np.arange(96, dtype=np.float32).reshape(8, 12) + n for n, name in enumerate(specs)}
state = {"params": {name: put(values[name], specs[name], mesh) for name in specs}}
def target(turned):
    names = list(specs)
    return {"params": {
        name: jax.ShapeDtypeStruct(
            (8, 12), np.float32, sharding=NamedSharding(mesh, specs[names[n - turned]])
        )
        for n, name in enumerate(names)
    }}
def same(tree):
    return all(
        (np.asarray(shard.data) == values[name][shard.index]).all()
        for name, leaf in tree["params"].items() for shard in leaf.addressable_shards
    ) and tree["params"].keys() == specs.keys()
"""

OURS_TO_ORBAX = """
ckpt.save(f"{directory}/one", state, options=options)
with ocp.StandardCheckpointer() as orbax:
    same_sharding = same(orbax.restore(f"{directory}/one/state", target(0)))
    other_sharding = same(orbax.restore(f"{directory}/one/state", target(1)))
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    checkpointer.save(3, default=state)
with ocp.CheckpointManager(f"{directory}/steps") as manager:
    step = manager.latest_step()
    from_manager = same(manager.restore(3, args=ocp.args.StandardRestore(target(1))))
report(same=same_sharding, other=other_sharding, step=step, manager=from_manager)
"""

ORBAX_TO_OURS = """
with ocp.StandardCheckpointer() as orbax:
    orbax.save(f"{directory}/one", state)
loaded = [same(ckpt.load(f"{directory}/one", target(turned), options=options)) for turned in (0, 1)]
with ocp.CheckpointManager(f"{directory}/steps") as manager:
    manager.save(3, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
checkpointer = ckpt.Checkpointer(f"{directory}/steps", read_only=True, options=options)
restored = checkpointer.restore_latest(default=target(1))
report(loaded=loaded, step=restored.step, restored=same(restored["default"]))
"""


def expected(number: int) -> np.ndarray:
    return np.arange(96, dtype=np.float32).reshape(8, 12) + number


def test_orbax_reads_what_two_processes_wrote(tmp_path):
    found = reports(launch(STATE + OURS_TO_ORBAX, tmp_path / "run"))
    assert found == [{"same": True, "other": True, "step": 3, "manager": True}] * 2
    # and in one process, on its own devices
    here = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    one = jax.ShapeDtypeStruct((8, 12), np.float32, sharding=here)
    names = ("rows", "blocks", "all", "crossed")
    with ocp.StandardCheckpointer() as orbax:
        target = {"params": dict.fromkeys(names, one)}
        loaded = orbax.restore(tmp_path / "run/one/state", target)
    for number, name in enumerate(names):
        assert (np.asarray(loaded["params"][name]) == expected(number)).all()


@pytest.mark.parametrize("path", ["one", "steps/3"])
def test_we_read_what_two_processes_of_orbax_wrote(two_of_orbax, path):
    loaded = ckpt.load(two_of_orbax / path, as_numpy=True)
    for number, name in enumerate(("rows", "blocks", "all", "crossed")):
        assert (loaded["params"][name] == expected(number)).all()


@pytest.fixture(scope="module")
def two_of_orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two processes of Orbax, which ckpt has loaded there."""
    directory = tmp_path_factory.mktemp("orbax") / "run"
    found = reports(launch(STATE + ORBAX_TO_OURS, directory))
    assert found == [{"loaded": [True, True], "step": 3, "restored": True}] * 2
    return directory


def tree(n: int) -> dict[str, Any]:
    return {"w": jnp.full((128, 128), float(n)), "small": np.full(2, n), "n": n}


def orbax_steps(bucket: OrbaxBucket) -> list[int]:
    with ocp.CheckpointManager(bucket.seen) as manager:
        steps = sorted(manager.all_steps())
        assert manager.latest_step() == max(steps, default=None)
    return steps


def our_steps(bucket: OrbaxBucket) -> list[int]:
    with ckpt.Checkpointer(bucket.root, read_only=True) as checkpointer:
        steps = checkpointer.all_steps()
        assert checkpointer.latest_step() == max(steps, default=None)
    return steps


def orbax_value(bucket: OrbaxBucket, step: int) -> int:
    """The number of the tree of that step, which must be whole."""
    with ocp.CheckpointManager(bucket.seen) as manager:
        got = manager.restore(step)["state"]
    assert (np.asarray(got["w"]) == got["n"]).all() and (np.asarray(got["small"]) == got["n"]).all()
    return got["n"]


def write(bucket: OrbaxBucket, *steps: int, **arguments: Any) -> None:
    with ckpt.Checkpointer(bucket.root, asynchronous=False, **arguments) as checkpointer:
        for step in steps:
            checkpointer.save(step, tree(step))


def write_with_orbax(bucket: OrbaxBucket, *steps: int, **settings: Any) -> None:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **settings)
    with ocp.CheckpointManager(bucket.seen, options=options) as manager:
        for step in steps:
            args = ocp.args.Composite(state=ocp.args.StandardSave(tree(step)))
            manager.save(step, args=args)


@pytest.mark.parametrize("route", routes.named(routes.ROUTES))
def test_orbax_restores_ours(bucket, route):
    want = routes.sharded_tree()
    with ckpt.Checkpointer(bucket.root) as checkpointer:
        checkpointer.save(5, want)
    routes.check_route(route, bucket.seen, 5, "state", want)


def test_we_load_what_orbax_wrote(bucket):
    want = routes.sharded_tree()
    with ocp.CheckpointManager(bucket.seen) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave(want)))
        manager.wait_until_finished()
    ocp_v1.save(bucket.seen / "4", want)
    with ckpt.Checkpointer(bucket.root) as checkpointer:
        assert checkpointer.all_steps() == [3, 4]
        restored = checkpointer.restore_latest(abstract(want))
        assert restored is not None and restored.step == 4
        assert_same(restored["state"], want, sharding=True)
        assert_same(checkpointer.load(3), routes.as_orbax_gives(want))
    with ocp.StandardCheckpointer() as standard:
        standard.save(bucket.seen / "alone", want)
        standard.wait_until_finished()
    assert_same(ckpt.load(f"{bucket.root}/alone", abstract(want)), want, sharding=True)


def check_moments(bucket: OrbaxBucket, work: Callable[[], Any], values: dict[int, set[int]]) -> int:
    """Both see whole steps of these values only, before and after the next Checkpointer; gives how many moments there were."""
    moments = bucket.moments(work)
    seen: list[tuple[list[int], list[int]]] = []
    for moment in moments:
        bucket.set(moment)
        ours, theirs = our_steps(bucket), orbax_steps(bucket)
        assert set(theirs) <= set(ours) <= set(values), (theirs, ours)
        assert all(orbax_value(bucket, step) in values[step] for step in theirs)
        seen.append((ours, theirs))
        ckpt.Checkpointer(bucket.root).close()  # the next run finishes what the last one began
        ours = our_steps(bucket)
        assert orbax_steps(bucket) == ours
        for step in ours:
            assert orbax_value(bucket, step) == ckpt.load(f"{bucket.root}/{step}")["n"]
    return len({(tuple(ours), tuple(theirs)) for ours, theirs in seen})


def delete(bucket: OrbaxBucket) -> None:
    with ckpt.Checkpointer(bucket.root) as checkpointer:
        checkpointer.delete(1)


def overwrite(bucket: OrbaxBucket) -> None:
    with ckpt.Checkpointer(bucket.root, asynchronous=False) as checkpointer:
        checkpointer.save(2, tree(20), overwrite=True)


@pytest.mark.parametrize(
    ("before", "work", "values", "kinds"),
    [
        # not there, ours alone, there
        ((1,), lambda bucket: write(bucket, 2), {1: {1}, 2: {2}}, [3]),
        ((1, 2), delete, {1: {1}, 2: {2}}, range(2, 100)),
        ((1, 2), overwrite, {1: {1}, 2: {2, 20}}, range(1, 100)),
    ],
    ids=["save", "delete", "overwrite"],
)
def test_a_call_that_dies(bucket, before, work, values, kinds):
    write(bucket, *before)
    assert check_moments(bucket, lambda: work(bucket), values) in kinds


def test_a_save_of_orbax_that_dies(bucket):
    write(bucket, 1)
    moments = bucket.moments(lambda: write_with_orbax(bucket, 2))
    assert len(moments) > 5
    for moment in moments:
        bucket.set(moment)
        assert our_steps(bucket) == orbax_steps(bucket)
        found = our_steps(bucket)[-1]
        assert ckpt.load(f"{bucket.root}/{found}")["n"] == found
    assert our_steps(bucket) == [1, 2]


def test_a_deletion_by_orbax_that_dies(bucket):
    """It deletes in any order, so half a step may be left; what is seen of it is damaged, not wrong."""
    write(bucket, 1)
    write_with_orbax(bucket, 2, 3)
    for step in (1, 2):
        with ocp.CheckpointManager(bucket.seen) as manager:
            moments = bucket.moments(lambda manager=manager, step=step: manager.delete(step))
        assert len(moments) > 5
        for moment in moments:
            bucket.set(moment)
            assert set(orbax_steps(bucket)) <= set(our_steps(bucket))
            with contextlib.suppress(ckpt.CheckpointError):
                assert ckpt.load(f"{bucket.root}/{step}")["n"] == step
            with ckpt.Checkpointer(bucket.root, read_only=True) as checkpointer:
                assert checkpointer.restore_latest(state=tree(0)).step == 3
        assert our_steps(bucket) == orbax_steps(bucket) == list(range(step + 1, 4))
