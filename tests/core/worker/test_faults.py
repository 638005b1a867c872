"""What odd errors, and those of torch, are taken for, and that their words come through whatever they are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from unittest.mock import ANY

import pytest
import torch
from torch import distributed as dist

from ft_core import plugins
from ft_core.protocol.codec import encode
from ft_core.protocol.messages import FROM_WORKER, Fault, ScriptFailed
from ft_core.settings import Command
from ft_core.worker import entry, faults, ordinary

ODD: dict[str, tuple[str, Fault, str]] = {
    "no message": ("raise ValueError", Fault.EXCEPTION, "ValueError"),
    "an empty line first": ("raise ValueError('\\n\\n  no')", Fault.EXCEPTION, "ValueError: no"),
    "megabytes of message": (
        "raise ValueError('x' * (80 << 20) + 'the end')",
        Fault.EXCEPTION,
        "ValueError: " + "x" * 80,
    ),
    "a file name that is no text": (
        "raise OSError(28, 'No space left on device', '/data/\\udcff.bin')",
        Fault.STORAGE,
        "OSError: [Errno 28] No space left on device: '/data/\\udcff.bin'",
    ),
    "text that cannot be encoded": ("raise ValueError('\\ud800')", Fault.EXCEPTION, "ValueError: \\ud800"),
    "control characters": ("raise ValueError('a\\0\\x1b[2Jb')", Fault.EXCEPTION, "ValueError: a\0\x1b[2Jb"),
    "its text cannot be had": (
        """
        class Odd(Exception):
            def __str__(self): raise KeyError('no')
        raise Odd
        """,
        Fault.EXCEPTION,
        "Odd: (its text cannot be had: KeyError)",
    ),
    "its text is none": (
        """
        class Odd(Exception):
            def __str__(self): return 5
        raise Odd
        """,
        Fault.EXCEPTION,
        "Odd: (its text cannot be had: TypeError)",
    ),
    "it says what it was raised from": (
        """
        try: raise OSError(5, 'Input/output error', '/data')
        except OSError as error: raise LookupError('sample 5') from error
        """,
        Fault.STORAGE,
        "LookupError: sample 5 (of OSError: [Errno 5] Input/output error: '/data')",
    ),
    "it was raised while another was handled": (
        """
        try: raise OSError(5, 'Input/output error', '/data')
        except OSError: raise LookupError('sample 5')
        """,
        Fault.STORAGE,
        "LookupError: sample 5 (of OSError: [Errno 5] Input/output error: '/data')",
    ),
    "that other one is not told of": (
        """
        try: raise OSError(5, 'Input/output error', '/data')
        except OSError: raise LookupError('sample 5') from None
        """,
        Fault.EXCEPTION,
        "LookupError: sample 5",
    ),
    "a chain without an end": (
        """
        a, b = ValueError('a'), ValueError('b')
        a.__cause__, b.__cause__ = b, a
        raise a
        """,
        Fault.EXCEPTION,
        "ValueError: a",
    ),
    "a chain of ten thousand": (
        """
        error = None
        for number in range(10000):
            error, before = ValueError(number), error
            error.__cause__ = before
        raise error
        """,
        Fault.EXCEPTION,
        "ValueError: 9999",
    ),
    "a group of errors": (
        "raise ExceptionGroup('two', [ValueError('a'), OSError(28, 'No space left', '/data')])",
        Fault.STORAGE,
        "ExceptionGroup: two (2 sub-exceptions) (of OSError: [Errno 28] No space left: '/data')",
    ),
    "a group in which somebody has interrupted": (
        "raise BaseExceptionGroup('one', [KeyboardInterrupt()])",
        Fault.INTERRUPTED,
        "BaseExceptionGroup: one (1 sub-exception)",
    ),
    "no end of recursion": (
        """
        def deeper(): deeper()
        deeper()
        """,
        Fault.EXCEPTION,
        "RecursionError: maximum recursion depth exceeded",
    ),
    "the script is none": ("if True print('no')", Fault.EXCEPTION, "SyntaxError: invalid syntax"),
    "it imports what is not there": (
        "import no_such_module",
        Fault.EXCEPTION,
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "an assertion": ("assert 1 == 2, 'not equal'", Fault.EXCEPTION, "AssertionError: not equal"),
    "in a hook of a backward pass": (
        """
        import torch
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda gradient: {}['no'])
        x.sum().backward()
        """,
        Fault.EXCEPTION,
        "KeyError: 'no'",
    ),
    "in a thread that is waited for": (
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as pool:
            pool.submit(open, '/dev/full', 'w').result().write('x' * (1 << 20))
        """,
        Fault.STORAGE,
        "OSError: [Errno 28] No space left on device",
    ),
    "in a loader's process": (
        """
        from torch.utils.data import DataLoader, Dataset
        class Samples(Dataset):
            def __len__(self): return 4
            def __getitem__(self, at): raise LookupError(at)
        list(DataLoader(Samples(), num_workers=1))
        """,
        Fault.EXCEPTION,
        "LookupError: Caught LookupError in DataLoader worker process 0.",
    ),
    "a full disk in a distributed checkpoint": (
        """
        from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
        raise CheckpointException('write', {3: _wrap_exception(OSError(28, 'No space left', '/save'))})
        """,
        Fault.STORAGE,
        "CheckpointException: CheckpointException ranks:dict_keys([3]) (of OSError: [Errno 28] No",
    ),
    "a bug in a distributed checkpoint": (
        """
        from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
        raise CheckpointException('write', {3: _wrap_exception(KeyError('weight'))})
        """,
        Fault.EXCEPTION,
        "CheckpointException: CheckpointException ranks:dict_keys([3])",
    ),
    "a distributed checkpoint, where it is not told why": (
        "from torch.distributed.checkpoint.api import CheckpointException as E; raise E('write', {})",
        Fault.TRANSPORT,
        "CheckpointException: a checkpoint has failed on another rank, which says why",
    ),
    "a library in Rust": (
        """
        class SafetensorError(Exception): pass
        raise SafetensorError('I/O error: No space left on device (os error 28)')
        """,
        Fault.STORAGE,
        "SafetensorError: I/O error: No space left on device (os error 28)",
    ),
    "sys.exit with what has no text": (
        """
        class Odd:
            def __str__(self): raise KeyError('no')
            __repr__ = __str__
        raise SystemExit(Odd())
        """,
        Fault.EXITED,
        "sys.exit(Odd)",
    ),
    "sys.exit with much text": ("raise SystemExit('x' * (80 << 20))", Fault.EXITED, "sys.exit('xxx"),
}


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ScriptFailed]:
    """Runs a script as a worker does."""
    monkeypatch.setattr(plugins, "load", lambda group: [])
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.setattr("sys.argv", ["train.py"])

    def run(text: str) -> ScriptFailed:
        script = tmp_path / "train.py"
        script.write_text(dedent(text))
        _, failure, _ = entry._outcome(Command(str(script)))
        assert failure is not None
        return failure

    return run


