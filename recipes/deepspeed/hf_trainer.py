"""Pre-train a causal language model with the Trainer of Hugging Face on DeepSpeed.

An ordinary script of its kind, where `Trainer` owns the loop; the flags are those of `TrainingArguments`:

    torchrun --nproc-per-node 2 recipes/deepspeed/hf_trainer.py --deepspeed recipes/deepspeed/ds_hf.json \
        --output_dir runs/hf --max_steps 100 --learning_rate 1e-3 --per_device_train_batch_size 2

Progress goes to stdout as in pretrain_clm.py: one line a step, and last a digest of all ranks' final state.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import corpus  # type: ignore[import-not-found]
import torch
from digest import digest  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, GPT2Config, HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback


def parse_args() -> tuple[TrainingArguments, argparse.Namespace]:
    """What `Trainer` reads, and the rest of the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--hidden-size", type=int, default=64, help="width of the residual stream")
    parser.add_argument("--num-attention-heads", type=int, default=4, help="attention heads per layer")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens per sample")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout, also of attention weights")
    corpus.add_arguments(parser)
    args, rest = parser.parse_known_args()
    defaults = ["--logging_steps=1", "--disable_tqdm=True"]
    if not torch.cuda.is_available():
        defaults += ["--use_cpu", "--ddp_backend=gloo"]
    (training,) = HfArgumentParser(cast(Any, TrainingArguments)).parse_args_into_dataclasses(
        [*defaults, *rest]
    )
    return training, args


class LogLines(TrainerCallback):
    """Prints what `Trainer` logs, with floats in full."""

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by `Trainer` on every rank."""
        logs = kwargs["logs"]
        if state.is_world_process_zero and "loss" in logs:
            norm = f"{logs['grad_norm']:.6f}" if "grad_norm" in logs else "n/a"
            line = f"iteration {state.global_step}/{state.max_steps} | loss {logs['loss']!r}"
            print(f"{line} | lr {logs['learning_rate']:.6E} | grad norm {norm}", flush=True)
        elif state.is_world_process_zero and "eval_loss" in logs:
            line = f"validation after {state.global_step}/{state.max_steps} | loss {logs['eval_loss']!r}"
            print(line, flush=True)


def main() -> None:
    """Train as the command line says."""
    training, args = parse_args()
    torch.manual_seed(training.seed)
    config = GPT2Config(
        vocab_size=corpus.VOCABULARY,
        bos_token_id=corpus.END_OF_DOCUMENT,
        eos_token_id=corpus.END_OF_DOCUMENT,
        n_positions=args.seq_length,
        n_embd=args.hidden_size,
        n_layer=args.num_layers,
        n_head=args.num_attention_heads,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        resid_pdrop=args.dropout,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    train, valid = corpus.load(args)
    trainer = Trainer(model, training, train_dataset=train, eval_dataset=valid)
    trainer.add_callback(LogLines())
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    final = digest(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        print(f"digest sha256:{final}", flush=True)


if __name__ == "__main__":
    main()
