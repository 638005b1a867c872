"""What a killed worker leaves behind goes: its processes, theirs, and what it had named in the system."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import environment
from processes import children, in_groups

WORKER = """
import multiprocessing.resource_tracker, subprocess, sys
context = multiprocessing.get_context("spawn")
lock = context.Lock()  # has a name in the system until its tracker takes it away
chain = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"
child = subprocess.Popen([sys.executable, "-c", chain])
tracker = multiprocessing.resource_tracker._resource_tracker._pid
print("/dev/shm/sem." + lock._semlock.name.removeprefix("/"), tracker, flush=True)
child.wait()
"""

AGENT = """
import os, signal, subprocess, sys, time
from ft_core.node.workers import orphans
orphans.adopt()
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
told = [worker.stdout.readline().strip() for _ in range(2)]
about, sleeper = sorted(told)
name, tracker = about.split()
assert os.path.exists(name) and os.path.exists(f"/proc/{sleeper}")
os.kill(int(tracker), signal.SIGSTOP)
worker.kill()
worker.wait()
assert not orphans.end()
os.kill(int(tracker), signal.SIGCONT)
while not orphans.end():
    time.sleep(0.01)
assert not os.path.exists(name), "the tracker was killed before it had cleaned up"
assert not os.path.exists(f"/proc/{sleeper}")
"""


REUSED = """
import os, subprocess, sys
from ft_core.node.workers import orphans
alive = subprocess.Popen([sys.executable, "-c", "import subprocess as s; s.run(['sleep', '1000'])"])
while not (found := orphans._children(alive.pid)):
    pass
orphans.end_of(alive.pid)
[pid] = found
assert orphans._children(alive.pid) == found and orphans._stat(pid)[0] != "Z", "it is another's by now"
orphans._end(pid, os.getpid())
assert orphans._stat(pid)[0] != "Z", "it is no child of this process"
orphans._end(pid, alive.pid)
alive.wait()
"""


TOOL = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from ft_core.node.workers import orphans
from ft_core.process import stacks
orphans.adopt()
with ThreadPoolExecutor(1) as threads:
    said = threads.submit(stacks._tool, os.getpid(), orphans.child)
    while not Path("started").exists():
        time.sleep(0.01)
    assert orphans.end(), "it was taken for what a worker has left"
    Path("go-on").touch()
    assert said.result() == "all threads\\n"
assert not orphans._own
"""
PY_SPY = """#!/bin/sh
touch started
while [ ! -e go-on ]; do sleep 0.05; done
echo all threads
"""


def test_what_has_an_orphans_number_by_now_lives_on():
    """A number is given again: whoever has it is looked at once more in the moment of the signal."""
    done = subprocess.run(
        [sys.executable, "-c", REUSED], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_orphans():
    done = subprocess.run(
        [sys.executable, "-c", AGENT, WORKER],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_nothing_outlives_an_ftrun_that_is_killed_at_once(tmp_path: Path, short_path: Path):
    """Agents that are still importing then find another parent than the one that has started them."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", f"--job-dir={tmp_path / 'job'}"]
    with subprocess.Popen(
        [*command, str(tmp_path / "train.py")], env=environment() | {"TMPDIR": str(short_path)}
    ) as job:
        while len(started := children(job.pid)) < 2:
            time.sleep(0.001)
        job.kill()
    try:
        deadline = time.monotonic() + 60
        while left := in_groups(started):
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)
    finally:
        for group in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    assert not [path.name for path in short_path.glob("ft-agent-*")]


def test_what_looks_at_a_stack_is_left_to_end(tmp_path: Path) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(PY_SPY)
    tool.chmod(0o755)
    about = {**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", TOOL], check=True, timeout=60, cwd=tmp_path, env=about)
