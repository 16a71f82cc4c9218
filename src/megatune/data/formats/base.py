"""The base of row formats: what a row becomes in each stage.

A preference pair has one prompt and two answers, each a string, a message, a list of one message, or a whole
conversation that ends with it; whole conversations must agree in everything else. If the row has no chosen answer, its
response is used, or its last message if that is the assistant's (ms-swift's format).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from megatune.config.groups.run import PAIR_STAGES
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Example, Message, PreferencePair, texts
from megatune.data.formats.columns import COLUMNS, REJECTED_NAMES, TAGS, Columns, Tags
from megatune.data.formats.fields import (
    check_no_tags,
    extract_media,
    first_present,
    margin,
    missing_field,
    optional_string,
    short,
    string,
    tools,
)
from megatune.data.formats.labels import Labels
from megatune.data.formats.messages import Messages, answer_message, check_turns, described, is_empty, messages_of
from megatune.data.readers import json_type

# ms-swift's tags for objects in an image and their boxes, which its `objects` field lists.
_GROUNDING = ("<bbox>", "<ref-object>")


class Answer(NamedTuple):
    """An answer of a pair, the conversation before it if the row has both in one field, and the field's name."""

    message: Message
    before: Messages | None
    column: str


@dataclass(frozen=True)
class RowFormat(ABC):
    """A format of rows: detects its rows, and converts them.

    Attributes:
        columns: if there is a kto_tag, rows are desirable or undesirable answers.
        tags: of messages; in a format of strings, of those answers of pairs that are messages.
        ranking: rows are preference pairs.
    """

    columns: Columns = COLUMNS
    tags: Tags = TAGS
    ranking: bool = False

    formatting: ClassVar[str]  # the name in dataset_info.json; of SwiftFormat, which a setting chooses, "ms_swift"
    # The parts of rows, besides those of all formats, whose columns are fixed; () if they are looked up in each row.
    parts: ClassVar[tuple[str, ...]] = ()
    system_names: ClassVar[tuple[str, ...]] = ()  # other columns of the system message

    @classmethod
    def detect(cls, fields: Mapping[str, Any]) -> RowFormat | None:
        """Return the format of a row with these fields; None if they do not have it."""
        return None

    @abstractmethod
    def to_example(
        self, row: Mapping[str, Any], stage: str, *, media: bool = False, labels: Labels | None = None
    ) -> Example:
        """Convert one row to the example that the stage trains.

        Args:
            stage: "pt" gives a text, "sft" a conversation, "kto" one with a boolean, "cls" one with a label, "dpo" and
                "rm" a preference pair.
            media: whether the model takes images and videos.
            labels: for stage cls.

        Raises:
            RowError: the row does not have this format.
            UnsupportedRow: the row has audio or bounding boxes, images or videos for a text model, or a format without
                rows for this stage.
        """

    @abstractmethod
    def to_question(self, row: Mapping[str, Any], *, media: bool = False) -> Conversation:
        """Read a row as a prompt: a conversation that ends with the row's answer only if the row has one.

        Raises:
            RowError, UnsupportedRow: as in `to_example`, for stage sft.
        """

    def with_own_names(self, own: Mapping[str, str]) -> Self:
        """Return the format with the columns' own names.

        Args:
            own: standard name -> own name.
        """
        named = {part: column and own.get(column, column) for part, column in asdict(self.columns).items()}
        return replace(self, columns=Columns(**named))

    def unused(self, names: Sequence[str], stage: str) -> list[str]:
        """Return those of the fields of rows that the stage does not read."""
        parts = ["system", "tools", "images", "videos", "audios", "kto_tag", *self.parts]
        parts += ["chosen", "rejected"] if self.ranking else []
        parts += {"kto": ["response"], "rm": ["margin"], "cls": ["label"]}.get(stage, [])
        used = {getattr(self.columns, part) for part in parts}
        return [name for name in names if name not in used] if self.parts else []


