"""What several processes saved is restored by the same program, in new processes, in every way there is.

A test gives the code of a program that defines ``make(n)``: the live state after ``n`` steps, with the
same classes, shardings and devices each time. One set of processes saves ``make(7)``; another one, new,
begins with ``make(0)`` as the restarted program would, and restores into it.
"""

from pathlib import Path

from tests.support.launch import Ended, launch, reports

_BOTH = """
from dataclasses import replace
view = globals().get("view", lambda state: state)  # of a live object, the arrays in it as a pytree
is_tree = make(0) is not None and view(0) == 0
local_options = replace(options, persist_policy=ckpt.when.at_steps([0]), durable=False)
def local():
    return ckpt.Checkpointer(directory + "/tiers", local_directory=directory + "-local", options=local_options)
"""

SAVE = """
def path():
    ckpt.save(directory + "/one", make(3), options=options)
    ckpt.save(directory + "/one", make(7), options=options, overwrite=True)
def later():
    chosen = replace(options, snapshot="device", compression="zstd")
    ckpt.save_async(directory + "/later", make(7), options=chosen).result()
def steps():
    with ckpt.Checkpointer(directory + "/run", options=options) as run:
        run.save(1, state=make(3))
        run.save(2, state=make(7))
def tiers():
    with local() as run:
        run.save(0, state=make(3))
        run.wait_until_finished()
        run.save(1, state=make(7))
report(**{call.__name__: raised(call) for call in (path, later, steps, tiers)})
"""

RESTORE = """
from tests.support.same_state import abstract, differences
one, steps = directory + "/one", directory + "/run"
broadcast, at_once = replace(options, broadcast=True), replace(options, atomic_restore=True)

def latest(how=options):
    with ckpt.Checkpointer(steps, options=how) as run:
        return run.restore_latest(state=make(0))["state"]

def tiers():
    with local() as run:
        found = run.restore_latest(state=make(0))
        assert found.step == 1, found.step
        return found["state"]

def local_step():
    with local() as run:
        return run.load(1)["state"]

like = {
    "restore_latest": latest,
    "restore_latest at once": lambda: latest(at_once),
    "restore_latest with broadcast": lambda: latest(broadcast),
    "restore_latest of a local step": tiers,
    "load": lambda: ckpt.load(one, make(0), options=options),
    "load with broadcast": lambda: ckpt.load(one, make(0), options=broadcast),
    "load_async": lambda: ckpt.load_async(directory + "/later", make(0), options=options).result(),
    "restore": lambda: ckpt.restore(one, make(0), options=options)["state"],
}
if is_tree:
    like["load of abstract arrays"] = lambda: ckpt.load(one, abstract(make(0)), options=options)
    like["load of bare arrays"] = lambda: ckpt.load(one, abstract(make(0), bare=True), options=options)
    as_saved = {
        "load as saved": lambda: ckpt.load(one, options=options),
        "load_async as saved": lambda: ckpt.load_async(directory + "/later", options=options).result(),
        "load of a local step as saved": local_step,
    }
else:
    as_saved = {}

for way, call in (like | as_saved).items():
    try:
        told[way] = differences(view(make(7)), view(call()), types_too=way in like)
    except Exception as error:
        told[way] = [f"{type(error).__name__}: {error}"]
"""


def saved(program: str, directory: Path, *, processes: int = 2, devices: int = 2) -> list[Ended]:
    """The processes that saved ``make(7)``: at a path, twice, in a directory of steps and in one with local steps."""
    directory.mkdir(parents=True, exist_ok=True)
    return launch(program + _BOTH + SAVE, directory, processes=processes, devices=devices)


def comes_back(program: str, directory: Path, *, processes: int = 2, devices: int = 2) -> None:
    """Saves, and restores with the same program in new processes: every way gives what was saved. The program defines ``make(n)``,
    and for live objects ``view(object)``, a pytree of their arrays.
    """
    for told in reports(saved(program, directory, processes=processes, devices=devices)):
        assert told == dict.fromkeys(told), told
    found = launch(program + _BOTH + RESTORE, directory, processes=processes, devices=devices)
    for index, told in enumerate(reports(found)):
        differing = {way: lines for way, lines in told.items() if lines}
        assert not differing, f"process {index}: {differing}"
