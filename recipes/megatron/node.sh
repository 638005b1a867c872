#!/usr/bin/env bash
# One node of a job on several machines, from its beginning to the job's end. slurm.sbatch and kubernetes.yaml start it on
# every node, with the script's arguments; by hand it does as well:
#
#   HEAD=node0:29400 NNODES=4 NODE_RANK=2 JOB_DIR=/local/job FT_JOB_SECRET=... recipes/megatron/node.sh [arguments]
#
#   HEAD           HOST:PORT of the controller, which node 0 starts; the port must be free there, and both TCP and UDP
#                  get through to it
#   NNODES         nodes that train; those with a number of NNODES and more stand by
#   NODE_RANK      this node's number (default: Slurm's, or the index that Kubernetes gives to a pod)
#   NPROC          workers per node (default: one per GPU; where there is none, 1)
#   JOB_DIR        this node makes a directory in it; may be local, or shared with the others
#   FT_JOB_SECRET  the same on all nodes
#   RDZV_ID        the job's id, if node 0 may come back on another machine, and there is to go on with it; of no two jobs
#                  the same (default: drawn)
#
# If the node's processes are killed and the machine lives, it joins the job again, as a spare; not if it is about to go. The exit code is the job's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/megatron/common.sh

: "${HEAD:?HOST:PORT of the controller}" "${NNODES:?nodes that train}" "${JOB_DIR:?}" "${FT_JOB_SECRET:?}"
rank=${NODE_RANK:-${SLURM_PROCID:-${JOB_COMPLETION_INDEX:?NODE_RANK, the number of this node}}}
if [ -z "${NPROC:-}" ]; then
    if [ -e /dev/nvidiactl ]; then NPROC=gpu; else NPROC=1; fi
fi
flags=(--nnodes "$NNODES" --nproc-per-node "$NPROC" ${FT_FLAGS:-})

# A pod's name may be known some seconds after the pod: until then nobody can start.
head=${HEAD%:*} && head=${head#[} && head=${head%]} # [ADDRESS]:PORT, if it is IPv6
until getent ahosts "$head" > /dev/null; do sleep 1; done

stopping=
trap 'stopping=1; kill -TERM "${child:-$$}" 2> /dev/null || true' TERM INT
code=
run() {
    "$@" &
    child=$!
    code=0
    wait "$child" || code=$?
    if [ -n "$stopping" ]; then # the signal ended the wait, and ftrun is about to end
        code=0
        wait "$child" || code=$?
    fi
}

ftrun_as() { # $1: directory; then how this node takes part
    local directory=$1
    shift
    mkdir -p "$directory"
    run ftrun "${flags[@]}" "$@" --job-dir "$directory" "$SCRIPT" "${arguments[@]}"
}
arguments=("$@")

ftrun_as "$JOB_DIR/$rank" --node-rank "$rank" --rdzv-endpoint "$HEAD" ${RDZV_ID:+--rdzv-id "$RDZV_ID"}
again=0
# The codes of a node whose processes were killed; all others are the job's, and would come again; 143: it was told to go.
killed() { { [ "$code" -gt 128 ] && [ "$code" -ne 143 ]; } || [[ " 6 7 9 11 " == *" $code "* ]]; }
while killed && [ -z "$stopping" ]; do
    again=$((again + 1))
    echo "node $rank: killed ($code); it comes back, for the ${again}. time" >&2
    if [ "$rank" -eq 0 ]; then # with it a controller, to which the others' agents connect again
        id=$(cat "$JOB_DIR/$rank/id" 2> /dev/null || true) # of the job that they are of
        ftrun_as "$JOB_DIR/$rank.$again" --node-rank 0 --rdzv-endpoint "$HEAD" ${id:+--rdzv-id "$id"}
    else
        timeout 600 bash -c 'until ftctl --controller "$HEAD" status > /dev/null 2>&1; do sleep 2; done' || break
        ftrun_as "$JOB_DIR/$rank.$again" --join "$HEAD"
    fi
done
if [ "$rank" -eq 0 ]; then
    echo "$code" > "$JOB_DIR/exit-code"
fi
exit "$code"
