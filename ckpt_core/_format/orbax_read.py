"""Parsers of metadata files that Orbax wrote: trees, shardings, PRNG key implementations."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import MARKER, parse_json
from ckpt_core._tree import LEAF, MAX_DEPTH, NONE, Node, Path

_SEQUENCE = 1


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """One leaf of a tree that Orbax wrote: path, array name and Orbax's ``value_type``."""

    path: Path
    name: str
    value_type: str


@dataclass(frozen=True)
class OrbaxTree:
    """A tree that Orbax wrote: of lists and dicts, and where it has rich metadata also of tuples and NamedTuples."""

    root: Node
    leaves: tuple[OrbaxLeaf, ...]  # in the order of the structure
    zarr3: bool  # False for zarr v2
    ocdbt: bool | None  # None if the file does not say
    required_record: bool  # our marker is present, so ckpt.json must exist


_EMPTY_NODES = {
    "None": NONE,
    "NamedTuple": NONE,
    "Dict": Node("dict"),
    "List": Node("list"),
    "Tuple": Node("tuple"),
}


def load_item_metadata(data: bytes, file: str) -> OrbaxTree:
    """The tree in an item's ``_METADATA``; raises CheckpointCorrupt if ``data`` is anything else."""
    value: Any = parse_json(data, file)
    try:
        nested = _Branch()
        for entry in value["tree_metadata"].values():
            _insert(nested, entry)
        leaves: list[OrbaxLeaf] = []
        root = _to_node(nested, (), leaves)
        if isinstance(value.get("value_metadata_tree"), str):
            root = _with_types(
                root, parse_json(value["value_metadata_tree"].encode(errors="surrogatepass"), file)
            )
        custom = value.get("custom_metadata") or {}
        return OrbaxTree(
            root,
            tuple(leaves),
            bool(value.get("use_zarr3", False)),
            value.get("use_ocdbt"),
            MARKER in custom,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{file}: not a description of a tree: {error!r}", file=file
        ) from error


class _Branch(dict[str, Any]):
    """A container under construction: key -> child, and whether it is a sequence."""

    sequence = False


def _insert(root: _Branch, entry: dict[str, Any]) -> None:
    keys = entry["key_metadata"]
    value_type = str(entry["value_metadata"]["value_type"])
    node = root
    if len(keys) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if not keys:
        root[""] = (value_type, "")
        root.sequence = True  # with the only key "": the tree is a single bare value
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
    """The structure with the tuples and NamedTuples that Orbax's rich metadata describes."""
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
    if kind == "namedtuple":  # the flat metadata does not keep the order of its fields
        by_key = dict(zip(keys, children, strict=True))
        keys = tuple(key for key in below if key in by_key)
        if keys != node.keys:
            return node  # leaves are read in the order of the flat metadata: keep a dict
        children = tuple(by_key[key] for key in keys)
    typed = tuple(_with_types(child, below[key]) for key, child in zip(keys, children, strict=True))
    return Node(kind, keys, typed, type_name)


def load_key_impls(data: bytes, file: str) -> dict[str, str]:
    """Array name -> PRNG implementation, from one file of ``array_metadatas``."""
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
    """Array name -> sharding, from a ``_sharding`` file."""
    value: Any = parse_json(data, file)
    try:
        return {
            base64.urlsafe_b64decode(key).decode(errors="surrogatepass"): parse_json(
                text.encode(errors="surrogatepass"), file
            )
            for key, text in value.items()
            if text
        }
    except (AttributeError, ValueError, TypeError) as error:
        raise CheckpointCorrupt(f"{file}: not a sharding file: {error!r}", file=file) from error


def handler_form(type_name: str) -> str:
    """The form of an item by Orbax's handler: tree, json, array, jax_key, numpy_key or unknown."""
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
