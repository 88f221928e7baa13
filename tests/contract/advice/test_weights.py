"""What imports and exports of other formats refuse, and what their messages say to do."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.contract.advice.said import FAST, save, told

W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W}


def imported(source: Any, tmp_path: Path, **more: Any) -> Any:
    """What a program that is started again finds of an import."""
    target = tmp_path / f"imported-{len(os.listdir(tmp_path))}"
    import_weights(source, target, options=FAST, **more)
    return ckpt.load(target)


def right(value: Any) -> bool:
    return np.array_equal(value, W)


@pytest.mark.parametrize(
    ("name", "module"), [("a.pt", "torch"), ("a", "flax.serialization"), ("a.h5", "h5py")]
)
def test_without_a_package(tmp_path, monkeypatch, name, module):
    library: Any = pytest.importorskip(module)
    file, package = tmp_path / name, module.partition(".")[0]
    if package == "torch":
        library.save({"w": library.ones(4)}, file)
    elif package == "flax":
        file.write_bytes(library.msgpack_serialize({"w": W}))
    else:
        with library.File(file, "w") as written:
            written["w"] = W
    with monkeypatch.context() as without:
        without.setitem(sys.modules, module, None)
        with told(f"needs the package {package}: pip install {package}"):
            imported(file, tmp_path)
        if package == "torch":
            ckpt.save(tmp_path / "c", STATE, options=FAST)
            with told("needs the package torch: pip install torch"):
                ckpt.convert.export_torch(tmp_path / "c", tmp_path / "b.pt")
    assert "w" in imported(file, tmp_path), "with it"


def test_rename_twice(tmp_path):
    save(tmp_path / "a", {"one": W, "two": W + 1})
    like = {"x": W * 0}
    with told("the same path"):
        ckpt.load(tmp_path / "a", like, rename={"one": "x", "two": "x"})
    assert right(ckpt.load(tmp_path / "a", like, rename={"one": "x"}, unexpected="ignore")["x"])
    with told("or puts one leaf inside another"):
        ckpt.load(tmp_path / "a", rename={"one": "x", "two": "x/y"})
    assert right(ckpt.load(tmp_path / "a", rename={"one": "x", "two": "y"})["x"])
