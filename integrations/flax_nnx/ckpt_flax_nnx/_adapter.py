"""The adapter: gets the values of NNX objects, and sets values on their live Variables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import variablelib
from jax.sharding import AbstractMesh, NamedSharding

Key = str | int | tuple[Any, ...]
"""One part of a path: ``str`` for attributes and text keys, ``int`` for positions and int keys; a
tuple where Flax keys a state by paths (``nnx.SpectralNorm``)."""


class NNXAdapter:
    """Reads and sets the state of NNX objects: every Variable and every array under ``nnx.data``. Code is not saved: static
    attributes, Variable metadata, hooks, annotations.
    """

    shares = True
    """Modules in one container may share Variables, which are stored once, with the first module."""

    def accepts(self, cls: type, /) -> bool:
        """Whether objects of this class are NNX objects. Linen's and other immutable pytrees of ``flax`` need no adapter."""
        # In Keras' NNX mode a layer inherits from nnx.Module, but its attributes are not an NNX graph.
        return issubclass(cls, _NNX_TYPES) and not any(
            base.__module__.partition(".")[0] == "keras" for base in cls.__mro__
        )

    def get_state(self, obj: Any, seen: dict[int, Any] | None = None, /) -> Any:
        """The raw values of an NNX object, as dictionaries nested like its attributes; hooks like ``on_get_value`` do not run.

        A Variable with several paths (tied weights) is stored once, under the first of them; those in ``seen``, by id, were
        stored with other objects of the same tree. ``nnx.Intermediate`` is left out: it is no state of the model.
        """
        if isinstance(obj, nnx.Variable):
            return _value_of(obj)
        return _values(_live_state(obj), dict[int, Any]() if seen is None else seen, _value_of)

    def get_stored(
        self, obj: Any, below: Callable[[str, Any], Any], seen: dict[int, Any] | None = None, /
    ) -> Any:
        """Like ``get_state``, with ``below("value", ...)`` around each value: in Orbax a Variable is a node of the tree."""

        def marked(variable: Any) -> Any:
            return below("value", _value_of(variable))

        if isinstance(obj, nnx.Variable):
            return marked(obj)
        return _values(_live_state(obj), dict[int, Any]() if seen is None else seen, marked)

    def get_constants(self, obj: Any, /) -> dict[str, int | float]:
        """The numbers among the static attributes of a module and those in it, such as a count of updates."""
        found: dict[str, int | float] = {}
        met, left = set[int](), [(obj, "")]
        for node, path in left:  # which grows meanwhile
            if isinstance(node, nnx.Variable) or id(node) in met:
                continue
            met.add(id(node))
            attributes: Any = {}
            if isinstance(node, (dict, list, tuple)):
                attributes = node if isinstance(node, dict) else dict(enumerate(node))
            elif isinstance(node, nnx.Pytree):
                attributes = vars(node)
            left += [(child, f"{path}{name}/") for name, child in attributes.items()]
            if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.List):
                is_data = attributes.get("_pytree__nodes", {})
                found |= {
                    path + name: child
                    for name, child in attributes.items()
                    if type(child) in (int, float) and not is_data.get(name)
                }
        return found

    def set_state(self, obj: Any, state: Any, /) -> None:
        """Sets the Variables of ``obj``, which stay the same objects: what shares them sees the new values. A Variable
        without a value was set already, with another object that shares it.
        """
        if isinstance(obj, nnx.Variable):
            _set_variable(obj, state)
            return
        bare = _set_variables(_live_state(obj), state)
        if bare:
            _set_bare(obj, bare)
        if isinstance(obj, nnx.Pytree):
            _warn_of_abstract_intermediates(obj)

    def set_leaves(self, obj: Any, leaves: Mapping[tuple[Key, ...], Any], /) -> list[Any]:
        """Sets arrays on some Variables, by path; returns the arrays that they hold now. Bare arrays, Variables of trees
        and mutable references, whose memory is written to, are left to ``set_state``.
        """
        live = obj if isinstance(obj, nnx.Variable) else _live_state(obj)
        was_set: list[Any] = []
        for path, value in leaves.items():
            found: Any = live
            for key in path:
                if isinstance(found, nnx.Variable):
                    break  # the path leads into the value of this Variable
                found = found[key]
            else:
                is_variable = isinstance(found, nnx.Variable)
                if is_variable and not variablelib.is_array_ref(found.get_raw_value()):
                    found.set_raw_value(value)
                    was_set.append(value)
        return was_set

    def copy(self, objects: Sequence[Any], /) -> list[Any]:
        """Copies with new Variables, which they share with each other as the originals do; the immutable arrays are shared."""
        graphdef, state = nnx.split(list(objects), graph=True)
        return nnx.merge(graphdef, state, copy=True)

    def is_filter(self, only: Any, /) -> bool:
        """Whether it is a filter object of NNX, such as ``nnx.Not(nnx.Param)``."""
        return callable(only) and type(only).__module__.startswith("flax.nnx.")

    def select(self, obj: Any, only: Any, /) -> Callable[[tuple[Key, ...], object], bool]:
        """For ``only=nnx.Param`` or another filter: whether a leaf passes it, as a function."""
        live = obj if isinstance(obj, nnx.Variable) else nnx.State(_live_state(obj))
        found = (
            nnx.filter_state(live, only) if isinstance(live, nnx.State) else nnx.state(obj, only)
        )
        chosen = set(_paths(found, ()))
        return lambda path, leaf: any(path[:end] in chosen for end in range(len(path) + 1))


