"""What Megatron has gathered for the log since it was last written, and what decides what is exchanged then.

Load-balancing losses of experts lie in a global table, name -> values and the groups to reduce them over: a
dict of dicts in megatron-core 0.17 and before, a dict of objects after. Losses of multi-token prediction, of
sparse attention's indexer, and of what comes later in the same manner, lie in a dict `tracker` of a class of
their own. Whoever has nothing there takes no part in the reduction for the log, and the others wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from ft_core.comm.collectives import FtProcessGroup
from ft_core.protocol.groups import GroupId

_GROUP, _EXPERTS = "group", "experts"
_DEBUGGING = ("activation_logging", "dgrad_logging")
"""Modules of `megatron.training` whose loggers put hooks into the model for one step."""
_REMOVERS = ("remove_hooks", "remove_activation_hooks", "remove_tpe_hooks")


def of_each_role(args: Any) -> bool:
    """Whether what is gathered, or what is drawn, differs from replica to replica, by the job's arguments."""
    names = ("num_experts", "mtp_num_layers", "experimental_attention_variant", "data_parallel_random_init")
    return any(getattr(args, name, None) for name in names)


def capture() -> dict[str, dict[str, Any]]:
    """All tables as plain data; a group goes by its name."""
    entries, _ = _experts()
    found: dict[str, dict[str, Any]] = {
        _EXPERTS: {name: _captured(_fields(entry)) for name, entry in entries.items()}
    }
    return found | {name: _captured(tracker) for name, tracker in _trackers()}


def restore(saved: dict[str, dict[str, Any]], find_group: Callable[[GroupId], Any]) -> None:
    """Put the tables back; entries that came later are as new."""
    entries, make = _experts()
    entries.clear()
    for name, fields in saved[_EXPERTS].items():
        values = _restored(fields, find_group)
        entry = make(values.pop("values"))
        _fields(entry).update(values)
        entries[name] = entry
    for name, tracker in _trackers():
        tracker.clear()
        tracker.update(_restored(saved.get(name, {}), find_group))


def forget_hooks() -> None:
    """Take out of the model what savers for debugging have put there for a step that is abandoned."""
    for name in _DEBUGGING:
        logger = getattr(sys.modules.get(f"megatron.training.{name}"), "_LOGGER", None)
        for remove in _REMOVERS:
            getattr(logger, remove, lambda: None)()


def forget_lengths(training: ModuleType) -> None:
    """Forget what an abandoned step has counted of packed sequences."""
    if getattr(training, "_seqlen_stats_active", False):
        training._seqlen_stats_in_iteration.zero_()
        training._seqlen_stats_active = False  # type: ignore[attr-defined]


def _experts() -> tuple[MutableMapping[str, Any], Callable[[torch.Tensor], Any]]:
    """The table, and what makes an entry of values. Empty when nothing of Megatron's experts is imported."""
    if (logging := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:
        return logging.get_moe_metrics_tracker().metrics, lambda values: logging.MetricEntry(values=values)
    if (utils := sys.modules.get("megatron.core.transformer.moe.moe_utils")) is not None:
        return utils.get_moe_layer_wise_logging_tracker(), lambda values: {"values": values}
    return {}, lambda values: values


def _trackers() -> Iterator[tuple[str, dict[str, Any]]]:
    """By the names of their classes."""
    for kind in _kinds(len(sys.modules)):
        yield f"{kind.__module__}:{kind.__qualname__}", vars(kind)["tracker"]


@lru_cache(maxsize=1)
def _kinds(modules: int) -> list[type]:
    """Classes that have a tracker, in order. Each step asks: looked for once for so many `modules`."""
    return [
        kind
        for name, module in sorted(sys.modules.items())
        if name.startswith("megatron.") and module is not None
        for kind in list(vars(module).values())
        if isinstance(kind, type) and kind.__module__ == name and isinstance(vars(kind).get("tracker"), dict)
    ]


def _fields(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else vars(entry)


def _captured(fields: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return {_GROUP: str(value.identity)} if isinstance(value, FtProcessGroup) else value

    return {key: plain(value) for key, value in fields.items()}


def _restored(fields: dict[str, Any], find_group: Callable[[GroupId], Any]) -> dict[str, Any]:
    def made(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone().to(torch.cuda.current_device())
        return find_group(GroupId.parse(value[_GROUP])) if isinstance(value, dict) else value

    return {key: made(value) for key, value in fields.items()}
