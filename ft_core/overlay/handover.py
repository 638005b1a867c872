"""What becomes of the layer when a newcomer's script has caught up.

Files that it has open are in the layer, and from now on they are to be the real ones, where the worker that
was lost has left off. It had written the same, as far as its buffers had been flushed, and perhaps something
of the step that is done again.

What the script does between the last step that it passes and its next pass may have been done before, or not,
or in part. It is done in the layer, and what of it is missing then is done for real (`complete`). Others may
have written to the same directories meanwhile: what the script has not seen stays. What it has removed is
removed if it is still what was there then; but not if the script has later written something that is there,
or moved what is not there any more: then it had been removed before, and what is there now has come since.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import gc
import io
import os
import secrets
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

from ft_core.overlay.tree import CannotPass, Dir, File, Gone, Identity, Link, Tree, identity

_LOOKED_AT = 16 << 20
"""Bytes at the end of a file that was appended to, in which what the newcomer wrote is looked for."""
_NEAR = 1 << 16
"""Bytes that one who was a step further may have written behind what is looked for."""
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")
"""How files of gzip, bzip2, xz, Zstandard and zip begin."""
_LONGEST_MAGIC = 6
_KEPT_FLAGS = os.O_APPEND | os.O_NONBLOCK | os.O_DSYNC | os.O_SYNC


class Place(NamedTuple):
    """Where a file goes on."""

    end: int
    """Bytes of the real file that stay."""
    missing: bytes
    """What comes after them before anything new."""


def begun_anew(written: bytes, real: bytes, whole: bool) -> Place:
    """Where a file goes on that both have begun anew. `written`: by the newcomer until now. `whole`: it has
    passed every step that the other had done.

    What the other has written beyond will be written again. Nothing is cut off where the two differ, as lines
    that tell the time do.
    """
    if written.startswith(real):
        return Place(len(real), written[len(real) :])
    if whole and real.startswith(written):
        return Place(len(written), b"")
    return Place(len(real), b"")


def appended_to(written: bytes, real: bytes) -> Place:
    """Where a file goes on that both have appended to, and others may have.

    `real`: what is there at its end. What of `written` is missing there, since it stayed in a buffer, is
    added.
    """
    if written in real:
        return Place(len(real), b"")
    known = _overlap(written, real)
    return Place(len(real), written[known:] if known else b"")


def gone_on(written: bytes, real: bytes) -> Place:
    """Where a file goes on that the newcomer goes on with where another has, without all that came before.

    `real`: what is there at its end. `written` is there, or its beginning, or nothing of it.
    """
    known = len(written) if written in real else _overlap(written, real)
    return Place(len(real), written[known:])


def jump(tree: Tree) -> None:
    """The script goes on at a later step than it has come to: what its files have by now was written by
    another, and what is between."""
    for file in _objects(set(_open_for_writing(tree.upper))):
        with contextlib.suppress(ValueError):  # closed meanwhile
            file.flush()
    for each in tree.files().values():
        each.base, each.later = os.path.getsize(each.at), True


def _overlap(written: bytes, real: bytes) -> int:
    """Length of the longest beginning of `written` with which `real` ends (Knuth, Morris and Pratt)."""
    failure = [0] * (len(written) + 1)
    at = 0
    for i in range(1, len(written)):
        while at and written[i] != written[at]:
            at = failure[at]
        at += written[i] == written[at]
        failure[i + 1] = at
    at = 0
    for byte in real[-len(written) :]:
        while at and (at == len(written) or byte != written[at]):
            at = failure[at]
        at += byte == written[at]
    return at


def forget(tree: Tree) -> None:
    """What was done in steps that are done; of files that are open the content stays, and of directories that
    are the newcomer's own what was made in them, for whoever removes it later: nobody else has made that. Its
    files are empty, as they would be of other steps than they say."""
    held = _held(tree.upper)
    for name, entry in tree.entries().items():
        if not tree.is_own(name):
            continue
        if isinstance(entry, Dir):
            os.makedirs(name, exist_ok=True)
        elif isinstance(entry, File) and entry.at not in held:
            if tree.notes_removals:  # it has arrived, and that is of the step that it says
                shutil.copyfile(entry.at, name)
            elif not os.path.lexists(name):
                open(name, "x").close()
    tree.keep_only(held)


def complete(tree: Tree) -> None:
    """Have the real files be what is seen in the layer, where they are not, and forget it, but for files that
    are open."""
    held = _held(tree.upper)
    entries = {n: e for n, e in tree.entries().items() if not (isinstance(e, File) and e.at in held)}
    written = [n for n, e in entries.items() if isinstance(e, File) and e.upper and _is_there(n, e)]
    known = max([tree.done_before, *map(tree.number, written)])
    for name, entry in entries.items():  # what was moved, before where it was is cleared
        if isinstance(entry, Dir):
            if not os.path.isdir(name) or os.path.islink(name):
                _remove(name)
                os.mkdir(name)
        elif isinstance(entry, File):
            _have_file(
                name, entry, any(isinstance(entries.get(above), Gone) for above in _and_above(entry.at))
            )
        elif isinstance(entry, Link) and not (os.path.islink(name) and os.readlink(name) == entry.target):
            _remove(name)
            os.symlink(entry.target, name)
    for removal in tree.removals:
        if removal.number > known:
            for name, before in removal.real.items():
                if not tree.kind(name):
                    _remove_if(name, before)
    tree.keep_only(held)


def _and_above(name: str) -> Iterator[str]:
    while name != "/":
        yield name
        name = os.path.dirname(name)


def _is_there(name: str, file: File) -> bool:
    return os.path.isfile(name) and filecmp.cmp(file.at, name, shallow=False)


def _have_file(name: str, file: File, moved: bool) -> None:
    """`moved`: from where its content is to be."""
    if not os.path.exists(file.at):  # a real one, that was moved there before
        return
    if _is_there(name, file):
        return
    if not file.upper and moved:
        os.replace(file.at, name)
        return
    if file.base >= 0 and os.path.isfile(name) and _starts_alike(file.at, name, file.base):
        with open(file.at, "rb") as upper, open(name, "rb+") as real:
            upper.seek(file.base)
            more = upper.read()
            size = real.seek(0, os.SEEK_END)
            real.seek(max(0, size - len(more) - _NEAR))
            if more not in real.read():  # behind it is what the other wrote in a step that is done again
                real.write(more)
        return
    beside = f"{name}.ft-{secrets.token_hex(4)}"  # others' processes may have this one's number
    shutil.copyfile(file.at, beside)
    if os.path.isfile(name):
        shutil.copymode(name, beside)
    elif os.path.isdir(name):
        _remove(name)
    os.replace(beside, name)


def _starts_alike(one: str, other: str, size: int) -> bool:
    with open(one, "rb") as first, open(other, "rb") as second:
        while size > 0:
            part = first.read(min(size, 1 << 20))
            if not part or part != second.read(len(part)):
                return False
            size -= len(part)
    return True


def _remove_if(name: str, before: Identity) -> None:
    """Unless it is something else by now, or has something in it."""
    try:
        if identity(name) == before:
            os.rmdir(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
            raise


def _remove(name: str) -> None:
    if os.path.isdir(name) and not os.path.islink(name):
        shutil.rmtree(name)
    elif os.path.lexists(name):
        os.unlink(name)


def hand_over(tree: Tree, whole: bool) -> None:
    """Every file that is open for writing in the layer becomes the real one.

    What was opened under a name that nobody else has used becomes a real file with all that was written to
    it. Raises CannotPass where a library's own code has one open, or one is mapped into memory, or a process
    that the script has forked has opened one. Nothing is watched any more meanwhile.
    """
    for process in _forked(os.getpid()):
        own = f"{tree.upper}/{process}."  # what it has of its parent's says nothing: loaders have that, too
        if any(at.startswith(own) for at in _open_for_writing(tree.upper, process).values()):
            raise CannotPass(
                f"a process that it has forked, {process}, has a file open that was there before"
            )
    files = {file.at: (name, file) for name, file in tree.files().items()}
    for at in _mapped_for_writing(tree.upper) & files.keys():
        raise CannotPass(f"it has {files[at][0]} mapped into memory, and writes to it there")
    descriptors = _open_for_writing(tree.upper)
    given = {at for descriptor, at in tree.opened.items() if descriptors.get(descriptor) == at}
    objects = _objects(set(descriptors))
    for file in objects:
        with contextlib.suppress(ValueError):  # closed meanwhile
            file.flush()
    done: dict[str, bool] = {}
    for descriptor, at in descriptors.items():
        if at not in files:  # it was removed, and goes nowhere
            continue
        name, file = files[at]
        if at not in given:
            raise CannotPass(f"a library's own code has {name} open")
        if at not in done:
            done[at] = _placed(name, file, whole)
        if not done[at]:
            continue
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        real = os.open(name, flags & (os.O_ACCMODE | _KEPT_FLAGS))
        os.lseek(real, 0, os.SEEK_END)
        os.dup2(real, descriptor, os.get_inheritable(descriptor))
        os.close(real)
    for each in objects:
        with contextlib.suppress(OSError, ValueError):  # what cannot be sought goes on at its end
            if each.writable() and each.seekable():
                each.seek(0, os.SEEK_END)


def _placed(name: str, file: File, whole: bool) -> bool:
    """Have the real file end where it goes on. Returns False where there is none, nor a place for it."""
    if not os.path.exists(name):
        if not os.path.isdir(os.path.dirname(name)):
            return False
        shutil.copyfile(file.at, name)
        return True
    with open(file.at, "rb") as upper, open(name, "r+b") as real:
        if _is_packed(file) and (file.base >= 0 or not upper.read().startswith(real.read())):
            raise CannotPass(f"it has {name} open, whose compressed content cannot be gone on with")
        upper.seek(0), real.seek(0)
        if file.base < 0:
            place = begun_anew(upper.read(), real.read(), whole)
        else:
            upper.seek(file.base)
            size = real.seek(0, os.SEEK_END)
            start = real.seek(max(0, size - _LOOKED_AT))
            place = (gone_on if file.later else appended_to)(upper.read(), real.read())
            place = Place(start + place.end, place.missing)
        real.truncate(place.end)
        real.seek(place.end)
        real.write(place.missing)
    return True


def _is_packed(file: File) -> bool:
    """Whether what was written to it is a stream in which each byte depends on those before."""
    with open(file.at, "rb") as upper:
        upper.seek(max(0, file.base))
        return upper.read(_LONGEST_MAGIC).startswith(_PACKED)


def _open_for_writing(upper: str, process: int | str = "self") -> dict[int, str]:
    """Descriptors of a process -> file in the layer. None, where it has ended."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):  # of the listing itself
                at = os.readlink(f"/proc/{process}/fd/{entry}")
                if at.startswith(f"{upper}/") and _flags(process, entry) & os.O_ACCMODE != os.O_RDONLY:
                    found[int(entry)] = at
    return found


