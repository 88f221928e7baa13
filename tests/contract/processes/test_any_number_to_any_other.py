"""Any number of processes and any mesh to any other; what each writes and reads is counted in bytes.

There are always eight devices, spread over some processes, so that all runs can make the same meshes.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ckpt_core as ckpt
from tests.support.launch import launch, reports

DEVICES = 8
CASES = """
devices = np.array(jax.devices())
cube = Mesh(devices.reshape(2, 2, 2), ("x", "y", "z"))
square = Mesh(devices.reshape(4, 2).T, ("a", "b"))
flat = Mesh(devices[::-1], ("a",))
SPECS = {
    "rows": (flat, P("a")),
    "columns": (flat, P(None, "a")),
    "cube": (cube, P("x", "y")),
    "corner": (cube, P(("z", "x"), "y")),
    "halves": (cube, P(None, "z")),
    "half": (square, P("a")),  # replicated over b
    "copied": (cube, P()),
    "uneven": (Mesh(devices[:3], ("a",)), P("a")),  # with two processes all is in one
    "some": (Mesh(devices[2:5], ("a",)), P(None, "a")),  # with eight most hold nothing of it
}
sharing = ckpt.Options(timeout_secs=60, broadcast=True)

def values(number):
    return np.arange(24 * 24, dtype=np.float32).reshape(24, 24) + 1000 * number

def shardings(shift=0):
    chosen = list(SPECS.values())
    return {
        name: NamedSharding(*chosen[(number + shift) % len(chosen)])
        for number, name in enumerate(SPECS)
    }

def keys():
    words = np.arange(16, dtype=np.uint32).reshape(8, 2)
    return jax.random.wrap_key_data(put(words, P("a", None), flat))

def bits(key):
    return [np.asarray(part.data).tolist() for part in jax.random.key_data(key).addressable_shards]

def wrong(shift, options):
    like = {
        name: jax.ShapeDtypeStruct((24, 24), np.float32, sharding=sharding)
        for name, sharding in shardings(shift).items()
    }
    loaded = ckpt.load(f"{directory}/one", {**like, "keys": keys()}, options=options)
    return [
        [shift, name]
        for number, name in enumerate(SPECS)
        if loaded[name].sharding != like[name].sharding
        or not all(
            (np.asarray(shard.data) == values(number)[shard.index]).all()
            for shard in loaded[name].addressable_shards
        )
    ] + ([] if bits(loaded["keys"]) == bits(keys()) else ["keys"])
"""

SAVE = """
state = {name: put(values(n), one.spec, one.mesh) for n, (name, one) in enumerate(shardings().items())}
ckpt.save(f"{directory}/one", {**state, "keys": keys()}, options=options)
"""

LOAD = """
report(wrong=wrong(0, options) + wrong(1, options) + wrong(2, sharing) + wrong(5, options))
"""


@pytest.mark.parametrize(("save_on", "load_on"), [(2, 2), (1, 4), (4, 1), (4, 2), (2, 8), (8, 4)])
def test_from_some_to_some(tmp_path, save_on, load_on):
    """On every sharding that SPECS has; no two processes wrote the same, as the bytes on the disk tell."""
    directory = tmp_path / "run"
    many = {"processes": save_on, "devices": DEVICES // save_on, "limit_secs": 150}
    reports(launch(CASES + SAVE, directory, **many))
    assert ckpt.verify(directory / "one").ok
    many = {"processes": load_on, "devices": DEVICES // load_on, "limit_secs": 150}
    assert reports(launch(CASES + LOAD, directory, **many)) == [{"wrong": []}] * load_on


def written(item: Path, processes: int) -> list[int]:
    """The bytes of arrays that each process wrote."""
    folders = [item / f"ocdbt.process_{process}/d" for process in range(processes)]
    return [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]


REPLICAS = """
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "shard"))
def zeros(rows, spec=P()):
    return put(np.zeros((rows, 1024), np.float32), spec, mesh)
tree = {"large": zeros(4096)}
for number in range(7):
    tree[f"replicated{number}"] = zeros(64)
    tree[f"split{number}"] = zeros(64, P("shard"))
