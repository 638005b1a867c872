"""Start-up collectives are recorded, replayed by newcomers and issued again by survivors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core.comm.pg_harness import GroupJob

from ft_core.comm.entries import Entry
from ft_core.comm.process_group import Communicators
from ft_core.comm.startup import Startup
from ft_core.comm.startup_log import AT_ONCE, Call, StartupLog, to_bytes
from ft_core.errors import EpochChanged, ReplayMismatch
from ft_core.protocol.codec import Decoder, encode
from ft_core.protocol.groups import GroupId, Series, Steps

GROUP = Series(GroupId.of((0, 1), 0))


def check(results: list[dict[str, Any]], epoch: int) -> None:
    for role, result in enumerate(results):
        assert result["all_reduce"] == [10.0, 8.0]
        assert result["broadcast"] == [1.0] * 3
        assert result["objects"] == [{"role": r} for r in range(4)]
        assert result["shared"] == "from the source"
        assert result["pair"] == [11 if role < 2 else 13]
        assert result["p2p"] == [float((role - 1) % 4)] * 2
        assert result["all_gather"] == [[float(r)] * 2 for r in range(4)]
        assert result["trained"] == [6.0]
        assert result["epoch"] == epoch


@pytest.mark.parametrize("lost", [1, 3])
def test_a_newcomer_replays_the_start_up(lost: int) -> None:
    with GroupJob(4, "start_up", None, lost) as job:
        job.wait("stopped", [lost])
        job.kill(lost)
        job.next_epoch([lost])
        results = job.results()
    check(results, 2)
    # By how many results it had: what others have of it tells that its predecessor had come so far; but what
    # they have sent it by broadcast does not.
    sends = [1] if lost == 1 else []
    assert results[lost]["repeated"] == [0, *sends, 2, 4, 5, 6, 7]
    assert results[0]["repeated"] == []


@pytest.mark.parametrize(
    "lost,point", [(2, 0), (1, 1), (3, 2), (2, 2), (0, 3), (1, 4), (2, 5), (3, 6), (0, 7)]
)
def test_a_kill_during_start_up(lost: int, point: int) -> None:
    """Some survivors have completed the operation that others are blocked in (broadcast, point-to-point)."""
    with GroupJob(4, "start_up", (lost, point), None) as job:
        job.wait("stopped", [lost], point)
        job.wait("passed", {0, 1, 2, 3} - {lost}, point)
        job.kill(lost)
        job.next_epoch([lost])
        check(job.results(), 2)


def test_two_kills_during_start_up() -> None:
    with GroupJob(4, "start_up", (2, 3), None) as job:
        job.wait("stopped", [2], 3)
        job.kill(2)
        job.next_epoch([2], ((2, 99), 2))
        job.kill(0)
        job.next_epoch([0])
        check(job.results(), 3)


@pytest.mark.parametrize("issued,waited", [(False, 0), (True, 0), (True, 1), (True, 5)])
def test_a_kill_while_several_operations_are_under_way(issued: bool, waited: int) -> None:
    """What nobody has on record is done again, with what it was given; else all take it from there."""
    with GroupJob(3, "several_pending", issued, waited) as job:
        job.wait("stopped", [2])
        job.wait("passed", [0, 1])
        job.kill(2)
        job.next_epoch([2])
        results = job.results()
    for role, result in enumerate(results):
        assert result["sums"] == [[6], [36], [66], [32]]
        assert result["gathered"] == [[0], [1], [2]] and result["received"] == [(role - 1) % 3]
        assert result["pending"] == 0
    whole = [
        {series: n for series, n in result["counts"].items() if series.pair is None} for result in results
    ]
    assert whole[0] == whole[1] == whole[2] and sorted(whole[0].values()) == [2, 5]


def lose(job: GroupJob, role: int, at: int, begin: int, more: int | None = None) -> None:
    """A role that stops in step `at` is killed; its newcomer begins at step `begin` (see `between_steps`)."""
    job.wait("stopped", [role], at)
    job.kill(role)
    job.next_epoch([role], ({}, begin, more))


def test_newcomers_between_training_steps() -> None:
    """The second begins at an earlier step than the first, whose record does not go back so far."""
    with GroupJob(3, "between_steps", {1: 20, 0: 27}, 0, None) as job:
        lose(job, 1, at=20, begin=12)
        lose(job, 0, at=27, begin=5)
        results = job.results()
    for role, begin in ((0, 5), (1, 12), (2, 0)):
        assert results[role]["sums"] == [[3 + 3 * step] for step in range(begin, 30)]
        assert results[role]["received"] == [[300 - 100 * role + s] for s in range(begin, 29) if role]
        assert len(results[role]["counts"]) < 12, "what is told of a record must not grow with the steps"


def test_records_that_were_lost_with_their_workers() -> None:
    with GroupJob(3, "between_steps", {1: 20, 2: 27}, 0, None) as job:
        lose(job, 1, at=20, begin=12)
        lose(job, 2, at=27, begin=5)
        kind, text, _ = job.wait("error", [2])[2]
    assert kind == "ReplayMismatch" and "group 5/0-2:1#0/2>1 is on record nowhere" in text


def test_what_is_behind_everybody_is_dropped() -> None:
    """The record does not grow with the steps, and who begins at the newest checkpoint has what it needs."""
    steps, every, stop = 1000, 50, 531
    with GroupJob(2, "with_checkpoints", stop, 0, steps, every) as job:
        job.wait("stopped", [0])
        job.kill(0)
        job.next_epoch([0], (stop, 500, steps, every))
        for result in job.results():
            assert result["sums"] == [1 + 2 * step for step in range(result["first"], steps)]
            assert result["most"] < 2 * 2 * every, "two a step, since the newest checkpoint but one"


def test_a_newcomer_that_begins_before_the_newest_checkpoint() -> None:
    with GroupJob(2, "with_checkpoints", 27, 0, 30, 10) as job:
        job.wait("stopped", [0], 27)
        job.kill(0)
        job.next_epoch([0], (27, 19, 30, 10))
        kind, text, _ = job.wait("error", [0])[0]
    assert kind == "ReplayMismatch" and "operation 0 of group 19/0-1:1#0 is on record nowhere" in text
    assert "its record begins at step 20" in text and "`latest`" in text


def done(startup: Startup, steps: range) -> list[int]:
    """After these steps of one operation each: of which steps there are records."""
    for step in steps:
        startup.reached(step)
        startup.log.append(GROUP.at(step), Entry("broadcast", "s", (bytes(9),)))
    startup.reached(steps.stop)
    kept = [step for step in range(steps.stop) if startup.log.count(GROUP.at(step))]
    assert len(startup.log) == len(kept) + 1 and startup.log.count(GROUP) == 1, "what is of no step stays"
    return kept


def test_when_records_are_dropped() -> None:
    startup = Communicators(0, 2, on_failure=lambda _: None, secret=b"").startup
    startup.log.append(GROUP, Entry("broadcast", "of start-up", (b"",)))
    assert done(startup, range(4)) == [0, 1, 2, 3]
    startup.newcomers_begin_at(4)
    assert done(startup, range(4, 4)) == [0, 1, 2, 3], "others may not have finished step 3"
    assert done(startup, range(4, 5)) == [4]
    assert startup.counts() == {GROUP: 1, Steps(4, GROUP): 5}
    startup.keep(True)  # a replica group is on its way
    startup.newcomers_begin_at(6)
    assert done(startup, range(5, 8)) == [4, 5, 6, 7]
    startup.keep(False)
    assert done(startup, range(8, 9)) == [6, 7, 8]
    startup.newcomers_begin_at(5)  # an older one
    assert done(startup, range(9, 10)) == [6, 7, 8, 9]


def test_room_is_given_back() -> None:
    log = StartupLog(total_cap=100)
    for step in range(10):
        log.append(GROUP.at(step), Entry("broadcast", "s", (bytes(40),)))
        log.passed(0, step + 1)
        log.drop(step)
    given = log.entries(GROUP.at(9), 0)[GROUP.at(9)]
    assert len(given) == 1 and given[0].tensors is not None


def test_steps_that_are_over_are_given_as_they_were() -> None:
    """Packed, since there may be very many; also once the first of them are dropped."""
    log, pair = StartupLog(), Series(GROUP.group, (1, 0))
    expected: dict[Series, list[Entry]] = {}

    def record(series: Series, *entries: Entry) -> None:
        for entry in entries:
            log.append(series, entry)
            expected.setdefault(series, []).append(entry)

    record(GROUP, Entry("barrier", "barrier()", ()))
    for step in range(40):
        record(GROUP.at(step), Entry("allreduce", "a", (bytes([step]), b"", bytes([step] * 3))))
        record(GROUP.at(step), *[Entry("gather", "g", None)] * (step % 3))
        if step % 2:
            record(pair.at(step), Entry("send", f"send {step % 4}", (bytes([step] * 2),)))
        log.passed(0, step)
    for until in (0, 7, 8, 30):
        log.drop(until)
        kept = {s: entries for s, entries in expected.items() if s.step is None or s.step >= until}
        assert len(log) == sum(map(len, kept.values()))
        for series, entries in kept.items():
            assert log.count(series) == len(entries)
            for start in range(len(entries)):
                given = log.entries(series, start)
                first = 0 if series.step is None else series.step
                later = {s: e for s, e in kept.items() if s.step is not None and s.step > first}
                assert given[series] == entries[start:]
                assert later.items() <= given.items()
            assert log.entries(series, len(entries)) == {}
    assert log.entries(GROUP.at(29), 0) == {} == log.entries(pair.at(30), 0)


def test_a_step_that_is_over_cannot_have_had_more_operations() -> None:
    with GroupJob(3, "between_steps", {1: 20}, 0, None) as job:
        lose(job, 1, at=20, begin=0, more=3)
        kind, text, _ = job.wait("error", [1])[1]
    assert kind == "ReplayMismatch" and "issues barrier(), its peers did 1 operations (role" in text


def test_a_rehearsal_needs_no_peers_and_leaves_no_trace() -> None:
    """What peers would have sent is zero."""
    with GroupJob(2, "rehearse") as job:
        other, alone = job.results()
    assert alone["real"] == other["real"] == [1.0]
    assert alone["counts"] == other["counts"]
    assert alone["sum"] == alone["mine"] == [1.0] * 2
    assert alone["theirs"] == alone["received"] == alone["scattered"] == [0.0] * 2
    assert alone["gathered"] == [0.0] * 4


@pytest.mark.parametrize(
    "how,said",
    [
        ("shape", "issues allreduce(SUM, float32[3]), its peers did allreduce(SUM, float32[2])"),
        ("kind", "issues barrier(), its peers did allreduce"),
        ("more", "operations, then ended start-up"),
        ("fewer", "end of start-up on role 1: this process issues 1 operations in group 0-1:1#0"),
        ("scatter", "existed on this role only"),
    ],
)
def test_a_mismatch_is_detected(how: str, said: str) -> None:
    with GroupJob(2, "divergent", how) as job:
        job.wait("stopped", [1])
        job.kill(1)
        job.next_epoch([1])
        kind, text, _ = job.wait("error", [1])[1]
        assert kind == "ReplayMismatch" and said in text


def test_the_log_keeps_small_results_and_signatures_of_large_ones() -> None:
    log = StartupLog(total_cap=100, entry_cap=60)
    for size in (50, 70, 40, 20):
        log.append(GROUP, Entry("broadcast", "s", (b"x" * size,)))
    kept = [e.tensors is not None for e in log.entries(GROUP, 0)[GROUP]]
    assert kept == [True, False, True, False]
    assert log.counts() == {GROUP: 4} and len(log.entries(GROUP, 3)[GROUP]) == 1


def test_a_newcomer_is_given_what_comes_next_as_well() -> None:
    log = StartupLog()
    size = AT_ONCE // 8
    for step in range(6):
        for _ in range(2):
            log.append(GROUP.at(step), Entry("broadcast", "s", (bytes(size),)))
    log.append(GROUP.at(2), Entry("broadcast", "late", (b"",)))
    given = log.entries(GROUP.at(2), 1)
    assert {s.step: len(entries) for s, entries in given.items()} == {2: 2, 3: 2, 4: 2, 5: 2}
    assert [entry.signature for entry in given[GROUP.at(2)]] == ["s", "late"]
    given = log.entries(GROUP.at(0), 0)
    assert {s.step: len(entries) for s, entries in given.items()} == {0: 2, 1: 2, 2: 3, 3: 2}
    assert log.entries(GROUP.at(5), 2) == log.entries(GROUP, 0) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float32])
def test_entries_survive_the_wire_bit_by_bit(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (2, 3)).to(dtype)
    entry = Call(0, "broadcast", ([source, torch.zeros(0)], 1), {}).entry()
    target = torch.zeros(2, 3, dtype=dtype)
    call = Call(1, "broadcast", ([target, torch.zeros(0)], 1), {})
    call.apply(Decoder[Entry](Entry).decode(encode(entry), "a peer"), "here")
    assert torch.equal(source, target)


def test_a_large_result_is_left_to_restore_unless_it_steers_the_script() -> None:
    for dtype, fine in ((torch.float32, True), (torch.uint8, False)):
        call = Call(0, "broadcast", ([torch.zeros(4, dtype=dtype)], 1), {})
        entry = Entry("broadcast", call.signature, None)
        if fine:
            call.apply(entry, "here")
        else:
            with pytest.raises(ReplayMismatch, match="too large"):
                call.apply(entry, "here")
            with pytest.raises(ReplayMismatch, match="too large"):
                call.apply(entry, "here", lenient=False)
            call.apply(entry, "here", weights=True)  # sent as bytes


def test_a_record_that_a_successor_serves_is_no_mismatch() -> None:
    """The holder died after the plan was made: the answer comes from who plays its role in the next epoch."""
    comms = Communicators(0, 2, on_failure=lambda _: None, secret=b"")

    def fetch(holder: int, series: Series, start: int) -> dict[Series, Any]:
        comms.abort(2)
        return {}

    comms.swap(1, "127.0.0.1:1", {GROUP: (1, 1)}, fetch)
    with pytest.raises(EpochChanged):
        comms.startup.peers_entry(GROUP, 0, "barrier()", 1)
    comms.abort(3)  # ends what listens


def test_recording_a_result_leaves_its_storage_resizable():
    """FSDP frees what it has gathered by resizing the storage to nothing."""
    gathered = torch.arange(6.0)
    to_bytes(gathered)
    gathered.untyped_storage().resize_(0)


def test_what_peers_that_began_elsewhere_have_on_record_is_noted_after_a_checkpoint_is_loaded() -> None:
    comms = Communicators(0, 2, on_failure=lambda _: None, secret=b"")
    kinds = ["broadcast", "barrier", "allgather"]
    entries = [Entry(kind, f"{kind}()", (b"",)) for kind in kinds]

    def fetch(holder: int, series: Series, start: int) -> dict[Series, Any]:
        return {series: entries[start:]}

    startup = comms.startup
    comms.swap(1, "127.0.0.1:1", {GROUP: (3, 1), GROUP.at(7): (3, 1)}, fetch)
    startup.peers_entry(GROUP, 0, "broadcast()", 1)
    startup.has_loaded()
    startup.peers_entry(GROUP, 1, "barrier()", 1)
    startup.peers_entry(GROUP.at(7), 0, "broadcast()", 1)
    assert startup.goes_by == "", "neither what came before, nor what tells nothing, nor what is a step's"
    startup.peers_entry(GROUP, 2, "allgather()", 1)
    startup.peers_entry(GROUP, 0, "broadcast()", 1)
    assert startup.goes_by == startup.where(GROUP, 2)
    comms.abort(2)
