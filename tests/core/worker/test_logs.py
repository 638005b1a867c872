"""What workers print gets to a console once, also when the agent that copied it is gone; it costs no step."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import environment

from ft_core.worker import logs
from ft_core.worker.console import Console
from ft_core.worker.logs import ERR, OUT, Copier, take_over


def test_another_tee_goes_on_where_one_has_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "w").mkdir()
    log = tmp_path / "w" / "stdout.log"
    first, second = Copier(OUT | ERR, Console(tmp_path)), Copier(OUT | ERR, Console(tmp_path, "n2"))
    first.follow(tmp_path / "w")
    log.write_text("a\nb\nhal")
    assert first.copy()
    assert capfd.readouterr().out == "a\nb\n"  # an unfinished line may be gone on with
    with log.open("a") as file:
        file.write("f\nlast")
    second.rest([tmp_path / "w", tmp_path / "not here"])
    assert capfd.readouterr().out == "[n2]: half\n[n2]: last\n"  # nobody goes on with it now
    first.copy()
    first.unfollow(tmp_path / "w")
    second.rest([tmp_path / "w"])
    assert capfd.readouterr().out == ""


def test_a_line_without_an_end_is_shown_as_far_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Once it was found twice: half a line is there for a moment only."""
    log = tmp_path / "stderr.log"
    copier = Copier(ERR, Console(tmp_path))
    copier.follow(tmp_path)

    def shown(more: str) -> str:
        with log.open("a") as file:
            file.write(more)
        copier.copy()
        return capfd.readouterr().err

    assert [shown("\r  0%"), shown("\r 10%"), shown("\r 20%")] == ["", "\r  0%\r 10%", "\r 20%"]
    assert [shown("\r100%\ndone\nhal"), shown("f\n"), shown("")] == ["\r100%\ndone\n", "half\n", ""]
    assert [shown("Password:"), shown(""), shown("")] == ["", "Password:", ""]
    copier.close()
    assert capfd.readouterr().err == "\n", "what others print begins a line"


def test_objects_are_of_whole_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    copier = Copier(OUT, Console(tmp_path, json=True))
    copier.follow(tmp_path)
    (tmp_path / "stdout.log").write_text("\r 10%")
    assert not copier.copy() and not copier.copy() and capfd.readouterr().out == ""
    copier.close()
    assert json.loads(capfd.readouterr().out)["message"] == "\r 10%"


def test_a_log_that_somebody_cuts_is_copied_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """As `logrotate` does with copytruncate: workers go on writing at its end."""
    log = tmp_path / "stdout.log"
    copier = Copier(OUT, Console(tmp_path))
    copier.follow(tmp_path)
    with log.open("a") as worker:
        for lines in ("a\nb\n", "c\n", "d\ne\nf\n"):
            worker.write(lines)
            worker.flush()
            assert copier.copy()
            assert capfd.readouterr().out == lines
            os.truncate(log, 0)
            assert not copier.copy()
    Copier(OUT, Console(tmp_path)).rest([tmp_path])
    assert not capfd.readouterr().out


def test_a_tee_looks_less_often_while_nothing_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    news, waits = iter([False, False, False, True, False]), list[float | None]()

    class Orders(queue.SimpleQueue[object]):
        def get(self, block: bool = True, timeout: float | None = None) -> object:
            waits.append(timeout)
            if timeout is None or len(waits) > 5:
                return super().get()
            raise queue.Empty

    monkeypatch.setattr(logs.queue, "SimpleQueue", Orders)
    monkeypatch.setattr(Copier, "copy", lambda self: next(news, False))

    async def job(streams: int) -> list[float | None]:
        waits.clear()
        tee = logs.Tee(streams, Console(tmp_path), lambda error: None)
        assert await tee.close(20)
        return waits

    assert asyncio.run(job(OUT)) == [0.05, 0.1, 0.2, 0.2, 0.05, 0.1]
    assert asyncio.run(job(0)) == [None]  # of which nothing is shown


