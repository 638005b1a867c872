"""`ftctl report`, `top` and `events -f`: what people read of a job, of its directory alone."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core.control.test_controller_machine import ControlPlane
from hypothesis import given
from hypothesis import strategies as st

from ft_core.cli import ctl, events, report_html, top
from ft_core.errors import ConfigError
from ft_core.history import job as history
from ft_core.protocol.goodput import Cause

BEGAN = 1.7e9
HOSTILE = "</title></pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J"


def lines(job: ControlPlane) -> list[str]:
    """As its controller would have written them."""
    found = []
    for at, record in job.recorded_at:
        about = {"event": record.event, "epoch": record.epoch, "term": 1, "monotonic": at, "time": BEGAN + at}
        about |= {"roles": list(record.roles), "reason": record.reason, **record.more}
        found.append(json.dumps(about, default=msgspec.to_builtins) + "\n")
    return found


def recovered() -> ControlPlane:
    """A node was lost after 20 s of training, and a spare has its roles."""
    job = ControlPlane(nodes=2, spares=1)
    job.wait(2.0)
    job.all_step(1)
    job.wait(20.0)
    job["node1"].hangs_up()
    job.wait(1.0)
    job.all_report("node0", "node2")
    job.wait(1.5)
    job.all_step(2)
    job.wait(5.0)
    return job


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_text("".join(lines(recovered())))
    return tmp_path


def test_what_happened(job_dir: Path) -> None:
    found = history.read(job_dir)
    [recovery] = found.recoveries
    assert (recovery.origin, recovery.node, recovery.fault) == ("memory", "node1", "node")
    assert recovery.moved == {"1": "node2"} and recovery.epoch == 2
    # From the connection's end until all had done a step.
    assert recovery.seconds == pytest.approx(2.5, abs=0.1)
    assert sum(recovery.parts.values()) == pytest.approx(recovery.seconds, abs=0.01)
    assert recovery.parts[Cause.RESTORING] == pytest.approx(1.5, abs=0.01)
    assert {"detection", "decision", "restoring"} <= {str(each.cause) for each in found.longest}
    assert found.failures == {"node1": {"node": 1}} and not found.end
    assert found.steps[-1][1] == 2


def test_phases_follow_each_other_and_are_what_goodput_says(job_dir: Path) -> None:
    found = history.read(job_dir)
    at = found.began
    for phase in found.phases:
        assert phase.began == pytest.approx(at, abs=1e-3) and phase.seconds >= 0
        at = phase.began + phase.seconds
    assert at == pytest.approx(found.ended, abs=1e-3)
    for cause in (Cause.START_UP, Cause.DETECTION, Cause.DECISION, Cause.WAITING, Cause.RESTORING):
        summed = sum(phase.seconds for phase in found.phases if phase.cause is cause)
        assert summed == pytest.approx(found.seconds[cause], abs=0.01)


def test_a_report_in_lines(job_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["--job-dir", str(job_dir), "report"]) == 0
    said = capsys.readouterr().out
    for words in ("recoveries: 1", "from memory", "node1", "goodput", "it goes on", "events: decided 2"):
        assert words in said, said


def test_of_a_job_that_has_ended_and_of_none(job_dir: Path, tmp_path: Path) -> None:
    job = recovered()
    job.controller._recovery.end_job(1, "enough\nof it")
    with (job_dir / "events.jsonl").open("a") as file:
        end = {"event": "stopped", "epoch": 2, "term": 1, "roles": [], "reason": "enough\nof it"}
        file.write(json.dumps({**end, "monotonic": 40.0, "time": BEGAN + 40.0}) + "\n")
    found = history.read(job_dir)
    assert found.end == "stopped: enough\nof it" and found.ended == BEGAN + 40.0
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no controller has run there"):
        history.read(tmp_path / "none")
    assert ctl.main(["report"]) == 2


# -- the page ----------------------------------------------------------------------------------------


class Read(HTMLParser):
    """Its elements, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "pre", "div", "b", "span", "br"),
    *("table", "tr", "th", "td", "details", "summary", "svg", "rect", "line", "text", "polyline"),
}


def check_page(page: str) -> Read:
    """Whole, of these elements alone, and without anything that runs or is fetched."""
    found = Read(page)
    assert not found.open and {tag for tag, _ in found.tags} <= TAGS
    names = {name for _, attributes in found.tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "xlink:href")]
    return found


def hostile(text: str) -> list[str]:
    """All that a job may say of itself says this."""
    found = []
    for line in map(json.loads, lines(recovered())):
        line |= {"reason": text} | {name: text for name in ("node", "fault") if name in line}
        if "moved" in line:
            line |= {"moved": {text: text}, "origin": text, "version": text}
        found.append(json.dumps(line) + "\n")
    about = {"epoch": 1, "term": 1, "roles": [], "reason": text, "monotonic": 50.0, "time": BEGAN + 50.0}
    more = [
        {"event": text, **about},
        {"event": "avoided", "node": text, **about},
        {"event": "stopped", **about},
    ]
    return found + [json.dumps(line) + "\n" for line in more]


