"""Formats of tools: how they are offered, and how calls and results of them are written.

LLaMA-Factory's are in tools.yaml, and ms-swift's agent templates, by name and version, in agents.yaml. In these YAML
files of texts with placeholders, entries may lend each other what one does not give.
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
from megatune.data.templates.tool_texts import Tool, ToolTexts, call_id, compact, fill, fill_from, prepared, tool_name
from megatune.errors import ExitCode, Finding, MegatuneError, closest


@cache
def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the entries of NAME.yaml as they are written."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return entries


def entry_of(table: str, name: str, *, in_3: bool = False) -> dict[str, Any]:
    """Return an entry with what it takes from the one that it is `like`; lists are tuples.

    Args:
        in_3: with what ms-swift 3 writes otherwise.
    """
    own = dict(read_table(table)[name])
    like, changed = own.pop("like", None), own.pop("in_3", {})
    lent = {} if like is None else entry_of(table, like, in_3=in_3)
    own |= changed if in_3 else {}
    return lent | {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}


# Llama 3's tool prompt states the day. This is the one its own chat template falls back to; the true day would make the
# same data other tokens tomorrow.
LLAMA3_DATE = "26 Jul 2024"


def tool_schema(tool: Tool) -> Tool:
    """Return the schema as OpenAI's API has it: {"type": "function", "function": {...}}.

    Raises:
        RowError: it names no function.
    """
    is_whole = isinstance(tool, dict) and tool.get("type") == "function"
    schema = tool if is_whole else {"type": "function", "function": tool}
    function = schema.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad-tools", "a tool without a name")
    return schema


@dataclass(frozen=True, kw_only=True)
class ToolFormat(ToolTexts):
    """A way of writing tools.

    Attributes:
        offer: the text that describes the {tools}, by their {names}; {date} is the day that Llama 3's states.
        name_joiner: between two of {names}.
        several_calls: a run of more than one call, where it is not `all_calls`; None refuses it.
        result: what replaces {content} where a tool answers the call of {id}.
        offer_before_question: the offer is written before the last message of the user, not after the system message.
        offer_before_system: the offer is written before the system message's text, not after it.
        joiner: between what the assistant says and its calls.
        takes_any: tools are written as the row has them, also those that are no schemas.
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

    def offered(self, tools: Sequence[Tool]) -> str:
        """Return the text that offers tools."""
        schemas = list(tools) if self.takes_any else [tool_schema(tool) for tool in tools]
        names = "" if self.takes_any else self.name_joiner.join(schema["function"]["name"] for schema in schemas)
        return fill(self.offer, tools=self.written_tools(schemas)[0], names=names, date=LLAMA3_DATE)

    def written_calls(self, calls: Sequence[ToolCall], number: int = 0) -> str:
        if len(calls) > 1 and self.several_calls is None:
            raise RowError("bad-tools", f"several calls at once, which tool_format: {self.name} has no text for")
        written = super().written_calls(calls, number)
        return fill(self.several_calls, calls=written) if len(calls) > 1 and self.several_calls else written

    def answer(self, content: str, number: int) -> str:
        """Return what replaces {content} where a tool answers the conversation's call `number`."""
        return fill(self.result, content=content, id=call_id(number))


@cache
def tool_format(name: str) -> ToolFormat:
    """Return the format of an entry of tools.yaml."""
    return ToolFormat(**entry_of("tools", name), name=name)


# What `tools` of a template's file may be.
TOOL_FORMATS = {"qwen": "qwen", "llama3": "llama3", "mistral": "mistral_published", "plain": "plain"}


# What ReAct writes before the name of a tool, before its arguments and before its result.
REACT = ("Action:", "Action Input:", "Observation:")

# What becomes of the assistant's text before calls, and what separates the two.
_BEFORE: dict[str, Callable[[str], tuple[str, str]]] = {
    "keep": lambda before: (before, ""),
    "strip": lambda before: (before.strip(), "\n\n" if before.strip() else ""),
    "strip_text": lambda before: (before.strip(), "\n") if before.strip() else (before, ""),
    "after_thought": lambda before: (before, "\n\n" if before.split("</think>")[-1].strip() else ""),
}

# The placeholders of a result.
_RESULT_FIELDS: dict[str, Callable[[str], str]] = {
    "content": str,
    "content_object": lambda content: compact({"content": content}),
}


