"""What of Megatron is replaced in a job that asks for `--ft`, and why; and what on a host without a GPU."""

from __future__ import annotations

from ft_core.patching import declare, declare_each

_TRAINING = "megatron.training.training:"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_OPTIMIZER = "megatron.core.optimizer.optimizer:MegatronOptimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

# -- Megatron-LM's arguments and loop (hooks, pretrain, progress_log, replica_groups) ------------------------

ADD_ARGUMENTS = declare("megatron.training.arguments:add_megatron_arguments", "the parser takes our flags")
HELP = declare(
    "megatron.training.arguments:add_megatron_arguments", "a bare % in a flag's help ends --help in an error"
)
SET_ARGS = declare(
    "megatron.training.global_vars:set_args", "arguments are checked when all are known, flags or YAML alike"
)
BUILD_DATA = declare(
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
    "until training begins: the time line tells when it is made",
)
LOOP = declare_each(
    _TRAINING,
    "load_checkpoint train train_step training_log evaluate evaluate_and_print_results "
    "save_checkpoint_and_time save_checkpoint checkpoint_and_decide_exit write_args_to_tensorboard",
    "the loop is entered again after a recovery, and what was done before is not done twice",
)
LENGTHS = declare(
    f"{_TRAINING}consume_seqlen_stats_in_iteration",
    "what a step has found of packed sequences is known where it was not done",
    optional=True,
)
STRAGGLERS = declare(
    "megatron.core.utils:StragglerDetector.report", "it divides by what was measured, which may be nothing"
)
LOADERS = declare(f"{_TRAINING}build_pretraining_data_loader", "loaders can go back to where a step began")
FINALIZE = declare(f"{_TRAINING}finalize_model_grads", "the commit wait may stand before it")
PRINT = declare(f"{_TRAINING}print_rank_last", "each iteration is printed once, whoever does it")
WRITERS = declare_each(
    _TRAINING,
    "get_tensorboard_writer get_wandb_writer",
    "each iteration is written once, whoever does it",
)
IS_LAST = declare("megatron.training.utils:is_last_rank", "the last rank that is there writes the log")
ADD_SCALAR = declare(
    "torch.utils.tensorboard:SummaryWriter.add_scalar",
    "a line that a failure interrupts between its values is written once",
)
SCHEDULE = declare(
    "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step",
    "a schedule by samples counts those that were trained",
)

# -- the step (optimizer_hooks, exchange) --------------------------------------------------------------

STEP = declare(f"{_OPTIMIZER}.step", "the commit wait stands before the reduction of the gradients' norm")
STEP_WITH_READY_GRADS = declare(
    f"{_OPTIMIZER}.step_with_ready_grads", "the step tag says that the state changes from here on"
)
GATHER = declare(f"{_BUCKETS}.start_param_sync", "a failure may be injected before parameters are gathered")
GRADIENTS = declare(f"{_BUCKETS}.start_grad_sync", "gradients are averaged over the groups that have trained")

# -- shards that are adopted (adoption) ----------------------------------------------------------------

MADE = declare(f"{_DISTRIBUTED}.__init__", "it forgets parameters that have no part in its own shard")
DONE_FOR_ALL = declare_each(
    _DISTRIBUTED,
    "_copy_model_grads_to_main_grads _copy_main_params_to_model_params zero_grad",
    "what a rank does for its own shard is done for adopted ones",
)
LISTED_FOR_ALL = declare_each(
    _DISTRIBUTED,
    "get_parameters _collect_main_grad_data_for_unscaling",
    "norm, overflow and clipping see adopted shards",
)
INNER_STEP = declare("torch.optim:Optimizer.step", "adopted shards are stepped beside this rank's own")

# -- a host without a GPU (cpu_megatron; what stands for all of torch.cuda is in cpu_shadow) ---------------

_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_WRITER = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller"

HELPERS = declare(
    "megatron.core.datasets.utils:compile_helpers",
    "without a GPU: the wheel's compiled helper is used, for which there is no Makefile",
)
RESULTS_QUEUE = declare(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
    "without a GPU: the process that gathers what writers say is forked",
    optional=True,
)
WRITER = declare_each(
    _WRITER,
    "_get_process async_loop",
    "without a GPU: the process that writes asynchronous checkpoints is forked",
    optional=True,
)
SPLIT_SIZES = declare(
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    "without a GPU: split sizes become numbers, as on their way from one",
)
NORM = declare(
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    "without a GPU: torch's norms serve sequence parallelism",
)
ATTENTION = declare_each(
    _ATTENTION, "__init__ forward", "without a GPU: local attention serves context parallelism"
)
RESHARDABLE = declare(
    f"{_DISTRIBUTED}.sharded_param_state_dp_reshardable",
    "without a GPU: padding in checkpoints is zero, so that equal runs save equal bits",
    optional=True,
)
STATE_DICT = declare_each(
    _DISTRIBUTED, "state_dict load_state_dict", "without a GPU: checkpoints of torch's Adam can be loaded"
)
