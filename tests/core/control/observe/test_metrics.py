"""The controller's metrics: what they say, who reads them, and that nobody who reads them is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib import request

import pytest
from core.control.test_controller_machine import ControlPlane
from harness import environment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ports import free_port
from waiting import wait_for_value

from ft_core.control.decide.risk import ClusterHoldings, Last, Loss, Present, Whole
from ft_core.control.liveness import stragglers
from ft_core.control.observe import job_metrics as tallied
from ft_core.control.observe.job_metrics import Durations, JobMetrics, Numbers
from ft_core.control.observe.metrics import PAGES
from ft_core.node.metrics import PAGES as OF_NODE
from ft_core.node.metrics import NodeNumbers
from ft_core.protocol import http as served
from ft_core.protocol.http import Numbering
from ft_core.protocol.http_loop import CONNECTIONS
from ft_core.protocol.http_server import Server
from ft_core.protocol.messages import Fault, RoleBeat, WorkerLost
from ft_core.settings import Command, Settings, write_secret

NAMES = """ft_job_info ft_phase ft_epoch ft_step ft_spares ft_replica_groups ft_failures_total
ft_recoveries_total ft_recovery_seconds ft_steps_redone_total ft_productive_seconds_total
ft_lost_seconds_total ft_step_seconds ft_protected_every_steps ft_commit_wait_seconds_total ft_h2h_bytes_total
ft_durable_last_success_timestamp_seconds ft_durable_write_seconds ft_segments_below_k ft_device_health
ft_straggler_score ft_xid_total ft_hang_suspects ft_since_step_seconds ft_since_step_limit_seconds
ft_protected ft_begun_anew_total"""


def numbers(job: ControlPlane) -> Numbers:
    return job.controller.view.numbers(job.now, 1e9 + job.now)


def text(found: Numbers) -> bytes:
    return PAGES["/metrics"](found).body


def samples(job: ControlPlane) -> dict[str, float]:
    """By name with its labels."""
    lines = text(numbers(job)).decode().splitlines()
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}


def recovered(**about: Any) -> ControlPlane:
    """A node was lost, and a spare has its roles."""
    job = ControlPlane(nodes=2, spares=1, **about)
    job.wait(2.0)
    job.all_step(1)
    job.wait(5.0)
    job["node1"].hangs_up()
    job.wait(1.0)
    job.all_report("node0", "node2")
    job.wait(1.5)
    job.all_step(2)
    return job


def test_what_a_recovery_leaves() -> None:
    found = samples(recovered())
    assert found['ft_failures_total{class="node",domain="node1",node="node1"}'] == 1
    assert found['ft_recoveries_total{origin="memory"}'] == 1 and found["ft_epoch"] == 2
    assert found['ft_phase{phase="running"}'] == 1 and found['ft_phase{phase="waiting"}'] == 0
    assert (found["ft_step"], found["ft_spares"]) == (2, 0)
    for phase in ("detection", "decision", "waiting", "restoring", "total"):
        assert found[f'ft_recovery_seconds_count{{phase="{phase}"}}'] == 1
    assert found['ft_recovery_seconds_sum{phase="restoring"}'] == pytest.approx(1.5)
    assert found['ft_recovery_seconds_sum{phase="detection"}'] == pytest.approx(0.35, abs=0.06)
    lost = sum(seconds for name, seconds in found.items() if name.startswith("ft_lost_seconds_total"))
    assert lost + found["ft_productive_seconds_total"] == pytest.approx(recovered().now, abs=0.01)


def test_all_names_are_there() -> None:
    families = set(re.findall(r"^# TYPE (\w+) ", text(numbers(recovered())).decode(), re.M))
    assert families == set(NAMES.split())


def test_of_many_roles_there_is_no_more_to_read() -> None:
    few, many = samples(ControlPlane(nodes=2)), samples(ControlPlane(nodes=24, nproc=8))
    assert few.keys() - many.keys() == {x for x in few if x.startswith("ft_job_info")} and len(few) == len(
        many
    )


def test_places_are_told_apart_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallied, "PLACES", 3)
    tally = JobMetrics()
    for number in (0, 1, 2, 3, 4, 0):
        tally.failed(Fault.NODE, f"node{number}", "rack")
    assert tally.failures == {
        ("node", "node0", "rack"): 2,
        **{("node", f"node{number}", "rack"): 1 for number in (1, 2)},
        ("node", "other", "other"): 2,
    }


def test_durations() -> None:
    found = Durations()
    found.add(0.1)
    found.add(0.3, 2)
    found.add(1e6)
    assert found.cumulative() == [1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4] and found.total == pytest.approx(
        1e6 + 0.7
    )


def test_a_durable_checkpoint_is_whole_once_all_parts_are() -> None:
    tally = JobMetrics()
    for whole, at in ((False, 1.0), (True, 2.0), (False, 3.0)):
        tally.written(0.5, whole, at)
    assert tally.durable == 2.0 and (tally.writes.total, tally.writes.cumulative()[-1]) == (1.5, 3)


def test_a_device_that_has_failed_is_named() -> None:
    job = recovered()
    assert not [name for name in samples(job) if name.startswith("ft_device_health")]
    job["node0"].say(WorkerLost(0, 1, "ended", 1, Fault.DEVICE, step=2, device=3))
    assert samples(job)['ft_device_health{device="3",node="node0"}'] == 0


def test_who_holds_the_others_up_is_named_with_a_score() -> None:
    job = recovered(groups=2)
    assert not [name for name in samples(job) if name.startswith(("ft_straggler", "ft_xid_total"))]
    for name, own_s, data_s in (("node0", 0.5, 0.0), ("node2", 0.5, 0.4)):
        job[name].own_s, job[name].data_s = own_s, data_s
        job[name].beat()
    job.wait(stragglers.EVERY)
    assert samples(job)['ft_straggler_score{part="data",role="1"}'] == 1.8
    shown = job.controller.view.overview(job.now, job.now).job()["stragglers"]
    assert shown == [(1, "node2", 1.8, "data")]


def test_bytes_of_copies_are_counted_once_over_whichever_connection() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job["node0"].copied = 100
    job["node0"].beat()
    job["node0"].hangs_up()
    job["node0"].greet()
    job["node0"].copied = 130
    job["node0"].beat()
    assert samples(job)["ft_h2h_bytes_total"] == 130


def test_errors_of_gpus_are_counted_by_their_number() -> None:
    job = recovered()
    job["node0"].xids = {79: 1, 13: 2}
    job["node0"].beat()
    job["node2"].xids = {13: 1}
    job["node2"].beat()
    job["node0"].beat()  # says the same again
    assert {n: x for n, x in samples(job).items() if "xid" in n} == {
        'ft_xid_total{xid="13"}': 3,
        'ft_xid_total{xid="79"}': 1,
    }
    job["node0"].hangs_up()
    job["node0"].greet()
    job["node0"].xids = {79: 2, 13: 2}
    job["node0"].beat()
    assert samples(job)['ft_xid_total{xid="79"}'] == 2 and samples(job)['ft_xid_total{xid="13"}'] == 3


def beat(*held: int, committed: int) -> RoleBeat:
    return RoleBeat(1, 5, 5, list(held), committed, 0.1, 0.0, 0, 0)


def held(**changed: Any) -> ClusterHoldings:
    """Of four roles in three failure domains; the first two have a segment in common."""
    nodes = [
        Present("a", "rack0", {0: beat(4, 5, committed=4), 1: beat(4, 5, committed=4)}, {"2x1": [4]}),
        Present("b", "rack1", {2: beat(4, committed=4)}, {"0x2": [4, 3], "3x1": [5]}),
        Present("c", "rack2", {3: beat(5, 4, committed=5)}, {}),
    ]
    places = {0: "a", 1: "a", 2: "b", 3: "c"}
    catalogue = {0: {"0x2": "0,1"}, 1: {"0x2": "0,1"}, 2: {"2x1": "2"}, 3: {"3x1": "3"}}
    return replace(ClusterHoldings(1, 3, nodes, places, catalogue), **changed)


def test_parts_of_the_state_with_too_few_copies_are_counted() -> None:
    assert held().below == 0 and held(replicas=2).below == 3 and held(replicas=0).below == 0
    assert held(version=5).below == 2  # only role 3's is in two domains as of then
    assert held(version=6).below == 3
    assert held(nodes=held().nodes[:2]).below == 1  # role 3's node is lost
    assert held(nodes=[held().nodes[0], held().nodes[2]]).below == 3
    assert held(places={3: "c"}).below == 0 == held(catalogue={}).below


def test_what_is_as_it_was_is_not_counted_again() -> None:
    last, counted = Last(), []

    class Counted(ClusterHoldings):
        def _below(self, whole: list[Whole]) -> int:
            counted.append(self)
            return super()._below(whole)

    def now(**changed: Any) -> int:
        about = (
            {each.name: getattr(first, each.name) for each in fields(ClusterHoldings)}
            | {"last": last}
            | changed
        )
        return Counted(**about).below

    first = held()
    assert now() == 0 and len(counted) == 1
    newer = [
        Present(n.name, n.domain, dict(n.roles), {s: [*v, 6] for s, v in n.replicas.items()})
        for n in first.nodes
    ]
    assert now(nodes=newer) == 0 and len(counted) == 1  # of the same roles and segments all that counts
    assert now(nodes=newer[:2]) == 1 and len(counted) == 2
    assert now(nodes=newer[:2]) == 1 and len(counted) == 2
    gone = [newer[0]._replace(replicas={}), *newer[1:]]
    assert now(nodes=gone) == 1 and now(nodes=newer) == 0 and len(counted) == 4
    assert now(nodes=newer, version=6) == 3 and len(counted) == 5
    assert now(nodes=newer, replicas=2) == 3 and now(nodes=newer, places={3: "c"}) == 0
    assert now(nodes=newer, catalogue={}) == 0 and now(nodes=newer) == 0


def test_holders_in_other_domains_are_copies() -> None:
    spread = {0: {"0x3": "0,2,3"}}
    assert held(catalogue=spread).below == 0 == held(catalogue=spread, replicas=2).below
    assert held(catalogue=spread, replicas=3).below == 1


def test_what_would_be_lost_with_a_node() -> None:
    assert held().without("a") == Loss(
        [0, 1], alone=0, version=4, redone=1, below=2
    )  # and its copy of role 2's
    assert held().without("b") == Loss([2], alone=0, version=4, redone=1, below=3)
    assert held().without("c") == Loss([3], alone=0, version=5, redone=0, below=1)
    alone = held(nodes=[held().nodes[0], held().nodes[2]])
    assert alone.without("a") == Loss([0, 1], alone=1, version=None, redone=None, below=0)
    assert held().without("d") == Loss([], alone=0, version=None, redone=None, below=0)


def of_a_node() -> NodeNumbers:
    roles = {1: beat(4, 5, committed=4)}
    return NodeNumbers("node0", "rack0", True, 2, {"playing": 1, "idle": 1}, roles, copies=3)


def test_what_an_agent_says_of_its_node() -> None:
    found = OF_NODE["/metrics"](of_a_node()).body.decode()
    for line in ("ft_node_copies 3.0", 'ft_role_step{role="1"} 5.0', 'ft_role_replicated_step{role="1"} 4.0'):
        assert f"{line}\n" in found
    assert OF_NODE["/readyz"](of_a_node()).code == 200
    assert OF_NODE["/readyz"](replace(of_a_node(), connected=False)) == (503, b"no controller\n", ANY)


def test_promtool_finds_nothing_wrong() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool was not found: what it says of the metrics was left out (Debian: prometheus)")
    found = text(numbers(recovered())) + OF_NODE["/metrics"](of_a_node()).body
    done = subprocess.run([promtool, "check", "metrics"], input=found, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# -- who reads ---------------------------------------------------------------------------------------


class Loop:
    """An event loop that has numbers."""

    def __init__(self) -> None:
        self.loop, self.asked = asyncio.new_event_loop(), 0
        self._found = numbers(recovered())
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.numbers = Numbering(self.loop, self._take)
        self.server = Server("127.0.0.1:0", self.numbers, PAGES)

    def _take(self) -> Numbers:
        self.asked += 1
        return self._found

    def close(self) -> None:
        self.server.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    found = Loop()
    found.server.start(tmp_path_factory.mktemp("http"))
    yield found
    found.close()


def ask(server: Server, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_what_is_served(loop: Loop) -> None:
    code, body = ask(loop.server, "/metrics")
    assert code == 200 and b"ft_epoch 2.0\n" in body
    assert ask(loop.server, "/metrics", "HEAD") == (200, b"")
    assert ask(loop.server, "/healthz") == (200, b"ok\n") == ask(loop.server, "/readyz?verbose")
    assert ask(loop.server, "/<script>") == (404, b"Not Found")
    for method in ("POST", "PUT", "DELETE", "TRACE"):
        assert ask(loop.server, "/metrics", method) == (405, b"Method Not Allowed")
    assert ask(loop.server, "/metrics", "<b>") == (400, b"Invalid HTTP request received.")


def test_many_who_ask_are_one_question(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "FRESH", 60.0)
    ask(loop.server, "/metrics")
    asked = loop.asked
    for _ in range(10):
        ask(loop.server, "/metrics")
    assert loop.asked == asked


def is_open(client: socket.socket) -> bool:
    """Whether the server has not hung up; nothing was asked of it."""
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_those_who_say_nothing_hold_nobody_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than may be connected, and their time is not over."""
    monkeypatch.setattr(served, "ASKS", 600.0)
    with contextlib.ExitStack() as stack:
        idle = []
        for number in range(CONNECTIONS + 8):
            idle.append(socket.create_connection(("127.0.0.1", loop.server.server_port)))
            stack.enter_context(idle[-1])
            idle[-1].sendall(b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"")
        assert ask(loop.server, "/metrics")[0] == 200
        wait_for_value(lambda: [is_open(each) for each in idle], [False] * 9 + [True] * (CONNECTIONS - 1))


