"""Signals that tell a run of several processes to stop: all stop at one step."""

import pytest

from tests.support.launch import launch, reports

CODE = """
import logging
import jax.experimental.multihost_utils
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger("ckpt_core").addHandler(handler)
import dataclasses
options = dataclasses.replace(options, stop_signals=("SIGTERM", "SIGUSR1"))
def state(step):
    return {"w": put(np.full(8, step, np.float32))}
stopped = None
policy = ckpt.when.preempted() if how == "policy" else ckpt.when.at_steps([])
with ckpt.Checkpointer(f"{directory}/steps", save_policy=policy, options=options) as run:
    assert not run.should_stop
    for step in range(600):
        if step % 20 == 0:
            jax.experimental.multihost_utils.sync_global_devices(f"step {step}")
        if index in who and step in times:
            os.kill(os.getpid(), getattr(signal, number))
        time.sleep(0.01)
        run.save(step, state(step))
        if run.reached_preemption(step) if how == "ask" else run.should_stop:
            stopped = step
            run.save(step, state(step), force=True)
            break
steps = run.all_steps()
default = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
report(stopped=stopped, steps=steps, heard=heard, default=default)
"""


@pytest.mark.parametrize(
    ("number", "who", "times", "how"),
    [
        ("SIGTERM", [1], [10], "ask"),
        ("SIGTERM", [1], [10], "policy"),
        ("SIGUSR1", [1], [10], "policy"),
        ("SIGUSR1", [0], [10, 12], "poll"),
        ("SIGUSR1", [0, 1], [10, 11], "poll"),
    ],
)
def test_all_stop_at_one_step(tmp_path, number, who, times, how):
    code = f"number, who, times, how = {number!r}, {who}, {times}, {how!r}\n{CODE}"
    told = reports(launch(code, tmp_path / "run"))
    assert told[0]["stopped"] is not None
    assert told[0]["stopped"] == told[1]["stopped"]
    assert told[0]["steps"] == told[1]["steps"] == [told[0]["stopped"]]
    assert told[0]["default"] and told[1]["default"]  # given back at the end


def test_without_the_service_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "0")
    code = (
        f"number, who, times, how = '', [], [], 'policy'\n{CODE.replace('range(600)', 'range(3)')}"
    )
    for told in reports(launch(code, tmp_path / "run")):
        assert told["default"]
        assert any("SIGTERM, SIGUSR1 will not be noticed" in text for text in told["heard"])
