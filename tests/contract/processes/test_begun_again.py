"""jax.distributed ended and begun again in the same processes, and a jax without the private names that ckpt uses."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports
from tests.support.ports import free_port

CODE = """
import jax.extend.backend

def state(value):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return {"w": jax.make_array_from_callback(
        (8,), NamedSharding(mesh, P("x")), lambda at: np.full(8, value, np.float32)[at])}

def value_of(tree):
    return sorted({int(part.data[0]) for part in tree["w"].addressable_shards})

told, found = [], []
for life, port_of_life in enumerate([None, *ports]):
    if port_of_life is not None:
        jax.distributed.shutdown()
        for alone in range(2 * index + life):  # with another number of calls in each process
            ckpt.save(f"{directory}/alone-{life}-{index}-{alone}", {"n": alone})
            ckpt.load(f"{directory}/alone-{life}-{index}-{alone}")
        jax.extend.backend.clear_backends()
        # the first process of one life need not be that of the next
        me = (index + life) % count
        jax.distributed.initialize(f"127.0.0.1:{port_of_life}", num_processes=count, process_id=me)
        assert jax.process_index() == me
    path = f"{directory}/{life}"
    told.append(raised(lambda: ckpt.save(path, state(life), options=options)))
    found.append(raised(lambda: ckpt.load_async(path, options=options).result()))
    found.append(value_of(ckpt.load(path, options=options)))
    told.append(raised(lambda: ckpt.save(path, state(10 + life), overwrite=True, options=options)))
    found.append(value_of(ckpt.load(path, options=options)))
report(told=told, found=found)
"""


def test_processes_agree_in_every_life(tmp_path):
    """They counted rounds on from the life before, each by its own calls, and waited for each other for ever."""
    (tmp_path / "saved").mkdir()
    code = f"ports = {[free_port() for _ in range(3)]}\n{CODE}"
    for told in reports(launch(code, tmp_path / "saved")):
        assert told["told"] == [None] * 8
        lives = [[None, [life], [10 + life]] for life in range(4)]
        assert told["found"] == [value for life in lives for value in life]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    import jax._src

    monkeypatch.delattr(jax._src, "distributed", raising=False)


@pytest.mark.usefixtures("moved")
def test_one_process_needs_no_coordination(tmp_path):
    with ckpt.Checkpointer(tmp_path) as run:
        run.save(1, {"w": jnp.arange(3)})
        assert not run.reached_preemption(1)
        found = run.restore_latest({"w": jnp.zeros(3, int)})
    assert found is not None and np.array_equal(found["state"]["w"], [0, 1, 2])


@pytest.mark.usefixtures("moved")
def test_several_processes_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    with pytest.raises(ckpt.CheckpointError, match="no coordination service where ckpt looks"):
        ckpt.save(tmp_path / "a", {"w": jnp.arange(3)})
    assert not (tmp_path / "a").exists()
