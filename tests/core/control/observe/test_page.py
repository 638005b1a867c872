"""The job's page: what it says, who may do what, and that nobody who looks at it is waited for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import pytest
from browser import chromium, opened
from core.control.observe.test_metrics import recovered
from core.control.test_controller_machine import ControlPlane
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_for_value

from ft_core.control.observe import page as pages
from ft_core.control.observe.metrics import PAGES
from ft_core.control.observe.operator import Operator, token_of
from ft_core.control.observe.overview import Overview
from ft_core.control.observe.page import FILES, Page
from ft_core.control.observe.series import Series
from ft_core.protocol import http_loop
from ft_core.protocol.flight import FlightLog
from ft_core.protocol.http import Numbering
from ft_core.protocol.http_server import Server
from ft_core.protocol.messages import (
    Denied,
    DescribeFlight,
    DrainNode,
    Drains,
    Forgive,
    Forgiven,
    FromCtl,
    Inject,
    Injected,
    RoleFlight,
    ToCtl,
)

SECRET = b"the job's secret"
TOKEN = token_of(SECRET)
WEB = Path(pages.__file__).parent / "web"
XSS = "<img src=x onerror=alert(1)>"
EVENTS: list[dict[str, Any]] = [
    {"event": "started", "epoch": 0, "spent": {"now": "start_up"}},
    {
        "event": "resumed",
        "epoch": 1,
        "spent": {"now": "productive", "seconds": {"start_up": 5.0}, "step": 0.5},
    },
    {
        "event": "detected",
        "epoch": 2,
        "reason": f"role 1: {XSS}\nand more",
        "fault": "crashed",
        "node": "node1+abc",
        "spent": {"now": "decision", "seconds": {"start_up": 5.0, "productive": 10.0}, "version": 20},
    },
    {
        "event": "decided",
        "epoch": 2,
        "origin": "memory",
        "version": 20,
        "moved": {"1": "node2"},
        "spent": {"now": "restoring", "seconds": {"start_up": 5.0, "productive": 10.0, "decision": 1.0}},
    },
    {"event": "resumed", "epoch": 2, "spent": {"now": "productive", "seconds": {"productive": 12.0}}},
]


def write_events(job_dir: Path, events: list[dict[str, Any]]) -> None:
    always = {"term": 1, "roles": [], "reason": ""}
    lines = [always | {"monotonic": 10.0 + at, "time": 1e9 + at} | each for at, each in enumerate(events)]
    with (job_dir / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


class Site:
    """A server with a page, and an event loop with a machine, as a controller has them."""

    def __init__(self, job: ControlPlane, job_dir: Path) -> None:
        self.job, self.job_dir = job, job_dir
        self.loop = asyncio.new_event_loop()
        self.asked: list[FromCtl] = []
        """By the page, of the controller."""
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        machine = job.controller
        numbers = Numbering(self.loop, lambda: machine.view.numbers(job.now, 1e9 + job.now))
        overviews = Numbering(self.loop, lambda: machine.view.overview(job.now, 1e9 + job.now))
        address = "127.0.0.1:0"

        def site(url: str) -> Page:
            return Page(job_dir, SECRET, address, url, overviews, self._ask)

        self.server = Server(address, numbers, PAGES, site)
        self.server.start(job_dir)
        wait_for_value((job_dir / "page").exists, True)

    async def _ask(self, question: FromCtl) -> concurrent.futures.Future[ToCtl]:
        self.asked.append(question)
        found: concurrent.futures.Future[ToCtl] = concurrent.futures.Future()
        match question:
            case Inject(role, node):
                killed = node if role is None else role
                assert killed is not None
                found.set_result(Injected(killed))
            case DrainNode("node2"):
                found.set_result(Drains("node2", 1, []))
            case DrainNode(node):
                found.set_result(Denied(f"node {node} cannot be drained"))
            case Forgive(node):
                found.set_result(Forgiven(node, 1))
            case DescribeFlight(role=0):
                found.set_result(RoleFlight(0, FlightLog(0, 2, 2, 10, "S", False, (), ())))
            case DescribeFlight(role):
                found.set_result(Denied(f"role {role} has no live node"))
        return found

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def get(self, path: str) -> Any:
        code, body = self.ask(path)
        assert code == 200, body
        return json.loads(body)

    def act(self, action: object, **headers: str) -> tuple[int, Any]:
        given = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"} | headers
        body = action if isinstance(action, bytes) else msgspec.json.encode(action)
        code, said = self.ask("/api/act", "POST", body, **{k: v for k, v in given.items() if v})
        return code, json.loads(said)

    def close(self) -> None:
        self.server.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextlib.contextmanager
def streamed(site: Site) -> Iterator[Iterator[tuple[str, Any]]]:
    """Events as they come: a name, and what it tells."""
    with socket.create_connection(("127.0.0.1", site.server.server_port), 30) as client:
        client.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")

        def events() -> Iterator[tuple[str, Any]]:
            text = client.makefile("r", encoding="utf-8", newline="\n")
            name = ""
            for line in text:
                if line.startswith("event: "):
                    name = line.removeprefix("event: ").strip()
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

        yield events()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    write_events(tmp_path, EVENTS)
    found = Site(recovered(), tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = Site(recovered(), tmp_path_factory.mktemp("job"))
    yield found
    found.close()


# -- what it says ------------------------------------------------------------------------------------


def test_all_is_said_once_and_then_what_changes(site: Site) -> None:
    with streamed(site) as events:
        name, state = next(events)
        assert name == "state" and state["job"]["step"] == 2 and state["job"]["phase"] == "running"
        assert set(state["nodes"]) == {"node0", "node2"}
        domain, kind, roles, marks, step, _, strikes, avoided, draining = state["nodes"]["node2"]
        assert (domain, kind, roles, marks, step) == ("node2", "well", "1", ".", 1)
        assert (strikes, avoided, draining) == (0, False, False)
        name, news = next(events)
        assert name == "news" and "nodes" not in news and "gone" not in news
        job = site.job

        def beats() -> None:
            job.wait(1.0)
            job.all_step(3)

        site.loop.call_soon_threadsafe(beats)
        for _, news in events:
            if news["job"]["step"] == 3:
                break
        assert news["sample"][4] == 3


def test_while_nobody_looks_there_are_samples_and_nothing_else(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Overview] = []
    rows = Overview.rows
    monkeypatch.setattr(Overview, "rows", lambda self: made.append(self) or rows(self))
    sampled = threading.Semaphore(0)
    add = Series.add
    monkeypatch.setattr(Series, "add", lambda self, sample: (add(self, sample), sampled.release())[0])
    assert sampled.acquire(timeout=60) and sampled.acquire(timeout=60) and not made
    with streamed(site) as events:
        assert len(next(events)[1]["series"]) > 2 and made  # as of before, too


def test_failures_and_recoveries_are_told_with_their_phases(site: Site) -> None:
    with streamed(site) as events:
        told = next(found for _, found in events if found.get("recoveries"))
    (recovery,) = told["recoveries"]
    assert recovery["reason"].startswith("role 1: <img") and recovery["seconds"] == 2.0
    assert (recovery["node"], recovery["origin"], recovery["version"]) == ("node1+abc", "memory", 20)
    assert recovery["parts"] == {"decision": 1.0, "restoring": 1.0} and recovery["moved"] == {"1": "node2"}
    assert [event["event"] for event in told["events"]][:2] == ["resumed", "decided"]
    assert [phase[0] for phase in told["phases"]] == [
        "start_up",
        "productive",
        "decision",
        "restoring",
        "productive",
    ]
    write_events(site.job_dir, [{"event": "waiting", "epoch": 3, "reason": "no worker"}])
    with streamed(site) as events:
        next(found for _, found in events if (found.get("events") or [{}])[0].get("event") == "waiting")


def test_the_loss_is_over_time_where_it_is_told(site: Site) -> None:
    with streamed(site) as events:
        assert next(events)[1]["series"][-1][5] is None

        def told() -> None:
            site.job["node2"].loss = 2.5
            site.job["node2"].beat()
            site.job["node0"].beat()  # and another does not tell it

        site.loop.call_soon_threadsafe(told)
        assert next(news for _, news in events if news["sample"][5] == 2.5)


def test_who_holds_the_others_up_is_named(site: Site) -> None:
    site.job.controller._hangs._suspects = (1,)
    with streamed(site) as events:
        job = next(found["job"] for _, found in events if found["job"]["suspected"])
    assert (job["suspected"], job["suspects"]) == (1, [[1, "node2"]])


def test_a_node_is_shown_with_its_roles_and_what_would_be_lost(site: Site) -> None:
    found = site.get("/api/node?name=node0")
    assert found["here"] and [role["role"] for role in found["roles"]] == [0]
    assert found["loss"]["roles"] == [0] and found["loss"]["policy"] == "wait" and found["loss"]["ready"] == 0
    assert site.ask("/api/node?name=node9")[0] == 404 == site.ask("/api/node")[0]


def test_a_flight_record_is_asked_of_the_agent(site: Site) -> None:
    assert site.get("/api/flight?role=0")["state"] == "S"
    assert site.ask("/api/flight?role=7") == (404, b'{"error":"role 7 has no live node"}')
    assert site.ask("/api/flight?role=<b>")[0] == 400 == site.ask("/api/flight?role=%D9%A1")[0]
    assert site.asked == [DescribeFlight(0), DescribeFlight(7)]


def test_a_disk_that_hangs_holds_up_one_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_core.protocol.http.SECONDS", 0.2)
    hangs = site.job_dir / "hangs"
    hangs.mkdir()
    os.mkfifo(hangs / "role-1-77.txt")  # to open it takes until somebody writes
    for _ in range(5):
        assert site.ask("/api/stacks")[0] == 503
    assert len([each for each in threading.enumerate() if each.name == "ft-page-file"]) == 1
    assert site.get("/api/ledger") == []
    (hangs / "role-1-77.txt").write_bytes(b"where it is")
    (hangs / "role-1-77.txt").unlink()
    wait_for_value(lambda: site.ask("/api/stacks"), (200, b"[]"))


def test_stacks_and_ledger_are_read_where_they_are(site: Site) -> None:
    assert site.get("/api/stacks") == [] == site.get("/api/ledger")
    hangs = site.job_dir / "hangs"
    hangs.mkdir()
    (hangs / "role-1-77.txt").write_text(XSS)
    (hangs / "other.txt").write_text("no stack")
    (hangs / "role-2-78.txt").write_bytes(b"x" * (1 << 20))
    found = {each["role"]: each for each in site.get("/api/stacks")}
    assert found[1]["text"] == XSS and found[1]["pid"] == 77 and len(found[2]["text"]) == pages.STACK
    step = {"epoch": 1, "since": 0, "step": 1, "samples": {"0": [[0, 4]]}, "waiting": [], "next": 4}
    lines = [json.dumps(step | {"step": number}) for number in range(1, 3000)]
    (site.job_dir / "ledger.jsonl").write_text('{"epoch": 1}\n' + "\n".join(lines) + "\ntorn")
    assert [each["step"] for each in site.get("/api/ledger")] == list(range(2999, 2999 - pages.STEPS, -1))


def test_numbers_over_time_are_of_bounded_size() -> None:
    series = Series(10, 1.0)
    for second in range(1000):
        series.add((float(second), None))
    assert len(series.samples) <= 10 and series.every == 128.0 and series.samples[0] == (0.0, None)
    assert not series.add((999.5, None))
    series.begin([(-5.0, 1.0)] * 30)
    assert len(series.samples) <= 10


# -- who may do what ---------------------------------------------------------------------------------


def test_the_address_with_the_token_is_the_owners(site: Site) -> None:
    file = site.job_dir / "page"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == f"{site.server.url}/#token={TOKEN}\n"
    assert SECRET.decode() not in TOKEN and token_of(b"another") != TOKEN


ACTIONS = [{"do": "kill", "role": 0}, {"do": "kill", "node": "node0"}, {"do": "forgive", "node": "node1"}]
ACTIONS.append({"do": "drain", "node": "node2"})


@pytest.mark.parametrize("action", ACTIONS)
def test_who_has_no_token_changes_nothing(site: Site, action: dict[str, Any]) -> None:
    for token in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}0", TOKEN, "Bearer é"):
        assert site.act(action, Authorization=token)[0] == 401
        assert site.ask("/api/may", Authorization=token)[0] == 401
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        assert site.ask("/api/act", method)[0] == 405
    assert not site.asked


@pytest.mark.parametrize("action", ACTIONS)
def test_who_has_the_token_is_asked_twice(site: Site, action: dict[str, Any]) -> None:
    assert site.ask("/api/may", Authorization=f"Bearer {TOKEN}")[0] == 200
    code, said = site.act(action)
    assert code == 202 and not site.asked and (said["loss"] is None) == (action.get("node") != "node0")
    assert site.act({**action, "confirm": "another"})[0] == 202
    other = next(each for each in ACTIONS if each != action)
    assert site.act({**other, "confirm": said["confirm"]})[0] == 202  # meant for something else
    assert not site.asked
    code, said = site.act(action)
    code, done = site.act({**action, "confirm": said["confirm"]})
    done_by = {"kill": "killed", "forgive": "forgiven node1: 1", "drain": "draining node2: 1 roles move"}
    assert code == 200 and done["done"].startswith(done_by[action["do"]])
    assert len(site.asked) == 1
    assert site.act({**action, "confirm": said["confirm"]})[0] == 202  # a word is good for once
    assert len(site.asked) == 1


def test_before_a_node_is_drained_it_is_said_what_that_takes_and_then_why_it_cannot_be(site: Site) -> None:
    drain = {"do": "drain", "node": "node0"}
    code, said = site.act(drain)
    assert code == 202 and said["says"] == "take node node0 out" and said["moves"]["roles"] == 1
    code, said = site.act({**drain, "confirm": said["confirm"]})
    assert (code, said) == (409, {"error": "node node0 cannot be drained"})


def test_what_is_not_there_is_not_named(site: Site) -> None:
    for action in (
        {"do": "kill", "node": XSS},
        {"do": "kill", "role": 99},
        {"do": "forgive", "node": "x"},
        {"do": "drain", "node": "x"},
    ):
        code, said = site.act(action)
        assert (code, said) == (404, {"error": "there is no such node or role"})
    assert site.act({"do": "kill", "role": 0, "node": "node0"})[0] == 404 == site.act({"do": "kill"})[0]
    assert not site.asked


def test_what_another_site_sends_is_refused(site: Site) -> None:
    kill = ACTIONS[0]
    own = site.server.url
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": own.replace("http://", "http://evil.example@")},
        {"Origin": "http://[::1"},
        {"Sec_Fetch_Site": "cross-site"},
    ):
        assert site.act(kill, **headers)[0] == 403
    assert site.act(kill, Content_Type="text/plain")[0] == 415
    assert site.act(kill, Origin=own)[0] == 202


def test_a_name_that_others_can_bind_to_this_address_is_refused(site: Site) -> None:
    for host in (
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "ft.training.svc.evil.example",
        "evil.notlocal",
        "",
        "[::1",
    ):
        for path in ("/", "/api/stream", "/api/node?name=node0", "/page.js"):
            code, said = site.ask(path, Host=host)
            assert code in (400, 421) and b"evil" not in said
    ours = ["127.0.0.1", "localhost:1", "[::1]:9", "node17", "a.localhost", socket.gethostname()]
    ours += ["ft.training.svc", "FT.training.svc:29480", "ft.training.svc.cluster.local", "ft.training.svc."]
    ours += ["node17.local", "ip-10-0-0-1.ec2.internal"]
    for host in ours:
        assert site.ask("/", Host=host)[0] == 200
    assert site.ask("/metrics", Host="prometheus.example")[0] == 200


def test_a_confirmation_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(TOKEN, "127.0.0.1:0")
    word = operator.ask("x")
    monkeypatch.setattr("ft_core.control.observe.operator.CONFIRM", -1.0)
    assert not operator.confirmed("x", word)
    for _ in range(1000):
        operator.ask("x")
    assert len(operator._asked) <= 64


# -- whatever is sent --------------------------------------------------------------------------------

TEXT = st.text(max_size=60) | st.sampled_from([XSS, "../../secret", "node0", "node0\r\nX: y", "\x00"])
QUERIES = st.lists(st.tuples(st.sampled_from(["name", "role", "confirm", "x"]), TEXT), max_size=3)
PATHS = st.sampled_from(
    [
        "/",
        "/api/node",
        "/api/flight",
        "/api/stacks",
        "/api/ledger",
        "/api/act",
        "/api/may",
        "/../secret",
        "//",
    ]
) | TEXT.map(lambda text: f"/{text}")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
BODIES = (
    st.binary(max_size=200)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {"do": st.sampled_from(["kill", "forgive", "drain"]) | TEXT},
        optional={"role": VALUES, "node": VALUES, "confirm": VALUES, "x": VALUES},
    ).map(lambda value: json.dumps(value).encode())
    | st.just(b"[" * 4000)
    | st.just(b" " * 5000)
)
FUZZ = settings(max_examples=150, suppress_health_check=list(HealthCheck))


@FUZZ
@given(
    path=PATHS, query=QUERIES, headers=st.dictionaries(st.sampled_from(["Origin", "Host", "Cookie"]), TEXT)
)
def test_whatever_is_asked_for_is_answered_without_repeating_it(
    fuzzed: Site, path: str, query: list[tuple[str, str]], headers: dict[str, str]
) -> None:
    target = f"{quote(path)}?{urlencode(query)}"
    clean = {k: v.encode("latin-1", "ignore").decode("latin-1") for k, v in headers.items()}
    clean = {k: re.sub(r"[\r\n\x00]", "", v).strip() for k, v in clean.items()}
    code, said = fuzzed.ask(target, **clean)
    assert code in (200, 400, 401, 404, 405, 421)
    if code != 200 or path not in ("/",):
        assert b"onerror" not in said and b"secret" not in said.replace(b"the secret", b"")
    assert not [each for each in fuzzed.asked if not isinstance(each, DescribeFlight)]


@FUZZ
@given(body=BODIES, allowed=st.booleans())
def test_whatever_is_to_be_done_nothing_is_done_that_was_not_confirmed(
    fuzzed: Site, body: bytes, allowed: bool
) -> None:
    code, said = fuzzed.act(body, Authorization=f"Bearer {TOKEN}" if allowed else "Bearer no")
    assert code in ((400, 404, 202, 413) if allowed else (401,))
    assert "onerror" not in json.dumps(said)
    assert not [each for each in fuzzed.asked if not isinstance(each, DescribeFlight)]


# -- who does not read -------------------------------------------------------------------------------


def test_who_does_not_take_what_it_is_sent_is_dropped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the controller's event loop is as quick as ever."""
    much = {"padding": "x" * (16 << 20)}  # more than the kernel keeps
    monkeypatch.setattr(pages, "_happened", lambda told: {"recoveries": told.recoveries, **much})
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2026)
    with client, monkeypatch.context() as patch:
        patch.setattr(http_loop, "TAKES", 0.3)
        client.connect(("127.0.0.1", site.server.server_port))
        # Both ports: those that others on this machine connect from may be the same.
        ends = [f"0100007F:{port:04X}" for port in (site.server.server_port, client.getsockname()[1])]

        def served() -> int:
            lines = Path("/proc/net/tcp").read_text().splitlines()
            return sum(line.split()[1:4] == [*ends, "01"] for line in lines)

        assert served() == 1
        client.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1) == b"H"  # and no more
        assert site.ask("/healthz") == (200, b"ok\n")
        wait_for_value(served, 0)
    with streamed(site) as events:
        assert next(events)[0] == "state"


