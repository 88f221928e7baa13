"""The only module that imports TensorStore: chunks and keys in and out of an OCDBT database.

``context`` opens things, ``write`` puts arrays in, ``read`` takes them out.
"""

from ckpt_core._storage.context import KeyValues as KeyValues
from ckpt_core._storage.context import Location as Location
from ckpt_core._storage.context import counters as counters
from ckpt_core._storage.context import new_context as new_context
from ckpt_core._storage.read import DataFiles as DataFiles
from ckpt_core._storage.read import Extent as Extent
from ckpt_core._storage.read import ForeignArray as ForeignArray
from ckpt_core._storage.read import open_array as open_array
from ckpt_core._storage.read import read_index as read_index
from ckpt_core._storage.read import read_into as read_into
from ckpt_core._storage.read import read_value as read_value
from ckpt_core._storage.write import SMALL_LEAF_BYTES as SMALL_LEAF_BYTES
from ckpt_core._storage.write import ArrayWriter as ArrayWriter
from ckpt_core._storage.write import merge as merge
