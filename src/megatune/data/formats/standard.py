"""The formats of dataset_info.json: a text, alpaca, a query and a response, and messages (ShareGPT's or OpenAI's)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Message
from megatune.data.formats.base import Answer, ChatFormat, StagedFormat, read_answer, without_last
from megatune.data.formats.columns import (
    MESSAGES_NAMES,
    QUERY_NAMES,
    REJECTED_NAMES,
    RESPONSE_NAMES,
    SYSTEM_NAMES,
    TEXT_NAMES,
    Tags,
    detected_columns,
    first_named,
    has_rejected,
)
from megatune.data.formats.fields import (
    encodable,
    extract_media,
    field_names,
    first_present,
    missing_field,
    optional_string,
    short,
    string,
)
from megatune.data.formats.messages import Messages, check_turns, described, messages_of, tags_of_messages


@dataclass(frozen=True)
class _StringsFormat(ChatFormat):
    """A format of rows of strings, with the earlier turns in a list of pairs."""

    query_names: ClassVar[tuple[str, ...]] = QUERY_NAMES
    response_names: ClassVar[tuple[str, ...]] = RESPONSE_NAMES

    def messages(self, row: Mapping[str, Any], stage: str) -> Messages:
        # The answers in the history are trained, too.
        return _listed(self._prompt(row), _answer(row, _column(row, self._answered_in)))

    def question(self, row: Mapping[str, Any]) -> Messages:
        prompt, answer = self._prompt(row), optional_string(row, first_present(row, self._answered_in))
        return _listed(prompt, Message("assistant", answer) if answer else None)

    def prompts(self, row: Mapping[str, Any], chosen: Answer | None, rejected: Answer) -> tuple[list[Messages], Answer]:
        if chosen is None:
            columns = self.columns
            name = first_present(row, self._answered_in) or columns.chosen or columns.response or "chosen"
            chosen = Answer(_answer(row, name), None, name)
        # A string next to whole conversations only repeats their beginning.
        stated = [answer.before for answer in (chosen, rejected) if answer.before is not None]
        return stated or [_listed(self._prompt(row))], chosen

    @property
    def _asked_in(self) -> tuple[str | None, ...]:
        return self._names(self.columns.prompt, self.query_names)

    @property
    def _answered_in(self) -> tuple[str | None, ...]:
        return self._names(self.columns.response, self.response_names)

    def _names(self, own: str | None, usual: tuple[str, ...]) -> tuple[str | None, ...]:
        """Return the columns that may have a part: the named one, and others if they are looked up in each row."""
        return (own or usual[0],) if self.parts else (own, *usual)

    def _prompt(self, row: Mapping[str, Any]) -> list[Message]:
        """Read the history, then the user's message: the query, or instruction and input joined by a line break."""
        columns, messages = self.columns, _history(row, self.columns.history)
        name = _column(row, self._asked_in)
        content, fields = string(row, name), f"field {name!r}"
        if columns.query is not None and columns.query in row:
            content = "\n".join(filter(None, (content, optional_string(row, columns.query))))
            fields = f"fields {name!r} and {columns.query!r}"
        if not content or content.isspace():
            raise RowError("empty-message", "an empty user message", fields)
        return [*messages, Message("user", content)]


@dataclass(frozen=True)
class AlpacaFormat(_StringsFormat):
    """Rows of an instruction, an input and an output."""

    formatting = "alpaca"
    parts = ("prompt", "query", "history", "response")
    query_names, response_names = ("instruction",), ("output",)

    @classmethod
    def detect(cls, fields: Mapping[str, Any]) -> Self | None:
        """Match instruction, and not query or prompt without input and output. The response is the first of output and
        its other names."""
        is_query = fields.keys() & {"query", "prompt"} and not fields.keys() & {"input", "output"}
        if "instruction" not in fields or is_query:
            return None
        output = first_named(fields, ("output", *RESPONSE_NAMES)) or "output"
        return cls(detected_columns(fields, response=output), _answer_tags(fields), has_rejected(fields))

    def text(self, row: Mapping[str, Any]) -> tuple[str, str]:
        name = _column(row, self._asked_in)
        return string(row, name), name


