"""Any number of processes and any mesh to any other; what each writes and reads is counted in bytes.

There are always four devices, spread over one, two or four processes, so that all runs can make the
same meshes.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._layout.chunks import blocks
from ckpt_core._storage import Location, new_context, read_index
from tests.support.launch import launch, reports

DEVICES = 4

CASES = """
def meshes(devices):
    return {
        "line": Mesh(devices, ("a",)),
        "square": Mesh(devices.reshape(2, 2), ("a", "b")),
        "crossed": Mesh(devices.reshape(2, 2).T, ("a", "b")),
        "backwards": Mesh(devices[::-1], ("a",)),
        "wide": Mesh(devices.reshape(1, 4), ("b", "a")),
        "three": Mesh(devices[:3], ("a",)),
        "two": Mesh(devices[1:3], ("a",)),
    }

SPECS = {
    "rows": ("line", P("a")),
    "columns": ("line", P(None, "a")),
    "replicated": ("line", P()),
    "back": ("backwards", P("a")),
    "blocks": ("square", P("a", "b")),
    "blocks_crossed": ("crossed", P("a", "b")),
    "both_in_one": ("square", P(("b", "a"))),
    "half": ("square", P("a")),  # replicated over b
    "half_columns": ("crossed", P(None, "b")),  # replicated over a
    "wide": ("wide", P("b", "a")),
    "uneven": ("three", P("a")),  # with two processes one holds twice as much as the other
    "uneven_columns": ("three", P(None, "a")),
    "some": ("two", P("a")),  # with four processes two hold nothing of it
}

def values(number):
    return np.arange(12 * 24, dtype=np.float32).reshape(12, 24) + 1000 * number

def shardings(shift):
    grids, names = meshes(np.array(jax.devices())), list(SPECS)
    chosen = {}
    for number, name in enumerate(names):
        mesh, spec = SPECS[names[(number + shift) % len(names)]]
        chosen[name] = NamedSharding(grids[mesh], spec)
    return chosen

def tree(shift=0):
    return {
        name: jax.make_array_from_callback(
            (12, 24), sharding, lambda where, n=number: values(n)[where], dtype=np.float32
        )
        for number, (name, sharding) in enumerate(shardings(shift).items())
    }

def target(shift):
    return {
        name: jax.ShapeDtypeStruct((12, 24), np.float32, sharding=sharding)
        for name, sharding in shardings(shift).items()
    }

def wrong(loaded, shift):
    found = []
    for number, (name, sharding) in enumerate(shardings(shift).items()):
        leaf = loaded[name]
        same = leaf.sharding == sharding and all(
            (np.asarray(shard.data) == values(number)[shard.index]).all()
            for shard in leaf.addressable_shards
        )
        if not same:
            found.append(name)
    return found
"""

SAVE = """
ckpt.save(f"{directory}/one", tree(), options=options)
report()
"""

LOAD = """
bad = {}
for shift in SHIFTS:
    found = wrong(ckpt.load(f"{directory}/one", target(shift), options=options), shift)
    if found:
        bad[shift] = found
