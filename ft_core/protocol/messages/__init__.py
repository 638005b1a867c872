"""Every message between the processes of a job, by who sends it to whom.

Who looks for the producer or the consumer of a message finds it by its class's name. Frozen; decoded
strictly: an unknown kind, an unknown field or a wrong type is an error of the sender's version, never a
default. Times are in seconds, sizes in bytes. Roles are integers. A segment is named by its id
(`state.manifest`), a process group and a place in it by its text form (`protocol.groups`).
"""

from __future__ import annotations

from ft_core.protocol.codec import Decoder
from ft_core.protocol.messages.agent import *
from ft_core.protocol.messages.operator import *
from ft_core.protocol.messages.plans import *
from ft_core.protocol.messages.relay import *
from ft_core.protocol.messages.roles import *
from ft_core.protocol.messages.values import *
from ft_core.protocol.messages.worker import *

# -- what each end of a connection decodes -------------------------------------------------------------

FROM_CONTROLLER = Decoder[ToAgent](ToAgent)
FROM_CLIENT = Decoder[FromAgent | FromCtl | RouteRequest | LeavingRelay](
    FromAgent | FromCtl | RouteRequest | LeavingRelay
)
"""Who is a peer of the controller: an agent, or `ftctl`."""
TO_AGENT = Decoder[ToAgent | UseRelay | RelayLives](ToAgent | UseRelay | RelayLives)
"""From the controller, or from who passes on what that says."""
FROM_PULSE = Decoder[Pulse](Pulse)
TO_CTL = Decoder[ToCtl](ToCtl)
FROM_WORKER = Decoder[FromWorker](FromWorker)
TO_WORKER = Decoder[ToWorker](ToWorker)
