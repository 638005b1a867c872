"""Pre-train a GPT with Megatron-Core.

An ordinary Megatron training loop, with Megatron's own flag names, that shows where fault tolerance goes in:
in the lines that have a `ProtectedTraining`. Without ``--ft`` it is a plain training script:

    python recipes/megatron/prepare_data.py --output-prefix runs/data/stdlib
    torchrun --nproc-per-node 2 recipes/megatron/pretrain_gpt_core.py --data-path runs/data/stdlib

On a host without a GPU it runs on the CPU over gloo. Progress goes to stdout: one line a step with the loss
at full precision, so that runs can be compared bit by bit, and last a digest of all ranks' final state.
"""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401  (before megatron, which keeps references to torch.cuda)

# isort: on
import argparse
import dataclasses
import hashlib
import math
import os
import sys
import time
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from ft_megatron import cpu_shadow
from ft_megatron.training import ProtectedTraining

# -- arguments -------------------------------------------------------------------------------------


def _flag(default: Any, text: str, **options: Any) -> Any:
    """A field of `Arguments` that is a command-line flag: its default, its help, more options of argparse."""
    return field(default=default, metadata={"help": text, **options})


@dataclass
class Arguments:
    """The flags, named as Megatron-LM's. The defaults make a tiny model that trains on two CPU cores."""

    # Model
    num_layers: int = _flag(4, "transformer layers, of all pipeline stages together")
    hidden_size: int = _flag(64, "width of the residual stream")
    ffn_hidden_size: int | None = _flag(None, "width inside the MLP; default: 4 x hidden size")
    num_attention_heads: int = _flag(4, "attention heads per layer")
    seq_length: int = _flag(64, "tokens per sample")
    max_position_embeddings: int | None = _flag(None, "longest position; default: the sequence length")
    position_embedding_type: str = _flag(
        "learned_absolute", "kind of position embedding", choices=["learned_absolute", "rope"]
    )
    untie_embeddings_and_output_weights: bool = _flag(False, "give the output layer weights of its own")
    attention_dropout: float = _flag(0.1, "dropout of attention weights")
    hidden_dropout: float = _flag(0.1, "dropout of the residual stream")
    num_experts: int | None = _flag(
        None, "experts per MLP (megatron-core 0.16: needs transformer-engine); default: a dense model"
    )
    moe_router_topk: int = _flag(2, "experts a token goes to")
    moe_aux_loss_coeff: float = _flag(0.01, "weight of the experts' load-balancing loss")

    # Training
    micro_batch_size: int = _flag(2, "samples per forward pass of a rank")
    global_batch_size: int | None = _flag(
        None, "samples per step, over all ranks; default: one micro batch per data-parallel rank"
    )
    train_iters: int = _flag(100, "steps to train")
    lr: float = _flag(1e-3, "peak learning rate")
    min_lr: float = _flag(0.0, "learning rate the decay ends at")
    lr_decay_style: str = _flag("cosine", "shape of the decay", choices=["constant", "linear", "cosine"])
    lr_decay_iters: int | None = _flag(None, "steps the decay takes; default: all")
    lr_warmup_iters: int = _flag(0, "steps of linear warm-up")
    weight_decay: float = _flag(0.01, "weight decay of AdamW")
    clip_grad: float = _flag(1.0, "largest gradient norm; 0: no clipping, and no norm")
    seed: int = _flag(1234, "seed of the weights, of dropout and of the order of samples")
    bf16: bool = _flag(False, "compute in bfloat16, fp32 main parameters")
    fp16: bool = _flag(False, "compute in float16 with dynamic loss scaling, fp32 main parameters")
    initial_loss_scale: float = _flag(2.0**16, "loss scale fp16 starts with")
    loss_scale_window: int = _flag(1000, "steps without overflow until the loss scale is doubled")
    deterministic_mode: bool = _flag(
        False, "only deterministic kernels (needed on GPUs for bit-identical runs)"
    )

    # Parallel layout
    tensor_model_parallel_size: int = _flag(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = _flag(1, "pipeline stages")
    expert_model_parallel_size: int = _flag(1, "ranks that share the experts")
    sequence_parallel: bool = _flag(
        False, "split layer norms and dropout over tensor-parallel ranks (needs apex)"
    )
    use_distributed_optimizer: bool = _flag(False, "shard the optimizer state over the data-parallel ranks")
    num_distributed_optimizer_instances: int = _flag(1, "replicas of the sharded optimizer state")
    overlap_grad_reduce: bool = _flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = _flag(False, "gather updated parameters during the next forward pass")
    use_cpu_initialization: bool = _flag(
        False, "initial weights that do not depend on the tensor-parallel size (always so without a GPU)"
    )
    distributed_backend: str | None = _flag(
        None, "torch.distributed backend; default: nccl, without a GPU gloo"
    )
    distributed_timeout_minutes: int = _flag(10, "time limit of a collective")

    # Data and log
    data_path: list[str] | None = _flag(  # noqa: RUF009  (the default is None, the check sees a list)
        None, "prefix of an IndexedDataset (see prepare_data.py), or weights and prefixes in turn"
    )
    mock_data: bool = _flag(False, "made-up samples in place of --data-path")
    split: str = _flag("95,5,0", "shares of training, validation and test documents (test is not read)")
    data_cache_path: str | None = _flag(None, "directory of the sample indices; default: beside the data")
    eval_interval: int = _flag(0, "steps between validations; 0: none")
    eval_iters: int = _flag(4, "global batches per validation")
    log_interval: int = _flag(1, "steps between lines of the log")

    # Fault tolerance
    ft: bool = _flag(False, "survive failures (run under ftrun)")

    # From the environment, once torch.distributed is up
    data_parallel_size: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        """Fill in what follows from other flags; ValueError for flags that contradict each other."""
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 and --fp16 exclude each other")
        if self.mock_data == bool(self.data_path):
            raise ValueError("give either --data-path (made by prepare_data.py) or --mock-data")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"
            )
        self.max_position_embeddings = self.max_position_embeddings or self.seq_length
        if self.max_position_embeddings < self.seq_length:
            raise ValueError("--max-position-embeddings is below --seq-length")

    def set_data_parallel_size(self, size: int) -> None:
        """Take over the number of data-parallel ranks; ValueError when they cannot share the batch."""
        self.data_parallel_size = size
        per_pass = self.micro_batch_size * size
        self.global_batch_size = self.global_batch_size or per_pass
        if self.global_batch_size % per_pass:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is no multiple of micro batch size "
                f"{self.micro_batch_size} x {size} data-parallel ranks"
            )

    @property
    def batch(self) -> int:
        """Samples per step over all ranks."""
        assert self.global_batch_size is not None
        return self.global_batch_size

    @property
    def num_microbatches(self) -> int:
        """Forward passes per step and rank."""
        return self.batch // (self.micro_batch_size * self.data_parallel_size)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32