@dataclass(frozen=True)
class QueryFormat(_StringsFormat):
    """Rows of a query and a response, each in the named column or the first under its names that is not null."""

    formatting = "query_response"
    system_names = SYSTEM_NAMES

    @classmethod
    def detect(cls, fields: Mapping[str, Any]) -> Self | None:
        """Match a query and a response (or a rejected answer); one of them alone if there is no text or content."""
        query, response = (first_named(fields, names) for names in (QUERY_NAMES, RESPONSE_NAMES))
        ranking, text = has_rejected(fields), first_named(fields, TEXT_NAMES)
        if (query and (response or ranking)) or ((query or response) and not text):
            return cls(detected_columns(fields, prompt=None, query=None, response=None), _answer_tags(fields), ranking)
        return None

    def with_own_names(self, own: Mapping[str, str]) -> Self:
        named = super().with_own_names(own)
        asked, answered = (own.get(first_named(own, names) or "") for names in (QUERY_NAMES, RESPONSE_NAMES))
        return replace(named, columns=replace(named.columns, prompt=asked, response=answered))

    def text(self, row: Mapping[str, Any]) -> tuple[str, str]:
        query = first_present(row, self._asked_in)
        if query is not None and row[query] != "":
            what = f"stage pt trains text, and field {query!r} is the query of a conversation"
            raise UnsupportedRow(what, "write stage: sft")
        name = _column(row, self._answered_in)
        return string(row, name), name


@dataclass(frozen=True)
class TextFormat(StagedFormat):
    """Rows of one text, for stage pt."""

    formatting = "text"

    @classmethod
    def detect(cls, fields: Mapping[str, Any]) -> Self | None:
        """Match text or content."""
        name = first_named(fields, TEXT_NAMES)
        return None if name is None else cls(detected_columns(fields, prompt=name))

    def text(self, row: Mapping[str, Any]) -> tuple[str, str]:
        names = [name for name in (self.columns.prompt, *TEXT_NAMES) if name is not None]
        name = _present(row, names) or names[0]
        return string(row, name), name

    def to_question(self, row: Mapping[str, Any], *, media: bool = False) -> Conversation:
        asked = (Message("user", self.full_text(row)),)
        said, found = extract_media(row, self.columns, asked, {}, wanted=media)
        return Conversation(said, media=found)

    def chat(self, row: Mapping[str, Any], stage: str, media: bool) -> NoReturn:
        what = f"its rows are texts, which stage pt trains; stage {stage} trains conversations"
        raise UnsupportedRow(what, "write stage: pt")


@dataclass(frozen=True)
class MessagesFormat(ChatFormat):
    """Rows of a list of messages, in turns of the user (or tools) and the assistant."""

    formatting = "sharegpt"
    parts = ("messages",)

    @classmethod
    def detect(cls, fields: Mapping[str, Any]) -> MessagesFormat | None:
        """Match messages, conversations or conversation; or a `prompt` of messages with a rejected answer or a response
        under one of its names; or a `chosen` that is a whole conversation with a rejected answer, whose `prompt` only
        repeats its beginning.

        Tags are detected from the first message's keys (role or from, content or value) and from the roles in the row
        (human and gpt, or user and assistant).
        """
        ranking, column = has_rejected(fields), first_named(fields, MESSAGES_NAMES)
        response = None if ranking else first_named(fields, RESPONSE_NAMES)
        named: dict[str, str] = {}
        if column is None and _is_list(fields.get("prompt")) and (ranking or response):
            column, named = "prompt", {} if response is None else {"response": response}
        elif column is None and not (ranking and _is_list(fields.get("chosen"), at_least=2)):
            return None
        tags = tags_of_messages(fields[column or "chosen"], column or "messages")
        kind = OpenAIFormat if (tags.role_tag, tags.user_tag) == ("role", "user") else MessagesFormat
        return kind(detected_columns(fields, messages=column, **named), tags, ranking)

    def text(self, row: Mapping[str, Any]) -> tuple[str, str]:
        chat = messages_of(row, self._column, self.tags)
        if chat.system is not None or [message.role for message in chat.messages] != ["assistant"]:
            raise UnsupportedRow("stage pt trains text, and its rows are conversations", "write stage: sft")
        return chat.messages[0].content, self._column  # ms-swift's format

    def messages(self, row: Mapping[str, Any], stage: str) -> Messages:
        name = first_present(row, (self.columns.response,)) if stage == "kto" else None  # TRL's completion
        answer = None if name is None else read_answer(row, name, self.tags)
        chat = messages_of(row, self._column, self.tags)
        if answer is not None and chat.messages[-1].role != "assistant":
            chat = chat._replace(messages=(*chat.messages, answer.message))
        check_turns(chat, self.tags)
        if chat.messages[-1].role != "assistant":
            raise RowError("no-answer", "the last message is not the assistant's", described(chat, -1, self.tags))
        return chat

    def question(self, row: Mapping[str, Any]) -> Messages:
        chat = messages_of(row, self._column, self.tags)
        check_turns(chat, self.tags)
        return chat

    def prompts(self, row: Mapping[str, Any], chosen: Answer | None, rejected: Answer) -> tuple[list[Messages], Answer]:
        name = first_present(row, (self.columns.messages,))
        own = None if name is None else messages_of(row, name, self.tags)
        if chosen is None:
            if own is None or len(own.messages) < 2 or own.messages[-1].role != "assistant":
                raise missing_field(row, self.columns.chosen or "chosen")
            own, chosen = without_last(own), Answer(own.messages[-1], None, self._column)
        stated = [chat for chat in (own, chosen.before, rejected.before) if chat is not None]
        if not stated:
            raise missing_field(row, self._column)
        return stated, chosen

    @property
    def _column(self) -> str:
        return self.columns.messages or "messages"


