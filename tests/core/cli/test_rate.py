"""`ftctl doctor --network`: nodes send each other state, and say how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import ROOT, environment
from ports import free_port

from ft_core.cli import ctl
from ft_core.cli.doctor import rate
from ft_core.cli.doctor.rate import Amount, measure
from ft_core.cli.planner.terms import network_rate
from ft_core.errors import ConfigError, TransportError

SECRET = b"a secret of several nodes"
LITTLE = Amount(roles=2, nbytes=3 << 20, seconds=0.2, patience=20)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "_AGAIN", 0.01)
    monkeypatch.setattr(rate, "_QUIET", 0.3)


def test_three_nodes_each_send_to_the_next() -> None:
    hosts = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = [each.result() for each in [threads.submit(measure, hosts, SECRET, LITTLE) for _ in hosts]]
    pairs = {each.sender: each.receiver for each in found}
    assert pairs == {hosts[at]: hosts[(at + 1) % 3] for at in range(3)}
    assert all(each.bytes_per_second > 0 and each.seconds >= LITTLE.seconds for each in found)
    # All of a version is sent each time: nothing that the other has from the one before.
    for each in found:
        sent = each.bytes_per_second * each.seconds
        assert round(sent) % (LITTLE.roles * LITTLE.nbytes) == 0
    assert "GB/s received meanwhile" in str(found[0])


def test_what_does_not_work_out() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match="give two hosts or more"):
        measure([f"127.0.0.1:{port}"] * 2, SECRET, LITTLE)
    with pytest.raises(ConfigError, match="none of these is this machine"):
        measure(["203.0.113.1", "203.0.113.2"], SECRET, LITTLE)
    with pytest.raises(ConfigError, match="give a name that this machine knows"):
        measure(["no.such.host.invalid", "127.0.0.1"], SECRET, LITTLE)
    with pytest.raises(TransportError, match="Is the same command run on that host"):
        measure([f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"], SECRET, Amount(1, 1 << 20, 0.1, 0.2))


def test_strangers_are_refused() -> None:
    hosts = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    little = Amount(1, 1 << 20, 0.1, 1.0)
    with ThreadPoolExecutor(2) as threads:
        tries = [threads.submit(measure, hosts, secret, little) for secret in (SECRET, b"another secret")]
        for each in tries:
            with pytest.raises(TransportError):
                each.result()


def test_the_command_and_what_plan_makes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    call = (
        "import sys; from ft_core.cli import ctl; from ft_core.cli.doctor import rate; "
        "rate.Amount.__init__.__defaults__ = (2, 1 << 20, 0.2, 30.0); sys.exit(ctl.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", call, "doctor", "--network", *hosts, "--json"]
    about = environment() | {"FT_JOB_SECRET": "a secret of two nodes"}
    nodes = [subprocess.Popen(command, env=about, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in hosts]
    lines = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    path = tmp_path / "measured"
    path.write_text("".join(lines))
    slowest = min(json.loads(line)["network"]["bytes_per_second"] for line in lines)
    found = network_rate(str(path), 1, 400)
    assert found is not None and (found.value, found.bound) == (slowest, False)
    flags = f"plan --parameters 1000000 --world-size 1 --spares 1 --measured {path} --step-seconds 1 --json"
    assert ctl.main(flags.split()) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["network_bytes_per_second"] == slowest and not figures["network_rate_is_a_bound"]
