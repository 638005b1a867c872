"""Questions of `ftctl` to a job's controller."""

from __future__ import annotations

import argparse
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ft_core import leadership
from ft_core.errors import FtError, ProtocolError
from ft_core.leadership.base import LeadershipError
from ft_core.protocol.channel import Channel
from ft_core.protocol.groups import roles_in
from ft_core.protocol.messages import (
    TO_CTL,
    AskHosts,
    AskMore,
    AskRows,
    AskStatus,
    CtlHello,
    Denied,
    FromCtl,
    Host,
    Hosts,
    HostsFollow,
    JobStatus,
    NodesStatus,
    RolesStatus,
    RoleStatus,
    SparesStatus,
    SpareStatus,
    ToCtl,
)
from ft_core.settings import Settings, read_id, read_secret

T = TypeVar("T")
P = TypeVar("P", RolesStatus, SparesStatus, NodesStatus)
_TIMEOUT = 10.0
AT_ONCE = 64
"""Questions that are put before the first is answered."""


def role_number(text: str) -> int:
    """The number of a role on a command line."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no role: they are numbered from 0")
    return int(text)


class DeniedError(FtError):
    """The controller cannot answer, and says why."""


def find(settings: Settings, job_dir: Path | None) -> str:
    """The address of a job's controller. Raises FtError if nobody leads it."""
    elected = leadership.at(settings.meeting, read_secret(job_dir), settings.size[0])
    leader = elected.look()
    if not leader.address:
        over = (
            f"it is over, with exit code {leader.over}" if leader.over is not None else "yet, or at present"
        )
        raise LeadershipError(f"nobody leads the job at {elected.place}: {over}")
    return leader.address


class Line:
    """A connection to a job's controller."""

    def __init__(self, channel: Channel[ToCtl], job: str = "") -> None:
        """`job`: its id, if that is known."""
        self._channel = channel
        channel.send(CtlHello(job))

    def ask(self, question: FromCtl) -> ToCtl:
        """The answer. Raises OSError or FtError where there is none."""
        self._channel.send(question)
        return self._channel.recv()

    def ask_all(self, questions: Iterable[FromCtl]) -> Iterator[ToCtl]:
        """The answers to any number of questions, in the order in which they come. Raises as `ask`."""
        left, open_ = deque(questions), 0
        while left or open_:
            while left and open_ < AT_ONCE:
                self._channel.send(left.popleft())
                open_ += 1
            yield self._channel.recv()
            open_ -= 1

    def expect(self, question: FromCtl, kind: type[T]) -> T:
        """An answer of this kind. Raises as `ask`; DeniedError if there is none."""
        return _of(kind, self.ask(question))

    def status(self) -> JobStatus:
        """In a few words. Raises as `ask`."""
        return self.expect(AskStatus(), JobStatus)

    def roles(self) -> Iterator[RoleStatus]:
        """The status of each role of the plan, as they come. Raises as `ask`."""
        return (row for piece in self._pieces("roles", RolesStatus) for row in piece.roles)

    def spares(self) -> Iterator[SpareStatus]:
        """The status of each node without a role, likewise."""
        return (row for piece in self._pieces("spares", SparesStatus) for row in piece.spares)

    def nodes(self, what: Literal["nodes", "struck"]) -> Iterator[NodesStatus]:
        """The status of all nodes, or of those against which something counts, likewise; in pieces."""
        return self._pieces(what, NodesStatus)

    def _pieces(self, what: Literal["roles", "spares", "nodes", "struck"], kind: type[P]) -> Iterator[P]:
        """The pieces of a list."""
        piece = self.expect(AskRows(what), kind)
        yield piece
        while piece.more:
            piece = self.expect(AskMore(), kind)
            yield piece

    def hosts(self) -> list[Host]:
        """Where all roles are. Raises as `ask`; DeniedError before the first plan."""
        follow = self.expect(AskHosts(), HostsFollow)
        received = (_of(Hosts, self._channel.recv()) for _ in range(follow.pieces))
        return [host for piece in received for host in piece.hosts]


def _of(kind: type[T], answer: ToCtl) -> T:
    if isinstance(answer, Denied):
        raise DeniedError(answer.error)
    if not isinstance(answer, kind):
        raise ProtocolError(f"the controller answered {str(answer)[:200]}")
    return answer


@contextlib.contextmanager
def line(job_dir: Path | None, address: str = "") -> Iterator[Line]:
    """Connect to a job's controller. Raises FtError or OSError when it cannot be asked."""
    job = "" if address else read_id(job_dir)
    address = address or find(Settings.read(job_dir or Path()), job_dir)
    secret = read_secret(job_dir)
    try:
        channel = Channel.connect(address, secret, TO_CTL, _TIMEOUT)
    except OSError as error:
        raise ConnectionError(
            f"no controller answers at {address}: {error}. Is the job over, or its controller being started "
            "again? `ftctl --job-dir DIR events` says what happened last"
        ) from error
    try:
        yield Line(channel, job)
    finally:
        channel.close()


def ask(question: FromCtl, job_dir: Path | None, address: str = "") -> ToCtl:
    """Put a question to a job's controller. Raises as `line`."""
    with line(job_dir, address) as found:
        return found.ask(question)


@dataclass(frozen=True)
class WholeStatus:
    """What a job is doing, with each of its roles and spares: for jobs that are not large."""

    epoch: int
    phase: str
    controller_pid: int
    finished: list[int]
    roles: list[RoleStatus]
    spares: list[SpareStatus]

    def to_json(self) -> dict[str, Any]:
        """What `ftctl status --json` prints."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def finished(status: JobStatus) -> list[int]:
    """The roles whose script has come to its end."""
    return [role for run in roles_in(status.finished) for role in run] if status.finished else []


def status(job_dir: Path | None, address: str = "") -> WholeStatus:
    """What a job is doing. Raises as `line`."""
    with line(job_dir, address) as found:
        about = found.status()
        rows = list(found.roles()), list(found.spares())
    return WholeStatus(about.epoch, about.phase, about.controller_pid, finished(about), *rows)
