"""Which durable checkpoint a job goes on from: what nodes see of them, and which of them are its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from core.control.test_controller_machine import ControlPlane, restart, tell

from ft_core.control.decide.durable_names import AGAIN, PATIENCE
from ft_core.control.events import End
from ft_core.control.reports import BEING_WRITTEN
from ft_core.control.succession import GRACE
from ft_core.protocol import messages as m

NAME = "step-{:08d}-{:05d}-{}-2"
FORMER = [NAME.format(9000, 3, "former"), NAME.format(9500, 3, "former")]


class Storage:
    """What each node sees of the durable directory, and says as soon as it is asked."""

    def __init__(self, job: ControlPlane, sees: Mapping[str, Sequence[str]], default: Sequence[str]) -> None:
        self.job, self.sees, self.default = job, dict(sees), default
        self.answered: dict[str, int] = {}
        self.asked: dict[str, list[float]] = {}
        """When each was asked."""

    def answer(self) -> None:
        for name, agent in list(self.job.agents.items()):
            asked = [message for message in agent.heard if isinstance(message, m.ListDurable)]
            for question in asked[self.answered.get(name, 0) :]:
                self.answered[name] = self.answered.get(name, 0) + 1
                self.asked.setdefault(name, []).append(self.job.now)
                agent.say(m.DurableNames(question.id, list(self.sees.get(name, self.default))))

    def wait(self, seconds: float) -> None:
        end = self.job.now + seconds
        while self.job.now < end:
            self.answer()
            self.job.wait(0.5)


def start(
    sees: Mapping[str, Sequence[str]], default: Sequence[str] = FORMER, **more: Any
) -> tuple[ControlPlane, Storage]:
    """A job that begins where nodes see that."""
    job = ControlPlane(durable_dir="/d", durable_interval=500, **more)
    return job, Storage(job, sees, default)


def decided(job: ControlPlane) -> dict[str, Any]:
    return dict(job.records_of("decided")[-1].more)


def last_words(job: ControlPlane) -> str:
    """Why the job ends."""
    assert job.done == End(1)
    return job.records_of("stopped")[-1].reason


def lose_memory(job: ControlPlane, role: int = 0) -> None:
    """Nobody holds anything any more, and that role's worker is gone."""
    for agent in job.agents.values():
        agent.versions, agent.replicas = {}, {}
    node = job[job.controller.cluster.places[role]]
    node.say(node.crash(role))
    job.all_report()


def test_a_node_that_sees_no_checkpoint_does_not_make_the_job_begin_at_0() -> None:
    """Nothing is mounted where it looks, and all the others see step 9500."""
    job, storage = start({"node1": []})
    storage.wait(PATIENCE - 2)
    assert not job.records_of("decided") and job.done is None, "it may see them in a moment"
    storage.wait(6)
    assert f"{FORMER[1]} in /d is seen by nodes node0, and not by nodes node1: mount" in last_words(job)
    assert not job.records_of("decided")
    [told] = job.records_of("durable_unused")
    assert told.more["nodes"] == ["node1"]
    times = storage.asked["node1"]
    assert all(later - before >= AGAIN for before, later in itertools.pairwise(times))


def test_a_node_that_sees_them_later_is_used() -> None:
    job, storage = start({"node1": []})
    storage.wait(5)
    storage.sees = {}
    storage.wait(AGAIN + 1)
    assert decided(job)["version"] == 9500 and not job.records_of("durable_unused")


def test_a_spare_begins_in_place_of_a_node_that_sees_no_checkpoint() -> None:
    job, storage = start({"node1": []}, spares=1)
    storage.wait(PATIENCE + 5)
    assert (decided(job)["version"], decided(job)["origin"]) == (9500, "durable")
    assert job.controller.cluster.places == {0: "node0", 1: "node2"}
    assert len(job.records_of("durable_unused")) == 1


def test_where_the_only_spare_sees_none_either_the_job_ends() -> None:
    job, storage = start({"node1": [], "node2": []}, spares=1)
    storage.wait(2 * PATIENCE + 10)
    assert "not by nodes node1, node2" in last_words(job)
    assert not job.records_of("decided")


def test_a_node_that_cannot_look_is_asked_again() -> None:
    """One answer of NFS that is over in a moment had ended the job."""
    job = ControlPlane(durable_dir="/d", durable_interval=500)
    storage = Storage(job, {}, FORMER)
    asked = next(each for each in job["node1"].heard if isinstance(each, m.ListDurable))
    storage.answered["node1"] = 1
    job["node1"].say(m.DurableNames(asked.id, [], "Input/output error"))
    storage.wait(AGAIN + 2)
    assert job.done is None and decided(job)["version"] == 9500


