"""The endpoint's server: its socket, and its shutdown."""

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

_SHUTDOWN_SECONDS = 10  # for answers that are being sent


def listening_socket(host: str, port: int, *, has_key: bool) -> socket.socket:
    """Bind a socket before the model is loaded, without listening yet.

    Raises:
        MegatuneError: (SETTINGS) an invalid address, or one that other machines can reach although there is no key;
            (UNAVAILABLE) the address is in use, or not permitted.
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
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        what, fix = f"{host}:{port} cannot be listened on", "choose another --port; 0 selects a free one"
        raise MegatuneError(Finding(what, "--port", why, fix), ExitCode.UNAVAILABLE) from error
    return bound


def is_local(address: str) -> bool:
    """Return whether an IP address is reachable only from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class Server(uvicorn.Server):
    """Serves an application until SIGINT or SIGTERM, which also end the answers in progress.

    Args:
        streams: answers in progress; None for an application without a model.
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
                app, log_level=log_level, timeout_graceful_shutdown=_SHUTDOWN_SECONDS, server_header=False, ws="none",
            )
        )  # fmt: skip
        self._streams, self._on_start = streams, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and call `on_start`."""
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start()

    def serve_on(self, bound: socket.socket) -> None:
        """Serve on a bound socket until stopped."""
        # uvicorn raises the signal that stopped it again for earlier handlers; ours do nothing.
        is_main = threading.current_thread() is threading.main_thread()
        before = {each: signal.signal(each, _nothing) for each in (signal.SIGINT, signal.SIGTERM) if is_main}
        try:
            self.run(sockets=[bound])
        finally:
            if self._streams is not None:
                self._streams.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the answers, then the endpoint."""
        if self._streams is not None:
            self._streams.stop()
        super().handle_exit(sig, frame)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass
