"""The common form of rows of all data formats: a text, a conversation or a preference pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatune.data.media import Kind

Role = Literal["user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the assistant."""

    name: str
    arguments: Any  # a JSON object; rows of ms-swift may have any JSON value


@dataclass(frozen=True, slots=True)
class Message:
    """One message; the role of a tool's result is "tool".

    Attributes:
        trained: whether an answer is trained, if its row specifies it; None leaves it to the settings.
        whole: train the answer from its first token on, regardless of `answer_masks`.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    trained: bool | None = None
    whole: bool = False


class RowMedia(NamedTuple):
    """An image or video as given in a row: a path, bytes, base64 or frames. Worker processes read it later, since its
    file may be on slow storage."""

    kind: Kind
    value: Any
    tag_added: bool = False  # the row has no tag for it, so one was added before its first message


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of (user or tools, assistant), ending with the assistant; with a label they may end with the user.

    Attributes:
        system: the system message; None if the row has none, "" if it is explicitly empty.
        tools: JSON schemas of the available tools, as given in the row.
        media: images and videos, in the order of the tags <image> and <video> in the messages.
        desirable: whether the last answer is desirable (stage kto); None in other stages.
        switches: template settings of this row, by their names in `SwiftRules`.
        label: the label as encoded by `formats.labels` (stage cls); None in other stages.
    """

    messages: tuple[Message, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    media: tuple[RowMedia, ...] = ()
    desirable: bool | None = None
    switches: tuple[tuple[str, bool], ...] = ()
    label: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two conversations, of which the first is preferred.

    They usually differ only in the last answer; those of ms-swift may differ anywhere.

    Attributes:
        margin: by how much the chosen answer is better, in stage rm if the row has it; otherwise 0.
    """

    chosen: Conversation
    rejected: Conversation
    margin: float = 0.0

    @property
    def media(self) -> tuple[RowMedia, ...]:
        return self.chosen.media


# Rows of stage pt, of sft, kto and cls, and of dpo and rm.
Example = str | Conversation | PreferencePair

# Placeholders of self-cognition data sets, and the setting that replaces each.
PLACEHOLDERS = {
    "{{name}}": "model_name",
    "{{author}}": "model_author",
    "{{NAME}}": "model_name",
    "{{AUTHOR}}": "model_author",
}


def texts(example: Example) -> Iterable[str]:
    """Return the system message and the texts of all messages; the common messages of a pair only once."""
    if isinstance(example, str):
        return (example,)
    if isinstance(example, Conversation):
        return (example.system or "", *(message.content for message in example.messages))
    chosen, rejected = example.chosen.messages, example.rejected.messages
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), len(rejected))
    return (example.chosen.system or "", *(message.content for message in (*chosen, *rejected[shared:])))


def fill_placeholders(example: Example, values: Mapping[str, str | None]) -> tuple[Example, list[str]]:
    """Replace {{name}} and {{author}}, in lower or upper case, in every text of an example.

    Args:
        values: placeholder to replacement; None leaves the placeholder.

    Returns:
        The example, and those of its placeholders that have no replacement.
    """
    missing = [p for p in PLACEHOLDERS if values.get(p) is None and any(p in text for text in texts(example))]

    def filled(text: str) -> str:
        for placeholder, value in values.items():
            if value is not None:
                text = text.replace(placeholder, value)
        return text

    def conversation(given: Conversation) -> Conversation:
        messages = tuple(replace(message, content=filled(message.content)) for message in given.messages)
        return replace(given, messages=messages, system=None if given.system is None else filled(given.system))

    if isinstance(example, str):
        return filled(example), missing
    if isinstance(example, Conversation):
        return conversation(example), missing
    return replace(example, chosen=conversation(example.chosen), rejected=conversation(example.rejected)), missing
