"""What Orbax wrote and something damaged: an error of ours, never zeros."""

import os
from pathlib import Path

import jax
import pytest

import ckpt_core as ckpt
from tests.support.orbax_layouts import (  # noqa: F401 (fixture)
    abstract,
    assert_same,
    data_files,
    drop_data_files,
    expectation_of,
    item_directory,
    make_zoo,
    rewrite_json,
    tree_of,
)


def cut_data_files(item: Path):
    for path in data_files(item):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def flip_root_node(item: Path):
    """A bit inside the tree of keys at the top, which has checksums of its own."""
    (path,) = (item / "d").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "metadata_missing": lambda item: (item / "_METADATA").unlink(),
    "metadata_empty": lambda item: (item / "_METADATA").write_text(""),
    "metadata_garbage": lambda item: (item / "_METADATA").write_bytes(b"\xff\xfe{" * 100),
    "metadata_cut": lambda item: os.truncate(item / "_METADATA", 900),
    "metadata_is_a_list": lambda item: (item / "_METADATA").write_text("[1, 2]"),
    "metadata_without_tree": lambda item: (item / "_METADATA").write_text('{"use_zarr3": true}'),
    "metadata_bad_entry": lambda item: rewrite_json(
        item / "_METADATA",
        lambda meta: meta["tree_metadata"].update({"('x',)": {"key_metadata": 3}}),
    ),
    "metadata_deep": lambda item: (item / "_METADATA").write_text("[" * 100_000 + "]" * 100_000),
    "strings_missing": lambda item: (item / "_strings.json").unlink(),
    "strings_garbage": lambda item: (item / "_strings.json").write_text("{"),
    "strings_lack_one": lambda item: rewrite_json(
        item / "_strings.json", lambda strings: {k: v for k, v in strings.items() if k != "note"}
    ),
    "string_is_no_text": lambda item: rewrite_json(
        item / "_strings.json", lambda strings: strings | {"note": 5}
    ),
    "manifest_missing": lambda item: (item / "manifest.ocdbt").unlink(),
    "manifest_garbage": lambda item: (item / "manifest.ocdbt").write_bytes(b"garbage" * 30),
    "manifest_empty": lambda item: (item / "manifest.ocdbt").write_bytes(b""),
    "data_missing": drop_data_files,
    "data_cut": cut_data_files,
    "index_flipped": flip_root_node,
    "array_metadata_garbage": lambda item: (item / "array_metadatas" / "process_0").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_of_ours(zoo, tmp_path, damage):
    path = zoo.copy("v1", tmp_path)
    DAMAGE[damage](item_directory(path))
    arguments = (abstract(tree_of("v1")),) if list(DAMAGE).index(damage) % 2 else ()
    with pytest.raises(ckpt.CheckpointError) as caught:
        ckpt.load(path, *arguments)
    if damage != "metadata_missing":
        assert isinstance(caught.value, ckpt.CheckpointCorrupt), caught.value
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_unreadable_sharding_file(zoo, tmp_path, content):
    """Shardings are advice: damage there is an error or the default device, never wrong data."""
    path = zoo.copy("v1", tmp_path)
    (path / "state" / "_sharding").write_text(content)
    try:
        got = ckpt.load(path)
    except ckpt.CheckpointError:
        pass
    else:
        assert_same(got, expectation_of("v1"))


def test_without_sharding_file(zoo, tmp_path):
    path = zoo.copy("v1", tmp_path)
    (path / "state" / "_sharding").unlink()
    got = ckpt.load(path)
    assert_same(got, expectation_of("v1"))
    assert got["params"]["w"].devices() == {jax.devices()[0]}


def test_without_optional_files(zoo, tmp_path):
    """All that a reader needs is `_METADATA` and the data, as in Orbax's oldest directories."""
    path = zoo.copy("v0_manager", tmp_path)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "default/commit_success.txt"):
        (path / name).unlink()
    assert_same(ckpt.load(path), expectation_of("v0_manager"), sharding=True)


@pytest.mark.parametrize("layout", ["v1_files", "v0_pytree_files"])
def test_missing_chunk_is_no_zero(zoo, tmp_path, layout):
    path = zoo.copy(layout, tmp_path)
    array = item_directory(path) / "params.w"
    chunk = next(
        p for p in array.rglob("*") if p.is_file() and not p.name.startswith((".z", "zarr"))
    )
    chunk.unlink()
    with pytest.raises(ckpt.CheckpointCorrupt, match="params/w"):
        ckpt.load(path)
    # The rest is still there.
    assert_same(
        ckpt.load(path, only=lambda path, _: path != "params/w")["opt"],
        expectation_of(layout)["opt"],
    )


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").write_text("x")
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(tmp_path / "other")
