"""The flight record: what is written, what is read, and what is shown of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from core.comm import pg_scripts
from core.comm.pg_harness import CONTEXT, GroupJob
from harness import ROOT
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir
from waiting import wait_for_value

from ft_core.cli.flight import dump, table, to_json, write
from ft_core.comm import flight_memory as flight
from ft_core.comm.flight import FlightRecorder
from ft_core.comm.flight_memory import DTYPES, SLOTS
from ft_core.node.events import ReadFlight
from ft_core.node.workers.flight import Recorded, answer, read
from ft_core.process.doing import look_at
from ft_core.protocol import messages as m
from ft_core.protocol.flight import KINDS, FlightGroup, FlightLog, FlightRecord
from ft_core.protocol.groups import GroupId
from ft_core.state.memory import ControlBlock, SharedMemory, Word

SOME = ([torch.zeros(6)], None)


class Flight:
    """A worker's side and its agent's, in one process."""

    def __init__(self, role: int = 0) -> None:
        self.control = ControlBlock.create()
        self.recorder = FlightRecorder(role, self.control.flight)
        self.recorder.begins(1)
        self.group = self.recorder.add(GroupId.of((0, 1), 0), (0, 1))

    def begin(self, kind: str = "allreduce", args: tuple[Any, ...] = SOME, epoch: int = 1) -> int:
        return self.recorder.begin(self.group, epoch, kind, args)

    def log(self, newest: int = SLOTS) -> FlightLog:
        found = read(Recorded(os.getpid(), self.control), False, newest=newest)
        assert msgspec.json.decode(msgspec.json.encode(found), type=FlightLog) == found
        return found

    def numbers(self, newest: int = SLOTS) -> list[int]:
        return [record.number for record in self.log(newest).records]


def test_a_group_is_called_alike_by_its_members_and_knows_them() -> None:
    assert FlightGroup(3, "0-6:2,7#1").members == (0, 2, 4, 6, 7)
    assert FlightGroup(0, "0-3:3,1-2:1#0").members == (0, 1, 2, 3)
    for name in ("", "dp", "5/0-3:1#0", "0-3:1#0/1>2"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode([3, name, ""]), type=FlightGroup)


def test_a_record_says_whether_it_is_under_way() -> None:
    record = FlightRecord(0, 0, "send", 8, "float32", 1, 10, 0)
    assert record.under_way and not msgspec.structs.replace(record, ended=11).under_way


def test_what_was_written_is_read() -> None:
    job = Flight()
    job.control[Word.VERSION] = 7
    job.recorder.call(job.group, "DATA_PARALLEL_GROUP")
    job.recorder.end(job.begin())
    job.recorder.step = 5
    with torch.no_grad():
        job.begin("send", ([torch.zeros(4, dtype=torch.bfloat16)], 1, 0))
    log = job.log()
    assert (log.role, log.epoch, log.version, log.state, log.at_end) == (0, 1, 7, "R", False)
    assert log.groups == (FlightGroup(0, "0-1:1#0", "DATA_PARALLEL_GROUP"),)
    first, second = log.records
    assert first.started <= first.ended <= second.started <= log.now
    times = first.started, first.ended
    assert first == FlightRecord(0, 0, "all_reduce", 24, "float32", -1, *times, step=-1, grad=True)
    assert second == FlightRecord(0, 0, "send", 8, "bfloat16", 1, second.started, 0, step=5)


def test_who_does_something_else_while_an_operation_goes_on_is_no_longer_in_it() -> None:
    job = Flight()
    slot = job.begin()
    assert [record.apart for record in job.log().records] == [False]
    job.recorder.apart(slot, True)
    assert [record.apart for record in job.log().records] == [True]
    job.recorder.apart(slot, False)
    assert [record.apart for record in job.log().records] == [False]
    for _ in range(SLOTS):
        job.recorder.end(job.begin())
    job.recorder.end(slot)
    for _ in range(SLOTS):
        job.recorder.end(job.begin())
    job.recorder.apart(slot, True)
    assert not any(record.apart for record in job.log().records), "its slot is another's by now"


def test_collectives_and_each_direction_of_each_pair_are_counted_apart_in_each_epoch() -> None:
    job = Flight()
    job.group = job.recorder.add(GroupId.of((3, 5, 7), 0), (3, 5, 7))
    tensor = [torch.zeros(1)]
    issued = [
        *(("send", (tensor, peer, 0)) for peer in (1, 2, 1)),
        *(("recv", (tensor, peer, 0)) for peer in (1, 1, 2)),
        *(("recv", (tensor, 0)) for _ in range(2)),  # from any source
        *(("barrier", ()), ("allreduce", SOME)),
    ]
    for kind, args in issued:
        job.begin(kind, args)
    found = [(record.kind, record.peer, record.number) for record in job.log().records]
    sent = [("send", 5, 0), ("send", 7, 0), ("send", 5, 1)]
    received = [("recv", 5, 0), ("recv", 5, 1), ("recv", 7, 0), ("recv", -1, 0), ("recv", -1, 1)]
    assert found == [*sent, *received, ("barrier", -1, 0), ("all_reduce", -1, 1)]
    job.recorder.begins(2)
    assert job.log().records == () and job.log().epoch == 2
    job.begin("allreduce", SOME, epoch=2)
    assert job.numbers() == [0]
    job.recorder.refused(job.group, "allreduce", SOME)
    job.begin("allreduce", SOME, epoch=2)
    assert job.numbers() == [0, 0], "the first was the caller's mistake, which no peer counts"


def test_the_ring_goes_round_but_not_over_what_is_under_way() -> None:
    job = Flight()
    kept = [job.begin() for _ in range(3)]
    for _ in range(2 * SLOTS):
        job.recorder.end(job.begin())
    numbers = job.numbers()
    assert len(numbers) == SLOTS and numbers[:3] == [0, 1, 2], "they are the oldest"
    assert numbers[3:] == list(range(2 * SLOTS + 3 - (SLOTS - 3), 2 * SLOTS + 3))
    assert sum(record.under_way for record in job.log().records) == 3
    for each in [*kept, *kept]:
        job.recorder.end(each)
    ended = {record.number: record.ended for record in job.log().records}
    assert not any(record.under_way for record in job.log().records)
    job.recorder.end(kept[0])
    assert job.log().records[0].ended == ended[0], "an end counts once"
    for _ in range(SLOTS):
        job.recorder.end(job.begin())
    assert job.numbers()[0] > 2
    job.recorder.end(kept[0])  # its slot is another's by now
    assert len(job.numbers()) == SLOTS


def test_more_under_way_than_there_are_slots() -> None:
    job = Flight()
    for _ in range(SLOTS + 10):
        job.begin()
    assert len(job.numbers()) == SLOTS and job.numbers()[-1] == SLOTS + 9


def test_all_under_way_and_the_newest_of_each_group_are_shown_to_the_controller() -> None:
    job = Flight()
    job.begin()
    for _ in range(10):
        job.recorder.end(job.begin())
    other = job.recorder.add(GroupId.of((0,), 0), (0,))
    job.recorder.end(job.recorder.begin(other, 1, "barrier", ()))
    job.begin()
    found = [(record.group, record.number) for record in job.log(3).records]
    assert found == [(0, 0), (0, 8), (0, 9), (0, 10), (1, 0), (0, 11)]
    assert [(record.group, record.number) for record in job.log(0).records] == [(0, 0), (0, 11)]


def test_a_slot_that_is_being_written_is_left_out() -> None:
    job = Flight()
    for _ in range(3):
        job.recorder.end(job.begin())
    ring = job.control.flight[flight.RING :]
    second = bytearray(ring[128:192])  # the slot of number 1 is the second after the first, which is empty
    for written in range(4, 64, 4):
        # Its next user has come so far.
        new = flight.SLOT.pack(SLOTS + 2, 0, 1, 99, 8, 1, 0, -1, 0, 0, 0, 0, 0, SLOTS + 2)
        ring[128:192] = new[:written] + bytes(second[written:])
        assert job.numbers() == [0, 2]
    ring[128:192] = new
    assert job.numbers() == [0, 2, 99]
    ring[128:192] = bytes(64)
    assert job.numbers() == [0, 2]


def test_bytes_that_mean_nothing_are_left_out() -> None:
    rng = random.Random(1)
    job = Flight()
    job.recorder.end(job.begin())
    ring = job.control.flight[flight.RING :]
    good = list(flight.SLOT.unpack(ring[64:128]))
    bad = {1: 77, 2: 5, 3: -1, 4: -8, 5: -1, 6: -2, 7: -2, 8: len(KINDS), 9: len(DTYPES), 12: -2}
    for place, value in bad.items():
        values = [*good[:place], value, *good[place + 1 :]]
        flight.SLOT.pack_into(ring, 64, *values)
        assert job.log().records == (), place
    flight.SLOT.pack_into(ring, 64, *good)
    assert job.numbers() == [0]
    for _ in range(20):
        ring[: flight.SIZE - flight.RING] = rng.randbytes(flight.SIZE - flight.RING)
        numbers = ring.cast("I")
        for slot in range(SLOTS):  # as if each were whole
            numbers[16 * slot] = numbers[16 * slot + 15] = SLOTS + slot
            numbers[16 * slot + 1] = 0
        job.log()
    job.control.flight[flight.HEADER : flight.RING] = rng.randbytes(flight.RING - flight.HEADER)
    assert job.log().groups == () and job.log().records == ()


def test_groups_that_come_go_and_are_too_many(caplog: pytest.LogCaptureFixture) -> None:
    job = Flight()
    job.begin()
    other = job.recorder.add(GroupId.of((0, 2), 0), (0, 2))
    job.recorder.begin(other, 1, "barrier", ())
    job.recorder.drop(job.group)
    assert [group.name for group in job.log().groups] == ["0-2:2#0"]
    assert [record.kind for record in job.log().records] == ["barrier"], "a dropped group's are not shown"
    for _ in range(200):
        members = sorted(random.Random(1).sample(range(100_000), 1000))
        job.recorder.add(GroupId.of(members, 0), tuple(members))
    assert "no place in the flight record" in caplog.text
    assert 10 < len(job.log().groups) < 200 and job.log().groups[0].name == "0-2:2#0"


def asked(
    question: m.SendFlight | m.DescribeFlight, at_end: Collection[int] = (), epoch: int = -1
) -> ReadFlight:
    return ReadFlight(question, frozenset(at_end), {}, epoch)


def test_the_agent_answers_for_roles_that_live_and_for_the_last_worker_of_others() -> None:
    former, now, other, idle = Flight(3), Flight(3), Flight(4), ControlBlock.create()
    former.begin()
    there = [
        Recorded(None, former.control),
        Recorded(os.getpid(), now.control),
        Recorded(None, other.control),
        Recorded(os.getpid(), idle),
    ]
    found = answer(asked(m.SendFlight(9), at_end={4}), there, {3})
    assert isinstance(found, m.Flights) and found.number == 9
    about = [(log.role, log.state, log.at_end, log.fetches, len(log.records)) for log in found.logs]
    assert about == [(3, "R", False, True, 0), (4, "X", True, False, 0)]
    described = answer(asked(m.DescribeFlight(3)), there[:1], ())
    assert isinstance(described, m.RoleFlight) and described.log is not None
    assert (described.log.state, len(described.log.records)) == ("X", 1)
    assert answer(asked(m.DescribeFlight(8)), there, ()) == m.RoleFlight(8, None)


def test_a_worker_is_looked_at_where_it_is_asked_for() -> None:
    job = Flight(3)
    there = [Recorded(os.getpid(), job.control)]
    looks = []
    for question in (m.SendFlight(9), m.SendFlight(9, closely=(4,)), m.SendFlight(9, closely=(3,))):
        found = answer(asked(question), there, ())
        assert isinstance(found, m.Flights)
        looks += [log.look and (log.look.main.pid, log.look.main.doing) for log in found.logs]
    assert looks == [None, None, (os.getpid(), "runs")]
    described = answer(asked(m.DescribeFlight(3)), there, ())
    assert isinstance(described, m.RoleFlight) and described.log is not None
    assert described.log.look is not None and not described.log.look.stack, "its work is not disturbed"

    def shown(line: str) -> bool:
        # The kernel's list of children leaves some out while another child ends.
        found = answer(asked(m.DescribeFlight(3)), there, ())
        assert isinstance(found, m.RoleFlight) and found.log is not None
        return line in table(found.log).splitlines()

    # Not below this process: of what other tests have left there, too much may be listed before it.
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            there = [Recorded(parent.pid, job.control)]
            wait_for_value(lambda: look_at(child).doing, "sleep")
            wait_for_value(lambda: shown(f"process {child} (sleep) sleeps"), True)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_who_has_begun_nothing_in_the_epoch_under_way_has_an_empty_record() -> None:
    former, behind, idle = Flight(3), Flight(4), ControlBlock.create()
    former.begin()
    behind.begin()
    there = [Recorded(None, former.control), Recorded(1, behind.control, 4), Recorded(os.getpid(), idle, 3)]

    def records(epoch: int) -> list[tuple[int, int, str, int]]:
        found = answer(asked(m.SendFlight(9), epoch=epoch), there, ())
        assert isinstance(found, m.Flights)
        return [(log.role, log.epoch, log.state, len(log.records)) for log in found.logs]

    assert records(1) == [(3, 1, "R", 0), (4, 1, "S", 1)]
    assert records(2) == [(3, 2, "R", 0), (4, 2, "S", 0)]
    assert records(-1) == [(3, 1, "X", 1), (4, 1, "S", 1)], "it has yet to begin one"
    described = answer(asked(m.DescribeFlight(3)), there, ())
    assert isinstance(described, m.RoleFlight) and described.log is not None
    assert len(described.log.records) == 1, "a person wants to see what there is"


def test_what_is_read_while_it_is_written_is_whole() -> None:
    """Another process writes as fast as it can: each record that is read is one that was written."""
    job = Flight()
    ours, theirs = CONTEXT.Pipe()
    writer = CONTEXT.Process(target=pg_scripts.write_flight, args=(job.control.memory.address, theirs))
    writer.start()
    try:
        assert ours.recv() == "begun"
        newest = -1
        while newest < 4 * SLOTS:
            records = job.log().records
            numbers = [record.number for record in records]
            assert numbers == sorted(numbers) and numbers[-1] >= newest
            newest = numbers[-1]
            for each in records:
                assert each.nbytes == 4 * (each.number % 50) and (
                    each.under_way or each.ended >= each.started
                )
        ours.send("enough")
        writer.join()
        assert len(job.log().records) == SLOTS
    finally:
        writer.kill()


# -- what process groups write ---------------------------------------------------------------------


@pytest.mark.parametrize("in_startup", [False, True])
def test_every_kind_of_operation_is_recorded(in_startup: bool) -> None:
    with GroupJob(2, "recorded", in_startup) as job:
        results = job.results()
    for role, found in enumerate(results):
        other = 1 - role
        expected = {
            "all_reduce": [("all_reduce", 16, "float32", -1)],
            "broadcast": [("broadcast", 32, "int64", -1)],
            "reduce": [("reduce", 8, "bfloat16", -1)],
            "all_gather": [("all_gather", 32, "float32", -1)],
            "all_gather_into_tensor": [("all_gather", 32, "float32", -1)],
            "_all_gather_base": [("all_gather", 32, "float32", -1)],
            "reduce_scatter": [("reduce_scatter", 32, "float32", -1)],
            "reduce_scatter_tensor": [("reduce_scatter", 32, "float32", -1)],
            "_reduce_scatter_base": [("reduce_scatter", 32, "float32", -1)],
            "all_to_all_single": [("all_to_all", 16, "float32", -1)],
            "gather": [("gather", 16, "float32", -1)],
            "scatter": [("scatter", 32 if in_startup else 16, "float32", -1)],  # all parts to all
            "barrier": [("barrier", 0, "", -1)],
            "monitored_barrier": [("barrier", 0, "", -1)],
            "all_reduce_coalesced": [("all_reduce", 20, "float32", -1)],
            "coalesced all_reduce": [("all_reduce", 20, "float32", -1)],
            "coalesced all_gather": [("all_gather", 40, "float32", -1)],
            "coalesced reduce_scatter": [("reduce_scatter", 40, "float32", -1)],
            "send and recv": [
                ("send" if role else "recv", 16, "float32", other),
                ("recv" if role else "send", 16, "float32", other),
            ],
            "isend and irecv": [("send", 16, "float32", other), ("recv", 16, "float32", other)],
            "batch_isend_irecv": [("send", 16, "float32", other), ("recv", 16, "float32", other)],
            "recv from any": [("send", 16, "float32", 0) if role else ("recv", 16, "float32", -1)],
            "future": [("all_reduce", 16, "float32", -1)],
            "never waited for": [("all_reduce", 16, "float32", -1)],
            "alone": [("all_reduce", 16, "float32", -1)],
        }
        assert {name: [each[:4] for each in records] for name, records in found["did"].items()} == expected
        groups = [each[4] for records in found["did"].values() for each in records]
        assert groups == [*(["0-1:1#0"] * (len(groups) - 1)), f"{role}#0"]
        numbers = [
            each[5]
            for name, records in found["did"].items()
            for each in records
            if each[3] == -1 and name not in ("alone", "recv from any")
        ]
        assert numbers == list(range(len(numbers))), "collectives of the one group"
        assert found["did"]["alone"][0][5] == 0
        assert found["did"]["recv from any"][0][5] == (3 if role else 0), (
            "what was received so is counted apart"
        )
        assert [each[5] for each in found["did"]["batch_isend_irecv"]] == [2, 2]
        assert found["labels"] == {"0-1:1#0": "default_pg", f"{role}#0": "mine"}
        assert found["after destroy"] == []


def test_what_is_under_way_is_seen_from_outside_whatever_becomes_of_the_worker() -> None:
    """Also what waits for a group to be opened. Another epoch counts anew."""
    with GroupJob(2, "recorded_outside") as job:

        def log(role: int) -> FlightLog:
            [address] = job.wait("memory", [role], job.epoch)[role][1:]
            control = ControlBlock(SharedMemory.open(address))
            return read(Recorded(job.processes[role].pid, control), False)

        def under_way(role: int) -> list[tuple[str, str, int]]:
            found = log(role)
            names = {group.id: group.name for group in found.groups}
            return [(names[r.group], r.kind, r.number) for r in found.records if r.under_way]

        job.wait("alone", [1], 1)
        waits = ("0-1:1#1", "barrier", 0)  # for the group's opening
        wait_for_value(lambda: under_way(0), [waits])
        assert under_way(1) == [] and log(0).epoch == 1
        os.kill(job.processes[1].pid, signal.SIGSTOP)
        wait_for_value(lambda: log(1).state, "T")
        assert [(r.kind, r.number) for r in log(1).records] == [("all_reduce", 0), ("all_reduce", 1)]
        job.kill(1)
        job.next_epoch([1])
        wait_for_value(lambda: (log(0).epoch, under_way(0)), (2, [waits]))
        did = [("all_reduce", 0), ("all_reduce", 1), ("barrier", 0)]
        assert [(r.kind, r.number) for r in log(0).records] == did


def test_what_a_role_has_only_begun_goes_on_apart_until_it_waits() -> None:
    """Also in a group that is made after training has begun, and in one of its own."""
    with GroupJob(2, "recorded_apart") as job:
        found, _ = job.results()
    done = [("all_reduce", False, False), *(("all_gather", False, False),) * 2]
    assert found.pop("before") == done, "objects are gathered in two operations"
    assert found == {
        "wait": [False],
        "future": [False],
        "asked": [False],
        "several": [False, True],
        "issued": [True],
        "coalesced": [False],
        "both": [False, True],
    }


def test_a_callers_mistake_takes_no_number() -> None:
    with GroupJob(2, "recorded_mistake") as job:
        results = job.results()
    assert [[(kind, number) for kind, number, _ in found] for found in results] == [
        [("all_reduce", 0), ("broadcast", 1), ("all_reduce", 1)],
        [("all_reduce", 0), ("all_reduce", 1)],
    ]
    assert all(ended for found in results for _, _, ended in found)


# -- what is shown ---------------------------------------------------------------------------------


def analysed(logs: list[FlightLog], where: Path) -> list[Any]:
    """Each operation as PyTorch's analyser has put it together."""
    write(dump(logs, 10**18), where)
    args = JobConfig().parse_args([str(where)])
    details, version = read_dir(args)
    return build_db(details, args, version).collectives


