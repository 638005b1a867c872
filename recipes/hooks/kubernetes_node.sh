#!/usr/bin/env bash
# Has Kubernetes give a machine to no other pod, or says what is known of it in a condition, once a job avoids it:
#
#   ftrun --ft-on 'avoided=recipes/hooks/kubernetes_node.sh cordon' ...
#   ftrun --ft-on 'avoided=recipes/hooks/kubernetes_node.sh condition' ...
#
# The image needs kubectl, the pod automountServiceAccountToken, and its account a ClusterRole: `list` of pods, and `get` and `patch` of
# nodes, or for a condition of nodes/status.
set -euo pipefail

# A node is called by its pod's host name, with its number behind it where it has been there from the beginning. Of pods that
# had that name the newest counts.
nodes=
for host in "${FT_NODE%-*}" "$FT_NODE"; do
    found="{.items[?(@.spec.hostname==\"$host\")].spec.nodeName}"
    nodes=$(kubectl get pods --sort-by=.metadata.creationTimestamp --output=jsonpath="$found")
    if [ -n "$nodes" ]; then break; fi
done
node=${nodes##* }
if [ -z "$node" ]; then
    echo "no pod has the host name of $FT_NODE" >&2
    exit 1
fi
if [ "${1:?cordon or condition}" = cordon ]; then
    exec kubectl cordon "$node"
fi
patch=$(python3 -c '
import json, sys, time
now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
said = {"type": "TrainingAvoids", "status": "True", "reason": "FailedTooOften", "message": json.load(sys.stdin)["reason"]}
print(json.dumps({"status": {"conditions": [said | {"lastHeartbeatTime": now, "lastTransitionTime": now}]}}))')
exec kubectl patch node "$node" --subresource=status --type=strategic --patch="$patch"
