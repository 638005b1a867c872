"""Faults: what may happen to a job, when, and how often."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ft_core.control.events import Received
from ft_core.protocol import messages as m

from .arbiter import MACHINE
from .errors import Stray
from .job import SHORT, SimJob
from .node import SimNode

MOMENTS = tuple(
    kind.__name__
    for kind in (
        *(m.AgentHello, m.HoldingsChanged, m.Heartbeat, m.Restored, m.Stepped, m.RoleLayout, m.Prepared),
        *(m.PausedAtStep, m.Completed, m.Finished, m.WorkerLost, m.SharedPlan, m.Abort, m.Release),
        *(m.Prepare, m.Withdraw, m.SendState, m.KeptState, m.PauseAfterStep, m.SendCounts),
        m.OperationCounts,
    )
)
"""Messages whose sending is a moment for a fault."""

NOBODY = -1
"""The connection of somebody who does not wait for the answer."""

Fault = Callable[[SimJob, Random], None]


def kill_worker(job: SimJob, rng: Random) -> None:
    """One, or several at once."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        workers = [w for node in job.live() for w in node.workers.values() if w.alive]
        if workers:
            worker = rng.choice(workers)
            worker.node.end_worker(worker, -11)


def hang_worker(job: SimJob, rng: Random) -> None:
    """Its main thread stops for good within a step. Elsewhere only a detector of hangs would find that."""
    workers = [w for node in job.live() for w in node.workers.values() if w.alive and w.trains]
    if workers:
        worker = rng.choice(workers)
        job.world.trace(f"{worker.name} hangs")
        worker.hung = True

        def another() -> None:
            """Nobody notices, before another worker is lost: then it does not leave its step."""
            known = job.controller.machine.cluster.nodes
            there = [w for node in job.live() if node.name in known for w in node.workers.values()]
            playing = (w for w in there if w.alive and w.plays and w is not worker)
            others = [w for w in playing if w.role in worker.members]
            if not job.over:
                other = others[0] if others else worker
                other.node.end_worker(other, -9)

        at = rng.choice((0.5, 3.0))
        job.world.at(at, another)
        if rng.random() < 0.3:  # and the node greets again before its worker is killed
            job.world.at(at + 1.0, lambda: _break(job, worker.node, rng))


def stop_worker(job: SimJob, rng: Random) -> None:
    """For a while."""
    workers = [w for node in job.live() for w in node.workers.values() if w.alive]
    if workers:
        worker = rng.choice(workers)
        job.world.trace(f"{worker.name} is stopped")
        worker.stop()
        job.world.at(rng.choice((0.2, 1.0, 4.0)), worker.go_on)


def kill_node(job: SimJob, rng: Random) -> None:
    """A machine is lost, with all its memory; another comes, or not."""
    _kill(job, rng, some(job, rng))


def _kill(job: SimJob, rng: Random, node: SimNode | None) -> None:
    if node is not None:
        node.vanished = rng.random() < 0.5
        node.kill()
        job.machine_ends(node)
        if rng.random() < 0.4:
            job.world.at(rng.random() * 8, job.join)


def stop_node(job: SimJob, rng: Random) -> None:
    """A virtual machine stalls."""
    if node := some(job, rng):
        _stall(job, rng, node, alone=rng.random() < 0.3)


def _stall(job: SimJob, rng: Random, node: SimNode, alone: bool) -> None:
    seconds = rng.choice((0.3, 1.0, 1.9, 3.0, 4.0, 5.0, 12.0))
    job.world.trace(f"{'the agent of ' if alone else ''}{node.name} stalls for {seconds} s")
    node.stall(seconds, alone)


def stop_everything(job: SimJob, rng: Random) -> None:
    """The machine that all of it runs on stalls: some of it goes on earlier than the rest."""
    seconds = rng.choice((0.3, 1.0, 1.9, 3.0, 8.0))
    job.world.trace(f"everything stalls for {seconds} s")
    for node in job.live():
        node.stall(seconds - 0.2 * rng.random())
    controller = job.controller
    controller.stop()
    job.world.at(seconds - 0.2 * rng.random(), controller.go_on)


