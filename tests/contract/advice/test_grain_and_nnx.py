"""What the adapters of Grain and NNX refuse, and what their messages say to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.advice.said import logged, told

grain = pytest.importorskip("grain")
nnx = pytest.importorskip("flax.nnx")
ckpt_grain = pytest.importorskip("ckpt_grain")
ckpt_flax_nnx = pytest.importorskip("ckpt_flax_nnx")

FAST = ckpt.Options(durable=False)
STATE = {"w": np.arange(4.0)}


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


def batches(scale: int = 1) -> Any:
    return grain.MapDataset.range(20).map(lambda x: x * scale).to_iter_dataset()


def goes_on(path: Path, target: Any, wanted: int) -> bool:
    """A new program draws this next."""
    ckpt.restore(path, data=target)
    return int(next(target)) == wanted


def test_a_dataset_for_its_iterator(tmp_path: Path):
    dataset = batches()
    with told(
        "grain/ckpt_grain/_adapter.py: has no position: pass its iterator, it = iter(...)"
    ) as said:
        save(tmp_path / "a", data=dataset)
    names: dict[str, Any] = {"dataset": dataset}
    exec(said.between("its iterator, ", ", the one").replace("...", "dataset"), names)
    it = names["it"]
    next(it)
    save(tmp_path / "a", data=it)
    assert goes_on(tmp_path / "a", iter(batches()), 1)


def test_an_iterator_in_a_container(tmp_path: Path):
    iterator = iter(batches())
    next(iterator)
    with told("_adapters/__init__.py: of its own, such as data=iterator") as said:
        save(tmp_path / "a", {"w": STATE["w"], "data": iterator})
    item = eval(f"dict({said.after('such as ')})", {"iterator": iterator})
    save(tmp_path / "a", state=STATE, **item)
    assert goes_on(tmp_path / "a", iter(batches()), 1)


def test_an_iterator_of_python_around_it(tmp_path: Path):
    dataset = batches()
    with told("_tree/code.py: , and make this one of it again after a restore") as said:
        save(tmp_path / "a", data=enumerate(iter(dataset)))
    item = eval(f"dict({said.between('such as ', ' of Grain')})", {"dataset": dataset})
    around = enumerate(item["data"])
    next(around)
    save(tmp_path / "a", **item)
    fresh = iter(batches())
    ckpt.restore(tmp_path / "a", data=fresh)
    assert next(enumerate(fresh))[1] == 1


def test_a_new_iterator_at_each_save(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    dataset = batches()
    with caplog.at_level(logging.WARNING), ckpt.Checkpointer(tmp_path / "a", options=FAST) as run:
        for step in range(3):
            run.save(step, model=STATE, data=iter(dataset))
    said = logged(
        "_run/unread.py: Pass the iterator from which training takes its batches: data = ", caplog
    )
    names: dict[str, Any] = {"dataset": dataset, "iter": iter}
    exec(said.between("its batches: ", " once"), names)
    with ckpt.Checkpointer(tmp_path / "b", options=FAST) as run:
        for step in range(3):
            next(names["data"])
            save_call = said.after("then ")
            eval(
                f"run.{save_call}".replace("...", "step, model=STATE"),
                {**names, "run": run, "step": step, "STATE": STATE},
            )
    fresh = iter(batches())
    with ckpt.Checkpointer(tmp_path / "b", options=FAST) as run:
        restored = run.restore_latest(model=STATE, data=fresh)
        assert restored is not None and restored["model"]
    assert next(fresh) == 3


def test_a_closed_iterator(tmp_path: Path):
    for close_first in (True, False):
        iterator = iter(batches().mp_prefetch(grain.MultiprocessingOptions(0)))
        next(iterator)
        if close_first:
            iterator.close()
            with told(
                "grain/ckpt_grain/_adapter.py: is closed: save before closing it, and restore into a"
            ):
                save(tmp_path / "a", data=iterator)
        else:
            save(tmp_path / "a", data=iterator)
            iterator.close()
    assert goes_on(tmp_path / "a", iter(batches()), 1)


@pytest.mark.parametrize("action", ["as it was", "accept"])
def test_another_pipeline(tmp_path: Path, action: str):
    iterator = iter(batches())
    next(iterator)
    save(tmp_path / "a", data=iterator)
    other = iter(batches().batch(2))
    with told(
        "grain/ckpt_grain/_pipeline.py: Build the pipeline as it was, or accept the change"
    ) as said:
        ckpt.restore(tmp_path / "a", data=other)
    if action == "as it was":
        assert goes_on(tmp_path / "a", iter(batches()), 1)
    else:
        call = said.after("restoring into ")
        accepting = eval(
            call.strip().rstrip("."), {"ckpt_grain": ckpt_grain, "iterator": iter(batches(3))}
        )
        assert goes_on(tmp_path / "a", accepting, 3)


def test_other_data(tmp_path: Path):
    """The description of a pipeline holds the code of functions, and not what they read."""
    table = {"scale": 1}

    def made() -> Any:
        return iter(grain.MapDataset.range(20).map(Scaled(table)).to_iter_dataset())

    iterator = ckpt_grain.with_proof(made())
    next(iterator)
    save(tmp_path / "a", data=iterator)
    table["scale"] = 5
    with told(
        "grain/ckpt_grain/_adapter.py: Restore into the iterator without with_proof to accept it"
    ):
        ckpt.restore(tmp_path / "a", data=ckpt_grain.with_proof(made()))
    assert goes_on(tmp_path / "a", made(), 5)
    table["scale"] = 1
    assert goes_on(tmp_path / "a", ckpt_grain.with_proof(made()), 1)


class Scaled(grain.transforms.Map):
    def __init__(self, table: dict[str, int]):
        self._table = table

    def __repr__(self) -> str:
        return "Scaled()"

    def map(self, element: Any) -> Any:
        return element * self._table["scale"]


class Source:
    def __init__(self, named: bool):
        self.named = named

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: Any) -> int:
        return int(index)

    def __repr__(self) -> str:
        return "Source()" if self.named else object.__repr__(self)


class Doubled:
    """An operation of one's own, which might keep something between elements."""

    def __call__(self, records: Any) -> Any:
        return records


