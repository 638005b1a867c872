"""What of torch, and of Python, is replaced in every worker, and why."""

from __future__ import annotations

from ft_core.patching import declare

_GROUPS = "torch.distributed.distributed_c10d:"

RENDEZVOUS = declare(f"{_GROUPS}rendezvous", "process groups are made without a network")
NEW_GROUP = declare(
    f"{_GROUPS}_new_process_group_helper", "process groups can be repaired, whatever backend is asked for"
)
BARRIER = declare(f"{_GROUPS}_store_based_barrier", "the store of a process group has one client")
DDP = declare(
    "torch.nn.parallel:DistributedDataParallel.__init__", "its steps cannot be done again, which is said once"
)
FSDP = declare(
    "torch.distributed.fsdp:FullyShardedDataParallel.__init__",
    "its steps cannot be done again, which is said once",
)
FULLY_SHARD = declare(
    "torch.distributed.fsdp:fully_shard", "its steps cannot be done again, which is said once"
)
