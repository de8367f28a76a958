"""uvicorn, but a signal first lets what is running finish, while `/ready` already says no."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn

from rlm.serving.service import Service


class DrainingServer(uvicorn.Server):
    """The first signal drains, the second one leaves at once."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds
        self._draining: asyncio.Task | None = None
        self._asked = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._asked:
            self.should_exit = self.force_exit = True
        self._asked = True
        self._loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        """Drain, then exit."""
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain(self._seconds)
        self.should_exit = True
