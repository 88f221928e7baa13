"""jax.distributed ended and begun again in the same processes: what each did alone in between is its own."""

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
