"""The lease as a Kubernetes `Lease` (coordination.k8s.io/v1), by the service account of the pod.

The object is only ever written as it was read (`resourceVersion`), so of two that write one fails. It does
not run out by itself: whoever wants to lead waits until it has seen it unchanged for longer than it lasts, by
its own clock. `leaseTransitions` is the term.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ft_core.errors import ConfigError
from ft_core.leadership import lease
from ft_core.leadership.base import Grant, Leader, LeadershipError, Notes, new_id, no_other_of_this_name
from ft_core.leadership.http import OK, Client, reading
from ft_core.leadership.seal import Seal
from ft_core.protocol.sockets import join_address

PER_SECOND = 50.0
"""Looks of a whole job: the API server has others to serve."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NOTES, _OVER, _JOB, _SEAL = (f"ft-training/{name}" for name in ("notes", "over", "job", "seal"))
"""Annotations: what successors must know, the exit code of a job that is over, its id, who has written these,
the holder and the term."""
_OWN = (_NOTES, _OVER, _JOB, _SEAL)
_CREATED, _MISSING, _CONFLICT = 201, 404, 409

Object = dict[str, Any]


class _Metadata(Struct, rename="camel"):
    resource_version: str
    annotations: dict[str, str] | None = None


class _Spec(Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class _Lease(Struct):
    """What is read of the object."""

    metadata: _Metadata
    spec: _Spec


@dataclass
class _Key:
    """What belongs to a grant: the object as it was written last, and the annotations of ours."""

    written: Object
    own: dict[str, str]


class Kubernetes:
    """Leadership (`base.Leadership`) by a Lease of Kubernetes."""

    def __init__(
        self, namespace: str, name: str, key: str, nodes: int, client: Client, near: tuple[str, int]
    ) -> None:
        """`key`: which only the job's processes have. `client`: of the API server, `near`."""
        self.place = f"kubernetes://{namespace}/{name}"
        self.near = join_address(*near)
        self.every = lease.look_every(nodes, PER_SECOND)
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._seal, self._client = name, Seal(key, f"{namespace}/{name}"), client
        self._seen: tuple[str, float] = "", 0.0
        """The version that was seen last, and since when."""

    def look(self) -> Leader:
        found = self._read()
        if found is None or not self._is_own(found):
            return Leader()
        here = "" if self._ran_out(found) else found["spec"].get("holderIdentity") or ""
        return Leader(_term(found), here, _over(found), self._annotations(found).get(_JOB, ""))

    def acquire(self, address: str, floor: int, job: str = "") -> Grant | None:
        found = self._read()
        if found is not None and not self._ran_out(found):
            return None
        goes_on = ""
        if found is not None and self._is_own(found) and _over(found) is None:
            goes_on = self._annotations(found).get(_JOB, "")
        notes = _notes(found) if found is not None and goes_on and job in ("", goes_on) else Notes()
        job = job or goes_on or new_id()
        wanted: Object = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**(found["metadata"] if found is not None else {"name": self._name})},
            "spec": {
                "holderIdentity": address,
                "leaseDurationSeconds": int(lease.SECONDS),
                "acquireTime": _now(),
                "renewTime": _now(),
                "leaseTransitions": max(_term(found), floor) + 1,
            },
        }
        own = {_NOTES: msgspec.json.encode(notes).decode(), _JOB: job}
        if (written := self._write(self._sealed(wanted, own), new=found is None)) is None:
            return None
        return Grant(job, _term(written), float(int(lease.SECONDS)), notes, _Key(written, own))

    def renew(self, grant: Grant) -> bool:
        return self._change(grant, {})

    def note(self, grant: Grant, notes: Notes) -> bool:
        return self._change(grant, {_NOTES: msgspec.json.encode(notes).decode()})

    def resign(self, grant: Grant, over: int | None = None) -> bool:
        return self._change(grant, {_OVER: str(over)} if over is not None else {}, holder="")

    # -- the object --------------------------------------------------------------------------------

    def _change(self, grant: Grant, annotations: dict[str, str], holder: str | None = None) -> bool:
        """Write the object once more, as its holder; False if that is somebody else by now."""
        key: _Key = grant.key
        own = key.written["spec"]["holderIdentity"]
        for _ in range(2):
            before = key.written
            spec = {**before["spec"], "renewTime": _now()}
            if holder is not None:
                spec["holderIdentity"] = holder
            wanted = self._sealed({**before, "spec": spec}, key.own | annotations)
            written = self._write(wanted, new=False)
            if written is not None:
                key.written, key.own = written, key.own | annotations
                return True
            # Somebody has written it: perhaps this process, whose answer was lost, or a person.
            found = self._read()
            if found is None or _term(found) != grant.term:
                return False
            if found["spec"].get("holderIdentity") != own:
                return holder == "" and found["spec"].get("holderIdentity") == ""
            key.written = found
        return False

    def _sealed(self, wanted: Object, own: dict[str, str]) -> Object:
        """With these annotations of ours, whatever somebody else may have made of them."""
        others = {name: text for name, text in self._annotations(wanted).items() if name not in _OWN}
        sealed = own | {_SEAL: self._seal.of(*_sealed_texts(wanted, own))}
        return {**wanted, "metadata": {**wanted["metadata"], "annotations": others | sealed}}

    def _is_own(self, found: Object) -> bool:
        """Whether a process of this job has written it. Raises LeadershipError if another job is led so."""
        own = self._annotations(found)
        if self._seal.fits(own.get(_SEAL, ""), *_sealed_texts(found, own)):
            return True
        if not self._ran_out(found):
            raise no_other_of_this_name(self.place, found["spec"]["holderIdentity"])
        return False

    def _read(self) -> Object | None:
        """None: there is none yet."""
        status, found = self._ask("GET", f"{self._leases}/{self._name}")
        if status == _MISSING:
            return None
        if status != OK:
            raise self._error(status, found)
        version = self._checked(found).metadata.resource_version
        if version != self._seen[0]:
            self._seen = version, lease.clock()
        return found

    def _write(self, wanted: Object, new: bool) -> Object | None:
        """The object as it is then; None if it has changed before."""
        method, path = ("POST", self._leases) if new else ("PUT", f"{self._leases}/{self._name}")
        status, found = self._ask(method, path, wanted)
        if status in (_CONFLICT, _MISSING):
            return None
        if status not in (OK, _CREATED):
            raise self._error(status, found)
        self._checked(found)
        return found

    def _checked(self, found: Object) -> _Lease:
        """What is read of it. Raises LeadershipError if it is no Lease."""
        with reading(self.place):
            return msgspec.convert(found, _Lease)

    def _ran_out(self, found: Object) -> bool:
        if not found["spec"].get("holderIdentity"):
            return True
        lasts = float(found["spec"].get("leaseDurationSeconds") or lease.SECONDS)
        return lease.clock() - self._seen[1] > lasts * (1 + lease.DRIFT)

    @staticmethod
    def _annotations(found: Object | None) -> dict[str, str]:
        return (found["metadata"].get("annotations") or {}) if found is not None else {}

    def _ask(self, method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
        try:
            return self._client.ask(method, path, body)
        except LeadershipError as error:
            raise LeadershipError(f"{self.place}: {error}") from None

    def _error(self, status: int, found: Object) -> LeadershipError:
        return LeadershipError(f"{self.place}: status {status}: {found.get('message') or str(found)[:200]}")


def in_cluster(namespace: str, name: str, key: str, nodes: int) -> Kubernetes:
    """By what every pod finds in itself. Raises ConfigError outside of a pod."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not port.isdigit() or not (ACCOUNT / "token").is_file():
        raise ConfigError(
            f"kubernetes://{namespace}/{name}: this process is in no pod with a service account "
            f"(KUBERNETES_SERVICE_HOST, {ACCOUNT}/token)"
        )
    tls = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    client = Client([(host, int(port))], tls, lambda: bearer(ACCOUNT))
    return Kubernetes(namespace, name, key, nodes, client, (host, int(port)))


def bearer(account: Path) -> dict[str, str]:
    """The header by which the API server knows who asks."""
    return {"Authorization": f"Bearer {(account / 'token').read_text().strip()}"}


def _sealed_texts(found: Object, own: dict[str, str]) -> list[str]:
    spec = found["spec"]
    said = spec.get("holderIdentity") or "", str(spec.get("leaseTransitions") or 0)
    return ["lease", *said, *(own.get(name, "-") for name in (_NOTES, _OVER, _JOB))]


def _term(found: Object | None) -> int:
    return int(found["spec"].get("leaseTransitions") or 0) if found is not None else 0


def _over(found: Object | None) -> int | None:
    text = Kubernetes._annotations(found).get(_OVER, "")
    return int(text) if text.lstrip("-").isdigit() else None


def _notes(found: Object) -> Notes:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(Kubernetes._annotations(found).get(_NOTES, ""), type=Notes)
    return Notes()


def _now() -> str:
    """The time as the API's MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
