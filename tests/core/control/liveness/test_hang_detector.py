"""When a job hangs, and what the controller does about it: the machine, on a clock of the test's."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from core.control.test_controller_machine import ControlPlane, sent

from ft_core.control.events import Record, Tick
from ft_core.control.liveness.hangs import detector
from ft_core.process.doing import Seen
from ft_core.process.stacks import Frame
from ft_core.protocol import messages as m
from ft_core.protocol.flight import FlightGroup, FlightLog, FlightRecord, Look

S = 10**9
LOCKED, READS = Look(Seen(1, "python", "lock")), Look(Seen(1, "python", "file", "/mnt/data"))
LOADS = Look(
    Seen(1, "python", "local"),
    (Frame("/x/torch/utils/data/dataloader.py", "_try_get_data"),),
    (Seen(2, "pt_data_worker", "sleep"),),
)
COMPILES = Look(Seen(1, "python", "process"), (), (Seen(2, "nvcc", "process"), Seen(3, "cicc", "runs")))
GROUP = (FlightGroup(0, "0-2:1#0"),)


class Hanging(ControlPlane):
    """Three nodes with a role each, which do steps until they are told not to."""

    def __init__(self, **settings: float) -> None:
        super().__init__(nodes=3, **settings)
        self.step, self.step_s = 1, 0.5
        self.missing: set[int] = {2}
        """Roles that do not come to the exchange in which the others wait."""
        self.states = dict.fromkeys(range(3), "S")
        self.deaf: set[int] = set()
        self.apart: set[tuple[str, str]] = set()
        """Nodes of which the one does not reach the other."""
        self.fetching: set[int] = set()
        self.since = 0.0
        """When the others have come to it."""
        self.usual: float | None = 0.2
        self.sizes: dict[int, int] = {}
        """What some roles bring to it, which is not what the others bring."""
        self.number = 7
        """Of the exchange in which they wait."""
        self.history: list[FlightRecord] = []
        """Of those who wait."""
        self.moves = self.trained = self.saves = False
        self.answered = 0
        self.passed = 0
        """By role 2, a newcomer, of what was done before."""
        self.passes = False
        self.looks: dict[int, Look] = {}
        """What those are at that are looked at closely, unless they are in a lock."""
        self.looked = 0

    def train(self) -> None:
        self.all_step(1)
        self.trained = True
        self.pass_(0.6)

    def log(self, role: int, closely: Collection[int] = ()) -> FlightLog:
        now = int((self.now + 100) * S)
        before = [] if self.usual is None else [self._exchange(0, 100.0, 100 + self.usual)]
        waiting = (
            []
            if role in self.missing
            else [self._exchange(self.number, 100 + self.since, 0, self.sizes.get(role, 64))]
        )
        if role not in self.missing:
            before += self.history
        moves = [self._exchange(8, 100 + self.now, 0, 100)] if self.moves else []
        records = tuple([*before, *waiting, *moves])
        moved = int(self.now * 1e6) if self.saves and role in self.missing else 0
        epoch = self.agents[f"node{role}"].epoch
        fetches = role in self.fetching
        look = self.looks.get(role, LOCKED) if role in closely else None
        self.looked += look is not None
        about = role, epoch, 1, now, self.states[role], False
        return FlightLog(*about, GROUP, records, moved, fetches, look)

    @staticmethod
    def _exchange(number: int, started: float, ended: float, nbytes: int = 64) -> FlightRecord:
        return FlightRecord(0, number, "all_reduce", nbytes, "float32", -1, int(started * S), int(ended * S))

    def restored(self, role: int) -> None:
        agent = self.agents[f"node{role}"]
        agent.say(m.Restored(agent.epoch, role, agent.workers[role], 1, True))

    def pass_(self, seconds: float) -> list[Record]:
        """Time passes, in which nodes answer. Returns the hangs that were found."""
        end, before = self.now + seconds, len(self.records_of("hang"))
        while self.now < end and self.done is None:
            self.now += 0.05
            for role, agent in enumerate(self.agents.values()):
                if int(self.now / 0.5) > int((self.now - 0.05) / 0.5):
                    self._beat(role)
                for asked in [each for each in agent.heard if isinstance(each, m.SendFlight)]:
                    agent.heard.remove(asked)
                    if role not in self.deaf:
                        self.answered += 1
                        logs = (self.log(role, asked.closely),) if role in agent.workers else ()
                        agent.say(m.Flights(asked.number, logs))
                for asked in [each for each in agent.heard if isinstance(each, m.ProbeNodes)]:
                    agent.heard.remove(asked)
                    agent.say(
                        m.NodesProbed(asked.round, {n: self._reach(agent.name, n) for n in asked.nodes})
                    )
            self.happens(Tick())
        return self.records_of("hang")[before:]

    def _reach(self, name: str, other: str) -> m.ProbeResult:
        return "silent" if {(name, other), (other, name)} & self.apart else "reached"

    def _beat(self, role: int) -> None:
        agent = self.agents[f"node{role}"]
        if role not in agent.workers:  # a spare
            agent.say(m.Heartbeat(agent.epoch, agent.begun, {}, 1, {}))
            return
        self.passed += self.passes and role == 2
        about = agent.workers[role], self.step, self.step, [self.step], self.step, self.step_s
        beat = m.RoleBeat(*about, 0, 0, 0, passed=self.passed if role == 2 else 0)
        agent.say(m.Heartbeat(agent.epoch, agent.begun, {role: beat}, 1, agent.replicas))


def orders(job: Hanging) -> dict[int, m.Examine]:
    """By role, what its agent was told."""
    found = [each for agent in job.agents.values() for each in agent.heard if isinstance(each, m.Examine)]
    return {order.role: order for order in found}


def test_a_role_that_does_not_come_is_replaced() -> None:
    job = Hanging()
    job.train()
    job.since = job.now
    assert not job.pass_(detector.FLOOR - 1)
    (hang,) = job.pass_(4)
    assert hang.roles == (2,) and "role 2 (node node2) has not entered all_reduce #7" in hang.reason
    assert hang.more == {"explained": True}
    told = orders(job)
    assert told[2] == m.Examine(2, job["node2"].workers[2], end=True)
    (witness,) = set(told) - {2}
    assert not told[witness].end, "one that waits is only looked at"
    assert not job.pass_(detector.TREATMENT - 2), "it is about to end"
    assert len(job.pass_(6)) == 1, "it has not"


def test_what_ends_is_no_hang() -> None:
    job = Hanging()
    job.train()
    job.since = job.now
    assert not job.pass_(detector.FLOOR + 0.6)  # asked once
    assert job.answered
    job.step = 2
    assert not job.pass_(detector.FLOOR - 1)


def test_records_that_move_are_progress() -> None:
    job = Hanging()
    job.train()
    job.since, job.moves = job.now, True
    assert not job.pass_(60)
    job.moves = False
    assert job.pass_(12)


def test_nobody_waits() -> None:
    """All compute: a step that is long, an evaluation."""
    job = Hanging()
    job.train()
    job.missing = {0, 1, 2}
    assert not job.pass_(590)
    (said,) = job.pass_(2000)
    assert said.more == {"explained": False} and "no role waits for another" in said.reason
    assert job.done is None and not orders(job), "it may be one that takes an hour"
    assert job.answered < 3 * 320, "and it is asked less and less"


def test_steps_that_take_long_are_learned() -> None:
    job = Hanging()
    job.train()
    job.step_s = 10.0
    for step in range(2, 6):
        job.step = step
        job.pass_(1)
    job.since = job.now
    assert not job.pass_(28)
    assert job.pass_(6)


def test_what_has_taken_long_before_may_do_so_again() -> None:
    """As the barrier after a checkpoint that one role writes."""
    job = Hanging()
    job.train()
    job.since, job.usual = job.now, 20.0
    assert not job.pass_(58)
    assert job.pass_(10)


def test_a_role_that_writes_is_at_work() -> None:
    """A checkpoint that one role writes while the others go on to the next step, and wait there."""
    job = Hanging(hang_limit=100)
    job.train()
    job.since, job.saves = job.now, True
    assert not job.pass_(98)
    assert job.pass_(15), "no longer than the limit"


def test_no_false_alarm_in_ten_thousand_steps() -> None:
    """With evaluation, checkpoints behind a barrier or of one role alone, and loaders that stutter."""
    job = Hanging(hang_limit=120)
    job.train()
    rng = random.Random(1)
    for step in range(2, 10_002):
        job.step, job.step_s, took = step, 0.5, 0.5
        job.usual, job.saves, job.missing = 0.2, False, {step % 3}
        if step % 100 == 0:  # a loader stutters: all wait for one role
            took = rng.uniform(1, 4.8)
        if step % 1000 == 500:  # nobody waits for anybody
            job.missing, took = {0, 1, 2}, rng.uniform(10, 40)
        if step % 1000 == 0:  # a barrier behind a checkpoint, seen for the first time or again
            job.usual, took = (None if step == 1000 else 40.0), rng.uniform(20, 60)
        if step % 1000 == 700:
            job.saves, took = True, rng.uniform(10, 60)
        job.since = job.now
        if took > 0.5:
            assert not job.pass_(took), f"step {step}"
        else:
            job.now += took
            for role in range(3):
                job._beat(role)
            job.happens(Tick())
        job.step_s = took
    assert not job.records_of("hang") and job.phase == "running"


def test_what_one_role_does_alone_is_taken_for_a_hang_once() -> None:
    """An evaluation of rank 0, say, while the others wait in the next step's exchange."""
    job = Hanging()
    job.train()
    job.missing, job.since = {0}, job.now
    assert job.pass_(9)
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    job.wait(0.5)
    assert job.phase == "running" and job["node0"].epoch == 2
    job.all_step(2)
    job.since = job.now
    assert not job.pass_(60), "it comes to the same again"
    job.step = 2
    job.pass_(1)
    job.since = job.now
    assert not job.pass_(170), "and has taken long before"
    job.step, job.missing = 3, {1}
    job.pass_(1)
    job.since = job.now
    assert job.pass_(9), "which says nothing of others"


@pytest.mark.parametrize(
    ("look", "words"), [(LOADS, "data"), (READS, "storage: it waits for a file, /mnt/data")]
)
def test_who_waits_itself_is_not_replaced_for_it(look: Look, words: str) -> None:
    job = Hanging()
    job.train()
    job.since, job.looks[2] = job.now, look
    assert not job.pass_(detector.WAITING - 2)
    (said,) = job.records_of("stalled")
    assert said.roles == (2,) and f"it waits for {words}" in said.reason, "once"
    assert 5 < job.looked < 30, "it is looked at again, and not all the time"
    assert not orders(job)
    (hang,) = job.pass_(2 * detector.SELDOM)
    assert hang.roles == (2,) and orders(job)[2].end, "nobody waits for ever"


def test_such_waits_are_learned() -> None:
    job = Hanging(hang_limit=400)
    job.train()
    for step, took in enumerate((100, 250, 370), 2):
        job.since, job.looks[2] = job.now, LOADS
        assert not job.pass_(took)
        job.since, answered = job.now, job.answered
        while job.answered == answered:  # that they have gone on is read before a beat says so
            job.pass_(0.5)
        job.step = step
        job.pass_(1)
    del job.looks[2]
    job.since = job.now
    assert job.pass_(9), "of who hangs, that says nothing"
    job = Hanging(hang_limit=400)
    job.train()
    job.since, job.looks[2] = job.now, LOADS
    job.pass_(100)
    job.step = 2
    job.pass_(1)
    job.since, job.looks[2] = job.now, READS
    assert not job.pass_(detector.WAITING - 2)
    assert job.pass_(2 * detector.SELDOM), "nor of who waits for something else"


