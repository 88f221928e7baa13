"""Orbax's metadata files: writers, so that Orbax (0.12.8 and others) can read our directories, and parsers of what it wrote. An
array's name is its key path joined with ``.``, without escaping: a tree in which two paths have the same name cannot be saved.
"""

from __future__ import annotations

import base64
import functools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._format.record import FORMAT_VERSION, MARKER, dump_json, parse_json
from ckpt_core._tree import LEAF, MAX_DEPTH, NONE, Node, Path, array_name, format_path
from ckpt_core._tree.leaves import TEXT_KINDS, LeafSpec

ITEM_METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
SHARDING_FILE = "_sharding"
STRINGS_FILE = "_strings.json"
ARRAY_METADATA = "array_metadatas/process_0"
COMMIT_FILE = "commit_success.txt"

# A key of OCDBT has at most 65,535 bytes; what follows the name in it ("/zarr.json", "/c/0/0...") needs some.
_MOST_NAME_BYTES = 64_000

_V0 = "orbax.checkpoint._src.handlers."
HANDLERS = {
    "tree": _V0 + "standard_checkpoint_handler.StandardCheckpointHandler",
    "text_tree": _V0 + "pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "json": _V0 + "json_checkpoint_handler.JsonCheckpointHandler",
}
"""Type names of Orbax's v0 handlers, which its v0 and v1 API know; v0 does not know those of v1."""

_SEQUENCE, _NAMED = 1, 2
_MARKER_VALUE = {"format_version": FORMAT_VERSION, "requires": "ckpt.json"}


def check_names(paths: Iterable[Path], stored: Iterable[Path]) -> list[str]:
    """The array name of every leaf, from ``stored_paths``. UnsupportedLeaf if two are the same, or the database cannot hold one."""
    names: list[str] = []
    seen: dict[str, Path] = {}
    for path, there in zip(paths, stored, strict=True):
        name, odd = array_name(there), ""
        if not name.isascii() and name.encode(errors="ignore").decode() != name:
            odd = f"leaf {format_path(path)!r}: its name is not valid Unicode: rename it"
        elif len(name) > _MOST_NAME_BYTES // 4 and len(name.encode()) > _MOST_NAME_BYTES:
            odd = (
                f"leaf {format_path(path)[:100]!r}...: its name has {len(name.encode())} bytes, and the array database "
                f"holds names of up to {_MOST_NAME_BYTES}: shorten its keys"
            )
        elif (other := seen.setdefault(name, path)) is not path:
            odd = (
                f"leaves {format_path(other)!r} and {format_path(path)!r} would both be stored as "
                f"{name!r} in Orbax's format, which cannot distinguish them: rename one of them"
            )
        if odd:
            raise UnsupportedLeaf(odd, leaf=format_path(path))
        names.append(name)
    return names


def step_metadata(handlers: dict[str, str], metadata: Any) -> bytes:
    """Content of a step's ``_CHECKPOINT_METADATA``; ``handlers`` is item -> Orbax's handler."""
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
    """Content of an item's ``_METADATA``: the tree in Orbax's form."""
    entries: list[str] = []
    _describe(root, "", (), iter(specs), entries)
    rest = {
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {MARKER: _MARKER_VALUE},
    }
    return b'{"tree_metadata":{' + ",".join(entries).encode() + b"}," + dump_json(rest)[1:]


# Every save describes a tree of maybe thousands of leaves here. For speed, JSON that leaves share
# is encoded once (lru_cache) and the rest is formatted as text.
_quoted = json.encoder.encode_basestring

_EMPTY = {"dict": "Dict", "ordered": "Dict", "dataclass": "Dict", "list": "List", "tuple": "Tuple"}
"""By kind, what Orbax calls a container that holds nothing; any other is None for it."""


