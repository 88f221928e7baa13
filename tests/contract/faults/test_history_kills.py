"""A call that changes which steps a run has is killed at any operation: before or after, never else.

``rollback_to``, ``delete``, ``save(overwrite=True)``, and the first save after going back; with one tier and with
two, where the steps are in both, in one, or were never written to the persistent one. After each a reader and then
a writer start anew: all that they can ask gives one number one value, and the run goes on.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults import history_scenarios as scenarios
from tests.contract.faults.harness import Fault, Outcome
from tests.contract.faults.history_scenarios import Steps, first, opened, save

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:.*another save than step")]
THIRD = 7


def seen(checkpointer: ckpt.Checkpointer, *, loads: bool = True) -> Steps:
    """All that a Checkpointer tells of its steps, which must agree; without ``loads`` only the newest is loaded."""
    steps = checkpointer.all_steps()
    values = {step: checkpointer.inspect(step).metadata["value"] for step in steps}
    for step in steps if loads else ():
        assert checkpointer.load(step)["n"] == values[step], f"step {step}: inspect and load differ"
    assert checkpointer.latest_step() == max(steps, default=None)
    restored = checkpointer.restore_latest(state=scenarios.tree(0))
    newest = None if restored is None else (restored.step, restored["state"]["n"])
    assert newest == max(values.items(), default=None), "restore_latest and load differ"
    if restored is not None:
        assert (restored["state"]["w"] == restored["state"]["n"]).all()
    return values


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def check_restart(root: Path, layout: str, allowed: list[Steps], numbers: list[int]) -> Steps:
    """What readers and writers find after the call; the run then goes on, so many steps from the newest each time."""
    before = _files(root)
    with opened(str(root), layout, read_only=True) as reader:
        found = seen(reader)
    assert _files(root) == before, "a reader wrote"
    assert found in allowed, f"found {found}; allowed {allowed}"
    with opened(str(root), layout, "", read_only=True) as tool:  # knows of no local directory
        persistent = {step: int(tool.load(step)["n"]) for step in tool.all_steps()}
    assert persistent.items() <= found.items(), (persistent, found)  # one number, one value
    for nth, number in enumerate(numbers):
        with opened(str(root), layout) as writer:
            # all have loaded what stands there: readers, and the first writer
            loads = nth == 0
            assert seen(writer, loads=loads) == found, "a writer finds something else than a reader"
            newest = max(found)
            step = newest + number
            save(writer, step, step * 10 + THIRD)
            found |= {step: step * 10 + THIRD}
            assert seen(writer, loads=loads) == found
        with opened(str(root), layout, read_only=True) as reader:
            assert seen(reader) == found, "after the save of a restarted run"
    assert not any(b"removals" in file.read_bytes() for file in root.rglob(".ckpt-run"))
    assert not list(root.rglob(".ckpt-tmp*"))
    return found


NAMES = [
    (layout, name, restarted)
    for layout in scenarios.STEPS
    for name in scenarios.CASES
    for restarted in ((False, True) if layout != "persistent only" else (True,))
]


@pytest.mark.parametrize(("layout", "name", "restarted"), NAMES)
def test_killed(pool, tmp_path, layout, name, restarted):
    allowed = scenarios.CASES[name].found(scenarios.STEPS[layout])
    # also onto numbers that were left, in all tiers that save
    going_on = [1, 1] if layout in ("one tier", "local only") else [100, 1, 99]

    def run(fault: Fault) -> tuple[Path, Outcome]:
        root = tmp_path / f"{fault.action}-{fault.nth}"
        arguments = [str(root), layout, name, restarted]
        outcome = pool.run("history_scenarios:run", arguments, path=str(root), fault=fault)
        return root, outcome

    def check(root: Path, outcome: Outcome) -> None:
        acknowledged = bool(outcome.reported("acknowledged"))
        assert outcome.was_killed or acknowledged, str(outcome)
        try:
            check_restart(root, layout, allowed[-1:] if acknowledged else allowed, going_on)
        except (AssertionError, ckpt.CheckpointError) as error:
            struck = [str(op) for op in outcome.ops[-3:]]
            raise AssertionError(
                f"{root.name}: {type(error).__name__} {error}\n{struck}"
            ) from error
        shutil.rmtree(root)

    undisturbed = pool.map(run, [Fault()])
    root, outcome = next(undisturbed)
    assert outcome.reported("acknowledged"), str(outcome)
    count = len(outcome.ops)
    assert count > 3, "the shim sees too little"
    check(root, outcome)
    numbers = [*range(1, count + 2)]
    failures: list[str] = []
    kills = 0
    for root, outcome in pool.map(run, [Fault("kill", nth) for nth in numbers]):
        kills += outcome.was_killed
        try:
            check(root, outcome)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(numbers)}:\n" + "\n\n".join(failures[:6])
    assert kills >= 0.8 * len(numbers), f"only {kills} of {len(numbers)} operations were reached"


def test_what_a_restart_finds_can_fail(tmp_path):
    """Else the tests above would say nothing."""
    checkpointer = scenarios.prepared(
        str(tmp_path), "local only", scenarios.CASES["rollback"], restarted=False
    )
    checkpointer.close()
    wrong = [{100: first(100)}, {100: first(100), 101: first(101), 102: 5}]
    with pytest.raises(AssertionError, match="allowed"):
        check_restart(tmp_path, "local only", wrong, [])
    assert np.array_equal(ckpt.load(tmp_path / "run" / "100")["w"], np.full(300, first(100)))
