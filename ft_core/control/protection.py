"""Whether the script runs with fault tolerance, as far as its workers have said."""

from __future__ import annotations

from ft_core.control.emitter import Emitter
from ft_core.control.observe import explain
from ft_core.control.observe.observations import TimeGoes
from ft_core.protocol.goodput import Cause
from ft_core.protocol.messages import Unprotected


class Protection:
    """Why nothing of what the script does is kept, if so."""

    def __init__(self, out: Emitter, *, a_program: bool) -> None:
        """`a_program`: what is run is none of Python's, and can never be protected."""
        self._out = out
        self._never = explain.A_PROGRAM if a_program else ""
        self.unprotected = self._never
        """Why scripts run without fault tolerance; empty: they have it, or may yet ask for it."""
        self._so_far = ""
        """Why scripts run without fault tolerance so far, though they may yet ask for it; empty: nobody has
        said so."""

    @property
    def lacking(self) -> str:
        """Why nothing is protected now; empty, if it is."""
        return self.unprotected or self._so_far

    def on_unprotected(self, message: Unprotected, *, trained: bool) -> None:
        """A script does without fault tolerance, has until now, or does so from now on. `trained`: whether a
        role has reached training."""
        if message.so_far:
            self._so_far = "" if trained else message.reason
        elif not self.unprotected:
            self.unprotected = message.reason
            self._out.emit(TimeGoes(Cause.UNKNOWN))
        self.record()

    def asked_for(self) -> None:
        """All roles take part in fault tolerance."""
        self._so_far = ""

    def scripts_restart(self) -> None:
        """What the scripts have said until now counts no more."""
        self.unprotected, self._so_far = self._never, ""

    def record(self) -> None:
        """Write down, once a job, that there is none."""
        if self.lacking and not self._out.recorded_in("unprotected"):
            self._out.record_once("unprotected", explain.unprotected(self.lacking))
