"""Who leads a job: the rules of leases and terms, etcd, Kubernetes, and the thread that keeps a lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import etcd_members
import pytest
from etcd_members import Members
from msgspec.structs import replace
from ports import free_port

from ft_core import leadership
from ft_core.control.events import LauncherGone, Record
from ft_core.control.lead import lease_renewer as keeping
from ft_core.control.lead.lease_renewer import Granted, LeaseRenewer, Over
from ft_core.control.shell import LeaderContext, Shell
from ft_core.errors import ConfigError
from ft_core.leadership import etcd, http, kubernetes, lease
from ft_core.leadership.base import Fixed, Grant, Leader, Leadership, LeadershipError, Notes
from ft_core.leadership.http import Client
from ft_core.leadership.kubernetes import Kubernetes
from ft_core.leadership.lease import DRIFT, Follower, Lease, first_epoch
from ft_core.node.link import leader_watcher as looking
from ft_core.node.link.leader_watcher import LeaderWatcher
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.goodput import Cause, Spent
from ft_core.settings import Command, Settings, read_secret, write_secret

SECONDS = lease.SECONDS

# -- leases and terms ----------------------------------------------------------------------------------


def test_a_lease_ends_here_before_it_ends_where_it_is_kept() -> None:
    held = Lease(1, seconds=2.0, asked=10.0)
    assert held.holds(10.0 + 2.0 * (1 - DRIFT) - 0.01) and not held.holds(10.0 + 2.0 * (1 - DRIFT))
    held.renewed(11.0)
    held.renewed(10.5)  # an answer that was overtaken
    assert held.holds(12.7) and not held.holds(12.8)
    held.ends()
    held.renewed(12.0)
    assert not held.holds(12.0)


def test_the_lease_of_a_fixed_controller_does_not_end() -> None:
    assert Lease(1).holds(1e9)


def test_an_agent_obeys_for_a_while_after_a_look() -> None:
    agent = Follower(trust=2.0)
    agent.looked(began=5.0, term=3)
    agent.connected(3)
    assert not agent.obeys(5.1)  # whoever it is has not said in which term it leads
    agent.led_by(3)
    assert agent.obeys(6.9) and not agent.obeys(7.0) and not agent.deposed
    agent.looked(began=6.5, term=3)
    assert agent.obeys(8.4)


def test_an_agent_does_not_wait_for_a_leader_that_is_mute_and_leads_no_more() -> None:
    """Found by the simulator: the leader was stopped before its first word, another one led, and those that
    had reached the first stayed with it, until they were taken for lost."""
    agent = Follower(trust=2.0)
    agent.looked(5.0, 3)
    agent.connected(3)
    assert not agent.deposed
    agent.looked(5.5, 4)
    assert agent.deposed
    fixed = Follower()
    fixed.connected(0)
    fixed.led_by(1)
    assert not fixed.deposed


def test_an_agent_that_knows_of_a_newer_term_obeys_no_older_one() -> None:
    agent = Follower(trust=2.0)
    agent.looked(5.0, 3)
    agent.led_by(3)
    agent.looked(5.5, 4)
    assert agent.deposed and not agent.obeys(5.6)
    agent.connected(4)
    assert not agent.deposed
    agent.led_by(4)
    assert agent.obeys(5.7)
    agent.looked(5.8, 3)  # of a server that is behind: it says nothing of what there was at 5.8
    assert agent.term == 4 and agent.obeys(7.4) and not agent.obeys(7.5)


def test_a_term_that_only_its_leader_has_told_of_waits_for_a_look() -> None:
    agent = Follower(trust=2.0)
    agent.looked(5.0, 3)
    agent.led_by(4)
    assert not agent.obeys(5.1) and not agent.deposed
    agent.looked(5.2, 4)
    assert agent.obeys(5.3)


def test_every_epoch_of_a_term_is_newer_than_all_of_those_before() -> None:
    assert first_epoch(1) == 1
    assert first_epoch(3) > first_epoch(2) + lease.EPOCHS - 1


def test_a_new_leader_decides_when_nobody_obeys_another() -> None:
    every = lease.look_every(nodes=12_500, per_second=1000)
    assert every == 12.5 and lease.look_every(4, 1000) == lease.LOOK
    # By an agent's clock that is slow, and a leader's that is fast, each by half of what two may differ.
    assert lease.settled_after(every) / (1 + DRIFT / 2) >= lease.trust(every) / (1 + DRIFT / 2)


def test_where_it_can_be_kept() -> None:
    assert isinstance(leadership.at("10.0.0.1:1", b"secret", 2), Fixed)
    found = leadership.at("etcd://a:2379,b:2379/jobs/llm", b"secret", 2)
    assert found.place == "etcd://a:2379,b:2379/jobs/llm" and found.near == "a:2379"
    for wrong in ("etcd://a/llm", "etcd://a:1", "zookeeper://a:1/x", "kubernetes://Name/x", "kubernetes://x"):
        with pytest.raises(ConfigError, match="--ft-leadership"):
            leadership.at(wrong, b"secret", 2)
    with pytest.raises(ConfigError, match="in no pod"):
        leadership.at("kubernetes://default/llm", b"secret", 2)


# -- where leases are kept -----------------------------------------------------------------------------


class ApiServer(ThreadingHTTPServer):
    """As much of Kubernetes' API server as there is of Leases: optimistic concurrency, and who may ask."""

    daemon_threads = True

    def __init__(self, token: str) -> None:
        self.token, self.objects, self.version = token, {}, 0
        self.lock = threading.Lock()
        self.fails = False
        self.odd: bytes | None = None
        """What it answers instead, whatever it is asked."""
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode())

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"kind": "Status", "code": status, "message": message})

    def _handle(self) -> None:
        server, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = "/apis/coordination.k8s.io/v1/namespaces/train/leases"
        with server.lock:
            if server.odd is not None:
                self._send(200, server.odd)
            elif server.fails:
                self._refuse(503, "etcdserver: no leader")
            elif self.headers.get("Authorization") != f"Bearer {server.token}":
                self._refuse(401, "Unauthorized")
            elif self.path != place and not self.path.startswith(f"{place}/"):
                self._refuse(404, "the server could not find the requested resource")
            else:
                self._serve(self.path.removeprefix(place).strip("/"), body)

    def _send(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _handle  # noqa: N815

    def _serve(self, name: str, body: bytes) -> None:
        server = self.server
        if self.command == "GET":
            found = server.objects.get(name)
            return self._answer(200, found) if found else self._refuse(404, f"leases {name} not found")
        wanted = json.loads(body)
        spec, metadata = wanted["spec"], wanted["metadata"]
        assert wanted["apiVersion"] == "coordination.k8s.io/v1" and wanted["kind"] == "Lease"
        assert isinstance(spec["leaseDurationSeconds"], int) and isinstance(spec["leaseTransitions"], int)
        for moment in (spec["acquireTime"], spec["renewTime"]):
            time.strptime(moment, "%Y-%m-%dT%H:%M:%S.%fZ")
        assert all(isinstance(text, str) for text in metadata.get("annotations", {}).values())
        known = server.objects.get(metadata["name"])
        if self.command == "POST" and known is not None:
            return self._refuse(409, "already exists")
        if self.command == "PUT":
            if known is None:
                return self._refuse(404, "not found")
            if metadata["resourceVersion"] != known["metadata"]["resourceVersion"]:
                return self._refuse(409, "the object has been modified; please apply your changes")
        server.version += 1
        wanted["metadata"] = {**metadata, "resourceVersion": str(server.version), "uid": "a-uid"}
        server.objects[metadata["name"]] = wanted
        return self._answer(201 if self.command == "POST" else 200, wanted)


class Kept:
    """Somewhere to keep a lease: makes clients of it."""

    def client(self, job: str = "a job") -> Leadership:
        raise NotImplementedError

    def delete(self) -> None:
        """As a person does who does not know better."""
        raise NotImplementedError

    def forge(self, address: str, over: int | None = None) -> None:
        """Say who leads, or that the job is over, as who can write there and does not have the job's key."""
        raise NotImplementedError


class KeptInEtcd(Kept):
    def __init__(self, members: Members, name: str) -> None:
        self.members, self.name = members, name

    def client(self, job: str = "a job") -> Leadership:
        return self.members.leadership(self.name, job)

    def delete(self) -> None:
        for key in ("leader", "job"):
            self.members.leadership(self.name)._ask("kv/deleterange", {"key": _base64(f"{self.name}/{key}")})

    def forge(self, address: str, over: int | None = None) -> None:
        intruder = self.members.leadership(self.name, "a key of his own")
        for key, value in (
            (f"{self.name}/leader", etcd._Leads(9, address)),
            (f"{self.name}/job", etcd.Job("its id", 9, over=over)),
        ):
            if over is None or key.endswith("job"):
                put = intruder._put(_base64(key), value)
                intruder._ask("kv/txn", {"success": [put]})


class KeptInKubernetes(Kept):
    def __init__(self, server: ApiServer, account: Path) -> None:
        self.server, self.account = server, account

    def client(self, job: str = "a job") -> Kubernetes:
        near = ("127.0.0.1", self.server.server_address[1])
        client = Client([near], None, lambda: kubernetes.bearer(self.account))
        return Kubernetes("train", "llm", job, 3, client, near)

    def delete(self) -> None:
        self.server.objects.clear()

    def forge(self, address: str, over: int | None = None) -> None:
        found = self.server.objects["llm"]
        notes = found["metadata"]["annotations"] | ({} if over is None else {"ft-training/over": str(over)})
        self.server.version += 1
        about = {"annotations": notes, "resourceVersion": str(self.server.version)}
        self.server.objects["llm"] = {
            "metadata": found["metadata"] | about,
            "spec": found["spec"] | ({"holderIdentity": address} if over is None else {}),
        }


def _base64(text: str) -> str:
    import base64

    return base64.b64encode(text.encode()).decode()


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    with Members() as found:
        yield found


@contextmanager
def api_server(tmp_path: Path) -> Iterator[KeptInKubernetes]:
    (tmp_path / "token").write_text("a token\n")
    server = ApiServer("a token")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield KeptInKubernetes(server, tmp_path)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(params=[pytest.param("etcd", marks=etcd_members.needed), "kubernetes"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    if request.param == "etcd":
        yield KeptInEtcd(request.getfixturevalue("members"), request.node.name)
    else:
        with api_server(tmp_path) as found:
            yield found


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no lease runs out, and no request is asked twice, because the machine was busy or stood still;
    a test sets `short` where a lease is to run out."""
    monkeypatch.setattr(lease, "SECONDS", 30.0)
    monkeypatch.setattr(http, "TRY", 30.0)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that look, and keep leases, end with their test: they would as the process does."""
    over = threading.Event()
    for module in (keeping, looking):
        monkeypatch.setattr(module, "gone", over.is_set)
    yield
    over.set()
    for thread in threading.enumerate():
        if thread.name in ("ft-leader-watcher", "ft-lease"):
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[Leadership, str], Any]:
    """Acquires for as long as jobs do."""

    def acquire(client: Leadership, address: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(lease, "SECONDS", SECONDS)
            return client.acquire(address, 0)

    return acquire


def acquired(client: Leadership, address: str, seconds: float = 60) -> Any:
    """Once nobody else has it."""
    end = time.monotonic() + seconds
    while (grant := client.acquire(address, 0)) is None:
        assert time.monotonic() < end, f"nobody gives it up: {client.look()}"
        time.sleep(0.05)
    return grant


def test_one_leads_at_a_time_and_terms_grow(kept: Kept) -> None:
    one, other = kept.client(), kept.client()
    assert one.look() == Leader() and other.look() == Leader()
    first = one.acquire("one:1", 0)
    assert first is not None and first.term == 1 and first.seconds >= lease.SECONDS
    assert other.acquire("other:1", 0) is None and other.look() == Leader(1, "one:1")
    for _ in range(3):
        assert one.renew(first)
    assert one.resign(first)
    second = other.acquire("other:1", 0)
    assert second is not None and second.term == 2 and one.look() == Leader(2, "other:1")
    assert not one.renew(first) and not one.note(first, Notes()) and not one.resign(first, 7)
    assert one.look().over is None


def test_who_does_not_renew_loses_it(kept: Kept, short: Callable[[Leadership, str], Any]) -> None:
    one, other = kept.client(), kept.client()
    asked, other_looked = lease.clock(), other.look()
    assert other_looked == Leader()
    first = short(one, "one:1")
    held = Lease(first.term, first.seconds, asked)
    second = acquired(other, "other:1")
    assert second.term == 2 and not held.holds(lease.clock())
    assert not one.renew(first) and one.look() == Leader(2, "other:1")


def test_what_a_leader_leaves_is_its_jobs(kept: Kept) -> None:
    one = kept.client()
    first = one.acquire("one:1", 0)
    assert first.notes == Notes()
    assert one.note(first, Notes({"resumed": 4}, failed=1)) and one.renew(first) and one.resign(first)
    second = kept.client().acquire("two:1", 0)
    assert second.notes == Notes({"resumed": 4}, failed=1)
    assert kept.client().look() == Leader(2, "two:1")


def test_another_job_of_the_same_name_finds_no_more_than_the_term(kept: Kept) -> None:
    one = kept.client()
    first = one.acquire("one:1", 0)
    assert one.note(first, Notes({"resumed": 4})) and one.resign(first)
    second = kept.client("another job").acquire("two:1", 0)
    assert (second.term, second.notes) == (2, Notes())


def test_a_job_that_is_over_is_over_for_all_and_may_begin_anew(kept: Kept) -> None:
    one, other = kept.client(), kept.client()
    first = one.acquire("one:1", 0)
    assert one.note(first, Notes({"resumed": 4})) and one.resign(first, 3)
    assert other.look() == Leader(1, "", 3)
    again = other.acquire("other:1", 0)
    assert (again.term, again.notes) == (2, Notes()) and one.look() == Leader(2, "other:1", None)


def test_a_job_has_one_id_until_it_is_over(kept: Kept) -> None:
    one = kept.client()
    first = one.acquire("one:1", 0)
    assert len(first.job) == 16 and one.look().job == first.job
    assert one.resign(first)
    second = kept.client().acquire("two:1", 0)
    assert second.job == first.job
    assert kept.client().resign(second, 0)
    third = one.acquire("one:1", 0)
    assert third.job != first.job and one.look().job == third.job


def test_a_job_keeps_its_id_where_what_was_kept_is_lost(kept: Kept) -> None:
    first = kept.client().acquire("one:1", 0)
    kept.delete()
    second = kept.client().acquire("two:1", 7, first.job)
    assert (second.job, second.term) == (first.job, 8)


def test_who_can_write_there_neither_ends_a_job_nor_leads_it(kept: Kept) -> None:
    one = kept.client()
    first = one.acquire("one:1", 0)
    kept.forge("", over=0)
    with contextlib.suppress(LeadershipError):
        assert one.look().over is None
    kept.forge("elsewhere:1")
    with pytest.raises(LeadershipError, match="'elsewhere:1' leads there, of a job with another secret"):
        one.look()
    kept.delete()
    assert one.acquire("one:1", 0, first.job).job == first.job and one.look() == Leader(1, "one:1")


def test_terms_go_on_where_what_was_kept_is_lost(kept: Kept) -> None:
    """An agent that knows of an older term has told the new leader, which resigns: `Resign`."""
    one = kept.client()
    assert one.acquire("one:1", 6).term == 7
    kept.delete()
    two = kept.client()
    assert two.acquire("two:1", 0).term == 1
    kept.delete()
    assert kept.client().acquire("two:1", floor=7).term == 8


def test_a_leader_notices_that_its_lease_was_taken_away(kept: Kept) -> None:
    one, other = kept.client(), kept.client()
    first = one.acquire("one:1", 0)
    kept.delete()
    assert acquired(other, "other:1").term >= 1
    assert not one.renew(first) and not one.note(first, Notes())


def until_it_answers(client: Leadership) -> Leader:
    """Members choose a leader of their own first."""
    end = time.monotonic() + 60
    while True:
        try:
            return client.look()
        except LeadershipError:
            assert time.monotonic() < end
            time.sleep(0.1)


@etcd_members.needed
def test_of_three_members_one_may_die(
    short: Callable[[Leadership, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Members() as members:
        one = members.leadership("a job of its own")
        assert short(one, "one:1").term == 1
        members.kill(0)
        assert until_it_answers(one).term == 1
        second = acquired(members.leadership("a job of its own"), "two:1")
        assert second.term == 2 and until_it_answers(one) == Leader(2, "two:1")
        members.kill(1)
        monkeypatch.setattr(http, "TRY", 1.0)  # one is no majority, and takes its time to say so
        late = members.leadership("a job of its own")
        with pytest.raises(LeadershipError, match="etcd://"):
            late.renew(second)
        members.start(1)
        assert until_it_answers(late).term == 2


@etcd_members.needed
def test_etcd_is_asked_by_name_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    may = {"permType": "READWRITE", "key": _base64("jobs/"), "range_end": _base64("jobs0")}
    with Members(1) as members:
        admin = members.leadership("jobs/llm")
        for what, body in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "ft", "password": "with:a:colon"}),
            ("role/add", {"name": "ft"}),
            ("role/grant", {"name": "ft", "perm": may}),
            ("user/grant", {"user": "ft", "role": "ft"}),
            ("enable", {}),
        ):
            admin._ask(f"auth/{what}", body)
        with pytest.raises(LeadershipError, match="user name is empty"):
            admin.look()
        monkeypatch.setenv(etcd.USER, "ft:wrong")
        with pytest.raises(LeadershipError, match="invalid user ID or password"):
            admin.look()
        monkeypatch.setenv(etcd.USER, "ft:with:a:colon")
        first = admin.acquire("one:1", 0)
        assert first is not None and admin.renew(first) and admin.look() == Leader(1, "one:1")
        admin._token = "one.that.has.run.out"
        assert admin.renew(first) and admin.note(first, Notes())
        with pytest.raises(LeadershipError, match="permission denied"):
            members.leadership("not a job").look()


@etcd_members.needed
@pytest.mark.skipif(shutil.which("openssl") is None, reason="left out: nothing makes keys (openssl)")
def test_a_token_of_before_users_were_changed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    for command in (["genrsa", "-out", private, "2048"], ["rsa", "-in", private, "-pubout", "-out", public]):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    token = f"--auth-token=jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=10m"
    with Members(1, token) as members:
        one = members.leadership("jobs/llm")
        for what, body in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            one._ask(f"auth/{what}", body)
        monkeypatch.setenv(etcd.USER, "root:secret")
        first = one.acquire("one:1", 0)
        assert first is not None
        members.leadership("jobs/llm")._ask("auth/role/add", {"name": "another"})
        status, answer = one._send("kv/txn", {})
        assert status != 200 and etcd._OLD in str(answer)
        assert one.renew(first) and one.look() == Leader(1, "one:1")


@etcd_members.needed
def test_where_etcd_is_full_a_leader_goes_on_and_nobody_follows() -> None:
    with Members(1, "--quota-backend-bytes=200000") as members:
        one = members.leadership("job")
        first = one.acquire("one:1", 0)
        assert first is not None
        with pytest.raises(LeadershipError, match="database space exceeded"):
            for number in range(1000):  # it counts what is written now and then
                one._ask("kv/put", {"key": _base64(str(number)), "value": _base64("x" * 20_000)})
                time.sleep(0.02)
        assert one.renew(first) and one.look() == Leader(1, "one:1")
        with pytest.raises(LeadershipError, match="database space exceeded"):
            one.resign(first, 0)
        assert one.renew(first) and one.resign(first)
        with pytest.raises(LeadershipError, match="database space exceeded"):
            one.acquire("one:1", 0)


def test_a_certificate_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(etcd.CA, "/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=r"No such file or directory: ETCDCTL_CACERT /nowhere/ca\.pem"):
        leadership.at("etcds://a:2379/jobs/llm", b"secret", 2)


def test_what_kubernetes_refuses_is_said(tmp_path: Path) -> None:
    with api_server(tmp_path) as kept:
        client = kept.client()
        (tmp_path / "token").write_text("another")
        with pytest.raises(LeadershipError, match="kubernetes://train/llm: status 401: Unauthorized"):
            client.acquire("one:1", 0)
        (tmp_path / "token").write_text("a token")  # it is replaced from time to time
        first = client.acquire("one:1", 0)
        assert first.term == 1
        kept.server.fails = True
        with pytest.raises(LeadershipError, match="no leader"):
            client.renew(first)
        kept.server.fails = False
        assert client.renew(first)


def test_a_lease_that_a_person_has_annotated_is_kept(tmp_path: Path) -> None:
    with api_server(tmp_path) as kept:
        client = kept.client()
        first = client.acquire("one:1", 0)
        found = kept.server.objects["llm"]
        found["metadata"] = {**found["metadata"], "resourceVersion": "77", "annotations": {"a": "b"}}
        assert client.renew(first) and client.look() == Leader(1, "one:1")
        assert kept.server.objects["llm"]["metadata"]["annotations"]["a"] == "b"


ODD = [b"", b"{}", b"[]", b'"ok"', b"<html>", b'{"responses": [], "spec": {}, "metadata": {}}']
ODD += [b'{"responses": [{"response_range": 1}, 2], "ID": [], "spec": {"holderIdentity": 1}}']


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", ["etcd", "kubernetes"])
def test_an_odd_answer_ends_nobody(place: str, odd: bytes, tmp_path: Path) -> None:
    """As of a proxy, or of a server that is just starting: it is not known who leads, and that is all."""
    with api_server(tmp_path) as kept:
        client = kept.client()
        first = client.acquire("one:1", 0)
        kept.server.odd = odd
        if place == "etcd":
            client = etcd.Etcd([kept.server.server_address], "job", "key", 2)
        with pytest.raises(LeadershipError):
            client.look()
        with pytest.raises(LeadershipError):
            client.acquire("two:1", 0)
        if place == "kubernetes":
            with pytest.raises(LeadershipError):
                client.renew(first)
            kept.server.odd = None
            assert client.renew(first) and client.look() == Leader(1, "one:1")


# -- the thread ----------------------------------------------------------------------------------------


def run(test: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(limited())


def test_a_keeper_leads_keeps_its_lease_and_says_that_the_job_is_over(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        one, other = (LeaseRenewer(kept.client(), f"{name}:1", begins=True) for name in ("one", "other"))
        waits = [asyncio.ensure_future(keeper.news.get()) for keeper in (one, other)]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        leads, follows = (one, waits[1]) if waits[0] in done else (other, waits[0])
        granted = done.pop().result()
        assert isinstance(granted, Granted) and granted.lease.term == 1
        without_renewals = lease.clock() + lease.SECONDS * (1 - DRIFT)
        while not granted.lease.holds(without_renewals + 3 * lease.RENEW):
            assert granted.lease.holds(lease.clock())
            await asyncio.sleep(0.05)
        leads.note(granted.lease.term, Notes({"resumed": 1}))
        agreed = asyncio.Event()
        leads.end(granted.lease.term, 5, agreed.set)
        await agreed.wait()
        assert await follows == Over(5)

    with api_server(tmp_path) as kept:
        run(test(kept))


def test_a_keeper_whose_controller_resigns_leads_again_in_a_newer_term(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        keeper = LeaseRenewer(kept.client(), "one:1", begins=True)
        first = await keeper.news.get()
        assert isinstance(first, Granted)
        keeper.resign(first.lease.term, floor=40)
        second = await keeper.news.get()
        assert (
            isinstance(second, Granted) and second.lease.term == 41 and not first.lease.holds(lease.clock())
        )

    with api_server(tmp_path) as kept:
        run(test(kept))


def test_what_is_ordered_about_a_lease_is_not_done_with_the_next(tmp_path: Path) -> None:
    """A controller winds down for a while once its lease is lost; meanwhile there may be another one."""

    async def test(kept: Kept) -> None:
        keeper = LeaseRenewer(kept.client(), "one:1", begins=True)
        first = await keeper.news.get()
        kept.delete()
        second = await keeper.news.get()
        assert isinstance(first, Granted) and isinstance(second, Granted)
        assert second.lease.term > first.lease.term and not first.lease.holds(lease.clock())
        done = asyncio.Event()
        for term in (first.lease.term, second.lease.term):
            keeper.note(term, Notes({"resumed": term}))
        keeper.note(first.lease.term, Notes({"resumed": first.lease.term}))
        keeper.end(first.lease.term, 1, done.set)
        keeper.resign(first.lease.term)
        renewed = lease.clock() + lease.SECONDS
        while not second.lease.holds(renewed):
            await asyncio.sleep(0.05)
        assert keeper.news.empty() and not done.is_set()
        keeper.resign(second.lease.term)
        third = await keeper.news.get()
        assert isinstance(third, Granted) and third.lease.term == second.lease.term + 1
        assert third.notes.recorded == {"resumed": second.lease.term}

    with api_server(tmp_path) as kept:
        run(test(kept))


def test_a_keeper_takes_nothing_old_for_the_jobs_end(tmp_path: Path) -> None:
    """What a former job has written, which was over, is put in the place of what is there."""

    async def test(kept: KeptInKubernetes) -> None:
        one = kept.client()
        assert one.resign(one.acquire("one:1", 0), 0)
        over = kept.server.objects["llm"]
        leads = one.acquire("one:1", 0)
        other = LeaseRenewer(kept.client(), "other:1", begins=False)
        while not other._job:
            await asyncio.sleep(0.01)
        now = kept.server.objects["llm"]
        for number in range(3):
            version = {"metadata": over["metadata"] | {"resourceVersion": f"9{number}"}}
            kept.server.objects["llm"] = over | version
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(other.news.get(), lease.LOOK)
        kept.server.objects["llm"] = now | {"metadata": now["metadata"] | {"resourceVersion": "99"}}
        assert one.resign(leads, 5)
        assert await other.news.get() == Over(5)

    with api_server(tmp_path) as kept:
        run(test(kept))


def test_a_keeper_of_a_job_whose_name_another_has_ends(tmp_path: Path) -> None:
    async def test(kept: KeptInKubernetes) -> None:
        one = kept.client()
        first = one.acquire("one:1", 0)
        other = LeaseRenewer(kept.client(), "other:1", begins=True)
        while not other._job:
            await asyncio.sleep(0.01)
        kept.delete()
        assert kept.client().acquire("two:1", 4).job != first.job
        news = await other.news.get()
        assert isinstance(news, ConfigError) and f"this one, {first.job}, is over or lost" in str(news)

    with api_server(tmp_path) as kept:
        run(test(kept))


def test_a_spare_begins_no_job_that_is_over(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        one = kept.client()
        assert one.resign(one.acquire("one:1", 0), 0)
        spare = LeaseRenewer(kept.client(), "spare:1", begins=False)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(spare.news.get(), 3 * lease.LOOK)
        first = LeaseRenewer(kept.client(), "first:1", begins=True)
        assert isinstance(await first.news.get(), Granted)

    with api_server(tmp_path) as kept:
        run(test(kept))


# -- the processes -------------------------------------------------------------------------------------


PAST = Notes({"resumed": 3}, spent=Spent(Cause.PRODUCTIVE, {Cause.PRODUCTIVE: 100.0}, epoch=3), at=1000.0)
"""What a predecessor has left."""


class Orders:
    """In the place of a keeper: what the controller wants of it."""

    def __init__(self) -> None:
        self.noted: list[Notes] = []
        self.ends: list[tuple[int, Callable[[], None]]] = []

    def note(self, term: int, notes: Notes) -> None:
        assert term == 5
        self.noted.append(notes)

    def end(self, term: int, code: int, agreed: Callable[[], None]) -> None:
        self.ends.append((code, agreed))


class Elected:
    """A controller that was elected in term 5, as it serves, and its lease."""

    def __init__(self, directory: Path) -> None:
        settings = Settings(1, 1, Command("train.py"), leadership="etcd://e:1/x", replicas=0)
        write_secret(directory)
        self.secret, self.orders = read_secret(directory), Orders()
        self.address = f"127.0.0.1:{free_port()}"
        self.lease = Lease(5, 1000.0, lease.clock())
        about = (self.lease, cast(LeaseRenewer, self.orders), self.address, PAST, 0.0, "itsid")
        self.shell = Shell(settings, directory, 0, LeaderContext(*about))
        self.running = asyncio.ensure_future(self.shell.run())

    async def node(self, term: int = 5) -> AsyncChannel[m.ToAgent]:
        """One that greets, and knows of this term."""
        while True:
            try:
                channel = await AsyncChannel.connect(self.address, self.secret, m.FROM_CONTROLLER)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            held = m.Holdings(0, "", 0, [], {}, {}, {}, 0, "x:1", "x:1", None)
            channel.post(m.AgentHello("node0", term, 1, 0, "domain", "data:1", held, [], False, ""))
            return channel


async def said(channel: AsyncChannel[m.ToAgent]) -> list[m.ToAgent]:
    """All, until it hangs up."""
    found = []
    with contextlib.suppress(ConnectionError):
        while True:
            found.append(await channel.recv())
    return found


def test_a_controller_without_its_lease_decides_nothing_and_hangs_up(tmp_path: Path) -> None:
    async def test() -> None:
        elected = Elected(tmp_path)
        node = await elected.node()
        assert isinstance(first := await node.recv(), m.LeaderHello) and first.term == 5
        for epoch in (3, 4):
            elected.shell._note(Record("resumed", epoch))
        assert elected.orders.noted == [replace(PAST, recorded={"resumed": 4})]  # of epoch 3 one has
        account = elected.shell.machine.view.account
        assert account.seconds == dict.fromkeys(Cause, 0.0) | {Cause.PRODUCTIVE: 100.0}
        assert account.open(time.monotonic()) == pytest.approx(time.time() - PAST.at, abs=60)
        spent = Spent(Cause.WAITING, epoch=4)
        elected.shell._note(Record("waiting", 4, more={"spent": spent}))
        assert elected.orders.noted[-1].spent == spent and elected.orders.noted[-1].at > PAST.at
        elected.lease.ends()
        assert await elected.running is None and elected.shell.newer == 0
        assert m.Shutdown not in {type(message) for message in await said(node)}
        assert not elected.orders.ends

    run(test())


def test_a_controller_that_a_node_knows_a_newer_one_of_resigns(tmp_path: Path) -> None:
    async def test() -> None:
        elected = Elected(tmp_path)
        assert await said(await elected.node(term=9)) == []
        assert await elected.running is None and elected.shell.newer == 9

    run(test())


def test_nobody_hears_of_the_jobs_end_before_that_is_written_down(tmp_path: Path) -> None:
    async def test() -> None:
        elected = Elected(tmp_path)
        node = await elected.node()
        assert isinstance(first := await node.recv(), m.LeaderHello) and first.term == 5
        elected.shell._handle(LauncherGone())
        [(code, agreed)] = elected.orders.ends
        late = await elected.node()  # greets meanwhile, and is not told either
        waits = asyncio.ensure_future(late.recv())
        await asyncio.sleep(0.2)
        assert code == 1 and not waits.done() and not elected.running.done()
        agreed()
        elected.lease.ends()
        assert await elected.running == 1
        assert isinstance(first := await waits, m.LeaderHello) and first.term == 5
        assert m.Shutdown(code=1) in await said(late)

    run(test())


class Slow:
    """Where leases are kept, far away: it takes a while to write something there."""

    every, place, near = 0.5, "slow://", "127.0.0.1:1"

    def __init__(self) -> None:
        self.noted: list[Notes] = []
        self.written = 0
        """How often, since the last renewal."""
        self.at_once = 0
        """How often at most between two renewals."""

    def look(self) -> Leader:
        return Leader()

    def acquire(self, address: str, floor: int, job: str = "") -> Grant:
        return Grant("job", floor + 1, 1000.0, Notes(), None)

    def renew(self, grant: Grant) -> bool:
        self.written = 0
        return True

    def note(self, grant: Grant, notes: Notes) -> bool:
        self.written += 1
        self.at_once = max(self.at_once, self.written)
        time.sleep(1.1 * lease.RENEW)
        self.noted.append(notes)
        return True

    def resign(self, grant: Grant, over: int | None = None) -> bool:
        return True


def test_what_is_noted_keeps_no_lease_from_being_renewed() -> None:
    """Where much happens and the way is long: the newest notes are written, the lease is renewed before."""

    async def test() -> None:
        slow = Slow()
        keeper = LeaseRenewer(slow, "one:1", begins=True)
        granted = await keeper.news.get()
        assert isinstance(granted, Granted)
        last, ended = Notes(), asyncio.Event()
        for number in range(30):
            last = Notes({"resumed": number})
            keeper.note(granted.lease.term, last)
        while last not in slow.noted:
            keeper.note(granted.lease.term, last)
            await asyncio.sleep(0.05)
        keeper.note(granted.lease.term, Notes({"resumed": 31}))
        keeper.end(granted.lease.term, 0, ended.set)
        await ended.wait()
        assert slow.at_once == 1 and len(slow.noted) < 10

    run(test())


class Told(Fixed):
    """What a test says is found by a look."""

    def __init__(self, leader: Leader) -> None:
        super().__init__("nowhere:1", every=0.01)
        self.leader, self.fails = leader, False

    def look(self) -> Leader:
        if self.fails:
            raise LeadershipError("nobody answers")
        return self.leader


def test_an_agent_waits_for_a_look_where_it_is_not_clear_whom_it_obeys(monkeypatch: Any) -> None:
    async def test() -> None:
        place, hung_up = Told(Leader(3, "a:1")), asyncio.Event()
        looker = LeaderWatcher(cast(Leadership, place), hung_up.set, lambda error: None)
        await looker.next()
        assert looker.leader.address == "a:1"
        looker.follower.connected(3)
        looker.follower.led_by(3)
        assert await looker.counts()
        place.fails = True
        await asyncio.sleep(lease.trust(place.every) + 0.1)
        waits = asyncio.ensure_future(looker.counts())
        await asyncio.sleep(0.1)
        assert not waits.done()
        place.fails = False
        assert await waits
        place.leader = Leader(4, "b:1")
        await hung_up.wait()
        assert looker.follower.deposed and not await looker.counts()

    monkeypatch.setattr(looking, "Fixed", type("Nothing", (), {}))  # it looks, though that is none
    run(test())


def test_an_agent_that_cannot_look_hangs_up_after_a_while(monkeypatch: Any) -> None:
    async def test() -> None:
        place = Told(Leader(3, "a:1"))
        looker = LeaderWatcher(cast(Leadership, place), lambda: None, lambda error: None)
        await looker.next()
        looker.follower.led_by(3)
        place.fails = True
        await asyncio.sleep(lease.trust(place.every) + 0.1)
        assert not await looker.counts()

    monkeypatch.setattr(looking, "Fixed", type("Nothing", (), {}))
    monkeypatch.setattr(looking, "DOUBT", 0.3)
    run(test())
