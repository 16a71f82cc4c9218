"""What clients ask: OpenAI's request bodies, each field used, neutral or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatune.data.bad_rows import RowError
from megatune.data.media.sources import picture_source
from megatune.errors import MegatuneError
from megatune.generation.endpoint.errors import ApiError
from megatune.generation.options import Sampling, out_of_range
from megatune.generation.prompt import Prompt
from megatune.generation.prompter import Prompter, TooLongError

_MOST_STOP_WORDS = 16
# Fields that would change an answer, at the values at which they don't; None is always one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "min_p": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
# Fields that change nothing about an answer.
_PASSED_OVER = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Url(_Body):
    url: str
    detail: str | None = None  # OpenAI's choice of a size; images have the sizes of the settings here


class _Text(_Body):
    type: Literal["text"]
    text: str


class _Image(_Body):
    type: Literal["image_url"]
    image_url: _Url


class _Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[_Text | _Image, Field(discriminator="type")]]
    name: None = None
    refusal: None = None


class _TemplateSwitches(_Body):
    enable_thinking: bool | None = None


class _Common(_Body):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class _ChatBody(_Common):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    chat_template_kwargs: _TemplateSwitches | None = None


class _CompletionBody(_Common):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]


_Kind = TypeVar("_Kind", bound=_Common)


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


def read_chat(body: bytes, prompter: Prompter, defaults: Sampling) -> Asked:
    """Read the body of a chat completion.

    Raises:
        ApiError: (400) it is not one, or asks for what is not built.
    """
    asked = _validated(_ChatBody, body)
    switches = asked.chat_template_kwargs
    thinking = switches.enable_thinking if switches else None
    return _asked(asked, defaults, lambda: _chat_prompt(asked.messages, thinking, prompter), is_chat=True)


def read_completion(body: bytes, prompter: Prompter, defaults: Sampling) -> Asked:
    """Read the body of a completion.

    Raises:
        ApiError: (400) it is not one, or asks for what is not built.
    """
    asked = _validated(_CompletionBody, body)
    text = asked.prompt if isinstance(asked.prompt, str) else asked.prompt[0]
    return _asked(asked, defaults, lambda: _fitting(lambda: prompter.text_prompt(text), "prompt"), is_chat=False)


def _validated(kind: type[_Kind], body: bytes) -> _Kind:
    """Check a body, less the fields that change nothing.

    Raises:
        ApiError: (400) naming the field.
    """
    try:
        fields = _Fields.model_validate_json(body).__pydantic_extra__ or {}
        for name, neutral in _NEUTRAL.items():
            value = fields.pop(name, None)
            if value is not None and repr(value) not in map(repr, neutral):  # of 0 and False, each is meant
                only = f"only {json.dumps(neutral[0])} is built" if neutral else "is not built"
                raise ApiError(400, f"{name}: {only}; leave it out", name, "unsupported_parameter")
        for name in _PASSED_OVER:
            fields.pop(name, None)
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


class _Fields(BaseModel):
    """Any object of JSON."""

    model_config = ConfigDict(extra="allow")


def _invalid(error: ValidationError) -> ApiError:
    """Say what is wrong with the first wrong field."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(map(str, first["loc"])) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {param}", param, "unknown_parameter")
    message = f"{param}: {first['msg']}" if param else first["msg"]
    return ApiError(400, message, param, "invalid_json" if first["type"] == "json_invalid" else None)


def _asked(body: _Common, defaults: Sampling, make: Callable[[], Prompt], *, is_chat: bool) -> Asked:
    return Asked(
        model=body.model,
        is_chat=is_chat,
        stream=bool(body.stream),
        usage=body.stream_options is not None and body.stream_options.include_usage,
        sampling=_sampling(body, defaults),
        make=make,
    )


def _sampling(body: _Common, defaults: Sampling) -> Sampling:
    """Return how an answer is written: as the request says, else as the endpoint was started."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    limits = {"max_tokens": body.max_tokens, "max_completion_tokens": getattr(body, "max_completion_tokens", None)}
    for value in limits.values():
        if value is not None:
            given["max_new_tokens"] = value
    if body.stop is not None:
        given["stop_words"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        if len(given["stop_words"]) > _MOST_STOP_WORDS:
            raise ApiError(400, f"stop: {_MOST_STOP_WORDS} texts at most", "stop")
    sampling = replace(defaults, **given, keep_stop_word=False)
    for finding in out_of_range(sampling):
        param = {"max_new_tokens": "max_tokens", "stop_words": "stop"}.get(finding.where[2:], finding.where[2:])
        raise ApiError(400, f"{param}: {finding.what}", param)
    return sampling


def _chat_prompt(messages: list[_Message], thinking: bool | None, prompter: Prompter) -> Prompt:
    """Write a conversation, with its images where they stand among its text."""
    shown = []
    written: list[Mapping[str, str]] = []
    for number, message in enumerate(messages):
        parts = [message.content] if isinstance(message.content, str) else message.content
        text = ""
        for part in parts:
            if isinstance(part, _Image):
                shown.append(_image(part.image_url.url, message.role, f"messages.{number}.content", prompter))
                text += shown[-1].placeholder
            else:
                text += part if isinstance(part, str) else part.text
        written.append({"role": "system" if message.role == "developer" else message.role, "content": text})

    def make() -> Prompt:
        if thinking is not None:
            prompter.check_thinking()
        return prompter.chat_prompt(written, tuple(shown), enable_thinking=thinking)

    return _fitting(make, "messages")


def _image(url: str, role: str, param: str, prompter: Prompter) -> Any:
    """Read an image of a message: its data, never a file or an address that a client names."""
    if role != "user":
        raise ApiError(400, f"{param}: images are the user's", param)
    if prompter.pictures is None:
        raise ApiError(400, f"{param}: the model reads text only", param)
    if not url.startswith("data:image/"):
        raise ApiError(400, f"{param}: images are sent as data: URLs; nothing is fetched", param, "invalid_image_url")
    try:
        return prompter.pictures.read(picture_source(url, "image", ""))
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
