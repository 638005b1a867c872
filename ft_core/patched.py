"""What of torch, and of Python, is replaced in every worker, and why."""

from __future__ import annotations

from ft_core.patching import declare, declare_each

_GROUPS = "torch.distributed.distributed_c10d:"

RENDEZVOUS = declare(f"{_GROUPS}rendezvous", "process groups are made without a network")
NEW_GROUP = declare(
    f"{_GROUPS}_new_process_group_helper", "process groups can be repaired, whatever backend is asked for"
)
BROADCAST_OBJECTS = tuple(
    declare(f"{module}:broadcast_object_list", "a newcomer that sent an object has the one that it sent")
    for module in ("torch.distributed", "torch.distributed.distributed_c10d")
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
_IMPORT = "in a fork server, while it imports what the script does: what a package reads and needs is noted"
IMPORT = declare("builtins:__import__", _IMPORT)
IMPORT_BY_NAME = declare("importlib._bootstrap:_gcd_import", _IMPORT)
READ_VARIABLE = declare("os:_Environ.__getitem__", _IMPORT)
WRITE_VARIABLE = declare("os:_Environ.__setitem__", _IMPORT)
_READ = "while a newcomer starts up: whoever reads weights by it finds them initialised"
READERS = (
    *declare_each("torch:Tensor", "numpy tolist __array__ __dlpack__ __reduce_ex__ __deepcopy__", _READ),
    *declare_each("torch:Tensor", "apply_ map_ map2_", _READ),
    *declare_each("torch:UntypedStorage", "resize_ share_memory_ _share_fd_cpu_ _share_filename_cpu_", _READ),
    *declare_each("torch:UntypedStorage", "__getitem__ __setitem__ __reduce__ _write_file byteswap", _READ),
    *declare_each("torch:UntypedStorage", "_set_from_file _byteswap _swap_data_ptr_", _READ, optional=True),
    *declare_each("torch._C:", "_to_dlpack _to_dlpack_versioned", _READ, optional=True),
    *declare_each("torch:", "to_dlpack", _READ, optional=True),
    *declare_each("torch.utils.dlpack:", "to_dlpack", _READ, optional=True),
    *declare_each("torch._C:PyTorchFileWriter", "write_record", _READ),
)
ADDRESSES = (
    declare("torch:Tensor.data_ptr", _READ),
    declare("torch:Tensor.const_data_ptr", _READ, optional=True),
    declare("torch:UntypedStorage.data_ptr", _READ),
)
CONVERSIONS = declare_each("torch:Tensor", "__float__ __int__ __index__ __bool__ __complex__", _READ)
"""Of a tensor to a number: torch sees no operation where it makes a tensor of a list of them."""
TENSOR_TEXT = (
    declare("torch:Tensor.__repr__", "while a newcomer starts up: text that nobody reads costs nothing"),
)
GENERATOR = (
    declare(
        "torch.random:default_generator", "while a newcomer starts up: it is where initialisation leaves it"
    ),
)
_SEEN = "while a newcomer starts up: what it leaves to the restore is seen and done before"
_COMPILER = "torch._dynamo.eval_frame:"
EVAL_FRAME = declare("torch._C._dynamo.eval_frame:set_eval_frame", _SEEN)
EVAL_FRAME_IMPORTED = declare_each(_COMPILER, "set_eval_frame _maybe_set_eval_frame", _SEEN, optional=True)
SCRIPTED = (
    *declare_each("torch._C:ScriptFunction", "__call__", _SEEN),
    *declare_each("torch._C:ScriptMethod", "__call__", _SEEN),
    *declare_each("torch._C:", "_create_function_from_trace _create_function_from_trace_with_dict", _SEEN,
                  optional=True),
)  # fmt: skip
MODES = (declare("torch.utils._python_dispatch:TorchDispatchMode.__enter__", _SEEN),)
THREADS = (declare("threading:Thread._bootstrap_inner", _SEEN),)
PARAMETERS = (
    declare("torch.nn:Module.register_parameter", "while a newcomer starts up: it is watched again"),
)
_MARKED = "until training begins: the time line tells when it is made"
MADE = {
    "process groups": declare(f"{_GROUPS}_new_group_with_tag", _MARKED),
    "model": declare("torch.nn:Module.__init__", _MARKED),
    "optimizer": declare("torch.optim:Optimizer.__init__", _MARKED),
    "data": declare("torch.utils.data:DataLoader.__init__", _MARKED),
}
"""By what it is."""
