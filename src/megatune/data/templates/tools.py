"""Tool formats: the prompt that lists the tools, and how calls and results are formatted.

LLaMA-Factory's formats are in tools.yaml; ms-swift's agent templates, by name and version, in agents.yaml. An entry of
these YAML files can inherit from another with `like`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatune.data.bad_rows import RowError
from megatune.data.conversation import ToolCall
from megatune.data.templates.tool_texts import Tool, ToolTexts, call_id, compact, fill, fill_from, tool_name, wrapped
from megatune.errors import ExitCode, Finding, MegatuneError, closest


@cache
def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the entries of NAME.yaml, without inheritance."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return entries


def load_entry(table: str, name: str, *, in_3: bool = False) -> dict[str, Any]:
    """Return an entry with the values that it inherits through `like`; lists are returned as tuples.

    Args:
        in_3: apply the changes for ms-swift 3.
    """
    entry = dict(read_table(table)[name])
    like, changed = entry.pop("like", None), entry.pop("in_3", {})
    inherited = {} if like is None else load_entry(table, like, in_3=in_3)
    entry |= changed if in_3 else {}
    return inherited | {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


# Llama 3's tool prompt states the date. This is the default of its chat template; with today's date, the same data
# would become other tokens tomorrow.
LLAMA3_DATE = "26 Jul 2024"


def tool_schema(tool: Tool) -> Tool:
    """Return the tool's schema in OpenAI's format: {"type": "function", "function": {...}}.

    Raises:
        RowError: the tool has no name.
    """
    is_whole = isinstance(tool, dict) and tool.get("type") == "function"
    schema = tool if is_whole else {"type": "function", "function": tool}
    function = schema.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad-tools", "a tool without a name")
    return schema


@dataclass(frozen=True, kw_only=True)
class ToolFormat(ToolTexts):
    """A tool format.

    Attributes:
        offer: the tool prompt, with {tools} and {names}; {date} is the date in Llama 3's tool prompt.
        name_joiner: the separator of {names}.
        several_calls: a run of more than one call, if it differs from `all_calls`; None rejects such runs.
        result: replaces {content} for the result of the call with {id}.
        offer_before_question: the tool prompt is written before the last user's message, not after the system message.
        offer_before_system: the tool prompt is written before the text of the system message, not after it.
        joiner: the separator of the assistant's text and its calls.
        takes_any: tools are written as in the row, even if they are not schemas.
    """

    name: str
    offer: str
    name_joiner: str = ","
    several_calls: str | None = ""
    result: str = "{content}"
    offer_before_question: bool = False
    offer_before_system: bool = False
    joiner: str = "\n"
    takes_any: bool = False

    def tool_prompt(self, tools: Sequence[Tool]) -> str:
        """Return the text that describes tools to the model."""
        schemas = list(tools) if self.takes_any else [tool_schema(tool) for tool in tools]
        names = "" if self.takes_any else self.name_joiner.join(schema["function"]["name"] for schema in schemas)
        return fill(self.offer, tools=self.format_tools(schemas)[0], names=names, date=LLAMA3_DATE)

    def format_calls(self, calls: Sequence[ToolCall], number: int = 0) -> str:
        if len(calls) > 1 and self.several_calls is None:
            raise RowError("bad-tools", f"parallel tool calls, which tool_format: {self.name} does not support")
        written = super().format_calls(calls, number)
        return fill(self.several_calls, calls=written) if len(calls) > 1 and self.several_calls else written

    def answer(self, content: str, number: int) -> str:
        """Return the text that replaces {content} for the result of call `number` of the conversation."""
        return fill(self.result, content=content, id=call_id(number))


@cache
def tool_format(name: str) -> ToolFormat:
    """Return the format of an entry of tools.yaml."""
    return ToolFormat(**load_entry("tools", name), name=name)


# The values of `tools` in a template file.
TOOL_FORMATS = {"qwen": "qwen", "llama3": "llama3", "mistral": "mistral_published", "plain": "plain"}


# ReAct's markers of a tool's name, its arguments and its result.
REACT = ("Action:", "Action Input:", "Observation:")

# The treatment of the assistant's text before calls, and the separator of the two.
_BEFORE: dict[str, Callable[[str], tuple[str, str]]] = {
    "keep": lambda before: (before, ""),
    "strip": lambda before: (before.strip(), "\n\n" if before.strip() else ""),
    "strip_text": lambda before: (before.strip(), "\n") if before.strip() else (before, ""),
    "after_thought": lambda before: (before, "\n\n" if before.split("</think>")[-1].strip() else ""),
}

# The placeholders of a result's text.
_RESULT_FIELDS: dict[str, Callable[[str], str]] = {
    "content": str,
    "content_object": lambda content: compact({"content": content}),
}


@dataclass(frozen=True, kw_only=True)
class AgentTemplate(ToolTexts):
    """An agent template of ms-swift: texts for tools, calls and results.

    Attributes:
        system_message: with {system}, {tools}, {names} (comma-separated names of the tools) and {instructions}.
        system_part: the value of {system} if the row has a system message.
        no_system: the value of {no_system} if the row has none.
        default_system: the system message of rows without one.
        strip_system: strip the system message.
        instructions: the value of {instructions}, inserted first; templates share it.
        question: the first user's message, with {tools} and {question}, if it lists the tools; "" otherwise.
        before: the treatment of the assistant's text before calls, a key of _BEFORE.
        result, result_joiner: one of {results}, with the placeholders of _RESULT_FIELDS, and the separator of results.
        results_within: the text around {results}, everywhere.
        all_results: all text from the answer to the next one, with {results}, or with {separator} and {user_message},
            a user's message that contains the results.
        after_user: results after a user's message, with {results}, {separator} and {user_start}, the start of another
            user's message; None rejects them.
        after_user_joiner: the separator of such results, if it is not result_joiner.
        keywords: results after an answer that contains the first two keywords are written as in REACT; None: never.
        version: ms-swift's version, 3 or 4.
    """

    system_message: str
    system_part: str = "{system}"
    no_system: str = ""
    default_system: str = ""
    strip_system: bool = False
    instructions: str = ""
    question: str = ""
    before: str = "keep"
    result: str = "{content}"
    result_joiner: str = "\n"
    results_within: str = "{results}"
    all_results: str = "{results}"
    after_user: str | None = None
    after_user_joiner: str | None = None
    keywords: tuple[str, str, str] | None = REACT
    version: int

    def add_tools(self, tools: Sequence[Mapping[str, Any]], system: str | None, question: str) -> tuple[str, str]:
        """Return the system message and the first user's message, with the tools in one of them."""
        if not tools:
            return system or "", question
        whole = (wrapped(tool, self.version) for tool in tools)
        described, names = self.format_tools(whole, tool_name if "{names}" in self.system_message else None)
        written = {"tools": described, "names": ",".join(names)}
        system = self.default_system if system is None else system
        system = system.strip() if self.strip_system else system
        message = fill(
            self.system_message.replace("{instructions}", self.instructions),
            system=fill(self.system_part, system=system) if system else "",
            no_system="" if system else self.no_system,
            **written,
        )
        return message, fill(self.question, question=question, **written) if self.question else question

    def calls(self, calls: Sequence[ToolCall], before: str | None) -> tuple[str | None, str]:
        """Return the assistant's message right before the calls (None if there is none), and the text of the calls."""
        text = self.format_calls(calls)
        if before is None:
            return None, text
        before, separator = _BEFORE[self.before](before)
        return before, separator + text

    def results(self, answer: str, results: Sequence[str], prompt: str, separator: str) -> tuple[str, str]:
        """Return the answer before the results, and all text from there to the start of the next answer.

        If several messages of the assistant precede the results, ms-swift 3 uses all of their text as the answer, and
        ms-swift 4 only the last message.

        Args:
            prompt: a user's message of the chat template, with {content}, up to the start of the answer.
            separator: ends an answer that another message follows.
        """
        if self.keywords and all(word in answer for word in self.keywords[:2]):
            observation = self.keywords[2]
            if not answer.endswith(observation):
                answer += ("" if answer.endswith("\n") else "\n") + observation
            return answer, observation.join(each if each.endswith("\n") else f"{each}\n" for each in results)
        joined = self._joined(results, self.result_joiner)
        user_message = prompt.replace("{content}", joined)
        return answer, fill(self.all_results, results=joined, separator=separator, user_message=user_message)

    def standalone(self, results: Sequence[str], prompt: str, separator: str) -> str | None:
        """Return the text to append to a user's message that results follow; None if ms-swift rejects that."""
        if self.after_user is None or self.version < 4:
            return None
        joined = self._joined(results, self.result_joiner if self.after_user_joiner is None else self.after_user_joiner)
        user_start = prompt.split("{content}", maxsplit=1)[0]
        return fill(self.after_user, results=joined, separator=separator, user_start=user_start)

    def _joined(self, results: Sequence[str], joiner: str) -> str:
        joined = joiner.join(fill_from(self.result, _RESULT_FIELDS, each) for each in results)
        return fill(self.results_within, results=joined)