def test_what_is_printed_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    copier = Copier(ERR, Console(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        copier.follow(tmp_path / name)
        (tmp_path / name / "stdout.log").write_text("not asked for\n")
        (tmp_path / name / "stderr.log").write_text(f"{name}: 10 %\r20 %")
    copier.close()
    assert capfd.readouterr() == ("", "a: 10 %\r20 %\nb: 10 %\r20 %\n")


def test_more_than_is_copied_at_a_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    lines = "".join(f"{number:07}\n" for number in range(300_000)) + "x" * 3_000_000 + "\nunfinished"
    (tmp_path / "stdout.log").write_text(lines)
    copier = Copier(OUT, Console(tmp_path))
    copier.follow(tmp_path)
    copier.copy()
    # A line of that length is one that nobody finishes in time: it goes out in pieces.
    assert capfd.readouterr().out.replace("\n", "") == lines.replace("\n", "").removesuffix("unfinished")
    copier.unfollow(tmp_path)
    assert capfd.readouterr().out == "unfinished\n"


def test_a_full_disk_keeps_nothing_from_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """How far a file is copied cannot be noted."""
    (tmp_path / "stdout.log").write_text("a\n")
    (tmp_path / "stdout.copied").symlink_to("/dev/full")
    copier = Copier(OUT, Console(tmp_path))
    copier.follow(tmp_path)
    for _ in range(3):
        copier.copy()
    assert capfd.readouterr().out == "a\n"


def test_who_has_played_a_role(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    logs = tmp_path / "logs"
    first, second, third = (logs / node / "worker-0" for node in ("n0-1", "n1-2", "n2-3"))
    for directory in (first, second, third):
        directory.mkdir(parents=True)
        (directory / "stdout.log").write_text(f"{directory.parent.name}\n")
    assert take_over(first, 3, 0) == []
    assert take_over(second, 3, 0) == [first]
    assert (logs / "role-3").resolve() == second
    assert take_over(third, 3, 7) == [], "all scripts have begun anew, and print everything again"
    copier = Copier(OUT, Console(tmp_path))
    copier.follow(third)
    copier.succeed(logs / "role-3.workers")
    copier.succeed(logs / "role-4.workers")
    assert capfd.readouterr().out == "n0-1\nn1-2\n"
    (logs / "role-3.workers").unlink()
    (logs / "role-3.workers").mkdir()
    assert take_over(first, 3, 7) == []
    assert "role-3" in capfd.readouterr().err


FULL = """
import logging, resource, signal, subprocess, sys
from pathlib import Path
from ft_core.worker.console import Console
from ft_core.worker.logs import redirect
redirect(3, Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
log = logging.getLogger()
log.addHandler(logging.StreamHandler())
for number in range(100):
    print("line", number)
    log.error("error %d", number)
    sys.stdout.buffer.write(b"bytes\\n")
    sys.__stdout__.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("there is room again")
print("of errors", file=sys.stderr, end="")
sys.stdout.flush()
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_costs_a_worker_output_and_nothing_else(tmp_path: Path, unbuffered: str):
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "w")], env=variables, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for name, last in (("stdout", "there is room again\n"), ("stderr", "of errors")):
        text = (tmp_path / "w" / f"{name}.log").read_text()
        assert len(text) > 500 and text.endswith(f"bytes of output are missing here\n{last}"), text[-300:]


def test_a_worker_without_a_log_directory_prints_where_its_agent_does(tmp_path: Path):
    (tmp_path / "logs").write_text("not a directory")
    command = [sys.executable, "-c", FULL, str(tmp_path / "logs" / "w")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "ftrun: no log file for a worker's stdout, which is shown here" in done.stderr
    assert done.returncode == 0 and "line 99" in done.stdout and "error 99" in done.stderr


PRINTS = """
import os, sys
from pathlib import Path
for number in range(25000):
    print("step", number, "x" * 40)
    print("error", number, "x" * 40, file=sys.stderr)
Path(sys.argv[1], "done-" + os.environ["RANK"]).touch()
"""


def test_a_job_ends_though_its_disk_is_full_and_nobody_reads_its_console(tmp_path: Path, short_path: Path):
    (tmp_path / "train.py").write_text(PRINTS)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", "--nnodes=2"]
    command += [f"--job-dir={tmp_path / 'job'}", str(tmp_path / "train.py"), str(tmp_path)]
    # More than the memory that an agent and a worker share, which counts as a file.
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)); "
    with subprocess.Popen(
        [sys.executable, "-c", limit + "os.execvp(sys.argv[1], sys.argv[1:])", *command],
        env=environment() | {"TMPDIR": str(short_path)},
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    ) as job:
        os.close(writer)
        try:
            assert job.wait(100) == 0
        finally:
            job.send_signal(signal.SIGTERM)
            os.close(reader)
    assert (tmp_path / "done-0").exists() and (tmp_path / "done-1").exists()
    events = [json.loads(line) for line in (tmp_path / "job" / "events.jsonl").read_text().splitlines()]
    names = [e["event"] for e in events]
    assert names[-2:] == ["goodput", "finished"]  # on a slow machine there is one each minute before
    assert [n for n in names if n != "goodput"] == ["started", "joined", "joined", "decided", "finished"]
    for log in (tmp_path / "job").glob("logs/role-*/*.log"):
        assert log.stat().st_size == 1_000_000


BAR = """
import sys, time
from pathlib import Path
for number in range(3):
    print(f"\\r bar {number}", end="", file=sys.stderr, flush=True)
    while not Path(sys.argv[1], f"go-{number}").exists():
        time.sleep(0.01)
"""


def test_a_progress_bar_moves(tmp_path: Path, short_path: Path):
    (tmp_path / "train.py").write_text(BAR)
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", "--nnodes=1"]
    command += [f"--job-dir={tmp_path / 'job'}", str(tmp_path / "train.py"), str(tmp_path)]
    with subprocess.Popen(
        command, env=environment() | {"TMPDIR": str(short_path)}, stderr=subprocess.PIPE
    ) as job:
        assert job.stderr is not None
        try:
            seen = b""
            for number in range(3):
                while f"\r bar {number}".encode() not in seen:
                    piece = os.read(job.stderr.fileno(), 4096)
                    assert piece, seen
                    seen += piece
                (tmp_path / f"go-{number}").touch()
            assert seen.endswith(b"\r bar 2") and job.wait(60) == 0
            assert job.stderr.read().startswith(b"\n")
        finally:
            job.terminate()
