"""The Megatron-Core recipe, telling every role's state after every step.

Prints lines `state STEP RANK DIGEST EPOCH`. Under `ftrun` it goes as far as the file `limit` of its job says.
With FT_TOLD=LEDGER, without fault tolerance, it is told beforehand which replica groups train which samples
in which step: those of the ledger of another run. With FT_KEEPS shards of the optimizer cannot be adopted.
With FT_PARAMETERS the state told of is the parameters alone, which all groups have.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretrain_gpt_core as recipe
import torch
import torch.distributed as dist
from elastic_norm import sum_as_held
from elastic_told import tell_again, told
from megatron.core import parallel_state

from ft_core.worker import session
from ft_megatron import state
from ft_megatron.state import MegatronAdapter


class Telling(recipe.Trainer):
    """Prints what it has become."""

    def log_step(self, *result: Any) -> None:
        digest = hashlib.sha256()
        for name, tensor in sorted(recipe.state_tensors(self.model, self.optimizer)):
            if self.tells_of(name):
                data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                digest.update(name.encode() + data)
        about = (self.training.step, dist.get_rank(), digest.hexdigest()[:16], self.training.epoch)
        print("state", *about, flush=True)
        super().log_step(*result)
        if (current := session.current()) is not None:
            while self.training.step >= int((current.job_dir / "limit").read_text() or 0):
                current.check_epoch()
                time.sleep(0.01)

    def tells_of(self, name: str) -> bool:
        """Parameters that the next step gathers follow from the rest."""
        if self.gathers_in_forward:
            return not name.startswith("model.")
        return name.startswith("model.") or "FT_PARAMETERS" not in os.environ


class Told(Telling):
    """Knows who trains what."""

    def __init__(self, args: recipe.Arguments) -> None:
        super().__init__(args)
        self.told = told(Path(os.environ["FT_TOLD"]))
        self.samples.global_batch = self.global_batch  # type: ignore[method-assign]
        for group in self.model[0].bucket_groups:
            group.start_grad_sync = self.weighted(group, group.start_grad_sync)
        steps, self.optimizer.step_with_ready_grads = self.optimizer.step_with_ready_grads, self.slowed
        self.steps = steps
        sum_as_held(Path(os.environ["FT_TOLD"]), lambda: self.training.step + 1)

    @property
    def contributing(self) -> list[int]:
        return sorted(self.told[self.training.step + 1])

    @property
    def members(self) -> int:
        """Data-parallel ranks in a replica group."""
        instances = self.args.num_distributed_optimizer_instances
        return self.args.data_parallel_size // instances if instances > 1 else 1

    @property
    def group(self) -> int:
        return parallel_state.get_data_parallel_rank() // self.members

    def global_batch(self, dataset: Any, index: int, job: Any) -> Iterator[dict[str, Any]]:
        dealt = self.told[index + 1]
        positions = dealt.get(self.group, dealt[min(dealt)])
        size, own = self.args.micro_batch_size, parallel_state.get_data_parallel_rank() % self.members
        for micro in range(self.args.num_microbatches):
            if not self.samples.needed:
                yield dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
                continue
            first = (micro * self.members + own) * size
            samples = [dataset[i] for i in positions[first : first + size]]
            yield {key: torch.stack([s[key] for s in samples]) for key in samples[0]}

    def weighted(self, group: Any, start: Any) -> Any:
        def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1 / (len(self.contributing) * self.members)
                if self.group not in self.contributing:
                    bucket.grad_data.zero_()
            return start(*args, **kwargs)

        return start_grad_sync

    def slowed(self, *args: Any, **kwargs: Any) -> Any:
        share = len(self.contributing) * self.members / self.args.data_parallel_size
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups if share < 1 else ():
            group["lr"] *= math.sqrt(share)
        done = self.steps(*args, **kwargs)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return done

    def mean_loss(self, losses: list[torch.Tensor], of_training: bool = True) -> float | None:
        if not self.has_loss:
            return None
        mean = torch.stack(losses).mean() * (self.group in self.contributing)
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        return (mean / (len(self.contributing) * self.members)).item()


def slowed_down(restore: Any) -> Any:
    """A restore that takes a newcomer as long as the file `slow` of the job is there.

    Nobody collects garbage in it, since others wait.
    """

    def restored(*args: Any) -> None:
        current = session.current()
        assert current is None or not gc.isenabled()
        while current is not None and current.predecessors and (current.job_dir / "slow").exists():
            time.sleep(0.01)
        restore(*args)

    return restored


def main() -> None:
    """As the recipe's own."""
    MegatronAdapter.restore = slowed_down(MegatronAdapter.restore)  # type: ignore[method-assign]
    if "FT_KEEPS" in os.environ:  # as with a fused optimizer that has the main parameters inside
        state.can_adopt = lambda optimizers: False
    tell_again()
    args = recipe.parse_args()
    recipe.initialize(args)
    trainer = (Told if "FT_TOLD" in os.environ else Telling)(args)
    digest = trainer.training.run(trainer.train, lambda: trainer.train_step(0))
    assert gc.isenabled() and (session.current() is None or gc.get_freeze_count() > 10_000)
    if trainer.is_logger:
        print(f"digest sha256:{digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
