"""What loads, imports, a ``Checkpointer`` and its policies refuse, and what their messages say to do: done to the letter."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import keep, when
from ckpt_core.convert import import_weights
from tests.contract.advice.said import FAST, logged, save, told
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


def state(step: int, run: int = 0) -> dict[str, Any]:
    return {"w": np.arange(4.0) + step + 100 * run}


def runs(directory: Path, **more: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(directory, **{"options": FAST, **more})


def ran(directory: Path, steps: Any, run: int = 0, **more: Any) -> None:
    """A program that saved these steps, and ended."""
    with runs(directory, **more) as one:
        for step in steps:
            one.save(step, state(step, run))


def resumes(directory: Path, step: int, run: int = 0) -> bool:
    """A new program goes on from this step of this run, and can save the next one."""
    with runs(directory) as again:
        restored = again.restore_latest(state(0))
        right = restored.step == step and np.array_equal(
            restored["state"]["w"], state(step, run)["w"]
        )
        return right and again.save(step + 1, state(step + 1, run))


def run_call(text: str, run: Any) -> Any:
    """A call of a method, as a message spells it."""
    return eval(f"run.{text}", {"run": run})


# A directory in which steps are already

TAKEN = "before the first save, to go on from step"


@pytest.mark.parametrize("action", ["go on", "begin anew"])
def test_a_step_that_is_there(tmp_path, action):
    ran(tmp_path, [0, 1, 2])
    with runs(tmp_path) as run, told(TAKEN) as said:
        run.save(1, state(1, run=1))
    assert resumes_unchanged(tmp_path, [0, 1, 2])
    if action == "go on":
        assert said.between("go on from step ", ".") == "2"
        with runs(tmp_path) as run:
            call = said.between("call ", " before").replace("()", "(like)")
            restored = eval(f"run.{call}", {"run": run, "like": state(0)})
            assert restored.step == 2
        assert resumes(tmp_path, 2)
    else:
        with runs(tmp_path) as run:
            run.save(1, state(1, run=1), **eval(f"dict({said.between('pass ', ' to replace')})"))
        assert "retire 2" in said.text
        assert resumes(tmp_path, 1, run=1)


def resumes_unchanged(directory: Path, steps: list[int]) -> bool:
    with runs(directory, read_only=True) as run:
        return run.all_steps() == steps and all(
            np.array_equal(run.restore(step, state(0))["state"]["w"], state(step)["w"])
            for step in steps
        )


OLDER = "call restore_latest() before the first save, to go on from step"


@pytest.mark.parametrize("action", ["go on", "retire", "another directory", "beside"])
def test_an_older_step_than_those_there(tmp_path, caplog, action):
    directory = tmp_path / "run"
    ran(directory, [0, 5, 10])
    with runs(directory) as run, told(OLDER.replace("call restore_latest() ", "")) as said:
        run.save(3, state(3, run=1))
    if action == "go on":
        assert said.between("go on from step ", ",") == "10"
        assert resumes(directory, 10)
    elif action == "retire":
        with runs(directory) as run:
            run_call(said.between(", or ", " to delete"), run)
            assert "has deleted every step" not in caplog.text
            run.save(3, state(3, run=1))
        assert resumes(directory, 3, run=1)
    elif action == "another directory":
        ran(tmp_path / "other", [3], run=1)
        assert resumes(tmp_path / "other", 3, run=1) and resumes(directory, 10)
    else:
        with runs(directory) as run:
            run.save(3, state(3, run=1), **eval(f"dict({said.between('directory; ', ' saves')})"))
        assert "step 3 is saved with force=True, and is older than 5, 10" in caplog.text
        assert resumes(directory, 10)
        with runs(directory) as run:
            found = run.restore(3, state(0))["state"]["w"]
        assert np.array_equal(found, state(3, run=1)["w"]), "beside those"


@pytest.mark.parametrize("action", ["rollback_to", "another directory", "force=True"])
def test_an_older_step_after_a_restore(tmp_path, action):
    directory = tmp_path / "run"
    ran(directory, [0, 5, 10])
    with runs(directory) as run:
        start = run.restore_latest(state(0))
        assert start is not None and start["state"]
        with told("restore_latest would resume from those. Call rollback_to(") as said:
            run.save(3, state(3, run=1))
            run.wait_until_finished()
        if action == "rollback_to":
            run_call(said.between("Call ", " to delete"), run)
            run.save(3, state(3, run=1))
        elif action == "force=True":
            run.save(3, state(3, run=1), **eval(f"dict({said.between('or pass ', ' to save it')})"))
    if action == "another directory":
        ran(tmp_path / "other", [3], run=1)
        assert resumes(tmp_path / "other", 3, run=1)
    assert resumes(directory, *((3, 1) if action == "rollback_to" else (10, 0)))


@pytest.mark.parametrize("action", ["pass it", "begin anew"])
def test_an_item_that_was_left_out(tmp_path, action):
    with runs(tmp_path) as run:
        run.save(1, params=state(1), opt=state(1))
    with runs(tmp_path) as run:
        restored = run.restore_latest(params=state(0), missing="keep")
        assert restored is not None
        with told("that was not restored, and now one of that name is being") as said:
            run.save(2, params=restored["params"], opt=state(0))
    with runs(tmp_path) as run:
        if action == "pass it":
            assert said.between("Pass ", " to the restore") == "opt="
            restored = run.restore_latest(params=state(0), opt=state(0))
            run.save(2, params=restored["params"], opt=restored["opt"])
        else:
            how = eval(f"dict({said.text.rpartition('there: ')[2]})")
            restored = run.restore_latest(params=state(0), **how)
            run.save(2, params=restored["params"], opt=state(0))
    with runs(tmp_path) as run:
        found = run.restore(2, params=state(0), opt=state(0))
        assert np.array_equal(found["params"]["w"], state(1)["w"])
        wanted = state(1 if action == "pass it" else 0)["w"]
        assert np.array_equal(found["opt"]["w"], wanted)


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"{", b"run-x\n"])
def test_a_note_of_the_run_that_is_damaged(tmp_path, content):
    """Local steps would count no more, and a restart go back, without a word."""
    persists = ckpt.when.every_steps(2)
    more: dict[str, Any] = {
        "local_directory": tmp_path / "local",
        "options": ckpt.Options(persist_policy=persists, durable=False),
        "asynchronous": False,
    }
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        for step in range(4):
            run.save(step, state(step))
    (tmp_path / "run" / ".ckpt-run").write_bytes(content)
    with told("Delete the file to go on from the steps") as said:
        ckpt.Checkpointer(tmp_path / "run", **more)
    Path(said.text.partition(" is damaged")[0]).unlink()
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        restored = run.restore_latest(state(0))
        assert restored is not None and restored.step == 2
        assert run.save(3, restored.state)


@pytest.mark.parametrize("where", ["run", "run/", "link"])
def test_a_local_directory_that_is_the_other(tmp_path, where):
    run, local = tmp_path / "run", f"{tmp_path}/{where}"
    (tmp_path / "link").symlink_to(run)
    with told("for one directory leave local_directory= out; else pass") as said:
        runs(run, local_directory=local)
    ran(run, [0, 1])
    written = said.after("such as ").replace("/dev/shm/ckpt", str(tmp_path / "apart"))
    ran(run, [2], **eval(f"dict({written})"))
    for other in ("run-local", "run/local", "."):  # odd places, but nothing is mixed up there
        with runs(run, local_directory=tmp_path / other):
            pass
    assert resumes(run, 2)


LOOKS = {
    "restore_latest": lambda run: run.restore_latest(state(0))["state"],
    "restore": lambda run: run.restore(3, state(0))["state"],
    "load": lambda run: run.load(3),
    "latest_step": lambda run: run.latest_step(),
    "all_steps": lambda run: run.all_steps(),
    "rollback_to": lambda run: run.rollback_to(3),
}


@pytest.mark.parametrize("tier", [False, True])
def test_a_run_onto_which_fresh_weights_are_saved(tmp_path, caplog, tier):
    key = "%s: step 4 is saved after step 3, of which this Checkpointer has restored nothing: "
    more = {"local_directory": tmp_path / "local"} if tier else {}
    ran(tmp_path / "run", range(4), **more)
    for action in ("nothing", "another directory", "overwrite", "force", *LOOKS):
        caplog.clear()
        with runs(tmp_path / ("b" if action == "another directory" else "run"), **more) as run:
            if action in LOOKS:
                LOOKS[action](run)
            arguments = {action: True} if action in ("overwrite", "force") else {}
            assert run.save(4, state(4), **arguments) and run.save(5, state(5))
            run.wait_until_finished()
            if action == "nothing":
                said = logged(key, caplog).after("restored nothing: ")
                assert "call restore_latest() before" in said and "another directory" in said
            else:
                assert "restored nothing" not in caplog.text, action
            assert caplog.text.count("restored nothing") == (action == "nothing")
        if action != "another directory":
            with runs(tmp_path / "run", **more) as run:
                run.rollback_to(3)
    with runs(tmp_path / "empty") as run:
        run.save(4, state(4))
    assert "restored nothing" not in caplog.text


@pytest.mark.parametrize("launcher", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_of_a_launcher_that_are_no_run(tmp_path, monkeypatch, caplog, launcher):
    key = "This is one of 4 tasks, and jax knows of one process: as one run they call jax.distributed."
    ckpt.save(tmp_path / "a", state(0))
    with pytest.raises(ckpt.CheckpointExists) as exists:
        ckpt.save(tmp_path / "a", state(0))
    assert "of 4 tasks" not in str(exists.value)
    monkeypatch.setenv(launcher, "4")
    with told(key, of=ckpt.CheckpointExists):
        ckpt.save(tmp_path / "a", state(0))
    with runs(tmp_path / "run") as first, runs(tmp_path / "run") as second:
        first.save(0, state(0))
        first.wait_until_finished()
        second.restore_latest(state(0))
        assert "taken over from" in caplog.text and key in caplog.text
        with told(key):
            first.save(1, state(1))
            first.wait_until_finished()


@pytest.mark.parametrize("given", [{"save_policy": when.first}, {"keep_policy": keep.latest}])
def test_a_policy_that_was_not_called(tmp_path, given):
    key = "is the function that makes a policy: write "
    with told(key, of=TypeError) as said:
        runs(tmp_path, **given)
    written = said.after(": write ").replace("...", "2")
    ran(tmp_path, [0, 1], **eval(f"dict({written})", {"ckpt": ckpt}))
    assert resumes(tmp_path, 0 if "save_policy" in given else 1)


def test_metrics_twice_or_an_object(tmp_path):
    with runs(tmp_path) as run:
        item = {"metrics": ckpt.Json({"loss": 2.0})}
        with told("pass the metrics by metrics=, or all of them as an"):
            run.save(0, params=state(0), items=item, metrics={"loss": 1.0})
        run.save(0, params=state(0), metrics={"loss": 1.0})
        run.save(1, params=state(1), items=item)
        run.wait_until_finished()
        assert (run.metrics(0), run.metrics(1)) == ({"loss": 1.0}, {"loss": 2.0})
        with told("an object that is to be an item of this name is passed as") as said:
            run.save(2, params=state(2), metrics=np.ones(2))
        items = eval(
            said.between("passed as items=", ", to save").replace("...", "one"), {"one": np.ones(2)}
        )
        run.save(2, params=state(2), items=items)
    with runs(tmp_path) as run:
        with told("an object that is to be an item of this name is passed as"):
            run.restore(2, params=state(0), metrics=np.zeros(2))
        found = run.restore(2, params=state(0), items={"metrics": np.zeros(2)})
        assert found["metrics"].tolist() == [1, 1]


def test_a_metric_that_no_step_has(tmp_path, caplog):
    best: dict[str, Any] = {"best_metric": "loss", "best_mode": "min", "max_to_keep": 1}
    with caplog.at_level(logging.WARNING), runs(tmp_path, **best) as run:
        for step in range(3):
            run.save(step, state(step))
    logged("by which steps are kept, so none is kept or deleted for it: pass it to save", caplog)
    assert resumes_unchanged(tmp_path, [0, 1, 2])
    with runs(tmp_path, **best) as run:
        run.restore_latest(state(0))["state"]
        for step in range(3, 6):
            run.save(step, state(step), metrics={"loss": step})
        run.wait_until_finished()
        assert run.best_step() == 3
    assert resumes(tmp_path, 5)
