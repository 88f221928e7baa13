"""Orbax's metadata files: what it needs to read our directories, and how we read its own.

Source: orbax-checkpoint 0.12.8, whose directories were taken apart and written by hand; the
findings are in docs/design.md. A leaf's array name is its key path joined with ``.``, with nothing
escaped, so two different paths can share a name: such trees are refused.
"""

from __future__ import annotations

import base64
import functools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._format.record import FORMAT_VERSION, MARKER, dump_json, parse_json
from ckpt_core._leaves import TEXT_KINDS, LeafSpec
from ckpt_core._tree import LEAF, NONE, Node, Path, array_name, format_path

ITEM_METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
SHARDING_FILE = "_sharding"
STRINGS_FILE = "_strings.json"
ARRAY_METADATA = "array_metadatas/process_0"
COMMIT_FILE = "commit_success.txt"

_V0 = "orbax.checkpoint._src.handlers."
HANDLERS = {
    "tree": _V0 + "standard_checkpoint_handler.StandardCheckpointHandler",
    "text_tree": _V0 + "pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "json": _V0 + "json_checkpoint_handler.JsonCheckpointHandler",
}
"""v0 type names, which both generations of Orbax resolve (v0 does not know v1's)."""

_SEQUENCE, _NAMED = 1, 2
_MARKER_VALUE = {"format_version": FORMAT_VERSION, "requires": "ckpt.json"}


def check_names(paths: Iterable[Path]) -> list[str]:
    """The array name of every path.

    Raises:
        UnsupportedLeaf: two paths share a name; both are named.
    """
    names: list[str] = []
    seen: dict[str, Path] = {}
    for path in paths:
        name = array_name(path)
        if not _is_text(name):
            raise UnsupportedLeaf(
                f"leaf {format_path(path)!r}: its name is not valid Unicode: rename it",
                leaf=format_path(path),
            )
        other = seen.setdefault(name, path)
        if other is not path:
            raise UnsupportedLeaf(
                f"leaves {format_path(other)!r} and {format_path(path)!r} would both be stored as "
                f"{name!r} in Orbax's format, which cannot tell them apart: rename one of them",
                leaf=format_path(path),
            )
        names.append(name)
    return names


def _is_text(name: str) -> bool:
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def step_metadata(handlers: dict[str, str], metadata: Any) -> bytes:
    """``_CHECKPOINT_METADATA`` of a step; ``handlers`` says how Orbax reads each item."""
    now = time.time_ns()
    custom = {**metadata} if isinstance(metadata, dict) else {}
    return dump_json(
        {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": {**custom, MARKER: _MARKER_VALUE},
        }
    )


def item_metadata(root: Node, specs: Sequence[LeafSpec]) -> bytes:
    """``_METADATA`` of an item: the tree, as Orbax describes one."""
    entries: dict[str, Any] = {}
    leaves = iter(specs)
    _describe(root, [], (), leaves, entries)
    return dump_json(
        {
            "tree_metadata": entries,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": {MARKER: _MARKER_VALUE},
        }
    )


_EMPTY = {
    "none": "None",
    "dict": "Dict",
    "ordered": "Dict",
    "list": "List",
    "tuple": "Tuple",
    "namedtuple": "None",
    "dataclass": "Dict",
    "custom": "None",
}


def _describe(
    node: Node,
    keys: list[dict[str, Any]],
    texts: tuple[str, ...],
    leaves: Any,
    entries: dict[str, Any],
) -> None:
    if node.kind == "expanded":
        _describe(node.children[0], keys, texts, leaves, entries)
    elif node.kind == "leaf":
        entries[str(texts)] = {
            "key_metadata": keys,
            "value_metadata": _value_metadata(next(leaves)),
        }
    elif not node.children:
        value = {"value_type": _EMPTY[node.kind], "skip_deserialize": True}
        entries[str(texts)] = {"key_metadata": keys, "value_metadata": value}
    else:
        named = node.kind not in ("list", "tuple")
        for key, child in zip(node.keys, node.children, strict=True):
            by_name = named and not (node.kind == "custom" and isinstance(key, int))
            text = str(key)
            step = {"key": text, "key_type": _NAMED if by_name else _SEQUENCE}
            _describe(child, [*keys, step], (*texts, text), leaves, entries)


@functools.lru_cache(1024)
def _value_metadata(spec: LeafSpec) -> dict[str, Any]:
    if spec.kind in TEXT_KINDS:
        return {"value_type": "string", "skip_deserialize": False}
    if spec.kind in ("jax", "key"):
        return {
            "value_type": "jax.Array",
            "skip_deserialize": False,
            "write_shape": list(spec.stored_shape),
        }
    scalar = spec.kind in ("int", "float", "bool")
    return {"value_type": "scalar" if scalar else "np.ndarray", "skip_deserialize": False}