def break_connection(job: SimJob, rng: Random) -> None:
    """Of a node to the controller."""
    if node := some(job, rng):
        _break(job, node, rng)


def _break(job: SimJob, node: SimNode, rng: Random) -> None:
    if node.link is not None:
        job.world.trace(f"the connection of {node.name} breaks")
        node.troubled(SHORT)
        node.link.break_(rng.random())


def lose_relay(job: SimJob, rng: Random) -> None:
    """Who speaks for some of the nodes is lost, perhaps with its node: they notice; that they have no
    connection the controller does not know."""
    nodes = job.live()
    relay = rng.choice(nodes) if nodes and rng.random() < 0.5 else None
    behind = [node for node in nodes if node is not relay and node.link is not None]
    for node in rng.sample(behind, rng.randint(min(1, len(behind)), len(behind))):
        job.world.trace(f"who speaks for {node.name} is lost")
        node.troubled(SHORT)
        assert node.link is not None
        node.link.break_(rng.random(), late=job.settings.silence_limit)
    _kill(job, rng, relay)


def cut(job: SimJob, rng: Random) -> None:
    """A node's network lets nothing through."""
    if node := some(job, rng):
        name, seconds = node.machine_name, rng.choice((0.3, 2.0, 6.0, 15.0))
        job.world.trace(f"{node.name} is cut off for {seconds} s")
        job.network.cut.add(name)
        for each in job.live():
            each.troubled(seconds)

        def heal() -> None:
            job.network.cut.discard(name)
            for each in job.live():
                each.troubled(0.0)

        job.world.at(seconds, heal)


def sever(job: SimJob, rng: Random) -> None:
    """Nothing gets through between a node and the controller, one way or both; others reach the two."""
    if node := some(job, rng):
        name, seconds = node.machine_name, rng.choice((0.5, 3.0, 6.0, 15.0))
        there = job.controller.machine_name
        ways = rng.choice(([(name, there)], [(there, name)], [(name, there), (there, name)]))
        job.world.trace(f"nothing gets through on {ways} for {seconds} s")
        job.network.severed |= set(ways)

        def heal() -> None:
            job.network.severed -= set(ways)
            for each in job.live():
                if each.machine_name in (name, there):  # which may be a node's as well
                    each.troubled(seconds)

        job.world.at(seconds, heal)


def sever_nodes(job: SimJob, rng: Random) -> None:
    """Nothing gets through between two nodes, one way or both; all else is well."""
    machines = sorted({node.machine_name for node in job.live()})
    if len(machines) < 2:
        return
    one, other = rng.sample(machines, 2)
    ways = rng.choice(([(one, other)], [(one, other), (other, one)]))
    seconds = rng.choice((1.0, 4.0, 30.0, 1000.0))
    job.world.trace(f"nothing gets through on {ways} for {seconds} s")
    job.network.severed |= set(ways)

    def heal() -> None:
        job.network.severed -= set(ways)
        job.network.mended |= dict.fromkeys(ways, job.world.now)
        for each in job.live():
            if job.arbiter is not None and each.machine_name in (one, other):
                each.troubled(seconds)  # one of them may be the leader's

    job.world.at(seconds, heal)


def kill_controller(job: SimJob, rng: Random) -> None:
    """`ftrun` starts another."""
    if job.controller.alive and job.controller.code is None:
        job.world.trace(f"{job.controller.name} is killed")
        job.restart_controller()


def stop_controller(job: SimJob, rng: Random) -> None:
    """For a while."""
    job.stop_for_a_while(job.controller, rng)


def leader_stops_in_the_act(job: SimJob, rng: Random) -> None:
    """For a while, between what it decides next and saying so."""
    job.controller.acts_late = True


def kill_leaders_machine(job: SimJob, rng: Random) -> None:
    """With all that it has of the job."""
    _kill(job, rng, _beside(job))


def stop_leaders_machine(job: SimJob, rng: Random) -> None:
    """It stalls."""
    if (node := _beside(job)) is not None:
        _stall(job, rng, node, alone=False)


