"""What clients get: OpenAI's objects of an answer, whole or in chunks."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from megatune.generation.endpoint.requests import Asked
from megatune.generation.prompt import Prompt, Reply


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
