"""Publish weights and follow them: what followers get, bit for bit, and what is read, kept and refused."""

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.support.stores import keys_at, url_of_kind

NUMBER = 20_000
PLACES = pytest.mark.parametrize("place", ["local", "memory", "s3"], indirect=True)


@pytest.fixture(name="place")
def make_place(request, tmp_path):
    kind = getattr(request, "param", "local")
    return str(tmp_path / "run") if kind == "local" else url_of_kind(request, kind)


def mesh(*shape):
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("x", "y")[: len(shape)])


def weights(version, where=None):
    """Of which each version changes about one element in fifty."""
    at = np.arange(NUMBER)
    values = np.sin(at) + (version // 50 + (at % 50 < version % 50)) / 8
    tree = {
        "w": jnp.asarray(values.reshape(80, 250), jnp.float32),
        "layers": [{"b": jnp.full(8, version, jnp.float32)}, {"b": jnp.zeros(8)}],
        "count": np.int64(version),
        "rest": {"key": jax.random.key(3), "text": "of all versions", "flag": jnp.arange(8) > 3},
    }
    if where is not None:
        spec = NamedSharding(where, P(*where.axis_names))
        tree["w"] = jax.device_put(tree["w"], spec)
    return tree


def bits(tree):
    tree = dict(tree, rest={**tree["rest"], "key": jax.random.key_data(tree["rest"]["key"])})
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, str) else np.asarray(leaf).tobytes(), tree
    )


def as_cast(version, dtype=jnp.bfloat16):
    tree = weights(version)
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(dtype) if isinstance(leaf, jax.Array) and leaf.dtype == np.float32 else leaf
        ),
        tree,
    )


def publish(place, versions, where=None, **settings):
    with ckpt.Publisher(place, **settings) as publisher:
        for version in versions:
            publisher.publish(version, weights(version, where), cast=jnp.bfloat16)


def comes_to(follower, version):
    """Waits until a version is visible that is published in the background."""
    while (found := follower.update(timeout_secs=60)) != version:
        assert found is not None


def hidden(place, beginning=".ckpt-delta-"):
    names = keys_at(place).list() if "://" in place else [one.name for one in Path(place).iterdir()]
    return sorted(name for name in names if name.startswith(beginning))


@PLACES
def test_each_version_arrives_bit_for_bit(place):
    follower = ckpt.Follower(place)
    assert follower.update() is None
    with ckpt.Publisher(place, anchor_every=4) as publisher:
        for version in range(2, 12):
            publisher.publish(version, weights(version), cast=jnp.bfloat16)
            assert follower.update(timeout_secs=60) == version
            assert bits(follower.load()) == bits(as_cast(version))
            assert follower.update() is None
    # anchors are checkpoints like any other
    with ckpt.Checkpointer(place, read_only=True) as steps:
        assert steps.all_steps() == [2, 6, 10]
        assert bits(steps.load(10)) == bits(as_cast(10))
    assert ckpt.verify(f"{place}/10").ok
    assert bits(ckpt.Follower(place).load()) == bits(as_cast(11))


@pytest.mark.parametrize("target", ["one", "all", "halves"])
def test_trainer_and_sampler_on_other_devices_and_dtypes(target, place):
    wanted = {"one": None, "all": mesh(8), "halves": mesh(2, 2)}[target]
    follower, live = ckpt.Follower(place), weights(0, wanted)
    live["layers"][1]["b"] = jnp.ones(8, jnp.float16)
    layers, sharding = live["layers"], live["w"].sharding
    with ckpt.Publisher(place) as publisher:
        for version in (1, 2, 60):
            publisher.publish(version, weights(version, mesh(4, 2)), cast=jnp.bfloat16)
            assert follower.update(live, timeout_secs=60) == version
            assert live["layers"] is layers  # in place
            assert live["w"].sharding == sharding
            assert live["w"].dtype == np.float32
            assert (live["w"] == as_cast(version)["w"].astype(np.float32)).all()
            assert (layers[0]["b"] == version).all()
            assert layers[1]["b"].dtype == np.float16
            assert int(live["count"]) == version
    shapes = jax.tree.map(lambda leaf: leaf, weights(0, wanted))
    assert follower.load(shapes)["w"].sharding == sharding


