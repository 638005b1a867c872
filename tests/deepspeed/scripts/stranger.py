"""pretrain_clm.py with what people do to weights before the first step."""

from __future__ import annotations

import argparse
import copy
import io
import threading

import numpy as np
import pretrain_clm
import torch

_build = pretrain_clm.build_model


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """As the recipe's, with weights that are scaled by what compiled code, a thread and others found."""
    scale = torch.compile(lambda x: x.abs().mean() * 0.01 + 1, backend="eager", fullgraph=True)
    scale(torch.ones(3))  # warmed up, before there is a model
    model = _build(args)
    weights = [p for p in model.parameters() if p.dim() == 2]
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(weights[0].norm().item() + torch.rand(()).item()))
    thread.start()
    thread.join()
    file = io.BytesIO()
    torch.save(weights[1], file)
    file.seek(0)
    average = copy.deepcopy(weights[2])
    with torch.no_grad(), torch.inference_mode():
        found += [float(np.asarray(torch.load(file)).sum()), average.to(torch.float64).sum().item()]
    torch.manual_seed(int(sum(map(abs, found)) * 1000) + 1)
    with torch.no_grad():
        torch.nn.init.trunc_normal_(weights[0], std=0.02)
        weights[1].mul_(scale(weights[1].detach()))
        weights[2][:2] = torch.tensor([weights[0][0, 0], average[0, 0]]).sum()
    return model


def main() -> None:
    """As the recipe's."""
    pretrain_clm.build_model = build_model
    pretrain_clm.main()


if __name__ == "__main__":
    main()
