"""The web page as an ASGI application: static files, queries, actions and access control."""

from __future__ import annotations

import hmac
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from megatune.errors import MegatuneError
from megatune.ui import details
from megatune.ui.answers import Answers, BadQuestionError
from megatune.ui.control import NewRuns, Starter, request_stop
from megatune.ui.page import STATIC, page

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_COOKIE = "megatune-ui"
_MOST_BODY = 1 << 20  # bytes
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class App:
    """The application for the runs below one folder.

    Args:
        token: required from browsers; None accepts all requests to a local host name.
        read_only: disable starting, stopping and verifying.
    """

    def __init__(self, root: Path, token: str | None = None, *, read_only: bool = False) -> None:
        self.answers = Answers(root)
        self._token, self._read_only = token, read_only
        self._logs = tempfile.TemporaryDirectory(prefix="megatune-ui-", ignore_cleanup_errors=True)
        self._starter = Starter(Path(self._logs.name))
        self._new = NewRuns(root, self._starter)

    def asgi(self) -> Starlette:
        routes = [
            Route("/", self._page),
            Route("/api/{name}", self._get),
            Route("/api/{name}", self._post, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        handlers: dict[Any, Any] = {HTTPException: _refused, MegatuneError: _found_wrong, Exception: _failed}
        gzip = Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)
        return Starlette(routes=routes, middleware=[gzip], exception_handlers=handlers)

    async def _page(self, request: Request) -> Response:
        if self._token is not None and _same(request.query_params.get("token", ""), self._token):
            # Redirect to an address without the token, so that it is not in the history or in copied links.
            response = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": "/", **_HEADERS})
            response.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            return response
        self._admit(request)
        return Response(page(read_only=self._read_only), media_type="text/html", headers=_HEADERS)

    def _admit(self, request: Request) -> None:
        """Reject requests without the token; if there is no token, requests to other host names (DNS rebinding).

        Raises:
            HTTPException: 401, 403.
        """
        if self._token is None:
            if request.url.hostname not in _LOCAL_NAMES:
                raise HTTPException(403, "without a token, only requests to localhost are accepted")
            return
        brought = request.headers.get("authorization", "").removeprefix("Bearer ") or request.cookies.get(_COOKIE, "")
        if not _same(brought, self._token):
            raise HTTPException(401, "the token is missing or wrong: open the address that `megatune ui` printed")

    async def _get(self, request: Request) -> Response:
        self._admit(request)
        name, asked = request.path_params["name"], dict(request.query_params)
        if name in ("started", "offers"):
            return await _answered(self._starter.list if name == "started" else self._new.offers)
        return await _answered(lambda: self.answers.answer(name, asked))

    async def _post(self, request: Request) -> Response:
        """Handle an action. Other websites cannot send this content type without a CORS preflight."""
        self._admit(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body must be application/json")
        if self._read_only:
            raise HTTPException(403, "the server was started with --read_only")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BODY:
                raise HTTPException(413, f"the body has more than {_MOST_BODY:,} bytes")
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise HTTPException(400, "the body is not JSON") from error
        if not isinstance(asked, dict):
            raise HTTPException(400, "the body must be an object")
        return await _answered(lambda: self._do(request.path_params["name"], asked))

    def _do(self, name: str, asked: dict[str, Any]) -> Any:
        def text(key: str) -> str:
            if not isinstance(value := asked.get(key), str):
                raise BadQuestionError(f"{key}: expected a string")
            return value

        if name in ("draft", "first_rows"):
            return self._new.draft(asked) if name == "draft" else self._new.rows(asked)
        if name in ("write", "begin"):
            return self._new.begin(text("file"), text("text"), start=name == "begin")
        if name in ("check", "start"):
            overrides = asked.get("overrides", [])
            if not isinstance(overrides, list) or not all(isinstance(each, str) for each in overrides):
                raise BadQuestionError("overrides: expected a list of key=value")
            if wrong := [each for each in overrides if each.startswith("-") or "=" not in each]:
                raise BadQuestionError(f"overrides: expected key=value, got {wrong[0][:80]!r}")
            findings = self._starter.check(text("file"), overrides)
            number = None if findings or name == "check" else self._starter.start(text("file"), overrides)
            return {"findings": findings, "number": number}
        if name not in ("stop", "resume", "verify"):
            raise KeyError(name)
        folder, run = self.answers.runs.folder(text("run")), text("run")
        if name == "verify":
            return {"problems": details.verify_checkpoint(folder, text("checkpoint"))}
        if self.answers.runs.is_alive(run) is not (name == "stop"):
            raise HTTPException(409, f"{run} is {'not running' if name == 'stop' else 'running'}")
        if name == "resume":
            return {"number": self._starter.resume(folder)}
        request_stop(folder)
        return {"asked": True}


async def _answered(answer: Callable[[], Any]) -> Response:
    """Compute an answer in a worker thread; KeyError becomes 404, BadQuestionError 400."""
    try:
        return JSONResponse(await run_in_threadpool(answer), headers=_HEADERS)
    except KeyError as error:
        raise HTTPException(404, f"there is no {error.args[0]!r}") from error
    except BadQuestionError as error:
        raise HTTPException(400, str(error)) from error


def _same(brought: str, token: str) -> bool:
    return hmac.compare_digest(brought.encode(), token.encode())


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=_HEADERS)


async def _found_wrong(request: Request, error: Exception) -> Response:
    assert isinstance(error, MegatuneError)
    content = {"error": str(error), "findings": [asdict(finding) for finding in error.findings]}
    return JSONResponse(content, HTTPStatus.UNPROCESSABLE_ENTITY, headers=_HEADERS)


async def _failed(request: Request, error: Exception) -> Response:
    # Starlette re-raises the error, for the log.
    return JSONResponse({"error": f"internal error: {type(error).__name__}"}, 500, headers=_HEADERS)
