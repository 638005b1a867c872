"""A role's state comes from whoever has it, and to nobody but the plan that asked for it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core.fleet import Fleet
from core.node.test_ready_memory import SECRET, SEGMENT, fill
from core.plans import plan
from core.real_agent import RealAgent
from memory_of import memory_files
from waiting import wait_for_value

from ft_core.net.transport import TcpTransport
from ft_core.node import events as e
from ft_core.node.link.inquiries import Inquiries
from ft_core.node.memory.fetch import bring
from ft_core.protocol import messages as m
from ft_core.protocol.transfers import Found, Question, StrikeCopy
from ft_core.settings import Command, Settings
from ft_core.state.manifest import CHUNK
from ft_core.state.store import NodeStore

VERSION = 3


@contextmanager
def holder(secret: bytes = SECRET) -> Iterator[SimpleNamespace]:
    """A node that has the role's state. `ask`: what is done before a question is answered."""
    here = SimpleNamespace(store=NodeStore(), ask=lambda _: None)
    here.data = fill(here.store, version=VERSION)
    answer = Inquiries("holder", here.store, lambda: 0.0).answer

    def asked(question: Question) -> Found:
        here.ask(question)
        return answer(question)

    here.transport = TcpTransport(here.store, secret, answer=asked)
    try:
        yield here
    finally:
        here.transport.close()


def of(holders: list[Any], epoch: int = 1, here: str = "127.0.0.1:1") -> m.NodePlan:
    """Role 0 goes to `node0`, from the others."""
    places = {f"node{n + 1}": other.transport.address for n, other in enumerate(holders)}
    nodes = {name: m.NodeAddress(address, name) for name, address in {"node0": here, **places}.items()}
    sources = {0: {SEGMENT.id: list(places)}}
    return plan(epoch, roles={0: "node0"}, nodes=nodes, version=VERSION, origin="memory", sources=sources)


def test_a_fetch_of_an_epoch_that_is_over_is_nobody_s(tmp_path: Path) -> None:
    """It hangs at a silent node while the next epoch has the state from another, and trains."""
    asked, answers = threading.Event(), threading.Event()

    def silent(question: Question) -> None:
        asked.set()
        answers.wait(60)

    async def test() -> None:
        async with Fleet(tmp_path / "job", nodes=1, ranks=[], replicas=0) as fleet:
            agent = RealAgent(fleet.settings, fleet.job_dir, "node0", 0)
            told: list[e.Event] = []
            agent._handle = told.append  # type: ignore[assignment,method-assign]
            with holder(fleet.secret) as first, holder(fleet.secret) as second:
                first.ask = silent
                orders = [e.FetchState(1, 0, (0,), of([other], n)) for n, other in ((1, first), (2, second))]
                agent.machine.epochs.plan = orders[0].plan
                agent.machine.epochs.epoch = 1
                late = asyncio.create_task(agent._bring(orders[0]))
                await asyncio.to_thread(asked.wait, 60)
                agent.machine.epochs.plan = orders[1].plan
                agent.machine.epochs.epoch = 2
                await agent._bring(orders[1])
                [brought] = told
                assert (
                    isinstance(brought, e.StateFetched) and brought.order is orders[1] and not brought.failed
                )
                memory = agent.store.memory(0)
                before, files = list(memory.slots), memory_files(os.getpid())
                answers.set()
                await late
                assert told == [brought]
                assert memory.slots == before
                found = memory.find(VERSION)
                assert found is not None and bytes(found[1].data(0)) == second.data
                wait_for_value(lambda: memory_files(os.getpid()), files)
            agent.transport.close()

    asyncio.run(test())


def test_a_bad_copy_at_a_node_that_is_lost_then_is_not_the_last_that_is_tried() -> None:
    def lost(question: Question) -> None:
        if isinstance(question, StrikeCopy):
            threading.Thread(target=bad.transport.close).start()
            raise OSError("it ends")

    settings = Settings(nnodes=1, nproc_per_node=1, command=Command("train.py"))
    store = NodeStore()
    with holder() as bad, holder() as good:
        buffer = bad.store.memory(0).slots[0]
        buffer.data(0)[CHUNK] ^= 1
        bad.ask = lost
        transport = TcpTransport(store, SECRET)
        try:
            assert bytes(bring(0, of([bad, good]), store, transport, settings).data(0)) == good.data
        finally:
            transport.close()