def test_a_node_whose_storage_hangs_is_named() -> None:
    """A decision waited for it, and nobody was told for whom."""
    job, storage = start({}, [])
    storage.answered["node1"] = 1
    storage.wait(PATIENCE - 1)
    assert not job.records_of("waiting")
    storage.wait(10)
    [waiting] = job.records_of("waiting")
    assert "waits for nodes node1 to read /d, which does not answer there" in waiting.reason


def test_where_nobody_sees_any_the_job_begins() -> None:
    job, storage = start({}, [])
    storage.wait(1)
    assert (decided(job)["version"], decided(job)["origin"]) == (None, "initial")
    assert not job.records_of("durable_unused")


def test_where_nodes_see_different_ones_of_one_step_what_all_see_counts() -> None:
    last = NAME.format(9500, 4, "former")
    job, storage = start({"node1": [*FORMER, last]})
    storage.wait(1)
    assert decided(job)["version"] == 9500


def test_after_a_loss_of_memory_roles_leave_a_node_that_sees_no_checkpoint() -> None:
    """Its worker lives, and would have to load what it does not see."""
    job, storage = start({}, spares=1)
    storage.wait(1)
    job.all_step(9501)
    storage.sees = {"node1": []}
    lose_memory(job)
    storage.wait(PATIENCE + 5)
    assert m.KillWorker(role=1) in job["node1"].heard
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    storage.wait(PATIENCE + 5)
    assert (decided(job)["version"], decided(job)["origin"]) == (9500, "durable")
    assert job.controller.cluster.places == {0: "node0", 1: "node2"}


def test_after_a_loss_of_memory_a_job_without_spares_does_not_go_back() -> None:
    job, storage = start({})
    storage.wait(1)
    job.all_step(9501)
    storage.sees = {"node1": []}
    lose_memory(job)
    storage.wait(PATIENCE + 5)
    assert "not by nodes node1" in last_words(job) and len(job.records_of("decided")) == 1


def test_a_node_that_is_lost_says_nothing_any_more_of_what_there_is() -> None:
    """It alone saw the newest; the others begin with what they see."""
    job, storage = start({"node1": FORMER}, FORMER[:1], spares=1)
    storage.wait(5)
    job.now += 1
    del job.agents["node1"]
    storage.wait(PATIENCE + job.settings.silence_limit + 125)
    assert decided(job)["version"] == 9000
    assert job.controller.cluster.places == {0: "node0", 1: "node2"}


def test_checkpoints_of_another_number_of_roles_are_named_once() -> None:
    job = ControlPlane(durable_dir="/d", durable_interval=500)
    for agent in list(job.agents.values()):
        asked = [message for message in agent.heard if isinstance(message, m.ListDurable)]
        agent.say(m.DurableNames(asked[-1].id, [], others=[16]))
    assert decided(job)["origin"] == "initial"
    [told] = job.records_of("durable_unused")
    assert "are of 16 roles, and this job has 2: none of them is used" in told.reason


def own(job: ControlPlane, version: int, epoch: int) -> str:
    """The name of a checkpoint that this job has written."""
    return NAME.format(version, epoch, job.controller.cluster.current_plan.job)


def test_of_two_jobs_in_one_directory_each_goes_on_from_its_own() -> None:
    job, storage = start({}, [])
    storage.wait(1)
    job.all_step(1001)
    storage.default = [own(job, 1000, 1), NAME.format(1000, 5, "other"), NAME.format(1500, 5, "other")]
    lose_memory(job)
    storage.wait(2)
    assert (decided(job)["version"], decided(job)["origin"]) == (1000, "durable")
    assert job.controller.cluster.current_plan.durable == storage.default[0]


def test_a_job_goes_on_from_what_it_began_with_and_from_the_one_before_if_that_is_damaged() -> None:
    job, storage = start({}, [*FORMER, NAME.format(9600, 1, "other")])
    storage.default = FORMER
    storage.wait(1)
    job.all_step(9501)
    storage.default = [*FORMER, NAME.format(9600, 1, "other")]
    lose_memory(job)
    storage.wait(2)
    assert decided(job)["version"] == 9500
    storage.default = [FORMER[0], NAME.format(9600, 1, "other")]
    lose_memory(job)
    storage.wait(2)
    assert decided(job)["version"] == 9000


