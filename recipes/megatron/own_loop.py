"""A training loop of one's own on megatron-core, protected: the lines with `training` are all it takes.

It trains a tiny GPT, on a CPU as well; docs/start/own_loop.md has the command that kills a node under it.
"""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401  (where there is no GPU; before megatron)

# isort: on
import argparse
import hashlib
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from ft_megatron import cpu_shadow
from ft_megatron.training import ProtectedTraining

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int, default=30)
parser.add_argument("--ft", action="store_true")
args = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if cpu_shadow.active() else "nccl")
parallel_state.initialize_model_parallel()
torch.manual_seed(1234)
model_parallel_cuda_manual_seed(1234)
config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=32).cuda()
model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.01, use_distributed_optimizer=True), [model]
)
config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
Losses = tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]


def batch(step: int) -> torch.Tensor:
    """This rank's samples of a step: they follow from its number."""
    numbers = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randint(0, 256, (4, 33), generator=numbers).cuda()


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> Losses:
    """As megatron-core's schedules call it."""
    x = next(batches)
    positions = torch.arange(32, device=x.device).expand(4, 32)
    losses = model(x[:, :-1].contiguous(), positions, None, labels=x[:, 1:].contiguous())
    return losses, lambda losses: (losses.mean(), losses.detach().mean())


def train_step(x: torch.Tensor) -> float:
    """The mean loss of all ranks."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    [loss] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([x]),
        model=[model],
        num_microbatches=1,
        seq_length=32,
        micro_batch_size=4,
        forward_only=False,
    )
    dist.all_reduce(loss)
    optimizer.step()
    return float(loss.item()) / dist.get_world_size()


def log(step: int, loss: float) -> None:
    """A line for each step, once."""
    line = f"step {step} loss {loss:.7f}"
    if dist.get_rank() == 0 and not training.printed(line):
        print(line, flush=True)


training = ProtectedTraining(enabled=args.ft, model=[model], optimizer=optimizer, scheduler=None)


def train() -> None:
    """Entered again from its top after a recovery."""
    if training.inherited is not None:  # a step whose worker died, and may not have logged it
        log(training.step, training.inherited)
    while training.step < args.train_iters:  # `training.step` is the progress; keep none of your own
        loss = train_step(batch(training.step))  # a batch must follow from the number of its step
        training.step_done(loss)  # the state is complete: it is staged now
        if not training.replaying:
            log(training.step, loss)


training.run(train)
weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
print(f"rank {dist.get_rank()} ends with {hashlib.sha256(weights).hexdigest()}", flush=True)
dist.destroy_process_group()
