"""Exceptions of the engine. Each message says what happened, where, what was lost and what to do."""

from __future__ import annotations

FAILED = 70
"""Exit code of a controller that has failed of an error of its own; `ftrun` starts another."""

EXIT_CODES = {
    "0": "the job has finished: every role's script has, with 0",
    "1": "the job was stopped, and its last event, `stopped`, says why; or this node has no place in it",
    "2": "flags or settings cannot work, and nothing was started; or this node was never let into the job",
    "9": "of a node without the controller: its agent was killed, or has failed of an error of its own; the "
    "job goes on without this node, and it may join again (6, 7, 11: the same, of that signal)",
    "130": "Ctrl-C; the second one ended everything here at once",
    "143": "the job, or its part here, was told to end by SIGTERM, and its script does not handle that",
    "any other": "the script's own, of the worker that the job ended of",
}
"""The exit codes of `ftrun`, and what each means."""

FAILED_NOTE = "failed"
"""The file that says of an agent, in the directory for its sockets, that it has failed.

There as its process is started, gone once it has begun, there again if it fails of an error of its own."""


class FtError(Exception):
    """Base class: catch this to catch everything the engine raises on purpose."""


class EpochChanged(FtError):  # noqa: N818 - a control-flow signal, named after the event
    """The job moved to a new epoch; the current step is abandoned and `Session.protect` takes over."""


class ConfigError(FtError):
    """A flag, a JSON key or a combination of them cannot work. Raised before anything is changed."""


class AuthenticationError(FtError):
    """A peer could not prove that it knows the job's secret, or speaks another version of the protocol."""


class ProtocolError(FtError):
    """A peer sent something that is not part of the protocol, or too much of it."""


class TransportError(FtError):
    """A transfer did not finish: peer gone, deadline passed, or data refused by the peer. Whoever asked takes
    another source, or says in the next report what is missing."""


class CorruptSnapshot(FtError):  # noqa: N818 - a noun for the thing found, as in the logs
    """A stored or received copy does not match its checksums. It is never loaded."""


class ReplayMismatch(FtError):  # noqa: N818
    """A newcomer's start-up collectives differ from what its peers recorded: the script is not deterministic.
    The message names the operation on both sides. All roles begin anew (`control.decide.ladder`)."""


class Unrecoverable(FtError):  # noqa: N818
    """No version exists that every role could have. The message names what was lost. All scripts are started
    again, with checkpoints of their own if they have any (`control.decide.ladder`)."""
