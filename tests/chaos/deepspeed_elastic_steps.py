"""The DeepSpeed recipes, telling every role's loss and state after every step.

Prints lines `state STEP RANK DIGEST EPOCH` and `own STEP RANK LOSS`. Under `ftrun` it goes as far as the
file `limit` of its job says. With FT_TOLD=LEDGER, without fault tolerance, it is told beforehand which
replica groups train which samples in which step: those of the ledger of another run.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import pretrain_clm
import pretrain_pipeline
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.zero import stage3, stage_1_and_2
from digest import state_tensors
from elastic_told import taking_part, tell_again, told
from torch.utils.data import default_collate

from ft_core.errors import EpochChanged
from ft_core.kept import keep
from ft_core.worker import session

mark = torch.randint(1 << 40, (3,), generator=torch.Generator().manual_seed(os.getpid()))
"""What a script has of its own: a worker that was not there in the first epoch has it from another."""
keep(mark=mark)


def telling(recipe: Any) -> type:
    """The recipe's trainer, printing what it has become."""

    class Telling(recipe.Trainer):
        def log_step(self, step: int, loss: float, *rest: Any) -> None:
            digest = hashlib.sha256()
            for name, tensor in sorted(state_tensors(self.engine), key=lambda item: item[0]):
                content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                digest.update(name.encode() + content)
            own = self.engine.dp_group_loss.item() if recipe is pretrain_pipeline else self.own_loss
            current = session.current()
            epoch = current.epoch if current is not None else 0
            if epoch <= 1:
                mark.fill_(7)
            digest.update(mark.numpy().data)
            print(f"state {step} {dist.get_rank()} {digest.hexdigest()[:16]} {epoch}")
            if self.trained(step):
                print(f"own {step} {dist.get_rank()} {own!r}", flush=True)
            super().log_step(step, loss, *rest)
            if current is not None:
                with contextlib.suppress(EpochChanged):  # what ends an epoch needs this role in the engine
                    while step >= int((current.job_dir / "limit").read_text()):
                        current.check_epoch()
                        time.sleep(0.01)
                dist.barrier()  # a failure at the limit finds the script outside of the engine's calls

        def trained(self, step: int) -> bool:
            """Whether this rank's samples count in that step."""
            return True

        def mean(self, losses: list[torch.Tensor]) -> float:
            self.own_loss = torch.stack(losses).mean().item()
            return super().mean(losses)

    return Telling


class InOrder:
    """`deepspeed.comm`, adding norms up as in the other run, where groups have adopted parts of others."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)

    def all_reduce(self, tensor: torch.Tensor, op: Any = comm.ReduceOp.SUM, group: Any = None) -> Any:
        there = self.trainer.taking_part
        groups = range(self.trainer.engine.dp_world_size)
        norm = not tensor.dim() and group is self.trainer.engine.optimizer.dp_process_group
        if not norm or len(there) == len(groups):
            return comm.all_reduce(tensor, op=op, group=group)
        parts = [torch.zeros_like(tensor) for _ in groups]
        dist.all_gather(parts, tensor, group=group)
        sums = {g: parts[g] for g in there}
        for away in sorted(set(groups) - set(there)):
            adopter = next(g for i in groups if (g := (away + i) % len(groups)) in there)
            sums[adopter] = sums[adopter] + parts[away]
        return tensor.copy_(sum(sums.values()))


def knowing(recipe: Any, path: Path) -> type:
    """The recipe's trainer, knowing who trains what."""
    samples_of = told(path)

    class Knowing(telling(recipe)):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.group = self.engine.mpu.get_data_parallel_rank() if self.engine.mpu else dist.get_rank()
            steps = self.engine.optimizer.step

            def slowed(_: Any, *args: Any, **kwargs: Any) -> Any:
                share = len(self.contributing) / self.engine.dp_world_size
                optimizer = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
                rates = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups if share < 1 else ():
                    group["lr"] *= math.sqrt(share)
                done = steps(*args, **kwargs)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                return done

            self.engine.optimizer.step = type(steps)(slowed, self.engine.optimizer)
            self.weigh_gradients(self.engine.zero_optimization_stage())

        def weigh_gradients(self, stage: int) -> None:
            if stage == 0:
                gradients = self.engine._get_gradients_for_reduction

                def weighted() -> Any:
                    found = gradients()
                    for gradient in found[0]:
                        self.weigh(gradient)
                    return found

                self.engine._get_gradients_for_reduction = weighted
            else:
                enter = self.engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads

                def entered(parameter: Any, *args: Any) -> None:
                    self.weigh(parameter.grad)
                    enter(parameter, *args)

                self.engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads = entered
                stage_1_and_2.dist = stage3.dist = InOrder(self)

        def weigh(self, gradient: torch.Tensor) -> None:
            factor = self.engine.dp_world_size / len(self.contributing)
            gradient.copy_(gradient * factor if self.group in self.contributing else gradient * 0)

        def trained(self, step: int) -> bool:
            return self.group in samples_of[step]

        @property
        def contributing(self) -> dict[int, list[int]]:
            return samples_of[self.engine.global_steps + 1]

        @property
        def taking_part(self) -> tuple[int, ...]:
            return taking_part(path, self.engine.global_steps + 1)

    def batches(loader: Any, position: int) -> Iterator[Any]:
        """In place of the recipe's: what the ledger says. An epoch has its own order."""
        sampler = loader.data_sampler
        each, size = sampler.num_samples, loader.batch_size
        group, groups = sampler.rank, sampler.num_replicas
        orders: dict[int, list[int]] = {}

        def sample(at: int) -> Any:
            epoch, place = divmod(at, each * groups)
            if epoch not in orders:
                order = torch.randperm(len(loader.dataset), generator=torch.Generator().manual_seed(epoch))
                padding = order[: each * groups - len(order)]
                orders[epoch] = torch.cat([order, padding]).tolist()
            return loader.dataset[orders[epoch][place]]

        for _, dealt in sorted(samples_of.items()):
            positions = dealt.get(group, dealt[min(dealt)])
            for first in range(0, len(positions), size):
                chosen = [sample(at) for at in positions[first : first + size]]
                yield (loader.collate_fn or default_collate)(chosen)

    plain = corpus.batches
    corpus.batches = lambda loader, position: (
        batches(loader, position) if loader.data_sampler.shuffle else plain(loader, position)
    )
    return Knowing


def main() -> None:
    """As the recipe's."""
    pipeline = any(argument.startswith("--num-stages") for argument in sys.argv)
    recipe = pretrain_pipeline if pipeline else pretrain_clm
    tell_again()
    ledger = os.environ.get("FT_TOLD")
    recipe.Trainer = knowing(recipe, Path(ledger)) if ledger else telling(recipe)
    recipe.main()


if __name__ == "__main__":
    main()
