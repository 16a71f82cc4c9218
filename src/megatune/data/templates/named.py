"""Templates as data: the text around each role's messages, and how a conversation is rendered with it.

The templates with a name are in named.yaml; the user's templates are read from other YAML files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from megatune.config.entry import SettingEntry, read_file
from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message
from megatune.data.templates.tool_texts import fill
from megatune.data.templates.tools import TOOL_FORMATS, ToolFormat, load_entry, read_table, tool_format
from megatune.data.templates.turns import EMPTY_THINK, Thinking, Turn, normalize_think, split_think, strip_think
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean

# The fields that are rendered texts; {bos} and {eos} in them are the tokenizer's special tokens.
TEXTS = ("prefix", "system", "user", "assistant", "followed", "calls", "observation", "observation_separator")

_SUFFIXES = (".yaml", ".yml")
_KEYS = ("name", "user", "assistant", "system", "observation", "observation_separator", "prefix", "default_system",
         "tools", "thinks", "special_tokens")  # fmt: skip
_WITH_CONTENT = ("user", "assistant", "system", "observation")
_REQUIRED = {  # with an example of each
    "user": '"<|im_start|>user\\n{content}<|im_end|>\\n<|im_start|>assistant\\n"',
    "assistant": '"{content}<|im_end|>\\n"',
    "system": '"<|im_start|>system\\n{content}<|im_end|>\\n"',
}
# {name}, or {{name}} as LLaMA-Factory writes it; in {"content": {content}} the outer braces are text.
_PLACEHOLDER = re.compile(r"\{\{[A-Za-z_]+\}\}|\{[A-Za-z_]+\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTemplate:
    """A chat format, as texts around {content}.

    Attributes:
        user: a user's message, including the start of the assistant's turn.
        assistant: an answer, with its end-of-turn token.
        followed: an answer that is not the last; "" uses `assistant`.
        system: the system message, including the tool prompt.
        calls: an answer that only calls tools; "" uses `assistant`.
        observation: like `user`, for tool results, which are joined by `observation_separator`; "" supports none.
        prefix: starts every conversation.
        default_system: the system message of conversations without one.
        tool_format: None rejects conversations with tools.
        thinks: whether the model reasons before it answers.
        thinks_until_question: in the history, tool calls after the last question keep their reasoning; False keeps
            only the reasoning of the last answer.
        fills_thoughts: every answer after the last question without reasoning gets an empty reasoning block; False:
            only the last answer.
        special_tokens: texts that must be one token each, or the template does not fit the tokenizer.
        system_in_question: the system message is written into the first or the last user's message, before its text;
            "" keeps it separate.
        trims: roles whose texts are stripped of surrounding whitespace.
        encodes_separately: texts between special tokens are tokenized separately, as in LLaMA-Factory.
        eos: the tokenizer's eos_token, after `with_special_tokens`.
        has_other_tools: `tool_format` was replaced: calls end as answers do, but without the whitespace after the end,
            and the tool prompt keeps its leading line breaks, as in LLaMA-Factory.
    """

    name: str
    user: str
    assistant: str
    system: str
    followed: str = ""
    calls: str = ""
    observation: str = ""
    observation_separator: str = "\n"
    prefix: str = ""
    default_system: str = ""
    tool_format: ToolFormat | None = None
    thinks: bool = False
    thinks_until_question: bool = True
    fills_thoughts: bool = False
    special_tokens: tuple[str, ...] = ()
    system_in_question: Literal["", "first", "last"] = ""
    trims: tuple[str, ...] = ()
    encodes_separately: bool = False
    eos: str = ""
    has_other_tools: bool = False

    answer_end: ClassVar[str | None] = None

    def with_special_tokens(self, bos_token: str, eos_token: str) -> NamedTemplate:
        """Return a copy with {bos} and {eos} replaced by a tokenizer's special tokens."""
        texts = {key: getattr(self, key).replace("{bos}", bos_token).replace("{eos}", eos_token) for key in TEXTS}
        return replace(self, **texts, eos=eos_token)

    def with_tools(self, tool_format: ToolFormat) -> NamedTemplate:
        """Return a copy with another tool format, as LLaMA-Factory's `tool_format` does."""
        end = self.assistant.partition("{content}")[2].strip()
        return replace(self, tool_format=tool_format, calls=f"{{content}}{end}", has_other_tools=True)

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """Render the turns of a conversation; see `Template.render`."""
        messages = conversation.messages
        head, question = self._head(conversation)
        last_question = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        turns: list[Turn] = []
        start = calls = observations = 0
        for stop, message in enumerate(messages):
            if message.role != "assistant":
                continue
            is_here = not turns if self.system_in_question == "first" else start <= last_question < stop
            before = question if is_here else ("", "")
            prompt = (*(head if not turns else ()), *self._prompt(messages[start:stop], before, observations))
            is_last = stop == len(messages) - 1
            is_history = stop < last_question if self.thinks_until_question else not is_last
            answer = self._answer(message, thinking, is_history=is_history, number=calls)
            fills = is_last or (self.fills_thoughts and not is_history)
            turn = self._turn(prompt, answer, message, thinking, fills=fills, is_last=is_last)
            turns.append(turn)
            calls += len(message.tool_calls)
            observations += sum(message.role == "tool" for message in messages[start:stop])
            start = stop + 1
        if any(question) and last_question < 0:
            raise RowError("no-question", "the template writes the system message and tools into a user's message")
        return [self._split(turn) for turn in turns] if self.encodes_separately else turns

    def _split(self, turn: Turn) -> Turn:
        """Split the texts so that the eos_token is a piece of its own."""
        own = re.compile(f"({re.escape(self.eos)})")
        prompt, completion = (
            tuple(part for text in side for part in own.split(text) if part) for side in (turn.prompt, turn.completion)
        )
        return replace(turn, prompt=prompt, completion=completion)

    def _head(self, conversation: Conversation) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return the start of the conversation, and the texts before and inside a user's message."""
        given = conversation.system or self.default_system
        system = given.strip() if "system" in self.trims else given
        offer = ""
        if conversation.tools:
            if self.tool_format is None:
                raise RowError("no-tools-in-template", "the template has no text for tools")
            offer = self.tool_format.tool_prompt(conversation.tools)
            if self.tool_format.offer_before_system:
                system, offer = f"{offer.lstrip()}\n\n{system}" if system else offer.lstrip(), ""
            elif not self.tool_format.offer_before_question:
                offer = offer if system or self.has_other_tools else offer.lstrip("\n")
                system, offer = f"{system}{offer}", ""
        # A system message of whitespace only leaves an empty turn, as in the published chat templates that trim.
        text = fill(self.system, content=system) if given or system else ""
        return ((self.prefix, ""), (offer, text)) if self.system_in_question else ((self.prefix, text), (offer, ""))

    def _prompt(self, messages: Sequence[Message], before: tuple[str, str], number: int) -> tuple[str, ...]:
        """Render one user's message, or the results of the tools that the last message called."""
        roles = {message.role for message in messages}
        offer, system = before
        if roles == {"user"} and len(messages) == 1:
            return (offer, fill(self.user, content=f"{system}{self._text(messages[0])}"))
        if roles != {"tool"}:
            raise RowError(
                "turns-do-not-alternate", "an answer does not follow exactly one message of the user or of tools"
            )
        if not self.observation or self.tool_format is None:
            raise RowError("no-tools-in-template", "the template has no text for tools")
        answers = [self.tool_format.answer(self._text(message), i) for i, message in enumerate(messages, start=number)]
        return (fill(self.observation, content=self.observation_separator.join(answers)),)

    def _answer(self, message: Message, thinking: Thinking, is_history: bool, number: int) -> str:
        """Render the assistant's text and calls, without the end of the turn."""
        content = self._text(message)
        if self.thinks:
            drops = thinking.enable is False or (thinking.drop_history and is_history)
            content = strip_think(content) if drops else normalize_think(content)
        if not message.tool_calls:
            return content
        if self.tool_format is None:
            raise RowError("no-tools-in-template", "the template has no text for tools")
        reasoning, said = split_think(content)
        if reasoning and not said:  # trimming removes the line breaks between the reasoning and its calls
            reasoning = split_think(message.content.lstrip())[0] if "assistant" in self.trims else reasoning
        calls = self.tool_format.format_calls(message.tool_calls, number)
        return f"{reasoning}{said}{self.tool_format.joiner}{calls}" if said else f"{reasoning}{calls}"

    def _turn(
        self, prompt: tuple[str, ...], answer: str, message: Message, thinking: Thinking, *, fills: bool, is_last: bool
    ) -> Turn:
        only_calls = self.calls and message.tool_calls and (self.has_other_tools or not self._text(message))
        # In the history, answers and the calls before the last answer have no empty reasoning block.
        is_bare = "<think>" not in answer and "</think>" not in answer
        thinks = self.thinks and is_bare and (fills or not thinking.drop_history)
        strips = thinks and not (only_calls and self.has_other_tools)
        text = self.assistant if is_last else self.followed or self.assistant
        written = fill(self.calls if only_calls else text, content=answer.lstrip("\n") if strips else answer)
        if not thinks:
            return Turn(prompt, (written,), message.trained)
        if thinking.enable:
            return Turn(prompt, (EMPTY_THINK, written), message.trained)
        return Turn((*prompt, EMPTY_THINK), (written,), message.trained)

    def _text(self, message: Message) -> str:
        return message.content.strip() if message.role in self.trims else message.content


