"""What processes tell each other in each call, and what two leave on disk."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.launch import launch, reports
from tests.support.recorded import many_processes, steady
from tests.support.recorded.disk import describe

CALLS = """
import glob
from jax._src import distributed

class Client:
    # notes what is put at jax's service
    def __init__(self, client):
        self.client, self.put = client, []
    def __getattr__(self, name):
        function = getattr(self.client, name)
        def noted(*arguments, **more):
            if name in ("key_value_set", "key_value_set_bytes", "wait_at_barrier"):
                self.put.append([name, *map(str, arguments[:2])])
            return function(*arguments, **more)
        return noted

client = distributed.global_state.client = Client(distributed.global_state.client)
by = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
everywhere = NamedSharding(by.mesh, P())
def state(step):
    rows = np.arange(64.0, dtype="f4").reshape(16, 4) + step
    arrays = {"w": (rows, by), "r": (rows, everywhere), "large": (np.zeros((16, 1 << 14), "f4"), by)}
    arrays = {name: jax.make_array_from_callback(a.shape, s, lambda at: a[at]) for name, (a, s) in arrays.items()}
    return arrays | {"n": step, "host": np.arange(3)}
policy = ckpt.when.every_steps(2)
tiers = ckpt.Options(timeout_secs=40, persist_policy=policy, partners="host")
def save(run, step):
    run.save(step, state(step))
    run.wait_until_finished()
    copy, until = f"{directory}/local.{index}/run-*/*/partner-of_*/{step}/ckpt.json", time.monotonic() + 20
    while kind is two and time.monotonic() < until and not glob.glob(copy):
        time.sleep(0.05)  # what is copied in the background decides what the next save tells
def run(**more):
    return ckpt.Checkpointer(directory + "/run", options=options, max_to_keep=2, **more)
def two(**more):
    return ckpt.Checkpointer(directory + "/two", local_directory=f"{directory}/local.{index}", options=tiers)
def call(name, function):
    client.put.clear()
    found = function()
    meet(name)
    told[name] = list(client.put)
    meet(name + " told")
    return found

call("save", lambda: ckpt.save(directory + "/one", state(0), options=options))
call("save_async", lambda: ckpt.save_async(directory + "/later", state(0), options=options).result())
call("load", lambda: ckpt.load(directory + "/one", state(0), options=options))
for kind in (run, two):
    def name(text):
        return f"{kind.__name__}, {text}"
    opened = call(name("open"), kind)
    call(name("first save"), lambda: save(opened, 1))
    call(name("second save"), lambda: save(opened, 2))
    call(name("third save"), lambda: save(opened, 3))
    call(name("all_steps"), opened.all_steps)
    call(name("close"), opened.close)
    opened = call(name("open again"), kind)
    call(name("restore_latest"), lambda: opened.restore_latest(state=state(0)))
    call(name("delete"), lambda: opened.delete(2))
    call(name("close again"), opened.close)
"""


DRAWN = re.compile(
    r'(?<=\n)\??[A-Za-z0-9+/]{12}(?=\[|null|$)|(?<=[\n" ])[A-Za-z0-9+/]{10}(?=[" ])|(?<=save\n)\d{3}(?= )|\d{4,}'
)
"""Digests, of machines too, and numbers: ports, sizes of files whose content is drawn, and their sums."""


def messages() -> Iterator[str]:
    """What each of 2 and 8 processes puts at the service, and what 4,096 would; what two leave on disk."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "checkpoints")
        for count in (2, 8):
            (root / f"{count}").mkdir(parents=True)
            more = {"processes": count, "devices": 8 // count, "limit_secs": 240}
            told = reports(launch(CALLS, root / f"{count}", **more))
            for name in told[0]:
                puts = [
                    [[DRAWN.sub("DRAWN", steady(text)) for text in put] for put in one[name]]
                    for one in told
                ]
                sizes = [sum(len("".join(put[1:])) for put in one) for one in puts]
                yield f"# {count} processes, {name}: messages {[len(one) for one in puts]}, bytes {sizes}"
                for index, one in enumerate(puts if count == 2 else []):
                    yield from (f"  {index}: {' '.join(put)!r}" for put in one)
        for folder in ("one", "run", "two", "local.0", "local.1"):
            yield from (f"# 2 processes, on disk: {folder}", *describe(root / "2" / folder))
    calls = {"opening": (False, True), "saving": (0, 250), "persistent": (None,)}
    for call, more in ((call, more) for call, given in calls.items() for more in given):
        found = getattr(many_processes, call)(4096, *(() if more is None else (more,)))
        for one in found if isinstance(found, tuple) else (found,):
            counts = {name: number for name, number in vars(one).items() if isinstance(number, int)}
            yield f"# 4096 processes, {call}, {more}: {counts}"
