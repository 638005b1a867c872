"""torch's CPU generator, a Mersenne Twister, brought forward by any number of draws in some milliseconds.

Its state is 19937 bits, and a draw is a linear map of them: *n* draws are the polynomial x^n, modulo the
map's characteristic polynomial, put into the sequence of states (Haramoto et al., Efficient jump ahead for
F2-linear random number generators, 2008). A polynomial is an int: bit *k* is the coefficient of x^k.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

_WORDS, _MIDDLE, _LOW_BITS, _TWIST = 624, 397, 31, 0x9908B0DF
_DEGREE = 32 * _WORDS - _LOW_BITS
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)
"""Where `torch.Generator.get_state` says how many words are left, and one, which is next, and the words."""
_NBYTES = 5056

_FEW = 100
"""Times that are sooner made one by one."""

Words = NDArray[np.uint32]


def is_state(state: torch.Tensor) -> bool:
    """Whether a generator's state is of the kind that is known here."""
    return state.dtype == torch.uint8 and state.nbytes == _NBYTES


def advanced(state: torch.Tensor, draws: int) -> torch.Tensor:
    """The state of a CPU generator after it has given `draws` more words of 32 bits.

    `state`: as `torch.Generator.get_state` returns it. What it keeps of normal numbers that were drawn in
    excess stays. Raises ValueError for a state of another kind.
    """
    if not is_state(state):
        raise ValueError(f"this is no state of a Mersenne Twister: {state.nbytes} bytes of {state.dtype}")
    raw = state.numpy().copy()
    left = int(raw[_LEFT].view(np.int32)[0]) - 1
    if draws <= left:
        left, following = left - draws, int(raw[_NEXT].view(np.uint64)[0]) + draws
    else:
        blocks, last = divmod(draws - left - 1, _WORDS)
        words = raw[_STATE].view(np.uint64)
        words[:] = _made_anew(words.astype(np.uint32), blocks + 1)
        left, following = _WORDS - last - 1, last + 1
    raw[_LEFT].view(np.int32)[0] = left + 1
    raw[_NEXT].view(np.uint64)[0] = following
    return torch.from_numpy(raw)


def drawn(state: torch.Tensor) -> int:
    """How many words, fewer than 624, a generator has given since it was seeded."""
    return int(state.numpy()[_NEXT].view(np.uint64)[0])


def other(state: torch.Tensor) -> torch.Tensor:
    """A state of the same seed that no generator comes to by drawing, different every time."""
    raw = state.numpy().copy()
    raw[_STATE].view(np.uint64)[:] = np.random.default_rng().integers(1 << 32, size=_WORDS, dtype=np.uint64)
    return torch.from_numpy(raw)


def _made_anew(words: Words, times: int) -> Words:
    """The state's words after so many times, at least one."""
    words = _next(words)  # of the first word's lower bits the map knows nothing; from here on it does
    if times <= _FEW:
        for _ in range(times - 1):
            words = _next(words)
        return words
    sequence = [words]
    for _ in range(_DEGREE // _WORDS + 1):
        sequence.append(_next(sequence[-1]))
    flat = np.concatenate(sequence)
    # Coefficients four by four: the 16 sums of the sequence and the three that follow it are made once.
    length = len(flat) - 3
    sums = np.zeros((16, length), np.uint32)
    for which in range(1, 16):
        top = which.bit_length() - 1
        sums[which] = sums[which ^ 1 << top] ^ flat[top : top + length]
    result = np.zeros(_WORDS, np.uint32)
    for place, digit in enumerate(reversed(f"{_power(_WORDS * (times - 1)):x}")):
        result ^= sums[int(digit, 16), 4 * place : 4 * place + _WORDS]
    return result


def _next(words: Words) -> Words:
    made = np.concatenate([words, np.empty(_WORDS, np.uint32)])
    upper, step = np.uint32(1 << _LOW_BITS), _WORDS - _MIDDLE
    for start in range(0, _WORDS, step):  # a new word needs the one `step` before it
        stop = min(start + step, _WORDS)
        pair = (made[start:stop] & upper) | (made[start + 1 : stop + 1] & ~upper)
        mixed = (pair >> np.uint32(1)) ^ ((pair & np.uint32(1)) * np.uint32(_TWIST))
        made[_WORDS + start : _WORDS + stop] = made[_MIDDLE + start : _MIDDLE + stop] ^ mixed
    return made[_WORDS:]


@functools.lru_cache(64)  # weights of one shape come again and again
def _power(exponent: int) -> int:
    """x^exponent, modulo the characteristic polynomial."""
    result = 1
    for bit in f"{exponent:b}":
        square = int("0".join(f"{result:b}"), 2)
        result = _modulo(square << (bit == "1"))
    return result


def _modulo(polynomial: int) -> int:
    """Of a degree below 2 * _DEGREE.

    The modulus is x^d (1 + s), s a sum of negative powers, and 1 / (1 + s) = (1 + s) (1 + s^2) (1 + s^4) ...:
    that gives the quotient. And s^2 has the powers of s, doubled.
    """
    quotient, power = polynomial >> _DEGREE, 1
    gaps = [_DEGREE - exponent for exponent in _exponents()]
    while near := [gap * power for gap in gaps if gap * power < _DEGREE]:
        factor = quotient
        for gap in near:
            quotient ^= factor >> gap
        power *= 2
    for exponent in _exponents():
        polynomial ^= quotient << exponent
    return polynomial & (1 << _DEGREE) - 1


@functools.cache
def _exponents() -> tuple[int, ...]:
    """Those of the characteristic polynomial, but for the highest.

    With P = x^624 + x^397, Q = x^623 + x^396 and the bits a of the twist it is
    P Q^31 + P (a0 Q^30 + a1 Q^29 + ... + a30) + a31 (Matsumoto and Nishimura, Mersenne Twister, 1998).
    """
    found = 1
    for bit in range(_LOW_BITS):
        found = found << _WORDS - 1 ^ found << _MIDDLE - 1 ^ (_TWIST >> bit & 1)
    found = found << _WORDS ^ found << _MIDDLE ^ (_TWIST >> _LOW_BITS)
    return tuple(place for place in range(_DEGREE) if found >> place & 1)