def _named(name: str) -> NamedTemplate:
    texts = load_entry("named", name)
    tools = tool_format(texts.pop("tool_format")) if "tool_format" in texts else None
    return NamedTemplate(**texts, tool_format=tools, name=name)


NAMED_TEMPLATES = {name: _named(name) for name in read_table("named")}


def is_template_file(name: str) -> bool:
    """Return whether a value of `template` is a path, not a name."""
    return name.endswith(_SUFFIXES)


def read_template(path: str) -> NamedTemplate:
    """Read the template in a YAML file; a relative path is resolved from the working directory.

    Raises:
        MegatuneError: the file has errors, all of which are listed (exit code 64), or does not exist (exit code 66).
    """
    if not Path(path).is_file():
        fix = "check the path; it is relative to the folder in which the command runs"
        raise MegatuneError(Finding(f"template: there is no file {path}", fix=fix), ExitCode.INPUT)
    entries, findings = read_file(path)
    fields: dict[str, Any] = {"name": Path(path).stem}
    for entry in entries:
        fields["tool_format" if entry.key == "tools" else entry.key] = _field(entry, findings)
    given = {entry.key for entry in entries}
    if entries or not findings:
        missing = {key: example for key, example in _REQUIRED.items() if key not in given}
        findings += [Finding(f"{key} is missing", path, fix=f"for example {key}: {missing[key]}") for key in missing]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    written = "".join(fields.get(key, "") for key in TEXTS)
    own = tuple(token for token in ("{bos}", "{eos}") if token in written)
    fields["special_tokens"] = tuple(dict.fromkeys((*own, *fields.get("special_tokens", ()))))
    return NamedTemplate(**fields)


