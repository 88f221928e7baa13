"""Writers of Orbax's metadata files, so that Orbax (0.12.8 and others) can read our directories. An array's name is its key
path joined with ``.``, without escaping: a tree in which two paths have the same name cannot be saved.
"""

from __future__ import annotations

import base64
import functools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core._format.record import FORMAT_VERSION, MARKER, dump_json
from ckpt_core._tree import Node, Path, array_name, format_path
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
        name = array_name(there)
        if not name.isascii() and name.encode(errors="ignore").decode() != name:
            raise UnsupportedLeaf(
                f"leaf {format_path(path)!r}: its name is not valid Unicode: rename it",
                leaf=format_path(path),
            )
        if len(name) > _MOST_NAME_BYTES // 4 and len(name.encode()) > _MOST_NAME_BYTES:
            raise UnsupportedLeaf(
                f"leaf {format_path(path)[:100]!r}...: its name has {len(name.encode())} bytes, and the array database "
                f"holds names of up to {_MOST_NAME_BYTES}: shorten its keys",
                leaf=format_path(path),
            )
        other = seen.setdefault(name, path)
        if other is not path:
            raise UnsupportedLeaf(
                f"leaves {format_path(other)!r} and {format_path(path)!r} would both be stored as "
                f"{name!r} in Orbax's format, which cannot distinguish them: rename one of them",
                leaf=format_path(path),
            )
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

_EMPTY = {
    "none": "None",
    "dict": "Dict",
    "ordered": "Dict",
    "list": "List",
    "tuple": "Tuple",
    "namedtuple": "None",
    "dataclass": "Dict",
    "custom": "None",
    "code": "None",
}


def _describe(
    node: Node, keys: str, texts: tuple[str, ...], specs: Iterator[LeafSpec], entries: list[str]
) -> None:
    if node.kind in ("leaf", "expanded") and node.type_name:
        keys += f',{{"key":{_quoted(node.type_name)},"key_type":{_NAMED}}}'
        texts = (*texts, node.type_name)
    if node.kind == "expanded":
        _describe(node.children[0], keys, texts, specs, entries)
    elif node.kind == "leaf" or not node.children:
        value = f'{{"value_type":"{_EMPTY.get(node.kind)}","skip_deserialize":true}}'
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