report(bad=bad)
"""


def check_matrix(directory: Path, save_on: int, load_on: int, shifts: list[int]) -> None:
    """Saves on so many processes, and loads on others on every sharding that SPECS has."""
    devices = DEVICES // save_on
    reports(launch(CASES + SAVE, directory, processes=save_on, devices=devices))
    assert_written_once(directory / "one/state", save_on)
    assert ckpt.verify(directory / "one").ok
    code = CASES + LOAD.replace("SHIFTS", json.dumps(shifts))
    told = reports(launch(code, directory, processes=load_on, devices=DEVICES // load_on))
    assert told == [{"bad": {}}] * load_on


def written(item: Path, processes: int) -> list[dict[str, int]]:
    """For each process the chunks that it wrote, with their bytes."""
    found: list[dict[str, int]] = []
    for process in range(processes):
        where = item if processes == 1 else item / f"ocdbt.process_{process}"
        index = read_index(Location(str(where), True), new_context())
        found.append(
            {
                key: extent.size_bytes
                for key, extent in index.items()
                if not key.endswith("zarr.json")
            }
        )
    return found


def assert_written_once(item: Path, processes: int) -> list[int]:
    """No two processes wrote the same; gives the bytes of each."""
    chunks = written(item, processes)
    for one, other in itertools.combinations(chunks, 2):
        assert not one.keys() & other.keys()
    merged = read_index(Location(str(item), True), new_context())
    assert {key for key in merged if not key.endswith("zarr.json")} == set().union(*chunks)
    return [sum(process.values()) for process in chunks]


def test_two_processes_to_two_on_other_shardings(tmp_path: Path) -> None:
    check_matrix(tmp_path / "run", 2, 2, [0, 4])


def test_one_process_to_four(tmp_path: Path) -> None:
    """With four, two of the processes hold nothing of some arrays."""
    check_matrix(tmp_path / "run", 1, 4, [0, 5])


@pytest.mark.slow
@pytest.mark.parametrize("load_on", [1, 2, 4])
@pytest.mark.parametrize("save_on", [1, 2, 4])
def test_matrix(tmp_path: Path, save_on: int, load_on: int) -> None:
    check_matrix(tmp_path / "run", save_on, load_on, list(range(13)))


REPLICAS = """
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "shard"))
def put(shape, spec):
    return jax.make_array_from_callback(
        shape, NamedSharding(mesh, spec), lambda where: np.zeros(shape, np.float32)[where]
    )
tree = {"large": put((4096, 1024), P())}
for number in range(7):
    tree[f"replicated{number}"] = put((64, 1024), P())
    tree[f"split{number}"] = put((64, 1024), P("shard"))
tree["local"] = jax.numpy.ones((256, 1024))  # every process has one of its own
ckpt.save(f"{directory}/one", tree, options=options)
report()
"""


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_share_the_writing(tmp_path: Path, processes: int) -> None:
    reports(launch(REPLICAS, tmp_path / "run", processes=processes, devices=4 // processes))
    sizes = assert_written_once(tmp_path / "run/one/state", processes)
    local = 1024 * 1024
    sizes[0] -= local
    assert sum(sizes) == 4 * (4096 * 1024 + 7 * 2 * 64 * 1024)
    # what cannot be divided any more: one small array of those that all hold, and with four
    # processes one of those that two of them hold
    undivided = 64 * 1024 if processes == 2 else 64 * 1024 + 32 * 1024
    assert max(sizes) - min(sizes) <= 4 * undivided, sizes
    if processes == 2:
        assert max(sizes) <= 1.05 * min(sizes), sizes


COUNTED = """
from ckpt_core._storage import arrays
counted = {}
plain = arrays.DataFiles.read
def counting(self, *arguments):
    got = plain(self, *arguments)
    counted[name] = counted.get(name, 0) + got
    return got
arrays.DataFiles.read = counting
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
for name, spec in {"rows": P(("a", "b")), "half": P("a"), "columns": P(None, "b"), "all": P()}.items():
    sharding = NamedSharding(mesh, spec)
    like = {"w": jax.ShapeDtypeStruct((40, 65536), np.float32, sharding=sharding)}
    ckpt.load(f"{directory}/one", like)
report(counted=counted)
"""


def test_a_process_reads_what_its_shards_need(tmp_path: Path) -> None:
    """Rounded up to the blocks that checksums cover, here 16 rows of 256 KiB."""
    directory = tmp_path / "run"
    values = np.arange(40 * 65536, dtype=np.float32).reshape(40, 65536)
    ckpt.save(directory / "one", {"w": values})
    told = reports(launch(COUNTED, directory))

    def needed(*rows: tuple[int, int]) -> int:
        return sum(block.size_bytes for one in rows for block in blocks((40, 65536), 4, rows=one))

    for index, process in enumerate(told):
        first = 20 * index
        assert process["counted"] == {
            "rows": needed((first, first + 20)),  # a block of two shards once
            "half": needed((first, first + 20)),  # both devices hold it: read once
            "columns": needed((0, 40)),  # blocks are whole rows
            "all": needed((0, 40)),
        }


def test_what_jax_cannot_make_is_no_case_here() -> None:
    """Shards of different sizes: jax refuses them, so there is nothing to save."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("a",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    with pytest.raises(ValueError, match="evenly divide"):
        jax.device_put(np.zeros((4, 2), np.float32), sharding)


