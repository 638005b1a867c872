"""Run by torchrun for test_conformance.py: a small training whose adapter is right, or has one mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from cases import run_each
from torch import nn

from ft_core.adapter import Adapter, StateTensor
from ft_core.conformance import Collectives, check
from ft_core.state import rng

collectives = Collectives()


class Net(nn.Module):
    """Draws numbers, and has a running mean on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        self.mean.lerp_(y.detach().mean(), 0.1)
        return y - self.mean


class LoopAdapter(Adapter):
    """As in docs/tutorial.md."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.ring = tuple(range(dist.get_world_size()))
        self.mine = (dist.get_rank(),)

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in sorted(self.optimizer.state[parameter].items()):
                yield f"optimizer.{index}.{key}", value

    def tensors(self) -> Iterator[StateTensor]:
        for name, parameter in self.model.named_parameters():
            yield StateTensor(f"model.{name}", parameter.data, self.ring)
        for name, moment in self.moments():
            yield StateTensor(name, moment, self.ring)
        for name, buffer in self.model.named_buffers():
            yield StateTensor(f"buffer.{name}", buffer, self.mine, volatile=True)

    def envelope(self) -> Any:
        return {"random": rng.capture()}

    def envelope_holders(self) -> tuple[int, ...]:
        return self.mine

    def restore(self, tensors: Any, envelope: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(tensors[f"buffer.{name}"])
        self.put_moments(tensors)
        rng.restore(envelope["random"])

    def put_moments(self, tensors: Any) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            prefix = f"optimizer.{index}."
            self.optimizer.state[parameter] = {
                name.removeprefix(prefix): self.own(value)
                for name, value in tensors.items()
                if name.startswith(prefix)
            }

    def own(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    def reset(self) -> None:
        self.optimizer.zero_grad()


class ForgetsRandomStates(LoopAdapter):
    def envelope(self) -> Any:
        return {"random": {}}


class KeepsWhatItIsGiven(LoopAdapter):
    def own(self, value: torch.Tensor) -> torch.Tensor:
        return value


class LeavesGradients(LoopAdapter):
    def reset(self) -> None:
        pass


class LeavesLaterMoments(LoopAdapter):
    def put_moments(self, tensors: Any) -> None:
        found = dict(self.moments())
        if any(name not in found for name in tensors if name.startswith("optimizer.")):
            super().put_moments(tensors)
        else:
            for name, moment in found.items():
                if name in tensors:
                    moment.copy_(tensors[name])


class SaysThatOthersHaveTheSame(LoopAdapter):
    def tensors(self) -> Iterator[StateTensor]:
        self.mine = self.ring
        return super().tensors()


class ForgetsBuffers(LoopAdapter):
    """They are in no version, and survivors keep theirs."""

    def tensors(self) -> Iterator[StateTensor]:
        return (found for found in super().tensors() if not found.volatile)

    def restore(self, tensors: Any, envelope: Any) -> None:
        buffers = {f"buffer.{name}": buffer for name, buffer in self.model.named_buffers()}
        super().restore(dict(tensors) | buffers, envelope)


class Loop:
    """Gradients go as the optimizer has stepped, and not before it begins."""

    def __init__(self, kind: type[LoopAdapter], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        torch.manual_seed(100 * seed + dist.get_rank())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.adapter = kind(self.model, self.optimizer)

    def step(self, version: int) -> float:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(7 * version + dist.get_rank()))
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach()
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        return total.item()

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())


KINDS: dict[str, type[LoopAdapter]] = {
    kind.__name__: kind for kind in (LoopAdapter, *LoopAdapter.__subclasses__())
}


def run(case: str) -> int | str:
    make: Callable[[int], Loop] = lambda seed: Loop(KINDS[case], seed)  # noqa: E731
    if case == LoopAdapter.__name__:
        return check(make, collectives)
    try:
        check(make, collectives)
    except AssertionError as error:
        print(f"rank {dist.get_rank()} {case}: {error}"[:300].replace("\n", " "), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run_each(run)
