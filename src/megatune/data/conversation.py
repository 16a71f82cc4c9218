"""An example, which a row of a file becomes whatever its form: a text, a conversation or a preference pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatune.data.media.sources import Kind

Role = Literal["user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the assistant."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message; what a tool returns has the role "tool".

    Attributes:
        trained: False for an answer that is masked: context only.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    trained: bool = True

    def __reduce__(self) -> tuple[type[Message], tuple[object, ...]]:
        # The default of dataclasses with slots takes five times as long, and worker processes get every message.
        return Message, (self.role, self.content, self.tool_calls, self.trained)


class RowPicture(NamedTuple):
    """An image or a video as a row has it: a path, bytes, base64 or frames. Whether it can be read shows when it is
    measured, by worker processes, since its file may be far away."""

    kind: Kind
    value: Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of (user or tools, assistant), ending with the assistant.

    Attributes:
        system: the system message, "" where the row has none.
        tools: JSON schemas of the tools on offer, as the row has them.
        pictures: of the tags <image> and <video> in the messages, in their order.
        desirable: whether the last answer is one that is wanted; None where nobody asked.
    """

    messages: tuple[Message, ...]
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    pictures: tuple[RowPicture, ...] = ()
    desirable: bool | None = None

    def __reduce__(self) -> tuple[type[Conversation], tuple[object, ...]]:
        return Conversation, (self.messages, self.system, self.tools, self.pictures, self.desirable)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one conversation, of which the first is preferred.

    Attributes:
        prompt: ends with the user's, or a tool's, message.
        chosen, rejected: the assistant's.
        system, tools: as those of a `Conversation`.
        pictures: of the tags in the prompt.
        margin: by how much the chosen answer is better, where the row says it and a reward model is trained.
    """

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    pictures: tuple[RowPicture, ...] = ()
    margin: float = 0.0

    def conversations(self) -> tuple[Conversation, Conversation]:
        """Return the conversation with the chosen answer, and with the rejected one."""
        chosen, rejected = (*self.prompt, self.chosen), (*self.prompt, self.rejected)
        common = self.system, self.tools, self.pictures
        return Conversation(chosen, *common), Conversation(rejected, *common)


# Rows of stage pt, of sft and kto, and of dpo and rm.
Example = str | Conversation | PreferencePair

# Self-cognition data sets write the model's name and maker so; the setting that fills each.
PLACEHOLDERS = {
    "{{name}}": "model_name",
    "{{author}}": "model_author",
    "{{NAME}}": "model_name",
    "{{AUTHOR}}": "model_author",
}


def texts(example: Example) -> Iterable[str]:
    """Return every text that someone wrote, in order: the system message first, then the messages."""
    if isinstance(example, str):
        return (example,)
    if isinstance(example, PreferencePair):
        messages = (*example.prompt, example.chosen, example.rejected)
    else:
        messages = example.messages
    return (example.system, *(message.content for message in messages))


def fill_placeholders(example: Example, values: Mapping[str, str | None]) -> tuple[Example, list[str]]:
    """Replace {{name}} and {{author}}, in small or capital letters, in every text of an example.

    Args:
        values: placeholder to replacement; None leaves it as it is.

    Returns:
        The example, and the placeholders it has for which there is no replacement.
    """
    missing = [p for p in PLACEHOLDERS if values.get(p) is None and any(p in text for text in texts(example))]

    def filled(text: str) -> str:
        for placeholder, value in values.items():
            if value is not None:
                text = text.replace(placeholder, value)
        return text

    def of(*messages: Message) -> tuple[Message, ...]:
        return tuple(replace(message, content=filled(message.content)) for message in messages)

    if isinstance(example, str):
        return filled(example), missing
    if isinstance(example, Conversation):
        return replace(example, messages=of(*example.messages), system=filled(example.system)), missing
    prompt, (chosen, rejected) = of(*example.prompt), of(example.chosen, example.rejected)
    return replace(example, prompt=prompt, chosen=chosen, rejected=rejected, system=filled(example.system)), missing
