"""What clients get: OpenAI's objects of an answer, whole or in chunks, or of what is wrong."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from megatune.generation.prompt import Prompt, Reply

if TYPE_CHECKING:
    from megatune.generation.endpoint.requests import Asked


class ApiError(Exception):
    """Ends a request.

    Args:
        status: of HTTP.
        message: for people.
        param: the field of the request that is wrong.
        code: for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer over HTTP."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(self.status)
        return JSONResponse(self.body, self.status, headers)


class Answer:
    """The objects of one answer, which share an id.

    Args:
        asked: the request.
        prompt: of which the tokens are counted.
    """

    def __init__(self, asked: Asked, prompt: Prompt) -> None:
        self._asked, self._num_prompt_tokens = asked, len(prompt.token_ids)
        kind = "chat.completion" if asked.is_chat else "text_completion"
        if asked.is_chat and asked.stream:
            kind += ".chunk"
        prefix = "chatcmpl" if asked.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return an answer in one piece."""
        if self._asked.is_chat:
            text: dict[str, Any] = {"message": {"role": "assistant", "content": reply.text, "refusal": None}}
        else:
            text = {"text": reply.text}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": _reason(reply)}
        return {**self._head, "choices": [choice], "usage": self._usage(reply)}

    def first(self) -> bytes:
        """Return what a stream begins with: of a chat, who speaks."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self._asked.is_chat else b""

    def piece(self, text: str) -> bytes:
        """Return the next piece of text."""
        return self._chunk({"delta": {"content": text}} if self._asked.is_chat else {"text": text})

    def last(self, reply: Reply) -> bytes:
        """Return the end of a stream: why it ends, and the numbers of tokens where they are asked for."""
        end = self._chunk({"delta": {}} if self._asked.is_chat else {"text": ""}, _reason(reply))
        if self._asked.usage:
            end += event({**self._head, "choices": [], "usage": self._usage(reply)})
        return end + b"data: [DONE]\n\n"

    def _chunk(self, text: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._asked.usage else {}
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
