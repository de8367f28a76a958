"""uvicorn, but a signal first lets what is running finish, while `/ready` already says no."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn

from rlm.serving.service import Service


class GracefulServer(uvicorn.Server):
    """The first signal drains, the second one leaves at once."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again at the end: the exit code would not be 0.
        self.should_exit, self.force_exit = True, self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.engine.state != "dead":
            draining = asyncio.create_task(self._service.drain(self._seconds))
            while not (draining.done() or self.force_exit):
                await asyncio.sleep(0.05)
            draining.cancel()
        await super().shutdown(sockets)
