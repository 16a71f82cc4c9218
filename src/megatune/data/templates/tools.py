"""Formats of tools: how they are offered in the system message, and how calls of them are written, from tools.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megatune.data.bad_rows import RowError
from megatune.data.conversation import ToolCall
from megatune.data.templates.entries import entry_of
from megatune.data.templates.tool_texts import Tool, ToolTexts, call_id, fill

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
