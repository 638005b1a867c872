"""What of Python a newcomer's script reaches files through, turned to the layer; see `tree`.

All of Python's own modules come down to `open` and to functions of `os`. References that modules have taken
of those before are replaced too; what libraries do by code of their own is the business of `libraries`. A
program that is started by a lower door than `subprocess` is not let through. Nor is a pause waited for that
was waited for before.

(An audit hook of the interpreter's would hear all else, and cannot be taken off again: it makes every `id()`
twenty times as slow.)
"""

from __future__ import annotations

import _io
import builtins
import functools
import io
import os
import posix
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, NoReturn

from ft_core.overlay import references
from ft_core.overlay.given import Given
from ft_core.overlay.libraries import Libraries
from ft_core.overlay.tree import CannotPass, PathLike, Tree

Function = Callable[..., Any]

_STREAMS = ("stdin", "stdout", "stderr")
_LOWER = (
    "open",
    "remove",
    "unlink",
    "rename",
    "replace",
    "mkdir",
    "rmdir",
    "symlink",
    "link",
    "truncate",
    "system",
)
"""What changes files: turned in the module below `os`, too."""
_PROGRAMS = ("posix_spawn", "posix_spawnp", "execv", "execve")
"""The functions of `os` that run a program; its other ways come down to these."""


