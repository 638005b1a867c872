"""Who may act on a job through its page: whoever has the operator's token, which is asked twice.

The token follows from the job's secret, so that it is the same whoever leads the job; the secret does not
follow from it, and is never sent to a browser.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import time
from collections import OrderedDict
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from ft_core.protocol.sockets import split_address

NAME = "page"
"""The job directory's file with the page's URL and the token."""
CONFIRM = 60.0
"""Seconds in which what was asked for must be confirmed."""
PRIVATE = ("localhost", "local", "internal", "svc")
"""Domains of which nobody owns a name in the public DNS: so no page of somebody else's has one. Services of
Kubernetes are in `svc` and in `svc.cluster.local`."""
_OPEN = 64
"""Actions that wait for that, at most."""


def token_of(secret: bytes) -> str:
    """The token of a job with this secret."""
    return hmac.new(secret, b"the operator's token of the page", hashlib.sha256).hexdigest()


def write_url(job_dir: Path, url: str, token: str) -> None:
    """Where the page is, with the token, readable by the owner only. A browser does not send what follows
    the #. A disk that is full costs the file."""
    beside = job_dir / f".{NAME}-{os.getpid()}"
    with contextlib.suppress(OSError):
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{url}/#token={token}\n")
        beside.replace(job_dir / NAME)


class Operator:
    """Checks who asks, and whether he means it."""

    def __init__(self, token: str, address: str) -> None:
        """`address`: where the page is served, as it was asked for."""
        self._token = token.encode()
        self._names = {"localhost", socket.gethostname().lower(), split_address(address)[0].lower()}
        self._asked: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def may_read(self, headers: Headers) -> bool:
        """Not a page of somebody else's whose name was bound to this machine's address. What has no name of
        the public DNS is ours: an address, a name without a dot or in a private domain, this machine's."""
        name = _host(headers.get("host", ""))
        if name in self._names or (name and "." not in name and ":" not in name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rpartition(".")[2] in PRIVATE
        return True

    def may_act(self, headers: Headers) -> bool:
        """Whether this comes from somebody with the token, and no page of somebody else's."""
        given = headers.get("authorization", "").encode()
        return hmac.compare_digest(given, b"Bearer " + self._token)

    def of_this_page(self, headers: Headers) -> bool:
        """Whether no browser sends it for another page."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
        try:
            return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        except ValueError:
            return False

    def ask(self, action: str) -> str:
        """The word that confirms it."""
        word = secrets.token_urlsafe(16)
        self._asked[word] = action, time.monotonic()
        while len(self._asked) > _OPEN:
            self._asked.popitem(last=False)
        return word

    def confirmed(self, action: str, word: str) -> bool:
        """Whether it was asked for before, and a moment ago. A word is good for once."""
        asked, at = self._asked.pop(word, ("", 0.0))
        return asked == action and time.monotonic() - at <= CONFIRM


def _host(host: str) -> str:
    """Without its port; empty if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