def _beside(job: SimJob) -> SimNode | None:
    """The node on the leader's machine."""
    return next((node for node in job.live() if node.machine_name == job.controller.machine_name), None)


def leader_cut_off(job: SimJob, rng: Random) -> None:
    """From whoever keeps its lease."""
    _cut_off(job, rng, job.controller.machine_name)


def node_cut_off(job: SimJob, rng: Random) -> None:
    """From whoever keeps the lease."""
    if node := some(job, rng):
        _cut_off(job, rng, node.machine_name)


def _cut_off(job: SimJob, rng: Random, name: str) -> None:
    way = name, MACHINE
    job.world.trace(f"nothing gets through on {way}")
    job.network.severed.add(way)

    def heal() -> None:
        job.network.severed.discard(way)
        for node in job.live():
            if node.machine_name == name:
                node.troubled(SHORT)  # it may have found no leader meanwhile

    _until(job, rng, heal)


def arbiter_down(job: SimJob, rng: Random) -> None:
    """Nobody is told who leads."""

    def heal() -> None:
        assert job.arbiter is not None
        job.arbiter.down = False

    assert job.arbiter is not None
    job.world.trace("nobody keeps the lease")
    job.arbiter.down = True
    _until(job, rng, heal)


def leader_has_a_bad_clock(job: SimJob, rng: Random) -> None:
    """It does not notice that its lease runs out; and is cut off from whoever keeps it, as a rule, perhaps
    with others."""
    leader = job.controller
    job.world.trace(f"the clock of {leader.name} stands still")
    leader.wild = True
    leader.runs_at(0.0)
    if rng.random() < 0.8:
        leader_cut_off(job, rng)
    if rng.random() < 0.5:
        node_cut_off(job, rng)
    if rng.random() < 0.5:  # when there is another leader
        job.world.at(2.0 + 4 * rng.random(), lambda: kill_worker(job, rng))


def leader_goes_on(job: SimJob, rng: Random) -> None:
    """It does not notice that its lease has run out, another leads by then, and a worker is lost: it decides
    what to do about that. An agent may not be able to look who leads."""
    leader = job.controller
    job.world.trace(f"the clock of {leader.name} stands still, and nothing tells it that it does not lead")
    leader.wild = True
    leader.runs_at(0.0)
    cut_off = {leader.machine_name}
    if (node := some(job, rng)) is not None and rng.random() < 0.7:
        cut_off.add(node.machine_name)
    job.network.severed |= {(name, MACHINE) for name in cut_off}
    lost = 2.0 + 6.0 * rng.random()
    job.world.at(lost, lambda: kill_worker(job, rng))
    job.not_before = job.world.now + lost + 1.0


def terminate_node(job: SimJob, rng: Random) -> None:
    """SIGTERM to one machine: its workers end, and the job goes on without it."""
    if node := some(job, rng):
        job.world.trace(f"{node.name} is told to end")
        job.terminate(node)


def drain(job: SimJob, rng: Random) -> None:
    """Somebody wants a node out."""
    if node := some(job, rng):
        job.world.trace(f"{node.name} is to be drained")
        for seconds in (0.0, 1.0, 2.0):  # once it is possible
            job.world.at(seconds, lambda: _ask_to_drain(job, node.name))


def _ask_to_drain(job: SimJob, name: str) -> None:
    controller = job.controller
    if not job.over and name not in controller.machine.cluster.draining:
        controller.do(lambda: controller.handle(Received(NOBODY, m.DrainNode(name))))


def notice(job: SimJob, rng: Random) -> None:
    """A node's machine is about to go, and goes, and another comes; or that is taken back, or never comes."""

    def go(node: SimNode) -> None:
        if node.alive and not job.over and not job.calm:
            node.kill()
            job.machine_ends(node)
            job.world.at(2.0, job.join)

    if node := some(job, rng):
        seconds = rng.choice((None, 3.0, 8.0, 20.0))
        job.world.trace(f"{node.name} is about to go: {seconds} s")
        node.notice("maintenance", seconds)
        if seconds is None or rng.random() < 0.3:
            if rng.random() < 0.3:
                job.world.at(rng.random() * 4, lambda: node.notice(""))
        else:
            job.world.at(seconds, lambda: go(node))