def parse_args(argv: list[str] | None = None) -> Arguments:
    """`Arguments` from the command line."""
    parser = argparse.ArgumentParser(
        description="Pre-train a GPT with Megatron-Core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    hints = typing.get_type_hints(Arguments)
    flags = [f for f in dataclasses.fields(Arguments) if f.init]
    for f in flags:
        kind = hints[f.name]
        if isinstance(kind, types.UnionType):  # "int | None"
            kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
        options: dict[str, Any] = dict(f.metadata)
        if kind is bool:
            options["action"] = "store_true"
        elif typing.get_origin(kind) is list:
            options["nargs"] = "+"
        else:
            options["type"] = kind
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, **options)
    try:
        return Arguments(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


# -- start-up --------------------------------------------------------------------------------------


def initialize(args: Arguments) -> None:
    """Bring up torch.distributed and Megatron's process groups from torchrun's variables; seed this rank."""
    backend = args.distributed_backend or ("gloo" if cpu_shadow.active() else "nccl")
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend, timeout=timeout)
    else:  # plain `python`: a world of one
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # only Megatron's checkpoints use them
    )
    args.set_data_parallel_size(parallel_state.get_data_parallel_world_size())

    if args.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()  # as Megatron-LM does
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(args: Arguments) -> list[DistributedDataParallel]:
    """This rank's part of the GPT, wrapped for data parallelism: a list of one chunk.

    Weights follow from the seed alone, so no rank has to broadcast them.
    """
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        # without a GPU Megatron's all-to-all gets its split sizes in a form that torch refuses
        moe_token_dispatcher_type="allgather" if cpu_shadow.active() else "alltoall",
        # nor have experts biases where tensor-parallel ranks share them
        add_bias_linear=args.num_experts is None,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        params_dtype=args.dtype,
        pipeline_dtype=args.dtype,
        bf16=args.bf16,
        fp16=args.fp16,
        use_cpu_initialization=args.use_cpu_initialization or cpu_shadow.active(),
        perform_initialization=True,
        deterministic_mode=args.deterministic_mode,
        masked_softmax_fusion=False,  # the fused kernels come with apex
        persist_layer_norm=False,
    )
    padding = 128 * args.tensor_model_parallel_size  # as Megatron-LM pads the vocabulary
    model = GPTModel(
        config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=math.ceil(ByteTokenizer.vocab_size / padding) * padding,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.cuda()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
    )
    wrapped = Float16Module(config, model) if args.bf16 or args.fp16 else model
    return [DistributedDataParallel(config, ddp_config, wrapped)]