def test_a_page_says_what_happened(job_dir: Path) -> None:
    file = job_dir / "report.html"
    assert ctl.main(["--job-dir", str(job_dir), "report", "--html", str(file)]) == 0
    link = job_dir / "link.html"  # as /dev/stdout is one
    link.symlink_to(file)
    assert ctl.main(["--job-dir", str(job_dir), "report", "--html", str(link)]) == 0
    assert link.is_symlink() and not file.is_symlink()
    found = check_page(file.read_text())
    for words in ("node1", "What the time went to", "Recoveries", "restoring", "Failures by node"):
        assert words in found.text
    assert sum(tag == "polyline" for tag, _ in found.tags) == 1


def test_nothing_that_a_job_says_is_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_dir = tmp_path / "<script>alert(3)<"
    job_dir.mkdir()
    (job_dir / "events.jsonl").write_text("".join(hostile(HOSTILE)))
    found = check_page(report_html.page(history.read(job_dir)))
    assert found.text.count(HOSTILE) > 10 and "alert(3)" in found.text
    for command in (["report"], ["events", "--all"], ["top", "--once"]):
        assert ctl.main(["--job-dir", str(job_dir), *command]) == 0 or command[0] == "top"
        assert "\x1b" not in capsys.readouterr().out, command


@given(text=st.text(max_size=80))
def test_whatever_a_job_says(text: str) -> None:
    parsed = [json.loads(line) for line in hostile(text)]
    found = history.of("/job", [line for line in parsed if history.whole(line)])
    check_page(report_html.page(found))


WRONG: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    "event",
    "epoch",
    "term",
    "monotonic",
    "time",
    "roles",
    "reason",
    "spent",
    "unfinished",
    "moved",
    "version",
]


@given(damage=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(KEYS), WRONG), max_size=4))
def test_damaged_lines_are_left_out(damage: list[tuple[int, str, Any]]) -> None:
    parsed = [json.loads(line) for line in LINES]
    for at, key, value in damage:
        parsed[at % len(parsed)][key] = value
    good = [line for line in parsed if history.whole(line)]
    if good:
        check_page(report_html.page(history.of("/job", good)))


LINES = lines(recovered())
END = LINES[-1].replace(json.loads(LINES[-1])["event"], "finished", 1)


def test_a_long_job_is_a_page_that_can_be_read(tmp_path: Path) -> None:
    spent = {"seconds": {}, "epoch": 1}

    def line(at: int) -> str:
        about = {"event": "goodput", "epoch": 1, "term": 1, "monotonic": 60.0 * at, "time": BEGAN + 60.0 * at}
        now = "productive" if at % 2 else "restoring"
        return json.dumps({**about, "roles": [], "reason": "", "spent": {**spent, "now": now, "version": at}})

    (tmp_path / "events.jsonl").write_text("\n".join(map(line, range(20_000))) + "\n")
    page = report_html.page(history.read(tmp_path))
    assert len(page) < 1 << 20
    check_page(page)


# -- as it happens -----------------------------------------------------------------------------------


class Clock:
    """In the place of `time`: nobody sleeps, but something happens meanwhile."""

    strftime, localtime = staticmethod(time.strftime), staticmethod(time.localtime)

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = happens

    def sleep(self, _: float) -> None:
        self._happens()


def test_events_are_followed_until_the_job_is_over(
    job_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = iter((LINES[0][:20], "", LINES[0][20:], END[:30], END[30:]))

    def write() -> None:
        with (job_dir / "events.jsonl").open("a") as file:
            file.write(next(pieces))

    monkeypatch.setattr(events, "time", Clock(write))
    assert ctl.main(["--job-dir", str(job_dir), "events", "-f", "--last", "2"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 4 and "finished" in said.out.splitlines()[-1] and not said.err


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The output is a terminal, of 60 columns and 20 lines."""

    def begin() -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("LINES", "20")

    return begin


def test_top_shows_a_job_until_it_is_over(
    job_dir: Path,
    capsys: pytest.CaptureFixture[str],
    screen: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen()
    looks = itertools.count(1)

    def pass_time() -> None:
        if next(looks) == 2:
            with (job_dir / "events.jsonl").open("a") as file:
                file.write(END)

    monkeypatch.setattr(top, "time", Clock(pass_time))
    command = ["--job-dir", str(job_dir), "--controller", "127.0.0.1:1", "top"]
    assert ctl.main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("\x1b[?1049h") and said.count("\x1b[H") == 3
    shown, _, last = said.partition("\x1b[?1049l")
    frames = shown.split("\x1b[H")[1:]
    assert all(len(line.replace("\x1b[K", "").replace("\x1b[J", "")) <= 60 for line in frames[0].splitlines())
    assert all(len(each.splitlines()) < 20 for each in frames)
    assert "goodput" in last and "finished" in last and "\x1b" not in last
    assert "the job is over" not in frames[0] and "the job is over" in last


def test_of_a_small_screen_the_newest_is_there(
    job_dir: Path,
    capsys: pytest.CaptureFixture[str],
    screen: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen()
    monkeypatch.setenv("LINES", "8")
    with (job_dir / "events.jsonl").open("a") as file:
        file.write(END)
    monkeypatch.setattr(top, "time", Clock(lambda: None))
    assert ctl.main(["--job-dir", str(job_dir), "--controller", "127.0.0.1:1", "top"]) == 0
    shown, _, last = capsys.readouterr().out.partition("\x1b[?1049l")
    assert len(shown.split("\x1b[H")[1].splitlines()) < 8 and "finished" in last
