"""An agent's data side as a process, for test_transport.py: prints its address and obeys requests."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from ft_core.net.transport import TcpTransport
from ft_core.protocol.transfers import Accepted, Found, Question, StrikeCopy
from ft_core.state.manifest import Segment
from ft_core.state.replicas import ReplicaStore

SECRET = b"transport test secret"


class Store(ReplicaStore):
    """Can hold a push up at its commit."""

    hold = False

    def commit(self, segment: Segment, version: int) -> None:
        if self.hold:
            print("at commit", flush=True)
            threading.Event().wait()
        super().commit(segment, version)


def main() -> None:
    store = Store()

    def answer(question: Question) -> Found:
        if isinstance(question, StrikeCopy):
            return Accepted()
        raise KeyError("no such thing")

    transport = TcpTransport(store, SECRET, answer=answer)
    print(transport.address, flush=True)
    for line in sys.stdin:  # until the test closes it
        kind, *about = json.loads(line)
        found: Any = None
        match kind:
            case "versions":
                found = store.versions()
            case "flip":
                segment, version, byte = about
                for slot in store._slots[segment]:
                    if slot.version == version and slot.memory is not None:
                        slot.memory[byte] ^= 1
            case "epoch":
                [store.epoch] = about
            case "hold":
                store.hold = True
            case "counts":
                found = {"sent": transport.sent_bytes, "received": transport.received_bytes}
        print(json.dumps(found), flush=True)
    transport.close()


if __name__ == "__main__":
    main()
