"""What clients ask: a prompt to make, and how its answer is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatune.data.bad_rows import RowError
from megatune.data.media import picture_source
from megatune.errors import MegatuneError
from megatune.generation.endpoint.bodies import ChatBody, Common, CompletionBody, Image, Message, validated
from megatune.generation.endpoint.errors import ApiError
from megatune.generation.generator import Generator, TooLongError
from megatune.generation.options import Sampling
from megatune.generation.prompt import Prompt

_MOST_STOP_WORDS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be answered.

    Attributes:
        model: the name that was asked for.
        is_chat: a chat completion, not a completion.
        stream: the answer is sent while it is written.
        usage: the stream ends with the numbers of tokens.
        make: makes the prompt; raises ApiError.
    """

    model: str
    is_chat: bool
    stream: bool
    usage: bool
    sampling: Sampling
    make: Callable[[], Prompt]


def read_chat(body: bytes, generator: Generator, defaults: Sampling) -> Asked:
    """Read the body of a chat completion.

    Raises:
        ApiError: (400) it is not one, or asks for what is not built.
    """
    asked = validated(ChatBody, body)
    switches = asked.chat_template_kwargs
    thinking = switches.enable_thinking if switches else None
    return _asked(asked, defaults, lambda: _chat_prompt(asked.messages, thinking, generator), is_chat=True)


def read_completion(body: bytes, generator: Generator, defaults: Sampling) -> Asked:
    """Read the body of a completion.

    Raises:
        ApiError: (400) it is not one, or asks for what is not built.
    """
    asked = validated(CompletionBody, body)
    text = asked.prompt if isinstance(asked.prompt, str) else asked.prompt[0]
    return _asked(asked, defaults, lambda: _fitting(lambda: generator.text_prompt(text), "prompt"), is_chat=False)


def _asked(body: Common, defaults: Sampling, make: Callable[[], Prompt], *, is_chat: bool) -> Asked:
    return Asked(
        model=body.model,
        is_chat=is_chat,
        stream=bool(body.stream),
        usage=body.stream_options is not None and body.stream_options.include_usage,
        sampling=_sampling(body, defaults),
        make=make,
    )


def _sampling(body: Common, defaults: Sampling) -> Sampling:
    """Return how an answer is written: as the request says, else as the endpoint was started."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    for limit in (body.max_tokens, getattr(body, "max_completion_tokens", None)):
        if limit is not None:
            given["max_new_tokens"] = limit
    if body.stop is not None:
        given["stop_words"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if not all(given["stop_words"]):
            raise ApiError(400, "stop: an empty text ends every answer", "stop")
        if len(given["stop_words"]) > _MOST_STOP_WORDS:
            raise ApiError(400, f"stop: {_MOST_STOP_WORDS} texts at most", "stop")
    usual = {name: getattr(defaults, name) for name in Sampling.model_fields}
    try:
        return Sampling(**{**usual, **given, "keep_stop_word": False})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = {"max_new_tokens": "max_tokens"}.get(name := str(problem["loc"][0]), name)
        raise ApiError(400, f"{param}: {problem['msg']}", param) from None


def _chat_prompt(messages: list[Message], thinking: bool | None, generator: Generator) -> Prompt:
    """Write a conversation, with its images where they stand among its text."""
    shown = []
    written: list[Mapping[str, str]] = []
    for number, message in enumerate(messages):
        parts = [message.content] if isinstance(message.content, str) else message.content
        text = ""
        for part in parts:
            if isinstance(part, Image):
                shown.append(_image(part.image_url.url, message.role, f"messages.{number}.content", generator))
                text += shown[-1].placeholder
            else:
                text += part if isinstance(part, str) else part.text
        written.append({"role": "system" if message.role == "developer" else message.role, "content": text})

    def make() -> Prompt:
        if thinking is not None:
            generator.check_thinking()
        return generator.chat_prompt(written, tuple(shown), enable_thinking=thinking)

    return _fitting(make, "messages")


def _image(url: str, role: str, param: str, generator: Generator) -> Any:
    """Read an image of a message: its data, never a file or an address that a client names."""
    if role != "user":
        raise ApiError(400, f"{param}: only user messages may have images", param)
    if generator.pictures is None:
        raise ApiError(400, f"{param}: the model reads text only", param)
    if not url.startswith("data:image/"):
        raise ApiError(400, f"{param}: images are sent as data: URLs; nothing is fetched", param, "invalid_image_url")
    try:
        return generator.pictures.read(picture_source(url, "image", ""))
    except RowError as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_image") from error


def _fitting(make: Callable[[], Prompt], param: str) -> Prompt:
    """Make a prompt; what is wrong with it is said in OpenAI's way."""
    try:
        return make()
    except TooLongError as error:
        raise ApiError(400, _said(error), param, "context_length_exceeded") from error
    except MegatuneError as error:
        raise ApiError(400, _said(error), param) from error


def _said(error: MegatuneError) -> str:
    return "; ".join(f"{each.what} ({each.why})" if each.why else each.what for each in error.findings)
