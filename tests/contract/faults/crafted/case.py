"""What a crafted checkpoint is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.contract.faults.crafted.messages import SAYS

GIB = 2**30


SECRET = b"SECRET--" * 125


@dataclass(frozen=True)
class Case:
    """A hostile checkpoint.

    Attributes:
        make: turns a copy of the good checkpoint, or an empty directory, into the hostile one.
        may_load: whether some reader may succeed, because what is odd is harmless or not read.
        found: whether `verify` must find it, whatever a load needs.
        base: which good checkpoint it is made from: "" or "-zstd" or "-blosc".
    """

    name: str
    make: Callable[[Path], None]
    may_load: bool = False
    found: bool = False
    base: str = ""

    @property
    def says(self) -> str | None:
        """Part of the message of the bound that the case is made for; None where nothing refuses it."""
        return SAYS.get(self.name)
