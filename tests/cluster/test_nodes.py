"""The cluster itself: what is a node's own, who reaches whom, and that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster.jobs import needed
from cluster.nodes import DISK, ROOT, SHARED, Cluster, Node
from processes import running
from waiting import wait_for_value

pytestmark = needed


def said(node: Node, *argv: str, user: int = 0) -> str:
    """What a command prints there."""
    process = node.run(*argv, output=subprocess.PIPE, user=user)
    return process.communicate(timeout=30)[0].strip()


ASK = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 9), timeout=0.5)
    except ConnectionRefusedError as error:
        print("reached")
    except OSError:
        print("silent")
"""


def reaches(node: Node, *addresses: str) -> list[str]:
    """Whether somebody is there, for each."""
    return said(node, sys.executable, "-c", ASK, *addresses).splitlines()


def test_what_is_a_nodes_own(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, shm="64m", shared=True) as cluster:
        one, other = cluster.nodes
        assert said(one, "hostname") == said(one, "cat", "/etc/hostname") == "node0"
        places = ["/tmp", "/run", "/dev/shm", os.path.expanduser("~"), str(DISK)]
        for place in places:
            said(one, "touch", f"{place}/mine")
        assert not said(other, "sh", "-c", f"ls {' '.join(place + '/mine' for place in places)} 2>/dev/null")
        said(one, "touch", str(SHARED / "ours"))
        assert said(other, "ls", str(SHARED)) == "ours"
        assert said(one, "df", "-m", "--output=size", "/dev/shm").split()[-1] == "64"
        one.run("sleep", "1000")
        names = "sh", "-c", "cat /proc/[0-9]*/comm"
        wait_for_value(lambda: said(one, *names).count("sleep"), 2, 20)  # and the first process
        assert said(other, *names).count("sleep") == 1
        assert said(one, sys.executable, "-c", "import ft_core, os; print(os.getuid())", user=4711) == "4711"
        assert said(one, "pwd") == str(ROOT)
        seconds = [said(node, "cut", "-d.", "-f1", "/proc/uptime") for node in cluster.nodes]
        assert 9_990 < int(seconds[1]) - int(seconds[0]) < 10_010  # no clock but that of the day is another's


def test_who_reaches_whom(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, rate="100mbit") as cluster:
        one, other = cluster.nodes
        [four, six], [second, _] = other.addresses(0), other.addresses(1)

        def wait_for(expected: str, node: Node, *addresses: str) -> None:
            wait_for_value(lambda: reaches(node, *addresses), expected.split(), 20)  # cables take a second

        wait_for("reached reached reached reached", one, "node1", four, six, second)
        other.link_down(0)
        wait_for("silent silent reached", one, four, six, second)
        wait_for("reached", other, *one.addresses()[:1])  # by the interface that is left
        other.link_up(0)
        wait_for("reached reached", one, four, six)
        other.kill()
        wait_for("silent silent", one, four, second)
        other.boot()
        wait_for("silent reached", one, four, "node1")  # the same name, and another address


KILLED = """
import sys, time
from pathlib import Path
from cluster.nodes import Cluster
cluster = Cluster(Path(sys.argv[1]), 1)
cluster.nodes[0].run("sleep", "1000")
print(cluster.router.pid, flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_of_a_cluster_whose_process_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and int(process.stdout.readline())
    started = descendants(process.pid)
    assert len(started) == 7  # of router and node what holds them and their first, and what was run
    process.kill()
    process.wait()
    wait_for_value(lambda: started & {each.pid for each in running()}, set())


def descendants(pid: int) -> set[int]:
    found = {pid}
    while more := {each.pid for each in running() if each.parent in found} - found:
        found |= more
    return found