def sicken(job: SimJob, rng: Random) -> None:
    """A device reports something, before or after workers die of it, or though none does; or they do, and it
    says nothing."""
    if node := some(job, rng):
        device, xid = rng.randrange(job.shape.per_node), rng.choice((0, 13, 64, 64, 79, 79, 92))
        dies = rng.choice((0, 0, 1, 1, 2)) if xid else 1
        job.world.trace(f"device {device} of {node.name}: XID {xid}, {dies} workers die of it")
        job.errors.sick.add(node.machine_name)
        node.broken[device] += dies
        if xid:
            job.world.at(rng.choice((0.0, 0.3, 3.0)), lambda: node.reports(xid, device))


def slow_down(job: SimJob, rng: Random) -> None:
    """A machine is slow, or a role wherever it is; for a while, or for good."""
    node, role = some(job, rng), rng.randrange(job.training.roles)
    if node is not None:
        job.slow.begin(rng, role if rng.random() < 0.3 else node.machine_name)


def flip(job: SimJob, rng: Random) -> None:
    """A bit of a role's state flips, once it has made one of its next versions."""
    if not job.flipped:
        job.flipped = True
        job.flip = rng.randrange(job.training.roles), job.training.newest + rng.choice((1, 2))
        job.world.trace(f"a bit of (role, version) {job.flip} will flip")


def poison(job: SimJob, rng: Random) -> None:
    """A role's worker dies whenever it has made a certain version: nothing helps against that."""
    if job.poison is None:
        job.poison = rng.randrange(job.training.roles), job.training.newest + rng.choice((1, 2))
        job.world.trace(f"(role, version) {job.poison} is deadly")


def raise_once(job: SimJob, rng: Random) -> None:
    """An exception in one role, or in all, that does not come again."""
    version = job.training.newest + rng.choice((1, 2))
    job.errors.add(_some_roles(job, rng), version, always=False)


def raise_always(job: SimJob, rng: Random) -> None:
    """A bug of the user's, in one role or in all."""
    version = job.training.newest + rng.choice((1, 2))
    job.errors.add(_some_roles(job, rng), version, always=True)


def diverge(job: SimJob, rng: Random) -> None:
    """From now on no script does again what others have on record; and somebody is lost."""
    job.world.trace("scripts never do the same again")
    job.diverges = True
    kill_worker(job, rng)


def stray(job: SimJob, rng: Random) -> None:
    """A role does something else than the others in one of the next steps, perhaps again and again."""
    role, version = rng.randrange(job.training.roles), job.training.newest + rng.choice((1, 2))
    job.world.trace(f"role {role} diverges after version {version}")
    job.errors.stray = Stray(role, version, rng.choice((1, 1, 2, 3, 12)))


def _some_roles(job: SimJob, rng: Random) -> list[int]:
    roles = list(range(job.training.roles))
    return rng.choice((roles, [rng.choice(roles)], [rng.choice(roles)]))


def bad_node(job: SimJob, rng: Random) -> None:
    """The workers of one machine crash again and again, for a while; and once more long after."""
    if not (node := some(job, rng)):
        return
    name = node.machine_name
    job.world.trace(f"{name} is bad")

    def crash() -> None:
        here = [w for n in job.live() if n.machine_name == name for w in n.workers.values()]
        playing = [w for w in here if w.alive and w.trains]
        if playing and not job.over:
            worker = rng.choice(playing)
            worker.node.end_worker(worker, -11)

    at = 0.0
    for _ in range(rng.choice((2, 3, 4))):
        at += rng.choice((0.7, 2.0, 4.0))
        job.world.at(at, crash)
    if rng.random() < 0.5:
        at += 60.0
        job.world.at(at, crash)
        job.not_before = job.world.now + at + 1.0


def join(job: SimJob, rng: Random) -> None:
    """A node more."""
    if len(job.live()) < job.shape.nodes + job.shape.spares + 2:
        job.join()


