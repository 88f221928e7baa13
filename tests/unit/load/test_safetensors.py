"""Safetensors load as checkpoints do: to any sharding, into any target, strictly; and which bytes of a file a load reads."""

import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from flax import nnx
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core._format.safetensors import DTYPES
from ckpt_core._layout.regions import Region, pieces, region_shape, region_slices
from ckpt_core._options import Options
from ckpt_core._read.pipeline import read_leaves
from ckpt_core._read.wants import PIECE_BYTES, ReadsOf, Want, fill
from ckpt_core._saved import foreign
from ckpt_core._saved.opening import open_checkpoint
from ckpt_core._storage import Location, backend_of
from ckpt_core._tree.leaves import dtype_from_name
from ckpt_core.cli._change import copy_checkpoint
from tests.support.same_bits import bits
from tests.unit.load.test_bytes_read import make_counted  # noqa: F401 (fixture)

SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (7, 3), (2, 3, 4)]


def file_of(tensors: dict[str, Any], metadata: Any = None) -> bytes:
    """A file with numpy arrays of any dtype of the format, which the package does not write."""
    names = {ours: theirs for theirs, ours in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, array in tensors.items():
        offsets = [position, position + array.nbytes]
        shape = list(array.shape)
        header[name] = {"dtype": names[array.dtype.name], "shape": shape, "data_offsets": offsets}
        position += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


def arrays_of(dtype: np.dtype[Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        f"t{n}": rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        if dtype.kind != "b"
        else rng.integers(0, 2, shape).astype(bool)
        for n, shape in enumerate(SHAPES)
    }


@pytest.mark.parametrize("name", DTYPES.values())
def test_every_dtype_to_the_bit(tmp_path, name):
    tensors = arrays_of(dtype_from_name(name))
    (tmp_path / "model.safetensors").write_bytes(file_of(tensors))
    loaded = ckpt.load(tmp_path / "model.safetensors", as_numpy=True)
    assert jax.tree.map(bits, loaded) == jax.tree.map(bits, tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_as_the_package_reads_and_writes_it(tmp_path, dtype):
    rng = np.random.default_rng(0)
    tensors = {
        f"{n}": jnp.asarray(rng.integers(0, 9, shape), dtype) for n, shape in enumerate(SHAPES)
    }
    safetensors.flax.save_file(tensors, tmp_path / "a.safetensors")
    loaded = ckpt.load(tmp_path / "a.safetensors")
    theirs = safetensors.flax.load_file(tmp_path / "a.safetensors")
    assert all(isinstance(value, jax.Array) for value in loaded.values())
    assert jax.tree.map(bits, loaded) == jax.tree.map(bits, theirs)


def test_64_bits_are_not_narrowed(tmp_path):
    safetensors.numpy.save_file({"a": np.arange(3.0)}, tmp_path / "a.safetensors")
    with pytest.raises(ckpt.CheckpointError, match="a: float64 would lose half its bits"):
        ckpt.load(tmp_path / "a.safetensors")
    wanted = {"a": jnp.zeros(3, jnp.float32)}
    loaded = ckpt.load(tmp_path / "a.safetensors", wanted, cast=True)
    assert loaded["a"].tolist() == [0, 1, 2]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder as hubs have them: two files and their index; and its tensors."""
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.{layer}.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for layer in range(2)
        for name, shape in {"attn.q": (16, 24), "mlp.up": (24, 16, 8), "norm": (16,)}.items()
    }
    files: dict[str, dict[str, Any]] = {"1.safetensors": {}, "2.safetensors": {}}
    for number, (name, array) in enumerate(tensors.items()):
        files[f"{number % 2 + 1}.safetensors"][name] = array
    for file, inside in files.items():
        safetensors.numpy.save_file(inside, tmp_path / file, {"format": "np"})
    index = {
        "metadata": {"total_size": 7},
        "weight_map": {name: file for file, inside in files.items() for name in inside},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, tensors


def nested(tensors: dict[str, Any], make: Any = lambda name, array: array) -> dict[str, Any]:
    """The tensors in dicts, one for each part of a name; numbers are positions of lists."""
    root: dict[str, Any] = {}
    for name, array in tensors.items():
        node: Any = root
        *parents, last = name.split(".")
        for part in parents:
            node = node.setdefault(int(part) if part.isdigit() else part, {})
        node[last] = make(name, array)
    layers = root["model"]["layers"]
    root["model"]["layers"] = [layers[n] for n in sorted(layers)]
    return root


@pytest.mark.parametrize(
    "spec", [("data",), ("model", "data"), (None, "model"), (None, ("data", "model")), ()]
)
def test_into_any_sharding_of_a_nested_target(model, mesh, spec):
    folder, tensors = model

    def wanted(name: str, array: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec[: array.ndim]))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    like = nested(tensors, wanted)
    loaded = ckpt.load(folder, like)
    assert jax.tree.structure(loaded) == jax.tree.structure(like)
    assert jax.tree.map(bits, loaded) == jax.tree.map(bits, nested(tensors))
    for array, asked in zip(jax.tree.leaves(loaded), jax.tree.leaves(like), strict=True):
        assert array.sharding == asked.sharding


def test_a_flat_target_and_the_index_file_itself(model):
    folder, tensors = model
    like = {name: np.zeros_like(array) for name, array in tensors.items()}
    loaded = ckpt.load(folder / "model.safetensors.index.json", like)
    assert jax.tree.map(bits, loaded) == jax.tree.map(bits, tensors)


def test_keys_with_slashes(tmp_path):
    state: Any = {
        "mlp/~/linear_0": {"w": np.arange(3, dtype=np.float32)},
        "a/b": np.zeros(1, np.float32),
    }
    tensors = {"mlp/~/linear_0.w": state["mlp/~/linear_0"]["w"], "a/b": state["a/b"]}
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors")
    loaded = ckpt.load(tmp_path / "a.safetensors", state)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, state))
    assert set(ckpt.load(tmp_path / "a.safetensors")) == set(tensors)


def test_one_file_of_several_is_not_taken_for_the_model(tmp_path):
    """What a download or an export that was killed leaves: the index comes last."""
    name = "model-00001-of-00002.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(1, np.float32)}, tmp_path / name)
    with pytest.raises(ckpt.CheckpointNotFound, match="one of 2 files of a model"):
        ckpt.load(tmp_path)
    assert list(ckpt.load(tmp_path / name)) == ["a"]
    (tmp_path / name).rename(tmp_path / "model-00001-of-00001.safetensors")
    assert list(ckpt.load(tmp_path)) == ["a"]


def test_a_mounted_bucket_is_read_as_a_bucket(model):
    folder, tensors = model
    for path, open_it in (
        (folder, foreign.open_folder),
        (folder / "1.safetensors", foreign.open_file),
    ):
        opened = open_it(Location(str(path), False), backend_of(False))
        assert {name for (name,) in opened.items["state"].paths} <= set(tensors)


def test_all_mismatches_at_once(model):
    folder, tensors = model
    like = nested(tensors)
    layers = like["model"]["layers"]
    layers[0]["attn"] = {"k": layers[0]["attn"]["q"]}
    layers[1]["norm"]["weight"] = np.zeros(17, np.float32)
    layers[1]["attn"]["q"]["weight"] = np.zeros((16, 24), np.float16)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(folder, like)
    assert {(entry.kind, entry.path) for entry in caught.value.mismatches} == {
        ("missing", "model/layers/0/attn/k/weight"),
        ("unexpected", "model/layers/0/attn/q/weight"),
        ("shape", "model/layers/1/norm/weight"),
        ("dtype", "model/layers/1/attn/q/weight"),
    }
    loaded = ckpt.load(folder, like, only="model/layers/0/norm/*")
    assert bits(loaded["model"]["layers"][0]["norm"]["weight"]) == bits(
        tensors["model.layers.0.norm.weight"]
    )


@pytest.mark.parametrize(
    "rename",
    [
        {"model.layers": "blocks"},
        {"model/layers": "blocks"},
        {"model": "", "model.layers": "blocks"},
        lambda name: name.replace("model.layers.", "blocks/"),
    ],
)
def test_renamed(model, rename):
    folder, tensors = model
    like = {"blocks": nested(tensors)["model"]["layers"]}
    empty = jax.tree.map(np.zeros_like, like)
    loaded = ckpt.load(folder, empty, rename=rename)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, like))


def test_a_misspelled_rename_is_told(model):
    folder, tensors = model
    with pytest.raises(
        ckpt.StructureMismatch, match=r"model\.layer: no saved .*nearest name: model\.layers"
    ):
        ckpt.load(folder, nested(tensors), rename={"model.layer": "blocks"})


def test_patterns_without_a_target(model):
    folder, tensors = model
    loaded = ckpt.load(folder, only="*.norm.weight", as_numpy=True)
    assert set(loaded) == {name for name in tensors if "norm" in name}
    renamed = ckpt.load(folder, rename={"model.layers": "l"}, only="*.0.norm.weight")
    assert list(renamed) == ["l.0.norm.weight"]


def test_an_nnx_model_in_place(tmp_path):
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(4, 8, rngs=rngs)
            self.down = nnx.Linear(8, 4, rngs=rngs)

    trained: Any
    fresh: Any
    trained, fresh = Block(nnx.Rngs(0)), Block(nnx.Rngs(1))
    kernels = {"up": trained.up, "down": trained.down}
    tensors = {
        f"net.{name}.{part}": getattr(layer, part)[...]
        for name, layer in kernels.items()
        for part in ("kernel", "bias")
    }
    safetensors.flax.save_file(tensors, tmp_path / "model.safetensors", {"format": "flax"})
    restored = ckpt.restore(tmp_path, model=fresh, rename={"net": ""})
    assert bits(fresh.up.kernel[...]) == bits(trained.up.kernel[...])
    assert bits(fresh.down.bias[...]) == bits(trained.down.bias[...])
    assert restored.metadata == {"format": "flax"}


def test_bfloat16_cast_while_read(tmp_path, mesh):
    values = np.arange(1 << 17, dtype=np.float32).reshape(512, 256).astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file({"w": values.astype(np.float32)}, tmp_path / "a.safetensors")
    sharding = NamedSharding(mesh, PartitionSpec("model", "data"))
    like = {"w": jax.ShapeDtypeStruct(values.shape, jnp.bfloat16, sharding=sharding)}
    loaded = ckpt.load(tmp_path / "a.safetensors", like, cast=True)
    assert bits(loaded["w"]) == bits(values)


def test_large_arrays_are_mapped_and_writable_copies(tmp_path):
    values = np.arange(1 << 16, dtype=np.float32)
    safetensors.numpy.save_file({"w": values}, tmp_path / "a.safetensors")
    loaded = ckpt.load(tmp_path / "a.safetensors", as_numpy=True)["w"]
    assert loaded.base is not None
    loaded[0] = 7
    assert safetensors.numpy.load_file(tmp_path / "a.safetensors")["w"][0] == 0


def test_a_linked_cache_as_hubs_keep_it(model, tmp_path):
    folder, tensors = model
    snapshot = tmp_path / "snapshots" / "main"
    blobs = tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("1.safetensors", "2.safetensors", "model.safetensors.index.json"):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(blobs / name)
    assert set(ckpt.load(snapshot)) == set(tensors)


def test_which_file_of_a_folder(tmp_path, caplog):
    def put(name: str, **tensors: Any) -> None:
        safetensors.numpy.save_file(tensors, tmp_path / name)

    put("net.safetensors", a=np.zeros(1, np.float32))
    assert set(ckpt.load(tmp_path)) == {"a"}
    put("other.safetensors", b=np.zeros(1, np.float32), c=np.zeros(1, np.float32))
    with pytest.raises(
        ckpt.CheckpointNotFound, match=r"2 safetensors files .net\.safetensors, .*such as"
    ):
        ckpt.load(tmp_path)
    index = {"weight_map": {"b": "other.safetensors"}}
    (tmp_path / "net.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        assert set(ckpt.load(tmp_path)) == {"b"}
    assert "leaves out tensors of its files, such as 'c'" in caplog.text
    put("model.safetensors", d=np.zeros(1, np.float32))
    assert set(ckpt.load(tmp_path)) == {"d"}


def test_a_checkpoint_with_such_a_name_is_one(tmp_path):
    ckpt.save(tmp_path / "a.safetensors", {"w": np.zeros(3)})
    assert ckpt.load(tmp_path / "a.safetensors")["w"].shape == (3,)
    with pytest.raises(ckpt.CheckpointNotFound, match="does not exist"):
        ckpt.load(tmp_path / "b.safetensors")


def test_a_folder_in_a_store(model, store):
    from tests.support.stores import keys_at

    folder, tensors = model
    for file in folder.iterdir():
        keys_at(store).put(file.name, file.read_bytes())
    loaded = ckpt.load(store, nested(tensors))
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, nested(tensors)))
    assert set(ckpt.load(f"{store}/2.safetensors")) < set(tensors)
    assert ckpt.inspect(store).metadata == {"total_size": 7, "format": "np"}
    data = (folder / "1.safetensors").read_bytes()
    for bad in (data[:-1], data + b"\0", data[:100], data[:3]):
        keys_at(store).put("1.safetensors", bad)
        with pytest.raises(ckpt.CheckpointCorrupt, match=r"1\.safetensors"):
            ckpt.load(store)


def test_inspect_and_verify_say_what_it_is(model):
    folder, tensors = model
    info = ckpt.inspect(folder)
    assert info.layout == "safetensors"
    assert info.metadata == {"format": "np", "total_size": 7}
    assert {leaf.path: leaf.shape for leaf in info.items["state"].leaves} == {
        name: array.shape for name, array in tensors.items()
    }
    report = ckpt.verify(folder)
    assert not report.ok
    assert "a format without checksums" in report.problems[0].what
    with pytest.raises(ckpt.CheckpointError, match="not written by ckpt"):
        copy_checkpoint(folder, folder / "copy")


def test_missing_and_damaged_files_of_an_index(model):
    folder, _ = model
    data = (folder / "2.safetensors").read_bytes()
    (folder / "2.safetensors").write_bytes(data[:-1])
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"2\.safetensors .*truncated") as caught:
        ckpt.load(folder)
    assert caught.value.file == "2.safetensors"
    report = ckpt.verify(folder)
    assert report.problems[0].file == "2.safetensors"
    (folder / "2.safetensors").unlink()
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"2\.safetensors is missing"):
        ckpt.load(folder)
    safetensors.numpy.save_file({"x": np.zeros(1, np.float32)}, folder / "2.safetensors")
    with pytest.raises(ckpt.CheckpointCorrupt, match="should be in 2") as caught:
        ckpt.load(folder)
    assert caught.value.leaf is not None and caught.value.leaf.startswith("model.")


ROWS, COLUMNS = 64, 64 * 1024
VALUES = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ranges") / "a.safetensors"
    small = {f"s{n:03}": np.full(5, n, np.int32) for n in range(200)}
    cube = VALUES.reshape(4, 16, COLUMNS)
    safetensors.numpy.save_file({"w": VALUES, "cube": cube, **small}, file)
    return file


def read(path: Path, name: str, regions: list[Region], counted: list[int]) -> list[Any]:
    opened = open_checkpoint(path)
    counted.clear()
    item = opened.items["state"]
    wants = [Want(item.paths.index((name,)), regions)]
    ((_, parts),) = read_leaves(opened, item, wants, Options())
    return [parts[region] for region in regions]


def eighth(size: int, number: int = 1) -> tuple[int, int]:
    return (size // 8 * number, size // 8 * (number + 1))


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("w", (eighth(ROWS), (0, COLUMNS))),
        ("w", ((0, ROWS), eighth(COLUMNS))),
        ("cube", ((0, 4), eighth(16), (0, COLUMNS))),
        ("cube", ((0, 4), (0, 16), eighth(COLUMNS))),
    ],
)
def test_an_eighth_reads_an_eighth(path, counted, name, region):
    (found,) = read(path, name, [region], counted)
    array = VALUES if name == "w" else VALUES.reshape(4, 16, COLUMNS)
    assert np.array_equal(found, array[region_slices(region)])
    assert sum(counted) == VALUES.nbytes // 8


def test_regions_of_one_process_are_read_once(path, counted):
    regions: list[Region] = [((0, ROWS), eighth(COLUMNS, n)) for n in range(8)]
    found = read(path, "w", regions, counted)
    assert sum(counted) == VALUES.nbytes
    assert len(counted) == VALUES.nbytes // PIECE_BYTES
    assert np.array_equal(np.concatenate(found, axis=1), VALUES)


def test_small_tensors_are_read_together(path, counted):
    loaded = ckpt.load(path, only="s*", as_numpy=True)
    assert all((loaded[f"s{n:03}"] == n).all() for n in range(200))
    assert len(counted) <= 3  # the header, in one or two, and all of them


def test_rows_that_lie_close_are_read_at_once(tmp_path, counted):
    values = np.arange(1 << 18, dtype=np.float32).reshape(1024, 256)
    safetensors.numpy.save_file({"w": values}, tmp_path / "a.safetensors")
    (found,) = read(tmp_path / "a.safetensors", "w", [((0, 1024), (32, 64))], counted)
    assert np.array_equal(found, values[:, 32:64])
    assert len(counted) == 1  # 1024 reads of 128 bytes would take longer


@st.composite
def wanted(draw: Any) -> tuple[tuple[int, ...], list[Region], int]:
    """An array's shape, a grid of regions of it, some of them, and the size of pieces."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    cuts = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    grid: list[Region] = [()]
    for edges in cuts:
        steps = list(itertools.pairwise(edges)) or [(0, 0)]
        grid = [(*region, step) for region in grid for step in steps]
    chosen = draw(st.sets(st.sampled_from(grid), min_size=1))
    return shape, sorted(chosen), draw(st.integers(1, 64))


@given(wanted(), st.integers(0, 40))
def test_any_regions_in_pieces_of_any_size(told, gap_bytes):
    shape, regions, piece_bytes = told
    array = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    data = array.tobytes()
    buffers = [np.full(region_shape(region), -1, np.int16) for region in regions]
    read: list[tuple[int, int]] = []

    def fake_read(offset: int, target: Any) -> None:
        read.append((offset, offset + target.size))
        target[:] = np.frombuffer(data[offset : offset + target.size], np.uint8)

    reads = ReadsOf(fake_read, array.dtype, gap_bytes)
    for piece in pieces(shape, 2, regions, piece_bytes):
        assert math.prod(piece.shape) * 2 <= max(piece_bytes, 2)
        shares = [(one.part, buffers[one.number][(*one.place, ...)]) for one in piece.takers]
        fill(reads, piece.offset_bytes, piece.shape, shares)
    for region, buffer in zip(regions, buffers, strict=True):
        assert np.array_equal(buffer, array[(*region_slices(region), ...)])
    read.sort()
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(read))
