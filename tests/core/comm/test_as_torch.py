"""Process groups do what torch's own do, beside the collectives themselves (`test_process_group`)."""

from __future__ import annotations

import pytest
import torch
from core.comm.pg_harness import GroupJob

from ft_core.comm.startup_log import Call
from ft_core.errors import ReplayMismatch


@pytest.mark.parametrize("in_startup", [False, True])
def test_what_scripts_get(in_startup: bool) -> None:
    with GroupJob(2, "as_torch", in_startup) as job:
        results = job.results()
    for role, found in enumerate(results):
        assert found == {
            "sparse": [1, 3, 0],
            "sparse gradient": [[0.5, 0.5], [1.5, 1.5], [0, 0], [0, 0]],
            "received": [1.0 - role] * 2,
            "joined": [[1.0, 1.0]] * 2,
            "functional": [[3, 3], [2]],
            "time-outs": [1800, 7],
            "destroyed": "ValueError",
        } | ({"from any": [[5], 1]} if role == 0 else {})


def test_sparse_results_are_not_on_record() -> None:
    sparse = torch.zeros(3).to_sparse()
    call = Call(0, "allreduce", ([sparse],), {})
    saved = call.save()
    assert len(saved) == 1 and saved[0][0] is sparse
    entry = call.entry()
    assert entry.tensors is None and entry.signature == "allreduce(float32[3] sparse)"
    with pytest.raises(ReplayMismatch, match="is sparse, which the start-up log does not keep"):
        call.apply(entry, "here")


@pytest.mark.parametrize("in_startup", [False, True])
def test_errors_of_the_scripts_own_are_raised_at_once(in_startup: bool) -> None:
    """Time-outs that it has set, and what gloo refuses in `wait`: no peer is lost."""
    with GroupJob(2, "own_errors", in_startup) as job:
        results = job.results()
    seconds = results[0]["seconds"]
    assert list(seconds) == [
        "of a wait",
        "of a receive",
        "of a group that had one",
        "of a barrier",
        "mistake",
    ]
    assert max(seconds.values()) < 10, "a new epoch is waited for 20 s"
    assert list(results[1]["seconds"]) == ["mistake"]
    assert all((found["sum"], found["failures"]) == (2.0, []) for found in results)


@pytest.mark.parametrize("in_startup", [False, True])
def test_operations_that_differ_are_named_where_torch_is_told_to_compare(in_startup: bool) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL; who waits for the comparison leaves with the epoch."""
    with GroupJob(2, "detail", in_startup) as job:
        job.wait("stopped", [1])
        job.wait("blocked", [0])
        job.kill(1)
        job.next_epoch([1])
        survivor = job.results()[0]
    assert survivor["sums"] == [2.0, 4.0]
    assert len(survivor["raised"]) == 2
    for text in survivor["raised"]:
        assert "Detected mismatch between collectives on ranks" in text


@pytest.mark.parametrize("in_startup", [False, True])
def test_the_default_store_is_shared_and_outlives_an_epoch(in_startup: bool) -> None:
    with GroupJob(2, "shared_store", in_startup) as job:
        job.wait("stopped", [1])
        job.kill(1)
        job.next_epoch([1])
        survivor, newcomer = job.results()
    assert survivor["mine"] == b"set by 0"
    assert survivor["peer's"] == [b"set by 1", b"in a group by 1"]
    assert survivor["compared"] in (b"0", b"1")
    assert survivor["deleted"] == [True, False, False] and "nobody has set" in survivor["late"]
    assert survivor["after"] == [b"by the newcomer", b"set by 1", b"in a group by 1"]
    assert newcomer["after"] == [b"by the newcomer", b"set by 0", b"in a group by 0"]
    for found in (survivor, newcomer):
        assert "/counter' in torch's default store, and a worker was lost" in found["add"]
        assert found["get"] == found["add"]
