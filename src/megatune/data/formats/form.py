"""The form of a data set's rows, i.e. their columns and tags, and how it is detected from a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

Formatting = Literal["alpaca", "sharegpt", "openai", "query_response", "text", "ms_swift"]
# The values of dataset_info.json; ms_swift is the format of ms-swift's command lines.
FORMATTINGS: tuple[Formatting, ...] = get_args(Formatting)[:-1]

# Names of columns, in order of precedence; a name in `columns` takes precedence over these.
MESSAGES_NAMES = ("messages", "conversations", "conversation")
QUERY_NAMES = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSE_NAMES = ("response", "answer", "output", "target", "solution", "completion")
SYSTEM_NAMES = ("system", "system_prompt")
TEXT_NAMES = ("text", "content")
REJECTED_NAMES = ("rejected_response", "rejected_messages")  # ms-swift's
TAG_NAMES = ("kto_tag", "label")  # LLaMA-Factory's, and ms-swift's and TRL's
_MEDIA_NAMES = (("images", "image"), ("videos", "video"), ("audios", "audio"))
# Alternative names of a column, each with the name of its field in `Columns`.
_SAME = {usual: names[0] for names in (SYSTEM_NAMES, *_MEDIA_NAMES) for usual in names[1:]}


@dataclass(frozen=True, slots=True)
class Columns:
    """The column of each part of a row (the `columns` block of dataset_info.json); None turns a column off."""

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = "history"
    messages: str | None = "conversations"
    system: str | None = "system"
    tools: str | None = "tools"
    images: str | None = "images"
    videos: str | None = "videos"
    audios: str | None = "audios"
    chosen: str | None = "chosen"
    rejected: str | None = "rejected"
    kto_tag: str | None = None
    margin: str | None = "margin"
    label: str | None = "label"


@dataclass(frozen=True, slots=True)
class Tags:
    """The keys and roles of messages (the `tags` block of dataset_info.json)."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a data set's rows.

    Attributes:
        ranking: rows are preference pairs. If `columns` has a kto_tag, rows are desirable or undesirable answers.
        swift_version: the version of ms-swift whose rules read rows of formatting ms_swift.
        renames: the data set's name -> ms-swift's name of columns, for formatting ms_swift.
        fields: the columns of the first rows, for formatting ms_swift; they are null in rows that lack them.
    """

    formatting: Formatting = "alpaca"
    columns: Columns = Columns()
    tags: Tags = Tags()
    ranking: bool = False
    swift_version: int = 0
    renames: tuple[tuple[str, str], ...] = ()
    fields: tuple[str, ...] = ()


OPENAI_TAGS = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")
# The defaults of each formatting; the names of queries and responses are looked up in each row.
DEFAULT_FORMS: dict[Formatting, Form] = {
    "alpaca": Form(),
    "sharegpt": Form("sharegpt"),
    "openai": Form("openai", Columns(messages="messages"), OPENAI_TAGS),
    "query_response": Form("query_response", Columns(prompt=None, query=None, response=None)),
    "text": Form("text", Columns(prompt="text")),
}


USUAL_NAMES: frozenset[str] = frozenset((
    *(str(field.default) for field in fields(Columns) if field.default), *MESSAGES_NAMES, *QUERY_NAMES, *RESPONSE_NAMES,
    *SYSTEM_NAMES, *TEXT_NAMES, *REJECTED_NAMES, *TAG_NAMES, *(name for names in _MEDIA_NAMES for name in names),
))  # fmt: skip


def detect_named(row: Mapping[str, object], own: Mapping[str, str]) -> Form | None:
    """Detect the form of a row as if its columns had their standard names; return it with the columns' own names.

    Args:
        own: standard name -> own name of columns, which this row need not have. See `own_names`.
    """
    taken = {name: usual for usual, name in own.items()}
    usual = {name: value for name, value in row.items() if name not in own and name not in taken}
    form = detect(usual | {taken[name]: value for name, value in row.items() if name in taken})
    if form is None:
        return None
    named = {field.name: getattr(form.columns, field.name) for field in fields(Columns)}
    if form.formatting == "query_response":
        named |= {"prompt": _first(own, QUERY_NAMES), "response": _first(own, RESPONSE_NAMES)}
    named = {part: column and own.get(column, column) for part, column in named.items()}
    return replace(form, columns=Columns(**named))


def columns_by_own_name(columns: Mapping[str, str], names: Iterable[str]) -> Mapping[str, str] | None:
    """Return own name -> standard name of columns written in this order, or as in LLaMA-Factory, with the part of a row
    first: {prompt: question_text}. Return None if the fields of rows fit both.

    Args:
        names: the fields of rows.
    """
    there, parts = {name.lower() for name in names}, {field.name: field.default for field in fields(Columns)}
    own, values = ([name.lower() in there for name in each] for each in (columns.keys(), columns.values()))
    if not columns.keys() <= parts.keys() or all(name == usual for name, usual in columns.items()):
        return columns
    if all(own) and all(values):
        return None
    if not (all(values) or (not any(own) and (any(values) or not USUAL_NAMES.issuperset(columns.values())))):
        return columns
    usual = {part: str(default or part) for part, default in parts.items()}
    if "prompt" not in columns:  # alpaca's `query` is the input of an instruction
        usual["query"] = "query"
    return {name: usual[part] for part, name in columns.items()}


def own_names(columns: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return standard name -> own name of the columns that rows have, ignoring case.

    Args:
        columns: own name -> standard name; the first one wins if two have the same standard name.
        names: the fields of rows.
    """
    found = {name.lower(): name for name in names} | {name: name for name in names}
    own: dict[str, str] = {}
    for name, usual in columns.items():
        if (there := found.get(name) or found.get(name.lower())) is not None:
            own.setdefault(_SAME.get(usual, usual), there)
    return own


