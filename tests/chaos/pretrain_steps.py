"""`recipes/megatron/pretrain_gpt.py`, telling every role's parameters after every step; as elastic_steps.py.

Prints lines `state STEP RANK DIGEST EPOCH`. Under `ftrun` it goes as far as the file `limit` of its job says.
With FT_TOLD=LEDGER, without fault tolerance, it is told beforehand which replica groups train which samples.
"""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401

# isort: on
import functools
import hashlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretrain_gpt as recipe
import torch
import torch.distributed as dist
from elastic_norm import sum_as_held
from elastic_told import tell_again, told
from megatron.core import mpu
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer import ChainedOptimizer
from megatron.training import get_args, training

from ft_core.worker import session


def telling(train_step: Any) -> Any:
    """`train_step`, which then tells and waits."""

    @functools.wraps(train_step)
    def told_step(forward_step: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = train_step(forward_step, iterator, model, *args, **kwargs)
        step, digest = get_args().curr_iteration + 1, hashlib.sha256()
        for chunk in model:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        current = session.current()
        epoch = current.epoch if current is not None else 0
        print(f"\nstate {step} {dist.get_rank()} {digest.hexdigest()[:16]} {epoch}", flush=True)
        if current is not None:
            while step >= int((current.job_dir / "limit").read_text() or 0):
                current.check_epoch()
                time.sleep(0.01)
        return result

    return told_step


class Told:
    """Who trains what."""

    def __init__(self, ledger: Path) -> None:
        self.ledger, self.steps = ledger, told(ledger)

    @property
    def dealt(self) -> dict[int, list[int]]:
        return self.steps[get_args().curr_iteration + 1]

    def install(self) -> None:
        build, start = training.build_pretraining_data_loader, _ParamAndGradBucketGroup.start_grad_sync
        steps, train_step = ChainedOptimizer.step_with_ready_grads, training.train_step

        def counted(*given: Any, **kwargs: Any) -> Any:
            result = train_step(*given, **kwargs)
            args = get_args()
            of_group = args.global_batch_size // mpu.get_data_parallel_world_size()
            args.consumed_train_samples -= args.global_batch_size - of_group * len(self.dealt)
            return result

        def loader(dataset: Any, consumed: int) -> Any:
            found = build(dataset, consumed)
            split = getattr(dataset, "split", getattr(dataset, "index_split", None))
            return found if dataset is None or split.name != "train" else self.batches(found)

        def synchronise(group: Any, *args: Any, **kwargs: Any) -> Any:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1 / len(self.dealt)
                if mpu.get_data_parallel_rank() not in self.dealt:
                    bucket.grad_data.zero_()
            return start(group, *args, **kwargs)

        def slowed(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            share = len(self.dealt) / mpu.get_data_parallel_world_size()
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups if share < 1 else ():
                group["lr"] *= math.sqrt(share)
            done = steps(optimizer, *args, **kwargs)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            return done

        sum_as_held(self.ledger, lambda: get_args().curr_iteration + 1)
        training.build_pretraining_data_loader, training.train_step = loader, counted
        _ParamAndGradBucketGroup.start_grad_sync = synchronise
        ChainedOptimizer.step_with_ready_grads = slowed

    def batches(self, loader: Any) -> Iterator[Any]:
        iter(loader)  # it draws a seed
        size, step, micro = loader.batch_sampler.micro_batch_size, 0, 0
        while True:
            now = get_args().curr_iteration + 1
            micro = micro + 1 if now == step else 0
            step = now
            own = self.dealt.get(mpu.get_data_parallel_rank())
            positions = (own or self.dealt[min(self.dealt)])[micro * size : (micro + 1) * size]
            batch = loader.collate_fn([loader.dataset[at] for at in positions])
            if own is None:
                batch["loss_mask"].zero_()
            yield batch


def main() -> None:
    """As the recipe's own."""
    training.train_step = telling(training.train_step)
    tell_again()
    if "FT_TOLD" in os.environ:
        Told(Path(os.environ["FT_TOLD"])).install()
    recipe.main()


if __name__ == "__main__":
    main()
