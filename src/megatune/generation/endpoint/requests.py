"""Parses OpenAI's request bodies, in which every field is used, ignored, or rejected by name, to a prompt and sampling
options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from megatune.data.bad_rows import RowError
from megatune.data.media import media_source
from megatune.errors import MegatuneError
from megatune.generation.endpoint.responses import ApiError
from megatune.generation.generator import Generator, TooLongError
from megatune.generation.options import Sampling
from megatune.generation.prompt import Prompt

# Fields that would change an answer, with the values that do not; None is always allowed.
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
# Fields that do not affect an answer.
_IGNORED = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip
_MAX_STOP_WORDS = 16


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Url(_Body):
    url: str
    detail: str | None = None  # OpenAI's choice of a size; ignored, since options set the size of images


class _TextPart(_Body):
    type: Literal["text"]
    text: str


class Image(_Body):
    """A part of a message."""

    type: Literal["image_url"]
    image_url: _Url


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[_TextPart | Image, Field(discriminator="type")]]
    # Fields of other endpoints' answers, which histories contain empty.
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None

    @field_validator("name", "refusal", "annotations", "audio", "function_call", "tool_calls")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        if value not in (None, "", [], {}):
            raise ValueError("is not supported; leave it out")
        return value


class _TemplateSwitches(_Body):
    enable_thinking: bool | None = None


class CommonBody(_Body):
    """The fields of both routes."""

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


class ChatBody(CommonBody):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    chat_template_kwargs: _TemplateSwitches | None = None


class CompletionBody(CommonBody):
    """The body of a completion, with one text."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]


_Kind = TypeVar("_Kind", bound=CommonBody)


def parse_body(kind: type[_Kind], body: bytes) -> _Kind:
    """Parse a body, ignoring fields that have no effect.

    Raises:
        ApiError: (400) naming the invalid field.
    """
    try:
        fields = _OBJECT.validate_json(body)
        for name, neutral in _NEUTRAL.items():
            value = fields.pop(name, None)
            if value is not None and repr(value) not in map(repr, neutral):  # 0 and False differ
                only = f"only {json.dumps(neutral[0])} is supported" if neutral else "is not supported"
                raise ApiError(400, f"{name}: {only}; leave it out", name, "unsupported_parameter")
        for name in _IGNORED:
            fields.pop(name, None)
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


_OBJECT = TypeAdapter(dict[str, Any])
# By pydantic's error types; value_error is raised by `Message._empty`.
_CODES = {"json_invalid": "invalid_json", "value_error": "unsupported_parameter"}
# Names of fields in the locations of errors.
_NAMES = {name for kind in (ChatBody, CompletionBody, Message) for name in kind.model_fields} | {"include_usage"}


