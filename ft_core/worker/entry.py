"""The entry of a worker process: waits for a role, then runs the user's script in it."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import NoReturn

from ft_core import plugins
from ft_core.comm import backend, objects
from ft_core.errors import ConfigError
from ft_core.process import oom_score, stacks
from ft_core.process.async_writer import log_beside_script
from ft_core.process.lines import LOG_CONTEXT
from ft_core.process.stream import has_gpu
from ft_core.process.timeline import timeline
from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import TO_WORKER, Fault, ScriptFailed
from ft_core.settings import Command
from ft_core.worker import (
    build_locks,
    cuda_fork,
    device_memory,
    faults,
    first_use,
    import_output,
    imports,
    marks,
    ordinary,
    predecessor_cleanup,
    tracking,
    unprotected,
)
from ft_core.worker.data_waits import data_waits
from ft_core.worker.logs import played, redirect, take_over
from ft_core.worker.ordinary import exit_code
from ft_core.worker.recovery import Ahead
from ft_core.worker.session import Session, begin
from ft_core.worker.shell import WorkerShell
from ft_core.worker.standby_isolation import StandbyIsolation

_CONNECT_TIMEOUT = 30.0
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after KeyboardInterrupt, as shells have it."""
_OURS = (__file__, runpy.run_path.__code__.co_filename)
"""Files whose frames a traceback of the script's does not begin with elsewhere."""


def main(
    socket: str,
    secret: bytes,
    job_dir: str,
    worker: int,
    device: int,
    command: Command,
    logs: tuple[int, str],
    json: bool,
) -> NoReturn:
    """Run in a process forked by the agent, and leave it when the whole job is done.

    `device` is the index of the GPU this worker would use, or -1 for one that may serve any. `logs`:
    which streams (1 out, 2 err, 3 both) go to files, and in which directory. `json`: how this engine logs.
    """
    timeline.begin(Path(logs[1]))
    timeline.mark("forked")
    oom_score.go_first()
    ordinary.begin()
    LOG_CONTEXT.json, LOG_CONTEXT.component = json, "worker"
    node = Path(logs[1]).parent.name.rpartition("-")[0]
    LOG_CONTEXT.about = lambda: {"node": node}
    redirect(logs[0], Path(logs[1]))
    stacks.register(Path(logs[1]))
    log_beside_script(plugins.packages())
    channel = Channel.connect(socket, secret, TO_WORKER, _CONNECT_TIMEOUT)
    channel.settimeout(None)
    shell, process = WorkerShell(channel, secret, Path(job_dir), worker), os.getpid()
    try:
        _play(shell, node, Path(job_dir), Path(logs[1]), device, command)
    except BaseException as raised:  # not the script's: all of its errors are caught where it is run
        code, failure, error = _ours(raised)
        if shell.machine.role >= 0 and os.getpid() == process:  # else a child that the script has forked
            shell.failed(failure)
        os._exit(ordinary.end(code, error))


