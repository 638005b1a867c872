"""Until controller and agent are machines: their dicts of old, and the messages that they stand for now."""

from __future__ import annotations

from typing import Any

import msgspec

from ft_core.protocol import messages as m

Old = dict[str, Any]

_UP: dict[str, type[m.Message]] = {
    "holdings": m.Holdings,
    "heartbeat": m.Heartbeat,
    "idle": m.Idle,
    "worker_lost": m.WorkerLost,
    "short": m.NoIdleWorker,
    "restore_failed": m.RestoreFailed,
    "restored": m.Restored,
    "stepped": m.Stepped,
    "reopened": m.Reopened,
    "layout": m.RoleLayout,
    "trained": m.Trained,
    "counts": m.OperationCounts,
    "issued": m.Issued,
    "prepared": m.Prepared,
    "held": m.Held,
    "unprotected": m.Unprotected,
    "suspect": m.Suspect,
    "completed": m.Completed,
    "finished": m.Finished,
    "configure": m.Configure,
    "configured": m.Configured,
    "durable_list": m.DurableNames,
    "durable": m.DurableWritten,
    "durable_failed": m.DurableFailed,
    "state": m.RoleState,
    "leaving": m.Leaving,
    "left": m.Left,
    "plan": m.KeptState,
    "hello": m.AgentHello,
}
_DOWN: dict[str, type[m.Message]] = {
    "plan": m.NodePlan,
    "abort": m.Abort,
    "nodes": m.NodesChanged,
    "kill": m.KillWorker,
    "state": m.DescribeRole,
    "durable": m.ListDurable,
    "beat": m.SendHeartbeat,
    "tell": m.SendState,
    "release": m.Release,
    "counts": m.SendCounts,
    "issued": m.SendIssued,
    "hold": m.Hold,
    "prepare": m.Prepare,
    "withdraw": m.Withdraw,
    "given_up": m.GivenUp,
    "configured": m.UseSettings,
    "answer": m.ConfigureAnswer,
    "shutdown": m.Shutdown,
}
_DOWN_NAMES = {kind: name for name, kind in _DOWN.items()}


def _dict(value: Any) -> Any:
    found = msgspec.to_builtins(value, str_keys=True)
    if isinstance(found, dict):
        found.pop("type", None)
    return found


def _made(old: Old, kind: type[m.Message]) -> m.Message:
    about = {key: value for key, value in old.items() if key != "type"}
    return msgspec.convert(about, kind, str_keys=True)


def _old_plan(state: m.JobState) -> Old:
    found: Old = _dict(state)
    goal = found.pop("goal")
    return {"type": "plan", **found, "futile": [found["futile"], goal]}


def _state(plan: Old) -> m.JobState:
    about = {name: plan[name] for name in m.JobState.__struct_fields__ if name in plan}
    about["futile"], about["goal"] = plan["futile"]
    return msgspec.convert(about, m.JobState, str_keys=True)


# -- the controller's and the agent's side of what an agent says ---------------------------------------


def to_controller(old: Old) -> m.Message:
    """What an agent says."""
    kind = old["type"]
    if kind == "hello":
        holdings = {name: old[name] for name in m.Holdings.__struct_fields__}
        about = {name: old[name] for name in m.AgentHello.__struct_fields__ if name in old}
        said = [to_controller(each) for each in old["said"]]
        hello = msgspec.convert({**about, "holdings": holdings, "said": []}, m.AgentHello, str_keys=True)
        return msgspec.structs.replace(hello, said=said)
    if kind == "plan":
        return m.KeptState(_state(old), msgspec.convert(old["nodes"], dict[str, m.NodeAddress]))
    return _made(old, _UP[kind])


def from_controller(message: m.Message) -> Old:
    """What the agent handles. Of a plan, `worker` is the part that workers are given as it is."""
    if isinstance(message, m.NodePlan):
        state = msgspec.json.decode(message.state, type=m.JobState)
        return {**_old_plan(state), "nodes": _dict(message.nodes), "worker": message.worker}
    if isinstance(message, m.Prepare):
        return {"type": "prepare", **_dict(message), "worker": message.worker}
    return {"type": _DOWN_NAMES[type(message)], **_dict(message)}
