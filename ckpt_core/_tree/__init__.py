"""Flattens pytrees into paths, leaves and a structure, and rebuilds them."""

from ckpt_core._tree.build import unflatten
from ckpt_core._tree.flatten import (
    LEAF,
    MAX_DEPTH,
    NONE,
    Below,
    FlatTree,
    Key,
    Node,
    Path,
    WithConstants,
    array_name,
    code_and_constants,
    flatten,
    format_path,
    is_plain_tuple,
    leaf_below,
    stored_paths,
)
from ckpt_core._tree.static import checked_static, compared_values, static_function
