"""The adapter that its author would write, and what could be wrong with it."""

import copy
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from abacus import Abacus, aligned


def fault() -> str:
    """What is wrong just now; nothing but in tests of the suite itself."""
    return os.environ.get("ABACUS_FAULT", "")


class AbacusAdapter:
    def accepts(self, cls: type, /) -> bool:
        return issubclass(cls, Abacus)

    def get_state(self, obj: Abacus, /) -> dict[str, Any]:
        state = {"rows": list(obj.rows), "key": obj.key, "beads": obj.beads, "moves": obj.moves}
        if fault() == "alias":  # a jax array over memory that the object goes on changing
            state["beads"] = jax.dlpack.from_dlpack(obj.beads)
        if fault() == "forget":
            del state["key"]
        if fault() == "touch":
            obj.moves += 1
        if fault() == "cut":
            state["rows"] = state["rows"][:1]
        return state

    def set_state(self, obj: Abacus, state: dict[str, Any], /) -> None:
        if fault() == "creep":
            obj.moves += 1
        obj.rows = list(state["rows"]) + ([obj.rows[1]] if fault() == "cut" else [])
        if fault() == "gather":
            obj.rows = [jnp.asarray(np.asarray(row)) for row in obj.rows]
        if fault() == "commit":
            obj.rows = [jax.device_put(row, jax.devices()[0]) for row in obj.rows]
        obj.key = state.get("key", obj.key)
        if fault() == "shallow":
            obj.beads[...] = state["beads"]
        else:
            obj.beads = aligned(np.asarray(state["beads"]))
        obj.moves = obj.moves if fault() == "creep" else state["moves"]

    def copy(self, objects: Sequence[Abacus], /) -> list[Abacus]:
        if fault() == "same":
            return list(objects)
        copies = [copy.copy(obj) for obj in objects]
        for made in copies:
            made.beads = made.beads if fault() == "shallow" else aligned(made.beads)
        return copies


ADAPTER = AbacusAdapter()
