"""Memory that the agent owns and its workers map: control words and ping-pong snapshot buffers.

Anonymous memory files: nothing appears in /dev/shm, nothing is left behind by a SIGKILL, and what a
worker wrote outlives the worker. A worker opens them through /proc/<agent pid>/fd.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import resource
import struct
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

from ft_core.comm import flight_memory
from ft_core.process.ending import Lock
from ft_core.state.manifest import Segment

_PAGE = 4096
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which the module `mmap` does not know, and would call with the interpreter's lock."""
_libc = ctypes.CDLL(None, use_errno=True)
TORN = -1
"""Version of a buffer that holds no complete snapshot."""
IN_OPTIMIZER = -1
"""Step tag of a worker that is changing its state (FlashRecovery, section III: tag -1)."""


class SharedMemory:
    """A memory file mapped by this process; `address` lets another process of this machine map it too.

    Its descriptor goes with this object, the mapping with the last view of it, here or in whatever was lent
    one; the pages go with the last mapping of any process. So who drops it gives all of it back.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._file = os.fstat(fd).st_ino
        self._map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        """Allocate `nbytes` (rounded up to pages), zero-filled. Raises OSError."""
        nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EFBIG:
                raise
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            raise OSError(
                error.errno,
                f"{nbytes} bytes of memory to share with a worker cannot be had: it counts as a file, and a "
                f"file may have {limit} bytes here. Raise the limit: ulimit -f unlimited",
            ) from error
        return cls(fd, nbytes)

    @classmethod
    def open(cls, address: Sequence[int]) -> SharedMemory:
        """Map the memory that another process of this user made; `address` as its owner gave it.

        Raises OSError if the owner is gone, or has given it up since.
        """
        pid, fd, nbytes, file = address
        path = f"/proc/{pid}/fd/{fd}"
        memory = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes)
        memory.close()  # the mapping is enough
        if memory._file != file:
            raise FileNotFoundError(f"{path} is other memory by now")
        return memory

    @property
    def address(self) -> list[int]:
        """[owner's pid, descriptor there, bytes, inode], valid while the owner has it.

        A descriptor's number is used again; the inode tells the one memory from the other.
        """
        return [os.getpid(), self._fd, self.nbytes, self._file]

    @property
    def pointer(self) -> int:
        """Address of the mapping in this process, for calls of C."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def grown(self, nbytes: int) -> SharedMemory:
        """The same memory as part of a larger one; this object is of no more use. Raises OSError."""
        os.ftruncate(self._fd, _pages(nbytes))
        fd, self._fd = self._fd, -1
        return SharedMemory(fd, _pages(nbytes))

    def close(self) -> None:
        """Close the descriptor: no other process can map it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class Word(IntEnum):
    """Indices of the int64 words in a worker's control block, and who writes each."""

    TAG = 0
    """Worker: the step tag. v in forward/backward of the step after version v, -1 in the optimizer."""
    VERSION = 1
    """Worker: how many steps its state has seen."""
    STAGED = 2
    """Worker: newest version whose copy in host memory is complete."""
    COMMITTED = 3
    """Agent: newest version that is staged here and verified at every ring peer."""
    TRAFFIC = 4
    """Worker: operations in flight. Agents listen before they send while it is not 0 (`ft_core.net.gate`)."""
    STEP_NS = 5
    """Worker: duration of its last step in nanoseconds."""
    WAITED_NS = 6
    """Worker: total time spent in commit waits, in nanoseconds."""
    LOSS = 7
    """Worker: the loss that the script has told last, the bits of a double; NaN: none. See `loss_of`."""
    PASSED = 8
    """Worker: how much it has passed over that was done before, as a newcomer: operations of start-up that it
    took from the record, and the framework's calls that were answered from it."""
    DEVICE_FREE = 9
    """Worker: bytes of its GPU that were free when it had started its role ahead of need."""
    DEVICE_MEMORY = 10
    """Worker: all bytes of that GPU."""
    DATA_NS = 11
    """Worker: of its last step's time, what it waited for its data."""
    COPIES_NS = 12
    """Worker: and what it waited for copies."""


def word_of_loss(loss: float) -> int:
    """For `Word.LOSS`."""
    return int.from_bytes(struct.pack("=d", loss), sys.byteorder, signed=True)


def loss_of(word: int) -> float | None:
    """Inverse. None: there is none, or it is no number."""
    (loss,) = struct.unpack("=d", word.to_bytes(8, sys.byteorder, signed=True))
    return loss if math.isfinite(loss) else None


class ControlBlock:
    """The words one worker and its agent share, and its flight record. Aligned 8-byte stores: no lock is
    needed."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._words = memory.view[:_PAGE].cast("q")
        self.life = Lock(memory.view[_PAGE - Lock.BYTES : _PAGE])
        """Held by the worker's main thread as long as that lives."""
        self.flight = memory.view[_PAGE:]
        """Worker: its flight record, see `comm.flight_memory`."""

    @classmethod
    def create(cls) -> ControlBlock:
        """A block with no version staged or committed."""
        block = cls(SharedMemory.create("ft-control", _PAGE + flight_memory.SIZE))
        block[Word.STAGED] = block[Word.COMMITTED] = TORN
        block[Word.LOSS] = word_of_loss(math.nan)
        block.life.create()
        flight_memory.clear(block.flight)
        return block

    def __getitem__(self, word: Word) -> int:
        return self._words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value


def snapshot_memory(nbytes: int) -> SharedMemory:
    """For a buffer of so many bytes. Raises OSError."""
    return SharedMemory.create("ft-snapshot", nbytes)


class SnapshotBuffer:
    """One of a role's two snapshot buffers.

    Layout: a page whose first word is the version (`TORN` while it is being written), the uint64
    checksums of all chunks, then each segment's bytes from a page boundary on.
    """

    def __init__(self, memory: SharedMemory, segments: Sequence[Segment]) -> None:
        self.memory = memory
        self.segments = tuple(segments)
        self.signatures = [segment.signature for segment in segments]
        self._header = memory.view[:_PAGE].cast("q")
        self._views: list[memoryview] = []
        self._sums: list[memoryview] = []
        table = memory.view[_PAGE:]
        offset = _PAGE + _pages(8 * sum(s.chunks for s in segments))
        position = 0
        for segment in segments:
            self._sums.append(table[position : position + 8 * segment.chunks].cast("Q"))
            position += 8 * segment.chunks
            self._views.append(memory.view[offset : offset + segment.nbytes])
            offset += _pages(segment.nbytes)

    @staticmethod
    def size(segments: Sequence[Segment]) -> int:
        """Bytes of memory that a buffer for `segments` takes."""
        chunks = sum(s.chunks for s in segments)
        return _PAGE + _pages(8 * chunks) + sum(_pages(s.nbytes) for s in segments)

    @classmethod
    def create(
        cls, segments: Sequence[Segment], memory: Callable[[int], SharedMemory] = snapshot_memory
    ) -> SnapshotBuffer:
        """Allocate a buffer (agent's side) in `memory` of so many bytes. It is torn until someone completes
        it."""
        buffer = cls(memory(cls.size(segments)), segments)
        buffer.version = TORN
        return buffer

    @property
    def version(self) -> int:
        """The version this buffer holds completely, or `TORN`."""
        return self._header[0]

    @version.setter
    def version(self, value: int) -> None:
        self._header[0] = value

    def data(self, index: int) -> memoryview:
        """Bytes of segment number `index`."""
        return self._views[index]

    def checksums(self, index: int) -> memoryview:
        """Checksums (uint64) of the chunks of segment number `index`."""
        return self._sums[index]


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def anonymous(nbytes: int) -> mmap.mmap:
    """Private memory, in huge pages where the kernel has them: its first use is mostly page faults.

    It is given back without the interpreter's lock, which a `bytearray` of some GB would hold for a second.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # a child of the agent needs no copy of it
    return memory


def touch(memory: SharedMemory, start: int, nbytes: int) -> None:
    """Have the kernel give pages that nobody uses yet; other threads go on meanwhile. Raises OSError."""
    at = ctypes.c_void_p(memory.pointer + start)
    if _libc.madvise(at, ctypes.c_size_t(nbytes), _POPULATE_WRITE):
        if (error := ctypes.get_errno()) != errno.EINVAL:
            raise OSError(error, os.strerror(error))
        np.frombuffer(memory.view[start : start + nbytes], np.uint8)[::_PAGE] = 0  # a kernel before 5.14


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy, and let other threads of this process go on meanwhile: assigning a view would hold them up."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
