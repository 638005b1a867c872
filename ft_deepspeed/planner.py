"""What `ftctl plan` must know of DeepSpeed: which state a ZeRO stage shards."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ft_core.cli.planner.shape import Framework, Storage


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--zero-stage", type=int, choices=range(4), default=0)


def _storage(args: argparse.Namespace, usual: Storage) -> Storage | None:
    """Stage 3 shards the weights too, which follow from the main parameters and are not kept."""
    if args.zero_stage == 3:
        return replace(usual, weights=0, main=4, sharded=True)
    return replace(usual, sharded=True) if args.zero_stage else None


FRAMEWORK = Framework("DeepSpeed", _add_arguments, _storage)
