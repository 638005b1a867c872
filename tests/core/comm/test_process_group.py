"""Process groups that are repaired in place, with real processes and real kills."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pytest
from core.comm import pg_scripts
from core.comm.pg_harness import GroupJob, over_gloo

from ft_core.comm import works
from ft_core.comm.works import FtWork, is_transport_error


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    return over_gloo(4, pg_scripts.plain_gloo)


@pytest.mark.parametrize("in_startup", [False, True])
def test_every_collective_equals_plain_gloo(reference: list[dict[str, Any]], in_startup: bool) -> None:
    with GroupJob(4, "collectives", in_startup) as job:
        results = job.results()
    for role, (plain, ours) in enumerate(zip(reference, results, strict=True)):
        for name, value in plain.items():
            assert value == ours[name], (role, name)
        facts = ours["facts"]
        assert facts["backend"] == facts["name"] == "gloo"
        assert facts["config"] == "cpu:gloo,cuda:gloo"
        assert (facts["rank"], facts["size"], facts["ranks"]) == (role, 4, [0, 1, 2, 3])
        assert facts["names"] == (str, str)
        assert facts["traffic"] == [0, 1] and facts["last"] == 0 and facts["balanced"]
        assert not ours["initialized"]
        assert ours["counts"]["allreduce"] == 4 + 3  # DDP's three steps
        assert ours["counts"]["send"] == 2 + (role == 1)


def test_groups_are_made_locally_and_named_alike() -> None:
    with GroupJob(4, "groups") as job:
        results = job.results()
    assert [r["sum"] for r in results] == [3, 3, 7, 7]
    assert [r["lonely"] for r in results] == [5, 7, 5, 5]
    assert results[0]["names"] == ["0-1:1#0", "0-3:1#1", "0#0", "0-1:1#1", "0-2:2#0", "0-1:1#2"]
    assert results[3]["names"] == ["2-3:1#0", "0-3:1#1", "3#0", "2-3:1#1"]
    assert {r["backend"] for r in results} == {"gloo"}


def test_collectives_without_a_member_whose_replica_group_is_away() -> None:
    """Sums count those who are there; where data move, its counterpart stands in for who is not."""
    with GroupJob(4, "without_a_member", 1) as job:
        results = job.results()
    assert results.pop(1) is None
    own = {role: [10.0 * role, 10.0 * role + 1] for role in range(4)}
    gathered = [own[0], own[3], own[2], own[3]]
    for role, found in zip((0, 2, 3), results, strict=True):
        assert (found["rank"], found["size"]) == (role, 4)
        assert found["all_reduce"] == found["future"] == [50.0, 53.0]
        assert [found[f"broadcast from {root}"] for root in range(4)] == gathered
        assert found["all_gather"] == gathered
        assert found["all_gather_single"] == [value for part in gathered for value in part]
        assert found["objects"] == ["object 0", "object 3", "object 2", "object 3"]
        assert "member 1, which is away" in found["send"] and "1 are away" in found["all_to_all"]
    assert results[2]["reduce"] == [50.0, 53.0], "the stand-in of the root has the sum"
    assert results[2]["received"] == own[0]


@pytest.mark.parametrize("in_startup", [False, True])
def test_first_uses_in_different_order_do_not_deadlock(in_startup: bool) -> None:
    with GroupJob(2, "crossed_first_use", in_startup) as job:
        assert job.results() == [4.0, 4.0]


def test_callers_mistakes_are_raised_at_once() -> None:
    with GroupJob(2, "callers_mistake") as job:
        for result in job.results():
            assert "nothing" not in result and "EpochChanged" not in result
            assert result[-2:] == ["2.0", "[]"]


@pytest.mark.parametrize("blocked_in", ["all_reduce", "recv", "anysource", "async", "opening"])
def test_survivors_go_on_with_a_newcomer(blocked_in: str) -> None:
    stop_at = {1: 2, 2: 0}
    with GroupJob(3, "train", 3, blocked_in, stop_at) as job:
        for epoch, lost in stop_at.items():
            job.wait("stopped", [lost], epoch)
            job.wait("blocked", {0, 1, 2} - {lost}, epoch)
            job.kill(lost)
            job.next_epoch([lost])
        results = job.results()
    expected = [3.0, 6.0, 9.0]
    assert results[1]["log"] == [(e, v) for e in (1, 2) for v in expected[:2]] + [(3, v) for v in expected]
    assert [v for e, v in results[0]["log"]] == expected
    assert all(r["failures"] <= 2 for r in results)


@pytest.mark.parametrize(
    "how",
    [
        *("send", "small sends", "recv", "broadcast", "reduce_scatter", "coalesced all_reduce"),
        *("coalesced reduce_scatter", "coalesced all_gather", "future", "asked", "limited"),
        "monitored_barrier",
    ],
)
def test_a_peer_that_is_lost_in_the_middle_of_a_message(how: str) -> None:
    """gloo tells nobody who waits for an operation that is half sent, or half received: see `comm.apart`."""
    with GroupJob(2, "half_sent", how) as job:
        job.wait("blocked", [0])
        time.sleep(0.3)  # until no more can be sent
        job.kill(1)
        job.next_epoch([1])
        assert [result["log"] for result in job.results()] == [[1, 2], [2]]


def test_no_wait_depends_on_being_woken() -> None:
    """Whatever becomes of gloo's operations: who waits in one sees by itself that its epoch is over."""
    with GroupJob(2, "unwoken") as job:
        for how in pg_scripts.UNWOKEN:
            job.wait("blocked", [0, 1], how)
            job.next_epoch([])
        assert job.results() == [list(pg_scripts.UNWOKEN)] * 2


