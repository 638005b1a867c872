"""A rack is lost, with all its nodes at once: of its own accord the job has its copies in another."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import etcd_members
from etcd_members import Members
from harness import Layout, check_identical, check_survivors
from machines import Machines
from ports import free_port

from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, replica_nodes

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 1, 4, distributed=True)
STEPS = 60
RACKS = ("a", "a", "b", "b", "c", "c")
ADDRESSES = [f"spine.rack-{rack}.node{number}" for number, rack in enumerate(RACKS)]


def test_a_rack_of_two_nodes_is_lost_at_once(tmp_path):
    """Slurm says where nodes are, and nothing else is set: role 2's copies would be on the node beside it."""
    about = tmp_path, f"127.0.0.1:{free_port()}", LAYOUT, STEPS, PACED
    with Machines(*about, spares=2, addresses=ADDRESSES) as job:
        job.until(lambda: job.events("resumed"), "first step", timeout=110)
        rack = {each["node"]: each["domain"].split("/")[1] for each in job.events("joined")}

        def copied() -> list[dict]:
            rows = job.status()["roles"]
            return rows if all(row["committed"] and any(row["replicas"].values()) for row in rows) else []

        rows = job.until(copied, "copies of all")
        nodes = {row["role"]: row["node"] for row in rows}
        assert [rack[nodes[role]] for role in range(4)] == ["rack-a", "rack-a", "rack-b", "rack-b"]
        for row in rows:
            keepers = set(itertools.chain.from_iterable(row["replicas"].values()))
            assert keepers and rack[row["node"]] not in {rack[node] for node in keepers}, row
        flat = Places(nodes, {}, [node for node in rack if node not in nodes.values()])
        assert replica_nodes(Segment((2,), ()), flat, 1, flat.ring(range(4))) == [nodes[3]]
        reached = job.step()
        job.kill(2, 3)
        job.until(lambda: len(job.events("resumed")) > 1, "recovery")
        decided = job.events("decided")[-1]
        result = job.finish()
    assert decided["origin"] == "memory" and decided["version"] >= reached - 1
    assert decided["roles"] == [2, 3] and {rack[node] for node in decided["moved"].values()} == {"rack-c"}
    check_identical(result, LAYOUT, STEPS, again=1)
    check_survivors(result, LAYOUT.world)
    assert "failure domain spine/rack-a/" in result.output and "SLURM_TOPOLOGY_ADDR" in result.output
    assert "any one of 2 failure domains such as spine/rack-a may be lost at once" in result.output


@etcd_members.needed
def test_the_leaders_rack_is_lost(tmp_path):
    """The next leader misses it as soon as it would a node: its copies are elsewhere."""
    with Members() as etcd, Machines(tmp_path, etcd.place("job"), LAYOUT, STEPS, PACED, 2, ADDRESSES) as job:
        job.until(lambda: job.events("resumed"), "first step", timeout=110)
        job.until(lambda: all(row["committed"] for row in job.status()["roles"]), "copies of all")
        machine, controller = job.leader()
        rack = RACKS[job.machines.index(machine)]
        lost = [rank for rank, each in enumerate(RACKS) if each == ("b" if rack == "c" else rack)]
        job.kill(*lost)
        if rack == "c":  # a spare leads, and plays no role: its controller ends with the rack all the same
            os.kill(controller, signal.SIGKILL)
        job.until(lambda: len(job.events("resumed")) > 1, "recovery")
        decided = job.events("decided")[-1]
        result = job.finish()
    assert decided["origin"] == "memory" and decided["roles"] == lost
    check_identical(result, LAYOUT, STEPS, again=1)
