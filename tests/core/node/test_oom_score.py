"""Where memory runs out the kernel ends a worker, not the agent, and with it the node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from failing_jobs import little_memory
from harness import environment

SCRIPT = """
import os, subprocess
own = "/proc/{}/oom_score_adj"
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
agent = parent(os.getppid())
assert b"ft_core.node" in open(f"/proc/{agent}/cmdline", "rb").read()
child = subprocess.run(["cat", own.format("self")], capture_output=True, text=True).stdout
print("scores:", open(own.format("self")).read().strip(), child.strip(), open(own.format(agent)).read())
"""
BEGINS = """
import os, sys
open("/proc/self/oom_score_adj", "w").write("300")
os.execv(sys.executable, [sys.executable, "-m", "ft_core.cli.launch", *sys.argv[1:]])
"""


def test_workers_and_what_they_start_go_before_their_agent(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["--standalone", "--job-dir", str(tmp_path / "job"), str(script)]
    done = subprocess.run(
        [sys.executable, "-c", BEGINS, *flags], capture_output=True, text=True, env=environment(), timeout=110
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"scores: (\d+) (\d+) (\d+)", done.stdout)
    assert found is not None and found.groups() == ("1000", "1000", "300"), "what the user has set stays"


PAIR = """
import mmap, os, sys
from ft_core.process import oom_score
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
size = int(sys.argv[2])
copies = mmap.mmap(-1, size)
for at in range(0, size, 4096):
    copies[at] = 1
if not (worker := os.fork()):
    oom_score.go_first()
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 12) * 256))
print(os.waitpid(worker, 0)[1], flush=True)
"""


def test_the_kernel_ends_the_worker() -> None:
    """Of two processes in a cgroup whose memory they need; the agent has more of it."""
    with little_memory() as cgroup:
        if cgroup is None:
            pytest.skip("no cgroup with a limit of memory can be made here")
        v1 = cgroup / "memory.limit_in_bytes"
        limit = int((v1 if v1.exists() else cgroup / "memory.max").read_text())
        done = subprocess.run(
            [sys.executable, "-c", PAIR, str(cgroup), str(limit * 6 // 10)],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        assert os.waitstatus_to_exitcode(int(done.stdout)) == -signal.SIGKILL
