"""What of torch, and of Python, is replaced in every worker, and why."""

from __future__ import annotations

from ft_core.patching import declare, declare_each

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
TENSOR_READERS = (
    *declare_each(
        "torch:Tensor",
        "numpy tolist __array__ __dlpack__ __reduce_ex__ __deepcopy__",
        "while a newcomer starts up: whoever reads weights by it finds them initialised",
    ),
    *declare_each(
        "torch:UntypedStorage",
        "resize_ share_memory_ _share_fd_cpu_ _share_filename_cpu_",
        "while a newcomer starts up: whoever reads weights behind it finds them initialised",
    ),
)
TENSOR_TEXT = declare(
    "torch:Tensor.__repr__", "while a newcomer starts up: text that nobody reads costs nothing"
)
GENERATOR_READERS = (
    declare("torch:get_rng_state", "while a newcomer starts up: it is where initialisation leaves it"),
    declare("torch.random:get_rng_state", "while a newcomer starts up: it is where initialisation leaves it"),
)
_MARKED = "until training begins: the time line tells when it is made"
MADE = {
    "process groups": declare(f"{_GROUPS}_new_group_with_tag", _MARKED),
    "model": declare("torch.nn:Module.__init__", _MARKED),
    "optimizer": declare("torch.optim:Optimizer.__init__", _MARKED),
    "data": declare("torch.utils.data:DataLoader.__init__", _MARKED),
}
"""By what it is."""
