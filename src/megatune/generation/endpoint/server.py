"""The endpoint's process: its address, and its end."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.generation.endpoint.streams import Streams

_SECONDS_TO_END = 10  # for answers that are being sent when the endpoint is stopped


def listening_socket(host: str, port: int, *, has_key: bool) -> socket.socket:
    """Take an address, before the seconds that loading a model takes; nobody can connect yet.

    Raises:
        MegatuneError: (SETTINGS) no such address, or one that others reach while there is no key; (UNAVAILABLE) it is
            taken, or not for this user.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        finding = Finding(f"{host} is not an address of this machine", "--host", str(error), "--host 127.0.0.1")
        raise MegatuneError(finding, ExitCode.SETTINGS) from error
    if not has_key and not is_local(str(address[0])):
        why = f"{host} is reachable from other machines, and anyone who can reach it could use the model"
        fix = "set MEGATUNE_API_KEY, or --host 127.0.0.1"
        raise MegatuneError(Finding("there is no API key", "--host", why, fix), ExitCode.SETTINGS)
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except (OSError, OverflowError) as error:
        taken.close()
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        finding = Finding(
            f"{host}:{port} cannot be listened on", "--port", why, "give another --port; 0 takes a free one"
        )
        raise MegatuneError(finding, ExitCode.UNAVAILABLE) from error
    return taken


def is_local(address: str) -> bool:
    """Return whether only this machine reaches an IP address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class Server(uvicorn.Server):
    """Serves an application until SIGINT or SIGTERM, which also end the answer that is being written.

    Args:
        streams: the answers that a model writes; None of an application that has none.
    """

    def __init__(
        self,
        app: Starlette,
        streams: Streams | None,
        log_level: str = "warning",
        on_start: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level=log_level, timeout_graceful_shutdown=_SECONDS_TO_END, server_header=False, ws="none",
            )
        )  # fmt: skip
        self._streams, self._on_start = streams, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start()

    def serve_on(self, taken: socket.socket) -> None:
        """Serve on an address; returns when it is stopped."""
        # uvicorn raises the signals that ended it once more, for handlers that were there before: here, nobody.
        is_main = threading.current_thread() is threading.main_thread()
        before = {each: signal.signal(each, _nothing) for each in (signal.SIGINT, signal.SIGTERM) if is_main}
        try:
            self.run(sockets=[taken])
        finally:
            if self._streams is not None:
                self._streams.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End answers, then the endpoint."""
        if self._streams is not None:
            self._streams.stop()
        super().handle_exit(sig, frame)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass
