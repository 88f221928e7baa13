"""Small functions about directories of steps, processes and trees."""

from ckpt_orbax._leaves import to_shape_dtype_struct as to_shape_dtype_struct
from ckpt_orbax.multihost import (
    broadcast_one_to_all as broadcast_one_to_all,
    fully_replicated_host_local_array_to_global_array as fully_replicated_host_local_array_to_global_array,
    is_primary_host as is_primary_host,
    reached_preemption as reached_preemption,
    sync_global_processes as sync_global_processes,
)
from ckpt_orbax.path.step import (
    TMP_DIR_SUFFIX as TMP_DIR_SUFFIX,
    checkpoint_steps as checkpoint_steps,
    checkpoint_steps_paths as checkpoint_steps_paths,
    is_checkpoint_finalized as is_checkpoint_finalized,
)
from ckpt_orbax.tree import from_flat_dict as from_flat_dict, to_flat_dict as to_flat_dict
