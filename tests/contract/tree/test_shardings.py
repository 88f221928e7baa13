"""Every sharding to every other: what is saved, what is the default, what was asked for."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import ckpt_core as ckpt
from tests.support import forked, trees
from tests.support.children import environment
from tests.support.trees import abstract, assert_same, meshes, numbers, round_trip, sharded

SHAPES = {"small": (24, 24), "large": (1200, 312), "vector": (48, 1)}


def shardings(names):
    for mesh in names:
        for spec in trees.SPECS:
            yield mesh, spec


def fits(shape, mesh, spec):
    sizes = meshes()[mesh].shape
    for length, axes in zip(shape, (*trees.SPECS[spec], None, None), strict=False):
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        if length % math.prod(sizes[axis] for axis in axes):
            return False
    return True


def grid_tree(mesh_names):
    return {
        f"{shape}-{mesh}-{spec}": sharded(numbers(SHAPES[shape]), mesh, spec)
        for shape in SHAPES
        for mesh, spec in shardings(mesh_names)
        if fits(SHAPES[shape], mesh, spec)
    }


@pytest.mark.parametrize("mesh_name", ["4x2", "2x4", "reversed", "3x2", "last2", "1"])
def test_the_saved_sharding_is_the_default(tmp_path, mesh_name):
    tree = grid_tree([mesh_name])
    assert len(tree) >= 6
    assert_same(round_trip(tmp_path, tree), tree, sharding=True)


@pytest.mark.parametrize("source", ["4x2", "3x2", "1"])
def test_every_sharding_to_every_other(tmp_path, source):
    """Shards of the target cross the borders of the chunks in all the ways there are."""
    tree = {}
    for mesh, spec in shardings([source]):
        for shape in ("small", "vector"):
            if fits(SHAPES[shape], mesh, spec):
                tree[f"{shape}-{spec}"] = sharded(numbers(SHAPES[shape]), mesh, spec)
    ckpt.save(tmp_path / "c", tree, options=ckpt.Options(durable=False, chunk_bytes=1024))
    for mesh, spec in shardings(["2x4", "reversed", "3x2", "1"]):
        like = {
            name: sharded(np.asarray(leaf), mesh, spec)
            for name, leaf in tree.items()
            if fits(leaf.shape, mesh, spec)
        }
        got = ckpt.load(tmp_path / "c", abstract(like), unexpected="ignore")
        assert_same(got, like, sharding=True)


@pytest.mark.parametrize("form", ["one", "device", "function", "mesh", "tree"])
def test_a_sharding_is_asked_for(tmp_path, form):
    """A mesh refits what was saved to its axes, and replicates what fits nowhere."""
    tree = {"a": sharded(numbers((24, 24)), "4x2", "both"), "b": [jnp.ones(4)], "n": np.ones(2)}
    ckpt.save(tmp_path / "c", tree)
    mesh = meshes()["2x4"]
    rows, third = NamedSharding(mesh, P("y")), SingleDeviceSharding(jax.devices()[2])
    everywhere, both = NamedSharding(mesh, P()), NamedSharding(mesh, P("x", "y"))
    asked, a, b = {
        "one": (everywhere, everywhere, everywhere),
        "device": (third, third, third),
        "function": (lambda path, leaf: {"a": rows, "b/0": third}[path], rows, third),
        "mesh": (mesh, both, everywhere),
        "tree": ({"a": rows, "b": third}, rows, third),
    }[form]
    got = ckpt.load(tmp_path / "c", sharding=asked)
    assert_same(got, tree)
    assert got["a"].sharding == a
    assert got["b"][0].sharding.is_equivalent_to(b, 1)


def test_a_mesh_with_other_axes_takes_those_it_has(tmp_path):
    ckpt.save(tmp_path / "c", {"a": sharded(numbers((24, 24)), "4x2", "both")})
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "other"))
    got = ckpt.load(tmp_path / "c", sharding=other)["a"]
    assert got.sharding.is_equivalent_to(NamedSharding(other, P("x")), 2)
    np.testing.assert_array_equal(got, numbers((24, 24)))


def test_sharding_of_the_wrong_type(tmp_path):
    ckpt.save(tmp_path / "c", {"a": jnp.ones(4)})
    for wrong in ({"b": SingleDeviceSharding(jax.devices()[2])}, P("x"), "x", 3):
        with pytest.raises(TypeError, match="sharding"):
            ckpt.load(tmp_path / "c", sharding=wrong)


def test_a_sharding_that_does_not_divide(tmp_path):
    """Said before anything is read, with the leaf's name."""
    ckpt.save(tmp_path / "c", {"good": jnp.ones((8, 3)), "odd": {"leaf": jnp.ones((2, 3))}})
    sharding = NamedSharding(meshes()["4x2"], P("x"))
    like = {
        "good": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding),
        "odd": {"leaf": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)},
    }
    for load in (lambda: ckpt.load(tmp_path / "c", sharding=sharding),
                 lambda: ckpt.load(tmp_path / "c", like)):  # fmt: skip
        with pytest.raises((ckpt.CheckpointError, ValueError), match="odd/leaf"):
            load()


