"""Stage 3's trace: the order in which a pass forward and back comes to the modules.

DeepSpeed records it in a job's first passes. In those it fetches weights as each module needs them, gives
up small ones, too, that it keeps later, and has all ranks compare what they saw; after them it fetches ahead.
The trace is the same on all roles, so it goes with a version: after a recovery none of them records it again,
a newcomer included.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import ZeRoTraceMode

_PRIVATE = "_PartitionedParameterCoordinator__"


def order(coordinator: Any) -> list[int] | None:
    """The modules' `ds_id` in the order of the trace; None while there is none that is complete."""
    if not coordinator.is_complete_trace():
        return None
    return [module.ds_id for module in vars(coordinator)[f"{_PRIVATE}submodule_order"]]


def forget(coordinator: Any) -> None:
    """Have it as before the first pass. What is being fetched is given up by the caller."""
    state = vars(coordinator)
    state[f"{_PRIVATE}trace_mode"] = ZeRoTraceMode.INVALID
    coordinator._clear_trace_structures()
    state[f"{_PRIVATE}step_id_module_fetched_for"] = defaultdict(deque)
    state[f"{_PRIVATE}step_id"] = 0
    state[f"{_PRIVATE}n_available_params"] = 0
    state[f"{_PRIVATE}ongoing_fetch_events"].clear()
    for name in ("ongoing_fetch_leaf_module_events", "active_backward_submodules"):
        if (kept := state.get(f"{_PRIVATE}{name}")) is not None:
            kept.clear()
    coordinator.hierarchy = 0
    # What to release is cached by the position in the trace, behind a decorator that hides the cache.
    released = vars(type(coordinator))[f"{_PRIVATE}params_to_release"]
    for cell in released.__closure__ or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def restore(coordinator: Any, module: Any, ids: Sequence[int] | None) -> None:
    """Have it as after a pass through `module` that went by the trace `ids`, see `order`."""
    forget(coordinator)
    modules = {m.ds_id: m for m in module.modules() if hasattr(m, "ds_id")}
    if ids is None or not set(ids) <= set(modules):
        return
    state = vars(coordinator)
    state[f"{_PRIVATE}trace_mode"] = ZeRoTraceMode.RECORD
    for position, number in enumerate(ids):
        state[f"{_PRIVATE}step_id"] = position
        coordinator.record_module(modules[number])
    coordinator.construct_parameter_trace_from_module_trace()
    for name in ("submodule_order", "param_order"):
        state[f"{_PRIVATE}{name}"] = tuple(state[f"{_PRIVATE}{name}"])
    state[f"{_PRIVATE}param_queue"] = deque(state[f"{_PRIVATE}param_order"])
    state[f"{_PRIVATE}step_id"] = 0
    state[f"{_PRIVATE}trace_mode"] = ZeRoTraceMode.COMPLETE
