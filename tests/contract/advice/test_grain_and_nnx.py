"""What the adapters of Grain and NNX refuse, and what their messages say to do."""

from typing import Any

import grain
import jax
import pytest
from flax import nnx

import ckpt_core as ckpt
import ckpt_flax_nnx
from tests.contract.advice.said import FAST, logged, save, told


class Sharded(nnx.Module):
    def __init__(self):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("data", None))
        self.w = nnx.Param(init(jax.random.key(0), (4, 4)))


@pytest.mark.parametrize("action", ["inside", "abstract"])
def test_a_mesh_that_is_no_longer_set(tmp_path, mesh, action):
    with jax.set_mesh(mesh):
        save(tmp_path / "a", model=Sharded())
        model = nnx.eval_shape(Sharded)
    with told("inside `with jax.set_mesh(mesh):`, or make it with") as said:
        ckpt.restore(tmp_path / "a", model=model)
    names: dict[str, Any] = {
        **{"jax": jax, "mesh": mesh, "ckpt_flax_nnx": ckpt_flax_nnx, "make": Sharded},
        **{"ckpt": ckpt, "path": tmp_path / "a", "model": model},
    }
    restore = "ckpt.restore(path, model=model)"
    if action == "inside":
        exec(f"{said.between('`', '`')} {restore}", names)
    else:
        exec(f"model = {said.text.rpartition('make it with ')[2]}\n{restore}", names)
    assert float(names["model"].w[...].sum()) == 16


@pytest.mark.parametrize("call", ["abstract", "restore_or_init"])
def test_a_model_for_the_function_that_makes_it(tmp_path, call):
    def pass_(make: Any) -> Any:
        if call == "abstract":
            return ckpt_flax_nnx.abstract(make)
        with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
            return ckpt_flax_nnx.restore_or_init(checkpointer, make)[0]

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with told("itself was passed: write lambda: ") as said:
        pass_(model)
    code = said.after("write ").replace("Linear(...)", "nnx.Linear(2, 3, rngs=nnx.Rngs(0))")
    assert pass_(eval(code, {"nnx": nnx})).kernel.shape == (2, 3)
    key = "in its place"
    for make in (lambda: nnx.Linear, lambda: {"a": model, "b": nnx.Linear}):
        with told(key, of=TypeError) as said:
            pass_(make)
        code = said.between("write ", " in its").replace("...", "2, 3, rngs=nnx.Rngs(0)")
        assert pass_(lambda code=code: eval(f"nnx.{code}", {"nnx": nnx})).kernel.shape == (2, 3)
    with pytest.raises(TypeError, match="and a int itself was passed"):
        pass_(3)


def test_an_iterator_that_never_moves(tmp_path, caplog):
    """``for batch in dataset`` makes an iterator of its own: the one that is saved stands."""
    dataset = grain.MapDataset.range(100).batch(4).to_iter_dataset()

    def train(name: str, batches: Any, data: Any) -> None:
        with ckpt.Checkpointer(tmp_path / name, options=FAST) as run:
            for step, _ in zip(range(5), batches, strict=False):
                run.save(step, data=data)

    data = iter(dataset)
    train("a", dataset, data)
    said = logged(
        "makes, and a restart reads these data again. Take them from the one that is saved: for batch in %s",
        caplog,
    )
    assert said.text.count("at one position") == 1
    caplog.clear()
    train("b", data, data)
    again = iter(dataset)
    with ckpt.Checkpointer(tmp_path / "b") as run:
        assert run.restore_latest(data=again) is not None
    assert next(again)[0] == next(data)[0]
    with ckpt.Checkpointer(tmp_path / "c", save_interval_steps=4, options=FAST) as run:
        for step in range(13):  # a batch serves four steps
            if step % 4 == 3:
                next(data)
            run.save(step, data=data)
    assert "position" not in caplog.text


def test_another_iterator_than_the_restored_one(tmp_path, caplog):
    dataset = grain.MapDataset.range(100).batch(4).to_iter_dataset()
    first = iter(dataset)
    with ckpt.Checkpointer(tmp_path / "a", options=FAST) as run:
        for step in range(3):
            next(first)
            run.save(step, data=first)
    for right in (True, False):
        caplog.clear()
        with ckpt.Checkpointer(tmp_path / "a", options=FAST) as run:
            restored = iter(dataset)
            newest = run.restore_latest(data=restored)
            assert newest is not None
            data = restored if right else iter(dataset)
            for step in (1, 2):
                next(data)
                run.save(newest.step + step, data=data)
        assert ("another is saved now" in caplog.text) is not right
    said = logged(
        ": its data do not go on from there. Take the batches from the one that was restored, and save that",
        caplog,
    )
    assert said.text.count("another is saved now") == 1
