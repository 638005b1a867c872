"""Where an agent's life is: values, each with what only it needs, and a table of what leads from one to
another."""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.process.transitions import Transitions


@dataclass(frozen=True)
class Serving:
    """The agent does what the controller wants, and looks after its workers."""


@dataclass(frozen=True)
class Farewell:
    """The node is to end; workers whose scripts are done are waited for, until then at most."""

    code: int
    until: float


@dataclass(frozen=True)
class Over:
    """The agent does nothing any more: its process ends, or begins anew as a spare."""


Phase = Serving | Farewell | Over

TRANSITIONS: Transitions[Phase] = {
    Serving: {
        Farewell: "the job is over, the node was told to end, or there is nobody to serve",
        Over: "the job goes on without this node, which begins anew as a spare",
    },
    Farewell: {Over: "no worker is left whose script is done, or their time is over"},
    Over: {},
}
