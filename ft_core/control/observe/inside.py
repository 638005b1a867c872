"""Questions of somebody in the controller's own process: what `ftctl` may ask over a connection."""

from __future__ import annotations

import concurrent.futures

from ft_core.errors import ProtocolError
from ft_core.protocol.messages import TO_CTL, ToCtl


class Reply:
    """Stands where a connection does, and takes one answer."""

    def __init__(self) -> None:
        self.answer: concurrent.futures.Future[ToCtl] = concurrent.futures.Future()

    def post_encoded(self, body: bytes) -> None:
        """The answer."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(TO_CTL.decode(body, "the controller"))
            except ProtocolError as error:
                self.answer.set_exception(error)

    async def drain(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is no answer."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(ConnectionResetError("the controller does not answer"))
