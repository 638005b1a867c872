"""Run by torchrun for test_adoption.py: in stage 3 some ranks are away, and the next one steps their slices.

Then all are as if those ranks had been there and given zero gradients.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from adoption_worker import alone, compare
from deepspeed import comm
from deepspeed.runtime.zero import stage3
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from state_worker import BF16, CASES, TrainedEngine, collectives, main, stage

from ft_core.adapter import Redundancy
from ft_core.comm import backend
from ft_core.comm.process_group import Communicators
from ft_core.comm.rendezvous_server import Stores
from ft_core.conformance import Trial

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
CASES |= {"stage3-autocast": AUTOCAST | stage(3), "stage3-bf16-whole": BF16 | stage(3, sub_group_size=10**9)}
FIRST, STEPS = 2, 3
AWAY = ((0,), (1,), (2,), (0, 1))

RANK, SECRET = int(os.environ["RANK"]), b"of this test"
comms = Communicators(RANK, int(os.environ["WORLD_SIZE"]), on_failure=print, secret=SECRET)


def begin_store() -> str:
    """Rank 0 has it; where, the others learn from torchrun's."""
    theirs = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if RANK == 0:
        theirs.set("ft/store", Stores.in_thread("127.0.0.1", SECRET).address)
    return theirs.get("ft/store").decode()


STORE = begin_store()


def begin_epoch(absent: dict[int, int]) -> None:
    epoch = comms.epoch + 1
    comms.abort(epoch)
    comms.swap(epoch, STORE, {}, None, absent, True)
    comms.reset()


class InOrder:
    """`deepspeed.comm`, adding norms up as when `adopters` give those of ranks that are away."""

    def __init__(self, adopters: dict[int, int]) -> None:
        self.adopters = adopters

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)

    def all_reduce(self, tensor: torch.Tensor, op: Any = comm.ReduceOp.SUM, group: Any = None) -> Any:
        if op != comm.ReduceOp.SUM:
            return comm.all_reduce(tensor, op=op, group=group)
        parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        for lost, adopter in sorted(self.adopters.items()):
            parts[adopter] += parts[lost]
        return tensor.copy_(sum(part for rank, part in enumerate(parts) if rank not in self.adopters))


def whole(job: TrainedEngine) -> list[torch.Tensor]:
    """What a script can ask for: of each parameter the main parameter, and the gradient."""
    parameters = [p for p in job.engine.module.parameters() if p.requires_grad]
    return [get(p) for p in parameters for get in (safe_get_full_fp32_param, safe_get_full_grad)]


def bits(found: Any) -> Any:
    """For comparison: what pads slices to equal size may be no number."""
    about, tensors, envelope = found
    return about, {name: t.reshape(-1).view(torch.uint8) for name, t in tensors.items()}, envelope


def check(case: str) -> int:
    """Returns how many tensors were compared."""
    comms.end_startup()
    job = TrainedEngine(case, seed=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert job.adapter.replica_group.redundancy is Redundancy.ADOPTABLE, job.adapter.objection
    job.adapter.adopt([])
    weighed: list[int] = []
    enter = job.engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads

    def entered(parameter: Any) -> None:
        if weighed:
            parameter.grad.mul_(world / len(weighed)) if rank in weighed else parameter.grad.zero_()
        enter(parameter)

    job.engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads = entered
    trial = Trial(job, collectives)
    trial.train(0, FIRST)
    before, compared = trial.snapshot(), 0
    steps = range(FIRST + 1, FIRST + 1 + STEPS)
    for away in AWAY:
        weighed[:] = [r for r in range(world) if r not in away]
        adopters = {r: next(a for i in range(world) if (a := (r + i) % world) in weighed) for r in away}
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, alone(job.adapter, rank))
        of_lost, told = {r: everybody[r] for r in away}, []
        stage3.dist, plain = InOrder(adopters), stage3.dist
        for step in steps:
            losses, gathered = job.step(step - 1), whole(job)
            dist.all_gather_object(everybody, alone(job.adapter, rank))
            told.append((losses, gathered, list(everybody)))
        stage3.dist = plain
        trial.restore(before)
        dist.barrier()
        begin_epoch(adopters)
        if rank in weighed:
            adopted = job.adapter.adopt([r for r in away if adopters[r] == rank])
            for role, state in adopted.items():
                state.restore(of_lost[role][1], of_lost[role][2])
            for step, (losses, gathered, then) in zip(steps, told, strict=True):
                where = f"{case}, without {away}, step {step}"
                assert job.step(step - 1) == losses, f"{where}: losses differ"
                for found, expected in zip(whole(job), gathered, strict=True):
                    assert torch.equal(found, expected), f"{where}: a main parameter or gradient differs"
                for role, state in {rank: job.adapter, **adopted}.items():
                    compare(bits(alone(state, role)), bits(then[role]), f"{where}, rank {role}")
                    compared += len(then[role][1])
            assert not job.adapter.adopt([])
        begin_epoch({})
        trial.restore(before)
        weighed.clear()
    return compared


if __name__ == "__main__":
    backend.install(comms)
    begin_epoch({})
    main(check)
    dist.barrier()
    os._exit(0)  # without the threads that open communicators