def _describe(
    node: Node, keys: str, texts: tuple[str, ...], specs: Iterator[LeafSpec], entries: list[str]
) -> None:
    if node.kind in ("leaf", "expanded") and node.type_name:
        keys += f',{{"key":{_quoted(node.type_name)},"key_type":{_NAMED}}}'
        texts = (*texts, node.type_name)
    if node.kind == "expanded":
        _describe(node.children[0], keys, texts, specs, entries)
    elif node.kind == "leaf" or not node.children:
        value = f'{{"value_type":"{_EMPTY.get(node.kind, "None")}","skip_deserialize":true}}'
        if node.kind == "leaf":
            value = _value_metadata(next(specs))
        entries.append(
            f'{_quoted(str(texts))}:{{"key_metadata":[{keys[1:]}],"value_metadata":{value}}}'
        )
    else:
        named = node.kind not in ("list", "tuple")
        for key, child in zip(node.keys, node.children, strict=True):
            by_name = named and not (node.kind == "custom" and isinstance(key, int))
            text = str(key)
            kind = _NAMED if by_name else _SEQUENCE
            step = f',{{"key":{_quoted(text)},"key_type":{kind}}}'
            _describe(child, keys + step, (*texts, text), specs, entries)


@functools.lru_cache(4096)
def _value_metadata(spec: LeafSpec) -> str:
    value: dict[str, Any] = {"value_type": "np.ndarray", "skip_deserialize": False}
    if spec.kind in TEXT_KINDS:
        value["value_type"] = "string"
    elif spec.kind in ("jax", "key"):
        value |= {"value_type": "jax.Array", "write_shape": spec.stored_shape}
    elif spec.kind in ("int", "float", "bool"):
        value["value_type"] = "scalar"
    return json.dumps(value)


def sharding_file(names: Sequence[str], shardings: Sequence[dict[str, Any] | None]) -> bytes:
    """Content of ``_sharding``: each array's sharding, as JSON text inside JSON."""
    entries: list[bytes] = []
    texts: dict[int, bytes] = {}
    for name, sharding in zip(names, shardings, strict=True):
        if sharding is not None:
            text = texts.get(id(sharding))
            if text is None:
                text = texts.setdefault(id(sharding), dump_json(json.dumps(sharding)))
            entries.append(b'"%b":%b' % (base64.urlsafe_b64encode(name.encode()), text))
    return b"{" + b",".join(entries) + b"}"


def strings_file(texts: dict[str, str], paths: dict[str, Path]) -> bytes:
    """Content of ``_strings.json``: texts, nested by name. Raises UnsupportedLeaf if one name is a parent of another."""
    document: dict[str, Any] = {}
    for name, text in texts.items():
        node: Any = document
        *parents, last = name.split("/")
        for part in parents:
            node = node.setdefault(_pointer(part), {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or _pointer(last) in node:
            where = format_path(paths[name])
            raise UnsupportedLeaf(
                f"text leaf {where!r} conflicts with another text leaf in Orbax's format, where the name "
                "of one is a parent of the other's: rename one of them",
                leaf=where,
            )
        cast("dict[str, Any]", node)[_pointer(last)] = text
    return dump_json(document)


def _pointer(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def read_string(document: Any, name: str) -> str:
    """The text leaf ``name`` of a parsed ``_strings.json``; raises CheckpointCorrupt if there is none."""
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
    """Content of ``array_metadatas/process_0``: shapes, and PRNG implementations of typed keys."""
    entries = [
        f'{{"array_metadata":{{"param_name":{_quoted(name)},{_array_shape(spec, chunk)}}}}}'
        for name, spec, chunk in zip(names, specs, chunks, strict=True)
        if spec.kind in ("jax", "key")
    ]
    return b'{"array_metadatas":[' + ",".join(entries).encode() + b"]}"


@functools.lru_cache(4096)
def _array_shape(spec: LeafSpec, chunk: tuple[int, ...]) -> str:
    extra = {"random_key_impl": spec.dtype} if spec.kind == "key" else None
    shape = {"write_shape": spec.stored_shape, "chunk_shape": chunk, "ext_metadata": extra}
    return json.dumps(shape)[1:-1]


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
        texts = dict.fromkeys(text for text in value.values() if text)  # thousands share few
        parsed = {one: parse_json(one.encode(errors="surrogatepass"), file) for one in texts}
        return {
            base64.urlsafe_b64decode(key).decode(errors="surrogatepass"): parsed[text]
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
