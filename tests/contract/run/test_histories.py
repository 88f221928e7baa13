"""One history: calls in any order, by writers, readers and tools, beside a plain model of what a run must hold.

Random ones, and those that users met, as rows: `play` says how they read.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.histories import Run
from tests.support.stores import url_of_kind


def play(run: Run, story: str) -> None:
    """Makes the calls of a story, which ``;`` separates, each with the outcome that ``=>`` names.

    ``save 1-3 7 force => False`` saves four steps. Each ``save`` has a letter, from ``a``; ``is 1a 2b`` says which
    steps there are, and which save each is of; ``persistent 1a`` the same of the persistent directory.
    """
    saves = 0
    letters: dict[int, str] = {}
    for call in story.split(";"):
        asked, _, wanted = (part.strip() for part in call.partition("=>"))
        name, *words = asked.split()
        named = {key: int(text) for key, _, text in (word.partition("=") for word in words) if text}
        flags = {word: True for word in words if word in ("overwrite", "force")}
        if name in ("is", "persistent"):
            assert words == sorted(words, key=lambda word: int(word[:-1]))
            steps = run.model.steps if name == "is" else run.model.disk
            assert [f"{step}{letters[value]}" for step, value in sorted(steps.items())] == words
            continue
        found: list[Any] = []
        if name == "save":
            for step in _numbers(words):
                found.append(run.save(step, **flags, **named))
                letters[run.value] = chr(ord("a") + saves)
            saves += 1
            wanted = wanted or "True"
        elif name in ("restart", "take_over", "lose_the_host"):
            getattr(run, name)(**named, asynchronous=False)
        elif name in ("read", "copy"):
            getattr(run, name)(*_numbers(words))
        else:
            given = list(_numbers(words)) or [None]
            found += [getattr(run, name)(*[n for n in [one] if n is not None]) for one in given]
        assert not wanted or {*map(str, found)} == {wanted}, call
        run.check()


def _numbers(words: list[str]) -> Iterator[int]:
    """``3``, ``1-4``, ``100-300/100``."""
    for word in words:
        if word[0].isdigit():
            span, _, by = word.partition("/")
            first, _, last = span.partition("-")
            yield from range(int(first), int(last or first) + 1, int(by or 1))


# An older step may be overwritten, and the run restored at once.
pytestmark = pytest.mark.filterwarnings("ignore:.*another save than step:RuntimeWarning")

# ---- stories -------------------------------------------------------------------------------------

ANYWHERE = {
    "a loss spike under retention": (
        "restart keep=2 period=10; save 1-25; restore 20; save 21-24; is 10a 20a 23b 24b"
    ),
    "rolled back beyond what retention left": (
        "restart keep=2 period=1000; save 100-3900/100; rollback 3000 => [3800, 3900];"
        "save 3100-3900/100; is 1000a 2000a 3000a 3800b 3900b"
    ),
    "rolled back and on with the same numbers": (
        "save 100-130/10; rollback 100 => [110, 120, 130]; rollback 100 => [];"
        "save 110-130/10; is 100a 110b 120b 130b"
    ),
    "an older step is overwritten: those in between stay": (
        "save 5-7; restart; restore 5; restore 7; save 5 overwrite; save 8; is 5b 6a 7a 8c"
    ),
    "a step beside that is restored is stood on": (
        "save 5; save 2 force; restore 2; save 2 overwrite; save 3; is 2c 3d"
    ),
    "a step beside leaves nothing; training that goes on does": (
        "save 0 5 8; restart; restore 5; save 2 force; is 0a 2b 5a 8a; save 6; is 0a 2b 5a 6c"
    ),
    "who rolled back and was taken over stops nobody": (
        "save 1; restart; rollback 1; take_over; save 2; is 1a 2b"
    ),
    "who deletes the newest step stands on one that is there": (
        "restart keep=1; save 6-8; delete 8; save 7; is 7b; restart keep=1; restore; save 8-9; delete 9; save 9; is 9d"
    ),
    "who rolls back stands on a step that is there": (
        "restart keep=1 period=5; save 0-8; rollback 7 => [8]; save 7; is 0a 5a 7b"
    ),
    "who deletes the only step that it saved stands nowhere": (
        "save 0-2; restart; save 2 overwrite force; delete 2; save 1 => refused; is 0a 1a"
    ),
    "only a save leaves the newer ones, and twice": (
        "save 0-5; restart; restore 2; is 0a 1a 2a 3a 4a 5a; save 3; is 0a 1a 2a 3b; save 4;"
        "restart; restore 3; save 9; is 0a 1a 2a 3b 9d"
    ),
    "a look at an older step in between is no branch": (
        "save 0-5; restart; restore; restore 2; save 6; restore 1; save 7;"
        "is 0a 1a 2a 3a 4a 5a 6b 7c"
    ),
    "going back in one run is one": (
        "save 0-5; restart; restore; restore 2; save 3-4; is 0a 1a 2a 3b 4b"
    ),
    "between own steps is refused, beyond them goes on": (
        "save 0 2 4; save 2 => False; save 3 => refused; is 0a 2a 4a; restore 0; save 5;"
        "is 0a 2a 4a 5d"
    ),
    "going back on its own steps leaves them": (
        "save 0-5; restart; restore; save 6; restore 2; save 2 => False; save 1 => refused;"
        "is 0a 1a 2a 3a 4a 5a 6b; save 4; save 4 => False; save 5; is 0a 1a 2a 4e 5g"
    ),
    "who never restored is refused": (
        "save 0-2; restart; save 0 2 => refused; save 3; save 1 => refused; is 0a 1a 2a 3c"
    ),
    "an overwrite of a step of its own leaves the others": (
        "save 0-2; save 1 overwrite; save 1 => False; save 3; is 0a 1b 2a 3d"
    ),
    "an overwrite of what was left leaves the rest of it, too": (
        "save 0-2; restart; restore 0; save 1 overwrite; is 0a 1b"
    ),
    "a second start with overwrite ends in one run": (
        "save 0-20; restart; save 0 => refused; save 0-10/5 overwrite; is 0c 5c 10c"
    ),
    "an older step needs force, and a save": (
        "save 10; restart; save 5 => refused; save 5 force; save 10 force => refused;"
        "save 7 force; save 11; restore; is 5c 7e 10a 11f"
    ),
    "a deleted number is free": (
        "save 0-2; delete 1; delete 1 => absent; delete 2; save 2; is 0a 2b"
    ),
    "a rollback between, before, and after all": (
        "save 3 7; restart; rollback 4 => [7]; save 5; rollback 9 => []; is 3a 5b;"
        "rollback 2 => [3, 5]; restore => None; is"
    ),
}  # fmt: skip
IN_ONE_TIER = {
    "retention takes an older step, too": "restart keep=2; save 10 11; save 5 force; is 10a 11a",
    "numbers that are gone refuse nothing": "restart keep=1; save 5-7; remove 7; save 4; is 4b",
    "a start from nothing saves numbers that were saved before": (
        "save 1-3; remove 1 2 3; restore => None; save 1 2; is 1b 2b"
    ),
}
IN_TWO_TIERS = {  # which steps go to the persistent directory, how many stay local
    "a forced save is there when the host is gone": (1000, 5, (
        "save 0-5; is 0a 1a 2a 3a 4a 5a; save 5 force; persistent 0a 5b; save 5 force => False;"
        "save 6; lose_the_host; is 0a 5b; restore"
    )),
    "a forced save of a restored step": (1000, 5, (
        "save 0 1; restart; restore; save 1 force; persistent 0a 1b; is 0a 1b"
    )),
    "a persistent copy on its way counts": (1000, 5, (
        "save 0; save 1 force; save 1 force => False; save 2; persistent 0a 1b; is 0a 1b 2d"
    )),
    "a forced save of an older one does nothing": (1000, 5, (
        "save 0-3; save 2 force => False; persistent 0a; is 0a 1a 2a 3a"
    )),
    "a forced save after a rollback": (1000, 5, (
        "save 0-2; save 3 force; rollback 2; save 3; save 3 force; persistent 0a 3d"
    )),
    "a forced save after going back": (1000, 5, (
        "save 0-2; save 3 force; restore 2; save 3; save 3 force; persistent 0a 3d"
    )),
    "older local steps stay with a branch that begins after them": (1000, 4, (
        "save 0-5; restart; is 0a 2a 3a 4a 5a; restore 3; save 4; is 0a 2a 3a 4b; restart; restore;"
        "is 0a 2a 3a 4b"
    )),
    "a rollback keeps the local steps before": (3, 4, (
        "save 0-5; restart; rollback 4 => [5]; restart; restore; is 0a 2a 3a 4a"
    )),
    "an overwrite goes where the old one is": (10, 2, (
        "save 10 11; restart; restore; save 10 11 overwrite; persistent 10b; is 10b 11b;"
        "save 12-14 overwrite; persistent 10b; is 10b 13c 14c; restart; is 10b 13c 14c"
    )),
    "overwritten, saved already, deleted": (3, 1, (
        "save 0-3; restart; save 3 overwrite; save 3 => False; persistent 0a 3b; delete 3;"
        "delete 3 => absent; is 0a"
    )),
    "starting over steps that are there": (1000, 2, (
        "save 1-4; restart; save 1 4 => refused; rollback 2 => [3, 4]; save 3; is 3c"
    )),
    "a lost local directory": (3, 1, (
        "save 0-4; is 0a 3a 4a; lose_the_host; is 0a 3a; restore; save 4 5; is 0a 3a 5b;"
        "restart; restore"
    )),
    "a copied step": (2, 2, "save 1-3; copy 2 4; is 2a 3a 4a; restore; save 4; is 2a 3a 4b"),
    "a rollback at once": (2, 2, "save 0 2 7-8; save 9 waits=0; rollback 6 => [8, 9]; is 0a 2a"),
    "a reader that stays open": (4, 3, (
        "save 0-6; read; is 0a 4a 5a 6a; rollback 4; read; is 0a 4a; save 5; read; save 5 overwrite;"
        "read; is 0a 4a 5c; delete 5; read; save 5-11; read; is 0a 4a 8d 9d 10d 11d"
    )),
}  # fmt: skip


@pytest.fixture(name="run_in")
def make_run_in() -> Any:
    begun: list[Run] = []

    def begin(**where: Any) -> Run:
        begun.append(Run(**where))
        return begun[-1]

    yield begin
    for run in begun:
        run.close()


WHERE: dict[str, dict[str, Any]] = {
    "disk": {},
    "memory": {"root": "memory://test-histories", "prefix": "run"},
    "tiers": {"every": 1, "local_keep": 1},
}


@pytest.mark.parametrize("story", ANYWHERE)
@pytest.mark.parametrize("where", WHERE)
def test_story(run_in: Any, where: str, story: str) -> None:
    play(run_in(**WHERE[where]), ANYWHERE[story])


@pytest.mark.parametrize("story", IN_ONE_TIER)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_story_in_one_tier(run_in: Any, where: str, story: str) -> None:
    play(run_in(**WHERE[where]), IN_ONE_TIER[story])


@pytest.mark.parametrize("story", IN_TWO_TIERS)
def test_story_in_two_tiers(run_in: Any, story: str) -> None:
    every, local_keep, calls = IN_TWO_TIERS[story]
    play(run_in(every=every, local_keep=local_keep), calls)


# ---- random --------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 8)
POLICIES = st.sampled_from([(None, 0), (1, 0), (2, 0), (2, 3), (3, 4)])


class History(RuleBasedStateMachine):
    """Any order of calls; subclasses say where the run lies."""

    where: ClassVar[dict[str, Any]] = {}
    operations: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(**self.where)

    @rule(step=NUMBERS, overwrite=st.booleans(), force=st.booleans(), waits=st.booleans())
    def save(self, **how: Any) -> None:
        self.run.save(**how)

    @rule(ahead=st.integers(1, 3), waits=st.booleans())
    def go_on(self, ahead: int, waits: bool) -> None:
        """What training does: from where it stands."""
        at = self.run.model.writer.at
        self.run.save((-1 if at is None else at) + ahead, waits=waits)

    @rule(step=st.none() | NUMBERS)
    def restore(self, step: int | None) -> None:
        self.run.restore(step)

    @rule(step=NUMBERS)
    def rollback(self, step: int) -> None:
        self.run.rollback(step)

    @rule(step=NUMBERS)
    def delete(self, step: int) -> None:
        self.run.delete(step)

    @rule(policy=POLICIES, asynchronous=st.booleans(), closes=st.booleans())
    def restart(self, policy: tuple[int | None, int], asynchronous: bool, closes: bool) -> None:
        self.run.restart(*policy, closes, asynchronous=asynchronous)

    @rule(policy=POLICIES, asynchronous=st.booleans())
    def take_over(self, policy: tuple[int | None, int], asynchronous: bool) -> None:
        self.run.take_over(keep=policy[0], period=policy[1], asynchronous=asynchronous)

    @precondition(lambda self: self.run.model.disk)
    @rule(data=st.data(), copy=st.none() | NUMBERS)
    def a_tool_removes_or_copies(self, data: st.DataObject, copy: int | None) -> None:
        step = data.draw(st.sampled_from(sorted(self.run.model.disk)))
        if copy is None:
            self.run.remove(step)
        else:
            self.run.copy(step, copy)

    @rule()
    def read(self) -> None:
        self.run.read()

    @precondition(lambda self: not self.run.model.tiers)
    @rule(ahead=st.integers(1, 2), deletes=st.booleans())
    def the_disk_fails(self, ahead: int, deletes: bool) -> None:
        """A save that cannot be committed changes nothing; with one whose retention fails all steps stay."""
        self.run.fail(ahead, "delete" if deletes else "commit")

    @invariant()
    def all_agree(self) -> None:
        type(self).operations += 1
        self.run.check()

    def teardown(self) -> None:
        self.run.close()


class OnDisk(History):
    pass


class InMemory(History):
    where: ClassVar[dict[str, Any]] = WHERE["memory"]


class InTwoTiers(History):
    where: ClassVar[dict[str, Any]] = {"every": 2}


def random_calls(machine: type[History], operations: int) -> None:
    """At least so many operations, in examples of 50."""
    settings = hypothesis.settings(
        max_examples=max(operations // 50, 1),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.parametrize("machine", [OnDisk, InMemory, InTwoTiers])
def test_any_order_of_calls(machine: type[History]) -> None:
    random_calls(machine, 1_000)


@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_any_order_of_calls_in_a_bucket(kind: str, request: pytest.FixtureRequest) -> None:
    class InBucket(History):
        where: ClassVar[dict[str, Any]] = {"root": url_of_kind(request, kind)}

    random_calls(InBucket, 100)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [OnDisk, InMemory, InTwoTiers])
def test_a_hundred_thousand_calls(machine: type[History]) -> None:
    while machine.operations < 100_000 // 3:
        random_calls(machine, 10_000)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_the_model_notices(run_in: Any, wrong: int) -> None:
    """A retention that deletes one step too many, or too few."""
    run = run_in()
    run.restart(keep=2)
    run.model.keep += wrong
    with pytest.raises(AssertionError):
        play(run, "save 1-4")
