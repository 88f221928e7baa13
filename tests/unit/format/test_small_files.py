"""Small files: those in one value come back, and nothing else is accepted."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import ckpt_core as ckpt
from ckpt_core._format.packed import apart, name_apart, pack
from ckpt_core._format.record import FileRecord, ItemRecord, Record, dump_record, load_record
from ckpt_core._tree import NONE


def test_a_record_holds_small_files_up_to_the_sizes_that_it_lists():
    files = {"state/_METADATA": b"{}" * 500, "ckpt.token": b"x"}

    def record(packed: bytes) -> Record:
        listed = {name: FileRecord.of(data) for name, data in files.items()}
        items = {"state": ItemRecord("process", NONE)}
        return load_record(dump_record(Record(items, listed, "t", packed=packed)))

    found = record(pack(files))
    assert found.small_files == files
    assert found.where("state/big") == ".attempt.t.state!0big"
    assert found.where("state/d/t.1") == "state/d/t.1"
    assert record(b"").small_files == {} and record(b"").where("a") == "a"
    no_packs = [b"", b"[]\n", b"{}", b'{"a":5}\nab', b'{"a":-1}\n', b'{"a":1.0}\na', b"\xff\n"]
    no_packs += [b'{"a":true}\na', b'{"a":1}\nab']
    unlisted = [pack({"state/_METADATA": b"{}" * 5000}), pack({"../2/ckpt.json": b"x"})]
    for bad in [b"x", *unlisted, *map(zstandard.ZstdCompressor().compress, no_packs)]:
        with pytest.raises(ckpt.CheckpointCorrupt, match="small files"):
            _ = record(bad).small_files


@given(st.text())
def test_a_file_apart_is_one_name_from_which_its_own_comes_back(name):
    key = apart("t", name)
    assert key.startswith(".attempt.t.") and "/" not in key
    assert name_apart("t", key) == name
