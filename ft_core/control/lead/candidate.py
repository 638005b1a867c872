"""A controller that is elected: each node has a process that may be it, and one of them leads at a time.

It ends with its node: `ftrun` ends it once the node's agent has ended, or when the job is over for all.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

from msgspec.structs import replace

from ft_core import leadership
from ft_core.control.lead.lease_renewer import Granted, LeaseRenewer, Over
from ft_core.control.shell import LeaderContext, Shell
from ft_core.errors import ConfigError
from ft_core.leadership.lease import clock, settled_after
from ft_core.process import parent
from ft_core.protocol.sockets import join_address, own_host, reserve
from ft_core.settings import Settings, read_secret

log = logging.getLogger(__name__)

_LASTING = 60.0
"""Seconds for which a leader has worked well enough not to count among those that fail in a row."""
_LOOK = 0.5
"""Seconds between two looks whether `ftrun` is still there."""


async def serve(settings: Settings, job_dir: Path, begins: bool) -> int:
    """Lead whenever it is this process's turn, until the job is over. Returns its exit code. Raises what this
    process cannot cope with. `begins`: whether a job may begin with this node."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elected = leadership.at(settings.leadership, read_secret(job_dir), settings.size[0])
    try:
        host = own_host(elected.near)
    except OSError as error:
        raise ConfigError(f"{elected.near}, where it is kept who leads, is nowhere: {error}") from None
    with reserve(host) as port:
        address = join_address(host, port.getsockname()[1])
        renewer = LeaseRenewer(elected, address, begins)
        while (granted := await _next(renewer)) is not None:
            if isinstance(granted, Over):
                return granted.code
            log.info("this node leads the job, in term %d", granted.lease.term)
            leader = LeaderContext(
                granted.lease,
                renewer,
                address=address,
                notes=granted.notes,
                settled=settled_after(elected.every),
                job=granted.job,
            )
            code = await _lead(Shell(settings, job_dir, granted.notes.failed, leader), renewer, granted)
            if code is not None:
                return code
    return 1  # `ftrun` is gone


async def _next(renewer: LeaseRenewer) -> Granted | Over | None:
    """News, once there are some; None if `ftrun` is gone."""
    while not parent.gone():
        try:
            async with asyncio.timeout(_LOOK):
                news = await renewer.news.get()
        except TimeoutError:
            continue
        if isinstance(news, Exception):
            raise news
        return news
    return None


async def _lead(shell: Shell, renewer: LeaseRenewer, granted: Granted) -> int | None:
    """The job's exit code; None once it leads no more."""
    began = clock()
    try:
        code = await shell.run()
    except Exception:
        before = granted.notes.failed if clock() - began < _LASTING else 0
        await asyncio.to_thread(renewer.leave, granted.lease.term, replace(shell.notes, failed=before + 1))
        raise
    if code is None:
        renewer.resign(granted.lease.term, floor=shell.newer)
    return code
