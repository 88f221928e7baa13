"""``Options(on_pending="fail")``: a save is refused on all processes or on none, though each ends its part of one at another time."""

from tests.support.launch import launch, reports

COMMON = """
import threading
def state(step):
    return put(np.arange(8, dtype=np.float32) + step)

told = {}
"""
SAVES = (
    COMMON
    + """
held, meant = threading.Event(), ckpt.Options(timeout_secs=20, on_pending="fail")

from tests.support import seams

def last(self, *_, **__):
    # of step 1, which ends in process 1 and not yet in process 0
    return index == 0 and os.path.isdir(f"{directory}/1") and seams.agreed(self) == "committed"

seams.at(None, "agreement", after=lambda *_, **__: held.wait(60), where=last)
with ckpt.Checkpointer(directory, max_to_keep=1, options=meant) as run:
    run.save(0, state(0))
    run.wait_until_finished()
    run.save(1, state(1))
    if index == 1:
        run.wait_until_finished()
    meet("one has ended")
    told["refused"] = raised(lambda: run.save(2, state(2)))
    held.set()
    run.wait_until_finished()
    told["next"] = run.save(3, state(3))
report(**told)
"""
)
RESTORES = (
    COMMON
    + """
with ckpt.Checkpointer(directory) as run:
    found = run.restore_latest(state=state(0))
    told["back"] = [run.all_steps(), found.step, same(found["state"], state(found.step))]
report(**told)
"""
)


def test_a_save_is_refused_on_all_processes_or_on_none(tmp_path):
    for told in reports(launch(SAVES, tmp_path / "run")):
        error = told["refused"]
        assert error["type"] == "CheckpointError", error
        assert "save of step 1 in process 0 is still running" in error["text"], error
        assert told["next"] is True, told
    for told in reports(launch(RESTORES, tmp_path / "run")):
        assert told["back"] == [[3], 3, True]
