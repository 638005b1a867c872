"""Hugging Face's Trainer, with state wherever scripts have it: in a subclass, callbacks, variables that inner
functions share, data that are augmented as they are read."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from digest import digest
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_callback import EarlyStoppingCallback, TrainerCallback

VOCABULARY, LENGTH = 64, 16
SEEN: list[float] = []
"""What the script has seen, in a variable of its own."""


def tokens(index: int) -> torch.Tensor:
    """A sample."""
    return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Indexed(Dataset):
    """Some of its samples are changed at random, by generators of all kinds."""

    def __init__(self, first: int, many: int, noisy: bool) -> None:
        self.first, self.many, self.noisy = first, many, noisy
        self.own = random.Random(5)
        self.read = 0

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read += 1
        found = tokens(self.first + index)
        if self.noisy:
            found[int(np.random.randint(LENGTH))] = int(torch.randint(VOCABULARY, ()))
            found[self.own.randrange(LENGTH)] = random.randrange(VOCABULARY)
        return {"input_ids": found, "labels": found.clone()}


class Stream(IterableDataset):
    """Without an end, or a length."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for self.at in range(1 << 30):
            found = tokens(self.at)
            yield {"input_ids": found, "labels": found.clone()}


class Counting(Trainer):
    """Has state of its own, as subclasses do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0
        self.recent: deque[float] = deque(maxlen=5)
        self.stored: Any = defaultdict(lambda: defaultdict(list))
        self.average = torch.zeros(2)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        value = (loss[0] if isinstance(loss, tuple) else loss).detach()
        if model.training:
            self.recent.append(value.item())
            self.stored["train"]["loss"].append(value.item())
            self.average.mul_(0.5).add_(value)
            weight = 1 + 0.01 * len(self.recent) + 0.001 * (self.calls % 7) + 0.01 * self.average[0].item()
            return (loss[0] * weight, loss[1]) if isinstance(loss, tuple) else loss * weight
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if found := self.stored.pop("train", None):
            logs["mean"] = sum(found["loss"]) / len(found["loss"])
        super().log(logs, *args, **kwargs)


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", default="indexed")
    parser.add_argument("--samples", type=int, default=44)
    parser.add_argument("--keeps", action="store_true", help="what cannot be carried")
    own, rest = parser.parse_known_args()
    defaults = [
        "--use_cpu",
        "--ddp_backend=gloo",
        "--logging_steps=1",
        "--disable_tqdm=True",
        "--report_to=none",
    ]
    (args,) = HfArgumentParser(cast(Any, TrainingArguments)).parse_args_into_dataclasses([*defaults, *rest])
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    logged: list[float] = []
    total = 0.0
    averages = [p.detach().clone() for p in model.parameters()] if own.keeps else []

    class Lines(TrainerCallback):
        """Prints, counts, and shares variables with the function that it is in."""

        def __init__(self) -> None:
            self.steps, self.best = 0, {"step": 0, "loss": float("inf")}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            for average, parameter in zip(averages, model.parameters(), strict=False):
                average.mul_(0.5).add_(parameter.detach(), alpha=0.5)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            nonlocal total
            if "loss" in logs:
                logged.append(logs["loss"])
                SEEN.append(logs["loss"])
                total += logs["mean"]
                if logs["loss"] < self.best["loss"]:
                    self.best = {"step": state.global_step, "loss": logs["loss"]}
                if state.is_world_process_zero:
                    line = f"iteration {state.global_step}/{state.max_steps} | loss {logs['loss']!r}"
                    print(f"{line} | mean {logs['mean']!r}", flush=True)
            elif "eval_loss" in logs and state.is_world_process_zero:
                print(f"validation after {state.global_step} | loss {logs['eval_loss']!r}", flush=True)

    data: Any = Stream() if own.data.startswith("stream") else Indexed(0, own.samples, "noisy" in own.data)
    lines = Lines()
    callbacks: list[Any] = [lines]
    if args.load_best_model_at_end:
        callbacks.append(EarlyStoppingCallback(50))
    trainer = Counting(
        model, args, train_dataset=data, eval_dataset=Indexed(9000, 8, False), callbacks=callbacks
    )
    trainer.train()
    state = trainer.state
    history = [
        {k: v for k, v in entry.items() if "runtime" not in k and "second" not in k}
        for entry in state.log_history
    ]
    kept = [
        lines.steps,
        lines.best,
        logged,
        SEEN,
        total,
        list(trainer.recent),
        trainer.calls,
        trainer.average.tolist(),
    ]
    kept += [
        state.global_step,
        state.epoch,
        state.total_flos,
        state.best_metric,
        history,
        trainer._total_loss_scalar,
    ]
    kept += [average.sum().item() for average in averages]
    everyone: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(everyone, repr(kept))
    final = digest(trainer.model_wrapped) + "".join(everyone)
    if trainer.is_world_process_zero():
        print(f"digest sha256:{hashlib.sha256(final.encode()).hexdigest()}", flush=True)
        if os.environ.get("SHOWS"):
            print("\n".join(everyone))


if __name__ == "__main__":
    main()