def build_optimizer(
    args: Arguments, model: list[DistributedDataParallel]
) -> tuple[Any, OptimizerParamScheduler]:
    """Megatron's optimizer and its learning-rate scheduler, tied into the model's pipeline schedule."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            fp16=args.fp16,
            params_dtype=args.dtype,
            initial_loss_scale=args.initial_loss_scale,
            loss_scale_window=args.loss_scale_window,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        ),
        model,
        use_gloo_process_groups=False,
    )
    decay_iters = args.lr_decay_iters or args.train_iters
    scheduler = OptimizerParamScheduler(  # counts in samples
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.batch,
        lr_decay_steps=decay_iters * args.batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=decay_iters * args.batch,
        wd_incr_style="constant",
    )
    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    return optimizer, scheduler


# -- data ------------------------------------------------------------------------------------------


class ByteTokenizer:
    """Tokens are bytes; 256 ends a document. Has what Megatron's datasets ask of a tokenizer."""

    vocab_size = 257
    eod = 256
    unique_identifiers: typing.ClassVar = {"class": "ByteTokenizer"}  # a part of the index cache's key

    def tokenize(self, text: str) -> numpy.ndarray:
        """Token ids of the UTF-8 form of `text`."""
        return numpy.frombuffer(text.encode(), dtype=numpy.uint8).astype(numpy.int64)


class NonEmptyGPTDataset(GPTDataset):
    """Megatron's dataset, which would look for enough samples for ever where a split has no document."""

    def __init__(
        self,
        dataset: Any,
        path: str,
        indices: numpy.ndarray,
        num_samples: int | None,
        split: Any,
        config: Any,
    ) -> None:
        if not len(indices) and num_samples is not None:
            raise ValueError(
                f"--split {config.split} leaves no document of {path} for the {split.name} split"
            )
        super().__init__(dataset, path, indices, num_samples, split, config)


class Samples:
    """Training and validation samples by number. No position to keep: any step can be taken again exactly.

    Megatron's datasets are built on the first and last pipeline stages, which read tokens and labels; their
    index is made once, by rank 0, and read from the cache by the others.
    """

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self.rank = parallel_state.get_data_parallel_rank()
        self.needed = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
        validations = args.train_iters // args.eval_interval + 1 if args.eval_interval else 0
        blend = get_blend_from_list(args.data_path)
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=blend,
            split=args.split,
            path_to_cache=args.data_cache_path,
            tokenizer=ByteTokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,  # the attention layers make the causal mask
        )
        unused = (
            None if blend is None or blend[1] is None else 1
        )  # a weighted blend wants a size for each split
        sizes = [args.train_iters * args.batch, validations * args.eval_iters * args.batch or unused, unused]
        self.train, self.valid, _ = BlendedMegatronDatasetBuilder(
            MockGPTDataset if args.mock_data else NonEmptyGPTDataset,
            sizes,
            lambda: self.needed,
            config,
        ).build()

    def global_batch(
        self, dataset: Any, index: int, training: ProtectedTraining | None
    ) -> Iterator[dict[str, torch.Tensor | None]]:
        """This rank's micro batches of global batch `index`: tensors of (micro batch size, sequence length).

        Samples are dealt as Megatron-LM deals them: a global batch is read in turns of one micro batch per
        data-parallel rank. In training, to the replica groups that are there.
        """
        args = self.args
        for micro in range(args.num_microbatches):
            dealt = training.samples(args.micro_batch_size) if training is not None else None
            if not self.needed:
                yield {"tokens": None, "labels": None, "loss_mask": None, "position_ids": None}
                continue
            first = index * args.batch + (micro * args.data_parallel_size + self.rank) * args.micro_batch_size
            samples = [dataset[i] for i in dealt or range(first, first + args.micro_batch_size)]
            yield {
                key: torch.stack([sample[key] for sample in samples]).cuda(non_blocking=True)
                for key in ("tokens", "labels", "loss_mask", "position_ids")
            }


