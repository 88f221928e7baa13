"""The fixture that calls ``ckpt``."""

from tests.support.command_line import make_call as make_call
