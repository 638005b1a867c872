"""The lease in etcd: by the JSON gateway of its API v3, which is a handful of requests.

Two keys. `NAME/leader` says who leads, and goes with the leader's lease. `NAME/job` stays: the newest term,
what successors must know, whether the job is over. A transaction that writes either compares first that
nobody else has become leader, so there is no moment in which two are.
"""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ft_core.errors import ConfigError
from ft_core.leadership import lease
from ft_core.leadership.base import Grant, Leader, LeadershipError, Notes, new_id, no_other_of_this_name
from ft_core.leadership.http import OK, Client, reading
from ft_core.leadership.seal import Seal
from ft_core.protocol.sockets import join_address, seen_by_others

T = TypeVar("T")
_OLD = "revision of auth store is old"
"""What etcd says, with status 400, of a token of before users, roles or passwords were changed."""
PER_SECOND = 1000.0
"""Looks of a whole job."""


class _Leads(Struct, frozen=True):
    """Under `NAME/leader`."""

    term: int
    address: str


class Job(Struct, frozen=True):
    """What is kept of a job, whoever leads. `id`: empty where there has been none."""

    id: str = ""
    term: int = 0
    notes: Notes = Notes()
    over: int | None = None

    def next(self, job: str, floor: int) -> Job:
        """What the next leader finds of the job with that id, if it is known. Of another, or of one that is
        over and begins anew, it keeps no more than the term, so that nobody obeys what is left of it."""
        goes_on = self.id if self.over is None else ""
        notes = self.notes if goes_on and job in ("", goes_on) else Notes()
        return Job(job or goes_on or new_id(), max(self.term, floor) + 1, notes)


class _Kept(Struct, frozen=True):
    """A value, and who has written it."""

    seal: str
    text: str


_MOST = 1 << 32
"""The highest term that is believed if somebody else has written it."""


@dataclass
class _Key:
    """The key of a grant."""

    lease: str
    revision: str
    """At which `NAME/leader` was made: nobody else's has the same."""
    job: Job