def test_of_what_is_usual_such_a_wait_says_nothing() -> None:
    """Who hangs in the same operation of a later step is found as fast as before."""
    job = Hanging()
    job.train()
    job.since, job.looks[2] = job.now, LOADS
    assert not job.pass_(40) and job.records_of("stalled")
    waited = job._exchange(job.number, 100 + job.since, 100 + job.now)
    job.history, job.number, job.step, job.step_s = [waited], job.number + 1, 2, job.now - job.since
    job.looks.clear()
    job.pass_(1)
    job.since = job.now
    assert job.pass_(9)


def test_a_compiler_may_take_its_time() -> None:
    job = Hanging(hang_limit=300)
    job.train()
    job.since, job.looks[2] = job.now, COMPILES
    assert not job.pass_(298)
    assert "it waits for a compiler" in job.records_of("stalled")[0].reason
    assert job.pass_(2 * detector.SELDOM)


def test_who_hangs_beside_one_that_waits_is_replaced() -> None:
    job = Hanging()
    job.train()
    job.since, job.missing, job.looks[1] = job.now, {1, 2}, LOADS
    assert not job.pass_(detector.FLOOR - 1)
    (hang,) = job.pass_(4)
    assert hang.roles == (2,) and "role 1" not in hang.reason


def test_who_has_waited_and_hangs_then_is_replaced() -> None:
    """Its loader's process is stopped."""
    job = Hanging()
    job.train()
    job.since, job.looks[2] = job.now, LOADS
    assert not job.pass_(40)
    job.looks[2] = Look(LOADS.main, LOADS.stack, (Seen(2, "pt_data_worker", "stopped"),))
    (hang,) = job.pass_(detector.SELDOM + 3)
    assert hang.roles == (2,)


