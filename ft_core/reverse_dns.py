"""Keeps torch from asking the DNS for the name of every address that its stores connect to.

torch's TCPStore looks up the peer's host name for its log lines, each time it connects. Where a query
gets lost the resolver waits 5 seconds: measured here in 2 of 100 connections, and a recovery makes
several per worker. torch gives the look-ups up for good, in that process and in what is forked from
it, once one fails: so one is made to fail.
"""

from __future__ import annotations

import contextlib
import os
import resource
from datetime import timedelta

from torch import distributed as dist


def disable() -> None:
    """Call this in a process from which workers are forked, while nothing else opens files in it.

    For a moment the process may open one file more only: the store's connection gets it, the resolver
    gets none. If the look-up succeeds all the same, nothing has changed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stderr = os.dup(2)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # torch warns of the failure that is wanted
    os.close(silence)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 2, hard))
        with contextlib.suppress(RuntimeError):
            dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5), wait_for_workers=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.dup2(stderr, 2)
        os.close(stderr)