def issue(job: Flight, *kinds: str) -> None:
    """As one of roles 0 and 1; each operation ends."""
    other, t = 1 - job.control.flight[:8].cast("q")[0], [torch.zeros(6)]
    args: dict[str, tuple[Any, ...]] = {"send": (t, other, 0), "recv": (t, other, 0), "any": (t, 0)}
    for kind in kinds:
        given = args.get(kind, (t, t))
        job.recorder.end(job.begin("recv" if kind == "any" else kind, given))


COLLECTIVES = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
)


def test_pytorchs_analyser_finds_nothing_wrong_with_what_is_right(tmp_path: Path) -> None:
    jobs = [Flight(0), Flight(1)]
    for job in jobs:
        issue(job, *COLLECTIVES, "barrier")
    issue(jobs[0], "send", "recv", "send", "any")
    issue(jobs[1], "send", "recv", "recv", "send")
    for role, job in enumerate(jobs):
        alone = job.recorder.add(GroupId.of((role,), 0), (role,), "nccl")
        job.recorder.end(job.recorder.begin(alone, 1, "allreduce", SOME))
    found = analysed([job.log() for job in jobs], tmp_path / "a")
    assert not any(each.mismatch_collectives for each in found)
    names = [each.collective_name for each in found]
    assert names[:9] == [
        *("gloo:all_reduce", "gloo:broadcast", "gloo:reduce", "gloo:all_gather", "gloo:reduce_scatter"),
        *("gloo:all_to_all", "gloo:gather", "gloo:scatter", "gloo:all_reduce_barrier"),
    ]
    sent = ["gloo:recv 0<-1", "gloo:send 0->1", "gloo:send 0->1", "gloo:send 1->0"]
    assert sorted(names[9:]) == [*sent, "nccl:all_reduce", "nccl:all_reduce"]
    missing = [each for each in found if each.missing_ranks]
    assert [(each.collective_name, each.missing_ranks) for each in missing] == [("gloo:send 1->0", {0})]


