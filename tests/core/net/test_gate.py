"""TRAIN before STATE: what a sender decides by what it hears, and what it reads of the wire."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_core.net.gate import (
    DONE_BY,
    EVERY,
    FIRST,
    LOOK,
    TALK,
    Ear,
    Gates,
    Listener,
    Pace,
    Reading,
    Turn,
    Usual,
)
from ft_core.net.wire import LOOPBACK, Wire, interface_to

RATE = 1e9
"""Bytes a second that the wire carries."""


class Line:
    """A wire, its time, and a sender's ear at it."""

    def __init__(self) -> None:
        self.at, self.sent, self.own, self.ear = 100.0, 5e9, 0.0, Ear()

    def reading(self) -> Reading:
        return Reading(self.at, int(self.sent), int(self.own))

    def passes(self, seconds: float, rate: float = RATE, own: float = 0.0) -> None:
        """Time, in which so many bytes a second leave, `own` of them the sender's."""
        self.at += seconds
        self.sent += rate * seconds
        self.own += own * seconds

    def talks(self, seconds: float = 1.01 * TALK) -> None:
        """It is alone; what it has sent has left when it falls silent."""
        self.passes(seconds, own=RATE)
        self.ear.begins(self.reading())

    def looks(self, seconds: float, rate: float) -> list[bool]:
        """What it finds in looks for so long."""
        return [self.look(rate) for _ in range(round(seconds / LOOK))]

    def look(self, rate: float) -> bool:
        self.passes(LOOK * 1.01, rate)
        return self.ear.quiet(self.reading())


@pytest.fixture
def line() -> Line:
    """A sender has been alone on it for a while."""
    line = Line()
    line.ear.begins(line.reading())
    line.talks()
    assert line.look(0)
    return line


def test_who_is_alone_goes_on_after_one_look(line: Line) -> None:
    assert line.ear.most == pytest.approx(RATE)
    for _ in range(3):
        line.talks()
        assert line.look(0)


def test_what_was_sent_last_and_is_still_on_its_way_is_not_taken_for_training(line: Line) -> None:
    line.passes(TALK, own=2 * RATE)  # half of it waits in buffers
    line.ear.begins(line.reading())
    assert not any(line.looks(TALK, RATE))
    assert line.look(0)


def test_training_is_waited_for(line: Line) -> None:
    line.talks()
    assert not any(line.looks(3, RATE))
    assert not any(line.looks(1, RATE / 4))  # a link that others share
    line.looks(1, 0)
    line.talks()
    assert line.look(0)  # it was alone again


def test_an_exchange_that_stands_still_for_a_moment_is_not_over(line: Line) -> None:
    """It waits for the other node, whose burst is before it in a queue."""
    line.talks()
    for _ in range(5):
        assert not any(line.looks(TALK, RATE))
        assert not any(line.looks(TALK / 2, 0))
    assert any(line.looks(2 * TALK, 0))


def test_acknowledgements_are_no_training(line: Line) -> None:
    """Those of the copies that come from others."""
    line.talks()
    assert line.look(RATE / 50)


def test_a_moment_is_not_long_enough_to_hear_anything(line: Line) -> None:
    line.talks()
    line.passes(LOOK / 2, 0)
    assert not line.ear.quiet(line.reading())


def test_a_slow_wire_is_looked_at_for_longer() -> None:
    """It takes some ms for each packet that is handed over at once, and nothing is counted meanwhile."""
    line, slow, packet = Line(), RATE / 100, 1 << 16
    line.ear.begins(line.reading())
    for _ in range(2):
        line.passes(1.0, slow, own=slow)
        line.ear.begins(line.reading())
    for _ in range(100):
        for _ in range(round(packet / slow / LOOK)):
            assert not line.look(0)
        line.sent += packet
    assert any(line.looks(1.0, 0))


@pytest.mark.parametrize(
    ("step", "usual", "elapsed", "messages", "slack"),
    [
        (10, Usual(2, 100), 0, 0, 10 * DONE_BY - 2),
        (10, Usual(2, 100), 3, 50, 10 * DONE_BY - 3 - 1),
        (10, Usual(2, 100), 9, 50, None),  # it is late
        (10, Usual(2, 100), 1, 400, 10 * DONE_BY - 1),  # there is more than there was
        (10, Usual(9, 100), 0, 0, None),  # copies hardly keep up
        (0, Usual(2, 100), 0, 0, None),  # a newcomer's first
        (10, None, 0, 0, None),  # it is measured how long it takes
    ],
)
def test_how_long_copies_may_be_held_back(
    step: float, usual: Usual | None, elapsed: float, messages: int, slack: float | None
) -> None:
    found = Pace(step, usual).slack(elapsed, messages)
    assert found <= 0 if slack is None else found == pytest.approx(slack)


# -- in time ---------------------------------------------------------------------------------------


def busy() -> bool:
    return True


def full() -> int:
    """What a wire has carried on which somebody sends all the time."""
    return int(time.monotonic() * RATE)


def nothing() -> int:
    return 0


def refused() -> int:
    raise AssertionError("the wire is not to be read")


def turn(step: float, busy: Callable[[], bool] = busy, seconds: float = 0.1) -> Turn:
    return Turn(Pace(step, Usual(seconds, 10)), busy)


def test_a_message_waits_as_long_as_there_is_slack() -> None:
    """In seconds that pass, not in those that it meant to sleep: however long these last."""
    held = turn(step=0.5)
    held.passes(Listener(full, nothing))
    assert held.elapsed >= 0.5 * DONE_BY - 0.1
    assert held.messages == 1


