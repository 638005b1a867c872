"""Libraries that reach files by code of their own: they are given another name to write to, or to read.

Only those that are known are seen. Of what changes a part of a file the layer has a copy that is changed.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn, Protocol

from ft_core import import_hook
from ft_core.overlay.tree import PathLike, Tree

Function = Callable[..., Any]
Turn = Callable[[PathLike, str], str | None]
"""A file's name and how it is opened -> where in the layer that is; None: nowhere else."""

_WRITERS = {
    "torch": (("save", 1, "f"),),
    "torch.jit": (("save", 1, "f"),),
    "safetensors.torch": (("save_file", 1, "filename"), ("serialize_file", 1, "filename")),
    "safetensors.numpy": (("save_file", 1, "filename"), ("serialize_file", 1, "filename")),
    "tokenizers": (("Tokenizer.save", 1, "path"),),
    "pyarrow": (("output_stream", 0, "source"), ("create_memory_map", 0, "path")),
    "pyarrow.csv": (("write_csv", 1, "output_file"), ("CSVWriter", 0, "sink")),
    "pyarrow.feather": (("write_feather", 1, "dest"),),
    "pyarrow.ipc": (("RecordBatchFileWriter", 0, "sink"), ("RecordBatchStreamWriter", 0, "sink")),
    "pyarrow.orc": (("write_table", 1, "where"), ("ORCWriter", 0, "where")),
    "pyarrow.parquet": (("write_metadata", 1, "where"), ("ParquetWriter", 0, "where")),
    "cv2": (("imwrite", 0, "filename"), ("VideoWriter", 0, "filename")),
    "polars": tuple((f"DataFrame.write_{form}", 1, "file") for form in ("parquet", "csv", "ipc")),
}
"""Module -> functions and classes that write a whole file by its name: which argument that is, and what it is
called. Others of the module's come down to these."""
_READERS = {
    "safetensors.torch": (("load_file", 0, "filename"), ("safe_open", 0, "filename")),
    "safetensors": (("safe_open", 0, "filename"),),
    "tokenizers": (("Tokenizer.from_file", 0, "path"),),
    "pyarrow": (("input_stream", 0, "source"),),
    "pyarrow.csv": (("read_csv", 0, "input_file"), ("open_csv", 0, "input_file")),
    "pyarrow.dataset": (("dataset", 0, "source"),),
    "pyarrow.feather": (("read_table", 0, "source"), ("read_feather", 0, "source")),
    "pyarrow.ipc": (("RecordBatchFileReader", 0, "source"), ("RecordBatchStreamReader", 0, "source")),
    "pyarrow.json": (("read_json", 0, "input_file"),),
    "pyarrow.orc": (("read_table", 0, "source"), ("ORCFile", 0, "source")),
    "pyarrow.parquet": (("read_table", 0, "source"), ("ParquetFile", 0, "source")),
    "cv2": (("imread", 0, "filename"), ("VideoCapture", 0, "filename")),
    "polars": tuple((f"read_{form}", 0, "source") for form in ("parquet", "csv", "ipc")),
}
"""The same of those that read one."""
_BOTH = {
    "pyarrow": (("OSFile", 0, "path"), ("memory_map", 0, "path")),
    "h5py._hl.files": (("File", 0, "name"),),
    "netCDF4": (("Dataset", 0, "filename"),),
    "soundfile": (("SoundFile", 0, "file"),),
}
"""The same of those that are told how by the next argument, `mode`, which is to read unless it is given."""
_DIRECTORIES = {
    "pyarrow.dataset": (("write_dataset", 1, "base_dir"),),
}
"""The same of those that write several files, by names of their own."""
_DATABASES = ("sqlite3", "sqlite3.dbapi2")
_UNCHANGED = re.compile(r"[?&](mode=(ro|memory)|immutable=1)")
"""In the name of a database: it has no file that is changed."""


def functions() -> list[Any]:
    """Those that modules may have taken by their names, of what is imported."""
    found: list[Any] = []
    for module in _DATABASES:
        found += [getattr(sys.modules.get(module), "connect", None)]
    for table in (_WRITERS, _READERS, _BOTH, _DIRECTORIES):
        for module, names in table.items():
            found += [getattr(sys.modules.get(module), name, None) for name, _, _ in names]
    return [each for each in found if each is not None]


