"""What failures cost, as `ftctl plan` reckons: the formulas, the papers' figures, the command."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import astuple, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.economics import OURS, PLAIN, TRAINED, compared, figures
from ft_core.cli.planner import command, economics
from ft_core.cli.planner.economics import HOUR, Failures

PLAN = (
    "--world-size 64 --parameters 1000000000 --global-batch-size 64 --seq-length 4096 --device-tflops 400 "
    "--measured 10 --spares 1"
)


def ftctl(flags: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, ())
    return command.main(parser.parse_args(flags.split()), ())


@pytest.mark.parametrize("figure", list(figures()), ids=lambda f: f"{f.source}: {f.what}")
def test_what_papers_print_comes_out(figure) -> None:
    assert figure.equal, figure


def test_chance_gives_what_is_expected() -> None:
    """Of as many weeks as make an error of a tenth of a point."""
    for row in compared(200, seed=1):
        assert row["errors_apart"] <= 2.5, row
        for cause, expected in row["expected"].items():
            assert abs(row["seen"][cause] - expected) < 0.006, (row["case"], cause)


@pytest.mark.parametrize("job", [OURS, PLAIN])
def test_all_time_goes_to_something(job) -> None:
    for rate in (1e-12, 1e-9, 1e-6):
        shares = economics.shares(replace(TRAINED, of_node=rate), job)
        assert math.isclose(sum(astuple(shares)), 1.0) and min(astuple(shares)) >= 0


def test_without_failures_only_waiting_and_writing_cost_anything() -> None:
    shares = economics.shares(Failures(10, 0.0, HOUR), replace(PLAIN, interval=970.0, wait=0.0))
    assert shares.productive == pytest.approx(0.97) and shares.storage == pytest.approx(0.03)
    assert economics.shares(Failures(10, 0.0, HOUR), OURS).copies == pytest.approx(0.01)


def test_the_best_interval_is_the_best() -> None:
    best = economics.best_interval(TRAINED, PLAIN)
    at = lambda x: economics.shares(TRAINED, replace(PLAIN, interval=x)).productive  # noqa: E731
    assert at(best) >= max(at(0.9 * best), at(1.1 * best))
    assert economics.best_interval(TRAINED, OURS) == pytest.approx(OURS.write, rel=1e-3), "writing is free"


@pytest.mark.parametrize(("spares", "load"), [(0, 0.5), (3, 2.0), (40, 30.0)])
def test_waiting_is_erlangs_loss_formula(spares: int, load: float) -> None:
    terms = [load**k / math.factorial(k) for k in range(spares + 2)]
    assert economics.waiting(load, 1.0, spares) == pytest.approx(terms[-1] / sum(terms))


def test_more_copies_lose_less() -> None:
    odds = [economics.lost_in_memory(TRAINED, 30.0, copies) for copies in range(4)]
    assert odds[0] == 1.0 and all(after < before / 1e3 for before, after in itertools.pairwise(odds))


def test_the_plan_says_what_failures_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl(f"{PLAN} --mtbf-gpu 5000 --start-up-seconds 10 --price-gpu-hour 2") == 0
    text = capsys.readouterr().out
    assert "with a failure every 3.26 days" in text and "of it not productive" in text
    assert ftctl(f"{PLAN} --mtbf-gpu 5000 --start-up-seconds 10 --json") == 0
    worth = json.loads(capsys.readouterr().out)["economics"]
    assert worth["expected"]["productive"] > worth["restarted"]["productive"] > 0.9
    assert worth["one_more"]["spare"] > 0 and worth["spares_for_little_waiting"] >= 1


def test_the_plan_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    assert ftctl(f"{PLAN} --mtbf-gpu 5000 --start-up-seconds 10 --plot {picture}") == 0
    drawn = ElementTree.parse(picture).getroot()
    curves = drawn.findall("{*}polyline")
    assert len(curves) == 2 and "this job: 3.26 days" in "".join(drawn.itertext())
    heights = [[float(pair.split(",")[1]) for pair in c.attrib["points"].split()] for c in curves]
    assert all(ours <= plain for ours, plain in zip(*heights, strict=True)), "further up is better"
    capsys.readouterr()
    assert ftctl(f"{PLAN} --plot {picture}") == 2 and "give --mtbf-gpu" in capsys.readouterr().err


def test_the_plan_asks_for_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl(f"{PLAN} --mtbf-gpu 5000") == 0
    assert "what failures cost: give --recovery-seconds or --start-up-seconds" in capsys.readouterr().out
    assert ftctl(PLAN) == 0 and "what failures cost" not in capsys.readouterr().out
    assert ftctl(f"{PLAN} --mtbf-gpu -1") == 2


def test_figures_of_a_job_that_has_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps, recoveries and failures are taken from its events."""
    about = {"term": 1, "roles": [], "reason": ""}
    spent = {"seconds": {}, "epoch": 1, "version": 0, "reached": 0, "share": 1.0, "step": 0.0, "redone": 0.0}
    spent |= {"waited": 0.0, "open": 0.0, "now": "start_up"}

    def line(at: float, event: str, epoch: int, **more: object) -> str:
        return json.dumps({**about, "time": at, "monotonic": at, "event": event, "epoch": epoch, **more})

    trained = {**spent, "now": "productive", "seconds": {"productive": 7200.0}, "step": 4.0}
    lines = [
        line(0.0, "started", 0, spent=spent),
        line(7200.0, "detected", 2, spent={**trained, "now": "decision"}),
        line(
            7201.0, "decided", 2, version=9, origin="memory", moved={}, spent={**trained, "now": "restoring"}
        ),
        line(7230.0, "resumed", 2, version=10, spent=trained),
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{each}\n" for each in lines))
    flags = PLAN.replace("--device-tflops 400", "")
    assert ftctl(f"{flags} --from-job {tmp_path} --json") == 0
    worth = json.loads(capsys.readouterr().out)["economics"]
    assert worth["missing"] == [] and worth["hours_between_failures"] == pytest.approx(2.0, rel=0.02)
    assert ftctl(f"{flags} --from-job {tmp_path / 'none'}") == 2
    assert "events.jsonl" in capsys.readouterr().err
