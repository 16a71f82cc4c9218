"""OpenAI's request bodies: each field is used, neutral, or refused by name."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megatune.generation.endpoint.errors import ApiError

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


class Image(_Body):
    """A part of a message."""

    type: Literal["image_url"]
    image_url: _Url


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[_Text | Image, Field(discriminator="type")]]
    # What answers of other endpoints carry, and histories then bring back, empty.
    name: None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


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
    message = f"{param}: {first['msg']}" if param else first["msg"]
    return ApiError(400, message, param, "invalid_json" if first["type"] == "json_invalid" else None)
