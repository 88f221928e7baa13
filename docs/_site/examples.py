"""Shows the code in docstrings as code (an extension of Griffe, which knows ``Examples:`` only, and no ``::``)."""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEAD = re.compile(r"^Example:$", re.MULTILINE)
_CODE = re.compile(r"(?<=\w)::$", re.MULTILINE)


class Examples(griffe.Extension):
    """Makes the singular the plural, and two colons before a block one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _CODE.sub(":", _HEAD.sub("Examples:", obj.docstring.value))
