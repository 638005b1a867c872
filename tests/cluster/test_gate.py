"""TRAIN before STATE, where both share a link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.gated import FIRST, SIZE
from cluster.jobs import needed
from cluster.nodes import ROOT, Cluster, Node

from benchmarks.gate_worker import KINDS

pytestmark = needed
GATED = ROOT / "tests" / "cluster" / "gated.py"


def run(node: Node, *argv: str | Path) -> subprocess.Popen[str]:
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return node.run(sys.executable, *argv, env=variables, output=subprocess.PIPE)


WIRE = """
import sys
from ft_core.net.wire import Wire, interface_to
for address in sys.argv[1:]:
    name = interface_to(address)
    print(name, Wire([name]).sent() >= 0)
"""


def test_the_interface_is_that_which_leads_to_a_peer(tmp_path: Path) -> None:
    """In either network, by IPv4, IPv6 and name, and to itself, in the namespace of the node."""
    with Cluster(tmp_path, 2) as cluster:
        one, other = cluster.nodes
        addresses = [*other.addresses(0), *other.addresses(1), other.name, *one.addresses(1)]
        said, _ = run(one, "-c", WIRE, *addresses).communicate(timeout=60)
        expected = ["eth0", "eth0", "eth1", "eth1", "eth0", "lo", "lo"]
        assert said.splitlines() == [f"{name} True" for name in expected]


def test_a_snapshot_waits_while_training_has_the_link(tmp_path: Path) -> None:
    """And passes once training falls silent."""
    with Cluster(tmp_path, 2, ipv6=False, rate="100mbit") as cluster:
        sender, receiver = cluster.nodes
        receiving = run(receiver, GATED, "receive", *receiver.addresses())
        assert receiving.stdout is not None
        peers = receiving.stdout.readline().split()
        said, _ = run(sender, GATED, "send", *sender.addresses(), *peers).communicate(timeout=120)
        assert json.loads(said) == {"waits": True, "sent": (FIRST + 1) * SIZE}


@pytest.mark.long
def test_a_job_whose_copies_wait_for_training(tmp_path: Path) -> None:
    """The benchmark, small."""
    small = ["--quick", "--cycles=1", "--compute=0.1", "--exchange=10", "--state=40"]
    command = [sys.executable, "-m", "benchmarks.gate", "--json", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["step_seconds"].keys() == KINDS.keys()
    assert result["ratio"].keys() == KINDS.keys() - {"P"}
    assert all(each["n"] == 1 for each in result["ratio"].values())
