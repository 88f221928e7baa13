"""Stories of a run: texts of calls, which are made beside its model."""

from collections.abc import Iterator
from typing import Any

from tests.support.histories import Run


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
