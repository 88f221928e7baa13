"""``ckpt cp``: two at once."""

from __future__ import annotations

from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._copy import copy_checkpoint
from ckpt_core._storage import KeyValues
from tests.support.stores import tree, value_at


def test_two_copies_at_once_leave_one_that_is_whole(store: str, monkeypatch: Any) -> None:
    """Both have the token of the source, and the same names."""
    ckpt.save(f"{store}/a", tree(1))
    put, reported = KeyValues.put_if_unchanged, []

    def then_another_one(keys: KeyValues, key: str, *arguments: Any) -> bool:
        if key == "ckpt.json":
            monkeypatch.setattr(KeyValues, "put_if_unchanged", put)
            with pytest.raises(ckpt.CheckpointExists) as caught:
                copy_checkpoint(f"{store}/a", f"{store}/b")
            reported.append(str(caught.value))
        return put(keys, key, *arguments)

    monkeypatch.setattr(KeyValues, "put_if_unchanged", then_another_one)
    copy_checkpoint(f"{store}/a", f"{store}/b")
    assert "is copying the same checkpoint" in reported[0]
    assert value_at(f"{store}/b") == 1 and ckpt.verify(f"{store}/b").ok
