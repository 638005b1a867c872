"""Pre-train a causal language model from `transformers` with DeepSpeed.

An ordinary DeepSpeed script: nothing in it knows of fault tolerance. Under torchrun it trains as usual; under
ftrun it survives failures, because its JSON file has a "fault_tolerance" section:

    torchrun --nproc-per-node 2 recipes/deepspeed/pretrain_clm.py \
        --deepspeed_config recipes/deepspeed/ds_zero2.json

The model is built from a config, so nothing is downloaded. On a host without a GPU it runs on the CPU over
gloo. Progress goes to stdout: one line a step with the loss at full precision, so that runs can be compared
bit by bit, and last a digest of all ranks' final state.
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
from digest import digest  # type: ignore[import-not-found]
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def parse_args() -> argparse.Namespace:
    """The command line. The defaults make a tiny model that trains on two CPU cores."""
    parser = argparse.ArgumentParser(
        description="Pre-train a causal language model with DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model-type", choices=["gpt2", "llama"], default="gpt2", help="kind of model")
    parser.add_argument("--num-layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--hidden-size", type=int, default=64, help="width of the residual stream")
    parser.add_argument("--num-attention-heads", type=int, default=4, help="attention heads per layer")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens per sample")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout, also of attention weights")
    parser.add_argument("--train-iters", type=int, default=100, help="optimizer steps to train")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the weights and of dropout")
    parser.add_argument("--eval-interval", type=int, default=0, help="steps between validations; 0: none")
    parser.add_argument("--save", type=Path, help="directory to write checkpoints to")
    parser.add_argument("--save-interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--load", type=Path, help="directory of the checkpoints to go on from")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    corpus.add_arguments(parser)
    return deepspeed.add_config_arguments(parser).parse_args()


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """A model with random weights, of the size that the flags say."""
    common: dict[str, Any] = {
        "vocab_size": corpus.VOCABULARY,
        "bos_token_id": corpus.END_OF_DOCUMENT,
        "eos_token_id": corpus.END_OF_DOCUMENT,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    if args.model_type == "gpt2":
        gpt2 = GPT2Config(
            n_positions=args.seq_length,
            n_embd=args.hidden_size,
            n_layer=args.num_layers,
            n_head=args.num_attention_heads,
            embd_pdrop=args.dropout,
            attn_pdrop=args.dropout,
            resid_pdrop=args.dropout,
            **common,
        )
        return GPT2LMHeadModel(gpt2)
    llama = LlamaConfig(
        max_position_embeddings=args.seq_length,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        attention_dropout=args.dropout,
        **common,
    )
    return LlamaForCausalLM(llama)


class Trainer:
    """The training loop with what it needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Bring up torch.distributed, the model and DeepSpeed's engine, from a checkpoint if there is one."""
        self.args = args
        deepspeed.init_distributed()
        torch.manual_seed(args.seed)
        model = build_model(args)
        train, self.valid = corpus.load(args)
        self.engine, _, self.loader, _ = deepspeed.initialize(
            args=args, model=model, model_parameters=model.parameters(), training_data=train
        )
        self.loader.num_local_io_workers = args.num_workers
        self.is_logger = torch.distributed.get_rank() == 0
        # Ranks have the same weights and different dropout.
        seed = args.seed + torch.distributed.get_rank()
        torch.manual_seed(seed)
        get_accelerator().manual_seed(seed)
        if args.load:
            checkpoint.load(self.engine, args.load)

    def train(self) -> None:
        """Train up to step `--train-iters`."""
        args, engine = self.args, self.engine
        micro_batches = engine.gradient_accumulation_steps()
        batches = corpus.batches(self.loader, position=engine.global_steps * micro_batches)
        engine.train()
        while (step := engine.global_steps + 1) <= args.train_iters:
            start = time.perf_counter()
            lr = engine.get_lr()[0]
            losses = []
            for _ in range(micro_batches):
                loss = self.loss(next(batches))
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            self.log_step(step, self.mean(losses), lr, time.perf_counter() - start)
            if args.eval_interval and step % args.eval_interval == 0:
                self.evaluate(step)
            if args.save and step % args.save_interval == 0:
                checkpoint.save(engine, args.save)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's loss on a micro batch."""
        on_device = {name: tensor.to(self.engine.device) for name, tensor in batch.items()}
        loss: torch.Tensor = self.engine(**on_device).loss
        return loss

    def mean(self, losses: list[torch.Tensor]) -> float:
        """Mean of the losses of all ranks that are there."""
        mean = torch.stack(losses).float().mean()
        total = torch.stack([mean, torch.ones_like(mean)])
        torch.distributed.all_reduce(total)
        return (total[0] / total[1]).item()

    def evaluate(self, step: int) -> None:
        """Log the loss on the validation samples, without dropout."""
        loader = self.engine.deepspeed_io(
            self.valid, route="eval", num_local_io_workers=self.args.num_workers
        )
        self.engine.eval()
        with torch.no_grad():
            loss = self.mean([self.loss(batch) for batch in loader])
        self.engine.train()
        if self.is_logger:
            print(f"validation after {step}/{self.args.train_iters} | loss {loss!r}", flush=True)

    def log_step(self, step: int, loss: float, lr: float, seconds: float) -> None:
        """Write the line of the step just done."""
        norm = self.engine.get_global_grad_norm()
        known = "n/a" if norm is None else f"{float(norm):.6f}"  # stage 0 in fp32 keeps it to itself
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
