"""The names of columns, and the keys and roles of messages, in rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

# Names of columns, in order of precedence; a name in `columns` takes precedence over these.
MESSAGES_NAMES = ("messages", "conversations", "conversation")
QUERY_NAMES = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSE_NAMES = ("response", "answer", "output", "target", "solution", "completion")
SYSTEM_NAMES = ("system", "system_prompt")
TEXT_NAMES = ("text", "content")
REJECTED_NAMES = ("rejected_response", "rejected_messages")  # ms-swift's
TAG_NAMES = ("kto_tag", "label")  # LLaMA-Factory's, and ms-swift's and TRL's
MEDIA_NAMES = (("images", "image"), ("videos", "video"), ("audios", "audio"))
# Alternative names of a column, each with the name of its field in `Columns`.
_SAME = {usual: names[0] for names in (SYSTEM_NAMES, *MEDIA_NAMES) for usual in names[1:]}


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


COLUMNS, TAGS = Columns(), Tags()
OPENAI_TAGS = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")
USUAL_NAMES: frozenset[str] = frozenset((
    *(str(field.default) for field in fields(Columns) if field.default), *MESSAGES_NAMES, *QUERY_NAMES, *RESPONSE_NAMES,
    *SYSTEM_NAMES, *TEXT_NAMES, *REJECTED_NAMES, *TAG_NAMES, *(name for names in MEDIA_NAMES for name in names),
))  # fmt: skip


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


def detected_columns(fields: Collection[str], **named: str | None) -> Columns:
    """Return the columns of a row with these fields; one that it lacks keeps its standard name, for other rows."""
    media = {plural: singular for plural, singular in MEDIA_NAMES if singular in fields and plural not in fields}
    system = first_named(fields, SYSTEM_NAMES) or "system"
    rejected = first_named(fields, ("rejected", *REJECTED_NAMES)) or "rejected"
    return Columns(**media, system=system, rejected=rejected, kto_tag=first_named(fields, TAG_NAMES), **named)


def has_rejected(fields: Collection[str]) -> bool:
    """Return whether the fields are those of a preference pair."""
    return first_named(fields, ("rejected", *REJECTED_NAMES)) is not None


def first_named(fields: Collection[str], names: Sequence[str]) -> str | None:
    """Return the first of the names that is one of the fields."""
    return next((name for name in names if name in fields), None)