# -- training --------------------------------------------------------------------------------------


class Trainer:
    """The training loop and what it works on."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self.model = build_model(args)
        self.optimizer, self.scheduler = build_optimizer(args, self.model)
        self.samples = Samples(args)
        self.training = ProtectedTraining(
            enabled=args.ft, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler
        )
        self.has_loss = parallel_state.is_pipeline_last_stage()

    @property
    def is_logger(self) -> bool:
        """One rank of the last stage writes the log: the loss is there without another collective."""
        return (
            self.has_loss
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_data_parallel_rank() == self.training.lead
        )

    def train(self) -> str:
        """Train from `training.step` to the end; returns the digest of the final state.

        Entered again from the top after a recovery: nothing here outlives a call but what that restores.
        """
        args, training = self.args, self.training
        if training.inherited:
            self.log_step(*training.inherited)
        if args.overlap_param_gather:
            # As Megatron-LM does: the first step takes the parameters as they were made, loaded or restored,
            # so that an error in them shows, in place of being gathered over.
            self.model[0].disable_forward_pre_hook(param_sync=False)
        while training.step < args.train_iters:
            if args.eval_interval and training.step and training.step % args.eval_interval == 0:
                self.evaluate()
            started = time.perf_counter()
            lr = self.optimizer.param_groups[0]["lr"]
            loss, grad_norm = self.train_step(training.step)
            result = (loss, lr, grad_norm, time.perf_counter() - started)
            training.step_done(result)
            self.log_step(*result)
        if args.eval_interval:
            self.evaluate()
        return self.digest()

    def train_step(self, step: int) -> tuple[float | None, float | None]:
        """Do step `step` (from 0). Returns the loss, on the last pipeline stage, and the gradient's norm.

        The norm is None when the step was skipped because gradients overflowed (fp16). After `optimizer.step`
        nothing is sent any more but the distributed optimizer's parameters.
        """
        self.model[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.forward_backward(self.samples.train, step)
        loss = self.mean_loss(losses)
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=self.args.batch)
        if self.args.overlap_param_gather and not self.gathers_in_forward:
            self.model[0].enable_forward_pre_hook()
        return loss, grad_norm

    @property
    def gathers_in_forward(self) -> bool:
        """Whether the next forward pass completes the parameters; otherwise they are complete."""
        return bool(self.model[0].remove_forward_pre_hook_handles)

    def forward_backward(self, dataset: Any, index: int, forward_only: bool = False) -> list[torch.Tensor]:
        """Run the pipeline schedule over global batch `index`; returns the losses, on the last stage."""
        args = self.args
        schedule = get_forward_backward_func()
        return (schedule if forward_only else self.training.schedule(schedule))(
            forward_step_func=self.forward_step,
            data_iterator=self.samples.global_batch(dataset, index, None if forward_only else self.training),
            model=self.model,
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
        )

    def forward_step(
        self, batches: Iterator[dict[str, torch.Tensor | None]], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        """One micro batch through this stage; the schedule calls the returned function for the loss."""
        batch = next(batches)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        self.training.point("forward")
        if self.training.injecting and output.requires_grad:
            output.register_hook(self._backward_point)
        return output, partial(masked_mean, batch["loss_mask"])

    def _backward_point(self, gradient: torch.Tensor) -> None:
        self.training.point("backward")

    def mean_loss(self, losses: list[torch.Tensor], of_training: bool = True) -> float | None:
        """Mean loss over micro batches and data-parallel ranks; None before the last pipeline stage."""
        if not self.has_loss:
            return None
        mean = torch.stack(losses).mean()
        return self.training.mean(mean, parallel_state.get_data_parallel_group(), of_training).item()

    def evaluate(self) -> None:
        """Log the validation loss. Dropout is off, so the random number generators stay as they were."""
        args = self.args
        first = self.training.step // args.eval_interval * args.eval_iters
        losses: list[torch.Tensor] = []
        self.model[0].eval()
        with torch.no_grad(), self.parameters_gathered():
            for index in range(first, first + args.eval_iters):
                self.training.point("evaluate")
                losses += self.forward_backward(self.samples.valid, index, forward_only=True)
        self.model[0].train()
        loss = self.mean_loss(losses, of_training=False)
        line = f"validation after {self.training.step}/{args.train_iters} |"
        if self.is_logger and not self.training.replaying and not self.training.printed(line):
            print(f"{line} loss {loss!r}", flush=True)

    @contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        """Have all parameters up to date where they are gathered in the next forward pass only."""
        if not self.gathers_in_forward:
            yield
            return
        self.model[0].disable_forward_pre_hook(param_sync=True)
        yield
        self.model[0].enable_forward_pre_hook()

    def log_step(self, loss: float | None, lr: float, grad_norm: float | None, seconds: float) -> None:
        """Write the line of the step just done, once per step and job."""
        args, step = self.args, self.training.step
        begin = f"iteration {step}/{args.train_iters} |"
        if not self.is_logger or self.training.replaying or self.training.printed(begin):
            return
        if step % args.log_interval == 0 or step == args.train_iters:
            if loss is not None:
                self.training.tell_loss(loss)
            norm = "overflow, skipped" if grad_norm is None and args.fp16 else f"{grad_norm or 0.0:.6f}"
            clear = "\r\033[K" if sys.stderr.isatty() else ""
            line = f"{begin} loss {loss!r} | lr {lr:.6E} | grad norm {norm}"
            print(f"{clear}{line} | {seconds * 1e3:.1f} ms", flush=True)
        if sys.stderr.isatty():
            done = 40 * step // args.train_iters
            end = "\n" if step == args.train_iters else ""
            print(f"\r[{'#' * done:40s}] {step}/{args.train_iters}", end=end, file=sys.stderr, flush=True)

    def digest(self) -> str:
        """SHA-256, in hex, of all ranks' parameters and optimizer state in rank order; same on all ranks."""
        with self.parameters_gathered():
            own = hashlib.sha256()
            for name, tensor in sorted(state_tensors(self.model, self.optimizer)):
                own.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                own.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        mine = torch.frombuffer(bytearray(own.digest()), dtype=torch.uint8).cuda()
        ranks = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(ranks, mine)
        return hashlib.sha256(torch.cat(ranks).cpu().numpy().data).hexdigest()


