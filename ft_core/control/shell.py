"""The controller's process: turns the world into events of `control.machine`, and effects into the world."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import get_args

from ft_core.control.events import (
    Admitted,
    Arriving,
    Close,
    Disconnected,
    Effect,
    End,
    Enter,
    Event,
    Failed,
    Greeted,
    LauncherGone,
    Peer,
    Received,
    Record,
    Refused,
    Say,
    Send,
    Terminate,
    Tick,
)
from ft_core.control.machine import FAILURES, Controller
from ft_core.elastic import ledger
from ft_core.errors import FAILED, AuthenticationError, ConfigError, ProtocolError
from ft_core.process import collector, parent, sigterm
from ft_core.process.awake import AwakeClock
from ft_core.process.descriptors import check_limit
from ft_core.process.outlet import FileOutlet, console, log_to_console, say
from ft_core.process.refusals import Refusals
from ft_core.process.tasks import Tasks
from ft_core.protocol import door
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.codec import encode
from ft_core.protocol.messages import (
    FROM_CLIENT,
    AgentHello,
    CtlHello,
    FromAgent,
    FromCtl,
    FromPulse,
    PulseHello,
)
from ft_core.protocol.sockets import listen
from ft_core.settings import Settings, read_secret

log = logging.getLogger(__name__)

TICK = 0.05
PORT_RETRY = 0.2
LAST_LINES = 3.0
"""Seconds that files, the console and the nodes have, each, to take what is still to be told at the end."""

Client = AsyncChannel[FromAgent | FromPulse | FromCtl]
_MAY_SAY: dict[type, tuple[type, ...]] = {
    AgentHello: get_args(FromAgent),
    PulseHello: get_args(FromPulse),
    CtlHello: get_args(FromCtl),
}
"""By the greeting, what comes after it."""


class Shell:
    """Input and output of one controller."""

    def __init__(self, settings: Settings, job_dir: Path, failed_before: int | None = None) -> None:
        """`failed_before`: None for the job's first controller; else how many in a row have failed until now
        of an error of their own."""
        self.settings, self.job_dir, self._failed_before = settings, job_dir, failed_before
        self._secret = read_secret(job_dir)
        self.events, self._samples = FileOutlet(job_dir / "events.jsonl"), FileOutlet(job_dir / ledger.NAME)
        recorded = _recorded(job_dir / "events.jsonl")
        self.machine = Controller(
            settings, str(job_dir), lambda: secrets.token_hex(4), recorded, pid=os.getpid()
        )
        self.clock = AwakeClock(2 * TICK)
        self._refusals = Refusals(lambda reason: self._handle(Refused(reason)))
        self._numbers = itertools.count()
        self._channels: dict[Peer, Client] = {}
        self._arriving = 0
        self._done: asyncio.Future[int]

    async def run(self) -> int:
        """Serve until the job ends. Returns its exit code. Raises what this process cannot cope with."""
        try:
            return await self._serve()
        finally:
            for outlet in (self.events, self._samples):
                outlet.close()
                if not await asyncio.to_thread(outlet.flush, LAST_LINES):
                    log.error("%s: its last lines could not be written", self.job_dir / outlet.name)

    async def _serve(self) -> int:
        self._done = asyncio.get_running_loop().create_future()
        tasks = Tasks(self._fail)
        tasks.spawn(door.serve(await self._listen(), "the controller", self._accept))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._handle, Terminate())
        tasks.spawn(self._tick())
        try:
            code = await self._done
            sigterm.ignore()
        finally:
            tasks.cancel()
        with contextlib.suppress(TimeoutError):  # of one that takes nothing any more
            async with asyncio.timeout(LAST_LINES):
                flushed = (channel.drain() for channel in self._channels.values())
                await asyncio.gather(*flushed, return_exceptions=True)
        return code

    async def _listen(self) -> socket.socket:
        host, port = self.settings.controller.rsplit(":", 1)
        said = False
        while True:
            try:
                return listen(host, int(port))
            except OSError as error:
                if self._failed_before is None:
                    raise ConfigError(f"the controller cannot listen at {host}:{port}: {error}") from None
                if not said:  # training goes on meanwhile; whoever has the port may leave
                    log.warning("a new controller cannot listen at %s:%s yet: %s", host, port, error)
                said = True
            await asyncio.sleep(PORT_RETRY)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if parent.gone():
                self._handle(LauncherGone())
            self.clock.tick()
            self._refusals.tick()
            self._handle(Tick())

    # -- events and effects --------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if self._done.done() and self._done.exception() is not None:
            return  # this controller has failed
        try:
            self._carry_out(self.machine.handle(event, self.clock.now))
        except Exception as error:
            self._fail(error)

    def _carry_out(self, effects: list[Effect]) -> None:
        encoded: dict[int, bytes] = {}  # what goes to all nodes is one object
        for effect in effects:
            match effect:
                case Send(peer, message):
                    if (channel := self._channels.get(peer)) is None:
                        continue
                    if (body := encoded.get(id(message))) is None:
                        body = encoded[id(message)] = encode(message)
                    with contextlib.suppress(ConnectionError):  # it is noticed by its reader
                        channel.post_encoded(body)
                case Close(peer):
                    if (channel := self._channels.get(peer)) is not None:
                        channel.close()
                case Record():
                    self.events.write(_line(effect))
                case Enter(line):
                    self._samples.write(line)
                case Say(text):
                    say(text)
                case End(code):
                    if not self._done.done():
                        self._done.set_result(code)

    def _fail(self, error: Exception) -> None:
        """An error of this controller's own: a successor goes on from what the agents know, a few times."""
        if self._done.done():
            return
        if self._failed_before is not None and self._failed_before + 1 >= FAILURES:
            log.critical("this controller fails as well", exc_info=error)
            self._carry_out(self.machine.handle(Failed(repr(error)), self.clock.now))
        else:
            self._done.set_exception(error)

    # -- connections ---------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection. Only what is wrong with the connection ends it; other errors end this process."""
        try:
            await self._admit(reader, writer)
        except asyncio.CancelledError:
            pass  # this controller ends
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        except ConnectionError:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Shake hands, hear who it is, and serve it until it leaves."""
        self._arrive(1)
        try:
            channel = await AsyncChannel.accept(reader, writer, self._secret, FROM_CLIENT)
            self._handle(Admitted())
            hello = await channel.recv()
        finally:
            self._arrive(-1)
        if (says := _MAY_SAY.get(type(hello))) is None:
            raise ProtocolError(f"{channel.peer} does not greet, but sends {type(hello).__name__}")
        peer = next(self._numbers)
        self._channels[peer] = channel
        try:
            if isinstance(hello, AgentHello):
                self._handle(Greeted(peer, hello))
            elif isinstance(hello, PulseHello):
                self._handle(Received(peer, hello))
            while True:
                message = await channel.recv()
                if type(message) not in says or type(message) in _MAY_SAY:
                    raise ProtocolError(f"{channel.peer} may not send {type(message).__name__}")
                self._handle(Received(peer, message))
        finally:
            del self._channels[peer]
            self._handle(Disconnected(peer))

    def _arrive(self, change: int) -> None:
        self._arriving += change
        self._handle(Arriving(self._arriving))


def _line(record: Record) -> str:
    line = {
        "event": record.event,
        "epoch": record.epoch,
        "monotonic": time.monotonic(),
        "time": time.time(),
        "roles": list(record.roles),
        "reason": record.reason,
        **record.more,
    }
    return json.dumps(line) + "\n"


def _recorded(path: Path) -> dict[str, int]:
    """Event -> the newest epoch that has it."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines() if path.is_file() else []
    except OSError as error:
        log.warning("%s: %s; some events may come twice", path, error)
        return found
    for line in lines:
        with contextlib.suppress(ValueError):  # torn by the death of its writer
            event = json.loads(line)
            found[event["event"]] = event["epoch"]
    return found


def main() -> int:
    """Entry of the controller process (started by `ftrun`)."""
    parser = argparse.ArgumentParser(prog="python -m ft_core.control", description=__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--failed-before", type=int, help="given to a controller that takes another's place")
    parent.add_argument(parser)
    args = parser.parse_args()
    parent.expect(args.parent)
    log_to_console()
    collector.exempt()
    try:
        settings = Settings.read(args.job_dir)
        check_limit("the controller", *settings.size)
        return asyncio.run(Shell(settings, args.job_dir, args.failed_before).run())
    except ConfigError as error:
        say(f"ftrun: {error}")
        return 1
    except Exception:
        log.critical("this controller fails", exc_info=True)
        return FAILED
    finally:
        console().flush(LAST_LINES)
