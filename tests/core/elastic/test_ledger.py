"""The ledger of samples: what a controller writes down, and what `ftctl data verify` finds in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ft_core.cli import ctl
from ft_core.cli.ledger_check import Report, verify
from ft_core.elastic import ledger
from ft_core.elastic.ledger import Ledger
from ft_core.elastic.rules import Deal, Membership
from ft_core.process.async_writer import FileWriter

TURN, TURNS = 2, 3


def written(path: Path) -> Ledger:
    """A ledger each line of which is in the file when the call that makes it returns."""
    writer = FileWriter(path)

    def write(line: str) -> None:
        writer.write(line)
        assert writer.flush(10)

    return Ledger(write)


class LedgerJob:
    """Writes the ledger of a job of three groups as its controller would, by the rules of `elastic`."""

    def __init__(self, directory: Path, start: int = 0, version: int = 0) -> None:
        self.path = directory / ledger.NAME
        self.ledger = written(self.path)
        self.epoch, self.step = 0, version
        self.membership, self.deal = Membership(3), Deal(TURN, start)
        self.states: dict[int, Any] = {}
        self.begin(None, range(3))

    def begin(self, version: int | None, members: Iterable[int]) -> None:
        """An epoch, from `version`."""
        if version is not None:
            self.membership = self.membership.changed(version, members)
            self.step, self.deal = version, Deal.from_json(self.states[version])
        else:
            self.states[self.step] = self.deal.to_json()
        self.epoch, self.since = self.epoch + 1, version or 0
        self.ledger.epoch(self.epoch, version, self.membership.to_json())

    def train(self, steps: int, write: bool = True) -> dict[str, Any]:
        """Returns the report of the last step."""
        for _ in range(steps):
            self.step += 1
            for _ in range(TURNS):
                self.deal.take(self.step, self.membership)
            samples = self.deal.step_done(self.step, self.membership)
            self.states[self.step] = self.deal.to_json()
            report = {
                "type": "samples",
                "epoch": self.epoch,
                "since": self.since,
                "step": self.step,
                "samples": {str(group): ranges for group, ranges in samples.items()},
                "waiting": self.deal.to_json()["waiting"],
                "next": self.deal.next,
            }
            if write:
                assert self.ledger.step(json.loads(json.dumps(report))) is None
        return report

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True)

    def verify(self) -> Report:
        with self.path.open() as file:
            return verify(file)


@pytest.fixture
def job(tmp_path: Path) -> LedgerJob:
    return LedgerJob(tmp_path)


def changed(line: str, **values: Any) -> str:
    return json.dumps(json.loads(line) | values) + "\n"


def test_a_group_leaves_and_comes_back(job: LedgerJob):
    job.train(5)
    job.begin(4, (0, 2))  # step 5 is void
    job.train(6)
    job.begin(10, (0, 1, 2))
    job.train(10)
    report = job.verify()
    assert report.problems == ()
    assert (report.steps, report.waiting) == (20, 0)
    # Group 1 trained in steps 1 to 4, left, and was dealt samples again from step 13 on.
    assert report.by_group == {0: 20 * 6, 1: (4 + 8) * 6, 2: 20 * 6}
    assert report.samples == job.deal.next


def test_samples_that_wait_are_accounted_for(job: LedgerJob):
    job.train(5)
    job.begin(5, (0, 1))
    job.train(2)
    report = job.verify()
    assert (report.problems, report.waiting) == ((), 2 * 6)
    assert report.samples == job.deal.next - 12


def test_a_job_without_elastic_groups_has_no_ledger(tmp_path: Path):
    written(tmp_path / "ledger.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_ledger_without_steps(job: LedgerJob):
    assert job.verify() == Report(steps=0, samples=0, waiting=0, by_group={}, problems=())


def test_all_roles_report_and_one_line_is_written(job: LedgerJob):
    report = job.train(1)
    assert job.ledger.step(report) is None
    assert job.ledger.step(report | {"samples": {**report["samples"], "7": []}}) is None  # took part without
    assert len(job.lines) == 2


@pytest.mark.parametrize(
    "change",
    [{"samples": {"0": [[0, 4]]}}, {"waiting": [[9, 4, 6]]}, {"next": 19}],
    ids=lambda c: next(iter(c)),
)
def test_roles_that_disagree(job: LedgerJob, change: dict[str, Any]):
    report = job.train(1)
    problem = job.ledger.step(report | change)
    assert problem is not None and problem.startswith(f"roles disagree on step 1: {next(iter(change))} ")
    assert job.verify().problems == ()  # the first stands


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "1"},
        {"epoch": True},
        {"since": None},
        {"step": 0},
        {"step": None},
        {"samples": [[0, 2]]},
        {"samples": {"x": [[0, 2]]}},
        {"samples": {"-1": [[0, 2]]}},
        {"samples": {"0": 2}},
        {"samples": {"0": [[2, 2]]}},
        {"samples": {"0": [[0, 2, 4]]}},
        {"samples": {"0": [[0, 2.0]]}},
        {"waiting": [[1, 2]]},
        {"waiting": [[5, -1, 2]]},
        {"waiting": None},
        {"next": -1},
    ],
    ids=str,
)
def test_reports_of_another_shape_are_refused(job: LedgerJob, change: dict[str, Any]):
    report = job.train(1)
    with pytest.raises(ValueError, match="not "):
        job.ledger.step(report | {"step": 2} | change)
    assert len(job.lines) == 2


@pytest.mark.parametrize(
    "membership",
    [
        {},
        {"groups": 0, "changes": []},
        {"groups": 2, "changes": [1]},
        {"groups": 2, "changes": [[1, "x"]]},
        None,
    ],
)
def test_epochs_of_another_shape_are_refused(job: LedgerJob, membership: Any):
    with pytest.raises(ValueError, match="membership"):
        job.ledger.epoch(2, 0, membership)
    assert len(job.lines) == 1


def test_memory_is_bounded_and_old_reports_may_come_again(job: LedgerJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledger, "KEPT", 4)
    first = job.train(1)
    job.train(10)
    assert len(job.ledger._known) == 4
    assert job.ledger.step(first) is None
    assert len(job.lines) == 1 + 11 + 1
    assert job.verify() == verify(job.lines[:-1])
    assert not job.verify().problems


def test_a_report_that_comes_after_its_epoch(job: LedgerJob):
    job.train(3)
    fourth = job.train(1, write=False)
    fifth = job.train(1, write=False)
    job.begin(4, (0, 1))
    job.train(1)
    for late in (fifth, fourth):
        assert job.ledger.step(late) is None
    report = job.verify()
    assert (report.problems, report.steps) == ((), 5)
    assert report.by_group[2] == 4 * 6  # not of step 5, which group 2 had trained before it left


def test_the_job_starts_over(job: LedgerJob):
    job.train(7)
    job.membership, job.deal, job.step = Membership(3), Deal(TURN), 0
    job.begin(None, range(3))
    job.train(2)
    assert job.verify() == Report(steps=2, samples=36, waiting=0, by_group={0: 12, 1: 12, 2: 12}, problems=())


def test_another_controller_goes_on(job: LedgerJob):
    job.train(2)
    third = job.train(1)
    with job.path.open("a") as file:
        file.write(job.lines[-1][:20])  # killed while it wrote
    job.ledger = written(job.path)
    job.ledger.epoch(job.epoch, None, job.membership.to_json())
    assert job.ledger.step(third) is None
    job.train(2)
    report = job.verify()
    assert (report.problems, report.steps) == ((), 5)
    assert len(job.lines) == 1 + 3 + 2 + 2


def test_a_torn_first_line(tmp_path: Path):
    (tmp_path / ledger.NAME).write_text('{"epo')
    job = LedgerJob(tmp_path)
    job.train(2)
    assert job.verify().problems == ()


def test_a_line_that_is_being_written(job: LedgerJob):
    job.train(3)
    whole = "".join(job.lines)
    for cut in range(len("".join(job.lines[:-1])), len(whole)):
        report = verify(whole[:cut].splitlines(keepends=True))
        assert report.problems == ()
        assert report.steps == (3 if cut == len(whole) - 1 else 2)


def test_a_job_that_goes_on_from_a_checkpoint(tmp_path: Path):
    job = LedgerJob(tmp_path, start=600, version=40)
    job.deal.waiting = [[42, 500, 506], [43, 511, 514]]
    job.train(1)
    assert job.verify().problems == ()
    assert job.verify().waiting == 9
    job.train(9)
    report = job.verify()
    assert (report.problems, report.waiting) == ((), 0)
    assert report.samples == job.deal.next - 600 + 9


def test_an_epoch_whose_line_is_lost_is_known_by_its_steps(job: LedgerJob):
    """The controller's disk was full, and it died: its successor writes its own epoch, and the agents repeat
    the newest steps, which void what was done before."""
    job.train(6)
    job.begin(4, (0, 1))
    job.train(4)
    job.begin(7, (0, 1))
    job.train(2)
    first, *before, second = job.lines[:8]
    repeated, third, rest = job.lines[8:12], job.lines[12], job.lines[13:]
    assert job.verify().problems == () and '"membership"' in second and '"membership"' in third
    report = verify([first, *before, third, *before, *repeated, *rest])
    assert (report.problems, report) == ((), job.verify())
    assert verify([first, *before, third, *rest]).problems != ()


def test_a_version_without_the_steps_after_it(job: LedgerJob):
    job.states[7] = job.states[0]
    job.begin(7, range(3))
    job.train(3)
    assert job.verify().problems == ()
    lines = job.lines
    assert verify([*lines[1:2], *lines[3:]]).problems == (
        "begun from step 7, and step 9 is the first on record",
    )


Edit = Callable[[list[str]], list[str]]


def drop(first: int, end: int) -> Edit:
    return lambda lines: lines[:first] + lines[end:]


def change(at: int, **values: Any) -> Edit:
    return lambda lines: [*lines[:at], changed(lines[at], **values), *lines[at + 1 :]]


def again(at: int, source: int, **values: Any) -> Edit:
    return lambda lines: [*lines[:at], changed(lines[source], **values), *lines[at:]]


def insert(at: int, text: str) -> Edit:
    return lambda lines: [*lines[:at], text, *lines[at:]]


# Lines of this ledger: 0 epoch 1; 1 to 6 steps; 7 epoch 2 from version 5, without group 2; 8 to 13 steps 6 to
# 11. A step trains six samples a group; what was dealt to group 2 in steps 6 and 7 is trained in 9 and 10.
@pytest.mark.parametrize(
    ("edit", "problems"),
    [
        (drop(3, 4), ["step 3: not on record", "samples 36 to 53: never trained, nor waiting"]),
        (drop(2, 4), ["steps 2 to 3: not on record", "samples 18 to 53: never trained, nor waiting"]),
        (change(2, samples={"0": [[17, 36]]}), ["sample 17: trained in step 1 and trained in step 2"]),
        (
            change(2, samples={"0": [[18, 30]], "1": [[24, 36]]}),
            ["samples 24 to 29: trained in step 2 and trained in step 2"],
        ),
        (change(1, samples={"0": [[0, 6], [7, 18]]}), ["sample 6: never trained, nor waiting"]),
        (change(13, next=900), ["samples 162 to 899: never trained, nor waiting"]),
        (change(13, next=160), ["samples 160 to 161: trained in step 11, but never dealt"]),
        (change(13, waiting=[[12, 3, 4]]), ["sample 3: trained in step 1 and waiting after the last step"]),
        (again(9, 9), []),
        (again(9, 7), []),
        (again(9, 8, next=5), ["line 10: step 6 was reported differently before"]),
        (again(9, 7, version=4), ["line 10: epoch 2 began differently before"]),
        (again(9, 7, epoch=0), ["line 10: epoch 0 after epoch 2"]),
        (again(9, 8, epoch=3), ["line 10: step 6 is of epoch 3, which has not begun"]),
        (again(4, 4, step="4"), ["line 5: step '4': not a whole number of 1 or more"]),
        (insert(4, '{"epoch": 1, "st\n'), ['line 5 is not JSON: \'{"epoch": 1, "st\\n\'']),
        (insert(4, "\n"), ["line 5 is not JSON: '\\n'"]),
        (insert(4, "[" * 100_000 + "\n"), [f"line 5 is not JSON: {'[' * 60!r}"]),
        (insert(4, "[1]\n"), ["line 5: not an object"]),
    ],
)
def test_what_is_wrong_is_named(job: LedgerJob, edit: Edit, problems: list[str]):
    job.train(6)
    job.begin(5, (0, 1))
    job.train(6)
    assert job.verify().problems == ()
    assert list(verify(edit(job.lines)).problems) == problems


def test_samples_of_a_group_that_was_away(job: LedgerJob):
    job.train(6)
    job.begin(5, (0, 1))
    report = job.train(1, write=False)
    samples = {**report["samples"], "2": [w[1:] for w in report["waiting"]]}
    assert job.ledger.step(report | {"samples": samples, "waiting": []}) is None
    assert job.verify().problems == ("line 9: groups [2] trained in step 6, to which [0, 1] contribute",)


def test_ctl_says_that_all_is_well(job: LedgerJob, capsys: pytest.CaptureFixture[str]):
    job.train(6)
    job.begin(5, (0, 1))
    job.train(2)
    assert ctl.main(["--job-dir", str(job.path.parent), "data", "verify"]) == 0
    assert capsys.readouterr().out == (
        "7 steps, 114 samples trained, 12 wait to be dealt again\n"
        "group 0: 42 samples\ngroup 1: 42 samples\ngroup 2: 30 samples\n"
        "no sample twice, none left out\n"
    )
    assert ctl.main(["data", "verify", "--job-dir", str(job.path.parent), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "steps": 7,
        "samples": 114,
        "waiting": 12,
        "by_group": {"0": 42, "1": 42, "2": 30},
        "problems": [],
    }


def test_ctl_names_problems(job: LedgerJob, capsys: pytest.CaptureFixture[str]):
    job.train(60)
    job.path.write_text("".join(job.lines[:2] + job.lines[2::2]))
    assert ctl.main(["--job-dir", str(job.path.parent), "data", "verify"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "step 3: not on record" in said
    assert said[-1] == "58 problems in all: --json shows them"  # 29 steps and what they trained
    assert ctl.main(["--job-dir", str(job.path.parent), "data", "verify", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 58


def test_ctl_without_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert ctl.main(["--job-dir", str(tmp_path), "data", "verify"]) == 2
    assert "give --job-dir" in capsys.readouterr().err
    (tmp_path / "job.json").write_text("{}")
    assert ctl.main(["--job-dir", str(tmp_path), "data", "verify"]) == 2
    assert "--ft-policy shrink" in capsys.readouterr().err
