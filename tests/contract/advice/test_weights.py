"""What imports and exports of other formats refuse, and what their messages say to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import export_safetensors, import_weights
from tests.contract.advice.said import told

W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W}
FAST = ckpt.Options(durable=False)


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


def imported(source: Any, tmp_path: Path, **more: Any) -> Any:
    """What a program that is started again finds of an import."""
    target = tmp_path / f"imported-{len(os.listdir(tmp_path))}"
    import_weights(source, target, options=FAST, **more)
    return ckpt.load(target)


def right(value: Any) -> bool:
    return np.array_equal(value, W)


# numpy


# A package that is not there


@pytest.mark.parametrize(
    ("name", "module"), [("a.pt", "torch"), ("a", "flax.serialization"), ("a.h5", "h5py")]
)
def test_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str):
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


# What it is, and where


def test_what_it_is(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with told("is neither a file nor a folder: copy what it gives to a file first"):
        imported(tmp_path / "pipe", tmp_path)
    (tmp_path / "odd").write_bytes(b"odd")
    with told("does: say which it is with") as said:
        imported(tmp_path / "odd", tmp_path)
    assert "format=" in said.text and "ckpt.save" in said.text
    np.savez(tmp_path / "a.npz", w=W)
    assert right(imported(tmp_path / "a.npz", tmp_path, format="npz")["w"])
    with told("is read from a disk: copy it there first"):
        import_weights("gs://bucket/a.npz", tmp_path / "x", format="npz")


def test_two_values_at_one_place(tmp_path: Path):
    np.savez(tmp_path / "a.npz", **{"a.b": W, "a": W + 1})
    with told("or one inside of the other: rename one of them"):
        imported(tmp_path / "a.npz", tmp_path, split=".")
    found = imported(tmp_path / "a.npz", tmp_path, split=".", rename={"a.b": "c.b"})
    assert right(found["c"]["b"]) and right(found["a"] - 1)
    with told("An entry of rename= must be a name, or leading parts of one."):
        imported(tmp_path / "a.npz", tmp_path, split=".", rename={"x": "y"})


def test_items_of_orbax(tmp_path: Path):
    ocp = pytest.importorskip("orbax.checkpoint")
    arguments = ocp.args.Composite(
        one=ocp.args.StandardSave(STATE),
        two=ocp.args.StandardSave(STATE),
        text=ocp.args.JsonSave({}),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        orbax.save(tmp_path / "a", arguments)
    with told("has several items: say with item= whose names are changed") as said:
        imported(tmp_path / "a", tmp_path, rename={"w": "v"})
    for name in said.text.rpartition("changed, of ")[2].split(", "):
        found = imported(tmp_path / "a", tmp_path, rename={"w": "v"}, item=name)
        assert right(found[name]["v"])


# safetensors


def test_names_and_numbers_of_safetensors(tmp_path: Path):
    save(tmp_path / "a", {"__metadata__": W})
    with told("in this format: rename it with rules="):
        export_safetensors(tmp_path / "a", tmp_path / "a.safetensors")
    rules = [ckpt.Rule("metadata", "__metadata__")]
    (file,) = export_safetensors(tmp_path / "a", tmp_path / "a.safetensors", rules=rules)
    assert right(ckpt.load(file)["metadata"])
    with told("what a checkpoint holds is renamed with rename="):
        ckpt.load(tmp_path / "a", {"metadata": W * 0}, rules=rules)
    back = ckpt.load(tmp_path / "a", {"metadata": W * 0}, rename={"__metadata__": "metadata"})
    assert right(back["metadata"])
    with told("rules= cannot be combined with rename=: a rule renames, too"):
        ckpt.load(file, {"w": W * 0}, rules=[ckpt.Rule("metadata", "w")], rename={"metadata": "w"})
    assert right(ckpt.load(file, {"w": W * 0}, rules=[ckpt.Rule("metadata", "w")])["w"])


def test_rename_twice(tmp_path: Path):
    save(tmp_path / "a", {"one": W, "two": W + 1})
    like = {"x": W * 0}
    with told("the same path"):
        ckpt.load(tmp_path / "a", like, rename={"one": "x", "two": "x"})
    assert right(ckpt.load(tmp_path / "a", like, rename={"one": "x"}, unexpected="ignore")["x"])
    with told("or puts one leaf inside another"):
        ckpt.load(tmp_path / "a", rename={"one": "x", "two": "x/y"})
    assert right(ckpt.load(tmp_path / "a", rename={"one": "x", "two": "y"})["x"])
