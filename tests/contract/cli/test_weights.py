"""``ckpt export``, and looking at safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ckpt_core as ckpt
from tests.support.command_line import LOADED, Call, make_call  # noqa: F401 (fixture)

pytest.importorskip("typer")


def test_export(call: Call, tmp_path: Path):
    state = {"params": {"w": np.ones((2, 3), np.float32)}, "name": "text"}
    ckpt.save(tmp_path / "one", state)
    code, _, err = call("export", tmp_path / "one", tmp_path / "out")
    assert code == 2
    assert "no place for name (str)" in err
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"saved": "w.weight", "wanted": "params/w", "transpose": [1, 0]}]))
    arguments = ["--only", "params/**", "--rules", rules, "--to", "safetensors"]
    code, out, err = call("export", tmp_path / "one", tmp_path / "out", *arguments)
    assert (code, err) == (0, "")
    assert "model.safetensors" in out
    (found,) = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors").items()
    assert (found[0], found[1].shape) == ("w.weight", (3, 2))
    code, _, err = call("export", tmp_path / "one", tmp_path / "x", "--to", "gguf")
    assert (code, "only safetensors, torch" in err) == (2, True)


def test_show_and_verify_say_what_it_is(call: Call, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a.w": np.ones((2, 3), np.float32)}, path, {"format": "np"})
    code, out, _ = call("show", path)
    assert code == 0
    assert "safetensors, without checksums" in out
    assert 'metadata: {"format": "np"}' in out
    assert "a.w" in out
    code, out, _ = call("show", path, "--json")
    reported = json.loads(out)
    assert reported["written_by"] == "safetensors"
    assert reported["leaves"]["state"][0]["shape"] == [2, 3]
    code, out, _ = call("verify", path)
    assert code == 1
    assert "a format without checksums" in out