def sharding_file(names: Sequence[str], shardings: Sequence[dict[str, Any] | None]) -> bytes:
    """``_sharding``: for every array its sharding, as JSON text within JSON."""
    table: dict[str, str] = {}
    texts: dict[int, str] = {}
    for name, sharding in zip(names, shardings, strict=True):
        if sharding is not None:
            text = texts.get(id(sharding)) or texts.setdefault(id(sharding), json.dumps(sharding))
            table[base64.urlsafe_b64encode(name.encode(errors="surrogatepass")).decode()] = text
    return dump_json(table)


def strings_file(texts: dict[str, str], paths: dict[str, Path]) -> bytes:
    """``_strings.json``: text leaves, where ``/`` in a name nests (it is read as a JSON pointer).

    Raises:
        UnsupportedLeaf: one name is the beginning of another, which this format cannot hold.
    """
    document: dict[str, Any] = {}
    for name, text in texts.items():
        node: Any = document
        *parents, last = name.split("/")
        for part in parents:
            node = node.setdefault(_pointer(part), {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or _pointer(last) in node:
            where = format_path(paths[name])
            raise UnsupportedLeaf(
                f"text leaf {where!r} cannot be told from another text leaf whose name begins or "
                "ends in it in Orbax's format: rename one of them",
                leaf=where,
            )
        cast("dict[str, Any]", node)[_pointer(last)] = text
    return dump_json(document)


def _pointer(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def parse_strings(data: bytes, file: str) -> Any:
    """The document of ``_strings.json``, for ``read_string``."""
    return parse_json(data, file)


def read_string(document: Any, name: str) -> str:
    """The text leaf ``name`` of a parsed ``_strings.json``.

    Raises:
        CheckpointCorrupt: it is not there.
    """
    node = document
    for part in name.split("/"):
        node = cast("dict[str, Any]", node).get(_pointer(part)) if isinstance(node, dict) else None
    if not isinstance(node, str):
        raise CheckpointCorrupt(
            f"{STRINGS_FILE}: no text for leaf {name!r}", file=STRINGS_FILE, leaf=name
        )
    return node


def array_metadatas(
    names: Sequence[str], specs: Sequence[LeafSpec], chunks: Sequence[Any]
) -> bytes:
    """``array_metadatas/process_0``: carries the PRNG implementation of typed keys."""
    entries: list[dict[str, Any]] = []
    for name, spec, chunk in zip(names, specs, chunks, strict=True):
        if spec.kind in ("jax", "key"):
            extra = {"random_key_impl": spec.dtype} if spec.kind == "key" else None
            shape = {"write_shape": spec.stored_shape, "chunk_shape": chunk, "ext_metadata": extra}
            entries.append({"array_metadata": {"param_name": name, **shape}})
    return dump_json({"array_metadatas": entries})


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """One leaf of a tree that Orbax wrote: its path, array name and Orbax's type of value."""

    path: Path
    name: str
    value_type: str


@dataclass(frozen=True)
class OrbaxTree:
    """A tree that Orbax wrote.

    Attributes:
        root: structure; sequences are lists and everything else dicts, as Orbax restores them.
        leaves: in the order of the structure.
        zarr3: whether arrays are zarr v3 (else v2).
        ocdbt: whether they lie in a database, or None where the file does not say.
        required_record: whether the marker says that ckpt.json must be there.
    """

    root: Node
    leaves: tuple[OrbaxLeaf, ...]
    zarr3: bool
    ocdbt: bool | None
    required_record: bool


_EMPTY_NODES = {
    "None": NONE,
    "NamedTuple": NONE,
    "Dict": Node("dict"),
    "List": Node("list"),
    "Tuple": Node("tuple"),
}


def load_item_metadata(data: bytes, file: str) -> OrbaxTree:
    """The tree that an item's ``_METADATA`` describes.

    Raises:
        CheckpointCorrupt: the file is not such a description.
    """
    value: Any = parse_json(data, file)
    try:
        nested = _Branch()
        for entry in value["tree_metadata"].values():
            _insert(nested, entry)
        leaves: list[OrbaxLeaf] = []
        root = _to_node(nested, (), leaves)
        if isinstance(value.get("value_metadata_tree"), str):
            root = _with_types(root, parse_json(value["value_metadata_tree"].encode(), file))
        custom = value.get("custom_metadata") or {}
        return OrbaxTree(
            root,
            tuple(leaves),
            bool(value.get("use_zarr3", False)),
            value.get("use_ocdbt"),
            MARKER in custom,
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{file}: not a description of a tree: {error!r}", file=file
        ) from error


class _Branch(dict[str, Any]):
    """A container under construction: children by key, and whether it is a sequence."""

    sequence = False


def _insert(root: _Branch, entry: dict[str, Any]) -> None:
    keys = entry["key_metadata"]
    value_type = str(entry["value_metadata"]["value_type"])
    node = root
    if not keys:
        root[""] = (value_type, "")
        root.sequence = True  # marks the bare value: the only entry, under an empty key path
        return
    for position, key in enumerate(keys):
        node.sequence = key["key_type"] == _SEQUENCE
        if position == len(keys) - 1:
            node[str(key["key"])] = (value_type, ".".join(str(part["key"]) for part in keys))
        else:
            child = node.setdefault(str(key["key"]), _Branch())
            if not isinstance(child, _Branch):
                raise ValueError(f"{key['key']!r} is both a leaf and a container")
            node = child


def _to_node(value: Any, path: Path, leaves: list[OrbaxLeaf]) -> Node:
    if not isinstance(value, _Branch):
        value_type, name = value
        if value_type in _EMPTY_NODES:
            return _EMPTY_NODES[value_type]
        leaves.append(OrbaxLeaf(path, name, value_type))
        return LEAF
    if value.keys() == {""} and value.sequence:
        return _to_node(value[""], path, leaves)
    if value.sequence:
        keys: list[Any] = sorted(value, key=int)
        children = [_to_node(value[key], (*path, int(key)), leaves) for key in keys]
        return Node("list", tuple(range(len(children))), tuple(children))
    keys = list(value)
    return Node(
        "dict", tuple(keys), tuple(_to_node(value[key], (*path, key), leaves) for key in keys)
    )


def _with_types(node: Node, rich: Any) -> Node:
    """The structure with the tuples and NamedTuples that Orbax's rich metadata tells of."""
    if not isinstance(rich, (dict, list)) or not node.children:
        empty_tuple = isinstance(rich, dict) and rich.get("clazz") == "tuple" and node is not LEAF
        return Node("tuple") if empty_tuple else node
    described: Any = rich
    category = described.get("category") if isinstance(rich, dict) else None
    kind, type_name, below = node.kind, "", described
    if category == "custom" and described["clazz"] == "tuple":
        kind, below = "tuple", described["entries"]
    elif category == "namedtuple":
        kind, type_name = "namedtuple", f"{described['module']}:{described['clazz']}"
        below = {entry["key"]: entry["value"] for entry in described["entries"]}
    keys, children = node.keys, node.children
    if kind == "namedtuple":  # its fields have an order, which the flat metadata does not keep
        by_key = dict(zip(keys, children, strict=True))
        keys = tuple(key for key in below if key in by_key)
        if keys != node.keys:
            return node  # leaves are read in the order of the flat metadata: leave it a dict
        children = tuple(by_key[key] for key in keys)
    typed = tuple(_with_types(child, below[key]) for key, child in zip(keys, children, strict=True))
    return Node(kind, keys, typed, type_name)


def load_key_impls(data: bytes, file: str) -> dict[str, str]:
    """From array name to PRNG implementation, of one file of ``array_metadatas``."""
    value: Any = parse_json(data, file)
    try:
        found: dict[str, str] = {}
        for entry in value["array_metadatas"]:
            extra = entry["array_metadata"].get("ext_metadata") or {}
            if "random_key_impl" in extra:
                found[str(entry["array_metadata"]["param_name"])] = str(extra["random_key_impl"])
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{file}: not array metadata: {error!r}", file=file) from error


def load_shardings(data: bytes, file: str) -> dict[str, dict[str, Any]]:
    """From array name to its sharding."""
    value: Any = parse_json(data, file)
    try:
        return {
            base64.urlsafe_b64decode(key).decode(errors="surrogatepass"): json.loads(text)
            for key, text in value.items()
            if text
        }
    except (AttributeError, ValueError, TypeError) as error:
        raise CheckpointCorrupt(f"{file}: not a sharding file: {error!r}", file=file) from error


def handler_form(type_name: str) -> str:
    """What an item is by Orbax's handler name: tree, json, array, jax_key, numpy_key or unknown."""
    table = {
        "StandardCheckpointHandler": "tree",
        "PyTreeCheckpointHandler": "tree",
        "PyTreeHandler": "tree",
        "JsonCheckpointHandler": "json",
        "JsonHandler": "json",
        "MetricsHandler": "json",
        "ArrayCheckpointHandler": "array",
        "JaxRandomKeyCheckpointHandler": "jax_key",
        "NumpyRandomKeyCheckpointHandler": "numpy_key",
    }
    return table.get(type_name.rpartition(".")[2], "unknown")
