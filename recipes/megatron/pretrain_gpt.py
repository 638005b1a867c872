"""Pre-train a GPT with Megatron-LM's own training loop: a recipe in the role of upstream's entry script.

It hands `megatron.training.pretrain` a model, datasets and a forward step, and takes Megatron-LM's flags.
Fault tolerance is nowhere in it: that comes with ``ftrun`` in place of ``torchrun``, and ``--ft``.

    python recipes/megatron/prepare_data.py --output-prefix runs/data/stdlib
    ftrun --standalone --nnodes 4 --spares 1 recipes/megatron/pretrain_gpt.py \
        --ft --data-path runs/data/stdlib ...

Runs on megatron-core 0.17 to 0.19, whose wheels hold `megatron.training` (Python 3.12). On a host without a
GPU it trains on the CPU over gloo; tests/megatron_jobs.py has the flags that this takes.
"""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401  (before megatron, which keeps references to torch.cuda)

# isort: on
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

INTEGERS = ["tokens", "labels", "position_ids"]


# -- the model -------------------------------------------------------------------------------------


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """One stage of the model. Megatron calls it once per virtual pipeline stage of this rank."""
    args = get_args()
    print_rank_0("building GPT model ...")
    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


# -- the data --------------------------------------------------------------------------------------


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Training, validation and test data: `--mock-data`, or the indexed files that `--data-path` names."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def reads_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    print_rank_0("> building train, validation and test datasets ...")
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return tuple(BlendedMegatronDatasetBuilder(kind, samples, reads_here, config).build())


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron: call it on every rank


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None
) -> dict[str, Any]:
    """This rank's part of the next micro-batch; the first rank of a tensor-parallel group reads for all.

    Nothing for a stage in the middle of the pipeline, which needs none of it.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    read = next(data_iterator) if data_iterator is not None else {}
    batch = tensor_parallel.broadcast_data(INTEGERS, read, torch.int64)
    batch |= tensor_parallel.broadcast_data(["loss_mask"], read, torch.float32)
    if get_args().create_attention_mask_in_dataloader:
        batch |= tensor_parallel.broadcast_data(["attention_mask"], read, torch.bool)
    # From 0.18 on it must be told that groups of different sizes are not asked for.
    later = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    more = {"is_hybrid_cp": False} if later else {}
    return get_batch_on_this_cp_rank(batch, cp_group=mpu.get_context_parallel_group(), **more)


# -- the step --------------------------------------------------------------------------------------


def loss_func(
    loss_mask: Any, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's summed loss, its number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"the local loss: {rejected.__name__}",
                tolerance=0.0,
                fatal=True,
            )
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through this rank's stage; Megatron calls the returned function on the last one."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, partial(loss_func, batch.get("loss_mask"))


def main() -> None:
    """Hand everything to Megatron, which parses the command line; from 0.18 on it wants that done before."""
    providers = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        pretrain(cfg_container=pretrain_cfg_container_from_args(parse_and_validate_args()), **providers)
    else:
        pretrain(**providers)


if __name__ == "__main__":
    main()
