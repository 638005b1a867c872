"""The random number generators of a process, all of them, as plain data."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

OWN = "own."
"""Before the names of generators that the script has made."""

_CPU, _CUDA = 5056, 16
"""Bytes of the states of torch's generators."""
_WORDS = 624
_BLOCKS = 8
"""Blocks of words, each made of the one before, through which a Mersenne twister is followed."""
_PCG64 = 0x2360ED051FC65DA44385DF649FCCF645
_twisted = np.random.MT19937(0)

_own: dict[str, tuple[dict[str, Any], str]] = {}


def find(namespaces: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Have the generators of the script's own that are in these belong to all, under their names there.

    They are looked up by name each time: a script may put another one in its place.
    """
    for name, space in namespaces:
        for key, value in list(space.items()):
            if isinstance(value, KINDS) and not isinstance(value, random.SystemRandom):
                _own[f"{OWN}{name}.{key}"] = space, key


def capture() -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators, of the current GPU's where there is one, and of
    those that were found."""
    states = {**of_host(), "cuda": torch.cuda.get_rng_state() if _has_cuda() else None}
    for name, (space, key) in _own.items():
        states[name] = state_of(space.get(key))
    return states


def of_host() -> dict[str, Any]:
    """Those of Python's, numpy's and torch's generators of the CPU, which a loader's process has, too."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()  # it takes longer than all the rest


def restore(states: dict[str, Any]) -> None:
    """Put back what `capture` returned, or some of it, in the same process or in another one."""
    for name, state in states.items():
        if state is None:
            continue
        if name == "python":
            random.setstate(state)
        elif name == "numpy":
            np.random.set_state(state)
        elif name == "torch":
            torch.set_rng_state(state)
        elif name == "cuda":
            torch.cuda.set_rng_state(state)
        elif name in _own:
            space, key = _own[name]
            set_state(space.get(key), state)


def moved(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of those that have drawn in between."""
    return [name for name, state in now.items() if name not in before or not _same(before[name], state)]


def distance(before: Any, now: Any) -> int:
    """How many numbers a generator has drawn between two of its states, about; 0: there is no telling.

    Of Mersenne twisters (torch's, Python's, numpy's older ones) beyond `_BLOCKS` blocks it is no more than a
    mark that is the same whenever as many are drawn. numpy's newer ones and GPUs' count.
    """
    if type(before) is not type(now):
        return 0
    if isinstance(before, torch.Tensor) and before.numel() == now.numel() == _CUDA:
        return int(now.view(torch.int64)[1] - before.view(torch.int64)[1])
    if isinstance(before, dict) and before["bit_generator"] == now["bit_generator"] == "PCG64":
        return _jump(before["state"]["state"], now["state"]["state"], before["state"]["inc"])
    one, other = _twister(before), _twister(now)
    if one is None or other is None:
        return 0
    (words, at), (words_now, at_now) = one, other
    for blocks in range(_BLOCKS):
        if np.array_equal(words, words_now):
            return blocks * _WORDS + at_now - at
        _twisted.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
        _twisted.random_raw(1, output=False)
        words = _twisted.state["state"]["key"]
    return _BLOCKS * _WORDS + (at_now - at) % _WORDS


def _twister(state: Any) -> tuple[Any, int] | None:
    """A Mersenne twister's words, and how many of them are used."""
    if isinstance(state, torch.Tensor):
        if state.numel() != _CPU:
            return None
        data = state.numpy()
        left = int(data[8:12].view(np.int32)[0])
        return data[24 : 24 + 8 * _WORDS].view(np.uint64).astype(np.uint32), _WORDS + 1 - left
    if isinstance(state, dict):
        inner = state["state"] if state["bit_generator"] == "MT19937" else None
        return None if inner is None else (inner["key"], inner["pos"])
    if isinstance(state, tuple) and state[0] == "MT19937":
        return state[1], state[2]
    if isinstance(state, tuple) and isinstance(state[1], tuple) and len(state[1]) == _WORDS + 1:
        return np.array(state[1][:-1], np.uint32), state[1][-1]
    return None


def _jump(state: int, now: int, increment: int) -> int:
    """How many steps of PCG64's x -> a x + c lead from one to the other: its lowest bits tell one by one."""
    factor, all_bits, found, bit = _PCG64, (1 << 128) - 1, 0, 1
    while state != now and bit <= all_bits:
        if (state ^ now) & bit:
            state = (state * factor + increment) & all_bits
            found |= bit
        bit <<= 1
        increment = (factor + 1) * increment & all_bits
        factor = factor * factor & all_bits
    return found


def state_of(generator: Any) -> Any:
    """The state of one generator, as plain data; None of anything else."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else None


def set_state(generator: Any, state: Any) -> None:
    """Put back what `state_of` returned of one like it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_same(one[key], other.get(key)) for key in one)
    if isinstance(one, tuple) and any(isinstance(part, np.ndarray) for part in one):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The classes of generators that a script may have."""