@dataclass(frozen=True)
class StagedFormat(RowFormat):
    """A format whose rows are read by stage: as texts, to classify, or as conversations and pairs."""

    def to_example(
        self, row: Mapping[str, Any], stage: str, *, media: bool = False, labels: Labels | None = None
    ) -> Example:
        example: Example
        self._refuse_audio(row)
        if stage == "pt":
            for name in (self.columns.images, self.columns.videos):
                if name is not None and row.get(name):
                    what = f"stage pt trains text, and field {name!r} has images or videos"
                    raise UnsupportedRow(what, "write stage: sft")
            example = self.full_text(row)
        elif labels is not None:
            example = replace(self.to_question(row, media=media), label=labels.read(row, self.columns.label))
        else:
            example = self.chat(row, stage, media)
        if row.get("objects") and any(tag in text for text in texts(example) for tag in _GROUNDING):
            what = "its texts have <bbox> or <ref-object>, and training on bounding boxes is not supported"
            raise UnsupportedRow(what)
        return example

    def full_text(self, row: Mapping[str, Any]) -> str:
        """Read the text of stage pt; reject an empty one."""
        text, column = self.text(row)
        if not text or text.isspace():
            raise RowError("empty-text", "the text is empty", f"field {column!r}")
        return text

    @abstractmethod
    def text(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Read the text of stage pt, and return its column, too."""

    @abstractmethod
    def chat(self, row: Mapping[str, Any], stage: str, media: bool) -> Example:
        """Read the conversation of stage sft or kto, or the pair of stage dpo or rm."""

    def _refuse_audio(self, row: Mapping[str, Any]) -> None:
        if self.columns.audios is not None and row.get(self.columns.audios):
            raise UnsupportedRow(f"field {self.columns.audios!r}: training on audio is not supported")


@dataclass(frozen=True)
class ChatFormat(StagedFormat):
    """A format of conversations and pairs."""

    @abstractmethod
    def messages(self, row: Mapping[str, Any], stage: str) -> Messages:
        """Read the messages of stage sft or kto, which end with the answer."""

    @abstractmethod
    def question(self, row: Mapping[str, Any]) -> Messages:
        """Read the messages of a row whose answer may be missing."""

    @abstractmethod
    def prompts(self, row: Mapping[str, Any], chosen: Answer | None, rejected: Answer) -> tuple[list[Messages], Answer]:
        """Return every prompt that the row of a pair states, and the chosen answer, which may be in another column."""

    def to_question(self, row: Mapping[str, Any], *, media: bool = False) -> Conversation:
        self._refuse_audio(row)
        return self._conversation(row, self.question(row), media)

    def chat(self, row: Mapping[str, Any], stage: str, media: bool) -> Example:
        columns = self.columns
        if stage in PAIR_STAGES:
            pair = self._pair(row, media)
            return replace(pair, margin=margin(row, columns.margin)) if stage == "rm" else pair
        desirable = _desirable(row, columns.kto_tag or "label") if stage == "kto" else None
        chat = self._conversation(row, self.messages(row, stage), media)
        return chat if desirable is None else replace(chat, desirable=desirable)

    def _conversation(self, row: Mapping[str, Any], chat: Messages, media: bool) -> Conversation:
        columns, system = self.columns, chat.system
        said, found = extract_media(row, columns, chat.messages, chat.inline, wanted=media)
        if system is None:  # one among the messages overrides the column
            system = optional_string(row, first_present(row, (columns.system, *self.system_names)))
        return Conversation(said, system or None, tools(row, columns.tools), found)

    def _pair(self, row: Mapping[str, Any], media: bool) -> PreferencePair:
        columns = self.columns
        name = first_present(row, (columns.rejected, *REJECTED_NAMES)) or columns.rejected or REJECTED_NAMES[0]
        rejected = read_answer(row, name, self.tags)
        given = first_present(row, (columns.chosen,))
        stated, chosen = self.prompts(row, None if given is None else read_answer(row, given, self.tags), rejected)
        prompt = common_prompt(stated, self.tags)
        check_answers(chosen, rejected)
        asked = self._conversation(row, prompt, media)
        if asked.media:
            check_no_tags((chosen.message, rejected.message))
        one, other = (replace(asked, messages=(*asked.messages, each.message)) for each in (chosen, rejected))
        return PreferencePair(one, other)


def _desirable(row: Mapping[str, Any], column: str) -> bool:
    """Read whether the row's answer is desirable."""
    if column not in row:
        raise missing_field(row, column)
    if not isinstance(row[column], bool):
        raise RowError("bad-tag", f"field {column!r}: expected true or false", f"got {short(row[column])}")
    return bool(row[column])


def read_answer(row: Mapping[str, Any], column: str, tags: Tags) -> Answer:
    """Read an answer, in any of its forms."""
    value = row.get(column)
    if value is None or isinstance(value, str):  # `string` rejects None
        return Answer(Message("assistant", string(row, column)), None, column)
    if isinstance(value, dict):
        return Answer(answer_message(value, column, 0, tags), None, column)
    if not isinstance(value, list):
        reason = f"field {column!r}: expected a string, a message or a list of messages, got {json_type(value)}"
        raise RowError("wrong-type", reason)
    if len(value) == 1 and isinstance(value[0], dict):
        return Answer(answer_message(value[0], column, 1, tags), None, column)
    chat = messages_of(row, column, tags)
    if len(chat.messages) == 1:
        raise RowError("answer-without-prompt", f"field {column!r}: a system message and an answer, but no question")
    last = chat.messages[-1]
    if last.role != "assistant":
        detail = f"field {column!r}: message {len(value)} has role {value[-1][tags.role_tag]!r}"
        raise RowError("answer-not-assistant", "an answer is not the assistant's", detail)
    return Answer(last, without_last(chat), column)


def without_last(chat: Messages) -> Messages:
    """Return all messages but the last."""
    last = len(chat.messages) - 1
    inline = {index: values for index, values in chat.inline.items() if index < last}
    return Messages(chat.system, chat.messages[:last], inline)


def check_answers(chosen: Answer, rejected: Answer) -> None:
    """Reject empty or equal answers."""
    for answer in (chosen, rejected):
        if is_empty(answer.message):
            raise RowError("empty-message", "an empty assistant message", f"field {answer.column!r}")
    one, other = chosen.message, rejected.message
    if (one.content, one.tool_calls) == (other.content, other.tool_calls):
        raise RowError("same-answers", "chosen and rejected are the same")


def common_prompt(stated: Sequence[Messages], tags: Tags) -> Messages:
    """Return the prompt that all of them are."""
    first = stated[0]
    check_turns(first, tags)
    if first.messages[-1].role == "assistant":
        reason = "the prompt ends with the assistant's message"
        raise RowError("prompt-ends-with-answer", reason, described(first, -1, tags))
    for other in stated[1:]:
        if other != first:
            reason = "chosen and rejected answer different prompts"
            raise RowError("different-prompts", reason, _difference(first, other))
    return first


def _difference(one: Messages, other: Messages) -> str:
    if one.system != other.system:
        return "the system messages differ"
    offset = 1 if one.system is None else 2
    for index, (left, right) in enumerate(zip(one.messages, other.messages, strict=False)):
        if left != right:
            return f"message {index + offset} differs"
    return f"{len(one.messages)} and {len(other.messages)} messages before the answers"
