"""Questions of `ftctl` to a job's controller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ft_core import leadership
from ft_core.errors import ProtocolError
from ft_core.leadership.base import LeadershipError
from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import TO_CTL, AskStatus, CtlHello, FromCtl, JobStatus, ToCtl
from ft_core.settings import Settings, read_secret

_TIMEOUT = 10.0


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


def ask(question: FromCtl, job_dir: Path | None, address: str = "") -> ToCtl:
    """Put a question to a job's controller. Raises FtError or OSError when it cannot be asked."""
    return ask_all([question], job_dir, address)[0]


def ask_all(questions: Sequence[FromCtl], job_dir: Path | None, address: str = "") -> list[ToCtl]:
    """The answers to several questions, in the order in which they come. Raises as `ask`."""
    address = address or find(Settings.read(job_dir or Path()), job_dir)
    channel = Channel.connect(address, read_secret(job_dir), TO_CTL, _TIMEOUT)
    try:
        channel.send(CtlHello())
        for question in questions:
            channel.send(question)
        return [channel.recv() for _ in questions]
    finally:
        channel.close()


def status(job_dir: Path | None, address: str = "") -> JobStatus:
    """What a job is doing. Raises as `ask`."""
    answer = ask(AskStatus(), job_dir, address)
    if not isinstance(answer, JobStatus):
        raise ProtocolError(f"the controller answered {answer}")
    return answer
