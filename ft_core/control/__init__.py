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
`Rebuilding`. A job that ends before its scripts do is `Saving` first (`final_save`), and one that is over is
`Done`. `phases` has the table of what leads to what.

One event is handled in three steps, all in `machine.Controller.handle`:

1. The part of the machine that it concerns takes it in: `reports` (what agents say while all is well),
   `worker_failures`, `node_failures`, `hang_response`, `corruption`, `device_findings`, `admission` (nodes
   that join are checked), `slow_nodes`, `changeovers` (roles that move or come back), `script_ends`,
   `succession` (what a predecessor knew), `termination` (SIGTERM), `script_settings`, `operator_commands`.
   What has failed they tell `recovery`, which owns the epochs and ends one.
2. If anything has changed that a decision may depend on, `decisions` decides how the job goes on.
3. The observer adds what it comes to in time and numbers.

A part is told what has happened by its `on_...`, what time it is by `tick`, and by other methods what it is
to do; it emits its effects in order (`emitter`). What only knows one subject, such as a drain or the plan's
delivery, has no emitter: it returns effects to the part that asks.

What is known stands in the room `cluster`: of the job in `cluster.state`, of a node in `cluster.node`, of
what a role's state consists of in `cluster.catalogue`, of its versions in `cluster.versions`, of the script
in `cluster.script`, of failures without progress in `cluster.setbacks`, of how far roles are in
`cluster.progress` and `cluster.completion`. What one kind of decision alone reads stands beside that: what a
node holds (`decide.inventory`), replica groups (`decide.groups`), the records of start-up (`decide.records`),
readable checkpoints (`decide.durable_names`), failures (`liveness.strikes`). `protection` knows whether the
script wants any, `plan_delivery` what nodes are sent of a plan; `period` says how often a version is
protected, `samples` keeps the ledger of samples. `shell`, with `relays`, `pulse_listener` and `hooks`, is all
input and output, but for the lease (`lead`) and the page (`observe.page`).

One failure, followed through the code: a node says that a worker has died (`WorkerFailures.on_worker_lost`),
its role is lost (`RecoveryCoordinator.fail`), and the epoch ends (`end_epoch`): all are told to leave it.
Once all nodes have said what they hold, `decide.next_epoch.decide` says how to go on: from which version, and
who plays which role; `RecoveryCoordinator.start_epoch` sends that plan. Nodes say that they have their state,
and that a step was done (`Reports.on_progress`). What does not help in place climbs `decide.ladder`
(`RecoveryCoordinator.escalate`).

All ends of a job lead through `RecoveryCoordinator.end_job`: all scripts are done (`script_ends`), no rung of
the ladder is left, the policy says so, or somebody wants it (`termination`). Unless scripts are done, what is
in memory is saved before (`final_save`).

Words are those of `docs/glossary.md`. `INV-7 (ends)` in a comment is an invariant that the simulator checks
(`tests/simulation/invariants.py`), and that this line upholds.

To be read in this order: `events`, `phases`, `machine`, `recovery`, `decisions`, `cluster.state`, the parts
above, then the rooms: `decide` (which version, who plays what), `liveness` (who is lost, slow, or hangs: it
finds, and the parts act), `prestart` (roles that start while others train), `lead` (which process is the
controller), `observe` (what people and metrics see).
"""
