"""The only package that imports TensorStore: writes and reads the OCDBT database of an item.

``location`` says where a database or an object lies and how it is opened; ``writer`` writes data files; ``encode`` makes the index that
leads to them, and ``database`` decodes one; ``files`` reads files and objects, of which the index gives the ranges; ``arrays`` reads
other layouts through TensorStore.
"""

from ckpt_core._storage.arrays import ForeignArray as ForeignArray
from ckpt_core._storage.arrays import Values as Values
from ckpt_core._storage.arrays import memory_bytes as memory_bytes
from ckpt_core._storage.arrays import most_chunk_bytes as most_chunk_bytes
from ckpt_core._storage.arrays import most_stored_bytes as most_stored_bytes
from ckpt_core._storage.arrays import open_array as open_array
from ckpt_core._storage.arrays import read_region as read_region
from ckpt_core._storage.database import Extent as Extent
from ckpt_core._storage.database import read_index as read_index
from ckpt_core._storage.encode import Rows as Rows
from ckpt_core._storage.encode import encode_index as encode_index
from ckpt_core._storage.encode import joined as joined
from ckpt_core._storage.files import DataFiles as DataFiles
from ckpt_core._storage.files import PastCache as PastCache
from ckpt_core._storage.files import StoreFiles as StoreFiles
from ckpt_core._storage.files import coalesce as coalesce
from ckpt_core._storage.location import INDEX_FILE as INDEX_FILE
from ckpt_core._storage.location import KeyValues as KeyValues
from ckpt_core._storage.location import Location as Location
from ckpt_core._storage.location import StoreContext as StoreContext
from ckpt_core._storage.location import backend_of as backend_of
from ckpt_core._storage.location import new_context as new_context
from ckpt_core._storage.location import open_keys as open_keys
from ckpt_core._storage.writer import ArrayToWrite as ArrayToWrite
from ckpt_core._storage.writer import ArrayWriter as ArrayWriter
from ckpt_core._storage.writer import Place as Place
from ckpt_core._storage.writer import decode_chunk as decode_chunk
