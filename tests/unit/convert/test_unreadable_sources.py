"""What the system cannot look at or read now is neither absent nor damaged, and a file that it hides is not overwritten."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import _keras, _zips, import_weights
from ckpt_core.convert._detect import format_of
from tests.support.refusals import refuse

_FAILING = """
def function(*given, **named):
    if armed[0] <= 0:
        raise error
    armed[0] -= 1
    return real(*given, **named)
"""
"""To be compiled as from no file: what a file of these tests raises counts as raised by a signal handler."""


def failing(
    patch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, after: int = 0
) -> None:
    """A function raises an error after so many calls."""
    own: dict[str, Any] = {"error": error, "armed": [after], "real": getattr(owner, name)}
    exec(compile(_FAILING, "<injected>", "exec"), own)
    patch.setattr(owner, name, own["function"])


def eio() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("hidden", ["a.npz", "dcp", "dcp/.metadata"])
def test_which_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, number: int
) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    refuse(monkeypatch, tmp_path / hidden, number, calls=("stat",), below=False)
    with pytest.raises(OSError) as raised:
        format_of(str(tmp_path / hidden.removesuffix("/.metadata")))
    assert raised.value.errno == number


def test_safetensors_of_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(tmp_path / "a", {"w": np.ones(2)})
    (file,) = ckpt.convert.export_safetensors(tmp_path / "a", tmp_path / "b.safetensors")
    os.rename(file, tmp_path / "b")
    refuse(monkeypatch, tmp_path / "b", errno.EIO, calls=("stat",), below=False)
    with pytest.raises(OSError) as raised:
        import_weights(tmp_path / "b", tmp_path / "c", format="safetensors")
    assert raised.value.errno == errno.EIO


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


# ----------------------------------------------------------------------------- Keras


@pytest.fixture
def hdf5(tmp_path: Path) -> Path:
    """Weights as Keras stores them, and the same in an archive and behind an index."""
    h5py = pytest.importorskip("h5py")
    file = tmp_path / "a.weights.h5"
    with h5py.File(file, "w") as made:
        made.create_dataset("layers/dense/vars/0", data=np.arange(1000.0), chunks=(100,))
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.write(file, _keras.WEIGHTS)
        archive.writestr("metadata.json", "{}")
    index = {"weight_map": {"/layers/dense/vars": [file.name]}}
    (tmp_path / "a.weights.json").write_text(json.dumps(index))
    return file


def refused(source: Path, number: int) -> None:
    """The import of a file ends with the system's error, and leaves nothing."""
    with pytest.raises(OSError) as raised:
        import_weights(source, source.parent / "out", format="keras")
    assert raised.value.errno == number
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5"])
def test_no_descriptor_for_a_moment(
    hdf5: Path, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    source = hdf5.with_name(name)
    refuse(monkeypatch, source, errno.EMFILE, calls=("builtins.open",), times=times)
    refused(source, errno.EMFILE)


def test_a_shard_that_is_hidden(hdf5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, hdf5, calls=("stat",))
    refused(hdf5.with_name("a.weights.json"), errno.EACCES)


@pytest.mark.parametrize("after", range(8))
def test_an_archive_that_cannot_be_read(
    hdf5: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    failing(monkeypatch, _zips.Window, "readinto", eio(), after)
    refused(hdf5.with_name("a.keras"), errno.EIO)


FOUND_BY_HDF5 = (
    "Unable to synchronously open object (file read failed: time = Fri Nov 27 15:07:38 2026\\n, filename = "
    "'/tmp/a.h5', file descriptor = 3, errno = 5, error message = 'Input/output error', buf = 0x5568d4dc6860, "
    "total read size = 544, bytes this sub-read = 544, offset = 7428503)"
)


@pytest.mark.parametrize("kind", [KeyError, RuntimeError])
def test_a_group_that_cannot_be_read(
    hdf5: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    import h5py

    failing(monkeypatch, h5py.Group, "__getitem__", kind(FOUND_BY_HDF5), after=1)
    refused(hdf5, errno.EIO)


@pytest.mark.parametrize(
    "error", [eio(), OSError(errno.ENOMEM, "no memory"), RuntimeError(FOUND_BY_HDF5)]
)
def test_values_that_cannot_be_read(
    hdf5: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    import h5py

    failing(monkeypatch, h5py.Dataset, "read_direct", error)
    refused(hdf5, getattr(error, "errno", errno.EIO))


@pytest.mark.parametrize(
    "error", [OSError("wrong B-tree signature"), OSError(errno.EINVAL, "seek"), RuntimeError("bad")]
)
def test_damage_stays_damage(hdf5: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import h5py

    failing(monkeypatch, h5py.Dataset, "read_direct", error)
    with pytest.raises(ckpt.CheckpointCorrupt, match="cannot be read"):
        import_weights(hdf5, hdf5.with_name("out"))