def test_who_is_far_behind_is_told_no_more(site: Site) -> None:
    """What waits for one client is bounded, whatever it takes."""

    async def many() -> tuple[int, bool]:
        page = Page(site.job_dir, SECRET, "127.0.0.1:0", "http://x", _never(), site._ask)
        listener: asyncio.Queue[bytes | None] = asyncio.Queue(pages.BEHIND)
        page._listeners.add(listener)
        for _ in range(10 * pages.BEHIND):
            page._say(b"x")
        found = [listener.get_nowait() for _ in range(listener.qsize())]
        return len(found), found[-1] is None and not page._listeners

    assert asyncio.run(many()) == (pages.BEHIND, True)


def _never() -> Any:
    return None


def test_a_controller_that_is_busy_is_not_shown_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_core.protocol.http.SECONDS", 0.1)
    monkeypatch.setattr("ft_core.protocol.http.FRESH", 0.0)
    goes_on = threading.Event()
    site.loop.call_soon_threadsafe(goes_on.wait)
    try:
        assert site.ask("/api/node?name=node0")[0] == 503
        assert site.act(ACTIONS[0])[0] == 503
        assert site.ask("/")[0] == 200
    finally:
        goes_on.set()


def test_a_large_job_costs_the_controller_little(tmp_path: Path) -> None:
    """Gathered by reference: what is per role is looked at elsewhere."""
    job = ControlPlane(nodes=24, nproc=8)
    taken = job.controller.view.overview(job.now, job.now)
    beats = {id(node.beats) for node in job.controller.cluster.nodes.values()}
    assert {id(node.roles) for node in taken.nodes} == beats
    assert len(taken.rows()) == 24 and all(len(row.marks) == 8 for row in taken.rows().values())