ELSEWHERE = """
mesh = Mesh(np.array(jax.devices())[1:3], ("a",))
def put(data, *spec):
    sharding = NamedSharding(mesh, P(*spec, *[None] * (data.ndim - len(spec))))
    return jax.make_array_from_callback(
        data.shape, sharding, lambda where: data[where], dtype=data.dtype
    )
words = np.arange(8, dtype=np.uint32).reshape(4, 2)
tree = {
    "keys": jax.random.wrap_key_data(put(words, "a")),
    "key": jax.random.wrap_key_data(put(words[0])),
    "copied": put(words),
}
ckpt.save(f"{directory}/one", tree, options=options)
loaded = {}
for name in ("apart", "together"):
    chosen = ckpt.Options(timeout_secs=40, broadcast=name == "together")
    found = ckpt.load(f"{directory}/one", tree, options=chosen)
    data = {n: jax.random.key_data(leaf) if "key" in n else leaf for n, leaf in found.items()}
    loaded[name] = {
        n: [np.asarray(shard.data).tolist() for shard in leaf.addressable_shards]
        for n, leaf in data.items()
    }
report(**loaded)
"""


def test_what_lies_on_the_devices_of_others_only(tmp_path: Path) -> None:
    told = reports(launch(ELSEWHERE, tmp_path / "run", processes=4, devices=1))
    words = np.arange(8).reshape(4, 2).tolist()
    nothing: dict[str, list[object]] = {"keys": [], "key": [], "copied": []}
    first, second = (
        {"keys": [half], "key": [words[0]], "copied": [words]} for half in (words[:2], words[2:])
    )
    for name in ("apart", "together"):
        assert [one[name] for one in told] == [nothing, first, second, nothing]


UNSHARED = """
# one path that leads elsewhere in each process, as it does where every host has a disk of its own
os.makedirs(f"{directory}/{index}")
os.chdir(f"{directory}/{index}")
mesh = Mesh(np.array(jax.devices()), ("a",))
sharding = NamedSharding(mesh, P("a"))
tree = {"w": jax.make_array_from_callback((8,), sharding, lambda where: np.arange(8.0)[where])}
wrote = []
from ckpt_core._storage import writer
plain = writer.ArrayWriter.__init__
def noting(self, *arguments, **named):
    wrote.append(1)
    plain(self, *arguments, **named)
writer.ArrayWriter.__init__ = noting
alone = raised(lambda: ckpt.save("/proc/self/cwd/one", tree, options=options))
with ckpt.Checkpointer("/proc/self/cwd/steps", asynchronous=False, options=options) as steps:
    in_steps = raised(lambda: steps.save(0, tree))
before = list(wrote)
meet("tried")
left = sorted(path for path in os.listdir(".") if path != "steps")
ckpt.save(f"{directory}/shared", tree, options=options)
report(alone=alone, in_steps=in_steps, wrote=before, left=left, after=len(wrote))
"""


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
def test_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    told = reports(launch(UNSHARED, directory))
    for process in told:
        for error in (process["alone"], process["in_steps"]):
            assert error["type"] == "CheckpointError"
            assert "is not a directory that all processes share" in error["text"]
            assert "process 1 does not see what process 0 wrote" in error["text"]
            assert error["secs"] < 30
        assert process["wrote"] == [] and process["left"] == []
        assert process["after"] == 1
    assert ckpt.verify(directory / "shared").ok
