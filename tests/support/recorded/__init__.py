"""What is seen of ckpt from outside, as text in ``tests/recorded``; ``make recorded`` writes it anew and compares.

Each subject is a module with a generator of lines of its own: ``python -m tests.support.recorded operations`` prints one.
"""

import re

VOLATILE = re.compile(
    r"[0-9a-f]{16,}|/[^ '\"]*/checkpoints\b|bucket-[0-9a-f]{8}|(?<=TOKEN-)[0-9a-f]{8}|(?<=TOKEN_)[0-9a-f]{1,16}\b|(?<=manifest.ocdbt_)[0-9a-f]{1,16}\b"
    r"|(?<=process )\d+ on .*|(?<=\\\\n)[0-9a-f]{8}-\d+-\d+|[0-9a-f]{8}-\d+-\d+\.[0-9a-f]+"
)
"""Tokens, names of data files that are drawn, and the place."""


def steady(text: str) -> str:
    """The text without what differs between two runs of one program."""
    return VOLATILE.sub("TOKEN", VOLATILE.sub("TOKEN", text))