# -- in a browser ------------------------------------------------------------------------------------


def test_a_thousand_nodes_in_a_browser(tmp_path: Path) -> None:
    """With the keyboard, on a phone; and what a job says is text, whatever it says."""
    write_events(tmp_path, EVENTS)
    errors: list[str] = []
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(chromium())
        site = Site(ControlPlane(nodes=1000, spares=20, nproc=2), tmp_path)
        stack.callback(site.close)
        page = stack.enter_context(opened(browser, site.server.url, errors))
        cells = page.locator(".node")
        wait_for_value(cells.count, 1020)
        names = cells.evaluate_all("cells => cells.map(cell => cell.dataset.name)")
        assert names == [f"node{number}" for number in range(1020)]
        columns = cells.evaluate_all("c => c.findIndex(cell => cell.offsetTop > c[0].offsetTop)")
        cells.first.focus()
        for key, at in {"ArrowRight": 1, "ArrowDown": 1 + columns, "ArrowLeft": columns, "End": 1019}.items():
            page.keyboard.press(key)
            assert page.evaluate("document.activeElement.dataset.name") == f"node{at}"
        assert page.locator(".node[tabindex='0']").count() == 1
        assert page.locator("#hang").is_hidden()
        site.job.controller._hangs._suspects = (0,)
        page.get_by_role("button", name="role 0 on node0").click()
        page.locator("dialog#node").get_by_text("main thread: waits").wait_for()
        page.keyboard.press("Escape")
        site.loop.call_soon_threadsafe(site.job["node7"].hangs_up)
        site.loop.call_soon_threadsafe(site.job.wait, 20.0)
        page.locator(".node.s-lost[data-name='node7']").wait_for()
        assert page.locator("#summary").text_content().startswith("1,020 nodes: ")
        page.locator("#find").fill("node99")
        shown = page.locator(".node:visible")
        wait_for_value(shown.count, 11)
        page.locator(".recovery summary").get_by_text(XSS).wait_for()
        assert page.locator("img").count() == 0
        phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
        page = stack.enter_context(opened(browser, site.server.url, errors, **phone))
        wait_for_value(page.locator(".node").count, 1020)
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        page.locator(".node").nth(3).tap()
        page.locator("dialog#node .loss").wait_for()
        assert page.locator("#node-title").text_content() == "node3"
    assert not errors


