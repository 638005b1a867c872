"""What of DeepSpeed, and of torch beneath it, is replaced while an engine is protected, and why."""

from __future__ import annotations

from ft_core.patching import declare, declare_each

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"

# -- start-up (hooks) ------------------------------------------------------------------------------

INITIALIZE = declare("deepspeed:initialize", "an engine whose configuration asks for it is protected")
BUILD_SHM_OP = declare(
    "deepspeed.comm.torch:build_shm_op",
    "on CPUs it compiles an all-reduce that goes by the process groups and cannot be repaired",
)
CONNECT_STAGES = declare_each(
    "deepspeed.runtime.pipe.p2p:",
    "send recv",
    "a newcomer's pipeline neighbours do not answer the zero that connects stages",
)

_SEEN = "while a newcomer passes steps: what it computes of them is seen"
EVAL_FRAME = declare("torch._C._dynamo.eval_frame:set_eval_frame", _SEEN)
EVAL_FRAME_IMPORTED = declare_each(
    "torch._dynamo.eval_frame:", "set_eval_frame _maybe_set_eval_frame", _SEEN, optional=True
)

# -- the script's calls (protection) ---------------------------------------------------------------

CALLS = declare_each(_ENGINE, "forward backward step", "a call that a failure interrupts is made again")
BATCHES = declare_each(
    _PIPELINE, "train_batch eval_batch", "a call that a failure interrupts is made again", optional=True
)
REDUCTIONS = declare_each(
    _ENGINE,
    "_flush_coalesced_reduction_zero12 _flush_coalesced_reduction_zero3",
    "a call that a failure interrupts is made again",
    optional=True,
)
SAVES = declare_each(
    _ENGINE,
    "save_checkpoint save_16bit_model save_fp16_model",
    "a save that a failure interrupts is made again as a whole",
    optional=True,
)
TRAINER_SAVES = declare_each(
    "transformers.trainer:Trainer",
    "_save_checkpoint save_model",
    "a save that a failure interrupts is made again as a whole",
)
ACCELERATE_SAVES = declare(
    "accelerate.accelerator:Accelerator.save_state",
    "what a newcomer saves again is there by that name already",
    optional=True,
)
LOAD = declare(
    f"{_ENGINE}.load_checkpoint", "a newcomer's is muted, and one after the first step is made again"
)
RESUMPTION = declare(
    f"{_ENGINE}.save_checkpoint", "it waits for its version's commit, and newcomers may begin with it"
)
BACKWARD = declare("torch.autograd:backward", "`loss.backward()` is made again from the engine's outputs on")
SET_GRADIENTS = declare_each(
    _ZERO3,
    "set_fp32_grad_for_param set_local_grad_for_param update_fp32_grad_for_param_vectorized",
    "a step of which the script has changed the gradients is not made again on its behalf",
    optional=True,
)
SET_GRADIENT = declare(
    "torch.nn:Parameter.set_full_hp_grad",
    "a step of which the script has changed the gradients is not made again on its behalf",
    made_later=True,
)
SET_STATES = declare_each(
    _ZERO3,
    "set_full_hp_param set_local_hp_param",
    "what the script writes to the optimizer's state is not written again on its behalf",
    optional=True,
)
SET_STATE = declare(
    "torch.nn:Parameter.set_full_hp_param",
    "what the script writes to the optimizer's state is not written again on its behalf",
    made_later=True,
)
GIVEN_GRADIENTS = declare(
    f"{_ZERO3}.partition_grads", "which parameters get no gradient in a step's first micro batch is seen"
)
REPORT = declare(f"{_ENGINE}._report_progress", "a step that is done again was logged the first time")
BEGIN_DATA = declare(
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
    "the random state that a loader draws its seed from is noted for a newcomer",
)
BEGIN_DATA_AGAIN = declare(
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._reset",
    "the same for a loader that keeps its processes",
)
_UNREAD = "a newcomer does not load batches of steps that are done, unless its script looks at them"
NEXT_DATA = declare_each("torch.utils.data.dataloader:_SingleProcessDataLoaderIter", "_next_data", _UNREAD)
NEXT_DATA += declare_each("torch.utils.data.dataloader:_MultiProcessingDataLoaderIter", "_next_data", _UNREAD)
NEXT_INDEX = declare("torch.utils.data.dataloader:_BaseDataLoaderIter._next_index", _UNREAD)
TELL_PROCESS = declare("torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._try_put_index", _UNREAD)

