"""`ftctl plan` without any framework: plain data parallelism, a live role, the papers' odds."""

from __future__ import annotations

import argparse
import json
import math
from itertools import combinations

import pytest

from ft_core.cli.planner import command
from ft_core.cli.planner.razor import summarise
from ft_core.cli.planner.survival import loss_bound, recovery_probability, ring_survival
from ft_core.state.manifest import layout
from ft_core.state.placement import Places

FLAGS = "--parameters 1000000 --nproc-per-node 1"


def ftctl(flags: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, ())
    return command.main(parser.parse_args(flags.split()), ())


@pytest.mark.parametrize(
    ("flags", "per_parameter"), [("", 12), ("--bf16", 14), ("--fp16 --optimizer sgd", 10)]
)
def test_plain_data_parallelism(flags: str, per_parameter: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every role has all, so nothing is sent where there are as many nodes as it takes."""
    assert ftctl(f"{FLAGS} --world-size 4 --json {flags}") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["state_bytes_per_rank"] == per_parameter * 1_000_000
    assert (figures["unique_bytes_per_rank"], figures["sent_bytes_per_rank_and_step"]) == (0, 0)
    assert (figures["survives"], figures["segments_by_domains"]) == (3, {"4": 1})


def test_one_role_is_unique(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = "--global-batch-size 8 --seq-length 100 --device-tflops 1 --network-gbps 8"
    assert ftctl(f"{FLAGS} --world-size 1 --spares 1 --json {tokens}") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["unique_bytes_per_rank"] == figures["sent_bytes_per_rank_and_step"] == 12_000_000
    assert figures["step_seconds"] == pytest.approx(6 * 1_000_000 * 800 / 1e12)
    assert figures["transfer_seconds"] == pytest.approx(0.012)


@pytest.mark.parametrize("flags", ["", "--parameters 5", "--world-size 4"])
def test_too_few_flags(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl(flags) == 2
    assert "give --world-size and what describes a model" in capsys.readouterr().err


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("nodes", [3, 6, 9])
def test_ring_survival_against_enumeration(nodes: int, replicas: int) -> None:
    for failed in range(nodes + 1):
        cases = [set(c) for c in combinations(range(nodes), failed)]
        good = sum(
            not any(all((i + j) % nodes in lost for j in range(replicas + 1)) for i in range(nodes))
            for lost in cases
        )
        assert ring_survival(nodes, failed, replicas) == pytest.approx(good / len(cases))


def test_recovery_probability() -> None:
    # Two nodes, one replica: lost if both fail.
    lost = 1 - math.exp(-8 * 12 / 1000)
    assert recovery_probability(2, 8, 1000, 12) == pytest.approx(1 - lost**2)
    # FFTrainer, 6.2: above 99 % within 12 hours, for thousands of devices.
    assert 0.99 < recovery_probability(500, 8, 80_000, 12) < recovery_probability(500, 8, 80_000, 12, 2) <= 1
    assert recovery_probability(4, 8, 1e-9, 12) == 0


def test_loss_bound_of_the_paper() -> None:
    assert loss_bound({2: 128}, 1e-6) == pytest.approx(1.28e-10)
    assert loss_bound({3: 128}, 1e-4) * 1e5 == pytest.approx(1.28e-5)


def test_summary_of_a_live_role() -> None:
    shared = layout((0, 1), [("w", "float32", (4,), 16), ("b", "float32", (2,), 8)])
    own = layout((1,), [("exp_avg", "float32", (6,), 24)])
    nodes = {0: "a", 1: "a", 2: "b"}
    rows = {row.tensor: row for row in summarise([shared, own], Places(nodes, {}), 1, role=1)}
    assert list(rows) == ["exp_avg", "w", "b"]
    assert (rows["exp_avg"].unique, rows["exp_avg"].sent_to, rows["exp_avg"].domains) == (True, ("b",), 2)
    # Held by two roles of one node: replicated, but by role 0.
    assert (rows["w"].unique, rows["w"].holders, rows["w"].sent_to, rows["w"].domains) == (False, 2, (), 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--parameters 7000 --world-size 500", "--world-size 500 would be 62.5 nodes of --nproc-per-node 8"),
        ("--parameters 7000 --world-size 8 --nproc-per-node 0", "--nproc-per-node 0: give a number of 1"),
        ("--parameters 7000 --world-size 8 --nodes-per-domain 0", "--nodes-per-domain 0"),
        ("--parameters 7000 --world-size 16 --spares -1", "--spares -1: give a number of 0 or more"),
    ],
)
def test_shapes_that_there_cannot_be(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl(flags) == 2
    assert said in capsys.readouterr().err


def test_less_than_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl("--parameters 7000 --world-size 4 --spares 1") == 0
