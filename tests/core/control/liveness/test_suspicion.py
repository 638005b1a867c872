"""Silence is evidence, not a verdict: what is taken for the loss of a node, by the rules alone."""

from __future__ import annotations

import math

import pytest

from ft_core.control.liveness.suspicion import (
    ASK,
    ASK_AGAIN,
    PATIENCE,
    RETURN_GRACE,
    NodeLiveness,
    Rhythm,
    Steps,
    chosen,
)

BOUND = 10.0


def regular(beats: int = 20, every: float = 0.5) -> NodeLiveness:
    """A node that was heard at 0.5, 1.0 and so on."""
    sight = NodeLiveness(0.0)
    for number in range(1, beats + 1):
        sight.hear(number * every)
        sight.rhythm.beat(number * every)
    return sight


def lost(
    sight: NodeLiveness, now: float, lived: float = -math.inf, doubted: bool = False, *witnesses: str
) -> str:
    return sight.lost(now, lived, BOUND, doubted, witnesses or ("b", "c"))


def test_the_limit_is_the_bound_until_the_rhythm_is_known_and_then_half_of_it() -> None:
    rhythm = Rhythm()
    for number in range(9):
        rhythm.beat(number * 0.5)
        assert rhythm.limit(BOUND) == BOUND
    rhythm.beat(4.5)
    assert rhythm.limit(BOUND) == BOUND / 2


def test_who_is_heard_irregularly_is_waited_for_longer_but_no_longer_than_the_bound() -> None:
    rhythm, now, found = Rhythm(), 0.0, []
    for number in range(60):
        now += 0.5 if number % 4 else 0.5 + number / 15
        rhythm.beat(now)
        found.append(rhythm.limit(BOUND))
    assert found[-1] == BOUND and 5 < found[30] < 10
    for _ in range(200):  # and once it is regular again, as the others
        now += 0.5
        rhythm.beat(now)
    assert rhythm.limit(BOUND) == BOUND / 2


def test_a_connection_that_ended_has_its_grace_and_none_if_somebody_else_saw_it() -> None:
    sight = regular()
    sight.gone_since = 10.0
    assert not lost(sight, 9.99 + RETURN_GRACE)
    assert lost(sight, 10.01 + RETURN_GRACE) == "its agent's connection broke"
    assert lost(sight, 10.0, doubted=True) == "its agent's connection broke"


def test_whose_process_is_found_to_have_ended_once_its_connection_has_is_lost_at_once() -> None:
    sight = regular()
    sight.answered("b", "refused", 7)
    sight.breaks(10.0, asked_next=9)
    sight.answered("c", "refused", 8)
    assert not lost(sight, 10.0), "that was before, and is said only now"
    sight.answered("b", "silent", 9)
    sight.answered("c", "reached", 9)
    assert not lost(sight, 9.99 + RETURN_GRACE)
    sight.answered("b", "refused", 10)
    gone = "its agent's connection broke, and nothing listens at its address any more (seen from b)"
    assert lost(sight, 10.0) == gone
    assert not regular().ended


def test_of_one_whose_connection_ended_others_are_asked_at_once_and_soon_again() -> None:
    sight = regular()
    assert not sight.doubtful(10.0, BOUND)
    sight.breaks(10.0, asked_next=1)
    assert sight.doubtful(10.0, BOUND)
    sight.asked = 10.0
    assert not sight.doubtful(9.99 + ASK_AGAIN, BOUND) and sight.doubtful(10.01 + ASK_AGAIN, BOUND)


def test_one_that_has_said_that_it_leaves_is_not_lost_for_that() -> None:
    sight = regular()
    sight.leaves = True
    sight.breaks(10.0, asked_next=1)
    sight.answered("b", "refused", 1)
    assert not sight.doubtful(10.0, BOUND) and not lost(sight, 11.0, doubted=True)


def test_silence_without_a_witness_lasts_as_long_as_the_bound() -> None:
    sight = regular()
    assert not lost(sight, 10.0 + BOUND)
    assert lost(sight, 10.1 + BOUND) == "no heartbeat for 10.0 s"


