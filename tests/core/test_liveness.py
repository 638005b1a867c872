"""Who is silent is not dead at once: pauses of the controller and of nodes, and of nodes given up."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from core.fleet import Fleet
from core.test_protocol import play

from ft_core.awake import AwakeClock
from ft_core.settings import Command, Settings

SHORT = {"heartbeat": 0.1, "heartbeats_missed": 5}
"""A limit of silence of half a second."""


def lost(fleet: Fleet) -> list[str]:
    """What the controller has said of nodes that it holds for lost."""
    events = [e for e in fleet.events() if e["event"] == "spare_lost" or " lost: " in e["reason"]]
    return [e["reason"] for e in events]


def test_the_clock_counts_no_more_than_its_bound_between_two_ticks():
    times = iter([100.0, 100.05, 100.1, 163.0, 163.04, 200.0])
    clock = AwakeClock(0.1, lambda: next(times))
    assert [round(clock.tick(), 3) for _ in range(5)] == [0.05, 0.1, 0.2, 0.24, 0.34]
    assert clock.now == pytest.approx(0.34)


def test_a_pause_of_seconds_is_within_the_limit_of_silence():
    settings = Settings(2, 1, Command("train.py"))
    assert settings.silence_limit == 10
    assert Settings(2, 1, Command("train.py"), heartbeat=1.5).silence_limit == 30


def test_a_controller_that_was_stopped_holds_nobody_for_lost(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.stop_controller()
        await fleet.start_controller(process=True)
        await fleet.event("resumed")
        assert fleet._process is not None
        fleet._process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 1.5
        await fleet.until(lambda: time.monotonic() > end)
        fleet._process.send_signal(signal.SIGCONT)
        fleet["node0"].crash(0)
        assert (await fleet.event("decided", 2))["moved"] == {"0": "node0"}
        assert not lost(fleet)

    play(test, tmp_path / "job", nodes=8, **SHORT)


def test_a_controller_that_was_held_up_holds_nobody_for_lost(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        time.sleep(1)  # in the controller's own loop; the beats that ought to come wait as well
        fleet["node0"].crash(0)
        assert (await fleet.event("decided", 2))["moved"] == {"0": "node0"}
        assert not lost(fleet)

    play(test, tmp_path / "job", nodes=8, **SHORT)


def test_nodes_that_pause_for_less_than_the_limit_are_not_lost_and_one_that_is_silent_is(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        for name in ("node0", "node1", "node2"):
            fleet[name].pause()
        end = time.monotonic() + 0.8  # as 4 s to the default
        await fleet.until(lambda: time.monotonic() > end)
        for name in ("node0", "node1"):
            fleet[name].go_on()
        await fleet.event("detected")
        assert lost(fleet) == ["node node2 lost: no heartbeat for 2.0 s"]
        await fleet.event("resumed", 2)
        assert len(fleet.events("detected")) == 1

    play(test, tmp_path / "job", nodes=3, spares=1)