def test_a_site_that_has_said_how_long_is_taken_at_its_word() -> None:
    job = Hanging(hang_after=30)
    job.train()
    job.since, job.looks[2] = job.now, LOADS
    assert not job.pass_(29)
    assert job.pass_(5) and not job.looked


def test_a_newcomer_that_compiles_has_time() -> None:
    job = recovering()
    job.looks[2] = COMPILES
    assert not job.pass_(500)


def test_who_waits_for_a_device_is_said() -> None:
    job = Hanging()
    job.train()
    job.since, job.states[2] = job.now, "D"
    assert not job.pass_(60) and len(job.records_of("stalled")) == 1


def test_a_wait_that_was_never_seen() -> None:
    job = Hanging(hang_limit=100)
    job.train()
    job.since, job.usual = job.now, None
    assert not job.pass_(98)
    assert job.pass_(15)


def test_a_site_that_knows_better() -> None:
    job = Hanging(hang_after=30)
    job.train()
    job.since, job.usual = job.now, 0.1
    assert not job.pass_(29)
    assert job.pass_(5)


def test_in_start_up_only_who_is_stopped_is_to_blame() -> None:
    job = Hanging()
    assert not job.pass_(2000) and job.done is None
    job.states[2] = "T"
    (hang,) = job.pass_(15)
    assert hang.roles == (2,)


def recovering(started_in: float = 2.0) -> Hanging:
    """Role 2 has another worker, and the others wait for it before their first step."""
    job = Hanging()
    job.pass_(started_in)
    job.train()
    dies(job, 2)
    return job


def dies(job: Hanging, role: int) -> None:
    job[f"node{role}"].say(job[f"node{role}"].crash(role))
    job.all_report()
    job.since = job.now


def test_a_newcomer_that_does_not_come_is_replaced() -> None:
    job = recovering()
    assert not job.pass_(detector.START_FLOOR - 3)
    (hang,) = job.pass_(6)
    assert hang.roles == (2,) and orders(job)[2].end
    dies(job, 2)
    assert not job.pass_(590), "the next one does not come either: it may have more to do than others had"
    assert job.pass_(20)


def test_a_newcomer_that_gets_on_may_take_as_long_as_it_likes() -> None:
    """Its script passes over thousands of steps, and the others wait in the first that is new."""
    job = recovering()
    job.passes = True
    assert not job.pass_(2000)
    job.passes = False
    assert not job.pass_(detector.START_FLOOR - 3)
    (hang,) = job.pass_(6)
    assert hang.roles == (2,), "it has come to a stop on its way"


def test_a_newcomer_may_take_as_long_as_the_job_did() -> None:
    job = recovering(40.0)
    assert not job.pass_(3 * 40 - 3)
    assert job.pass_(12)


