"""`ftctl plan`, term by term: what copies take, a recovery, and the loss of a rack; and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from ft_core.cli.planner import command
from ft_core.cli.planner.terms import (
    CHECKSUM,
    PCIE,
    Rate,
    Rates,
    guarded,
    network_rate,
    recovery,
    steps_wait,
    total,
    versions_apart,
)
from ft_core.errors import ConfigError

GB = 1e9
RATES = Rates(Rate(2 * GB, bound=False), Rate(PCIE, bound=True), Rate(CHECKSUM, bound=True))


def test_how_far_apart_versions_are() -> None:
    rate = Rate(2 * GB, bound=False)
    assert [versions_apart(int(n * GB), rate, 1.0) for n in (0.1, 2, 2.1, 4, 17)] == [1, 1, 2, 2, 9]
    assert steps_wait(int(3 * GB), rate, 1.0) == 0.5
    assert steps_wait(int(1 * GB), rate, 1.0) == 0


def test_terms_of_a_recovery() -> None:
    parts = recovery(int(16 * GB), int(2 * GB), RATES, start_up=6.0, step=1.5)
    assert {part.name: part.seconds for part in parts} == {
        "noticing it": 0.3,
        "start-up": 6.0,
        "network": 8.0,  # all of the node's state, into one node
        "host": 2 * GB / CHECKSUM,
        "device": 2 * GB / PCIE,
        "the step again": 1.5,
    }
    assert {part.name for part in parts if part.bound} == {"host", "device"}
    # The fetch goes on beside the start-up.
    assert total(parts) == (pytest.approx(0.3 + 8.0 + 0.2 + 2 / 63 + 1.5), True)
    ready = guarded(parts)
    assert total(ready)[0] == pytest.approx(total(parts)[0] - 8.0)
    assert [part.seconds for part in ready if part.name in ("start-up", "network")] == [0, 0]


def test_what_is_unknown_is_not_left_out() -> None:
    parts = recovery(int(16 * GB), int(2 * GB), Rates(None, RATES.device, RATES.host), None, None)
    unknown = {part.name: part.note for part in parts if part.seconds is None}
    assert unknown.keys() == {"start-up", "network", "the step again"} and all(unknown.values())
    seconds, whole = total(parts)
    assert not whole and seconds == pytest.approx(0.3 + 0.2 + 2 / 63)


def test_rates(tmp_path: Path) -> None:
    assert network_rate("", 1, 0) is None
    assert network_rate("", 2, 400) == Rate(100 * GB, bound=True)
    assert network_rate("2.5", 8, 400) == Rate(2.5 * GB, bound=False), "whatever the interfaces could do"
    path = tmp_path / "measured"
    path.write_text("".join(f'{{"network": {{"bytes_per_second": {n}e9}}}}\n' for n in (3, 1, 2)))
    assert network_rate(str(path), 1, 0) == Rate(GB, bound=False), "the slowest counts"
    for text, said in (("0", "above 0"), ("inf", "above 0"), ("-3", "above 0"), ("none", "neither a number")):
        with pytest.raises(ConfigError, match=said):
            network_rate(text, 1, 0)
    for content in ("", "nonsense", "{}", '{"network": 7}'):
        path.write_text(content)
        with pytest.raises(ConfigError, match="prints, a line for each node"):
            network_rate(str(path), 1, 0)


def planned(capsys: pytest.CaptureFixture[str], flags: str) -> tuple[int, dict[str, Any]]:
    """Plain data parallelism, with 12 GB of state."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, ())
    words = f"--parameters 1000000000 --nproc-per-node 1 --json {flags}".split()
    code = command.main(parser.parse_args(words), ())
    return code, json.loads(capsys.readouterr().out)


def test_spares_change_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _, none = planned(capsys, "--world-size 4 --measured 2")
    assert any("there is no spare" in each for each in none["objections"])
    assert none["spares"] == none["guarded_nodes"] == 0 and "recovery_of_a_guarded_node" not in none
    _, one = planned(capsys, "--world-size 4 --measured 2 --spares 1 --ft-ready-standbys 1")
    assert one["objections"] == [] and one["guarded_nodes"] == 2
    assert one["recovery_of_a_guarded_node"]["seconds"] < one["recovery"]["seconds"]


def test_what_a_racks_loss_costs(capsys: pytest.CaptureFixture[str]) -> None:
    racks = "--world-size 1 --spares 1 --nodes-per-domain 2"
    code, alone = planned(capsys, racks)
    assert code == 0 and alone["rack"]["at_risk"] == ["rack0"]
    assert "all nodes with roles are in rack0" in alone["rack"]["found"]
    assert any("Then the newest durable checkpoint counts" in each for each in alone["objections"])
    _, two = planned(capsys, "--world-size 4 --spares 1 --nodes-per-domain 2")
    assert (two["rack"]["racks"], two["rack"]["nodes"], two["rack"]["at_risk"]) == (2, 2, [])
    assert two["rack"]["spares_lacking"] == 1
    assert any("1 more in other racks would" in each for each in two["objections"])
    _, four = planned(capsys, "--world-size 4 --spares 2 --nodes-per-domain 2")
    assert four["rack"]["spares_lacking"] == 0 and four["objections"] == []


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """One role is all there is, so all of it is sent: two snapshots here, and two copies on the spare."""
    flags = "--world-size 1 --spares 1 --node-memory-gb"
    code, found = planned(capsys, f"{flags} 47")
    assert code == 1 and found["host_memory_bytes_per_node"] == 48 * GB
    assert any("take 48 GB: use more nodes" in each for each in found["objections"])
    assert planned(capsys, f"{flags} 48")[0] == 0


def test_copies_that_fall_behind(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--world-size 1 --spares 1 --global-batch-size 100 --seq-length 1000 --device-tflops 600"
    _, found = planned(capsys, f"{flags} --measured 4")
    assert found["transfer_seconds"] == 3.0 and found["step_seconds"] == pytest.approx(1.0)
    assert found["steps_per_version"] == 3 and found["every_step_waits_seconds"] == pytest.approx(2.0)
    assert found["least_tokens_per_step"] == pytest.approx(300_000, abs=2)
    [text] = found["objections"]
    assert "every step waits 2 s" in text and "a version is protected every 3 steps" in text
    _, bound = planned(capsys, f"{flags} --network-gbps 400")
    assert bound["network_rate_is_a_bound"] and bound["steps_per_version"] == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--interfaces 0", "--interfaces 0: give a number of 1 or more"),
        ("--network-gbps -1", "--network-gbps -1: give a number above 0"),
        ("--start-up-seconds -2", "--start-up-seconds -2: give"),
        ("--global-batch-size 6", "--global-batch-size 6 cannot be dealt 4 ways"),
        ("--measured fast", "neither a number nor a file"),
    ],
)
def test_what_is_refused(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, ())
    words = f"--parameters 1000 --nproc-per-node 1 --world-size 4 {flags}".split()
    assert command.main(parser.parse_args(words), ()) == 2
    assert said in capsys.readouterr().err
