"""Items that are no pytrees, as a caller passes and gets them: ``Files`` and ``Json``.

They are no dataclasses, which would be pytrees: inside of a tree they are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Files:
    """An item of any files: tokenizers, vocabularies, configurations, code.

    Saved with the checkpoint, as atomic and checksummed as the rest of it; loaded as ``SavedFiles``. Where several
    processes run, process 0 saves its files, and all load them.

    - Links are followed: what they lead to is saved. Pipes, sockets, devices, dangling links and links that lead in
      a circle are refused. Empty directories and the permissions of files are not saved.
    - Files of less than 1 MiB, up to 64 MiB together, are read before the call returns. Others are copied while the
      save runs: one that changes before an asynchronous save has ended makes the save fail.
    - A Checkpointer hard-links files of 1 MiB and more that hold the bytes of the last step
      (``Options.link_unchanged``).
    - In a bucket every file is one object. Files are held in memory until the save has ended, so they may have
      ``Options.max_host_bytes`` together.

    Args:
        source: path of a file or a directory, in which the checkpoint itself must not lie; or a function, which is
            called once for each save, before the save returns, with the path of an empty directory to write into.
            With ``local_directory=`` it may be called for each tier.

    Example:
        >>> import ckpt_core as ckpt, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "vocabulary.txt").write_text("a b c")
        >>> ckpt.save(folder / "step", model={"w": 1.0}, tokenizer=ckpt.Files(folder / "vocabulary.txt"))
        >>> ckpt.load(folder / "step")["tokenizer"].read("vocabulary.txt")
        b'a b c'
    """

    __slots__ = ("orbax_handler", "source")

    def __init__(self, source: str | os.PathLike[str] | Callable[[Path], Any]) -> None:
        self.source: Any = source
        # type name of the handler by which Orbax loads them; None: it loads a list of them, as JSON
        self.orbax_handler: str | None = None
        if not (callable(source) or isinstance(source, str | os.PathLike)):
            wanted = "a path, or a function that writes into a directory"
            raise TypeError(f"Files takes {wanted}; got {source!r}")
        if not callable(source):
            _refuse_no_path(source)

    def __repr__(self) -> str:
        return f"Files({self.source!r})"


class Json:
    """An item of plain values, stored as JSON: Orbax's Json handlers read it too.

    Loaded as the value itself; tuples come back as lists. Keys that are no text, and values that JSON does not have,
    are refused. Later changes of the value are not saved. A loaded value that is saved again needs ``Json`` around
    it, if Orbax is to read it as JSON; without, it is a tree, which a target ``ckpt.Json`` takes, too.

    Args:
        value: dicts with text keys, lists, text, numbers, True, False, None.

    Example:
        >>> import ckpt_core as ckpt, tempfile
        >>> path = tempfile.mkdtemp() + "/step"
        >>> ckpt.save(path, model={"w": 1.0}, config=ckpt.Json({"layers": 3}))
        >>> ckpt.load(path)["config"]
        {'layers': 3}
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Json({self.value!r})"


class SavedFiles:
    """The files of an item of a checkpoint, which are read when they are asked for.

    The load has verified every byte. They are read from the checkpoint, and verified again: if that is deleted, by a
    policy of its run for example, CheckpointNotFound is raised. Pass it to ``save`` to save the same files again.
    """

    def __init__(
        self,
        where: str,
        sizes: Mapping[str, int],
        read: Callable[[str], bytes],
        copy: Callable[[str], None],
    ) -> None:
        self._where, self._read, self._copy = where, read, copy
        self._sizes = dict(sorted(sizes.items()))

    def names(self) -> list[str]:
        """Paths of the files, relative to the directory that was saved, with ``/`` between names."""
        return list(self._sizes)

    def size(self, name: str) -> int:
        """Size of a file in bytes.

        Raises:
            KeyError: there is no such file.
        """
        self._refuse_unknown(name)
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        """The content of a file, verified.

        Raises:
            KeyError: there is no such file.
            CheckpointCorrupt: it is damaged.
            CheckpointNotFound: the checkpoint was deleted or replaced.
        """
        self._refuse_unknown(name)
        return self._read(name)

    def copy_to(self, directory: str | os.PathLike[str]) -> Path:
        """Copies all files into a directory, which is created if it is missing; returns its path.

        Each file is verified and appears whole, in place of one of its name.

        Raises:
            ValueError: ``directory`` is empty, or a URL.
            CheckpointCorrupt: a file is damaged; it is not copied.
            CheckpointNotFound: the checkpoint was deleted or replaced.
        """
        _refuse_no_path(directory)
        target = os.path.expanduser(directory)
        self._copy(target)
        return Path(target)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"SavedFiles({len(self._sizes)} files, {sum(self._sizes.values())} bytes, {self._where!r})"

    def _refuse_unknown(self, name: str) -> None:
        if name not in self._sizes:
            known = ", ".join(list(self._sizes)[:5]) or "none"
            raise KeyError(f"{self._where} holds no file {name!r}; it holds {known}")


def _refuse_no_path(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for what would be taken for a path in the present directory."""
    text = os.fspath(path)
    if not text:
        raise ValueError("the path is empty; '.' is the present directory")
    if "://" in text:
        raise ValueError(
            f"{text!r} is a URL, where a path on a disk is wanted: copy between the two, or mount the bucket"
        )


def names_a_form(target: Any) -> str | None:
    """The form of item that a target of a restore stands for; None if it is a tree or an object."""
    kind: type[Any] = target if isinstance(target, type) else type(target)
    if issubclass(kind, Files | SavedFiles):
        return "files"
    return "json" if issubclass(kind, Json) else None