@pytest.mark.parametrize("name", ODD)
def test_odd_errors(name: str, outcome: Callable[[str], ScriptFailed]) -> None:
    text, fault, what = ODD[name]
    failure = outcome(text)
    assert failure.fault is fault
    assert failure.what.startswith(what)
    assert len(failure.what) < 800
    body = encode(failure)
    assert len(body) < 1 << 20, "it is sent to the controller, and shown"
    assert FROM_WORKER.decode(body, "a worker") == failure


def test_the_end_of_a_long_text_is_told(outcome: Callable[[str], ScriptFailed]) -> None:
    failure = outcome(ODD["megabytes of message"][0])
    assert failure.traceback.rstrip().endswith("xthe end")
    assert "in <module>" in failure.traceback


@pytest.mark.parametrize("size", [1, 100_000])
def test_there_is_memory_to_tell_that_there_is_none(size: int, tmp_path: Path) -> None:
    """Where the script's own is not given back when its frames are, and what is left is used up by the last
    byte."""
    script = tmp_path / "train.py"
    script.write_text(
        dedent(
            f"""
            import resource
            used = 4096 * int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
            kept = []
            while True: kept.append(bytearray({size}))
            """
        )
    )
    ending = f"""
        import os
        from ft_core import plugins
        from ft_core.protocol.codec import encode
        from ft_core.settings import Command
        from ft_core.worker import entry, ordinary
        plugins.load = lambda group: []
        code, failure, error = entry._outcome(Command({str(script)!r}))
        os.write(1, encode(failure))
        os._exit(ordinary.end(code, error) + 10)
    """
    done = subprocess.run([sys.executable, "-c", dedent(ending)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 11, done.stderr
    assert "MemoryError" in done.stderr
    told = FROM_WORKER.decode(done.stdout.encode(), "a worker")
    assert told == ScriptFailed(Fault.MEMORY, "MemoryError", ANY, ANY)


def test_the_same_error_is_known_again_and_another_is_not(outcome: Callable[[str], ScriptFailed]) -> None:
    texts = ["raise ValueError(f'{id({})} at {1.5}')", "raise ValueError(f'{id([])} at {2.5}')"]
    one, other = (outcome(text).signature for text in texts)
    assert one == other
    assert outcome("\nraise ValueError('1 at 2')").signature != one, "in another line"
    assert outcome("raise KeyError('1 at 2')").signature != one


# -- the script's own hook for errors --------------------------------------------------------------


def shown(hook: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.excepthook", hook)
    return ordinary._show(ValueError("the script's"), 1)


def test_a_hook_that_fails_is_shown_with_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hook(*about: object) -> None:
        raise KeyError("the hook's")

    assert shown(hook, monkeypatch) == 1
    said = capsys.readouterr().err
    assert 'KeyError: "the hook\'s"' in said and "ValueError: the script's" in said


@pytest.mark.parametrize(("own", "code"), [(4, 4), (0, 1), (None, 1), ("no", 1)])
def test_a_hook_that_ends_the_process_chooses_its_code(
    own: object, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(*about: object) -> None:
        sys.exit(own)  # type: ignore[arg-type]

    assert shown(hook, monkeypatch) == code


# -- what torch's backends say of each other -------------------------------------------------------


def gloo(store: dist.Store, rank: int, seconds: float) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(store, rank, 2, options)


def pair(seconds: float) -> list[dist.ProcessGroup]:
    store, groups = dist.HashStore(), [None, None]

    def make(rank: int) -> None:
        groups[rank] = gloo(store, rank, seconds)

    threads = [threading.Thread(target=make, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups  # type: ignore[return-value]


def fails(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_gloo_nobody_comes() -> None:
    groups, soon = pair(60), dist.AllreduceOptions()
    soon.timeout = timedelta(seconds=0.3)
    error = fails(lambda: groups[0].allreduce([torch.ones(4)], soon).wait())
    assert faults.classify(error) is Fault.TRANSPORT, error


def test_gloo_the_other_is_gone(tmp_path: Path) -> None:
    read, write = os.pipe()
    path = str(tmp_path / "store")
    child = os.fork()
    if not child:
        groups = gloo(dist.FileStore(path, 2), 1, 60)
        os.write(write, b"x")
        os._exit(0 if groups else 1)
    group = gloo(dist.FileStore(path, 2), 0, 60)
    os.read(read, 1)
    os.waitpid(child, 0)
    error = fails(lambda: group.allreduce([torch.ones(4)]).wait())
    assert faults.classify(error) is Fault.TRANSPORT, error


def test_a_store_without_the_key_and_without_a_server() -> None:
    soon = timedelta(seconds=0.3)
    server = [dist.TCPStore("127.0.0.1", 0, is_master=True)]
    server[0].set_timeout(soon)
    missing = fails(lambda: server[0].get("x"))
    assert faults.classify(missing) is Fault.TRANSPORT, missing
    port = server.pop().port
    refused = fails(lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=soon))
    assert faults.classify(refused) is Fault.TRANSPORT, refused


# -- what a device says: texts as torch has them, without a device ---------------------------------

_ASYNC = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.27.3\n{}"
ACCELERATOR, BACKEND = torch.AcceleratorError, dist.DistBackendError
DEVICE = [
    (ACCELERATOR, f"CUDA error: device-side assert triggered{_ASYNC}", Fault.EXCEPTION),
    (ACCELERATOR, f"CUDA error: invalid device ordinal{_ASYNC}", Fault.EXCEPTION),
    (ACCELERATOR, f"CUDA error: no kernel image is available for execution on the device{_ASYNC}",
     Fault.EXCEPTION),
    (ACCELERATOR, f"CUDA error: an illegal memory access was encountered{_ASYNC}", Fault.DEVICE),
    (ACCELERATOR, f"CUDA error: unspecified launch failure{_ASYNC}", Fault.DEVICE),
    (ACCELERATOR, f"CUDA error: uncorrectable NVLink error detected{_ASYNC}", Fault.DEVICE),
    (ACCELERATOR, f"CUDA error: out of memory{_ASYNC}", Fault.DEVICE_MEMORY),
    (RuntimeError, "CUDA driver error: out of memory", Fault.DEVICE_MEMORY),
    (RuntimeError, "CUDA unknown error - this may be due to an incorrectly set up environment", Fault.DEVICE),
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of",
     Fault.DEVICE_MEMORY),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     Fault.DEVICE_MEMORY),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa )`",
     Fault.DEVICE),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", Fault.DEVICE),
    (BACKEND, _NCCL.format("unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
     "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
     "Cuda failure 700 'an illegal memory access was encountered'"), Fault.DEVICE),
    (BACKEND, _NCCL.format("unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
     "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
     Fault.DEVICE_MEMORY),
    (BACKEND, _NCCL.format("remote process exited or there was a network error",
     "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting."),
     Fault.TRANSPORT),
    (BACKEND, _NCCL.format("unhandled system error (run with NCCL_DEBUG=INFO for details)",
     "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."),
     Fault.TRANSPORT),
    (BACKEND, _NCCL.format("internal error - please report this issue to the NCCL developers",
     "ncclInternalError: Internal check failed."), Fault.TRANSPORT),
    (BACKEND, _NCCL.format("invalid usage (run with NCCL_DEBUG=WARN for details)",
     "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."), Fault.EXCEPTION),
    (BACKEND, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)",
     Fault.TRANSPORT),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "fault"), DEVICE, ids=lambda value: str(value)[:40])
def test_what_a_device_says(kind: type[Exception], text: str, fault: Fault) -> None:
    assert faults.classify(kind(text)) is fault
