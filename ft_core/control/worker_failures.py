"""What it means for the job that a worker has ended, or does without fault tolerance."""

from __future__ import annotations

from ft_core.control.cluster.node import Node
from ft_core.control.decide.ladder import EscalationCause
from ft_core.control.liveness import strikes
from ft_core.control.observe import explain
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.script_ends import ScriptEnds
from ft_core.protocol import messages as m


class WorkerFailures:
    """The workers that one controller has lost."""

    def __init__(self, recovery: RecoveryCoordinator, scripts: ScriptEnds) -> None:
        self._recovery, self._scripts = recovery, scripts
        self._cluster, self._out = recovery.cluster, recovery.out
        self._lost: dict[int, tuple[str, int]] = {}
        """Role -> node and pid of the worker that was lost last."""

    def on_worker_lost(self, node: Node, lost: m.WorkerLost) -> None:
        """A worker with a role has ended, for whatever reason."""
        cluster, recovery, role = self._cluster, self._recovery, lost.role
        if self._lost.get(role) == (node.name, lost.pid):
            return  # it is said again
        self._lost[role] = node.name, lost.pid
        where = f"worker {lost.pid} of role {role} on {node.name}: {lost.exit}"
        same_again = cluster.strikes.again(lost)
        starts_ahead = recovery.prestart.concerns(role, node.name)
        cluster.versions.seen([lost.step])
        if lost.fault is m.Fault.TERMINATED and recovery.is_being_replaced(role):
            if starts_ahead:
                self._out.emit(*recovery.prestart.fail(cluster, where))
            else:
                cluster.worker_died(node, role)
            recovery.reconsider()
            return
        if lost.fault is m.Fault.TERMINATED and role in recovery.completion.finished:
            return  # its script was done, and nothing is wanted of it
        if not starts_ahead and cluster.places.get(role, node.name) != node.name:
            cluster.worker_died(node, role)
            return  # it was started ahead of need, by an attempt that is over: who has the role trains on
        recovery.strike(strikes.of_worker(lost, node.name, cluster.versions.trained), node.hello.domain)
        if starts_ahead:
            self._out.emit(*recovery.prestart.fail(cluster, where))
            return
        cluster.worker_died(node, role)
        on_its_own = bool(recovery.protection.unprotected) or recovery.completion.released
        if lost.fault is m.Fault.LEFT and (cluster.versions.initial is None or on_its_own):
            self._scripts.on_left(role, where)
        elif lost.fault is m.Fault.LEFT:
            why = f"{where}, in the middle of training (os._exit?): the others would wait for it"
            recovery.escalate(EscalationCause(why, (role,), fault=lost.fault, node=node.name))
        elif lost.code > 0 and on_its_own:
            self._script_failed(lost, where, node.name)
        elif why := strikes.not_in_place(lost, cluster.versions.trained, same_again):
            self._script_failed(lost, f"{where}; {why}", node.name)
        elif cluster.settings.max_restarts and cluster.strikes.alike(lost):
            self._script_failed(lost, f"{where}; its start has failed of the same before", node.name)
        else:
            recovery.fail(where, [role], strikes.exit_code(lost), fault=lost.fault, node=node.name)

    def _script_failed(self, lost: m.WorkerLost, where: str, node: m.NodeName) -> None:
        """The script would fail of it again. Should the job end of it, then with the script's exit code."""
        short, code = explain.script_error(lost, self._cluster.job_dir), strikes.exit_code(lost)
        cause = EscalationCause(
            where,
            (lost.role,),
            code,
            lost.fault,
            node,
            traceback=f"\n{lost.traceback}",
            short=f"\n{short}",
        )
        if lost.fault in strikes.FINAL:
            self._recovery.end_job(code, cause.recorded, cause.said)
        else:
            self._recovery.escalate(cause)

    def on_unprotected(self, said: m.Unprotected) -> None:
        """A script does without fault tolerance, has until now, or does so from now on."""
        recovery = self._recovery
        if recovery.is_being_replaced(said.role):
            return
        recovery.protection.on_unprotected(said, trained=self._cluster.versions.initial is not None)
        why = recovery.protection.unprotected
        if why and recovery.escalation is None and recovery.recovering:
            # It had done so before it heard that the epoch is over, and takes part in no other.
            recovery.escalate(EscalationCause(f"the job is not protected: {why}"))
