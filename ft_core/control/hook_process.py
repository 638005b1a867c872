"""The process that runs one command for the controller (`control.hooks`), and leaves nothing of it behind.

It is started as `python -I -S hook_process.py SECONDS COMMAND...`, at the head of a session: so the time
limit holds also where the controller is killed meanwhile. It imports nothing of this project, to start at
once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

_TAIL = 4096
"""Bytes of what the command says last that are kept; the rest is read, and dropped."""
_PIPE = 1 << 16
"""Bytes that a pipe holds."""
_LOOK = 0.05
"""Seconds between two looks whether the command has ended: its output may be held open by others."""
_REST = 0.002
"""Seconds after each reading: what talks without end costs no processor."""
_DEFAULT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the controller may ignore, and a command must not inherit so."""


def run(seconds: float, command: list[str]) -> dict[str, Any]:
    """Run it. Returns its exit `code`, negative for a signal, None where it was not there or took too long;
    what it has `said` last; and whether it was `late`."""
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    until = time.monotonic() + seconds
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return {"code": None, "said": error.strerror, "late": False}
    assert process.stdout is not None
    tail, output, streams = b"", process.stdout.fileno(), [process.stdout.fileno()]
    while (left := until - time.monotonic()) > 0:
        code = process.poll()
        readable, _, _ = select.select(streams, [], [], 0 if code is not None else min(left, _LOOK))
        if readable:
            part = os.read(output, _PIPE)
            tail, streams = (tail + part)[-_TAIL:], streams if part else []
            time.sleep(_REST)
        if code is not None:
            return {"code": code, "said": _last(tail), "late": False}
    return {"code": None, "said": _last(tail), "late": True}


def _last(tail: bytes) -> str:
    """The last line that says anything, for a log."""
    lines = tail.decode(errors="replace").splitlines()
    line = next((line for line in reversed(lines) if line.strip()), "")
    return "".join(c if c.isprintable() else " " for c in line).strip()[-400:]


if __name__ == "__main__":
    try:
        print(json.dumps(run(float(sys.argv[1]), sys.argv[2:])), flush=True)
    finally:  # this process too: what the command has started is in its group
        os.killpg(0, signal.SIGKILL)
