"""A layer above the directories that a job writes to, after the model of the kernel's overlay file system.

A newcomer's script runs from its top, and what it writes, renames and removes on its way was written, renamed
and removed before, in steps of which the files are long there. So all of that goes to an upper layer, which
it alone sees; below are the real directories, which are only read. A file that is changed is copied up first;
what is removed is hidden by a whiteout.

In start-up (`passing` is False) a file or directory that nobody has made yet is made for real, and is the
newcomer's own from then on: caches that are cold, and names by the clock. What is there already is changed in
the layer alone. Once steps are passed over, what is there is what was made in them: to make it, or to remove
what is gone, succeeds as it did the first time. What the script writes meanwhile is not what it would have
written in those steps, and stays in the layer even in directories of the newcomer's own.

A layer that needs no privilege: file systems mounted in a name space of the newcomer's would be the kernel's
own, and are forbidden in most containers.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PathLike = str | bytes | os.PathLike[Any]

_LINKS = 40
"""Followed in one path, before it is taken for a circle; as in the kernel."""
_WRITES = os.O_WRONLY | os.O_RDWR
_COPIED = 1 << 30
"""Bytes of a file that is copied up, at most. What changes parts of a larger one is not passed over."""

_CACHES = re.compile(r"/\.|cache", re.IGNORECASE)
"""In names of what anybody may write at any time, and whose content does not depend on when it is read."""
_READ = 256
"""Files of which it is known that they were read."""
_LONGEST = 16
"""The most characters of a suffix of a file's name."""

# What the interpreter has; `ft_core.overlay.calls` puts others in their places.
_open, _stat, _lstat, _listdir, _readlink = os.open, os.stat, os.lstat, os.listdir, os.readlink
_mkdir, _unlink, _symlink = os.mkdir, os.unlink, os.symlink


class CannotPass(Exception):  # noqa: N818 - said of the script
    """The script does what cannot be kept from files that are there. Says what."""


@dataclass
class File:
    """Content somewhere else than its name says."""

    at: str
    """In the layer, or of a real file that was renamed in it."""
    upper: bool
    """The former."""
    base: int = -1
    """Bytes that were there when it was copied up; -1: it was begun anew."""
    later: bool = False
    """Whether what comes after those is of a later step, so that nothing of before is missing."""


@dataclass(frozen=True)
class Link:
    """A symbolic one."""

    target: str
    at: str
    """In the layer."""


@dataclass(frozen=True)
class Dir:
    """Made in the layer: nothing of what is real is seen in it."""

    at: str
    """An empty one, for what the kernel knows of a directory."""


class Gone:
    """A whiteout: what is below is not seen."""


Identity = tuple[int, ...]
"""What tells a real file from another, or from itself once it is changed; a directory from another."""


@dataclass(frozen=True)
class Removal:
    """What the script has removed, or moved away."""

    number: int
    """Its place among all changes in the layer."""
    real: dict[str, Identity]
    """What was there, by name; what is below comes first."""


Entry = File | Link | Dir | Gone