class Etcd:
    """Leadership (`base.Leadership`) by a lease in etcd."""

    def __init__(
        self, servers: list[tuple[str, int]], name: str, key: str, nodes: int, tls: bool = False
    ) -> None:
        """`name`: of the job, in etcd. `key`: which only its processes have."""
        scheme = "etcds" if tls else "etcd"
        named = [join_address(*server) for server in servers]
        self.place = f"{scheme}://{','.join(named)}/{name}"
        self.near = seen_by_others(named[0])
        self.every = lease.look_every(nodes, PER_SECOND)
        self._leader, self._job_key, self._seal = (
            _text(f"{name}/leader"),
            _text(f"{name}/job"),
            Seal(key, name),
        )
        self._client = Client(servers, _context() if tls else None, self._headers)
        self._token = ""

    def look(self) -> Leader:
        leads, job, _ = self._read()
        term = job.term if job.id else 0  # or somebody else has written it
        if leads is None:
            return Leader(term, "", job.over, job.id)
        return Leader(max(term, leads.term), leads.address, job.over, job.id)

    def acquire(self, address: str, floor: int, job: str = "") -> Grant | None:
        leads, before, revision = self._read()
        if leads is not None:
            return None
        known = before.next(job, floor)
        granted = self._ask("lease/grant", {"TTL": str(int(lease.SECONDS))})
        with reading(self.place):
            number, seconds = str(granted["ID"]), float(granted["TTL"])
        nobody = {"key": self._leader, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        as_read = {"key": self._job_key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        puts = [
            self._put(self._leader, _Leads(known.term, address), number),
            self._put(self._job_key, known),
        ]
        done = self._ask("kv/txn", {"compare": [nobody, as_read], "success": puts})
        if not done.get("succeeded"):
            self._revoke(number)
            return None
        with reading(self.place):
            key = _Key(number, done["header"]["revision"], known)
        return Grant(known.id, known.term, seconds, known.notes, key)

    def renew(self, grant: Grant) -> bool:
        key: _Key = grant.key
        answer = self._ask("lease/keepalive", {"ID": key.lease})
        with reading(self.place):
            if float(answer.get("result", {}).get("TTL", 0)) <= 0:
                return False
        # The lease is there; somebody may have taken the key from it. Without the range a member would answer
        # for itself, though it may be behind.
        asked = {"compare": [self._leads(key)], "success": [{"request_range": {"key": self._leader}}]}
        return bool(self._ask("kv/txn", asked).get("succeeded"))

    def note(self, grant: Grant, notes: Notes) -> bool:
        return self._write(grant.key, replace(grant.key.job, notes=notes))

    def resign(self, grant: Grant, over: int | None = None) -> bool:
        key: _Key = grant.key
        if over is not None:
            job = replace(key.job, over=over)
            if not self._write(key, job) and self._read()[1] != job:
                return False
        self._revoke(key.lease)
        return True

    # -- requests ----------------------------------------------------------------------------------

    def _read(self) -> tuple[_Leads | None, Job, str]:
        """Both keys, of one moment, and at which revision the job's was written."""
        ranges = [{"request_range": {"key": key}} for key in (self._leader, self._job_key)]
        answer = self._ask("kv/txn", {"success": ranges})
        with reading(self.place):
            found = [(each["response_range"].get("kvs") or [None])[0] for each in answer["responses"]]
            leads, is_own = self._opened(self._leader, found[0], _Leads)
            if found[0] is not None and (leads is None or not is_own):
                raise no_other_of_this_name(self.place, leads.address if leads is not None else "somebody")
            job, is_own = self._opened(self._job_key, found[1], Job)
            if job is None or not is_own:
                job = Job(term=job.term if job is not None and job.term < _MOST else 0)
            return leads, job, found[1]["mod_revision"] if found[1] else "0"

    def _opened(self, key: str, found: Any, kind: type[T]) -> tuple[T | None, bool]:
        """What is kept there, if that can be read, and whether a process of this job has written it."""
        with contextlib.suppress(ValueError):
            if found is not None:
                kept = msgspec.json.decode(base64.b64decode(found.get("value", "")), type=_Kept)
                return msgspec.json.decode(kept.text, type=kind), self._seal.fits(kept.seal, key, kept.text)
        return None, False

    def _write(self, key: _Key, job: Job) -> bool:
        put = self._put(self._job_key, job)
        done = bool(self._ask("kv/txn", {"compare": [self._leads(key)], "success": [put]}).get("succeeded"))
        if done:
            key.job = job
        return done

    def _leads(self, key: _Key) -> dict[str, Any]:
        """Compares whether the key's holder still leads."""
        same = {"target": "CREATE", "result": "EQUAL", "create_revision": key.revision}
        return {"key": self._leader, **same}

    def _put(self, key: str, value: Struct, number: str = "0") -> dict[str, Any]:
        text = msgspec.json.encode(value).decode()
        kept = msgspec.json.encode(_Kept(self._seal.of(key, text), text))
        return {"request_put": {"key": key, "value": _text(kept), "lease": number}}

    def _revoke(self, number: str) -> None:
        """If that fails, it runs out."""
        with contextlib.suppress(LeadershipError):
            self._ask("lease/revoke", {"ID": number})

    def _ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if os.environ.get(USER) and not self._token:  # without one etcd does not ask for it, but refuses
            self._log_in()
        status, answer = self._send(what, body)
        if self._token and (status == 401 or _OLD in str(answer)):  # tokens run out, or users have changed
            self._log_in()
            status, answer = self._send(what, body)
        return self._checked(what, status, answer)

    def _send(self, what: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            return self._client.ask("POST", f"/v3/{what}", body)
        except LeadershipError as error:
            raise LeadershipError(f"{self.place}: {error}") from None

    def _checked(self, what: str, status: int, answer: dict[str, Any]) -> dict[str, Any]:
        if status != OK:
            raise LeadershipError(f"{self.place}: {what}: status {status}: {str(answer)[:200]}")
        return answer

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _log_in(self) -> None:
        name, _, password = os.environ[USER].partition(":")
        self._token = ""
        what, who = "auth/authenticate", {"name": name, "password": password}
        answer = self._checked(what, *self._send(what, who))
        with reading(self.place):
            self._token = answer["token"]


USER, CA, CERTIFICATE, KEY = (f"ETCDCTL_{name}" for name in ("USER", "CACERT", "CERT", "KEY"))
"""Variables of etcd's own client: USER:PASSWORD, and files of PEM."""


def _context() -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=os.environ.get(CA))
        if certificate := os.environ.get(CERTIFICATE):
            context.load_cert_chain(certificate, os.environ.get(KEY))
    except OSError as error:
        files = ", ".join(
            f"{name} {os.environ[name]}" for name in (CA, CERTIFICATE, KEY) if name in os.environ
        )
        raise ConfigError(f"etcds://: {error}: {files}") from None
    return context


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()
