"""What Megatron itself, beside torch, lacks on a host without a GPU: `cpu_shadow.install` calls `install`.

Such hosts have neither apex nor transformer-engine. Everything here keeps Megatron's own modules and adds
what they leave to those: norms under sequence parallelism, attention under context parallelism, and
checkpoints of torch's Adam.
"""

from __future__ import annotations

import copy
import importlib.util
from types import ModuleType
from typing import Any

import torch

from ft_core.import_hook import after_import
from ft_megatron import patched


def install() -> None:
    """Complete Megatron's modules, now or as soon as they are imported."""
    after_import("megatron.core.datasets.utils", _keep_compiled_helpers)
    after_import("megatron.core.transformer.moe.moe_utils", _complete_experts)
    after_import("megatron.core.transformer.torch_norm", _complete_norms)
    after_import("megatron.core.transformer.dot_product_attention", _complete_attention)
    after_import("megatron.core.optimizer.distrib_optimizer", _complete_optimizer)
    after_import("megatron.core.dist_checkpointing.strategies.filesystem_async", _fork_the_collector)
    after_import("megatron.core.dist_checkpointing.strategies.async_utils", _fork_the_writer)


def _keep_compiled_helpers(_: ModuleType) -> None:
    """Have Megatron use the datasets' C++ helper as it was installed, where there is one.

    `megatron.training` runs ``make`` at each start. A wheel holds the helper compiled but no Makefile, so
    rank 0 would exit.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        patched.HELPERS.replace(lambda: None)


def _fork_the_collector(_: ModuleType) -> None:
    """Fork the process that gathers what a checkpoint's writers say.

    Megatron spawns it, since a process that uses CUDA cannot be forked. A spawned one imports the script, for
    seconds, in the first checkpoint of each rank.
    """
    patched.RESULTS_QUEUE.wrap(lambda original: lambda mp_mode="fork": original(mp_mode))


def _fork_the_writer(module: ModuleType) -> None:
    """Fork the process that writes asynchronous checkpoints: one that is started anew has no shadow."""
    caller = module.PersistentAsyncCaller
    if not hasattr(caller, "_get_process"):
        return  # megatron-core 0.16, which comes without megatron.training, its only caller
    start, write = caller._get_process.__func__, caller.async_loop

    def get_process(cls: Any, rank: int, mp_mode: str = "fork", *args: Any, **kwargs: Any) -> Any:
        return start(cls, rank, "fork", *args, **kwargs)

    def async_loop(*args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)  # threads of the parent's are not there
        write(*args, **kwargs)

    process, loop = patched.WRITER
    process.replace(classmethod(get_process))
    loop.replace(staticmethod(async_loop))


# -- expert parallelism ----------------------------------------------------------------------------


def _complete_experts(_: ModuleType) -> None:
    """Give the all-to-all its split sizes as numbers: Megatron makes them so on their way from the GPU."""

    def moves(original: Any) -> Any:
        def move(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
            moved = original(tensor, as_numpy=as_numpy, **kwargs)
            return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

        return move

    patched.SPLIT_SIZES.wrap(moves)


# -- sequence parallelism --------------------------------------------------------------------------


def _complete_norms(_: ModuleType) -> None:
    """Have torch's norms mark their parameters, whose gradients are then summed over the tensor ranks.

    Each rank normalises its own part of the sequence: nothing else is special about them.
    """

    def makes(original: Any) -> Any:
        def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
            norm = original(cls, _with(config, sequence_parallel=False), *args, **kwargs)
            for parameter in norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            return norm

        return new

    patched.NORM.wrap(makes)


# -- context parallelism ---------------------------------------------------------------------------


def _complete_attention(_: ModuleType) -> None:
    """Give the local attention the keys and values of the whole sequence; each rank has its own queries.

    The mask must come from the data loader, as it does by default: it has this rank's rows, and a column for
    each position of the sequence.
    """

    def inits(original: Any) -> Any:
        def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, _with(config, context_parallel_size=1), *args, **kwargs)
            self.config = config

        return init

    def attends(original: Any) -> Any:
        def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
            if self.config.context_parallel_size > 1:
                if attention_mask is None:
                    raise RuntimeError(
                        "context parallelism without transformer-engine takes the attention mask from the "
                        "data loader: leave out --no-create-attention-mask-in-dataloader"
                    )
                key, value = _whole_sequence(key), _whole_sequence(value)
            return original(self, query, key, value, attention_mask, **kwargs)

        return forward

    made, called = patched.ATTENTION
    made.wrap(inits)
    called.wrap(attends)


def _whole_sequence(mine: torch.Tensor) -> torch.Tensor:
    """All context ranks' parts (sequence first) in the sequence's order.

    Rank r of n holds the chunks r and 2n-1-r of 2n, so that causal attention costs all ranks the same.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    group = parallel_state.get_context_parallel_group()
    chunks = gather_from_sequence_parallel_region(mine, group=group).chunk(2 * group.size())
    front, back = chunks[::2], chunks[1::2]
    return torch.cat((*front, *reversed(back)))


# -- checkpoints of the distributed optimizer ------------------------------------------------------


def _complete_optimizer(module: ModuleType) -> None:
    """Let the distributed optimizer load a checkpoint into torch's Adam.

    With the extensions, Adam's step is one number per parameter group. torch's Adam keeps a tensor per
    parameter, and Megatron's code for it (0.16 to 0.19) cannot resume from a checkpoint of its own. It asks
    an optimizer that has not stepped yet for the step, and fails; it gives all parameters one tensor, which
    each of them increments; and it writes the step that the optimizer had before over the one that it has
    loaded. The losses then differ from the second step on.
    """

    def saves(original: Any) -> Any:
        def without_garbage(self: Any, *args: Any, **kwargs: Any) -> Any:
            state = original(self, *args, **kwargs)
            _clear_padding(state)
            return state

        return without_garbage

    def states(original: Any) -> Any:
        def with_state(self: Any) -> Any:
            if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not self.optimizer.state:
                _start(self.optimizer)
            return original(self)

        return with_state

    def loads(original: Any) -> Any:
        @torch.no_grad()  # in fp32 its shards are views of the parameters, which autograd guards
        def with_own_steps(self: Any, loaded: Any) -> None:
            original(self, loaded)
            step = loaded["optimizer"]["param_groups"][0]["step"]
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(float(step), dtype=torch.float32)

        return with_own_steps

    patched.RESHARDABLE.wrap(saves)
    if not module.HAVE_APEX_OR_TE:
        state, load = patched.STATE_DICT
        state.wrap(states)
        load.wrap(loads)


def _with(config: Any, **changed: Any) -> Any:
    """A copy of a configuration, not checked again."""
    config = copy.copy(config)
    vars(config).update(changed)
    return config


def _clear_padding(state: Any) -> None:
    """Zero what a checkpoint holds between the parameters of a bucket, which is memory as it was found.

    Checkpoints of the same training are then the same bit by bit.
    """
    if isinstance(state, dict) and "padding" in state:
        if state["padding"].unwrap():
            for value in state.values():
                if isinstance(getattr(value, "data", None), torch.Tensor):
                    value.data.zero_()
    elif isinstance(state, (dict, list)):
        for part in state.values() if isinstance(state, dict) else state:
            _clear_padding(part)


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter the state that Adam gives it in the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
