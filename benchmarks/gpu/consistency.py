"""Row "consistency": a snapshot holds what a step made, also where the next step follows at once.

After each step its state is staged, and cloned on the training stream; the next step's kernels are given to
the device as soon as the copy is complete, which is what the commit wait of a job amounts to. Then the
checksums are compared. The same without that wait shows that the comparison can fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.checks import NotThereError, Row, main
from benchmarks.gpu.state import Copying, Tensors, checksums_of
from ft_core.state.device_copy import PIECE, locked

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam for each": {"foreach": True},
    "fused Adam": {"fused": True},
    "capturable Adam": {"capturable": True},
}


class Training:
    """A small bf16 network with an optimizer whose state is part of what is staged."""

    def __init__(self, device: str, width: int, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).to(device=device, dtype=torch.bfloat16)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, **options)
        self.inputs = torch.randn(64, width, device=device, dtype=torch.bfloat16)

    def forward_backward(self) -> None:
        """Gradients."""
        self.optimizer.zero_grad()
        (self.model(self.inputs) - self.inputs).square().mean().backward()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and the optimizer's state."""
        found = {}
        for p, parameter in enumerate(self.model.parameters()):
            found[f"parameter {p}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    found[f"{key} {p}"] = value
        return found


def steps(training: Training, count: int, waits: bool) -> int:
    """How many of `count` steps' snapshots hold something else than the step made."""
    copying = Copying(Tensors(training.tensors))
    training.forward_backward()
    training.optimizer.step()  # its state is there from now on
    wrong = 0
    for version in range(count):
        copying.snapshotter.stage(version)
        right = {name: tensor.clone() for name, tensor in training.tensors().items()}
        training.forward_backward()
        if waits:
            copying.snapshotter.wait()
        training.optimizer.step()
        copying.snapshotter.wait()
        wrong += copying.checksums(version) != checksums_of(right)
    return wrong


def body(row: Row) -> None:
    """All checks of the row."""
    count = 50 if row.quick or row.device == "cpu" else 1000
    width = 64 if row.device == "cpu" else 512

    wrong = steps(Training("cpu", 64, {"foreach": True}), 50, waits=True)
    row.tell("state on the host: 50 steps", not wrong, f"{wrong} snapshots differ")

    def consistent(options: dict[str, Any], check: str) -> Callable[[], None]:
        def action() -> None:
            if row.device == "cpu" and "capturable" in options:
                raise NotThereError("Adam is capturable on a device only")
            wrong = steps(Training(row.device, width, options), count, waits=True)
            row.tell(check, not wrong, f"{wrong} of {count} snapshots differ", wrong=wrong, steps=count)

        return action

    for name, options in OPTIMIZERS.items():
        check = f"bf16, {name}: a step follows at once"
        row.on_device(check, consistent(options, check))
    row.on_device("the same without the wait", lambda: _without(row, width))
    row.on_device("locked memory", lambda: _locked(row))


def _without(row: Row, width: int) -> None:
    count = 50
    # Much state and little to compute, so that the step comes while the copy is under way.
    wrong = steps(Training(row.device, 4 * width, {"foreach": True}), count, waits=False)
    row.tell("the same without the wait", "seen", f"{wrong} of {count} snapshots differ", wrong=wrong)


def _locked(row: Row) -> None:
    """The pieces that copies go through."""
    if row.device == "cpu":
        raise NotThereError("memory is locked for a device only")
    began = time.perf_counter()
    pinned = locked(PIECE).is_pinned()
    row.tell("locked memory", pinned, f"{PIECE >> 20} MiB in {time.perf_counter() - began:.3f} s")


if __name__ == "__main__":
    main("consistency", body)
