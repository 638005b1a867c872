"""What of torch, and of Python, is replaced in every worker, and why."""

from __future__ import annotations

from ft_core.patching import declare

_GROUPS = "torch.distributed.distributed_c10d:"

RENDEZVOUS = declare(f"{_GROUPS}rendezvous", "process groups are made without a network")
NEW_GROUP = declare(
    f"{_GROUPS}_new_process_group_helper", "process groups can be repaired, whatever backend is asked for"
)
BROADCAST_OBJECTS = tuple(
    declare(f"{module}:broadcast_object_list", "a newcomer that sent an object has the one that it sent")
    for module in ("torch.distributed", "torch.distributed.distributed_c10d")
)
BATCH = tuple(
    declare(f"{module}:batch_isend_irecv", "sends and receives of a batch go out as one in our groups, too")
    for module in ("torch.distributed", "torch.distributed.distributed_c10d")
)
SET_TIMEOUT = declare(f"{_GROUPS}_set_pg_timeout", "it knows torch's own process groups alone")
HANDED_OVER = declare(
    "torch.distributed:Reducer._set_forward_pass_work_handle",
    "an operation that C++ alone keeps can be waited for there",
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
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState.__init__",
    "steps of fully_shard, whoever has imported it, cannot be done again, which is said once",
)
_SCHEDULES = "torch.distributed.pipelining.schedules:_PipelineSchedule."
STAGES = declare(
    f"{_SCHEDULES}_initialize_pp_stages",
    "stages of a pipeline tell each other anew what they send when an epoch begins",
    optional=True,
)
SCHEDULE = declare(f"{_SCHEDULES}__init__", "without that, pipelines are not protected, which is said once")
RANDOM_STATES = declare(
    "torch.distributed.tensor._random:OffsetBasedRNGTracker.__init__",
    "random states are exchanged before training, or not at all",
)
_LOCK = "a lock under which extensions are built goes with its owner, where that is killed"
LOCK = declare("torch.utils.file_baton:FileBaton.try_acquire", _LOCK)
WAIT_FOR_LOCK = declare("torch.utils.file_baton:FileBaton.wait", _LOCK)
_IMPORT = "in a fork server, while it imports what the script does: what a package reads and needs is noted"
IMPORT = declare("builtins:__import__", _IMPORT)
IMPORT_BY_NAME = declare("importlib._bootstrap:_gcd_import", _IMPORT)
READ_VARIABLE = declare("os:_Environ.__getitem__", _IMPORT)
EACH_VARIABLE = declare("os:_Environ.__iter__", _IMPORT)
WRITE_VARIABLE = declare("os:_Environ.__setitem__", _IMPORT)
DELETE_VARIABLE = declare("os:_Environ.__delitem__", _IMPORT)
ADD_HANDLER = declare("logging:Logger.addHandler", _IMPORT)
_MARKED = "until training begins: the time line tells when it is made"
MADE = {
    "process groups": declare(f"{_GROUPS}_new_group_with_tag", _MARKED),
    "model": declare("torch.nn:Module.__init__", _MARKED),
    "optimizer": declare("torch.optim:Optimizer.__init__", _MARKED),
    "data": declare("torch.utils.data:DataLoader.__init__", _MARKED),
}
"""By what it is."""
NEXT_BATCH = declare(
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    "it is measured how long a step waits for data",
    optional=True,
)
