"""The worker's shell: what its machine wants on real process groups, and what its main thread waits for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core.plans import worker_plan
from core.worker.test_device import Agent, Trained
from waiting import wait_for_value

from ft_core.errors import EpochChanged, FtError
from ft_core.protocol.groups import Series
from ft_core.protocol.messages import (
    Abort,
    AskStartupEntries,
    Configure,
    ConfigureAnswer,
    Counterparts,
    Message,
    OperationCounts,
    PauseAfterStep,
    PausedAtStep,
    PlanBegins,
    Quiesced,
    Refused,
    Restore,
    Restored,
    SendCounts,
    Stepped,
)
from ft_core.state.memory import Word
from ft_core.worker import machine
from ft_core.worker.events import Begins, Registers
from ft_core.worker.states import Training


class Answering(Agent):
    """Keeps what it hears, and answers it as a test says."""

    def __init__(self, job_dir: Path, **plan: Any) -> None:
        self.heard: list[Message] = []
        self.answer: Callable[[Message], list[Message]] = lambda message: []
        super().__init__(job_dir, **plan)

    def hears(self, message: Message) -> None:
        self.heard.append(message)
        for answer in self.answer(message):
            self.channel.send(answer)  # type: ignore[arg-type]

    def of(self, kind: type[Message]) -> list[Message]:
        """What it has heard of that kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def train(self) -> None:
        """The worker is in its first step."""
        self.session.begin(Trained(), 0, lambda: None)
        assert self.shell.machine.state == Training()


def test_records_are_kept_for_a_group_that_is_on_its_way(tmp_path: Path) -> None:
    agent = Answering(tmp_path)
    agent.train()
    startup = agent.shell.comms.startup
    assert not startup._keep
    agent.channel.send(SendCounts())
    wait_for_value(lambda: agent.of(OperationCounts), [OperationCounts(0, {})])
    assert startup._keep, "what was told is there when it is asked for"
    agent.channel.send(PauseAfterStep(1, 7))
    wait_for_value(lambda: agent.shell.machine.hold_at, 7)
    assert startup._keep
    agent.channel.send(PauseAfterStep(0, 0))
    wait_for_value(lambda: startup._keep, False)
    assert agent.shell.machine.hold_at == machine.NEVER


def test_a_standby_counts_once_it_has_the_memory_of_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on it is not ended with the epoch: all would wait for what it still does."""
    detached = {"origin": "memory", "surrogates": Counterparts(((0, "0"),)), "store": ""}
    agent, adapter, done = Answering(tmp_path, **detached), Trained(), []
    handle = agent.shell.handle
    monkeypatch.setattr(agent.shell, "handle", lambda event: (done.append(type(event)), handle(event)))
    monkeypatch.setattr(adapter, "reset", lambda: done.append("reset"))
    agent.session.begin(adapter, 0, lambda: None)
    assert done[:3] == [Begins, "reset", Registers]


def step(agent: Answering) -> None:
    """As a loop does one."""
    agent.shell.control[Word.COMMITTED] = agent.session.version
    agent.session.commit_wait()
    agent.session.optimizer_begins()
    agent.session.step_done()


def test_a_recovery_over_two_epochs(tmp_path: Path) -> None:
    """The second is announced while the worker waits for the plan of the first."""
    agent = Answering(tmp_path)
    agent.train()

    def answer(message: Message) -> list[Message]:
        match message:
            case Quiesced(2):
                return [Abort(3)]
            case Quiesced(3):
                return [PlanBegins(worker_plan(2)), PlanBegins(worker_plan(3)), Restore(3, None, [])]
        return []

    agent.answer = answer
    step(agent)
    agent.channel.send(Abort(2))
    wait_for_value(lambda: agent.shell.machine.announced, 2)
    with pytest.raises(EpochChanged, match="epoch 2 was announced; role 0 leaves its step"):
        agent.session.check_epoch()
    assert agent.session.in_place.interrupted(RuntimeError("a connection broke"))
    assert agent.session.epoch == 1
    agent.session.in_place.recover()
    assert (agent.session.epoch, agent.session.version) == (3, 1)
    assert agent.shell.comms.epoch == 3 and agent.shell.comms.alive
    assert not agent.session.in_place.interrupted(RuntimeError("the script's own"))
    wait_for_value(lambda: agent.of(Restored)[1:], [Restored(3, 0, os.getpid(), 1, False)])
    step(agent)
    wait_for_value(lambda: agent.of(Stepped), [Stepped(1, 0, 1), Stepped(3, 0, 2)])
    assert agent.of(Quiesced) == [Quiesced(2, "training", {}), Quiesced(3, "training", {})]


def test_a_step_ends_though_nobody_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "HOLD_LIMIT", 0.01)
    agent = Answering(tmp_path)
    agent.train()
    agent.channel.send(PauseAfterStep(1, 2))
    wait_for_value(lambda: agent.shell.machine.hold_at, 2)
    step(agent)
    assert agent.shell.machine.hold_at == 2
    step(agent)
    assert agent.shell.machine.state == Training() and agent.shell.machine.hold_at == machine.NEVER
    wait_for_value(lambda: agent.of(PausedAtStep), [PausedAtStep(1, 0, 2)])


def test_who_asks_for_a_record_hears_that_the_epoch_is_over(tmp_path: Path) -> None:
    """Its agent may wait for a node that is stopped."""
    agent = Answering(tmp_path)
    agent.answer = lambda message: [Abort(2)] if isinstance(message, AskStartupEntries) else []
    with pytest.raises(FtError, match="the epoch ended before there was an answer"):
        agent.shell._fetch_startup(1, Series.parse("0-1:1#0"), 0)
    [asked] = agent.of(AskStartupEntries)
    assert isinstance(asked, AskStartupEntries)
    agent.channel.send(Refused(asked.id, "too late"))
    agent.channel.send(SendCounts())
    wait_for_value(lambda: len(agent.of(OperationCounts)), 1)
    assert not agent.shell._replies, "nobody waits for it any more"


def test_settings_that_the_script_brings(tmp_path: Path) -> None:
    agent = Answering(tmp_path)

    def answer(message: Message) -> list[Message]:
        if not isinstance(message, Configure):
            return []
        error = "nobody has heard of nodes" if "nodes" in message.settings else ""
        return [ConfigureAnswer(message.worker, message.id, error)]

    agent.answer = answer
    with pytest.raises(FtError, match="nobody has heard of nodes"):
        agent.session.configure({"nodes": 3, "policy": "stop"})
    assert not agent.session.groups.elastic
    agent.session.configure({"policy": "shrink"})
    assert agent.session.groups.elastic
