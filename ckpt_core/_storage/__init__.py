"""The only module that imports TensorStore: chunks and keys in and out of an OCDBT database.

``database`` opens and fills the database of an item, ``zarr`` says how one array lies in it,
``index`` tells where its values lie, ``read`` takes arrays out of any, ``bounds`` refuses what would
end the process, ``merge`` joins the databases
of several processes, ``keys`` is for stores that are no file systems.
"""

from ckpt_core._storage.bounds import BLOSC_HEADER_BYTES as BLOSC_HEADER_BYTES
from ckpt_core._storage.bounds import Values as Values
from ckpt_core._storage.bounds import most_chunk_bytes as most_chunk_bytes
from ckpt_core._storage.bounds import most_stored_bytes as most_stored_bytes
from ckpt_core._storage.bounds import refuse_blosc as refuse_blosc
from ckpt_core._storage.database import SMALL_LEAF_BYTES as SMALL_LEAF_BYTES
from ckpt_core._storage.database import ArrayToWrite as ArrayToWrite
from ckpt_core._storage.database import ArrayWriter as ArrayWriter
from ckpt_core._storage.database import KeyRun as KeyRun
from ckpt_core._storage.database import Location as Location
from ckpt_core._storage.database import counters as counters
from ckpt_core._storage.database import new_context as new_context
from ckpt_core._storage.index import Extent as Extent
from ckpt_core._storage.index import read_index as read_index
from ckpt_core._storage.keys import KeyValues as KeyValues
from ckpt_core._storage.merge import merge as merge
from ckpt_core._storage.read import DataFiles as DataFiles
from ckpt_core._storage.read import ForeignArray as ForeignArray
from ckpt_core._storage.read import open_array as open_array
from ckpt_core._storage.read import read_region as read_region
from ckpt_core._storage.read import read_value as read_value
