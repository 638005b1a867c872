"""What torch's NCCL groups read from the environment when they are made, and what of it ends survivors.

Read in the source of torch's `ProcessGroupNCCL` (about 2.13). Each group has a thread that looks at its
operations ("watchdog"), and one that looks whether that thread lives ("monitor"). What they do about the loss
of a peer, all of it beside an engine that aborts communicators and opens them again:

- The watchdog ends the process (ASYNC_ERROR_HANDLING 1 or 3, the default).
- Before that, and also where it does not end it, it gives others time to write a flight record: it sleeps for
  four times WAIT_TIMEOUT_DUMP_MILSEC, a minute. It does so with a lock that the next operation of the group
  needs, so a training thread would stand still where no abort reaches it.
- It leaves word of the failure, for the whole process and for good. The monitor of the process's first group,
  which need not be one that is aborted (groups of one member are not), finds it there, writes a record
  (DUMP_ON_TIMEOUT), waits for the time of a heartbeat, 8 minutes, and ends the process (ENABLE_MONITORING).
- The watchdog ends the process also where the device has failed (RETHROW_CUDA_ERRORS), as garbage of an
  aborted exchange can make it do: before the engine replaces this worker, and counts that against nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_PREFIX = "TORCH_NCCL_"
_ERRORS, _OLD_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"
_MONITOR, _DUMP = "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"
_PATIENCE = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
_MULTICAST = "NCCL_NVLS_ENABLE"
"""NVLink SHARP. NCCL's source speaks of a possible hang where a communicator that uses it is aborted, and
NVIDIA's own resiliency extension demands that it is off."""
DEFAULTS = {_ERRORS: "0", _MONITOR: "0", _DUMP: "0", _PATIENCE: "0", _RETHROW: "0", _MULTICAST: "0"}
"""Where nobody has said otherwise."""


def completed(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers get: what is there, and `DEFAULTS` for what is not.

    Who has a flight record written keeps torch's time for it.
    """
    found = {name: environment.get(name, value) for name, value in DEFAULTS.items()}
    if _ERRORS not in environment and _OLD_ERRORS in environment:
        found[_ERRORS] = environment[_OLD_ERRORS]
    if _on(found[_DUMP]) and _PATIENCE not in environment:
        del found[_PATIENCE]
    return found


def ends_survivors(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(what is set, what comes of it), of a worker's environment that is as it should be otherwise."""
    for name in (_PREFIX + "DESYNC_DEBUG", "NCCL_DESYNC_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        value = environment.get(name, "")
        if value.upper() == "DETAIL" if name == "TORCH_DISTRIBUTED_DEBUG" else _on(value):
            yield f"{name}={value}", f"torch takes {_ERRORS}=0 for 3 then, and ends each survivor"
    if _on(environment.get(_RETHROW, "1")):
        yield (
            f"{_RETHROW}=1",
            "torch ends a survivor whose device fails of what an abort has left, and its node is blamed",
        )
    if _on(environment.get(_MONITOR, "1")) and _on(environment.get(_DUMP, "1")):
        yield (
            f"{_MONITOR}=1 with {_DUMP}=1",
            "torch's monitor ends a survivor minutes after the recovery, for the failure that is over",
        )


def _on(value: str) -> bool:
    return value.lower() in ("y", "yes", "1", "t", "true")
