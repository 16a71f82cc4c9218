"""OpenAI's response objects: answers, whole or in chunks, and errors."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from megatune.generation.prompt import Prompt, Reply

if TYPE_CHECKING:
    from megatune.generation.endpoint.requests import ApiRequest


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status.
        message: human-readable message.
        param: the invalid field of the request.
        code: machine-readable code.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(self.status)
        return JSONResponse(self.body, self.status, headers)


class ApiResponse:
    """The response objects of one answer, with a common id.

    Args:
        request: the request.
        prompt: the prompt, for the number of its tokens.
    """

    def __init__(self, request: ApiRequest, prompt: Prompt) -> None:
        self._request, self._num_prompt_tokens = request, len(prompt.token_ids)
        kind = "chat.completion" if request.is_chat else "text_completion"
        if request.is_chat and request.stream:
            kind += ".chunk"
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return an answer in one piece."""
        if self._request.is_chat:
            text: dict[str, Any] = {"message": {"role": "assistant", "content": reply.text, "refusal": None}}
        else:
            text = {"text": reply.text}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": _reason(reply)}
        return {**self._head, "choices": [choice], "usage": self._usage(reply)}

    def first(self) -> bytes:
        """Return the beginning of a stream: in a chat, the role."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self._request.is_chat else b""

    def piece(self, text: str) -> bytes:
        """Return the next piece of text."""
        return self._chunk({"delta": {"content": text}} if self._request.is_chat else {"text": text})

    def last(self, reply: Reply) -> bytes:
        """Return the end of a stream: the finish reason, and the numbers of tokens if requested."""
        end = self._chunk({"delta": {}} if self._request.is_chat else {"text": ""}, _reason(reply))
        if self._request.usage:
            end += event({**self._head, "choices": [], "usage": self._usage(reply)})
        return end + b"data: [DONE]\n\n"

    def _chunk(self, text: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._request.usage else {}
        return event({**self._head, "choices": [choice], **usage})

    def _usage(self, reply: Reply) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": reply.num_tokens,
            "total_tokens": self._num_prompt_tokens + reply.num_tokens,
        }


def event(content: dict[str, Any]) -> bytes:
    """Return an object as a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def _reason(reply: Reply) -> str:
    return "stop" if reply.stopped else "length"