def test_rings_that_go_back_differently_far_are_compared_from_where_both_are_there(tmp_path: Path) -> None:
    jobs = [Flight(0), Flight(1)]
    for job, more in zip(jobs, (0, 1000), strict=True):
        extra = job.recorder.add(GroupId.of((1,), 0), (1,)) if more else None
        for _ in range(SLOTS):
            job.recorder.end(job.begin())
        for _ in range(more):
            assert extra is not None
            job.recorder.end(job.recorder.begin(extra, 1, "barrier", ()))
    kept = [len([r for r in job.log().records if r.group == 0]) for job in jobs]
    assert kept == [SLOTS, SLOTS - 1000]
    found = [
        each for each in analysed([job.log() for job in jobs], tmp_path / "a") if each.group_id == "0-1:1#0"
    ]
    assert [each.collective_seq_id for each in found] == list(range(1000, SLOTS))
    assert not any(each.mismatch_collectives or each.missing_ranks for each in found)


def test_pytorchs_analyser_finds_who_is_missing_and_who_does_something_else(tmp_path: Path) -> None:
    jobs = [Flight(0), Flight(1)]
    for job in jobs:
        issue(job, "allreduce")
    jobs[0].begin()
    [first, second] = analysed([job.log() for job in jobs], tmp_path / "a")
    assert not first.missing_ranks and second.missing_ranks == {1} and second.collective_state == "started"
    jobs[1].begin("allreduce", ([torch.zeros(7)], None))
    [_, second] = analysed([job.log() for job in jobs], tmp_path / "b")
    assert not second.missing_ranks and not second.pass_check
    assert "SIZE" in str(second.mismatch_collectives[1].type_of_mismatch)
    assert analysed([Flight(0).log(), Flight(1).log()], tmp_path / "c") == []