@dataclass(frozen=True, kw_only=True)
class AgentTemplate(ToolTexts):
    """A way of writing tools, their calls and their results, which is nothing but texts.

    Attributes:
        system_message: with {system}, {tools}, {names} (those of the tools, with commas) and {instructions}.
        system_part: what {system} becomes where the row has a system message.
        no_system: what {no_system} becomes where it has none.
        default_system: the system message of rows without one, be it empty.
        strip_system: removes white space around the system message.
        instructions: what {instructions} becomes, before anything else; templates share them.
        question: the first user's message where the tools stand there, with {tools} and {question}; "": they do not.
        before: what becomes of the assistant's text before calls, a key of _BEFORE.
        result, result_joiner: one of {results}, with the placeholders of _RESULT_FIELDS.
        results_within: what encloses {results} wherever they stand.
        all_results: all text from the answer to the next one, with {results} or with {separator} and {user_message},
            a user's message that holds them.
        after_user: results that follow a user's message, with {results}, {separator} and {user_start}, which starts
            another user's message; None: they are refused.
        after_user_joiner: separates them where that is not result_joiner.
        keywords: as REACT; results follow answers that have the first two in that way, too. None: in no case.
        version: of ms-swift, 3 or 4.
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

    def offer(self, tools: Sequence[Mapping[str, Any]], system: str | None, question: str) -> tuple[str, str]:
        """Return the system message and the first user's message, with the tools in one of them."""
        if not tools:
            return system or "", question
        whole = (prepared(tool, self.version) for tool in tools)
        described, names = self.written_tools(whole, tool_name if "{names}" in self.system_message else None)
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
        """Return the text of the assistant's message right before the calls, None where there is none, and the text of
        a run of calls."""
        text = self.written_calls(calls)
        if before is None:
            return None, text
        before, separator = _BEFORE[self.before](before)
        return before, separator + text

    def results(self, answer: str, results: Sequence[str], prompt: str, separator: str) -> tuple[str, str]:
        """Return the answer before the results, and all text from there to where the next answer starts.

        Where several messages of the assistant precede the results, ms-swift 3 takes all of their text for the answer,
        and ms-swift 4 the last of them.

        Args:
            prompt: a user's message of the chat template, {content}, up to where the answer starts.
            separator: what ends an answer there that another message follows.
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
        """Return text to append to a user's message that results follow; None where ms-swift refuses that."""
        if self.after_user is None or self.version < 4:
            return None
        joined = self._joined(results, self.result_joiner if self.after_user_joiner is None else self.after_user_joiner)
        user_start = prompt.split("{content}", maxsplit=1)[0]
        return fill(self.after_user, results=joined, separator=separator, user_start=user_start)

    def _joined(self, results: Sequence[str], joiner: str) -> str:
        joined = joiner.join(fill_from(self.result, _RESULT_FIELDS, each) for each in results)
        return fill(self.results_within, results=joined)


# ms-swift's names that have no texts here: languages of their own, of models that are not supported.
NOT_SUPPORTED = (
    "gemma4", "hy_v3", "hy_v3_preview", "kimi_k25", "kimi_k3", "minicpm5", "minimax_m2", "minimax_m3", "seed_oss",
)  # fmt: skip

# Version 3 has two templates under other names than version 4.
_NAMES_IN_3 = {"glm4": "chatglm4", "glm4_0414": "glm4"}


def agent_names(version: int) -> dict[str, str]:
    """Return the names that a version of ms-swift has, each with the name of its entry."""
    names = {name: name for name, written in read_table("agents").items() if version >= written.get("since", 3)}
    return names if version >= 4 else names | _NAMES_IN_3


@cache
def agent_template(name: str, version: int) -> AgentTemplate:
    """Return an agent template of ms-swift's version 3 or 4.

    Raises:
        MegatuneError: the version has none of this name, or it is not supported.
    """
    names = agent_names(version)
    if name in names:
        texts = entry_of("agents", names[name], in_3=version < 4)
        texts.pop("since", None)
        return AgentTemplate(**texts, version=version)
    if name in NOT_SUPPORTED:
        what = f"agent template {name} is not supported"
    else:
        what = f"ms-swift {version} has no agent template {name!r}"
    near = closest(name, names, cutoff=0)
    fix = f"take {near}, the nearest that is supported, or another of: {', '.join(sorted(names))}"
    raise MegatuneError(Finding(what, fix=fix), ExitCode.SETTINGS)
