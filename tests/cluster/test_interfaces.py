"""State goes over the interfaces that it is told to take, as far as they are up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster.jobs import ClusterJob, Loop, needed
from cluster.nodes import Cluster, Node
from harness import check_identical, check_survivors

pytestmark = needed


def sent(node: Node, interface: str) -> int:
    """Bytes since the node was booted."""
    process = node.run("grep", f"{interface}:", "/proc/net/dev", output=subprocess.PIPE)
    return int(process.communicate(timeout=30)[0].split()[9])


def test_state_goes_over_the_interface_that_was_named(tmp_path: Path) -> None:
    """Also to a node that takes a role over; training and the controller stay where they are."""
    training, steps = Loop(2, width=20_000), 30
    with Cluster(tmp_path, 3, ipv6=False) as cluster:
        job = ClusterJob(cluster, training, steps, "--ft-interface=eth9,eth1", "--ft-heartbeat=0.25")
        job.wait_for_step(5)
        before = [sent(node, "eth1") for node in (cluster.nodes[0], cluster.nodes[2])]
        cluster.nodes[1].kill()
        job.wait_for("resumed", 2)
        result = job.finish()
        after = [sent(node, "eth1") for node in (cluster.nodes[0], cluster.nodes[2])]
    check_identical(result, training, steps, again=1)
    check_survivors(result, training.world)
    assert "state is served on eth1 (10.81.1.2)" in result.output
    state = 20_000 * 10 * 4  # bytes of the role's half of both moments
    assert before[0] > state and min(after[0] - before[0], after[1] - before[1]) > state


@pytest.mark.long
def test_one_of_two_interfaces_is_down(tmp_path: Path) -> None:
    """Copies go on over the other, nobody is lost for it, and so does a recovery."""
    training, steps = Loop(2, width=20_000), 60
    with Cluster(tmp_path, 3, ipv6=False) as cluster:
        job = ClusterJob(cluster, training, steps, "--ft-interface=eth*")
        job.wait_for_step(5)
        assert all(sent(node, "eth1") > 100_000 for node in cluster.nodes[:2])
        cluster.nodes[0].link_down(1)
        job.wait_for_step(job.step() + 10)
        assert len(job.events("resumed")) == 1
        cluster.nodes[1].kill()
        job.wait_for("resumed", 2)
        result = job.finish()
    check_identical(result, training, steps, again=1)
    check_survivors(result, training.world)
    assert "state is served on eth0 (10.80.1.2), eth1 (10.81.1.2)" in result.output
    assert "is left out for 60 s" in result.output


def test_a_node_without_the_interface_does_not_start(tmp_path: Path) -> None:
    with Cluster(tmp_path, 1, ipv6=False) as cluster:
        process = cluster.nodes[0].run(
            *[sys.executable, "-m", "ft_core.cli.launch", "--nnodes=1", "--nproc-per-node=1"],
            *["--ft-interface=ib*,10.82.0.0/16", f"--job-dir={tmp_path}/job", str(Loop().script)],
            output=subprocess.PIPE,
        )
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "--ft-interface ib*,10.82.0.0/16: node0 has no such interface" in said
    assert "eth0 (10.80.1.2)" in said and "eth1 (10.81.1.2)" in said
