"""For what a role waits that holds others up: data, storage, a compiler, a process that it has started.

That ends by itself as a rule, and another worker in its place would wait for the same. It is read from what
an agent sees of the worker (`protocol.flight.Look`). Nobody who is stopped, computes, or is in a lock waits
for any of these; nor does one whose processes are stopped, gone, or idle themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ft_core.process.doing import Doing, Seen
from ft_core.process.stacks import Frame
from ft_core.protocol.flight import Look

For = Literal["data", "storage", "a compiler", "a process"]

_INNER = 8
"""Frames of a stack in which it stands what a thread waits for."""
_LOADING = ("/torch/utils/data/", "/megatron/core/datasets/", "/streaming/base/")
_LOADING_PACKAGES = (
    "datasets",
    "webdataset",
    "fsspec",
    "s3fs",
    "gcsfs",
    "torchdata",
    "smart_open",
    "botocore",
)
"""Where data are read: whatever runs below a frame of these does it for them."""
_STORING = ("/torch/serialization.py", "/torch/distributed/checkpoint/", "-packages/safetensors/")
"""Where checkpoints are written and read."""
_ASIDE = ("/concurrent/futures/", "-packages/fsspec/", "/asyncio/")
"""Frames that wait, by a lock, for another thread which reads."""
_COMPILING = (
    "/torch/utils/cpp_extension.py", "/torch/utils/file_baton.py", "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/async_compile.py", "/triton/compiler/", "/triton/runtime/build.py",
    "/deepspeed/ops/op_builder/", "/numba/core/",
)  # fmt: skip
_COMPILERS = frozenset(
    "nvcc cicc ptxas fatbinary cudafe++ nvlink ninja cmake make cc1plus cc1 g++ gcc c++ cc clang clang++ "
    "hipcc collect2 ld ld.lld as icpx triton".split()
)
_OF_PROCESSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("/torch/utils/data/dataloader.py", ("_try_get_data",)),
    ("/multiprocessing/connection.py", ()),
    ("/multiprocessing/queues.py", ("get",)),
    ("/multiprocessing/pool.py", ("get", "wait", "next", "join")),
    ("/multiprocessing/popen_fork.py", ("wait", "poll")),
    ("/concurrent/futures/process.py", ()),
    ("/subprocess.py", ()),
)
"""Functions that wait for processes, by file; all of it where none is named."""
_DOES: dict[Doing, str] = {
    "runs": "computes",
    "blocked": "waits for storage or a device (state D)",
    "sleep": "sleeps",
    "file": "waits for a file",
    "network": "waits for the network",
    "local": "waits for another process",
    "lock": "waits for a lock",
    "process": "waits for a process to end",
    "unknown": "is at something that cannot be seen",
}
_AT_WORK = ("runs", "blocked", "sleep", "file", "network", "unknown")
"""What a process does that somebody waits for, unless that hangs."""


@dataclass(frozen=True)
class Wait:
    """`what` it waits for, and how that shows, in words."""

    what: For
    words: str


def waits_for(look: Look) -> Wait | None:
    """What the main thread waits for; None: nothing of that kind, as far as it can be seen."""
    main, stack = look.main, look.stack
    if main.doing in ("stopped", "ended") or any(each.doing == "stopped" for each in look.below):
        return None
    compilers = [each for each in look.below if each.name in _COMPILERS and each.doing != "ended"]
    loading = _has(stack, _loads)
    for_processes = main.doing == "process" or _has(stack[:_INNER], _of_processes)
    for_processes |= loading and main.doing == "local"
    if _has(stack, lambda frame: _in(frame, _COMPILING)) or (for_processes and compilers):
        return Wait("a compiler", _named(compilers) or f"it is in {_innermost(stack, _COMPILING)}")
    if for_processes:
        working = [each for each in look.below if each.doing in _AT_WORK]
        return Wait("data" if loading else "a process", _named(working)) if working else None
    if loading and (main.doing in _AT_WORK[1:] or (main.doing == "lock" and _has(stack, _aside))):
        return Wait("data", f"its loader {does(main)}")
    if main.doing in ("file", "network") or (main.doing in _AT_WORK[1:] and _has(stack, _stores)):
        return Wait("storage", f"it {does(main)}")
    return None


def _has(stack: Iterable[Frame], holds: Callable[[Frame], bool]) -> bool:
    return any(map(holds, stack))


def _in(frame: Frame, parts: Iterable[str]) -> bool:
    return any(part in frame.path for part in parts)


def _loads(frame: Frame) -> bool:
    return _in(frame, _LOADING) or _in(frame, (f"-packages/{name}/" for name in _LOADING_PACKAGES))


def _stores(frame: Frame) -> bool:
    return _in(frame, _STORING)


def _aside(frame: Frame) -> bool:
    return _in(frame, _ASIDE)


def _of_processes(frame: Frame) -> bool:
    return any(
        frame.path.endswith(path) and (not functions or frame.function in functions)
        for path, functions in _OF_PROCESSES
    )


def _innermost(stack: Iterable[Frame], parts: Iterable[str]) -> str:
    frame = next(frame for frame in stack if _in(frame, parts))
    return f"{frame.function} of {frame.path}"


def does(seen: Seen) -> str:
    """What a process is doing, in words."""
    return _DOES.get(seen.doing, seen.doing) + (f", {seen.what}" if seen.what else "")


def _named(processes: list[Seen]) -> str:
    """The first of them, and how many there are."""
    if not processes:
        return ""
    first, more = processes[0], len(processes) - 1
    return f"its process {first.pid} ({first.name}) {does(first)}" + (f", and {more} more" if more else "")
