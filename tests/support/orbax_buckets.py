"""Orbax on gs://: it reads and writes arrays through TensorStore, and small files through gcsfs."""

import io
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from etils import epath
from etils.epath import backend as epath_backend
from orbax.checkpoint._src.path import gcs_utils

from tests.support.gcs_server import Request, Server


class _Written(io.BytesIO):
    """A file that becomes an object when it is closed."""

    def __init__(self, keep: Callable[[bytes], None]) -> None:
        super().__init__()
        self._keep = keep

    def close(self) -> None:
        if not self.closed:
            self._keep(self.getvalue())
        super().close()


class StandIn(fsspec.AbstractFileSystem):
    """The small part of gcsfs that Orbax uses, on the objects of the server of this process.

    It has the same semantics: a folder is there while an object lies below it, and nothing makes one.
    """

    protocol = ("gs", "gcs")
    cachable = False
    server: Server

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("gs://").rstrip("/")

    def _key(self, path: str) -> str:
        return self._strip_protocol(path).partition("/")[2]

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path, key = self._strip_protocol(path), self._key(path)
        found: dict[str, dict[str, Any]] = {}
        for name, (_generation, data) in list(self.server.objects.items()):
            if name == key:
                found[path] = {"name": path, "size": len(data), "type": "file"}
            elif name.startswith(f"{key}/" if key else ""):
                below, deeper, _rest = name[len(key) :].removeprefix("/").partition("/")
                kind = "directory" if deeper else "file"
                full = f"{path}/{below}"
                found[full] = {"name": full, "size": 0 if deeper else len(data), "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        key = self._key(path)
        if mode == "rb":
            if key not in self.server.objects:
                raise FileNotFoundError(path)
            return io.BytesIO(self.server.objects[key][1])
        assert mode in ("wb", "xb"), mode
        return _Written(lambda data: self._put(key, data))

    def _put(self, key: str, data: bytes) -> None:
        with self.server.lock:
            self.server.generation += 1
            self.server.objects[key] = self.server.generation, data
        self.server.lost(Request("put", self.server.bucket, key))

    def _rm(self, path: str) -> None:
        with self.server.lock:
            self.server.objects.pop(self._key(path), None)
        self.server.lost(Request("delete", self.server.bucket, self._key(path)))


class OrbaxBucket:
    """A bucket of a server, in which Orbax and we work; Orbax sees it through ``files``."""

    def __init__(self, server: Server, files: fsspec.AbstractFileSystem) -> None:
        self.server = server
        self.root = f"{server.root}/run"
        self._files = files

    @property
    def seen(self) -> epath.Path:
        """The directory of steps as a process of Orbax sees it that starts now: gcsfs keeps listings."""
        self._files.invalidate_cache()
        return epath.Path(self.root)

    def moments(self, work: Callable[[], Any]) -> list[dict[str, tuple[int, bytes]]]:
        """What the bucket held after each object that the work put or deleted."""
        found: list[dict[str, tuple[int, bytes]]] = []

        def note(_: Request) -> None:
            with self.server.lock:
                found.append(dict(self.server.objects))

        self.server.lost = note
        try:
            work()
        finally:
            self.server.lost = lambda _: None
        return found

    def set(self, objects: dict[str, tuple[int, bytes]]) -> None:
        """Puts back what the bucket held at some moment."""
        with self.server.lock:
            self.server.objects = dict(objects)


@pytest.fixture(name="bucket")
def make_bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> OrbaxBucket:
    """A bucket that Orbax sees through what stands in for gcsfs."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    files = StandIn()
    files.server = server
    # google-cloud-storage comes with gcsfs; Orbax asks it about hierarchical buckets
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda _: False)
    # epath asks once per process, and every test has a server of its own
    monkeypatch.setattr(epath_backend.fsspec_backend, "_get_filesystem", lambda _: files)
    return OrbaxBucket(server, files)
