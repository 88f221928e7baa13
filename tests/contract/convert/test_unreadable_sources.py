"""What the system cannot look at now is neither absent nor damaged, and a file that it hides is not overwritten."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.support.refusals import refuse


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("hidden", ["a.npz", "a.safetensors", "dcp", "dcp/.metadata"])
def test_a_source_that_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, number: int
) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    ckpt.save(tmp_path / "a", {"w": np.ones(2)})
    ckpt.convert.export_safetensors(tmp_path / "a", tmp_path / "a.safetensors")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    refuse(monkeypatch, tmp_path / hidden, number, calls=("stat",), below=False)
    with pytest.raises(OSError) as raised:
        import_weights(tmp_path / hidden.removesuffix("/.metadata"), tmp_path / "out")
    assert raised.value.errno == number
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["npz", "safetensors", "folder"])
def test_a_target_that_is_hidden_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ckpt.save(tmp_path / "a", {"w": np.ones(2)})
    target = tmp_path / ("out" if kind == "folder" else f"out.{kind}")
    target.mkdir() if kind == "folder" else target.write_text("mine")
    export = ckpt.convert.export_npz if kind == "npz" else ckpt.convert.export_safetensors
    with monkeypatch.context() as patch:
        refuse(patch, target, errno.EIO, calls=("stat", "lstat"), below=False)
        with pytest.raises(OSError) as raised:
            export(tmp_path / "a", target)
    assert raised.value.errno == errno.EIO
    assert kind == "folder" or target.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a", target.name]
