"""The end of the interpreter, and a fork, while a save is or was under way."""

from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import forked
from tests.support.children import environment

PRELUDE = """
import os, sys, time
import numpy as np
import ckpt_core as ckpt
from tests.support import seams
failing = seams.fail(OSError, 28, "the disk is full")
path = sys.argv[1]
def begin(how):
    if "Checkpointer" in how:
        return ckpt.Checkpointer(path).save(0, {"w": np.arange(5000)})
    return ckpt.save_async(path + "/0", {"w": np.arange(5000)})
"""


def run(code: str, path: Path) -> forked.Done:
    return forked.run(PRELUDE + code, str(path), environment=environment(), timeout_secs=120)


@pytest.mark.parametrize(
    "how", ["goes well", "Checkpointer", "exception", "fails", "Checkpointer fails"]
)
def test_exit_waits_for_a_save_and_tells_of_its_failure(tmp_path, how):
    path = tmp_path / "c"
    ended = run(
        f"""
seams.at(None, "commit", before=failing if "fails" in {how!r} else lambda *_: time.sleep(0.3))
pending = begin({how!r})
assert "fails" in {how!r} or not os.path.exists(path + "/0")
if {how!r} == "exception":
    raise SystemExit(3)
print("done")
""",
        path,
    )
    if "fails" in how:
        assert ended.returncode == 1 and ended.stdout == "done\n"
        assert "was not saved" in ended.stderr and str(path) in ended.stderr
        assert "Traceback" in ended.stderr and "the disk is full" in ended.stderr
        assert not (path / "0").exists()
    else:
        assert (ended.returncode, ended.stderr) == (3 if how == "exception" else 0, "")
        assert ckpt.verify(path / "0").ok
        np.testing.assert_array_equal(ckpt.load(path / "0")["w"], np.arange(5000))


def test_what_was_asked_about_or_is_left_open_is_not_reported(tmp_path):
    ended = run(
        """
left_open = ckpt.Checkpointer(path + "/run", asynchronous=False)
left_open.save(0, {"n": 1})
seams.at(None, "commit", before=failing)
pending = begin("save_async")
try:
    pending.result()
except OSError:
    print("caught")
""",
        tmp_path / "c",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "caught\n", "")


def test_a_forked_child_is_told(tmp_path):
    ended = run(
        """
import signal, warnings
warnings.simplefilter("ignore")  # jax warns of every fork
ckpt.save(path, {"n": 1})
def save(): ckpt.save(path + "-2", {"n": 1})
def save_async(): ckpt.save_async(path + "-2", {"n": 1}).result()
def load(): ckpt.load(path)
def load_async(): ckpt.load_async(path).result()
def restore(): ckpt.restore(path, state={"n": 0})
def inspect(): ckpt.inspect(path)
def verify(): ckpt.verify(path)
def checkpointer(): ckpt.Checkpointer(path + "-3").save(0, {"n": 1})
for call in (save, save_async, load, load_async, restore, inspect, verify, checkpointer):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            call()
        except ckpt.ForkedProcess as error:
            os._exit(7 if "spawn" in str(error) else 8)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7, (call.__name__, code)
assert ckpt.load(path) == {"n": 1}  # the parent goes on
""",
        tmp_path / "c",
    )
    assert ended.returncode == 0, ended.stderr
