"""Credentials of a profile in AWS' files, with all that TensorStore must be told of them.

TensorStore 0.1.86 looks for these files nowhere, whatever its documentation says: it takes a file's name that it is
not told for an empty one, and then sends its requests without credentials.
"""

from __future__ import annotations

import configparser
import os
from typing import Any

_FILES = {
    "credentials_file": ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
    "config_file": ("AWS_CONFIG_FILE", "config"),
}
_HAS_CREDENTIALS = ("aws_access_key_id", "role_arn")


def profile_credentials(chosen: str | None) -> dict[str, Any] | None:
    """TensorStore's spec of the credentials of a profile; None if no profile has any.

    Args:
        chosen: name of the profile. By default the one that ``AWS_PROFILE`` names, or else ``default``, if
            that has credentials: of a machine that has a role, the file says no more than the region.
    """
    files = {
        member: os.environ.get(variable) or os.path.expanduser(f"~/.aws/{name}")
        for member, (variable, name) in _FILES.items()
    }
    named = chosen or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    if not named and not any(map(_has_default, files.values())):
        return None
    there = {member: file if os.path.isfile(file) else os.devnull for member, file in files.items()}
    return {"type": "profile", "profile": named or "default", **there}


def _has_default(file: str) -> bool:
    read = configparser.RawConfigParser(strict=False, allow_no_value=True, default_section="")
    try:
        read.read(file, "utf-8")
    except (OSError, ValueError, configparser.Error):
        return False
    names = [
        name for name in read.sections() if name.split() in (["default"], ["profile", "default"])
    ]
    return any(read.has_option(name, option) for name in names for option in _HAS_CREDENTIALS)