def loader(source: Any, operations: Any = ()) -> Any:
    sampler = grain.samplers.IndexSampler(
        20, grain.sharding.NoSharding(), shuffle=False, num_epochs=1
    )
    return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=operations))


def test_a_source_without_a_name(tmp_path: Path):
    iterator = loader(Source(named=False))
    next(iterator)
    key = "grain/ckpt_grain/_pipeline.py: Give the class a __repr__ that is the same each time."
    with pytest.warns(
        UserWarning, match="Give the class a __repr__ that is the same each time"
    ) as caught:
        save(tmp_path / "a", data=iterator)
    assert key and len(caught) == 1
    iterator = loader(Source(named=True))
    next(iterator)
    save(tmp_path / "b", data=iterator)
    assert goes_on(tmp_path / "b", loader(Source(named=True)), 1)


# NNX


class Model(nnx.Module):
    def __init__(self, rngs: Any):
        self.layer = nnx.Linear(4, 4, rngs=rngs)


class Sharded(nnx.Module):
    def __init__(self):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("data", None))
        self.w = nnx.Param(init(jax.random.key(0), (4, 4)))


def test_part_of_an_abstract_model(tmp_path: Path):
    model = Model(nnx.Rngs(0))
    save(tmp_path / "a", model=model)
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="Set them before") as caught:
        ckpt.restore(tmp_path / "a", model=abstract, only="**/kernel")
    said = str(caught[0].message)
    key = "_load/matching.py: Set them before the object is used, or restore all of it"
    assert key.partition(".py: ")[2] in said
    abstract.layer.bias.set_value(jnp.zeros(4))
    assert np.array_equal(abstract.layer(jnp.ones(4)), model.layer(jnp.ones(4)))
    again = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    ckpt.restore(tmp_path / "a", model=again)
    assert np.array_equal(again.layer(jnp.ones(4)), model.layer(jnp.ones(4)))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_intermediates_of_an_abstract_model(tmp_path: Path):
    class Sown(Model):
        def __call__(self, x: Any) -> Any:
            self.sow(nnx.Intermediate, "seen", x)
            return self.layer(x)

    def made() -> Any:
        model = Sown(nnx.Rngs(0))
        model(jnp.ones(4))
        return model

    save(tmp_path / "a", model=made())
    model = nnx.eval_shape(made)
    with pytest.warns(UserWarning, match=r"nnx\.Intermediate of an") as caught:
        ckpt.restore(tmp_path / "a", model=model)
    said = str(caught[0].message)
    key = (
        "flax_nnx/ckpt_flax_nnx/_adapter.py: . Take them out with nnx.pop(model, nnx.Intermediate)"
    )
    assert key.partition(".py: ")[2] in said
    eval(said.partition("out with ")[2], {"nnx": nnx, "model": model})
    assert nnx.jit(lambda model: model.layer(jnp.ones(4)))(model).shape == (4,)