def test_shardings_of_every_make(tmp_path):
    """Explicit axes, three axes, permuted devices, memory kinds: all of it comes back."""
    axis = jax.sharding.AxisType
    devices = np.array(jax.devices())
    shardings = {
        "explicit": NamedSharding(
            jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis.Explicit,) * 2), P("x", "y")
        ),
        "mixed": NamedSharding(
            jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis.Explicit, axis.Auto)), P("y")
        ),
        "three": NamedSharding(Mesh(devices.reshape(2, 2, 2), ("a", "b", "c")), P(("a", "c"), "b")),
        "permuted": NamedSharding(
            Mesh(devices[[5, 2, 7, 1]].reshape(2, 2), ("a", "b")), P("b", "a")
        ),
        "host": NamedSharding(meshes()["4x2"], P("x"), memory_kind="pinned_host"),
        "device": SingleDeviceSharding(devices[6]),
    }
    tree = {name: jax.device_put(numbers((16, 8)), one) for name, one in shardings.items()}
    for got in (round_trip(tmp_path, tree), ckpt.load(tmp_path / "c", abstract(tree))):
        assert_same(got, tree)
        assert {name: array.sharding for name, array in got.items()} == shardings


def test_each_distinct_shard_is_written_once(tmp_path):
    """Replicas do not multiply the bytes on disk."""
    array = numbers((512, 512))
    for spec in trees.SPECS:
        ckpt.save(tmp_path / spec, {"a": sharded(array, "4x2", spec)})
        size = sum(path.stat().st_size for path in (tmp_path / spec).rglob("*") if path.is_file())
        assert array.nbytes <= size < 1.1 * array.nbytes, spec


def test_uncommitted_stays_uncommitted(tmp_path):
    """A counter that lives nowhere in particular must go on mixing with arrays of any mesh."""
    tree = {"step": jnp.int32(3), "w": sharded(numbers((24, 24)), "4x2", "both")}
    assert not tree["step"].committed
    ckpt.save(tmp_path / "c", tree)
    for got in (ckpt.load(tmp_path / "c", tree), ckpt.load(tmp_path / "c")):
        assert not got["step"].committed
        assert got["w"].committed
        assert jax.jit(lambda s, w: w + s)(got["step"], got["w"])[0, 0] == 3


def test_weak_types_stay_weak(tmp_path):
    """Or the step function would be traced anew, and bfloat16 times a scalar become float32."""
    everywhere = NamedSharding(meshes()["4x2"], P())
    tree = {
        "weak": jnp.asarray(2.0),
        "weak_int": jnp.asarray(2),
        "on_mesh": jax.device_put(jnp.asarray(2.0), everywhere),
        "on_device": jax.device_put(jnp.asarray(2.0), jax.devices()[3]),
        "strong": jnp.float32(2.0),
        "strong_on_mesh": jax.device_put(jnp.float32(2.0), everywhere),
    }
    for name, array in tree.items():
        assert array.weak_type != name.startswith("strong")
    for got in (round_trip(tmp_path, tree), ckpt.load(tmp_path / "c", tree)):
        assert_same(got, tree, sharding=True)
        wrong = [name for name in tree if got[name].weak_type != tree[name].weak_type]
        assert not wrong


ELSEWHERE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import ckpt_core as ckpt
tree = ckpt.load(sys.argv[1])
leaves = {
    name: [np.asarray(leaf).sum().item(), list(leaf.shape), len(leaf.devices())]
    for name, leaf in tree["arrays"].items()
}
draw = jax.random.normal(tree["keys"][3]).item()
like = {"arrays": {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tree["arrays"].items()}}
again = ckpt.load(sys.argv[1], like, unexpected="ignore")
same = all(np.array_equal(x, again["arrays"][n]) for n, x in tree["arrays"].items())
keys = jax.random.split(jax.random.key(0), 8)
ckpt.save(sys.argv[2], {"w": jnp.arange(96.0).reshape(8, 12), "k": keys})
print(json.dumps({"leaves": leaves, "draw": draw, "same": same, "devices": len(jax.devices())}))
"""


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.always), 3])
def test_eight_devices_to_fewer_and_back_with_no_argument(tmp_path, devices):
    arrays = grid_tree(["4x2", "2x4"])
    rows = NamedSharding(meshes()["4x2"], P("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), rows)
    ckpt.save(tmp_path / "c", {"arrays": arrays, "keys": keys}, options=trees.QUICK)
    flags = "" if devices == 1 else f"--xla_force_host_platform_device_count={devices}"
    places = str(tmp_path / "c"), str(tmp_path / "back")
    done = forked.run(ELSEWHERE, *places, environment=environment(XLA_FLAGS=flags))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["devices"] == devices
    assert answer["same"]
    assert answer["draw"] == jax.random.normal(keys[3]).item()
    assert answer["leaves"] == {
        name: [np.asarray(leaf).sum().item(), [*leaf.shape], 1] for name, leaf in arrays.items()
    }
    tree = {"w": jnp.arange(96.0).reshape(8, 12), "k": jax.random.split(jax.random.key(0), 8)}
    assert_same(ckpt.load(tmp_path / "back"), tree)
    wanted = jax.device_put(tree, rows)
    assert_same(ckpt.load(tmp_path / "back", abstract(wanted)), wanted, sharding=True)


@pytest.mark.parametrize(("saved", "spec"), [(8, P("x")), (8, P()), (2, P("x"))])
def test_the_report_names_what_lies_elsewhere_now(tmp_path, saved, spec):
    devices = jax.devices()
    sharding = NamedSharding(Mesh(np.array(devices[:saved]), ("x",)), spec)
    tree = {"w": jax.device_put(jnp.arange(16.0), sharding), "n": np.ones(2), "s": 3}
    ckpt.save(tmp_path / "one", model=tree)
    for target, expected in (
        (jnp.zeros(16), ("model/w",)),  # on the default device, chosen by nobody
        (jax.device_put(jnp.zeros(16), devices[3]), ("model/w",)),
        (jax.device_put(jnp.zeros(16), sharding), ()),
    ):
        restored = ckpt.restore(tmp_path / "one", model={**tree, "w": target})
        assert restored.report.resharded == expected
        assert np.asarray(restored["model"]["w"]).tolist() == list(range(16))
