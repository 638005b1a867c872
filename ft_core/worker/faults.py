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

from msgspec.structs import replace

import ft_core
from ft_core.errors import ConfigError, ReplayMismatch
from ft_core.protocol.messages import Fault, ScriptFailed

_MESSAGE, _SIGNATURE = 300, 600
"""Characters of an error's own text, and of all by which it is known again."""
_TRACEBACK = 1 << 16
"""Characters of what is told of an error, its beginning and its end; all of it is in the worker's log."""
_CHAIN = 64
"""Errors that are looked at, from one to what it comes of."""
_STORAGE = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.ENXIO, errno.ENODEV,
    errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENOTCONN,
)  # fmt: skip
"""Numbers of an OSError with a path. The last two are those of a network's file system, and else of a
socket."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_reserve = [bytearray(32 << 20)]
"""Address space alone, until there is none: to tell of it, wait for threads, and write files takes some."""
_RUST = re.compile(r"\(os error \d+\)")
"""How libraries in Rust, whose errors are of any type, tell of the system's."""
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
    (
        Fault.EXCEPTION,
        r"device-side assert\b|invalid device ordinal|no kernel image|invalid configuration arg",
    ),
    (Fault.EXCEPTION, "ncclInvalidArgument|ncclInvalidUsage|invalid (usage|argument).*nccl"),
    (Fault.DEVICE_MEMORY, "(CUDA|HIP|XPU)( driver)?( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
    (Fault.DEVICE_MEMORY, r"Cuda failure \d* ?'out of memory'"),
    (Fault.DEVICE, "(CUDA|HIP)( driver| unknown)? error|uncorrectable ECC|illegal memory access"),
    (Fault.DEVICE, "misaligned address"),
    (Fault.DEVICE, r"unspecified launch failure|CU(BLAS|DNN|FFT|SPARSE|SOLVER)_STATUS_|unhandled cuda error"),
    (Fault.DEVICE, "ncclUnhandledCudaError"),
    (Fault.LOADER, r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)"),
    (Fault.LOADER, r"bus error encountered in worker|DataLoader timed out|Pin memory thread exited"),
    (Fault.STORAGE, "No space left on device|Disk quota exceeded|Input/output error|Stale file handle"),
    (Fault.STORAGE, "Read-only file system|iostream error|inline_container.*unexpected pos"),
    (Fault.STORAGE, "Worker failure: .*OSError"),  # all that Megatron's writers leave of it
    (Fault.MEMORY, "can't allocate memory|Cannot allocate memory"),
    (Fault.TRANSPORT, "Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket Timeout"),
    (Fault.TRANSPORT, r"Timed out waiting \d+ms|ncclRemoteError|ncclSystemError|unhandled system error"),
    (Fault.TRANSPORT, "pair closure"),
)
"""By the words in it, of errors whose type says nothing."""
_RATHER = {
    (Fault.TRANSPORT, Fault.DEVICE),
    (Fault.TRANSPORT, Fault.DEVICE_MEMORY),
    (Fault.DEVICE, Fault.DEVICE_MEMORY),
}
"""Type and words of an error for which the words count."""
_WORDS = tuple((fault, re.compile(words, re.I)) for fault, words in _TEXTS)


def failed(error: BaseException) -> ScriptFailed:
    """What is told of the error that a script has ended of, whatever it is. Once per process."""
    _reserve.clear()
    trace = "".join(traceback.format_exception(error))
    return ScriptFailed(classify(error), what(error), signature(error), printable(trace, _TRACEBACK))


def own(error: BaseException) -> ScriptFailed:
    """The same of an error of this engine's own, which is not taken for the script's. What is known of it
    otherwise, a device's or a disk's, stays that."""
    told = failed(error)
    if told.fault is not Fault.EXCEPTION:
        return told
    text = printable(f"an error of ftrun's own, in which the script has no part: {told.what}", _MESSAGE)
    return replace(told, fault=Fault.ENGINE, what=text)


def classify(error: BaseException) -> Fault:
    """The class of an error, or of what it comes of: what it was raised from, or the errors of a group."""
    return _of(_culprit(error))


def what(error: BaseException) -> str:
    """In a line: its type and the first line of its text; and so of what it comes of, if that tells more."""
    culprit = _culprit(error)
    of = f" (of {_line(culprit)})" if culprit is not error else ""
    return _line(error) + of


def _line(error: BaseException) -> str:
    text, name = _text(error).strip(), type(error).__name__
    if _of_ranks(error) == []:
        text = "a checkpoint has failed on another rank, which says why"
    return printable(f"{name}: {text.splitlines()[0]}" if text else name, _MESSAGE)


def exit_call(stop: SystemExit) -> str:
    """How a script has ended itself."""
    try:
        code = repr(stop.code)
    except Exception:  # the script's own __repr__
        code = type(stop.code).__name__
    return printable(f"sys.exit({code})", _MESSAGE)


def printable(text: str, limit: int) -> str:
    """The text as it can be sent and shown: in UTF-8, and of no more than so many characters, but for a
    note."""
    if (more := len(text) - limit) > 0:
        half = limit // 2
        text = f"{text[:half]} ... ({more} characters) ... {text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def signature(error: BaseException) -> str:
    """The same for the same error: type, text without numbers and addresses, the script's innermost frame.

    Frames of libraries are passed over where there are others.
    """
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    text = _NUMBERS.sub("N", _text(error)[: 4 * _MESSAGE])[:_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _library(frame.filename)] or frames
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return printable(f"{kind}: {text} @ {where}"[:_SIGNATURE], _SIGNATURE)


def _library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, _OURS, "<frozen"))


def _culprit(error: BaseException) -> BaseException:
    """The error itself, unless what it comes of is of a class, and it is not."""
    return next((each for each in _chain(error) if _of(each) is not Fault.EXCEPTION), error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it comes of, as a traceback shows them."""
    found = [error]
    for each in found:  # which grows
        yield each
        if each.__cause__ is not None:
            found.append(each.__cause__)
        elif each.__context__ is not None and not each.__suppress_context__:
            found.append(each.__context__)
        found += each.exceptions if isinstance(each, BaseExceptionGroup) else _of_ranks(each) or ()
        del found[_CHAIN:]


def _of_ranks(error: BaseException) -> list[BaseException] | None:
    """Those of which a distributed checkpoint of torch's makes one on all ranks, where they are told; None:
    it is no such error."""
    if type(error).__name__ != "CheckpointException":
        return None
    return [each for each, _ in error.failures.values()]  # type: ignore[attr-defined]


def _text(error: BaseException) -> str:
    """What it says of itself."""
    try:
        return printable(str(error), _TRACEBACK)
    except Exception as wrong:  # the script's own __str__
        return f"(its text cannot be had: {type(wrong).__name__})"


def _of(error: BaseException) -> Fault:
    if isinstance(error, ConfigError):
        return Fault.REFUSED
    if isinstance(error, ReplayMismatch):
        return Fault.DIVERGED
    if _of_ranks(error) == []:
        return Fault.TRANSPORT  # another rank's, which has more to say
    text = _text(error)
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
        # A communicator tells of a device, too, and a device of its memory.
        return by_word if (by_type, by_word) in _RATHER and by_word is not None else by_type
    # Words of the libraries; a script's own error may have any in it.
    of_library = isinstance(error, RuntimeError | OSError) or _RUST.search(text) is not None
    return by_word if by_word is not None and of_library else Fault.EXCEPTION
