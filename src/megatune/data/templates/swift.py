"""ms-swift's chat templates: how its command lines render a conversation, and which parts of it they train.

Written after the sources of ms-swift 3.12 and 4.6; tests/swift_golden compares the tokens with both. swift.yaml has one
entry for each template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message, Role
from megatune.data.templates.tool_texts import fill
from megatune.data.templates.tools import AgentTemplate
from megatune.data.templates.turns import Thinking, Turn

Mask = Literal["empty_thought", "think_tag"]
_MASKS: dict[Mask, tuple[str, ...]] = {
    "empty_thought": (r"<think>\s*</think>\s*", r"</think>\s*"),
    "think_tag": (r"<think>\n?",),
}


@dataclass(frozen=True, slots=True)
class SwiftRules:
    """The settings of a run that affect its template.

    Attributes:
        version: ms-swift's version, 3 or 4.
        last_round: train only the last answer.
        add_empty_thought: start an answer without reasoning with an empty reasoning block, if the template has one.
        preserve_thinking: keep the reasoning of earlier answers; None follows ms-swift's rule.
        enable_thinking: has an effect if preserve_thinking is None.
        masks: beginnings of answers that are not trained; None follows ms-swift's rule.
        has_template: False concatenates the texts without a template: stage pt.
    """

    version: int
    last_round: bool = False
    add_empty_thought: bool = True
    preserve_thinking: bool | None = None
    enable_thinking: bool | None = None
    masks: tuple[Mask, ...] | None = None
    has_template: bool = True


@dataclass(slots=True)
class _Merged:
    """Adjacent messages of one role. An answer has a text for each message; tool results form one prompt."""

    role: Role
    texts: list[str]
    messages: list[Message] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SwiftTemplate:
    """One of ms-swift's templates.

    Attributes:
        prompt: a user's message up to the start of the answer, with {content}.
        separator: ends an answer that another message follows; None: only the last round is rendered.
        suffix: ends the last answer.
        prefix: starts a conversation without a system message.
        system: starts a conversation with a system message, with {content}; None: system messages are not supported.
        stop_words: an answer that ends with one of them, or with the suffix, gets no suffix.
        agent: the name of the agent template that renders tools.
        thinks: whether the model reasons before it answers.
        empty_thought: the empty reasoning block that starts an answer without reasoning.
        thinking_prefix: starts an answer to be generated with reasoning.
        after_question_only: no empty reasoning block after tool results.
        history_prefix: replaces reasoning that is dropped from the history.
        think_tags: the tags around reasoning.
        thinking_system: starts the system message if `enable_thinking` is set.
        system_in_question: the system message starts the first question, and answers are stripped of line breaks.
        system_file: the file in the model's folder with the default system message, which names the day.
        trims: texts are stripped of surrounding whitespace, and reasoning is formatted as in the published template.
        answer_prefix: starts an answer that does not start with `answer_start`.
        adds_bos: start with the tokens that the tokenizer adds before a text.
        marks: texts in the chat template of its models; () if the chat template does not identify them.
        models: a pattern of the names of its models, in lower case.
    """

    name: str
    prompt: str
    separator: str | None
    suffix: str
    prefix: str = ""
    system: str | None = None
    default_system: str | None = None
    stop_words: tuple[str, ...] = ()
    agent: str | None = None
    thinks: bool = False
    empty_thought: str = ""
    thinking_prefix: str = ""
    after_question_only: bool = False
    history_prefix: str = ""
    think_tags: tuple[str, str] = ("<think>", "</think>")
    thinking_system: str = ""
    system_in_question: bool = False
    system_file: str = ""
    trims: bool = False
    answer_start: str = ""
    answer_prefix: str = ""
    adds_bos: bool = False
    marks: tuple[str, ...] = ()
    models: str = ""

    rules: SwiftRules = SwiftRules(4)
    agent_template: AgentTemplate | None = None

    encodes_separately = False

    @property
    def answer_end(self) -> str:
        return self.suffix

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """Render the turns of a conversation; see `Template.render`. The turns state which answers are trained."""
        if conversation.switches:
            given: dict[str, Any] = dict(conversation.switches)
            rules = replace(self.rules, **given)
            return replace(self, rules=rules).render(replace(conversation, switches=()), thinking)
        merged = self._merged([self._prepared(message) for message in conversation.messages])
        system = self._system(conversation)
        if self.system_in_question and system is not None:
            merged[0].texts[0], system = f"{system}\n\n{merged[0].texts[0]}", None
        if self.rules.has_template:
            if self.empty_thought and self.rules.add_empty_thought:
                self._add_empty_reasoning(merged)
            keeps = self.rules.preserve_thinking
            if keeps is None:
                keeps = not (self.rules.last_round and (self.thinks or self.rules.enable_thinking))
            if not keeps:
                self._drop_old_reasoning(merged)
            if conversation.tools:
                system, merged[0].texts[0] = self._agent().add_tools(conversation.tools, system, merged[0].texts[0])
        if merged[0].role == "assistant":
            merged.insert(0, _Merged("user", [""]))
        if any((each.role == "assistant") != bool(index % 2) for index, each in enumerate(merged)):
            raise RowError("roles-out-of-order", "roles out of order", " ".join(each.role for each in merged))
        if self.separator is None:
            merged = merged[-1 if len(merged) % 2 else -2 :]
        return list(self._turns(merged, system))

    def _prepared(self, message: Message) -> Message:
        """Return a message with its text in the format of the template."""
        text, is_answer = message.content, message.role == "assistant"
        if self.trims:
            text = text.strip()
            before, end, after = text.partition("</think>")
            if is_answer and end and "<think>" in text:
                reasoning = before.rstrip("\n").rpartition("<think>")[2].strip()
                rest = after.lstrip("\n")
                text = f"<think>\n{reasoning}\n</think>\n\n{rest}"
        if self.system_in_question and is_answer:
            text = text.strip("\n")
        if self.answer_prefix and is_answer and self.rules.has_template and not text.startswith(self.answer_start):
            text = self.answer_prefix + text
        return message if text == message.content else replace(message, content=text)

    def _turns(self, merged: Sequence[_Merged], system: str | None) -> Iterator[Turn]:
        before = fill(self.system, content=system) if system and self.system is not None else self.prefix
        last, last_round = len(merged) - 2, self._last_question(merged)
        for index in range(0, len(merged), 2):
            question = merged[index]
            query = question.texts[0] if question.role == "tool" else fill(self.prompt, content=question.texts[0])
            prompt: tuple[str, ...] = (before, query)
            if masked := 0 if self.rules.has_template else self._masked(query):
                yield Turn((before,), (query[:masked],), False)
                prompt = (query[masked:],)
            if index > last:  # the last question has no answer
                yield Turn((*prompt, self._answer_prompt), ())
                return
            answer = merged[index + 1]
            for text, message in zip(answer.texts, answer.messages, strict=False):
                in_scope = not self.rules.last_round or index >= last_round
                trained = in_scope if message.trained is None else message.trained
                masked = self._masked(text) if trained and not message.whole else 0
                if masked:
                    yield Turn(prompt, (text[:masked],), False)
                    prompt = ()
                yield Turn(prompt, (text[masked:],), trained)
                prompt = ()
            is_followed = len(merged) > index + 2 and merged[index + 2].role != "tool"
            before = (self.separator or "") if is_followed else ""
        if not merged[-1].texts[-1].endswith(tuple(filter(None, (*self.stop_words, self.suffix.strip())))):
            yield Turn((), (self.suffix,), True)

    @property
    def _answer_prompt(self) -> str:
        """The start of an answer to be generated."""
        thinks = self.rules.enable_thinking
        if thinks is None:
            thinks = self.thinks and not (self.rules.version >= 4 and self.empty_thought)
        if not self.rules.has_template:
            return ""
        return self.thinking_prefix if thinks else self.empty_thought

    def _merged(self, messages: Sequence[Message]) -> list[_Merged]:
        """Render calls and tool results, and join consecutive messages of one role."""
        merged: list[_Merged] = []
        for message in self._with_calls_written(messages):
            previous = merged[-1] if merged else None
            if message.role == "tool":
                self._add_result(merged, message.content)
            elif previous is None or previous.role != message.role:
                merged.append(_Merged(message.role, [message.content], [message]))
            elif message.role == "user" or self.rules.version < 4:
                previous.texts[-1] += message.content
            else:
                previous.texts.append(message.content)
                previous.messages.append(message)
        for answer, each in pairwise(merged):
            if each.role == "tool":
                around = self.prompt, self.separator or ""
                answer.texts[-1], written = self._agent().results(answer.texts[-1], each.texts, *around)
                each.texts = [written]
        return merged

    def _add_result(self, merged: list[_Merged], content: str) -> None:
        previous = merged[-1] if merged else None
        if previous is not None and previous.role == "tool":
            previous.texts.append(content)
        elif previous is not None and previous.role == "assistant":
            merged.append(_Merged("tool", [content]))
        else:
            written = None
            if previous is not None and self.rules.version >= 4:
                written = self._agent().standalone([content], self.prompt, self.separator or "")
            if previous is None or written is None:
                raise RowError("roles-out-of-order", "roles out of order", "a tool result does not follow a tool call")
            previous.texts[-1] += written

    def _with_calls_written(self, messages: Sequence[Message]) -> list[Message]:
        """Render each run of calls as one message of the assistant."""
        written: list[Message] = []
        run: list[Message] = []
        for message in (*messages, None):
            if message is not None and message.tool_calls:
                run.append(message)
                continue
            if run:
                before = written[-1] if written and written[-1].role == "assistant" else None
                calls = [call for each in run for call in each.tool_calls]
                changed, text = self._agent().calls(calls, before.content if before else None)
                if before is not None and changed is not None:
                    written[-1] = replace(before, content=changed)
                own = (each.trained for each in run if each.trained is not None)
                trained = next(own, None) if self.rules.version >= 4 else None
                written.append(Message("assistant", text, trained=trained, whole=any(each.whole for each in run)))
                run = []
            if message is not None:
                written.append(message)
        return written

    def _system(self, conversation: Conversation) -> str | None:
        system = conversation.system
        if not self.rules.has_template:
            if (system is not None or conversation.tools) and self.rules.version < 4:
                raise RowError("no-system-in-template", "the template has no place for a system message")
            return system if self.system_in_question else None
        if self.trims and system is not None:
            system = system.strip()
        if system is not None and self.system is None and not self.system_in_question:
            raise RowError("no-system-in-template", "the template has no place for a system message")
        system = self.default_system if system is None else system
        if self.thinking_system and self.rules.enable_thinking:
            return self.thinking_system + (system or "")
        return system

    def _add_empty_reasoning(self, merged: Sequence[_Merged]) -> None:
        start = self._last_question(merged) if self.rules.last_round else -1
        for index, each in enumerate(merged):
            follows = merged[index - 1].role if index else None
            if index < start or each.role != "assistant" or (self.after_question_only and follows != "user"):
                continue
            if not each.texts[0].startswith((self.think_tags[0], self.empty_thought)):
                each.texts[0] = self.empty_thought + each.texts[0]

    def _drop_old_reasoning(self, merged: Sequence[_Merged]) -> None:
        """Drop the reasoning of answers before the last question or tool result."""
        for each in merged[: max(self._last_question(merged), 0)]:
            if each.role == "assistant":
                each.texts[0] = self.history_prefix + each.texts[0].rpartition(self.think_tags[1])[2].strip()

    def _last_question(self, merged: Sequence[_Merged]) -> int:
        """Return the index of the last question; in version 4 tool results are questions, too."""
        roles = ("user",) if self.rules.version < 4 else ("user", "tool")
        return max((index for index, each in enumerate(merged) if each.role in roles), default=-1)

    def _masked(self, text: str) -> int:
        """Return the number of characters at the start of a trained answer that are not trained."""
        masks = self.rules.masks
        if masks is None:
            is_hybrid = self.thinks and bool(self.empty_thought)
            masks = ("empty_thought",) if self.rules.version >= 4 and is_hybrid else ()
        masked = 0
        for mask in masks or ():
            has_own = mask == "empty_thought" and self.think_tags[0] != "<think>"
            patterns = (re.escape(self.empty_thought),) if has_own else _MASKS[mask]
            found = re.compile("|".join(patterns)).match(text, masked)
            masked = found.end() if found else masked
        return masked

    def _agent(self) -> AgentTemplate:
        if self.agent_template is None:
            raise RowError("no-tools-in-template", f"template {self.name} has no agent template", "set agent_template")
        return self.agent_template
