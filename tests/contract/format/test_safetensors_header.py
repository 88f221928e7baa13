"""The header of safetensors: what the format's own library writes is read, and what is damaged is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings, strategies as st

import ckpt_core as ckpt
from ckpt_core.testing import assert_same

NUMPY_NAMES = ["bool", "uint8", "int16", "float16", "float32", "complex64", "float64"]


def written(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """The file that the safetensors package writes."""
    return safetensors.numpy.save(tensors, metadata or None)  # of {} it writes what is no JSON


def loaded(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    return ckpt.load(path, as_numpy=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("header") / "file.safetensors"


def file_of(header: Any, size: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@given(
    st.dictionaries(
        st.text(max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(NUMPY_NAMES), st.lists(st.integers(0, 4), max_size=4)),
        max_size=8,
    ),
    st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
)
@settings(max_examples=40)
def test_what_the_package_writes_is_read(file, told, metadata):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in told.items()
    }
    assert_same(loaded(file, written(tensors, metadata)), tensors)
    assert (ckpt.inspect(file).metadata or {}) == (metadata or {})


@given(st.data())
def test_we_refuse_no_less_than_the_package(file, data):
    """A header changed at random: where the package finds it bad, so do we."""
    good = written({"a": np.zeros((2, 3), "float32"), "b": np.ones(5, "int16")})
    position = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[position] = data.draw(st.integers(0, 255))
    try:
        safetensors.deserialize(bytes(bad))
        accepted = True
    except safetensors.SafetensorError:
        accepted = False
    if not accepted:
        with pytest.raises(ckpt.CheckpointError):
            loaded(file, bytes(bad))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "has 0 bytes"),
        (b"\0\0\0", "has 3 bytes"),
        ((10**8 + 1).to_bytes(8, "little"), "allows 100000000"),
        (file_of({"a": ENTRY}, 8)[:20], "truncated"),
        (file_of({"a": ENTRY}, 7), "'a'.*truncated"),
        (file_of({"a": ENTRY}, 9), "1 bytes that belong to no tensor"),
        (file_of(b"[]"), "begin with a brace"),
        (file_of(b"{"), "not valid JSON"),
        (file_of(b'{"\xff": 1}'), "not valid JSON"),
        (file_of(b'{"a": ' + b"[" * 100_000), "not valid JSON"),
        (file_of(b'{"a": {"shape": [' + b"9" * 5000 + b"]}}"), "not valid JSON"),
        (file_of(b'{"a": 1, "a": 2}'), "'a' stands in it twice"),
        (file_of({"a": 1}), "tensor 'a': not an entry"),
        (file_of({"a": {**ENTRY, "more": 1}}, 8), "tensor 'a': not an entry"),
        (file_of({"a": {**ENTRY, "data_offsets": [0]}}, 8), "tensor 'a': not an entry"),
        (file_of({"a": {**ENTRY, "shape": [-2]}}, 8), "tensor 'a': impossible shape"),
        (file_of({"a": {**ENTRY, "shape": [2.0]}}, 8), "tensor 'a': impossible shape"),
        (file_of({"a": {**ENTRY, "shape": [True] * 2}}, 8), "tensor 'a': impossible shape"),
        (file_of({"a": {**ENTRY, "shape": [1] * 65}}, 8), "tensor 'a': impossible shape"),
        (file_of({"a": {**ENTRY, "data_offsets": [8, 0]}}, 8), "tensor 'a': impossible offsets"),
        (file_of({"a": {**ENTRY, "data_offsets": [-8, 0]}}, 8), "tensor 'a': impossible offsets"),
        (file_of({"a": {**ENTRY, "data_offsets": [0, 2**70]}}, 8), "tensor 'a': impossible"),
        (file_of({"a": {**ENTRY, "shape": [3]}}, 8), r"tensor 'a': 8 bytes, and F32\[3\] has 12"),
        (file_of({"a": {**ENTRY, "shape": [2**62, 2**62]}}, 8), "tensor 'a': impossible shape"),
        (file_of({"a": {**ENTRY, "shape": [10**3000] * 2}}, 8), "tensor 'a': impossible shape"),
        (file_of({"a": ENTRY, "b": ENTRY}, 8), "tensor 'b' overlaps"),
        (file_of({"a": {**ENTRY, "data_offsets": [4, 12]}}, 12), "tensor 'a' lies behind a gap"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__ that is not texts"),
        (file_of(b'{"\\ud800": 1}'), "not an entry"),
    ],
)
def test_damage_is_told(file, data, told):
    with pytest.raises(ckpt.CheckpointCorrupt, match=told) as caught:
        loaded(file, data)
    assert caught.value.file == "file.safetensors"
    if "'a'" in told and "twice" not in told:
        assert caught.value.leaf == "a"


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "Q8"])
def test_a_dtype_that_jax_lacks_is_told(file, dtype):
    with pytest.raises(ckpt.CheckpointError, match=f"tensor 'a' has the dtype '{dtype}'") as caught:
        loaded(file, file_of({"a": {"dtype": dtype, "shape": [2], "data_offsets": [0, 1]}}, 1))
    assert not isinstance(caught.value, ckpt.CheckpointCorrupt)


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": []}, {"weight_map": {}, "metadata": 3}]
    + [
        {"weight_map": {"a": name}}
        for name in (1, "", "../a.safetensors", "/a.safetensors", "a.bin", "a/../b.safetensors")
    ],
)
def test_an_impossible_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"index\.json"):
        ckpt.load(tmp_path)
