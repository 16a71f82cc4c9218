"""The endpoint as an ASGI application: routes, authorization, and handling of requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatune.generation.endpoint.requests import ApiRequest, read_chat, read_completion
from megatune.generation.endpoint.responses import ApiError, ApiResponse, event
from megatune.generation.endpoint.streams import Event, Events, Streams
from megatune.generation.generator import Generator
from megatune.generation.options import Sampling
from megatune.generation.prompt import Prompt, Reply

_LOG = logging.getLogger("uvicorn.error")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_CLIENT_LEFT = 499  # never sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a request.

    Attributes:
        body_bytes: maximum size of the body.
        seconds: time limit, including waiting and the answer.
    """

    body_bytes: int = 16 * 2**20
    seconds: float = 600.0


class App:
    """The endpoint of one model.

    Args:
        name: name of the model for clients.
        created: when it was loaded, in seconds since 1970.
        defaults: default sampling options of requests.
        api_key: None to accept all requests that address this machine by a local name.
    """

    def __init__(
        self,
        generator: Generator,
        streams: Streams,
        name: str,
        created: int,
        *,
        defaults: Sampling,
        api_key: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._generator, self._streams, self._name, self._created = generator, streams, name, created
        self._defaults, self._api_key, self._limits = defaults, api_key, limits or Limits()

    def asgi(self, cors_origins: Sequence[str] = ()) -> Starlette:
        """Return the application.

        Args:
            cors_origins: origins of web pages that may send requests; none by default.
        """
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", self._route(read_chat), methods=["POST"]),
            Route("/v1/completions", self._route(read_completion), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {ApiError: _refused, HTTPException: _no_route, Exception: _failed}
        return Starlette(routes=routes, middleware=[cors] if cors_origins else [], exception_handlers=handlers)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._admit(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._created, "owned_by": "megatune"}

    def _admit(self, request: Request) -> None:
        """Reject requests without the key; if there is no key, requests of web pages that use another host name."""
        if self._api_key is None:
            if _host(request) not in _LOCAL_NAMES:
                raise ApiError(403, "without an API key, only this machine's own names are answered: localhost")
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self._api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ApiError(404, f"there is no model {name!r}; this is {self._name!r}", "model", "model_not_found")

    def _route(self, read: Callable[[bytes, Generator, Sampling], ApiRequest]) -> Callable[[Request], Any]:
        """Return the handler of a route; `read` parses its bodies."""

        async def answer(request: Request) -> Response:
            self._admit(request)
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                # Browsers send other types without a CORS preflight request.
                raise ApiError(415, "the body must be application/json")
            try:
                async with asyncio.timeout(self._limits.seconds):
                    body = await self._body(request)
            except TimeoutError as error:
                raise ApiError(408, "the body did not arrive in time") from error
            api_request = read(body, self._generator, self._defaults)
            self._check_model(api_request.model)
            return await self._answer(request, api_request)

        return answer

    async def _body(self, request: Request) -> bytes:
        """Return the body; raise as soon as it is too large."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.body_bytes:
                raise ApiError(413, f"the body has more than {self._limits.body_bytes:,} bytes", code="too_large")
        return bytes(body)

    async def _answer(self, request: Request, api_request: ApiRequest) -> Response:
        """Answer in one piece, or start to stream; a disconnect of the client, or the time limit, ends the answer."""
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        events = self._streams.stream(api_request.make, api_request.sampling)
        gone = asyncio.create_task(_gone(request))
        is_handed_over = False
        try:
            # Errors of a prompt are reported by the status, also for streams.
            prompt = await _next(events, gone, deadline)
            assert isinstance(prompt, Prompt)
            answer = ApiResponse(api_request, prompt)
            if api_request.stream:
                is_handed_over = True  # from here on, Starlette watches the client and cancels the stream
                return StreamingResponse(_sent(events, answer, deadline), media_type="text/event-stream")
            while not isinstance(each := await _next(events, gone, deadline), Reply):
                pass
            return JSONResponse(answer.whole(each))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        finally:
            gone.cancel()
            if not is_handed_over:
                await events.aclose()


def _host(request: Request) -> str | None:
    """Return the host name of a request, without the port."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:
        return None


async def _gone(request: Request) -> None:
    """Wait until the client disconnects; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(events: Events, gone: asyncio.Task[None], deadline: float) -> Event:
    """Return the next event.

    Raises:
        ClientDisconnect: the client has disconnected.
        ApiError: (504) it takes too long, or the error of the events.
    """
    task = asyncio.ensure_future(anext(events))
    try:
        remaining = deadline - asyncio.get_running_loop().time()
        await asyncio.wait({task, gone}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect if gone.done() else _too_slow()
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _sent(events: Events, answer: ApiResponse, deadline: float) -> AsyncIterator[bytes]:
    """Yield an answer as server-sent events; an error is the last event."""
    async with aclosing(events):
        try:
            yield answer.first()
            while True:
                async with asyncio.timeout_at(deadline):
                    each = await anext(events)
                if isinstance(each, Reply):
                    yield answer.last(each)
                    return
                assert isinstance(each, str)
                yield answer.piece(each)
        except TimeoutError:
            yield event(_too_slow().body)
        except ApiError as error:
            yield event(error.body)
        except Exception as error:
            _LOG.exception("an answer ended")
            yield event(_internal(error).body)


def _too_slow() -> ApiError:
    return ApiError(504, "the answer was not finished in time", code="timeout")


def _internal(error: Exception) -> ApiError:
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}").response()


async def _failed(request: Request, error: Exception) -> Response:
    return _internal(error).response()  # Starlette raises it again, for the log
