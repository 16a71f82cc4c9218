"""An example, which a row of a file becomes whatever its form: a text, a conversation or a preference pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatune.data.media import Kind

Role = Literal["user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the assistant."""

    name: str
    arguments: Any  # an object; ms-swift's rows may have any value of JSON


@dataclass(frozen=True, slots=True)
class Message:
    """One message; what a tool returns has the role "tool".

    Attributes:
        trained: whether an answer is trained where its row says so; None leaves it to the settings.
        whole: an answer that is trained is so from its first token on, whatever `answer_masks` says.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    trained: bool | None = None
    whole: bool = False

    def __reduce__(self) -> tuple[type[Message], tuple[object, ...]]:
        # The default of dataclasses with slots takes five times as long, and worker processes get every message.
        return Message, (self.role, self.content, self.tool_calls, self.trained, self.whole)


class RowPicture(NamedTuple):
    """An image or a video as a row has it: a path, bytes, base64 or frames. Whether it can be read shows when it is
    measured, by worker processes, since its file may be far away."""

    kind: Kind
    value: Any
    tag_added: bool = False  # the row has no tag for it, and got one in front of its first message


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of (user or tools, assistant), ending with the assistant; with a label they may end with the user.

    Attributes:
        system: the system message; None where the row has none, and "" where it says that there is none.
        tools: JSON schemas of the tools on offer, as the row has them.
        pictures: of the tags <image> and <video> in the messages, in their order.
        desirable: whether the last answer is one that is wanted; None where nobody asked.
        switches: settings of the template that the row has itself, by their names in `SwiftRules`.
        label: what `formats.labels` reads; None but in stage cls.
    """

    messages: tuple[Message, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    pictures: tuple[RowPicture, ...] = ()
    desirable: bool | None = None
    switches: tuple[tuple[str, bool], ...] = ()
    label: tuple[float, ...] | None = None

    def __reduce__(self) -> tuple[type[Conversation], tuple[object, ...]]:
        found = self.messages, self.system, self.tools, self.pictures, self.desirable, self.switches, self.label
        return Conversation, found


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two conversations, of which the first is preferred.

    Most begin alike and differ in the last answer; ms-swift's may differ anywhere.

    Attributes:
        margin: by how much the chosen answer is better, where the row says it and a reward model is trained.
    """

    chosen: Conversation
    rejected: Conversation
    margin: float = 0.0

    @classmethod
    def of_answers(
        cls,
        prompt: tuple[Message, ...],
        chosen: Message,
        rejected: Message,
        system: str | None = None,
        tools: tuple[dict[str, Any], ...] = (),
        pictures: tuple[RowPicture, ...] = (),
    ) -> PreferencePair:
        """Make a pair of two answers to one prompt."""
        common = (system, tools, pictures)
        return cls(Conversation((*prompt, chosen), *common), Conversation((*prompt, rejected), *common))

    @property
    def pictures(self) -> tuple[RowPicture, ...]:
        return self.chosen.pictures


# Rows of stage pt, of sft, kto and cls, and of dpo and rm.
Example = str | Conversation | PreferencePair

# Self-cognition data sets write the model's name and maker so; the setting that fills each.
PLACEHOLDERS = {
    "{{name}}": "model_name",
    "{{author}}": "model_author",
    "{{NAME}}": "model_name",
    "{{AUTHOR}}": "model_author",
}


def texts(example: Example) -> Iterable[str]:
    """Return every text that someone wrote, in order: the system message first, then the messages.

    Of a pair, what both conversations begin with counts once.
    """
    if isinstance(example, str):
        return (example,)
    if isinstance(example, Conversation):
        return (example.system or "", *(message.content for message in example.messages))
    chosen, rejected = example.chosen.messages, example.rejected.messages
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), len(rejected))
    return (example.chosen.system or "", *(message.content for message in (*chosen, *rejected[shared:])))


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

    def conversation(given: Conversation) -> Conversation:
        messages = tuple(replace(message, content=filled(message.content)) for message in given.messages)
        return replace(given, messages=messages, system=None if given.system is None else filled(given.system))

    if isinstance(example, str):
        return filled(example), missing
    if isinstance(example, Conversation):
        return conversation(example), missing
    return replace(example, chosen=conversation(example.chosen), rejected=conversation(example.rejected)), missing