class Calls(Protocol):
    """What turns functions; see `ft_core.overlay.calls`."""

    tree: Tree
    completing: Callable[[], None] | None

    @property
    def off(self) -> bool:
        """Whether this thread's files are as they are."""

    def refuse(self, what: str) -> NoReturn:
        """It cannot be kept from harm."""

    def turn(self, owner: Any, name: str, function: Function) -> None:
        """Put a function in the place of another."""

    def within(self, function: Function) -> Function:
        """The layer's own function, whose files are real."""

    def really(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call it; its files are real."""


class Libraries:
    """Turned as they are imported."""

    def __init__(self, calls: Calls) -> None:
        """Those that are imported are turned at once."""
        self._calls = calls
        tables = (
            (_WRITERS, self._writes),
            (_READERS, self._reads),
            (_BOTH, self._either),
            (_DIRECTORIES, self._makes_many),
        )
        for table, turn in tables:
            for library, names in table.items():
                import_hook.after_import(library, functools.partial(self._turn, names, calls.within(turn)))
        for library in _DATABASES:
            import_hook.after_import(library, self._sqlite)

    def _writes(self, path: PathLike, _: str) -> str | None:
        return self._calls.tree.write(path)

    def _reads(self, path: PathLike, _: str) -> str | None:
        return self._calls.tree.location(path)

    def _either(self, path: PathLike, mode: str) -> str | None:
        if mode.startswith(("w", "x")):
            return self._calls.tree.write(path, exclusive=mode in ("x", "w-"))
        return self._reads(path, mode) if mode in ("r", "rb") else self._changes(path)

    def _changes(self, path: PathLike) -> str | None:
        if self._calls.completing is not None:  # nobody knows how much of it was done before
            self._calls.refuse(f"it changes a part of {os.fsdecode(path)}")
        return self._calls.tree.change(path)

    def _makes_many(self, path: PathLike, _: str) -> str | None:
        self._calls.refuse(f"it writes the files of {os.fsdecode(path)} by a library's own code")

    def _turn(self, names: Any, turn: Turn, module: Any) -> None:
        for name, at, called in names:
            of, _, method = name.partition(".")
            if (original := getattr(module, of, None)) is None:
                continue
            if method:
                if (found := getattr(original, method, None)) is not None:
                    turned = self._by_name(found, turn, at, called)
                    static = isinstance(vars(original).get(method), staticmethod)
                    self._calls.turn(original, method, staticmethod(turned) if static else turned)
            elif isinstance(init := getattr(original, "__dict__", {}).get("__init__"), FunctionType):
                self._calls.turn(original, "__init__", self._by_name(init, turn, at + 1, called))
            else:
                self._calls.turn(module, of, self._by_name(original, turn, at, called))

    def _by_name(self, original: Function, turn: Turn, at: int, called: str) -> Function:
        calls = self._calls

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            path = args[at] if len(args) > at else kwargs.get(called)
            if calls.off or not isinstance(path, (str, bytes, os.PathLike)):
                return original(*args, **kwargs)
            mode = args[at + 1] if len(args) > at + 1 else kwargs.get("mode", "r")
            if (where := turn(path, mode if isinstance(mode, str) else "r")) is not None:
                if len(args) > at:
                    args = (*args[:at], where, *args[at + 1 :])
                else:
                    kwargs[called] = where
            return calls.really(original, *args, **kwargs)

        return call

    def _sqlite(self, module: Any) -> None:
        """Whose own code changes parts of a file. Whether it is open at the end is seen then."""
        original, calls, turn = module.connect, self._calls, self._calls.within(self._changes)

        @functools.wraps(original)
        def connect(*args: Any, **kwargs: Any) -> Any:
            path = args[0] if args else kwargs.get("database")
            if calls.off or not isinstance(path, (str, bytes, os.PathLike)):
                return original(*args, **kwargs)
            text = os.fsdecode(path)
            if text not in ("", ":memory:") and not (kwargs.get("uri") and _UNCHANGED.search(text)):
                if kwargs.get("uri"):
                    calls.refuse(f"it changes the database {text}")
                if (where := turn(path)) is not None:
                    kwargs.pop("database", None)
                    args = (where, *args[1:])
            return calls.really(original, *args, **kwargs)

        calls.turn(module, "connect", connect)