# -- Trainer's loop (trainer, data_place) ------------------------------------------------------------

UPDATES = declare(
    "transformers.trainer:Trainer._run_epoch",
    "a newcomer's loop begins where its peers are",
    optional=True,
)
LOAD_RANDOM = declare(
    "transformers.trainer:Trainer._load_rng_state",
    "the random states of a newcomer come from memory",
    optional=True,
)
EVALUATE = declare(
    "transformers.trainer:Trainer._evaluate",
    "what is evaluated before the first step is not evaluated again",
    optional=True,
)
SKIP = declare(
    "transformers.trainer:skip_first_batches",
    "a newcomer's loader comes to where its predecessor's was",
    optional=True,
)
SYNCHRONIZE = declare(
    "accelerate.data_loader:synchronize_rng_states",
    "the generator of a sampler is that of its predecessor",
    optional=True,
)
FETCHER = declare(
    "torch.utils.data.dataloader:_DatasetKind.create_fetcher",
    "random states before a batch is read are noted for a newcomer",
)

# -- what is made of steps that are passed over (made_up) ---------------------------------------------

READS = declare_each(
    "torch:Tensor",
    "item __float__ __bool__ __int__ __index__ numpy __array__ tolist __repr__ __reduce_ex__",
    "while a newcomer passes steps: what it makes of outputs that have no content is not a number",
)

# -- the step (boundary) ---------------------------------------------------------------------------

EXCHANGE_WHOLE = declare(
    f"{_ENGINE}.buffered_allreduce_fallback", "the commit wait stands before an exchange of whole gradients"
)
STEP = declare("torch.optim:Optimizer.step", "the commit wait stands before ZeRO's reduction of the norm")
INSTRUCTIONS = declare(
    f"{_PIPELINE}._INSTRUCTION_MAP", "a failure may be injected in the backward pass of a pipeline"
)

# -- groups that are away (exchange, dealing, checkpoints) -------------------------------------------

SLOWED_STEP = declare("torch.optim:Optimizer.step", "the learning rate goes by the groups that train")
WHOLE_GRADIENTS = declare(
    f"{_ENGINE}._get_gradients_for_reduction", "gradients are averaged over the groups that have trained"
)
BUCKETED_GRADIENTS = declare_each(
    _ZERO12,
    "reduce_independent_p_g_buckets_and_remove_grads",
    "gradients are averaged over the groups that have trained",
) + declare_each(
    _ZERO3,
    "reduce_independent_p_g_buckets_and_remove_grads",
    "gradients are averaged over the groups that have trained",
)
AVERAGES = declare_each(
    _PIPELINE,
    "_aggregate_total_loss _reduce_outputs",
    "a pipeline's mean loss is that of the groups that are there",
    optional=True,
)
CLIP = declare(
    f"{_ENGINE}.clip_fp32_gradients", "the norm is averaged over the groups that are there", optional=True
)
NORM_COMM = declare("deepspeed.runtime.utils:dist", "the norm is averaged over the groups that are there")
DRAW = declare("torch.utils.data:BatchSampler.__iter__", "samples are dealt to the groups that are there")
DRAW_AHEAD = declare(
    "torch.utils.data:DataLoader.__iter__",
    "no other process reads samples before it is known which groups will be there",
)
WHOLE_SAVES = declare_each(
    _ENGINE, "save_checkpoint save_16bit_model", "a checkpoint says which samples wait, and another writes it"
)
SAVING_COMM = declare("deepspeed.runtime.engine:dist", "who is there writes what an absent peer would")