def _field(entry: SettingEntry, findings: list[Finding]) -> Any:
    """Return the value of one key; append its errors to `findings`."""
    key, value, where = entry.key, entry.value, entry.where
    if key not in _KEYS:
        fix = did_you_mean(key, _KEYS, f"one of {', '.join(_KEYS)}", cutoff=0.5)
        findings.append(Finding(f"{key} is not a key of a template", where, fix=fix))
    elif key == "special_tokens":
        tokens = tuple(item.text for item in value.items)
        if not isinstance(value.data, list) or not all(tokens):
            findings.append(Finding("special_tokens must be a list of texts", where, fix='write ["<token>"]'))
        return tokens
    elif key == "thinks":
        if not isinstance(value.data, bool):
            findings.append(Finding("thinks must be true or false", where))
        return value.data
    elif value.text is None:
        findings.append(Finding(f"{key} must be text", where, fix='write it in quotes: "..."'))
    elif key == "tools":
        if value.text not in TOOL_FORMATS:
            fix = f"one of {', '.join(TOOL_FORMATS)}"
            findings.append(Finding(f"tools: {value.text!r} is not a known tool format", where, fix=fix))
            return None
        return tool_format(TOOL_FORMATS[value.text])
    else:
        findings += _faults(key, value.text, where)
    return value.text


def _faults(key: str, text: str, where: str) -> list[Finding]:
    if key in ("name", "default_system"):
        return []
    allowed = (*(("{content}",) if key in _WITH_CONTENT else ()), "{bos}", "{eos}")
    unknown = [match for match in _PLACEHOLDER.findall(text) if match not in allowed]
    if unknown:
        fix = f"write {' or '.join(allowed)}"
        return [Finding(f"{key}: {placeholder} is not a known placeholder", where, fix=fix) for placeholder in unknown]
    number = text.count("{content}")
    if key in _WITH_CONTENT and number != 1:
        times = "has no {content}" if number == 0 else "has {content} more than once"
        return [Finding(f"{key} {times}", where, "the message replaces it", "write {content} once")]
    if key == "assistant" and not text.partition("{content}")[2].strip():
        fix = "write {eos} or a special token after {content}"
        return [Finding("assistant: nothing ends the answer", where, "the model would not learn to stop", fix)]
    return []
