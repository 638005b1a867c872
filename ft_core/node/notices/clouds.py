"""The metadata services of clouds, which this machine alone reaches."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

from ft_core.node.notices.http import Answer, Server, ask
from ft_core.node.notices.notice import EVERY, LIMIT, Notice, moment, plain

_TOKEN_SECONDS = 21600


class Aws:
    """EC2: interruptions of spot instances, two minutes ahead, and advice to leave one (IMDSv2)."""

    every = EVERY

    def __init__(self, server: Server) -> None:
        self._server = server
        self._token = ""

    async def look(self) -> list[Notice]:
        found = []
        if (action := await self._get("spot/instance-action")) is not None:
            what = plain(_text(action, "action"))
            found.append(Notice(f"AWS, spot/instance-action: {what}", moment(_text(action, "time"))))
        if (advice := await self._get("events/recommendations/rebalance")) is not None:
            moment(_text(advice, "noticeTime"))
            found.append(
                Notice("AWS, events/recommendations/rebalance: this spot instance may be taken soon")
            )
        return found

    async def agree(self) -> None:
        """There is nothing to say."""

    async def _get(self, about: str) -> dict[str, Any] | None:
        """None: there is no notice."""
        for again in (False, True):
            if not self._token or again:
                self._token = await self._new_token()
            path = f"/latest/meta-data/{about}"
            answer = await ask(self._server, "GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:  # the token is none any more
                break
        return None if answer.status == 404 else _good(answer, about).object()

    async def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        token = _good(await ask(self._server, "PUT", "/latest/api/token", headers), "token").text()
        if not token.isascii() or not token.isprintable() or not token:
            raise ValueError(f"no token: {token[:80]!r}")
        return token


class Gcp:
    """Compute Engine: `instance/preempted` or `instance/maintenance-event`. The answer comes when there is
    news, so each has a task of its own."""

    every = 1.0
    """Seconds between two questions, also where a service answers at once, whatever it is told."""
    WAIT = 20
    """Seconds for which the service holds an answer back in which nothing is new."""
    SPOT = 30.0
    """Seconds that a preempted machine has."""

    def __init__(self, server: Server, about: str, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds of the epoch."""
        self._server, self._about, self._clock = server, about, clock
        self._etag, self._preempted = "0", math.inf
        """The answer that is known; when it was heard first that the machine is taken."""

    async def look(self) -> list[Notice]:
        about = f"wait_for_change=true&timeout_sec={self.WAIT}&last_etag={self._etag}"
        path = f"/computeMetadata/v1/instance/{self._about}?{about}"
        flavor, limit = {"Metadata-Flavor": "Google"}, self.WAIT + LIMIT
        answer = _good(await ask(self._server, "GET", path, flavor, limit=limit), self._about)
        value, etag = answer.text(), answer.headers.get("etag", "")
        # To be moved while it runs costs a machine no more than a pause.
        if value in ("FALSE", "NONE", "MIGRATE_ON_HOST_MAINTENANCE"):
            found = []
        elif value == "TRUE":
            self._preempted = min(self._preempted, self._clock())
            found = [Notice(f"GCP, instance/{self._about}", self._preempted + self.SPOT)]
        elif value == "TERMINATE_ON_HOST_MAINTENANCE":
            found = [Notice(f"GCP, instance/{self._about}: {value}")]
        else:
            raise ValueError(f"{self._about} is {value[:80]!r}")
        self._etag = etag if etag.isascii() and etag.isalnum() else "0"
        return found

    async def agree(self) -> None:
        """There is nothing to say."""


class Azure:
    """Scheduled Events of this machine, and of no other in its scale set. Whoever says that one may start
    gets rid of the machine at once, so that is said when nobody needs it any more."""

    every = EVERY
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _FIRST = 150.0
    """Seconds that the first answer may take: the service is switched on by it."""
    _GOES = ("Reboot", "Redeploy", "Preempt", "Terminate")
    """Kinds of events that end what runs here. Frozen, a machine stands still for some seconds."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._machine, self._limit = "", self._FIRST
        self._ids: list[str] = []

    async def look(self) -> list[Notice]:
        if not self._machine:
            self._machine = _good(await self._get(self._NAME), "compute/name").text()
        events = _good(await self._get(self._EVENTS, self._limit), "scheduledevents").object().get("Events")
        self._limit = LIMIT
        if not isinstance(events, list):
            raise ValueError("scheduledevents has no Events")
        found, ids = [], list[str]()
        for event in events:
            resources = event.get("Resources") if isinstance(event, dict) else None
            if not isinstance(resources, list):
                raise ValueError(f"no event: {str(event)[:80]}")
            if self._machine not in resources or event.get("EventType") not in self._GOES:
                continue
            ids.append(_text(event, "EventId"))
            about = plain(
                ": ".join(t for t in (event["EventType"], str(event.get("Description") or "")) if t)
            )
            begins = str(event.get("NotBefore") or "")  # none once it has begun
            found.append(Notice(f"Azure, scheduled event {about}", moment(begins) if begins else None))
        self._ids = ids
        return found

    async def agree(self) -> None:
        if self._ids:
            said = json.dumps({"StartRequests": [{"EventId": each} for each in self._ids]}).encode()
            headers = {"Metadata": "true", "Content-Type": "application/json"}
            _good(await ask(self._server, "POST", self._EVENTS, headers, said), "scheduledevents")

    async def _get(self, path: str, limit: float = LIMIT) -> Answer:
        return await ask(self._server, "GET", path, {"Metadata": "true"}, limit=limit)


def _good(answer: Answer, about: str) -> Answer:
    if answer.status != 200:
        raise ConnectionError(f"{about}: status {answer.status}")
    return answer


def _text(found: dict[str, Any], name: str) -> str:
    if not isinstance(text := found.get(name), str) or not text:
        raise ValueError(f"no {name} in {str(found)[:80]}")
    return text
