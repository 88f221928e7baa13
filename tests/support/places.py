"""A directory of steps on a disk, and one in a store: in memory, on a server of Google's API, on SeaweedFS."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._storage import KeyValues, Location
from tests.support.stores import WITH_STORES, url_of_kind

QUICK = ckpt.Options(durable=False)
OWNER = ".ckpt-owner"


class Place:
    """Where steps lie, with a way to look at and change the files there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.local = "://" not in url

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url}/{name}")

    def names(self) -> list[str]:
        """Every file, but for the note that says which run the directory belongs to."""
        if self.local:
            files = [path for path in Path(self.url).rglob("*") if path.is_file()]
            names = sorted(str(path.relative_to(self.url)) for path in files)
        else:
            names = self._keys().list()
        return [name for name in names if name != OWNER]

    def entries(self) -> list[str]:
        """What lies in a local directory, but for the same note."""
        return sorted(name for name in os.listdir(self.url) if name != OWNER)

    def read(self, name: str) -> bytes:
        return Path(self.url, name).read_bytes() if self.local else self._keys().get(name) or b""

    def write(self, name: str, data: bytes) -> None:
        if self.local:
            Path(self.url, name).write_bytes(data)
        else:
            self._keys().put(name, data)

    def remove(self, name: str) -> None:
        if self.local:
            os.remove(f"{self.url}/{name}")
        else:
            self._keys().delete([name])

    def damage(self, step: int) -> None:
        """Flips one bit of the values of the array `w` that `state` made."""
        values = state(step)["w"].tobytes()
        for name in self.names():
            data = bytearray(self.read(name))
            where = data.find(values)
            if name.startswith(f"{step}/") and where >= 0:
                data[where + 5] ^= 1
                self.write(name, bytes(data))
                return
        raise AssertionError("the array was not found")

    def _keys(self) -> KeyValues:
        return KeyValues(Location(self.url, False))


@pytest.fixture(name="place", params=WITH_STORES)
def make_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "run"))
    return Place(url_of_kind(request, request.param))


@pytest.fixture(name="local")
def make_local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"))


@pytest.fixture(name="asynchronous", params=[True, False], ids=["async", "sync"])
def make_asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param


def state(step: int) -> dict[str, Any]:
    """A state that differs for every step, in arrays too large to stand in the index."""
    return {"w": np.arange(64, dtype=np.float32) + 1000 * step, "n": step}


def open_at(place: Place, **arguments: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(place.url, options=arguments.pop("options", QUICK), **arguments)


def write(place: Place, *steps: int, **arguments: Any) -> None:
    with open_at(place, **arguments) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, state(step), force=True)


def same(tree: Any, step: int) -> bool:
    return tree["n"] == step and np.array_equal(np.asarray(tree["w"]), state(step)["w"])
