"""Nodes are lost to the others: their power, their cables, their addresses. None of them shares a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.jobs import ClusterJob, Loop, needed
from cluster.nodes import Cluster
from harness import check_identical, check_survivors

pytestmark = needed
STEPS = 60
LOOP = Loop()
SOON = "--ft-heartbeat=0.25"
"""Silence counts after 5 s, and not after 10."""


def test_a_whole_node_is_killed(tmp_path: Path) -> None:
    """Nobody hears a last word of it: no connection ends."""
    with Cluster(tmp_path, 3) as cluster:
        job = ClusterJob(cluster, LOOP, STEPS, SOON)
        job.wait_for_step(5)
        cluster.nodes[1].kill()
        decided = job.wait_for("decided", 2)[1]
        assert set(decided["moved"]) == {"1"}
        result = job.finish()
    check_identical(result, LOOP, STEPS, again=1)
    check_survivors(result, LOOP.world)
    assert result.recoveries == 1


@pytest.mark.long
def test_a_node_whose_cables_are_out_comes_back_as_a_spare(tmp_path: Path) -> None:
    """It lives on meanwhile, and is needed again."""
    with Cluster(tmp_path, 3) as cluster:
        job = ClusterJob(cluster, LOOP, STEPS, SOON)
        job.wait_for_step(5)
        _, node, spare = cluster.nodes
        node.link_down()
        job.wait_for("resumed", 2)
        node.link_up()
        [back] = job.wait_for("joined", 4)[3:]
        assert back["node"].startswith("node1-1+")
        spare.kill()
        job.wait_for("resumed", 3)
        result = job.finish()
    check_identical(result, LOOP, STEPS, again=2)
    check_survivors(result, LOOP.world)
    assert result.recoveries == 2
