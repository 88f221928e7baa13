"""Checkpoints made to harm: our own format, signed again after each change, and Orbax's.

A `Case` turns a copy of a good checkpoint into a hostile one. Beside the checkpoint stands a
directory `outside` with a file of `SECRET`, for what tries to leave the checkpoint.
"""

from tests.contract.faults.crafted.databases import DATABASE_CASES
from tests.contract.faults.crafted.orbax_directories import ORBAX_CASES
from tests.contract.faults.crafted.records import FILE_CASES, RECORD_CASES

CASES = [*RECORD_CASES, *DATABASE_CASES, *FILE_CASES, *ORBAX_CASES]
