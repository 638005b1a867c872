"""What schedulers say of this machine: Slurm of its node's state, Kubernetes of the pod and its node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ft_core.node.notices.daemon import aside, printed
from ft_core.node.notices.http import Server, ask
from ft_core.node.notices.notice import Notice, moment, plain

_DRAINS = frozenset(("DRAIN", "DRAINING", "FAIL", "FAILING", "POWERING_DOWN", "REBOOT_REQUESTED"))
"""Parts of a state that say that Slurm wants the node back."""
_LEAVE = (
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "node.kubernetes.io/out-of-service",
)
"""Taints by which those who remove nodes announce it, whatever their effect. `unschedulable` is not among
these: nodes are cordoned for jobs to end there in peace."""
_SICK = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of a kubelet that is not heard: whether this node lives, the controller knows better."""


class Slurm:
    """The state of this machine's node, as `scontrol` has it."""

    def __init__(self, node: str, every: float) -> None:
        self._command, self.every = ("scontrol", "show", "node", node), every

    async def look(self) -> list[Notice]:
        return slurm_notices(await aside(lambda: printed(self._command, {**os.environ, "LC_ALL": "C"})))

    async def agree(self) -> None:
        """Slurm sees that nothing of the job runs there any more."""


def slurm_notices(text: str) -> list[Notice]:
    """What `scontrol show node` has printed. Raises ValueError."""
    if (state := re.search(r"\bState=([A-Z_]+\*?(?:\+[A-Z_]+)*)", text)) is None:
        raise ValueError(f"no State in {plain(text)[:80]!r}")
    if _DRAINS.isdisjoint(re.split(r"[*+]+", state[1])):
        return []
    why = re.search(r"^\s*Reason=(.*?)\s*(?:\[[^\]]*\])?$", text, re.MULTILINE)
    return [Notice(f"Slurm, node state {state[1]}{': ' + plain(why[1]) if why else ''}")]


class Kubernetes:
    """The deletion of this pod, and the taints of its node, by the service account of the pod: `get` of pods
    in its namespace, and of nodes; where it may not read nodes, of the pod alone."""

    def __init__(
        self,
        server: Server,
        headers: Callable[[], Mapping[str, str]],
        namespace: str,
        pod: str,
        every: float,
    ) -> None:
        """`headers`: by which the API server knows who asks, read anew each time as tokens are replaced."""
        self._server, self._headers, self.every = server, headers, every
        self._pod = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        self._reads_nodes = True

    async def look(self) -> list[Notice]:
        pod = await self._get(self._pod)
        if pod is None:
            raise ConnectionError(f"{self._pod}: may not be read, or is not there")
        found = pod_notices(pod)
        node = _dict(pod, "spec").get("nodeName")
        if self._reads_nodes and isinstance(node, str) and node:
            about = await self._get(f"/api/v1/nodes/{node}")
            self._reads_nodes = about is not None
            found += node_notices(about, pod) if about is not None else []
        return found

    async def agree(self) -> None:
        """The pod's end says it."""

    async def _get(self, path: str) -> dict[str, Any] | None:
        headers = {"Accept": "application/json", **(await aside(self._headers))}
        answer = await ask(self._server, "GET", path, headers)
        if answer.status in (403, 404):
            return None
        if answer.status != 200:
            raise ConnectionError(f"{path}: status {answer.status}")
        return answer.object()


def pod_notices(pod: dict[str, Any]) -> list[Notice]:
    """Whether it is being deleted: the time stamp is when its grace ends. Raises ValueError."""
    stamp = _dict(pod, "metadata").get("deletionTimestamp")
    return [Notice("Kubernetes, the pod is being deleted", moment(str(stamp)))] if stamp else []


def node_notices(node: dict[str, Any], pod: dict[str, Any]) -> list[Notice]:
    """Taints that announce the end of the node, or evict this pod. Raises ValueError."""
    tolerations = [each for each in _list(_dict(pod, "spec"), "tolerations") if isinstance(each, dict)]
    found = []
    for taint in _list(_dict(node, "spec"), "taints"):
        if not isinstance(taint, dict) or not isinstance(key := taint.get("key"), str):
            raise ValueError(f"no taint: {str(taint)[:80]}")
        evicts = taint.get("effect") == "NoExecute" and not any(_tolerates(t, taint) for t in tolerations)
        if key.startswith(_LEAVE) or (evicts and key not in _SICK):
            found.append(Notice(f"Kubernetes, taint {plain(key)} of the node"))
    return found


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    """Whether the pod may stay for ever."""
    if toleration.get("tolerationSeconds") is not None:
        return False
    key, effect = toleration.get("key") or "", toleration.get("effect") or ""
    if key not in ("", taint["key"]) or effect not in ("", taint.get("effect")):
        return False
    exists = toleration.get("operator") == "Exists"
    return exists or (bool(key) and (toleration.get("value") or "") == (taint.get("value") or ""))


def _dict(found: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(part := found.get(name), dict):
        raise ValueError(f"no {name} in {str(found)[:80]}")
    return part


def _list(found: dict[str, Any], name: str) -> list[Any]:
    """Empty where there is none."""
    if not isinstance(part := found.get(name) or [], list):
        raise ValueError(f"no list of {name} in {str(found)[:80]}")
    return part