_NNX_TYPES = (nnx.Pytree, nnx.Variable, nnx.State, variablelib.HijaxVariable)


def _live_state(obj: Any) -> Mapping[Key, Any]:
    """The live Variables (and bare arrays) of an object, nested by path, without duplicates."""
    # graph=True whatever nnx.set_graph_mode says: tree mode repeats or refuses shared Variables.
    if isinstance(obj, nnx.State):
        return obj.raw_mapping  # nnx.state would drop abstract arrays without a Variable
    graphdef, state = nnx.split(obj, graph=True)
    live = nnx.filter_state(state, nnx.Not(nnx.Intermediate))
    attributes: Any = getattr(graphdef, "attributes", None)
    # NNX may treat abstract arrays as static, as in a dict or list of ``nnx.data``
    if attributes is not None and not any(
        isinstance(getattr(value, "value", None), jax.ShapeDtypeStruct) for _, value in attributes
    ):
        return live
    nested: dict[Any, Any] = nnx.to_pure_dict(live, lambda leaf: leaf)
    for path, leaf in _abstract_leaves(obj, (), set()):
        *above, last = path
        inside = nested
        for key in above:
            inside = inside.setdefault(key, {})
        inside.setdefault(last, leaf)
    return nested


def _warn_of_abstract_intermediates(obj: Any) -> None:
    """Warns of abstract Intermediates: no checkpoint fills them, and ``nnx.jit`` rejects the object."""
    state = nnx.to_flat_state(nnx.state(obj, nnx.Intermediate, graph=True))
    rest = [
        "/".join(map(str, path))
        for path, variable in state
        if any(
            isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(variable.get_raw_value())
        )
    ]
    if rest:
        warnings.warn(
            f"{len(rest)} nnx.Intermediate of an abstract {type(obj).__name__} have no values, as they are in no "
            f"checkpoint: {', '.join(rest[:5])}. Take them out with nnx.pop(model, nnx.Intermediate)",
            UserWarning,
            stacklevel=2,
        )


def _abstract_leaves(
    node: Any, path: tuple[Key, ...], met: set[int]
) -> Iterator[tuple[tuple[Key, ...], jax.ShapeDtypeStruct]]:
    """The abstract arrays of an object that are data but in no Variable, by path."""
    if isinstance(node, jax.ShapeDtypeStruct):
        yield path, node
        return
    if isinstance(node, nnx.Variable) or id(node) in met:
        return
    if isinstance(node, nnx.Pytree):
        met.add(id(node))
    for key, child in _data_of(node).items():
        yield from _abstract_leaves(child, (*path, key), met)


def _data_of(node: Any) -> dict[Key, Any]:
    """The children of a node that are data, not static attributes."""
    paths, _ = _one_level(node)
    if all(path for path, _ in paths):
        return {_path_part(path[0]): child for path, child in paths}
    return _children(node) if isinstance(node, nnx.Pytree) else {}  # a class with pytree=False