def _play(
    shell: WorkerShell, node: str, job_dir: Path, logs: Path, device: int, command: Command
) -> NoReturn:
    """Take a role, once there is one, and run the script in it. What this raises is the engine's."""
    on_gpu = not command.no_python and not cuda_fork.broken() and has_gpu()
    if on_gpu:
        device_memory.warm(device)
    timeline.mark("standing by")
    assignment = shell.wait_for_role()
    timeline.mark("role taken")
    LOG_CONTEXT.about = lambda: {"node": node, **shell.about}
    plan = assignment.plan
    role, apart, started_over = assignment.role, plan.detached, plan.restart_epoch
    backstage = StandbyIsolation(logs) if apart else None
    if plan.epoch > 1 and not played(job_dir / "logs", role, None):
        shell.injector.succeeds(role, plan.version)
    if backstage is None:
        predecessors = take_over(logs, role, started_over)
    else:
        predecessors = played(job_dir / "logs", role, started_over)
    if role == 0 and not apart and not predecessors:
        import_output.show()
    os.environ.update(assignment.env)
    if on_gpu and apart:  # what the script makes before it says which device it uses, it makes for this one
        device_memory.choose(int(os.environ["LOCAL_RANK"]))
    predecessor_cleanup.wait(assignment.role, assignment.ending, to_the_end=on_gpu)
    if on_gpu and assignment.plan.epoch > 1 and not apart:
        device_memory.wait(assignment.role, int(os.environ["LOCAL_RANK"]))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored until here, see ft_core.node.workers.departure
    if command.no_python:
        code, failure, error = _outcome(command)  # it cannot be executed
        assert failure is not None
        shell.failed(failure)
        os._exit(ordinary.end(code, error))

    class Waits(Ahead):
        def is_ready(self) -> None:
            if backstage is not None:
                if on_gpu:
                    device_memory.tell(shell.control)
                backstage.rests()

        def takes_over(self) -> None:
            timeline.takes_over()
            if backstage is not None:
                backstage.leave()
                session.predecessors[:] = take_over(logs, role, started_over)

    session = Session(shell, predecessors, Waits())
    begin(session)
    backend.install(session.comms)
    objects.install(session.comms.startup)
    watch = unprotected.install(session)
    first_use.install(session)
    marks.install()
    build_locks.install(session.overlay.real)
    data_waits.install()
    cuda_fork.check()
    imports.hide()
    for install in plugins.load(plugins.HOOKS):
        install()
    if session.joining:
        # The agent's directory, which goes with it: nothing of another machine's is there.
        session.overlay.begin(job_dir, Path(get_temp_dir()), session.in_place.cannot_pass)
        session.comms.startup.tells = session.overlay.complete
        session.comms.startup.repeats = session.overlay.was_done
    tracking.install(session, logs, partial(played, job_dir / "logs", role, None))
    timeline.mark("script")
    process = os.getpid()
    code, failure, error = _outcome(command)
    if os.getpid() != process:  # a child that the script has forked; the role is its parent's
        os._exit(ordinary.end(code, error))
    if failure is not None:
        shell.failed(failure)  # before anything of the script's runs again, which may end this process
    else:
        watch.script_ends()
        session.leave()
    code = ordinary.end(code, error)
    if code == 0:
        shell.finish()
    os._exit(code)  # the communicators of a finished job are not taken down one by one


def _outcome(command: Command) -> tuple[int, ScriptFailed | None, BaseException | None]:
    """Run the script to its end. Its exit code, why it is not 0, and the error that is to be shown."""
    try:
        run(command)
    except SystemExit as stop:
        code = exit_code(stop)
        if not isinstance(stop.code, int | None):
            with contextlib.suppress(Exception):  # the script's own __str__
                print(stop.code, file=sys.stderr)
        what = faults.exit_call(stop)
        failure = ScriptFailed(Fault.EXITED, what, "", f"the script ended itself: {what}")
        return code, failure if code else None, None
    except ConfigError as error:
        return _ours(error)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        failure = faults.failed(error.with_traceback(trace))
        return INTERRUPTED if failure.fault is Fault.INTERRUPTED else 1, failure, error
    return 0, None, None


def _ours(error: BaseException) -> tuple[int, ScriptFailed, BaseException | None]:
    """The same for an error of the engine's own."""
    if isinstance(error, ConfigError):  # ftrun says it once, in place of a traceback from each role
        return 1, ScriptFailed(Fault.REFUSED, "it cannot go on like this", "", str(error)), None
    return 1, faults.own(error), error


def run(command: Command) -> None:
    """Execute the script or module as `__main__`, as the interpreter would; another program in its place."""
    if command.no_python:  # it cannot be hooked from here, and runs as under torchrun
        os.execvp(command.target, [command.target, *command.arguments])
    sys.argv = [command.target, *command.arguments]
    if command.module:
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(command.target).resolve().parent)  # in place of where `ftrun` was called
    runpy.run_path(os.path.abspath(command.target), run_name="__main__")
