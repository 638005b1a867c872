"""Scripts that are run as a newcomer's are, and plainly: nobody can tell which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ft_core.state.deferred import Deferred


@contextmanager
def putting_off() -> Iterator[Deferred]:
    """Active, and off again whatever happens."""
    deferred = Deferred()
    deferred.begin()
    try:
        yield deferred
    finally:
        deferred.end()


def plainly(script: Callable[[], Any], seed: int = 5) -> tuple[Any, torch.Tensor]:
    """What a script makes, and where it leaves the generator."""
    torch.manual_seed(seed)
    return script(), torch.get_rng_state()


def flat(value: Any) -> list[Any]:
    """All tensors and numbers of what a script returns."""
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in flat(part)]
    return [value]


def same(found: Any, expected: Any) -> None:
    """To the bit."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
            bits = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
            assert torch.equal(*bits)
        else:
            assert one == other


def check(script: Callable[[], Any], put_off: bool | None = True) -> None:
    """A script's results and its generator are the same, whether it is done at once or when it is asked for;
    the generator is also where nobody ever asks. `put_off`: whether anything is by its end, if known."""
    expected, state = plainly(script)
    with putting_off() as deferred:
        found, left = plainly(script)
        assert torch.equal(left, state)
        assert put_off is None or (deferred.skipped > deferred.done) == put_off
        deferred.complete("the test wants to see it")
        assert torch.equal(torch.get_rng_state(), state)
    same(found, expected)
    with putting_off():
        torch.manual_seed(5)
        script()
    assert torch.equal(torch.get_rng_state(), state)