def _values(
    live: Mapping[Key, Any], seen: dict[int, Any], value_of: Callable[[Any], Any]
) -> dict[Key, Any]:
    """The values of Variables, as ``value_of`` gives them, and bare leaves, nested."""
    values: dict[Key, Any] = {}
    for key, child in live.items():
        if isinstance(child, Mapping):
            values[key] = _values(child, seen, value_of)
        elif not isinstance(child, nnx.Variable):
            values[key] = _value_of(child)
        elif id(child) not in seen:  # by id, as Variables have no hash; `seen` keeps them alive
            seen[id(child)] = child
            values[key] = value_of(child)
    return values


def _paths(live: Any, path: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
    if not isinstance(live, Mapping):
        yield path
        return
    for key, child in live.items():
        yield from _paths(child, (*path, key))


def _value_of(leaf: Any) -> Any:
    """The value of a Variable or a bare leaf; a mutable reference is read."""
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    if isinstance(value, jax.ShapeDtypeStruct):
        return _on_devices(value)
    return value[...] if variablelib.is_array_ref(value) else value


def _on_devices(value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The value on the devices of the current mesh: ``nnx.eval_shape`` in ``jax.set_mesh`` gives a mesh without devices."""
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return value
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            "the model was made by nnx.eval_shape over a mesh that is no longer set: restore "
            "inside `with jax.set_mesh(mesh):`, or make it with ckpt_flax_nnx.abstract(make, mesh)"
        )
    return value.update(sharding=NamedSharding(mesh, sharding.spec))


def _set_variable(variable: Any, value: Any) -> None:
    current = variable.get_raw_value()
    if variablelib.is_array_ref(current):
        current[...] = value  # keep the reference: compiled steps and other objects may hold it
    else:
        variable.set_raw_value(value)


def _set_variables(live: Mapping[Key, Any], state: Mapping[Key, Any]) -> dict[Key, Any]:
    """Sets Variables and references; returns the remaining values, nested: the new bare leaves."""
    bare: dict[Key, Any] = {}
    for key, child in live.items():
        if key not in state:
            continue
        if isinstance(child, Mapping):
            if inner := _set_variables(child, state[key]):
                bare[key] = inner
        elif isinstance(child, nnx.Variable):
            _set_variable(child, state[key])
        elif variablelib.is_array_ref(child):
            child[...] = state[key]
        else:
            bare[key] = state[key]
    return bare


def _set_bare(node: Any, leaves: Mapping[Key, Any]) -> Any:
    """Sets new leaves on ``node``: returns it, changed in place, or a copy if it is immutable."""
    children = _children(node)
    changed: dict[Key, Any] = {}
    for key, leaf in leaves.items():
        new = _set_bare(children[key], leaf) if isinstance(leaf, dict) else leaf
        if new is not children[key]:
            changed[key] = new
    if not changed:
        return node
    if isinstance(node, nnx.Pytree):
        for key, new in changed.items():
            setattr(node, str(key), nnx.data(new))  # nnx.List also stores its items as attributes
        return node
    container: Any = node
    if isinstance(node, (list, dict, nnx.State)):
        for key, new in changed.items():
            container[key] = new
        return container
    _, treedef = _one_level(node)
    return treedef.unflatten([changed.get(key, child) for key, child in children.items()])


def _children(node: Any) -> dict[Key, Any]:
    """The children of a node by path part."""
    if isinstance(node, nnx.Pytree):
        attributes = vars(node)
        as_int = isinstance(node, nnx.List)
        return {int(k) if as_int and k.isdigit() else k: v for k, v in attributes.items()}
    if isinstance(node, Mapping):
        return dict(node)
    paths, _ = _one_level(node)
    return {_path_part(path[0]): child for path, child in paths}


def _one_level(node: Any) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _path_part(entry: Any) -> Key:
    """The part of an NNX path for an entry of a JAX key path."""
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


ADAPTER = NNXAdapter()
"""The entry point ``ckpt_core.adapters: flax`` refers to this object."""
