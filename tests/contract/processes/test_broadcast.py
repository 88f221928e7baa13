"""Where several processes load, each region is read once: with broadcast=True by one of the processes that hold it, with
rules= and select= by each what its shards need.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports

COUNTING = """
counted, plain = [], os.preadv
def counting(descriptor, *arguments):
    got = plain(descriptor, *arguments)
    if "/d/" in os.readlink(f"/proc/self/fd/{descriptor}"):
        counted.append(got)
    return got
os.preadv = counting

def bytes_read(call):
    counted.clear()
    value = call()
    return sum(counted), value

sharing = ckpt.Options(timeout_secs=40, broadcast=True)
devices = np.array(jax.devices())
"""

LOAD = """
mesh = Mesh(devices.reshape(2, -1), ("replica", "shard"))
def target(spec):
    return jax.ShapeDtypeStruct((4096, 1024), np.float32, sharding=NamedSharding(mesh, spec))
like = {
    "all": target(P()), "halves": target(P(None, "shard")), "once": target(P(("replica", "shard")))
}
for number in range(40):
    like[f"small{number:02}"] = jax.ShapeDtypeStruct((64,), np.int32, sharding=NamedSharding(mesh, P()))
def same(loaded):
    for name, leaf in loaded.items():
        whole = np.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        assert leaf.sharding == like[name].sharding
        for shard in leaf.addressable_shards:
            if not (np.asarray(shard.data) == whole[shard.index]).all():
                return False
    return True

for name in like if count == 2 else ["all"]:
    if "small" not in name:
        told[name], loaded = bytes_read(
            lambda: ckpt.load(f"{directory}/one", {name: like[name]}, unexpected="ignore", options=sharing)
        )
        assert same(loaded)
told["tree"], loaded = bytes_read(lambda: ckpt.load(f"{directory}/one", like, options=sharing))
assert same(loaded)
told["apart"], loaded = bytes_read(lambda: ckpt.load(f"{directory}/one", like, options=options))
assert same(loaded)
# rounds of a megabyte, and regions of which one is more than that
small = ckpt.Options(timeout_secs=40, broadcast=True, max_host_bytes=4 << 20)
told["bounded"], loaded = bytes_read(lambda: ckpt.load(f"{directory}/one", like, options=small))
assert same(loaded)
restored = ckpt.restore(f"{directory}/one", options=sharing, state=like)
assert same(restored["state"])
pending = ckpt.load_async(f"{directory}/one", like, options=sharing)
told["background"], loaded = bytes_read(pending.result)
assert same(loaded)
"""


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("processes", [2, 4])
def test_one_copy_is_read(tmp_path, processes):
    directory = tmp_path / "run"
    large = np.arange(4096 * 1024, dtype=np.float32).reshape(4096, 1024)
    tree: dict[str, object] = dict.fromkeys(("all", "halves", "once"), large)
    tree |= {f"small{number:02}": np.arange(64, dtype=np.int32) for number in range(40)}
    ckpt.save(directory / "one", tree)
    told = reports(launch(COUNTING + LOAD, directory, processes=processes, devices=4 // processes))
    size = large.nbytes
    if processes == 2:
        assert [one["all"] for one in told] in ([size, 0], [0, size])
        assert sum(one["halves"] for one in told) == 2 * size  # columns: blocks are whole rows
        assert [one["once"] for one in told] == [size // 2] * 2
    small = 40 * 64 * 4
    for name in ("tree", "bounded"):
        total = sum(one[name] for one in told)
        # "halves" is read in columns, and blocks are whole rows: they are read once for all halves that
        # are read in one round, so once or twice; small ones with gaps
        assert 3 * size + small <= total <= 4.01 * size, (name, told)
    for one in told:
        assert one["apart"] >= 2 * size + size // processes
        assert one["background"] == one["apart"]


BITS = """
from tests.contract.processes.test_broadcast import values
jax.config.update("jax_enable_x64", True)
devices = np.array(jax.devices())
sharing = ckpt.Options(timeout_secs=40, broadcast=True)
mesh = Mesh(devices.reshape(2, 2), ("replica", "shard"))
one_each = Mesh(devices[1:3], ("a",))
hidden = Mesh(devices, ("a",), axis_types=(jax.sharding.AxisType.Explicit,))

def like(name, array, spec, mesh):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

def bits(array):
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.ascontiguousarray(np.asarray(array))
    return array.reshape(-1).view(np.uint8).tolist() if array.size else []

wrong = []
everything = values()
for path in ("plain", "packed"):
    for spec, where in ((P(), mesh), (P("shard"), mesh), (P(), one_each), (P("a"), hidden)):
        chosen = {n: a for n, a in everything.items() if spec == P() or (a.ndim and a.shape[0] == 8)}
        target = {name: like(name, array, spec, where) for name, array in chosen.items()}
        with jax.set_mesh(hidden):
            loaded = ckpt.load(f"{directory}/{path}", target, unexpected="ignore", options=sharing)
        for name, leaf in loaded.items():
            for shard in leaf.addressable_shards:
                if bits(shard.data) != bits(chosen[name][shard.index[: leaf.ndim]]):
                    wrong.append([path, str(spec), name])
