"""The benchmarks, small: that they run, and report what their text says."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import etcd_members
import pytest
from harness import ROOT

SENT, WHOLE = "h2h_bytes_per_rank_and_step", "state_bytes_per_rank"


def run(name: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_small_exchanges_and_the_loss_of_a_rank() -> None:
    small = ["--ranks", "2", "3", "--sizes", "1M", "--seconds", "0.1", "--loss", "32M", "--kills", "1"]
    result = run("collectives", *small)
    assert [(r["ranks"], r["bytes"]) for r in result["all_reduce"]] == [(2, 2**20), (3, 2**20)]
    for row in result["all_reduce"]:
        speeds = row["bytes_per_second"]
        assert set(speeds) == {"bare", "ft", "control"}
        assert {s["n"] for s in speeds.values()} == {row["ratio"]["n"]} == {row["control"]["n"]}
        assert row["ratio"]["n"] % 6 == 0  # every order of the three, equally often
    assert [(r["ranks"], r["bytes"]) for r in result["loss"]] == [(2, 2**25), (3, 2**25)]
    for row in result["loss"]:
        phases = [row[phase]["median"] for phase in ("told", "woken", "repeated")]
        assert phases == sorted(phases), phases


def test_the_overhead_of_a_small_model() -> None:
    small = ["--num-layers=2", "--hidden-size=32", "--seq-length=32", "--global-batch-size=8"]
    result = run("overhead", "--quick", *small)
    assert result["ratio"]["n"] == result["control"]["n"] == 2
    # Half of the optimizer's state is each rank's own, and goes to the other node; parameters do not.
    assert all(0 < sent < whole for sent, whole in zip(result[SENT], result[WHOLE], strict=True))
    assert result["cpu_seconds_per_step"]["of_it_d2h"] > 0


@pytest.mark.exhaustive
def test_the_overhead_of_the_flight_record() -> None:
    small = ["--num-layers=2", "--hidden-size=32", "--seq-length=32", "--global-batch-size=8"]
    result = run("overhead", "--quick", "--recorder", *small)
    assert result["ratio"]["n"] == result["control"]["n"] == 2
    assert result["operations_per_rank_and_step"] > 3 and min(result["recorder_ns"].values()) > 0


@pytest.mark.exhaustive
def test_recoveries_beside_torchrun() -> None:
    seconds = run("recovery", "--quick", "--kinds=worker", "--torchrun=worker")["seconds_after_sigkill"]
    assert seconds["worker"]["resumed"]["n"] == seconds["torchrun worker"]["resumed"]["n"] == 1


@pytest.mark.exhaustive
def test_a_replica_group_that_leaves_and_returns() -> None:
    seconds = run("elastic", "--quick")["seconds"]
    assert seconds["leave"]["n"] == seconds["return"]["n"] == 1


def test_the_control_plane_of_many_roles() -> None:
    result = run("scale", "--roles=256", "--quick")
    assert (result["roles"], result["lost_after_restart"]) == (256, 0)
    phases = result["phases"]
    lost = "a node lost", "1 % of nodes lost", "a replica group leaves", "it returns"
    others = "start", "steady", "nobody trains", "scraped", "controller restarted"
    assert phases.keys() == {*others, *lost}
    assert result["plan_everywhere_s"] > 0 and phases["a node lost"]["seconds"] > 0
    assert 0 < phases["a node lost"]["plan_bytes"] < 10_000 and 0 < result["largest_message"] < 10_000


def test_what_a_recovery_takes_of_the_machine_alone() -> None:
    result = run("decision", "--roles=256", "--quick")
    assert result["phases"].keys() == {"start", "a node lost", "1 % of nodes lost"}
    assert result["phases"]["a node lost"]["decision and plan"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@etcd_members.needed
def test_leaders_that_are_lost() -> None:
    result = run("succession", "--quick")
    assert len(result["kills"]) == 2 and result["different"] == 0
    assert all(kill["led"] > 0 for kill in result["kills"])


@pytest.mark.exhaustive
def test_what_members_ask_of_their_store() -> None:
    result = run("rendezvous", "--members", "256", "--real", "2", "4")
    assert [row["sockets_per_member"] for row in result["groups"]] == [2, 4]
    for row in result["groups"]:
        assert row["requests"]["Meet"] == row["requests"]["SetKey"] == row["size"]
    (found,) = result["sizes"]
    asked, members = found["requests"], 256  # TP 8, PP 16: all, data, tensor, pipeline and model parallel
    assert asked["Meet"] == asked["WaitForKeys"] == members * 5
    assert asked["SetKey"] == 2 + 128 + 32 + 16 + 2  # an address for each 128 members of a group
    assert asked.keys() == {"Meet", "WaitForKeys", "SetKey"}