# -- shards that are adopted (adoption, adoption3, fragments) ---------------------------------------------

ADOPTED_FILES = declare(f"{_ENGINE}._save_zero_checkpoint", "checkpoints get the files of adopted partitions")
ADOPTING_OPTIMIZER = declare(
    f"{_ZERO12}.__class__", "what a rank does for its own partition is done for adopted ones"
)
PARTITION_COMM = declare(
    "deepspeed.runtime.zero.stage_1_and_2:dist", "reductions count what adopted partitions give"
)
PARTITION_GATHER = declare(
    "deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups", "a partition that is adopted gathers nothing"
)
FRAGMENT_COMM = declare(
    "deepspeed.utils.tensor_fragment:dist", "optimizer state by parameter is gathered from adopted partitions"
)
FRAGMENT_GETTERS = declare_each(
    "torch.nn:Parameter",
    "get_full_hp_param get_full_hp_grad",
    "optimizer state by parameter is gathered from adopted partitions",
    made_later=True,
)
FRAGMENT_SETTERS = declare_each(
    "torch.nn:Parameter",
    "set_full_hp_param set_full_hp_grad",
    "optimizer state by parameter is set in adopted partitions",
    made_later=True,
)
FOR_EACH_ROLE = declare_each(
    _ZERO3,
    "independent_gradient_partition_epilogue _prepare_sub_group unscale_and_clip_grads _optimizer_step "
    "_reassign_or_swap_out_partitioned_parameters _release_sub_group set_fp32_grad_for_param "
    "set_full_hp_param",
    "what a rank does for its own slices is done for adopted ones",
)
OVER_ALL_ROLES = declare_each(
    _ZERO3,
    "_get_norm_groups has_overflow get_fp32_grad_for_param get_full_hp_param",
    "reductions count what adopted slices give",
)
FILES_OF_EACH_ROLE = declare_each(
    _ENGINE, "_save_checkpoint _save_zero_checkpoint", "checkpoints get the files of adopted slices"
)
PARTITION_GRADIENTS = declare(f"{_ZERO3}.partition_grads", "gradients of adopted slices are kept, too")
VECTORIZED_UPDATE = declare(
    f"{_ZERO3}.update_fp32_grad_for_param_vectorized", "it does not see adopted slices, and is refused"
)
REDUCE_SCATTER = declare(
    "deepspeed.runtime.zero.stage3:reduce_scatter_coalesced", "gradients of adopted slices are kept, too"
)
GATHER_PARAMETER = declare(
    "torch.nn:Parameter.all_gather", "weights are gathered with the slices adopted here", made_later=True
)
GATHER_PARAMETERS = declare(
    "torch.nn:Parameter.all_gather_coalesced",
    "weights are gathered with the slices adopted here",
    made_later=True,
)
COMPARISONS = declare_each(
    "deepspeed.runtime.zero.utils:",
    "assert_lst_len_same_as_other_ranks get_lst_from_rank0",
    "who stands in for rank 0 compares the order of modules with itself",
    optional=True,
)
SLICE_COMMS = (
    declare("deepspeed.runtime.zero.stage3:dist", "an adopted slice is played without communication"),
    declare("deepspeed.runtime.engine:dist", "an adopted slice is played without communication"),
)
SLICE_REDUCTION_COMM = declare("deepspeed.runtime.zero.stage3:dist", "reductions count adopted slices")
GATHERING_COMM = declare(
    "deepspeed.runtime.zero.partition_parameters:dist", "weights are gathered with the slices adopted here"
)
COMPARING_COMM = declare(
    "deepspeed.runtime.zero.utils:dist", "who stands in for rank 0 compares the order of modules with itself"
)
