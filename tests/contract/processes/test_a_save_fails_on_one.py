"""A save fails on one process, whose disk is full or whose object raises: all raise at once, and the next save works."""

import os

import pytest

import ckpt_core as ckpt
from tests.contract.faults.conftest import make_shim  # noqa: F401 (fixture)
from tests.support.launch import launch, reports

CODE = """
import ctypes
shim = ctypes.CDLL(None)
FULL = {  # part of the paths for which process 0 gets no more room, and of which operations
    "index": (b"/state/manifest.ocdbt", b""),
    "record": (b"/ckpt.json", b""),
    "sync of the arrays": (b"/d/", b"fsync"),
    "sync of the record": (b"/ckpt.json", b"fsync"),
}

class Data:
    def __init__(self, error=None): self.error = error
    def get_state(self):
        if self.error is not None:
            raise self.error
        return {"at": 1}
    def set_state(self, state): pass

def save(step, error=None):
    state = put(np.arange(8 << 12, dtype=np.float32).reshape(8, -1) + step)
    run.save(step, state=state, data=Data(error))
    run.wait_until_finished()

def fails(case, own, error=None):  # and the next save works
    step = run.latest_step() + 1
    told[f"{case} {own}"] = [own, raised(lambda: save(step, error)), run.latest_step() == step - 1]
    meet(f"{case} {step} {background}")
    shim.fault_disarm()
    save(step)

told = {}
for background in (False, True):
    where = f"{directory}/{background}"
    with ckpt.Checkpointer(where, options=ckpt.Options(timeout_secs=600), asynchronous=background) as run:
        save(0)
        for case, (path, operations) in FULL.items():
            if index == 0:
                shim.fault_configure(path, operations, b"enospc", 1, None)
                shim.fault_arm()
            fails(f"{case} {background}", index == 0)
        for who in range(count):
            fails(f"object {who} {background}", index == who, ValueError("not now") if index == who else None)
report(**told)
"""


@pytest.mark.linux("the preload shim")
def test_all_raise_at_once(tmp_path, monkeypatch, shim):
    """Where it happened its own error; elsewhere one that says where, which no handler takes for its own."""
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    for told in reports(launch(CODE, tmp_path / "run", devices=1)):
        assert len(told) == 12
        for case, (own, error, unseen) in told.items():
            assert error is not None and error["secs"] < 30 and unseen, (case, error, unseen)
            kind, text = (
                ("ValueError", "not now") if "object" in case else ("OSError", "[Errno 28]")
            )
            assert error["type"] == (kind if own else "CheckpointError"), (case, error)
            assert text in error["text"] and (own or f"{kind}: " in error["text"]), (case, error)
    for where in (tmp_path / "run" / "False", tmp_path / "run" / "True"):
        assert sorted(name for name in os.listdir(where) if name != ".ckpt-run") == [*"0123456"]
        assert all(ckpt.verify(where / str(step)).ok for step in range(7))
