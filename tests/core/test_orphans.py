"""What a killed worker leaves behind goes: its processes, theirs, and what it had named in the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

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
from ft_core import orphans
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


def test_orphans():
    done = subprocess.run(
        [sys.executable, "-c", AGENT, WORKER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