def test_a_newcomer_that_reads_and_one_that_is_none_have_time() -> None:
    job = recovering()
    job.saves = True
    assert not job.pass_(590)
    job = recovering()
    job.fetching = {2}
    assert not job.pass_(590), "its agent is at work for it"
    assert job.pass_(20)
    job = recovering()
    job.missing = {1}
    job.restored(1)
    assert not job.pass_(590), "it has its state, and what it does before its first step is not known"
    assert job.pass_(20)
    job = recovering()
    job.missing = {1}
    assert not job.pass_(detector.START_FLOOR - 3)
    assert job.pass_(6), "its state was safe before, and is not safe in this epoch only since it hangs"


def test_who_does_something_else_again_and_again_is_replaced_once() -> None:
    job = Hanging(max_restarts=3)
    job.train()
    job.since, job.missing, job.sizes = job.now, set(), {2: 100}
    (hang,) = job.pass_(9)
    assert hang.roles == (2,) and hang.more == {"explained": True}
    dies(job, 2)
    assert not job.pass_(detector.START_FLOOR - 3)
    (hang,) = job.pass_(6)
    assert hang.more == {"explained": False} and "roles do different things" in hang.reason
    (anew,) = job.records_of("begins_anew")
    assert anew.more["rung"] == "all"


def test_who_does_something_else_in_the_very_first_step() -> None:
    job = Hanging(max_restarts=3)
    job.missing, job.sizes = set(), {2: 100}
    (hang,) = job.pass_(detector.START_FLOOR + 5)
    assert hang.roles == (2,) and hang.more == {"explained": True}


def test_what_cannot_be_explained_ends_the_job_in_the_end() -> None:
    job = Hanging(hang_limit=60)
    job.train()
    job.since, job.missing = job.now, set()
    (said,) = job.pass_(50)
    assert said.more == {"explained": False} and "all have entered" in said.reason and job.done is None
    job.pass_(20)
    assert job.phase == "saving" and not orders(job)
    ended = job.ends()
    assert ended is not None and ended.code == 1
    assert (
        "nothing has moved for --ft-hang-limit, 60 s: all have entered" in job.records_of("stopped")[0].reason
    )


def test_where_all_have_entered_a_link_may_let_nothing_through() -> None:
    """Connections over it break after a quarter of an hour. Where all nodes reach each other nobody is
    replaced, and the step goes on: it may just take long."""
    job = Hanging(spares=1)
    job.train()
    job.since, job.missing = job.now, set()
    assert job.pass_(50) and not job.records_of("link") and job.phase == "running"
    job.apart = {("node0", "node2")}
    job.number += 1
    job.since = job.now
    assert len(job.pass_(50)) == 1
    [link] = job.records_of("link")
    assert link.more["nodes"] == ["node0", "node2"] and job.phase == "quiescing"


def test_nobody_else_could_take_over_from_who_is_behind_such_a_link() -> None:
    job = Hanging()
    job.train()
    job.since, job.missing, job.apart = job.now, set(), {("node0", "node2")}
    job.pass_(50)
    assert "do not reach each other" in job.records_of("waiting")[0].reason and job.phase == "running"
    job.apart = set()
    job.pass_(10)
    [detected] = job.records_of("detected")  # what is on its way is sent again after minutes only
    assert detected.reason.endswith("reach each other (node0 and node2 did not reach each other)")


def test_a_node_that_does_not_answer() -> None:
    """The others' records are enough, if it is not its own that is missing."""
    job = Hanging()
    job.train()
    job.since, job.deaf = job.now, {1}
    (hang,) = job.pass_(detector.FLOOR + 2 * detector.ANSWER + 3)
    assert hang.roles == (2,)
    other = Hanging()
    other.train()
    other.since, other.deaf = other.now, {2}
    (said,) = other.pass_(detector.FLOOR + 2 * detector.ANSWER + 3)
    assert said.more == {"explained": False} and "its node has not answered" in said.reason


def test_after_the_recovery_it_is_another_epoch() -> None:
    job = Hanging()
    job.train()
    job.since = job.now
    assert job.pass_(9)
    job["node2"].say(job["node2"].crash(2))
    assert job.phase == "quiescing"
    effects = job.wait(20)
    assert not sent(effects, m.SendFlight)
