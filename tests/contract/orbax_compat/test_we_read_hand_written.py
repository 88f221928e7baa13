"""Layouts that no released Orbax writes any more, or only for large arrays.

They are written by hand with TensorStore and JSON.
"""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.damage import flip
from tests.support.orbax_layouts import data_files
from tests.support.trees import assert_same


def by_hand_spec(item: Path, name: str, array, *, zarr, ocdbt, chunks, **variant):
    """A TensorStore spec for one array, in any of the shapes that the format allows."""
    if ocdbt:
        kvstore = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{item}/"},
            "path": name + "/" if name else "",
            "config": variant.get("config", {}),
        }
        if "target_data_file_size" in variant:
            kvstore["target_data_file_size"] = variant["target_data_file_size"]
    else:
        kvstore = {"driver": "file", "path": f"{item}/{name}/" if name else f"{item}/"}
    spec = {
        "driver": "zarr3" if zarr == 3 else "zarr",
        "kvstore": kvstore,
        "dtype": array.dtype.name,
        "store_data_equal_to_fill_value": True,
    }
    if zarr == 2:
        metadata = {"shape": array.shape, "chunks": chunks, "compressor": variant.get("compressor")}
        if "order" in variant and array.ndim > 1:
            metadata["order"] = variant["order"]
        if "separator" in variant:
            metadata["dimension_separator"] = variant["separator"]
        return spec | {"metadata": metadata}
    codecs = variant.get("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}])
    metadata = {
        "shape": array.shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "codecs": codecs,
    }
    if "separator" in variant:
        metadata["chunk_key_encoding"] = {
            "name": "default",
            "configuration": {"separator": variant["separator"]},
        }
    return spec | {"metadata": metadata}


def write_by_hand(item: Path, leaves, *, zarr=3, ocdbt=True, chunk=None, keep=None, **variant):
    """Writes one item without Orbax; `leaves` is [(key path, value)], ints are sequence positions; `keep(name, index)` makes holes."""
    item.mkdir(parents=True)
    context = ts.Context()
    tree, strings = {}, {}
    for path, value in leaves:
        name = ".".join(str(key) for key in path)
        kind = "string" if isinstance(value, str) else "np.ndarray"
        kind = "scalar" if isinstance(value, int | float) else kind
        kind = "jax.Array" if isinstance(value, jax.Array) else kind
        tree[str(tuple(str(key) for key in path))] = {
            "key_metadata": [
                {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path
            ],
            "value_metadata": {"value_type": kind, "skip_deserialize": False},
        }
        if kind == "string":
            *parents, last = name.split("/")
            node = strings
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
            continue
        array = np.asarray(value)
        chunks = [max(1, min(size, chunk or size)) for size in array.shape]
        spec = by_hand_spec(item, name, array, zarr=zarr, ocdbt=ocdbt, chunks=chunks, **variant)
        store = ts.open(spec, create=True, open=True, context=context).result()
        if keep is None:
            store.write(array).result()
            continue
        for index in itertools.product(
            *(range(0, size, step) for size, step in zip(array.shape, chunks, strict=True))
        ):
            region = tuple(
                slice(start, min(start + step, size))
                for start, step, size in zip(index, chunks, array.shape, strict=True)
            )
            if keep(name, index):
                store[region].write(array[region]).result()
    if strings:
        (item / "_strings.json").write_text(json.dumps(strings))
    metadata = {"tree_metadata": tree, "use_zarr3": zarr == 3} | variant.get("metadata_extra", {})
    (item / "_METADATA").write_text(json.dumps(metadata))
    return item


def by_hand_leaves():
    random = np.random.default_rng(0)
    return [
        (("params", "w"), jnp.asarray(random.standard_normal((8, 6)), jnp.float32)),
        (("params", "big"), random.standard_normal((100, 33)).astype(np.float32)),
        (("params", "bf16"), random.standard_normal((5, 3)).astype(ml_dtypes.bfloat16)),
        (("opt", 0, "mu"), np.ones((3,), np.float32)),
        (("opt", 1), np.arange(-4, 4, dtype=np.int8)),
        (("opt", 2), np.array(2.5, np.float32)),
        (("key.with.dots", "and/slash"), np.arange(6, dtype=np.int32).reshape(2, 3)),
        (("bools",), np.array([True, False, True])),
        (("complex",), np.array([1 + 2j], np.complex128)),
        (("step",), 7),
        (("rate",), 1.5),
        (("note",), "hello"),
        (("s/1",), "slashed"),
    ]


def by_hand_tree():
    leaves = dict(by_hand_leaves())
    return {
        "params": {name: leaves["params", name] for name in ("w", "big", "bf16")},
        "opt": [{"mu": leaves["opt", 0, "mu"]}, leaves["opt", 1], leaves["opt", 2]],
        "key.with.dots": {"and/slash": leaves["key.with.dots", "and/slash"]},
        **{name: leaves[(name,)] for name in ("bools", "complex", "step", "rate", "note", "s/1")},
    }


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CRC = {"name": "crc32c"}


def zstd(level):
    return {"name": "zstd", "configuration": {"level": level}}


BY_HAND = {
    "raw": {},
    "numbered_manifest": {"config": {"manifest_kind": "numbered"}},
    "all_inline": {"config": {"max_inline_value_bytes": 1 << 20}},
    "none_inline": {"config": {"max_inline_value_bytes": 0}},
    "deep_tree": {"config": {"max_decoded_node_bytes": 500}},
    "plain_nodes": {"config": {"compression": None}},
    "many_files": {"target_data_file_size": 300},
    "uneven_chunks": {"chunk": 4},
    "zstd": {"codecs": [LITTLE, zstd(3)]},
    "gzip": {"codecs": [LITTLE, {"name": "gzip", "configuration": {"level": 5}}]},
    "crc": {"codecs": [LITTLE, CRC]},
    "big_endian": {"codecs": [BIG]},
    "v2_raw": {"zarr": 2},
    "v2_zstd": {"zarr": 2, "compressor": {"id": "zstd", "level": 1}},
    "v2_blosc": {
        "zarr": 2,
        "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    },
    "v2_column_major": {"zarr": 2, "order": "F", "chunk": 4},
    "v2_uneven_chunks": {"zarr": 2, "chunk": 4},
    "files_v2": {"zarr": 2, "ocdbt": False},
    "files_v2_slashes": {"zarr": 2, "ocdbt": False, "separator": "/", "chunk": 4},
    "files_v3": {"ocdbt": False},
    "files_v3_zstd": {"ocdbt": False, "codecs": [LITTLE, zstd(1)], "chunk": 4},
    "files_v3_dots": {"ocdbt": False, "separator": ".", "chunk": 4},
}


@pytest.mark.parametrize("variant", BY_HAND)
def test_hand_written(tmp_path, variant):
    item = write_by_hand(tmp_path / "flat", by_hand_leaves(), **BY_HAND[variant])
    assert_same(ckpt.load(item), by_hand_tree())
    step = tmp_path / "step"
    step.mkdir()
    item.rename(step / "default")
    assert_same(ckpt.load(step), by_hand_tree())


@pytest.mark.parametrize(("inner", "where"), [("raw", "start"), ("zstd", "end"), ("crc", "start")])
def test_hand_written_sharding_indexed(tmp_path, inner, where):
    """Chunks inside chunks, the inner ones smaller than the outer."""
    codecs = {"raw": [LITTLE], "zstd": [LITTLE, zstd(1)], "crc": [LITTLE, CRC]}[inner]
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [2, 3],
            "codecs": codecs,
            "index_codecs": [LITTLE, CRC],
            "index_location": where,
        },
    }
    value = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    item = write_by_hand(tmp_path / "item", [(("w",), value)], chunk=6, codecs=[sharding])
    assert_same(ckpt.load(item), {"w": value})


def test_partial_saves(tmp_path):
    """A checkpoint that Orbax wrote in several sessions and then finalized."""
    parts = {"a": jnp.arange(4.0)}, {"b": {"c": np.arange(3)}}
    for part in parts:
        ocp_v1.partial.save(tmp_path / "c", part)
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(tmp_path / "c")
    ocp_v1.partial.finalize(tmp_path / "c")
    assert_same(ckpt.load(tmp_path / "c"), parts[0] | parts[1])


@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
def test_holes_are_no_zeros(tmp_path, zarr, ocdbt):
    """Orbax v0 reads a missing chunk as zeros unless a field says otherwise; we never do."""
    item = write_by_hand(
        tmp_path / "item",
        [(("a",), np.ones((8, 8), np.float32)), (("b",), np.ones(3))],
        zarr=zarr,
        ocdbt=ocdbt,
        chunk=4,
        keep=lambda name, index: (name, index) != ("a", (4, 0)),
    )
    with pytest.raises(ckpt.CheckpointCorrupt, match="a"):
        ckpt.load(item)
    assert_same(ckpt.load(item, only="b"), {"b": np.ones(3)})


def test_damaged_crc_codec_is_corrupt(tmp_path):
    """Where the writer did use checksums, damage shows although the directory is not ours."""
    value = np.arange(4096, dtype=np.float32)
    item = write_by_hand(tmp_path / "item", [(("w",), value)], codecs=[LITTLE, CRC])
    path = data_files(item)[0]
    flip(path, path.read_bytes().index(value[1000:1010].tobytes()))
    with pytest.raises(ckpt.CheckpointCorrupt, match="w"):
        ckpt.load(item)
