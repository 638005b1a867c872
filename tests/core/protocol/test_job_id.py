"""Two jobs with the same address and the same secret have nothing to do with each other."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from core.fleet import Fleet, play
from core.real_agent import RealAgent
from msgspec.structs import replace

from ft_core.cli.ask import DeniedError, line
from ft_core.cli.flags import parser, settings_of
from ft_core.control.events import Send
from ft_core.errors import ConfigError
from ft_core.node import events as e
from ft_core.protocol import messages as m
from ft_core.settings import Command, job_id, read_id


def become_another_job(fleet: Fleet) -> str:
    """As in a new directory, at the same address. Returns the former id."""
    former = read_id(fleet.job_dir)
    (fleet.job_dir / "id").unlink()
    (fleet.job_dir / "events.jsonl").unlink()
    return former


def test_what_is_left_of_a_former_job_takes_no_part_in_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And goes on with its own, should that have a controller again."""

    async def test(fleet: Fleet) -> None:
        left = RealAgent(fleet.settings, fleet.job_dir, "left", 0)
        left.serve()
        await fleet.event("resumed")
        assert left._uplink._job == read_id(fleet.job_dir), "it was told when it was let in"
        await fleet.stop_controller()
        former = become_another_job(fleet)
        await fleet.start_controller()
        refused = await fleet.event("refused")
        assert f"node left (process {left.machine.about.pid}) is of job {former}" in refused["reason"]
        await fleet.until(lambda: "with --rdzv-id " + former in caplog.text)
        assert fleet.controller is not None and fleet.controller.machine.phase.name == "forming"
        assert not fleet.cluster.nodes
        await fleet.stop_controller()
        (fleet.job_dir / "id").write_text(former)
        await fleet.start_controller()
        await fleet.event("controller_restarted")
        assert left._uplink._job == former
        await left.end()

    play(test, tmp_path / "job", nodes=1, ranks=[])


def test_an_agent_that_was_never_let_in_takes_the_job_that_is_there(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "secret").write_bytes(fleet.secret)
        agent = RealAgent(fleet.settings, elsewhere, "node0", 0)
        agent.serve()
        assert agent._uplink._job == ""
        await fleet.event("resumed")
        assert agent._uplink._job == read_id(fleet.job_dir) != ""
        await agent.end()

    play(test, tmp_path / "job", nodes=1, ranks=[])


def test_an_agent_obeys_no_controller_of_another_job(tmp_path: Path) -> None:
    """One that lets it in all the same."""

    async def test(fleet: Fleet) -> None:
        agent, said = RealAgent(fleet.settings, fleet.job_dir, "node0", 0), list[e.Event]()
        assert fleet.controller is not None
        handle = agent._handle
        happens = fleet.controller.machine.handle

        def lets_in(event: Any, *about: Any) -> Any:
            done = happens(event, *about)
            leads = (
                each for each in done if isinstance(each, Send) and isinstance(each.message, m.LeaderHello)
            )
            others = {id(each): Send(each.peer, replace(each.message, job="other")) for each in leads}
            return [others.get(id(each), each) for each in done]

        fleet.controller.machine.handle = lets_in  # type: ignore[method-assign]
        agent._handle = lambda event: (said.append(event), handle(event))  # type: ignore[assignment,method-assign]
        agent.serve()
        await fleet.until(lambda: any(isinstance(each, e.NotConnected) and each.other_job for each in said))
        assert not any(isinstance(each, e.FromController) for each in said)
        await agent.end()

    play(test, tmp_path / "job", nodes=1, ranks=[])


def test_a_spare_with_another_command_line_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Though it has the job's secret and its id, from the directory of the job."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        other = dataclasses.replace(fleet.settings, command=Command("train.py", ["--lr", "2"]))
        agent = RealAgent(other, fleet.job_dir, "spare", -1)
        agent.serve()
        async with asyncio.timeout(60):
            assert await agent._done == 2
        assert "node spare leaves" in caplog.text and "'train.py --lr 2' here" in caplog.text
        [refused] = fleet.events("refused")
        assert "node spare" in refused["reason"] and len(fleet.events("joined")) == 1
        await agent.end()

    play(test, tmp_path / "job", nodes=1)


def test_ctl_asks_the_job_of_its_directory(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        def status(directory: Path) -> str:
            with line(directory) as found:
                return found.status().phase

        await fleet.event("started")
        assert await asyncio.to_thread(status, fleet.job_dir) == "forming"
        other = tmp_path / "other"
        other.mkdir()
        fleet.settings.write(other)
        (other / "secret").write_bytes(fleet.secret)
        assert await asyncio.to_thread(status, other) == "forming", "it does not know"
        (other / "id").write_text("another")
        with pytest.raises(DeniedError, match=f"is of job {read_id(fleet.job_dir)}, and not of another"):
            await asyncio.to_thread(status, other)

    play(test, tmp_path / "job", nodes=1, ranks=[])


def test_a_jobs_id_is_drawn_once_or_given(tmp_path: Path) -> None:
    drawn = job_id(tmp_path, "")
    assert len(drawn) == 16 and job_id(tmp_path, "") == drawn == read_id(tmp_path)
    assert job_id(tmp_path, "given") == read_id(tmp_path) == job_id(tmp_path, "") == "given"
    with pytest.raises(ConfigError, match="nowhere/id, the job's id, cannot be kept"):
        job_id(tmp_path / "nowhere", "")


@pytest.mark.parametrize(
    ("given", "found"), [("", ""), ("run-7.b", "run-7.b"), ("a b", "c8687a08aa5d6ed2"), ("x" * 65, None)]
)
def test_the_id_of_torchrun_is_the_jobs(given: str, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    args = ["--standalone", "--rdzv-id", given, str(tmp_path / "train.py")]
    run_id = settings_of(parser().parse_args(args)).run_id
    assert len(run_id) == 16 if found is None else run_id == found
