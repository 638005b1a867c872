"""What `ftctl plan` must know of DeepSpeed: which state a ZeRO stage shards."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ft_core.cli.planner.shape import Framework, Storage
from ft_core.errors import ConfigError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--zero-stage", type=int, choices=range(4), default=0)


def _storage(args: argparse.Namespace, usual: Storage) -> Storage | None:
    """Weights follow from the main parameters: in stages 1 and 2 a full snapshot keeps them all the same.
    Raises ConfigError for what DeepSpeed refuses."""
    if args.zero_stage > 1 and getattr(args, "pipeline_model_parallel_size", 1) > 1:
        raise ConfigError(f"--zero-stage {args.zero_stage} with pipeline parallelism: DeepSpeed has 0 and 1")
    if args.zero_stage == 3 or (args.zero_stage and args.ft_snapshot == "lean"):
        return replace(usual, weights=0, main=4, sharded=True)
    return replace(usual, sharded=True) if args.zero_stage else None


FRAMEWORK = Framework("DeepSpeed", _add_arguments, _storage)