# numbers of the host, and arrays of each process's own, are read by each
told = ckpt.load(f"{directory}/plain", {"count": 0, "f32": np.zeros(8, np.float32)}, unexpected="ignore", options=sharing)
own = jax.device_put(np.zeros(8, np.int16), jax.local_devices()[0])
mine = ckpt.load(f"{directory}/plain", {"i16": own}, unexpected="ignore", options=sharing)["i16"]
assert mine.sharding == own.sharding and bits(mine) == bits(everything["i16"])
report(wrong=wrong, count=told["count"])
"""


def values() -> dict[str, Any]:
    """Every pattern of bits that may be lost on the way: eight elements of random bytes."""
    random = np.random.default_rng(7)
    found: dict[str, Any] = {}
    names = "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 complex64"
    for name in names.split():
        dtype = jnp.dtype(name)
        found[name] = np.frombuffer(random.bytes(8 * dtype.itemsize), dtype)
    found["f32"] = np.array([0x7FC00001, 0xFF800001, 0x80000000, 1] * 2, np.uint32).view(np.float32)
    found["i16"] = np.arange(-4, 4, dtype=np.int16)
    found["u64"] = np.frombuffer(random.bytes(64), np.uint64)
    found["bool"] = np.arange(8) % 3 == 0
    found["int4"] = np.arange(-8, 8, 2).astype(jnp.int4)
    found["uint2"] = (np.arange(8) % 4).astype(jnp.uint2)
    found["empty"] = np.zeros((0, 3), np.float32)
    found["scalar"] = np.float32(0.1).reshape(())
    found["odd"] = np.frombuffer(random.bytes(105), np.uint8).reshape(3, 5, 7)
    found["key"] = jax.random.split(jax.random.key(1), 8)
    found["rbg"] = jax.random.key(2, impl="rbg")
    return found


def test_every_bit_arrives(tmp_path):
    directory = tmp_path / "run"
    with jax.enable_x64(True):
        tree = {
            name: array if name in ("key", "rbg") else jnp.asarray(array)
            for name, array in values().items()
        }
        ckpt.save(directory / "plain", {**tree, "count": 3})
        ckpt.save(directory / "packed", tree, options=ckpt.Options(compression="zstd"))
    told = reports(launch(BITS, directory))
    assert told == [{"wrong": [], "count": 3}] * 2


CHECK = """
from ckpt_core import Rule
square = Mesh(devices.reshape(2, 2), ("a", "b"))
table = np.arange(64 * 8 * 4096, dtype=np.float32).reshape(64, 8, 4096)
layers = table.reshape(4, 16 * 8, 4096)
rows = P(("a", "b"))

def like(*shape, spec=rows):
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(square, spec))

def check(name, target, expected, **how):
    counted.clear()
    loaded = ckpt.load(f"{directory}/{name}", target, options=how.pop("options", options), **how)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and not one.is_fully_addressable
        assert all((np.asarray(s.data) == other[s.index]).all() for s in one.addressable_shards)
    return sum(counted)
"""

LOADS = """
parts = [Rule("w", "w/{n}", stack="n", stack_axis=1)]
taken = {"w": [table[:, n] for n in range(8)]}
stacked = [Rule("l/{n}", "w", stack="n")]
told = {
    "select": check("table", {"w": like(32, 8, 4096)}, {"w": table[32:]}, select={"w": np.s_[32:]}),
    "middle": check("table", {"w": like(64, 4096)}, {"w": table[:, 3]}, select={"w": np.s_[:, 3]}),
    "as saved": check("table", None, {"w": table[:, 2:4]}, select={"w": np.s_[:, 2:4]}),
    "unstack": check("table", {"w": [like(64, 4096) for _ in range(8)]}, taken, rules=parts),
    "stack": check("list", {"w": like(4, 128, 4096)}, {"w": layers}, rules=stacked),
    "broadcast": check(
        "table", {"w": [like(64, 4096, spec=P("b")) for _ in range(8)]}, taken, rules=parts,
        options=sharing,
    ),
}
"""

SAVE = """
ckpt.save(f"{directory}/table", {"w": put(table, rows, square)}, options=options)
state = {"l": [put(one, P(None, "a"), square) for one in layers]}
ckpt.save(f"{directory}/list", state, options=options)
"""


@pytest.mark.linux("/proc/self/fd")
def test_a_process_reads_what_its_shards_need(tmp_path):
    reports(launch(COUNTING + CHECK + SAVE, tmp_path / "run", limit_secs=150))
    all_bytes = 64 * 8 * 4096 * 4
    for told in reports(launch(COUNTING + CHECK + LOADS, tmp_path / "run", limit_secs=150)):
        assert told["select"] == all_bytes // 4
        # 16 rows of an array are a block, and each block has some of every layer
        assert told["middle"] == told["as saved"] == told["unstack"] == all_bytes // 2
        assert told["stack"] == all_bytes // 2
        assert told["broadcast"] <= all_bytes


DIFFER = """
rules = [[Rule("a", "x"), Rule("b", "y")], [Rule("b", "x"), Rule("a", "y")]]
parts = [{"a": np.s_[:32]}, {"a": np.s_[32:]}]
both = {name: like(64, 8) for name in "xy"}
told = {
    "rules": raised(lambda: ckpt.load(f"{directory}/one", both, rules=rules[index], options=options)),
    "select": raised(
        lambda: ckpt.load(
            f"{directory}/one", {"a": like(32, 8)}, select=parts[index], only="a", options=options
        )
    ),
}
"""


def test_what_is_not_the_same_is_refused(tmp_path):
    """A global array would be made of shards of different arrays."""
    values = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    ckpt.save(tmp_path / "run/one", {"a": values, "b": -values})
    for told in reports(launch(COUNTING + CHECK + DIFFER, tmp_path / "run")):
        for name in ("rules", "select"):
            assert told[name] is not None, name
            assert "all processes must load the same" in told[name]["text"]
