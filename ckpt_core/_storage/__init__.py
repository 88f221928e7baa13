"""The only package that imports TensorStore: writes and reads the OCDBT database of an item.

``location`` says where a database or an object lies and how it is opened; ``writer`` writes data files; ``encode`` makes the
index that leads to them, and ``database`` decodes one; ``files`` reads ranges of files and objects; ``arrays`` reads other
layouts through TensorStore.
"""

from ckpt_core._storage.arrays import (
    ForeignArray,
    Values,
    memory_bytes,
    most_chunk_bytes,
    most_stored_bytes,
    open_array,
    read_region,
)
from ckpt_core._storage.database import Extent, read_index
from ckpt_core._storage.encode import Rows, encode_index, joined
from ckpt_core._storage.files import DataFiles, PastCache, StoreFiles, coalesce
from ckpt_core._storage.location import (
    INDEX_FILE,
    KeyValues,
    Location,
    StoreContext,
    backend_of,
    new_context,
    open_keys,
)
from ckpt_core._storage.writer import ArrayToWrite, ArrayWriter, Place, decode_chunk
