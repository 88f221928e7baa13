"""What ``load``, ``restore`` and imports refuse, and what their messages say to do: done to the letter."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.contract.advice.said import FAST, save, told
from tests.support.own import Own

W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W}
AS_NUMPY: dict[str, Any] = {"w": np.zeros(4, np.float32)}


def right(value: Any) -> bool:
    return np.array_equal(value, W)


def counted() -> Own:
    return Own(w=np.zeros(4, np.float32))


def test_items_and_one_state(tmp_path):
    save(tmp_path / "items", params=STATE, opt=STATE)
    save(tmp_path / "one", STATE)
    like: Any = AS_NUMPY
    with told("like must be a dict of items, or name one with item="):
        ckpt.load(tmp_path / "items", [like])
    assert right(ckpt.load(tmp_path / "items", {"opt": like})["opt"]["w"])
    assert right(ckpt.load(tmp_path / "items", like, item="opt")["w"])
    with told(": pass each target by its name (") as said:
        ckpt.restore(tmp_path / "items", like)
    by_name = eval(
        f"dict({said.between('by its name (', ')')})".replace("...", "like"), {"like": like}
    )
    restored = ckpt.restore(tmp_path / "items", **by_name)
    assert all(right(restored[name]["w"]) for name in ("params", "opt"))
    with told(": it was saved as one state, pass one target without a name"):
        ckpt.restore(tmp_path / "one", params=like)
    assert right(ckpt.restore(tmp_path / "one", like)["state"]["w"])
    with told("not both: if the checkpoint was saved as one state, pass only that"):
        ckpt.restore(tmp_path / "one", like, params=like)
    with told("restore needs at least one target, such as model=model") as said:
        ckpt.restore(tmp_path / "one")
    save(tmp_path / "model", model=STATE)
    target = eval(f"dict({said.between('such as ', ';')})", {"model": like})
    assert right(ckpt.restore(tmp_path / "model", **target)["model"]["w"])
    assert "use load" in said.text and right(ckpt.load(tmp_path / "one")["w"])


def mismatch(path: Path, like: Any, **more: Any) -> list[str]:
    """The arguments that the message names, as it spells them."""
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(path, like, **more)
    said = str(caught.value).partition("Where this is intended: ")[2]
    return [part.split(" ")[0] for part in said.replace(".", ";").split("; ")]


def test_what_a_difference_may_be(tmp_path):
    save(tmp_path / "a", {"w": W, "b": W})
    path, like = tmp_path / "a", {"w": jnp.zeros(4), "b": jnp.zeros(4)}
    arguments = mismatch(path, {**like, "c": jnp.ones(1)})
    loaded = ckpt.load(path, {**like, "c": jnp.ones(1)}, **eval(f"dict({arguments[0]})"))
    assert right(loaded["w"]) and loaded["c"].tolist() == [1]
    arguments = mismatch(path, {"w": like["w"]})
    loaded = ckpt.load(path, {"w": like["w"]}, **eval(f"dict({arguments[0]})"))
    assert right(loaded["w"]) and len(loaded) == 1
    half = {"w": like["w"].astype(jnp.float16), "b": like["b"]}
    arguments = mismatch(path, half)
    loaded = ckpt.load(path, half, **eval(f"dict({arguments[0]})"))
    assert loaded["w"].dtype == jnp.float16 and right(loaded["w"])
    other = {"w": like["w"], "bias": like["b"]}
    arguments = mismatch(path, other)
    assert [part.split("=")[0] for part in arguments if part] == ["missing", "unexpected", "rename"]
    assert right(ckpt.load(path, other, rename={"b": "bias"})["bias"])
    both = eval(f"dict({arguments[0]}, {arguments[1]})")
    assert right(ckpt.load(path, other, **both)["w"])


def test_nothing_to_keep(tmp_path):
    save(tmp_path / "a", STATE)
    abstract = {
        "w": jax.ShapeDtypeStruct((4,), jnp.float32),
        "b": jax.ShapeDtypeStruct((1,), jnp.float32),
    }
    key = "pass a target with values instead of an abstract one, or select with only="
    with told(key.replace(" only=", "")):
        ckpt.load(tmp_path / "a", abstract, missing="keep")
    values = {"w": jnp.zeros(4), "b": jnp.ones(1)}
    back = ckpt.load(tmp_path / "a", values, missing="keep")
    assert right(back["w"]) and back["b"].tolist() == [1]
    assert right(ckpt.load(tmp_path / "a", abstract, only="w")["w"])


def test_shardings_that_have_no_place_for_a_leaf(tmp_path, mesh):
    save(tmp_path / "a", {"w": jnp.arange(4.0), "b": jnp.arange(4.0)})
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with told("a tree of shardings with the structure of the checkpoint, or a") as said:
        ckpt.load(tmp_path / "a", sharding={"w": spec})
    assert "pass a Sharding, a Mesh, a tree" in said.text
    for sharding in (spec, mesh, {"w": spec, "b": spec}, lambda path, leaf: spec):
        back = ckpt.load(tmp_path / "a", sharding=sharding)
        assert right(back["b"]) and len(back["b"].sharding.device_set) == 8


def test_sixty_four_bits(tmp_path):
    with jax.enable_x64(True):
        save(tmp_path / "a", {"w": jnp.arange(4.0, dtype=jnp.float64)})
    with told("load with as_numpy=True, or give a target of 32 bits and cast=True") as said:
        ckpt.load(tmp_path / "a")
    with jax.enable_x64(True):
        assert ckpt.load(tmp_path / "a")["w"].dtype == "float64"
    as_numpy = eval(f"dict({said.between('load with ', ', or')})")
    assert ckpt.load(tmp_path / "a", **as_numpy)["w"].dtype == "float64"
    cast = eval(f"dict({said.text.rpartition('bits and ')[2]})")
    assert right(ckpt.load(tmp_path / "a", {"w": jnp.zeros(4)}, **cast)["w"])
    with told("Where 64 bits are wanted: ", of=ckpt.StructureMismatch) as target:
        ckpt.load(tmp_path / "a", {"w": jnp.zeros(4)})
    assert 'update("jax_enable_x64", True) first' in said.text
    try:
        eval(target.between("are wanted: ", " before"), {"jax": jax})
        assert ckpt.load(tmp_path / "a", {"w": jnp.zeros(4)})["w"].dtype == "float64"
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_of_another_kind(tmp_path, impl):
    typed = jax.random.key(7, impl=impl)
    raw = jax.random.key_data(typed)
    other = jax.random.key(3, impl="rbg" if impl == "threefry2x32" else "threefry2x32")
    save(tmp_path / "typed", {"rng": typed})
    save(tmp_path / "raw", {"rng": raw})
    for name, given in (("typed", other), ("typed", raw), ("raw", typed)):
        for call in (ckpt.load, ckpt.restore):
            with told("in the target write ", of=ckpt.StructureMismatch) as said:
                call(tmp_path / name, {"rng": given})
            written, _, back = (
                said.after("in the target write ")
                .rstrip(".")
                .partition(", and of what comes back make ")
            )
            target = eval(written, {"jax": jax, "key": given})
            found = ckpt.load(tmp_path / name, {"rng": target})["rng"]
            if back:
                found = eval(back, {"jax": jax, "key": found})
            assert found.dtype == typed.dtype and (jax.random.key_data(found) == raw).all()


def test_one_object_under_two_names(tmp_path):
    one, two = counted(), counted()
    one.w = W
    save(tmp_path / "a", one=one, two=two)
    again = counted()
    with told("Restore it under one of the names; what is saved under another") as said:
        ckpt.restore(tmp_path / "a", one=again, two=again)
    ckpt.restore(tmp_path / "a", one=again)
    call = said.text.rpartition("is loaded with ")[2].replace("...", "'two'")
    other = eval(call, {"load": ckpt.load, "path": tmp_path / "a"})
    assert right(again.w) and other["w"].tolist() == [0] * 4


class Refuses(Own):
    """Takes its own state, and no other: fails when what comes before it is set already."""

    def set_state(self, state: Any):
        raise ValueError("not today")


@pytest.mark.parametrize("action", ["another step", "create", "atomic"])
def test_a_restore_that_failed_in_the_middle(tmp_path, action):
    nnx = pytest.importorskip("flax.nnx")

    def make(seed: int) -> Any:
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(*(nnx.Linear(32, 32, rngs=rngs) for _ in range(6)))

    def values(model: Any) -> list[Any]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]

    save(tmp_path / "a", other=counted(), model=make(0))
    save(tmp_path / "b", model=make(0))
    again, before = make(1), values(make(1))
    options = ckpt.Options(max_host_bytes=4096, durable=False)
    with pytest.raises(ValueError, match="not today") as caught:
        ckpt.restore(tmp_path / "a", other=Refuses(w=W), model=again, options=options)
    note = "\n".join(caught.value.__notes__)
    key = "Restore another step into it, or create it again. Options(atomic_restore="
    assert key in note
    if action == "atomic":
        how = "atomic_restore=" + note.partition("Options(atomic_restore=")[2].partition(")")[0]
        again = make(1)
        options = eval(f"ckpt.Options({how}, max_host_bytes=4096)", {"ckpt": ckpt})
        with pytest.raises(ValueError, match="not today"):
            ckpt.restore(tmp_path / "a", other=Refuses(w=W), model=again, options=options)
        assert all(map(np.array_equal, values(again), before)), "changes nothing"
    again = make(1) if action == "create" else again
    ckpt.restore(tmp_path / "b", model=again)
    assert all(map(np.array_equal, values(again), values(make(0))))


def imported(source: Any, tmp_path: Path, **more: Any) -> Any:
    """What a program that is started again finds of an import."""
    target = tmp_path / f"imported-{len(os.listdir(tmp_path))}"
    import_weights(source, target, options=FAST, **more)
    return ckpt.load(target)


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
