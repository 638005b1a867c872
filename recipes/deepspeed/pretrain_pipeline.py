"""Pre-train a causal language model with DeepSpeed's pipeline parallelism.

An ordinary script for DeepSpeed's PipelineModule, as pretrain_clm.py is one for its ZeRO:

    torchrun --nproc-per-node 4 recipes/deepspeed/pretrain_pipeline.py --num-stages 2 \
        --deepspeed_config recipes/deepspeed/ds_pipeline.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import checkpoint  # type: ignore[import-not-found]
import corpus  # type: ignore[import-not-found]
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from digest import digest  # type: ignore[import-not-found]
from torch import nn


def parse_args() -> argparse.Namespace:
    """The command line. The defaults make a tiny model that trains on two CPU cores."""
    parser = argparse.ArgumentParser(
        description="Pre-train a causal language model with DeepSpeed's pipeline parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--num-stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--num-layers", type=int, default=4, help="transformer layers of all stages together")
    parser.add_argument("--hidden-size", type=int, default=64, help="width of the residual stream")
    parser.add_argument("--num-attention-heads", type=int, default=4, help="attention heads per layer")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens per sample")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout, also of attention weights")
    parser.add_argument("--tie-embeddings", action="store_true", help="share weights of first and last layer")
    parser.add_argument("--train-iters", type=int, default=100, help="optimizer steps to train")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the weights and of dropout")
    parser.add_argument("--eval-interval", type=int, default=0, help="steps between validations; 0: none")
    parser.add_argument("--save", type=Path, help="directory to write checkpoints to")
    parser.add_argument("--save-interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--load", type=Path, help="directory of the checkpoints to go on from")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    corpus.add_arguments(parser)
    return deepspeed.add_config_arguments(parser).parse_args()


class Embedding(nn.Module):
    """Tokens [batch, length] to vectors [batch, length, width], with learned positions."""

    def __init__(self, length: int, width: int) -> None:
        """Random weights for tokens and for `length` positions."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(corpus.VOCABULARY, width).normal_(std=0.02))
        self.positions = nn.Parameter(torch.empty(length, width).normal_(std=0.02))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) tokens to (batch, length, width)."""
        return nn.functional.embedding(tokens, self.weight) + self.positions


class Block(nn.TransformerEncoderLayer):
    """A transformer layer in which tokens see those before them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[batch, length, width] to the same."""
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return super().forward(x, src_mask=later)


class Head(nn.Module):
    """Vectors to logits [batch, length, vocabulary]."""

    def __init__(self, width: int) -> None:
        """Random weights for the logits of each token."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(corpus.VOCABULARY, width).normal_(std=0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to logits."""
        return to_logits(self, x)


def to_logits(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Project vectors on the vocabulary with the weights of `layer`."""
    return nn.functional.linear(x, layer.weight)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def build_model(args: argparse.Namespace) -> PipelineModule:
    """The layers, of which each rank builds those of its stage."""
    width = args.hidden_size
    blocks = [
        LayerSpec(
            Block,
            width,
            args.num_attention_heads,
            dim_feedforward=4 * width,
            dropout=args.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        for _ in range(args.num_layers)
    ]
    embedding: Any = LayerSpec(Embedding, args.seq_length, width)
    head: Any = LayerSpec(Head, width)
    if args.tie_embeddings:
        embedding = TiedLayerSpec("embedding", Embedding, args.seq_length, width)
        head = TiedLayerSpec("embedding", Embedding, args.seq_length, width, forward_fn=to_logits)
    layers = [embedding, *blocks, LayerSpec(nn.LayerNorm, width), head]
    return PipelineModule(layers=layers, num_stages=args.num_stages, loss_fn=loss_of)


def as_tuple(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as the pipeline takes it: what goes into the first layer, what goes into the loss."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    return tokens, tokens


class Trainer:
    """The training loop with what it needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Bring up torch.distributed, the stages and the engine, from a checkpoint if there is one."""
        self.args = args
        deepspeed.init_distributed()
        torch.manual_seed(args.seed)
        model = build_model(args)
        self.train_data, self.valid_data = corpus.load(args)
        self.engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
        self.is_logger = torch.distributed.get_rank() == 0
        seed = args.seed + torch.distributed.get_rank()
        torch.manual_seed(seed)
        get_accelerator().manual_seed(seed)
        if args.load:
            checkpoint.load(self.engine, args.load)

    def loader(self, data: corpus.Samples, **options: Any) -> Any:
        """DeepSpeed's loader of micro batches for this rank's pipeline."""
        workers = self.args.num_workers
        return self.engine.deepspeed_io(data, collate_fn=as_tuple, num_local_io_workers=workers, **options)

    def train(self) -> None:
        """Train up to step `--train-iters`."""
        args, engine = self.args, self.engine
        position = engine.global_steps * engine.gradient_accumulation_steps()
        batches = corpus.batches(self.loader(self.train_data), position)
        while (step := engine.global_steps + 1) <= args.train_iters:
            start = time.perf_counter()
            lr = engine.get_lr()[0]
            loss = engine.train_batch(data_iter=batches).item()
            self.log_step(step, loss, lr, time.perf_counter() - start)
            if args.eval_interval and step % args.eval_interval == 0:
                self.evaluate(step)
            if args.save and step % args.save_interval == 0:
                checkpoint.save(engine, args.save)

    def evaluate(self, step: int) -> None:
        """Log the loss on the first validation samples, without dropout."""
        batches = corpus.batches(self.loader(self.valid_data, route="eval"), position=0)
        loss = self.engine.eval_batch(batches).item()
        if self.is_logger:
            print(f"validation after {step}/{self.args.train_iters} | loss {loss!r}", flush=True)

    def log_step(self, step: int, loss: float, lr: float, seconds: float) -> None:
        """Write the line of the step just done."""
        norm = self.engine.get_global_grad_norm()
        known = "n/a" if norm is None else f"{float(norm):.6f}"  # without ZeRO fp32 keeps it to itself
        if self.is_logger:
            line = f"iteration {step}/{self.args.train_iters} | loss {loss!r} | lr {lr:.6E}"
            print(f"{line} | grad norm {known} | {seconds * 1e3:.1f} ms", flush=True)


def main() -> None:
    """Train as the command line says."""
    trainer = Trainer(parse_args())
    trainer.train()
    final = digest(trainer.engine)
    if trainer.is_logger:
        print(f"digest sha256:{final}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
