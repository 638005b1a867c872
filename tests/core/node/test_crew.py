"""Which of a node's workers plays a role."""

from __future__ import annotations

import itertools

import pytest

from ft_core.node.workers.worker_table import WorkerState, WorkerTable


def crew(*workers: tuple[int, WorkerState]) -> WorkerTable:
    """Of these devices, and what they do."""
    found = WorkerTable()
    for device, doing in workers:
        found.add(device).doing = doing
    return found


@pytest.mark.parametrize(
    ("workers", "device", "chosen", "takes"),
    [
        ([(0, WorkerState.IDLE), (1, WorkerState.IDLE), (-1, WorkerState.IDLE)], 1, 1, 1),
        (
            [(0, WorkerState.STARTING), (1, WorkerState.IDLE), (-1, WorkerState.IDLE)],
            0,
            2,
            0,
        ),  # the other's is its own role's
        ([(0, WorkerState.PLAYING), (1, WorkerState.IDLE), (-1, WorkerState.IDLE)], 0, 1, 1),
        ([(0, WorkerState.STARTING), (1, WorkerState.IDLE)], 0, 1, 1),
        ([(0, WorkerState.PLAYING), (1, WorkerState.PLAYING), (-1, WorkerState.IDLE)], 1, 2, 1),
    ],
)
def test_a_worker_of_the_roles_own_device_is_chosen(
    workers: list[tuple[int, WorkerState]], device: int, chosen: int, takes: int
) -> None:
    worker = crew(*workers).choose(device, 2)
    assert worker is not None and (worker.number, worker.device) == (chosen, takes)


def test_roles_that_begin_while_a_worker_still_starts_have_a_device_each() -> None:
    found = crew((0, WorkerState.STARTING), (1, WorkerState.IDLE), (-1, WorkerState.IDLE))
    devices = []
    for device in range(2):
        worker = found.choose(device, 2)
        assert worker is not None
        worker.doing = WorkerState.PLAYING
        devices.append(worker.device)
    assert devices == [0, 1]


IDLE, PLAYING, STARTING = WorkerState.IDLE, WorkerState.PLAYING, WorkerState.STARTING


@pytest.mark.parametrize(
    ("workers", "device", "faulted", "takes"),
    [
        ([(0, IDLE), (1, IDLE), (-1, IDLE)], 0, {0}, (1, 1)),
        ([(0, IDLE), (1, IDLE), (-1, IDLE)], 1, {0}, (1, 1)),
        ([(0, IDLE), (1, STARTING), (-1, IDLE)], 0, {0}, (2, 1)),
        ([(0, PLAYING), (1, IDLE), (-1, IDLE)], 0, {1}, (1, 1)),  # there is no other
        ([(0, IDLE), (1, PLAYING), (-1, IDLE)], 0, {0}, (0, 0)),
        ([(0, IDLE), (1, IDLE)], 0, {0, 1}, (0, 0)),
        ([(0, IDLE), (1, IDLE)], 2, {0}, (1, 1)),
    ],
)
def test_a_device_that_has_failed_is_used_where_there_is_no_other(
    workers: list[tuple[int, WorkerState]], device: int, faulted: set[int], takes: tuple[int, int]
) -> None:
    worker = crew(*workers).choose(device, 2, faulted)
    assert worker is not None and (worker.number, worker.device) == takes


def test_each_role_has_a_device_of_its_own_where_one_has_failed() -> None:
    """Whatever order they begin in, and whether their workers are tied to devices or stand by."""
    for faulted in range(4):
        for order in itertools.permutations(range(4), 3):
            for standbys in range(4):
                ties = [(device, WorkerState.IDLE) for device in range(standbys, 4)]
                found = crew(*ties, *[(-1, WorkerState.IDLE)] * standbys)
                taken = []
                for role in order:
                    worker = found.choose(role, 4, {faulted})
                    assert worker is not None
                    worker.doing, worker.role = WorkerState.PLAYING, role
                    taken.append(worker.device)
                assert len(set(taken)) == 3 and faulted not in taken, (faulted, order, standbys)
