"""What a job that ends leaves on storage: the controller's decision, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from core.control.test_controller_machine import ControlPlane, lose, restart, tell
from msgspec.structs import replace

from ft_core.control.decide.durable_names import AGAIN
from ft_core.control.events import End, LauncherGone
from ft_core.protocol import messages as m

NAME = "step-{:08d}-{:05d}-1-2"


def begun(**settings: Any) -> ControlPlane:
    """A job of two roles, after its first step."""
    job = ControlPlane(nodes=2, **{"durable_dir": "/d", **settings})
    if job.settings.durable_dir:
        lists(job)
    job.all_step(1)
    return job


def ending(lost: int = 1, held: Mapping[str, int] | None = None, **settings: Any) -> ControlPlane:
    """After two steps one role fails for good, and all others have left their step. `held`: nodes that keep
    the copy of a role."""
    job = begun(**settings)
    job.all_step(2)
    for name, role in (held or {}).items():
        job[name].replicas = {job.segment(role): [2]}
    where = job.controller.cluster.places[lost]
    pid = job[where].workers.pop(lost)
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.REFUSED, "step": 2}
    job[where].say(m.WorkerLost(role=lost, pid=pid, **about))
    assert job.phase == "saving" and "ftrun: the job stops: " in job.said[-1]
    job.all_report()
    return job


def lists(job: ControlPlane, *names: str, error: str = "") -> None:
    """All nodes say what they can read."""
    for agent in list(job.agents.values()):
        asked = [message for message in agent.heard if isinstance(message, m.ListDurable)]
        agent.say(m.DurableNames(asked[-1].id, list(names), error))


def orders(job: ControlPlane) -> dict[str, m.SaveVersion]:
    return {
        name: message
        for name, agent in job.agents.items()
        for message in agent.heard
        if isinstance(message, m.SaveVersion)
    }


def written(job: ControlPlane, reason: str = "") -> None:
    """All nodes have done what they were told."""
    for name, order in orders(job).items():
        for role in order.roles:
            job[name].say(m.VersionSaved(order.epoch, role, order.version, reason))


def test_a_node_with_another_connection_is_told_once_more() -> None:
    """Found by the simulator: the order was lost with a connection, and waited for until the end."""
    job = ending()
    lists(job, NAME.format(1, 1))
    order = orders(job)["node1"]
    job["node1"].greet()
    job.wait(1)
    assert [sent for sent in job["node1"].heard if isinstance(sent, m.SaveVersion)] == [order, order]
    assert [sent for sent in job["node0"].heard if isinstance(sent, m.SaveVersion)] == [orders(job)["node0"]]
    written(job)
    lists(job, NAME.format(2, job.controller.cluster.epoch))
    assert job.done == End(3)


def test_who_has_not_begun_the_newest_plan_writes_nothing() -> None:
    """Found by the simulator: it came back just then, and refused. What it has others fetch from it."""
    job = begun()
    job.all_step(2)
    job["node0"].replicas = {job.segment(1): [2]}
    assert job["node1"].plan is not None
    job["node1"].plan = replace(job["node1"].plan, id="0-00")
    pid = job["node0"].workers.pop(0)
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.REFUSED, "step": 2}
    job["node0"].say(m.WorkerLost(role=0, pid=pid, **about))
    job.all_report()
    lists(job, NAME.format(1, 1))
    assert {name: (order.roles, order.version) for name, order in orders(job).items()} == {
        "node0": ([0, 1], 2)
    }


def test_each_node_writes_what_it_has_and_it_counts_once_all_see_it_whole() -> None:
    job = ending()
    lists(job, NAME.format(1, 1))
    found = orders(job)
    assert {name: (order.roles, order.version) for name, order in found.items()} == {
        "node0": ([0], 2),
        "node1": ([1], 2),
    }
    assert {order.epoch for order in found.values()} == {job.controller.cluster.epoch}
    written(job)
    assert job.done is None, "nobody has looked"
    name = NAME.format(2, job.controller.cluster.epoch)
    lists(job, NAME.format(1, 1), name)
    assert job.done == End(3)
    assert [e.more["version"] for e in job.records_of("saved")] == [2]
    assert (
        f"ftrun: step 2 is saved, in /d/{name}. To go on from there, start the same command" in job.said[-1]
    )
    assert [e.event for e in job.records[-3:]] == ["saved", "goodput", "stopped"]


def test_what_is_there_already_is_not_written_again() -> None:
    job = ending()
    lists(job, NAME.format(2, 1))
    assert job.done == End(3) and not orders(job)
    assert f"step 2 is saved, in /d/{NAME.format(2, 1)}" in job.said[-1]


def test_where_there_is_no_directory_it_is_the_jobs() -> None:
    job = ending(durable_dir="")
    written(job)
    lists(job, NAME.format(2, job.controller.cluster.epoch))
    assert job.done == End(3) and "again with --ft-durable-dir /job/saved" in job.said[-1]


@pytest.mark.parametrize("what", ["late", "fails", "nowhere", "unread"])
def test_what_is_not_saved_is_said_and_ends_the_job_alike(what: str) -> None:
    job = ending()
    if what == "unread":
        lists(job, error="Stale file handle")
    elif what != "late":
        lists(job)
        written(job, "No space left on device" if what == "fails" else "")
    if what == "nowhere":
        lists(job, NAME.format(2, 1))  # of another epoch
    if what in ("late", "unread"):
        job.wait(job.settings.shutdown_timeout - 0.5)
        assert job.done is None
        job.wait(0.6)
    assert job.done == End(3) and not job.records_of("saved")
    why = {
        "late": "it took longer than 20 s (--shutdown-timeout)",
        "fails": "No space left on device",
        "nowhere": "/d is no storage that all nodes see",
        "unread": "Stale file handle",
    }
    assert why[what] in job.records_of("not_saved")[0].reason and why[what] in job.said[-1]


@pytest.mark.parametrize(("every", "before"), [(1, "the one before"), (3, "one up to 5 before")])
def test_how_old_what_was_not_saved_may_be(every: int, before: str) -> None:
    job = ending(every=every)
    lists(job, error="Stale file handle")
    job.wait(job.settings.shutdown_timeout)
    assert f"the newest version, of step 2 or {before}, is not saved: " in job.said[-1]


def test_storage_that_cannot_be_read_for_a_moment_is_asked_again() -> None:
    job = ending()
    lists(job, error="Stale file handle")
    assert job.done is None
    job.wait(AGAIN)
    lists(job)
    written(job)
    lists(job, error="it does not answer")
    assert job.done is None
    job.wait(AGAIN)
    lists(job, NAME.format(2, job.controller.cluster.epoch))
    assert job.done == End(3) and job.records_of("saved") and not job.records_of("not_saved")


def test_what_a_lost_node_had_is_written_where_its_copies_are() -> None:
    job = begun(policy="stop")
    job["node0"].replicas = {job.segment(1): [1]}
    lose(job, "node1")
    job.all_report()
    assert job.phase == "saving" and "policy is stop" in job.said[-1]
    lists(job)
    [order] = orders(job).values()
    assert order.roles == [0, 1] and order.sources == {1: {job.segment(1): ["node0"]}}


def test_where_copies_are_lost_it_is_said_that_nothing_is_saved() -> None:
    job = begun(policy="stop")
    job["node0"].replicas = {}
    lose(job, "node1")
    job.all_report()
    assert job.done == End(1) and not orders(job)
    assert "is not saved: no version is whole in the memory of the nodes that are left" in job.said[-1]


def test_who_does_not_leave_its_step_is_ended_and_the_newest_of_the_rest_is_written() -> None:
    job = begun()
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.REFUSED, "step": 1}
    job["node1"].say(m.WorkerLost(role=1, pid=job["node1"].workers.pop(1), **about))
    job.all_report("node1")
    job.wait(job.settings.shutdown_timeout / 4 - 0.1)
    assert m.KillWorker(role=0) not in job["node0"].heard
    job.wait(0.2)
    assert m.KillWorker(role=0) in job["node0"].heard
    assert m.KillWorker(role=1) not in job["node1"].heard
    job.all_report()
    lists(job)
    assert orders(job).keys() == {"node0", "node1"}


def test_a_node_that_is_lost_meanwhile_has_others_write_what_it_had() -> None:
    job = ending(held={"node0": 1})
    lists(job)
    assert orders(job)["node0"].roles == [0]
    lose(job, "node1")
    assert orders(job)["node0"].roles == [0, 1] and job.phase == "saving"


def test_a_successor_that_hears_why_the_job_ends_has_it_saved_too() -> None:
    """Its predecessor died over that, and nobody else knows."""
    job = begun()
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.REFUSED, "step": 1}
    lost = m.WorkerLost(role=1, pid=job["node1"].workers.pop(1), **about)
    restart(job, "node0")
    job["node1"].greet([lost])
    job.wait(0.1)
    tell(job)
    assert job.phase == "rebuilding" and job.done is None
    job.wait(0.1)
    assert job.phase == "saving" and job.records_of("stopping")
    job.all_report()
    lists(job)
    written(job)
    lists(job, NAME.format(1, job.controller.cluster.epoch))
    assert job.done == End(3) and job.records_of("saved")


def test_no_node_is_left_to_save_anything() -> None:
    job = ControlPlane(nodes=2, policy="shrink", groups=2, durable_dir="/d")
    lists(job)
    job.redundancy = m.Redundancy.ADOPTABLE
    job.all_step(1)
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.REFUSED, "step": 1}
    job["node1"].say(m.WorkerLost(role=1, pid=job["node1"].workers.pop(1), **about))
    assert job.phase == "saving"
    lose(job, "node0")
    lose(job, "node1")
    assert job.done == End(3)
    assert (
        "no version is whole in the memory of the nodes that are left"
        in job.records_of("not_saved")[0].reason
    )


def test_nothing_is_written_before_a_step_is_done_or_where_nobody_waits_for_it() -> None:
    job = ControlPlane(nodes=2)
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.EXCEPTION}
    job["node1"].say(m.WorkerLost(role=1, pid=job["node1"].workers.pop(1), **about))
    assert job.done == End(3)
    job = ending()
    job.happens(LauncherGone())
    assert job.done == End(1)


def test_of_all_that_are_told_to_end_the_newest_version_is_written() -> None:
    job = begun()
    for name in ("node0", "node1"):
        job[name].say(m.Leaving())
    for name in ("node0", "node1"):
        job[name].workers.clear()
        job[name].say(m.Left())
    job.wait(0.1)
    assert job.phase == "saving"
    job.all_report()
    lists(job)
    written(job)
    lists(job, NAME.format(1, job.controller.cluster.epoch))
    assert job.done == End(143) and job.records_of("saved") and not job.records_of("detected")
    assert all(agent.heard[-1] == m.Shutdown(143) for agent in job.agents.values())
