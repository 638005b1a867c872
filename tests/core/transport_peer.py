"""An agent's data side as a process, for test_transport.py: prints its address and obeys requests."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ft_core.net.transport import TcpTransport
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

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        match message["do"]:
            case "versions":
                return {"versions": store.versions()}
            case "flip":
                for slot in store._slots[message["segment"]]:
                    if slot.version == message["version"] and slot.memory is not None:
                        slot.memory[message["byte"]] ^= 1
            case "epoch":
                store.epoch = message["epoch"]
            case "hold":
                store.hold = True
            case "counts":
                return {"sent": transport.sent_bytes, "received": transport.received_bytes}
            case "fail":
                raise KeyError("no such thing")
        return {}

    transport = TcpTransport(store, SECRET, answer=answer)
    print(transport.address, flush=True)
    sys.stdin.read()  # until the test closes it
    transport.close()


if __name__ == "__main__":
    main()
