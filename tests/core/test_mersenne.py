"""torch's CPU generator, brought forward without drawing."""

from __future__ import annotations

import pytest
import torch

from ft_core.state import mersenne


def draw(generator: torch.Generator, words: int) -> None:
    """A number of 24 bits takes one word."""
    if words:
        torch.empty(words).uniform_(generator=generator)


@pytest.mark.parametrize("before", [0, 1, 623, 624, 625, 1000])
@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1247, 1248, 1249, 5000, 3_234_567])
def test_as_if_drawn(before: int, draws: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(before + draws)
    draw(generator, before)
    state = generator.get_state()
    draw(generator, draws)
    assert torch.equal(mersenne.advanced(state, draws), generator.get_state())


def test_in_parts_as_at_once() -> None:
    """Of any number, also one that nobody would draw."""
    state = torch.Generator().get_state()
    parts = mersenne.advanced(mersenne.advanced(state, 3 * 10**11 + 7), 10**12 + 5)
    assert torch.equal(parts, mersenne.advanced(state, 13 * 10**11 + 12))


def test_what_was_drawn_in_excess_stays() -> None:
    generator = torch.Generator()
    torch.empty(3).normal_(generator=generator)  # drawn in pairs
    state = generator.get_state()
    draw(generator, 7000)
    assert torch.equal(mersenne.advanced(state, 7000), generator.get_state())
    assert not torch.equal(state[-32:], torch.Generator().get_state()[-32:])


def test_another_kind_of_state_is_refused() -> None:
    with pytest.raises(ValueError, match="no state of a Mersenne Twister"):
        mersenne.advanced(torch.zeros(16, dtype=torch.uint8), 1)
