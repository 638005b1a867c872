"""Questions of `ftctl` to a job's controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_core.protocol.channel import Channel
from ft_core.protocol.codec import ANYTHING
from ft_core.settings import Settings, read_secret

_TIMEOUT = 10.0


def ask(message: dict[str, Any], job_dir: Path | None, address: str = "") -> dict[str, Any]:
    """Put a question to a job's controller. Raises FtError or OSError when it cannot be asked."""
    address = address or Settings.read(job_dir or Path()).controller
    channel = Channel.connect(address, read_secret(job_dir), ANYTHING, _TIMEOUT)
    try:
        channel.send({"type": "hello", "kind": "ctl"})
        channel.send(message)
        return channel.recv()
    finally:
        channel.close()
