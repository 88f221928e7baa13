"""Directories of checkpoints: temporary names, commit, listing, deletion.

One interface, ``Backend``, with two ways to commit: in a file system, renaming a finished directory
(``posix``); in an object store, writing the record last (``object_store``). No other package of
ckpt renames or deletes.
"""

from ckpt_core._directory.backend import SIGNS as SIGNS
from ckpt_core._directory.backend import Attempt as Attempt
from ckpt_core._directory.backend import Backend as Backend
from ckpt_core._directory.backend import has_sign as has_sign
from ckpt_core._directory.backend import is_meant as is_meant
from ckpt_core._directory.files import FileIdentity as FileIdentity
from ckpt_core._directory.files import crc32_of as crc32_of
from ckpt_core._directory.files import identify as identify
from ckpt_core._directory.files import link_files as link_files
from ckpt_core._directory.files import link_same as link_same
from ckpt_core._directory.files import read_pieces as read_pieces
from ckpt_core._directory.files import size_of as size_of
from ckpt_core._directory.gather import SECRET_FILE as SECRET_FILE
from ckpt_core._directory.gather import Scratch as Scratch
from ckpt_core._directory.gather import SourceFile as SourceFile
from ckpt_core._directory.gather import files_below as files_below
from ckpt_core._directory.gather import make_secret as make_secret
from ckpt_core._directory.gather import pieces_of as pieces_of
from ckpt_core._directory.gather import place as place
from ckpt_core._directory.gather import placed as placed
from ckpt_core._directory.gather import read_secret as read_secret
from ckpt_core._directory.hidden_names import Trace as Trace
from ckpt_core._directory.hidden_names import traces as traces
from ckpt_core._directory.locks import Claim as Claim
from ckpt_core._directory.locks import LockFile as LockFile
from ckpt_core._directory.locks import deleting as deleting
from ckpt_core._directory.locks import is_locked as is_locked
from ckpt_core._directory.locks import lock_folder as lock_folder
from ckpt_core._directory.locks import locks_work_in as locks_work_in
from ckpt_core._directory.locks import reading as reading
from ckpt_core._directory.object_store import ObjectStoreBackend as ObjectStoreBackend
from ckpt_core._directory.owner import introduction as introduction
from ckpt_core._directory.owner import is_dead as is_dead
from ckpt_core._directory.owner import this_machine as this_machine
from ckpt_core._directory.owner import this_network as this_network
from ckpt_core._directory.owner import this_owner as this_owner
from ckpt_core._directory.paths import file_system_of as file_system_of
from ckpt_core._directory.paths import is_local_disk as is_local_disk
from ckpt_core._directory.paths import mounted_bucket as mounted_bucket
from ckpt_core._directory.paths import refuse_lost_link as refuse_lost_link
from ckpt_core._directory.paths import refuse_path as refuse_path
from ckpt_core._directory.paths import resolve as resolve
from ckpt_core._directory.posix import PosixBackend as PosixBackend
from ckpt_core._directory.posix import remove_empty as remove_empty
from ckpt_core._directory.posix import why_immovable as why_immovable
from ckpt_core._directory.steps import MAX_STEP as MAX_STEP
from ckpt_core._directory.steps import StepNames as StepNames
from ckpt_core._directory.steps import check_step as check_step
from ckpt_core._directory.steps import is_file_name as is_file_name
from ckpt_core._directory.steps import read_run_metadata as read_run_metadata
from ckpt_core._directory.steps import series_of as series_of
from ckpt_core._directory.steps import write_run_metadata as write_run_metadata
from ckpt_core._directory.store_attempt import Keys as Keys
from ckpt_core._directory.syscalls import exchange as exchange
from ckpt_core._directory.syscalls import kind_at as kind_at
from ckpt_core._directory.syscalls import refuse_file as refuse_file
from ckpt_core._directory.syscalls import remove as remove
from ckpt_core._directory.syscalls import sync_file as sync_file
