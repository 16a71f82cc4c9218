"""Templates as data: the text that a chat format has for each role, and how they write a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message
from megatune.data.templates.tools import ToolFormat
from megatune.data.templates.turns import EMPTY_THOUGHT, Thinking, Turn, normal_thought, split_thought, without_thought

# The fields that are texts to write; {bos} and {eos} in them are the tokenizer's own tokens.
TEXTS = ("prefix", "system", "user", "assistant", "calls", "observation", "observation_separator")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTemplate:
    """A chat format as texts around {content}.

    Attributes:
        user: a user's message, up to where the assistant starts.
        assistant: an answer, with what ends it.
        system: the system message, with the tools on offer.
        calls: an answer that only calls tools; "" is like any other answer.
        observation: like `user`, for tools' answers; several are joined by `observation_separator`. "" takes none.
        prefix: at the start of every conversation.
        default_system: for conversations without a system message.
        tool_format: None refuses conversations with tools.
        thinks: the model reasons before it answers.
        special_tokens: what must be one token each, or the tokenizer is not for this template.
        system_in_question: the system message is written into the last message of the user, before its text.
        trims: roles whose text loses the white space around it.
    """

    name: str
    user: str
    assistant: str
    system: str
    calls: str = ""
    observation: str = ""
    observation_separator: str = "\n"
    prefix: str = ""
    default_system: str = ""
    tool_format: ToolFormat | None = None
    thinks: bool = False
    special_tokens: tuple[str, ...] = ()
    system_in_question: bool = False
    trims: tuple[str, ...] = ()

    def bound(self, bos_token: str, eos_token: str) -> NamedTemplate:
        """Put a tokenizer's own tokens in the place of {bos} and {eos}."""
        texts = {key: getattr(self, key).replace("{bos}", bos_token).replace("{eos}", eos_token) for key in TEXTS}
        return replace(self, **texts)

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """Write the turns of a conversation; see `Template.render`."""
        messages = conversation.messages
        head, question = self._head(conversation)
        last_question = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        turns: list[Turn] = []
        start = calls = observations = 0
        for stop, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = question if start <= last_question < stop else ("", "")
            asked = (*(head if not turns else ()), *self._asked(messages[start:stop], before, observations))
            answer = self._answer(message, thinking, is_history=stop < last_question, number=calls)
            turns.append(self._turn(asked, answer, message, thinking, is_last=stop == len(messages) - 1))
            calls += len(message.tool_calls)
            observations += sum(message.role == "tool" for message in messages[start:stop])
            start = stop + 1
        if any(question) and last_question < 0:
            raise RowError("no-question", "the template writes the system message and tools into a user's message")
        return turns

    def _head(self, conversation: Conversation) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return what starts the conversation, and what the last message of the user has before it and inside it."""
        system = conversation.system or self.default_system
        if "system" in self.trims:
            system = system.strip()
        offer = ""
        if conversation.tools:
            if self.tool_format is None:
                raise RowError("no-tools-in-template", "the template has no text for tools")
            offer = self.tool_format.offer(conversation.tools)
            if not self.tool_format.offer_before_question:
                system, offer = (f"{system}{offer}" if system else offer.lstrip("\n")), ""
        text = _fill(self.system, system) if system else ""
        return ((self.prefix, ""), (offer, text)) if self.system_in_question else ((self.prefix, text), (offer, ""))

    def _asked(self, messages: Sequence[Message], before: tuple[str, str], number: int) -> tuple[str, ...]:
        """Write one user's message, or what the tools return that the last message called."""
        roles = {message.role for message in messages}
        offer, system = before
        if roles == {"user"} and len(messages) == 1:
            return (offer, _fill(self.user, f"{system}{self._text(messages[0])}"))
        if roles != {"tool"}:
            raise RowError("turns-do-not-alternate", "an answer does not follow one message of the user or tools'")
        if not self.observation or self.tool_format is None:
            raise RowError("no-tools-in-template", "the template has no text for tools")
        answers = [self.tool_format.answer(self._text(message), i) for i, message in enumerate(messages, start=number)]
        return (_fill(self.observation, self.observation_separator.join(answers)),)

    def _answer(self, message: Message, thinking: Thinking, is_history: bool, number: int) -> str:
        """Write what the assistant says and calls, without what ends it."""
        content = self._text(message)
        if self.thinks:
            drops = thinking.enable is False or (thinking.drop_history and is_history)
            content = without_thought(content) if drops else normal_thought(content)
        if not message.tool_calls:
            return content
        if self.tool_format is None:
            raise RowError("no-tools-in-template", "the template has no text for tools")
        thought, said = split_thought(content)
        calls = self.tool_format.calls(message.tool_calls, number)
        return f"{thought}{said}{self.tool_format.joiner}{calls}" if said else f"{thought}{calls}"

    def _turn(self, asked: tuple[str, ...], answer: str, message: Message, thinking: Thinking, is_last: bool) -> Turn:
        only_calls = self.calls and message.tool_calls and not self._text(message)
        # As history an answer has no empty thought, nor has a call of tools on the way to the last answer.
        is_bare = "<think>" not in answer and "</think>" not in answer
        thinks = self.thinks and is_bare and (is_last or not thinking.drop_history)
        written = _fill(self.calls if only_calls else self.assistant, answer.lstrip("\n") if thinks else answer)
        if not thinks:
            return Turn(asked, (written,), message.trained)
        if thinking.enable:
            return Turn(asked, (EMPTY_THOUGHT, written), message.trained)
        return Turn((*asked, EMPTY_THOUGHT), (written,), message.trained)

    def _text(self, message: Message) -> str:
        return message.content.strip() if message.role in self.trims else message.content


def _fill(text: str, content: str) -> str:
    before, _, after = text.partition("{content}")
    return f"{before}{content}{after}"