class FileCalls:
    """From construction to `close` this process sees files through `tree`."""

    def __init__(self, tree: Tree, cannot: Callable[[str], NoReturn]) -> None:
        """`cannot` is called with the reason where the script cannot be kept from what is there, in any
        thread."""
        self.tree, self.refuse = tree, cannot
        self.completing: Callable[[], None] | None = None
        """Does for real what the script has done, once it is where that may have been done before or not."""
        self._process = os.getpid()
        self._open = True
        self._inside = threading.local()
        self._main = threading.get_ident()
        self._put: list[tuple[Any, str, Any]] = []
        """Owner, attribute, and what was there."""
        self._turned: dict[int, tuple[Function, Function]] = {}
        """By the original's identity: it, and what stands for it."""
        self._given = Given(self.turn, lambda: tree.passing)
        self._paused: set[tuple[CodeType, int]] = set()
        """Where the script has paused since its last step forward."""
        for module, made in ((os, self._of_os()), (builtins, {"open": self._opening(io.open)})):
            for name, function in made.items():
                self.turn(module, name, function)
        for module in (io, _io):
            self.turn(module, "open", builtins.open)
        self.turn(tempfile, "mkdtemp", self._temporary(tempfile.mkdtemp, lambda made: made))
        self.turn(tempfile, "mkstemp", self._temporary(tempfile.mkstemp, lambda made: made[1]))
        self.turn(subprocess, "Popen", self._program(subprocess.Popen))
        self.turn(os, "system", self._passed_program(os.system))
        self.turn(time, "sleep", self._passed_pause(time.sleep))
        self._put.append((shutil, "_use_fd_functions", shutil._use_fd_functions))  # type: ignore[attr-defined]
        shutil._use_fd_functions = False  # type: ignore[attr-defined] # by names, not relative to directories
        self.turn(shutil, "rmtree", self._removing(shutil.rmtree))
        Libraries(self)
        for name in _PROGRAMS:
            self.turn(os, name, self._refused(getattr(os, name)))
        self.turn(os, "_spawnvef", self._refused(os._spawnvef))  # type: ignore[attr-defined]
        for name in (*_LOWER, *_PROGRAMS):
            self.turn(posix, name, getattr(os, name))
        for owner, name, value in references.to(self._turned):
            self._put.append((owner, name, value))
            setattr(owner, name, self._turned[id(value)][1])

    def close(self) -> None:
        """Files are what they are again. References that were taken meanwhile lead there, too."""
        self._open = False
        for owner, name, before in reversed(self._put):
            setattr(owner, name, before)
        self._put.clear()

    @property
    def gave_away(self) -> bool:
        """Whether something of what the script did was, or is, done by a thread of its own."""
        return bool(self._given)

    def settle(self) -> None:
        """What the script has given to threads of its own is done before files are real."""
        if not self._given.done():
            self.refuse("what it has given to a thread of its own is not done after 10 s")

    @contextmanager
    def real(self) -> Iterator[None]:
        """What this thread does meanwhile is done for real."""
        before, self._inside.real = self._is_real, True
        try:
            yield
        finally:
            self._inside.real = before

    def really(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call it; its files are real."""
        with self.real():
            return function(*args, **kwargs)

    @property
    def _is_real(self) -> bool:
        return getattr(self._inside, "real", False)

    @property
    def off(self) -> bool:
        """Whether this thread's files are as they are."""
        return not self._open or self._is_real or self._has_ended()

    def _has_ended(self) -> bool:
        """In a process that the script has forked, to write checkpoints say, and that outlives the layer."""
        if os.getpid() != self._process:
            try:
                _stat(self.tree.upper)
            except FileNotFoundError:
                self._open = False
        return not self._open

    # -- replacing -----------------------------------------------------------------------------

    def turn(self, owner: Any, name: str, function: Function) -> None:
        before = getattr(owner, name, None)
        if before is None or before is function:
            return
        self._put.append((owner, name, before))
        self._turned[id(before)] = before, function
        setattr(owner, name, function)

    def within(self, function: Function) -> Function:
        """What the layer does by itself goes where it says, and what is too much for it ends this process."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                with self.real():
                    return function(*args, **kwargs)
            except CannotPass as error:
                self.refuse(str(error))

        return call

    def _either(self, original: Function, layered: Function) -> Function:
        """`layered` returns NotImplemented where the original is to be called."""
        inside = self.within(layered)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.off and (found := inside(*args, **kwargs)) is not NotImplemented:
                return found
            with self.real():
                return original(*args, **kwargs)

        return call

    # -- os ------------------------------------------------------------------------------------

    def _of_os(self) -> dict[str, Function]:
        made: dict[str, Function] = {}
        for name, follows in (
            ("stat", True),
            ("lstat", False),
            ("access", True),
            ("readlink", False),
            ("statvfs", True),
            ("listxattr", True),
            ("getxattr", True),
            ("chdir", True),
        ):
            made[name] = self._looking(getattr(os, name), follows)
        for name in ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr"):
            made[name] = self._changing(getattr(os, name), name != "lchown")
        made |= {
            "open": self._either(os.open, self._open_descriptor),
            "mkdir": self._either(
                os.mkdir, lambda p, mode=0o777, *, dir_fd=None: _done(self.tree.mkdir(p, dir_fd))
            ),
            "rmdir": self._either(
                os.rmdir, lambda p, *, dir_fd=None: _done(self.tree.remove(p, True, dir_fd))
            ),
            "symlink": self._either(
                os.symlink,
                lambda s, d, target_is_directory=False, *, dir_fd=None: _done(
                    self.tree.symlink(s, d, dir_fd)
                ),
            ),
            "link": self._either(os.link, self._linking),
            "truncate": self._either(os.truncate, self._truncating),
            "listdir": self._either(os.listdir, self._listing),
            "scandir": self._either(os.scandir, self._scanning),
        }
        for name in ("remove", "unlink"):
            made[name] = self._either(
                getattr(os, name), lambda p, *, dir_fd=None: _done(self.tree.remove(p, False, dir_fd))
            )
        for name in ("rename", "replace"):
            made[name] = self._either(
                getattr(os, name),
                lambda s, d, *, src_dir_fd=None, dst_dir_fd=None: _done(
                    self.tree.rename(s, d, src_dir_fd, dst_dir_fd)
                ),
            )
        return made

    def _looking(self, original: Function, follows: bool) -> Function:
        def look(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return NotImplemented
            follow = follows and kwargs.get("follow_symlinks", True)
            try:
                at = self.tree.location(path, follow, kwargs.get("dir_fd"))
            except FileNotFoundError:
                if original is _access:
                    return False
                raise
            if at is None:
                return NotImplemented
            if original is _chdir:
                raise CannotPass(f"it makes {os.fsdecode(path)} its working directory")
            kwargs.pop("dir_fd", None)
            if isinstance(path, bytes) and original is _readlink:
                return os.fsencode(original(at))
            return original(at, *args, **kwargs)

        return self._either(original, look)

    def _changing(self, original: Function, follows: bool) -> Function:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return NotImplemented
            follow = follows and kwargs.get("follow_symlinks", True)
            at = self.tree.changes(path, follow, kwargs.pop("dir_fd", None))
            return NotImplemented if at is None else original(at, *args, **kwargs) if at else None

        return self._either(original, change)

    def _open_descriptor(
        self, path: PathLike, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> Any:
        found = self.tree.open(path, flags, mode, dir_fd)
        return NotImplemented if found is None else found

    def _linking(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: Any = None,
        dst_dir_fd: Any = None,
        follow_symlinks: bool = True,
    ) -> Any:
        if src_dir_fd is not None or dst_dir_fd is not None:
            return NotImplemented
        return _done(self.tree.link(src, dst, follow_symlinks))

    def _truncating(self, path: Any, length: int) -> Any:
        if isinstance(path, int) or (found := self.tree.open(path, os.O_RDWR)) is None:
            return NotImplemented
        os.ftruncate(found, length)
        return os.close(found)

    def _listing(self, path: Any = ".") -> Any:
        if isinstance(path, int) or not self.tree.covers(name := self.tree.directory(path)):
            return NotImplemented
        with self.tree.lock:
            found = self.tree.names(name)
        return list(map(os.fsencode, found)) if isinstance(path, bytes) else found

    def _scanning(self, path: Any = ".") -> Any:
        path = "." if path is None else path
        if isinstance(path, int) or not self.tree.covers(name := self.tree.directory(path)):
            return NotImplemented
        with self.tree.lock:
            return _Scan(path, self.tree.names(name))

    # -- open ----------------------------------------------------------------------------------

    def _opening(self, original: Function) -> Function:
        def opener(path: Any, flags: int) -> int:
            found = self.tree.open(path, flags, 0o666)
            return os.open(path, flags, 0o666) if found is None else found

        def layered(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return original(file, mode, *args, **kwargs, opener=opener)

        turned = self.within(layered)

        @functools.wraps(original)
        def opening(file: Any, *args: Any, **kwargs: Any) -> Any:
            own = len(args) > 6 or kwargs.get("opener") is not None  # which goes by `os`
            if self.off or own or not isinstance(file, (str, bytes, os.PathLike)):
                return original(file, *args, **kwargs)
            kwargs.pop("opener", None)
            return turned(file, *args, **kwargs)

        return opening

    # -- what is made for real, and what is not done ----------------------------------------------

    def _temporary(self, original: Function, made: Callable[[Any], str]) -> Function:
        """A name that nobody else has, where nobody has asked for a place."""

        def temporary(suffix: Any = None, prefix: Any = None, dir: Any = None, *rest: Any) -> Any:
            if dir is not None:
                return NotImplemented
            result = original(suffix, prefix, dir, *rest)
            self.tree.own(made(result))
            return result

        turned = self._either(original, temporary)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.off or kwargs.get("dir") is not None or (len(args) > 2 and args[2] is not None):
                return original(*args, **kwargs)  # not inside: it goes by `os`
            return turned(*args, **kwargs)

        return call

    def _removing(self, original: Function) -> Function:
        """Remove a whole directory, which may have been removed when the step was done."""

        @functools.wraps(original)
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.off and self.tree.passing and not os.path.lexists(path):
                return None
            return original(path, *args, **kwargs)

        return rmtree

    def _program(self, original: type[subprocess.Popen[Any]]) -> Any:
        """A class, as some derive from it."""
        calls = self

        class Popen(original):  # type: ignore[misc, valid-type]
            def __init__(self, args: Any, *rest: Any, **kwargs: Any) -> None:
                passed = calls._passes_program()
                if passed and any(kwargs.get(name) == subprocess.PIPE for name in _STREAMS):
                    calls.refuse(f"it talks to a program ({_short(args)})")
                if passed:
                    args, kwargs = ["/bin/true"], {}  # it was run before, by the worker that was lost
                    rest = ()
                with calls.real():
                    super().__init__(args, *rest, **kwargs)

        Popen.__name__, Popen.__qualname__, Popen.__module__ = "Popen", "Popen", "subprocess"
        return Popen

    def _passed_program(self, original: Function) -> Function:
        @functools.wraps(original)
        def system(command: Any) -> int:
            if self._passes_program():
                return 0
            with self.real():
                return original(command)

        return system

    @property
    def is_passing(self) -> bool:
        """Whether the script does what was done before."""
        return self.tree.passing and self.completing is None

    def gets_on(self) -> None:
        """The script has come to another place."""
        self._paused.clear()

    def _passed_pause(self, original: Function) -> Function:
        @functools.wraps(original)
        def sleep(seconds: float) -> None:
            ours = not self.off and os.getpid() == self._process and threading.get_ident() == self._main
            if ours and self.is_passing and seconds >= 0:
                caller = sys._getframe(1)
                if (place := (caller.f_code, caller.f_lasti)) not in self._paused:
                    self._paused.add(place)
                    return
            original(seconds)  # or it waits for something, and looks again and again

        return sleep

    def _refused(self, original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._passes_program():
                self.refuse(f"it starts a program ({_short(args)})")
            return original(*args, **kwargs)

        return call

    def _passes_program(self) -> bool:
        """Whether one that the script starts was run before. It may need what the script has made for it,
        which is done for real where it is not passed. A process that the script has forked, to load data say,
        runs what it likes."""
        if self.off or not self.tree.passing or os.getpid() != self._process:
            return False
        if self.completing is None:
            return True
        with self.real():
            self.completing()
        return False


_readlink, _access, _chdir, _stat = os.readlink, os.access, os.chdir, os.stat


class _Scan(AbstractContextManager["_Scan"], Iterator["_Seen"]):
    """What `os.scandir` returns."""

    def __init__(self, path: Any, names: list[str]) -> None:
        self._path, self._names = path, iter(names)

    def __next__(self) -> _Seen:
        name: Any = next(self._names)
        name = os.fsencode(name) if isinstance(self._path, bytes) else name
        return _Seen(self._path, name)

    def close(self) -> None:
        self._names = iter(())

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Seen(os.PathLike[Any]):
    """Stands for an `os.DirEntry`."""

    def __init__(self, directory: Any, name: Any) -> None:
        self.name, self.path = name, os.path.join(os.fspath(directory), name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, what: Callable[[int], bool], follow: bool) -> bool:
        try:
            return what(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


def _done(layered: bool) -> Any:
    return None if layered else NotImplemented


def _short(args: Any) -> str:
    text = " ".join(map(str, args)) if isinstance(args, (list, tuple)) else str(args)
    return text if len(text) <= 80 else f"{text[:77]}..."
