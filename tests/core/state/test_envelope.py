from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from ft_core.errors import CorruptSnapshot
from ft_core.state import envelope


def test_everything_a_training_state_holds_comes_back_bit_for_bit():
    value = {
        "rng": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "floats": [0.1, 1e-320, math.inf, -0.0, 3],
        "by number": {0: (1, 2), "a": None},
        "bf16": torch.randn(3, 2).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flag": True,
        "raw": b"\x00\xff",
        "np": np.float64(0.3),
    }
    back = envelope.decode(envelope.encode(value))
    assert back["rng"] == value["rng"]
    random.setstate(back["rng"])
    assert back["numpy"][0] == value["numpy"][0] and (back["numpy"][1] == value["numpy"][1]).all()
    for key in ("torch", "bf16", "scalar", "empty"):
        assert back[key].dtype == value[key].dtype and torch.equal(back[key], value[key])
    assert [x.hex() for x in back["floats"][:4]] == [x.hex() for x in value["floats"][:4]]
    assert type(back["floats"][4]) is int
    assert back["by number"] == value["by number"]
    assert back["flag"] is True and back["raw"] == b"\x00\xff" and back["np"] == 0.3


def test_size_does_not_follow_every_digit():
    sizes = {len(envelope.encode({"samples": 10**n})) for n in range(15)}
    assert len(sizes) == 1


def test_a_size_that_goes_up_and_down_takes_the_room_that_it_once_had():
    sizes, room = set(), 0
    for length in (100, 15800, 15900, 15800, 15900, 16300, 16400, 16300, 16400, 100):
        data = envelope.encode("x" * length, room)
        room = len(data)
        sizes.add(room)
        assert envelope.decode(data) == "x" * length
    assert len(sizes) == 2


def test_one_that_grows_by_and_by_seldom_changes_its_size():
    room, sizes = 0, set()
    for length in range(0, 1 << 20, 1000):
        room = len(envelope.encode("x" * length, room))
        sizes.add(room)
    assert len(sizes) < 20


def test_code_is_not_data():
    with pytest.raises(TypeError, match="function"):
        envelope.encode({"f": lambda: None})


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"__ft__":"tensor","d":"os","s":[1],"v":"AAAA"}', b'{"__ft__":"x","v":""}']
)
def test_garbage_is_refused(data):
    with pytest.raises(CorruptSnapshot):
        envelope.decode(data)