def join_sick(job: SimJob, rng: Random) -> None:
    """A node more, whose devices compute wrongly; perhaps one that is well, after it; and nodes are lost."""
    if len(job.live()) < job.shape.nodes + job.shape.spares + 3:
        job.join()
        job.world.trace(f"{job.nodes[-1].name} is sick")
        job.errors.sick_from_the_start.add(job.nodes[-1].machine_name)
    if rng.random() < 0.7:
        job.join()
    for _ in range(rng.choice((0, 1, 1, 2))):
        job.world.at(rng.choice((0.1, 1.0, 3.0, 8.0, 8.0)), lambda: job.calm or kill_node(job, rng))


def disaster(job: SimJob, rng: Random) -> None:
    """More is lost at once than there are copies for; and others come."""
    lost = rng.sample(job.live(), min(len(job.live()), job.shape.replicas + rng.choice((1, 1, 2))))
    for node in lost:
        node.kill()
        job.machine_ends(node)
        job.world.at(rng.random() * 4, job.join)
    if rng.random() < 0.3:
        kill_controller(job, rng)


def storage_slow(job: SimJob, rng: Random) -> None:
    """Everything takes long."""
    job.world.trace("storage is slow")
    job.storage.slow = rng.choice((10.0, 100.0))
    _until(job, rng, job.storage.healed)


def storage_hangs(job: SimJob, rng: Random) -> None:
    """Calls do not come back, on some nodes."""
    job.world.trace("storage hangs")
    job.storage.hangs |= _machines(job, rng)
    _until(job, rng, job.storage.healed)


def storage_unreachable(job: SimJob, rng: Random) -> None:
    """Calls fail, on some nodes; or nothing is mounted there."""
    job.world.trace("storage cannot be reached")
    machines = _machines(job, rng)
    if rng.random() < 0.5:
        job.storage.unreachable |= machines
    else:
        job.storage.unmounted |= machines
    _until(job, rng, job.storage.healed)


def storage_full(job: SimJob, rng: Random) -> None:
    """Nothing can be written."""
    job.world.trace("storage is full")
    job.storage.full = True
    _until(job, rng, job.storage.healed)


def storage_rots(job: SimJob, rng: Random) -> None:
    """A file of the newest checkpoint, complete or not, is not what was written."""
    if job.storage.parts:
        name = max(job.storage.parts)
        if parts := list(job.storage.parts[name]):
            job.world.trace(f"{name} is damaged")
            job.storage.damaged.add((name, rng.choice(parts)))


def fill_disk(job: SimJob, rng: Random) -> None:
    """Of the controller's files."""

    def heal() -> None:
        job.disk_full = False

    job.world.trace("the controller's disk is full")
    job.disk_full = True
    _until(job, rng, heal)


def _machines(job: SimJob, rng: Random) -> set[str]:
    """One of them, or all."""
    names = [node.machine_name for node in job.live()]
    return set(names) if rng.random() < 0.5 else set(names[:1])


def _until(job: SimJob, rng: Random, heal: Callable[[], None]) -> None:
    job.world.at(rng.choice((0.5, 3.0, 10.0)), heal)


STORAGE: dict[Fault, int] = {
    disaster: 6,
    storage_slow: 2,
    storage_hangs: 2,
    storage_unreachable: 2,
    storage_full: 2,
    storage_rots: 2,
}
"""For a job that has some."""

ELECTION: dict[Fault, int] = {
    kill_controller: 4,
    stop_controller: 6,
    leader_stops_in_the_act: 6,
    leader_cut_off: 6,
    node_cut_off: 3,
    arbiter_down: 3,
    leader_has_a_bad_clock: 6,
}
"""For a job whose leader is elected."""

LEADERS: dict[Fault, int] = {
    **ELECTION,
    leader_goes_on: 6,
    kill_worker: 8,
    kill_leaders_machine: 4,
    stop_leaders_machine: 3,
    stop_node: 1,
    break_connection: 1,
    stop_everything: 1,
    cut: 2,
    sever: 2,
    terminate_node: 1,
    join: 1,
}
"""For a schedule that is about them alone."""

