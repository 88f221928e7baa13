"""What hangs without dying, and secrets that not all have.

Each wait has a bound, each message says who was waited for, and the next start finds what was saved.
"""

import pytest

import ckpt_core as ckpt
from tests.contract.processes.test_lost_hosts import COMMON
from tests.contract.processes.test_lost_process import AGAIN
from tests.support.launch import launch, reports

# What Python asks of the persistent directory waits in one process, until the other has raised.
HANGS = """
import threading
VICTIM = {victim}
opened = threading.Event()
opened.set()

def hook(event, arguments):
    if not opened.is_set() and (event == "open" or event.startswith("os.")):
        if any(str(one).startswith(f"{{directory}}/steps") for one in arguments[:2] if one is not None):
            opened.wait(60)  # until the other has raised

sys.addaudithook(hook)
mesh = Mesh(np.array(jax.devices()), ("data",))

def state(step):
    values = np.arange(12 << 13, dtype=np.float32).reshape(12, -1) + step
    return {{"w": jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("data")), lambda w: values[w])}}

checkpointer = ckpt.Checkpointer(f"{{directory}}/steps", options=options, asynchronous={asynchronous})
checkpointer.save(0, state(0))
checkpointer.wait_until_finished()
shorten(4)
meet("saved")

def save():
    checkpointer.save(1, state(1))
    checkpointer.wait_until_finished()

if index == VICTIM:
    opened.clear()
    def waits():
        while not os.path.exists(f"{{directory}}.raised"):
            time.sleep(0.02)
        opened.set()
    threading.Thread(target=waits, daemon=True).start()
error = raised(save)
if index != VICTIM:
    open(f"{{directory}}.raised", "w").close()
report(error=error, steps=checkpointer.all_steps())
"""


@pytest.mark.faults
@pytest.mark.parametrize(("victim", "asynchronous"), [(0, False), (1, True)])
def test_the_directory_hangs_for_one_of_two(tmp_path, victim, asynchronous):
    code = HANGS.format(victim=victim, asynchronous=asynchronous)
    told = reports(launch(code, tmp_path / "run", devices=1))
    waited, stuck = told[1 - victim]["error"], told[victim]["error"]
    assert waited["type"] == "BarrierTimeout" and waited["absent"] == [victim], told
    assert f"processes [{victim}]" in waited["text"]
    # the one that was stuck comes back, finds nobody, and says that
    assert stuck["type"] == "BarrierTimeout", told
    assert [one["steps"] for one in told] == [[0], [0]]
    assert ckpt.verify(tmp_path / "run/steps/0").ok
    again = reports(launch(AGAIN, tmp_path / "run", devices=2))
    assert again == [{"step": 0, "same": True, "steps": [0, 1]}] * 2


# Each process has a file of its own; that of the last one holds something else, is not there, or can be read by others.
SECRETS = (
    COMMON
    + """
file = Path(f"{directory}/secret.{index}")

def write(data, mode=0o600):
    file.unlink(missing_ok=True)
    file.touch(mode=mode)
    file.chmod(mode)
    file.write_bytes(data)

def open_(**more):
    options = ckpt.Options(timeout_secs=10, partners="host", persist_policy=never, **more)
    return ckpt.Checkpointer(persistent, local_directory=own, options=options)

Path(directory).mkdir(exist_ok=True)
write(b"s" * 32)
last = index == count - 1
with open_(peer_secret_file=file) as c:
    c.save(0, state(0, P("data")))
    c.wait_until_finished()
meet("saved")
told["refused"] = {}
for name, data, mode in (("other", b"x" * 32, 0o600), ("missing", None, 0), ("open", b"s" * 32, 0o644), ("short", b"s", 0o600)):
    if last:
        file.unlink(missing_ok=True) if data is None else write(data, mode)
    meet(name)
    told["refused"][name] = raised(lambda: open_(peer_secret_file=file))
    meet(f"{name} again")
if last:
    write(b"s" * 32)
    lose()
meet("right again")
with open_(peer_secret_file=file) as c:
    found = resume(c)
    told["found"] = [found.step, Path(found.path).parent == persistent]
report(**told)
"""
)


def test_a_secret_that_one_process_has_not_is_said_on_all(tmp_path):
    """Nobody waits for ever, all hear which process it is, and with the right one the parts of the lost host are fetched."""
    for told in reports(launch(SECRETS, tmp_path / "run", processes=2, devices=1, limit_secs=200)):
        for name, error in told["refused"].items():
            assert error is not None, name
            assert "process 1" in error["text"] and "secret" in error["text"], (name, error)
        assert told["found"] == [0, False]