# ms-swift's names without texts here: formats of models that are not supported.
NOT_SUPPORTED = (
    "gemma4", "hy_v3", "hy_v3_preview", "kimi_k25", "kimi_k3", "minicpm5", "minimax_m2", "minimax_m3", "seed_oss",
)  # fmt: skip

# Two templates have other names in version 3 than in version 4.
_NAMES_IN_3 = {"glm4": "chatglm4", "glm4_0414": "glm4"}


def agent_names(version: int) -> dict[str, str]:
    """Return the template names of a version of ms-swift, each with the name of its entry in agents.yaml."""
    names = {name: name for name, written in read_table("agents").items() if version >= written.get("since", 3)}
    return names if version >= 4 else names | _NAMES_IN_3


@cache
def agent_template(name: str, version: int) -> AgentTemplate:
    """Return an agent template of ms-swift 3 or 4.

    Raises:
        MegatuneError: this version has no template of this name, or it is not supported.
    """
    names = agent_names(version)
    if name in names:
        texts = load_entry("agents", names[name], in_3=version < 4)
        texts.pop("since", None)
        return AgentTemplate(**texts, version=version)
    if name in NOT_SUPPORTED:
        what = f"agent template {name} is not supported"
    else:
        what = f"ms-swift {version} has no agent template {name!r}"
    near = closest(name, names, cutoff=0)
    fix = f"use {near}, the nearest supported name, or another of: {', '.join(sorted(names))}"
    raise MegatuneError(Finding(what, fix=fix), ExitCode.SETTINGS)
