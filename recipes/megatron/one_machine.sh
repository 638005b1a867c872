#!/usr/bin/env bash
# One machine. Without GPUs as if it were several: each node is a process tree of its own, one more stands by, and a node
# that dies is started again. With GPUs it is one node of as many workers, and a worker that dies is replaced where it was.
#
#   recipes/megatron/one_machine.sh [arguments of the script]
#   SCRIPT=~/Megatron-LM/pretrain_gpt.py recipes/megatron/one_machine.sh --ft --num-layers 24 ...
#
# NNODES, NPROC, SPARES and JOB_DIR (default: runs/TIME) may be set. While it runs: ftctl --job-dir JOB_DIR status
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/megatron/common.sh

if [ -e /dev/nvidiactl ]; then
    # All nodes of --standalone use the same GPUs: more than one of them would share them.
    NNODES=${NNODES:-1} NPROC=${NPROC:-gpu} SPARES=${SPARES:-0}
else
    NNODES=${NNODES:-2} NPROC=${NPROC:-1} SPARES=${SPARES:-1}
fi
JOB_DIR=${JOB_DIR:-runs/$(date +%Y%m%d-%H%M%S)-$$}

exec ftrun --standalone --nnodes "$NNODES" --nproc-per-node "$NPROC" --spares "$SPARES" --respawn \
    --job-dir "$JOB_DIR" "$SCRIPT" "$@"
