"""What is written down or said costs no process its time, and nothing that must not be lost is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from core.fleet import Fleet
from full_disk import file_limit
from harness import environment
from waiting import wait_for_value

from ft_core.process import last_line, refusals
from ft_core.process.async_writer import AsyncWriter, Console, FileWriter
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.messages import FROM_CONTROLLER


def test_a_full_disk_loses_no_line_and_tears_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "lines"
    lines = [f"line {number}\n" for number in range(100)]
    writer = FileWriter(path)
    with file_limit(333):
        for line in lines:
            writer.write(line)
        # What there is room for is written.
        wait_for_value(lambda: path.exists() and path.stat().st_size, 333)
        assert not writer.flush(0.2)
        assert path.stat().st_size == 333
    assert writer.flush(60)
    assert path.read_text() == "".join(lines)


def test_the_directory_comes_later(tmp_path: Path):
    writer = FileWriter(tmp_path / "gone" / "lines")
    writer.write("a\n")
    assert not writer.flush(0.2)
    (tmp_path / "gone").mkdir()
    assert writer.flush(60)
    assert (tmp_path / "gone" / "lines").read_text() == "a\n"


def test_a_line_that_a_killed_writer_left_unfinished_goes(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_text("whole\nto")
    writer = FileWriter(path)
    writer.write("next\n")
    assert writer.flush(60)
    assert path.read_text() == "whole\nnext\n"


def fill(pipe: int) -> int:
    """Until not a byte more goes in. Returns how many there are."""
    os.set_blocking(pipe, False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            count += os.write(pipe, bytes(4096))
    os.set_blocking(pipe, True)
    return count


def test_an_unread_console_keeps_nobody_waiting():
    reader, pipe = os.pipe()
    before = fill(pipe)
    writer = AsyncWriter("test", pipe, limit=100_000)
    for number in range(40):
        writer.write(f"{number:04000}\n")
    assert not writer.flush(0.1)
    found = bytearray()
    while len(found) < before + 70_000:
        found += os.read(reader, 10_000)
    del found[:before]
    writer.write("after\n")
    while not found.endswith(b"after\n"):
        found += os.read(reader, 10_000)
    *kept, lost, _ = found.decode().splitlines()
    assert [int(line) for line in kept] == list(range(24)), "the first of them"
    assert lost == f"ftrun: {40 - len(kept)} messages are missing here: nobody took them"
    writer.close()
    os.close(reader)
    os.close(pipe)


def test_a_job_goes_on_while_the_controllers_disk_is_full_and_its_console_unread(tmp_path: Path):
    """Its log is in a directory that is not there for a while; of its stderr nobody reads a byte."""

    async def test() -> None:
        async with Fleet(tmp_path / "job") as fleet:
            await fleet.event("resumed")
            await fleet.stop_controller()
            reader, writer = os.pipe()
            fill(writer)
            (tmp_path / "job" / "events.jsonl").rename(tmp_path / "job" / "before")
            os.symlink("/dev/full", tmp_path / "job" / "events.jsonl")
            command = [sys.executable, "-m", "ft_core.control", "--job-dir", str(tmp_path / "job")]
            fleet._process = await asyncio.create_subprocess_exec(*command, stderr=writer)
            os.close(writer)
            node = fleet["node0"]
            await fleet.until(lambda: node.connections == 2)
            for epoch in (2, 3):
                node.crash(0)
                await fleet.until(
                    lambda e=epoch: node.plan.epoch == e and node.memory.steps[node.worker(0).number]
                )
            os.unlink(tmp_path / "job" / "events.jsonl")
            node.finish(0)
            fleet["node1"].finish(1)
            assert await fleet.ended() == 0
            os.close(reader)

    asyncio.run(test())


@pytest.mark.parametrize("place", ["logs/n-1/agent.log", "a file/agent.log", "/dev/full"])
def test_what_is_said_is_in_a_file_too_if_that_can_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str
):
    (tmp_path / "a file").touch()
    said = Console()
    said.keep(tmp_path / place)
    assert not (tmp_path / "logs").exists(), "nothing was said"
    for number in range(3):
        said.write(f"line {number}\n")
    assert said.flush(30)
    assert capfd.readouterr().err == "line 0\nline 1\nline 2\n"
    if place.startswith("logs"):
        wait_for_value(lambda: (tmp_path / place).exists() and (tmp_path / place).read_text().count("\n"), 3)
    said.close()


def test_refused_connections_are_told_by_number_when_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def test() -> None:
        async with Fleet(tmp_path / "job") as fleet:
            await fleet.event("resumed")
            for _ in range(refusals.TOLD + 25):
                with contextlib.suppress(Exception):
                    await AsyncChannel.connect(
                        fleet.settings.controller, b"another job's secret", FROM_CONTROLLER
                    )
            refused = fleet.events("refused")
            assert len(refused) == refusals.TOLD
            monkeypatch.setattr(refusals, "PERIOD", 0.0)
            last = await fleet.event("refused", refusals.TOLD + 1)
            assert last["reason"].startswith("25 more connections within 0 s; the last: 127.0.0.1:")
            assert "does not know this job's secret" in last["reason"]

    asyncio.run(test())


def test_what_a_process_says_begins_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Behind a progress bar, which another process has left without an end, too."""
    descriptor = last_line.make()
    last_line.share(descriptor)
    script = "from ft_core.process import last_line as line; line.share({}); line.leave_open()"
    other = [sys.executable, "-c", script.format(descriptor)]
    subprocess.run(other, pass_fds=[descriptor], check=True, env=environment())
    console = Console()
    try:
        console.write("a\n")
        console.write("b\n")
        assert console.flush(20) and capfd.readouterr().err == "\na\nb\n"
    finally:
        console.close()