def _flags(process: int | str, descriptor: str) -> int:
    """How it was opened."""
    with open(f"/proc/{process}/fdinfo/{descriptor}") as file:
        return int(next(line for line in file if line.startswith("flags:")).split()[1], 8)


def _forked(process: int) -> Iterator[int]:
    """Processes that it has started, and those that they have, as far as they live below it."""
    for thread in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/{process}/task/{thread}/children") as file:
                children = [int(child) for child in file.read().split()]
            for child in children:
                yield child
                yield from _forked(child)


def _held(upper: str) -> set[str]:
    """Files in the layer that the script can still write to."""
    return {*_open_for_writing(upper).values(), *_mapped_for_writing(upper)}


def _mapped_for_writing(upper: str) -> set[str]:
    """Files in the layer that a write to memory changes."""
    found = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            _, mode, _, _, _, *name = line.rstrip("\n").split(None, 5)
            if name and name[0].startswith(f"{upper}/") and mode[1] == "w" and mode[3] == "s":
                found.add(name[0])
    return found


def _objects(descriptors: set[int]) -> list[Any]:
    """Python's, whose buffers are above these descriptors. Text first, as it has one of its own."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)
    found: list[Any] = []
    for each in gc.get_objects():
        if issubclass(type(each), kinds):  # by type, since `isinstance` asks proxies, too
            with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, or detached
                if each.fileno() in descriptors:
                    found.append(each)
    return sorted(found, key=lambda each: [issubclass(type(each), kind) for kind in kinds].index(True))