def test_who_keeps_up_reads_no_anchor_and_who_joins_no_older_one(place):
    publish(place, [0])
    follower = ckpt.Follower(place)
    assert follower.update() == 0
    shutil.rmtree(f"{place}/0")
    publisher = ckpt.Publisher(place, anchor_every=3)
    publisher.publish(1, weights(1))  # float32: another structure, so an anchor
    publisher.publish(2, weights(2))
    publisher.close()
    assert follower.update() == 2
    with ckpt.Publisher(place, anchor_every=3) as publisher:
        for version in range(3, 10):
            publisher.publish(version, weights(version))
            if version == 3:
                assert follower.update(timeout_secs=60) == 3
    for anchor in (3, 6):
        shutil.rmtree(f"{place}/{anchor}")
    assert hidden(place)[0].startswith(".ckpt-delta-7-")  # 6 is the second newest anchor
    late = ckpt.Follower(place)
    assert late.update() == 9
    assert bits(late.load()) == bits(weights(9))


@pytest.mark.parametrize("what", ["lost", "flipped", "cut", "swapped"])
def test_a_delta_that_is_lost_or_damaged_is_left_out_until_the_next_anchor(what, place, caplog):
    follower = ckpt.Follower(place)
    with ckpt.Publisher(place, anchor_every=6) as publisher:
        for version in range(9):
            publisher.publish(version, weights(version), cast=jnp.bfloat16)
            if version == 1:
                comes_to(follower, 1)
            if version == 3:
                publisher.publish(4, weights(4), cast=jnp.bfloat16)  # so 3 is visible
                break
        third = Path(place, next(name for name in hidden(place) if "-3-" in name))
        second = Path(place, next(name for name in hidden(place) if "-2-" in name))
        data = third.read_bytes()
        changed = {
            "flipped": data[:30] + bytes([data[30] ^ 1]) + data[31:],
            "cut": data[:-1],
            "swapped": second.read_bytes(),
        }
        third.unlink() if what == "lost" else third.write_bytes(changed[what])
        assert follower.update(timeout_secs=60) == 2
        assert bits(follower.load()) == bits(as_cast(2))
        assert "version 3 is left out" in caplog.text
        assert follower.update() is None
        assert ckpt.Follower(place).update() == 2
        for version in (5, 6, 7):
            publisher.publish(version, weights(version), cast=jnp.bfloat16)
    assert follower.update() == 7
    assert bits(follower.load()) == bits(as_cast(7))


@pytest.mark.parametrize("what", ["anchor", "chain"])
def test_damage_of_an_anchor_and_of_the_chain(what, place):
    publish(place, range(5), anchor_every=3)
    follower = ckpt.Follower(place)
    if what == "anchor":
        file = max(Path(place, "3").rglob("d/*"), key=lambda one: one.stat().st_size)
    else:
        file = Path(place, ".ckpt-published")
        assert follower.update() == 4
    data = file.read_bytes()
    at = min(100, len(data) - 1)
    file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    # the older anchor, and the deltas after it, which stand beside the damaged one, too
    assert follower.update() == (4 if what == "anchor" else None)
    assert bits(follower.load()) == bits(as_cast(4))
    publish(place, [5])
    assert follower.update() == 5


def test_a_trainer_that_goes_back_is_followed_and_nothing_is_mixed(place):
    publish(place, range(10), anchor_every=3)
    follower, other = ckpt.Follower(place), weights(0)
    other["w"] = other["w"] * 3
    assert follower.update() == 9
    with ckpt.Publisher(place, anchor_every=3) as publisher:
        publisher.publish(6, other, cast=jnp.bfloat16)
        assert follower.update(timeout_secs=60) == 6
        assert (follower.load()["w"] == other["w"].astype(jnp.bfloat16)).all()
        with pytest.raises(ckpt.CheckpointExists, match="go back with another one"):
            publisher.publish(6, other)
        publisher.publish(7, weights(7), cast=jnp.bfloat16)
    assert follower.update() == 7
    assert bits(follower.load()) == bits(as_cast(7))
    assert sorted(one.name for one in Path(place).iterdir() if one.is_dir()) == ["0", "3", "6"]
    # 6 is an anchor alone: the version that it follows was abandoned
    assert {name.split("-")[2] for name in hidden(place)} == {"7"}


def test_all_anchors_that_were_abandoned_go(place):
    publish(place, range(70), anchor_every=1)
    publish(place, [2])
    assert sorted(one.name for one in Path(place).iterdir() if one.is_dir()) == ["0", "1", "2"]


