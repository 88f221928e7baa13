"""Directories of checkpoints: temporary names, commit, listing, deletion.

A ``Backend`` commits in one of two ways: in a file system, renaming a finished directory
(``posix``); in an object store, writing the record last (``object_store``). No other package of
ckpt renames or deletes.
"""

from ckpt_core._directory.files import (
    FileIdentity,
    crc32_of,
    exchange,
    identify,
    kind_at,
    link_files,
    link_same,
    read_pieces,
    refuse_file,
    remove,
    remove_empty,
    size_of,
    sync_file,
)
from ckpt_core._directory.gather import (
    SECRET_FILE,
    Scratch,
    SourceFile,
    files_below,
    make_secret,
    pieces_of,
    place,
    placed,
    read_secret,
)
from ckpt_core._directory.hidden_names import Trace, traces
from ckpt_core._directory.object_store import ObjectStoreBackend
from ckpt_core._directory.owner import (
    Claim,
    LockFile,
    deleting,
    introduction,
    is_dead,
    is_locked,
    lock_folder,
    locks_work_in,
    reading,
    this_machine,
    this_network,
    this_owner,
)
from ckpt_core._directory.paths import (
    SIGNS,
    file_system_of,
    has_sign,
    is_local_disk,
    is_meant,
    mounted_bucket,
    refuse_lost_link,
    refuse_path,
    resolve,
)
from ckpt_core._directory.posix import LocalAttempt, PosixBackend, why_immovable
from ckpt_core._directory.steps import (
    MAX_STEP,
    StepNames,
    check_step,
    is_file_name,
    read_run_metadata,
    series_of,
    write_run_metadata,
)
from ckpt_core._directory.store_attempt import Keys, StoreAttempt

Attempt = LocalAttempt | StoreAttempt
Backend = PosixBackend | ObjectStoreBackend
