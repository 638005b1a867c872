#!/usr/bin/env bash
# One node of slurm.sbatch: node.sh, and a look now and then whether the first node is still there.
#
# Slurm lets a job go on (--no-kill) though the node is lost that its batch script runs on, with srun and the controller: all
# others would wait for these until the time is up. So whoever finds that Slurm has taken the first node out of the job, which it
# does SlurmdTimeout after it has lost it, puts the job back into the queue. The nodes ask at different intervals, so that slurmctld
# hears little of a large job.
set -euo pipefail

look() {
    local job first nodes code
    # Until the end of its input: when node.sh and ftrun have ended.
    while code=0 && { read -r -t $((30 * SLURM_PROCID)) || code=$?; } && [ "$code" -gt 128 ]; do
        job=$(squeue --noheader --states=RUNNING --jobs="$SLURM_JOB_ID" --format='%B %N') || continue # slurmctld is away
        read -r first nodes <<< "$job"
        if [ -n "$nodes" ] && ! scontrol show hostnames "$nodes" | grep -qxF "$first"; then
            scontrol requeue "$SLURM_JOB_ID" || true # srun is gone: nobody reads what is said here
        fi
    done
}

if [ "$SLURM_PROCID" -ne 0 ]; then
    exec 3> >(look)
fi
exec "$(dirname "${BASH_SOURCE[0]}")/node.sh" "$@"
