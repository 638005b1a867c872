"""Every second of a job is accounted for, by the controller and by whoever reads its events alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core.control.test_controller_machine import ControlPlane

from ft_core.control.events import Record, Tick
from ft_core.control.observe.goodput import Account, Found
from ft_core.history import goodput
from ft_core.protocol.goodput import Cause, Spent, in_words
from ft_core.protocol.messages import RoleBeat


def of(account: Account) -> dict[str, float]:
    return {str(cause): round(seconds, 6) for cause, seconds in account.seconds.items() if seconds}


def beat(step: int, waited: float = 0.0) -> RoleBeat:
    about: dict[str, Any] = {"tag": step, "held": [], "committed": -1, "step_s": 0.1}
    return RoleBeat(pid=1, step=step, waited_s=waited, h2h_bytes=0, h2h_snapshots=0, **about)


def trains(version: int = 0, share: float = 1.0) -> Account:
    """From 10 s on."""
    account = Account(0.0)
    account.taken_over(Found(1, version, version, True, share, 0.0, stepped=True), Cause.START_UP, 10.0)
    return account


def found(epoch: int, version: int, base: int = 0, step: float = 0.0, restored: bool = True) -> Found:
    return Found(epoch, base, version, restored, 1.0, step, version > base)


def test_time_goes_to_steps_once_they_are_done() -> None:
    account = trains()
    assert of(account) == {"start_up": 10}
    account.stepped(1, 12.0)
    account.stepped(1, 12.5)  # another role says so
    assert of(account) == {"start_up": 10, "productive": 2} and account.open(12.5) == 0.5
    account.stepped(4, 15.0)
    assert of(account) == {"start_up": 10, "productive": 5} and account.step == 1.0


def test_what_is_cut_off_of_a_step_is_lost_and_before_that_noticed() -> None:
    account = trains()
    account.stepped(1, 12.0)
    account.wrong(12.5)
    account.wrong(13.0)
    assert account.to(Cause.DECISION, 14.0) == {Cause.REDONE: 0.5, Cause.DETECTION: 1.5}
    account.to(Cause.RESTORING, 14.25, epoch=2)
    account.begins(2, 1, 1.0)
    assert account.resumes(2, 17.0) == {Cause.PRODUCTIVE: 2}  # as the one before
    assert of(account) == {
        **{"start_up": 10, "productive": 4, "redone": 0.5, "detection": 1.5},
        **{"decision": 0.25, "restoring": 0.75},
    }


def test_a_step_that_is_done_after_all_shows_that_nothing_was_wrong() -> None:
    account = trains()
    account.wrong(10.5)
    account.stepped(1, 12.0)
    assert account.to(Cause.DECISION, 12.5) == {Cause.REDONE: 0.5}


def test_steps_below_what_was_reached_are_done_again() -> None:
    account = trains()
    account.stepped(5, 15.0)
    account.to(Cause.DECISION, 15.0)
    account.to(Cause.RESTORING, 15.0, epoch=2)
    account.begins(2, 3, 1.0)
    assert account.resumes(4, 16.0) == {Cause.REDONE: 1}
    account.stepped(6, 18.0)  # the first of the two is the second that is done again
    assert of(account) == {"start_up": 10, "productive": 6, "redone": 2} and account.steps_redone == 2
    assert account.spent(18.0).redone == 1 and account.reached == 6, "what the events say otherwise"


def test_standing_still_is_no_step() -> None:
    """All have their state, and newcomers are not where the others are yet."""
    account = trains()
    for step in range(1, 6):
        account.stepped(step, 10.0 + step)
    account.to(Cause.DECISION, 15.0)
    account.to(Cause.RESTORING, 15.0, epoch=2)
    account.begins(2, 5, 1.0)
    account.heard({0: beat(5)}, 5, 16.0)
    assert account.until(45.0)[Cause.RESTORING] == 29 and not account.trains
    account.to(Cause.RESTORING, 45.0)  # it is said now and then
    assert account.spent(45.0).seconds[Cause.RESTORING] == 29 and account.open(45.0) == 1
    account.begins(2, 5, 1.0)
    assert account.resumes(6, 65.0) == {Cause.PRODUCTIVE: 1} and not account.resumes(7, 66.0)
    assert of(account) == {"start_up": 10, "productive": 6, "restoring": 49}


def test_nobody_knows_how_long_the_first_step_is() -> None:
    account = Account(0.0)
    account.begins(1, 0, 1.0)
    account.resumes(1, 90.0)
    account.stepped(2, 92.0)
    assert of(account) == {"start_up": 90, "productive": 2}


def test_how_long_without_a_step_is_usual() -> None:
    account = Account(0.0)
    assert account.since_step(1000.0) is None
    account.begins(1, 0, 1.0)
    account.resumes(1, 40.0)
    for step in range(2, 20):
        account.stepped(step, 40.0 + step)
    assert account.since_step(69.0) == 10 and account.patience == 60
    account.stepped(20, 159.0)  # with an evaluation
    assert account.patience == 300 and account.pace.usual == 1
    account.to(Cause.DECISION, 160.0)
    account.to(Cause.RESTORING, 160.0, epoch=2)
    account.begins(2, 20, 1.0)
    assert account.since_step(300.0) == 141, "standing still goes on"
    account.resumes(21, 320.0)
    assert account.since_step(320.0) == 0


def test_a_long_start_is_none_the_next_time() -> None:
    account = Account(0.0)
    account.begins(1, 0, 1.0)
    account.resumes(1, 400.0)
    assert account.patience == 60
    account.to(Cause.RESTORING, 400.0, epoch=2)
    assert account.patience == 1200


def test_of_what_a_predecessor_saw_the_usual_is_known() -> None:
    left = Spent(Cause.RESTORING, {Cause.PRODUCTIVE: 50.0}, epoch=2, version=3, reached=3, step=2.0)
    account = Account(100.0, left, ago=10.0)
    assert account.since_step(130.0) == 40
    account.taken_over(found(2, 3, base=3), Cause.RESTORING, 100.0)
    assert account.resumes(4, 130.0) == {Cause.PRODUCTIVE: 2}
    assert of(account) == {"productive": 52, "restoring": 38}


def test_groups_that_are_away_take_their_share() -> None:
    account = trains(share=0.75)
    account.stepped(4, 14.0)
    assert of(account) == {"start_up": 10, "productive": 3, "degraded": 1}


def test_the_role_that_waits_longest_for_copies_is_what_all_wait_for() -> None:
    account = trains()
    account.heard({0: beat(0, 7.0), 1: beat(0, 1.0)}, 0, 10.0)  # before this epoch
    account.heard({0: beat(1, 7.5)}, 1, 12.0)
    account.heard({1: beat(1, 1.25)}, 1, 12.1)
    account.heard({0: beat(2, 7.75), 1: beat(2, 1.5)}, 2, 14.0)
    assert of(account) == {"start_up": 10, "productive": 3.25, "saving": 0.75}


def test_waiting_for_copies_in_a_step_that_is_done_again_is_lost_as_all_of_that_step() -> None:
    account = trains()
    account.heard({0: beat(2, 0.0)}, 2, 12.0)
    account.to(Cause.RESTORING, 12.0, epoch=2)
    account.begins(2, 0, 1.0)
    account.resumes(1, 13.0)
    account.heard({0: beat(1, 0.0)}, 1, 13.0)
    account.heard({0: beat(3, 0.5)}, 3, 15.0)  # one of the two steps is new
    assert of(account) == {"start_up": 10, "productive": 2.75, "saving": 0.25, "redone": 2}


def test_what_a_script_does_after_its_last_step_is_its_own() -> None:
    account = trains()
    account.stepped(1, 12.0)
    account.finished(15.0)
    assert account.to(Cause.UNKNOWN, 15.0) == {} and of(account) == {"start_up": 10, "productive": 5}


def test_a_successor_goes_on_where_its_predecessor_was() -> None:
    before = trains()
    before.stepped(3, 13.0)
    left = msgspec.json.decode(msgspec.json.encode(before.spent(13.5)), type=Spent)
    after = Account(100.0, left, ago=4.0)
    assert after.open(100.0) == 4.5, "since the step before was seen"
    assert after.taken_over(found(1, 5), Cause.RESTORING, 100.0) == {}  # two steps, of 1 s each, were done
    assert of(after) == {"start_up": 10, "productive": 5} and after.open(100.0) == 2.5
    after.stepped(6, 101.0)
    assert of(after) == {"start_up": 10, "productive": 8.5}


def test_where_nobody_looked_it_is_not_known_what_was_lost() -> None:
    left = Spent(Cause.PRODUCTIVE, {Cause.PRODUCTIVE: 50.0}, epoch=1, version=3, reached=3, step=1.0)
    account = Account(100.0, left, ago=4.0)
    account.taken_over(found(1, 5), Cause.RESTORING, 100.0)
    assert account.to(Cause.DECISION, 100.0) == {Cause.UNKNOWN: 2.0}
    assert of(account) == {"productive": 52, "unknown": 2}


def test_steps_that_were_done_while_nobody_looked_took_what_steps_take() -> None:
    left = Spent(Cause.RESTORING, {Cause.PRODUCTIVE: 50.0}, epoch=2, version=3, reached=3)
    account = Account(100.0, left, ago=10.0)
    assert account.taken_over(found(2, 5, base=3, step=1.5), Cause.RESTORING, 100.0) == {
        Cause.PRODUCTIVE: 3.0
    }
    assert account.trains and account.reached == 5
    assert of(account) == {"productive": 53, "restoring": 7}
    account = Account(100.0, left, ago=10.0)
    parts = account.taken_over(found(2, 5, base=3, step=1.5, restored=False), Cause.RESTORING, 100.0)
    assert parts == {Cause.PRODUCTIVE: 3.0, Cause.UNKNOWN: 7.0}
    assert account.to(Cause.DECISION, 100.0) == {} and of(account) == {"productive": 53, "unknown": 7}


def test_of_another_epoch_than_was_left_it_is_known_once_all_have_their_state() -> None:
    left = Spent(Cause.DECISION, {Cause.PRODUCTIVE: 50.0}, epoch=1, version=3, reached=3)
    account = Account(100.0, left, ago=4.0)
    account.taken_over(found(2, 3, restored=False), Cause.RESTORING, 100.0)
    account.begins(2, 3, 1.0)
    account.resumes(4, 101.0)
    assert of(account) == {"productive": 50, "decision": 4, "restoring": 1}
    account = Account(100.0, left, ago=4.0)
    account.taken_over(found(2, 5), Cause.RESTORING, 100.0)
    assert account.trains and of(account) == {"productive": 50, "decision": 4}


def test_in_words() -> None:
    said = in_words({Cause.PRODUCTIVE: 90.0, Cause.START_UP: 8.0, Cause.DECISION: 2.0, Cause.WAITING: 0.0})
    assert said == "90.0 % of 100.0 s productive; start-up 8.0 s, decision 2.0 s"


# -- events ------------------------------------------------------------------------------------------


class Job:
    """A controller whose process does not run all the time, and the lines that it writes."""

    def __init__(self, **about: Any) -> None:
        self.job = ControlPlane(**about)

    def lines(self) -> list[goodput.Line]:
        """As the shell writes them."""
        found = []
        for at, record in self.job.recorded_at:
            about = {"event": record.event, "epoch": record.epoch, "term": 1, "monotonic": at, "time": at}
            found.append(msgspec.json.decode(msgspec.json.encode({**about, **record.more})))
        return found


def agree(job: Job) -> dict[Cause, float]:
    """The seconds until the newest event, by both."""
    told = [record.more["spent"] for record in job.job.records if "spent" in record.more][-1]
    read = goodput.seconds(job.lines())
    assert read == pytest.approx(dict.fromkeys(Cause, 0.0) | told.seconds, abs=0.01) and not told.open
    return read


def test_a_recovery_in_events() -> None:
    job = Job(nodes=2, spares=1)
    plane = job.job
    plane.wait(3.0)
    plane.all_step(1)
    plane.wait(20.0)
    plane["node1"].hangs_up()
    plane.wait(1.0)
    plane.all_report("node0", "node2")
    recorded = {record.event: record for record in plane.records}
    assert set(recorded["detected"].more["unfinished"]) == {Cause.REDONE, Cause.DETECTION}
    assert recorded["detected"].more["spent"].now is Cause.DECISION
    assert recorded["decided"].more["spent"].now is Cause.RESTORING
    plane.all_step(2)
    for step in range(3, 9):
        plane["node0"].step_now = plane["node2"].step_now = step
        plane.wait(15.0)
    assert "goodput" in {record.event for record in plane.records}, "now and then, though nothing happens"
    spent = agree(job)
    assert spent[Cause.DETECTION] == pytest.approx(0.35, abs=0.1)


def test_time_in_which_the_controller_did_not_run_counts() -> None:
    plane = ControlPlane(nodes=2)
    plane.controller.handle(Tick(), plane.now, plane.now + 1000.0)
    account = plane.controller.view.account
    whole = sum(account.seconds.values()) + account.open(plane.now + 1000.0)
    assert whole == pytest.approx(plane.now + 1000.0)


def test_lines_of_two_machines_are_put_together_by_term() -> None:
    def line(term: int, at: float, event: str, **more: Any) -> goodput.Line:
        return {"event": event, "term": term, "monotonic": at + 1000 * term, "time": at, **more}

    spent = {"seconds": {}, "epoch": 1}
    first = [
        line(1, 0.0, "started", spent={"now": "start_up", **spent}),
        line(1, 10.0, "state_restored", spent={"now": "productive", **spent}),
        line(1, 30.0, "refused"),  # by one that does not know yet that another leads
    ]
    second = [
        line(2, 28.0, "controller_restarted", spent={"now": "productive", "waited": 1.5, **spent}),
        line(2, 40.0, "finished"),
        line(2, 90.0, "refused"),
    ]
    found = goodput.seconds(goodput.in_order([*second, *first]))
    assert found[Cause.START_UP] == 10 and sum(found.values()) == 40
    assert (found[Cause.PRODUCTIVE], found[Cause.SAVING]) == (28.5, 1.5)


def test_torn_lines_are_left_out(tmp_path: Any) -> None:
    path = tmp_path / "events.jsonl"
    about = '"term": 1, "monotonic": 0.0, "time": 0.0'
    path.write_text(f'{{"event": "joined", {about}}}\n{{"event": "dec\n[]\n{{"event": "refused"}}\n')
    assert [line["event"] for line in goodput.read([path])] == ["joined"]


def test_every_record_with_an_account_is_told_of_at_its_time() -> None:
    """What a line says is up to then: the seconds and what is open are the wall clock."""
    job = Job(nodes=2, spares=1)
    job.job.all_step(1)
    job.job.wait(70.0)
    job.job["node0"].hangs_up()
    job.job.wait(2.0)
    told = [(at, r.more["spent"]) for at, r in job.job.recorded_at if "spent" in r.more]
    assert {spent.now for _, spent in told} == {Cause.START_UP, Cause.PRODUCTIVE, Cause.DECISION}
    for at, spent in told:
        assert sum(spent.seconds.values()) + spent.open == pytest.approx(at, abs=0.01)
    assert isinstance(job.job.recorded_at[0][1], Record)
