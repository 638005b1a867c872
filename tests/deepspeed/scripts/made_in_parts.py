"""pretrain_clm.py with a model that is cut into ZeRO-3's parts while it is made."""

from __future__ import annotations

import argparse

import deepspeed
import pretrain_clm
import torch

_build = pretrain_clm.build_model


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """As the recipe's."""
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        return _build(args)


def main() -> None:
    """As the recipe's."""
    pretrain_clm.build_model = build_model
    pretrain_clm.main()


if __name__ == "__main__":
    main()
