"""Items of text alone have no array database; a large item beside them must not look for one."""

from __future__ import annotations

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._save import digests, write


@pytest.mark.parametrize("text", [{"config": "{}"}, {"n": 3, "s": "x"}, {}])
def test_a_large_item_beside_one_without_arrays(tmp_path, monkeypatch, text):
    for module in (write, digests):
        monkeypatch.setattr(module, "WHOLE_DIGEST_BYTES", 1000)  # what is large, in bytes
    state = {"w": np.arange(1 << 18, dtype=np.float32)}
    ckpt.save(tmp_path / "a", model=state, notes=text)
    loaded = ckpt.load(tmp_path / "a")
    assert loaded["notes"] == text
    assert loaded["model"]["w"].tobytes() == state["w"].tobytes()
    assert ckpt.verify(tmp_path / "a").ok