@dataclass(frozen=True)
class OpenAIFormat(MessagesFormat):
    """Rows of a list of messages under OpenAI's names."""

    formatting = "openai"


def _is_list(value: object, at_least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= at_least and all(isinstance(item, dict) for item in value)


def _column(row: Mapping[str, Any], names: Sequence[str | None]) -> str:
    """Return the column of `names` that a row has; the only name, if it lacks it.

    Args:
        names: the user's own or None, then usual names, if any.

    Raises:
        RowError: it has none of several.
    """
    own, *usual = names
    name = _present(row, names)
    if name is None and usual:
        detail = f"expected one of {', '.join(map(str, usual))}; the row has {field_names(row)}"
        raise RowError("missing-field", f"field {usual[0]!r} is missing", detail)
    return name or str(own)


def _present(row: Mapping[str, Any], names: Sequence[str | None]) -> str | None:
    """Return the first of the names whose field is not null; otherwise the first whose field is there."""
    return first_present(row, names) or next((name for name in names if name is not None and name in row), None)


def _listed(prompt: Sequence[Message], answer: Message | None = None) -> Messages:
    return Messages(None, (*prompt, answer) if answer is not None else tuple(prompt), {})


def _answer(row: Mapping[str, Any], name: str) -> Message:
    content = string(row, name)
    if not content or content.isspace():
        raise RowError("empty-message", "an empty assistant message", f"field {name!r}")
    return Message("assistant", content)


def _answer_tags(fields: Mapping[str, Any]) -> Tags:
    """Detect the tags of those answers of a pair that are messages."""
    answers = (fields.get(name) for name in ("chosen", "rejected", *REJECTED_NAMES))
    listed = next((answer for answer in answers if isinstance(answer, (list, dict))), None)
    return Tags() if listed is None else tags_of_messages(listed, "messages")


def _history(row: Mapping[str, Any], column: str | None) -> list[Message]:
    """Read earlier turns from a list of [question, answer] pairs."""
    pairs = row.get(column) if column else None
    if not pairs or column is None:
        return []
    if not isinstance(pairs, list):
        raise _bad_history(column, f"got {short(pairs)}")
    messages: list[Message] = []
    for number, pair in enumerate(pairs, start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise _bad_history(column, f"pair {number} is {short(pair)}")
        question, answer = (encodable(text, column, f"pair {number}") for text in pair)
        for role, text in (("user", question), ("assistant", answer)):
            if not text.strip():
                raise RowError("empty-message", f"an empty {role} message", f"field {column!r}, pair {number}")
        messages += [Message("user", question), Message("assistant", answer)]
    return messages


def _bad_history(column: str, detail: str) -> RowError:
    return RowError("bad-history", f"field {column!r}: expected a list of [question, answer] pairs", detail)
