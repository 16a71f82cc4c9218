"""Jinja as Transformers' chat templates see it, in the sandbox that keeps a template from Python's objects.

The sandbox does not keep it from nested loops, or from texts as large as the memory: `rendering` bounds these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SIZE = 2**26  # characters of what is rendered
MOST_SOURCE = 2**20  # characters of a template; the longest published ones have 20,000

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


class RenderLimitError(TemplateError):
    """A rendering that would take more time or memory than any conversation needs."""


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: notes where an answer is written."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration
    pieces: list[str]  # that the present rendering has written
    spans: list[Span]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text, start = caller(), sum(map(len, self.pieces))
        self.spans.append((start, start + len(text)))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item; at once where it can only be an item, as of messages."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


_OF_DICTS = frozenset(dir(dict))


def _refuse(message: object) -> None:
    raise TemplateError(str(message))  # it may be an object of Jinja's


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON without HTML's escapes, which Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_environment = lru_cache(maxsize=1)(_Environment)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    template: Template = _environment().from_string(source)
    return template


def render_marked(source: str, chat: Chat, tools: Tools | None = None, **given: Any) -> tuple[str, list[Span]]:
    """Render a chat template, and return the spans between {% generation %} and its end, too. Not for several threads.

    Args:
        given: what else the template may read, such as special tokens and add_generation_prompt.

    Raises:
        RenderLimitError: it takes too much memory.
        Exception: what the template raises; see `template_errors`.
    """
    if len(source) > MOST_SOURCE:
        raise RenderLimitError(f"it has {len(source):,} characters, and at most {MOST_SOURCE:,} are read")
    options = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": False, **given}
    marks: Any = _environment().extensions[_Generation.identifier]
    marks.pieces, marks.spans = [], []
    try:
        for piece in _compiled(source).generate(options):
            marks.pieces.append(piece)
        if sum(map(len, marks.pieces)) > MOST_SIZE:
            raise RenderLimitError(f"it writes more than {MOST_SIZE:,} characters")
        return "".join(marks.pieces), marks.spans
    except MemoryError:
        marks.pieces.clear()
        raise RenderLimitError("it takes more memory than any conversation needs") from None


def template_errors() -> tuple[type[Exception], ...]:
    """Return what rendering a chat template can raise: its own refusal, or a fault in it."""
    return (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
