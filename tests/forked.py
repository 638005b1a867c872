"""Runs a script's ranks as forks of one process that has its imports done: what torchrun does, sooner.

What a job with failures is compared with is a run without any. Under torchrun most of that run is the
imports, once for each rank; here they are made once per session of pytest. Run as a program, this is that
process. It knows nothing of fault tolerance: its ranks are plain ones, as `torchrun` would start them.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

from ports import free_port

_PR_SET_PDEATHSIG = 1
_POLL = 0.05
_STREAMS = ("stdout", "stderr")


class Forked:
    """Such a process, as the test sees it; it and all its ranks end with the test's own process."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        """`log`: where what goes wrong there is written."""
        self._log = log
        # Not its stdout: some packages print when they are imported.
        read, write = os.pipe()
        with log.open("w") as output, open(write, "w"):
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(os.getpid()), str(write)],
                env=environment | {"TORCHELASTIC_RUN_ID": "forked"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[write],
                text=True,
            )
        self._replies = os.fdopen(read)

    def run(
        self,
        script: Path,
        arguments: list[str],
        world: int,
        logs: Path,
        variables: dict[str, str] | None = None,
        timeout: float = 110,
    ) -> list[str]:
        """Run the script, and its `main()`, on `world` ranks to the end: what each has printed.

        `variables` are for this run alone. What ranks print and complain of is in files in `logs`.
        AssertionError when a rank fails, or when they take longer than `timeout` seconds.
        """
        logs.mkdir(parents=True, exist_ok=True)
        request = {"script": str(script), "arguments": arguments, "world": world, "logs": str(logs)}
        request |= {"variables": variables or {}, "timeout": timeout}
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._replies.readline()
        assert reply, f"the process that forks ranks has ended: {self._log.read_text()[-3000:]}"
        codes = json.loads(reply)
        printed, errors = (
            [(logs / f"rank-{rank}.{stream}").read_text(errors="replace") for rank in range(world)]
            for stream in _STREAMS
        )
        failed = [rank for rank, code in enumerate(codes) if code]
        assert not failed, f"exit codes {codes} of {script} {arguments}: " + "\n".join(
            printed[rank][-1000:] + errors[rank][-2000:] for rank in failed
        )
        return printed


# -- the process that forks ------------------------------------------------------------------------


def _serve(parent: int, replies: IO[str]) -> None:
    """Answer requests, a line each, until there are no more."""
    _die_with(parent)
    os.set_inheritable(replies.fileno(), False)
    for line in sys.stdin:
        request = json.loads(line)
        _import(Path(request["script"]))
        print(json.dumps(_run(request)), file=replies, flush=True)


def _import(script: Path) -> None:
    """What the script imports at its top, in its order, and what stands beside it as it would find it."""
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    for statement in ast.parse(script.read_text()).body:
        if isinstance(statement, ast.Import):
            for name in statement.names:
                importlib.import_module(name.name)
        elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
            importlib.import_module(str(statement.module))


def _run(request: dict[str, Any]) -> list[int]:
    """The exit codes of all ranks; -9 where one was killed, since another had failed or time was up."""
    port, server = free_port(), os.getpid()
    ranks: list[int] = []
    for rank in range(request["world"]):
        pid = os.fork()
        if pid == 0:
            _rank(request, rank, port, server, ranks[0] if ranks else 0)
        with contextlib.suppress(OSError):  # here as well as there: done by whoever comes first
            os.setpgid(pid, ranks[0] if ranks else pid)
        ranks.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + request["timeout"]
    while len(codes) < len(ranks):
        time.sleep(_POLL)
        if time.monotonic() > deadline or any(codes.values()):
            for pid in ranks:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        for pid in ranks:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(ranks[0], signal.SIGKILL)  # what they have spawned, for their checkpoints
    return [codes[pid] for pid in ranks]


def _rank(request: dict[str, Any], rank: int, port: int, server: int, group: int) -> NoReturn:
    """In a fork: be that rank."""
    code = 1
    try:
        _die_with(server)
        os.setpgid(0, group)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(_STREAMS, 1):
            path = Path(request["logs"]) / f"rank-{rank}.{stream}"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ |= request["variables"]
        world = str(request["world"])
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = [request["script"], *request["arguments"]]
        # Not as `__main__`: what it spawns would have to import all of it again. One without `main` is done.
        runpy.run_path(request["script"], run_name="forked_script").get("main", int)()
        assert "ft_megatron.hooks" not in sys.modules, "a reference knows nothing of fault tolerance"
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # tensorboard writes its last values there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Be killed when the parent process ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it had ended before


if __name__ == "__main__":
    _serve(int(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w"))