def detect(fields: Mapping[str, object]) -> Form | None:
    """Detect the form of a row; return None if no rule matches its fields.

    Fields that are null are ignored, unless nothing matches without them. The first matching rule decides:

    1. messages, conversations or conversation: sharegpt or openai. Tags are detected from the first message's keys
       (role or from, content or value) and from the roles in the row (human and gpt, or user and assistant).
    2. A rejected answer, and `chosen` or `prompt` a list of messages: the same, with `prompt` as messages if it is such
       a list; otherwise each answer is a whole conversation, and `prompt` only repeats its beginning.
    3. `prompt` a list of messages and a response under one of its names: the same, with `prompt` as messages.
    4. instruction, and not query or prompt without input and output: alpaca, its response the first of output and
       `RESPONSE_NAMES`.
    5. A query and a response (or a rejected answer) under one of their names: query_response.
    6. text or content: text.
    7. A query or a response alone under one of its names: query_response.

    A row with rejected, rejected_response or rejected_messages is a preference pair. The tag for stage kto is kto_tag
    or label.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    return _form(present) or _form(fields)


def _form(fields: Mapping[str, Any]) -> Form | None:
    ranking = any(name in fields for name in ("rejected", *REJECTED_NAMES))
    if (messages := _first(fields, MESSAGES_NAMES)) is not None:
        return _chat_form(fields, messages, fields[messages], ranking)
    if ranking and _is_messages(fields.get("prompt")):
        return _chat_form(fields, "prompt", fields["prompt"], ranking)
    if ranking and _is_messages(fields.get("chosen"), at_least=2):
        return _chat_form(fields, None, fields["chosen"], ranking)
    if _is_messages(fields.get("prompt")) and (response := _first(fields, RESPONSE_NAMES)):
        return _chat_form(fields, "prompt", fields["prompt"], ranking, response)
    answers = (fields.get(name) for name in ("chosen", "rejected", *REJECTED_NAMES))
    listed = next((answer for answer in answers if isinstance(answer, (list, dict))), None)
    tags = Tags() if listed is None else _tags(listed, "messages")
    if "instruction" in fields and (fields.keys() & {"input", "output"} or not fields.keys() & {"query", "prompt"}):
        output = _first(fields, ("output", *RESPONSE_NAMES)) or "output"
        return Form("alpaca", _columns(fields, response=output), tags, ranking)
    query, response = _first(fields, QUERY_NAMES), _first(fields, RESPONSE_NAMES)
    by_name = Form("query_response", _columns(fields, prompt=None, query=None, response=None), tags, ranking)
    if query and (response or ranking):
        return by_name
    if (text := _first(fields, TEXT_NAMES)) is not None:
        return Form("text", _columns(fields, prompt=text), tags)
    return by_name if query or response else None


def _chat_form(
    fields: Mapping[str, Any], column: str | None, messages: object, ranking: bool, response: str | None = None
) -> Form:
    tags, named = _tags(messages, column or "messages"), {} if response is None else {"response": response}
    formatting: Formatting = "openai" if (tags.role_tag, tags.user_tag) == ("role", "user") else "sharegpt"
    return Form(formatting, _columns(fields, messages=column, **named), tags, ranking)


def _columns(fields: Mapping[str, Any], **named: str | None) -> Columns:
    media = {plural: singular for plural, singular in _MEDIA_NAMES if singular in fields and plural not in fields}
    # A column that this row lacks keeps its standard name, for the rows that have it.
    system = _first(fields, SYSTEM_NAMES) or "system"
    rejected = _first(fields, ("rejected", *REJECTED_NAMES)) or "rejected"
    return Columns(**media, system=system, rejected=rejected, kto_tag=_first(fields, TAG_NAMES), **named)


def _tags(messages: object, column: str) -> Tags:
    """Detect the tags of a row's messages; use the usual tags of the column if they cannot be detected."""
    found = [messages] if isinstance(messages, dict) else messages if isinstance(messages, list) else []
    items = [item for item in found if isinstance(item, dict)]
    first = items[0] if items else {}
    openai = column not in ("conversations", "conversation")
    role = "role" if "role" in first else "from" if "from" in first else "role" if openai else "from"
    content = "content" if "content" in first else "value" if "value" in first else "content" if openai else "value"
    roles = [item.get(role) for item in items]
    is_sharegpt = any(word in roles for word in ("human", "gpt"))
    is_openai = not is_sharegpt and (role == "role" or any(word in roles for word in ("user", "assistant")))
    user, assistant, usual = ("user", "assistant", "tool") if is_openai else ("human", "gpt", "observation")
    observation = next((word for word in ("observation", "tool") if word in roles), usual)
    return Tags(role, content, user, assistant, observation, "function_call", "system")


def _is_messages(value: object, at_least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= at_least and all(isinstance(item, dict) for item in value)


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in fields), None)
