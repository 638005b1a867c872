"""Jobs begin, however their nodes meet."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.jobs import PORT, ClusterJob, Loop, needed
from cluster.nodes import Cluster
from harness import check_identical

pytestmark = needed
STEPS = 20
LOOP = Loop()


def check(cluster: Cluster, meeting: str) -> str:
    """The job trains as it should; returns what its console has shown."""
    result = ClusterJob(cluster, LOOP, STEPS, meeting=meeting).finish()
    check_identical(result, LOOP, STEPS)
    assert not result.recoveries
    return result.output


@pytest.mark.long
@pytest.mark.parametrize("network", [0, 1])
def test_at_an_address(network: int, tmp_path: Path) -> None:
    """By IPv4, in either network, where no node has a name that any knows."""
    with Cluster(tmp_path, 2, ipv6=False) as cluster:
        for node in cluster.nodes:
            node.hosts.write_text("")
        [address] = cluster.nodes[0].addresses(network)
        check(cluster, f"{address}:{PORT}")


@pytest.mark.long
def test_at_a_name(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2) as cluster:
        check(cluster, f"node0:{PORT}")


def test_at_a_name_that_is_loopback_on_its_own_machine(tmp_path: Path) -> None:
    """Debian has it so in /etc/hosts: neither the controller nor gloo listen where no other node comes. The
    nodes share the job's directory, and so its settings."""
    with Cluster(tmp_path, 2, ipv6=False, loopback=True, shared=True) as cluster:
        output = check(cluster, f"node0:{PORT}")
        [address] = cluster.nodes[0].addresses()
        assert "ftrun: node0 is 127.0.1.1 on this machine (/etc/hosts)" in output
        assert f"the controller is at {address}:{PORT}" in output


def test_where_there_is_ipv6_alone(tmp_path: Path) -> None:
    """At a name."""
    with Cluster(tmp_path, 2, ipv4=False) as cluster:
        check(cluster, f"node0:{PORT}")


@pytest.mark.long
@pytest.mark.parametrize("loopback", [True, False])
def test_at_an_address_of_ipv6(loopback: bool, tmp_path: Path) -> None:
    """Where nodes have both; also where a node's own name is loopback."""
    with Cluster(tmp_path, 2, loopback=loopback) as cluster:
        _, address = cluster.nodes[0].addresses()
        check(cluster, f"[{address}]:{PORT}")
