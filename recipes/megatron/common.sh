# What the recipes for one machine, Slurm and Kubernetes have in common. Sourced by them, in the repository's root.
# A variable that is set already stays as it is.

# The entry script: Megatron-LM's own pretrain_gpt.py does as well. Its arguments are those of the recipe.
SCRIPT=${SCRIPT:-recipes/megatron/pretrain_gpt.py}

# A lost peer makes torch's NCCL watchdog end the process that notices it (3, torch's default): one failure would become
# one of every worker. The controller hears of failures in another way and aborts the communicators itself.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-0}
# Collectives stay asynchronous: an abort ends them with or without this, and with it every one stops the training thread.
unset TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT NCCL_ASYNC_ERROR_HANDLING
# Megatron wants this for tensor and sequence parallelism: communication is queued in the order of the host's calls.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Where machines have several networks, name the one they share, alike on all nodes and on spares. gloo would otherwise
# listen on the address of the machine's own name, and NCCL on the first interface that it likes.
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# InfiniBand's own time-outs (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT) may stay as they are: nobody waits for them in a recovery.
# torch asks the DNS for names; where it does not answer, it should not take seconds to say so.
export RES_OPTIONS=${RES_OPTIONS:-"timeout:1 attempts:1"}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# Without arguments: a small GPT on made-up samples, to see whether it runs.
if [ $# -eq 0 ]; then
    set -- --ft --mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --split 95,5,0 \
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
        --micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 --log-interval 1 --eval-interval 1000 --eval-iters 0 \
        --use-distributed-optimizer --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    if [ ! -e /dev/nvidiactl ]; then
        set -- "$@" --distributed-backend gloo --use-cpu-initialization --attention-backend unfused \
            --no-masked-softmax-fusion --no-bias-dropout-fusion
    fi
fi
