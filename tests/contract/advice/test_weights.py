"""What imports and exports of other formats refuse, and what their messages say to do."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import ckpt_core as ckpt
from ckpt_core.convert import export_npz, export_safetensors, import_weights
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


class Mine:
    def __init__(self) -> None:
        self.w = W

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}


# numpy


def test_arrays_of_objects(tmp_path: Path):
    np.savez(tmp_path / "a.npz", w=np.array([1.5, None], object))
    with told("convert/_npy.py: that the file names: save arrays of numbers only"):
        imported(tmp_path / "a.npz", tmp_path)
    np.savez(tmp_path / "a.npz", w=W)
    assert right(imported(tmp_path / "a.npz", tmp_path)["w"])


def test_an_archive_whose_size_nothing_bounds(tmp_path: Path):
    np.savez(tmp_path / "a.npz", w=W)
    with zipfile.ZipFile(tmp_path / "a.npz") as whole:
        content = whole.read("w.npy")
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("w.npy", content)
    with told("convert/_zips.py: make the archive anew without compression, or with deflate"):
        imported(tmp_path / "b.npz", tmp_path)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "b.npz", "w", method) as archive:
            archive.writestr("w.npy", content)
        assert right(imported(tmp_path / "b.npz", tmp_path)["w"])


@pytest.mark.parametrize("action", ["safetensors", "float32"])
def test_dtypes_that_numpy_does_not_name(tmp_path: Path, action: str):
    half = np.asarray(jnp.arange(4, dtype=jnp.bfloat16))
    np.savez(tmp_path / "a.npz", w=half)
    with told("convert/_npy.py: write the file anew as safetensors, or as arrays of float32"):
        imported(tmp_path / "a.npz", tmp_path)
    if action == "safetensors":
        safetensors.numpy.save_file({"w": half}, tmp_path / "b.safetensors")
        assert right(imported(tmp_path / "b.safetensors", tmp_path)["w"])
    else:
        np.savez(tmp_path / "a.npz", w=half.astype(np.float32))
        assert right(imported(tmp_path / "a.npz", tmp_path)["w"])


@pytest.mark.parametrize("odd", [np.array(["text"]), np.array(["2026-01-01"], "M8[s]")])
def test_dtypes_that_are_no_numbers(tmp_path: Path, odd: Any):
    np.savez(tmp_path / "a.npz", w=W, odd=odd)
    with told("convert/_source.py: : convert it to numbers, or leave it out of the file"):
        imported(tmp_path / "a.npz", tmp_path)
    np.savez(tmp_path / "a.npz", w=W)
    assert right(imported(tmp_path / "a.npz", tmp_path)["w"])
    np.savez(tmp_path / "a.npz", w=W, odd=np.arange(2))
    assert right(imported(tmp_path / "a.npz", tmp_path)["w"])


def test_what_is_no_array_in_an_npz(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("w.npy", "w") as file:
        np.save(file, W)
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        with archive.open("w.npy", "w") as file:
            np.save(file, W)
        archive.writestr("notes.txt", "mine")
    with told("convert/_npz.py: is no array: leave it out of the file"):
        imported(tmp_path / "b.npz", tmp_path)
    assert right(imported(tmp_path / "a.npz", tmp_path)["w"])


@pytest.mark.parametrize("action", ["rules", "safetensors"])
def test_names_that_an_npz_cannot_have(tmp_path: Path, action: str):
    save(tmp_path / "a", {"a\0b": W})
    with told("convert/_npz_out.py: : rename it with rules=, or write safetensors"):
        export_npz(tmp_path / "a", tmp_path / "a.npz")
    if action == "rules":
        export_npz(tmp_path / "a", tmp_path / "a.npz", rules=[ckpt.Rule("b", "a\0b")])
        assert right(np.load(tmp_path / "a.npz")["b"])
    else:
        (file,) = export_safetensors(tmp_path / "a", tmp_path / "a.safetensors")
        assert right(ckpt.load(file)["a\0b"])


# torch, without torch


def test_an_object_in_a_file_of_torch(tmp_path: Path):
    torch = pytest.importorskip("torch")
    torch.save(Mine(), tmp_path / "a.pt")
    with told(
        "convert/_torch_pickle.py: In a program that has the class and trusts the file,"
    ) as said:
        imported(tmp_path / "a.pt", tmp_path)
    model = torch.load(tmp_path / "a.pt", weights_only=False)
    state = eval(said.between("save ", " instead"), {"model": model})
    torch.save({name: torch.from_numpy(value) for name, value in state.items()}, tmp_path / "b.pt")
    assert right(imported(tmp_path / "b.pt", tmp_path)["w"])


def test_an_old_file_of_torch(tmp_path: Path):
    torch = pytest.importorskip("torch")
    old = {"_use_new_zipfile_serialization": False}
    torch.save({"w": torch.arange(4.0)}, tmp_path / "a.pt", **old)
    with told("convert/_detect.py: load it in a program that trusts it, with") as said:
        imported(tmp_path / "a.pt", tmp_path)
    how = eval(f"dict({said.between('trusts it, with ', ', and')})")
    torch.save(torch.load(tmp_path / "a.pt", **how), tmp_path / "b.pt")
    assert right(imported(tmp_path / "b.pt", tmp_path)["w"])


def test_repetitions(tmp_path: Path):
    torch = pytest.importorskip("torch")
    wide = torch.arange(2.0).unsqueeze(1).expand(2, 3_000_000)
    torch.save({"w": wide}, tmp_path / "a.pt")
    with told("convert/_torch.py: : save it after .contiguous()") as said:
        imported(tmp_path / "a.pt", tmp_path)
    torch.save(
        {"w": eval("wide" + said.text.rpartition("after ")[2], {"wide": wide})}, tmp_path / "b.pt"
    )
    assert imported(tmp_path / "b.pt", tmp_path)["w"][:, -1].tolist() == [0, 1]


def test_numbers_of_a_big_endian_machine(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
        archive.writestr("a/byteorder", "big")
    with told("convert/_torch.py: its numbers are big-endian: save it anew on a usual machine"):
        imported(tmp_path / "a.pt", tmp_path)
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.arange(4.0)}, tmp_path / "a.pt")
    assert right(imported(tmp_path / "a.pt", tmp_path)["w"])


# Keras


def test_texts_in_a_file_of_keras(tmp_path: Path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["w"], file["vocabulary"] = W, ["a", "b"]
    with told("convert/_keras.py: : a checkpoint holds numbers; leave it out with only="):
        imported(tmp_path / "a.h5", tmp_path)
    assert right(imported(tmp_path / "a.h5", tmp_path, only="w")["w"])


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["w"] = W
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "h5py", None)
        with told("convert/_keras.py: reading it needs the package h5py: pip install h5py"):
            imported(tmp_path / "a.h5", tmp_path)
    assert right(imported(tmp_path / "a.h5", tmp_path)["w"]), "with it"


# What it is, and where


def test_what_it_is(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with told(
        "convert/_detect.py: is neither a file nor a folder: copy what it gives to a file first"
    ):
        imported(tmp_path / "pipe", tmp_path)
    (tmp_path / "odd").write_bytes(b"odd")
    with told("convert/_detect.py: does: say which it is with") as said:
        imported(tmp_path / "odd", tmp_path)
    assert "format=" in said.text and "ckpt.save" in said.text
    np.savez(tmp_path / "a.npz", w=W)
    assert right(imported(tmp_path / "a.npz", tmp_path, format="npz")["w"])
    with told("convert/_incoming.py: is read from a disk: copy it there first"):
        import_weights("gs://bucket/a.npz", tmp_path / "x", format="npz")


def test_two_values_at_one_place(tmp_path: Path):
    np.savez(tmp_path / "a.npz", **{"a.b": W, "a": W + 1})
    with told("convert/_arrange.py: or one inside of the other: rename one of them"):
        imported(tmp_path / "a.npz", tmp_path, split=".")
    found = imported(tmp_path / "a.npz", tmp_path, split=".", rename={"a.b": "c.b"})
    assert right(found["c"]["b"]) and right(found["a"] - 1)
    with told("convert/_arrange.py: An entry of rename= must be a name, or leading parts of one."):
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
    with told(
        "convert/_incoming.py: has several items: say with item= whose names are changed"
    ) as said:
        imported(tmp_path / "a", tmp_path, rename={"w": "v"})
    for name in said.text.rpartition("changed, of ")[2].split(", "):
        found = imported(tmp_path / "a", tmp_path, rename={"w": "v"}, item=name)
        assert right(found[name]["v"])


# safetensors


def test_names_and_numbers_of_safetensors(tmp_path: Path):
    save(tmp_path / "a", {"__metadata__": W})
    with told("_format/safetensors.py: in this format: rename it with rules="):
        export_safetensors(tmp_path / "a", tmp_path / "a.safetensors")
    rules = [ckpt.Rule("metadata", "__metadata__")]
    (file,) = export_safetensors(tmp_path / "a", tmp_path / "a.safetensors", rules=rules)
    assert right(ckpt.load(file)["metadata"])
    with told("_load/derived.py: what a checkpoint holds is renamed with rename="):
        ckpt.load(tmp_path / "a", {"metadata": W * 0}, rules=rules)
    back = ckpt.load(tmp_path / "a", {"metadata": W * 0}, rename={"__metadata__": "metadata"})
    assert right(back["metadata"])
    with told("_load/request.py: rules= cannot be combined with rename=: a rule renames, too"):
        ckpt.load(file, {"w": W * 0}, rules=[ckpt.Rule("metadata", "w")], rename={"metadata": "w"})
    assert right(ckpt.load(file, {"w": W * 0}, rules=[ckpt.Rule("metadata", "w")])["w"])


def test_rename_twice(tmp_path: Path):
    save(tmp_path / "a", {"one": W, "two": W + 1})
    like = {"x": W * 0}
    with told("_tree/match.py: the same path"):
        ckpt.load(tmp_path / "a", like, rename={"one": "x", "two": "x"})
    assert right(ckpt.load(tmp_path / "a", like, rename={"one": "x"}, unexpected="ignore")["x"])
    with told("_load/plans.py: or puts one leaf inside another"):
        ckpt.load(tmp_path / "a", rename={"one": "x", "two": "x/y"})
    assert right(ckpt.load(tmp_path / "a", rename={"one": "x", "two": "y"})["x"])
