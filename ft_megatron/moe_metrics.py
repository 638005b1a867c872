"""What Megatron's experts have gathered for the log (load-balancing losses) since it was last written.

It lies in a global table, name -> values and the groups to reduce them over: a dict of dicts in
megatron-core 0.17 and before, a dict of objects after.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from ft_core.comm.collectives import FtProcessGroup
from ft_core.protocol.groups import GroupId

_GROUP = "group"


def capture() -> dict[str, dict[str, Any]]:
    """The table as plain data; a group goes by its name."""
    entries, _ = _table()
    return {
        name: {key: _plain(value) for key, value in _fields(entry).items()} for name, entry in entries.items()
    }


def restore(saved: dict[str, dict[str, Any]], find_group: Callable[[GroupId], Any]) -> None:
    """Put the table back; entries that came later are as new."""
    entries, make = _table()
    entries.clear()
    for name, fields in saved.items():
        entry = make(fields["values"].clone().to(torch.cuda.current_device()))
        for key, value in fields.items():
            if key != "values":
                named = isinstance(value, dict)
                _fields(entry)[key] = find_group(GroupId.parse(value[_GROUP])) if named else value
        entries[name] = entry


def _table() -> tuple[MutableMapping[str, Any], Callable[[torch.Tensor], Any]]:
    """The table, and what makes an entry of values. Empty when nothing of Megatron's experts is imported."""
    if (logging := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:
        return logging.get_moe_metrics_tracker().metrics, lambda values: logging.MetricEntry(values=values)
    if (utils := sys.modules.get("megatron.core.transformer.moe.moe_utils")) is not None:
        return utils.get_moe_layer_wise_logging_tracker(), lambda values: {"values": values}
    return {}, lambda values: values


def _fields(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else vars(entry)


def _plain(value: Any) -> Any:
    if isinstance(value, FtProcessGroup):
        return {_GROUP: str(value.identity)}
    return value
