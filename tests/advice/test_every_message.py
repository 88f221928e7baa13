"""Every message of the tree that names an action has a case here, or a reason why it has none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.advice.messages import Message, with_an_action
from tests.advice.said import fragment_of

_KEY = re.compile(r"[\w/]+\.py: .+", re.DOTALL)
NO_ADVICE: dict[str, str] = {}
UNREACHABLE: dict[str, str] = {}


def _keys(file: Path) -> list[str]:
    """The keys of messages that a file of tests is about: ``module.py: part of the text``."""
    texts = (
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
    )
    return [text for text in texts if isinstance(text, str) and _KEY.fullmatch(text)]


def _about(key: str, message: Message) -> bool:
    return message.holds(key.partition(": ")[0], fragment_of(key))


COVERED = [key for file in sorted(Path(__file__).parent.glob("test_*.py")) for key in _keys(file)]
MESSAGES = list(with_an_action())


def test_every_message_with_an_action_is_followed():
    left = [one for one in MESSAGES if not any(_about(key, one) for key in COVERED)]
    shown = "\n".join(f"{one.module}:{one.line}: {'{}'.join(one.parts)}" for one in left)
    assert not left, (
        f"{len(left)} messages that no test follows; see tests/advice/said.py:\n{shown}"
    )


def test_every_key_is_that_of_a_message():
    """So that a message that changes takes its case along."""
    everything = [*MESSAGES, *with_an_action(or_none=True)]
    lost = [key for key in COVERED if not any(_about(key, one) for one in everything)]
    assert not lost