def test_people_see_one_line_for_each_operation() -> None:
    job = Flight()
    job.recorder.call(job.group, "DATA")
    issue(job, "allreduce", "send", "barrier", "any")
    job.begin()
    head, columns, *lines = table(job.log()).splitlines()
    assert head == "role 0  epoch 1  version 0  main thread: running"
    assert columns.split() == ["group", "number", "kind", "size", "peer", "began", "took"]
    shown = [line.split() for line in lines]
    assert [each[:7] for each in shown] == [
        ["DATA", "0-1:1#0", "0", "all_reduce", "24", "B", "-"],
        ["DATA", "0-1:1#0", "0", "send", "24", "B", "1"],
        ["DATA", "0-1:1#0", "1", "barrier", "-", "-", shown[2][6]],
        ["DATA", "0-1:1#0", "0", "recv", "24", "B", "any"],
        ["DATA", "0-1:1#0", "2", "all_reduce", "24", "B", "-"],
    ]
    assert [line.endswith("UNDER WAY") for line in lines] == [False] * 4 + [True]
    found = to_json(job.log())
    assert found["groups"][0]["members"] == (0, 1)
    record = found["records"][1]
    assert (record["kind"], record["peer"], record["number"]) == ("send", 1, 0)


def test_each_dtype_of_torch_can_be_recorded() -> None:
    known = {
        str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)
    }
    assert known and known <= set(DTYPES)


@pytest.mark.parametrize("module", ["ft_core.cli.ctl", "ft_core.node.__main__"])
def test_who_has_no_use_for_torch_does_not_wait_for_it(module: str) -> None:
    """It takes seconds to import, and what `ftctl` asks of a job is answered at once; an agent's workers
    have it from the fork server."""
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
