"""The controller: one process of a job. It decides which node runs which role (a rank) and from which step.

Its reasons:

- It may die at any moment, and training must not notice. So its state is soft: all that is in `ClusterState`
  was told by the agents, one on each node, and is told again to its successor.
- It must be tried in thousands of schedules of failures. So it is a pure state machine: `Controller.handle`
  takes an event and the time, and returns effects, which `shell` carries out.
- Nobody votes. An epoch's number is the fence: whatever belongs to an older epoch is refused. A *plan* is an
  epoch's truth: its roles and their nodes, the version of the state that it begins from, and who has it.

A job is `Forming` until there are workers for all roles, then `Running`. When something fails the epoch
ends: while it is `Quiescing`, workers leave their step and nodes report what they hold. Then the next epoch
is `Running`, or the job is `Waiting` for what it lacks. A controller that learns what its predecessor knew is
`Rebuilding`; a job that is over is `Done`. `phases` has the table of what leads to what.

One failure, followed through the code: a node says that a worker has died (`machine.Controller`), its role is
lost (`recovery.RecoveryCoordinator.worker_lost`, `fail`), and the epoch ends (`end_epoch`): all are told to
leave it. Once all nodes have said what they hold (`decide_if_ready`), `decide.deciding.decide` says how to go
on: from which version, and who plays which role; `_start_epoch` sends that plan. Nodes say that they have
their state, and that a step was done (`on_progress`). What does not help in place climbs `decide.ladder`
(`escalate`).

To be read in this order: `events`, `phases`, `machine`, `recovery`, `cluster_state`, then the rooms: `decide`
(which version, who plays what), `liveness` (who is lost, slow, or hangs), `prestart` (roles that start while
others train), `lead` (which process is the controller), `observe` (what people and metrics see).
"""
