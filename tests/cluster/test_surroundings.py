"""What nodes find around them, or do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.jobs import ClusterJob, Loop, needed
from cluster.nodes import Cluster
from harness import check_identical, check_survivors

pytestmark = needed


@pytest.mark.long
def test_dev_shm_is_smaller_than_the_state(tmp_path: Path) -> None:
    """Docker gives 64 MB. Snapshots and copies are elsewhere: two of each role's 56 MB, on its node alone."""
    training, steps = Loop(2, width=700_000), 10
    with Cluster(tmp_path, 3, shm="64m") as cluster:
        job = ClusterJob(cluster, training, steps)
        job.wait_for_step(3)
        cluster.nodes[1].kill()
        job.wait_for("resumed", 2)
        result = job.finish()
    check_identical(result, training, steps, again=1)
    check_survivors(result, training.world)


@pytest.mark.long
def test_nodes_share_the_job_directory(tmp_path: Path) -> None:
    """And no machine's processes have numbers of their own there."""
    training, steps = Loop(), 60
    with Cluster(tmp_path, 3, shared=True) as cluster:
        job = ClusterJob(cluster, training, steps, "--ft-heartbeat=0.25")
        job.wait_for_step(5)
        cluster.nodes[1].kill()
        job.wait_for("resumed", 2)
        result = job.finish()
    check_identical(result, training, steps, again=1)
    check_survivors(result, training.world)


@pytest.mark.long
def test_a_drill_is_done_once_though_no_directory_is_shared(tmp_path: Path) -> None:
    """A successor comes to the same step, and on its node nothing says that it was done."""
    training, steps = Loop(), 60
    drills = "--ft-inject=1@optimizer:10,1@h2h:20,1@optimizer:30:worker"
    with Cluster(tmp_path, 4) as cluster:
        result = ClusterJob(cluster, training, steps, drills).finish()
    check_identical(result, training, steps, again=3)
    check_survivors(result, training.world)
    assert result.recoveries == 3
