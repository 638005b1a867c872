"""`ftctl top`: a job on a screen, again and again: what it does, where its time went, what happened last."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ft_core.cli.ask import line
from ft_core.cli.events import printable, text
from ft_core.cli.status import summary
from ft_core.errors import ConfigError, FtError
from ft_core.history.lines import Tail, parsed
from ft_core.protocol.goodput import Cause, Spent, in_words

EVENTS = 12
"""The newest, that are shown."""
_ENTER, _LEAVE, _HOME, _LINE_END, _REST = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"
"""Another screen, and back; its beginning; what is right of, and below, what was written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = __doc__
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between two looks; 2")
    parser.add_argument("--once", action="store_true", help="and no more, without taking the screen")


class Happened:
    """What is to be told of a job's events, as far as its directory is here."""

    def __init__(self, job_dir: Path | None) -> None:
        self._job_dir = job_dir
        self._tail: Tail | None = None
        self._newest: deque[str] = deque(maxlen=EVENTS)
        self._spent: Spent | None = None

    @property
    def over(self) -> bool:
        """Whether the job is."""
        return self._tail is not None and self._tail.over

    def lines(self, seconds: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """What the time went to, as the controller says or, if it does not, the newest event; and events, the
        newest last; with what has come since the last call."""
        try:
            if self._tail is None and self._job_dir is not None:
                self._tail = Tail(self._job_dir / "events.jsonl")
        except ConfigError as error:
            return [str(error)], []
        for each in self._tail.lines() if self._tail is not None else ():
            if (event := parsed(each)) is not None:
                self._newest.append(text(event))
                if "spent" in event:
                    self._spent = msgspec.convert(event["spent"], Spent)
        told = self._spent.seconds if self._spent is not None else {}
        spent = {Cause(cause): s for cause, s in seconds.items() if cause in set(Cause)} or told
        return [f"goodput   {in_words(spent)}", ""] if spent else [], list(self._newest)


def frame(args: argparse.Namespace, happened: Happened, height: int = sys.maxsize) -> list[str]:
    """What is shown now, in so many lines: the oldest events make room."""
    lines = [f"ftctl top  {time.strftime('%H:%M:%S')}", ""]
    seconds: Mapping[str, float] = {}
    silence = ""
    try:
        with line(args.job_dir, args.controller) as found:
            status = found.status()
            lines += summary(status).splitlines()[:-1]
            seconds = status.seconds
    except (FtError, OSError) as error:
        silence = str(error)
    try:
        told, events = happened.lines(seconds)
    except (msgspec.ValidationError, OSError) as error:
        told, events = [f"events.jsonl cannot be read: {error}"], []
    lines += ["the job is over" if happened.over else silence, ""] if silence else []
    lines += told
    return [printable(each) for each in lines + events[-max(1, height - len(lines)) :]]


def main(args: argparse.Namespace) -> int:
    """Until the job is over, or Ctrl-C; once where the output is no terminal."""
    happened = Happened(args.job_dir)
    if args.once or not sys.stdout.isatty():
        print("\n".join(frame(args, happened)))
        return 0
    print(_ENTER, end="")
    shown: list[str] = []
    try:
        while not happened.over:
            width, height = shutil.get_terminal_size()
            shown = frame(args, happened, height - 1)
            fitting = [each[:width] + _LINE_END for each in shown[: height - 1]]
            print(_HOME + "\n".join(fitting) + _REST, end="", flush=True)
            time.sleep(max(0.1, args.every))
    except KeyboardInterrupt:
        return 130
    finally:
        print(_LEAVE, end="", flush=True)
    print("\n".join(shown))  # what was seen last
    return 0
