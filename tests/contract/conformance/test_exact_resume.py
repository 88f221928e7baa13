"""``assert_exact_resume`` finds what it is for, names it, and cannot pass on nothing."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.testing import assert_exact_resume as check, assert_same
from tests.support.paths import ROOT

TOTAL = 8


def train(
    directory: Path,
    report: Any,
    *,
    total: int = TOTAL,
    every: int = 1,
    forget: str = "",
    save_first: bool = False,
) -> Any:
    """Trains two numbers by noisy batches; ``forget`` names a part of the state not to restore."""
    state = {"w": jnp.ones(3), "key": jax.random.key(0), "rng": np.random.default_rng(1)}
    with ckpt.Checkpointer(directory, save_interval_steps=every) as checkpointer:
        restored = checkpointer.restore_latest(state=state)
        if restored:
            state = {**restored["state"], **({forget: state[forget]} if forget else {})}
        for step in range(restored.step + 1 if restored else 0, total):
            state["key"], key = jax.random.split(state["key"])
            batch = state["rng"].normal(size=3)
            state["w"] = state["w"] * 0.9 + jax.random.normal(key, 3) * batch
            if not save_first:
                report(step, batch=batch, **state)
            checkpointer.save(step, state)
            if save_first:
                report(step, batch=batch, **state)
            if checkpointer.should_stop:
                break
    return state


@pytest.mark.parametrize("save_first", [False, True])
def test_exact_training_passes(save_first, tmp_path):
    found = check(functools.partial(train, save_first=save_first), directory=tmp_path)
    assert found.steps == tuple(range(TOTAL))
    assert found.interrupted_at == (4, 5)
    assert found.resumed_from == ((5, 6) if save_first else (4, 5))
    assert found.leaves > 40


@pytest.mark.parametrize("forget", ["w", "key", "rng"])
def test_forgotten_state_is_named_with_its_step(forget, tmp_path):
    with pytest.raises(AssertionError) as caught:
        check(functools.partial(train, forget=forget), interrupt_at=4, directory=tmp_path)
    first = {"w": "w", "key": "w", "rng": "batch"}[forget]
    assert "interrupted at step 4" in str(caught.value)
    assert f"at step 4, {first}: expected float" in str(caught.value)


def test_one_flipped_bit_is_found(tmp_path):
    lives = 0

    def almost(directory: Path, report: Any) -> None:
        nonlocal lives
        lives += 1
        value = np.zeros(5)
        value[4] = -0.0 if lives == 3 else 0.0
        with ckpt.Checkpointer(directory) as checkpointer:
            restored = checkpointer.restore_latest(state=0)
            for step in range(restored["state"] + 1 if restored else 0, 5):
                report(step, same=1, value=value)
                checkpointer.save(step, step)

    with pytest.raises(AssertionError, match=r"differs at step 2, value: expected float64\[5\]"):
        check(almost, interrupt_at=2, directory=tmp_path)


def test_what_is_returned_counts(tmp_path):
    lives = iter(range(9))

    def returns_something_else(directory: Path, report: Any) -> Any:
        train(directory, report)
        return {"lives": next(lives)}

    with pytest.raises(AssertionError, match=r"returned differs at lives: expected int 0, found"):
        check(returns_something_else, directory=tmp_path)


def test_training_that_is_not_deterministic_is_found(tmp_path):
    generator = np.random.default_rng(0)

    def unseeded(directory: Path, report: Any) -> None:
        for step in range(5):
            report(step, x=generator.normal())

    with pytest.raises(AssertionError, match="two runs from the start differ"):
        check(unseeded, directory=tmp_path)


def test_starting_from_scratch_does_not_pass(tmp_path):
    def starts_again(directory: Path, report: Any) -> None:
        train(directory / str(next(lives)), report)

    lives = iter(range(9))
    with pytest.raises(AssertionError, match="no resume was tested"):
        check(starts_again, directory=tmp_path)


def test_skipped_steps_do_not_pass(tmp_path):
    def skips(directory: Path, report: Any) -> None:
        with ckpt.Checkpointer(directory) as checkpointer:
            restored = checkpointer.restore_latest(state=0)
            for step in range(restored["state"] + 2 if restored else 0, 6):
                checkpointer.save(step, step)
                report(step, step=step)

    with pytest.raises(AssertionError, match="step 4 was skipped"):
        check(skips, interrupt_at=3, directory=tmp_path)


def test_swallowing_the_interruption_does_not_pass(tmp_path):
    def stubborn(directory: Path, report: Any) -> None:
        for step in range(4):
            try:
                report(step)
            except BaseException:
                pass

    with pytest.raises(AssertionError, match="must not be caught"):
        check(stubborn, directory=tmp_path)


def test_errors_of_the_training_keep_their_type(tmp_path):
    def broken(directory: Path, report: Any) -> None:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        check(broken, directory=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"interrupt_at": 99}, ValueError, "0 to 7"),
        ({"interrupt_at": (5, 3)}, ValueError, "increasing"),
        ({"interrupt_at": ()}, ValueError, "increasing"),
        ({"by": "luck"}, ValueError, "SIGKILL"),
    ],
)
def test_wrong_arguments(arguments, error, match, tmp_path):
    with pytest.raises(error, match=match):
        check(train, directory=tmp_path, **arguments)


@pytest.mark.always
def test_killed_processes(tmp_path):
    found = check(
        functools.partial(train, save_first=True), interrupt_at=5, by="SIGKILL", directory=tmp_path
    )
    # The save of step 5 was under way when the process was killed; that of step 4 was not.
    assert found.interrupted_at == (5,)
    assert found.resumed_from[0] in (5, 6)


def test_a_process_that_gets_sigterm(tmp_path):
    found = check(train, interrupt_at=5, by="SIGTERM", directory=tmp_path)
    assert found.interrupted_at == (5,)
    assert found.resumed_from == (6,)  # it saved the step at which the signal came


def fails(directory: Path, report: Any) -> None:
    raise ZeroDivisionError("over there")


def test_an_error_in_a_process_is_shown(tmp_path):
    with pytest.raises(RuntimeError, match="ZeroDivisionError: over there"):
        check(fails, by="SIGKILL", directory=tmp_path)


def hangs(directory: Path, report: Any) -> None:
    signal.pause()


def test_a_process_that_hangs_is_killed(tmp_path):
    with pytest.raises(TimeoutError, match="not done after 5 s"):
        check(hangs, by="SIGKILL", directory=tmp_path, timeout_secs=5)


def test_a_local_function_cannot_go_to_a_process(tmp_path):
    with pytest.raises(TypeError, match="top of a module"):
        check(lambda directory, report: None, by="SIGKILL", directory=tmp_path)


def test_the_fixture(tmp_path):
    test = tmp_path / "test_mine.py"
    test.write_text(
        "from tests.contract.conformance.test_exact_resume import train\n"
        "def test_resume(assert_exact_resume):\n"
        "    for step in (4, 5):\n"
        "        assert assert_exact_resume(train, interrupt_at=step).interrupted_at == (step,)\n"
        "def test_forgets(assert_exact_resume):\n"
        "    def forgetful(directory, report):\n"
        "        train(directory, report, forget='w')\n"
        "    assert_exact_resume(forgetful, interrupt_at=5)\n"
    )
    # Nothing asks for the plugin: the entry point of the installed package brings it. Without a folder of its
    # own it would delete at its end, for minutes, what earlier runs of pytest left in the common one.
    arguments = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", "-q", str(test)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "differs at step 5, w: expected float32[3]" in done.stdout


def test_the_plugin_loads_no_jax(run_python):
    code = "import json, sys, ckpt_core.testing.plugin; print(json.dumps('jax' in sys.modules))"
    assert run_python(code) is False


def test_same_values_are_the_same():
    value = {
        "nan": np.array([np.nan, -0.0]),
        "key": jax.random.key(1),
        "list": [1, (2.0, "x"), None, b"y", {3: True}],
        "rng": np.random.default_rng(3),
    }
    assert_same(value, {**value, "rng": np.random.default_rng(3)})
    assert_same({"a": 1, "b": 2}, {"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"a": np.float32(1)}, {"a": np.float64(1)}, "a: expected float64"),
        ({"a": np.ones(2)}, {"a": jnp.ones(2, jnp.float32)}, "a: expected float32"),
        (np.ones(2, np.float32), jnp.ones(2), "(numpy)"),
        (np.array([0.0]), np.array([-0.0]), "expected float64[1] (numpy) [-0.0], found"),
        ([1, 2], (1, 2), "expected tuple of 2, found list of 2"),
        ({"0": 1}, {0: 1}, "expected dict of 0, found dict of '0'"),
        ({"a": 1}, {"a": 1, "b": 2}, "b: expected int 2, found nothing"),
        ({"a": 1, "b": 2}, {"a": 1}, "b: expected nothing, found int 2"),
        (jax.random.key(0), jax.random.key(1), "expected key<threefry2x32>[] [0, 1]"),
        (jnp.asarray(1.0), jnp.float32(1.0), "(weak)"),
        ([], None, "expected None, found list"),
    ],
)
def test_different_values_are_named(actual, expected, message):
    with pytest.raises(AssertionError) as caught:
        assert_same(actual, expected)
    assert message in str(caught.value)


def test_a_training_that_reports_no_value_proves_nothing(tmp_path):
    with pytest.raises(AssertionError, match="no step reported a value"):
        check(lambda _, report: [report(step) for step in range(5)])
