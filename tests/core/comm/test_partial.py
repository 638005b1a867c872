"""Collectives among the members of a group that are there, over real gloo: member 1 of 3 is away."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ft_core.comm.partial import Partial
from ft_core.errors import FtError
from ft_core.protocol.groups import GroupId

MEMBERS, ABSENT = (4, 5, 6), {5: 6}
GROUP = GroupId.of(MEMBERS, 0)
PRESENT = (4, 6)

Act = Callable[[int, Callable[..., None]], Any]


def among_present(act: Act, adopted: bool) -> dict[int, Any]:
    """Role -> what `act(role, issue)` returned there; `issue(method, kind, *args)` completes an operation."""
    store = dist.HashStore()

    def play(role: int) -> Any:
        pg = dist.ProcessGroupGloo(store, PRESENT.index(role), len(PRESENT))
        partial = Partial(GROUP, MEMBERS, ABSENT, role, adopted)

        def issue(method: str, kind: str, *args: Any) -> None:
            work, complete = partial.issue(pg, method, kind, args, {})
            work.wait()
            complete()

        return act(role, issue)

    with ThreadPoolExecutor(len(PRESENT)) as pool:
        return dict(zip(PRESENT, pool.map(play, PRESENT), strict=True))


def buffer(role: int) -> torch.Tensor:
    return torch.arange(6.0) + 10 * role


SUM = buffer(4) + buffer(6)


def test_a_gather_that_the_script_does_not_wait_for_by_a_work_has_all_parts() -> None:
    """NCCL gives no work where torch says that nobody waits for one."""

    class Inner:
        def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
            assert options.asyncOp
            outputs[0][0].copy_(inputs[0])
            outputs[0][1].fill_(6.0)
            return "work"

    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    parts = [torch.zeros(2) for _ in MEMBERS]
    given = ([parts], [torch.full((2,), 4.0)], options)
    partial = Partial(GROUP, MEMBERS, ABSENT, 4, adopted=False)
    work, complete = partial.issue(Inner(), "allgather", "all_gather", given, {})
    assert work == "work" and complete is not None
    complete()
    assert [part[0].item() for part in parts] == [4.0, 6.0, 6.0]


def test_a_reduction_leaves_an_adopted_part_in_its_place() -> None:
    def act(role: int, issue: Callable[..., None]) -> tuple[torch.Tensor, torch.Tensor]:
        given, rank = buffer(role), MEMBERS.index(role)
        own = torch.zeros(2)
        issue("_reduce_scatter_base", "reduce_scatter", own, given, dist.ReduceScatterOptions())
        in_place = buffer(role)
        view = in_place[2 * rank : 2 * rank + 2]
        issue("reduce_scatter", "reduce_scatter", [view], [list(in_place.chunk(3))])
        assert torch.equal(view, own)
        assert torch.equal(in_place[2:4], given[2:4]) or role != 6
        return own, given[2:4]

    found = among_present(act, adopted=True)
    assert torch.equal(found[4][0], SUM[0:2])
    assert torch.equal(found[6][0], SUM[4:6])
    assert torch.equal(found[6][1], SUM[2:4]), "the counterpart has the sum for the one that is away"


def test_a_gather_into_the_buffer_that_it_is_part_of_takes_adopted_parts_from_there() -> None:
    def act(role: int, issue: Callable[..., None]) -> torch.Tensor:
        rank = MEMBERS.index(role)
        whole = torch.full((6,), -1.0)
        whole[2 * rank : 2 * rank + 2] = role
        if role == 6:
            whole[2:4] = 5
        issue("_allgather_base", "allgather", whole, whole[2 * rank : 2 * rank + 2])
        return whole

    for whole in among_present(act, adopted=True).values():
        assert whole.tolist() == [4, 4, 5, 5, 6, 6]


@pytest.mark.parametrize("adopted", [True, False])
def test_a_gather_from_elsewhere_has_the_counterpart_stand_in(adopted: bool) -> None:
    def act(role: int, issue: Callable[..., None]) -> torch.Tensor:
        whole = torch.full((6,), -1.0)
        issue("_allgather_base", "allgather", whole, torch.full((2,), float(role)))
        return whole

    for whole in among_present(act, adopted).values():
        assert whole.tolist() == [4, 4, 6, 6, 6, 6]


def test_an_operation_without_meaning_is_refused() -> None:
    partial = Partial(GROUP, MEMBERS, ABSENT, 4, True)
    with pytest.raises(FtError, match="1 are away"):
        partial.issue(None, "alltoall_base", "alltoall", (), {})