class Tree:
    """The layer. All paths of its methods are the script's; errors are OSErrors as the kernel's."""

    def __init__(self, upper: str, untouched: tuple[str, ...] = ()) -> None:
        """`upper`: a directory for contents. `untouched`: how names begin that are left alone."""
        self.upper, self._untouched = os.path.realpath(upper), untouched
        self.passing = False
        """Whether steps are passed over; before, the script starts up."""
        self.lock = threading.RLock()
        os.register_at_fork(after_in_child=self._unlock)
        self._entries: dict[str, Entry] = {}
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        """Directory -> names that have an entry in it."""
        self._owned: set[str] = set()
        """What this process has made for real in start-up."""
        self._temporary: set[str] = set()
        """What it has made under names that nobody else has."""
        self._made_again: set[str] = set()
        """Directories that are there below, and that the script has made on its way."""
        self.opened: dict[int, str] = {}
        """Descriptors that it was given -> the file in the layer. Some may be closed."""
        self.read: dict[str, float] = {}
        """Files that were read in start-up, and when each was written, the newest ones; caches, and what this
        process has made, do not count."""
        self.notes_removals = False
        """Whether what is removed may be there since, or no more."""
        self.removals: list[Removal] = []
        """What of the real directories was removed, in order."""
        self.done_before = 0
        """How many of all changes in the layer had been done before, as what was moved then tells."""
        self._changes = 0
        self._numbers: dict[str, int] = {}
        """Name -> the place of its entry's last change among all."""
        self._linked = False
        """Whether a path may lead through a link that is in the layer alone."""
        self._made = 0

    def _unlock(self) -> None:
        """A thread that had it is not in a process that was forked meanwhile."""
        self.lock = threading.RLock()

    # -- look-up -------------------------------------------------------------------------------

    def canonical(self, path: PathLike, follow: bool = True, dir_fd: int | None = None) -> str:
        """Its absolute name, with all symbolic links followed, or all but the last."""
        text = os.fsdecode(path)
        if not text:
            raise _error(errno.ENOENT, path)
        if not text.startswith("/"):
            base = os.getcwd() if dir_fd is None else _readlink(f"/proc/self/fd/{dir_fd}")
            text = f"{base}/{text}"
        rest, done, links = text.split("/")[::-1], "/", 0
        while rest:
            part = rest.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = os.path.dirname(done)
                continue
            here = f"{done}/{part}" if done != "/" else f"/{part}"
            if f"{here}/".startswith(self._untouched):  # links of the kernel's lead where no name does
                return "/".join([here, *reversed(rest)])
            target = self._target(here) if follow or any(rest) else None
            if target is None:
                done = here
                continue
            if (links := links + 1) > _LINKS:
                raise _error(errno.ELOOP, path)
            done = "/" if target.startswith("/") else done
            rest.extend(target.split("/")[::-1])
        return done

    def _target(self, path: str) -> str | None:
        entry = self._entries.get(path)
        if isinstance(entry, Link):
            return entry.target
        if entry is not None or self._hidden(path):
            return None
        try:
            return _readlink(path)
        except OSError:
            return None

    def _hidden(self, path: str) -> bool:
        """Whether what the real directories have there is not seen, because of what is above it."""
        if not self._entries:
            return False
        while (path := os.path.dirname(path)) != "/":
            if path in self._entries:
                return True
        return False

    def is_real(self, path: str) -> bool:
        """Whether this layer leaves a canonical name alone."""
        if path.startswith(self._untouched):
            return True
        return _is_within(path, self._temporary) or (not self.passing and _is_within(path, self._owned))

    def is_own(self, path: str) -> bool:
        """Whether this process has made it for real, or what it is in."""
        return _is_within(path, self._owned)

    def covers(self, path: str) -> bool:
        """Whether at a canonical name, or right below, something else is seen than is real."""
        return self._linked or path in self._entries or path in self._names or self._hidden(path)

    def find(self, path: str) -> Entry | None:
        """What is seen under a canonical name; None: what is real."""
        if (entry := self._entries.get(path)) is not None:
            return entry
        return Gone() if self._hidden(path) else None

    def location(self, path: PathLike, follow: bool = True, dir_fd: int | None = None) -> str | None:
        """Where to look at it instead; None: where it says. Raises FileNotFoundError."""
        with self.lock:
            found = self.find(name := self.canonical(path, follow, dir_fd))
            if isinstance(found, Gone):
                raise self._absent(name, path)
            if found is not None:
                return found.at
            return name if self._linked else None

    def kind(self, name: str) -> int:
        """The type, as in `st_mode`, of what is seen under a canonical name; 0: nothing is there."""
        found = self.find(name)
        if isinstance(found, Link):
            return stat.S_IFLNK
        if isinstance(found, Dir):
            return stat.S_IFDIR
        if isinstance(found, Gone):
            return 0
        try:
            return stat.S_IFMT(_lstat(found.at if found else name).st_mode)
        except OSError:
            return 0

    def directory(self, path: PathLike) -> str:
        """The canonical name of one whose names are wanted. Raises OSError where it is known to be none."""
        name = self.canonical(path)
        found = self.find(name)
        if isinstance(found, Gone):
            raise self._absent(name, path)
        if isinstance(found, File | Link):
            raise _error(errno.ENOTDIR, path)
        return name

    def names(self, path: str) -> list[str]:
        """In a directory, by its canonical name. Raises OSError."""
        found = self.find(path)
        below = [] if isinstance(found, Dir) else _listdir(path)
        above = self._names.get(path, set())
        seen = [name for name in below if name not in above]
        return seen + sorted(n for n in above if not isinstance(self._entries[_join(path, n)], Gone))

    # -- changes -------------------------------------------------------------------------------

    def open(self, path: PathLike, flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int | None:
        """Do as `os.open` does; None: the layer has nothing to do with it."""
        with self.lock:
            writes = bool(flags & (_WRITES | os.O_TRUNC))
            name = self.canonical(path, not flags & os.O_NOFOLLOW, dir_fd)
            if self.is_real(name) or (flags & os.O_TMPFILE) == os.O_TMPFILE:
                return None
            found, kind = self.find(name), self.kind(name)
            if not writes and not (flags & os.O_CREAT and not kind):
                if isinstance(found, Gone):
                    raise self._absent(name, path)
                at = name if found is None else found.at
                if found is None and not self.passing:
                    self.has_read(name)
                if found is None and not self._linked:
                    return None
                return _open(at, flags & ~(os.O_CREAT | os.O_EXCL))
            if flags & os.O_CREAT and flags & os.O_EXCL:
                if self._has_made(name):
                    raise _error(errno.EEXIST, path)
                flags |= os.O_TRUNC
            if isinstance(found, Dir):
                raise _error(errno.EISDIR, path)
            if kind not in (0, stat.S_IFREG):
                return None  # a pipe, a device, a terminal; a directory, of which the kernel complains
            if not kind and not flags & os.O_CREAT:
                raise self._absent(name, path)
            if not self.passing and found is None:
                if not kind:
                    self._owned.add(name)  # and if that fails, there is nothing to own
                    return None
                if not flags & (os.O_TRUNC | os.O_APPEND):
                    return None  # to change parts of a file, or map it: a data set, mostly
            if not kind:
                self._parent(name, path)
            file = self._raised(name, found, kind, flags, path)
            descriptor = _open(file.at, flags & ~(os.O_EXCL | os.O_NOFOLLOW), mode)
            self.opened[descriptor] = file.at
            return descriptor

    def has_read(self, name: str) -> None:
        """In start-up the script has read a real file, by its canonical name."""
        try:
            seen = _stat(name)
        except OSError:
            return
        if stat.S_ISREG(seen.st_mode) and not _CACHES.search(name):
            self.read[name] = seen.st_mtime
        if len(self.read) > _READ:
            del self.read[min(self.read, key=self.read.__getitem__)]

    def _raised(self, name: str, found: Entry | None, kind: int, flags: int, path: PathLike) -> File:
        """The file in the layer, to be written to."""
        if isinstance(found, File) and found.upper:
            found.base = -1 if flags & os.O_TRUNC else found.base
            self._set(name, found)
            return found
        file = found if isinstance(found, File) else File(name, False)
        below, file.at, file.upper, file.base = file.at, self._new(name), True, -1
        if kind:
            if not os.access(below, os.W_OK):
                raise _error(errno.EACCES, path)
            file.base = -1 if flags & os.O_TRUNC else self._copy(below, file.at, path)
        self._set(name, file)
        return file

    def _copy(self, source: str, target: str, path: PathLike) -> int:
        size = _stat(source).st_size
        if size > _COPIED:
            raise CannotPass(f"it changes a part of {os.fsdecode(path)}, which has {size / 2**30:.1f} GiB")
        shutil.copyfile(source, target)
        return size

    def write(self, path: PathLike, exclusive: bool = False) -> str | None:
        """Where a library's own code is to write the whole file that it makes by this name; None: there.
        `exclusive`: it makes one that is not there. Raises OSError."""
        descriptor = self.open(
            path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC), 0o666
        )
        if descriptor is None:
            return None
        at = self.opened.pop(descriptor)
        os.close(descriptor)
        if exclusive:
            os.unlink(at)
        return at

    def change(self, path: PathLike) -> str | None:
        """Where a library's own code is to change parts of a file, or begin one; None: there."""
        with self.lock:
            name = self.canonical(path)
            found, kind = self.find(name), self.kind(name)
            if self.is_real(name) or kind not in (0, stat.S_IFREG) or (not kind and self._begins(name)):
                return None
            if not kind:
                self._parent(name, path)
            return self._raised(name, found, kind, 0, path).at

    def own(self, path: PathLike) -> None:
        """It was made for real, and is nobody else's."""
        with self.lock:
            self._temporary.add(os.path.realpath(os.fsdecode(path)))

    def mkdir(self, path: PathLike, dir_fd: int | None = None) -> bool:
        """Do as `os.mkdir` does. False, here and below: it is to be done for real."""
        with self.lock:
            if (name := self._to_make(path, dir_fd)) is None:
                return False
            if self.kind(name) == stat.S_IFDIR:
                self._made_again.add(name)
            else:
                self._set(name, self._made_dir())
            return True

    def symlink(self, target: PathLike, path: PathLike, dir_fd: int | None = None) -> bool:
        """Do as `os.symlink` does."""
        with self.lock:
            if (name := self._to_make(path, dir_fd)) is None:
                return False
            self._set(name, self._made_link(os.fsdecode(target)))
            return True

    def remove(self, path: PathLike, directory: bool, dir_fd: int | None = None) -> bool:
        """Do as `os.unlink` or `os.rmdir` does."""
        with self.lock:
            name = self.canonical(path, False, dir_fd)
            if self.is_real(name) or (self.is_own(name) and not self.covers(name)):
                self._disown(name)
                return False
            kind = self.kind(name)
            if not kind and self.passing:
                return True
            if not kind:
                raise self._absent(name, path)
            if directory != (kind == stat.S_IFDIR):
                raise _error(errno.ENOTDIR if directory else errno.EISDIR, path)
            if directory and self.names(name):
                raise _error(errno.ENOTEMPTY, path)
            self._note_removal(name, lambda name: {name: identity(name)})  # what was in it went before
            self._drop(name)
            return True

    def rename(
        self, source: PathLike, target: PathLike, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> bool:
        """Do as `os.replace` does."""
        with self.lock:
            old = self.canonical(source, False, src_dir_fd)
            new = self.canonical(target, False, dst_dir_fd)
            if not (kind := self.kind(old)) and self.passing:
                self.done_before = self._changes
                return True
            self._parent(new, target)
            if not kind:
                raise self._absent(old, source, target)
            if old.startswith(f"{new}/"):
                raise _error(errno.ENOTEMPTY, source, target)
            real = self.is_real(old)
            if real and (self.is_real(new) or (not self.kind(new) and self._begins(new))):
                self._disown(old)
                return False
            if old == new or (self.find(old) is not None and self.find(old) is self._entries.get(new)):
                return True  # two names of one file stay, as POSIX has it
            if kind == stat.S_IFDIR and new.startswith(f"{old}/"):
                raise _error(errno.EINVAL, source, target)
            into = self.kind(new) if self._has_made(new) else 0
            if into and (into == stat.S_IFDIR) != (kind == stat.S_IFDIR):
                raise _error(errno.EISDIR if into == stat.S_IFDIR else errno.ENOTDIR, source, target)
            if into == stat.S_IFDIR and self.names(new):
                raise _error(errno.ENOTEMPTY, source, target)
            if self.is_real(new):
                raise CannotPass(f"it moves {old} to {new}, which is not watched")
            moved = dict(self._moved(old, new, real))
            if self.kind(new):
                self._drop(new)  # a directory that is there was moved there before
            if real:
                shutil.rmtree(old) if kind == stat.S_IFDIR else _unlink(old)
                self._disown(old)
            else:
                self._note_removal(old, _identities)
                self._drop(old, keep=True)
            for name, entry in moved.items():
                self._set(name, entry)
            return True

    def _moved(self, old: str, new: str, copied: bool) -> Iterator[tuple[str, Entry]]:
        """Entries for `new` and all below, of what is seen at `old`."""
        kind, found = self.kind(old), self.find(old)
        if kind == stat.S_IFDIR:
            yield new, self._made_dir()
            for name in self.names(old):
                yield from self._moved(_join(old, name), _join(new, name), copied)
        elif kind == stat.S_IFLNK:
            yield new, found if isinstance(found, Link) else self._made_link(_readlink(old))
        elif isinstance(found, File):
            yield new, found
        elif copied:
            self._copy(old, at := self._new(), old)
            yield new, File(at, True)
        else:
            yield new, File(old, False)

    def link(self, source: PathLike, target: PathLike, follow: bool = True) -> bool:
        """Do as `os.link` does."""
        with self.lock:
            old, new = self.canonical(source, follow), self.canonical(target, False)
            if self.is_real(old) and self.is_real(new):
                return False
            if not (kind := self.kind(old)):
                raise self._absent(old, source, target)
            if self._has_made(new):
                raise _error(errno.EEXIST, source, target)
            self._parent(new, target)
            if kind == stat.S_IFDIR:
                raise _error(errno.EPERM, source, target)
            if self.find(old) is None and self._begins(new):
                return False
            for _, entry in self._moved(old, new, False):
                self._set(new, entry)
                self._set(old, entry)  # what is changed under one name is under both
            return True

    def changes(self, path: PathLike, follow: bool = True, dir_fd: int | None = None) -> str | None:
        """Where to change what the kernel knows of a file (mode, times); "": nowhere; None: there.

        Raises FileNotFoundError.
        """
        with self.lock:
            name = self.canonical(path, follow, dir_fd)
            if self.is_real(name):
                return None
            if not self.kind(name):
                raise self._absent(name, path)
            found = self.find(name)
            return found.at if isinstance(found, File) and found.upper else ""

    # -- entries -------------------------------------------------------------------------------

    def _to_make(self, path: PathLike, dir_fd: int | None) -> str | None:
        """The canonical name of what is to be made in the layer; None: for real. Raises OSError."""
        name = self.canonical(path, False, dir_fd)
        if self.is_real(name):
            return None
        if self._has_made(name):
            raise _error(errno.EEXIST, path)
        if self._begins(name):
            return None
        self._parent(name, path)
        return name

    def _begins(self, name: str) -> bool:
        """Whether it is to be made for real: nobody has it, and the script starts up. It is owned then."""
        if self.passing or self.find(name) is not None:
            return False
        self._owned.add(name)
        return True

    def _has_made(self, name: str) -> bool:
        """Whether it is there, and was when the worker that was lost came to this place in the script."""
        below = self.passing and self.find(name) is None and not (self.is_real(name) or self.is_own(name))
        return bool(self.kind(name)) and (not below or name in self._made_again)

    def _disown(self, name: str) -> None:
        self._owned.discard(name)
        self._temporary.discard(name)

    def _parent(self, name: str, path: PathLike) -> None:
        if self.kind(os.path.dirname(name)) != stat.S_IFDIR:
            raise self._absent(name, path)

    def _absent(self, name: str, path: PathLike, other: PathLike | None = None) -> OSError:
        """Why nothing is there."""
        above = os.path.dirname(name)
        while not (kind := self.kind(above)):
            above = os.path.dirname(above)
        return _error(errno.ENOENT if kind == stat.S_IFDIR else errno.ENOTDIR, path, other)

    def _new(self, name: str = "") -> str:
        self._made += 1
        kind = os.path.splitext(name)[1][:_LONGEST]  # libraries choose a format by it
        return f"{self.upper}/{os.getpid()}.{self._made}{kind}"

    def _made_dir(self) -> Dir:
        _mkdir(at := self._new())
        return Dir(at)

    def _made_link(self, target: str) -> Link:
        self._linked = True
        _symlink(target, at := self._new())
        return Link(target, at)

    def _set(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry
        self._changes += 1
        self._numbers[name] = self._changes
        self._names[os.path.dirname(name)].add(os.path.basename(name))

    def _drop(self, name: str, keep: bool = False) -> None:
        """Nothing is seen there any more. `keep`: contents are used elsewhere."""
        self._made_again = {n for n in self._made_again if n != name and not n.startswith(f"{name}/")}
        for child in list(self._names.get(name, ())):
            self._forget(_join(name, child), keep)
        self._forget(name, keep)
        if not self._hidden(name) and os.path.lexists(name):
            self._set(name, Gone())

    def _note_removal(self, name: str, look: Callable[[str], dict[str, Identity]]) -> None:
        """Note what is real there, before it is hidden."""
        if self.notes_removals and not self._hidden(name) and os.path.lexists(name):
            self._changes += 1
            self.removals.append(Removal(self._changes, look(name)))

    def _forget(self, name: str, keep: bool) -> None:
        for child in list(self._names.get(name, ())):
            self._forget(_join(name, child), keep)
        entry = self._entries.pop(name, None)
        self._numbers.pop(name, None)
        above = os.path.dirname(name)
        self._names[above].discard(os.path.basename(name))
        if not self._names[above]:
            del self._names[above]
        if isinstance(entry, File) and entry.upper and not keep:
            used = any(entry is other for other in self.files().values())
            if not used:
                _unlink(entry.at)

    def entries(self) -> dict[str, Entry]:
        """By canonical name, what is above comes first."""
        return dict(sorted(self._entries.items()))

    def number(self, name: str) -> int:
        """The place, among all changes in the layer, of the last one of the entry for a canonical name."""
        return self._numbers[name]

    def keep_only(self, contents: set[str]) -> None:
        """Forget all entries but the files with these contents."""
        self._made_again.clear()
        self.removals.clear()
        for name, entry in list(self._entries.items()):
            if not (isinstance(entry, File) and entry.at in contents) and name in self._entries:
                del self._entries[name], self._numbers[name]
        self._names.clear()
        for name in self._entries:
            self._names[os.path.dirname(name)].add(os.path.basename(name))

    def files(self) -> dict[str, File]:
        """Those that have content in the layer."""
        return {name: e for name, e in self._entries.items() if isinstance(e, File) and e.upper}


def _identities(name: str) -> dict[str, Identity]:
    """Identities of what is there and below, by name; what is below comes first."""
    found: dict[str, Identity] = {}
    if stat.S_ISDIR(_lstat(name).st_mode):
        for below in _listdir(name):
            found |= _identities(_join(name, below))
    return found | {name: identity(name)}


def identity(name: str) -> Identity:
    """What tells this file or directory, or link, from another. Raises OSError."""
    found = _lstat(name)
    about = (found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode))
    return about if stat.S_ISDIR(found.st_mode) else (*about, found.st_size, found.st_mtime_ns)


def _is_within(path: str, owned: set[str]) -> bool:
    """Whether it is one of these, or in one."""
    while owned and path != "/":
        if path in owned:
            return True
        path = os.path.dirname(path)
    return False


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory != "/" else f"/{name}"


def _error(number: int, path: PathLike, other: PathLike | None = None) -> OSError:
    return OSError(number, os.strerror(number), path, None, other)
