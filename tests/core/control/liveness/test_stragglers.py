"""Who is slow is told from who is not, by what roles say of their steps: no processes, and no clock."""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping

import pytest

from ft_core.control.liveness.stragglers import AT_ONCE, LOOKS, MOST, OFTEN, Finding, Over, Stragglers
from ft_core.node.workers.own_time import STEPS
from ft_core.protocol.messages import RoleBeat

HEALTHY = 2_000
NAMED_IN = 30
"""Steps."""
WORK = (1.0, 0.7, 0.7, 1.3)
"""Of a pipeline's stages: the first has the embedding, the last the logits."""

Slow = Callable[[int, int], tuple[float, float]]
"""Role and step -> times its work, and seconds more for its data."""


def well(_role: int, _step: int) -> tuple[float, float]:
    return 1.0, 0.0


class Training:
    """Roles that say what their steps take, as agents measure it: the median of the newest few."""

    def __init__(self, seed: int, seconds: float, groups: int = 2, stages: int = len(WORK)) -> None:
        """`seconds`: of a step."""
        self.rng, self.seconds, self.stages = random.Random(seed), seconds, stages
        self.roles = range(groups * stages)
        self.alike = [tuple(self.roles[stage::stages]) for stage in range(stages)]
        self.places = {role: f"node{role}" for role in self.roles}
        self.seen = {role: deque[tuple[float, float]](maxlen=STEPS) for role in self.roles}
        self.pids = dict.fromkeys(self.roles, 1)
        self.stragglers = Stragglers()
        self.now, self.step = 0.0, 0
        self._crowded: dict[int, int] = {}
        """Role -> the step in which another program on its node ends."""
        self._reads: dict[int, float] = {}

    def _parts(self, role: int, slow: Slow) -> tuple[float, float]:
        rng, work = self.rng, 0.6 * self.seconds * WORK[role % self.stages]
        times, more = slow(role, self.step)
        compute = times * work * max(0.5, rng.gauss(1.0, 0.03))
        data = 0.002 * self.seconds * rng.random() + more
        if rng.random() < 0.02:  # the collector
            compute += 0.2 * rng.random() * self.seconds
        if rng.random() < 0.01:  # the loader
            data += rng.expovariate(1 / self.seconds)
        if rng.random() < 0.002:  # the machine stands still
            compute += 5 * self.seconds
        if rng.random() < 0.0005:  # something else runs there, for a while
            self._crowded[role] = self.step + rng.randint(2, 6)
        if self._crowded.get(role, 0) > self.step:
            compute *= 1.5
        if self.step % 100 == 0:  # an evaluation, and a checkpoint that the first role writes
            compute += self.seconds * (3 if role else 5)
        return compute, data

    def steps(self, count: int, slow: Slow = well) -> list[tuple[int, Finding | Over]]:
        """What is said, and after how many of these steps."""
        said: list[tuple[int, Finding | Over]] = []
        for number in range(1, count + 1):
            self.step += 1
            for role in self.roles:
                self.seen[role].append(self._parts(role, slow))
            self.now += self.seconds
            news = self.stragglers.look(self.alike, self.places, self.heard, self.now)
            said += [(number, each) for each in news]
        return said

    def heard(self, node: str) -> Mapping[int, RoleBeat]:
        return {role: self._beat(role) for role, name in self.places.items() if name == node}

    def _beat(self, role: int) -> RoleBeat:
        about = self.pids[role], self.step, self.step, [], self.step, self.seconds, 0.0, 0, 0
        if len(self.seen[role]) < STEPS:
            return RoleBeat(*about)
        compute, data = (statistics.median(each) for each in zip(*self.seen[role], strict=True))
        return RoleBeat(*about, own_s=compute, data_s=data)