ckpt.save(f"{directory}/one", tree, options=options)
"""


@pytest.mark.parametrize("processes", [2, 4])
def test_replicas_share_the_writing(tmp_path, processes):
    """Nothing is written twice, and the shares differ by what cannot be divided."""
    reports(launch(REPLICAS, tmp_path / "run", processes=processes, devices=4 // processes))
    sizes = written(tmp_path / "run/one/state", processes)
    arrays = 4 * (4096 * 1024 + 7 * 2 * 64 * 1024)
    assert arrays <= sum(sizes) <= 1.01 * arrays, sizes
    undivided = 64 * 1024 if processes == 2 else 64 * 1024 + 32 * 1024
    assert max(sizes) - min(sizes) <= 4 * undivided + 0.01 * arrays, sizes


COUNTED = """
counted, plain = [], os.preadv
def counting(descriptor, *arguments):
    got = plain(descriptor, *arguments)
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if ("/d/" in path or "safetensors" in path) and got >= 4096:  # not a header
        counted.append(got)
    return got
os.preadv = counting
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
found, whole = {}, np.arange(40 * 65536, dtype=np.float32).reshape(40, 65536)
for name, spec in {"rows": P(("a", "b")), "half": P("a"), "columns": P(None, "b"), "all": P()}.items():
    like = {"w": jax.ShapeDtypeStruct(whole.shape, np.float32, sharding=NamedSharding(mesh, spec))}
    counted.clear()
    loaded = ckpt.load(f"{directory}/{path}", like)["w"]
    assert all((np.asarray(one.data) == whole[one.index]).all() for one in loaded.addressable_shards)
    found[name] = sum(counted)
report(**found)
"""


def save_safetensors(path: Path, tree: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tree, path)


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize(
    ("path", "save"), [("one", ckpt.save), ("a.safetensors", save_safetensors)]
)
def test_a_process_reads_what_its_shards_need(tmp_path, path, save):
    """Rounded up to the blocks that checksums cover, and each once, though two devices hold it."""
    values = np.arange(40 * 65536, dtype=np.float32).reshape(40, 65536)
    save(tmp_path / "run" / path, {"w": values})
    # the block at each end; of safetensors what is read together with the header
    block, head = 4 << 20, 1 << 18 if "safetensors" in path else 0
    for one in reports(launch(f"path = {path!r}\n{COUNTED}", tmp_path / "run")):
        for name in ("rows", "half"):
            assert values.nbytes // 2 <= one[name] <= values.nbytes // 2 + block, (name, one)
        for name in ("columns", "all"):
            assert values.nbytes // 2 <= one[name] <= values.nbytes + head, (name, one)


UNSHARED = """
# one path that leads elsewhere in each process, as it does where every host has a disk of its own
os.makedirs(f"{directory}/{index}")
os.chdir(f"{directory}/{index}")
tree = {"w": put(np.arange(8.0))}
alone = raised(lambda: ckpt.save("/proc/self/cwd/one", tree, options=options))
with ckpt.Checkpointer("/proc/self/cwd/steps", asynchronous=False, options=options) as steps:
    in_steps = raised(lambda: steps.save(0, tree))
meet("tried")
left = sorted(path for path in os.listdir(".") if path != "steps")
ckpt.save(f"{directory}/shared", tree, options=options)
report(alone=alone, in_steps=in_steps, left=left)
"""


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
def test_a_directory_that_is_not_shared(tmp_path):
    directory = tmp_path / "run"
    told = reports(launch(UNSHARED, directory))
    for process in told:
        for error in (process["alone"], process["in_steps"]):
            assert error["type"] == "CheckpointError"
            assert "is not a directory that all processes share" in error["text"]
            assert "process 1 does not see what process 0 wrote" in error["text"]
        assert process["left"] == []
    assert ckpt.verify(directory / "shared").ok


LARGE = """
tree = {"large": put(np.arange(2 * 36 * 2**18, dtype=np.float32).reshape(2, -1))}
chosen = ckpt.Options(timeout_secs=40, chunk_bytes=1 << 30, target_data_file_bytes=1 << 30)
ckpt.save(f"{directory}/one", tree, options=chosen)
"""


def test_every_byte_of_every_process_is_covered(tmp_path):
    """Of files of more than is digested whole, too: also what no block's checksum covers."""
    one = tmp_path / "run" / "one"
    reports(launch(LARGE, tmp_path / "run", devices=1))
    assert ckpt.verify(one).ok
    large = [file for file in one.rglob("d/*") if file.stat().st_size > 32 << 20]
    assert len(large) == 2
    for file in large:
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            last = opened.read(1)
            for byte in (bytes([last[0] ^ 1]), last):
                opened.seek(-1, os.SEEK_END)
                opened.write(byte)
                opened.flush()
                report = ckpt.verify(one)
                assert report.ok == (byte == last)
                assert report.ok or file.name in str(report.problems)
