"""The metadata envelope: small state (RNG, schedules, loss scaler, data position) as JSON, without pickle.

Floats keep every bit (JSON prints the shortest text that reads back equal); tensors and arrays go as
base64 with dtype and shape; tuples and integer keys come back as they were.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from ft_core.adapter import Maker
from ft_core.errors import ConfigError, CorruptSnapshot

log = logging.getLogger(__name__)

_KIND = "__ft__"
_MAKER = "made by"
_ALIGN = 16384
_PLAIN = frozenset({type(None), bool, int, float, str})


def encode(value: Any, room: int = 0) -> bytes:
    """Encode and pad with spaces to `room` bytes, or more if that is too little.

    The size is part of a segment's layout, and a new layout is new memory: given the `room` of the step
    before, it never falls and seldom rises, by a quarter at least. Raises TypeError for objects that are no
    data.
    """
    text = json.dumps(_pack(value), separators=(",", ":")).encode()
    if len(text) > room:
        room = -(-(len(text) * 5 // 4 + 512) // _ALIGN) * _ALIGN
    return text.ljust(room)


def decode(data: bytes | memoryview) -> Any:
    """Inverse of `encode`. Raises CorruptSnapshot for anything else."""
    try:
        return _unpack(json.loads(bytes(data)))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptSnapshot(
            f"metadata envelope is not readable ({error}); another copy is needed"
        ) from error


def sign(value: Any, maker: Maker | None) -> Any:
    """An envelope as `maker` leaves it: whoever does not look for its name does not find it."""
    return value if maker is None else {**value, _MAKER: asdict(maker)}


def checked(value: Any, maker: Maker | None, version: int) -> Any:
    """The envelope of `version`, as its adapter has made it, if `maker` can read that. Raises ConfigError.

    One that nobody has signed is older than signatures, and is read.
    """
    if maker is None or (signature := value.pop(_MAKER, None)) is None:
        return value
    theirs = Maker(**signature)
    if replace(theirs, release=maker.release) != maker:
        raise ConfigError(
            f"step {version} was saved by {theirs}, and {maker} cannot restore it: go on with what has saved "
            "it, or give another durable directory"
        )
    if theirs != maker:
        log.warning("step %d was saved by %s, and is restored by %s", version, theirs, maker)
    return value


def _pack(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return _pack_all(value)
    if isinstance(value, tuple):
        return {_KIND: "tuple", "v": _pack_all(value)}
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value) and _KIND not in value:
            return dict(zip(value, _pack_all(value.values()), strict=True))
        return {_KIND: "dict", "v": [[_pack(k), _pack(v)] for k, v in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {_KIND: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        raw = host.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(host.dtype).removeprefix("torch.")
        return {_KIND: "tensor", "d": dtype, "s": list(host.shape), "v": base64.b64encode(raw).decode()}
    if isinstance(value, np.generic):
        return _pack(value.item())
    if isinstance(value, np.ndarray) and value.dtype != object:
        raw = np.ascontiguousarray(value).tobytes()
        return {
            _KIND: "array",
            "d": value.dtype.str,
            "s": list(value.shape),
            "v": base64.b64encode(raw).decode(),
        }
    raise TypeError(
        f"cannot put a {type(value).__name__} into a snapshot's envelope; give plain data or tensors"
    )


def _pack_all(values: Collection[Any]) -> list[Any]:
    # The state of Python's generator alone is 625 numbers, and is packed in every step.
    if _PLAIN.issuperset(map(type, values)):
        return list(values)
    return [_pack(v) for v in values]


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {k: _unpack(v) for k, v in value.items()}
    if kind == "tuple":
        return tuple(_unpack(v) for v in value["v"])
    if kind == "dict":
        return {_unpack(k): _unpack(v) for k, v in value["v"]}
    raw = bytearray(base64.b64decode(value["v"]))
    if kind == "bytes":
        return bytes(raw)
    if kind == "array":
        return np.frombuffer(raw, dtype=np.dtype(value["d"])).reshape(value["s"]).copy()
    if kind == "tensor":
        dtype = getattr(torch, value["d"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {value['d']!r}")
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["s"]).clone()
    raise ValueError(f"unknown kind {kind!r}")
