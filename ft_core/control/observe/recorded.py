"""Every event of `events.jsonl`: when it comes, and what belongs to it. The reference is made of this.

What is recorded and not described here is an error, and the other way round:
`tests/core/house/test_reference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """What a line of `events.jsonl` tells of, in Markdown."""

    when: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """The fields that such a line may have besides `ALWAYS` and `ACCOUNT`."""


ALWAYS: Mapping[str, str] = {
    "event": "its name, see below",
    "epoch": "the newest one then; an event that ends an epoch has the number of the next",
    "term": "of the leader that has written it; 1 where the controller is not elected",
    "monotonic": "seconds, of the machine that it was written on",
    "time": "seconds since 1970",
    "roles": "that it is about",
    "reason": "for people: what happened and, if something must be done, what",
}
"""Fields of every line."""

ACCOUNT: Mapping[str, str] = {
    "spent": "what the job's time went to until then, see [goodput](operations/watch.md#goodput)",
    "unfinished": "what was cut off of the step under way, in seconds by cause; of `resumed`, what of the "
    "time before it was a step's; of `controller_restarted`, what went on before it that no controller has "
    "seen",
}
"""Fields of those lines that begin or end what the job's time goes to."""

_NODE = {"node": "which"}
_VERSION = {"version": "which"}

