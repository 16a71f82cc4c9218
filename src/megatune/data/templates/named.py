"""Templates by name, as data: LLaMA-Factory's names, and its text for each role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatune.data.formats import Conversation, Message
from megatune.data.templates.thoughts import EMPTY_THOUGHT, has_thought, split_thought, without_thought
from megatune.data.templates.tools import LLAMA3_TOOLS, PLAIN_TOOLS, QWEN_TOOLS, ToolFormat
from megatune.data.templates.turns import Thinking, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTemplate:
    """A chat format as texts around {content}.

    Attributes:
        user: a user's message, up to where the assistant starts.
        observation: the same for tools' answers; several answers are joined by `observation_separator`.
        assistant: an answer, with what ends it; {eos} is the tokenizer's end-of-sequence token.
        prefix: at the start of every conversation; {bos} is the tokenizer's begin-of-sequence token.
        thinks: the model reasons before it answers.
        special_tokens: what must be one token each, or the tokenizer is not for this template.
    """

    name: str
    user: str
    assistant: str
    system: str
    observation: str
    observation_separator: str = "\n"
    prefix: str = ""
    default_system: str = ""
    tool_format: ToolFormat = PLAIN_TOOLS
    thinks: bool = False
    special_tokens: tuple[str, ...] = ()

    def bound(self, bos_token: str, eos_token: str) -> NamedTemplate:
        """This template with a tokenizer's own tokens in the place of {bos} and {eos}."""
        return replace(
            self,
            prefix=self.prefix.replace("{bos}", bos_token),
            assistant=self.assistant.replace("{eos}", eos_token),
        )

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """See `Template.render`."""
        messages = conversation.messages
        turns: list[Turn] = []
        start = 0
        for stop, message in enumerate(messages):
            if message.role != "assistant":
                continue
            head = self._head(conversation) if not turns else ()
            asked = (*head, self._asked(messages[start:stop]))
            turns.append(self._turn(asked, message, thinking, is_last=stop == len(messages) - 1))
            start = stop + 1
        return turns

    def _head(self, conversation: Conversation) -> tuple[str, ...]:
        system = conversation.system or self.default_system
        if conversation.tools:
            offer = self.tool_format.offer(conversation.tools)
            system = f"{system}{offer}" if system else offer.lstrip("\n")
        return (self.prefix, _fill(self.system, system) if system else "")

    def _asked(self, messages: Sequence[Message]) -> str:
        """One user's message, or the answers of the tools that the last message called."""
        if messages[0].role == "user":
            return _fill(self.user, messages[0].content)
        return _fill(self.observation, self.observation_separator.join(message.content for message in messages))

    def _turn(self, asked: tuple[str, ...], message: Message, thinking: Thinking, is_last: bool) -> Turn:
        content = message.content
        as_history = thinking.drop_history and not is_last
        if self.thinks and (thinking.enable is False or as_history):
            content = without_thought(content)
        answer = _fill(self.assistant, self._answered(content, message))
        if not self.thinks or as_history or has_thought(content):
            return Turn(asked, (answer,))
        if thinking.enable:
            return Turn(asked, (EMPTY_THOUGHT, answer))
        return Turn((*asked, EMPTY_THOUGHT), (answer,))

    def _answered(self, content: str, message: Message) -> str:
        if not message.tool_calls:
            return content
        thought, said = split_thought(content)
        calls = self.tool_format.calls(message.tool_calls)
        return f"{thought}{said}\n{calls}" if said else f"{thought}{calls}"


def _fill(text: str, content: str) -> str:
    before, _, after = text.partition("{content}")
    return f"{before}{content}{after}"


_QWEN3_NOTHINK = NamedTemplate(
    name="qwen3_nothink",
    user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
    assistant="{content}<|im_end|>\n",
    system="<|im_start|>system\n{content}<|im_end|>\n",
    observation=("<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    observation_separator="\n</tool_response>\n<tool_response>\n",
    tool_format=QWEN_TOOLS,
    special_tokens=("<|im_start|>", "<|im_end|>"),
)

_LLAMA3 = NamedTemplate(
    name="llama3",
    prefix="{bos}",
    user=(
        "<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    assistant="{content}<|eot_id|>",
    system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
    observation=(
        "<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    tool_format=LLAMA3_TOOLS,
    special_tokens=("{bos}", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

_DEEPSEEK3 = NamedTemplate(
    name="deepseek3",
    prefix="{bos}",
    user="<｜User｜>{content}<｜Assistant｜>",
    assistant="{content}{eos}",
    system="{content}",
    observation="<｜User｜>{content}<｜Assistant｜>",
    special_tokens=("{bos}", "{eos}", "<｜User｜>", "<｜Assistant｜>"),
)

NAMED_TEMPLATES: dict[str, NamedTemplate] = {
    template.name: template
    for template in (
        replace(
            _QWEN3_NOTHINK,
            name="qwen",
            default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        ),
        replace(_QWEN3_NOTHINK, name="qwen3", thinks=True),
        _QWEN3_NOTHINK,
        _LLAMA3,
        _DEEPSEEK3,
        replace(_DEEPSEEK3, name="deepseekr1", thinks=True),
    )
}
