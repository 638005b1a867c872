"""The benchmark of the exchange, small: that it runs, checks its sums, and reports what its text says."""

from __future__ import annotations

import json
import subprocess
import sys

from harness import ROOT


def test_small_exchanges_and_the_loss_of_a_rank() -> None:
    command = [sys.executable, "-m", "benchmarks.collectives", "--json", "--ranks", "2", "3", "--sizes", "1M"]
    command += ["--seconds", "0.1", "--loss", "32M", "--kills", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
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
