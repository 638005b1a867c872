"""Who is the job's controller: on a machine that was named, or on any, by a lease that others keep."""

from __future__ import annotations

import hmac
import re

from ft_core.errors import ConfigError
from ft_core.leadership.base import Fixed, Leadership
from ft_core.leadership.base import new_id as new_id
from ft_core.leadership.etcd import Etcd
from ft_core.leadership.kubernetes import in_cluster
from ft_core.protocol.sockets import seen_by_others, split_address

_KUBERNETES = re.compile(r"kubernetes://([a-z0-9-]{1,63})/([a-z0-9][a-z0-9.-]{0,200})")
_ETCD = re.compile(r"(etcds?)://([^/]+)/([^/].{0,200})")


def is_elected(place: str) -> bool:
    """Whether this names where a lease is kept, and not a controller's address."""
    return "://" in place


def check(place: str) -> None:
    """Raises ConfigError if nothing can be kept there, whoever asks."""
    if (found := _ETCD.fullmatch(place)) is not None:
        _servers(place, found[2])
    elif _KUBERNETES.fullmatch(place) is None:
        raise ConfigError(
            f"--ft-leadership {place}: give etcd://HOST:PORT,HOST:PORT,.../NAME, etcds:// for TLS, or "
            "kubernetes://NAMESPACE/NAME"
        )


def at(place: str, secret: bytes, nodes: int) -> Leadership:
    """The leadership that is kept at `place`, or the controller's address; for one thread. `secret`: the
    job's, by which what is kept there is known to be its own. Raises ConfigError."""
    if not is_elected(place):
        return Fixed(seen_by_others(place) if nodes > 1 else place)
    check(place)
    key = hmac.digest(secret, b"what is kept for this job", "sha256").hex()
    if (found := _ETCD.fullmatch(place)) is not None:
        return Etcd(_servers(place, found[2]), found[3], key, nodes, tls=found[1] == "etcds")
    kubernetes = _KUBERNETES.fullmatch(place)
    assert kubernetes is not None
    return in_cluster(kubernetes[1], kubernetes[2], key, nodes)


def _servers(place: str, text: str) -> list[tuple[str, int]]:
    try:
        return [split_address(server) for server in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ft-leadership {place}: {error}") from None