def test_annotations_without_a_mesh(tmp_path: Path, mesh: Any):
    with jax.set_mesh(mesh):
        save(tmp_path / "a", model=Sharded())
    with told(
        "flax_nnx/ckpt_flax_nnx/_abstract.py: which need a mesh: pass mesh=, or call inside"
    ) as said:
        ckpt_flax_nnx.abstract(Sharded)
    passed = ckpt_flax_nnx.abstract(Sharded, mesh=mesh)
    ckpt.restore(tmp_path / "a", model=passed)
    names: dict[str, Any] = {
        "jax": jax,
        "mesh": mesh,
        "made": ckpt_flax_nnx.abstract,
        "make": Sharded,
    }
    exec(f"{said.between('`', '`')} model = made(make)", names)
    ckpt.restore(tmp_path / "a", model=names["model"])
    for model in (passed, names["model"]):
        assert float(model.w[...].sum()) == 16 and len(model.w[...].sharding.device_set) == 8


@pytest.mark.parametrize("action", ["inside", "abstract"])
def test_a_mesh_that_is_no_longer_set(tmp_path: Path, mesh: Any, action: str):
    with jax.set_mesh(mesh):
        save(tmp_path / "a", model=Sharded())
        model = nnx.eval_shape(Sharded)
    with told(
        "flax_nnx/ckpt_flax_nnx/_adapter.py: inside `with jax.set_mesh(mesh):`, or make it with"
    ) as said:
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


def test_the_static_half_of_a_model(tmp_path: Path):
    model = Model(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    with told("_tree/flatten.py: Leave it out: of flax.nnx.split(model) save the state") as said:
        save(tmp_path / "a", {"graphdef": graphdef, "state": state})
    assert "or save the model itself" in said.text
    save(tmp_path / "a", state)
    save(tmp_path / "b", model)
    fresh = nnx.state(Model(nnx.Rngs(1)))
    back = nnx.merge(graphdef, ckpt.load(tmp_path / "a", fresh))
    again = Model(nnx.Rngs(1))
    ckpt.restore(tmp_path / "b", again)
    for one in (back, again):
        assert np.array_equal(one.layer.kernel[...], model.layer.kernel[...])


@pytest.mark.parametrize("call", ["abstract", "restore_or_init"])
def test_a_model_for_the_function_that_makes_it(tmp_path: Path, call: str):
    def pass_(make: Any) -> Any:
        if call == "abstract":
            return ckpt_flax_nnx.abstract(make)
        with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
            return ckpt_flax_nnx.restore_or_init(checkpointer, make)[0]

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with told("flax_nnx/ckpt_flax_nnx/_abstract.py: itself was passed: write lambda: ") as said:
        pass_(model)
    code = said.after("write ").replace("Linear(...)", "nnx.Linear(2, 3, rngs=nnx.Rngs(0))")
    assert pass_(eval(code, {"nnx": nnx})).kernel.shape == (2, 3)
    key = "flax_nnx/ckpt_flax_nnx/_abstract.py: in its place"
    for make in (lambda: nnx.Linear, lambda: {"a": model, "b": nnx.Linear}):
        with told(key, of=TypeError) as said:
            pass_(make)
        code = said.between("write ", " in its").replace("...", "2, 3, rngs=nnx.Rngs(0)")
        assert pass_(lambda code=code: eval(f"nnx.{code}", {"nnx": nnx})).kernel.shape == (2, 3)
    with pytest.raises(TypeError, match="and a int itself was passed"):
        pass_(3)


def test_an_iterator_that_never_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """``for batch in dataset`` makes an iterator of its own: the one that is saved stands."""
    dataset = grain.MapDataset.range(100).batch(4).to_iter_dataset()

    def train(name: str, batches: Any, data: Any) -> None:
        with ckpt.Checkpointer(tmp_path / name, options=FAST) as run:
            for step, _ in zip(range(5), batches, strict=False):
                run.save(step, data=data)

    data = iter(dataset)
    train("a", dataset, data)
    said = logged(
        "_run/unread.py: makes, and a restart reads these data again. Take them from the one that is saved: for batch in %s",
        caplog,
    )
    assert said.text.count("at one position") == 1
    caplog.clear()
    train("b", data, data)
    assert "position" not in caplog.text
    again = iter(dataset)
    with ckpt.Checkpointer(tmp_path / "b") as run:
        assert run.restore_latest(data=again) is not None
    assert next(again)[0] == next(data)[0]


def test_another_iterator_than_the_restored_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
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
        "_run/unread.py: : its data do not go on from there. Take the batches from the one that was restored, and save that",
        caplog,
    )
    assert said.text.count("another is saved now") == 1


def test_the_checkpointer_comes_first(tmp_path: Path):
    def make() -> Any:
        return nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    for first in (str(tmp_path / "run"), make):
        wrong: Any = first
        with pytest.raises(TypeError, match="the Checkpointer comes first"):
            ckpt_flax_nnx.restore_or_init(wrong, make)
    with ckpt.Checkpointer(tmp_path / "run") as run:
        assert ckpt_flax_nnx.restore_or_init(run, make)[1] is None
