"""The training script of `benchmarks.gate`: layers that compute, and then exchange something that the next
one waits for, as a pipeline's stages and sharded weights do.

It rests where a GPU would compute, so that the network alone is short. Blocks of steps take turns: `KINDS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_core.adapter import Adapter, StateTensor
from ft_core.state.memory import Word
from ft_core.worker import session

KINDS = {
    "P": "plain: no state is sent",
    "S": "state, no gate",
    "G": "state, gate",
    "N": "state, gate; always an operation in flight",
}
"""The last is what a gate sees of NCCL, whose operations are issued ahead."""


class State(Adapter):
    """So many bytes that this role alone has. All of them change in each step."""

    def __init__(self, nbytes: int) -> None:
        self.own = torch.zeros(nbytes // 4, dtype=torch.int32)
        self.rank, self.ring = dist.get_rank(), tuple(range(dist.get_world_size()))

    def tensors(self) -> Iterator[StateTensor]:
        yield StateTensor("own", self.own, (self.rank,))

    def envelope(self) -> Any:
        return {}

    def envelope_holders(self) -> tuple[int, ...]:
        return (self.rank,)

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        self.own.copy_(tensors["own"])

    def derive(self) -> None:
        pass  # a version leaves nothing out

    def reset(self) -> None:
        pass  # a step leaves nothing behind


class Trainer:
    """Steps of each kind, and what they take."""

    def __init__(self, live: session.Session, about: dict[str, Any]) -> None:
        self._live, self._about, self._control = live, about, live._shell.control
        self._traffic = live.comms.traffic
        self._exchanged = torch.ones(about["exchange"] // 4)
        self.state = State(about["state"])

    def train(self) -> list[dict[str, Any]]:
        """All blocks, after some steps in which buffers and peers' slots are first used."""
        for _ in range(self._about["warm_up"]):
            self._step("G")
        return [self._block(kind) for kind in self._about["pattern"]]

    def _block(self, kind: str) -> dict[str, Any]:
        """The first step still has what the block before left, and does not count."""
        self._switch(kind)
        self._step(kind)
        found = []
        for _ in range(self._about["block"]):
            began, waited = time.perf_counter(), self._control[Word.WAITED_NS]
            self._step(kind)
            waited = self._control[Word.WAITED_NS] - waited
            found.append((time.perf_counter() - began, waited / 1e9))
        return {"kind": kind, "seconds": [each[0] for each in found], "waited": [each[1] for each in found]}

    def _switch(self, kind: str) -> None:
        """A gate is open where no operation is in flight, as far as the agent is told."""
        self._live.comms.traffic = self._traffic if kind == "G" else None
        self._control[Word.TRAFFIC] = int(kind == "N")

    def _step(self, kind: str) -> None:
        for _ in range(self._about["layers"]):
            time.sleep(self._about["compute"])
            dist.all_reduce(self._exchanged)
        if kind != "P":
            self._live.commit_wait()
        dist.all_reduce(self._exchanged[:1].zero_())
        if kind == "P":
            self.state.own += 1
            return
        self._live.optimizer_begins()
        self.state.own += 1
        self._live.step_done()


def main() -> None:
    """Train as FT_BENCH says, and write what it took where the arguments say."""
    about = json.loads(os.environ["FT_BENCH"])
    dist.init_process_group("gloo")
    live = session.current()
    assert live is not None
    trainer = Trainer(live, about)
    entered: list[int] = []

    def train() -> list[dict[str, Any]]:
        if entered:
            raise RuntimeError("something failed in a benchmark of training without failures")
        entered.append(1)
        return trainer.train()

    found = live.protect(trainer.state, train, version=0)
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