def test_who_waits_waits_on_if_what_comes_is_damaged(place):
    follower = ckpt.Follower(place)
    with ckpt.Publisher(place) as publisher:
        publisher.publish(0, weights(0))
        comes_to(follower, 0)
        publisher.publish(1, weights(1))
    (delta,) = Path(place).glob(".ckpt-delta-1-*")
    delta.write_bytes(b"damaged")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(follower.update, timeout_secs=60)
        assert not wait([waits], 0.3).done
        publish(place, [2])
        assert waits.result() == 2


@PLACES
@pytest.mark.parametrize("grace_secs", [0.0, 3600.0])
def test_retention(place, grace_secs):
    options = ckpt.Options(delete_grace_secs=grace_secs)
    publish(place, range(12), anchor_every=3, max_to_keep=1, options=options)
    with ckpt.Checkpointer(place, read_only=True) as steps:
        assert steps.all_steps() == ([6, 9] if not grace_secs else [0, 3, 6, 9])
    kept = {int(name.split("-")[2]) for name in hidden(place)}
    assert kept == ({7, 8, 9, 10, 11} if not grace_secs else {*range(1, 12)})
    # what nothing names goes when the next one is opened
    publish(place, [12], max_to_keep=1)
    with ckpt.Checkpointer(place, read_only=True) as steps:
        assert steps.all_steps() == [9, 12]
    assert {int(name.split("-")[2]) for name in hidden(place)} == {10, 11}


def test_a_part_is_published_and_the_rest_stays(place):
    model = {"w": jnp.ones(4), "deep": [jnp.ones(2), jnp.ones(2)], "drop": jnp.zeros(3)}
    live = {"w": jnp.zeros(4), "deep": [jnp.zeros(2), jnp.zeros(2)], "drop": jnp.full(3, 5.0)}
    with ckpt.Publisher(place) as publisher:
        publisher.publish(0, model=model, only=["w", "deep/1"])
        with pytest.raises(ValueError, match="matches no leaf"):
            publisher.publish(1, model=model, only=["w", "dep/**"])
        publisher.publish(1, model=model, only=lambda path, leaf: path != "drop")
    follower = ckpt.Follower(place)
    assert follower.update(model=live) == 1
    assert [float(leaf[0]) for leaf in jax.tree.leaves(live)] == [1, 1, 5, 1]
    assert set(follower.load()["model"]) == {"w", "deep"}


def test_what_is_refused(place, tmp_path):
    with ckpt.Publisher(place) as publisher:
        for wrong, error in (
            (dict(cast=jnp.int8), TypeError),
            (dict(cast=True), TypeError),
            (dict(data=ckpt.Files(tmp_path)), ckpt.UnsupportedLeaf),
            (dict(overwite=1), TypeError),
            ({}, TypeError),
        ):
            with pytest.raises(error):
                publisher.publish(0, **wrong)
        for version in (-1, 1.5, "1"):
            with pytest.raises((TypeError, ValueError)):
                publisher.publish(version, {"w": jnp.ones(3)})
        publisher.publish(0, {"w": jnp.ones(3)})
    with pytest.raises(ckpt.CheckpointError, match="is closed"):
        publisher.publish(1, {"w": jnp.ones(3)})
    follower = ckpt.Follower(place)
    with pytest.raises(ckpt.UnsupportedLeaf, match="load"):
        follower.update((jnp.ones(3),))
    with pytest.raises(ckpt.StructureMismatch):
        follower.update({"v": jnp.ones(3)})
    with pytest.raises(ckpt.StructureMismatch):
        follower.load({"w": jnp.ones(4)})
    with pytest.raises(TypeError):
        follower.update({"w": jnp.ones(3)}, timeout_secs="5")
    with pytest.raises(ckpt.CheckpointNotFound, match="nothing is published"):
        ckpt.Follower(tmp_path / "nowhere").load()
    live = {"w": jnp.zeros(3)}
    assert follower.update(live) == 0
    with ckpt.Checkpointer(tmp_path / "steps") as steps:
        steps.save(0, {"w": 1})
    with pytest.raises(ckpt.CheckpointExists, match="directory of its own"):
        ckpt.Publisher(tmp_path / "steps")
    with pytest.raises(ckpt.CheckpointExists):
        ckpt.Publisher(Path(place, "0"))