def test_all_messages_of_a_snapshot_wait_no_longer_than_that() -> None:
    """Together, whichever connections they take."""
    step = 0.6
    held, listener = turn(step), Listener(full, nothing)

    def passes() -> None:
        while held.elapsed < DONE_BY * step:
            held.passes(listener)

    threads = [threading.Thread(target=passes) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held.passes(Listener(refused, nothing))


def test_a_message_passes_once_training_falls_silent() -> None:
    ended, heard = threading.Event(), threading.Event()
    until = 0

    def sent() -> int:
        nonlocal until
        if not ended.is_set():
            until = full()
            heard.set()
        return until

    listener = Listener(sent, nothing)
    thread = threading.Thread(target=turn(step=1000).passes, args=(listener,))
    thread.start()
    heard.wait()
    assert thread.is_alive()
    ended.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_message_passes_once_no_operation_is_in_flight() -> None:
    """Whoever uses the wire then, it is not training."""
    asked: list[bool] = []

    def ends() -> bool:
        asked.append(len(asked) < 20)
        return asked[-1]

    turn(1000, ends).passes(Listener(full, nothing))
    assert not asked[-1]
    turn(1000, lambda: False).passes(Listener(refused, nothing))


def test_where_there_is_no_slack_nobody_listens() -> None:
    turn(0).passes(Listener(refused, nothing))
    turn(1, seconds=2).passes(Listener(refused, nothing))


def test_an_interface_that_is_gone_holds_nobody_back() -> None:
    def gone() -> int:
        raise OSError("no such device")

    turn(1000).passes(Listener(gone, nothing))


# -- an agent's ------------------------------------------------------------------------------------


def send(gates: Gates, step: float, role: int = 0) -> Turn:
    """A snapshot of one message."""
    turn = gates.turn(role, step, busy)
    turn.passes(None)
    gates.sent(role, turn)
    return turn


def test_some_snapshots_tell_how_long_sending_takes() -> None:
    gates = Gates(nothing)
    measuring = [send(gates, 1.0).measures for _ in range(3 * EVERY)]
    assert [at for at, each in enumerate(measuring) if each] == [*range(FIRST), EVERY, 2 * EVERY]
    assert send(gates, 1.0, role=1).measures


def test_one_that_was_not_sent_tells_nothing() -> None:
    gates = Gates(nothing)
    for _ in range(2 * FIRST):
        assert gates.turn(0, 1.0, busy).measures
    send(gates, 1.0)
    assert not send(gates, 1.0).measures


def test_where_peers_are_others_it_is_measured_anew() -> None:
    gates = Gates(nothing)
    for _ in range(FIRST):
        before = send(gates, 1.0)
    gates.begin()
    gates.sent(0, before)  # it was on its way
    assert [send(gates, 1.0).measures for _ in range(FIRST + 1)] == [True] * FIRST + [False]


def test_a_pause_between_steps_is_no_step() -> None:
    gates = Gates(nothing)
    for _ in range(FIRST):
        send(gates, 1.0)
    assert send(gates, 500.0)._pace.step == send(gates, 1.0)._pace.step == 1.0
    send(gates, 3.0)
    assert send(gates, 3.0)._pace.step == 3.0


def test_within_a_machine_nothing_is_held_back() -> None:
    gates = Gates(refused)
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        held = turn(1000, refused)  # type: ignore[arg-type]
        gates.to(address, held)()
        assert held.messages == 1


def test_where_no_interface_can_be_found_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    gates = Gates(nothing)
    for _ in range(2):
        gates.begin()
        gates.to("nowhere.invalid:1", turn(1000))()
    [said] = caplog.messages
    assert said.startswith("copies go to nowhere.invalid:1 without regard to training's traffic: ")


# -- the wire --------------------------------------------------------------------------------------


@pytest.fixture
def stream() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        yield sender, receiver


def test_what_leaves_is_counted(stream: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = stream
    assert interface_to("127.0.0.1") == interface_to("localhost") == LOOPBACK
    wire = Wire([LOOPBACK])
    before = wire.sent()
    sender.sendall(bytes(1 << 16))
    receiver.recv(1 << 16, socket.MSG_WAITALL)
    assert wire.sent() - before >= 1 << 16
    assert Wire([LOOPBACK, LOOPBACK]).sent() >= 2 * before


def test_there_is_no_such_interface() -> None:
    with pytest.raises(OSError, match="no interface"):
        Wire(["ft-nowhere"])


def test_ports_of_infiniband_count_what_passes_the_kernel_by(tmp_path: Path) -> None:
    """Also those below a bond. Devices of that kind are files here: there are none."""
    assert LOOPBACK == "lo"
    (tmp_path / "lo" / "lower_eth7").mkdir(parents=True)
    counters = []
    for name, device in (("lo", "mlx5_0"), ("eth7", "mlx5_1")):
        path = tmp_path / name / "device" / "infiniband" / device / "ports" / "1" / "counters"
        path.mkdir(parents=True)
        counters.append(path / "port_xmit_data")
        counters[-1].write_text("0\n")
    wire, bare = Wire([LOOPBACK], tmp_path), Wire([LOOPBACK])
    sent = 1 << 50  # others use the loopback, too
    counters[0].write_text(f"{sent // 4}\n")
    before = bare.sent()
    assert wire.sent() >= before + sent
    counters[1].write_text(f"{sent // 2}\n")
    assert wire.sent() >= before + 3 * sent