# -- its files ---------------------------------------------------------------------------------------


def test_all_files_are_served_and_no_others(site: Site) -> None:
    there = {str(path.relative_to(WEB)) for path in WEB.rglob("*") if path.is_file()}
    assert there == {*FILES, "uplot/LICENSE"}
    for name in FILES:
        assert site.ask(f"/{name}") == (200, (WEB / name).read_bytes())
    assert site.ask("/")[1] == (WEB / "index.html").read_bytes()
    assert site.ask("/uplot/LICENSE")[0] == 404 == site.ask("/..%2fpage.py")[0]


def test_what_a_browser_may_do_with_it(site: Site) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", site.server.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        headers = connection.getresponse().headers
    policy = dict(each.strip().split(" ", 1) for each in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" == policy["connect-src"]
    assert policy["frame-ancestors"] == "'none'" and "unsafe" not in headers["Content-Security-Policy"]
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")


def test_text_comes_in_as_text_and_nothing_from_elsewhere() -> None:
    """The policy would refuse it as well."""
    for path in WEB.rglob("*"):
        if path.suffix not in (".js", ".html", ".css", ".svg"):
            continue
        text = path.read_text()
        for bad in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert bad not in text, path
        if path.parent == WEB:
            assert not re.search(r"\son\w+\s*=|style=|javascript:", text.replace("onclick:", "")), path
            assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}, path
