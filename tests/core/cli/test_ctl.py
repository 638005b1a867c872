"""What `ftctl` shows of a job, however large: here with 102,400 roles, of a controller without processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core.plans import job_plan
from harness import ROOT

from ft_core.cli import ctl, events, nodes, status, top
from ft_core.cli.ask import DeniedError, Line
from ft_core.cli.doctor import job as doctor
from ft_core.cli.doctor.case import Case
from ft_core.control.cluster.node import Node
from ft_core.control.events import Arriving, Disconnected, Received, Send
from ft_core.control.machine import Controller
from ft_core.control.phases import Running
from ft_core.node.admission.findings import Level
from ft_core.protocol import messages as m
from ft_core.protocol.codec import encode
from ft_core.protocol.goodput import Cause
from ft_core.settings import Command, Settings

MIB = 1 << 20
PER_NODE = 8
_NOBODY = m.Holdings(
    epoch=3, begun="", reported=3, parts=[], roles={}, replicas={}, segments={}, idle=1,
    store="10.0.0.1:1", master="10.0.0.1:2", configured=None,
)  # fmt: skip


class Large:
    """A controller that has heard of all of its nodes; and who asks it, as over a connection."""

    def __init__(self, hosting: int, spares: int) -> None:
        settings = Settings(
            hosting, PER_NODE, Command("train.py"), replicas=1, controller="h:1", spares=spares
        )
        self.controller = Controller(settings, "/job", lambda: "x", {}, pid=7)
        self.controller.handle(Arriving(0), 0.0)
        self.cluster = cluster = self.controller.cluster
        names = [f"node-{number:05}+{number:06x}" for number in range(hosting + spares)]
        places = {role: names[role // PER_NODE] for role in range(hosting * PER_NODE)}
        at = {n: m.NodeAddress(f"10.0.0.{i % 250}:40001", f"rack{i // 16}") for i, n in enumerate(names)}
        cluster.plan = job_plan(places, 3, nodes=at)
        cluster.epoch = 3
        self.controller._recovery.transition(Running())
        for number, name in enumerate(names):
            hello = m.AgentHello(
                name, 1, 100 + number, number, at[name].domain, at[name].data, _NOBODY, [], False, "", ""
            )
            node = Node.of(number, hello, 0.0)
            node.waiting = 1 if number < hosting else PER_NODE + number % 2
            roles = range(number * PER_NODE, (number + 1) * PER_NODE) if number < hosting else ()
            node.beats = {r: m.RoleBeat(r, 500, 500, [499, 500], 500, 2.0, 0.0, 0, 0) for r in roles}
            kept = [(role - PER_NODE) % len(places) for role in roles]
            node.replicas = {f"{role}x1-0": [499, 500] for role in kept}
            for role in roles:
                cluster.catalogue.learn(role, {f"{role}x1-0": str(role), "all": "0"})
            cluster.add(node)
        self.names, self.largest, self.longest, self.asked = names, 0, 0.0, 0
        self.answers: list[m.ToCtl] = []

    def __call__(self, *_: object) -> contextlib.AbstractContextManager[Line]:
        return contextlib.nullcontext(Line(self))  # type: ignore[arg-type]

    def send(self, message: m.FromCtl) -> None:
        """What `ftctl` says."""
        if isinstance(message, m.CtlHello):
            return
        begun = time.perf_counter()
        effects = self.controller.handle(Received(-1, message), 10.0)
        self.longest = max(self.longest, time.perf_counter() - begun)
        self.asked += 1
        for effect in effects:
            assert isinstance(effect, Send)
            if effect.peer == -1:
                body = encode(effect.message)
                self.largest = max(self.largest, len(body))
                self.answers.append(m.TO_CTL.decode(body, "the controller"))
            else:
                assert isinstance(effect.message, m.DescribeRole)
                state = m.RoleState(effect.message.role, [], [], 0.0, 0.0)
                for said in self.controller.handle(Received(effect.peer, state), 10.0):
                    assert isinstance(said, Send) and said.peer == -1
                    self.answers.append(said.message)  # type: ignore[arg-type]

    def recv(self) -> m.ToCtl:
        """What it hears."""
        return self.answers.pop(0)


@pytest.fixture
def large() -> Large:
    return Large(12_800, 200)


@pytest.fixture
def ftctl(large: Large, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    for module in (status, nodes, ctl, top):
        monkeypatch.setattr(module, "line", large)

    def run(*words: str) -> str:
        large.largest, large.longest, large.asked = 0, 0.0, 0
        begun = time.perf_counter()
        assert ctl.main(list(words)) == 0
        seconds = time.perf_counter() - begun
        out = capsys.readouterr().out
        with capsys.disabled():
            print(
                f"\nftctl {' '.join(words)}: {seconds:.2f} s, {large.asked} questions, longest answer "
                f"{large.longest * 1e3:.0f} ms, largest {large.largest:,} bytes, {len(out):,} characters"
            )
        assert large.largest < MIB
        return out

    return run


def lose_some(large: Large) -> list[str]:
    """Nodes go, roles lag, things fail."""
    gone = [large.names[5], large.names[9]]
    for name in gone:
        large.cluster.drop(large.cluster.nodes[name])
    slow = large.cluster.nodes[large.names[7]]
    slow.beats = {**slow.beats, 57: msgspec.structs.replace(slow.beats[57], step=498, step_s=9.5)}
    for pid in range(3):
        strike = m.FailureRecord("node-00011", -1, 88, pid, 400 + pid, m.Fault.CRASHED, f"{pid}", age=5.0)
        large.cluster.strikes.add(strike, 10.0)
    return gone


def test_the_status_of_100_000_roles_is_a_screenful(large: Large, ftctl: Any) -> None:
    assert "102,400 of 102,400 have a worker" in ftctl("status")
    gone = lose_some(large)
    lines = ftctl("status").splitlines()
    assert len(lines) < 45 and max(map(len, lines)) < 240
    said = "\n".join(lines)
    assert said.startswith("epoch 3  running  controller pid 7\n")
    for part in (
        "498 to 500",
        "102,384 of 102,400 have",
        f"role 40 on {gone[0]}",
        f"role 79 on {gone[1]}",
        "12,798 of 12,800 with roles",
        "200 of 200 with their workers up, in 13 failure domains",
        f"role 57 on {large.names[7]}: step 498, 9.5 s a step",
        "3 against 1 nodes",
        "node-00011  3/3: avoided",
    ):
        assert part in said, part


def test_top_is_of_now_and_says_what_is_wrong(large: Large, ftctl: Any) -> None:
    """Events may be a minute old; here are none."""
    account = large.controller.view.account
    account.begins(3, 499, 1.0)
    account.resumes(500, 6.0)
    account.to(Cause.RESTORING, 7.0)
    large.controller.handle(Arriving(0), 7.0)  # it is recorded
    large.controller._recovery.protection.unprotected = "it wants none"
    lines = ftctl("top", "--once").splitlines()
    assert "goodput   0.0 % of 10.0 s productive; start-up 6.0 s, restoring 3.0 s, redone 1.0 s" in lines
    assert "not protected: it wants none" in lines
    large.controller._recovery.protection.unprotected = ""
    found = json.loads(ftctl("status", "--json"))
    assert found["complaint"] == "restoring: no step for 4 s" and not found["unprotected"]
    assert found["seconds"] == {"start_up": 6.0, "restoring": 3.0, "redone": 1.0}


def test_all_of_100_000_roles_comes_in_pieces(large: Large, ftctl: Any) -> None:
    lose_some(large)
    found = json.loads(ftctl("status", "--json"))
    assert large.asked == 1 + 100 + 1
    about = ["epoch", "phase", "controller_pid", "complaint", "unprotected", "seconds"]
    assert list(found) == [*about, "every", "slow", "finished", "roles", "spares"]
    assert [row["role"] for row in found["roles"]] == list(range(102_400))
    row = found["roles"][57]
    assert (row["node"], row["held"]) == (large.names[7], [499, 500])
    assert row["replicas"] == {"57x1-0": {large.names[8]: [499, 500]}}
    assert found["spares"][-1] == {"node": large.names[-1], "agent_pid": 13_099, "idle": 9, "guarding": []}
    assert len(found["spares"]) == 200
    large.controller.handle(Disconnected(-1), 10.0)
    assert not large.controller._questions._listed, "what was read is forgotten with its reader"


def test_more_than_few_are_listed_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for hosting, flags, lines in ((8, [], 2 + 64 + 2), (9, [], 13), (9, ["--all"], 2 + 72 + 2)):
        monkeypatch.setattr(status, "line", Large(hosting, 2))
        assert ctl.main(["status", *flags]) == 0
        assert len(capsys.readouterr().out.splitlines()) == lines


def test_of_many_nodes_those_are_shown_against_which_something_counts(large: Large, ftctl: Any) -> None:
    lose_some(large)
    shown = ftctl("nodes")
    assert len(shown.splitlines()) == 1 + 1 + 3 + 2 and "node-00011+00000b" in shown
    assert "12,997 nodes of 12,998 without a strike are not shown" in shown
    rows = json.loads(ftctl("nodes", "--json"))["nodes"]
    assert len(rows) == 12_998 and sum(row["avoided"] for row in rows) == 1
    assert rows[0]["roles"] == list(range(8))
    assert len(ftctl("nodes", "--all").splitlines()) == 12_998 + 3 + 2


def test_the_doctor_looks_at_some_of_many(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_some(large)
    asked: list[object] = []
    monkeypatch.setattr(doctor.socket, "create_connection", lambda *a, **b: asked.append(a) or _Closed())
    settings = large.cluster.settings
    with large() as found:
        about = found.status()
    case = Case(settings=settings, status=about, line=large)
    found = {f.name: f for check in doctor.CHECKS for f in check(case)}
    assert found["spares"].level is Level.OK and found["spares"].found.startswith("200 of 200")
    assert "of 64 of the 102,400 roles" in found["replicas"].found  # whose state nobody has told here
    assert len(asked) <= doctor.LOOKED_AT and "were asked, and answer" in found["agents"].found
    assert large.largest < MIB


class _Closed:
    def close(self) -> None:
        """Nothing was open."""


def test_a_list_that_nobody_has_begun_to_read_has_no_next_piece(large: Large) -> None:
    large.send(m.AskMore())
    assert isinstance(large.recv(), m.Denied)


# -- events --------------------------------------------------------------------------------------------


def event(name: str, **more: Any) -> str:
    about = {"event": name, "epoch": 1, "term": 1, "monotonic": 1.0, "time": 0.0, "roles": [], "reason": ""}
    return json.dumps(about | more) + "\n"


def written(job_dir: Path, lines: Iterable[str]) -> list[str]:
    with (job_dir / "events.jsonl").open("w") as file:
        file.writelines(lines)
    return ["--job-dir", str(job_dir), "events"]


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    def lines() -> Iterator[str]:
        yield from (event("joined", node=f"node-{n:05}+{n:x}") for n in range(12_800))
        for epoch in range(1, 41):
            lost = {"reason": f"node node-{epoch:05}+{epoch:x}: no heartbeat\nand more", "roles": [epoch]}
            yield event("detected", epoch=epoch, **lost)
            moved = {str(epoch): f"node-{epoch + 100:05}+64"}
            yield event("decided", epoch=epoch + 1, version=7, origin="memory", moved=moved)
            yield event("resumed", epoch=epoch + 1, version=8)
        yield event("state_restored", epoch=41, pids={str(r): r for r in range(102_400)}, version=7)
        yield event("hang", epoch=41, roles=[0, 1, 2, *range(9, 102_400, 2)], reason="x" * 5000)
        yield '{"event": "torn'

    return written(tmp_path_factory.mktemp("job"), lines())


def test_events_are_lines_of_a_persons_size(happened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(happened) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == events.LAST and max(map(len, lines)) < 300
    assert "role 0-2:1,9-102399:2" in lines[-1] and lines[-1].endswith("x ...")
    assert "state_restored" in lines[-2] and "version 7" in lines[-2]
    assert "no heartbeat" in "".join(lines) and "and more" not in "".join(lines)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--all", 12_800 + 3 * 40 + 2),
        ("--all --event detected --event resumed", 80),
        ("--last 3 --event detected", 3),
        ("--epoch 5", 3),
        ("--role 17", 2 + 1),
        ("--node node-00017", 1 + 1),
        ("--node node-00117+64", 1),
    ],
)
def test_events_that_are_asked_for(
    flags: str, count: int, happened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main([*happened, *flags.split(), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == count


def test_no_event(tmp_path: Path, happened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([*happened, "--event", "nothing"]) == 1
    assert "no event is like that" in capsys.readouterr().err
    assert ctl.main(["--job-dir", str(tmp_path / "none"), "events"]) == 2
    assert "has no events.jsonl" in capsys.readouterr().err
    assert ctl.main(["events"]) == 2
    assert "--job-dir" in capsys.readouterr().err
    damaged = written(tmp_path, ["[1]\n", "{}\n", event("joined", node="n"), '{"eve'])
    assert ctl.main([*damaged, "--epoch", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1 and "line 1 of" in said.err and "line 2 of" in said.err
    assert ctl.main(damaged) == 0 and capsys.readouterr().out.count("\n") == 1


def test_who_has_seen_enough_may_close_the_pipe(happened: list[str]) -> None:
    command = [sys.executable, "-m", "ft_core.cli.ctl", *happened, "--all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as ftctl:
        assert ftctl.stdout is not None and ftctl.stderr is not None
        ftctl.stdout.readline()
        ftctl.stdout.close()
        assert ftctl.stderr.read() == b"" and ftctl.wait() == 0


def test_a_node_by_its_number(large: Large) -> None:
    """As people know them: by the number, by the name without what makes it unique; and which there are."""
    line, names = large(), large.names
    with line as found:
        assert nodes.node_named(found, names[7]) == names[7]
        assert nodes.node_named(found, "7") == nodes.node_named(found, "node-00007") == names[7]
        with pytest.raises(DeniedError, match=r"^99999 is no node: there are node-00000\+0+, node-00001"):
            nodes.node_named(found, "99999")
        large.cluster.drop(large.cluster.nodes[names[7]])
        with pytest.raises(DeniedError, match=r"^7 is no node: .* and 12935 others$"):
            nodes.node_named(found, "7")


def test_a_number_that_two_nodes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [m.NodeStatus(name, "r", True, [], 1, [], False) for name in ("a-1+ff", "b1+ee", "c")]
    with Large(1, 0)() as found:
        monkeypatch.setattr(found, "nodes", lambda _: [m.NodesStatus(3, 60.0, rows, False)])
        with pytest.raises(DeniedError, match=r"^1 may be any of several nodes: there are a-1\+ff, b1\+ee$"):
            nodes.node_named(found, "1")
        assert nodes.node_named(found, "b1") == "b1+ee" and nodes.node_named(found, "c") == "c"
