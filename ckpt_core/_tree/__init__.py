"""Flattens pytrees into paths, leaves and a structure, and rebuilds them."""

from ckpt_core._tree.build import TRUSTED_ROOTS as TRUSTED_ROOTS
from ckpt_core._tree.build import unflatten as unflatten
from ckpt_core._tree.flatten import LEAF as LEAF
from ckpt_core._tree.flatten import MAX_DEPTH as MAX_DEPTH
from ckpt_core._tree.flatten import NONE as NONE
from ckpt_core._tree.flatten import Below as Below
from ckpt_core._tree.flatten import FlatTree as FlatTree
from ckpt_core._tree.flatten import Key as Key
from ckpt_core._tree.flatten import Node as Node
from ckpt_core._tree.flatten import Path as Path
from ckpt_core._tree.flatten import WithConstants as WithConstants
from ckpt_core._tree.flatten import any_node as any_node
from ckpt_core._tree.flatten import array_name as array_name
from ckpt_core._tree.flatten import code_and_constants as code_and_constants
from ckpt_core._tree.flatten import flatten as flatten
from ckpt_core._tree.flatten import format_path as format_path
from ckpt_core._tree.flatten import is_plain_tuple as is_plain_tuple
from ckpt_core._tree.flatten import leaf_below as leaf_below
from ckpt_core._tree.flatten import stored_paths as stored_paths
from ckpt_core._tree.static import checked_static as checked_static
from ckpt_core._tree.static import compared_values as compared_values
from ckpt_core._tree.static import static_function as static_function