FAULTS: dict[Fault, int] = {
    kill_worker: 6,
    hang_worker: 1,
    stop_worker: 2,
    kill_node: 5,
    stop_node: 3,
    break_connection: 3,
    stop_everything: 1,
    cut: 2,
    sever: 2,
    sever_nodes: 2,
    kill_controller: 4,
    stop_controller: 2,
    terminate_node: 1,
    join: 1,
    raise_once: 2,
    raise_always: 1,
    bad_node: 2,
    poison: 1,
    fill_disk: 1,
}
"""With how often each is chosen."""


def some(job: SimJob, rng: Random) -> SimNode | None:
    nodes = job.live()
    return rng.choice(nodes) if nodes else None


def schedule(job: SimJob, rng: Random) -> float:
    """Draw a schedule of faults, some near to each other or at a certain message. When the last is over."""
    count = rng.choice((2, 3, 4) if job.shape.brief else (1, 1, 2, 2, 3, 4, 6))
    span = rng.choice((2.0, 4.0, 8.0))
    at = rng.random() * (5.0 if job.shape.brief else 3.0)
    if job.shape.slow:  # until it protects versions more seldom
        at += rng.choice((5.0, 25.0, 35.0))
    faults = FAULTS | (STORAGE if job.shape.durable or job.shape.saves else {})
    if job.shape.brief:
        faults = LEADERS
    elif job.shape.elects:
        faults = {fault: faults.get(fault, 0) + ELECTION.get(fault, 0) for fault in (*faults, *ELECTION)}
    if job.shape.flips:
        faults = {flip: 6, kill_worker: 2, kill_node: 2}
    if job.shape.restarts and not job.shape.flips:
        faults = faults | {diverge: 4, stray: 4}
    if job.shape.relays:
        faults = faults | {lose_relay: 8}
    moments: tuple[str, ...] = MOMENTS
    if job.shape.notices:
        faults = faults | {notice: sum(faults.values()) // 2, join: 4}
        moments = (*MOMENTS, "Notice", "Drain", "Prepare", "SendHeartbeat", "NodesChanged")
    elif job.shape.sick:
        faults = faults | {sicken: sum(faults.values()) // 2, join: 4}
        moments = (*MOMENTS, "DeviceFinding", "KeepStrikes", "Drain", "Prepare")
    elif job.shape.slows:
        faults = faults | {slow_down: sum(faults.values()), join: 4}
        moments = (*MOMENTS, "KeepStrikes", "Drain", "Prepare", "SendHeartbeat")
    elif job.shape.checks:
        faults = faults | {join_sick: sum(faults.values()) // 2, join: 4}
        moments = (*MOMENTS, "DeviceFinding", "KeepStrikes", "Drain", "Prepare", "CheckNode", "NodeChecked")
    elif job.shape.drains:
        faults = faults | {drain: sum(faults.values()) // 2, join: 4}
        moments = (*MOMENTS, "Drain", "Prepare", "SendHeartbeat", "NodesChanged")
    if job.shape.slows:  # one is, before anything else is wrong, and perhaps until it is moved
        job.world.at(at, lambda: slow_down(job, rng))
        at += rng.choice((1.0, 16.0, 18.0, 30.0))
    for _ in range(count):
        fault = rng.choices(list(faults), list(faults.values()))[0]

        def strike(fault: Fault = fault) -> None:
            if not job.over:
                fault(job, rng)

        if rng.random() < 0.5:
            moment, skip = rng.choice(moments), rng.choice((0, 0, 1, 2, 4))
            job.world.at(at, lambda m=moment, s=skip, f=strike: job.hooks.append((m, s, f)))  # type: ignore[misc]
        else:
            job.world.at(at, strike)
        at += rng.choice((0.0, 0.05, 0.5, span)) * rng.random()
    if job.shape.brief:
        at += rng.choice((0.0, 3.0))
    elif job.shape.elects:  # it takes its time until there is another leader
        at += rng.choice((0.0, 4.0, 9.0))
    return at + 1.0