def test_who_says_nothing_for_too_long_is_dropped(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ASKS", 0.2)
    with socket.create_connection(("127.0.0.1", loop.server.server_port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        wait_for_value(lambda: is_open(client), False)


def test_a_controller_that_is_busy_is_said_to_be(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "SECONDS", 0.1)
    monkeypatch.setattr(served, "FRESH", 0.0)
    goes_on = threading.Event()
    loop.loop.call_soon_threadsafe(goes_on.wait)
    try:
        assert ask(loop.server, "/healthz") == (503, b"it does not answer\n")
    finally:
        goes_on.set()


def test_who_leads_again_has_the_port_again(loop: Loop, tmp_path: Path) -> None:
    first = Server(f"127.0.0.1:{free_port()}", loop.numbers, PAGES)
    first.start(tmp_path)
    assert ask(first, "/healthz")[0] == 200
    first.close()
    second = Server(first.url.removeprefix("http://"), loop.numbers, PAGES)
    second.start(tmp_path)
    assert ask(second, "/healthz")[0] == 200 and first.url == second.url
    second.close()


LINES = st.binary(max_size=200) | st.sampled_from(
    [b"GET /metrics HTTP/1.1", b"GET /<script>alert(1)</script> HTTP/1.1", b"GET / HTTP/9.9", b"GET"]
)
HEADERS = st.lists(
    st.binary(max_size=60) | st.sampled_from([b"Host: x", b"Content-Length: -1", b"a" * 70_000])
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(line=LINES, headers=HEADERS, ends=st.booleans())
def test_whatever_is_asked_is_answered_without_repeating_it(
    loop: Loop, line: bytes, headers: list[bytes], ends: bool
) -> None:
    with socket.create_connection(("127.0.0.1", loop.server.server_port), 30) as client:
        with contextlib.suppress(OSError):  # it has hung up already
            client.sendall(b"\r\n".join([line, *headers]) + b"\r\n\r\n" * ends)
            client.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(OSError):
            while found := client.recv(1 << 16):
                said += found
    head = said.partition(b"\r\n\r\n")[0]
    if said.startswith(b"HTTP/"):
        assert re.match(rb"HTTP/1\.1 (200 OK|4\d\d [\w -]+|503 [\w -]+)\r\n", head + b"\r\n"), head
        assert b"<script" not in said and b"alert" not in said
    assert b"Traceback" not in said
    assert ask(loop.server, "/healthz")[0] == 200


# -- a controller's process --------------------------------------------------------------------------


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts one, and returns its base URL."""
    with contextlib.ExitStack() as stack:

        def start(**about: Any) -> str:
            address = f"127.0.0.1:{free_port()}"
            Settings(2, 1, Command("train.py"), controller=address, **about).write(tmp_path)
            write_secret(tmp_path)
            command = [sys.executable, "-m", "ft_core.control", "--job-dir", str(tmp_path)]
            process = stack.enter_context(subprocess.Popen(command, env=environment()))
            stack.callback(process.kill)
            wait_for_value((tmp_path / "http").exists, True)
            return (tmp_path / "http").read_text().strip()

        yield start


def get(url: str) -> tuple[int, str]:
    try:
        with request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except request.HTTPError as error:
        return error.code, error.read().decode()


def test_a_job_that_forms(controller: Callable[..., str]) -> None:
    url = controller()
    assert url.startswith("http://127.0.0.1:")
    assert get(f"{url}/healthz") == (200, "ok\n") and get(f"{url}/readyz") == (503, "forming\n")
    assert 'ft_phase{phase="forming"} 1.0' in get(f"{url}/metrics")[1]
