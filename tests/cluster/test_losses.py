"""Nodes are lost to the others: by their power, or their cables. No directory is shared."""

from __future__ import annotations

from pathlib import Path

import etcd_members
import pytest
from cluster.jobs import ClusterJob, Loop, needed
from cluster.nodes import DISK, Cluster
from harness import Layout, check_identical, check_survivors

pytestmark = needed
STEPS = 60
LOOP = Loop()
SOON = "--ft-heartbeat=0.25"
"""Silence counts after 5 s, and not after 10."""
PACED = Path(__file__).parents[1] / "chaos" / "paced.py"


@pytest.mark.parametrize("user", [pytest.param(0, marks=pytest.mark.long), 4711])
def test_a_whole_node_is_killed(user: int, tmp_path: Path) -> None:
    """Nobody hears a last word of it: no connection ends. Also where a job is a user's who has no name and no
    home, and cannot write where it is started."""
    with Cluster(tmp_path, 3) as cluster:
        job = ClusterJob(cluster, LOOP, STEPS, SOON, user=user)
        job.wait_for_step(5)
        cluster.nodes[1].kill()
        decided = job.wait_for("decided", 2)[1]
        assert set(decided["moved"]) == {"1"}
        result = job.finish()
    check_identical(result, LOOP, STEPS, again=1)
    check_survivors(result, LOOP.world)
    assert result.recoveries == 1


@pytest.mark.long
def test_a_node_of_two_workers_is_killed_where_links_are_slow(tmp_path: Path) -> None:
    """Megatron-Core. Each step sends as much as the links pass in half a second. Who takes the log over does
    not see what was logged."""
    layout, steps = Layout(1, 2, 2, distributed=True, more=("--hidden-size=128",)), 10
    with Cluster(tmp_path, 3, rate="100mbit") as cluster:
        job = ClusterJob(cluster, layout, steps, SOON, nproc=2, script=PACED)
        job.wait_for_step(3)
        cluster.nodes[1].kill()
        decided = job.wait_for("decided", 2)[1]
        assert set(decided["moved"]) == {"2", "3"}
        result = job.finish()
    check_identical(result, layout, steps, again=2)
    check_survivors(result, layout.world)
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


@pytest.mark.long
def test_one_of_two_cables_is_out(tmp_path: Path) -> None:
    """Nothing happens where nothing was sent over it. Over the other a node still says that it lives, by the
    way that is left, and hears nothing; it comes back by that way."""
    with Cluster(tmp_path, 3) as cluster:
        job = ClusterJob(cluster, LOOP, STEPS, SOON)
        _, node, _ = cluster.nodes
        step = job.wait_for_step(5)
        node.link_down(1)
        job.wait_for_step(step + 10)
        node.link_up(1)
        assert len(job.events("resumed")) == 1
        node.link_down(0)
        [decided] = job.wait_for("decided", 2)[1:]
        assert set(decided["moved"]) == {"1"}
        [back] = job.wait_for("joined", 4)[3:]
        assert back["node"].startswith("node1-1+")
        result = job.finish()
    check_identical(result, LOOP, STEPS, again=1)
    check_survivors(result, LOOP.world)
    assert result.recoveries == 1


@pytest.mark.long
def test_the_controllers_node_is_cut_off_from_all(tmp_path: Path) -> None:
    """It takes them for lost, and they come back."""
    with Cluster(tmp_path, 3) as cluster:
        job = ClusterJob(cluster, LOOP, STEPS, SOON)
        job.wait_for_step(5)
        cluster.nodes[0].link_down()
        job.wait_for("waiting")
        cluster.nodes[0].link_up()
        job.wait_for("resumed", 2)
        result = job.finish()
    check_identical(result, LOOP, STEPS, again=1)


@pytest.mark.long
def test_a_node_comes_back_with_its_name_and_another_address(tmp_path: Path) -> None:
    """As a pod whose machine is replaced."""
    with Cluster(tmp_path, 2) as cluster:
        job = ClusterJob(cluster, LOOP, STEPS, SOON)
        job.wait_for_step(5)
        node = cluster.nodes[1]
        before = node.addresses()
        node.kill()
        job.wait_for("waiting")
        node.boot()
        assert node.addresses() != before
        job.start(node, 1)
        job.wait_for("resumed", 2)
        result = job.finish()
    check_identical(result, LOOP, STEPS, again=1)
    check_survivors(result, LOOP.world)


@pytest.mark.long
def test_so_does_the_controllers(tmp_path: Path) -> None:
    """The others find it by its name, half a minute later at most: nothing tells them that it is gone."""
    with Cluster(tmp_path, 3) as cluster:
        job = ClusterJob(cluster, LOOP, STEPS)
        job.wait_for_step(5)
        node = cluster.nodes[0]
        known = (node.disk / "job0" / "id").read_text().strip()
        node.kill()
        node.boot()
        job.start(node, 0, f"--rdzv-id={known}")
        job.until(lambda: [e for e in job.events("resumed") if e["epoch"] > 1], "recovery")
        assert job.events("controller_restarted")
        result = job.finish()
    check_identical(result, LOOP, STEPS, again=1)


@etcd_members.needed
@pytest.mark.long
def test_the_leaders_node_is_killed(tmp_path: Path) -> None:
    """Another leads, and a spare takes its role."""
    steps = 120
    with Cluster(tmp_path, 4, ipv6=False) as cluster:
        *nodes, keeper = cluster.nodes
        client = f"http://{keeper.addresses()[0]}:2379"
        keeper.run(
            *["etcd", "--data-dir", DISK / "etcd", "--unsafe-no-fsync"],
            *["--listen-client-urls", client, "--advertise-client-urls", client],
            output=(tmp_path / "etcd").open("w"),
        )
        job = ClusterJob(cluster, LOOP, steps, on=nodes[:2], meeting=f"etcd://{keeper.name}:2379/jobs/llm")
        job.wait_for("started")
        [leader] = [node for node in nodes if list(node.disk.glob("job*/events.jsonl"))]
        job.start(nodes[2], 2)
        job.wait_for_step(5)
        job.wait_for("joined", 3)
        leader.kill()
        job.until(lambda: [e for e in job.events("resumed") if e["epoch"] > 1], "recovery")
        result = job.finish()
    check_identical(result, LOOP, steps, again=1)
    assert {event["term"] for event in result.of("controller_restarted")} == {2}