@pytest.mark.parametrize("seconds", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("groups", [2, 1])
def test_nobody_is_named_while_all_are_well(seconds: float, groups: int) -> None:
    for seed in range(5):
        training = Training(seed, seconds, groups)
        assert training.steps(HEALTHY) == [], f"seed {seed}"


@pytest.mark.parametrize("groups", [2, 4, 1])
def test_who_computes_longer_is_named(groups: int) -> None:
    for seed in range(10):
        training = Training(seed, 1.0, groups)
        role = training.rng.choice(training.roles)
        assert training.steps(100) == []

        def slow(each: int, _: int, role: int = role) -> tuple[float, float]:
            return 1.2 if each == role else 1.0, 0.0

        [(after, found)] = training.steps(NAMED_IN, slow)
        assert isinstance(found, Finding) and after <= NAMED_IN
        assert (found.role, found.node, found.part) == (role, f"node{role}", "compute")
        assert 1.15 <= found.score < 1.35 and f"role {role} on node{role} is slow" in found.words
        assert training.steps(200, slow) == [], "once"
        [(_, over)] = training.steps(60)
        assert over == Over(found, "it is as fast as others again") and not training.stragglers.found


@pytest.mark.parametrize("groups", [2, 1])
def test_who_waits_for_its_data_is_named(groups: int) -> None:
    for seed in range(10):
        training = Training(seed, 1.0, groups)
        role = training.rng.choice(training.roles)
        training.steps(100)

        def slow(each: int, _: int, role: int = role) -> tuple[float, float]:
            return 1.0, 0.2 if each == role else 0.0

        [(_, found)] = training.steps(NAMED_IN, slow)
        assert isinstance(found, Finding) and (found.role, found.part) == (role, "data")


def test_what_all_do_for_longer_names_nobody() -> None:
    """Longer sequences, say, where no other pipeline does the same."""
    training = Training(1, 1.0, groups=1)
    training.steps(100)
    assert training.steps(300, lambda _role, _step: (1.5, 0.0)) == []


def test_who_stays_as_fast_as_it_was_is_not_slow_as_others_are_faster() -> None:
    training = Training(1, 1.0, groups=1, stages=2)
    training.steps(100, lambda role, _: (1.5 if role == 0 else 1.0, 0.0))
    assert training.steps(300) == []


def test_of_short_steps_a_little_is_nothing() -> None:
    training = Training(1, 0.02)
    assert training.steps(2_000, lambda role, _: (1.8 if role == 1 else 1.0, 0.0)) == []


def test_nobody_is_named_for_less_than_most_looks() -> None:
    training = Training(1, 1.0)
    training.steps(100)
    for _ in range(20):
        began = training.step
        training.steps(LOOKS, lambda role, step, b=began: (2.0 if role == 2 and step - b < 7 else 1.0, 0.0))
        assert not training.stragglers.found


def test_who_is_moved_or_away_is_slow_no_more() -> None:
    training = Training(1, 1.0)
    slow: Slow = lambda role, _: (1.5 if role == 2 else 1.0, 0.0)  # noqa: E731
    [(_, found)] = training.steps(NAMED_IN, slow)
    training.places[2] = "node9"
    [(_, over)] = training.steps(2)
    assert over == Over(found, "it goes on on node9")
    [(_, found)] = training.steps(NAMED_IN, slow)
    assert isinstance(found, Finding) and found.node == "node9", "it was not the node"
    del training.places[2], training.places[6]
    [(_, over)] = training.steps(2)
    assert over == Over(found, "it is away")


def test_another_worker_is_seen_anew() -> None:
    training = Training(1, 1.0)
    slow: Slow = lambda role, _: (1.5 if role == 2 else 1.0, 0.0)  # noqa: E731
    training.steps(OFTEN + STEPS - 3, slow)
    training.pids[2] = 2
    assert training.steps(OFTEN - 1, slow) == []
    [(_, found)] = training.steps(1, slow)
    assert isinstance(found, Finding) and found.pid == 2


def test_the_slowest_are_shown_and_a_large_job_is_looked_at_in_turns() -> None:
    roles = range(7 * AT_ONCE // 2)
    alike = [roles[: AT_ONCE // 2], roles[AT_ONCE // 2 :]]
    stragglers, places = Stragglers(), dict.fromkeys(roles, "node0")
    beats = {
        role: RoleBeat(1, 5, 5, [], 5, 1.0, 0.0, 0, 0, own_s=2.0 + role / 10 if role < 100 else 1.0)
        for role in roles
    }
    seen = []
    for _ in range(4):
        assert stragglers.look(alike, places, lambda _: beats, 0.1) == []
        seen.append(len(stragglers._roles))
    assert seen == [3 * AT_ONCE // 2, 5 * AT_ONCE // 2, 7 * AT_ONCE // 2, 7 * AT_ONCE // 2]
    assert [found.role for found in stragglers.standing_out] == list(range(99, 99 - MOST, -1))
