"""The Megatron recipe, as a rank that NCCL takes for one of another machine: several can use one GPU."""

import os

import recipes.megatron.pretrain_gpt_core as recipe

if __name__ == "__main__":
    os.environ["NCCL_HOSTID"] = f"ft-gpu-{os.environ['RANK']}"
    recipe.main()
