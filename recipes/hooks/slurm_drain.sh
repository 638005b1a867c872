#!/usr/bin/env bash
# Has Slurm give a machine to no other job, once this one avoids it:
#
#   ftrun --ft-on avoided=recipes/hooks/slurm_drain.sh ...
#
# Whoever runs the job must be an operator of Slurm's (AdminLevel). Unless --ft-notices says none, the state then drains the node
# of this job as well, if there is a spare.
set -euo pipefail

reason=$(python3 -c 'import json, sys; print(" ".join(json.load(sys.stdin)["reason"].split())[:200])')
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# A node is called HOST-NUMBER, or HOST once its processes were killed and it has come back.
rank=${FT_NODE##*-} host=${FT_NODE%-*}
if ! [[ $rank =~ ^[0-9]+$ && ${hosts[10#$rank]:-} == "${host%%.*}" ]]; then
    host=$FT_NODE
fi
host=${host%%.*}
if [[ " ${hosts[*]} " != *" $host "* ]]; then
    echo "no machine of this job's is called $FT_NODE" >&2
    exit 1
fi
exec scontrol update nodename="$host" state=drain reason="ft: $reason"
