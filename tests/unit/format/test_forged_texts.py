"""Small files that decode, and do not say what they should: damage, and no other error."""

from __future__ import annotations

import json
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._format.orbax_read import load_item_metadata
from ckpt_core._format.process_state import load_exact

ENTRY = {
    "key_metadata": [{"key": "a", "key_type": 2}, {"key": "1", "key_type": 1}],
    "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
}


@pytest.mark.parametrize(
    "rich", [{"a": []}, {"a": [1]}, {"a": {}}, [], {"a": {"category": "namedtuple"}}]
)
def test_a_description_of_a_tree_that_lacks_entries(rich: Any) -> None:
    entries = {
        f"('a', '{n}')": {
            **ENTRY,
            "key_metadata": [{"key": "a", "key_type": 2}, {"key": str(n), "key_type": 1}],
        }
        for n in range(2)
    }
    value = {"tree_metadata": entries, "use_zarr3": True, "value_metadata_tree": json.dumps(rich)}
    with pytest.raises(ckpt.CheckpointCorrupt, match="not a description of a tree"):
        load_item_metadata(json.dumps(value).encode(), "_METADATA")


@pytest.mark.parametrize(
    "value",
    [
        {"nodes": 1, "leaves": []},
        {"nodes": {"a": 1}, "leaves": []},
        {"nodes": [0], "leaves": [["generator", "", [], "PCG64", "[1]"]]},
        {"nodes": [0], "leaves": [["generator", "", [], "PCG64", "1"]]},
        [],
        None,
    ],
)
def test_a_state_of_a_process_of_other_types(value: Any) -> None:
    with pytest.raises(ckpt.CheckpointCorrupt, match="not the state of a process"):
        load_exact(json.dumps(value).encode(), "process_0")