def goes_back(job: ControlPlane, storage: Storage) -> None:
    """To step 5000, of all that it has written: the newer ones are damaged, and cannot be set aside."""
    storage.wait(1)
    job.all_step(9501)
    storage.default = [own(job, 5000, 1)]
    lose_memory(job)
    storage.wait(2)
    assert decided(job)["version"] == 5000
    job.all_step(5001)
    storage.default = [own(job, 5000, 1), own(job, 9000, 1), own(job, 9500, 1)]


def test_what_a_job_has_gone_back_behind_is_not_gone_on_from() -> None:
    job, storage = start({}, [])
    goes_back(job, storage)
    lose_memory(job)
    storage.wait(2)
    assert decided(job)["version"] == 5000


def test_a_successor_knows_what_the_job_has_gone_back_behind() -> None:
    job, storage = start({}, [])
    goes_back(job, storage)
    job.all_step(5501)
    restart(job, "node0", "node1")
    job.wait(0.1)
    tell(job)
    job.wait(GRACE + 0.5)
    storage.default = [own(job, 5500, 2), *storage.default]
    lose_memory(job)
    storage.wait(2)
    assert len(job.records_of("controller_restarted")) == 1 and decided(job)["version"] == 5500


def test_what_is_tainted_is_not_gone_on_from_by_a_job_that_begins_anew_from_storage() -> None:
    """With `--ft-verify`; nor later, once the job has gone back to before it."""
    job, storage = start({}, [], max_restarts=3)
    storage.wait(1)
    job.all_step(9501)
    storage.default = [own(job, 8500, 1), own(job, 9000, 1), own(job, 9500, 1)]
    job.controller.cluster.versions.taint(9000)
    lose_memory(job)
    storage.wait(2)
    assert decided(job)["version"] == 8500
    job.all_step(8501)
    lose_memory(job)
    storage.wait(2)
    assert decided(job)["version"] == 8500


def test_scripts_that_began_anew_beside_a_checkpoint_do_not_come_back_to_it() -> None:
    job, storage = start({}, [], max_restarts=3)
    job.resumes = True
    storage.wait(1)
    job.all_step(9501)
    lose_memory(job)
    storage.wait(2)
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    assert job.records_of("starting_over") and decided(job)["origin"] == "initial"
    epoch = job.controller.cluster.epoch
    assert job.controller.cluster.past.own([own(job, 9000, 1), own(job, 500, epoch)]) == [
        own(job, 500, epoch)
    ]


def test_a_job_that_is_started_again_finds_the_newest_of_what_its_predecessor_went_on_with() -> None:
    """The epochs' numbers say what was given up: a later one has written an older version."""
    gone_back = NAME.format(5500, 9, "former")
    job, storage = start({}, [*FORMER, gone_back, NAME.format(5000, 2, "former")])
    storage.wait(1)
    assert decided(job)["version"] == 5500
    assert job.controller.cluster.script.begun_from == gone_back


def test_what_others_or_a_past_that_was_left_have_does_not_count_as_saved() -> None:
    job, storage = start({}, [])
    goes_back(job, storage)
    job.all_step(5002)
    storage.default = [*storage.default, NAME.format(6000, 1, "other")]
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.REFUSED, "step": 5002}
    job["node1"].say(m.WorkerLost(role=1, pid=job["node1"].workers.pop(1), **about))
    assert job.phase == "saving"
    job.all_report()
    storage.answer()
    told = [each for each in job["node0"].heard if isinstance(each, m.SaveVersion)]
    assert [each.version for each in told] == [5002] and not job.records_of("saved")


def test_a_whole_checkpoint_is_one_event() -> None:
    """Parts of two epochs do not make one, and what is never whole is forgotten."""
    job = ControlPlane()
    job.all_step(400)

    def write(role: int, epoch: int, version: int) -> int:
        job[f"node{role}"].say(m.DurableWritten(role, epoch, version, 0.1))
        return len(job.records_of("durable"))

    assert [write(0, 1, 500), write(1, 2, 500), write(1, 2, 500)] == [0, 0, 0]
    assert [write(0, 2, 500), write(1, 1, 500)] == [1, 1]
    assert job.records_of("durable")[0].more == {"version": 500}
    for version in range(1000, 1000 + 500 * (BEING_WRITTEN + 1), 500):
        write(0, 2, version)
    assert [write(1, 2, 1000), write(1, 2, 1500)] == [1, 2]