EVENTS: Mapping[str, Event] = {
    "started": Event("the job's first controller begins"),
    "joined": Event(
        "an agent has connected",
        {"node": "which", "agent_pid": "of its process", "domain": "its failure domain"},
    ),
    "decided": Event(
        "an epoch begins: at the start, and in every recovery. `roles`: that were lost",
        {
            "version": "that it goes on from; `null`: as the script begins",
            "origin": "where its state comes from: `initial`, `memory`, `durable`",
            "moved": "lost role → its node now",
        },
    ),
    "configured": Event(
        "the script has brought settings of its own; `reason` has them. Again if it therefore starts from a "
        "durable checkpoint"
    ),
    "state_restored": Event("all roles have their state", {"version": "of it", "pids": "role → its worker"}),
    "communicators_ready": Event("the survivors' groups are connected again"),
    "resumed": Event(
        "every role has finished a step in this epoch. `reason`, of a recovery: how long it took, who plays "
        "what where now, and what was lost",
        _VERSION,
    ),
    "unprotected": Event("once a job: nothing of what its script does is kept, and `reason` says why"),
    "resumes": Event(
        "once a job: should the script have to be started again, it goes on from its own newest checkpoint; "
        "that is what the job falls back to"
    ),
    "starting_over": Event(
        "memory does not suffice, and all scripts are started again: from their own newest checkpoint, if "
        "there is one. `reason` says what was lost"
    ),
    "begins_anew": Event(
        "to go on in place does not help, and the next rung of the [ladder](failure_model.md#the-ladder) is "
        "tried; `reason` says against what",
        {
            "rung": "who begins anew: `some` roles or `all`, from memory; `restart`: all, from a durable "
            "checkpoint or the script's own"
        },
    ),
    "hang": Event(
        "nothing moves. `roles`: who holds the others up, `reason`: who waits for it in what, and what it "
        "does. Its worker is replaced. Of what is not clear nothing is replaced: `reason` begins with `not "
        "explained`, and `roles` are those that it may be",
        {"explained": "whether it is"},
    ),
    "stalled": Event(
        "nothing moves, since a role waits for data, storage, a compiler, or a process that it has started. "
        "`roles`: which, `reason`: for what. Nothing is replaced for it, unless it takes "
        "[too long](symptoms.md#waiting-is-not-hanging)"
    ),
    "detected": Event(
        "a failure; ends the epoch unless it is ending already",
        {
            "fault": "its [class](failure_model.md#what-an-error-leads-to), where a worker or a node is lost",
            "node": "where that was",
        },
    ),
    "device": Event(
        "a device of a node reports something that [leads to something](device_health.md); `roles`: those "
        "that the node plays",
        {
            "node": "which",
            "device": "its index; -1: not known",
            "finding": "what, in short: `xid 79`",
            "action": "what it leads to",
            "said": "in the driver's words",
        },
    ),
    "straggler": Event(
        "a role (`roles`) is [slow](symptoms.md#ftstraggler) compared with its like, and `reason` says how; "
        "or is not any more",
        {
            **_NODE,
            "part": "what of its step takes long: `compute`, or `data`, that it waits for them",
            "score": "times the usual",
            "over": "whether it is not any more",
        },
    ),
    "corruption": Event(
        "with [`--ft-verify`](operations/settings.md#silent-corruption): who held corrupt state (`roles`), "
        "as the step that was done again has shown; without `roles` it has not"
    ),
    "not_compared": Event(
        "with `--ft-verify`: what is not compared, or not any more, and why; once of each (`roles`)"
    ),
    "avoided": Event(
        "a node has failed so often, or has such a device, that it is not used while there is another "
        "([its record](operations/change.md#a-nodes-record))",
        _NODE,
    ),
    "used_in_need": Event(
        "a node that is avoided is given roles, as there is no other; `roles`: which", _NODE
    ),
    "checked": Event(
        "a node was [checked](device_health.md#whoever-joins-is-checked) before it is given roles; `reason`: "
        "what is wrong, or could not be found out",
        {**_NODE, "found": "`ok`, `sick` or `unknown`", "seconds": "that it was kept waiting for that"},
    ),
    "forgiven": Event("`ftctl nodes forgive`", _NODE),
    "suspected": Event("a worker saw a communicator break; ends nothing by itself"),
    "link": Event(
        "two nodes live and do not reach each other; one of them is replaced",
        {"nodes": "the two", "replaced": "which of them"},
    ),
    "unreachable": Event(
        "more nodes are out of sight than copies cover; the job waits for them before it is given up; "
        "`reason` names them"
    ),
    "waiting": Event("no worker for a lost role, or storage that hangs; `reason` has what helps"),
    "spare_lost": Event("a node without roles has gone", _NODE),
    "given_up": Event(
        "a node that was thought lost is back, too late: it ends its workers and joins again as a spare",
        _NODE,
    ),
    "notice": Event(
        "somebody [announces](operations/change.md#notices) that a node's machine is about to go; `reason`: "
        "who, and what",
        {**_NODE, "seconds": "that it has left, where that is known"},
    ),
    "draining": Event(
        "a node is to be taken out. `reason`: `ftctl drain`, SIGTERM or the notice; `roles`: those that it "
        "plays",
        _NODE,
    ),
    "period": Event(
        "an epoch ends for another number of steps between two protected versions", {"every": "that number"}
    ),
    "moving": Event("an epoch ends for the roles of a drained node to go on elsewhere in the next"),
    "shrinking": Event(
        "an epoch ends for replica groups to leave in the next, with a node that is about to go"
    ),
    "not_moving": Event("they could not start elsewhere, and stay; it is tried again, three times at most"),
    "drained": Event("the node plays no role, all that it kept is elsewhere, and it ends", _NODE),
    "not_drained": Event(
        "it stays and is used as before, or was lost, or cannot be taken out yet; `reason` says why", _NODE
    ),
    "left": Event("replica groups are away from this epoch on; `roles`: theirs"),
    "preparing": Event(
        "workers start while all train: of replica groups that were away, or of roles that are to leave a "
        "drained node"
    ),
    "held": Event("those who train stop at the end of a step, for the epoch that is about to begin"),
    "returning": Event("an epoch ends for replica groups to come back in the next"),
    "returned": Event("they take part from this epoch on"),
    "not_returning": Event("they could not come back, and leave again; it is tried once more, later"),
    "durable": Event(
        "a durable checkpoint is whole; not told of one that was being written as a new controller began",
        _VERSION,
    ),
    "durable_failed": Event(
        "one could not be written, and was deleted; the last complete ones are as they were. One event a "
        "checkpoint: the node's log has each role's",
        _VERSION,
    ),
    "durable_unused": Event(
        "nodes do not see a durable checkpoint that others see, and are not used while there is another; or "
        "all that are there are of another number of roles; `reason` says what to do",
        {"nodes": "which"},
    ),
    "injected": Event("`ftctl kill`"),
    "ledger": Event(
        "roles disagree on what a step trained; `reason` has both accounts. Never, but for an error in this "
        "software"
    ),
    "controller_restarted": Event("a new controller has taken over"),
    "leaving": Event("a node has got SIGTERM", _NODE),
    "refused": Event(
        "a connection without the secret, or of another version; ten a minute, then one with the number of "
        "the rest"
    ),
    "goodput": Event(
        "once a minute at most, and at the end: `reason` says in words what the job's time went to"
    ),
    "stopping": Event(
        "the job ends otherwise than by its scripts' end; `reason` says why. First its newest version is "
        "[written](operations/storage.md#a-job-that-ends)"
    ),
    "saved": Event("that version is on storage; `reason` says where, and how to go on", _VERSION),
    "not_saved": Event(
        "it is not; `reason` says why. What was complete there before is as it was",
        {"version": "which, as far as that is known"},
    ),
    "finished": Event("every role's script is done"),
    "stopped": Event("the job is over without that; `reason` says why"),
}
"""Every event, by name."""