def test_silence_that_others_confirm_is_out_of_its_rhythm_sooner() -> None:
    sight = regular()
    sight.answers = {"b": "silent", "c": "refused"}
    assert not lost(sight, 15.0)
    assert lost(sight, 15.1) == "no heartbeat for 5.0 s, and b, c cannot reach it either"
    assert not lost(sight, 15.1, -math.inf, False, "d"), "what those say who are silent themselves is no word"


def test_one_that_reaches_it_speaks_for_it_for_a_while() -> None:
    sight = regular()
    sight.answers = {"b": "silent", "c": "reached"}
    assert not lost(sight, 10 + PATIENCE * BOUND)
    assert lost(sight, 10.1 + PATIENCE * BOUND) == "no heartbeat for 30.0 s, though c can reach it"
    sight.hear(20.0)
    assert not sight.answers, "it speaks for itself"


def test_steps_that_all_roles_finish_speak_for_its_workers() -> None:
    sight, steps = regular(), Steps()
    for version in range(1, 60):
        steps.done(version, 10.0 + version)
        steps.done(version, 10.5 + version)  # nothing new
    assert steps.lived == 68.0, "until the step before: who finishes one was in it with all others"
    assert not lost(sight, 78.0, steps.lived)
    assert lost(sight, 78.1, steps.lived)


@pytest.mark.parametrize("heard, asked", [(12.4, False), (12.6, True)])
def test_others_are_asked_once_half_of_the_limit_is_over(heard: float, asked: bool) -> None:
    sight = regular()
    assert sight.doubtful(heard, BOUND) is asked
    sight.asked = heard
    assert not sight.doubtful(heard + ASK / 2, BOUND)


def test_not_all_ask_the_same() -> None:
    nodes = [f"n{number}" for number in range(6)]
    anybody = lambda name: True  # noqa: E731
    assert chosen("n1", nodes, anybody) == ["n2", "n3", "n4"]
    assert chosen("n4", nodes, anybody) == ["n5", "n0", "n1"]
    assert chosen("n1", nodes, lambda name: name not in ("n2", "n4")) == ["n3", "n5", "n0"]
    assert chosen("n0", ["n0", "n1"], anybody) == ["n1"]
    assert chosen("gone", nodes, anybody) == ["n0", "n1", "n2"]
    assert chosen("n0", ["n0"], anybody) == chosen("n0", [], anybody) == []


def beside(sight: NodeLiveness, until: float, stalled_since: float) -> None:
    """The process beside its agent beats on, and says since when that has done nothing."""
    now = sight.heard
    while now < until:
        now += 0.5
        sight.pulse(now, sight.pulses + 1, max(0.0, now - stalled_since))


def test_an_agent_that_is_held_up_on_a_machine_that_lives_has_the_whole_limit() -> None:
    sight = regular()
    beside(sight, 30.0, stalled_since=20.0)
    assert sight.heard == 20.0
    sight.answers = {"b": "silent"}
    assert not lost(sight, 30.0)
    beside(sight, 30.5, stalled_since=20.0)
    assert lost(sight, 30.5) == "its agent has done nothing for 10.0 s, and b cannot reach it either"


def test_a_machine_that_is_silent_is_judged_by_the_rhythm_of_what_is_beside_its_agent() -> None:
    sight = regular()
    beside(sight, 30.0, stalled_since=40.0)
    sight.answers = {"b": "silent"}
    assert not lost(sight, 35.0)
    assert lost(sight, 35.1) == "no heartbeat for 5.0 s, and b cannot reach it either"


def test_where_no_pulse_comes_through_the_agents_heartbeats_are_its_rhythm() -> None:
    """They come every two seconds while nothing changes, of a limit of ten."""
    sight, now = NodeLiveness(0.0), 0.0
    for number in range(1, 40):
        before, now = now, now + (2.0 if number % 3 else 0.5)
        assert sight.lively(now - 1e-6, BOUND) and not lost(sight, now - 1e-6), before
        sight.hear(now)
        sight.beat(now)
    sight.answers = {"b": "silent"}
    assert not lost(sight, now + BOUND / 2)
    assert lost(sight, now + BOUND + 0.1)