@pytest.mark.parametrize("error", [None, RuntimeError("Connection closed by peer")])
def test_an_operation_that_ends_just_after_a_look(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look has an error, that it has not ended, which is none of the operation's."""
    monkeypatch.setattr(works, "is_the_scripts", lambda error: False)  # but a backend's, out of C++

    class Work:
        completed = False

        def is_completed(self) -> bool:
            return self.completed

        def wait(self, timeout: timedelta | None = None) -> bool:
            if timeout is not None:
                assert not self.completed
                self.completed = True
                raise RuntimeError("Operation timed out!")
            if error is not None:
                raise error
            return True

    work = FtWork(MagicMock(aborted=1), MagicMock(epoch=1, asynchronous=False), "broadcast", Work(), 0)
    work.looks = True
    if error is None:
        assert work._wait(None)
    else:
        with pytest.raises(RuntimeError, match="Connection closed"):
            work._wait(None)


def test_a_failure_that_no_epoch_follows_is_raised() -> None:
    with GroupJob(2, "fail_alone") as job:
        job.wait("blocked", [0])
        job.kill(1)
        kind, text, _ = job.wait("error", [0])[0]
        assert kind == "RuntimeError" and "EpochChanged" not in text
        assert len(job.wait("failed", [0])) == 1


def test_an_error_of_the_scripts_own_in_a_wait_is_raised_at_once() -> None:
    """A signal's handler runs in it, a loader's for one: its error is no lost peer."""
    with GroupJob(2, "interrupted") as job:
        assert job.results()[0] == {"error": "KeyError('own')", "sum": 2.0}
        assert not [event for event in job.events if event[0] == "failed"]


def test_thirty_epochs_leave_no_threads_and_no_descriptors() -> None:
    epochs = 30
    with GroupJob(4, "endure", epochs) as job:
        for epoch in range(1, epochs + 1):
            job.wait("round", None, epoch)
            job.next_epoch([])
        results = job.results()
    for result in results:
        (threads, descriptors), (late_threads, late_descriptors) = result["use"]
        assert late_threads <= threads + 3 and late_descriptors <= descriptors + 3, result["use"]


def test_errors_at_issue_are_told_apart() -> None:
    pair = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1"
    assert is_transport_error(RuntimeError(pair))
    assert is_transport_error(RuntimeError("Application timeout caused pair closure"))
    assert not is_transport_error(RuntimeError("ProcessGroupGloo::allreduce: invalid tensor size at index 0"))
    assert not is_transport_error(ValueError("socket"))
    assert not is_transport_error(RuntimeError("Invalid scalar type"))
