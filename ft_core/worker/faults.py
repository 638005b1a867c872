"""What an exception means: whose fault it is, and by what the same one is known again. Pure.

By type, errno and text, in one place. Frameworks raise most of what a device or a link does as RuntimeError,
with the library's own words in it.
"""

from __future__ import annotations

import errno
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import ft_core
from ft_core.errors import ConfigError, ReplayMismatch
from ft_core.protocol.messages import Fault

_MESSAGE, _SIGNATURE = 300, 600
"""Characters of an error's own text, and of all by which it is known again."""
_STORAGE = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.ENXIO, errno.ENODEV,
    errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENOTCONN,
)  # fmt: skip
"""Of an OSError with a path. The last two are those of a network's file system, and else of a socket."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_OURS = str(Path(ft_core.__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

_TYPES = {
    "KeyboardInterrupt": Fault.INTERRUPTED,
    "OutOfMemoryError": Fault.DEVICE_MEMORY,
    "MemoryError": Fault.MEMORY,
    "BrokenProcessPool": Fault.LOADER,
    "AcceleratorError": Fault.DEVICE,
    "DistNetworkError": Fault.TRANSPORT,
    "DistBackendError": Fault.TRANSPORT,
    "DistStoreError": Fault.TRANSPORT,
    "ConnectionError": Fault.TRANSPORT,
}
"""By the name of a class, or of one that it comes from."""
_TEXTS: tuple[tuple[Fault, str], ...] = (
    # What a device reports of the script's own mistakes comes first.
    (Fault.EXCEPTION, "device-side assert|invalid device ordinal|no kernel image|invalid configuration arg"),
    (Fault.EXCEPTION, "ncclInvalidArgument|ncclInvalidUsage|invalid (usage|argument).*nccl"),
    (Fault.DEVICE_MEMORY, "(CUDA|HIP|XPU)( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
    (Fault.DEVICE, "(CUDA|HIP)( driver)? error|uncorrectable ECC|illegal memory access|misaligned address"),
    (Fault.DEVICE, r"unspecified launch failure|CU(BLAS|DNN|FFT|SPARSE|SOLVER)_STATUS_|unhandled cuda error"),
    (Fault.DEVICE, "ncclUnhandledCudaError"),
    (Fault.LOADER, r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)"),
    (Fault.LOADER, r"bus error encountered in worker|DataLoader timed out"),
    (Fault.STORAGE, "No space left on device|Disk quota exceeded|Input/output error|Stale file handle"),
    (Fault.STORAGE, "Read-only file system|iostream error|inline_container.*unexpected pos"),
    (Fault.MEMORY, "can't allocate memory|Cannot allocate memory"),
    (Fault.TRANSPORT, "Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket Timeout"),
    (Fault.TRANSPORT, r"Timed out waiting \d+ms|ncclRemoteError|ncclSystemError|unhandled system error"),
)
"""By the words in it, of errors whose type says nothing."""
_WORDS = tuple((fault, re.compile(words, re.I)) for fault, words in _TEXTS)


def classify(error: BaseException) -> Fault:
    """Of an error, or of what it was raised from."""
    for each in _causes(error):
        if (fault := _of(each)) is not Fault.EXCEPTION:
            return fault
    return Fault.EXCEPTION


def what(error: BaseException) -> str:
    """In a line: its type and the first line of its text."""
    text = str(error).strip()
    return (f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__)[:_MESSAGE]


def signature(error: BaseException) -> str:
    """Of the same error the same: type, text without numbers and addresses, the script's innermost frame.

    Frames of libraries are passed over where there are others.
    """
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    text = _NUMBERS.sub("N", str(error)[: 4 * _MESSAGE])[:_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _library(frame.filename)] or frames
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return f"{kind}: {text} @ {where}"[:_SIGNATURE]


def _library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, _OURS, "<frozen"))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__


def _of(error: BaseException) -> Fault:
    if isinstance(error, ConfigError | ReplayMismatch):
        return Fault.REFUSED
    text = str(error)
    if isinstance(error, OSError):
        # Of a loader's process it comes without its number.
        found = _ERRNO.search(text)
        number = error.errno or (int(found[1]) if found else 0)
        if number == errno.ENOMEM:
            return Fault.MEMORY
        if number in _STORAGE and (error.filename is not None or number not in _STORAGE[-2:]):
            return Fault.STORAGE
    by_word = next((fault for fault, words in _WORDS if words.search(text)), None)
    if by_word is Fault.EXCEPTION:
        return by_word
    names = (kind.__name__ for kind in type(error).__mro__)
    by_type = next((_TYPES[name] for name in names if name in _TYPES), None)
    if by_type is not None:
        # A communicator tells of a device, too.
        return by_word if by_type is Fault.TRANSPORT and by_word is Fault.DEVICE else by_type
    # Words of the libraries; a script's own error may have any in it.
    return by_word if by_word is not None and isinstance(error, RuntimeError | OSError) else Fault.EXCEPTION
