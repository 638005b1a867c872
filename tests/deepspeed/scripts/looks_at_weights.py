"""pretrain_clm.py with a model that is scaled by what was drawn for it."""

from __future__ import annotations

import argparse

import pretrain_clm
import torch

_build = pretrain_clm.build_model


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """As the recipe's, scaled by the norm of its embeddings."""
    model = _build(args)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            norm = module.weight.norm().item()
            model.register_buffer("drawn", torch.tensor([norm, torch.rand(()).item()]), persistent=False)
            with torch.no_grad():
                module.weight.mul_(1 + norm / 1000)
    return model


def main() -> None:
    """As the recipe's."""
    pretrain_clm.build_model = build_model
    pretrain_clm.main()


if __name__ == "__main__":
    main()