def _invalid(error: ValidationError) -> ApiError:
    """Return the error of the first invalid field."""
    first = error.errors(include_url=False, include_input=False)[0]
    is_unknown = first["type"] == "extra_forbidden"
    # pydantic appends names of types to the names of fields.
    named = takewhile(lambda each: isinstance(each, int) or each in _NAMES or is_unknown, first["loc"])
    param = ".".join(map(str, named)) or None
    if is_unknown:
        return ApiError(400, f"unknown parameter: {param}", param, "unknown_parameter")
    text = first["msg"].removeprefix("Value error, ")
    message = f"{param}: {text}" if param else text
    return ApiError(400, message, param, _CODES.get(first["type"]))


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A valid request.

    Attributes:
        model: the requested name.
        is_chat: whether it is a chat completion.
        stream: whether the answer is streamed.
        usage: whether the stream ends with the numbers of tokens.
        make: builds the prompt; raises ApiError.
    """

    model: str
    is_chat: bool
    stream: bool
    usage: bool
    sampling: Sampling
    make: Callable[[], Prompt]


def read_chat(body: bytes, generator: Generator, defaults: Sampling) -> ApiRequest:
    """Read the body of a chat completion.

    Raises:
        ApiError: (400) it is not one, or has an unsupported field.
    """
    asked = parse_body(ChatBody, body)
    switches = asked.chat_template_kwargs
    thinking = switches.enable_thinking if switches else None
    return _api_request(asked, defaults, lambda: _chat_prompt(asked.messages, thinking, generator), is_chat=True)


def read_completion(body: bytes, generator: Generator, defaults: Sampling) -> ApiRequest:
    """Read the body of a completion.

    Raises:
        ApiError: (400) it is not one, or has an unsupported field.
    """
    asked = parse_body(CompletionBody, body)
    text = asked.prompt if isinstance(asked.prompt, str) else asked.prompt[0]
    return _api_request(asked, defaults, lambda: _build(lambda: generator.text_prompt(text), "prompt"), is_chat=False)


def _api_request(body: CommonBody, defaults: Sampling, make: Callable[[], Prompt], *, is_chat: bool) -> ApiRequest:
    return ApiRequest(
        model=body.model,
        is_chat=is_chat,
        stream=bool(body.stream),
        usage=body.stream_options is not None and body.stream_options.include_usage,
        sampling=_sampling(body, defaults),
        make=make,
    )


def _sampling(body: CommonBody, defaults: Sampling) -> Sampling:
    """Return the sampling options of a request, with the endpoint's defaults."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    for limit in (body.max_tokens, getattr(body, "max_completion_tokens", None)):
        if limit is not None:
            given["max_new_tokens"] = limit
    if body.stop is not None:
        given["stop_words"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if not all(given["stop_words"]):
            raise ApiError(400, "stop: an empty text ends every answer", "stop")
        if len(given["stop_words"]) > _MAX_STOP_WORDS:
            raise ApiError(400, f"stop: at most {_MAX_STOP_WORDS} texts are supported", "stop")
    usual = {name: getattr(defaults, name) for name in Sampling.model_fields}
    try:
        return Sampling(**{**usual, **given, "keep_stop_word": False})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = {"max_new_tokens": "max_tokens"}.get(name := str(problem["loc"][0]), name)
        raise ApiError(400, f"{param}: {problem['msg']}", param) from None


def _chat_prompt(messages: list[Message], thinking: bool | None, generator: Generator) -> Prompt:
    """Return the prompt of a conversation, with its images between its texts."""
    media = []
    written: list[Mapping[str, str]] = []
    for number, message in enumerate(messages):
        parts = [message.content] if isinstance(message.content, str) else message.content
        text = ""
        for part in parts:
            if isinstance(part, Image):
                media.append(_image(part.image_url.url, message.role, f"messages.{number}.content", generator))
                text += media[-1].placeholder
            else:
                text += part if isinstance(part, str) else part.text
        written.append({"role": "system" if message.role == "developer" else message.role, "content": text})

    def make() -> Prompt:
        if thinking is not None:
            generator.check_thinking()
        return generator.chat_prompt(written, tuple(media), enable_thinking=thinking)

    return _build(make, "messages")


def _image(url: str, role: str, param: str, generator: Generator) -> Any:
    """Read the image of a data: URL; files and other URLs are refused."""
    if role != "user":
        raise ApiError(400, f"{param}: only user messages may have images", param)
    if generator.media is None:
        raise ApiError(400, f"{param}: the model reads text only", param)
    if not url.startswith("data:image/"):
        raise ApiError(400, f"{param}: images are sent as data: URLs; nothing is fetched", param, "invalid_image_url")
    try:
        return generator.media.read(media_source(url, "image", ""))
    except RowError as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_image") from error


def _build(make: Callable[[], Prompt], param: str) -> Prompt:
    """Build a prompt, and convert its errors to OpenAI's form."""
    try:
        return make()
    except TooLongError as error:
        raise ApiError(400, _text(error), param, "context_length_exceeded") from error
    except MegatuneError as error:
        raise ApiError(400, _text(error), param) from error


def _text(error: MegatuneError) -> str:
    return "; ".join(f"{each.what} ({each.why})" if each.why else each.what for each in error.findings)
