"""What hangs without dying: a persistent directory, a port behind a firewall; and who dies while loads are exchanged.

Each wait has a bound, each message says who was waited for, and the next start finds what was saved.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports
from tests.unit.processes.test_lost_hosts import COMMON
from tests.unit.processes.test_lost_process import AGAIN

# What Python asks of the persistent directory waits in one process, until the other has raised.
HANGS = """
import threading
VICTIM = {victim}
opened = threading.Event()
opened.set()

def hook(event, arguments):
    if not opened.is_set() and (event == "open" or event.startswith("os.")):
        if any(str(one).startswith(f"{{directory}}/steps") for one in arguments[:2] if one is not None):
            opened.wait(60)

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
    threading.Timer(15, opened.set).start()
report(error=raised(save), steps=checkpointer.all_steps())
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("victim", "asynchronous"),
    [
        pytest.param(0, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_the_directory_hangs_for_one_of_two(
    tmp_path: Path, victim: int, asynchronous: bool
) -> None:
    code = HANGS.format(victim=victim, asynchronous=asynchronous)
    told = reports(launch(code, tmp_path / "run", devices=1))
    waited, stuck = told[1 - victim]["error"], told[victim]["error"]
    assert waited["type"] == "BarrierTimeout" and waited["absent"] == [victim], told
    assert f"processes [{victim}]" in waited["text"] and waited["secs"] < 4 + 20
    # the one that was stuck comes back, finds nobody, and says that
    assert stuck["type"] == "BarrierTimeout" and stuck["secs"] < 15 + 20, told
    assert [one["steps"] for one in told] == [[0], [0]]
    assert ckpt.verify(tmp_path / "run/steps/0").ok
    again = reports(launch(AGAIN, tmp_path / "run", devices=2))
    assert again == [{"step": 0, "same": True, "steps": [0, 1]}] * 2


# A listener that accepts nothing: a connection is made, and no byte comes; or, behind a firewall, not even that.
BLOCKED = (
    COMMON
    + """
import socket
by = P()
with start(by) as checkpointer:
    for step in (0, 1):
        checkpointer.save(step, state(step, by))
        checkpointer.wait_until_finished()
everyone(lambda: None)
if index == 1:
    lose()
meet("lost")
silent = socket.socket()
silent.bind(("127.0.0.1", 0))
silent.listen(8)
from ckpt_core._run.tiers import peers
plain = peers.Peers.find
def find(self, process):
    found = plain(self, process)
    if WAY == "silent":
        return found._replace(port=silent.getsockname()[1])
    return found._replace(address="192.0.2.1")  # of documentations: nobody has it

peers.Peers.find = find
began = time.monotonic()
told["newest"] = raised(lambda: restored(by))
told["secs"] = time.monotonic() - began
with start(by) as checkpointer:
    found = checkpointer.restore(0, state=state(99, by))
    told["by number"] = [found["state"]["n"], Path(found.path).parent == persistent]
report(**told)
"""
)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("way", ["silent", "no route"])
def test_parts_behind_a_blocked_port_are_not_taken_for_lost(tmp_path: Path, way: str) -> None:
    """Step 1, which is in fast directories alone, is not passed over; step 0 is read where all can reach it."""
    ended = launch(f"WAY = {way!r}\n{BLOCKED}", tmp_path / "run", devices=1, limit_secs=200)
    for index, told in enumerate(reports(ended)):
        assert told["newest"] is not None, told
        assert told["newest"]["type"] == ("OSError" if index else "CheckpointError"), told
        assert "step 1 cannot be read" in told["newest"]["text"], told
        assert "from process 0" in told["newest"]["text"], told
        assert told["secs"] < 120
        assert told["by number"] == [0, True], told


KILLED = """
from ckpt_core._devices import collectives
leaving = [0]
mesh = Mesh(np.array(jax.devices()), ("data",))
shape = (1 << 12, 1 << 9)
values = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
whole = jax.make_array_from_callback(shape, NamedSharding(mesh, P()), lambda where: values[where])
sharing = ckpt.Options(timeout_secs=6, broadcast=True)
ckpt.save(f"{directory}/one", {"w": whole}, options=sharing)
meet("saved")
plain = collectives.join
def join(*arguments):
    if index == 1:
        kill()
    return plain(*arguments)
from ckpt_core._read import broadcast
collectives.join = join
like = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P()))}
report(error=raised(lambda: ckpt.load(f"{directory}/one", like, options=sharing)))
"""


@pytest.mark.faults
@pytest.mark.slow  # gloo notices it after half a minute
def test_one_dies_while_a_load_is_exchanged(tmp_path: Path) -> None:
    first, second = launch(KILLED, tmp_path / "run", devices=1, limit_secs=150)
    assert second.status == -signal.SIGKILL
    if first.told is None:
        assert first.status != 0, "the runtime ended it, as it does where a process of the job died"
        return
    error = first.told["error"]
    assert error["type"] in ("CheckpointError", "BarrierTimeout"), error
    assert "[0, 1]" in error["text"] or "[1]" in error["text"], error
    assert error["secs"] < 60
    assert ckpt.verify(tmp_path / "run/one").ok


# Each process has a file of its own; that of the last one holds something else, is not there, or can be read by others.
SECRETS = (
    COMMON
    + """
import os
from ckpt_core._exchange import Connection
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
    settle(c)
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
    # whoever knows all but the secret gets nothing
    peers, other = c._run._local._peers, (index + 1) % count
    def fetch(secret):
        connection = Connection(peers.find(other), secret, 1 << 16, 5)
        return sum(map(len, connection.pieces(0, c._run._local.complete[0], other, 0)))
    told["fetched"] = fetch(peers.secret)
    told["stranger"] = raised(lambda: fetch("0" * 64))
    meet("tried")
report(**told)
"""
)


def test_a_secret_that_one_process_has_not_is_said_on_all(tmp_path: Path) -> None:
    """Nobody waits for ever, all hear which process it is, and with the right one the parts of the lost host are fetched."""
    for told in reports(launch(SECRETS, tmp_path / "run", processes=4, devices=1, limit_secs=200)):
        for name, error in told["refused"].items():
            assert error is not None, name
            assert "process 3" in error["text"] and "secret" in error["text"], (name, error)
            assert error["secs"] < 15, (name, error)
        assert told["found"] == [0, False]
        assert told["fetched"] > 0
        assert told["stranger"] is not None, "fetched without the secret"
