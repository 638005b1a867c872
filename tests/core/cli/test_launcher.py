"""The processes of a machine, which `ftrun` starts: stand-ins here, since the launcher alone is looked at."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core.process.test_async_writer import fill
from harness import environment
from waiting import wait_for_value

from ft_core.cli import launcher as launching
from ft_core.cli.launcher import Launcher
from ft_core.process.async_writer import console
from ft_core.process.sigterm import ENDED

WAITS = "import pathlib, time\nwhile not pathlib.Path({over!r}).exists(): time.sleep(0.02)"
DIES = "import os; os.kill(os.getpid(), 9)"


class StandIns(Launcher):
    """Starts these programs, in order, or fails so. With the last one, `over` is there."""

    def __init__(self, tmp_path: Path, *programs: str | OSError) -> None:
        super().__init__(tmp_path)
        self.over = tmp_path / "over"
        self.programs, self.started = list(programs), 0

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = self.programs.pop(0)
        if isinstance(program, OSError):
            raise program
        if not self.programs:
            self.over.touch()
        self.started += 1
        return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)


NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def waits(tmp_path: Path) -> str:
    return WAITS.format(over=str(tmp_path / "over"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_RETRY", 0.1)


def test_a_controller_that_cannot_be_started_is_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stays = waits(tmp_path)
    job = StandIns(tmp_path, DIES, stays, NO_PROCESS, NO_PROCESS, stays)
    try:
        job.controller()
        job.agent("node0", 0, "")
        assert job.wait() == 0
        assert [agent.wait(20) for agent in job._agents] == [0], "it goes on meanwhile"
    finally:
        job.stop()
    assert console().flush(20)
    assert job.started == 3 and not list(tmp_path.glob("ft-agent-*"))
    assert capfd.readouterr().err.count("cannot be started, and is tried again") == 1


@pytest.mark.parametrize("what", ["directory", "process"])
def test_a_node_that_cannot_be_started_is_tried_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stays = waits(tmp_path)
    fails = [NO_PROCESS] * 2 if what == "process" else []
    job = StandIns(tmp_path, stays, stays, DIES, *fails, stays)
    job._sockets_in = str(tmp_path)
    job.standalone, job.respawn, job.needed = True, True, 2
    made, full = tempfile.mkdtemp, [OSError(errno.ENOSPC, "No space left on device")] * 2
    try:
        job.controller()
        job.agent("node0", 0, "")
        job.agent("node1", 1, "")

        def make(**about: Any) -> str:
            if what == "directory" and full:
                raise full.pop()
            return made(**about)

        monkeypatch.setattr(tempfile, "mkdtemp", make)
        assert job.wait() == 0
        assert [agent.wait(20) for agent in job._agents] == [0, 0]
    finally:
        job.stop()
    assert console().flush(20)
    assert job.started == 4 and not list(tmp_path.glob("ft-agent-*"))
    assert capfd.readouterr().err.count("cannot be started, and is tried again") == 1


FTRUN = """
import subprocess, sys
from ft_core.cli import launch
from ft_core.cli.launcher import Launcher

def start(self, module, *arguments):
    program = sys.argv[1 + (module == "ft_core.control")]
    return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)

Launcher._start = start
sys.exit(launch.main(["--standalone", "--spares=0", "--job-dir=job", "train.py"]))
"""
SAVES = """
import pathlib, signal, sys
def told(*_):
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
signal.alarm(60)
pathlib.Path("ready").touch()
while True: signal.pause()
"""
CONTROLS = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(60)
while not pathlib.Path("saved").exists(): time.sleep(0.02)
"""


def test_a_signal_that_comes_several_times_at_once_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends it for the step and for the job, and a shell that has it passes it on."""
    now = 100.0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    job = StandIns(tmp_path, CONTROLS, SAVES)
    try:
        job.controller()
        job.agent("node0", 0, "")
        wait_for_value((tmp_path / "ready").exists, True)
        for later in (0.0, 0.1, launching._AS_ONE):
            now = 100.0 + later
            job.terminate()
        assert job.wait() == 0 and (tmp_path / "saved").exists()
        now += 0.1
        with pytest.raises(SystemExit) as ends:
            job.terminate()
        assert ends.value.code == ENDED
    finally:
        job.stop()


@pytest.mark.parametrize("console_is", ["gone", "full"])
def test_sigterm_is_passed_on_where_nobody_reads_what_is_said(console_is: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    reader, stderr = os.pipe()
    if console_is == "gone":
        os.close(reader)
    else:
        fill(stderr)
    with subprocess.Popen(
        [sys.executable, "-c", FTRUN, SAVES, CONTROLS], cwd=tmp_path, env=environment(), stderr=stderr
    ) as ftrun:
        os.close(stderr)
        try:
            wait_for_value(lambda: (tmp_path / "ready").exists() or ftrun.poll() is not None, True)
            ftrun.send_signal(signal.SIGTERM)
            assert ftrun.wait(30) == 0
        finally:
            ftrun.kill()
    assert (tmp_path / "saved").exists()
    if console_is == "full":
        os.close(reader)
