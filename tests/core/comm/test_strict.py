"""Under NCCL's rules: what gloo forgives. Each of these hangs, or gives garbage, without its remedy."""

from __future__ import annotations

import time

from core.comm.pg_harness import GroupJob

from ft_core.comm.process_group import UNWAITED
from ft_core.process import stream

STRICT = {"FT_COMM": "strict"}


def test_batches_of_both_directions_go_out_together() -> None:
    """Single sends would wait for each other, on all members; also after a recovery."""
    with GroupJob(3, "strict:both_ways", 4, 1, environment=STRICT) as job:
        job.wait("stopped", [1])
        job.kill(1)
        job.next_epoch([1])
        assert job.results() == [[2.0] * 4, [0.0] * 4, [1.0] * 4]


def test_all_may_send_first_one_by_one() -> None:
    """Each pair has a communicator for that, as with torch's own groups: in one stream all would wait."""
    with GroupJob(3, "strict:all_send_first", 1, environment=STRICT) as job:
        job.wait("stopped", [1])
        job.kill(1)
        job.next_epoch([1])
        assert job.results() == [[2.0] * 4, [0.0] * 4, [1.0] * 4]


def test_who_is_asked_before_its_first_use_opens_the_same_communicator() -> None:
    with GroupJob(2, "strict:asked_before_first_use", environment=STRICT) as job:
        job.wait("sent", [0])
        job.go(1)
        assert job.results() == [3.0, 3.0]


def test_the_host_runs_ahead_until_it_reads() -> None:
    with GroupJob(2, "strict:runs_ahead", environment=STRICT) as job:
        job.wait("ahead", [0])
        job.go(1)
        first, second = job.results()
    assert first == {"done": False, "view": [3], "value": [3.0] * 4, "done at the end": True}
    assert second["value"] == [3.0] * 4


def test_the_host_is_held_back_before_the_queue_is_full() -> None:
    """Who finds it full may wait with Python's lock, and then nobody can abort what fills it."""
    with GroupJob(2, "strict:held_back", environment=STRICT) as job:
        job.wait("held", [0])
        job.go(1)
        job.wait("stopped", [1])
        job.wait("goes on", [0])
        time.sleep(0.5)
        job.kill(1)
        job.next_epoch([1])
        asynchronous, in_order = job.results()[0]
    assert asynchronous == UNWAITED
    assert 10 < in_order <= stream.AHEAD + 4


def test_what_is_pending_in_a_group_that_is_destroyed_is_done_first() -> None:
    with GroupJob(2, "strict:destroyed", environment=STRICT) as job:
        assert job.results() == [3.0, 3.0]


def test_an_abort_leaves_garbage_and_no_error() -> None:
    with GroupJob(2, "strict:aborted", environment=STRICT) as job:
        job.wait("stopped", [1])
        job.wait("blocked", [0])
        job.kill(1)
        job.next_epoch([1])
        survivor, newcomer = job.results()
    value, index, told = survivor["garbage"]
    assert value > 1e38 and index > 1 << 60 and told == "told"
    assert survivor["sum"] == newcomer["sum"] == [2.0, 2.0] and survivor["left"] == newcomer["left"] == 0


def test_start_up_counts_nothing_that_the_device_has_not_done() -> None:
    """What one role alone has of an operation is in no record: garbage of an abort would stay with it."""
    with GroupJob(2, "strict:in_start_up", 1, environment=STRICT) as job:
        job.wait("stopped", [1])
        job.wait("issues", [0])
        time.sleep(0.5)  # it has issued it
        job.kill(1)
        job.next_epoch([1])
        assert job.results() == [{"part": [2.0], "batch": [7.0]}] * 2


def test_members_that_have_met_and_do_not_connect_try_again() -> None:
    with GroupJob(2, "strict:connects_again", environment=STRICT | {"FT_STRICT_FAULT": "opening:0:1"}) as job:
        said = {reason for (reason,) in job.wait("failed").values()}
        job.next_epoch([])
        assert job.results() == [[2.0, 2.0]] * 2
    assert said == {
        "RuntimeError: connecting in group 0-1:1#0 of epoch 1 has not ended within 1 s of their meeting"
    }


def test_an_error_of_a_link_is_found_while_all_live() -> None:
    environment = STRICT | {"FT_STRICT_FAULT": "link:1:3"}
    with GroupJob(2, "strict:link_fails", environment=environment) as job:
        said = job.results()[1]
    assert said.startswith("allreduce in group 0-1:1#0 of epoch 1 cannot end: strict reports COMM_ERROR")
    assert said.endswith(", completed: True")
