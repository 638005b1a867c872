"""What a process says of its own: lines for people or, with `--ft-log-format json`, one JSON object each."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

FORMATS = ("text", "json")
_TEXT = logging.Formatter("%(asctime)s ft %(levelname)s %(message)s")
_BARE = logging.Formatter("%(message)s")

About = Mapping[str, Any]


class LogContext:
    """How this process says what, and who it is."""

    def __init__(self) -> None:
        self.json = False
        self.component = "ftrun"
        self.about: Callable[[], About] = dict
        """What is known now of `node`, `role`, `epoch`, `step`. Called in any thread."""

    def line(self, level: str, text: str) -> str:
        """`text` as it is said to people, or as an object."""
        return entry(time.time(), level, self.component, self.about(), text) if self.json else text

    def record(self, record: logging.LogRecord) -> str:
        """The same of what was logged."""
        if not self.json:
            return _TEXT.format(record)
        return entry(record.created, record.levelname, self.component, self.about(), _BARE.format(record))


LOG_CONTEXT = LogContext()


def entry(at: float, level: str, component: str, about: About, message: str) -> str:
    """An object in a line. `at`: seconds since 1970."""
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03}Z"
    found = {"time": stamp, "level": level, "component": component, **about, "message": message}
    return json.dumps(found, ensure_ascii=False)


def is_entry(line: str) -> bool:
    """Whether somebody has made it by `entry`."""
    return line.startswith('{"time": "') and '", "component": "' in line and line.endswith("}")