def test_a_failure_is_raised_once_and_the_next_version_is_an_anchor(place):
    publisher = ckpt.Publisher(place)
    for version in range(3):
        publisher.publish(version, weights(version))
    follower = ckpt.Follower(place)
    comes_to(follower, 2)
    publish(place, [3])  # another program takes the directory over
    publisher.publish(3, {"w": jnp.zeros(3)})
    with pytest.raises(ckpt.CheckpointError, match="another Publisher"):
        publisher.publish(4, weights(4))
    assert follower.update() == 3
    publisher.publish(4, weights(4))
    with pytest.raises(ckpt.CheckpointError, match="another Publisher"):
        publisher.close()
    publisher.close()
    assert bits(ckpt.load(f"{place}/3")) == bits(as_cast(3))
    publish(place, [3, 4])
    assert follower.update() == 4
    assert sorted(one.name for one in Path(place).iterdir() if one.is_dir()) == ["0", "3"]


def test_a_delta_of_a_version_that_failed_goes_with_the_next(place):
    chain = Path(place, ".ckpt-published")
    with ckpt.Publisher(place) as publisher:
        publisher.publish(0, weights(0))
        comes_to(ckpt.Follower(place), 0)
        aside = chain.rename(f"{place}/aside")
        chain.mkdir()
        publisher.publish(1, weights(1))
        with pytest.raises(IsADirectoryError):
            publisher.publish(2, weights(2))
        assert len(hidden(place)) == 1
        chain.rmdir()
        aside.rename(chain)
        publisher.publish(2, weights(2))
    assert hidden(place) == []
    assert bits(ckpt.Follower(place).load()) == bits(weights(2))


def test_steps_of_a_checkpointer_beside_it_stay(place):
    with ckpt.Checkpointer(place) as steps, ckpt.Publisher(place, max_to_keep=1) as publisher:
        steps.save(0, weights(0))
        steps.wait_until_finished()
        publisher.publish(0, weights(1))
        with pytest.raises(ckpt.CheckpointExists, match="directory of its own"):
            publisher.publish(1, weights(1))
        publisher.publish(1, weights(1))
        steps.save(7, weights(7))
    with pytest.raises(ckpt.CheckpointExists, match=r"\(0, 7\)"):
        ckpt.Publisher(place, max_to_keep=1)
    for step in (0, 7):
        assert bits(ckpt.load(f"{place}/{step}")) == bits(weights(step))


def test_items_without_arrays(place):
    live = {"w": jnp.zeros(3)}
    publisher = ckpt.Publisher(place)
    publisher.publish(0, params={"w": jnp.ones(3)}, batch_stats={}, name={"text": "x"})
    publisher.close()
    assert ckpt.Follower(place).update(params=live) == 0
    assert live["w"].tolist() == [1, 1, 1]


def test_other_values_than_arrays_and_later_changes_of_the_caller(place):
    host = np.arange(10.0)
    follower = ckpt.Follower(place)
    with ckpt.Publisher(place) as publisher:
        for version in range(4):
            publisher.publish(
                version, {"host": host, "n": version, "x": 1.5, "z": np.zeros((0, 3))}
            )
            host += 1
        publisher.publish(4, {"host": host, "n": version, "x": 1.5, "z": None})
        assert follower.update(timeout_secs=60) is not None
    follower.update()
    loaded = follower.load()
    assert loaded.pop("host").tobytes() == host.tobytes()
    assert loaded == {"n": 3, "x": 1.5, "z": None}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_reads_the_anchors(place):
    ocp = pytest.importorskip("orbax.checkpoint").v1
    with ckpt.Publisher(place, anchor_every=2) as publisher:
        for version in range(4):
            publisher.publish(version, {"w": jnp.full(100, version / 3)}, cast=jnp.bfloat16)
    loaded = ocp.load(f"{place}/2")
    assert (loaded["w"] == jnp.full(100, 2 / 3, jnp.bfloat16)).all()
    assert ocp.training.Checkpointer(place).latest.step == 2


def test_live_models(place):
    nnx = pytest.importorskip("flax.nnx")
    pytest.importorskip("ckpt_flax_nnx")
    trained, live = (
        nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(seed)), nnx.BatchNorm(8, rngs=nnx.Rngs(seed)))
        for seed in (0, 1)
    )
    follower = ckpt.Follower(place)
    with ckpt.Publisher(place) as publisher:
        for version in range(3):
            kernel = trained.layers[0].kernel
            kernel[...] = kernel[...].at[0, version].add(1)
            publisher.publish(version, model=trained, cast=jnp.bfloat16, only=nnx.Param)
            assert follower.update(model=live, timeout_secs=60) == version
            found = live.layers[0].kernel[...]
            assert found.dtype == np.float32
            assert (found == kernel[...].astype(jnp.bfloat16)).all()
    with pytest.raises(ckpt.StructureMismatch):
        follower.update(model=nnx.Linear(4, 9, rngs=nnx.Rngs(0)))
