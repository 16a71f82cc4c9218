"""What clients ask: OpenAI's bodies, of which each field is used, neutral, or refused by name; the prompt to make of
one, and how its answer is written."""

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
_MOST_STOP_WORDS = 16


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


class Image(_Body):
    """A part of a message."""

    type: Literal["image_url"]
    image_url: _Url


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[_Text | Image, Field(discriminator="type")]]
    # What answers of other endpoints carry, and histories then bring back, empty.
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


class Common(_Body):
    """What both routes take."""

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


class ChatBody(Common):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    chat_template_kwargs: _TemplateSwitches | None = None


class CompletionBody(Common):
    """The body of a completion: one text."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]


_Kind = TypeVar("_Kind", bound=Common)


def validated(kind: type[_Kind], body: bytes) -> _Kind:
    """Check a body, less the fields that change nothing.

    Raises:
        ApiError: (400) naming the field.
    """
    try:
        fields = _OBJECT.validate_json(body)
        for name, neutral in _NEUTRAL.items():
            value = fields.pop(name, None)
            if value is not None and repr(value) not in map(repr, neutral):  # of 0 and False, each is meant
                only = f"only {json.dumps(neutral[0])} is supported" if neutral else "is not supported"
                raise ApiError(400, f"{name}: {only}; leave it out", name, "unsupported_parameter")
        for name in _PASSED_OVER:
            fields.pop(name, None)
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


_OBJECT = TypeAdapter(dict[str, Any])
# By pydantic's types of errors; the second is of `Message._empty`.
_CODES = {"json_invalid": "invalid_json", "value_error": "unsupported_parameter"}
# Of fields, in places of errors.
_NAMES = {name for kind in (ChatBody, CompletionBody, Message) for name in kind.model_fields} | {"include_usage"}


def _invalid(error: ValidationError) -> ApiError:
    """Say what is wrong with the first wrong field."""
    first = error.errors(include_url=False, include_input=False)[0]
    is_unknown = first["type"] == "extra_forbidden"
    # Behind the names of fields come pydantic's names of types.
    named = takewhile(lambda each: isinstance(each, int) or each in _NAMES or is_unknown, first["loc"])
    param = ".".join(map(str, named)) or None
    if is_unknown:
        return ApiError(400, f"unknown parameter: {param}", param, "unknown_parameter")
    said = first["msg"].removeprefix("Value error, ")
    message = f"{param}: {said}" if param else said
    return ApiError(400, message, param, _CODES.get(first["type"]))


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
        return generator.pictures.read(media_source(url, "image", ""))
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