def masked_mean(mask: Any, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the tokens' `losses` where `mask` is 1: the loss to differentiate, and a copy for the log."""
    loss = (losses.float() * mask).sum() / mask.sum()
    return loss, loss.detach().clone()


def state_tensors(model: list[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's state by name: parameters, main parameters, Adam's moments and step, loss scale."""
    for c, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            yield f"model.{c}.{name}", parameter
    for o, wrapper in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if wrapper.optimizer is None:  # this rank has no parameters of the kind
            continue
        for g, group in enumerate(wrapper.optimizer.param_groups):
            for key in ("step", "lr"):  # fused Adams count per group
                if key in group:
                    yield f"optimizer.{o}.{g}.{key}", torch.as_tensor(group[key], dtype=torch.float64)
            for p, main in enumerate(group["params"]):
                yield f"optimizer.{o}.{g}.{p:05d}.main", main
                for key, value in wrapper.optimizer.state.get(main, {}).items():
                    yield f"optimizer.{o}.{g}.{p:05d}.{key}", torch.as_tensor(value)
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is not None:
            for key, value in scaler.state_dict().items():
                yield f"optimizer.{o}.grad_scaler.{key}", torch.as_tensor(value)


def main() -> None:
    """Train as the command line says."""
    args = parse_args()
    initialize(args)
    trainer = Trainer(args)
    digest = trainer.training.run(trainer.train, lambda: trainer.train_step(0))
    if trainer.is_logger:
        print(f"digest sha256:{digest}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
